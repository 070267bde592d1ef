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
_WARNING_LINE = re.compile(r"^(\d{4}-\d\d-\d\dT[\d:]+) (?:WARNING|ERROR|CRITICAL) \S+?: (.*)$", re.MULTILINE)
# Keys of metrics.jsonl that are kept; the losses of sources (`loss_NAME`, `eval_loss_NAME`) are kept too.
_CURVE_KEYS = {
    *("loss", "eval_loss", "test_loss", "eval_exact_match", "test_exact_match", "learning_rate", "grad_norm"),
    *("tokens_per_s", "step_time_s", "padding_share", "memory_peak_gib", "memory_allocated_gib"),
    *("memory_reserved_gib", "memory_resident_gib", "memory_predicted_gib", "eval_generated_rows"),
}


@dataclass(frozen=True)
class RunPart:
    """A run without stages, or one of its stages."""

    name: str | None
    plan: dict[str, Any]
    summary: dict[str, Any]
    # By the names of metrics.jsonl; steps are counted within this part. NaN and infinite values are left out.
    curves: Mapping[str, Points]

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
        recorded: float | None = self.summary.get("tokens_per_s")
        speeds = [speed for _, speed in self.curves.get("tokens_per_s", ())]
        if recorded is None and speeds:
            return sum(speeds) / len(speeds)
        return recorded


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it."""

    folder: RunFolder
    status: RunStatus
    manifest: dict[str, Any]
    settings: dict[str, Any]
    summary: dict[str, Any]
    parts: tuple[RunPart, ...]
    # Of the log, each once, with the time of its first.
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    @property
    def steps(self) -> int:
        """The last step that was logged, over all parts."""
        return sum(part.steps for part in self.parts)

    @property
    def stage_starts(self) -> list[int]:
        """The first step of each part, counted over the whole run."""
        return list(itertools.accumulate((part.steps for part in self.parts[:-1]), initial=0))

    def held_out_metric(self, moment: Literal["before", "after"], name: str) -> float | None:
        """A held-out figure (`loss`, `exact_match`), or a count of rows, before or after training."""
        # of a run that was killed: its manifest has what was measured first
        record = self.summary or self.manifest
        value = (record.get(moment) or {}).get(name)
        return float(value) if isinstance(value, (int, float)) else None

    def curve(self, name: str) -> list[tuple[float, float]]:
        """One curve over all parts, its steps counted over the whole run."""
        joined: list[tuple[float, float]] = []
        for part, first_step in zip(self.parts, self.stage_starts, strict=True):
            joined += [(first_step + step, value) for step, value in part.curves.get(name, ())]
        return joined

    def curve_names(self, prefix: str) -> list[str]:
        """The names of all curves that begin with `prefix` and are longer than it."""
        names = {name for part in self.parts for name in part.curves if name.startswith(prefix) and name != prefix}
        return sorted(names)


def read_record(folder: RunFolder) -> RunRecord:
    """Read everything that the folder of a run records; raises RunFolderError where it is not a run of this toolkit."""
    manifest, settings = folder.read_manifest(), read_json(folder.path / "resolved.json")
    stages = [folder.stage_folder(str(stage.get("name"))) for stage in settings.get("curriculum") or ()]
    # a run that failed in its first stage has no folders of the others
    part_folders = [stage for stage in stages if stage.path.is_dir()] or [folder]
    curves = _read_curves(folder.metrics_path)
    parts = tuple(
        RunPart(
            part.stage_name,
            read_json(part.path / "plan.json"),
            read_summary(part.path),
            curves.get(part.stage_name, {}),
        )
        for part in part_folders
    )
    summary, warnings = read_summary(folder.path), _read_warnings(folder.log_path)
    return RunRecord(folder, run_status(folder, manifest), manifest, settings, summary, parts, warnings)


def _read_curves(path: Path) -> dict[str | None, dict[str, list[tuple[float, float]]]]:
    """The curves of each stage (None: of a run without stages) by name."""
    by_stage: dict[str | None, dict[str, list[tuple[float, float]]]] = {}
    for _, entry in read_metric_lines(path) if path.is_file() else ():
        curves = by_stage.setdefault(entry.get("stage"), {})
        for key, value in entry.items():
            # a bool is an int to Python, and no point of a curve
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and (key in _CURVE_KEYS or ("loss_" in key and not _RANK_SUFFIX.search(key))):
                curves.setdefault(key, []).append((entry["step"], value))
    return by_stage


def _read_warnings(log_path: Path) -> tuple[str, ...]:
    text = log_path.read_text(encoding="utf-8", errors="replace") if log_path.is_file() else ""
    first_times: dict[str, str] = {}
    for time, message in _WARNING_LINE.findall(text):
        first_times.setdefault(message, time)
    return tuple(f"{time} {message}" for message, time in first_times.items())


def settings_by_path(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a resolved.json by their dotted paths, in the order of the reference; those it lacks left out."""
    settings = {}
    for path in all_options():
        *sections, name = path.split(".")
        section = functools.reduce(lambda mapping, key: mapping.get(key) or {}, sections, resolved)
        if name in section:
            settings[path] = section[name]
    return settings


def headline_metrics(record: RunRecord) -> dict[str, str]:
    """The few figures that matter, by name and in words; unknown ones are left out."""
    headline = {"Status": record.status, "Steps": f"{record.steps:,}"}
    planned_steps = (record.parts[0].plan.get("run") or {}).get("steps")
    if record.parts[0].name is None and isinstance(planned_steps, int) and planned_steps != record.steps:
        headline["Steps"] += f" of {planned_steps:,}"
    for name, label, number_format in (("loss", "Held-out loss", "{:.4f}"), ("exact_match", "Exact match", "{:.1%}")):
        values = {moment: record.held_out_metric(moment, name) for moment in ("before", "after")}
        texts = [number_format.format(value) for value in values.values() if value is not None]
        if not texts:
            continue
        headline[label] = " → ".join(texts)
        if values["after"] is None:
            headline[label] += " before"
        rows = record.held_out_metric("before" if values["after"] is None else "after", "generated_rows")
        if rows and name == "exact_match":
            headline[label] += f" of {rows:,.0f} rows"
    answered_rows = max((rows for _, rows in record.curve("eval_generated_rows")), default=None)
    evaluations = [
        {name: value, "eval_generated_rows": answered_rows}
        for name in ("eval_loss", "eval_exact_match")
        for _, value in record.curve(name)
    ]
    best = find_best_evaluation(evaluations, record.summary)
    if best is not None and not record.summary.get("after"):
        metric, value, rows = best
        label = f"Best held-out {metric.replace('_', ' ')}"
        headline[label] = f"{value:.4g} of {rows:,} rows" if rows else f"{value:.4g}"
    speed, wall_s = mean_tokens_per_s(record), record.summary.get("wall_s")
    if speed:
        headline["Tokens/s"] = f"{speed:,.0f}"
    kind, _, peak = max(map(compare_peak_memory, record.parts), key=lambda part_peak: part_peak[2] or 0)
    if peak:
        headline[f"Peak memory, {kind}"] = format_size(peak)
    if wall_s:
        headline["Time"] = format_duration(wall_s)
    return headline


def mean_tokens_per_s(record: RunRecord) -> float | None:
    """Speed in training: of the whole run where it has ended, else of the part that it has come to."""
    return record.summary.get("tokens_per_s") or record.parts[-1].tokens_per_s


def compare_peak_memory(part: RunPart) -> tuple[str, int | None, int | None]:
    """The peak by which plan and run are compared: what is counted (reserved on a GPU, resident on a CPU) and in which
    moment of the run, its highest; predicted and measured bytes; of a run that has not ended what it has logged."""
    peak, planned_peak = part.summary.get("peak_bytes") or {}, part.plan.get("peak_bytes") or {}
    kind, key = ("reserved", "measured_reserved") if part.is_on_gpu else ("resident", "measured_rss")
    predicted = peak.get("predicted_reserved", planned_peak.get("reserved"))
    if part.summary:
        # runs of earlier versions have the peak of their training steps
        return f"{kind}, in {peak.get('moment') or 'training'}", predicted, peak.get(key)
    # killed or still running: no summary, but every log line has the peak so far, on a GPU of allocated bytes
    if part.is_on_gpu:
        kind, predicted = "allocated", planned_peak.get("allocated")
    logged = part.curves.get("memory_peak_gib")
    return f"{kind} so far", predicted, int(logged[-1][1] * GIB) if logged else None
