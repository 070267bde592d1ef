"""Rows that are nearly the same: MinHash finds candidates among many, whose Jaccard similarity is then computed.

A text is the set of its runs of `NGRAM` words, in any case of letters. Scripts that put no space between words count by
the letter.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.process_report import said_in
from sft_play.data.sources.columns import WORD_PATTERN
from sft_play.data.sources.files import list_parts, find_source, read_part
from sft_play.data.sources.formats import Example, Text, recognise_format, to_example
from sft_play.data.sources.messages import iter_texts
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError

NGRAM = 3
# Of a user's turn, or of a text in a benchmark's row, by which rows are compared: fewer are the same by chance.
LEAST_WORDS = 8
# A pair whose similarity is this far above the threshold is missed with at most this probability.
MARGIN, MISSED = 0.05, 1e-4
_MOST_BANDS, _MOST_ROWS = 16, 5
# Texts that are kept under one key (what more share is a form), and candidates that are compared.
_MOST_ALIKE, _MOST_COMPARED = 256, 32
# What a text takes beside its shingles (measured on GSM8K's 7,473 rows).
_INDEX_BYTES = 2_300
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
Shingles = np.ndarray[Any, np.dtype[np.uint64]]


@functools.lru_cache(maxsize=1 << 17)
def _hash_of(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def words_of(text: str) -> list[str]:
    """The words by which texts are compared; a text without any is one word."""
    return WORD_PATTERN.findall(text.lower()) or [text.strip()]


def shingles_of(text: str) -> Shingles:
    """The set of a text's runs of `NGRAM` words, or of all its words where it has fewer: 64-bit hashes in order."""
    words = words_of(text)
    hashes = np.fromiter(map(_hash_of, words), dtype=np.uint64, count=len(words))
    count = min(NGRAM, len(hashes))
    runs = np.full(len(hashes) - count + 1, count, dtype=np.uint64)
    for place in range(count):  # arithmetic modulo 2**64
        runs = (runs ^ (runs >> np.uint64(29))) * _MULTIPLIERS[place] + hashes[place : place + len(runs)]
    runs.sort()
    unique: Shingles = runs[np.append(True, runs[1:] != runs[:-1])]
    return unique


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


@dataclass(frozen=True)
class Sketch:
    """A text as it is compared: its shingles, and its MinHash in bands, of which similar texts share one."""

    shingles: Shingles
    bands: tuple[bytes, ...]


class Sketches:
    """Makes sketches that fit one threshold."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash  # takes half a second to import, with scipy

        self.threshold = threshold
        self.bands, rows = bands_of(threshold)
        self._minhash = MinHash(num_perm=self.bands * rows, hashfunc=int)
        self._width = rows * self._minhash.hashvalues.itemsize

    def of(self, text: str) -> Sketch:
        """The sketch of a text."""
        shingles, width = shingles_of(text), self._width
        self._minhash.clear()
        self._minhash.update_batch((shingles >> np.uint64(32)).tolist())
        values = self._minhash.hashvalues.tobytes()
        return Sketch(shingles, tuple(values[at : at + width] for at in range(0, len(values), width)))


class Similar:
    """Texts that were added, and of another the most similar one, if their similarity reaches the threshold.
    datasketch's MinHashLSH finds the same, with four times the memory and ten times the time for it."""

    def __init__(self, sketches: Sketches) -> None:
        self._threshold = sketches.threshold
        self._tables: list[dict[bytes, tuple[int, ...] | list[int]]] = [{} for _ in range(sketches.bands)]
        self._texts: list[tuple[Shingles, str]] = []
        # Of memory, about.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, sketch: Sketch, where: str) -> None:
        """Add the text of a row at this place."""
        alone = (len(self._texts),)  # one for all tables: nearly every key is one text's
        for table, key in zip(self._tables, sketch.bands, strict=True):
            numbers = table.setdefault(key, alone)
            if isinstance(numbers, list):
                numbers += alone[: _MOST_ALIKE - len(numbers)]
            elif numbers is not alone:
                table[key] = [*numbers, *alone]
        self._texts.append((sketch.shingles, where))
        self.bytes += _INDEX_BYTES + sketch.shingles.nbytes

    def nearest(self, sketch: Sketch) -> tuple[float, str] | None:
        """Similarity and place of the most similar text, the first of several; None where none is similar enough."""
        shared = Counter(
            number for table, key in zip(self._tables, sketch.bands, strict=True) for number in table.get(key, ())
        )
        likeness, number = max(
            ((similarity_of(sketch.shingles, self._texts[number][0]), -number)
             for number, _ in shared.most_common(_MOST_COMPARED)),
            default=(0.0, 0),
        )  # fmt: skip
        return (likeness, self._texts[-number][1]) if likeness >= self._threshold else None


def whole_text(example: Example) -> str:
    """All of a row but system prompts and tools, which many rows share."""
    if isinstance(example, Text):
        return example.text
    return said_in(turn for turn in example.messages if turn.get("role") not in ("system", "developer"))


def long_questions(example: Example) -> list[str]:
    """Each turn of the user, by which a row is compared too: a benchmark's row may have another answer, or none."""
    asked = (turn.get("content") for turn in getattr(example, "messages", ()) if turn.get("role") == "user")
    return [text for text in map(str, asked) if _is_long(text)]


def _is_long(text: str) -> bool:
    return len(words_of(text)) >= LEAST_WORDS


def texts_to_compare_with(value: str, data: DataConfig) -> Iterator[tuple[str, str]]:
    """The texts of every row of a file with their places; of no known format, all long ones. Raises DataError."""
    try:
        for part in list_parts(find_source(value, encoding=data.encoding), split="test"):
            for row in read_part(part):
                if isinstance(row, RawRow):
                    shape = recognise_format(row.data, {})
                    example = BadRow("", "") if shape is None else to_example(row, shape, data)
                    if isinstance(example, BadRow):
                        texts = list(filter(_is_long, iter_texts(row.data)))
                    else:
                        texts = [whole_text(example), *long_questions(example)]
                    yield from ((text, row.where) for text in texts)
    except DataError as error:
        raise DataError(f"data.process.compare_with: {error}") from None
