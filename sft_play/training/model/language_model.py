"""The language model of an image-text class, as a causal language model of its own.

Where transformers has only the decoder (`Qwen2_5_VLTextModel`), it gets a head and is registered,
so that everything that takes a causal language model takes it. What is written carries the names
of the whole class (`TextTower`), whose other weights stay as published."""

import contextlib
import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

# Where checkpoints of image-text models keep the language model's weights, before transformers 4.52
# and since.
LEGACY_KEY_MAPPING = {
    r"^model\.language_model\.model\.": "model.language_model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}

# What PEFT puts before the base's names.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class TextTower:
    """Where the language model lies in its whole class."""

    # The config as published.
    full_config: Any
    # How names of weights begin in the language model, and in the whole class: `model.` and
    # `model.language_model.`
    prefixes: tuple[tuple[str, str], ...]
    # What the whole class renames when it is loaded: names in its files, as regular expressions,
    # and its own.
    renamings: tuple[tuple[str, str], ...] = ()

    @property
    def key_mapping(self) -> dict[str, str]:
        """What `from_pretrained` of the language model needs to find its weights in files of the
        whole class."""
        return {
            **dict(self.renamings),
            **LEGACY_KEY_MAPPING,
            **{
                rf"^{re.escape(full_prefix)}": text_prefix
                for text_prefix, full_prefix in self.prefixes
            },
        }

    def build_full_model(self) -> Any:
        """The whole class without weights; None where it is none of images and text, or lacks a
        package."""
        try:
            with outside_zero3(), torch.device("meta"):
                return AutoModelForImageTextToText.from_config(copy.deepcopy(self.full_config))
        except Exception:  # each class in its own way
            return None

    def to_full_name(self, name: str) -> str:
        """The name in the whole class of a weight or module, with PEFT's prefix or without; of one
        that has its name there already the same."""
        if name.startswith(PEFT_PREFIX):
            return PEFT_PREFIX + self.to_full_name(name.removeprefix(PEFT_PREFIX))
        return _replace_prefix(
            name,
            [*((full_prefix, full_prefix) for _, full_prefix in self.prefixes), *self.prefixes],
        )

    def to_text_name(self, name: str) -> str:
        """Its name in the language model."""
        if name.startswith(PEFT_PREFIX):
            return PEFT_PREFIX + self.to_text_name(name.removeprefix(PEFT_PREFIX))
        return _replace_prefix(
            name, [(full_prefix, text_prefix) for text_prefix, full_prefix in self.prefixes]
        )


@contextlib.contextmanager
def outside_zero3() -> Iterator[None]:
    """Read and build models whole while ZeRO-3 is configured, which divides them as they are."""
    configured = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = configured


# Replaces the first of the prefixes that the name begins with.
def _replace_prefix(name: str, replacements: Iterable[tuple[str, str]]) -> str:
    for old, new in replacements:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def find_text_tower(model: Any) -> TextTower | None:
    """Where the language model lies that this model is, with adapters or without; None for a model
    of text."""
    return getattr(model, "sft_tower", None)


def locate_text_tower(full_config: Any, language_model: Any) -> TextTower | None:
    """Find where a language model lies in the class of a published config; None: it is the whole
    class."""
    if full_config.get_text_config() is full_config:
        return None
    full_model = TextTower(full_config, ()).build_full_model()
    if full_model is None:
        return TextTower(full_config, (("model.", "model.language_model."),))
    # a private part of transformers (5.23); what it joins and splits is registered with the
    # language model
    renamings = tuple(
        (renaming.source_patterns[0], renaming.target_patterns[0])
        for renaming in get_model_conversion_mapping(full_model, add_legacy=False)
        if type(renaming) is WeightRenaming
        and not renaming.scope_prefix
        and len(renaming.source_patterns) == 1
    )
    modules = dict(full_model.named_modules())
    path_in_full = next(
        (path for path, module in modules.items() if type(module) is type(language_model)), None
    )
    if path_in_full is not None:
        return TextTower(full_config, (("", f"{path_in_full}."),), renamings)
    decoder = language_model.get_decoder()
    text_prefix = next(path for path, module in language_model.named_modules() if module is decoder)
    full_prefix = next(
        (path for path, module in modules.items() if type(module) is type(decoder)),
        "model.language_model",
    )
    return TextTower(full_config, ((f"{text_prefix}.", f"{full_prefix}."),), renamings)


def names_lost_by_peft(published_model: Any, names: Iterable[str]) -> list[str]:
    """Of the tensors in an adapter's file those that PEFT (0.21) loses when it loads them: it
    renames all as tensors of the base's published files, though they are named as in the class
    (`published_model`, on the meta device).
    """
    renamings = [
        renaming
        for renaming in get_model_conversion_mapping(published_model)
        if isinstance(renaming, WeightRenaming)
    ]
    bare_names = {name: name.removeprefix(PEFT_PREFIX) for name in names}
    return [
        name
        for name, bare_name in bare_names.items()
        if apply_renamings(bare_name, renamings) != bare_name
    ]


def drop_kernel_choices(full_config: Any) -> Any:
    """Take from a config the attention and the experts' code that its file names: of a repository
    of the hub transformers would fetch it and run it, and only the user's own word allows that
    (docs/trust.md).
    """
    full_config._attn_implementation = full_config._experts_implementation = None
    return full_config


def prepare_text_config(full_config: Any, published: Mapping[str, Any] | None = None) -> Any:
    """The config of the language model in a config as published, which `AutoModelForCausalLM`
    builds from then on, if transformers has a decoder for it. `published`: the fields of
    config.json, which may say of the whole alone that the head is the embedding."""
    text_config = drop_kernel_choices(full_config).get_text_config()
    if not hasattr(text_config, "tie_word_embeddings"):  # some say it of the whole class only
        text_config.tie_word_embeddings = getattr(full_config, "tie_word_embeddings", False)
    published = published or {}
    published_tie, published_text = (
        published.get("tie_word_embeddings"),
        published.get("text_config"),
    )
    is_published_of_whole = (
        isinstance(published_text, Mapping) and "tie_word_embeddings" not in published_text
    )
    if is_published_of_whole and isinstance(published_tie, bool):
        text_config.tie_word_embeddings = published_tie
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    is_known = model_class is not None
    if getattr(full_config, "is_encoder_decoder", False) or (
        is_known and text_config is full_config
    ):
        return text_config
    if not is_known:
        model_class = _causal_lm_class(text_config)
        if model_class is None:
            return text_config
        AutoModelForCausalLM.register(type(text_config), model_class, exist_ok=True)
    if not is_known or get_checkpoint_conversion_mapping(text_config.model_type) is None:
        converters = [
            conversion
            for conversion in get_checkpoint_conversion_mapping(full_config.model_type) or []
            if isinstance(conversion, WeightConverter)
        ]
        if converters:  # experts that files hold one by one
            register_checkpoint_conversion_mapping(model_class.__name__, converters, overwrite=True)
    return text_config


def fit_tied_embeddings(
    full_config: Any, text_config: Any, read_names: Callable[[], set[str]]
) -> None:
    """Tie the head to the embedding or not, as the names in its files have it, where the two
    configs disagree."""
    if text_config is full_config or bool(text_config.tie_word_embeddings) == bool(
        getattr(full_config, "tie_word_embeddings", False)
    ):
        return
    names = read_names()
    if names:
        text_config.tie_word_embeddings = not any("lm_head." in name for name in names)


def _causal_lm_class(text_config: Any) -> type | None:
    config_class = type(text_config)
    full_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(config_class, None)
    # the config of a whole class, which may be a text model all the same (Mistral 4)
    if full_class is not None:
        return full_class if full_class.__name__.endswith("ForCausalLM") else None
    causal_classes = _sibling_classes(config_class, "ForCausalLM")
    if causal_classes:
        return causal_classes[0]
    registered: Any = MODEL_MAPPING.get(config_class, None) or _sibling_classes(
        config_class, "TextModel"
    )
    for decoder in registered if isinstance(registered, list | tuple) else [registered]:
        if "input_ids" in list(inspect.signature(decoder.forward).parameters)[1:2]:
            return _build_causal_lm(decoder, config_class)
    return None


def _sibling_classes(config_class: type, suffix: str) -> list[type]:
    module = importlib.import_module(
        config_class.__module__.replace(".configuration_", ".modeling_")
    )
    classes: list[Any] = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, PreTrainedModel)
    ]
    return [
        member
        for member in classes
        if member.config_class is config_class and member.__name__.endswith(suffix)
    ]


def _build_causal_lm(decoder: Any, config_class_of_text: type) -> type:
    base_class: Any = next(
        base for base in decoder.__mro__[1:] if issubclass(base, PreTrainedModel)
    )

    class LanguageModel(base_class, GenerationMixin):
        config_class = config_class_of_text
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
            # logits [B, T, V], and the loss where labels are given; `options` are those of the
            # decoder
            options.pop("return_dict", None)
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, **options)
            positions = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.lm_head(output.last_hidden_state[:, positions, :])
            # as the whole classes scale and cap theirs (transformers 5.23: Granite Docling, Mistral
            # Large 4, Muse)
            factor, divisor = (
                getattr(self.config, name, None) for name in ("output_multiplier", "logits_scaling")
            )
            logits = logits * (factor or 1.0) / (divisor or 1.0)
            cap = getattr(self.config, "final_logit_softcapping", None)
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            loss = None
            if labels is not None:
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.vocab_size, **options
                )
            # under the names that both outputs have: transformers 5.24 calls `past_key_values`
            # `cache`
            shared_fields = {field.name for field in fields(CausalLMOutputWithPast)} & set(output)
            return CausalLMOutputWithPast(
                loss=loss, logits=logits, **{name: output[name] for name in shared_fields}
            )

    # transformers finds conversions of weights and kernels by these
    LanguageModel.__name__ = LanguageModel.__qualname__ = (
        f"{decoder.__name__.removesuffix('Model')}ForCausalLM"
    )
    LanguageModel.__module__ = decoder.__module__
    return LanguageModel
