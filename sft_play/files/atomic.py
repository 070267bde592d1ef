"""Files and folders that are written aside and renamed: whoever reads, and a kill, finds the old
one or the new one."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_path(path: Path, *, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write a file or a folder to. It gets the name `path` when the block
    ends, and is removed where the block raises. `temporary`: that path (None: a new hidden one
    beside `path`); what a killed process left there is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    remove(temporary)
    try:
        yield temporary
        move_into_place(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def write(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file in UTF-8; `errors`: as in `open`."""
    with replace_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors)


def move_into_place(source: Path, path: Path, *, backup: Path | None = None) -> None:
    """Rename a file or folder onto `path`. A folder that is there is renamed to `backup` (None:
    .NAME.before beside it) for that moment, brought back where the other rename fails, and removed
    where it does not."""
    if not path.is_dir():
        source.rename(path)
        return
    backup = backup or path.with_name(f".{path.name}.before")
    remove(backup)
    path.rename(backup)
    try:
        source.rename(path)
    except BaseException:
        backup.rename(path)
        raise
    remove(backup)


def restore_backup(path: Path) -> None:
    """Give a folder its name back where `move_into_place` was killed between its two renames."""
    backup = path.with_name(f".{path.name}.before")
    if backup.is_dir() and not path.exists():
        backup.rename(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, as far as that is possible; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
