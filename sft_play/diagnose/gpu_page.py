"""The page of `make gpu-info` as lines that fit a narrow terminal: GPUs, processes, topology, driver, host and disk; or
what a plan assumes of a machine that is only named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.diagnose.gpu_info import Host, Machine, without_gpu
from sft_play.diagnose.pages import NOT_KNOWN, gib, lines_of, table_of, value_text, yes_no
from sft_play.facts.gpus.gpu import GpuSnapshot, GpuStatus, Topology
from sft_play.facts.hardware import Hardware
from sft_play.log import escape_control, one_line
from sft_play.planner.plan import device_budget_bytes


def machine_lines(machine: Machine) -> list[str]:
    """The page; its first line names the source, the second the number of GPUs."""
    seen = machine.seen
    source = f"GPUs as {seen.source} shows them" if seen.source else "no driver shows a GPU"
    shown = seen.select([*machine.visible, *(gpu.index for gpu in seen.gpus if gpu.trouble)])
    parts = [f"This machine: {source}", f"Number of GPUs: {machine.count}", *_visible_lines(machine)]
    if shown.gpus:
        parts += ["", *_gpu_lines(shown), *_process_lines(shown)]
    parts += [*_topology_lines(shown.topology), "", *_software_lines(machine), *_host_lines(machine.host)]
    if machine.asked_torch is not None:
        parts += ["", "torch, asked:", *(f"  {line}" for line in machine.asked_torch)]
    if not machine.count:
        parts += ["", *without_gpu_lines(machine)]
    return [escape_control(part) for part in parts]


def _visible_lines(machine: Machine) -> list[str]:
    shown = []
    if machine.visible_setting is not None:
        order = ", ".join(f"GPU {index} is cuda:{device}" for device, index in enumerate(machine.visible))
        shown.append(f"{one_line(machine.visible_setting)}: {order or 'no GPU is visible'}")
    shown += [f"GPU {gpu.index} does not answer: {one_line(gpu.trouble)}" for gpu in machine.seen.gpus if gpu.trouble]
    return [*shown, *machine.hardware.notes]


def _gpu_lines(seen: GpuSnapshot) -> list[str]:
    heads = ("GPU", "name", "total\nGiB", "used\nGiB", "free\nGiB", "cc", "bf16", "fp8", "cap\nW", "°C",
             "PCIe\nnow/max", "MIG")  # fmt: skip
    page = lines_of(table_of(heads, [_gpu_row(gpu) for gpu in seen.gpus], left=(1,)))
    for gpu in seen.gpus:
        if gpu.unified:
            page.append(f"GPU {gpu.index} shares the machine's memory")
        if gpu.withheld and not gpu.trouble:
            told = ", ".join(f"{what} ({one_line(why)})" for what, why in gpu.withheld.items())
            page.append(f"GPU {gpu.index}: {seen.source} does not tell its {told}")
        for item in gpu.instances:
            sizes = f"{gib(item.total_bytes)} GiB, {gib(item.free_bytes)} free"
            page.append(f"GPU {gpu.index} instance {value_text(item.profile)}: {sizes}, {value_text(item.uuid)}")
    return page


def _gpu_row(gpu: GpuStatus) -> list[str]:
    sizes = (gib(size) for size in (gpu.total_bytes, gpu.used_bytes, gpu.free_bytes))
    capability, power, heat = map(value_text, (gpu.compute_capability, gpu.power_cap_watts, gpu.temperature_celsius))
    link = f"{_link(gpu.pcie.generation, gpu.pcie.lanes)}/{_link(gpu.pcie.max_generation, gpu.pcie.max_lanes)}"
    mig = NOT_KNOWN if gpu.mig_enabled is None else "on" if gpu.mig_enabled else "off"
    computes = (capability, yes_no(gpu.bf16), yes_no(gpu.fp8))
    return [str(gpu.index), value_text(gpu.name), *sizes, *computes, power, heat, link, mig]


def _link(generation: int | None, lanes: int | None) -> str:
    if generation is None and lanes is None:
        return NOT_KNOWN
    return f"{generation if generation is not None else '?'}x{lanes if lanes is not None else '?'}"


def _process_lines(seen: GpuSnapshot) -> list[str]:
    rows = [
        [str(gpu.index), str(item.pid), value_text(item.name), gib(item.used_bytes, digits=2)]
        for gpu in seen.gpus
        for item in gpu.all_processes
    ]
    page = ["", *lines_of(table_of(("GPU", "pid", "process", "GiB"), rows, left=(2,)))] if rows else []
    unlisted = [str(gpu.index) for gpu in seen.gpus if gpu.processes is None and not gpu.trouble and not gpu.unified]
    return [*page, *([f"Processes: none is listed for GPU {', '.join(unlisted)} (n/a)"] if unlisted else [])]


def _topology_lines(topology: Topology | None) -> list[str]:
    if topology is None:
        return []
    rows = [
        [f"GPU{index}", *(f"{link}!" if peer is False else link for link, peer in zip(links, peers, strict=True))]
        for index, links, peers in zip(topology.indices, topology.links, topology.peer, strict=True)
    ]
    heads = ["", *(f"GPU{index}" for index in topology.indices)]
    matrix = lines_of(table_of(heads, rows, left=range(len(heads))), width=None)
    return ["", *matrix, "Links as nvidia-smi topo -m names them; !: no peer-to-peer access"]


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
    cores = f"{value_text(host.physical_cores)} physical cores, {value_text(host.logical_cores)} logical"
    usable = f", {host.usable_cores} for this process" if host.usable_cores != host.logical_cores else ""
    where = one_line(host.outputs)
    exists = host.disk_folder == str(Path(host.outputs).expanduser().absolute())
    disk = "" if exists else f" (not there yet; the disk of {one_line(host.disk_folder)})"
    return [
        f"CPU: {one_line(host.cpu)}, {cores}{usable}",
        f"RAM: {gib(host.ram_bytes)} GiB, {gib(host.ram_free_bytes)} free",
        f"Disk: {gib(host.disk_free_bytes)} of {gib(host.disk_bytes)} GiB free at {where}{disk}",
    ]


def without_gpu_lines(machine: Machine) -> list[str]:
    """The same as lines, with the reason where the machine's GPUs cannot be used."""
    why = machine.unused or ""
    if machine.seen.gpus:
        why = why or "No GPU is visible to a run, or one does not answer"
    head = f"{why}. What still works:" if why else "Without a GPU this works:"
    return [head, *(f"  {text}" for text in without_gpu())]


# --- a machine that is only named (HARDWARE=); nothing is measured ----------------------------------------------------


def assumed_json(hardware: Hardware) -> dict[str, Any]:
    """What a plan assumes of a named machine: bytes, rates per second, dense operations; null: not known."""
    count = {"number_of_gpus": len(hardware.gpus), "assumed": True, "budget_bytes": device_budget_bytes(hardware)}
    return count | hardware.as_json()


def assumed_lines(hardware: Hardware, text: str) -> list[str]:
    """What a plan would assume of a machine that is only named; nothing is measured."""
    told = assumed_json(hardware)
    gpus = told.pop("gpus")
    page = [
        f"Assumed, not detected: HARDWARE={one_line(text)}, as in make plan (catalogue: docs/gpus.md)",
        f"Number of GPUs: {len(gpus)}",
    ]
    for head, facts in (("Each GPU:", gpus[0] if gpus else {}), ("Machine:", told)):
        page += [head] if facts else []
        page += [f"  {key}: {_shown(key, value)}" for key, value in facts.items() if value not in (None, ())]
    return [escape_control(line) for line in page]


def _shown(key: str, value: Any) -> str:
    """A value in the unit that its key tells."""
    if key.endswith("bytes"):
        return f"{gib(value, digits=2)} GiB"
    units = {"bandwidth": ("GB/s", 1e9), "bytes_per_s": ("GB/s", 1e9), "flops": ("TFLOPS", 1e12)}
    return next((_rate(value, *of) for end, of in units.items() if key.endswith(end)), value_text(value))


def _rate(rate: float | None, unit: str = "GB/s", size: float = 1e9) -> str:
    return NOT_KNOWN if rate is None else f"{rate / size:,.4g} {unit}"
