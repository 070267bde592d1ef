"""Tables → rows: CSV and TSV, Parquet, Arrow, folders saved by `datasets`, and data sets of the hub.

All of them are read in batches, so memory stays flat. A row has no key for an empty cell (null).
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft_play.data.sources.raw import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    NOTE_NULLS,
    BadRow,
    RawRow,
    head,
    text_blocks,
    too_large,
)
from sft_play.errors import DataError
from sft_play.facts.models.architecture import is_hub_reachable
from sft_play.log import one_line
from sft_play.process.waiting import waiting

BATCH_ROWS = 1_000
# About so many bytes of a table become Python objects at once.
SLICE_BYTES = 8 << 20
DELIMITERS = ",\t;|"
# a first line with which a table tells Excel its delimiter
_DELIMITER_LINE = re.compile(r"\ufeff?\"?sep=(.)\"?\r?\n", re.IGNORECASE)
# cells that pandas reads as missing (STR_NA_VALUES of pandas 3.1), but for the empty one
NA_WORDS = frozenset(
    {
        *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
        *("NULL", "NaN", "None", "n/a", "nan", "null"),
    }
)

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
_SPLIT_NAME = re.compile(
    rf"(?:(?P<whole>{'|'.join(SPLIT_WORDS)})(?:[-_.]?\d+(?:[-_]of[-_]\d+)?)?|.*[-_.](?P<end>{'|'.join(SPLIT_WORDS)}))"
    r"(?:[-_.]?\d+[-_]of[-_]\d+)?",
    re.IGNORECASE,
)


def split_of_name(name: str) -> str | None:
    """The split that a file or folder of this name (without suffix) holds: train, val, test; None for others. `train`,
    `validation-00000-of-00002`, `gsm8k_test` and `dev` name one; `testimonials` does not."""
    match = _SPLIT_NAME.fullmatch(name)
    word = match and (match["whole"] or match["end"])
    return SPLIT_WORDS[word.lower()] if word else None


def find_delimiter(text: str) -> str:
    """The character between the fields of a table's first line: the one that gives the most fields."""
    first = next((line for line in text.lstrip("\ufeff").splitlines() if line.strip()), "")
    return max(DELIMITERS, key=lambda char: _field_count(first, char))  # of equal counts the first: a comma


def _field_count(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter)))
    except (csv.Error, StopIteration):
        return 0


def read_csv(path: Path, name: str) -> Iterator[RawRow | BadRow]:
    """The rows of a table with a header line; a row knows the line on which it begins. Raises DataError where the
    header is no good, a quote is not closed, or a byte is not UTF-8."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; by default 131,072 characters, less than some answers
    lines = _TextLines(path)
    start = head(path).decode("utf-8", "ignore")
    says = _DELIMITER_LINE.match(start)
    before = len(list(itertools.islice(lines, 1))) if says else 0
    reader = csv.reader(lines, delimiter=says[1] if says else find_delimiter(start), strict=True)
    names: list[str] | None = None
    while True:
        line = before + reader.line_num + 1
        lines.where, lines.taken = f"{name}:{line}", 0
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "unexpected end of data" in str(error) or "field larger" in str(error):
                raise _never_closed(f"{name}:{line}") from None
            yield BadRow(f"{name}:{line}", "not valid CSV", str(error))
            continue
        # a blank line is [], a line of one empty quoted field [""], which may be a row of a table of one column
        if not fields or (fields == [""] and (names is None or len(names) > 1)):
            continue
        if names is None:
            names = _header(fields, path, line)
        elif len(fields) != len(names):
            detail = f"the header names {len(names)}; is a quote or a delimiter missing?"
            yield BadRow(f"{name}:{line}", f"{len(fields)} fields instead of {len(names)}", detail)
        else:
            data = {key: field for key, field in zip(names, fields, strict=True) if key}
            missing = () if NA_WORDS.isdisjoint(fields) else (key for key, field in data.items() if field in NA_WORDS)
            yield RawRow(f"{name}:{line}", data, missing=tuple(missing))
    if names is None:
        raise DataError(f"{path} has no rows: the file is blank")


def _header(fields: list[str], path: Path, line: int) -> list[str]:
    """The column names; the first may be empty (pandas writes its index so), and rows leave that column out."""
    names = [field.strip() for field in fields]
    for number, name in enumerate(names):
        if not name and number:
            raise DataError(f"{path}:{line}: column {number + 1} of the header has no name")
        if names.count(name) > 1:
            raise DataError(f'{path}:{line}: the header names the column "{one_line(name, limit=60)}" twice')
    return names


def _never_closed(where: str) -> DataError:
    return DataError(
        f"{where}: a quote opened in this row is not closed, or the row is larger than {MAX_ROW_BYTES >> 20} "
        "MiB, the most that is read"
    )


class _TextLines:
    """The lines of a file for the csv module; DataError where a row is too large: an open quote takes all the rest."""

    def __init__(self, path: Path) -> None:
        start = head(path)
        self._ends_with_cr = b"\r" in start and b"\n" not in start
        self._lines = self._read(path)
        # The row that is read, and how many characters of it were.
        self.where, self.taken = str(path), 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.taken += len(line)
        if self.taken > MAX_ROW_BYTES:  # characters, which are never more than bytes
            raise _never_closed(self.where)
        return line

    def _read(self, path: Path) -> Iterator[str]:
        rest = ""
        for text in text_blocks(path):
            # not splitlines(): U+2028 and others inside fields end no row
            *lines, rest = (rest + (text.replace("\r", "\n") if self._ends_with_cr else text)).split("\n")
            yield from (line + "\n" for line in lines)
            if len(rest) > MAX_ROW_BYTES:
                raise DataError(str(too_large(self.where, len(rest.encode()))))
        if rest:
            yield rest


@contextmanager
def _reading(path: Path | str, kind: str) -> Iterator[None]:
    """Turns whatever pyarrow, datasets and the hub raise into a DataError; `kind` cannot be read, or is `hub:`."""
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        why = f"{path} is {kind} that cannot be read: {one_line(str(error), limit=200)}"
        if kind == HUB:
            fetch = f"hf download {hub_parts(str(path))[0]} --repo-type dataset --local-dir data/raw/"
            why = (
                f"{one_line(str(path))} cannot be read: {one_line(str(error), limit=300)}; check the spelling; without "
                "a connection (or with HF_HUB_OFFLINE) only this machine's cache is read; a gated one needs hf auth "
                f"login; or fetch its files and name the folder: {fetch}"
            )
        raise DataError(why) from error


def parquet_groups(path: Path) -> list[int]:
    """Rows of each row group of a Parquet file."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    with _reading(path, "Parquet"):
        meta = pyarrow.parquet.read_metadata(path)
        return [meta.row_group(index).num_rows for index in range(meta.num_row_groups)]


def _rows_at_once(total_bytes: int, rows: int) -> int:
    return max(1, min(BATCH_ROWS, SLICE_BYTES * rows // max(1, total_bytes)))


def read_parquet(path: Path, name: str, *, start: int, end: int | None, first_row: int) -> Iterator[RawRow | BadRow]:
    """The rows of the row groups [start, end) of a Parquet file."""
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        # pages are read as they are needed: neither the whole group at once, nor through a mapping of the file, whose
        # pages count as memory of this process
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES) as file:
            groups = list(range(file.num_row_groups))[start:end]
            for group in groups:
                meta = file.metadata.row_group(group)
                rows = _rows_at_once(meta.total_byte_size, meta.num_rows)
                yield from file.iter_batches(batch_size=rows, row_groups=[group])

    yield from _from_batches(batches(), str(path), name, "Parquet", first_row)


def read_arrow(path: Path, name: str, *, is_stream: bool) -> Iterator[RawRow | BadRow]:
    """The rows of an Arrow (Feather 2) file or stream."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
            of_file = () if is_stream else (reader.get_batch(at) for at in range(reader.num_record_batches))
            for batch in reader if is_stream else of_file:
                batch.validate(full=True)  # a damaged offset would be read behind the file, and end the process
                yield batch

    yield from _from_batches(batches(), str(path), name, "Arrow", 1)


def _from_batches(
    batches: Iterable[Any], path: Path | str, name: str, kind: str, first: int
) -> Iterator[RawRow | BadRow]:
    number = first - 1
    iterator = iter(batches)
    while True:
        with _reading(path, kind):  # around reading alone: a fault of our own below keeps its traceback
            batch = next(iterator, None)
        if batch is None:
            return
        names = batch.schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f'{path} has the column "{one_line(twice, limit=60)}" twice')
        for piece in _slices(batch):
            with _reading(f"{path}:row {number + 1} or one of the {BATCH_ROWS:,} after it", kind):
                rows = piece.to_pylist()
            is_large = piece.nbytes > MAX_ROW_BYTES
            for row in rows:
                number += 1
                size = _text_bytes(row) if is_large else 0  # a piece below the limit holds no row above it
                if size > MAX_ROW_BYTES:
                    yield too_large(f"{name}:row {number}", size)
                else:
                    yield _table_row(row, f"{name}:row {number}")


def _slices(batch: Any) -> Iterator[Any]:
    """A batch in pieces that become few objects at once: of about SLICE_BYTES, or single rows."""
    if batch.num_rows > BATCH_ROWS or (batch.num_rows > 1 and batch.nbytes > SLICE_BYTES):
        half = batch.num_rows // 2
        yield from _slices(batch.slice(0, half))
        yield from _slices(batch.slice(half))
    elif batch.num_rows:
        yield batch


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, (list, tuple)) else 0


class _NotText(ValueError):
    """Bytes in a cell that are not UTF-8."""


def _table_row(row: dict[str, Any], where: str) -> RawRow | BadRow:
    """The row without its nulls: Arrow gives every row every column, and a key says that something is there."""
    left_out = [0]
    try:
        cells = {str(key): _cell(value, key, left_out) for key, value in row.items()}
    except _NotText:
        return BadRow(where, "a cell holds bytes that are not UTF-8 text")
    except RecursionError:
        return BadRow(where, "nested too deeply")
    notes = (NOTE_NULLS,) if left_out[0] else ()
    return RawRow(where, {key: value for key, value in cells.items() if value is not None}, notes)


_CALL_KEYS = frozenset({"tool_calls", "function_call", "tools", "functions", "chat_template_kwargs"})
_CALL_PARTS = frozenset({"tool_call", "function_call"})


def _cell(value: Any, key: Any, left_out: list[int], *, is_call: bool = False) -> Any:
    """A table's value as one that JSON has; NaN, which tables write for "nothing", is null. Tool calls and tools lose
    their keys with null, which are counted: a table gives every object of a column the keys of all the others."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    is_call = is_call or key in _CALL_KEYS
    if isinstance(value, (list, tuple)):
        return [_cell(item, None, left_out, is_call=is_call) for item in value]
    if isinstance(value, dict):
        is_call = is_call or (isinstance(value.get("type"), str) and value["type"] in _CALL_PARTS)
        items = {str(name): _cell(item, name, left_out, is_call=is_call) for name, item in value.items()}
        kept = {name: item for name, item in items.items() if item is not None} if is_call else items
        left_out[0] += len(items) - len(kept)
        return kept
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            raise _NotText from None
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)


def split_names(given: str, *, on_hub: bool) -> list[str]:
    """The names of the splits of a folder saved by `datasets`, or of a data set of the hub; none for a single table."""
    loaded = _load_hub(given) if on_hub else _load_saved(given)
    return [str(name) for name in loaded] if isinstance(loaded, dict) else []


def read_saved(given: str, name: str, split: str) -> Iterator[RawRow | BadRow]:
    """The rows of one split of a folder saved by `datasets`; raises DataError where it has no such split."""
    loaded = _load_saved(given)
    if isinstance(loaded, dict):
        chosen = choose_split([str(known) for known in loaded], split, given)
        loaded, name = loaded[chosen], f"{name}:{chosen}"
    if "Json" in str(loaded.features):  # datasets decodes this feature; its Arrow column holds text
        with _reading(given, "a saved dataset"):
            yield from _from_dicts(loaded, name)
        return
    rows = _rows_at_once(loaded.data.nbytes, loaded.data.num_rows)
    # as Arrow, since datasets would decode every row by its features (images, audio)
    batches = loaded.with_format("arrow").iter(batch_size=rows)
    yield from _from_batches(batches, given, name, "a saved dataset", 1)


def _load_saved(given: str) -> Any:
    import datasets

    with _reading(given, "a saved dataset"):
        return datasets.load_from_disk(str(Path(given).expanduser()))


def choose_split(names: list[str], split: str, path: str) -> str:
    """Which of a data set's splits is train, val or test, or has that very name; raises DataError where none or several
    may."""
    wanted = {"train": ("train",), "val": ("validation", "val", "valid", "dev"), "test": ("test",)}.get(split, ())
    exact = next((name for name in (split, *wanted) if name in names), None)  # plain names before likenesses
    if exact is not None:
        return exact
    like = [  # `gsm8k_test`, or a name that begins with a split's, as `train_sft`
        name for name in names if (split_of_name(name) or SPLIT_WORDS.get(re.split(r"[-_.]", name.lower())[0])) == split
    ]
    if len(like) == 1:
        return like[0]
    there = ", ".join(one_line(name, limit=60) for name in names)
    if like:
        raise DataError(f"{path} has the splits {there}; several could be {split}: {', '.join(like)}")
    raise DataError(f"{path} has the splits {there}; none of them is {wanted[0] if wanted else split}")


HUB = "hub:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def hub_parts(given: str) -> tuple[str, str | None]:
    """The id and the config of `hub:owner/name` or `hub:owner/name:config`; raises DataError where it has another form,
    or a folder of that name lies here."""
    ident, _, config = given.removeprefix(HUB).partition(":")
    if not _HUB_ID.fullmatch(ident):
        raise DataError(f"{one_line(given)}: a data set of the hub is written hub:owner/name or hub:owner/name:config")
    # datasets.load_dataset takes a local folder of that name before the hub's
    if Path(ident).exists():
        raise DataError(f"{one_line(given)}: {ident} exists here too, and datasets would read it; write the path")
    return ident, config or None


def read_hub(given: str, split: str) -> Iterator[RawRow | BadRow]:
    """The rows of one split of a data set of the hub, streamed; from the cache where HF_HUB_OFFLINE is set."""
    loaded = _load_hub(given)
    if isinstance(loaded, dict):
        loaded = loaded[choose_split([str(known) for known in loaded], split, given)]
    with _reading(given, HUB):
        yield from _from_dicts(loaded, f"{given}:{split}")


def _load_hub(given: str) -> Any:
    if not is_hub_reachable():  # before the import, which reads it: the library would try again for half a minute
        os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    ident, config = hub_parts(given)
    with _reading(given, HUB), waiting(f"Asking the hub for the data set {ident}"):
        return datasets.load_dataset(ident, config, streaming=not datasets.config.HF_HUB_OFFLINE)


def _from_dicts(rows: Iterable[Any], name: str) -> Iterator[RawRow | BadRow]:
    for number, row in enumerate(rows, start=1):
        yield _table_row(dict(row), f"{name}:row {number}")
