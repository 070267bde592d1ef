"""Experts in 4 bits: weights that are one tensor for all experts of a block, which bitsandbytes'
layers do not reach.

Each is packed as transformers reads it; in a pass of the block's experts, code that reads the
weight gets it dequantised, once, and it lives until the backward pass unless the block is
checkpointed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Params4bit
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from sft_play.training.class_checks.adapter_trial import direct_weight_reads
from sft_play.training.prepare.experts import PACKED_ATTRIBUTE, stacked_experts


# --- a packed weight ------------------------------------------------------------------------------
class PackedWeight:
    """How a packed weight is read: by its `nf4_state` (None: not packed yet), with the adapter that
    PEFT adds."""

    def __init__(self, nf4_state: NF4State | None = None) -> None:
        self.nf4_state = nf4_state
        # Factors, experts x rows x rank and experts x rank x columns, and their scale.
        self.adapters: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def placeholder(self, packed: torch.Tensor) -> torch.Tensor:
        """A tensor with the weight's shape, dtype and device, and the memory of one element."""
        if self.nf4_state is None:
            return packed
        return torch.empty((), dtype=self.nf4_state.dtype, device=packed.device).expand(
            self.nf4_state.shape
        )

    def dequantise(self, packed: torch.Tensor) -> Any:
        """The weight, experts x rows x columns."""
        if self.nf4_state is None:
            return packed
        with torch.no_grad():
            return unpack_nf4(packed, self.nf4_state)

    def read(self, packed: torch.Tensor) -> Any:
        """The weight with its adapters, in its own dtype."""
        weight = self.dequantise(packed)
        for left, right, scale in self.adapters:
            weight = torch.baddbmm(weight, left, right, alpha=scale)
        return weight


def install_packed_weight(module: nn.Module, name: str, weight: PackedWeight) -> None:
    """Let code that reads a module's parameter get it as `weight` reads it."""
    if PACKED_ATTRIBUTE not in vars(module):
        setattr(module, PACKED_ATTRIBUTE, {})
        module.register_forward_pre_hook(_open_cache)
        # always_call: checkpointing ends its second pass by an exception
        module.register_forward_hook(_drop_cache, always_call=True)
    vars(module)[PACKED_ATTRIBUTE][name] = weight
    module_class = type(module)

    def read(module: nn.Module) -> Any:
        packed, cache = module._parameters[name], vars(module).get("_sft_read")
        if cache is None:  # outside of a pass the parameter itself is asked for, by FSDP and others
            return packed
        if name not in cache:
            cache[name] = vars(module)[PACKED_ATTRIBUTE][name].read(packed)
        return cache[name]

    # under the class's own name: others look for experts by it
    module.__class__ = type(
        module_class.__name__,
        (module_class,),
        {name: property(read), "__module__": module_class.__module__},
    )


def _open_cache(module: nn.Module, inputs: Any) -> None:
    vars(module)["_sft_read"] = {}


def _drop_cache(module: nn.Module, inputs: Any, output: Any) -> None:
    vars(module).pop("_sft_read", None)


# Elements that bitsandbytes packs at once: its kernels count in 32 bits. Larger tensors are packed
# in parts.
MAX_PACKED_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class NF4State:
    """bitsandbytes' state of each part of a packed weight, one row to it: its CPU kernel reads
    others wrongly."""

    states: tuple[Any, ...]
    shape: torch.Size
    dtype: torch.dtype


def pack_nf4(
    weight: torch.Tensor, quant_storage: torch.dtype = torch.uint8
) -> tuple[nn.Parameter, NF4State]:
    """A weight in NF4 with double quantisation, kept in tensors of the `quant_storage` dtype."""
    parts = [
        functional.quantize_4bit(
            part.reshape(1, -1),
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=quant_storage,
        )
        for part in weight.split(max(1, MAX_PACKED_ELEMENTS // weight[0].numel()))
    ]
    data = parts[0][0] if len(parts) == 1 else torch.cat([packed for packed, _ in parts])
    return nn.Parameter(data, requires_grad=False), NF4State(
        tuple(state for _, state in parts), weight.shape, weight.dtype
    )


def unpack_nf4(packed: torch.Tensor, nf4_state: NF4State) -> Any:
    """The weight, experts x rows x columns."""
    if len(nf4_state.states) == 1:
        return functional.dequantize_4bit(packed, nf4_state.states[0]).view(nf4_state.shape)
    weight = torch.empty(nf4_state.shape, dtype=nf4_state.dtype, device=packed.device)
    element_counts = [state.shape.numel() for state in nf4_state.states]
    packed_counts = [count // 2 // packed.element_size() for count in element_counts]
    for target, part, state in zip(
        weight.view(-1).split(element_counts),
        packed.split(packed_counts),
        nf4_state.states,
        strict=True,
    ):
        target.copy_(functional.dequantize_4bit(part, state)[0])
    return weight


def nf4_roundtrip(weight: torch.Tensor) -> Any:
    """The values that a weight, of one layer or of all experts, has in NF4 with double
    quantisation, in fp32."""
    if weight.dim() == 3:
        packed, nf4_state = pack_nf4(weight)
        return unpack_nf4(packed.data, nf4_state).float()
    # `to` is what quantises, on the device that the weight is on already too (bitsandbytes 0.50)
    quantized = Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4"
    ).to(weight.device)
    return (
        functional.dequantize_4bit(quantized.data, quantized.quant_state)
        .float()
        .reshape(weight.shape)
    )


# --- loading --------------------------------------------------------------------------------------
class ExpertQuantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' 4 bits for linear layers, as in transformers, and for stacked experts too."""

    @staticmethod
    def get_modules_to_not_convert(model: Any, *args: Any, **options: Any) -> list[str]:
        """What stays as it is: the head, what a class excludes, weights that its code reads
        itself."""
        return [
            *Bnb4BitHfQuantizer.get_modules_to_not_convert(model, *args, **options),
            *direct_weight_reads(model),
        ]

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> Any:
        """Whether a tensor of this name is packed when it is read."""
        module, name = get_module_from_name(model, param_name)
        stacked: set[tuple[int, str]] | None = vars(model).get("_sft_stacked")
        if stacked is None:
            stacked = {(id(owner), weight_name) for _, owner, weight_name in stacked_experts(model)}
            vars(model)["_sft_stacked"] = stacked
        if (id(module), name) in stacked:
            return not getattr(self.quantization_config, "leaves_experts", False)
        return super().param_needs_quantization(model, param_name, **options)

    def get_quantize_ops(self) -> Bnb4bitQuantize:
        """What packs a tensor."""
        return _ExpertQuantize(self)

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        for module in list(model.modules()):
            for name, parameter in list(module._parameters.items()):
                if (nf4_state := getattr(parameter, "packed_experts", None)) is not None:
                    install_packed_weight(module, name, PackedWeight(nf4_state))
        return super()._process_model_after_weight_loading(model, **options)


class _ExpertQuantize(Bnb4bitQuantize):
    def convert(
        self, input_dict: Any, full_layer_name: str | None = None, model: Any = None, **options: Any
    ) -> Any:
        packed: dict[str, Any] = {}
        quantization = self.hf_quantizer.quantization_config
        packs_on = getattr(quantization, "packs_on", None)
        for name in list(input_dict):
            value = input_dict.pop(name)  # its memory is free once it is packed
            module, _ = get_module_from_name(model, name)
            weight = value[0] if isinstance(value, list) else value
            del value
            home = weight.device
            if packs_on is not None:
                weight = weight.to(packs_on)
            if isinstance(module, Linear4bit):
                converted = super().convert(
                    {name: weight}, full_layer_name=full_layer_name, model=model, **options
                )
                packed[name] = converted[name].to(home)
                continue
            packed[name], nf4_state = pack_nf4(weight, quantization.bnb_4bit_quant_storage)
            packed[name].data = packed[name].data.to(home)
            for state in nf4_state.states:
                state.to(home)
            packed[name].packed_experts = nf4_state
        return packed


def prepare_packed_experts(model: nn.Module) -> None:
    """Let every stacked weight of a model on the meta device be packed when it arrives
    (`fill_packed`)."""
    for _, module, name in list(stacked_experts(model)):
        install_packed_weight(module, name, PackedWeight())


def fill_packed(
    module: nn.Module, name: str, weight: torch.Tensor, quant_storage: torch.dtype
) -> nn.Parameter | None:
    """Pack a weight that arrived for a module of `prepare_packed_experts`; None: the module is no
    such one."""
    packed_weight = vars(module).get(PACKED_ATTRIBUTE, {}).get(name)
    if packed_weight is None:
        return None
    packed, packed_weight.nf4_state = pack_nf4(weight, quant_storage)
    return packed


# --- adapters -------------------------------------------------------------------------------------
def register_expert_quantizer() -> None:
    """Make transformers quantise experts too wherever it quantises to 4 bits, and PEFT adapt such
    experts."""
    AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = ExpertQuantizer
    ParamWrapper.get_param = _get_param
    ParamWrapper._activate_lora = _activate_lora


_PEFT_GET_PARAM, _PEFT_ACTIVATE_LORA = ParamWrapper.get_param, ParamWrapper._activate_lora


def _find_packed_weight(wrapper: ParamWrapper) -> Any:
    return vars(wrapper.get_base_layer()).get(PACKED_ATTRIBUTE, {}).get(wrapper.parameter_name)


# The weight that PEFT adapts; of a packed one PEFT (0.21) asks for shape, dtype and device alone.
def _get_param(wrapper: ParamWrapper) -> Any:
    packed_weight = _find_packed_weight(wrapper)
    if packed_weight is None:
        return _PEFT_GET_PARAM(wrapper)
    packed = wrapper.get_base_layer()._parameters[wrapper.parameter_name]
    assert packed is not None
    return packed_weight.placeholder(packed)


@contextlib.contextmanager
def _activate_lora(wrapper: ParamWrapper, adapters: list[str]) -> Iterator[None]:
    # in place of PEFT's, which registers a parametrisation of a parameter
    packed_weight = _find_packed_weight(wrapper)
    if packed_weight is None:
        with _PEFT_ACTIVATE_LORA(wrapper, adapters):
            yield
        return
    packed_weight.adapters = [
        wrapper.get_delta_factors(adapter) for adapter in adapters if adapter in wrapper.lora_A
    ]
    try:
        yield
    finally:
        packed_weight.adapters = []
