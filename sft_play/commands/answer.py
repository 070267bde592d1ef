"""A command's answer: lines and JSON of one object, and where they are written."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.commands.request import Request
from sft_play.errors import ConfigError, SftPlayError
from sft_play.exit_codes import add_exit_status, write_json_line
from sft_play.log import escape_control, redact
from sft_play.runs.files import write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommandResult:
    """A command's answer. `lines` are logged one by one, `data` is the JSON.

    `error`: an error that is raised after the lines; with JSON=1 only its exit code is used. `is_written_to_out`:
    whether OUT names the file for this JSON; False where the command writes OUT itself.
    """

    data: Any
    lines: Sequence[str] = ()
    exit_code: int = 0
    error: SftPlayError | None = None
    is_written_to_out: bool = True


def command_result(answer: Answer, *, is_written_to_out: bool = True) -> CommandResult:
    """The result of a command, from the answer of its work: exit code 2 where that is not ok."""
    exit_code = 0 if answer.ok else ConfigError.exit_code
    return CommandResult(answer.as_json(), ["\n".join(answer.lines())], exit_code, is_written_to_out=is_written_to_out)


def confirm_with_user(request: Request, question: str, *, refusal: str) -> bool:
    """Ask the user; True if they agree, at the terminal or by YES=1 (no answer is a no). Raises ConfigError where
    there is no terminal to ask on, or JSON=1 was given: `refusal` says what would be done."""
    if request.yes:
        return True
    if request.json or sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(f"{refusal}\nand there is no terminal to ask on: YES=1 agrees")
    try:
        return input(f"{escape_control(question)} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def write_result(result: CommandResult | int, request: Request) -> int:
    """Write an answer to OUT, show it as JSON or in words, and return the exit code. Raises ConfigError where OUT
    cannot be written, and the result's `error`."""
    if isinstance(result, int):
        return result
    exit_code, reason = result.exit_code, None
    if result.error is not None:
        exit_code, reason = result.error.exit_code, error_text(result.error)
    elif exit_code:  # the answer's own fields say what is wrong, and its last line does
        lines = [line.strip() for line in "\n".join(result.lines).splitlines()]
        reasons = [line for line in lines if line and not line.startswith(("Next:", "Written to:"))]
        reason = redact(reasons[-1]) if reasons else f"exit code {exit_code}; the log says why"
    data = add_exit_status(result.data, exit_code, reason)
    if request.out is not None and result.is_written_to_out:
        write_out_file(request.out, data if isinstance(result.data, dict) else result.data)
    if request.json:
        write_json_line(data)
        return exit_code
    for line in result.lines:
        logger.info("%s", line)
    if result.error is not None:
        raise result.error
    return exit_code


def error_text(error: BaseException) -> str:
    """An exception's text for programs, without secrets; its name where it has none."""
    return redact(str(error) or type(error).__name__)


def require_writable_out(out: Path, variable_name: str = "OUT") -> None:
    """Raises ConfigError where nothing can be written at OUT: before the work whose answer would be lost."""
    parent = next(parent for parent in out.expanduser().absolute().parents if os.path.exists(parent))  # noqa: PTH110 - raises nothing
    reason = None
    if not parent.is_dir():
        reason = "is not a folder"
    elif not os.access(parent, os.W_OK | os.X_OK) and not os.access(out, os.W_OK):
        reason = "is not writable for this user"
    if reason is not None:
        raise ConfigError(f"{variable_name}={escape_control(str(out))} cannot be written: {parent} {reason}")


def write_out_file(path: Path, data: Any) -> None:
    """Write JSON to a file (written aside and renamed), or into a device or pipe (`/dev/stdout`); raises ConfigError
    where it cannot be written."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        else:
            write_json(path.resolve() if path.is_symlink() else path, data)
    except OSError as error:
        raise ConfigError(f"OUT={escape_control(str(path))} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def redirect_stdout_to_stderr(*, enabled: bool) -> Iterator[None]:
    """Send output of this process, its libraries and its children to standard error inside the block: with JSON=1
    standard output holds the answer alone."""
    if not enabled:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
