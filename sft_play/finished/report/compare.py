"""`make compare`: runs beside each other: the settings that differ, the results, the curves over one another."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.diagnose.pages import build_table, render_lines
from sft_play.errors import ConfigError
from sft_play.finished.listing import best_checkpoint
from sft_play.finished.report.charts import COLOURS, Chart, Curve, NotDrawn, draw_charts, plot_lines
from sft_play.finished.report.page import Section, Table, page, write_page
from sft_play.finished.report.record import (
    Record,
    predicted_and_measured,
    read_record,
    settings_of,
    tokens_per_s,
)
from sft_play.finished.run import Outcome, next_line
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.units import format_duration, format_size

# In the folder of the first run that is named.
PAGE = "compare.html"
_NOT_COMPARED = ("output.",)
_ABSENT = "-"


@dataclass(frozen=True)
class ResultRow:
    """A result of every run: its name, as JSON names it, the values, and how a value is shown."""

    key: str
    title: str
    values: tuple[float | str | None, ...]
    form: Callable[[Any], str] = str

    @property
    def shown(self) -> list[str]:
        """The values in words."""
        return [_ABSENT if value is None else self.form(value) for value in self.values]


@dataclass(frozen=True)
class Comparison(Outcome):
    """Runs beside each other. `differing`: the values of all runs by what differs; None where a run has none."""

    names: tuple[str, ...]
    records: tuple[Record, ...]
    differing: Mapping[str, tuple[Any, ...]]
    figures: tuple[ResultRow, ...]
    path: Path
    loss: Chart | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "path": str(self.path),
            "runs": [
                {"name": name, "path": str(record.folder.path), "status": record.status}
                | {figure.key: figure.values[place] for figure in self.figures}
                | best_checkpoint(record.folder)
                for place, (name, record) in enumerate(zip(self.names, self.records, strict=True))
            ],
            "differing": {key: list(values) for key, values in self.differing.items()},
        }

    def lines(self) -> list[str]:
        left = tuple(range(len(self.names) + 1))
        settings = [(key, *_cells(values)) for key, values in self.differing.items()]
        results = [(figure.title, *figure.shown) for figure in self.figures]
        heads = [one_line(name, limit=28) for name in self.names]
        lines = [
            *(plot_lines(self.loss) if self.loss else []),
            f"Compared: {len(self.names)} runs; {len(self.differing)} differences",
        ]
        if settings:
            lines += [*render_lines(build_table(["differs", *heads], settings, text_columns=left)), ""]
        lines += [*render_lines(build_table(["result", *heads], results, text_columns=(0,))), ""]
        first = self.records[0].folder.path
        return [*lines, f"Written to: {self.path}", next_line("report", RUN=first)]


def compare(folders: Sequence[RunFolder], *, path: Path) -> Comparison:
    """Compare runs, and write the page. Raises ConfigError where they are fewer than two, one is named twice, or the
    page cannot be written; RunFolderError where one is not a run of this toolkit."""
    places = [folder.path.resolve() for folder in folders]  # `last` and a name may be the same run
    if len(places) < 2:
        raise ConfigError('RUNS= has to name two runs or more: make compare RUNS="first second" (make runs lists them)')
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(f"RUNS= names {one_line(place.name)} twice; name different runs")
    records = tuple(read_record(folder) for folder in folders)
    short = [record.name for record in records]
    names = tuple(record.name if short.count(record.name) == 1 else str(record.folder.path) for record in records)
    differing = differences(records)
    charts = _charts(names, records)
    comparison = Comparison(names, records, differing, results_of(records), path, charts[0] if charts else None)
    write_page(path, _page(comparison, charts))
    return comparison


def differences(records: Sequence[Record]) -> dict[str, tuple[Any, ...]]:
    """What differs between the runs: settings by their keys, then how the plan spread them, data, versions, machine."""
    facts = [_facts(record) for record in records]
    keys = dict.fromkeys(key for one in facts for key in one)
    rows = {key: tuple(one.get(key) for one in facts) for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values[1:])}


def _facts(record: Record) -> dict[str, Any]:
    manifest, plan = record.manifest, record.parts[0].plan
    facts = {
        key: value for key, value in settings_of(record.settings).items() if not key.startswith(_NOT_COMPARED)
    }  # fmt: skip
    facts |= {f"plan: {key}": plan.get(key) for key in ("layout", "ranks", "micro_batch", "grad_accum") if plan}
    if plan:
        facts["plan: precision"] = (plan.get("precision") or {}).get("compute")
        facts["plan: gradient_checkpointing"] = plan.get("gradient_checkpointing")
    for name, entry in (manifest.get("data") or {}).items():
        if isinstance(entry, dict) and entry.get("sha256"):
            facts[f"content of {name}"] = str(entry["sha256"])[:12]
    # of all packages: what differs here may explain what differs above
    facts |= {f"version of {name}": version for name, version in (manifest.get("versions") or {}).items()}
    hardware = manifest.get("hardware") or {}
    facts["machine"] = ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus") or []) or hardware.get("cpu_name")
    facts["CPU instructions"] = (manifest.get("cpu") or {}).get("capability")
    facts["commit"] = str((manifest.get("git") or {}).get("commit") or "")[:12] or None
    return facts


def results_of(records: Sequence[Record]) -> tuple[ResultRow, ...]:
    """The results of the runs; what none of them has is left out."""

    def row(key: str, title: str, value: Callable[[Record], Any], form: Callable[[Any], str]) -> ResultRow:
        return ResultRow(key, title, tuple(value(record) for record in records), form)

    peaks = [[predicted_and_measured(part) for part in record.parts] for record in records]
    kinds = {kind for parts in peaks for kind, _, _ in parts}
    kind = kinds.pop() if len(kinds) == 1 else "highest moment"
    peak = {
        key: tuple(max((one for part in parts if (one := part[place]) is not None), default=None) for parts in peaks)
        for key, place in (("predicted", 1), ("measured", 2))
    }
    figures = (
        row("status", "status", lambda record: record.status, str),
        row("steps", "steps", lambda record: record.steps, "{:,}".format),
        row("loss_before", "held-out loss before", lambda record: record.held_out("before", "loss"), "{:.4f}".format),
        row("loss_after", "held-out loss after", lambda record: record.held_out("after", "loss"), "{:.4f}".format),
        row("best_val_loss", "best validation loss", lambda record: _of_curve(record, "eval_loss", min),
            "{:.4f}".format),
        row("exact_match_after", "exact match after", lambda record: record.held_out("after", "exact_match"),
            "{:.1%}".format),
        row("generated_rows_after", "rows of exact match after",
            lambda record: record.held_out("after", "generated_rows") or None, "{:,.0f}".format),
        row("best_val_exact_match", "best validation exact match",
            lambda record: _of_curve(record, "eval_exact_match", max), "{:.1%}".format),
        row("val_generated_rows", "rows of validation exact match",
            lambda record: _of_curve(record, "eval_generated_rows", max), "{:,.0f}".format),
        row("training_loss", "last training loss", lambda record: _of_curve(record, "loss", operator.itemgetter(-1)),
            "{:.4f}".format),
        row("tokens_per_s", "tokens/s", tokens_per_s, "{:,.0f}".format),
        ResultRow("peak_bytes_predicted", f"peak memory predicted ({kind})", peak["predicted"], format_size),
        ResultRow("peak_bytes_measured", f"peak memory measured ({kind})", peak["measured"], format_size),
        row("wall_s", "wall time", lambda record: record.summary.get("wall_s"), format_duration),
    )  # fmt: skip
    return tuple(figure for figure in figures if any(value is not None for value in figure.values))


def _of_curve(record: Record, name: str, choose: Callable[[Sequence[float]], float]) -> float | None:
    values = [value for _, value in record.curve(name)]
    return choose(values) if values else None


# Title of a chart, and the curve in it of every run.
_CHARTS = (
    ("Training loss", "loss"), ("Validation loss", "eval_loss"), ("Test loss", "test_loss"),
    ("Validation exact match", "eval_exact_match"), ("Learning rate", "learning_rate"), ("Gradient norm", "grad_norm"),
    ("Tokens per second", "tokens_per_s"), ("Peak memory of a rank, in GiB", "memory_peak_gib"),
)  # fmt: skip


def _charts(names: Sequence[str], records: Sequence[Record]) -> list[Chart]:
    charts = []
    for title, key in _CHARTS:
        curves = (
            Curve(name, record.curve(key), place, marked=key.startswith(("eval_", "test_")))
            for place, (name, record) in enumerate(zip(names, records, strict=True))
        )
        filled = tuple(curve for curve in curves if curve.points)
        is_share, may_be_log = key == "eval_exact_match", key.endswith(("loss", "norm"))
        form = ".0%" if is_share else ".2~g" if key == "learning_rate" else "~s" if key == "tokens_per_s" else "~g"
        if filled:
            charts.append(
                Chart(
                    title, filled, form, from_zero=not may_be_log, is_share=is_share, may_be_log=may_be_log,
                    with_legend=False,
                )
            )  # fmt: skip
    return charts


def _page(comparison: Comparison, charts: Sequence[Chart]) -> str:
    names, notes = comparison.names, []
    try:
        svgs = draw_charts(charts)
    except NotDrawn as error:
        svgs, notes = [], [f"The charts are missing: {error}."]
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(names))]
    models = [str((record.settings.get("model") or {}).get("name", "")) for record in comparison.records]
    started = [str(record.manifest.get("started", "")) for record in comparison.records]
    rows = [(name, record.status, model, time)
            for name, record, model, time in zip(names, comparison.records, models, started, strict=True)]  # fmt: skip
    return page(
        f"{len(names)} runs compared",
        lead=[],
        sections=[
            Section("Runs", tables=[Table(("run", "status", "model", "started"), rows, numbers=False)],
                    notes=notes),
            Section("Results", tables=[Table(("", *names), [(one.title, *one.shown) for one in comparison.figures])]),
            Section("What differs", tables=[Table(("", *names), [(key, *_cells(values))
                    for key, values in comparison.differing.items()], numbers=False)] if comparison.differing else []),
            Section("Curves", charts=[(chart.heading, svg) for chart, svg in zip(charts, svgs, strict=False)],
                    legend=list(zip(names, colours, strict=True))),
        ],
    )  # fmt: skip


def _cells(values: Sequence[Any]) -> list[str]:
    shown = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
    return [_ABSENT if value is None else one_line(text, limit=200) for value, text in zip(values, shown, strict=True)]
