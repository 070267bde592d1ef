"""Sizes: integers of bytes until they are printed, in units of 2**30."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def gib(size: int, *, digits: int = 1) -> str:
    """A size in GiB without its unit, such as `12.6`."""
    return f"{size / GIB:.{digits}f}"
