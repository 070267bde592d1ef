"""Memory during a run: what its ranks hold of each GPU, what others hold, and what the plan predicted."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.diagnose.gpu_info import all_gpus
from sft_play.diagnose.pages import gib, value_text
from sft_play.diagnose.processes import Group, RankProcess, find_run, manifest_of
from sft_play.facts.gpus.gpu import GpuProcess, GpuStatus
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.runs.files import read_summary
from sft_play.runs.folder import RunFolder

# Processes of others that a warning names.
BIG_OTHERS = 3


@dataclass(frozen=True)
class Prediction:
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
class GpuUse:
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
class RankUse:
    """Resident memory of one rank, with what it started, in the host's RAM, in bytes; the most that was seen."""

    rank: int
    pid: int
    rss_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class Ram:
    """The host's RAM in bytes, as far as this process may use it; `run_bytes` is what the run holds of it."""

    total_bytes: int
    free_bytes: int
    run_bytes: int


@dataclass(frozen=True)
class MemorySeen:
    """One look. `said` are lines about the run; `running` is False where nothing trains."""

    time: str
    running: bool
    said: tuple[str, ...]
    folder: str | None
    status: str | None
    gpus: tuple[GpuUse, ...]
    ranks: tuple[RankUse, ...]
    prediction: Prediction | None
    ram: Ram
    warnings: tuple[str, ...] = ()
    measured: Mapping[str, int] = field(default_factory=dict)
    """Of a run that has ended the peak of each moment, in bytes of one rank, as it measured them itself."""

    def as_json(self) -> dict[str, Any]:
        """One JSON object, bytes as integers."""
        return asdict(self)


@dataclass
class HighestSeen:
    """The most that a run was seen to hold, by GPU and by process, while it was watched."""

    run: object = None
    gpus: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)

    def of_run(self, run: object) -> None:
        """Start over for another run."""
        if run != self.run:
            self.run, self.gpus, self.ranks = run, {}, {}


def prediction_of(folder: RunFolder) -> Prediction | None:
    """What the plan of a run predicted for one rank; None where its `plan.json` cannot be read."""
    try:
        plan = json.loads((folder.path / "plan.json").read_text(encoding="utf-8"))
        peak = plan["peak_bytes"]
        sizes = ("terms", "allocated", "reserved", "margin", "outside_allocator", "required")
        reserved = {name: size for name, (_, size) in peak.get("by_moment", {}).items() if name != "loading"}
        return Prediction(
            moment=max(reserved, key=lambda name: reserved[name], default="training"),
            **{name: peak[name] for name in sizes},
            on_gpu=bool(plan["hardware"]["gpus"]),
            **{name: plan[name] for name in ("layout", "ranks", "micro_batch", "grad_accum")},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def measured_in(folder: RunFolder) -> dict[str, int]:
    """What a run has measured of each of its moments, as its summary says; on a CPU above what its imports took."""
    moments = read_summary(folder.path).get("peak_bytes_by_moment") or {}
    names = ("measured_reserved", "measured_allocated", "measured_rss")
    return {
        moment: size
        for moment, peak in moments.items()
        if isinstance(peak, dict) and (size := next((peak[name] for name in names if peak.get(name)), None))
    }


def see_memory(
    output: Path, environment: Mapping[str, str], *, named: str | None = None, peaks: HighestSeen | None = None
) -> MemorySeen:
    """Memory of this machine and of the run on it, now: the run that is named, or the newest that is running. `peaks`,
    seen before, is updated. Raises RunFolderError where a name was given, and it is not a run of this toolkit."""
    peaks = HighestSeen() if peaks is None else peaks
    run = find_run(output, named=named)
    hardware = detect_hardware(environment)
    folder, group = run.folder, run.group
    prediction = prediction_of(folder) if folder else None
    peaks.of_run((str(folder.path) if folder else None, group.started) if group else None)
    uses = gpu_uses(all_gpus(topology=False).gpus, hardware, group, peaks)
    ram = Ram(hardware.ram_bytes, hardware.ram_free_bytes, group.rss_bytes if group else 0)
    unread = ("its plan.json cannot be read, so there is no prediction to compare with",)
    return MemorySeen(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        running=run.running,
        said=(*run.said, *(unread if folder is not None and prediction is None else ())),
        folder=str(folder.path) if folder else None,
        status=manifest_of(folder).get("status") if folder else None,
        gpus=uses,
        ranks=tuple(_rank_use(rank, position, peaks) for position, rank in enumerate(group.ranks)) if group else (),
        prediction=prediction,
        ram=ram,
        warnings=tuple(warnings(uses, ram, prediction, group)) if group else (),
        measured=measured_in(folder) if folder and not run.running else {},
    )


def _rank_use(rank: RankProcess, position: int, peaks: HighestSeen) -> RankUse:
    highest = peaks.ranks[rank.pid] = max(peaks.ranks.get(rank.pid, 0), rank.rss_bytes)
    return RankUse(rank.rank if rank.rank is not None else position, rank.pid, rank.rss_bytes, highest)


def gpu_uses(
    gpus: tuple[GpuStatus, ...], hardware: Hardware, group: Group | None, peaks: HighestSeen
) -> tuple[GpuUse, ...]:
    """Each GPU that is visible here or that the run uses, with whose its memory is."""
    taken = _gpus_of(group) if group else {}
    shown = {gpu.index for gpu in hardware.gpus} | taken.keys()
    pids = set(group.pids) if group else set()
    return tuple(
        _use(gpu, pids, tuple(taken.get(gpu.index, ())), peaks)
        for gpu in gpus
        if gpu.index in shown or any(item.pid in pids for item in gpu.all_processes)
    )


def _gpus_of(group: Group) -> dict[int, list[int]]:
    """Ranks by the GPU that each uses: of those that its environment lets it see, the one of its local rank."""
    ranks_by_gpu: dict[int, list[int]] = {}
    machine = functools.cache(lambda setting: detect_hardware(dict(setting)))  # asking the driver takes a while
    for rank in group.ranks:
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
        setting = tuple((name, rank.environment[name]) for name in names if name in rank.environment)
        gpus, local = machine(setting).gpus, rank.local_rank or 0
        if local < len(gpus):
            ranks_by_gpu.setdefault(gpus[local].index, []).append(rank.rank or 0)
    return ranks_by_gpu


def _use(gpu: GpuStatus, pids: set[int], ranks: tuple[int, ...], peaks: HighestSeen) -> GpuUse:
    own = [item for item in gpu.all_processes if item.pid in pids]
    others = tuple(item for item in gpu.all_processes if item.pid not in pids)
    # A rank holds memory of its GPU from its first steps on: where the driver lists none of the run's, it counts those
    # outside this container, or none at all.
    is_told = (bool(own) or not ranks) and all(item.used_bytes is not None for item in own)
    run = sum(item.used_bytes or 0 for item in own) if is_told else None
    rest = None if run is None or gpu.used_bytes is None else max(0, gpu.used_bytes - run)
    highest = max(peaks.gpus.get(gpu.index, 0), run) if run is not None else None
    if highest is not None:
        peaks.gpus[gpu.index] = highest
    return GpuUse(
        gpu.index, gpu.name, ranks, gpu.total_bytes, gpu.used_bytes, gpu.free_bytes, run, rest, highest,
        others if is_told else (),
    )  # fmt: skip


def warnings(gpus: tuple[GpuUse, ...], ram: Ram, prediction: Prediction | None, group: Group) -> Iterator[str]:
    """What others hold of what the plan counts on: the predicted peak with its margin has to fit beside them."""
    if prediction is None:
        return
    if prediction.on_gpu:
        for use in gpus:
            if use.ranks or use.run_bytes:
                yield from _gpu_warnings(use, prediction)
        return
    margin = prediction.margin * len(group.ranks)
    if ram.free_bytes < margin:
        least = f"less than the plan's margin of {gib(margin, digits=2)}"
        yield f"RAM: {gib(ram.free_bytes, digits=2)} GiB are free, {least}"


def _gpu_warnings(use: GpuUse, prediction: Prediction) -> Iterator[str]:
    peak = prediction.reserved + prediction.outside_allocator  # by the plan, not by what the run holds at the moment
    if use.total_bytes is None or use.others_bytes is None:
        return
    taken = use.others_bytes
    left = use.total_bytes - taken - peak
    if left >= prediction.margin or not taken:  # a tight plan without others is no news: `make plan` said so
        return
    who = ", ".join(
        f"pid {item.pid} ({value_text(item.name)}) {gib(item.used_bytes, digits=2)} GiB"
        for item in sorted(use.others, key=lambda item: -(item.used_bytes or 0))[:BIG_OTHERS]
    )
    who = f"others hold {who}" if who else f"{gib(taken, digits=2)} GiB are held by no process that is listed"
    margin = f"the plan's margin of {gib(prediction.margin, digits=2)} GiB"
    rest = f"{gib(left, digits=2)} of {margin} are left"
    if left <= 0:
        rest = f"{margin} is gone, and {gib(-left, digits=2)} more"
    yield f"GPU {use.index}: {who}: beside the predicted peak {rest}"
