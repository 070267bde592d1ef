"""Rows → the tensors of a micro-batch.

Rows of one chat are padded to the longest, with an attention mask where one changes anything (`class_checks.masking`),
else with positions. Packs get position ids that restart with every chat, of which transformers makes a mask between
them; flash attention finds such borders only in a batch of one row, so packs are joined to one for it.

Shape letters: B rows, T tokens of the longest, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sft_play.data.masks.token_row import IGNORED

# Keys of a batch without a mask that the model is not given: tokens without padding, chats with a trained token.
COUNT_KEYS = ("token_count", "sample_count")
# Key of rows, and of joined batches: tokens of each chat. Of a batch they are numbers of the host, which no library
# moves to a device.
CHAT_LENGTHS = "chat_lengths"
# Key of a batch that the model is not given: the source of each token [B, T].
SOURCE = "source"


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches of rows, or of packs if they have `chat_lengths`. `flat`: join packs to a single row, as
    flash attention needs; `adds_sources`: add SOURCE."""

    pad_id: int
    flat: bool = False
    adds_sources: bool = False
    adds_masks: bool = True
    """Whether rows of one chat get a mask. Without one they get positions, which run on through the padding: TRL and
    transformers ask for one of the two."""
    adds_chat_lengths: bool = False
    """Whether joined rows come with CHAT_LENGTHS, which this toolkit's own attention reads and no other."""
    min_tokens: int = 0
    """Packs are padded to this many tokens at least, so that all batches have one shape."""
    context_parallel_rank: int = 0
    """This rank's index in its context-parallel group; rows are divided along their tokens."""
    context_parallel_size: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Tensors by name: input_ids and labels [B, T], and attention_mask or position_ids of the same shape; of rows
        without a mask position_ids [1, T]; none without rows."""
        if not rows:
            return {}
        is_packed = CHAT_LENGTHS in rows[0]
        min_tokens, flat = self.min_tokens if is_packed else 0, self.flat and is_packed
        batch = self._tensors({"input_ids": self.pad_id, "labels": IGNORED}, rows, flat=flat, min_tokens=min_tokens)
        if is_packed:
            batch |= self._pack_tensors(rows)
        elif not self.adds_masks and self.context_parallel_size == 1:
            # one row of them, as a model makes its own: rotations are then computed once
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
            trained_rows = sum(bool((np.asarray(row["labels"]) != IGNORED).any()) for row in rows)
            counts = (sum(len(row["input_ids"]) for row in rows), trained_rows)
            batch |= {name: torch.tensor(count) for name, count in zip(COUNT_KEYS, counts, strict=True)}
        else:
            mask_rows = [{"attention_mask": np.ones(len(row["input_ids"]), dtype=np.int64)} for row in rows]
            batch |= self._tensors({"attention_mask": 0}, mask_rows, flat=False)
        if self.adds_sources:
            source_rows = [{SOURCE: _token_sources(row)} for row in rows]
            batch |= self._tensors({SOURCE: 0}, source_rows, flat=flat, min_tokens=min_tokens)
        return batch if self.context_parallel_size == 1 else self._context_parallel_slice(batch)

    def _context_parallel_slice(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's tokens [B, T / parts] of a batch of rows. A part's last token predicts the first of the next."""
        rows, tokens = batch["input_ids"].shape
        padding = -tokens % self.context_parallel_size
        length = (tokens + padding) // self.context_parallel_size
        token_slice = slice(self.context_parallel_rank * length, (self.context_parallel_rank + 1) * length)
        # shifted before the cut: transformers would shift inside each part, and lose the label at its end
        batch["shift_labels"] = _shift_left(batch["labels"], IGNORED)
        if SOURCE in batch:
            batch[SOURCE] = _shift_left(batch[SOURCE], 0)
        pad_values = {"input_ids": self.pad_id, "labels": IGNORED, "shift_labels": IGNORED}
        tensors = {
            name: torch.nn.functional.pad(table, (0, padding), value=pad_values.get(name, 0))[
                :, token_slice
            ].contiguous()
            for name, table in batch.items()
        }
        tensors["position_ids"] = torch.arange(token_slice.start, token_slice.stop).expand(rows, -1).contiguous()
        trained_rows = (
            (batch["shift_labels"] != IGNORED).any(1).sum() if self.context_parallel_rank == 0 else torch.tensor(0)
        )
        counts = (tensors.pop("attention_mask").sum(), trained_rows)  # a row is counted by the rank of its first part
        return tensors | dict(zip(COUNT_KEYS, counts, strict=True))

    def _pack_tensors(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Where chats begin, for the model, and the counts of `COUNT_KEYS`, for the figures."""
        positions = [{"position_ids": np.concatenate(list(map(np.arange, row[CHAT_LENGTHS])))} for row in rows]
        tensors = self._tensors({"position_ids": 0}, positions, flat=self.flat, min_tokens=self.min_tokens)
        lengths = np.concatenate([row[CHAT_LENGTHS] for row in rows])
        if self.flat:  # what transformers passes on to flash_attn_varlen_func; it wants int32
            boundaries = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            longest = int(lengths.max())
            tensors |= {
                "cu_seq_lens_q": boundaries,
                "cu_seq_lens_k": boundaries,
                "max_length_q": longest,
                "max_length_k": longest,
            }
            if self.adds_chat_lengths:
                tensors[CHAT_LENGTHS] = tuple(lengths.tolist())
        labels = np.concatenate([row["labels"] for row in rows])
        trained_tokens = np.add.reduceat(labels != IGNORED, np.cumsum(lengths) - lengths)
        counts = (int(lengths.sum()), int((trained_tokens > 0).sum()))
        return tensors | {name: torch.tensor(count) for name, count in zip(COUNT_KEYS, counts, strict=True)}

    def _tensors(
        self, pad_values: dict[str, int], rows: Sequence[dict[str, Any]], *, flat: bool, min_tokens: int = 0
    ) -> dict[str, Any]:
        """Columns of rows as tensors: padded at the end to [B, T], T not below `min_tokens`, or joined to [1, N]."""
        tensors: dict[str, Any] = {}
        for name, pad_value in pad_values.items():
            values = [np.asarray(row[name], dtype=np.int64) for row in rows]
            if flat:
                tensors[name] = torch.from_numpy(np.concatenate(values)[None])
                continue
            table = np.full((len(values), max(min_tokens, *map(len, values))), pad_value, dtype=np.int64)
            for target, value in zip(table, values, strict=True):
                target[: len(value)] = value
            tensors[name] = torch.from_numpy(table)
        return tensors


def split_batch(batch: dict[str, Any], max_rows: int) -> list[dict[str, Any]]:
    """A batch of several rows in parts of at most `max_rows`; what it has once stays whole in each."""
    count = len(batch["labels"])

    def slice_rows(value: Any, start: int) -> Any:
        is_by_row = isinstance(value, torch.Tensor) and value.dim() and len(value) == count
        return value[start : start + max_rows] if is_by_row else value

    starts = range(0, count, max_rows)
    return [{name: slice_rows(value, offset) for name, value in batch.items()} for offset in starts]


def _shift_left(table: torch.Tensor, fill: int) -> torch.Tensor:
    """Shift values [B, T] left by one position; the last position gets `fill`."""
    return torch.nn.functional.pad(table[:, 1:], (0, 1), value=fill)


def _token_sources(row: dict[str, Any]) -> Any:
    """The source of each token: by token, or one for the whole row; 0 (chat) where the data set has none."""
    return row["sources"] if "sources" in row else np.full(len(row["input_ids"]), int(row.get(SOURCE) or 0))
