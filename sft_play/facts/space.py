"""Free space on a disk: a file system's size and what is free, at the nearest folder that exists."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Space:
    """A file system's size and what is free, in bytes."""

    total: int
    free: int


def space_of(path: Path) -> Space | None:
    """The file system that holds `path`; None where it cannot be read."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(usage.total, usage.free)


def free_at(path: Path) -> tuple[Path, Space | None]:
    """The nearest folder above `path` that exists, and the space of its file system."""
    path = path.expanduser().absolute()
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    return nearest, space_of(nearest)
