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
from sft_play.errors import ConfigError, SftPlayError, in_stage
from sft_play.facts.hardware import Hardware
from sft_play.launch.deepspeed.files import (
    keeps_params,
    layout_of,
    read_deepspeed_file,
    shipped_config,
    translate,
    with_batch,
)
from sft_play.launch.deepspeed.fill import PlanNumbers, adam_obstacles, compiling_words, fill
from sft_play.launch.launch_options import DeepspeedRequest, LaunchOptions
from sft_play.launch.machine import prepare_libraries
from sft_play.log import one_line
from sft_play.planner.layout import DEEPSPEED_LAYOUTS, LayoutName, PreviousRun, find_layouts, layout_choices
from sft_play.planner.mesh import format_mesh, parse_mesh
from sft_play.planner.plan import Plan, PlanWithDeepSpeed, require_fit
from sft_play.process.imports import importing
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import given_deepspeed
from sft_play.starting.plan_run import (
    kept_of,
    log_plan,
    plan_for,
    refuse_early,
    refuse_resuming,
    shape_for,
    stopped_run,
)
from sft_play.starting.row_survey import count_rows, has_own_lengths, known_rows

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
    given = given_deepspeed(resume_from) if resume_from is not None else None
    if loaded.stages and options.strategy is None and options.deepspeed is None:
        options = dataclasses.replace(options, strategy=_layout_of_stages(loaded, hardware, resume_from))
    planned = []
    for part, place in _parts_of(loaded, resume_from):
        if part.stage is not None:
            logger.debug("Stage %s:", part.stage)
        with in_stage(part.stage):
            planned.append(plan_ranks(part, hardware, options, resume_from=place, given=given))
    return planned


def _layout_of_stages(loaded: LoadedConfig, hardware: Hardware, resume_from: RunFolder | None) -> LayoutName:
    stopped = stopped_run(resume_from) if resume_from is not None else None
    if stopped is not None and (stopped.processes == hardware.ranks or stopped.layout in DEEPSPEED_LAYOUTS):
        return stopped.layout
    return common_layout([stage.config for stage in loaded.stages], hardware, only=layout_choices(hardware.ranks))


def _parts_of(loaded: LoadedConfig, folder: RunFolder | None) -> list[tuple[LoadedConfig, RunFolder | None]]:
    """The parts of a run that is resumed from a folder, or begins (None), each with its own folder: None for a stage
    that has not begun, or is finished."""
    if not loaded.stages or folder is None:
        return [(part, folder) for part in loaded.parts]
    places = [folder.of_stage(stage.name, is_last=stage is loaded.stages[-1]) for stage in loaded.stages]
    return [
        (part, place if place.has_begun and not place.has_finished(adapter=part.config.tuning.mode != "full") else None)
        for part, place in zip(loaded.parts, places, strict=True)
    ]


def count_before_planning(
    loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, *, is_resumed: bool, trains_here: bool
) -> None:
    """Count the tokens of the run's rows, so that its plan knows their lengths; what no length changes is refused
    before, but where a DeepSpeed file or a stopped run decides the batch. `trains_here`: this process needs all
    libraries anyway. Raises SftPlayError as planning or reading the rows does."""
    if options.deepspeed is not None and options.deepspeed.file:
        read_deepspeed_file(options.deepspeed.file)  # what cannot be read is refused before rows are counted
    is_open = not is_resumed and options.deepspeed is None
    for part in loaded.parts if is_open else ():
        refuse_strategy(part.config, hardware, options.strategy)
    if not any(has_own_lengths(part.config) and known_rows(part.config) is None for part in loaded.parts):
        return
    for part in loaded.parts if is_open else ():
        with in_stage(part.stage):
            refuse_early(part.config, hardware, only=_layouts(options.strategy, hardware))
    prepare_libraries(loaded.config.model.name, hardware)
    if trains_here:
        with importing():
            importlib.import_module("sft_play.training.run")
    count_rows(loaded)


def common_layout(configs: Sequence[RunConfig], hardware: Hardware, *, only: tuple[LayoutName, ...]) -> LayoutName:
    """The fastest layout that fits every stage, of those that some stage would use by itself; else that of the stage
    with the longest rows, whose plan says what does not fit."""

    def plans(layouts: tuple[LayoutName, ...]) -> list[Plan]:
        return [plan_for(config, hardware, only=layouts, with_suggestions=False) for config in configs]

    alone = plans(only)
    # the longest rows first: their stage's layout is the answer where none fits them all
    names = dict.fromkeys(plan.layout for plan in sorted(alone, key=lambda plan: -plan.max_seq_len))
    if len(names) == 1:
        return next(iter(names))
    fitting: dict[LayoutName, float] = {}
    for name in names:
        with contextlib.suppress(SftPlayError):
            together = plans((name,))
            if all(plan.fits and plan.layout == name for plan in together):
                fitting[name] = sum(plan.hours or plan.speed.step_s for plan in together)  # hours: data of known size
    return min(fitting or names, key=lambda name: fitting.get(name, 0.0))


def plan_ranks(
    loaded: LoadedConfig,
    hardware: Hardware,
    options: LaunchOptions,
    *,
    resume_from: RunFolder | None = None,
    given: dict[str, Any] | None = None,
) -> PlanWithDeepSpeed:
    """The plan of a run over all ranks of `hardware`, logged, and DeepSpeed's config where that is the engine.

    `given`: DeepSpeed's config as the run that is resumed was first given it. Raises ConfigError where the strategy
    cannot run the job, or contradicts DeepSpeed's config; RunFolderError where the run cannot be resumed in this layout
    or over these ranks; DoesNotFit where nothing fits, and the batch was left to the plan.
    """
    stopped = stopped_run(resume_from) if resume_from else None
    config, strategy, deepspeed = loaded.config, options.strategy, options.deepspeed
    if stopped is not None and strategy is None and deepspeed is None:
        # DeepSpeed's checkpoints are read by the same layout only; those of the others by any, over any number of ranks
        strategy = stopped.layout if stopped.processes == hardware.ranks or stopped.layout in DEEPSPEED_LAYOUTS else None
    raw, name = None, "DeepSpeed"
    if deepspeed is not None:
        raw, strategy, name = read_deepspeed(deepspeed, strategy)
    elif given is not None and strategy in DEEPSPEED_LAYOUTS and layout_of(given, planned=strategy) == strategy:
        raw = given
    if resume_from and strategy:
        refuse_resuming(resume_from, stopped, strategy)
    if raw is not None:
        config = as_deepspeed_says(config, raw, ranks=hardware.ranks, name=name)
    # after DeepSpeed's file, which may fix the batch
    kept = kept_of(config, stopped, batches_of(config, stopped, hardware))
    if stopped is not None and kept.batch not in (None, stopped.batch):
        words = "Batch: micro %d x accum %d x %d ranks (stopped with %d): the effective batch of %d is kept"
        logger.info(words, *dataclasses.astuple(kept.batch), stopped.batch.ranks, kept.batch.effective_batch)
    refuse_strategy(config, hardware, strategy)
    only = _layouts(strategy, hardware)
    if stopped is not None and strategy is None:
        only = tuple(name for name in only if stopped.resume_obstacle(name) is None)
    weights_stay = raw is not None and strategy is not None and keeps_params(raw, strategy)
    trace = config.plan.trace and bool(hardware.gpus)
    plan = plan_for(config, hardware, only=only, trace=trace, keeps_params=weights_stay, kept=kept)
    # a kept batch ran before: it is tried again where the prediction says that it does not fit
    require_fit(plan, config, is_resumed=kept.batch is not None)
    log_plan(plan, config, stage=loaded.stage)
    if plan.layout not in DEEPSPEED_LAYOUTS:
        return plan, None
    raw = raw or translate(shipped_config(plan.layout))[0]  # the plan chose DeepSpeed by itself
    return dataclasses.replace(plan, deepspeed=raw), _resolved_deepspeed(plan, config, raw, name)


def _layouts(strategy: LayoutName | None, hardware: Hardware) -> tuple[LayoutName, ...]:
    return (strategy,) if strategy else layout_choices(hardware.ranks)


def read_deepspeed(request: DeepspeedRequest, strategy: LayoutName | None) -> tuple[dict[str, Any], LayoutName, str]:
    """DeepSpeed's config in current keys, from the user's file or as shipped, the layout that it asks for, and its name
    in messages."""
    planned = strategy or "zero2"
    name = f"DEEPSPEED_CONFIG={one_line(str(request.file))}" if request.file else "DeepSpeed"
    raw, notes = translate(read_deepspeed_file(request.file) if request.file else shipped_config(planned), name=name)
    layout = layout_of(raw, name=name, planned=planned)
    _log_deepspeed(notes)
    return raw, layout, name


def as_deepspeed_says(config: RunConfig, raw: dict[str, Any], *, ranks: int, name: str) -> RunConfig:
    """The settings with the batch of DeepSpeed's config where the run YAML leaves it open."""
    train, of_batch = with_batch(config.train, raw, ranks=ranks, name=name)
    _log_deepspeed(of_batch)
    return config.model_copy(update={"train": train})


def batches_of(config: RunConfig, stopped: PreviousRun | None, hardware: Hardware) -> int:
    """Data-parallel ranks of a resumed run: those of its mesh, those that it had over as many processes, or all."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is not None:
        return mesh.data_parallel_ranks
    return stopped.batch.ranks if stopped is not None and stopped.processes == hardware.ranks else hardware.ranks


def _log_deepspeed(lines: Iterable[str]) -> None:
    for line in lines:
        logger.debug("DeepSpeed: %s", line)


def _resolved_deepspeed(plan: Plan, config: RunConfig, raw: dict[str, Any], name: str) -> dict[str, Any]:
    numbers = PlanNumbers.of(plan, config, hidden_size=shape_for(config).hidden_size)
    offloads = plan.choice.layout.offloads_states
    obstacles = adam_obstacles() if offloads else ()
    resolved, lines = fill(raw, numbers, name=name, torch_adam="; ".join(obstacles) or None)
    _log_deepspeed(lines)
    if offloads and resolved.get("zero_force_ds_cpu_optimizer", True) and (words := compiling_words()):
        logger.info("DeepSpeed: %s", words)  # a wait of minutes
    return resolved


def refuse_strategy(config: RunConfig, hardware: Hardware, strategy: LayoutName | None) -> None:
    """Raises ConfigError for a named layout that cannot run."""
    if strategy is None:
        return
    possible, refused = find_layouts(config, shape_for(config), hardware, named=strategy)
    names = list(dict.fromkeys(layout.name for layout in possible))
    if strategy in names:
        return
    because = next((item.because for item in refused if item.name == strategy), f"{hardware.ranks} rank(s)")
    if config.model.mesh_shape is not None:
        because = f"model.mesh_shape={format_mesh(config.model.mesh_shape)} is another layout"
    others = f"there are: {', '.join(names)}" if names else f"no layout over {hardware.ranks} rank(s) can"
    raise ConfigError(f"STRATEGY={strategy} cannot run this job: {because}; {others}")
