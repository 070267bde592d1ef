"""How ranks add up their gradients under a layout: how often, in which dtypes, and what of it the layout cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.plan.precision import BYTES, DtypeName, Precision

Every = Literal["step", "micro_batch"]

DIVIDES_GRADIENTS = ("zero2", "zero3", "zero2_offload", "zero3_offload")
"""Layouts in which DeepSpeed cuts every micro-batch's gradients at once, so that there is nothing to put off."""
_MEANT = "write step (once per optimizer step), micro_batch (after every micro-batch) or auto"


@dataclass(frozen=True)
class Gradients:
    """What a layout does with gradients, and with what it gathers."""

    every: Every
    """When they are added up over the ranks."""
    made: DtypeName
    """As the backward pass makes them."""
    reduced: DtypeName
    """As they travel."""
    gathered: DtypeName
    """Weights as FSDP2 gathers them; of the other layouts the dtype that is computed in."""
    buffers: DtypeName | None
    """What DeepSpeed casts buffers to; None leaves them as they are."""

    @property
    def compressed(self) -> bool:
        """Whether they travel in another dtype than they are made in."""
        return self.reduced != self.made


def gradients_of(config: RunConfig, precision: Precision, layout: str) -> Gradients:
    """What the run's keys come to under a layout, which `refusal` has let pass.

    Raises:
        ConfigError: `sync_gradients_every` is a number that no layout can do.
    """
    wish, mixed = _wanted_sync(config), config.distributed.mixed_precision
    gathered = precision.compute
    if _is_fsdp(layout) and mixed.param != "auto":
        gathered = mixed.param
    made = _made(config, precision, layout, gathered)
    return Gradients(
        every=_own_sync(layout) if wish is None or layout == "single" else wish,
        made=made,
        reduced=made if mixed.reduce == "auto" or layout == "single" else mixed.reduce,
        gathered=gathered,
        buffers=mixed.buffer if mixed.buffer != "auto" and _is_zero(layout) else None,
    )


def adapter_dtype(config: RunConfig, precision: Precision) -> DtypeName:
    """Dtype of adapters: float32, or bf16 where that is asked for and the run computes in it."""
    wants_bf16 = config.tuning.lora.dtype == "bfloat16"
    return "bfloat16" if wants_bf16 and precision.compute == "bfloat16" else "float32"


def _made(config: RunConfig, precision: Precision, layout: str, gathered: DtypeName) -> DtypeName:
    """FSDP2's gradients have the dtype that it gathers in, DeepSpeed's that of the computation, to which it casts the
    model; else a gradient has its parameter's dtype."""
    if _is_fsdp(layout):
        return gathered
    if _is_zero(layout):
        return precision.compute
    return precision.load if config.tuning.mode == "full" else adapter_dtype(config, precision)


def _is_fsdp(layout: str) -> bool:
    return layout.startswith("fsdp") or layout == "tp"


def _is_zero(layout: str) -> bool:
    return layout.startswith("zero")


def _own_sync(layout: str) -> Every:
    """What a layout does where nothing is asked for."""
    return "micro_batch" if _is_fsdp(layout) or layout in DIVIDES_GRADIENTS else "step"


def _wanted_sync(config: RunConfig) -> Every | None:
    """What the run asks for; None where both are the same, or nothing is.

    Raises:
        ConfigError: a number of micro-batches at which no engine adds gradients up.
    """
    wish, accum = config.distributed.sync_gradients_every, config.train.grad_accum
    if wish == "auto" or accum == 1:
        if isinstance(wish, int) and wish > 1:
            raise ConfigError(f"distributed.sync_gradients_every={wish}: a step has one micro-batch; {_MEANT}")
        return None
    if not isinstance(wish, int):
        return wish
    if wish == 1:
        return "micro_batch"
    if wish == accum:
        return "step"
    passes = "as many as the plan takes (train.grad_accum=auto)" if accum == "auto" else f"train.grad_accum={accum}"
    raise ConfigError(
        f"distributed.sync_gradients_every={wish}: engines add gradients up after every micro-batch or once per "
        f"optimizer step, which has {passes} micro-batches; {_MEANT}"
    )


def refusal(config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool = True) -> str | None:
    """What of the run's keys a layout cannot do, and what to write instead; None where it can do all of it.

    Raises:
        ConfigError: `sync_gradients_every` is a number that no layout can do.
    """
    wish = _wanted_sync(config)
    if layout == "single":
        return None  # nothing is sent, and the same file trains on more GPUs
    said = [*_sync_refused(wish, layout), *_dtypes_refused(config, precision, layout, on_gpu=on_gpu)]
    return "; ".join(said) or None


def _sync_refused(wish: Every | None, layout: str) -> Iterator[str]:
    key = f"distributed.sync_gradients_every={wish}"
    if wish == "step" and layout in DIVIDES_GRADIENTS:
        yield f"{key}: in ZeRO-2 and -3 gradients are divided after each micro-batch; auto, or ddp, fsdp, zero1"
    if wish == "micro_batch" and layout == "zero1":
        yield f"{key}: in ZeRO-1 gradients are added up once per step; auto, or zero2"


def _dtypes_refused(config: RunConfig, precision: Precision, layout: str, *, on_gpu: bool) -> Iterator[str]:
    mixed, compute = config.distributed.mixed_precision, precision.compute
    param, reduce, buffer = (f"distributed.mixed_precision.{name}={value}" for name, value in mixed)
    if mixed.param not in ("auto", compute):
        if not _is_fsdp(layout):
            yield f"{param}: only FSDP2 gathers weights in a dtype of their own; auto, or fsdp"
        elif config.tuning.mode == "qlora":
            yield f"{param}: packed NF4 weights fill the bits of the {compute} that they travel as; auto"
        elif mixed.param != "float32":
            yield f"{param}: the run computes in {compute}, as train.bf16 and train.fp16 say; auto, or float32"
    if mixed.reduce != "auto" and not (_is_fsdp(layout) or _is_zero(layout)):
        made = _made(config, precision, layout, compute)
        if layout != "ddp":
            yield f"{reduce}: this layout has no dtype of its own for gradients; auto"
        elif BYTES[mixed.reduce] >= BYTES[made] and mixed.reduce != made:
            yield f"{reduce}: DDP makes {made} gradients, and its hooks narrower ones; auto, or fsdp, zero2"
        elif mixed.reduce == "bfloat16" != made and not on_gpu:
            yield f"{reduce}: torch's hook for it needs GPUs; auto, float16, or fsdp, zero2"
    if mixed.buffer != "auto" and not _is_zero(layout):
        yield f"{buffer}: only DeepSpeed casts the model's buffers; auto, or zero2, zero3"
    elif mixed.buffer != "auto" and compute == "float32":
        yield f"{buffer}: DeepSpeed casts buffers only where the run computes in bf16 or fp16; auto"


def effects(config: RunConfig, precision: Precision, layout: str, *, grad_accum: int, whole_bytes: int) -> list[str]:
    """What the run's keys come to under the chosen layout, in words.

    Args:
        whole_bytes: bytes of whole gradients that every rank keeps between micro-batches; 0 where it keeps its part.
    """
    wish = config.distributed
    asked = [
        f"distributed.{name}={_spelled(value)}"
        for name, value, default in (
            ("sync_gradients_every", wish.sync_gradients_every, "auto"),
            ("find_unused_parameters", wish.find_unused_parameters, False),
            *((f"mixed_precision.{part}", value, "auto") for part, value in wish.mixed_precision),
            ("profile_communication", wish.profile_communication, False),
        )
        if value != default
    ]
    if layout == "single":
        return [f"{', '.join(asked)}: without effect on one process, which sends nothing"] if asked else []
    found = []
    chosen = gradients_of(config, precision, layout)
    if wish.sync_gradients_every != "auto":
        found.append(_sync_words(chosen, layout, grad_accum=grad_accum, whole_bytes=whole_bytes))
    if wish.find_unused_parameters and layout != "ddp":
        found.append(f"distributed.find_unused_parameters=true: without effect under {layout}, which needs no search")
    if wish.mixed_precision.param != "auto" and _is_fsdp(layout):
        found.append(f"weights are gathered in {chosen.gathered} (distributed.mixed_precision.param)")
    if wish.mixed_precision.reduce != "auto":
        made = f", made in {chosen.made}" if chosen.compressed else ", as they are made"
        found.append(f"gradients travel in {chosen.reduced}{made} (distributed.mixed_precision.reduce)")
    if chosen.buffers:
        found.append(f"buffers are cast to {chosen.buffers} (distributed.mixed_precision.buffer)")
    return found


def _sync_words(chosen: Gradients, layout: str, *, grad_accum: int, whole_bytes: int) -> str:
    text = "gradients are added up over the ranks "
    if grad_accum == 1:
        return text + "after the only micro-batch of a step (distributed.sync_gradients_every)"
    if chosen.every == "micro_batch":
        return f"{text}after each of a step's {grad_accum} micro-batches (distributed.sync_gradients_every)"
    text += f"once in a step of {grad_accum} micro-batches (distributed.sync_gradients_every)"
    if whole_bytes:
        text += f"; until then {layout} keeps {whole_bytes / 2**30:.2f} GiB of whole gradients on every rank"
    return text


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
