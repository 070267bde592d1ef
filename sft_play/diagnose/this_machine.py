"""This machine, read for `make gpu-info` (`MachineInfo`) and for the doctor's checks (`SystemFacts`)."""

from __future__ import annotations

import contextlib
import platform
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.utils import canonicalize_name

from sft_play.log import one_line
from sft_play.machine import nvml
from sft_play.machine.gpu import GpuSnapshot
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.host import DiskSpace, disk_space, nearest_disk_space
from sft_play.machine.software import installed_version, nccl_package, torch_cuda_version, torch_hip_version
from sft_play.machine.visible_gpus import find_unusable_accelerator

# What `make gpu-info` shows: GPUs, driver, host, disk; in under a second and without importing
# torch.

# An import of torch from a cold network disk takes a minute and more.
TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class HostInfo:
    """The machine around the GPUs: cores, RAM as far as this process may use it, and the disk of the run folders."""

    cpu: str
    physical_cores: int | None
    logical_cores: int | None
    usable_cores: int
    ram_bytes: int
    ram_free_bytes: int
    outputs: str
    disk_folder: str
    """The nearest folder above the outputs that exists."""
    disk_bytes: int | None
    disk_free_bytes: int | None


@dataclass(frozen=True)
class SoftwareVersions:
    """Versions of what computes on GPUs, read without importing it; None: not installed."""

    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    nccl: str | None
    nccl_package: str | None


@dataclass(frozen=True)
class MachineInfo:
    """One look at this machine. `visible_gpus` are the indices of the GPUs that a run here would see, in its
    order; `torch_report` is torch's own, None where it was not asked."""

    gpu_snapshot: GpuSnapshot
    visible_gpus: tuple[int, ...]
    visible_setting: str | None
    hardware: Hardware
    host: HostInfo
    software: SoftwareVersions
    torch_report: list[str] | None = None
    unused_accelerator: str | None = None
    """An accelerator of this machine that a run would not see."""

    @property
    def gpu_count(self) -> int:
        """GPUs, or instances of split ones, that a run here would see."""
        return len(self.hardware.gpus)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: bytes, watts and degrees Celsius as numbers, null where the driver does not say."""
        snapshot = asdict(self.gpu_snapshot)
        return {
            "number_of_gpus": self.gpu_count,
            "assumed": False,
            "source": snapshot["source"],
            "visible_setting": self.visible_setting,
            "visible_gpus": list(self.visible_gpus),
            "usable_by_a_plan": self.gpu_count > 0,
            "notes": list(self.hardware.notes),
            "gpus": snapshot["gpus"],
            "topology": snapshot["topology"],
            "driver": {"version": snapshot["driver"], "newest_cuda": snapshot["driver_cuda"]},
            "host": asdict(self.host),
            "software": asdict(self.software),
            "torch": self.torch_report,
            "unused_accelerator": self.unused_accelerator,
            "without_a_gpu": cpu_capabilities() if not self.gpu_count else [],
        }


def read_machine_info(outputs: Path, environment: Mapping[str, str], *, includes_torch: bool = False) -> MachineInfo:
    """This machine, as a run with `environment` would see it, with the disk of the run folders (`outputs`);
    `includes_torch`: torch is asked too, in a process of its own."""
    hardware = detect_hardware(environment)
    gpu_snapshot = read_all_gpus()
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    nccl_name, nccl_version = nccl_package() or (None, None)
    disk_folder, disk = nearest_disk_space(outputs)
    return MachineInfo(
        gpu_snapshot=gpu_snapshot,
        visible_gpus=tuple(dict.fromkeys(gpu.index for gpu in hardware.gpus)),
        visible_setting=None if visible_devices is None else f"CUDA_VISIBLE_DEVICES={visible_devices}",
        hardware=hardware,
        host=HostInfo(
            cpu=hardware.cpu_name,
            physical_cores=psutil.cpu_count(logical=False),
            logical_cores=psutil.cpu_count(),
            usable_cores=hardware.cpu_cores,
            ram_bytes=hardware.ram_bytes,
            ram_free_bytes=hardware.ram_free_bytes,
            outputs=str(outputs),
            disk_folder=str(disk_folder),
            disk_bytes=disk.total if disk else None,
            disk_free_bytes=disk.free if disk else None,
        ),
        software=SoftwareVersions(
            installed_version("torch"), torch_cuda_version(), torch_hip_version(), nccl_version, nccl_name
        ),
        torch_report=read_torch_report(environment) if includes_torch else None,
        unused_accelerator=None if hardware.gpus else find_unusable_accelerator(environment),
    )


def read_all_gpus(*, includes_topology: bool = True) -> GpuSnapshot:
    """Every GPU of this machine, visible to this process or not."""
    return nvml.gpu_snapshot(topology=includes_topology) or GpuSnapshot()


def read_torch_report(environment: Mapping[str, str], *, timeout_s: float = TORCH_TIMEOUT_S) -> list[str]:
    """Torch's own report of its build and of the GPUs that it sees, line by line (`torch.utils.collect_env`)."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.utils.collect_env"]
    try:
        result = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"it did not answer: {one_line(str(error))}"]
    if result.returncode:
        last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return [f"it ended with exit code {result.returncode}: {one_line(last_line)}"]
    report = result.stdout.partition("\nCPU:")[0]  # the rest is of the machine, and known
    return [one_line(line) for line in report.splitlines()[1:] if line.strip()]


def cpu_capabilities() -> list[str]:
    """What works on a machine without a GPU that can be used."""
    return [
        "make plan HARDWARE=2xH200 plans for any GPU in the catalogue, or for one that you describe",
        "make train trains on the CPU: the starter, and models of a few million parameters",
        "make train-distributed runs every layout over CPU ranks (ddp, fsdp, ZeRO-1 to 3, with and without offload)",
        "make verify-layouts and make doctor work as they do with GPUs",
    ]


# --------------------------------------------------------------------------------------------------
# What the doctor's checks are given: packages, driver, shared memory.
#
# `read_system_facts` is the only reader; the checks get what was read as arguments.
DISTRIBUTION = "sft-play"

SHM_PATH = Path("/dev/shm")

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@dataclass(frozen=True)
class SystemFacts:
    """What was read. Sizes are in bytes; packages that are not installed are absent."""

    hardware: Hardware
    python: str = ""
    os_name: str = "Linux"
    cpu_architecture: str = "x86_64"
    kernel: str = ""
    hostname: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    torch_cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    shared_memory: DiskSpace | None = None
    """None where /dev/shm is not a separate file system."""
    environment: Mapping[str, str] = field(default_factory=dict)


def read_system_facts(hardware: Hardware, environment: Mapping[str, str]) -> SystemFacts:
    """Read everything about this machine that a check needs; what cannot be read stays unknown."""
    versions: dict[str, str] = {}
    for item in metadata.distributions():
        with contextlib.suppress(Exception):  # a damaged distribution has no name
            versions.setdefault(canonicalize_name(item.name), item.version)  # the first on the path is imported
    driver, driver_cuda = _read_driver() if hardware.gpus else (None, None)
    return SystemFacts(
        hardware=hardware,
        python=platform.python_version(),
        os_name=platform.system(),
        cpu_architecture=platform.machine(),
        kernel=platform.release(),
        hostname=socket.gethostname(),
        versions=versions,
        requirements=_read_requirements(),
        torch_cuda=torch_cuda_version(),
        nccl=(nccl_package() or (None, None))[1],
        driver=driver,
        driver_cuda=driver_cuda,
        shared_memory=disk_space(SHM_PATH) if SHM_PATH.is_mount() else None,
        environment={name: value for name, value in environment.items() if name.startswith("NCCL_")},
    )


def _read_requirements() -> tuple[str, ...]:
    if _PYPROJECT.is_file():
        project: dict[str, Any] = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            return tuple(project.get("dependencies", ()))
    with contextlib.suppress(metadata.PackageNotFoundError):
        return tuple(metadata.requires(DISTRIBUTION) or ())
    return ()


def _read_driver() -> tuple[str | None, tuple[int, int] | None]:
    with contextlib.suppress(Exception), nvml.open_nvml() as library:  # its own exceptions differ between platforms
        return nvml.driver_versions(library)
    return None, None
