"""The shapes of a model that the table of families does not know: its class, built on the meta device and measured.

Parameter counts are exact. What a step keeps for the backward pass is known only for softmax attention and the usual
MLPs, so the shape carries a note that says what is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from sft_play.errors import ModelError
from sft_play.facts.architecture import refuse_remote_code
from sft_play.facts.config_fields import refuse_absurd_sizes, refuse_what_is_none
from sft_play.facts.model_shape import AttentionKind, LayerKind, Linear, ModelShape
from sft_play.log import one_line

_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
}
"""transformers' `layer_types`; others that are no attention (mamba, conv) or a linear one have no softmax attention."""

_DOWN = ("down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "w2", "output_linear")
"""What the MLP's last linear layer is called."""


def shape_on_meta(config: Mapping[str, Any], *, name: str, trust_remote_code: bool = False) -> ModelShape:
    """The shapes of the language model that a config.json means, measured on its class without weights.

    Takes seconds and imports torch and transformers. With `trust_remote_code` only code that `name`, a folder,
    brings along is run.

    Raises:
        ModelError: transformers has no causal language model of this type, or its class refuses the config.
    """
    refuse_what_is_none(config, name=name)
    refuse_absurd_sizes(config, name=name)
    refuse_remote_code(dict(config), name=name, allowed=trust_remote_code)
    hf_config = _hf_config(config, name, trust_remote_code)
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (trust_remote_code and config.get("auto_map")):
        raise ModelError(
            f"model {one_line(name)} is a {type(hf_config).__name__}, which transformers does not know as a causal "
            "language model; this toolkit trains causal language models"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    except Exception as error:  # each model class checks its config in its own way
        raise ModelError(
            f"model {one_line(name)}: transformers cannot build its class from config.json (model_type "
            f"{one_line(str(config.get('model_type')))}): {type(error).__name__}: {one_line(str(error))}"
        ) from None
    return measure(model, hf_config, name=name)


def _hf_config(config: Mapping[str, Any], name: str, trust_remote_code: bool) -> Any:
    """transformers' config of the language model."""
    kind = str(config["model_type"])
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        if trust_remote_code and config.get("auto_map"):
            return AutoConfig.from_pretrained(name, trust_remote_code=True).get_text_config()
        return AutoConfig.for_model(kind, **fields).get_text_config()
    except Exception as error:
        raise ModelError(
            f"model {one_line(name)}: transformers cannot read its config.json (model_type {one_line(kind)}): "
            f"{type(error).__name__}: {one_line(str(error))}"
        ) from None


def measure(model: nn.Module, hf_config: Any, *, name: str) -> ModelShape:
    """The shapes of a causal language model (on any device) by looking at its modules.

    Raises:
        ModelError: it has no embedding or no repeated blocks, so it is no decoder that can be described.
    """
    embedding, head = _embedding(model), _head(model)
    path, blocks = _blocks(model)
    if embedding is None or blocks is None:
        raise ModelError(
            f"model {one_line(name)}: a {type(model).__name__} has no token embedding or no list of blocks"
        )
    types = _layer_types(hf_config, len(blocks))
    measured = [_measure_block(block, kind) for block, kind in zip(blocks, types, strict=True)]
    kinds = list(dict.fromkeys(measured))
    common = max(kinds, key=measured.count)
    outer = _outer_linears(model, path, head)
    heads = _number(hf_config, "num_attention_heads") or 1
    width = embedding.weight.shape[1]
    hidden = _number(hf_config, "hidden_size") or width
    positions = _position_rows(model, hidden)
    shape = ModelShape(
        name=name,
        model_type=str(hf_config.model_type),
        hidden_size=hidden,
        intermediate_size=common.expert_width or common.mlp_width or _number(hf_config, "intermediate_size") or hidden,
        num_layers=len(blocks),
        num_heads=heads,
        num_kv_heads=_number(hf_config, "num_key_value_heads") or heads,
        head_dim=_number(hf_config, "head_dim") or max(1, hidden // heads),
        vocab_size=embedding.weight.shape[0],
        tied=head is None or head.weight is embedding.weight,
        max_positions=_number(hf_config, "max_position_embeddings"),
        layers=tuple(replace(kind, count=measured.count(kind)) for kind in kinds),
        layer_order=tuple(kinds.index(block) for block in measured),
        window=_window(hf_config, types),
        num_experts=common.num_experts,
        experts_per_token=_number(hf_config, "num_experts_per_tok") or 0,
        gated_mlp=bool(common.num_experts) or any("gate" in linear.name for linear in common.linears),
        activation=_activation(hf_config),
        head_bias=getattr(head, "bias", None) is not None,
        norms_per_layer=_norms(blocks[measured.index(common)], hidden),
        embedding_width=0 if width == hidden else width,
        learned_positions=positions > 0,
        position_rows=positions,
        outer_linears=outer,
        note=f"the shapes of {type(model).__name__} were measured on its class: parameters are exact, activations "
        "are estimated as those of a plain decoder",
    )
    return replace(shape, outer_params=_count(model) - shape.params)


def _embedding(model: nn.Module) -> Any:
    getter = getattr(model, "get_input_embeddings", None)
    found = getter() if getter is not None else None
    return found if isinstance(getattr(found, "weight", None), torch.Tensor) else None


def _head(model: nn.Module) -> Any:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if getter is not None else None


def _blocks(model: nn.Module) -> tuple[str, nn.ModuleList | None]:
    """The list of blocks and its path: of the outermost lists of modules the one with the most parameters."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = {
        path: module
        for path, module in lists.items()
        if _count(module) and not any(path.startswith(f"{other}.") for other in lists)
    }
    path = max(outermost, key=lambda path: _count(outermost[path]), default="")
    return path, outermost.get(path)


def _layer_types(hf_config: Any, count: int) -> list[AttentionKind]:
    """What each block's attention sees, as far as the config says it."""
    named = _field(hf_config, "layer_types") or _field(hf_config, "attention_layers")
    window = _window(hf_config, ["sliding"])
    if not isinstance(named, list | tuple) or len(named) != count:
        return ["sliding" if _number(hf_config, "sliding_window") else "full"] * count
    kinds = [_kind(str(kind)) for kind in named]
    return [kind if window or kind == "none" else "full" for kind in kinds]


def _kind(name: str) -> AttentionKind:
    """What a type of block sees; a sparse attention counts as a full one, which needs no less."""
    if name in _KINDS:
        return _KINDS[name]
    return "full" if "attention" in name and "linear" not in name else "none"


def _window(hf_config: Any, types: list[AttentionKind]) -> int | None:
    if not {"sliding", "chunked"} & set(types):
        return None
    names = ("sliding_window", "attention_chunk_size", "window_size")
    return next((found for found in (_number(hf_config, name) for name in names) if found), None)


def _activation(hf_config: Any) -> str:
    names = ("hidden_activation", "activation_function", "activation", "hidden_act")
    return next((str(found) for found in (_field(hf_config, name) for name in names) if found), "gelu")


def _field(hf_config: Any, name: str) -> Any:
    try:
        return getattr(hf_config, name, None)
    except Exception:  # a field that differs by layer refuses to be read as one: take what the file says
        return hf_config.to_dict().get(name)


def _number(hf_config: Any, name: str) -> int | None:
    """A size of the config; the first where it differs by layer."""
    value = _field(hf_config, name)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def _linear(path: str, module: nn.Module) -> Linear:
    rows, columns = module.weight.shape
    inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
    return Linear(path, inputs, outputs, module.bias is not None)


def _measure_block(block: nn.Module, attention: AttentionKind) -> LayerKind:
    """One block as a kind of its own (count 0, so that equal blocks compare equal)."""
    modules = dict(block.named_modules())
    linears = tuple(_linear(path, module) for path, module in modules.items() if _is_linear(module))
    experts = [tensor for path, tensor in block.named_parameters() if _is_expert(path, tensor)]
    mlp = next((linear.inputs for linear in linears if linear.name in _DOWN and not linear.is_attention), 0)
    kind = LayerKind(
        count=0,
        linears=linears,
        attention=attention,
        mlp_width=0 if experts else mlp,
        num_experts=experts[0].shape[0] if experts else 0,
        expert_width=_expert_width(block) if experts else 0,
        expert_params=sum(tensor.numel() for tensor in experts),
        shared_width=mlp if experts else 0,
        router_params=sum(_count(module) for path, module in modules.items() if _is_router(path, module)),
        norm_params=sum(_count(module) for module in modules.values() if _is_norm(module)),
    )
    return replace(kind, other_params=_count(block) - kind.params)


def _is_expert(path: str, tensor: torch.Tensor) -> bool:
    """Whether a parameter holds all experts of a block: one tensor per projection, and one per bias."""
    return "experts." in path and "shared" not in path and (tensor.dim() == 3 or path.endswith("_bias"))


def _expert_width(block: nn.Module) -> int:
    """Inner width of one expert: the down projection's side that is not the hidden width twice over."""
    tensors = {path.rpartition(".")[2]: tensor for path, tensor in block.named_parameters() if tensor.dim() == 3}
    if not {"gate_up_proj", "down_proj"} <= set(tensors):
        return 0
    wide = set(tensors["gate_up_proj"].shape[1:])
    return next((size for size in tensors["down_proj"].shape[1:] if 2 * size in wide), 0)


def _is_router(path: str, module: nn.Module) -> bool:
    return path.endswith((".gate", ".router")) and not any(_is_linear(part) for part in module.modules())


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a norm itself, not a list or block of them."""
    return "norm" in type(module).__name__.lower() and bool(list(module.parameters(recurse=False)))


def _norms(block: nn.Module, hidden: int) -> int:
    """Norms over the hidden width in one block."""
    own = [module for path, module in block.named_modules() if _is_norm(module) and "." not in path]
    return sum(any(tensor.numel() == hidden for tensor in module.parameters(recurse=False)) for module in own)


def _position_rows(model: nn.Module, hidden: int) -> int:
    """Rows of a learned position embedding."""
    found = [
        module.weight.shape[0]
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight.shape[1] == hidden
        and path.rpartition(".")[2] in ("wpe", "embed_positions", "position_embeddings")
    ]  # fmt: skip
    return sum(found)


def _outer_linears(model: nn.Module, blocks: str, head: nn.Module | None) -> tuple[Linear, ...]:
    """Linear layers outside the blocks, the output head left out."""
    return tuple(
        _linear(path.rpartition(".")[2], module)
        for path, module in model.named_modules()
        if _is_linear(module) and module is not head and not path.startswith(f"{blocks}.")
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
