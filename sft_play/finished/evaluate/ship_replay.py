"""`make ship REPLAY=ship.json`: the verdict computed again from its file's evidence, without the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sft_play.errors import ConfigError
from sft_play.finished.evaluate.ship_rule import FORMAT, Evidence, Thresholds, Verdict, evidence_lines, judge
from sft_play.finished.run import Outcome
from sft_play.log import one_line

_CLOSE = 1e-6
"""Relative difference of two figures that counts as none: other versions of numpy may sum in another order."""


@dataclass(frozen=True)
class Replayed(Outcome):
    """A verdict that was computed again from its file."""

    path: Path
    verdict: Verdict
    thresholds: Thresholds
    differences: tuple[str, ...]
    before: str | None = None
    """The adapter that the run continued, as the file names it."""

    @property
    def ok(self) -> bool:
        return not self.differences and self.verdict.ok

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok, "path": str(self.path), "verdict": self.verdict.word, "reasons": self.verdict.reasons,
            "differences": list(self.differences), "checks": [check.as_json() for check in self.verdict.checks],
        }  # fmt: skip

    def lines(self) -> list[str]:
        lines = evidence_lines(self.verdict, self.thresholds, self.before)
        if self.differences:
            return [*lines, f"{self.path} does NOT follow from its own evidence: {', '.join(self.differences)}"]
        return [*lines, f"Replayed: the figures of {self.path} follow from its evidence"]


def replay(path: Path) -> Replayed:
    """The verdict of a ship.json computed again from its evidence and thresholds, without the model; raises ConfigError
    where the file cannot be read, or is not what `make ship` writes."""
    named = one_line(str(path))
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"REPLAY={named} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"REPLAY={named} is not JSON: {one_line(str(error))}") from None
    if not isinstance(recorded, dict) or recorded.get("format") != FORMAT:
        raise ConfigError(f"REPLAY={named} is not a file that make ship writes (its format is not {FORMAT!r})")
    try:
        evidence = TypeAdapter(Evidence).validate_python(recorded.get("evidence"))
        thresholds = TypeAdapter(Thresholds).validate_python(recorded.get("thresholds"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise ConfigError(f"REPLAY={named}: its evidence is not whole: {one_line(why, limit=300)}") from None
    verdict = judge(evidence, thresholds)
    computed: dict[str, Any] = {
        "ok": verdict.ok, "verdict": verdict.word, "checks": [check.as_json() for check in verdict.checks],
    }  # fmt: skip
    differences = _differences({key: recorded.get(key) for key in computed}, computed)
    before = one_line(str(recorded["before"])) if recorded.get("before") else None
    return Replayed(path, verdict, thresholds, tuple(differences), before)


def _differences(recorded: Any, computed: Any) -> list[str]:
    """The names of the figures that differ; words (`line`, `reason`) repeat figures and are not compared."""
    was, now = dict(_leaves(recorded)), dict(_leaves(computed))
    return [name.removeprefix(".") for name in {**now, **was} if not _is_same(was.get(name), now.get(name))]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("line", "reason"):
                yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, list):
        yield name, len(value)
        for at, inner in enumerate(value):
            named = inner.get("name") if isinstance(inner, dict) else None
            yield from _leaves(inner, f"{name}[{named or at}]")
    else:
        yield name, value


def _is_same(was: Any, now: Any) -> bool:
    if isinstance(now, float) and isinstance(was, int | float) and not isinstance(was, bool):
        return math.isclose(was, now, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return bool(was == now)
