"""`make memory-check`: the processes of a run, what its ranks hold of each GPU, what others hold, and what its plan
predicted; as JSON, and as a page.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from sft_play.diagnose.gpu_info import read_all_gpus
from sft_play.errors import RunFolderError
from sft_play.log import escape_control, one_line
from sft_play.machine.gpu import GpuProcess
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.files import read_summary
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
    """A process that trains; `rss_bytes` is resident memory, with that of what it started, such as data loaders; pages
    that processes share count for each. `rank` is None where it is the only one."""

    pid: int
    rank: int | None
    rss_bytes: int
    world_size: str | None = None


def find_ranks(folder: RunFolder, holder_pids: tuple[int, ...]) -> tuple[RankProcess, ...]:
    """Find the processes that train a run, given the pids that hold its lock; none if they cannot be seen from here."""
    processes = _user_processes()
    rank_pids = {pid for pid, process in processes.items() if "RANK" in process.info["environ"]}
    # what a rank started has its environment: only the topmost one counts
    top_ranks = [processes[pid] for pid in rank_pids if processes[pid].info["ppid"] not in rank_pids]
    run_path = folder.path.resolve()
    members = [process for process in top_ranks if _named_run(process) == run_path]
    writer = next((processes[pid] for pid in holder_pids if pid in processes), None)
    if not members and writer is not None:
        members = [writer]
        if writer.pid in rank_pids:  # a person started the ranks, by a launcher that names no folder
            members = [process for process in top_ranks if process.info["ppid"] == writer.info["ppid"]]
    return tuple(sorted(map(_rank_process, members), key=lambda rank: rank.rank or 0))


def _user_processes() -> dict[int, psutil.Process]:
    """The other processes of this user by their pids, with what could be read of each in `info`."""
    fields = ["ppid", "uids", "environ"]  # None where it cannot be read, as of a process that has ended
    return {
        process.pid: process
        for process in psutil.process_iter(fields)
        if process.pid != os.getpid() and None not in process.info.values() and process.info["uids"].real == os.getuid()
    }


def _named_run(process: psutil.Process) -> Path | None:
    name = process.info["environ"].get(RUN_VARIABLE)
    return None if name is None else Path(name).resolve()


def _rank_process(process: psutil.Process) -> RankProcess:
    environment, rss_bytes = process.info["environ"], 0
    with contextlib.suppress(psutil.Error):
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # a worker may end meanwhile
                rss_bytes += member.memory_info().rss
    rank = environment.get("RANK", "")
    return RankProcess(process.pid, int(rank) if rank.isdecimal() else None, rss_bytes, environment.get("WORLD_SIZE"))


def find_run(output_root: Path, *, name: str | None = None) -> tuple[RunFolder | None, tuple[str, ...]]:
    """The run that is named; else the newest that is being written in `output_root`, and a line where there are none,
    or others. Raises RunFolderError where a name was given, and it is not a run of this toolkit."""
    if name is not None:
        return resolve_run(output_root, name), ()
    folders: list[RunFolder] = []
    with contextlib.suppress(OSError):  # the folder is missing, or on a network disk that does not answer
        folders += [folder for folder in iter_runs(output_root) if lock_holder_pid(folder) is not None]
    if not folders:
        return None, (f"No run is in progress in {one_line(str(output_root))}",)
    newest, *others = sorted(folders, key=_start_order, reverse=True)
    other_paths = ", ".join(one_line(str(folder.path)) for folder in others)
    return newest, ((f"also running: {other_paths} (RUN= chooses)",) if others else ())


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


def _describe_run(folder: RunFolder, ranks: tuple[RankProcess, ...], status: object, *, is_running: bool) -> str:
    path, pids, count = one_line(str(folder.path)), ", ".join(str(rank.pid) for rank in ranks), str(len(ranks))
    if not is_running:
        # a process that is killed cannot write its end into the manifest
        ended = "; its manifest says running, and nothing writes it: it was ended" if status == "running" else ""
        return f"Run {path} is not running (status: {value_or_na(status)}){ended}"
    if not ranks:
        unseen = "a process that cannot be seen from here (another user, container or machine)"
        return f"Run {path} is being written, by {unseen}"
    if ranks[0].rank is None:
        return f"Run {path}: one process, pid {pids}"
    world_size = ranks[0].world_size or count
    world_text = "" if world_size == count else f" of {one_line(world_size)}"
    return f"Run {path}: {count}{world_text} rank{'s' * (world_size != '1')} on this machine, pid {pids}"


# --------------------------------------------------------------------------------------------------
# What the ranks hold of each GPU, what others hold, and what the plan predicted.

# Processes of others that a warning names.
MAX_NAMED_PROCESSES = 3
# The most bytes that were seen of a run while it was watched, by the GPU with the pids of its ranks, and by pid.
Peaks = dict[object, int]


@dataclass(frozen=True)
class MemoryPrediction:
    """A plan's peak of one rank, in bytes; `terms` add up to `allocated`. On a CPU `reserved` is what a rank is
    predicted to hold beyond what it holds after its imports. `moment`: that of the run that `reserved` is of."""

    terms: Mapping[str, int]
    allocated: int
    reserved: int
    margin: int
    outside_allocator: int
    required: int
    on_gpu: bool
    layout: str
    ranks: int
    micro_batch: int
    grad_accum: int
    moment: str = "training"


@dataclass(frozen=True)
class GpuMemoryUse:
    """Memory of one GPU now, in bytes. `run_bytes` and `others_bytes`, the rest of what is used: None where the driver
    does not say whose it is. `peak_bytes` is the most that this run was seen to hold."""

    index: int
    name: str | None
    ranks: tuple[int, ...]
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    run_bytes: int | None
    others_bytes: int | None
    peak_bytes: int | None
    others: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class RankMemoryUse:
    """Resident memory of one rank, with what it started, in the host's RAM, in bytes; the most that was seen."""

    rank: int
    pid: int
    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class RamUse:
    """The host's RAM in bytes, as far as this process may use it; `run_bytes` is what the run holds of it."""

    total_bytes: int
    free_bytes: int
    run_bytes: int


@dataclass(frozen=True)
class MemorySnapshot:
    """One look. `said` are lines about the run; `running` is False where nothing trains."""

    time: str
    running: bool
    said: tuple[str, ...]
    folder: str | None
    status: str | None
    gpus: tuple[GpuMemoryUse, ...]
    ranks: tuple[RankMemoryUse, ...]
    prediction: MemoryPrediction | None
    ram: RamUse
    warnings: tuple[str, ...]
    # Of a run that has ended the peak of each moment, in bytes of one rank, as it measured them
    # itself.
    measured: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """One JSON object, bytes as integers."""
        return asdict(self)


def read_memory_prediction(folder: RunFolder) -> MemoryPrediction | None:
    """Read what the plan of a run predicted for one rank; None if its `plan.json` cannot be read."""
    try:
        plan = json.loads((folder.path / "plan.json").read_text(encoding="utf-8"))
        peak = plan["peak_bytes"]
        size_names = ("terms", "allocated", "reserved", "margin", "outside_allocator", "required")
        reserved = {name: size for name, (_, size) in peak.get("by_moment", {}).items() if name != "loading"}
        return MemoryPrediction(
            moment=max(reserved, key=lambda name: reserved[name], default="training"),
            **{name: peak[name] for name in size_names},
            on_gpu=bool(plan["hardware"]["gpus"]),
            **{name: plan[name] for name in ("layout", "ranks", "micro_batch", "grad_accum")},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def read_measured_peaks(folder: RunFolder) -> dict[str, int]:
    """Read what a run has measured of each of its moments, from its summary; on a CPU above what its imports took."""
    moments = read_summary(folder.path).get("peak_bytes_by_moment") or {}
    size_names = ("measured_reserved", "measured_allocated", "measured_rss")
    return {
        moment: size
        for moment, peak in moments.items()
        if isinstance(peak, dict) and (size := next((peak[name] for name in size_names if peak.get(name)), None))
    }


def read_memory_snapshot(
    output_root: Path, environment: Mapping[str, str], *, name: str | None = None, peaks: Peaks | None = None
) -> MemorySnapshot:
    """Memory of this machine and of the run on it, now: the run that is named, or the newest that is running. `peaks`,
    seen before, is updated. Raises RunFolderError where a name was given, and it is not a run of this toolkit."""
    peaks = {} if peaks is None else peaks
    (folder, notes), hardware = find_run(output_root, name=name), detect_hardware(environment)
    is_running = folder is not None and lock_holder_pid(folder) is not None
    processes: tuple[RankProcess, ...] = ()
    prediction, status, measured = None, None, {}
    if folder is not None:
        prediction, status = read_memory_prediction(folder), read_manifest_or_empty(folder).get("status")
        if is_running:
            processes = find_ranks(folder, lock_holder_pids(folder))
        else:
            measured = read_measured_peaks(folder)
        notes = (_describe_run(folder, processes, status, is_running=is_running), *notes)
        if prediction is None:
            notes += ("its plan.json cannot be read, so there is no prediction to compare with",)
    ranks = tuple(
        RankMemoryUse(
            position if rank.rank is None else rank.rank,
            rank.pid,
            rank.rss_bytes,
            _raise_peak(peaks, rank.pid, rank.rss_bytes),
        )
        for position, rank in enumerate(processes)
    )
    gpus = tuple(_gpu_memory_uses(hardware, ranks, peaks))
    ram = RamUse(hardware.ram_bytes, hardware.ram_free_bytes, sum(rank.rss_bytes for rank in ranks))
    warnings: tuple[str, ...] = ()
    if prediction is not None and ranks:
        warnings = tuple(memory_warnings(gpus, ram, prediction, len(ranks)))
    return MemorySnapshot(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        running=is_running,
        said=notes,
        folder=str(folder.path) if folder else None,
        status=status,
        gpus=gpus,
        ranks=ranks,
        prediction=prediction,
        ram=ram,
        warnings=warnings,
        measured=measured,
    )


def _raise_peak(peaks: Peaks, key: object, size: int) -> int:
    peaks[key] = max(peaks.get(key, 0), size)
    return peaks[key]


def _gpu_memory_uses(hardware: Hardware, ranks: tuple[RankMemoryUse, ...], peaks: Peaks) -> Iterator[GpuMemoryUse]:
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
        run_bytes = others_bytes = peak_bytes = None
        others: tuple[GpuProcess, ...] = ()
        is_known = bool(run_processes) or not ranks or (is_listed and gpu.processes is not None)
        if is_known and all(item.used_bytes is not None for item in run_processes):
            run_bytes = sum(item.used_bytes or 0 for item in run_processes)
            others_bytes = None if gpu.used_bytes is None else max(0, gpu.used_bytes - run_bytes)
            others = tuple(item for item in gpu.all_processes if item.pid not in rank_by_pid)
            peak_bytes = _raise_peak(peaks, (gpu.index, *rank_by_pid), run_bytes)
        own_ranks = tuple(sorted(rank_by_pid[item.pid] for item in run_processes))
        yield GpuMemoryUse(
            gpu.index, gpu.name, own_ranks, gpu.total_bytes, gpu.used_bytes, gpu.free_bytes,
            run_bytes, others_bytes, peak_bytes, others,
        )  # fmt: skip


def memory_warnings(
    gpus: tuple[GpuMemoryUse, ...], ram: RamUse, prediction: MemoryPrediction, rank_count: int
) -> Iterator[str]:
    """Warn of what others hold of what the plan counts on: the predicted peak and its margin have to fit beside it."""
    if prediction.on_gpu:
        for use in gpus:
            if use.run_bytes:
                yield from _gpu_warnings(use, prediction)
    elif ram.free_bytes < (margin := prediction.margin * rank_count):
        margin_text = f"less than the plan's margin of {gib_or_na(margin, digits=2)}"
        yield f"RAM: {gib_or_na(ram.free_bytes, digits=2)} GiB are free, {margin_text}"


def _gpu_warnings(use: GpuMemoryUse, prediction: MemoryPrediction) -> Iterator[str]:
    if use.total_bytes is None or not use.others_bytes:  # a tight plan without others is no news: `make plan` said so
        return
    # by the plan, not by what the run holds at the moment
    left_bytes = use.total_bytes - use.others_bytes - prediction.reserved - prediction.outside_allocator
    if left_bytes >= prediction.margin:
        return
    holders = f"{gib_or_na(use.others_bytes, digits=2)} GiB are held by no process that is listed"
    if use.others:
        largest = sorted(use.others, key=lambda item: -(item.used_bytes or 0))[:MAX_NAMED_PROCESSES]
        holders = "others hold " + ", ".join(
            f"pid {item.pid} ({value_or_na(item.name)}) {gib_or_na(item.used_bytes, digits=2)} GiB" for item in largest
        )
    text = f"the plan's margin of {gib_or_na(prediction.margin, digits=2)} GiB"
    if left_bytes > 0:
        text = f"{gib_or_na(left_bytes, digits=2)} of {text} are left"
    else:
        text = f"{text} is gone, and {gib_or_na(-left_bytes, digits=2)} more"
    yield f"GPU {use.index}: {holders}: beside the predicted peak {text}"


# --------------------------------------------------------------------------------------------------
# The page: the run, a table with the prediction beside it, RAM, warnings; once or renewed.

# Seconds between two looks.
REFRESH_S = 3.0


def format_memory_snapshot(snapshot: MemorySnapshot) -> list[str]:
    """What a person reads: the run, one table with the prediction beside it, RAM, warnings."""
    lines, tables, prediction = [*snapshot.said], [], snapshot.prediction
    shows_ranks = bool(snapshot.ranks) and not (snapshot.gpus and (prediction is None or prediction.on_gpu))
    if shows_ranks:
        tables.append(_rank_table(snapshot))
    elif snapshot.gpus:
        tables.append(_gpu_table(snapshot))
    if prediction is not None:
        tables.append(_prediction_table(prediction))
    if snapshot.measured:
        sizes = [[moment, format_size(size)] for moment, size in snapshot.measured.items()]
        tables.append(build_table(("measured\nper rank", ""), sizes, text_columns=(0,)))
    if tables:
        grid = Table.grid(padding=(0, 4))
        grid.add_row(*tables)
        lines += ["", *render_lines(grid), ""]
    if prediction is not None:
        batch = f"micro-batch {prediction.micro_batch} x accum {prediction.grad_accum}"
        layout = f"{one_line(prediction.layout)} over {prediction.ranks} rank(s)"
        lines.append(f"Plan: {layout}, {batch}; sizes in units of 2**30 bytes")
        if not prediction.on_gpu:
            lines.append("RSS has the libraries too: what is predicted of it is resident and libraries together")
    # `n/a` in the table needs a reason: without one it looks like a run that holds nothing
    if not shows_ranks and snapshot.ranks and any(use.run_bytes is None for use in snapshot.gpus):
        lines.append("n/a: the driver names no process of this run there, as in a container, or before it uses the GPU")
    ram = snapshot.ram
    ram_line = f"RAM: {gib_or_na(ram.total_bytes)} GiB, {gib_or_na(ram.free_bytes)} free"
    if snapshot.ranks:
        ram_line += f"; this run holds {gib_or_na(ram.run_bytes, digits=2)}"
    lines.append(ram_line + ("" if snapshot.gpus else "; no GPU here"))
    lines += [f"warning: {text}" for text in snapshot.warnings]
    return [escape_control(line) for line in lines]


def _gpu_table(snapshot: MemorySnapshot) -> Table:
    rows = []
    for use in snapshot.gpus:
        sizes = (use.run_bytes, use.others_bytes, use.free_bytes, use.peak_bytes)
        ranks = ",".join(map(str, use.ranks)) or "-"
        rows.append([str(use.index), ranks, gib_or_na(use.total_bytes), *(gib_or_na(size, digits=2) for size in sizes)])
    return build_table(("GPU", "rank", "total", "this\nrun", "others", "free", "peak\nseen"), rows)


def _rank_table(snapshot: MemorySnapshot) -> Table:
    rows = [
        [str(use.rank), str(use.pid), gib_or_na(use.rss_bytes, digits=2), gib_or_na(use.peak_rss_bytes, digits=2)]
        for use in snapshot.ranks
    ]
    return build_table(("rank", "pid", "RSS\nGiB", "peak\nseen"), rows)


def _prediction_table(prediction: MemoryPrediction) -> Table:
    total_word, outside_words = ("reserved", "context, NCCL") if prediction.on_gpu else ("resident", "libraries")
    sizes = {name.replace("_", " "): size for name, size in prediction.terms.items()} | {
        "= allocated": prediction.allocated,
        f"= {total_word} in {prediction.moment}": prediction.reserved,
        "+ margin": prediction.margin,
        f"+ {outside_words}": prediction.outside_allocator,
        "= needed": prediction.required,
    }
    rows = [[name, format_size(size)] for name, size in sizes.items() if size > 0]
    return build_table(("predicted\nper rank", ""), rows, text_columns=(0,))


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
