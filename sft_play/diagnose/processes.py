"""Which processes of this machine train a run, and what they hold of its memory.

A manifest that says `running` proves nothing: a killed run leaves it so. What counts is the lock on `run.lock`, which
the kernel releases when its holder ends. Its processes are the ranks whose environment names the folder
(`SFT_PLAY_RUN`), else the lock's holder with the ranks that its launcher started. Only processes of this user can be
read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import lock_holder_pid, lock_holder_pids
from sft_play.runs.lookup import iter_runs, resolve_run
from sft_play.tables import value_or_na

_KEPT_VARIABLES = (RUN_VARIABLE, "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


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
class RankGroup:
    """The processes of one run on this machine that train."""

    ranks: tuple[RankProcess, ...]
    start_time: float

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process of the run."""
        return tuple(rank.pid for rank in self.ranks)

    @property
    def rss_bytes(self) -> int:
        """Resident memory of all of them; pages that they share count for each."""
        return sum(rank.rss_bytes for rank in self.ranks)


@dataclass(frozen=True)
class _UserProcess:
    pid: int
    parent_pid: int
    environment: Mapping[str, str]
    start_time: float
    psutil_process: psutil.Process


def find_rank_group(folder: RunFolder, holder_pids: tuple[int, ...]) -> RankGroup | None:
    """Find the processes that train a run, given the pids that hold its lock; None if they cannot be seen from here."""
    processes = {item.pid: item for item in _user_processes()}
    run_path = folder.path.resolve()
    ranks = {pid: item for pid, item in processes.items() if "RANK" in item.environment}
    # what a rank started has its environment: only the topmost one counts
    top_ranks = [item for item in ranks.values() if item.parent_pid not in ranks]
    named_ranks = [item for item in top_ranks if _names_run(item, run_path)]
    writer = next((processes[pid] for pid in holder_pids if pid in processes), None)
    members = named_ranks
    if not named_ranks and writer is not None:
        members = (
            [item for item in top_ranks if item.parent_pid == writer.parent_pid] if writer.pid in ranks else [writer]
        )
    if not members:
        return None
    run_ranks = tuple(sorted(map(_rank_process, members), key=lambda rank: rank.rank or 0))
    return RankGroup(run_ranks, start_time=min(item.start_time for item in members))


def _names_run(process: _UserProcess, run_path: Path) -> bool:
    run_variable = process.environment.get(RUN_VARIABLE)
    return run_variable is not None and Path(run_variable).resolve() == run_path


def _user_processes() -> Iterator[_UserProcess]:
    user_id = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != user_id or process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            environment = process.environ()
            variables = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
            yield _UserProcess(process.pid, process.ppid(), variables, process.create_time(), process)


def _rank_process(process: _UserProcess) -> RankProcess:
    process_tree = [process.psutil_process]
    with contextlib.suppress(psutil.Error):
        process_tree += process.psutil_process.children(recursive=True)
    return RankProcess(
        pid=process.pid,
        rank=_parse_number(process.environment.get("RANK")),
        local_rank=_parse_number(process.environment.get("LOCAL_RANK")),
        rss_bytes=sum(map(_resident_bytes, process_tree)),
        environment=process.environment,
    )


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _resident_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


@dataclass(frozen=True)
class RunProcesses:
    """The run that is shown: its folder and processes, as far as there are any, and lines about it (`notes`)."""

    folder: RunFolder | None = None
    group: RankGroup | None = None
    is_running: bool = False
    notes: tuple[str, ...] = ()


def find_run_processes(output_root: Path, *, name: str | None = None) -> RunProcesses:
    """The run that is named; else the newest that is being written in `output_root`. Raises RunFolderError where a name
    was given, and it is not a run of this toolkit."""
    if name is not None:
        return _inspect_run(resolve_run(output_root, name))
    folders: list[RunFolder] = []
    with contextlib.suppress(OSError):  # the folder is missing, or on a network disk that does not answer
        folders += [folder for folder in iter_runs(output_root) if lock_holder_pid(folder) is not None]
    if not folders:
        return RunProcesses(notes=(f"No run is in progress in {one_line(str(output_root))}",))
    newest, *others = sorted(folders, key=_start_order, reverse=True)
    run_processes = _inspect_run(newest)
    other_paths = ", ".join(one_line(str(folder.path)) for folder in others)
    return replace(
        run_processes,
        notes=(*run_processes.notes, *([f"also running: {other_paths} (RUN= chooses)"] if others else [])),
    )


def read_manifest_or_empty(folder: RunFolder) -> dict[str, Any]:
    """The manifest; empty where it cannot be read, as while it is replaced on a network disk."""
    try:
        return folder.read_manifest()
    except RunFolderError:
        return {}


def _start_order(folder: RunFolder) -> tuple[str, str]:
    manifest = read_manifest_or_empty(folder)
    resumed = manifest.get("resumed") or [manifest.get("started")]
    return str(resumed[-1]), str(folder.path)


def _inspect_run(folder: RunFolder) -> RunProcesses:
    shown_path = one_line(str(folder.path))
    if lock_holder_pid(folder) is None:
        # a process that is killed cannot write its end into the manifest
        status = read_manifest_or_empty(folder).get("status")
        ended_note = "; its manifest says running, and nothing writes it: it was ended" if status == "running" else ""
        return RunProcesses(
            folder, notes=(f"Run {shown_path} is not running (status: {value_or_na(status)}){ended_note}",)
        )
    group = find_rank_group(folder, lock_holder_pids(folder))
    if group is None:
        unseen_text = "by a process that cannot be seen from here (another user, container or machine)"
        return RunProcesses(folder, None, is_running=True, notes=(f"Run {shown_path} is being written, {unseen_text}",))
    return RunProcesses(folder, group, is_running=True, notes=(f"Run {shown_path}: {_describe_processes(group)}",))


def _describe_processes(group: RankGroup) -> str:
    pids = ", ".join(str(rank.pid) for rank in group.ranks)
    if group.ranks[0].rank is None:
        return f"one process, pid {pids}"
    world_size = group.ranks[0].environment.get("WORLD_SIZE")
    world_text = f" of {one_line(world_size)}" if world_size not in (None, str(len(group.ranks))) else ""
    plural = "" if len(group.ranks) == 1 and not world_text else "s"
    return f"{len(group.ranks)}{world_text} rank{plural} on this machine, pid {pids}"
