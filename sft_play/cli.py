"""The program: reads the request, runs the command, writes its answer, and maps errors to exit codes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from sft_play import commands
from sft_play.commands.answer import error_text, give, refuse_place
from sft_play.commands.request import read_request
from sft_play.errors import DoesNotFit, Interrupted, SftPlayError, rephrased
from sft_play.exit_codes import EXIT_FAULT, wants_json, with_ending, write_json_line
from sft_play.log import escape_control, redact, set_up_logging
from sft_play.process import failures
from sft_play.process.environment import allocator_setting, waiting_threads

logger = logging.getLogger(__name__)


def prepare(words: Sequence[str]) -> None:
    """Import the file of the command that words name, before anything starts that a Ctrl-C could leave half done."""
    command = next((word for word in words if word in (*commands.FILES, *commands.INTERNAL)), None)
    if command is not None:
        commands.load(command)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 done, 2 the user can fix it, 3 does not fit, 130 stopped)."""
    words = sys.argv[1:] if words is None else words
    os.environ.update(waiting_threads(os.environ))  # OpenMP reads these once, when torch is loaded
    os.environ.update(allocator_setting(os.environ))  # torch reads this when it starts CUDA; ranks inherit both
    command = next((word for word in words if not word.startswith("-")), "sft-play")
    set_up_logging(escape_control(command)[:20], stream=sys.stderr)
    failures.begin_process()
    is_json = wants_json(words)
    if "--why" in words:  # the log, and that of ranks, read the variable
        os.environ["WHY"] = "1"
    try:
        request = read_request(words, os.environ)
        set_up_logging(request.command, stream=sys.stderr if is_json else sys.stdout)
        if request.trust:  # given as a flag; ranks and `checkpoints.last_checkpoint` read the variable
            os.environ["TRUST"] = "1"
        if request.out is not None:
            refuse_place(request.out)
        with rephrased():
            return give(commands.load(request.command).run(request), request)
    except SftPlayError as error:
        sys.stdout.flush()  # so that the error comes last where both streams go to one file
        if not failures.hand_over(error):  # a rank's agent reports it once for all ranks
            _write_ending(_refused_plan(error) or {}, error.exit_code, error, wanted=is_json)
            kind = "" if isinstance(error, Interrupted) else "error: "
            sys.stderr.write(redact(f"[{command}] {kind}{escape_control(str(error))}\n"))
        return error.exit_code
    except KeyboardInterrupt as error:
        if not failures.hand_over(error):
            _write_ending({}, Interrupted.exit_code, error, wanted=is_json)
            logger.warning("stopped by the user; what was saved until then is kept")
        return Interrupted.exit_code
    except Exception as error:
        if not failures.hand_over(error):
            raise  # entry tells a Ctrl-C that a library has reworded from a fault of ours
        return EXIT_FAULT


def _write_ending(data: dict[str, object], code: int, error: BaseException, *, wanted: bool) -> None:
    """With JSON=1 the one object of a command that failed; of a launcher's ranks the first writes it."""
    if wanted and os.environ.get("RANK", "0") == "0":
        write_json_line(with_ending(data, code, error_text(error)))


def _refused_plan(error: BaseException | None) -> dict[str, object] | None:
    while error is not None:
        if isinstance(error, DoesNotFit) and error.plan is not None:
            return error.plan
        error = error.__cause__
    return None
