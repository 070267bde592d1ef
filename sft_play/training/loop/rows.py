"""The rows as the trainer takes them: in an order that ranks do not change (`TrainingRows`,
`EpochOrder`, `StepBatches`), and as the tensors of a micro-batch (`Collator`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset, concatenate_datasets

from sft_play.data.build.build import IMAGE_COLUMNS
from sft_play.data.build.packing import Packs, group_by_length
from sft_play.data.build.splits import SourceMix
from sft_play.data.masks.image_processor import (
    ImageProcessorSource,
    cached_image_processor,
    image_inputs,
)
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.images import Picture
from sft_play.errors import DataError
from sft_play.machine.host import cpu_cores
from sft_play.planner.batching import MicroBatches
from sft_play.planner.memory.estimate import count_image_workers

# The order of an epoch depends only on seed and epoch, and an optimizer step takes its next
# effective batch, whatever the ranks, micro-batch and accumulation. A rank that has no row left for
# a micro-step gets one whose loss is masked: accelerate would give it a row from the epoch's
# beginning a second time. Tokens stay in the data set until a row is asked for.

# Number of a row whose loss is masked.
FILLER_INDEX = -1
# Tokens of a masked row: the fewest with a position to predict.
FILLER_TOKENS = 2
# Names of the numbers in column `source`, unless the run names its own sources.
DEFAULT_SOURCES = ("chat", "text")


def _iter_column_chunks(dataset: Dataset, column: str) -> Iterator[Any]:
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=50_000):
        yield table[column]


def row_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of every row, in the order of the data set; no token is read."""
    lengths = [
        pc.list_value_length(column).to_numpy()
        for column in _iter_column_chunks(dataset, "input_ids")
    ]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, dtype=np.int64)


def trained_tokens(dataset: Dataset) -> int:
    """Count the trained tokens of a data set; the first token of a row is never predicted."""
    total = 0
    for column in _iter_column_chunks(dataset, "labels"):
        is_trained = pc.list_flatten(column).to_numpy() != IGNORED
        lengths = pc.list_value_length(column).to_numpy()
        # an empty row has no first token, and its start is that of the next row
        starts = (np.cumsum(lengths) - lengths)[lengths > 0]
        total += int(is_trained.sum()) - int(is_trained[starts].sum())
    return total


def pad_to_multiple(dataset: Dataset, *, multiple: int) -> Dataset:
    """The rows, followed by masked rows that make their number a multiple of `multiple` (batch x
    ranks)."""
    missing = -len(dataset) % multiple
    if not missing:
        return dataset
    first_row = dataset[0]
    # the last ones, which are of no picture
    tokens = (list(first_row["input_ids"]) * FILLER_TOKENS)[-FILLER_TOKENS:]
    columns = {
        **{name: [value] * missing for name, value in first_row.items()},
        "input_ids": [tokens] * missing,
        "labels": [[IGNORED] * FILLER_TOKENS] * missing,
    }
    if PICTURES in columns:
        columns[PICTURES] = [[]] * missing
    return concatenate_datasets([dataset, Dataset.from_dict(columns, features=dataset.features)])


def balanced_batch_size(row_count: int, *, max_size: int, ranks: int) -> int:
    """The smallest batch size with which `ranks` need as few batches for `row_count` as with
    `max_size`."""
    batches_per_rank = max(1, -(-row_count // (max_size * ranks)))
    return max(1, -(-row_count // (batches_per_rank * ranks)))


def longest_first_order(
    dataset: Dataset, *, batch_size: int = 1, repeats: int = 1
) -> npt.NDArray[np.int64]:
    """Row numbers by length, the longest first: a batch has rows of similar length. Every batch is
    there `repeats` times in a row: ranks take turns, and each of a context-parallel group needs
    it."""
    order = np.argsort(-row_lengths(dataset), kind="stable")
    batches = np.split(order, range(batch_size, len(order), batch_size))
    return np.concatenate([np.tile(rows, repeats) for rows in batches])


class TrainingRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The training rows by number: rows of the data set or packs of them; FILLER_INDEX is a masked
    row. A row is `input_ids`, `labels` and `sources` (all [T]); a pack, or a row that is `joined`
    to others, also has `chat_lengths` (tokens of each chat). No chat's first token has a label."""

    def __init__(
        self, dataset: Dataset, *, packs: Packs | None = None, joined: bool = False
    ) -> None:
        self._has_chats = packs is not None or joined
        self._arrow_dataset = dataset.with_format("arrow")
        self._has_sources = "source" in dataset.column_names
        self._has_pictures = PICTURES in dataset.column_names
        self._packs = packs
        self._count = len(dataset) if packs is None else len(packs)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several rows, read from the table at once (a data loader calls this for a whole
        batch)."""
        if not indices:
            return []
        parts = [self._row_indices(index) for index in indices]
        table = self._arrow_dataset[np.concatenate(parts).tolist()]
        lengths = pc.list_value_length(table["input_ids"]).to_numpy()
        # where each row of the table begins, and where the last one ends
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        labels = pc.list_flatten(table["labels"]).to_numpy().astype(np.int64)
        labels[starts[:-1]] = IGNORED  # it would be predicted from nothing, or from another chat
        sources = np.zeros(len(lengths), dtype=np.int64)
        if self._has_sources:
            sources = table["source"].to_numpy().astype(np.int64)
        input_ids = pc.list_flatten(table["input_ids"]).to_numpy().astype(np.int64)
        columns = {"input_ids": input_ids, "labels": labels, "sources": np.repeat(sources, lengths)}
        rows: list[dict[str, Any]] = []
        end = 0
        for index, part in zip(indices, parts, strict=True):
            start, end = end, end + len(part)
            row = {name: values[starts[start] : starts[end]] for name, values in columns.items()}
            chat_lengths = np.diff(starts[start : end + 1])
            if index == FILLER_INDEX:
                # the last tokens, which are of no picture
                row = {
                    name: np.resize(values[-FILLER_TOKENS:], FILLER_TOKENS)
                    for name, values in row.items()
                }
                row["labels"] = np.full(FILLER_TOKENS, IGNORED)
                chat_lengths = np.array([FILLER_TOKENS])
            if self._has_chats:
                row[CHAT_LENGTHS] = chat_lengths
            if self._has_pictures:
                row[PICTURES] = [] if index == FILLER_INDEX else table[PICTURES][len(rows)].as_py()
            rows.append(row)
        return rows

    def _row_indices(self, index: int) -> npt.NDArray[np.int64]:
        # the rows of the data set in a row or pack; the first stands for a masked one
        if index == FILLER_INDEX:
            return np.zeros(1, dtype=np.int64)
        if not 0 <= index < self._count:
            raise IndexError(index)
        return np.array([index]) if self._packs is None else self._packs[index]


class EpochOrder(torch.utils.data.Sampler[int]):
    """Yields the row indices of an epoch, of `count` rows or of `mix`, in accelerate's seedable
    order for seed and epoch. With `lengths`, the rows of each optimizer step (`effective_batch`)
    are sorted, the longest first."""

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        lengths: npt.NDArray[np.int64] | None = None,
        effective_batch: int = 1,
        mix: SourceMix | None = None,
    ) -> None:
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
        order: npt.NDArray[np.int64] = torch.randperm(len(self), generator=generator).numpy()
        if self._mix is not None:
            order = self._mix.epoch_rows(self.epoch)[order]
        if self._lengths is not None:
            order = group_by_length(order, self._lengths, window=self._effective_batch)
        return order


class StepBatches(torch.utils.data.Sampler[list[int]]):
    """Yields the rows of this rank's micro-batches. An optimizer step has `slots` of them, because
    the Trainer counts a fixed number and synchronises gradients in the last: a step that needs
    fewer begins with empty ones. `epoch_order`: the rows; `effective_batch`: rows of a step;
    `micro_batches`: how a step is cut (by tokens it needs the longest rows first); `lengths`:
    tokens of each row."""

    # accelerate divides the number of rows by it to find rows that it has repeated; there are none.
    batch_size = 1

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
                # a rank without a row of its own computes a masked one: all ranks make the same
                # micro-steps
                yield rows_by_rank[self.rank] or [FILLER_INDEX]

    def _cut_micro_steps(
        self, rows: Sequence[int], micro_batches: MicroBatches
    ) -> list[list[list[int]]]:
        positions = micro_batches.assign_rows(self._lengths[rows].tolist(), ranks=self._ranks)
        return [
            [[rows[position] for position in batch] for batch in batches] for batches in positions
        ]

    def step_rows(self, step: int, micro_batches: MicroBatches) -> list[list[list[int]]]:
        """The rows of a step of the epoch, by micro-step and rank, when cut by `micro_batches`."""
        if self._epoch_indices is None or self._epoch_indices[0] != self._epoch_order.epoch:
            self._epoch_indices = (self._epoch_order.epoch, self._epoch_order.epoch_rows())
        rows = self._epoch_indices[1][step * self._effective_batch :][: self._effective_batch]
        return self._cut_micro_steps(rows.tolist(), micro_batches)

    def largest_micro_step(self, micro_batches: MicroBatches) -> list[list[int]]:
        """The micro-step that takes the most memory in the step with the epoch's longest row: its
        rows by rank."""
        longest_position = int(np.argmax(self._lengths[self._epoch_order.epoch_rows()]))

        def count_tokens(rows_by_rank: Sequence[Sequence[int]]) -> int:
            lengths = [self._lengths[rows] for rows in rows_by_rank if rows]
            if micro_batches.padded:
                return max(len(batch) * int(batch.max()) for batch in lengths)
            return max(int(batch.sum()) for batch in lengths)

        return max(
            self.step_rows(longest_position // self._effective_batch, micro_batches),
            key=count_tokens,
        )


# --------------------------------------------------------------------------------------------------
# Rows → the tensors of a micro-batch.
#
# Rows of one chat are padded to the longest, with an attention mask where one changes anything
# (`class_checks.masking`), else with positions. Packs get position ids that restart with every
# chat, from which transformers makes a mask between them; flash attention finds such borders only
# in a batch of one row, so packs are joined to one for it.
#
# Shape letters: B rows, T tokens of the longest, N tokens of all rows.

# Keys of a batch without a mask that the model is not given: tokens without padding, chats with a
# trained token.
COUNT_KEYS = ("token_count", "sample_count")
# Key of rows, and of joined batches: tokens of each chat. Of a batch they are numbers of the host,
# which no library moves to a device.
CHAT_LENGTHS = "chat_lengths"
# Key of a batch that the model is not given: the source of each token [B, T].
SOURCE = "source"
# Column and key of rows: their pictures, not decoded.
PICTURES = "images"


def without_pictures(rows: Dataset) -> Dataset:
    """The token rows without their pictures, for TRL's trainer, which takes rows with images for
    rows that it would process itself."""
    names = [name for name in IMAGE_COLUMNS if name in rows.column_names]
    return rows.remove_columns(names)


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches of rows, or of packs if they have `chat_lengths`. `flat`: join packs to a
    single row, as flash attention needs; `adds_sources`: add SOURCE."""

    pad_id: int
    flat: bool = False
    adds_sources: bool = False
    # Whether rows of one chat get a mask. Without one they get positions, which run on through the
    # padding: TRL and transformers ask for one of the two.
    adds_masks: bool = True
    # Whether joined rows come with CHAT_LENGTHS, which this toolkit's own attention reads and no
    # other.
    adds_chat_lengths: bool = False
    # Packs are padded to this many tokens at least, so that all batches have one shape.
    min_tokens: int = 0
    # This rank's index in its context-parallel group; rows are divided along their tokens.
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    # What makes pixels of rows' pictures; None for rows of text.
    images: ImageProcessorSource | None = None

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Tensors by name: input_ids and labels [B, T], and attention_mask or position_ids of the
        same shape; of rows without a mask position_ids [1, T]; none without rows."""
        if not rows:
            return {}
        is_packed = CHAT_LENGTHS in rows[0]
        min_tokens, flat = self.min_tokens if is_packed else 0, self.flat and is_packed
        batch = self._tensors(
            {"input_ids": self.pad_id, "labels": IGNORED}, rows, flat=flat, min_tokens=min_tokens
        )
        if is_packed:
            batch |= self._pack_tensors(rows)
        elif not self.adds_masks and self.context_parallel_size == 1:
            # one row of them, as a model makes its own: rotations are then computed once
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
            trained_rows = sum(bool((np.asarray(row["labels"]) != IGNORED).any()) for row in rows)
            batch |= {
                "token_count": torch.tensor(sum(len(row["input_ids"]) for row in rows)),
                "sample_count": torch.tensor(trained_rows),
            }
        else:
            mask_rows = [
                {"attention_mask": np.ones(len(row["input_ids"]), dtype=np.int64)} for row in rows
            ]
            batch |= self._tensors({"attention_mask": 0}, mask_rows, flat=False)
        if self.images is not None:
            batch |= self._image_tensors(rows, self.images)
        if self.adds_sources:
            source_rows = []
            # by token, or one for the whole row; 0 (chat) where the data set has none
            for row in rows:
                sources = row.get("sources")
                if sources is None:
                    sources = np.full(len(row["input_ids"]), int(row.get(SOURCE) or 0))
                source_rows.append({SOURCE: sources})
            batch |= self._tensors({SOURCE: 0}, source_rows, flat=flat, min_tokens=min_tokens)
        return batch if self.context_parallel_size == 1 else self._context_parallel_slice(batch)

    def _image_tensors(
        self, rows: Sequence[dict[str, Any]], source: ImageProcessorSource
    ) -> dict[str, Any]:
        # the pixels of all pictures, as the processor gives them to the model, and which tokens are
        # theirs; raises DataError where a row has not exactly the tokens of its pictures, or trains
        # one
        processor = cached_image_processor(source)
        pictures_by_row = [
            [one if isinstance(one, Picture) else Picture(**one) for one in row.get(PICTURES) or ()]
            for row in rows
        ]
        token_ids = np.array(sorted(processor.token_ids))
        tensors, token_counts = image_inputs(processor, pictures_by_row)
        for row, pictures, count in zip(rows, pictures_by_row, token_counts, strict=True):
            is_image = np.isin(np.asarray(row["input_ids"]), token_ids)
            is_trained = np.asarray(row["labels"])[is_image] != IGNORED
            if is_image.any() and not pictures:
                raise DataError(
                    "a row without images spells the token of an image in a text; take it as text"
                    " with data.special_tokens_in_text=plain, or out of the row"
                )
            if int(is_image.sum()) != count or is_trained.any():
                raise DataError(
                    f"a row has {int(is_image.sum())} image tokens, {int(is_trained.sum())} of them"
                    f" trained, and its pictures take {count}"
                    f" ({', '.join(one.name for one in pictures[:3]) or 'it has none'}): the"
                    " processor of the base has changed since the rows were tokenised"
                )
        types = [processor.token_types([row["input_ids"]]) for row in rows]
        for name in types[0]:
            columns = [{name: np.array(row_types[name][0])} for row_types in types]
            tensors |= self._tensors({name: 0}, columns, flat=False)
        return tensors

    def _context_parallel_slice(self, batch: dict[str, Any]) -> dict[str, Any]:
        # this rank's tokens [B, T / parts] of a batch of rows; a part's last token predicts the
        # first of the next
        rows, tokens = batch["input_ids"].shape
        padding = -tokens % self.context_parallel_size
        length = (tokens + padding) // self.context_parallel_size
        token_slice = slice(
            self.context_parallel_rank * length, (self.context_parallel_rank + 1) * length
        )
        # shifted before the cut: transformers would shift inside each part, and lose the label at
        # its end
        batch["shift_labels"] = torch.nn.functional.pad(
            batch["labels"][:, 1:], (0, 1), value=IGNORED
        )
        if SOURCE in batch:
            batch[SOURCE] = torch.nn.functional.pad(batch[SOURCE][:, 1:], (0, 1), value=0)
        pad_values = {"input_ids": self.pad_id, "labels": IGNORED, "shift_labels": IGNORED}
        tensors = {}
        for name, table in batch.items():
            padded = torch.nn.functional.pad(table, (0, padding), value=pad_values.get(name, 0))
            tensors[name] = padded[:, token_slice].contiguous()
        tensors["position_ids"] = (
            torch.arange(token_slice.start, token_slice.stop).expand(rows, -1).contiguous()
        )
        trained_rows = (batch["shift_labels"] != IGNORED).any(1).sum()
        if self.context_parallel_rank > 0:  # a row is counted by the rank of its first part
            trained_rows = torch.tensor(0)
        token_count = tensors.pop("attention_mask").sum()
        return tensors | {"token_count": token_count, "sample_count": trained_rows}

    def _pack_tensors(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        # where chats begin, for the model, and the counts of `COUNT_KEYS`, for the figures
        positions = [
            {"position_ids": np.concatenate(list(map(np.arange, row[CHAT_LENGTHS])))}
            for row in rows
        ]
        tensors = self._tensors(
            {"position_ids": 0}, positions, flat=self.flat, min_tokens=self.min_tokens
        )
        lengths = np.concatenate([row[CHAT_LENGTHS] for row in rows])
        if self.flat:  # what transformers passes on to flash_attn_varlen_func; it wants int32
            boundaries = torch.from_numpy(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            )
            longest = int(lengths.max())
            # `complete_boundaries` adds those of the keys, which are the same
            tensors |= {
                "cu_seq_lens_q": boundaries,
                "max_length_q": longest,
                "max_length_k": longest,
            }
            if self.adds_chat_lengths:
                tensors[CHAT_LENGTHS] = tuple(lengths.tolist())
        labels = np.concatenate([row["labels"] for row in rows])
        trained_tokens = np.add.reduceat(labels != IGNORED, np.cumsum(lengths) - lengths)
        return tensors | {
            "token_count": torch.tensor(int(lengths.sum())),
            "sample_count": torch.tensor(int((trained_tokens > 0).sum())),
        }

    def _tensors(
        self,
        pad_values: dict[str, int],
        rows: Sequence[dict[str, Any]],
        *,
        flat: bool,
        min_tokens: int = 0,
    ) -> dict[str, Any]:
        # columns of rows: padded at the end to [B, T], T not below `min_tokens`, or joined to [1,
        # N]
        tensors: dict[str, Any] = {}
        for name, pad_value in pad_values.items():
            values = [np.asarray(row[name], dtype=np.int64) for row in rows]
            if flat:
                tensors[name] = torch.from_numpy(np.concatenate(values)[None])
                continue
            table = np.full(
                (len(values), max(min_tokens, *map(len, values))), pad_value, dtype=np.int64
            )
            for target, value in zip(table, values, strict=True):
                target[: len(value)] = value
            tensors[name] = torch.from_numpy(table)
        return tensors


def count_pixel_workers(ranks: int, *, on_gpu: bool) -> int:
    """Processes that make pixels while a card computes, by the cores that none of a machine's
    `ranks` has for itself; the plan's number where there are as many."""
    spare_cores = max(1, cpu_cores() // ranks - 1)
    return min(spare_cores, count_image_workers(0, on_gpu=on_gpu))


def complete_boundaries(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with the boundaries of keys, where it has those of queries: the same tensor, which
    so is copied to the device once."""
    if "cu_seq_lens_q" not in batch:
        return batch
    return {**batch, "cu_seq_lens_k": batch["cu_seq_lens_q"]}


def split_batch(batch: dict[str, Any], max_rows: int) -> list[dict[str, Any]]:
    """A batch of several rows in parts of at most `max_rows`; what it has once stays whole in
    each."""
    count = len(batch["labels"])
    by_row = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == count
    }
    return [
        batch | {name: value[start : start + max_rows] for name, value in by_row.items()}
        for start in range(0, count, max_rows)
    ]
