"""The rows of a source as examples, each file by its own format; and a first look at them before
any library loads."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from sft_play.config.schema import DataConfig, StyleConfig
from sft_play.data.sources.files import (
    AnySource,
    DataPaths,
    FilePart,
    file_kind,
    list_parts,
    read_part,
)
from sft_play.data.sources.formats import (
    FORMAT_PROBE_ROWS,
    STYLED_KEY,
    Chat,
    Example,
    RowFormat,
    Text,
    detect_format,
    is_processed_row,
    rename_columns,
    require_known_columns,
    to_example,
)
from sft_play.data.sources.images import IMAGE_MARK
from sft_play.data.sources.messages import AUTHOR_MESSAGE, TEXT_KEYS, Message, author_form
from sft_play.data.sources.raw import BadRow, RawRow, is_gzipped, no_usable_rows_error, read_blocks
from sft_play.data.sources.tables import parquet_group_rows
from sft_play.errors import SftPlayError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait


class ExampleReader:
    """The examples of a source in order, each file by its own format, each row that cannot be one
    as a `BadRow`; `rows` and `format` say what was found so far. Reading raises DataError for a
    whole file."""

    def __init__(
        self, source: AnySource, data: DataConfig, *, split: str, wants_text: bool = False
    ) -> None:
        require_known_columns(data)
        self.source = source
        self.rows = 0
        self.data, self._split, self._wants_text = data, split, wants_text
        self._formats: dict[str, None] = {}

    @property
    def format(self) -> str:
        """The names of the rows' formats."""
        return ", ".join(self._formats) or "unknown"

    def raw_rows(self) -> Iterator[tuple[RawRow | BadRow, RowFormat | None]]:
        """The rows as they stand in the files, counted, each with the format of its file."""
        self.rows = 0
        for part in list_parts(self.source, split=self._split, wants_text=self._wants_text):
            rows = read_part(part)
            first, row_format = detect_format(rows, self.data)
            if row_format is not None:
                self._formats[row_format.name] = None
            for row in itertools.chain(first, rows):
                self.rows += 1
                yield row, row_format

    def numbered_examples(self) -> Iterator[tuple[int, Example | BadRow]]:
        """The rows as examples, with their numbers from 1."""
        with report_wait(
            f"Reading rows of {one_line(str(self.source))}",
            unit="rows",
            count_total=lambda: count_part_rows(
                list_parts(self.source, split=self._split, wants_text=self._wants_text)
            ),
        ) as progress:
            for row, row_format in self.raw_rows():
                progress.add()
                yield self.rows, read_example(row, row_format, self.data)


def read_example(
    row: RawRow | BadRow, row_format: RowFormat | None, data: DataConfig
) -> Example | BadRow:
    """A row of a file with this format as an example, with the system prompt that data.style gives
    it."""
    if isinstance(row, BadRow):
        return row
    if row_format is None:
        return BadRow(row.where, "no known format")
    return apply_style(
        to_example(rename_columns(row, data.columns), row_format, data), row, data.style
    )


def apply_style(example: Example | BadRow, row: RawRow, style: StyleConfig) -> Example | BadRow:
    """The example of a row with the system prompt that data.style gives it; unchanged where `make
    style` wrote it."""
    source = row.where
    if isinstance(example, BadRow) or not (style.system or style.per_source):
        return example
    if is_processed_row(row.data):
        source = str(row.data["source"])
        if row.data.get(STYLED_KEY):
            return example
    return set_system_prompt(example, style, find_system_prompt(source, style)[0])[0]


# The system prompts of data.style: `make style` writes what a run would give the same rows.

# what follows a file's name in a row's source: its line, or row
_ROW_NUMBER = re.compile(r"(?::\d+){1,2}$|:row \d+$")


def find_system_prompt(source: str, style: StyleConfig) -> tuple[str, str]:
    """The system prompt for rows of this source, and the glob of data.style.per_source that
    matches; "" for none."""
    file = _ROW_NUMBER.sub("", source)
    for glob, prompt in style.per_source.items():
        if any(fnmatchcase(name, glob) for name in (source, file, file.rpartition("/")[2])):
            return prompt, glob
    return style.system or "", ""


def set_system_prompt(example: Example, style: StyleConfig, prompt: str) -> tuple[Example, str]:
    """The example with this system prompt, and what was done: set, prepended, replaced, left, or
    text (it is plain)."""
    if isinstance(example, Text):
        return replace(example, notes=(*example.notes, *[NOTE_UNSTYLED] * bool(prompt))), "text"
    first, *others = example.messages
    if not prompt.strip():
        return example, "left"
    if first["role"] != "system":
        return (
            replace(example, messages=({"role": "system", "content": prompt}, *example.messages)),
            "set",
        )
    # content in parts is its author's own form, which a prompt of ours would not fit into
    has_parts = not isinstance(author_form(first).get("content"), str) or (
        bool(example.images) and IMAGE_MARK in first["content"]
    )
    if style.how == "keep" or has_parts:
        return replace(example, notes=(*example.notes, *[NOTE_UNSTYLED] * has_parts)), "left"
    content, outcome = prompt, "replaced"
    if style.how == "prepend" and first["content"].strip():
        content, outcome = f"{prompt}\n\n{first['content']}", "prepended"
    styled = {**first, "content": content}
    if AUTHOR_MESSAGE in first:
        styled[AUTHOR_MESSAGE] = {**first[AUTHOR_MESSAGE], "content": content}
    return replace(example, messages=(styled, *others)), outcome


def character_count(example: Example | BadRow) -> int:
    """Characters of an example, without think text and tool calls; 0 for a bad row."""
    if not isinstance(example, Chat):
        return len(getattr(example, "text", ""))
    characters = sum(len(message.get("content") or "") for message in example.messages)
    return characters - len(example.images)


def example_text(example: Example) -> str:
    """All that a row says, tools and calls of tools among it."""
    if isinstance(example, Text):
        return example.text
    return "\n".join(
        [*map(_to_json, filter(None, [example.tools])), messages_text(example.messages)]
    )


def messages_text(messages: Iterable[Message]) -> str:
    """All that messages say, calls of tools among it."""
    parts: list[str] = []
    for message in messages:
        parts += [
            str(message[key]).replace(IMAGE_MARK, "") for key in TEXT_KEYS if message.get(key)
        ]
        parts += map(_to_json, filter(None, [message.get("tool_calls")]))
    return "\n".join(parts)


_to_json = functools.partial(json.dumps, ensure_ascii=False)

NOTE_UNSTYLED = "data.style changes nothing: it is plain text, or has a system prompt in parts"
# Files of each source that are looked at; a run reads the others with their rows.
CHECKED_FIRST_FILES = 20
# Rows of each file.
CHECKED_FIRST_ROWS = 100


def check_first_rows(data: DataConfig, paths: DataPaths, *, task_mode: str) -> None:
    """Look at the first rows of every source but folders saved by `datasets` and the hub, which
    need a library. Raises DataError where a file cannot be read, or none of its first rows can and
    `data.on_bad_row` is fail.
    """
    require_known_columns(data)
    for name, source in paths.named_paths():
        if name == "text" and task_mode != "cpt_mixed":
            continue
        option = name if name.startswith("source ") else f"data.{name}_path"
        parts = list_parts(source, wants_text=task_mode == "cpt" or name == "text")[
            :CHECKED_FIRST_FILES
        ]
        for part in parts:
            if part.kind != "auto":
                continue
            rows = list(itertools.islice(read_part(part), CHECKED_FIRST_ROWS))
            bad = [row for row in rows if isinstance(row, BadRow)]
            # else nearly all of these rows are bad, and a later one may have the format
            if len(rows) < CHECKED_FIRST_ROWS or len(rows) - len(bad) >= FORMAT_PROBE_ROWS:
                detect_format(iter(rows), data)
            if bad and len(bad) == len(rows) and data.on_bad_row == "fail":
                raise no_usable_rows_error(
                    f"{'the first ' * (len(rows) == CHECKED_FIRST_ROWS)}{len(bad):,} rows of"
                    f" {option}={one_line(part.name)}",
                    bad,
                )


def count_part_rows(parts: Sequence[FilePart]) -> int | None:
    """Count the rows of files by line ends or row groups; None if a file has to be parsed to count
    its rows."""
    total = 0
    with contextlib.suppress(OSError, SftPlayError, ValueError):
        for part in parts:
            if part.kind not in ("auto", "lines"):
                return None
            kind = file_kind(part.path, wants_text=part.wants_text)
            if kind == "parquet":
                total += sum(parquet_group_rows(part.path))
            elif kind == "lines" and not is_gzipped(part.path):
                total += sum(block.count(b"\n") for block in read_blocks(part.path))
            else:
                return None
        return total
    return None
