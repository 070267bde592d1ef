"""The figures of `make eval`: of an answer beside its reference (exact match, ROUGE-L, chrF, your own functions), and
of the base beside the trained model, with the interval of each difference, in JSON and in words."""

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
from sft_play.diagnose.pages import align_columns
from sft_play.errors import ConfigError
from sft_play.finished.evaluate.eval_rows import EvalRows
from sft_play.finished.evaluate.score import RowScore
from sft_play.finished.evaluate.statistics import Interval, paired_bootstrap
from sft_play.log import one_line
from sft_play.spelling import did_you_mean
from sft_play.training.measure.exact_match import GeneratedAnswer, Question

logger = logging.getLogger(__name__)

# (answer, reference, messages before the answer) to a figure; higher is better.
Compare = Callable[[str, str, Sequence[Message]], float]
NONE = "none"
# Metrics that need a package of the extra `eval`.
PACKAGES = {"rouge_l": "rapidfuzz", "chrf": "sacrebleu"}
BUILT_IN = ("exact_match", *PACKAGES)
TITLES = {"token_accuracy": "token accuracy", "exact_match": "exact match", "rouge_l": "ROUGE-L", "chrf": "chrF"}
_INSTALL = "pip install 'sft-play[eval]'"
# Characters of scripts that put no spaces between words.
_ALONE = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_WORD = rf"{_ALONE}\p{{M}}*|[[\p{{L}}\p{{N}}]--{_ALONE}][[\p{{L}}\p{{N}}\p{{M}}]--{_ALONE}]*"


@dataclass(frozen=True)
class Metric:
    """A figure of each answer; `is_share`: between 0 and 1, shown in percent."""

    name: str
    compare: Compare
    is_share: bool = False


def metrics_named(names: Sequence[str]) -> list[Metric]:
    """The metrics of METRICS=; without names all built-in ones that are installed. Raises ConfigError where a name is
    unknown, its package is not installed, or a `module:function` cannot be imported."""
    if not names:
        lacking = [name for name in PACKAGES if not _is_installed(name)]
        if lacking:
            logger.info("Not measured: %s; %s adds what they need", ", ".join(lacking), _INSTALL)
        return [_built_in(name) for name in BUILT_IN if name not in lacking]
    if NONE in names:
        if len(set(names)) > 1:
            raise ConfigError(f"METRICS={one_line(' '.join(names))}: {NONE} excludes other metrics")
        return []
    return [_named(name) for name in dict.fromkeys(names)]


def _named(name: str) -> Metric:
    if ":" in name:
        return Metric(name, _own(name))
    if name not in BUILT_IN:
        there = f"there are {', '.join(BUILT_IN)}, {NONE} and your own module:function"
        hint = did_you_mean(name, [*BUILT_IN, NONE]) or there
        raise ConfigError(f"METRICS={one_line(name)} is not a metric; {hint}")
    if not _is_installed(name):
        raise ConfigError(f"METRICS={name} needs the package {PACKAGES[name]}: {_INSTALL}")
    return _built_in(name)


def _is_installed(name: str) -> bool:
    return name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None


def _built_in(name: str) -> Metric:
    if name == "chrf":
        from sacrebleu.metrics.chrf import CHRF

        chrf = CHRF()  # chrF2, as sacrebleu's own default: characters up to 6-grams, no words, beta 2
        return Metric(name, lambda answer, reference, _: float(chrf.sentence_score(answer, [reference]).score))
    if name == "rouge_l":
        return Metric(name, lambda answer, reference, _: rouge_l(answer, reference), is_share=True)
    return Metric(
        name, lambda answer, reference, _: float(GeneratedAnswer(Question([], "", reference), answer).is_correct), is_share=True
    )


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1: of the longest common subsequence of `words`, the harmonic mean of its share of the answer's words
    and of the reference's. Of texts without any word: 1 where they are equal, else 0."""
    from rapidfuzz.distance import LCSseq

    one, other = words(answer), words(reference)
    if not one and not other:
        return float(answer.strip() == reference.strip())
    return float(2 * LCSseq.similarity(one, other) / (len(one) + len(other)))


def words(text: str) -> list[str]:
    """The words of a text for ROUGE-L: maximal runs of letters and digits with their combining marks, in NFKC and case
    folded; of scripts without spaces each character. Of ASCII texts the tokens of Google's rouge-score without
    stemming."""
    found: list[str] = regex.findall(_WORD, unicodedata.normalize("NFKC", text).casefold(), flags=regex.V1)
    return found


def _own(name: str) -> Compare:
    module, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder first, not the current one
        sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # importing runs the user's own code
        why = f"{type(error).__name__}: {one_line(str(error))}"
        raise ConfigError(f"METRICS={one_line(name)} cannot be imported from {folder}: {why}") from error
    if not callable(function):
        raise ConfigError(f"METRICS={one_line(name)} is of type {type(function).__name__}, not a function")
    return functools.partial(_checked, name, function)


def _checked(name: str, function: Any, answer: str, reference: str, messages: Sequence[Message]) -> float:
    try:
        value = function(answer, reference, [dict(message) for message in messages])
        number = float(value)
    except Exception as error:  # the user's own code
        raise ConfigError(f"{one_line(name)} failed: {type(error).__name__}: {one_line(str(error))}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{one_line(name)} returned {value!r}, which is not a finite number")
    return number


LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0


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
        ends = {"base": finite(self.base), "tuned": finite(self.tuned)}
        return {**ends, **self.interval.as_json(), "verdict": self.verdict}

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
    losses, shares = (
        [np.array([getattr(one, of) / max(1, one.tokens) for one in measured.scores]) for measured in (base, tuned)]
        for of in ("nll", "correct")
    )
    figures = [
        _figure("loss", *losses, weights=tokens, is_loss=True),
        _figure("token_accuracy", *shares, weights=tokens, is_share=True),
    ]
    for metric in metrics if rows.asked else ():
        values = [np.array(measured.values[metric.name]) for measured in (base, tuned)]
        figures.append(_figure(metric.name, *values, weights=np.ones(len(values[0])), is_share=metric.is_share))
    return tuple(figures)


def _figure(name: str, base: Any, tuned: Any, *, weights: Any, **kind: bool) -> EvalFigure:
    interval = paired_bootstrap(base, tuned, weights=weights, level=LEVEL, resamples=RESAMPLES, seed=SEED)
    before, after = (float(np.average(values, weights=weights)) for values in (base, tuned))
    return EvalFigure(name, before, after, interval, **kind)


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
    return align_columns(cells)


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
