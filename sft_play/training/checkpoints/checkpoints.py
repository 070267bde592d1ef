"""Checkpoints: written aside, flushed, checked, renamed; and which one is the last that is still as
it was written."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sft_play.errors import ModelError, TrainingError
from sft_play.files import atomic
from sft_play.process.waiting import report_wait
from sft_play.runs.folder import sync_folder
from sft_play.text import MIB

CHECKPOINT_PREFIX = "checkpoint-"
# Written last: names, sizes and digests of all files. A checkpoint that lacks it, or differs from
# it, is not used. Beside the weights of a finished run it says what they were when they were
# written.
COMPLETE_FILE = "complete.json"
# What is hashed at once, several pieces at a time: one after the other, a large file would take as
# long as writing.
HASH_PIECE_BYTES = 64 * MIB
HASH_THREADS = 8
STAGING_NAME = ".writing"
# Files without which training cannot be resumed exactly.
RESUME_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
# files beside trained weights that people may change
_EDITABLE_FILES = re.compile(r".*\.(md|jinja)|.*config.*\.json")


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return folder / f"{CHECKPOINT_PREFIX}{step}"


def checkpoint_step(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written at."""
    return int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX))


def staging_path(folder: Path) -> Path:
    """Where the next checkpoint is written."""
    return folder / STAGING_NAME


def create_staging(folder: Path) -> Path:
    """An empty folder in which the next checkpoint is written."""
    path = staging_path(folder)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit_checkpoint(
    staged: Path, folder: Path, *, required_files: Sequence[str] = RESUME_FILES
) -> Path:
    """Move a checkpoint that was written aside to its place, over one of the same step; returns its
    final path. Raises TrainingError: a file that resuming needs is missing or empty."""
    sizes = _file_sizes(staged)
    missing = [name for name in required_files if not sizes.get(name)]
    if not any(
        name.endswith((".safetensors", ".distcp")) and size > 0 for name, size in sizes.items()
    ):
        missing.append("weights (*.safetensors, or *.distcp where every rank writes its part)")
    if missing:
        raise TrainingError(
            f"the checkpoint {staged} was written without {', '.join(missing)}; is the disk full?"
        )
    record_digests(staged)
    sync_folder(staged)  # a rename can outlive a power cut that what it names does not
    final = folder / staged.name
    atomic.move_into_place(staged, final, backup=folder / f"{STAGING_NAME}-old")
    # it is whole, and only a power cut could still take its name back
    with contextlib.suppress(OSError):
        sync_folder(folder, is_recursive=False)
    with contextlib.suppress(OSError):
        staged.parent.rmdir()
    return final


def record_digests(folder: Path) -> None:
    """Write down the size and digest of each file."""
    sizes = _file_sizes(folder)
    (folder / COMPLETE_FILE).write_text(
        json.dumps({"files": sizes, "digests": _file_digests(folder, sizes)}, indent=1),
        encoding="utf-8",
    )


def require_unchanged(folder: Path) -> None:
    """Raises ModelError where trained weights, or their tokenizer, are not what was written. Those
    of older runs have no digests, and what people edit (`_EDITABLE_FILES`) may change."""
    if not (folder / COMPLETE_FILE).is_file():
        return
    with report_wait(f"Comparing {folder} with its digests"):
        damage = find_damage(folder, editable=_EDITABLE_FILES)
    if damage is not None:
        raise ModelError(
            f"{folder} is not what was written: {damage}. Put back a copy of it, or write it again"
            " (make consolidate from the last checkpoint, make merge FORCE=1). If you changed it"
            f" yourself, remove {folder / COMPLETE_FILE}"
        )


def _file_sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(item.relative_to(checkpoint)): item.stat().st_size
        for item in sorted(checkpoint.rglob("*"))
        if item.is_file() and item.name != COMPLETE_FILE
    }


# For each file the SHA-256 of the SHA-256 digests of its pieces.
def _file_digests(checkpoint: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    pieces = [
        (name, start) for name, size in sizes.items() for start in range(0, size, HASH_PIECE_BYTES)
    ]
    hashes = {name: hashlib.sha256() for name in sizes}
    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        piece_digests = pool.map(lambda piece: _hash_piece(checkpoint / piece[0], piece[1]), pieces)
        for (name, _), digest in zip(pieces, piece_digests, strict=True):
            hashes[name].update(digest)
    return {name: digest.hexdigest() for name, digest in hashes.items()}


def _hash_piece(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(HASH_PIECE_BYTES // MIB):
            digest.update(file.read(MIB))
    return digest.digest()


# The sizes and digests of the files by COMPLETE_FILE; empty where it is missing, damaged or was
# edited.
def _read_record(checkpoint: Path) -> tuple[dict[str, int], dict[str, str]]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        text = (checkpoint / COMPLETE_FILE).read_text(encoding="utf-8")
        record = json.loads(text)
        if json.dumps(record, indent=1) == text:
            return dict(record["files"]), dict(record["digests"])
    return {}, {}


def find_damage(
    checkpoint: Path, *, reads_contents: bool = True, editable: re.Pattern[str] | None = None
) -> str | None:
    """Say in words how a checkpoint differs from what was written; None: it does not.
    `reads_contents`: read all files and compare their digests; False compares sizes only.
    `editable`: names of files that may change; other files may then be added too."""
    if not (checkpoint / COMPLETE_FILE).is_file():
        return f"it was never finished (no {COMPLETE_FILE})"
    expected, digests = _read_record(checkpoint)
    if not expected or set(digests) != set(expected):
        return f"{COMPLETE_FILE} is damaged"
    if editable is not None:
        expected = {name: size for name, size in expected.items() if not editable.fullmatch(name)}
    try:
        sizes = _file_sizes(checkpoint)
        if editable is not None:
            sizes = {name: size for name, size in sizes.items() if name in expected}
        wrong = [name for name, size in expected.items() if sizes.get(name) != size]
        if wrong:
            return ", ".join(
                f"{name} has {sizes.get(name, 0)} of {expected[name]} bytes" for name in wrong[:4]
            )
        if len(sizes) > len(expected):
            return "it holds files that it was not written with"
        actual_digests = _file_digests(checkpoint, sizes) if reads_contents else digests
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    changed = [name for name in expected if actual_digests[name] != digests[name]]
    return (
        f"{', '.join(changed[:4])}: the contents are not those that were written"
        if changed
        else None
    )


def last_undamaged(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the last undamaged checkpoint (None: there is none), and the later ones, each with its
    damage."""
    damaged: dict[Path, str] = {}
    for path in sorted(_numbered_checkpoints(folder), key=checkpoint_step, reverse=True):
        damage = find_damage(path)
        if damage is None:
            return path, damaged
        damaged[path] = damage
    return None, damaged


def _numbered_checkpoints(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else []:
        if (
            path.name.startswith(CHECKPOINT_PREFIX)
            and path.name.removeprefix(CHECKPOINT_PREFIX).isdigit()
        ):
            yield path


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints by rising step: those that were finished, and whose files still have
    their sizes. Their contents are not read."""
    return sorted(
        (
            path
            for path in _numbered_checkpoints(folder)
            if find_damage(path, reads_contents=False) is None
        ),
        key=checkpoint_step,
    )


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint; `last_undamaged` reads the contents too."""
    return next(reversed(complete_checkpoints(folder)), None)


def resume_note(folder: Path) -> str:
    """Which step a resumed run would continue from, in words."""
    if last := last_complete_checkpoint(folder):
        return f"the last checkpoint is that of step {checkpoint_step(last)}"
    return "there is no checkpoint"


def rotate_checkpoints(folder: Path, *, limit: int | None, best_checkpoint: Path | None) -> None:
    """Remove the oldest complete checkpoints beyond `limit` (None: keep all), never the best
    one."""
    if limit is None:
        return
    candidates = [
        path
        for path in complete_checkpoints(folder)
        if best_checkpoint is None or path.name != best_checkpoint.name
    ]
    for path in candidates[:-limit]:
        # first, so that a kill in between leaves nothing that looks complete
        (path / COMPLETE_FILE).unlink()
        shutil.rmtree(path)
