"""The machine that a plan is for: this one as a process would see it, or one that is only named
(`2xH200`).

torch is not imported: a plan needs neither it nor a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sft_play.errors import HardwareError
from sft_play.log import one_line
from sft_play.machine import host
from sft_play.machine.gpu import Gpu
from sft_play.machine.gpu_catalog import CatalogEntry, catalog_key, find_catalog_entries, nearest_gpu_names
from sft_play.machine.named import MachineSpec, parse_machine_spec
from sft_play.machine.visible_gpus import ListedGpu, visible_gpus
from sft_play.text import GIB


@dataclass(frozen=True)
class Hardware:
    """What a plan may use; without GPUs, the host's memory. `named`: only a name, and not this machine. RAM and cores
    are those of one node. `link_bytes_per_s` is per GPU and one way between the GPUs of a node, `network_bytes_per_s`
    per node and one way between nodes; None: not known. `ram_given` is False where a machine was named without its RAM,
    and this machine's RAM is assumed. `notes` tell a person what was assumed."""

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
    pages: bool = False
    """Whether the driver moves GPU memory to the host's instead of running out, as Windows' does below WSL, and a
    desktop shares the GPU."""

    @property
    def device(self) -> str:
        """torch's word for where a run computes: `cuda` or `cpu`."""
        return "cuda" if self.gpus else "cpu"

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host: GPUs in each node, or the CPU's processes where there are none."""
        return max(1, -(-self.ranks // self.nodes))

    @property
    def ranks(self) -> int:
        """Processes that use all of it: one for each GPU."""
        return len(self.gpus) or self.cpu_ranks

    @property
    def gpu_groups(self) -> tuple[tuple[Gpu, ...], ...]:
        """The GPUs by name, the largest group first, then the one with more memory: a run takes GPUs of one kind."""
        gpus_by_name: dict[str, list[Gpu]] = {}
        for gpu in self.gpus:
            gpus_by_name.setdefault(gpu.name, []).append(gpu)
        groups = [tuple(group) for group in gpus_by_name.values()]
        # of two groups of one size the one whose smallest GPU has more memory
        return tuple(sorted(groups, key=lambda group: (-len(group), -min(gpu.total_bytes for gpu in group))))

    def format_gpu_choices(self, *, processes: int | None = None) -> str:
        """What to give for GPUs of one kind: `GPUS=0,2 (2 x NVIDIA A100-SXM4-80GB) or GPUS=1 (1 x NVIDIA L4)`;
        `processes`: NPROC=, where it was given."""
        choices = []
        for group in self.gpu_groups:
            chosen = group[:processes]
            nproc_prefix = f"NPROC={len(chosen)} " if processes is not None and len(chosen) < processes else ""
            numbers = ",".join(str(gpu.index) for gpu in chosen)
            choices.append(f"{nproc_prefix}GPUS={numbers} ({len(chosen)} x {chosen[0].name})")
        return " or ".join(choices)

    def limit_gpus(self, count: int) -> Hardware:
        """The same machine with its first `count` GPUs only, on as many nodes as they fill."""
        gpus = self.gpus[:count]
        return replace(self, gpus=gpus, nodes=max(1, -(-len(gpus) // self.ranks_per_node)))

    def without_gpus(self) -> Hardware:
        """The same machine for a run that asks for the CPU."""
        notes = ("train.device=cpu: the GPUs are not used",) if self.gpus else self.notes
        return replace(self, gpus=(), link_bytes_per_s=None, notes=notes)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `plan.json` and the manifest; `pages` with WSL's GPUs alone."""
        data = asdict(self)
        if not self.pages:
            del data["pages"]
        return data


AMD_NOTE = (
    "AMD's GPUs are planned for with the rules that were scored on NVIDIA's; nobody has compared the two yet, and no "
    "run starts on them (docs/gpus.md)"
)


# --- a machine that is named ------------------------------------------------------------------------------------------
def parse_hardware(text: str) -> Hardware:
    """A machine that is only named: `2xH200`, `2x8xH100` (nodes x GPUs), `2xMyGPU,mem=24GiB`, `cpu` (`named`).
    Raises HardwareError for another text, or an unknown GPU without `mem=`."""
    spec = parse_machine_spec(text)
    ram_total, _ = host.total_and_free_ram()
    ram = spec.ram or ram_total
    machine = Hardware(
        (), host.cpu_name(), spec.cores or host.cpu_cores(), ram, ram, named=True, ram_given=spec.ram is not None
    )
    if spec.gpu is None:
        return machine
    entry, notes = _find_entry(spec, text)
    gpu = _build_named_gpu(spec, entry)
    return replace(
        machine,
        gpus=tuple(replace(gpu, index=index) for index in range(spec.nodes * spec.per_node)),
        nodes=spec.nodes,
        link_bytes_per_s=spec.link or (entry.link if entry else None),
        network_bytes_per_s=spec.network,
        price_per_gpu_hour=spec.price,
        notes=(*notes, *spec.notes, *((AMD_NOTE,) if gpu.is_amd else ())),
    )


def _find_entry(spec: MachineSpec, text: str) -> tuple[CatalogEntry | None, tuple[str, ...]]:
    name = spec.gpu or ""
    entries = find_catalog_entries(name)
    if entries:
        first, *others = entries
        chosen_name = first.aliases[0] if catalog_key(first.name) == catalog_key(name) and first.aliases else first.name
        other_names = ", ".join(entry.name for entry in others)
        note = (
            f"{name} is read as {chosen_name} with {first.memory_bytes / GIB:.1f} GiB; the catalogue also has "
            f"{other_names}"
        )
        return first, (note,) if others else ()
    if spec.mem is not None:
        return None, ()
    size = 8 if catalog_key(name).startswith("laptop") else 24
    short = re.sub(r"[^A-Za-z0-9_.+()/-]", "", name)
    suggestions = nearest_gpu_names(name)
    hint = f"nearest: {', '.join(suggestions)}" if suggestions else "docs/gpus.md lists those that are"
    raise HardwareError(
        f"HARDWARE={one_line(text)}: the GPU {one_line(name)} is not in the catalogue; {hint}; or give its memory, for "
        f"one with {size} GiB HARDWARE=1x{short},mem={size}GiB"
    )


# A GPU's rates, and what the catalogue and a description call them.
_RATE_FIELDS = {
    "bandwidth": "bandwidth",
    "bf16_flops": "bf16",
    "fp16_flops": "fp16",
    "fp8_flops": "fp8",
    "fp32_flops": "fp32",
}


def _build_named_gpu(spec: MachineSpec, entry: CatalogEntry | None) -> Gpu:
    if entry is None:
        # 16-bit units are the same for both formats where there is bfloat16: one rate that was given says both
        gpu = Gpu(0, spec.gpu or "", 0, None, None, bf16_flops=spec.fp16, fp16_flops=spec.bf16)
    else:
        gpu = _fill_rates(Gpu(0, f"{entry.vendor} {entry.name}", entry.memory_bytes, None, entry.capability), entry)
    return replace(
        _fill_rates(gpu, spec),
        total_bytes=spec.mem or gpu.total_bytes,
        capability=spec.cc or gpu.capability,
        tdp_watts=spec.tdp or gpu.tdp_watts,
    )


def _fill_rates(gpu: Gpu, source: CatalogEntry | MachineSpec) -> Gpu:
    rates: dict[str, Any] = {
        field: getattr(source, name) or getattr(gpu, field) for field, name in _RATE_FIELDS.items()
    }
    watts = source.tdp_watts if isinstance(source, CatalogEntry) else gpu.tdp_watts
    return replace(gpu, **rates, tdp_watts=watts)


# --- this machine -----------------------------------------------------------------------------------------------------
def detect_hardware(environment: Mapping[str, str] | None = None) -> Hardware:
    """This machine, as a process started with `environment` would see it; rates are those of the catalogue."""
    environment = os.environ if environment is None else environment
    visible, notes = visible_gpus(environment)
    # a driver reports memory and capability; rates are the catalogue's, by the GPU's name
    entries = [_catalog_entry(item.gpu) for item in visible]
    gpus = tuple(_fill_detected_rates(item.gpu, entry) for item, entry in zip(visible, entries, strict=True))
    ram_total, ram_free = host.total_and_free_ram()
    link_rate = _slowest_link(visible, entries)
    pages = bool(gpus) and host.is_wsl()
    hardware = Hardware(
        gpus,
        host.cpu_name(),
        host.cpu_cores(),
        ram_total,
        ram_free,
        link_bytes_per_s=link_rate,
        notes=notes,
        pages=pages,
    )
    wsl_notes = ["WSL: Windows' desktop shares the GPU, and a part of what is free is left to it"] if pages else []
    return replace(hardware, notes=(*notes, *wsl_notes, *_mixed_gpu_notes(hardware)))


def _mixed_gpu_notes(hardware: Hardware) -> list[str]:
    if len(hardware.gpu_groups) < 2:
        return []
    groups_text = ", ".join(f"{len(group)} x {group[0].name}" for group in hardware.gpu_groups)
    return [
        f"the GPUs differ ({groups_text}): a plan for all of them goes by the smallest memory and the slowest rates; "
        f"make train-distributed takes those that are alike: {hardware.format_gpu_choices()}"
    ]


def _catalog_entry(gpu: Gpu) -> CatalogEntry | None:
    name = gpu.name.split(" MIG ")[0]
    # an instance's memory says nothing of its card's, which a name such as A100 needs to be one entry
    entries = find_catalog_entries(name) if gpu.mig else find_catalog_entries(name, gpu.total_bytes)
    return entries[0] if entries else None


def _fill_detected_rates(gpu: Gpu, entry: CatalogEntry | None) -> Gpu:
    """With the catalogue's rates; an instance has its share of them, by slices of seven and by memory."""
    if entry is None:
        return gpu
    gpu = replace(gpu, capability=gpu.capability or entry.capability)  # where the driver does not tell it
    if gpu.mig is None:
        return _fill_rates(gpu, entry)
    # 3g.20gb: three of seven slices; 1c.3g.20gb: a compute instance with one of those three, and the memory of all
    match = re.match(r"(?:([0-9])c\.)?([0-9])g\.", gpu.mig)
    compute_share = int(match[1] or match[2]) / 7 if match else 1.0
    memory_share = min(1.0, gpu.total_bytes / entry.driver_bytes)
    rates = {name: getattr(entry, name) for name in ("bf16", "fp16", "fp8", "fp32")}
    instance_rates: dict[str, Any] = {name: rate and rate * compute_share for name, rate in rates.items()}
    return _fill_rates(gpu, replace(entry, bandwidth=entry.bandwidth * memory_share, **instance_rates))


def _slowest_link(gpus: tuple[ListedGpu, ...], entries: list[CatalogEntry | None]) -> float | None:
    """Bytes per second between the GPUs, one way: the slowest one's, PCIe's where no link is active or cards are only
    joined by bridges; None where one is not known."""
    known_entries = [entry for entry in entries if entry is not None]
    if len(known_entries) < len(entries):
        return None
    pairs = zip(gpus, known_entries, strict=True)
    return min((entry.pcie if item.nvlinks == 0 else entry.link for item, entry in pairs), default=None)
