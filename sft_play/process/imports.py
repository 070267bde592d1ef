"""What keeps the heap small and quick: freed memory given back to the system, imports left out of collections."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
from collections.abc import Iterator

from sft_play.process.waiting import report_wait

logger = logging.getLogger(__name__)

# Characters of one text whose tokens leave holes in the heap that no later text fills: 25 bytes for each byte read.
LONG_TEXT_CHARS = 1 << 18


def release_free_memory() -> None:
    """Give all freed memory back; nothing where the C library is not glibc. Takes milliseconds for every GiB kept."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows opens none, others have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def release_after_long_text(longest_chars: int) -> None:
    """Give freed memory back where the longest text of a batch, in characters, was a long one."""
    if longest_chars > LONG_TEXT_CHARS:
        release_free_memory()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch and what is built on it inside the block: log it (if it takes long, on the terminal too), collect no
    garbage meanwhile, and freeze the million objects that the imports make: every later collection would walk through
    them for a quarter of a second (benchmarks/LOG.md, 2026-11-23). It happens once in a
    process, at the first import of torch, after a collection: no garbage of the program's own is kept."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    logger.debug("Loading libraries: torch, transformers and what is built on them")
    gc.collect()
    gc.disable()
    try:
        with report_wait("Loading torch, transformers and what is built on them"):
            yield
    finally:
        gc.freeze()
        gc.enable()
