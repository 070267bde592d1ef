"""micro x accumulation x data-parallel ranks == effective batch, exactly, or an error that says what would work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per GPU and pass, passes per step, data-parallel ranks, and their product."""

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
    if not train.effective_follows:
        return train.effective_batch_size
    return int(train.batch_size) * int(train.grad_accum) * ranks


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def splits(train: TrainConfig, *, ranks: int, fixed: BatchPlan | None = None) -> list[BatchPlan]:
    """Every split of the effective batch over `ranks` that the config leaves open, small micro-batches first; `fixed`
    is the one that a resumed run keeps. Raises ConfigError where the numbers that were given do not multiply to it."""
    if fixed is not None:
        if fixed.ranks != ranks:
            raise ConfigError(
                f"the run is resumed with {_product(fixed)}, and in this layout {ranks} rank(s) have rows of their own"
            )
        return [fixed]
    effective = effective_batch(train, ranks=ranks)
    if is_of_one_rank(train) and effective % ranks == 0:
        share = effective // ranks
        size = max(size for size in divisors(share) if size <= int(train.batch_size))
        return [BatchPlan(size, share // size, ranks)]
    if is_of_one_rank(train):
        fitting = ", ".join(str(number) for number in divisors(effective) if number <= 2 * ranks)
        raise ConfigError(
            f"train.effective_batch_size={effective} does not split over {ranks} ranks (it does over {fitting}); use "
            f"train.effective_batch_size={effective * ranks}"
        )
    if problem := product_problem(train, ranks=ranks):
        raise ConfigError(problem)
    per_rank = effective // ranks
    if train.batch_size != "auto":
        sizes = [train.batch_size]
    elif train.grad_accum != "auto":
        sizes = [per_rank // train.grad_accum]
    else:
        sizes = divisors(per_rank)
    return [BatchPlan(size, per_rank // size, ranks) for size in sizes]


def is_of_one_rank(train: TrainConfig) -> bool:
    """Whether all three numbers are given and agree on one rank: over several the effective batch is kept."""
    if "auto" in (train.batch_size, train.grad_accum):
        return False
    return not train.effective_follows and int(train.batch_size) * int(train.grad_accum) == train.effective_batch_size


def arithmetic(train: TrainConfig, batch: BatchPlan, *, is_fixed: bool = False) -> str:
    """The product, and which factors were given; `is_fixed`: a resumed run keeps it."""
    words = _product(batch)
    if is_fixed:
        return f"{words} = {batch.effective_batch}: the effective batch of the run that is resumed"
    if train.effective_follows:
        return f"effective batch {batch.effective_batch} = {words}: train.effective_batch_size was not given"
    product = f"{words} = {batch.effective_batch}"
    if changed := changed_words(train, batch):
        return f"{product}: the effective batch that was given for one rank is kept, {changed}"
    wished = {"train.batch_size": train.batch_size, "train.grad_accum": train.grad_accum}
    given = [name for name, value in wished.items() if value != "auto"]
    return f"{product} ({' and '.join(given)} {'are' if len(given) > 1 else 'is'} given)" if given else product


def changed_words(train: TrainConfig, batch: BatchPlan) -> str:
    """Which of the numbers that were given for one rank are others over several; empty where none is."""
    pairs = {
        "batch_size": (train.batch_size, batch.micro_batch),
        "grad_accum": (train.grad_accum, batch.grad_accum),
    }
    changed = [f"train.{name}={was} becomes {now}" for name, (was, now) in pairs.items() if was != now]
    return " and ".join(changed) if is_of_one_rank(train) else ""


def _product(batch: BatchPlan) -> str:
    return f"micro {batch.micro_batch} x accum {batch.grad_accum} x {batch.ranks} ranks"


def product_problem(train: TrainConfig, *, ranks: int, said: Mapping[str, str] | None = None) -> str | None:
    """Why the numbers that are given do not multiply to the effective batch; None where they do. `said`: words for a
    number that another file gives, by its key in the section train."""
    sizes = [train.batch_size, train.grad_accum]
    micro, accum = (1 if size == "auto" else size for size in sizes)
    effective, unit = effective_batch(train, ranks=ranks), micro * accum * ranks  # which it must be a multiple of
    both_given = "auto" not in sizes
    if (effective == unit) if both_given else effective % unit == 0:
        return None
    words = {name: f"train.{name}={getattr(train, name)}" for name in ("batch_size", "grad_accum")}
    words |= {"effective_batch_size": f"train.effective_batch_size={effective}", **(said or {})}
    given = [name for name, size in zip(("batch_size", "grad_accum"), sizes, strict=True) if size != "auto"]
    product = " x ".join([*(words[name] for name in given), f"{ranks} {'rank' if ranks == 1 else 'ranks'}"])
    if both_given:
        rest, left = divmod(effective, ranks * micro)
        other = f" or train.grad_accum={rest}" if rest and not left else ""
        return (
            f"{words['effective_batch_size']} is not {product} = {unit}; use train.effective_batch_size={unit}{other}"
        )
    # the nearest multiples below and above; below the smallest there is only above
    lower, upper = effective // unit * unit, -(-effective // unit) * unit
    near = f"{lower} or {upper}" if lower else f"{upper} or {2 * upper}"
    return f"{words['effective_batch_size']} does not split over {product}; use {near}"
