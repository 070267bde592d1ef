"""The GPUs: enough of them, of one kind, healthy, free, and able to reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sft_play.diagnose.report import listed
from sft_play.diagnose.surroundings import GpuState
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding, failed, passed, skipped, warned
from sft_play.launch.launch_options import LaunchOptions
from sft_play.units import GIB

CPU_RANKS = 2
"""Ranks on a machine without GPUs where the number is not given, as `make train-distributed` starts them."""
EXCLUSIVE, PROHIBITED = 3, 2
FABRIC_READY = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""
BUSY_BYTES = GIB // 2
"""A CUDA context alone takes about this much (`CUDA_CONTEXT_BYTES` in planner/memory/estimate.py)."""


def choose(hardware: Hardware, options: LaunchOptions) -> tuple[Hardware, Finding]:
    """The GPUs of this node that the ranks would use, or its CPU, and whether they match what was asked for."""
    if not hardware.gpus:
        count = options.processes or CPU_RANKS
        machine = replace(hardware, cpu_ranks=count)
        if options.gpus:
            asked = ",".join(map(str, options.gpus))
            return machine, failed("GPUs", f"GPUS={asked} names GPUs, but the driver shows none",
                                   "install the NVIDIA driver, give the container its GPUs (docker run --gpus all), "
                                   "or leave GPUS= out to run on the CPU")  # fmt: skip
        return machine, skipped("GPUs", f"none found; {count} CPU ranks are used instead")
    by_index = {gpu.index: gpu for gpu in hardware.gpus}
    missing = [index for index in options.gpus if index not in by_index]
    chosen = [by_index[index] for index in options.gpus if index in by_index] or list(hardware.gpus)
    wanted = options.processes or len(options.gpus) or len(chosen)
    machine = replace(hardware, gpus=tuple(chosen[:wanted]))
    if missing:
        return machine, failed("GPUs", f"GPUS= names {listed(missing)}, but there are {listed(by_index)}",
                               "name GPUs that nvidia-smi shows and CUDA_VISIBLE_DEVICES leaves visible")  # fmt: skip
    if wanted > len(chosen):
        why = ""
        if any(gpu.mig for gpu in chosen):
            why = "; a process sees only one of several MIG instances"
        return machine, failed("GPUs", f"{wanted} ranks on this node need a GPU each, but there are {len(chosen)}{why}",
                               f"NPROC={len(chosen)}, or more GPUs",
                               *(("https://github.com/NVIDIA/nccl/issues/1716",) if why else ()))  # fmt: skip
    kinds = listed(
        f"{sum(gpu.name == name for gpu in machine.gpus)} x {name}" for name in [g.name for g in machine.gpus]
    )
    # by memory too: an A100 comes with 40 and with 80 GB, and the plan is for identical ranks
    if len({(gpu.name, gpu.total_bytes) for gpu in machine.gpus}) > 1:
        same = ",".join(str(gpu.index) for gpu in chosen if gpu.total_bytes == chosen[0].total_bytes)
        some = replace(machine, gpus=tuple(chosen))
        choices = some.alike_words(processes=options.processes) if len(some.alike) > 1 else f"GPUS={same}"
        shown = listed(f"{gpu.index} is a {gpu.name} of {gpu.total_bytes / GIB:.0f} GiB" for gpu in machine.gpus)
        return machine, failed("GPUs", f"they differ: {shown}; every rank would be held to the smallest and slowest",
                               f"name identical GPUs: {choices}")  # fmt: skip
    return machine, passed("GPUs", kinds)


def over_nodes(machine: Hardware, nodes: int) -> Hardware:
    """The machine of all nodes, assuming that each is like this one."""
    if not machine.gpus:
        return replace(machine, cpu_ranks=machine.cpu_ranks * nodes, nodes=nodes)
    here = len(machine.gpus)
    gpus = tuple(replace(machine.gpus[n % here], index=n) for n in range(here * nodes))
    return replace(machine, gpus=gpus, nodes=nodes)


def check_health(states: Sequence[GpuState], *, gpus: int) -> list[Finding]:
    """Errors counted by the driver, modes that keep a rank out, and other processes on the GPUs."""
    if not gpus:
        return []
    if not states:
        return [skipped("GPU health", "NVML does not answer: errors, modes and other processes are not known")]
    findings = [*_fabric(states), *_errors(states), *_modes(states), *_busy(states)]
    if not any(item.name == "GPU health" for item in findings):
        findings.insert(0, passed("GPU health", f"{len(states)} GPU{'s' if len(states) > 1 else ''} without errors"))
    if len(states) < gpus:
        told = listed(state.index for state in states)
        findings.append(skipped("GPU health", f"NVML tells the state of GPU {told} only, not of all {gpus}"))
    return findings


def _fabric(states: Sequence[GpuState]) -> list[Finding]:
    waiting = [state.index for state in states if state.fabric not in (None, FABRIC_READY)]
    if not waiting:
        return []
    return [
        failed(
            "NVSwitch fabric",
            f"GPU {listed(waiting)}: not ready; CUDA will report `system not yet initialized` (error 802)",
            "systemctl start nvidia-fabricmanager, of exactly the driver's version (rented machines: ask the owner)",
            "https://github.com/pytorch/pytorch/issues/35710",
            "https://github.com/huggingface/huggingface_hub/issues/4134",
        )
    ]


def _errors(states: Sequence[GpuState]) -> list[Finding]:
    findings = []
    broken = [state.index for state in states if state.remap_failed]
    if broken:
        findings.append(failed("GPU health", f"GPU {listed(broken)}: a memory row could not be remapped",
                            "do not use it (GPUS= names the others); have it replaced"))  # fmt: skip
    counted = [f"{state.index} ({state.uncorrected_errors})" for state in states if state.uncorrected_errors]
    if counted:
        findings.append(failed("GPU health", f"uncorrected memory errors since the last start: GPU {listed(counted)}",
                            "reset the GPU or restart the machine (nvidia-smi -q -d ECC, dmesg | grep Xid); replace it "
                            "if they come back"))  # fmt: skip
    pending = [state.index for state in states if state.remap_pending and not state.remap_failed]
    if pending:
        findings.append(warned("GPU health", f"GPU {listed(pending)}: a memory row waits to be remapped",
                            "reset the GPU or restart the machine before a long run"))  # fmt: skip
    narrow = [
        f"{state.index} (x{state.pcie_lanes[0]} of x{state.pcie_lanes[1]})"
        for state in states
        if state.pcie_lanes and state.pcie_lanes[0] < state.pcie_lanes[1]
    ]
    if narrow:
        findings.append(warned("PCIe lanes", f"GPU {listed(narrow)}: copies and all-reduces are slower by as much",
                            "reseat the card or use another slot; risers and shared slots halve lanes"))  # fmt: skip
    return findings


def _modes(states: Sequence[GpuState]) -> list[Finding]:
    closed = [state.index for state in states if state.compute_mode == PROHIBITED]
    taken = [state.index for state in states if state.compute_mode == EXCLUSIVE and state.others]
    if closed:
        return [failed("compute mode", f"GPU {listed(closed)}: prohibited, no process may compute on it",
                       f"nvidia-smi -i {','.join(map(str, closed))} -c DEFAULT")]  # fmt: skip
    if taken:
        return [failed("compute mode", f"GPU {listed(taken)}: exclusive, and another process has it",
                       "stop that process (nvidia-smi shows it), or nvidia-smi -c DEFAULT")]  # fmt: skip
    return []


def _busy(states: Sequence[GpuState]) -> list[Finding]:
    busy = [
        f"GPU {state.index}: pid {', '.join(str(pid) for pid, _ in state.others)} "
        f"({sum(size for _, size in state.others) / GIB:.1f} GiB)"
        for state in states
        if state.compute_mode != EXCLUSIVE and sum(size for _, size in state.others) >= BUSY_BYTES
    ]
    if not busy:
        return []
    return [warned("other processes", "; ".join(busy), "stop them, or name other GPUs: GPUS=0,1; the plan counts "
                   "what is free now, and both would be slower")]  # fmt: skip


def check_peer_path(states: Sequence[GpuState]) -> list[Finding]:
    """Whether the IOMMU translates between GPUs without NVLink."""
    if len(states) < 2 or any(state.nvlinks for state in states):
        return []
    translated = [state.index for state in states if state.translated]
    if not translated:
        return []
    return [
        warned(
            "IOMMU",
            f"GPU {listed(translated)}: the IOMMU translates addresses, and there is no NVLink: P2P over PCIe may "
            "hang or be slow; see the all-reduce below",
            "boot with iommu=pt and switch ACS off in the BIOS (or amd_iommu=off, intel_iommu=off); until then export "
            "NCCL_P2P_DISABLE=1 if it hangs",
            "https://github.com/NVIDIA/nccl/issues/2079",
            "https://github.com/NVIDIA/nccl/issues/631",
        )
    ]
