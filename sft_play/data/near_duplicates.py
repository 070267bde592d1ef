"""Rows that are nearly the same: MinHash finds candidates among many, whose Jaccard similarity is
then computed.

A text is the set of its runs of `NGRAM` words, in any case of letters. Scripts that put no space
between words count by the letter.
"""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.sources.columns import WORD_PATTERN
from sft_play.data.sources.examples import messages_text
from sft_play.data.sources.files import find_source, read_rows
from sft_play.data.sources.formats import Example, Text, recognise_format, to_example
from sft_play.data.sources.messages import iter_texts
from sft_play.data.sources.raw import BadRow

NGRAM = 3
# Of a user's turn, or of a text in a benchmark's row, by which rows are compared: fewer are the
# same by chance.
MIN_COMPARED_WORDS = 8
# A pair whose similarity is this far above the threshold is missed with at most this probability.
SIMILARITY_MARGIN, MISS_PROBABILITY = 0.05, 1e-4
_MAX_BANDS, _MAX_BAND_ROWS = 16, 5
# Texts that are kept under one key (what more share is a form), and candidates that are compared.
_MAX_TEXTS_PER_KEY, _MAX_CANDIDATES = 256, 32
# What a text takes beside its shingles (measured on GSM8K's 7,473 rows).
_INDEX_BYTES_PER_TEXT = 2_300
Shingles = np.ndarray[Any, np.dtype[np.uint64]]

# What stands between words of ASCII, as spaces: a table and a split are three times as quick as the
# pattern that other scripts need.
_ASCII_WORD_BYTES = bytes(
    code if code < 128 and WORD_PATTERN.match(chr(code)) else ord(" ") for code in range(256)
)
# Odd, so that no bit of a word's hash is lost: 2**64 over the golden ratio.
_RUN_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def comparison_words(text: str) -> list[bytes]:
    """The words by which texts are compared; a text without any is one word."""
    if text.isascii():
        return text.lower().encode().translate(_ASCII_WORD_BYTES).split() or [text.strip().encode()]
    words = WORD_PATTERN.findall(text.lower()) or [text.strip()]
    return [word.encode("utf-8", "replace") for word in words]


@functools.lru_cache(maxsize=1 << 19)  # 130 MB; most words of a file come often
def _hash_word(word: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")


def compute_shingles(text: str) -> Shingles:
    """The set of a text's runs of `NGRAM` words, or of all its words where it has fewer: 64-bit
    hashes in order."""
    words = comparison_words(text)
    hashes = np.fromiter(map(_hash_word, words), np.uint64, len(words))
    count = min(NGRAM, len(words))
    run_count = len(words) - count + 1
    runs = hashes[:run_count]
    for offset in range(1, count):
        runs = runs * _RUN_MULTIPLIER + hashes[offset : offset + run_count]
    runs.sort()
    distinct: Shingles = runs[np.append(True, runs[1:] != runs[:-1])]
    return distinct


def jaccard_similarity(first: Shingles, second: Shingles) -> float:
    """Jaccard: how many of both sets' members are in both."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def choose_bands(threshold: float) -> tuple[int, int]:
    """Choose the bands of the index and the rows of each: as many rows as few bands allow, since
    longer bands let fewer other pairs through."""
    sure_similarity = min(threshold + SIMILARITY_MARGIN, (1 + threshold) / 2)
    bands_by_rows = {
        rows: math.ceil(math.log(MISS_PROBABILITY) / math.log(1 - sure_similarity**rows))
        for rows in range(2, _MAX_BAND_ROWS + 1)
    }
    rows_per_band = max(
        (rows for rows, bands in bands_by_rows.items() if bands <= _MAX_BANDS), default=2
    )
    return bands_by_rows[rows_per_band], rows_per_band


@dataclass(frozen=True)
class TextSketch:
    """A text as it is compared: its shingles, and its MinHash in bands. Similar texts have a band
    in common."""

    shingles: Shingles
    bands: tuple[bytes, ...]


class SketchMaker:
    """Makes sketches that fit one threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.bands, rows_per_band = choose_bands(threshold)
        draw, shape = np.random.default_rng(1), (self.bands * rows_per_band, 1)
        # odd multipliers: each function orders all hashes anew, and keeps them apart
        self._multipliers = draw.integers(1 << 32, size=shape, dtype=np.uint32) | np.uint32(1)
        self._offsets = draw.integers(1 << 32, size=shape, dtype=np.uint32)
        self._width = rows_per_band * self._offsets.itemsize

    def sketch(self, text: str) -> TextSketch:
        """The sketch of a text."""
        shingles, width = compute_shingles(text), self._width
        hashes = (shingles >> np.uint64(32)).astype(np.uint32)
        values = (hashes * self._multipliers + self._offsets).min(axis=1).tobytes()
        return TextSketch(
            shingles,
            tuple(values[offset : offset + width] for offset in range(0, len(values), width)),
        )


class SimilarityIndex:
    """Indexes texts, and finds the one most similar to another text, if their similarity reaches
    the threshold. datasketch's MinHashLSH finds the same, with four times the memory and ten times
    the time for it, and its MinHash takes three times as long as the product in `sketch`.
    """

    def __init__(self, sketch_maker: SketchMaker) -> None:
        self._threshold = sketch_maker.threshold
        self._tables: list[dict[bytes, tuple[int, ...]]] = [{} for _ in range(sketch_maker.bands)]
        self._texts: list[tuple[Shingles, str]] = []
        # About what the texts take.
        self.memory_bytes = 0

    def add(self, sketch: TextSketch, location: str) -> None:
        """Add the text of a row at this place."""
        new_entry = (len(self._texts),)  # one for all tables: nearly every key is one text's
        for table, key in zip(self._tables, sketch.bands, strict=True):
            entries = table.setdefault(key, new_entry)
            if entries is not new_entry and len(entries) < _MAX_TEXTS_PER_KEY:
                table[key] = entries + new_entry
        self._texts.append((sketch.shingles, location))
        self.memory_bytes += _INDEX_BYTES_PER_TEXT + sketch.shingles.nbytes

    def nearest(self, sketch: TextSketch) -> tuple[float, str] | None:
        """Similarity and place of the most similar text, the first of several; None where none is
        similar enough."""
        candidates = [
            index
            for table, key in zip(self._tables, sketch.bands, strict=True)
            for index in table.get(key, ())
        ]
        if not candidates:  # most texts are like no other
            return None
        similarity, index = max(
            (
                (jaccard_similarity(sketch.shingles, self._texts[index][0]), -index)
                for index, _ in Counter(candidates).most_common(_MAX_CANDIDATES)
            )
        )
        return (similarity, self._texts[-index][1]) if similarity >= self._threshold else None


def compared_texts(example: Example) -> Iterator[str]:
    """Yield the texts by which a row is compared: first all of it but system prompts and tools,
    which many rows share; then each long turn of the user, since a benchmark's row may have another
    answer, or none. Texts about different images have no words in common."""
    if isinstance(example, Text):
        yield example.text
        return
    turns = [turn for turn in example.messages if turn["role"] != "system"]
    questions = [str(turn.get("content")) for turn in turns if turn["role"] == "user"]
    texts = [messages_text(turns), *filter(_is_long, questions)]
    if example.images:
        digests = "".join(picture.digest for picture in example.images)
        tag = hashlib.sha256(digests.encode()).hexdigest()[:8]
        texts = [WORD_PATTERN.sub(rf" {tag}\g<0>", text) for text in texts]
    yield from texts


def _is_long(text: str) -> bool:
    return len(comparison_words(text)) >= MIN_COMPARED_WORDS


def read_compared_texts(path_or_hub_id: str, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield the texts by which the rows of a file are compared, each with its place; every long
    text of a row that has no known format. Raises DataError where the file cannot be read."""
    for row in read_rows(find_source(path_or_hub_id, encoding=data.encoding), split="test"):
        if isinstance(row, BadRow):
            continue
        row_format = recognise_format(row.data)
        texts: Iterator[str] = filter(_is_long, iter_texts(row.data))
        if row_format is not None:
            example = to_example(row, row_format, data)
            if not isinstance(example, BadRow):
                texts = compared_texts(example)
        yield from ((text, row.where) for text in texts)
