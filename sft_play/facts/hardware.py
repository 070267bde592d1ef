"""The machine: GPUs found through NVML, nvidia-smi or AMD's tools, or named (`2xH200`); no torch is imported.

`CUDA_VISIBLE_DEVICES` is honoured: what a process would not see is not counted. Of GPUs that are split into instances
(MIG) a process sees the first visible instance and nothing else: "CUDA can only enumerate a single compute instance",
and no whole GPU beside it (NVIDIA Multi-Instance GPU user guide, "Device Enumeration").
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError
from sft_play.facts import amd, nvml
from sft_play.facts.ask import answer_of, text_of
from sft_play.facts.gpu_catalog import AMD_BF16, BF16_CAPABILITY, CatalogEntry, amd_entry, find, key_of, nearest
from sft_play.facts.machine_spec import MachineSpec, is_path, read_spec
from sft_play.facts.seen import Seen, SeenGpu
from sft_play.log import one_line
from sft_play.units import GIB, MIB

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 20
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Gpu:
    """One GPU: `index` as `CUDA_VISIBLE_DEVICES` counts it, memory in bytes; `free_bytes` is None when named.

    `total_bytes` is what the driver reports of a GPU that was found, and what torch could use of one that is named.
    `bandwidth` is bytes per second; rates are dense operations per second with 32-bit accumulation; None: not known,
    or that the GPU has no such units. `mig` is the profile of an instance (`1g.10gb`), None for a whole GPU.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int] | None
    bandwidth: float | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    fp8_flops: float | None = None
    fp32_flops: float | None = None
    tdp_watts: int | None = None
    mig: str | None = None
    architecture: str | None = None
    """Of an AMD GPU that was found: `gfx942`."""

    @property
    def is_amd(self) -> bool:
        """Whether torch reaches it through ROCm, where it is a `cuda` device as well."""
        return self.architecture is not None or self.name.startswith("AMD ")

    @property
    def has_bf16(self) -> bool:
        """Whether its matrix units compute in bfloat16; unknown counts as yes."""
        if self.architecture is not None:
            return AMD_BF16.match(self.architecture) is not None
        return self.capability is None or self.capability >= BF16_CAPABILITY

    def rate(self, dtype: str) -> float | None:
        """Dense operations per second of matrix products in `bfloat16`, `float16`, `float8` or `float32`."""
        rates = {"bfloat16": self.bf16_flops, "float16": self.fp16_flops, "float8": self.fp8_flops}
        return rates.get(dtype, self.fp32_flops)


@dataclass(frozen=True)
class Hardware:
    """What a plan may use; without GPUs, the host's memory. `named`: only a name, and not this machine.

    RAM and cores are those of one node. `link_bytes_per_s` is per GPU and one way between the GPUs of a node,
    `network_bytes_per_s` per node and one way between nodes; None: not known. `ram_given` is False where a machine was
    named without its RAM, and this machine's RAM is assumed. `notes` tell a person what was assumed.
    """

    gpus: tuple[Gpu, ...]
    cpu_name: str
    cpu_cores: int
    ram_bytes: int
    ram_free_bytes: int
    named: bool = False
    nodes: int = 1
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    price_per_gpu_hour: float | None = None
    notes: tuple[str, ...] = ()
    ram_given: bool = True
    cpu_ranks: int = 1
    """Processes that share the CPUs of all nodes where there are no GPUs."""
    shared_gpu: str | None = None
    """A GPU without memory of its own (Apple's), which one process can use; then the host's memory is what counts."""
    pages: bool = False
    """Whether the driver moves GPU memory to the host's instead of running out, as Windows' does below WSL, and a
    desktop shares the GPU."""

    @property
    def device(self) -> str:
        """torch's word for where a run computes: `cuda` (AMD's GPUs too), `mps` or `cpu`."""
        if self.gpus:
            return "cuda"
        return "mps" if self.shared_gpu and self.cpu_ranks == 1 else "cpu"

    @property
    def gpus_per_node(self) -> int:
        """Ranks that share a host: GPUs in each node, or the CPU's processes where there are none."""
        return max(1, -(-self.ranks // self.nodes))

    @property
    def ranks(self) -> int:
        """Processes that use all of it: one for each GPU."""
        return len(self.gpus) or self.cpu_ranks

    @property
    def mig(self) -> bool:
        """Whether its GPU is an instance of a split one."""
        return any(gpu.mig for gpu in self.gpus)

    @property
    def alike(self) -> tuple[tuple[Gpu, ...], ...]:
        """The GPUs by kind, the largest group first, then the one with more memory: a run takes GPUs of one kind.

        GPUs of one name are of one kind, even where their memory differs: a plan takes the smallest.
        """
        kinds: dict[str, list[Gpu]] = {}
        for gpu in self.gpus:
            kinds.setdefault(gpu.name, []).append(gpu)
        groups = [tuple(group) for group in kinds.values()]
        return tuple(sorted(groups, key=lambda group: (-len(group), -min(gpu.total_bytes for gpu in group))))

    def alike_words(self, *, processes: int | None = None, variable: str = "GPUS") -> str:
        """What to give for GPUs of one kind: `GPUS=0,2 (2 x NVIDIA A100-SXM4-80GB) or GPUS=1 (1 x NVIDIA L4)`.

        Args:
            processes: NPROC=, where it was given: no more GPUs than that are named, and it is lowered where a kind has
                fewer.
            variable: what names GPUs, `CUDA_VISIBLE_DEVICES` for ranks that a person starts.
        """
        choices = []
        for group in self.alike:
            some = group[:processes]
            fewer = f"NPROC={len(some)} " if processes is not None and len(some) < processes else ""
            numbers = ",".join(str(gpu.index) for gpu in some)
            choices.append(f"{fewer}{variable}={numbers} ({len(some)} x {some[0].name})")
        return " or ".join(choices)

    def first(self, count: int) -> Hardware:
        """The same machine with its first `count` GPUs only, on as many nodes as they fill."""
        gpus = self.gpus[:count]
        return replace(self, gpus=gpus, nodes=max(1, -(-len(gpus) // self.gpus_per_node)))

    def without_gpus(self) -> Hardware:
        """The same machine for a run that asks for the CPU."""
        notes = ("train.device=cpu: the GPUs are not used",) if self.device != "cpu" else self.notes
        return replace(self, gpus=(), link_bytes_per_s=None, shared_gpu=None, notes=notes)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `plan.json` and the manifest; what only AMD's, Apple's or WSL's GPUs have, with them alone."""
        data = asdict(self)
        if self.shared_gpu is None:
            del data["shared_gpu"]
        if not self.pages:
            del data["pages"]
        for gpu in data["gpus"]:
            if gpu["architecture"] is None:
                del gpu["architecture"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hardware:
        """The machine that `as_json` wrote."""
        gpus = tuple(Gpu(**{**gpu, "capability": _pair(gpu["capability"])}) for gpu in data["gpus"])
        return cls(**{**data, "gpus": gpus, "notes": tuple(data["notes"])})


def _pair(value: Any) -> tuple[int, int] | None:
    return (int(value[0]), int(value[1])) if value else None


# --- a machine that is named -----------------------------------------------------------------------------------------


def named(text: str) -> Hardware:
    """A machine that is only named: `2xH200`, `2x8xH100` (nodes x GPUs), `2xMyGPU,mem=24GiB`, `cpu`, a YAML file.

    The grammar and the file's keys are those of `machine_spec`; options override the catalogue's figures.

    Raises:
        HardwareError: the text is not of that grammar, names no GPU, or one that is unknown and `mem=` is missing.
    """
    spec = read_spec(text)
    ram_total, _ = _memory()
    ram = spec.ram or ram_total
    host = Hardware((), _cpu_name(), spec.cores or _cpu_cores(), ram, ram, named=True, ram_given=spec.ram is not None)
    if spec.gpu is None:
        return host
    entry, notes = _entry(spec, text)
    gpu = _named_gpu(spec, entry)
    return replace(
        host,
        gpus=tuple(replace(gpu, index=index) for index in range(spec.nodes * spec.per_node)),
        nodes=spec.nodes,
        link_bytes_per_s=spec.link or (entry.link if entry else None),
        network_bytes_per_s=spec.network,
        price_per_gpu_hour=spec.price,
        notes=(*notes, *spec.notes, *((AMD_NOTE,) if gpu.is_amd else ())),
    )


def _entry(spec: MachineSpec, text: str) -> tuple[CatalogEntry | None, tuple[str, ...]]:
    """The catalogue's entry of the GPU's name, and what was assumed where the name has several meanings."""
    name = spec.gpu or ""
    entries = find(name)
    if entries:
        first, *others = entries
        chosen = first.aliases[0] if key_of(first.name) == key_of(name) and first.aliases else first.name
        listed = ", ".join(entry.name for entry in others)
        note = f"{name} is read as {chosen} with {first.memory_bytes / GIB:.1f} GiB; the catalogue also has {listed}"
        return first, (note,) if others else ()
    if spec.mem is not None:
        return None, ()
    how = "mem: 24GiB beside its name" if is_path(text) else f"HARDWARE=1x{name.replace(' ', '')},mem=24GiB"
    raise HardwareError(
        f"HARDWARE={one_line(text)}: the GPU {one_line(name)} is not in the catalogue; nearest: "
        f"{', '.join(nearest(name))}; or give its memory: {how}"
    )


def _named_gpu(spec: MachineSpec, entry: CatalogEntry | None) -> Gpu:
    if entry is None:
        # 16-bit units are the same for both formats where there is bfloat16: one rate that was given says both
        gpu = Gpu(0, spec.gpu or "", 0, None, None, bf16_flops=spec.fp16, fp16_flops=spec.bf16)
    else:
        gpu = _rated(Gpu(0, f"{entry.vendor} {entry.name}", entry.memory_bytes, None, entry.capability), entry)
    return replace(
        gpu,
        total_bytes=spec.mem or gpu.total_bytes,
        capability=spec.cc or gpu.capability,
        bandwidth=spec.bandwidth or gpu.bandwidth,
        bf16_flops=spec.bf16 or gpu.bf16_flops,
        fp16_flops=spec.fp16 or gpu.fp16_flops,
        fp8_flops=spec.fp8 or gpu.fp8_flops,
        fp32_flops=spec.fp32 or gpu.fp32_flops,
        tdp_watts=spec.tdp or gpu.tdp_watts,
    )


def _rated(gpu: Gpu, entry: CatalogEntry) -> Gpu:
    return replace(
        gpu,
        bandwidth=entry.bandwidth,
        bf16_flops=entry.bf16,
        fp16_flops=entry.fp16,
        fp8_flops=entry.fp8,
        fp32_flops=entry.fp32,
        tdp_watts=entry.tdp_watts,
    )


# --- this machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
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


def detect(environment: Mapping[str, str] | None = None) -> Hardware:
    """This machine, as a process started with `environment` would see it; rates are those of the catalogue."""
    environment = os.environ if environment is None else environment
    visible, notes = _seen(_probe_gpus(), environment)
    if not visible:
        visible, notes = _probe_amd(environment) or (visible, notes)
    entries = [_entry_of(item.gpu) for item in visible]
    gpus = tuple(_detected(item.gpu, entry) for item, entry in zip(visible, entries, strict=True))
    ram_total, ram_free = _memory()
    link = _link(visible, entries)
    pages = bool(gpus) and on_wsl()
    hardware = Hardware(
        gpus, _cpu_name(), _cpu_cores(), ram_total, ram_free, link_bytes_per_s=link, notes=notes, pages=pages
    )
    shared = ["WSL: Windows' desktop shares the GPU, and a part of what is free is left to it"] if pages else []
    hardware = replace(hardware, notes=(*notes, *shared, *_mixed(hardware)))
    chip = None if gpus else _apple_chip()
    return with_shared_gpu(hardware, chip) if chip else hardware


OSRELEASE = Path("/proc/sys/kernel/osrelease")
"""The kernel's release; WSL's own kernel has Microsoft's name in it."""


def on_wsl(osrelease: Path | None = None) -> bool:
    """Whether this Linux runs in Windows (WSL), by the kernel's release."""
    return "microsoft" in text_of(osrelease or OSRELEASE).lower()


def _mixed(hardware: Hardware) -> list[str]:
    """What a person should know of GPUs that differ: which a plan goes by, and which can train together."""
    sizes = sorted({round(gpu.total_bytes / GIB, 1) for gpu in hardware.gpus})
    if len(hardware.alike) > 1:
        kinds = ", ".join(f"{len(group)} x {group[0].name}" for group in hardware.alike)
        return [
            f"the GPUs differ ({kinds}): a plan for all of them goes by the smallest memory and the slowest rates; "
            f"make train-distributed takes those that are alike: {hardware.alike_words()}"
        ]
    if len(sizes) > 1 and sizes[-1] - sizes[0] >= 0.5:
        return [f"the GPUs have {sizes[0]:g} to {sizes[-1]:g} GiB: plans go by the smallest"]
    return []


def _entry_of(gpu: Gpu) -> CatalogEntry | None:
    if gpu.is_amd:
        return amd_entry(gpu.name)
    name = gpu.name.split(" MIG ")[0]
    entries = find(name) if gpu.mig else find(name, gpu.total_bytes)
    return entries[0] if entries else None


def _detected(gpu: Gpu, entry: CatalogEntry | None) -> Gpu:
    """With the catalogue's rates; an instance has its share of them, by slices of seven and by memory."""
    if entry is None:
        return gpu
    if gpu.mig is None:
        return _rated(gpu, entry)
    match = re.match(r"(?:[0-9]c\.)?([0-9])g\.", gpu.mig)
    compute, memory = (int(match[1]) / 7 if match else 1.0), min(1.0, gpu.total_bytes / entry.driver_bytes)
    rates = {name: getattr(entry, name) for name in ("bf16", "fp16", "fp8", "fp32")}
    part: dict[str, Any] = {name: rate and rate * compute for name, rate in rates.items()}
    return _rated(gpu, replace(entry, bandwidth=entry.bandwidth * memory, **part))


_NVLINK_PER_LINK = {6: 20e9, 7: 25e9, 8: 25e9, 9: 25e9, 10: 50e9}
"""Bytes per second one way of an NVLink by the major compute capability: P100 80 GB/s on 4, V100 150 on 6, A100 300
on 12, H100 450 on 18, B200 900 on 18 (figures of the catalogue)."""
_NVLINK_GA10X = 14.0625e9
"""The same of A40, RTX A6000 and RTX 3090: 112.5 GB/s both ways on 4 links (data sheet of the A40)."""


def _link(gpus: tuple[_Found, ...], entries: list[CatalogEntry | None]) -> float | None:
    """Bytes per second between the GPUs, one way: the slowest one's; None where one is not known."""
    rates: list[float] = []
    for item, entry in zip(gpus, entries, strict=True):
        major, minor = item.gpu.capability or (0, 0)
        if item.nvlinks and entry and entry.nvlink:
            rates.append(entry.nvlink)
        elif item.nvlinks and len(gpus) == 2:  # a bridge, which counts only where it joins all GPUs
            rate = _NVLINK_GA10X if (major, minor) == (8, 6) else _NVLINK_PER_LINK.get(major, 25e9)
            rates.append(item.nvlinks * rate)
        elif entry is None:
            return None
        else:
            rates.append(entry.pcie if item.nvlinks == 0 else entry.link)
    return min(rates, default=None)


def _seen(found: tuple[_Found, ...], environment: Mapping[str, str]) -> tuple[tuple[_Found, ...], tuple[str, ...]]:
    """What a CUDA process sees of the driver's list, in its order, and what a person should know about it."""
    notes = [f"GPU {item.gpu.index} is in MIG mode and has no instance: CUDA does not see it"
             for item in found if item.empty]  # fmt: skip
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    visible = found if variable is None else _visible(found, variable)
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


def _visible(found: tuple[_Found, ...], variable: str) -> tuple[_Found, ...]:
    """What `CUDA_VISIBLE_DEVICES` leaves, in its order: numbers or UUIDs; the first unknown entry ends the list."""
    chosen: list[_Found] = []
    for entry in (part.strip() for part in variable.split(",")):
        matches = [item for item in found if _matches(item, entry)]
        # a short UUID that fits two GPUs names neither; a split GPU is named with all its instances
        gpus = {item.uuid if entry.startswith("MIG-") else item.parent or item.uuid for item in matches}
        if len(gpus) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return tuple(chosen)


def _matches(item: _Found, entry: str) -> bool:
    if re.fullmatch(r"[0-9]{1,9}", entry):
        return item.gpu.index == int(entry)
    if entry.startswith("MIG-"):
        return item.uuid.startswith(entry) or (item.path != "" and item.path == entry)
    return entry != "" and (item.parent or item.uuid).startswith(entry)


def _probe_gpus() -> tuple[_Found, ...]:
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


def _of_nvml(gpu: SeenGpu) -> list[_Found]:
    """A GPU, or its instances where it is split; nothing where it does not answer."""
    uuid, name = gpu.uuid or "", gpu.name or ""
    capability = _pair((gpu.compute_capability or "").split(".")) if gpu.compute_capability else None
    if not _answers(gpu):
        return []
    if not gpu.mig_enabled:
        # one without memory of its own (Grace-Blackwell desktops, Jetson) has the host's
        total, free = _memory() if gpu.unified else (gpu.total_bytes or 0, gpu.free_bytes or 0)
        return [_Found(uuid, Gpu(gpu.index, name, total, free, capability), nvlinks=gpu.nvlinks)]
    instances = []
    for item in gpu.instances:
        total = item.total_bytes or 0
        profile = item.profile or f"{total / GIB:.0f}gb"
        instance = Gpu(gpu.index, f"{name} MIG {profile}", total, item.free_bytes or 0, capability, mig=profile)
        # before driver R470 an instance was named MIG-GPU-<uuid>/<GPU instance>/<compute instance>
        instances.append(_Found(item.uuid, instance, uuid, f"MIG-{uuid}/{item.place}" if item.place else ""))
    return instances or [_Found(uuid, Gpu(gpu.index, name, 0, 0, capability), empty=True)]


def _probe_nvidia_smi() -> tuple[_Found, ...]:
    fields = "index,uuid,name,memory.total,memory.free,compute_cap"
    whole = []
    for line in _nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines():
        parts = [part.strip() for part in line.split(",")]
        with contextlib.suppress(IndexError, ValueError, OverflowError):  # [N/A], or an error message
            major, _, minor = parts[5].partition(".")
            total, free = int(float(parts[3]) * MIB), int(float(parts[4]) * MIB)
            gpu = Gpu(int(parts[0]), parts[2], total, free, (int(major), int(minor or 0)))
            whole.append(_Found(parts[1], gpu))
    if not whole:
        return ()
    split = _smi_instances(_nvidia_smi("-L"), whole)
    return tuple(one for item in whole for one in split.get(item.uuid, [item]))


def _nvidia_smi(*arguments: str) -> str:
    return answer_of("nvidia-smi", *arguments, timeout_s=_PROBE_TIMEOUT_S)


_SMI_INSTANCE_SHARE = 0.95
"""`nvidia-smi -L` gives an instance's size by its profile's name: 3g.20gb has 19,968 of 20,480 MiB, 1g.5gb 4,864 of
5,120 (tables of `nvidia-smi` in the MIG user guide): the smaller share is taken for all."""


def _smi_instances(listed: str, whole: list[_Found]) -> dict[str, list[_Found]]:
    """Instances by their GPU's UUID from `nvidia-smi -L`."""
    gpus, parent = {item.uuid: item.gpu for item in whole}, ""
    instances: dict[str, list[_Found]] = {}
    for line in listed.splitlines():
        gpu_line = re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line)
        instance = re.match(r"\s+MIG (\S*?(\d+)gb\S*)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if gpu_line:
            parent = gpu_line[1]
        elif instance and parent in gpus:
            size = int(int(instance[2]) * GIB * _SMI_INSTANCE_SHARE)
            name = f"{gpus[parent].name} MIG {instance[1]}"
            gpu = replace(gpus[parent], name=name, total_bytes=size, free_bytes=size, mig=instance[1])
            instances.setdefault(parent, []).append(_Found(instance[3], gpu, parent))
    return instances


# --- AMD --------------------------------------------------------------------------------------------------------------

AMD_NOTE = (
    "AMD's GPUs are planned for with the rules that were scored on NVIDIA's; nobody has compared the two yet"
    " (docs/gpus.md)"
)


def _probe_amd(environment: Mapping[str, str]) -> tuple[tuple[_Found, ...], tuple[str, ...]] | None:
    """AMD's GPUs as a ROCm process sees them; None where their tools show none."""
    seen = amd.see()
    if seen is None:
        return None
    by_index = {gpu.index: gpu for gpu in seen.gpus}
    visible = []
    for place, index in amd.visible(tuple(by_index), environment):
        gpu = by_index[index]
        if not gpu.total_bytes:
            continue
        name = (gpu.name or "GPU").removeprefix("Advanced Micro Devices, Inc. ").strip().removeprefix("AMD ")
        # what torch calls its compute capability: (9, 4) of gfx942, (11, 0) of gfx1100
        match = re.fullmatch(r"gfx(\d{1,2})([0-9a-f])[0-9a-f]", gpu.compute_capability or "")
        capability = (int(match[1]), int(match[2], 16)) if match else None
        card = Gpu(
            place, f"AMD {name}", gpu.total_bytes, gpu.free_bytes, capability, architecture=gpu.compute_capability
        )
        visible.append(_Found(gpu.uuid or "", card))
    return tuple(visible), ((AMD_NOTE,) if visible else ())


# --- Apple ------------------------------------------------------------------------------------------------------------

_SMALL_MAC = 36 * GIB
_METAL_SHARES = (2 / 3, 3 / 4)
"""Of a Mac's memory what Metal recommends that one process uses at most: up to `_SMALL_MAC`, and above it
(`recommendedMaxWorkingSetSize`, which `torch.mps.recommended_max_memory` reports)."""


def _apple_chip() -> str | None:
    """`Apple M3 Max`; None on another machine than a Mac with Apple's own chip."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return None
    return answer_of("sysctl", "-n", "machdep.cpu.brand_string").strip() or "Apple GPU"


def seen_on_mac() -> Seen | None:
    """The GPU of this Mac, which has the machine's memory; None on another machine."""
    chip = _apple_chip()
    if chip is None:
        return None
    total, free = _memory()
    gpu = SeenGpu(0, chip, "Apple", total_bytes=total, used_bytes=total - free, free_bytes=free, unified=True)
    return Seen((gpu,), "sysctl")


def with_shared_gpu(hardware: Hardware, chip: str) -> Hardware:
    """The machine with a GPU that shares its memory, of which Metal leaves a part to one process."""
    share = _METAL_SHARES[hardware.ram_bytes > _SMALL_MAC]
    usable = min(hardware.ram_free_bytes, int(hardware.ram_bytes * share))
    note = (
        f"{chip} shares the machine's memory: one process trains on it (MPS), planned as on a CPU with "
        f"{usable / GIB:.1f} GiB, what is free and Metal recommends; its speed is not known, and nobody has compared "
        "plan and run yet (docs/gpus.md)"
    )
    return replace(hardware, shared_gpu=chip, ram_free_bytes=usable, notes=(*hardware.notes, note))


# --- the host --------------------------------------------------------------------------------------------------------


def _memory() -> tuple[int, int]:
    """Total and available RAM in bytes, no more than the control groups of this process allow."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    # the kernel kills a process at its group's limit, however much RAM the host has left
    for folder, limit_file, use_file in _cgroup_folders():
        limit = _number(folder / limit_file)
        if limit is not None and limit < memory.total:
            # file cache that can be dropped does not count as used
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
            used = max(0, (_number(folder / use_file) or 0) - (int(cache[1]) if cache else 0))
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    """Folders of the memory controller from this process's group up to the root, version 2 then version 1."""
    paths = {"": "/", "memory": "/"}
    for line in text_of(_OWN_CGROUP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for name in controllers.split(","):
            if name in paths:
                paths[name] = path
    folders = []
    for root, path, names in (
        (_CGROUP, paths[""], ("memory.max", "memory.current")),
        (_CGROUP / "memory", paths["memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        own = root / path.strip("/")
        folders += [(folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders


def _number(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


def _cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"
