"""The memory of a process and its children while they run, sampled from outside."""

from __future__ import annotations

import contextlib
import threading


class Sampler:
    """The highest resident memory of a process and its children, in bytes: `rss`, and `private` without what they share
    with others (pages of mapped files, for one)."""

    def __init__(self, pid: int, *, every_s: float) -> None:
        self.rss = self.private = 0
        self._pid, self._every_s, self._stop = pid, every_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._pid)
            while not self._stop.wait(self._every_s):
                rss = private = 0
                for one in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        used = one.memory_info()
                        rss, private = rss + used.rss, private + used.rss - getattr(used, "shared", 0)
                self.rss, self.private = max(self.rss, rss), max(self.private, private)
