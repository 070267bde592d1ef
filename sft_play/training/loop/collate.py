"""Rows → the tensors of a micro-batch.

Rows of one chat are padded to the longest, with an attention mask where one changes anything (`proofs.masking`), else
with positions. Packs get position ids that restart with every chat, of which transformers makes a mask between them;
flash attention finds such borders only in a batch of one row, so packs are joined to one for it.

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
COUNTS = ("token_count", "sample_count")
# Key of rows, and of joined batches: tokens of each chat. Of a batch they are numbers of the host, which no library
# moves to a device.
CHAT_LENGTHS = "chat_lengths"
# Key of a batch that the model is not given: the source of each token [B, T].
SOURCE = "source"


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches of rows, or of packs if they have `chat_lengths`. `flat`: join packs to a single row, as
    flash attention needs; `by_source`: add SOURCE."""

    pad_id: int
    flat: bool = False
    by_source: bool = False
    masks: bool = True
    """Whether rows of one chat get a mask. Without one they get positions, which run on through the padding: TRL and
    transformers ask for one of the two."""
    tells_lengths: bool = False
    """Whether joined rows come with CHAT_LENGTHS, which this toolkit's own attention reads and no other."""
    row_tokens: int = 0
    """Packs are padded to this many tokens at least, so that all batches have one shape."""
    part: int = 0
    """Which of `parts` is this rank's; rows are divided along their tokens."""
    parts: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Tensors by name: input_ids and labels [B, T], and attention_mask or position_ids of the same shape; of rows
        without a mask position_ids [1, T]; none without rows."""
        if not rows:
            return {}
        is_packed = CHAT_LENGTHS in rows[0]
        least, flat = self.row_tokens if is_packed else 0, self.flat and is_packed
        batch = self._tensors({"input_ids": self.pad_id, "labels": IGNORED}, rows, flat=flat, least=least)
        if is_packed:
            batch |= self._borders(rows)
        elif not self.masks and self.parts == 1:
            # one row of them, as a model makes its own: rotations are then computed once
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
            trained = sum(bool((np.asarray(row["labels"]) != IGNORED).any()) for row in rows)
            counts = (sum(len(row["input_ids"]) for row in rows), trained)
            batch |= {name: torch.tensor(count) for name, count in zip(COUNTS, counts, strict=True)}
        else:
            ones = [{"attention_mask": np.ones(len(row["input_ids"]), dtype=np.int64)} for row in rows]
            batch |= self._tensors({"attention_mask": 0}, ones, flat=False)
        if self.by_source:
            marks = [{SOURCE: _sources(row)} for row in rows]
            batch |= self._tensors({SOURCE: 0}, marks, flat=flat, least=least)
        return batch if self.parts == 1 else self._part_of(batch)

    def _part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's tokens [B, T / parts] of a batch of rows. A part's last token predicts the first of the next."""
        rows, tokens = batch["input_ids"].shape
        lacking = -tokens % self.parts
        length = (tokens + lacking) // self.parts
        own = slice(self.part * length, (self.part + 1) * length)
        # shifted before the cut: transformers would shift inside each part, and lose the label at its end
        batch["shift_labels"] = _next(batch["labels"], IGNORED)
        if SOURCE in batch:
            batch[SOURCE] = _next(batch[SOURCE], 0)
        paddings = {"input_ids": self.pad_id, "labels": IGNORED, "shift_labels": IGNORED}
        tensors = {
            name: torch.nn.functional.pad(table, (0, lacking), value=paddings.get(name, 0))[:, own].contiguous()
            for name, table in batch.items()
        }
        tensors["position_ids"] = torch.arange(own.start, own.stop).expand(rows, -1).contiguous()
        trained = (batch["shift_labels"] != IGNORED).any(1).sum() if self.part == 0 else torch.tensor(0)
        counts = (tensors.pop("attention_mask").sum(), trained)  # a row is counted by the rank of its first part
        return tensors | dict(zip(COUNTS, counts, strict=True))

    def _borders(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Where chats begin, for the model, and the counts of `COUNTS`, for the figures."""
        positions = [{"position_ids": np.concatenate(list(map(np.arange, row[CHAT_LENGTHS])))} for row in rows]
        tensors = self._tensors({"position_ids": 0}, positions, flat=self.flat, least=self.row_tokens)
        lengths = np.concatenate([row[CHAT_LENGTHS] for row in rows])
        if self.flat:  # what transformers passes on to flash_attn_varlen_func; it wants int32
            ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            longest = int(lengths.max())
            tensors |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
            if self.tells_lengths:
                tensors[CHAT_LENGTHS] = tuple(lengths.tolist())
        labels = np.concatenate([row["labels"] for row in rows])
        trained = np.add.reduceat(labels != IGNORED, np.cumsum(lengths) - lengths)
        counts = (int(lengths.sum()), int((trained > 0).sum()))
        return tensors | {name: torch.tensor(count) for name, count in zip(COUNTS, counts, strict=True)}

    def _tensors(
        self, paddings: dict[str, int], rows: Sequence[dict[str, Any]], *, flat: bool, least: int = 0
    ) -> dict[str, Any]:
        """Columns of rows as tensors: padded at the end to [B, T], T not below `least`, or joined to [1, N]."""
        tensors: dict[str, Any] = {}
        for name, padding in paddings.items():
            values = [np.asarray(row[name], dtype=np.int64) for row in rows]
            if flat:
                tensors[name] = torch.from_numpy(np.concatenate(values)[None])
                continue
            table = np.full((len(values), max(least, *map(len, values))), padding, dtype=np.int64)
            for place, value in zip(table, values, strict=True):
                place[: len(value)] = value
            tensors[name] = torch.from_numpy(table)
        return tensors


def parts_of(batch: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """A batch of several rows in parts of at most `rows`; what it has once stays whole in each."""
    count = len(batch["labels"])

    def part(value: Any, first: int) -> Any:
        is_by_row = isinstance(value, torch.Tensor) and value.dim() and len(value) == count
        return value[first : first + rows] if is_by_row else value

    starts = range(0, count, rows)
    return [{name: part(value, first) for name, value in batch.items()} for first in starts]


def _next(table: torch.Tensor, last: int) -> torch.Tensor:
    """The value of the next place, for each place [B, T]; `last` for the last."""
    return torch.nn.functional.pad(table[:, 1:], (0, 1), value=last)


def _sources(row: dict[str, Any]) -> Any:
    """The source of each token: by token, or one for the whole row; 0 (chat) where the data set has none."""
    return row["sources"] if "sources" in row else np.full(len(row["input_ids"]), int(row.get(SOURCE) or 0))
