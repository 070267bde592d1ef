"""Token rows in Arrow files: written in batches without a Python object for each token, and cut into blocks.

Columns: `input_ids` and `labels` (lists of int32), `source` (0: chat, 1: text), and where it is kept `chat` (JSON).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from sft_play.data.masks.token_row import CHAT, TokenRow
from sft_play.data.sources.formats import Chat, Example

_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())])
_JSON_ENCODER = json.JSONEncoder(ensure_ascii=False)
_SCHEMA_WITH_CHATS = _SCHEMA.append(pa.field("chat", pa.string()))
# Rows that are written together: so many, or so many tokens.
_BATCH_ROWS, _BATCH_TOKENS = 256, 1 << 18


class RowWriter:
    """Writes token rows to an Arrow stream file; with `keeps_chats` also their conversations (column `chat`)."""

    def __init__(self, path: Path, *, keeps_chats: bool) -> None:
        self.path = path
        self._keeps_chats = keeps_chats
        self._schema = _SCHEMA_WITH_CHATS if keeps_chats else _SCHEMA
        self._pending: list[tuple[TokenRow, Example]] = []
        self._tokens = 0

    def __enter__(self) -> RowWriter:
        self._file = pa.OSFile(str(self.path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._write_batch()
        self._stream.close()
        self._file.close()

    def add(self, row: TokenRow, example: Example) -> None:
        """Add a token row and the example it was made from; a full batch is written at once."""
        self._pending.append((row, example))
        self._tokens += len(row.input_ids)
        if len(self._pending) == _BATCH_ROWS or self._tokens > _BATCH_TOKENS:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self._pending:
            return
        rows = [row for row, _ in self._pending]
        offsets, ids = _concatenate([row.input_ids for row in rows])
        label_offsets, labels = _concatenate([row.labels for row in rows])
        sources = np.array([row.source != CHAT for row in rows], np.int8)
        columns = [_to_list_array(offsets, ids), _to_list_array(label_offsets, labels), _to_arrow(sources)]
        if self._keeps_chats:
            chats = (example if isinstance(example, Chat) else None for _, example in self._pending)
            chat_texts = [
                chat and _JSON_ENCODER.encode([chat.where, chat.messages, chat.tools, chat.template_kwargs])
                for chat in chats
            ]
            columns.append(pa.array(chat_texts, pa.string()))
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._pending, self._tokens = [], 0


def chat_from_json(text: str) -> Chat:
    """Parse a conversation from the `chat` column."""
    location, messages, tools, template_kwargs = json.loads(text)
    return Chat(location, tuple(messages), tuple(tools), template_kwargs=template_kwargs)


def write_blocks(output_path: Path, paths: Sequence[Path], block_size: int, *, keeps_short: bool) -> None:
    """Join documents and cut them into blocks of exactly `block_size` tokens; remove the documents' own files. Tokens
    that fill no block are dropped; with `keeps_short` a text shorter than one block becomes one short block."""
    pending_ids = np.zeros(0, np.int32)
    has_blocks = False
    with pa.OSFile(str(output_path), "wb") as target, pa.ipc.new_stream(target, _SCHEMA) as stream:
        for document_path in paths:
            with pa.memory_map(str(document_path)) as source, pa.ipc.open_stream(source) as documents:
                for batch in documents:
                    ids = batch.column(0)
                    pending_ids = np.concatenate([pending_ids, ids.flatten().to_numpy()])
                    full_size = len(pending_ids) // block_size * block_size
                    if full_size:  # written at once: a corpus of any size is never held in memory
                        stream.write_batch(_make_block_batch(pending_ids[:full_size], block_size))
                        pending_ids, has_blocks = pending_ids[full_size:].copy(), True
            document_path.unlink()
        if not has_blocks and len(pending_ids) and keeps_short:
            stream.write_batch(_make_block_batch(pending_ids, len(pending_ids)))


def _make_block_batch(tokens: Any, block_size: int) -> Any:
    column = _to_list_array(
        np.arange(0, len(tokens) + 1, block_size, dtype=np.int32), np.ascontiguousarray(tokens, np.int32)
    )
    sources = _to_arrow(np.ones(len(tokens) // block_size, np.int8))
    return pa.record_batch([column, column, sources], schema=_SCHEMA)


def _concatenate(token_lists: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Join lists of tokens: their offsets (int32, [lists + 1]) and all tokens (int32, [tokens])."""
    lengths = np.fromiter(map(len, token_lists), np.int32, len(token_lists))
    offsets = np.zeros(len(token_lists) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, np.fromiter(itertools.chain.from_iterable(token_lists), np.int32, int(offsets[-1]))


def _to_arrow(values: Any) -> Any:
    """A numpy array of integers as an Arrow one; `pyarrow.array` would import pandas first, which takes 0.5 s."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _to_list_array(offsets: Any, tokens: Any) -> Any:
    return pa.ListArray.from_arrays(_to_arrow(offsets), _to_arrow(tokens))
