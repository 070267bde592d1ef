"""`run-notebook`: a notebook's cells in order on every rank."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from sft_play.commands.answer import Answer, stdout_to_stderr
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.facts.hardware import detect
from sft_play.launch.exported import ranks_of
from sft_play.log import set_up_logging
from sft_play.starting import notebook

logger = logging.getLogger(__name__)

HELP = {"run-notebook": "run a notebook's cells in order on every rank (NOTEBOOK=, NPROC=)"}


def run(request: Request) -> Answer | int:
    """As the parent start the ranks, as a rank run the cells; rank 0 answers for all."""
    if request.notebook is None:
        raise ConfigError("NOTEBOOK= names no file; give a notebook: make run-notebook NOTEBOOK=my.ipynb NPROC=2")
    try:
        cells = notebook.read(request.notebook)
    except SyntaxError as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        return 1
    ranks = ranks_of(os.environ)
    if ranks is None:
        options = request.options
        launch = notebook.launch_of(request.notebook, detect(), processes=options.processes, gpus=options.gpus)
        logger.info("Launch: %s", launch.line)
        # ranks run this command again, and rank 0 answers: they know by the environment how
        os.environ["JSON"] = "1" if request.json else ""
        notebook.start(launch)
    with stdout_to_stderr(wanted=request.json):
        set_up_logging(request.command, rank=ranks.rank)
        code = notebook.run(cells, request.notebook, rank=ranks.rank)
    if code or not ranks.is_first:
        return code
    return Answer({"ok": True, "notebook": str(request.notebook), "cells": len(cells), "ranks": ranks.world_size})
