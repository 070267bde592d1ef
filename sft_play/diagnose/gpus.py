"""What a run computes on: GPUs that are enough, alike, healthy and free, torch's build for them, and what a run is
refused for before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sft_play.config.schema import RunConfig
from sft_play.diagnose.pages import each_once
from sft_play.diagnose.surroundings import GpuState, Surroundings
from sft_play.errors import SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding, failed, passed, skipped, warned
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import require_machine
from sft_play.units import GIB

CPU_RANKS = 2
"""Ranks on a machine without GPUs where the number is not given, as `make train-distributed` starts them."""
EXCLUSIVE, PROHIBITED = 3, 2
BUSY_BYTES = GIB // 2
"""A CUDA context alone takes about this much (`CUDA_CONTEXT_BYTES` in planner/memory/estimate.py)."""


def choose(hardware: Hardware, options: LaunchOptions) -> tuple[Hardware, Finding]:
    """The GPUs of this node that the ranks would use, or its CPU, and whether they match what was asked for."""
    asked = ",".join(map(str, options.gpus))
    if not hardware.gpus:
        count = options.processes or CPU_RANKS
        machine = replace(hardware, cpu_ranks=count)
        if options.gpus:
            remedy = "install the driver, give the container its GPUs (docker run --gpus all), or leave GPUS= out"
            return machine, failed("GPUs", f"GPUS={asked} names GPUs, but the driver shows none", remedy)
        return machine, skipped("GPUs", f"none found; {count} CPU ranks are used instead")
    chosen = [gpu for gpu in hardware.gpus if gpu.index in options.gpus] if options.gpus else list(hardware.gpus)
    wanted = options.processes or len(options.gpus) or len(chosen)
    machine = replace(hardware, gpus=tuple(chosen[:wanted]) or hardware.gpus)
    there = each_once(f"{gpu.index} is a {gpu.name} of {gpu.total_bytes / GIB:.0f} GiB" for gpu in hardware.gpus)
    if wanted > len(chosen) or len(chosen) < len(options.gpus):
        why = "; a process sees only one of several MIG instances" if any(gpu.mig for gpu in hardware.gpus) else ""
        found = f"{wanted} ranks on this node need a GPU each{f' (GPUS={asked})' if asked else ''}, and {there}{why}"
        return machine, failed("GPUs", found, f"NPROC={len(hardware.gpus)}, or GPUS= of those that there are")
    # by memory too: an A100 comes with 40 and with 80 GB, and the plan is for identical ranks
    if len({(gpu.name, gpu.total_bytes) for gpu in machine.gpus}) > 1:
        same = ",".join(str(gpu.index) for gpu in chosen if gpu.total_bytes == chosen[0].total_bytes)
        is_mixed = len(hardware.alike) > 1
        choices = hardware.alike_words(processes=options.processes) if is_mixed else f"GPUS={same}"
        found = f"they differ: {there}; every rank would be held to the smallest and slowest"
        return machine, failed("GPUs", found, f"name identical GPUs: {choices}")
    names = [gpu.name for gpu in machine.gpus]
    return machine, passed("GPUs", each_once(f"{names.count(name)} x {name}" for name in names))


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
    findings = [*_errors(states), *_modes(states), *_busy(states)]
    if not any(item.name == "GPU health" for item in findings):
        findings.insert(0, passed("GPU health", f"{len(states)} GPU{'s' if len(states) > 1 else ''} without errors"))
    if len(states) < gpus:
        told = each_once(state.index for state in states)
        findings.append(skipped("GPU health", f"NVML tells the state of GPU {told} only, not of all {gpus}"))
    return findings


def _errors(states: Sequence[GpuState]) -> list[Finding]:
    findings = []
    broken = [state.index for state in states if state.remap_failed]
    if broken:
        findings.append(failed("GPU health", f"GPU {each_once(broken)}: a memory row could not be remapped",
                            "do not use it (GPUS= names the others); have it replaced"))  # fmt: skip
    counted = [f"{state.index} ({state.uncorrected_errors})" for state in states if state.uncorrected_errors]
    if counted:
        words = f"uncorrected memory errors since the last start: GPU {each_once(counted)}"
        remedy = "reset the GPU or restart the machine (dmesg | grep Xid); replace it if they come back"
        findings.append(failed("GPU health", words, remedy))
    pending = [state.index for state in states if state.remap_pending and not state.remap_failed]
    if pending:
        findings.append(warned("GPU health", f"GPU {each_once(pending)}: a memory row waits to be remapped",
                            "reset the GPU or restart the machine before a long run"))  # fmt: skip
    return findings


def _modes(states: Sequence[GpuState]) -> list[Finding]:
    closed = [state.index for state in states if state.compute_mode == PROHIBITED]
    taken = [state.index for state in states if state.compute_mode == EXCLUSIVE and state.others]
    if closed:
        return [failed("compute mode", f"GPU {each_once(closed)}: prohibited, no process may compute on it",
                       f"nvidia-smi -i {','.join(map(str, closed))} -c DEFAULT")]  # fmt: skip
    if taken:
        return [failed("compute mode", f"GPU {each_once(taken)}: exclusive, and another process has it",
                       "stop that process (nvidia-smi shows it), or nvidia-smi -c DEFAULT")]  # fmt: skip
    return []


def _busy(states: Sequence[GpuState]) -> list[Finding]:
    busy = []
    for state in states:
        held = sum(size for _, size in state.others)
        if state.compute_mode != EXCLUSIVE and held >= BUSY_BYTES:
            busy.append(f"GPU {state.index}: pid {each_once(pid for pid, _ in state.others)} ({held / GIB:.1f} GiB)")
    remedy = "stop them, or name other GPUs: GPUS=0,1; the plan counts what is free now"
    return [warned("other processes", "; ".join(busy), remedy)] if busy else []


def check_start(config: RunConfig, machine: Hardware, environment: Mapping[str, str], *, params: int) -> Finding:
    """What a run on this machine is refused for before anything loads: an accelerator that it would not use, a model
    too large for a CPU, no compiler for its kernels."""
    try:
        require_machine(config, machine, environment, params=lambda: params)
    except SftPlayError as error:
        found, _, remedy = str(error).partition("; ")
        return failed("machine", found, remedy or "see docs/setup.md")
    return passed("machine", "a run would start: its device, compiler and kernels are here")


def check_build(around: Surroundings) -> list[Finding]:
    """What torch is built for, compared with the newest CUDA that the driver runs."""
    if "torch" not in around.versions:
        return []
    torch, gpus = around.versions["torch"], around.hardware.gpus
    if not gpus:
        return [skipped("driver", f"no GPU; torch {torch} is {_built_for(around)}")]
    torch_words = f"torch {torch} is {_built_for(around)}"
    if around.torch_cuda is None:
        return [failed("driver", f"{torch_words}, but there are GPUs",
                       "install torch's CUDA build: make setup (with VENV=: torch from PyPI)")]  # fmt: skip
    if around.driver is None or around.driver_cuda is None:
        return [skipped("driver", f"NVML does not answer; {torch_words}")]
    newest = ".".join(map(str, around.driver_cuda))
    return [passed("driver", f"{around.driver} (CUDA {newest} and older); {torch_words}")]


def _built_for(around: Surroundings) -> str:
    return f"built for CUDA {around.torch_cuda}" if around.torch_cuda else "a build without CUDA"
