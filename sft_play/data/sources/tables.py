"""Tables → rows: CSV and TSV, Parquet, Arrow, folders saved by `datasets`, and data sets of the
hub.

All of them are read in batches, so memory stays flat. A row has no key for an empty cell (null).
"""

import csv
import datetime
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft_play.data.sources.image_files import image_format
from sft_play.data.sources.messages import CALL_PART_TYPES, iter_texts
from sft_play.data.sources.raw import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    NOTE_NULLS,
    BadRow,
    RawRow,
    read_head,
    read_text_blocks,
    too_large_row,
)
from sft_play.data.sources.row_images import ROW_IMAGE_COLUMNS
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.models.config_json import is_hub_reachable
from sft_play.process.waiting import report_wait

BATCH_ROWS = 1_000
# About so many bytes of a table become Python objects at once.
SLICE_BYTES = 8 << 20
# a first line with which a table tells Excel its delimiter
_DELIMITER_LINE = re.compile(r"\ufeff?\"?sep=(.)\"?\r?\n", re.IGNORECASE)
# cells that pandas reads as missing (STR_NA_VALUES of pandas 3.1), but for the empty one
NA_WORDS = frozenset(
    {
        *(
            "#N/A",
            "#N/A N/A",
            "#NA",
            "-1.#IND",
            "-1.#QNAN",
            "-NaN",
            "-nan",
            "1.#IND",
            "1.#QNAN",
            "<NA>",
            "N/A",
            "NA",
        ),
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


def split_from_name(name: str) -> str | None:
    """The split that a file or folder of this name (without suffix) holds: train, val, test; None
    for others. `train`, `validation-00000-of-00002`, `gsm8k_test` and `dev` name one;
    `testimonials` does not."""
    match = _SPLIT_NAME.fullmatch(name)
    word = match and (match["whole"] or match["end"])
    return SPLIT_WORDS[word.lower()] if word else None


def split_from_set_name(name: str) -> str | None:
    """The split that a split of a data set is, by its name; it may be the first word too, as in
    `train_sft`."""
    return split_from_name(name) or SPLIT_WORDS.get(re.split(r"[-_.]", name.lower())[0])


def read_csv(path: Path, name: str) -> Iterator[RawRow | BadRow]:
    """The rows of a table with a header line; a row knows the line on which it begins. Raises
    DataError where the header is no good, a quote is not closed, or a byte is not UTF-8."""
    # of the whole process; by default 131,072 characters, less than some answers
    csv.field_size_limit(MAX_ROW_BYTES)
    file_lines, skipped_lines, row_chars = _read_table_lines(path, name), 0, 0

    def lines_of_rows() -> Iterator[str]:
        nonlocal row_chars
        for text in file_lines:
            row_chars += len(text)
            # csv limits each field: a row of many, over many lines, would be held whole
            if row_chars > MAX_ROW_BYTES:  # characters, which are never more than bytes
                raise csv.Error("row larger than the limit")
            yield text

    beginning = read_head(path).decode("utf-8", "ignore")
    first = next((line for line in beginning.lstrip("\ufeff").splitlines() if line.strip()), "")
    # the one that gives the most fields; of equal counts the first: a comma
    delimiter = max(",\t;|", key=lambda char: len(next(csv.reader([first], delimiter=char), [])))
    if delimiter_match := _DELIMITER_LINE.match(beginning):
        delimiter, skipped_lines = delimiter_match[1], 1
        next(file_lines)
    reader = csv.reader(lines_of_rows(), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        line, row_chars = skipped_lines + reader.line_num + 1, 0
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "unexpected end of data" in str(error) or "larger than" in str(error):
                raise DataError(
                    f"{name}:{line}: a quote opened in this row is not closed, or the row is larger"
                    f" than {MAX_ROW_BYTES >> 20} MiB, the most that is read"
                ) from None
            yield BadRow(f"{name}:{line}", "not valid CSV", str(error))
            continue
        # a blank line is [], a line of one empty quoted field [""], which may be a row of a table
        # of one column
        if not fields or (fields == [""] and (names is None or len(names) > 1)):
            continue
        if names is None:
            # the first name may be empty (pandas writes its index so): rows leave that column out
            names = [field.strip() for field in fields]
            for index, column in enumerate(names):
                if not column and index:
                    raise DataError(f"{path}:{line}: column {index + 1} of the header has no name")
                if names.count(column) > 1:
                    raise DataError(
                        f'{path}:{line}: the header names the column "{one_line(column, limit=60)}"'
                        " twice"
                    )
        elif len(fields) != len(names):
            yield BadRow(
                f"{name}:{line}",
                f"{len(fields)} fields instead of {len(names)}",
                f"the header names {len(names)}; is a quote or a delimiter missing?",
            )
        else:
            data = {key: field for key, field in zip(names, fields, strict=True) if key}
            yield RawRow(
                f"{name}:{line}",
                data,
                missing=tuple(key for key, field in data.items() if field in NA_WORDS),
            )
    if names is None:
        raise DataError(f"{path} has no rows: the file is blank")


# A line is never held beyond the limit of a row: csv would take all of it first.
def _read_table_lines(path: Path, name: str) -> Iterator[str]:
    beginning = read_head(path)
    ends_with_cr = b"\r" in beginning and b"\n" not in beginning
    open_line, line_number = "", 1
    for text in read_text_blocks(path):
        # not splitlines(): U+2028 and others inside fields end no row
        if ends_with_cr:
            text = text.replace("\r", "\n")
        *lines, open_line = (open_line + text).split("\n")
        yield from (line + "\n" for line in lines)
        line_number += len(lines)
        if len(open_line) > MAX_ROW_BYTES:
            raise DataError(str(too_large_row(f"{name}:{line_number}", len(open_line.encode()))))
    if open_line:
        yield open_line


# Whatever pyarrow, datasets and the hub raise becomes a DataError; `kind` cannot be read, or is
# `hub:`.
@contextmanager
def _convert_read_errors(path: Path | str, kind: str) -> Iterator[None]:
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:
        message = f"{path} is {kind} that cannot be read: {one_line(str(error), limit=200)}"
        if kind == HUB_PREFIX:
            command = (
                f"hf download {parse_hub_name(str(path))[0]} --repo-type dataset --local-dir"
                " data/raw/"
            )
            message = (
                f"{one_line(str(path))} cannot be read: {one_line(str(error), limit=300)}; check"
                " the spelling; without a connection (or with HF_HUB_OFFLINE) only this machine's"
                " cache is read; a gated one needs hf auth login; or fetch its files and name the"
                f" folder: {command}"
            )
        raise DataError(message) from error


def parquet_group_rows(path: Path) -> list[int]:
    """Rows of each row group of a Parquet file."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    with _convert_read_errors(path, "Parquet"):
        meta = pyarrow.parquet.read_metadata(path)
        return [meta.row_group(index).num_rows for index in range(meta.num_row_groups)]


def _batch_rows(total_bytes: int, rows: int) -> int:
    return max(1, min(BATCH_ROWS, SLICE_BYTES * rows // max(1, total_bytes)))


def read_parquet(
    path: Path, name: str, *, start: int, end: int | None, first_row: int
) -> Iterator[RawRow | BadRow]:
    """The rows of the row groups [start, end) of a Parquet file."""
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        # pages are read as they are needed: neither the whole group at once, nor through a mapping
        # of the file, whose pages count as memory of this process
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES) as file:
            for group in range(file.num_row_groups)[start:end]:
                meta = file.metadata.row_group(group)
                rows = _batch_rows(meta.total_byte_size, meta.num_rows)
                yield from file.iter_batches(batch_size=rows, row_groups=[group])

    yield from _read_batches(batches(), str(path), name, "Parquet", first_row)


def read_arrow(path: Path, name: str, *, is_stream: bool) -> Iterator[RawRow | BadRow]:
    """The rows of an Arrow (Feather 2) file or stream."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as source:
            if is_stream:
                reader = pa.ipc.open_stream(source)
            else:
                file = pa.ipc.open_file(source)
                reader = map(file.get_batch, range(file.num_record_batches))
            for batch in reader:
                # a damaged offset would be read behind the file, and end the process
                batch.validate(full=True)
                yield batch

    yield from _read_batches(batches(), str(path), name, "Arrow", 1)


def _read_batches(
    batches: Iterator[Any], path: Path | str, name: str, kind: str, first_row: int
) -> Iterator[RawRow | BadRow]:
    row_number = first_row - 1
    while True:
        # around reading alone: a fault of our own below keeps its traceback
        with _convert_read_errors(path, kind):
            batch = next(batches, None)
        if batch is None:
            return
        names = batch.schema.names
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise DataError(f'{path} has the column "{one_line(duplicate, limit=60)}" twice')
        for piece in _split_batch(batch):
            with _convert_read_errors(
                f"{path}:row {row_number + 1} or one of the {BATCH_ROWS:,} after it", kind
            ):
                rows = piece.to_pylist()
            for row in rows:
                row_number += 1
                location = f"{name}:row {row_number}"
                size = 0
                if piece.nbytes > MAX_ROW_BYTES:  # a smaller piece holds no row above the limit
                    size = sum(len(text.encode("utf-8", "replace")) for text in iter_texts(row))
                yield (
                    too_large_row(location, size)
                    if size > MAX_ROW_BYTES
                    else _to_raw_row(row, location)
                )


# Pieces of about SLICE_BYTES, or single rows: few objects at once.
def _split_batch(batch: Any) -> Iterator[Any]:
    if batch.num_rows > BATCH_ROWS or (batch.num_rows > 1 and batch.nbytes > SLICE_BYTES):
        half = batch.num_rows // 2
        yield from _split_batch(batch.slice(0, half))
        yield from _split_batch(batch.slice(half))
    elif batch.num_rows:
        yield batch


def _to_raw_row(row: dict[str, Any], location: str) -> RawRow | BadRow:
    # without its nulls: Arrow gives every row every column, and a key says that something is there
    dropped_nulls = [0]
    try:
        cells = {str(key): _to_json_value(value, key, dropped_nulls) for key, value in row.items()}
    except UnicodeDecodeError:
        return BadRow(location, "a cell holds bytes that are not UTF-8 text")
    except RecursionError:
        return BadRow(location, "nested too deeply")
    return RawRow(
        location,
        {key: value for key, value in cells.items() if value is not None},
        (NOTE_NULLS,) if dropped_nulls[0] else (),
    )


_CALL_KEYS = frozenset(
    {"tool_calls", "function_call", "tools", "functions", "chat_template_kwargs"}
)


# NaN, which tables write for "nothing", is null. Tool calls and tools lose their keys with null,
# which are counted: a table gives every object of a column the keys of all the others.
def _to_json_value(value: Any, key: Any, dropped_nulls: list[int], *, is_call: bool = False) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    is_call = is_call or key in _CALL_KEYS
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item, key, dropped_nulls, is_call=is_call) for item in value]
    if isinstance(value, dict):
        is_call = is_call or (
            isinstance(value.get("type"), str) and value["type"] in CALL_PART_TYPES
        )
        items = {
            str(name): _to_json_value(item, name, dropped_nulls, is_call=is_call)
            for name, item in value.items()
        }
        if is_call:
            dropped_nulls[0] += sum(item is None for item in items.values())
            items = {name: item for name, item in items.items() if item is not None}
        return items
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value)
        if key == "bytes" or key in ROW_IMAGE_COLUMNS:  # the first as `datasets` has them
            return value
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            if image_format(value):
                return value
            raise
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)


def list_split_names(source: str, *, is_on_hub: bool) -> list[str]:
    """The names of the splits of a folder saved by `datasets`, or of a data set of the hub; none
    for a single table."""
    loaded = _load_hub(source) if is_on_hub else _load_saved_dataset(source)
    return [str(name) for name in loaded] if isinstance(loaded, dict) else []


def read_saved_dataset(path: str, name: str, split: str) -> Iterator[RawRow | BadRow]:
    """The rows of one split of a folder saved by `datasets`; raises DataError where it has no such
    split."""
    loaded = _load_saved_dataset(path)
    if isinstance(loaded, dict):
        split_name = choose_split([*map(str, loaded)], split, path)
        loaded, name = loaded[split_name], f"{name}:{split_name}"
    if "Json" in str(loaded.features):  # datasets decodes this feature; its Arrow column holds text
        with _convert_read_errors(path, "a saved dataset"):
            yield from _read_dicts(_without_decoding(loaded), name)
        return
    rows = _batch_rows(loaded.data.nbytes, loaded.data.num_rows)
    # as Arrow, since datasets would decode every row by its features (images, audio)
    batches = loaded.with_format("arrow").iter(batch_size=rows)
    yield from _read_batches(batches, path, name, "a saved dataset", 1)


def _load_saved_dataset(path: str) -> Any:
    import datasets

    with _convert_read_errors(path, "a saved dataset"):
        return datasets.load_from_disk(str(Path(path).expanduser()))


def choose_split(names: list[str], split: str, path: str) -> str:
    """Which of a data set's splits is train, val or test, or has that very name; raises DataError
    where none or several may."""
    aliases = {
        "train": ("train",),
        "val": ("validation", "val", "valid", "dev"),
        "test": ("test",),
    }.get(split, ())
    # plain names before likenesses
    exact = next((name for name in (split, *aliases) if name in names), None)
    if exact is not None:
        return exact
    similar = [name for name in names if split_from_set_name(name) == split]
    if len(similar) == 1:
        return similar[0]
    problem = f"none of them is {(*aliases, split)[0]}"
    if similar:
        problem = f"several could be {split}: {', '.join(similar)}"
    raise DataError(
        f"{path} has the splits {', '.join(one_line(name, limit=60) for name in names)}; {problem}"
    )


HUB_PREFIX = "hub:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def parse_hub_name(hub_name: str) -> tuple[str, str | None]:
    """The id and the config of `hub:owner/name` or `hub:owner/name:config`; raises DataError where
    it has another form, or a folder of that name lies here."""
    repo_id, _, config = hub_name.removeprefix(HUB_PREFIX).partition(":")
    if not _HUB_ID.fullmatch(repo_id):
        raise DataError(
            f"{one_line(hub_name)}: a data set of the hub is written hub:owner/name or"
            " hub:owner/name:config"
        )
    # datasets.load_dataset takes a local folder of that name before the hub's
    if Path(repo_id).exists():
        raise DataError(
            f"{one_line(hub_name)}: {repo_id} exists here too, and datasets would read it; write"
            " the path"
        )
    return repo_id, config or None


def read_hub(hub_name: str, split: str) -> Iterator[RawRow | BadRow]:
    """The rows of one split of a data set of the hub, streamed; from the cache where HF_HUB_OFFLINE
    is set."""
    loaded = _load_hub(hub_name)
    if isinstance(loaded, dict):
        loaded = loaded[choose_split([*map(str, loaded)], split, hub_name)]
    with _convert_read_errors(hub_name, HUB_PREFIX):
        yield from _read_dicts(_without_decoding(loaded), f"{hub_name}:{split}")


def _load_hub(hub_name: str) -> Any:
    # before the import, which reads it: the library would try again for half a minute
    if not is_hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    repo_id, config = parse_hub_name(hub_name)
    with (
        _convert_read_errors(hub_name, HUB_PREFIX),
        report_wait(f"Asking the hub for the data set {repo_id}"),
    ):
        return datasets.load_dataset(repo_id, config, streaming=not datasets.config.HF_HUB_OFFLINE)


# Images as their files, not as pixels; a data set of unknown columns has none that are decoded.
def _without_decoding(loaded: Any) -> Any:
    import datasets

    if "Image(" not in str(getattr(loaded, "features", None)):
        return loaded
    is_streamed = isinstance(loaded, datasets.IterableDataset)
    return (loaded if is_streamed else loaded.to_iterable_dataset()).decode(False)


def _read_dicts(rows: Iterable[Any], name: str) -> Iterator[RawRow | BadRow]:
    for row_number, row in enumerate(rows, start=1):
        yield _to_raw_row(dict(row), f"{name}:row {row_number}")
