"""Rows → the tensors of a micro-batch.

Rows of one chat are padded to the longest and come with an attention mask. Packs come without one: their position ids
begin at 0 with every chat, and that is what transformers makes each layer's mask from (masking_utils.py,
`find_packed_sequence_indices`), which lets no chat see another; every padded place has position 0, is a chat of its own
and sees itself. Flash attention finds such borders only in a batch of one row (`_is_packed_sequence`), so for it all
packs of a micro-batch stand in one row without padding, with the borders told.

Shape letters: B rows, T tokens of the longest, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sft_play.train.rows import MASKED

COUNTS = ("token_count", "sample_count")
"""Keys of a batch of packs, or of parts of rows, that are no input of the model: tokens without padding, chats with a
trained token."""
SOURCE = "source"
"""Key of a batch that is no input of the model: where each token [B, T] comes from."""


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches of rows, or of packs where they have `chat_lengths`.

    `flat`: packs one after the other in a single row, as flash attention wants them; `by_source`: with SOURCE.
    """

    pad_id: int
    flat: bool = False
    by_source: bool = False
    part: int = 0
    """This rank's part of `parts` that rows are divided into, along their tokens."""
    parts: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Tensors by name: input_ids and labels [B, T], and attention_mask or position_ids of the same shape."""
        is_packed = "chat_lengths" in rows[0]
        batch = self._laid({"input_ids": self.pad_id, "labels": MASKED}, rows, flat=self.flat and is_packed)
        if is_packed:
            batch |= self._borders(rows)
        else:
            ones = [{"attention_mask": np.ones(len(row["input_ids"]), dtype=np.int64)} for row in rows]
            batch |= self._laid({"attention_mask": 0}, ones, flat=False)
        if self.by_source:
            marks = [{SOURCE: _sources(row)} for row in rows]
            batch |= self._laid({SOURCE: 0}, marks, flat=self.flat and is_packed)
        return batch if self.parts == 1 else self._part_of(batch)

    def _part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's tokens [B, T / parts] of a batch of rows; the label of a part's last token is the next part's."""
        rows, tokens = batch["input_ids"].shape
        lacking = -tokens % self.parts
        length = (tokens + lacking) // self.parts
        own = slice(self.part * length, (self.part + 1) * length)
        batch["shift_labels"] = _next(batch["labels"], MASKED)
        if SOURCE in batch:
            batch[SOURCE] = _next(batch[SOURCE], 0)
        paddings = {"input_ids": self.pad_id, "labels": MASKED, "shift_labels": MASKED}
        found = {
            name: torch.nn.functional.pad(table, (0, lacking), value=paddings.get(name, 0))[:, own].contiguous()
            for name, table in batch.items()
        }
        found["position_ids"] = torch.arange(own.start, own.stop).expand(rows, -1).contiguous()
        trained = (batch["shift_labels"] != MASKED).any(1).sum() if self.part == 0 else torch.tensor(0)
        counts = (found.pop("attention_mask").sum(), trained)  # a row is counted by the rank of its first part
        return found | dict(zip(COUNTS, counts, strict=True))

    def _borders(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Where chats begin, for the model, and what only the columns know, for the figures."""
        places = [{"position_ids": _restarting(row["chat_lengths"])} for row in rows]
        found = self._laid({"position_ids": 0}, places, flat=self.flat)
        lengths = np.concatenate([row["chat_lengths"] for row in rows])
        if self.flat:
            ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            longest = int(lengths.max())
            found |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        labels = np.concatenate([row["labels"] for row in rows])
        trained = np.add.reduceat(labels != MASKED, np.cumsum(lengths) - lengths)
        counts = (int(lengths.sum()), int((trained > 0).sum()))
        return found | {name: torch.tensor(count) for name, count in zip(COUNTS, counts, strict=True)}

    def _laid(self, paddings: dict[str, int], rows: Sequence[dict[str, Any]], *, flat: bool) -> dict[str, Any]:
        """Columns of rows as tensors: padded at the end to [B, T], or one after the other as [1, N]."""
        found: dict[str, Any] = {}
        for name, padding in paddings.items():
            values = [np.asarray(row[name], dtype=np.int64) for row in rows]
            if flat:
                found[name] = torch.from_numpy(np.concatenate(values)[None])
                continue
            table = np.full((len(values), max(map(len, values))), padding, dtype=np.int64)
            for place, value in zip(table, values, strict=True):
                place[: len(value)] = value
            found[name] = torch.from_numpy(table)
        return found


def _next(table: torch.Tensor, last: int) -> torch.Tensor:
    """For each place [B, T] what stands at the next one; `last` for the last."""
    return torch.nn.functional.pad(table[:, 1:], (0, 1), value=last)


def _restarting(lengths: Any) -> Any:
    """0, 1, 2, … anew for each length."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(np.sum(lengths))) - np.repeat(starts, lengths)


def _sources(row: dict[str, Any]) -> Any:
    """The source of each token: given by token, or for the whole row; chat where the data set does not say."""
    return row["sources"] if "sources" in row else np.full(len(row["input_ids"]), int(row.get(SOURCE) or 0))
