"""What a run hands to Unsloth's process: a document and the rows, in formats that do not depend on package versions.

Everything is decided before: the worker gets token rows with their labels, questions as token ids, and a plan. It
renders no template and masks no token. Both processes run the code of this checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict

from sft_play.runs.files import write_text
from sft_play.training.measure.exact_match import Question

DOCUMENT = "handover.json"
_ROWS_AT_ONCE = 10_000
_COLUMNS = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())])


class Document(BaseModel):
    """All that the worker needs beside the settings and the plan; times are in seconds, `started` since 1970."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    folder: str
    config_path: str
    overrides: list[str]
    config: dict[str, Any]
    plan: dict[str, Any]
    resume: bool
    started: float
    timeout_s: float
    tokenizer: str
    own_template: str | None
    splits: dict[str, str]
    """The file of each split's rows."""
    held_out: str
    asked: list[Question]
    asked_while_training: list[Question]
    stop_ids: list[int]
    model_path: str
    """The folder of the base weights, or their name on the hub."""
    target_modules: list[str]
    tensors: dict[str, list[int]]
    """Name and shape of every tensor that the adapter's file will hold."""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        write_text(path, self.model_dump_json(indent=1) + "\n")


def read(path: Path) -> Document:
    """The document of a file."""
    return Document.model_validate_json(path.read_text(encoding="utf-8"))


def write_rows(dataset: Any, path: Path) -> str:
    """Write a `datasets.Dataset` of token rows as an Arrow stream, which `Dataset.from_file` reads; rows without a
    source are chats. Returns the path."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _COLUMNS) as stream:
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            columns = {name: table[name] for name in table.column_names}
            columns.setdefault("source", pa.array([0] * table.num_rows, type=pa.int8()))
            stream.write_table(pa.table({name: columns[name] for name in _COLUMNS.names}).cast(_COLUMNS))
    return str(path)
