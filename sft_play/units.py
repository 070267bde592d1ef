"""Sizes: integers of bytes until they are printed, in units of 2**30; large numbers and durations in words."""

from __future__ import annotations

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
    """A large number such as `30.53 billion` or `13.4 million`; a smaller one with all its digits."""
    if count >= 10**9:
        return f"{count / 10**9:.2f} billion"
    return f"{count / 10**6:.1f} million" if count >= 10**6 else f"{count:,}"


def format_duration(seconds: float) -> str:
    """A duration in the unit that a person would take: `40 seconds`, `8 minutes`, `3.2 hours`, `19.0 days`."""
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 90 * 60:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 90:
        return f"{seconds / 60:.0f} minutes"
    rounded = max(1, round(seconds))
    return f"{rounded} second{'' if rounded == 1 else 's'}"
