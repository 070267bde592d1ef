"""`setup-accelerate`: an accelerate configuration for this machine."""

from __future__ import annotations

import os
import subprocess
import sys

from sft_play.commands.answer import Answer, stdout_to_stderr
from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.facts.hardware import detect
from sft_play.launch.accelerate.reading import accelerate_path
from sft_play.launch.accelerate.writing import machines_of, write_accelerate_file
from sft_play.launch.device import machine_for
from sft_play.planner.precision import choose_precision

HELP = {"setup-accelerate": "write an accelerate configuration for this machine"}


def run(request: Request) -> Answer:
    """Write the file; with INTERACTIVE=1 accelerate asks its own questions and writes it."""
    path = accelerate_path(os.environ)
    if os.environ.get("INTERACTIVE", "") not in ("", "0"):
        if not (sys.stdin and sys.stdin.isatty()):
            raise ConfigError(
                "INTERACTIVE=1 lets accelerate ask its questions, and there is no terminal to answer them in; start it "
                "in one, or leave INTERACTIVE= out: the file is then written for this machine"
            )
        words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(path)]
        with stdout_to_stderr(wanted=request.json):
            code = subprocess.call(words)
        return Answer({"ok": code == 0, "path": str(path)}, exit_code=code)
    loaded = load_config(request.config, overrides=request.overrides)
    hardware = machine_for(loaded.config, detect())
    precision = choose_precision(loaded.config, hardware).compute
    written = write_accelerate_file(
        path,
        hardware,
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}.get(precision, "no"),  # type: ignore[arg-type]
        gpu_ids=request.options.gpus or None,
        processes=request.options.processes,
        overwrite=request.force,
        machines=machines_of(os.environ),
    )
    return Answer({"ok": True, "path": str(path), "how": written.how, "text": written.text}, written.lines)
