"""`run-notebook`: a notebook over ranks: each rank runs all code cells in order; rank 0 prints.

The cells are compiled as they are, under names such as `work.ipynb, cell 3`, so that a traceback shows the cell and its
line. No kernel is started: code that only IPython understands (`!pip`, `%%bash`) is refused before anything runs, and
no value is shown but what is printed.
"""

import contextlib
import dataclasses
import io
import json
import linecache
import logging
import os
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sft_play.commands.answer import CommandResult, redirect_stdout_to_stderr
from sft_play.commands.request import Request
from sft_play.config.yaml_io import read_text
from sft_play.errors import ConfigError, SftPlayError
from sft_play.launch.torchrun import LaunchCommand, read_rank_info, torchrun_command
from sft_play.log import one_line, set_up_logging
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import NodeSetup
from sft_play.process import failures
from sft_play.process.environment import add_package_path

logger = logging.getLogger(__name__)


def run_notebook(request: Request) -> CommandResult | int:
    """As the parent start the ranks, as a rank run the cells; their agent, or rank 0, answers for all."""
    if request.notebook is None:
        raise ConfigError("NOTEBOOK= names no file; give a notebook: make run-notebook NOTEBOOK=my.ipynb NPROC=2")
    cells = read_notebook(request.notebook)
    rank_info, result_fields = read_rank_info(os.environ), {"notebook": str(request.notebook), "cells": len(cells)}
    if rank_info is None:
        launch = notebook_launch(
            request.notebook, request.options.select_hardware(detect_hardware()), gpus=request.options.gpus
        )
        logger.info("Launch: %s", launch.shell_line)
        # ranks run this command again: they know by the environment where their output goes
        os.environ["JSON"] = "1" if request.json else ""
        exec_agent(launch, {**result_fields, "ranks": launch.processes_per_node} if request.json else None)
    with redirect_stdout_to_stderr(enabled=request.json):
        set_up_logging(request.command, rank=rank_info.rank)
        exit_code = run_cells(cells, request.notebook, rank=rank_info.rank)
    if exit_code or not rank_info.is_first or failures.ANSWER_VARIABLE in os.environ:
        return exit_code
    return CommandResult({**result_fields, "ranks": rank_info.world_size})


def read_notebook(path: Path) -> dict[str, types.CodeType]:
    """The code cells of a notebook that are not empty, compiled, by the names under which they run. Raises ConfigError
    where there is no such file, it is not a notebook, or a cell is not Python, such as what only IPython understands.
    """
    cells, notebook_text = {}, f"NOTEBOOK={one_line(str(path))}"
    for cell_number, source in enumerate(_cell_sources(path), start=1):
        name = f"{path.name}, cell {cell_number}"
        # so that a traceback shows the cell's lines, which are in no file
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            if source.strip():
                cells[name] = compile(source, name, "exec")
        except SyntaxError as error:
            line = f"cell {cell_number}, line {error.lineno}: {one_line((error.text or '').strip(), limit=60)}"
            remedy = "what only IPython understands, such as !pip, has to be removed, or written in Python"
            raise ConfigError(f"{notebook_text}: {line} is not Python ({error.msg}); {remedy}") from None
    if not cells:
        raise ConfigError(f"{notebook_text} has no code cell that is not empty")
    return cells


def _cell_sources(path: Path) -> Iterator[str]:
    notebook_text = f"NOTEBOOK={one_line(str(path))}"
    try:
        data = json.loads(read_text(path, variable="NOTEBOOK", expected="a notebook (.ipynb)"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{notebook_text} is not a notebook: not valid JSON ({one_line(str(error))})") from None
    version = data.get("nbformat") if isinstance(data, dict) else None
    if version != 4 or not isinstance(data.get("cells"), list):
        raise ConfigError(
            f"{notebook_text} is not a notebook of format 4 (nbformat: {one_line(str(version))}); save it in Jupyter"
        )
    for cell in data["cells"]:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            yield "".join(map(str, source)) if isinstance(source, list) else str(source)


# --- one rank ---------------------------------------------------------------------------------------------------------


def run_cells(cells: Mapping[str, types.CodeType], path: Path, *, rank: int) -> int:
    """Run the cells in this process, from the notebook's folder; the exit code. Raises SftPlayError as a cell raised
    it, with the cell and its line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines appear as they are printed, in a pipe too
    module = types.ModuleType("__main__")
    module.__dict__["display"] = print
    sys.modules["__main__"] = module  # where pickle looks for classes that cells define
    os.chdir(path.absolute().parent)
    sys.path.insert(0, str(Path.cwd()))
    with contextlib.ExitStack() as exit_stack:
        if rank != 0:
            exit_stack.enter_context(contextlib.redirect_stdout(exit_stack.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
        for name, code in cells.items():
            try:
                exec(code, module.__dict__)
            except SftPlayError as error:
                raise type(error)(f"{name}, line {_cell_traceback(error).tb_lineno}: {error}") from error
            except Exception as error:
                error = error.with_traceback(_cell_traceback(error))
                if not failures.report_to_agent(error):
                    sys.stderr.write("".join(traceback.format_exception(error)))
                return 1
    return 0


def _cell_traceback(error: BaseException) -> Any:
    """The traceback from the cell on: the frame before it is ours."""
    return error.__traceback__ and error.__traceback__.tb_next


# --- all ranks --------------------------------------------------------------------------------------------------------


def notebook_launch(path: Path, machine: Hardware, *, gpus: Sequence[int] = ()) -> LaunchCommand:
    """The command that starts the ranks of a machine, and its variables."""
    launch = torchrun_command(
        ["run-notebook", "--notebook", str(path.absolute())],
        processes_per_node=machine.ranks,
        nodes=NodeSetup(),
        threads_per_rank=None if machine.gpus else max(1, machine.cpu_cores // machine.ranks),
        visible_gpus=",".join(str(gpu) for gpu in gpus) or None,
    )
    return dataclasses.replace(launch, environment={**launch.environment, failures.COMMAND_VARIABLE: "run-notebook"})


def exec_agent(launch: LaunchCommand, result_fields: Mapping[str, object] | None) -> NoReturn:
    """Replace this process by the agent of the ranks, which handles signals, answers and sets the exit code."""
    environment = add_package_path(launch.merged_environment(os.environ))  # the cells run in the notebook's folder
    if result_fields is not None:
        environment[failures.ANSWER_VARIABLE] = json.dumps(result_fields)
    sys.stdout.flush()  # execve drops what is still buffered
    sys.stderr.flush()
    os.execve(launch.argv[0], launch.agent_argv, environment)
