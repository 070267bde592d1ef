"""make gpu-info: NVML, a named machine, and a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.diagnose import machine_pages
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import installed_version, nccl_package, torch_cuda_version, torch_hip_version
from tests.conftest import ROOT
from tests.fake_nvml import H200, FakeGpu, FakeNvml

MIB = 2**20
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes", "numpy"}


@pytest.fixture
def nvml(monkeypatch):
    def install(*gpus: FakeGpu) -> FakeNvml:
        fake = FakeNvml(*gpus)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def h200(number: int = 0, **facts: Any) -> FakeGpu:
    return FakeGpu(f"GPU-{number}", **{"name": H200, "total": 143_771, "used": 614, "reserved": 479,
                                       "capability": (9, 0), "links": 18, **facts})  # fmt: skip


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without NVML or any sign of a GPU: the folder of its programs."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(machine_pages, "find_unusable_accelerator", lambda environment: None)
    return folder


def look(environment: dict[str, str] | None = None, **options: Any) -> tuple[dict[str, Any], str]:
    data, lines = machine_pages.read_machine_info(Path("outputs"), environment or {}, **options)
    return json.loads(json.dumps(data)), "\n".join(lines)


# --- this machine -----------------------------------------------------------------------------------------------------
def test_two_gpus_are_counted_on_a_line_of_its_own_and_told_in_detail(nvml):
    fake = nvml(h200(processes=[(os.getpid(), 512 * MIB), (2**22 + 7, None)]), h200(1))
    data, text = look()
    first = data["gpus"][0]
    assert [first[f"{kind}_bytes"] for kind in ("total", "used", "reserved", "free")] == [
        size * MIB for size in (143_771, 614, 479, 143_771 - 614 - 479)
    ]
    assert (first["compute_capability"], first["bf16"], first["fp8"]) == ("9.0", True, True)
    assert (first["power_cap_watts"], first["temperature_celsius"]) == (700.0, 31)
    assert first["pcie"] == {"generation": 1, "max_generation": 5, "lanes": 16, "max_lanes": 16}
    assert [item["used_bytes"] for item in first["processes"]] == [512 * MIB, None]
    lines = text.splitlines()
    assert {"Number of GPUs: 2", "Driver: 580.82.07, which runs CUDA up to 13.1"} < set(lines)
    row = next(line for line in lines if line.startswith("  0 "))
    assert row.split()[1:] == ["NVIDIA", "H200", "140.4", "0.6", "139.3", "9.0", "yes", "yes", "700", "31",
                               "1x16/5x16", "no"]  # fmt: skip
    assert any(f"process {os.getpid()} " in line and "0.50" in line for line in lines)
    assert f"GPU 0 process {2**22 + 7} (n/a): n/a GiB" in lines  # of another container: not known here
    assert not fake.is_open


def test_eight_gpus_fit_100_columns(nvml):
    nvml(*(h200(n, name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition") for n in range(8)))
    _, text = look()
    assert "Number of GPUs: 8" in text
    assert max(map(len, text.splitlines())) <= 100


def test_topology_tells_nvlink_switches_and_bridges(nvml):
    nvml(h200(), h200(1))
    assert look()[0]["topology"]["links"] == [["X", "NV18"], ["NV18", "X"]]
    nvml(h200(links=4, bridged=1), h200(1, links=4, bridged=0), h200(2, links=0))
    topology = look()[0]["topology"]
    assert topology["links"] == [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert topology["peer"][2] == [False, False, None]


def test_what_a_driver_does_not_give_is_not_available_and_nothing_breaks(nvml):
    nvml(FakeGpu("GPU-0", "Tesla K80", 0, (3, 7), None, limit=None, temperature=None, pcie=None, processes=None))
    data, text = look()
    gpu = data["gpus"][0]
    facts = ("power_cap_watts", "temperature_celsius", "mig_enabled", "processes")
    assert [gpu[fact] for fact in facts] == [None] * 4
    assert gpu["unified"]  # memory is not supported, and the GPU answers: it has the host's
    assert "n/axn/a/n/axn/a" in text


def test_a_gpu_that_is_lost_is_said_and_the_others_are_shown(nvml, bare):
    nvml(h200(), h200(1, is_lost=True))
    _, text = look()
    assert "Number of GPUs: 1" in text
    assert "GPU 1 does not answer its driver (GPU is lost)" in text


def test_cuda_visible_devices_is_respected_and_said(nvml):
    nvml(*map(h200, range(4)))
    data, text = look({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert (data["number_of_gpus"], data["visible_gpus"]) == (2, [2, 0])
    assert "CUDA_VISIBLE_DEVICES=2,0: GPU 2 is cuda:0, GPU 0 is cuda:1" in text
    data, text = look({"CUDA_VISIBLE_DEVICES": ""})
    assert (data["number_of_gpus"], "no GPU is visible" in text) == (0, True)
    nvml(h200(name="NVIDIA \x1b[31m[bold]X"))
    text = look({"CUDA_VISIBLE_DEVICES": "0"})[1] + look({"CUDA_VISIBLE_DEVICES": "0\x1b]0;x"})[1]
    assert "\x1b" not in text
    assert r"\x1b[31m[bold]X" in text


def test_instances_of_a_split_gpu_are_listed(nvml):
    nvml(FakeGpu("GPU-a", instances=[("MIG-0", "3g.20gb", 19_968), ("MIG-1", "3g.20gb", 19_968)]))
    data, text = look()
    assert data["number_of_gpus"] == 1  # CUDA sees one instance
    assert data["gpus"][0]["instances"][1]["free_bytes"] == (19_968 - 13) * MIB
    assert "GPU 0 instance 3g.20gb: MIG-1" in text
    assert "sees one instance only, MIG-0" in text


def test_a_machine_without_a_gpu_has_none(bare, monkeypatch, tmp_path):
    assert look()[0]["number_of_gpus"] == 0
    told = "A GPU is there, but it is not seen"
    monkeypatch.setattr(machine_pages, "find_unusable_accelerator", lambda environment: told)
    data, text = look()
    assert data["unused_accelerator"] in text
    for folder in (tmp_path, tmp_path / "no" / "outputs"):  # the disk is that of the outputs
        data, lines = machine_pages.read_machine_info(folder, {})
        assert data["host"]["disk_bytes"] >= data["host"]["disk_free_bytes"] > 0
        assert data["host"]["disk_folder"] == str(tmp_path)
        assert any(line.endswith(f"GiB free at {tmp_path}") for line in lines)


def test_versions_are_read_without_importing(monkeypatch):
    assert installed_version("pydantic")
    assert installed_version("no-such-distribution") is None
    assert torch_cuda_version() is None or torch_hip_version() is None
    asked = {"nvidia-nccl-cu12": "2.27.5"}
    monkeypatch.setattr("sft_play.machine.software.installed_version", asked.get)
    assert nccl_package() == ("nvidia-nccl-cu12", "2.27.5")
    code = (
        "import os, sys; from pathlib import Path; "
        "from sft_play.diagnose import machine_pages; "
        "machine_pages.read_machine_info(Path('outputs'), os.environ); "
        "machine_pages.format_memory_snapshot(machine_pages.read_memory_snapshot(Path('outputs'), os.environ)); "
        f"sys.exit(str(sorted(set(sys.modules) & {HEAVY!r})) if set(sys.modules) & {HEAVY!r} else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_torch_is_asked_only_where_full_is_wanted(bare, monkeypatch):
    monkeypatch.setattr(machine_pages, "read_torch_report", lambda environment: ["PyTorch version: 2"])
    assert look()[0]["torch"] is None
    data, text = look(includes_torch=True)
    assert data["torch"] == ["PyTorch version: 2"]
    assert "torch, asked:\n  PyTorch version: 2" in text


@pytest.mark.build
def test_torch_answers_from_a_process_of_its_own(tmp_path):
    told = machine_pages.read_torch_report(dict(os.environ))
    assert f"PyTorch version: {installed_version('torch')}" in told
    assert not any("Vulnerability" in line for line in told)
    assert "timed out after 0.01" in machine_pages.read_torch_report(dict(os.environ), timeout_s=0.01)[0]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    assert machine_pages.read_torch_report(dict(os.environ, PYTHONPATH=str(tmp_path))) == [
        "it ended with exit status 1: ImportError: libcudart.so.13: cannot open"
    ]


# --- a named machine --------------------------------------------------------------------------------------------------
def test_a_named_machine_shows_what_a_plan_would_assume_and_says_so():
    machine = parse_hardware("2xH200,ram=1TiB,cores=64")
    answer, text = machine_pages.assumed_machine_info(machine, "2xH200")
    assert text[0].startswith("Assumed, not detected: HARDWARE=2xH200")
    assert text[1] == "Number of GPUs: 2"
    assert {"  bandwidth: 4,800 GB/s", "  link_bytes_per_s: 450 GB/s", "  bf16_flops: 989.4 TFLOPS"} < set(text)
    assert max(map(len, text)) <= 100
    assert (answer["assumed"], answer["number_of_gpus"], answer["ram_bytes"]) == (True, 2, 2**40)
    assert (answer["gpus"][1]["bandwidth"], answer["gpus"][0]["total_bytes"]) == (4800e9, machine.gpus[0].total_bytes)
    cluster = parse_hardware("2x8xMyGPU,mem=24GiB,network=400Gbps,price=2.5")
    _, text = machine_pages.assumed_machine_info(cluster, "a cluster")
    assert {"Number of GPUs: 16", "  nodes: 2", "  network_bytes_per_s: 50 GB/s", "  ram_given: False"} < set(text)
    assert "  price_per_gpu_hour: 2.5" in text
    assert not any(line.startswith("  bandwidth") for line in text)
    assert machine_pages.assumed_machine_info(parse_hardware("cpu"), "cpu")[1][1] == "Number of GPUs: 0"


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command_prints_one_object_and_writes_it(nvml, command, monkeypatch, tmp_path):
    nvml(h200(), h200(1))
    code, printed = command("gpu-info")
    assert (code, "Number of GPUs: 2" in printed.splitlines()) == (0, True)
    out = tmp_path / "gpus.json"
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("JSON", "1")
    code, printed = command("gpu-info")
    assert (code, json.loads(printed)["gpus"][1]["total_bytes"]) == (0, 143_771 * MIB)
    assert json.loads(out.read_text())["number_of_gpus"] == 2
    monkeypatch.setenv("HARDWARE", "8xH100")
    code, printed = command("gpu-info")
    assert (code, json.loads(printed)["assumed"], json.loads(printed)["number_of_gpus"]) == (0, True, 8)


def test_a_machine_that_means_nothing_is_refused(command):
    code, printed = command("gpu-info", "--hardware", "2xH2000")
    assert (code, "H2000 is not in the catalogue" in printed) == (2, True)
