"""The precision that a run computes in, by what the device supports, with the reason."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware
from sft_play.facts.models.fp16 import LARGEST, Overflow, overflow_of
from sft_play.facts.models.model_shape import ModelShape

DtypeName = Literal["bfloat16", "float16", "float32"]

BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT: dict[DtypeName, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
Updates = Literal["float32", "stochastic", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """`compute`: dtype of matrix products; `load`: dtype of the weights as loaded.

    `updates`: how an optimizer step reaches weights that train: in float32 (themselves, or copies of an engine's), in
    16 bits by stochastic rounding, or rounded to the nearest of 16 bits, where most updates are lost.
    """

    compute: DtypeName
    load: DtypeName
    reason: str
    updates: Updates = "float32"


def choose_precision(config: RunConfig, hardware: Hardware, shape: ModelShape | None = None) -> Precision:
    """The precision that the run asks for, or the closest that the device and the model support; the reason says which.

    Raises:
        ConfigError: fp16 is asked for by name, and the model's activations leave its range.
    """
    overflow = None
    if shape is not None:
        eager = config.model.attn_implementation == "eager"
        overflow = overflow_of(shape.model_type, eager=eager, attention_dropout=shape.attention_dropout)
    # gradients that overflow cost skipped steps; activations that do make the loss NaN, whatever the scale
    in_forward = None if overflow is None or overflow.in_backward else overflow
    compute, reason = _compute(config, hardware, in_forward)
    if compute == "float16" and overflow is not None:
        reason += f"; {overflow.seen}, so steps are skipped until loss scaling has found its scale"
    load: DtypeName = compute if config.model.dtype == "auto" else config.model.dtype
    if compute == "float32" and load == "float16" and in_forward is not None:
        # without autocast nothing casts what layers pass on, so activations stay in fp16
        raise ConfigError(
            f"model.dtype: float16, whose range ends at {LARGEST:,}: {in_forward.seen}; use model.dtype=auto"
        )
    if compute == "float16" and config.tuning.mode == "full" and config.model.dtype == "auto":
        load = "float32"  # loss scaling cannot unscale gradients that are themselves fp16
    if load != compute:
        reason += f"; weights are loaded in {SHORT[load]}"
    return Precision(compute, load, reason)


ROUNDS_ITSELF = ("single", "ddp")
"""Layouts whose optimizer steps the weights as loaded; FSDP2 and DeepSpeed step their own float32 copies."""


def with_updates(
    precision: Precision, config: RunConfig, layout: str, *, masters: bool = True, kept: Updates | None = None
) -> Precision:
    """The precision of a layout, with how updates reach bf16 weights that train in full.

    bf16 has 8 significant bits: an update below 1/512 of a weight is lost when it is rounded to the nearest, and at
    usual learning rates nearly all are. `masters`: whether float32 weights fit, which auto then takes. `kept`: how the
    resumed run has done it, which auto keeps.
    """
    if config.tuning.mode != "full" or precision.load != "bfloat16" or layout not in ROUNDS_ITSELF:
        return precision
    wish = config.train.weight_updates
    if wish == "auto":
        wish = kept or ("float32" if masters and config.model.dtype == "auto" else "stochastic")
    if wish == "float32":
        words = "weights are held in fp32 (in bf16 nearly all updates would be lost)"
        return dataclasses.replace(precision, load="float32", reason=f"{precision.reason}; {words}")
    if wish == "stochastic":
        words = "weights are held in bf16 and updates rounded stochastically, so small ones survive on average"
    else:
        words = "train.weight_updates=bfloat16: updates are rounded to bf16, and most are lost at usual learning rates"
    return dataclasses.replace(precision, reason=f"{precision.reason}; {words}", updates=wish)


def _compute(config: RunConfig, hardware: Hardware, overflow: Overflow | None) -> tuple[DtypeName, str]:
    """`overflow`: what exceeds fp16's range in the model's forward pass; None if nothing is known to."""
    train = config.train
    if not hardware.gpus:
        if train.bf16 is True:
            return "bfloat16", "bf16 on a CPU because train.bf16 is true (fp32 is often faster there)"
        if train.fp16:
            return "float32", "fp32 instead of fp16: a CPU does not train in fp16"
        return "float32", "fp32: the fastest and most exact on a CPU"
    without = [gpu.name for gpu in hardware.gpus if not gpu.has_bf16]
    if train.fp16 and overflow is not None:
        raise ConfigError(_refusal(overflow, has_bf16=not without))
    if train.fp16:
        return "float16", "fp16 because train.fp16 is true"
    if train.bf16 is False:
        return "float32", "fp32 because train.bf16 is false and train.fp16 is false"
    if without and overflow is not None:
        return "float32", f"fp32: {without[0]} has no bf16 units, and fp16's range ends at {LARGEST:,}: {overflow.seen}"
    if without:
        return "float16", f"fp16 instead of bf16: {without[0]} has no bf16 units"
    return "bfloat16", "bf16: the GPU has it" if train.bf16 == "auto" else "bf16 because train.bf16 is true"


def _refusal(overflow: Overflow, *, has_bf16: bool) -> str:
    """Why fp16 is refused although it is asked for, and what to do instead, bf16 first where the GPUs have it."""
    bf16 = "bf16 (train.fp16=false train.bf16=true)"
    fp32 = "fp32 (train.fp16=false train.bf16=false)"
    ways = f"{bf16} or {fp32}" if has_bf16 else f"{fp32} or, on a GPU that has it, {bf16}"
    sdpa = "use model.attn_implementation=sdpa, " if overflow.only_with == "eager" else ""
    return (
        f"train.fp16: true, whose range ends at {LARGEST:,}: {overflow.seen}, and the loss would be NaN; "
        f"{sdpa}compute in {ways}, or take another model"
    )
