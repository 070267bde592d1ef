"""Accelerators that a machine has but a run would not use: by device files, the PCI bus, the driver, torch's build.

Called where no GPU was found. torch is not imported and only NVML is started; everything is read below a root folder,
which tests make up. Runs are planned for NVIDIA's GPUs; AMD's and Intel's are found for a message alone (Apple's by
torch, `training.prepare.device_checks`). A GPU that only drives a screen does not count: Intel's on the CPU's own bus,
AMD's with less memory than `LEAST_VRAM`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.facts.gpus.nvml import opened, see_through
from sft_play.facts.gpus.visible_gpus import obstacle
from sft_play.facts.host import text_of
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
    """What NVML answers: how many GPUs, or why it does not start; `obstacles` say why GPUs cannot be used, one sentence
    for each that cannot."""

    gpus: int = 0
    error: str = "it lists none"
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Devices:
    """What the machine shows of accelerators. `driver` is the NVIDIA driver that the kernel has loaded, `nodes` are
    /dev/nvidia0 and so on, `wsl`: this is WSL with an NVIDIA driver on the Windows side."""

    nodes: tuple[str, ...] = ()
    driver: str | None = None
    pci: tuple[PciDevice, ...] = ()
    wsl: bool = False
    container: bool = False
    nvml: Nvml = Nvml()
    torch: str = "torch is not installed"
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
    version = text_of(root / "proc/driver/nvidia/version")  # the host's, even in a container
    match = re.search(r"\s([0-9]{2,}(?:\.[0-9]+)+)\s", version)
    return Devices(
        nodes=tuple(sorted(f"/dev/{node.name}" for node in dev.glob("nvidia[0-9]*"))),
        driver=match[1] if match else "of unknown version" if version else None,
        pci=_pci(root / "sys/bus/pci/devices"),
        wsl=(dev / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists(),
        container=any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
        or "KUBERNETES_SERVICE_HOST" in environment,
        nvml=nvml if nvml is not None else _ask_nvml(),
        torch=torch_words(),
        environment={name: environment[name] for name in HIDING if name in environment},
    )


def torch_words() -> str:
    """`torch 2.13.0 is built for CUDA 13.0`, from its files."""
    version, cuda, hip = version_of("torch"), torch_cuda(), torch_hip()
    if version is None:
        return "torch is not installed"
    return f"torch {version} is built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}' if hip else 'CPU only'}"


def unseen(devices: Devices) -> Unseen | None:
    """The accelerator that a run on this machine would silently leave unused; None if there is none.
    `CUDA_VISIBLE_DEVICES=`, or -1, asks for the CPU; beside AMD's GPUs, `HIP_VISIBLE_DEVICES` does too."""
    hiding = devices.environment or {}
    hidden = {name for name, text in hiding.items() if text.strip() in ("", "-1")}  # a wish for the CPU is no accident
    if HIDING[0] in hidden:
        return None
    found = _nvidia(devices, hiding) or (None if hidden else _of_other_makers(devices))
    return Unseen(f"{found[0]} ({devices.torch})", found[1]) if found else None


def _nvidia(devices: Devices, hiding: Mapping[str, str]) -> tuple[str, str] | None:
    cards = [item for item in devices.pci if item.vendor == NVIDIA and item.kind >> 8 == _DISPLAY]
    signs = [", ".join(devices.nodes)] if devices.nodes else []
    signs += [f"the NVIDIA driver {devices.driver}"] if devices.driver else []
    signs += [_on_the_bus("NVIDIA", cards)] if cards else []
    signs += ["WSL's /dev/dxg with libcuda.so.1"] if devices.wsl else []
    if not devices.nvml.gpus:
        return _without_nvml(devices, f"this machine shows {' and '.join(signs)}") if signs else None
    count, obstacles = devices.nvml.gpus, devices.nvml.obstacles
    what = f"there are {count} NVIDIA GPUs" if count > 1 else "there is an NVIDIA GPU"
    if count > len(obstacles) and HIDING[0] in hiding:
        named = f"{what}, and {HIDING[0]}={one_line(hiding[HIDING[0]])} names none of them"
        return named, "unset it, or name GPUs that nvidia-smi -L shows"
    why = "; ".join(obstacles) or "in MIG mode without an instance, or it does not answer"
    return (
        f"{what}, and none that can be used: {one_line(why, limit=400)}",
        "nvidia-smi -L shows what there is; nvidia-smi mig -cgi ... -C makes an instance, -mig 0 switches MIG off; "
        "a container is given an instance by its UUID (NVIDIA_VISIBLE_DEVICES=MIG-...)",
    )


_DOCKER = (
    "start the container with its GPUs (docker run --gpus all, with nvidia-container-toolkit on the host; Kubernetes: "
    "limits: nvidia.com/gpu)"
)


def _without_nvml(devices: Devices, what: str) -> tuple[str, str]:
    """Why the driver does not answer; each cause is only looked for where those above it are ruled out."""
    error = devices.nvml.error
    why = f"NVML says: {error}"
    if devices.wsl:
        remedy = "update the NVIDIA driver of Windows, then wsl --update and wsl --shutdown"
    elif devices.container and not devices.nodes:
        why, remedy = "this container was given none of them (no /dev/nvidia0)", _DOCKER
    elif devices.container:
        remedy = f"{_DOCKER}, or restart it, where it lost its devices"
    elif not devices.driver and not devices.nodes:
        why, remedy = "no NVIDIA driver is loaded", "install it (580 or newer for CUDA 13) and restart the machine"
    else:
        remedy = (
            "after an update of the driver restart the machine; nvidia-modprobe -u -c=0 makes /dev/nvidia0; the "
            "driver has libnvidia-ml.so.1, pip install nvidia-ml-py pynvml; nvidia-smi and dmesg | grep NVRM say more"
        )
    return f"{what}, and {why}", remedy


def _on_the_bus(vendor: str, cards: list[PciDevice]) -> str:
    return f"{len(cards)} {vendor} GPU{'s' if len(cards) > 1 else ''} on the PCI bus ({cards[0].slot})"


def _of_other_makers(devices: Devices) -> tuple[str, str] | None:
    """GPUs that no run uses: no such machine has trained anything yet."""
    amd = [card for card in devices.pci if card.vendor == AMD and _computes(card)]
    # a processor's own GPU is on bus 0
    intel = [card for card in devices.pci if card.vendor == INTEL and card.kind >> 8 == _DISPLAY
             and not re.match(r"[0-9a-f]+:00:", card.slot)]  # fmt: skip
    found = [_on_the_bus(name, cards) for name, cards in (("AMD", amd), ("Intel", intel)) if cards]
    if not found:
        return None
    return (
        f"this machine shows {' and '.join(found)}",
        "runs are planned for NVIDIA's GPUs and for CPUs, and nothing is known of how they do on this one",
    )


def _computes(card: PciDevice) -> bool:
    """Counts even where its driver, which would report its memory, is not loaded: unless it drives a screen."""
    is_gpu = card.kind >> 8 in (_DISPLAY, _PROCESSING)
    return is_gpu and (card.kind != _VGA if card.vram_bytes is None else card.vram_bytes >= LEAST_VRAM)


def torch_is_blind(gpu: str, torch_error: str, *, torch: str | None = None) -> str:
    """Why this torch cannot use a GPU that its driver shows, and what to do; `torch_error`: torch's own message, which
    says where the driver is too old."""
    words = torch or torch_words()
    remedy = "a build for CUDA comes with make setup" if "CUDA" not in words else f"torch says: {one_line(torch_error)}"
    return f"the driver shows {gpu}, but {words} and cannot use it: {remedy}; make doctor says more; or {ON_CPU}"


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
            return Nvml(len(gpus), obstacles=tuple(filter(None, map(obstacle, gpus))))
    except Exception as error:  # NVML raises its own exceptions, which differ between platforms
        return Nvml(error=one_line(str(error)) or type(error).__name__)


def _hex(text: str) -> int | None:
    try:
        return int(text.strip(), 16)
    except ValueError:
        return None
