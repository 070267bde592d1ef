"""Files that a command writes again each time, and that a person may have edited in between.

A folder keeps a record of what was written into it. A file that has changed since, or that is not in the record, is
the user's: it is overwritten only with FORCE=1. Everything is first written into files without a name, which get it at
the end, so that a command that fails or is killed leaves the old files as they were and nothing beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from sft_play.errors import DataError
from sft_play.files import atomic
from sft_play.log import one_line

# Name of a folder's record: digests of the files as they were left.
RECORD_NAME = ".sft_play_written.json"


class OutputWriteError(DataError):
    """Output could not be written: the disk is full, or a limit was reached."""


class OutputFolder:
    """A folder of written files, used as a context: what was opened gets its name when the context ends without error.
    Entering it raises DataError where a file of `names` was edited, or is not ours, and `force` is false."""

    def __init__(self, path: Path, names: tuple[str, ...], *, force: bool, command: str) -> None:
        self.path = path
        self._names, self._force, self._command = names, force, command
        self._open_files: dict[str, _OutputFile] = {}

    def __enter__(self) -> OutputFolder:
        existing_names = [] if self._force else [name for name in self._names if (self.path / name).exists()]
        record = self._read_record() if existing_names else {}
        unmanaged_names = [
            name for name in existing_names
            if not (self.path / name).is_file() or record.get(name) != _file_digest(self.path / name)
        ]  # fmt: skip
        if unmanaged_names:
            raise DataError(
                f"{', '.join(str(self.path / name) for name in unmanaged_names)}: edited since make {self._command} "
                f"wrote it, "
                f"or not written by it; move it away, or overwrite it with make {self._command} FORCE=1"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.path} cannot be created: {error.strerror}") from None
        return self

    def open(self, name: str) -> TextIO:
        """Open a text file that gets its name when the context ends; `name` must be one of the folder's `names`."""
        assert name in self._names, name
        try:
            self._open_files[name] = _OutputFile(self.path / name)
        except OSError as error:
            raise DataError(f"{self.path / name} cannot be written: {error.strerror}") from None
        return self._open_files[name]

    def write_json(self, name: str, data: Any) -> None:
        """A JSON file."""
        self.open(name).write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                for file in self._open_files.values():
                    file.finish()
                self._commit_files()
        except OSError as problem:
            raise OutputWriteError(f"{self.path} cannot be written: {problem.strerror}") from None
        finally:
            for file in self._open_files.values():
                file.discard()

    def _commit_files(self) -> None:
        record = self._read_record()
        outdated = [name for name in self._names if name not in self._open_files and record.pop(name, None) is not None]
        record |= {name: _file_digest(file.temporary_path) for name, file in self._open_files.items()}
        # the record is written before anything is renamed, so that a full disk leaves all as it was; it is renamed last
        with atomic.replace_path(self.path / RECORD_NAME) as temporary_record:
            temporary_record.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            for name in outdated:
                (self.path / name).unlink(missing_ok=True)
            for name, file in self._open_files.items():
                file.temporary_path.replace(self.path / name)

    def _read_record(self) -> dict[str, str]:
        try:
            record = json.loads((self.path / RECORD_NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path / RECORD_NAME} cannot be read ({one_line(str(error))}); remove it, or overwrite with "
                f"FORCE=1"
            ) from None
        return record if isinstance(record, dict) else {}


class _OutputFile(io.TextIOWrapper):
    """A file that is written; a full disk, or a limit, is the user's error, not ours."""

    def __init__(self, path: Path) -> None:
        self.temporary_path = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
        unnamed_file = _open_unnamed_file(path.parent)
        super().__init__(
            self.temporary_path.open("wb") if unnamed_file is None else unnamed_file, encoding="utf-8", newline="\n"
        )
        self._path, self._is_unnamed = path, unnamed_file is not None

    def finish(self) -> None:
        """Write everything out, give the file its name aside, and close it; raises OSError."""
        self.flush()
        if self._is_unnamed:  # O_TMPFILE: Linux alone, and not on every file system
            # Python calls linkat, which can follow the link in /proc to the unnamed file, only where it is given a
            # src_dir_fd; the path is absolute, so that any one does.
            descriptor = self.fileno()
            os.link(f"/proc/self/fd/{descriptor}", self.temporary_path, src_dir_fd=descriptor, follow_symlinks=True)
        self.close()

    def discard(self) -> None:
        """Close it and remove what was not renamed."""
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError):
            self.temporary_path.unlink(missing_ok=True)

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputWriteError(f"{self._path} cannot be written: {error.strerror}") from None


def _open_unnamed_file(folder: Path) -> BinaryIO | None:
    """A new file without a name, gone when its process ends; None where the system or file system has no such files."""
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except (AttributeError, OSError):
        return None


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
