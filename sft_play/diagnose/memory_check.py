"""`make memory-check`: the processes of a run, what its ranks hold of each GPU, what others hold, and what its plan
predicted; as JSON, and as a page.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sft_play.diagnose.gpu_info import read_all_gpus
from sft_play.log import escape_control, one_line
from sft_play.machine.gpu import GpuProcess
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import iter_runs, lock_holder_pid, lock_holder_pids, resolve_run
from sft_play.text import build_table, format_size, gib_or_na, render_lines, value_or_na

# --------------------------------------------------------------------------------------------------
# Which processes of this machine train a run, and what they hold of its memory.
#
# A manifest that says `running` proves nothing: a killed run leaves it so. What counts is the lock
# on `run.lock`, which the kernel releases when its holder ends. Its processes are the ranks whose
# environment names the folder (`SFT_PLAY_RUN`), else the lock's holder with the ranks that its
# launcher started. Only processes of this user can be read.


@dataclass(frozen=True)
class RankProcess:
    """A process that trains; `rss_bytes` is its resident memory. `world_size` is None where it is the only one."""

    rank: int
    pid: int
    rss_bytes: int
    world_size: str | None = None


def find_ranks(folder: RunFolder, holder_pids: tuple[int, ...]) -> tuple[RankProcess, ...]:
    """Find the processes that train a run, given the pids that hold its lock; none if they cannot be seen from here."""
    # None is what cannot be read, as of a process that has ended
    processes = {
        process.pid: process.info
        for process in psutil.process_iter(["pid", "ppid", "uids", "environ", "memory_info"])
        if process.pid != os.getpid() and None not in process.info.values() and process.info["uids"].real == os.getuid()
    }
    rank_pids = {pid for pid, info in processes.items() if "RANK" in info["environ"]}
    # what a rank started has its environment: only the topmost one counts
    top_ranks = [processes[pid] for pid in rank_pids if processes[pid]["ppid"] not in rank_pids]
    run_path = folder.path.resolve()
    members = [info for info in top_ranks if Path(info["environ"].get(RUN_VARIABLE, os.devnull)).resolve() == run_path]
    writer = next((processes[pid] for pid in holder_pids if pid in processes), None)
    if not members and writer is not None:
        members = [writer]
        if writer["pid"] in rank_pids:  # a person started the ranks, by a launcher that names no folder
            members = [info for info in top_ranks if info["ppid"] == writer["ppid"]]
    ranks = []
    for info in members:
        rank, world_size = info["environ"].get("RANK", "0"), info["environ"].get("WORLD_SIZE")
        ranks.append(RankProcess(int(rank), info["pid"], info["memory_info"].rss, world_size))
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def find_run(output_root: Path, *, name: str | None = None) -> tuple[RunFolder | None, tuple[str, ...]]:
    """The run that is named; else the newest that is being written in `output_root`, and a line where there are none,
    or others. Raises RunFolderError where a name was given, and it is not a run of this toolkit."""
    if name is not None:
        return resolve_run(output_root, name), ()
    runs: list[tuple[str, RunFolder]] = []
    with contextlib.suppress(OSError):  # the folder is missing, or on a network disk that does not answer
        for folder in iter_runs(output_root):
            if lock_holder_pid(folder) is not None:
                manifest = read_json(folder.manifest_path)
                resumed = manifest.get("resumed") or [manifest.get("started")]
                runs.append((str(resumed[-1]), folder))
    if not runs:
        return None, (f"No run is in progress in {one_line(str(output_root))}",)
    (_, newest), *others = sorted(runs, key=lambda run: run[0], reverse=True)
    other_paths = ", ".join(one_line(str(folder.path)) for _, folder in others)
    return newest, (f"also running: {other_paths} (RUN= chooses)",) * bool(others)


def _describe_run(folder: RunFolder, ranks: tuple[RankProcess, ...], status: object, *, is_running: bool) -> str:
    path, pids = one_line(str(folder.path)), ", ".join(str(rank.pid) for rank in ranks)
    if not is_running and status == "running":  # a process that is killed cannot write its end into the manifest
        return f"Run {path} is not running (its manifest says running, and nothing writes it: it was ended)"
    if not is_running:
        return f"Run {path} is not running (status: {value_or_na(status)})"
    if not ranks:
        unseen = "a process that cannot be seen from here (another user, container or machine)"
        return f"Run {path} is being written, by {unseen}"
    return f"Run {path}: {len(ranks)} of {one_line(ranks[0].world_size or '1')} ranks on this machine, pid {pids}"


# --------------------------------------------------------------------------------------------------
# What the ranks hold of each GPU, what others hold, and what the plan predicted.


# A plan's peak of one rank, in bytes; `terms` add up to `allocated`. On a CPU `reserved` is what a rank is predicted to
# hold beyond what it holds after its imports, which is `outside_allocator`.
_PREDICTED_SIZES = ("terms", "allocated", "reserved", "margin", "outside_allocator", "required")


@dataclass(frozen=True)
class GpuMemoryUse:
    """Memory of one GPU now, in bytes. `run_bytes` and `others_bytes`, the rest of what is used: None where the driver
    does not say whose it is."""

    index: int
    name: str | None
    ranks: tuple[int, ...]
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    run_bytes: int | None
    others_bytes: int | None
    others: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class MemorySnapshot:
    """One look. `said` are lines about the run; `running` is False where nothing trains; `ram` has `total_bytes` and
    `free_bytes` of the host, as far as this process may use it."""

    time: str
    running: bool
    said: tuple[str, ...]
    folder: str | None
    status: str | None
    gpus: tuple[GpuMemoryUse, ...]
    ranks: tuple[RankProcess, ...]
    prediction: Mapping[str, Any] | None
    ram: Mapping[str, int]
    warnings: tuple[str, ...]


def read_memory_snapshot(
    output_root: Path, environment: Mapping[str, str], *, name: str | None = None
) -> MemorySnapshot:
    """Memory of this machine and of the run on it, now: the run that is named, or the newest that is running. Raises
    RunFolderError where a name was given, and it is not a run of this toolkit."""
    (folder, notes), hardware = find_run(output_root, name=name), detect_hardware(environment)
    is_running = folder is not None and lock_holder_pid(folder) is not None
    ranks: tuple[RankProcess, ...] = ()
    prediction, status = None, None
    if folder is not None:
        status, plan = read_json(folder.manifest_path).get("status"), read_json(folder.path / "plan.json")
        with contextlib.suppress(LookupError, TypeError):
            sizes = {name: plan["peak_bytes"][name] for name in _PREDICTED_SIZES}
            prediction = {**sizes, "on_gpu": bool(plan["hardware"]["gpus"])}
        if is_running:
            ranks = find_ranks(folder, lock_holder_pids(folder))
        notes = (_describe_run(folder, ranks, status, is_running=is_running), *notes)
        if prediction is None:
            notes += ("its plan.json cannot be read, so there is no prediction to compare with",)
    gpus = tuple(_gpu_memory_uses(hardware, ranks))
    warnings: list[str] = []
    if prediction is not None and prediction["on_gpu"]:
        warnings = [text for use in gpus if (text := _others_warning(use, prediction))]
    return MemorySnapshot(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        running=is_running,
        said=notes,
        folder=str(folder.path) if folder else None,
        status=status,
        gpus=gpus,
        ranks=ranks,
        prediction=prediction,
        ram={"total_bytes": hardware.ram_bytes, "free_bytes": hardware.ram_free_bytes},
        warnings=tuple(warnings),
    )


def _gpu_memory_uses(hardware: Hardware, ranks: tuple[RankProcess, ...]) -> Iterator[GpuMemoryUse]:
    """Each GPU that is visible here or that the run uses, with whose its memory is."""
    rank_by_pid, visible = {rank.pid: rank.rank for rank in ranks}, {gpu.index for gpu in hardware.gpus}
    gpus = read_all_gpus(includes_topology=False).gpus
    # a rank holds memory of its GPU from its first steps on: where the driver lists none of them, it counts those
    # outside this container, or none at all
    is_listed = any(item.pid in rank_by_pid for gpu in gpus for item in gpu.all_processes)
    for gpu in gpus:
        run_processes = [item for item in gpu.all_processes if item.pid in rank_by_pid]
        if gpu.index not in visible and not run_processes:
            continue
        run_bytes = others_bytes = None
        others: tuple[GpuProcess, ...] = ()
        is_known = bool(run_processes) or not ranks or (is_listed and gpu.processes is not None)
        if is_known and all(item.used_bytes is not None for item in run_processes):
            run_bytes = sum(item.used_bytes or 0 for item in run_processes)
            others_bytes = None if gpu.used_bytes is None else max(0, gpu.used_bytes - run_bytes)
            others = tuple(item for item in gpu.all_processes if item.pid not in rank_by_pid)
        own_ranks = tuple(sorted(rank_by_pid[item.pid] for item in run_processes))
        yield GpuMemoryUse(
            gpu.index, gpu.name, own_ranks, gpu.total_bytes, gpu.used_bytes, gpu.free_bytes,
            run_bytes, others_bytes, others,
        )  # fmt: skip


def _others_warning(use: GpuMemoryUse, prediction: Mapping[str, Any]) -> str | None:
    """What others hold of a GPU of the run, if the predicted peak and its margin do not fit beside it."""
    # a tight plan without others is no news: `make plan` said so
    if not use.run_bytes or use.total_bytes is None or not use.others_bytes:
        return None
    # by the plan, not by what the run holds at the moment
    left_bytes = use.total_bytes - use.others_bytes - prediction["reserved"] - prediction["outside_allocator"]
    if left_bytes >= prediction["margin"]:
        return None
    holders = f"{gib_or_na(use.others_bytes, digits=2)} GiB are held by no process that is listed"
    if use.others:
        holders = "others hold " + ", ".join(
            f"pid {item.pid} ({value_or_na(item.name)}) {gib_or_na(item.used_bytes, digits=2)} GiB"
            for item in use.others
        )
    return (
        f"GPU {use.index}: {holders}: beside the predicted peak {gib_or_na(max(0, left_bytes), digits=2)} of the "
        f"plan's margin of {gib_or_na(prediction['margin'], digits=2)} GiB are left"
    )


# --------------------------------------------------------------------------------------------------
# The page: the run, a table with the prediction in it, RAM, warnings; once or renewed.

# Seconds between two looks.
REFRESH_S = 3.0


def format_memory_snapshot(snapshot: MemorySnapshot) -> list[str]:
    """What a person reads: the run, one table with the prediction in it, RAM, warnings."""
    lines, prediction = [*snapshot.said], snapshot.prediction
    predicted, shows_gpus = gib_or_na(None), bool(snapshot.gpus)
    if prediction is not None:
        predicted = gib_or_na(prediction["reserved"] + prediction["outside_allocator"], digits=2)
        shows_gpus = shows_gpus and (prediction["on_gpu"] or not snapshot.ranks)
    headers: tuple[str, ...] = ()
    if snapshot.ranks and not shows_gpus:
        headers = ("rank", "pid", "RSS\nGiB", "predicted\npeak")
        rows = [
            [str(rank.rank), str(rank.pid), gib_or_na(rank.rss_bytes, digits=2), predicted] for rank in snapshot.ranks
        ]
    elif shows_gpus:
        headers = ("GPU", "rank", "total", "this\nrun", "predicted\npeak", "others", "free")
        rows = []
        for use in snapshot.gpus:
            sizes = [gib_or_na(size, digits=2) for size in (use.run_bytes, use.others_bytes, use.free_bytes)]
            sizes.insert(1, predicted if use.ranks else "-")
            rows.append([str(use.index), ",".join(map(str, use.ranks)) or "-", gib_or_na(use.total_bytes), *sizes])
    if headers:
        lines += ["", *render_lines(build_table(headers, rows)), ""]
    if prediction is not None:
        terms = ", ".join(
            f"{name.replace('_', ' ')} {format_size(size)}" for name, size in prediction["terms"].items() if size > 0
        )
        sizes = {name: format_size(prediction[name]) for name in _PREDICTED_SIZES[1:]}
        lines.append(f"Predicted for each rank: {sizes['allocated']} allocated ({terms})")
        lines.append(
            f"{sizes['reserved']} reserved + {sizes['margin']} margin + {sizes['outside_allocator']} libraries = "
            f"{sizes['required']} needed"
        )
    # `n/a` in the table needs a reason: without one it looks like a run that holds nothing
    if snapshot.ranks and shows_gpus and any(use.run_bytes is None for use in snapshot.gpus):
        lines.append("n/a: the driver names no process of this run there, as in a container, or before it uses the GPU")
    lines.append(f"RAM: {gib_or_na(snapshot.ram['total_bytes'])} GiB, {gib_or_na(snapshot.ram['free_bytes'])} free")
    lines += [f"warning: {text}" for text in snapshot.warnings]
    return [escape_control(line) for line in lines]


def watch_memory(
    read_snapshot: Callable[[], MemorySnapshot],
    *,
    show_snapshot: Callable[[MemorySnapshot], None],
    pause: Callable[[float], None] = time.sleep,
) -> MemorySnapshot | None:
    """Take snapshots until Ctrl-C, and show each; returns the last one."""
    last_snapshot: MemorySnapshot | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            last_snapshot = read_snapshot()
            show_snapshot(last_snapshot)
            pause(REFRESH_S)
    return last_snapshot
