"""A published run's step, for the tracer: what its script did and this toolkit never does is said beside the rest."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from sft_play.trace.settings import StepSettings


@dataclass(frozen=True)
class ScriptSettings(StepSettings):
    """A step as a script ran it; by default as this toolkit does. `optimizer` may be sgd, adamw_32bit_bnb, or lora_fa,
    which is AdamW, one tensor at a time, and freezes every LoRA A; `peft` any method of PEFT."""

    lengths: tuple[int, ...] = ()
    """Tokens of a row in each micro-batch in turn, repeating; empty: always `seq_len`."""
    fp32_rest: bool = False
    """`prepare_model_for_kbit_training`: norms, embedding and head in fp32."""
    fp32_norms: bool = False
    """The same, and embedding and head put back to `weights` (TRL before 1.0, `peft_module_casting_to_bf16`)."""
    expand_kv: bool = False
    """The script repeats K and V to all heads before attention."""
    holds_outputs: bool = False
    """The loop keeps the model's outputs (its logits) through backward and step."""
    holds_until_next: bool = False
    """With `holds_outputs`: they live until the next micro-batch's outputs take their name."""
    empty_cache_after_load: bool = True
    empty_cache_every_step: bool = False
    """The loop calls `torch.cuda.empty_cache` after each optimizer step."""
    zero_grad_late: bool = False
    """The loop clears the gradients when the next step starts, not when a step ends."""
    peak_from: Literal["loaded", "start", "second_step"] = "loaded"
    """When the script resets its counters: after loading, never, or after a first step."""
    capacity: int | None = None
    """Bytes that bound the allocator's segments; None: no bound."""
    expandable_segments: bool = False
    checkpoints_wrappers: bool = False
    """For fsdp1: the script checkpoints each layer's call with its FSDP wrapper, and gathers its weights once more."""


def to_script_settings(settings: StepSettings, **changes: Any) -> ScriptSettings:
    own = {one.name: getattr(settings, one.name) for one in fields(settings)}
    return ScriptSettings(**{**own, **changes})
