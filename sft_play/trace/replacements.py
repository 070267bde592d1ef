"""What runs in a library's place while a step is traced; `patches` says where each goes, and why.

A function here takes the original and the state and gives the replacement, or is the replacement itself.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.trace import kernels
from sft_play.trace.settings import StepSettings
from sft_play.trace.storages import StorageLog


@dataclass
class TraceState:
    """What a patch may depend on."""

    settings: StepSettings
    log: StorageLog
    is_evaluating: bool = False

    @property
    def active_mask(self) -> str:
        """How rows are separated now (`StepSettings.mask`)."""
        return (self.is_evaluating and self.settings.eval_mask) or self.settings.mask

    @property
    def uses_cudnn(self) -> bool:
        """Whether cuDNN's attention is switched on now."""
        return self.settings.cudnn == "always" or (self.settings.cudnn == "training" and not self.is_evaluating)


def cuda_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """CUDA's dropout: keeps a mask of one byte an element for backward."""
    return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input


class GroupedProduct(torch.autograd.Function):
    """CUDA's grouped product in other dtypes than bf16: rows of inputs, experts x inputs x outputs; rows of outputs."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        """Each is held for the other's gradient, as by the derivative of `_grouped_mm`."""
        needs_row_gradient, needs_weight_gradient = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight_gradient else None, weight if needs_row_gradient else None)
        ctx.like = (rows.shape, weight.shape, rows.dtype)
        return rows.new_empty(rows.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients that are asked for."""
        *shapes, dtype = ctx.like
        pairs = zip(shapes, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty(shape, dtype=dtype) if is_needed else None for shape, is_needed in pairs)


def make_flash_mask(original: Any, state: TraceState) -> Any:
    """The mask that flash attention gets: None unless rows are padded."""

    def mask(*sizes: Any, kv_length: int, attention_mask: Any = None, **options: Any) -> Any:
        is_read = attention_mask is not None and state.active_mask == "padded"
        return attention_mask[:, -kv_length:] if is_read else None

    return mask


def make_flash_imports(original: Any, _: TraceState) -> Any:
    """The functions of the package flash-attn, by PyTorch's operators of the same kernels."""
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")

    def imports(implementation: Any, *more: Any, **options: Any) -> Any:
        if implementation != kernels.FLASH_NAME:
            return original(implementation, *more, **options)
        return kernels.flash_attn_func, kernels.flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    return imports


def full_row_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """transformers' `_get_unpad_data` where every position counts as a token, as the plan assumes."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.empty((attention_mask.numel(), 1), dtype=torch.int64).flatten()
    ends = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return indices, ends, int(attention_mask.shape[-1])


def make_pack_boundaries(original: Any, state: TraceState) -> Any:
    """Boundaries and longest lengths of packs, of the right shapes without reading position ids."""

    def borders(position_ids: torch.Tensor) -> Any:
        rows, longest = state.settings.micro_batch, state.settings.seq_len
        ends = torch.zeros(rows + 1, dtype=torch.int32)
        return (ends, ends), (longest, longest)

    return borders


def make_logged_resize(original: Any, state: TraceState) -> Any:
    """Resizing a storage, which the log sees."""

    def resize_(self: Any, size: int) -> Any:
        out = original(self, size)
        state.log.record_resize(self)
        return out

    return resize_


def make_logged_stream(original: Any, state: TraceState) -> Any:
    """Entering a stream: what is allocated inside belongs to it."""

    @contextlib.contextmanager
    def enter_stream(stream: Any) -> Iterator[None]:
        with original(stream), state.log.use_stream(log_stream(stream)):
            yield

    return enter_stream


def log_stream(stream: Any) -> Any:
    """A stream as the log takes it: None is the model's own stream."""
    return None if stream is importlib.import_module("torch.cpu")._default_cpu_stream else stream


def swap_by_data(t1: Any, t2: Any) -> None:
    """Swapping tensors by assigning their data: works where a weak reference is held."""
    if t1 is not t2:
        t1.data = t2.data


def make_unlogged(original: Any, state: TraceState) -> Any:
    """A method whose allocations the log does not count."""

    def propagate(self: Any, *args: Any, **options: Any) -> Any:
        with state.log.hide_allocations():
            return original(self, *args, **options)

    return propagate


def is_half_under_autocast(value: Any) -> bool:
    """Whether CUDA's autocast would cast this tensor up for an operator of its fp32 list."""
    return (
        torch.is_autocast_enabled("cpu")
        and isinstance(value, torch.Tensor)
        and value.dtype in (torch.float16, torch.bfloat16)
    )


def make_fp32_layer_norm(original: Any, _: TraceState) -> Any:
    """Layer norm in fp32 under autocast, as CUDA's list has it."""

    def layer_norm(
        input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> torch.Tensor:
        if not is_half_under_autocast(input):
            return original(input, normalized_shape, weight, bias, eps)
        parameters = [None if one is None else one.float() for one in (weight, bias)]
        with torch.autocast("cpu", enabled=False):
            return original(input.float(), normalized_shape, *parameters, eps)

    return layer_norm
