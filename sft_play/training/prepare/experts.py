"""The experts of a model's class: whether there are any, which implementation runs them, and grouped products under
autocast."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sft_play.config.schema import RunConfig
from sft_play.facts.models.config_fields import FIELD_ALIASES, EXPERT_COUNT_FIELDS
from sft_play.planner.kernels import Experts, experts_of, refuse_without_experts
from sft_play.planner.precision import Precision
from sft_play.training.class_checks.small_model import on_small_model, small_model

# The name under which `grouped_mm_in_autocast` is registered in transformers.
CASTING = "sft_play_grouped_mm"

# The attribute of a module with those of its weights that are kept in 4 bits, by name.
PACKED = "sft_packed"

_LIST = re.compile(r"(^|\.)experts$")


def grouped_mm_in_autocast(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped products in autocast's dtype, which autocast leaves alone: fp32 weights would be multiplied
    in fp32. Tokens x hidden in and out, the other two tokens x experts."""
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        self = _Cast(self, torch.get_autocast_dtype(device))
    result: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return result


class _Cast:
    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value


def register() -> None:
    """Make `CASTING` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(CASTING, grouped_mm_in_autocast)


def choose_experts(config: RunConfig, skeleton: nn.Module, precision: Precision) -> Experts | None:
    """The implementation for a model of this class, or None; raises ConfigError for one that cannot run."""
    # the attribute that transformers' decorator sets on experts that it runs (integrations/moe.py, 5.23)
    through_transformers = [module for module in skeleton.modules() if hasattr(module, "is_concatenated")]
    if not through_transformers and not has_own_experts(skeleton):
        refuse_without_experts(config)
        return None
    # rows of the down projections: the hidden width and an expert's inner one, whichever comes first
    sides = {size for module in through_transformers for size in module.down_proj.shape[1:]}
    return experts_of(config, has_own_code=not through_transformers, widths=sorted(sides), precision=precision)


def fit_balance_loss(hf_config: Any, *, trust_remote_code: bool = False) -> list[str]:
    """Make TRL's balance loss that of the class: its names for the numbers of experts (TRL 1.16 reads two), and none
    where the config has a weight for one that this model does not compute. Returns the line that says so, if any."""
    weight, kind = balance_coefficient(hf_config), type(hf_config)
    if not weight:
        if getattr(hf_config, "output_router_logits", False):  # TRL's head would compute one nevertheless
            hf_config.output_router_logits = False
        return []
    for name, others in (("num_experts", EXPERT_COUNT_FIELDS), ("num_experts_per_tok", FIELD_ALIASES["num_experts_per_tok"])):
        given = next((other for other in others if isinstance(getattr(hf_config, other, None), int)), None)
        if not hasattr(hf_config, name) and given is not None:
            kind.attribute_map = {**kind.attribute_map, name: kind.attribute_map.get(given, given)}
    # of all layers: the first ones may be dense, or choose their experts without a router
    why_none, _ = on_small_model(hf_config, _why_no_balance, trust_remote_code=trust_remote_code, whole_depth=True)
    if not why_none:  # also where no small model computes
        return []
    hf_config.router_aux_loss_coef, hf_config.output_router_logits = 0.0, False
    return [f"Balance loss: left out, though config.json has router_aux_loss_coef={weight:g}: {why_none}"]


def balance_coefficient(hf_config: Any) -> float:
    """The weight of the experts' balance loss, by TRL's rule: 0 where the config has none."""
    has_one = hasattr(hf_config, "output_router_logits")
    return float(getattr(hf_config, "router_aux_loss_coef", 0.0) or 0.0) if has_one else 0.0


def _why_no_balance(small: Any, *, trust_remote_code: bool = False) -> str:
    """Why TRL has no balance loss to add for a model: empty where its class computes one of its routers' logits."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = small_model(small, "eager", trust_remote_code)
        inputs = {"input_ids": torch.arange(3, 19)[None], "output_router_logits": True, "use_cache": False}
        # TRL reads the decoder's, and computes with the first (an IndexError where there is none); so do classes
        if not getattr(model.get_decoder()(**inputs), "router_logits", None):
            return "no block of this model gives router logits"
        output = model(**inputs, labels=inputs["input_ids"])
    return "" if isinstance(getattr(output, "aux_loss", None), torch.Tensor) else "its class computes none"


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Weights, packed ones too, that are one tensor for all experts: path and module, and the weight's name there."""
    for path, module in model.named_modules():
        if is_routed(path, module):
            own = vars(module).get(PACKED, ())
            names = [name for name, one in module.named_parameters(recurse=False) if one.dim() == 3 or name in own]
            yield from ((path, module, name) for name in names)


def meant_experts(model: nn.Module, targets: Literal["auto"] | Sequence[str]) -> list[str]:
    """Full names of the stacked weights that names of `tuning.lora.target_parameters` mean: by the ends of theirs."""
    names = [f"{path}.{name}" for path, _, name in stacked_experts(model)]
    return [name for name in names if targets == "auto" or any(f".{name}".endswith(f".{one}") for one in targets)]


def is_routed(path: str, module: nn.Module) -> bool:
    """Whether a module at this path holds weights of routed experts, not of shared ones."""
    has_name = "expert" in type(module).__name__.lower() or "experts" in path.split(".")
    return has_name and "shared" not in path


def has_own_experts(skeleton: nn.Module) -> bool:
    """Whether a class has experts that transformers does not run: a list of MLPs, or stacked weights of its own."""
    return any(
        _LIST.search(name)
        and (isinstance(module, nn.ModuleList) or any(weight.dim() == 3 for weight in module.parameters()))
        for name, module in skeleton.named_modules()
    )
