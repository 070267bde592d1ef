"""Ends Python code that runs too long and asks nobody: a chat template is a program from somebody's repository.

A thread looks once a second at the processor time of every thread that is being watched, and raises an exception in
one that has used up its own. It arrives between two steps of Python's: a single long operation of the C library is not
ended by it, and has limits of its own (`template_limits`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

EVERY_S = 1.0
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


@dataclass
class _Watched:
    """A thread, until when its processor time may go, and what is raised in it."""

    thread: int
    used: Callable[[], float]
    until: float
    error: type[BaseException]
    is_told: bool = False


_lock = threading.Lock()
_watched: dict[int, _Watched] = {}
_of_process = 0
"""The process that has a watching thread: a fork has none."""


def _in_fork() -> None:
    """Another thread may have held the lock, and been watched, when the process was forked."""
    global _lock
    _lock = threading.Lock()
    _watched.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


def _clock(thread: int) -> Callable[[], float]:
    """A clock of the thread's processor time in seconds; where the system has none (macOS, Windows), of time."""
    if sys.platform == "linux":
        return partial(time.clock_gettime, time.pthread_getcpuclockid(thread))
    return time.monotonic


@contextmanager
def ended_after(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise `error`, without words, inside this thread once it has used so much processor time."""
    global _of_process
    thread = threading.get_ident()
    used = _clock(thread)
    one = _Watched(thread, used, used() + seconds, error)
    with _lock:
        _watched[thread] = one
        if _of_process != os.getpid():
            _of_process = os.getpid()
            threading.Thread(target=_look, daemon=True, name="sft_play template watch").start()
    try:
        yield
    finally:
        with _lock:
            _watched.pop(thread, None)
            if one.is_told:  # it may not have arrived yet, and must not later
                _raise_in(ctypes.c_ulong(thread), None)


def _look() -> None:
    while True:
        time.sleep(EVERY_S)
        with _lock:
            for one in _watched.values():
                if not one.is_told and one.used() > one.until:
                    one.is_told = True
                    _raise_in(ctypes.c_ulong(one.thread), ctypes.py_object(one.error))
