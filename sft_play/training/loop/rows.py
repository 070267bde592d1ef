"""The rows as the trainer takes them: each trained on once per epoch, in an order that ranks do not change.

The order of an epoch depends only on seed and epoch, and an optimizer step takes its next effective batch, whatever the
ranks, micro-batch and accumulation. A rank that has no row left for a micro-step gets one whose loss is masked:
accelerate would give it a row from the epoch's beginning a second time. Tokens stay in the data set until a row is
asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import TrainerCallback

from sft_play.data.build.mixing import SourceMix
from sft_play.data.build.packing import Packs, group_by_length
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.planner.micro_batches import MicroBatches

# Number of a row whose loss is masked.
FILLER_INDEX = -1
# Tokens of a masked row: the fewest with a position to predict.
FILLER_TOKENS = 2
# Names of the numbers in column `source`, unless the run names its own sources.
DEFAULT_SOURCES = ("chat", "text")
# Rows of a table that are read at once.
_READ_BATCH_ROWS = 50_000

_FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32")), "source": Value("int8")})


def to_dataset(rows: Sequence[TokenRow] | Dataset) -> Dataset:
    """Rows as the trainer takes them: columns input_ids, labels and source; a Dataset is returned unchanged."""
    if isinstance(rows, Dataset):
        return rows
    columns: dict[str, list[Any]] = {
        "input_ids": [row.input_ids for row in rows],
        "labels": [row.labels for row in rows],
        "source": [DEFAULT_SOURCES.index(getattr(row, "source", DEFAULT_SOURCES[0])) for row in rows],
    }
    return Dataset.from_dict(columns, features=_FEATURES)


def _iter_column_chunks(dataset: Dataset, column: str) -> Iterator[Any]:
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=_READ_BATCH_ROWS):
        yield table[column]


def row_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of every row, in the order of the data set; no token is read."""
    lengths = [pc.list_value_length(column).to_numpy() for column in _iter_column_chunks(dataset, "input_ids")]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, dtype=np.int64)


def trained_tokens(dataset: Dataset) -> int:
    """Count the trained tokens of a data set; the first token of a row is never predicted."""
    total = 0
    for column in _iter_column_chunks(dataset, "labels"):
        is_trained = np.asarray(_flatten(column)) != IGNORED
        lengths = pc.list_value_length(column).to_numpy()
        # an empty row has no first token, and its start is that of the next row
        starts = (np.cumsum(lengths) - lengths)[lengths > 0]
        total += int(is_trained.sum()) - int(is_trained[starts].sum())
    return total


def _flatten(column: Any) -> npt.NDArray[Any]:
    flat = pc.list_flatten(column)
    assert isinstance(flat, pa.ChunkedArray)
    values: np.ndarray[Any, np.dtype[Any]] = flat.to_numpy()
    return values


def pad_to_multiple(dataset: Dataset, *, multiple: int) -> Dataset:
    """The rows, followed by masked rows that make their number a multiple of `multiple` (batch x ranks)."""
    missing = -len(dataset) % multiple
    if not missing:
        return dataset
    first_row = dataset[0]
    tokens = (list(first_row["input_ids"]) * FILLER_TOKENS)[:FILLER_TOKENS]
    columns = {name: [value] * missing for name, value in first_row.items()}
    columns |= {"input_ids": [tokens] * missing, "labels": [[IGNORED] * FILLER_TOKENS] * missing}
    return concatenate_datasets([dataset, Dataset.from_dict(columns, features=dataset.features)])


def balanced_batch_size(row_count: int, *, max_size: int, ranks: int) -> int:
    """The smallest batch size with which `ranks` need as few batches for `rows` as with `max_size`."""
    batches_per_rank = max(1, -(-row_count // (max_size * ranks)))
    return max(1, -(-row_count // (batches_per_rank * ranks)))


def longest_first_order(dataset: Dataset, *, batch_size: int = 1, repeats: int = 1) -> npt.NDArray[np.int64]:
    """Row numbers by length, the longest first: a batch has rows of similar length. Every batch is there `repeats`
    times in a row: ranks take turns, and each of a context-parallel group needs it."""
    order = np.argsort(-row_lengths(dataset), kind="stable")
    batches = np.split(order, range(batch_size, len(order), batch_size))
    return np.concatenate([np.tile(rows, repeats) for rows in batches])


class TrainingRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The training rows by number: rows of the data set or packs of them; FILLER_INDEX is a masked row. A row is
    `input_ids`, `labels` and `sources` (all [T]); a pack, or a row that is `joined` to others, also has `chat_lengths`
    (tokens of each chat). No chat's first token has a label."""

    def __init__(self, dataset: Dataset, *, packs: Packs | None = None, joined: bool = False) -> None:
        self._has_chats = packs is not None or joined
        self._arrow_dataset = dataset.with_format("arrow")
        self._has_sources = "source" in dataset.column_names
        self._packs = packs
        self._count = len(dataset) if packs is None else len(packs)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, read from the table at once (a data loader calls this for a whole batch)."""
        if not indices:
            return []
        row_indices = [self._row_indices(index) for index in indices]
        columns = self._read_columns(np.concatenate(row_indices))
        ends = np.cumsum([len(rows_of_item) for rows_of_item in row_indices])
        rows = [self._slice_row(columns, end - len(part), end) for part, end in zip(row_indices, ends, strict=True)]
        return [_masked_row(row) if index == FILLER_INDEX else row for row, index in zip(rows, indices, strict=True)]

    def _row_indices(self, index: int) -> npt.NDArray[np.int64]:
        if index == FILLER_INDEX:
            return np.zeros(1, dtype=np.int64)
        if not 0 <= index < self._count:
            raise IndexError(index)
        return np.array([index]) if self._packs is None else self._packs[index]

    def _read_columns(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
        """Tokens, labels and sources of rows, joined, and the start of each row (and the end of the last)."""
        table = self._arrow_dataset[indices.tolist()]
        lengths = pc.list_value_length(table["input_ids"]).to_numpy()
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        labels = _flatten(table["labels"]).astype(np.int64)
        labels[starts[:-1]] = IGNORED  # it would be predicted from nothing, or from another chat
        sources = table["source"].to_numpy() if self._has_sources else np.zeros(len(indices))
        return {
            "input_ids": _flatten(table["input_ids"]).astype(np.int64),
            "labels": labels,
            "sources": np.repeat(sources.astype(np.int64), lengths),
            "starts": starts,
        }

    def _slice_row(self, columns: dict[str, npt.NDArray[np.int64]], start: int, end: int) -> dict[str, Any]:
        starts = columns["starts"]
        row: dict[str, Any] = {
            name: columns[name][starts[start] : starts[end]] for name in ("input_ids", "labels", "sources")
        }
        return row if not self._has_chats else {**row, "chat_lengths": np.diff(starts[start : end + 1])}


def _masked_row(row: dict[str, Any]) -> dict[str, Any]:
    masked = {name: np.resize(row[name], FILLER_TOKENS) for name in ("input_ids", "sources")}
    masked["labels"] = np.full(FILLER_TOKENS, IGNORED)
    return masked if "chat_lengths" not in row else {**masked, "chat_lengths": np.array([FILLER_TOKENS])}


class EpochOrder(torch.utils.data.Sampler[int]):
    """Indices of an epoch: `count` rows, or those of `mix`, in accelerate's seedable order for seed and epoch. With
    `lengths`, each `window` of rows (an optimizer step's) is sorted by them, the longest first."""

    def __init__(
        self, count: int, *, seed: int, lengths: npt.NDArray[np.int64] | None = None, effective_batch: int = 1,
        mix: SourceMix | None = None,
    ) -> None:  # fmt: skip
        self._count, self._seed = count, seed
        self._lengths, self._effective_batch, self._mix = lengths, effective_batch, mix
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count if self._mix is None else self._mix.total

    def __iter__(self) -> Iterator[int]:
        yield from self.epoch_rows().tolist()

    def epoch_rows(self) -> npt.NDArray[np.int64]:
        """The epoch's rows in their order."""
        generator = torch.Generator()
        generator.manual_seed(self._seed + self.epoch)
        rows = None if self._mix is None else self._mix.epoch_rows(self.epoch)
        order = torch.randperm(self._count if rows is None else len(rows), generator=generator).numpy()
        order = order if rows is None else rows[order]
        if self._lengths is not None:
            order = group_by_length(order, self._lengths, window=self._effective_batch)
        indices: npt.NDArray[np.int64] = order
        return indices


class StepBatches(torch.utils.data.Sampler[list[int]]):
    """The rows of this rank's micro-batches: `slots` to an optimizer step, of which the first are empty where it needs
    fewer. The Trainer counts a fixed number, and synchronises gradients in the last."""

    batch_size = 1
    """accelerate divides the number of rows by it to find rows that it has repeated; there are none."""

    def __init__(
        self,
        epoch_order: EpochOrder,
        lengths: npt.NDArray[np.int64],
        micro_batches: MicroBatches,
        *,
        effective_batch: int,
        rank: int,
        ranks: int,
    ) -> None:
        """`epoch_order`: of rows, the longest of each `window` (a step's) first where `micro_batches` is by tokens;
        `lengths`: tokens of each row."""
        self._epoch_order, self._lengths, self._micro_batches = epoch_order, lengths, micro_batches
        self._effective_batch, self.rank, self._ranks = effective_batch, rank, ranks
        self.slots = micro_batches.max_micro_steps(-(-effective_batch // ranks))
        self._epoch_indices: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return -(-len(self._epoch_order) // self._effective_batch) * self.slots

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self._epoch_order)
        while rows := list(itertools.islice(indices, self._effective_batch)):
            micro_steps = self._cut_micro_steps(rows, self._micro_batches)
            yield from ([] for _ in range(self.slots - len(micro_steps)))
            for rows_by_rank in micro_steps:
                # a rank without a row of its own computes a masked one: all ranks make the same micro-steps
                yield rows_by_rank[self.rank] or [FILLER_INDEX]

    def _cut_micro_steps(self, rows: Sequence[int], micro_batches: MicroBatches) -> list[list[list[int]]]:
        positions = micro_batches.assign_rows(self._lengths[rows].tolist(), ranks=self._ranks)
        return [[[rows[position] for position in batch] for batch in batches] for batches in positions]

    def step_rows(self, step: int, micro_batches: MicroBatches) -> list[list[list[int]]]:
        """The rows of a step of the epoch, by micro-step and rank, when cut by `micro_batches`."""
        if self._epoch_indices is None or self._epoch_indices[0] != self._epoch_order.epoch:
            self._epoch_indices = (self._epoch_order.epoch, self._epoch_order.epoch_rows())
        return self._cut_micro_steps(
            self._epoch_indices[1][step * self._effective_batch :][: self._effective_batch].tolist(), micro_batches
        )

    def largest_micro_step(self, micro_batches: MicroBatches) -> list[list[int]]:
        """The micro-step that takes the most memory in the step with the epoch's longest row: its rows by rank."""
        longest_position = int(np.argmax(self._lengths[self._epoch_order.epoch_rows()]))

        def count_tokens(batch: Sequence[int]) -> int:
            lengths = self._lengths[batch]
            return int(len(batch) * lengths.max() if micro_batches.padded else lengths.sum()) if batch else 0

        return max(
            self.step_rows(longest_position // self._effective_batch, micro_batches),
            key=lambda each: max(map(count_tokens, each)),
        )


class SetEpochCallback(TrainerCallback):
    """Sets the epoch of the row order: accelerate does not when a resumed run of several ranks skips batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch of the step counter."""
        self._trainer.epoch_order.set_epoch(int(state.epoch or 0))
