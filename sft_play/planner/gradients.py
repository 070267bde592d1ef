"""How ranks reduce their gradients under a layout: how often, in which dtypes, and what it does not support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.planner.precision import BYTES, DtypeName, Precision

Every = Literal["step", "micro_batch"] | int

# Layouts in which DeepSpeed partitions the gradients of every micro-batch at once, so that reducing cannot wait.
DIVIDES_GRADIENTS = ("zero2", "zero3", "zero2_offload", "zero3_offload")


@dataclass(frozen=True)
class Gradients:
    """How a layout handles gradients, and the dtype of gathered weights."""

    every: Every
    """When they are reduced over the ranks; a number: after so many micro-batches, and at the end of the step."""
    computed: DtypeName
    """Dtype from the backward pass."""
    reduced: DtypeName
    """Dtype in which they are sent."""
    gathered: DtypeName
    """Dtype of weights as FSDP2 gathers them; for other layouts the compute dtype."""
    buffers: DtypeName | None
    """What DeepSpeed casts buffers to; None leaves them unchanged."""

    @property
    def compressed(self) -> bool:
        """Whether they are sent in another dtype than they are computed in."""
        return self.reduced != self.computed

    def times(self, grad_accum: int) -> int:
        """How often they are reduced in a step."""
        if isinstance(self.every, int):
            return -(-grad_accum // self.every)
        return {"step": 1, "micro_batch": grad_accum}[self.every]


def gradients_of(config: RunConfig, precision: Precision, layout: str) -> Gradients:
    """What the run's keys mean under a layout that `refusal` accepts."""
    wish, mixed = _wanted_sync(config), config.distributed.mixed_precision
    gathered = precision.compute
    if _is_fsdp(layout) and mixed.param != "auto":
        gathered = mixed.param
    computed = _computed(config, precision, layout, gathered)
    own: Every = "micro_batch" if _is_fsdp(layout) or layout in DIVIDES_GRADIENTS else "step"
    return Gradients(
        every=own if wish is None or layout == "single" else wish,
        computed=computed,
        reduced=computed if mixed.reduce == "auto" or layout == "single" else mixed.reduce,
        gathered=gathered,
        buffers=mixed.buffer if mixed.buffer != "auto" and _is_zero(layout) else None,
    )


def adapter_dtype(config: RunConfig, precision: Precision) -> DtypeName:
    """Dtype of adapters: float32, or bf16 where that is asked for and is the compute dtype."""
    wants_bf16 = config.tuning.lora.dtype == "bfloat16"
    return "bfloat16" if wants_bf16 and precision.compute == "bfloat16" else "float32"


def _computed(config: RunConfig, precision: Precision, layout: str, gathered: DtypeName) -> DtypeName:
    """FSDP2's gradients have the dtype that it gathers in, DeepSpeed's the compute dtype, to which it casts the model;
    otherwise a gradient has its parameter's dtype."""
    if _is_fsdp(layout):  # MixedPrecisionPolicy(param_dtype=...)
        return gathered
    if _is_zero(layout):
        return precision.compute
    return precision.load if config.tuning.mode == "full" else adapter_dtype(config, precision)


def _is_fsdp(layout: str) -> bool:
    return layout.startswith("fsdp") or layout == "tp"


def _is_zero(layout: str) -> bool:
    return layout.startswith("zero")


def _wanted_sync(config: RunConfig) -> Every | None:
    """What the run asks for; None where nothing is, or a step has one micro-batch. As many micro-batches as a step has,
    or more, are a step."""
    wish, accum = config.distributed.sync_gradients_every, config.train.grad_accum
    if wish == "auto" or accum == 1:
        return None
    if not isinstance(wish, int):
        return wish
    if wish == 1:
        return "micro_batch"
    return wish if accum == "auto" or wish < accum else "step"


def refusal(config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool = True) -> str | None:
    """The run's settings that a layout does not support, and what to write instead; None where it supports all."""
    wish = _wanted_sync(config)
    if layout == "single":
        return None  # nothing is sent; the same file must stay usable on more GPUs
    key, problems = f"distributed.sync_gradients_every={wish}", []
    if wish not in (None, "micro_batch") and layout in DIVIDES_GRADIENTS:
        problems.append(f"{key}: ZeRO-2 and -3 shard gradients after each micro-batch; auto, or ddp, fsdp, zero1")
    if wish not in (None, "step") and layout == "zero1":
        others = "zero2" if wish == "micro_batch" else "ddp, fsdp"
        problems.append(f"{key}: ZeRO-1 reduces gradients once per step; auto, or {others}")
    problems += _dtypes_refused(config, precision, layout, on_gpu=on_gpu)
    return "; ".join(problems) or None


def _dtypes_refused(config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool) -> Iterator[str]:
    mixed, compute = config.distributed.mixed_precision, precision.compute
    param, reduce, buffer = (f"distributed.mixed_precision.{name}={value}" for name, value in mixed)
    if mixed.param not in ("auto", compute) and not (_is_fsdp(layout) and mixed.param == "float32"):
        yield f"{param}: the run computes in {compute}, and only FSDP2 gathers weights in another dtype, fp32; auto"
    elif mixed.param not in ("auto", compute) and config.tuning.mode == "qlora":
        yield f"{param}: packed NF4 weights are sent as {compute} and use all its bits; auto"
    if mixed.reduce != "auto" and not (_is_fsdp(layout) or _is_zero(layout)):
        computed = _computed(config, precision, layout, compute)
        narrows = BYTES[mixed.reduce] < BYTES[computed] or mixed.reduce == computed
        if layout != "ddp" or not narrows:
            yield f"{reduce}: gradients are {computed}, and only DDP's hooks narrow them; auto, or fsdp, zero2"
        elif mixed.reduce == "bfloat16" != computed and not on_gpu:
            yield f"{reduce}: torch's hook for it needs GPUs; auto, float16, or fsdp, zero2"
    if mixed.buffer != "auto" and (not _is_zero(layout) or compute == "float32"):
        yield f"{buffer}: only DeepSpeed casts the model's buffers, in 16-bit runs; auto, or zero2, zero3"


def unused(config: RunConfig, layout: str) -> list[str]:
    """The run's keys that have no effect under the chosen layout, in words."""
    wish = config.distributed
    settings: dict[str, Any] = {"find_unused_parameters": wish.find_unused_parameters}
    if layout == "single":
        mixed = {f"mixed_precision.{part}": value for part, value in wish.mixed_precision}
        settings |= {"sync_gradients_every": wish.sync_gradients_every, **mixed}
        settings |= {"profile_communication": wish.profile_communication}
    given = {name: str(value).lower() for name, value in settings.items() if value not in ("auto", False)}
    said = ", ".join(f"distributed.{name}={value}" for name, value in given.items())
    where = "on one process, which sends nothing" if layout == "single" else f"under {layout}, which needs no search"
    return [f"{said}: no effect {where}"] if said and layout != "ddp" else []
