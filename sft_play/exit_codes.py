"""How a command ends, as programs read it: exit codes, their kinds, and the one JSON object that
JSON=1 asks for.

Standard library only, and nothing newer than Python 3.6: make's checks and the setup need it before
there is an environment.
"""

import os
import sys

TYPE_CHECKING = False  # as in entry, whose imports have to be few
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

EXIT_FAULT = 1
EXIT_USER = 2
EXIT_TOO_LARGE = 3
EXIT_STOPPED = 130
# `kind` of an answer by its exit code; any other code is "failed".
EXIT_KINDS = {
    0: "done",
    EXIT_FAULT: "failed",
    EXIT_USER: "fix",
    EXIT_TOO_LARGE: "does_not_fit",
    EXIT_STOPPED: "stopped",
}
# `kind` of a verdict of `ship` that is a no, with exit code 2.
DO_NOT_SHIP = "do_not_ship"

_has_answered = False


def wants_json(argv: "Sequence[str]") -> bool:
    """True if the command line or the environment asks for JSON. Works before either is parsed:
    that may fail."""
    return "--json" in argv or os.environ.get("JSON", "0") not in ("", "0")


def add_exit_status(data: "Any", exit_code: int, error: "str | None" = None) -> "dict[str, Any]":
    """Add how a command ended to its JSON: `ok`, `kind`, `exit`, and `error` if any. A list becomes
    `rows`."""
    status = {
        "ok": exit_code == 0,
        "kind": EXIT_KINDS.get(exit_code, EXIT_KINDS[EXIT_FAULT]),
        "exit": exit_code,
    }  # type: dict[str, Any]
    if error is not None:
        status["error"] = error
    if not isinstance(data, dict):
        data = {"rows": data}
    return {**status, **data}


def write_json_line(data: "Any") -> None:
    """Write one JSON object as a line of standard output; NaN and infinity, which JSON lacks,
    become null."""
    import json  # 2 ms, in which a Ctrl-C would be a traceback

    global _has_answered
    _has_answered = True
    sys.stdout.write(json.dumps(_replace_non_finite(data), allow_nan=False) + "\n")
    sys.stdout.flush()


def write_missing_answer(exit_code: int, error: str) -> None:
    """Write the JSON object of a command, unless this process has written one."""
    if not _has_answered:
        write_json_line(add_exit_status({}, exit_code, error))


def _replace_non_finite(value: "Any") -> "Any":
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return value
