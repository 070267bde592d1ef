"""LoRA's adapters: the one that a run continues, where new ones start (`tuning.lora.init`), and
inputs that are held once.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.pytorch_utils import Conv1D

from sft_play.config.load import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_KEY,
    ADAPTER_WEIGHTS_FILE,
    find_adapter_run,
)
from sft_play.config.schema import LoraConfig, RunConfig
from sft_play.data.sources.files import file_digest
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity, find_model_folder
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.training.checkpoints.full_state_dict import (
    gather_zero3_parameter,
    is_duplicate_name,
    model_names_by_saved_name,
)
from sft_play.training.model.model_loading import base_parameter_name
from sft_play.training.model.nf4_experts import nf4_roundtrip
from sft_play.training.prepare.model_spec import ModelSpec, build_meta_model, resized_spec

# LoRA layers under autocast without PEFT's cast of their input to the adapters' fp32, which
# autocast undoes for lora_A's product: targets that read one input then hold it once. Every bit is
# the same (tests/test_adapter_inputs.py).


# True while autocast is off: nothing else casts then, as in generation, which PEFT runs on the base
# model.
class _OutsideAutocast:
    def __bool__(self) -> bool:
        return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def cast_outside_autocast(model: nn.Module) -> int:
    """Let LoRA layers cast their inputs only where autocast is off; returns how many there are. Not
    DoRA, which takes its weights' dtype from the input, nor dropout, which draws in it, nor layers
    that are not linear.
    """
    lora_layers = [module for module in model.modules() if _is_plain_lora(module)]
    for layer in lora_layers:
        # PEFT asks this flag in every forward pass (tuners_utils.py, `_cast_input_dtype`, 0.21)
        layer.cast_input_dtype_enabled = _OutsideAutocast()
    return len(lora_layers)


def _is_plain_lora(module: Any) -> bool:
    if not isinstance(module, LoraLayer) or not isinstance(
        module.get_base_layer(), nn.Linear | Conv1D
    ):
        return False
    has_dropout = any(
        isinstance(dropout, nn.Dropout) and dropout.p > 0
        for dropout in module.lora_dropout.values()
    )
    return not module.lora_variant and not has_dropout


# --------------------------------------------------------------------------------------------------
# Where adapters start (`tuning.lora.init`), other than at PEFT's zero: PiSSA and LoftQ, without
# touching the base.
#
# PiSSA (https://huggingface.co/papers/2404.02948) trains the base's largest singular directions A0,
# B0, which PEFT subtracts from the base. Here it is a plain adapter of twice the rank on the base
# as it was, [A, A0] and [B, -B0], whose second half does not train. LoftQ
# (https://huggingface.co/papers/2310.08659), one iteration as PEFT's, leaves the NF4 base too;
# PEFT's divides by no scale: at 2 it adds as much error as it takes off.


# Of the randomised SVD: power iterations (PiSSA's own fastest comparison has 16), and directions
# that are dropped.
SVD_ITERATIONS, SVD_EXTRA_RANK = 16, 8


@torch.no_grad()
def initialize_adapters(
    model: Any,
    lora: LoraConfig,
    *,
    seed: int,
    device: torch.device,
    read_base_weights: Callable[[], Mapping[str, torch.Tensor] | None],
) -> None:
    """Fill a model's new adapters by `tuning.lora.init`, with the same numbers on every rank.
    `read_base_weights` returns the base's own weights if the model holds none, or only their NF4
    copy; None: use the model's. Raises ModelError: the base's files hold no 16-bit weights."""
    if lora.init == "default":
        return
    base_weights = read_base_weights()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for path, layer in model.named_modules():
            if not isinstance(layer, LoraLayer) or "default" not in layer.lora_A:
                continue
            base: Any = layer.get_base_layer()
            if lora.init != "pissa" and type(base).__name__ != "Linear4bit":
                continue  # what NF4 left alone has lost nothing
            name = base_parameter_name(f"{path}.weight")
            with gather_zero3_parameter(base.weight):
                weight = (
                    dequantize_module_weight(base) if base_weights is None else base_weights[name]
                )
                if not weight.is_floating_point():
                    raise ModelError(
                        f"tuning.lora.init={lora.init}: {name} is stored"
                        f" as {weight.dtype}, and 16 bits are needed"
                    )
                if getattr(layer, "fan_in_fan_out", False):  # GPT-2's are transposed
                    weight = weight.T
                weight = weight.to(device)
                target = (
                    weight.float()
                    if lora.init == "pissa"
                    else nf4_roundtrip(weight).neg_().add_(weight)
                )
                b, a = low_rank_factors(target, lora.r, scale=layer.scaling["default"])
                if lora.init == "pissa":
                    b, a = torch.cat([b, -b], dim=1), torch.cat([a, a])
            for factor, value in ((layer.lora_A, a), (layer.lora_B, b)):
                with gather_zero3_parameter(factor["default"].weight, writer=0):
                    factor["default"].weight.copy_(value)


def low_rank_factors(
    matrix: torch.Tensor, rank: int, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """B and A with scale x B A the best approximation of a matrix at this rank, in equal parts."""
    left, singular_values, right = torch.svd_lowrank(
        matrix, q=min(rank + SVD_EXTRA_RANK, *matrix.shape), niter=SVD_ITERATIONS
    )
    roots = (singular_values[:rank] / scale).sqrt()
    return left[:, :rank] * roots, (right[:, :rank] * roots).T


def freeze_pissa_half(
    model: nn.Module, lora: LoraConfig, *, is_sharded_later: bool = False
) -> None:
    """Let half of PiSSA's adapters have no gradient; raises ModelError where FSDP divides them only
    later."""
    if lora.init != "pissa":
        return
    if is_sharded_later:
        raise ModelError(
            "tuning.lora.init=pissa: under FSDP this base is divided only when training begins,"
            " where half of an adapter cannot be frozen; use STRATEGY=ddp or zero3"
        )
    for name, weight in model.named_parameters():
        is_lora_a = ".lora_A." in name
        if not weight.requires_grad or not (is_lora_a or ".lora_B." in name):
            continue
        dim: Literal[0, 1] = 0 if is_lora_a else 1
        # FSDP2 calls these with the reduced gradient, and no others
        if isinstance(weight, DTensor):
            is_frozen = (
                torch.arange(weight.shape[dim], device=weight.device) >= weight.shape[dim] // 2
            )
            full_mask = (
                (is_frozen[:, None] if dim == 0 else is_frozen).expand(weight.shape).contiguous()
            )
            mask = distribute_tensor(
                full_mask, weight.device_mesh, weight.placements, src_data_rank=None
            )
            weight.register_post_accumulate_grad_hook(
                partial(_zero_local_half, frozen_mask=mask.to_local())
            )
        else:  # before DDP and DeepSpeed see it
            weight.register_hook(partial(_zero_half, dim=dim))


def _zero_half(gradient: torch.Tensor, *, dim: Literal[0, 1]) -> torch.Tensor:
    halved = gradient.clone()
    halved.narrow(dim, halved.shape[dim] // 2, halved.shape[dim] // 2).zero_()
    return halved


def _zero_local_half(weight: torch.Tensor, *, frozen_mask: torch.Tensor) -> None:
    gradient = weight.grad
    assert isinstance(gradient, DTensor)
    gradient.to_local().masked_fill_(frozen_mask, 0.0)


# --------------------------------------------------------------------------------------------------
# The adapter that a run continues (`model.adapter`): checked against model and base before weights
# are read.


@dataclass(frozen=True)
class BaseAdapter:
    """An adapter that fits the run's model and belongs to its base."""

    folder: Path
    # Digest of its weights' file.
    sha256: str
    # Name of the run that trained it; None where there is no run of this toolkit beside it.
    run: str | None
    note: str


def read_base_adapter(config: RunConfig, model_spec: ModelSpec) -> BaseAdapter | None:
    """The adapter that a run continues; None where it starts a new one. Raises ModelError: its
    files cannot be read, or are the adapter of another model or another base."""
    if config.model.adapter is None:
        return None
    folder = Path(config.model.adapter)
    run = find_adapter_run(folder)
    manifest_data = (run[1].get("data") if run else None) or {}
    # the adapter's base has to be the model: by digest where both are files here, else by name
    recorded_weights = manifest_data.get("weights") or {}
    name, sha256 = (
        config.model.name,
        base_weights_identity(config.model.name, model_spec.hf_config)["sha256"],
    )
    config_base = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8")).get(
        "base_model_name_or_path"
    )
    adapter_base = str(recorded_weights.get("path") or config_base or "")
    recorded_sha256, is_local = recorded_weights.get("sha256"), find_model_folder(name) is not None
    if not recorded_weights and is_local and Path(adapter_base).is_dir():
        recorded_sha256 = base_weights_identity(adapter_base, None)["sha256"]
    # a digest of files has 64 digits, a commit of the hub 40
    if is_local and recorded_sha256 is not None and len(str(recorded_sha256)) == len(str(sha256)):
        if recorded_sha256 != sha256:
            raise ModelError(
                f"{ADAPTER_KEY}: {folder} was trained on other weights ({one_line(adapter_base)})"
                f" than those of model.name={one_line(name)}"
            )
    elif adapter_base and _short_name(adapter_base) != _short_name(name):
        raise ModelError(
            f"{ADAPTER_KEY}: {folder} was trained on {one_line(adapter_base)}, and model.name is"
            f" {one_line(name)}: give the adapter's own base, or correct its {ADAPTER_CONFIG_FILE}"
        )
    require_unchanged(folder)
    file = folder / ADAPTER_WEIGHTS_FILE
    model = build_meta_model(
        resized_spec(model_spec), trust_remote_code=config.model.trust_remote_code
    )
    state = model.state_dict()
    expected_shapes = {
        name: tuple(state[parameter_name].shape)
        for name, parameter_name in model_names_by_saved_name(model).items()
    }
    to_saved_name = model_spec.text_tower.to_full_name if model_spec.text_tower is not None else str
    try:
        with safe_open(file, framework="pt") as tensors:
            saved = {
                to_saved_name(name): tensors.get_tensor(name)
                for name in tensors.keys()  # noqa: SIM118
                if not is_duplicate_name(name)
            }
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{ADAPTER_KEY}: {file} cannot be read: {one_line(str(error))}") from None
    problem = ""
    for name in sorted({**expected_shapes, **saved}):
        shape, expected_shape = (
            tuple(saved[name].shape) if name in saved else None,
            expected_shapes.get(name),
        )
        if shape != expected_shape:
            problem = f"{one_line(name)} has the shape {shape} there and {expected_shape} here"
        elif not saved[name].isfinite().all():
            problem = f"{one_line(name)} has values that are not finite"
        if problem:
            raise ModelError(
                f"{ADAPTER_KEY}: {file} does not fit {one_line(config.model.name)}: {problem}"
            )
    digest = file_digest(file)
    note = (
        f"Adapter: continues {folder} ({len(saved)} tensors, digest {digest[:12]}), with a new"
        " optimizer and schedule"
    )
    return BaseAdapter(folder, digest, run[0].name if run else None, note)


# `owner/name`, a folder of that name and its snapshot in the hub's cache are equal.
def _short_name(name: str) -> str:
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else Path(name).name).lower()
