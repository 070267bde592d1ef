"""`make report`: what a run's folder records, read once, and one page about it; nothing is measured or computed a
second time. The run may be finished, stopped, failed or running: every part may be missing, since a run that was killed
early has written little.

The page's sections, in their order: how it ended, warnings, curves, the plan beside what was measured, answers, and
what was run: settings, machine, data, and the command that repeats it.
"""

import contextlib
import functools
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sft_play.answers import Answer
from sft_play.config.options import all_options
from sft_play.errors import SftPlayError
from sft_play.finished.listing import RunStatus, run_status
from sft_play.finished.page import Chart, Curve, Points, ReportSection, ReportTable, write_page
from sft_play.finished.run import next_command_line
from sft_play.log import one_line
from sft_play.runs.files import read_json, read_metric_lines, read_summary
from sft_play.runs.folder import RunFolder
from sft_play.text import GIB, format_duration, format_size

logger = logging.getLogger(__name__)

MAX_WARNINGS = 60
REPORT_FILE = "report.html"

_RANK_SUFFIX = re.compile(r"_rank_\d+$")
_WARNING_LINE = re.compile(r"^(\d{4}-\d\d-\d\dT[\d:]+) (?:WARNING|ERROR|CRITICAL) \S+?: (.*)$", re.MULTILINE)
# Keys of metrics.jsonl that are kept; the losses of sources (`loss_NAME`, `eval_loss_NAME`) are kept too.
_CURVE_KEYS = {
    *("loss", "eval_loss", "test_loss", "eval_exact_match", "test_exact_match", "learning_rate", "grad_norm"),
    *("tokens_per_s", "step_time_s", "padding_share", "memory_peak_gib", "memory_allocated_gib"),
    *("memory_reserved_gib", "memory_resident_gib", "memory_predicted_gib", "eval_generated_rows"),
}


# --- what the folder records ------------------------------------------------------------------------------------------
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
    for _, entry in read_metric_lines(path):
        curves = by_stage.setdefault(entry.get("stage"), {})
        for key, value in entry.items():
            # a bool is an int to Python, and no point of a curve
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and (key in _CURVE_KEYS or ("loss_" in key and not _RANK_SUFFIX.search(key))):
                curves.setdefault(key, []).append((entry["step"], value))
    return by_stage


def _read_warnings(log_path: Path) -> tuple[str, ...]:
    if not log_path.is_file():
        return ()
    first_times: dict[str, str] = {}
    for time, message in _WARNING_LINE.findall(log_path.read_text(encoding="utf-8", errors="replace")):
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
        before, after = (record.held_out_metric(moment, name) for moment in ("before", "after"))
        texts = [number_format.format(value) for value in (before, after) if value is not None]
        if texts:
            headline[label] = " → ".join(texts) + (" before" if after is None else "")
    answered_rows = record.held_out_metric("after", "generated_rows")
    if answered_rows and "Exact match" in headline:
        headline["Exact match"] += f" of {answered_rows:,.0f} rows"
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


# --- the report -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunReport(Answer):
    """A report that was written."""

    record: RunRecord
    path: Path
    sections: tuple[str, ...]
    charts: tuple[Chart, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True, "run": str(self.record.folder.path), "path": str(self.path), "status": self.record.status,
            "sections": list(self.sections), "charts": len(self.charts), "figures": headline_metrics(self.record),
            "warnings": list(self.record.warnings),
        }  # fmt: skip

    def lines(self) -> list[str]:
        metrics = ", ".join(f"{name.lower()} {value}" for name, value in headline_metrics(self.record).items())
        lines = [f"Run {self.record.folder.path.name}: {metrics}"]
        if self.record.warnings:
            lines.append(f"Warnings in the log: {len(self.record.warnings)}")
        compare_command = next_command_line("compare", RUNS=f"{self.record.folder.path} OTHER")
        return [*lines, f"Written to: {self.path}", f"{compare_command} shows it beside another run"]


def write_report(record: RunRecord, *, path: Path | None = None) -> RunReport:
    """Write the report of a run; raises ConfigError where the page cannot be written there."""
    charts = build_run_charts(record)
    sections = report_sections(record, charts)
    target = path or record.folder.path / REPORT_FILE
    title = f"{record.folder.path.name}: training report"
    write_page(target, title, headline=[*headline_metrics(record).items()], sections=sections)
    titles = tuple(section.title for section in sections if not section.is_empty)
    return RunReport(record, target, titles, tuple(charts))


@contextlib.contextmanager
def report_on_exit(folder: RunFolder) -> Iterator[None]:
    """Write the report once the run inside has ended, however it ended; not where it was refused before it began."""
    path = folder.manifest_path
    manifest_before = path.read_bytes() if path.is_file() else None
    try:
        yield
    finally:
        # a refused run leaves an earlier report alone
        if path.is_file() and path.read_bytes() != manifest_before:
            write_final_report(folder)


def write_final_report(folder: RunFolder) -> None:
    """Write the report of a run that has just ended, after its summary, and name it; whatever goes wrong is a
    warning."""
    if not folder.manifest_path.is_file():  # nothing was trained, and the folder is gone
        return
    try:
        logger.info("Report: %s", write_report(read_record(folder)).path)
    except (SftPlayError, Exception) as error:  # a run that was trained has not failed because of its report
        message = f"{type(error).__name__}: {one_line(str(error))}"
        logger.warning("The report was not written: %s; make report RUN=%s writes it", message, folder.path)


# --- the curves -------------------------------------------------------------------------------------------------------
def build_run_charts(record: RunRecord) -> list[Chart]:
    """The curves of a run; a chart that the run cannot fill is left out."""
    curve = record.curve
    padding = curve("padding_share")
    if len({value for _, value in padding}) == 1:  # rows without padding
        padding = []
    predicted_speeds = [
        (start + step, part.summary["predicted_tokens_per_s"])
        for part, start in zip(record.parts, record.stage_starts, strict=True)
        if part.summary.get("predicted_tokens_per_s")
        for step in (1, part.steps)
    ]
    all_charts = [
        Chart("Loss", (Curve("training", curve("loss")), *_held_out_curves(record, "loss")), may_use_log=True),
        Chart("Exact match", _held_out_curves(record, "exact_match"), is_share=True),
        Chart("Loss by source", _source_curves(record), may_use_log=True),
        Chart("Learning rate", (Curve("learning rate", curve("learning_rate")),)),
        Chart("Gradient norm", (Curve("gradient norm", curve("grad_norm")),), may_use_log=True),
        Chart(
            "Tokens per second",
            (Curve("measured", curve("tokens_per_s")), Curve("predicted", predicted_speeds, None)),
        ),
        Chart(
            "Memory of a rank, in GiB",
            (
                Curve("peak", curve("memory_peak_gib")),
                Curve("held", curve("memory_allocated_gib") or curve("memory_resident_gib"), 1),
                Curve("reserved", curve("memory_reserved_gib"), 2),
                Curve("predicted peak", curve("memory_predicted_gib"), None),
            ),
        ),
        Chart("Padding", (Curve("padding", padding),), is_share=True),
    ]
    charts = []
    for chart in all_charts:
        filled = tuple(chart_curve for chart_curve in chart.curves if chart_curve.points)
        # what was predicted says nothing about the run where it is alone
        if any(chart_curve.colour_index is not None for chart_curve in filled):
            charts.append(replace(chart, curves=filled, stage_starts=tuple(record.stage_starts)))
    return charts


def _held_out_curves(record: RunRecord, metric: str) -> tuple[Curve, ...]:
    validation, test = record.curve(f"eval_{metric}"), record.curve(f"test_{metric}")
    return Curve("validation", validation, 1, shows_points=True), Curve("test", test, 2, shows_points=True)


def _source_curves(record: RunRecord) -> tuple[Curve, ...]:
    names = sorted({name for part in record.parts for name in part.curves if name.startswith("loss_")})
    training = [Curve(name.removeprefix("loss_"), record.curve(name), index) for index, name in enumerate(names)]
    held_out = [
        Curve(f"{name.removeprefix('loss_')}, validation", record.curve(f"eval_{name}"), index, shows_points=True)
        for index, name in enumerate(names)
    ]
    return (*training, *held_out)


# --- the sections -----------------------------------------------------------------------------------------------------
def report_sections(record: RunRecord, charts: Sequence[Chart]) -> list[ReportSection]:
    """The parts of the page, in their order; some may be empty."""
    error = record.manifest.get("error")
    warnings = [*record.warnings[:MAX_WARNINGS]]
    if len(record.warnings) > MAX_WARNINGS:
        warnings.append(f"and {len(record.warnings) - MAX_WARNINGS} more in train.log")
    comparisons = []
    for part in record.parts:
        headers = (part.name or "", "predicted", "measured", "difference")
        comparisons.append(ReportTable(headers, [*_predicted_and_measured(part)]))
    return [
        ReportSection("How it ended", items=[str(error)] if error and record.status == "failed" else []),
        ReportSection("Warnings", items=warnings),
        ReportSection("Curves", charts=charts),
        ReportSection("Predicted and measured", tables=[table for table in comparisons if table.rows]),
        ReportSection("Answers before and after", samples=record.summary.get("samples") or []),
        _run_section(record),
    ]


def _predicted_and_measured(part: RunPart) -> Iterator[tuple[str, ...]]:
    """Rows of a table: memory of each phase, the peak, speed, and the time of all steps."""
    memory_kind, predicted_peak, measured_peak = compare_peak_memory(part)
    # tensors on a GPU; on a CPU resident memory, which older runs did not predict by moment
    keys = ("predicted_reserved", "measured_rss")
    if part.is_on_gpu:
        keys = ("predicted_allocated", "measured_allocated")
    moments = part.summary.get("peak_bytes_by_moment") or {}
    figures: list[tuple[str, Any, Any, Any]] = [
        (f"memory in {moment}", peak.get(keys[0]), peak.get(keys[1]), format_size)
        for moment, peak in moments.items()
        if isinstance(peak, dict)
    ]
    figures.append((f"peak, {memory_kind}", predicted_peak, measured_peak, format_size))
    plan, planned_run = part.plan, part.plan.get("run") or {}
    planned_speed = plan.get("tokens_per_s") if plan.get("speed_known") else None
    speed = part.summary.get("predicted_tokens_per_s", planned_speed)
    figures.append(("tokens/s in training", speed, part.tokens_per_s, "{:,.0f}".format))
    hours = planned_run.get("hours")
    if isinstance(hours, (int, float)) and part.steps == planned_run.get("steps"):
        figures.append(("time of all steps", hours * 3600, part.training_s, format_duration))
    for label, predicted, measured, format_value in figures:
        if predicted is None and measured is None:
            continue
        texts = ("-" if value is None else format_value(value) for value in (predicted, measured))
        yield label, *texts, f"{measured / predicted - 1:+.0%}" if predicted and measured is not None else ""


def _run_section(record: RunRecord) -> ReportSection:
    settings, manifest, plan = record.settings, record.manifest, record.parts[-1].plan
    versions, git, hardware = (manifest.get(name) or {} for name in ("versions", "git", "hardware"))
    layout = ""
    if plan:
        layout = f"{plan.get('layout')}, ranks {plan.get('ranks')}, micro {plan.get('micro_batch')}"
        layout += f" x accum {plan.get('grad_accum')} = effective {plan.get('effective_batch')}"
    gpu_counts = Counter(str(gpu.get("name")) for gpu in hardware.get("gpus") or [])
    pairs = {
        "model": (settings.get("model") or {}).get("name"),
        "training": ", ".join(filter(None, [settings.get("task_mode"), (settings.get("tuning") or {}).get("mode")])),
        "stages": ", ".join(f"{part.name} ({part.steps:,} steps)" for part in record.parts if part.name),
        "layout": layout,
        "started": manifest.get("started"),
        "machine": ", ".join(f"{count} x {name}" for name, count in gpu_counts.items()) or hardware.get("cpu_name"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": git.get("commit"),
        "weights": record.summary.get("model_path"),
        "again": f"make reproduce RUN={record.folder.shell_path}" if manifest.get("config_path") else None,
    }
    config_path = record.folder.path / "config.yaml"
    folded = {
        "What was decided, and why": "\n".join(map(str, manifest.get("choices") or plan.get("reasons") or [])),
        "Every setting": _format_lines(settings_by_path(settings)),
        "config.yaml, as given": config_path.read_text("utf-8", "replace") if config_path.is_file() else "",
        "The machine": _format_lines(hardware),
    }
    for name, facts in (manifest.get("data") or {}).items():
        if isinstance(facts, dict):
            # the report of its rows has keys of its own
            entries = facts | (facts.get("report") or {})
            folded[f"Data: {name}"] = _format_lines({key: entries[key] for key in entries if key != "report"})
    return ReportSection("What was run", pairs=_filled_pairs(pairs), folded=_filled_pairs(folded))


def _filled_pairs(texts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(text)) for name, text in texts.items() if text]


def _format_lines(values: Mapping[str, Any]) -> str:
    """A line for each value; texts as they are, others as JSON."""
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in values.items()
    )
