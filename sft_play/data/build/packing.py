"""Pack rows without cutting them (best-fit), group rows of like length, and compute the padding
that each costs.

All of it is arithmetic on lengths: no row is read or copied here. Lengths are tokens, indices count
the rows of the data set.
"""

import bisect
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
    can be). Rows of one length are dealt together: a million take seconds. Raises ValueError where
    a row is empty or longer than a pack."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(
            f"rows of {sizes.min()} to {sizes.max()} tokens; a pack takes rows of 1 to {capacity}"
        )
    values, counts = np.unique(-sizes, return_counts=True)
    # Open packs by the space that they have left, and these spaces in order.
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []

    def keep_open(space: int, packs: list[int]) -> None:
        if packs and space:  # full ones are dropped
            if space not in by_space:
                by_space[space] = []
                bisect.insort(spaces, space)
            by_space[space] += packs

    pack_of_row: list[int] = []
    pack_count = 0
    for length, remaining_rows in zip((-values).tolist(), counts.tolist(), strict=True):
        while remaining_rows:
            space_index = bisect.bisect_left(spaces, length)
            # no open pack has room: as many new ones as this length fills
            if space_index == len(spaces):
                new_packs = -(-remaining_rows // (capacity // length))  # rounded up
                keep_open(capacity, list(range(pack_count + new_packs - 1, pack_count - 1, -1)))
                pack_count += new_packs
            space = spaces[space_index]
            # rows of this length that one of these packs takes
            open_packs, rows_per_pack = by_space[space], space // length
            filled_packs = [
                open_packs.pop()
                for _ in range(min(len(open_packs), remaining_rows // rows_per_pack))
            ]
            pack_of_row += (
                filled_packs
                if rows_per_pack == 1
                else [pack for pack in filled_packs for _ in range(rows_per_pack)]
            )
            remaining_rows -= len(filled_packs) * rows_per_pack
            keep_open(space - rows_per_pack * length, filled_packs)
            if open_packs and remaining_rows:  # fewer than fill one more
                pack = open_packs.pop()
                pack_of_row += [pack] * remaining_rows
                keep_open(space - remaining_rows * length, [pack])
                remaining_rows = 0
            if not open_packs:
                del by_space[space]
                del spaces[bisect.bisect_left(spaces, space)]
    pack_of = np.empty(len(sizes), dtype=np.int64)
    # stable: rows of one length stay in the data set's order
    pack_of[np.argsort(-sizes, kind="stable")] = pack_of_row
    count = int(pack_of.max()) + 1 if len(sizes) else 0
    rows = np.bincount(pack_of, minlength=count)
    return Packs(
        np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        np.argsort(pack_of, kind="stable").astype(np.int64),
        np.bincount(pack_of, weights=sizes, minlength=count).astype(np.int64),
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
