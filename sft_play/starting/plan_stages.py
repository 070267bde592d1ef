"""The plans of a run, or of each of its stages: layout, batch and DeepSpeed's config, once its rows are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, SftPlayError, stage_context
from sft_play.facts.hardware import Hardware
from sft_play.launch.deepspeed.files import (
    deepspeed_layout,
    keeps_params_on_gpu,
    merge_deepspeed_batch,
    read_deepspeed_file,
    shipped_deepspeed_config,
    translate_deepspeed_keys,
)
from sft_play.launch.deepspeed.fill import PlanValues, cpu_adam_compile_note, cpu_adam_obstacles, fill_auto_values
from sft_play.launch.launch_options import DeepspeedRequest, LaunchOptions
from sft_play.launch.machine import prepare_libraries
from sft_play.log import one_line
from sft_play.planner.layout import DEEPSPEED_LAYOUTS, LayoutName, PreviousRun, find_layouts, layout_choices
from sft_play.planner.mesh import format_mesh, parse_mesh
from sft_play.planner.plan import Plan, PlanWithDeepSpeed, require_fit
from sft_play.process.imports import importing
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import requested_deepspeed
from sft_play.starting.plan_run import (
    check_without_rows,
    load_run_model_shape,
    log_plan,
    plan_run,
    read_previous_run,
    require_resumable_layout,
    resume_constraints,
)
from sft_play.starting.row_survey import cached_row_tokens, count_row_tokens, has_variable_lengths

logger = logging.getLogger(__name__)


def plan_stages(
    loaded: LoadedConfig,
    hardware: Hardware,
    options: LaunchOptions,
    *,
    resume_from: RunFolder | None = None,
) -> list[PlanWithDeepSpeed]:
    """The plans of a run, logged: one, or one per stage, all in one layout; raises as `plan_ranks` does. `resume_from`:
    the run that is resumed."""
    original_deepspeed = requested_deepspeed(resume_from) if resume_from is not None else None
    if loaded.stages and options.strategy is None and options.deepspeed is None:
        options = dataclasses.replace(options, strategy=_select_stage_layout(loaded, hardware, resume_from))
    stage_plans = []
    for stage_run, stage_folder in _match_stage_folders(loaded, resume_from):
        if stage_run.stage_name is not None:
            logger.debug("Stage %s:", stage_run.stage_name)
        with stage_context(stage_run.stage_name):
            stage_plans.append(
                plan_ranks(
                    stage_run, hardware, options, resume_from=stage_folder, original_deepspeed=original_deepspeed
                )
            )
    return stage_plans


def _select_stage_layout(loaded: LoadedConfig, hardware: Hardware, resume_from: RunFolder | None) -> LayoutName:
    previous = read_previous_run(resume_from) if resume_from is not None else None
    if previous is not None and (previous.processes == hardware.ranks or previous.layout in DEEPSPEED_LAYOUTS):
        return previous.layout
    return common_layout([stage.config for stage in loaded.stages], hardware, layouts=layout_choices(hardware.ranks))


def _match_stage_folders(loaded: LoadedConfig, folder: RunFolder | None) -> list[tuple[LoadedConfig, RunFolder | None]]:
    """The parts of a run that is resumed from a folder, or begins (None), each with its own folder: None for a stage
    that has not begun, or is finished."""
    if not loaded.stages or folder is None:
        return [(stage_run, folder) for stage_run in loaded.runs]
    stage_folders = [
        folder.stage_folder(stage.name, is_last_stage=stage is loaded.stages[-1]) for stage in loaded.stages
    ]
    return [
        (
            stage_run,
            stage_folder
            if stage_folder.has_begun
            and not stage_folder.has_finished(is_adapter=stage_run.config.tuning.mode != "full")
            else None,
        )
        for stage_run, stage_folder in zip(loaded.runs, stage_folders, strict=True)
    ]


def count_rows_before_planning(
    loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, *, is_resumed: bool, trains_in_process: bool
) -> None:
    """Count the tokens of the run's rows, so that its plan knows their lengths; what no length changes is refused
    before, but where a DeepSpeed file or a stopped run decides the batch. `trains_in_process`: this process needs all
    libraries anyway. Raises SftPlayError as planning or reading the rows does."""
    if options.deepspeed is not None and options.deepspeed.file:
        read_deepspeed_file(options.deepspeed.file)  # what cannot be read is refused before rows are counted
    is_batch_open = not is_resumed and options.deepspeed is None
    for stage_run in loaded.runs if is_batch_open else ():
        refuse_impossible_strategy(stage_run.config, hardware, options.strategy)
    if not any(
        has_variable_lengths(stage_run.config) and cached_row_tokens(stage_run.config) is None
        for stage_run in loaded.runs
    ):
        return
    for stage_run in loaded.runs if is_batch_open else ():
        with stage_context(stage_run.stage_name):
            check_without_rows(stage_run.config, hardware, layouts=_strategy_layouts(options.strategy, hardware))
    prepare_libraries(loaded.config.model.name, hardware)
    if trains_in_process:
        with importing():
            importlib.import_module("sft_play.training.run")
    count_row_tokens(loaded)


def common_layout(configs: Sequence[RunConfig], hardware: Hardware, *, layouts: tuple[LayoutName, ...]) -> LayoutName:
    """The fastest layout that fits every stage, of those that some stage would use by itself; else that of the stage
    with the longest rows, whose plan says what does not fit."""

    def make_plans(tried_layouts: tuple[LayoutName, ...]) -> list[Plan]:
        return [plan_run(config, hardware, layouts=tried_layouts, include_suggestions=False) for config in configs]

    separate_plans = make_plans(layouts)
    # the longest rows first: their stage's layout is the answer where none fits them all
    names = dict.fromkeys(plan.layout for plan in sorted(separate_plans, key=lambda plan: -plan.max_seq_len))
    if len(names) == 1:
        return next(iter(names))
    step_seconds: dict[LayoutName, float] = {}
    for name in names:
        with contextlib.suppress(SftPlayError):
            joint_plans = make_plans((name,))
            if all(plan.fits and plan.layout == name for plan in joint_plans):
                # hours: data of known size
                step_seconds[name] = sum(plan.hours or plan.speed.step_s for plan in joint_plans)
    return min(step_seconds or names, key=lambda name: step_seconds.get(name, 0.0))


def plan_ranks(
    loaded: LoadedConfig,
    hardware: Hardware,
    options: LaunchOptions,
    *,
    resume_from: RunFolder | None = None,
    original_deepspeed: dict[str, Any] | None = None,
) -> PlanWithDeepSpeed:
    """The plan of a run over all ranks of `hardware`, logged, and DeepSpeed's config where that is the engine.

    `original_deepspeed`: DeepSpeed's config as the run that is resumed was first given it. Raises ConfigError where the
    strategy cannot run the job, or contradicts DeepSpeed's config; RunFolderError where the run cannot be resumed in
    this layout or over these ranks; DoesNotFit where nothing fits, and the batch was left to the plan.
    """
    previous = read_previous_run(resume_from) if resume_from else None
    config, strategy, deepspeed_request = loaded.config, options.strategy, options.deepspeed
    if previous is not None and strategy is None and deepspeed_request is None:
        # DeepSpeed's checkpoints are read by the same layout only; those of the others by any, over any number of ranks
        strategy = (
            previous.layout if previous.processes == hardware.ranks or previous.layout in DEEPSPEED_LAYOUTS else None
        )
    deepspeed_config, name = None, "DeepSpeed"
    if deepspeed_request is not None:
        deepspeed_config, strategy, name = read_deepspeed_config(deepspeed_request, strategy)
    elif (
        original_deepspeed is not None
        and strategy in DEEPSPEED_LAYOUTS
        and deepspeed_layout(original_deepspeed, default_layout=strategy) == strategy
    ):
        deepspeed_config = original_deepspeed
    if resume_from and strategy:
        require_resumable_layout(resume_from, previous, strategy)
    if deepspeed_config is not None:
        config = apply_deepspeed_batch(config, deepspeed_config, ranks=hardware.ranks, name=name)
    # after DeepSpeed's file, which may fix the batch
    constraints = resume_constraints(config, previous, count_data_parallel_ranks(config, previous, hardware))
    if previous is not None and constraints.batch not in (None, previous.batch):
        message = "Batch: micro %d x accum %d x %d ranks (stopped with %d): the effective batch of %d is kept"
        logger.info(
            message, *dataclasses.astuple(constraints.batch), previous.batch.ranks, constraints.batch.effective_batch
        )
    refuse_impossible_strategy(config, hardware, strategy)
    layouts = _strategy_layouts(strategy, hardware)
    if previous is not None and strategy is None:
        layouts = tuple(name for name in layouts if previous.resume_obstacle(name) is None)
    keeps_params = (
        deepspeed_config is not None and strategy is not None and keeps_params_on_gpu(deepspeed_config, strategy)
    )
    trace = config.plan.trace and bool(hardware.gpus)
    plan = plan_run(config, hardware, layouts=layouts, trace=trace, keeps_params=keeps_params, constraints=constraints)
    # a kept batch ran before: it is tried again where the prediction says that it does not fit
    require_fit(plan, config, is_resumed=constraints.batch is not None)
    log_plan(plan, config, stage_name=loaded.stage_name)
    if plan.layout not in DEEPSPEED_LAYOUTS:
        return plan, None
    # the plan chose DeepSpeed by itself
    deepspeed_config = deepspeed_config or translate_deepspeed_keys(shipped_deepspeed_config(plan.layout))[0]
    return dataclasses.replace(plan, deepspeed=deepspeed_config), _resolve_deepspeed_config(
        plan, config, deepspeed_config, name
    )


def _strategy_layouts(strategy: LayoutName | None, hardware: Hardware) -> tuple[LayoutName, ...]:
    return (strategy,) if strategy else layout_choices(hardware.ranks)


def read_deepspeed_config(
    request: DeepspeedRequest, strategy: LayoutName | None
) -> tuple[dict[str, Any], LayoutName, str]:
    """DeepSpeed's config in current keys, from the user's file or as shipped, the layout that it asks for, and its name
    in messages."""
    planned_layout = strategy or "zero2"
    name = f"DEEPSPEED_CONFIG={one_line(str(request.file))}" if request.file else "DeepSpeed"
    deepspeed_config, notes = translate_deepspeed_keys(
        read_deepspeed_file(request.file) if request.file else shipped_deepspeed_config(planned_layout), name=name
    )
    layout = deepspeed_layout(deepspeed_config, name=name, default_layout=planned_layout)
    _log_deepspeed(notes)
    return deepspeed_config, layout, name


def apply_deepspeed_batch(config: RunConfig, deepspeed_config: dict[str, Any], *, ranks: int, name: str) -> RunConfig:
    """The settings with the batch of DeepSpeed's config where the run YAML leaves it open."""
    train, batch_notes = merge_deepspeed_batch(config.train, deepspeed_config, ranks=ranks, name=name)
    _log_deepspeed(batch_notes)
    return config.model_copy(update={"train": train})


def count_data_parallel_ranks(config: RunConfig, previous: PreviousRun | None, hardware: Hardware) -> int:
    """Data-parallel ranks of a resumed run: those of its mesh, those that it had over as many processes, or all."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is not None:
        return mesh.data_parallel_ranks
    return previous.batch.ranks if previous is not None and previous.processes == hardware.ranks else hardware.ranks


def _log_deepspeed(lines: Iterable[str]) -> None:
    for line in lines:
        logger.debug("DeepSpeed: %s", line)


def _resolve_deepspeed_config(
    plan: Plan, config: RunConfig, deepspeed_config: dict[str, Any], name: str
) -> dict[str, Any]:
    plan_values = PlanValues.from_plan(plan, config, hidden_size=load_run_model_shape(config).hidden_size)
    offloads = plan.choice.layout.offloads_states
    obstacles = cpu_adam_obstacles() if offloads else ()
    resolved, value_lines = fill_auto_values(
        deepspeed_config, plan_values, name=name, adam_obstacle="; ".join(obstacles) or None
    )
    _log_deepspeed(value_lines)
    if offloads and resolved.get("zero_force_ds_cpu_optimizer", True) and (compile_note := cpu_adam_compile_note()):
        logger.info("DeepSpeed: %s", compile_note)  # a wait of minutes
    return resolved


def refuse_impossible_strategy(config: RunConfig, hardware: Hardware, strategy: LayoutName | None) -> None:
    """Raises ConfigError for a named layout that cannot run."""
    if strategy is None:
        return
    possible, refused = find_layouts(config, load_run_model_shape(config), hardware, named=strategy)
    names = list(dict.fromkeys(layout.name for layout in possible))
    if strategy in names:
        return
    reason = next(
        (refused_layout.because for refused_layout in refused if refused_layout.name == strategy),
        f"{hardware.ranks} rank(s)",
    )
    if config.model.mesh_shape is not None:
        reason = f"model.mesh_shape={format_mesh(config.model.mesh_shape)} is another layout"
    others = f"there are: {', '.join(names)}" if names else f"no layout over {hardware.ranks} rank(s) can"
    raise ConfigError(f"STRATEGY={strategy} cannot run this job: {reason}; {others}")
