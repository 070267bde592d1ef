"""Whether a run uses the device that its user expects: undetected accelerators, torch's build, a compiler."""

from __future__ import annotations

from collections.abc import Mapping

from sft_play.config.schema import RunConfig
from sft_play.diagnose.surroundings import Surroundings
from sft_play.facts.compiler import WITHOUT_TRITON, block_obstacle, obstacle
from sft_play.facts.gpus.unseen import ON_CPU, ROCM_BUILD, unseen
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding, failed, passed, skipped, warned
from sft_play.launch.device import CPU_PARAMS, flash_obstacle


def check_unseen(around: Surroundings, params: int, *, on_cpu: bool) -> list[Finding]:
    """An accelerator that exists but would not be used, or a model too large to train on a CPU."""
    if around.hardware.gpus or around.devices is None:
        return []
    if on_cpu:
        return [skipped("accelerator", "not looked for: train.device=cpu")]
    if around.hardware.shared_gpu:
        return [passed("accelerator", f"{around.hardware.shared_gpu}, which one process uses (make train)")]
    accelerator = unseen(around.devices)
    if accelerator is not None:
        return [failed("accelerator", accelerator.found, f"{accelerator.remedy}; or {ON_CPU}")]
    if params > CPU_PARAMS:
        return [failed("accelerator", f"none was detected, and the model has {params / 1e9:.1f} billion parameters",
                       f"plan for another machine (make plan HARDWARE=1xL4); or {ON_CPU}")]  # fmt: skip
    return [passed("accelerator", "neither device files nor the PCI bus show one")]


def check_build(around: Surroundings) -> list[Finding]:
    """What torch is built for, compared with the newest CUDA that the driver runs, or with AMD GPUs."""
    if "torch" not in around.versions:
        return []
    torch, gpus = around.versions["torch"], around.hardware.gpus
    if not gpus:
        return [skipped("driver", f"no GPU; torch {torch} is {_built_for(around)}")]
    torch_words = f"torch {torch} is {_built_for(around)}"
    if gpus[0].is_amd:
        if around.torch_hip is None:
            return [failed("driver", f"{torch_words}, but the GPUs are AMD's", f"install its ROCm build: {ROCM_BUILD}")]
        return [passed("driver", torch_words)]
    if around.torch_cuda is None:
        return [failed("driver", f"{torch_words}, but there are GPUs",
                       "install torch's CUDA build: make setup (with VENV=: torch from PyPI)")]  # fmt: skip
    if around.driver is None or around.driver_cuda is None:
        return [skipped("driver", f"NVML does not answer; {torch_words}")]
    newest = ".".join(map(str, around.driver_cuda))
    return [passed("driver", f"{around.driver} (CUDA {newest} and older); {torch_words}")]


def _built_for(around: Surroundings) -> str:
    if around.torch_hip:
        return f"built for ROCm {around.torch_hip}"
    return f"built for CUDA {around.torch_cuda}" if around.torch_cuda else "a CPU-only build"


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
    return [
        passed("compiler", "Triton's module was built here earlier" if toolchain.built else f"{toolchain.compiler}")
    ]


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


_COMPILER_SOURCES = (
    "https://github.com/theroyallab/tabbyAPI/issues/453",
    "https://github.com/sgl-project/sglang/issues/1117",
)
