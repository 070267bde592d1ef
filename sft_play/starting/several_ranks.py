"""A run over several ranks, as their parent sees it: plan, run folder, launch, end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from logging.handlers import MemoryHandler

from sft_play import endings
from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.environment import THREADS_VARIABLE
from sft_play.errors import Interrupted
from sft_play.facts.hardware import Hardware, detect
from sft_play.heap import importing
from sft_play.launch.command import Launch, timeout_of, torchrun, visible_only
from sft_play.launch.device import hide_gpus, machine_for, prepare_libraries
from sft_play.launch.exported import RESUMED_VARIABLE, refuse_lone_node
from sft_play.launch.handed import write_launch
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import log_idle, machine_of
from sft_play.launch.resolve_options import as_accelerate_says, as_the_mesh_says, log_choices, with_mesh_of
from sft_play.launch.start_ranks import note_end, rank_words, run_ranks
from sft_play.launch.tensorboard import with_curves
from sft_play.log import start_log_buffer
from sft_play.planner.plan import Plan
from sft_play.runs.creation import is_finished, new_folder, require_writable, resumes
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import LAUNCHER, lock
from sft_play.runs.resuming import first_day
from sft_play.starting.before import (
    board_beside,
    count_for_ranks,
    load_libraries,
    log_base,
    require_adapter,
    require_data,
    require_usable,
    with_starter,
)
from sft_play.starting.measured import remember
from sft_play.starting.one_process import start_here
from sft_play.starting.over_ranks import plan_stages
from sft_play.starting.plan_run import backend_here
from sft_play.starting.resumed import stopped_run

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Launched:
    """The result of a launch: sft-play's exit code, and what was started. `folder` is None on several nodes, where rank
    0 names it; `launch` is None where no launcher starts the ranks."""

    code: int
    folder: RunFolder | None
    plan: Plan | None = None
    launch: Launch | None = None


def resume(loaded: LoadedConfig, folder: RunFolder, options: LaunchOptions) -> int:
    """Resume a stopped run, over as many ranks as before where no other number is asked for."""
    stopped = stopped_run(folder)
    is_asked = bool(options.processes or options.gpus or options.nodes.count > 1)
    if not is_asked:
        gpus, ranks = len(machine_for(loaded.config, detect()).gpus), stopped.processes if stopped else 1
        options = dataclasses.replace(options, processes=min(ranks, gpus) if gpus else ranks)
    is_single = options.processes == 1 and options.nodes.count == 1 and not options.deepspeed
    if is_single and options.strategy in (None, "single"):
        return start_here(loaded, folder, resume=True, board=options.board)
    return launch(loaded, options, resume_from=folder).code


def launch(loaded: LoadedConfig, options: LaunchOptions, *, resume_from: RunFolder | None = None) -> Launched:
    """Plan, write the run folder, start the ranks and wait for them."""
    with endings.StopSignals(endings.interrupt), contextlib.ExitStack() as held:
        return _launch(loaded, options, resume_from, held)


def _launch(
    loaded: LoadedConfig, options: LaunchOptions, resume_from: RunFolder | None, held: contextlib.ExitStack
) -> Launched:
    """The launch itself; the run folder's lock is left in `held`. On several nodes only rank 0 holds it."""
    # Only Unsloth's run is trained by this process; under torchrun it is rank 0 that writes the run's log.
    buffer = start_log_buffer() if loaded.config.tuning.backend == "unsloth" else None
    log_base(loaded)
    hide_gpus(loaded.config, os.environ)
    loaded = with_curves(loaded) if options.board else loaded
    # What the command line leaves open, accelerate's file fills in, then the mesh; of two meshes the run YAML's wins.
    options, accelerate = as_accelerate_says(options, loaded.config)
    loaded = with_mesh_of(accelerate, loaded) if accelerate else loaded
    options = as_the_mesh_says(options, loaded.config)
    refuse_lone_node(options.nodes)
    hardware = machine_of(options)
    if not options.show_only:
        require_usable(loaded.config, hardware)
    log_idle(hardware, options, accelerate.path if accelerate else None)
    is_alone = options.nodes.count == 1
    folder = resume_from or (new_folder(loaded.config.output, config_path=loaded.path) if is_alone else None)
    resumed = folder if folder and (resume_from or resumes(folder, loaded.config.output)) else None
    if resumed is not None and is_finished(resumed):
        return Launched(0, resumed)
    require_data(loaded)
    if folder is not None and resumed is None and not options.show_only:
        require_writable(folder)
    options, on_unsloth = _on_unsloth(loaded.config, options, hardware)
    # Locked before minutes go into rows and plan; Unsloth's run takes the lock of the whole run itself (training/run).
    if resumed is not None and is_alone and not options.show_only and not on_unsloth:
        held.enter_context(lock(resumed, by=LAUNCHER))
    if not options.show_only:
        count_for_ranks(loaded, hardware, options, is_resumed=resumed is not None, trains_here=False)
    planned = plan_stages(loaded, hardware, options, resume_from=resumed)
    plan = planned[0][0]
    if accelerate is not None:
        log_choices(accelerate, plan, max_grad_norm=loaded.config.train.max_grad_norm, with_count=True)
    if on_unsloth and folder is not None:
        code = _run_unsloth(loaded, folder, plan, options, resume=resumed is not None, buffer=buffer)
        return Launched(code, folder, plan)
    ranks = _ranks(loaded, hardware, options, plan, folder if is_alone else None, resume_from)
    logger.info("Launch: %s", ranks.line)
    if options.show_only:
        return Launched(0, folder, plan, ranks)
    loaded = with_starter(loaded)
    require_adapter(loaded, plan)
    if folder is None or not is_alone:
        return Launched(_run_with_nodes(loaded, hardware, options, ranks), None, plan, ranks)
    with board_beside(folder, wanted=options.board):
        held.enter_context(write_launch(folder, loaded, planned, resume=resumed is not None))
        return Launched(_run_noted(ranks, folder), folder, plan, ranks)


def _run_with_nodes(loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, ranks: Launch) -> int:
    """Start this node's ranks once all nodes have met; the exit code. Rank 0 plans again and makes the run folder."""
    with importing():
        from sft_play.training.ranks.node_meeting import card_of, meet

    card = card_of(loaded.config, hardware, strategy=options.strategy, deepspeed=options.deepspeed is not None)
    met = meet(options.nodes, card, limit_s=timeout_of(loaded.config, os.environ))
    # Not in the command that is shown and kept: this node's interface is of no use to who types it elsewhere.
    joined = dataclasses.replace(ranks, environment={**ranks.environment, **met.variables(os.environ)})
    return run_ranks(joined, None)


def _run_noted(ranks: Launch, folder: RunFolder) -> int:
    """Start the ranks of a run on this machine alone, and note in its folder how it ended; the exit code."""
    try:
        code = run_ranks(ranks, folder)
    except KeyboardInterrupt:  # before the ranks were started, or after they ended
        note_end(folder, Interrupted.exit_code)
        raise
    note_end(folder, code)
    return code


def _ranks(
    loaded: LoadedConfig,
    hardware: Hardware,
    options: LaunchOptions,
    plan: Plan,
    folder: RunFolder | None,
    resume_from: RunFolder | None,
) -> Launch:
    """The command of the ranks; `folder`: the run's, where this process names it."""
    ranks = torchrun(
        rank_words(loaded, options, plan),
        processes=hardware.gpus_per_node,
        nodes=options.nodes,
        threads=None if hardware.gpus else _threads(hardware),
        gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        folder=folder.path.absolute() if folder is not None else None,
        nccl_timeout_s=timeout_of(loaded.config, os.environ) if hardware.gpus else None,
        given=os.environ,
    )
    if resume_from is None:
        return ranks
    return dataclasses.replace(ranks, environment={**ranks.environment, RESUMED_VARIABLE: resume_from.path.name})


def _threads(hardware: Hardware) -> int:
    """Threads of each CPU rank: its share of the cores, or as many as the run had that is repeated."""
    return int(os.environ.get(THREADS_VARIABLE) or max(1, hardware.cpu_cores // hardware.gpus_per_node))


def _on_unsloth(config: RunConfig, options: LaunchOptions, hardware: Hardware) -> tuple[LaunchOptions, bool]:
    """Whether Unsloth's own processes run it, and the options, with the layout that they use.

    Raises:
        BackendError: Unsloth was asked for and cannot run it, and no fallback was named.
    """
    if config.tuning.backend != "unsloth":
        return options, False
    layout = options.strategy or ("zero2" if options.deepspeed else "ddp" if hardware.ranks > 1 else "single")
    backend = backend_here(config, hardware, layout=layout)
    if backend.name != "unsloth":
        return options, False
    return dataclasses.replace(options, strategy=layout), True


def _run_unsloth(
    loaded: LoadedConfig,
    folder: RunFolder,
    plan: Plan,
    options: LaunchOptions,
    *,
    resume: bool,
    buffer: MemoryHandler | None,
) -> int:
    """The run as one process of this environment, which prepares it and starts Unsloth's processes on the GPUs."""
    planned, loaded = loaded.config, with_starter(loaded)
    ranks = plan.choice.layout.ranks
    logger.info("Launch: %d process%s of Unsloth's environment", ranks, "es" if ranks > 1 else "")
    if options.show_only:
        return 0
    if options.gpus:
        os.environ.update(visible_only(",".join(str(gpu) for gpu in options.gpus)))
    prepare_libraries(loaded.config.model.name, plan.hardware)
    load_libraries()
    from sft_play.training.job import job_of
    from sft_play.training.run import run

    with board_beside(folder, wanted=options.board):
        summary = run(
            job_of(
                loaded, [(plan, None)], folder, resume=resume, log_buffer=buffer,
                timeout_s=timeout_of(loaded.config, os.environ), today=first_day(folder),
            )
        )  # fmt: skip
    remember([(planned, plan)], summary)
    return 0
