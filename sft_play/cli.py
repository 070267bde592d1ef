"""The program: reads the request, runs the command, writes its answer, and maps errors to exit
codes."""

import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from sft_play import commands, exit_codes, log
from sft_play.commands.request import error_text, read_request, require_writable_out, write_result
from sft_play.errors import DoesNotFit, Interrupted, SftPlayError, translate_library_errors
from sft_play.process import failures
from sft_play.process.environment import set_library_variables
from sft_play.process.waiting import report_wait
from sft_play.variables import spell_commands

logger = logging.getLogger(__name__)


def import_command(argv: Sequence[str]) -> None:
    """Import the file of the command that `argv` names, before anything starts that Ctrl-C could
    leave half done."""
    command = next(
        (word for word in argv if word in (*commands.COMMAND_FILES, *commands.INTERNAL_COMMANDS)),
        None,
    )
    if command is not None:
        commands.load_module(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 done, 2 the user can fix it, 3 does not fit, 130
    stopped)."""
    argv = sys.argv[1:] if argv is None else argv
    set_library_variables()
    command = next((word for word in argv if not word.startswith("-")), "sft-play")
    log.set_up_logging(log.escape_control(command)[:20], stream=sys.stderr)
    failures.install_process_guards()
    is_json = exit_codes.wants_json(argv)
    if "--why" in argv:  # the log, and that of ranks, read the variable
        os.environ["WHY"] = "1"
    try:
        request = read_request(argv, os.environ)
        log.set_up_logging(request.command, stream=sys.stderr if is_json else sys.stdout)
        # given as a flag; ranks and `checkpoints.last_checkpoint` read the variable
        if request.trust:
            os.environ["TRUST"] = "1"
        if request.out is not None:
            require_writable_out(request.out)
        with translate_library_errors():
            with _report_silence(request.command):
                result = commands.command_function(request.command)(request)
            return write_result(result, request)
    except SftPlayError as error:
        sys.stdout.flush()  # so that the error comes last where both streams go to one file
        if not failures.report_to_agent(error):  # a rank's agent reports it once for all ranks
            _write_json_error(_unfitting_plan(error) or {}, error.exit_code, error, is_json=is_json)
            kind = "" if isinstance(error, Interrupted) else "error: "
            text = spell_commands(log.escape_control(str(error)))
            sys.stderr.write(log.redact(f"[{command}] {kind}{text}\n"))
        return error.exit_code
    except KeyboardInterrupt as error:
        if not failures.report_to_agent(error):
            _write_json_error({}, Interrupted.exit_code, error, is_json=is_json)
            logger.warning("stopped by the user; what was saved until then is kept")
        return Interrupted.exit_code
    except Exception as error:
        if not failures.report_to_agent(error):
            raise  # entry tells a Ctrl-C that a library has reworded from a fault of ours
        return exit_codes.EXIT_FAULT


# What a command does where none of its parts says so; others have lines of their own, or wait for
# the user.
_COMMAND_TASKS = {
    "plan": "Planning",
    "doctor": "Checking this machine",
    **dict.fromkeys(
        ("eval", "ship", "merge", "merge-test", "export", "export-test", "infer", "consolidate"),
        "Working on the run",
    ),
}


def _report_silence(command: str) -> contextlib.AbstractContextManager[object]:
    if command not in _COMMAND_TASKS:
        return contextlib.nullcontext()
    return report_wait(_COMMAND_TASKS[command])


def _write_json_error(
    data: dict[str, object], exit_code: int, error: BaseException, *, is_json: bool
) -> None:
    """With JSON=1, write the JSON object of a failed command; among a launcher's ranks only rank 0
    writes it."""
    if is_json and os.environ.get("RANK", "0") == "0":
        exit_codes.write_json_line(exit_codes.add_exit_status(data, exit_code, error_text(error)))


def _unfitting_plan(error: BaseException | None) -> dict[str, object] | None:
    while error is not None:
        if isinstance(error, DoesNotFit) and error.plan is not None:
            return error.plan
        error = error.__cause__
    return None
