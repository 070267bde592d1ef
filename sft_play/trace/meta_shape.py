"""The shapes of a model that the table of families does not know: its class, built on the meta
device and measured.

Parameter counts are exact. What a step keeps for the backward pass is measured where a plan needs
it (`confirm.BlockMeter`).
"""

import hashlib
import itertools
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE
from sft_play.models.config_json import refuse_remote_code
from sft_play.models.families import (
    FIELD_ALIASES,
    MODEL_FAMILIES,
    refuse_absurd_sizes,
    require_causal_lm_config,
)
from sft_play.models.shape import (
    AttentionKind,
    LayerKind,
    LinearShape,
    ModelShape,
    StackedExpertWeight,
)
from sft_play.trace.build import count_module_parameters, find_block_list, replaceable_functions
from sft_play.training.class_checks.adapter_trial import (
    find_adapter_placement,
    has_custom_logits,
    keeps_graphs,
    parameters_without_gradient,
    wildcard_name,
)
from sft_play.training.model.language_model import drop_kernel_choices, prepare_text_config
from sft_play.training.model.nf4_experts import ExpertQuantizer
from sft_play.training.prepare.experts import holds_routed_experts

_LINEAR_CLASSES = (nn.Linear, Conv1D)

# The dtype of weights in a model that is measured.
_WEIGHT_DTYPE = torch.bfloat16

# transformers' `layer_types`; others that are not attention (mamba, conv) or a linear one have no
# softmax attention.
_ATTENTION_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
}

# Distributions whose name differs from the module's by more than an underline.
_DISTRIBUTIONS = {"fla": LINEAR_ATTENTION_PACKAGE}

# Names of the number of experts that a token passes.
_EXPERTS_PER_TOKEN_FIELDS = (
    "num_experts_per_tok",
    *FIELD_ALIASES["num_experts_per_tok"],
    "top_k_experts",
    "moe_top_k",
    "top_k",
)

# Names of attributes that differ from block to block without making them different.
_POSITION_ATTRIBUTES = re.compile(r"idx|index|layer_(id|number|num)|training")

# Names of dropout of attention probabilities in configs.
_ATTENTION_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")

# Names of the MLP's last linear layer.
_DOWN_PROJECTIONS = ("down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "w2", "output_linear")


def measure_shape_on_meta(
    config: Mapping[str, Any], *, name: str, trust_remote_code: bool = False
) -> ModelShape:
    """Measure the shapes of the language model that a config.json describes on its class, without
    weights, in seconds. Raises ModelError: transformers has no causal language model of this type,
    or its class refuses the config."""
    require_causal_lm_config(config, name=name)
    refuse_absurd_sizes(config, name=name)
    refuse_remote_code(dict(config), name=name, allowed=trust_remote_code)
    try:
        if trust_remote_code and config.get("auto_map"):
            hf_config = drop_kernel_choices(
                AutoConfig.from_pretrained(name, trust_remote_code=True)
            ).get_text_config()
        else:
            fields = {key: value for key, value in config.items() if key != "model_type"}
            hf_config = prepare_text_config(
                AutoConfig.for_model(str(config["model_type"]), **fields), config
            )
        if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (
            trust_remote_code and config.get("auto_map")
        ):
            raise ModelError(
                f"model {one_line(name)} is a {type(hf_config).__name__}, which transformers does"
                " not know as a causal language model; this toolkit trains causal language models"
            )
        with torch.device("meta"):
            # not fp32, so that buffers which stay in fp32 are told from those that follow the
            # weights
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=_WEIGHT_DTYPE, trust_remote_code=trust_remote_code
            )
    except ModelError:
        raise
    except Exception as error:  # each model class checks its config in its own way
        raise ModelError(
            f"model {one_line(name)}: transformers cannot build its class from config.json"
            f" (model_type {one_line(str(config.get('model_type')))}): {type(error).__name__}:"
            f" {one_line(str(error))}"
        ) from None
    placement, without_adapter = find_adapter_placement(model, trust_remote_code=trust_remote_code)
    shape = measure_shape(model, hf_config, name=name, without_adapter=without_adapter)
    if shape.model_type in MODEL_FAMILIES:
        return shape
    untrained_names = parameters_without_gradient(model, trust_remote_code=trust_remote_code)
    return replace(
        shape,
        adapter_placement=placement,
        untrained_params=sum(
            one.numel()
            for name, one in model.named_parameters()
            if wildcard_name(name) in untrained_names
        ),
        has_custom_logits=has_custom_logits(hf_config, trust_remote_code=trust_remote_code),
        can_checkpoint=shape.can_checkpoint
        and not keeps_graphs(hf_config, trust_remote_code=trust_remote_code),
    )


def measure_shape(
    model: Any, hf_config: Any, *, name: str, without_adapter: Container[str] = frozenset()
) -> ModelShape:
    """Read the shapes of a model from its modules. Raises ModelError without a token embedding or
    repeated blocks."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    path, blocks = find_block_list(model)
    if not isinstance(getattr(embedding, "weight", None), torch.Tensor) or not len(blocks):
        raise ModelError(
            f"model {one_line(name)}: {type(model).__name__} has no token embedding or no list of"
            " blocks"
        )
    attention_kinds = _layer_attention_kinds(hf_config, len(blocks))
    package_names = (
        _DISTRIBUTIONS.get(one, one.replace("_", "-")) for one, _ in replaceable_functions(model)
    )
    packages = tuple(dict.fromkeys(package_names))
    block_kinds = _measure_blocks(model, hf_config, attention_kinds, packages, without_adapter)
    kinds = list(dict.fromkeys(block_kinds))
    commonest = max(kinds, key=block_kinds.count)
    heads = _config_number(hf_config, "num_attention_heads") or 1
    width = embedding.weight.shape[1]
    hidden = _config_number(hf_config, "hidden_size") or width
    dropouts = (_config_field(hf_config, field) for field in _ATTENTION_DROPOUT_FIELDS)
    shape = ModelShape(
        name=name,
        model_type=str(hf_config.model_type),
        hidden_size=hidden,
        intermediate_size=commonest.expert_width
        or commonest.mlp_width
        or _config_number(hf_config, "intermediate_size")
        or hidden,
        num_layers=len(blocks),
        num_heads=heads,
        num_kv_heads=_config_number(hf_config, "num_key_value_heads") or heads,
        head_dim=_config_number(hf_config, "qk_head_dim", "head_dim") or max(1, hidden // heads),
        vocab_size=embedding.weight.shape[0],
        tied=head is None or head.weight is embedding.weight,
        max_positions=_config_number(hf_config, "max_position_embeddings"),
        layers=tuple(replace(kind, count=block_kinds.count(kind)) for kind in kinds),
        layer_order=tuple(kinds.index(block) for block in block_kinds),
        window=_window_tokens(hf_config, attention_kinds),
        num_experts=max(kind.num_experts for kind in kinds),
        experts_per_token=_config_number(hf_config, *_EXPERTS_PER_TOKEN_FIELDS) or 0,
        # `experts_implementation` reaches experts of transformers' own kind alone
        uses_custom_experts=any(kind.num_experts for kind in kinds)
        and not any(hasattr(module, "is_concatenated") for module in model.modules()),
        kernel_packages=packages,
        has_head_bias=getattr(head, "bias", None) is not None,
        norms_per_layer=sum(
            any(tensor.numel() == hidden for tensor in part.parameters(recurse=False))
            for part in blocks[block_kinds.index(commonest)].children()
            if _is_norm(part)
        ),
        embedding_width=0 if width == hidden else width,
        uses_alibi=bool(_config_field(hf_config, "alibi"))
        or hf_config.model_type in ("bloom", "mpt"),
        caps_logits=_config_field(hf_config, "final_logit_softcapping") is not None,
        attention_dropout=float(next(filter(None, dropouts), 0.0)),
        position_rows=sum(
            module.weight.shape[0]
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding)
            and module.weight.shape[1] == hidden
            and path.rpartition(".")[2] in ("wpe", "embed_positions", "position_embeddings")
        ),
        outer_linears=_outer_linears(model, head, path, without_adapter),
        can_checkpoint=bool(getattr(type(model), "supports_gradient_checkpointing", False)),
        has_fused_attention=bool(getattr(type(model), "_supports_sdpa", False)),
        source_note=f"that of {type(model).__name__}, measured on its class",
    )
    return replace(
        shape,
        outer_params=count_module_parameters(model) - shape.params,
        buffer_bytes=sum(one.nbytes for one in model.buffers() if one.dtype != _WEIGHT_DTYPE),
        buffer_elements=sum(one.numel() for one in model.buffers() if one.dtype == _WEIGHT_DTYPE),
    )


def _outer_linears(
    model: nn.Module, head: Any, block_list: str, without_adapter: Container[str]
) -> tuple[LinearShape, ...]:
    # beside the blocks, such as a projection behind a narrow embedding
    return tuple(
        replace(
            _linear_shape(path.rpartition(".")[2], module), adaptable=path not in without_adapter
        )
        for path, module in model.named_modules()
        if isinstance(module, _LINEAR_CLASSES)
        and module is not head
        and not path.startswith(f"{block_list}.")
    )


def _measure_blocks(
    model: nn.Module,
    hf_config: Any,
    attention_kinds: Sequence[AttentionKind],
    packages: Container[str],
    without_adapter: Container[str],
) -> list[LayerKind]:
    path, blocks = find_block_list(model)
    # weights that blocks share, too
    unpacked = frozenset(ExpertQuantizer.get_modules_to_not_convert(model))
    # a class whose file names the package may have linear attention in place of softmax attention
    layer_types = (
        _per_layer_field(hf_config, "layer_types", len(blocks))
        if LINEAR_ATTENTION_PACKAGE in packages
        else None
    )
    measured, boundaries = [], 0
    for index, (block, attention, layer) in enumerate(
        zip(blocks, attention_kinds, layer_types or attention_kinds, strict=True)
    ):
        kind = _measure_block(block, attention, is_linear=str(layer) == "linear_attention")
        # Inkling 2's blocks read the states at all boundaries before them
        boundaries += getattr(block, "is_block_boundary", False) is True
        kind = replace(kind, settings=f"{kind.settings}, {boundaries}") if boundaries else kind
        linears = []
        for linear in kind.linears:
            name = f"{path}.{index}.{linear.path}"
            is_packable = (
                linear.is_packable and name not in unpacked and wildcard_name(name) not in unpacked
            )
            linears.append(
                replace(linear, adaptable=name not in without_adapter, is_packable=is_packable)
            )
        measured.append(replace(kind, linears=tuple(linears)))
    return measured


def _layer_attention_kinds(hf_config: Any, count: int) -> list[AttentionKind]:
    layer_types = _per_layer_field(hf_config, "layer_types", count) or _per_layer_field(
        hf_config, "attention_layers", count
    )
    window = _window_tokens(hf_config, ["sliding"])
    if layer_types is None:
        return ["sliding" if _config_number(hf_config, "sliding_window") else "full"] * count
    kinds: list[AttentionKind] = []
    for name in map(str, layer_types):
        # what a type of block sees; a sparse attention counts as a full one, which needs no less
        is_other_attention = "attention" in name and "linear" not in name
        kind = _ATTENTION_KINDS.get(name, "full" if is_other_attention else "none")
        kinds.append(kind if window or kind == "none" else "full")
    return kinds


def _per_layer_field(hf_config: Any, name: str, count: int) -> Sequence[Any] | None:
    values = _config_field(hf_config, name)
    return values if isinstance(values, list | tuple) and len(values) == count else None


def _window_tokens(hf_config: Any, attention_kinds: list[AttentionKind]) -> int | None:
    if not {"sliding", "chunked"} & set(attention_kinds):
        return None
    return _config_number(hf_config, "sliding_window", "attention_chunk_size", "window_size")


def _config_field(hf_config: Any, name: str) -> Any:
    try:
        return getattr(hf_config, name, None)
    except Exception:
        # a field that differs by layer cannot be read as one: take what the file says
        return hf_config.to_dict().get(name)


def _config_number(hf_config: Any, *names: str) -> int | None:
    """The first of these fields that is a whole number above 0; of a list its first one."""
    for name in names:
        value = _config_field(hf_config, name)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _linear_shape(path: str, module: nn.Module) -> LinearShape:
    rows, columns = module.weight.shape
    inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
    # transformers replaces these by bitsandbytes' layers, and none of their subclasses, such as
    # Falcon's
    is_packable = isinstance(module, Conv1D) or type(module) is nn.Linear
    return LinearShape(path, inputs, outputs, module.bias is not None, is_packable=is_packable)


def _measure_block(
    block: nn.Module, attention: AttentionKind, *, is_linear: bool = False
) -> LayerKind:
    """One block as its own kind (count 0, so that equal blocks compare equal)."""
    modules = dict(block.named_modules())
    linears = tuple(
        _linear_shape(path, module)
        for path, module in modules.items()
        if isinstance(module, _LINEAR_CLASSES)
    )
    # weights and biases of routed experts with their paths: one tensor per projection holds all
    # experts
    experts = [
        (f"{path}.{name}", tensor)
        for path, module in modules.items()
        if holds_routed_experts(path, module)
        for name, tensor in module.named_parameters(recurse=False)
        if tensor.dim() == 3 or name.endswith("_bias")
    ]
    # what its modules are set to (`is_kv_shared_layer`), but for their place among the blocks
    settings = [
        (path, name, value)
        for path, module in modules.items()
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | str)
        and not name.startswith("_")
        and not _POSITION_ATTRIBUTES.search(name)
    ]
    mlp = next(
        (
            linear.inputs
            for linear in linears
            if linear.name in _DOWN_PROJECTIONS and not linear.is_attention
        ),
        0,
    )
    kind = LayerKind(
        count=0,
        settings=hashlib.sha256(repr(settings).encode()).hexdigest()[:8],
        linears=linears,
        attention=attention,
        mlp_width=0 if experts else mlp,
        num_experts=experts[0][1].shape[0] if experts else 0,
        expert_width=_expert_width([tensor for _, tensor in experts if tensor.dim() == 3]),
        expert_params=sum(tensor.numel() for _, tensor in experts),
        expert_weights=tuple(
            StackedExpertWeight(path, *tensor.shape)
            for path, tensor in experts
            if tensor.dim() == 3
        ),
        router_params=sum(
            count_module_parameters(module)
            for path, module in modules.items()
            if path.endswith((".gate", ".router"))
            and not any(isinstance(part, _LINEAR_CLASSES) for part in module.modules())
        ),
        norm_params=sum(
            count_module_parameters(module) for module in modules.values() if _is_norm(module)
        ),
        # what linear attention's last projection reads are its value heads
        linear_attention_width=(
            next((one.inputs for one in linears if one.name in ("out_proj", "o_proj")), 0)
            if is_linear
            else 0
        ),
    )
    return replace(kind, other_params=count_module_parameters(block) - kind.params)


def _expert_width(matrices: Sequence[torch.Tensor]) -> int:
    """Inner width of one expert; 0 where no two matrices lead to the inner width, or to twice as
    much, and back."""
    pairs = list(itertools.pairwise(tuple(matrix.shape[1:]) for matrix in matrices))
    if not pairs:
        return 0
    # the largest, and of equal ones the last: gates come first, and JetMoE's attention has small
    # experts too
    up, down = max(reversed(pairs), key=lambda pair: sum(map(math.prod, pair)))
    doubled = next((size for size in down if sorted(up) == sorted((2 * size, sum(down) - size))), 0)
    # the same two sides: outputs come first, as in a linear layer
    return doubled or (up[0] if sorted(up) == sorted(down) else 0)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and bool(list(module.parameters(recurse=False)))
