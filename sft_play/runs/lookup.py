"""Runs in an output folder: how they are named, and found by name, by path, or as the newest that
can be resumed; new ones made whole or not at all, and old ones of the same name resumed, or moved
aside.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

import psutil

from sft_play.config.load import LoadedConfig, resolved_config
from sft_play.config.schema import OutputConfig
from sft_play.errors import RunFolderError, error_prefix
from sft_play.log import one_line
from sft_play.runs.folder import MANIFEST_FILE, RunFolder, read_json, write_json, write_text

logger = logging.getLogger(__name__)


# The lock on a run folder: who writes it, so that nobody else does.

# In a run folder while a process writes it: which process. The lock is on the file, not its
# existence.
LOCK_FILE = "run.lock"

# Who locks only a part of a run: the command that started its ranks, and the rank (or their agent)
# that writes.
LAUNCHER, WRITER = 0, 1
# What this process has locked: opening and closing such a file again would release the lock.
_OPEN_LOCKS: weakref.WeakSet["RunLock"] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # an error may keep a lock; at exit modules that `close` needs may be gone
    for run_lock in list(_OPEN_LOCKS):
        run_lock.close()


class RunLock:
    """Marks a run folder as being written until it is closed or the process ends, however it
    ends."""

    def __init__(self, folder: RunFolder, descriptor: int, role: int | None) -> None:
        # Where the folder is; code that moves it updates this.
        self.folder = folder
        self._descriptor: int | None = descriptor
        self._role = role
        self._pid = os.getpid()
        _OPEN_LOCKS.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def holds(self, path: Path) -> bool:
        """True if it is the lock on that file."""
        return self._descriptor is not None and _is_same_file(self._descriptor, path)

    def close(self) -> None:
        """Release the folder; the last holder removes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or os.getpid() != self._pid:  # a fork's copy holds no lock
            return
        path = self.folder.path / LOCK_FILE
        with contextlib.suppress(OSError):
            if self._role is not None:
                # fails while the other part is still locked
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                path.unlink()
        os.close(descriptor)


def lock_run(folder: RunFolder, *, role: int | None = None) -> RunLock:
    """Mark a run folder as being written; called by whatever moves, resumes or writes one.

    Locks are fcntl's: the kernel releases them when the process ends, data loaders do not inherit
    them, and locks of other nodes are visible through NFS. On a file system without locks the note
    of who writes is trusted.

    `role`: None locks the whole run. LAUNCHER and WRITER, two processes of one run, lock a part
    each: they do not exclude each other, and each excludes everybody else. Raises RunFolderError
    where another process is writing the run, or the folder cannot be written.
    """
    path = folder.path / LOCK_FILE
    for _ in range(100):
        # to the kernel, a second lock by the same process is the same lock
        if any(run_lock.holds(path) for run_lock in list(_OPEN_LOCKS)):
            raise RunFolderError(
                f"{folder.path} is already being written by this process (pid {os.getpid()})"
            )
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
                note = json.dumps(
                    {
                        "pid": os.getpid(),
                        "host": socket.gethostname(),
                        "since": datetime.now(UTC).isoformat(timespec="seconds"),
                    }
                )
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, note.encode() + b"\n", 0)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            if isinstance(error, OSError) and not isinstance(error, RunFolderError):
                raise RunFolderError(f"{folder.path} cannot be written: {error.strerror}") from None
            raise
        return RunLock(folder, descriptor, role)
    raise RunFolderError(
        f"{path} is created and removed repeatedly by other processes; start again"
    )


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _acquire(folder: RunFolder, descriptor: int, role: int | None) -> None:
    # one byte for each part; length 0 is the whole file
    length, start = (0, 0) if role is None else (1, role)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        return
    except OSError as error:
        lock_error = error
    note = read_json(folder.path / LOCK_FILE)
    pid, is_of_this_machine = note.get("pid"), note.get("host") == socket.gethostname()
    advice = f"; if that process is gone, remove {folder.path / LOCK_FILE}"
    if lock_error.errno in (errno.EACCES, errno.EAGAIN):  # POSIX allows either
        advice = ""  # the kernel says that another process holds it
    # without locks only the note can tell; a container gives each start the same pid
    elif (
        not isinstance(pid, int)
        or role == WRITER
        or (is_of_this_machine and (pid == os.getpid() or not psutil.pid_exists(pid)))
    ):
        logger.warning(
            "%s: the file system does not support locks (%s); a run in progress in this folder is"
            " known only by its note in %s, and two that start at the same moment do not see each"
            " other",
            folder.path,
            lock_error.strerror,
            LOCK_FILE,
        )
        return
    holder, stop_advice = "", "stop it"
    if note:
        host = one_line(str(note.get("host")))
        holder = f" (pid {pid} on {host}, since {one_line(str(note.get('since')))})"
        stop_advice = f"stop it (kill {pid} on {host}, which saves its state)"
    raise RunFolderError(
        f"{folder.path} is being written by another process{holder}; wait until it ends,"
        f" {stop_advice}, or give another output.name{advice}"
    )


# --- who holds it ---------------------------------------------------------------------------------

# `struct flock` of 64-bit Linux (type, whence, start, length, pid) and of macOS (start, length,
# pid, type, whence).
_LOCK_LINUX, _LOCK_BSD = "hhqqi4x", "qqihh"


def lock_holder_pid(folder: RunFolder) -> int | None:
    """Return the pid of the process that writes a run: the rank's if there is one, else the pid of
    the command that started it. 0 for a process of another machine or container, None if nothing
    writes it."""
    pid = next(iter(lock_holder_pids(folder)), None)
    return pid if pid is None or (pid > 0 and psutil.pid_exists(pid)) else 0


def lock_holder_pids(folder: RunFolder) -> tuple[int, ...]:
    """Return the pids of the processes that have a run locked, the writer's first; -1 for a process
    of another machine. The lock is not taken to find out: a run that starts at this moment must not
    find it held."""
    try:
        with (folder.path / LOCK_FILE).open("rb") as file:
            # a run alone locks all of the file, and holds both parts
            holder_pids = [_byte_lock_holder_pid(file, role) for role in (WRITER, LAUNCHER)]
    except (OSError, struct.error):
        return ()
    return tuple(dict.fromkeys(filter(None, holder_pids)))


# 0 where no process has the byte locked, -1 for one of another machine.
def _byte_lock_holder_pid(file: IO[bytes], offset: int) -> int:
    if sys.platform == "darwin":
        request = struct.pack(_LOCK_BSD, offset, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, lock_type, _ = struct.unpack(
            _LOCK_BSD, fcntl.fcntl(file, fcntl.F_GETLK, request)
        )
    else:
        request = struct.pack(_LOCK_LINUX, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        lock_type, _, _, _, pid = struct.unpack(
            _LOCK_LINUX, fcntl.fcntl(file, fcntl.F_GETLK, request)
        )
    return 0 if lock_type == fcntl.F_UNLCK else int(pid) or -1


def find_resumable(
    output: OutputConfig, *, config_path: Path, name: str | None = None
) -> RunFolder:
    """The run to resume: the named one, or the newest unfinished run of this config, of those that
    have trained if any has; raises RunFolderError where there is none, or the named one is finished
    or not ours."""
    output_root, folder = output_dir(output), None
    if name:
        with error_prefix(f"RUN={one_line(name)}"):
            folder = resolve_run(output_root, name)
    elif output.name is not None:
        folder = open_run(output_root, check_run_name(output.name, key="output.name"))
    if folder is not None:
        if folder.read_manifest().get("status") == "finished":
            raise RunFolderError(
                f"the run {folder.path} is finished; start a new one with make train"
            )
        return folder
    config = str(config_path.absolute())
    manifests = {folder: folder.read_manifest() for folder in iter_runs(output_root)}
    config_runs = [
        folder for folder, manifest in manifests.items() if manifest.get("config_path") == config
    ]
    unfinished = [folder for folder in config_runs if manifests[folder].get("status") != "finished"]
    if not unfinished:
        raise RunFolderError(
            f"no unfinished run of {config_path} in {output_root} ({len(config_runs)} finished);"
            f" start one with make train CONFIG={config_path}"
        )
    unfinished.sort(
        key=lambda folder: (str(manifests[folder].get("started")), str(folder.path)), reverse=True
    )
    chosen = next((folder for folder in unfinished if folder.has_trained), unfinished[0])
    for skipped in unfinished[: unfinished.index(chosen)]:
        logger.info(
            "%s is newer, but no step was trained in it: RUN=%s starts it again",
            skipped.path,
            skipped.path.name,
        )
    return chosen


def open_run(output_root: Path, name: str) -> RunFolder:
    """The run of that name in an output folder; raises RunFolderError where there is none, or it is
    not one of ours."""
    folder = RunFolder(output_root / name)
    if not folder.path.is_dir():
        run_names = ", ".join(run.path.name for run in list(iter_runs(output_root))[-8:]) or "none"
        raise RunFolderError(
            f"there is no run {one_line(name)} in {output_root}; the runs there: {run_names}"
        )
    folder.read_manifest()
    return folder


def resolve_run(output_root: Path, name_or_path: str) -> RunFolder:
    """Resolve RUN: the name of a run in an output folder, or the beginning that only one has, or
    its own path; raises RunFolderError where there is none, or it is not one of ours."""
    path = Path(name_or_path).expanduser()
    if path.name != name_or_path or (path / MANIFEST_FILE).is_file():
        return open_run(path.parent, path.name)
    name = check_run_name(name_or_path, key="RUN")
    # a name that was not written to its end, of the only run that begins so
    begun = [run for run in iter_runs(output_root) if run.path.name.startswith(name)]
    if len(begun) == 1 and not (output_root / name).exists():
        logger.info("RUN=%s is %s", name, begun[0].path.name)
        return begun[0]
    return open_run(output_root, name)


def iter_runs(output_root: Path, *, include_replaced: bool = False) -> Iterator[RunFolder]:
    """Yield the runs directly below an output folder, by name; with `include_replaced` those moved
    aside too."""
    for path in sorted(output_root.iterdir()) if output_root.is_dir() else []:
        # a leading dot: a folder that another start is building (create_run)
        if include_replaced or not (path.name.startswith(".") or ".replaced-" in path.name):
            with contextlib.suppress(RunFolderError):
                RunFolder(path).read_manifest()
                yield RunFolder(path)


def output_dir(output: OutputConfig) -> Path:
    """The folder of the run folders; raises RunFolderError where it cannot be a folder."""
    problem = "it is a file, or a link that leads nowhere; name a folder"
    try:
        base = Path(output.dir).expanduser()
        if base.is_dir() or not (base.exists() or base.is_symlink()):
            return base
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    raise RunFolderError(f"output.dir={one_line(output.dir)} cannot be a folder: {problem}")


def config_run_name(path: Path) -> str:
    """What the names of a config's runs begin with where it names none."""
    return re.sub(r"[^\w.-]+", "-", path.stem).strip(".-") or "run"


def check_run_name(name: str, *, key: str) -> str:
    """The name, if it can only mean a folder directly below `output.dir`; raises RunFolderError
    otherwise."""
    # "-" would read as a flag where the name is typed, ":" as a drive; 200 bytes leave room for
    # ".replaced-TIME".
    is_invalid = (
        name != name.strip()
        or name.startswith((".", "~", "-"))
        or re.search(r"[/\\\x00-\x1f:]", name)
    )
    if is_invalid or ".." in name or not name or len(name.encode()) > 200:
        raise RunFolderError(
            f"{key}={one_line(json.dumps(name, ensure_ascii=False))} is refused: a run's name is"
            " one word without separators, `..` or a leading dot, such as output.name=gsm8k-r16"
        )
    return name


# --- created, and moved aside ---------------------------------------------------------------------
def new_run_folder(
    output: OutputConfig, *, config_path: Path, now: datetime | None = None
) -> RunFolder:
    """The folder that a new run will have, named as given, or by the config's stem and the UTC
    time; nothing is written yet. Raises RunFolderError where the name is refused, or the folder
    exists and `output.if_exists` is fail."""
    if output.name is None:
        start_time = f"{now or datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        path = unused_path(output_dir(output) / f"{config_run_name(config_path)}-{start_time}")
    else:
        path = output_dir(output) / check_run_name(output.name, key="output.name")
    if not path.exists():
        return RunFolder(path)
    if output.if_exists == "fail":
        raise RunFolderError(
            f"the run folder {path} exists; choose output.if_exists=resume (continue it), "
            "output.if_exists=replace (move it aside and start over), or another output.name"
        )
    folder = RunFolder(path)
    folder.read_manifest()  # refuses early what create_run(), or a resume, would refuse
    if output.if_exists == "replace":
        lock_run(folder).close()
    return folder


def require_writable_output_dir(folder: RunFolder) -> None:
    """Raises RunFolderError where a new run's folder could not be created; nothing is left
    behind."""
    _make_temporary_folder(folder, makes_parents=False).rmdir()


def _make_temporary_folder(folder: RunFolder, *, makes_parents: bool) -> Path:
    parent = folder.path.absolute().parent
    try:
        if makes_parents:
            parent.mkdir(parents=True, exist_ok=True)
        while not parent.exists():
            parent = parent.parent
        return Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.path.name}."))
    except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
        reason = getattr(error, "strerror", error)
        raise RunFolderError(
            f"output.dir={folder.path.parent} cannot be written: {reason}"
        ) from None


def is_resume(folder: RunFolder, output: OutputConfig) -> bool:
    """True if a start that is given this folder resumes the run in it."""
    return folder.path.exists() and output.if_exists == "resume"


def is_finished(folder: RunFolder) -> bool:
    """True if a run is finished; then a line in the log says so."""
    if folder.read_manifest().get("status") != "finished":
        return False
    logger.info("The run %s is finished; there is nothing to resume", folder.path)
    return True


def create_run(
    folder: RunFolder,
    loaded: LoadedConfig,
    *,
    manifest: dict[str, Any],
    plan: dict[str, Any],
    lock_role: int | None = None,
) -> RunLock:
    """Create the folder, locked, with config, plan and manifest, or nothing; one to be replaced is
    moved aside. `lock_role`: see `lock_run`. Raises RunFolderError where it exists (another start
    may have created it), is being written, or cannot be created."""
    taken_message = (
        f"the run folder {folder.path} was created by another process in the meantime; start again"
    )
    temporary_path = _make_temporary_folder(folder, makes_parents=True)
    try:
        temporary_path.chmod(0o755)  # mkdtemp lets only its user read it
        write_initial_files(RunFolder(temporary_path), loaded, manifest=manifest, plan=plan)
        run_lock = lock_run(RunFolder(temporary_path), role=lock_role)
        try:
            if folder.path.exists():
                if loaded.config.output.if_exists != "replace":
                    raise RunFolderError(taken_message)
                # the old run is moved aside, to NAME.replaced-TIME
                folder.read_manifest()
                with lock_run(folder) as old_lock:
                    timestamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
                    replaced_path = unused_path(
                        folder.path.with_name(f"{folder.path.name}.replaced-{timestamp}")
                    )
                    folder.path.rename(replaced_path)
                    old_lock.folder = RunFolder(replaced_path)
            temporary_path.rename(folder.path)
        except BaseException as error:
            run_lock.close()
            # rename(2) onto a folder that is not empty, or of one to be replaced that another start
            # has moved away
            if isinstance(error, OSError) and error.errno in (
                errno.ENOTEMPTY,
                errno.EEXIST,
                errno.ENOENT,
            ):
                raise RunFolderError(taken_message) from None
            raise
    except BaseException:
        shutil.rmtree(temporary_path, ignore_errors=True)
        raise
    run_lock.folder = folder
    return run_lock


def write_initial_files(
    folder: RunFolder, loaded: LoadedConfig, *, manifest: dict[str, Any], plan: dict[str, Any]
) -> None:
    """Write what a run begins with: config, settings, plan and manifest."""
    write_text(folder.path / "config.yaml", loaded.text)
    write_json(
        folder.path / "resolved.json",
        resolved_config(loaded.config, effective_batch=plan.get("effective_batch")),
    )
    write_json(folder.path / "plan.json", plan)
    write_json(folder.path / MANIFEST_FILE, manifest)


def unused_path(path: Path) -> Path:
    """The path, with the first number behind it that is free where it is not: two starts of one
    config may come within a second."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def discard_run(folder: RunFolder) -> None:
    """Remove a run that this start created and that never took a step."""
    folder.read_manifest()
    shutil.rmtree(folder.path)
