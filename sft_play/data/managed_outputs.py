"""Files that a command writes again each time, and that a person may have edited in between.

A folder keeps a record of what was written into it. A file that has changed since, or that is not
in the record, is the user's: it is overwritten only with FORCE=1. Everything is first written under
hidden names and renamed at the end, so that a command that fails or is killed leaves the old files
as they were.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO

from sft_play.errors import DataError
from sft_play.files import atomic
from sft_play.log import one_line

# Name of a folder's record: digests of the files as they were left.
RECORD_NAME = ".sft_play_written.json"


@contextlib.contextmanager
def _name_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


class OutputFolder:
    """A folder of written files, used as a context: what was opened gets its name when the context
    ends without error. Entering it raises DataError where a file of `names` was edited, or is not
    ours, and `force` is false.
    """

    def __init__(self, path: Path, names: tuple[str, ...], *, force: bool, command: str) -> None:
        self.path = path
        self._names, self._force, self._command = names, force, command
        self._files: dict[str, TextIO] = {}
        # Renames what was written when it is left, the last opened first; removes it where it is
        # left with an error.
        self._renames = contextlib.ExitStack()

    def __enter__(self) -> Self:
        existing = [self.path / name for name in self._names if (self.path / name).exists()]
        unmanaged = [path for path in existing if not path.is_file()]
        if existing and not self._force:
            record = self._read_record()
            unmanaged += [
                path
                for path in existing
                if path.is_file() and record.get(path.name) != _file_digest(path)
            ]
        if unmanaged:
            raise DataError(
                f"{', '.join(map(str, unmanaged))}: edited since make {self._command} wrote it, or"
                f" not written by it; move it away, or overwrite it with make {self._command}"
                " FORCE=1 (which replaces no folder)"
            )
        with _name_write_errors(self.path):
            # opened first, so that it gets its name last
            self._record_path = self._renames.enter_context(
                atomic.replace_path(self.path / RECORD_NAME)
            )
        return self

    def open(self, name: str) -> TextIO:
        """Open a text file that gets its name when the context ends; `name` is one of the folder's
        `names`."""
        temporary_path = self._renames.enter_context(atomic.replace_path(self.path / name))
        self._files[name] = temporary_path.open("w", encoding="utf-8", newline="\n")
        return self._files[name]

    def write_json(self, name: str, data: Any) -> None:
        """A JSON file."""
        self.open(name).write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._renames.__exit__(kind, error, trace)
            # The disk is full or broken, a limit is reached, or a file here cannot be written:
            # errors of files that are read meanwhile keep their own words.
            if isinstance(error, OSError) and (
                error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
                or (error.filename is not None and Path(error.filename).parent == self.path)
            ):
                raise DataError(f"{self.path} cannot be written: {error.strerror}") from None
            return
        with _name_write_errors(self.path), self._renames:
            record = self._read_record()
            for name, file in self._files.items():
                file.close()
                record[name] = _file_digest(Path(file.name))
            outdated = record.keys() & set(self._names) - self._files.keys()
            for name in outdated:
                del record[name]
            self._record_path.write_text(
                json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
            for name in outdated:
                (self.path / name).unlink(missing_ok=True)

    def _read_record(self) -> dict[str, str]:
        path = self.path / RECORD_NAME
        try:
            record: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({one_line(str(error))}); remove it, or overwrite with"
                " FORCE=1"
            ) from None
        return record


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
