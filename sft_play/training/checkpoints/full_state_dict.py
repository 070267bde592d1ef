"""Whole checkpoints of one process, DDP and FSDP: weights as safetensors, optimizer states by
number, as one process's optimizer writes them, so that any number of ranks can read them."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sft_play.errors import ModelError, TrainingError
from sft_play.training.distributed import is_first
from sft_play.training.model.language_model import PEFT_PREFIX, find_text_tower, names_lost_by_peft

ADAPTER_FILE = "adapter_model.safetensors"
# not strict: an adapter's checkpoint lacks the base's tensors
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


def has_adapter(model: Any) -> bool:
    """Whether this is a PEFT model."""
    return bool(is_peft_model(model))


def tied_weight_names(model: Any) -> set[str]:
    """Names of tied weights, which are saved once: under the name that is not among these."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def _names_by_group(model: nn.Module, optimizer: Any) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def full_optimizer_states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """States of an FSDP optimizer, gathered, keyed by number as in `Optimizer.state_dict`; empty on
    all ranks but the first. All ranks call it."""
    indexes = {
        name: index
        for index, name in enumerate(itertools.chain(*_names_by_group(model, optimizer)))
    }
    states = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not states.get("state"):  # torch leaves it empty on the other ranks
        return {}
    return {
        "state": {indexes[name]: state for name, state in states["state"].items()},
        "param_groups": [
            {**group, "params": [indexes[name] for name in group["params"]]}
            for group in states["param_groups"]
        ],
    }


def load_optimizer_states(
    model: nn.Module, optimizer: Any, states: Mapping[str, Any] | None
) -> None:
    """Load whole states, which the first rank read, into an FSDP optimizer. All ranks call it,
    others with None. Raises TrainingError: they are of other parameters."""
    by_name: dict[str, Any] = {}
    if states is not None:
        names_by_group = _names_by_group(model, optimizer)
        saved_sizes, sizes = (
            [len(group["params"]) for group in states["param_groups"]],
            list(map(len, names_by_group)),
        )
        if saved_sizes != sizes:
            raise TrainingError(
                f"the checkpoint's optimizer has groups of {saved_sizes} tensors, but this one has "
                f"{sizes}: it was written for other trained weights"
            )
        all_names = list(itertools.chain(*names_by_group))
        by_name = {
            "state": {all_names[index]: state for index, state in states["state"].items()},
            "param_groups": [
                {**group, "params": names}
                for group, names in zip(states["param_groups"], names_by_group, strict=True)
            ],
        }
    set_optimizer_state_dict(model, optimizer, by_name, options=_FROM_RANK_0)


def read_checkpoint_weights(checkpoint: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole trained weights of a checkpoint, by their names in the model."""
    if has_adapter(model):
        names, tensors = model_names_by_saved_name(model), load_file(checkpoint / ADAPTER_FILE)
        text_tower = find_text_tower(model)
        if text_tower is not None:  # a checkpoint of the Trainer has PEFT's own names
            tensors = {text_tower.to_full_name(name): tensor for name, tensor in tensors.items()}
        return {
            names.get(name, name): tensor
            for name, tensor in tensors.items()
            if not is_duplicate_name(name)
        }
    return {
        name: tensor
        for file in sorted(checkpoint.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def load_full_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load whole weights into a model that is not divided, file by file; raises TrainingError where
    they differ."""
    missing, unexpected = set(model.state_dict()), list[str]()
    for file in sorted(checkpoint.glob("model*.safetensors")):
        weights = load_file(file)
        missing -= set(weights)
        unexpected += model.load_state_dict(weights, strict=False).unexpected_keys
    require_same_names(model, missing, unexpected)


def require_same_names(model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raises TrainingError where a checkpoint lacks a tensor of the model, other than a tied one,
    or has another."""
    if names := [*sorted(set(missing) - tied_weight_names(model)), *unexpected]:
        raise TrainingError(
            "the checkpoint does not match the model:"
            f" {', '.join(names[:4])}; it was written by another version"
        )


def is_duplicate_name(name: str) -> bool:
    """Whether a name in an adapter's file is a copy's, which PEFT writes where the vocabulary was
    resized."""
    return ".original_module." in name or ".modules_to_save." in name


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Load an earlier adapter into a model that is not divided yet; raises TrainingError where it
    has other tensors."""
    weights = read_checkpoint_weights(folder, model)
    parameters = dict(model.named_parameters())
    expected = set(model_names_by_saved_name(model).values())
    unmatched = sorted((set(weights) - set(parameters)) | (expected - set(weights)))
    if unmatched:
        raise TrainingError(
            f"{folder / ADAPTER_FILE} is not this model's: {unmatched[0]} is in one of them only"
        )
    for name, tensor in weights.items():
        # ZeRO-3 divides parameters as soon as they are created, before there is an engine
        with gather_zero3_parameter(parameters[name], writer=0), torch.no_grad():
            parameters[name].copy_(tensor)


def load_adapter(model: Any, folder: Path) -> Any:
    """A model with the adapter in a folder, in eval mode; a language model's may be named as in its
    whole class."""
    from peft import PeftConfig, PeftModel, get_peft_model

    text_tower, names = find_text_tower(model), list(load_file(folder / ADAPTER_FILE))
    config = PeftConfig.from_pretrained(str(folder))
    if config.peft_type != "LORA":  # of other kinds PEFT would fetch parts that the file names
        raise ModelError(
            f"{folder} holds an adapter of another kind than"
            " LORA (peft_type in its adapter_config.json)"
        )
    if text_tower is None and not names_lost_by_peft(model, names):
        return PeftModel.from_pretrained(model, str(folder)).eval()
    if text_tower is not None:
        config.target_parameters = [
            text_tower.to_text_name(name) for name in config.target_parameters or ()
        ] or None
        rows: Any = config.trainable_token_indices or {}
        config.trainable_token_indices = {
            text_tower.to_text_name(name): row_ids for name, row_ids in rows.items()
        } or None
        expert_modules = {name.rpartition(".")[0] for name in config.target_parameters or ()}
        layers = {
            text_tower.to_text_name(name).removeprefix(PEFT_PREFIX).partition(".lora_A.")[0]
            for name in names
            if ".lora_A." in name
        }
        config.target_modules = {
            name for name in layers if name.removesuffix(".base_layer") not in expert_modules
        }
    peft_model = get_peft_model(model, config)
    load_adapter_weights(peft_model, folder)
    return peft_model.eval()


def gather_zero3_parameter(parameter: Any, *, writer: int | None = None) -> Any:
    """A context in which a parameter that ZeRO-3 has divided is whole; nothing for others. All
    ranks enter it. What the rank `writer` writes into it is kept on every rank; None: it is only
    read."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=writer)


def gather_to_cpu(
    tensors: Iterable[tuple[str, Any]], *, keeps_copies: bool
) -> dict[str, torch.Tensor]:
    """Whole copies in RAM of tensors that ZeRO-3 or FSDP2 divided, one at a time; empty where not
    `keeps_copies`."""
    copies: dict[int, torch.Tensor] = {}
    copies_by_name: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if id(tensor) not in copies:  # tied ones stay one
            with gather_zero3_parameter(tensor):
                full_tensor = _full_tensor(tensor)
                copies[id(tensor)] = torch.empty(0)
                if keeps_copies:
                    copies[id(tensor)] = full_tensor.to("cpu", copy=True).contiguous()
        if keeps_copies:
            copies_by_name[name] = copies[id(tensor)]
    return copies_by_name


# The whole of a tensor that FSDP2 may have divided; all ranks call it.
def _full_tensor(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach()


def adapter_parameters(model: Any) -> list[tuple[str, Any]]:
    """Names and parameters that saving an adapter reads: what trains, and the embeddings, which
    PEFT saves beside it where rows were added. The base is not gathered: for a 70B model it would
    be 141 GB at each checkpoint.
    """
    tables = [layer.weight for layer in embedding_layers(model)]
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        # saved even where it does not train
        or any(part in name for part in (".lora_", ".modules_to_save."))
        or any(parameter is table for table in tables)
    ]


def embedding_layers(model: Any) -> list[Any]:
    """Input and output embeddings, as far as a model has them."""
    layers = [
        getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")
    ]
    return [layer for layer in layers if layer is not None]


def model_names_by_saved_name(model: Any) -> dict[str, str]:
    """Map each tensor's name in an adapter's file to its name in memory. A language model's file
    has the names of its whole class."""
    from peft import get_peft_model_state_dict

    tensors = model.state_dict()
    names_by_id = {id(tensor): name for name, tensor in tensors.items()}
    saved = get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)
    text_tower = find_text_tower(model)
    to_saved_name = text_tower.to_full_name if text_tower is not None else str
    return {to_saved_name(name): names_by_id[id(tensor)] for name, tensor in saved.items()}


def load_fsdp_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load whole weights of the first rank into an FSDP model; all call it. Raises TrainingError:
    unknown ones."""
    unknown = sorted(set(weights) - set(model.state_dict()))
    if unknown:
        raise TrainingError(
            f"the model has no {unknown[0]}, which the checkpoint holds: another version wrote it"
        )
    set_model_state_dict(model, dict(weights), options=_FROM_RANK_0)


# --- gathered from all ranks to the first, to be saved whole --------------------------------------
def gather_state_dict(trainer: Any, *, from_fp32_masters: bool = False) -> dict[str, Any] | None:
    """The state dict to save, gathered from all ranks; all ranks call it. None: every rank holds
    the whole model. `from_fp32_masters`: fully trained weights are read from DeepSpeed's fp32
    copies, as adapters always are.
    """
    is_adapter = has_adapter(trainer.model)
    engine = getattr(trainer, "deepspeed", None)
    if getattr(trainer, "is_fsdp_enabled", False):
        state = (
            _gather_adapter(trainer.model)
            if is_adapter
            else trainer.accelerator.get_state_dict(trainer.model)
        )
    elif engine is not None:
        if is_adapter:
            state = _gather_adapter(engine.module)
        elif int(engine.zero_optimization_stage()) == 3:
            # transformers' Trainer.save_model calls this private method of DeepSpeed's too (5.23)
            state = engine._zero3_consolidated_16bit_state_dict()
        else:
            state = engine.module.state_dict()
        if (is_adapter or from_fp32_masters) and next(
            engine.module.parameters()
        ).dtype != torch.float32:
            from deepspeed.utils import safe_get_full_fp32_param

            state = state or {}
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    master_weight = safe_get_full_fp32_param(parameter)
                    if is_first() and master_weight is not None:
                        state[name] = master_weight.detach().cpu()
    else:
        return None
    if is_adapter:
        return state
    if state is None or not is_first():
        return {}
    tied = tied_weight_names(trainer.model)
    return {name: tensor for name, tensor in state.items() if name not in tied}


def full_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Names and whole tensors of an FSDP model, one at a time, on the first rank; all iterate to
    the end."""
    tied = tied_weight_names(model)
    # its hooks reshard units that a forward pass left whole
    for name, tensor in model.state_dict().items():
        if name not in tied:
            full_tensor = _full_tensor(tensor)
            yield name, full_tensor.cpu() if is_first() else None


def _gather_adapter(model: Any) -> dict[str, Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass may have left the unit whole
    return gather_to_cpu(adapter_parameters(model), keeps_copies=is_first())
