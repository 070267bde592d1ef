"""`make compare`: runs beside each other: the settings that differ, the results, the curves over one
another.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import ConfigError
from sft_play.finished.listing import find_best_checkpoint
from sft_play.finished.page import (
    COLOURS,
    Chart,
    ChartError,
    Curve,
    ReportSection,
    ReportTable,
    draw_charts,
    plot_as_text,
    render_page,
    write_page,
)
from sft_play.finished.record import RunRecord, compare_peak_memory, mean_tokens_per_s, read_record, settings_by_path
from sft_play.finished.run import next_command_line
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.text import build_table, format_duration, format_size, render_lines

# In the folder of the first run that is named.
COMPARE_FILE = "compare.html"
_IGNORED_SETTINGS = ("output.",)
_ABSENT_TEXT = "-"


@dataclass(frozen=True)
class ResultRow:
    """A result of every run: its name, as JSON names it, the values, and how a value is shown."""

    key: str
    title: str
    values: tuple[float | str | None, ...]
    format_value: Callable[[Any], str] = str

    @property
    def formatted_values(self) -> list[str]:
        """The values in words."""
        return [_ABSENT_TEXT if value is None else self.format_value(value) for value in self.values]


@dataclass(frozen=True)
class Comparison(Answer):
    """Runs beside each other. `differences`: by key, the value of each run; None if a run has none."""

    names: tuple[str, ...]
    records: tuple[RunRecord, ...]
    differences: Mapping[str, tuple[Any, ...]]
    results: tuple[ResultRow, ...]
    path: Path
    loss_chart: Chart | None

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "path": str(self.path),
            "runs": [
                {"name": name, "path": str(record.folder.path), "status": record.status}
                | {result.key: result.values[index] for result in self.results}
                | find_best_checkpoint(record.folder)
                for index, (name, record) in enumerate(zip(self.names, self.records, strict=True))
            ],
            "differing": {key: list(values) for key, values in self.differences.items()},
        }

    def lines(self) -> list[str]:
        left_columns = tuple(range(len(self.names) + 1))
        difference_rows = [(key, *_format_cells(values)) for key, values in self.differences.items()]
        result_rows = [(result.title, *result.formatted_values) for result in self.results]
        headers = [one_line(name, limit=28) for name in self.names]
        lines = [
            *(plot_as_text(self.loss_chart) if self.loss_chart else []),
            f"Compared: {len(self.names)} runs; {len(self.differences)} differences",
        ]
        if difference_rows:
            lines += [*render_lines(build_table(["differs", *headers], difference_rows, text_columns=left_columns)), ""]
        lines += [*render_lines(build_table(["result", *headers], result_rows, text_columns=(0,))), ""]
        first = self.records[0].folder.path
        return [*lines, f"Written to: {self.path}", next_command_line("report", RUN=first)]


def compare_runs(folders: Sequence[RunFolder], *, path: Path) -> Comparison:
    """Compare runs, and write the page. Raises ConfigError where they are fewer than two, one is named twice, or the
    page cannot be written; RunFolderError where one is not a run of this toolkit."""
    resolved_paths = [folder.path.resolve() for folder in folders]  # `last` and a name may be the same run
    if len(resolved_paths) < 2:
        raise ConfigError('RUNS= has to name two runs or more: make compare RUNS="first second" (make runs lists them)')
    for resolved_path in resolved_paths:
        if resolved_paths.count(resolved_path) > 1:
            raise ConfigError(f"RUNS= names {one_line(resolved_path.name)} twice; name different runs")
    records = tuple(read_record(folder) for folder in folders)
    short_names = [record.name for record in records]
    names = tuple(record.name if short_names.count(record.name) == 1 else str(record.folder.path) for record in records)
    differences = find_differences(records)
    charts = _comparison_charts(names, records)
    comparison = Comparison(names, records, differences, compare_results(records), path, charts[0] if charts else None)
    write_page(path, _comparison_page(comparison, charts))
    return comparison


def find_differences(records: Sequence[RunRecord]) -> dict[str, tuple[Any, ...]]:
    """What differs between the runs: settings by their keys, then how the plan spread them, data, versions, machine."""
    all_facts = [_run_facts(record) for record in records]
    keys = dict.fromkeys(key for run_facts in all_facts for key in run_facts)
    rows = {key: tuple(run_facts.get(key) for run_facts in all_facts) for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values[1:])}


def _run_facts(record: RunRecord) -> dict[str, Any]:
    manifest, plan = record.manifest, record.parts[0].plan
    facts = {
        key: value for key, value in settings_by_path(record.settings).items() if not key.startswith(_IGNORED_SETTINGS)
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


def compare_results(records: Sequence[RunRecord]) -> tuple[ResultRow, ...]:
    """The results of the runs; what none of them has is left out."""

    def result_row(
        key: str, title: str, get_value: Callable[[RunRecord], Any], format_value: Callable[[Any], str]
    ) -> ResultRow:
        return ResultRow(key, title, tuple(get_value(record) for record in records), format_value)

    peaks = [[compare_peak_memory(part) for part in record.parts] for record in records]
    memory_kinds = {memory_kind for parts in peaks for memory_kind, _, _ in parts}
    memory_kind = memory_kinds.pop() if len(memory_kinds) == 1 else "highest moment"
    peak = {
        key: tuple(
            max((peak_bytes for part in parts if (peak_bytes := part[position]) is not None), default=None)
            for parts in peaks
        )
        for key, position in (("predicted", 1), ("measured", 2))
    }
    results = (
        result_row("status", "status", lambda record: record.status, str),
        result_row("steps", "steps", lambda record: record.steps, "{:,}".format),
        result_row("loss_before", "held-out loss before", lambda record: record.held_out_metric("before", "loss"),
        "{:.4f}".format),
        result_row("loss_after", "held-out loss after", lambda record: record.held_out_metric("after", "loss"),
        "{:.4f}".format),
        result_row("best_val_loss", "best validation loss", lambda record: _curve_value(record, "eval_loss", min),
            "{:.4f}".format),
        result_row("exact_match_after", "exact match after", lambda record: record.held_out_metric("after",
        "exact_match"),
            "{:.1%}".format),
        result_row("generated_rows_after", "rows of exact match after",
            lambda record: record.held_out_metric("after", "generated_rows") or None, "{:,.0f}".format),
        result_row("best_val_exact_match", "best validation exact match",
            lambda record: _curve_value(record, "eval_exact_match", max), "{:.1%}".format),
        result_row("val_generated_rows", "rows of validation exact match",
            lambda record: _curve_value(record, "eval_generated_rows", max), "{:,.0f}".format),
        result_row("training_loss", "last training loss", lambda record: _curve_value(record, "loss",
        operator.itemgetter(-1)),
            "{:.4f}".format),
        result_row("tokens_per_s", "tokens/s", mean_tokens_per_s, "{:,.0f}".format),
        ResultRow("peak_bytes_predicted", f"peak memory predicted ({memory_kind})", peak["predicted"], format_size),
        ResultRow("peak_bytes_measured", f"peak memory measured ({memory_kind})", peak["measured"], format_size),
        result_row("wall_s", "wall time", lambda record: record.summary.get("wall_s"), format_duration),
    )  # fmt: skip
    return tuple(result for result in results if any(value is not None for value in result.values))


def _curve_value(record: RunRecord, name: str, choose: Callable[[Sequence[float]], float]) -> float | None:
    values = [value for _, value in record.curve(name)]
    return choose(values) if values else None


# Title of a chart, and the curve in it of every run.
_CHART_CURVES = (
    ("Training loss", "loss"), ("Validation loss", "eval_loss"), ("Test loss", "test_loss"),
    ("Validation exact match", "eval_exact_match"), ("Learning rate", "learning_rate"), ("Gradient norm", "grad_norm"),
    ("Tokens per second", "tokens_per_s"), ("Peak memory of a rank, in GiB", "memory_peak_gib"),
)  # fmt: skip


def _comparison_charts(names: Sequence[str], records: Sequence[RunRecord]) -> list[Chart]:
    charts = []
    for title, key in _CHART_CURVES:
        curves = (
            Curve(name, record.curve(key), colour_index, shows_points=key.startswith(("eval_", "test_")))
            for colour_index, (name, record) in enumerate(zip(names, records, strict=True))
        )
        filled = tuple(curve for curve in curves if curve.points)
        is_share, may_use_log = key == "eval_exact_match", key.endswith(("loss", "norm"))
        tick_format = (
            ".0%" if is_share else ".2~g" if key == "learning_rate" else "~s" if key == "tokens_per_s" else "~g"
        )
        if filled:
            charts.append(
                Chart(
                    title, filled, tick_format, starts_at_zero=not may_use_log, is_share=is_share,
                    may_use_log=may_use_log,
                    has_legend=False,
                )
            )  # fmt: skip
    return charts


def _comparison_page(comparison: Comparison, charts: Sequence[Chart]) -> str:
    names, notes = comparison.names, []
    try:
        svgs = draw_charts(charts)
    except ChartError as error:
        svgs, notes = [], [f"The charts are missing: {error}."]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(names))]
    models = [str((record.settings.get("model") or {}).get("name", "")) for record in comparison.records]
    started = [str(record.manifest.get("started", "")) for record in comparison.records]
    rows = [(name, record.status, model, time)
            for name, record, model, time in zip(names, comparison.records, models, started, strict=True)]  # fmt: skip
    return render_page(
        f"{len(names)} runs compared",
        headline=[],
        sections=[
            ReportSection("Runs", tables=[ReportTable(("run", "status", "model", "started"), rows, has_numbers=False)],
                    notes=notes),
            ReportSection("Results", tables=[ReportTable(("", *names), [(result.title,
            *result.formatted_values) for result in comparison.results])]),
            ReportSection("What differs", tables=[ReportTable(("", *names), [(key, *_format_cells(values))
                    for key, values in comparison.differences.items()],
                    has_numbers=False)] if comparison.differences else []),
            ReportSection("Curves", charts=[(chart.heading, svg) for chart, svg in zip(charts, svgs, strict=False)],
                    legend=list(zip(names, colours, strict=True))),
        ],
    )  # fmt: skip


def _format_cells(values: Sequence[Any]) -> list[str]:
    texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
    return [
        _ABSENT_TEXT if value is None else one_line(text, limit=200) for value, text in zip(values, texts, strict=True)
    ]
