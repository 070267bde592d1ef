"""How much there is to train on, roughly and in seconds: rows and characters of a source, from a sample."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.build.mixing import exact_shares
from sft_play.data.sources.examples import rows_of
from sft_play.data.sources.files import Part, data_files, find_source, read_part
from sft_play.data.sources.messages import texts_in
from sft_play.data.sources.raw import BadRow, is_gzipped
from sft_play.errors import SftPlayError

CHARACTERS_PER_TOKEN = 4.0
"""English text by a tokenizer with a large vocabulary; code and other languages have fewer characters per token."""
SAMPLE_ROWS = 20_000
"""Rows that are read of each file; the rest of a longer one is taken to be like them."""
SAMPLE_CHARACTERS = 32 << 20
"""Characters that are read of each file at most."""
_SAMPLE_KEPT = 1_000
SAMPLE_FILES = 20
"""Files that are read at most; the others are taken to have as many rows per byte."""


@dataclass(frozen=True)
class RoughSize:
    """Rows of the training data and their characters, estimated."""

    rows: int
    characters: int

    @property
    def tokens(self) -> int:
        """Tokens by the usual length of one."""
        return int(self.characters / CHARACTERS_PER_TOKEN)


def rough_size(data: DataConfig, *, text_wanted: bool = False) -> RoughSize | None:
    """The size of the training data, of several sources that of an epoch; None where a file is missing, cannot be
    read, or is on the hub."""
    if not data.sources:
        return None if data.train_path is None else _of_source(data.train_path, data.encoding, text_wanted=text_wanted)
    sizes = [_of_source(source.path, data.encoding, text_wanted=text_wanted) for source in data.sources]
    known = [(source, size) for source, size in zip(data.sources, sizes, strict=True) if size is not None]
    if len(known) < len(sizes):
        return None
    counts = [min(size.rows, source.max_rows or size.rows) for source, size in known]
    weights = [source.weight for source, _ in known]
    shares = [count if weight is None else weight for count, weight in zip(counts, weights, strict=True)]
    per_epoch = exact_shares(shares, sum(counts))
    characters = [count * size.characters / size.rows for count, (_, size) in zip(per_epoch, known, strict=True)]
    return RoughSize(sum(counts), round(sum(characters)))


def _of_source(given: str, encoding: str, *, text_wanted: bool) -> RoughSize | None:
    with contextlib.suppress(OSError, SftPlayError, ValueError, RuntimeError):  # an estimate never stops a plan
        parts = data_files(find_source(given, encoding=encoding), text_wanted=text_wanted)
        if any(part.kind != "auto" for part in parts):
            return None
        file_bytes = [part.path.stat().st_size for part in parts]
        read = [size for part in parts[:SAMPLE_FILES] if (size := _of_file(part))]
        share = sum(file_bytes) / max(1, sum(file_bytes[:SAMPLE_FILES]))
        rows, characters = sum(size.rows for size in read), sum(size.characters for size in read)
        return RoughSize(round(rows * share), round(characters * share)) if rows else None
    return None


def _of_file(part: Part) -> RoughSize | None:
    rows = characters = 0
    sample: list[dict[str, Any]] = []
    for taken, row in enumerate(read_part(part), start=1):
        if not isinstance(row, BadRow):
            rows, characters = rows + 1, characters + sum(map(len, texts_in(row.data)))
            if len(sample) < _SAMPLE_KEPT and characters < SAMPLE_CHARACTERS:
                sample.append(row.data)
        if taken == SAMPLE_ROWS or characters >= SAMPLE_CHARACTERS:
            break
    else:  # the whole file was read: its figures are exact
        return RoughSize(rows, characters) if rows else None
    count = _rows(part, sample, at_least=rows) if sample else rows
    return RoughSize(count, int(count * characters / rows)) if rows else None


def _rows(part: Part, sample: list[dict[str, Any]], *, at_least: int) -> int:
    """Rows of a large file: counted, or by the bytes that a row takes."""
    if (counted := rows_of([part])) is not None:
        return counted
    row_bytes = sum(len(json.dumps(row, ensure_ascii=False, default=str).encode()) for row in sample) / len(sample)
    packed = 4 if is_gzipped(part.path) else 1  # JSON compresses to about a quarter
    return max(at_least, int(part.path.stat().st_size * packed / row_bytes))
