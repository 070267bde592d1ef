"""Which precision a run computes in, by what the device can do, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.hardware import Hardware

DtypeName = Literal["bfloat16", "float16", "float32"]

BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT: dict[DtypeName, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Precision:
    """`compute`: dtype of matrix products; `load`: dtype of the weights as loaded."""

    compute: DtypeName
    load: DtypeName
    reason: str


def choose_precision(config: RunConfig, hardware: Hardware) -> Precision:
    """The precision that the run asks for, or the nearest that the device has; the reason says which."""
    compute, reason = _compute(config, hardware)
    load: DtypeName = compute if config.model.dtype == "auto" else config.model.dtype
    if compute == "float16" and config.tuning.mode == "full" and config.model.dtype == "auto":
        load = "float32"  # loss scaling cannot unscale gradients that are themselves fp16
    if load != compute:
        reason += f"; weights are loaded in {SHORT[load]}"
    return Precision(compute, load, reason)


def _compute(config: RunConfig, hardware: Hardware) -> tuple[DtypeName, str]:
    train = config.train
    if hardware.device == "mps":
        if train.bf16 is True:
            return "bfloat16", "bf16 on Apple's GPU because train.bf16 is true (macOS 14 or newer)"
        return "float32", "fp32: Apple's GPU; train.bf16=true asks for bf16 there"
    if not hardware.gpus:
        if train.bf16 is True:
            return "bfloat16", "bf16 on a CPU because train.bf16 is true (fp32 is often faster there)"
        if train.fp16:
            return "float32", "fp32 instead of fp16: a CPU does not train in fp16"
        return "float32", "fp32: what a CPU computes fastest and most exactly"
    if train.fp16:
        return "float16", "fp16 because train.fp16 is true"
    if train.bf16 is False:
        return "float32", "fp32 because train.bf16 is false and train.fp16 is false"
    without = [gpu.name for gpu in hardware.gpus if not gpu.has_bf16]
    if without:
        return "float16", f"fp16 instead of bf16: {without[0]} has no bf16 units"
    return "bfloat16", "bf16: the GPU has it" if train.bf16 == "auto" else "bf16 because train.bf16 is true"
