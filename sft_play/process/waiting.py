"""What takes long says so, also while libraries are imported; and memory that is freed is given
back to the system.
"""

import contextlib
import ctypes
import functools
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sft_play.text import format_duration

logger = logging.getLogger(__name__)
T = TypeVar("T")


# What takes long says so: a line after three seconds, then ever more rarely, with how much is done
# and of how much.

# Seconds of silence before the first line, and at most before another.
FIRST_LINE_S, MAX_PAUSE_S = 3.0, 60.0
# Seconds of work from which the time that is left can be told.
MIN_TIMED_S = 3.0


class WaitProgress:
    """Something that is waited for: `Preparing train rows: 20,000 of 100,000 rows, 12 s so far,
    about 48 seconds left`."""

    def __init__(self, task: str, unit: str, count_total: Callable[[], int | None]) -> None:
        self._task, self._unit, self._total = task, unit, functools.cache(count_total)
        self._started_at, self._done_count = time.monotonic(), 0

    def add(self, count: int = 1) -> None:
        """Count so many more as done."""
        self._done_count += count

    def line(self) -> str:
        """What is said now. The total is looked up for the first line, and never where all is done
        before it."""
        total = self._total()
        # a total that was counted by lines is too small where a row takes none, and says nothing
        # then
        total_text = f" of {total:,}" if total and total >= self._done_count else ""
        done_text = f"{self._done_count:,}{total_text} {self._unit}, " if self._unit else ""
        elapsed_s, left_text = time.monotonic() - self._started_at, ""
        if total and total_text and self._done_count and elapsed_s >= MIN_TIMED_S:
            left_s = elapsed_s * (total - self._done_count) / self._done_count
            left_text = f", about {format_duration(left_s)} left"
        return f"{self._task}: {done_text}{elapsed_s:.0f} s so far{left_text}"


# What this process waits for; the last one is a part of those before it, and speaks for all.
_open_waits: list[WaitProgress] = []
# When the last line was said (`time.monotonic`): many short parts are no reason for silence.
_last_line_at = 0.0


@contextlib.contextmanager
def report_wait(
    task: str, *, unit: str = "", count_total: Callable[[], int | None] = lambda: None
) -> Iterator[WaitProgress]:
    """Say what is being done where it takes longer than three seconds; a part that is opened inside
    speaks first. `unit`: of what `add` counts. `count_total`: how many there will be, called in
    another thread when there is something to say."""
    progress, is_finished = WaitProgress(task, unit, count_total), threading.Event()

    def report_lines() -> None:
        global _last_line_at
        pause = FIRST_LINE_S
        while not is_finished.wait(pause):
            is_innermost = bool(_open_waits) and _open_waits[-1] is progress
            silence_s = time.monotonic() - _last_line_at
            if _open_waits and silence_s >= (FIRST_LINE_S if is_innermost else pause):
                _last_line_at = time.monotonic()
                logger.info("%s", _open_waits[-1].line())
            pause = min(2 * pause, MAX_PAUSE_S)

    reporter = threading.Thread(target=report_lines, name="waiting", daemon=True)
    _open_waits.append(progress)
    reporter.start()
    try:
        yield progress
    finally:
        is_finished.set()
        _open_waits.remove(progress)
        reporter.join()


def report_each(task: str, items: Iterable[T], *, unit: str, count: int) -> Iterator[T]:
    """Yield the items, of which there are `count`, and say how many are done where all of them take
    longer than three seconds."""
    with report_wait(task, unit=unit, count_total=lambda: count) as progress:
        for item in items:
            yield item
            progress.add()


# --------------------------------------------------------------------------------------------------
# What keeps the heap small and quick: freed memory given back to the system, imports left out of
# collections.

# Characters of one text whose tokens leave holes in the heap that no later text fills: 25 bytes for
# each byte read.
LONG_TEXT_CHARS = 1 << 18


def release_free_memory() -> None:
    """Give all freed memory back; nothing where the C library is not glibc. Takes milliseconds for
    every GiB kept."""
    # Windows opens none, others have no malloc_trim
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_after_long_text(longest_chars: int) -> None:
    """Give freed memory back where the longest text of a batch, in characters, was a long one."""
    if longest_chars > LONG_TEXT_CHARS:
        release_free_memory()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch and what is built on it inside the block: log it (if it takes long, on the
    terminal too), collect no garbage meanwhile, and freeze the million objects that the imports
    make: every later collection would walk through them for a quarter of a second
    (benchmarks/LOG.md, 2026-11-23). It happens once in a process, at the first import of torch,
    after a collection: no garbage of the program's own is kept.
    """
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


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """Leave what exists out of the collections of garbage while open: a model's modules and a
    trainer's rows make each of them longer, and none of it ends before the block does. At its end
    all are collected again, those that `importing` left out too: a model that is done is to go."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
