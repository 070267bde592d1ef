"""Files and folders that a command writes: whole, or as they were before, with one message where a disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from sft_play.errors import ConfigError, SftPlayError
from sft_play.files import atomic
from sft_play.log import one_line
from sft_play.runs.disk import refusal
from sft_play.units import gib


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, what the operating system refuses of writing `path`, or beside it, is one message.

    Raises:
        ConfigError: the disk is full, or `path` cannot be written. Errors of reading elsewhere go through as they are.
    """
    try:
        yield
    except SftPlayError:
        raise
    except (OSError, SafetensorError) as error:
        reason = refusal(error)
        if reason is None and isinstance(error, OSError) and _is_of(path, error.filename):
            reason = error.strerror
        if reason is None:
            raise
        raise ConfigError(f"{one_line(str(path))} cannot be written: {reason}") from None


def _is_of(path: Path, named: str | bytes | None) -> bool:
    """Whether an error names `path`, a folder above it, or what is written aside for it."""
    if named is None:
        return False
    other, whole = Path(os.fsdecode(named)).absolute(), path.absolute()
    if whole.is_relative_to(other):
        return True
    first = other.relative_to(whole.parent).parts[0] if other.is_relative_to(whole.parent) else ""
    return first == whole.name or first.startswith(f".{whole.name}.")


@contextlib.contextmanager
def built_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which takes its place once it is whole; else what was there stays.

    Raises:
        ConfigError: the disk is full, or nothing can be written there.
    """
    with writing(target), atomic.replacing(target) as building:
        building.mkdir()
        yield building


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises ConfigError where the disk of a folder that is being built has fewer than `needed` bytes free.

    `what` begins the message, such as "the merged model needs".
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        there = f"{folder.parent} has {gib(free)} GiB free; name another disk: OUT=FOLDER"
        raise ConfigError(f"{what} {gib(needed)} GiB and {there}")
