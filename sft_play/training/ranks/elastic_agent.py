"""torch's launcher with readable endings: `python -m sft_play.training.ranks.elastic_agent` takes `torchrun`'s words.

The ranks are started, watched and ended by torch's own elastic agent, in this process. Only the report of a failed rank
differs: the launcher prints a traceback of its own and exits with 1; here the first failure that is not the consequence
of another is told, with sft-play's exit codes. And a signal is passed on to the ranks, and waited for, where torch
would end them after 30 s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import run as launcher
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from sft_play.errors import Interrupted, SftPlayError
from sft_play.exit_codes import with_ending, write_json_line
from sft_play.log import escape_control, one_line, redact, set_up_logging, survive_lost_output
from sft_play.process import failures
from sft_play.process.failures import Failure
from sft_play.process.signals import STOPPING, StopSignals, end_where_deaf, leave_with_starter
from sft_play.runs.folder import DIED, RunFolder
from sft_play.runs.locking import WRITER, lock
from sft_play.training.ranks.heartbeat import noted

logger = logging.getLogger(__name__)

# The command that started the ranks, which messages begin with.
COMMAND = os.environ.get(failures.COMMAND_VARIABLE, "train-distributed")
# How long processes that ranks started, such as a data loader's workers, have to notice that the ranks have ended.
LEFTOVER_S = 5.0
# torch's errors where a GPU or NCCL fails, such as memory errors that cannot be corrected.
_OF_A_GPU = ("AcceleratorError", "DistBackendError")
# What torch raises where nodes do not meet, or a port is taken.
_NO_MEETING = (RendezvousTimeoutError, RendezvousConnectionError, DistStoreError, DistNetworkError)


@dataclass(frozen=True)
class Ended:
    """How a rank ended as the launcher saw it (`time` in seconds since 1970), with the rank's own record of it."""

    rank: int
    pid: int
    exit_code: int
    time: float
    own: Failure | None = None
    step: str = ""
    stack: str = ""

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, or None."""
        number = -self.exit_code
        known = {one.value: one.name for one in signal.Signals}
        return None if number <= 0 else known.get(number, f"signal {number}")

    @property
    def was_told(self) -> bool:
        """Whether it ended because somebody told it to."""
        return self.own.kind == "stopped" if self.own else self.signal in {number.name for number in STOPPING}


def root_of(ended: Sequence[Ended], *, stopped: bool) -> Ended:
    """The first failure that is no consequence: a broken connection or a rank told to end is one."""

    def order(one: Ended) -> tuple[int, float]:
        is_consequence = (one.own is not None and one.own.kind == "peer") or (one.was_told and not stopped)
        # the launcher notes whole seconds; a rank records its failure before it ends
        return int(is_consequence) + int(one.was_told and not stopped), one.own.time if one.own else one.time + 1

    return min(ended, key=order)


def sentence(one: Ended, world: int | None) -> str:
    """How a rank ended, in one line."""
    name = f"rank {one.rank}" + (f" of {world}" if world else "") + f" (pid {one.pid})"
    at = f" at step {one.step}" if one.step else ""
    if one.own is None and one.signal is not None:
        why = " (out of memory? see dmesg)" if one.signal == "SIGKILL" else ""
        return f"{name} was killed by {one.signal}{at}{why}"
    if one.own is None:
        return f"{name} ended with exit code {one.exit_code} and no message{at}"
    own = one.own
    if own.kind == "fault":
        return f"{name} ended with {own.name}{at}: {one_line(own.message, limit=600)}"
    if own.kind == "peer":
        return f"{name} lost its connection to another rank{at}: {one_line(own.message, limit=600)}"
    return own.message


def report(ended: Sequence[Ended], world: int | None, *, stopped: bool) -> tuple[str, int]:
    """What is printed, and the exit code."""
    root = root_of(ended, stopped=stopped)
    own = root.own
    if own is not None and own.kind == "stopped":
        told = [one.own for one in ended if one.own and one.own.kind == "stopped" and one.own.message]
        own = min(told, key=lambda one: one.rank, default=own)  # rank 0 knows what was saved, and where
        words = own.message or "stopped by the user; what was saved until then is kept"
        return f"[{COMMAND}] {words}", Interrupted.exit_code
    if stopped and root.was_told:
        words = "stopped by the user before the training could save; what was saved until then is kept"
        return f"[{COMMAND}] {words}", Interrupted.exit_code
    if own is not None and own.kind == "user":
        theirs = (one.own for one in ended if one is not root)
        said_by_all = root.rank == 0 or any(one is not None and one.message == own.message for one in theirs)
        prefix = "" if said_by_all or own.message.startswith("rank ") else f"rank {root.rank} (host {own.host}): "
        return f"[{COMMAND}] error: {prefix}{own.message}", own.exit_code
    stack = root.stack  # of a crash, else the traceback of a fault
    if own is not None:
        stack = own.traceback if own.kind == "fault" else ""
    parts = [stack.rstrip(), f"[{COMMAND}] error: {sentence(root, world)}"]
    return "\n".join(part for part in parts if part), 1


def death(ended: Sequence[Ended], world: int | None, *, asked: bool) -> str | None:
    """How a rank died, in one line, where the ranks may live if they are started again: it left no message, lost
    another, waited in vain, or its GPU failed; else None, and where a stop was asked for."""
    root = root_of(ended, stopped=asked)
    own = root.own
    helps = own is None or own.kind in ("peer", "hung") or (own.kind == "fault" and own.name in _OF_A_GPU)
    return sentence(root, world) if helps and not (asked or root.was_told) else None


class _Stopping:
    """Passes the first request to stop on to the ranks, which save and stop; a second ends everything at once."""

    def __init__(self) -> None:
        self.asked = False
        self.at_once = False

    def pass_on(self, number: int) -> None:
        """Tell the ranks; raises KeyboardInterrupt where there are none yet, since the nodes have not met."""
        self.asked = True
        ranks = psutil.Process().children()  # the ranks; what they have started ends with them
        if not ranks:
            raise KeyboardInterrupt
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)

    def end(self, number: int) -> None:
        self.at_once = True
        failures.end_at_once(os.getpid())


def main(words: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; returns sft-play's exit code."""
    set_up_logging(COMMAND, stream=sys.stderr)
    stopping = _Stopping()
    StopSignals(stopping.pass_on, stopping.end).__enter__()  # as long as the process lives
    end_where_deaf(failures.leave_stopped)
    torch_logger = logging.getLogger("torch.distributed.elastic")  # it would log every rank's end beside our report
    torch_logger.propagate = False
    torch_logger.addHandler(logging.NullHandler())
    os.environ[failures.AGENT_VARIABLE] = str(os.getpid())
    given = launcher.parse_args(sys.argv[1:] if words is None else list(words))
    given.signals_to_handle = "SIGQUIT"  # torch's own handling of the others ends the ranks after 30 s
    with tempfile.TemporaryDirectory(prefix="sft_play_ranks_", ignore_cleanup_errors=True) as aside:
        given.log_dir = given.log_dir or aside
        code, text = 0, ""
        try:
            leave_with_starter()
            launcher.run(given)
        except ChildFailedError as error:
            ended = [_ended(rank, failure, Path(given.log_dir)) for rank, failure in error.failures.items()]
            text, code = report(ended, _world(given), stopped=stopping.asked)
            if stopping.at_once:
                text, code = f"[{COMMAND}] ended at once; what was saved until then is kept", Interrupted.exit_code
            died = death(ended, _world(given), asked=stopping.asked)
            _note_in_run(text.splitlines(), code, died)
        except (KeyboardInterrupt, SignalException):
            text = f"[{COMMAND}] stopped by the user before the ranks had started"
            code = Interrupted.exit_code
        except _NO_MEETING as error:
            text = f"[{COMMAND}] error: {_no_meeting(error, given)}"
            code = 2
        _tell(text, code)
        if code:
            failures.end_leftovers(os.getpid(), patience_s=LEFTOVER_S)
    return code


def _tell(text: str, code: int) -> None:
    if text:
        sys.stdout.flush()
        sys.stderr.write(redact(f"{escape_control(text)}\n"))
        sys.stderr.flush()
    answer = os.environ.get(failures.ANSWER_VARIABLE)
    if answer is not None:
        write_json_line(with_ending(json.loads(answer), code, redact(_error_of(text.splitlines())) if code else None))


def _error_of(lines: Sequence[str]) -> str:
    line = next((line for line in lines if line.startswith(f"[{COMMAND}] error: ")), lines[-1])
    return line.partition("error: ")[2] or line


def _ended(rank: int, failure: ProcessFailure, log_dir: Path) -> Ended:
    note = _newest(log_dir, f"{failure.local_rank}/{failures.BEAT_NAME}")
    fault = _newest(log_dir, f"{failure.local_rank}/{failures.FAULT_NAME}")
    last = noted(note) if note is not None else None
    step = f"{last[0]} ({last[2]})" if last is not None else ""
    stack = fault.read_text(encoding="utf-8", errors="replace") if fault is not None else ""
    own = failures.read(Path(failure.error_file))
    own = own if own is not None and own.pid == failure.pid else None
    return Ended(rank, failure.pid, failure.exitcode, float(failure.timestamp), own, step, stack)


def _newest(folder: Path, name: str) -> Path | None:
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime, default=None)


def _world(given: Any) -> int | None:
    try:
        return int(given.nproc_per_node) * int(str(given.nnodes).rpartition(":")[2])
    except ValueError:
        return None


def _note_in_run(lines: Sequence[str], code: int, died: str | None) -> None:
    path = os.environ.get(failures.RUN_VARIABLE)
    if not path:
        return
    folder = RunFolder(Path(path))
    try:
        with lock(folder, by=WRITER):
            manifest = folder.manifest()
            if folder.log_path.exists():
                with folder.log_path.open("a", encoding="utf-8") as log:
                    log.writelines(f"{line}\n" for line in lines)
            # a rank that could not write it may have run out of memory: what rank 0 wrote is its lost connection
            # and one that was told to end with the others may have written that it was stopped
            has_failed = manifest.get("status") in ("running", "failed", *(["stopped"] if died else []))
            if code != Interrupted.exit_code and has_failed:
                folder.update_manifest(status="failed", error=_error_of(lines), **{DIED: died})
    except (SftPlayError, OSError):  # the folder was never made, was removed, or has become another run's
        return


def _no_meeting(error: Exception, given: Any) -> str:
    text = one_line(str(error).partition("\n")[0], limit=300)
    where = f"{given.master_addr}:{given.master_port}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return f"{where} is already in use; give another MASTER_PORT=, the same on all nodes ({text})"
    return (f"the {given.nnodes} nodes did not meet at {where}: start the command on each of them with the same "
            f"MASTER_ADDR= and MASTER_PORT=, and check whether one has failed ({text})")  # fmt: skip


if __name__ == "__main__":
    survive_lost_output()
    sys.exit(main())
