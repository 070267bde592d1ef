"""The commands of `sft-play`: a file for each, or for a family that shares its body.

`commands.json` has them in the order of the help, each with its file, which is imported when the command is run, and a
line on what it does. A file has `run(request)`, which returns an `Answer`, or only the exit code.
`process/variables.json` has the variables of make and the flags that each command takes.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

_TABLE: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
FILES = {command: row["file"] for command, row in _TABLE.items()}
# Commands that the program starts itself, and help does not name.
INTERNAL = {"rank": "launching"}


def load(command: str) -> ModuleType:
    """The file of a command."""
    return importlib.import_module(f"sft_play.commands.{ {**FILES, **INTERNAL}[command] }")


def help_line(command: str) -> str:
    """What a command does, in a line."""
    return _TABLE[command]["help"] if command in _TABLE else "one process of a run over several"
