"""What a run computes on: GPUs that are enough, alike, healthy, free and able to reach each other, torch's build and a
compiler for them, or a CPU beside which no accelerator is left unused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sft_play.config.schema import RunConfig
from sft_play.diagnose.pages import each_once
from sft_play.diagnose.surroundings import GpuState, Surroundings
from sft_play.facts.compiler import WITHOUT_TRITON, block_obstacle, obstacle
from sft_play.facts.gpus.unseen import ON_CPU, unseen
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding, failed, passed, skipped, warned
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import CPU_PARAMS, flash_obstacle
from sft_play.units import GIB

CPU_RANKS = 2
"""Ranks on a machine without GPUs where the number is not given, as `make train-distributed` starts them."""
EXCLUSIVE, PROHIBITED = 3, 2
BUSY_BYTES = GIB // 2
"""A CUDA context alone takes about this much (`CUDA_CONTEXT_BYTES` in planner/memory/estimate.py)."""


def choose(hardware: Hardware, options: LaunchOptions) -> tuple[Hardware, Finding]:
    """The GPUs of this node that the ranks would use, or its CPU, and whether they match what was asked for."""
    if not hardware.gpus:
        count = options.processes or CPU_RANKS
        machine = replace(hardware, cpu_ranks=count)
        if options.gpus:
            asked = ",".join(map(str, options.gpus))
            remedy = "install the driver, give the container its GPUs (docker run --gpus all), or leave GPUS= out"
            return machine, failed("GPUs", f"GPUS={asked} names GPUs, but the driver shows none", remedy)
        return machine, skipped("GPUs", f"none found; {count} CPU ranks are used instead")
    by_index = {gpu.index: gpu for gpu in hardware.gpus}
    missing = [index for index in options.gpus if index not in by_index]
    chosen = [by_index[index] for index in options.gpus if index in by_index] or list(hardware.gpus)
    wanted = options.processes or len(options.gpus) or len(chosen)
    machine = replace(hardware, gpus=tuple(chosen[:wanted]))
    if missing:
        return machine, failed("GPUs", f"GPUS= names {each_once(missing)}, but there are {each_once(by_index)}",
                               "name GPUs that nvidia-smi shows and CUDA_VISIBLE_DEVICES leaves visible")  # fmt: skip
    if wanted > len(chosen):
        why = "; a process sees only one of several MIG instances" if any(gpu.mig for gpu in chosen) else ""
        return machine, failed("GPUs", f"{wanted} ranks on this node need a GPU each, but there are {len(chosen)}{why}",
                               f"NPROC={len(chosen)}, or more GPUs",
                               *(("https://github.com/NVIDIA/nccl/issues/1716",) if why else ()))  # fmt: skip
    names = [gpu.name for gpu in machine.gpus]
    kinds = each_once(f"{names.count(name)} x {name}" for name in names)
    # by memory too: an A100 comes with 40 and with 80 GB, and the plan is for identical ranks
    if len({(gpu.name, gpu.total_bytes) for gpu in machine.gpus}) > 1:
        same = ",".join(str(gpu.index) for gpu in chosen if gpu.total_bytes == chosen[0].total_bytes)
        some = replace(machine, gpus=tuple(chosen))
        choices = some.alike_words(processes=options.processes) if len(some.alike) > 1 else f"GPUS={same}"
        shown = each_once(f"{gpu.index} is a {gpu.name} of {gpu.total_bytes / GIB:.0f} GiB" for gpu in machine.gpus)
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


_COMPILER_SOURCES = (
    "https://github.com/theroyallab/tabbyAPI/issues/453",
    "https://github.com/sgl-project/sglang/issues/1117",
)


def check_unseen(around: Surroundings, params: int, *, on_cpu: bool) -> list[Finding]:
    """An accelerator that exists but would not be used, or a model too large to train on a CPU."""
    if around.hardware.gpus or around.devices is None:
        return []
    if on_cpu:
        return [skipped("accelerator", "not looked for: train.device=cpu")]
    accelerator = unseen(around.devices)
    if accelerator is not None:
        return [failed("accelerator", accelerator.found, f"{accelerator.remedy}; or {ON_CPU}")]
    if params > CPU_PARAMS:
        return [failed("accelerator", f"none was detected, and the model has {params / 1e9:.1f} billion parameters",
                       f"plan for another machine (make plan HARDWARE=1xL4); or {ON_CPU}")]  # fmt: skip
    return [passed("accelerator", "neither device files nor the PCI bus show one")]


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


def check_compiler(around: Surroundings) -> list[Finding]:
    """Whether Triton can build the kernel that the loss needs on a GPU."""
    toolchain = around.toolchain
    if toolchain is None:
        return []
    missing = obstacle(toolchain)
    if missing is not None:
        return [failed("compiler", f"{missing[0]}; the loss is a Triton kernel, compiled at the first step", missing[1],
                       *_COMPILER_SOURCES)]  # fmt: skip
    if not toolchain.triton:
        return [warned("compiler", "Triton is not installed, although torch's GPU builds bring it", WITHOUT_TRITON)]
    found = "Triton's module was built here earlier" if toolchain.built else f"{toolchain.compiler}"
    return [passed("compiler", found)]


def check_blocks(config: RunConfig, machine: Hardware, environment: Mapping[str, str]) -> list[Finding]:
    """Whether inductor can compile the blocks of a run that asks for it."""
    if not config.train.compile:
        return []
    missing = block_obstacle(machine, environment)
    if missing is not None:
        return [failed("train.compile", f"{missing[0]}; inductor compiles blocks with it", missing[1])]
    return [passed("train.compile", "what inductor needs is here")]


def check_flash(config: RunConfig, machine: Hardware) -> list[Finding]:
    """Whether flash-attn 2 has kernels here, where the run asks for it."""
    missing = flash_obstacle(config, machine)
    return [failed("model.attn_implementation", *missing)] if missing is not None else []
