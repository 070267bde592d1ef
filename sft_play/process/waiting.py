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
FIRST_S, LONGEST_S = 3.0, 60.0


class Waiting:
    """Something that is waited for: `Preparing train rows: 20,000 of 100,000 rows, 12 s so far`."""

    def __init__(self, what: str, unit: str, total: Callable[[], int | None]) -> None:
        self._what, self._unit, self._total = what, unit, functools.cache(total)
        self._began, self._done = time.monotonic(), 0

    def add(self, count: int = 1) -> None:
        """Count so many more as done."""
        self._done += count

    def line(self) -> str:
        """What is said now. The total is looked up for the first line, and never where all is done before it."""
        known = self._total()
        # a total that was counted by lines is too small where a row takes none, and says nothing then
        of = f" of {known:,}" if known and known >= self._done else ""
        done = f"{self._done:,}{of} {self._unit}, " if self._unit else ""
        return f"{self._what}: {done}{time.monotonic() - self._began:.0f} s so far"


# What this process waits for; the last one is a part of those before it, and speaks for all.
_open: list[Waiting] = []


@contextlib.contextmanager
def waiting(what: str, *, unit: str = "", total: Callable[[], int | None] = lambda: None) -> Iterator[Waiting]:
    """Say what is being done where it takes longer than three seconds; a part that is opened inside speaks first.
    `unit`: of what `add` counts. `total`: how many there will be, called in another thread when there is something to
    say."""
    one, ended = Waiting(what, unit, total), threading.Event()

    def tell() -> None:
        pause = FIRST_S
        while not ended.wait(pause):
            pause = min(2 * pause, LONGEST_S)
            if _open and _open[-1] is one:
                logger.info("%s", one.line())

    teller = threading.Thread(target=tell, name="waiting", daemon=True)
    _open.append(one)
    teller.start()
    try:
        yield one
    finally:
        ended.set()
        _open.remove(one)
        teller.join()
