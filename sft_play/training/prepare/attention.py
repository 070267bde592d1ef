"""The attention implementation for a model's class, checked, with the reason; `planner.attention` has the rule."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.planner.attention import attention_of, is_hub_kernel
from sft_play.training.model.context_parallel import ATTENTION


@dataclass(frozen=True)
class Attention:
    """An attention implementation by its name in transformers, and why it was chosen; `repeats_kv`: keys and values
    are repeated to all heads (`training.model.repeated_keys`)."""

    name: str
    reason: str
    repeats_kv: bool = False

    @property
    def repeating(self) -> Attention:
        """The same with keys and values repeated, and the reason for it, where it is sdpa."""
        if self.name not in ("sdpa", ATTENTION):
            return self
        why = (
            "; keys and values are repeated to all heads, since flash attention does not run on this GPU in this "
            "precision and PyTorch's math kernel would hold S x S scores"
        )
        return replace(self, reason=self.reason + why, repeats_kv=True)


def choose_attention(config: RunConfig, model_class: Any, *, shares_rows: bool = False) -> Attention:
    """The implementation that was asked for, or sdpa where the model has it; `shares_rows`: one for rows whose tokens
    several ranks share.

    Raises:
        ModelError: the model lacks the one that was asked for, or cannot share rows.
    """
    if shares_rows:
        if not getattr(model_class, "_supports_attention_backend", False):
            raise ModelError(
                f"{model_class.__name__} cannot share rows over context-parallel ranks: its class does not call its "
                "attention through transformers; use a layout without cp (model.mesh_shape=null lets the plan choose)"
            )
        return Attention(ATTENTION, "sdpa over whole rows, each rank for some of the heads (context parallelism)")
    wanted = config.model.attn_implementation
    has_sdpa = bool(getattr(model_class, "_supports_sdpa", False))
    if wanted == "auto":
        reasons = {
            "sdpa": "sdpa: PyTorch's fused attention, no S x S matrix unless rows need a mask",
            "eager": f"eager: {model_class.__name__} has no sdpa; memory grows with the length squared",
        }
        name = attention_of(wanted, has_sdpa=has_sdpa)
        return Attention(name, reasons[name])
    if wanted == "sdpa" and not has_sdpa:
        raise ModelError(f"model.attn_implementation=sdpa: {model_class.__name__} has none; use eager or auto")
    if is_hub_kernel(wanted):
        repository = wanted.partition("@")[0]
        if importlib.util.find_spec("kernels") is None:
            raise ModelError(
                f"model.attn_implementation={wanted} needs the package kernels, which is not installed; pip install "
                "kernels, or use auto"
            )
        _require_flash(model_class, repository)
    if wanted == "flash_attention_2":
        if importlib.util.find_spec("flash_attn") is None:
            raise ModelError(
                "model.attn_implementation=flash_attention_2 needs the package flash-attn, which is not installed; "
                "use sdpa, which is as fast for unpacked rows"
            )
        _require_flash(model_class, wanted)
    return Attention(wanted, f"{wanted}, as model.attn_implementation says")


def _require_flash(model_class: Any, wanted: str) -> None:
    """Raises ModelError where the class has no flash attention, or not this one."""
    setting = f"model.attn_implementation={wanted}: {model_class.__name__}"
    if not getattr(model_class, "_supports_flash_attn", False):
        raise ModelError(f"{setting} has none; use sdpa")
    compatible = getattr(model_class, "_compatible_flash_implementations", None)
    if compatible and wanted not in compatible:  # such as gpt-oss, whose attention sinks flash-attn 2 lacks
        raise ModelError(
            f"{setting} runs only with other kernels ({', '.join(compatible)}), and transformers would use one of "
            "those instead; use auto"
        )
