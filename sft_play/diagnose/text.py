"""Tables and sizes as text that fits a narrow terminal; what is not known is `n/a`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sft_play.log import one_line
from sft_play.units import GIB, MIB

WIDTH = 100
"""Columns that every table fits."""
NOT_KNOWN = "n/a"


def gib(size: int | None, *, digits: int = 1) -> str:
    """A size in units of 2**30 bytes."""
    return NOT_KNOWN if size is None else f"{size / GIB:.{digits}f}"


def sized(size: float | None) -> str:
    """A size with its unit, small ones in MiB."""
    if size is None:
        return NOT_KNOWN
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / MIB:.1f} MiB"


def known(value: Any, unit: str = "") -> str:
    """A value safe to show, with its unit."""
    if value is None:
        return NOT_KNOWN
    text = f"{value:g}" if isinstance(value, float) else one_line(str(value))
    return f"{text} {unit}".strip()


def yes_no(value: bool | None) -> str:
    """`yes`, `no` or `n/a`."""
    return NOT_KNOWN if value is None else "yes" if value else "no"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> Table:
    """A table without frames, numbers to the right; `left` are the columns of text, which wrap where it is narrow."""
    content = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        is_text = index in left
        content.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        content.add_row(*row)
    return content


def lines_of(content: RenderableType, *, width: int = WIDTH) -> list[str]:
    """The lines of a table, without colours; names are never read as markup."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(content)
    return [line.rstrip() for line in out.getvalue().splitlines()]
