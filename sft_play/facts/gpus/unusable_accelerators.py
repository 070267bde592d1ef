"""Accelerators that a machine has but a run would not use: by device files, the PCI bus, the driver, torch's build.

Called where no GPU was found. torch is not imported and only NVML is started; everything is read below a root folder,
which tests make up. Runs are planned for NVIDIA's GPUs; AMD's and Intel's are found for a message alone (Apple's by
torch, `training.prepare.device_checks`). A GPU that only drives a screen does not count: Intel's on the CPU's own bus,
AMD's with less memory than `MIN_VRAM`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.facts.gpus.nvml import open_nvml, read_gpu_snapshot
from sft_play.facts.gpus.visible_gpus import gpu_obstacle
from sft_play.facts.host import read_text_or_empty
from sft_play.facts.installed import installed_version, torch_cuda_version, torch_hip_version
from sft_play.log import one_line

_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
# Base classes of the PCI code and ID assignment specification: display controllers, processing accelerators (MI200
# and later).
_DISPLAY, _PROCESSING = 0x03, 0x12
_VGA = 0x0300
# Bytes from which an AMD GPU that drives a screen counts: firmware usually sets aside less for a processor's own.
MIN_VRAM = 4 * 2**30
# NVIDIA's variable, which AMD's libraries read too, and AMD's own.
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
CPU_HINT = "train.device=cpu trains on the CPU"
_DRIVER_REMEDY = (
    "start a container with its GPUs (docker run --gpus all; Kubernetes: limits: nvidia.com/gpu); else install or "
    "update NVIDIA's driver (580 or newer for CUDA 13; below WSL that of Windows) and restart the machine; nvidia-smi "
    "and dmesg | grep NVRM say more"
)


@dataclass(frozen=True)
class NvmlStatus:
    """What NVML answers: how many GPUs, or why it does not start; `obstacles` say why GPUs cannot be used, one sentence
    for each that cannot."""

    gpu_count: int = 0
    error: str = "it lists none"
    obstacles: tuple[str, ...] = ()


def torch_build_text() -> str:
    """`torch 2.13.0 is built for CUDA 13.0`, from its files."""
    version, cuda, hip = installed_version("torch"), torch_cuda_version(), torch_hip_version()
    if version is None:
        return "torch is not installed"
    return f"torch {version} is built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU only'}"


def find_unusable_accelerator(
    environment: Mapping[str, str], *, root: Path = Path("/"), nvml: NvmlStatus | None = None
) -> str | None:
    """The accelerator that a run on this machine, or the one below `root`, would silently leave unused, with what to
    do; None if there is none. `nvml`: its answer, where it is not to be asked. `CUDA_VISIBLE_DEVICES=`, or -1, asks for
    the CPU; beside AMD's GPUs, `HIP_VISIBLE_DEVICES` does too."""
    # a wish for the CPU is no accident
    emptied_variables = [name for name in VISIBILITY_VARIABLES if environment.get(name, "0").strip() in ("", "-1")]
    if VISIBILITY_VARIABLES[0] in emptied_variables:
        return None
    slots_by_vendor = _find_pci_gpus(root / "sys/bus/pci/devices")
    problem = _nvidia_problem(
        slots_by_vendor.pop("NVIDIA", []), environment.get(VISIBILITY_VARIABLES[0]), root, nvml or _query_nvml()
    )
    if problem is None and slots_by_vendor and not emptied_variables:
        devices = " and ".join(_bus_text(vendor, slots) for vendor, slots in sorted(slots_by_vendor.items()))
        reason = "runs are planned for NVIDIA's GPUs and for CPUs, and nothing is known of how they do on this one"
        problem = f"this machine shows {devices}", reason
    return f"{problem[0]} ({torch_build_text()}): {problem[1]}; or {CPU_HINT}" if problem else None


def _nvidia_problem(
    slots: list[str], visible_setting: str | None, root: Path, nvml: NvmlStatus
) -> tuple[str, str] | None:
    dev = root / "dev"
    signs = [f"/dev/{node.name}" for node in sorted(dev.glob("nvidia[0-9]*"))]
    # the host's, even in a container
    signs += ["NVIDIA's loaded driver"] if read_text_or_empty(root / "proc/driver/nvidia/version") else []
    signs += [_bus_text("NVIDIA", slots)] if slots else []
    is_wsl = (dev / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    signs += ["WSL's /dev/dxg with libcuda.so.1"] if is_wsl else []
    if not nvml.gpu_count:
        return (
            (f"this machine shows {' and '.join(signs)}, and NVML says: {nvml.error}", _DRIVER_REMEDY)
            if signs
            else None
        )
    gpus_text = f"there are {nvml.gpu_count} NVIDIA GPUs" if nvml.gpu_count > 1 else "there is an NVIDIA GPU"
    if nvml.gpu_count > len(nvml.obstacles) and visible_setting is not None:
        problem = f"{gpus_text}, and {VISIBILITY_VARIABLES[0]}={one_line(visible_setting)} names none of them"
        return problem, "unset it, or name GPUs that nvidia-smi -L shows"
    reason = "; ".join(nvml.obstacles) or "in MIG mode without an instance, or it does not answer"
    return (
        f"{gpus_text}, and none that can be used: {one_line(reason, limit=400)}",
        "nvidia-smi -L shows what there is; nvidia-smi mig -cgi ... -C makes an instance, -mig 0 switches MIG off; "
        "a container is given an instance by its UUID (NVIDIA_VISIBLE_DEVICES=MIG-...)",
    )


def _bus_text(vendor: str, slots: list[str]) -> str:
    return f"{len(slots)} {vendor} GPU{'s' if len(slots) > 1 else ''} on the PCI bus ({slots[0]})"


def _find_pci_gpus(folder: Path) -> dict[str, list[str]]:
    slots_by_vendor: dict[str, list[str]] = {}
    for device in sorted(folder.glob("*")):
        with contextlib.suppress(ValueError):  # a file that is not there, or holds no number
            vendor = _VENDORS.get(int(read_text_or_empty(device / "vendor"), 16), "")
            device_class = int(read_text_or_empty(device / "class"), 16) >> 8
            is_gpu = device_class >> 8 == _DISPLAY or (vendor == "AMD" and device_class >> 8 == _PROCESSING)
            is_display_only = vendor == "AMD" and device_class == _VGA and _vram_bytes(device) < MIN_VRAM
            is_integrated = vendor == "Intel" and re.match(r"[0-9a-f]+:00:", device.name) is not None  # on bus 0
            if vendor and is_gpu and not is_display_only and not is_integrated:
                slots_by_vendor.setdefault(vendor, []).append(device.name)
    return slots_by_vendor


def _vram_bytes(device: Path) -> int:
    vram = read_text_or_empty(device / "mem_info_vram_total").strip()  # amdgpu writes it
    return int(vram) if vram.isdigit() else 0


def explain_unusable_torch(gpu: str, torch_error: str, *, torch_build: str | None = None) -> str:
    """Why this torch cannot use a GPU that its driver shows, and what to do; `torch_error`: torch's own message, which
    says where the driver is too old."""
    build_text = torch_build or torch_build_text()
    remedy = (
        "a build for CUDA comes with make setup" if "CUDA" not in build_text else f"torch says: {one_line(torch_error)}"
    )
    return f"the driver shows {gpu}, but {build_text} and cannot use it: {remedy}; make doctor says more; or {CPU_HINT}"


def _query_nvml() -> NvmlStatus:
    try:
        with open_nvml() as library:
            gpus = read_gpu_snapshot(library, details=False, topology=False).gpus
            return NvmlStatus(len(gpus), obstacles=tuple(filter(None, map(gpu_obstacle, gpus))))
    except Exception as error:  # NVML raises its own exceptions, which differ between platforms
        return NvmlStatus(error=one_line(str(error)) or type(error).__name__)
