"""The plan of a run with what this machine knows: its shapes, the size of its data, earlier runs, a trace; and what a
resumed run has to keep of how it was spread over ranks when it was stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.build.size import rough_size
from sft_play.data.sources.files import has_held_out_file
from sft_play.errors import OutOfMemory, RunFolderError, SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.facts.installed import cuda_libraries, missing_kernel_packages
from sft_play.facts.models.architecture import (
    load_config_json,
    published_params_note,
    refuse_quantised,
    refuse_remote_code,
    quantised_storage_note,
    text_only_note,
)
from sft_play.facts.models.model_shape import ModelShape
from sft_play.launch.exported import rank_variables
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import machine_for
from sft_play.planner import calibration, plan_details
from sft_play.planner.advice.suggestions import find_suggestions, make_advised_plan
from sft_play.planner.batching import BatchPlan, divisors
from sft_play.planner.candidates import Candidate
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName, PreviousRun
from sft_play.planner.memory.structure import configured_shape
from sft_play.planner.micro_batches import RowTokens
from sft_play.planner.plan import (
    Plan,
    PlanRequest,
    RunLength,
    Suggestion,
    TraceCandidate,
    TracePrediction,
    check_plan_request,
    make_plan,
)
from sft_play.planner.plan_summary import fit_line, plan_warnings
from sft_play.planner.precision import UNSHARDED_LAYOUTS, WeightUpdates, choose_precision
from sft_play.runs import oom
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import FREE_TO_CHANGE
from sft_play.starting.row_survey import known_rows
from sft_play.trace.block_meter import load_planned_shape
from sft_play.training.measure.recorded import measured_run

if TYPE_CHECKING:
    from sft_play.training.prepare.backend import Backend

logger = logging.getLogger(__name__)


# --- a resumed run ----------------------------------------------------------------------------------------------------


def stopped_run(folder: RunFolder) -> PreviousRun | None:
    """How a run was spread when it was stopped: by its manifest, or by its plan where it failed before a rank wrote it;
    None where neither says."""
    manifest, plan = folder.manifest(), read_json(folder.path / "plan.json")
    batch, layout, processes = manifest.get("batch"), manifest.get("layout", "single"), manifest.get("processes", 0)
    if not isinstance(batch, dict):
        batch = {**plan, "ranks": plan.get("data_parallel_ranks")}
        layout, processes = plan.get("layout"), plan.get("ranks")
    numbers = [batch.get(name) for name in ("micro_batch", "grad_accum", "ranks")]
    micro, accum, ranks = (number if isinstance(number, int) else 0 for number in numbers)
    if min(micro, accum, ranks) < 1:
        return None
    processes = processes if isinstance(processes, int) else 0
    # Elsewhere updates follow from the layout: FSDP and DeepSpeed keep copies in float32.
    updates = (plan.get("precision") or {}).get("updates") if layout in UNSHARDED_LAYOUTS else None
    known: LayoutName = layout if layout in LAYOUT_NAMES else "single"
    too_many = [event.micro_batch for event in oom.recorded(folder) if event.again in ("step", "run")]
    batch_then = BatchPlan(micro, accum, ranks)
    return PreviousRun(known, batch_then, processes, updates, folder.has_trained, min(too_many, default=None))


@dataclass(frozen=True)
class Kept:
    """What a resumed run keeps from its first start; None leaves it to the config and the plan."""

    batch: BatchPlan | None = None
    updates: WeightUpdates | None = None


NOTHING_KEPT = Kept()


def kept_of(config: RunConfig, stopped: PreviousRun | None, ranks: int) -> Kept:
    """What a resumed run keeps over `ranks` data-parallel ranks: its batch, and how updates reach its weights. Free GPU
    memory may have changed; the rows of a step must not. Over another number of ranks the accumulation follows, and a
    micro-batch that does not divide a rank's share, or ran out of memory, becomes the largest that does. Raises
    RunFolderError where the effective batch does not split over the ranks."""
    if stopped is None or not (stopped.has_trained or stopped.oom_micro_batch):
        return NOTHING_KEPT
    train = config.train
    given = None if train.batch_size == "auto" else train.batch_size
    if given and stopped.oom_micro_batch and given >= stopped.oom_micro_batch:
        given = None
    updates = stopped.updates if train.weight_updates == "auto" else None
    effective, is_open = stopped.batch.effective_batch, "auto" in (train.batch_size, train.grad_accum)
    # Another effective batch is refused by check_same_run, and a split that is given in full needs none from here.
    is_another = not train.effective_follows and train.effective_batch_size != effective
    is_whole = given and not is_open and given * int(train.grad_accum) * ranks == effective
    if is_another or is_whole:
        return Kept(updates=updates)
    share, left = divmod(effective, ranks)
    if left:
        fitting = ", ".join(str(number) for number in divisors(effective) if number <= 2 * ranks)
        raise RunFolderError(
            f"the run cannot be resumed over {ranks} ranks: they do not divide its effective batch of {effective} "
            f"(it was stopped with {stopped.batch.ranks}); numbers that do: {fitting}"
        )
    micro = given or stopped.batch.micro_batch
    if share % micro and train.batch_size == "auto" and not stopped.oom_micro_batch:
        return Kept(updates=updates)
    micro = max(size for size in divisors(share) if size <= micro)
    return Kept(BatchPlan(micro, share // micro, ranks), updates)


def refuse_resuming(folder: RunFolder, stopped: PreviousRun | None, layout: LayoutName) -> None:
    """Raises RunFolderError, before anything loads, where a run's checkpoint cannot be resumed in this layout."""
    because = stopped.resume_obstacle(layout) if stopped else None
    if because is None or stopped is None:
        return
    from sft_play.training.checkpoints.checkpoints import last_complete_checkpoint

    if last_complete_checkpoint(folder.checkpoints) is None:
        return  # without a checkpoint it starts again from the first step
    raise RunFolderError(
        f"{folder.path} cannot be resumed: {because}; resume with STRATEGY={stopped.layout}, "
        f"or write out what it has learned so far: make consolidate RUN={folder.quoted}"
    )


# --- the plan ---------------------------------------------------------------------------------------------------------


def shape_for(config: RunConfig) -> ModelShape:
    """The model's shapes; for a class that the tables lack they are measured on the meta device. Raises ModelError
    where it is no model that a run with this config trains."""
    model = config.model
    fields = load_config_json(model.name, revision=model.revision)
    refuse_quantised(fields, name=model.name, mode=config.tuning.mode)
    refuse_remote_code(fields, name=model.name, allowed=model.trust_remote_code)
    shape = load_planned_shape(fields, name=model.name, trust_remote_code=model.trust_remote_code)
    published = published_params_note(model.name, model.revision, shape.params)
    stored = quantised_storage_note(fields, config.tuning.mode)
    shape = configured_shape(config, shape)
    return replace(shape, text_only_note=text_only_note(fields), storage_note=stored, published_note=published)


def has_eval(config: RunConfig) -> bool:
    """Whether evaluation batches run beside the training."""
    return config.data.val_fraction > 0 or has_held_out_file(config.data)


def backend_here(config: RunConfig, hardware: Hardware, *, layout: str, staged: bool = False) -> Backend:
    """The backend that trains a run on this machine; `staged`: in stages. Raises BackendError where Unsloth was asked
    for and cannot run it, and no fallback was named."""
    from sft_play.training.prepare import backend as backends

    backend = backends.choose_backend(
        config, layout=layout, nodes=hardware.nodes, is_rank=bool(rank_variables(os.environ)), is_stage=staged
    )
    if backend.name != "unsloth":
        return backend
    from sft_play.training.prepare.model_spec import build_model_spec  # imports torch, which is not needed before

    precision = choose_precision(config, hardware, shape_for(config))
    problem = backends.unsloth_model_problem(build_model_spec(config, precision, tokenizer_size=0), precision)
    return backends.fall_back(config, problem) if problem else backend


def trained_by(config: RunConfig, hardware: Hardware, only: tuple[LayoutName, ...] = LAYOUT_NAMES) -> Backend | None:
    """The backend that trains a run here, where it had to be chosen: not for bnb, nor on a machine that was only named.
    Raises as `backend_here` does."""
    if config.tuning.backend == "bnb" or hardware.named:
        return None
    usual: LayoutName = "ddp" if hardware.ranks > 1 else "single"
    return backend_here(config, hardware, layout=usual if usual in only or not only else only[0])


def layout_in_unsloth(loaded: LoadedConfig, options: LaunchOptions, hardware: Hardware) -> LayoutName | None:
    """The layout in which Unsloth's processes train a run; None where they do not. Raises BackendError where Unsloth
    was asked for and cannot run it, and no fallback was named."""
    if loaded.config.tuning.backend != "unsloth":
        return None
    layout = options.strategy or ("zero2" if options.deepspeed else "ddp" if hardware.ranks > 1 else "single")
    backend = backend_here(loaded.config, hardware, layout=layout, staged=bool(loaded.stages))
    return layout if backend.name == "unsloth" else None


def _as_trained(config: RunConfig, backend: Backend | None) -> RunConfig:
    if backend is None or backend.fallback_from is None:
        return config
    tuning = config.tuning.model_copy(update={"backend": backend.name, "backend_fallback": None})
    return config.model_copy(update={"tuning": tuning})


def plan_for(
    config: RunConfig,
    hardware: Hardware,
    *,
    only: tuple[LayoutName, ...] = LAYOUT_NAMES,
    trace: bool = False,
    with_suggestions: bool = True,
    keeps_params: bool = False,
    kept: Kept = NOTHING_KEPT,
    rows: RowTokens | None = None,
) -> Plan:
    """The plan with everything that is known here: earlier runs, the size of the data, a trace where asked for. `kept`:
    what a resumed run keeps; `rows`: their lengths, where the caller has counted them."""
    request = _request(config, hardware, only, rows=rows)
    # a resumed run's batch is fixed: there is nothing to suggest
    make = make_advised_plan if with_suggestions and kept.batch is None else make_plan
    return make(
        request,
        trace_candidate=_tracer(request.config, request.shape) if trace else None,
        estimate_length=_work(request.config, request.row_tokens),
        keeps_params=keeps_params,
        resumed_batch=kept.batch,
        resumed_updates=kept.updates,
    )


@contextlib.contextmanager
def advised(config: RunConfig, plan: Plan) -> Iterator[None]:
    """Adds to an error of memory that ran out what is predicted to need less, and whether resume takes it."""
    try:
        yield
    except OutOfMemory as error:
        ways = _needing_less(config, plan, error.batch) if error.batch is not None else []
        if not ways:
            raise
        raise OutOfMemory(f"{error}. Predicted to need less: {'; '.join(ways)}") from error.__cause__


def _needing_less(config: RunConfig, plan: Plan, batch: BatchPlan) -> list[str]:
    layers = plan.choice.checkpointed_layers if plan.choice.checkpointing == "selective" else plan.choice.checkpointing
    given: dict[str, Any] = {"batch_size": batch.micro_batch, "grad_accum": batch.grad_accum}
    given |= {} if plan.choice.step.offloads else {"gradient_checkpointing": layers}
    config = config.model_copy(update={"train": config.train.model_copy(update=given)})
    with contextlib.suppress(SftPlayError):
        request = _request(config, plan.hardware, (plan.layout,))
        ran = make_plan(request)
        earlier = [*request.measured_runs, measured_run(config, ran, ran_out_of=ran.budget_bytes)]
        ways = [way for way in find_suggestions(replace(request, measured_runs=earlier)) if way.fits]
        ways = [way for way in ways if way.hardware is None or way.required < ran.memory.required]
        return [f"{way.change} ({way.needs}; {'resume takes it' if _is_free(way) else 'a new run'})" for way in ways]
    return []


def _is_free(way: Suggestion) -> bool:
    return way.setting is not None and {word.partition("=")[0] for word in way.setting.split()} <= FREE_TO_CHANGE


def refuse_early(config: RunConfig, hardware: Hardware, *, only: tuple[LayoutName, ...]) -> None:
    """Raises as `plan_for` does what no length of the rows changes, without a plan."""
    check_plan_request(_request(config, hardware, only))


def _request(
    config: RunConfig, hardware: Hardware, only: tuple[LayoutName, ...], *, rows: RowTokens | None = None
) -> PlanRequest:
    hardware = machine_for(config, hardware)
    config = _as_trained(config, trained_by(config, hardware, only))
    return PlanRequest(
        config,
        shape_for(config),
        hardware,
        only,
        has_eval(config),
        measured_runs=[] if hardware.named else calibration.load_measured_runs(),  # runs here say nothing about a machine that is named
        row_tokens=rows or known_rows(config),
        missing_packages=missing_kernel_packages(),
        libraries=cuda_libraries(),
    )


def _tracer(config: RunConfig, shape: ModelShape) -> TraceCandidate:

    def confirm(candidate: Candidate) -> TracePrediction:
        from sft_play.trace.confirm import trace_candidate

        model = load_config_json(config.model.name, revision=config.model.revision)
        return trace_candidate(config, model, shape, candidate.precision, candidate)

    return confirm


def _work(config: RunConfig, known: RowTokens | None) -> Callable[[int], RunLength | None]:
    def work(effective: int) -> RunLength | None:
        if known is not None:
            per_epoch = math.ceil(known.rows / effective)
            known_steps = config.train.max_steps or max(1, math.ceil(per_epoch * config.train.epochs))
            return RunLength(known_steps, round(known.rows * known.mean * known_steps / per_epoch))
        text = config.task_mode == "cpt"
        size = rough_size(config.data, text_wanted=text)
        steps = config.train.max_steps
        if size is None:
            return RunLength(steps, None) if steps else None
        full = text or config.data.packing != "none"  # blocks and packs: every row has max_seq_len tokens
        rows = max(1, size.tokens // config.model.max_seq_len) if full else size.rows
        per_epoch = math.ceil(rows / effective)
        steps = steps or max(1, math.ceil(per_epoch * config.train.epochs))
        tokens = min(size.tokens, rows * config.model.max_seq_len)  # what longer rows have beyond that is cut
        return RunLength(steps, int(tokens * steps / per_epoch))

    return work


def log_plan(plan: Plan, config: RunConfig, *, stage: str | None = None) -> None:
    """Log the batch and whether it fits and how long it takes; beside them the choice with its reasons. Of a stage its
    batch is said when it begins."""
    shown = plan_details.batch_size_lines(plan, config) if stage is None else []
    of_stage = "" if stage is None else f"Stage {stage}: "
    for line in [
        plan_details.choice_line(plan),
        *plan_details.parameter_lines(plan, config),
        *plan_details.batch_lines(plan, config),
    ]:
        logger.log(logging.INFO if line in shown else logging.DEBUG, "%s", line)
    logger.info("%s%s", of_stage, fit_line(plan, config))
    for warning in plan_warnings(plan, config):
        logger.warning("%s%s", of_stage, warning)
    if not plan.fits:
        logger.warning("the given batch is predicted not to fit; it is tried because it was given")
