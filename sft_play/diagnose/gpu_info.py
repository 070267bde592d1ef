"""This machine for training: GPUs, driver, host, disk; in under a second and without importing torch."""

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

from sft_play.diagnose import nvidia
from sft_play.diagnose.text import NOT_KNOWN, WIDTH, gib, known, lines_of, table, yes_no
from sft_play.endings import ends_with_me
from sft_play.facts import amd, nvml
from sft_play.facts.hardware import Hardware, detect, seen_on_mac
from sft_play.facts.installed import nccl_package, torch_cuda, torch_hip, version_of
from sft_play.facts.seen import Seen, SeenGpu, Topology
from sft_play.facts.space import free_at
from sft_play.facts.unseen import Unseen, unseen
from sft_play.facts.unseen import look as devices
from sft_play.log import escape_control, one_line
from sft_play.planner.plan import budget_bytes

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
report = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
        "sees_gpus": torch.cuda.is_available(), "gpus": []}
try:
    if report["sees_gpus"]:
        report["gpus"] = [{"name": p.name, "total_bytes": p.total_memory, "compute_capability": f"{p.major}.{p.minor}"}
                        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
        report["bf16"] = torch.cuda.is_bf16_supported()
    report["built_for"] = torch.cuda.get_arch_list()
    if torch.version.cuda:
        report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    report["trouble"] = f"{type(error).__name__}: {error}"
print("torch says " + json.dumps(report))
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
    """One look at this machine. `visible` are the indices of the GPUs that a run here would see, in its order;
    `asked_torch` is torch's own report, None where it was not asked."""

    seen: Seen
    visible: tuple[int, ...]
    visible_setting: str | None
    hardware: Hardware
    host: Host
    software: Software
    asked_torch: Mapping[str, Any] | None = None
    unused: Unseen | None = None
    """An accelerator of this machine that a run would not see."""

    @property
    def trainable(self) -> bool:
        """Whether planning and training find a GPU here."""
        return self.hardware.device != "cpu"

    @property
    def hidden(self) -> tuple[int, ...]:
        """GPUs that answer, but are not visible to a run."""
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
    """This machine, as a run with `environment` would see it.

    Args:
        outputs: the folder of the run folders, for its disk.
        full: also start torch in a separate process and ask what it sees, which takes seconds.
    """
    hardware = detect(environment)
    seen = all_gpus()
    visible, setting = _visible(seen, hardware, environment)
    nccl_name, nccl_version = nccl_package() or (None, None)
    return Machine(
        seen=seen,
        visible=visible,
        visible_setting=setting,
        hardware=hardware,
        host=_host(hardware, outputs),
        software=Software(
            torch=version_of("torch"),
            torch_cuda=torch_cuda(),
            torch_hip=torch_hip(),
            nccl=nccl_version,
            nccl_package=nccl_name,
        ),
        asked_torch=ask_torch(environment) if full else None,
        unused=unseen(devices(environment)) if hardware.device == "cpu" else None,
    )


def all_gpus(*, topology: bool = True) -> Seen:
    """Every GPU of this machine, visible to this process or not: NVIDIA's, else AMD's, else Apple's."""
    seen = nvml.see(topology=topology)
    if seen is None or not seen.gpus:
        seen = nvidia.through_smi(tuple(gpu for gpu in detect({}).gpus if not gpu.is_amd), topology=topology)
    return seen or amd.see() or seen_on_mac() or Seen()


def _visible(seen: Seen, hardware: Hardware, environment: Mapping[str, str]) -> tuple[tuple[int, ...], str | None]:
    """Indices that a run would see, and the variable that chooses them."""
    alive = tuple(gpu.index for gpu in seen.gpus if not gpu.trouble)
    if any(gpu.vendor == amd.VENDOR for gpu in seen.gpus):
        given = [f"{name}={environment[name]}" for name in amd.VISIBLE if name in environment]
        return tuple(index for _, index in amd.visible(alive, environment)), " ".join(given) or None
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    setting = None if variable is None else f"CUDA_VISIBLE_DEVICES={variable}"
    if hardware.gpus:
        return tuple(dict.fromkeys(gpu.index for gpu in hardware.gpus)), setting
    if any(gpu.vendor == nvml.VENDOR for gpu in seen.gpus):
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


def ask_torch(environment: Mapping[str, str], *, timeout_s: float = TORCH_TIMEOUT_S) -> dict[str, Any]:
    """Torch's own report, from a separate process; `trouble` is why there is none."""
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
    match = re.search(r"^torch says (\{.*\})$", answer.stdout, re.MULTILINE)
    if match is None:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return {"trouble": f"it ended with exit code {answer.returncode}: {one_line(last)}"}
    report: dict[str, Any] = json.loads(match[1])
    return report


# --- in words ---------------------------------------------------------------------------------------------------------


def lines(machine: Machine) -> list[str]:
    """The page; its first line names the source, the second the number of GPUs."""
    seen = machine.seen
    source = f"GPUs as {seen.source} shows them" if seen.source else "no driver shows a GPU"
    shown = seen.only([*machine.visible, *(gpu.index for gpu in seen.gpus if gpu.trouble)])
    parts = [f"This machine: {source}", f"Number of GPUs: {machine.count}", *_visible_lines(machine)]
    if shown.gpus:
        parts += ["", *_gpu_lines(shown), *_process_lines(shown)]
    parts += [*_topology_lines(shown.topology), "", *_software_lines(machine), *_host_lines(machine.host)]
    if machine.asked_torch is not None:
        parts += _torch_lines(machine.asked_torch)
    if not machine.trainable:
        parts += ["", *without_gpu_lines(machine)]
    return [escape_control(part) for part in parts]


def _visible_lines(machine: Machine) -> list[str]:
    shown = []
    if machine.visible_setting is not None:
        order = ", ".join(f"GPU {index} is cuda:{device}" for device, index in enumerate(machine.visible))
        hidden = f"; hidden: {', '.join(f'GPU {index}' for index in machine.hidden)}" if machine.hidden else ""
        shown.append(f"{one_line(machine.visible_setting)}: {order or 'no GPU is visible'}{hidden}")
    shown += [f"GPU {gpu.index} does not answer: {one_line(gpu.trouble)}" for gpu in machine.seen.gpus if gpu.trouble]
    return [*shown, *machine.hardware.notes]


def _gpu_lines(seen: Seen) -> list[str]:
    heads = ("GPU", "name", "total\nGiB", "used\nGiB", "free\nGiB", "cc", "bf16", "fp8", "cap\nW", "°C",
             "PCIe\nnow/max", "MIG")  # fmt: skip
    page = lines_of(table(heads, [_gpu_row(gpu) for gpu in seen.gpus], left=(1,)))
    for gpu in seen.gpus:
        if gpu.unified:
            page.append(f"GPU {gpu.index} shares the machine's memory")
        for item in gpu.instances:
            sizes = f"{gib(item.total_bytes)} GiB, {gib(item.free_bytes)} free"
            page.append(f"GPU {gpu.index} instance {known(item.profile)}: {sizes}, {known(item.uuid)}")
        if gpu.mig_pending is not None and gpu.mig_pending != gpu.mig_enabled:
            page.append(f"GPU {gpu.index}: MIG will be {'on' if gpu.mig_pending else 'off'} after its next reset")
    links = [gpu.pcie for gpu in seen.gpus]
    if any((link.generation, link.lanes) != (link.max_generation, link.max_lanes) for link in links):
        page.append("PCIe: generation x lanes; an idle GPU lowers the generation, not the lanes")
    return page


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
    page = ["", *lines_of(table(("GPU", "pid", "process", "GiB"), rows, left=(2,)))] if rows else []
    if unlisted:
        page.append(f"Processes: {seen.source} lists none for GPU {', '.join(unlisted)} (n/a)")
    elif not rows and any(gpu.processes is not None for gpu in seen.gpus):
        page.append("Processes: none is listed")
    return page


def _topology_lines(topology: Topology | None) -> list[str]:
    if topology is None:
        return []
    cells = [
        [f"{link}!" if peer is False else link for link, peer in zip(links, peers, strict=True)]
        for links, peers in zip(topology.links, topology.peer, strict=True)
    ]
    names = [f"GPU{index}" for index in topology.indices]
    each = max(len(text) for text in [*names, *(cell for row in cells for cell in row)]) + 2
    columns = max(1, (WIDTH - each) // each)
    page = [""]
    for start in range(0, len(names), columns):
        part = slice(start, start + columns)
        page.append((" " * each + "".join(name.ljust(each) for name in names[part])).rstrip())
        page += [
            (name.ljust(each) + "".join(cell.ljust(each) for cell in row[part])).rstrip()
            for name, row in zip(names, cells, strict=True)
        ]
    return [*page, *lines_of(_legend(topology))]


def _legend(topology: Topology) -> str:
    links = {link for row in topology.links for link in row} - {"X"}
    words = [f"{link}: {_TOPOLOGY_WORDS[link]}" for link in _TOPOLOGY_WORDS if link in links]
    if any(re.fullmatch(r"NV\d+", link) for link in links):
        words.insert(0, "NV and a number: that many NVLinks")
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
    build = _built_for(software.torch_cuda, software.torch_hip)
    torch = f"{software.torch}, built for {build}{ask}" if software.torch else "not installed (make setup)"
    return [f"Driver: {driver}", f"NCCL: {nccl}", f"torch: {torch}"]


def _built_for(cuda: object, hip: object) -> str:
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU alone"


def _host_lines(host: Host) -> list[str]:
    cores = f"{known(host.physical_cores)} physical cores, {known(host.logical_cores)} logical"
    usable = f", {host.usable_cores} for this process" if host.usable_cores != host.logical_cores else ""
    where = one_line(host.outputs)
    exists = host.disk_folder == str(Path(host.outputs).expanduser().absolute())
    disk = "" if exists else f" (not there yet; the disk of {one_line(host.disk_folder)})"
    return [
        f"CPU: {one_line(host.cpu)}, {cores}{usable}",
        f"RAM: {gib(host.ram_bytes)} GiB, {gib(host.ram_free_bytes)} free",
        f"Disk: {gib(host.disk_free_bytes)} of {gib(host.disk_bytes)} GiB free at {where}{disk}",
    ]


def _torch_lines(report: Mapping[str, Any]) -> list[str]:
    """The slower section: torch's own report."""
    if "version" not in report:
        return ["", f"torch, asked: {one_line(str(report.get('trouble')))}"]
    page = ["", f"torch, asked: {report['version']}, built for {_built_for(report.get('cuda'), report.get('hip'))}"]
    if report.get("built_for"):
        page.append(f"  compiled for {' '.join(map(str, report['built_for']))}")
    if report.get("nccl"):
        page.append(f"  with NCCL {report['nccl']}")
    gpus = report.get("gpus") or []
    page.append(f"  sees {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}" + ("" if gpus else ": none can be used"))
    page += [
        f"  cuda:{device}: {one_line(str(gpu['name']))}, {gib(gpu['total_bytes'])} GiB, {gpu['compute_capability']}"
        for device, gpu in enumerate(gpus)
    ]
    if report.get("trouble"):
        page.append(f"  {one_line(str(report['trouble']))}")
    return page


def without_gpu() -> list[str]:
    """What works on a machine without a GPU that can be used."""
    return [
        "make plan HARDWARE=2xH200 plans for any GPU in the catalogue, or for one that you describe",
        "make train trains on the CPU: the starter, and models of a few million parameters",
        "make train-distributed runs every layout over CPU ranks (ddp, fsdp, ZeRO-1 to 3, with and without offload)",
        "make verify-layouts and make doctor work as they do with GPUs",
    ]


def without_gpu_lines(machine: Machine) -> list[str]:
    """The same as lines, with the reason where the machine's GPUs cannot be used."""
    if machine.unused:
        head = f"{machine.unused.message}. What still works:"
    elif machine.visible and any(gpu.trouble for gpu in machine.seen.gpus):
        head = "Planning and training find no GPU as long as one does not answer. What still works:"
    elif machine.seen.gpus:
        head = "No GPU is visible to a run, or none can be used. What still works:"
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
    """What a plan would assume of a machine that is only named; nothing is measured."""
    count = len(hardware.gpus)
    nodes = f" on {hardware.nodes} nodes of {hardware.gpus_per_node}" if hardware.nodes > 1 else ""
    page = [
        f"Assumed, not detected: HARDWARE={one_line(text)}, as in make plan (catalogue: docs/gpus.md)",
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
        page += [
            f"Each GPU: {one_line(gpu.name)}, compute capability {capability}, {known(gpu.tdp_watts, 'W')}",
            f"  memory that a process can use: {gib(gpu.total_bytes, digits=2)} GiB",
            f"  memory bandwidth: {_bytes_rate(gpu.bandwidth)}",
            f"  dense matrix rates: {rates}",
            f"Link between GPUs, per GPU and one way: {_bytes_rate(hardware.link_bytes_per_s)}",
        ]
        if hardware.nodes > 1 or hardware.network_bytes_per_s is not None:
            page.append(f"Network between nodes, per node and one way: {_bytes_rate(hardware.network_bytes_per_s)}")
        if hardware.price_per_gpu_hour is not None:
            page.append(f"Price: {hardware.price_per_gpu_hour:g} per GPU-hour")
    here = "" if hardware.ram_given else " (this machine's; ram= sets another)"
    page.append(f"Host: {hardware.cpu_cores} cores, {gib(hardware.ram_bytes)} GiB RAM{here}")
    return [escape_control(line) for line in [*page, *hardware.notes]]


def _rate(rate: float | None) -> str:
    return NOT_KNOWN if rate is None else f"{rate / 1e12:,.4g} TFLOPS"


def _bytes_rate(rate: float | None) -> str:
    return NOT_KNOWN if rate is None else f"{rate / 1e9:,.4g} GB/s"
