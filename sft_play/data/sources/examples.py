"""The rows of a source as examples, each file by its own format; and a first look at them before any library loads."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from sft_play.config.schema import DataConfig, StyleConfig
from sft_play.data.sources.file_kinds import kind_of
from sft_play.data.sources.files import AnySource, DataPaths, Part, data_files, read_part
from sft_play.data.sources.formats import (
    STYLED,
    Example,
    Format,
    Text,
    check_columns,
    first_format,
    is_processed,
    rename_columns,
    to_example,
)
from sft_play.data.sources.messages import GIVEN, as_given
from sft_play.data.sources.raw import BadRow, RawRow, blocks, is_gzipped, none_usable
from sft_play.errors import SftPlayError
from sft_play.log import one_line
from sft_play.process.waiting import waiting


class ExampleReader:
    """The examples of a source in order, each file by its own format, each row that cannot be one as a `BadRow`; `rows`
    and `format` say what was found so far. Reading raises DataError for a whole file."""

    def __init__(self, path: AnySource, data: DataConfig, *, split: str, text_wanted: bool = False) -> None:
        check_columns(data)
        self.path = path
        self.rows = 0
        self.data, self._split, self._text_wanted = data, split, text_wanted
        self._formats: dict[str, None] = {}

    @property
    def format(self) -> str:
        """The names of the rows' formats."""
        return ", ".join(self._formats) or "unknown"

    def raw(self) -> Iterator[tuple[RawRow | BadRow, Format | None]]:
        """The rows as they stand in the files, counted, each with the format of its file."""
        for part in data_files(self.path, split=self._split, text_wanted=self._text_wanted):
            rows = read_part(part)
            first, shape = first_format(rows, self.data)
            if shape is not None:
                self._formats[shape.name] = None
            for row in itertools.chain(first, rows):
                self.rows += 1
                yield row, shape

    def numbered(self) -> Iterator[tuple[int, Example | BadRow]]:
        """The rows as examples, with their numbers from 1."""
        with waiting(f"Reading rows of {one_line(str(self.path))}", unit="rows", total=self._total) as news:
            for row, shape in self.raw():
                news.add()
                yield self.rows, example_of(row, shape, self.data)

    def _total(self) -> int | None:
        return rows_of(data_files(self.path, split=self._split, text_wanted=self._text_wanted))


def example_of(row: RawRow | BadRow, shape: Format | None, data: DataConfig) -> Example | BadRow:
    """A row of a file with this format as an example, with the system prompt that data.style gives it."""
    if isinstance(row, BadRow):
        return row
    if shape is None:
        return BadRow(row.where, "no known format")
    return styled(to_example(rename_columns(row, data.columns), shape, data), row, data.style)


def styled(example: Example | BadRow, row: RawRow, style: StyleConfig) -> Example | BadRow:
    """The example of a row with the system prompt that data.style gives it; unchanged where `make style` wrote it."""
    was_processed = is_processed(row.data)
    is_styled = was_processed and bool(row.data.get(STYLED))
    if isinstance(example, BadRow) or is_styled or not (style.system or style.per_source):
        return example
    source = str(row.data["source"]) if was_processed else row.where
    return with_system_prompt(example, style, prompt_for(source, style)[0])[0]


# The system prompts of data.style: those that `make style` writes are those of rows that a run reads.

# what follows a file's name in a row's source: its line, or row
_PLACE = re.compile(r"(?::\d+){1,2}$|:row \d+$")


def prompt_for(source: str, style: StyleConfig) -> tuple[str, str]:
    """The system prompt for rows of this source, and the glob of data.style.per_source that matches; "" for none."""
    file = _PLACE.sub("", source)
    for glob, prompt in style.per_source.items():
        if any(fnmatchcase(name, glob) for name in (source, file, file.rpartition("/")[2])):
            return prompt, glob
    return style.system or "", ""


def with_system_prompt(example: Example, style: StyleConfig, prompt: str) -> tuple[Example, str]:
    """The example with this system prompt, and what was done: set, prepended, replaced, left, or text (it is plain)."""
    if isinstance(example, Text):
        return replace(example, notes=(*example.notes, *[NOTE_UNSTYLED] * bool(prompt))), "text"
    first, *others = example.messages
    if not prompt.strip():
        return example, "left"
    if first["role"] != "system":
        return replace(example, messages=({"role": "system", "content": prompt}, *example.messages)), "set"
    # content in parts is its author's own form, which a prompt of ours would not fit into
    in_parts = not isinstance(as_given(first).get("content"), str)
    if style.how == "keep" or in_parts:
        return replace(example, notes=(*example.notes, *[NOTE_UNSTYLED] * in_parts)), "left"
    is_before = style.how == "prepend" and bool(first["content"].strip())
    content = f"{prompt}\n\n{first['content']}" if is_before else prompt
    author_form = {GIVEN: {**first[GIVEN], "content": content}} if GIVEN in first else {}
    messages = ({**first, "content": content, **author_form}, *others)
    return replace(example, messages=messages), "prepended" if is_before else "replaced"


def characters(example: Example) -> int:
    """About how long an example is."""
    if isinstance(example, Text):
        return len(example.text)
    return sum(len(message.get("content") or "") for message in example.messages)


NOTE_UNSTYLED = "data.style changes nothing: it is plain text, or has a system prompt in parts"
# Files of each source that are looked at; a run reads the others with their rows.
LOOKED_AT_FILES = 20
# Rows of each file.
LOOKED_AT_ROWS = 100


def look_at(data: DataConfig, paths: DataPaths, *, task_mode: str) -> None:
    """Look at the first rows of every source but folders saved by `datasets` and the hub, which need a library. Raises
    DataError where a file cannot be read, or none of its first rows can and `data.on_bad_row` is fail."""
    check_columns(data)
    for name, source in paths.files():
        if name == "text" and task_mode != "cpt_mixed":
            continue
        for part in data_files(source, text_wanted=task_mode == "cpt" or name == "text")[:LOOKED_AT_FILES]:
            if part.kind == "auto":
                _look(part, data, named=name if name.startswith("source ") else f"data.{name}_path")


class _Enough(Exception):
    """LOOKED_AT_ROWS were read, and the format is not known yet: nearly all of them are bad."""


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
    if bad and len(bad) == len(read) and data.on_bad_row == "fail":
        raise none_usable(f"{among}{len(bad):,} rows of {named}={one_line(part.name)}", bad)


def rows_of(parts: Sequence[Part]) -> int | None:
    """Rows of files by their lines or row groups; None where one can be counted by its rows alone."""
    with contextlib.suppress(OSError, SftPlayError, ValueError):
        counts = [_counted(part) if part.kind in ("auto", "lines") else None for part in parts]
        return None if None in counts else sum(count for count in counts if count is not None)
    return None


def _counted(part: Part) -> int | None:
    kind = kind_of(part.path, text_wanted=part.text_wanted)
    if kind == "parquet":
        from sft_play.data.sources.tables import parquet_groups

        return sum(parquet_groups(part.path))
    if kind == "lines" and not is_gzipped(part.path):
        return sum(block.count(b"\n") for block in blocks(part.path))
    return None
