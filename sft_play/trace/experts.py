"""Experts of a traced step: which implementation runs them, and the loops over experts, today's and that of published
runs before transformers 5. Routing has no values: every expert gets the same share of tokens, rounded up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sft_play.trace.settings import StepSettings
from sft_play.training.prepare import experts

LOOP = "sft_play_traced_loop"
"""The name under which `loop` is registered in transformers."""


def implementation(settings: StepSettings, model_class: Any) -> str | None:
    """What transformers is to call the experts by; None leaves classes alone whose own code it does not reach."""
    if not model_class._can_set_experts_implementation():
        return None
    if settings.experts == "cast":
        experts.register()
        return experts.CASTING
    if settings.experts == "eager":
        ALL_EXPERTS_FUNCTIONS.register(LOOP, loop)
        return LOOP
    return "grouped_mm"


def loop(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The eager experts of transformers 5: tokens x hidden in and out, the other two tokens x experts per token. The
    classes' own loops find each expert's tokens by value, which fake tensors do not have."""
    mixed = torch.zeros_like(hidden_states)
    with torch.no_grad():
        chosen = nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
    share = math.ceil(top_k_index.numel() / self.num_experts)
    for expert in range(self.num_experts):
        place, token = (torch.zeros(share, dtype=torch.int64) for _ in range(2))
        both = _product(self, hidden_states[token], "gate_up_proj" if self.has_gate else "up_proj", expert)
        inner = self._apply_gate(both) if self.has_gate else self.act_fn(both)
        out = _product(self, inner, "down_proj", expert)
        out = out * top_k_weights[token, place, None]
        mixed.index_add_(0, token, out.to(mixed.dtype))
    del chosen
    return mixed


def _product(module: Any, rows: Any, name: str, expert: int) -> Any:
    weight = getattr(module, name)[expert]
    if not module.is_transposed:
        return nn.functional.linear(rows, weight, getattr(module, f"{name}_bias")[expert] if module.has_bias else None)
    out = rows @ weight
    return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out
