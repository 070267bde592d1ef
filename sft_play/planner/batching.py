"""micro x accumulation x data-parallel ranks == effective batch, exactly, or an error that says
what would work; and the rows of a step cut into micro-batches.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per GPU and micro step, micro steps per optimizer step, data-parallel ranks, and
    their product."""

    micro_batch: int
    grad_accum: int
    ranks: int

    @property
    def effective_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.grad_accum * self.ranks

    @property
    def halved(self) -> BatchPlan | None:
        """The same step in micro-batches of half the rows, or the next fewer that divide it; None
        at one row."""
        smaller = [size for size in divisors(self.micro_batch) if 2 * size <= self.micro_batch]
        if not smaller:
            return None
        return replace(
            self,
            micro_batch=smaller[-1],
            grad_accum=self.micro_batch * self.grad_accum // smaller[-1],
        )


def effective_batch(train: TrainConfig, *, ranks: int) -> int:
    """Sequences per optimizer step: train.effective_batch_size or, where both factors were given
    instead, their product with the data-parallel ranks, so that a config for one GPU works
    unchanged on more."""
    if not train.derives_effective_batch:
        return train.effective_batch_size
    return int(train.batch_size) * int(train.grad_accum) * ranks


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def batch_splits(
    train: TrainConfig, *, ranks: int, resumed_batch: BatchPlan | None = None
) -> list[BatchPlan]:
    """Every split of the effective batch over `ranks` that the config leaves open, small
    micro-batches first; `resumed_batch` is the one that a resumed run keeps. Raises ConfigError
    where the numbers that were given do not multiply to it."""
    if resumed_batch is not None:
        if resumed_batch.ranks != ranks:
            raise ConfigError(
                f"the run is resumed with {_format_factors(resumed_batch)}, and in this layout"
                f" {ranks} rank(s) have rows of their own"
            )
        return [resumed_batch]
    batch_size = effective_batch(train, ranks=ranks)
    if is_single_rank_batch(train) and batch_size % ranks == 0:
        rank_batch = batch_size // ranks
        size = max(size for size in divisors(rank_batch) if size <= int(train.batch_size))
        return [BatchPlan(size, rank_batch // size, ranks)]
    if is_single_rank_batch(train):
        fitting_ranks = ", ".join(
            str(rank_count) for rank_count in divisors(batch_size) if rank_count <= 2 * ranks
        )
        raise ConfigError(
            f"train.effective_batch_size={batch_size} does not split over {ranks} ranks (it does"
            f" over {fitting_ranks}); use train.effective_batch_size={batch_size * ranks}"
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
    """True if all three numbers are given and agree on one rank: over several the effective batch
    is kept."""
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
        return (
            f"{factors} = {batch.effective_batch}: the effective batch of the run that is resumed"
        )
    if train.derives_effective_batch:
        return (
            f"effective batch {batch.effective_batch} = {factors}: train.effective_batch_size was"
            " not given"
        )
    text = f"{factors} = {batch.effective_batch}"
    if changed := format_changed_batch(train, batch):
        return f"{text}: the effective batch that was given for one rank is kept, {changed}"
    batch_options = {"train.batch_size": train.batch_size, "train.grad_accum": train.grad_accum}
    given_options = [name for name, value in batch_options.items() if value != "auto"]
    verb = "are" if len(given_options) > 1 else "is"
    return text + f" ({' and '.join(given_options)} {verb} given)" * bool(given_options)


def format_changed_batch(train: TrainConfig, batch: BatchPlan) -> str:
    """Which of the numbers that were given for one rank are others over several; empty where none
    is."""
    planned_values = {
        "batch_size": (train.batch_size, batch.micro_batch),
        "grad_accum": (train.grad_accum, batch.grad_accum),
    }
    changed = [
        f"train.{name}={was} becomes {now}"
        for name, (was, now) in planned_values.items()
        if was != now
    ]
    return " and ".join(changed) if is_single_rank_batch(train) else ""


def _format_factors(batch: BatchPlan) -> str:
    return f"micro {batch.micro_batch} x accum {batch.grad_accum} x {batch.ranks} ranks"


def batch_product_problem(
    train: TrainConfig, *, ranks: int, option_texts: Mapping[str, str] | None = None
) -> str | None:
    """Why the numbers that are given do not multiply to the effective batch; None where they do.
    `option_texts`: words for a number that another file gives, by its key in the section train."""
    sizes = [train.batch_size, train.grad_accum]
    micro_batch, grad_accum = (1 if size == "auto" else size for size in sizes)
    # which it must be a multiple of
    effective, divisor = effective_batch(train, ranks=ranks), micro_batch * grad_accum * ranks
    both_given = "auto" not in sizes
    if (effective == divisor) if both_given else effective % divisor == 0:
        return None
    texts = {name: f"train.{name}={getattr(train, name)}" for name in ("batch_size", "grad_accum")}
    texts |= {
        "effective_batch_size": f"train.effective_batch_size={effective}",
        **(option_texts or {}),
    }
    given_names = [
        name
        for name, size in zip(("batch_size", "grad_accum"), sizes, strict=True)
        if size != "auto"
    ]
    product = " x ".join(
        [*(texts[name] for name in given_names), f"{ranks} {'rank' if ranks == 1 else 'ranks'}"]
    )
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


# --------------------------------------------------------------------------------------------------
# The rows of an optimizer step, cut into micro-batches by tokens instead of by number, and the
# lengths of a run's rows as far as a plan needs them.
#
# A step's rows are fixed by the order of the epoch. How they are divided over micro steps and ranks
# changes neither loss nor gradients, but the work: a micro step costs its padded tokens (rows times
# the longest of them where rows are padded, the sum of their lengths where they are not) and a
# fixed part for starting kernels and reading weights. No micro-batch has more padded tokens than
# the plan has memory for.
#
# Lengths are in tokens, sorted, the longest first. Nothing here imports torch or numpy: the plan
# uses it too.

# Positions, at most, at which the next cut of a step is tried.
_MAX_CUT_POINTS = 512

# Positions of rows by micro step and rank: `[m][r]` is the micro-batch of rank r in micro step m,
# empty where it has no row.
RowAssignment = list[list[list[int]]]


@dataclass(frozen=True)
class MicroBatches:
    """How the rows of a step become micro-batches, in every step alike."""

    # Rows of a micro-batch if all were of full length.
    rows: int
    # Padded tokens of a micro-batch at most; None: every micro-batch has `rows` rows, however
    # short.
    tokens: int | None = None
    # What starting one more micro step costs, in padded tokens.
    overhead: int = 0
    # Whether the rows of a micro-batch are padded to the longest; else they are joined.
    padded: bool = True
    # A step is one micro step: it was planned without gradients that are kept between several.
    single: bool = False

    def resized(self, rows: int) -> MicroBatches:
        """The same with another number of rows of full length in a micro-batch, and the tokens that
        follow from it."""
        tokens = None if self.tokens is None else self.tokens * rows // self.rows
        return dataclasses.replace(self, rows=rows, tokens=tokens, single=False)

    def assign_rows(self, lengths: Sequence[int], *, ranks: int = 1) -> RowAssignment:
        """The micro-batches of a step's rows (their lengths, the longest first), the same number
        for each of `ranks`."""
        if self.tokens is None or (self.padded and self.single):
            # in their order; those of the last micro step are spread evenly over the ranks
            count, step = len(lengths), self.rows * ranks
            return [
                _spread_rows(first, min(count, first + step), ranks)
                for first in range(0, count, step)
            ]
        if self.padded:
            return assign_padded(
                lengths, max_tokens=self.tokens, overhead_tokens=self.overhead, ranks=ranks
            )
        return assign_joined(lengths, max_tokens=self.tokens, ranks=ranks)

    def max_micro_steps(self, rows: int) -> int:
        """The most micro steps that a rank needs for a step in which it has `rows` rows of full
        length at most."""
        is_cut_by_tokens = self.tokens is not None and self.padded and not self.single
        return rows if is_cut_by_tokens else -(-rows // self.rows)


def assign_padded(
    lengths: Sequence[int], *, max_tokens: int, overhead_tokens: int, ranks: int
) -> RowAssignment:
    """Divide rows, the longest first, into micro steps with the fewest padded tokens, counting
    `overhead_tokens` more for each micro step.

    Rows of a micro step are neighbours, so their lengths are close; a row longer than `max_tokens`
    is a micro-batch of its own. The best division of the first n rows extends a best division of
    fewer rows; of very many rows only some positions are tried as its end.
    """
    count = len(lengths)
    # lowest_cost[n]: of the n longest rows; begins[n]: where its last micro step begins
    lowest_cost = [0.0] + [math.inf] * count
    begins = [0] * (count + 1)
    stride = -(-count // _MAX_CUT_POINTS)
    for first in range(count):
        if lowest_cost[first] == math.inf:
            continue
        longest = lengths[first]  # of the micro step that begins here: rows are sorted
        limit = min(count, first + max(1, max_tokens // longest) * ranks)
        for last in (*range(first + stride, limit, stride), limit):
            cost = lowest_cost[first] + overhead_tokens + -(-(last - first) // ranks) * longest
            if cost < lowest_cost[last]:
                lowest_cost[last], begins[last] = cost, first
    micro_steps = []
    last = count  # back from the end along `begins`
    while last:
        micro_steps.append(_spread_rows(begins[last], last, ranks))
        last = begins[last]
    return micro_steps[::-1]


def assign_joined(lengths: Sequence[int], *, max_tokens: int, ranks: int) -> RowAssignment:
    """Divide rows without padding into as few micro steps as hold them, with about as many tokens
    in each micro-batch: the longest row left goes into the emptiest one. If no row is longer than 1
    / n of `max_tokens`, m micro steps hold any n x m rows of a rank."""
    count = len(lengths)
    micro_step_count = max(1, -(-sum(lengths) // (max_tokens * ranks)))  # fewer cannot hold them
    while True:
        bins = [(0, bin_index) for bin_index in range(micro_step_count * ranks)]
        assigned: list[list[int]] = [[] for _ in bins]
        for row, length in enumerate(lengths):
            bin_tokens, bin_index = bins[0]
            heapq.heapreplace(bins, (bin_tokens + length, bin_index))
            assigned[bin_index].append(row)
        # one row to a micro-batch is the end, even where a row is longer than `max_tokens`
        if max(bins)[0] <= max_tokens or micro_step_count * ranks >= count:
            break
        micro_step_count += 1
    # micro-batches of about the same length run at the same time, so ranks wait less for each other
    assigned.sort(key=lambda rows: -sum(lengths[row] for row in rows))
    return [assigned[first : first + ranks] for first in range(0, len(assigned), ranks)]


def _spread_rows(first: int, last: int, ranks: int) -> list[list[int]]:
    """The rows of one micro step, in their order over the ranks, as evenly as they come out."""
    ends = [first + (last - first) * (rank + 1) // ranks for rank in range(ranks)]
    return [list(range(begin, end)) for begin, end in zip([first, *ends[:-1]], ends, strict=True)]


# --- the lengths of a run's rows: counted from the tokens themselves, never estimated -------------
# Lengths that are kept at most, to draw steps from.
MAX_SAMPLED_LENGTHS = 1024
# Steps that are drawn to see what an average one takes.
_SAMPLED_STEPS = 4
# Rows of a drawn step at most: larger ones are taken to be like it.
_MAX_SAMPLED_ROWS = 512


@dataclass(frozen=True)
class AverageMicroSteps:
    """What one rank computes in an average step: micro steps, padded tokens of one, and the length
    of the row that a token is in, on average; `tokens` without padding over all ranks; `rows` of
    one micro step."""

    count: float
    padded_tokens: float
    row_length: float
    tokens: float
    rows: float


@dataclass(frozen=True)
class ImageLoad:
    """Pictures of the training rows: how many rows have some, their number and the tokens that they
    take; and of every row, evaluated ones too, the largest picture and the most that one row has.
    """

    rows: int
    pictures: int
    tokens: int
    # The picture that takes the most tokens: pixels of its file, and those tokens.
    width: int
    height: int
    picture_tokens: int
    row_pictures: int
    # The largest share of a row's tokens that its pictures take.
    token_share: float


@dataclass(frozen=True)
class RowTokens:
    """Tokens of the training rows: mean, 95th percentile and longest, all after `limit`
    (model.max_seq_len) has cut or left out longer rows; `held_out` is the longest row that is
    evaluated, 0 without any."""

    mean: float
    p95: int
    longest: int
    rows: int
    limit: int
    held_out: int = 0
    sample: tuple[int, ...] = ()
    # Training rows that the limit cuts; None where that was not counted.
    cut: int | None = None
    # Rows that were tokenised, where the others are taken to be like them; 0: all were.
    sampled_rows: int = 0
    # What the rows show; None where they are text.
    images: ImageLoad | None = None

    @property
    def longest_row(self) -> int:
        """The longest row that is trained on or evaluated."""
        return max(self.longest, self.held_out)

    def limited_to(self, limit: int) -> RowTokens | None:
        """The lengths under another limit; None where rows were cut that would be longer now."""
        if limit >= self.limit:
            # a longest row of exactly the old limit may have been cut there
            return self if self.longest_row < self.limit or limit == self.limit else None
        lengths = {name: min(limit, getattr(self, name)) for name in ("p95", "longest", "held_out")}
        sample = tuple(min(limit, length) for length in self.sample)
        mean = self.mean * sum(sample) / max(1, sum(self.sample))
        cut_rows = 0 if self.longest <= limit and self.cut == 0 else None
        return dataclasses.replace(
            self, mean=mean, limit=limit, sample=sample, cut=cut_rows, **lengths
        )


def summarize_row_tokens(
    counts: Mapping[int, int], *, limit: int, held_out: int = 0
) -> RowTokens | None:
    """The summary of all rows' lengths, from the number of rows of each; None without rows."""
    rows = sum(counts.values())
    if not rows:
        return None
    lengths = sorted(counts)
    cumulative_counts = list(itertools.accumulate(counts[length] for length in lengths))

    def length_at(index: int) -> int:
        # counted from the shortest
        return lengths[bisect.bisect_right(cumulative_counts, index)]

    sample_size = min(rows, MAX_SAMPLED_LENGTHS)  # spread evenly over all of them
    return RowTokens(
        mean=sum(length * count for length, count in counts.items()) / rows,
        p95=length_at(min(rows - 1, int(0.95 * rows))),
        longest=lengths[-1],
        rows=rows,
        limit=limit,
        held_out=held_out,
        sample=tuple(
            length_at((2 * index + 1) * rows // (2 * sample_size))
            for index in reversed(range(sample_size))
        ),
    )


@functools.lru_cache(maxsize=4096)
def average_micro_steps(
    row_tokens: RowTokens, micro_batches: MicroBatches, *, effective_batch: int, ranks: int
) -> AverageMicroSteps:
    """What a rank computes in an average step of `effective_batch` rows, by a few drawn ones; a
    micro step takes as long as its fullest rank."""
    step_rows = min(effective_batch, row_tokens.rows)
    sampled_rows = min(step_rows, _MAX_SAMPLED_ROWS * ranks)
    generator = random.Random(1)  # every rank and every plan of the same rows sees the same steps
    count = padded_tokens = weighted_length = tokens = row_count = 0.0
    for _ in range(_SAMPLED_STEPS):
        # without putting back as long as there are enough
        draw = generator.sample if sampled_rows <= len(row_tokens.sample) else generator.choices
        lengths = sorted(draw(row_tokens.sample, k=sampled_rows), reverse=True)
        for micro_step in micro_batches.assign_rows(lengths, ranks=ranks):
            rank_lengths = [[lengths[index] for index in batch] for batch in micro_step if batch]
            if micro_batches.padded:
                fullest = max(rank_lengths, key=lambda batch: len(batch) * batch[0])
                micro_step_tokens, row_length = len(fullest) * fullest[0], float(fullest[0])
            else:
                fullest = max(rank_lengths, key=sum)
                micro_step_tokens = sum(fullest)
                # weighted by tokens: attention of a row costs its length for each of its tokens
                row_length = sum(length * length for length in fullest) / micro_step_tokens
            count += 1
            row_count += len(fullest)
            padded_tokens += micro_step_tokens
            weighted_length += micro_step_tokens * row_length
        tokens += sum(lengths)
    scale = step_rows / sampled_rows / _SAMPLED_STEPS  # to one whole step
    return AverageMicroSteps(
        count * scale,
        padded_tokens / count,
        weighted_length / padded_tokens,
        tokens * scale,
        row_count / count,
    )
