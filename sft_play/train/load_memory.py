"""What loading takes of memory, measured on each rank from before a weight is read until the engine has the model."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from sft_play.plan.memory import GIB
from sft_play.plan.plan import Plan
from sft_play.train import engine

logger = logging.getLogger(__name__)

_EVERY_S = 0.005
"""How often a process's memory is looked at while it loads."""


@dataclass(frozen=True)
class LoadMemory:
    """Bytes at the peak of loading: predicted of one rank, and measured on each.

    `device` is the GPU's allocator, or on a CPU run the rank's own memory; `ram` that memory beside a GPU. Pages of
    the weights' files are left out of a rank's own memory: they can be dropped, and ranks share them.
    """

    predicted_device: int
    device_by_rank: tuple[int, ...]
    predicted_ram: int
    ram_by_rank: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """`loading` of the summary."""
        return asdict(self)

    @property
    def line(self) -> str:
        """The same in words."""
        beside = (
            f", and {max(self.ram_by_rank) / GIB:.2f} GiB of RAM (at most {self.predicted_ram / GIB:.2f} predicted)"
        )
        return (
            f"Loading took {max(self.device_by_rank) / GIB:.2f} GiB at its peak ({self.predicted_device / GIB:.2f} "
            f"predicted){beside if self.ram_by_rank != self.device_by_rank else ''}"
        )


class LoadMeter:
    """Watches this process from where it is entered to `stop`, which all ranks call once their engines are made."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._on_gpu = plan, plan.hardware.device == "cuda"
        self._done = threading.Event()
        self._level = self._highest = 0
        self._thread = threading.Thread(target=self._watch, name="load-memory", daemon=True)
        self.found: LoadMemory | None = None

    def __enter__(self) -> LoadMeter:
        """Count from here."""
        self._level = self._highest = own_bytes()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._highest = max(self._highest, own_bytes())

    def stop(self) -> None:
        """Gather and say what was measured, once. On a GPU count from here, and give back what loading left in the
        allocator: a run's figures are those of its steps."""
        if self.found is not None:
            return
        self._done.set()
        self._thread.join()
        ram = max(self._highest, own_bytes()) - self._level
        device = torch.cuda.max_memory_allocated() if self._on_gpu else ram
        figures = engine.of_all((device, ram))
        memory = self._plan.memory
        self.found = LoadMemory(
            memory.load_bytes,
            tuple(one for one, _ in figures),
            memory.host_load_bytes,
            tuple(ram for _, ram in figures),
        )
        logger.info("%s", self.found.line)
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def own_bytes() -> int:
    """Bytes of RAM that are this process's own: on Linux its anonymous pages, elsewhere what is resident."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
