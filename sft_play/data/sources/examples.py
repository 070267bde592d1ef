"""The rows of a source as examples: conversations and texts, each file by its own format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sft_play.config.schema import DataConfig
from sft_play.data.sources.files import AnySource, data_files, read_part
from sft_play.data.sources.formats import (
    Example,
    Format,
    Text,
    check_columns,
    first_format,
    rename_columns,
    to_example,
)
from sft_play.data.sources.raw import BadRow, RawRow


class ExampleReader:
    """The examples of a file, folder or data set in order, each row that cannot be one as a `BadRow`.

    Every file has a format of its own. `rows` and `format` say what was found so far. Raises (while it is read):
        DataError: a whole file cannot be read, or its columns are those of no format.
    """

    def __init__(self, path: AnySource, data: DataConfig, *, split: str, text_wanted: bool = False) -> None:
        check_columns(data)
        self.path = path
        self.rows = 0
        self._data, self._split, self._text_wanted = data, split, text_wanted
        self._formats: dict[str, None] = {}

    @property
    def format(self) -> str:
        """The names of the rows' formats."""
        return ", ".join(self._formats) or "unknown"

    def raw(self) -> Iterator[tuple[RawRow | BadRow, Format | None]]:
        """The rows as they stand in the files, counted, each with the format of its file."""
        for part in data_files(self.path, split=self._split, text_wanted=self._text_wanted):
            rows = read_part(part)
            first, shape = first_format(rows, self._data)
            if shape is not None:
                self._formats[shape.name] = None
            for row in itertools.chain(first, rows):
                self.rows += 1
                yield row, shape

    def example(self, row: RawRow | BadRow, shape: Format | None) -> Example | BadRow:
        """A row of a file as an example."""
        return example_of(row, shape, self._data)

    def numbered(self) -> Iterator[tuple[int, Example | BadRow]]:
        """The rows as examples, with their numbers from 1."""
        for row, shape in self.raw():
            yield self.rows, self.example(row, shape)


def example_of(row: RawRow | BadRow, shape: Format | None, data: DataConfig) -> Example | BadRow:
    """A row of a file with this format as an example."""
    if isinstance(row, BadRow):
        return row
    if shape is None:
        return BadRow(row.where, "no known format")
    return to_example(rename_columns(row, data.columns), shape, data)


def characters(example: Example) -> int:
    """About how long an example is."""
    if isinstance(example, Text):
        return len(example.text)
    return sum(len(message.get("content") or "") for message in example.messages)
