"""The commands of `sft-play`: a file for each, or for a family that shares its body.

A file has `HELP` (its commands, each with a line on what it does) and `run(request)`, which returns an `Answer`, or
only the exit code. `variables.py` has the variables of make and the flags that each command takes. A file is imported
when its command is run.
"""

from __future__ import annotations

import importlib
from types import ModuleType

FILES = {
    "train": "launching",
    "resume": "launching",
    "train-distributed": "launching",
    "train-deepspeed": "launching",
    "launch-command": "launching",
    "setup-accelerate": "setup_accelerate",
    "plan": "plan",
    "memory-model-score": "memory_model_score",
    "verify-layouts": "verify_layouts",
    "gpu-selftest": "gpu_selftest",
    "bench": "bench",
    "tensorboard": "boards",
    "tb-open": "boards",
    "tb-stop": "boards",
    "tb-clean": "boards",
    "doctor": "doctor",
    "consolidate": "consolidate",
    "chat": "answering",
    "infer": "answering",
    "serve": "serving",
    "eval": "evaluation",
    "ship": "shipping",
    "merge": "merge",
    "merge-test": "merge",
    "export": "export",
    "export-test": "export",
    "push": "push",
    "report": "reporting",
    "compare": "reporting",
    "reproduce": "reproduce",
    "runs": "run_list",
    "prune": "run_list",
    "gpu-info": "gpu_info",
    "memory-check": "memory_check",
    "process": "process",
    "style": "style",
    "dapt-docx": "dapt_docx",
    "render": "render",
    "preview": "preview",
    "check": "check",
    "full-pipeline": "full_pipeline",
    "mask-score": "mask_score",
    "run-notebook": "run_notebook",
    "generate": "generate",
}
"""Each command and its file, in the order of the help."""
INTERNAL = {"rank": "rank"}
"""Commands that the program starts itself, and help does not name."""


def load(command: str) -> ModuleType:
    """The file of a command."""
    return importlib.import_module(f"sft_play.commands.{ {**FILES, **INTERNAL}[command] }")


def help_line(command: str) -> str:
    """What a command does, in a line."""
    line: str = load(command).HELP[command]
    return line
