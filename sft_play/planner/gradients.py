"""How ranks reduce their gradients under a layout: how often, in which dtypes, and what it does not support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.planner.precision import DTYPE_BYTES, DtypeName, Precision

SyncInterval = Literal["step", "micro_batch"] | int

# Layouts in which DeepSpeed partitions the gradients of every micro-batch at once, so that reducing cannot wait.
GRADIENT_SHARDING_LAYOUTS = ("zero2", "zero3", "zero2_offload", "zero3_offload")


@dataclass(frozen=True)
class GradientSync:
    """How a layout handles gradients, and the dtype of gathered weights."""

    interval: SyncInterval
    """When they are reduced over the ranks; a number: after so many micro-batches, and at the end of the step."""
    computed_dtype: DtypeName
    """Dtype from the backward pass."""
    reduced_dtype: DtypeName
    """Dtype in which they are sent."""
    gathered_dtype: DtypeName
    """Dtype of weights as FSDP2 gathers them; for other layouts the compute dtype."""
    buffer_dtype: DtypeName | None
    """What DeepSpeed casts buffers to; None leaves them unchanged."""

    @property
    def is_compressed(self) -> bool:
        """Whether they are sent in another dtype than they are computed in."""
        return self.reduced_dtype != self.computed_dtype

    def reductions_per_step(self, grad_accum: int) -> int:
        """How often they are reduced in a step."""
        if isinstance(self.interval, int):
            return -(-grad_accum // self.interval)
        return {"step": 1, "micro_batch": grad_accum}[self.interval]


def gradient_sync(config: RunConfig, precision: Precision, layout: str) -> GradientSync:
    """How the run's keys are read under a layout that `gradient_sync_obstacle` accepts."""
    requested_interval, mixed = _requested_interval(config), config.distributed.mixed_precision
    gathered_dtype = precision.compute
    if _is_fsdp(layout) and mixed.param != "auto":
        gathered_dtype = mixed.param
    computed_dtype = _gradient_dtype(config, precision, layout, gathered_dtype)
    default_interval: SyncInterval = (
        "micro_batch" if _is_fsdp(layout) or layout in GRADIENT_SHARDING_LAYOUTS else "step"
    )
    return GradientSync(
        interval=default_interval if requested_interval is None or layout == "single" else requested_interval,
        computed_dtype=computed_dtype,
        reduced_dtype=computed_dtype if mixed.reduce == "auto" or layout == "single" else mixed.reduce,
        gathered_dtype=gathered_dtype,
        buffer_dtype=mixed.buffer if mixed.buffer != "auto" and _is_zero(layout) else None,
    )


def adapter_dtype(config: RunConfig, precision: Precision) -> DtypeName:
    """Dtype of adapters: float32, or bf16 where that is asked for and is the compute dtype."""
    wants_bf16 = config.tuning.lora.dtype == "bfloat16"
    return "bfloat16" if wants_bf16 and precision.compute == "bfloat16" else "float32"


def _gradient_dtype(config: RunConfig, precision: Precision, layout: str, gathered_dtype: DtypeName) -> DtypeName:
    """FSDP2's gradients have the dtype that it gathers in, DeepSpeed's the compute dtype, to which it casts the model;
    otherwise a gradient has its parameter's dtype."""
    if _is_fsdp(layout):  # MixedPrecisionPolicy(param_dtype=...)
        return gathered_dtype
    if _is_zero(layout):
        return precision.compute
    return precision.load if config.tuning.mode == "full" else adapter_dtype(config, precision)


def _is_fsdp(layout: str) -> bool:
    return layout.startswith("fsdp") or layout == "tp"


def _is_zero(layout: str) -> bool:
    return layout.startswith("zero")


def _requested_interval(config: RunConfig) -> SyncInterval | None:
    """What the run asks for; None where nothing is, or a step has one micro-batch. As many micro-batches as a step has,
    or more, are a step."""
    interval, grad_accum = config.distributed.sync_gradients_every, config.train.grad_accum
    if interval == "auto" or grad_accum == 1:
        return None
    if not isinstance(interval, int):
        return interval
    if interval == 1:
        return "micro_batch"
    return interval if grad_accum == "auto" or interval < grad_accum else "step"


def gradient_sync_obstacle(config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool = True) -> str | None:
    """The run's settings that a layout does not support, and what to write instead; None where it supports all."""
    interval = _requested_interval(config)
    if layout == "single":
        return None  # nothing is sent; the same file must stay usable on more GPUs
    key, problems = f"distributed.sync_gradients_every={interval}", []
    if interval not in (None, "micro_batch") and layout in GRADIENT_SHARDING_LAYOUTS:
        problems.append(f"{key}: ZeRO-2 and -3 shard gradients after each micro-batch; auto, or ddp, fsdp, zero1")
    if interval not in (None, "step") and layout == "zero1":
        alternatives = "zero2" if interval == "micro_batch" else "ddp, fsdp"
        problems.append(f"{key}: ZeRO-1 reduces gradients once per step; auto, or {alternatives}")
    problems += _dtype_obstacles(config, precision, layout, on_gpu=on_gpu)
    return "; ".join(problems) or None


def _dtype_obstacles(config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool) -> Iterator[str]:
    mixed, compute = config.distributed.mixed_precision, precision.compute
    param_setting, reduce_setting, buffer_setting = (
        f"distributed.mixed_precision.{name}={value}" for name, value in mixed
    )
    if mixed.param not in ("auto", compute) and not (_is_fsdp(layout) and mixed.param == "float32"):
        yield (
            f"{param_setting}: the run computes in {compute}, "
            f"and only FSDP2 gathers weights in another dtype, fp32; auto"
        )
    elif mixed.param not in ("auto", compute) and config.tuning.mode == "qlora":
        yield f"{param_setting}: packed NF4 weights are sent as {compute} and use all its bits; auto"
    if mixed.reduce != "auto" and not (_is_fsdp(layout) or _is_zero(layout)):
        gradient_dtype = _gradient_dtype(config, precision, layout, compute)
        narrows = DTYPE_BYTES[mixed.reduce] < DTYPE_BYTES[gradient_dtype] or mixed.reduce == gradient_dtype
        if layout != "ddp" or not narrows:
            yield (
                f"{reduce_setting}: gradients are {gradient_dtype}, and only DDP's hooks narrow them; auto, "
                f"or fsdp, zero2"
            )
        elif mixed.reduce == "bfloat16" != gradient_dtype and not on_gpu:
            yield f"{reduce_setting}: torch's hook for it needs GPUs; auto, float16, or fsdp, zero2"
    if mixed.buffer != "auto" and (not _is_zero(layout) or compute == "float32"):
        yield f"{buffer_setting}: only DeepSpeed casts the model's buffers, in 16-bit runs; auto, or zero2, zero3"


def ineffective_distributed_options(config: RunConfig, layout: str) -> list[str]:
    """The run's keys that have no effect under the chosen layout, in words."""
    options = config.distributed
    settings: dict[str, Any] = {"find_unused_parameters": options.find_unused_parameters}
    if layout == "single":
        mixed = {f"mixed_precision.{part}": value for part, value in options.mixed_precision}
        settings |= {"sync_gradients_every": options.sync_gradients_every, **mixed}
        settings |= {"profile_communication": options.profile_communication}
    set_options = {name: str(value).lower() for name, value in settings.items() if value not in ("auto", False)}
    options_text = ", ".join(f"distributed.{name}={value}" for name, value in set_options.items())
    circumstance = (
        "on one process, which sends nothing" if layout == "single" else f"under {layout}, which needs no search"
    )
    return [f"{options_text}: no effect {circumstance}"] if options_text and layout != "ddp" else []
