"""Which processes of this machine train a run, and what they hold of its memory.

A manifest that says `running` proves nothing: a killed run leaves it so. What counts is the lock on `run.lock`, which
the kernel releases when its holder ends. Its processes are the ranks whose environment names the folder
(`SFT_PLAY_RUN`), else the lock's holder with the ranks that its launcher started. Only processes of this user can be
read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from sft_play.diagnose.pages import value_text
from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import LAUNCHER, LOCK_FILE, WRITER
from sft_play.runs.lookup import iter_runs, resolve_run

_KEPT = (RUN_VARIABLE, "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True)
class RankProcess:
    """A process that trains; `rss_bytes` is resident memory, with that of what it started, such as data loaders. `rank`
    is None where it is the only one."""

    pid: int
    rank: int | None
    local_rank: int | None
    rss_bytes: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The processes of one run on this machine that train."""

    ranks: tuple[RankProcess, ...]
    started: float

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process of the run."""
        return tuple(rank.pid for rank in self.ranks)

    @property
    def rss_bytes(self) -> int:
        """Resident memory of all of them; pages that they share count for each."""
        return sum(rank.rss_bytes for rank in self.ranks)


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    environment: Mapping[str, str]
    created: float
    own: psutil.Process


def group_of(folder: RunFolder, holders: tuple[int, ...]) -> Group | None:
    """The processes that train a run, given those that have it locked; None where they cannot be seen from here."""
    table = {item.pid: item for item in _own_processes()}
    place = folder.path.resolve()
    ranks = {pid: item for pid, item in table.items() if "RANK" in item.environment}
    # what a rank started has its environment: only the topmost one counts
    tops = [item for item in ranks.values() if item.parent not in ranks]
    named = [item for item in tops if _names(item, place)]
    writer = next((table[pid] for pid in holders if pid in table), None)
    family = named
    if not named and writer is not None:
        family = [item for item in tops if item.parent == writer.parent] if writer.pid in ranks else [writer]
    if not family:
        return None
    ranks_of_run = tuple(sorted(map(_rank, family), key=lambda rank: rank.rank or 0))
    return Group(ranks_of_run, started=min(item.created for item in family))


def _names(process: _Process, place: Path) -> bool:
    named = process.environment.get(RUN_VARIABLE)
    return named is not None and Path(named).resolve() == place


def _own_processes() -> Iterator[_Process]:
    user = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != user or process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            environment = process.environ()
            kept = {name: environment[name] for name in _KEPT if name in environment}
            yield _Process(process.pid, process.ppid(), kept, process.create_time(), process)


def _rank(process: _Process) -> RankProcess:
    family = [process.own]
    with contextlib.suppress(psutil.Error):
        family += process.own.children(recursive=True)
    return RankProcess(
        pid=process.pid,
        rank=_number(process.environment.get("RANK")),
        local_rank=_number(process.environment.get("LOCAL_RANK")),
        rss_bytes=sum(map(_resident, family)),
        environment=process.environment,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


# `struct flock` of 64-bit Linux (type, whence, start, length, pid) and of macOS (start, length, pid, type, whence).
_LOCK_LINUX, _LOCK_BSD = "hhqqi4x", "qqihh"


def lock_holder(folder: RunFolder) -> int | None:
    """The pid of the process that writes a run, the rank's before its command's; 0 where it is of another machine or
    container, None where none writes."""
    pid = next(iter(_lock_holders(folder)), None)
    return pid if pid is None or (pid > 0 and psutil.pid_exists(pid)) else 0


def _lock_holders(folder: RunFolder) -> tuple[int, ...]:
    """The processes that have a run locked, the writer first; -1 is one of another machine. The lock is only asked
    about: a run that starts at this moment must not find it held."""
    try:
        with (folder.path / LOCK_FILE).open("rb") as file:
            # a run alone locks all of the file, and holds both parts
            held = [_locked_by(file, part) for part in (WRITER, LAUNCHER)]
    except (OSError, struct.error):
        return ()
    return tuple(dict.fromkeys(filter(None, held)))


def _locked_by(file: IO[bytes], start: int) -> int:
    """The process that has a byte locked; 0 where none has, -1 on another machine."""
    if sys.platform == "darwin":
        asked = struct.pack(_LOCK_BSD, start, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, kind, _ = struct.unpack(_LOCK_BSD, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    else:
        asked = struct.pack(_LOCK_LINUX, fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
        kind, _, _, _, pid = struct.unpack(_LOCK_LINUX, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(pid) or -1


@dataclass(frozen=True)
class SeenRun:
    """The run that is shown: its folder and processes, as far as there are any, and lines about it (`said`)."""

    folder: RunFolder | None = None
    group: Group | None = None
    running: bool = False
    said: tuple[str, ...] = ()


def find_run(output: Path, *, named: str | None = None) -> SeenRun:
    """The run that is named; else the newest that is being written in `output`. Raises RunFolderError where a name was
    given, and it is not a run of this toolkit."""
    if named is not None:
        return _seen(resolve_run(output, named))
    folders: list[RunFolder] = []
    with contextlib.suppress(OSError):  # the folder is missing, or on a network disk that does not answer
        folders += [folder for folder in iter_runs(output) if lock_holder(folder) is not None]
    if not folders:
        return SeenRun(said=(f"No run is in progress in {one_line(str(output))}",))
    newest, *others = sorted(folders, key=_started, reverse=True)
    seen = _seen(newest)
    listed = ", ".join(one_line(str(folder.path)) for folder in others)
    return replace(seen, said=(*seen.said, *([f"also running: {listed} (RUN= chooses)"] if others else [])))


def manifest_of(folder: RunFolder) -> dict[str, Any]:
    """The manifest; empty where it cannot be read, as while it is replaced on a network disk."""
    try:
        return folder.read_manifest()
    except RunFolderError:
        return {}


def _started(folder: RunFolder) -> tuple[str, str]:
    manifest = manifest_of(folder)
    resumed = manifest.get("resumed") or [manifest.get("started")]
    return str(resumed[-1]), str(folder.path)


def _seen(folder: RunFolder) -> SeenRun:
    shown = one_line(str(folder.path))
    if lock_holder(folder) is None:
        # a process that is killed cannot write its end into the manifest
        status = manifest_of(folder).get("status")
        dead = "; its manifest says running, and nothing writes it: it was ended" if status == "running" else ""
        return SeenRun(folder, said=(f"Run {shown} is not running (status: {value_text(status)}){dead}",))
    group = group_of(folder, _lock_holders(folder))
    if group is None:
        unseen = "by a process that cannot be seen from here (another user, container or machine)"
        return SeenRun(folder, None, running=True, said=(f"Run {shown} is being written, {unseen}",))
    return SeenRun(folder, group, running=True, said=(f"Run {shown}: {_processes(group)}",))


def _processes(group: Group) -> str:
    pids = ", ".join(str(rank.pid) for rank in group.ranks)
    if group.ranks[0].rank is None:
        return f"one process, pid {pids}"
    world = group.ranks[0].environment.get("WORLD_SIZE")
    of = f" of {one_line(world)}" if world not in (None, str(len(group.ranks))) else ""
    return f"{len(group.ranks)}{of} rank{'' if len(group.ranks) == 1 and not of else 's'} on this machine, pid {pids}"
