"""How a process ends: on a stop request, when its terminal closes, and with the process that started it.

Standard library only, so that the smallest child process can use it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

# In a helper process: `PID:SIGNAL`, the process that it ends with, and the signal.
PARENT_VARIABLE = "SFT_PLAY_PARENT"
# In a command run by make: `MAKE:PID`, make's process id and the command's own.
MAKE_VARIABLE = "SFT_PLAY_MAKE"
# When the start that a process belongs to began, on this machine's monotonic clock, which no change of time moves.
BEGAN_VARIABLE = "SFT_PLAY_BEGAN"
# Two signals this close together are one request: a batch system signals every process, then the launcher does too.
ECHO_S = 1.0
_LOOK_S = 0.5
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


# --- with the process that started it ---------------------------------------------------------------------------------


def leave_with(parent: int, number: signal.Signals) -> None:
    """Get a signal when the parent of this process ends, however it ends: from the kernel on Linux, when the thread
    that started this process ends; elsewhere a thread checks twice a second."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent, number), daemon=True, name="sft_play parent watch").start()
    if os.getppid() != parent:  # the parent ended before it could be watched
        os.kill(os.getpid(), number)


def _watch(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), number)


def ends_with_me(environment: Mapping[str, str], *, number: signal.Signals = signal.SIGKILL) -> dict[str, str]:
    """The environment of a child that calls `leave_with_starter` first. By default it is killed, without saving
    anything; SIGTERM as `number` lets it save."""
    return {**environment, PARENT_VARIABLE: f"{os.getpid()}:{number.name}"}


def leave_with_starter() -> None:
    """End with the process that started this one as its helper, or with make; without their variables do nothing. The
    children of this process do not inherit the variables."""
    parent, _, name = os.environ.pop(PARENT_VARIABLE, "").partition(":")
    make, _, child = os.environ.pop(MAKE_VARIABLE, "").partition(":")
    if parent.isdigit():
        leave_with(int(parent), signal.Signals[name] if name in signal.Signals.__members__ else signal.SIGTERM)
    elif make.isdigit() and child == str(os.getpid()):  # else this is the child of a wrapper (VENV=), not of make
        leave_with(int(make), signal.SIGTERM)
        if sys.platform == "linux" and _catches_ctrl_c(int(make)):
            threading.Thread(target=_hear, args=(int(make),), daemon=True, name="sft_play make watch").start()


def _hear(make: int) -> None:
    """Pass on a SIGINT that make alone was sent, as a CI's cancel does: make keeps it to itself and waits for us. The
    default action of the signal, which make sets once it has come, tells; a Ctrl-C at the terminal reaches this process
    first."""
    while _catches_ctrl_c(make):
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)
    if not _heard and os.getppid() == make:
        os.kill(os.getpid(), signal.SIGINT)


def _catches_ctrl_c(process: int) -> bool:
    """Whether a process has a handler for SIGINT; Linux only."""
    from pathlib import Path

    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration, IndexError):
        return False
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)


def main() -> None:
    """`python -m sft_play.process.signals MODULE WORDS...`: a third-party module that ends with the process that
    started it. A program's path in the place of the module runs that program; it ends so on Linux only."""
    leave_with_starter()
    del sys.argv[0]
    if os.sep in sys.argv[0]:
        os.execv(sys.argv[0], sys.argv)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


# --- on a stop request ------------------------------------------------------------------------------------------------

# When this process was first asked to stop (monotonic seconds); shared by all open StopSignals.
_asked_at: float | None = None
_open = 0
# Whether this process itself got a signal that asks it to stop.
_heard = False


# How long a request to stop may go unheard where there is nothing to save.
DEAF_S = 5.0
# Set when a step begins, after which there is something to save.
has_begun = threading.Event()


def end_where_deaf(end: Callable[[], object]) -> None:
    """Call `end`, in a thread, for a request to stop that the main thread does not hear before the first step: it waits
    in native code for others, which may be gone, and Python calls no handler meanwhile."""
    heard, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(heard, 1)[0] not in STOPPING:
            pass
        time.sleep(DEAF_S)
        if not (_heard or has_begun.is_set()):
            end()

    threading.Thread(target=watch, daemon=True, name="sft_play stop watch").start()


def ctrl_c(number: int, frame: FrameType | None) -> None:
    """Python's own handler of SIGINT, which raises KeyboardInterrupt, with a note that the signal has come."""
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)


def note_beginning(*, anew: bool) -> None:
    """Note that a run starts now; without `anew` only if the process that started this one has not noted it."""
    if anew or BEGAN_VARIABLE not in os.environ:
        os.environ[BEGAN_VARIABLE] = str(time.monotonic())


def elapsed_s() -> float:
    """Seconds since the start that this process belongs to; 0 where none was noted."""
    now = time.monotonic()
    return now - float(os.environ.get(BEGAN_VARIABLE, now))


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """While open, Ctrl-C, SIGTERM, SIGHUP (a terminal that closes) and SIGUSR1 (a batch system's warning) are requests
    to stop. The first calls `first` with its number, another one `again`, unless it repeats the first: one from another
    process within a second, a second SIGHUP, the SIGTERM of a parent's death. SIGHUP stays ignored under nohup."""

    def __init__(self, first: Callable[[int], None], again: Callable[[int], None] | None = None) -> None:
        self._first, self._again = first, again or interrupt
        self._old: dict[int, Any] = {}
        self._process, self._parent = os.getpid(), os.getppid()

    def __enter__(self) -> StopSignals:
        global _asked_at, _open
        if not _open:
            _asked_at = None
        _open += 1
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        global _open
        _open -= 1
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        global _asked_at, _heard
        _heard = True
        if os.getpid() != self._process:  # a fork, such as a data loader's worker: its parent ends it
            return
        if number == signal.SIGHUP:
            leave_dead_terminal()
        if _asked_at is None:
            _asked_at = time.monotonic()
            self._first(number)
        elif not self._is_echo(number):
            self._again(number)

    def _is_echo(self, number: int) -> bool:
        is_orphan = number == signal.SIGTERM and os.getppid() != self._parent
        return number == signal.SIGHUP or is_orphan or time.monotonic() - (_asked_at or 0.0) < ECHO_S


def interrupt(number: int) -> None:
    """The stop request where there is nothing to save: unwinds as Ctrl-C does."""
    raise KeyboardInterrupt


class Beside(NamedTuple):
    """How a process that ran beside this one ended."""

    code: int
    written: str
    """What it wrote to the pipe that was its standard output; empty without one."""
    was_stopped: bool


def run_beside(module: str, words: Sequence[str], *, environment: Mapping[str, str], **of_popen: Any) -> Beside:
    """Run `python -m MODULE WORDS...` in a session of its own until it ends: a request to stop is passed on as SIGTERM,
    so that it can save, and another one kills it. `of_popen`: further arguments of Popen."""
    # safe path: `-m` would put the working folder first, whose package of that name may be another one
    environment = ends_with_me({**environment, "PYTHONSAFEPATH": "1"}, number=signal.SIGTERM)
    process = subprocess.Popen([sys.executable, "-m", module, *words], env=environment, start_new_session=True,
                               text=True, **of_popen)  # fmt: skip
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        process.send_signal(signal.SIGTERM)

    with StopSignals(stop, lambda number: process.kill()):
        written, _ = process.communicate()
    return Beside(process.returncode, written or "", bool(asked))


def leave_dead_terminal() -> None:
    """Send standard output and error to the null device once their terminal is closed: writing to it fails (EIO), also
    in the middle of the save that the signal asked for."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


if __name__ == "__main__":
    main()
