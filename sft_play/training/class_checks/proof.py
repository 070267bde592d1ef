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
from sft_play.training.model import context_parallel, varlen
from sft_play.training.prepare.model_spec import ModelSpec
from sft_play.training.ranks import distributed

logger = logging.getLogger(__name__)

# Difference in fp32, over the size of what is compared, that counts as rounding: 6e-6 at most for llama, mistral,
# phi3, qwen2, qwen3 and gpt_oss, 1.1e-4 for qwen3_5, whose recurrence amplifies it (liger-kernel 0.8.5 in Triton's
# interpreter, benchmarks/LOG.md); a norm that is wrong by 1% is further off.
FP32_GAP = 1e-3
# How many times as far from fp32 as the plain code other code may be in 16 bits.
HALF_RATIO = 1.5
_ROWS, _LENGTH = 2, 23
# Tokens of the chats on which a kernel is tried: one alone, and some beyond a kernel's tiles of 64 and 128.
LENGTHS = (100, 1, 27, 256, 129)
# Longest window that is tried: shorter than most of the chats.
WINDOW = 48
# Relative error that counts as rounding in 16 bits, which give 0.004. A chat that sees another, or a window that is
# off by one, is off by 0.09 and more.
KERNEL_TOLERANCE = 0.02

Numbers = list[torch.Tensor]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Proof:
    """How far other code is from the plain code, over logits and gradients, the worst of them."""

    fp32: float
    """Relative difference in fp32."""
    half: float
    """Its error in the run's dtype over the plain code's own; 0 for a run in fp32."""

    @property
    def holds(self) -> bool:
        """Whether both are rounding (a figure that is not a number is none)."""
        return self.fp32 < FP32_GAP and self.half < HALF_RATIO

    @property
    def words(self) -> str:
        """The figures."""
        text = f"{self.fp32:.0e} in fp32"
        return f"{text}, {self.half:.2f} of the plain ones' own error in 16 bits" if self.half else text


def agreed(look: Callable[[], tuple[Found, str | None]]) -> tuple[Found | None, str | None]:
    """What `look` finds where it has no problem on any rank; else None and the problem. All ranks call it. What `look`
    raises is a problem too: a class can break at anything that is put into it."""
    found, problem = None, None
    try:
        found, problem = look()
    except Exception as error:
        problem = f"not proven: {type(error).__name__}: {one_line(str(error), limit=200)}"
    if distributed.any_rank(problem is not None):
        return None, problem or "another rank cannot"
    return found, None


def compared(exact: Numbers, half: Numbers, other: Numbers, other_half: Numbers) -> Proof:
    """The proof from the numbers of the plain code in fp32 and in the run's dtype, and those of the other code."""
    own, theirs = gap(half, exact), gap(other_half, exact)
    return Proof(gap(other, exact), theirs / own if own else 0.0)


def worst(proofs: Iterable[Proof]) -> Proof:
    """The larger of each figure."""
    return Proof(*(_largest(figures) for figures in zip(*((one.fp32, one.half) for one in proofs), strict=True)))


def numbers(model: Any, *, boundaries: bool = False) -> Numbers:
    """Logits and all gradients in fp32, as a model computes them in its dtype of two short rows, or of both one behind
    the other, told apart by their `boundaries`."""
    draw = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    ids = torch.randint(3, model.config.vocab_size, (_ROWS, _LENGTH), generator=draw).to(device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if boundaries:
        ends = torch.arange(0, _ROWS * _LENGTH + 1, _LENGTH, dtype=torch.int32, device=device)
        inputs = {
            "input_ids": ids.reshape(1, -1), "position_ids": torch.arange(_LENGTH, device=device).repeat(_ROWS)[None],
            "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": _LENGTH, "max_length_k": _LENGTH,
        }  # fmt: skip
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits.float().reshape(_ROWS, _LENGTH, -1)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = [parameter.grad.float().clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [logits.detach(), *gradients]


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model in a dtype: a copy, or itself in fp32."""
    return model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)


def gap(found: Numbers, exact: Numbers) -> float:
    """The largest difference of a tensor over its size, as norms; nan if any is."""
    return _largest(
        float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in zip(found, exact, strict=True)
    )


def attention_of(model: Any) -> str:
    """The attention of small models: the model's, but on whole rows where ranks share them."""
    name = str(model.config._attn_implementation)
    return "sdpa" if name == context_parallel.ULYSSES_ATTENTION else name


def _largest(figures: Iterable[float]) -> float:
    listed = list(figures)
    return math.nan if any(map(math.isnan, listed)) else max(listed)  # max() would pass over a nan


# --- PyTorch's varlen kernel ------------------------------------------------------------------------------------------
# Heads of queries and of keys, and their width.
Heads = tuple[int, int, int]


def trust_kernel(model_spec: ModelSpec, plan: Plan, *, device: torch.device) -> None:
    """Use PyTorch's kernel where the plan counts on it and it is proven here; all ranks do the same."""
    varlen.enable_flash(enabled=False)
    if model_spec.attention.name != varlen.VARLEN_ATTENTION or plan.choice.step.one_by_one:
        return
    dtype = getattr(torch, plan.precision.compute)

    def tried() -> tuple[float, str | None]:
        largest = 0.0
        for heads, window in _cases(model_spec.hf_config, plan.choice.layout.tensor_parallel):
            error = relative_error(varlen.flash_attention, heads, window=window, dtype=dtype, device=device)
            largest = max(largest, error)
            if not error <= KERNEL_TOLERANCE:
                return error, f"it is wrong on {device} for heads {heads}, window {window}: {error:.2g}"
        return largest, None

    error, problem = agreed(tried)
    if problem is not None:
        logger.warning(
            "Attention: falls back to one call of sdpa for each chat, with the same numbers, but slower and with more "
            "memory than planned: PyTorch's varlen kernel: %s", problem,
        )  # fmt: skip
        return
    varlen.enable_flash(enabled=True)
    logger.debug("Attention: on this GPU PyTorch's varlen kernel is within %.1g of a call for each chat", error)


def relative_error(
    kernel: Callable[..., torch.Tensor], heads: Heads, *, window: int | None, dtype: torch.dtype, device: torch.device
) -> float:
    """How far a kernel's outputs and gradients are from those of a call for each chat in fp32 on the CPU (`gap`)."""
    draw = torch.Generator().manual_seed(1)
    queries, keys, width = heads
    shapes = [(sum(LENGTHS), count, width) for count in (queries, keys, keys, queries)]
    *exact, weight = (torch.randn(shape, generator=draw).to(dtype).float() for shape in shapes)
    given = [one.to(device, dtype).requires_grad_() for one in exact]
    exact = [one.requires_grad_() for one in exact]
    scale = width**-0.5
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=device)
    found = kernel(*given, ends, max(LENGTHS), scale=scale, window=window)
    query, key, value = exact
    wanted = varlen.attention_per_chat(query, key, value, LENGTHS, scale=scale, window=window)
    gradients = torch.autograd.grad(found, given, weight.to(device, dtype)), torch.autograd.grad(wanted, exact, weight)
    ours, theirs = ([one, *more] for one, more in zip((found, wanted), gradients, strict=True))
    return gap([one.detach().cpu().float() for one in ours], [one.detach() for one in theirs])


def _cases(hf_config: Any, parts: int) -> list[tuple[Heads, int | None]]:
    """Of all layers, where their sizes differ."""
    if getattr(hf_config, "is_heterogeneous", False):
        layers = [hf_config.per_layer_config[layer] for layer in range(hf_config.num_hidden_layers)]
        return sorted({case for layer in layers for case in _cases(layer, parts)}, key=str)
    queries = hf_config.num_attention_heads
    own = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // queries
    widths = {own, getattr(hf_config, "global_head_dim", None) or own}
    grouped = getattr(hf_config, "num_key_value_heads", None) or queries
    groups = {grouped, getattr(hf_config, "num_global_key_value_heads", None) or grouped}
    window = getattr(hf_config, "sliding_window", None)
    windows = [None, *([min(window, WINDOW)] if isinstance(window, int) and window > 0 else [])]
    heads = {(max(1, queries // parts), max(1, keys // parts), width) for keys in groups for width in widths}
    return list(itertools.product(sorted(heads), windows))
