"""The GPUs that this machine's drivers list, and those of them that a process sees.

`CUDA_VISIBLE_DEVICES` is honoured: what a process would not see is not counted. Of GPUs that are split into instances
(MIG) a process sees the first visible instance and nothing else: "CUDA can only enumerate a single compute instance",
and no whole GPU beside it (NVIDIA Multi-Instance GPU user guide, "Device Enumeration").
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sft_play.facts import amd, host, nvml
from sft_play.facts.ask import answer_of
from sft_play.facts.gpu import Gpu, capability_pair
from sft_play.facts.seen import SeenGpu
from sft_play.units import GIB, MIB

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 20
_SMI_INSTANCE_SHARE = 0.95
"""`nvidia-smi -L` gives an instance's size by its profile's name: 3g.20gb has 19,968 of 20,480 MiB, 1g.5gb 4,864 of
5,120 (tables of `nvidia-smi` in the MIG user guide): the smaller share is taken for all."""
AMD_NOTE = (
    "AMD's GPUs are planned for with the rules that were scored on NVIDIA's; nobody has compared the two yet"
    " (docs/gpus.md)"
)


@dataclass(frozen=True)
class Found:
    """A GPU or an instance of one, as the driver lists it, before `CUDA_VISIBLE_DEVICES`.

    `parent` is the UUID of an instance's GPU and `path` its old-style name; `nvlinks` counts active links, None where
    the driver does not say. `empty`: the GPU is split, and has no instance.
    """

    uuid: str
    gpu: Gpu
    parent: str = ""
    path: str = ""
    nvlinks: int | None = None
    empty: bool = False


def visible_gpus(environment: Mapping[str, str]) -> tuple[tuple[Found, ...], tuple[str, ...]]:
    """The GPUs that a process with this environment sees, in its order, and what a person should know about them.

    AMD's are asked for where NVIDIA's drivers show none: one torch is built for one of the two.
    """
    visible, notes = _seen(_probe_gpus(), environment)
    return (visible, notes) if visible else _probe_amd(environment) or (visible, notes)


def _probe_gpus() -> tuple[Found, ...]:
    """Every GPU with its UUID: NVML first, nvidia-smi where its Python package cannot."""
    seen = nvml.see(details=False, topology=False)
    listed = tuple(one for gpu in seen.gpus for one in _of_nvml(gpu)) if seen else ()
    # an NVML that runs and lists no GPU is right; one that lists some and gets no answer may be too old
    if not listed and (seen is None or seen.gpus):
        return _probe_nvidia_smi()
    for gpu in seen.gpus if seen else ():
        if not _answers(gpu):  # a GPU that fell off the bus does not hide the others
            logger.warning("GPU %d does not answer its driver (%s) and is left out", gpu.index, gpu.trouble)
    return listed


def _answers(gpu: SeenGpu) -> bool:
    return gpu.trouble is None and gpu.total_bytes is not None


def _of_nvml(gpu: SeenGpu) -> list[Found]:
    """A GPU, or its instances where it is split; nothing where it does not answer."""
    uuid, name = gpu.uuid or "", gpu.name or ""
    capability = capability_pair((gpu.compute_capability or "").split(".")) if gpu.compute_capability else None
    if not _answers(gpu):
        return []
    if not gpu.mig_enabled:
        # one without memory of its own (Grace-Blackwell desktops, Jetson) has the host's
        total, free = host.memory() if gpu.unified else (gpu.total_bytes or 0, gpu.free_bytes or 0)
        return [Found(uuid, Gpu(gpu.index, name, total, free, capability), nvlinks=gpu.nvlinks)]
    instances = []
    for item in gpu.instances:
        total = item.total_bytes or 0
        profile = item.profile or f"{total / GIB:.0f}gb"
        instance = Gpu(gpu.index, f"{name} MIG {profile}", total, item.free_bytes or 0, capability, mig=profile)
        # before driver R470 an instance was named MIG-GPU-<uuid>/<GPU instance>/<compute instance>
        instances.append(Found(item.uuid, instance, uuid, f"MIG-{uuid}/{item.place}" if item.place else ""))
    return instances or [Found(uuid, Gpu(gpu.index, name, 0, 0, capability), empty=True)]


def _seen(found: tuple[Found, ...], environment: Mapping[str, str]) -> tuple[tuple[Found, ...], tuple[str, ...]]:
    """What a CUDA process sees of the driver's list, in its order, and what a person should know about it."""
    notes = [f"GPU {item.gpu.index} is in MIG mode and has no instance: CUDA does not see it"
             for item in found if item.empty]  # fmt: skip
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    visible = found if variable is None else _visible(found, variable)  # set and empty: none at all
    visible = tuple(item for item in visible if not item.empty)
    kinds = {item.gpu.name for item in found if not item.gpu.mig}
    by_number = variable is not None and re.search(r"(^|,)\s*[0-9]", variable) is not None
    if len(kinds) > 1 and by_number and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "the GPUs differ, and CUDA numbers the fastest first while nvidia-smi numbers by slot; "
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA_VISIBLE_DEVICES mean what nvidia-smi shows"
        )
    instances = tuple(item for item in visible if item.gpu.mig)
    if instances and len(visible) > 1:
        notes.append(
            f"of {len(visible)} visible GPUs and MIG instances CUDA sees one instance only, {instances[0].uuid}; "
            "CUDA_VISIBLE_DEVICES=MIG-... chooses another"
        )
    return instances[:1] or visible, tuple(notes)


def _visible(found: tuple[Found, ...], variable: str) -> tuple[Found, ...]:
    """What `CUDA_VISIBLE_DEVICES` leaves, in its order: numbers or UUIDs; the first unknown entry ends the list."""
    chosen: list[Found] = []
    for entry in (part.strip() for part in variable.split(",")):
        matches = [item for item in found if _matches(item, entry)]
        # a short UUID that fits two GPUs names neither; a split GPU is named with all its instances
        gpus = {item.uuid if entry.startswith("MIG-") else item.parent or item.uuid for item in matches}
        if len(gpus) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return tuple(chosen)


def _matches(item: Found, entry: str) -> bool:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        return item.gpu.index == int(entry)
    if entry.startswith("MIG-"):
        return item.uuid.startswith(entry) or (item.path != "" and item.path == entry)
    return entry != "" and (item.parent or item.uuid).startswith(entry)


def _probe_nvidia_smi() -> tuple[Found, ...]:
    fields = "index,uuid,name,memory.total,memory.free,compute_cap"
    whole = []
    # nvidia-smi's csv has no quotes; no GPU has a comma in its name
    for line in _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines():
        parts = [part.strip() for part in line.split(",")]
        with contextlib.suppress(IndexError, ValueError, OverflowError):  # [N/A], or an error message
            major, _, minor = parts[5].partition(".")
            total, free = int(float(parts[3]) * MIB), int(float(parts[4]) * MIB)
            gpu = Gpu(int(parts[0]), parts[2], total, free, (int(major), int(minor or 0)))
            whole.append(Found(parts[1], gpu))
    if not whole:
        return ()
    split = _smi_instances(_nvidia_smi("-L"), whole)
    return tuple(one for item in whole for one in split.get(item.uuid, [item]))


def _nvidia_smi(*arguments: str) -> str:
    return answer_of("nvidia-smi", *arguments, timeout_s=_PROBE_TIMEOUT_S)


def _smi_instances(listed: str, whole: list[Found]) -> dict[str, list[Found]]:
    """Instances by their GPU's UUID from `nvidia-smi -L`."""
    gpus, parent = {item.uuid: item.gpu for item in whole}, ""
    instances: dict[str, list[Found]] = {}
    for line in listed.splitlines():
        gpu_line = re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line)
        instance = re.match(r"\s+MIG (\S*?(\d+)gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if gpu_line:
            parent = gpu_line[1]
        elif instance and parent in gpus:
            size = int(int(instance[2]) * GIB * _SMI_INSTANCE_SHARE)
            name = f"{gpus[parent].name} MIG {instance[1]}"
            gpu = replace(gpus[parent], name=name, total_bytes=size, free_bytes=size, mig=instance[1])
            instances.setdefault(parent, []).append(Found(instance[3], gpu, parent))
    return instances


def _probe_amd(environment: Mapping[str, str]) -> tuple[tuple[Found, ...], tuple[str, ...]] | None:
    """AMD's GPUs as a ROCm process sees them; None where their tools show none."""
    seen = amd.see()
    if seen is None:
        return None
    by_index = {gpu.index: gpu for gpu in seen.gpus}
    visible = []
    for place, index in amd.visible(tuple(by_index), environment):
        gpu = by_index[index]
        if not gpu.total_bytes:  # amd-smi gets no answer for it
            continue
        name = (gpu.name or "GPU").removeprefix("Advanced Micro Devices, Inc. ").strip().removeprefix("AMD ")
        # what torch calls its compute capability: (9, 4) of gfx942, (11, 0) of gfx1100
        match = re.fullmatch(r"gfx(\d{1,2})([0-9a-f])[0-9a-f]", gpu.compute_capability or "")
        capability = (int(match[1]), int(match[2], 16)) if match else None
        card = Gpu(
            place, f"AMD {name}", gpu.total_bytes, gpu.free_bytes, capability, architecture=gpu.compute_capability
        )
        visible.append(Found(gpu.uuid or "", card))
    return tuple(visible), ((AMD_NOTE,) if visible else ())
