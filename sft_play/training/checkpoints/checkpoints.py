"""Checkpoints: written aside, flushed, checked, renamed; and which one is the last that is still as it was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError, TrainingError
from sft_play.files import atomic
from sft_play.process.waiting import waiting
from sft_play.runs.files import flush
from sft_play.units import MIB

PREFIX = "checkpoint-"
# Written last: names, sizes and digests of all files. A checkpoint that lacks it, or differs from it, is not used.
# Beside the weights of a finished run it says what they were when they were written.
COMPLETE = "complete.json"
# What is hashed at once, several pieces at a time: one after the other, a large file would take as long as writing.
PIECE_BYTES = 64 * MIB
HASHING_THREADS = 8
STAGING = ".writing"
# Files without which training cannot be resumed exactly.
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
# Suffixes of files that hold weights: whole ones, and parts of torch's distributed checkpoint.
WEIGHTS = (".safetensors", ".distcp")
# files beside trained weights that people may change
_EDITED = re.compile(r".*\.(md|jinja)|.*config.*\.json")


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


def commit(
    written: Path, folder: Path, *, needed: Sequence[str] = NEEDED, moved: Callable[[int], None] | None = None
) -> Path:
    """Move a checkpoint that was written aside to its place, over one of the same step; returns its final path. `moved`
    is called with the bytes that were hashed. Raises TrainingError: a file that resuming needs is missing or empty."""
    sizes = _sizes(written)
    lacking = [name for name in needed if not sizes.get(name)]
    if not any(name.endswith(WEIGHTS) and size > 0 for name, size in sizes.items()):
        lacking.append("weights (*.safetensors, or *.distcp where every rank writes its part)")
    if lacking:
        raise TrainingError(f"the checkpoint {written} was written without {', '.join(lacking)}; is the disk full?")
    seal(written, moved=moved)
    flush(written)  # a rename can outlive a power cut that what it names does not
    final = folder / written.name
    atomic.move_into_place(written, final, backup=folder / f"{STAGING}-old")
    with contextlib.suppress(OSError):  # it is whole, and only a power cut could still take its name back
        flush(folder, below=False)
    with contextlib.suppress(OSError):
        written.parent.rmdir()
    return final


def seal(folder: Path, *, moved: Callable[[int], None] | None = None) -> None:
    """Write down the size and digest of each file; `moved` is called with the bytes that were hashed."""
    sizes = _sizes(folder)
    record = {"files": sizes, "digests": _digests(folder, sizes, moved)}
    (folder / COMPLETE).write_text(_text(record), encoding="utf-8")


def require_sealed(folder: Path) -> None:
    """Raises ModelError where trained weights, or their tokenizer, are not what was written. Those of older runs have
    no digests, and what people edit (`_EDITED`) may change."""
    with waiting(f"Comparing {folder} with its digests"):
        difference = fault(folder, but=_EDITED) if (folder / COMPLETE).is_file() else None
    if difference is not None:
        raise ModelError(
            f"{folder} is not what was written: {difference}. Put back a copy of it, or write it again (make "
            "consolidate from the last checkpoint, make merge FORCE=1). If you changed it yourself, remove "
            f"{folder / COMPLETE}"
        )


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(item.relative_to(checkpoint)): item.stat().st_size
        for item in sorted(checkpoint.rglob("*"))
        if item.is_file() and item.name != COMPLETE
    }


def _digests(checkpoint: Path, sizes: Mapping[str, int], moved: Callable[[int], None] | None = None) -> dict[str, str]:
    """For each file the SHA-256 of the SHA-256 digests of its pieces."""
    pieces = [(name, start) for name, size in sizes.items() for start in range(0, size, PIECE_BYTES)]
    whole = {name: hashlib.sha256() for name in sizes}
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda piece: _hashed(checkpoint / piece[0], piece[1]), pieces)
        for (name, start), digest in zip(pieces, found, strict=True):
            whole[name].update(digest)
            if moved is not None:
                moved(min(PIECE_BYTES, sizes[name] - start))
    return {name: digest.hexdigest() for name, digest in whole.items()}


def _hashed(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(PIECE_BYTES // MIB):
            digest.update(file.read(MIB))
    return digest.digest()


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1)


def _record(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """What was written down when it was finished: `files` and `digests`; empty where that is not what is there."""
    try:
        text = (checkpoint / COMPLETE).read_text(encoding="utf-8")
        record = json.loads(text)
        is_ours = set(record) == {"files", "digests"} and _text(record) == text
        return {key: dict(record[key]) for key in record} if is_ours else {}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def is_complete(checkpoint: Path) -> bool:
    """Whether the checkpoint was finished, and all its files still have their sizes. Their contents are not read."""
    return fault(checkpoint, contents=False) is None


def fault(
    checkpoint: Path,
    *,
    contents: bool = True,
    but: re.Pattern[str] | None = None,
    moved: Callable[[int], None] | None = None,
) -> str | None:
    """How a checkpoint differs from what was written, in words; None where it does not. `contents`: all files are read,
    and their digests compared; `moved` is called with the bytes. With `but`, files of such names may have changed, and
    more of any name may be there."""
    record = _record(checkpoint)
    expected, digests = (
        {name: one for name, one in record.get(key, {}).items() if but is None or not but.fullmatch(name)}
        for key in ("files", "digests")
    )
    if not expected:
        damaged = (checkpoint / COMPLETE).is_file()
        return f"{COMPLETE} is damaged" if damaged else f"it was never finished (no {COMPLETE})"
    try:
        sizes = {name: size for name, size in _sizes(checkpoint).items() if but is None or name in expected}
        if sizes != expected:
            wrong = [f"{name} has {sizes.get(name, 0)} of {size} bytes" for name, size in expected.items()
                     if sizes.get(name) != size]  # fmt: skip
            return ", ".join(wrong[:4]) or "it holds files that it was not written with"
        found = _digests(checkpoint, sizes, moved) if contents else digests
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    changed = sorted(name for name in found.keys() | digests.keys() if found.get(name) != digests.get(name))
    return f"{', '.join(changed[:4])}: the contents are not those that were written" if changed else None


def skipped(checkpoint: Path, found: str) -> str:
    """The line about a checkpoint that is not used."""
    return f"{checkpoint} is skipped: {found}"


def last_sound(folder: Path, *, moved: Callable[[int], None] | None = None) -> tuple[Path | None, dict[Path, str]]:
    """The last checkpoint without a fault, None where there is none; and those after it, each with its fault."""
    bad: dict[Path, str] = {}
    for path in sorted(_numbered(folder), key=step_of, reverse=True):
        found = fault(path, moved=moved)
        if found is None:
            return path, bad
        bad[path] = found
    return None, bad


def _numbered(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else []:
        if path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit():
            yield path


def complete_ones(folder: Path) -> list[Path]:
    """Complete checkpoints by rising step."""
    return sorted((path for path in _numbered(folder) if is_complete(path)), key=step_of)


def last_complete(folder: Path) -> Path | None:
    """The last complete checkpoint; `last_sound` reads the contents too."""
    return next(reversed(complete_ones(folder)), None)


def kept(folder: Path) -> str:
    """Which step a resumed run would continue from, in words."""
    last = last_complete(folder)
    return f"the last checkpoint is that of step {step_of(last)}" if last else "there is no checkpoint"


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
