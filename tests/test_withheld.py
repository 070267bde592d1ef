"""A driver that withholds answers: every call of NVML is refused in turn, and the machine is described by the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from sft_play.diagnose import gpu_info, memory_check
from sft_play.diagnose.machine_checks import read_system_facts
from sft_play.machine import visible_gpus
from sft_play.machine.hardware import detect_hardware
from sft_play.text import GIB, MIB

A100 = "NVIDIA A100-SXM4-80GB"
INSTANCES = (("MIG-one", "3g.40gb", 40_192), ("MIG-two", "1g.10gb", 9_728))
REFUSALS: dict[str, Any] = {
    "no permission": pynvml.NVMLError_NoPermission,
    "not supported": pynvml.NVMLError_NotSupported,
    "unknown": pynvml.NVMLError_Unknown,
    "uninitialized": pynvml.NVMLError_Uninitialized,
    "a function that the library lacks": AttributeError,
    "no answer": None,
}


class Machine:
    """Two A100s; of a split one a handle is (GPU, place). `refused` fails in a way of `REFUSALS`."""

    NVML_NVLINK_MAX_LINKS = 12
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 1
    nvmlMemory_v2 = 1

    def __init__(self, refused: str = "", how: str = "no answer", *, split: bool = False, parent: bool = True) -> None:
        self.refused, self.how, self.split, self.parent = refused, how, split, parent

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("nvml") or name == "nvmlMemory_v2":
            return object.__getattribute__(self, name)
        if name.startswith("NVMLError"):
            return getattr(pynvml, name)
        answer = object.__getattribute__(self, f"_{name}")

        def ask(*arguments: Any, **named: Any) -> Any:
            if name == self.refused and REFUSALS[self.how] is not None:
                raise REFUSALS[self.how]()
            return None if name == self.refused else answer(*arguments, **named)

        return ask

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVMLError"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _nvmlInit(self) -> None: ...

    def _nvmlShutdown(self) -> None: ...

    def _nvmlSystemGetDriverVersion(self) -> str:
        return "580.82.07"

    def _nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13_000

    def _nvmlDeviceGetCount(self) -> int:
        return 2

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise pynvml.NVMLError_InvalidArgument
        return index

    def _nvmlDeviceGetName(self, handle: Any) -> str:
        return f"{A100} MIG {INSTANCES[handle[1]][1]}" if isinstance(handle, tuple) else A100

    def _nvmlDeviceGetUUID(self, handle: Any) -> str:
        return INSTANCES[handle[1]][0] if isinstance(handle, tuple) else f"GPU-{handle}"

    def _nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:1{handle}:00.0")

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if not isinstance(handle, tuple) and not self.parent:
            raise pynvml.NVMLError_NoPermission
        total = INSTANCES[handle[1]][2] if isinstance(handle, tuple) else 81_920
        return SimpleNamespace(total=total * MIB, free=(total - 500) * MIB, used=500 * MIB, reserved=0)

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return 8, 0

    def _nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        return (int(self.split), int(self.split))

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7 if self.split else 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> tuple[int, int]:
        # a container sees the instances that it was given: both are of the first GPU, and not at the first place
        if not self.split or handle or not 0 <= place - 2 < len(INSTANCES):
            raise pynvml.NVMLError_NotFound
        return handle, place - 2

    def _nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return 1

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0

    def _nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId="0000:c0:00.0")

    def _nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50

    def _nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        return 0

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return [SimpleNamespace(pid=2**22 + 1, usedGpuMemory=300 * MIB)]

    def _nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return []

    def _nvmlSystemGetProcessName(self, pid: int) -> str:
        return "python3"

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 30

    def _nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int:
        return 400_000


CALLS = sorted(name[1:] for name in vars(Machine) if name.startswith("_nvml"))
WITHHELD = [
    pytest.param(call, how, marks=[] if (one + other) % 3 == 0 else [pytest.mark.slow])
    for one, call in enumerate(CALLS)
    for other, how in enumerate(REFUSALS)
]
"""Each call, refused in two ways; in the other four too by `-m slow`."""


def machine_pages() -> str:
    """What the commands that look at a machine print of it; nothing in them may raise."""
    seen, memory = (
        gpu_info.read_machine_info(Path("outputs"), {}),
        memory_check.read_memory_snapshot(Path("outputs"), {}),
    )
    json.dumps([seen.as_json(), memory.as_json()])
    read_system_facts(detect_hardware({}))
    return "\n".join([*gpu_info.machine_lines(seen), *memory_check.format_memory_snapshot(memory)])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that puts a machine in place of this one, where nvidia-smi does not exist."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(*arguments: Any, **named: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", Machine(*arguments, **named))

    return install


def test_every_call_that_is_asked_is_one_that_is_refused(machine, monkeypatch):
    asked: set[str] = set()
    real = Machine.__getattribute__

    def count(self: Machine, name: str) -> Any:
        asked.update([name] if name.startswith("nvml") else [])
        return real(self, name)

    monkeypatch.setattr(Machine, "__getattribute__", count)
    for split in (False, True):
        machine(split=split)
        assert machine_pages()
    assert len(CALLS) == 24
    assert set(CALLS) <= asked


@pytest.mark.parametrize(("refused", "how"), WITHHELD)
def test_whole_gpus_are_planned_by_what_the_driver_still_tells(machine, refused, how):
    machine(refused, how)
    found, text = detect_hardware({}), machine_pages()
    if refused in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetCount") or (refused == "nvmlInit" and REFUSALS[how]):
        assert not found.gpus  # nothing can be asked
        return
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    for gpu in found.gpus:
        assert gpu.name == (visible_gpus.UNNAMED_GPU if refused == "nvmlDeviceGetName" else A100)
        assert gpu.total_bytes == 80 * GIB  # the catalogue's, where the driver does not tell it
        assert gpu.capability == (8, 0)
        assert gpu.free_bytes == (None if refused == "nvmlDeviceGetMemoryInfo" else 81_420 * MIB)
        assert gpu.mig is None
    assert not any("MIG" in note for note in found.notes)
    assert ("planned with the catalogue's 80.0 GiB" in "".join(found.notes)) == (refused == "nvmlDeviceGetMemoryInfo")
    assert "Number of GPUs: 2" in text
    # links: a driver that does not tell them is not one that has none
    if refused == "nvmlDeviceGetNvLinkState" and how != "not supported":
        assert found.link_bytes_per_s == 300e9
    assert [gpu.index for gpu in detect_hardware({"CUDA_VISIBLE_DEVICES": "1"}).gpus] == [1]


@pytest.mark.parametrize("parent", [True, False], ids=["parent's memory told", "parent's memory refused"])
@pytest.mark.parametrize(("refused", "how"), WITHHELD)
def test_instances_are_planned_by_what_the_driver_still_tells(machine, refused, how, parent):
    machine(refused, how, split=True, parent=parent)
    found = detect_hardware({})
    assert machine_pages()
    if refused == "nvmlInit" and REFUSALS[how] is not None:
        assert not found.gpus
        return
    if refused in ("nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"):
        assert not found.gpus
        return
    if refused in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMigDeviceHandleByIndex"):
        assert not found.gpus
        words = visible_gpus.find_unusable_accelerator({"CUDA_VISIBLE_DEVICES": "MIG-one"})
        assert "names none of them" not in words
        if REFUSALS[how] in (pynvml.NVMLError_NoPermission, pynvml.NVMLError_Unknown):
            assert str(REFUSALS[how]()) in words
            assert "has no instance" not in words
        return
    (gpu,) = found.gpus  # CUDA sees one
    assert gpu.mig == ("39gb" if refused == "nvmlDeviceGetName" else "3g.40gb")
    assert (gpu.total_bytes, gpu.free_bytes) == (40_192 * MIB, 39_692 * MIB)
    # what CUDA_VISIBLE_DEVICES names by number is the whole split GPU, whether or not its UUID is told
    assert detect_hardware({"CUDA_VISIBLE_DEVICES": "0"}).gpus == found.gpus
    if refused != "nvmlDeviceGetUUID":
        assert [item.mig for item in detect_hardware({"CUDA_VISIBLE_DEVICES": "MIG-two"}).gpus] == [
            "10gb" if refused == "nvmlDeviceGetName" else "1g.10gb"
        ]


def test_a_container_trains_on_the_instance_that_it_was_given(machine, tmp_path):
    """nvidia-container-toolkit#842: the memory of the GPU is refused, that of its instances is not."""
    machine(split=True, parent=False)
    found = detect_hardware({"NVIDIA_VISIBLE_DEVICES": "MIG-two", "CUDA_VISIBLE_DEVICES": "MIG-two"})
    assert (found.device, found.gpus[0].mig, found.gpus[0].name) == ("cuda", "1g.10gb", f"{A100} MIG 1g.10gb")
    assert found.notes[0].startswith("GPU 1 is in MIG mode and has no instance")
    assert found.gpus[0].bf16_flops == pytest.approx(312e12 / 7)
    assert "GPU 0: NVML does not tell its memory (Insufficient Permissions)" in machine_pages()
