"""Accelerators that a machine has but a run would not use: by device files, the PCI bus, the driver, torch's build.

Called where no GPU was found. torch is not imported and only NVML is started; everything is read below a root folder,
which tests make up. Runs are planned for NVIDIA's GPUs; AMD's and Intel's are found for a message alone (Apple's by
torch, `training.prepare.device_checks`). A GPU that only drives a screen does not count: Intel's on the CPU's own bus,
AMD's with less memory than `LEAST_VRAM`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.facts.gpus.nvml import opened, see_through
from sft_play.facts.gpus.visible_gpus import obstacle
from sft_play.facts.host import text_of
from sft_play.facts.installed import torch_cuda, torch_hip, version_of
from sft_play.log import one_line

_MAKERS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
# Base classes of the PCI code and ID assignment specification: display controllers, processing accelerators (MI200
# and later).
_DISPLAY, _PROCESSING = 0x03, 0x12
_VGA = 0x0300
# Bytes from which an AMD GPU that drives a screen counts: firmware usually sets aside less for a processor's own.
LEAST_VRAM = 4 * 2**30
# NVIDIA's variable, which AMD's libraries read too, and AMD's own.
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
ON_CPU = "train.device=cpu trains on the CPU"
_DRIVER = (
    "start a container with its GPUs (docker run --gpus all; Kubernetes: limits: nvidia.com/gpu); else install or "
    "update NVIDIA's driver (580 or newer for CUDA 13; below WSL that of Windows) and restart the machine; nvidia-smi "
    "and dmesg | grep NVRM say more"
)


@dataclass(frozen=True)
class Nvml:
    """What NVML answers: how many GPUs, or why it does not start; `obstacles` say why GPUs cannot be used, one sentence
    for each that cannot."""

    gpus: int = 0
    error: str = "it lists none"
    obstacles: tuple[str, ...] = ()


def torch_words() -> str:
    """`torch 2.13.0 is built for CUDA 13.0`, from its files."""
    version, cuda, hip = version_of("torch"), torch_cuda(), torch_hip()
    if version is None:
        return "torch is not installed"
    return f"torch {version} is built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU only'}"


def unseen(environment: Mapping[str, str], *, root: Path = Path("/"), nvml: Nvml | None = None) -> str | None:
    """The accelerator that a run on this machine, or the one below `root`, would silently leave unused, with what to
    do; None if there is none. `nvml`: its answer, where it is not to be asked. `CUDA_VISIBLE_DEVICES=`, or -1, asks for
    the CPU; beside AMD's GPUs, `HIP_VISIBLE_DEVICES` does too."""
    # a wish for the CPU is no accident
    hidden = [name for name in HIDING if environment.get(name, "0").strip() in ("", "-1")]
    if HIDING[0] in hidden:
        return None
    cards = _cards(root / "sys/bus/pci/devices")
    found = _nvidia(cards.pop("NVIDIA", []), environment.get(HIDING[0]), root, nvml or _ask_nvml())
    if found is None and cards and not hidden:
        shown = " and ".join(_on_the_bus(maker, slots) for maker, slots in sorted(cards.items()))
        why = "runs are planned for NVIDIA's GPUs and for CPUs, and nothing is known of how they do on this one"
        found = f"this machine shows {shown}", why
    return f"{found[0]} ({torch_words()}): {found[1]}; or {ON_CPU}" if found else None


def _nvidia(slots: list[str], named: str | None, root: Path, nvml: Nvml) -> tuple[str, str] | None:
    dev = root / "dev"
    signs = [f"/dev/{node.name}" for node in sorted(dev.glob("nvidia[0-9]*"))]
    # the host's, even in a container
    signs += ["NVIDIA's loaded driver"] if text_of(root / "proc/driver/nvidia/version") else []
    signs += [_on_the_bus("NVIDIA", slots)] if slots else []
    is_wsl = (dev / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    signs += ["WSL's /dev/dxg with libcuda.so.1"] if is_wsl else []
    if not nvml.gpus:
        return (f"this machine shows {' and '.join(signs)}, and NVML says: {nvml.error}", _DRIVER) if signs else None
    what = f"there are {nvml.gpus} NVIDIA GPUs" if nvml.gpus > 1 else "there is an NVIDIA GPU"
    if nvml.gpus > len(nvml.obstacles) and named is not None:
        hiding = f"{what}, and {HIDING[0]}={one_line(named)} names none of them"
        return hiding, "unset it, or name GPUs that nvidia-smi -L shows"
    why = "; ".join(nvml.obstacles) or "in MIG mode without an instance, or it does not answer"
    return (
        f"{what}, and none that can be used: {one_line(why, limit=400)}",
        "nvidia-smi -L shows what there is; nvidia-smi mig -cgi ... -C makes an instance, -mig 0 switches MIG off; "
        "a container is given an instance by its UUID (NVIDIA_VISIBLE_DEVICES=MIG-...)",
    )


def _on_the_bus(maker: str, slots: list[str]) -> str:
    return f"{len(slots)} {maker} GPU{'s' if len(slots) > 1 else ''} on the PCI bus ({slots[0]})"


def _cards(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for place in sorted(folder.glob("*")):
        with contextlib.suppress(ValueError):  # a file that is not there, or holds no number
            maker = _MAKERS.get(int(text_of(place / "vendor"), 16), "")
            kind = int(text_of(place / "class"), 16) >> 8
            is_gpu = kind >> 8 == _DISPLAY or (maker == "AMD" and kind >> 8 == _PROCESSING)
            on_screen = maker == "AMD" and kind == _VGA and _vram_of(place) < LEAST_VRAM
            is_of_processor = maker == "Intel" and re.match(r"[0-9a-f]+:00:", place.name) is not None  # on bus 0
            if maker and is_gpu and not on_screen and not is_of_processor:
                found.setdefault(maker, []).append(place.name)
    return found


def _vram_of(place: Path) -> int:
    vram = text_of(place / "mem_info_vram_total").strip()  # amdgpu writes it
    return int(vram) if vram.isdigit() else 0


def torch_is_blind(gpu: str, torch_error: str, *, torch: str | None = None) -> str:
    """Why this torch cannot use a GPU that its driver shows, and what to do; `torch_error`: torch's own message, which
    says where the driver is too old."""
    words = torch or torch_words()
    remedy = "a build for CUDA comes with make setup" if "CUDA" not in words else f"torch says: {one_line(torch_error)}"
    return f"the driver shows {gpu}, but {words} and cannot use it: {remedy}; make doctor says more; or {ON_CPU}"


def _ask_nvml() -> Nvml:
    try:
        with opened() as library:
            gpus = see_through(library, details=False, topology=False).gpus
            return Nvml(len(gpus), obstacles=tuple(filter(None, map(obstacle, gpus))))
    except Exception as error:  # NVML raises its own exceptions, which differ between platforms
        return Nvml(error=one_line(str(error)) or type(error).__name__)
