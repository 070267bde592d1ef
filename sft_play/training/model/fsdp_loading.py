"""FSDP2 unit by unit: the first rank reads the weights and sends them, and every rank keeps only its part.

No rank holds the whole model on its device. Until it is divided, every rank has the model with its adapters and
buffers, and parameters of the right shape and dtype but without memory. NF4 weights are quantised as they arrive.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError, SftPlayError
from sft_play.planner.precision import DtypeName, Precision
from sft_play.training import distributed
from sft_play.training.model import attention_functions, nf4_experts
from sft_play.training.model.model_loading import TORCH_DTYPES, keep_4bit_trainable, quantization_config
from sft_play.training.prepare.model_spec import ModelSpec, model_location, resized_spec

# How long the other ranks wait for the first: it may have to download the weights.
_READ_TIMEOUT = datetime.timedelta(days=1)
# What PEFT inserts into the names of the base's weights.
_PEFT_NAME_PARTS = ("base_layer", "original_module", "modules_to_save", "default")

# The weights by their names in the base; empty on all ranks but the first.
SourceWeights = Mapping[str, torch.Tensor]


def load_for_sharding(
    config: RunConfig,
    precision: Precision,
    model_spec: ModelSpec,
    *,
    quant_storage: DtypeName | None,
    read: Callable[[], Any],
) -> tuple[Any, SourceWeights]:
    """The model without its weights, ready for adapters and `shard_model`, and the weights on the first rank, which
    alone calls `read`; `quant_storage`: of packed 4-bit weights. Raises ModelError on every rank: it could not read
    it."""
    attention_functions.set_kv_repetition(enabled=model_spec.attention.repeats_kv)
    weights: dict[str, torch.Tensor] = {}
    payload: list[Any] = [None]
    if distributed.is_first():
        try:
            source_model = read()
            weights = dict(source_model.named_parameters(remove_duplicate=False))
            dtypes = {name: weight.dtype for name, weight in weights.items()}
            other_tensors = {
                name: tensors
                for name, module in source_model.named_modules()
                if (tensors := dict(_non_parameter_tensors(module)))
            }
            payload = [(dtypes, other_tensors, source_model.generation_config)]
        except SftPlayError as error:
            payload = [str(error)]
    group = dist.new_group(backend="gloo", timeout=_READ_TIMEOUT)
    dist.broadcast_object_list(payload, src=0, group=group)
    dist.destroy_process_group(group)
    if isinstance(payload[0], str):
        raise ModelError(payload[0])
    dtypes, other_tensors, generation_config = payload[0]
    model = _build_empty_model(config, precision, resized_spec(model_spec), quant_storage)
    _put_placeholders(model, dtypes, TORCH_DTYPES[precision.load])
    _put_non_parameter_tensors(model, other_tensors)
    model.generation_config = generation_config
    model.config.use_cache = False
    keep_4bit_trainable(model)
    return model, weights


def _non_parameter_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor) for name, tensor in module._buffers.items() if tensor is not None)
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor))


def _build_empty_model(
    config: RunConfig, precision: Precision, model_spec: ModelSpec, quant_storage: DtypeName | None
) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_spec.hf_config,
            dtype=TORCH_DTYPES[precision.load],
            attn_implementation=model_spec.attention.name,
            trust_remote_code=config.model.trust_remote_code,
        )
    model.sft_tower = model_spec.text_tower
    model.config.name_or_path = model_location(config)
    if config.tuning.mode == "qlora":
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(quantization_config(precision, quant_storage), pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=TORCH_DTYPES[precision.load], device_map=None)
        quantizer.postprocess_model(model)
        if config.tuning.has_quantized_experts:
            nf4_experts.prepare_packed_experts(model)
        model.hf_quantizer = quantizer
    model.tie_weights()
    return model.eval()


def _put_placeholders(model: nn.Module, dtypes: Mapping[str, torch.dtype], load_dtype: torch.dtype) -> None:
    """Set parameters with one element's memory: PEFT creates adapters on the base's device, where they need memory."""
    placeholders: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placeholders:  # tied ones stay one
                dtype = dtypes.get(f"{path}.{name}" if path else name, load_dtype)
                data = torch.empty((), dtype=dtype).expand(parameter.shape)
                placeholders[id(parameter)] = (
                    type(parameter)(data, requires_grad=False, **vars(parameter))
                    if _is_4bit(parameter)
                    else nn.Parameter(data, requires_grad=parameter.requires_grad)
                )
            module._parameters[name] = placeholders[id(parameter)]


def _put_non_parameter_tensors(model: nn.Module, other_tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for path, tensors in other_tensors.items():
        module = model.get_submodule(path)
        for name, tensor in tensors.items():
            if name in module._buffers:
                module._buffers[name] = tensor
            else:
                setattr(module, name, tensor)
    missing = [
        path for path, module in model.named_modules() for _, tensor in _non_parameter_tensors(module) if tensor.is_meta
    ]
    if missing:
        raise ModelError(f"{missing[0]} keeps a tensor that its weights do not have; use STRATEGY=ddp or zero3 for it")


def _is_4bit(parameter: Any) -> bool:
    return type(parameter).__name__ == "Params4bit"


def shard_model(trainer: Any, source: SourceWeights, *, layer_class: str, fp32_master_weights: bool) -> None:
    """Fill the trainer's model and divide it, one unit after the other; all ranks call it. The units are accelerate's
    (`fsdp2_prepare_model`, which leaves a divided model alone). At its peak a rank holds its parts, the current unit
    whole, and one tensor as it arrived. `fp32_master_weights`: what trains is kept in fp32,
    beside computation in 16 bits."""
    model, device = trainer.model, trainer.args.device
    plugin, mesh = trainer.accelerator.state.fsdp_plugin, trainer.accelerator.torch_device_mesh
    options = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": mesh[tuple(trainer.accelerator.parallelism_config.fsdp_dim_names)] if mesh is not None else None,
    }
    filler = _ParameterFiller(model, source, device, fp32_master_weights=fp32_master_weights)
    for modules, overrides in _shard_units(model, layer_class):
        for module in modules:
            filler.fill(module)
        fully_shard(modules if len(modules) > 1 else modules[0], **{**options, **overrides})
    plugin.auto_wrap_policy = None  # accelerate would look for layers by a class name that FSDP2 has changed
    for parameter in model.parameters():
        # accelerate matches the optimizer's parameters by the addresses of their parts, and those of all empty parts (a
        # dimension shorter than the ranks) are 0
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if part.numel() == 0:
            part.data_ptr = partial(id, parameter)


def _shard_units(model: Any, layer_class: str) -> Iterator[tuple[list[nn.Module], dict[str, Any]]]:
    layers = [module for module in model.modules() if type(module).__name__ == layer_class]
    for layer in layers:  # a list: `fully_shard` changes the class of what has been yielded
        yield [layer], {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(embedding, "weight", None)
    is_tied = weight is not None and weight is getattr(head, "weight", None)
    if embedding is not None and not is_tied:
        yield [embedding], {}
    # a model with adapters has no norm here: its prefix leads to another module
    backbone = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    norms = (
        [module for module in backbone.children() if "Norm" in type(module).__name__] if backbone is not None else []
    )
    tail = [module for module in (*norms[-1:], embedding if is_tied else None, head) if module is not None]
    if tail:
        yield tail, {"reshard_after_forward": False}
    yield [model], {"reshard_after_forward": None}


class _ParameterFiller:
    """Gives each parameter its value once, in every module that holds it."""

    def __init__(
        self, model: nn.Module, source: SourceWeights, device: torch.device, *, fp32_master_weights: bool
    ) -> None:
        self._source, self._device, self._fp32_master_weights = source, device, fp32_master_weights
        packed_parameters = (parameter for parameter in model.parameters() if _is_4bit(parameter))
        self._quant_storage = next((parameter.quant_storage for parameter in packed_parameters), torch.uint8)
        self._holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append((f"{path}.{name}", module, name))
        self._filled: set[int] = set()

    def fill(self, unit: nn.Module) -> None:
        for module in unit.modules():
            for name, parameter in list(module._parameters.items()):
                needs_value = parameter is not None and not isinstance(parameter, DTensor)
                if needs_value and id(parameter) not in self._filled:
                    self._fill_parameter(parameter, module)
                    self._filled.add(id(module._parameters[name]))

    @torch.no_grad()
    def _fill_parameter(self, parameter: nn.Parameter, module: nn.Module) -> None:
        holders = self._holders[id(parameter)]
        if _is_4bit(parameter):
            is_transposed = issubclass(getattr(module, "source_cls", nn.Linear), Conv1D)
            shape = parameter.shape[::-1] if is_transposed else parameter.shape
            value = self._receive(holders[0][0], parameter, shape)
            value = value.T if is_transposed else value
            filled = type(parameter)(value, requires_grad=False, **vars(parameter)).to(self._device)  # quantises
        else:
            value = self._receive(holders[0][0], parameter, parameter.shape)
            should_widen = self._fp32_master_weights and parameter.requires_grad
            packed_parameter = nf4_experts.fill_packed(module, holders[0][2], value, self._quant_storage)
            plain_parameter = nn.Parameter(
                value.float() if should_widen else value, requires_grad=parameter.requires_grad
            )
            filled = plain_parameter if packed_parameter is None else packed_parameter
        for _, owner, name in holders:
            owner._parameters[name] = filled

    def _receive(self, name: str, parameter: nn.Parameter, shape: torch.Size) -> torch.Tensor:
        if distributed.is_first():
            source_tensor = self._source.get(base_parameter_name(name), parameter)
            assert source_tensor.untyped_storage().nbytes() >= source_tensor.nbytes, f"{name} has no value"
            tensor = source_tensor.detach().to(self._device, parameter.dtype, copy=True).contiguous()
        else:
            tensor = torch.empty(shape, dtype=parameter.dtype, device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, src=0)
        return tensor


def base_parameter_name(name: str) -> str:
    """A parameter's name in the base, from its name in a model with adapters."""
    return ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part not in _PEFT_NAME_PARTS)
