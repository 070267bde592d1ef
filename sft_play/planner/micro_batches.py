"""The rows of an optimizer step, cut into micro-batches by tokens instead of by number, and the lengths of a run's rows
as far as a plan needs them.

A step's rows are fixed by the order of the epoch. How they are divided over passes and ranks changes neither loss nor
gradients, but the work: a pass costs its places (rows times the longest of them where rows are padded, the sum of their
lengths where they are not) and a fixed part for starting kernels and reading weights. No micro-batch has more places
than the plan has memory for.

Lengths are in tokens, sorted, the longest first. Nothing here imports torch or numpy: the plan uses it too.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Places at which a step is tried to be cut, from each that is reached.
_MOST_CUTS = 512

# Positions of rows by pass and rank: `cut[p][r]` is the micro-batch of rank r in pass p, empty where it has no row.
Cut = list[list[list[int]]]


@dataclass(frozen=True)
class MicroBatches:
    """How the rows of a step become micro-batches, in every step alike."""

    rows: int
    """Rows of a micro-batch if all were of full length."""
    tokens: int | None = None
    """Places of a micro-batch at most; None: every micro-batch has `rows` rows, however short."""
    overhead: int = 0
    """What starting one more pass costs, in places."""
    padded: bool = True
    """Whether the rows of a micro-batch are padded to the longest; else they are joined."""
    single: bool = False
    """A step is one pass: it was planned without gradients that are kept between passes."""

    def of_rows(self, rows: int) -> MicroBatches:
        """The same with another number of rows of full length in a micro-batch, and the tokens that follow from it."""
        tokens = None if self.tokens is None else self.tokens * rows // self.rows
        return dataclasses.replace(self, rows=rows, tokens=tokens, single=False)

    def cut(self, lengths: Sequence[int], *, ranks: int = 1) -> Cut:
        """The micro-batches of a step's rows (their lengths, the longest first), the same number for each of
        `ranks`."""
        if self.tokens is None or (self.padded and self.single):
            return by_rows(len(lengths), rows=self.rows, ranks=ranks)
        if self.padded:
            return padded(lengths, tokens=self.tokens, overhead=self.overhead, ranks=ranks)
        return joined(lengths, tokens=self.tokens, ranks=ranks)

    def most_passes(self, rows: int) -> int:
        """The most passes that a rank needs for a step in which it has `rows` rows of full length at most."""
        is_free = self.tokens is not None and self.padded and not self.single
        return rows if is_free else -(-rows // self.rows)


def by_rows(count: int, *, rows: int, ranks: int) -> Cut:
    """`rows` rows to a micro-batch, in their order; those of the last pass are spread evenly over the ranks."""
    return [_dealt(first, min(count, first + rows * ranks), ranks) for first in range(0, count, rows * ranks)]


def padded(lengths: Sequence[int], *, tokens: int, overhead: int, ranks: int) -> Cut:
    """The cut of sorted rows into passes that has the fewest places, counting `overhead` for each pass. A row that is
    longer than `tokens` is a micro-batch of its own. Rows of a pass are neighbours, so their lengths are close. The
    best cut of the first n rows is found from those of fewer; in steps of very many rows not every place is tried."""
    count = len(lengths)
    # best[n]: the least cost of the n longest rows; begin[n]: where its last pass begins
    best = [0.0] + [math.inf] * count
    begin = [0] * (count + 1)
    grain = -(-count // _MOST_CUTS)
    for first in range(count):
        if best[first] == math.inf:
            continue
        longest = lengths[first]  # of the pass that begins here: rows are sorted
        full = min(count, first + max(1, tokens // longest) * ranks)
        for last in (*range(first + grain, full, grain), full):
            cost = best[first] + overhead + -(-(last - first) // ranks) * longest
            if cost < best[last]:
                best[last], begin[last] = cost, first
    passes = []
    last = count  # back from the end along `begin`
    while last:
        passes.append(_dealt(begin[last], last, ranks))
        last = begin[last]
    return passes[::-1]


def joined(lengths: Sequence[int], *, tokens: int, ranks: int) -> Cut:
    """Rows without padding in as few passes as hold them, with about as many tokens in each micro-batch. The longest
    row goes into the emptiest micro-batch. Where no row is longer than 1 / n of `tokens`, m passes hold any n x m rows
    a rank."""
    count = len(lengths)
    passes = max(1, -(-sum(lengths) // (tokens * ranks)))  # fewer cannot hold them
    while True:
        bins = [(0, place) for place in range(passes * ranks)]
        held: list[list[int]] = [[] for _ in bins]
        for row, length in enumerate(lengths):
            load, place = bins[0]
            heapq.heapreplace(bins, (load + length, place))
            held[place].append(row)
        # one row to a micro-batch is the end, even where a row is longer than `tokens`
        if max(bins)[0] <= tokens or passes * ranks >= count:
            break
        passes += 1
    # micro-batches of about the same length run at the same time, so ranks wait less for each other
    held.sort(key=lambda rows: -sum(lengths[row] for row in rows))
    return [held[first : first + ranks] for first in range(0, len(held), ranks)]


def _dealt(first: int, last: int, ranks: int) -> list[list[int]]:
    """The rows of one pass, in their order over the ranks, as evenly as they come out."""
    count = last - first
    ends = [first + count * (rank + 1) // ranks for rank in range(ranks)]
    return [list(range(begin, end)) for begin, end in zip([first, *ends[:-1]], ends, strict=True)]


# --- the lengths of a run's rows: counted from the tokens themselves, never estimated ---------------------------------
# Lengths that are kept at most, to draw steps from.
SAMPLE = 1024
# Steps that are drawn to see what an average one takes.
_STEPS = 4
# Rows of a drawn step at most: larger ones are taken to be like it.
_MOST_ROWS = 512


@dataclass(frozen=True)
class Passes:
    """What one rank computes in an average step: passes, places (tokens with padding) of one, and the length of the row
    that a place is in, on average; `tokens` without padding over all ranks; `rows` of one pass."""

    count: float
    places: float
    length: float
    tokens: float
    rows: float


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
    cut: int | None = None
    """Training rows that the limit cuts; None where that was not counted."""

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
        cut = 0 if self.longest <= limit and self.cut == 0 else None
        return dataclasses.replace(self, mean=mean, limit=limit, sample=sample, cut=cut, **lengths)


def row_tokens(counts: Mapping[int, int], *, limit: int, held_out: int = 0) -> RowTokens | None:
    """The summary of all rows' lengths, from the number of rows of each; None without rows."""
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
    """What a rank computes in an average step of `effective_batch` rows, by a few drawn ones; a pass takes as long as
    its fullest rank."""
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
