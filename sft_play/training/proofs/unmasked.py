"""Whether padding at the end of rows needs an attention mask: measured on a small model of the class.

Attention that is causal never sees it. Some classes read the mask elsewhere: in the balance loss of experts, in a state
that goes through the padding, in a bias of positions. As in `packable`, no list of names decides: the same batch runs
with its mask and without, in fp32 and bf16, and what counts is the same in both: logits at real places, and gradients.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sft_play.data.masks.token_row import IGNORED
from sft_play.training.loop.collate import COUNTS, Collator
from sft_play.training.prepare.experts import balance_coefficient
from sft_play.training.proofs.packable import MOST_TRAINED, TELLING, VOCABULARY, kind_of, on_small_model, small_model

LENGTHS = (42, 19)
"""Tokens of the two rows of the batch: the second has more padding than the small windows are long."""
TOLERANCE = 2e-6
"""Difference that counts as rounding in fp32: of logits over their spread, of gradients over their length. See
benchmarks/LOG.md, 2026-11-23, for the classes of transformers 5.23: what matters changes gradients by 4e-6 or more."""
AS_ROUNDED = 2.0
"""In bf16: how much further from fp32's numbers the batch without a mask may be than the one with its mask."""
_ROUNDED = 1e-2
"""Distance from fp32 that bf16 always may have: two or three of its 8 bits, where both are almost exact."""


@dataclass(frozen=True)
class Difference:
    """What leaving out the mask changes, as shares: root mean squares of differences over those of the values."""

    logits: float
    """Largest difference of a logit at a real place in fp32, over the logits' spread."""
    gradients: float
    """In fp32."""
    half: float
    """In bf16, by the larger of logits and gradients: distance from fp32 without a mask, beyond `AS_ROUNDED` times that
    with one; at most 0 where the mask makes nothing more exact."""
    seen: float
    """What the first token of a row changes at its end, over the logits' spread: what an influence looks like."""

    @property
    def is_none(self) -> bool:
        """Whether it is no more than rounding; NaN is more."""
        return max(self.logits, self.gradients) <= TOLERANCE and self.half <= 0


@dataclass(frozen=True)
class Padding:
    """Whether padded rows come with a mask, and why."""

    masks: bool
    reason: str


def padding_of(hf_config: Any, *, attention: str, trust_remote_code: bool = False) -> Padding:
    """Whether rows of a model of this config need their mask, by measurement; what cannot be measured keeps it.

    Args:
        attention: the attention implementation by its name in transformers. Flash attention is measured as sdpa or
            eager.
    """
    kind = kind_of(hf_config)
    found, problem = on_small_model(
        hf_config, measure, trust_remote_code=trust_remote_code, most=MOST_TRAINED, attention=attention
    )
    if found is None:
        return Padding(True, f"padded rows keep their mask: what {kind} does without cannot be measured ({problem})")
    if not found.seen >= TELLING:
        return Padding(
            True,
            f"padded rows keep their mask: in a small model of {kind}'s class a token hardly depends on those before "
            f"it (by {found.seen:.1g} of the spread), so that nothing would show",
        )
    if not found.is_none:
        return Padding(
            True,
            f"padded rows keep their mask: without it a small model of {kind}'s class differs, logits by "
            f"{found.logits:.1g} of their spread, gradients by {found.gradients:.1g} of their length",
        )
    return Padding(
        False,
        f"padded rows need no mask, as attention is causal and padding at the end (on a small model of {kind}'s class "
        f"logits differ by {found.logits:.0e} of their spread, gradients by {found.gradients:.0e} of their length)",
    )


def measure(small: Any, *, attention: str, trust_remote_code: bool = False) -> Difference:
    """What the mask of two rows changes, on the CPU; no random state is changed."""
    with torch.random.fork_rng(devices=[]):
        model = small_model(small, attention, trust_remote_code)
        rows = _rows()
        masked, plain = (_pass(model, rows, masks=masks) for masks in (True, False))
        # another first token: what a row's end owes to its beginning
        changed = [{**row, "input_ids": np.concatenate([[3], row["input_ids"][1:]])} for row in rows]
        other = _pass(model, changed, masks=True)
        spread = float(masked.logits.std()) or 1.0
        half = copy.deepcopy(model).to(torch.bfloat16)
        half_masked, half_plain = (_pass(half, rows, masks=masks) for masks in (True, False))
    ends = torch.tensor([LENGTHS[0] - 1, sum(LENGTHS) - 1])  # the rows' last real places
    return Difference(
        logits=float((masked.logits - plain.logits).abs().max()) / spread,
        gradients=_apart(plain.gradients, masked.gradients),
        half=max(
            _apart(getattr(half_plain, name), getattr(masked, name))
            - max(_ROUNDED, AS_ROUNDED * _apart(getattr(half_masked, name), getattr(masked, name)))
            for name in ("logits", "gradients")
        ),
        seen=float((masked.logits - other.logits)[ends].abs().max()) / spread,
    )


@dataclass(frozen=True)
class _Pass:
    logits: torch.Tensor
    """Of the real places, [tokens, words]."""
    gradients: torch.Tensor
    """Of all weights, one after the other."""


def _rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    rows = []
    for length in LENGTHS:
        ids = draw.integers(4, VOCABULARY, size=length)
        rows.append({"input_ids": ids, "labels": np.where(np.arange(length) < length // 3, IGNORED, ids)})
    return rows


def _pass(model: Any, rows: list[dict[str, Any]], *, masks: bool) -> _Pass:
    """A forward and backward pass as in training, with the experts' balance loss where TRL adds it."""
    batch = Collator(pad_id=0, masks=masks)(rows)
    inputs = {name: value for name, value in batch.items() if name not in COUNTS}
    if balance_coefficient(model.config.get_text_config()):
        inputs["output_router_logits"] = True
    model.zero_grad(set_to_none=True)
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    real = torch.cat([output.logits[place, :length] for place, length in enumerate(LENGTHS)])
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return _Pass(real.detach().float(), torch.cat(gradients).float())


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The distance of two vectors, over the length of the second."""
    return float((one - two).norm() / two.norm().clamp(min=1e-30))
