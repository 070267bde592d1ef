"""The figures of `make eval`: of an answer beside its reference (exact match, ROUGE-L, chrF, your own
functions), and of the base beside the trained model, with the interval of each difference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import regex

from sft_play.data.sources.messages import Message
from sft_play.errors import ConfigError
from sft_play.finished.eval_rows import EvalRows, RowScore
from sft_play.finished.statistics import Interval, paired_bootstrap
from sft_play.log import one_line
from sft_play.spelling import did_you_mean
from sft_play.text import align_columns
from sft_play.training.measure.exact_match import GeneratedAnswer, Question

logger = logging.getLogger(__name__)

# (answer, reference, messages before the answer) to a figure; higher is better.
MetricFunction = Callable[[str, str, Sequence[Message]], float]

NO_METRICS = "none"

# Metrics that need a package of the extra `eval`.
METRIC_PACKAGES = {"rouge_l": "rapidfuzz", "chrf": "sacrebleu"}

BUILT_IN_METRICS = ("exact_match", *METRIC_PACKAGES)

METRIC_TITLES = {"token_accuracy": "token accuracy", "exact_match": "exact match", "rouge_l": "ROUGE-L", "chrf": "chrF"}

_INSTALL_EVAL = "pip install 'sft-play[eval]'"

# Characters of scripts that put no spaces between words.
_UNSPACED_SCRIPTS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"

_WORD_PATTERN = (
    rf"{_UNSPACED_SCRIPTS}\p{{M}}*"
    rf"|[[\p{{L}}\p{{N}}]--{_UNSPACED_SCRIPTS}][[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED_SCRIPTS}]*"
)


@dataclass(frozen=True)
class Metric:
    """A figure of each answer; `is_share`: between 0 and 1, shown in percent."""

    name: str
    score: MetricFunction
    is_share: bool = False


def select_metrics(names: Sequence[str]) -> list[Metric]:
    """Select the metrics of METRICS=; without names all built-in ones that are installed. Raises ConfigError where a
    name is unknown, its package is not installed, or a `module:function` cannot be imported."""
    if not names:
        missing = [name for name in METRIC_PACKAGES if not _is_installed(name)]
        if missing:
            logger.info("Not measured: %s; %s adds what they need", ", ".join(missing), _INSTALL_EVAL)
        return [_built_in_metric(name) for name in BUILT_IN_METRICS if name not in missing]
    if NO_METRICS in names:
        if len(set(names)) > 1:
            raise ConfigError(f"METRICS={one_line(' '.join(names))}: {NO_METRICS} excludes other metrics")
        return []
    return [_find_metric(name) for name in dict.fromkeys(names)]


def _find_metric(name: str) -> Metric:
    if ":" in name:
        return Metric(name, _import_metric(name))
    if name not in BUILT_IN_METRICS:
        known_metrics = f"there are {', '.join(BUILT_IN_METRICS)}, {NO_METRICS} and your own module:function"
        hint = did_you_mean(name, [*BUILT_IN_METRICS, NO_METRICS]) or known_metrics
        raise ConfigError(f"METRICS={one_line(name)} is not a metric; {hint}")
    if not _is_installed(name):
        raise ConfigError(f"METRICS={name} needs the package {METRIC_PACKAGES[name]}: {_INSTALL_EVAL}")
    return _built_in_metric(name)


def _is_installed(name: str) -> bool:
    return name not in METRIC_PACKAGES or importlib.util.find_spec(METRIC_PACKAGES[name]) is not None


def _built_in_metric(name: str) -> Metric:
    if name == "chrf":
        from sacrebleu.metrics.chrf import CHRF

        chrf = CHRF()  # chrF2, as sacrebleu's own default: characters up to 6-grams, no words, beta 2
        return Metric(name, lambda answer, reference, _: float(chrf.sentence_score(answer, [reference]).score))
    if name == "rouge_l":
        return Metric(name, lambda answer, reference, _: rouge_l(answer, reference), is_share=True)
    return Metric(
        name,
        lambda answer, reference, _: float(GeneratedAnswer(Question([], "", reference), answer).is_correct),
        is_share=True,
    )


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1: of the longest common subsequence of `split_words`, the harmonic mean of its share of the answer's
    words and of the reference's. Of texts without any word: 1 where they are equal, else 0."""
    from rapidfuzz.distance import LCSseq

    answer_words, reference_words = split_words(answer), split_words(reference)
    if not answer_words and not reference_words:
        return float(answer.strip() == reference.strip())
    return float(2 * LCSseq.similarity(answer_words, reference_words) / (len(answer_words) + len(reference_words)))


def split_words(text: str) -> list[str]:
    """The words of a text for ROUGE-L: maximal runs of letters and digits with their combining marks, in NFKC and case
    folded; of scripts without spaces each character. Of ASCII texts the tokens of Google's rouge-score without
    stemming."""
    words: list[str] = regex.findall(_WORD_PATTERN, unicodedata.normalize("NFKC", text).casefold(), flags=regex.V1)
    return words


def _import_metric(name: str) -> MetricFunction:
    module_name, _, attribute_path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder first, not the current one
        sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module_name)
        for part in attribute_path.split("."):
            function = getattr(function, part)
    except Exception as error:  # importing runs the user's own code
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise ConfigError(f"METRICS={one_line(name)} cannot be imported from {folder}: {reason}") from error
    if not callable(function):
        raise ConfigError(f"METRICS={one_line(name)} is of type {type(function).__name__}, not a function")
    return functools.partial(_call_user_metric, name, function)


def _call_user_metric(name: str, function: Any, answer: str, reference: str, messages: Sequence[Message]) -> float:
    try:
        result = function(answer, reference, [dict(message) for message in messages])
        value = float(result)
    except Exception as error:  # the user's own code
        raise ConfigError(f"{one_line(name)} failed: {type(error).__name__}: {one_line(str(error))}") from error
    if not math.isfinite(value):
        raise ConfigError(f"{one_line(name)} returned {result!r}, which is not a finite number")
    return value


CONFIDENCE_LEVEL, BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED = 0.95, 10_000, 0


@dataclass(frozen=True)
class ModelMetrics:
    """One model's figures: of each row, and of each question its answer and the metrics' values."""

    scores: list[RowScore]
    answers: list[str]
    values: dict[str, list[float]]
    tasks: dict[str, Any] | None


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
        if self.interval.is_above_zero or self.interval.is_below_zero:
            return "better" if self.interval.is_above_zero != self.is_loss else "worse"
        return "same" if self.interval.low == self.interval.high == 0 else "not sure"

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        values = {"base": finite_or_none(self.base), "tuned": finite_or_none(self.tuned)}
        return {**values, **self.interval.as_json(), "verdict": self.verdict}

    def table_cells(self) -> list[str]:
        """Its line of the table."""
        number_format = "{:.1%}" if self.is_share else "{:.4f}"
        low, high = (
            _format_difference(bound, is_share=self.is_share) for bound in (self.interval.low, self.interval.high)
        )
        difference = _format_difference(self.interval.difference, is_share=self.is_share)
        return [
            METRIC_TITLES.get(self.name, self.name),
            number_format.format(self.base),
            number_format.format(self.tuned),
            f"{difference} [{low}, {high}]",
            self.verdict,
        ]


def compare_metrics(
    rows: EvalRows, metrics: Sequence[Metric], base: ModelMetrics, tuned: ModelMetrics
) -> tuple[MetricComparison, ...]:
    """Loss and token accuracy over trained tokens, then each metric over the answers."""
    # rows count by their trained tokens, so that the weighted mean over rows is the mean over tokens
    tokens = np.array([score.tokens for score in tuned.scores])
    losses, shares = (
        [
            np.array([getattr(score, field) / max(1, score.tokens) for score in model_metrics.scores])
            for model_metrics in (base, tuned)
        ]
        for field in ("nll", "correct")
    )
    comparisons = [
        _compare_metric("loss", *losses, weights=tokens, is_loss=True),
        _compare_metric("token_accuracy", *shares, weights=tokens, is_share=True),
    ]
    for metric in metrics if rows.questions else ():
        values = [np.array(model_metrics.values[metric.name]) for model_metrics in (base, tuned)]
        comparisons.append(
            _compare_metric(metric.name, *values, weights=np.ones(len(values[0])), is_share=metric.is_share)
        )
    return tuple(comparisons)


def _compare_metric(name: str, base: Any, tuned: Any, *, weights: Any, **flags: bool) -> MetricComparison:
    interval = paired_bootstrap(
        base, tuned, weights=weights, level=CONFIDENCE_LEVEL, resamples=BOOTSTRAP_RESAMPLES, seed=BOOTSTRAP_SEED
    )
    base_mean, tuned_mean = (float(np.average(values, weights=weights)) for values in (base, tuned))
    return MetricComparison(name, base_mean, tuned_mean, interval, **flags)


def format_comparisons(
    comparisons: Sequence[MetricComparison], perplexity: dict[str, float | None] | None, *, base_label: str
) -> list[str]:
    """The figures as a table; `base_label` names the model that was trained. Empty where there are none."""
    if not comparisons:
        return []
    cells = [["", base_label, "tuned", f"difference [{CONFIDENCE_LEVEL:.0%} interval]", ""]]
    for comparison in comparisons:
        cells.append(comparison.table_cells())
        if comparison.is_loss and perplexity is not None:
            base, tuned, ratio, low, high = ("?" if value is None else f"{value:.4g}" for value in perplexity.values())
            cells.append(["perplexity", base, tuned, f"x{ratio} [x{low}, x{high}]", comparison.verdict])
    return align_columns(cells)


def _format_difference(value: float, *, is_share: bool) -> str:
    if not math.isfinite(value):
        return "?"
    return f"{100 * value:+.1f} pts" if is_share else f"{value:+.4f}"


def finite_or_none(value: float) -> float | None:
    """The value, or None if it is NaN or infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def exp_or_inf(value: float) -> float:
    """exp(value), infinite where it is too large."""
    return math.exp(value) if value < 700 else math.inf  # above 709.8 math.exp raises OverflowError
