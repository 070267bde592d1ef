"""Pack rows without cutting them (best-fit), group rows of like length, and compute the padding
that each costs.

All of it is arithmetic on lengths: no row is read or copied here. Lengths are tokens, indices count
the rows of the data set.
"""

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sft_play.config.schema import RunConfig

RowIndices = np.ndarray[Any, np.dtype[np.int64]]


def is_packing_enabled(config: RunConfig) -> bool:
    """True if chats are packed; False with `task_mode: cpt`, whose text is cut into full blocks
    already."""
    return config.data.packing == "best_fit" and config.task_mode != "cpt"


@dataclass(frozen=True)
class Packs:
    """Rows by pack: pack n holds `indices[offsets[n]:offsets[n + 1]]`, `tokens[n]` tokens
    together."""

    offsets: RowIndices
    indices: RowIndices
    tokens: RowIndices

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> RowIndices:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.indices[self.offsets[index] : self.offsets[index + 1]]


def pack_best_fit(lengths: Sequence[int] | RowIndices, capacity: int) -> Packs:
    """Pack rows, uncut, into packs of at most `capacity` tokens: the longest first, each into the
    fullest pack that has room for it (best-fit decreasing: at most 11/9 of the fewest packs there
    can be). A million rows take seconds. Raises ValueError where a row is empty or longer than a
    pack."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(
            f"rows of {sizes.min()} to {sizes.max()} tokens; a pack takes rows of 1 to {capacity}"
        )
    # stable: rows of one length stay in the data set's order
    order = np.argsort(-sizes, kind="stable")
    # Open packs by the space that they have left, and these spaces in order.
    by_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []
    packs: list[int] = []
    pack_count = 0
    for length in sizes[order].tolist():
        space_index = bisect.bisect_left(spaces, length)
        if space_index == len(spaces):  # no open pack has room
            space, pack = capacity, pack_count
            pack_count += 1
        else:
            space = spaces[space_index]
            pack = by_space[space].pop()
            if not by_space[space]:
                del spaces[space_index]
        packs.append(pack)
        space -= length
        if space:  # full ones are dropped
            if not by_space[space]:
                bisect.insort(spaces, space)
            by_space[space].append(pack)
    pack_of = np.empty(len(sizes), dtype=np.int64)
    pack_of[order] = packs
    rows = np.bincount(pack_of, minlength=pack_count)
    return Packs(
        np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        np.argsort(pack_of, kind="stable").astype(np.int64),
        np.bincount(pack_of, weights=sizes, minlength=pack_count).astype(np.int64),
    )


def concatenate_packs(packs: Sequence[Packs]) -> Packs:
    """Join the packs of several data sets, one set after the other, as the packs of one."""
    rows = np.cumsum([0, *(len(each.indices) for each in packs)])
    offsets = [each.offsets[:-1] + start for each, start in zip(packs, rows, strict=False)]
    indices = [each.indices + start for each, start in zip(packs, rows, strict=False)]
    tokens = [each.tokens for each in packs]
    return Packs(
        np.concatenate([*offsets, rows[-1:]]), np.concatenate(indices), np.concatenate(tokens)
    )


def group_by_length(
    order: RowIndices, lengths: Sequence[int] | RowIndices, *, window: int
) -> RowIndices:
    """The order with each `window` of rows (one optimizer step) sorted by length, the
    longest first. Micro-batches are dealt from a step's rows one after the other, to the ranks in
    turn: so the rows of a micro-batch, and the micro-batches that ranks have at the same time, are
    of like length."""
    rows = np.asarray(order, dtype=np.int64)
    step_of_row = np.arange(len(rows)) // window
    return rows[np.lexsort((-np.asarray(lengths, dtype=np.int64)[rows], step_of_row))]


def padding_shares(
    lengths: Sequence[int] | RowIndices,
    *,
    micro_batch: int,
    effective_batch: int,
    max_seq_len: int,
    seed: int,
) -> dict[str, float]:
    """Share of padded tokens in an epoch for each choice: `random` batches, rows `grouped` by
    length in a step, and `pack_best_fit` packs (grouped too). Rows that are longer than
    `max_seq_len` count as cut to it."""
    sizes = np.minimum(np.asarray(lengths, dtype=np.int64), max_seq_len)
    if not len(sizes):
        return {"random": 0.0, "grouped": 0.0, "best_fit": 0.0}
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(sizes))
    pack_tokens = pack_best_fit(sizes, max_seq_len).tokens
    pack_order = group_by_length(
        generator.permutation(len(pack_tokens)), pack_tokens, window=effective_batch
    )
    return {
        "random": _padding_share(sizes[order], micro_batch),
        "grouped": _padding_share(
            sizes[group_by_length(order, sizes, window=effective_batch)], micro_batch
        ),
        "best_fit": _padding_share(pack_tokens[pack_order], micro_batch),
    }


def _padding_share(sizes: Any, micro_batch: int) -> float:
    starts = np.arange(0, len(sizes), micro_batch)
    rows = np.diff(np.append(starts, len(sizes)))
    padded_tokens = int((np.maximum.reduceat(sizes, starts) * rows).sum())
    return 1 - int(sizes.sum()) / padded_tokens
