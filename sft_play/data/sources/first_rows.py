"""A first look at the data of a run, before any library loads: its files can be read, and their rows are recognised.

What is refused here would be refused too once libraries, tokenizer and the rows before it are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sft_play.config.schema import DataConfig
from sft_play.data.sources.bad_rows import FIX_OR_SKIP, bad_row_lines
from sft_play.data.sources.files import DataPaths, Part, data_files, read_part
from sft_play.data.sources.formats import check_columns, first_format
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import one_line

LOOKED_AT_FILES = 20
"""Files of each source that are looked at; a run reads the others with their rows."""
LOOKED_AT_ROWS = 100
"""Rows of each file."""
_SHOWN = 3


class _Enough(Exception):
    """LOOKED_AT_ROWS were read, and the format is not known yet: nearly all of them are bad."""


def look_at(data: DataConfig, paths: DataPaths, *, task_mode: str) -> None:
    """Look at the first rows of every source. Folders saved by `datasets` and the hub need a library, and are left out.

    Raises:
        DataError: a file is empty, cannot be read or is of no known format, or none of its first rows can be read and
            `data.on_bad_row` is fail.
    """
    check_columns(data)
    for name, source in paths.files():
        if name == "text" and task_mode != "cpt_mixed":
            continue
        for part in data_files(source, text_wanted=task_mode == "cpt" or name == "text")[:LOOKED_AT_FILES]:
            if part.kind == "auto":
                _look(part, data, named=name if name.startswith("source ") else f"data.{name}_path")


def _look(part: Part, data: DataConfig, *, named: str) -> None:
    read: list[RawRow | BadRow] = []

    def first_rows() -> Iterator[RawRow | BadRow]:
        for row in read_part(part):
            if len(read) == LOOKED_AT_ROWS:
                raise _Enough
            read.append(row)
            yield row

    among = ""
    try:
        first_format(first_rows(), data)
    except _Enough:
        among = "the first "
    bad = [row for row in read if isinstance(row, BadRow)]
    if len(bad) < len(read) or not bad or data.on_bad_row != "fail":
        return
    reasons = Counter(row.reason for row in bad)
    lines = bad_row_lines(f"{among}{len(bad):,} rows of {named}={one_line(part.name)}", reasons, bad[:_SHOWN])
    raise DataError("\n".join([*lines, FIX_OR_SKIP]))
