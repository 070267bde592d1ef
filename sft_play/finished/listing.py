"""`make runs` and `make prune`: every run of an output folder at a glance, and the removal of those that are named.

Only folders with this toolkit's manifest are looked at or removed. A run that is being written is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sft_play.diagnose.pages import align_columns
from sft_play.diagnose.processes import lock_holder
from sft_play.errors import RunFolderError
from sft_play.finished.run import Outcome, next_line
from sft_play.log import one_line
from sft_play.runs.files import read_evaluations, read_json, read_metric_lines, read_summary
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import lock_run
from sft_play.runs.lookup import iter_runs
from sft_play.units import format_duration, format_size

logger = logging.getLogger(__name__)

Status = Literal["running", "finished", "stopped", "failed"]
# What of a run is removed: all of it, its checkpoints, or TensorBoard's event files.
What = Literal["run", "checkpoints", "curves"]
CURVES = "events.out.tfevents.*"


@dataclass(frozen=True)
class ListedRun:
    """A run at a glance."""

    name: str
    path: Path
    model: str
    mode: str
    status: Status
    """`failed` also where the manifest says running and no process writes it: it was killed."""
    step: int | None
    best_metric: str | None
    """Of the best held-out figure: `exact_match`, else `loss`."""
    best_value: float | None
    best_step: int | None
    best_checkpoint: str | None
    bytes: int
    checkpoint_bytes: int
    started: datetime | None
    best_rows: int | None = None  # whose answer was generated for the best exact match


@dataclass(frozen=True)
class RunList(Outcome):
    """The runs of an output folder, the newest first."""

    output: Path
    runs: tuple[ListedRun, ...]
    now: datetime

    def lines(self) -> list[str]:
        if not self.runs:
            return [f"There are no runs in {self.output}", next_line("train")]
        rows = [("run", "status", "step", "best", "size", "age", "model")]
        for run in self.runs:
            form = {"exact_match": "exact match {:.1%}", "loss": "loss {:.4g}"}.get(run.best_metric or "", "-")
            form += f" of {run.best_rows:,} rows" if run.best_rows else ""
            step = "-" if run.step is None else str(run.step)
            age = "-" if run.started is None else format_duration((self.now - run.started).total_seconds())
            name, model = one_line(run.name, limit=48), one_line(f"{run.mode} {run.model}", limit=48)
            rows.append((name, run.status, step, form.format(run.best_value), format_size(run.bytes), age, model))
        count, total = len(self.runs), sum(run.bytes for run in self.runs)
        checkpoints = sum(run.checkpoint_bytes for run in self.runs)
        return [
            *align_columns(rows),
            f"{count} run{'s' * (count != 1)}, {format_size(total)}, of which checkpoints {format_size(checkpoints)}",
            next_line("report", RUN=self.runs[0].path),
        ]


def list_runs(output: Path, *, now: datetime | None = None) -> RunList:
    """Every run directly below an output folder, those moved aside too."""
    listed = [_listed(folder) for folder in iter_runs(output, include_replaced=True)]
    # runs without a start (their manifest is damaged) go last once the order is reversed
    listed.sort(key=lambda run: (run.started is not None, run.started or datetime.now(UTC), run.name))
    return RunList(output, tuple(reversed(listed)), now or datetime.now(UTC))


def _listed(folder: RunFolder) -> ListedRun:
    manifest = folder.read_manifest()
    resolved = read_json(folder.path / "resolved.json")
    path = folder.metrics_path
    metrics = [entry for _, entry in read_metric_lines(path)] if path.is_file() else []
    metric, value, rows = best_of(metrics, read_summary(folder.path)) or (None, None, None)
    return ListedRun(
        folder.path.name,
        folder.path,
        model=str((resolved.get("model") or {}).get("name", "?")),
        mode=str((resolved.get("tuning") or {}).get("mode", "?")),
        status=status_of(folder, manifest),
        step=max((entry["step"] for entry in metrics), default=None),
        best_metric=metric,
        best_value=value,
        **best_checkpoint(folder),
        bytes=_bytes(folder.path),
        checkpoint_bytes=sum(_bytes(place) for place in folder.path.rglob("checkpoints") if place.is_dir()),
        started=_date(manifest.get("started")),
        best_rows=rows,
    )


def status_of(folder: RunFolder, manifest: dict[str, Any]) -> Status:
    """`running` while a process trains it; `failed` where the manifest says running and none does. A finished run
    stays finished while a command such as `ship` or `merge` has it locked."""
    status = manifest.get("status")
    if status == "finished":
        return "finished"
    if lock_holder(folder) is not None:  # the lock before the manifest, which a killed run leaves at "running"
        return "running"
    return "stopped" if status == "stopped" else "failed"


def best_of(metrics: Sequence[dict[str, Any]], summary: dict[str, Any]) -> tuple[str, float, int | None] | None:
    """The best of all evaluations, the one after training among them: exact match where it was measured, with how many
    rows it is of where that was recorded, else loss."""
    after = summary.get("after") if isinstance(summary.get("after"), dict) else {}
    evaluated = [*metrics, {f"eval_{name}": value for name, value in (after or {}).items()}]
    for name, choose in (("exact_match", max), ("loss", min)):
        values = [(entry.get(f"eval_{name}"), entry.get("eval_generated_rows")) for entry in evaluated]
        numbers = [(float(value), rows) for value, rows in values if isinstance(value, (int, float))]
        if numbers:
            value, rows = choose(numbers, key=lambda one: one[0])
            return name, value, rows if name == "exact_match" else None
    return None


def best_checkpoint(folder: RunFolder) -> dict[str, Any]:
    """`best_step` and `best_checkpoint` for programs: the step of the best evaluation, by train.metric_for_best_model,
    and the path of its checkpoint; None where there is none. Of a run with stages those of its newest stage."""
    lines = [one for _, one in read_metric_lines(folder.metrics_path)] if folder.metrics_path.is_file() else []
    last = next((str(one["stage"]) for one in reversed(lines) if one.get("stage")), None)
    part = folder.stage_folder(last, is_last_stage=True) if last else folder
    train = read_json(part.path / "resolved.json").get("train")
    by_match = isinstance(train, dict) and train.get("metric_for_best_model") == "exact_match"
    name, sign = ("exact_match", 1) if by_match else ("loss", -1)
    judged = [(sign * entry[name], entry["step"])
              for entry in read_evaluations(folder.metrics_path, stage=part.stage_name)
              if entry["step"] and isinstance(entry[name], (int, float)) and math.isfinite(entry[name])]  # fmt: skip
    step = max(judged, key=lambda one: (one[0], -one[1]))[1] if judged else None
    path = part.checkpoints_path / f"checkpoint-{step}"
    return {"best_step": step, "best_checkpoint": str(path) if path.is_dir() else None}


def _date(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return None


def _bytes(folder: Path) -> int:
    """Bytes of all files below a folder; links count as links, and files that vanish meanwhile not at all."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if not path.is_dir() else 0
    return total


@dataclass(frozen=True)
class Pruned(Outcome):
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
            next_line("runs"),
        ]


# What is to be removed of each run, with its bytes.
Chosen = Mapping[RunFolder, Mapping[Path, int]]


def to_prune(folders: Iterable[RunFolder], what: What) -> dict[RunFolder, dict[Path, int]]:
    """What `prune` would remove of these runs. Event files behind a link are left out: they may be another user's.
    Raises RunFolderError where a run is a link, is being written, or could still be resumed from what is to go."""
    chosen = {folder: parts for folder in folders if (parts := _parts(folder, what))}
    for folder in chosen:
        if lock_holder(folder) is not None:
            raise RunFolderError(f"{folder.path} is being written by a process and is not removed; stop it first")
        if what != "run":
            _require_finished(folder, status_of(folder, folder.read_manifest()))
    return chosen


def _parts(folder: RunFolder, what: What) -> dict[Path, int]:
    if what == "curves":
        is_link = folder.path.is_symlink() or folder.tensorboard_path.is_symlink()
        files = [] if is_link else sorted(folder.tensorboard_path.rglob(CURVES))
        return {path: path.stat().st_size for path in files if not path.is_symlink()}
    if folder.path.is_symlink():
        there = folder.path.resolve()
        raise RunFolderError(f"{folder.path} is a link to {there}: name that folder, or remove the link")
    if what == "run":
        return {folder.path: _bytes(folder.path)}
    return {place: _bytes(place) for place in sorted(folder.path.rglob("checkpoints")) if place.is_dir()}


def _require_finished(folder: RunFolder, status: str) -> None:
    if status != "finished":
        ways = "could not be resumed; remove the whole run, or finish it with make resume"
        raise RunFolderError(f"{folder.path} is not finished ({status}): without them it {ways}")


def prune(chosen: Chosen) -> Pruned:
    """Remove what `to_prune` has listed, each run locked; what cannot be locked or removed is kept, with a warning."""
    removed: dict[Path, int] = {}
    for folder, parts in chosen.items():
        try:
            with lock_run(folder):
                if folder.path not in parts:  # it may have been resumed since it was listed
                    _require_finished(folder, str(folder.read_manifest().get("status")))
                for path, size in parts.items():
                    path.unlink() if path.is_file() else shutil.rmtree(path)
                    removed[path] = size
        except (RunFolderError, OSError) as error:
            logger.warning("kept: %s", error)
    kept = tuple(path for parts in chosen.values() for path in parts if path not in removed)
    return Pruned(tuple(removed), sum(removed.values()), kept)
