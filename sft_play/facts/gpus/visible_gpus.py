"""The GPUs that this machine's drivers list, and those of them that a process sees.

`CUDA_VISIBLE_DEVICES` is honoured: what a process would not see is not counted. Of GPUs that are split into instances
(MIG) a process sees the first visible instance and nothing else: "CUDA can only enumerate a single compute instance",
and no whole GPU beside it (NVIDIA Multi-Instance GPU user guide, "Device Enumeration").
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sft_play.facts.gpus import nvml
from sft_play.facts.gpus.gpu import Gpu, GpuStatus, MigInstance
from sft_play.facts.gpus.gpu_catalog import find_catalog_entries
from sft_play.facts.host import program_output
from sft_play.units import GIB

logger = logging.getLogger(__name__)

# Of the size that a profile is named by: 3g.20gb has 19,968 of 20,480 MiB, 1g.5gb 4,864 of 5,120 (tables of
# `nvidia-smi` in the MIG user guide): the smaller share is assumed for all.
_INSTANCE_SHARE = 0.95
# A GPU whose driver does not tell its name.
UNNAMED_GPU = "NVIDIA GPU"


@dataclass(frozen=True)
class ListedGpu:
    """A GPU or an instance of one, as the driver lists it, before `CUDA_VISIBLE_DEVICES`. `parent_uuid` is the UUID of
    an instance's GPU; `nvlinks` counts active links, None where the driver does not say. `note` is what a person should
    know of it; one that is not `usable` is listed for its note alone."""

    uuid: str
    gpu: Gpu
    parent_uuid: str = ""
    nvlinks: int | None = None
    note: str = ""
    usable: bool = True


def visible_gpus(environment: Mapping[str, str]) -> tuple[tuple[ListedGpu, ...], tuple[str, ...]]:
    """The GPUs that a process with this environment sees, in its order, and what a person should know about them."""
    return _apply_visibility(_list_gpus(), environment)


def _list_gpus() -> tuple[ListedGpu, ...]:
    snapshot = nvml.gpu_snapshot(details=False, topology=False)
    if snapshot is None:
        return ()
    listed_gpus: list[ListedGpu] = []
    for gpu in snapshot.gpus:
        if gpu.trouble:  # a GPU that fell off the bus does not hide the others
            logger.warning("%s and is left out", gpu_obstacle(gpu))
        items = _expand_gpu(gpu)
        if gpu.mig_enabled and not gpu.instances and "MIG instances" in gpu.withheld:
            items = _read_smi_instances(items[0]) or items
        listed_gpus += items
    return tuple(listed_gpus)


def gpu_obstacle(gpu: GpuStatus) -> str | None:
    """Why no run can use a GPU that NVML lists; None where one can."""
    prefix = f"GPU {gpu.index}"
    if gpu.trouble:
        return f"{prefix} does not answer its driver ({gpu.trouble})"
    if gpu.mig_enabled and not gpu.instances:
        withheld = gpu.withheld.get("MIG instances")
        if withheld:
            return f"{prefix} is in MIG mode, and NVML does not show its instances ({withheld})"
        return f"{prefix} is in MIG mode and has no instance: CUDA does not see it"
    if gpu.mig_enabled:
        has_known_size = any(_instance_bytes(item) for item in gpu.instances)
        return None if has_known_size else f"{prefix}: NVML tells the memory of none of its MIG instances"
    if not gpu.total_bytes and not _catalog_bytes(gpu.name):
        return f"{prefix}: {_unknown_memory_text(gpu)}, and the catalogue has no {gpu.name}"
    return None


def _unknown_memory_text(gpu: GpuStatus) -> str:
    return f"NVML does not tell its memory ({gpu.withheld.get('memory', 'no answer')})"


def _expand_gpu(gpu: GpuStatus) -> list[ListedGpu]:
    uuid = gpu.uuid or ""
    major, _, minor = (gpu.compute_capability or "").partition(".")
    capability = (int(major), int(minor)) if major else None
    name = gpu.name or next((item.card for item in gpu.instances if item.card), None) or UNNAMED_GPU
    gpu_facts = Gpu(gpu.index, name, gpu.total_bytes or 0, gpu.free_bytes, capability)
    reason = gpu_obstacle(gpu)
    if reason is not None:
        return [ListedGpu(uuid, gpu_facts, note="" if gpu.trouble else reason, usable=False)]
    if not gpu.mig_enabled:
        total, note = gpu_facts.total_bytes, ""
        if not total:
            total = _catalog_bytes(name)
            note = f"GPU {gpu.index}: {_unknown_memory_text(gpu)}; "
            note += f"planned with the catalogue's {total / GIB:.1f} GiB, as if no other process held any"
        return [ListedGpu(uuid, replace(gpu_facts, total_bytes=total), nvlinks=gpu.nvlinks, note=note)]
    instances = []
    for item in gpu.instances:
        total = _instance_bytes(item)
        profile = item.profile or f"{total / GIB:.0f}gb"
        instance = replace(
            gpu_facts, name=f"{name} MIG {profile}", total_bytes=total, free_bytes=item.free_bytes, mig=profile
        )
        instances += [ListedGpu(item.uuid, instance, uuid)] if total else []
    return instances


def _instance_bytes(item: MigInstance) -> int:
    return item.total_bytes or _profile_bytes(item.profile)


def _profile_bytes(profile: str) -> int:
    match = re.search(r"(\d+)gb", profile)
    return int(int(match[1]) * GIB * _INSTANCE_SHARE) if match else 0


def _catalog_bytes(name: str | None) -> int:
    return min((entry.driver_bytes for entry in find_catalog_entries(name or "")), default=0)


def _apply_visibility(
    listed_gpus: tuple[ListedGpu, ...], environment: Mapping[str, str]
) -> tuple[tuple[ListedGpu, ...], tuple[str, ...]]:
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    visible = listed_gpus if variable is None else _filter_visible(listed_gpus, variable)  # set and empty: none at all
    visible = tuple(item for item in visible if item.usable)
    notes = [item.note for item in listed_gpus if item.note and (item in visible or not item.usable)]
    kinds = {item.gpu.name for item in listed_gpus if not item.gpu.mig}
    uses_numbers = variable is not None and re.search(r"(^|,)\s*[0-9]", variable) is not None
    if len(kinds) > 1 and uses_numbers and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
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


def _filter_visible(listed_gpus: tuple[ListedGpu, ...], variable: str) -> tuple[ListedGpu, ...]:
    """What `CUDA_VISIBLE_DEVICES` leaves, in its order: numbers or UUIDs; the first unknown entry ends the list."""
    visible: list[ListedGpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        matches = [item for item in listed_gpus if _matches_entry(item, entry)]
        if not matches and entry.startswith(("MIG-", "GPU-")) and len(listed_gpus) == 1 and not listed_gpus[0].uuid:
            matches = list(listed_gpus)  # the only one there is, whose UUID the driver does not tell
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


def _read_smi_instances(split_gpu: ListedGpu) -> list[ListedGpu]:
    """The instances of a split GPU as `nvidia-smi -L` names them, each with the memory that its profile has."""
    instances: list[ListedGpu] = []
    is_own_section = False
    for line in program_output("nvidia-smi", "-L").splitlines():
        if match := re.match(r"GPU (\d+):", line):
            is_own_section = int(match[1]) == split_gpu.gpu.index
        elif is_own_section and (
            match := re.match(r"\s+MIG (\S*?\d+gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        ):
            total_bytes, name = _profile_bytes(match[1]), f"{split_gpu.gpu.name} MIG {match[1]}"
            gpu = replace(split_gpu.gpu, name=name, total_bytes=total_bytes, free_bytes=None, mig=match[1])
            instances.append(ListedGpu(match[2], gpu, split_gpu.uuid))
    return instances
