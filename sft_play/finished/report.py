"""`make report`: one page about a run, from what its folder records; nothing is measured or computed
a second time.

Its sections, in their order: how it ended, curves, the plan beside what was measured, answers,
settings, machine, data, and how to reproduce it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import SftPlayError
from sft_play.finished.page import (
    AnsweredQuestion,
    Chart,
    ChartError,
    ReportSection,
    ReportTable,
    build_run_charts,
    draw_charts,
    plot_as_text,
    render_page,
    write_page,
)
from sft_play.finished.record import (
    RunPart,
    RunRecord,
    compare_peak_memory,
    format_percent_difference,
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
    chart_count: int
    loss_chart: Chart | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True, "run": str(self.record.folder.path), "path": str(self.path), "status": self.record.status,
            "sections": list(self.sections), "charts": self.chart_count, "figures": dict(headline_metrics(self.record)),
            "warnings": list(self.record.warnings),
        }  # fmt: skip

    def lines(self) -> list[str]:
        metrics = ", ".join(f"{name.lower()} {value}" for name, value in headline_metrics(self.record))
        warning_count = len(self.record.warnings)
        return [
            *(plot_as_text(self.loss_chart) if self.loss_chart else []),
            f"Run {self.record.name}: {metrics}",
            *([f"Warnings in the log: {warning_count}"] if warning_count else []),
            f"Written to: {self.path}",
            f"{next_command_line('compare', RUNS=f'{self.record.folder.path} OTHER')} shows it beside another run",
        ]


def write_report(record: RunRecord, *, path: Path | None = None) -> RunReport:
    """Write the report of a run; raises ConfigError where the page cannot be written there."""
    charts, problem = build_run_charts(record), None
    try:
        svgs = draw_charts(charts)
    except ChartError as error:
        svgs, problem = [], f"The charts are missing: {error}"
        logger.warning("%s", problem)
    drawn_charts = [(chart.heading, svg) for chart, svg in zip(charts, svgs, strict=False)]
    sections = [section for section in report_sections(record, drawn_charts, problem) if not section.is_empty]
    target = path or record.folder.path / REPORT_FILE
    write_page(
        target, render_page(f"{record.name}: training report", headline=headline_metrics(record), sections=sections)
    )
    loss_chart = charts[0] if charts and charts[0].title == "Loss" else None
    return RunReport(record, target, tuple(section.title for section in sections), len(svgs), loss_chart)


@contextlib.contextmanager
def report_on_exit(folder: RunFolder) -> Iterator[None]:
    """Write the report once the run inside has ended, however it ended; not where it was refused before it began."""
    state_before = _manifest_state(folder)
    try:
        yield
    finally:
        if _manifest_state(folder) != state_before:  # a refused run leaves an earlier report alone
            write_final_report(folder)


def _manifest_state(folder: RunFolder) -> tuple[int, int] | None:
    try:
        status = folder.manifest_path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


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


# --- the sections -----------------------------------------------------------------------------------------------------
def report_sections(
    record: RunRecord, charts: Sequence[tuple[str, str]], problem: str | None
) -> Iterator[ReportSection]:
    """The parts of the page, in their order; some may be empty."""
    error = record.manifest.get("error")
    yield ReportSection("How it ended", items=[str(error)] if error and record.status == "failed" else [])
    shown_warnings, hidden_count = record.warnings[:MAX_WARNINGS], len(record.warnings) - MAX_WARNINGS
    yield ReportSection(
        "Warnings", items=[*shown_warnings, *([f"and {hidden_count} more in train.log"] if hidden_count > 0 else [])]
    )
    yield ReportSection("Curves", charts=charts, items=[problem] if problem else [])
    yield _plan_section(record)
    yield ReportSection("Answers before and after", samples=answered_questions(record.summary.get("samples")))
    yield ReportSection(
        "What was run", pairs=[pair for pair in _run_pairs(record) if pair[1]], folded=_decision_texts(record)
    )
    yield ReportSection("On what", pairs=[pair for pair in _machine_pairs(record.manifest) if pair[1]])
    yield _data_section(record.manifest)
    yield _reproduce_section(record)


def _plan_section(record: RunRecord) -> ReportSection:
    tables = []
    for part in record.parts:
        rows = [*_memory_rows(part), *_speed_rows(part)]
        prefix = f"{part.name}: " if part.name else ""
        if rows:
            tables.append(
                ReportTable((f"{prefix}predicted against measured", "predicted", "measured", "difference"), rows)
            )
    cpu_note = "On a CPU the memory is what the process has resident beyond Python and the libraries."
    speed_note = "Speed and time are predicted for rows of full length unless the plan knew their lengths."
    notes = [*([] if record.parts[0].is_on_gpu else [cpu_note]), speed_note] if tables else []
    return ReportSection("Predicted and measured", tables=tables, notes=notes)


def _memory_rows(part: RunPart) -> Iterator[tuple[str, ...]]:
    for moment, peak in (part.summary.get("peak_bytes_by_moment") or {}).items():
        if not isinstance(peak, dict):
            continue
        # tensors on a GPU; on a CPU resident memory, which older runs did not predict by moment
        predicted = peak.get("predicted_allocated" if part.is_on_gpu else "predicted_reserved")
        measured = peak.get("measured_allocated" if part.is_on_gpu else "measured_rss")
        yield (
            f"memory in {moment}",
            _format_size(predicted),
            _format_size(measured),
            format_percent_difference(predicted, measured),
        )
    memory_kind, predicted, measured = compare_peak_memory(part)
    if predicted is not None:
        yield (
            f"peak, {memory_kind}",
            _format_size(predicted),
            _format_size(measured),
            format_percent_difference(predicted, measured),
        )


def _speed_rows(part: RunPart) -> Iterator[tuple[str, ...]]:
    is_speed_known, planned_run = part.plan.get("speed_known"), part.plan.get("run") or {}
    predicted = part.summary.get("predicted_tokens_per_s", part.plan.get("tokens_per_s") if is_speed_known else None)
    speed = part.tokens_per_s
    if speed is not None:
        predicted_text = f"{predicted:,.0f}" if predicted else "-"
        yield "tokens/s in training", predicted_text, f"{speed:,.0f}", format_percent_difference(predicted, speed)
    seconds = planned_run["hours"] * 3600 if isinstance(planned_run.get("hours"), (int, float)) else None
    if part.training_s is not None:
        # of a run that stopped early the plan's time, which is that of all steps, has nothing to be compared with
        has_all_steps = part.steps == planned_run.get("steps")
        label = "time of all steps" if has_all_steps else f"time of {part.steps:,} steps, of all predicted"
        difference = format_percent_difference(seconds, part.training_s) if has_all_steps else ""
        yield label, "-" if seconds is None else format_duration(seconds), format_duration(part.training_s), difference
    if part.summary.get("wall_s"):
        yield "wall time, with loading, evaluation and saving", "-", format_duration(part.summary["wall_s"]), ""


def _format_size(count: int | None) -> str:
    return "-" if count is None else format_size(count)


def answered_questions(samples: Any) -> list[AnsweredQuestion]:
    """The questions of a summary with the answers of both models."""
    if not isinstance(samples, list):
        return []
    questions = []
    for sample in samples:
        is_correct = bool(sample.get("right"))
        answers = [] if sample.get("before") is None else [("before", str(sample["before"]), "")]
        answers.append(("after", f"{sample.get('after')}", "good" if is_correct else "bad"))
        if not is_correct:
            answers.append(("expected", str(sample.get("expected")), ""))
        questions.append(AnsweredQuestion(str(sample.get("asked")), answers))
    return questions


def _run_pairs(record: RunRecord) -> Iterator[tuple[str, str]]:
    settings, manifest, part = record.settings, record.manifest, record.parts[-1]
    plan, model, tuning = part.plan, settings.get("model") or {}, settings.get("tuning") or {}
    # a digest of local files, or the commit of a hub model
    weights = str(((manifest.get("data") or {}).get("weights") or {}).get("sha256") or "")[:12]
    yield "model", str(model.get("name", "")) + (f" (weights {weights})" if weights else "")
    lora = tuning.get("lora") or {}
    adapter = f", r {lora.get('r')}, alpha {lora.get('alpha')}" if tuning.get("mode") in ("lora", "qlora") else ""
    yield "training", f"{settings.get('task_mode', '')}, {tuning.get('mode', '')}{adapter}"
    yield "stages", ", ".join(f"{part.name} ({part.steps:,} steps)" for part in record.parts if part.name)
    if plan:
        batch = f"micro {plan.get('micro_batch')} x accum {plan.get('grad_accum')}"
        ranks_note = f" over {plan.get('ranks')} ranks" if plan.get("ranks") != 1 else ""
        yield "layout", f"{plan.get('layout')}{ranks_note}, {batch} = effective {plan.get('effective_batch')}"
    resumed = ", ".join(str(timestamp) for timestamp in manifest.get("resumed") or [])
    yield "started", f"{manifest.get('started', '')}{f', resumed {resumed}' if resumed else ''}"
    yield "weights", str(record.summary.get("model_path") or "")


def _decision_texts(record: RunRecord) -> list[tuple[str, str]]:
    choices = record.manifest.get("choices") or record.parts[0].plan.get("reasons") or []
    settings = settings_by_path(record.settings)
    settings_text = "\n".join(f"{key}: {_format_value(value)}" for key, value in settings.items())
    folded = [("What was decided, and why", "\n".join(map(str, choices)))] if choices else []
    return [*folded, *([("Every setting", settings_text)] if settings_text else [])]


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _machine_pairs(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hardware, versions = manifest.get("hardware") or {}, manifest.get("versions") or {}
    gpus = [f"{gpu.get('name')} ({_format_size(gpu.get('total_bytes'))})" for gpu in hardware.get("gpus") or []]
    yield "GPUs", ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or ("none" if hardware else "")
    if hardware:
        yield "CPU", f"{hardware.get('cpu_name')}, {hardware.get('cpu_cores')} cores"
        yield "RAM", _format_size(hardware.get("ram_bytes"))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    git = manifest.get("git") or {}
    dirty = ", with changes that were not committed" if git.get("dirty") else ""
    yield "code", f"commit {str(git['commit'])[:12]} ({git.get('branch')}){dirty}" if git.get("commit") else ""


def _data_section(manifest: Mapping[str, Any]) -> ReportSection:
    rows, folded = [], []
    for name, facts in (manifest.get("data") or {}).items():
        row_report = facts.get("report") if isinstance(facts, dict) else None
        if not isinstance(row_report, dict):
            continue
        tokens, trained_tokens = row_report.get("tokens") or 0, row_report.get("tokens_trained") or 0
        left_out_rows = sum(count for count in (row_report.get("dropped") or {}).values() if isinstance(count, int))
        share = f" ({trained_tokens / tokens:.0%})" if tokens else ""
        rows.append((
            name, f"{row_report.get('rows_kept', 0):,}", f"{left_out_rows:,}", f"{row_report.get('rows_cut', 0):,}",
            f"{tokens:,}",
            f"{trained_tokens:,}{share}",
        ))  # fmt: skip
        digest = f"\nsha256 {facts['sha256']}" if facts.get("sha256") else ""
        counts = {key: value for key, value in row_report.items() if value not in (0, 0.0, {}, None, "")}
        text = "\n".join(f"{key}: {_format_value(value)}" for key, value in counts.items())
        folded.append((f"{name}: {facts.get('path') or row_report.get('source')}", f"{text}{digest}"))
    headers = ("rows of", "kept", "left out", "cut", "tokens", "trained")
    return ReportSection("Data", tables=[ReportTable(headers, rows)] if rows else [], folded=folded)


def _reproduce_section(record: RunRecord) -> ReportSection:
    path = record.folder.path / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return ReportSection(
        "How to reproduce it",
        commands=f"make reproduce RUN={record.folder.shell_path}" if record.manifest.get("config_path") else "",
        folded=[("config.yaml, as given", text)] if text else [],
    )
