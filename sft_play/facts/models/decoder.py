"""From a config.json to a decoder's shape: its blocks by kind, as its model type's class lays them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sft_play.errors import ModelError
from sft_play.facts.models.config_fields import (
    ACTIVATION,
    CLASS_DEFAULTS,
    Fields,
    UnknownArchitecture,
    quantisation_of,
    refuse_other_models,
)
from sft_play.facts.models.families import FAMILIES, Experts, Family, marked
from sft_play.facts.models.model_shape import AttentionKind, LayerKind, Linear, Mla, ModelShape, Stacked
from sft_play.log import one_line

_RESIDUAL_DROPOUT = (
    "resid_pdrop",
    "residual_dropout",
    "resid_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
)
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_EMBEDDING_DROPOUT = ("embd_pdrop", "embedding_dropout", "embed_dropout", "emb_pdrop")
"""Model types' names for dropout in training."""
_KINDS: dict[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}


def parse_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shapes that a config.json describes; the language model's, where it wraps one.

    Raises:
        UnknownArchitecture: its model type is not in the table, or it has a part that the table does not describe.
        ModelError: it is not the config.json of a decoder, or a size is missing or impossible.
    """
    refuse_other_models(config, name=name)
    fields = Fields.of_language_model(config, name)
    family = FAMILIES[fields.kind]
    # the rest of a class's code that fields alone do not describe
    if fields.kind in _SPECIAL:
        family, fields = _SPECIAL[fields.kind](family, fields)
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    dtypes = [part.get("dtype") or part.get("torch_dtype") for part in parts]  # torch_dtype: before transformers 5
    stored = next((dtype.removeprefix("torch.") for dtype in dtypes if isinstance(dtype, str)), None)
    stored = quantisation_of(config)[0] or stored
    return replace(_Builder(family, fields).shape(), stored_dtype=stored)


def _falcon(family: Family, fields: Fields) -> tuple[Family, Fields]:
    heads = fields.need("num_attention_heads")
    # 40B and 180B are of the new architecture; in the old one, of 7B, multi_query means a single key head
    if fields.flag("new_decoder_architecture"):
        keys, norms = fields.count("num_key_value_heads") or heads, fields.count("num_ln_in_parallel_attn") or 2
    else:
        keys, norms = 1 if fields.flag("multi_query") else heads, 1 if fields.flag("parallel_attn") else 2
    parallel = fields.flag("new_decoder_architecture") or fields.flag("parallel_attn")
    family = replace(family, norms=norms, parallel=parallel, rotary=not fields.flag("alibi"))
    return family, fields.changed(num_key_value_heads=keys)


def _opt(family: Family, fields: Fields) -> tuple[Family, Fields]:
    biased, norms = fields.flag("enable_bias"), fields.flag("layer_norm_elementwise_affine")
    # OPT-350M norms after its blocks, and so has no last norm
    last = fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm")
    family = replace(
        family, qkv_bias=biased, out_bias=biased, mlp_bias=biased, last_norm=last, norm="layer" if norms else "none",
        width="ffn_dim",
    )  # fmt: skip
    return family, fields


def _gpt_bigcode(family: Family, fields: Fields) -> tuple[Family, Fields]:
    keys = 1 if fields.flag("multi_query") else fields.need("num_attention_heads")
    return replace(family, grouped=True), fields.changed(num_key_value_heads=keys)


def _bloom(family: Family, fields: Fields) -> tuple[Family, Fields]:
    hidden = fields.values.get("n_embed") or fields.values.get("hidden_size")
    fields = fields.changed(hidden_size=hidden)
    return family, fields.changed(intermediate_size=4 * fields.need("hidden_size"))


def _internlm3(family: Family, fields: Fields) -> tuple[Family, Fields]:
    given = fields.values
    return family, fields.changed(
        attention_bias=given.get("qkv_bias", given.get("attention_bias")),
        mlp_bias=given.get("bias", given.get("mlp_bias")),
    )


_SPECIAL: dict[str, Callable[[Family, Fields], tuple[Family, Fields]]] = {
    "falcon": _falcon,
    "opt": _opt,
    "gpt_bigcode": _gpt_bigcode,
    # the class uses four times the width, whatever `expansion_ratio` says
    "mpt": lambda family, fields: (family, fields.changed(intermediate_size=4 * fields.need("hidden_size"))),
    "bloom": _bloom,
    "internlm3": _internlm3,
    "stablelm": lambda family, fields: (
        replace(family, norms=1 if fields.flag("use_parallel_residual") else 2),
        fields,
    ),
}


class _Builder:
    """Lays out the blocks of one decoder."""

    def __init__(self, family: Family, fields: Fields) -> None:
        self.family, self.fields = family, fields
        self.hidden = fields.need("hidden_size")
        self.num_layers = fields.need("num_hidden_layers")
        self.heads = fields.need("num_attention_heads")
        self.mla = None
        if family.mla:
            self.mla = Mla(
                q_rank=fields.count("q_lora_rank"),
                kv_rank=fields.need("kv_lora_rank"),
                nope_dim=fields.need("qk_nope_head_dim"),
                rope_dim=fields.need("qk_rope_head_dim"),
                value_dim=fields.need("v_head_dim"),
            )
        self.kv_heads = self._kv_heads()
        self.head_dim = self._head_dim()

    def shape(self) -> ModelShape:
        """The whole model."""
        family, fields = self.family, self.fields
        blocks = [(self._kind(index), self._has_experts(index)) for index in range(self.num_layers)]
        kinds = list(dict.fromkeys(blocks))
        layers = tuple(marked(self._block(*kind, count=blocks.count(kind)), fields.kind) for kind in kinds)
        common = max(layers, key=lambda kind: kind.count)
        # config.json may have a window that no block uses (Qwen2: use_sliding_window)
        slides = any(kind.attention in ("sliding", "chunked") for kind in layers)
        width = (fields.count("word_embed_proj_dim") or 0) if fields.kind == "opt" else 0
        narrow = width if width != self.hidden else 0  # OPT-350M's embedding is narrower than its blocks
        projections = (Linear("project_out", self.hidden, narrow), Linear("project_in", narrow, self.hidden))
        positions = fields.count("max_position_embeddings")
        rows = 0 if family.position_offset is None else (positions or 0) + family.position_offset
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
            max_positions=positions,
            layers=layers,
            layer_order=tuple(kinds.index(block) for block in blocks),
            window=fields.count(family.window_field) if slides else None,
            num_experts=common.num_experts,
            experts_per_token=(fields.count("num_experts_per_tok") or 0) if common.num_experts else 0,
            clamped_gate=family.experts is not None and family.experts.clamped,
            routes_in_fp32=family.experts is not None and family.experts.fp32_weights,
            own_experts=family.experts is not None and family.experts.own_code,
            activation=str(fields.values.get(self._own(ACTIVATION)) or "gelu"),
            head_bias=fields.flag(family.head_bias),
            norm=family.norm,
            norms_per_layer=family.norms,
            norm_bias=family.norm_bias,
            qk_norm=fields.flag(family.qk_norm),
            fused_qkv=len(family.qkv) == 1,
            fused_gate_up=family.fused_gate,
            position_rows=rows,
            alibi=fields.flag(family.alibi),
            rotary_dim=self._rotary_dim(),
            sinks=family.sinks,
            has_fused_attention=family.sdpa,
            attention_softcap=fields.real("attn_logit_softcapping"),
            parallel_blocks=fields.flag(family.parallel),
            dropout=fields.share(self._own(_RESIDUAL_DROPOUT)),
            attention_dropout=fields.share(self._own(_ATTENTION_DROPOUT)),
            embedding_dropout=fields.share(self._own(_EMBEDDING_DROPOUT)),
            mla=self.mla,
            embedding_width=narrow,
            outer_linears=projections if narrow else (),
            outer_params=(int(family.last_norm) + int(family.embedding_norm)) * self._norm(),
        )

    def _kv_heads(self) -> int:
        if not self.family.grouped or self.mla is not None:
            return self.heads
        kv_heads = self.fields.count("num_key_value_heads") or self.heads
        if self.heads % kv_heads:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has num_attention_heads: {self.heads} and "
                f"num_key_value_heads: {kv_heads}; the first must be a multiple of the second"
            )
        return kv_heads

    def _head_dim(self) -> int:
        if self.mla is not None:
            return self.mla.nope_dim + self.mla.rope_dim
        # some classes ignore the field, and always divide
        own = self.fields.count("head_dim") if self.family.own_head_dim else None
        if own is None and self.hidden % self.heads:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has hidden_size: {self.hidden} and "
                f"num_attention_heads: {self.heads}; the first must be a multiple of the second where there is no "
                "head_dim"
            )
        return own or self.hidden // self.heads

    def _own(self, names: tuple[str, ...]) -> str:
        """Of several names of a field the one that the model's class reads; empty if it reads none."""
        return next((name for name in names if name in CLASS_DEFAULTS[self.fields.kind]), "")

    def _rotary_dim(self) -> int:
        if not self.family.rotary:
            return 0
        if self.mla is not None:
            return self.mla.rope_dim
        fixed = self.fields.count("rotary_dim")  # GPT-J: elements; the others give a share of the head
        rope = self.fields.values.get("rope_parameters")
        share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        for key in ("rotary_pct", "partial_rotary_factor"):
            share = self.fields.real(key) if share is None else share
        part = int(self.head_dim * share) if isinstance(share, int | float) else self.head_dim
        return min(fixed or part, self.head_dim)

    def _norm(self) -> int:
        if self.family.norm == "none":
            return 0
        return self.hidden * (2 if self.family.norm_bias else 1)

    def _block(self, attention: AttentionKind, has_experts: bool, *, count: int) -> LayerKind:
        family, experts = self.family, self.family.experts
        norms = family.norms * self._norm() + self._qk_norms()
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
        width = self._mlp_width()
        linears = plain.linears + self._mlp(family.mlp, width, bias=self.fields.flag(family.mlp_bias))
        return replace(plain, linears=linears, mlp_width=width)

    def _mlp_width(self) -> int:
        key = self.family.dense_width or self.family.width
        is_open = self.fields.values.get(key) is None and CLASS_DEFAULTS[self.fields.kind].get(key) is None
        if is_open and key in ("n_inner", "ffn_hidden_size", "intermediate_size"):
            given = self.fields.count("intermediate_size")
            return given if given and self.family.width == "intermediate_size" else 4 * self.hidden
        return self.fields.need(key)

    def _attention(self) -> tuple[Linear, ...]:
        family, bias = self.family, self.fields.flag(self.family.qkv_bias)
        if self.mla is not None:
            return self._latent_attention(self.mla, bias)
        # q is not always the hidden width: Gemma's and Qwen3's heads are wider together
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = Linear(family.out, q, self.hidden, self.fields.flag(family.out_bias))
        if len(family.qkv) == 1:
            return (Linear(family.qkv[0], self.hidden, q + 2 * kv, bias), out)
        widths = zip(family.qkv, (q, kv, kv), strict=True)
        return (*(Linear(path, self.hidden, width, bias) for path, width in widths), out)

    def _latent_attention(self, mla: Mla, bias: bool) -> tuple[Linear, ...]:
        """DeepSeek's: queries, keys and values through narrow projections, with norms between."""
        q, at = self.heads * (mla.nope_dim + mla.rope_dim), "self_attn."
        if mla.q_rank is None:
            queries: tuple[Linear, ...] = (Linear(f"{at}q_proj", self.hidden, q),)
        else:
            queries = (Linear(f"{at}q_a_proj", self.hidden, mla.q_rank, bias), Linear(f"{at}q_b_proj", mla.q_rank, q))
        return (
            *queries,
            Linear(f"{at}kv_a_proj_with_mqa", self.hidden, mla.kv_rank + mla.rope_dim, bias),
            Linear(f"{at}kv_b_proj", mla.kv_rank, self.heads * (mla.nope_dim + mla.value_dim)),
            Linear(f"{at}o_proj", self.heads * mla.value_dim, self.hidden, bias),
        )

    def _mlp(self, paths: tuple[str, ...], width: int, *, bias: bool) -> tuple[Linear, ...]:
        wide = 2 * width if self.family.fused_gate else width
        into = tuple(Linear(path, self.hidden, wide, bias) for path in paths[:-1])
        return (*into, Linear(paths[-1], width, self.hidden, bias))

    def _qk_norms(self) -> int:
        if self.mla is not None:  # norms of the compressed keys and queries
            return self.mla.kv_rank + (self.mla.q_rank or 0)
        if not self.fields.flag(self.family.qk_norm):
            return 0
        both = 2 * self.head_dim
        if self.family.qk_norm_size == "width":
            both = (self.heads + self.kv_heads) * self.head_dim
        return both * (2 if self.family.qk_norm_bias else 1)

    def _with_experts(self, plain: LayerKind, experts: Experts) -> LayerKind:
        number, width = self.fields.need(experts.count), self.fields.need(experts.width)
        shared = 0
        if experts.shared is not None:
            shared = (self.fields.count(experts.shared_width) or 0) if experts.shared_width else width
            shared *= self.fields.need(experts.shared_count) if experts.shared_count else 1
        linears = plain.linears
        router = number * self.hidden
        if experts.router == "linear":
            linears += (Linear(experts.router_path, self.hidden, number),)
            router = 0
        router += number if experts.router_extra != "none" else 0
        if shared and experts.shared is not None:
            linears += self._shared_mlp(experts, experts.shared, shared)
        into, back = experts.weights
        biases = 2 * width + self.hidden if experts.expert_bias else 0  # of gate and up, and of down
        return replace(
            plain,
            linears=linears,
            num_experts=number,
            expert_width=width,
            expert_params=number * (3 * self.hidden * width + biases),
            stacked=(Stacked(into, number, self.hidden, 2 * width), Stacked(back, number, width, self.hidden)),
            shared_width=shared,
            router_params=router,
        )

    def _shared_mlp(self, experts: Experts, path: str, width: int) -> tuple[Linear, ...]:
        bias = self.fields.flag(self.family.mlp_bias)
        if experts.shared_fused:
            into = Linear(f"{path}.input_linear", self.hidden, 2 * width)
            return (into, Linear(f"{path}.output_linear", width, self.hidden))
        gate = (Linear(f"{path}_gate", self.hidden, 1),) if experts.shared_gate else ()
        names = tuple(f"{path}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        return (*self._mlp(names, width, bias=bias), *gate)

    def _has_experts(self, index: int) -> bool:
        fields, experts = self.fields, self.family.experts
        if experts is None:
            return False
        if experts.where == "after_dense":
            return index >= (fields.count("first_k_dense_replace") or 0)
        if experts.where == "sparse_step":
            plain = fields.values.get("mlp_only_layers") or ()
            return index not in plain and (index + 1) % fields.need("decoder_sparse_step") == 0
        if experts.where == "interleaved":
            step, named = fields.need("interleave_moe_layer_step"), fields.values.get("moe_layers")
            return index in named if isinstance(named, list) else (index + 1) % step == 0
        if experts.where == "range":
            first, last = fields.index("moe_layer_start_index"), fields.index("moe_layer_end_index")
            last = self.num_layers - 1 if last == -1 else last
            return first <= index <= last and (index + 1) % fields.need("moe_layer_interval") == 0
        return True

    def _kind(self, index: int) -> AttentionKind:
        fields, rule = self.fields, self.family.window
        if rule == "none":
            return "full"
        # transformers 5 writes layer_types; older files only have the window, and the class's own rule applies
        named = fields.values.get("layer_types")
        if isinstance(named, list) and rule != "all":
            return self._named_kind(named, index)
        if rule == "chunked":
            return "chunked" if self._is_rotated(index) and fields.count("attention_chunk_size") else "full"
        return "sliding" if fields.count("sliding_window") and self._slides(rule, index) else "full"

    def _slides(self, rule: str, index: int) -> bool:
        """Whether a block slides where config.json has a window and no `layer_types`."""
        fields = self.fields
        if "use_sliding_window" in fields.values and not fields.flag("use_sliding_window"):
            return False
        if rule == "late":
            return index >= (fields.count("max_window_layers") or 0)
        if rule == "early_odd":
            return index % 2 == 0 and index < (fields.count("max_window_layers") or 0)
        if rule == "first_of_4":
            return index % 4 != 0
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
        return kind if kind == "full" or self.fields.count(self.family.window_field) else "full"
