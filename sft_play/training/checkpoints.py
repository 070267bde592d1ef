"""Checkpoints: written aside, checked, renamed; and which one is the last complete one."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from sft_play.errors import TrainingError

PREFIX = "checkpoint-"
COMPLETE = "complete.json"
"""Written last: names and sizes of all files. A checkpoint without it, or that differs from it, is incomplete."""
STAGING = ".writing"
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
"""Files without which training cannot be resumed exactly."""
WEIGHTS = (".safetensors", ".distcp")
"""Suffixes of files that hold weights: whole ones, and parts of torch's distributed checkpoint."""


def path_of(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return folder / f"{PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written at."""
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
    """Move a checkpoint that was written aside to its place, over one of the same step; returns its final path.

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
    # by renames only: a kill in between leaves no checkpoint that is half old and half new
    if final.exists():
        final.rename(old)
    written.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):
        written.parent.rmdir()
    return final


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(item.relative_to(checkpoint)): item.stat().st_size
        for item in sorted(checkpoint.rglob("*"))
        if item.is_file() and item.name != COMPLETE
    }


def _expected_sizes(checkpoint: Path) -> dict[str, int]:
    """Sizes of the files when the checkpoint was finished; empty where it never was."""
    try:
        return dict(json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def is_complete(checkpoint: Path) -> bool:
    """Whether the checkpoint was finished, and all its files still have their sizes."""
    expected = _expected_sizes(checkpoint)
    return bool(expected) and _sizes(checkpoint) == expected


def damage(folder: Path) -> list[str]:
    """For each incomplete checkpoint, a line that says what it lacks."""
    lines = []
    for path in sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []:
        expected, sizes = _expected_sizes(path), _sizes(path)
        if not expected:
            lines.append(f"{path} is skipped: it was never finished (no {COMPLETE})")
        elif sizes != expected:
            wrong = [f"{name} has {sizes.get(name, 0)} of {size} bytes" for name, size in expected.items()
                     if sizes.get(name) != size]  # fmt: skip
            lines.append(f"{path} is skipped: {', '.join(wrong[:4]) or 'it holds files that it was not written with'}")
    return lines


def complete_ones(folder: Path) -> list[Path]:
    """Complete checkpoints by rising step."""
    checkpoints = [
        path
        for path in (folder.iterdir() if folder.is_dir() else [])
        if path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit() and is_complete(path)
    ]
    return sorted(checkpoints, key=step_of)


def last_complete(folder: Path) -> Path | None:
    """The checkpoint that a resumed run continues from."""
    return next(reversed(complete_ones(folder)), None)


def rotate(folder: Path, *, keep: int | None, best: Path | None) -> list[Path]:
    """Remove the oldest complete checkpoints beyond `keep`, never the best one; returns what was removed."""
    if keep is None:
        return []
    candidates = [path for path in complete_ones(folder) if best is None or path.name != best.name]
    removed = candidates[:-keep]
    for path in removed:
        (path / COMPLETE).unlink()  # first, so that a kill in between leaves nothing that looks complete
        shutil.rmtree(path)
    return removed
