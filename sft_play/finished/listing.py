"""`make runs` and `make prune`: every run of an output folder at a glance, and the removal of those
that are named.

Only folders with this toolkit's manifest are looked at or removed. A run that is being written is
never touched.
"""

import contextlib
import logging
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sft_play.answers import Answer
from sft_play.errors import RunFolderError
from sft_play.finished.run import next_command_line
from sft_play.log import one_line
from sft_play.runs.folder import (
    RunFolder,
    read_evaluations,
    read_json,
    read_metric_lines,
    read_summary,
)
from sft_play.runs.lookup import iter_runs, lock_holder_pid, lock_run
from sft_play.text import align_columns, format_duration, format_size, plural

logger = logging.getLogger(__name__)

RunStatus = Literal["running", "finished", "stopped", "failed"]
# What of a run is removed: all of it, its checkpoints, or TensorBoard's event files.
PruneScope = Literal["run", "checkpoints", "curves"]
EVENT_FILES = "events.out.tfevents.*"


@dataclass(frozen=True)
class ListedRun:
    """A run at a glance."""

    name: str
    path: Path
    model: str
    mode: str
    # `failed` also where the manifest says running and no process writes it: it was killed
    status: RunStatus
    step: int | None
    best_metric: str | None  # of the best evaluation: `exact_match`, else `loss`
    best_value: float | None
    best_step: int | None
    best_checkpoint: str | None
    bytes: int
    checkpoint_bytes: int
    started: datetime | None
    best_rows: int | None = None  # whose answer was generated for the best exact match


@dataclass(frozen=True)
class RunList(Answer):
    """The runs of an output folder, the newest first."""

    output: Path
    runs: tuple[ListedRun, ...]
    now: datetime

    def lines(self) -> list[str]:
        if not self.runs:
            return [f"There are no runs in {self.output}", next_command_line("train")]
        rows = [("run", "status", "step", "best", "size", "age", "model")]
        for run in self.runs:
            best = age = "-"
            if run.best_metric == "loss":
                best = f"loss {run.best_value:.4g}"
            elif run.best_metric is not None:
                best = f"exact match {run.best_value:.1%}"
            if run.best_rows:
                best += f" of {run.best_rows:,} rows"
            if run.started is not None:
                age = format_duration((self.now - run.started).total_seconds())
            step = "-" if run.step is None else str(run.step)
            size, model = format_size(run.bytes), one_line(f"{run.mode} {run.model}", limit=48)
            rows.append((one_line(run.name, limit=48), run.status, step, best, size, age, model))
        total_bytes = sum(run.bytes for run in self.runs)
        checkpoint_bytes = sum(run.checkpoint_bytes for run in self.runs)
        return [
            *align_columns(rows),
            (
                f"{plural(len(self.runs), 'run')}, {format_size(total_bytes)}, of which checkpoints"
                f" {format_size(checkpoint_bytes)}"
            ),
            next_command_line("report", RUN=self.runs[0].path),
        ]


def list_runs(output: Path, *, now: datetime | None = None) -> RunList:
    """List every run directly below an output folder, also what was moved aside."""
    runs = [_list_run(folder) for folder in iter_runs(output, include_replaced=True)]
    # runs without a start (their manifest is damaged) go last once the order is reversed
    runs.sort(key=lambda run: (run.started is not None, run.started or datetime.now(UTC), run.name))
    return RunList(output, tuple(reversed(runs)), now or datetime.now(UTC))


def _list_run(folder: RunFolder) -> ListedRun:
    manifest, resolved = folder.read_manifest(), read_json(folder.path / "resolved.json")
    metrics = [entry for _, entry in read_metric_lines(folder.metrics_path)]
    # the best of all evaluations, the one after training among them: exact match where it was
    # measured, else loss
    after = {
        f"eval_{name}": value
        for name, value in (read_summary(folder.path).get("after") or {}).items()
    }
    best: dict[str, Any] = {"best_metric": None, "best_value": None}
    for name, choose in (("loss", min), ("exact_match", max)):
        values = [
            (entry.get(f"eval_{name}"), entry.get("eval_generated_rows"))
            for entry in (*metrics, after)
        ]
        numbers = [
            (float(value), rows) for value, rows in values if isinstance(value, (int, float))
        ]
        if numbers:
            value, rows = choose(numbers, key=lambda candidate: candidate[0])
            best = {
                "best_metric": name,
                "best_value": value,
                "best_rows": rows if name == "exact_match" else None,
            }
    try:
        started = datetime.fromisoformat(str(manifest.get("started"))).astimezone(UTC)
    except ValueError:
        started = None
    return ListedRun(
        folder.path.name,
        folder.path,
        model=str((resolved.get("model") or {}).get("name", "?")),
        mode=str((resolved.get("tuning") or {}).get("mode", "?")),
        status=run_status(folder, manifest),
        step=max((entry["step"] for entry in metrics), default=None),
        **best,
        **find_best_checkpoint(folder),
        bytes=_folder_bytes(folder.path),
        checkpoint_bytes=sum(map(_folder_bytes, _checkpoint_folders(folder))),
        started=started,
    )


def _checkpoint_folders(folder: RunFolder) -> list[Path]:
    return sorted(path for path in folder.path.rglob("checkpoints") if path.is_dir())


def run_status(folder: RunFolder, manifest: dict[str, Any]) -> RunStatus:
    """Tell the status: `running` while a process trains it, `failed` where the manifest says so of
    a run that no process trains. A finished run stays finished while a command has it locked."""
    status = manifest.get("status")
    if status == "finished":
        return "finished"
    # the lock before the manifest, which a killed run leaves at "running"
    if lock_holder_pid(folder) is not None:
        return "running"
    return "stopped" if status == "stopped" else "failed"


def find_best_checkpoint(folder: RunFolder) -> dict[str, Any]:
    """Find `best_step`, the step of the best evaluation by train.metric_for_best_model, and
    `best_checkpoint`, the path of its checkpoint; None where there is none. A run with stages has
    the best of its newest stage.
    """
    stages = [
        entry["stage"] for _, entry in read_metric_lines(folder.metrics_path) if entry.get("stage")
    ]
    last_stage = next(reversed(stages), None)
    part = folder.stage_folder(str(last_stage), is_last_stage=True) if last_stage else folder
    train = read_json(part.path / "resolved.json").get("train") or {}
    metric, sign = "loss", -1
    if train.get("metric_for_best_model") == "exact_match":
        metric, sign = "exact_match", 1
    scored_steps = [
        (sign * entry[metric], -entry["step"])
        for entry in read_evaluations(folder.metrics_path, stage_name=part.stage_name)
        if entry["step"]
        and isinstance(entry[metric], (int, float))
        and math.isfinite(entry[metric])
    ]
    step = -max(scored_steps)[1] if scored_steps else None
    path = part.checkpoints_path / f"checkpoint-{step}"
    return {"best_step": step, "best_checkpoint": str(path) if path.is_dir() else None}


def _folder_bytes(folder: Path) -> int:
    """Sum the bytes of all files below a folder; a link counts as a link, and a file that vanishes
    meanwhile not at all."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += 0 if path.is_dir() else path.lstat().st_size
    return total


@dataclass(frozen=True)
class PruneResult(Answer):
    """What `prune` removed, and what could not be removed."""

    removed: tuple[Path, ...]
    freed_bytes: int
    kept: tuple[Path, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.kept

    def lines(self) -> list[str]:
        return [
            *(f"Removed: {path}" for path in self.removed),
            f"Freed: {format_size(self.freed_bytes)}",
            next_command_line("runs"),
        ]


def select_prunable(
    folders: Iterable[RunFolder], scope: PruneScope
) -> dict[RunFolder, dict[Path, int]]:
    """Select what `prune` removes of these runs. Event files behind a link are left out: they may
    be another user's. Raises RunFolderError where a run is a link, is being written, or could still
    be resumed from what is to go.
    """
    selection = {folder: paths for folder in folders if (paths := _prunable_paths(folder, scope))}
    for folder in selection:
        if lock_holder_pid(folder) is not None:
            raise RunFolderError(
                f"{folder.path} is being written by a process and is not removed; stop it first"
            )
        if scope != "run":
            _require_finished(folder, run_status(folder, folder.read_manifest()))
    return selection


def _prunable_paths(folder: RunFolder, scope: PruneScope) -> dict[Path, int]:
    if scope == "curves":
        is_link = folder.path.is_symlink() or folder.tensorboard_path.is_symlink()
        files = [] if is_link else sorted(folder.tensorboard_path.rglob(EVENT_FILES))
        return {path: path.stat().st_size for path in files if not path.is_symlink()}
    if folder.path.is_symlink():
        raise RunFolderError(
            f"{folder.path} is a link to {folder.path.resolve()}:"
            " name that folder, or remove the link"
        )
    if scope == "run":
        return {folder.path: _folder_bytes(folder.path)}
    return {checkpoints: _folder_bytes(checkpoints) for checkpoints in _checkpoint_folders(folder)}


def _require_finished(folder: RunFolder, status: str) -> None:
    if status != "finished":
        raise RunFolderError(
            f"{folder.path} is not finished ({status}): without them it could not be resumed; "
            "remove the whole run, or finish it with make resume"
        )


def prune(selection: Mapping[RunFolder, Mapping[Path, int]]) -> PruneResult:
    """Remove what was selected (paths with their bytes, by run), with each run locked; what cannot
    be locked or removed is kept, with a warning."""
    removed: dict[Path, int] = {}
    for folder, paths in selection.items():
        try:
            with lock_run(folder):
                if folder.path not in paths:  # it may have been resumed since it was listed
                    _require_finished(folder, str(folder.read_manifest().get("status")))
                for path, size in paths.items():
                    path.unlink() if path.is_file() else shutil.rmtree(path)
                    removed[path] = size
        except (RunFolderError, OSError) as error:
            logger.warning("kept: %s", error)
    return PruneResult(
        tuple(removed),
        sum(removed.values()),
        kept=tuple(path for paths in selection.values() for path in paths if path not in removed),
    )
