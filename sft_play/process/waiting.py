"""What takes long says so: a line after three seconds, then ever more rarely, with how much is done and of how much."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

# Seconds of silence before the first line, and at most before another.
FIRST_LINE_S, MAX_PAUSE_S = 3.0, 60.0


class WaitProgress:
    """Something that is waited for: `Preparing train rows: 20,000 of 100,000 rows, 12 s so far`."""

    def __init__(self, task: str, unit: str, count_total: Callable[[], int | None]) -> None:
        self._task, self._unit, self._total = task, unit, functools.cache(count_total)
        self._started_at, self._done_count = time.monotonic(), 0

    def add(self, count: int = 1) -> None:
        """Count so many more as done."""
        self._done_count += count

    def line(self) -> str:
        """What is said now. The total is looked up for the first line, and never where all is done before it."""
        total = self._total()
        # a total that was counted by lines is too small where a row takes none, and says nothing then
        total_text = f" of {total:,}" if total and total >= self._done_count else ""
        done_text = f"{self._done_count:,}{total_text} {self._unit}, " if self._unit else ""
        return f"{self._task}: {done_text}{time.monotonic() - self._started_at:.0f} s so far"


# What this process waits for; the last one is a part of those before it, and speaks for all.
_open_waits: list[WaitProgress] = []


@contextlib.contextmanager
def report_wait(
    task: str, *, unit: str = "", count_total: Callable[[], int | None] = lambda: None
) -> Iterator[WaitProgress]:
    """Say what is being done where it takes longer than three seconds; a part that is opened inside speaks first.
    `unit`: of what `add` counts. `count_total`: how many there will be, called in another thread when there is
    something to say."""
    progress, is_finished = WaitProgress(task, unit, count_total), threading.Event()

    def report_lines() -> None:
        pause = FIRST_LINE_S
        while not is_finished.wait(pause):
            pause = min(2 * pause, MAX_PAUSE_S)
            if _open_waits and _open_waits[-1] is progress:
                logger.info("%s", progress.line())

    reporter = threading.Thread(target=report_lines, name="waiting", daemon=True)
    _open_waits.append(progress)
    reporter.start()
    try:
        yield progress
    finally:
        is_finished.set()
        _open_waits.remove(progress)
        reporter.join()
