"""The plan's estimate on the step of a published run: what it would have promised without a trace.

Its words are a run's config and a plan's step. What a script did that neither can say is refused with a reason.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.memory_model.script_settings import ScriptSettings
from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.planner.kernels import sdpa_kernel
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.block import LOSS_FUNCTIONS, OutputHead
from sft_play.planner.memory.estimate import MemoryEstimate, estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import sdpa_call
from sft_play.planner.memory.tape import ForwardPass, TensorRef, single_gradient
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import load_planned_shape
from sft_play.trace.settings import VARLEN_ATTENTIONS

OPTIMIZERS = {
    "adamw_fused": "adamw_torch_fused", "adamw_foreach": "adamw_torch", "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
}  # fmt: skip
"""The config's names of the trace's optimizers."""


def script_loss(run: ForwardPass, x: TensorRef, words: OutputHead) -> TensorRef:
    """The class's own loss over whole logits: T*V*(e + 4 + 4) forward; 12*T*V, then T*V*e, backward."""
    tape, size = run.tape, x.elements // run.spec.hidden * words.vocab_size
    logits = run.dense(x, "head", run.spec.hidden, words.vocab_size, words.weight_itemsize, trainable=words.trainable)
    wide = run.to(logits, 4)
    return tape.op((wide,), size, 4, backward=single_gradient(size, 4), holds_output=True)


LOSS_FUNCTIONS["model"] = script_loss


class NoClosedForm(Exception):
    """Settings that the estimate has no words for; the text is the reason."""


def closed_form(settings: ScriptSettings) -> MemoryEstimate:
    """The estimate's prediction of these settings, in bytes of one rank. Raises NoClosedForm."""
    _require_known(settings)
    try:
        shape = load_planned_shape(settings.model, name="published")
    except ModelError as error:
        raise NoClosedForm(f"the model's shape is not read: {error}") from None
    is_mixed = settings.strategy == "fsdp2" or settings.strategy.startswith("zero")
    compute = settings.autocast or (settings.mixed_precision if is_mixed else None) or "float32"
    load = "float32" if settings.fp32_rest else settings.weights
    precision = Precision(compute=compute, load=load, reason="")
    step = _step(settings)
    call = sdpa_call(shape, masked=step.padded, half_precision={compute, load} != {"float32"})
    if step.attention == "sdpa" and sdpa_kernel(call, step.capability, uses_cudnn=False) == "math":
        raise NoClosedForm("the estimate has no words for PyTorch's math kernel")
    found = estimate_memory(_config(settings), shape, precision, step)
    return _with_outputs(found, settings, shape.vocab_size)


def _require_known(settings: ScriptSettings) -> None:
    kind = str((settings.peft or {}).get("peft_type", "LORA")).upper()
    targets = (settings.peft or {}).get("target_modules", "all-linear")
    reasons = {
        f"adapters of another kind ({kind})": kind not in ("LORA", "DORA"),
        "target modules given as a pattern": isinstance(targets, str) and targets != "all-linear",
        f"the optimizer {settings.optimizer}": settings.optimizer not in OPTIMIZERS,
        "flat parameters of the first FSDP": settings.strategy == "fsdp1",
        "experts with linear layers of their own": settings.experts == "loop",
        "norms in fp32 beside half-precision weights": settings.fp32_norms,
        "a loss in half precision": settings.loss == "logits_shifted_half",
    }
    for reason, holds in reasons.items():
        if holds:
            raise NoClosedForm(f"the estimate has no words for {reason}")


def _config(settings: ScriptSettings) -> RunConfig:
    adapter: Mapping[str, Any] = settings.peft or {}
    targets = adapter.get("target_modules", "all-linear")
    bf16_adapters = (settings.adapters or ("bfloat16" if settings.mode == "qlora" else "float32")) == "bfloat16"
    lora = {
        "dtype": "bfloat16" if bf16_adapters else "auto", "r": int(adapter.get("r", 8)),
        "dropout": float(adapter.get("lora_dropout") or 0),
        "use_dora": bool(adapter.get("use_dora")) or str(adapter.get("peft_type", "")).upper() == "DORA",
        "target_modules": "auto" if not targets or isinstance(targets, str) else list(targets),
    }  # fmt: skip
    plain = {
        "model": {"name": "published", "max_seq_len": settings.seq_len},
        "tuning": {"mode": settings.mode, "lora": lora},
        "train": {"optim": OPTIMIZERS[settings.optimizer]},
    }
    return config_from_text(json.dumps(plain), name="published")


def _step(settings: ScriptSettings) -> Step:
    world, own = settings.world, settings.attention
    layouts = {"single": SINGLE, "ddp": Layout("ddp", world)}
    layouts |= {"zero1": Layout("zero1", world, world), "zero2": Layout("zero2", world, world)}
    layouts |= {"zero3": Layout("zero3", world, world)}
    return Step(
        micro_batch=settings.micro_batch, grad_accum=settings.grad_accum, seq_len=settings.seq_len,
        layout=layouts.get(settings.strategy) or Layout("fsdp", world, world),
        checkpointed_layers=settings.checkpointed_layers if settings.checkpointing else 0,
        loss="chunked" if settings.loss == "chunked" else "model",
        attention="sdpa" if own == "varlen" or own == "one_by_one" else own, varlen=own in VARLEN_ATTENTIONS,
        one_by_one=own == "one_by_one",
        # K and V repeated by the script run the memory-efficient kernel, as a mask makes it run here
        padded=settings.mask == "padded" or settings.expand_kv, casts_inputs=settings.casts_inputs, saves=False,
        capability=settings.capability,
    )  # fmt: skip


def _with_outputs(found: MemoryEstimate, settings: ScriptSettings, words: int) -> MemoryEstimate:
    """Logits that the script holds through the step, and the fp32 copy that older losses shifted.

    Older losses are whole logits to the estimate, which knows the newest alone.
    """
    if settings.loss == "chunked":
        return found
    places = settings.micro_batch * settings.seq_len * words
    is_half = settings.autocast is not None or (settings.weights != "float32" and not settings.fp32_rest)
    held = 4 * places if settings.loss in ("logits_shifted", "logits_shifted_float") else 0
    if settings.holds_outputs:
        held += places * (2 if is_half else 4)
    terms = found.terms | {"loss_head": found.terms.get("loss_head", 0) + held}
    # what is held takes part in fragmentation as the rest does: reserved bytes and margin grow in proportion
    larger = found.reserved * (found.allocated + held) // max(1, found.allocated)
    return replace(found, terms=terms, reserved=larger, margin=found.margin * larger // max(1, found.reserved))
