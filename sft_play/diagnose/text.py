"""Tables, sizes and lists as text; what is not known is `n/a`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sft_play import units
from sft_play.log import one_line
from sft_play.units import GIB, MIB

WIDTH = 100
"""Columns that every table of figures fits."""
_UNLIMITED = 100_000
NOT_KNOWN = "n/a"


def gib(size: int | None, *, digits: int = 1) -> str:
    """A size in units of 2**30 bytes."""
    return NOT_KNOWN if size is None else units.gib(size, digits=digits)


def sized(size: float | None) -> str:
    """A size with its unit, small ones in MiB."""
    if size is None:
        return NOT_KNOWN
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / MIB:.1f} MiB"


def value_text(value: Any, unit: str = "") -> str:
    """A value safe to show, with its unit."""
    if value is None:
        return NOT_KNOWN
    text = f"{value:g}" if isinstance(value, float) else one_line(str(value))
    return f"{text} {unit}".strip()


def yes_no(value: bool | None) -> str:
    """`yes`, `no` or `n/a`."""
    return NOT_KNOWN if value is None else "yes" if value else "no"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> Table:
    """A table without frames, numbers to the right; `left` are the columns of text, which wrap where it is narrow."""
    content = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        is_text = index in left
        content.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        content.add_row(*row)
    return content


def lines_of(content: RenderableType, *, width: int | None = WIDTH) -> list[str]:
    """The lines of a table, without colours; names are never read as markup. None: as wide as its longest line."""
    out = io.StringIO()
    columns = _UNLIMITED if width is None else width
    console = Console(file=out, width=columns, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(content)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def each_once(words: Iterable[object]) -> str:
    """Each word once, with commas."""
    return ", ".join(dict.fromkeys(str(word) for word in words))
