"""The page of `make gpu-info` as lines that fit a narrow terminal: GPUs, processes, topology, driver, host and disk; or
what a plan assumes of a machine that is only named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.diagnose.gpu_info import HostInfo, MachineInfo, cpu_capabilities
from sft_play.facts.gpus.gpu import GpuSnapshot, GpuStatus, Topology
from sft_play.facts.hardware import Hardware
from sft_play.log import escape_control, one_line
from sft_play.planner.plan import device_budget_bytes
from sft_play.tables import NOT_KNOWN, build_table, gib_or_na, render_lines, value_or_na, yes_no_or_na


def machine_lines(machine: MachineInfo) -> list[str]:
    """The page; its first line names the source, the second the number of GPUs."""
    gpu_snapshot = machine.gpu_snapshot
    source = f"GPUs as {gpu_snapshot.source} shows them" if gpu_snapshot.source else "no driver shows a GPU"
    shown_gpus = gpu_snapshot.select([*machine.visible_gpus, *(gpu.index for gpu in gpu_snapshot.gpus if gpu.trouble)])
    lines = [f"This machine: {source}", f"Number of GPUs: {machine.gpu_count}", *_visible_lines(machine)]
    if shown_gpus.gpus:
        lines += ["", *_gpu_lines(shown_gpus), *_process_lines(shown_gpus)]
    lines += [*_topology_lines(shown_gpus.topology), "", *_software_lines(machine), *_host_lines(machine.host)]
    if machine.torch_report is not None:
        lines += ["", "torch, asked:", *(f"  {line}" for line in machine.torch_report)]
    if not machine.gpu_count:
        lines += ["", *cpu_capability_lines(machine)]
    return [escape_control(text_line) for text_line in lines]


def _visible_lines(machine: MachineInfo) -> list[str]:
    lines = []
    if machine.visible_setting is not None:
        order = ", ".join(f"GPU {index} is cuda:{device}" for device, index in enumerate(machine.visible_gpus))
        lines.append(f"{one_line(machine.visible_setting)}: {order or 'no GPU is visible'}")
    lines += [
        f"GPU {gpu.index} does not answer: {one_line(gpu.trouble)}" for gpu in machine.gpu_snapshot.gpus if gpu.trouble
    ]
    return [*lines, *machine.hardware.notes]


def _gpu_lines(gpu_snapshot: GpuSnapshot) -> list[str]:
    headers = ("GPU", "name", "total\nGiB", "used\nGiB", "free\nGiB", "cc", "bf16", "fp8", "cap\nW", "°C",
             "PCIe\nnow/max", "MIG")  # fmt: skip
    lines = render_lines(build_table(headers, [_gpu_row(gpu) for gpu in gpu_snapshot.gpus], text_columns=(1,)))
    for gpu in gpu_snapshot.gpus:
        if gpu.unified:
            lines.append(f"GPU {gpu.index} shares the machine's memory")
        if gpu.withheld and not gpu.trouble:
            withheld_text = ", ".join(f"{fact} ({one_line(reason)})" for fact, reason in gpu.withheld.items())
            lines.append(f"GPU {gpu.index}: {gpu_snapshot.source} does not tell its {withheld_text}")
        for item in gpu.instances:
            sizes = f"{gib_or_na(item.total_bytes)} GiB, {gib_or_na(item.free_bytes)} free"
            lines.append(f"GPU {gpu.index} instance {value_or_na(item.profile)}: {sizes}, {value_or_na(item.uuid)}")
    return lines


def _gpu_row(gpu: GpuStatus) -> list[str]:
    sizes = (gib_or_na(size) for size in (gpu.total_bytes, gpu.used_bytes, gpu.free_bytes))
    capability, power_cap, temperature = map(
        value_or_na, (gpu.compute_capability, gpu.power_cap_watts, gpu.temperature_celsius)
    )
    max_link = _format_pcie_link(gpu.pcie.max_generation, gpu.pcie.max_lanes)
    link = f"{_format_pcie_link(gpu.pcie.generation, gpu.pcie.lanes)}/{max_link}"
    mig = NOT_KNOWN if gpu.mig_enabled is None else "on" if gpu.mig_enabled else "off"
    computes = (capability, yes_no_or_na(gpu.bf16), yes_no_or_na(gpu.fp8))
    return [str(gpu.index), value_or_na(gpu.name), *sizes, *computes, power_cap, temperature, link, mig]


def _format_pcie_link(generation: int | None, lanes: int | None) -> str:
    if generation is None and lanes is None:
        return NOT_KNOWN
    return f"{generation if generation is not None else '?'}x{lanes if lanes is not None else '?'}"


def _process_lines(gpu_snapshot: GpuSnapshot) -> list[str]:
    rows = [
        [str(gpu.index), str(item.pid), value_or_na(item.name), gib_or_na(item.used_bytes, digits=2)]
        for gpu in gpu_snapshot.gpus
        for item in gpu.all_processes
    ]
    lines = ["", *render_lines(build_table(("GPU", "pid", "process", "GiB"), rows, text_columns=(2,)))] if rows else []
    unlisted = [
        str(gpu.index) for gpu in gpu_snapshot.gpus if gpu.processes is None and not gpu.trouble and not gpu.unified
    ]
    return [*lines, *([f"Processes: none is listed for GPU {', '.join(unlisted)} (n/a)"] if unlisted else [])]


def _topology_lines(topology: Topology | None) -> list[str]:
    if topology is None:
        return []
    rows = [
        [f"GPU{index}", *(f"{link}!" if peer is False else link for link, peer in zip(links, peers, strict=True))]
        for index, links, peers in zip(topology.indices, topology.links, topology.peer, strict=True)
    ]
    headers = ["", *(f"GPU{index}" for index in topology.indices)]
    matrix = render_lines(build_table(headers, rows, text_columns=range(len(headers))), width=None)
    return ["", *matrix, "Links as nvidia-smi topo -m names them; !: no peer-to-peer access"]


def _software_lines(machine: MachineInfo) -> list[str]:
    gpu_snapshot, software = machine.gpu_snapshot, machine.software
    newest_cuda = f", which runs CUDA up to {gpu_snapshot.driver_cuda}" if gpu_snapshot.driver_cuda else ""
    driver = f"{one_line(gpu_snapshot.driver)}{newest_cuda}" if gpu_snapshot.driver else f"{NOT_KNOWN} (none answers)"
    nccl = f"{software.nccl} ({software.nccl_package})" if software.nccl else "none installed beside torch"
    hint = "" if machine.torch_report is not None else "; FULL=1 asks it what it sees"
    build = _torch_build_name(software.torch_cuda, software.torch_hip)
    torch_text = f"{software.torch}, built for {build}{hint}" if software.torch else "not installed (make setup)"
    return [f"Driver: {driver}", f"NCCL: {nccl}", f"torch: {torch_text}"]


def _torch_build_name(cuda: object, hip: object) -> str:
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU alone"


def _host_lines(host: HostInfo) -> list[str]:
    cores = f"{value_or_na(host.physical_cores)} physical cores, {value_or_na(host.logical_cores)} logical"
    usable = f", {host.usable_cores} for this process" if host.usable_cores != host.logical_cores else ""
    outputs = one_line(host.outputs)
    has_outputs = host.disk_folder == str(Path(host.outputs).expanduser().absolute())
    disk_note = "" if has_outputs else f" (not there yet; the disk of {one_line(host.disk_folder)})"
    return [
        f"CPU: {one_line(host.cpu)}, {cores}{usable}",
        f"RAM: {gib_or_na(host.ram_bytes)} GiB, {gib_or_na(host.ram_free_bytes)} free",
        f"Disk: {gib_or_na(host.disk_free_bytes)} of {gib_or_na(host.disk_bytes)} GiB free at {outputs}{disk_note}",
    ]


def cpu_capability_lines(machine: MachineInfo) -> list[str]:
    """The same as lines, with the reason where the machine's GPUs cannot be used."""
    reason = machine.unused_accelerator or ""
    if machine.gpu_snapshot.gpus:
        reason = reason or "No GPU is visible to a run, or one does not answer"
    header = f"{reason}. What still works:" if reason else "Without a GPU this works:"
    return [header, *(f"  {text}" for text in cpu_capabilities())]


# --- a machine that is only named (HARDWARE=); nothing is measured ----------------------------------------------------


def assumed_machine_json(hardware: Hardware) -> dict[str, Any]:
    """What a plan assumes of a named machine: bytes, rates per second, dense operations; null: not known."""
    assumptions = {"number_of_gpus": len(hardware.gpus), "assumed": True, "budget_bytes": device_budget_bytes(hardware)}
    return assumptions | hardware.as_json()


def assumed_machine_lines(hardware: Hardware, text: str) -> list[str]:
    """What a plan would assume of a machine that is only named; nothing is measured."""
    assumptions = assumed_machine_json(hardware)
    gpus = assumptions.pop("gpus")
    lines = [
        f"Assumed, not detected: HARDWARE={one_line(text)}, as in make plan (catalogue: docs/gpus.md)",
        f"Number of GPUs: {len(gpus)}",
    ]
    for header, facts in (("Each GPU:", gpus[0] if gpus else {}), ("Machine:", assumptions)):
        lines += [header] if facts else []
        lines += [f"  {key}: {_format_fact(key, value)}" for key, value in facts.items() if value not in (None, ())]
    return [escape_control(line) for line in lines]


def _format_fact(key: str, value: Any) -> str:
    """A value in the unit that its key tells."""
    if key.endswith("bytes"):
        return f"{gib_or_na(value, digits=2)} GiB"
    units = {"bandwidth": ("GB/s", 1e9), "bytes_per_s": ("GB/s", 1e9), "flops": ("TFLOPS", 1e12)}
    return next(
        (_format_rate(value, *unit) for suffix, unit in units.items() if key.endswith(suffix)), value_or_na(value)
    )


def _format_rate(rate: float | None, unit: str = "GB/s", size: float = 1e9) -> str:
    return NOT_KNOWN if rate is None else f"{rate / size:,.4g} {unit}"
