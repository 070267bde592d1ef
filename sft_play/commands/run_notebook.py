"""`run-notebook`: a notebook over ranks: each rank runs all code cells in order, as Jupyter would; rank 0 prints.

The cells are compiled as they are, under names such as `work.ipynb, cell 3`, so that a traceback shows the cell and its
line. No kernel is started: code that only IPython understands (`!pip`, `%%bash`) is refused before anything runs.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import linecache
import logging
import os
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sft_play.commands.answer import Answer, stdout_to_stderr
from sft_play.commands.request import Request
from sft_play.config.yaml_io import read_text
from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.hardware import Hardware, detect
from sft_play.facts.network import Nodes
from sft_play.launch.command import Launch, torchrun
from sft_play.launch.exported import ranks_of
from sft_play.log import one_line, set_up_logging
from sft_play.process import failures
from sft_play.process.environment import with_this_package

logger = logging.getLogger(__name__)

CPU_RANKS = 2
"""Ranks without a GPU and without NPROC: the fewest that show the effect of several."""
_IGNORED = re.compile(r"%(matplotlib|load_ext|reload_ext|autoreload|config|time|pdb)\b.*|%%(time|capture)\b.*")
"""Magic lines that change how a notebook looks in a browser, but nothing that it computes."""
_MAGIC = re.compile(r"[%!?].*|.*\?|[\w., ]+=\s*[%!].*")


def run(request: Request) -> Answer | int:
    """As the parent start the ranks, as a rank run the cells; their agent, or rank 0, answers for all."""
    if request.notebook is None:
        raise ConfigError("NOTEBOOK= names no file; give a notebook: make run-notebook NOTEBOOK=my.ipynb NPROC=2")
    try:
        cells = read(request.notebook)
    except SyntaxError as error:
        text = "".join(traceback.format_exception_only(error))
        sys.stderr.write(text)
        return Answer({"error": text.strip()}, exit_code=1)
    ranks, answer = ranks_of(os.environ), {"notebook": str(request.notebook), "cells": len(cells)}
    if ranks is None:
        launch = launch_of(request.notebook, detect(), processes=request.options.processes, gpus=request.options.gpus)
        logger.info("Launch: %s", launch.line)
        # ranks run this command again: they know by the environment where their output goes
        os.environ["JSON"] = "1" if request.json else ""
        start(launch, {**answer, "ranks": launch.processes} if request.json else None)
    with stdout_to_stderr(wanted=request.json):
        set_up_logging(request.command, rank=ranks.rank)
        code = run_cells(cells, request.notebook, rank=ranks.rank)
    if code or not ranks.is_first or failures.ANSWER_VARIABLE in os.environ:
        return code
    return Answer({**answer, "ranks": ranks.world_size})


@dataclass(frozen=True)
class Cell:
    """A code cell: its number among the code cells, from 1, the name it runs under, and its text."""

    number: int
    name: str
    source: str
    tree: ast.Module


def read(path: Path) -> list[Cell]:
    """The non-empty code cells of a notebook.

    Raises:
        ConfigError: there is no such file, it is not a notebook of format 4 in Python, or cells hold lines that only
            IPython understands: all of them are named.
        SyntaxError: a cell is not Python.
    """
    cells, refused = [], []
    for number, source in enumerate(_sources(path), start=1):
        name = f"{path.name}, cell {number}"
        text, magic = _plain(source, name)
        refused += [f"cell {number}, line {line}: {one_line(words, limit=60)}" for line, words in magic]
        # so that a traceback shows the cell's lines, which are in no file
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(text, name) if not magic else ast.Module([], [])
        if tree.body:
            cells.append(Cell(number, name, source, tree))
    if refused:
        raise ConfigError(
            f"NOTEBOOK={one_line(str(path))} has code that only IPython understands, and every rank would run it: "
            f"{'; '.join(refused)}; remove it, or write it in Python (the module subprocess)"
        )
    if not cells:
        raise ConfigError(f"NOTEBOOK={one_line(str(path))} has no code cell that is not empty")
    return cells


def _sources(path: Path) -> Iterator[str]:
    shown = f"NOTEBOOK={one_line(str(path))}"
    try:
        data = json.loads(read_text(path, variable="NOTEBOOK", wanted="a notebook (.ipynb)"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{shown} is not a notebook: not valid JSON ({one_line(str(error))})") from None
    version = data.get("nbformat") if isinstance(data, dict) else None
    if version != 4 or not isinstance(data.get("cells"), list):
        raise ConfigError(
            f"{shown} is not a notebook of format 4 (nbformat: {one_line(str(version))}); save it in Jupyter"
        )
    metadata: Any = data.get("metadata") if isinstance(data.get("metadata"), dict) else {}
    kernel = metadata.get("kernelspec") or {}
    language = str(kernel.get("language", "python") if isinstance(kernel, dict) else "python")
    if not language.lower().startswith(("python", "ipython")):
        raise ConfigError(f"{shown} is written in {one_line(language)}; only Python runs here")
    for cell in data["cells"]:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            yield "".join(map(str, source)) if isinstance(source, list) else str(source)


def _plain(source: str, name: str) -> tuple[str, list[tuple[int, str]]]:
    """A cell as Python, without magics that change nothing; and the magic lines that would change something.

    Only lines that Python does not understand are examined: `%` may start the second line of an expression.
    """
    lines, refused = source.splitlines(), []
    for _ in range(len(lines)):  # each round takes away one line that does not parse
        try:
            ast.parse("\n".join(lines), name)
            break
        except SyntaxError as error:
            index = (error.lineno or 1) - 1
            text = lines[index] if index < len(lines) else ""
            bare = text.strip()
            if not _MAGIC.fullmatch(bare):
                break
            if not _IGNORED.fullmatch(bare):
                refused.append((index + 1, bare))
            lines[index] = text[: len(text) - len(text.lstrip())] + ("pass" if not bare.startswith("%%") else "")
    return "\n".join(lines), refused


# --- one rank ---------------------------------------------------------------------------------------------------------


def run_cells(cells: Sequence[Cell], path: Path, *, rank: int) -> int:
    """Run the cells in this process, from the notebook's folder; the exit code.

    Raises:
        SftPlayError: as a cell raised it, with the cell and its line.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines appear as they are printed, in a pipe too
    module = types.ModuleType("__main__")
    module.__dict__["display"] = _display
    sys.modules["__main__"] = module  # where pickle looks for classes that cells define
    os.chdir(path.absolute().parent)
    sys.path.insert(0, str(Path.cwd()))
    with contextlib.ExitStack() as held:
        if rank != 0:
            held.enter_context(contextlib.redirect_stdout(held.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
        for cell in cells:
            try:
                for code in _codes(cell):
                    exec(code, module.__dict__)
            except SftPlayError as error:
                own = _own_frames(error, cell)
                raise type(error)(f"{cell.name}, line {own.tb_lineno if own else 1}: {error}") from error
            except Exception as error:
                error = error.with_traceback(_own_frames(error, cell) or error.__traceback__)
                if not failures.hand_over(error):
                    sys.stderr.write("".join(traceback.format_exception(error)))
                return 1
    return 0


def _display(*values: Any) -> None:
    """IPython's function for displaying values within a cell."""
    for value in values:
        sys.displayhook(value)


def _codes(cell: Cell) -> list[types.CodeType]:
    """The cell's statements, and its last expression, whose value is shown unless a semicolon ends it."""
    body = cell.tree.body
    shows = isinstance(body[-1], ast.Expr) and not cell.source.rstrip().endswith(";")
    first, last = (body[:-1], body[-1:]) if shows else (body, [])
    codes = [compile(ast.Module(first, []), cell.name, "exec")] if first else []
    # "single" hands the value to sys.displayhook, as an interactive Python does
    return codes + ([compile(ast.Interactive(last), cell.name, "single")] if last else [])


def _own_frames(error: BaseException, cell: Cell) -> Any:
    """The traceback from the cell on: the frames before it are ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != cell.name:
        frames = frames.tb_next
    return frames


# --- all ranks --------------------------------------------------------------------------------------------------------


def launch_of(path: Path, machine: Hardware, *, processes: int | None, gpus: Sequence[int] = ()) -> Launch:
    """The command that starts the ranks, and its variables: one rank per GPU, or `CPU_RANKS`; raises ConfigError where
    more ranks are asked for than there are GPUs, or GPUs that do not exist."""
    present = len(machine.gpus)
    count = processes or len(gpus) or present or CPU_RANKS
    if (gpus and max(gpus) >= present) or (present and count > (len(gpus) or present)):
        asked = f"GPUS={','.join(map(str, gpus))}" if gpus else f"NPROC={count}"
        raise ConfigError(f"{asked}: this machine has {present} GPUs, and each rank needs its own")
    launch = torchrun(
        ["run-notebook", "--notebook", str(path.absolute())],
        processes=count,
        nodes=Nodes(),
        threads=None if machine.gpus else max(1, machine.cpu_cores // count),
        gpus=",".join(str(gpu) for gpu in gpus) or None,
    )
    return dataclasses.replace(launch, environment={**launch.environment, failures.COMMAND_VARIABLE: "run-notebook"})


def start(launch: Launch, answer: Mapping[str, object] | None) -> NoReturn:
    """Replace this process by the agent of the ranks, which handles signals, answers and sets the exit code."""
    environment = with_this_package(launch.environment_in(os.environ))  # the cells run in the notebook's folder
    if answer is not None:
        environment[failures.ANSWER_VARIABLE] = json.dumps(answer)
    sys.stdout.flush()  # execve drops what is still buffered
    sys.stderr.flush()
    os.execve(launch.words[0], launch.watched, environment)
