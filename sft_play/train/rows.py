"""The rows as the trainer takes them: each trained on once per epoch, in an order that ranks do not change.

The order of an epoch depends on seed and epoch alone, and an optimizer step takes the next effective batch of it. So a
step sees the same rows whatever the number of ranks, micro-batch and accumulation. What is lacking at the end of an
epoch is filled with rows whose loss is masked: accelerate would fill it with rows from the epoch's beginning, which
would then be trained on twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import TrainerCallback

from sft_play.data.render import TokenRow

MASKED = -100
"""The label of a token that is not trained on."""
FILLER_TOKENS = 2
"""Tokens of a masked row: the fewest that leave a position to predict."""


def to_dataset(rows: Sequence[TokenRow]) -> Dataset:
    """Rows as the trainer takes them: columns input_ids and labels."""
    return Dataset.from_dict({"input_ids": [row.input_ids for row in rows], "labels": [row.labels for row in rows]})


def filled(dataset: Dataset, *, unit: int) -> Dataset:
    """The rows with as many masked rows after them as make their number a multiple of `unit` (batch x ranks)."""
    lacking = -len(dataset) % unit
    if not lacking:
        return dataset
    tokens = (list(dataset[0]["input_ids"]) * FILLER_TOKENS)[:FILLER_TOKENS]
    columns = {"input_ids": [tokens] * lacking, "labels": [[MASKED] * FILLER_TOKENS] * lacking}
    return concatenate_datasets([dataset, Dataset.from_dict(columns, features=dataset.features)])


class EpochOrder(torch.utils.data.Sampler[int]):
    """Indices of an epoch: the first `count` rows in an order drawn from seed and epoch, then the masked ones.

    The order is that of accelerate's seedable sampler for the same seed.
    """

    def __init__(self, count: int, *, total: int, seed: int) -> None:
        self._count, self._total, self._seed = count, total, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self._seed + self.epoch)
        yield from torch.randperm(self._count, generator=generator).tolist()
        yield from range(self._count, self._total)


class TellEpoch(TrainerCallback):
    """Tells the order which epoch begins: accelerate does not reach it where batches were skipped over ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The epoch that the step counter stands in."""
        order = self._trainer.order
        if order is not None:
            order.set_epoch(int(state.epoch or 0))
