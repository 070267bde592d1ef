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
from sft_play.facts.gpus.unusable_accelerators import unusable_accelerator
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.host import nearest_disk_space
from sft_play.facts.installed import nccl_package, torch_cuda_version, torch_hip_version, installed_version
from sft_play.log import one_line

# An import of torch from a cold network disk takes a minute and more.
TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Host:
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
class Software:
    """Versions of what computes on GPUs, read without importing it; None: not installed."""

    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    nccl: str | None
    nccl_package: str | None


@dataclass(frozen=True)
class Machine:
    """One look at this machine. `visible` are the indices of the GPUs that a run here would see, in its order;
    `asked_torch` is torch's own report, None where it was not asked."""

    seen: GpuSnapshot
    visible: tuple[int, ...]
    visible_setting: str | None
    hardware: Hardware
    host: Host
    software: Software
    asked_torch: list[str] | None = None
    unused: str | None = None
    """An accelerator of this machine that a run would not see."""

    @property
    def count(self) -> int:
        """GPUs, or instances of split ones, that a run here would see."""
        return len(self.hardware.gpus)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: bytes, watts and degrees Celsius as numbers, null where the driver does not say."""
        seen = asdict(self.seen)
        return {
            "number_of_gpus": self.count,
            "assumed": False,
            "source": seen["source"],
            "visible_setting": self.visible_setting,
            "visible_gpus": list(self.visible),
            "usable_by_a_plan": self.count > 0,
            "notes": list(self.hardware.notes),
            "gpus": seen["gpus"],
            "topology": seen["topology"],
            "driver": {"version": seen["driver"], "newest_cuda": seen["driver_cuda"]},
            "host": asdict(self.host),
            "software": asdict(self.software),
            "torch": self.asked_torch,
            "unused_accelerator": self.unused,
            "without_a_gpu": without_gpu() if not self.count else [],
        }


def see_machine(outputs: Path, environment: Mapping[str, str], *, full: bool = False) -> Machine:
    """This machine, as a run with `environment` would see it, with the disk of the run folders (`outputs`); `full`:
    torch is asked too, in a process of its own."""
    hardware = detect_hardware(environment)
    seen = all_gpus()
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    nccl_name, nccl_version = nccl_package() or (None, None)
    folder, space = nearest_disk_space(outputs)
    return Machine(
        seen=seen,
        visible=tuple(dict.fromkeys(gpu.index for gpu in hardware.gpus)),
        visible_setting=None if variable is None else f"CUDA_VISIBLE_DEVICES={variable}",
        hardware=hardware,
        host=Host(
            cpu=hardware.cpu_name,
            physical_cores=psutil.cpu_count(logical=False),
            logical_cores=psutil.cpu_count(),
            usable_cores=hardware.cpu_cores,
            ram_bytes=hardware.ram_bytes,
            ram_free_bytes=hardware.ram_free_bytes,
            outputs=str(outputs),
            disk_folder=str(folder),
            disk_bytes=space.total if space else None,
            disk_free_bytes=space.free if space else None,
        ),
        software=Software(installed_version("torch"), torch_cuda_version(), torch_hip_version(), nccl_version, nccl_name),
        asked_torch=ask_torch(environment) if full else None,
        unused=None if hardware.gpus else unusable_accelerator(environment),
    )


def all_gpus(*, topology: bool = True) -> GpuSnapshot:
    """Every GPU of this machine, visible to this process or not."""
    return nvml.gpu_snapshot(topology=topology) or GpuSnapshot()


def ask_torch(environment: Mapping[str, str], *, timeout_s: float = TORCH_TIMEOUT_S) -> list[str]:
    """Torch's own report of its build and of the GPUs that it sees, line by line (`torch.utils.collect_env`)."""
    words = [sys.executable, "-W", "ignore", "-m", "torch.utils.collect_env"]
    try:
        answer = subprocess.run(
            words, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"it did not answer: {one_line(str(error))}"]
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return [f"it ended with exit code {answer.returncode}: {one_line(last)}"]
    about_torch = answer.stdout.partition("\nCPU:")[0]  # the rest is of the machine, and known
    return [one_line(line) for line in about_torch.splitlines()[1:] if line.strip()]


def without_gpu() -> list[str]:
    """What works on a machine without a GPU that can be used."""
    return [
        "make plan HARDWARE=2xH200 plans for any GPU in the catalogue, or for one that you describe",
        "make train trains on the CPU: the starter, and models of a few million parameters",
        "make train-distributed runs every layout over CPU ranks (ddp, fsdp, ZeRO-1 to 3, with and without offload)",
        "make verify-layouts and make doctor work as they do with GPUs",
    ]
