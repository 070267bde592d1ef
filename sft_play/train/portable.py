"""Whole checkpoints of one process, DDP and FSDP: weights as safetensors, optimizer states by number.

FSDP's own files hold the optimizer's states by name; here they are written as the optimizer of one process writes
them (`optimizer.pt`: parameters numbered in the order of the groups), and read again whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from sft_play.errors import TrainingError

ADAPTER_FILE = "adapter_model.safetensors"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


def names_by_group(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """Names of the parameters of each optimizer group, in their order."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [[name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def numbered(states: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Optimizer states by name as `Optimizer.state_dict` has them: by number."""
    flat = [name for group in names for name in group]
    number_of = {name: number for number, name in enumerate(flat)}
    return {
        "state": {number_of[name]: state for name, state in states["state"].items()},
        "param_groups": [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in states["param_groups"]
        ],
    }


def named(states: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Optimizer states by number, as one process writes them, by name.

    Raises:
        TrainingError: they are of another set of parameters.
    """
    flat = [name for group in names for name in group]
    sizes = [len(group["params"]) for group in states["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise TrainingError(
            f"the checkpoint's optimizer has groups of {sizes} tensors, and this one has "
            f"{[len(group) for group in names]}: it was written for other trained weights"
        )
    return {
        "state": {flat[number]: state for number, state in states["state"].items()},
        "param_groups": [
            {**group, "params": list(of_group)} for group, of_group in zip(states["param_groups"], names, strict=True)
        ],
    }


def whole_optimizer(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """States of an FSDP optimizer, gathered and by number; empty on ranks other than the first. All ranks call it."""
    names = names_by_group(model, optimizer)
    states = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    return numbered(states, names) if states.get("state") else {}


def fill_optimizer(model: nn.Module, optimizer: Any, states: Mapping[str, Any] | None) -> None:
    """Give an FSDP optimizer whole states that the first rank read; the other ranks give None. All ranks call it."""
    by_name = named(states, names_by_group(model, optimizer)) if states is not None else {}
    set_optimizer_state_dict(model, optimizer, by_name, options=_FROM_FIRST)


def read_weights(checkpoint: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole trained weights of a checkpoint, by their names in the model."""
    if is_peft_model(model):
        names = adapter_names(model)
        saved = load_file(checkpoint / ADAPTER_FILE)
        return {names.get(name, name): tensor for name, tensor in saved.items()}
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def fill_adapter(model: Any, folder: Path) -> None:
    """Give a model that no engine has divided yet the adapter of an earlier stage.

    Raises:
        TrainingError: the adapter has other tensors than the model.
    """
    weights = read_weights(folder, model)
    parameters = dict(model.named_parameters())
    wanted = set(adapter_names(model).values())
    lost = sorted((set(weights) - set(parameters)) | (wanted - set(weights)))
    if lost:
        raise TrainingError(
            f"{folder / ADAPTER_FILE} is not the adapter of this model: {lost[0]} is in one of them only"
        )
    for name, tensor in weights.items():
        with _whole(parameters[name]), torch.no_grad():
            parameters[name].copy_(tensor)


def _whole(parameter: Any) -> Any:
    """The parameter whole while it is written, where ZeRO-3 has divided it already."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def adapter_names(model: Any) -> dict[str, str]:
    """Name under which PEFT saves each tensor of the adapter: its name in memory, which holds the adapter's too."""
    tensors = model.state_dict()
    by_identity = {id(tensor): name for name, tensor in tensors.items()}
    saved = get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)
    return {name: by_identity[id(tensor)] for name, tensor in saved.items()}


def fill_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give an FSDP model whole weights that the first rank read; the others give none. All ranks call it.

    Raises:
        TrainingError: a tensor of the checkpoint has no place in the model.
    """
    there = set(model.state_dict())
    lost = sorted(set(weights) - there)
    if lost:
        raise TrainingError(f"the checkpoint's {lost[0]} has no place in the model; it was written by another version")
    set_model_state_dict(model, dict(weights), options=_FROM_FIRST)
