"""How a run is spread over GPUs: the layouts there are, and what each shards, gathers and moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.architecture import ModelShape
from sft_play.facts.hardware import Hardware
from sft_play.plan.gradients import refusal
from sft_play.plan.precision import choose_precision

LayoutName = Literal[
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "tp", "fsdp_tp"
]


LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)
SIMPLICITY: tuple[LayoutName, ...] = (
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "tp", "fsdp_tp", "zero2_offload",
    "zero3_offload",
)  # fmt: skip
"""The order in which layouts that are equally fast are preferred: fewer moving parts first."""
BUILT: tuple[LayoutName, ...] = (
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload",
)  # fmt: skip
"""The layouts that this version can launch."""
ONE_RANK: tuple[LayoutName, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Those whose engine can be run with one rank."""
DEEPSPEED: tuple[LayoutName, ...] = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Those that DeepSpeed runs."""


@dataclass(frozen=True)
class Layout:
    """One way to spread a run: `data_parallel` x `tensor_parallel` ranks, parameters divided by `shard`.

    `shard` is the number of ranks that a sharded layout divides its states over (`fsdp_hybrid`: those of one node, or
    `distributed.shard_ranks`).
    """

    name: LayoutName
    data_parallel: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    keeps_params: bool = False
    """`zero3_offload` with weights on the GPUs and the optimizer states alone in RAM, as a DeepSpeed file may say."""

    @property
    def ranks(self) -> int:
        """Processes, one per GPU."""
        return self.data_parallel * self.tensor_parallel

    @property
    def shards_params(self) -> bool:
        """Whether a rank holds only its part of the weights between steps (FSDP2, ZeRO-3)."""
        return self.name in ("fsdp", "fsdp_hybrid", "fsdp_tp", "zero3", "zero3_offload")

    @property
    def shards_grads(self) -> bool:
        """Whether a rank keeps only its part of the gradients."""
        return self.shards_params or self.name in ("zero2", "zero2_offload")

    @property
    def shards_states(self) -> bool:
        """Whether a rank keeps only its part of the optimizer's states."""
        return self.shards_grads or self.name == "zero1"

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed runs it."""
        return self.name.startswith("zero")

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 (`fully_shard`) runs it."""
        return self.name.startswith("fsdp")

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
class Stopped:
    """How a run was spread when it was stopped: its layout, and micro-batch x accumulation x data-parallel ranks."""

    layout: LayoutName
    micro_batch: int
    grad_accum: int
    ranks: int

    @property
    def effective_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.grad_accum * self.ranks

    def cannot_become(self, layout: LayoutName, ranks: int) -> str | None:
        """Why the run's checkpoint cannot be resumed in another layout or over other ranks; None where it can.

        One process, DDP and FSDP write the same whole files. DeepSpeed writes each rank's part of its own layout, and
        its ZeRO optimizers read only as many parts as there are ranks.
        """
        if self.layout == layout and self.ranks == ranks:
            return None
        kept = [name for name in (self.layout, layout) if name in DEEPSPEED]
        if not kept:
            return None
        return (
            f"it was stopped under {self.layout} over {self.ranks} rank(s), and now is {layout} over {ranks}: "
            f"DeepSpeed's checkpoints ({kept[0]}) go on only in their own layout over as many ranks"
        )


@dataclass(frozen=True)
class NotPossible:
    """A layout that the libraries cannot run for this job, and why."""

    name: LayoutName
    because: str


def layouts_for(
    config: RunConfig, shape: ModelShape, hardware: Hardware, *, named: LayoutName | None = None
) -> tuple[tuple[Layout, ...], tuple[NotPossible, ...]]:
    """Every layout that could run the job on all GPUs of the machine, and those that could not with the reason.

    On one GPU a layout of several that is `named` is weighed too: an engine can be tried, and measured, with one rank.
    """
    count = hardware.ranks
    found: list[Layout] = []
    refused: list[NotPossible] = []
    thinkable, precision = _thinkable(config, hardware, count), choose_precision(config, hardware)
    if count == 1 and named in ONE_RANK:
        thinkable = [Layout(named), *thinkable]
    for layout in thinkable:
        because = _impossible(layout, config, shape) or refusal(
            config, precision, layout.name, on_gpu=bool(hardware.gpus)
        )
        if because is None:
            found.append(layout)
        elif not any(item.name == layout.name for item in refused):
            refused.append(NotPossible(layout.name, because))
    possible = {layout.name for layout in found}
    return tuple(found), tuple(item for item in refused if item.name not in possible)


def _thinkable(config: RunConfig, hardware: Hardware, count: int) -> list[Layout]:
    """The layouts of `count` GPUs, whatever the libraries can do."""
    offloads = (
        [Layout("zero2_offload", count, count), Layout("zero3_offload", count, count)]
        if hardware.gpus or count > 1
        else []
    )
    if count == 1:
        return [SINGLE, *offloads]
    inside = hardware.gpus_per_node
    found = [Layout("ddp", count), Layout("fsdp", count, count)]
    wanted = config.distributed.shard_ranks
    shard = inside if wanted == "auto" else wanted
    if wanted != "auto" and count % shard:
        raise ConfigError(f"distributed.shard_ranks={shard} does not divide {count} ranks into equal groups")
    if 1 < shard < count and count % shard == 0:
        found.append(Layout("fsdp_hybrid", count, shard))
    found += [Layout(name, count, count) for name in ("zero1", "zero2", "zero3")]
    for tensor in (2, 4, 8):
        if tensor > inside or count % tensor:
            continue
        rest = count // tensor
        found.append(Layout("tp", 1, 1, tensor) if rest == 1 else Layout("fsdp_tp", rest, rest, tensor))
    return found + offloads


def _impossible(layout: Layout, config: RunConfig, shape: ModelShape) -> str | None:
    """Why the libraries cannot run the layout for this job; None where they can."""
    mode, optim = config.tuning.mode, config.train.optim
    if layout.tensor_parallel > 1:
        if mode == "qlora":
            return "NF4 weights cannot be split over tensor-parallel ranks at load"
        if mode == "lora":
            return "PEFT's adapters fail on layers that are split by rows"
        if shape.num_kv_heads % layout.tensor_parallel or shape.num_heads % layout.tensor_parallel:
            return f"{shape.num_kv_heads} key heads do not split over {layout.tensor_parallel} ranks"
        if shape.num_experts:
            return "the experts' fused tensors are not split by transformers' tensor-parallel plan"
    if optim == "paged_adamw_8bit" and (layout.is_fsdp or layout.is_zero):
        return "bitsandbytes' 8-bit states know no sharded parameters"
    if optim == "adafactor" and (layout.is_zero or layout.tensor_parallel > 1):
        return "Adafactor's rows and columns are lost in ZeRO's flat partitions"
    if layout.offloads_states and optim not in ("adamw_torch_fused", "adamw_torch"):
        return "DeepSpeed's CPU optimizer is AdamW"
    return None
