"""The rows as the trainer takes them: each trained on once per epoch, in an order that ranks do not change.

The order of an epoch depends only on seed and epoch, and an optimizer step takes its next effective batch, whatever the
ranks, micro-batch and accumulation. A rank that has no row left for a pass gets one whose loss is masked: accelerate
would give it a row from the epoch's beginning a second time. Tokens stay in the data set until a row is asked for.
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

from sft_play.data.build.mixing import Mix
from sft_play.data.build.packing import Packs, grouped
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.planner.micro_batches import MicroBatches

# Number of a row whose loss is masked.
FILLER = -1
# Tokens of a masked row: the fewest with a position to predict.
FILLER_TOKENS = 2
# Names of the numbers in column `source`, unless the run names its own sources.
SOURCES = ("chat", "text")
# Rows of a table that are read at once.
_ROWS_AT_ONCE = 50_000

_FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32")), "source": Value("int8")})


def to_dataset(rows: Sequence[TokenRow] | Dataset) -> Dataset:
    """Rows as the trainer takes them: columns input_ids, labels and source; a Dataset is returned unchanged."""
    if isinstance(rows, Dataset):
        return rows
    columns: dict[str, list[Any]] = {
        "input_ids": [row.input_ids for row in rows],
        "labels": [row.labels for row in rows],
        "source": [SOURCES.index(getattr(row, "source", SOURCES[0])) for row in rows],
    }
    return Dataset.from_dict(columns, features=_FEATURES)


def _tables(dataset: Dataset, column: str) -> Iterator[Any]:
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        yield table[column]


def lengths_of(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of every row, in the order of the data set; no token is read."""
    lengths = [pc.list_value_length(column).to_numpy() for column in _tables(dataset, "input_ids")]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, dtype=np.int64)


def trained_tokens(dataset: Dataset) -> int:
    """Tokens that are trained; the first of a row is never predicted."""
    total = 0
    for column in _tables(dataset, "labels"):
        counts = np.asarray(_flat(column)) != IGNORED
        lengths = pc.list_value_length(column).to_numpy()
        # an empty row has no first token, and its start is that of the next row
        starts = (np.cumsum(lengths) - lengths)[lengths > 0]
        total += int(counts.sum()) - int(counts[starts].sum())
    return total


def _flat(column: Any) -> npt.NDArray[Any]:
    flat = pc.list_flatten(column)
    assert isinstance(flat, pa.ChunkedArray)
    values: np.ndarray[Any, np.dtype[Any]] = flat.to_numpy()
    return values


def filled(dataset: Dataset, *, unit: int) -> Dataset:
    """The rows, followed by masked rows that make their number a multiple of `unit` (batch x ranks)."""
    lacking = -len(dataset) % unit
    if not lacking:
        return dataset
    first = dataset[0]
    tokens = (list(first["input_ids"]) * FILLER_TOKENS)[:FILLER_TOKENS]
    columns = {name: [value] * lacking for name, value in first.items()}
    columns |= {"input_ids": [tokens] * lacking, "labels": [[IGNORED] * FILLER_TOKENS] * lacking}
    return concatenate_datasets([dataset, Dataset.from_dict(columns, features=dataset.features)])


def evened(rows: int, *, most: int, ranks: int) -> int:
    """The smallest batch size with which `ranks` need as few passes over `rows` as with `most`."""
    passes = max(1, -(-rows // (most * ranks)))
    return max(1, -(-rows // (passes * ranks)))


def longest_first(dataset: Dataset, *, batch: int = 1, copies: int = 1) -> npt.NDArray[np.int64]:
    """Row numbers by length, the longest first: a batch has rows of similar length. Every batch is there `copies` times
    in a row: ranks take turns, and each of a context-parallel group needs it."""
    order = np.argsort(-lengths_of(dataset), kind="stable")
    batches = np.split(order, range(batch, len(order), batch))
    return np.concatenate([np.tile(rows, copies) for rows in batches])


class TrainingRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The training rows by number: rows of the data set or packs of them; FILLER is a masked row. A row is `input_ids`,
    `labels` and `sources` (all [T]); a pack, or a row that is `joined` to others, also has `chat_lengths` (tokens of
    each chat). No chat's first token has a label."""

    def __init__(self, dataset: Dataset, *, packs: Packs | None = None, joined: bool = False) -> None:
        self._has_chats = packs is not None or joined
        self._arrow = dataset.with_format("arrow")
        self._has_sources = "source" in dataset.column_names
        self._packs = packs
        self._count = len(dataset) if packs is None else len(packs)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One row."""
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, read from the table at once (a data loader calls this for a whole batch)."""
        if not numbers:
            return []
        parts = [self._indices(number) for number in numbers]
        read = self._read(np.concatenate(parts))
        ends = np.cumsum([len(part) for part in parts])
        rows = [self._row(read, end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        return [_masked(row) if number == FILLER else row for row, number in zip(rows, numbers, strict=True)]

    def _indices(self, number: int) -> npt.NDArray[np.int64]:
        if number == FILLER:
            return np.zeros(1, dtype=np.int64)
        if not 0 <= number < self._count:
            raise IndexError(number)
        return np.array([number]) if self._packs is None else self._packs[number]

    def _read(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
        """Tokens, labels and sources of rows, joined, and the start of each row (and the end of the last)."""
        table = self._arrow[indices.tolist()]
        lengths = pc.list_value_length(table["input_ids"]).to_numpy()
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        labels = _flat(table["labels"]).astype(np.int64)
        labels[starts[:-1]] = IGNORED  # it would be predicted from nothing, or from another chat
        sources = table["source"].to_numpy() if self._has_sources else np.zeros(len(indices))
        return {
            "input_ids": _flat(table["input_ids"]).astype(np.int64),
            "labels": labels,
            "sources": np.repeat(sources.astype(np.int64), lengths),
            "starts": starts,
        }

    def _row(self, read: dict[str, npt.NDArray[np.int64]], first: int, end: int) -> dict[str, Any]:
        starts = read["starts"]
        row: dict[str, Any] = {
            name: read[name][starts[first] : starts[end]] for name in ("input_ids", "labels", "sources")
        }
        return row if not self._has_chats else {**row, "chat_lengths": np.diff(starts[first : end + 1])}


def _masked(row: dict[str, Any]) -> dict[str, Any]:
    masked = {name: np.resize(row[name], FILLER_TOKENS) for name in ("input_ids", "sources")}
    masked["labels"] = np.full(FILLER_TOKENS, IGNORED)
    return masked if "chat_lengths" not in row else {**masked, "chat_lengths": np.array([FILLER_TOKENS])}


class EpochOrder(torch.utils.data.Sampler[int]):
    """Indices of an epoch: `count` rows, or those of `mix`, in accelerate's seedable order for seed and epoch. With
    `lengths`, each `window` of rows (an optimizer step's) is sorted by them, the longest first."""

    def __init__(
        self, count: int, *, seed: int, lengths: npt.NDArray[np.int64] | None = None, window: int = 1,
        mix: Mix | None = None,
    ) -> None:  # fmt: skip
        self._count, self._seed = count, seed
        self._lengths, self._window, self._mix = lengths, window, mix
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._count if self._mix is None else self._mix.total

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers().tolist()

    def numbers(self) -> npt.NDArray[np.int64]:
        """The epoch's rows in their order."""
        generator = torch.Generator()
        generator.manual_seed(self._seed + self.epoch)
        rows = None if self._mix is None else self._mix.rows(self.epoch)
        order = torch.randperm(self._count if rows is None else len(rows), generator=generator).numpy()
        order = order if rows is None else rows[order]
        if self._lengths is not None:
            order = grouped(order, self._lengths, window=self._window)
        numbers: npt.NDArray[np.int64] = order
        return numbers


class StepBatches(torch.utils.data.Sampler[list[int]]):
    """The rows of this rank's micro-batches: `slots` to an optimizer step, of which the first are empty where it needs
    fewer. The Trainer counts a fixed number, and synchronises gradients in the last."""

    batch_size = 1
    """accelerate divides the number of rows by it to find rows that it has repeated; there are none."""

    def __init__(
        self,
        order: EpochOrder,
        lengths: npt.NDArray[np.int64],
        cut: MicroBatches,
        *,
        window: int,
        rank: int,
        ranks: int,
    ) -> None:
        """`order`: of rows, the longest of each `window` (a step's) first where `cut` is by tokens; `lengths`: tokens
        of each row."""
        self._order, self._lengths, self._cut = order, lengths, cut
        self._window, self.rank, self._ranks = window, rank, ranks
        self.slots = cut.max_micro_steps(-(-window // ranks))
        self._epoch: tuple[int, npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return -(-len(self._order) // self._window) * self.slots

    def __iter__(self) -> Iterator[list[int]]:
        numbers = iter(self._order)
        while rows := list(itertools.islice(numbers, self._window)):
            passes = self._passes(rows, self._cut)
            yield from ([] for _ in range(self.slots - len(passes)))
            for each in passes:
                # a rank without a row of its own computes a masked one: all ranks make the same passes
                yield each[self.rank] or [FILLER]

    def _passes(self, rows: Sequence[int], cut: MicroBatches) -> list[list[list[int]]]:
        places = cut.assign_rows(self._lengths[rows].tolist(), ranks=self._ranks)
        return [[[rows[place] for place in batch] for batch in each] for each in places]

    def of_step(self, number: int, cut: MicroBatches) -> list[list[list[int]]]:
        """The rows of the epoch's step of this number, by pass and rank, if they are cut so."""
        if self._epoch is None or self._epoch[0] != self._order.epoch:
            self._epoch = (self._order.epoch, self._order.numbers())
        return self._passes(self._epoch[1][number * self._window :][: self._window].tolist(), cut)

    def longest_pass(self, cut: MicroBatches) -> list[list[int]]:
        """The pass that takes the most memory in the step with the epoch's longest row: its rows by rank."""
        longest = int(np.argmax(self._lengths[self._order.numbers()]))

        def places(batch: Sequence[int]) -> int:
            lengths = self._lengths[batch]
            return int(len(batch) * lengths.max() if cut.padded else lengths.sum()) if batch else 0

        return max(self.of_step(longest // self._window, cut), key=lambda each: max(map(places, each)))


class TellEpoch(TrainerCallback):
    """Tells the order which epoch begins: accelerate does not when a resumed run of several ranks skips batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch of the step counter."""
        self._trainer.order.set_epoch(int(state.epoch or 0))
