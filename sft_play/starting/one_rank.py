"""One rank of a run over several, whichever launcher started it."""

from __future__ import annotations

import json
import logging
import os
from datetime import date
from pathlib import Path

from sft_play import endings
from sft_play.config.load import LoadedConfig
from sft_play.facts.hardware import detect
from sft_play.heap import importing
from sft_play.launch.command import timeout_of
from sft_play.launch.device import hide_gpus, machine_for, prepare_libraries
from sft_play.launch.exported import Ranks, meeting_variables, rank_variables
from sft_play.launch.handed import LAUNCH_FILE, Handed
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import (
    check_gpu,
    choose_interface,
    name_of_gpu,
    require_own_gpus,
    spread_over,
    with_own_gpu,
)
from sft_play.launch.resolve_options import log_choices, take_choices, with_choices, with_mesh_of
from sft_play.launch.tensorboard import with_curves
from sft_play.log import start_log_buffer
from sft_play.runs.creation import is_finished, new_folder, resumes
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import WRITER
from sft_play.runs.lookup import find_resumable
from sft_play.runs.resuming import first_day
from sft_play.starting.before import (
    board_beside,
    count_for_ranks,
    load_libraries,
    log_base,
    require_usable,
    with_starter,
)
from sft_play.starting.measured import remember
from sft_play.starting.over_ranks import parts_of, plan_stages

logger = logging.getLogger(__name__)


def start_rank(
    loaded: LoadedConfig, ranks: Ranks, options: LaunchOptions, *, resume: bool, run_name: str | None
) -> RunFolder:
    """Run this process's part of a run over several ranks; returns the run's folder.

    Args:
        resume: whether to resume a stopped run, the one named `run_name` or the newest; read by rank 0, and only where
            no parent named the run folder.
    """
    buffer = start_log_buffer() if ranks.is_first else None
    log_base(loaded)
    hide_gpus(loaded.config, os.environ)  # before torch is imported, which reads the variable once
    os.environ.update(rank_variables(os.environ))  # other launchers' names as torchrun's, which torch reads
    os.environ.update(meeting_variables(os.environ, nodes=ranks.nodes))
    if ranks.folder is None:  # another launcher may show each rank its own GPU alone
        ranks = with_own_gpu(ranks, machine_for(loaded.config, detect()), os.environ)
    choices = take_choices()
    if choices is not None and ranks.folder is None:  # under a parent of ours they are left over from another launch
        options, loaded = with_choices(options, choices, loaded.config), with_mesh_of(choices, loaded)
    choose_interface(ranks, os.environ)
    loaded = with_curves(loaded) if options.board else loaded
    handed = _receive(loaded, ranks, options, resume=resume, run_name=run_name)
    folder = RunFolder(Path(handed.folder))
    if handed.finished:
        return folder
    configs = [part.config for part, _ in parts_of(loaded, None)]  # with the starter's name, as plans look it up
    loaded = with_starter(loaded)
    prepare_libraries(loaded.config.model.name, detect())
    planned = handed.planned()
    plan = planned[0][0]
    if choices is not None and ranks.is_first and ranks.folder is None:
        log_choices(choices, plan, max_grad_norm=loaded.config.train.max_grad_norm)
    check_gpu(plan, ranks)  # asks the driver, so that nothing is loaded for a GPU that is refused
    load_libraries()
    from sft_play.training.job import job_of
    from sft_play.training.run import run

    job = job_of(
        loaded, planned, folder, resume=handed.resume, log_buffer=buffer,
        has_folder=handed.made, by=WRITER if ranks.folder is not None else None,
        timeout_s=timeout_of(loaded.config, os.environ),
        today=date.fromisoformat(handed.today) if handed.today else date.today(),
    )  # fmt: skip
    with endings.StopSignals(endings.interrupt), board_beside(folder, wanted=options.board and ranks.is_first):
        summary = run(job)
    if ranks.is_first:
        remember([(config, plan) for config, (plan, _) in zip(configs, planned, strict=True)], summary)
    return folder


def _receive(
    loaded: LoadedConfig, ranks: Ranks, options: LaunchOptions, *, resume: bool, run_name: str | None
) -> Handed:
    """Plan and folder of the run: from the parent's file, or from rank 0 through the rendezvous store."""
    if ranks.folder is not None:  # `make train-distributed` on one node: the parent planned, every rank reads
        return Handed(**json.loads((ranks.folder / LAUNCH_FILE).read_text(encoding="utf-8")))
    with importing():
        from sft_play.training.ranks.rendezvous import gpus_of_all, handed_over, say_gpu

    # Another launcher, or several nodes: rank 0 plans, and the others wait for it in the store.
    here = machine_for(loaded.config, detect())
    say_gpu(name_of_gpu(ranks, here), ranks.rank)
    if not ranks.is_first:
        return Handed(**json.loads(handed_over(None)))
    sees_one = len(here.gpus) == 1 and ranks.local_world_size > 1
    gpus = gpus_of_all(ranks.world_size) if sees_one else []
    require_own_gpus(gpus)
    # without a UUID of each, ranks that share one GPU by mistake look the same
    hardware = spread_over(here, ranks.world_size, ranks.nodes, is_own=sees_one and all(gpus))
    require_usable(loaded.config, hardware)
    if hardware.gpus and ranks.local_world_size < len(here.gpus):
        logger.warning("%d of this node's %d GPUs are idle: start %d processes on it (--nproc-per-node) to use all",
                       len(here.gpus) - ranks.local_world_size, len(here.gpus), len(here.gpus))  # fmt: skip
    output = loaded.config.output
    if resume:
        folder = find_resumable(output, config_path=loaded.path, name=run_name)
    else:
        folder = new_folder(output, config_path=loaded.path)
        resume = resumes(folder, output)
    place = str(folder.path.absolute())
    if resume and is_finished(folder):
        handed = Handed(place, {}, resume, made=False, finished=True)
    else:
        count_for_ranks(loaded, hardware, options, is_resumed=resume, trains_here=True)
        planned = plan_stages(loaded, hardware, options, resume_from=folder if resume else None)
        handed = Handed.of(place, planned, resume=resume, made=False, today=str(first_day(folder)))
    handed_over(handed.text())
    return handed
