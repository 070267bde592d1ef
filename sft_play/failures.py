"""How a rank of several ends: written down by the rank itself, for the agent that started it to word once.

A rank writes into the file that torch's launcher names in TORCHELASTIC_ERROR_FILE, in the form that the launcher reads
(`message`, `extraInfo`), with our own part beside it. Under our agent (`sft_play.train.agent`) the rank itself prints
nothing of it: of eight ranks that find the same mistake one would like to read once. Under another launcher it prints
as a single process does.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from sft_play import endings
from sft_play.errors import Interrupted, SftPlayError
from sft_play.log import escape_control, redact

AGENT_VARIABLE = "SFT_PLAY_AGENT"
"""In a rank: the process id of our agent, which words how its ranks ended."""
RUN_VARIABLE = "SFT_PLAY_RUN"
"""In ranks and their agent: the run folder that the command planned and named for them."""
COMMAND_VARIABLE = "SFT_PLAY_COMMAND"
"""In an agent: the command that its words begin with, where it is not a training's."""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
BEAT_NAME = "beat.txt"
"""Beside the error file: the step at which the rank was last, readable after it was killed."""
FAULT_NAME = "fault.txt"
"""Beside the error file: the stacks of a rank that a fault of the machine code ended (SIGSEGV, SIGABRT)."""
ORPHAN_S = 120.0
"""How long a rank may go on saving once its agent is gone. Half a minute is short for a checkpoint of some 10 GiB; a
rank that hangs holds a GPU meanwhile."""

Kind = Literal["mend", "stopped", "fault", "peer", "hung"]
"""For the user to mend; stopped by the user; a fault of ours or of a library; another rank went away; one hangs."""

_PEER_GONE = re.compile(
    r"gloo/transport\S*\] .*(clos|reset|refused|broken pipe|read error|write error|no route|unreachable)"
    r"|Connection (closed|reset|refused) by (peer|remote)|Connection was likely closed|Broken pipe"
    r"|NCCL .*(aborted|remote process exited)|ncclRemoteError|DistNetworkError|recvValue failed|sendBytes failed",
    re.IGNORECASE | re.DOTALL,
)
_WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|collective operation timeout|Socket Timeout|wait timeout after|store.* timed? ?out"
    r"|Application timeout",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Failure:
    """How a rank ended, in its own words; `time` is that of the first word, in seconds since 1970."""

    kind: Kind
    exit_code: int
    name: str
    message: str
    traceback: str
    time: float
    rank: int
    host: str
    pid: int


_written: tuple[BaseException | None, Failure] | None = None
_writing = threading.Lock()
_fault_file: Any = None


def kind_of(error: BaseException) -> Kind:
    """Which kind of end an exception is."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "stopped"
    if isinstance(error, SftPlayError):
        return "mend"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (RuntimeError, ConnectionError)):  # what torch.distributed raises are RuntimeErrors
        if _WAITED.search(text):
            return "hung"
        if _PEER_GONE.search(text):
            return "peer"
    return "fault"


def hand_over(error: BaseException) -> bool:
    """Write down how this rank ends; whether its agent says it, so that the rank need not.

    False too where this process is no rank.
    """
    kind = kind_of(error)
    code = {"mend": 2, "stopped": Interrupted.exit_code}.get(kind, 1)
    write_down(
        kind,
        str(error),
        name=type(error).__name__,
        exit_code=error.exit_code if isinstance(error, SftPlayError) else code,
        stack="".join(traceback.format_exception(error)),
        error=error,
    )
    return under_agent()


def write_down(
    kind: Kind, message: str, *, name: str = "", exit_code: int = 1, stack: str = "", error: BaseException | None = None
) -> None:
    """Write a failure into the launcher's file; nothing without one.

    The first word stands: what follows it, such as the connections that break when a rank leaves, only hides it. The
    one thing that may take its place is a message of ours about the very same exception.
    """
    global _written
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    with _writing:
        if _written is not None and not _is_worded(error, _written[0]):
            return
        if under_agent() and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(
                    number, signal.SIG_IGN
                )  # the agent ends the others at the first failure: not while writing
        failure = Failure(
            kind=kind,
            exit_code=exit_code,
            name=name,
            message=_safe(message),
            traceback=_safe(stack),
            time=_written[1].time if _written is not None else time.time(),
            rank=int(os.environ.get("RANK", "0")),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        _written = (error, failure)
        shown = f"{name}: {failure.message}" if name else failure.message
        extra = {"py_callstack": failure.traceback or shown, "timestamp": str(int(failure.time))}
        answer = {"message": {"message": shown, "extraInfo": extra}, "sft_play": asdict(failure)}
        with contextlib.suppress(OSError):  # a full disk must not hide what is being reported
            aside = Path(f"{path}.{os.getpid()}")
            aside.write_text(json.dumps(answer), encoding="utf-8")
            aside.replace(path)


def _is_worded(error: BaseException | None, earlier: BaseException | None) -> bool:
    """Whether an error of ours words an earlier exception that it was raised from."""
    cause = error.__cause__ if isinstance(error, SftPlayError) else None
    return cause is not None and cause is earlier


def _safe(text: str) -> str:
    return redact(escape_control(text))


def read(error_file: Path) -> Failure | None:
    """The failure that a rank wrote down; None where it wrote none, or not in our form."""
    try:
        own = json.loads(error_file.read_text(encoding="utf-8"))["sft_play"]
        return Failure(**own)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def numbered(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 0, 2, 3`."""
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' if len(ranks) != 1 else ''} {listed}"


# --- parents and children ---------------------------------------------------------------------------------------------


def under_agent() -> bool:
    """Whether this process is a rank whose agent, our own, is alive."""
    return os.environ.get(AGENT_VARIABLE) == str(os.getppid())


def beside_error_file(name: str) -> Path | None:
    """A file of this rank's own that its launcher finds; None where no launcher named a folder."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    return Path(path).with_name(name) if path else None


def begin_process() -> None:
    """Settle what ends this process: whoever started it for a purpose of its own, and of a rank its launcher too.

    A rank that is told to stop before the training takes the signals over closes what is open, and writes its end down.
    """
    global _fault_file
    endings.leave_with_starter()
    if not under_agent():
        _leave_with_launcher(os.environ)
        return
    endings.StopSignals(endings.interrupt).__enter__()  # as long as the process lives
    path = beside_error_file(FAULT_NAME)
    if path is not None:
        with contextlib.suppress(OSError):
            _fault_file = path.open("w", encoding="utf-8")
            faulthandler.enable(file=_fault_file, all_threads=False)
    endings.leave_with(os.getppid(), signal.SIGTERM)
    threading.Thread(target=_leave_after, args=(os.getppid(),), daemon=True, name="sft_play agent watch").start()


def _leave_with_launcher(environment: Mapping[str, str]) -> None:
    """End a rank with what started it: torch's or DeepSpeed's launcher by the variables that it sets, or our agent that
    has ended before this rank could look."""
    agent = environment.get(AGENT_VARIABLE, "")
    if "RANK" in environment and agent.isdigit() and not psutil.pid_exists(int(agent)):
        os.kill(os.getpid(), signal.SIGTERM)
    if "RANK" in environment and ("TORCHELASTIC_RUN_ID" in environment or "CROSS_SIZE" in environment):
        endings.leave_with(os.getppid(), signal.SIGTERM)


def _leave_after(agent: int) -> None:
    """Wait for the agent's end, of which this rank is told; end the rank where it does not save and stop."""
    while os.getppid() == agent:
        time.sleep(1)
    time.sleep(ORPHAN_S)
    os._exit(1)


def ranks_of_agent(agent: int) -> Iterator[psutil.Process]:
    """Every living process that an agent's ranks are or have started, by the variable that they inherited."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_own = process.environ().get(AGENT_VARIABLE) == str(agent)
            if is_own and process.pid not in (agent, os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end_leftovers(agent: int, *, patience_s: float) -> list[int]:
    """Wait for what an agent's ranks have left behind and end what does not end; the pids that had to be killed."""
    deadline = time.monotonic() + patience_s
    while (left := list(ranks_of_agent(agent))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return [process.pid for process in left]


def end_at_once(agent: int) -> None:
    """SIGKILL for an agent and everything below it."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(agent)
        tree = [root, *root.children(recursive=True)]
    for process in [*tree, *ranks_of_agent(agent)]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def out_of_memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since the machine started; None where unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
