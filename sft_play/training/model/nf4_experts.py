"""Experts in 4 bits: weights that are one tensor for all experts of a block, which bitsandbytes' layers do not reach.

Each such tensor is quantised as transformers reads and stacks it, so that no more than one of them is ever whole, and
dequantised where the block reads it (`Bnb4bitParametrization`). Within a block's experts it is dequantised once; the
backward pass needs it again, so it lives until then unless the block is checkpointed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn.parametrize import Bnb4bitParametrization
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn.utils import parametrize
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from sft_play.facts.models.model_shape import MOST_PACKED
from sft_play.training.prepare.experts import stacked_experts


class Nf4Weight(Bnb4bitParametrization):
    """What reads a weight of experts: dequantised, or as it is until it has been quantised (`quant_state` None)."""

    def like(self, packed: torch.Tensor) -> torch.Tensor:
        """A tensor with shape, dtype and device of the weight, and the memory of one element."""
        if self.quant_state is None:
            return packed
        return torch.empty((), dtype=self.quant_state.dtype, device=packed.device).expand(self.quant_state.shape)

    def forward(self, quantized_param: torch.Tensor) -> torch.Tensor:
        """The weight, experts x rows x columns, of the packed one."""
        if self.quant_state is None:
            return quantized_param
        weight: torch.Tensor = super().forward(quantized_param)
        return weight


class ExpertQuantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' 4 bits for linear layers, as in transformers, and for stacked experts too."""

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Whether a tensor of this name is packed when it is read."""
        module, name = get_module_from_name(model, param_name)
        return name in _names(model, module) or super().param_needs_quantization(model, param_name, **options)

    def get_quantize_ops(self) -> Bnb4bitQuantize:
        """What packs a tensor."""
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        for module in [module for module in model.modules() if not isinstance(module, Linear4bit)]:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if (state := getattr(parameter, "quant_state", None)) is not None:
                    read_through(module, name, state)
        return super()._process_model_after_weight_loading(model, **options)


class _Quantize(Bnb4bitQuantize):
    """Packs one tensor: of a linear layer as transformers does, of experts with its state beside it."""

    def convert(self, input_dict: Any, full_layer_name: str | None = None, model: Any = None, **options: Any) -> Any:
        packed = {}
        for name in list(input_dict):
            value = input_dict.pop(name)  # its memory is free once it is packed
            module, _ = get_module_from_name(model, name)
            if isinstance(module, Linear4bit):
                packed |= super().convert({name: value}, full_layer_name=full_layer_name, model=model, **options)
                continue
            whole = value[0] if isinstance(value, list) else value
            del value
            packed[name] = pack(whole, self.hf_quantizer.quantization_config.bnb_4bit_quant_storage)
        return packed


def pack(weight: torch.Tensor, storage: torch.dtype = torch.uint8) -> nn.Parameter:
    """A weight in NF4 with double quantisation, kept in tensors of the `storage` dtype; its state is `quant_state`."""
    data, state = functional.quantize_4bit(
        weight.contiguous(), compress_statistics=True, quant_type="nf4", quant_storage=storage
    )
    packed = nn.Parameter(data, requires_grad=False)
    packed.quant_state = state  # type: ignore[attr-defined]
    return packed


def read_through(module: nn.Module, name: str, state: Any) -> None:
    """Let a module read its packed weight dequantised; without a state as it is, until `fill` gives it one."""
    read_by(module, name, Nf4Weight(state))


def read_by(module: nn.Module, name: str, reads: nn.Module) -> None:
    """Let a module read its weight through another one, once in each of its passes."""
    if not parametrize.is_parametrized(module):
        # always_call: checkpointing ends its second pass by an exception
        module.register_forward_pre_hook(_keep_read)
        module.register_forward_hook(_forget_read, always_call=True)
    parametrize.register_parametrization(module, name, reads, unsafe=True)


def _keep_read(module: nn.Module, inputs: Any) -> None:
    parametrize._cache_enabled += 1


def _forget_read(module: nn.Module, inputs: Any, output: Any) -> None:
    parametrize._cache_enabled = max(0, parametrize._cache_enabled - 1)
    if not parametrize._cache_enabled:
        parametrize._cache = {}


def prepare_empty(model: nn.Module) -> None:
    """Let every stacked weight of a model on the meta device be packed when it arrives."""
    for _, module, name in list(stacked_experts(model)):
        if module.get_parameter(name).numel() <= MOST_PACKED:
            read_through(module, name, None)


def fill(module: nn.Module, weight: torch.Tensor, storage: torch.dtype) -> nn.Parameter | None:
    """Pack a weight that arrived for a module of `prepare_empty`; None where the module is none of those."""
    if not is_packed(module):
        return None
    packed = pack(weight, storage)
    module[0].quant_state = packed.quant_state
    return packed


def is_packed(module: nn.Module) -> bool:
    """Whether a module holds a packed weight of experts, as its parameter `original`."""
    return isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], Nf4Weight)


def _names(model: nn.Module, module: nn.Module) -> frozenset[str]:
    """Names of a module's stacked weights; which modules have some is looked up once for a model."""
    found: dict[int, frozenset[str]] | None = model.__dict__.get("_sft_stacked")
    if found is None:
        by_module: dict[int, set[str]] = {}
        for _, one, name in stacked_experts(model):
            if one.get_parameter(name).numel() <= MOST_PACKED:
                by_module.setdefault(id(one), set()).add(name)
        found = {key: frozenset(names) for key, names in by_module.items()}
        model.__dict__["_sft_stacked"] = found
    return found.get(id(module), frozenset())


def register() -> None:
    """Make transformers quantise experts too wherever it quantises to 4 bits, and PEFT adapt such experts."""
    AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = ExpertQuantizer
    ParamWrapper.get_param = _param  # type: ignore[method-assign]
    ParamWrapper._activate_lora = _activated  # type: ignore[method-assign]


_GET_PARAM, _ACTIVATE = ParamWrapper.get_param, ParamWrapper._activate_lora


def _param(wrapper: ParamWrapper) -> torch.Tensor:
    """The weight that PEFT adapts; of a packed one PEFT (0.21) asks for shape, dtype and device alone."""
    reads = _packed(wrapper)
    weight: torch.Tensor = _GET_PARAM(wrapper) if reads is None else reads[0].like(reads.original)
    return weight


def _packed(wrapper: ParamWrapper) -> Any:
    """What reads the weight that PEFT adapts, where it is packed, as modules in turn; else None."""
    every = dict(getattr(wrapper.get_base_layer(), "parametrizations", {}).items())
    reads = every.get(wrapper.parameter_name, [None])
    return reads if hasattr(reads[0], "like") else None


@contextlib.contextmanager
def _activated(wrapper: ParamWrapper, adapters: list[str]) -> Iterator[None]:
    """A weight with its adapter. PEFT (0.21) does not take the adapter of a packed one off again, and torch's cache,
    which is on while the module's other weight has its own, would keep this one without it."""
    reads, active = _packed(wrapper), [one for one in adapters if one in wrapper.lora_A]
    if reads is None or not active:
        with _ACTIVATE(wrapper, adapters):
            yield
        return
    reads.extend(_WithAdapter(*wrapper.get_delta_factors(one)) for one in active)
    parametrize._cache.pop((id(wrapper.get_base_layer()), wrapper.parameter_name), None)
    try:
        with parametrize.cached():
            yield
    finally:
        del reads[-len(active) :]


class _WithAdapter(nn.Module):
    """Adds `scaling * lhs @ rhs` to a weight: experts x rows x rank, experts x rank x columns."""

    def __init__(self, lhs: torch.Tensor, rhs: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.factors, self.scaling = (lhs, rhs), scaling

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with the adapter, in its own dtype."""
        return torch.baddbmm(weight, *self.factors, alpha=self.scaling)
