"""The model with its weights: read from safetensors, quantised for qlora, refused where any are
missing; and LoRA's adapters: the one that a run continues, where new ones start
(`tuning.lora.init`), and inputs that are held once."""

import contextlib
import datetime
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from sft_play.config.load import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_KEY,
    ADAPTER_WEIGHTS_FILE,
    find_adapter_run,
)
from sft_play.config.schema import LoraConfig, RunConfig
from sft_play.data.sources.files import file_digest
from sft_play.errors import ModelError, SftPlayError
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity, find_model_folder
from sft_play.planner.precision import DtypeName, Precision
from sft_play.process.waiting import report_wait
from sft_play.training import distributed
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.training.checkpoints.full_state_dict import (
    embedding_layers,
    gather_zero3_parameter,
    is_duplicate_name,
    model_names_by_saved_name,
    tied_weight_names,
)
from sft_play.training.checkpoints.model_saving import (
    describe_broken_connection,
    fetch_base_folder,
    open_tensors,
)
from sft_play.training.model import attention_functions, nf4_experts
from sft_play.training.model.nf4_experts import nf4_roundtrip
from sft_play.training.prepare.model_spec import (
    ModelSpec,
    build_meta_model,
    model_location,
    resized_spec,
)

logger = logging.getLogger(__name__)

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# For `from_pretrained`, which looks for an adapter beside a model's files, and then puts it on
# them, or loads the base that the adapter names in their place: none is found in this folder.
NO_ADAPTER_KWARGS = {"adapter_kwargs": {"subfolder": "none"}}


def load_model(
    config: RunConfig,
    precision: Precision,
    model_spec: ModelSpec,
    *,
    device: str | None,
    quant_storage: DtypeName | None = None,
    packs_on: torch.device | None = None,
) -> Any:
    """The model with its weights, quantised where the mode says so, on `device`; None leaves the
    placement to ZeRO-3, which divides plain weights while they are read, and NF4's when the engine
    starts. `quant_storage`: the dtype of packed 4-bit weights (None: bytes); FSDP can divide only
    floating-point ones. `packs_on`: another device that quantises (a GPU is far quicker). Raises
    ModelError: as `read_model`.
    """
    options: dict[str, Any] = {}
    if config.tuning.mode == "qlora":
        options["quantization_config"] = quantization_config(
            precision, quant_storage, quantizes_experts=config.tuning.has_quantized_experts
        )
        options["quantization_config"].packs_on = packs_on
    is_on_gpu = device is not None and device.startswith("cuda")
    if device is not None and (config.tuning.mode == "qlora" or device != "cpu"):
        # straight to the GPU: no second copy in the host's memory
        options["device_map"] = {"": device}
    attention_functions.set_kv_repetition(enabled=model_spec.attention.repeats_kv)
    model = read_model(config, precision, model_spec, options)
    keep_4bit_trainable(model)
    model.config.use_cache = False
    if is_on_gpu:
        torch.cuda.empty_cache()  # blocks left over from loading would count in every later peak
    return model


def read_model(
    config: RunConfig,
    precision: Precision,
    model_spec: ModelSpec,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The model with its weights and the embeddings that its tokenizer needs, in RAM unless the
    `options` for `from_pretrained` say otherwise. Raises ModelError: weights are missing, not
    safetensors, or cannot be fetched.
    """
    load_kwargs: dict[str, Any] = {
        "config": model_spec.hf_config,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": TORCH_DTYPES[precision.load],
        "attn_implementation": model_spec.attention.name,
        "use_safetensors": True,  # pickled weights can run code when they are read
        "output_loading_info": True,
        **NO_ADAPTER_KWARGS,
        **(options or {}),
    }
    if model_spec.text_tower is not None:
        load_kwargs["key_mapping"] = model_spec.text_tower.key_mapping
    model_class: Any = AutoModelForCausalLM
    source: str | None = model_location(config)
    if model_spec.is_dequantised:
        # a class of transformers' own, which alone takes tensors in place of a folder
        model_class, source = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_spec.hf_config)], None
        tensors: dict[str, Any] = dict(
            open_tensors(fetch_base_folder(config.model.name, revision=config.model.revision))
        )
        if "device_map" not in load_kwargs and is_deepspeed_zero3_enabled():
            # ZeRO-3 reads no tensors later
            tensors = {name: tensor.read() for name, tensor in tensors.items()}
        load_kwargs["state_dict"] = tensors
        del load_kwargs["trust_remote_code"]
    try:
        with (
            silence_load_report(),
            report_wait(f"Loading the weights of {one_line(config.model.name)}"),
        ):
            model, loading_info = model_class.from_pretrained(source, **load_kwargs)
    except torch.OutOfMemoryError:  # a RuntimeError that `explain_out_of_memory` words
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        problem = _loading_problem(config.model.name, error)
        raise ModelError(f"the weights of {config.model.name} {problem}") from error
    model.sft_tower = model_spec.text_tower
    if model_spec.is_dequantised:  # which transformers reads beside a folder's weights only
        model.name_or_path = model.config._name_or_path = model_location(config)
        with contextlib.suppress(OSError):  # it has no generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(
                model_location(config), revision=config.model.revision
            )
    require_all_weights(model, loading_info, config.model.name)
    unused_names = sorted(loading_info.get("unexpected_keys", ()))
    if unused_names and model_spec.text_tower is None:
        logger.warning(
            "Model: %d tensors of the weights are not used, such as %s",
            len(unused_names),
            unused_names[0],
        )
    if model_spec.resize_to is not None:
        # new rows from the mean and covariance of the old ones (the default), where they have none
        # of their own
        has_unset_rows = model_spec.resize_to - model_spec.vocab_size > len(model_spec.new_rows)
        model.resize_token_embeddings(model_spec.resize_to, mean_resizing=has_unset_rows)
    # rows of added tokens begin as the mean of their pieces', so that a model begins near what the
    # text meant to it before (https://nlp.stanford.edu/~johnhew/vocab-expansion.html)
    tables = {id(layer.weight): layer.weight for layer in embedding_layers(model)}.values()
    for table in tables if any(model_spec.new_rows.values()) else ():
        with gather_zero3_parameter(table, writer=0), torch.no_grad():
            for row, piece_ids in model_spec.new_rows.items() if table.numel() else ():
                table[row] = table[list(piece_ids)].float().mean(dim=0)
    return model


def _loading_problem(name: str, error: Exception) -> str:
    local_folder = find_model_folder(name)
    if local_folder is not None and not any(local_folder.glob("*.safetensors")):
        return (
            f"are no safetensors ({local_folder}); pickled weights can run code and are not read:"
            " convert them where that is safe (save_pretrained of transformers)"
        )
    return (
        describe_broken_connection(error) or f"cannot be loaded: {one_line(str(error), limit=300)}"
    )


@contextlib.contextmanager
def silence_load_report() -> Iterator[None]:
    """transformers' table of missing and unused tensors switched off: both are checked and reported
    here."""
    library_logger = logging.getLogger("transformers.modeling_utils")
    level = library_logger.level
    library_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library_logger.setLevel(level)


def quantization_config(
    precision: Precision, quant_storage: DtypeName | None = None, *, quantizes_experts: bool = True
) -> BitsAndBytesConfig:
    """NF4 with double quantisation, computing in the run's precision
    (https://huggingface.co/papers/2305.14314); with `quantizes_experts` stacked experts are
    quantised too."""
    nf4_experts.register_expert_quantizer()
    bnb_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=TORCH_DTYPES[precision.compute],
        **({"bnb_4bit_quant_storage": TORCH_DTYPES[quant_storage]} if quant_storage else {}),
    )
    bnb_config.leaves_experts = not quantizes_experts
    return bnb_config


def require_all_weights(model: Any, loading_info: dict[str, Any], name: str) -> None:
    """Raises ModelError where weights were missing, since they would be random numbers."""
    missing = sorted(set(loading_info.get("missing_keys", ())) - tied_weight_names(model))
    wrong = [*missing, *map(str, loading_info.get("mismatched_keys", ()))]
    if wrong:
        raise ModelError(
            f"the weights of {name} do not match its config.json: "
            f"{one_line(', '.join(wrong[:6]), limit=300)} ({len(missing)} missing)"
        )


def keep_4bit_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes (0.50.2) from repacking 4-bit weights for inference on CPUs with
    AVX512-BF16, at the first forward in eval mode: training afterwards passes no gradient through a
    frozen layer, with one warning only.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


# --------------------------------------------------------------------------------------------------
# FSDP2 unit by unit: the first rank reads the weights and sends them, and every rank keeps only
# its part. No rank holds the whole model on its device. Until it is divided, every rank has the
# model with its adapters and buffers, and parameters of the right shape and dtype but without
# memory. NF4 weights are quantised as they arrive.


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
    """The model without its weights, ready for adapters and `shard_model`, and the weights on the
    first rank, which alone calls `read`; `quant_storage`: of packed 4-bit weights. Raises
    ModelError on every rank: it could not read it."""
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
    # the first may have to download the weights
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    dist.broadcast_object_list(payload, src=0, group=group)
    dist.destroy_process_group(group)
    if isinstance(payload[0], str):
        raise ModelError(payload[0])
    dtypes, other_tensors, generation_config = payload[0]
    model = _build_empty_model(config, precision, resized_spec(model_spec), quant_storage)
    _put_placeholders(model, dtypes, TORCH_DTYPES[precision.load])
    for path, tensors in other_tensors.items():
        module = model.get_submodule(path)
        for name, tensor in tensors.items():
            if name in module._buffers:
                module._buffers[name] = tensor
            else:
                setattr(module, name, tensor)
    for path, module in model.named_modules():
        if any(tensor.is_meta for _, tensor in _non_parameter_tensors(module)):
            raise ModelError(
                f"{path} keeps a tensor that its weights do"
                " not have; use STRATEGY=ddp or zero3 for it"
            )
    model.generation_config = generation_config
    model.config.use_cache = False
    keep_4bit_trainable(model)
    return model, weights


def _non_parameter_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor) for name, tensor in module._buffers.items() if tensor is not None)
    yield from (
        (name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)
    )


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

        quantizer = AutoHfQuantizer.from_config(
            quantization_config(precision, quant_storage), pre_quantized=False
        )
        quantizer.preprocess_model(model=model, dtype=TORCH_DTYPES[precision.load], device_map=None)
        quantizer.postprocess_model(model)
        if config.tuning.has_quantized_experts:
            nf4_experts.prepare_packed_experts(model)
        model.hf_quantizer = quantizer
    model.tie_weights()
    return model.eval()


# Parameters with one element's memory: PEFT creates adapters on the base's device, where they need
# memory.
def _put_placeholders(
    model: nn.Module, dtypes: Mapping[str, torch.dtype], load_dtype: torch.dtype
) -> None:
    placeholders: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placeholders:  # tied ones stay one
                dtype = dtypes.get(f"{path}.{name}" if path else name, load_dtype)
                data = torch.empty((), dtype=dtype).expand(parameter.shape)
                placeholder = nn.Parameter(data, requires_grad=parameter.requires_grad)
                if _is_4bit(parameter):
                    placeholder = type(parameter)(data, requires_grad=False, **vars(parameter))
                placeholders[id(parameter)] = placeholder
            module._parameters[name] = placeholders[id(parameter)]


def _is_4bit(parameter: Any) -> bool:
    return type(parameter).__name__ == "Params4bit"


def shard_model(
    trainer: Any, source: SourceWeights, *, layer_class: str, fp32_master_weights: bool
) -> None:
    """Fill the trainer's model and divide it, one unit after the other; all ranks call it. The
    units are accelerate's (`fsdp2_prepare_model`, which leaves a divided model alone). At its peak
    a rank holds its parts, the current unit whole, and one tensor as it arrived.
    `fp32_master_weights`: what trains is kept in fp32, beside computation in 16 bits."""
    model, device = trainer.model, trainer.args.device
    plugin, mesh = trainer.accelerator.state.fsdp_plugin, trainer.accelerator.torch_device_mesh
    options = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": (
            mesh[tuple(trainer.accelerator.parallelism_config.fsdp_dim_names)]
            if mesh is not None
            else None
        ),
    }
    filler = _ParameterFiller(model, source, device, fp32_master_weights=fp32_master_weights)
    for modules, overrides in _shard_units(model, layer_class):
        for module in modules:
            filler.fill(module)
        fully_shard(modules if len(modules) > 1 else modules[0], **{**options, **overrides})
    # accelerate would look for layers by a class name that FSDP2 has changed
    plugin.auto_wrap_policy = None
    for parameter in model.parameters():
        # accelerate matches the optimizer's parameters by the addresses of their parts, and those
        # of all empty parts (a dimension shorter than the ranks) are 0
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
    tail = [module for module in backbone.children() if "Norm" in type(module).__name__][-1:]
    if is_tied:
        tail.append(embedding)
    if head is not None:
        tail.append(head)
    if tail:
        yield tail, {"reshard_after_forward": False}
    yield [model], {"reshard_after_forward": None}


# Gives each parameter its value once, in every module that holds it.
class _ParameterFiller:
    def __init__(
        self,
        model: nn.Module,
        source: SourceWeights,
        device: torch.device,
        *,
        fp32_master_weights: bool,
    ) -> None:
        self._source, self._device, self._fp32_master_weights = source, device, fp32_master_weights
        storages = [
            parameter.quant_storage for parameter in model.parameters() if _is_4bit(parameter)
        ]
        self._quant_storage = storages[0] if storages else torch.uint8
        self._holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append(
                        (f"{path}.{name}", module, name)
                    )
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
            if issubclass(getattr(module, "source_cls", nn.Linear), Conv1D):  # transposed
                value = self._receive(holders[0][0], parameter, parameter.shape[::-1]).T
            else:
                value = self._receive(holders[0][0], parameter, parameter.shape)
            # quantises
            filled = type(parameter)(value, requires_grad=False, **vars(parameter)).to(self._device)
        else:
            value = self._receive(holders[0][0], parameter, parameter.shape)
            filled = nf4_experts.fill_packed(module, holders[0][2], value, self._quant_storage)
            if filled is None:
                if self._fp32_master_weights and parameter.requires_grad:
                    value = value.float()
                filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for _, owner, name in holders:
            owner._parameters[name] = filled

    def _receive(self, name: str, parameter: nn.Parameter, shape: torch.Size) -> torch.Tensor:
        if distributed.is_first():
            source_tensor = self._source.get(base_parameter_name(name), parameter)
            assert source_tensor.untyped_storage().nbytes() >= source_tensor.nbytes, (
                f"{name} has no value"
            )
            tensor = (
                source_tensor.detach().to(self._device, parameter.dtype, copy=True).contiguous()
            )
        else:
            tensor = torch.empty(shape, dtype=parameter.dtype, device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, src=0)
        return tensor


def base_parameter_name(name: str) -> str:
    """A parameter's name in the base, from its name in a model with adapters."""
    return ".".join(
        part
        for part in name.removeprefix("base_model.model.").split(".")
        if part not in ("base_layer", "original_module", "modules_to_save", "default")
    )


# --- LoRA's adapters ------------------------------------------------------------------------------
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
