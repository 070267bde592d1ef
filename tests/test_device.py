"""Where a run computes: accelerators that it would not see, models too large for a CPU, `train.device`, a compiler."""

import contextlib
import json
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sft_play.config.load import load_config
from sft_play.errors import HardwareError
from sft_play.launch import planning
from sft_play.launch.planning import MAX_CPU_PARAMS, require_usable_hardware
from sft_play.launch.run_hardware import hide_gpus, restrict_to_device
from sft_play.machine import compiler, visible_gpus
from sft_play.machine.compiler import Toolchain, require_compiler, toolchain_obstacle
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.visible_gpus import NvmlStatus, explain_unusable_torch
from tests.conftest import write_run

GIB = 2**30
CPU = Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)
SHOWN = "this machine shows a GPU"


@pytest.fixture
def config(tmp_path):
    """A function that makes a run's config of overrides."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: org/model}\ndata: {train_path: rows.jsonl}\n")
    return lambda *overrides: load_config(path, overrides=overrides).config


def build(root: Path, files: dict[str, str]) -> Path:
    """A machine below a folder."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def pci(slot: str, vendor: str, kind: str) -> dict[str, str]:
    """The files of a device on the PCI bus."""
    place = f"sys/bus/pci/devices/{slot}"
    return {f"{place}/vendor": f"{vendor}\n", f"{place}/class": f"{kind}\n"}


NVIDIA_S = {
    "dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "", "proc/driver/nvidia/version": "NVRM version: 580.95",
    **pci("0000:41:00.0", "0x10de", "0x030200"),
}  # fmt: skip
"""A machine with an H100 whose driver is loaded."""
NO = NvmlStatus(error="NVML says no")
CASES: dict[str, tuple[dict[str, str], NvmlStatus, dict[str, str], tuple[str, ...]]] = {
    "a driver that does not answer": (
        NVIDIA_S, NO, {}, ("shows /dev/nvidia0 and NVIDIA's loaded driver and an NVIDIA GPU on the PCI bus", "says no",
                           "docker run --gpus all", "dmesg")),
    "no driver": (pci("0000:41:00.0", "0x10de", "0x030200"), NO, {}, ("an NVIDIA GPU on the PCI", "or update")),
    "WSL": ({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, NO, {}, ("WSL's /dev/dxg", "below WSL that of")),
    "hidden by a number that names none": (
        NVIDIA_S, NvmlStatus(2), {"CUDA_VISIBLE_DEVICES": "7"},
        ("2 NVIDIA GPUs, and CUDA_VISIBLE_DEVICES=7", "unset it")),
    "split without an instance": (
        NVIDIA_S, NvmlStatus(1), {}, ("an NVIDIA GPU, and none that can be used", "mig -cgi")),
    "AMD and Intel": (
        {**pci("0000:04:00.0", "0x1002", "0x120000"), **pci("0000:05:00.0", "0x8086", "0x038000")}, NvmlStatus(), {},
        ("AMD's on the PCI bus (0000:04:00.0) and an accelerator of Intel's on the PCI bus (0000:05:00.0)",
         "runs are planned for NVIDIA's GPUs and for CPUs", "nothing is known")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_accelerator_that_a_run_would_not_see_is_named_with_its_remedy(name, tmp_path):
    files, nvml, environment, words = CASES[name]
    said = visible_gpus.find_unusable_accelerator(environment, root=build(tmp_path, files), nvml=nvml)
    assert said is not None
    assert all(word in said for word in words), said
    assert f"({visible_gpus.torch_build_text()}): " in said
    assert said.endswith("or train.device=cpu trains on the CPU")


@pytest.mark.parametrize(("files", "environment"), [
    ({}, {}),
    (pci("0000:00:02.0", "0x8086", "0x030000"), {}),  # a processor's own GPU
    (pci("0000:00:02.0", "0x8086", "0x038000"), {}),  # without a screen
    (pci("0000:04:00.0", "0x1002", "0x120000"), {"HIP_VISIBLE_DEVICES": "-1"}),
    (pci("0000:03:00.0", "0x8086", "0x020000"), {}),  # a network card
    (pci("0000:05:00.0", "0x1002", "0x030000"), {}),  # one for a screen
    (pci("0000:41:00.1", "0x10de", "0x040300"), {}),
    (pci("0000:02:00.0", "0x1a03", "0x030000"), {}),  # a server's board
    ({"sys/bus/pci/devices/0000:00:1f.0/vendor": "nonsense"}, {}),
    ({"dev/dxg": ""}, {}),  # a Windows whose GPU is not NVIDIA's
    (NVIDIA_S, {"CUDA_VISIBLE_DEVICES": ""}),
    (NVIDIA_S, {"CUDA_VISIBLE_DEVICES": " -1"}),
])  # fmt: skip
def test_what_is_no_accelerator_or_hidden_by_intention_stops_nothing(files, environment, tmp_path):
    assert visible_gpus.find_unusable_accelerator(environment, root=build(tmp_path, files), nvml=NvmlStatus()) is None


def test_a_run_on_the_cpu_beside_an_accelerator_or_of_a_large_model_stops_unless_asked_for(config, monkeypatch):
    for accelerator, params, message in (
        (None, MAX_CPU_PARAMS, ""),
        (SHOWN, 1, "shows a GPU"),
        (None, 7_600_000_000, r"no GPU was detected here, and org/model has 7\.6 billion parameters"),
        (None, MAX_CPU_PARAMS + 1, r"train\.device=cpu"),
    ):
        monkeypatch.setattr(planning, "find_unusable_accelerator", lambda _, found=accelerator: found)
        require_usable_hardware(config("train.device=cpu"), CPU, {}, count_params=lambda params=params: params)
        with pytest.raises(HardwareError, match=message) if message else contextlib.nullcontext():
            require_usable_hardware(config(), CPU, {}, count_params=lambda params=params: params)


def test_train_device_leaves_a_machine_its_cpu(config, monkeypatch):
    machine = parse_hardware("2xH100")
    assert restrict_to_device(config(), machine) is machine
    left = restrict_to_device(config("train.device=cpu"), machine)
    assert (left.device, left.ranks, left.ram_bytes) == ("cpu", 1, machine.ram_bytes)
    environment = {"HIP_VISIBLE_DEVICES": "0"}
    hide_gpus(config(), environment)
    assert environment == {"HIP_VISIBLE_DEVICES": "0"}
    hide_gpus(config("train.device=cpu"), environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def test_a_plan_for_the_cpu_says_that_a_run_would_stop(succeed, monkeypatch, tmp_path, tiny_llama, sums):
    from sft_play.commands import request

    monkeypatch.setattr(request, "detect_hardware", lambda: CPU)
    monkeypatch.setattr(planning, "find_unusable_accelerator", lambda _: SHOWN)
    words = ("plan", "--config", str(write_run(tmp_path, tiny_llama, sums)))
    assert "a run here would stop: this machine shows a GPU" in succeed(*words)
    assert "would stop" not in succeed(*words, "train.device=cpu")


def test_a_torch_that_cannot_use_the_gpu_says_what_it_is_built_for():
    built = ("a build for CUDA comes with make setup", "torch says: the driver is too old")
    for kind, words in (("CPU only", built[0]), ("CUDA 13.0", built[1]), ("ROCm 7.1", built[0])):
        said = explain_unusable_torch("NVIDIA L4", "the driver is too old", torch_build=f"torch is built for {kind}")
        assert f"torch is built for {kind} and cannot use it: {words}" in said


def test_a_torch_without_cuda_stops_a_start_on_gpus(config, monkeypatch):
    loaded = SimpleNamespace(config=config(), runs=())
    gpus = replace(parse_hardware("1xL4"), named=False)
    monkeypatch.setattr(planning, "torch_build_version", lambda _: None)
    with pytest.raises(HardwareError, match="the driver shows NVIDIA L4, but torch"):
        planning.require_gpus_and_disk(loaded, gpus, [])
    planning.require_gpus_and_disk(loaded, CPU, [])
    monkeypatch.setattr(planning, "torch_build_version", lambda _: "13.0")
    planning.require_gpus_and_disk(loaded, gpus, [])


def test_an_accelerator_that_only_torch_sees_stops_a_run_on_the_cpu(config, monkeypatch, tiny_llama):
    import torch

    from sft_play.launch.planning import plan_run
    from sft_play.training.prepare.device_checks import check_device

    wanted = config(f"model.name={json.dumps(str(tiny_llama))}")
    on_cpu = wanted.model_copy(update={"train": wanted.train.model_copy(update={"device": "cpu"})})
    plan = plan_run(wanted, CPU)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    check_device(plan, wanted)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(HardwareError, match=r"sees an accelerator \(xpu\)"):
        check_device(plan, wanted)
    check_device(plan, on_cpu)


GCC = {"compiler": "/usr/bin/gcc", "headers": Path("/nowhere/python3.11")}
THERE = Toolchain(has_triton=True, python_version="3.11.9", **GCC)
NO_HEADERS = "trial.c:1:10: fatal error: Python.h: No such file or directory"


@pytest.mark.parametrize(("there", "missing", "remedy"), [
    (replace(THERE, compiler=None),
     "no C compiler (neither CC, gcc nor clang) and no Python headers (/nowhere/python3.11/Python.h)",
     "apt-get install -y gcc g++ libc6-dev python3.11-dev"),
    (replace(THERE, compile_error=NO_HEADERS, python_version="3.13.1"),
     "no Python headers (/nowhere/python3.11/Python.h)", "apt-get install -y gcc g++ libc6-dev python3.13-dev"),
    (replace(THERE, compile_error="stdlib.h: No such file"), "the C compiler /usr/bin/gcc fails: stdlib.h",
     "install a C compiler (gcc or clang; CC= names one) and the headers of Python 3.11"),
])  # fmt: skip
def test_what_triton_misses_is_named_with_the_package(there, missing, remedy):
    found = toolchain_obstacle(there)
    assert found is not None
    assert (missing in found[0], remedy in found[1]) == (True, True), found
    assert toolchain_obstacle(replace(there, has_built_module=True)) is None
    assert toolchain_obstacle(replace(there, has_triton=False)) is None


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """A function that writes a compiler which prints a text and ends with a code; only it is on the path."""
    folder = tmp_path / "compilers"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, said: str, code: int) -> str:
        (folder / name).write_text(f"#!/bin/sh\necho '{said}' >&2\nexit {code}\n")
        (folder / name).chmod(0o755)
        return str(folder / name)

    return write


def test_the_toolchain_is_tried(compilers, tmp_path):
    def found(**environment: str) -> Toolchain:
        return compiler.find_toolchain({"TRITON_HOME": str(tmp_path), **environment})

    assert found().compiler is None
    for name, said, code in (("clang", "", 0), ("gcc", NO_HEADERS, 1)):
        there = compilers(name, said, code)
        assert (found().compiler, found().compile_error) == (there, said or None)
    assert found(CC=compilers("own", "no licence", 3)).compile_error == "no licence"
    assert "No such file" in str(found(CC="/nowhere/cc").compile_error)
    assert not found().has_built_module
    build(tmp_path, {f".triton/cache/abc/cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}": ""})
    assert found().has_built_module
    assert not found(TRITON_CACHE_DIR=str(tmp_path / "elsewhere")).has_built_module


def test_a_run_on_a_gpu_looks_for_a_compiler_before_anything_loads(monkeypatch, caplog):
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: replace(THERE, compiler=None))
    with pytest.raises(HardwareError, match=r"Triton builds the loss kernel.*no C compiler.*apt-get install -y gcc"):
        require_compiler(parse_hardware("1xL4"), {})
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: replace(THERE, has_triton=False, compiler=None))
    require_compiler(parse_hardware("1xMI300X"), {})
    assert "up to 3.6 GiB beyond the plan" in caplog.text
