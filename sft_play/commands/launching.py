"""`train`, `resume`, `train-distributed`, `train-deepspeed` and `launch-command`: a run in this process, as one of a
launcher's ranks, or over ranks that are launched here; `rank` is one of these, which help does not name. Beside
them `setup-accelerate`, which writes accelerate's configuration."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shlex
import subprocess
import sys

from sft_play.commands.answer import Answer, stdout_to_stderr
from sft_play.commands.request import Request, make_words, refuse_hardware, trusts_code
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError
from sft_play.facts.hardware import detect_hardware
from sft_play.facts.network import RENDEZVOUS_TIMEOUT_S
from sft_play.finished.listing import best_checkpoint
from sft_play.launch.accelerate import (
    MIXED_PRECISION,
    accelerate_path,
    find_accelerate_file,
    read_machines,
    read_accelerate_file,
    refuse_too_few_processes,
    write_accelerate_file,
)
from sft_play.launch.exported import (
    RENDEZVOUS_VARIABLES,
    RESUMED_VARIABLE,
    RankInfo,
    rendezvous_variables,
    read_rank_info,
    refuse_repeated_starts,
)
from sft_play.launch.machine import restrict_to_device, select_hardware
from sft_play.log import escape_control, one_line, set_up_logging
from sft_play.planner.mesh import parse_mesh
from sft_play.planner.precision import choose_precision
from sft_play.process.failures import numbered
from sft_play.runs.files import read_summary
from sft_play.runs.folder import refuse_code
from sft_play.starting.start import LaunchRequest, LaunchResult, resume_request, start_run

logger = logging.getLogger(__name__)

# Commands that start ranks.
_LAUNCHES = ("train-distributed", "train-deepspeed")


def run(request: Request) -> Answer | int:
    """Train, or show how; the answer is the run's summary, whose lines are already in the log."""
    if request.command == "setup-accelerate":
        return _setup_accelerate(request)
    refuse_hardware(request)
    with stdout_to_stderr(wanted=request.json):
        asked = asked_for(request)
        started = start_run(asked)
        if asked.options.dry_run:
            return _command(started)
        if request.command == "rank" or (asked.rank_info is not None and not asked.rank_info.is_first):
            return 0  # the parent answers, or rank 0
        return _answer(started)


def asked_for(request: Request) -> LaunchRequest:
    """What a command asks for, and whether this process trains it, alone or as a rank, or launches ranks; raises
    ConfigError where the config cannot be read, or the command's words do not go together."""
    command, options = request.command, request.options
    if command == "train" and request.run:
        raise ConfigError(f"RUN={escape_control(request.run)} names a run for make resume; output.name names a new one")
    ranks = _own_place() if command == "rank" else launched_ranks(request)
    loaded = load_config(request.config, overrides=request.overrides)
    if command == "rank":
        resumed = os.environ.get(RESUMED_VARIABLE)
        return LaunchRequest(loaded, options, rank_info=ranks, should_resume=bool(resumed), run_name=resumed)
    if command == "launch-command":
        return LaunchRequest(loaded, dataclasses.replace(options, dry_run=True), launches_ranks=True)
    trusts = functools.partial(trusts_code, request)
    if ranks is not None:
        if request.config_recorded:
            refuse_code(request.config, *(part.config.model for part in loaded.parts), trusts=trusts)
        return LaunchRequest(loaded, options, rank_info=ranks, should_resume=command == "resume", run_name=request.run)
    if command == "resume":
        return resume_request(loaded, options, run_name=request.run, trusts=trusts)
    # the only process that another launcher started launches no others
    return LaunchRequest(
        loaded, options, launches_ranks=(command in _LAUNCHES and read_rank_info(os.environ) is None) or _spreads(request, loaded)
    )


def _own_place() -> RankInfo:
    ranks = read_rank_info(os.environ)
    if ranks is None:
        raise ConfigError("rank is what make train-distributed starts in each of its processes; to train here: train")
    set_up_logging("resume" if os.environ.get(RESUMED_VARIABLE) else "train", rank=ranks.rank)
    return ranks


def _spreads(request: Request, loaded: LoadedConfig) -> bool:
    """Whether a run that no command spreads is one of several processes, by its mesh or its number of nodes; raises
    ConfigError where a layout of several was asked for."""
    if request.options.strategy not in (None, "single") or request.options.deepspeed:
        asked = f"{request.command} runs one process, and a layout or DeepSpeed was asked for"
        raise ConfigError(f"{asked}: use train-distributed or train-deepspeed, or start the ranks with torchrun")
    mesh = parse_mesh(loaded.config.model.mesh_shape)
    return request.options.nodes.count > 1 or (mesh is not None and mesh.ranks > 1) or accelerate_names_machines()


def _answer(started: LaunchResult) -> Answer:
    """The summary in the run's folder, or its name alone where that file is gone; rank 0 has the folder where there are
    several nodes. Of ranks that failed, of which their agent has told, what their run recorded."""
    folder = started.folder
    run = None if folder is None else str(folder.path)
    if started.exit_code:
        kept = folder if folder is not None and folder.path.is_dir() else None  # a run that is refused leaves nothing
        error = kept.manifest().get("error") if kept else None
        data = {"run": run if kept else None} | ({"error": str(error)} if error else {})
        return Answer(data, exit_code=started.exit_code)
    summary = {**read_summary(folder.path), **best_checkpoint(folder)} if folder else {"exit": 0}
    return Answer({"run": run, **summary})


def _command(started: LaunchResult) -> Answer:
    launch = started.launch
    shown = launch and {"line": launch.shell_line, "words": list(launch.argv), "environment": launch.environment}
    return Answer({"launch": shown, "plan": started.plan.as_json() if started.plan else None})


def accelerate_names_machines() -> bool:
    """Whether the accelerate configuration that a launch would read is for several machines; one that cannot be read is
    only a warning."""
    file = find_accelerate_file(os.environ)
    try:
        return file is not None and read_accelerate_file(file).num_machines > 1
    except ConfigError as error:
        logger.warning("%s; it is not needed for one process", error)
        return False


def launched_ranks(request: Request) -> RankInfo | None:
    """This process's place among the ranks that a launcher started; None where it is the only process. Raises
    ConfigError where the launcher was asked for several processes and started one, or started a run for each of them.
    """
    refuse_too_few_processes(os.environ)
    refuse_repeated_starts(os.environ, nodes=request.options.nodes.count)
    ranks, options = read_rank_info(os.environ), request.options
    if options.nodes.exported_rank:
        logger.info("RANK and WORLD_SIZE in the environment make this a node among others; alone: %s",
                    _command_alone(request))  # fmt: skip
    if ranks is None or request.command == "launch-command":
        return None
    wanted, started = options.processes, ranks.local_world_size
    if wanted not in (None, started):
        asked = f"NPROC={wanted} asks for {wanted} processes on this node, and the launcher started {started}"
        raise ConfigError(f"{asked}: leave out NPROC=, or give the launcher the same number")
    wants_engine = options.deepspeed or options.strategy not in (None, "single")
    # no launcher that is known here set RANK: it may be left from a notebook or another run
    may_be_left_over = "RANK" in os.environ and not {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys()
    if ranks.world_size == 1 and ranks.run_folder is None and not wants_engine:
        if may_be_left_over and request.command in _LAUNCHES:
            logger.warning("RANK and WORLD_SIZE=1 in the environment make this the only rank of another launcher, and "
                           "no others are started; without them: %s", _command_alone(request))  # fmt: skip
        return None
    set_up_logging(request.command, rank=ranks.rank)
    if may_be_left_over:
        _warn_of_the_wait(ranks, request)
    return ranks


def _command_alone(request: Request) -> str:
    """The command of a request without the variables that make this process one of several ranks or nodes."""
    unset = [word for name in RENDEZVOUS_VARIABLES if name in os.environ for word in ("-u", name)]
    return shlex.join(["env", *unset, *make_words(request, request.command, request.overrides)])


def _warn_of_the_wait(ranks: RankInfo, request: Request) -> None:
    """Say, before the rendezvous, for which ranks this one waits, where and how long."""
    others = numbered([rank for rank in range(ranks.world_size) if rank != ranks.rank] or [0])
    place = {**rendezvous_variables(os.environ, nodes=ranks.node_count), **os.environ}
    logger.warning(
        "RANK, WORLD_SIZE and LOCAL_RANK in the environment make this rank %d of %d: it waits at %s:%s for %s, %.0f s "
        "at most; alone: %s", ranks.rank, ranks.world_size, one_line(place["MASTER_ADDR"]),
        one_line(place["MASTER_PORT"]), others, RENDEZVOUS_TIMEOUT_S, _command_alone(request),
    )  # fmt: skip


def _setup_accelerate(request: Request) -> Answer:
    path = accelerate_path(os.environ)
    if os.environ.get("INTERACTIVE", "") not in ("", "0"):
        if not (sys.stdin and sys.stdin.isatty()):
            raise ConfigError("INTERACTIVE=1: there is no terminal to answer accelerate's questions in; leave it out")
        words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(path)]
        with stdout_to_stderr(wanted=request.json):
            code = subprocess.call(words)
        return Answer({"ok": code == 0, "path": str(path)}, exit_code=code)
    loaded = load_config(request.config, overrides=request.overrides)
    options = dataclasses.replace(request.options, nodes=read_machines(os.environ))
    hardware = select_hardware(options, restrict_to_device(loaded.config, detect_hardware()))
    precision = choose_precision(loaded.config, hardware).compute
    text = write_accelerate_file(
        path,
        hardware,
        mixed_precision=MIXED_PRECISION.get(precision, "no"),
        gpu_ids=options.gpus,
        overwrite=request.force,
        machines=options.nodes,
    )
    return Answer(
        {"ok": True, "path": str(path), "text": text}, [f"{path}:", *(f"  {one}" for one in text.splitlines())]
    )
