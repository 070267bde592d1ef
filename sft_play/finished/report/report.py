"""`make report`: one page about a run, from what its folder records; nothing is measured or computed a second time.

Its sections, in their order: how it ended, curves, the plan beside what was measured, answers, settings, machine, data,
and how to reproduce it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import SftPlayError
from sft_play.finished.report.charts import Chart, NotDrawn, charts_of, draw_charts, plot_lines
from sft_play.finished.report.page import AnsweredQuestion, Section, Table, page, write_page
from sft_play.finished.report.record import (
    Record,
    RunPart,
    lead_of,
    off_by,
    predicted_and_measured,
    read_record,
    settings_of,
)
from sft_play.finished.run import Outcome, next_line
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.units import format_duration, format_size

logger = logging.getLogger(__name__)

MOST_WARNINGS = 60
REPORT = "report.html"


@dataclass(frozen=True)
class RunReport(Outcome):
    """A report that was written."""

    record: Record
    path: Path
    sections: tuple[str, ...]
    charts: int
    loss: Chart | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True, "run": str(self.record.folder.path), "path": str(self.path), "status": self.record.status,
            "sections": list(self.sections), "charts": self.charts, "figures": dict(lead_of(self.record)),
            "warnings": list(self.record.warnings),
        }  # fmt: skip

    def lines(self) -> list[str]:
        figures = ", ".join(f"{name.lower()} {value}" for name, value in lead_of(self.record))
        count = len(self.record.warnings)
        return [
            *(plot_lines(self.loss) if self.loss else []),
            f"Run {self.record.name}: {figures}",
            *([f"Warnings in the log: {count}"] if count else []),
            f"Written to: {self.path}",
            f"{next_line('compare', RUNS=f'{self.record.folder.path} OTHER')} shows it beside another run",
        ]


def report(record: Record, *, path: Path | None = None) -> RunReport:
    """Write the report of a run; raises ConfigError where the page cannot be written there."""
    charts, problem = charts_of(record), None
    try:
        svgs = draw_charts(charts)
    except NotDrawn as error:
        svgs, problem = [], f"The charts are missing: {error}"
        logger.warning("%s", problem)
    pictures = [(chart.heading, svg) for chart, svg in zip(charts, svgs, strict=False)]
    sections = [section for section in sections_of(record, pictures, problem) if not section.is_empty]
    target = path or record.folder.path / REPORT
    write_page(target, page(f"{record.name}: training report", lead=lead_of(record), sections=sections))
    loss = charts[0] if charts and charts[0].title == "Loss" else None
    return RunReport(record, target, tuple(section.title for section in sections), len(svgs), loss)


@contextlib.contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """Write the report once the run inside has ended, however it ended; not where it was refused before it began."""
    before = _state(folder)
    try:
        yield
    finally:
        if _state(folder) != before:  # a run that was refused leaves an earlier one's manifest, and its report, alone
            report_at_end(folder)


def _state(folder: RunFolder) -> tuple[int, int] | None:
    try:
        status = folder.manifest_path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def report_at_end(folder: RunFolder) -> None:
    """Write the report of a run that has just ended, after its summary, and name it; whatever goes wrong is a
    warning."""
    if not folder.manifest_path.is_file():  # nothing was trained, and the folder is gone
        return
    try:
        logger.info("Report: %s", report(read_record(folder)).path)
    except (SftPlayError, Exception) as error:  # a run that was trained has not failed because of its report
        words = f"{type(error).__name__}: {one_line(str(error))}"
        logger.warning("The report was not written: %s; make report RUN=%s writes it", words, folder.path)


# --- the sections -----------------------------------------------------------------------------------------------------


def sections_of(record: Record, charts: Sequence[tuple[str, str]], problem: str | None) -> Iterator[Section]:
    """The parts of the page, in their order; some may be empty."""
    error = record.manifest.get("error")
    yield Section("How it ended", items=[str(error)] if error and record.status == "failed" else [])
    first, more = record.warnings[:MOST_WARNINGS], len(record.warnings) - MOST_WARNINGS
    yield Section("Warnings", items=[*first, *([f"and {more} more in train.log"] if more > 0 else [])])
    yield Section("Curves", charts=charts, items=[problem] if problem else [])
    yield _against_plan(record)
    yield Section("Answers before and after", samples=samples_of(record.summary.get("samples")))
    yield Section("What was run", pairs=[pair for pair in _what(record) if pair[1]], folded=_decisions(record))
    yield Section("On what", pairs=[pair for pair in _machine(record.manifest) if pair[1]])
    yield _data(record.manifest)
    yield _reproduce(record)


def _against_plan(record: Record) -> Section:
    tables = []
    for part in record.parts:
        rows = [*_memory_rows(part), *_speed_rows(part)]
        named = f"{part.name}: " if part.name else ""
        if rows:
            tables.append(Table((f"{named}predicted against measured", "predicted", "measured", "difference"), rows))
    of_cpu = "On a CPU the memory is what the process has resident beyond Python and the libraries."
    speeds = "Speed and time are predicted for rows of full length unless the plan knew their lengths."
    notes = [*([] if record.parts[0].on_gpu else [of_cpu]), speeds] if tables else []
    return Section("Predicted and measured", tables=tables, notes=notes)


def _memory_rows(part: RunPart) -> Iterator[tuple[str, ...]]:
    for moment, peak in (part.summary.get("peak_bytes_by_moment") or {}).items():
        if not isinstance(peak, dict):
            continue
        # tensors on a GPU; on a CPU resident memory, which older runs did not predict by moment
        predicted = peak.get("predicted_allocated" if part.on_gpu else "predicted_reserved")
        measured = peak.get("measured_allocated" if part.on_gpu else "measured_rss")
        yield f"memory in {moment}", _size(predicted), _size(measured), off_by(predicted, measured)
    kind, predicted, measured = predicted_and_measured(part)
    if predicted is not None:
        yield f"peak, {kind}", _size(predicted), _size(measured), off_by(predicted, measured)


def _speed_rows(part: RunPart) -> Iterator[tuple[str, ...]]:
    known, run = part.plan.get("speed_known"), part.plan.get("run") or {}
    predicted = part.summary.get("predicted_tokens_per_s", part.plan.get("tokens_per_s") if known else None)
    speed = part.tokens_per_s
    if speed is not None:
        shown = f"{predicted:,.0f}" if predicted else "-"
        yield "tokens/s in training", shown, f"{speed:,.0f}", off_by(predicted, speed)
    seconds = run["hours"] * 3600 if isinstance(run.get("hours"), (int, float)) else None
    if part.training_s is not None:
        # of a run that stopped early the plan's time, which is that of all steps, has nothing to be compared with
        is_whole = part.steps == run.get("steps")
        label = "time of all steps" if is_whole else f"time of {part.steps:,} steps, of all predicted"
        difference = off_by(seconds, part.training_s) if is_whole else ""
        yield label, "-" if seconds is None else format_duration(seconds), format_duration(part.training_s), difference
    if part.summary.get("wall_s"):
        yield "wall time, with loading, evaluation and saving", "-", format_duration(part.summary["wall_s"]), ""


def _size(count: int | None) -> str:
    return "-" if count is None else format_size(count)


def samples_of(samples: Any) -> list[AnsweredQuestion]:
    """The questions of a summary with the answers of both models."""
    if not isinstance(samples, list):
        return []
    shown = []
    for sample in samples:
        right = bool(sample.get("right"))
        answers = [] if sample.get("before") is None else [("before", str(sample["before"]), "")]
        answers.append(("after", f"{sample.get('after')}", "good" if right else "bad"))
        if not right:
            answers.append(("expected", str(sample.get("expected")), ""))
        shown.append(AnsweredQuestion(str(sample.get("asked")), answers))
    return shown


def _what(record: Record) -> Iterator[tuple[str, str]]:
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
        over = f" over {plan.get('ranks')} ranks" if plan.get("ranks") != 1 else ""
        yield "layout", f"{plan.get('layout')}{over}, {batch} = effective {plan.get('effective_batch')}"
    resumed = ", ".join(str(time) for time in manifest.get("resumed") or [])
    yield "started", f"{manifest.get('started', '')}{f', resumed {resumed}' if resumed else ''}"
    yield "weights", str(record.summary.get("model_path") or "")


def _decisions(record: Record) -> list[tuple[str, str]]:
    choices = record.manifest.get("choices") or record.parts[0].plan.get("reasons") or []
    settings = settings_of(record.settings)
    listed = "\n".join(f"{key}: {_value(value)}" for key, value in settings.items())
    folded = [("What was decided, and why", "\n".join(map(str, choices)))] if choices else []
    return [*folded, *([("Every setting", listed)] if listed else [])]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _machine(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hardware, versions = manifest.get("hardware") or {}, manifest.get("versions") or {}
    gpus = [f"{gpu.get('name')} ({_size(gpu.get('total_bytes'))})" for gpu in hardware.get("gpus") or []]
    yield "GPUs", ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or ("none" if hardware else "")
    if hardware:
        yield "CPU", f"{hardware.get('cpu_name')}, {hardware.get('cpu_cores')} cores"
        yield "RAM", _size(hardware.get("ram_bytes"))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    git = manifest.get("git") or {}
    dirty = ", with changes that were not committed" if git.get("dirty") else ""
    yield "code", f"commit {str(git['commit'])[:12]} ({git.get('branch')}){dirty}" if git.get("commit") else ""


def _data(manifest: Mapping[str, Any]) -> Section:
    rows, folded = [], []
    for name, facts in (manifest.get("data") or {}).items():
        told = facts.get("report") if isinstance(facts, dict) else None
        if not isinstance(told, dict):
            continue
        tokens, trained = told.get("tokens") or 0, told.get("tokens_trained") or 0
        left_out = sum(count for count in (told.get("dropped") or {}).values() if isinstance(count, int))
        share = f" ({trained / tokens:.0%})" if tokens else ""
        rows.append((
            name, f"{told.get('rows_kept', 0):,}", f"{left_out:,}", f"{told.get('rows_cut', 0):,}", f"{tokens:,}",
            f"{trained:,}{share}",
        ))  # fmt: skip
        digest = f"\nsha256 {facts['sha256']}" if facts.get("sha256") else ""
        more = {key: value for key, value in told.items() if value not in (0, 0.0, {}, None, "")}  # what happened
        text = "\n".join(f"{key}: {_value(value)}" for key, value in more.items())
        folded.append((f"{name}: {facts.get('path') or told.get('source')}", f"{text}{digest}"))
    heads = ("rows of", "kept", "left out", "cut", "tokens", "trained")
    return Section("Data", tables=[Table(heads, rows)] if rows else [], folded=folded)


def _reproduce(record: Record) -> Section:
    path = record.folder.path / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return Section(
        "How to reproduce it",
        commands=f"make reproduce RUN={record.folder.shell_path}" if record.manifest.get("config_path") else "",
        folded=[("config.yaml, as given", text)] if text else [],
    )
