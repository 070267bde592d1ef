"""`make report` and `make compare`: what a run's folder records, read once, on one page, alone or
beside other runs; nothing is measured or computed a second time. A run may be finished, stopped,
failed or running: every part may be missing, since a run that was killed early has written little.

The report's sections, in their order: how it ended, warnings, curves, the plan beside what was
measured, answers, and what was run: settings, machine, data, and the command that repeats it. A
comparison has the settings that differ, the results, and the curves over one another.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sft_play.answers import Answer
from sft_play.config.options import all_options
from sft_play.errors import ConfigError, SftPlayError
from sft_play.finished.listing import RunStatus, find_best_checkpoint, run_status
from sft_play.finished.run import next_command_line, translate_write_errors
from sft_play.log import escape_control, one_line, redact, secret_values
from sft_play.runs.folder import (
    RunFolder,
    next_run_commands,
    read_json,
    read_metric_lines,
    read_summary,
    write_text,
)
from sft_play.text import GIB, build_table, format_duration, format_size, render_lines
from sft_play.variables import spell_commands

logger = logging.getLogger(__name__)

REPORT_FILE, COMPARE_FILE = "report.html", "compare.html"

_WARNING_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\dT[\d:]+) (?:WARNING|ERROR|CRITICAL) \S+?: (.*)$", re.MULTILINE
)


# --- one self-contained HTML page (`page.html.jinja`): tables, curves and texts -------------------
Points = Sequence[tuple[float, float]]

# Of curves, in their order.
COLOURS = (
    *("#4c8bf5", "#f28e2b", "#3aa655", "#d1495b", "#9467bd"),
    *("#17a2b8", "#b58900", "#e377c2", "#7f7f7f", "#8c564b"),
)
# Of what was predicted: such a curve is dashed.
GREY = "#8a8a8a"
# The frame of a chart in units of its viewBox (420 by 236): numbers stand left of it and below.
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 412, 8, 204


@dataclass(frozen=True)
class Curve:
    """A named curve."""

    name: str
    points: Points
    colour: str = COLOURS[0]
    # Of what was measured now and then: its points are shown, and joined where there are more than
    # two.
    shows_points: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves with points in one frame."""

    title: str
    curves: Sequence[Curve]
    is_share: bool = False
    # False for a loss or a norm, whose changes would be small beside its distance from zero.
    begins_at_zero: bool = True
    stage_starts: tuple[int, ...] = ()


def thin_points(points: Points) -> Points:
    """Thin a long curve: each group of neighbours becomes its mean step and value."""
    if len(points) <= 300:  # a chart is about 400 pixels wide
        return points
    means = (group.mean(axis=0) for group in np.array_split(np.asarray(points), 300))
    return [(float(x), float(y)) for x, y in means]


# --- curves on the page, whose template writes the SVG --------------------------------------------
def draw_chart(chart: Chart) -> dict[str, Any]:
    """Lay out a chart for the template, in units of its viewBox: curves, numbers at the axes,
    starts of stages."""
    steps, values = zip(*(point for curve in chart.curves for point in curve.points), strict=True)
    first_step, last_step, lowest = min(steps), max(steps), min(values)
    if chart.begins_at_zero:
        lowest = min(lowest, 0.0)
    ticks = _round_ticks(lowest, max(values))

    def x(step: float) -> Any:
        return round(
            _LEFT + (_RIGHT - _LEFT) * (step - first_step) / (last_step - first_step or 1), 1
        )

    def y(value: float) -> Any:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    curves = []
    for curve in chart.curves:
        places = [(x(step), y(value)) for step, value in thin_points(curve.points)]
        line = " ".join(f"{left},{top}" for left, top in places)
        if len(places) <= 1 + curve.shows_points:  # too few to be joined
            line = ""
        dots = places if curve.shows_points or len(places) == 1 else []
        curves.append(
            {
                "name": curve.name,
                "colour": curve.colour,
                "is_dashed": curve.colour == GREY,
                "line": line,
                "dots": dots,
            }
        )
    step_ticks = [
        tick for tick in _round_ticks(first_step, last_step) if first_step <= tick <= last_step
    ]
    factor, unit = (100, "%") if chart.is_share else (1, "")
    return {
        "heading": chart.title,
        "curves": curves,
        "step_ticks": [(x(tick), _format_tick(tick)) for tick in step_ticks if tick == int(tick)],
        "value_ticks": [(y(tick), _format_tick(tick * factor) + unit) for tick in ticks],
        "stages": [x(step) for step in chart.stage_starts[1:]],
    }


def _round_ticks(low: float, high: float) -> list[float]:
    """Four to eleven round numbers at equal distances, from at most `low` to at least `high`."""
    distance = (high - low) / 5 or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(distance))
    step = next(digit * power for digit in (1, 2, 5, 10, 20) if digit * power >= distance)
    first = math.floor(low / step)
    return [index * step for index in range(first, max(first + 1, math.ceil(high / step)) + 1)]


def _format_tick(value: float) -> str:
    """The number without an exponent, which few people read."""
    return np.format_float_positional(value, precision=4, fractional=False, trim="-")


# --- the page: readable on a phone, in print, in the dark -----------------------------------------
@dataclass(frozen=True)
class ReportTable:
    """A table; the first column is text, the others are aligned to the right if `has_numbers`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_numbers: bool = True


@dataclass(frozen=True)
class ReportSection:
    """A part of the page. Everything in it is optional."""

    title: str
    pairs: Sequence[tuple[str, str]] = ()
    tables: Sequence[ReportTable] = ()
    charts: Sequence[Chart] = ()
    # Questions with the answers of both models, as `samples` of a summary has them.
    samples: Sequence[dict[str, Any]] = ()
    items: Sequence[str] = ()
    # Long texts that are opened by a click: heading and text.
    folded: Sequence[tuple[str, str]] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        return not any(
            (self.pairs, self.tables, self.charts, self.samples, self.items, self.folded)
        )


def write_page(
    path: Path,
    title: str,
    *,
    headline: Sequence[tuple[str, str]] = (),
    sections: Sequence[ReportSection],
) -> None:
    """Write a page aside and rename it; raises ConfigError where it cannot be written.

    `headline`: the few figures that matter, as (name, value), at its top. Sections without content
    are left out.
    """
    if path.is_dir():
        raise ConfigError(
            f"OUT={one_line(str(path))} is a folder; name a file, such as {path / 'report.html'}"
        )
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    secrets = secret_values(os.environ.items())

    def redact_value(value: Any) -> Any:
        # before it is escaped: a secret with an `&` in it would no longer be recognised afterwards
        if isinstance(value, Markup):  # the coordinates of a curve
            return value
        return redact(escape_control(str(value)), secrets=secrets)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=redact_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["draw"] = draw_chart
    text = environment.get_template("page.html.jinja").render(
        title=title,
        lead=headline,
        sections=[section for section in sections if not section.is_empty],
    )
    with translate_write_errors(path):
        write_text(path, text)


# --- what the folder records ----------------------------------------------------------------------
@dataclass(frozen=True)
class RunPart:
    """A run without stages, or one of its stages."""

    name: str | None
    plan: dict[str, Any]
    summary: dict[str, Any]
    # By the names of metrics.jsonl; steps are counted within this part. NaN and infinite values are
    # left out.
    curves: Mapping[str, Points]

    @property
    def steps(self) -> int:
        """The last step that was logged."""
        return int(max((points[-1][0] for points in self.curves.values()), default=0))

    @property
    def is_on_gpu(self) -> bool:
        """True if the plan is for GPUs."""
        return bool((self.plan.get("hardware") or {}).get("gpus"))

    @property
    def training_s(self) -> float:
        """Seconds of all steps that were logged, evaluation and saving left out; 0 before the
        first."""
        total, last_step = 0.0, 0.0
        # a log speaks for every step since the one before
        for step, seconds in self.curves.get("step_time_s", ()):
            total, last_step = total + seconds * (step - last_step), step
        return total

    @property
    def tokens_per_s(self) -> float | None:
        """Mean speed, from the summary, else from what was logged so far."""
        speeds = [speed for _, speed in self.curves.get("tokens_per_s", ())]
        recorded: float | None = self.summary.get("tokens_per_s")
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
    def tokens_per_s(self) -> float | None:
        """Speed in training: of the whole run once it has ended, before that of its last part."""
        return self.summary.get("tokens_per_s") or self.parts[-1].tokens_per_s

    @property
    def stage_starts(self) -> list[int]:
        """The first step of each part, counted over the whole run."""
        return list(itertools.accumulate((part.steps for part in self.parts[:-1]), initial=0))

    def held_out_metric(self, moment: Literal["before", "after"], name: str) -> float | None:
        """A held-out figure (`loss`, `exact_match`), or a count of rows, before or after
        training."""
        # of a run that was killed: its manifest has what was measured first
        record = self.summary or self.manifest
        value = (record.get(moment) or {}).get(name)
        # a loss that is not finite is text
        return float(value) if isinstance(value, (int, float)) else None

    def curve(self, name: str) -> list[tuple[float, float]]:
        """One curve over all parts, its steps counted over the whole run."""
        return [
            (first_step + step, value)
            for part, first_step in zip(self.parts, self.stage_starts, strict=True)
            for step, value in part.curves.get(name, ())
        ]


def read_record(folder: RunFolder) -> RunRecord:
    """Read everything that the folder of a run records; raises RunFolderError where it is not a run
    of this toolkit."""
    manifest, settings = folder.read_manifest(), read_json(folder.path / "resolved.json")
    stages = [
        folder.stage_folder(str(stage.get("name"))) for stage in settings.get("curriculum") or ()
    ]
    # a run that failed in its first stage has no folders of the others
    part_folders = [stage for stage in stages if stage.path.is_dir()] or [folder]
    curves: dict[str | None, dict[str, list[tuple[float, float]]]] = {}  # of each stage, by name
    for _, entry in read_metric_lines(folder.metrics_path):
        stage_curves = curves.setdefault(entry.get("stage"), {})
        for key, value in entry.items():
            # losses that are not finite are text; a bool is an int to Python
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                stage_curves.setdefault(key, []).append((entry["step"], value))
    parts = tuple(
        RunPart(
            part.stage_name,
            read_json(part.path / "plan.json"),
            read_summary(part.path),
            curves.get(part.stage_name, {}),
        )
        for part in part_folders
    )
    first_times: dict[str, str] = {}  # of each warning, by its text
    if folder.log_path.is_file():
        for time, message in _WARNING_LINE.findall(
            folder.log_path.read_text(encoding="utf-8", errors="replace")
        ):
            first_times.setdefault(message, time)
    warnings = tuple(f"{time} {message}" for message, time in first_times.items())
    status, summary = run_status(folder, manifest), read_summary(folder.path)
    return RunRecord(folder, status, manifest, settings, summary, parts, warnings)


def settings_by_path(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a resolved.json by their dotted paths, in the order of the reference; those
    it lacks left out."""
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
    if (
        record.parts[0].name is None
        and isinstance(planned_steps, int)
        and planned_steps != record.steps
    ):
        headline["Steps"] += f" of {planned_steps:,}"
    for name, label, number_format in (
        ("loss", "Held-out loss", "{:.4f}"),
        ("exact_match", "Exact match", "{:.1%}"),
    ):
        before, after = (record.held_out_metric(moment, name) for moment in ("before", "after"))
        texts = [number_format.format(value) for value in (before, after) if value is not None]
        if texts:
            headline[label] = " → ".join(texts)
            if after is None:
                headline[label] += " before"
    answered_rows = record.held_out_metric("after", "generated_rows")
    if answered_rows and "Exact match" in headline:
        headline["Exact match"] += f" of {answered_rows:,.0f} rows"
    speed, wall_s = record.tokens_per_s, record.summary.get("wall_s")
    if speed:
        headline["Tokens/s"] = f"{speed:,.0f}"
    kind, _, peak = max(
        map(compare_peak_memory, record.parts), key=lambda part_peak: part_peak[2] or 0
    )
    if peak:
        headline[f"Peak memory, {kind}"] = format_size(peak)
    if wall_s:
        headline["Time"] = format_duration(wall_s)
    return headline


def compare_peak_memory(part: RunPart) -> tuple[str, int | None, int | None]:
    """The peak by which plan and run are compared; returns what it is, in words, and its predicted
    and measured bytes. It counts reserved memory on a GPU, resident memory on a CPU, in the moment
    of the run that holds most. A run that has not ended has the peak that it logged.
    """
    peak, planned_peak = part.summary.get("peak_bytes") or {}, part.plan.get("peak_bytes") or {}
    kind, key = (
        ("reserved", "measured_reserved") if part.is_on_gpu else ("resident", "measured_rss")
    )
    predicted = peak.get("predicted_reserved", planned_peak.get("reserved"))
    if part.summary:
        # runs of earlier versions have the peak of their training steps
        return f"{kind}, in {peak.get('moment') or 'training'}", predicted, peak.get(key)
    # killed or still running: no summary, but every log line has the peak so far, on a GPU of
    # allocated bytes
    if part.is_on_gpu:
        kind, predicted = "allocated", planned_peak.get("allocated")
    logged = (int(value * GIB) for _, value in part.curves.get("memory_peak_gib", ()))
    return f"{kind} so far", predicted, max(logged, default=None)


# --- the report -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunReport(Answer):
    """A report that was written."""

    record: RunRecord
    path: Path
    sections: tuple[str, ...]
    charts: tuple[Chart, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "run": str(self.record.folder.path),
            "path": str(self.path),
            "status": self.record.status,
            "sections": list(self.sections),
            "charts": len(self.charts),
            "figures": headline_metrics(self.record),
            "warnings": list(self.record.warnings),
        }

    def lines(self) -> list[str]:
        metrics = ", ".join(
            f"{name.lower()} {value}" for name, value in headline_metrics(self.record).items()
        )
        lines = [f"Run {self.record.folder.path.name}: {metrics}"]
        if self.record.warnings:
            lines.append(f"Warnings in the log: {len(self.record.warnings)}")
        return [
            *lines,
            f"Written to: {self.path}",
            next_command_line(
                "compare", "shows it beside another run", RUNS=f"{self.record.folder.path} OTHER"
            ),
        ]


def write_report(record: RunRecord, *, path: Path | None = None) -> RunReport:
    """Write the report of a run; raises ConfigError where the page cannot be written there."""
    charts = build_run_charts(record)
    sections = report_sections(record, charts)
    path = path or record.folder.path / REPORT_FILE
    write_page(
        path,
        f"{record.folder.path.name}: training report",
        headline=[*headline_metrics(record).items()],
        sections=sections,
    )
    return RunReport(
        record,
        path,
        sections=tuple(section.title for section in sections if not section.is_empty),
        charts=tuple(charts),
    )


@contextlib.contextmanager
def report_on_exit(folder: RunFolder) -> Iterator[None]:
    """Write the report once the run inside has ended, however it ended; not where it was refused
    before it began."""
    manifest_before = read_json(folder.manifest_path)
    try:
        yield
    finally:
        # a refused run leaves an earlier report alone
        if read_json(folder.manifest_path) != manifest_before:
            write_final_report(folder)


def write_final_report(folder: RunFolder) -> None:
    """Write the report of a run that has just ended, after its summary, and name it; whatever goes
    wrong is a warning."""
    if not folder.manifest_path.is_file():  # nothing was trained, and the folder is gone
        return
    try:
        logger.info("Report: %s", write_report(read_record(folder)).path)
    # a run that was trained has not failed because of its report
    except (SftPlayError, Exception) as error:
        logger.warning(
            "The report was not written: %s: %s; make report RUN=%s writes it",
            type(error).__name__,
            one_line(str(error)),
            folder.path,
        )


# --- the curves -----------------------------------------------------------------------------------
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
    # a source's two curves have one colour; the losses of ranks are named alike, and no sources
    source_curves, colours = [], itertools.cycle(COLOURS)
    for name in sorted(
        {name for part in record.parts for name in part.curves if name.startswith("loss_")}
    ):
        if not re.search(r"_rank_\d+$", name):
            title, colour = name.removeprefix("loss_"), next(colours)
            source_curves.append(Curve(title, curve(name), colour))
            source_curves.append(
                Curve(f"{title}, validation", curve(f"eval_{name}"), colour, shows_points=True)
            )
    all_charts = [
        Chart(
            "Loss",
            [Curve("training", curve("loss")), *_held_out_curves(record, "loss")],
            begins_at_zero=False,
        ),
        Chart("Exact match", _held_out_curves(record, "exact_match"), is_share=True),
        Chart("Loss by source", source_curves, begins_at_zero=False),
        Chart("Learning rate", [Curve("learning rate", curve("learning_rate"))]),
        Chart("Gradient norm", [Curve("gradient norm", curve("grad_norm"))], begins_at_zero=False),
        Chart(
            "Tokens per second",
            [Curve("measured", curve("tokens_per_s")), Curve("predicted", predicted_speeds, GREY)],
        ),
        Chart(
            "Memory of a rank, in GiB",
            [
                Curve("peak", curve("memory_peak_gib")),
                Curve(
                    "held",
                    curve("memory_allocated_gib") or curve("memory_resident_gib"),
                    COLOURS[1],
                ),
                Curve("reserved", curve("memory_reserved_gib"), COLOURS[2]),
                Curve("predicted peak", curve("memory_predicted_gib"), GREY),
            ],
        ),
        Chart("Padding", [Curve("padding", padding)], is_share=True),
    ]
    charts = []
    for chart in all_charts:
        filled = tuple(chart_curve for chart_curve in chart.curves if chart_curve.points)
        # what was predicted says nothing about the run where it is alone
        if any(chart_curve.colour != GREY for chart_curve in filled):
            charts.append(replace(chart, curves=filled, stage_starts=tuple(record.stage_starts)))
    return charts


def _held_out_curves(record: RunRecord, metric: str) -> list[Curve]:
    return [
        Curve("validation", record.curve(f"eval_{metric}"), COLOURS[1], shows_points=True),
        Curve("test", record.curve(f"test_{metric}"), COLOURS[2], shows_points=True),
    ]


# --- the sections ---------------------------------------------------------------------------------
def report_sections(record: RunRecord, charts: Sequence[Chart]) -> list[ReportSection]:
    """The parts of the page, in their order; some may be empty."""
    error = record.manifest.get("error") if record.status == "failed" else None
    warnings = [*record.warnings[:60]]
    if len(record.warnings) > len(warnings):
        warnings.append(f"and {len(record.warnings) - len(warnings)} more in train.log")
    comparisons = [
        ReportTable(
            (part.name or "", "predicted", "measured", "difference"),
            [*_predicted_and_measured(part)],
        )
        for part in record.parts
    ]
    next_items, config_path = list[str](), record.manifest.get("config_path")
    if record.status == "finished" and config_path:
        next_items = next_run_commands(
            record.folder,
            config_path,
            on_gpu=record.parts[-1].is_on_gpu,
            has_held_out_rows=bool(record.summary.get("after")),
        )
    return [
        ReportSection("How it ended", items=[str(error)] if error else []),
        ReportSection("Warnings", items=warnings),
        ReportSection("Curves", charts=charts),
        ReportSection(
            "Predicted and measured", tables=[table for table in comparisons if table.rows]
        ),
        ReportSection("Answers before and after", samples=record.summary.get("samples") or []),
        ReportSection("What next", items=next_items),
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
    figures: list[tuple[str, Any, Any, Callable[[Any], str]]] = [
        (f"memory in {moment}", peak.get(keys[0]), peak.get(keys[1]), format_size)
        for moment, peak in moments.items()
    ]
    figures.append((f"peak, {memory_kind}", predicted_peak, measured_peak, format_size))
    planned_run, speed = part.plan.get("run") or {}, part.summary.get("predicted_tokens_per_s")
    figures.append(("tokens/s in training", speed, part.tokens_per_s, "{:,.0f}".format))
    hours = planned_run.get("hours")
    if hours and part.steps == planned_run.get("steps"):
        figures.append(("time of all steps", hours * 3600, part.training_s, format_duration))
    for label, predicted, measured, format_value in figures:
        if predicted is not None or measured is not None:
            texts = [_format_or_absent(value, format_value) for value in (predicted, measured)]
            difference = ""
            if predicted and measured is not None:
                difference = f"{measured / predicted - 1:+.0%}"
            # on a CPU a bound: malloc keeps up to three times the activations, or nothing
            if format_value is format_size and predicted is not None and not part.is_on_gpu:
                texts[0] = f"at most {texts[0]}"
                difference = difference if (measured or 0) > predicted else "within"
            yield label, *texts, difference


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
        "training": ", ".join(
            filter(None, [settings.get("task_mode"), (settings.get("tuning") or {}).get("mode")])
        ),
        "stages": ", ".join(
            f"{part.name} ({part.steps:,} steps)" for part in record.parts if part.name
        ),
        "layout": layout,
        "started": manifest.get("started"),
        "machine": (
            ", ".join(f"{count} x {name}" for name, count in gpu_counts.items())
            or hardware.get("cpu_name")
        ),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": git.get("commit"),
        "weights": record.summary.get("model_path"),
        "again": (
            spell_commands(f"make reproduce RUN={record.folder.shell_path}")
            if manifest.get("config_path")
            else None
        ),
    }
    folded = {
        "What was decided, and why": "\n".join(
            map(str, manifest.get("choices") or plan.get("reasons") or [])
        ),
        "Every setting": _format_lines(settings_by_path(settings)),
    }
    config_path = record.folder.path / "config.yaml"
    if config_path.is_file():
        folded["config.yaml, as given"] = config_path.read_text("utf-8", "replace")
    folded["The machine"] = _format_lines(hardware)
    for name, facts in (manifest.get("data") or {}).items():
        # the report of its rows has keys of its own
        entries = facts | (facts.get("report") or {})
        folded[f"Data: {name}"] = _format_lines(
            {key: entries[key] for key in entries if key != "report"}
        )
    return ReportSection(
        "What was run",
        pairs=[(name, str(text)) for name, text in pairs.items() if text],
        folded=[(name, text) for name, text in folded.items() if text],
    )


def _format_lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {_format_text(value)}" for key, value in values.items())


def _format_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _format_or_absent(value: Any, format_value: Callable[[Any], str]) -> str:
    return "-" if value is None else format_value(value)


# --- runs beside each other -----------------------------------------------------------------------
# Of each result, as JSON names it: its title, and how a value is shown.
_RESULTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "status": ("status", str),
    "steps": ("steps", "{:,}".format),
    "loss_before": ("held-out loss before", "{:.4f}".format),
    "loss_after": ("held-out loss after", "{:.4f}".format),
    "best_val_loss": ("best validation loss", "{:.4f}".format),
    "exact_match_after": ("exact match after", "{:.1%}".format),
    "generated_rows_after": ("rows of exact match after", "{:,.0f}".format),
    "best_val_exact_match": ("best validation exact match", "{:.1%}".format),
    "val_generated_rows": ("rows of validation exact match", "{:,.0f}".format),
    "training_loss": ("last training loss", "{:.4f}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "peak_bytes_predicted": ("peak memory predicted", format_size),
    "peak_bytes_measured": ("peak memory measured", format_size),
    "wall_s": ("wall time", format_duration),
}
# Of each chart its title, and the curve in it of every run.
_CHART_CURVES = {
    "Training loss": "loss",
    "Validation loss": "eval_loss",
    "Test loss": "test_loss",
    "Validation exact match": "eval_exact_match",
    "Learning rate": "learning_rate",
    "Gradient norm": "grad_norm",
    "Tokens per second": "tokens_per_s",
    "Peak memory of a rank, in GiB": "memory_peak_gib",
}


@dataclass(frozen=True)
class Comparison(Answer):
    """Runs beside each other. `differences` and `results` have a value of each run by key, None
    where a run has none."""

    names: tuple[str, ...]
    records: tuple[RunRecord, ...]
    differences: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, tuple[Any, ...]]
    path: Path

    def as_json(self) -> dict[str, Any]:
        runs = [
            {"name": name, "path": str(record.folder.path), "status": record.status}
            | {key: values[index] for key, values in self.results.items()}
            | find_best_checkpoint(record.folder)
            for index, (name, record) in enumerate(zip(self.names, self.records, strict=True))
        ]
        return {
            "ok": True,
            "path": str(self.path),
            "better": self.better,
            "runs": runs,
            "differing": {key: list(values) for key, values in self.differences.items()},
        }

    @property
    def better(self) -> str:
        """Which run has the lowest held-out loss, or why that is not known, in words."""
        losses = self.results.get("loss_after", (None,))
        causes = ("content of ", "data.", "model.")
        other_rows = ", ".join(key for key in self.differences if key.startswith(causes))
        if None in losses or other_rows or len(set(losses)) == 1:
            return "Which is better is not known: " + (
                f"the losses are of other rows or models ({other_rows})" * bool(other_rows)
                or "there are no held-out losses that differ"
            )
        by_loss = sorted(zip(losses, self.names, strict=True))
        text = ", ".join(f"{name} {loss:.4f}" for loss, name in by_loss)
        return f"Better: {by_loss[0][1]}, by held-out loss: {text}"

    @property
    def difference_rows(self) -> list[tuple[str, ...]]:
        """What differs, as rows of a table."""
        return [
            (
                key,
                *(one_line(_format_or_absent(value, _format_text), limit=200) for value in values),
            )
            for key, values in self.differences.items()
        ]

    @property
    def result_rows(self) -> list[tuple[str, ...]]:
        """The results, as rows of a table."""
        rows = []
        for key, values in self.results.items():
            title, format_value = _RESULTS[key]
            rows.append((title, *(_format_or_absent(value, format_value) for value in values)))
        return rows

    def lines(self) -> list[str]:
        columns = [one_line(name, limit=28) for name in self.names]
        lines = [
            f"Compared: {len(self.names)} runs; {len(self.differences)} differences",
            self.better,
        ]
        if self.differences:
            table = build_table(
                ["differs", *columns], self.difference_rows, text_columns=range(len(columns) + 1)
            )
            lines += [*render_lines(table), ""]
        lines += [
            *render_lines(build_table(["result", *columns], self.result_rows, text_columns=(0,))),
            "",
        ]
        return [
            *lines,
            f"Written to: {self.path}",
            next_command_line("report", RUN=self.records[0].folder.path),
        ]


def compare_runs(folders: Sequence[RunFolder], *, path: Path | None = None) -> Comparison:
    """Compare runs, and write the page (None: into the folder of the first). Raises ConfigError
    where they are fewer than two, one is named twice, or the page cannot be written; RunFolderError
    where one is not a run of this toolkit."""
    # `last` and a name may be the same run
    resolved_paths = [folder.path.resolve() for folder in folders]
    if len(resolved_paths) < 2:
        raise ConfigError(
            'RUNS= has to name two runs or more: make compare RUNS="first second" (make runs lists'
            " them)"
        )
    for resolved_path in resolved_paths:
        if resolved_paths.count(resolved_path) > 1:
            raise ConfigError(
                f"RUNS= names {one_line(resolved_path.name)} twice; name different runs"
            )
    path = path or folders[0].path / COMPARE_FILE
    records = tuple(read_record(folder) for folder in folders)
    names = tuple(folder.path.name for folder in folders)
    if len(set(names)) < len(names):
        names = tuple(str(folder.path) for folder in folders)
    comparison = Comparison(
        names, records, find_differences(records), compare_results(records), path
    )
    runs = [
        (
            name,
            record.status,
            str((record.settings.get("model") or {}).get("name", "")),
            str(record.manifest.get("started", ""))[:16].replace("T", " "),
        )
        for name, record in zip(names, records, strict=True)
    ]
    tables = {
        "Runs": ReportTable(("run", "status", "model", "started"), runs, has_numbers=False),
        "Results": ReportTable(("", *names), comparison.result_rows),
        "What differs": ReportTable(("", *names), comparison.difference_rows, has_numbers=False),
    }
    sections = [
        ReportSection("Which is better", items=[comparison.better]),
        *(ReportSection(title, tables=[table]) for title, table in tables.items() if table.rows),
        ReportSection("Curves", charts=comparison_charts(names, records)),
    ]
    write_page(path, f"{len(names)} runs compared", sections=sections)
    return comparison


def find_differences(records: Sequence[RunRecord]) -> dict[str, tuple[Any, ...]]:
    """Find what differs between the runs: settings by their keys, then how their plans spread them,
    data, versions, machine. The values are in the order of the runs."""
    rows = _values_by_key([_run_facts(record) for record in records])
    return {
        key: values
        for key, values in rows.items()
        if any(value != values[0] for value in values[1:])
    }


def _values_by_key(facts_by_run: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    keys = dict.fromkeys(key for run_facts in facts_by_run for key in run_facts)
    return {key: tuple(run_facts.get(key) for run_facts in facts_by_run) for key in keys}


def _run_facts(record: RunRecord) -> dict[str, Any]:
    manifest, plan = record.manifest, record.parts[0].plan
    facts = {
        key: value
        for key, value in settings_by_path(record.settings).items()
        if not key.startswith("output.")
    }
    if plan:
        keys = ("layout", "ranks", "micro_batch", "grad_accum", "gradient_checkpointing")
        facts |= {f"plan: {key}": plan.get(key) for key in keys}
        facts["plan: precision"] = (plan.get("precision") or {}).get("compute")
    facts |= {
        f"content of {name}": str(entry["sha256"])[:12]
        for name, entry in (manifest.get("data") or {}).items()
        if isinstance(entry, dict) and entry.get("sha256")
    }
    # of all packages: what differs here may explain what differs above
    facts |= {
        f"version of {name}": version for name, version in (manifest.get("versions") or {}).items()
    }
    hardware = manifest.get("hardware") or {}
    facts["machine"] = ", ".join(
        str(gpu.get("name")) for gpu in hardware.get("gpus") or []
    ) or hardware.get("cpu_name")
    facts["CPU instructions"] = (manifest.get("cpu") or {}).get("capability")
    facts["commit"] = str((manifest.get("git") or {}).get("commit") or "")[:12] or None
    return facts


def compare_results(records: Sequence[RunRecord]) -> dict[str, tuple[Any, ...]]:
    """The results of the runs by key; what none of them has is left out."""
    results = _values_by_key([_run_results(record) for record in records])
    return {
        key: values for key, values in results.items() if any(value is not None for value in values)
    }


def _run_results(record: RunRecord) -> dict[str, Any]:
    def curve_values(name: str) -> list[float]:
        return [value for _, value in record.curve(name)]

    _, predicted_peaks, measured_peaks = zip(*map(compare_peak_memory, record.parts), strict=True)
    return {
        "status": record.status,
        "steps": record.steps,
        "loss_before": record.held_out_metric("before", "loss"),
        "loss_after": record.held_out_metric("after", "loss"),
        "best_val_loss": min(curve_values("eval_loss"), default=None),
        "exact_match_after": record.held_out_metric("after", "exact_match"),
        "generated_rows_after": record.held_out_metric("after", "generated_rows") or None,
        "best_val_exact_match": max(curve_values("eval_exact_match"), default=None),
        "val_generated_rows": max(curve_values("eval_generated_rows"), default=None),
        "training_loss": next(reversed(curve_values("loss")), None),
        "tokens_per_s": record.tokens_per_s,
        "peak_bytes_predicted": max(filter(None, predicted_peaks), default=None),
        "peak_bytes_measured": max(filter(None, measured_peaks), default=None),
        "wall_s": record.summary.get("wall_s"),
    }


def comparison_charts(names: Sequence[str], records: Sequence[RunRecord]) -> list[Chart]:
    """The same curve of all runs in each chart; a chart that no run fills is left out."""
    charts = []
    for title, key in _CHART_CURVES.items():
        curves = [
            Curve(name, record.curve(key), colour, shows_points=key.startswith(("eval_", "test_")))
            for name, record, colour in zip(names, records, itertools.cycle(COLOURS), strict=False)
            if record.curve(key)
        ]
        if curves:
            begins_at_zero = not key.endswith(("loss", "norm"))
            charts.append(
                Chart(
                    title, curves, is_share=key == "eval_exact_match", begins_at_zero=begins_at_zero
                )
            )
    return charts
