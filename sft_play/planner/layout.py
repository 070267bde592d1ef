"""How a run is distributed over GPUs: the layouts, what each shards and gathers; and a user's mesh
(`model.mesh_shape`) as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.planner.batching import BatchPlan
from sft_play.planner.precision import WeightUpdates

# `model.mesh_shape`: a user's device mesh, read as the layout that it describes.

# The axes of a mesh; order and case are free, and an axis of size 1 changes nothing.
MESH_AXES = {
    "dp": "data parallel copies",
    "fsdp": "FSDP2 shards",
    "tp": "tensor parallel parts",
    "cp": "parts of a row",
}
# Names of sizes given without any.
DEFAULT_AXES = ("fsdp", "tp")


@dataclass(frozen=True)
class Mesh:
    """How many processes each axis has."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Processes, one per GPU."""
        return self.dp * self.fsdp * self.tp * self.cp

    @property
    def data_parallel_ranks(self) -> int:
        """Data-parallel ranks: processes that see their own rows."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        # axes of one process are left out, as a user would write it
        used_axes = {name: size for name in MESH_AXES if (size := getattr(self, name)) > 1} or {"fsdp": 1}
        return f"[[{', '.join(map(str, used_axes.values()))}], [{', '.join(used_axes)}]]"


def parse_mesh(mesh_shape: Any) -> Mesh | None:
    """The mesh that `model.mesh_shape` gives; None where it is null. Raises ConfigError where no engine builds it."""
    if mesh_shape is None:
        return None
    sizes, names = _split_mesh_shape(mesh_shape)
    if not sizes or min(sizes) < 1 or len(names) != len(sizes):
        raise _mesh_error(mesh_shape, f"{len(sizes)} sizes, which must be whole numbers from 1, and {len(names)} names")
    if set(names) - set(MESH_AXES) or len(set(names)) < len(names):
        raise _mesh_error(mesh_shape, "unknown axis, or one that is named twice")
    mesh = Mesh(**dict(zip(names, sizes, strict=True)))
    if mesh.tp > 1 and mesh.cp > 1:
        raise _mesh_error(
            mesh_shape, "tp and cp cannot be combined", f"use {Mesh(mesh.dp, mesh.fsdp, 1, mesh.cp * mesh.tp)}"
        )
    if mesh.dp > 1 and mesh.fsdp == 1 and mesh.tp * mesh.cp > 1:
        alternative = Mesh(1, mesh.dp, mesh.tp, mesh.cp)
        raise _mesh_error(
            mesh_shape, "DDP cannot be combined with tp or cp", f"use {alternative}: the same rows, less memory"
        )
    return mesh


def _split_mesh_shape(mesh_shape: Any) -> tuple[list[int], list[str]]:
    if isinstance(mesh_shape, int):
        mesh_shape = (mesh_shape,)
    parts = list(mesh_shape)
    # [[2, 4], [fsdp, tp]]; a list of two numbers has no names
    if len(parts) == 2 and all(isinstance(part, Sequence) for part in parts):
        return list(parts[0]), [str(name).strip().lower() for name in parts[1]]
    if len(parts) > len(DEFAULT_AXES):
        raise _mesh_error(mesh_shape, f"{len(parts)} sizes without names")
    return parts, list(DEFAULT_AXES[: len(parts)])


def _mesh_error(mesh_shape: Any, problem: str, remedy: str = "") -> ConfigError:
    axes_text = ", ".join(f"{name} ({meaning})" for name, meaning in MESH_AXES.items())
    remedy = remedy or f"use sizes and names, such as [[2, 4], [fsdp, tp]], of {axes_text}; null lets the plan choose"
    return ConfigError(f"model.mesh_shape={format_mesh(mesh_shape)}: {problem}; {remedy}")


def format_mesh(mesh_shape: Any) -> str:
    """A mesh as written in YAML."""
    if isinstance(mesh_shape, list | tuple):
        return f"[{', '.join(format_mesh(part) for part in mesh_shape)}]"
    return one_line(str(mesh_shape))


# --------------------------------------------------------------------------------------------------
# How a run is distributed over GPUs: the layouts, and what each shards, gathers and sends.

LayoutName = Literal[
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "tp",
    "fsdp_tp", "fsdp_cp",
]  # fmt: skip

LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)
# The order of preference among layouts that are equally fast: fewer moving parts first.
LAYOUT_PREFERENCE: tuple[LayoutName, ...] = (
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "tp", "fsdp_tp", "fsdp_cp",
    "zero2_offload", "zero3_offload",
)  # fmt: skip
# Layouts whose engine can also run with one rank.
ONE_RANK_LAYOUTS: tuple[LayoutName, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")

DEEPSPEED_LAYOUTS: tuple[LayoutName, ...] = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def layout_choices(ranks: int) -> tuple[LayoutName, ...]:
    """The layouts to choose from over this many ranks: for one rank it is `single`."""
    return tuple(name for name in LAYOUT_NAMES if name != "single" or ranks == 1)


@dataclass(frozen=True)
class Layout:
    """One way to distribute a run over `data_parallel` x `tensor_parallel` x `context_parallel` ranks. `data_parallel`
    ranks see their own rows. `shard` is the number of ranks over which a sharded layout divides its states
    (`fsdp_hybrid`: those of one node, or `distributed.shard_ranks`); in a tensor-parallel layout, what
    `tensor_parallel` leaves to a rank is divided."""

    name: LayoutName
    data_parallel: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    """Ranks that share the tokens of a row."""
    keeps_params: bool = False
    """`zero3_offload` with weights on the GPUs and only the optimizer states in RAM, as a DeepSpeed file may ask
    for."""

    @property
    def ranks(self) -> int:
        """Processes, one per GPU."""
        return self.data_parallel * self.tensor_parallel * self.context_parallel

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are reduced: those with rows, or parts of rows, of their own."""
        return self.data_parallel * self.context_parallel

    @property
    def shards_params(self) -> bool:
        """Whether a rank holds only its shard of the weights between steps (FSDP2, ZeRO-3)."""
        return self.is_fsdp or self.name in ("zero3", "zero3_offload")

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its shard of the gradients."""
        return self.shards_params or self.name in ("zero2", "zero2_offload")

    @property
    def shards_states(self) -> bool:
        """Whether a rank keeps only its shard of the optimizer states."""
        return self.shards_gradients or self.name == "zero1"

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed runs it."""
        return self.name.startswith("zero")

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 (`fully_shard`) runs it: `tp` too, with one shard, for its fp32 copies of what trains."""
        return self.name.startswith("fsdp") or self.name == "tp"

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states and fp32 master weights stay in the host's RAM."""
        return self.name.endswith("_offload")

    @property
    def offloads_params(self) -> bool:
        """Whether the weights stay in the host's RAM too."""
        return self.name == "zero3_offload" and not self.keeps_params


SINGLE = Layout("single")


@dataclass(frozen=True)
class PreviousRun:
    """How a run was distributed when it was stopped: its layout and its batch. `processes` are all of its ranks,
    including those that share rows; `updates` is how they reached its weights, where the layout's engine does not
    decide that."""

    layout: LayoutName
    batch: BatchPlan
    processes: int = 0
    updates: WeightUpdates | None = None
    has_trained: bool = True
    """Whether there is anything to continue; a run without a trained step keeps none of this."""
    oom_micro_batch: int | None = None
    """The smallest micro-batch that has run out of memory; None where none has."""

    def __post_init__(self) -> None:
        # 0: the run's manifest does not say, and then every rank had rows of its own
        object.__setattr__(self, "processes", self.processes or self.batch.ranks)

    def kept_layout(self, processes: int) -> LayoutName | None:
        """The layout that the run keeps over this many processes; None where any may be taken: DeepSpeed's checkpoints
        are read by the same layout only, those of the others by any, over any number of ranks."""
        has_same_ranks = self.processes == processes
        return self.layout if has_same_ranks or self.layout in DEEPSPEED_LAYOUTS else None

    def resume_obstacle(self, layout: LayoutName) -> str | None:
        """Why the run's checkpoint cannot be resumed in another layout; None where it can, over any number of ranks:
        one process, DDP and FSDP read each other's checkpoints, DeepSpeed's shards are of its layout."""
        if not self.has_trained or self.layout == layout:
            return None
        deepspeed_layouts = [name for name in (self.layout, layout) if name in DEEPSPEED_LAYOUTS]
        if not deepspeed_layouts:
            return None
        return (
            f"it was stopped under {self.layout}, and is now {layout}: DeepSpeed's checkpoints "
            f"({deepspeed_layouts[0]}) are resumed "
            "only in their own layout (over any number of ranks)"
        )


def mesh_layout(mesh: Mesh) -> Layout:
    """The layout that a mesh is."""
    if mesh.ranks == 1:
        return SINGLE
    if mesh.cp > 1:
        return Layout("fsdp_cp", mesh.data_parallel_ranks, mesh.fsdp * mesh.cp, context_parallel=mesh.cp)
    if mesh.tp > 1:
        return Layout("fsdp_tp" if mesh.fsdp > 1 else "tp", mesh.data_parallel_ranks, mesh.fsdp, mesh.tp)
    if mesh.fsdp == 1:
        return Layout("ddp", mesh.dp)
    return Layout("fsdp_hybrid" if mesh.dp > 1 else "fsdp", mesh.data_parallel_ranks, mesh.fsdp)
