"""Sizes: integers of bytes until they are printed, in units of 2**30; large numbers and durations in words."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def gib(size: int, *, digits: int = 1) -> str:
    """A size in GiB without its unit, such as `12.6`."""
    return f"{size / GIB:.{digits}f}"


def size_of(size: int) -> str:
    """A size in the largest unit that it has one of, such as `3.4 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def count_of(number: int) -> str:
    """A large number such as `30.53 billion` or `13.4 million`; a smaller one with all its digits."""
    if number >= 10**9:
        return f"{number / 10**9:.2f} billion"
    return f"{number / 10**6:.1f} million" if number >= 10**6 else f"{number:,}"


def duration_of(seconds: float) -> str:
    """A duration in the unit that a person would take: `40 seconds`, `8 minutes`, `3.2 hours`, `19.0 days`."""
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 90 * 60:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 90:
        return f"{seconds / 60:.0f} minutes"
    whole = max(1, round(seconds))
    return f"{whole} second{'' if whole == 1 else 's'}"
