"""The precision that a run computes in, by what the device supports; and how ranks reduce
gradients: how often, in which dtypes.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.hardware import Hardware
from sft_play.models.shape import ModelShape

# The precision that a run computes in, by what the device supports, with the reason.

# The largest finite number of fp16.
FP16_MAX = 65_504


@dataclass(frozen=True)
class Fp16Overflow:
    """What exceeds fp16's range: `what` was seen, at `source`, in models of type `family`."""

    family: str
    what: str
    source: str
    # What a run must use for it to happen: eager attention, which makes logits in the compute dtype
    # before it scales them (sdpa and flash keep them in fp32), or a config.json with attention
    # dropout.
    only_with: Literal["eager", "attention_dropout"] | None = None
    # Only gradients do: loss scaling handles that by skipping steps until its scale is small
    # enough.
    in_backward: bool = False

    @property
    def description(self) -> str:
        """What was seen, in words that follow a colon."""
        return f"in {self.family} models {self.what} ({self.source})"


_FP16_ROWS = json.loads(
    resources.files("sft_play.models").joinpath("fp16.json").read_text(encoding="utf-8")
)

# By model_type of config.json, text towers under their own: what was seen, and where, in other
# libraries' lists and threads. Left out, because sources contradict each other or it was not seen
# in a forward pass: deepseek_v3 (vllm#14809 saw it in deepseek_v2 only), gpt_neo
# (transformers#11076 against DeepSpeed#1112), falcon_h1 (unsloth-zoo#212).
FP16_OVERFLOWS = {
    kind: Fp16Overflow(
        kind, **{name: value for name, value in row.items() if name not in ("models", "note")}
    )
    for row in _FP16_ROWS
    for kind in row["models"].split()
}


def find_fp16_overflow(
    model_type: str, *, is_eager: bool = False, attention_dropout: float = 0.0
) -> Fp16Overflow | None:
    """What is known to exceed fp16's range in a model of this type with these settings; None if
    nothing."""
    overflow = FP16_OVERFLOWS.get(model_type)
    conditions = {"eager": is_eager, "attention_dropout": attention_dropout > 0, None: True}
    return overflow if overflow is not None and conditions[overflow.only_with] else None


def format_fp16_overflow(model_type: str, overflow: Fp16Overflow | None) -> str:
    """What a non-finite loss or gradients mean in fp16, and what to do."""
    evidence = (
        f"known: {overflow.description}"
        if overflow
        else f"{model_type} is not among the families known for it"
    )
    return (
        f"activations or gradients left fp16's range, which ends at {FP16_MAX:,} ({evidence});"
        " compute in fp32 (train.fp16=false train.bf16=false) or, on a GPU that has it, bf16"
        " (train.fp16=false train.bf16=true), or lower train.learning_rate"
    )


DtypeName = Literal["bfloat16", "float16", "float32"]

DTYPE_BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPE_SHORT_NAMES: dict[DtypeName, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
WeightUpdates = Literal["float32", "stochastic", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """`compute`: dtype of matrix products; `load`: dtype of the weights as loaded. `updates`: how
    an optimizer step reaches weights that train: in float32 (themselves, or copies of an engine's),
    in 16 bits by stochastic rounding, or rounded to the nearest of 16 bits, where most updates are
    lost."""

    compute: DtypeName
    load: DtypeName
    reason: str
    updates: WeightUpdates = "float32"


def choose_precision(
    config: RunConfig, hardware: Hardware, shape: ModelShape | None = None
) -> Precision:
    """The precision that the run asks for, or the closest that device and model support, with the
    reason. Raises ConfigError where fp16 is asked for by name, and the model's activations leave
    its range."""
    overflow = None
    if shape is not None:
        overflow = find_fp16_overflow(
            shape.model_type,
            is_eager=config.model.attn_implementation == "eager",
            attention_dropout=shape.attention_dropout,
        )
    # gradients that overflow cost skipped steps; activations that do make the loss NaN, whatever
    # the scale
    forward_overflow = None if overflow is None or overflow.in_backward else overflow
    compute, reason = _choose_compute_dtype(config, hardware, forward_overflow)
    if compute == "float16" and overflow is not None:
        reason += (
            f"; {overflow.description}, so steps are skipped until loss scaling has found its scale"
        )
    load: DtypeName = compute if config.model.dtype == "auto" else config.model.dtype
    if compute == "float32" and load == "float16" and forward_overflow is not None:
        # without autocast nothing casts what layers pass on, so activations stay in fp16
        raise ConfigError(
            f"model.dtype: float16, whose range ends at {FP16_MAX:,}:"
            f" {forward_overflow.description}; use model.dtype=auto"
        )
    if compute == "float16" and config.tuning.mode == "full" and config.model.dtype == "auto":
        load = "float32"  # loss scaling cannot unscale gradients that are themselves fp16
    if load != compute:
        reason += f"; weights are loaded in {DTYPE_SHORT_NAMES[load]}"
    return Precision(compute, load, reason)


# Layouts whose optimizer steps the weights as loaded; FSDP2 and DeepSpeed step their own float32
# copies.
UNSHARDED_LAYOUTS = ("single", "ddp", "streamed")
_UPDATE_REASONS: dict[WeightUpdates, str] = {
    "float32": "weights are held in fp32 (in bf16 nearly all updates would be lost)",
    "stochastic": (
        "weights are held in bf16 and updates rounded stochastically, so small ones survive on"
        " average"
    ),
    "bfloat16": (
        "train.weight_updates=bfloat16: updates are rounded to bf16, and most are lost at usual"
        " learning rates"
    ),
}


def apply_weight_updates(
    precision: Precision,
    config: RunConfig,
    layout: str,
    *,
    fp32_master_weights: bool = True,
    resumed_updates: WeightUpdates | None = None,
) -> Precision:
    """The precision of a layout, with how updates reach bf16 weights that train in full. bf16 has 8
    significant bits: an update below 1/512 of a weight is lost when it is rounded to the nearest,
    and at usual learning rates nearly all are. `fp32_master_weights`: they fit, and auto then takes
    them. `resumed_updates`: how the resumed run has done it, which auto keeps."""
    if (
        config.tuning.mode != "full"
        or precision.load != "bfloat16"
        or layout not in UNSHARDED_LAYOUTS
    ):
        return precision
    option = config.train.weight_updates
    if option == "auto":
        option = resumed_updates or (
            "float32" if fp32_master_weights and config.model.dtype == "auto" else "stochastic"
        )
    return dataclasses.replace(
        precision,
        load="float32" if option == "float32" else precision.load,
        reason=f"{precision.reason}; {_UPDATE_REASONS[option]}",
        updates=option,
    )


def _choose_compute_dtype(
    config: RunConfig, hardware: Hardware, overflow: Fp16Overflow | None
) -> tuple[DtypeName, str]:
    train = config.train
    if not hardware.gpus:
        if train.bf16 is True:
            return (
                "bfloat16",
                "bf16 on a CPU because train.bf16 is true (fp32 is often faster there)",
            )
        if train.fp16:
            return "float32", "fp32 instead of fp16: a CPU does not train in fp16"
        return "float32", "fp32: the fastest and most exact on a CPU"
    gpus_without_bf16 = [gpu.name for gpu in hardware.gpus if not gpu.has_bf16]
    if train.fp16 and overflow is not None:
        sdpa_hint = "use model.attn_implementation=sdpa, " if overflow.only_with == "eager" else ""
        raise ConfigError(
            f"train.fp16: true, whose range ends at {FP16_MAX:,}: {overflow.description}, and the"
            f" loss would be NaN; {sdpa_hint}compute in bf16 where the GPU has it (train.fp16=false"
            " train.bf16=true), else in fp32 (train.fp16=false train.bf16=false), or take another"
            " model"
        )
    if train.fp16:
        return "float16", "fp16 because train.fp16 is true"
    if train.bf16 is False:
        return "float32", "fp32 because train.bf16 is false and train.fp16 is false"
    if gpus_without_bf16 and overflow is not None:
        return (
            "float32",
            (
                f"fp32: {gpus_without_bf16[0]} has no bf16 units, and fp16's range ends at"
                f" {FP16_MAX:,}: {overflow.description}"
            ),
        )
    if gpus_without_bf16:
        return "float16", f"fp16 instead of bf16: {gpus_without_bf16[0]} has no bf16 units"
    return (
        "bfloat16",
        "bf16: the GPU has it" if train.bf16 == "auto" else "bf16 because train.bf16 is true",
    )


# --------------------------------------------------------------------------------------------------
# How ranks reduce their gradients under a layout: how often, in which dtypes, and what it does not
# support.

SyncInterval = Literal["step", "micro_batch"] | int

# Layouts in which DeepSpeed partitions the gradients of every micro-batch at once, so that reducing
# cannot wait.
GRADIENT_SHARDING_LAYOUTS = ("zero2", "zero3", "zero2_offload", "zero3_offload")


@dataclass(frozen=True)
class GradientSync:
    """How a layout handles gradients, and the dtype of gathered weights."""

    # When they are reduced over the ranks; a number: after so many micro-batches, and at the end of
    # the step.
    interval: SyncInterval
    # Dtype from the backward pass.
    computed_dtype: DtypeName
    # Dtype in which they are sent.
    reduced_dtype: DtypeName
    # Dtype of weights as FSDP2 gathers them; for other layouts the compute dtype.
    gathered_dtype: DtypeName
    # What DeepSpeed casts buffers to; None leaves them unchanged.
    buffer_dtype: DtypeName | None

    @property
    def is_compressed(self) -> bool:
        """True if they are sent in another dtype than they are computed in."""
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
        interval=(
            default_interval
            if requested_interval is None or layout == "single"
            else requested_interval
        ),
        computed_dtype=computed_dtype,
        reduced_dtype=(
            computed_dtype if mixed.reduce == "auto" or layout == "single" else mixed.reduce
        ),
        gathered_dtype=gathered_dtype,
        buffer_dtype=mixed.buffer if mixed.buffer != "auto" and _is_zero(layout) else None,
    )


def adapter_dtype(config: RunConfig, precision: Precision) -> DtypeName:
    """Dtype of adapters: float32, or bf16 where that is asked for and is the compute dtype."""
    return "bfloat16" if config.tuning.lora.dtype == precision.compute == "bfloat16" else "float32"


def _gradient_dtype(
    config: RunConfig, precision: Precision, layout: str, gathered_dtype: DtypeName
) -> DtypeName:
    """FSDP2's gradients have the dtype that it gathers in, DeepSpeed's the compute dtype, to which
    it casts the model; otherwise a gradient has its parameter's dtype."""
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
    """What the run asks for; None where nothing is, or a step has one micro-batch. As many
    micro-batches as a step has, or more, are a step."""
    interval, grad_accum = config.distributed.sync_gradients_every, config.train.grad_accum
    if interval == "auto" or grad_accum == 1:
        return None
    if not isinstance(interval, int):
        return interval
    if interval == 1:
        return "micro_batch"
    return interval if grad_accum == "auto" or interval < grad_accum else "step"


def gradient_sync_obstacle(
    config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool
) -> str | None:
    """The run's settings that a layout does not support, and what to write instead; None where it
    supports all."""
    interval = _requested_interval(config)
    if layout == "single":
        return None  # nothing is sent; the same file must stay usable on more GPUs
    key, problems = f"distributed.sync_gradients_every={interval}", []
    if interval not in (None, "micro_batch") and layout in GRADIENT_SHARDING_LAYOUTS:
        problems.append(
            f"{key}: ZeRO-2 and -3 shard gradients after each micro-batch; auto, or ddp, fsdp,"
            " zero1"
        )
    if interval not in (None, "step") and layout == "zero1":
        alternatives = "zero2" if interval == "micro_batch" else "ddp, fsdp"
        problems.append(f"{key}: ZeRO-1 reduces gradients once per step; auto, or {alternatives}")
    problems += _dtype_obstacles(config, precision, layout, on_gpu=on_gpu)
    return "; ".join(problems) or None


def _dtype_obstacles(
    config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool
) -> Iterator[str]:
    mixed, compute = config.distributed.mixed_precision, precision.compute
    param_setting, reduce_setting, buffer_setting = (
        f"distributed.mixed_precision.{name}={value}" for name, value in mixed
    )
    if mixed.param not in ("auto", compute) and not (_is_fsdp(layout) and mixed.param == "float32"):
        yield (
            f"{param_setting}: the run computes in {compute}, "
            "and only FSDP2 gathers weights in another dtype, fp32; auto"
        )
    elif mixed.param not in ("auto", compute) and config.tuning.mode == "qlora":
        yield (
            f"{param_setting}: packed NF4 weights are sent as {compute} and use all its bits; auto"
        )
    if mixed.reduce != "auto" and not (_is_fsdp(layout) or _is_zero(layout)):
        gradient_dtype = _gradient_dtype(config, precision, layout, compute)
        narrows = (
            DTYPE_BYTES[mixed.reduce] < DTYPE_BYTES[gradient_dtype]
            or mixed.reduce == gradient_dtype
        )
        if layout not in ("ddp", "streamed") or not narrows:
            yield (
                f"{reduce_setting}: gradients are {gradient_dtype}, and only DDP's hooks narrow"
                " them; auto, or fsdp, zero2"
            )
        elif mixed.reduce == "bfloat16" != gradient_dtype and not on_gpu:
            yield f"{reduce_setting}: torch's hook for it needs GPUs; auto, float16, or fsdp, zero2"
    if mixed.buffer != "auto" and (not _is_zero(layout) or compute == "float32"):
        yield (
            f"{buffer_setting}: only DeepSpeed casts the model's buffers, in 16-bit runs; auto, or"
            " zero2, zero3"
        )


def ineffective_distributed_options(config: RunConfig, layout: str) -> list[str]:
    """The run's keys that have no effect under the chosen layout, in words."""
    options = config.distributed
    settings: dict[str, Any] = {"find_unused_parameters": options.find_unused_parameters}
    circumstance = f"under {layout}, which needs no search"
    if layout in ("ddp", "streamed"):
        return []
    if layout == "single":
        settings |= {"sync_gradients_every": options.sync_gradients_every}
        settings |= {f"mixed_precision.{part}": value for part, value in options.mixed_precision}
        settings |= {"profile_communication": options.profile_communication}
        circumstance = "on one process, which sends nothing"
    set_options = {
        name: str(value).lower() for name, value in settings.items() if value not in ("auto", False)
    }
    options_text = ", ".join(f"distributed.{name}={value}" for name, value in set_options.items())
    return [f"{options_text}: no effect {circumstance}"] * bool(options_text)
