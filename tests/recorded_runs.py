"""Run folders as training leaves them, written without training: for tests of what reads them."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder, write_json
from sft_play.text import GIB

MANIFEST = {
    "format": MANIFEST_FORMAT, "status": "finished", "seed": 42,
    "config_path": "/home/me/my run.yaml", "overrides": ["train.epochs=2", "output.name=first"],
    "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:10:00+00:00",
    "versions": {"torch": "2.13.0", "platform": "Linux x86_64"},
    "git": {"commit": "0123456789abcdef", "branch": "main", "dirty": False},
    "hardware": {"gpus": [], "cpu_name": "A CPU", "cpu_cores": 4, "ram_bytes": 8 * GIB, "nodes": 1},
    "layout": "single", "processes": 1, "backend": "bnb",
    "data": {
        "train": {"path": "rows.jsonl", "sha256": "a" * 64,
                  "report": {"rows_kept": 1234, "tokens": 100, "tokens_trained": 25}},
        "test": {"path": "test.jsonl", "sha256": "b" * 64, "report": {"rows_kept": 7}},
        "tokenizer": {"path": "tokenizer", "sha256": "c" * 64},
        "weights": {"path": "base", "sha256": "d" * 64},
    },
}  # fmt: skip
SUMMARY = {
    "status": "finished", "split": "test",
    "before": {"loss": 4.0, "exact_match": 0.0, "rows": 7},
    "after": {"loss": 0.5, "exact_match": 0.75, "rows": 7},
    "samples": [
        {"asked": "two and two?", "expected": "four", "before": "fish", "after": "four", "right": True},
        {"asked": "three and three?", "expected": "six", "before": None, "after": "seven", "right": False},
    ],
    "peak_bytes": {
        "predicted_allocated": GIB, "measured_allocated": None, "predicted_reserved": 2 * GIB,
        "measured_reserved": None, "measured_rss": 3 * GIB,
    },
    "peak_bytes_by_moment": {"training": {"predicted_allocated": GIB, "measured_rss": 3 * GIB}},
    "tokens_per_s": 800.0, "predicted_tokens_per_s": 1000.0, "steps": 4, "wall_s": 600.0, "exit": 0,
}  # fmt: skip


def steps(count: int, **more: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl: each step with a loss that falls, and what `more` says of it."""
    return [
        {"step": step, "loss": 8 / step, "learning_rate": 1e-3 / step, "step_time_s": 0.5, "tokens_per_s": 800.0}
        | {key: value(step) for key, value in more.items()}
        for step in range(1, count + 1)
    ]


def recorded_run(
    folder: Path,
    *,
    like: Path | None = None,
    metrics: Iterable[dict[str, Any]] = (),
    manifest: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    settings: Callable[[dict[str, Any]], None] | None = None,
    log: str = "",
) -> RunFolder:
    """Write a run's folder.

    Args:
        like: a folder whose plan.json, resolved.json and config.yaml are taken over.
        manifest: entries that differ from MANIFEST.
        summary: the whole summary.json; None for a run that has none.
        settings: changes resolved.json in place.
    """
    folder.mkdir(parents=True)
    for name in ("plan.json", "resolved.json", "config.yaml"):
        if like is not None and (like / name).is_file():
            shutil.copy(like / name, folder / name)
    write_json(folder / "manifest.json", MANIFEST | (manifest or {}))
    if summary is not None:
        write_json(folder / "summary.json", summary)
    if settings is not None:
        path = folder / "resolved.json"
        resolved = json.loads(path.read_text())
        settings(resolved)
        write_json(path, resolved)
    if lines := list(metrics):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if log:
        (folder / "train.log").write_text(log)
    return RunFolder(folder)


def planned_folder(folder: Path, base: Path) -> Path:
    """A folder with the plan and the settings of a LoRA run of `base` on a CPU."""
    from sft_play.api import plan
    from sft_play.config.load import load_config, resolved_config

    folder.mkdir(parents=True)
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    (folder / "config.yaml").write_text(
        f"model: {{name: {base}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {rows}, val_path: null, test_path: null, val_fraction: 0.2}}\n"
        "train: {effective_batch_size: 8, max_steps: 4}\n"
    )
    loaded = load_config(folder / "config.yaml")
    planned = plan(loaded)
    write_json(folder / "plan.json", planned.as_json())
    write_json(folder / "resolved.json", resolved_config(loaded.config, effective_batch=8))
    return folder
