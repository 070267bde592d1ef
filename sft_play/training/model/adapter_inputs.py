"""LoRA layers under autocast without PEFT's cast of their input to the adapters' fp32, which autocast undoes for
lora_A's product: targets that read one input then hold it once. Every bit is the same
(tests/test_adapter_inputs.py)."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D


class _OutsideAutocast:
    """True while autocast is off: nothing else casts then, as in generation, which PEFT runs on the base model."""

    def __bool__(self) -> bool:
        return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def cast_outside_autocast(model: nn.Module) -> int:
    """Let LoRA layers cast their inputs only where autocast is off; returns how many there are. Not DoRA, which takes
    its weights' dtype from the input, nor dropout, which draws in it, nor layers that are not linear."""
    lora_layers = [module for module in model.modules() if _is_plain_lora(module)]
    for layer in lora_layers:
        # PEFT asks this flag in every forward pass (tuners_utils.py, `_cast_input_dtype`, 0.21)
        layer.cast_input_dtype_enabled = _OutsideAutocast()
    return len(lora_layers)


def _is_plain_lora(module: Any) -> bool:
    if not isinstance(module, LoraLayer) or not isinstance(module.get_base_layer(), nn.Linear | Conv1D):
        return False
    has_dropout = any(isinstance(dropout, nn.Dropout) and dropout.p > 0 for dropout in module.lora_dropout.values())
    return not module.lora_variant and not has_dropout
