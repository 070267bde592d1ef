"""The run that this machine trains: the one that is named, else the newest that is being written, else any process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.diagnose.processes import Group, group_of, groups, lock_holder
from sft_play.diagnose.text import known
from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import run_named, runs_in


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
    alive = [run for folder in folders if (run := _seen(folder, here)).running]
    alive.sort(key=_started, reverse=True)
    if alive:
        others = [one_line(str(run.folder.path)) for run in alive[1:] if run.folder]
        also = (f"also running: {', '.join(others)} (RUN= chooses)",) if others else ()
        return replace(alive[0], said=(*alive[0].said, *also))
    nothing = f"No run is in progress in {one_line(str(output))}"
    if not here:
        return SeenRun(said=(f"{nothing}, and this user trains nothing on this machine",))
    group = next((item for item in here if item.folder is not None), here[0])
    if group.folder is not None:
        words = f"{nothing}; this one is: {one_line(str(group.folder))}: {_processes(group)}"
        return SeenRun(RunFolder(group.folder), group, running=True, said=(words,))
    words = f"{nothing}; a training has no run folder yet, or has it on another node: {_processes(group)}"
    return SeenRun(None, group, running=True, said=(words,))


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
    group = next((group for group in here if group.folder is not None and _same(group.folder, folder.path)), None)
    holder = lock_holder(folder) if group is None else None
    if holder:
        group = group_of(holder)
    shown = one_line(str(folder.path))
    if group is not None:
        return SeenRun(folder, group, running=True, said=(f"Run {shown}: {_processes(group)}",))
    if holder is not None:
        return SeenRun(folder, None, running=True, said=(
            f"Run {shown} is being written, by a process that cannot be seen from here (another user, container or "
            "machine)",))  # fmt: skip
    # a process that is killed cannot write its end into the manifest
    status = manifest_of(folder).get("status")
    dead = "; its manifest says running, and nothing writes it: it was ended" if status == "running" else ""
    return SeenRun(folder, None, running=False, said=(f"Run {shown} is not running (status: {known(status)}){dead}",))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.absolute() == other.absolute()


def _processes(group: Group) -> str:
    pids = ", ".join(str(rank.pid) for rank in group.ranks)
    if group.ranks[0].rank is None:
        return f"one process, pid {pids}"
    world = group.ranks[0].environment.get("WORLD_SIZE")
    of = f" of {one_line(world)}" if world not in (None, str(len(group.ranks))) else ""
    return f"{len(group.ranks)}{of} rank{'' if len(group.ranks) == 1 and not of else 's'} on this machine, pid {pids}"
