"""The fields of a config.json under uniform names, class defaults filled in; invalid values are refused.

`class_defaults.json` has what transformers uses for fields that a file leaves out, by model type: those that shapes
depend on, null where the class derives the value from others. `make -C benchmarks generate` reads it anew from the
installed transformers; a test compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.facts.models.families import MODEL_FAMILIES, NON_DECODER_TYPES, WRAPPED_TYPES, FlagSource
from sft_play.log import one_line

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
_MAX_OTHER_SIZE = 2**24

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
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
    "ForImageClassification", "ForMaskGeneration",
)  # fmt: skip


class UnknownArchitecture(ModelError):
    """Perhaps a decoder, but of a type that the table of families does not have: only its class can tell."""


# Ways to store quantised weights that are dequantised while they are read, by their names in config.json.
DEQUANTISED_FORMATS = {"mxfp4": "MXFP4", "fp8": "FP8"}


def dequantisable_method(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """How a model's weights are stored, if that is one of `DEQUANTISED_FORMATS`, and the fields that say so."""
    method, fields = quantisation_method(config)
    return (method if method in DEQUANTISED_FORMATS else None), fields


def dequantised_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json as that of its dequantised weights; as it is where they are not stored so."""
    if dequantisable_method(config)[0] is not None:
        inner = config.get("text_config")
        for part in (config, inner if isinstance(inner, dict) else {}):
            part.pop("quantization_config", None)
    return config


def quantisation_method(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The method by which a model's weights are stored quantised and its fields; None where they are not."""
    parts = [config, config.get("text_config")]  # an image-text model's config has it in either
    quantisation_configs = (part.get("quantization_config") for part in parts if isinstance(part, Mapping))
    quantisation_config = next((one for one in quantisation_configs if one is not None), None)
    if quantisation_config is None:
        return None, {}
    fields = quantisation_config if isinstance(quantisation_config, Mapping) else {}
    is_bitsandbytes = any(fields.get(f"{prefix}load_in_{bits}bit") for prefix in ("", "_") for bits in (4, 8))
    method = fields.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unknown method")
    return str(method), fields


def require_causal_lm_config(config: object, *, name: str) -> None:
    """Raises ModelError for JSON that is not the config.json of a causal language model."""
    model_text = one_line(name)
    if not isinstance(config, Mapping):
        raise ModelError(f"model {model_text}: config.json holds a {type(config).__name__}: it has no model_type")
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        hint = f", here {one_line(base)}" if isinstance(base, str) and base else ""
        raise ModelError(f"model {model_text}: its config is an adapter's; name the base model{hint}")
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"model {model_text}: not a language model's config.json (a tokenizer's?): it has no model_type"
        )
    class_names = [item for item in architectures if isinstance(item, str)] if isinstance(architectures, list) else []
    wrong_class = next((class_name for class_name in class_names if class_name.endswith(_TASK_HEADS)), None)
    if wrong_class is not None:
        raise ModelError(
            f"model {model_text} is a {one_line(wrong_class)}, not a causal language model; take the language model"
        )
    if model_type in NON_DECODER_TYPES or config.get("is_encoder_decoder") is True:
        description = NON_DECODER_TYPES.get(model_type, "an encoder with a decoder, which this toolkit does not train")
        raise ModelError(
            f"model {model_text} (model_type {one_line(model_type)}) is {description}; take a causal language model"
        )


def refuse_absurd_sizes(config: Mapping[str, Any], *, name: str) -> None:
    """Raises ModelError for a size with which no class should be built."""
    model_type = str(config.get("model_type"))
    inner = config.get("text_config")
    fields = ConfigFields(model_type, {**config, **inner} if isinstance(inner, Mapping) else config, name)
    for field_name in MAX_SIZES:
        for key in (field_name, *FIELD_ALIASES.get(field_name, ())):
            value = fields.values.get(key)
            # a list: one size for each block; heads of 0: no part of them turns with the position (glm5_next)
            if value is not None and not isinstance(value, list) and not (key == "head_dim" and value == 0):
                fields.require_count(key)


@dataclass(frozen=True)
class ConfigFields:
    """The fields of one language model under their usual names, class defaults filled in; null stays None."""

    model_type: str
    values: Mapping[str, Any]
    name: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> ConfigFields:
        """The fields of the language model that a config.json describes or wraps. Raises UnknownArchitecture for a type
        that the table of families does not have, ModelError where the width is missing."""
        inner = config.get("text_config")
        if inner is not None and not isinstance(inner, Mapping):
            raise ModelError(f"model {one_line(name)}: text_config of its config.json is not a mapping")
        is_wrapped = isinstance(inner, Mapping) and bool(inner)
        text = dict(inner) if is_wrapped and inner is not None else dict(config)
        if isinstance(tied := config.get("tie_word_embeddings"), bool):  # often said of the whole class only
            text.setdefault("tie_word_embeddings", tied)
        # an image-text model's config has the language model's in text_config, which may leave out its type
        outer_type = str(config["model_type"])
        model_type = text.get("model_type") or WRAPPED_TYPES.get(outer_type)
        model_type = (
            WRAPPED_TYPES.get(outer_type, outer_type)
            if model_type == outer_type or not isinstance(model_type, str)
            else model_type
        )
        if model_type not in MODEL_FAMILIES:
            raise UnknownArchitecture(
                f"model {one_line(name)}: model_type {one_line(model_type)} is not among the {len(MODEL_FAMILIES)} "
                "whose blocks the plan knows without transformers"
            )
        values = normalize_field_names(CLASS_DEFAULTS[model_type]) | normalize_field_names(text)
        # defaults are those of one model of the class: a file without sizes is not taken for it
        if not is_wrapped and not any(key in text for key in ("hidden_size", *FIELD_ALIASES["hidden_size"])):
            cls(model_type, {}, name).require_count("hidden_size")
        return cls(model_type, values, name)

    def require_count(self, key: str) -> int:
        """A whole number of one or more. Raises ModelError where it is missing, or larger than in any model."""
        value = self.values.get(key)
        # in Python true is an int
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = f"the plan needs a whole number there, 1 or more (model_type: {one_line(self.model_type)})"
            raise self._field_error(key, value, rule)
        # a limit is listed under one of a field's names
        field_name = next((field_name for field_name, aliases in FIELD_ALIASES.items() if key in aliases), key)
        maximum = MAX_SIZES.get(field_name, _MAX_OTHER_SIZE)
        if value > maximum:
            raise self._field_error(key, value, f"no model is that large (the limit is {maximum:,})")
        return value

    def read_optional_count(self, key: str) -> int | None:
        """A whole number that may be absent, null or 0 (then None)."""
        return self.require_count(key) if self.values.get(key) not in (None, 0) else None

    def read_flag(self, source: FlagSource) -> bool:
        """A fixed answer, or the value of a true-or-false field; absent and null count as false."""
        if isinstance(source, bool):
            return source
        value = self.values.get(source)
        if value is not None and not isinstance(value, bool):
            raise self._field_error(source, value, "it must be true or false")
        return bool(value)

    def read_optional_number(self, key: str) -> float | None:
        """A positive number that may be absent."""
        value = self.values.get(key)
        return None if value is None or value is False else self._require_number(key, value, 1e-30, None)

    def read_fraction(self, key: str) -> float:
        """A number from 0 to 1; absent and null count as 0."""
        value = self.values.get(key)
        return 0.0 if value is None else self._require_number(key, value, 0, 1)

    def _require_number(self, key: str, value: object, minimum: float, maximum: float | None) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= (maximum or math.inf):
            return float(value)
        rule = "a number above 0" if maximum is None else f"a number from {minimum} to {maximum}"
        raise self._field_error(key, value, f"it must be {rule}")

    def _field_error(self, key: str, value: object, rule: str) -> ModelError:
        value_text = one_line(json.dumps(value, default=str))
        return ModelError(f"model {one_line(self.name)}: config.json has {key}: {value_text}; {rule}")


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
