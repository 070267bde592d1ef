"""Every start of a run, in its steps: a request becomes a plan, and the plan a result. The run is trained here, over
ranks that are launched, or as one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from datetime import date
from logging.handlers import MemoryHandler
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import OutOfMemory, SftPlayError, error_prefix
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.finished.report.report import report_on_exit, write_final_report
from sft_play.launch import tensorboard
from sft_play.launch.accelerate import MIXED_PRECISION
from sft_play.launch.machine import prepare_libraries, restrict_to_device, use_one_gpu, warn_idle_gpus
from sft_play.launch.rank import LaunchPlan, check_rank_gpu, gather_rank_hardware, receive_launch_plan, refusal_to_json
from sft_play.launch.ranks import launch_ranks
from sft_play.launch.refusals import refusals, require_gpus_and_disk
from sft_play.launch.request import LaunchRequest, override_lines, resolve_launch_request
from sft_play.launch.resume import RestartBudget, pop_crash_record
from sft_play.launch.run_plan import (
    build_plan_request,
    build_stage_requests,
    count_rows_before_planning,
    find_unsloth_layout,
    plan_stages,
)
from sft_play.launch.torchrun import LaunchCommand, RankInfo, rank_timeout_s, visible_gpu_variables
from sft_play.log import one_line, start_log_buffer
from sft_play.planner import plan_details
from sft_play.planner.advice.suggestions import find_suggestions
from sft_play.planner.batching import BatchPlan
from sft_play.planner.plan import (
    Plan,
    Suggestion,
    make_plan,
)
from sft_play.process import signals
from sft_play.process.imports import importing
from sft_play.runs import oom
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import LAUNCHER, WRITER, lock_run
from sft_play.runs.lookup import find_resumable, is_finished, is_resume, new_run_folder
from sft_play.runs.manifest import FREE_TO_CHANGE_OPTIONS, changed_settings, check_no_differences, first_start_date
from sft_play.starter import BASE_NAME
from sft_play.training.measure.recorded import measured_run, record_measurements

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
        folder = launch_plan.folder
        if not launch_plan.stage_plans:
            return LaunchResult(0, folder)
        _log_overrides(request, launch_plan.plan)
        sidecar = _tensorboard_sidecar(request, folder)
        if folder is None or not launch_plan.trains_in_process:
            exit_code, launch = launch_ranks(request, launch_plan, sidecar=sidecar, log_buffer=buffer)
            # on several nodes rank 0 makes the folder of a new run
            known_folder = request.folder if request.options.nodes.count > 1 else folder
            return LaunchResult(exit_code, known_folder, launch_plan.plan, launch)
        if request.launches_ranks:
            ranks = launch_plan.plan.choice.layout.ranks
            logger.debug("Launch: %d process%s of Unsloth's environment", ranks, "es" if ranks > 1 else "")
        if not request.options.dry_run:
            train_in_process(request, launch_plan, sidecar=sidecar, log_buffer=buffer)
        if request.rank_info is not None and request.is_reporting_rank:
            write_final_report(folder)
        return LaunchResult(0, folder, launch_plan.plan)


def _log_base_model(loaded: LoadedConfig) -> None:
    name = loaded.config.model.name
    description = f"{name} ({loaded.path})"
    if name == BASE_NAME:
        description = f"{name}, the starter's two million parameters ({loaded.path}; a run of yours: CONFIG=my.yaml)"
    logger.info("Base model: %s", one_line(description, limit=400))


def _log_overrides(request: LaunchRequest, plan: Plan) -> None:
    """Log where the run YAML or the plan overrides accelerate's choices."""
    if request.accelerate_config is None or not request.is_reporting_rank:
        return
    precision, max_grad_norm = plan.precision.compute, request.loaded.config.train.max_grad_norm
    for line in override_lines(
        request.accelerate_config,
        mixed_precision=MIXED_PRECISION.get(precision, "no"),
        grad_accum=plan.batch.grad_accum,
        max_grad_norm=max_grad_norm,
    ):
        logger.info("%s", line)


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
        accelerate_file = request.accelerate_config.path if request.accelerate_config else None
        warn_idle_gpus(hardware, options.gpus, accelerate_file)
    folder, is_resumed = _run_folder(request)
    resumed_folder = folder if is_resumed else None
    if resumed_folder is not None:
        if starts_run:  # left by a run whose launcher did not start it again
            oom.pop_oom_note(resumed_folder)
            pop_crash_record(resumed_folder)
        if is_finished(resumed_folder):
            return LaunchPlan(folder, is_resumed)
        if resumed_folder.has_trained:
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
    return request.options.select_hardware(detected) if request.launches_ranks else use_one_gpu(detected)


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
    broadcast_text(launch_plan.to_json())  # the others wait; without a plan there is nothing left to do
    return launch_plan


# --- the training in this process -------------------------------------------------------------------------------------


def train_in_process(
    request: LaunchRequest,
    launch_plan: LaunchPlan,
    *,
    sidecar: contextlib.AbstractContextManager[object],
    log_buffer: MemoryHandler | None = None,
) -> None:
    """Import the libraries, train, and record the measured memory and speed for later plans.

    Args:
        sidecar: what runs beside the training.
        log_buffer: what was logged until now, for the run's log.
    """
    loaded, rank_info, plan = request.loaded, request.rank_info, launch_plan.plan
    assert launch_plan.folder is not None, "only a launcher of several nodes leaves it to rank 0"
    if request.options.gpus and rank_info is None:  # they were named for Unsloth's processes
        os.environ.update(visible_gpu_variables(",".join(str(gpu) for gpu in request.options.gpus)))
    prepare_libraries(loaded.config.model.name, plan.hardware)
    if rank_info is not None:
        check_rank_gpu(plan, rank_info)  # asks the driver, so that nothing is loaded for a GPU that is refused
    with importing():
        from sft_play.training.job import build_run_job
        from sft_play.training.run import run_training

    is_single_process = rank_info is None and plan.choice.layout.ranks == 1
    timeout_s = loaded.config.distributed.timeout_s if is_single_process else rank_timeout_s(loaded.config, os.environ)
    lock_role = WRITER if rank_info is not None and rank_info.run_folder is not None else None
    job = build_run_job(
        loaded,
        launch_plan.stage_plans,
        launch_plan.folder,
        resume=launch_plan.is_resumed,
        log_buffer=log_buffer,
        has_folder=launch_plan.folder_exists,
        lock=launch_plan.lock,
        lock_role=lock_role,
        timeout_s=timeout_s,
        today=launch_plan.today,
    )
    with signals.StopSignals(signals.raise_interrupt), sidecar, add_oom_advice(loaded.config, plan):
        summary = run_training(job)
    if rank_info is None or rank_info.is_first:
        # the configs have the starter's name, as plans look it up
        configs, plans = [part.config for part in loaded.runs], [plan for plan, _ in launch_plan.stage_plans]
        record_measurements(list(zip(configs, plans, strict=True)), summary)


@contextlib.contextmanager
def add_oom_advice(config: RunConfig, plan: Plan) -> Iterator[None]:
    """Adds to an error of memory that ran out what is predicted to need less, and whether resume takes it."""
    try:
        yield
    except OutOfMemory as error:
        alternatives = _cheaper_alternatives(config, plan, error.batch) if error.batch is not None else []
        if not alternatives:
            raise
        raise OutOfMemory(f"{error}. Predicted to need less: {'; '.join(alternatives)}") from error.__cause__


def _cheaper_alternatives(config: RunConfig, plan: Plan, batch: BatchPlan) -> list[str]:
    checkpointing = (
        plan.choice.checkpointed_layers if plan.choice.checkpointing == "selective" else plan.choice.checkpointing
    )
    train_settings: dict[str, Any] = {"batch_size": batch.micro_batch, "grad_accum": batch.grad_accum}
    train_settings |= {} if plan.choice.step.offloads else {"gradient_checkpointing": checkpointing}
    config = config.model_copy(update={"train": config.train.model_copy(update=train_settings)})
    with contextlib.suppress(SftPlayError):
        request = build_plan_request(config, plan.hardware, (plan.layout,))
        failed_plan = make_plan(request)
        measured_runs = [*request.measured_runs, measured_run(config, failed_plan, ran_out_of=failed_plan.budget_bytes)]
        alternatives = [
            suggestion
            for suggestion in find_suggestions(dataclasses.replace(request, measured_runs=measured_runs))
            if suggestion.fits
        ]
        alternatives = [
            suggestion
            for suggestion in alternatives
            if suggestion.hardware is None or suggestion.required < failed_plan.memory.required
        ]
        return [
            f"{item.change} ({item.needs}; {'resume takes it' if _can_resume_with(item) else 'a new run'})"
            for item in alternatives
        ]
    return []


def _can_resume_with(suggestion: Suggestion) -> bool:
    return (
        suggestion.setting is not None
        and {word.partition("=")[0] for word in suggestion.setting.split()} <= FREE_TO_CHANGE_OPTIONS
    )
