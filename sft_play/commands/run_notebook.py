"""`run-notebook`: a notebook over ranks: each rank runs all code cells in order; rank 0 prints.

The cells are compiled as they are, under names such as `work.ipynb, cell 3`, so that a traceback
shows the cell and its line. No kernel is started: code that only IPython understands (`!pip`,
`%%bash`) is refused before anything runs, and no value is shown but what is printed.
"""

import dataclasses
import json
import linecache
import logging
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from sft_play.commands.request import CommandResult, Request, redirect_stdout_to_stderr
from sft_play.config.yaml_io import read_text
from sft_play.errors import ConfigError, SftPlayError
from sft_play.launch.ranks import run_ranks
from sft_play.launch.torchrun import read_rank_info, torchrun_command
from sft_play.log import one_line, set_up_logging
from sft_play.machine.hardware import detect_hardware
from sft_play.machine.network import NodeSetup
from sft_play.process import failures

logger = logging.getLogger(__name__)


def run_notebook(request: Request) -> CommandResult | int:
    """Start the ranks and answer for them; in a rank, run the cells."""
    if request.notebook is None:
        raise ConfigError(
            "NOTEBOOK= names no file; give a notebook: make run-notebook NOTEBOOK=my.ipynb NPROC=2"
        )
    cells, rank_info = read_notebook(request.notebook), read_rank_info(os.environ)
    if rank_info is not None:
        set_up_logging(request.command, rank=rank_info.rank)
        run_cells(cells, request.notebook, rank=rank_info.rank)
        return 0
    hardware = request.options.select_hardware(detect_hardware())
    launch = torchrun_command(
        ["run-notebook", "--notebook", str(request.notebook.absolute())],
        processes_per_node=hardware.ranks,
        nodes=NodeSetup(),
        threads_per_rank=None if hardware.gpus else max(1, hardware.cpu_cores // hardware.ranks),
        visible_gpus=",".join(str(gpu) for gpu in request.options.gpus) or None,
    )
    # lines appear as they are printed, in a pipe too
    environment = {
        **launch.environment,
        failures.COMMAND_VARIABLE: "run-notebook",
        "PYTHONUNBUFFERED": "1",
    }
    launch = dataclasses.replace(launch, environment=environment)
    logger.info("Launch: %s", launch.shell_line)
    with redirect_stdout_to_stderr(enabled=request.json):
        exit_code = run_ranks(launch, None)
    return CommandResult(
        {"notebook": str(request.notebook), "cells": len(cells), "ranks": hardware.ranks},
        exit_code=exit_code,
    )


def read_notebook(path: Path) -> list[types.CodeType]:
    """Compile the code cells of a notebook, without the empty ones. Raises ConfigError where there
    is no such file, it is not a notebook, or a cell is not Python, such as what only IPython
    understands."""
    notebook_text = f"NOTEBOOK={one_line(str(path))}"
    text = read_text(path, variable="NOTEBOOK", expected="a notebook")
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{notebook_text} is not a notebook of format 4 (.ipynb); save it in Jupyter"
        ) from None
    compiled_cells = []
    for cell_number, source in enumerate(sources, start=1):
        name = f"{path.name}, cell {cell_number}"
        # so that a traceback shows the cell's lines, which are in no file
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            if source.strip():
                compiled_cells.append(compile(source, name, "exec"))
        except SyntaxError as error:
            line = (
                f"cell {cell_number}, line {error.lineno}:"
                f" {one_line((error.text or '').strip(), limit=60)}"
            )
            raise ConfigError(
                f"{notebook_text}: {line} is not Python ({error.msg}); what only IPython"
                " understands, such as !pip, has to be removed, or written in Python"
            ) from None
    if not compiled_cells:
        raise ConfigError(f"{notebook_text} has no code cell that is not empty")
    return compiled_cells


def run_cells(cells: Sequence[types.CodeType], path: Path, *, rank: int) -> None:
    """Run the cells in this process, from the notebook's folder."""
    module = types.ModuleType("__main__")
    module.__dict__["display"] = print
    sys.modules["__main__"] = module  # where pickle looks for classes that cells define
    os.chdir(path.absolute().parent)
    sys.path.insert(0, str(Path.cwd()))
    if rank != 0:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    for code in cells:
        try:
            exec(code, module.__dict__)
        except SftPlayError as error:
            line = (
                error.__traceback__.tb_next.tb_lineno
                if error.__traceback__ and error.__traceback__.tb_next
                else 0
            )
            raise type(error)(f"{code.co_filename}, line {line}: {error}") from error
