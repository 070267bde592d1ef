"""Files of a run folder: read, written redacted, aside and renamed; digests of files.

No token, key or credential of the environment, of a config or of a git remote reaches a file, and a kill never leaves
half of one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.files import atomic
from sft_play.log import redact, secret_values


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none to read, as in a run that was killed early."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: Any) -> None:
    """A JSON file, redacted, written aside and renamed."""
    text = json.dumps(scrub(value), indent=2, ensure_ascii=False, default=str, allow_nan=True)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, redacted, written aside and renamed."""
    atomic.write(path, redact(text), errors="backslashreplace")


def scrub(value: Any, secrets: Sequence[str] | None = None) -> Any:
    """The value with its texts redacted before JSON escapes them; `secrets` None: those of the environment."""
    secrets = secret_values(os.environ.items()) if secrets is None else secrets
    if isinstance(value, str):
        return redact(value, secrets=secrets)
    if isinstance(value, Mapping):
        return {redact(str(key), secrets=secrets): scrub(item, secrets) for key, item in value.items()}
    return [scrub(item, secrets) for item in value] if isinstance(value, (list, tuple)) else value


def sha256_of(path: Path) -> str:
    """Digest of a file, or of the names and contents of all files of a folder."""
    digest = hashlib.sha256()
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def flush(folder: Path, *, below: bool = True) -> None:
    """Bring the names in a folder to the disk, and all that is below it."""
    for path in [*(folder.rglob("*") if below else ()), folder]:
        if not path.is_file() and not path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some disks know it for files only
                raise
        finally:
            os.close(descriptor)
