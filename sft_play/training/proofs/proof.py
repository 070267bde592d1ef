"""How far other code for a model's class is from the plain code, by logits and gradients of a small model.

In fp32 both have to agree; in 16 bits the other code must not be further from fp32 than the plain one is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.training.model import context_parallel, varlen

FP32_GAP = 1e-3
"""Difference in fp32, over the size of what is compared, that counts as rounding: 6e-6 at most for llama, mistral,
phi3, qwen2, qwen3 and gpt_oss, 1.1e-4 for qwen3_5, whose recurrence amplifies it (liger-kernel 0.8.5 in Triton's
interpreter, benchmarks/LOG.md); a norm that is wrong by 1% is further off."""
HALF_RATIO = 1.5
"""How many times as far from fp32 as the plain code other code may be in 16 bits."""
_ROWS, _LENGTH = 2, 23

Numbers = list[torch.Tensor]


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


def compared(exact: Numbers, half: Numbers, other: Numbers, other_half: Numbers) -> Proof:
    """The proof from the numbers of the plain code in fp32 and in the run's dtype, and those of the other code."""
    own, theirs = gap(half, exact), gap(other_half, exact)
    return Proof(gap(other, exact), theirs / own if own else 0.0)


def worst(proofs: Iterable[Proof]) -> Proof:
    """The larger of each figure."""
    return Proof(*(_largest(figures) for figures in zip(*((one.fp32, one.half) for one in proofs), strict=True)))


def numbers(model: Any, *, boundaries: bool = False) -> Numbers:
    """Logits and all gradients in fp32, as a model computes them in its dtype of two short rows.

    Args:
        boundaries: the rows lie one behind the other, told apart by their boundaries (`varlen`).
    """
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
    """The model in a dtype: a copy, or itself where it has that one already."""
    return model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)


def gap(found: Numbers, exact: Numbers) -> float:
    """The largest difference of a tensor over its size, as norms; nan if any is."""
    return _largest(
        float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in zip(found, exact, strict=True)
    )


def attention_of(model: Any) -> str:
    """The attention of small models: the model's, but on whole rows where ranks share them."""
    name = str(model.config._attn_implementation)
    return "sdpa" if name == context_parallel.ATTENTION else name


def has_boundaries(attention: str) -> bool:
    """Whether rows of the run come with boundaries under this attention."""
    return attention == varlen.ATTENTION


def _largest(figures: Iterable[float]) -> float:
    listed = list(figures)
    return math.nan if any(map(math.isnan, listed)) else max(listed)  # max() would pass over a nan
