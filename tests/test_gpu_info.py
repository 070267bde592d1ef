"""make gpu-info: NVML, a named machine, and a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.diagnose import gpu_info
from sft_play.machine.gpu import PcieLink
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import installed_version, nccl_package, torch_cuda_version, torch_hip_version
from tests.conftest import ROOT

MIB = 2**20
GIB = 2**30


# --- fakes ------------------------------------------------------------------------------------------------------------


class NotSupported(Exception):
    """NVML's answer for a field that a GPU or a driver does not have."""


class Lost(Exception):
    """NVML's answer for a GPU that fell off the bus."""


class Fake:
    """One GPU as NVML knows it: what is absent raises NotSupported. Sizes in MiB."""

    def __init__(self, name: str = "NVIDIA H200", *, total: int = 143_771, used: int = 614, **fields: Any) -> None:
        self.name, self.total, self.used = name, total, used
        self.fields = {
            "capability": (9, 0),
            "limit": 700_000,
            "usage": 120_400,
            "temperature": 31,
            "pcie": (1, 5, 16, 16),
            "mig": (0, 0),
            "processes": [],
            "links": 18,
            "lost": False,
            **fields,
        }


class FakeNvml:
    """The questions of pynvml that are asked; GPUs are joined by an NVSwitch where they have links."""

    NVML_NVLINK_MAX_LINKS = 18
    NVMLError_NotSupported = NotSupported
    nvmlMemory_v2 = 1

    def __init__(self, *gpus: Fake) -> None:
        self.gpus = gpus
        self.open = False

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return "580.82.07"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13_010

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.gpus[index].fields["lost"]:
            raise Lost("GPU is lost")
        return index

    def get(self, handle: int, field: str) -> Any:
        value = self.gpus[handle].fields.get(field)
        if value is None:
            raise NotSupported
        return value

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.gpus[handle].name

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}{handle}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:1{handle}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        gpu = self.gpus[handle]
        if gpu.total == 0:
            raise NotSupported
        reserved = 479 if version else 0  # the first version counts the driver's share as used
        sizes = {"total": gpu.total, "free": gpu.total - gpu.used - 479, "used": gpu.used + 479 - reserved}
        sizes |= {"reserved": reserved} if version else {}
        return SimpleNamespace(**{name: size * MIB for name, size in sizes.items()})

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> Any:
        return self.get(handle, "capability")

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> Any:
        return self.get(handle, "limit")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> Any:
        return self.get(handle, "temperature")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> Any:
        return self.get(handle, "pcie")[0]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> Any:
        return self.get(handle, "pcie")[1]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> Any:
        return self.get(handle, "pcie")[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> Any:
        return self.get(handle, "pcie")[3]

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        return self.get(handle, "mig")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.get(handle, "processes")]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        return self.nvmlDeviceGetComputeRunningProcesses(handle)[:1]  # one may have both: listed twice, counted once

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.get(handle, "links"):
            raise NotSupported
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0 if self.gpus[handle].fields.get("bridged") is not None else 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        other = self.gpus[handle].fields.get("bridged")
        return SimpleNamespace(busId=f"0000:1{other}:00.0" if other is not None else "0000:c0:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        return 0 if self.gpus[one].fields["links"] else 4


@pytest.fixture
def nvml(monkeypatch):
    """A function that puts these GPUs into the machine."""

    def install(*gpus: Fake) -> FakeNvml:
        fake = FakeNvml(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without NVML or any sign of a GPU: the folder of its programs."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(gpu_info, "find_unusable_accelerator", lambda environment: None)
    return folder


def seen_text(environment: dict[str, str] | None = None, **options: Any) -> str:
    machine = gpu_info.read_machine_info(Path("outputs"), environment or {}, **options)
    text = "\n".join(gpu_info.machine_lines(machine))
    json.loads(json.dumps(machine.as_json()))
    return text


# --- NVML -------------------------------------------------------------------------------------------------------------


def test_two_gpus_are_counted_on_a_line_of_its_own_and_told_in_detail(nvml):
    fake = nvml(Fake(processes=[(os.getpid(), 512 * MIB)]), Fake())
    machine = gpu_info.read_machine_info(Path("outputs"), {})
    text = gpu_info.machine_lines(machine)
    assert "Number of GPUs: 2" in text
    first = machine.gpu_snapshot.gpus[0]
    assert (first.total_bytes, first.used_bytes, first.reserved_bytes) == (143_771 * MIB, 614 * MIB, 479 * MIB)
    assert first.free_bytes == first.total_bytes - first.used_bytes - first.reserved_bytes
    assert (first.compute_capability, first.bf16, first.fp8) == ("9.0", True, True)
    assert (first.power_cap_watts, first.temperature_celsius) == (700.0, 31)
    assert first.pcie == PcieLink(1, 5, 16, 16)
    assert [(item.pid, item.used_bytes) for item in first.processes] == [(os.getpid(), 512 * MIB)]
    row = next(line for line in text if line.startswith("  0 "))
    assert "NVIDIA H200" in row
    assert row.split()[3:6] == ["140.4", "0.6", "139.3"]
    assert row.split()[6:] == ["9.0", "yes", "yes", "700", "31", "1x16/5x16", "no"]
    assert any(f"{os.getpid()}" in line and "0.50" in line for line in text)
    assert "Driver: 580.82.07, which runs CUDA up to 13.1" in text
    assert not fake.open


def test_every_line_of_a_machine_with_eight_gpus_fits_100_columns(nvml):
    nvml(*(Fake("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", total=97_887) for _ in range(8)))
    text = seen_text()
    assert "Number of GPUs: 8" in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("GPU7") == 2  # a column and a row


def test_topology_tells_nvlink_switches_and_bridges(nvml):
    nvml(*(Fake() for _ in range(2)))
    switched = seen_text()
    assert "GPU0  X     NV18" in switched
    nvml(Fake(links=4, bridged=1), Fake(links=4, bridged=0), Fake(links=0))
    lines = seen_text().splitlines()
    assert "GPU0  X     NV4   SYS" in lines
    assert "GPU2  SYS   SYS   X" in lines


def test_what_a_driver_does_not_give_is_not_available_and_nothing_breaks(nvml):
    bare_gpu = Fake("Tesla K80", total=0, capability=(3, 7))
    for name in ("limit", "usage", "temperature", "pcie", "mig", "processes", "links"):
        bare_gpu.fields[name] = None
    nvml(bare_gpu)
    machine = gpu_info.read_machine_info(Path("outputs"), {})
    gpu = machine.gpu_snapshot.gpus[0]
    assert (gpu.power_cap_watts, gpu.temperature_celsius, gpu.mig_enabled, gpu.processes) == (None, None, None, None)
    assert gpu.unified  # memory is not supported, and the GPU answers: it has the host's
    text = "\n".join(gpu_info.machine_lines(machine))
    assert "n/a/n/a" in text
    assert machine.as_json()["gpus"][0]["power_cap_watts"] is None


def test_a_gpu_that_is_lost_is_said_and_the_others_are_shown(nvml, bare):
    nvml(Fake(), Fake(lost=True))
    text = seen_text()
    assert "GPU 1 does not answer: GPU is lost" in text
    assert "Number of GPUs: 1" in text
    assert "NVIDIA H200" in text


def test_cuda_visible_devices_is_respected_and_said(nvml):
    nvml(*(Fake() for _ in range(4)))
    text = seen_text({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert "Number of GPUs: 2" in text
    assert "CUDA_VISIBLE_DEVICES=2,0: GPU 2 is cuda:0, GPU 0 is cuda:1" in text
    nothing = seen_text({"CUDA_VISIBLE_DEVICES": ""})
    assert "Number of GPUs: 0" in nothing
    assert "no GPU is visible" in nothing


def test_names_with_control_characters_or_markup_are_escaped(nvml):
    nvml(Fake("NVIDIA \x1b[31m[bold]X"))
    text = seen_text({"CUDA_VISIBLE_DEVICES": "0"}) + seen_text({"CUDA_VISIBLE_DEVICES": "0\x1b]0;x"})
    assert "\x1b" not in text
    assert r"\x1b[31m[bold]X" in text


def test_processes_that_are_not_known_here_have_no_name(nvml):
    nvml(Fake(processes=[(2**22 + 7, None)]))
    assert f"GPU 0 process {2**22 + 7} (n/a): n/a GiB" in seen_text()


# --- MIG --------------------------------------------------------------------------------------------------------------


def test_instances_of_a_split_gpu_are_listed(nvml):
    class Split(FakeNvml):
        def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
            return 7

        def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> Any:
            if place > 1:
                raise NotSupported
            return (handle, place)

        def nvmlDeviceGetName(self, handle: Any) -> bytes:
            return "NVIDIA A100 MIG 3g.20gb" if isinstance(handle, tuple) else "NVIDIA A100-SXM4-40GB"

        def nvmlDeviceGetUUID(self, handle: Any) -> str:
            return f"MIG-{handle[1]}" if isinstance(handle, tuple) else "GPU-a"

        def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
            total = 19_968 if isinstance(handle, tuple) else 40_960
            return SimpleNamespace(total=total * MIB, free=(total - 13) * MIB, used=13 * MIB)

        def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
            return []

    fake = Split(Fake(mig=(1, 1), capability=(8, 0)))
    sys.modules["pynvml"] = fake  # type: ignore[assignment]
    try:
        machine = gpu_info.read_machine_info(Path("outputs"), {})
    finally:
        del sys.modules["pynvml"]
    text = gpu_info.machine_lines(machine)
    assert "Number of GPUs: 1" in text  # CUDA sees one instance
    assert "GPU 0 instance 3g.20gb: 19.5 GiB, 19.5 free, MIG-1" in text
    assert any("sees one instance only, MIG-0" in line for line in text)


# --- no GPU, host, software -------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_has_none(bare, monkeypatch):
    assert "Number of GPUs: 0" in seen_text()
    monkeypatch.setattr(gpu_info, "find_unusable_accelerator", lambda environment: "A GPU is there, but it is not seen")
    assert "A GPU is there, but it is not seen" in seen_text()


def test_the_disk_is_that_of_the_outputs(bare, tmp_path):
    there = gpu_info.read_machine_info(tmp_path, {})
    assert there.host["disk_bytes"] >= there.host["disk_free_bytes"] > 0
    missing = gpu_info.read_machine_info(tmp_path / "no" / "outputs", {})
    for machine in (there, missing):
        assert machine.host["disk_folder"] == str(tmp_path)
        assert any(line.endswith(f"GiB free at {tmp_path}") for line in gpu_info.machine_lines(machine))


def test_versions_are_read_without_importing(monkeypatch):
    assert installed_version("pydantic")
    assert installed_version("no-such-distribution") is None
    assert torch_cuda_version() is None or torch_hip_version() is None
    asked = {"nvidia-nccl-cu12": "2.27.5"}
    monkeypatch.setattr("sft_play.machine.software.installed_version", asked.get)
    assert nccl_package() == ("nvidia-nccl-cu12", "2.27.5")


def test_torch_is_asked_only_where_full_is_wanted(bare, monkeypatch):
    asked = []
    monkeypatch.setattr(
        gpu_info, "read_torch_report", lambda environment: asked.append(environment) or ["PyTorch version: 2"]
    )
    seen_text()
    assert not asked
    text = seen_text(includes_torch=True)
    assert len(asked) == 1
    assert "torch, asked:\n  PyTorch version: 2" in text


@pytest.mark.build
def test_torch_answers_from_a_process_of_its_own():
    told = gpu_info.read_torch_report(dict(os.environ))
    assert f"PyTorch version: {installed_version('torch')}" in told
    assert any(line.startswith("Is CUDA available: ") for line in told)
    assert not any("Vulnerability" in line for line in told)


def test_a_torch_that_does_not_answer_is_said():
    assert "timed out after 0.01" in gpu_info.read_torch_report(dict(os.environ), timeout_s=0.01)[0]
    broken = gpu_info.read_torch_report({"PYTHONHOME": "/nowhere"})
    assert "exit code" in broken[0]


def test_nothing_heavy_is_imported_for_it():
    heavy = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes", "numpy"}
    code = (
        "import os, sys; from pathlib import Path; "
        "from sft_play.diagnose import gpu_info, memory_check; "
        "gpu_info.machine_lines(gpu_info.read_machine_info(Path('outputs'), os.environ)); "
        "memory_check.format_memory_snapshot(memory_check.read_memory_snapshot(Path('outputs'), os.environ)); "
        f"sys.exit(str(sorted(set(sys.modules) & {heavy!r})) if set(sys.modules) & {heavy!r} else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


# --- a named machine --------------------------------------------------------------------------------------------------


def test_a_named_machine_shows_what_a_plan_would_assume_and_says_so():
    machine = parse_hardware("2xH200,ram=1TiB,cores=64")
    text = gpu_info.assumed_machine_lines(machine, "2xH200")
    assert text[0].startswith("Assumed, not detected: HARDWARE=2xH200")
    assert text[1] == "Number of GPUs: 2"
    assert {"  bandwidth: 4,800 GB/s", "  link_bytes_per_s: 450 GB/s", "  bf16_flops: 989.4 TFLOPS"} < set(text)
    assert max(map(len, text)) <= 100
    answer = gpu_info.assumed_machine_json(machine)
    assert (answer["assumed"], answer["number_of_gpus"]) == (True, 2)
    assert answer["gpus"][1]["bandwidth"] == 4800e9
    assert answer["gpus"][0]["total_bytes"] == machine.gpus[0].total_bytes
    assert (answer["ram_bytes"], answer["ram_given"]) == (2**40, True)


def test_a_named_cluster_shows_its_network_and_not_what_is_not_known():
    text = gpu_info.assumed_machine_lines(parse_hardware("2x8xMyGPU,mem=24GiB,network=400Gbps,price=2.5"), "x")
    assert {"Number of GPUs: 16", "  nodes: 2", "  network_bytes_per_s: 50 GB/s", "  ram_given: False"} < set(text)
    assert "  price_per_gpu_hour: 2.5" in text
    assert not any(line.startswith("  bandwidth") for line in text)
    assert gpu_info.assumed_machine_lines(parse_hardware("cpu"), "cpu")[1] == "Number of GPUs: 0"


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_one_object_and_writes_it(nvml, command, monkeypatch, tmp_path):
    nvml(Fake(), Fake())
    code, printed = command("gpu-info")
    assert code == 0
    assert "Number of GPUs: 2" in printed.splitlines()
    out = tmp_path / "gpus.json"
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("JSON", "1")
    code, printed = command("gpu-info")
    assert code == 0
    assert json.loads(printed)["gpus"][1]["total_bytes"] == 143_771 * MIB
    assert json.loads(out.read_text())["number_of_gpus"] == 2
    monkeypatch.setenv("HARDWARE", "8xH100")
    code, printed = command("gpu-info")
    assert (code, json.loads(printed)["assumed"], json.loads(printed)["number_of_gpus"]) == (0, True, 8)


def test_a_machine_that_means_nothing_is_refused(command):
    code, printed = command("gpu-info", "--hardware", "2xH2000")
    assert code == 2
    assert "H2000 is not in the catalogue" in printed
