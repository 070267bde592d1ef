"""A GPU as its driver tells of it, and all GPUs of a machine with how they are joined; None: it does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

import psutil

from sft_play.facts.gpu_catalog import BF16_CAPABILITY

FP8_CAPABILITY = (8, 9)
"""CUDA compute capability from which 8-bit floating-point matrix units exist (Ada; CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU; `peak_bytes` where the driver keeps accounts."""

    pid: int
    name: str | None
    used_bytes: int | None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Pcie:
    """The link to the host: generation and lanes now, and the most that card and slot can."""

    generation: int | None = None
    max_generation: int | None = None
    lanes: int | None = None
    max_lanes: int | None = None


@dataclass(frozen=True)
class Instance:
    """An instance of a split GPU (MIG)."""

    uuid: str
    profile: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True)
class SeenGpu:
    """A GPU, sizes in bytes. `reserved_bytes` is what the driver keeps for itself, part of neither used nor free.

    `unified`: it has no memory of its own and shares the host's. `processes` is None where the driver does not list
    them. `trouble` is what the driver says of a GPU that does not answer.
    """

    index: int
    name: str | None
    vendor: str
    uuid: str | None = None
    bus_id: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    unified: bool = False
    compute_capability: str | None = None
    bf16: bool | None = None
    fp8: bool | None = None
    power_cap_watts: float | None = None
    power_watts: float | None = None
    temperature_celsius: int | None = None
    pcie: Pcie = Pcie()
    mig_enabled: bool | None = None
    mig_pending: bool | None = None
    """What MIG will be after the next reset."""
    instances: tuple[Instance, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    trouble: str | None = None

    @property
    def all_processes(self) -> tuple[GpuProcess, ...]:
        """Processes on it and on its instances, each once."""
        lists = [self.processes or (), *(item.processes or () for item in self.instances)]
        return tuple({item.pid: item for items in lists for item in items}.values())


@dataclass(frozen=True)
class Topology:
    """How each two GPUs are joined: `links` as `nvidia-smi topo -m` names them, `peer`: whether they may read each
    other's memory (None: not known). Rows and columns follow `indices`."""

    indices: tuple[int, ...]
    links: tuple[tuple[str, ...], ...]
    peer: tuple[tuple[bool | None, ...], ...]


@dataclass(frozen=True)
class Seen:
    """All GPUs of a machine, whatever a process may see of them; `source` is who told."""

    gpus: tuple[SeenGpu, ...] = ()
    source: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    """The newest CUDA that the driver can run."""
    topology: Topology | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def only(self, indices: Sequence[int]) -> Seen:
        """The same with these GPUs alone, in this order."""
        known = {gpu.index: gpu for gpu in self.gpus}
        kept = tuple(known[index] for index in indices if index in known)
        return replace(self, gpus=kept, topology=_part(self.topology, [gpu.index for gpu in kept]))


def _part(topology: Topology | None, indices: Sequence[int]) -> Topology | None:
    if topology is None or len(indices) < 2 or not set(indices) <= set(topology.indices):
        return None
    places = [topology.indices.index(index) for index in indices]
    return Topology(
        tuple(indices),
        tuple(tuple(topology.links[row][column] for column in places) for row in places),
        tuple(tuple(topology.peer[row][column] for column in places) for row in places),
    )


def abilities(capability: tuple[int, int] | None) -> dict[str, Any]:
    """Compute capability and matrix formats of an NVIDIA GPU, as fields of `SeenGpu`."""
    if capability is None:
        return {}
    return {
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "bf16": capability >= BF16_CAPABILITY,
        "fp8": capability >= FP8_CAPABILITY,
    }


def process_name(pid: int, said: str | None = None) -> str | None:
    """The name of a process: of this machine's table, else what the driver said; None where neither knows it."""
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError, OverflowError):
        named = PurePath(said.split(" ")[0]).name if said else ""
        return named if named and not named.startswith("[") else None
