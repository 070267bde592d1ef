"""How a process ends: on a stop request, when its terminal closes, and with the process that
started it.

Standard library only, so that the smallest child process can use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

# In a helper process: `PID:SIGNAL`, the process that it ends with, and the signal.
PARENT_VARIABLE = "SFT_PLAY_PARENT"
# In a command run by make: `MAKE:PID`, make's process id and the command's own.
MAKE_VARIABLE = "SFT_PLAY_MAKE"
# When the start that a process belongs to began, on this machine's monotonic clock, which no change
# of time moves.
START_TIME_VARIABLE = "SFT_PLAY_BEGAN"
# Two signals this close together are one request: a batch system signals every process, then the
# launcher does too.
ECHO_S = 1.0
_CHECK_INTERVAL_S = 0.5
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


# --- with the process that started it -------------------------------------------------------------


def die_with_parent(parent_pid: int, signal_number: signal.Signals) -> None:
    """Get a signal when the parent of this process ends, however it ends: from the kernel on Linux,
    when the thread that started this process ends; elsewhere a thread checks twice a second."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(
            _SET_PARENT_DEATH_SIGNAL, int(signal_number), 0, 0, 0
        )
    else:
        threading.Thread(
            target=_signal_when_orphaned,
            args=(parent_pid, signal_number),
            daemon=True,
            name="sft_play parent watch",
        ).start()
    if os.getppid() != parent_pid:  # the parent ended before it could be watched
        os.kill(os.getpid(), signal_number)


def _signal_when_orphaned(parent_pid: int, signal_number: signal.Signals) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_CHECK_INTERVAL_S)
    os.kill(os.getpid(), signal_number)


def child_environment(
    environment: Mapping[str, str], *, signal_number: signal.Signals = signal.SIGKILL
) -> dict[str, str]:
    """The environment of a child that calls `watch_parent` first. By default it is killed, without
    saving anything; SIGTERM as `signal_number` lets it save."""
    return {**environment, PARENT_VARIABLE: f"{os.getpid()}:{signal_number.name}"}


def watch_parent() -> None:
    """Let this process end with the one that started it as its helper, or with make. Does nothing
    without the variables that they set, and removes these, so that children do not inherit them."""
    parent_pid, _, signal_name = os.environ.pop(PARENT_VARIABLE, "").partition(":")
    make_pid, _, child_pid = os.environ.pop(MAKE_VARIABLE, "").partition(":")
    if parent_pid:
        die_with_parent(int(parent_pid), signal.Signals[signal_name])
    elif child_pid == str(os.getpid()):  # else this is the child of a wrapper (VENV=), not of make
        die_with_parent(int(make_pid), signal.SIGTERM)


def main() -> None:
    """`python -m sft_play.process.signals MODULE WORDS...`: a third-party module that ends with the
    process that started it. A program's path in the place of the module runs that program; it ends
    so on Linux only.
    """
    watch_parent()
    del sys.argv[0]
    if os.sep in sys.argv[0]:
        os.execv(sys.argv[0], sys.argv)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


# --- on a stop request ----------------------------------------------------------------------------

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# When this process was first asked to stop (monotonic seconds); shared by all open StopSignals.
_stop_requested_at: float | None = None
_open_count = 0
# Whether Python has called a handler of a request to stop.
_has_heard_stop = False
# How long a request to stop may go unheard where there is nothing to save.
UNHEARD_STOP_S = 5.0
# Set when a step begins, after which there is something to save.
training_begun = threading.Event()


def end_when_unresponsive(end_process: Callable[[], object]) -> None:
    """Call `end_process`, in a thread, for a request to stop that the main thread does not hear
    before the first step: it waits in native code for others, which may be gone, and Python calls
    no handler meanwhile."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read_end, 1)[0] not in STOP_SIGNALS:
            pass
        time.sleep(UNHEARD_STOP_S)
        if not (_has_heard_stop or training_begun.is_set()):
            end_process()

    threading.Thread(target=watch, daemon=True, name="sft_play stop watch").start()


def record_start_time(*, anew: bool) -> None:
    """Record the start time. With anew=False keep a time inherited from the parent."""
    if anew or START_TIME_VARIABLE not in os.environ:
        os.environ[START_TIME_VARIABLE] = str(time.monotonic())


def elapsed_s() -> float:
    """Seconds since the start that this process belongs to; 0 where none was noted."""
    now = time.monotonic()
    return now - float(os.environ.get(START_TIME_VARIABLE, now))


class StopSignals:
    """While open, Ctrl-C, SIGTERM, SIGHUP (a terminal that closes) and SIGUSR1 (a batch system's
    warning) are requests to stop. The first calls `on_first` with its number, another `on_repeat`,
    unless it echoes the first: from another process within a second, a second SIGHUP, the SIGTERM
    of a parent's death. SIGHUP stays ignored under nohup.
    """

    def __init__(
        self, on_first: Callable[[int], None], on_repeat: Callable[[int], None] | None = None
    ) -> None:
        self._on_first, self._on_repeat = on_first, on_repeat or raise_interrupt
        self._previous_handlers: dict[int, Any] = {}
        self._pid, self._parent_pid = os.getpid(), os.getppid()

    def __enter__(self) -> StopSignals:
        global _stop_requested_at, _open_count
        if not _open_count:
            _stop_requested_at = None
        _open_count += 1
        for signal_number in STOP_SIGNALS:
            if signal_number != signal.SIGHUP or signal.getsignal(signal_number) != signal.SIG_IGN:
                self._previous_handlers[signal_number] = signal.signal(
                    signal_number, self._on_signal
                )
        return self

    def __exit__(self, *_: object) -> None:
        global _open_count
        _open_count -= 1
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        global _stop_requested_at, _has_heard_stop
        _has_heard_stop = True
        if os.getpid() != self._pid:  # a fork, such as a data loader's worker: its parent ends it
            return
        if signal_number == signal.SIGHUP:
            # Standard output and error go to the null device once their terminal is closed: writing
            # to it fails (EIO), also in the middle of the save that the signal asked for.
            for descriptor in (1, 2):
                try:
                    os.write(descriptor, b"")
                except OSError:
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, descriptor)
                    os.close(null)
        if _stop_requested_at is None:
            _stop_requested_at = time.monotonic()
            self._on_first(signal_number)
        elif not self._is_echo(signal_number):
            self._on_repeat(signal_number)

    def _is_echo(self, signal_number: int) -> bool:
        is_orphan = signal_number == signal.SIGTERM and os.getppid() != self._parent_pid
        return (
            signal_number == signal.SIGHUP
            or is_orphan
            or time.monotonic() - (_stop_requested_at or 0.0) < ECHO_S
        )


def signal_name(signal_number: int) -> str:
    """Name a signal, such as SIGKILL; one without a name, as of real time, by its number."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(signal_number, f"signal {signal_number}")


def raise_interrupt(signal_number: int) -> None:
    """Handle a stop request where there is nothing to save: raise KeyboardInterrupt, as Ctrl-C
    does."""
    # a process on its way out, in its exit handlers, would only print it
    if threading.main_thread().is_alive():
        raise KeyboardInterrupt


def start_child(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    death_signal: signal.Signals = signal.SIGTERM,
    **popen_options: Any,
) -> subprocess.Popen[Any]:
    """Start a program of this package, which calls `watch_parent` first: it ends with this process,
    by `death_signal`. It has a session of its own, so that a terminal's Ctrl-C reaches this process
    alone, and the child hears of it once. `popen_options`: further arguments of Popen."""
    child_variables = child_environment(environment, signal_number=death_signal)
    return subprocess.Popen(argv, env=child_variables, start_new_session=True, **popen_options)


@contextlib.contextmanager
def supervise(
    processes: Sequence[subprocess.Popen[Any]],
    *,
    on_stop: Callable[[int], object] = lambda signal_number: None,
    kill: Callable[[subprocess.Popen[Any]], object] = subprocess.Popen.kill,
) -> Iterator[list[int]]:
    """While open, pass a request to stop on to these processes as SIGTERM, so that they can save;
    another request kills them. Those that still run when the block ends are killed.

    Args:
        processes: read anew at each request, so that the block may start more.
        on_stop: called with the first signal's number, after it was passed on. What it raises ends
            the block.
        kill: ends one of the processes at once, with what it has started.

    Yields the list of the signals that have come.
    """
    received_signals: list[int] = []

    def terminate_all(signal_number: int) -> None:
        received_signals.append(signal_number)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        on_stop(signal_number)

    def kill_all(signal_number: int) -> None:
        received_signals.append(signal_number)
        for process in processes:
            kill(process)

    # in another thread than the main one, whose caller then has the signals, none can be handled
    is_main_thread = threading.current_thread() is threading.main_thread()
    with StopSignals(terminate_all, kill_all) if is_main_thread else contextlib.nullcontext():
        try:
            yield received_signals
        finally:
            for process in [process for process in processes if process.poll() is None]:
                kill(process)
                process.wait()


class ChildResult(NamedTuple):
    """How a process that ran beside this one ended."""

    exit_code: int
    # What it wrote to the pipe that was its standard output; empty without one.
    stdout: str
    was_stopped: bool


def run_child(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], **popen_options: Any
) -> ChildResult:
    """Run `python -m MODULE WORDS...` until it ends, supervised. `popen_options`: further arguments
    of Popen."""
    # safe path: `-m` would put the working folder first, whose package of that name may be another
    # one
    environment = {**environment, "PYTHONSAFEPATH": "1"}
    process = start_child(
        [sys.executable, "-m", module, *arguments],
        environment=environment,
        text=True,
        **popen_options,
    )
    with supervise([process]) as received_signals:
        stdout, _ = process.communicate()
    return ChildResult(process.returncode, stdout or "", bool(received_signals))


if __name__ == "__main__":
    main()
