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
from sft_play.errors import ConfigError, RunFolderError, SftPlayError, error_prefix
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.finished.report.report import report_on_exit, write_final_report
from sft_play.launch import tensorboard
from sft_play.launch.accelerate import MIXED_PRECISION, AccelerateConfig
from sft_play.launch.command import LaunchCommand
from sft_play.launch.exported import RENDEZVOUS_VARIABLES, RankInfo, refuse_lone_node
from sft_play.launch.launch_options import (
    LaunchOptions,
    apply_accelerate_config,
    apply_mesh,
    fill_from_accelerate,
    override_lines,
    pop_accelerate_launch_config,
)
from sft_play.launch.machine import hide_gpus, restrict_to_device, select_hardware, use_one_gpu, warn_idle_gpus
from sft_play.log import one_line, start_log_buffer, start_log_file
from sft_play.planner import plan_details
from sft_play.planner.layout import DEEPSPEED_LAYOUTS
from sft_play.planner.mesh import parse_mesh
from sft_play.planner.plan import Plan
from sft_play.process import signals
from sft_play.runs import oom
from sft_play.runs.folder import CRASH_ENTRY, RESTARTS_ENTRY, CodeTrust, RunFolder
from sft_play.runs.locking import LAUNCHER, lock_run
from sft_play.runs.lookup import find_resumable, is_finished, is_resume, new_run_folder
from sft_play.runs.manifest import changed_settings, check_no_differences, first_start_date, load_resumed_config
from sft_play.starter import BASE_NAME
from sft_play.starting.launch_ranks import (
    LaunchPlan,
    gather_rank_hardware,
    launch_ranks,
    receive_launch_plan,
    refusal_to_json,
    resolve_exported_nodes,
    setup_rank_environment,
)
from sft_play.starting.plan_run import find_unsloth_layout, read_previous_run
from sft_play.starting.plan_stages import count_rows_before_planning, plan_stages
from sft_play.starting.refusals import refusals, require_gpus_and_disk
from sft_play.starting.train_here import train_in_process

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """What is to be launched: a run, its options, and which processes train it."""

    loaded: LoadedConfig
    options: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    launches_ranks: bool = False
    """Whether ranks are launched; else this process trains, alone or as one of `rank_info`."""
    is_supervised: bool = False
    """Whether the run's only process is launched, as a rank is, so that it can be started again when it dies."""
    rank_info: RankInfo | None = None
    should_resume: bool = False
    """Whether a stopped run is resumed: the one in `folder`, or the one that rank 0 finds by its name `run_name`."""
    folder: RunFolder | None = None
    run_name: str | None = None
    accelerate_config: AccelerateConfig | None = None
    """The choices of `accelerate launch`, or of accelerate's file, over some of which the plan wins."""

    @property
    def is_reporting_rank(self) -> bool:
        """True for the one process that prints: not a rank, or rank 0 under a foreign launcher."""
        return self.rank_info is None or (self.rank_info.is_first and self.rank_info.run_folder is None)


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
        request = _resolve_launch_request(request)
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


def resume_request(
    loaded: LoadedConfig, options: LaunchOptions, *, run_name: str | None, is_trusted: CodeTrust
) -> LaunchRequest:
    """Build the request that resumes a stopped run, the one named `run_name` or the newest, over as many ranks as
    before unless another number is given. Raises RunFolderError where there is none, or its settings allow code that
    `is_trusted` does not."""
    folder = find_resumable(loaded.config.output, config_path=loaded.path, name=run_name)
    loaded, previous = load_resumed_config(loaded, folder, is_trusted=is_trusted), read_previous_run(folder)
    if not (options.processes_per_node or options.gpus or options.nodes.count > 1):
        gpu_count, rank_count = (
            len(restrict_to_device(loaded.config, detect_hardware()).gpus),
            previous.processes if previous else 1,
        )
        options = dataclasses.replace(
            options, processes_per_node=min(rank_count, gpu_count) if gpu_count else rank_count
        )
    # a single rank's too
    has_engine = options.deepspeed or (previous is not None and previous.layout in DEEPSPEED_LAYOUTS)
    is_one_rank = options.processes_per_node == 1 and options.nodes.count == 1 and not has_engine
    launches_ranks = not (is_one_rank and options.strategy in (None, "single"))
    return LaunchRequest(loaded, options, launches_ranks=launches_ranks, should_resume=True, folder=folder)


# --- what was asked ---------------------------------------------------------------------------------------------------


def _log_base_model(loaded: LoadedConfig) -> None:
    name = loaded.config.model.name
    description = f"{name} ({loaded.path})"
    if name == BASE_NAME:
        description = f"{name}, the starter's two million parameters ({loaded.path}; a run of yours: CONFIG=my.yaml)"
    logger.info("Base model: %s", one_line(description, limit=400))


def _resolve_launch_request(request: LaunchRequest) -> LaunchRequest:
    """Fill what the command line leaves open from the launcher, accelerate's file and the mesh, and set this process's
    environment for its rank."""
    loaded, options, rank_info = request.loaded, request.options, request.rank_info
    hide_gpus(loaded.config, os.environ)  # before torch is imported, which reads the variable once
    if request.launches_ranks and not request.is_supervised:
        # what the command line leaves open, accelerate's file fills in, then the mesh
        options, accelerate_config = apply_accelerate_config(options, loaded.config)
        if options.nodes.exported_note:
            options = resolve_exported_nodes(options, loaded.config)
        options = apply_mesh(options, loaded.config)
        refuse_lone_node(options.nodes)
    else:
        rank_info = setup_rank_environment(loaded.config, rank_info) if rank_info is not None else None
        # now: the plan decides, and accelerate would act on the same variables later
        accelerate_config = pop_accelerate_launch_config()
        if rank_info is None:
            options = dataclasses.replace(options, strategy="single")
            # torch and accelerate would wait for others, as a notebook or a guide asked
            for name in RENDEZVOUS_VARIABLES:
                os.environ.pop(name, None)
        # under a parent of ours: left from another launch
        elif accelerate_config is not None and rank_info.run_folder is None:
            options = fill_from_accelerate(options, accelerate_config, parse_mesh(loaded.config.model.mesh_shape))
    refuse_restarts(loaded, options, rank_info)
    loaded = tensorboard.add_tensorboard_tracker(loaded) if options.uses_tensorboard else loaded
    return dataclasses.replace(
        request, loaded=loaded, options=options, rank_info=rank_info, accelerate_config=accelerate_config
    )


def _tensorboard_sidecar(request: LaunchRequest, folder: RunFolder | None) -> contextlib.AbstractContextManager[object]:
    if folder is None or not request.options.uses_tensorboard or not request.is_reporting_rank:
        return contextlib.nullcontext()
    return tensorboard.sidecar(folder.tensorboard_path, environment=os.environ, title=folder.path.absolute().name)


# --- what is decided before anything is made --------------------------------------------------------------------------


def _plan_launch(request: LaunchRequest, exit_stack: contextlib.ExitStack) -> LaunchPlan:
    loaded, options, starts_run = request.loaded, request.options, not request.options.dry_run
    hardware = _launch_hardware(request)
    if request.launches_ranks:
        warn_idle_gpus(hardware, options, request.accelerate_config.path if request.accelerate_config else None)
    folder, is_resumed = _run_folder(request)
    if folder is not None and is_resumed and starts_run:
        oom.pop_oom_note(folder)  # of a run whose launcher did not start it again
        pop_crash_record(folder)
    if folder is not None and is_resumed and is_finished(folder):
        return LaunchPlan(folder, is_resumed)
    if folder is not None and is_resumed and folder.has_trained:
        check_no_differences(folder, list(changed_settings(folder, loaded.config).values()))
    # a command that is only shown may be typed on another machine
    machine = hardware if starts_run else dataclasses.replace(hardware, named=True)
    # the folder is rank 0's where there are several nodes, which would wait for a node that ends before they meet
    for error in refusals(loaded, machine, makes_folder=not is_resumed and options.nodes.count == 1):
        raise error
    unsloth_layout = find_unsloth_layout(loaded, options, hardware)
    trains_in_process, run_lock = unsloth_layout is not None or not request.launches_ranks, None
    if starts_run and folder is not None and request.rank_info is None:
        exit_stack.enter_context(report_on_exit(folder))
        if is_resumed and options.nodes.count == 1:  # before minutes go into rows and plan
            run_lock = exit_stack.enter_context(lock_run(folder, role=None if trains_in_process else LAUNCHER))
    options = dataclasses.replace(options, strategy=unsloth_layout) if unsloth_layout is not None else options
    if starts_run:
        count_rows_before_planning(
            loaded, hardware, options, is_resumed=is_resumed, trains_in_process=trains_in_process
        )
    stage_plans = plan_stages(loaded, hardware, options, resume_from=folder if is_resumed else None)
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
    from sft_play.training.ranks.distributed import broadcast_text

    try:
        launch_plan = _plan_launch(request, exit_stack)
    except SftPlayError as error:
        broadcast_text(refusal_to_json(error))
        raise
    broadcast_text(launch_plan.to_json(has_folder=False))  # the others wait; without a plan there is nothing left to do
    return launch_plan


# --- started again ----------------------------------------------------------------------------------------------------


@dataclass
class RestartBudget:
    """The restarts of one command: at most `limit` after a process died."""

    limit: int
    used: int = 0

    def should_restart(self, folder: RunFolder, loaded: LoadedConfig) -> bool:
        """Whether a run that has failed is to be started again; why is logged, and recorded in its manifest."""
        if event := oom.pop_oom_note(folder):
            logger.warning("Starting again with micro-batch %d", event.now)
            return True
        crash = pop_crash_record(folder) if self.limit else None
        if crash is None:
            return False
        with _log_to_run(folder):
            if self.used == self.limit:
                logger.error("MAX_RESTARTS=%d is used up: the run ends", self.limit)
                return False
            self.used += 1
            step, resume_text = _resume_point(folder, loaded)
            logger.warning("Restart %d of %d: %s; the run goes on from %s", self.used, self.limit, crash, resume_text)
        entry = {"after": crash, "from_step": step, "number": self.used, "of": self.limit}
        folder.update_manifest(**{RESTARTS_ENTRY: [*folder.read_manifest().get(RESTARTS_ENTRY, []), entry]})
        return True


def pop_crash_record(folder: RunFolder) -> str | None:
    """Read how a process of the run died, and remove it from the manifest; None if none died."""
    with contextlib.suppress(RunFolderError):  # an unused folder was removed again
        crash = folder.read_manifest().get(CRASH_ENTRY)
        if isinstance(crash, str):
            folder.update_manifest(**{CRASH_ENTRY: None})
            return crash
    return None


def _resume_point(folder: RunFolder, loaded: LoadedConfig) -> tuple[int, str]:
    from sft_play.training.checkpoints.checkpoints import checkpoint_step, last_complete_checkpoint

    begun_stages = [
        stage_folder
        for stage_config in loaded.config.curriculum
        if (stage_folder := folder.stage_folder(stage_config.name)).has_begun
    ]
    last_folder = begun_stages[-1] if begun_stages else folder
    checkpoint, stage_suffix = (
        last_complete_checkpoint(last_folder.checkpoints_path),
        f" of stage {last_folder.stage_name}" if last_folder.stage_name else "",
    )
    if checkpoint is None:
        return 0, f"the beginning{stage_suffix}: there is no checkpoint"
    return checkpoint_step(checkpoint), f"the checkpoint of step {checkpoint_step(checkpoint)}{stage_suffix}"


@contextlib.contextmanager
def _log_to_run(folder: RunFolder) -> Iterator[None]:
    handler = start_log_file(folder.log_path)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def refuse_restarts(loaded: LoadedConfig, options: LaunchOptions, rank_info: RankInfo | None) -> None:
    """Raises ConfigError where MAX_RESTARTS= is given and this command could not start the run again."""
    if not options.max_restarts:
        return
    request_text = f"MAX_RESTARTS={options.max_restarts}"
    if rank_info is not None or options.nodes.count > 1:
        raise ConfigError(
            f"{request_text} starts processes again that this command has started on one machine: let the launcher or "
            "the scheduler start the others again, with output.if_exists=resume (make launch-file writes such a job)"
        )
    if loaded.config.tuning.backend == "unsloth":
        raise ConfigError(f"{request_text} does not watch the processes of tuning.backend=unsloth; leave it out")
