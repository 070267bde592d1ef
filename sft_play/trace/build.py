"""The model of a step, from its config only: the real class with real adapters, and stand-ins with
the same memory for what cannot run on fake tensors: NF4 layers and bitsandbytes' optimizers. They
allocate what the real code does, in the same order (`patches.PATCHES` has the reasons and guards).
"""

import contextlib
import functools
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.planner.memory.model_states import ABSMAX_BLOCK
from sft_play.planner.memory.structure import NF4_BLOCK
from sft_play.trace import kernels
from sft_play.trace.settings import VARLEN_ATTENTIONS, StepSettings, TraceUnavailable
from sft_play.trace.storages import StorageLog
from sft_play.training.model import attention_functions, nf4_experts
from sft_play.training.model.language_model import drop_kernel_choices, prepare_text_config
from sft_play.training.prepare import experts
from sft_play.training.prepare.lora_config import trainable_rows


# --- NF4 ------------------------------------------------------------------------------------------
class _FakeNF4Product(torch.autograd.Function):
    """`MatMul4Bit` of bitsandbytes 0.50 beyond its fused kernel's range (1536 rows): dequantise,
    multiply, free."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, layer: Any, bias: Any) -> Any:
        ctx.layer = layer
        return torch.nn.functional.linear(hidden, layer.dequantised(hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight = ctx.layer.dequantised(ctx.layer.quantised_from, is_backward=True)
        return torch.matmul(grads[0], weight.to(grads[0].dtype)), None, None


@functools.cache
def fake_nf4_class() -> Any:
    """The fake's class, a subclass of bitsandbytes' Linear4bit so that PEFT sees one."""
    linear_4bit = importlib.import_module("bitsandbytes").nn.Linear4bit

    class NF4Linear(linear_4bit):  # type: ignore[misc, valid-type]
        """Packed weight and scales as buffers; not a Params4bit, which cannot wrap a fake
        tensor."""

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
    """Make the fake of a Linear4bit that is on the meta device, on the meta device too."""
    fake = fake_nf4_class()()
    fake.in_features, fake.out_features = layer.in_features, layer.out_features
    fake.compute_dtype = getattr(torch, settings.quant_compute)
    fake.quantised_from = getattr(torch, settings.weights)
    storage = getattr(torch, settings.quant_storage)
    weights = fake.in_features * fake.out_features
    rows = math.ceil(weights / 2) // storage.itemsize
    weight = nn.Parameter(torch.empty((rows, 1), dtype=storage, device="meta"), requires_grad=False)
    weight.compress_statistics, weight.quant_type, weight.quant_state = (
        settings.double_quant,
        "nf4",
        None,
    )
    weight.blocksize, weight.quant_storage, weight.bnb_quantized = NF4_BLOCK, storage, True
    fake.weight = weight
    fake.bias = None
    # bitsandbytes creates it in fp32; loading casts it to the dtype of the other weights
    if layer.bias is not None:
        fake.bias = nn.Parameter(layer.bias.detach().to(fake.quantised_from), requires_grad=False)

    _register_scales(fake, "", weights, double_quant=settings.double_quant)
    return fake


class _FakeNF4Experts(nf4_experts.PackedWeight):
    """Reads a stacked weight of experts dequantised; its scales are buffers of the module."""

    def __init__(self, module: Any, name: str, settings: StepSettings) -> None:
        super().__init__()
        self.shape, self.dtype = getattr(module, name).shape, getattr(torch, settings.weights)
        self._scales = (module, f"{name}_absmax", f"{name}_offset")
        _register_scales(module, f"{name}_", self.shape.numel(), double_quant=settings.double_quant)

    def placeholder(self, packed: torch.Tensor) -> torch.Tensor:
        return torch.empty((), dtype=self.dtype, device=packed.device).expand(self.shape)

    def dequantise(self, packed: torch.Tensor) -> torch.Tensor:
        module, absmax, offset = self._scales
        if getattr(module, absmax).dtype is torch.uint8:
            scales = torch.empty(getattr(module, absmax).shape, dtype=torch.float32)
            scales = scales + getattr(module, offset)
        return torch.empty(self.shape, dtype=self.dtype)


def _register_scales(module: nn.Module, prefix: str, weights: int, *, double_quant: bool) -> None:
    """Register what bitsandbytes keeps beside this many packed weights, as buffers on the meta
    device."""
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
    for name, (shape, dtype) in buffers.items():
        module.register_buffer(
            prefix + name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False
        )


SCALE_NAMES = ("absmax", "code", "offset")


def scales_of(block: nn.Module) -> list[torch.Tensor]:
    """What a block keeps beside its packed weights, which a run has in states and not in
    buffers."""
    return [buffer for name, buffer in block.named_buffers() if name.endswith(SCALE_NAMES)]


# What PEFT and bitsandbytes read off a Params4bit.
PARAMETER_FIELDS = (
    "compress_statistics",
    "quant_type",
    "quant_state",
    "blocksize",
    "quant_storage",
    "bnb_quantized",
)


def wrap_dequantize(
    original: Callable[..., Any], *, is_backward: bool = False
) -> Callable[..., Any]:
    """What dequantises a layer's weight (PEFT's for the norms of DoRA, that of grouped adapters),
    which also knows the fake."""

    def dequantize(module: Any, *options: Any) -> Any:
        if isinstance(module, fake_nf4_class()):
            return module.dequantised(module.quantised_from, is_backward=is_backward)
        return original(module, *options)

    return dequantize


# --- optimizers -----------------------------------------------------------------------------------
class FakeStateOptimizer:
    """bitsandbytes' optimizers, whose states are created in C++: their bytes at the first step, no
    values."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        state_sizes: Callable[[int], tuple[int, ...]],
        log: StorageLog,
        fp32_state_counts: Mapping[int, int] | None = None,
    ) -> None:
        # how many fp32 states a parameter has instead, by its `id`
        self._fp32_state_counts = fp32_state_counts or {}
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._state_sizes, self._log, self._has_states = state_sizes, log, False

    def step(self) -> None:
        """The update happens in place; the first one creates the states."""
        if not self._has_states:
            for parameter in self._parameters:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                elements, count = int(local.numel()), self._fp32_state_counts.get(id(parameter))
                for nbytes in (
                    self._state_sizes(elements) if count is None else (4 * elements,) * count
                ):
                    self._log.record_alloc(nbytes)
            self._has_states = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def adam_8bit_state_sizes(elements: int) -> tuple[int, ...]:
    """A byte for each of two states, an fp32 scale per 256; fp32 below 4096 elements (bitsandbytes
    optimizer.py)."""
    if elements < 4096:
        return (4 * elements, 4 * elements)
    scales = 4 * math.ceil(elements / 256)
    return (elements, elements, scales, scales)


def paged_adam_8bit_state_sizes(elements: int) -> tuple[int, ...]:
    """States from 1e5 elements on are managed memory, outside the allocator; their scales are
    not."""
    states = adam_8bit_state_sizes(elements)
    return states[2:] if elements >= 100_000 else states


# --------------------------------------------------------------------------------------------------
# The model: the real class on the meta device, then its tensors as the trainer would step it.


def build_skeleton(settings: StepSettings, *, depth: int | None = None) -> Any:
    """The model on the meta device, quantised where the mode says so, with LoRA's adapters, or its
    first `depth` blocks; called outside a FakeTensorMode. Raises TraceUnavailable: the libraries
    know no such class; ModelError: PEFT refuses the adapters."""
    from transformers import AttentionInterface, AutoModelForCausalLM, masking_utils
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config, attention = language_model_config(settings), str(settings.attention)
    if settings.code is not None:
        model_class = get_class_from_dynamic_module(
            config.auto_map["AutoModelForCausalLM"], settings.code
        )
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    else:
        raise TraceUnavailable(
            f"transformers has no causal language model for {type(config).__name__}"
        )
    supports_attention, missing = True, attention
    if attention in ("sdpa", *VARLEN_ATTENTIONS):
        supports_attention, missing = getattr(model_class, "_supports_sdpa", False), "sdpa"
    if attention == "flash_attention_2":
        compatible = getattr(model_class, "_compatible_flash_implementations", None) or [attention]
        supports_attention = (
            getattr(model_class, "_supports_flash_attn", False) and attention in compatible
        )
    if not supports_attention:  # no run with it starts either
        raise TraceUnavailable(
            f"{model_class.__name__} has no {missing}: take eager or auto, as a run must"
        )
    if attention in VARLEN_ATTENTIONS:
        attention = attention_functions.VARLEN_ATTENTION
    # transformers' own path to it, under a name that requires no package
    if attention == "flash_attention_2":
        attention = kernels.FLASH_NAME
        AttentionInterface.register(attention, flash_attention_forward)
        masking_utils.AttentionMaskInterface.register(attention, masking_utils.flash_attention_mask)
    # classes are left alone whose own code transformers does not reach
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "grouped_mm"
        if settings.experts == "cast":
            config._experts_implementation = experts.CASTING_GROUPED_MM
        elif settings.experts == "eager":
            ALL_EXPERTS_FUNCTIONS.register(EXPERT_LOOP, _run_expert_loop)
            config._experts_implementation = EXPERT_LOOP
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, settings.weights),
            attn_implementation=attention,
            trust_remote_code=settings.code is not None,
        )
    if depth is not None:
        del find_block_list(model)[1][depth:]
    for change in META_MODEL_CHANGES:
        change(model, settings)
    if settings.mode == "qlora":
        _quantise(model, settings)
    if _uses_lora(settings):
        with torch.device("meta"):
            model = _add_adapters(model, settings)
    return model


def load_skeleton(model: Any, settings: StepSettings) -> Any:
    """The skeleton as the trainer would step it: loaded in module order, ties kept, in training
    mode."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    _materialise(model, replaced, adapters=False)
    for change in LOADED_MODEL_CHANGES:
        change(model, settings)
    if _uses_lora(settings):
        _materialise(model, replaced, adapters=True)
    elif settings.peft is not None:
        model = _add_adapters(model, settings)
    base = base_model(model)
    if settings.checkpointing:
        prefix = "activation" if hasattr(base, "activation_checkpointing_enable") else "gradient"
        options = {f"{prefix}_checkpointing_kwargs": {"use_reentrant": settings.reentrant}}
        getattr(base, f"{prefix}_checkpointing_enable")(**options)
        if settings.checkpointed_layers is not None:
            layers = require_blocks(base)
            if not hasattr(layers[0], "gradient_checkpointing"):
                raise TraceUnavailable(
                    f"{type(layers[0]).__name__} has no switch for its own checkpointing"
                )
            for layer in layers[settings.checkpointed_layers :]:
                layer.gradient_checkpointing = False
        if settings.peft is not None:
            # as TRL does (1.16); reentrant checkpointing needs such an input
            base.enable_input_require_grads()
    LOSS_SETUPS[settings.loss](base)
    return model.train()


def find_block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the list of a model's blocks, and its path: the outermost list of modules beside the
    token embedding, else the outermost one with the most parameters; empty if there is none."""
    lists = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    parent = next(
        (path.rpartition(".")[0] for path, module in model.named_modules() if module is embedding),
        "",
    )

    def rank(path: str) -> tuple[bool, int]:
        return path.rpartition(".")[0] == parent, count_module_parameters(lists[path])

    outermost = [
        path
        for path in lists
        if rank(path)[1] and not any(path.startswith(f"{other}.") for other in lists)
    ]
    path = max(outermost, key=rank, default="")
    return path, lists[path] if outermost else nn.ModuleList()


def count_module_parameters(module: nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


# How a modeling file of transformers names the package whose function replaces its own, and its own
# (integrations/hub_kernels.py).
_REPLACEABLE_FUNCTION = re.compile(
    r"""^@use_kernel_func_from_hub_with_fallback\(\s*["']\w+["'],\s*["']([\w-]+)["'][^)]*\)\s*"""
    r"def (\w+)",
    re.MULTILINE,
)


def replaceable_functions(model: nn.Module) -> list[tuple[str, str]]:
    """Packages, and the functions of the class's own file that theirs replace where they are
    installed."""
    class_module = sys.modules.get(type(model).__module__)
    try:
        text = inspect.getsource(class_module) if class_module is not None else ""
    except (OSError, TypeError):  # a class from a notebook, or without its file
        text = ""
    return _REPLACEABLE_FUNCTION.findall(text)


@contextlib.contextmanager
def use_class_functions(model: nn.Module, settings: StepSettings) -> Iterator[None]:
    """Run the class's own functions in place of packages', or what allocates as
    flash-linear-attention does."""
    class_module = sys.modules[type(model).__module__]
    replaced = {name: getattr(class_module, name) for _, name in replaceable_functions(model)}
    for name, function in replaced.items():
        uses_traced_rule = settings.delta_rule == "fla" and name == "torch_chunk_gated_delta_rule"
        setattr(
            class_module,
            name,
            kernels.chunk_gated_delta_rule if uses_traced_rule else inspect.unwrap(function),
        )
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(class_module, name, function)


def _uses_lora(settings: StepSettings) -> bool:
    return settings.peft is not None and str(settings.peft.get("peft_type", "LORA")).upper() in (
        "LORA",
        "DORA",
    )


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --- the bare model -------------------------------------------------------------------------------
def language_model_config(settings: StepSettings) -> Any:
    """The language model's config of transformers. Raises TraceUnavailable: it does not know the
    model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    if settings.code is not None:
        config = drop_kernel_choices(
            AutoConfig.from_pretrained(settings.code, trust_remote_code=True)
        ).get_text_config()
    else:
        fields = json.loads(json.dumps(dict(settings.model)))
        model_type = fields.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise TraceUnavailable(
                f"this version of transformers does not know model type {model_type!r}"
            )
        fields.pop("quantization_config", None)
        config = prepare_text_config(CONFIG_MAPPING[model_type].from_dict(fields), fields)
        config.vocab_size += settings.new_tokens
    # a cache would keep the keys and values of every layer; a balance loss of no routers ends in an
    # IndexError
    config.update({"use_cache": False, "output_router_logits": False})
    return config


def _quantise(model: Any, settings: StepSettings) -> None:
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    quantization_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=settings.double_quant,
        bnb_4bit_compute_dtype=getattr(torch, settings.quant_compute),
        bnb_4bit_quant_storage=getattr(torch, settings.quant_storage),
    )
    replace_with_bnb_linear(
        model,
        nf4_experts.ExpertQuantizer.get_modules_to_not_convert(model),
        quantization_config=quantization_config,
    )
    linear_4bit = importlib.import_module("bitsandbytes").nn.Linear4bit
    for name, layer in list(model.named_modules()):
        if isinstance(layer, linear_4bit):
            model.set_submodule(name, fake_nf4(layer, settings))
    if settings.quant_experts:
        nf4_experts.register_expert_quantizer()  # PEFT's part
        for _, module, name in list(experts.stacked_experts(model)):
            storage, fake_weight = (
                getattr(torch, settings.quant_storage),
                _FakeNF4Experts(module, name, settings),
            )
            rows = math.ceil(getattr(module, name).numel() / 2) // storage.itemsize
            packed = torch.empty((rows, 1), dtype=storage, device="meta")
            setattr(module, name, nn.Parameter(packed, requires_grad=False))
            nf4_experts.install_packed_weight(module, name, fake_weight)
    model.is_loaded_in_4bit = True
    model.quantization_method = "bitsandbytes"


def _materialise(
    model: nn.Module, replaced: dict[nn.Parameter, nn.Parameter], *, adapters: bool
) -> None:
    """Storages for what is on the meta device, in module order, ties kept: the base's, or those
    that PEFT added."""
    for path, module in model.named_modules():
        # PEFT adds what is called so
        is_adapter = re.search(r"(^|\.)(lora_|modules_to_save|trainable_tokens_)", path) is not None
        if is_adapter != adapters:
            continue
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            if old not in replaced:
                new = nn.Parameter(
                    torch.empty(old.shape, dtype=old.dtype), requires_grad=old.requires_grad
                )
                new.__dict__.update(
                    {key: old.__dict__[key] for key in PARAMETER_FIELDS if key in old.__dict__}
                )
                replaced[old] = new
            module._parameters[name] = replaced[old]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


# --- adapters -------------------------------------------------------------------------------------
def parse_peft_config(fields: Mapping[str, Any]) -> Any:
    """PEFT's config of plain data. Raises TraceUnavailable: no such method."""
    method = str(fields.get("peft_type", "LORA")).upper()
    if method not in PEFT_CONFIGS:
        raise TraceUnavailable(f"adapters of {method} are not traced")
    return PEFT_CONFIGS[method](
        json.loads(json.dumps({key: value for key, value in fields.items() if key != "peft_type"}))
    )


# PEFT's configs by method; benchmarks add those of other scripts.
PEFT_CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "LORA": (
        lambda fields: importlib.import_module("peft").LoraConfig(
            **{"task_type": "CAUSAL_LM", **fields}
        )
    )
}


def _add_adapters(model: Any, settings: StepSettings) -> Any:
    assert settings.peft is not None
    config = parse_peft_config(settings.peft)
    if getattr(config, "target_parameters", None):
        config.target_parameters = experts.select_stacked_experts(model, config.target_parameters)
    size = model.config.vocab_size
    config.trainable_token_indices = trainable_rows(
        model, range(size - settings.new_tokens, size), saved_modules=config.modules_to_save or ()
    )
    try:
        model = importlib.import_module("peft").get_peft_model(model, config)
    except ValueError as error:  # no run with these adapters starts
        raise ModelError(f"PEFT refuses the adapters: {one_line(str(error), limit=300)}") from error
    if not settings.casts_inputs:
        importlib.import_module("sft_play.training.model.model_loading").cast_outside_autocast(
            model
        )
    # PEFT creates them in fp32 beside plain weights; TRL casts those of a quantised model to bf16,
    # DoRA's magnitudes aside, and this toolkit to fp32 where the run computes in another type
    dtype = None
    if settings.adapters is not None:
        dtype = getattr(torch, settings.adapters)
    elif settings.mode == "qlora":
        has_wide_adapters = settings.autocast == "float16" or settings.weights == "float32"
        dtype = torch.float32 if has_wide_adapters else torch.bfloat16
    if dtype is not None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(dtype)
    return model


# --- experts --------------------------------------------------------------------------------------
# The name under which `_run_expert_loop` is registered in transformers.
EXPERT_LOOP = "sft_play_traced_loop"


def _run_expert_loop(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """The eager experts of transformers 5: tokens x hidden in and out, the other two tokens x
    experts per token. The classes' own loops find each expert's tokens by value, which fake tensors
    do not have."""
    output = torch.zeros_like(hidden_states)
    with torch.no_grad():
        one_hot = nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(
            2, 1, 0
        )
    share = math.ceil(top_k_index.numel() / self.num_experts)
    for expert in range(self.num_experts):
        slot, token = (torch.zeros(share, dtype=torch.int64) for _ in range(2))
        projected = _expert_product(
            self, hidden_states[token], "gate_up_proj" if self.has_gate else "up_proj", expert
        )
        inner = self._apply_gate(projected) if self.has_gate else self.act_fn(projected)
        out = _expert_product(self, inner, "down_proj", expert)
        out = out * top_k_weights[token, slot, None]
        output.index_add_(0, token, out.to(output.dtype))
    del one_hot
    return output


def _expert_product(module: Any, rows: Any, name: str, expert: int) -> Any:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if not module.is_transposed:
        return nn.functional.linear(rows, weight, bias)
    out = rows @ weight
    return out if bias is None else out + bias


# --- what the trainer sets ------------------------------------------------------------------------
def _fuse_head(base: Any) -> None:
    importlib.import_module("sft_play.training.model.fused_head").set_backbone_prefix(base)
    # the outputs that TRL's SFTTrainer asks for (its metrics)
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(
        base, outputs=("log_probs", "entropy", "is_top1")
    )


# What gives a model the loss of this name; benchmarks add those of older versions of transformers.
LOSS_SETUPS: dict[str, Callable[[Any], object]] = {
    "chunked": _fuse_head,
    "logits": (
        lambda base: importlib.import_module("sft_play.training.model.fused_head").use_class_logits(
            base
        )
    ),
    "model": lambda base: None,
}
# What lets a model run kernels of this name; benchmarks add functions that allocate what Liger's
# do.
KERNEL_CONTEXTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext
}
# What changes a model on the meta device into that of an older version of transformers; benchmarks
# fill it.
META_MODEL_CHANGES: list[Callable[[Any, StepSettings], None]] = []
# What other scripts did to a model that was loaded, before its adapters were made; benchmarks fill
# it.
LOADED_MODEL_CHANGES: list[Callable[[Any, StepSettings], None]] = []


def require_blocks(base: Any) -> list[Any]:
    """The blocks of a transformers model; TraceUnavailable where there are none."""
    blocks = list(find_block_list(base)[1])
    if not blocks:
        raise TraceUnavailable(f"{type(base).__name__} has no list of layers")
    return blocks
