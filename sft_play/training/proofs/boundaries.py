"""Whether a model computes the same of chats that only boundaries tell apart (`varlen`) as of chats behind a mask.

Measured as in `packable`, on a small model of the class: the same chats as packs in rows with sdpa and its mask, and
one behind the other with `varlen`. Logits and gradients are compared, and logits of padded rows, which evaluation has.
Each chat is a call of its own here; where a GPU's kernel runs only the last call differs (`varlen_proof`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sft_play.data.masks.token_row import IGNORED
from sft_play.training.loop.collate import COUNTS, Collator
from sft_play.training.model import varlen
from sft_play.training.proofs.packable import MOST_TRAINED, TELLING, VOCABULARY, kind_of, on_small_model, small_model

PACKS = ((19, 23), (30,), (11, 9, 5))
"""Tokens of the chats of each row: some longer than the small windows, so that these begin inside them."""
TOLERANCE = 1e-4
"""Difference that counts as rounding: of logits over their spread, of gradients over their length."""


@dataclass(frozen=True)
class Difference:
    """What boundaries change against a mask, in fp32."""

    logits: float
    """Largest difference of a logit of packs, over the logits' spread."""
    gradients: float
    """Distance of all gradients of packs, over their length."""
    rows: float
    """Largest difference of a logit at a real place of padded rows, over the spread."""
    seen: float
    """What leaving out the boundaries would change: what a chat that sees another looks like."""

    @property
    def is_none(self) -> bool:
        """Whether it is no more than rounding; NaN is more."""
        return max(self.logits, self.gradients, self.rows) <= TOLERANCE and not np.isnan(
            [self.logits, self.gradients, self.rows]
        ).any()  # fmt: skip


@dataclass(frozen=True)
class Boundaries:
    """Whether boundaries are enough for packs, and why."""

    are_enough: bool
    reason: str


def boundaries_of(hf_config: Any, *, trust_remote_code: bool = False) -> Boundaries:
    """Whether packs of a model of this config need no mask, by measurement; what cannot be measured keeps it."""
    kind = kind_of(hf_config)
    found, problem = on_small_model(hf_config, measure, trust_remote_code=trust_remote_code, most=MOST_TRAINED)
    if found is None:
        return Boundaries(
            False, f"chats of one row keep a mask between them: what {kind} does without cannot be measured ({problem})"
        )
    logits, gradients = max(found.logits, found.rows), found.gradients
    if not found.is_none or not found.seen >= TELLING:
        return Boundaries(
            False,
            f"chats of one row keep a mask between them: without one a small model of {kind}'s class differs, "
            f"logits by {logits:.1g} of their spread, gradients by {gradients:.1g} of their length (without "
            f"any, logits by {found.seen:.1g})",
        )
    return Boundaries(
        True,
        f"chats of one row need no mask: they are told apart by their boundaries (on a small model of {kind}'s class "
        f"logits differ by {logits:.0e} of their spread, gradients by {gradients:.0e} of their length)",
    )


def measure(small: Any, *, trust_remote_code: bool = False) -> Difference:
    """How the two differ on the same chats, in fp32 on the CPU; no random state is changed."""
    with torch.random.fork_rng(devices=[]):
        usual, own = (small_model(small, name, trust_remote_code) for name in ("sdpa", varlen.ATTENTION))
        packs = _packs()
        masked, apart = _pass(usual, packs, flat=False), _pass(own, packs, flat=True)
        # each row as one chat: what a model computes that cannot tell them apart
        joined = [{**row, "chat_lengths": np.array([len(row["input_ids"])])} for row in packs]
        leaking = _pass(own, joined, flat=True)
        alone = [_chat(row, place) for row in packs for place in range(len(row["chat_lengths"]))]
        own.train()  # raises ValueError for a class that drops attention probabilities
        _pass(own, packs, flat=True)
        own.eval()
        rows = [_pass(model, alone, flat=False, masks=model is usual) for model in (usual, own)]
    spread = float(masked[0].std()) or 1.0
    return Difference(
        logits=float((masked[0] - apart[0]).abs().max()) / spread,
        gradients=float((masked[1] - apart[1]).norm() / masked[1].norm().clamp(min=1e-30)),
        rows=float((rows[0][0] - rows[1][0]).abs().max()) / spread,
        seen=float((leaking[0] - apart[0]).abs().max()) / spread,
    )


def _packs() -> list[dict[str, Any]]:
    draw = np.random.default_rng(2)
    packs = []
    for lengths in PACKS:
        ids = draw.integers(3, VOCABULARY, size=sum(lengths))
        labels = ids.copy()
        labels[np.cumsum(lengths) - lengths] = IGNORED  # no chat's first token is predicted from the chat before
        packs.append({"input_ids": ids, "labels": labels, "chat_lengths": np.array(lengths)})
    return packs


def _chat(row: dict[str, Any], place: int) -> dict[str, Any]:
    end = int(row["chat_lengths"][: place + 1].sum())
    own = slice(end - int(row["chat_lengths"][place]), end)
    return {name: row[name][own] for name in ("input_ids", "labels")}


def _pass(
    model: Any, rows: list[dict[str, Any]], *, flat: bool, masks: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all real places [tokens, words], and all gradients, of a forward and backward pass as in training."""
    batch = Collator(pad_id=0, flat=flat, masks=masks, tells_lengths=flat)(rows)
    inputs = {name: value for name, value in batch.items() if name not in COUNTS}
    model.zero_grad(set_to_none=True)
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    lengths = [len(row["input_ids"]) for row in rows]
    packed = "chat_lengths" in rows[0] and flat
    real = output.logits[0] if packed else torch.cat([output.logits[n, :length] for n, length in enumerate(lengths)])
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return real.detach().float(), torch.cat(gradients).float()
