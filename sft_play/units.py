"""Sizes: integers of bytes until they are printed, in units of 2**30."""

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
