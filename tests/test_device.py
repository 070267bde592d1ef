"""Where a run computes: accelerators that it would not see, models too large for a CPU, `train.device`, a compiler."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config.load import config_from_text, load_config
from sft_play.diagnose import doctor as rules
from sft_play.diagnose.surroundings import Surroundings
from sft_play.errors import HardwareError
from sft_play.facts import compiler
from sft_play.facts.compiler import Toolchain, obstacle, require_compiler
from sft_play.facts.gpus import unseen
from sft_play.facts.gpus.unseen import LEAST_VRAM, Devices, Nvml, PciDevice, torch_is_blind
from sft_play.facts.hardware import Hardware, named
from sft_play.launch import machine as launched
from sft_play.launch.command import visible_only
from sft_play.launch.machine import CPU_PARAMS, hide_gpus, machine_for, require_machine

GIB = 2**30
CPU = Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)
CPU_TORCH = "torch 2.13.0 is built for CPU only"
CUDA_TORCH = "torch 2.13.0 is built for CUDA 13.0"
H100 = PciDevice("0000:41:00.0", 0x10DE, 0x0302)


@pytest.fixture
def config(tmp_path):
    """A function that makes a run's config of overrides."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: org/model}\ndata: {train_path: rows.jsonl}\n")
    return lambda *overrides: load_config(path, overrides=overrides).config


def nvidia(**more) -> Devices:
    """A machine with an H100 whose driver is loaded, and a torch that could use it."""
    given = {"nodes": ("/dev/nvidia0",), "driver": "580.95", "pci": (H100,), "torch": CUDA_TORCH}
    return Devices(**{**given, "nvml": Nvml(error="NVML says no"), **more})


# --- what a machine shows ---------------------------------------------------------------------------------------------


def build(root: Path, files: dict[str, str]) -> Path:
    """A machine below a folder."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def pci(slot: str, vendor: str, kind: str, vram: int | None = None) -> dict[str, str]:
    """The files of a device on the PCI bus."""
    place = f"sys/bus/pci/devices/{slot}"
    found = {f"{place}/vendor": f"{vendor}\n", f"{place}/class": f"{kind}\n"}
    return found if vram is None else {**found, f"{place}/mem_info_vram_total": f"{vram}\n"}


def test_a_machine_is_read_from_its_files(tmp_path):
    root = build(tmp_path, {
        "dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n",
        ".dockerenv": "",
        **pci("0000:41:00.0", "0x10de", "0x030200"), **pci("0000:03:00.0", "0x1002", "0x038000", 192 * GIB),
        "sys/bus/pci/devices/0000:00:1f.0/vendor": "nonsense",
    })  # fmt: skip
    found = unseen.read_devices({"CUDA_VISIBLE_DEVICES": "3", "HOME": "/root"}, root=root, nvml=Nvml(error="no"))
    assert found.nodes == ("/dev/nvidia0", "/dev/nvidia1")
    assert (found.driver, found.container, found.wsl) == ("580.95.05", True, False)
    assert found.pci == (PciDevice("0000:03:00.0", 0x1002, 0x0380, 192 * GIB), H100)
    assert found.environment == {"CUDA_VISIBLE_DEVICES": "3"}
    bare = unseen.read_devices({}, root=tmp_path / "nothing", nvml=Nvml())
    assert (bare.nodes, bare.driver, bare.pci, bare.container) == ((), None, (), False)
    assert unseen.unseen(bare) is None
    assert unseen.read_devices(
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, root=tmp_path / "nothing", nvml=Nvml()
    ).container
    wsl = build(tmp_path / "wsl", {"dev/dxg": ""})
    assert not unseen.read_devices({}, root=wsl, nvml=Nvml()).wsl  # a Windows whose GPU is not NVIDIA's
    assert unseen.read_devices({}, root=build(wsl, {"usr/lib/wsl/lib/libcuda.so.1": ""}), nvml=Nvml()).wsl


CASES = {
    "a container without its GPUs": (
        nvidia(nodes=(), container=True), "driver 580.95 and 1 NVIDIA GPU on the PCI bus", "docker run --gpus all"),
    "no driver": (nvidia(nodes=(), driver=None), "no NVIDIA driver is loaded", "install it"),
    "a container that lost its GPUs": (
        nvidia(nvml=Nvml(error="Unknown Error"), container=True), "NVML says: Unknown", "or restart it"),
    "another fault": (
        nvidia(torch=CPU_TORCH), "NVML says: NVML says no (torch 2.13.0 is built for CPU only)", "dmesg"),
    "WSL": (
        Devices(wsl=True, nvml=Nvml(error="NVML Shared Library Not Found"), torch=CUDA_TORCH), "WSL's /dev/dxg",
        "wsl --update"),
    "hidden by a number that names none": (
        nvidia(nvml=Nvml(2), environment={"CUDA_VISIBLE_DEVICES": "7"}), "2 NVIDIA GPUs, and CUDA_VISIBLE_DEVICES=7",
        "unset it"),
    "split without an instance": (nvidia(nvml=Nvml(1)), "an NVIDIA GPU, and none that can be used", "nvidia-smi mig"),
    "AMD and Intel": (
        Devices(pci=(PciDevice("0000:03:00.0", 0x1002, 0x0300, LEAST_VRAM), PciDevice("0000:04:00.0", 0x1002, 0x1200),
                     PciDevice("0000:05:00.0", 0x8086, 0x0300)), torch="torch 2.13 is built for ROCm 7.1"),
        "2 AMD GPUs on the PCI bus (0000:03:00.0) and 1 Intel GPU on the PCI bus (0000:05:00.0) (torch 2.13 is built "
        "for ROCm 7.1)", "runs are planned for NVIDIA's GPUs and for CPUs"),
    "AMD without its driver": (
        Devices(pci=(PciDevice("0000:03:00.0", 0x1002, 0x0380),)), "shows 1 AMD GPU", "nothing is known"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_accelerator_that_a_run_would_not_see_is_named_with_its_remedy(name):
    devices, found, remedy = CASES[name]
    there = unseen.unseen(devices)
    assert there is not None
    assert found in there.found
    assert remedy in there.remedy
    assert devices.torch in there.found
    assert there.message.endswith("or train.device=cpu trains on the CPU")


@pytest.mark.parametrize(
    "devices",
    [
        Devices(pci=(PciDevice("0000:00:02.0", 0x8086, 0x0300),)),  # a processor's own GPU
        Devices(pci=(PciDevice("0000:03:00.0", 0x8086, 0x0200),)),  # a network card
        Devices(pci=(PciDevice("0000:05:00.0", 0x1002, 0x0300, LEAST_VRAM - 1),)),
        Devices(pci=(PciDevice("0000:05:00.0", 0x1002, 0x0300),)),  # one for a screen, of unknown memory
        Devices(pci=(PciDevice("0000:05:00.0", 0x1002, 0x0403),)),  # its sound
        Devices(pci=(PciDevice("0000:41:00.1", 0x10DE, 0x0403),)),
        Devices(pci=(PciDevice("0000:02:00.0", 0x1A03, 0x0300),)),  # a server's board
        nvidia(environment={"CUDA_VISIBLE_DEVICES": ""}),
        nvidia(environment={"CUDA_VISIBLE_DEVICES": " -1"}),
        Devices(pci=(PciDevice("0000:03:00.0", 0x1002, 0x1200),), environment={"HIP_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_what_is_no_accelerator_or_hidden_by_intention_stops_nothing(devices):
    assert unseen.unseen(devices) is None


def test_amd_s_variable_hides_nothing_of_nvidia_s():
    assert unseen.unseen(nvidia(environment={"HIP_VISIBLE_DEVICES": ""})) is not None


# --- the start of a run -----------------------------------------------------------------------------------------------


def start(config, hardware: Hardware, devices: Devices, monkeypatch, *, params: int = 1, environment=None) -> None:
    monkeypatch.setattr(launched, "read_devices", lambda _: devices)
    require_machine(config, hardware, environment or {}, params=lambda: params)


def test_a_run_on_the_cpu_beside_an_accelerator_stops_unless_it_is_asked_for(config, monkeypatch):
    with pytest.raises(HardwareError, match="dmesg"):
        start(config(), CPU, nvidia(), monkeypatch)
    start(config("train.device=cpu"), CPU, nvidia(), monkeypatch)
    start(config(), CPU, Devices(), monkeypatch)


def test_a_model_of_more_than_a_billion_parameters_is_trained_on_a_cpu_only_if_asked_for(config, monkeypatch):
    start(config(), CPU, Devices(), monkeypatch, params=CPU_PARAMS)
    with pytest.raises(HardwareError, match=r"no GPU was detected here, and org/model has 7\.6 billion parameters"):
        start(config(), CPU, Devices(), monkeypatch, params=7_600_000_000)
    with pytest.raises(HardwareError, match=r"train\.device=cpu"):
        start(config(), CPU, Devices(), monkeypatch, params=CPU_PARAMS + 1)
    start(config("train.device=cpu"), CPU, Devices(), monkeypatch, params=CPU_PARAMS + 1)


def test_a_plan_for_amd_s_gpus_says_what_it_goes_by():
    assert any("rules that were scored on NVIDIA's" in note for note in named("2xMI300X").notes)
    assert not named("2xH200").notes


def test_train_device_leaves_a_machine_its_cpu(config, monkeypatch):
    machine = named("2xH100")
    assert machine_for(config(), machine) is machine
    left = machine_for(config("train.device=cpu"), machine)
    assert (left.device, left.ranks, left.ram_bytes) == ("cpu", 1, machine.ram_bytes)
    environment = {"HIP_VISIBLE_DEVICES": "0"}
    hide_gpus(config(), environment)
    assert environment == {"HIP_VISIBLE_DEVICES": "0"}
    hide_gpus(config("train.device=cpu"), environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize("what", ["train", "train-distributed"])
def test_the_command_stops_before_anything_is_made(command, config, monkeypatch, tmp_path, tiny_llama, sums, what):
    from sft_play.launch import machine as of_ranks
    from sft_play.starting import start

    monkeypatch.chdir(tmp_path)
    for module in (of_ranks, start):
        monkeypatch.setattr(module, "detect", lambda: CPU)
    monkeypatch.setattr(launched, "read_devices", lambda _: CASES["a container without its GPUs"][0])
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"model": {"name": str(tiny_llama)}, "data": {"train_path": str(sums)}}))
    code, said = command(what, "--config", str(path))
    assert code == 2
    assert "given none of them (no /dev/nvidia0) (torch 2.13.0 is built for CUDA 13.0): start the container" in said
    assert not (tmp_path / "outputs").exists()


def test_a_plan_for_the_cpu_says_that_a_run_would_stop(command, monkeypatch, tmp_path, tiny_llama, sums):
    from sft_play.commands import request

    monkeypatch.setattr(request, "detect", lambda: CPU)
    monkeypatch.setattr(launched, "read_devices", lambda _: nvidia())
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"model": {"name": str(tiny_llama)}, "data": {"train_path": str(sums)}}))
    code, said = command("plan", "--config", str(path))
    assert (code, "a run here would stop: this machine shows /dev/nvidia0" in said) == (0, True)
    code, said = command("plan", "--config", str(path), "train.device=cpu")
    assert (code, "would stop" in said) == (0, False)


def test_gpus_are_named_by_slot():
    assert visible_only("2") == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}


# --- torch and the driver ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "words"),
    [(CPU_TORCH, "a build for CUDA comes with make setup"), (CUDA_TORCH, "torch says: the driver is too old"),
     ("torch 2.13 is built for ROCm 7.1", "a build for CUDA comes with make setup")],
)  # fmt: skip
def test_a_torch_that_cannot_use_the_gpu_says_what_it_is_built_for(torch, words):
    said = torch_is_blind("NVIDIA L4", "the driver is too old", torch=torch)
    assert said.startswith(f"the driver shows NVIDIA L4, but {torch} and cannot use it: {words}")
    assert said.endswith("or train.device=cpu trains on the CPU")


def test_an_accelerator_that_only_torch_sees_stops_a_run_on_the_cpu(config, monkeypatch, tiny_llama):
    import torch

    from sft_play.starting.plan_run import plan_for
    from sft_play.training.prepare.device_checks import check_device

    wanted = config(f"model.name={json.dumps(str(tiny_llama))}")
    on_cpu = wanted.model_copy(update={"train": wanted.train.model_copy(update={"device": "cpu"})})
    plan = plan_for(wanted, CPU)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    check_device(plan, wanted)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(HardwareError, match=r"sees an accelerator \(xpu\)"):
        check_device(plan, wanted)
    check_device(plan, on_cpu)


# --- a compiler for Triton --------------------------------------------------------------------------------------------

THERE = Toolchain(triton=True, compiler="/usr/bin/gcc", headers=Path("/nowhere/python3.11"), python="3.11.9")
NO_HEADERS = "trial.c:1:10: fatal error: Python.h: No such file or directory"


@pytest.mark.parametrize(
    ("there", "missing", "remedy"),
    [
        (replace(THERE, compiler=None),
         "no C compiler (neither CC, gcc nor clang) and no Python headers (/nowhere/python3.11/Python.h)",
         "apt-get install -y gcc g++ libc6-dev python3.11-dev"),
        (replace(THERE, failed=NO_HEADERS, python="3.13.1"),
         "no Python headers (/nowhere/python3.11/Python.h)", "apt-get install -y gcc g++ libc6-dev python3.13-dev"),
        (replace(THERE, failed="stdlib.h: No such file"), "the C compiler /usr/bin/gcc fails: stdlib.h",
         "install a C compiler (gcc or clang; CC= names one) and the headers of Python 3.11"),
    ],
)  # fmt: skip
def test_what_triton_misses_is_named_with_the_package(there, missing, remedy):
    found = obstacle(there)
    assert found is not None
    assert missing in found[0]
    assert remedy in found[1]
    assert obstacle(replace(there, built=True)) is None
    assert obstacle(replace(there, triton=False)) is None


def test_a_machine_that_can_build_is_passed():
    assert obstacle(THERE) is None


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
    home = {"TRITON_HOME": str(tmp_path)}
    assert compiler.find_toolchain(home).compiler is None
    clang = compilers("clang", "", 0)
    assert (compiler.find_toolchain(home).compiler, compiler.find_toolchain(home).failed) == (clang, None)
    gcc = compilers("gcc", NO_HEADERS, 1)
    assert (compiler.find_toolchain(home).compiler, compiler.find_toolchain(home).failed) == (gcc, NO_HEADERS)
    own = compilers("own", "no licence", 3)
    assert compiler.find_toolchain({**home, "CC": own}).failed == "no licence"
    assert "No such file" in str(compiler.find_toolchain({**home, "CC": "/nowhere/cc"}).failed)
    assert not compiler.find_toolchain(home).built
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    build(tmp_path, {f".triton/cache/abc/cuda_utils{suffix}": ""})
    assert compiler.find_toolchain(home).built
    assert not compiler.find_toolchain({"TRITON_CACHE_DIR": str(tmp_path / "elsewhere")}).built


def test_a_run_on_a_gpu_looks_for_a_compiler_before_anything_loads(monkeypatch, caplog):
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: replace(THERE, compiler=None))
    with pytest.raises(HardwareError, match=r"Triton builds the loss kernel.*no C compiler.*apt-get install -y gcc"):
        require_compiler(named("1xL4"), {})
    require_compiler(CPU, {})
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: replace(THERE, triton=False, compiler=None))
    require_compiler(named("1xMI300X"), {})
    assert "up to 3.6 GiB beyond the plan" in caplog.text


# --- the doctor -------------------------------------------------------------------------------------------------------


def verdicts(findings) -> list[tuple[str, str]]:
    return [(item.verdict, item.name) for item in findings]


def test_the_doctor_finds_what_a_run_would_stop_for(monkeypatch):
    config = config_from_text("model: {name: m}", name="r")

    def found(machine: Hardware, devices: Devices, params: int = 0, tools: Toolchain = THERE) -> str:
        monkeypatch.setattr(launched, "read_devices", lambda environment: devices)
        monkeypatch.setattr(compiler, "find_toolchain", lambda environment: tools)
        return rules.check_start(config, machine, {}, params=params).verdict

    assert found(CPU, nvidia()) == "FAIL"
    assert found(CPU, Devices(), CPU_PARAMS) == "PASS"
    assert found(CPU, Devices(), CPU_PARAMS + 1) == "FAIL"
    assert found(CPU, Devices(pci=(PciDevice("0000:03:00.0", 0x1002, 0x0380),))) == "FAIL"
    assert found(named("1xL4"), Devices(), CPU_PARAMS + 1) == "PASS"
    assert found(named("1xL4"), Devices(), tools=replace(THERE, failed=NO_HEADERS)) == "FAIL"


def test_the_doctor_wants_a_torch_for_the_gpus():
    around = Surroundings(hardware=named("2xL4"), versions={"torch": "2.13.0"})
    (found,) = rules.check_build(around)
    assert (found.verdict, "make setup" in str(found.remedy)) == ("FAIL", True)
    (found,) = rules.check_build(replace(around, torch_cuda="13.0", driver="580.1", driver_cuda=(13, 0)))
    assert (found.verdict, found.found) == ("PASS", "580.1 (CUDA 13.0 and older); torch 2.13.0 is built for CUDA 13.0")
