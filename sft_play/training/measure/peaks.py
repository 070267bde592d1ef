"""The highest memory of each moment of a run: loading, training steps, evaluation, generation, saving.

torch and Linux count one peak since its last reset: at each change of moment it is kept and reset, and on a GPU the
allocator's cache is emptied, whose blocks would count for the next.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import torch

from sft_play.planner.plan import Plan
from sft_play.process.heap import give_back_free_memory
from sft_play.training.ranks.heartbeat import Heartbeat

RunMoment = Literal["loading", "training", "evaluation", "generation", "saving"]

_CLEAR = Path("/proc/self/clear_refs")
"""Writing 5 resets the peak of resident memory to the present value (proc_pid_clear_refs(5), since Linux 4.0)."""


@dataclass(frozen=True)
class Highest:
    """Peak bytes of tensors and of the allocator's reserved memory; on a CPU both are resident memory."""

    allocated: int = 0
    reserved: int = 0


@dataclass
class Peaks:
    """The peak of each moment in this process. `level_bytes`: resident memory that is not the run's."""

    on_gpu: bool = False
    level_bytes: int = 0
    _kept: dict[RunMoment, Highest] = field(default_factory=dict)
    _moment: RunMoment | None = None
    _is_counted: bool = True
    """Whether the peak could be reset when the moment began."""

    def start(self, moment: RunMoment) -> None:
        """Begin a moment, and keep the peak of the one before."""
        self._keep()
        self._moment = moment
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._is_counted = cleared()

    def end(self) -> None:
        """End the moment without beginning another."""
        self._keep()
        self._moment = None

    def forget(self) -> None:
        """Drop all peaks, before another stage of a run."""
        self._kept, self._moment = {}, None

    @contextlib.contextmanager
    def during(self, moment: RunMoment) -> Iterator[None]:
        """While open, memory counts for this moment; then the one before continues, if there was one."""
        before = self._moment
        self.start(moment)
        try:
            yield
        finally:
            self.end()
            if before is not None:
                self.start(before)

    def highest(self, moment: RunMoment) -> Highest | None:
        """The peak of a moment until now; None if there was none, or if it could not be counted anew."""
        self._keep()
        return self._kept.get(moment)

    def by_moment(self) -> dict[RunMoment, Highest]:
        """The peaks of all moments so far."""
        self._keep()
        return dict(self._kept)

    def _keep(self) -> None:
        if self._moment is None:
            return
        peak, before = self._now(), self._kept.get(self._moment, Highest())
        if peak is not None:
            self._kept[self._moment] = Highest(*map(max, astuple(peak), astuple(before)))

    def _now(self) -> Highest | None:
        if self.on_gpu:
            return Highest(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        resident = _highest_resident() if self._is_counted else None
        own = None if resident is None else max(0, resident - self.level_bytes)
        return None if own is None else Highest(own, own)


def _highest_resident() -> int | None:
    """In bytes, since the last reset (proc_pid_status(5), which has it in KiB); None outside Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def cleared() -> bool:
    """Reset the peak of resident memory; whether that could be done (not outside Linux)."""
    try:
        _CLEAR.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


class MemoryMeter:
    """Predicted and measured peaks of a run: torch's counters on a GPU, resident memory on a CPU."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        on_gpu = plan.hardware.device == "cuda"
        if not on_gpu:
            # What an earlier run in this process freed and the C library kept is resident already. This run would take
            # from it without the process growing, and its measured peak would be 0.
            gc.collect()
            give_back_free_memory()
        self.level = psutil.Process().memory_info().rss
        """Resident bytes before anything of the run was loaded."""
        self.peaks = Peaks(on_gpu=on_gpu, level_bytes=self.level)

    def peak(self) -> dict[str, int | None]:
        """`peak_bytes` of the summary: of the training steps only."""
        return {
            "predicted_allocated": self._plan.memory.allocated,
            "measured_allocated": None,
            "predicted_reserved": self._plan.memory.reserved,
            "measured_reserved": None,
            **self._measured(self.peaks.highest("training")),
        }

    def by_moment(self) -> dict[str, dict[str, int | None]]:
        """`peak_bytes_by_moment` of the summary: predicted bytes of tensors and measured bytes of each moment."""
        moments = self._plan.memory.moments
        steps = [size for name, size in moments.items() if name not in ("evaluation", "saving")]
        predicted = {**moments, "training": max(steps, default=None), "loading": self._plan.memory.load_bytes}
        return {
            moment: {"predicted_allocated": predicted.get(moment), **self._measured(highest)}
            for moment, highest in self.peaks.by_moment().items()
        }

    def _measured(self, highest: Highest | None) -> dict[str, int | None]:
        if not self.peaks.on_gpu:
            return {"measured_rss": highest.allocated if highest else None, "level_rss": self.level}
        if highest is None:
            return {}
        return {"measured_allocated": highest.allocated, "measured_reserved": highest.reserved}


@dataclass(frozen=True)
class Watch:
    """What is tracked during a run: memory peaks, signs of life, and its start (seconds since 1970)."""

    memory: MemoryMeter
    beat: Heartbeat
    started: float
