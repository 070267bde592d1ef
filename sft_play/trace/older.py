"""What older transformers did differently from the installed one, for describing published runs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class ExpertLoop(nn.Module):
    """Experts as transformers before 5.0 ran them: a list of MLPs with linear layers of their own, one after another.

    Quantisation sees those layers, as it did then; it skips the stacked weights of today's classes. Routing is even:
    every expert gets the same share of tokens, rounded up.
    """

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
        """Tokens x hidden in and out."""
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


def loop_over_experts(model: nn.Module) -> None:
    """Every block of stacked experts becomes an ExpertLoop; call it on a model on the meta device."""
    for name, module in list(model.named_modules()):
        stacked = getattr(module, "gate_up_proj", None)
        if isinstance(stacked, nn.Parameter) and stacked.dim() == 3:
            with torch.device("meta"):
                model.set_submodule(name, ExpertLoop(module))
