"""What a run hands to Unsloth's process: a document and the rows, in formats that do not depend on package versions.

Everything is decided before: the worker gets token rows with their labels, questions as token ids, and a plan. It
renders no template and masks no token. Both sides check the document; a change of its form needs a new SCHEMA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, ValidationError

from sft_play._version import __version__
from sft_play.errors import BackendError
from sft_play.log import one_line
from sft_play.runs.files import sha256_of, write_text
from sft_play.training.measure.exact_match import Question

SCHEMA = 2
"""The form of the document; the worker refuses any other."""
DOCUMENT = "handover.json"
_ROWS_AT_ONCE = 10_000
_COLUMNS = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())])


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Rows(_Part):
    """A split's rows: an Arrow stream with the columns input_ids, labels and source."""

    file: str
    rows: int
    sha256: str


class Document(_Part):
    """All that the worker needs beside the settings and the plan; times are in seconds, `started` since 1970."""

    schema_version: int
    sft_play: str
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
    splits: dict[str, Rows]
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
    """The document of a file.

    Raises:
        BackendError: it cannot be read, or was written with another schema or by another version of this code.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"{path} cannot be read: {one_line(str(error))}") from None
    schema = data.get("schema_version") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise BackendError(
            f"{path} has schema version {one_line(str(schema))}, but this worker reads {SCHEMA}: start the run again "
            "with one version of sft_play"
        )
    if data.get("sft_play") != __version__:
        raise BackendError(
            f"{path} was written by sft_play {one_line(str(data.get('sft_play')))}, but this is {__version__}"
        )
    try:
        return Document.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BackendError(f"{path}: {place}: {one_line(first['msg'])} ({error.error_count()} such)") from None


def write_rows(dataset: Any, path: Path) -> Rows:
    """Write a `datasets.Dataset` of token rows; rows without a source are chats."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _COLUMNS) as stream:
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            columns = {name: table[name] for name in table.column_names}
            columns.setdefault("source", pa.array([0] * table.num_rows, type=pa.int8()))
            stream.write_table(pa.table({name: columns[name] for name in _COLUMNS.names}).cast(_COLUMNS))
    return Rows(file=str(path), rows=len(dataset), sha256=sha256_of(path))


def read_rows(rows: Rows) -> Any:
    """The rows as a `datasets.Dataset`, memory-mapped.

    Raises:
        BackendError: the file is not the one that was written.
    """
    from datasets import Dataset

    path = Path(rows.file)
    if not path.is_file() or sha256_of(path) != rows.sha256:
        raise BackendError(f"{path} is not what was handed over: it is missing, or was changed since; start again")
    dataset = Dataset.from_file(str(path))
    if len(dataset) != rows.rows:
        raise BackendError(f"{path} holds {len(dataset)} rows, but {rows.rows} were handed over")
    return dataset
