"""The parts for images of an image-text class: which they are, and those that train.

Parts that train are submodules of the language model too, so that the optimizer and PEFT find them;
they are saved under their names in the whole class.
"""

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.training.model.language_model import TextTower, find_text_tower

# The module of a language model under which parts for images stand that train with it.
VISION_NAME = "sft_vision"
# What classes call the way from the tower to the language model.
PROJECTOR_NAMES = re.compile(r"projector|merger|connector|embed_vision")

# Settings of a language model by which its class changes its logits.
_LOGIT_SETTINGS = ("logit_scale", "logits_scaling", "output_multiplier", "final_logit_softcapping")


def require_image_class(text_tower: TextTower | None, name: str) -> Any:
    """The whole class on the meta device. Raises ModelError: the base is a model of text, or its
    class keeps the language model in a way that is not known here."""
    if text_tower is None:
        raise ModelError(
            f"the rows have images, and {one_line(name)} is a model of text; take an image-text"
            " base, or rows without images"
        )
    full_model = text_tower.build_full_model()
    is_known = text_tower.prefixes[0][0] != "" and hasattr(
        getattr(full_model, "model", None), "get_image_features"
    )
    if not is_known:
        raise ModelError(
            f"the rows have images, and {type(text_tower.full_config).__name__} of"
            f" {one_line(name)} is no image-text class that trains on them here; its rows of text"
            " do"
        )
    return full_model


def find_dropped_scaling(full_model: Any) -> list[str]:
    """What the language model's own class multiplies or bounds its logits by, and the whole class
    in transformers does not: `logit_scale=0.0625` of Cohere's in Aya Vision. The most likely token
    is the same there, its probability another."""
    text_config = full_model.config.get_text_config()
    code = inspect.getsource(type(full_model))  # some make a module for it
    settings = {name: getattr(text_config, name, None) for name in _LOGIT_SETTINGS}
    return [
        f"{name}={value:g}"
        for name, value in settings.items()
        if value not in (None, 0, 1) and name not in code
    ]


def add_trained_parts(text_tower: TextTower, full_model: Any, *, tower: bool) -> TextTower:
    """The place of the language model in its class, with the parts for images that train beside
    it: all of them (`tower`), or the projector alone."""
    decoder_name = text_tower.prefixes[0][1].removesuffix(".")
    names = _outer_names(full_model.model, decoder_name.removeprefix("model."))
    if not tower:
        names = _projector_names(full_model.model, names)
    prefixes = tuple((f"{VISION_NAME}.{name}", f"model.{name}") for name in names)
    return replace(text_tower, prefixes=(*text_tower.prefixes, *prefixes))


def adopt_trained_parts(language_model: Any, full_model: Any) -> None:
    """Make the parts for images that train modules of the language model, shared with the whole
    class."""
    text_tower = find_text_tower(language_model)
    for text_name, full_name in () if text_tower is None else text_tower.prefixes[1:]:
        parent = language_model
        *parents, last = text_name.removesuffix(".").split(".")
        for name in parents:
            if not hasattr(parent, name):
                parent.register_module(name, nn.Module())
            parent = getattr(parent, name)
        part = functools.reduce(getattr, full_name.removesuffix(".").split("."), full_model)
        setattr(parent, last, part)


# What the whole class has beside its decoder: modules, ended by a dot, and weights of its own.
def _outer_names(full_decoder: Any, decoder_name: str) -> list[str]:
    modules = [
        f"{name}."
        for name, module in full_decoder.named_children()
        if name != decoder_name and any(True for _ in module.parameters())
    ]
    return modules + [name for name, _ in full_decoder.named_parameters(recurse=False)]


# What brings features to the width of the language model: parts of its own, or inside the tower.
def _projector_names(full_decoder: Any, outer_names: Sequence[str]) -> list[str]:
    names: list[str] = []
    for name, module in full_decoder.named_modules():
        path = f"{name}."
        is_new = path.startswith(tuple(outer_names)) and not path.startswith(tuple(names))
        is_projector = PROJECTOR_NAMES.search(name.rpartition(".")[2])
        if is_new and is_projector and not isinstance(module, nn.Linear):
            names.append(path)
    return names


def projector_layers(full_model: Any, text_tower: TextTower) -> list[str]:
    """The linear layers of the projector by their names in the language model, which adopts them.
    Raises ModelError: it has none."""
    layers = [
        text_name + name
        for text_name, full_name in text_tower.prefixes[1:]
        for name, module in full_model.get_submodule(full_name.removesuffix(".")).named_modules()
        if name and isinstance(module, nn.Linear)
    ]
    if not layers:
        raise ModelError(
            f"tuning.lora.projector: the projector of {type(full_model).__name__} has no linear"
            " layer that an adapter could take; leave the key out"
        )
    return layers


def compute_image_features(
    full_model: Any, inputs: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """What the whole class keeps of the pictures in a batch while its language model runs, and of
    it what that reads."""
    names = set(inspect.signature(full_model.get_image_features).parameters)
    output = full_model.get_image_features(
        **{key: value for key, value in inputs.items() if key in names}, return_dict=True
    )
    pooled = output.pooler_output
    joined = torch.cat(list(pooled), dim=0) if isinstance(pooled, list | tuple) else pooled
    return output, [joined, *tree_iter(getattr(output, "deepstack_features", None) or ())]


def find_read_weights(features: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the weights that features depend on, found in autograd's graph."""
    nodes = [feature.grad_fn for feature in features]
    visited: set[Any] = set()
    read_ids: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            # where a gradient is added up for a weight
            read_ids.add(id(getattr(node, "variable", None)))
            nodes += [function for function, _ in node.next_functions]
    return read_ids
