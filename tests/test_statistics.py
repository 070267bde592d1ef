"""The interval of a difference: how often it holds the true one, and what it is where nothing differs."""

import math

import numpy as np
import pytest

from sft_play.finished import metrics
from sft_play.finished.metrics import paired_bootstrap


def losses(generator, rows):
    base = generator.gamma(4.0, 0.5, rows)
    return base, base - 0.3 + generator.normal(0, 0.5, rows), None


def matches(generator, rows):
    """Exact matches of the same rows: 30% of them before, 50% after."""
    hard = generator.random(rows)
    return (hard < 0.3).astype(float), (hard < 0.5).astype(float), None


def by_tokens(generator, rows):
    """Rows of 1 to 60 tokens, whose improvement falls with their length: the plain mean of rows would be another."""
    tokens = generator.integers(1, 61, rows)
    base = generator.gamma(4.0, 0.5, rows)
    return base, base - 3.0 / tokens + generator.normal(0, 0.2, rows), tokens


def plain_mean(generator, rows):
    return (*by_tokens(generator, rows)[:2], None)


@pytest.mark.parametrize(
    ("draw", "truth", "rows", "level", "least", "most"),
    [
        (losses, -0.3, 8, 0.95, 0.92, 0.98),  # the standard error of 400 trials is 1.1 points
        (losses, -0.3, 60, 0.95, 0.92, 0.98),
        (matches, 0.2, 60, 0.95, 0.92, 0.98),
        (by_tokens, -3.0 / 30.5, 60, 0.95, 0.92, 0.98),
        (losses, -0.3, 40, 0.8, 0.74, 0.86),
        (plain_mean, -3.0 / 30.5, 60, 0.95, 0.0, 0.5),  # which is not the mean over tokens
    ],
)
def test_intervals_hold_the_true_difference_as_often_as_their_level_says(draw, truth, rows, level, least, most):
    generator, held, trials = np.random.default_rng(7), 0, 400
    for _ in range(trials):
        base, tuned, weights = draw(generator, rows)
        made = paired_bootstrap(base, tuned, weights=weights, level=level, resamples=600)
        held += made.low <= truth <= made.high
    assert least <= held / trials <= most


def test_equal_figures_differ_by_exactly_nothing():
    generator = np.random.default_rng(0)
    for rows in (1, 2, 3, 50):
        same, weights = generator.normal(size=rows), generator.integers(1, 9, rows)
        for weight in (None, weights):
            made = paired_bootstrap(same, same, weights=weight)
            assert (made.difference, made.low, made.high) == (0.0, 0.0, 0.0)


def test_the_difference_is_that_of_the_weighted_means():
    # by hand: tuned 0*1 + 4*3 = 12, base 2*1 + 2*3 = 8; (12 - 8) / (1 + 3) = 1
    made = paired_bootstrap([2.0, 2.0, math.nan], [0.0, 4.0, math.nan], weights=[1, 3, 0])
    assert made.difference == 1.0
    # two rows drawn with replacement: both the first (-2), one of each (1), both the second (2)
    assert (made.low, made.high) == (-2.0, 2.0)


def test_the_same_arguments_give_the_same_interval_in_pieces_of_any_size(monkeypatch):
    generator = np.random.default_rng(1)
    base, tuned, weights = by_tokens(generator, 40)
    made = paired_bootstrap(base, tuned, weights=weights, resamples=999)
    assert paired_bootstrap(base, tuned, weights=weights, resamples=999) == made
    assert paired_bootstrap(base, tuned, weights=weights, resamples=999, seed=1) != made
    monkeypatch.setattr(metrics, "_MAX_DRAWN_ROWS", 100)
    assert paired_bootstrap(base, tuned, weights=weights, resamples=999) == made
    swapped = paired_bootstrap(tuned, base, weights=weights, resamples=999)
    assert swapped.low == pytest.approx(-made.high)
    assert swapped.high == pytest.approx(-made.low)


def test_few_rows_widen_the_interval_and_one_row_says_nothing():
    one = paired_bootstrap([0.0], [1.0])
    assert (one.difference, one.low, one.high) == (1.0, -math.inf, math.inf)
    assert one.as_json() == {"difference": 1.0, "low": None, "high": None, "level": 0.95}
    none = paired_bootstrap([], [])
    assert none.as_json() == {"difference": None, "low": None, "high": None, "level": 0.95}
    with pytest.raises(ValueError, match="for each row"):
        paired_bootstrap([1.0, 2.0], [1.0])
