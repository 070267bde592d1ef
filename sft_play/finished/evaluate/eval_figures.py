"""The figures of `make eval`: base beside trained model, with the interval of each difference, in JSON and in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sft_play.finished.evaluate.eval_rows import EvalRows
from sft_play.finished.evaluate.metrics import TITLES, Metric
from sft_play.finished.evaluate.score import RowScore
from sft_play.finished.evaluate.statistics import Interval, paired_bootstrap

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0
"""Of the intervals (`statistics.paired_bootstrap`)."""


@dataclass(frozen=True)
class ModelFigures:
    """One model's figures: of each row, and of each question its answer and the metrics' values."""

    scores: list[RowScore]
    answers: list[str]
    values: dict[str, list[float]]
    tasks: dict[str, Any] | None


@dataclass(frozen=True)
class EvalFigure:
    """A figure of base and trained model, and the interval of its difference."""

    name: str
    base: float
    tuned: float
    interval: Interval
    is_share: bool = False
    is_loss: bool = False

    @property
    def verdict(self) -> str:
        """better or worse, where the whole interval says so."""
        if self.interval.is_above or self.interval.is_below:
            return "better" if self.interval.is_above != self.is_loss else "worse"
        return "same" if self.interval.low == self.interval.high == 0 else "not sure"

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "base": finite(self.base), "tuned": finite(self.tuned), **self.interval.as_json(),
            "verdict": self.verdict,
        }  # fmt: skip

    def cells(self) -> list[str]:
        """Its line of the table."""
        form = "{:.1%}" if self.is_share else "{:.4f}"
        low, high = (_signed(end, is_share=self.is_share) for end in (self.interval.low, self.interval.high))
        difference = _signed(self.interval.difference, is_share=self.is_share)
        return [
            TITLES.get(self.name, self.name),
            form.format(self.base),
            form.format(self.tuned),
            f"{difference} [{low}, {high}]",
            self.verdict,
        ]


def eval_figures(
    rows: EvalRows, metrics: Sequence[Metric], base: ModelFigures, tuned: ModelFigures
) -> tuple[EvalFigure, ...]:
    """Loss and token accuracy over trained tokens, then each metric over the answers."""
    # rows count by their trained tokens, so that the weighted mean over rows is the mean over tokens
    tokens = np.array([one.tokens for one in tuned.scores])
    per_token: list[tuple[str, Callable[[RowScore], float]]] = [
        ("loss", lambda one: one.nll), ("token_accuracy", lambda one: one.correct)
    ]  # fmt: skip
    figures = []
    for name, amount in per_token:
        means = [np.array([amount(one) / max(1, one.tokens) for one in measured.scores]) for measured in (base, tuned)]
        is_loss = name == "loss"
        figures.append(_figure(name, *means, weights=tokens, is_share=not is_loss, is_loss=is_loss))
    for metric in metrics if rows.asked else ():
        values = [np.array(measured.values[metric.name]) for measured in (base, tuned)]
        figures.append(_figure(metric.name, *values, weights=np.ones(len(values[0])), is_share=metric.is_share))
    return tuple(figures)


def _figure(name: str, base: Any, tuned: Any, *, weights: Any, **kind: bool) -> EvalFigure:
    interval = paired_bootstrap(base, tuned, weights=weights, level=LEVEL, resamples=RESAMPLES, seed=SEED)
    return EvalFigure(
        name, float(np.average(base, weights=weights)), float(np.average(tuned, weights=weights)), interval, **kind
    )


def balance_loss(scores: Sequence[RowScore]) -> float | None:
    """The experts' balance loss over trained tokens, which the run's own eval_loss contains; None without one."""
    tokens = sum(one.tokens for one in scores)
    balance = sum(one.balance for one in scores)
    return balance / tokens if balance else None


def figure_table(
    figures: Sequence[EvalFigure], perplexity: dict[str, float | None] | None, *, before: str
) -> list[str]:
    """The figures as a table; `before` names the model that was trained. Empty where there are none."""
    if not figures:
        return []
    cells = [["", before, "tuned", f"difference [{LEVEL:.0%} interval]", ""]]
    for figure in figures:
        cells.append(figure.cells())
        if figure.is_loss and perplexity is not None:
            base, tuned, ratio, low, high = ("?" if one is None else f"{one:.4g}" for one in perplexity.values())
            cells.append(["perplexity", base, tuned, f"x{ratio} [x{low}, x{high}]", figure.verdict])
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _signed(value: float, *, is_share: bool) -> str:
    if not math.isfinite(value):
        return "?"
    return f"{100 * value:+.1f} pts" if is_share else f"{value:+.4f}"


def finite(value: float) -> float | None:
    """The value, or None, which JSON has for what is not a number."""
    return value if math.isfinite(value) else None


def exp_or_inf(value: float) -> float:
    """exp(value), infinite where it is too large."""
    return math.exp(value) if value < 700 else math.inf  # above 709.8 math.exp raises OverflowError
