"""The experts of a model's class: whether there are any, which implementation runs them, and grouped products under
autocast."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sft_play.config.schema import RunConfig
from sft_play.planner.experts import Experts, experts_of, refuse_without_experts
from sft_play.planner.precision import Precision

CASTING = "sft_play_grouped_mm"
"""The name under which `grouped_mm_in_autocast` is registered in transformers."""

_LIST = re.compile(r"(^|\.)experts$")


def grouped_mm_in_autocast(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped products in autocast's dtype: tokens x hidden in and out, the other two tokens x experts.

    Autocast leaves grouped products alone, and transformers then multiplies in the dtype of the weights: fp32 weights
    would be multiplied in fp32, where eager experts and every other product run in 16 bits.
    """
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        self = _Cast(self, torch.get_autocast_dtype(device))
    result: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return result


class _Cast:
    """A module of experts whose parameters are read in another dtype."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value


def register() -> None:
    """Make `CASTING` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(CASTING, grouped_mm_in_autocast)


def name_in_transformers(experts: Experts) -> str:
    """What transformers calls the implementation; `register` comes first."""
    return CASTING if experts.casts else experts.name


def choose_experts(config: RunConfig, skeleton: nn.Module, precision: Precision) -> Experts | None:
    """The implementation for a model of this class (its weights may be on the meta device); None without experts.

    Raises:
        ConfigError: the config names one that cannot run, or there are no experts.
    """
    # the attribute that transformers' decorator sets on experts that it runs (integrations/moe.py, 5.23)
    through_transformers = [module for module in skeleton.modules() if hasattr(module, "is_concatenated")]
    if not through_transformers and not has_own_experts(skeleton):
        refuse_without_experts(config)
        return None
    # rows of the down projections: the hidden width and an expert's inner one, whichever comes first
    sides = {size for module in through_transformers for size in module.down_proj.shape[1:]}
    return experts_of(
        config, has_own_code=not through_transformers, widths=sorted(sides), precision=precision
    )  # fmt: skip


def has_own_experts(skeleton: nn.Module) -> bool:
    """Whether a class has experts that transformers does not run: a list of MLPs, or stacked weights of its own."""
    return any(
        _LIST.search(name)
        and (isinstance(module, nn.ModuleList) or any(weight.dim() == 3 for weight in module.parameters()))
        for name, module in skeleton.named_modules()
    )
