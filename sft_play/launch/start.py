"""Every start of a run, in its steps: a request becomes a plan, and the plan a result. The run is trained here, over
ranks that are launched, or as one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from datetime import date

from sft_play.config.load import LoadedConfig
from sft_play.errors import SftPlayError, error_prefix
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.finished.report.report import report_on_exit, write_final_report
from sft_play.launch import tensorboard
from sft_play.launch.accelerate import MIXED_PRECISION
from sft_play.launch.machine import restrict_to_device, select_hardware, use_one_gpu, warn_idle_gpus
from sft_play.launch.rank import LaunchPlan, gather_rank_hardware, receive_launch_plan, refusal_to_json
from sft_play.launch.ranks import launch_ranks
from sft_play.launch.refusals import refusals, require_gpus_and_disk
from sft_play.launch.request import LaunchRequest, override_lines, resolve_launch_request
from sft_play.launch.resume import RestartBudget, pop_crash_record
from sft_play.launch.run_plan import (
    build_stage_requests,
    count_rows_before_planning,
    find_unsloth_layout,
    plan_stages,
)
from sft_play.launch.torchrun import LaunchCommand, RankInfo
from sft_play.launch.train_here import train_in_process
from sft_play.log import one_line, start_log_buffer
from sft_play.planner import plan_details
from sft_play.planner.plan import Plan
from sft_play.process import signals
from sft_play.runs import oom
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import LAUNCHER, lock_run
from sft_play.runs.lookup import find_resumable, is_finished, is_resume, new_run_folder
from sft_play.runs.manifest import changed_settings, check_no_differences, first_start_date
from sft_play.starter import BASE_NAME

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """How a start ended: sft-play's exit code, and what was started. `folder` is None on several nodes, where rank 0
    names it; `launch` is None where no launcher starts the ranks."""

    exit_code: int
    folder: RunFolder | None
    plan: Plan | None = None
    launch: LaunchCommand | None = None


def start_run(request: LaunchRequest) -> LaunchResult:
    """Start a run and wait for its end; ranks that ran out of memory are started again, with smaller micro-batches, and
    with MAX_RESTARTS= a run of which a process died. Raises SftPlayError for what the user can fix, where possible
    before a library is imported."""
    signals.record_start_time(anew=request.rank_info is None)  # train.max_hours is the limit of all starts together
    restarts = RestartBudget(request.options.max_restarts)
    if restarts.limit and request.rank_info is None and not request.launches_ranks:
        options = dataclasses.replace(request.options, processes_per_node=1)
        request = dataclasses.replace(request, options=options, launches_ranks=True, is_supervised=True)
    result = _start_once(request)
    while result.exit_code and result.folder is not None and restarts.should_restart(result.folder, request.loaded):
        result = _start_once(dataclasses.replace(request, should_resume=True, folder=result.folder))
    return result


def _start_once(request: LaunchRequest) -> LaunchResult:
    """Start a run once; what is cheap to refuse comes first. Outside the training's steps a request to stop unwinds the
    stack."""
    with contextlib.ExitStack() as exit_stack:
        if request.rank_info is None:  # a rank that waits for the others is ended by its launcher
            exit_stack.enter_context(signals.StopSignals(signals.raise_interrupt))
        buffer = start_log_buffer() if request.rank_info is None or request.rank_info.is_first else None
        if request.is_reporting_rank:
            _log_base_model(request.loaded)
        request = resolve_launch_request(request)
        exit_stack.enter_context(error_prefix(request.options.nodes.exported_note or None))
        launch_plan = (
            _plan_launch(request, exit_stack)
            if request.rank_info is None
            else _plan_launch_as_rank(request, request.rank_info, exit_stack)
        )
        folder, stage_plans = launch_plan.folder, launch_plan.stage_plans
        if not stage_plans:
            return LaunchResult(0, folder)
        plan = stage_plans[0][0]
        if request.accelerate_config is not None and request.is_reporting_rank:
            for line in override_lines(
                request.accelerate_config, mixed_precision=MIXED_PRECISION.get(plan.precision.compute, "no"),
                grad_accum=plan.batch.grad_accum, max_grad_norm=request.loaded.config.train.max_grad_norm,
            ):  # fmt: skip
                logger.info("%s", line)
        if folder is None or not launch_plan.trains_in_process:
            resumed_run = str(folder.path) if request.should_resume and folder is not None else None
            exit_code, launch = launch_ranks(
                request.loaded, request.options, stage_plans, folder,
                is_resumed=launch_plan.is_resumed, resumed_run=resumed_run,
                sidecar=_tensorboard_sidecar(request, folder), log_buffer=buffer,
            )  # fmt: skip
            return LaunchResult(exit_code, request.folder if request.options.nodes.count > 1 else folder, plan, launch)
        if request.launches_ranks:
            ranks = plan.choice.layout.ranks
            logger.debug("Launch: %d process%s of Unsloth's environment", ranks, "es" if ranks > 1 else "")
        if not request.options.dry_run:
            train_in_process(
                request.loaded, stage_plans, folder, rank_info=request.rank_info, gpus=request.options.gpus,
                sidecar=_tensorboard_sidecar(request, folder), resume=launch_plan.is_resumed, log_buffer=buffer,
                has_folder=launch_plan.has_folder, lock=launch_plan.lock, today=launch_plan.today,
            )  # fmt: skip
        if request.rank_info is not None and request.is_reporting_rank:
            write_final_report(folder)
        return LaunchResult(0, folder, plan)


def _log_base_model(loaded: LoadedConfig) -> None:
    name = loaded.config.model.name
    description = f"{name} ({loaded.path})"
    if name == BASE_NAME:
        description = f"{name}, the starter's two million parameters ({loaded.path}; a run of yours: CONFIG=my.yaml)"
    logger.info("Base model: %s", one_line(description, limit=400))


def _tensorboard_sidecar(request: LaunchRequest, folder: RunFolder | None) -> contextlib.AbstractContextManager[object]:
    if folder is None or not request.options.uses_tensorboard or not request.is_reporting_rank:
        return contextlib.nullcontext()
    return tensorboard.sidecar(folder.tensorboard_path, environment=os.environ, title=folder.path.absolute().name)


# --- the plan, before anything is made --------------------------------------------------------------------------------


def _plan_launch(request: LaunchRequest, exit_stack: contextlib.ExitStack) -> LaunchPlan:
    """Plan a launch, once; what is cheap to refuse comes before the rows are counted, and nothing is made yet but the
    lock of a run that is resumed."""
    loaded, options, starts_run = request.loaded, request.options, not request.options.dry_run
    hardware = _launch_hardware(request)
    if request.launches_ranks:
        warn_idle_gpus(hardware, options, request.accelerate_config.path if request.accelerate_config else None)
    folder, is_resumed = _run_folder(request)
    resumed_folder = folder if is_resumed else None
    if resumed_folder is not None and starts_run:
        oom.pop_oom_note(resumed_folder)  # of a run whose launcher did not start it again
        pop_crash_record(resumed_folder)
    if resumed_folder is not None and is_finished(resumed_folder):
        return LaunchPlan(folder, is_resumed)
    if resumed_folder is not None and resumed_folder.has_trained:
        check_no_differences(resumed_folder, list(changed_settings(resumed_folder, loaded.config).values()))
    # a command that is only shown may be typed on another machine
    machine = hardware if starts_run else dataclasses.replace(hardware, named=True)
    # the folder is rank 0's where there are several nodes, which would wait for a node that ends before they meet
    for error in refusals(loaded, machine, makes_folder=not is_resumed and options.nodes.count == 1):
        raise error

    unsloth_layout = find_unsloth_layout(loaded, options, hardware)
    if unsloth_layout is not None:
        options = dataclasses.replace(options, strategy=unsloth_layout)
    trains_in_process, run_lock = unsloth_layout is not None or not request.launches_ranks, None
    if starts_run and folder is not None and request.rank_info is None:
        exit_stack.enter_context(report_on_exit(folder))
        if is_resumed and options.nodes.count == 1:  # before minutes go into rows and plan
            run_lock = exit_stack.enter_context(lock_run(folder, role=None if trains_in_process else LAUNCHER))

    stage_requests = build_stage_requests(loaded, hardware, options, resume_from=resumed_folder)
    if starts_run:
        count_rows_before_planning(stage_requests, trains_in_process=trains_in_process)
    stage_plans = plan_stages(stage_requests)
    if starts_run:  # the folder is rank 0's where there are several nodes
        require_gpus_and_disk(loaded, hardware, [plan for plan, _ in stage_plans] if folder is not None else [], folder)
    today = first_start_date(folder) if folder is not None else date.today()
    return LaunchPlan(
        folder, is_resumed, stage_plans, trains_in_process, lock=run_lock if trains_in_process else None, today=today
    )


def _launch_hardware(request: LaunchRequest) -> Hardware:
    detected = (
        detect_hardware() if request.launches_ranks else restrict_to_device(request.loaded.config, detect_hardware())
    )
    if request.rank_info is not None and not request.launches_ranks:
        return gather_rank_hardware(detected, request.rank_info)
    for line in plan_details.hardware_lines(detected):
        logger.info("%s", line)
    return select_hardware(request.options, detected) if request.launches_ranks else use_one_gpu(detected)


def _run_folder(request: LaunchRequest) -> tuple[RunFolder | None, bool]:
    output, path = request.loaded.config.output, request.loaded.path
    if request.folder is not None:
        return request.folder, True
    if request.launches_ranks and request.options.nodes.count > 1:
        return None, False
    if request.should_resume:
        return find_resumable(output, config_path=path, name=request.run_name), True
    folder = new_run_folder(output, config_path=path)
    return folder, is_resume(folder, output)


def _plan_launch_as_rank(request: LaunchRequest, rank_info: RankInfo, exit_stack: contextlib.ExitStack) -> LaunchPlan:
    received_plan = receive_launch_plan(request.loaded.config, rank_info)
    if received_plan is not None:
        return received_plan
    from sft_play.training.distributed import broadcast_text

    try:
        launch_plan = _plan_launch(request, exit_stack)
    except SftPlayError as error:
        broadcast_text(refusal_to_json(error))
        raise
    broadcast_text(launch_plan.to_json(has_folder=False))  # the others wait; without a plan there is nothing left to do
    return launch_plan
