"""Checkpoints: written aside, looked at, renamed; and which one is the last good one. Nobody else decides either."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from sft_play.errors import TrainingError

PREFIX = "checkpoint-"
COMPLETE = "complete.json"
"""Written last: names and sizes of all files. A checkpoint without it, or that differs from it, is none."""
STAGING = ".writing"
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
"""Files without which training cannot go on exactly."""
WEIGHTS = (".safetensors", ".distcp")
"""Ends of the names of files that hold weights: whole ones, and parts of torch's distributed checkpoint."""


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return folder / f"{PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was made at."""
    return int(checkpoint.name.removeprefix(PREFIX))


def staging_path(folder: Path) -> Path:
    """Where the next checkpoint is written."""
    return folder / STAGING


def staging(folder: Path) -> Path:
    """An empty folder in which the next checkpoint is written."""
    path = staging_path(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit(written: Path, folder: Path, *, needed: Sequence[str] = NEEDED) -> Path:
    """Make a checkpoint that was written aside the one of its step; returns its final path.

    Raises:
        TrainingError: a file that resuming needs is missing or empty.
    """
    sizes = _sizes(written)
    lacking = [name for name in needed if not sizes.get(name)]
    if not any(name.endswith(WEIGHTS) and size > 0 for name, size in sizes.items()):
        lacking.append("weights (*.safetensors, or *.distcp where every rank writes its part)")
    if lacking:
        raise TrainingError(f"the checkpoint {written} was written without {', '.join(lacking)}; is the disk full?")
    (written / COMPLETE).write_text(json.dumps({"files": sizes}, indent=1), encoding="utf-8")
    final, old = folder / written.name, folder / f"{STAGING}-old"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    written.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(item.relative_to(checkpoint)): item.stat().st_size
        for item in sorted(checkpoint.rglob("*"))
        if item.is_file() and item.name != COMPLETE
    }


def is_complete(checkpoint: Path) -> bool:
    """Whether every file that was there when the checkpoint was finished is still there, whole."""
    try:
        expected = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))["files"]
        return bool(expected) and _sizes(checkpoint) == expected
    except (OSError, ValueError, KeyError, TypeError):
        return False


def damage(folder: Path) -> list[str]:
    """What each checkpoint that is not whole lacks, in words."""
    found = []
    for path in sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []:
        if is_complete(path):
            continue
        try:
            expected = json.loads((path / COMPLETE).read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError, TypeError):
            found.append(f"{path} is passed over: it was never finished (no {COMPLETE})")
            continue
        there = _sizes(path)
        wrong = [f"{name} has {there.get(name, 0)} of {size} bytes" for name, size in expected.items()
                 if there.get(name) != size]  # fmt: skip
        found.append(f"{path} is passed over: {', '.join(wrong[:4]) or 'it holds files that it was not written with'}")
    return found


def complete_ones(folder: Path) -> list[Path]:
    """Complete checkpoints by rising step."""
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else [])
        if path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit() and is_complete(path)
    ]
    return sorted(found, key=step_of)


def last_complete(folder: Path) -> Path | None:
    """The checkpoint that a resumed run goes on from."""
    return next(reversed(complete_ones(folder)), None)


def rotate(folder: Path, *, keep: int | None, best: Path | None) -> list[Path]:
    """Remove the oldest complete checkpoints beyond `keep`, never the best one; returns what was removed."""
    if keep is None:
        return []
    candidates = [path for path in complete_ones(folder) if best is None or path.name != best.name]
    removed = candidates[:-keep]
    for path in removed:
        (path / COMPLETE).unlink()  # first, so that a kill in between leaves no half that looks whole
        shutil.rmtree(path)
    return removed
