"""The proof that a step runs over ranks as planned, read from live objects before the first step.

transformers and accelerate can leave out an engine without a warning, so neither arguments nor config count here: only
the wrapped model's class, and the bytes of weights that each rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sft_play.errors import TrainingError
from sft_play.planner.layout import Layout
from sft_play.planner.plan import Plan
from sft_play.training.ranks.distributed import of_all, world_size
from sft_play.training.ranks.engines import is_deepspeed, local, masters, zero_stage
from sft_play.units import MIB

SHARD_SLACK = 0.10
"""How much more than its share of the bytes a rank may hold: uneven parts are padded."""


@dataclass(frozen=True)
class Held:
    """Bytes of some weights: whole, and what this rank holds of them. `device` counts those on the device that
    computes; the rest is offloaded to RAM."""

    whole: int
    here: int
    device: int


@dataclass(frozen=True)
class EngineCheck:
    """What an engine did with the model, read from live objects; bytes are what each rank holds.

    `frozen_*` are the weights that do not train, as they are stored (NF4's packed bytes, without its constants);
    `frozen_device_bytes_by_rank` leaves out what is offloaded to RAM.
    """

    layout: str
    wrapped_class: str
    ranks: int
    whole_bytes: int
    bytes_by_rank: tuple[int, ...]
    frozen_whole_bytes: int = 0
    frozen_bytes_by_rank: tuple[int, ...] = ()
    frozen_device_bytes_by_rank: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """`engine_proof` of the JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """The proof in words."""
        line = (
            f"Engine: {self.layout} proved: the model is a {self.wrapped_class} over {self.ranks} ranks; trained "
            f"weights and their states per rank: {_mib(self.bytes_by_rank)} of {_mib([self.whole_bytes])} MiB"
        )
        if self.frozen_whole_bytes:
            line += f"; frozen weights: {_mib(self.frozen_bytes_by_rank)} of {_mib([self.frozen_whole_bytes])} MiB"
        if self.frozen_device_bytes_by_rank != self.frozen_bytes_by_rank:
            line += f", {_mib(self.frozen_device_bytes_by_rank)} of them not in RAM"
        return line


def _mib(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / MIB:.1f}" for size in sizes)


def check_engine(trainer: Any, plan: Plan) -> EngineCheck:
    """The proof that the wrapped model is what the plan says.

    Raises:
        TrainingError: it is not.
    """
    layout = plan.choice.layout
    wrapped = trainer.model_wrapped
    names = {kind.__name__ for kind in type(wrapped).__mro__}
    wanted = "DeepSpeedEngine" if layout.is_zero else "FSDPModule" if layout.is_fsdp else "DistributedDataParallel"
    if wanted not in names:
        raise TrainingError(
            f"the plan says {layout.name}, but the wrapped model is a {type(wrapped).__name__}, not a {wanted}: the "
            "engine was left out; nothing was trained"
        )
    stage = zero_stage(wrapped)
    if layout.is_zero and stage != int(layout.name[4]):  # zeroN, zeroN_offload
        raise TrainingError(f"the plan says {layout.name}, but DeepSpeed runs stage {stage}; nothing was trained")
    whole, mine = held_bytes(trainer)
    frozen, kept_whole = frozen_bytes(wrapped)
    sizes, frozen_sizes = of_all(mine), of_all((frozen.here, frozen.device))
    engine_check = EngineCheck(
        layout.name, type(wrapped).__name__, world_size(), whole, tuple(sizes), frozen.whole,
        tuple(here for here, _ in frozen_sizes), tuple(device for _, device in frozen_sizes),
    )  # fmt: skip
    trained_alike, frozen_alike = (_alike_over_tp(wrapped, trains) for trains in (True, False))
    expected = _share(whole, trained_alike, layout) if layout.shards_states else whole
    _refuse_undivided(layout, "trained", whole, sizes, share=expected)
    cut = [size - kept_whole for size in engine_check.frozen_bytes_by_rank]
    expected = _share(frozen.whole - kept_whole, frozen_alike, layout) if layout.shards_params else frozen.whole
    _refuse_undivided(layout, "frozen", frozen.whole - kept_whole, cut, share=expected)
    return engine_check


def _share(whole: int, alike: int, layout: Layout) -> float:
    """A rank's share of `whole` bytes, of which every rank of a tensor-parallel group has `alike`."""
    return (alike + (whole - alike) / layout.tensor_parallel) / layout.shard


def _alike_over_tp(wrapped: Any, trains: bool) -> int:
    """Bytes of weights that every rank of a tensor-parallel group has: embedding, head and norms; 0 without one."""
    from torch.distributed.tensor import DTensor

    replicated = 0
    for parameter in wrapped.parameters():
        if parameter.requires_grad is trains and isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                replicated += parameter.nbytes
    return replicated


def _refuse_undivided(layout: Layout, what: str, whole: int, sizes: Sequence[int], *, share: float) -> None:
    """Raises TrainingError where a rank holds more than its share of `whole` bytes, or everything is on every rank of a
    tensor-parallel group."""
    if layout.tensor_parallel > 1 and whole and share >= whole / layout.shard:
        share = 0.0  # nothing was divided along the axis: any bytes are too many
    # the fixed part is for small models, where padding alone is more than the slack
    if max(sizes) > share * (1 + SHARD_SLACK) + 4096 * world_size():
        raise TrainingError(
            f"the plan says {layout.name} over {layout.shard * layout.tensor_parallel} ranks, but a rank holds "
            f"{max(sizes):,} of {whole:,} bytes of {what} weights: they are not divided; nothing was trained"
        )


def engine_check_of_one(trainer: Any) -> EngineCheck:
    """The check of one process without an engine: it holds everything."""
    whole, mine = held_bytes(trainer)
    return EngineCheck("single", type(trainer.model_wrapped).__name__, 1, whole, (mine,))


def held_bytes(trainer: Any) -> tuple[int, int]:
    """Bytes of the trained weights, whole and on this rank; under DeepSpeed of the fp32 partitions of them, which its
    optimizer updates."""
    wrapped = trainer.model_wrapped
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if is_deepspeed(wrapped):
        whole = 4 * sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)
        return whole, sum(4 * group.numel() for group in masters(wrapped))
    return sum(parameter.nbytes for parameter in trained), sum(local(parameter).nbytes for parameter in trained)


def frozen_bytes(wrapped: Any) -> tuple[Held, int]:
    """The weights that do not train, and how many bytes of them DeepSpeed keeps whole on every rank on purpose (those
    up to `stage3_param_persistence_threshold`)."""
    whole = here = device = persistent = 0
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            continue
        width = parameter.element_size()
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3 has divided it: the parameter itself is empty between its uses
            size = width * parameter.ds_numel
            part = width * parameter.ds_tensor.numel()
            if parameter.ds_persist:
                part = size
                persistent += size
            on_device = parameter.ds_persist or parameter.ds_tensor.device.type == wrapped.device.type
        else:
            size, part, on_device = width * parameter.numel(), width * local(parameter).numel(), True
        whole, here, device = whole + size, here + part, device + (part if on_device else 0)
    return Held(whole, here, device), persistent
