"""torch's launcher with readable endings: `python -m sft_play.launch.agent` takes `torchrun`'s words.

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
from sft_play.exit_codes import add_exit_status, write_json_line
from sft_play.log import escape_control, one_line, redact, set_up_logging, survive_lost_output
from sft_play.process import failures
from sft_play.process.failures import Failure
from sft_play.process.signals import STOP_SIGNALS, StopSignals, end_when_unresponsive, watch_parent
from sft_play.runs.folder import CRASH_ENTRY, RunFolder
from sft_play.runs.lookup import WRITER, lock_run
from sft_play.training.heartbeat import read_note

logger = logging.getLogger(__name__)

# The command that started the ranks, which messages begin with.
COMMAND = os.environ.get(failures.COMMAND_VARIABLE, "train-distributed")
# How long processes that ranks started, such as a data loader's workers, have to notice that the ranks have ended.
LEFTOVER_TIMEOUT_S = 5.0
# torch's errors where a GPU or NCCL fails, such as memory errors that cannot be corrected.
_GPU_ERRORS = ("AcceleratorError", "DistBackendError")
# What torch raises where nodes do not meet, or a port is taken.
_RENDEZVOUS_ERRORS = (RendezvousTimeoutError, RendezvousConnectionError, DistStoreError, DistNetworkError)


@dataclass(frozen=True)
class RankExit:
    """How a rank ended as the launcher saw it (`time` in seconds since 1970), with the rank's own record of it."""

    rank: int
    pid: int
    exit_code: int
    time: float
    failure: Failure | None = None
    step: str = ""
    stack: str = ""

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, or None."""
        number = -self.exit_code
        known = {member.value: member.name for member in signal.Signals}
        return None if number <= 0 else known.get(number, f"signal {number}")

    @property
    def was_told_to_stop(self) -> bool:
        """Whether it ended because somebody told it to."""
        return (
            self.failure.kind == "stopped"
            if self.failure
            else self.signal in {stop_signal.name for stop_signal in STOP_SIGNALS}
        )


def root_exit(exits: Sequence[RankExit], *, stopped: bool) -> RankExit:
    """The first failure that is no consequence: a broken connection or a rank told to end is one."""

    def sort_key(rank_exit: RankExit) -> tuple[int, float]:
        is_consequence = (rank_exit.failure is not None and rank_exit.failure.kind == "peer") or (
            rank_exit.was_told_to_stop and not stopped
        )
        # the launcher notes whole seconds; a rank records its failure before it ends
        return int(is_consequence) + int(
            rank_exit.was_told_to_stop and not stopped
        ), rank_exit.failure.time if rank_exit.failure else rank_exit.time + 1

    return min(exits, key=sort_key)


def describe_exit(rank_exit: RankExit, world_size: int | None) -> str:
    """How a rank ended, in one line."""
    name = f"rank {rank_exit.rank}" + (f" of {world_size}" if world_size else "") + f" (pid {rank_exit.pid})"
    step_note = f" at step {rank_exit.step}" if rank_exit.step else ""
    if rank_exit.failure is None and rank_exit.signal is not None:
        cause = " (out of memory? see dmesg)" if rank_exit.signal == "SIGKILL" else ""
        return f"{name} was killed by {rank_exit.signal}{step_note}{cause}"
    if rank_exit.failure is None:
        return f"{name} ended with exit code {rank_exit.exit_code} and no message{step_note}"
    failure = rank_exit.failure
    if failure.kind == "fault":
        return f"{name} ended with {failure.name}{step_note}: {one_line(failure.message, limit=600)}"
    if failure.kind == "peer":
        return f"{name} lost its connection to another rank{step_note}: {one_line(failure.message, limit=600)}"
    return failure.message


def failure_report(exits: Sequence[RankExit], world_size: int | None, *, stopped: bool) -> tuple[str, int]:
    """What is printed, and the exit code."""
    root = root_exit(exits, stopped=stopped)
    failure = root.failure
    if failure is not None and failure.kind == "stopped":
        stop_failures = [
            end.failure for end in exits if end.failure and end.failure.kind == "stopped" and end.failure.message
        ]
        # rank 0 knows what was saved, and where
        failure = min(stop_failures, key=lambda record: record.rank, default=failure)
        message = failure.message or "stopped by the user; what was saved until then is kept"
        return f"[{COMMAND}] {message}", Interrupted.exit_code
    if stopped and root.was_told_to_stop:
        message = "stopped by the user before the training could save; what was saved until then is kept"
        return f"[{COMMAND}] {message}", Interrupted.exit_code
    if failure is not None and failure.kind == "user":
        other_failures = (end.failure for end in exits if end is not root)
        is_shared_failure = root.rank == 0 or any(
            record is not None and record.message == failure.message for record in other_failures
        )
        prefix = (
            ""
            if is_shared_failure or failure.message.startswith("rank ")
            else f"rank {root.rank} (host {failure.host}): "
        )
        return f"[{COMMAND}] error: {prefix}{failure.message}", failure.exit_code
    stack = root.stack  # of a crash, else the traceback of a fault
    if failure is not None:
        stack = failure.traceback if failure.kind == "fault" else ""
    parts = [stack.rstrip(), f"[{COMMAND}] error: {describe_exit(root, world_size)}"]
    return "\n".join(part for part in parts if part), 1


def describe_crash(exits: Sequence[RankExit], world_size: int | None, *, was_requested: bool) -> str | None:
    """How a rank died, in one line, where the ranks may live if they are started again: it left no message, lost
    another, waited in vain, or its GPU failed; else None, and where a stop was asked for."""
    root = root_exit(exits, stopped=was_requested)
    failure = root.failure
    can_restart = (
        failure is None or failure.kind in ("peer", "hung") or (failure.kind == "fault" and failure.name in _GPU_ERRORS)
    )
    return describe_exit(root, world_size) if can_restart and not (was_requested or root.was_told_to_stop) else None


class _StopRequest:
    """Passes the first request to stop on to the ranks, which save and stop; a second ends everything at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_immediate = False

    def forward_to_ranks(self, signal_number: int) -> None:
        """Tell the ranks; raises KeyboardInterrupt where there are none yet, since the nodes have not met."""
        self.is_requested = True
        rank_processes = psutil.Process().children()  # the ranks; what they have started ends with them
        if not rank_processes:
            raise KeyboardInterrupt
        for rank in rank_processes:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)

    def end_at_once(self, signal_number: int) -> None:
        self.is_immediate = True
        failures.kill_process_tree(os.getpid())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; returns sft-play's exit code."""
    set_up_logging(COMMAND, stream=sys.stderr)
    stop_request = _StopRequest()
    StopSignals(stop_request.forward_to_ranks, stop_request.end_at_once).__enter__()  # as long as the process lives
    end_when_unresponsive(failures.exit_stopped)
    torch_logger = logging.getLogger("torch.distributed.elastic")  # it would log every rank's end beside our report
    torch_logger.propagate = False
    torch_logger.addHandler(logging.NullHandler())
    os.environ[failures.AGENT_VARIABLE] = str(os.getpid())
    options = launcher.parse_args(sys.argv[1:] if argv is None else list(argv))
    options.signals_to_handle = "SIGQUIT"  # torch's own handling of the others ends the ranks after 30 s
    with tempfile.TemporaryDirectory(prefix="sft_play_ranks_", ignore_cleanup_errors=True) as log_folder:
        options.log_dir = options.log_dir or log_folder
        exit_code, text = 0, ""
        try:
            watch_parent()
            launcher.run(options)
        except ChildFailedError as error:
            exits = [_read_exit(rank, failure, Path(options.log_dir)) for rank, failure in error.failures.items()]
            text, exit_code = failure_report(exits, _world_size(options), stopped=stop_request.is_requested)
            if stop_request.is_immediate:
                text, exit_code = f"[{COMMAND}] ended at once; what was saved until then is kept", Interrupted.exit_code
            crash = describe_crash(exits, _world_size(options), was_requested=stop_request.is_requested)
            _record_in_run(text.splitlines(), exit_code, crash)
        except (KeyboardInterrupt, SignalException):
            text = f"[{COMMAND}] stopped by the user before the ranks had started"
            exit_code = Interrupted.exit_code
        except _RENDEZVOUS_ERRORS as error:
            text = f"[{COMMAND}] error: {_rendezvous_error(error, options)}"
            exit_code = 2
        _print_ending(text, exit_code)
        if exit_code:
            failures.kill_leftovers(os.getpid(), grace_s=LEFTOVER_TIMEOUT_S)
    return exit_code


def _print_ending(text: str, exit_code: int) -> None:
    if text:
        sys.stdout.flush()
        sys.stderr.write(redact(f"{escape_control(text)}\n"))
        sys.stderr.flush()
    answer = os.environ.get(failures.ANSWER_VARIABLE)
    if answer is not None:
        write_json_line(
            add_exit_status(
                json.loads(answer), exit_code, redact(_error_text(text.splitlines())) if exit_code else None
            )
        )


def _error_text(lines: Sequence[str]) -> str:
    line = next((line for line in lines if line.startswith(f"[{COMMAND}] error: ")), lines[-1])
    return line.partition("error: ")[2] or line


def _read_exit(rank: int, failure: ProcessFailure, log_dir: Path) -> RankExit:
    note_path = _newest_file(log_dir, f"{failure.local_rank}/{failures.HEARTBEAT_NAME}")
    fault_path = _newest_file(log_dir, f"{failure.local_rank}/{failures.FAULT_NAME}")
    last_note = read_note(note_path) if note_path is not None else None
    step = f"{last_note[0]} ({last_note[2]})" if last_note is not None else ""
    stack = fault_path.read_text(encoding="utf-8", errors="replace") if fault_path is not None else ""
    rank_failure = failures.read_failure(Path(failure.error_file))
    rank_failure = rank_failure if rank_failure is not None and rank_failure.pid == failure.pid else None
    return RankExit(rank, failure.pid, failure.exitcode, float(failure.timestamp), rank_failure, step, stack)


def _newest_file(folder: Path, name: str) -> Path | None:
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime, default=None)


def _world_size(options: Any) -> int | None:
    try:
        return int(options.nproc_per_node) * int(str(options.nnodes).rpartition(":")[2])
    except ValueError:
        return None


def _record_in_run(lines: Sequence[str], exit_code: int, crash: str | None) -> None:
    path = os.environ.get(failures.RUN_VARIABLE)
    if not path:
        return
    folder = RunFolder(Path(path))
    try:
        with lock_run(folder, role=WRITER):
            manifest = folder.read_manifest()
            if folder.log_path.exists():
                with folder.log_path.open("a", encoding="utf-8") as log:
                    log.writelines(f"{line}\n" for line in lines)
            # a rank that could not write it may have run out of memory: what rank 0 wrote is its lost connection
            # and one that was told to end with the others may have written that it was stopped
            has_failed = manifest.get("status") in ("running", "failed", *(["stopped"] if crash else []))
            if exit_code != Interrupted.exit_code and has_failed:
                folder.update_manifest(status="failed", error=_error_text(lines), **{CRASH_ENTRY: crash})
    except (SftPlayError, OSError):  # the folder was never made, was removed, or has become another run's
        return


def _rendezvous_error(error: Exception, options: Any) -> str:
    text = one_line(str(error).partition("\n")[0], limit=300)
    address = f"{options.master_addr}:{options.master_port}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return f"{address} is already in use; give another MASTER_PORT=, the same on all nodes ({text})"
    return (f"the {options.nnodes} nodes did not meet at {address}: start the command on each of them with the same "
            f"MASTER_ADDR= and MASTER_PORT=, and check whether one has failed ({text})")  # fmt: skip


if __name__ == "__main__":
    survive_lost_output()
    sys.exit(main())
