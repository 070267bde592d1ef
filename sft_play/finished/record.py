"""What a run's folder records, read once for `report` and `compare`: of a finished, stopped, failed
or running run.

Every part may be missing, since a run that was killed early has written little. Nothing here
loads a model.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sft_play.config.options import all_options
from sft_play.finished.listing import RunStatus, find_best_evaluation, run_status
from sft_play.runs.files import read_json, read_metric_lines, read_summary
from sft_play.runs.folder import RunFolder
from sft_play.text import GIB, format_duration, format_size

Points = Sequence[tuple[float, float]]

_RANK_SUFFIX = re.compile(r"_rank_\d+$")
_WARNING_LINE = re.compile(r"^(\d{4}-\d\d-\d\dT[\d:]+) (WARNING|ERROR|CRITICAL) \S+?: (.*)$")
# Keys of metrics.jsonl that are kept; the losses of sources (`loss_NAME`, `eval_loss_NAME`) are kept too.
_CURVE_KEYS = {
    *("loss", "eval_loss", "test_loss", "eval_exact_match", "test_exact_match", "learning_rate", "grad_norm"),
    *("tokens_per_s", "step_time_s", "padding_share", "mfu", "memory_peak_gib", "memory_allocated_gib"),
    *("memory_reserved_gib", "memory_resident_gib", "memory_predicted_gib"),
    *("eval_generated_rows", "test_generated_rows"),
}


@dataclass(frozen=True)
class RunPart:
    """A run without stages, or one of its stages."""

    name: str | None
    plan: dict[str, Any]
    settings: dict[str, Any]
    summary: dict[str, Any]
    curves: Mapping[str, Points]
    """By the names of metrics.jsonl; steps are counted within this part. NaN and infinite values are left out."""
    last_metrics: dict[str, Any]
    """The last line of metrics.jsonl that has a training loss."""

    @property
    def steps(self) -> int:
        """The last step that was logged."""
        return int(max((points[-1][0] for points in self.curves.values()), default=0))

    @property
    def is_on_gpu(self) -> bool:
        """True if the plan is for GPUs."""
        return bool((self.plan.get("hardware") or {}).get("gpus"))

    @cached_property
    def training_s(self) -> float | None:
        """Seconds of all steps that were logged, evaluation and saving left out; None before the first."""
        total, last_step = 0.0, 0.0
        for step, seconds in self.curves.get("step_time_s", ()):  # a log speaks for every step since the one before
            total, last_step = total + seconds * (step - last_step), step
        return total if last_step else None

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Mean speed: that of the summary, else of what was logged so far."""
        recorded = self.summary.get("tokens_per_s")
        if isinstance(recorded, (int, float)):
            return float(recorded)
        speeds = [speed for _, speed in self.curves.get("tokens_per_s", ())]
        return sum(speeds) / len(speeds) if speeds else None


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it."""

    folder: RunFolder
    status: RunStatus
    manifest: dict[str, Any]
    settings: dict[str, Any]
    summary: dict[str, Any]
    parts: tuple[RunPart, ...]
    warnings: tuple[str, ...]
    """Of the log, each once, with the time of its first."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    @property
    def steps(self) -> int:
        """The last step that was logged, over all parts."""
        return sum(part.steps for part in self.parts)

    @property
    def has_stages(self) -> bool:
        """True if it has stages."""
        return self.parts[0].name is not None

    @property
    def stage_starts(self) -> list[tuple[str, int]]:
        """Name and first step of each stage, counted over the whole run."""
        first_steps = itertools.accumulate((part.steps for part in self.parts), initial=0)
        return [(part.name or "", first_step) for part, first_step in zip(self.parts, first_steps, strict=False)]

    def held_out_metric(self, moment: Literal["before", "after"], name: str) -> float | None:
        """A held-out figure (`loss`, `exact_match`), or a count of rows, before or after training."""
        # of a run that was killed: its manifest has what was measured first
        metrics = self.summary.get(moment) or (self.manifest.get(moment) if not self.summary else None) or {}
        value = metrics.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    def curve(self, name: str) -> list[tuple[float, float]]:
        """One curve over all parts, its steps counted over the whole run."""
        joined: list[tuple[float, float]] = []
        for part, (_, first_step) in zip(self.parts, self.stage_starts, strict=True):
            joined += [(first_step + step, value) for step, value in part.curves.get(name, ())]
        return joined

    def curve_names(self, prefix: str) -> list[str]:
        """The names of all curves that begin with `prefix` and are longer than it."""
        names = {name for part in self.parts for name in part.curves if name.startswith(prefix) and name != prefix}
        return sorted(names)


def read_record(folder: RunFolder) -> RunRecord:
    """Read everything that the folder of a run records; raises RunFolderError where it is not a run of this toolkit."""
    manifest = folder.read_manifest()
    settings = read_json(folder.path / "resolved.json")
    # of stages those that have a folder: a run that failed in its first stage has no others
    curriculum = settings.get("curriculum")
    stages = (
        [str(stage["name"]) for stage in curriculum if isinstance(stage, dict) and "name" in stage]
        if curriculum
        else []
    )
    metrics = _read_stage_metrics(folder.metrics_path)
    parts = [
        _read_part(folder.stage_folder(name), metrics) for name in stages if folder.stage_folder(name).path.is_dir()
    ]
    summary, warnings = read_summary(folder.path), tuple(_read_warnings(folder.log_path))
    parts = parts or [_read_part(folder, metrics)]
    return RunRecord(folder, run_status(folder, manifest), manifest, settings, summary, tuple(parts), warnings)


# What metrics.jsonl says of one stage, or of a run without stages: the curves, and the last line with a loss.
_StageMetrics = tuple[dict[str, list[tuple[float, float]]], dict[str, Any]]


def _read_stage_metrics(path: Path) -> dict[str | None, _StageMetrics]:
    """The curves by stage (None without stages), read line by line: a long run has 100,000 of them."""
    by_stage: dict[str | None, _StageMetrics] = {}
    for _, entry in read_metric_lines(path) if path.is_file() else ():
        curves, last_metrics = by_stage.setdefault(entry.get("stage"), ({}, {}))
        for key, value in entry.items():
            # a bool is an int to Python, and no point of a curve
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and (key in _CURVE_KEYS or ("loss_" in key and not _RANK_SUFFIX.search(key))):
                curves.setdefault(key, []).append((entry["step"], value))
        if "loss" in entry:
            last_metrics.clear()
            last_metrics.update(entry)
    return by_stage


def _read_part(folder: RunFolder, metrics: Mapping[str | None, _StageMetrics]) -> RunPart:
    plan, settings = (read_json(folder.path / f"{name}.json") for name in ("plan", "resolved"))
    return RunPart(
        folder.stage_name, plan, settings, read_summary(folder.path), *metrics.get(folder.stage_name, ({}, {}))
    )


def _read_warnings(log_path: Path) -> list[str]:
    try:
        text = log_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    first_times: dict[str, str] = {}
    for line in text.splitlines():
        match = _WARNING_LINE.match(line)
        if match:
            first_times.setdefault(match[3], match[1])
    return [f"{time} {message}" for message, time in first_times.items()]


def settings_by_path(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a resolved.json by their dotted paths, in the order of the reference; those it lacks left out."""
    settings = {}
    for path in all_options():
        *sections, name = path.split(".")
        section = functools.reduce(lambda mapping, key: mapping.get(key) or {}, sections, resolved)
        if name in section:
            settings[path] = section[name]
    return settings


def headline_metrics(record: RunRecord) -> list[tuple[str, str]]:
    """The few figures that matter, as (name, value) in words; unknown ones are left out."""
    planned_steps = [(part.plan.get("run") or {}).get("steps") for part in record.parts]
    total = sum(steps for steps in planned_steps if isinstance(steps, (int, float)))
    suffix = f" of {total:,}" if total and total != record.steps and not record.has_stages else ""
    headline = [("Status", record.status), ("Steps", f"{record.steps:,}{suffix}")]
    for name, label, number_format in (("loss", "Held-out loss", "{:.4f}"), ("exact_match", "Exact match", "{:.1%}")):
        before_value, after_value = (record.held_out_metric(moment, name) for moment in ("before", "after"))
        formatted = [number_format.format(value) for value in (before_value, after_value) if value is not None]
        if formatted:
            generated_rows = record.held_out_metric("before" if after_value is None else "after", "generated_rows")
            suffix = f" of {generated_rows:,.0f} rows" if generated_rows and name == "exact_match" else ""
            headline.append(
                (label, (" → ".join(formatted) if after_value is not None else f"{formatted[0]} before") + suffix)
            )
    answered_rows = max((rows for _, rows in record.curve("eval_generated_rows")), default=None)
    evaluations = [
        {name: value, "eval_generated_rows": answered_rows}
        for name in ("eval_loss", "eval_exact_match")
        for _, value in record.curve(name)
    ]
    best = find_best_evaluation(evaluations, record.summary)
    if best is not None and not isinstance(record.summary.get("after"), dict):
        suffix = f" of {best[2]:,} rows" if best[2] else ""
        headline.append((f"Best held-out {best[0].replace('_', ' ')}", f"{best[1]:.4g}{suffix}"))
    speed = mean_tokens_per_s(record)
    headline += [("Tokens/s", f"{speed:,.0f}")] if speed else []
    kind, _, peak = max(map(compare_peak_memory, record.parts), key=lambda part: part[2] or 0)
    headline += [(f"Peak memory, {kind}", format_size(peak))] if peak else []
    wall_s = record.summary.get("wall_s")
    headline += [("Time", format_duration(wall_s))] if wall_s else []
    return headline


def mean_tokens_per_s(record: RunRecord) -> float | None:
    """Speed in training: of the whole run where it has ended, else of the part that it has come to."""
    recorded = record.summary.get("tokens_per_s")
    return float(recorded) if recorded else record.parts[-1].tokens_per_s


def compare_peak_memory(part: RunPart) -> tuple[str, int | None, int | None]:
    """The peak by which plan and run are compared: what is counted (reserved on a GPU, resident on a CPU) and in which
    moment of the run, its highest; predicted and measured bytes; of a run that has not ended what it has logged."""
    peak = part.summary.get("peak_bytes") or {}
    planned_peak = part.plan.get("peak_bytes") or {}
    predicted = peak.get("predicted_reserved", planned_peak.get("reserved"))
    memory_kind, key = ("reserved", "measured_reserved") if part.is_on_gpu else ("resident", "measured_rss")
    measured = peak.get(key)
    if measured is None:  # killed or still running: no summary, but every log line has the peak so far
        logged_gib = part.last_metrics.get("memory_peak_gib")  # of allocated bytes on a GPU
        if isinstance(logged_gib, (int, float)) and not part.summary:
            measured = int(logged_gib * GIB)
            memory_kind, predicted = (
                ("allocated", planned_peak.get("allocated")) if part.is_on_gpu else (memory_kind, predicted)
            )
    # runs of earlier versions have the peak of their training steps
    return (
        f"{memory_kind}, in {peak.get('moment') or 'training'}" if peak else f"{memory_kind} so far",
        predicted,
        measured,
    )


def format_percent_difference(predicted: float | None, measured: float | None) -> str:
    """How far the measured value is from the predicted one."""
    return f"{measured / predicted - 1:+.0%}" if predicted and measured is not None else ""
