"""`make report`: one page about a run, from what its folder records; nothing is measured or computed a second time."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.diagnose.memory_check import prediction_of
from sft_play.errors import ConfigError, SftPlayError
from sft_play.finished.charts import Chart, Curve, NotDrawn, drawn
from sft_play.finished.curves import Screen, plot_lines
from sft_play.finished.page import Sample, Section, Table, page
from sft_play.finished.record import Part, Record, read_record, settings_of
from sft_play.finished.run import next_line
from sft_play.log import one_line
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.units import GIB, MIB

logger = logging.getLogger(__name__)

REPORT = "report.html"
"""In a run folder: its report."""
MOST_WARNINGS = 60
SPLITS = (("eval", "validation", 1), ("test", "test", 2))
"""Prefix in metrics.jsonl, name and colour of the held-out splits."""


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    record: Record
    path: Path
    sections: tuple[str, ...]
    charts: int
    plot: tuple[str, ...] = ()
    """Curves for the terminal, with escape codes where it has colours."""

    @property
    def ok(self) -> bool:
        """It was written."""
        return True

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "ok": True, "run": str(self.record.folder.path), "path": str(self.path), "status": self.record.status,
            "sections": list(self.sections), "charts": self.charts, "figures": dict(lead_of(self.record)),
            "warnings": list(self.record.warnings),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """In words."""
        figures = ", ".join(f"{name.lower()} {value}" for name, value in lead_of(self.record))
        count = len(self.record.warnings)
        warned = [f"Warnings in the log: {count}"] if count else []
        return [
            f"Run {self.record.name}: {figures}",
            *warned,
            f"Written to: {self.path}",
            f"{next_line('compare', RUNS=f'{self.record.folder.path} OTHER')} shows it beside another run",
        ]


def report(record: Record, *, path: Path | None = None, screen: Screen | None = None) -> Report:
    """Write the report of a run, and return what is said about it.

    Args:
        path: where to; `report.html` in the run folder where None.
        screen: how curves are drawn for the terminal; None draws none.

    Raises:
        ConfigError: the page cannot be written there.
    """
    charts, problem = charts_of(record), None
    try:
        svgs = drawn(charts)
    except NotDrawn as error:
        svgs, problem = [], f"The charts are missing: {error}"
        logger.warning("%s", problem)
    pictures = [(chart.heading, svg) for chart, svg in zip(charts, svgs, strict=False)]
    sections = [section for section in sections_of(record, pictures, problem) if not section.is_empty]
    target = path or record.folder.path / REPORT
    write_page(target, page(f"{record.name}: training report", lead=lead_of(record), sections=sections))
    plot: list[str] = []
    if screen is not None and charts and charts[0].title == "Loss":
        plot = plot_lines("Loss", charts[0].curves, screen, is_log=charts[0].is_log)
    return Report(record, target, tuple(section.title for section in sections), len(svgs), tuple(plot))


def write_page(path: Path, text: str) -> None:
    """Write a page aside and rename it; raises ConfigError where it cannot be written."""
    try:
        if path.is_dir():
            raise ConfigError(f"OUT={one_line(str(path))} is a folder; name a file, such as {path / REPORT}")
        write_text(path, text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{one_line(str(path))} cannot be written: {error.strerror}") from None


# --- figures ----------------------------------------------------------------------------------------------------------


def lead_of(record: Record) -> list[tuple[str, str]]:
    """The few figures that matter, those that are known."""
    lead = [("Status", record.status), ("Steps", f"{record.steps:,}{_of_steps(record)}")]
    for name, label, form in (("loss", "Held-out loss", "{:.4f}"), ("exact_match", "Exact match", "{:.1%}")):
        shown = before_and_after(record, name, form)
        if shown:
            lead.append((label, shown))
    best = record.best
    if best is not None and not isinstance(record.summary.get("after"), dict):
        lead.append((f"Best held-out {best[0].replace('_', ' ')}", f"{best[1]:.4g}"))
    speed = tokens_per_s(record)
    lead += [("Tokens/s", f"{speed:,.0f}")] if speed else []
    peak = measured_peak(record)
    lead += [("Peak memory", size(peak))] if peak else []
    wall = record.summary.get("wall_s")
    lead += [("Time", duration(wall))] if wall else []
    return lead


def _of_steps(record: Record) -> str:
    planned = [(part.plan.get("run") or {}).get("steps") for part in record.parts]
    total = sum(steps for steps in planned if isinstance(steps, (int, float)))
    return f" of {total:,}" if total and total != record.steps and not record.has_stages else ""


def before_and_after(record: Record, name: str, form: str) -> str:
    """A held-out figure before and after training, such as `9.44 → 0.13`; empty where none was measured."""
    before, after = ((record.summary.get(when) or {}).get(name) for when in ("before", "after"))
    if before is None and not record.summary:
        before = (record.manifest.get("before") or {}).get(name)
    shown = [form.format(value) for value in (before, after) if isinstance(value, (int, float))]
    return " → ".join(shown) if after is not None else f"{shown[0]} before" if shown else ""


def tokens_per_s(record: Record) -> float | None:
    """Speed in training: of the whole run where it has ended, else the mean of what was logged."""
    recorded = record.summary.get("tokens_per_s")
    if recorded:
        return float(recorded)
    speeds = [(part.tokens_per_s, part.training_s) for part in record.parts if part.tokens_per_s and part.training_s]
    seconds = sum(time or 0.0 for _, time in speeds)
    return sum((speed or 0.0) * (time or 0.0) for speed, time in speeds) / seconds if seconds else None


def predicted_and_measured(part: Part) -> tuple[str, int | None, int | None]:
    """The peak of the training steps by which plan and run are compared: what is counted, predicted and measured bytes.

    On a GPU what torch's allocator reserved, on a CPU resident memory. Of a run that has not ended, the measured peak
    is what it has logged so far.
    """
    peak = part.summary.get("peak_bytes") or {}
    planned = part.plan.get("peak_bytes") or {}
    predicted = peak.get("predicted_reserved", planned.get("reserved"))
    kind, key = ("reserved", "measured_reserved") if part.on_gpu else ("resident", "measured_rss")
    measured = peak.get(key)
    if measured is None:
        logged = part.last.get("memory_peak_gib")  # of allocated bytes on a GPU
        if isinstance(logged, (int, float)) and not part.summary:
            measured = int(logged * GIB)
            kind, predicted = ("allocated", planned.get("allocated")) if part.on_gpu else (kind, predicted)
    return kind, predicted, measured


def measured_peak(record: Record) -> int | None:
    """The highest measured peak of the training steps, over all parts."""
    return max((peak for part in record.parts if (peak := predicted_and_measured(part)[2])), default=None)


def size(count: float | None) -> str:
    """Bytes in GiB, small ones in MiB; `-` where not known."""
    if count is None:
        return "-"
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / MIB:.1f} MiB"


def duration(seconds: float | None) -> str:
    """Seconds as `2 h 05 min`; `-` where not known."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _difference(predicted: float | None, measured: float | None) -> str:
    """How far the measured value is from the predicted one."""
    return f"{measured / predicted - 1:+.0%}" if predicted and measured is not None else ""


# --- charts -----------------------------------------------------------------------------------------------------------


def charts_of(record: Record) -> list[Chart]:
    """The curves of a run; a chart that the run cannot fill is left out."""
    stages = tuple(record.starts) if record.has_stages else ()
    curve = record.curve
    first, *others = record.parts
    has_gpu = any(part.on_gpu for part in (first, *others))
    held = "memory_allocated_gib" if has_gpu else "memory_resident_gib"
    speeds = [
        (start + step, part.summary.get("predicted_tokens_per_s") or 0.0)
        for part, (_, start) in zip(record.parts, record.starts, strict=True)
        for step in (1, part.steps)
    ]
    listed = [
        Chart("Loss", (Curve("training", curve("loss")), *_held_out(record, "loss")), may_be_log=True),
        Chart("Exact match", _held_out(record, "exact_match"), form=".0%", is_share=True),
        Chart("Loss by source", _by_source(record), may_be_log=True),
        Chart("Learning rate", (Curve("learning rate", curve("learning_rate")),), form=".2~g", from_zero=True),
        Chart("Gradient norm", (Curve("gradient norm", curve("grad_norm")),), may_be_log=True),
        Chart(
            "Tokens per second",
            (
                Curve("measured", curve("tokens_per_s")),
                Curve("predicted", [point for point in speeds if point[1]], None, dashed=True),
            ),
            form="~s", from_zero=True,
        ),
        Chart(
            "Memory of a rank, in GiB",
            (
                Curve("peak", curve("memory_peak_gib")),
                Curve("held", curve(held), 1),
                Curve("reserved", curve("memory_reserved_gib"), 2),
                Curve("predicted peak", curve("memory_predicted_gib"), None, dashed=True),
            ),
            from_zero=True,
        ),
        Chart("Padding", (Curve("padding", curve("padding_share")),), form=".3~%", from_zero=True),
    ]  # fmt: skip
    charts = []
    for chart in listed:
        filled = tuple(one for one in chart.curves if one.points)
        if any(one.colour is not None for one in filled):
            charts.append(replace(chart, curves=filled, stages=stages))
    return charts


def _held_out(record: Record, figure: str) -> tuple[Curve, ...]:
    return tuple(
        Curve(name, record.curve(f"{prefix}_{figure}"), colour, marked=True) for prefix, name, colour in SPLITS
    )


def _by_source(record: Record) -> tuple[Curve, ...]:
    names = record.names("loss_")
    training = [Curve(name.removeprefix("loss_"), record.curve(name), place) for place, name in enumerate(names)]
    held = [
        Curve(f"{name.removeprefix('eval_loss_')}, validation", record.curve(name),
              names.index(name.removeprefix("eval_")) if name.removeprefix("eval_") in names else None, marked=True)
        for name in record.names("eval_loss_")
    ]  # fmt: skip
    return (*training, *held)


# --- sections ---------------------------------------------------------------------------------------------------------


def sections_of(record: Record, charts: Sequence[tuple[str, str]], problem: str | None) -> Iterator[Section]:
    """The parts of the page, in their order; some may be empty."""
    error = record.manifest.get("error")
    yield Section("How it ended", items=[str(error)] if error and record.status == "failed" else [])
    yield Section("Warnings", items=_first_warnings(record.warnings))
    yield Section("Curves", charts=charts, items=[problem] if problem else [])
    yield _against_plan(record)
    yield Section("Answers before and after", samples=samples_of(record.summary.get("samples")))
    yield Section("What was run", pairs=[pair for pair in _what(record) if pair[1]], folded=_decisions(record))
    yield Section("On what", pairs=[pair for pair in _machine(record.manifest) if pair[1]])
    yield _data(record.manifest)
    yield _reproduce(record)


def _first_warnings(warnings: Sequence[str]) -> list[str]:
    more = len(warnings) - MOST_WARNINGS
    return [*warnings[:MOST_WARNINGS], *([f"and {more} more in train.log"] if more > 0 else [])]


def _against_plan(record: Record) -> Section:
    tables, notes, folded = [], [], []
    for part in record.parts:
        named = f"{part.name}: " if part.name else ""
        rows = [*_memory_rows(part), *_speed_rows(part)]
        if rows:
            tables.append(Table((f"{named}predicted against measured", "predicted", "measured", "difference"), rows))
        terms = _terms(part, record)
        text = "\n".join(f"{name:<24}{shown:>12}" for name, shown in terms)
        folded += [(f"{named}the parts of the predicted peak of a rank", text)] if terms else []
    if tables and not record.parts[0].on_gpu:
        notes.append(
            "On a CPU resident memory is measured, above what the process held before the run, while the moments are "
            "predicted for tensors alone: only the row that says resident compares like with like."
        )
    if tables:
        notes.append("Speed and time are predicted for rows of full length unless the plan knew their lengths.")
    return Section("Predicted and measured", tables=tables, notes=notes, folded=folded)


def _memory_rows(part: Part) -> list[tuple[str, ...]]:
    """Peaks of one rank by moment, the highest of all ranks measured."""
    rows: list[tuple[str, ...]] = []
    loading = part.summary.get("loading") or {}
    if loading.get("predicted_device") is not None:
        measured = max(loading.get("device_by_rank") or [], default=None)
        rows.append(_memory_row("memory while loading", loading["predicted_device"], measured, part.on_gpu))
    moments = part.summary.get("peak_bytes_by_moment") or {}
    for moment, peak in moments.items():
        measured = peak.get("measured_allocated") if part.on_gpu else peak.get("measured_rss")
        rows.append(_memory_row(f"memory in {moment}", peak.get("predicted_allocated"), measured, part.on_gpu))
    if not moments:
        planned = part.plan.get("peak_bytes") or {}
        for moment in ("load", "step", "evaluate", "generate", "save"):
            if planned.get(moment) is not None and part.on_gpu:
                rows.append((f"memory, {moment}", size(planned[moment]), "-", ""))
    kind, predicted, measured = predicted_and_measured(part)
    if predicted is not None:
        label = f"training peak, {kind}{'' if part.summary else ' so far'}"
        rows.append((label, size(predicted), size(measured), _difference(predicted, measured)))
    ranks = [value * GIB for key, value in part.last.items() if key.startswith("memory_peak_gib_rank_")]
    if ranks:
        rows.append((f"training peak of {len(ranks)} ranks, lowest to highest", "-",
                     f"{size(min(ranks))} to {size(max(ranks))}", ""))  # fmt: skip
    return rows


def _memory_row(label: str, predicted: int | None, measured: int | None, on_gpu: bool) -> tuple[str, ...]:
    return label, size(predicted), size(measured), _difference(predicted, measured) if on_gpu else ""


def _speed_rows(part: Part) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    known = part.plan.get("speed_known")
    predicted = part.summary.get("predicted_tokens_per_s", part.plan.get("tokens_per_s") if known else None)
    speed = part.tokens_per_s
    if speed is not None:
        shown = f"{predicted:,.0f}" if predicted else "-"
        rows.append(("tokens/s in training", shown, f"{speed:,.0f}", _difference(predicted, speed)))
    hours = (part.plan.get("run") or {}).get("hours")
    seconds = hours * 3600 if isinstance(hours, (int, float)) else None
    if part.training_s is not None:
        is_whole = part.steps == (part.plan.get("run") or {}).get("steps")
        difference = _difference(seconds, part.training_s) if is_whole else ""
        rows.append(("time of all steps" if is_whole else f"time of {part.steps:,} steps, of all predicted",
                     duration(seconds), duration(part.training_s), difference))  # fmt: skip
    if part.summary.get("wall_s"):
        rows.append(("wall time, with loading, evaluation and saving", "-", duration(part.summary["wall_s"]), ""))
    if part.curves.get("mfu"):
        values = [value for _, value in part.curves["mfu"]]
        planned = part.plan.get("mfu")
        rows.append(("model FLOP utilisation", f"{planned:.1%}" if planned else "-",
                     f"{sum(values) / len(values):.1%}", ""))  # fmt: skip
    return rows


def _terms(part: Part, record: Record) -> list[tuple[str, str]]:
    """What the plan's peak is made of."""
    prediction = prediction_of(record.folder.of_stage(part.name) if part.name else record.folder)
    if prediction is None:
        return []
    rows = [(name.replace("_", " "), size(count)) for name, count in prediction.terms.items() if count]
    word = "reserved" if prediction.on_gpu else "resident"
    return [
        *rows, ("= allocated", size(prediction.allocated)), (f"= {word}", size(prediction.reserved)),
        ("+ margin", size(prediction.margin)), ("= needed", size(prediction.required)),
    ]  # fmt: skip


def samples_of(samples: Any) -> list[Sample]:
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
        shown.append(Sample(str(sample.get("asked")), answers))
    return shown


def _what(record: Record) -> Iterator[tuple[str, str]]:
    settings, manifest = record.settings, record.manifest
    part = record.parts[-1]
    plan, train = part.plan, part.settings.get("train") or settings.get("train") or {}
    model, tuning = settings.get("model") or {}, settings.get("tuning") or {}
    lora = tuning.get("lora") or {}
    weights = ((manifest.get("data") or {}).get("weights") or {}).get("sha256")
    yield "model", f"{model.get('name', '')}" + (f" (weights {str(weights)[:12]})" if weights else "")
    params = plan.get("model_params")
    yield "parameters", f"{params:,}" if params else ""
    adapter = f", r {lora.get('r')}, alpha {lora.get('alpha')}" if tuning.get("mode") in ("lora", "qlora") else ""
    yield "training", f"{settings.get('task_mode', '')}, {tuning.get('mode', '')}{adapter}"
    yield "stages", ", ".join(f"{part.name} ({part.steps:,} steps)" for part in record.parts if part.name)
    yield "precision", str((plan.get("precision") or {}).get("reason", ""))
    if plan:
        batch = f"micro {plan.get('micro_batch')} x accum {plan.get('grad_accum')}"
        ranks = plan.get("ranks")
        over = f" over {ranks} ranks" if ranks != 1 else ""
        yield "layout", f"{plan.get('layout')}{over}, {batch} = effective {plan.get('effective_batch')}"
        yield "rows", f"at most {plan.get('max_seq_len')} tokens"
        checkpointing = str(plan.get("gradient_checkpointing", ""))
        yield "checkpointing", {"True": "all layers", "False": "off"}.get(checkpointing, checkpointing)
    rate = max((value for _, value in part.curves.get("learning_rate", ())), default=None)
    highest = f", learning rate up to {rate:g}" if rate is not None else ""
    yield "optimizer", f"{train.get('optim')}{highest}, {train.get('lr_scheduler_type')}" if train else ""
    yield "seed", str(manifest.get("seed", ""))
    yield "backend", str(manifest.get("backend", ""))
    resumed = manifest.get("resumed") or []
    again = f", resumed {', '.join(str(time) for time in resumed)}" if resumed else ""
    yield "started", f"{manifest.get('started', '')}{again}"
    yield "ended", str(manifest.get("ended", ""))
    yield "weights", str(record.summary.get("model_path") or "")
    yield "run folder", str(record.folder.path.absolute())


def _decisions(record: Record) -> list[tuple[str, str]]:
    choices = record.manifest.get("choices") or record.parts[0].plan.get("reasons") or []
    settings = settings_of(record.settings)
    listed = "\n".join(f"{key}: {_value(value)}" for key, value in settings.items())
    folded = [("What was decided, and why", "\n".join(map(str, choices)))] if choices else []
    return [*folded, *([("Every setting", listed)] if listed else [])]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _machine(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hardware, versions = manifest.get("hardware") or {}, dict(manifest.get("versions") or {})
    gpus = [f"{gpu.get('name')} ({size(gpu.get('total_bytes'))})" for gpu in hardware.get("gpus") or []]
    yield "GPUs", ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or ("none" if hardware else "")
    if hardware:
        yield "CPU", f"{hardware.get('cpu_name')}, {hardware.get('cpu_cores')} cores"
        yield "RAM", size(hardware.get("ram_bytes"))
        nodes = hardware.get("nodes") or 1
        yield "nodes", str(nodes) if nodes > 1 else ""
    yield "platform", str(versions.pop("platform", ""))
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
        more = {key: value for key, value in told.items() if value not in (0, 0.0, {}, None, "")}
        text = "\n".join(f"{key}: {_value(value)}" for key, value in more.items())
        folded.append((f"{name}: {facts.get('path') or told.get('source')}", f"{text}{digest}"))
    heads = ("rows of", "kept", "left out", "cut", "tokens", "trained")
    return Section("Data", tables=[Table(heads, rows)] if rows else [], folded=folded)


def _reproduce(record: Record) -> Section:
    """The command that started the run, and the files that it read."""
    manifest = record.manifest
    config = manifest.get("config_path")
    if not config:
        return Section("How to reproduce it")
    layout, processes = manifest.get("layout"), manifest.get("processes") or 1
    words = ["make", "train", f"CONFIG={config}"]
    if processes > 1:
        words = ["make", "train-distributed", f"CONFIG={config}", f"NPROC={processes}", f"STRATEGY={layout}"]
    overrides = [str(word) for word in manifest.get("overrides") or () if not str(word).startswith("output.name=")]
    commit = (manifest.get("git") or {}).get("commit")
    commands = [*([f"git checkout {commit}"] if commit else []), shlex.join(words) + _set_words(overrides)]
    path = record.folder.path / "config.yaml"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return Section(
        "How to reproduce it",
        commands="\n".join([*commands, f"make reproduce RUN={shlex.quote(str(record.folder.path))}"]),
        folded=[("config.yaml, as given", text)] if text else [],
    )


def _set_words(overrides: Sequence[str]) -> str:
    """` SET=…` for a shell, in double quotes where no character has a meaning there."""
    if not overrides:
        return ""
    text = shlex.join(overrides)
    return f" SET={shlex.quote(text)}" if set(text) & set('$`!"\\') else f' SET="{text}"'


# --- at the end of a run ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """Write the report once the run inside has ended, however it ended; not where it was refused before it began."""
    before = _state(folder)
    try:
        yield
    finally:
        if _state(folder) != before:
            report_at_end(folder)


def _state(folder: RunFolder) -> tuple[int, int] | None:
    """What changes with every start and end of a run: its manifest is written anew."""
    try:
        status = folder.manifest_path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def report_at_end(folder: RunFolder) -> None:
    """Write the report of a run that has just ended, and name it; whatever goes wrong is a warning.

    It is called after the summary was written: nothing that the run measured of itself changes.
    """
    if not folder.manifest_path.is_file():  # nothing was trained, and the folder is gone
        return
    problem: Exception
    try:
        logger.info("Report: %s", report(read_record(folder)).path)
        return
    except SftPlayError as error:
        problem = error
    except Exception as error:  # a run that was trained has not failed because of its report
        problem = error
    logger.warning(
        "The report was not written: %s: %s; make report RUN=%s writes it",
        type(problem).__name__, one_line(str(problem)), folder.path,
    )  # fmt: skip
