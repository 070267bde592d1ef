"""Every start of a run, in its steps: a request becomes a plan, and the plan a result. The run is
trained here, over ranks that are launched, or as one of them."""

import contextlib
import dataclasses
import logging
import os
from logging.handlers import MemoryHandler

from sft_play.errors import error_prefix
from sft_play.finished.report import write_final_report
from sft_play.launch import tensorboard
from sft_play.launch.planning import add_oom_advice, plan_launch
from sft_play.launch.ranks import launch_ranks
from sft_play.launch.request import (
    LaunchPlan,
    LaunchRequest,
    RestartBudget,
    override_lines,
    resolve_launch_request,
)
from sft_play.launch.run_hardware import check_rank_gpu, prepare_libraries
from sft_play.launch.torchrun import LaunchCommand, rank_timeout_s, visible_gpu_variables
from sft_play.log import start_log_buffer
from sft_play.planner.plan import Plan
from sft_play.process import signals
from sft_play.process.waiting import importing
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import WRITER
from sft_play.training.job import build_run_job, record_measurements

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """How a start ended: sft-play's exit code, and what was started. `folder` is None on several
    nodes, where rank 0 names it; `launch` is None where no launcher starts the ranks."""

    exit_code: int
    folder: RunFolder | None
    plan: Plan | None = None
    launch: LaunchCommand | None = None


def start_run(request: LaunchRequest) -> LaunchResult:
    """Start a run and wait for its end. Ranks that ran out of memory are started again with smaller
    micro-batches, and with MAX_RESTARTS= a run that lost a process. Raises SftPlayError for what
    the user can fix, where possible before a library is imported."""
    # train.max_hours is the limit of all starts together
    signals.record_start_time(anew=request.rank_info is None)
    restarts = RestartBudget(request.options.max_restarts)
    if restarts.limit and request.rank_info is None and not request.launches_ranks:
        options = dataclasses.replace(request.options, processes_per_node=1)
        request = dataclasses.replace(
            request, options=options, launches_ranks=True, is_supervised=True
        )
    result = _start_once(request)
    while (
        result.exit_code
        and result.folder is not None
        and restarts.should_restart(result.folder, request.loaded)
    ):
        result = _start_once(dataclasses.replace(request, should_resume=True, folder=result.folder))
    return result


def _start_once(request: LaunchRequest) -> LaunchResult:
    """Start a run once; what is cheap to refuse comes first. Outside the training's steps a request
    to stop unwinds the stack."""
    with contextlib.ExitStack() as exit_stack:
        if request.rank_info is None:  # a rank that waits for the others is ended by its launcher
            exit_stack.enter_context(signals.StopSignals(signals.raise_interrupt))
        buffer = (
            start_log_buffer() if request.rank_info is None or request.rank_info.is_first else None
        )
        if request.is_reporting_rank:
            logger.info("Base model: %s", request.base_description)
        request = resolve_launch_request(request)
        exit_stack.enter_context(error_prefix(request.options.nodes.exported_note or None))
        launch_plan = plan_launch(request, exit_stack)
        folder = launch_plan.folder
        if not launch_plan.stage_plans:
            return LaunchResult(0, folder)
        if request.accelerate_config is not None and request.is_reporting_rank:
            max_grad_norm = request.loaded.config.train.max_grad_norm
            for line in override_lines(
                request.accelerate_config, launch_plan.plan, max_grad_norm=max_grad_norm
            ):
                logger.info("%s", line)
        sidecar: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if folder is not None and request.options.uses_tensorboard and request.is_reporting_rank:
            title = folder.path.absolute().name
            sidecar = tensorboard.sidecar(
                folder.tensorboard_path, environment=os.environ, title=title
            )
        if folder is None or not launch_plan.trains_in_process:
            exit_code, launch = launch_ranks(
                request, launch_plan, sidecar=sidecar, log_buffer=buffer
            )
            # on several nodes rank 0 makes the folder of a new run
            known_folder = request.folder if request.options.nodes.count > 1 else folder
            return LaunchResult(exit_code, known_folder, launch_plan.plan, launch)
        if not request.options.dry_run:
            train_in_process(request, launch_plan, sidecar=sidecar, log_buffer=buffer)
        if request.rank_info is not None and request.is_reporting_rank:
            write_final_report(folder)
        return LaunchResult(0, folder, launch_plan.plan)


# --- the training in this process -----------------------------------------------------------------
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
        # asks the driver, so that nothing is loaded for a GPU that is refused
        check_rank_gpu(plan, rank_info)
    with importing():
        from sft_play.training.run import run_training

    timeout_s, lock_role = loaded.config.distributed.timeout_s, None
    if rank_info is not None or plan.choice.layout.ranks > 1:
        timeout_s = rank_timeout_s(loaded.config, os.environ)
    if rank_info is not None and rank_info.run_folder is not None:
        lock_role = WRITER
    job = build_run_job(
        loaded,
        launch_plan.stage_plans,
        launch_plan.folder,
        resume=launch_plan.is_resumed,
        log_buffer=log_buffer,
        folder_exists=launch_plan.folder_exists,
        lock=launch_plan.lock,
        lock_role=lock_role,
        timeout_s=timeout_s,
        today=launch_plan.today,
    )
    with signals.StopSignals(signals.raise_interrupt), sidecar, add_oom_advice(loaded.config, plan):
        summary = run_training(job)
    if rank_info is None or rank_info.is_first:
        # the configs have the starter's name, as plans look it up
        planned = [
            (part.config, plan)
            for part, (plan, _) in zip(loaded.runs, launch_plan.stage_plans, strict=True)
        ]
        record_measurements(planned, summary)
