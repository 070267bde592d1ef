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
    """The eager experts of transformers 5. Tokens x hidden in and out; the other two are tokens x experts per token.
    The classes' own loops find each expert's tokens by value (models/mixtral/modeling_mixtral.py, MixtralExperts),
    which fake tensors do not have."""
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


# --- before transformers 5.0 ------------------------------------------------------------------------------------------
class ExpertLoop(nn.Module):
    """Experts as transformers before 5.0 ran them: a list of MLPs with linear layers of their own, one after another.
    Quantisation sees those layers, as it did then; it skips the stacked weights of today's classes."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        experts, _, hidden = stacked.gate_up_proj.shape
        width = stacked.down_proj.shape[-1]
        dtype = stacked.down_proj.dtype
        self.experts = nn.ModuleList(_Expert(hidden, width, stacked.act_fn, dtype) for _ in range(experts))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Tokens x hidden in and out; the other two are tokens x experts per token."""
        weights = top_k_weights.to(hidden_states.dtype)
        mixed = torch.zeros_like(hidden_states)
        chosen = nn.functional.one_hot(top_k_index, num_classes=len(self.experts) + 1).permute(2, 1, 0)
        share = math.ceil(top_k_index.numel() / len(self.experts))
        for expert in self.experts:
            place, token = (torch.zeros(share, dtype=torch.int64) for _ in range(2))
            out = expert(hidden_states[None, token].reshape(share, -1)) * weights[token, place, None]
            mixed.index_add_(0, token, out.to(mixed.dtype))
        del chosen
        return mixed


class _Expert(nn.Module):
    """A gated MLP (models/mixtral/modeling_mixtral.py of 4.48, MixtralBlockSparseTop2MLP)."""

    def __init__(self, hidden: int, width: int, activation: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.w2 = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.w3 = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.act_fn = activation

    def forward(self, hidden_states: Any) -> Any:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


def loop_over_experts(model: nn.Module) -> None:
    """Every block of stacked experts becomes an ExpertLoop; call it on a model on the meta device."""
    for name, module in list(model.named_modules()):
        stacked = getattr(module, "gate_up_proj", None)
        if isinstance(stacked, nn.Parameter) and stacked.dim() == 3:
            with torch.device("meta"):
                model.set_submodule(name, ExpertLoop(module))
