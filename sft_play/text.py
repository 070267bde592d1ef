"""Text for people: sizes, durations and large numbers, and tables, where what is not known is
`n/a`."""

import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sft_play.log import one_line

# Sizes: integers of bytes until they are printed, in units of 2**30; large numbers and durations in
# words.

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_gib(size: int, *, digits: int = 1) -> str:
    """A size in GiB without its unit, such as `12.6`."""
    return f"{size / GIB:.{digits}f}"


def format_size(size: int) -> str:
    """A size in the largest unit that it has one of, such as `3.4 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def format_count(count: int) -> str:
    """A large number such as `30.53 billion` or `13.4 million`; a smaller one with all its
    digits."""
    if count >= 10**9:
        return f"{count / 10**9:.2f} billion"
    return f"{count / 10**6:.1f} million" if count >= 10**6 else f"{count:,}"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """A number of things: `1 row`, `1,200 rows`, `2 passes`."""
    return f"{count:,} {noun if count == 1 else plural_noun or f'{noun}s'}"


def format_duration(seconds: float) -> str:
    """A duration in the unit that a person would take: `40 seconds`, `8 minutes`, `3.2 hours`,
    `19.0 days`."""
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 90 * 60:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 90:
        return f"{seconds / 60:.0f} minutes"
    return plural(max(1, round(seconds)), "second")


def format_usd(usd: float) -> str:
    """An amount in US dollars without their name: `1,234.50`, or `under 0.01`."""
    return f"{usd:,.2f}" if usd >= 0.005 else "under 0.01"


# --------------------------------------------------------------------------------------------------
# Text for pages: tables, sizes and lists, where what is not known is `n/a`.

# Columns that every table of figures fits.
PAGE_WIDTH = 100
NOT_KNOWN = "n/a"


def gib_or_na(size: int | None, *, digits: int = 1) -> str:
    """A size in units of 2**30 bytes."""
    return NOT_KNOWN if size is None else format_gib(size, digits=digits)


def value_or_na(value: Any, unit: str = "") -> str:
    """A value safe to show, with its unit."""
    if value is None:
        return NOT_KNOWN
    text = f"{value:g}" if isinstance(value, float) else one_line(str(value))
    return f"{text} {unit}".strip()


def yes_no_or_na(value: bool | None) -> str:
    """`yes`, `no` or `n/a`."""
    return {None: NOT_KNOWN, True: "yes", False: "no"}[value]


def build_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = ()
) -> Table:
    """A table without frames, numbers to the right; `text_columns` are to the left, and wrap where
    it is narrow."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", padding=(0, 1, 0, 0)
    )
    for index, name in enumerate(columns):
        is_text = index in text_columns
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table


def render_lines(renderable: RenderableType, *, width: int | None = PAGE_WIDTH) -> list[str]:
    """The lines of a table, without colours; names are never read as markup. None: as wide as its
    longest line."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=100_000 if width is None else width,
        no_color=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of short texts, all of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
