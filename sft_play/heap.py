"""Freed memory that the C library keeps, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LONG_CHARS = 1 << 18
"""Characters of one text beyond which its tokens are many enough to leave holes in the heap that no later text fills:
without giving them back, memory grows by some 25 bytes with every byte of a file of long texts."""


@functools.cache
def _trim() -> Callable[[int], object] | None:
    """glibc's malloc_trim(3); other C libraries have none."""
    try:
        trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no C library can be opened, as on Windows
        return None
    return trim


def give_back_free_memory() -> None:
    """Give all freed memory back; nothing where the C library is not glibc. Takes milliseconds for every GiB kept."""
    if trim := _trim():
        trim(0)


def give_back(longest: int) -> None:
    """Give freed memory back where the longest text of a batch, in characters, was a long one."""
    if longest > LONG_CHARS:
        give_back_free_memory()
