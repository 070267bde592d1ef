"""The parts about the environment: what the libraries find on this machine before anything trains."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_selftest.checks import attention_problems, memory_counter_problems, nf4_problems, varlen_problems
from benchmarks.gpu_selftest.material import LARGE_MODEL
from benchmarks.gpu_selftest.part import Part
from benchmarks.gpu_selftest.trials import TrialBench, run_module
from sft_play.machine import compiler, visible_gpus
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import cuda_libraries
from sft_play.models.config_json import load_model_shape
from sft_play.planner.kernels import prefers_cudnn
from sft_play.planner.memory.estimate import CUDA_CONTEXT_BYTES
from sft_play.planner.memory.structure import select_attention_kernel

PREFIX = "environment/"
CASES = (("grouped heads", 2), ("equal heads", 8))
MASKS = ("causal", "padding mask")
ROWS = {"": False, ", one shape": True}
QUERY_HEADS, HEAD_DIM = 8, 64
"""As in the probe of attention."""


def device(hardware: Hardware) -> Part:
    """The device that everything below runs on; fails if there is an accelerator that is not detected."""
    name = f"{PREFIX}device"
    if hardware.gpus:
        kinds = [f"{len(group)} x {group[0].name}" for group in hardware.gpu_groups]
        return Part(name, "pass", ", ".join(kinds), measured={"gpus": [gpu.name for gpu in hardware.gpus]})
    if there := visible_gpus.find_unusable_accelerator(os.environ):
        return Part(name, "fail", f"{there}; what follows ran on the CPU")
    return Part(
        name, "skipped", f"there is no GPU: all of it runs on the CPU ({hardware.cpu_name}), with a small model"
    )


def toolchain(_: TrialBench) -> Part:
    """A C compiler and Python's headers, which Triton needs."""
    name, there = f"{PREFIX}compiler", compiler.find_toolchain(os.environ)
    measured = {
        "compiler": there.compiler,
        "failed": there.compile_error,
        "triton": there.has_triton,
        "built": there.has_built_module,
    }
    if there.compiler is None or there.compile_error is not None:
        missing, remedy = compiler.toolchain_obstacle(
            dataclasses.replace(there, has_triton=True, has_built_module=False)
        ) or ("none", "")
        if not there.has_triton:
            return Part(name, "skipped", f"there is {missing}, and no Triton that needs one", measured=measured)
        if not there.has_built_module:
            return Part(name, "fail", f"there is {missing}: {remedy}", measured=measured)
        return Part(name, "pass", f"there is {missing}; what Triton needs was built earlier", measured=measured)
    return Part(name, "pass", f"{there.compiler} compiles against {there.headers}", measured=measured)


def triton(bench: TrialBench) -> Part:
    """A Triton kernel, compiled and run."""

    def judge(measured: dict[str, Any]) -> list[str]:
        wrong = measured["wrong_elements"]
        return [f"{wrong} elements of a sum are wrong"] if wrong else []

    return _probe(
        bench, "triton", judge, reason=lambda measured: f"a kernel compiled and ran in {measured['seconds']:.1f} s"
    )


def nf4(bench: TrialBench) -> Part:
    """NF4 and back, and a layer of it."""
    return _probe(
        bench,
        "nf4",
        nf4_problems,
        reason=lambda measured: f"relative error {measured['relative_error']:.3f} there and back",
    )


def nvml(bench: TrialBench) -> Part:
    """The driver's count of free memory, which a plan reads, against CUDA's."""

    def words(measured: dict[str, int]) -> str:
        apart = abs(measured["free_by_driver"] - measured["free_by_cuda"])
        return f"free memory {apart / 2**20:.0f} MiB apart; a context takes {measured['context'] / 2**20:.0f} MiB"

    return _probe(
        bench,
        "nvml",
        lambda measured: memory_counter_problems(measured, context_bytes=CUDA_CONTEXT_BYTES),
        reason=words,
        predicted={"context": CUDA_CONTEXT_BYTES},
    )


def attention(bench: TrialBench, hardware: Hardware) -> Part:
    """Which kernel runs, for mask x grouped heads x dtype, compared with what the plan counts on."""
    predicted = kernels_of(hardware) if bench.on_gpu else {}

    def judge(measured: dict[str, Any]) -> list[str]:
        asked = {case: kernel for case, kernel in predicted.items() if case in measured["kernels"]}
        return attention_problems(asked, measured["kernels"])

    def words(measured: dict[str, Any]) -> str:
        kinds = ", ".join(sorted(set(measured["kernels"].values())))
        counted = "as the plan counts" if predicted else "no kernel is predicted for a CPU"
        return f"{len(measured['kernels'])} cases: {kinds}; {counted}"

    return _probe(bench, "attention", judge, reason=words, predicted=dict(predicted) or None)


def varlen(bench: TrialBench) -> Part:
    """Attention by the boundaries of packs, against one chat at a time."""

    def words(measured: dict[str, Any]) -> str:
        worst = max(measured["errors"].values(), default=None)
        return (
            str(measured["lacking"])
            if worst is None
            else f"{len(measured['errors'])} cases, relative error {worst:.4f}"
        )

    return _probe(bench, "varlen", varlen_problems, reason=words)


def kernels_of(hardware: Hardware) -> dict[str, str]:
    """The kernel that the plan counts on, by case, on the first GPU."""
    shape, capability = load_model_shape(LARGE_MODEL), hardware.gpus[0].capability
    preferred = prefers_cudnn(capability, cuda_libraries(), is_amd=hardware.gpus[0].is_amd)
    kernels = {}
    for dtype in ("bf16", "fp16", "fp32"):
        for heads, count in CASES:
            one = dataclasses.replace(shape, num_heads=QUERY_HEADS, num_kv_heads=count, head_dim=HEAD_DIM)
            for mask, (rows, repeat) in itertools.product(MASKS, ROWS.items()):
                kernels[f"{dtype}, {heads}, {mask}{rows}"] = str(
                    select_attention_kernel(
                        one, attention="sdpa", masked=mask != "causal", half_precision=dtype != "fp32",
                        capability=capability, on_gpu=True, uses_cudnn=preferred and repeat,
                    )
                )  # fmt: skip
    return kernels


def _probe(
    bench: TrialBench,
    name: str,
    judge: Callable[[Any], list[str]],
    *,
    reason: Callable[[Any], str],
    predicted: dict[str, Any] | None = None,
) -> Part:
    """Run a probe in its own process, and check its result."""
    out, log = bench.folder / f"{name}.json", bench.logs / f"environment-{name}.log"
    out.unlink(missing_ok=True)
    ended = run_module(["benchmarks.gpu_selftest.probes", name, str(out)], log, bench)
    part = f"{PREFIX}{name}"
    common: dict[str, Any] = {"seconds": round(ended.seconds, 1), "log": str(log)}
    if ended.code != 0 or not out.is_file():
        return Part(part, "fail", ended.words, predicted, **common)
    measured = json.loads(out.read_text(encoding="utf-8"))
    problems = judge(measured)
    return Part(
        part, "fail" if problems else "pass", "; ".join(problems) or reason(measured), predicted, measured, **common
    )
