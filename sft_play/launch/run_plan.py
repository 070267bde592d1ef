"""The plan of a run with what this machine knows: its shapes, the size of its data, earlier runs, a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.build.size import estimate_size
from sft_play.data.sources.files import has_held_out_file
from sft_play.errors import OutOfMemory, SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.facts.installed import cuda_libraries, missing_kernel_packages
from sft_play.facts.models.architecture import (
    load_config_json,
    published_params_note,
    quantised_storage_note,
    refuse_quantised,
    refuse_remote_code,
    text_only_note,
)
from sft_play.facts.models.model_shape import ModelShape
from sft_play.launch.machine import restrict_to_device
from sft_play.launch.request import (
    LaunchOptions,
)
from sft_play.launch.row_survey import cached_row_tokens
from sft_play.launch.torchrun import rank_variables
from sft_play.planner import calibration, plan_details
from sft_play.planner.advice.suggestions import find_suggestions, make_advised_plan
from sft_play.planner.backend import Backend, choose_backend
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidates import Candidate
from sft_play.planner.layout import (
    LAYOUT_NAMES,
    LayoutName,
)
from sft_play.planner.memory.structure import configured_shape
from sft_play.planner.micro_batches import RowTokens
from sft_play.planner.plan import (
    Plan,
    PlanRequest,
    RunLength,
    Suggestion,
    TraceCandidate,
    TracePrediction,
    make_plan,
)
from sft_play.planner.plan_summary import fit_line, plan_warnings
from sft_play.runs.manifest import FREE_TO_CHANGE_OPTIONS
from sft_play.trace.block_meter import load_planned_shape
from sft_play.training.measure.recorded import measured_run

logger = logging.getLogger(__name__)


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
    """Plan a run with everything that is known here: earlier runs, the size of the data, with `trace` a trace.

    Args:
        include_suggestions: whether a plan that does not fit says what would make it fit.
        keeps_params: whether `zero3_offload` leaves the weights on the GPUs, as a DeepSpeed file may say.
        rows: the lengths of the rows, where the caller has counted them.
    """
    request = build_plan_request(config, hardware, layouts, rows=rows)
    request = dataclasses.replace(request, keeps_params=keeps_params)
    return plan_request(request, trace=trace, include_suggestions=include_suggestions)


def build_plan_request(
    config: RunConfig,
    hardware: Hardware,
    layouts: tuple[LayoutName, ...] = LAYOUT_NAMES,
    *,
    rows: RowTokens | None = None,
    is_stage: bool = False,
) -> PlanRequest:
    """Build the planner's request for a run, or a stage of one: the shapes of its model, earlier runs here, and the
    lengths of its rows where they are known. Raises as `select_local_backend` and `load_run_model_shape` do."""
    hardware = restrict_to_device(config, hardware)
    config = _apply_backend_fallback(config, training_backend(config, hardware, layouts, has_stages=is_stage))
    return PlanRequest(
        config,
        load_run_model_shape(config),
        hardware,
        layouts,
        has_eval(config),
        # runs here say nothing about a machine that is named
        measured_runs=[] if hardware.named else calibration.load_measured_runs(),
        row_tokens=rows or cached_row_tokens(config),
        missing_packages=missing_kernel_packages(),
        libraries=cuda_libraries(),
    )


def plan_request(request: PlanRequest, *, trace: bool = False, include_suggestions: bool = True) -> Plan:
    """Plan what a request asks for, with the length of the run and, where asked for, a trace."""
    # a resumed run's batch is fixed: there is nothing to suggest
    planner = make_advised_plan if include_suggestions and request.resumed_batch is None else make_plan
    return planner(
        request,
        trace_candidate=_trace_confirmation(request.config, request.shape) if trace else None,
        estimate_run_length=_length_estimator(request.config, request.row_tokens),
    )


def load_run_model_shape(config: RunConfig) -> ModelShape:
    """The model's shapes; for a class that the tables lack they are measured on the meta device. Raises ModelError
    where it is no model that a run with this config trains."""
    model = config.model
    fields = load_config_json(model.name, revision=model.revision)
    refuse_quantised(fields, name=model.name, mode=config.tuning.mode)
    refuse_remote_code(fields, name=model.name, allowed=model.trust_remote_code)
    shape = load_planned_shape(fields, name=model.name, trust_remote_code=model.trust_remote_code)
    published_note = published_params_note(model.name, model.revision, shape.params)
    storage_note = quantised_storage_note(fields, config.tuning.mode)
    shape = configured_shape(config, shape)
    return dataclasses.replace(
        shape, text_only_note=text_only_note(fields), storage_note=storage_note, published_note=published_note
    )


def has_eval(config: RunConfig) -> bool:
    """Whether evaluation batches run beside the training."""
    return config.data.val_fraction > 0 or has_held_out_file(config.data)


def _trace_confirmation(config: RunConfig, shape: ModelShape) -> TraceCandidate:

    def confirm(candidate: Candidate) -> TracePrediction:
        from sft_play.trace.confirm import trace_candidate

        model = load_config_json(config.model.name, revision=config.model.revision)
        return trace_candidate(config, model, shape, candidate.precision, candidate)

    return confirm


def _length_estimator(config: RunConfig, row_tokens: RowTokens | None) -> Callable[[int], RunLength | None]:
    def estimate_run_length(effective_batch: int) -> RunLength | None:
        if row_tokens is not None:
            steps_per_epoch = math.ceil(row_tokens.rows / effective_batch)
            known_steps = config.train.max_steps or max(1, math.ceil(steps_per_epoch * config.train.epochs))
            return RunLength(known_steps, round(row_tokens.rows * row_tokens.mean * known_steps / steps_per_epoch))
        is_plain_text = config.task_mode == "cpt"
        size = estimate_size(config.data, wants_text=is_plain_text)
        steps = config.train.max_steps
        if size is None:
            return RunLength(steps, None) if steps else None
        # blocks and packs: every row has max_seq_len tokens
        has_full_rows = is_plain_text or config.data.packing != "none"
        rows = max(1, size.tokens // config.model.max_seq_len) if has_full_rows else size.rows
        steps_per_epoch = math.ceil(rows / effective_batch)
        steps = steps or max(1, math.ceil(steps_per_epoch * config.train.epochs))
        tokens = min(size.tokens, rows * config.model.max_seq_len)  # what longer rows have beyond that is cut
        return RunLength(steps, int(tokens * steps / steps_per_epoch))

    return estimate_run_length


def log_plan(plan: Plan, config: RunConfig, *, stage_name: str | None = None) -> None:
    """Log the batch and whether it fits and how long it takes; beside them the choice with its reasons. Of a stage its
    batch is said when it begins."""
    visible_lines = plan_details.batch_size_lines(plan, config) if stage_name is None else []
    stage_prefix = "" if stage_name is None else f"Stage {stage_name}: "
    for line in [
        plan_details.choice_line(plan),
        *plan_details.parameter_lines(plan, config),
        *plan_details.batch_lines(plan, config),
    ]:
        logger.log(logging.INFO if line in visible_lines else logging.DEBUG, "%s", line)
    logger.info("%s%s", stage_prefix, fit_line(plan, config))
    for warning in plan_warnings(plan, config):
        logger.warning("%s%s", stage_prefix, warning)
    if not plan.fits:
        logger.warning("the given batch is predicted not to fit; it is tried because it was given")


# --- the backend ------------------------------------------------------------------------------------------------------


def select_local_backend(config: RunConfig, hardware: Hardware, *, layout: str, has_stages: bool = False) -> Backend:
    """Choose the backend that trains a run on this machine; `has_stages`: in stages. Raises BackendError where Unsloth
    was asked for and cannot run it, and no fallback was named."""
    return choose_backend(
        config,
        hardware,
        layout=layout,
        is_rank=bool(rank_variables(os.environ)),
        has_stages=has_stages,
        load_shape=functools.partial(load_run_model_shape, config),
    )


def training_backend(
    config: RunConfig,
    hardware: Hardware,
    layouts: tuple[LayoutName, ...] = LAYOUT_NAMES,
    *,
    has_stages: bool = False,
) -> Backend | None:
    """The backend that trains a run here, where it had to be chosen: not for bnb, nor on a machine that was only named.
    Raises as `select_local_backend` does."""
    if config.tuning.backend == "bnb" or hardware.named:
        return None
    default_layout: LayoutName = "ddp" if hardware.ranks > 1 else "single"
    layout = default_layout if default_layout in layouts or not layouts else layouts[0]
    return select_local_backend(config, hardware, layout=layout, has_stages=has_stages)


def find_unsloth_layout(loaded: LoadedConfig, options: LaunchOptions, hardware: Hardware) -> LayoutName | None:
    """The layout in which Unsloth's processes train a run; None where they do not. Raises BackendError where Unsloth
    was asked for and cannot run it, and no fallback was named."""
    if loaded.config.tuning.backend != "unsloth":
        return None
    layout = options.strategy or ("zero2" if options.deepspeed else "ddp" if hardware.ranks > 1 else "single")
    backend = select_local_backend(loaded.config, hardware, layout=layout, has_stages=bool(loaded.stages))
    return layout if backend.name == "unsloth" else None


def _apply_backend_fallback(config: RunConfig, backend: Backend | None) -> RunConfig:
    if backend is None or backend.fallback_from is None:
        return config
    tuning = config.tuning.model_copy(update={"backend": backend.name, "backend_fallback": None})
    return config.model_copy(update={"tuning": tuning})


# --- where memory ran out ---------------------------------------------------------------------------------------------


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
