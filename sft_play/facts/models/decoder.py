"""From a config.json to a decoder's shape: its blocks by kind, as its model type's class lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft_play.errors import ModelError
from sft_play.facts.models.config_fields import (
    ACTIVATION_FIELDS,
    ConfigFields,
    UnknownArchitecture,
    dequantisable_method,
    require_causal_lm_config,
)
from sft_play.facts.models.families import EXPERT_WEIGHTS, MODEL_FAMILIES, ExpertFields, ModelFamily, mark_adaptable
from sft_play.facts.models.model_shape import AttentionKind, LayerKind, LinearShape, ModelShape, StackedExpertWeight
from sft_play.log import one_line

# Activations that transformers computes step by step in Python, with a tensor per step (activations.py).
STEPWISE_ACTIVATIONS = frozenset({"gelu_new", "gelu_fast", "gelu_python", "gelu_accurate"})
# Dropout of what blocks add up, whose masks the estimate does not count.
_RESIDUAL_DROPOUT_FIELDS = ("resid_pdrop", "embd_pdrop")
_ATTENTION_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
}


def parse_model_shape(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shapes that a config.json describes, or wraps. Raises UnknownArchitecture for a type or part that the table
    does not describe, ModelError where it is no decoder's, or a size is missing or impossible."""
    require_causal_lm_config(config, name=name)
    fields = ConfigFields.from_config(config, name)
    family = MODEL_FAMILIES[fields.model_type]
    unsupported_field = next((key for key in _RESIDUAL_DROPOUT_FIELDS if fields.read_fraction(key)), None)
    unsupported_field = unsupported_field or next(
        (key for key in ACTIVATION_FIELDS if str(fields.values.get(key)) in STEPWISE_ACTIVATIONS), None
    )
    if unsupported_field is not None:
        raise UnknownArchitecture(
            f"model {one_line(name)}: config.json has {unsupported_field}: "
            f"{one_line(str(fields.values[unsupported_field]))}, which the plan does not know without transformers"
        )
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    dtypes = [part.get("dtype") or part.get("torch_dtype") for part in parts]  # torch_dtype: before transformers 5
    stored_dtype = next((dtype.removeprefix("torch.") for dtype in dtypes if isinstance(dtype, str)), None)
    stored_dtype = dequantisable_method(config)[0] or stored_dtype
    return replace(_ShapeBuilder(family, fields).build(), stored_dtype=stored_dtype)


class _ShapeBuilder:
    def __init__(self, family: ModelFamily, fields: ConfigFields) -> None:
        self.family, self.fields = family, fields
        self.hidden = fields.require_count("hidden_size")
        self.num_layers = fields.require_count("num_hidden_layers")
        self.heads = fields.require_count("num_attention_heads")
        self.kv_heads = fields.read_optional_count("num_key_value_heads") or self.heads
        self._require_multiple("num_attention_heads", self.heads, "num_key_value_heads", self.kv_heads)
        self.head_dim = self._read_head_dim()

    def build(self) -> ModelShape:
        """The whole model."""
        family, fields = self.family, self.fields
        blocks = [(self._attention_kind(index), self._has_experts(index)) for index in range(self.num_layers)]
        kinds = list(dict.fromkeys(blocks))
        layers = tuple(
            mark_adaptable(self._build_block(*kind, count=blocks.count(kind)), fields.model_type) for kind in kinds
        )
        commonest = max(layers, key=lambda kind: kind.count)
        # config.json may have a window that no block uses (Qwen2: use_sliding_window)
        has_sliding_blocks = any(kind.attention == "sliding" for kind in layers)
        return ModelShape(
            name=fields.name,
            model_type=fields.model_type,
            hidden_size=self.hidden,
            intermediate_size=commonest.expert_width or commonest.mlp_width,
            num_layers=self.num_layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=fields.require_count("vocab_size"),
            tied=fields.read_flag("tie_word_embeddings"),
            max_positions=fields.read_optional_count("max_position_embeddings"),
            layers=layers,
            layer_order=tuple(kinds.index(block) for block in blocks),
            window=fields.read_optional_count("sliding_window") if has_sliding_blocks else None,
            num_experts=commonest.num_experts,
            experts_per_token=(fields.read_optional_count("num_experts_per_tok") or 0) if commonest.num_experts else 0,
            has_clamped_gate=family.experts is not None and family.experts.has_clamped_gate,
            routes_in_fp32=family.experts is not None and family.experts.routes_in_fp32,
            norm=family.norm,
            norms_per_layer=family.norms_per_block,
            has_qk_norm=fields.read_flag(family.qk_norm),
            has_fused_qkv=len(family.qkv) == 1,
            rotary_dim=self._read_rotary_dim(),
            has_attention_sinks=family.has_sinks,
            attention_softcap=fields.read_optional_number("attn_logit_softcapping"),
            caps_logits=fields.read_optional_number("final_logit_softcapping") is not None,
            attention_dropout=fields.read_fraction("attention_dropout"),
            outer_params=self.hidden,  # the last norm
        )

    def _require_multiple(self, name: str, value: int, divisor_name: str, divisor: int) -> None:
        if value % divisor:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has {name}: {value} and {divisor_name}: {divisor}; "
                "the first must be a multiple of the second"
            )

    def _read_head_dim(self) -> int:
        head_dim = self.fields.read_optional_count("head_dim")
        if head_dim is None:
            self._require_multiple("hidden_size", self.hidden, "num_attention_heads", self.heads)
        return head_dim or self.hidden // self.heads

    def _read_rotary_dim(self) -> int:
        rope = self.fields.values.get("rope_parameters")
        fraction = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        fraction = self.fields.read_optional_number("partial_rotary_factor") if fraction is None else fraction
        rotary_dim = int(self.head_dim * fraction) if isinstance(fraction, int | float) else self.head_dim
        return min(rotary_dim, self.head_dim)

    def _build_block(self, attention: AttentionKind, has_experts: bool, *, count: int) -> LayerKind:
        family, experts = self.family, self.family.experts
        norms = family.norms_per_block * self.hidden + self._qk_norm_params()
        sinks = self.heads if family.has_sinks else 0
        kind = LayerKind(
            count=count,
            linears=self._attention_linears(),
            attention=attention,
            norm_params=norms,
            other_params=sinks,
        )
        if experts is not None and has_experts:
            return self._add_experts(kind, experts)
        width = self.fields.require_count("intermediate_size")
        linears = kind.linears + self._mlp_linears(family.mlp, width, bias=self.fields.read_flag(family.mlp_bias))
        return replace(kind, linears=linears, mlp_width=width)

    def _attention_linears(self) -> tuple[LinearShape, ...]:
        family, bias = self.family, self.fields.read_flag(self.family.qkv_bias)
        # q is not always the hidden width: Gemma's and Qwen3's heads are wider together
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = LinearShape("self_attn.o_proj", q, self.hidden, self.fields.read_flag(family.out_bias))
        if len(family.qkv) == 1:
            return (LinearShape(family.qkv[0], self.hidden, q + 2 * kv, bias), out)
        widths = zip(family.qkv, (q, kv, kv), strict=True)
        return (*(LinearShape(path, self.hidden, width, bias) for path, width in widths), out)

    def _mlp_linears(self, paths: tuple[str, ...], width: int, *, bias: bool) -> tuple[LinearShape, ...]:
        fused_width = 2 * width if self.family.has_fused_gate else width
        input_linears = tuple(LinearShape(path, self.hidden, fused_width, bias) for path in paths[:-1])
        return (*input_linears, LinearShape(paths[-1], width, self.hidden, bias))

    def _qk_norm_params(self) -> int:
        if not self.fields.read_flag(self.family.qk_norm):
            return 0
        if self.family.qk_norm_size == "width":
            return (self.heads + self.kv_heads) * self.head_dim
        return 2 * self.head_dim

    def _add_experts(self, kind: LayerKind, experts: ExpertFields) -> LayerKind:
        count, width = self.fields.require_count(experts.count_field), self.fields.require_count(experts.width_field)
        shared_width = (
            width * self.fields.require_count(experts.shared_count_field) if experts.shared_count_field else 0
        )
        linears = kind.linears
        if shared_width:
            paths = tuple(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
            linears += self._mlp_linears(paths, shared_width, bias=False)
        up_path, down_path = EXPERT_WEIGHTS
        biases = 2 * width + self.hidden if experts.has_expert_bias else 0  # of gate and up, and of down
        return replace(
            kind,
            linears=linears,
            num_experts=count,
            expert_width=width,
            expert_params=count * (3 * self.hidden * width + biases),
            expert_weights=(
                StackedExpertWeight(up_path, count, self.hidden, 2 * width),
                StackedExpertWeight(down_path, count, width, self.hidden),
            ),
            shared_width=shared_width,
            router_params=count * (self.hidden + int(experts.has_router_bias)),
        )

    def _has_experts(self, index: int) -> bool:
        fields, experts = self.fields, self.family.experts
        if experts is None:
            return False
        if experts.block_rule == "after_dense":
            return index >= (fields.read_optional_count("first_k_dense_replace") or 0)
        if experts.block_rule == "sparse_step":
            dense_layers = fields.values.get("mlp_only_layers") or ()
            return index not in dense_layers and (index + 1) % fields.require_count("decoder_sparse_step") == 0
        return True

    def _attention_kind(self, index: int) -> AttentionKind:
        fields, rule = self.fields, self.family.window_rule
        if rule == "none":
            return "full"
        # transformers 5 writes layer_types; older files only have the window, and the class's own rule applies
        layer_types = fields.values.get("layer_types")
        if isinstance(layer_types, list) and rule != "all":
            return self._layer_type_kind(layer_types, index)
        return (
            "sliding"
            if fields.read_optional_count("sliding_window") and self._uses_sliding_window(rule, index)
            else "full"
        )

    def _uses_sliding_window(self, rule: str, index: int) -> bool:
        fields = self.fields
        if "use_sliding_window" in fields.values and not fields.read_flag("use_sliding_window"):
            return False
        if rule == "late":
            return index >= (fields.read_optional_count("max_window_layers") or 0)
        if rule == "no_rope":
            return not self._has_rotary_positions(index)
        if rule == "pattern" or (rule.startswith("every_") and "sliding_window_pattern" in fields.values):
            return (index + 1) % fields.require_count("sliding_window_pattern") != 0
        return rule == "all" or (index + 1) % int(rule.removeprefix("every_")) != 0

    def _has_rotary_positions(self, index: int) -> bool:
        """Whether a block has rotary positions: every fourth has none (`no_rope_layers` has 1 where there are)."""
        rope_layers = self.fields.values.get("no_rope_layers")
        if isinstance(rope_layers, list) and index < len(rope_layers):
            return bool(rope_layers[index])
        return (index + 1) % (self.fields.read_optional_count("no_rope_layer_interval") or 4) != 0

    def _layer_type_kind(self, layer_types: list[object], index: int) -> AttentionKind:
        if len(layer_types) != self.num_layers:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has {len(layer_types)} layer_types and "
                f"num_hidden_layers: {self.num_layers}"
            )
        kind = _ATTENTION_KINDS.get(str(layer_types[index]))
        if kind is None:
            raise UnknownArchitecture(
                f"model {one_line(self.fields.name)}: config.json has a block of type "
                f"{one_line(str(layer_types[index]))}, which the plan does not know without transformers"
            )
        return kind if kind == "full" or self.fields.read_optional_count("sliding_window") else "full"
