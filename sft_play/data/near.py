"""Rows that are nearly the same: MinHash finds candidates among many, whose Jaccard similarity is then computed.

A text is the set of its runs of `NGRAM` words, in any case of letters. Scripts that put no space between words count by
the letter.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.process_report import text_of
from sft_play.data.sources.files import data_files, find_source, read_part
from sft_play.data.sources.formats import Example, Text, recognise, to_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError

NGRAM = 3
LEAST_WORDS = 8
"""Of a user's turn, or of a text in a benchmark's row, by which rows are compared: fewer are the same by chance."""
MARGIN, MISSED = 0.05, 1e-4
"""A pair whose similarity is this far above the threshold is missed with at most this probability."""
_MOST_BANDS, _MOST_ROWS = 16, 5
_BY_LETTER = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_BY_LETTER}]|[^\W{_BY_LETTER}]+")
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
Shingles = np.ndarray[Any, np.dtype[np.uint64]]


@functools.lru_cache(1 << 16)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def words_of(text: str) -> list[str]:
    """The words by which texts are compared; a text without any is one word."""
    return _WORD.findall(text.lower()) or [text.strip()]


def shingles_of(text: str) -> Shingles:
    """The set of a text's runs of `NGRAM` words, or of all its words where it has fewer: 64-bit hashes in order."""
    hashes = np.array([_hash(word) for word in words_of(text)], dtype=np.uint64)
    count = min(NGRAM, len(hashes))
    runs = np.full(len(hashes) - count + 1, count, dtype=np.uint64)
    for place in range(count):  # arithmetic modulo 2**64
        runs = (runs ^ (runs >> np.uint64(29))) * _MULTIPLIERS[place] + hashes[place : place + len(runs)]
    return np.unique(runs)


def similarity_of(one: Shingles, other: Shingles) -> float:
    """Jaccard: how many of both sets' members are in both."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def bands_of(threshold: float) -> tuple[int, int]:
    """Bands and rows of the index: the longest rows, which let the fewest other pairs through, of few bands."""
    sure = min(threshold + MARGIN, (1 + threshold) / 2)
    needed = {rows: math.ceil(math.log(MISSED) / math.log(1 - sure**rows)) for rows in range(2, _MOST_ROWS + 1)}
    rows = max((rows for rows, bands in needed.items() if bands <= _MOST_BANDS), default=2)
    return needed[rows], rows


class Similar:
    """Texts that were added, and of another the most similar one, if their similarity is at least `threshold`."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash, MinHashLSH  # takes a second to import, with scipy

        bands, rows = bands_of(threshold)
        self._threshold = threshold
        self._empty = MinHash(num_perm=bands * rows, hashfunc=int)
        self._index = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
        self._texts: list[tuple[Shingles, str]] = []

    def add(self, text: str, where: str) -> None:
        """Add the text of a row at this place."""
        shingles = shingles_of(text)
        self._index.insert(len(self._texts), self._sketch(shingles))
        self._texts.append((shingles, where))

    def nearest(self, text: str) -> tuple[float, str] | None:
        """Similarity and place of the most similar text, the first of several; None where none is similar enough."""
        shingles = shingles_of(text)
        keys = self._index.query(self._sketch(shingles))
        likeness, key = max(((similarity_of(shingles, self._texts[key][0]), -key) for key in keys), default=(0.0, 0))
        return (likeness, self._texts[-key][1]) if likeness >= self._threshold else None

    def _sketch(self, shingles: Shingles) -> Any:
        sketch = self._empty.copy()
        sketch.update_batch((shingles >> np.uint64(32)).tolist())
        return sketch


def compared_texts(example: Example) -> list[str]:
    """What a row is compared by: first all of it but system prompts and tools, which many rows share; then each turn of
    the user, since a benchmark's row may have another answer, or none."""
    if isinstance(example, Text):
        return [example.text]
    turns = [turn for turn in example.messages if turn.get("role") not in ("system", "developer")]
    asked = [str(turn.get("content") or "") for turn in turns if turn.get("role") == "user"]
    return [text_of(turns), *(text for text in asked if _is_long(text))]


def _is_long(text: str) -> bool:
    return len(words_of(text)) >= LEAST_WORDS


def texts_to_compare_with(value: str, data: DataConfig) -> Iterator[tuple[str, str]]:
    """The texts of every row of a file, each with the row's place; all that are long, of a row of no known format.

    Raises:
        DataError: it cannot be read.
    """
    try:
        for part in data_files(find_source(value, encoding=data.encoding), split="test"):
            for row in read_part(part):
                if isinstance(row, RawRow):
                    shape = recognise(row.data, {})
                    example = BadRow("", "") if shape is None else to_example(row, shape, data)
                    texts = (
                        filter(_is_long, _strings(row.data)) if isinstance(example, BadRow) else compared_texts(example)
                    )
                    yield from ((text, row.where) for text in texts)
    except DataError as error:
        raise DataError(f"data.process.compare_with: {error}") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
