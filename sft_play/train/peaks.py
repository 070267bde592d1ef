"""The highest memory of each moment of a run: training steps, evaluation, generation, saving.

torch counts one peak from its last reset on, and so does Linux of a process's resident memory. Whoever changes from one
moment to another keeps the old one's peak and counts anew, so that what an evaluation or generated answers took is not
read as the training's. On a GPU the allocator's cached blocks go too: those of one moment have sizes that are of no use
to the next, and would be counted as reserved by it.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

RunMoment = Literal["training", "evaluation", "generation", "saving"]

_CLEAR = Path("/proc/self/clear_refs")
"""Writing 5 makes Linux count the highest resident memory from the present one (proc_pid_clear_refs(5), since 4.0)."""


@dataclass(frozen=True)
class Highest:
    """Bytes at the highest: what tensors held and what the allocator reserved; on a CPU resident memory, in both."""

    allocated: int = 0
    reserved: int = 0

    def or_more(self, other: Highest) -> Highest:
        """The larger of each."""
        return Highest(max(self.allocated, other.allocated), max(self.reserved, other.reserved))


@dataclass
class Peaks:
    """Keeps the peak of each moment of this process. `level_bytes`: resident memory that is not the run's."""

    on_gpu: bool = False
    level_bytes: int = 0
    clear: Callable[[], bool] = field(default_factory=lambda: _cleared)
    """Has resident memory counted anew; whether it could."""
    _kept: dict[RunMoment, Highest] = field(default_factory=dict)
    _moment: RunMoment | None = None
    _known: int = 0
    """Resident bytes that an earlier moment had come to, where the count could not be begun anew."""

    def start(self, moment: RunMoment) -> None:
        """This moment begins; what came before is kept with its own."""
        self._keep()
        self._moment = moment
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._known = 0 if self.clear() else highest_resident()

    def end(self) -> None:
        """The moment ends, and no other begins."""
        self._keep()
        self._moment = None

    def forget(self) -> None:
        """Begin as if nothing had been: another stage of a run."""
        self._kept, self._moment = {}, None

    @contextlib.contextmanager
    def during(self, moment: RunMoment) -> Iterator[None]:
        """What is inside is this moment's; then the one before goes on, if there was one."""
        before = self._moment
        self.start(moment)
        try:
            yield
        finally:
            self.end()
            if before is not None:
                self.start(before)

    def highest(self, moment: RunMoment) -> Highest | None:
        """The peak of a moment until now; None where there was none, or where it stayed below what came before."""
        self._keep()
        return self._kept.get(moment)

    def by_moment(self) -> dict[RunMoment, Highest]:
        """The peaks of all moments there were."""
        self._keep()
        return dict(self._kept)

    def _keep(self) -> None:
        if self._moment is None:
            return
        found = self._now()
        if found is not None:
            self._kept[self._moment] = found.or_more(self._kept.get(self._moment, Highest()))

    def _now(self) -> Highest | None:
        if self.on_gpu:
            return Highest(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        resident = highest_resident()
        if resident <= self._known:
            return None
        own = max(0, resident - self.level_bytes)
        return Highest(own, own)


def highest_resident() -> int:
    """The highest resident bytes of this process since Linux was last told to count anew."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cleared() -> bool:
    try:
        _CLEAR.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True
