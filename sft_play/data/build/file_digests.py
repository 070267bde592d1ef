"""Digests of what data files hold, for caches and for a run's record."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path

from sft_play import atomic
from sft_play.cache import cache_dir
from sft_play.data.sources.files import AnySource, source_digest


def content_digest_of(source: AnySource) -> str:
    """Digest of what a source's files hold, for a run's record; that of a single file is the file's own."""
    path = Path(str(source)).expanduser()
    with contextlib.suppress(OSError):
        if path.is_file():
            return digest_of(path)
    return source_digest(source)


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content, remembered until its size, times, inode or path change."""
    state = file.stat()
    # as git does: a file whose size, times and inode are the same has not changed
    identity = [str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
    note = cache_dir() / "digests" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        digest = note.read_text(encoding="ascii")
        if len(digest) == 64:  # else half-written
            return digest
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if time.time() - state.st_mtime > 2:  # a file that is being written may change within the clock's tick
        with contextlib.suppress(OSError):
            atomic.write(note, digest)
    return digest
