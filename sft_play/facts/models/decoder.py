"""From a config.json to a decoder's shape: its blocks by kind, as its model type's class lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft_play.errors import ModelError
from sft_play.facts.models.config_fields import (
    ACTIVATION,
    Fields,
    UnknownArchitecture,
    quantisation_of,
    refuse_other_models,
)
from sft_play.facts.models.families import EXPERT_WEIGHTS, FAMILIES, Experts, Family, marked
from sft_play.facts.models.model_shape import AttentionKind, LayerKind, Linear, ModelShape, Stacked
from sft_play.log import one_line

# Activations that transformers computes step by step in Python, with a tensor per step (activations.py).
STEPWISE_ACTIVATIONS = frozenset({"gelu_new", "gelu_fast", "gelu_python", "gelu_accurate"})
# Dropout of what blocks add up, whose masks the estimate does not count.
_DROPOUTS = ("resid_pdrop", "embd_pdrop")
_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
}


def parse_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shapes that a config.json describes, or wraps. Raises UnknownArchitecture for a type or part that the table
    does not describe, ModelError where it is no decoder's, or a size is missing or impossible."""
    refuse_other_models(config, name=name)
    fields = Fields.of_language_model(config, name)
    family = FAMILIES[fields.kind]
    unusual = next((key for key in _DROPOUTS if fields.share(key)), None)
    unusual = unusual or next((key for key in ACTIVATION if str(fields.values.get(key)) in STEPWISE_ACTIVATIONS), None)
    if unusual is not None:
        raise UnknownArchitecture(
            f"model {one_line(name)}: config.json has {unusual}: {one_line(str(fields.values[unusual]))}, which the "
            "plan does not know without transformers"
        )
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    dtypes = [part.get("dtype") or part.get("torch_dtype") for part in parts]  # torch_dtype: before transformers 5
    stored = next((dtype.removeprefix("torch.") for dtype in dtypes if isinstance(dtype, str)), None)
    stored = quantisation_of(config)[0] or stored
    return replace(_Builder(family, fields).shape(), stored_dtype=stored)


class _Builder:
    def __init__(self, family: Family, fields: Fields) -> None:
        self.family, self.fields = family, fields
        self.hidden = fields.need("hidden_size")
        self.num_layers = fields.need("num_hidden_layers")
        self.heads = fields.need("num_attention_heads")
        self.kv_heads = fields.count("num_key_value_heads") or self.heads
        self._require_multiple("num_attention_heads", self.heads, "num_key_value_heads", self.kv_heads)
        self.head_dim = self._head_dim()

    def shape(self) -> ModelShape:
        """The whole model."""
        family, fields = self.family, self.fields
        blocks = [(self._kind(index), self._has_experts(index)) for index in range(self.num_layers)]
        kinds = list(dict.fromkeys(blocks))
        layers = tuple(marked(self._block(*kind, count=blocks.count(kind)), fields.kind) for kind in kinds)
        common = max(layers, key=lambda kind: kind.count)
        # config.json may have a window that no block uses (Qwen2: use_sliding_window)
        slides = any(kind.attention == "sliding" for kind in layers)
        return ModelShape(
            name=fields.name,
            model_type=fields.kind,
            hidden_size=self.hidden,
            intermediate_size=common.expert_width or common.mlp_width,
            num_layers=self.num_layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=fields.need("vocab_size"),
            tied=fields.flag("tie_word_embeddings"),
            max_positions=fields.count("max_position_embeddings"),
            layers=layers,
            layer_order=tuple(kinds.index(block) for block in blocks),
            window=fields.count("sliding_window") if slides else None,
            num_experts=common.num_experts,
            experts_per_token=(fields.count("num_experts_per_tok") or 0) if common.num_experts else 0,
            clamped_gate=family.experts is not None and family.experts.clamped,
            routes_in_fp32=family.experts is not None and family.experts.fp32_weights,
            norm=family.norm,
            norms_per_layer=family.norms,
            qk_norm=fields.flag(family.qk_norm),
            fused_qkv=len(family.qkv) == 1,
            rotary_dim=self._rotary_dim(),
            sinks=family.sinks,
            attention_softcap=fields.real("attn_logit_softcapping"),
            caps_logits=fields.real("final_logit_softcapping") is not None,
            attention_dropout=fields.share("attention_dropout"),
            outer_params=self.hidden,  # the last norm
        )

    def _require_multiple(self, name: str, number: int, other: str, unit: int) -> None:
        if number % unit:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has {name}: {number} and {other}: {unit}; the first "
                "must be a multiple of the second"
            )

    def _head_dim(self) -> int:
        own = self.fields.count("head_dim")
        if own is None:
            self._require_multiple("hidden_size", self.hidden, "num_attention_heads", self.heads)
        return own or self.hidden // self.heads

    def _rotary_dim(self) -> int:
        rope = self.fields.values.get("rope_parameters")
        share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        share = self.fields.real("partial_rotary_factor") if share is None else share
        part = int(self.head_dim * share) if isinstance(share, int | float) else self.head_dim
        return min(part, self.head_dim)

    def _block(self, attention: AttentionKind, has_experts: bool, *, count: int) -> LayerKind:
        family, experts = self.family, self.family.experts
        norms = family.norms * self.hidden + self._qk_norms()
        sinks = self.heads if family.sinks else 0
        plain = LayerKind(
            count=count,
            linears=self._attention(),
            attention=attention,
            norm_params=norms,
            other_params=sinks,
        )
        if experts is not None and has_experts:
            return self._with_experts(plain, experts)
        width = self.fields.need("intermediate_size")
        linears = plain.linears + self._mlp(family.mlp, width, bias=self.fields.flag(family.mlp_bias))
        return replace(plain, linears=linears, mlp_width=width)

    def _attention(self) -> tuple[Linear, ...]:
        family, bias = self.family, self.fields.flag(self.family.qkv_bias)
        # q is not always the hidden width: Gemma's and Qwen3's heads are wider together
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = Linear("self_attn.o_proj", q, self.hidden, self.fields.flag(family.out_bias))
        if len(family.qkv) == 1:
            return (Linear(family.qkv[0], self.hidden, q + 2 * kv, bias), out)
        widths = zip(family.qkv, (q, kv, kv), strict=True)
        return (*(Linear(path, self.hidden, width, bias) for path, width in widths), out)

    def _mlp(self, paths: tuple[str, ...], width: int, *, bias: bool) -> tuple[Linear, ...]:
        wide = 2 * width if self.family.fused_gate else width
        into = tuple(Linear(path, self.hidden, wide, bias) for path in paths[:-1])
        return (*into, Linear(paths[-1], width, self.hidden, bias))

    def _qk_norms(self) -> int:
        if not self.fields.flag(self.family.qk_norm):
            return 0
        if self.family.qk_norm_size == "width":
            return (self.heads + self.kv_heads) * self.head_dim
        return 2 * self.head_dim

    def _with_experts(self, plain: LayerKind, experts: Experts) -> LayerKind:
        number, width = self.fields.need(experts.count), self.fields.need(experts.width)
        shared = width * self.fields.need(experts.shared) if experts.shared else 0
        linears = plain.linears
        if shared:
            paths = tuple(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
            linears += self._mlp(paths, shared, bias=False)
        into, back = EXPERT_WEIGHTS
        biases = 2 * width + self.hidden if experts.expert_bias else 0  # of gate and up, and of down
        return replace(
            plain,
            linears=linears,
            num_experts=number,
            expert_width=width,
            expert_params=number * (3 * self.hidden * width + biases),
            stacked=(Stacked(into, number, self.hidden, 2 * width), Stacked(back, number, width, self.hidden)),
            shared_width=shared,
            router_params=number * (self.hidden + int(experts.router_bias)),
        )

    def _has_experts(self, index: int) -> bool:
        fields, experts = self.fields, self.family.experts
        if experts is None:
            return False
        if experts.where == "after_dense":
            return index >= (fields.count("first_k_dense_replace") or 0)
        if experts.where == "sparse_step":
            plain = fields.values.get("mlp_only_layers") or ()
            return index not in plain and (index + 1) % fields.need("decoder_sparse_step") == 0
        return True

    def _kind(self, index: int) -> AttentionKind:
        fields, rule = self.fields, self.family.window
        if rule == "none":
            return "full"
        # transformers 5 writes layer_types; older files only have the window, and the class's own rule applies
        named = fields.values.get("layer_types")
        if isinstance(named, list) and rule != "all":
            return self._named_kind(named, index)
        return "sliding" if fields.count("sliding_window") and self._slides(rule, index) else "full"

    def _slides(self, rule: str, index: int) -> bool:
        fields = self.fields
        if "use_sliding_window" in fields.values and not fields.flag("use_sliding_window"):
            return False
        if rule == "late":
            return index >= (fields.count("max_window_layers") or 0)
        if rule == "no_rope":
            return not self._is_rotated(index)
        if rule == "pattern" or (rule.startswith("every_") and "sliding_window_pattern" in fields.values):
            return (index + 1) % fields.need("sliding_window_pattern") != 0
        return rule == "all" or (index + 1) % int(rule.removeprefix("every_")) != 0

    def _is_rotated(self, index: int) -> bool:
        """Whether a block has rotary positions: every fourth has none (`no_rope_layers` has 1 where there are)."""
        named = self.fields.values.get("no_rope_layers")
        if isinstance(named, list) and index < len(named):
            return bool(named[index])
        return (index + 1) % (self.fields.count("no_rope_layer_interval") or 4) != 0

    def _named_kind(self, named: list[object], index: int) -> AttentionKind:
        if len(named) != self.num_layers:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has {len(named)} layer_types and "
                f"num_hidden_layers: {self.num_layers}"
            )
        kind = _KINDS.get(str(named[index]))
        if kind is None:
            raise UnknownArchitecture(
                f"model {one_line(self.fields.name)}: config.json has a block of type {one_line(str(named[index]))}, "
                "which the plan does not know without transformers"
            )
        return kind if kind == "full" or self.fields.count("sliding_window") else "full"
