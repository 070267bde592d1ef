"""The language model of an image-text class, as a causal language model of its own.

Where transformers has only the decoder (`Qwen2_5_VLTextModel`), it gets a head and is registered, so that everything
that takes a causal language model takes it. What is written carries the names of the whole class (`Tower`), whose other
weights stay as published.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

# Where checkpoints of image-text models keep the language model's weights, before transformers 4.52 and since.
OLDER_LAYOUTS = {
    r"^model\.language_model\.model\.": "model.language_model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}


# What PEFT puts before the base's names.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Tower:
    """Where the language model lies in its whole class."""

    whole: Any
    """The config as published."""
    places: tuple[tuple[str, str], ...]
    """How names of weights begin in the language model, and in the whole class: `model.` and `model.language_model.`"""
    renamings: tuple[tuple[str, str], ...] = ()
    """What the whole class renames when it is loaded: names in its files, as regular expressions, and its own."""

    @property
    def key_mapping(self) -> dict[str, str]:
        """What `from_pretrained` of the language model needs to find its weights in files of the whole class."""
        return {**dict(self.renamings), **OLDER_LAYOUTS, **{rf"^{re.escape(whole)}": own for own, whole in self.places}}

    def skeleton(self) -> Any:
        """The whole class without weights; None where it is none of images and text, or lacks a package."""
        try:
            with torch.device("meta"):
                return AutoModelForImageTextToText.from_config(copy.deepcopy(self.whole))
        except Exception:  # each class in its own way
            return None

    def in_whole(self, name: str) -> str:
        """The name in the whole class of a weight or module, with PEFT's prefix or without; of one that has its name
        there already the same."""
        prefix, name = _without_prefix(name)
        if any(name.startswith(whole) for _, whole in self.places):
            return prefix + name
        return prefix + next((whole + name[len(own) :] for own, whole in self.places if name.startswith(own)), name)

    def in_tower(self, name: str) -> str:
        """Its name in the language model."""
        prefix, name = _without_prefix(name)
        return prefix + next((own + name[len(whole) :] for own, whole in self.places if name.startswith(whole)), name)


def _without_prefix(name: str) -> tuple[str, str]:
    return (PEFT_PREFIX, name.removeprefix(PEFT_PREFIX)) if name.startswith(PEFT_PREFIX) else ("", name)


def tower_in(model: Any) -> Tower | None:
    """Where the language model lies that this model is, with adapters or without; None for a model of text."""
    found: Tower | None = getattr(model, "sft_tower", None)
    return found


def tower_of(whole: Any, language_model: Any) -> Tower | None:
    """Where a language model lies in the class of a config as published; None where that is its own."""
    if whole.get_text_config() is whole:
        return None
    model = Tower(whole, ()).skeleton()
    if model is None:
        return Tower(whole, (("model.", "model.language_model."),))
    # a private part of transformers (5.23); what it joins and splits is registered with the language model
    renamings = tuple(
        (one.source_patterns[0], one.target_patterns[0])
        for one in get_model_conversion_mapping(model, add_legacy=False)
        if type(one) is WeightRenaming and not one.scope_prefix and len(one.source_patterns) == 1
    )
    modules = dict(model.named_modules())
    inside = next((path for path, module in modules.items() if type(module) is type(language_model)), None)
    if inside is not None:
        return Tower(whole, (("", f"{inside}."),), renamings)
    decoder = language_model.get_decoder()
    ours = next(path for path, module in language_model.named_modules() if module is decoder)
    theirs = next((path for path, module in modules.items() if type(module) is type(decoder)), "model.language_model")
    return Tower(whole, ((f"{ours}.", f"{theirs}."),), renamings)


def lost_by_peft(published: Any, names: Iterable[str]) -> list[str]:
    """Of the tensors in an adapter's file those that PEFT (0.21) loses when it loads them: it renames all as tensors of
    the base's published files, though they are named as in the class (`published`, on the meta device) already."""
    renamings = [one for one in get_model_conversion_mapping(published) if isinstance(one, WeightRenaming)]
    own = {name: _without_prefix(name)[1] for name in names}
    return [name for name, inside in own.items() if apply_renamings(inside, renamings) != inside]


def without_kernels(whole: Any) -> Any:
    """Take from a config the attention and the experts' code that its file names: of a repository of the hub
    transformers would fetch it and run it, and only the user's own word allows that (docs/trust.md)."""
    whole._attn_implementation = whole._experts_implementation = None
    return whole


def language_config(whole: Any, published: Mapping[str, Any] | None = None) -> Any:
    """The config of the language model in a config as published, which `AutoModelForCausalLM` builds from then on, if
    transformers has a decoder for it. `published`: the fields of config.json, which may say of the whole alone that the
    head is the embedding."""
    text = without_kernels(whole).get_text_config()
    if not hasattr(text, "tie_word_embeddings"):  # some say it of the whole class only
        text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
    said, inner = (published or {}).get("tie_word_embeddings"), (published or {}).get("text_config")
    if isinstance(inner, Mapping) and "tie_word_embeddings" not in inner and isinstance(said, bool):
        text.tie_word_embeddings = said
    if (text is whole and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING) or getattr(whole, "is_encoder_decoder", False):
        return text
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    is_new = found is None
    if found is None and (found := _class_with_head(text)) is not None:
        AutoModelForCausalLM.register(type(text), found, exist_ok=True)
    if found is not None and (is_new or get_checkpoint_conversion_mapping(text.model_type) is None):
        known = get_checkpoint_conversion_mapping(whole.model_type) or []
        joined = [one for one in known if isinstance(one, WeightConverter)]
        if joined:  # experts that files hold one by one
            register_checkpoint_conversion_mapping(found.__name__, joined, overwrite=True)
    return text


def fit_ties(whole: Any, text: Any, names: Callable[[], set[str]]) -> None:
    """Tie the head to the embedding or not, as the names in its files have it, where the two configs disagree."""
    if text is whole or bool(text.tie_word_embeddings) == bool(getattr(whole, "tie_word_embeddings", False)):
        return
    found = names()
    if found:
        text.tie_word_embeddings = not any("lm_head." in name for name in found)


def _class_with_head(text: Any) -> type | None:
    kind = type(text)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None)
    if whole is not None:  # the config of a whole class, which may be a text model all the same (Mistral 4)
        return whole if whole.__name__.endswith("ForCausalLM") else None
    decoder = _decoder_of(kind)
    made = None if decoder is None else _with_head(decoder, kind)
    return next(iter(_beside(kind, "ForCausalLM")), made)


def _decoder_of(kind: type) -> Any:
    found: Any = MODEL_MAPPING.get(kind, None) or _beside(kind, "TextModel")
    classes = found if isinstance(found, list | tuple) else [found]
    return next((one for one in classes if "input_ids" in list(inspect.signature(one.forward).parameters)[1:2]), None)


def _beside(kind: type, ending: str) -> list[type]:
    file = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    models: list[Any] = [
        one for _, one in inspect.getmembers(file, inspect.isclass) if issubclass(one, PreTrainedModel)
    ]
    return [one for one in models if one.config_class is kind and one.__name__.endswith(ending)]


def _scaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """As the whole classes scale and cap their logits (transformers 5.23: Granite Docling, Mistral Large 4, Muse)."""
    factor, divisor = getattr(config, "output_multiplier", None), getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits * (factor or 1.0) / (divisor or 1.0)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _with_head(decoder: Any, kind: type) -> type:
    plain: Any = next(base for base in decoder.__mro__[1:] if issubclass(base, PreTrainedModel))

    class LanguageModel(plain, GenerationMixin):
        config_class = kind
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (as transformers has it)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.vocab_size = config.vocab_size
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            labels: torch.Tensor | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            **options: Any,
        ) -> CausalLMOutputWithPast:
            """Logits [B, T, V], and the loss where labels are given; `options` are those of the decoder."""
            options.pop("return_dict", None)
            found = self.model(input_ids=input_ids, attention_mask=attention_mask, **options)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = _scaled(self.lm_head(found.last_hidden_state[:, kept, :]), self.config)
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **options)
            # under the names that both outputs have: transformers 5.24 calls `past_key_values` `cache`
            others = {field.name for field in fields(CausalLMOutputWithPast)} & set(found)
            return CausalLMOutputWithPast(loss=loss, logits=logits, **{name: found[name] for name in others})

    # transformers finds conversions of weights and kernels by these
    LanguageModel.__name__ = LanguageModel.__qualname__ = f"{decoder.__name__.removesuffix('Model')}ForCausalLM"
    LanguageModel.__module__ = decoder.__module__
    return LanguageModel
