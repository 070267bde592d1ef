"""A checkpoint that is written while training goes on, by a thread of each rank.

torch's `async_save` does the same, but its thread is one that an exit waits for, however long, and what makes a
checkpoint whole (digests, the rename) would have to wait for the next step. Here one thread does both; only its end is
awaited by all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Writing:
    """The work of a thread, begun at once."""

    def __init__(self, work: Callable[[], None], *, step: int, needed: int) -> None:
        """`step`, `needed`: of the checkpoint, and the bytes that it takes at least."""
        self.step, self.needed = step, needed
        self.awaited = False
        """Whether training waits for it, so that its bytes are the rank's progress."""
        self._work, self._began, self._took_s = work, time.monotonic(), 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="sft_play checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # torch's distributed checkpoint raises one that is no Exception
            self._error = error
        self._took_s = time.monotonic() - self._began

    def result(self) -> float:
        """Wait for its end; the seconds that it took. Raises what the thread did."""
        self.awaited = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._took_s

    def give_time(self, seconds: float) -> None:
        """Wait for its end, but no longer: where this rank fails, others may never write their parts."""
        self._thread.join(seconds)
