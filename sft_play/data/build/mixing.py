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

Indices = npt.NDArray[np.int64]

# A mix that needs more passes over the same rows in one epoch is refused as a mistake.
MAX_PASSES = 1_000


def exact_shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` divided by the weights, by largest remainder: the counts add up to it, and each is less than one away
    from its exact share; of equal remainders the first gets the row."""
    # Fractions, since rounding of floats would hand the last row to another source on another machine.
    exact = [Fraction(weight) for weight in weights]
    shares = [total * weight / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda at: (counts[at] - shares[at], at))
    for at in by_rest[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


def drawn(count: int, most: int | None, *, seed: int) -> Indices | None:
    """The rows of a source that `max_rows` keeps, in their order; None where it keeps all."""
    if most is None or most >= count:
        return None
    # in the file's order, so that memory-mapped rows are read forwards
    return np.sort(np.random.default_rng([seed, count, most]).permutation(count)[:most])


@dataclass(frozen=True)
class Mix:
    """The sources of a run: rows that each has, and rows of each in an epoch. Rows are numbered through all sources,
    one source after the other. Each source goes through its rows in passes, each pass in an order of its own, and an
    epoch continues where the one before it ended: no row comes a second time in an epoch before all have come once, nor
    an (n + 1)th time before all have come n times."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    per_epoch: tuple[int, ...]
    seed: int
    _passes: dict[tuple[int, int], Indices] = field(default_factory=dict, compare=False, repr=False)

    @property
    def total(self) -> int:
        """Rows of an epoch."""
        return sum(self.per_epoch)

    def rows(self, epoch: int) -> Indices:
        """The rows of an epoch, one source after the other."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        return np.concatenate([start + self._of(place, epoch) for place, start in enumerate(starts.tolist())])

    def _of(self, place: int, epoch: int) -> Indices:
        size, count = self.sizes[place], self.per_epoch[place]
        if not count:
            return np.zeros(0, dtype=np.int64)
        first, end = epoch * count, (epoch + 1) * count  # places in the endless row of passes
        passes = [self._pass(place, number) for number in range(first // size, -(-end // size))]
        skipped = first - first // size * size
        return np.concatenate(passes)[skipped : skipped + count]

    def _pass(self, place: int, number: int) -> Indices:
        """The order of a source's rows in one pass over them: random, but rows that the epoch already had come last. An
        epoch that begins in the middle of a pass takes the rest of it, and of the next pass first what it lacks."""
        size, count = self.sizes[place], self.per_epoch[place]
        for current in range(number + 1):  # each depends on one before it: a loop, since recursion would be deep
            if (place, current) in self._passes:
                continue
            order = np.random.default_rng([self.seed, place, current]).permutation(size)
            # This pass begins in epoch (current * size) // count. That epoch's first row is `skipped` rows into pass
            # `begun`: the rows of `begun` after those are what the epoch already had.
            begun, skipped = divmod(current * size // count * count, size)
            if skipped and begun != current:
                is_had = np.isin(order, self._passes[place, begun][skipped:])
                order = np.concatenate([order[~is_had], order[is_had]])
            self._passes[place, current] = order
        return self._passes[place, number]


@dataclass(frozen=True)
class Sources:
    """The sources of a run in their order: names, weights (None: each row once an epoch), and rows as they are kept."""

    names: tuple[str, ...]
    weights: tuple[float | None, ...]
    sizes: tuple[int, ...]

    def mix(self, *, seed: int, sizes: Sequence[int] | None = None) -> Mix:
        """What an epoch has of each: as many rows as all sources have together (`sizes`: packed ones), by the weights.
        Raises DataError where a weight leaves a source without a row, or asks for more than `MAX_PASSES` over it."""
        sizes = tuple(self.sizes if sizes is None else sizes)
        weights = [size if weight is None else weight for size, weight in zip(sizes, self.weights, strict=True)]
        per_epoch = exact_shares(weights, sum(sizes))
        for name, weight, size, count in zip(self.names, weights, sizes, per_epoch, strict=True):
            share = f"data.sources: the weight {weight:g} of {name}, {weight / sum(weights):.3g} of all,"
            if not count:
                raise DataError(f"{share} gives it no row of an epoch of {sum(sizes):,}; raise it, or leave {name} out")
            if count > MAX_PASSES * size:
                raise DataError(
                    f"{share} asks for {count:,} rows an epoch, and it has {size:,}: more than {MAX_PASSES:,} passes "
                    "over them; lower it, or limit the other sources with max_rows"
                )
        return Mix(self.names, sizes, per_epoch, seed)


def mix_table(mix: Mix) -> list[str]:
    """The sources as lines of a table: rows, rows in an epoch, those as a share and as passes over the source."""
    width = max(len("source"), *map(len, mix.names))
    return [
        f"{'source':<{width}}  {'rows':>10}  {'an epoch':>10}  {'share':>7}  {'passes':>7}",
        *(
            f"{name:<{width}}  {size:>10,}  {count:>10,}  {count / mix.total:>7.2%}  {count / size:>7.3g}"
            for name, size, count in zip(mix.names, mix.sizes, mix.per_epoch, strict=True)
        ),
    ]
