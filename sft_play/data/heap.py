"""What the C library keeps of freed memory, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LONG_CHARS = 1 << 18
"""Characters of one text beyond which its tokens are many enough to leave holes in the heap that no later text fills:
without giving them back, memory grows by some 25 bytes with every byte of a file of long texts."""


@functools.cache
def _trim() -> Callable[[int], object] | None:
    """glibc's own; other C libraries have none."""
    try:
        trim: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no C library to look into
        return None
    return trim


def give_back(longest: int) -> None:
    """Give freed memory back where the longest text of what was just worked on, in characters, was a long one."""
    trim = _trim() if longest > LONG_CHARS else None
    if trim is not None:
        trim(0)
