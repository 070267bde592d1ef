"""`make compare`: runs beside each other: the settings that differ, the results, the curves over one
another.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import ConfigError
from sft_play.finished.listing import find_best_checkpoint
from sft_play.finished.page import Chart, Curve, ReportSection, ReportTable, write_page
from sft_play.finished.report import RunRecord, compare_peak_memory, mean_tokens_per_s, read_record, settings_by_path
from sft_play.finished.run import next_command_line
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.text import build_table, format_duration, format_size, render_lines

COMPARE_FILE = "compare.html"
_ABSENT_TEXT = "-"

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
    """Runs beside each other. `differences` and `results`: by key, the value of each run; None if a run has none."""

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
        differing = {key: list(values) for key, values in self.differences.items()}
        return {"ok": True, "path": str(self.path), "runs": runs, "differing": differing}

    @property
    def difference_rows(self) -> list[tuple[str, ...]]:
        """What differs, as rows of a table."""
        return [(key, *map(_format_cell, values)) for key, values in self.differences.items()]

    @property
    def result_rows(self) -> list[tuple[str, ...]]:
        """The results, as rows of a table."""
        rows = []
        for key, values in self.results.items():
            title, format_value = _RESULTS[key]
            rows.append((title, *(_ABSENT_TEXT if value is None else format_value(value) for value in values)))
        return rows

    def lines(self) -> list[str]:
        columns = [one_line(name, limit=28) for name in self.names]
        lines = [f"Compared: {len(self.names)} runs; {len(self.differences)} differences"]
        if self.differences:
            left_columns = tuple(range(len(columns) + 1))
            table = build_table(["differs", *columns], self.difference_rows, text_columns=left_columns)
            lines += [*render_lines(table), ""]
        lines += [*render_lines(build_table(["result", *columns], self.result_rows, text_columns=(0,))), ""]
        next_line = next_command_line("report", RUN=self.records[0].folder.path)
        return [*lines, f"Written to: {self.path}", next_line]


def compare_runs(folders: Sequence[RunFolder], *, path: Path | None = None) -> Comparison:
    """Compare runs, and write the page (None: into the folder of the first). Raises ConfigError where they are fewer
    than two, one is named twice, or the page cannot be written; RunFolderError where one is not a run of this
    toolkit."""
    resolved_paths = [folder.path.resolve() for folder in folders]  # `last` and a name may be the same run
    if len(resolved_paths) < 2:
        raise ConfigError('RUNS= has to name two runs or more: make compare RUNS="first second" (make runs lists them)')
    for resolved_path in resolved_paths:
        if resolved_paths.count(resolved_path) > 1:
            raise ConfigError(f"RUNS= names {one_line(resolved_path.name)} twice; name different runs")
    path = path or folders[0].path / COMPARE_FILE
    records = tuple(read_record(folder) for folder in folders)
    names = tuple(folder.path.name for folder in folders)
    if len(set(names)) < len(names):
        names = tuple(str(folder.path) for folder in folders)
    comparison = Comparison(names, records, find_differences(records), compare_results(records), path)
    rows = [
        (
            name,
            record.status,
            str((record.settings.get("model") or {}).get("name", "")),
            str(record.manifest.get("started", "")),
        )
        for name, record in zip(names, records, strict=True)
    ]
    results = ReportTable(("", *names), comparison.result_rows)
    differences = ReportTable(("", *names), comparison.difference_rows, has_numbers=False)
    sections = [
        ReportSection("Runs", tables=[ReportTable(("run", "status", "model", "started"), rows, has_numbers=False)]),
        ReportSection("Results", tables=[results]),
        ReportSection("What differs", tables=[differences] if differences.rows else []),
        ReportSection("Curves", charts=comparison_charts(names, records)),
    ]
    write_page(path, f"{len(names)} runs compared", sections=sections)
    return comparison


def find_differences(records: Sequence[RunRecord]) -> dict[str, tuple[Any, ...]]:
    """What differs between the runs: settings by their keys, then how the plan spread them, data, versions, machine."""
    rows = _values_by_key([_run_facts(record) for record in records])
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values[1:])}


def _values_by_key(facts_by_run: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    keys = dict.fromkeys(key for run_facts in facts_by_run for key in run_facts)
    return {key: tuple(run_facts.get(key) for run_facts in facts_by_run) for key in keys}


def _run_facts(record: RunRecord) -> dict[str, Any]:
    manifest, plan = record.manifest, record.parts[0].plan
    settings = settings_by_path(record.settings)
    facts = {key: value for key, value in settings.items() if not key.startswith("output.")}
    if plan:
        keys = ("layout", "ranks", "micro_batch", "grad_accum", "gradient_checkpointing")
        facts |= {f"plan: {key}": plan.get(key) for key in keys}
        facts["plan: precision"] = (plan.get("precision") or {}).get("compute")
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


def compare_results(records: Sequence[RunRecord]) -> dict[str, tuple[Any, ...]]:
    """The results of the runs by key; what none of them has is left out."""
    results = _values_by_key([_run_results(record) for record in records])
    return {key: values for key, values in results.items() if any(value is not None for value in values)}


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
        "tokens_per_s": mean_tokens_per_s(record),
        "peak_bytes_predicted": max(filter(None, predicted_peaks), default=None),
        "peak_bytes_measured": max(filter(None, measured_peaks), default=None),
        "wall_s": record.summary.get("wall_s"),
    }


def comparison_charts(names: Sequence[str], records: Sequence[RunRecord]) -> list[Chart]:
    """The same curve of all runs in each chart; a chart that no run fills is left out."""
    charts = []
    for title, key in _CHART_CURVES.items():
        curves = tuple(
            Curve(name, record.curve(key), index, shows_points=key.startswith(("eval_", "test_")))
            for index, (name, record) in enumerate(zip(names, records, strict=True))
            if record.curve(key)
        )
        if curves:
            is_share, may_use_log = key == "eval_exact_match", key.endswith(("loss", "norm"))
            charts.append(Chart(title, curves, is_share=is_share, may_use_log=may_use_log))
    return charts


def _format_cell(value: Any) -> str:
    if value is None:
        return _ABSENT_TEXT
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), limit=200)
