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
from sft_play.facts.models.families import FAMILIES, OTHER_KINDS, WRAPPERS, Choice
from sft_play.log import one_line

Defaults = dict[str, int | float | bool | str | None]

DEFAULTS_FILE = Path(__file__).with_name("class_defaults.json")
CLASS_DEFAULTS: dict[str, Defaults] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))


# Far beyond any existing model: a larger number is a mistake. Other fields may go up to 2**24.
LARGEST = {
    "hidden_size": 2**20,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "vocab_size": 2**26,
    "max_position_embeddings": 2**40,
}
_LARGEST_OTHER = 2**24

# Other names of the same sizes in some model types (attribute_map of transformers' config classes).
ALIASES = {
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts_per_tok": ("moe_k", "moe_topk", "num_experts_per_token"),
}

# Names of the MLP's activation in some model types.
ACTIVATION = ("hidden_activation", "activation_function", "activation", "hidden_act")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TASK_HEADS = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
    "ForImageClassification", "ForMaskGeneration",
)  # fmt: skip


class UnknownArchitecture(ModelError):
    """Perhaps a decoder, but of a type that the table of families does not have: only its class can tell."""


# Ways to store quantised weights that are dequantised while they are read, by their names in config.json.
DEQUANTISED = {"mxfp4": "MXFP4", "fp8": "FP8"}


def quantisation_of(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """How a model's weights are stored, if that is one of `DEQUANTISED`, and the fields that say so."""
    method, fields = stored_by(config)
    return (method if method in DEQUANTISED else None), fields


def dequantised_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json as that of its dequantised weights; as it is where they are not stored so."""
    if quantisation_of(config)[0] is not None:
        inner = config.get("text_config")
        for part in (config, inner if isinstance(inner, dict) else {}):
            part.pop("quantization_config", None)
    return config


def stored_by(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The method by which a model's weights are stored quantised and its fields; None where they are not."""
    parts = [config, config.get("text_config")]  # an image-text model's config has it in either
    given = (part.get("quantization_config") for part in parts if isinstance(part, Mapping))
    stored = next((one for one in given if one is not None), None)
    if stored is None:
        return None, {}
    fields = stored if isinstance(stored, Mapping) else {}
    is_bitsandbytes = any(fields.get(f"{at}load_in_{bits}bit") for at in ("", "_") for bits in (4, 8))
    method = fields.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unknown method")
    return str(method), fields


def refuse_other_models(config: object, *, name: str) -> None:
    """Raises ModelError for JSON that is not the config.json of a causal language model."""
    shown = one_line(name)
    if not isinstance(config, Mapping):
        raise ModelError(f"model {shown}: config.json holds a {type(config).__name__}: it has no model_type")
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        hint = f", here {one_line(base)}" if isinstance(base, str) and base else ""
        raise ModelError(f"model {shown}: its config is an adapter's; name the base model{hint}")
    kind, names = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"model {shown}: not a language model's config.json (a tokenizer's?): it has no model_type")
    heads = [item for item in names if isinstance(item, str)] if isinstance(names, list) else []
    wrong = next((head for head in heads if head.endswith(_TASK_HEADS)), None)
    if wrong is not None:
        raise ModelError(f"model {shown} is a {one_line(wrong)}, not a causal language model; take the language model")
    if kind in OTHER_KINDS or config.get("is_encoder_decoder") is True:
        other = OTHER_KINDS.get(kind, "an encoder with a decoder, which this toolkit does not train")
        raise ModelError(f"model {shown} (model_type {one_line(kind)}) is {other}; take a causal language model")


def refuse_absurd_sizes(config: Mapping[str, Any], *, name: str) -> None:
    """Raises ModelError for a size with which no class should be built."""
    kind = str(config.get("model_type"))
    inner = config.get("text_config")
    fields = Fields(kind, {**config, **inner} if isinstance(inner, Mapping) else config, name)
    for usual in LARGEST:
        for key in (usual, *ALIASES.get(usual, ())):
            value = fields.values.get(key)
            # a list: one size for each block; heads of 0: no part of them turns with the position (glm5_next)
            if value is not None and not isinstance(value, list) and not (key == "head_dim" and value == 0):
                fields.need(key)


@dataclass(frozen=True)
class Fields:
    """The fields of one language model under their usual names, class defaults filled in; null stays None."""

    kind: str
    values: Mapping[str, Any]
    name: str

    @classmethod
    def of_language_model(cls, config: Mapping[str, Any], name: str) -> Fields:
        """The fields of the language model that a config.json describes or wraps. Raises UnknownArchitecture for a type
        that the table of families does not have, ModelError where the width is missing."""
        inner = config.get("text_config")
        if inner is not None and not isinstance(inner, Mapping):
            raise ModelError(f"model {one_line(name)}: text_config of its config.json is not a mapping")
        wrapped = isinstance(inner, Mapping) and bool(inner)
        text = dict(inner) if wrapped and inner is not None else dict(config)
        if isinstance(said := config.get("tie_word_embeddings"), bool):  # often said of the whole class only
            text.setdefault("tie_word_embeddings", said)
        # an image-text model's config has the language model's in text_config, which may leave out its type
        outer = str(config["model_type"])
        kind = text.get("model_type") or WRAPPERS.get(outer)
        kind = WRAPPERS.get(outer, outer) if kind == outer or not isinstance(kind, str) else kind
        if kind not in FAMILIES:
            raise UnknownArchitecture(
                f"model {one_line(name)}: model_type {one_line(kind)} is not among the {len(FAMILIES)} whose blocks "
                "the plan knows without transformers"
            )
        values = usual_names(CLASS_DEFAULTS[kind]) | usual_names(text)
        # defaults are those of one model of the class: a file without sizes is not taken for it
        if not wrapped and not any(key in text for key in ("hidden_size", *ALIASES["hidden_size"])):
            cls(kind, {}, name).need("hidden_size")
        return cls(kind, values, name)

    def need(self, key: str) -> int:
        """A whole number of one or more. Raises ModelError where it is missing, or larger than in any model."""
        value = self.values.get(key)
        # in Python true is an int
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = f"the plan needs a whole number there, 1 or more (model_type: {one_line(self.kind)})"
            raise self._refusal(key, value, rule)
        # a limit is listed under one of a field's names
        usual = next((usual for usual, others in ALIASES.items() if key in others), key)
        most = LARGEST.get(usual, _LARGEST_OTHER)
        if value > most:
            raise self._refusal(key, value, f"no model is that large (the limit is {most:,})")
        return value

    def count(self, key: str) -> int | None:
        """A whole number that may be absent, null or 0 (then None)."""
        return self.need(key) if self.values.get(key) not in (None, 0) else None

    def flag(self, choice: Choice) -> bool:
        """A fixed answer, or the value of a true-or-false field; absent and null count as false."""
        if isinstance(choice, bool):
            return choice
        value = self.values.get(choice)
        if value is not None and not isinstance(value, bool):
            raise self._refusal(choice, value, "it must be true or false")
        return bool(value)

    def real(self, key: str) -> float | None:
        """A positive number that may be absent."""
        value = self.values.get(key)
        return None if value is None or value is False else self._number(key, value, 1e-30, None)

    def share(self, key: str) -> float:
        """A number from 0 to 1; absent and null count as 0."""
        value = self.values.get(key)
        return 0.0 if value is None else self._number(key, value, 0, 1)

    def _number(self, key: str, value: object, least: float, most: float | None) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= (most or math.inf):
            return float(value)
        rule = "a number above 0" if most is None else f"a number from {least} to {most}"
        raise self._refusal(key, value, f"it must be {rule}")

    def _refusal(self, key: str, value: object, rule: str) -> ModelError:
        shown = one_line(json.dumps(value, default=str))
        return ModelError(f"model {one_line(self.name)}: config.json has {key}: {shown}; {rule}")


def usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with the usual names for sizes, and one name for the number of experts."""
    renamed = dict(config)
    for usual, others in ALIASES.items():
        given = next((other for other in others if other in config), None)
        if given is not None and usual not in config:
            renamed[usual] = config[given]
    # defaults and files may use different names for it: under all of them the file's value wins
    given = next((key for key in EXPERT_COUNTS if key in config), None)
    if given is not None:
        renamed |= dict.fromkeys(EXPERT_COUNTS, config[given])
    return renamed
