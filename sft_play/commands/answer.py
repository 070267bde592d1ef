"""A command's answer: lines and JSON of one object, and where they are written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sft_play.commands.request import Request
from sft_play.errors import ConfigError, SftPlayError
from sft_play.exit_codes import with_ending, write_json_line
from sft_play.log import escape_control, redact
from sft_play.runs.files import write_json

logger = logging.getLogger(__name__)


class Result(Protocol):
    """What most commands return."""

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""

    def lines(self) -> list[str]:
        """Lines for a person."""

    def as_json(self) -> Any:
        """Plain data."""


@dataclass(frozen=True)
class Answer:
    """A command's answer. `lines` are logged one by one, `data` is the JSON.

    `refused`: an error that is raised after the lines; with JSON=1 only its exit code is used. `to_out`: whether OUT
    names the file for this JSON; False where the command writes OUT itself.
    """

    data: Any
    lines: Sequence[str] = ()
    exit_code: int = 0
    refused: SftPlayError | None = None
    to_out: bool = True


def answer_of(result: Result, *, to_out: bool = True) -> Answer:
    """The answer of a result: exit code 2 where it is not ok."""
    code = 0 if result.ok else ConfigError.exit_code
    return Answer(result.as_json(), ["\n".join(result.lines())], code, to_out=to_out)


def agreed(request: Request, question: str, *, refusal: str) -> bool:
    """Whether the user agrees, by YES=1 or at the terminal; no answer is a no. Raises ConfigError where there is no
    terminal to ask on, or JSON=1 was given: `refusal` says what would be done."""
    if request.yes:
        return True
    if request.json or sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(f"{refusal}\nand there is no terminal to ask on: YES=1 agrees")
    try:
        return input(f"{escape_control(question)} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def give(answer: Answer | int, request: Request) -> int:
    """Write an answer to OUT, show it as JSON or in words, and return the exit code. Raises ConfigError where OUT
    cannot be written, and the answer's `refused`."""
    if isinstance(answer, int):
        return answer
    code = answer.refused.exit_code if answer.refused else answer.exit_code
    error = error_text(answer.refused) if answer.refused else _why(answer, code)
    data = with_ending(answer.data, code, error)
    if request.out is not None and answer.to_out:
        write_out(request.out, data if isinstance(answer.data, dict) else answer.data)
    if request.json:
        write_json_line(data)
        return code
    for line in answer.lines:
        logger.info("%s", line)
    if answer.refused is not None:
        raise answer.refused
    return code


def error_text(error: BaseException) -> str:
    """An exception's text for programs, without secrets; its name where it has none."""
    return redact(str(error) or type(error).__name__)


def _why(answer: Answer, code: int) -> str | None:
    """`error` of an answer whose own fields say what is wrong: its last line; None where nothing is."""
    every = "\n".join(answer.lines).splitlines()
    lines = [line for line in every if line.strip() and not line.startswith(("Next:", "Written to:"))]
    return redact(lines[-1].strip() if lines else f"exit code {code}; the log says why") if code else None


def refuse_place(out: Path, name: str = "OUT") -> None:
    """Raises ConfigError where nothing can be written at OUT: before the work whose answer would be lost."""
    there = next(up for up in out.expanduser().absolute().parents if os.path.exists(up))  # noqa: PTH110 - raises nothing
    if not there.is_dir():
        raise ConfigError(f"{name}={escape_control(str(out))} cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK) and not os.access(out, os.W_OK):
        raise ConfigError(f"{name}={escape_control(str(out))} cannot be written: {there} is not writable for this user")


def write_out(path: Path, data: Any) -> None:
    """JSON in a file of its own, or in place in a device or a pipe (`/dev/stdout`); raises ConfigError where it cannot
    be written."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        else:
            write_json(path.resolve() if path.is_symlink() else path, data)
    except OSError as error:
        raise ConfigError(f"OUT={escape_control(str(path))} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def stdout_to_stderr(*, wanted: bool) -> Iterator[None]:
    """Within it, output of this process, its libraries and its children goes to standard error: with JSON=1 standard
    output holds the answer alone."""
    if not wanted:
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
