"""Text for pages: tables, sizes and lists, where what is not known is `n/a`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sft_play import units
from sft_play.log import one_line

# Columns that every table of figures fits.
PAGE_WIDTH = 100
_UNLIMITED_WIDTH = 100_000
NOT_KNOWN = "n/a"


def gib_or_na(size: int | None, *, digits: int = 1) -> str:
    """A size in units of 2**30 bytes."""
    return NOT_KNOWN if size is None else units.format_gib(size, digits=digits)


def value_or_na(value: Any, unit: str = "") -> str:
    """A value safe to show, with its unit."""
    if value is None:
        return NOT_KNOWN
    text = f"{value:g}" if isinstance(value, float) else one_line(str(value))
    return f"{text} {unit}".strip()


def yes_no_or_na(value: bool | None) -> str:
    """`yes`, `no` or `n/a`."""
    return NOT_KNOWN if value is None else "yes" if value else "no"


def build_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = ()) -> Table:
    """A table without frames, numbers to the right; `text_columns` are to the left, and wrap where it is narrow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        is_text = index in text_columns
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def render_lines(renderable: RenderableType, *, width: int | None = PAGE_WIDTH) -> list[str]:
    """The lines of a table, without colours; names are never read as markup. None: as wide as its longest line."""
    buffer = io.StringIO()
    console_width = _UNLIMITED_WIDTH if width is None else width
    console = Console(file=buffer, width=console_width, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(renderable)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of short texts, all of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def join_unique(words: Iterable[object]) -> str:
    """Each word once, with commas."""
    return ", ".join(dict.fromkeys(str(word) for word in words))
