"""NVML as tests make it up: GPUs by their figures, and calls that a driver refuses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20
A100 = "NVIDIA A100-SXM4-80GB"
H200 = "NVIDIA H200"


@dataclass
class FakeGpu:
    """A GPU as NVML knows it, sizes in MiB; None: it has no such thing. `instances`: UUID, profile and size of each,
    from `first_place` on; `bridged`: the GPU to which its links lead, in place of a switch."""

    uuid: str = "GPU-0"
    name: str = A100
    total: int = 81_920
    capability: tuple[int, int] = (8, 0)
    links: int | None = None
    instances: list[tuple[str, str, int]] | None = None
    used: int = 500
    reserved: int = 0
    first_place: int = 0
    bridged: int | None = None
    limit: int | None = 700_000
    temperature: int | None = 31
    pcie: tuple[int, int, int, int] | None = (1, 5, 16, 16)
    processes: list[tuple[int, int | None]] | None = field(default_factory=list)
    is_lost: bool = False
    is_memory_refused: bool = False


def _fact(name: str, place: int | None = None) -> Callable[..., Any]:
    """A call that answers a fact of a GPU, or a part of it."""

    def call(self: Any, handle: int, *_: Any) -> Any:
        value = self._of(handle, name)
        return value if place is None else value[place]

    return call


class FakeNvml:
    """The part of pynvml that is asked; a handle is the number of a GPU, or that and the number of an instance.
    `refused` is the call that fails with `refusal`, or has no answer."""

    NVML_NVLINK_MAX_LINKS = 18
    nvmlMemory_v2 = 1

    def __init__(self, *gpus: FakeGpu, refused: str = "", refusal: type[Exception] | None = None) -> None:
        self.gpus, self.refused, self.refusal = gpus, refused, refusal
        self.is_open, self.asked = False, set[str]()

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("nvml") or not callable(found):
            return found
        self.asked.add(name)
        return self._refuse if name == self.refused else found

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name) if name.startswith("NVMLError") else object.__getattribute__(self, name)

    def _refuse(self, *_: Any, **__: Any) -> None:
        if self.refusal is not None:
            raise self.refusal

    def _of(self, handle: Any, fact: str) -> Any:
        value = getattr(self.gpus[handle], fact)
        if value is None:
            raise pynvml.NVMLError_NotSupported
        return value

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.82.07"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13_010

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.gpus[index].is_lost:
            raise pynvml.NVMLError_GpuIsLost
        return index

    def nvmlDeviceGetName(self, handle: Any) -> str:
        if isinstance(handle, tuple):
            return f"{self.gpus[handle[0]].name} MIG {self.gpus[handle[0]].instances[handle[1]][1]}"
        return self.gpus[handle].name

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self.gpus[handle[0]].instances[handle[1]][0] if isinstance(handle, tuple) else self.gpus[handle].uuid

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:1{handle}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if isinstance(handle, tuple):
            total, used, reserved = self.gpus[handle[0]].instances[handle[1]][2], 13, 0
        else:
            gpu = self.gpus[handle]
            total, used, reserved = gpu.total, gpu.used, gpu.reserved
            if gpu.is_memory_refused:
                raise pynvml.NVMLError_NoPermission
        if not total:
            raise pynvml.NVMLError_NotSupported
        sizes = {"total": total, "free": total - used - reserved, "used": used + reserved}
        if version:  # the first version counts the driver's share as used
            sizes |= {"used": used, "reserved": reserved}
        return SimpleNamespace(**{name: size * MIB for name, size in sizes.items()})

    nvmlDeviceGetCudaComputeCapability = _fact("capability")
    nvmlDeviceGetPowerManagementLimit = _fact("limit")
    nvmlDeviceGetTemperature = _fact("temperature")
    nvmlDeviceGetCurrPcieLinkGeneration = _fact("pcie", 0)
    nvmlDeviceGetMaxPcieLinkGeneration = _fact("pcie", 1)
    nvmlDeviceGetCurrPcieLinkWidth = _fact("pcie", 2)
    nvmlDeviceGetMaxPcieLinkWidth = _fact("pcie", 3)

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if self.gpus[handle].capability < (8, 0):
            raise pynvml.NVMLError_NotSupported
        return [int(self.gpus[handle].instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 0 if self.gpus[handle].instances is None else 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> tuple[int, int]:
        number = place - self.gpus[handle].first_place
        if not 0 <= number < len(self.gpus[handle].instances or ()):
            raise pynvml.NVMLError_NotFound
        return handle, number

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self._of(handle, "links"):
            raise pynvml.NVMLError_NotSupported
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.gpus[handle].bridged is None else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        other = self.gpus[handle].bridged
        return SimpleNamespace(busId="0000:c0:00.0" if other is None else f"0000:1{other}:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        return 0 if self.gpus[one].links else 4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        processes = self._of(handle[0] if isinstance(handle, tuple) else handle, "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses(handle)[:1]  # one may have both: listed twice, counted once


CALLS = sorted(name for name, call in vars(FakeNvml).items() if name.startswith("nvml") and callable(call))
