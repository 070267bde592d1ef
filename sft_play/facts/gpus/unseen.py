"""Accelerators that a machine has but a run would not use: by device files, the PCI bus, the driver, torch's build.

Called where no GPU was found. torch is not imported and only NVML is started; everything is read below a root folder,
which tests make up. Runs are planned for NVIDIA's GPUs; AMD's, Intel's and Apple's are found for a message alone. A GPU
that only drives a screen does not count: Intel's on the CPU's own bus, AMD's with less memory than `LEAST_VRAM`.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.facts.gpus.nvml import driver, opened, see_through
from sft_play.facts.gpus.visible_gpus import obstacle
from sft_play.facts.host import answer_of, text_of
from sft_play.facts.installed import torch_cuda, torch_hip, version_of
from sft_play.log import one_line

NVIDIA, AMD, INTEL = 0x10DE, 0x1002, 0x8086
_DISPLAY, _PROCESSING = 0x03, 0x12
"""Base classes of the PCI code and ID assignment specification: display controllers, processing accelerators (MI200
and later)."""
_VGA = 0x0300
LEAST_VRAM = 4 * 2**30
"""Bytes from which an AMD GPU that drives a screen counts: firmware usually sets aside less for a processor's own."""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""NVIDIA's variable, which AMD's libraries read too, and AMD's own."""
_NONE_WANTED = ("", "-1")
ON_CPU = "train.device=cpu trains on the CPU"


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCI bus: its slot, vendor, class code (base and sub class), and VRAM where its driver reports
    it."""

    slot: str
    vendor: int
    kind: int
    vram_bytes: int | None = None


@dataclass(frozen=True)
class Nvml:
    """What NVML answers: how many GPUs, or why it does not start."""

    gpus: int = 0
    error: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    obstacles: tuple[str, ...] = ()
    """Why GPUs cannot be used, one sentence for each that cannot."""


@dataclass(frozen=True)
class TorchBuild:
    """What torch is built for, None: not for that; `version` None: not installed."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None

    @property
    def words(self) -> str:
        """`torch 2.13.0 is built for CUDA 13.0`."""
        if self.version is None:
            return "torch is not installed"
        kind = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU only"
        return f"torch {self.version} is built for {kind}"


@dataclass(frozen=True)
class Devices:
    """What the machine shows of accelerators. `driver` is the NVIDIA driver that the kernel has loaded."""

    nodes: tuple[str, ...] = ()
    """/dev/nvidia0 and so on."""
    driver: str | None = None
    pci: tuple[PciDevice, ...] = ()
    chip: str | None = None
    """The name of Apple's chip, whose GPU is a part of it."""
    wsl: bool = False
    """Whether this is WSL with an NVIDIA driver on the Windows side."""
    container: bool = False
    nvml: Nvml = Nvml()
    torch: TorchBuild = TorchBuild()
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Unseen:
    """An accelerator that exists, why a run does not see it, and what to do."""

    found: str
    remedy: str

    @property
    def message(self) -> str:
        """The whole message, with how to train without the accelerator."""
        return f"{self.found}: {self.remedy}; or {ON_CPU}"


def read_devices(environment: Mapping[str, str], *, root: Path = Path("/"), nvml: Nvml | None = None) -> Devices:
    """This machine, or the one below `root`; `nvml`: its answer, where it is not to be asked."""
    dev = root / "dev"
    return Devices(
        nodes=tuple(sorted(f"/dev/{node.name}" for node in dev.glob("nvidia[0-9]*"))),
        driver=_driver(root),
        pci=_pci(root / "sys/bus/pci/devices"),
        chip=_apple_chip(),
        wsl=(dev / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists(),
        container=any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in environment,
        nvml=nvml if nvml is not None else _ask_nvml(),
        torch=torch_build(),
        environment={name: environment[name] for name in HIDING if name in environment},
    )


def torch_build() -> TorchBuild:
    """What the installed torch is built for, from its files."""
    return TorchBuild(version_of("torch"), torch_cuda(), torch_hip())


def unseen(devices: Devices) -> Unseen | None:
    """The accelerator that a run on this machine would silently leave unused; None if there is none.

    `CUDA_VISIBLE_DEVICES=`, or -1, asks for the CPU; beside AMD's GPUs, `HIP_VISIBLE_DEVICES` does too.
    """
    hiding = devices.environment or {}
    # a wish for the CPU is no accident
    hidden = {name for name, text in hiding.items() if text.strip() in _NONE_WANTED}
    if HIDING[0] in hidden:
        return None
    unused = _nvidia(devices, hiding) or (None if hidden else _of_other_makers(devices))
    return replace(unused, found=f"{unused.found} ({devices.torch.words})") if unused else None


# --- NVIDIA -----------------------------------------------------------------------------------------------------------


def _nvidia(devices: Devices, hiding: Mapping[str, str]) -> Unseen | None:
    cards = [item for item in devices.pci if item.vendor == NVIDIA and item.kind >> 8 == _DISPLAY]
    if not (devices.nodes or devices.driver or cards or devices.wsl or devices.nvml.gpus):
        return None
    what = _nvidia_words(devices, cards)
    obstacles = devices.nvml.obstacles
    if devices.nvml.gpus > len(obstacles) and "CUDA_VISIBLE_DEVICES" in hiding:
        return Unseen(f"{what}, and CUDA_VISIBLE_DEVICES={one_line(hiding['CUDA_VISIBLE_DEVICES'])} names none of them",
                      "unset it, or name GPUs that nvidia-smi -L shows")  # fmt: skip
    if devices.nvml.gpus:
        why = "; ".join(obstacles) or "in MIG mode without an instance, or it does not answer"
        return Unseen(
            f"{what}, and none that can be used: {one_line(why, limit=400)}",
            "nvidia-smi -L shows what there is; nvidia-smi mig -cgi ... -C makes an instance, -mig 0 switches MIG off; "
            "a container is given an instance by its UUID (NVIDIA_VISIBLE_DEVICES=MIG-...)",
        )
    why, remedy = _nvidia_cause(devices)
    if devices.torch.version and devices.torch.cuda is None:
        remedy += "; then a torch for CUDA: make setup"
    return Unseen(f"{what}, and {why}", remedy)


def _nvidia_words(devices: Devices, cards: list[PciDevice]) -> str:
    if devices.nvml.gpus:
        count = devices.nvml.gpus
        return f"there are {count} NVIDIA GPUs" if count > 1 else "there is an NVIDIA GPU"
    signs = [", ".join(devices.nodes)] if devices.nodes else []
    signs += [f"the NVIDIA driver {devices.driver}"] if devices.driver else []
    signs += [_on_the_bus("NVIDIA", cards)] if cards else []
    signs += ["WSL's /dev/dxg with libcuda.so.1"] if devices.wsl else []
    return f"this machine shows {' and '.join(signs)}"


def _on_the_bus(vendor: str, cards: list[PciDevice]) -> str:
    return f"{len(cards)} {vendor} GPU{'s' if len(cards) > 1 else ''} on the PCI bus ({cards[0].slot})"


_DOCKER = (
    "start the container with its GPUs (docker run --gpus all, with nvidia-container-toolkit on the host; Kubernetes: "
    "limits: nvidia.com/gpu)"
)


def _nvidia_cause(devices: Devices) -> tuple[str, str]:
    error = devices.nvml.error or "it lists none"
    words = f"NVML says: {error}"
    if devices.wsl:
        return words, "update the NVIDIA driver of Windows, then wsl --update and wsl --shutdown"
    # the order matters: each cause is only looked for where those above it are ruled out
    if not devices.nodes and devices.container:
        return "this container was given none of them (no /dev/nvidia0)", _DOCKER
    if not devices.nodes and devices.driver:
        return "there is no /dev/nvidia0", "sudo nvidia-modprobe -u -c=0 creates it"
    if not devices.nodes:
        return "no NVIDIA driver is loaded", "install it (580 or newer for CUDA 13) and restart the machine"
    if "mismatch" in error.lower():
        return words, "the driver's libraries were updated and the loaded driver was not: restart the machine"
    if "not found" in error.lower() and devices.container:
        return "the driver's libraries are missing (libnvidia-ml.so.1)", _DOCKER
    if "not found" in error.lower():
        return "the driver's libraries are missing (libnvidia-ml.so.1)", "reinstall the driver, with its libraries"
    if "pynvml" in error:
        return words, "make setup, or into your own environment: pip install nvidia-ml-py"
    if devices.container:
        return words, "restart the container: it lost its devices (systemctl daemon-reload does that)"
    return words, "nvidia-smi and dmesg | grep NVRM say more; a user must be allowed to open /dev/nvidia*"


# --- AMD, Intel, Apple ------------------------------------------------------------------------------------------------


def _of_other_makers(devices: Devices) -> Unseen | None:
    """GPUs that no run uses: no such machine has trained anything yet."""
    amd = [card for card in devices.pci if card.vendor == AMD and _computes(card)]
    # a processor's own GPU is on bus 0
    intel = [card for card in devices.pci if card.vendor == INTEL and card.kind >> 8 == _DISPLAY
             and not re.match(r"[0-9a-f]+:00:", card.slot)]  # fmt: skip
    found = [_on_the_bus(name, cards) for name, cards in (("AMD", amd), ("Intel", intel)) if cards]
    found += [f"the GPU of {devices.chip}"] if devices.chip else []
    if not found:
        return None
    return Unseen(
        f"this machine shows {' and '.join(found)}",
        "runs are planned for NVIDIA's GPUs and for CPUs, and nothing is known of how they do on this one",
    )


def _computes(card: PciDevice) -> bool:
    """Counts even where its driver, which would report its memory, is not loaded: unless it drives a screen."""
    if card.kind >> 8 not in (_DISPLAY, _PROCESSING):
        return False
    if card.vram_bytes is None:
        return card.kind != _VGA
    return card.vram_bytes >= LEAST_VRAM


def _apple_chip() -> str | None:
    """`Apple M3 Max`; None on another machine than a Mac with Apple's own chip."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return None
    return answer_of("sysctl", "-n", "machdep.cpu.brand_string").strip() or "Apple's chip"


# --- a GPU that its driver shows and torch does not -------------------------------------------------------------------


def torch_is_blind(gpu: str, torch_error: str, *, build: TorchBuild | None = None, nvml: Nvml | None = None) -> str:
    """Why this torch cannot use a GPU that its driver shows, and what to do; `torch_error`: torch's own message."""
    build = build or torch_build()
    head = f"the driver shows {gpu}, but {build.words} and cannot use it"
    if build.cuda is None:
        return f"{head}: install its CUDA build (make setup; with VENV=: pip install torch from PyPI); or {ON_CPU}"
    nvml = nvml or _ask_nvml()
    if nvml.cuda and nvml.cuda[0] < int(build.cuda.split(".")[0]):
        return (
            f"{head}: the driver {nvml.driver} runs CUDA {'.'.join(map(str, nvml.cuda))} at most; install driver 580 "
            f"or newer for CUDA 13, 525 or newer for CUDA 12, or a torch built for CUDA {nvml.cuda[0]} "
            f"(pip install torch --index-url https://download.pytorch.org/whl/cu{nvml.cuda[0]}*); or {ON_CPU}"
        )
    return f"{head}; torch says: {one_line(torch_error, limit=300)}; make doctor says more; or {ON_CPU}"


# --- what is read -----------------------------------------------------------------------------------------------------


def _driver(root: Path) -> str | None:
    """The version of the loaded NVIDIA kernel module; `/proc/driver` is the host's, even in a container."""
    text = text_of(root / "proc/driver/nvidia/version")
    match = re.search(r"\s([0-9]{2,}(?:\.[0-9]+)+)\s", text)
    return match[1] if match else "of unknown version" if text else None


def _pci(folder: Path) -> tuple[PciDevice, ...]:
    devices = []
    for place in sorted(folder.glob("*")):
        vendor, kind = _hex(text_of(place / "vendor")), _hex(text_of(place / "class"))
        if vendor is not None and kind is not None:
            vram = text_of(place / "mem_info_vram_total").strip()  # amdgpu writes it, others do not
            devices.append(PciDevice(place.name, vendor, kind >> 8, int(vram) if vram.isdigit() else None))
    return tuple(devices)


def _ask_nvml() -> Nvml:
    try:
        with opened() as library:
            gpus = see_through(library, details=False, topology=False).gpus
            return Nvml(len(gpus), None, *driver(library), tuple(filter(None, map(obstacle, gpus))))
    except Exception as error:  # NVML raises its own exceptions, which differ between platforms
        return Nvml(error=one_line(str(error)) or type(error).__name__)


def _hex(text: str) -> int | None:
    try:
        return int(text.strip(), 16)
    except ValueError:
        return None
