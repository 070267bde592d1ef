"""How sure a difference between two models on the same rows is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Drawn rows that are held in memory at a time: some 100 MB with what is gathered for them.
_MAX_DRAWN_ROWS = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A difference, tuned less base, and the interval that holds the true one with probability `level`; of one row,
    which says nothing about the spread, it is unbounded."""

    difference: float
    low: float
    high: float
    level: float

    @property
    def is_above_zero(self) -> bool:
        """True if all of the interval is above zero."""
        return self.low > 0

    @property
    def is_below_zero(self) -> bool:
        """True if all of the interval is below zero."""
        return self.high < 0

    def as_json(self) -> dict[str, Any]:
        """In plain data; an unbounded end, or one without data, is null."""
        values = {"difference": self.difference, "low": self.low, "high": self.high}
        return {name: value if math.isfinite(value) else None for name, value in values.items()} | {"level": self.level}


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
    base_values, tuned_values = np.asarray(base, dtype=np.float64), np.asarray(tuned, dtype=np.float64)
    row_weights = np.ones(len(base_values)) if weights is None else np.asarray(weights, dtype=np.float64)
    if not base_values.shape == tuned_values.shape == row_weights.shape == (len(base_values),):
        raise ValueError(
            f"one figure and one weight for each row, not {base_values.shape}, {tuned_values.shape}, "
            f"{row_weights.shape}"
        )
    has_weight = row_weights > 0
    row_weights = row_weights[has_weight]
    # of each row, both models': the pairing takes their spread out
    weighted_differences = row_weights * (tuned_values[has_weight] - base_values[has_weight])
    row_count = len(weighted_differences)
    if not row_count:
        return Interval(math.nan, math.nan, math.nan, level)
    difference = float(weighted_differences.sum() / row_weights.sum())
    if row_count == 1:
        bound = 0.0 if difference == 0 else math.inf
        return Interval(difference, -bound, bound, level)
    ratios = _bootstrap_ratios(weighted_differences, row_weights, resamples=resamples, seed=seed)
    tail_probability = _tail_probability(level, row_count)
    low, high = np.quantile(ratios, [tail_probability, 1 - tail_probability])
    return Interval(difference, float(low), float(high), level)


def _bootstrap_ratios(
    weighted_differences: npt.NDArray[np.float64], row_weights: npt.NDArray[np.float64], *, resamples: int, seed: int
) -> npt.NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    row_count, ratios = len(weighted_differences), np.empty(resamples)
    chunk_size = max(1, _MAX_DRAWN_ROWS // row_count)
    for offset in range(0, resamples, chunk_size):
        count = min(chunk_size, resamples - offset)
        rows = generator.integers(0, row_count, size=(count, row_count), dtype=np.int32)  # half of what int64 takes
        ratios[offset : offset + count] = weighted_differences[rows].sum(axis=1) / row_weights[rows].sum(axis=1)
    return ratios


def _tail_probability(level: float, row_count: int) -> float:
    from scipy.stats import norm, t

    t_quantile = t.ppf(0.5 + level / 2, row_count - 1)
    return float(norm.cdf(-t_quantile * math.sqrt(row_count / (row_count - 1))))
