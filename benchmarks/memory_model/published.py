"""Published training runs, rows of a CSV file, as settings of the tracer.

A source is described once (`published_sources`). What differs between its rows is read from the row's columns
(`published_columns`).
"""

import csv
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.memory_model.published_columns import CsvRow, NotExpressible, gib_in
from benchmarks.memory_model.published_models import Config, ConfigOf, cache_configs, known_config
from benchmarks.memory_model.published_sources import step_settings
from benchmarks.memory_model.script_settings import ScriptSettings
from sft_play.errors import ConfigError

COLUMNS = (
    *("id", "class", "source", "model", "mode", "strategy", "micro_batch", "seq_len"),
    *("peak_allocated_gib", "peak_reserved_gib"),
)
"""Columns that a table of peaks must have; the other columns may be missing or empty."""


@dataclass(frozen=True)
class PublishedRun:
    """One row. Measured peaks in bytes, None where the source gives none of that kind."""

    id: str
    grade: str
    """The CSV's class: A scored, B and C settings partly known, D an estimate of the source."""
    source: str
    """Repository of the source, owner/name."""
    mode: str
    strategy: str
    measured_allocated: int | None = None
    measured_reserved: int | None = None
    settings: ScriptSettings | None = None
    reason: str | None = None
    """Why there are no settings; None where there are."""
    attention: str = ""


def read_runs(path: Path, *, config_of: ConfigOf | None = None) -> list[PublishedRun]:
    """The rows of a CSV file as runs, in its order; whole adapter configs are taken from a JSONL beside it. Raises
    ConfigError where the file cannot be read, is no CSV, or lacks one of COLUMNS."""
    rows = read_rows(path)
    configs = cache_configs(config_of or known_config)
    adapters = read_adapter_configs(path)
    return [_run(row, configs, adapters.get(row.get("id", ""))) for row in rows]


def read_rows(path: Path) -> list[CsvRow]:
    """The CSV's rows by column, texts stripped (a byte-order mark and any line ends are fine); errors as read_runs."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"PEAKS={path} does not exist; name a CSV file of measured peaks") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"PEAKS={path}: cannot be read as UTF-8 text ({error}); name a CSV file of peaks") from None
    # restkey: cells beyond the header go under an empty name, which is left out
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="")
    try:
        names = [str(name).strip() for name in reader.fieldnames or ()]
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            found = f"no column {', '.join(missing)} (found: {', '.join(names[:8]) or 'none'})"
            raise ConfigError(f"PEAKS={path}: {found}; see docs/memory-model.md")
        reader.fieldnames = names
        # a line that ends early has None in its last columns
        rows = [{name: (value or "").strip() for name, value in row.items() if name} for row in reader]
        return [row for row in rows if any(row.values())]
    except csv.Error as error:
        raise ConfigError(f"PEAKS={path}, line {reader.line_num}: not a CSV row ({error})") from None


def read_adapter_configs(path: Path) -> dict[str, Config]:
    """`*peft_configs.jsonl` beside the CSV: the run's training and adapter configs by row id; none: an empty table."""
    configs: dict[str, Config] = {}
    for config_path in sorted(path.parent.glob("*peft_configs.jsonl")):
        for number, line in enumerate(config_path.read_text(encoding="utf-8-sig").splitlines(), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                configs[str(entry["id"])] = entry["run_info"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{config_path}, line {number}: not a run's config ({error!r})") from None
    return configs


def _run(row: CsvRow, config_of: ConfigOf, run_info: Config | None) -> PublishedRun:
    base = PublishedRun(
        id=row["id"], grade=row["class"].upper(), source=row["source"].split(" ")[0], mode=row["mode"],
        strategy=row["strategy"], attention=row.get("attention", ""),
    )  # fmt: skip
    try:
        allocated, reserved = (gib_in(row, f"peak_{kind}_gib") for kind in ("allocated", "reserved"))
        base = replace(base, measured_allocated=allocated, measured_reserved=reserved)
        settings = step_settings(row, config_of=config_of, run_info=run_info)
        if allocated is None and reserved is None:
            raise NotExpressible("no peak of PyTorch's allocator was measured")
        return replace(base, settings=settings)
    except NotExpressible as why:
        return replace(base, reason=str(why))
