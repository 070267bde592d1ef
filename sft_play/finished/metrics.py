"""The figures of `make eval`: of an answer beside its reference (exact match, ROUGE-L, chrF, your
own functions), and of the base beside the trained model, with the interval of each difference,
which `make ship` judges by too.
"""

import functools
import importlib
import importlib.util
import logging
import math
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

from sft_play.data.sources.messages import Message
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.machine.software import install_command
from sft_play.spelling import did_you_mean

logger = logging.getLogger(__name__)

NO_METRICS = "none"

# The built-in metrics, each with the package of the extra `eval` that it needs.
BUILT_IN_METRICS = {"exact_match": None, "rouge_l": "rapidfuzz", "chrf": "sacrebleu"}

METRIC_TITLES = {
    "token_accuracy": "token accuracy",
    "exact_match": "exact match",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
}

# Drawn rows that are held in memory at a time: some 100 MB with what is gathered for them.
_MAX_DRAWN_ROWS = 4_000_000

CONFIDENCE_LEVEL, BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED = 0.95, 10_000, 0

_EVAL_EXTRA = "sft-play[eval]"

# Characters of scripts that put no spaces between words.
_UNSPACED_SCRIPTS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"

_WORD_PATTERN = (
    rf"{_UNSPACED_SCRIPTS}\p{{M}}*"
    rf"|[[\p{{L}}\p{{N}}]--{_UNSPACED_SCRIPTS}][[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED_SCRIPTS}]*"
)


# --- how good an answer is ------------------------------------------------------------------------
@dataclass(frozen=True)
class Metric:
    """A figure of an answer."""

    name: str
    # Of the answer, the reference and the messages before the answer; higher is better.
    score: Callable[[str, str, Sequence[Message]], float]
    # True if it lies between 0 and 1; it is shown in percent.
    is_share: bool = False


def select_metrics(names: Sequence[str]) -> list[Metric]:
    """Select the metrics of METRICS=; without names all built-in ones that are installed. Raises
    ConfigError where a name is unknown, its package is not installed, or a `module:function` cannot
    be imported."""
    missing = [
        name
        for name, package in BUILT_IN_METRICS.items()
        if package is not None and importlib.util.find_spec(package) is None
    ]
    if not names:
        if missing:
            logger.info(
                "Not measured: %s; %s adds what they need",
                ", ".join(missing),
                install_command(_EVAL_EXTRA),
            )
        names = [name for name in BUILT_IN_METRICS if name not in missing]
    if NO_METRICS in names and len(set(names)) > 1:
        raise ConfigError(
            f"METRICS={one_line(' '.join(names))}: {NO_METRICS} excludes other metrics"
        )
    return [_find_metric(name, missing) for name in dict.fromkeys(names) if name != NO_METRICS]


def _find_metric(name: str, missing: Sequence[str]) -> Metric:
    if ":" in name:
        return Metric(name, functools.partial(_call_user_metric, name, _import_function(name)))
    if name not in BUILT_IN_METRICS:
        hint = did_you_mean(name, [*BUILT_IN_METRICS, NO_METRICS]) or (
            f"there are {', '.join(BUILT_IN_METRICS)}, {NO_METRICS} and your own module:function"
        )
        raise ConfigError(f"METRICS={one_line(name)} is not a metric; {hint}")
    if name in missing:
        raise ConfigError(
            f"METRICS={name} needs the package {BUILT_IN_METRICS[name]}:"
            f" {install_command(_EVAL_EXTRA)}"
        )
    if name == "chrf":
        from sacrebleu.metrics.chrf import CHRF

        # chrF2, as sacrebleu's own default: characters up to 6-grams, no words, beta 2
        chrf = CHRF()
        return Metric(
            name, lambda answer, reference, _: float(chrf.sentence_score(answer, [reference]).score)
        )
    if name == "rouge_l":
        return Metric(name, lambda answer, reference, _: rouge_l(answer, reference), is_share=True)
    # as GeneratedAnswer.is_correct of the run's own evaluations
    return Metric(
        name, lambda answer, reference, _: float(answer.strip() == reference.strip()), is_share=True
    )


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1, between 0 and 1: the harmonic mean of two shares, that of the answer's words
    and that of the reference's words (`split_words`) in their longest common subsequence. Two texts
    without words have 1 where they are equal, else 0."""
    from rapidfuzz.distance import LCSseq

    answer_words, reference_words = split_words(answer), split_words(reference)
    if not answer_words and not reference_words:
        return float(answer.strip() == reference.strip())
    return float(
        2
        * LCSseq.similarity(answer_words, reference_words)
        / (len(answer_words) + len(reference_words))
    )


def split_words(text: str) -> list[str]:
    """Split a text into the words of ROUGE-L: runs of letters and digits with their combining
    marks, in NFKC and case folded; each character of a script without spaces is a word. ASCII texts
    get the tokens of Google's rouge-score without stemming."""
    normalized = unicodedata.normalize("NFKC", text).casefold()
    return list(regex.findall(_WORD_PATTERN, normalized, flags=regex.V1))


def _import_function(name: str) -> Any:
    module_name, _, attribute_path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder first, not the current one
        sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module_name)
        for part in attribute_path.split("."):
            function = getattr(function, part)
    except Exception as error:  # importing runs the user's own code
        raise ConfigError(
            f"METRICS={one_line(name)} cannot be imported from {folder}: {type(error).__name__}:"
            f" {one_line(str(error))}"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"METRICS={one_line(name)} is of type {type(function).__name__}, not a function"
        )
    return function


def _call_user_metric(
    name: str, function: Any, answer: str, reference: str, messages: Sequence[Message]
) -> float:
    try:
        value = float(function(answer, reference, [dict(message) for message in messages]))
    except Exception as error:  # the user's own code
        raise ConfigError(
            f"{one_line(name)} failed: {type(error).__name__}: {one_line(str(error))}"
        ) from error
    if not math.isfinite(value):
        raise ConfigError(f"{one_line(name)} returned {value}, which is not a finite number")
    return value


# --- how sure a difference between two models on the same rows is ---------------------------------
@dataclass(frozen=True)
class Interval:
    """A difference, tuned less base, and the interval that holds the true one with probability
    `level`; of one row, which says nothing about the spread, it is unbounded."""

    difference: float
    low: float
    high: float
    level: float

    def as_json(self) -> dict[str, Any]:
        """In plain data; an unbounded end, or one without data, is null."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}


def paired_bootstrap(
    base: npt.ArrayLike,
    tuned: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The difference of the weighted means of two models' figures, with its bootstrap interval.

    Rows are drawn with replacement, each with both figures and its weight. The interval is the
    percentile interval, widened for few rows: its tails are Phi(-t * sqrt(n / (n - 1))), with t of
    n - 1 degrees of freedom (Hesterberg 2015, What Teachers Should Know About the Bootstrap,
    section 5.3, "expanded percentile interval"). It is NaN where no row has a weight.

    Args:
        base: a figure of each row [rows].
        tuned: the same of the other model [rows].
        weights: of the rows [rows], None for equal ones; rows of weight 0 do not count.
        level: the probability that the interval holds the true difference.

    Raises:
        ValueError: the arrays do not have the same length.
    """
    from scipy.stats import norm, t

    base_values, tuned_values = np.asarray(base, np.float64), np.asarray(tuned, np.float64)
    row_weights = np.ones_like(base_values)
    if weights is not None:
        row_weights = np.asarray(weights, np.float64)
    if not base_values.shape == tuned_values.shape == row_weights.shape:
        raise ValueError("one figure of each model and one weight for each row")
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
    generator, ratios = np.random.default_rng(seed), np.empty(resamples)
    chunk_size = max(1, _MAX_DRAWN_ROWS // row_count)
    for offset in range(0, resamples, chunk_size):
        count = min(chunk_size, resamples - offset)
        # half of what int64 takes
        rows = generator.integers(0, row_count, size=(count, row_count), dtype=np.int32)
        sums = weighted_differences[rows].sum(axis=1)
        ratios[offset : offset + count] = sums / row_weights[rows].sum(axis=1)
    t_quantile = t.ppf(0.5 + level / 2, row_count - 1)
    tail = float(norm.cdf(-t_quantile * math.sqrt(row_count / (row_count - 1))))
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(difference, float(low), float(high), level)


# --- base and trained model beside each other -----------------------------------------------------
@dataclass(frozen=True)
class MetricComparison:
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
        low, high = self.interval.low, self.interval.high
        if low > 0 or high < 0:
            return "better" if (low > 0) != self.is_loss else "worse"
        return "same" if low == high == 0 else "not sure"

    @property
    def perplexity(self) -> dict[str, float | None]:
        """The perplexity of base and tuned, and their ratio with its interval; None where it
        overflows. It has a meaning for a loss only."""
        interval = self.interval
        nats = {
            "base": self.base,
            "tuned": self.tuned,
            "ratio": interval.difference,
            "low": interval.low,
            "high": interval.high,
        }
        with np.errstate(over="ignore"):
            return {name: finite_or_none(float(np.exp(value))) for name, value in nats.items()}

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "base": finite_or_none(self.base),
            "tuned": finite_or_none(self.tuned),
            **self.interval.as_json(),
            "verdict": self.verdict,
        }

    def table_rows(self) -> list[list[str]]:
        """Its line of the table; a loss has a second one, its perplexity."""
        title, interval = METRIC_TITLES.get(self.name, self.name), self.interval
        values = (interval.difference, interval.low, interval.high)
        if self.is_share:
            difference = "{:+.1f} pts [{:+.1f}, {:+.1f}]".format(*(100 * value for value in values))
            return [[title, f"{self.base:.1%}", f"{self.tuned:.1%}", difference, self.verdict]]
        difference = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*values)
        rows = [[title, f"{self.base:.4f}", f"{self.tuned:.4f}", difference, self.verdict]]
        if self.is_loss:
            figures = (
                "?" if value is None else f"{value:.4g}" for value in self.perplexity.values()
            )
            base, tuned, ratio, low, high = figures
            rows.append(["perplexity", base, tuned, f"x{ratio} [x{low}, x{high}]", self.verdict])
        return rows


def compare_metrics(
    base_rows: Sequence[dict[str, Any]],
    tuned_rows: Sequence[dict[str, Any]],
    metrics: Sequence[Metric],
) -> list[MetricComparison]:
    """Compare loss and token accuracy over trained tokens, then each metric over the answers.
    `base_rows` and `tuned_rows` have the figures of each row, as eval.jsonl does."""
    if not tuned_rows:
        return []
    tokens = [row["tokens"] for row in tuned_rows]

    def compare(
        name: str, get_value: Callable[[dict[str, Any]], float], **flags: bool
    ) -> MetricComparison:
        # rows count by their trained tokens, so that the weighted mean over rows is the mean over
        # tokens
        base, tuned = (
            [get_value(row) / max(1, row["tokens"]) for row in rows]
            for rows in (base_rows, tuned_rows)
        )
        return _compare_values(name, base, tuned, tokens, **flags)

    comparisons = [
        compare("loss", lambda row: row["nll"], is_loss=True),
        compare("token_accuracy", lambda row: row["correct"], is_share=True),
    ]
    for metric in metrics:
        base, tuned = (
            [row[metric.name] for row in rows if metric.name in row]
            for rows in (base_rows, tuned_rows)
        )
        if tuned:
            comparisons.append(
                _compare_values(
                    metric.name, base, tuned, [1] * len(tuned), is_share=metric.is_share
                )
            )
    return comparisons


def _compare_values(
    name: str,
    base: Sequence[float],
    tuned: Sequence[float],
    weights: Sequence[float],
    **flags: bool,
) -> MetricComparison:
    interval = paired_bootstrap(
        base,
        tuned,
        weights=weights,
        level=CONFIDENCE_LEVEL,
        resamples=BOOTSTRAP_RESAMPLES,
        seed=BOOTSTRAP_SEED,
    )
    base_mean, tuned_mean = (float(np.average(values, weights=weights)) for values in (base, tuned))
    return MetricComparison(name, base_mean, tuned_mean, interval, **flags)


def finite_or_none(value: float) -> float | None:
    """The value, or None if it is NaN or infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None
