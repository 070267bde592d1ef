"""The commands of `sft-play`: a file for each, or for a family of them.

`request` is no command: the command line as it was read, what it is about, and what a command
returns.

`variables.json` has them in the order of the help, each with its file, which is imported when the
command is run, the groups of commands that take the same variables, and a line on what it does. A
file has `run_FILE(request)`, which returns a `CommandResult`, or only the exit code.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sft_play.variables import COMMAND_ROWS

COMMAND_FILES = {command: row["file"] for command, row in COMMAND_ROWS.items()}
# Commands that the program starts itself, and help does not name.
INTERNAL_COMMANDS = {"rank": "launching"}


def load_module(command: str) -> ModuleType:
    """Import the file of a command."""
    return importlib.import_module(
        f"sft_play.commands.{ {**COMMAND_FILES, **INTERNAL_COMMANDS}[command] }"
    )


def command_function(command: str) -> Callable[..., Any]:
    """Return the function that runs a command, from its file: `run_plan` of `plan.py`,
    `run_notebook` of `run_notebook.py`."""
    module = load_module(command)
    return getattr(module, f"run_{module.__name__.rpartition('.')[2].removeprefix('run_')}")  # type: ignore[no-any-return]


def help_line(command: str) -> str:
    """What a command does, in a line."""
    return (
        COMMAND_ROWS[command]["help"]
        if command in COMMAND_ROWS
        else "one process of a run over several"
    )
