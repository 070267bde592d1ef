"""The highest memory of each phase of a run: loading, training steps, evaluation, generation, saving.

On a GPU torch counts one peak since its last reset: at each change of phase it is kept and reset, and the allocator's
cache is emptied, whose blocks would count for the next. On a CPU the kernel's mark of resident memory is never reset,
because others read it (`time -v`, Slurm's MaxRSS). A phase that raises the mark has its exact peak; any other has the
highest of the samples that a thread takes, which miss what lasts for less than SAMPLE_INTERVAL_S.
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
from sft_play.process.imports import release_free_memory
from sft_play.training.heartbeat import Heartbeat

# Seconds between two samples of resident memory; one takes 0.03 ms.
SAMPLE_INTERVAL_S = 0.02


class _ResidentSampler(threading.Thread):
    """The highest of samples of this process's resident memory, until it is told to end."""

    def __init__(self) -> None:
        super().__init__(name="resident memory", daemon=True)
        self.stop_event, self.start_mark, self.highest = threading.Event(), _kernel_peak_bytes(), _resident_bytes()
        self.start()

    def run(self) -> None:
        """Take samples."""
        while not self.stop_event.wait(SAMPLE_INTERVAL_S):
            self.highest = max(self.highest, _resident_bytes())


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _kernel_peak_bytes() -> int:
    """The highest resident memory that the kernel has seen of this process, in bytes (proc_pid_status(5), which has it
    in KiB); 0 outside Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass
class MemoryPeaks:
    """The peak of each phase in this process: bytes of tensors, and of the allocator's reserved memory; on a CPU both
    are resident memory. `baseline_bytes`: resident memory that is not the run's."""

    on_gpu: bool = False
    baseline_bytes: int = 0
    _peaks: dict[RunPhase, tuple[int, int]] = field(default_factory=dict)
    _phase: RunPhase | None = None
    _sampler: _ResidentSampler | None = None
    """Samples the present phase on a CPU."""

    def start(self, phase: RunPhase) -> None:
        """Begin a phase, and keep the peak of the one before."""
        self.close()
        self._phase = phase
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            release_free_memory()  # what malloc keeps of one phase would count for the next
            self._sampler = _ResidentSampler()

    def close(self) -> None:
        """End the phase without beginning another."""
        self._record_peak()
        if self._sampler is not None:
            self._sampler.stop_event.set()
        self._phase = self._sampler = None

    def clear(self) -> None:
        """Drop all peaks, before another stage of a run."""
        self.close()
        self._peaks = {}

    @contextlib.contextmanager
    def during(self, phase: RunPhase) -> Iterator[None]:
        """While open, memory counts for this phase; then the one before continues, if there was one."""
        outer_phase = self._phase
        self.start(phase)
        try:
            yield
        finally:
            self.close()
            if outer_phase is not None:
                self.start(outer_phase)

    def by_phase(self) -> dict[RunPhase, tuple[int, int]]:
        """The peaks of all phases so far."""
        self._record_peak()
        return dict(self._peaks)

    def _record_peak(self) -> None:
        if self._phase is not None:
            (allocated, reserved), earlier_peak = self._current_peak(), self._peaks.get(self._phase, (0, 0))
            self._peaks[self._phase] = max(allocated, earlier_peak[0]), max(reserved, earlier_peak[1])

    def _current_peak(self) -> tuple[int, int]:
        if self._sampler is None:
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        mark = _kernel_peak_bytes()  # what it rose to in this phase is exact
        highest = mark if mark > self._sampler.start_mark else max(self._sampler.highest, _resident_bytes())
        return (max(0, highest - self.baseline_bytes),) * 2


class MemoryMeter:
    """Predicted and measured peaks of a run: torch's counters on a GPU, resident memory on a CPU."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        on_gpu = plan.hardware.device == "cuda"
        if not on_gpu:
            # What an earlier run in this process freed and the C library kept is resident already. This run would take
            # from it without the process growing, and its measured peak would be 0.
            gc.collect()
            release_free_memory()
        self.baseline_bytes = psutil.Process().memory_info().rss
        """Resident bytes before anything of the run was loaded."""
        self.peaks = MemoryPeaks(on_gpu=on_gpu, baseline_bytes=self.baseline_bytes)

    def peak_bytes(self) -> dict[str, Any]:
        """`peak_bytes` of the summary: the run's highest phase, predicted and measured."""
        peaks = self.peaks.by_phase()
        phase = max(peaks, key=lambda name: peaks[name][1], default=None)
        return {"moment": phase, **self._predicted_and_measured(phase, peaks.get(phase) if phase else None)}

    def peak_bytes_by_phase(self) -> dict[str, dict[str, Any]]:
        """`peak_bytes_by_moment` of the summary: the same of each phase."""
        return {phase: self._predicted_and_measured(phase, highest) for phase, highest in self.peaks.by_phase().items()}

    def _predicted_and_measured(self, phase: RunPhase | None, highest: tuple[int, int] | None) -> dict[str, Any]:
        memory = self._plan.memory
        allocated, reserved = (memory.allocated, memory.reserved) if phase is None else memory.phase_bytes(phase)
        figures: dict[str, Any] = {
            "predicted_allocated": allocated, "measured_allocated": None,
            "predicted_reserved": reserved, "measured_reserved": None,
        }  # fmt: skip
        measured = highest or (None, None)
        if self.peaks.on_gpu:
            return figures | {"measured_allocated": measured[0], "measured_reserved": measured[1]}
        return figures | {"measured_rss": measured[1], "level_rss": self.baseline_bytes}


@dataclass(frozen=True)
class RunMonitors:
    """What is tracked during a run: memory peaks, signs of life, and its start (seconds since 1970)."""

    memory: MemoryMeter
    heartbeat: Heartbeat
    start_time: float
