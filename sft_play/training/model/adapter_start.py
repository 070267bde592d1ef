"""Where adapters start (`tuning.lora.init`), other than at PEFT's zero: PiSSA and LoftQ, without touching the base.

PiSSA (https://huggingface.co/papers/2404.02948) trains the base's largest singular directions A0, B0, which PEFT
subtracts from the base. Here it is a plain adapter of twice the rank on the base as it was, [A, A0] and [B, -B0], whose
second half does not train. LoftQ (https://huggingface.co/papers/2310.08659), one iteration as PEFT's, leaves the NF4
base too; PEFT's divides by no scale: at 2 it adds as much error as it takes off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sft_play.config.schema import LoraConfig
from sft_play.errors import ModelError
from sft_play.training.checkpoints.full_state_dict import gather_zero3_parameter
from sft_play.training.model.fsdp_loading import base_parameter_name
from sft_play.training.model.nf4_experts import nf4_roundtrip

# The base's weights by their names in it.
BaseWeights = Mapping[str, torch.Tensor]

# Of the randomised SVD: power iterations (PiSSA's own fastest comparison has 16), and directions that are dropped.
SVD_ITERATIONS, SVD_EXTRA_RANK = 16, 8


@torch.no_grad()
def initialize_adapters(
    model: Any,
    lora: LoraConfig,
    *,
    seed: int,
    device: torch.device,
    read_base_weights: Callable[[], BaseWeights | None],
) -> None:
    """Put a model's adapters where `tuning.lora.init` says; the same numbers on every rank. `read_base_weights`
    returns the base's own, where the model holds none or only what NF4 makes of them; None: the model's. Raises
    ModelError: the base's files hold no 16-bit weights."""
    if lora.init == "default":
        return
    base_weights = read_base_weights()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for path, layer in _layers_to_initialize(model, lora.init):
            base = layer.get_base_layer()
            name = base_parameter_name(f"{path}.weight")
            with gather_zero3_parameter(base.weight):
                weight = dequantize_module_weight(base) if base_weights is None else base_weights[name]
                matrix = weight.T if getattr(layer, "fan_in_fan_out", False) else weight  # GPT-2's are transposed
                b, a = _initial_factors(matrix.to(device), name, layer, lora)
            for factor, value in ((layer.lora_A, a), (layer.lora_B, b)):
                with gather_zero3_parameter(factor["default"].weight, writer=0):
                    factor["default"].weight.copy_(value)


def _layers_to_initialize(model: Any, init: str) -> Iterator[tuple[str, Any]]:
    """The LoRA layers that start elsewhere; those that NF4 left alone have lost nothing."""
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer) or "default" not in module.lora_A:
            continue
        if init == "pissa" or type(module.get_base_layer()).__name__ == "Linear4bit":
            yield path, module


def _initial_factors(
    weight: torch.Tensor, name: str, layer: Any, lora: LoraConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    if not weight.is_floating_point():
        raise ModelError(f"tuning.lora.init={lora.init}: {name} is stored as {weight.dtype}, and 16 bits are needed")
    target = weight.float() if lora.init == "pissa" else nf4_roundtrip(weight).neg_().add_(weight)
    b, a = low_rank_factors(target, lora.r, scale=layer.scaling["default"])
    return (torch.cat([b, -b], dim=1), torch.cat([a, a])) if lora.init == "pissa" else (b, a)


def low_rank_factors(matrix: torch.Tensor, rank: int, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """B and A with scale x B A the best approximation of a matrix at this rank, in equal parts."""
    left, singular_values, right = torch.svd_lowrank(
        matrix, q=min(rank + SVD_EXTRA_RANK, *matrix.shape), niter=SVD_ITERATIONS
    )
    roots = (singular_values[:rank] / scale).sqrt()
    return left[:, :rank] * roots, (right[:, :rank] * roots).T


def freeze_pissa_half(model: nn.Module, lora: LoraConfig, *, is_sharded_later: bool = False) -> None:
    """Let half of PiSSA's adapters have no gradient; raises ModelError where FSDP divides them only later."""
    if lora.init != "pissa":
        return
    if is_sharded_later:
        reason = "under FSDP this base is divided only when training begins, where half of an adapter cannot be frozen"
        raise ModelError(f"tuning.lora.init=pissa: {reason}; use STRATEGY=ddp or zero3")
    for name, weight in model.named_parameters():
        dim: Literal[0, 1] | None = 0 if ".lora_A." in name else 1 if ".lora_B." in name else None
        if dim is None or not weight.requires_grad:
            continue
        if isinstance(weight, DTensor):  # FSDP2 calls these with the reduced gradient, and no others
            weight.register_post_accumulate_grad_hook(partial(_zero_local_half, frozen_mask=_frozen_mask(weight, dim)))
        else:  # before DDP and DeepSpeed see it
            weight.register_hook(partial(_zero_half, dim=dim))


def _zero_half(gradient: torch.Tensor, *, dim: Literal[0, 1]) -> torch.Tensor:
    halved = gradient.clone()
    halved.narrow(dim, halved.shape[dim] // 2, halved.shape[dim] // 2).zero_()
    return halved


def _frozen_mask(weight: DTensor, dim: Literal[0, 1]) -> torch.Tensor:
    is_frozen = torch.arange(weight.shape[dim], device=weight.device) >= weight.shape[dim] // 2
    full_mask = (is_frozen[:, None] if dim == 0 else is_frozen).expand(weight.shape).contiguous()
    return distribute_tensor(full_mask, weight.device_mesh, weight.placements, src_data_rank=None).to_local()


def _zero_local_half(weight: torch.Tensor, *, frozen_mask: torch.Tensor) -> None:
    gradient = weight.grad
    assert isinstance(gradient, DTensor)
    gradient.to_local().masked_fill_(frozen_mask, 0.0)
