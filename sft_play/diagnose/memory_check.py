"""Memory during a run: what its ranks hold of each GPU, what others hold, and what the plan predicted."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.diagnose.gpu_info import read_all_gpus
from sft_play.diagnose.processes import RankGroup, RankProcess, find_run_processes, read_manifest_or_empty
from sft_play.facts.gpus.gpu import GpuProcess, GpuStatus
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.runs.files import read_summary
from sft_play.runs.folder import RunFolder
from sft_play.tables import gib_or_na, value_or_na

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
