"""How much there is to train on, roughly and in seconds: rows and characters of a source, from a sample."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from sft_play.config.schema import DataConfig
from sft_play.data.sources.examples import count_part_rows
from sft_play.data.sources.files import FilePart, find_source, list_parts, read_part
from sft_play.data.sources.messages import iter_texts
from sft_play.data.sources.raw import BadRow, is_gzipped
from sft_play.errors import SftPlayError

# English text by a tokenizer with a large vocabulary; code and other languages have fewer characters per token.
CHARACTERS_PER_TOKEN = 4.0
# Rows that are read of each file; the rest of a longer one is taken to be like them.
SAMPLE_ROWS = 20_000
# Characters that are read of each file at most.
SAMPLE_CHARACTERS = 32 << 20
# Files that are read at most; the others are taken to have as many rows per byte.
SAMPLE_FILES = 20


@dataclass(frozen=True)
class EstimatedSize:
    """Rows of the training data and their characters, estimated."""

    rows: int
    characters: int

    @property
    def tokens(self) -> int:
        """Tokens by the usual length of one."""
        return int(self.characters / CHARACTERS_PER_TOKEN)


def estimate_size(data: DataConfig, *, wants_text: bool = False) -> EstimatedSize | None:
    """Estimate the size of the training data; None if a file is missing, cannot be read, or is on the hub."""
    sources = [(source.path, source.max_rows) for source in data.sources] or [(data.train_path or "", None)]
    rows = characters = 0.0
    for path, max_rows in sources:
        size = _estimate_source(path, data.encoding, wants_text=wants_text)
        if size is None:
            return None
        used_rows = min(size.rows, max_rows or size.rows)
        rows, characters = rows + used_rows, characters + size.characters * used_rows / size.rows
    return EstimatedSize(round(rows), round(characters))


def _estimate_source(source_path: str, encoding: str, *, wants_text: bool) -> EstimatedSize | None:
    with contextlib.suppress(OSError, SftPlayError, ValueError, RuntimeError):  # an estimate never stops a plan
        parts = list_parts(find_source(source_path, encoding=encoding), wants_text=wants_text)
        if any(part.kind != "auto" for part in parts):
            return None
        file_bytes = [part.path.stat().st_size for part in parts]
        file_sizes = [_estimate_file(part) for part in parts[:SAMPLE_FILES]]
        share = sum(file_bytes) / max(1, sum(file_bytes[:SAMPLE_FILES]))
        rows, characters = sum(size.rows for size in file_sizes), sum(size.characters for size in file_sizes)
        return EstimatedSize(round(rows * share), round(characters * share)) if rows else None
    return None


def _estimate_file(part: FilePart) -> EstimatedSize:
    rows = characters = 0
    for rows_read, row in enumerate(read_part(part), start=1):
        if not isinstance(row, BadRow):
            rows, characters = rows + 1, characters + sum(map(len, iter_texts(row.data)))
        # a longer file: by lines, or by bytes
        if rows and (rows_read == SAMPLE_ROWS or characters >= SAMPLE_CHARACTERS):
            compression = 4 if is_gzipped(part.path) else 1  # JSON compresses to about a quarter
            count = count_part_rows([part]) or part.path.stat().st_size * compression * rows // max(1, characters)
            return EstimatedSize(max(rows, count), max(rows, count) * characters // rows)
    return EstimatedSize(rows, characters)
