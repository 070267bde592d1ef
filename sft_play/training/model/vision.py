"""The vision part of an image-text class beside its language model, for rows with images.

What trains is the language model, loaded, divided and saved as for rows of text; the whole class
is built around it (`attach_vision`), so that the class's own code makes embeddings, positions and
masks of pictures and tokens. Its tower and projector are read from the base, stay frozen, whole and
unquantised on every rank, and belong to the trained model only where they train too.
"""

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from sft_play.data.masks.image_processor import (
    ImageProcessorSource,
    cached_image_processor,
    image_inputs,
)
from sft_play.data.sources.images import Picture
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait
from sft_play.training.model.language_model import find_text_tower, outside_zero3
from sft_play.training.model.model_loading import NO_ADAPTER_KWARGS, silence_load_report
from sft_play.training.model.vision_parts import (
    adopt_trained_parts,
    compute_image_features,
    find_dropped_scaling,
    find_read_weights,
    require_image_class,
)

logger = logging.getLogger(__name__)

# Width and height of a picture whose pixels do not matter.
_SMALL_PICTURE = (64, 64)


@dataclass(frozen=True)
class Vision:
    """The whole class around a language model. `full_model` has the language model's own modules
    where its class has them, and answers rows with images; `decoder_name` is where, such as
    `model.language_model`; `images` says where its processor is."""

    full_model: Any
    decoder_name: str
    images: ImageProcessorSource

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The weights of the tower and the projector by their names in the whole class."""
        return {
            name: weight
            for name, weight in self.full_model.named_parameters(remove_duplicate=False)
            if is_vision_name(name, self.decoder_name)
        }

    def freeze_unread_weights(self) -> list[str]:
        """Freeze the weights that no feature of a picture depends on, and return their names: LLaVA
        reads the blocks of its tower, and neither the norm nor the pooling head behind them, which
        would have no gradient."""
        picture = cached_image_processor(self.images).blank_inputs([_SMALL_PICTURE])
        device = next(iter(self.parameters.values())).device
        inputs = {name: tensor.to(device) for name, tensor in picture.items()}
        with torch.enable_grad():
            _, features = compute_image_features(self.full_model, inputs)
        read_ids = find_read_weights(features)
        unread = {
            name: weight
            for name, weight in self.parameters.items()
            if weight.requires_grad and id(weight) not in read_ids
        }
        for weight in unread.values():
            weight.requires_grad_(requires_grad=False)
        return list(unread)


def is_vision_name(name: str, decoder_name: str) -> bool:
    """Whether a weight of the whole class is of its tower or projector, by its name."""
    return not name.startswith((f"{decoder_name}.", "lm_head."))


def load_vision(
    language_model: Any,
    *,
    name: str,
    location: str,
    revision: str | None,
    images: ImageProcessorSource,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Vision:
    """Read the tower and the projector of a base, frozen, and build its whole class around its
    language model. Raises ModelError: it takes no images, or weights of them are missing."""
    text_tower = find_text_tower(language_model)
    dropped = find_dropped_scaling(require_image_class(text_tower, name))
    if dropped:
        logger.warning(
            "%s: trained with its language model's %s, which transformers' whole class leaves out:"
            " answers sampled with that are surer than here",
            one_line(name),
            ", ".join(dropped),
        )
    assert text_tower is not None
    decoder_name = text_tower.prefixes[0][1].removesuffix(".")
    try:
        with (
            outside_zero3(),
            silence_load_report(),
            report_wait(f"Loading the vision tower of {one_line(name)}"),
        ):
            full_model, info = AutoModelForImageTextToText.from_pretrained(
                location,
                config=_without_text_layers(text_tower.full_config),
                revision=revision,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # of what is left of the language model
                output_loading_info=True,
                **NO_ADAPTER_KWARGS,
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"the vision tower of {one_line(name)} cannot be loaded:"
            f" {one_line(str(error), limit=300)}"
        ) from error
    wrong_names = [
        one if isinstance(one, str) else str(one[0])
        for key in ("missing_keys", "mismatched_keys")
        for one in info.get(key, ())
    ]
    wrong_names = [one for one in wrong_names if is_vision_name(one, decoder_name)]
    if wrong_names:
        raise ModelError(
            f"the weights of {one_line(name)} lack parts of its vision tower:"
            f" {one_line(', '.join(wrong_names[:4]), limit=300)} ({len(wrong_names)} in all)"
        )
    return attach_vision(full_model, language_model, images=images, device=device)


# The config of the whole class with a language model of no layers and few tokens, which is built
# and thrown away.
def _without_text_layers(full_config: Any) -> Any:
    small_config = copy.deepcopy(full_config)
    text_config = small_config.get_text_config()
    for config in (small_config, text_config):  # the language model may be in 4 bits by now
        vars(config).pop("quantization_config", None)
    for key, value in {
        "num_hidden_layers": 0,
        "vocab_size": 8,
        "vocab_size_per_layer_input": 8,
        "layer_types": [],
        "num_kv_shared_layers": 0,
        "pad_token_id": None,
    }.items():
        if hasattr(text_config, key):
            setattr(text_config, key, value)
    return small_config


def attach_vision(
    full_model: Any,
    language_model: Any,
    *,
    images: ImageProcessorSource,
    device: torch.device | str,
) -> Vision:
    """Put the language model's modules in the place of the whole class's own, and let its decoder
    give every batch to the whole class."""
    text_tower = find_text_tower(language_model)
    assert text_tower is not None
    text_prefix, full_prefix = text_tower.prefixes[0]
    decoder = language_model.get_submodule(text_prefix.removesuffix("."))
    parent_name, _, child_name = full_prefix.removesuffix(".").rpartition(".")
    parent = full_model.get_submodule(parent_name)
    delattr(parent, child_name)
    full_model.requires_grad_(requires_grad=False).to(device).eval()
    setattr(parent, child_name, decoder)
    full_model.lm_head = language_model.get_output_embeddings()
    full_config = copy.copy(text_tower.full_config)
    full_config.text_config = language_model.config
    for module in (full_model, full_model.model):
        module.config = full_config
    adopt_trained_parts(language_model, full_model)
    _route_batches(decoder, full_model.model)
    vision = Vision(full_model, full_prefix.removesuffix("."), images)
    language_model.sft_whole_class = vision
    return vision


def find_vision(model: Any) -> Vision | None:
    """The whole class around this model, with adapters or without; None where it has none."""
    return getattr(model, "sft_whole_class", None)


def prepare_generation(
    model: Any, ids_BT: torch.Tensor, pictures_by_row: Sequence[Sequence[Picture]]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """What generates answers to prompts (the model, or the whole class around it), and what it is
    given of their pictures beside the tokens; `ids_BT` is padded on the left. Raises ModelError:
    the model takes no images."""
    vision = find_vision(model)
    if vision is None:
        if any(pictures_by_row):
            raise ModelError("a prompt has images, and this run's model was trained on text alone")
        return model, {}
    processor = cached_image_processor(vision.images)
    tensors, _ = image_inputs(processor, pictures_by_row)
    types = processor.token_types(ids_BT.tolist())
    inputs = tensors | {name: torch.tensor(rows) for name, rows in types.items()}
    vision.full_model.generation_config = model.generation_config
    vision.full_model.lm_head = model.get_output_embeddings()  # with its adapter
    return vision.full_model, {name: value.to(ids_BT.device) for name, value in inputs.items()}


# The language model calls its decoder with everything that a batch has. The whole class answers,
# and calls the decoder again with embeddings; also where no row has a picture, so that the ranks of
# ZeRO-3 gather weights in one order.
def _route_batches(decoder: Any, full_decoder: Any) -> None:
    text_forward = decoder.forward
    is_inside = False

    @functools.wraps(type(decoder).forward)
    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        nonlocal is_inside
        if is_inside or inputs.get("inputs_embeds") is not None:
            return text_forward(*args, **inputs)
        is_inside = True
        try:
            filled = {name: value for name, value in inputs.items() if value is not None}
            return full_decoder(*args, **filled)
        finally:
            is_inside = False

    decoder.forward = MethodType(forward, decoder)
