"""What this machine has for training, in under a second and without importing torch: GPUs, driver, host, disk."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.endings import ends_with_me
from sft_play.facts import amd, apple
from sft_play.facts.hardware import Hardware, detect
from sft_play.facts.installed import nccl_package, torch_cuda, torch_hip, version_of
from sft_play.facts.seen import Seen, SeenGpu, Topology
from sft_play.facts.space import free_at
from sft_play.facts.unseen import Unseen, unseen
from sft_play.facts.unseen import look as devices
from sft_play.log import escape_control, one_line
from sft_play.plan.plan import budget_bytes
from sft_play.seeing import nvidia
from sft_play.seeing.text import NOT_KNOWN, gib, known, lines_of, table, yes_no

TORCH_TIMEOUT_S = 120.0
"""An import of torch from a cold network disk takes a minute and more."""
_TOPOLOGY_WORDS = {
    "X": "itself",
    "PSB": "two GPUs of one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host bridge of one CPU",
    "NODE": "host bridges of one NUMA node",
    "SYS": "from one CPU socket to another",
    "XGMI": "Infinity Fabric",
    "PCIE": "PCIe",
}
_ASK_TORCH = """
import json, sys
sys.path.append(sys.argv[1])
from sft_play.endings import leave_with_starter
leave_with_starter()
import torch
told = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
        "sees_gpus": torch.cuda.is_available(), "gpus": []}
try:
    if told["sees_gpus"]:
        told["gpus"] = [{"name": p.name, "total_bytes": p.total_memory, "compute_capability": f"{p.major}.{p.minor}"}
                        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
        told["bf16"] = torch.cuda.is_bf16_supported()
    told["built_for"] = torch.cuda.get_arch_list()
    if torch.version.cuda:
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    told["trouble"] = f"{type(error).__name__}: {error}"
print("torch says " + json.dumps(told))
"""


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs: cores, RAM as far as this process may use it, and the disk of the run folders."""

    cpu: str
    physical_cores: int | None
    logical_cores: int | None
    usable_cores: int
    ram_bytes: int
    ram_free_bytes: int
    outputs: str
    disk_folder: str
    """The nearest folder above the outputs that exists."""
    disk_bytes: int | None
    disk_free_bytes: int | None


@dataclass(frozen=True)
class Software:
    """Versions of what computes on GPUs, read without importing it; None: not installed."""

    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    nccl: str | None
    nccl_package: str | None


@dataclass(frozen=True)
class Machine:
    """What was seen. `visible` are the indices of the GPUs that a run here would see, in its order; `asked_torch` is
    what torch says of itself, None where it was not asked."""

    seen: Seen
    visible: tuple[int, ...]
    visible_setting: str | None
    hardware: Hardware
    host: Host
    software: Software
    asked_torch: Mapping[str, Any] | None = None
    unused: Unseen | None = None
    """An accelerator that is there and that a run would not see."""

    @property
    def trainable(self) -> bool:
        """Whether planning and training find a GPU here."""
        return self.hardware.device != "cpu"

    @property
    def hidden(self) -> tuple[int, ...]:
        """GPUs that are there, answer, and are not visible to a run."""
        return tuple(gpu.index for gpu in self.seen.gpus if gpu.index not in self.visible and not gpu.trouble)

    @property
    def count(self) -> int:
        """GPUs, or instances of split ones, that a run here would see."""
        return len(self.hardware.gpus) or len(self.visible)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: bytes, watts and degrees Celsius as numbers, null where the driver does not say."""
        seen = self.seen.as_json()
        return {
            "number_of_gpus": self.count,
            "assumed": False,
            "source": seen["source"],
            "visible_setting": self.visible_setting,
            "visible_gpus": list(self.visible),
            "hidden_gpus": list(self.hidden),
            "usable_by_a_plan": self.trainable,
            "notes": list(self.hardware.notes),
            "gpus": seen["gpus"],
            "topology": seen["topology"],
            "driver": {"version": seen["driver"], "newest_cuda": seen["driver_cuda"]},
            "host": asdict(self.host),
            "software": asdict(self.software),
            "torch": dict(self.asked_torch) if self.asked_torch is not None else None,
            "unused_accelerator": self.unused.message if self.unused else None,
            "without_a_gpu": without_gpu() if not self.trainable else [],
        }


def look(outputs: Path, environment: Mapping[str, str], *, full: bool = False) -> Machine:
    """This machine, as a run started with `environment` would meet it.

    Args:
        outputs: the folder of the run folders, whose disk is looked at.
        full: also start torch in a process of its own and ask it what it sees, which takes seconds.
    """
    hardware = detect(environment)
    seen = all_gpus()
    visible, setting = _visible(seen, hardware, environment)
    return Machine(
        seen=seen,
        visible=visible,
        visible_setting=setting,
        hardware=hardware,
        host=_host(hardware, outputs),
        software=_software(),
        asked_torch=ask_torch(environment) if full else None,
        unused=unseen(devices(environment)) if hardware.device == "cpu" else None,
    )


def all_gpus(*, topology: bool = True) -> Seen:
    """Every GPU of this machine, whatever a process may see of them: NVIDIA's, else AMD's, else Apple's."""
    seen = nvidia.through_nvml(topology=topology)
    if seen is None or not seen.gpus:
        seen = nvidia.through_smi(tuple(gpu for gpu in detect({}).gpus if not gpu.is_amd), topology=topology)
    return seen or amd.through_any() or apple.through_system() or Seen()


def _visible(seen: Seen, hardware: Hardware, environment: Mapping[str, str]) -> tuple[tuple[int, ...], str | None]:
    """Indices that a run would see, and the variable that says so."""
    alive = tuple(gpu.index for gpu in seen.gpus if not gpu.trouble)
    if any(gpu.vendor == amd.VENDOR for gpu in seen.gpus):
        given = [f"{name}={environment[name]}" for name in amd.VISIBLE if name in environment]
        return tuple(index for _, index in amd.visible(alive, environment)), " ".join(given) or None
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    setting = None if variable is None else f"CUDA_VISIBLE_DEVICES={variable}"
    if hardware.gpus:
        return tuple(dict.fromkeys(gpu.index for gpu in hardware.gpus)), setting
    if any(gpu.vendor == nvidia.VENDOR for gpu in seen.gpus):
        whole = tuple(gpu.index for gpu in seen.gpus if not gpu.trouble and not gpu.mig_enabled)
        return (whole if variable is None else amd.numbered(variable, whole)), setting
    return alive, setting


def _host(hardware: Hardware, outputs: Path) -> Host:
    folder, space = free_at(outputs)
    return Host(
        cpu=hardware.cpu_name,
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        usable_cores=hardware.cpu_cores,
        ram_bytes=hardware.ram_bytes,
        ram_free_bytes=hardware.ram_free_bytes,
        outputs=str(outputs),
        disk_folder=str(folder),
        disk_bytes=space.total if space else None,
        disk_free_bytes=space.free if space else None,
    )


def _software() -> Software:
    package = nccl_package()
    return Software(
        torch=version_of("torch"),
        torch_cuda=torch_cuda(),
        torch_hip=torch_hip(),
        nccl=package[1] if package else None,
        nccl_package=package[0] if package else None,
    )


def ask_torch(environment: Mapping[str, str], *, timeout_s: float = TORCH_TIMEOUT_S) -> dict[str, Any]:
    """What torch says of itself in a process of its own; `trouble` says why it does not."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH, str(Path(__file__).resolve().parents[2])],
            env={**ends_with_me(environment), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {"trouble": f"it did not answer within {timeout_s:g} s"}
    except OSError as error:
        return {"trouble": f"it could not be started: {error}"}
    told = re.search(r"^torch says (\{.*\})$", answer.stdout, re.MULTILINE)
    if told is None:
        last = (answer.stderr.strip().splitlines() or ["no word"])[-1]
        return {"trouble": f"it ended with exit code {answer.returncode}: {one_line(last)}"}
    found: dict[str, Any] = json.loads(told[1])
    return found


# --- in words ---------------------------------------------------------------------------------------------------------


def lines(machine: Machine) -> list[str]:
    """What a person reads; the first line says who told, the second how many GPUs there are."""
    seen = machine.seen
    source = f"GPUs as {seen.source} shows them" if seen.source else "no driver shows a GPU"
    shown = seen.only([*machine.visible, *(gpu.index for gpu in seen.gpus if gpu.trouble)])
    parts = [f"This machine: {source}", f"Number of GPUs: {machine.count}", *_visible_lines(machine)]
    if shown.gpus:
        parts += ["", *_gpu_lines(shown), *_process_lines(shown)]
    parts += [*_topology_lines(shown.topology), "", *_software_lines(machine), *_host_lines(machine.host)]
    parts += _torch_lines(machine.asked_torch)
    if not machine.trainable:
        parts += ["", *without_gpu_lines(machine)]
    return [escape_control(part) for part in parts]


def _visible_lines(machine: Machine) -> list[str]:
    found = []
    if machine.visible_setting is not None:
        order = ", ".join(f"GPU {index} is cuda:{place}" for place, index in enumerate(machine.visible))
        hidden = f"; hidden: {', '.join(f'GPU {index}' for index in machine.hidden)}" if machine.hidden else ""
        found.append(f"{one_line(machine.visible_setting)}: {order or 'no GPU is visible'}{hidden}")
    found += [f"GPU {gpu.index} does not answer: {one_line(gpu.trouble)}" for gpu in machine.seen.gpus if gpu.trouble]
    return [*found, *machine.hardware.notes]


def _gpu_lines(seen: Seen) -> list[str]:
    heads = ("GPU", "name", "total\nGiB", "used\nGiB", "free\nGiB", "cc", "bf16", "fp8", "cap\nW", "°C",
             "PCIe\nnow/max", "MIG")  # fmt: skip
    rows = [_gpu_row(gpu) for gpu in seen.gpus]
    made = lines_of(table(heads, rows, left=(1,)))
    for gpu in seen.gpus:
        if gpu.unified:
            made.append(f"GPU {gpu.index} has no memory of its own: it shares the machine's")
        for item in gpu.instances:
            sizes = f"{gib(item.total_bytes)} GiB, {gib(item.free_bytes)} free"
            made.append(f"GPU {gpu.index} instance {known(item.profile)}: {sizes}, {known(item.uuid)}")
        if gpu.mig_pending is not None and gpu.mig_pending != gpu.mig_enabled:
            made.append(f"GPU {gpu.index}: MIG will be {'on' if gpu.mig_pending else 'off'} after its next reset")
    if any(_is_slow_link(gpu) for gpu in seen.gpus):
        made.append("PCIe: generation x lanes; the generation falls while a GPU is idle, the lanes do not")
    return made


def _is_slow_link(gpu: SeenGpu) -> bool:
    link = gpu.pcie
    return (link.generation, link.lanes) != (link.max_generation, link.max_lanes)


def _gpu_row(gpu: SeenGpu) -> list[str]:
    mig = NOT_KNOWN if gpu.mig_enabled is None else "on" if gpu.mig_enabled else "off"
    link = gpu.pcie
    return [
        str(gpu.index),
        known(gpu.name),
        gib(gpu.total_bytes),
        gib(gpu.used_bytes),
        gib(gpu.free_bytes),
        known(gpu.compute_capability),
        yes_no(gpu.bf16),
        yes_no(gpu.fp8),
        known(gpu.power_cap_watts),
        known(gpu.temperature_celsius),
        f"{_link(link.generation, link.lanes)}/{_link(link.max_generation, link.max_lanes)}",
        mig,
    ]


def _link(generation: int | None, lanes: int | None) -> str:
    if generation is None and lanes is None:
        return NOT_KNOWN
    return f"{generation if generation is not None else '?'}x{lanes if lanes is not None else '?'}"


def _process_lines(seen: Seen) -> list[str]:
    rows = [
        [str(gpu.index), str(item.pid), known(item.name), gib(item.used_bytes, digits=2)]
        for gpu in seen.gpus
        for item in gpu.all_processes
    ]
    unlisted = [str(gpu.index) for gpu in seen.gpus if gpu.processes is None and not gpu.trouble and not gpu.unified]
    made = ["", *lines_of(table(("GPU", "pid", "process", "GiB"), rows, left=(2,)))] if rows else []
    if unlisted:
        made.append(f"Processes: {seen.source} lists none for GPU {', '.join(unlisted)} (n/a)")
    elif not rows and any(gpu.processes is not None for gpu in seen.gpus):
        made.append("Processes: none is listed")
    return made


def _topology_lines(topology: Topology | None) -> list[str]:
    if topology is None:
        return []
    cells = [
        [_cell(link, peer) for link, peer in zip(links, peers, strict=True)]
        for links, peers in zip(topology.links, topology.peer, strict=True)
    ]
    names = [f"GPU{index}" for index in topology.indices]
    each = max(len(text) for text in [*names, *(cell for row in cells for cell in row)]) + 2
    fit = max(1, (100 - each) // each)
    made = [""]
    for start in range(0, len(names), fit):
        part = slice(start, start + fit)
        made.append((" " * each + "".join(name.ljust(each) for name in names[part])).rstrip())
        made += [
            (name.ljust(each) + "".join(cell.ljust(each) for cell in row[part])).rstrip()
            for name, row in zip(names, cells, strict=True)
        ]
    return [*made, *lines_of(_legend(topology))]


def _cell(link: str, peer: bool | None) -> str:
    return f"{link}!" if peer is False else link


def _legend(topology: Topology) -> str:
    links = {link for row in topology.links for link in row} - {"X"}
    words = [f"{link}: {_TOPOLOGY_WORDS[link]}" for link in _TOPOLOGY_WORDS if link in links]
    if any(re.fullmatch(r"NV\d+", link) for link in links):
        words.insert(0, "NV and a number: so many NVLinks")
    peers = {peer for row in topology.peer for peer in row} - {None}
    if False in peers:
        words.append("!: no peer-to-peer access")
    elif peers:
        words.append("peer-to-peer access between all")
    else:
        words.append("peer-to-peer access: n/a")
    return "; ".join(words)


def _software_lines(machine: Machine) -> list[str]:
    seen, software = machine.seen, machine.software
    newest = f", which runs CUDA up to {seen.driver_cuda}" if seen.driver_cuda else ""
    driver = f"{one_line(seen.driver)}{newest}" if seen.driver else f"{NOT_KNOWN} (none answers)"
    nccl = f"{software.nccl} ({software.nccl_package})" if software.nccl else "none installed beside torch"
    ask = "" if machine.asked_torch is not None else "; FULL=1 asks it what it sees"
    torch = f"{software.torch}, {_build(software)}{ask}" if software.torch else "not installed (make setup)"
    return [f"Driver: {driver}", f"NCCL: {nccl}", f"torch: {torch}"]


def _build(software: Software) -> str:
    if software.torch_hip:
        return f"built for ROCm {software.torch_hip}"
    return f"built for CUDA {software.torch_cuda}" if software.torch_cuda else "built for the CPU alone"


def _host_lines(host: Host) -> list[str]:
    cores = f"{known(host.physical_cores)} physical cores, {known(host.logical_cores)} logical"
    usable = f", {host.usable_cores} for this process" if host.usable_cores != host.logical_cores else ""
    where = one_line(host.outputs)
    there = "" if host.disk_folder == str(Path(host.outputs).expanduser().absolute()) else (
        f" (not there yet; the disk of {one_line(host.disk_folder)})")  # fmt: skip
    return [
        f"CPU: {one_line(host.cpu)}, {cores}{usable}",
        f"RAM: {gib(host.ram_bytes)} GiB, {gib(host.ram_free_bytes)} free",
        f"Disk: {gib(host.disk_free_bytes)} of {gib(host.disk_bytes)} GiB free at {where}{there}",
    ]


def _torch_lines(told: Mapping[str, Any] | None) -> list[str]:
    """The slower section: what torch says when it is started."""
    if told is None:
        return []
    if "version" not in told:
        return ["", f"torch, asked: {one_line(str(told.get('trouble')))}"]
    build = (
        f"CUDA {told['cuda']}" if told.get("cuda") else f"ROCm {told['hip']}" if told.get("hip") else "the CPU alone"
    )
    made = ["", f"torch, asked: {told['version']}, built for {build}"]
    if told.get("built_for"):
        made.append(f"  compiled for {' '.join(map(str, told['built_for']))}")
    if told.get("nccl"):
        made.append(f"  with NCCL {told['nccl']}")
    gpus = told.get("gpus") or []
    made.append(f"  sees {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}" + ("" if gpus else ": none can be used"))
    made += [
        f"  cuda:{place}: {one_line(str(gpu['name']))}, {gib(gpu['total_bytes'])} GiB, {gpu['compute_capability']}"
        for place, gpu in enumerate(gpus)
    ]
    if told.get("trouble"):
        made.append(f"  {one_line(str(told['trouble']))}")
    return made


def without_gpu() -> list[str]:
    """What works on a machine without a GPU that can be used."""
    return [
        "make plan HARDWARE=2xH200 plans for any GPU that the catalogue has, or that you describe",
        "make train trains on the CPU: the starter, and models of some million parameters",
        "make train-distributed runs every layout over CPU ranks (ddp, fsdp, ZeRO-1 to 3, with and without offload)",
        "make verify-layouts and make doctor work as they do with GPUs",
    ]


def without_gpu_lines(machine: Machine) -> list[str]:
    """The same as lines, with why the GPUs that are there do not count."""
    if machine.unused:
        head = f"{machine.unused.message}. What works all the same:"
    elif machine.visible and any(gpu.trouble for gpu in machine.seen.gpus):
        head = "Planning and training find no GPU as long as one does not answer. What works all the same:"
    elif machine.seen.gpus:
        head = "No GPU is visible to a run, or none can be used. What works all the same:"
    else:
        head = "Without a GPU this works:"
    return [head, *(f"  {text}" for text in without_gpu())]


# --- a machine that is named ------------------------------------------------------------------------------------------


def assumed_json(hardware: Hardware) -> dict[str, Any]:
    """What a plan assumes of a named machine: bytes, rates per second, dense operations; null: not known."""
    return {
        "number_of_gpus": len(hardware.gpus),
        "assumed": True,
        "nodes": hardware.nodes,
        "gpus_per_node": hardware.gpus_per_node if hardware.gpus else 0,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "usable_bytes": gpu.total_bytes,
                "compute_capability": None if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}",
                "bandwidth_bytes_per_s": gpu.bandwidth,
                "bf16_flops_per_s": gpu.bf16_flops,
                "fp16_flops_per_s": gpu.fp16_flops,
                "fp8_flops_per_s": gpu.fp8_flops,
                "fp32_flops_per_s": gpu.fp32_flops,
                "power_limit_watts": gpu.tdp_watts,
            }
            for gpu in hardware.gpus
        ],
        "link_bytes_per_s": hardware.link_bytes_per_s,
        "network_bytes_per_s": hardware.network_bytes_per_s,
        "budget_bytes": budget_bytes(hardware),
        "price_per_gpu_hour": hardware.price_per_gpu_hour,
        "ram_bytes": hardware.ram_bytes,
        "ram_given": hardware.ram_given,
        "cpu_cores": hardware.cpu_cores,
        "notes": list(hardware.notes),
    }


def assumed_lines(hardware: Hardware, text: str) -> list[str]:
    """What a plan would assume of a machine that is only named; nothing of it was measured."""
    count = len(hardware.gpus)
    nodes = f" on {hardware.nodes} nodes of {hardware.gpus_per_node}" if hardware.nodes > 1 else ""
    made = [
        f"Assumed, not found: HARDWARE={one_line(text)}, as make plan would take it (catalogue: docs/gpus.md)",
        f"Number of GPUs: {count}{nodes}",
    ]
    if count:
        gpu = hardware.gpus[0]
        rates = ", ".join(
            f"{name} {_rate(rate)}"
            for name, rate in (("bf16", gpu.bf16_flops), ("fp16", gpu.fp16_flops), ("fp8", gpu.fp8_flops),
                               ("fp32", gpu.fp32_flops))
        )  # fmt: skip
        capability = NOT_KNOWN if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}"
        made += [
            f"Each GPU: {one_line(gpu.name)}, compute capability {capability}, {known(gpu.tdp_watts, 'W')}",
            f"  memory that a process can use: {gib(gpu.total_bytes, digits=2)} GiB",
            f"  memory bandwidth: {_bytes_rate(gpu.bandwidth)}",
            f"  dense matrix rates: {rates}",
            f"Link between GPUs, per GPU and one way: {_bytes_rate(hardware.link_bytes_per_s)}",
        ]
        if hardware.nodes > 1 or hardware.network_bytes_per_s is not None:
            made.append(f"Network between nodes, per node and one way: {_bytes_rate(hardware.network_bytes_per_s)}")
        if hardware.price_per_gpu_hour is not None:
            made.append(f"Price: {hardware.price_per_gpu_hour:g} per GPU-hour")
    here = "" if hardware.ram_given else " (this machine's; ram= says another)"
    made.append(f"Host: {hardware.cpu_cores} cores, {gib(hardware.ram_bytes)} GiB RAM{here}")
    return [escape_control(line) for line in [*made, *hardware.notes]]


def _rate(rate: float | None) -> str:
    return NOT_KNOWN if rate is None else f"{rate / 1e12:,.4g} TFLOPS"


def _bytes_rate(rate: float | None) -> str:
    return NOT_KNOWN if rate is None else f"{rate / 1e9:,.4g} GB/s"
