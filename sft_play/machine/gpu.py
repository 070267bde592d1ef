"""A GPU as a plan sees it, found or only named, and as its driver reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_play.machine.gpu_catalog import BF16_CAPABILITY


@dataclass(frozen=True)
class Gpu:
    """One GPU: `index` as `CUDA_VISIBLE_DEVICES` counts it, memory in bytes; `free_bytes` is None
    when named, or where the driver does not tell it. `total_bytes` is what the driver reports of a
    GPU that was found, and what torch could use of one that is named. `bandwidth` is bytes per
    second; rates are dense operations per second with 32-bit accumulation; None: not known, or that
    the GPU has no such units. `mig` is the profile of an instance (`1g.10gb`), None for a whole
    GPU."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int] | None
    bandwidth: float | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    fp8_flops: float | None = None
    fp32_flops: float | None = None
    tdp_watts: int | None = None
    mig: str | None = None

    @property
    def is_amd(self) -> bool:
        """True if it is one of AMD's, which can only be named."""
        return self.name.startswith("AMD ")

    @property
    def has_bf16(self) -> bool:
        """True if its matrix units compute in bfloat16; unknown counts as yes."""
        return self.capability is None or self.capability >= BF16_CAPABILITY

    def flops(self, dtype: str) -> float | None:
        """Dense operations per second of matrix products in `bfloat16`, `float16`, `float8` or
        `float32`."""
        flops_by_dtype = {
            "bfloat16": self.bf16_flops,
            "float16": self.fp16_flops,
            "float8": self.fp8_flops,
        }
        return flops_by_dtype.get(dtype, self.fp32_flops)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True)
class PcieLink:
    """The link to the host: generation and lanes now, and the most that card and slot can."""

    generation: int | None = None
    max_generation: int | None = None
    lanes: int | None = None
    max_lanes: int | None = None


@dataclass(frozen=True)
class MigInstance:
    """An instance of a split GPU (MIG)."""

    uuid: str
    profile: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    card: str | None = None


@dataclass(frozen=True)
class GpuStatus:
    """A GPU, sizes in bytes. `reserved_bytes` is what the driver keeps for itself, counted as
    neither used nor free. `unified`: it has no memory of its own and shares the host's. `processes`
    is None where the driver does not list them. `trouble` is what the driver says of a GPU that
    does not answer."""

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
    temperature_celsius: int | None = None
    pcie: PcieLink = PcieLink()
    mig_enabled: bool | None = None
    instances: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] | None = None
    trouble: str | None = None
    # Active NVLinks; 0 where it has none.
    nvlinks: int | None = None
    # What a plan needs of it and the driver does not tell (`memory`, `MIG instances`, …), in its
    # own words.
    withheld: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_processes(self) -> tuple[GpuProcess, ...]:
        """Processes on it and on its instances, each once."""
        process_lists = [self.processes or (), *(item.processes or () for item in self.instances)]
        return tuple({item.pid: item for items in process_lists for item in items}.values())


@dataclass(frozen=True)
class GpuSnapshot:
    """All GPUs of a machine, whether or not a process can see them; `source` is who reported
    them."""

    gpus: tuple[GpuStatus, ...] = ()
    source: str | None = None
    driver: str | None = None
    # The newest CUDA that the driver can run.
    driver_cuda: str | None = None
    # How each pair of GPUs is connected: `links` as `nvidia-smi topo -m` names them, `peer`:
    # whether they may read each other's memory (None: not known). Rows and columns follow
    # `indices`.
    topology: Mapping[str, tuple[Any, ...]] | None = None
