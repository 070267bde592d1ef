"""How a rank of several ends: recorded by the rank itself, so that the agent that started it
reports it once.

A rank writes into the file that torch's launcher names in TORCHELASTIC_ERROR_FILE, in the form that
the launcher reads (`message`, `extraInfo`), with our own part beside it. Under our agent
(`sft_play.launch.agent`) the rank does not print it, so that a mistake that eight ranks find is
reported once. Under another launcher it prints as a single process does.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from sft_play.errors import Interrupted, SftPlayError
from sft_play.files import atomic
from sft_play.log import escape_control, redact
from sft_play.process import signals

# In a rank: the process id of our agent, which reports how its ranks ended.
AGENT_VARIABLE = "SFT_PLAY_AGENT"
# In ranks and their agent: the run folder that the command planned and named for them.
RUN_VARIABLE = "SFT_PLAY_RUN"
# In an agent: the command that its messages start with, where it does not train.
COMMAND_VARIABLE = "SFT_PLAY_COMMAND"
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Beside the error file: the rank's latest step, readable after it was killed.
HEARTBEAT_NAME = "beat.txt"
# Beside the error file: the stacks of a rank that crashed in native code (SIGSEGV, SIGABRT).
FAULT_NAME = "fault.txt"
# How long a rank may keep saving after its agent is gone. Half a minute is short for a checkpoint
# of 10 GiB; but as long as this lasts, a rank that hangs keeps a GPU busy.
ORPHAN_GRACE_S = 120.0

# The user can fix it; stopped by the user; a bug of ours or of a library; another rank is gone; one
# hangs.
FailureKind = Literal["user", "stopped", "fault", "peer", "hung"]

# Texts of gloo, NCCL and torch's TCPStore: torch raises one RuntimeError for all of them.
_PEER_GONE = re.compile(
    r"gloo/transport\S*\] .*"
    r"(clos|reset|refused|broken pipe|read error|write error|no route|unreachable)"
    r"|Connection (closed|reset|refused) by (peer|remote)|Connection was likely closed|Broken pipe"
    r"|NCCL .*(aborted|remote process exited)|ncclRemoteError|DistNetworkError"
    r"|recvValue failed|sendBytes failed",
    re.IGNORECASE | re.DOTALL,
)
_TIMED_OUT = re.compile(
    r"Timed out waiting \d+ ?ms|collective operation timeout|Socket Timeout|wait timeout after"
    r"|store.* timed? ?out|Application timeout",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Failure:
    """How a rank ended, as it reported it; `time` is when it first did, in seconds since 1970."""

    kind: FailureKind
    exit_code: int
    name: str
    message: str
    traceback: str
    time: float
    rank: int
    host: str
    pid: int


# The first failure of this process: its exception, and when it came.
_recorded: tuple[BaseException | None, float] | None = None
_record_lock = threading.Lock()


def failure_kind(error: BaseException) -> FailureKind:
    """Which kind of ending an exception is."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "stopped"
    if isinstance(error, SftPlayError):
        return "user"
    # torch.distributed raises RuntimeErrors
    if not isinstance(error, (RuntimeError, ConnectionError)):
        return "fault"
    text = f"{type(error).__name__}: {error}"
    if _TIMED_OUT.search(text):
        return "hung"
    return "peer" if _PEER_GONE.search(text) else "fault"


def report_to_agent(error: BaseException) -> bool:
    """Record how this rank ends. True if its agent will report it, so that this process does not
    have to; False where this process is no rank."""
    record_failure(failure_kind(error), str(error), error=error)
    return is_under_agent()


def record_failure(kind: FailureKind, message: str, *, error: BaseException | None = None) -> None:
    """Write a failure into the launcher's file, if there is one. The first failure stays: what
    follows, such as connections that break, only hides it. It is replaced only by a message of ours
    about the same exception.
    """
    global _recorded
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    exit_code = Interrupted.exit_code if kind == "stopped" else getattr(error, "exit_code", 1)
    name = stack = ""
    if error is not None:
        name, stack = type(error).__name__, "".join(traceback.format_exception(error))
    with _record_lock:
        failed_at = time.time()
        if _recorded is not None:
            first_error, failed_at = _recorded
            # one of our errors may rephrase an earlier exception that it was raised from
            if (
                not isinstance(error, SftPlayError)
                or error.__cause__ is None
                or error.__cause__ is not first_error
            ):
                return
        if is_under_agent() and threading.current_thread() is threading.main_thread():
            # The agent ends the other ranks at the first failure, but they finish writing theirs.
            for signal_number in signals.STOP_SIGNALS:
                signal.signal(signal_number, signal.SIG_IGN)
        message, stack = redact(escape_control(message)), redact(escape_control(stack))
        rank = int(os.environ.get("RANK", "0"))
        failure = Failure(
            kind,
            exit_code,
            name,
            message,
            stack,
            failed_at,
            rank,
            socket.gethostname(),
            os.getpid(),
        )
        _recorded = error, failed_at
        error_text = f"{name}: {message}" if name else message
        extra = {"py_callstack": stack or error_text, "timestamp": str(int(failed_at))}
        record = {
            "message": {"message": error_text, "extraInfo": extra},
            "sft_play": asdict(failure),
        }
        with contextlib.suppress(OSError):  # a full disk must not hide the error being reported
            atomic.write(Path(path), json.dumps(record))


def read_failure(error_file: Path) -> Failure | None:
    """The failure that a rank recorded; None where it recorded none, or not in our form."""
    try:
        return Failure(**json.loads(error_file.read_text(encoding="utf-8"))["sft_play"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 0, 2, 3`."""
    rank_list = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' * (len(ranks) != 1)} {rank_list}"


# --- parents and children -------------------------------------------------------------------------


def is_under_agent() -> bool:
    """Whether this process is a rank whose agent is ours and alive."""
    return os.environ.get(AGENT_VARIABLE) == str(os.getppid())


def rank_file_path(name: str) -> Path | None:
    """A file of this rank that its launcher finds; None where no launcher named a folder."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    return Path(path).with_name(name) if path else None


def install_process_guards() -> None:
    """Set up what ends this process: its starter and, for a rank, its launcher. A rank that is told
    to stop before the training handles signals closes what is open, and records its end."""
    signals.watch_parent()
    agent_pid = os.environ.get(AGENT_VARIABLE)
    if is_under_agent():
        signals.StopSignals(signals.raise_interrupt).__enter__()  # for the life of the process
        signals.end_when_unresponsive(exit_stopped)
        path = rank_file_path(FAULT_NAME)
        if path is not None:
            with contextlib.suppress(OSError):
                # open until the process ends
                faulthandler.enable(
                    os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), all_threads=False
                )
        signals.die_with_parent(os.getppid(), signal.SIGTERM)
        threading.Thread(target=_exit_after_agent, daemon=True, name="sft_play agent watch").start()
    elif "RANK" in os.environ:
        # it ended before this rank watched it
        if agent_pid is not None and not psutil.pid_exists(int(agent_pid)):
            os.kill(os.getpid(), signal.SIGTERM)
        # torch's launcher, or DeepSpeed's
        if "TORCHELASTIC_RUN_ID" in os.environ or "CROSS_SIZE" in os.environ:
            signals.die_with_parent(os.getppid(), signal.SIGTERM)


def exit_stopped() -> None:
    """End this process, whose main thread does not hear that it was asked to stop."""
    report_to_agent(KeyboardInterrupt())
    os._exit(Interrupted.exit_code)


def _exit_after_agent() -> None:
    while is_under_agent():
        time.sleep(1)
    time.sleep(ORPHAN_GRACE_S)
    # not sys.exit: the main thread may hang in a collective, and nothing of Python's would end it
    os._exit(1)


def find_agent_processes(agent_pid: int) -> Iterator[psutil.Process]:
    """Every living process among an agent's ranks and what they started, by the variable that they
    inherited."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid in (agent_pid, os.getpid()) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(AGENT_VARIABLE) == str(agent_pid):
                yield process


def kill_leftovers(agent_pid: int, *, grace_s: float) -> None:
    """Wait for the processes that an agent's ranks left behind, and kill those that do not end."""
    deadline = time.monotonic() + grace_s
    while (leftovers := list(find_agent_processes(agent_pid))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in leftovers:
        with contextlib.suppress(psutil.Error):
            process.kill()


def kill_process_tree(agent_pid: int) -> None:
    """SIGKILL for an agent and everything below it; the agent itself ends only what is below it."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(agent_pid)
        tree = [root, *root.children(recursive=True)]  # listed first: orphans get another parent
    for process in [*tree, *find_agent_processes(agent_pid)]:
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid():
                process.kill()


def kill_compilers() -> None:
    """Kill what this process's child programs have started in its session. ninja leaves its
    compilers behind when it is killed, and Python kills it when a signal ends the wait for it."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.ppid() != os.getpid() and os.getsid(process.pid) == os.getsid(0):
                process.kill()
