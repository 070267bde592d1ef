"""Every start of a run, in its steps: trained here, over ranks that are launched, or as one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from sft_play.config.load import LoadedConfig
from sft_play.errors import ConfigError, RunFolderError, SftPlayError, about
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.finished.report.report import report_at_end, reported
from sft_play.launch import tensorboard
from sft_play.launch.accelerate import MIXED_PRECISION, AccelerateConfig
from sft_play.launch.command import Launch
from sft_play.launch.exported import OF_RENDEZVOUS, Ranks, refuse_lone_node
from sft_play.launch.launch_options import (
    LaunchOptions,
    as_accelerate_says,
    as_the_mesh_says,
    overridden_lines,
    take_choices,
    with_accelerate,
)
from sft_play.launch.machine import hide_gpus, log_idle, machine_for, machine_of, one_gpu
from sft_play.log import one_line, start_log_buffer, write_log_to
from sft_play.planner import plan_details
from sft_play.planner.layout import DEEPSPEED_LAYOUTS
from sft_play.planner.mesh import parse_mesh
from sft_play.planner.plan import Plan
from sft_play.process import signals
from sft_play.runs import oom
from sft_play.runs.folder import DIED, RESTARTS, RunFolder, Trust
from sft_play.runs.locking import LAUNCHER, lock
from sft_play.runs.lookup import find_resumable, is_finished, new_folder, resumes
from sft_play.runs.manifest import as_started, first_day, other_settings, refuse_mixing
from sft_play.starter import BASE_NAME
from sft_play.starting.launch_ranks import (
    Decided,
    count_nodes,
    launch_ranks,
    machine_of_ranks,
    placed,
    received,
    refused,
)
from sft_play.starting.plan_run import layout_in_unsloth, stopped_run
from sft_play.starting.plan_stages import count_before_planning, plan_stages
from sft_play.starting.refusals import refusals, require_planned
from sft_play.starting.train_here import train_here

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A run that a command asks for, and which processes train it."""

    loaded: LoadedConfig
    options: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    over_ranks: bool = False
    """Whether ranks are launched; else this process trains, alone or as one of `ranks`."""
    watched: bool = False
    """Whether the run's only process is launched, as a rank is, so that it can be started again when it dies."""
    ranks: Ranks | None = None
    resume: bool = False
    """Whether a stopped run is resumed: the one in `folder`, or the one that rank 0 finds by its name `run`."""
    folder: RunFolder | None = None
    run: str | None = None
    accelerate: AccelerateConfig | None = None
    """The choices of `accelerate launch`, or of accelerate's file, over some of which the plan wins."""

    @property
    def tells(self) -> bool:
        """Whether this process speaks for the run: not a rank that has a parent of ours, or is not the first."""
        return self.ranks is None or (self.ranks.is_first and self.ranks.folder is None)


@dataclasses.dataclass(frozen=True)
class Started:
    """How a start ended: sft-play's exit code, and what was started. `folder` is None on several nodes, where rank 0
    names it; `launch` is None where no launcher starts the ranks."""

    code: int
    folder: RunFolder | None
    plan: Plan | None = None
    launch: Launch | None = None


def start(asked: Asked) -> Started:
    """Start a run and wait for its end; ranks that ran out of memory are started again, with smaller micro-batches, and
    with MAX_RESTARTS= a run of which a process died. Raises SftPlayError for what the user can fix, where possible
    before a library is imported."""
    signals.note_beginning(anew=asked.ranks is None)  # train.max_hours is the limit of all starts together
    restarts = Restarts(asked.options.restarts)
    if restarts.most and asked.ranks is None and not asked.over_ranks:
        options = dataclasses.replace(asked.options, processes=1)
        asked = dataclasses.replace(asked, options=options, over_ranks=True, watched=True)
    started = _start(asked)
    while started.code and started.folder is not None and restarts.wanted(started.folder, asked.loaded):
        started = _start(dataclasses.replace(asked, resume=True, folder=started.folder))
    return started


def _start(asked: Asked) -> Started:
    """Start a run once; what is cheap to refuse comes first. Outside the training's steps a request to stop unwinds the
    stack."""
    with contextlib.ExitStack() as held:
        if asked.ranks is None:  # a rank that waits for the others is ended by its launcher
            held.enter_context(signals.StopSignals(signals.interrupt))
        buffer = start_log_buffer() if asked.ranks is None or asked.ranks.is_first else None
        if asked.tells:
            _log_base(asked.loaded)
        asked = _settled(asked)
        held.enter_context(about(asked.options.nodes.exported_rank or None))
        decided = _decide(asked, held) if asked.ranks is None else _decide_for_ranks(asked, asked.ranks, held)
        folder, planned = decided.folder, decided.planned
        if not planned:
            return Started(0, folder)
        plan = planned[0][0]
        if asked.accelerate is not None and asked.tells:
            for line in overridden_lines(
                asked.accelerate, mixed_precision=MIXED_PRECISION.get(plan.precision.compute, "no"),
                grad_accum=plan.batch.grad_accum, max_grad_norm=asked.loaded.config.train.max_grad_norm,
            ):  # fmt: skip
                logger.info("%s", line)
        if folder is None or not decided.trains_here:
            run = str(folder.path) if asked.resume and folder is not None else None
            code, launch = launch_ranks(
                asked.loaded, asked.options, planned, folder,
                is_resumed=decided.is_resumed, run=run, beside=_board(asked, folder), log_buffer=buffer,
            )  # fmt: skip
            return Started(code, asked.folder if asked.options.nodes.count > 1 else folder, plan, launch)
        if asked.over_ranks:
            ranks = plan.choice.layout.ranks
            logger.debug("Launch: %d process%s of Unsloth's environment", ranks, "es" if ranks > 1 else "")
        if not asked.options.show_only:
            train_here(
                asked.loaded, planned, folder, ranks=asked.ranks, gpus=asked.options.gpus, beside=_board(asked, folder),
                resume=decided.is_resumed, log_buffer=buffer, has_folder=decided.has_folder, lock=decided.mark,
                today=decided.today,
            )  # fmt: skip
        if asked.ranks is not None and asked.tells:
            report_at_end(folder)
        return Started(0, folder, plan)


def as_it_was_spread(loaded: LoadedConfig, options: LaunchOptions, *, run: str | None, trusts: Trust) -> Asked:
    """A stopped run, the one named `run` or the newest, to be resumed over as many ranks as before where no other
    number is asked for; raises RunFolderError where there is none, or its settings allow code that `trusts` does not.
    """
    folder = find_resumable(loaded.config.output, config_path=loaded.path, name=run)
    loaded, stopped = as_started(loaded, folder, trusts=trusts), stopped_run(folder)
    if not (options.processes or options.gpus or options.nodes.count > 1):
        gpus, ranks = len(machine_for(loaded.config, detect_hardware()).gpus), stopped.processes if stopped else 1
        options = dataclasses.replace(options, processes=min(ranks, gpus) if gpus else ranks)
    has_engine = options.deepspeed or (stopped is not None and stopped.layout in DEEPSPEED_LAYOUTS)  # a single rank's too
    is_single = options.processes == 1 and options.nodes.count == 1 and not has_engine
    over_ranks = not (is_single and options.strategy in (None, "single"))
    return Asked(loaded, options, over_ranks=over_ranks, resume=True, folder=folder)


# --- what was asked ---------------------------------------------------------------------------------------------------


def _log_base(loaded: LoadedConfig) -> None:
    name = loaded.config.model.name
    base = f"{name} ({loaded.path})"
    if name == BASE_NAME:
        base = f"{name}, the starter's two million parameters ({loaded.path}; a run of yours: CONFIG=my.yaml)"
    logger.info("Base model: %s", one_line(base, limit=400))


def _settled(asked: Asked) -> Asked:
    """What was asked, with what the launcher, accelerate and the mesh say where the command line is silent; the
    environment of this process is made that of its part."""
    loaded, options, ranks = asked.loaded, asked.options, asked.ranks
    hide_gpus(loaded.config, os.environ)  # before torch is imported, which reads the variable once
    if asked.over_ranks and not asked.watched:
        # what the command line leaves open, accelerate's file fills in, then the mesh
        options, accelerate = as_accelerate_says(options, loaded.config)
        if options.nodes.exported_rank:
            options = count_nodes(options, loaded.config)
        options = as_the_mesh_says(options, loaded.config)
        refuse_lone_node(options.nodes)
    else:
        ranks = placed(loaded.config, ranks) if ranks is not None else None
        accelerate = take_choices()  # now: the plan decides, and accelerate would act on the same variables later
        if ranks is None:
            options = dataclasses.replace(options, strategy="single")
            for name in OF_RENDEZVOUS:  # torch and accelerate would wait for others, as a notebook or a guide asked
                os.environ.pop(name, None)
        elif accelerate is not None and ranks.folder is None:  # under a parent of ours: left from another launch
            options = with_accelerate(options, accelerate, parse_mesh(loaded.config.model.mesh_shape))
    refuse_restarts(loaded, options, ranks)
    loaded = tensorboard.with_curves(loaded) if options.board else loaded
    return dataclasses.replace(asked, loaded=loaded, options=options, ranks=ranks, accelerate=accelerate)


def _board(asked: Asked, folder: RunFolder | None) -> contextlib.AbstractContextManager[object]:
    if folder is None or not asked.options.board or not asked.tells:
        return contextlib.nullcontext()
    return tensorboard.beside(folder.tensorboard, environment=os.environ, title=folder.path.absolute().name)


# --- what is decided before anything is made --------------------------------------------------------------------------


def _decide(asked: Asked, held: contextlib.ExitStack) -> Decided:
    loaded, options, starts = asked.loaded, asked.options, not asked.options.show_only
    hardware = _machine(asked)
    if asked.over_ranks:
        log_idle(hardware, options, asked.accelerate.path if asked.accelerate else None)
    folder, is_resumed = _folder(asked)
    if folder is not None and is_resumed and starts:
        oom.take(folder)  # of a run whose launcher did not start it again
        take_death(folder)
    if folder is not None and is_resumed and is_finished(folder):
        return Decided(folder, is_resumed)
    if folder is not None and is_resumed and folder.has_trained:
        refuse_mixing(folder, list(other_settings(folder, loaded.config).values()))
    # a command that is only shown may be typed on another machine
    machine = hardware if starts else dataclasses.replace(hardware, named=True)
    # the folder is rank 0's where there are several nodes, which would wait for a node that ends before they meet
    for error in refusals(loaded, machine, makes_folder=not is_resumed and options.nodes.count == 1):
        raise error
    unsloths = layout_in_unsloth(loaded, options, hardware)
    trains_here, mark = unsloths is not None or not asked.over_ranks, None
    if starts and folder is not None and asked.ranks is None:
        held.enter_context(reported(folder))
        if is_resumed and options.nodes.count == 1:  # before minutes go into rows and plan
            mark = held.enter_context(lock(folder, by=None if trains_here else LAUNCHER))
    options = dataclasses.replace(options, strategy=unsloths) if unsloths is not None else options
    if starts:
        count_before_planning(loaded, hardware, options, is_resumed=is_resumed, trains_here=trains_here)
    planned = plan_stages(loaded, hardware, options, resume_from=folder if is_resumed else None)
    if starts:  # the folder is rank 0's where there are several nodes
        require_planned(loaded, hardware, [plan for plan, _ in planned] if folder is not None else [], folder)
    today = first_day(folder) if folder is not None else date.today()
    return Decided(folder, is_resumed, planned, trains_here, mark=mark if trains_here else None, today=today)


def _machine(asked: Asked) -> Hardware:
    here = detect_hardware() if asked.over_ranks else machine_for(asked.loaded.config, detect_hardware())
    if asked.ranks is not None and not asked.over_ranks:
        return machine_of_ranks(here, asked.ranks)
    for line in plan_details.detected_lines(here):
        logger.info("%s", line)
    return machine_of(asked.options, here) if asked.over_ranks else one_gpu(here)


def _folder(asked: Asked) -> tuple[RunFolder | None, bool]:
    output, path = asked.loaded.config.output, asked.loaded.path
    if asked.folder is not None:
        return asked.folder, True
    if asked.over_ranks and asked.options.nodes.count > 1:
        return None, False
    if asked.resume:
        return find_resumable(output, config_path=path, name=asked.run), True
    folder = new_folder(output, config_path=path)
    return folder, resumes(folder, output)


def _decide_for_ranks(asked: Asked, ranks: Ranks, held: contextlib.ExitStack) -> Decided:
    handed = received(asked.loaded.config, ranks)
    if handed is not None:
        return handed
    from sft_play.training.ranks.distributed import broadcast_text

    try:
        decided = _decide(asked, held)
    except SftPlayError as error:
        broadcast_text(refused(error))
        raise
    broadcast_text(decided.text(made=False))  # the others wait; without a plan there is nothing left to do
    return decided


# --- started again ----------------------------------------------------------------------------------------------------


@dataclass
class Restarts:
    """The restarts of one command: at most `most` after a process died."""

    most: int
    done: int = 0

    def wanted(self, folder: RunFolder, loaded: LoadedConfig) -> bool:
        """Whether a run that has failed is to be started again; why is logged, and recorded in its manifest."""
        if event := oom.take(folder):
            logger.warning("Starting again with micro-batch %d", event.now)
            return True
        died = take_death(folder) if self.most else None
        if died is None:
            return False
        with _logged(folder):
            if self.done == self.most:
                logger.error("MAX_RESTARTS=%d is used up: the run ends", self.most)
                return False
            self.done += 1
            step, where = _goes_on(folder, loaded)
            logger.warning("Restart %d of %d: %s; the run goes on from %s", self.done, self.most, died, where)
        entry = {"after": died, "from_step": step, "number": self.done, "of": self.most}
        folder.update_manifest(**{RESTARTS: [*folder.manifest().get(RESTARTS, []), entry]})
        return True


def take_death(folder: RunFolder) -> str | None:
    """How a process of a run died, which the manifest says no more afterwards; None where none did."""
    with contextlib.suppress(RunFolderError):  # an unused folder was removed again
        died = folder.manifest().get(DIED)
        if isinstance(died, str):
            folder.update_manifest(**{DIED: None})
            return died
    return None


def _goes_on(folder: RunFolder, loaded: LoadedConfig) -> tuple[int, str]:
    from sft_play.training.checkpoints.checkpoints import checkpoint_step, last_complete_checkpoint

    begun = [stage for one in loaded.config.curriculum if (stage := folder.of_stage(one.name)).has_begun]
    part = begun[-1] if begun else folder
    last, of = last_complete_checkpoint(part.checkpoints), f" of stage {part.stage}" if part.stage else ""
    if last is None:
        return 0, f"the beginning{of}: there is no checkpoint"
    return checkpoint_step(last), f"the checkpoint of step {checkpoint_step(last)}{of}"


@contextlib.contextmanager
def _logged(folder: RunFolder) -> Iterator[None]:
    file = write_log_to(folder.log_path)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(file)
        file.close()


def refuse_restarts(loaded: LoadedConfig, options: LaunchOptions, ranks: Ranks | None) -> None:
    """Raises ConfigError where MAX_RESTARTS= is given and this command could not start the run again."""
    if not options.restarts:
        return
    asked = f"MAX_RESTARTS={options.restarts}"
    if ranks is not None or options.nodes.count > 1:
        raise ConfigError(
            f"{asked} starts processes again that this command has started on one machine: let the launcher or the "
            "scheduler start the others again, with output.if_exists=resume (make launch-file writes such a job)"
        )
    if loaded.config.tuning.backend == "unsloth":
        raise ConfigError(f"{asked} does not watch the processes of tuning.backend=unsloth; leave it out")
