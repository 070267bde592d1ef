"""What is said of rows that cannot be used: how many, why, the first of them, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sft_play.data.sources.raw import BadRow
from sft_play.log import one_line

SHOWN_BAD_ROWS = 20
"""Bad rows of a source that are listed; the others are counted."""
FIX_OR_SKIP = "fix them, or leave them out, counted, with data.on_bad_row=skip"


def bad_row_lines(among: str, bad: Counter[str], first: Sequence[BadRow]) -> list[str]:
    """The rows that cannot be used, in words: counts by reason; then, indented, the first ones and how many more."""
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in bad.most_common(6))
    rows = [f"  {one_line(str(row), limit=600)}" for row in first]
    more = [f"  … and {bad.total() - len(first):,} more"] if bad.total() > len(first) else []
    return [f"{bad.total():,} of {among} cannot be used: {reasons}", *rows, *more]
