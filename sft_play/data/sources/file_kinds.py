"""What a data file is: its content decides; its name only between kinds that the content could be."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sft_play.data.sources import json_rows
from sft_play.data.sources.raw import (
    BOM,
    GZIP_MARK,
    BadRow,
    RawRow,
    is_gzipped,
    read_blocks,
    read_head,
    wide_encoding_error,
)
from sft_play.errors import DataError
from sft_play.log import one_line

# Names of plain text; any other file whose content does not begin like JSON is text only where text is asked.
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
ARROW_SUFFIXES = frozenset({".parquet", ".pq", ".arrow", ".feather", ".ipc"})
ROW_FILE_SUFFIXES = JSON_SUFFIXES | TABLE_SUFFIXES | ARROW_SUFFIXES

_BINARY_SIGNATURES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow stream"}
_UNREADABLE_SIGNATURES = {
    b"PK\x03\x04": "a zip archive or an Office file: unpack it, or save the sheet as CSV (UTF-8)",
    b"BZh": "compressed with bzip2: bunzip2",
    b"\xfd7zXZ": "compressed with xz: unxz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unzstd",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"FEA1": "Feather 1, which nothing reads any more: write it with pyarrow.feather.write_feather(version=2)",
    b"%PDF": "a PDF document: make dapt-docx turns documents into text",
    b"SQLite format 3": "an SQLite database: write the table as CSV or JSONL",
    b"\x89HDF": "HDF5: write it as Parquet (pandas: to_parquet)",
    b"\x80\x04\x95": "a Python pickle, which is not read: it could run code; write it as JSONL",
    b"\x80\x05\x95": "a Python pickle, which is not read: it could run code; write it as JSONL",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: git lfs pull",
    GZIP_MARK: "gzipped twice: gunzip it once",
}


def file_kind(path: Path, *, wants_text: bool = False) -> str:
    """What a file is: lines, objects, array, csv, parquet, arrow, arrow stream or text, by its content; by its name
    only between kinds that the content could be. Raises DataError where it is empty, or of no kind that can be read."""
    beginning = read_head(path)
    binary_kind = next(
        (kind for signature, kind in _BINARY_SIGNATURES.items() if beginning.startswith(signature)), None
    )
    if binary_kind is not None:
        if is_gzipped(path):  # pyarrow seeks in the file
            raise DataError(f"{path} is gzipped {binary_kind.title()}, which is read from its end: gunzip it")
        return binary_kind
    unreadable = next(
        (advice for signature, advice in _UNREADABLE_SIGNATURES.items() if beginning.startswith(signature)), None
    )
    if unreadable is not None:
        raise DataError(f"{path} is {unreadable}")
    encoding_error = wide_encoding_error(path, beginning)
    if encoding_error is not None:
        raise encoding_error
    # "ignore": the head may end inside a character; bytes that are not UTF-8 are named, with line, while rows are read
    text = beginning.removeprefix(BOM).decode("utf-8", "ignore")
    if not text.strip():  # the rows may begin after a head of white space
        _require_content(path)
    return _text_kind(path, text.lstrip(), wants_text)


def _require_content(path: Path) -> None:
    """Raise DataError unless something follows the white space that a file begins with."""
    size = 0
    for block in read_blocks(path):
        size += len(block)
        if block.removeprefix(BOM).strip():
            return
    raise DataError(f"{path} has no rows: the file is {'blank' if size else 'empty'}")


def _text_kind(path: Path, beginning: str, wants_text: bool) -> str:
    suffix = data_suffix(path)
    may_be_text = suffix in TEXT_SUFFIXES or (wants_text and suffix not in ROW_FILE_SUFFIXES)
    if not beginning:
        return "text" if may_be_text else "lines"
    if may_be_text:  # a text may begin with a bracket: rows only where they are objects, with a text where it is wanted
        line = beginning.partition("\n")[0]
        is_list = not wants_text and re.match(r"\[\s*\{\s*\"", beginning) is not None
        holds_rows = is_list or (_is_object(line) and ('"text"' in line or not wants_text))
        return _json_kind(beginning) if holds_rows else "text"
    if beginning[0] in "[{":
        return _json_kind(beginning)
    if suffix in TABLE_SUFFIXES:
        return "csv"
    advice = "rows are JSON objects, one per line, or a list; or a table with a header line (.csv)"
    if re.match(r"<(!doctype|html|\?xml|head|body)", beginning, re.IGNORECASE):
        advice = "a web page saved in place of the file? Fetch the file itself"
    elif beginning[0] in "'(":
        advice = "written by Python's print or str()? Write it with json.dumps"
    raise DataError(f'{path} is not JSON: it begins with "{one_line(beginning[:40])}"; {advice}')


def _json_kind(beginning: str) -> str:
    first_line, line_end, following = beginning.partition("\n")
    first_row, second_row = (json_rows.parse_line(line, "") for line in (first_line, following.partition("\n")[0]))
    if beginning[0] == "[":  # a list of messages is a row
        is_row = line_end and following.lstrip().startswith("[") and isinstance(first_row, RawRow)
        return "lines" if is_row else "array"
    # of rows on lines of their own, of which the first was cut off, the second is one
    spans_lines = (
        json_rows.OBJECT_CONTINUES in str(first_row) and isinstance(second_row, BadRow) and bool(following.strip())
    )
    return "objects" if spans_lines else "lines"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def data_suffix(path: Path) -> str:
    """What a file's name ends in, `.gz` left out, in lower case."""
    return Path(path.name.lower().removesuffix(".gz")).suffix
