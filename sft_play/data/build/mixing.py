"""Which rows of several sources an epoch has: exact shares, every row of a source as often as the others of it.

All of it is arithmetic on counts and a seed: the rows of an epoch follow from its number alone, so that a resumed run
has those of an unbroken one, whatever the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sft_play.errors import DataError

SourceRows = npt.NDArray[np.int64]

# A mix that needs more passes over the same rows in one epoch is refused as a mistake.
MAX_SOURCE_PASSES = 1_000


def share_counts(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` divided by the weights, by largest remainder: the counts add up to it, and each is less than one away
    from its exact share; of equal remainders the first gets the row."""
    # Fractions, since rounding of floats would hand the last row to another source on another machine.
    exact_weights = [Fraction(weight) for weight in weights]
    shares = [total * weight / sum(exact_weights) for weight in exact_weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - shares[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def draw_rows(count: int, max_rows: int | None, *, seed: int) -> SourceRows | None:
    """The rows of a source that `max_rows` keeps, in their order; None where it keeps all."""
    if max_rows is None or max_rows >= count:
        return None
    # in the file's order, so that memory-mapped rows are read forwards
    return np.sort(np.random.default_rng([seed, count, max_rows]).permutation(count)[:max_rows])


@dataclass(frozen=True)
class SourceMix:
    """The sources of a run: rows that each has, and rows of each in an epoch. Rows are numbered through all sources,
    one source after the other. Each source goes through its rows in passes, each pass in an order of its own, and an
    epoch continues where the one before it ended: no row comes a second time in an epoch before all have come once, nor
    an (n + 1)th time before all have come n times."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows_per_epoch: tuple[int, ...]
    seed: int
    _orders: dict[tuple[int, int], SourceRows] = field(default_factory=dict, compare=False, repr=False)

    @property
    def total(self) -> int:
        """Rows of an epoch."""
        return sum(self.rows_per_epoch)

    def epoch_rows(self, epoch: int) -> SourceRows:
        """The rows of an epoch, one source after the other."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        return np.concatenate(
            [start + self._source_rows(source_index, epoch) for source_index, start in enumerate(starts.tolist())]
        )

    def _source_rows(self, source_index: int, epoch: int) -> SourceRows:
        size, count = self.sizes[source_index], self.rows_per_epoch[source_index]
        if not count:
            return np.zeros(0, dtype=np.int64)
        first, end = epoch * count, (epoch + 1) * count  # places in the endless row of passes
        passes = [self._pass_order(source_index, pass_index) for pass_index in range(first // size, -(-end // size))]
        skipped = first - first // size * size
        return np.concatenate(passes)[skipped : skipped + count]

    def _pass_order(self, source_index: int, pass_index: int) -> SourceRows:
        """The order of a source's rows in one pass over them: random, but rows that the epoch already had come last. An
        epoch that begins in the middle of a pass takes the rest of it, and of the next pass first what it lacks."""
        size, count = self.sizes[source_index], self.rows_per_epoch[source_index]
        for current in range(pass_index + 1):  # each depends on one before it: a loop, since recursion would be deep
            if (source_index, current) in self._orders:
                continue
            order = np.random.default_rng([self.seed, source_index, current]).permutation(size)
            # This pass begins in epoch (current * size) // count. That epoch's first row is `skipped` rows into pass
            # `earlier_pass`: its rows after those are what the epoch already had.
            earlier_pass, skipped = divmod(current * size // count * count, size)
            if skipped and earlier_pass != current:
                is_repeated = np.isin(order, self._orders[source_index, earlier_pass][skipped:])
                order = np.concatenate([order[~is_repeated], order[is_repeated]])
            self._orders[source_index, current] = order
        return self._orders[source_index, pass_index]


@dataclass(frozen=True)
class MixedSources:
    """The sources of a run in their order: names, weights (None: each row once an epoch), and rows as they are kept."""

    names: tuple[str, ...]
    weights: tuple[float | None, ...]
    sizes: tuple[int, ...]

    def mix(self, *, seed: int, sizes: Sequence[int] | None = None) -> SourceMix:
        """Divide an epoch, as many rows as all sources have together (`sizes`: packed rows), among them by weight.
        Raises DataError if a weight leaves a source no row, or asks for more than `MAX_SOURCE_PASSES` over it."""
        sizes = tuple(self.sizes if sizes is None else sizes)
        weights = [size if weight is None else weight for size, weight in zip(sizes, self.weights, strict=True)]
        per_epoch = share_counts(weights, sum(sizes))
        for name, weight, size, count in zip(self.names, weights, sizes, per_epoch, strict=True):
            message_start = f"data.sources: the weight {weight:g} of {name}, {weight / sum(weights):.3g} of all,"
            if not count:
                raise DataError(
                    f"{message_start} gives it no row of an epoch of {sum(sizes):,}; raise it, or leave {name} out"
                )
            if count > MAX_SOURCE_PASSES * size:
                raise DataError(
                    f"{message_start} asks for {count:,} rows an epoch, and it has {size:,}: more than "
                    f"{MAX_SOURCE_PASSES:,} passes "
                    "over them; lower it, or limit the other sources with max_rows"
                )
        return SourceMix(self.names, sizes, per_epoch, seed)


def format_mix_table(mix: SourceMix) -> list[str]:
    """Format a table of the sources: rows, rows in an epoch, share of the epoch, passes over the source."""
    width = max(len("source"), *map(len, mix.names))
    return [
        f"{'source':<{width}}  {'rows':>10}  {'an epoch':>10}  {'share':>7}  {'passes':>7}",
        *(
            f"{name:<{width}}  {size:>10,}  {count:>10,}  {count / mix.total:>7.2%}  {count / size:>7.3g}"
            for name, size, count in zip(mix.names, mix.sizes, mix.rows_per_epoch, strict=True)
        ),
    ]
