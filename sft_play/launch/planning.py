"""The plan of a launch: refused early, asked for once, completed with what this machine knows, and
made.

`plan_launch` is the way in. A run, or each of its stages, has a `StageRequest`; their plans make
the `LaunchPlan` that ranks receive. Before it stand the plan of one config, its backend, and the
advice where memory ran out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.build.survey import estimate_size
from sft_play.data.sources.examples import check_first_rows
from sft_play.data.sources.files import find_data_paths, has_held_out_file
from sft_play.errors import (
    ConfigError,
    DataError,
    HardwareError,
    OutOfMemory,
    RunFolderError,
    SftPlayError,
    stage_context,
)
from sft_play.finished.report import report_on_exit
from sft_play.launch.deepspeed import (
    SHORT_DTYPES,
    DeepspeedConfig,
    PlanValues,
    apply_deepspeed_batch,
    cpu_adam_obstacles,
    deepspeed_layout,
    deepspeed_options,
    fill_auto_values,
    keeps_params_on_gpu,
    read_deepspeed_file,
    shipped_deepspeed_config,
    translate_deepspeed_keys,
)
from sft_play.launch.request import (
    LAUNCH_FILE,
    DeepspeedRequest,
    LaunchOptions,
    LaunchPlan,
    LaunchRequest,
    pop_crash_record,
    read_previous_run,
    refusal_to_json,
    resume_constraints,
)
from sft_play.launch.row_survey import (
    cached_row_tokens,
    count_row_tokens,
    has_counted_rows,
    has_variable_lengths,
)
from sft_play.launch.run_hardware import (
    gather_rank_hardware,
    prepare_libraries,
    rank_gpu_id,
    restrict_to_device,
    use_one_gpu,
    warn_idle_gpus,
)
from sft_play.launch.torchrun import rank_variables
from sft_play.log import one_line
from sft_play.machine.compiler import inductor_obstacle, require_compiler, require_inductor
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.host_speed import load_host_speeds
from sft_play.machine.software import (
    LIGER_PACKAGE,
    cuda_libraries,
    missing_kernel_packages,
    torch_build_version,
)
from sft_play.machine.visible_gpus import (
    CPU_HINT,
    explain_unusable_torch,
    find_unusable_accelerator,
)
from sft_play.models.config_json import load_config_json
from sft_play.planner import calibration, explain
from sft_play.planner.advice import find_suggestions, make_advised_plan
from sft_play.planner.backend import Backend, check_trackers, choose_backend
from sft_play.planner.batching import BatchPlan, RowTokens
from sft_play.planner.candidates import Candidate
from sft_play.planner.decide import PlanRequest, check_plan_request, make_plan
from sft_play.planner.kernels import require_attention_package
from sft_play.planner.layout import (
    DEEPSPEED_LAYOUTS,
    LAYOUT_NAMES,
    ONE_PROCESS_LAYOUTS,
    LayoutName,
    PreviousRun,
    find_layouts,
    format_mesh,
    layout_choices,
)
from sft_play.planner.plan import (
    MORE_SPACE_REMEDY,
    Plan,
    PlanWithDeepSpeed,
    RunLength,
    TracePrediction,
    planned_disk_usage,
    require_fit,
)
from sft_play.process.waiting import importing
from sft_play.runs.folder import (
    FREE_TO_CHANGE_OPTIONS,
    RunFolder,
    changed_settings,
    check_no_differences,
    first_start_date,
    format_free_space,
    free_disk_bytes,
    pop_oom_note,
    requested_deepspeed,
)
from sft_play.runs.lookup import (
    LAUNCHER,
    check_run_name,
    find_resumable,
    is_finished,
    is_resume,
    lock_run,
    new_run_folder,
    output_dir,
    require_writable_output_dir,
)
from sft_play.text import format_size
from sft_play.trace.confirm import BlockPassMeter, load_run_model_shape, trace_candidate
from sft_play.training.job import measured_run

# --- what a run is refused for before a library is loaded, in one list ----------------------------
# Parameters above which a model is trained on a CPU only if that is asked for: a step takes
# minutes.
MAX_CPU_PARAMS = 1_000_000_000


def refusals(
    loaded: LoadedConfig,
    hardware: Hardware,
    *,
    makes_folder: bool = True,
    needs_rows: bool = True,
    plans: Sequence[Plan] | None = None,
) -> Iterator[SftPlayError]:
    """Yield every error for which a run would be refused on a machine, in the order in which a
    start would meet them. The disk and the packages of a machine that is only named are not known.

    Args:
        makes_folder: False where the run's folder exists, or another node makes it.
        needs_rows: False for a plan, after which the data may come; a file that is there has to be
            readable.
        plans: the plan of the run, or of each stage, as far as there are any; None before there
            are.
    """
    checks: list[Callable[[], object]] = [
        functools.partial(require_capable_machine, stage_run.config, hardware)
        for stage_run in loaded.runs
    ]
    if makes_folder:
        checks.append(functools.partial(_require_writable_folder, loaded, hardware))
    checks += [
        functools.partial(_require_readable_rows, stage_run, needs_rows=needs_rows)
        for stage_run in loaded.runs
    ]
    if plans is not None:
        resumed_folder, output = None, loaded.config.output
        with contextlib.suppress(SftPlayError):  # a check above says it
            folder = new_run_folder(output, config_path=loaded.path)
            if is_resume(folder, output):
                resumed_folder = folder
        checks.append(
            functools.partial(require_gpus_and_disk, loaded, hardware, plans, resumed_folder)
        )
    for check in checks:
        try:
            check()
        except SftPlayError as error:
            yield error


def require_capable_machine(config: RunConfig, hardware: Hardware) -> None:
    """Raise an error where this machine cannot train a run: HardwareError, or for a package that is
    not installed."""
    if hardware.named:
        return
    require_usable_hardware(
        config, hardware, os.environ, count_params=lambda: load_run_model_shape(config).params
    )
    if config.tuning.backend == "bnb":  # Unsloth's processes have packages of their own
        check_trackers(config)
        require_attention_package(config.model.attn_implementation)


def require_usable_hardware(
    config: RunConfig,
    hardware: Hardware,
    environment: Mapping[str, str],
    *,
    count_params: Callable[[], int],
) -> None:
    """Check, before anything loads, that a run here is what its user expects and can take a step;
    `count_params`: the model's parameters, asked for on a CPU only. Raises HardwareError where an
    accelerator would not be used, the model is too large for a CPU, Triton or inductor cannot build
    what is needed, or flash-attn 2 has no kernels.
    """
    if config.train.compile is True:
        require_inductor(hardware, environment)
    if config.model.attn_implementation == "flash_attention_2":
        if not hardware.gpus:
            raise HardwareError(
                "model.attn_implementation: flash_attention_2 has kernels for GPUs, and this run"
                " uses the CPU; use auto"
            )
        for gpu in hardware.gpus:
            if gpu.capability and gpu.capability < (8, 0):
                raise HardwareError(
                    "model.attn_implementation: flash_attention_2 needs GPUs from Ampere on (8.0),"
                    f" and {gpu.name} has {'.'.join(map(str, gpu.capability))}; use auto"
                )
    if hardware.gpus:
        return require_compiler(hardware, environment)
    if config.train.device == "cpu":
        return None
    if accelerator := find_unusable_accelerator(environment):
        raise HardwareError(accelerator)
    param_count = count_params()  # asked last: for a model of the hub it fetches the config
    if param_count > MAX_CPU_PARAMS:
        raise HardwareError(
            f"no GPU was detected here, and {one_line(config.model.name)} has"
            f" {param_count / 1e9:.1f} billion parameters: make gpu-info shows what this machine"
            f" has; or {CPU_HINT}"
        )
    return None


def _require_writable_folder(loaded: LoadedConfig, hardware: Hardware) -> None:
    output = loaded.config.output
    if output.name is not None:
        check_run_name(output.name, key="output.name")
    if not hardware.named:
        require_writable_output_dir(new_run_folder(output, config_path=loaded.path))


def _require_readable_rows(stage_run: LoadedConfig, *, needs_rows: bool) -> None:
    with stage_context(stage_run.stage_name):
        try:
            paths = find_data_paths(stage_run.config.data)
        except DataError:
            if needs_rows:
                raise
            return
        check_first_rows(stage_run.config.data, paths, task_mode=stage_run.config.task_mode)


def require_gpus_and_disk(
    loaded: LoadedConfig, hardware: Hardware, plans: Sequence[Plan], folder: RunFolder | None = None
) -> None:
    """Raise an error where a run cannot begin as it is planned: HardwareError, where torch cannot
    use the GPUs; RunFolderError, where the disk certainly cannot hold the checkpoints that exist at
    once, beside those that the `folder` of a resumed run has."""
    if hardware.named:
        return
    # each rank would find it, after its imports
    if hardware.gpus and torch_build_version("cuda") is None:
        raise HardwareError(
            explain_unusable_torch(hardware.gpus[0].name, "it is built without CUDA")
        )
    folder = folder or RunFolder(output_dir(loaded.config.output))
    for stage_run, plan in zip(loaded.runs, plans, strict=False):
        stage_folder = folder
        if stage_run.stage_name is not None:
            stage_folder = folder.stage_folder(stage_run.stage_name)
        shape = load_run_model_shape(stage_run.config, plan.row_tokens)
        disk = planned_disk_usage(stage_run.config, shape, plan)
        free_disk = free_disk_bytes(folder.path)
        needed_bytes = disk.min_bytes(
            existing_checkpoints=len(list(stage_folder.checkpoints_path.glob("checkpoint-*")))
        )
        if free_disk is not None and free_disk < needed_bytes:
            raise RunFolderError(
                f"{folder.path}: there is no room for what the run writes"
                f" ({disk.max_checkpoints or 'all its'} checkpoints at once, and the final"
                f" weights): at least {needed_bytes:,} bytes ({format_size(needed_bytes)}) are"
                f" needed, and {format_free_space(folder.path)}; {MORE_SPACE_REMEDY}"
            )


logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------------
# The plan of a run with what this machine knows: its shapes, the size of its data, earlier runs, a
# trace.


def plan_run(
    config: RunConfig,
    hardware: Hardware,
    *,
    layouts: tuple[LayoutName, ...] = LAYOUT_NAMES,
    trace: bool = False,
    include_suggestions: bool = True,
    keeps_params: bool = False,
    rows: RowTokens | None = None,
) -> Plan:
    """Plan a run with everything that is known here: earlier runs, the size of the data, with
    `trace` a trace.

    Args:
        include_suggestions: whether a plan that does not fit says what would make it fit.
        keeps_params: whether `zero3_offload` leaves the weights on the GPUs, as a DeepSpeed file
            may say.
        rows: the lengths of the rows, where the caller has counted them.
    """
    return plan_request(
        build_plan_request(config, hardware, layouts, rows=rows, keeps_params=keeps_params),
        trace=trace,
        include_suggestions=include_suggestions,
    )


def build_plan_request(
    config: RunConfig,
    hardware: Hardware,
    layouts: tuple[LayoutName, ...] = LAYOUT_NAMES,
    *,
    rows: RowTokens | None = None,
    is_stage: bool = False,
    keeps_params: bool = False,
) -> PlanRequest:
    """Build the planner's request for a run, or a stage of one: the shapes of its model, earlier
    runs here, and the lengths of its rows where they are known. Raises as `training_backend` and
    `load_run_model_shape` do.
    """
    hardware = restrict_to_device(config, hardware)
    backend = training_backend(config, hardware, layouts, has_stages=is_stage)
    if backend is not None and backend.fallback_from is not None:
        tuning = config.tuning.model_copy(
            update={"backend": backend.name, "backend_fallback": None}
        )
        config = config.model_copy(update={"tuning": tuning})
    host_speed = None
    if hardware.gpus and not hardware.named:
        host_speed = load_host_speeds().get(hardware.gpus[0].name)
    rows = rows or cached_row_tokens(config)
    return PlanRequest(
        config,
        load_run_model_shape(config, rows),
        hardware,
        layouts,
        has_eval(config),
        # runs here say nothing about a machine that is named
        measured_runs=[] if hardware.named else calibration.load_measured_runs(),
        row_tokens=rows,
        missing_packages=_missing_packages(hardware),
        libraries=cuda_libraries(),
        host_speed=host_speed,
        keeps_params=keeps_params,
        inductor_obstacle=_inductor_obstacle(config, hardware),
    )


def _missing_packages(hardware: Hardware) -> frozenset[str]:
    # the environment of a named CUDA machine has Liger's kernels (`make setup`), whatever this one
    # has
    is_named_cuda = hardware.named and not any(gpu.is_amd for gpu in hardware.gpus)
    return missing_kernel_packages() - ({LIGER_PACKAGE} if is_named_cuda else set())


def _inductor_obstacle(config: RunConfig, hardware: Hardware) -> str | None:
    if hardware.named or not hardware.gpus or config.train.compile != "auto":
        return None
    obstacle = inductor_obstacle(hardware, os.environ)
    return None if obstacle is None else f"inductor cannot compile here: {obstacle[0]}"


def plan_request(
    request: PlanRequest, *, trace: bool = False, include_suggestions: bool = True
) -> Plan:
    """Plan what a request asks for, with the length of the run and, where asked for, a trace."""
    config, planner = request.config, make_plan
    if include_suggestions and request.resumed_batch is None:  # a resumed run's batch is fixed
        planner = make_advised_plan
    if trace and config.plan.trace and request.shape.pass_meter is None:
        # a trace imports the libraries that count a block anyway
        model = load_config_json(config.model.name, revision=config.model.revision)
        shape = dataclasses.replace(
            request.shape, pass_meter=BlockPassMeter(json.dumps(dict(model)))
        )
        request = dataclasses.replace(request, shape=shape)

    def trace_step(candidate: Candidate) -> TracePrediction:
        model = load_config_json(config.model.name, revision=config.model.revision)
        return trace_candidate(config, model, request.shape, candidate.precision, candidate)

    return planner(
        request,
        trace_candidate=trace_step if trace else None,
        estimate_run_length=functools.partial(_estimate_run_length, config, request.row_tokens),
    )


def has_eval(config: RunConfig) -> bool:
    """Whether evaluation batches run beside the training."""
    return config.data.val_fraction > 0 or has_held_out_file(config.data)


def _estimate_run_length(
    config: RunConfig, row_tokens: RowTokens | None, effective_batch: int
) -> RunLength | None:
    """Steps and tokens of a run, by its rows where they were counted, else by the size of its
    files."""
    steps, max_seq_len = config.train.max_steps, config.model.max_seq_len
    if row_tokens is not None:
        rows, epoch_tokens = row_tokens.rows, row_tokens.rows * row_tokens.mean
    else:
        size = estimate_size(config.data, wants_text=config.task_mode == "cpt")
        if size is None:
            return RunLength(steps, None) if steps else None
        rows = size.rows
        # blocks and packs: every row is full
        if config.task_mode == "cpt" or config.data.packing != "none":
            rows = max(1, size.tokens // max_seq_len)
        # what longer rows have beyond that is cut
        epoch_tokens = min(size.tokens, rows * max_seq_len)
    steps_per_epoch = math.ceil(rows / effective_batch)
    steps = steps or max(1, math.ceil(steps_per_epoch * config.train.epochs))
    tokens = epoch_tokens * steps / steps_per_epoch
    return RunLength(steps, int(tokens) if row_tokens is None else round(tokens))


def log_plan(plan: Plan, config: RunConfig, *, stage_name: str | None = None) -> None:
    """Log the batch and whether it fits and how long it takes; beside them the choice with its
    reasons. Of a stage its batch is said when it begins."""
    visible_lines, stage_prefix = explain.batch_size_lines(plan, config), ""
    if stage_name is not None:
        logger.debug("Stage %s:", stage_name)
        visible_lines, stage_prefix = [], f"Stage {stage_name}: "
    details = [
        explain.choice_line(plan),
        *explain.parameter_lines(plan, config),
        *explain.batch_lines(plan, config),
    ]
    for line in details:
        logger.log(logging.INFO if line in visible_lines else logging.DEBUG, "%s", line)
    logger.info("%s%s", stage_prefix, explain.fit_line(plan, config))
    for warning in explain.plan_warnings(plan, config):
        logger.warning("%s%s", stage_prefix, warning)
    if not plan.fits:
        logger.warning("the given batch is predicted not to fit; it is tried because it was given")


# --- the backend ----------------------------------------------------------------------------------
def training_backend(
    config: RunConfig,
    hardware: Hardware,
    layouts: tuple[LayoutName, ...] = LAYOUT_NAMES,
    *,
    has_stages: bool = False,
) -> Backend | None:
    """The backend that trains a run here, where it had to be chosen: not for bnb, nor on a machine
    that was only named. `has_stages`: in stages. Raises BackendError where Unsloth was asked for
    and cannot run it, and no fallback was named."""
    if config.tuning.backend == "bnb" or hardware.named:
        return None
    layout = _default_layout(hardware)
    if layouts and layout not in layouts:
        layout = layouts[0]
    return choose_backend(
        config,
        hardware,
        layout=layout,
        is_rank=bool(rank_variables(os.environ)),
        has_stages=has_stages,
        load_shape=functools.partial(load_run_model_shape, config),
    )


def _default_layout(hardware: Hardware) -> LayoutName:
    return "ddp" if hardware.ranks > 1 else "single"


def find_unsloth_layout(
    loaded: LoadedConfig, options: LaunchOptions, hardware: Hardware
) -> LayoutName | None:
    """The layout in which Unsloth's processes train a run; None where they do not. Raises as
    `training_backend`."""
    layout = options.strategy or _default_layout(hardware)
    if options.deepspeed and options.strategy is None:
        layout = "zero2"
    backend = training_backend(loaded.config, hardware, (layout,), has_stages=bool(loaded.stages))
    return layout if backend is not None and backend.name == "unsloth" else None


# --- where memory ran out -------------------------------------------------------------------------
@contextlib.contextmanager
def add_oom_advice(config: RunConfig, plan: Plan) -> Iterator[None]:
    """Adds to an error of memory that ran out what is predicted to need less, and whether resume
    takes it."""
    try:
        yield
    except OutOfMemory as error:
        if error.batch is None or not (
            alternatives := _cheaper_alternatives(config, plan, error.batch)
        ):
            raise
        raise OutOfMemory(
            f"{error}. Predicted to need less: {'; '.join(alternatives)}"
        ) from error.__cause__


def _cheaper_alternatives(config: RunConfig, plan: Plan, batch: BatchPlan) -> list[str]:
    choice = plan.choice
    train_settings: dict[str, Any] = {
        "batch_size": batch.micro_batch,
        "grad_accum": batch.grad_accum,
    }
    if not choice.step.offloads:
        is_selective = choice.checkpointing == "selective"
        train_settings["gradient_checkpointing"] = (
            choice.checkpointed_layers if is_selective else choice.checkpointing
        )
    config = config.model_copy(update={"train": config.train.model_copy(update=train_settings)})
    alternatives = []
    with contextlib.suppress(SftPlayError):
        request = build_plan_request(config, plan.hardware, (plan.layout,))
        failed_plan = make_plan(request)
        measured_runs = [
            *request.measured_runs,
            measured_run(config, failed_plan, ran_out_of=failed_plan.budget_bytes),
        ]
        for item in find_suggestions(dataclasses.replace(request, measured_runs=measured_runs)):
            if item.fits and (item.hardware is None or item.required < failed_plan.memory.required):
                keys = {word.partition("=")[0] for word in (item.setting or "").split()}
                effect = (
                    "resume takes it" if keys and keys <= FREE_TO_CHANGE_OPTIONS else "a new run"
                )
                alternatives.append(f"{item.change} ({item.needs}; {effect})")
    return alternatives


# --------------------------------------------------------------------------------------------------
# A launch: what can be refused early is, then it is planned once, or its plan is received.


def plan_launch(request: LaunchRequest, exit_stack: contextlib.ExitStack) -> LaunchPlan:
    """Plan a launch, or receive the plan, as one of a launcher's ranks. What has to be closed at
    the end, such as the lock of a run that is resumed, goes onto `exit_stack`. Raises SftPlayError
    where the run is refused.
    """
    rank_info = request.rank_info
    if rank_info is None:
        return _make_launch_plan(request, exit_stack)
    # `make train-distributed` on one node: the parent planned, every rank reads
    if rank_info.run_folder is not None:
        return LaunchPlan.from_json(
            (rank_info.run_folder / LAUNCH_FILE).read_text(encoding="utf-8")
        )
    with importing():
        from sft_play.training.distributed import broadcast_text, publish_gpu

    # torch's wait hears no Ctrl-C, and there is nothing to undo
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    local_hardware = restrict_to_device(request.loaded.config, detect_hardware())
    publish_gpu(rank_gpu_id(rank_info, local_hardware), rank_info.rank)
    signal.signal(signal.SIGINT, previous_handler)
    if not rank_info.is_first:
        return LaunchPlan.from_json(broadcast_text(None))
    try:
        launch_plan = _make_launch_plan(request, exit_stack)
    except SftPlayError as error:
        broadcast_text(refusal_to_json(error))
        raise
    # the others wait; without a plan there is nothing left to do
    broadcast_text(launch_plan.to_json())
    return launch_plan


def _make_launch_plan(request: LaunchRequest, exit_stack: contextlib.ExitStack) -> LaunchPlan:
    """Plan a launch, once; what is cheap to refuse comes before the rows are counted, and nothing
    is made yet but the lock of a run that is resumed."""
    loaded, options, starts_run = request.loaded, request.options, not request.options.dry_run
    hardware = _launch_hardware(request)
    folder, is_resumed = _run_folder(request)
    resumed_folder = folder if is_resumed else None
    if resumed_folder is not None:
        if starts_run:  # left by a run whose launcher did not start it again
            pop_oom_note(resumed_folder)
            pop_crash_record(resumed_folder)
        if is_finished(resumed_folder):
            return LaunchPlan(folder, is_resumed)
        if resumed_folder.has_trained:
            check_no_differences(
                resumed_folder, list(changed_settings(resumed_folder, loaded.config).values())
            )
    # a command that is only shown may be typed on another machine
    machine = hardware if starts_run else dataclasses.replace(hardware, named=True)
    # the folder is rank 0's where there are several nodes, which would wait for a node that ends
    # before they meet
    for error in refusals(
        loaded, machine, makes_folder=not is_resumed and options.nodes.count == 1
    ):
        raise error

    unsloth_layout = find_unsloth_layout(loaded, options, hardware)
    if unsloth_layout is not None:
        if options.max_restarts:
            raise ConfigError(
                f"MAX_RESTARTS={options.max_restarts} does not watch Unsloth's processes; leave"
                " it out"
            )
        options = dataclasses.replace(options, strategy=unsloth_layout)
    trains_in_process = unsloth_layout is not None or not request.launches_ranks
    own_lock = None
    if starts_run and folder is not None and request.rank_info is None:
        exit_stack.enter_context(report_on_exit(folder))
        if is_resumed and options.nodes.count == 1:  # before minutes go into rows and plan
            lock = exit_stack.enter_context(
                lock_run(folder, role=None if trains_in_process else LAUNCHER)
            )
            own_lock = lock if trains_in_process else None

    stage_requests = build_stage_requests(loaded, hardware, options, resume_from=resumed_folder)
    if starts_run:
        count_rows_before_planning(stage_requests, trains_in_process=trains_in_process)
    stage_plans = []
    for stage_request in finish_stage_requests(stage_requests):
        with stage_context(stage_request.run.stage_name):
            stage_plans.append(plan_stage(stage_request))
    plans, today = list[Plan](), date.today()
    if folder is not None:  # it is rank 0's, where there are several nodes
        plans, today = [plan for plan, _ in stage_plans], first_start_date(folder)
    if starts_run:
        require_gpus_and_disk(loaded, hardware, plans, folder)
    return LaunchPlan(
        folder, is_resumed, stage_plans, trains_in_process, lock=own_lock, today=today
    )


def _launch_hardware(request: LaunchRequest) -> Hardware:
    hardware, options = detect_hardware(), request.options
    if not request.launches_ranks:
        hardware = restrict_to_device(request.loaded.config, hardware)
        if request.rank_info is not None:
            return gather_rank_hardware(hardware, request.rank_info)
    for line in explain.hardware_lines(hardware):
        logger.info("%s", line)
    if not request.launches_ranks:
        return use_one_gpu(hardware)
    hardware = options.select_hardware(hardware)
    accelerate_file = request.accelerate_config.path if request.accelerate_config else None
    warn_idle_gpus(hardware, options.gpus, accelerate_file)
    return hardware


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


# --- a run, or each of its stages -----------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class StageRequest:
    """A run, or one of its stages, as its plan is asked for: all but the lengths of its rows."""

    # With the batch of DeepSpeed's file where the run YAML leaves it open.
    run: LoadedConfig
    plan_request: PlanRequest
    # In current keys, where DeepSpeed is asked for or was the engine of the run that is resumed.
    deepspeed_config: DeepspeedConfig | None = None
    # What messages call that config.
    deepspeed_name: str = "DeepSpeed"

    def with_changes(self, **changes: Any) -> StageRequest:
        """The same with other fields of the planner's request."""
        return dataclasses.replace(
            self, plan_request=dataclasses.replace(self.plan_request, **changes)
        )


def build_stage_requests(
    loaded: LoadedConfig,
    hardware: Hardware,
    options: LaunchOptions,
    *,
    resume_from: RunFolder | None = None,
) -> list[StageRequest]:
    """Build the requests for the plans of a run: one, or one for each stage. `resume_from`: the run
    that is resumed. Raises as `build_stage_request` does."""
    original_deepspeed = requested_deepspeed(resume_from) if resume_from is not None else None
    if (
        loaded.stages
        and resume_from is not None
        and options.strategy is None
        and options.deepspeed is None
    ):
        # all stages in one layout: the run's, as long as it has as many ranks
        previous = read_previous_run(resume_from)
        options = dataclasses.replace(
            options, strategy=previous.kept_layout(hardware.ranks) if previous else None
        )
    stage_requests = []
    for stage_run in loaded.runs:
        stage_folder = resume_from
        if resume_from is not None and stage_run.stage_name is not None:
            is_last_stage = stage_run.stage_name == loaded.stages[-1].name
            stage_folder = resume_from.stage_folder(
                stage_run.stage_name, is_last_stage=is_last_stage
            )
            is_adapter = stage_run.config.tuning.mode != "full"
            if not stage_folder.has_begun or stage_folder.has_finished(is_adapter=is_adapter):
                stage_folder = None  # it begins, or is not trained again
        with stage_context(stage_run.stage_name):
            stage_requests.append(
                build_stage_request(
                    stage_run,
                    hardware,
                    options,
                    resume_from=stage_folder,
                    original_deepspeed=original_deepspeed,
                )
            )
    return stage_requests


def refuse_impossible_strategy(
    config: RunConfig, hardware: Hardware, strategy: LayoutName | None
) -> None:
    """Raises ConfigError for a named layout that cannot run."""
    if strategy is None:
        return
    shape = load_run_model_shape(config, cached_row_tokens(config))
    possible, refused = find_layouts(config, shape, hardware, named=strategy)
    names = list(dict.fromkeys(layout.name for layout in possible))
    if strategy in names:
        return
    reasons = [
        refused_layout.because for refused_layout in refused if refused_layout.name == strategy
    ]
    if config.model.mesh_shape is not None:
        reasons = [f"model.mesh_shape={format_mesh(config.model.mesh_shape)} is another layout"]
    reason, others = (*reasons, f"{hardware.ranks} rank(s)")[0], ", ".join(names) or "none"
    raise ConfigError(f"STRATEGY={strategy} cannot run this job: {reason}; there are: {others}")


def _requested_layout(
    options: LaunchOptions, previous: PreviousRun | None, ranks: int
) -> LayoutName | None:
    """The layout that is asked for, or that a resumed run keeps; None leaves it to the plan."""
    if previous is None or options.strategy is not None or options.deepspeed is not None:
        return options.strategy
    layout = previous.kept_layout(ranks)
    if options.trains_in_process and layout not in ONE_PROCESS_LAYOUTS:
        return None
    return layout


def build_stage_request(
    loaded: LoadedConfig,
    hardware: Hardware,
    options: LaunchOptions,
    *,
    resume_from: RunFolder | None = None,
    original_deepspeed: DeepspeedConfig | None = None,
) -> StageRequest:
    """Build the request for the plan of a run, or of one stage, over all ranks of `hardware`.

    Args:
        resume_from: the run, or the stage, that is resumed.
        original_deepspeed: DeepSpeed's config as the run that is resumed was first given it.

    Raises ConfigError where the strategy cannot run the job, or contradicts DeepSpeed's config;
    RunFolderError where the run cannot be resumed in this layout or over these ranks.
    """
    previous = read_previous_run(resume_from) if resume_from else None
    config, strategy = loaded.config, _requested_layout(options, previous, hardware.ranks)
    deepspeed_config, deepspeed_name = None, "DeepSpeed"
    if options.deepspeed is not None:
        deepspeed_config, strategy, deepspeed_name = read_deepspeed_config(
            options.deepspeed, strategy
        )
    elif original_deepspeed is not None and strategy is not None and strategy in DEEPSPEED_LAYOUTS:
        same_layout = deepspeed_layout(original_deepspeed, default_layout=strategy) == strategy
        deepspeed_config = original_deepspeed if same_layout else None
    if resume_from is not None and previous is not None and strategy:
        from sft_play.training.checkpoints.checkpoints import last_complete_checkpoint

        obstacle = previous.resume_obstacle(strategy)
        # without a checkpoint it starts again from the first step
        if (
            obstacle is not None
            and last_complete_checkpoint(resume_from.checkpoints_path) is not None
        ):
            raise RunFolderError(
                f"{resume_from.path} cannot be resumed: {obstacle}; resume with"
                f" STRATEGY={previous.layout}, or write out what it has learned so far: make"
                f" consolidate RUN={resume_from.shell_path}"
            )
    if deepspeed_config is not None:
        config = apply_deepspeed_batch(
            config, deepspeed_config, ranks=hardware.ranks, name=deepspeed_name
        )
    # after DeepSpeed's file, which may fix the batch
    resumed_batch, resumed_updates = resume_constraints(config, previous, hardware.ranks)
    if previous is not None and resumed_batch not in (None, previous.batch):
        logger.info(
            "Batch: micro %d x accum %d x %d ranks (stopped with %d): the effective batch of %d is"
            " kept",
            *dataclasses.astuple(resumed_batch),
            previous.batch.ranks,
            resumed_batch.effective_batch,
        )
    refuse_impossible_strategy(config, hardware, strategy)
    layouts = layout_choices(hardware.ranks)
    if strategy:
        layouts = (strategy,)
    elif options.trains_in_process:
        layouts = ONE_PROCESS_LAYOUTS
    if previous is not None and strategy is None:
        layouts = tuple(name for name in layouts if previous.resume_obstacle(name) is None)
    keeps_params = bool(
        deepspeed_config and strategy and keeps_params_on_gpu(deepspeed_config, strategy)
    )
    plan_request = build_plan_request(
        config, hardware, layouts, is_stage=loaded.stage_name is not None, keeps_params=keeps_params
    )
    plan_request = dataclasses.replace(
        plan_request,
        resumed_batch=resumed_batch,
        resumed_updates=resumed_updates,
        resumed_compiled=previous.compiled if previous and previous.has_trained else None,
    )
    return StageRequest(
        dataclasses.replace(loaded, config=config), plan_request, deepspeed_config, deepspeed_name
    )


def count_rows_before_planning(
    stage_requests: Sequence[StageRequest], *, trains_in_process: bool
) -> None:
    """Count the tokens of a run's rows, so that its plan knows their lengths; what no length
    changes is refused before. `trains_in_process`: this process needs all libraries anyway. Raises
    SftPlayError as planning or reading the rows does."""
    runs = [request.run for request in stage_requests]
    if not any(
        has_variable_lengths(run.config) and not has_counted_rows(run.config) for run in runs
    ):
        return
    for request in stage_requests:
        with stage_context(request.run.stage_name):
            check_plan_request(request.plan_request)
    prepare_libraries(runs[0].config.model.name, stage_requests[0].plan_request.hardware)
    if trains_in_process:
        with importing():
            importlib.import_module("sft_play.training.run")
    count_row_tokens(runs)


def finish_stage_requests(stage_requests: Sequence[StageRequest]) -> list[StageRequest]:
    """Add what is known once the rows are counted: their lengths, what looks at their images, and
    the one layout of all stages."""
    first, *others = [request.plan_request.allowed_layouts for request in stage_requests]
    # a stage that is resumed cannot take every layout
    layouts = tuple(name for name in first if all(name in allowed for allowed in others))
    finished_requests = []
    for request in stage_requests:
        rows, shape = cached_row_tokens(request.run.config), request.plan_request.shape
        if rows is not None and rows.images is not None:
            shape = load_run_model_shape(request.run.config, rows)
            if len(layouts) == 1:  # it may be one that runs no rows with images
                hardware = request.plan_request.hardware
                refuse_impossible_strategy(request.run.config, hardware, layouts[0])
        finished_requests.append(
            request.with_changes(row_tokens=rows, shape=shape, allowed_layouts=layouts)
        )
    if not others or len(layouts) == 1:
        return finished_requests
    layout = common_layout([request.plan_request for request in finished_requests])
    return [request.with_changes(allowed_layouts=(layout,)) for request in finished_requests]


def common_layout(plan_requests: Sequence[PlanRequest]) -> LayoutName:
    """Choose one layout for all stages, among the ones that they would use by themselves: the
    fastest that fits every stage. Where none does, take the layout of the stage with the longest
    rows, whose plan says what does not fit."""
    separate_plans = [plan_request(request, include_suggestions=False) for request in plan_requests]
    # the longest rows first: their stage's layout is the answer where none fits them all
    names = dict.fromkeys(
        plan.layout for plan in sorted(separate_plans, key=lambda plan: -plan.max_seq_len)
    )
    if len(names) == 1:
        return next(iter(names))
    step_seconds: dict[LayoutName, float] = {}
    for name in names:
        with contextlib.suppress(SftPlayError):
            joint_plans = [
                plan_request(
                    dataclasses.replace(request, allowed_layouts=(name,)), include_suggestions=False
                )
                for request in plan_requests
            ]
            if all(plan.fits and plan.layout == name for plan in joint_plans):
                # hours: data of known size
                step_seconds[name] = sum(plan.hours or plan.speed.step_s for plan in joint_plans)
    return min(step_seconds or names, key=lambda name: step_seconds.get(name, 0.0))


def plan_stage(request: StageRequest) -> PlanWithDeepSpeed:
    """Plan a run or a stage, logged, with DeepSpeed's config where that is the engine. Raises
    DoesNotFit where nothing fits and the batch was left to the plan; ConfigError where a number of
    DeepSpeed's file contradicts the plan.
    """
    config, hardware = request.run.config, request.plan_request.hardware
    plan = plan_request(request.plan_request, trace=config.plan.trace and bool(hardware.gpus))
    # a kept batch ran before: it is tried again where the prediction says that it does not fit
    require_fit(plan, config, is_resumed=request.plan_request.resumed_batch is not None)
    log_plan(plan, config, stage_name=request.run.stage_name)
    if plan.layout not in DEEPSPEED_LAYOUTS:
        return plan, None
    # without a config the plan chose DeepSpeed by itself
    deepspeed_config = request.deepspeed_config or translate_deepspeed_keys(
        shipped_deepspeed_config(plan.layout)
    )
    mixed_precision = config.distributed.mixed_precision
    plan_values = PlanValues(
        layout=plan.layout,
        batch=plan.trainer_batch,  # DeepSpeed takes a fixed number of micro steps
        hidden_size=load_run_model_shape(config).hidden_size,
        compute_dtype=plan.precision.compute,
        options=deepspeed_options(config),
        reduce=SHORT_DTYPES.get(mixed_precision.reduce),
        buffer=SHORT_DTYPES.get(mixed_precision.buffer),
    )
    filled_config = fill_auto_values(
        deepspeed_config,
        plan_values,
        name=request.deepspeed_name,
        adam_obstacle="; ".join(cpu_adam_obstacles()),
    )
    return dataclasses.replace(plan, deepspeed=deepspeed_config), filled_config


# --- DeepSpeed's configuration --------------------------------------------------------------------
def read_deepspeed_config(
    request: DeepspeedRequest, strategy: LayoutName | None
) -> tuple[dict[str, Any], LayoutName, str]:
    """Read DeepSpeed's config in current keys, from the user's file or as shipped, the layout that
    it asks for, and its name in messages. Raises ConfigError where the file asks for another layout
    than `strategy`."""
    planned_layout = strategy or "zero2"
    name = f"DEEPSPEED_CONFIG={one_line(str(request.file))}" if request.file else "DeepSpeed"
    deepspeed_config = translate_deepspeed_keys(
        (
            read_deepspeed_file(request.file)
            if request.file
            else shipped_deepspeed_config(planned_layout)
        ),
        name=name,
    )
    layout = deepspeed_layout(deepspeed_config, name=name, default_layout=planned_layout)
    if strategy not in (None, layout):
        raise ConfigError(
            f"STRATEGY={strategy} contradicts {name}, which asks for {layout}: leave one of"
            " them out"
        )
    return deepspeed_config, layout, name
