"""How sure a difference between two models on the same rows is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Drawn rows that are held in memory at a time: some 100 MB with what is gathered for them.
_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A difference, tuned less base, and the interval that holds the true one with probability `level`; of one row,
    which says nothing about the spread, it is unbounded."""

    difference: float
    low: float
    high: float
    level: float

    @property
    def is_above(self) -> bool:
        """Whether all of the interval is above zero."""
        return self.low > 0

    @property
    def is_below(self) -> bool:
        """Whether all of the interval is below zero."""
        return self.high < 0

    def as_json(self) -> dict[str, Any]:
        """In plain data; an unbounded end, or one without data, is null."""
        ends = {"difference": self.difference, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in ends.items()} | {"level": self.level}


def paired_bootstrap(
    base: npt.ArrayLike,
    tuned: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The difference of the weighted means of two models' figures [rows], with its bootstrap interval; NaN where no row
    has a weight. Rows are drawn with replacement, each with both figures and its weight [rows] (None: all alike; rows
    of weight 0 do not count). The percentile interval, widened for few rows: its tails are Phi(-t * sqrt(n / (n - 1))),
    with t of n - 1 degrees of freedom (Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 5.3,
    "expanded percentile interval"). Raises ValueError where the arrays do not have the same length."""
    first, second = np.asarray(base, dtype=np.float64), np.asarray(tuned, dtype=np.float64)
    weight = np.ones(len(first)) if weights is None else np.asarray(weights, dtype=np.float64)
    if not first.shape == second.shape == weight.shape == (len(first),):
        raise ValueError(f"one figure and one weight for each row, not {first.shape}, {second.shape}, {weight.shape}")
    counts = weight > 0
    weight = weight[counts]
    parts = weight * (second[counts] - first[counts])  # of each row, both models': the pairing takes their spread out
    number = len(parts)
    if not number:
        return Interval(math.nan, math.nan, math.nan, level)
    difference = float(parts.sum() / weight.sum())
    if number == 1:
        bound = 0.0 if difference == 0 else math.inf
        return Interval(difference, -bound, bound, level)
    drawn = _drawn(parts, weight, resamples=resamples, seed=seed)
    tail = _tail(level, number)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(difference, float(low), float(high), level)


def _drawn(
    parts: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], *, resamples: int, seed: int
) -> npt.NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    number, ratios = len(parts), np.empty(resamples)
    piece = max(1, _AT_ONCE // number)
    for start in range(0, resamples, piece):
        count = min(piece, resamples - start)
        rows = generator.integers(0, number, size=(count, number), dtype=np.int32)  # half of what int64 takes
        ratios[start : start + count] = parts[rows].sum(axis=1) / weight[rows].sum(axis=1)
    return ratios


def _tail(level: float, number: int) -> float:
    from scipy.stats import norm, t

    student = t.ppf(0.5 + level / 2, number - 1)
    return float(norm.cdf(-student * math.sqrt(number / (number - 1))))
