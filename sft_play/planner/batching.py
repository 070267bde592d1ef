"""micro x accumulation x data-parallel ranks == effective batch, exactly, or an error that says what would work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per GPU and micro step, micro steps per optimizer step, data-parallel ranks, and their product."""

    micro_batch: int
    grad_accum: int
    ranks: int

    @property
    def effective_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.grad_accum * self.ranks

    @property
    def halved(self) -> BatchPlan | None:
        """The same step in micro-batches of half the rows, or the next fewer that divide it; None at one row."""
        smaller = [size for size in divisors(self.micro_batch) if 2 * size <= self.micro_batch]
        if not smaller:
            return None
        return replace(self, micro_batch=smaller[-1], grad_accum=self.micro_batch * self.grad_accum // smaller[-1])


def effective_batch(train: TrainConfig, *, ranks: int) -> int:
    """Sequences per optimizer step: train.effective_batch_size or, where both factors were given instead, their product
    with the data-parallel ranks, so that a config for one GPU works unchanged on more."""
    if not train.derives_effective_batch:
        return train.effective_batch_size
    return int(train.batch_size) * int(train.grad_accum) * ranks


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def batch_splits(train: TrainConfig, *, ranks: int, resumed_batch: BatchPlan | None = None) -> list[BatchPlan]:
    """Every split of the effective batch over `ranks` that the config leaves open, small micro-batches first;
    `resumed_batch` is the one that a resumed run keeps. Raises ConfigError where the numbers that were given do not
    multiply to it."""
    if resumed_batch is not None:
        if resumed_batch.ranks != ranks:
            raise ConfigError(
                f"the run is resumed with {_format_factors(resumed_batch)}, and in this layout {ranks} rank(s) have "
                "rows of their own"
            )
        return [resumed_batch]
    batch_size = effective_batch(train, ranks=ranks)
    if is_single_rank_batch(train) and batch_size % ranks == 0:
        rank_batch = batch_size // ranks
        size = max(size for size in divisors(rank_batch) if size <= int(train.batch_size))
        return [BatchPlan(size, rank_batch // size, ranks)]
    if is_single_rank_batch(train):
        fitting_ranks = ", ".join(str(rank_count) for rank_count in divisors(batch_size) if rank_count <= 2 * ranks)
        raise ConfigError(
            f"train.effective_batch_size={batch_size} does not split over {ranks} ranks (it does over "
            f"{fitting_ranks}); use "
            f"train.effective_batch_size={batch_size * ranks}"
        )
    if problem := batch_product_problem(train, ranks=ranks):
        raise ConfigError(problem)
    per_rank = batch_size // ranks
    if train.batch_size != "auto":
        micro_batches = [train.batch_size]
    elif train.grad_accum != "auto":
        micro_batches = [per_rank // train.grad_accum]
    else:
        micro_batches = divisors(per_rank)
    return [BatchPlan(size, per_rank // size, ranks) for size in micro_batches]


def is_single_rank_batch(train: TrainConfig) -> bool:
    """Whether all three numbers are given and agree on one rank: over several the effective batch is kept."""
    if "auto" in (train.batch_size, train.grad_accum):
        return False
    return (
        not train.derives_effective_batch
        and int(train.batch_size) * int(train.grad_accum) == train.effective_batch_size
    )


def format_batch_product(train: TrainConfig, batch: BatchPlan, *, is_resumed: bool = False) -> str:
    """The product, and which factors were given; `is_resumed`: a resumed run keeps it."""
    factors = _format_factors(batch)
    if is_resumed:
        return f"{factors} = {batch.effective_batch}: the effective batch of the run that is resumed"
    if train.derives_effective_batch:
        return f"effective batch {batch.effective_batch} = {factors}: train.effective_batch_size was not given"
    text = f"{factors} = {batch.effective_batch}"
    if changed := format_changed_batch(train, batch):
        return f"{text}: the effective batch that was given for one rank is kept, {changed}"
    batch_options = {"train.batch_size": train.batch_size, "train.grad_accum": train.grad_accum}
    given_options = [name for name, value in batch_options.items() if value != "auto"]
    return (
        f"{text} ({' and '.join(given_options)} {'are' if len(given_options) > 1 else 'is'} given)"
        if given_options
        else text
    )


def format_changed_batch(train: TrainConfig, batch: BatchPlan) -> str:
    """Which of the numbers that were given for one rank are others over several; empty where none is."""
    planned_values = {
        "batch_size": (train.batch_size, batch.micro_batch),
        "grad_accum": (train.grad_accum, batch.grad_accum),
    }
    changed = [f"train.{name}={was} becomes {now}" for name, (was, now) in planned_values.items() if was != now]
    return " and ".join(changed) if is_single_rank_batch(train) else ""


def _format_factors(batch: BatchPlan) -> str:
    return f"micro {batch.micro_batch} x accum {batch.grad_accum} x {batch.ranks} ranks"


def batch_product_problem(
    train: TrainConfig, *, ranks: int, option_texts: Mapping[str, str] | None = None
) -> str | None:
    """Why the numbers that are given do not multiply to the effective batch; None where they do. `option_texts`: words
    for a number that another file gives, by its key in the section train."""
    sizes = [train.batch_size, train.grad_accum]
    micro_batch, grad_accum = (1 if size == "auto" else size for size in sizes)
    # which it must be a multiple of
    effective, divisor = effective_batch(train, ranks=ranks), micro_batch * grad_accum * ranks
    both_given = "auto" not in sizes
    if (effective == divisor) if both_given else effective % divisor == 0:
        return None
    texts = {name: f"train.{name}={getattr(train, name)}" for name in ("batch_size", "grad_accum")}
    texts |= {"effective_batch_size": f"train.effective_batch_size={effective}", **(option_texts or {})}
    given_names = [name for name, size in zip(("batch_size", "grad_accum"), sizes, strict=True) if size != "auto"]
    product = " x ".join([*(texts[name] for name in given_names), f"{ranks} {'rank' if ranks == 1 else 'ranks'}"])
    if both_given:
        quotient, remainder = divmod(effective, ranks * micro_batch)
        alternative = f" or train.grad_accum={quotient}" if quotient and not remainder else ""
        return (
            f"{texts['effective_batch_size']} is not {product} = {divisor}; use "
            f"train.effective_batch_size={divisor}{alternative}"
        )
    # the nearest multiples below and above; below the smallest there is only above
    lower, upper = effective // divisor * divisor, -(-effective // divisor) * divisor
    nearest = f"{lower} or {upper}" if lower else f"{upper} or {2 * upper}"
    return f"{texts['effective_batch_size']} does not split over {product}; use {nearest}"
