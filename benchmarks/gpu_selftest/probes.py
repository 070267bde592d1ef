"""What the libraries do on this machine, each in its own process: `python -m benchmarks.gpu_selftest.probes NAME OUT`.

A probe measures and does not judge: it writes its figures as JSON. A crash ends only its own process.
"""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_selftest.checks import DTYPES, HEAD_DIM, HEADS, MASKS, QUERY_HEADS, ROWS, TOKENS
from sft_play.machine.hardware import detect_hardware
from sft_play.process.signals import watch_parent

_KINDS = (
    ("cudnn", ("cudnn",)), ("flash", ("flash",)),
    ("efficient", ("efficient_attention", "fmha_cutlass", "fmha", "attention_kernel_batched")),
    ("math", ("attention_math", "softmax")),
)  # fmt: skip
"""Kinds of attention by parts of kernels' and operators' names, the first that one has: flash attention's names hold
"fmha" in some builds, and only the math kernel runs a softmax by itself."""


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def nf4() -> dict[str, float]:
    """NF4 and back, and a 4-bit layer against the product with its own weights: relative errors (2-norms) and bytes."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from sft_play.training.model.model_loading import keep_4bit_trainable

    torch.manual_seed(0)
    weight = torch.randn(256, 512, device=device(), dtype=torch.bfloat16)
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    back = dequantize_4bit(packed, state)
    layer = bnb.nn.Linear4bit(512, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(weight.float().cpu(), requires_grad=False, quant_type="nf4")
    layer = layer.to(device())  # which quantises
    keep_4bit_trainable(layer)
    kept = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    inputs = torch.randn(16, 512, device=device(), requires_grad=True)
    outputs = layer(inputs)
    outputs.sum().backward()
    return {
        "elements": float(weight.numel()), "packed_bytes": float(packed.numel() * packed.element_size()),
        "relative_error": _apart(back.float(), weight.float()), "layer_error": _apart(outputs, inputs @ kept.T),
        "gradient_error": _apart(inputs.grad, kept.sum(0).expand_as(inputs)),
    }  # fmt: skip


def _apart(value: Any, wanted: torch.Tensor) -> float:
    return float((value.detach() - wanted.detach()).norm() / wanted.detach().norm())


def attention() -> dict[str, Any]:
    """Which kernel computes sdpa as a run calls it, by the profiler's names: mask x heads x dtype, with its backward,
    for batches whose lengths vary and for those of one shape, where cuDNN's kernel is on.

    `kernels` has the kind of each case, `names` the kernels that show it.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from sft_play.planner.kernels import can_run_flash
    from sft_play.training.model import attention_functions
    from sft_play.training.model.attention_functions import sdpa_attention

    capability = torch.cuda.get_device_capability() if device() == "cuda" else None

    kernels: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for short, dtype_name in DTYPES.items():
        dtype = getattr(torch, dtype_name)
        if short == "bf16" and capability is not None and capability < (8, 0):
            continue  # no run computes in bf16 there
        repeats = capability is not None and not can_run_flash(half_precision=short != "fp32", capability=capability)
        forward = sdpa_attention if repeats else sdpa_attention_forward
        for heads, count in HEADS.items():
            for mask, (rows, repeat) in itertools.product(MASKS, ROWS.items()):
                case = f"{short}, {heads}, {mask}{rows}"
                attention_functions.enable_cudnn(enabled=repeat)
                names[case] = _profiled(forward, dtype, count, masked=mask != "causal")
                kernels[case] = kind_of(names[case])
    return {"kernels": kernels, "names": {case: _telling(found) for case, found in names.items()}}


def _profiled(forward: Callable[..., Any], dtype: torch.dtype, heads: int, *, masked: bool) -> list[str]:
    """Names of all kernels (on a CPU: operators) of one attention, forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    class Module(torch.nn.Module):
        num_key_value_groups = QUERY_HEADS // heads
        is_causal = True

    def tensor(count: int) -> torch.Tensor:
        return torch.randn(2, count, TOKENS, HEAD_DIM, dtype=dtype, device=device(), requires_grad=True)

    query, key, value = tensor(QUERY_HEADS), tensor(heads), tensor(heads)
    mask = None
    if masked:  # the second row is padded at its end
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device()).tril().expand(2, 1, TOKENS, TOKENS).clone()
        mask[1, :, :, TOKENS // 2 :] = False

    def once() -> None:
        forward(Module(), query, key, value, mask)[0].float().sum().backward()

    once()  # what is chosen and compiled at the first call is not an attention kernel
    on_gpu = device() == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as traced:
        once()
        if on_gpu:
            torch.cuda.synchronize()
    return [str(event.key) for event in traced.key_averages()]


def kind_of(names: Sequence[str]) -> str:
    lowered = [name.lower() for name in names]
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts for name in lowered)), "unknown")


def _telling(names: Sequence[str]) -> list[str]:
    parts = [part for _, known in _KINDS for part in known]
    return [name[:160] for name in names if any(part in name.lower() for part in parts)][:6]


def nvml() -> dict[str, int]:
    """Bytes that are free by the driver, which a plan reads, and by CUDA; and what this process's context takes."""
    before = _free_by_driver()
    torch.zeros(1, device="cuda")  # makes the context
    free, total = torch.cuda.mem_get_info()
    by_driver = _free_by_driver()
    return {
        "free_by_driver": by_driver, "free_by_cuda": free, "total_by_cuda": total,
        "total_by_driver": detect_hardware().gpus[0].total_bytes,
        "context": before - by_driver - torch.cuda.memory_reserved(),
    }  # fmt: skip


def _free_by_driver() -> int:
    free = detect_hardware().gpus[0].free_bytes
    assert free is not None, "the driver does not say what is free"
    return free


PROBES: dict[str, Callable[[], Any]] = {"nf4": nf4, "attention": attention, "nvml": nvml}


def main(words: Sequence[str]) -> int:
    """Run a probe and write its result; `model FOLDER` creates the trials' model instead."""
    watch_parent()
    name, out = words
    if name == "model":
        from benchmarks.gpu_selftest.material import write_trial_model

        write_trial_model(Path(out), large=torch.cuda.is_available())
        return 0
    Path(out).write_text(json.dumps(PROBES[name]()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
