"""Whether PyTorch's varlen kernel computes on the run's own GPU what a call for each chat does.

Which GPUs and versions the kernel is exact on is not left to lists: before a run relies on it, it is compared on random
numbers with the model's heads, dtype and window, forwards and backwards. Where it raises or differs each chat is a call
of its own: the same numbers, slower.

Shape letters: T tokens of all chats, H heads, G heads of keys, D width of a head.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.log import one_line
from sft_play.planner.plan import Plan
from sft_play.training.model import varlen
from sft_play.training.prepare.model_spec import ModelSpec
from sft_play.training.ranks import distributed

logger = logging.getLogger(__name__)

LENGTHS = (100, 1, 27, 256, 129)
"""Tokens of the chats: one alone, and some beyond a kernel's tiles of 64 and 128."""
WINDOW = 48
"""Longest window that is tried: shorter than most of the chats."""
TOLERANCE = 0.02
"""Relative error that counts as rounding in 16 bits, which give 0.004. A chat that sees another, or a window that is
off by one, is off by 0.1 and more."""


@dataclass(frozen=True, order=True)
class Heads:
    """Heads of queries and of keys, and their width."""

    queries: int
    keys: int
    width: int


def trust_kernel(model_spec: ModelSpec, plan: Plan, *, device: torch.device) -> None:
    """Use PyTorch's kernel from here on where the plan counts on it and it is proven on this device; else each chat is
    a call of its own. All ranks call it, and do the same."""
    varlen.use_flash(used=False)
    if model_spec.attention.name != varlen.ATTENTION or plan.choice.step.one_by_one:
        return
    dtype = getattr(torch, plan.precision.compute)
    worst, problem = 0.0, varlen.why_not()
    try:
        for heads, window in () if problem else _cases(model_spec.hf_config, plan.choice.layout.tensor_parallel):
            worst = max(worst, found := relative_error(varlen.flash, heads, window=window, dtype=dtype, device=device))
            if not found <= TOLERANCE:
                problem = f"PyTorch's varlen kernel is wrong on {device} for {heads}, window {window}: {found:.2g}"
                break
    except Exception as raised:  # a kernel that this GPU does not have, in the words of its library
        problem = f"PyTorch's varlen kernel raises {type(raised).__name__}: {one_line(str(raised), limit=200)}"
    if distributed.any_rank(problem is not None):
        logger.warning(
            "Attention: falls back to one call of sdpa for each chat, with the same numbers, but slower and with more "
            "memory than planned: %s",
            problem or "another rank cannot",
        )
        return
    varlen.use_flash(used=True)
    logger.info("Attention: on this GPU PyTorch's varlen kernel is within %.1g of a call for each chat", worst)


def relative_error(
    kernel: Callable[..., torch.Tensor], heads: Heads, *, window: int | None, dtype: torch.dtype, device: torch.device
) -> float:
    """How far a kernel (`varlen.kernel`) is from a call for each chat in fp32 on the CPU: the largest 2-norm of an
    output's or gradient's difference in one chat, over that of its values; nan where any is. No random state changes.
    """
    draw = torch.Generator().manual_seed(1)
    shapes = [(sum(LENGTHS), count, heads.width) for count in (heads.queries, heads.keys, heads.keys, heads.queries)]
    *exact, weight = (torch.randn(shape, generator=draw).to(dtype).float() for shape in shapes)
    given = [one.to(device, dtype).requires_grad_() for one in exact]
    exact = [one.requires_grad_() for one in exact]
    scale = heads.width**-0.5
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=device)
    found = kernel(*given, ends, max(LENGTHS), scale=scale, window=window)
    query, key, value = exact
    wanted = varlen.one_by_one(query, key, value, LENGTHS, scale=scale, window=window)
    pairs = [
        (found, wanted),
        *zip(
            torch.autograd.grad(found, given, weight.to(device, dtype)),
            torch.autograd.grad(wanted, exact, weight),
            strict=True,
        ),
    ]
    return float(torch.stack([_apart(one.detach().cpu().float(), other.detach()) for one, other in pairs]).amax())


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The largest relative difference of a chat [T, H, D]; one whose values are nearly 0 is measured by the others'."""
    least = wanted.square().mean() / 10
    parts = zip((found - wanted).split(LENGTHS), wanted.split(LENGTHS), strict=True)
    return torch.stack([gap.square().mean() / one.square().mean().clamp(min=least) for gap, one in parts]).amax().sqrt()


def _cases(hf_config: Any, parts: int) -> list[tuple[Heads, int | None]]:
    """The heads of a model on one of `parts` tensor-parallel ranks, with and without the window that it has."""
    queries = hf_config.num_attention_heads
    own = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // queries
    widths = {own, getattr(hf_config, "global_head_dim", None) or own}
    grouped = getattr(hf_config, "num_key_value_heads", None) or queries
    groups = {grouped, getattr(hf_config, "num_global_key_value_heads", None) or grouped}
    window = getattr(hf_config, "sliding_window", None)
    windows = [None, *([min(window, WINDOW)] if isinstance(window, int) and window > 0 else [])]
    heads = {Heads(max(1, queries // parts), max(1, keys // parts), width) for keys in groups for width in widths}
    return list(itertools.product(sorted(heads), windows))
