"""The trained weights gathered from all ranks to the first, to be saved whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule

from sft_play.training.checkpoints.full_state_dict import gathered, saved_with_adapter, tied_names
from sft_play.training.ranks.distributed import is_first
from sft_play.training.ranks.engines import zero_stage


def whole_state(trainer: Any, *, in_fp32: bool = False) -> dict[str, Any] | None:
    """The state dict to save, gathered from all ranks; all ranks call it. None: every rank holds the whole model.

    `in_fp32`: fully trained weights are read from DeepSpeed's fp32 copies, as adapters always are.
    """
    is_adapter = is_peft_model(trainer.model)
    engine = getattr(trainer, "deepspeed", None)
    if getattr(trainer, "is_fsdp_enabled", False):
        gather = _gathered_adapter if is_adapter else trainer.accelerator.get_state_dict
        state: dict[str, Any] = gather(trainer.model)
    elif engine is not None:
        is_divided = zero_stage(engine) == 3
        if is_adapter:
            state = _gathered_adapter(engine.module) if is_divided else dict(saved_with_adapter(engine.module))
        else:
            # transformers' Trainer.save_model calls this private method of DeepSpeed's too (5.23)
            state = engine._zero3_consolidated_16bit_state_dict() or {} if is_divided else engine.module.state_dict()
        is_half = next(engine.module.parameters()).dtype != torch.float32
        state |= _from_masters(engine.module) if is_half and (is_adapter or in_fp32) else {}
    else:
        return None
    if is_adapter:
        return state
    tied = tied_names(trainer.model)
    return {name: tensor for name, tensor in state.items() if name not in tied} if is_first() else {}


def whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Names and whole tensors of an FSDP model, tied ones once, gathered one at a time: on the first rank in the host's
    RAM, None on the others. All ranks iterate to the end."""
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():  # its hooks reshard units that a forward pass left whole
        if name not in tied:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, whole.detach().cpu() if is_first() else None


def _from_masters(model: Any) -> dict[str, Any]:
    """DeepSpeed's fp32 copies of what trains, gathered tensor by tensor to rank 0, empty on the others."""
    from deepspeed.utils import safe_get_full_fp32_param

    copies: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
            if is_first() and whole is not None:
                copies[name] = whole.detach().cpu()
    return copies


def _gathered_adapter(model: Any) -> dict[str, Any]:
    """What is saved of an adapter, gathered tensor by tensor to rank 0, empty on the others."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass may have left the unit whole
    return gathered(saved_with_adapter(model), keep=is_first())
