"""`consolidate`: the trained weights of a run's last checkpoint, whole, as safetensors."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from sft_play.commands.answer import Answer, stdout_to_stderr
from sft_play.commands.machine import output_dir_of, trusts_code
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.facts.hardware import detect
from sft_play.process.environment import deepspeed_on_cpu
from sft_play.runs.folder import MANIFEST, RunFolder
from sft_play.runs.names import checked_name

HELP = {"consolidate": "write the trained weights of RUN's last checkpoint, ZeRO's included, as safetensors"}


def run(request: Request) -> Answer:
    """Write the weights of RUN's last checkpoint, or of the checkpoint that RUN names, into OUT or the run's folder."""
    if not request.run:
        raise ConfigError("RUN= names no run; give its name or folder: make consolidate RUN=outputs/my-run")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not detect().gpus:
        deepspeed_on_cpu()
    given = Path(request.run).expanduser()
    if given.name == request.run and not (given / MANIFEST).is_file():
        given = output_dir_of(request) / checked_name(request.run, key="RUN")
    checkpoint = given if given.name.startswith("checkpoint-") else None
    folder = RunFolder(given.parents[1] if checkpoint else given)
    from sft_play.training.checkpoints.consolidate import consolidate

    with stdout_to_stderr(wanted=request.json):
        path = consolidate(
            folder, checkpoint=checkpoint, out=request.out, trusts=functools.partial(trusts_code, request)
        )
    return Answer({"ok": True, "run": str(folder.path), "path": str(path)}, to_out=False)
