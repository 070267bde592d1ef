"""The decoder families of transformers, and the fields of a config.json under uniform names."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.models.shape import NormKind

# The decoder families of transformers: which modules a block of each model type has, and where
# their sizes come from.
#
# Read from modeling_*.py of transformers 5.23; a test builds every type on the meta device and
# compares module by module. A value that is a string names the field of config.json that decides.

# A fixed answer, or the name of the true-or-false field that gives it.
FlagSource = bool | str


@dataclass(frozen=True)
class ExpertFields:
    """A mixture of experts instead of the MLP; its router is a weight outside any linear layer."""

    count_field: str = "num_local_experts"
    width_field: str = "moe_intermediate_size"
    # The router has one number per expert.
    has_router_bias: bool = False
    has_expert_bias: bool = False
    has_clamped_gate: bool = False
    # The router's weights are fp32 under autocast too.
    routes_in_fp32: bool = False
    # The field with the number of shared experts, which every token passes (`mlp.shared_experts`);
    # None: none.
    shared_count_field: str | None = None
    # Which blocks have experts: all; those from `first_k_dense_replace` on; by
    # `decoder_sparse_step` and `mlp_only_layers`.
    block_rule: Literal["all", "after_dense", "sparse_step"] = "all"


_FUSED_MLP = ("mlp.gate_up_proj", "mlp.down_proj")
# Paths of the tensors that hold all experts' gates and up projections, and their down projections.
EXPERT_WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class ModelFamily:
    """The blocks of one model type: attention, then a gated MLP or experts, each behind a norm. The
    defaults are Llama's without its biases."""

    # Paths of the query, key and value projections: three, or one that holds all.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    # Gate, up, down; or gate with up in one, and down.
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    qkv_bias: FlagSource = False
    out_bias: FlagSource = False
    mlp_bias: FlagSource = False
    norm: NormKind = "rms"
    norms_per_block: int = 2
    qk_norm: FlagSource = False
    # head: one weight for all heads; width: as many as the heads are wide together.
    qk_norm_size: Literal["head", "width"] = "head"
    # Which blocks see a window where config.json has no `layer_types`: none; all (if there is a
    # window); those from `max_window_layers` on; all but every nth; by `sliding_window_pattern`;
    # those without rotary positions.
    window_rule: Literal[
        "none", "all", "late", "every_2", "every_4", "every_6", "pattern", "no_rope"
    ] = "none"
    has_sinks: bool = False
    experts: ExpertFields | None = None


_LLAMA = ModelFamily(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_BIASED = ModelFamily(qkv_bias="attention_bias", out_bias="attention_bias")
_GLM = ModelFamily(qkv_bias="attention_bias", mlp=_FUSED_MLP)
_WIDE_NORMS = replace(_BIASED, qk_norm=True, qk_norm_size="width")

# Model types whose blocks transformers' tensor-parallel plan splits completely, by heads and MLP
# columns (`base_model_tp_plan` of configuration_*.py); a test splits one of each and compares its
# gradients.
TENSOR_PARALLEL_TYPES = frozenset({
    "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "llama", "ministral",
    "ministral3", "mistral", "qwen2", "qwen3", "smollm3",
})  # fmt: skip

# Model types whose adapters PEFT moves to the routed experts where they are named as below: on the
# experts of transformers before 5.0, as it believes (peft/utils/transformers_weight_conversion.py,
# `_convert_peft_config_moe`), and so away from shared experts and dense blocks of the same names; a
# test compares the list with PEFT's.
PEFT_MOVED_TYPES = frozenset({
    "UnlimitedOcrTextModel", "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "Dots3NoteTextModel", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash",
    "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open",
})  # fmt: skip
PEFT_MOVED_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def no_adapter_reason(model_type: str, name: str) -> str | None:
    """Why linear layers of this name get no adapter; None where they take one, as far as is known
    without a trial."""
    # a language model's adapter is opened on its whole class, too: that of glm4v_moe_text on
    # glm4v_moe
    if {
        model_type,
        model_type.removesuffix("_text"),
    } & PEFT_MOVED_TYPES and name in PEFT_MOVED_NAMES:
        return "PEFT would put its adapter on this model's routed experts, which get none here"
    return None


# Model type: its blocks. Those that people train most, which the estimate follows to within 1% of
# their trace, small models of gpt-oss in full 2% (benchmarks/closed_form.json, registry.json); any
# other class is planned by its own blocks, measured (`trace/confirm`), which takes seconds and
# transformers.
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
    "gemma3_text": replace(
        _BIASED, norm="gemma", norms_per_block=4, qk_norm=True, window_rule="every_6"
    ),
    "phi3": ModelFamily(qkv=("self_attn.qkv_proj",), mlp=_FUSED_MLP, window_rule="all"),
    "olmo2": _WIDE_NORMS,
    "olmo3": replace(_WIDE_NORMS, window_rule="every_4"),
    "glm": _GLM,
    "glm4": replace(_GLM, norms_per_block=4),
    "exaone4": ModelFamily(qk_norm=True, window_rule="pattern"),
    "mixtral": ModelFamily(
        window_rule="all",
        experts=ExpertFields(width_field="intermediate_size", routes_in_fp32=True),
    ),
    "qwen3_moe": replace(
        _BIASED, qk_norm=True, window_rule="all", experts=ExpertFields(block_rule="sparse_step")
    ),
    "olmoe": replace(_WIDE_NORMS, experts=ExpertFields("num_experts", "intermediate_size")),
    "gpt_oss": replace(
        _BIASED,
        norm="gemma",
        window_rule="every_2",
        has_sinks=True,
        experts=ExpertFields(
            width_field="intermediate_size",
            has_router_bias=True,
            has_expert_bias=True,
            has_clamped_gate=True,
        ),
    ),
    "glm4_moe": ModelFamily(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=ExpertFields(
            "n_routed_experts", shared_count_field="n_shared_experts", block_rule="after_dense"
        ),
    ),
}

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


# --------------------------------------------------------------------------------------------------
# The fields of a config.json under uniform names, class defaults filled in; invalid values are
# refused.
#
# `class_defaults.json` has what transformers uses for fields that a file leaves out, by model type:
# those that shapes depend on, null where the class derives the value from others. `make -C
# benchmarks generate` reads it anew from the installed transformers; a test compares.

ClassDefaults = dict[str, int | float | bool | str | None]

DEFAULTS_FILE = Path(__file__).with_name("class_defaults.json")
CLASS_DEFAULTS: dict[str, ClassDefaults] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))

# Far beyond any existing model: a larger number is a mistake. Other fields may go up to 2**24.
MAX_SIZES = {
    "hidden_size": 2**20,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "vocab_size": 2**26,
    "max_position_embeddings": 2**40,
}

# Other names of the same sizes in some model types (attribute_map of transformers' config classes).
FIELD_ALIASES = {
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts_per_tok": ("moe_k", "moe_topk", "num_experts_per_token"),
}

# Names of the MLP's activation in some model types.
ACTIVATION_FIELDS = ("hidden_activation", "activation_function", "activation", "hidden_act")
EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TASK_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForMaskGeneration",
)


class UnknownArchitecture(ModelError):
    """The model may be a decoder, but the table of families does not have its type: only its class
    can tell."""


# Ways to store quantised weights that are dequantised while they are read, by their names in
# config.json.
DEQUANTISED_FORMATS = {"mxfp4": "MXFP4", "fp8": "FP8"}


def wrapped_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of an image-text model's config.json; empty where that is no
    mapping or not there."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def dequantisable_method(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """How a model's weights are stored, if that is one of `DEQUANTISED_FORMATS`, and the fields
    that say so."""
    method, fields = quantisation_method(config)
    if method not in DEQUANTISED_FORMATS:
        method = None
    return method, fields


def dequantised_config(config: dict[str, Any]) -> dict[str, Any]:
    """Remove from a config.json that its weights are stored quantised, if they are dequantised
    while they are read; returns the config."""
    if dequantisable_method(config)[0] is not None:
        for part in (config, wrapped_config(config)):
            part.pop("quantization_config", None)
    return config


def quantisation_method(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The method by which a model's weights are stored quantised, and the fields that describe it;
    None if they are not."""
    fields = config.get("quantization_config")
    if fields is None:  # an image-text model's config has it in either
        fields = wrapped_config(config).get("quantization_config")
    if fields is None:
        return None, {}
    if not isinstance(fields, Mapping):
        return "unknown method", {}
    is_bitsandbytes = any(
        fields.get(f"{prefix}load_in_{bits}bit") for prefix in ("", "_") for bits in (4, 8)
    )
    default_method = "bitsandbytes" if is_bitsandbytes else "unknown method"
    return str(fields.get("quant_method") or default_method), fields


def require_causal_lm_config(config: object, *, name: str) -> None:
    """Raises ModelError for JSON that is not the config.json of a causal language model."""
    model_text = one_line(name)
    if not isinstance(config, Mapping):
        raise ModelError(
            f"model {model_text}: config.json holds a {type(config).__name__}: it has no model_type"
        )
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        hint = ""
        if isinstance(base, str) and base:
            hint = f", here {one_line(base)}"
        raise ModelError(
            f"model {model_text}: its config is an adapter's; name the base model{hint}"
        )
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"model {model_text}: not a language model's config.json (a tokenizer's?): it has no"
            " model_type"
        )
    for class_name in architectures if isinstance(architectures, list) else []:
        if str(class_name).endswith(_TASK_HEADS):
            raise ModelError(
                f"model {model_text} is a {one_line(str(class_name))}, not a causal language model;"
                " take the language model"
            )
    if model_type in NON_DECODER_TYPES or config.get("is_encoder_decoder") is True:
        description = NON_DECODER_TYPES.get(
            model_type, "an encoder with a decoder, which this toolkit does not train"
        )
        raise ModelError(
            f"model {model_text} (model_type {one_line(model_type)}) is {description}; take a"
            " causal language model"
        )


def refuse_absurd_sizes(config: Mapping[str, Any], *, name: str) -> None:
    """Raises ModelError for a size with which no class should be built."""
    fields = ConfigFields(str(config.get("model_type")), {**config, **wrapped_config(config)}, name)
    for field_name in MAX_SIZES:
        for key in (field_name, *FIELD_ALIASES.get(field_name, ())):
            value = fields.values.get(key)
            # a list: one size for each block; heads of 0: no part of them turns with the position
            # (glm5_next)
            if (
                value is not None
                and not isinstance(value, list)
                and not (key == "head_dim" and value == 0)
            ):
                fields.require_count(key)


@dataclass(frozen=True)
class ConfigFields:
    """The fields of one language model under their usual names, class defaults filled in; null
    stays None."""

    model_type: str
    values: Mapping[str, Any]
    name: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Self:
        """The fields of the language model that a config.json describes or wraps. Raises
        UnknownArchitecture for a type that the table of families does not have, ModelError where
        the width is missing."""
        inner = wrapped_config(config)
        if not inner and config.get("text_config") not in (None, {}):
            raise ModelError(
                f"model {one_line(name)}: text_config of its config.json is not a mapping"
            )
        text = dict(inner or config)
        # often said of the whole class only
        if isinstance(tied := config.get("tie_word_embeddings"), bool):
            text.setdefault("tie_word_embeddings", tied)
        # an image-text model's config has the language model's in text_config, which may leave out
        # its type
        outer_type = str(config["model_type"])
        model_type = text.get("model_type") or WRAPPED_TYPES.get(outer_type)
        if model_type == outer_type or not isinstance(model_type, str):
            model_type = WRAPPED_TYPES.get(outer_type, outer_type)
        if model_type not in MODEL_FAMILIES:
            raise UnknownArchitecture(
                f"model {one_line(name)}: model_type {one_line(model_type)} is not among the"
                f" {len(MODEL_FAMILIES)} whose blocks the plan knows without transformers"
            )
        values = normalize_field_names(CLASS_DEFAULTS[model_type]) | normalize_field_names(text)
        # defaults are those of one model of the class: a file without sizes is not taken for it
        if not inner and not any(
            key in text for key in ("hidden_size", *FIELD_ALIASES["hidden_size"])
        ):
            cls(model_type, {}, name).require_count("hidden_size")
        return cls(model_type, values, name)

    def require_count(self, key: str) -> int:
        """A whole number of one or more. Raises ModelError where it is missing, or larger than in
        any model."""
        value = self.values.get(key)
        # in Python true is an int
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = (
                "the plan needs a whole number there, 1 or more (model_type:"
                f" {one_line(self.model_type)})"
            )
            raise self._field_error(key, value, rule)
        # a limit is listed under one of a field's names
        field_name = next(
            (field_name for field_name, aliases in FIELD_ALIASES.items() if key in aliases), key
        )
        maximum = MAX_SIZES.get(field_name, 2**24)
        if value > maximum:
            raise self._field_error(
                key, value, f"no model is that large (the limit is {maximum:,})"
            )
        return value

    def read_optional_count(self, key: str) -> int | None:
        """A whole number that may be absent, null or 0 (then None)."""
        if self.values.get(key) in (None, 0):
            return None
        return self.require_count(key)

    def read_flag(self, source: FlagSource) -> bool:
        """A fixed answer, or the value of a true-or-false field; absent and null count as false."""
        if isinstance(source, bool):
            return source
        value = self.values.get(source)
        if value is not None and not isinstance(value, bool):
            raise self._field_error(source, value, "it must be true or false")
        return bool(value)

    def read_number(
        self, key: str, *, minimum: float = 1e-30, maximum: float = math.inf
    ) -> float | None:
        """A number that may be absent, above 0 unless limits are given. Raises ModelError for any
        other value."""
        value = self.values.get(key)
        if value is None or value is False:
            return None
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            rule = (
                f"a number from {minimum} to {maximum}"
                if maximum < math.inf
                else "a number above 0"
            )
            raise self._field_error(key, value, f"it must be {rule}")
        return float(value)

    def _field_error(self, key: str, value: object, rule: str) -> ModelError:
        return ModelError(
            f"model {one_line(self.name)}: config.json has {key}:"
            f" {one_line(json.dumps(value, default=str))}; {rule}"
        )


def normalize_field_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with the usual names for sizes, and one name for the number of experts."""
    renamed = dict(config)
    for field_name, aliases in FIELD_ALIASES.items():
        alias = next((name for name in aliases if name in config), None)
        if alias is not None and field_name not in config:
            renamed[field_name] = config[alias]
    # defaults and files may use different names for it: under all of them the file's value wins
    alias = next((key for key in EXPERT_COUNT_FIELDS if key in config), None)
    if alias is not None:
        renamed |= dict.fromkeys(EXPERT_COUNT_FIELDS, config[alias])
    return renamed
