"""Questions about a plan: a grid of settings (`WHATIF`), and the largest that fits (`MAX`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sft_play.errors import ConfigError
from sft_play.log import one_line

Question = Literal["seq_len", "batch", "model"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
MOST_CELLS = 200
SEQ_STEP = 64
LONGEST = 1 << 24
"""Sequences longer than this many tokens are not tried."""


@dataclass(frozen=True)
class Largest:
    """The answer to `MAX`: None where not even the smallest fits."""

    what: Question
    value: int | str | None
    limited_by: str


def grid(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each cell of `key=v1,v2 other=a,b`: every combination.

    Raises:
        ConfigError: a word is not `key=value,value`, or there are too many combinations.
    """
    axes: list[list[str]] = []
    for word in words:
        key, equals, text = word.partition("=")
        values = _values(text)
        if not key or not equals or not all(values):
            raise ConfigError(
                f"WHATIF: {one_line(word)!r} is not key=value,value; for example WHATIF='model.max_seq_len=2048,4096'"
            )
        if any(axis[0].startswith(f"{key}=") for axis in axes):
            raise ConfigError(
                f"WHATIF names {one_line(key)} twice; give all of its values at once: {one_line(key)}=1,2"
            )
        axes.append([f"{key}={value}" for value in values])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_CELLS:
        raise ConfigError(f"WHATIF asks for {count} plans; ask for at most {MOST_CELLS}")
    return [tuple(cell) for cell in itertools.product(*axes)]


def _values(text: str) -> list[str]:
    """The text split at commas outside brackets."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def question(text: str) -> Question:
    """The question that `MAX` asks; raises ConfigError for anything else."""
    for known in QUESTIONS:
        if text == known:
            return known
    raise ConfigError(f"MAX={one_line(text)} is not one of {', '.join(QUESTIONS)}")


def largest(fits: Callable[[int], bool], *, step: int, most: int) -> int | None:
    """The largest multiple of `step` up to `most` for which `fits`, assuming that smaller ones fit too; None if the
    smallest does not. `most` itself is tried first."""
    if fits(most):
        return most
    # double until one does not fit, then halve between: a question costs a plan
    low, high = 0, 1
    while high * step < most and fits(high * step):
        low, high = high, high * 2
    high = min(high, -(-most // step))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step or None
