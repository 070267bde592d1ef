"""How much there is to train on, roughly and at once: rows and characters of a data file, before anything is read."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.files import BadRow, read_rows
from sft_play.errors import SftPlayError

CHARACTERS_PER_TOKEN = 4.0
"""English text by a tokenizer with a large vocabulary; code and other languages have fewer."""
SAMPLE_BYTES = 32 * 2**20
"""Larger files are sampled from their beginning and taken to go on like it."""
SAMPLE_ROWS = 20_000


@dataclass(frozen=True)
class RoughSize:
    """Rows of the training data and their characters, as far as they could be told."""

    rows: int
    characters: int

    @property
    def tokens(self) -> int:
        """Tokens by the usual length of one."""
        return int(self.characters / CHARACTERS_PER_TOKEN)


def rough_size(data: DataConfig, *, text_wanted: bool = False) -> RoughSize | None:
    """The size of the training file; None where it is not there, or not one file that can be read."""
    with contextlib.suppress(OSError, SftPlayError, ValueError, RuntimeError):
        path = Path(data.train_path).expanduser()
        if path.is_file():
            return _of_file(path, text_wanted)
    return None


def _of_file(path: Path, text_wanted: bool) -> RoughSize | None:
    total = path.stat().st_size
    if total > SAMPLE_BYTES and path.suffix == ".json":
        return None  # an array has to be read whole
    found = itertools.islice(read_rows(path, split="train", text_wanted=text_wanted), SAMPLE_ROWS)
    sizes = [_characters(row.data) for row in found if not isinstance(row, BadRow)]
    if not sizes:
        return None
    if len(sizes) < SAMPLE_ROWS:
        return RoughSize(len(sizes), sum(sizes))
    lines = _lines(path)
    return RoughSize(lines, int(lines * sum(sizes) / len(sizes)))


def _characters(value: Any) -> int:
    """Characters of all texts in a row, keys left out."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(item) for item in value.values())
    return sum(_characters(item) for item in value) if isinstance(value, list) else 0


def _lines(path: Path) -> int:
    count = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
    return count
