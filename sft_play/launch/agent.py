"""torch's launcher with readable endings: `python -m sft_play.launch.agent` takes `torchrun`'s
words.

The ranks are started, watched and ended by torch's own elastic agent, in this process. Only the
report of a failed rank differs: the launcher prints a traceback of its own and exits with 1; here
the first failure that is not the consequence of another is told, with sft-play's exit codes. And a
signal is passed on to the ranks, and waited for, where torch would end them after 30 s.
"""

import contextlib
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
from sft_play.log import escape_control, one_line, redact, set_up_logging, survive_lost_output
from sft_play.process import failures
from sft_play.process.signals import (
    STOP_SIGNALS,
    StopSignals,
    end_when_unresponsive,
    signal_name,
    watch_parent,
)
from sft_play.runs.folder import CRASH_ENTRY, RunFolder
from sft_play.runs.lookup import WRITER, lock_run
from sft_play.training.heartbeat import read_note
from sft_play.variables import spell_commands

# The command that started the ranks, which messages begin with.
COMMAND = os.environ.get(failures.COMMAND_VARIABLE, "train-distributed")
# How long processes that ranks started, such as a data loader's workers, have to notice that the
# ranks have ended.
LEFTOVER_TIMEOUT_S = 5.0
# torch's errors where a GPU or NCCL fails, such as memory errors that cannot be corrected.
_GPU_ERRORS = ("AcceleratorError", "DistBackendError")
# What torch raises where nodes do not meet, or a port is taken.
_RENDEZVOUS_ERRORS = (
    RendezvousTimeoutError,
    RendezvousConnectionError,
    DistStoreError,
    DistNetworkError,
)


@dataclass(frozen=True)
class RankExit:
    """How a rank ended as the launcher saw it (`time` in seconds since 1970), with the rank's own
    record of it."""

    rank: int
    pid: int
    exit_code: int
    time: float
    failure: failures.Failure | None = None
    step: str = ""
    stack: str = ""

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, or None."""
        return signal_name(-self.exit_code) if self.exit_code < 0 else None

    @property
    def was_told_to_stop(self) -> bool:
        """Whether it ended because somebody told it to."""
        if self.failure is not None:
            return self.failure.kind == "stopped"
        return self.signal in {stop_signal.name for stop_signal in STOP_SIGNALS}


def root_exit(exits: Sequence[RankExit], *, stopped: bool) -> RankExit:
    """Find the rank that failed first by itself. A rank that lost its connection to another, or was
    told to end, failed only because of that one. `stopped`: the user asked for the end."""

    def sort_key(rank_exit: RankExit) -> tuple[int, float]:
        failure = rank_exit.failure
        # the launcher notes whole seconds; a rank records its failure before it ends
        time = rank_exit.time + 1 if failure is None else failure.time
        if rank_exit.was_told_to_stop and not stopped:
            return 2, time
        return int(failure is not None and failure.kind == "peer"), time

    return min(exits, key=sort_key)


def describe_exit(rank_exit: RankExit, world_size: int) -> str:
    """How a rank ended, in one line."""
    failure = rank_exit.failure
    name = f"rank {rank_exit.rank} of {world_size} (pid {rank_exit.pid})"
    step_note = f" at step {rank_exit.step}" if rank_exit.step else ""
    if failure is None:
        if rank_exit.signal is None:
            return f"{name} ended with exit code {rank_exit.exit_code} and no message{step_note}"
        cause = " (out of memory? see dmesg)" if rank_exit.signal == "SIGKILL" else ""
        return f"{name} was killed by {rank_exit.signal}{step_note}{cause}"
    message = one_line(failure.message, limit=600)
    if failure.kind == "fault":
        return f"{name} ended with {failure.name}{step_note}: {message}"
    if failure.kind == "peer":
        return f"{name} lost its connection to another rank{step_note}: {message}"
    return failure.message


def failure_report(exits: Sequence[RankExit], world_size: int, *, stopped: bool) -> tuple[str, int]:
    """What is printed, and the exit code."""
    root = root_exit(exits, stopped=stopped)
    failure, stack = root.failure, root.stack
    if root.was_told_to_stop and (stopped or failure is not None):
        # rank 0, which comes first, knows what was saved, and where
        messages = [
            end.failure.message
            for end in sorted(exits, key=lambda end: end.rank)
            if end.was_told_to_stop and end.failure is not None and end.failure.message
        ]
        messages.append(
            "stopped by the user before the training could save; what was saved until then is kept"
        )
        return f"[{COMMAND}] {messages[0]}", Interrupted.exit_code
    if failure is not None and failure.kind == "user":
        message = failure.message
        is_shared = (
            sum(end.failure is not None and end.failure.message == message for end in exits) > 1
        )
        if root.rank != 0 and not is_shared and not message.startswith("rank "):
            message = f"rank {root.rank} (host {failure.host}): {message}"
        return f"[{COMMAND}] error: {message}", failure.exit_code
    if failure is not None:
        stack = failure.traceback if failure.kind == "fault" else ""
    return f"{stack.rstrip()}\n[{COMMAND}] error: {describe_exit(root, world_size)}".lstrip("\n"), 1


def describe_crash(
    exits: Sequence[RankExit], world_size: int, *, was_requested: bool
) -> str | None:
    """Describe in one line a failure that another start may get past: the rank left no message,
    lost another rank, waited in vain, or its GPU failed. None for other failures, and where a stop
    was asked for."""
    root = root_exit(exits, stopped=was_requested)
    if was_requested or root.was_told_to_stop:
        return None
    failure = root.failure
    is_gpu_error = failure is not None and failure.kind == "fault" and failure.name in _GPU_ERRORS
    can_restart = failure is None or failure.kind in ("peer", "hung") or is_gpu_error
    return describe_exit(root, world_size) if can_restart else None


# The requests to stop that have come.
_stop_signals: list[int] = []


def _forward_to_ranks(signal_number: int) -> None:
    """Tell the ranks, which save and stop; raises KeyboardInterrupt where there are none, as nodes
    have not met."""
    _stop_signals.append(signal_number)
    rank_processes = psutil.Process().children()  # the ranks; what they have started ends with them
    if not rank_processes:
        raise KeyboardInterrupt
    for rank in rank_processes:
        with contextlib.suppress(psutil.Error):
            rank.send_signal(signal.SIGTERM)


def _end_at_once(signal_number: int) -> None:
    _stop_signals.append(signal_number)
    failures.kill_process_tree(os.getpid())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; returns sft-play's exit code."""
    set_up_logging(COMMAND, stream=sys.stderr)
    StopSignals(_forward_to_ranks, _end_at_once).__enter__()  # as long as the process lives
    end_when_unresponsive(failures.exit_stopped)
    # it would log every rank's end beside our report
    torch_logger = logging.getLogger("torch.distributed.elastic")
    torch_logger.propagate = False
    torch_logger.addHandler(logging.NullHandler())
    os.environ[failures.AGENT_VARIABLE] = str(os.getpid())
    options = launcher.parse_args(sys.argv[1:] if argv is None else list(argv))
    # torch's own handling of the others ends the ranks after 30 s
    options.signals_to_handle = "SIGQUIT"
    world_size = int(options.nproc_per_node) * int(str(options.nnodes).rpartition(":")[2])
    with tempfile.TemporaryDirectory(
        prefix="sft_play_ranks_", ignore_cleanup_errors=True
    ) as log_folder:
        options.log_dir = options.log_dir or log_folder
        exit_code, text = 0, ""
        try:
            watch_parent()
            launcher.run(options)
        except ChildFailedError as error:
            exits = [
                _read_exit(rank, failure, Path(options.log_dir))
                for rank, failure in error.failures.items()
            ]
            text, exit_code = failure_report(exits, world_size, stopped=bool(_stop_signals))
            if len(_stop_signals) > 1:
                text, exit_code = (
                    f"[{COMMAND}] ended at once; what was saved until then is kept",
                    Interrupted.exit_code,
                )
            _record_in_run(
                text,
                exit_code,
                describe_crash(exits, world_size, was_requested=bool(_stop_signals)),
            )
        except (KeyboardInterrupt, SignalException):
            text = f"[{COMMAND}] stopped by the user before the ranks had started"
            exit_code = Interrupted.exit_code
        except _RENDEZVOUS_ERRORS as error:
            text = f"[{COMMAND}] error: {_rendezvous_error(error, options)}"
            exit_code = 2
        if text:
            sys.stdout.flush()
            sys.stderr.write(redact(f"{spell_commands(escape_control(text))}\n"))
            sys.stderr.flush()
        if exit_code:
            failures.kill_leftovers(os.getpid(), grace_s=LEFTOVER_TIMEOUT_S)
    return exit_code


def _read_exit(rank: int, failure: ProcessFailure, log_dir: Path) -> RankExit:
    """Read how a rank ended, with the files that it left in the launcher's log folder. The folder
    is searched, because torch names no error file for a rank that a signal has ended."""
    step = stack = ""
    for path in log_dir.rglob(f"{failure.local_rank}/{failures.HEARTBEAT_NAME}"):
        last_note = read_note(path)
        if last_note is not None:
            step = f"{last_note[0]} ({last_note[1]})"
    for path in log_dir.rglob(f"{failure.local_rank}/{failures.FAULT_NAME}"):
        stack = path.read_text(encoding="utf-8", errors="replace")
    rank_failure = failures.read_failure(Path(failure.error_file))
    if rank_failure is not None and rank_failure.pid != failure.pid:
        rank_failure = None
    return RankExit(
        rank, failure.pid, failure.exitcode, float(failure.timestamp), rank_failure, step, stack
    )


def _record_in_run(text: str, exit_code: int, crash: str | None) -> None:
    path = os.environ.get(failures.RUN_VARIABLE)
    if not path:
        return
    folder = RunFolder(Path(path))
    # the folder may be gone, or have become another run's
    with contextlib.suppress(SftPlayError, OSError), lock_run(folder, role=WRITER):
        status = folder.read_manifest().get("status")
        with folder.log_path.open("a", encoding="utf-8") as log:
            log.write(f"{text}\n")
        # a rank that could not write it may have run out of memory: what rank 0 wrote is its lost
        # connection and one that was told to end with the others may have written that it was
        # stopped
        has_failed = status in ("running", "failed") or (status == "stopped" and crash is not None)
        if exit_code != Interrupted.exit_code and has_failed:
            message = text.partition(f"[{COMMAND}] error: ")[2]  # after the stack
            folder.update_manifest(
                status="failed", error=message.partition("\n")[0], **{CRASH_ENTRY: crash}
            )


def _rendezvous_error(error: Exception, options: Any) -> str:
    text = one_line(str(error).partition("\n")[0], limit=300)
    address = f"{options.master_addr}:{options.master_port}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return (
            f"{address} is already in use; give another MASTER_PORT=, the same on all nodes"
            f" ({text})"
        )
    return (
        f"the {options.nnodes} nodes did not meet at {address}: start the command on each of them"
        f" with the same MASTER_ADDR= and MASTER_PORT=, and check whether one has failed ({text})"
    )


if __name__ == "__main__":
    survive_lost_output()
    sys.exit(main())
