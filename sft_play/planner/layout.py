"""How a run is distributed over GPUs: the layouts, what each shards and gathers; and a user's mesh
(`model.mesh_shape`) as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sft_play.config.schema import BITSANDBYTES_OPTIMIZERS, RunConfig
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.models.families import TENSOR_PARALLEL_TYPES
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import BatchPlan
from sft_play.planner.precision import (
    UNSHARDED_LAYOUTS,
    WeightUpdates,
    choose_precision,
    gradient_sync_obstacle,
)

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
        used_axes = {name: size for name in MESH_AXES if (size := getattr(self, name)) > 1} or {
            "fsdp": 1
        }
        return f"[[{', '.join(map(str, used_axes.values()))}], [{', '.join(used_axes)}]]"


def parse_mesh(mesh_shape: Any) -> Mesh | None:
    """The mesh that `model.mesh_shape` gives; None where it is null. Raises ConfigError where no
    engine builds it."""
    if mesh_shape is None:
        return None
    parts: list[Any] = [mesh_shape] if isinstance(mesh_shape, int) else list(mesh_shape)
    # [[2, 4], [fsdp, tp]]; a list of two numbers has no names
    if len(parts) == 2 and all(isinstance(part, Sequence) for part in parts):
        sizes, names = list(parts[0]), [str(name).strip().lower() for name in parts[1]]
    elif len(parts) > len(DEFAULT_AXES):
        raise _mesh_error(mesh_shape, f"{len(parts)} sizes without names")
    else:
        sizes, names = parts, list(DEFAULT_AXES[: len(parts)])
    if not sizes or min(sizes) < 1 or len(names) != len(sizes):
        raise _mesh_error(
            mesh_shape,
            f"{len(sizes)} sizes, which must be whole numbers from 1, and {len(names)} names",
        )
    if set(names) - set(MESH_AXES) or len(set(names)) < len(names):
        raise _mesh_error(mesh_shape, "unknown axis, or one that is named twice")
    mesh = Mesh(**dict(zip(names, sizes, strict=True)))
    if mesh.tp > 1 and mesh.cp > 1:
        raise _mesh_error(
            mesh_shape,
            "tp and cp cannot be combined",
            f"use {Mesh(mesh.dp, mesh.fsdp, 1, mesh.cp * mesh.tp)}",
        )
    if mesh.dp > 1 and mesh.fsdp == 1 and mesh.tp * mesh.cp > 1:
        raise _mesh_error(
            mesh_shape,
            "DDP cannot be combined with tp or cp",
            f"use {Mesh(1, mesh.dp, mesh.tp, mesh.cp)}: the same rows, less memory",
        )
    return mesh


def _mesh_error(mesh_shape: Any, problem: str, remedy: str = "") -> ConfigError:
    axes_text = ", ".join(f"{name} ({meaning})" for name, meaning in MESH_AXES.items())
    remedy = remedy or (
        f"use sizes and names, such as [[2, 4], [fsdp, tp]], of {axes_text}; null lets the plan "
        "choose"
    )
    return ConfigError(f"model.mesh_shape={format_mesh(mesh_shape)}: {problem}; {remedy}")


def format_mesh(mesh_shape: Any) -> str:
    """A mesh as written in YAML."""
    if isinstance(mesh_shape, list | tuple):
        return f"[{', '.join(format_mesh(part) for part in mesh_shape)}]"
    return one_line(str(mesh_shape))


# --------------------------------------------------------------------------------------------------
# How a run is distributed over GPUs: the layouts, and what each shards, gathers and sends.

LayoutName = Literal[
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "zero2_offload",
    "zero3_offload", "tp", "fsdp_tp", "fsdp_cp", "streamed",
]  # fmt: skip

LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)
# The order of preference among layouts that are equally fast: fewer moving parts first.
LAYOUT_PREFERENCE: tuple[LayoutName, ...] = (
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "tp", "fsdp_tp", "fsdp_cp",
    "streamed", "zero2_offload", "zero3_offload",
)  # fmt: skip
# Layouts whose engine can also run with one rank.
ONE_RANK_LAYOUTS: tuple[LayoutName, ...] = (
    "ddp",
    "fsdp",
    "zero1",
    "zero2",
    "zero3",
    "zero2_offload",
    "zero3_offload",
    "streamed",
)

# Layouts that one process trains in without an engine around the model.
ONE_PROCESS_LAYOUTS: tuple[LayoutName, ...] = ("single", "streamed")

DEEPSPEED_LAYOUTS: tuple[LayoutName, ...] = (
    "zero1",
    "zero2",
    "zero3",
    "zero2_offload",
    "zero3_offload",
)


def layout_choices(ranks: int) -> tuple[LayoutName, ...]:
    """The layouts to choose from over this many ranks: for one rank it is `single`."""
    return tuple(name for name in LAYOUT_NAMES if name != "single" or ranks == 1)


@dataclass(frozen=True)
class Layout:
    """One way to distribute a run over `data_parallel` x `tensor_parallel` x `context_parallel`
    ranks. `data_parallel` ranks see their own rows. `shard` is the number of ranks over which a
    sharded layout divides its states (`fsdp_hybrid`: the ranks of one node, or
    `distributed.shard_ranks`); in a tensor-parallel layout, what `tensor_parallel` leaves to a rank
    is divided.
    """

    name: LayoutName
    data_parallel: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    # Ranks that share the tokens of a row.
    context_parallel: int = 1
    # `zero3_offload` with weights on the GPUs and only the optimizer states in RAM, as a DeepSpeed
    # file may ask for.
    keeps_params: bool = False

    @property
    def ranks(self) -> int:
        """Processes, one per GPU."""
        return self.data_parallel * self.tensor_parallel * self.context_parallel

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are reduced: those with rows, or parts of rows, of their
        own."""
        return self.data_parallel * self.context_parallel

    @property
    def shards_params(self) -> bool:
        """True if a rank holds only its shard of the weights between steps (FSDP2, ZeRO-3)."""
        return self.is_fsdp or self.name in ("zero3", "zero3_offload")

    @property
    def shards_gradients(self) -> bool:
        """True if a rank keeps only its shard of the gradients."""
        return self.shards_params or self.name in ("zero2", "zero2_offload")

    @property
    def shards_states(self) -> bool:
        """True if a rank keeps only its shard of the optimizer states."""
        return self.shards_gradients or self.name == "zero1"

    @property
    def is_zero(self) -> bool:
        """True if DeepSpeed runs it."""
        return self.name.startswith("zero")

    @property
    def is_fsdp(self) -> bool:
        """True if FSDP2 (`fully_shard`) runs it: `tp` too, with one shard, for its fp32 copies of
        what trains."""
        return self.name.startswith("fsdp") or self.name == "tp"

    @property
    def is_one_process(self) -> bool:
        """True if one process trains without an engine around the model."""
        return self.name in ONE_PROCESS_LAYOUTS and self.ranks == 1

    @property
    def is_streamed(self) -> bool:
        """True if the frozen base stays in RAM, and its blocks visit each rank's GPU in turn."""
        return self.name == "streamed"

    @property
    def offloads_states(self) -> bool:
        """True if optimizer states and fp32 master weights stay in the host's RAM."""
        return self.name.endswith("_offload")

    @property
    def offloads_params(self) -> bool:
        """True if the weights stay in the host's RAM too."""
        return self.name == "zero3_offload" and not self.keeps_params


SINGLE = Layout("single")


@dataclass(frozen=True)
class PreviousRun:
    """How a run was distributed when it was stopped: its layout and its batch. `processes` are all
    of its ranks, including those that share rows; `updates` is how they reached its weights, where
    the layout's engine does not decide that."""

    layout: LayoutName
    batch: BatchPlan
    processes: int = 0
    updates: WeightUpdates | None = None
    # Whether there is anything to continue; a run without a trained step keeps none of this.
    has_trained: bool = True
    # The smallest micro-batch that has run out of memory; None where none has.
    oom_micro_batch: int | None = None
    # Whether its blocks were compiled.
    compiled: bool = False

    def __post_init__(self) -> None:
        # 0: the run's manifest does not say, and then every rank had rows of its own
        object.__setattr__(self, "processes", self.processes or self.batch.ranks)

    def kept_layout(self, processes: int) -> LayoutName | None:
        """The layout that the run keeps over this many processes; None if any may be taken.
        DeepSpeed's checkpoints are read by the same layout only, the others by any layout, over any
        number of ranks."""
        return (
            self.layout if self.processes == processes or self.layout in DEEPSPEED_LAYOUTS else None
        )

    def resume_obstacle(self, layout: LayoutName) -> str | None:
        """Why the run's checkpoint cannot be resumed in another layout; None where it can, over any
        number of ranks: one process, DDP and FSDP read each other's checkpoints, DeepSpeed's shards
        are of its layout.
        """
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
        return Layout(
            "fsdp_cp", mesh.data_parallel_ranks, mesh.fsdp * mesh.cp, context_parallel=mesh.cp
        )
    if mesh.tp > 1:
        return Layout(
            "fsdp_tp" if mesh.fsdp > 1 else "tp", mesh.data_parallel_ranks, mesh.fsdp, mesh.tp
        )
    if mesh.fsdp == 1:
        return Layout("ddp", mesh.dp)
    return Layout("fsdp_hybrid" if mesh.dp > 1 else "fsdp", mesh.data_parallel_ranks, mesh.fsdp)


# --------------------------------------------------------------------------------------------------
# The layouts that could run a job on a machine, and why others could not.

# Sizes of tensor- or context-parallel groups that the plan tries by itself.
GROUP_SIZES = (2, 4, 8)


# Layouts that run rows with images.
IMAGE_LAYOUTS: tuple[LayoutName, ...] = ("single", "ddp", "fsdp", "zero2", "zero3")
# Of them those in which parts for images train.
TRAINED_VISION_LAYOUTS: tuple[LayoutName, ...] = ("single", "ddp")

# Classes whose blocks are more than their own weights at their own place.
UNSTREAMED_TYPES = {
    "rwkv": "weights are divided in place between training and evaluation",
    "zamba": "blocks share weights, which would have no place of one block",
    "zamba2": "blocks share weights, which would have no place of one block",
}


@dataclass(frozen=True)
class ImpossibleLayout:
    """A layout that the libraries cannot run for this job, and why."""

    name: LayoutName
    because: str


def find_layouts(
    config: RunConfig, shape: ModelShape, hardware: Hardware, *, named: LayoutName | None = None
) -> tuple[tuple[Layout, ...], tuple[ImpossibleLayout, ...]]:
    """Every layout that could run the job on all GPUs of the machine, and those that could not,
    with the reason; with a user's mesh, only that one. On one GPU a layout for several that is
    `named` is tried too. Raises ConfigError where the mesh is invalid, is of another number of
    processes, or cannot run the job."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is not None:
        option_text = f"model.mesh_shape={format_mesh(config.model.mesh_shape)}"
        if mesh.ranks != hardware.ranks:
            needed, present = (
                f"{n} process{'es' if n > 1 else ''}" for n in (mesh.ranks, hardware.ranks)
            )
            raise ConfigError(
                f"{option_text} is a mesh of {needed}, and this is a run of {present}: start"
                f" {mesh.ranks}, one for each GPU (make train-distributed, NPROC= of each node), or"
                f" give a mesh of {hardware.ranks}"
            )
        layout = mesh_layout(mesh)
        obstacle = _layout_obstacle(layout, config, shape, hardware)
        if obstacle is not None:
            raise ConfigError(
                f"{option_text} cannot run this job: {obstacle}; use"
                f" {Mesh(mesh.dp, mesh.fsdp * mesh.tp * mesh.cp)}, or null to let the plan choose"
            )
        return (layout,), ()
    possible_layouts: list[Layout] = []
    impossible: list[ImpossibleLayout] = []
    tried_layouts = _layouts_to_try(config, hardware)
    if hardware.ranks == 1 and named in ONE_RANK_LAYOUTS:
        tried_layouts = [Layout(named), *tried_layouts]
    elif named == "streamed" and not hardware.gpus:
        tried_layouts.append(Layout(named, hardware.ranks))
    if named == "fsdp_cp":
        tried_layouts += _all_context_parallel_layouts(hardware)
    for layout in tried_layouts:
        obstacle = _layout_obstacle(layout, config, shape, hardware)
        if obstacle is None:
            possible_layouts.append(layout)
        elif not any(item.name == layout.name for item in impossible):
            # of several group sizes the first says why
            impossible.append(ImpossibleLayout(layout.name, obstacle))
    # a name that works with one group size is not impossible because it does not with another
    possible_names = {layout.name for layout in possible_layouts}
    return tuple(possible_layouts), tuple(
        item for item in impossible if item.name not in possible_names
    )


def context_parallel_layouts(
    config: RunConfig, shape: ModelShape, hardware: Hardware
) -> tuple[Layout, ...]:
    """The layouts that also divide the tokens of each row, for rows that are too long for a GPU."""
    return tuple(
        layout
        for layout in _all_context_parallel_layouts(hardware)
        if _layout_obstacle(layout, config, shape, hardware) is None
    )


def _all_context_parallel_layouts(hardware: Hardware) -> list[Layout]:
    # its all-to-alls are in every attention layer, so ranks that share a row are in one node
    ranks = hardware.ranks
    return [
        Layout("fsdp_cp", ranks // size, ranks, context_parallel=size)
        for size in _group_sizes(hardware)
    ]


def _group_sizes(hardware: Hardware) -> list[int]:
    # of ranks in one node, into which all ranks divide
    return [
        size
        for size in GROUP_SIZES
        if size <= hardware.ranks_per_node and hardware.ranks % size == 0
    ]


def _layouts_to_try(config: RunConfig, hardware: Hardware) -> list[Layout]:
    ranks, shard_option = hardware.ranks, config.distributed.shard_ranks
    offload_layouts = [Layout("zero2_offload", ranks, ranks), Layout("zero3_offload", ranks, ranks)]
    if hardware.gpus and config.tuning.mode != "full":
        offload_layouts.insert(0, Layout("streamed", ranks))
    if ranks == 1:  # on one CPU process offload would only copy RAM to RAM
        return [SINGLE, *(offload_layouts if hardware.gpus else [])]
    layouts = [Layout("ddp", ranks), Layout("fsdp", ranks, ranks)]
    shard = hardware.ranks_per_node if shard_option == "auto" else shard_option
    if shard_option != "auto" and ranks % shard:
        raise ConfigError(
            f"distributed.shard_ranks={shard} does not divide {ranks} ranks into equal groups"
        )
    # one shard group would be fsdp, groups of one rank ddp
    if 1 < shard < ranks and ranks % shard == 0:
        layouts.append(Layout("fsdp_hybrid", ranks, shard))
    layouts += [Layout(name, ranks, ranks) for name in ("zero1", "zero2", "zero3")]
    # its all-reduces are in every block, so tensor parallelism stays inside a node
    for size in _group_sizes(hardware):
        shards = ranks // size
        layouts.append(Layout("fsdp_tp" if shards > 1 else "tp", shards, shards, size))
    return layouts + offload_layouts


def compile_obstacle(layout: Layout) -> str | None:
    """Why blocks are not compiled in a layout; None where they can be."""
    if layout.is_zero:
        return "ZeRO's hooks in every submodule would break a compiled block; fsdp shards the same"
    if layout.is_streamed:
        return "a block's weights arrive when it is called, which compiled code would not wait for"
    if layout.tensor_parallel > 1 or layout.context_parallel > 1:
        return f"ranks of {layout.name} exchange inside each block, which was not tried compiled"
    return None


def _layout_obstacle(
    layout: Layout, config: RunConfig, shape: ModelShape, hardware: Hardware
) -> str | None:
    optim = config.train.optim
    if config.tuning.trains_vision_parts and layout.name not in TRAINED_VISION_LAYOUTS:
        return (
            "tuning.train_vision and tuning.lora.projector: ranks without a picture would wait for"
            f" the others ({', '.join(TRAINED_VISION_LAYOUTS)} do not)"
        )
    if shape.vision is not None and layout.name not in IMAGE_LAYOUTS:
        return f"rows with images: {_image_layout_problem(layout)} ({', '.join(IMAGE_LAYOUTS)} do)"
    if layout.is_streamed and config.tuning.mode == "full":
        return (
            "the base stays in RAM and nothing is written back, and full fine-tuning changes it"
            " (zero3_offload does that)"
        )
    if layout.is_streamed and not shape.can_checkpoint:
        return f"transformers' class of {shape.model_type} has no blocks that it calls one by one"
    if layout.is_streamed and shape.model_type in UNSTREAMED_TYPES:
        return f"{shape.model_type}: {UNSTREAMED_TYPES[shape.model_type]}"
    # what the run asks for beside its optimizer
    if config.train.async_save and not (layout.is_fsdp and config.tuning.mode == "full"):
        return (
            "train.async_save: only FSDP2's ranks (fsdp), in full fine-tuning, write their parts"
            " beside the training"
        )
    if config.train.compile is True and (obstacle := compile_obstacle(layout)) is not None:
        return f"train.compile: {obstacle}"
    if (
        config.model.add_tokens
        and config.tuning.mode != "full"
        and layout.name not in ("single", "ddp")
    ):
        return (
            "model.add_tokens: PEFT trains rows of whole embeddings only, and they are divided"
            " here, cast or not tried (ddp works)"
        )
    lora, init_text = config.tuning.lora, f"tuning.lora.init={config.tuning.lora.init}"
    if config.tuning.mode != "full" and lora.init != "default":
        if layout.tensor_parallel > 1 or (
            lora.init == "loftq" and layout.shards_params and layout.is_zero
        ):
            return (
                f"{init_text}: whole 16-bit weights are read for it, and they are divided here"
                " (fsdp works)"
            )
        if layout.is_fsdp and lora.use_dora:
            return (
                f"{init_text}: DoRA's layers are divided only when training begins, where half of"
                " an adapter cannot be frozen"
            )
    # what the ranks divide of the model and of its rows
    if layout.tensor_parallel > 1 and (
        obstacle := _tensor_parallel_obstacle(layout, config, shape, hardware)
    ):
        return obstacle
    if layout.context_parallel > 1 and (
        obstacle := _context_parallel_obstacle(layout, config, shape)
    ):
        return obstacle
    # what the optimizer cannot do with divided or offloaded tensors
    if optim in BITSANDBYTES_OPTIMIZERS and (
        layout.is_fsdp or layout.is_zero or layout.tensor_parallel > 1
    ):
        return f"bitsandbytes' optimizers do not support sharded parameters (train.optim={optim})"
    if optim == "muon" and layout.name not in UNSHARDED_LAYOUTS:
        return (
            "train.optim=muon orthogonalises whole matrices, and they are divided here (ddp works)"
        )
    if optim == "adafactor" and (layout.is_zero or layout.tensor_parallel > 1):
        return "Adafactor needs whole rows and columns, which a partitioned tensor lacks"
    if layout.offloads_states and optim not in ("adamw_torch_fused", "adamw_torch"):
        return "DeepSpeed's CPU optimizer is AdamW"
    return gradient_sync_obstacle(
        config, choose_precision(config, hardware, shape), layout.name, on_gpu=bool(hardware.gpus)
    )


def _image_layout_problem(layout: Layout) -> str:
    if layout.is_streamed:
        return (
            "the class would call its blocks while the tower's pictures wait, which was not tried"
        )
    if layout.context_parallel > 1:
        return "a picture's tokens would lie on several ranks, and its features are on one"
    if layout.tensor_parallel > 1:
        return "the tower is not divided like the language model's layers"
    if layout.offloads_states:
        return "DeepSpeed would move a tower in and out that it does not own"
    return f"{layout.name} was not tried with them"


def _tensor_parallel_obstacle(
    layout: Layout, config: RunConfig, shape: ModelShape, hardware: Hardware
) -> str | None:
    ranks = layout.tensor_parallel
    if config.tuning.mode == "qlora":
        return "NF4 weights cannot be split over tensor-parallel ranks (tuning.mode=lora can)"
    if config.tuning.mode == "lora" and config.tuning.lora.use_dora:
        return "DoRA's magnitudes belong to whole layers"
    if shape.model_type not in TENSOR_PARALLEL_TYPES:
        return (
            f"transformers' plan of {shape.model_type} models does not split every layer of a block"
            " by heads"
        )
    if shape.num_kv_heads % ranks or shape.num_heads % ranks:
        return (
            f"{shape.num_heads} heads and {shape.num_kv_heads} key heads do not split over {ranks}"
            " ranks"
        )
    if shape.intermediate_size % ranks:
        return f"the MLP's width of {shape.intermediate_size} does not split over {ranks} ranks"
    # transformers' plan leaves each rank a part of the gradients, and GradScaler looks at this
    # rank's only
    if choose_precision(config, hardware, shape).compute == "float16":
        return "loss scaling in fp16 does not see overflows on the other ranks"
    return None


def _context_parallel_obstacle(layout: Layout, config: RunConfig, shape: ModelShape) -> str | None:
    """Each rank attends with some of the heads over the whole row (Ulysses,
    https://arxiv.org/abs/2309.14509)."""
    ranks, max_seq_len = layout.context_parallel, config.model.max_seq_len
    if shape.num_heads % ranks:
        return f"{shape.num_heads} heads do not split over {ranks} ranks"
    if shape.num_kv_heads % ranks and ranks % shape.num_kv_heads:
        return f"{shape.num_kv_heads} key heads do not split over {ranks} ranks"
    if config.data.packing != "none" and config.task_mode != "cpt":
        return "packed chats need a mask between them (data.packing=none)"
    if (
        config.model.attn_implementation not in ("auto", "sdpa")
        or shape.attention_softcap is not None
        or shape.has_attention_sinks
    ):
        return "it runs with sdpa attention only"
    if shape.uses_alibi:
        return "ALiBi's biases are a mask, and it has none"
    attention_kinds = {kind.attention for kind in shape.layers} - {"full"}
    if attention_kinds - {"sliding"} or (
        attention_kinds and (shape.window or max_seq_len) < max_seq_len
    ):
        return "every layer must attend to the whole row, but some see only a window or a state"
    return None
