"""A driver that withholds answers: every call of NVML is refused in turn, and the machine is described by the rest."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from sft_play.diagnose import machine_pages
from sft_play.diagnose.machine_checks import read_system_facts
from sft_play.machine import visible_gpus
from sft_play.machine.hardware import detect_hardware
from sft_play.text import GIB, MIB
from tests.fake_nvml import A100, CALLS, FakeGpu, FakeNvml

INSTANCES = [("MIG-one", "3g.40gb", 40_192), ("MIG-two", "1g.10gb", 9_728)]
REFUSALS: dict[str, Any] = {
    "no permission": pynvml.NVMLError_NoPermission,
    "not supported": pynvml.NVMLError_NotSupported,
    "unknown": pynvml.NVMLError_Unknown,
    "uninitialized": pynvml.NVMLError_Uninitialized,
    "a function that the library lacks": AttributeError,
    "no answer": None,
}
WITHHELD = [
    pytest.param(call, how, marks=[] if (one + other) % 6 == 0 else [pytest.mark.slow])
    for one, call in enumerate(CALLS)
    for other, how in enumerate(REFUSALS)
]
"""Each call, refused in one way; in the other five too by `-m slow`."""


def two_gpus(*, split: bool = False, parent: bool = True) -> list[FakeGpu]:
    """Two A100s; of split ones a container sees two instances, both of the first, and not at the first place."""
    processes: list[tuple[int, int | None]] = [(2**22 + 1, 300 * MIB)]
    gpus = [FakeGpu(f"GPU-{n}", links=12, bridged=9, first_place=2, processes=processes) for n in range(2)]
    for gpu, instances in zip(gpus, (INSTANCES, []), strict=True):
        gpu.instances, gpu.is_memory_refused = (instances if split else None), not parent
    return gpus


def printed_pages() -> str:
    """What the commands that look at a machine print of it; nothing in them may raise."""
    data, lines = machine_pages.read_machine_info(Path("outputs"), {})
    memory = machine_pages.read_memory_snapshot(Path("outputs"), {})
    json.dumps([data, dataclasses.asdict(memory)])
    read_system_facts(detect_hardware({}))
    return "\n".join([*lines, *machine_pages.format_memory_snapshot(memory)])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that puts a machine in place of this one, where nvidia-smi does not exist."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(refused: str = "", how: str = "no answer", **facts: bool) -> FakeNvml:
        fake = FakeNvml(*two_gpus(**facts), refused=refused, refusal=REFUSALS[how])
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_every_call_that_is_asked_is_one_that_is_refused(machine):
    asked = set()
    for split in (False, True):
        fake = machine(split=split)
        assert printed_pages()
        asked |= fake.asked
    assert asked == set(CALLS)


@pytest.mark.parametrize(("refused", "how"), WITHHELD)
def test_whole_gpus_are_planned_by_what_the_driver_still_tells(machine, refused, how):
    machine(refused, how)
    found, text = detect_hardware({}), printed_pages()
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
    assert printed_pages()
    if refused in ("nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo") or (refused == "nvmlInit" and REFUSALS[how]):
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
    assert (gpu.total_bytes, gpu.free_bytes) == (40_192 * MIB, 40_179 * MIB)
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
    assert "GPU 0: NVML does not tell its memory (Insufficient Permissions)" in printed_pages()
