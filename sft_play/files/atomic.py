"""Files and folders that are written aside and renamed: whoever reads, and a kill, finds the old one or the new one."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, aside: Path | None = None) -> Iterator[Path]:
    """The path to write a file or a folder to, which gets the name `path` at the end; removed where the block raises.
    `aside`: that path (None: a new hidden one beside `path`); what a killed one left there is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    remove(aside)
    try:
        yield aside
        put(aside, path)
    except BaseException:
        remove(aside)
        raise


def write(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file in UTF-8; `errors`: as in `open`."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors=errors)


def put(written: Path, path: Path, *, before: Path | None = None) -> None:
    """Rename a file or folder onto `path`. A folder that is there is renamed to `before` (None: .NAME.before beside it)
    for that moment, brought back where the other rename fails, and removed where it does not."""
    if not path.is_dir():
        written.rename(path)
        return
    before = before or path.with_name(f".{path.name}.before")
    remove(before)
    path.rename(before)
    try:
        written.rename(path)
    except BaseException:
        before.rename(path)
        raise
    remove(before)


def bring_back(path: Path) -> None:
    """Give a folder its name back where `put` was killed between its two renames."""
    before = path.with_name(f".{path.name}.before")
    if before.is_dir() and not path.exists():
        before.rename(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, as far as that is possible; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
