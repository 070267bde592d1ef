"""Whether other code computes what the plain code does, by measurement before a run relies on it.

Logits and gradients of a small model have to agree in fp32; in 16 bits the other code must not be further from fp32
than the plain one is. PyTorch's varlen kernel is compared with a call for each chat, on the run's own GPU.

Shape letters: T tokens of all chats, H heads, G heads of keys, D width of a head.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sft_play.log import one_line
from sft_play.planner.plan import Plan
from sft_play.training import distributed
from sft_play.training.model import context_parallel, varlen
from sft_play.training.prepare.model_spec import ModelSpec

logger = logging.getLogger(__name__)

# Difference in fp32, over the size of what is compared, that counts as rounding: 6e-6 at most for llama, mistral,
# phi3, qwen2, qwen3 and gpt_oss, 1.1e-4 for qwen3_5, whose recurrence amplifies it (liger-kernel 0.8.5 in Triton's
# interpreter, benchmarks/LOG.md); a norm that is wrong by 1% is further off.
FP32_TOLERANCE = 1e-3
# How many times as far from fp32 as the plain code other code may be in 16 bits.
MAX_HALF_ERROR_RATIO = 1.5
_ROWS, _LENGTH = 2, 23
# Tokens of the chats on which a kernel is tried: one alone, and some beyond a kernel's tiles of 64 and 128.
KERNEL_CHAT_LENGTHS = (100, 1, 27, 256, 129)
# Longest window that is tried: shorter than most of the chats.
LONGEST_WINDOW = 48
# Relative error that counts as rounding in 16 bits, which give 0.004. A chat that sees another, or a window that is
# off by one, is off by 0.09 and more.
KERNEL_TOLERANCE = 0.02

TensorList = list[torch.Tensor]
CheckResult = TypeVar("CheckResult")


@dataclass(frozen=True)
class ClassCheck:
    """How far other code is from the plain code, over logits and gradients, the worst of them."""

    fp32_difference: float
    """Relative difference in fp32."""
    half_precision_ratio: float
    """Its error in the run's dtype over the plain code's own; 0 for a run in fp32."""

    @property
    def is_rounding(self) -> bool:
        """Whether both are rounding (a figure that is not a number is none)."""
        return self.fp32_difference < FP32_TOLERANCE and self.half_precision_ratio < MAX_HALF_ERROR_RATIO

    @property
    def figures_text(self) -> str:
        """The measured differences in words."""
        text = f"{self.fp32_difference:.0e} in fp32"
        half_text = f"{text}, {self.half_precision_ratio:.2f} of the plain ones' own error in 16 bits"
        return half_text if self.half_precision_ratio else text


def all_ranks_agree(check: Callable[[], tuple[CheckResult, str | None]]) -> tuple[CheckResult | None, str | None]:
    """What `check` returns where it has no problem on any rank; else None and the problem. All ranks call it. What
    `check` raises is a problem too: a class can break at anything that is put into it."""
    result, problem = None, None
    try:
        result, problem = check()
    except Exception as error:
        problem = f"not proven: {type(error).__name__}: {one_line(str(error), limit=200)}"
    if distributed.any_rank(problem is not None):
        return None, problem or "another rank cannot"
    return result, None


def compare_with_reference(
    reference: TensorList, reference_half: TensorList, replaced: TensorList, replaced_half: TensorList
) -> ClassCheck:
    """Build the check from logits and gradients of plain and other code, each in fp32 and in the run's dtype."""
    reference_error, replaced_error = (
        relative_difference(reference_half, reference),
        relative_difference(replaced_half, reference),
    )
    return ClassCheck(
        relative_difference(replaced, reference), replaced_error / reference_error if reference_error else 0.0
    )


def largest_differences(checks: Iterable[ClassCheck]) -> ClassCheck:
    """The larger of each figure."""
    return ClassCheck(
        *(
            _max_or_nan(figures)
            for figures in zip(*((check.fp32_difference, check.half_precision_ratio) for check in checks), strict=True)
        )
    )


def logits_and_gradients(model: Any, *, packed: bool = False) -> TensorList:
    """Logits and all gradients in fp32, as a model computes them in its dtype of two short rows, or `packed`: of both
    one behind the other, told apart by their boundaries."""
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    ids = torch.randint(3, model.config.vocab_size, (_ROWS, _LENGTH), generator=generator).to(device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if packed:
        boundaries = torch.arange(0, _ROWS * _LENGTH + 1, _LENGTH, dtype=torch.int32, device=device)
        inputs = {
            "input_ids": ids.reshape(1, -1), "position_ids": torch.arange(_LENGTH, device=device).repeat(_ROWS)[None],
            "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": _LENGTH, "max_length_k": _LENGTH,
        }  # fmt: skip
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits.float().reshape(_ROWS, _LENGTH, -1)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = [parameter.grad.float().clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [logits.detach(), *gradients]


def to_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model in a dtype: a copy, or itself in fp32."""
    return model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)


def relative_difference(tensors: TensorList, references: TensorList) -> float:
    """The largest difference of a tensor over its size, as norms; nan if any is."""
    return _max_or_nan(
        float((tensor - reference).norm() / reference.norm().clamp(min=1e-12))
        for tensor, reference in zip(tensors, references, strict=True)
    )


def small_model_attention(model: Any) -> str:
    """The attention of small models: the model's, but on whole rows where ranks share them."""
    name = str(model.config._attn_implementation)
    return "sdpa" if name == context_parallel.ULYSSES_ATTENTION else name


def _max_or_nan(figures: Iterable[float]) -> float:
    values = list(figures)
    return math.nan if any(map(math.isnan, values)) else max(values)  # max() would pass over a nan


# --- PyTorch's varlen kernel ------------------------------------------------------------------------------------------
# Heads of queries and of keys, and their width.
HeadShape = tuple[int, int, int]


def verify_varlen_kernel(model_spec: ModelSpec, plan: Plan, *, device: torch.device) -> None:
    """Use PyTorch's kernel where the plan counts on it and it is proven here; all ranks do the same."""
    varlen.enable_flash(enabled=False)
    if model_spec.attention.name != varlen.VARLEN_ATTENTION or plan.choice.step.one_by_one:
        return
    dtype = getattr(torch, plan.precision.compute)

    def check_kernel() -> tuple[float, str | None]:
        largest = 0.0
        for heads, window in _kernel_cases(model_spec.hf_config, plan.choice.layout.tensor_parallel):
            error = kernel_error(varlen.flash_attention, heads, window=window, dtype=dtype, device=device)
            largest = max(largest, error)
            if not error <= KERNEL_TOLERANCE:
                return error, f"it is wrong on {device} for heads {heads}, window {window}: {error:.2g}"
        return largest, None

    error, problem = all_ranks_agree(check_kernel)
    if problem is not None:
        logger.warning(
            "Attention: falls back to one call of sdpa for each chat, with the same numbers, but slower and with more "
            "memory than planned: PyTorch's varlen kernel: %s", problem,
        )  # fmt: skip
        return
    varlen.enable_flash(enabled=True)
    logger.debug("Attention: on this GPU PyTorch's varlen kernel is within %.1g of a call for each chat", error)


def kernel_error(
    kernel: Callable[..., torch.Tensor],
    heads: HeadShape,
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """How far a kernel's outputs and gradients are from those of a call for each chat in fp32 on the CPU
    (`relative_difference`)."""
    generator = torch.Generator().manual_seed(1)
    queries, keys, width = heads
    shapes = [(sum(KERNEL_CHAT_LENGTHS), count, width) for count in (queries, keys, keys, queries)]
    *reference_inputs, weight = (torch.randn(shape, generator=generator).to(dtype).float() for shape in shapes)
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in reference_inputs]
    reference_inputs = [tensor.requires_grad_() for tensor in reference_inputs]
    scale = width**-0.5
    boundaries = torch.tensor([0, *itertools.accumulate(KERNEL_CHAT_LENGTHS)], dtype=torch.int32, device=device)
    output = kernel(*inputs, boundaries, max(KERNEL_CHAT_LENGTHS), scale=scale, window=window)
    query, key, value = reference_inputs
    reference_output = varlen.attention_per_chat(query, key, value, KERNEL_CHAT_LENGTHS, scale=scale, window=window)
    gradients = (
        torch.autograd.grad(output, inputs, weight.to(device, dtype)),
        torch.autograd.grad(reference_output, reference_inputs, weight),
    )
    tensors, references = (
        [tensor, *output_gradients]
        for tensor, output_gradients in zip((output, reference_output), gradients, strict=True)
    )
    return relative_difference(
        [tensor.detach().cpu().float() for tensor in tensors], [tensor.detach() for tensor in references]
    )


def _kernel_cases(hf_config: Any, tensor_parallel: int) -> list[tuple[HeadShape, int | None]]:
    """Of all layers, where their sizes differ."""
    if getattr(hf_config, "is_heterogeneous", False):
        layer_configs = [hf_config.per_layer_config[layer] for layer in range(hf_config.num_hidden_layers)]
        return sorted({case for layer in layer_configs for case in _kernel_cases(layer, tensor_parallel)}, key=str)
    queries = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // queries
    widths = {head_dim, getattr(hf_config, "global_head_dim", None) or head_dim}
    key_heads = getattr(hf_config, "num_key_value_heads", None) or queries
    key_head_counts = {key_heads, getattr(hf_config, "num_global_key_value_heads", None) or key_heads}
    window = getattr(hf_config, "sliding_window", None)
    windows = [None, *([min(window, LONGEST_WINDOW)] if isinstance(window, int) and window > 0 else [])]
    heads = {
        (max(1, queries // tensor_parallel), max(1, keys // tensor_parallel), width)
        for keys in key_head_counts
        for width in widths
    }
    return list(itertools.product(sorted(heads), windows))
