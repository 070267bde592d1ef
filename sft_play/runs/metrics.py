"""A run's metrics.jsonl: one JSON object per line, what was logged at a step or evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sft_play.runs.files import write_text


def keep_metrics_until(path: Path, step: int, *, stage: str | None = None) -> None:
    """Drop the lines of metrics after `step` (in a run with stages, this stage's): a resumed run writes those steps
    again."""
    if path.exists():
        kept = [line for line, entry in metric_lines(path) if entry["step"] <= step or entry.get("stage") != stage]
        write_text(path, "".join(f"{line}\n" for line in kept))


def evaluations(path: Path, *, stage: str | None = None) -> list[dict[str, Any]]:
    """The figures of the validation rows by step, including before training: `step`, `loss`, `exact_match`.

    A resumed run has those of its earlier starts too.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for _, entry in metric_lines(path) if path.exists() else ():
        if entry.get("stage") != stage:
            continue
        figures = {name: entry[f"eval_{name}"] for name in ("loss", "exact_match") if f"eval_{name}" in entry}
        if figures:
            empty = {"step": entry["step"], "loss": None, "exact_match": None}
            by_step[entry["step"]] = by_step.get(entry["step"], empty) | figures
    return [by_step[step] for step in sorted(by_step)]


def metric_lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Complete lines of metrics.jsonl, each with its content."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield line, entry
