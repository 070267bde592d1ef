"""This machine for training: GPUs, driver, host, disk; in under a second and without importing torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.facts.gpus import nvml
from sft_play.facts.gpus.gpu import GpuSnapshot
from sft_play.facts.gpus.unusable_accelerators import find_unusable_accelerator
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.host import nearest_disk_space
from sft_play.facts.installed import installed_version, nccl_package, torch_cuda_version, torch_hip_version
from sft_play.log import one_line

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
