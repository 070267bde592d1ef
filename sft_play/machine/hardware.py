"""The machine that a plan is for: this one as a process would see it, or one that is only named
(`2xH200`).

torch is not imported: a plan needs neither it nor a GPU.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sft_play.errors import HardwareError
from sft_play.log import one_line
from sft_play.machine import host
from sft_play.machine.gpu import Gpu
from sft_play.machine.gpu_catalog import (
    CatalogEntry,
    catalog_key,
    find_catalog_entries,
    nearest_gpu_names,
)
from sft_play.machine.visible_gpus import visible_gpus
from sft_play.spelling import did_you_mean
from sft_play.text import GIB


@dataclass(frozen=True)
class Hardware:
    """What a plan may use; without GPUs, the host's memory. `named`: only a name, and not this
    machine. RAM and cores are those of one node. `link_bytes_per_s` is per GPU and one way between
    the GPUs of a node, `network_bytes_per_s` per node and one way between nodes; None: not known.
    `ram_given` is False where a machine was named without its RAM, and this machine's RAM is
    assumed. `notes` tell a person what was assumed."""

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
    # Processes that share the CPUs of all nodes where there are no GPUs.
    cpu_ranks: int = 1
    # Whether the driver moves GPU memory to the host's instead of running out, as Windows' does
    # below WSL, and a desktop shares the GPU.
    pages: bool = False

    @property
    def device(self) -> str:
        """torch's word for where a run computes: `cuda` or `cpu`."""
        return "cuda" if self.gpus else "cpu"

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host: GPUs in each node, or the CPU's processes where there are
        none."""
        return max(1, -(-self.ranks // self.nodes))

    @property
    def ranks(self) -> int:
        """Processes that use all of it: one for each GPU."""
        return len(self.gpus) or self.cpu_ranks

    @property
    def gpu_groups(self) -> tuple[tuple[Gpu, ...], ...]:
        """The GPUs by name, the largest group first, then the one with more memory: a run takes
        GPUs of one kind."""
        gpus_by_name: dict[str, list[Gpu]] = {}
        for gpu in self.gpus:
            gpus_by_name.setdefault(gpu.name, []).append(gpu)
        groups = [tuple(group) for group in gpus_by_name.values()]
        # of two groups of one size the one whose smallest GPU has more memory
        return tuple(
            sorted(groups, key=lambda group: (-len(group), -min(gpu.total_bytes for gpu in group)))
        )

    def format_gpu_choices(self, *, processes: int | None = None) -> str:
        """What to give for GPUs of one kind: `GPUS=0,2 (2 x NVIDIA A100-SXM4-80GB) or GPUS=1 (1 x
        NVIDIA L4)`; `processes`: NPROC=, where it was given."""
        choices = []
        for group in self.gpu_groups:
            chosen = group[:processes]
            choice = (
                f"GPUS={','.join(str(gpu.index) for gpu in chosen)} ({len(chosen)} x"
                f" {chosen[0].name})"
            )
            if processes is not None and len(chosen) < processes:
                choice = f"NPROC={len(chosen)} {choice}"
            choices.append(choice)
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


# --- a machine that is named ----------------------------------------------------------------------
# Text in, numbers out. The grammar is `[NODES x] [COUNT x] GPU [, OPTION=VALUE ...]`; `cpu` is a
# machine without GPUs. docs/gpus.md says what the options mean.

MAX_GPUS = 100_000
_DECIMAL_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY_UNITS = {"i": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"


# How a value is written: its pattern, the factor of its unit, the least and most that it may be,
# and that in words.
_ValueForm = tuple[str, Callable[[re.Match[str]], float], float, float, str]
_SIZE: _ValueForm = (
    rf"(?i){_NUMBER}\s*([KMGT]?)(i?b|i)",
    lambda match: (
        _BINARY_UNITS[match[2].upper() + "i"]
        if "i" in match[3].lower()
        else _DECIMAL_UNITS[match[2].upper()]
    ),
    2**20,
    2**50,
    "a size with its unit, MiB, GiB, TiB, MB, GB or TB, such as 24GiB",
)
_RATE: _ValueForm = (
    rf"{_NUMBER}\s*([KMGT]i?)(B|b|bit)(?:/s|ps|s)?",  # case matters: B is a byte, b a bit
    lambda match: {**_DECIMAL_UNITS, **_BINARY_UNITS}[match[2]] / (1 if match[3] == "B" else 8),
    1e3,
    1e17,
    "a rate with its unit, GB/s or TB/s (bytes), or Gbps (bits), such as 900GB/s or 400Gbps",
)
_FLOPS: _ValueForm = (
    rf"(?i){_NUMBER}\s*([GTP])(?:FLOPS?(?:/s)?|OPS?(?:/s)?)?",
    lambda match: _DECIMAL_UNITS[match[2].upper()],
    1e9,
    1e18,
    "a dense rate with its unit, TFLOPS or PFLOPS, such as 165TFLOPS",
)
_OPTIONS: dict[str, _ValueForm] = {
    "mem": _SIZE,
    "bandwidth": _RATE,
    **dict.fromkeys(("bf16", "fp16", "fp8", "fp32"), _FLOPS),
    "link": _RATE,
    "network": _RATE,
    "ram": _SIZE,
    "cores": (r"([0-9]{1,6})", lambda match: 1, 1, math.inf, "a whole number from 1, such as 64"),
    "cc": (
        r"([1-9][0-9]?\.[0-9])",
        lambda match: 1,
        1,
        100,
        "a CUDA compute capability, such as 8.9",
    ),
    "tdp": (
        rf"{_NUMBER}\s*(k?)W?",
        lambda match: 1000 if match[2] else 1,
        1,
        100_000,
        "watts, such as 350W",
    ),
    "price": (
        _NUMBER,
        lambda match: 1,
        0,
        math.inf,
        "a number without currency, per GPU and hour, such as 2.5",
    ),
}
_HOST_OPTIONS = ("ram", "cores")


def parse_hardware(text: str) -> Hardware:
    """A machine that is only named: `2xH200`, `2x8xH100` (nodes x GPUs), `2xMyGPU,mem=24GiB`, `cpu`
    (`named`). Raises HardwareError for another text, or an unknown GPU without `mem=`."""
    head, *assignments = [part.strip() for part in text.split(",")]
    name, node_count, gpus_per_node = _parse_head(head, text)
    options = _parse_options(assignments, text, has_gpus=name is not None)
    ram = options.get("ram", host.total_and_free_ram()[0])
    machine = Hardware(
        (),
        host.cpu_name(),
        options.get("cores", host.cpu_cores()),
        ram,
        ram,
        named=True,
        ram_given="ram" in options,
    )
    if name is None:
        return machine
    entry, notes = _find_entry(name, text, is_memory_given="mem" in options)
    # a GPU with the rates of the catalogue, and the options in place of them
    if entry is None:
        # 16-bit units are the same for both formats where there is bfloat16: one rate that was
        # given says both
        gpu = Gpu(
            0, name, 0, None, None, bf16_flops=options.get("fp16"), fp16_flops=options.get("bf16")
        )
    else:
        gpu = _fill_rates(
            Gpu(0, f"{entry.vendor} {entry.name}", entry.memory_bytes, None, entry.capability),
            entry,
        )
    fields = {**_RATE_FIELDS, "total_bytes": "mem", "capability": "cc", "tdp_watts": "tdp"}
    gpu = replace(
        gpu, **{field: options[option] for field, option in fields.items() if option in options}
    )
    link = entry.link if entry else None
    if "link" in options:
        link = options["link"] / 2
        notes.append(
            f"link={options['link'] / 1e9:g}GB/s is read as data sheets quote it, both directions:"
            f" {link / 1e9:g} GB/s each way"
        )
    if gpu.is_amd:
        notes.append(
            "AMD's GPUs are planned for with the rules that were scored on NVIDIA's; nobody has"
            " compared the two yet, and no run starts on them (docs/gpus.md)"
        )
    return replace(
        machine,
        gpus=tuple(replace(gpu, index=index) for index in range(node_count * gpus_per_node)),
        nodes=node_count,
        link_bytes_per_s=link,
        network_bytes_per_s=options.get("network"),
        price_per_gpu_hour=options.get("price"),
        notes=tuple(notes),
    )


def _parse_head(head: str, text: str) -> tuple[str | None, int, int]:
    """The GPU's name, nodes, and GPUs of each; None for a machine without GPUs."""
    prefix = f"HARDWARE={one_line(text)}"
    if head.lower() == "cpu":
        return None, 1, 0
    # the count behind the name (`A100x4`), where the whole is no GPU's name (`RTX4090`)
    swapped = re.fullmatch(r"(.+?)\s*[xX*×:]\s*([0-9]{1,6})", head)
    if swapped and not find_catalog_entries(head) and find_catalog_entries(swapped[1]):
        head = f"{swapped[2]}x{swapped[1]}"
    # an X before T or TX is the card's: 7900 XTX
    match = re.fullmatch(r"((?:[0-9]{1,30}\s*[xX*×]\s*(?!TX?\b)){0,2})(.+)", head)
    # neither a bare count (`2x`) nor a third one (`2x2x2xH100`) is a GPU's name
    pattern = r"(?![0-9.]+\s*[xX*×](?!TX?\b))[A-Za-z0-9][A-Za-z0-9 _.+()/-]{0,79}"
    if match is None or not re.fullmatch(pattern, name := match[2].strip()):
        raise HardwareError(
            f"{prefix} is not COUNTxGPU, such as 2xH200, 2x8xH100 or 2xMyGPU,mem=24GiB; or cpu"
        )
    if name.lower() == "cpu":
        raise HardwareError(
            f"{prefix}: a machine without GPUs takes no count; write cpu,ram=64GiB,cores=16"
        )
    # nodes and GPUs of each, or GPUs only
    node_count, gpus_per_node = [1, 1, *map(int, re.findall(r"[0-9]+", match[1]))][-2:]
    total = node_count * gpus_per_node
    if not 1 <= total <= MAX_GPUS:
        raise HardwareError(f"{prefix} names {total} GPUs; name 1 to {MAX_GPUS}")
    return name, node_count, gpus_per_node


def _parse_options(assignments: Sequence[str], text: str, *, has_gpus: bool) -> dict[str, Any]:
    """The options by their names, in bytes, bytes or operations per second, watts; `link` in both
    directions."""
    prefix = f"HARDWARE={one_line(text)}"
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        name = name.lower()
        if not equals:
            raise HardwareError(
                f"{prefix}: {one_line(assignment)!r} is not NAME=VALUE with {', '.join(_OPTIONS)}"
            )
        if name not in _OPTIONS:
            hint = f"{did_you_mean(name, _OPTIONS, min_similarity=0.5)} ".lstrip()
            raise HardwareError(
                f"{prefix}: {one_line(name)!r} is not an option of a machine; {hint}there are"
                f" {', '.join(_OPTIONS)}"
            )
        if not has_gpus and name not in _HOST_OPTIONS:
            raise HardwareError(
                f"{prefix}: a machine without GPUs takes {' and '.join(_HOST_OPTIONS)}, not {name}"
            )
        pattern, unit_factor, minimum, maximum, expected = _OPTIONS[name]
        match = re.fullmatch(pattern, value)
        number: Any = float(match[1]) * unit_factor(match) if match else math.nan
        if not minimum <= number <= maximum:
            raise HardwareError(f"{prefix}: {name} takes {expected}, not {one_line(value)!r}")
        if name in ("mem", "ram", "cores", "tdp"):
            number = round(number)
        if name == "cc":
            number = tuple(map(int, value.split(".")))
        if options.setdefault(name, number) != number:
            raise HardwareError(f"{prefix} gives {one_line(name)}= twice; keep one")
    return options


def _find_entry(
    name: str, text: str, *, is_memory_given: bool
) -> tuple[CatalogEntry | None, list[str]]:
    """The catalogue's entry for a name, with a note where others share it; None where it has none
    and needs none."""
    entries = find_catalog_entries(name)
    if len(entries) == 1 or (not entries and is_memory_given):
        return next(iter(entries), None), []
    if entries:
        first, *others = entries
        chosen_name = first.name
        if catalog_key(first.name) == catalog_key(name) and first.aliases:
            chosen_name = first.aliases[0]
        return first, [
            f"{name} is read as {chosen_name} with {first.memory_bytes / GIB:.1f} GiB; the"
            f" catalogue also has {', '.join(entry.name for entry in others)}"
        ]
    short = re.sub(r"[^A-Za-z0-9_.+()/-]", "", name)
    if name[0].isdigit():  # a size, or a count without a sign
        short = "MyGPU"
    hint = "docs/gpus.md lists those that are"
    if suggestions := nearest_gpu_names(name):
        hint = f"nearest: {', '.join(suggestions)}"
    raise HardwareError(
        f"HARDWARE={one_line(text)}: the GPU {one_line(name)} is not in the catalogue; {hint}; or"
        f" give its memory, for one of NVIDIA's with 24 GiB HARDWARE=1x{short},mem=24GiB (no run"
        " uses other accelerators)"
    )


# A GPU's rates, and what the catalogue and a description call them.
_RATE_FIELDS = {
    "bandwidth": "bandwidth",
    "bf16_flops": "bf16",
    "fp16_flops": "fp16",
    "fp8_flops": "fp8",
    "fp32_flops": "fp32",
}


def _fill_rates(gpu: Gpu, entry: CatalogEntry) -> Gpu:
    rates = {field: getattr(entry, name) for field, name in _RATE_FIELDS.items()}
    return replace(gpu, **rates, tdp_watts=entry.tdp_watts)


# --- this machine ---------------------------------------------------------------------------------
def detect_hardware(environment: Mapping[str, str] | None = None) -> Hardware:
    """Detect this machine, as a process started with `environment` would see it; rates are the
    catalogue's."""
    environment = os.environ if environment is None else environment
    visible, visibility_notes = visible_gpus(environment)
    gpus, links, notes = list[Gpu](), list[float | None](), [*visibility_notes]
    for item in visible:
        # a driver reports memory and capability; rates are the catalogue's, by the GPU's name
        name, total_bytes = item.gpu.name.split(" MIG ")[0], item.gpu.total_bytes
        # an instance's memory says nothing of its card's, which a name such as A100 needs to be one
        # entry
        entry = next(iter(find_catalog_entries(name, None if item.gpu.mig else total_bytes)), None)
        gpus.append(_fill_detected_rates(item.gpu, entry))
        link = None
        if entry is not None:  # PCIe's where no link is active or cards are only joined by bridges
            link = entry.pcie if item.nvlinks == 0 else entry.link
        links.append(link)
    ram_total, ram_free = host.total_and_free_ram()
    hardware = Hardware(
        tuple(gpus),
        host.cpu_name(),
        host.cpu_cores(),
        ram_total,
        ram_free,
        # the slowest link, where all are known
        link_bytes_per_s=None if None in links else min(filter(None, links), default=None),
        pages=bool(gpus) and host.is_wsl(),
    )
    if hardware.pages:
        notes.append(
            "WSL: Windows' desktop shares the GPU, and a part of what is free is left to it"
        )
    if len(hardware.gpu_groups) > 1:
        groups_text = ", ".join(f"{len(group)} x {group[0].name}" for group in hardware.gpu_groups)
        notes.append(
            f"the GPUs differ ({groups_text}): a plan for all of them goes by the smallest memory"
            " and the slowest rates; make train-distributed takes those that are alike:"
            f" {hardware.format_gpu_choices()}"
        )
    return replace(hardware, notes=tuple(notes))


def _fill_detected_rates(gpu: Gpu, entry: CatalogEntry | None) -> Gpu:
    """The GPU with the catalogue's rates; an instance has its share of them, by slices of seven and
    by memory."""
    if entry is None:
        return gpu
    # where the driver does not tell it
    gpu = replace(gpu, capability=gpu.capability or entry.capability)
    if gpu.mig is None:
        return _fill_rates(gpu, entry)
    # 3g.20gb: three of seven slices; 1c.3g.20gb: a compute instance with one of those three, and
    # the memory of all
    match = re.match(r"(?:([0-9])c\.)?([0-9])g\.", gpu.mig)
    compute_share = int(match[1] or match[2]) / 7 if match else 1.0
    memory_share = min(1.0, gpu.total_bytes / entry.driver_bytes)
    rates = {name: getattr(entry, name) for name in ("bf16", "fp16", "fp8", "fp32")}
    instance_rates: dict[str, Any] = {
        name: rate and rate * compute_share for name, rate in rates.items()
    }
    return _fill_rates(
        gpu, replace(entry, bandwidth=entry.bandwidth * memory_share, **instance_rates)
    )
