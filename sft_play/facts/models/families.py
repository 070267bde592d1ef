"""The decoder families of transformers: which modules a block of each model type has, and where their sizes come from.

Read from modeling_*.py of transformers 5.23; a test builds every type on the meta device and compares module by
module. A value that is a string names the field of config.json that decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sft_play.facts.models.model_shape import LayerKind, NormKind

# A fixed answer, or the name of the true-or-false field that gives it.
FlagSource = bool | str

# Which blocks see a window where config.json has no `layer_types`: none; all (if there is a window); those from
# `max_window_layers` on; all but every nth; by `sliding_window_pattern`; those without rotary positions.
WindowRule = Literal["none", "all", "late", "every_2", "every_4", "every_6", "pattern", "no_rope"]


@dataclass(frozen=True)
class ExpertFields:
    """A mixture of experts instead of the MLP; its router is a weight outside any linear layer."""

    count_field: str = "num_local_experts"
    width_field: str = "moe_intermediate_size"
    has_router_bias: bool = False
    """The router has one number per expert."""
    has_expert_bias: bool = False
    has_clamped_gate: bool = False
    routes_in_fp32: bool = False
    """The router's weights are fp32 under autocast too."""
    shared_count_field: str | None = None
    """The field with the number of shared experts, which every token passes (`mlp.shared_experts`); None: none."""
    block_rule: Literal["all", "after_dense", "sparse_step"] = "all"
    """Which blocks have experts: all; those from `first_k_dense_replace` on; by `decoder_sparse_step` and
    `mlp_only_layers`."""


_SPLIT_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_FUSED_MLP = ("mlp.gate_up_proj", "mlp.down_proj")
# Paths of the tensors that hold all experts' gates and up projections, and their down projections.
EXPERT_WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class ModelFamily:
    """The blocks of one model type: attention, then a gated MLP or experts, each behind a norm. The defaults are
    Llama's without its biases."""

    qkv: tuple[str, ...] = _SPLIT_QKV
    """Paths of the query, key and value projections: three, or one that holds all."""
    mlp: tuple[str, ...] = _GATED_MLP
    """Gate, up, down; or gate with up in one, and down."""
    qkv_bias: FlagSource = False
    out_bias: FlagSource = False
    mlp_bias: FlagSource = False
    norm: NormKind = "rms"
    norms_per_block: int = 2
    qk_norm: FlagSource = False
    qk_norm_size: Literal["head", "width"] = "head"
    """head: one weight for all heads; width: as many as the heads are wide together."""
    window_rule: WindowRule = "none"
    has_sinks: bool = False
    experts: ExpertFields | None = None

    @property
    def has_fused_gate(self) -> bool:
        """Gate and up projection are one linear layer."""
        return len(self.mlp) == 2


_LLAMA = ModelFamily(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_BIASED = ModelFamily(qkv_bias="attention_bias", out_bias="attention_bias")
_GLM = ModelFamily(qkv_bias="attention_bias", mlp=_FUSED_MLP)
_WIDE_NORMS = replace(_BIASED, qk_norm=True, qk_norm_size="width")
_AFTER_DENSE = ExpertFields("n_routed_experts", shared_count_field="n_shared_experts", block_rule="after_dense")

# Model types whose blocks transformers' tensor-parallel plan splits completely, by heads and MLP columns
# (`base_model_tp_plan` of configuration_*.py); a test splits one of each and compares its gradients.
TENSOR_PARALLEL_TYPES = frozenset({
    "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral", "ministral3", "mistral",
    "qwen2", "qwen3", "smollm3",
})  # fmt: skip

# Model types whose adapters PEFT moves to the routed experts where they are named as below: on the experts of
# transformers before 5.0, as it believes (peft/utils/transformers_weight_conversion.py, `_convert_peft_config_moe`),
# and so away from shared experts and dense blocks of the same names; a test compares the list with PEFT's.
PEFT_MOVED_TYPES = frozenset({
    "UnlimitedOcrTextModel", "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "Dots3NoteTextModel", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe",
    "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open",
})  # fmt: skip
PEFT_MOVED_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
PEFT_MOVED_REASON = "PEFT would put its adapter on this model's routed experts, which get none here"


def no_adapter_reason(model_type: str, name: str) -> str | None:
    """Why linear layers of this name get no adapter; None where they take one, as far as is known without a trial."""
    # a language model's adapter is opened on its whole class, too: that of glm4v_moe_text on glm4v_moe
    if {model_type, model_type.removesuffix("_text")} & PEFT_MOVED_TYPES and name in PEFT_MOVED_NAMES:
        return PEFT_MOVED_REASON
    return None


def mark_adaptable(kind: LayerKind, model_type: str) -> LayerKind:
    """The same kind of block, its linear layers marked where an adapter would not stay."""
    linears = tuple(
        replace(linear, adaptable=no_adapter_reason(model_type, linear.name) is None) for linear in kind.linears
    )
    return replace(kind, linears=linears)


# Model type: its blocks. Those that people train most, which the estimate follows to within 1% of their trace, small
# models of gpt-oss in full 2% (benchmarks/closed_form.json, registry.json); any other class is planned by its own
# blocks, measured (`trace/block_meter`), which takes seconds and transformers.
MODEL_FAMILIES: dict[str, ModelFamily] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": replace(_LLAMA, window_rule="no_rope"),
    "ernie4_5": ModelFamily(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "hunyuan_v1_dense": replace(_BIASED, qk_norm=True),
    "mistral": ModelFamily(window_rule="all"),
    "ministral": ModelFamily(window_rule="all"),
    "ministral3": ModelFamily(window_rule="all"),
    "qwen2": ModelFamily(qkv_bias=True, window_rule="late"),
    "qwen3": replace(_BIASED, qk_norm=True, window_rule="late"),
    "gemma": replace(_BIASED, norm="gemma"),
    "gemma2": replace(_BIASED, norm="gemma", norms_per_block=4, window_rule="every_2"),
    "gemma3_text": replace(_BIASED, norm="gemma", norms_per_block=4, qk_norm=True, window_rule="every_6"),
    "phi3": ModelFamily(qkv=("self_attn.qkv_proj",), mlp=_FUSED_MLP, window_rule="all"),
    "olmo2": _WIDE_NORMS,
    "olmo3": replace(_WIDE_NORMS, window_rule="every_4"),
    "glm": _GLM,
    "glm4": replace(_GLM, norms_per_block=4),
    "exaone4": ModelFamily(qk_norm=True, window_rule="pattern"),
    "mixtral": ModelFamily(
        window_rule="all", experts=ExpertFields(width_field="intermediate_size", routes_in_fp32=True)
    ),
    "qwen3_moe": replace(_BIASED, qk_norm=True, window_rule="all", experts=ExpertFields(block_rule="sparse_step")),
    "olmoe": replace(_WIDE_NORMS, experts=ExpertFields("num_experts", "intermediate_size")),
    "gpt_oss": replace(
        _BIASED, norm="gemma", window_rule="every_2", has_sinks=True,
        experts=ExpertFields(
            width_field="intermediate_size", has_router_bias=True, has_expert_bias=True, has_clamped_gate=True
        ),
    ),
    "glm4_moe": ModelFamily(qkv_bias="attention_bias", qk_norm="use_qk_norm", experts=_AFTER_DENSE),
}  # fmt: skip

# Image-text model type: its language model's type, where `text_config` does not give it.
WRAPPED_TYPES: dict[str, str] = {
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
}

# Model types that are not decoders, and what they are.
NON_DECODER_TYPES: dict[str, str] = {
    kind: description
    for description, kinds in json.loads(
        Path(__file__).with_name("other_kinds.json").read_text(encoding="utf-8")
    ).items()
    for kind in kinds.split()
}
