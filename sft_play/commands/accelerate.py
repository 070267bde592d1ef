"""`setup-accelerate`: writes accelerate's configuration for this machine, or asks accelerate's own questions."""

import dataclasses
import os
import subprocess
import sys

from sft_play.commands.answer import CommandResult, redirect_stdout_to_stderr
from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.launch.accelerate import MIXED_PRECISION, accelerate_path, read_accelerate_nodes, write_accelerate_file
from sft_play.launch.run_hardware import restrict_to_device
from sft_play.machine.hardware import detect_hardware
from sft_play.planner.precision import choose_precision


def run_accelerate(request: Request) -> CommandResult:
    """Write the configuration of the GPUs, or processes, of this machine; with INTERACTIVE=1 accelerate asks."""
    path = accelerate_path(os.environ)
    if os.environ.get("INTERACTIVE", "") not in ("", "0"):
        if not (sys.stdin and sys.stdin.isatty()):
            raise ConfigError("INTERACTIVE=1: there is no terminal to answer accelerate's questions in; leave it out")
        argv = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(path)]
        with redirect_stdout_to_stderr(enabled=request.json):
            exit_code = subprocess.call(argv)
        return CommandResult({"ok": exit_code == 0, "path": str(path)}, exit_code=exit_code)
    loaded = load_config(request.config, overrides=request.overrides)
    options = dataclasses.replace(request.options, nodes=read_accelerate_nodes(os.environ))
    hardware = options.select_hardware(restrict_to_device(loaded.config, detect_hardware()))
    precision = choose_precision(loaded.config, hardware).compute
    text = write_accelerate_file(
        path,
        hardware,
        mixed_precision=MIXED_PRECISION.get(precision, "no"),
        gpu_ids=options.gpus,
        overwrite=request.force,
        nodes=options.nodes,
    )
    return CommandResult(
        {"ok": True, "path": str(path), "text": text}, [f"{path}:", *(f"  {line}" for line in text.splitlines())]
    )
