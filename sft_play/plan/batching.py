"""micro x accumulation x data-parallel ranks == effective batch, exactly, or a refusal with what would work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError

Fits = Callable[[int, int], bool]
"""Whether a micro-batch (sequences) with an accumulation (passes) fits the memory."""


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per GPU and pass, passes per step, ranks, their product, and how it was chosen."""

    micro_batch: int
    grad_accum: int
    ranks: int
    reason: str

    @property
    def effective_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.grad_accum * self.ranks


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def plan_batch(train: TrainConfig, *, ranks: int, micro_limit: int, fits: Fits) -> BatchPlan | None:
    """The batch arithmetic of a run, or None when no micro-batch that was left open fits.

    `micro_limit` is the largest micro-batch worth having (enough tokens to keep the GPU busy).

    Raises:
        ConfigError: the numbers that were given do not multiply to the effective batch.
    """
    per_rank = _per_rank(train, ranks)
    if train.batch_size != "auto":
        micro = train.batch_size
        return BatchPlan(micro, per_rank // micro, ranks, _given(train, ranks, micro, per_rank // micro))
    if train.grad_accum != "auto":
        micro = per_rank // train.grad_accum
        return BatchPlan(micro, train.grad_accum, ranks, _given(train, ranks, micro, train.grad_accum))
    return _largest(train.effective_batch_size, per_rank, ranks, micro_limit, fits)


def _largest(effective: int, per_rank: int, ranks: int, micro_limit: int, fits: Fits) -> BatchPlan | None:
    choices = divisors(per_rank)
    fitting = [micro for micro in choices if fits(micro, per_rank // micro)]
    if not fitting:
        return None
    worth = [micro for micro in fitting if micro <= micro_limit] or fitting[:1]
    micro = worth[-1]
    accum = per_rank // micro
    why = f"{fitting[-1]} fit" if fitting[-1] != choices[-1] else f"all {fitting[-1]} fit"
    if fitting[-1] > micro:
        why += f", {micro_limit} keep the device busy"
    reason = f"{why}, {micro} divides {per_rank}: micro {micro} x accum {accum} x {ranks} ranks = {effective}"
    return BatchPlan(micro, accum, ranks, reason)


def _given(train: TrainConfig, ranks: int, micro: int, accum: int) -> str:
    given = "train.batch_size" if train.batch_size != "auto" else "train.grad_accum"
    return f"{given} is given: micro {micro} x accum {accum} x {ranks} ranks = {train.effective_batch_size}"


def _per_rank(train: TrainConfig, ranks: int) -> int:
    """Sequences per rank and step; raises ConfigError where the numbers do not divide."""
    effective = train.effective_batch_size
    micro = train.batch_size if train.batch_size != "auto" else 1
    accum = train.grad_accum if train.grad_accum != "auto" else 1
    unit = micro * accum * ranks
    both_given = train.batch_size != "auto" and train.grad_accum != "auto"
    if (effective != unit) if both_given else effective % unit:
        raise ConfigError(_refusal(train, ranks, unit, both_given))
    return effective // ranks


def _refusal(train: TrainConfig, ranks: int, unit: int, both_given: bool) -> str:
    effective = train.effective_batch_size
    parts = [f"{ranks} {'rank' if ranks == 1 else 'ranks'}"]
    if train.grad_accum != "auto":
        parts.insert(0, f"train.grad_accum={train.grad_accum}")
    if train.batch_size != "auto":
        parts.insert(0, f"train.batch_size={train.batch_size}")
    product = " x ".join(parts)
    if both_given:
        choices = [f"train.effective_batch_size={unit}", "train.grad_accum=auto"]
        if effective % (ranks * int(train.batch_size)) == 0:
            choices[1] = f"train.grad_accum={effective // (ranks * int(train.batch_size))}"
        return f"train.effective_batch_size={effective} is not {product} = {unit}; use {choices[0]} or {choices[1]}"
    lower, upper = effective // unit * unit, -(-effective // unit) * unit
    nearest = f"{lower} or {upper}" if lower else f"{upper} or {2 * upper}"
    return f"train.effective_batch_size={effective} does not split over {product}; use {nearest}"
