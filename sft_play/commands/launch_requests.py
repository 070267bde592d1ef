"""What starts the ranks of a run: nobody, a launcher that is there already, or this process."""

import dataclasses
import functools
import logging
import os

from sft_play.commands.request import Request, command_line, trusts_code
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.launch.accelerate import (
    find_accelerate_file,
    read_accelerate_file,
    refuse_too_few_processes,
)
from sft_play.launch.request import LaunchRequest, resume_request
from sft_play.launch.torchrun import (
    RENDEZVOUS_VARIABLES,
    RESUMED_VARIABLE,
    RankInfo,
    read_rank_info,
    refuse_repeated_starts,
    rendezvous_variables,
)
from sft_play.log import escape_control, one_line, set_up_logging
from sft_play.machine.network import RENDEZVOUS_TIMEOUT_S
from sft_play.planner.layout import ONE_PROCESS_LAYOUTS, parse_mesh
from sft_play.process.failures import format_ranks
from sft_play.runs.folder import check_remote_code

logger = logging.getLogger(__name__)

# Commands that start ranks.
LAUNCHING_COMMANDS = ("train-distributed", "train-deepspeed")


def launch_request_from(request: Request) -> LaunchRequest:
    """Build the LaunchRequest of a command: the run, and whether this process trains it (alone, or
    as a rank) or launches ranks. Raises ConfigError where the config cannot be read, or the words
    contradict each other."""
    command, options = request.command, request.options
    if command == "train" and request.run:
        raise ConfigError(
            f"RUN={escape_control(request.run)} names a run for make resume;"
            " output.name names a new one"
        )
    if command == "rank":  # a process that our own launcher started
        rank_info = read_rank_info(os.environ)
        if rank_info is None:
            raise ConfigError(
                "rank is what make train-distributed starts in each of its processes;"
                " to train here: train"
            )
        resumed_run = os.environ.get(RESUMED_VARIABLE)
        set_up_logging("resume" if resumed_run else "train", rank=rank_info.rank)
        return LaunchRequest(
            load_config(request.config, overrides=request.overrides),
            options,
            rank_info=rank_info,
            should_resume=bool(resumed_run),
            run_name=resumed_run,
        )
    rank_info = launcher_rank_info(request)
    loaded = load_config(request.config, overrides=request.overrides)
    if command == "launch-command":
        return LaunchRequest(
            loaded, dataclasses.replace(options, dry_run=True), launches_ranks=True
        )
    is_trusted = functools.partial(trusts_code, request)
    if rank_info is not None:
        if request.is_config_recorded:
            check_remote_code(
                request.config, *(part.config.model for part in loaded.runs), is_trusted=is_trusted
            )
        return LaunchRequest(
            loaded,
            options,
            rank_info=rank_info,
            should_resume=command == "resume",
            run_name=request.run,
        )
    if command == "resume":
        return resume_request(loaded, options, run_name=request.run, is_trusted=is_trusted)
    # the only process that another launcher started launches no others
    launches_ranks = command in LAUNCHING_COMMANDS and read_rank_info(os.environ) is None
    if not launches_ranks:
        if options.strategy not in (None, *ONE_PROCESS_LAYOUTS) or options.deepspeed:
            raise ConfigError(
                f"{command} runs one process, and a layout or DeepSpeed was asked for: use"
                " train-distributed or train-deepspeed, or start the ranks with torchrun"
            )
        # `train` launches ranks where its nodes, its mesh or accelerate's file ask for several
        # processes
        mesh = parse_mesh(loaded.config.model.mesh_shape)
        is_spread = options.nodes.count > 1 or (mesh is not None and mesh.ranks > 1)
        launches_ranks = is_spread or accelerate_has_several_machines()
    return LaunchRequest(loaded, options, launches_ranks=launches_ranks)


def launcher_rank_info(request: Request) -> RankInfo | None:
    """Find this process's place among the ranks that a launcher started; None where it is the only
    process. Raises ConfigError where the launcher was asked for several processes and started one,
    or started a run for each of them."""
    refuse_too_few_processes(os.environ)
    refuse_repeated_starts(os.environ, node_count=request.options.nodes.count)
    rank_info, options = read_rank_info(os.environ), request.options
    if options.nodes.exported_note:
        logger.info(
            "RANK and WORLD_SIZE in the environment make this a node among others; alone: %s",
            _single_process_command(request),
        )
    if rank_info is None or request.command == "launch-command":
        return None
    requested_processes, started_processes = options.processes_per_node, rank_info.local_world_size
    if requested_processes not in (None, started_processes):
        raise ConfigError(
            f"NPROC={requested_processes} asks for {requested_processes} processes on this node,"
            f" and the launcher started {started_processes}: leave out NPROC=, or give the launcher"
            " the same number"
        )
    wants_engine = options.deepspeed or options.strategy not in (None, *ONE_PROCESS_LAYOUTS)
    # no launcher that is known here set RANK: it may be left from a notebook or another run
    may_be_left_over = (
        "RANK" in os.environ and not {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys()
    )
    if rank_info.world_size == 1 and rank_info.run_folder is None and not wants_engine:
        if may_be_left_over and request.command in LAUNCHING_COMMANDS:
            logger.warning(
                "RANK and WORLD_SIZE=1 in the environment make this the only rank of another"
                " launcher, and no others are started; without them: %s",
                _single_process_command(request),
            )
        return None
    set_up_logging(request.command, rank=rank_info.rank)
    # before the rendezvous, for which ranks this one waits, where and how long
    if may_be_left_over:
        other_ranks = format_ranks(
            [rank for rank in range(rank_info.world_size) if rank != rank_info.rank] or [0]
        )
        rendezvous = {
            **rendezvous_variables(os.environ, node_count=rank_info.node_count),
            **os.environ,
        }
        logger.warning(
            "RANK, WORLD_SIZE and LOCAL_RANK in the environment make this rank %d of %d: it waits"
            " at %s:%s for %s, %.0f s at most; alone: %s",
            rank_info.rank,
            rank_info.world_size,
            one_line(rendezvous["MASTER_ADDR"]),
            one_line(rendezvous["MASTER_PORT"]),
            other_ranks,
            RENDEZVOUS_TIMEOUT_S,
            _single_process_command(request),
        )
    return rank_info


def _single_process_command(request: Request) -> str:
    """Return the request's command without the variables that make this process one of several
    ranks or nodes."""
    unset_arguments = [
        word for name in RENDEZVOUS_VARIABLES if name in os.environ for word in ("-u", name)
    ]
    return command_line(
        request, request.command, request.overrides, before=["env", *unset_arguments]
    )


def accelerate_has_several_machines() -> bool:
    """True if the accelerate configuration that a launch would read is for several machines. One
    that cannot be read is only a warning."""
    file = find_accelerate_file(os.environ)
    try:
        return file is not None and read_accelerate_file(file).num_machines > 1
    except ConfigError as error:
        logger.warning("%s; it is not needed for one process", error)
        return False
