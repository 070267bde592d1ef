"""Every row is trained on once per epoch, in the same order and the same steps whatever the ranks."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.build


def dataset(count: int):
    from datasets import Dataset

    return Dataset.from_dict(
        {"input_ids": [[n, n + 1, n + 2] for n in range(count)], "labels": [[n, 5, 5] for n in range(count)]}
    )


def steps_of(count: int, *, micro: int, accum: int, ranks: int, epoch: int = 0) -> list[list[int]]:
    """Rows of each optimizer step, as accelerate hands batches to ranks."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    from sft_play.train.rows import EpochOrder, filled

    rows = filled(dataset(count), unit=micro * ranks if ranks > 1 else 1)
    per_rank = []
    for rank in range(ranks):
        order = EpochOrder(count, total=len(rows), seed=42)
        order.set_epoch(epoch)
        batches = BatchSampler(order, micro, drop_last=False)
        per_rank.append(list(BatchSamplerShard(batches, ranks, rank) if ranks > 1 else batches))
    assert len({len(batches) for batches in per_rank}) == 1
    trained = [[[n for n in batch if rows[n]["labels"][1] != -100] for batch in batches] for batches in per_rank]
    passes = len(per_rank[0])
    return [
        sorted(n for rank in trained for batch in rank[first : first + accum] for n in batch)
        for first in range(0, passes, accum)
    ]


@pytest.mark.parametrize("count", [1, 5, 16, 21, 37])
@pytest.mark.parametrize(
    ("micro", "accum", "ranks"), [(2, 4, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4), (2, 1, 4)]
)
def test_a_step_has_the_same_rows_under_every_split_and_each_comes_once(count, micro, accum, ranks):
    for epoch in (0, 3):
        steps = steps_of(count, micro=micro, accum=accum, ranks=ranks, epoch=epoch)
        assert sorted(n for step in steps for n in step) == list(range(count))
        assert len(steps) == math.ceil(count / 8)
        assert steps == steps_of(count, micro=8, accum=1, ranks=1, epoch=epoch)


def test_the_order_is_that_of_accelerates_seedable_sampler():
    import torch
    from accelerate.data_loader import SeedableRandomSampler

    from sft_play.train.rows import EpochOrder

    theirs = SeedableRandomSampler(range(21), data_seed=42, generator=torch.Generator())
    ours = EpochOrder(21, total=21, seed=42)
    for epoch in (0, 1, 5):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
    assert list(EpochOrder(21, total=24, seed=42))[21:] == [21, 22, 23]


def test_masked_rows_hold_no_token_that_is_trained_on():
    from sft_play.train.rows import filled

    rows = filled(dataset(5), unit=4)
    assert len(rows) == 8
    assert rows[:5] == dataset(5)[:]
    assert all(set(labels) == {-100} for labels in rows[5:]["labels"])
    assert filled(dataset(8), unit=4)[:] == dataset(8)[:]
