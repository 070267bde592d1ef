"""`make report`: one page about a run, from what its folder records; nothing is measured or computed
a second time.

Its sections, in their order: how it ended, curves, the plan beside what was measured, answers,
settings, machine, data, and how to reproduce it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import SftPlayError
from sft_play.finished.page import Chart, Curve, ReportSection, ReportTable, plot_as_text, write_page
from sft_play.finished.record import (
    RunPart,
    RunRecord,
    compare_peak_memory,
    headline_metrics,
    read_record,
    settings_by_path,
)
from sft_play.finished.run import next_command_line
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.text import format_duration, format_size

logger = logging.getLogger(__name__)

MAX_WARNINGS = 60
REPORT_FILE = "report.html"


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
        loss_chart = next((chart for chart in self.charts if chart.title == "Loss"), None)
        metrics = ", ".join(f"{name.lower()} {value}" for name, value in headline_metrics(self.record).items())
        lines = [*plot_as_text(loss_chart), f"Run {self.record.name}: {metrics}"]
        if self.record.warnings:
            lines.append(f"Warnings in the log: {len(self.record.warnings)}")
        compare_command = next_command_line("compare", RUNS=f"{self.record.folder.path} OTHER")
        return [*lines, f"Written to: {self.path}", f"{compare_command} shows it beside another run"]


def write_report(record: RunRecord, *, path: Path | None = None) -> RunReport:
    """Write the report of a run; raises ConfigError where the page cannot be written there."""
    charts = build_run_charts(record)
    sections = report_sections(record, charts)
    target = path or record.folder.path / REPORT_FILE
    title = f"{record.name}: training report"
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
    held_memory = "memory_allocated_gib" if any(part.is_on_gpu for part in record.parts) else "memory_resident_gib"
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
        Chart("Exact match", _held_out_curves(record, "exact_match"), is_share=True, starts_at_zero=True),
        Chart("Loss by source", _source_curves(record), may_use_log=True),
        Chart("Learning rate", (Curve("learning rate", curve("learning_rate")),), starts_at_zero=True),
        Chart("Gradient norm", (Curve("gradient norm", curve("grad_norm")),), may_use_log=True),
        Chart(
            "Tokens per second",
            (Curve("measured", curve("tokens_per_s")), Curve("predicted", predicted_speeds, None)),
            starts_at_zero=True,
        ),
        Chart(
            "Memory of a rank, in GiB",
            (
                Curve("peak", curve("memory_peak_gib")),
                Curve("held", curve(held_memory), 1),
                Curve("reserved", curve("memory_reserved_gib"), 2),
                Curve("predicted peak", curve("memory_predicted_gib"), None),
            ),
            starts_at_zero=True,
        ),
        Chart("Padding", (Curve("padding", padding),), is_share=True, starts_at_zero=True),
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
    names = record.curve_names("loss_")
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
    return [
        ReportSection("How it ended", items=[str(error)] if error and record.status == "failed" else []),
        ReportSection("Warnings", items=warnings),
        ReportSection("Curves", charts=charts),
        _plan_section(record),
        ReportSection("Answers before and after", samples=record.summary.get("samples") or []),
        ReportSection("What was run", pairs=_run_pairs(record), folded=_decision_texts(record)),
        ReportSection("On what", pairs=_machine_pairs(record.manifest)),
        _data_section(record.manifest),
        _reproduce_section(record),
    ]


def _plan_section(record: RunRecord) -> ReportSection:
    tables = []
    for part in record.parts:
        rows = [*_memory_rows(part), *_speed_rows(part)]
        title = "predicted against measured" if part.name is None else f"{part.name}: predicted against measured"
        if rows:
            tables.append(ReportTable((title, "predicted", "measured", "difference"), rows))
    notes = ["Speed and time are predicted for rows of full length unless the plan knew their lengths."]
    if not record.parts[0].is_on_gpu:
        notes.append("On a CPU the memory is what the process has resident beyond Python and the libraries.")
    return ReportSection("Predicted and measured", tables=tables, items=notes if tables else [])


def _plan_row(
    label: str, predicted: float | None, measured: float | None, format_value: Callable[[Any], str]
) -> tuple[str, str, str, str]:
    predicted_text, measured_text = ("-" if value is None else format_value(value) for value in (predicted, measured))
    difference = f"{measured / predicted - 1:+.0%}" if predicted and measured is not None else ""
    return label, predicted_text, measured_text, difference


def _memory_rows(part: RunPart) -> Iterator[tuple[str, ...]]:
    # tensors on a GPU; on a CPU resident memory, which older runs did not predict by moment
    keys = ("predicted_reserved", "measured_rss")
    if part.is_on_gpu:
        keys = ("predicted_allocated", "measured_allocated")
    for moment, peak in (part.summary.get("peak_bytes_by_moment") or {}).items():
        if isinstance(peak, dict):
            yield _plan_row(f"memory in {moment}", peak.get(keys[0]), peak.get(keys[1]), format_size)
    memory_kind, predicted, measured = compare_peak_memory(part)
    if predicted is not None:
        yield _plan_row(f"peak, {memory_kind}", predicted, measured, format_size)


def _speed_rows(part: RunPart) -> Iterator[tuple[str, ...]]:
    plan, planned_run = part.plan, part.plan.get("run") or {}
    planned_speed = plan.get("tokens_per_s") if plan.get("speed_known") else None
    if part.tokens_per_s is not None:
        predicted = part.summary.get("predicted_tokens_per_s", planned_speed)
        yield _plan_row("tokens/s in training", predicted, part.tokens_per_s, "{:,.0f}".format)
    hours = planned_run.get("hours")
    seconds = hours * 3600 if isinstance(hours, (int, float)) else None
    if part.training_s is not None and part.steps == planned_run.get("steps"):
        yield _plan_row("time of all steps", seconds, part.training_s, format_duration)
    elif part.training_s is not None:
        # of a run that stopped early the plan's time, which is that of all steps, has nothing to be compared with
        label = f"time of {part.steps:,} steps, of all predicted"
        yield (*_plan_row(label, seconds, part.training_s, format_duration)[:-1], "")
    if part.summary.get("wall_s"):
        yield _plan_row("wall time, with loading, evaluation and saving", None, part.summary["wall_s"], format_duration)


def _run_pairs(record: RunRecord) -> list[tuple[str, str]]:
    settings, manifest, plan = record.settings, record.manifest, record.parts[-1].plan
    model, tuning = settings.get("model") or {}, settings.get("tuning") or {}
    model_text = str(model.get("name", ""))
    # a digest of local files, or the commit of a hub model
    weights = ((manifest.get("data") or {}).get("weights") or {}).get("sha256")
    if weights:
        model_text += f" (weights {str(weights)[:12]})"
    training = f"{settings.get('task_mode', '')}, {tuning.get('mode', '')}"
    if tuning.get("mode") in ("lora", "qlora"):
        lora = tuning.get("lora") or {}
        training += f", r {lora.get('r')}, alpha {lora.get('alpha')}"
    layout = ""
    if plan:
        layout = str(plan.get("layout"))
        if plan.get("ranks") != 1:
            layout += f" over {plan.get('ranks')} ranks"
        layout += f", micro {plan.get('micro_batch')} x accum {plan.get('grad_accum')}"
        layout += f" = effective {plan.get('effective_batch')}"
    starts = [manifest.get("started", ""), *(f"resumed {timestamp}" for timestamp in manifest.get("resumed") or [])]
    return _filled_pairs({
        "model": model_text,
        "training": training,
        "stages": ", ".join(f"{part.name} ({part.steps:,} steps)" for part in record.parts if part.name),
        "layout": layout,
        "started": ", ".join(map(str, starts)),
        "weights": record.summary.get("model_path"),
    })  # fmt: skip


def _filled_pairs(texts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(text)) for name, text in texts.items() if text]


def _decision_texts(record: RunRecord) -> list[tuple[str, str]]:
    choices = record.manifest.get("choices") or record.parts[0].plan.get("reasons") or []
    texts = {
        "What was decided, and why": "\n".join(map(str, choices)),
        "Every setting": _format_lines(settings_by_path(record.settings)),
    }
    return _filled_pairs(texts)


def _format_lines(values: Mapping[str, Any]) -> str:
    """A line for each value; texts as they are, others as JSON."""
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in values.items()
    )


def _machine_pairs(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware, versions, git = (manifest.get(name) or {} for name in ("hardware", "versions", "git"))
    gpus = [f"{gpu.get('name')} ({format_size(gpu.get('total_bytes') or 0)})" for gpu in hardware.get("gpus") or []]
    texts = {}
    if hardware:
        texts = {
            "GPUs": ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or "none",
            "CPU": f"{hardware.get('cpu_name')}, {hardware.get('cpu_cores')} cores",
            "RAM": format_size(hardware.get("ram_bytes") or 0),
        }
    texts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if git.get("commit"):
        texts["code"] = f"commit {str(git['commit'])[:12]} ({git.get('branch')})"
        texts["code"] += ", with changes that were not committed" if git.get("dirty") else ""
    return _filled_pairs(texts)


def _data_section(manifest: Mapping[str, Any]) -> ReportSection:
    rows, folded = [], []
    for name, facts in (manifest.get("data") or {}).items():
        row_report = facts.get("report") if isinstance(facts, dict) else None
        if not isinstance(row_report, dict):
            continue
        tokens, trained_tokens = row_report.get("tokens") or 0, row_report.get("tokens_trained") or 0
        left_out_rows = sum(count for count in (row_report.get("dropped") or {}).values() if isinstance(count, int))
        counts = (row_report.get("rows_kept", 0), left_out_rows, row_report.get("rows_cut", 0), tokens)
        trained_text = f"{trained_tokens:,} ({trained_tokens / tokens:.0%})" if tokens else f"{trained_tokens:,}"
        rows.append((name, *(f"{count:,}" for count in counts), trained_text))
        details = {key: value for key, value in row_report.items() if value not in (0, 0.0, {}, None, "")}
        if facts.get("sha256"):
            details["sha256"] = facts["sha256"]
        folded.append((f"{name}: {facts.get('path') or row_report.get('source')}", _format_lines(details)))
    headers = ("rows of", "kept", "left out", "cut", "tokens", "trained")
    return ReportSection("Data", tables=[ReportTable(headers, rows)] if rows else [], folded=folded)


def _reproduce_section(record: RunRecord) -> ReportSection:
    path = record.folder.path / "config.yaml"
    command = f"make reproduce RUN={record.folder.shell_path}" if record.manifest.get("config_path") else ""
    config_text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return ReportSection(
        "How to reproduce it",
        pairs=_filled_pairs({"command": command}),
        folded=_filled_pairs({"config.yaml, as given": config_text}),
    )
