"""`tuning.trainable`: which of the weights that a mode would train are trained, by parts of their names.

A pattern is a run of dotted pieces of a weight's name: `q_proj`, `layers.3.mlp`. A piece may be a glob (`*_proj`) or a
range of numbers (`layers.0-3`). `lora` means the adapters, `norm` every norm.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.spelling import did_you_mean
from sft_play.training.prepare.model_spec import ModelSpec, empty_model

_WORDS = {"lora": "lora_*", "norm": "*norm*"}
"""Pieces that stand for a glob."""
_RANGE = re.compile(r"(\d+)-(\d+)")


def is_meant(pattern: str, name: str) -> bool:
    """Whether a pattern matches a weight: its pieces occur in the weight's name, one directly after the other."""
    pieces, parts = pattern.split("."), name.split(".")
    return any(
        all(_fits(piece, part) for piece, part in zip(pieces, parts[at:], strict=False))
        for at in range(len(parts) - len(pieces) + 1)
    )


def _fits(piece: str, part: str) -> bool:
    span = _RANGE.fullmatch(piece)
    if span is not None:
        return part.isdigit() and int(span[1]) <= int(part) <= int(span[2])
    return fnmatch.fnmatchcase(part, _WORDS.get(piece, piece))


def chosen(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that any of the patterns matches."""
    return [name for name in names if any(is_meant(pattern, name) for pattern in patterns)]


def trainable_note(config: RunConfig, model_spec: ModelSpec) -> str | None:
    """A line on what is trained, found without loading weights; None where it is all that the mode trains.

    Raises:
        ModelError: a pattern matches nothing that the mode trains.
    """
    patterns = config.tuning.trainable
    if patterns == "all":
        return None
    model = empty_model(model_spec, trust_remote_code=config.model.trust_remote_code)
    sizes = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    for pattern in patterns:
        if not chosen([pattern], sizes):
            raise ModelError(_no_match(config, pattern, sizes))
    kept = chosen(patterns, sizes)
    share = sum(sizes[name] for name in kept) / sum(sizes.values())
    return (
        f"Trainable: {', '.join(patterns)}: {len(kept):,} of {len(sizes):,} tensors that tuning.mode="
        f"{config.tuning.mode} trains ({share:.2%} of their parameters); the plan counts memory for all of them"
    )


def _no_match(config: RunConfig, pattern: str, names: Iterable[str]) -> str:
    # without torch's and PEFT's own words, which every name has
    pieces = {part for name in names for part in name.split(".")} - {"default", "weight", "bias", "base_model"}
    words = sorted(piece for piece in pieces if not piece.isdigit())
    near = did_you_mean(pattern.rpartition(".")[2], words)
    hint = f" ({near})" if near else ""
    layers = max((int(piece) for piece in pieces if piece.isdigit()), default=-1) + 1
    counted = f"; layers are numbered 0 to {layers - 1}" if layers else ""
    return (
        f"tuning.trainable: {one_line(pattern)} names no weight that tuning.mode={config.tuning.mode} trains{hint}. "
        f"The parts of their names are: {one_line(', '.join(words), limit=500)}{counted}"
    )


def train_only(model: nn.Module, patterns: Any) -> None:
    """Freeze every weight that no pattern matches; `all` changes nothing."""
    if patterns == "all":
        return
    for name, weight in model.named_parameters():
        if weight.requires_grad and not chosen(patterns, [name]):
            weight.requires_grad_(False)
