"""Whether a run takes the device that its user expects: unseen accelerators, torch's build, a compiler."""

from __future__ import annotations

from sft_play.doctor.finding import Finding, failed, passed, skipped, warned
from sft_play.doctor.surroundings import Surroundings
from sft_play.facts.compiler import WITHOUT_TRITON, obstacle
from sft_play.facts.unseen import ON_CPU, ROCM_BUILD, unseen
from sft_play.launch.device import CPU_PARAMS


def check_unseen(around: Surroundings, params: int, *, on_cpu: bool) -> list[Finding]:
    """An accelerator that is there and that a run would not use, or a model that nobody trains on a CPU."""
    if around.hardware.gpus or around.devices is None:
        return []
    if on_cpu:
        return [skipped("accelerator", "not looked for: train.device=cpu")]
    if around.hardware.shared_gpu:
        return [passed("accelerator", f"{around.hardware.shared_gpu}, which one process uses (make train)")]
    there = unseen(around.devices)
    if there is not None:
        return [failed("accelerator", there.found, f"{there.remedy}; or {ON_CPU}")]
    if params > CPU_PARAMS:
        return [failed("accelerator", f"none is seen, and the model has {params / 1e9:.1f} billion parameters",
                       f"plan for another machine (make plan HARDWARE=1xL4); or {ON_CPU}")]  # fmt: skip
    return [passed("accelerator", "neither device files nor the PCI bus show one")]


def check_build(around: Surroundings) -> list[Finding]:
    """What torch is built for, beside the newest CUDA that the driver runs, or beside AMD's GPUs."""
    if "torch" not in around.versions:
        return []
    torch, gpus = around.versions["torch"], around.hardware.gpus
    if not gpus:
        return [skipped("driver", f"no GPU; torch {torch} is {_built_for(around)}")]
    said = f"torch {torch} is {_built_for(around)}"
    if gpus[0].is_amd:
        if around.torch_hip is None:
            return [failed("driver", f"{said}, and the GPUs are AMD's", f"install its ROCm build: {ROCM_BUILD}")]
        return [passed("driver", said)]
    if around.torch_cuda is None:
        return [failed("driver", f"{said}, and there are GPUs",
                       "install torch's CUDA build: make setup (with VENV=: torch from PyPI)")]  # fmt: skip
    if around.driver is None or around.driver_cuda is None:
        return [skipped("driver", f"NVML does not answer; {said}")]
    newest = ".".join(map(str, around.driver_cuda))
    return [passed("driver", f"{around.driver} (CUDA {newest} and older); {said}")]


def _built_for(around: Surroundings) -> str:
    if around.torch_hip:
        return f"built for ROCm {around.torch_hip}"
    return f"built for CUDA {around.torch_cuda}" if around.torch_cuda else "a build for the CPU alone"


def check_compiler(around: Surroundings) -> list[Finding]:
    """Whether Triton can build what the loss needs on a GPU."""
    there = around.toolchain
    if there is None:
        return []
    missing = obstacle(there)
    if missing is not None:
        return [failed("compiler", f"{missing[0]}; the loss is a Triton kernel, built at the first step", missing[1],
                       *_COMPILER_SOURCES)]  # fmt: skip
    if not there.triton:
        return [warned("compiler", "no Triton is installed, which torch's builds for GPUs bring", WITHOUT_TRITON)]
    return [passed("compiler", "Triton's module was built here before" if there.built else f"{there.compiler}")]


_COMPILER_SOURCES = (
    "https://github.com/theroyallab/tabbyAPI/issues/453",
    "https://github.com/sgl-project/sglang/issues/1117",
)
