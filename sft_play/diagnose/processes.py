"""Which processes of this machine train, in which run folder, and what they hold of its memory.

A manifest that says `running` proves nothing: a killed run leaves it so. What counts is the lock on `run.lock`, which
the kernel releases when its holder ends, and living processes: ranks whose environment names the folder
(`SFT_PLAY_RUN`), children of one launcher, or a single `sft_play train` that has the folder's log open. Only processes
of this user can be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil

from sft_play.diagnose.pages import value_text
from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import LOCK, WRITER
from sft_play.runs.lookup import run_named, runs_in

_TRAINING = ("train", "resume", "train-distributed", "train-deepspeed", "rank")
_SCRIPTS = {f"{name.replace('-', '_')}.py": name for name in (*_TRAINING, "launch-command", "verify-layouts", "plan")}
"""The scripts that make and launchers run: `scripts/train_distributed.py` is `sft-play train-distributed`."""
_LAUNCHERS = {
    "sft_play.training.ranks.elastic_agent",
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate", "accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
    *("deepspeed", "deepspeed.launcher.launch", "deepspeed.launcher.runner"),
}
_KEPT = (RUN_VARIABLE, "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
LOG_NAME = RunFolder(Path()).log_path.name


@dataclass(frozen=True)
class RankProcess:
    """A process that trains; `workers` are the processes that it started, such as the data loader's.

    `rank` is None where it is the only one, `peak_rss_bytes` where the system does not keep it.
    """

    pid: int
    rank: int | None
    local_rank: int | None
    rss_bytes: int
    peak_rss_bytes: int | None
    workers: tuple[int, ...] = ()
    workers_rss_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def pids(self) -> tuple[int, ...]:
        """Its process and those it started."""
        return (self.pid, *self.workers)


@dataclass(frozen=True)
class Group:
    """The processes of one run on this machine. `folder` is None while there is none yet, or where it is on another
    node. `beside` are the command and the launcher, which are not ranks."""

    ranks: tuple[RankProcess, ...]
    folder: Path | None
    started: float
    beside: tuple[int, ...] = ()
    beside_bytes: int = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process of the run."""
        return (*(pid for rank in self.ranks for pid in rank.pids), *self.beside)

    @property
    def rss_bytes(self) -> int:
        """Resident memory of all of them; pages that they share count for each."""
        return sum(rank.rss_bytes + rank.workers_rss_bytes for rank in self.ranks) + self.beside_bytes


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    words: tuple[str, ...]
    environment: Mapping[str, str]
    created: float
    own: psutil.Process

    @property
    def is_rank(self) -> bool:
        """Whether a launcher gave it a place among several."""
        return "RANK" in self.environment


def groups() -> list[Group]:
    """The runs that this user's processes train on this machine, the newest first."""
    table = {item.pid: item for item in _own_processes()}

    def is_worker(process: _Process) -> bool:  # it has the command line of the training process that started it
        above = [table[pid] for pid in _above(process, table)]
        return any(_trains(item) and (item.is_rank or not process.is_rank) for item in above)

    # forked data loader workers have the command line of the process that started them: only the topmost one counts
    tops = [item for item in table.values() if _trains(item) and not is_worker(item)]
    ranks, others = [item for item in tops if item.is_rank], [item for item in tops if not item.is_rank]
    launchers = {pid for item in ranks for pid in _above(item, table)}
    only_launch = ("train-distributed", "train-deepspeed")  # commands that train nothing themselves
    singles = [[item] for item in others if item.pid not in launchers and command_of(item.words) not in only_launch]
    families = [[item for item in ranks if item.parent == parent] for parent in {item.parent for item in ranks}]
    runs = [_group(family, table) for family in [*families, *singles]]
    return sorted(runs, key=lambda group: group.started, reverse=True)


def group_of(pid: int) -> Group | None:
    """The processes of the run that a process belongs to, whatever its command line says; None where it is gone."""
    group = next((group for group in groups() if pid in group.pids), None)
    if group is not None:
        return group
    # in no group, since its command line is not one of ours: a script that calls the Python interface
    table = {item.pid: item for item in _own_processes()}
    return _group([table[pid]], table) if pid in table else None


def _own_processes() -> Iterator[_Process]:
    """This user's living processes, without this one."""
    user = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != user or process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            environment, words = process.environ(), tuple(process.cmdline())
            kept = {name: environment[name] for name in _KEPT if name in environment}
            yield _Process(process.pid, process.ppid(), words, kept, process.create_time(), process)


def command_of(words: Sequence[str]) -> str | None:
    """The command of `sft_play` that a command line starts, such as `train`; None for any other program."""
    for index, word in enumerate(words):
        path = Path(word)
        if path.name in _SCRIPTS and path.parent.name == "scripts":
            return _SCRIPTS[path.name]
        is_module = word == "sft_play" and index > 0 and words[index - 1] in ("-m", "--module")
        if is_module or path.name == "sft-play" or word.endswith(f"sft_play{os.sep}__main__.py"):
            return next((after for after in words[index + 1 :] if not after.startswith("-")), None)
    return None


def _is_launcher(words: Sequence[str]) -> bool:
    """Whether a command line starts ranks for another program, whose words it holds."""
    return any(word in _LAUNCHERS or Path(word).name in _LAUNCHERS for word in words)


def _trains(process: _Process) -> bool:
    """Whether it is a rank, or a command that trains; `timeout` and the like, which wait for one, are not Python."""
    words = process.words
    is_python = bool(words) and Path(words[0]).name.lower().startswith("python")
    return is_python and command_of(words) in _TRAINING and (process.is_rank or not _is_launcher(words))


def _above(process: _Process, table: Mapping[int, _Process]) -> Iterator[int]:
    pid, seen = process.parent, {process.pid}
    while pid in table and pid not in seen:
        seen.add(pid)
        yield pid
        pid = table[pid].parent


def _group(family: Sequence[_Process], table: Mapping[int, _Process]) -> Group:
    """The run of some ranks that one launcher started, or of a single process."""
    parents = [table[pid] for pid in _above(family[0], table)] if family[0].is_rank else []
    launchers = [item for item in parents if command_of(item.words) in _TRAINING or _is_launcher(item.words)]
    return Group(
        ranks=tuple(sorted((_rank(item) for item in family), key=lambda rank: rank.rank or 0)),
        folder=_folder(family),
        started=min(item.created for item in family),
        beside=tuple(item.pid for item in launchers),
        beside_bytes=sum(_resident(item.own) for item in launchers),
    )


def _rank(process: _Process) -> RankProcess:
    workers: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        workers = process.own.children(recursive=True)
    return RankProcess(
        pid=process.pid,
        rank=_number(process.environment.get("RANK")),
        local_rank=_number(process.environment.get("LOCAL_RANK")),
        rss_bytes=_resident(process.own),
        peak_rss_bytes=peak_resident(process.pid),
        workers=tuple(item.pid for item in workers),
        workers_rss_bytes=sum(_resident(item) for item in workers),
        environment=process.environment,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def peak_resident(pid: int) -> int | None:
    """The most memory that a process ever had resident, in bytes (Linux's `VmHWM`); None on other systems."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _folder(family: Sequence[_Process]) -> Path | None:
    """The run folder: the one that the ranks' environment names, else the one whose log one of them has open."""
    for item in family:
        named = item.environment.get(RUN_VARIABLE)
        if named:
            return Path(named)
    for item in family:
        with contextlib.suppress(psutil.Error, OSError):
            for file in item.own.open_files():
                path = Path(file.path)
                if path.name == LOG_NAME and RunFolder(path.parent).manifest_path.is_file():
                    return path.parent
    return None


_LOCK_LINUX, _LOCK_BSD = "hhqqi4x", "qqihh"
"""`struct flock` of 64-bit Linux (type, whence, start, length, pid) and of macOS (start, length, pid, type, whence)."""


def lock_holder(folder: RunFolder) -> int | None:
    """The pid of the process that writes a run; 0 where it is of another machine or container, None where none writes.

    The rank that writes comes before the command that started it. The lock is only asked about, never taken: a run
    that starts at this moment must not find it held.
    """
    try:
        with (folder.path / LOCK).open("rb") as file:
            # the writer locks a byte of its own, the command that started it the file's first, a run alone all of it
            pid = next((pid for start, length in ((WRITER, 1), (0, 0)) if (pid := _locked_by(file, start, length))), 0)
    except (OSError, struct.error):
        return None
    if not pid:
        return None
    return pid if pid > 0 and psutil.pid_exists(pid) else 0


def _locked_by(file: IO[bytes], start: int, length: int) -> int:
    """The process that has these bytes locked (length 0: to the end); 0 where none has, -1 on another machine."""
    if sys.platform == "darwin":
        asked = struct.pack(_LOCK_BSD, start, length, 0, fcntl.F_WRLCK, os.SEEK_SET)
        _, _, pid, kind, _ = struct.unpack(_LOCK_BSD, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    else:
        asked = struct.pack(_LOCK_LINUX, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
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
    """The run that is named; else the newest that is being written in `output`; else whatever this user trains here.

    Raises:
        RunFolderError: a name was given, and it is not a run of this toolkit.
    """
    here = groups()
    if named is not None:
        return _seen(run_named(output, named), here)
    folders: list[RunFolder] = []
    with contextlib.suppress(OSError):  # the folder is missing, or on a network disk that does not answer
        folders += runs_in(output)
    alive = sorted((run for run in (_seen(folder, here) for folder in folders) if run.running), key=_started)[::-1]
    if alive:
        others = [one_line(str(run.folder.path)) for run in alive[1:] if run.folder]
        also = (f"also running: {', '.join(others)} (RUN= chooses)",) if others else ()
        return replace(alive[0], said=(*alive[0].said, *also))
    nothing = f"No run is in progress in {one_line(str(output))}"
    if not here:
        return SeenRun(said=(f"{nothing}, and this user trains nothing on this machine",))
    group = next((item for item in here if item.folder is not None), here[0])
    which = "a training has no run folder yet, or has it on another node"
    if group.folder is not None:
        which = f"this one is: {one_line(str(group.folder))}"
    said = (f"{nothing}; {which}: {_processes(group)}",)
    return SeenRun(RunFolder(group.folder) if group.folder else None, group, running=True, said=said)


def manifest_of(folder: RunFolder) -> dict[str, Any]:
    """The manifest; empty where it cannot be read, as while it is replaced on a network disk."""
    try:
        return folder.manifest()
    except RunFolderError:
        return {}


def _started(run: SeenRun) -> tuple[str, str]:
    manifest = manifest_of(run.folder) if run.folder else {}
    resumed = manifest.get("resumed") or [manifest.get("started")]
    return str(resumed[-1]), str(run.folder.path if run.folder else "")


def _seen(folder: RunFolder, here: list[Group]) -> SeenRun:
    """A folder with its processes: those that name it, else the holder of its lock."""
    place = folder.path.resolve()
    group = next((one for one in here if one.folder is not None and one.folder.resolve() == place), None)
    holder = lock_holder(folder) if group is None else None
    if holder:
        group = group_of(holder)
    shown = one_line(str(folder.path))
    if group is not None:
        return SeenRun(folder, group, running=True, said=(f"Run {shown}: {_processes(group)}",))
    if holder is not None:
        unseen = "by a process that cannot be seen from here (another user, container or machine)"
        return SeenRun(folder, None, running=True, said=(f"Run {shown} is being written, {unseen}",))
    # a process that is killed cannot write its end into the manifest
    status = manifest_of(folder).get("status")
    dead = "; its manifest says running, and nothing writes it: it was ended" if status == "running" else ""
    return SeenRun(folder, said=(f"Run {shown} is not running (status: {value_text(status)}){dead}",))


def _processes(group: Group) -> str:
    pids = ", ".join(str(rank.pid) for rank in group.ranks)
    if group.ranks[0].rank is None:
        return f"one process, pid {pids}"
    world = group.ranks[0].environment.get("WORLD_SIZE")
    of = f" of {one_line(world)}" if world not in (None, str(len(group.ranks))) else ""
    return f"{len(group.ranks)}{of} rank{'' if len(group.ranks) == 1 and not of else 's'} on this machine, pid {pids}"
