"""The GPUs that this machine's drivers list, and those of them that a process sees; and
accelerators that a run would not use, told by device files, the PCI bus and the driver.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.log import one_line
from sft_play.machine import nvml
from sft_play.machine.gpu import Gpu, GpuStatus
from sft_play.machine.gpu_catalog import find_catalog_entries
from sft_play.machine.host import read_text_or_empty
from sft_play.machine.nvml import open_nvml, read_gpu_snapshot
from sft_play.machine.software import installed_version, torch_build_version
from sft_play.text import GIB

# `CUDA_VISIBLE_DEVICES` is honoured: what a process would not see is not counted. Of GPUs that are
# split into instances (MIG) a process sees the first visible instance and nothing else: "CUDA can
# only enumerate a single compute instance", and no whole GPU beside it (NVIDIA Multi-Instance GPU
# user guide, "Device Enumeration").

# A GPU whose driver does not tell its name.
UNNAMED_GPU = "NVIDIA GPU"


@dataclass(frozen=True)
class ListedGpu:
    """A GPU or an instance of one, as the driver lists it, before `CUDA_VISIBLE_DEVICES`.
    `parent_uuid` is the UUID of an instance's GPU; `nvlinks` counts active links, None where the
    driver does not say. `obstacle` says why no run can use it; None where one can."""

    uuid: str
    gpu: Gpu
    parent_uuid: str = ""
    nvlinks: int | None = None
    obstacle: str | None = None
    note: str | None = None


def _list_gpus() -> tuple[ListedGpu, ...]:
    snapshot = nvml.gpu_snapshot(details=False, topology=False)
    return tuple(item for gpu in (snapshot.gpus if snapshot else ()) for item in _expand_gpu(gpu))


def gpu_obstacle(gpu: GpuStatus) -> str | None:
    """Why no run can use a GPU that NVML lists; None where one can."""
    prefix = f"GPU {gpu.index}"
    if gpu.trouble:
        return f"{prefix} does not answer its driver ({gpu.trouble})"
    if gpu.mig_enabled and not gpu.instances:
        if "MIG instances" in gpu.withheld:
            return (
                f"{prefix} is in MIG mode, and NVML does not show its instances"
                f" ({gpu.withheld['MIG instances']})"
            )
        return f"{prefix} is in MIG mode and has no instance: CUDA does not see it"
    if gpu.mig_enabled and not any(item.total_bytes for item in gpu.instances):
        return f"{prefix}: NVML tells the memory of none of its MIG instances"
    if not gpu.mig_enabled and not gpu.total_bytes and not _catalog_bytes(gpu.name):
        return f"{prefix}: {_unknown_memory_text(gpu)}, and the catalogue has no {gpu.name}"
    return None


def _unknown_memory_text(gpu: GpuStatus) -> str:
    return f"NVML does not tell its memory ({gpu.withheld.get('memory', 'no answer')})"


def _catalog_bytes(name: str | None) -> int:
    return min((entry.driver_bytes for entry in find_catalog_entries(name or "")), default=0)


def _expand_gpu(gpu: GpuStatus) -> list[ListedGpu]:
    """A GPU as one of the list, or the instances that it is split into."""
    uuid = gpu.uuid or ""
    major, _, minor = (gpu.compute_capability or "").partition(".")
    capability = (int(major), int(minor)) if major else None
    name = gpu.name or next((item.card for item in gpu.instances if item.card), None) or UNNAMED_GPU
    gpu_facts = Gpu(gpu.index, name, gpu.total_bytes or 0, gpu.free_bytes, capability)
    obstacle, note = gpu_obstacle(gpu), None
    # a GB10 has no memory of its own to tell
    if obstacle is None and not gpu.mig_enabled and not gpu.total_bytes:
        gpu_facts = replace(gpu_facts, total_bytes=_catalog_bytes(name))
        note = (
            f"GPU {gpu.index}: {_unknown_memory_text(gpu)}; planned with the catalogue's "
            f"{gpu_facts.total_bytes / GIB:.1f} GiB, as if no other process held any"
        )
    if obstacle is not None or not gpu.mig_enabled:
        return [ListedGpu(uuid, gpu_facts, nvlinks=gpu.nvlinks, obstacle=obstacle, note=note)]
    instances = []
    for item in gpu.instances:
        if item.total_bytes:
            profile = item.profile or f"{item.total_bytes / GIB:.0f}gb"
            instance = replace(
                gpu_facts,
                name=f"{name} MIG {profile}",
                total_bytes=item.total_bytes,
                free_bytes=item.free_bytes,
                mig=profile,
            )
            instances.append(ListedGpu(item.uuid, instance, uuid))
    return instances


def visible_gpus(environment: Mapping[str, str]) -> tuple[tuple[ListedGpu, ...], tuple[str, ...]]:
    """The GPUs that a process with this environment sees, in its order, and what a person should
    know about them."""
    listed_gpus, variable = _list_gpus(), environment.get("CUDA_VISIBLE_DEVICES")
    visible = listed_gpus
    notes = [item.obstacle for item in listed_gpus if item.obstacle is not None]
    if variable is not None:  # set and empty: none at all
        visible = _filter_visible(listed_gpus, variable)
        uses_numbers = (
            re.search(r"(^|,)\s*[0-9]", variable)
            and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        )
        if uses_numbers and len({item.gpu.name for item in listed_gpus if not item.gpu.mig}) > 1:
            notes.append(
                "the GPUs differ, and CUDA numbers the fastest first while nvidia-smi numbers by"
                " slot; export CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA_VISIBLE_DEVICES mean what"
                " nvidia-smi shows"
            )
    visible = tuple(item for item in visible if item.obstacle is None)
    notes += [item.note for item in visible if item.note is not None]
    instances = tuple(item for item in visible if item.gpu.mig)
    if instances and len(visible) > 1:
        notes.append(
            f"of {len(visible)} visible GPUs and MIG instances CUDA sees one instance only,"
            f" {instances[0].uuid}; CUDA_VISIBLE_DEVICES=MIG-... chooses another"
        )
    return instances[:1] or visible, tuple(notes)


def _filter_visible(listed_gpus: tuple[ListedGpu, ...], variable: str) -> tuple[ListedGpu, ...]:
    """What `CUDA_VISIBLE_DEVICES` leaves, in its order: numbers or UUIDs; the first unknown entry
    ends the list."""
    visible: list[ListedGpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        matches = [item for item in listed_gpus if _matches_entry(item, entry)]
        if (
            not matches
            and entry.startswith(("MIG-", "GPU-"))
            and len(listed_gpus) == 1
            and not listed_gpus[0].uuid
        ):
            # the only one there is, whose UUID the driver does not tell
            matches = list(listed_gpus)
        # a short UUID that fits two GPUs names neither; a split GPU is named with all its instances
        gpus = {item.uuid if entry.startswith("MIG-") else str(item.gpu.index) for item in matches}
        if len(gpus) != 1 or matches[0] in visible:
            break
        visible += matches
    return tuple(visible)


def _matches_entry(item: ListedGpu, entry: str) -> bool:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        return item.gpu.index == int(entry)
    if entry.startswith("MIG-"):
        return item.uuid.startswith(entry)
    return entry != "" and (item.parent_uuid or item.uuid).startswith(entry)


# --------------------------------------------------------------------------------------------------
# Accelerators that a machine has but a run would not use: by device files, the PCI bus, the driver.
#
# Called where no GPU was found. torch is not imported and only NVML is started; everything is read
# below a root folder, which tests make up. Runs are planned for NVIDIA's GPUs; those of others are
# found for one refusal (Apple's by torch, `training.prepare.device_checks`).

_OTHER_VENDORS = {"0x1002": "AMD", "0x8086": "Intel"}
# NVIDIA's variable, which AMD's libraries read too, and AMD's own: a run on the CPU empties both.
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
CPU_HINT = "train.device=cpu trains on the CPU"
_DRIVER_REMEDY = (
    "start a container with its GPUs (docker run --gpus all; Kubernetes: limits: nvidia.com/gpu);"
    " else install or update NVIDIA's driver (580 or newer for CUDA 13; below WSL that of Windows)"
    " and restart the machine; nvidia-smi and dmesg | grep NVRM say more"
)


@dataclass(frozen=True)
class NvmlStatus:
    """What NVML answers: how many GPUs, or why it does not start; `obstacles` say why GPUs cannot
    be used, one sentence for each that cannot."""

    gpu_count: int = 0
    error: str = "it lists none"
    obstacles: tuple[str, ...] = ()


def torch_build_text() -> str:
    """`torch 2.13.0 is built for CUDA 13.0`, from its files."""
    if installed_version("torch") is None:
        return "torch is not installed"
    build = "CPU only"
    for name, build_version in (
        ("ROCm", torch_build_version("hip")),
        ("CUDA", torch_build_version("cuda")),
    ):
        if build_version:
            build = f"{name} {build_version}"
    return f"torch {installed_version('torch')} is built for {build}"


def find_unusable_accelerator(
    environment: Mapping[str, str], *, root: Path = Path("/"), nvml: NvmlStatus | None = None
) -> str | None:
    """The accelerator that a run on this machine, or the one below `root`, would silently leave
    unused, with what to do; None if there is none. `nvml`: its answer, where it is not to be asked.
    `CUDA_VISIBLE_DEVICES=`, or -1, asks for the CPU; beside AMD's GPUs `HIP_VISIBLE_DEVICES` does
    too."""
    visible_setting = environment.get("CUDA_VISIBLE_DEVICES")
    # a wish for the CPU is no accident
    emptied = [
        name for name in VISIBILITY_VARIABLES if environment.get(name, "0").strip() in ("", "-1")
    ]
    if "CUDA_VISIBLE_DEVICES" in emptied:
        return None
    signs, other_devices = _device_signs(root)
    nvml = nvml or _query_nvml()
    gpus_text = f"there are {nvml.gpu_count} NVIDIA GPUs"
    if nvml.gpu_count == 1:
        gpus_text = "there is an NVIDIA GPU"
    if not nvml.gpu_count and signs:
        problem = f"this machine shows {' and '.join(signs)}, and NVML says: {nvml.error}"
        remedy = _DRIVER_REMEDY
    elif not nvml.gpu_count and other_devices and not emptied:
        problem = f"this machine shows {' and '.join(other_devices)}"
        remedy = (
            "runs are planned for NVIDIA's GPUs and for CPUs, and nothing is known of how they do"
            " on this one"
        )
    elif not nvml.gpu_count:
        return None
    elif nvml.gpu_count > len(nvml.obstacles) and visible_setting is not None:
        problem = (
            f"{gpus_text}, and CUDA_VISIBLE_DEVICES={one_line(visible_setting)} names none of them"
        )
        remedy = "unset it, or name GPUs that nvidia-smi -L shows"
    else:
        reason = (
            "; ".join(nvml.obstacles) or "in MIG mode without an instance, or it does not answer"
        )
        problem = f"{gpus_text}, and none that can be used: {one_line(reason, limit=400)}"
        remedy = (
            "nvidia-smi -L shows what there is; nvidia-smi mig -cgi ... -C makes an instance, -mig"
            " 0 switches MIG off; a container is given an instance by its UUID"
            " (NVIDIA_VISIBLE_DEVICES=MIG-...)"
        )
    return f"{problem} ({torch_build_text()}): {remedy}; or {CPU_HINT}"


def _device_signs(root: Path) -> tuple[list[str], list[str]]:
    """What shows NVIDIA's GPUs without its library, and accelerators of others on the PCI bus."""
    signs = [f"/dev/{node.name}" for node in sorted(root.glob("dev/nvidia[0-9]*"))]
    if read_text_or_empty(root / "proc/driver/nvidia/version"):  # the host's, even in a container
        signs.append("NVIDIA's loaded driver")
    if (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        signs.append("WSL's /dev/dxg with libcuda.so.1")
    others = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        vendor, device_class = (
            read_text_or_empty(device / name).strip() for name in ("vendor", "class")
        )
        # NVIDIA's number as a maker, then classes: 3D and other display controllers, and processing
        # accelerators. A GPU of AMD's or Intel's for a screen (VGA) does not count, which most
        # processors have. What Intel has on bus 0 is part of the processor: a GPU without a screen,
        # an NPU.
        if vendor == "0x10de" and device_class.startswith(("0x03", "0x12")):
            signs.append(f"an NVIDIA GPU on the PCI bus ({device.name})")
        elif (
            vendor in _OTHER_VENDORS
            and device_class.startswith(("0x0302", "0x0380", "0x12"))
            and not (vendor == "0x8086" and ":00:" in device.name)
        ):
            others.append(
                f"an accelerator of {_OTHER_VENDORS[vendor]}'s on the PCI bus ({device.name})"
            )
    return signs, others


def explain_unusable_torch(gpu: str, torch_error: str, *, torch_build: str | None = None) -> str:
    """Why this torch cannot use a GPU that its driver shows, and what to do; `torch_error`: torch's
    own message, which says where the driver is too old."""
    build_text = torch_build or torch_build_text()
    remedy = f"torch says: {one_line(torch_error)}"
    if "CUDA" not in build_text:
        remedy = "a build for CUDA comes with make setup"
    return (
        f"the driver shows {gpu}, but {build_text} and cannot use it: {remedy}; make doctor says"
        f" more; or {CPU_HINT}"
    )


def _query_nvml() -> NvmlStatus:
    try:
        with open_nvml() as library:
            gpus = read_gpu_snapshot(library, details=False, topology=False).gpus
            return NvmlStatus(len(gpus), obstacles=tuple(filter(None, map(gpu_obstacle, gpus))))
    except Exception as error:  # NVML raises its own exceptions, which differ between platforms
        return NvmlStatus(error=one_line(str(error)) or type(error).__name__)
