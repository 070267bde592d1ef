"""Figures of a generated answer beside its reference: exact match, ROUGE-L, chrF, and functions of the user's own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.data.sources.messages import Message
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.spelling import did_you_mean
from sft_play.training.measure.exact_match import Answer, Question

logger = logging.getLogger(__name__)

Compare = Callable[[str, str, Sequence[Message]], float]
"""(answer, reference, messages before the answer) to a figure; higher is better."""
NONE = "none"
"""The name that asks for no metric, so that no answers are generated."""
PACKAGES = {"rouge_l": "rapidfuzz", "chrf": "sacrebleu"}
"""Metrics that need a package of the extra `eval`."""
BUILT_IN = ("exact_match", *PACKAGES)
TITLES = {"token_accuracy": "token accuracy", "exact_match": "exact match", "rouge_l": "ROUGE-L", "chrf": "chrF"}
"""Names of figures as they are printed."""
_INSTALL = "pip install 'sft-play[eval]'"
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
"""Scripts that put no spaces between words, by the first word of their characters' Unicode names."""


@dataclass(frozen=True)
class Metric:
    """A figure of each answer; `is_share`: between 0 and 1, shown in percent."""

    name: str
    compare: Compare
    is_share: bool = False

    @property
    def title(self) -> str:
        """Its name for a person."""
        return TITLES.get(self.name, self.name)


def metrics_named(names: Sequence[str]) -> list[Metric]:
    """The metrics of METRICS=; without names all built-in ones that are installed.

    Raises:
        ConfigError: a name is unknown, its package is not installed, or a `module:function` cannot be imported.
    """
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
    return Metric(name, {"exact_match": _exact_match, "rouge_l": _rouge_l}[name], is_share=True)


def _exact_match(answer: str, reference: str, _: Sequence[Message]) -> float:
    return float(Answer(Question([], "", reference), answer).right)


def _rouge_l(answer: str, reference: str, _: Sequence[Message]) -> float:
    return rouge_l(answer, reference)


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1: of the longest common subsequence of `words`, the harmonic mean of its share of the answer's words
    and of the reference's. Of texts without any word: 1 where they are equal, else 0."""
    from rapidfuzz.distance import LCSseq

    one, other = words(answer), words(reference)
    if not one and not other:
        return float(answer.strip() == reference.strip())
    return float(2 * LCSseq.similarity(one, other) / (len(one) + len(other)))


def words(text: str) -> list[str]:
    """The words of a text for ROUGE-L: maximal runs of letters and digits, with their combining marks, in NFKC and case
    folded; of scripts without spaces between words each character is one. Nothing is stemmed.

    Of ASCII texts these are the tokens of Google's rouge-score without stemming.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    kinds = "".join(map(_kind, folded))
    return [folded[match.start() : match.end()] for match in re.finditer("am*|w[wm]*", kinds)]


@functools.lru_cache(maxsize=100_000)
def _kind(char: str) -> str:
    """w: a letter or digit; a: one that is a word alone; m: a combining mark; a space: anything else."""
    category = unicodedata.category(char)[0]
    if category in "LN":
        return "a" if unicodedata.name(char, "").startswith(_WITHOUT_SPACES) else "w"
    return "m" if category == "M" else " "


def _own(name: str) -> Compare:
    """A function of the user's, `module:function`, where module is importable from the current folder.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder first, not the current one
        sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # importing runs the user's own code
        raise ConfigError(
            f"METRICS={one_line(name)} cannot be imported from {folder}: {type(error).__name__}: {one_line(str(error))}"
        ) from error
    if not callable(function):
        raise ConfigError(f"METRICS={one_line(name)} is of type {type(function).__name__}, not a function")
    return functools.partial(_checked, name, function)


def _checked(name: str, function: Any, answer: str, reference: str, messages: Sequence[Message]) -> float:
    """What the user's function returns, as a number; raises ConfigError where it fails or returns something else."""
    try:
        value = function(answer, reference, [dict(message) for message in messages])
        number = float(value)
    except Exception as error:  # the user's own code
        raise ConfigError(f"{one_line(name)} failed: {type(error).__name__}: {one_line(str(error))}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{one_line(name)} returned {value!r}, which is not a finite number")
    return number
