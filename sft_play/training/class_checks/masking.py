"""Which masks a class needs: do chats of a row stay apart, by a mask or by boundaries alone, and does padding need one?

Measured on a small model of the class on the CPU: some classes derive no mask from position ids (falcon, opt, bloom,
gpt-oss), some carry a state from token to token (mamba); some read the mask elsewhere (experts' balance loss).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sft_play.data.masks.token_row import IGNORED
from sft_play.errors import ConfigError
from sft_play.training.class_checks.small_model import (
    MOST_TRAINED,
    VOCABULARY,
    kind_of,
    longest_usual,
    on_small_model,
    passed,
    small_model,
)
from sft_play.training.model import varlen
from sft_play.training.prepare.experts import balance_coefficient

# Least difference that a chat's beginning must make to its end: in a model below it, no leak would show.
TELLING = 0.05
# Difference of logits over their spread that counts as rounding: of 151 classes of transformers 5.23, 94 differ by
# 2e-4 at most (93 of them by 2e-5), the others by 0.19 and more (fp32, 2026-11-21).
APART_TOLERANCE = 1e-3
# The same of logits and gradients without a mask for padding. See benchmarks/LOG.md, 2026-11-23, for the classes of
# transformers 5.23: what matters changes gradients by 4e-6 or more.
PADDING_TOLERANCE = 2e-6
# The same of logits and gradients with boundaries in place of a mask.
BOUNDARIES_TOLERANCE = 1e-4
# In bf16: how much further from fp32's numbers the batch without a mask may be than the one with its mask.
AS_ROUNDED = 2.0
# Distance from fp32 that bf16 always may have: two or three of its 8 bits, where both are almost exact.
_ROUNDED = 1e-2
# Tokens of two chats: longer than the small windows, so that windows and chunks cross the border.
_CHATS = (19, 23)
# Tokens of two rows: the second has more padding than the small windows are long.
_PADDED = (42, 19)
# Tokens of the chats of each row: some longer than the small windows, so that these begin inside them.
_PACKS = ((19, 23), (30,), (11, 9, 5))
_INSTEAD = "data.packing=none: rows of similar length then share a micro-batch (train.group_by_length)"


def require_packable(
    hf_config: Any, *, attention: str, longest: int | None = None, trust_remote_code: bool = False
) -> str:
    """A line that a model of this config keeps the chats of one row (of at most `longest` tokens) apart, with the
    measured difference; flash attention is measured as sdpa or eager. Raises ConfigError: it does not, or it cannot be
    measured."""
    kind = kind_of(hf_config)

    def measured_up_to(tokens: int | None) -> tuple[tuple[float, float] | None, str]:
        return on_small_model(
            hf_config, measure_apart, attention=attention, longest=tokens, trust_remote_code=trust_remote_code
        )

    found, problem = measured_up_to(longest)
    leak, seen = found or (0.0, 0.0)
    if found is not None and not seen >= TELLING:
        problem = f"a token hardly depends on those before it there, by {seen:.1g} of the spread"
    elif not math.isfinite(leak):
        problem = "a small model of its class computes numbers that are not finite"
    if problem:
        raise ConfigError(f"data.packing=best_fit: whether {kind} keeps the chats of a row apart cannot be measured "
                          f"({problem}); use {_INSTEAD}")  # fmt: skip
    measured = f"on a small model of its class the logits of a chat differ by {leak:.0e} of their spread"
    if leak < APART_TOLERANCE:
        return f"Packing: {kind} keeps the chats of a row apart ({measured}, alone, packed, or after another chat)"
    first = longest_usual(hf_config)
    shorter, _ = measured_up_to(first) if first and (longest is None or first < longest) else (None, "")
    keeps = f"model.max_seq_len={first}, up to which it does, or " if shorter and shorter[0] < APART_TOLERANCE else ""
    raise ConfigError(f"data.packing=best_fit: {kind} does not keep the chats of a row apart: {measured}; "
                      f"use {keeps}{_INSTEAD}")  # fmt: skip


def measure_apart(small: Any, *, attention: str, trust_remote_code: bool = False) -> tuple[float, float]:
    """How far the second chat's logits in a row of two are, over their spread, from those of the same chat alone or
    after another one, in one row or a padded batch; and what a leak looks like: the same where both are one chat. In
    fp32 on the CPU; no random state is changed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = small_model(small, attention, trust_remote_code)
        draw = torch.Generator().manual_seed(1)
        begin, length = _CHATS
        first, other, second = (
            torch.randint(3, VOCABULARY, (size,), generator=draw).numpy() for size in (begin, begin, length)
        )

        def logits(*packs: list[Any]) -> torch.Tensor:
            return passed(model, [_pack(pack) for pack in packs], trains=False).logits

        alone = logits([second])
        packed, changed = (logits([chat, second])[begin:] for chat in (first, other))
        one, another = (logits([np.concatenate([chat, second])])[begin:] for chat in (first, other))
        batch = logits([first, second], [second])[begin:]  # the second chat, behind the first and alone
    spread = float(alone.std()) or 1.0
    gaps = torch.cat([packed - changed, packed - alone, batch - torch.cat([alone, alone])])
    return float(gaps.abs().max()) / spread, float((one - another).abs().max()) / spread


def _pack(chats: list[Any]) -> dict[str, Any]:
    ids, lengths = np.concatenate(chats), np.array([len(chat) for chat in chats])
    labels = ids.copy()
    labels[np.cumsum(lengths) - lengths] = IGNORED
    return {"input_ids": ids, "labels": labels, "chat_lengths": lengths}


@dataclass(frozen=True)
class Mask:
    """Whether rows come with a mask, and why."""

    needed: bool
    reason: str


@dataclass(frozen=True)
class Difference:
    """What leaving out a mask changes in a model."""

    logits: float
    """Largest difference of a logit at a real place in fp32, over the logits' spread."""
    gradients: float
    """Distance of all gradients in fp32, over their length."""
    seen: float
    """What an influence looks like that should be none, in logits over their spread."""
    tolerance: float
    """How much of the first two is rounding."""
    half: float = 0.0
    """In bf16, by the larger of logits and gradients: distance from fp32 without a mask, beyond `AS_ROUNDED` times that
    with one; at most 0 where the mask makes nothing more exact."""

    @property
    def is_none(self) -> bool:
        """Whether it is no more than rounding; NaN is more."""
        return self.logits <= self.tolerance and self.gradients <= self.tolerance and self.half <= 0


def padding_of(hf_config: Any, *, attention: str, longest: int | None = None, trust_remote_code: bool = False) -> Mask:
    """Whether padded rows, of at most `longest` tokens, of a model of this config need their mask; what cannot be
    measured keeps it."""
    found = on_small_model(
        hf_config, measure_padding, trust_remote_code=trust_remote_code, most=MOST_TRAINED, longest=longest,
        attention=attention,
    )  # fmt: skip
    return _judged(
        kind_of(hf_config), *found, kept="padded rows keep their mask",
        freed="padded rows need no mask, as attention is causal and padding at the end",
    )  # fmt: skip


def boundaries_of(hf_config: Any, *, longest: int | None = None, trust_remote_code: bool = False) -> Mask:
    """Whether packs, of at most `longest` tokens, need a mask beside their boundaries (`varlen`); what cannot be
    measured keeps it."""
    found = on_small_model(
        hf_config, measure_boundaries, trust_remote_code=trust_remote_code, most=MOST_TRAINED, longest=longest
    )
    return _judged(
        kind_of(hf_config), *found, kept="chats of one row keep a mask between them",
        freed="chats of one row need no mask: they are told apart by their boundaries",
    )  # fmt: skip


def _judged(kind: str, found: Difference | None, problem: str, *, kept: str, freed: str) -> Mask:
    if found is None:
        return Mask(True, f"{kept}: what {kind} does without cannot be measured ({problem})")
    if not found.seen >= TELLING:
        return Mask(True, f"{kept}: in a small model of {kind}'s class nothing would show what they do without")
    if not found.is_none:
        return Mask(True, f"{kept}: without one a small model of {kind}'s class differs, logits by {found.logits:.1g} "
                          f"of their spread, gradients by {found.gradients:.1g} of their length")  # fmt: skip
    return Mask(False, f"{freed} (on a small model of {kind}'s class logits differ by {found.logits:.0e} of their "
                       f"spread, gradients by {found.gradients:.0e} of their length)")  # fmt: skip


def measure_padding(small: Any, *, attention: str, trust_remote_code: bool = False) -> Difference:
    """What the mask of two padded rows changes, on the CPU, with the experts' balance loss where TRL adds it."""
    with torch.random.fork_rng(devices=[]):
        model = small_model(small, attention, trust_remote_code)
        balance = {"output_router_logits": True} if balance_coefficient(model.config.get_text_config()) else {}
        draw, rows = np.random.default_rng(1), []
        for length in _PADDED:
            ids = draw.integers(4, VOCABULARY, size=length)
            rows.append({"input_ids": ids, "labels": np.where(np.arange(length) < length // 3, IGNORED, ids)})
        # another first token: what a row's end owes to its beginning
        changed = [{**row, "input_ids": np.concatenate([[3], row["input_ids"][1:]])} for row in rows]
        masked, plain = (passed(model, rows, masks=masks, **balance) for masks in (True, False))
        other = passed(model, changed, **balance)
        half = copy.deepcopy(model).to(torch.bfloat16)
        half_masked, half_plain = (passed(half, rows, masks=masks, **balance) for masks in (True, False))
    ends = torch.tensor([_PADDED[0] - 1, sum(_PADDED) - 1])  # the rows' last real places
    spread = float(masked.logits.std()) or 1.0
    return Difference(
        logits=float((masked.logits - plain.logits).abs().max()) / spread,
        gradients=_distance(plain.gradients, masked.gradients),
        seen=float((masked.logits - other.logits)[ends].abs().max()) / spread,
        tolerance=PADDING_TOLERANCE,
        half=max(
            _distance(getattr(half_plain, name), getattr(masked, name))
            - max(_ROUNDED, AS_ROUNDED * _distance(getattr(half_masked, name), getattr(masked, name)))
            for name in ("logits", "gradients")
        ),
    )


def measure_boundaries(small: Any, *, trust_remote_code: bool = False) -> Difference:
    """How the same chats differ as packs with sdpa and its mask, and one behind the other with `varlen`, in fp32 on the
    CPU; and padded rows of them, which evaluation has."""
    with torch.random.fork_rng(devices=[]):
        usual, own = (small_model(small, name, trust_remote_code) for name in ("sdpa", varlen.VARLEN_ATTENTION))
        draw = np.random.default_rng(2)
        chats = [[draw.integers(3, VOCABULARY, size=length) for length in lengths] for lengths in _PACKS]
        packs = [_pack(chats_of_row) for chats_of_row in chats]
        masked, apart = passed(usual, packs), passed(own, packs, flat=True)
        # each row as one chat: what a model computes that cannot tell them apart
        joined = [{**row, "chat_lengths": np.array([len(row["input_ids"])])} for row in packs]
        leaking = passed(own, joined, flat=True)
        own.train()  # raises ValueError for a class that drops attention probabilities
        passed(own, packs, flat=True)
        own.eval()
        alone = [{name: _pack([chat])[name] for name in ("input_ids", "labels")} for row in chats for chat in row]
        of_rows, of_own = passed(usual, alone), passed(own, alone, masks=False)
    spread = float(masked.logits.std()) or 1.0
    differences = torch.cat([masked.logits - apart.logits, of_rows.logits - of_own.logits])
    return Difference(
        logits=float(differences.abs().max()) / spread,
        gradients=_distance(apart.gradients, masked.gradients),
        seen=float((leaking.logits - apart.logits).abs().max()) / spread,
        tolerance=BOUNDARIES_TOLERANCE,
    )


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / two.norm().clamp(min=1e-30))
