"""The commands of `sft-play`: a file for each, or for a family that shares its body.

A file has `HELP` (its commands, each with a line on what it does) and `run(request)`, which returns an `Answer`, or
only the exit code. `process/variables.py` has the variables of make and the flags that each command takes. A file is
imported when its command is run.
"""

from __future__ import annotations

import importlib
from types import ModuleType

FILES = {
    "train": "start.launching",
    "resume": "start.launching",
    "train-distributed": "start.launching",
    "train-deepspeed": "start.launching",
    "launch-command": "start.launching",
    "setup-accelerate": "start.setup_accelerate",
    "plan": "plan",
    "memory-model-score": "memory_model_score",
    "verify-layouts": "start.verify_layouts",
    "gpu-selftest": "see.gpu_selftest",
    "bench": "bench",
    "tensorboard": "see.boards",
    "tb-open": "see.boards",
    "tb-stop": "see.boards",
    "tb-clean": "see.boards",
    "doctor": "see.doctor",
    "consolidate": "start.consolidate",
    "chat": "finished.answering",
    "infer": "finished.answering",
    "serve": "finished.answering",
    "eval": "finished.evaluation",
    "ship": "finished.evaluation",
    "merge": "finished.export",
    "merge-test": "finished.export",
    "export": "finished.export",
    "export-test": "finished.export",
    "push": "finished.export",
    "report": "finished.reporting",
    "compare": "finished.reporting",
    "reproduce": "finished.run_list",
    "runs": "finished.run_list",
    "prune": "finished.run_list",
    "gpu-info": "see.gpu_info",
    "memory-check": "see.memory_check",
    "process": "data.process",
    "style": "data.style",
    "dapt-docx": "data.dapt_docx",
    "render": "data.render",
    "preview": "data.preview",
    "check": "data.check",
    "full-pipeline": "data.full_pipeline",
    "mask-score": "data.mask_score",
    "run-notebook": "start.run_notebook",
    "generate": "generate",
}
"""Each command and its file, in the order of the help."""
INTERNAL = {"rank": "start.launching"}
"""Commands that the program starts itself, and help does not name."""


def load(command: str) -> ModuleType:
    """The file of a command."""
    return importlib.import_module(f"sft_play.commands.{ {**FILES, **INTERNAL}[command] }")


def help_line(command: str) -> str:
    """What a command does, in a line."""
    line: str = load(command).HELP[command]
    return line
