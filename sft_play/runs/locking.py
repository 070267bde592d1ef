"""The lock on a run folder: who writes it, so that nobody else does."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

import psutil

from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)

# In a run folder while a process writes it: which process. The lock is on the file, not its existence.
LOCK_FILE = "run.lock"

# Who locks only a part of a run: the command that started its ranks, and the rank (or their agent) that writes.
LAUNCHER, WRITER = 0, 1
# What fcntl(2) answers where another process holds the lock: POSIX allows either.
_HELD_ERRNOS = (errno.EACCES, errno.EAGAIN)
# What this process has locked, by device and inode: opening and closing such a file again would release the lock.
_OPEN_LOCKS: weakref.WeakValueDictionary[tuple[int, int], RunLock] = weakref.WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """Release locks that are still held at exit (an error may keep one), while modules that `close` needs exist."""
    for run_lock in list(_OPEN_LOCKS.values()):
        run_lock.close()


class RunLock:
    """Marks a run folder as being written until it is closed or the process ends, however it ends."""

    def __init__(self, folder: RunFolder, descriptor: int, role: int | None) -> None:
        self.folder = folder
        """Where the folder is; code that moves it updates this."""
        self._descriptor: int | None = descriptor
        self._role = role
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder; the last holder removes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or os.getpid() != self._pid:  # a fork's copy holds no lock
            return
        path = self.folder.path / LOCK_FILE
        with contextlib.suppress(OSError):
            if self._role is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the other part is still locked
            if _is_same_file(descriptor, path):
                path.unlink()
        os.close(descriptor)


def lock_run(folder: RunFolder, *, role: int | None = None) -> RunLock:
    """Mark a run folder as being written; called by whatever moves, resumes or writes one.

    Locks are fcntl's: the kernel releases them when the process ends, data loaders do not inherit them, and those of
    other nodes are visible through NFS. On a file system without locks the note of who writes is trusted.

    `role`: None locks the whole run. LAUNCHER and WRITER, two processes of one run, lock a part each: they do not
    exclude each other, and each excludes everybody else. Raises RunFolderError where another process is writing the
    run, or the folder cannot be written.
    """
    path = folder.path / LOCK_FILE
    for _ in range(100):
        _check_not_locked_here(folder, path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"{folder.path} cannot be written: {error.strerror}") from None
        try:
            _acquire(folder, descriptor, role)
            if not _is_same_file(descriptor, path):  # it was removed between opening and locking
                os.close(descriptor)
                continue
            # The launcher's note stays: its process is the one to stop, and it stops the writer.
            if role != WRITER or not os.fstat(descriptor).st_size:
                _write_note(folder, descriptor)
            status = os.fstat(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        run_lock = _OPEN_LOCKS[status.st_dev, status.st_ino] = RunLock(folder, descriptor, role)
        return run_lock
    raise RunFolderError(f"{path} is created and removed repeatedly by other processes; start again")


def _check_not_locked_here(folder: RunFolder, path: Path) -> None:
    """Raises RunFolderError where this process has the lock: to the kernel, a second one by it is the same lock."""
    try:
        status = path.stat()
    except OSError:
        return
    own_lock = _OPEN_LOCKS.get((status.st_dev, status.st_ino))
    if own_lock is not None and own_lock._descriptor is not None:
        raise RunFolderError(f"{folder.path} is already being written by this process (pid {os.getpid()})")


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _acquire(folder: RunFolder, descriptor: int, role: int | None) -> None:
    length, start = (0, 0) if role is None else (1, role)  # one byte for each part; length 0 is the whole file
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in _HELD_ERRNOS:
            raise _locked_error(folder, _read_note(descriptor)) from None
        _check_note(folder, _read_note(descriptor), role, f"the file system does not support locks ({error.strerror})")


def _check_note(folder: RunFolder, note: Mapping[str, Any], role: int | None, reason: str) -> None:
    """Without locks: raises RunFolderError where the note names another machine, or a live process of this one."""
    logger.warning("%s: %s; a run in progress in this folder is known only by its note in %s, and two that start "
                   "at the same moment do not see each other", folder.path, reason, LOCK_FILE)  # fmt: skip
    pid, host = note.get("pid"), note.get("host")
    if not isinstance(pid, int) or role == WRITER:
        return
    if host != socket.gethostname():
        raise _locked_error(folder, note, f"; if that process is gone, remove {folder.path / LOCK_FILE}")
    with contextlib.suppress(ProcessLookupError):
        with contextlib.suppress(PermissionError):  # it lives, and is another user's
            os.kill(pid, 0)
        if pid != os.getpid():
            raise _locked_error(folder, note, f"; if it belongs to another program, remove {folder.path / LOCK_FILE}")


def _locked_error(folder: RunFolder, note: Mapping[str, Any], advice: str = "") -> RunFolderError:
    pid, host = note.get("pid"), note.get("host")
    holder = f" (pid {pid} on {one_line(str(host))}, since {one_line(str(note.get('since')))})" if pid else ""
    stop_command = f"kill {pid}" if host == socket.gethostname() else f"kill {pid} on {one_line(str(host))}"
    return RunFolderError(
        f"{folder.path} is being written by another process{holder}; wait until it ends, stop it"
        f"{f' ({stop_command}, which saves its state)' if pid else ''}, or give another output.name{advice}"
    )


def _read_note(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(os.pread(descriptor, 4096, 0).decode("utf-8", "replace"))
        return note if isinstance(note, dict) else {}
    return {}


def _write_note(folder: RunFolder, descriptor: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text + b"\n", 0)
    except OSError as error:
        raise RunFolderError(f"{folder.path} cannot be written: {error.strerror}") from None


# --- who holds it ----------------------------------------------------------------------------------------------------

# `struct flock` of 64-bit Linux (type, whence, start, length, pid) and of macOS (start, length, pid, type, whence).
_LOCK_LINUX, _LOCK_BSD = "hhqqi4x", "qqihh"


def lock_holder_pid(folder: RunFolder) -> int | None:
    """Return the pid of the process that writes a run, the rank's before its command's; 0 for a process of another
    machine or container, None if nothing writes it."""
    pid = next(iter(lock_holder_pids(folder)), None)
    return pid if pid is None or (pid > 0 and psutil.pid_exists(pid)) else 0


def lock_holder_pids(folder: RunFolder) -> tuple[int, ...]:
    """The processes that have a run locked, the writer first; -1 is one of another machine. The lock is only asked
    about: a run that starts at this moment must not find it held."""
    try:
        with (folder.path / LOCK_FILE).open("rb") as file:
            # a run alone locks all of the file, and holds both parts
            holder_pids = [_byte_lock_holder_pid(file, role) for role in (WRITER, LAUNCHER)]
    except (OSError, struct.error):
        return ()
    return tuple(dict.fromkeys(filter(None, holder_pids)))


def _byte_lock_holder_pid(file: IO[bytes], offset: int) -> int:
    """The process that has a byte locked; 0 where none has, -1 on another machine."""
    if sys.platform == "darwin":
        request = struct.pack(_LOCK_BSD, offset, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, lock_type, _ = struct.unpack(_LOCK_BSD, fcntl.fcntl(file, fcntl.F_GETLK, request))
    else:
        request = struct.pack(_LOCK_LINUX, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        lock_type, _, _, _, pid = struct.unpack(_LOCK_LINUX, fcntl.fcntl(file, fcntl.F_GETLK, request))
    return 0 if lock_type == fcntl.F_UNLCK else int(pid) or -1
