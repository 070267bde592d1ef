"""A run in this process, on one GPU or the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os

from sft_play import endings
from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError, in_stage
from sft_play.facts.hardware import Hardware, detect
from sft_play.launch.device import hide_gpus, machine_for, prepare_libraries
from sft_play.launch.machine import one_gpu
from sft_play.launch.resolve_options import log_choices, take_choices
from sft_play.launch.tensorboard import with_curves
from sft_play.log import start_log_buffer
from sft_play.planner.batching import effective_batch
from sft_play.planner.layout import Stopped
from sft_play.planner.plan import Plan, Planned, require_fit
from sft_play.runs.creation import require_writable
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import lock
from sft_play.runs.resuming import first_day
from sft_play.starting.before import (
    board_beside,
    count_before_planning,
    load_libraries,
    log_base,
    require_backend,
    require_data,
    require_usable,
    with_starter,
)
from sft_play.starting.measured import remember
from sft_play.starting.over_ranks import log_stage, parts_of
from sft_play.starting.plan_run import log_plan, plan_for
from sft_play.starting.resumed import kept_of, log_kept, refuse_resuming, stopped_run

logger = logging.getLogger(__name__)


def start_here(loaded: LoadedConfig, folder: RunFolder, *, resume: bool, board: bool = False) -> int:
    """The run in this process, on one GPU or the CPU; `board`: with TensorBoard beside it.

    Outside the training's steps a request to stop unwinds the stack, and nothing more is saved.
    """
    with endings.StopSignals(endings.interrupt), lock(folder) if resume else contextlib.nullcontext() as mark:
        buffer = start_log_buffer()
        log_base(loaded)
        require_data(loaded)
        if not resume:
            require_writable(folder)
        choices = take_choices()  # now: the plan decides, and accelerate would act on the same variables later
        loaded = with_curves(loaded) if board else loaded
        hide_gpus(loaded.config, os.environ)
        whole = machine_for(loaded.config, detect())
        hardware = one_gpu(whole)
        require_usable(loaded.config, hardware)
        require_backend(loaded)
        count_before_planning(loaded, hardware, only=None if resume else ("single",), trains_here=True)
        planned = _plan_stages(loaded, hardware, whole, resume_from=folder if resume else None)
        if choices is not None:
            log_choices(choices, planned[0][1], max_grad_norm=loaded.config.train.max_grad_norm)
        loaded = with_starter(loaded)  # takes minutes the first time: only once nothing cheap is left to refuse
        prepare_libraries(loaded.config.model.name, hardware)
        load_libraries()
        from sft_play.training.job import job_of
        from sft_play.training.run import run

        no_engine: list[Planned] = [(plan, None) for _, plan in planned]
        job = job_of(loaded, no_engine, folder, resume=resume, mark=mark, log_buffer=buffer, today=first_day(folder))
        with board_beside(folder, wanted=board):
            summary = run(job)
        remember(planned, summary)
        return 0


def _plan_stages(
    loaded: LoadedConfig, hardware: Hardware, whole: Hardware, *, resume_from: RunFolder | None
) -> list[tuple[RunConfig, Plan]]:
    """Settings and plan of the run, or of each of its stages, logged.

    Args:
        hardware: what this process uses of the `whole` machine.
        resume_from: the run that is resumed; None for a new one.
    """
    planned: list[tuple[RunConfig, Plan]] = []
    for part, place in parts_of(loaded, resume_from):
        log_stage(part)
        config = part.config
        with in_stage(part.stage):
            stopped = stopped_run(place) if place is not None else None
            kept = kept_of(config, stopped, 1)
            log_kept(kept, stopped)
            if place is not None:
                refuse_resuming(place, stopped, "single", 1)
            trace = config.plan.trace and bool(hardware.gpus)
            plan = plan_for(config, hardware, only=("single",), trace=trace, kept=kept)
            log_what_all_would_do(config, whole, plan, stopped)
            # a kept batch ran before: it is tried again where the prediction says that it does not fit
            require_fit(plan, config, is_fixed=kept.batch is not None)
            log_plan(plan, config)
        planned.append((config, plan))
    return planned


def log_what_all_would_do(config: RunConfig, whole: Hardware, plan: Plan, stopped: Stopped | None = None) -> None:
    """Log which layout the plan would use on all GPUs, where this command uses one of several; `stopped`: how a resumed
    run was spread."""
    alike = whole.alike[0] if whole.gpus else ()
    if len(alike) < 2 or effective_batch(config.train, ranks=len(alike)) % len(alike):
        return  # nothing to compare with: one GPU, or a batch that does not divide over them
    try:
        kept = kept_of(config, stopped, len(alike))
        plan_of_all = plan_for(config, dataclasses.replace(whole, gpus=alike), kept=kept)
    except SftPlayError:
        return  # this run is planned; why another would be refused is of no interest to it
    if plan_of_all.fits:
        is_all = len(alike) == len(whole.gpus)
        named = "" if is_all else f" GPUS={','.join(str(gpu.index) for gpu in alike)}"
        logger.info("On %s %d GPUs the plan would use %s (make train-distributed%s); this run is %s",
                    "all" if is_all else "the alike", len(alike), plan_of_all.layout, named, plan.layout)  # fmt: skip
