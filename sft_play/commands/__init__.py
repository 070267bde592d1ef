"""The commands of `sft-play`: a file for each, or for a family that shares its body.

A file has `HELP` (its commands, each with a line on what it does) and `run(request)`, which returns an `Answer`, or
only the exit code. `process/variables.py` has the variables of make and the flags that each command takes. A file is
imported when its command is run.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_COMMANDS = {
    "launching": ("train", "resume", "train-distributed", "train-deepspeed", "launch-command", "setup-accelerate"),
    "run_notebook": ("run-notebook",),
    "new": ("new",),
    "plan": ("plan",),
    "launch_file": ("launch-file",),
    "sweep": ("sweep",),
    "diagnosing": ("check", "doctor", "gpu-info", "memory-check"),
    "preparing": ("process", "style", "dapt-docx", "full-pipeline"),
    "rows": ("render", "preview"),
    "boards": ("tensorboard", "tb-open", "tb-stop", "tb-clean"),
    "finished_runs": ("runs", "prune", "report", "compare", "eval", "ship", "reproduce"),
    "answering": ("chat", "infer", "serve"),
    "exporting": ("merge", "merge-test", "export", "export-test", "push", "consolidate"),
    "developing": ("bench", "memory-model-score", "verify-layouts", "gpu-selftest", "mask-score", "generate"),
}
FILES = {command: file for file, commands in _COMMANDS.items() for command in commands}
"""Each command and its file, in the order of the help."""
INTERNAL = {"rank": "launching"}
"""Commands that the program starts itself, and help does not name."""


def load(command: str) -> ModuleType:
    """The file of a command."""
    return importlib.import_module(f"sft_play.commands.{ {**FILES, **INTERNAL}[command] }")


def help_line(command: str) -> str:
    """What a command does, in a line."""
    line: str = load(command).HELP[command]
    return line
