"""`train`, `resume`, `train-distributed`, `train-deepspeed` and `launch-command`: a run in this process, as one of a
launcher's ranks, or over ranks that are launched here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os

from sft_play.commands.answer import Answer, stdout_to_stderr
from sft_play.commands.machine import refuse_hardware
from sft_play.commands.request import Request
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError
from sft_play.finished.report.report import report_at_end, reported
from sft_play.launch.accelerate.launched import refuse_too_few_processes
from sft_play.launch.accelerate.reading import find_accelerate_file, read_accelerate_file
from sft_play.launch.exported import Ranks, ranks_of, refuse_tasks
from sft_play.log import escape_control, set_up_logging
from sft_play.planner.mesh import mesh_of
from sft_play.runs.creation import is_finished, new_folder, resumes
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import find_resumable
from sft_play.starting.one_process import start_here
from sft_play.starting.one_rank import start_rank
from sft_play.starting.several_ranks import Launched, launch, resume

logger = logging.getLogger(__name__)

HELP = {
    "train": "fine-tune the model of a run YAML",
    "resume": "continue the newest unfinished run of a config, or RUN",
    "train-distributed": "fine-tune over all GPUs (or CPU ranks), in the layout of the plan or STRATEGY",
    "train-deepspeed": "the same with DeepSpeed: ZeRO-2, or what DEEPSPEED_CONFIG says",
    "launch-command": "show the command and variables that start the ranks, and start nothing",
}
RANKS_NEED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
"""Packages that every rank imports: checked in the parent, before any rank starts."""


def run(request: Request) -> Answer | int:
    """Train, or show how; the answer is the run's summary, whose lines are already in the log."""
    refuse_hardware(request)
    with stdout_to_stderr(wanted=request.json):
        if request.command == "train":
            return _train(request)
        return _resume(request) if request.command == "resume" else _launch(request)


def _train(request: Request) -> Answer | int:
    if request.run:
        raise ConfigError(f"RUN={escape_control(request.run)} names a run for make resume; output.name names a new one")
    loaded = load_config(request.config, overrides=request.overrides)
    output = loaded.config.output
    ranks = launched_ranks(request)
    if ranks is not None:
        return _as_rank(request, loaded, ranks)
    if request.options.strategy not in (None, "single") or request.options.deepspeed:
        raise ConfigError(
            f"{request.command} runs one process, and a layout or DeepSpeed was asked for: use train-distributed or "
            "train-deepspeed, or start the ranks with torchrun"
        )
    mesh = mesh_of(loaded.config.model.mesh_shape)
    if request.options.nodes.count > 1 or (mesh and mesh.ranks > 1) or accelerate_names_machines():
        return _answer(launch(loaded, request.options))
    folder = new_folder(output, config_path=loaded.path)
    is_resumed = resumes(folder, output)
    if not (is_resumed and is_finished(folder)):
        with reported(folder):
            start_here(loaded, folder, resume=is_resumed, board=request.options.board)
    return _summary(folder)


def _resume(request: Request) -> Answer | int:
    loaded = load_config(request.config, overrides=request.overrides)
    ranks = launched_ranks(request)
    if ranks is not None:
        return _as_rank(request, loaded, ranks)
    folder = find_resumable(loaded.config.output, config_path=loaded.path, name=request.run)
    with reported(folder):
        code = resume(loaded, folder, request.options)
    return _failed(folder, code) if code else _summary(folder)


def _launch(request: Request) -> Answer | int:
    # one message here instead of a traceback from each rank
    for package in RANKS_NEED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    show_only = request.command == "launch-command"
    if not show_only and ranks_of(os.environ) is not None:
        return _train(request)  # under another launcher, whose ranks these are
    refuse_too_few_processes(os.environ)
    refuse_tasks(os.environ, nodes=request.options.nodes.count)
    loaded = load_config(request.config, overrides=request.overrides)
    launched = launch(loaded, dataclasses.replace(request.options, show_only=show_only))
    return _command(launched) if show_only else _answer(launched)


def _as_rank(request: Request, loaded: LoadedConfig, ranks: Ranks) -> Answer | int:
    """This process's part of a run over a launcher's ranks; rank 0 answers."""
    is_resumed = request.command == "resume"
    folder = start_rank(loaded, ranks, request.options, resume=is_resumed, run_name=request.run)
    if not ranks.is_first:
        return 0
    report_at_end(folder)
    return _summary(folder)


def _answer(launched: Launched) -> Answer | int:
    """The summary of a run over ranks, whose report is written; on several nodes rank 0 has done so, in its folder."""
    if launched.folder is not None:
        report_at_end(launched.folder)
    if launched.code:
        return _failed(launched.folder, launched.code)
    return _summary(launched.folder) if launched.folder is not None else Answer({"run": None, "exit": 0})


def _failed(folder: RunFolder | None, code: int) -> Answer:
    """The answer of ranks that failed, of which their agent has told; `error` is what their run recorded."""
    error = folder.manifest().get("error") if folder is not None else None
    told = {"error": str(error)} if error else {}
    return Answer({"run": None if folder is None else str(folder.path), **told}, exit_code=code)


def _summary(folder: RunFolder) -> Answer:
    """The summary in a run's folder; the run's name alone where that file is gone."""
    try:
        summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    return Answer({"run": str(folder.path), **summary})


def _command(launched: Launched) -> Answer:
    """The command that was shown; null where no launcher starts the ranks."""
    start = launched.launch
    shown = start and {"line": start.line, "words": list(start.words), "environment": start.environment}
    return Answer({"launch": shown, "plan": launched.plan.as_json() if launched.plan else None})


def accelerate_names_machines() -> bool:
    """Whether the accelerate configuration that a launch would read is for several machines.

    One that cannot be read is only a warning: a single process needs nothing from it.
    """
    file = find_accelerate_file(os.environ)
    if file is None:
        return False
    try:
        return read_accelerate_file(file).num_machines > 1
    except ConfigError as error:
        logger.warning("%s; it is not needed for one process", error)
        return False


def launched_ranks(request: Request) -> Ranks | None:
    """This process's place among the ranks that a launcher started; None where it is the only process.

    Raises:
        ConfigError: the launcher was asked for several processes and started one, or started a run for each of them.
    """
    refuse_too_few_processes(os.environ)
    refuse_tasks(os.environ, nodes=request.options.nodes.count)
    ranks, options = ranks_of(os.environ), request.options
    if ranks is None:
        return None
    if options.processes not in (None, ranks.local_world_size):
        raise ConfigError(
            f"NPROC={options.processes} asks for {options.processes} processes on this node, and the launcher started "
            f"{ranks.local_world_size}: leave out NPROC=, or give the launcher the same number"
        )
    wants_engine = options.deepspeed or options.strategy not in (None, "single")
    if ranks.world_size == 1 and ranks.folder is None and not wants_engine:
        return None
    set_up_logging(request.command, rank=ranks.rank)
    return ranks
