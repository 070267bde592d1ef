"""Memory during a run: its processes, what its ranks hold of each GPU, what others hold, and what
the plan predicted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sft_play.diagnose.this_machine import read_all_gpus
from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.machine.gpu import GpuProcess, GpuStatus
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.files import read_summary
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import iter_runs, lock_holder_pid, lock_holder_pids, resolve_run
from sft_play.text import gib_or_na, value_or_na

# Which processes of this machine train a run, and what they hold of its memory.
#
# A manifest that says `running` proves nothing: a killed run leaves it so. What counts is the lock
# on `run.lock`, which the kernel releases when its holder ends. Its processes are the ranks whose
# environment names the folder (`SFT_PLAY_RUN`), else the lock's holder with the ranks that its
# launcher started. Only processes of this user can be read.

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


# --------------------------------------------------------------------------------------------------
# What the ranks hold of each GPU, what others hold, and what the plan predicted.

# Processes of others that a warning names.
MAX_NAMED_PROCESSES = 3


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
    others: tuple[GpuProcess, ...] = ()


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
    warnings: tuple[str, ...] = ()
    measured: Mapping[str, int] = field(default_factory=dict)
    """Of a run that has ended the peak of each moment, in bytes of one rank, as it measured them itself."""

    def as_json(self) -> dict[str, Any]:
        """One JSON object, bytes as integers."""
        return asdict(self)


@dataclass
class PeakMemory:
    """The most bytes that a run was seen to hold, by GPU and by process, while it was watched."""

    run_id: object = None
    bytes_by_gpu: dict[int, int] = field(default_factory=dict)
    bytes_by_pid: dict[int, int] = field(default_factory=dict)

    def switch_run(self, run_id: object) -> None:
        """Start over for another run."""
        if run_id != self.run_id:
            self.run_id, self.bytes_by_gpu, self.bytes_by_pid = run_id, {}, {}


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
    output_root: Path, environment: Mapping[str, str], *, name: str | None = None, peaks: PeakMemory | None = None
) -> MemorySnapshot:
    """Memory of this machine and of the run on it, now: the run that is named, or the newest that is running. `peaks`,
    seen before, is updated. Raises RunFolderError where a name was given, and it is not a run of this toolkit."""
    peaks = PeakMemory() if peaks is None else peaks
    run_processes = find_run_processes(output_root, name=name)
    hardware = detect_hardware(environment)
    folder, group = run_processes.folder, run_processes.group
    prediction = read_memory_prediction(folder) if folder else None
    peaks.switch_run((str(folder.path) if folder else None, group.start_time) if group else None)
    gpus = gpu_memory_uses(read_all_gpus(includes_topology=False).gpus, hardware, group, peaks)
    ram = RamUse(hardware.ram_bytes, hardware.ram_free_bytes, group.rss_bytes if group else 0)
    no_prediction = ("its plan.json cannot be read, so there is no prediction to compare with",)
    return MemorySnapshot(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        running=run_processes.is_running,
        said=(*run_processes.notes, *(no_prediction if folder is not None and prediction is None else ())),
        folder=str(folder.path) if folder else None,
        status=read_manifest_or_empty(folder).get("status") if folder else None,
        gpus=gpus,
        ranks=tuple(_rank_memory_use(rank, position, peaks) for position, rank in enumerate(group.ranks))
        if group
        else (),
        prediction=prediction,
        ram=ram,
        warnings=tuple(memory_warnings(gpus, ram, prediction, group)) if group else (),
        measured=read_measured_peaks(folder) if folder and not run_processes.is_running else {},
    )


def _rank_memory_use(rank: RankProcess, position: int, peaks: PeakMemory) -> RankMemoryUse:
    peak_bytes = peaks.bytes_by_pid[rank.pid] = max(peaks.bytes_by_pid.get(rank.pid, 0), rank.rss_bytes)
    return RankMemoryUse(rank.rank if rank.rank is not None else position, rank.pid, rank.rss_bytes, peak_bytes)


def gpu_memory_uses(
    gpus: tuple[GpuStatus, ...], hardware: Hardware, group: RankGroup | None, peaks: PeakMemory
) -> tuple[GpuMemoryUse, ...]:
    """Each GPU that is visible here or that the run uses, with whose its memory is."""
    ranks_by_gpu = _ranks_by_gpu(group) if group else {}
    shown_indices = {gpu.index for gpu in hardware.gpus} | ranks_by_gpu.keys()
    pids = set(group.pids) if group else set()
    return tuple(
        _gpu_memory_use(gpu, pids, tuple(ranks_by_gpu.get(gpu.index, ())), peaks)
        for gpu in gpus
        if gpu.index in shown_indices or any(item.pid in pids for item in gpu.all_processes)
    )


def _ranks_by_gpu(group: RankGroup) -> dict[int, list[int]]:
    """Ranks by the GPU that each uses: of those that its environment lets it see, the one of its local rank."""
    ranks_by_gpu: dict[int, list[int]] = {}
    detect_machine = functools.cache(lambda setting: detect_hardware(dict(setting)))  # asking the driver takes a while
    for rank in group.ranks:
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
        setting = tuple((name, rank.environment[name]) for name in names if name in rank.environment)
        gpus, local_rank = detect_machine(setting).gpus, rank.local_rank or 0
        if local_rank < len(gpus):
            ranks_by_gpu.setdefault(gpus[local_rank].index, []).append(rank.rank or 0)
    return ranks_by_gpu


def _gpu_memory_use(gpu: GpuStatus, pids: set[int], ranks: tuple[int, ...], peaks: PeakMemory) -> GpuMemoryUse:
    run_processes = [item for item in gpu.all_processes if item.pid in pids]
    others = tuple(item for item in gpu.all_processes if item.pid not in pids)
    # A rank holds memory of its GPU from its first steps on: where the driver lists none of the run's, it counts those
    # outside this container, or none at all.
    is_attributable = (bool(run_processes) or not ranks) and all(item.used_bytes is not None for item in run_processes)
    run_bytes = sum(item.used_bytes or 0 for item in run_processes) if is_attributable else None
    others_bytes = None if run_bytes is None or gpu.used_bytes is None else max(0, gpu.used_bytes - run_bytes)
    peak_bytes = max(peaks.bytes_by_gpu.get(gpu.index, 0), run_bytes) if run_bytes is not None else None
    if peak_bytes is not None:
        peaks.bytes_by_gpu[gpu.index] = peak_bytes
    return GpuMemoryUse(
        gpu.index, gpu.name, ranks, gpu.total_bytes, gpu.used_bytes, gpu.free_bytes, run_bytes, others_bytes,
        peak_bytes, others if is_attributable else (),
    )  # fmt: skip


def memory_warnings(
    gpus: tuple[GpuMemoryUse, ...], ram: RamUse, prediction: MemoryPrediction | None, group: RankGroup
) -> Iterator[str]:
    """Warn of what others hold of what the plan counts on: the predicted peak and its margin have to fit beside it."""
    if prediction is None:
        return
    if prediction.on_gpu:
        for use in gpus:
            if use.ranks or use.run_bytes:
                yield from _gpu_warnings(use, prediction)
        return
    margin = prediction.margin * len(group.ranks)
    if ram.free_bytes < margin:
        margin_text = f"less than the plan's margin of {gib_or_na(margin, digits=2)}"
        yield f"RAM: {gib_or_na(ram.free_bytes, digits=2)} GiB are free, {margin_text}"


def _gpu_warnings(use: GpuMemoryUse, prediction: MemoryPrediction) -> Iterator[str]:
    peak = prediction.reserved + prediction.outside_allocator  # by the plan, not by what the run holds at the moment
    if use.total_bytes is None or use.others_bytes is None:
        return
    others_bytes = use.others_bytes
    remaining_bytes = use.total_bytes - others_bytes - peak
    # a tight plan without others is no news: `make plan` said so
    if remaining_bytes >= prediction.margin or not others_bytes:
        return
    holders = ", ".join(
        f"pid {item.pid} ({value_or_na(item.name)}) {gib_or_na(item.used_bytes, digits=2)} GiB"
        for item in sorted(use.others, key=lambda item: -(item.used_bytes or 0))[:MAX_NAMED_PROCESSES]
    )
    holders = (
        f"others hold {holders}"
        if holders
        else f"{gib_or_na(others_bytes, digits=2)} GiB are held by no process that is listed"
    )
    margin_text = f"the plan's margin of {gib_or_na(prediction.margin, digits=2)} GiB"
    remaining_text = f"{gib_or_na(remaining_bytes, digits=2)} of {margin_text} are left"
    if remaining_bytes <= 0:
        remaining_text = f"{margin_text} is gone, and {gib_or_na(-remaining_bytes, digits=2)} more"
    yield f"GPU {use.index}: {holders}: beside the predicted peak {remaining_text}"
