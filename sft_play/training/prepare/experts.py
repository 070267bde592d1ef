"""The experts of a model's class: whether there are any, which implementation runs them, and
grouped products under autocast."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sft_play.config.schema import RunConfig
from sft_play.models.families import EXPERT_COUNT_FIELDS, FIELD_ALIASES
from sft_play.planner.kernels import (
    ExpertsImplementation,
    check_experts_option,
    select_experts_implementation,
)
from sft_play.planner.precision import Precision
from sft_play.training.class_checks.small_model import measure_small_model, small_model

# The name under which `grouped_mm_in_autocast` is registered in transformers.
CASTING_GROUPED_MM = "sft_play_grouped_mm"

# The attribute of a module with its weights in 4 bits, by name.
PACKED_ATTRIBUTE = "sft_packed"


def grouped_mm_in_autocast(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> Any:
    """transformers' grouped products in autocast's dtype, which autocast leaves alone: fp32 weights
    would be multiplied in fp32. Tokens x hidden in and out, the other two tokens x experts."""
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        self = _CastExperts(self, torch.get_autocast_dtype(device))
    return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


class _CastExperts:
    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value


ALL_EXPERTS_FUNCTIONS.register(CASTING_GROUPED_MM, grouped_mm_in_autocast)


def choose_experts(
    config: RunConfig, skeleton: nn.Module, precision: Precision
) -> ExpertsImplementation | None:
    """The implementation for a model of this class, or None; raises ConfigError for one that cannot
    run."""
    # the attribute that transformers' decorator sets on experts that it runs (integrations/moe.py,
    # 5.23)
    transformers_experts = [
        module for module in skeleton.modules() if hasattr(module, "is_concatenated")
    ]
    if not transformers_experts and not has_custom_experts(skeleton):
        check_experts_option(config)
        return None
    # rows of the down projections: the hidden width and an expert's inner one, whichever comes
    # first
    widths = {width for module in transformers_experts for width in module.down_proj.shape[1:]}
    return select_experts_implementation(
        config,
        uses_custom_experts=not transformers_experts,
        widths=sorted(widths),
        precision=precision,
    )


def fit_balance_loss(hf_config: Any, *, trust_remote_code: bool = False) -> list[str]:
    """Let TRL add the balance loss that the class itself computes: map the class's names for its
    numbers of experts (TRL 1.16 reads two), and set the weight to 0 for a model that computes no
    such loss. Returns the line that says so, if any."""
    coefficient, config_class = balance_coefficient(hf_config), type(hf_config)
    if not coefficient:
        # TRL's head would compute one nevertheless
        if getattr(hf_config, "output_router_logits", False):
            hf_config.output_router_logits = False
        return []
    for name, aliases in (
        ("num_experts", EXPERT_COUNT_FIELDS),
        ("num_experts_per_tok", FIELD_ALIASES["num_experts_per_tok"]),
    ):
        alias = next(
            (
                candidate
                for candidate in aliases
                if isinstance(getattr(hf_config, candidate, None), int)
            ),
            None,
        )
        if not hasattr(hf_config, name) and alias is not None:
            names = config_class.attribute_map
            config_class.attribute_map = {**names, name: names.get(alias, alias)}
    # of all layers: the first ones may be dense, or choose their experts without a router
    reason, _ = measure_small_model(
        hf_config,
        _no_balance_loss_reason,
        trust_remote_code=trust_remote_code,
        needs_all_layers=True,
    )
    if not reason:  # also where no small model computes
        return []
    hf_config.router_aux_loss_coef, hf_config.output_router_logits = 0.0, False
    return [
        "Balance loss: left out, though config.json has"
        f" router_aux_loss_coef={coefficient:g}: {reason}"
    ]


def balance_coefficient(hf_config: Any) -> float:
    """The weight of the experts' balance loss, by TRL's rule: 0 where the config has none."""
    has_router_logits = hasattr(hf_config, "output_router_logits")
    return (
        float(getattr(hf_config, "router_aux_loss_coef", 0.0) or 0.0) if has_router_logits else 0.0
    )


def _no_balance_loss_reason(small_config: Any, *, trust_remote_code: bool = False) -> str:
    # empty where the class computes a balance loss of its routers' logits
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = small_model(small_config, "eager", trust_remote_code)
        inputs = {
            "input_ids": torch.arange(3, 19)[None],
            "output_router_logits": True,
            "use_cache": False,
        }
        # TRL reads the decoder's, and computes with the first (an IndexError where there is none);
        # so do classes
        if not getattr(model.get_decoder()(**inputs), "router_logits", None):
            return "no block of this model gives router logits"
        output = model(**inputs, labels=inputs["input_ids"])
    return (
        ""
        if isinstance(getattr(output, "aux_loss", None), torch.Tensor)
        else "its class computes none"
    )


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Weights, packed ones too, that are one tensor for all experts: path and module, and the
    weight's name there."""
    for path, module in model.named_modules():
        if holds_routed_experts(path, module):
            packed_names = vars(module).get(PACKED_ATTRIBUTE, ())
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() == 3 or name in packed_names:
                    yield path, module, name


def select_stacked_experts(model: nn.Module, targets: Literal["auto"] | Sequence[str]) -> list[str]:
    """Full names of the stacked weights that names of `tuning.lora.target_parameters` mean: by the
    ends of theirs."""
    return [
        f"{path}.{name}"
        for path, _, name in stacked_experts(model)
        if targets == "auto" or any(f".{path}.{name}".endswith(f".{target}") for target in targets)
    ]


def holds_routed_experts(path: str, module: nn.Module) -> bool:
    """Whether a module at this path holds weights of routed experts, not of shared ones."""
    return "shared" not in path and (
        "expert" in type(module).__name__.lower() or "experts" in path.split(".")
    )


def has_custom_experts(skeleton: nn.Module) -> bool:
    """Whether a class has experts that transformers does not run: a list of MLPs, or stacked
    weights of its own."""
    return any(
        re.search(r"(^|\.)experts$", name)
        and (
            isinstance(module, nn.ModuleList)
            or any(weight.dim() == 3 for weight in module.parameters())
        )
        for name, module in skeleton.named_modules()
    )
