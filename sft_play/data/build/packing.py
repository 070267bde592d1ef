"""Which rows are packed into one (best-fit, without a cut), rows of like length together, and what padding each costs.

All of it is arithmetic on lengths: no row is read or copied here. Lengths are tokens, indices those of the data set.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sft_play.config.schema import RunConfig

Indices = npt.NDArray[np.int64]


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
    room for it (best-fit decreasing: at most 11/9 of the fewest packs there can be). Rows of one length are dealt
    together: a million take seconds. Raises ValueError where a row is empty or longer than a pack."""
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
    values, counts = np.unique(-falling, return_counts=True)
    # Open packs by the space that they have left, and these spaces in order.
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []

    def put(space: int, packs: list[int]) -> None:
        if packs and space:  # full ones are dropped
            if space not in by_space:
                by_space[space] = []
                bisect.insort(spaces, space)
            by_space[space] += packs

    pack_of_row: list[int] = []
    opened = 0
    for length, left in zip((-values).tolist(), counts.tolist(), strict=True):
        while left:
            at = bisect.bisect_left(spaces, length)
            if at == len(spaces):  # no open pack has room: as many new ones as this length fills
                new = -(-left // (capacity // length))  # rounded up
                put(capacity, list(range(opened + new - 1, opened - 1, -1)))
                opened += new
            space = spaces[at]
            waiting, each = by_space[space], space // length  # rows of this length that one of these packs takes
            taken = [waiting.pop() for _ in range(min(len(waiting), left // each))]
            pack_of_row += taken if each == 1 else [pack for pack in taken for _ in range(each)]
            left -= len(taken) * each
            put(space - each * length, taken)
            if waiting and left:  # fewer than fill one more
                pack = waiting.pop()
                pack_of_row += [pack] * left
                put(space - left * length, [pack])
                left = 0
            if not waiting:
                del by_space[space]
                del spaces[bisect.bisect_left(spaces, space)]
    return pack_of_row


def grouped(order: npt.ArrayLike, lengths: npt.ArrayLike, *, window: int) -> Indices:
    """The order with each `window` of rows (those of one optimizer step) sorted by length, the longest first.
    Micro-batches are dealt from a step's rows one after the other, to the ranks in turn: so the rows of a micro-batch,
    and the micro-batches that ranks have at the same time, are of like length."""
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
