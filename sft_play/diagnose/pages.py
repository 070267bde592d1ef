"""The pages of `make check`, `doctor`, `gpu-info` and `memory-check` as lines that fit a narrow
terminal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sft_play.answers import Answer
from sft_play.diagnose.memory_check import MemoryPrediction, MemorySnapshot
from sft_play.diagnose.this_machine import HostInfo, MachineInfo, cpu_capabilities
from sft_play.findings import Finding
from sft_play.log import escape_control, one_line
from sft_play.machine.gpu import GpuSnapshot, GpuStatus, Topology
from sft_play.machine.hardware import Hardware
from sft_play.planner.plan import device_budget_bytes
from sft_play.text import (
    NOT_KNOWN,
    build_table,
    format_size,
    gib_or_na,
    join_unique,
    render_lines,
    value_or_na,
    yes_no_or_na,
)

# The findings of `make check` and `make doctor` as pages: each with what to do about it, and the
# verdict.

CHECK_STATES = {"PASS": "ok", "WARN": "warning", "FAIL": "problem", "SKIP": "skipped"}
_STATE_LABELS = {**CHECK_STATES, "FAIL": "PROBLEM"}


def format_findings(findings: Sequence[Finding], labels: Mapping[str, str] = _STATE_LABELS) -> list[str]:
    """Each finding's verdict, name and text; below the text what to do, and the threads that it rests on."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for column in range(3):
        rows.add_column(no_wrap=True, overflow="ignore", min_width=(0, 18, 0)[column])
    for finding in findings:
        remedy = [f"do: {finding.remedy}"] if finding.remedy else []
        text = "\n".join([finding.found, *remedy, *(f"see {source}" for source in finding.sources)])
        rows.add_row(labels.get(finding.verdict, finding.verdict), escape_control(finding.name), escape_control(text))
    return render_lines(rows, width=None)


@dataclass(frozen=True)
class FindingsReport(Answer):
    """All findings of one look, in the order of the page, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing FAILs; warnings do not count."""
        return not self.names_by_verdict("FAIL")

    def names_by_verdict(self, verdict: str) -> list[str]:
        """The names of the findings of one verdict."""
        return [finding.name for finding in self.findings if finding.verdict == verdict]


class DoctorReport(FindingsReport):
    """All findings of one look at this machine."""

    def lines(self) -> list[str]:
        """The table, and the verdict."""
        failed_names = self.names_by_verdict("FAIL")
        header = "Nothing FAILs: " if self.ok else f"{len(failed_names)} FAIL: {join_unique(failed_names)}; "
        counts = ", ".join(f"{len(self.names_by_verdict(verdict))} {verdict}" for verdict in ("PASS", "WARN", "SKIP"))
        return [*format_findings(self.findings, {}), f"{header}{counts} ({self.elapsed_s:.0f} s)"]


@dataclass(frozen=True)
class CheckReport(FindingsReport):
    """Everything that was checked of a config."""

    config: Path = Path()

    def summary_lines(self) -> list[str]:
        """Problems and warnings, and the verdict."""
        problems = [item for item in self.findings if item.verdict in ("FAIL", "WARN")]
        verdict = f"{self._verdict()}; WHY=1 shows each"
        return [f"Check of {self.config}:", *format_findings(problems), verdict] if problems else [verdict]

    def lines(self) -> list[str]:
        """The page and its verdict."""
        return [f"Check of {self.config}:", *format_findings(self.findings), self._verdict()]

    def _verdict(self) -> str:
        counts = [
            f"{count} {word}{'s' * (count != 1)}"
            for state, word in (("FAIL", "problem"), ("WARN", "warning"))
            if (count := len(self.names_by_verdict(state)))
        ]  # fmt: skip
        is_tried = "memory plan" in self.names_by_verdict("WARN")
        verdict = "Not ready" if not self.ok else "Predicted not to fit" if is_tried else "Ready to train"
        counts.append(f"{len(self.names_by_verdict('PASS'))} ok")
        return f"{verdict}: {', '.join(counts)} ({self.elapsed_s:.0f} s)"

    def as_json(self) -> dict[str, Any]:
        """`ok`, `elapsed_s` and the checks."""
        checks = []
        for item in self.findings:
            check = {"name": item.name, "state": CHECK_STATES[item.verdict], "what": item.found, "do": item.remedy}
            checks.append(check | ({"see": list(item.sources)} if item.sources else {}))
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "checks": checks}


# --------------------------------------------------------------------------------------------------
# The page of `make gpu-info` as lines that fit a narrow terminal: GPUs, processes, topology,
# driver, host and disk; or what a plan assumes of a machine that is only named.


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


# --------------------------------------------------------------------------------------------------
# The page of `make memory-check`: the run, a table with the prediction beside it, RAM, warnings;
# once or renewed.

# Seconds between two looks.
REFRESH_S = 3.0


def format_memory_snapshot(snapshot: MemorySnapshot) -> list[str]:
    """What a person reads: the run, one table with the prediction beside it, RAM, warnings."""
    lines = [*snapshot.said]
    prediction_table = _prediction_table(snapshot.prediction) if snapshot.prediction else None
    use_table = _rank_table(snapshot) if _should_show_ranks(snapshot) else _gpu_table(snapshot)
    sizes = [[moment, format_size(size)] for moment, size in snapshot.measured.items()]
    measured_table = build_table(("measured\nper rank", ""), sizes, text_columns=(0,)) if sizes else None
    if any((use_table, prediction_table, measured_table)):
        grid = Table.grid(padding=(0, 4))
        grid.add_row(*(table for table in (use_table, prediction_table, measured_table) if table is not None))
        lines += ["", *render_lines(grid), ""]
    if (prediction := snapshot.prediction) is not None:
        batch = f"micro-batch {prediction.micro_batch} x accum {prediction.grad_accum}"
        layout = f"{one_line(prediction.layout)} over {prediction.ranks} rank(s)"
        lines.append(f"Plan: {layout}, {batch}; sizes in units of 2**30 bytes")
        if not prediction.on_gpu:
            lines.append("RSS has the libraries too: what is predicted of it is resident and libraries together")
    # `n/a` in the table needs a reason: without one it looks like a run that holds nothing
    if any(use.ranks and use.run_bytes is None for use in snapshot.gpus) and not _should_show_ranks(snapshot):
        lines.append("n/a: the driver names no process of this run there, as in a container, or before it uses the GPU")
    run_text = f"; this run holds {gib_or_na(snapshot.ram.run_bytes, digits=2)}" if snapshot.ranks else ""
    lines.append(
        f"RAM: {gib_or_na(snapshot.ram.total_bytes)} GiB, {gib_or_na(snapshot.ram.free_bytes)} free{run_text}"
        + ("" if snapshot.gpus else "; no GPU here")
    )
    lines += [f"warning: {text}" for text in snapshot.warnings]
    return [escape_control(line) for line in lines]


def _should_show_ranks(snapshot: MemorySnapshot) -> bool:
    if not snapshot.ranks:
        return False
    return not snapshot.gpus or (snapshot.prediction is not None and not snapshot.prediction.on_gpu)


def _gpu_table(snapshot: MemorySnapshot) -> Table | None:
    if not snapshot.gpus:
        return None
    headers = ("GPU", "rank", "total", "this\nrun", "others", "free", "peak\nseen")
    rows = []
    for use in snapshot.gpus:
        sizes = (use.run_bytes, use.others_bytes, use.free_bytes, use.peak_bytes)
        ranks = ",".join(map(str, use.ranks)) or "-"
        rows.append([str(use.index), ranks, gib_or_na(use.total_bytes), *(gib_or_na(size, digits=2) for size in sizes)])
    return build_table(headers, rows)


def _rank_table(snapshot: MemorySnapshot) -> Table:
    rows = [
        [str(use.rank), str(use.pid), gib_or_na(use.rss_bytes, digits=2), gib_or_na(use.peak_rss_bytes, digits=2)]
        for use in snapshot.ranks
    ]
    return build_table(("rank", "pid", "RSS\nGiB", "peak\nseen"), rows)


def _prediction_table(prediction: MemoryPrediction) -> Table:
    terms = [(name.replace("_", " "), size) for name, size in prediction.terms.items() if size > 0]
    total_word, outside_words = ("reserved", "context, NCCL") if prediction.on_gpu else ("resident", "libraries")
    sums = [
        ("= allocated", prediction.allocated),
        (f"= {total_word} in {prediction.moment}", prediction.reserved),
        ("+ margin", prediction.margin),
        (f"+ {outside_words}", prediction.outside_allocator),
        ("= needed", prediction.required),
    ]
    rows = [[name, format_size(size)] for name, size in [*terms, *sums] if size > 0]
    return build_table(("predicted\nper rank", ""), rows, text_columns=(0,))


def watch_memory(
    read_snapshot: Callable[[], MemorySnapshot],
    *,
    show_snapshot: Callable[[MemorySnapshot], None],
    pause: Callable[[float], None] = time.sleep,
) -> MemorySnapshot | None:
    """Take snapshots until Ctrl-C, and show each; returns the last one."""
    last_snapshot: MemorySnapshot | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            last_snapshot = read_snapshot()
            show_snapshot(last_snapshot)
            pause(REFRESH_S)
    return last_snapshot
