"""The memory that loading takes, measured on each rank from before any weights are read until the engine is ready."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from sft_play.planner.plan import Plan
from sft_play.training.measure.peaks import status_bytes
from sft_play.training.ranks import distributed
from sft_play.units import GIB

logger = logging.getLogger(__name__)

_EVERY_S = 0.005
"""How often a process's memory is sampled while it loads."""


@dataclass(frozen=True)
class LoadMemory:
    """Bytes at the peak of loading: predicted for one rank, and measured on each.

    `device` is the GPU's allocator, or on a CPU run the rank's own memory; `ram` is that memory beside a GPU. Mapped
    pages of the weights' files do not count as a rank's own: they can be dropped, and ranks share them.
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
        """The log line."""
        line = (
            f"Loading took {max(self.device_by_rank) / GIB:.2f} GiB at its peak ({self.predicted_device / GIB:.2f} "
            "predicted)"
        )
        if self.ram_by_rank != self.device_by_rank:
            ram, predicted = max(self.ram_by_rank), self.predicted_ram
            line += f", and {ram / GIB:.2f} GiB of RAM (at most {predicted / GIB:.2f} predicted)"
        return line


class LoadMeter:
    """Watches this process from `__enter__` to `stop`, which all ranks call once their engines are ready."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._on_gpu = plan, plan.hardware.device == "cuda"
        self._done = threading.Event()
        self._level = self._highest = 0
        self._thread = threading.Thread(target=self._watch, name="load-memory", daemon=True)
        self._measured: LoadMemory | None = None

    def __enter__(self) -> LoadMeter:
        """Start measuring."""
        self._level = self._highest = own_bytes()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._done.set()  # loading failed, so nobody calls `stop`

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self._highest = max(self._highest, own_bytes())

    def stop(self) -> LoadMemory:
        """What was measured on all ranks, gathered and logged once. On a GPU it also frees what loading left in the
        allocator and resets the peak: a run's figures are those of its steps."""
        if self._measured is not None:
            return self._measured
        self._done.set()
        self._thread.join()
        ram = max(self._highest, own_bytes()) - self._level  # the peak may be newer than the last sample
        device = torch.cuda.max_memory_allocated() if self._on_gpu else ram
        figures = distributed.of_all((device, ram))
        memory = self._plan.memory
        self._measured = LoadMemory(
            memory.load_bytes,
            tuple(one for one, _ in figures),
            memory.host_load_bytes,
            tuple(ram for _, ram in figures),
        )
        logger.info("%s", self._measured.line)
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return self._measured


def own_bytes() -> int:
    """Bytes of RAM that are this process's own: on Linux its anonymous pages, elsewhere its resident set."""
    anonymous = status_bytes("RssAnon")
    return int(psutil.Process().memory_info().rss) if anonymous is None else anonymous
