"""The GPUs: enough of them, of one kind, healthy, free, and able to reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sft_play.doctor.finding import Finding, failed, listed, passed, skipped, warned
from sft_play.doctor.surroundings import GpuState
from sft_play.facts.hardware import Hardware
from sft_play.launch.spread import Spread

GIB = 2**30
CPU_RANKS = 2
"""Ranks on a machine without GPUs where nobody says how many, as `make train-distributed` starts them."""
EXCLUSIVE, PROHIBITED = 3, 2
FABRIC_READY = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""
BUSY_BYTES = GIB // 2
"""A context alone takes about as much (`plan.memory.CUDA_CONTEXT_BYTES`)."""


def choose(hardware: Hardware, spread: Spread) -> tuple[Hardware, Finding]:
    """The GPUs of this node that the ranks would use, or its CPU, and whether they are what was asked for."""
    if not hardware.gpus:
        count = spread.processes or CPU_RANKS
        machine = replace(hardware, cpu_ranks=count)
        if spread.gpus:
            asked = ",".join(map(str, spread.gpus))
            return machine, failed("GPUs", f"GPUS={asked} names GPUs, and the driver shows none",
                                   "install the NVIDIA driver, give the container its GPUs (docker run --gpus all), "
                                   "or leave GPUS= out to run on the CPU")  # fmt: skip
        return machine, skipped("GPUs", f"none found; {count} ranks on the CPU stand for them")
    known = {gpu.index: gpu for gpu in hardware.gpus}
    missing = [number for number in spread.gpus if number not in known]
    chosen = [known[number] for number in spread.gpus if number in known] or list(hardware.gpus)
    wanted = spread.processes or len(spread.gpus) or len(chosen)
    machine = replace(hardware, gpus=tuple(chosen[:wanted]))
    if missing:
        return machine, failed("GPUs", f"GPUS= names {listed(missing)}, and there are {listed(known)}",
                               "name GPUs that nvidia-smi shows and CUDA_VISIBLE_DEVICES leaves visible")  # fmt: skip
    if wanted > len(chosen):
        why = ""
        if any(gpu.mig for gpu in chosen):
            why = "; of several MIG instances a process sees one"
        return machine, failed("GPUs", f"{wanted} ranks on this node want a GPU each, and there are {len(chosen)}{why}",
                               f"NPROC={len(chosen)}, or more GPUs",
                               *(("https://github.com/NVIDIA/nccl/issues/1716",) if why else ()))  # fmt: skip
    kinds = listed(
        f"{sum(gpu.name == name for gpu in machine.gpus)} x {name}" for name in [g.name for g in machine.gpus]
    )
    if len({(gpu.name, gpu.total_bytes) for gpu in machine.gpus}) > 1:
        same = ",".join(str(gpu.index) for gpu in chosen if gpu.total_bytes == chosen[0].total_bytes)
        some = replace(machine, gpus=tuple(chosen))
        alike = some.alike_words(processes=spread.processes) if len(some.alike) > 1 else f"GPUS={same}"
        shown = listed(f"{gpu.index} is a {gpu.name} of {gpu.total_bytes / GIB:.0f} GiB" for gpu in machine.gpus)
        return machine, failed("GPUs", f"they differ: {shown}; every rank would run as the smallest and slowest",
                               f"name GPUs that are alike: {alike}")  # fmt: skip
    return machine, passed("GPUs", kinds)


def over_nodes(machine: Hardware, nodes: int) -> Hardware:
    """All nodes' machine, taking it that each is like this one."""
    if not machine.gpus:
        return replace(machine, cpu_ranks=machine.cpu_ranks * nodes, nodes=nodes)
    here = len(machine.gpus)
    gpus = tuple(replace(machine.gpus[n % here], index=n) for n in range(here * nodes))
    return replace(machine, gpus=gpus, nodes=nodes)


def check_health(states: Sequence[GpuState], *, gpus: int) -> list[Finding]:
    """Errors that the driver counts, modes that keep a rank out, and other processes on the GPUs."""
    if not gpus:
        return []
    if not states:
        return [skipped("GPU health", "NVML does not answer: errors, modes and other processes are not known")]
    found = [*_fabric(states), *_errors(states), *_modes(states), *_busy(states)]
    if not any(item.name == "GPU health" for item in found):
        found.insert(0, passed("GPU health", f"{len(states)} GPU{'s' if len(states) > 1 else ''} without errors"))
    return found


def _fabric(states: Sequence[GpuState]) -> list[Finding]:
    waiting = [state.index for state in states if state.fabric not in (None, FABRIC_READY)]
    if not waiting:
        return []
    return [
        failed(
            "NVSwitch fabric",
            f"GPU {listed(waiting)}: not ready; CUDA will say `system not yet initialized` (error 802)",
            "systemctl start nvidia-fabricmanager, of exactly the driver's version (rented machines: ask the owner)",
            "https://github.com/pytorch/pytorch/issues/35710",
            "https://github.com/huggingface/huggingface_hub/issues/4134",
        )
    ]


def _errors(states: Sequence[GpuState]) -> list[Finding]:
    found = []
    broken = [state.index for state in states if state.remap_failed]
    if broken:
        found.append(failed("GPU health", f"GPU {listed(broken)}: a memory row could not be remapped",
                            "do not use it (GPUS= names the others); have it replaced"))  # fmt: skip
    counted = [f"{state.index} ({state.uncorrected_errors})" for state in states if state.uncorrected_errors]
    if counted:
        found.append(failed("GPU health", f"uncorrected memory errors since the last start: GPU {listed(counted)}",
                            "reset the GPU or restart the machine (nvidia-smi -q -d ECC, dmesg | grep Xid); replace it "
                            "where they come again"))  # fmt: skip
    pending = [state.index for state in states if state.remap_pending and not state.remap_failed]
    if pending:
        found.append(warned("GPU health", f"GPU {listed(pending)}: a memory row waits to be remapped",
                            "reset the GPU or restart the machine before a long run"))  # fmt: skip
    narrow = [
        f"{state.index} (x{state.pcie_lanes[0]} of x{state.pcie_lanes[1]})"
        for state in states
        if state.pcie_lanes and state.pcie_lanes[0] < state.pcie_lanes[1]
    ]
    if narrow:
        found.append(warned("PCIe lanes", f"GPU {listed(narrow)}: copies and all-reduces are as much slower",
                            "seat the card anew or use another slot; risers and shared slots halve lanes"))  # fmt: skip
    return found


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
    """Whether the IOMMU stands between GPUs that have no NVLink."""
    if len(states) < 2 or any(state.nvlinks for state in states):
        return []
    translated = [state.index for state in states if state.translated]
    if not translated:
        return []
    return [
        warned(
            "IOMMU",
            f"GPU {listed(translated)}: the IOMMU translates addresses, and there is no NVLink: P2P over PCIe may "
            "hang or be slow; the all-reduce below tells",
            "boot with iommu=pt and switch ACS off in the BIOS (or amd_iommu=off, intel_iommu=off); until then export "
            "NCCL_P2P_DISABLE=1 where it hangs",
            "https://github.com/NVIDIA/nccl/issues/2079",
            "https://github.com/NVIDIA/nccl/issues/631",
        )
    ]
