"""What a data file is: its content decides; its name only between kinds that the content could be."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sft_play.data.sources import json_rows
from sft_play.data.sources.raw import BOM, GZIP_MARK, BadRow, RawRow, blocks, head, is_gzipped, wide_encoding
from sft_play.errors import DataError
from sft_play.log import one_line

# Names of plain text; any other file whose content does not begin like JSON is text only where text is asked.
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
ARROW_SUFFIXES = frozenset({".parquet", ".pq", ".arrow", ".feather", ".ipc"})
DATA_SUFFIXES = JSON_SUFFIXES | TABLE_SUFFIXES | ARROW_SUFFIXES

_MARKS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow stream"}
_FOREIGN = {
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


def kind_of(path: Path, *, text_wanted: bool = False) -> str:
    """What a file is: lines, objects, array, csv, parquet, arrow, arrow stream or text, by its content; by its name
    only between kinds that the content could be. Raises DataError where it is empty, or of no kind that can be read."""
    start = head(path)
    binary = next((kind for mark, kind in _MARKS.items() if start.startswith(mark)), None)
    if binary is not None:
        if is_gzipped(path):  # pyarrow seeks in the file
            raise DataError(f"{path} is gzipped {binary.title()}, which is read from its end: gunzip it")
        return binary
    foreign = next((advice for mark, advice in _FOREIGN.items() if start.startswith(mark)), None)
    if foreign is not None:
        raise DataError(f"{path} is {foreign}")
    wide = wide_encoding(path, start)
    if wide is not None:
        raise wide
    # "ignore": the head may end inside a character; bytes that are not UTF-8 are named, with line, while rows are read
    text = start.removeprefix(BOM).decode("utf-8", "ignore")
    if not text.strip():  # the rows may begin after a head of white space
        _refuse_blank(path)
    return _text_kind(path, text.lstrip(), text_wanted)


def _refuse_blank(path: Path) -> None:
    """Raise DataError unless something follows the white space that a file begins with."""
    size = 0
    for block in blocks(path):
        size += len(block)
        if block.removeprefix(BOM).strip():
            return
    raise DataError(f"{path} has no rows: the file is {'blank' if size else 'empty'}")


def _text_kind(path: Path, start: str, text_wanted: bool) -> str:
    suffix = suffix_of(path)
    may_be_text = suffix in TEXT_SUFFIXES or (text_wanted and suffix not in DATA_SUFFIXES)
    if not start:
        return "text" if may_be_text else "lines"
    if may_be_text:  # a text may begin with a bracket: rows only where they are objects, with a text where it is wanted
        line = start.partition("\n")[0]
        is_list = not text_wanted and re.match(r"\[\s*\{\s*\"", start) is not None
        is_rows = is_list or (_is_object(line) and ('"text"' in line or not text_wanted))
        return _json_kind(start) if is_rows else "text"
    if start[0] in "[{":
        return _json_kind(start)
    if suffix in TABLE_SUFFIXES:
        return "csv"
    advice = "rows are JSON objects, one per line, or a list; or a table with a header line (.csv)"
    if re.match(r"<(!doctype|html|\?xml|head|body)", start, re.IGNORECASE):
        advice = "a web page saved in place of the file? Fetch the file itself"
    elif start[0] in "'(":
        advice = "written by Python's print or str()? Write it with json.dumps"
    raise DataError(f'{path} is not JSON: it begins with "{one_line(start[:40])}"; {advice}')


def _json_kind(start: str) -> str:
    first, ended, rest = start.partition("\n")
    one, other = (json_rows.parse_line(line, "") for line in (first, rest.partition("\n")[0]))
    if start[0] == "[":  # a list of messages is a row
        is_row = ended and rest.lstrip().startswith("[") and isinstance(one, RawRow)
        return "lines" if is_row else "array"
    # of rows on lines of their own, of which the first was cut off, the second is one
    goes_on = json_rows.GOES_ON in str(one) and isinstance(other, BadRow) and bool(rest.strip())
    return "objects" if goes_on else "lines"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def suffix_of(path: Path) -> str:
    """What a file's name ends in, `.gz` left out, in lower case."""
    return Path(path.name.lower().removesuffix(".gz")).suffix
