"""Stand-ins with the same memory for what cannot run on fake tensors: NF4 layers and bitsandbytes' optimizers.
They allocate what the real code does, in the same order (`patches.PATCHES` has the reasons and guards)."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sft_play.planner.memory.model_states import ABSMAX_BLOCK
from sft_play.planner.memory.structure import NF4_BLOCK
from sft_play.trace.settings import StepSettings
from sft_play.trace.storages import StorageLog
from sft_play.training.model import nf4_experts


# --- NF4 --------------------------------------------------------------------------------------------------------------
class _FakeNF4Product(torch.autograd.Function):
    """`MatMul4Bit` of bitsandbytes 0.50 beyond its fused kernel's range (1536 rows): dequantise, multiply, free."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, layer: Any, bias: Any) -> Any:
        ctx.layer = layer
        return torch.nn.functional.linear(hidden, layer.dequantised(hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight = ctx.layer.dequantised(ctx.layer.quantised_from, is_backward=True)
        return torch.matmul(grads[0], weight.to(grads[0].dtype)), None, None


@functools.cache
def fake_nf4_class() -> type:
    """The fake's class, a subclass of bitsandbytes' Linear4bit so that PEFT sees one."""
    linear_4bit = importlib.import_module("bitsandbytes").nn.Linear4bit

    class NF4Linear(linear_4bit):  # type: ignore[misc, valid-type]
        """Packed weight and scales as buffers; not a Params4bit, which cannot wrap a fake tensor."""

        def __init__(self) -> None:
            # not Linear4bit's own, which would create a Params4bit
            nn.Module.__init__(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            input_dtype = x.dtype
            x = x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            return _FakeNF4Product.apply(x, self, bias).to(input_dtype)

        def dequantised(self, dtype: torch.dtype, *, is_backward: bool = False) -> torch.Tensor:
            """The full weight; double quantisation rebuilds its scales in fp32 first."""
            if self.absmax.dtype is torch.uint8:
                scales = torch.empty(self.absmax.shape, dtype=torch.float32)
                if not is_backward:
                    scales = scales + self.offset
            return torch.empty(self.out_features, self.in_features, dtype=dtype)

    return NF4Linear


def fake_nf4(layer: Any, settings: StepSettings) -> Any:
    """The fake of a Linear4bit on the meta device, on the meta device too."""
    fake = fake_nf4_class()()
    fake.in_features, fake.out_features = layer.in_features, layer.out_features
    fake.compute_dtype = getattr(torch, settings.quant_compute)
    fake.quantised_from = getattr(torch, settings.weights)
    storage = getattr(torch, settings.quant_storage)
    weights = fake.in_features * fake.out_features
    rows = math.ceil(weights / 2) // storage.itemsize
    weight = nn.Parameter(torch.empty((rows, 1), dtype=storage, device="meta"), requires_grad=False)
    weight.compress_statistics, weight.quant_type, weight.quant_state = settings.double_quant, "nf4", None
    weight.blocksize, weight.quant_storage, weight.bnb_quantized = NF4_BLOCK, storage, True
    fake.weight = weight
    fake.bias = None
    if layer.bias is not None:  # bitsandbytes creates it in fp32; loading casts it to the dtype of the other weights
        fake.bias = nn.Parameter(layer.bias.detach().to(fake.quantised_from), requires_grad=False)

    for name, (shape, dtype) in _quantisation_buffers(weights, double_quant=settings.double_quant).items():
        fake.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)
    return fake


class _FakeNF4Experts(nf4_experts.PackedWeight):
    """Reads a stacked weight of experts dequantised; its scales are buffers of the module."""

    def __init__(self, module: Any, name: str, settings: StepSettings) -> None:
        super().__init__()
        self.shape, self.dtype = getattr(module, name).shape, getattr(torch, settings.weights)
        self._scales = (module, f"{name}_absmax", f"{name}_offset")
        for buffer_name, (sizes, dtype) in _quantisation_buffers(
            self.shape.numel(), double_quant=settings.double_quant
        ).items():
            module.register_buffer(
                f"{name}_{buffer_name}", torch.empty(sizes, dtype=dtype, device="meta"), persistent=False
            )

    def placeholder(self, packed: torch.Tensor) -> torch.Tensor:
        return torch.empty((), dtype=self.dtype, device=packed.device).expand(self.shape)

    def dequantise(self, packed: torch.Tensor) -> torch.Tensor:
        module, absmax, offset = self._scales
        if getattr(module, absmax).dtype is torch.uint8:
            scales = torch.empty(getattr(module, absmax).shape, dtype=torch.float32)
            scales = scales + getattr(module, offset)
        return torch.empty(self.shape, dtype=self.dtype)


def fake_nf4_experts(module: Any, name: str, settings: StepSettings) -> None:
    """Put the fake of a packed weight in the place of a stacked one, on the meta device."""
    weight, storage = getattr(module, name), getattr(torch, settings.quant_storage)
    rows = math.ceil(weight.numel() / 2) // storage.itemsize
    packed, fake_weight = torch.empty((rows, 1), dtype=storage, device="meta"), _FakeNF4Experts(module, name, settings)
    setattr(module, name, nn.Parameter(packed, requires_grad=False))
    nf4_experts.install_packed_weight(module, name, fake_weight)


def _quantisation_buffers(weights: int, *, double_quant: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    blocks = math.ceil(weights / NF4_BLOCK)
    buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "absmax": ((blocks,), torch.uint8 if double_quant else torch.float32),
        "code": ((16,), torch.float32),
    }
    if double_quant:
        buffers |= {
            "absmax_of_absmax": ((math.ceil(blocks / ABSMAX_BLOCK),), torch.float32),
            "code_of_absmax": ((256,), torch.float32),
            "offset": ((), torch.float32),
        }
    return buffers


# What PEFT and bitsandbytes read off a Params4bit.
PARAMETER_FIELDS = ("compress_statistics", "quant_type", "quant_state", "blocksize", "quant_storage", "bnb_quantized")


def wrap_dequantize(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """PEFT's `dequantize_module_weight` (DoRA needs a layer's norm), which also knows the fake."""

    def dequantize(module: Any) -> Any:
        is_fake = isinstance(module, fake_nf4_class())
        return module.dequantised(module.quantised_from) if is_fake else original(module)

    return dequantize


# --- optimizers -------------------------------------------------------------------------------------------------------
class FakeStateOptimizer:
    """bitsandbytes' optimizers, whose states are created in C++: their bytes at the first step, no values."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        state_sizes: Callable[[int], tuple[int, ...]],
        log: StorageLog,
        fp32_state_counts: Mapping[int, int] | None = None,
    ) -> None:
        """`fp32_state_counts`: how many fp32 states a parameter has instead, by its `id`."""
        self._fp32_state_counts = fp32_state_counts or {}
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._state_sizes, self._log, self._has_states = state_sizes, log, False

    def step(self) -> None:
        """The update happens in place; the first one creates the states."""
        if not self._has_states:
            for parameter in self._parameters:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                elements, count = int(local.numel()), self._fp32_state_counts.get(id(parameter))
                for nbytes in self._state_sizes(elements) if count is None else (4 * elements,) * count:
                    self._log.record_alloc(nbytes)
            self._has_states = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def adam_8bit_state_sizes(elements: int) -> tuple[int, ...]:
    """A byte for each of two states, an fp32 scale per 256; fp32 below 4096 elements (bitsandbytes optimizer.py)."""
    if elements < 4096:
        return (4 * elements, 4 * elements)
    scales = 4 * math.ceil(elements / 256)
    return (elements, elements, scales, scales)


def paged_adam_8bit_state_sizes(elements: int) -> tuple[int, ...]:
    """States from 1e5 elements on are managed memory, outside the allocator; their scales are not."""
    states = adam_8bit_state_sizes(elements)
    return states[2:] if elements >= 100_000 else states
