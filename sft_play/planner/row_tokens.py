"""The lengths of a run's rows, as far as a plan needs them: counted from the tokens themselves, never estimated."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sft_play.planner.micro_batches import MicroBatches

SAMPLE = 1024
"""Lengths that are kept at most, to draw steps from."""
_STEPS = 4
"""Steps that are drawn to see what an average one takes."""
_MOST_ROWS = 512
"""Rows of a drawn step at most: larger ones are taken to be like it."""


@dataclass(frozen=True)
class Passes:
    """What one rank computes in an average step: passes, places (tokens with padding) of one, and the length of the row
    that a place is in, on average; `tokens` without padding over all ranks; `rows` of one pass."""

    count: float
    places: float
    length: float
    tokens: float
    rows: float

    def shared_by(self, ranks: int) -> Passes:
        """The same where `ranks` compute a part of every row each."""
        return dataclasses.replace(self, places=self.places / ranks)


@dataclass(frozen=True)
class RowTokens:
    """Tokens of the training rows: mean, 95th percentile and longest, all after `limit` (model.max_seq_len) has cut or
    left out what is longer; `held_out` is the longest row that is evaluated, 0 without any."""

    mean: float
    p95: int
    longest: int
    rows: int
    limit: int
    held_out: int = 0
    sample: tuple[int, ...] = ()

    @property
    def longest_of_all(self) -> int:
        """The longest row that is trained on or evaluated."""
        return max(self.longest, self.held_out)

    def within(self, limit: int) -> RowTokens | None:
        """The lengths under another limit; None where rows were cut that would be longer now."""
        if limit >= self.limit:
            # a longest row of exactly the old limit may have been cut there
            return self if self.longest_of_all < self.limit or limit == self.limit else None
        lengths = {name: min(limit, getattr(self, name)) for name in ("p95", "longest", "held_out")}
        sample = tuple(min(limit, length) for length in self.sample)
        mean = self.mean * sum(sample) / max(1, sum(self.sample))
        return dataclasses.replace(self, mean=mean, limit=limit, sample=sample, **lengths)

    def as_json(self) -> dict[str, Any]:
        """`row_tokens` of a plan, with everything that a rank needs of it."""
        return {**dataclasses.asdict(self), "sample": list(self.sample)}

    @staticmethod
    def from_json(data: Mapping[str, Any] | None) -> RowTokens | None:
        """What `as_json` wrote."""
        return None if data is None else RowTokens(**{**data, "sample": tuple(data["sample"])})


def row_tokens(counts: Mapping[int, int], *, limit: int, held_out: int = 0) -> RowTokens | None:
    """The summary of all rows' lengths; None without rows.

    Args:
        counts: the number of rows of each length.
    """
    rows = sum(counts.values())
    if not rows:
        return None
    lengths = sorted(counts)
    ends = list(itertools.accumulate(counts[length] for length in lengths))

    def at(place: int) -> int:
        """The length of a row, counted from the shortest."""
        return lengths[bisect.bisect_right(ends, place)]

    kept = min(rows, SAMPLE)  # spread evenly over all of them
    return RowTokens(
        mean=sum(length * count for length, count in counts.items()) / rows,
        p95=at(min(rows - 1, int(0.95 * rows))),
        longest=lengths[-1],
        rows=rows,
        limit=limit,
        held_out=held_out,
        sample=tuple(at((2 * place + 1) * rows // (2 * kept)) for place in reversed(range(kept))),
    )


@functools.lru_cache(maxsize=4096)
def average_passes(rows: RowTokens, cut: MicroBatches, *, effective_batch: int, ranks: int) -> Passes:
    """What a rank computes in an average step of `effective_batch` rows over `ranks`, by a few drawn ones.

    A pass takes as long as its fullest rank.
    """
    size = min(effective_batch, rows.rows)
    drawn = min(size, _MOST_ROWS * ranks)
    draw = random.Random(1)  # every rank and every plan of the same rows sees the same steps
    count = places = weighted = tokens = held = 0.0
    for _ in range(_STEPS):
        some = draw.sample(rows.sample, drawn) if drawn <= len(rows.sample) else draw.choices(rows.sample, k=drawn)
        lengths = sorted(some, reverse=True)
        for each in cut.cut(lengths, ranks=ranks):
            of_ranks = [[lengths[place] for place in batch] for batch in each if batch]
            if cut.padded:
                fullest = max(of_ranks, key=lambda batch: len(batch) * batch[0])
                size_of_pass, length = len(fullest) * fullest[0], float(fullest[0])
            else:
                fullest = max(of_ranks, key=sum)
                size_of_pass = sum(fullest)
                # weighted by tokens: attention of a row costs its length for each of its tokens
                length = sum(one * one for one in fullest) / size_of_pass
            count += 1
            held += len(fullest)
            places += size_of_pass
            weighted += size_of_pass * length
        tokens += sum(lengths)
    scale = size / drawn / _STEPS  # to one whole step
    return Passes(count * scale, places / count, weighted / places, tokens * scale, held / count)
