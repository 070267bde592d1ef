"""Which rows are packed into one (best-fit, without a cut), rows of like length together, and what padding each costs.

All of it is arithmetic on lengths: no row is read or copied here. Lengths are tokens, indices those of the data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sft_play.config.schema import RunConfig

Indices = npt.NDArray[np.int64]

_WORD_BITS = 512
"""Lengths that one word of the set of spaces stands for: two levels of such words reach 262,144 tokens at once."""


def wants_packing(config: RunConfig) -> bool:
    """Whether chats are packed: `task_mode: cpt` cuts its text into full blocks, in which nothing is left to fill."""
    return config.data.packing == "best_fit" and config.task_mode != "cpt"


@dataclass(frozen=True)
class Packs:
    """Rows by pack: pack n holds `indices[offsets[n]:offsets[n + 1]]`, `tokens[n]` tokens together."""

    offsets: Indices
    indices: Indices
    tokens: Indices

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> Indices:
        """The rows of one pack, in the order of the data set."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.indices[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[Indices]:
        return (self[number] for number in range(len(self)))


def best_fit(lengths: npt.ArrayLike, capacity: int) -> Packs:
    """Rows in packs of at most `capacity` tokens, no row cut: the longest first, each into the fullest pack that has
    room for it (best-fit decreasing: at most 11/9 of the fewest packs there can be, and a rest of a pack).

    Rows of one length are dealt together and the spaces are a set of bits, so that a million rows take seconds; the
    same lengths give the same packs everywhere.

    Raises:
        ValueError: a row is empty or longer than a pack.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(f"rows of {sizes.min()} to {sizes.max()} tokens; a pack takes rows of 1 to {capacity}")
    order = np.argsort(-sizes, kind="stable")  # stable: rows of one length stay in the data set's order
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[order] = _dealt(sizes[order], capacity)
    count = int(pack_of.max()) + 1 if len(sizes) else 0
    rows = np.bincount(pack_of, minlength=count)
    tokens = np.bincount(pack_of, weights=sizes, minlength=count).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    return Packs(offsets, np.argsort(pack_of, kind="stable").astype(np.int64), tokens)


def joined(parts: Sequence[Packs]) -> Packs:
    """The packs of several data sets, one after the other, as those of one."""
    rows = np.cumsum([0, *(len(part.indices) for part in parts)])
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, rows, strict=False)]
    indices = [part.indices + start for part, start in zip(parts, rows, strict=False)]
    tokens = [part.tokens for part in parts]
    return Packs(np.concatenate([*offsets, rows[-1:]]), np.concatenate(indices), np.concatenate(tokens))


def _dealt(falling: Indices, capacity: int) -> list[int]:
    """The pack of each row, for lengths in falling order."""
    values, counts = np.unique(-falling, return_counts=True)
    open_packs: dict[int, list[int]] = {}
    spaces = _Spaces(capacity)
    packs: list[int] = []
    opened = 0
    for length, left in zip((-values).tolist(), counts.tolist(), strict=True):
        while left:
            space = spaces.at_least(length)
            if space is None:  # no open pack has room: as many new ones as this length fills
                new = -(-left // (capacity // length))  # rounded up
                space, open_packs[capacity] = capacity, list(range(opened + new - 1, opened - 1, -1))
                spaces.add(capacity)
                opened += new
            left -= _fill(open_packs, spaces, packs, space=space, length=length, rows=left)
    return packs


def _fill(
    open_packs: dict[int, list[int]], spaces: _Spaces, packs: list[int], *, space: int, length: int, rows: int
) -> int:
    """Put rows of one length into the packs that have `space` left, each filled before the next; how many went in."""
    waiting = open_packs[space]
    each = space // length  # rows of this length that one of these packs takes
    whole = min(len(waiting), rows // each)
    taken = [waiting.pop() for _ in range(whole)]
    packs += taken if each == 1 else [pack for pack in taken for _ in range(each)]
    _put(open_packs, spaces, space - each * length, taken)
    done, rest = whole * each, rows - whole * each
    if waiting and rest:  # fewer than fill one more
        pack = waiting.pop()
        packs += [pack] * rest
        _put(open_packs, spaces, space - rest * length, [pack])
        done = rows
    if not waiting:
        del open_packs[space]
        spaces.remove(space)
    return done


def _put(open_packs: dict[int, list[int]], spaces: _Spaces, space: int, packs: list[int]) -> None:
    """Note packs that have `space` left; full ones are dropped."""
    if packs and space:
        open_packs.setdefault(space, []).extend(packs)
        spaces.add(space)


class _Spaces:
    """A set of numbers up to `largest` that finds its smallest member from a number on: bits in words of bits."""

    def __init__(self, largest: int) -> None:
        self._words = [0] * (largest // _WORD_BITS + 1)
        self._some = 0
        """Bit n: word n is not empty."""

    def add(self, number: int) -> None:
        """Put a number in."""
        word, bit = divmod(number, _WORD_BITS)
        self._words[word] |= 1 << bit
        self._some |= 1 << word

    def remove(self, number: int) -> None:
        """Take a number out that is in."""
        word, bit = divmod(number, _WORD_BITS)
        self._words[word] ^= 1 << bit
        if not self._words[word]:
            self._some ^= 1 << word

    def at_least(self, number: int) -> int | None:
        """The smallest member that is not below `number`."""
        word, bit = divmod(number, _WORD_BITS)
        here = self._words[word] >> bit
        if here:
            return number + _lowest(here)
        later = self._some >> (word + 1)
        if not later:
            return None
        word += 1 + _lowest(later)
        return word * _WORD_BITS + _lowest(self._words[word])


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def grouped(order: npt.ArrayLike, lengths: npt.ArrayLike, *, window: int) -> Indices:
    """The order with each `window` of rows (those of one optimizer step) sorted by length, the longest first.

    Micro-batches are dealt from a step's rows one after the other, to the ranks in turn: so the rows of a micro-batch,
    and the micro-batches that ranks have at the same time, are of like length.
    """
    rows = np.asarray(order, dtype=np.int64)
    step = np.arange(len(rows)) // window
    return rows[np.lexsort((-np.asarray(lengths, dtype=np.int64)[rows], step))]


def padding_shares(
    lengths: npt.ArrayLike, *, micro_batch: int, effective_batch: int, max_seq_len: int, seed: int
) -> dict[str, float]:
    """Share of padded tokens in an epoch for each choice: `random` batches, rows `grouped` by length within a step,
    and `best_fit` packs (grouped too). Rows that are longer than `max_seq_len` count as cut to it."""
    sizes = np.minimum(np.asarray(lengths, dtype=np.int64), max_seq_len)
    if not len(sizes):
        return {"random": 0.0, "grouped": 0.0, "best_fit": 0.0}
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(sizes))
    packed = best_fit(sizes, max_seq_len).tokens
    of_packs = grouped(draw.permutation(len(packed)), packed, window=effective_batch)
    return {
        "random": _padding(sizes[order], micro_batch),
        "grouped": _padding(sizes[grouped(order, sizes, window=effective_batch)], micro_batch),
        "best_fit": _padding(packed[of_packs], micro_batch),
    }


def _padding(sizes: Any, micro_batch: int) -> float:
    starts = np.arange(0, len(sizes), micro_batch)
    rows = np.diff(np.append(starts, len(sizes)))
    places = int((np.maximum.reduceat(sizes, starts) * rows).sum())
    return 1 - int(sizes.sum()) / places
