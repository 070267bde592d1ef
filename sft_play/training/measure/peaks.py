"""The highest memory of each moment of a run: loading, training steps, evaluation, generation, saving.

On a GPU torch counts one peak since its last reset: at each change of moment it is kept and reset, and the allocator's
cache is emptied, whose blocks would count for the next. On a CPU the kernel's mark of resident memory is never reset,
because others read it (`time -v`, Slurm's MaxRSS). A moment that raises the mark has its exact peak; any other has the
highest of the samples that a thread takes, which miss what lasts for less than SAMPLE_S.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from sft_play.planner.memory.estimate import RunPhase
from sft_play.planner.plan import Plan
from sft_play.process.imports import give_back_free_memory
from sft_play.training.ranks.heartbeat import Heartbeat

# Seconds between two samples of resident memory; one takes 0.03 ms.
SAMPLE_S = 0.02


class _Samples(threading.Thread):
    """The highest of samples of this process's resident memory, until it is told to end."""

    def __init__(self) -> None:
        super().__init__(name="resident memory", daemon=True)
        self.end, self.mark, self.highest = threading.Event(), _kernels_mark(), _resident()
        self.start()

    def run(self) -> None:
        """Take samples."""
        while not self.end.wait(SAMPLE_S):
            self.highest = max(self.highest, _resident())


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _kernels_mark() -> int:
    """The highest resident memory that the kernel has seen of this process, in bytes (proc_pid_status(5), which has it
    in KiB); 0 outside Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass
class Peaks:
    """The peak of each moment in this process: bytes of tensors, and of the allocator's reserved memory; on a CPU both
    are resident memory. `level_bytes`: resident memory that is not the run's."""

    on_gpu: bool = False
    level_bytes: int = 0
    _kept: dict[RunPhase, tuple[int, int]] = field(default_factory=dict)
    _moment: RunPhase | None = None
    _samples: _Samples | None = None
    """Those of the present moment on a CPU."""

    def start(self, moment: RunPhase) -> None:
        """Begin a moment, and keep the peak of the one before."""
        self.close()
        self._moment = moment
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            give_back_free_memory()  # what malloc keeps of one moment would count for the next
            self._samples = _Samples()

    def close(self) -> None:
        """End the moment without beginning another."""
        self._keep()
        if self._samples is not None:
            self._samples.end.set()
        self._moment = self._samples = None

    def forget(self) -> None:
        """Drop all peaks, before another stage of a run."""
        self.close()
        self._kept = {}

    @contextlib.contextmanager
    def during(self, moment: RunPhase) -> Iterator[None]:
        """While open, memory counts for this moment; then the one before continues, if there was one."""
        before = self._moment
        self.start(moment)
        try:
            yield
        finally:
            self.close()
            if before is not None:
                self.start(before)

    def by_moment(self) -> dict[RunPhase, tuple[int, int]]:
        """The peaks of all moments so far."""
        self._keep()
        return dict(self._kept)

    def _keep(self) -> None:
        if self._moment is not None:
            (allocated, reserved), before = self._now(), self._kept.get(self._moment, (0, 0))
            self._kept[self._moment] = max(allocated, before[0]), max(reserved, before[1])

    def _now(self) -> tuple[int, int]:
        if self._samples is None:
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        mark = _kernels_mark()  # what it rose to in this moment is exact
        highest = mark if mark > self._samples.mark else max(self._samples.highest, _resident())
        return (max(0, highest - self.level_bytes),) * 2


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

    def peak(self) -> dict[str, Any]:
        """`peak_bytes` of the summary: the run's highest moment, predicted and measured."""
        found = self.peaks.by_moment()
        moment = max(found, key=lambda name: found[name][1], default=None)
        return {"moment": moment, **self._figures(moment, found.get(moment) if moment else None)}

    def by_moment(self) -> dict[str, dict[str, Any]]:
        """`peak_bytes_by_moment` of the summary: the same of each moment."""
        return {moment: self._figures(moment, highest) for moment, highest in self.peaks.by_moment().items()}

    def _figures(self, moment: RunPhase | None, highest: tuple[int, int] | None) -> dict[str, Any]:
        memory = self._plan.memory
        allocated, reserved = (memory.allocated, memory.reserved) if moment is None else memory.phase_bytes(moment)
        figures: dict[str, Any] = {
            "predicted_allocated": allocated, "measured_allocated": None,
            "predicted_reserved": reserved, "measured_reserved": None,
        }  # fmt: skip
        measured = highest or (None, None)
        if self.peaks.on_gpu:
            return figures | {"measured_allocated": measured[0], "measured_reserved": measured[1]}
        return figures | {"measured_rss": measured[1], "level_rss": self.level}


@dataclass(frozen=True)
class Watch:
    """What is tracked during a run: memory peaks, signs of life, and its start (seconds since 1970)."""

    memory: MemoryMeter
    beat: Heartbeat
    started: float
