"""The training of a planned run in this process, alone, as one of several ranks, or by Unsloth's processes; what it
measured is kept beside what was predicted, for later plans on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import OutOfMemory, SftPlayError
from sft_play.launch.machine import prepare_libraries
from sft_play.launch.rank import check_rank_gpu
from sft_play.launch.run_plan import build_plan_request
from sft_play.launch.torchrun import RankInfo, rank_timeout_s, visible_gpu_variables
from sft_play.planner import calibration
from sft_play.planner.advice.suggestions import find_suggestions
from sft_play.planner.batching import BatchPlan
from sft_play.planner.kernels import CountedKernels, KernelsName
from sft_play.planner.plan import (
    Plan,
    PlanWithDeepSpeed,
    Suggestion,
    make_plan,
)
from sft_play.process import signals
from sft_play.process.imports import importing
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import WRITER
from sft_play.runs.manifest import FREE_TO_CHANGE_OPTIONS
from sft_play.training.measure.recorded import measured_run


def train_in_process(
    loaded: LoadedConfig,
    stage_plans: Sequence[PlanWithDeepSpeed],
    folder: RunFolder,
    *,
    rank_info: RankInfo | None,
    gpus: Sequence[int],
    sidecar: contextlib.AbstractContextManager[object],
    **job_fields: Any,
) -> None:
    """Import the libraries, train, and record the measured memory and speed for later plans.

    Args:
        rank_info: this process's place among ranks; None where it trains alone.
        gpus: the GPUs that were named for Unsloth's processes; empty for all that are visible.
        sidecar: what runs beside the training.
        job_fields: how the run starts; fields of `training.job.RunJob`.
    """
    plan, configs = stage_plans[0][0], [part.config for part in loaded.runs]
    if gpus and rank_info is None:
        os.environ.update(visible_gpu_variables(",".join(str(gpu) for gpu in gpus)))
    prepare_libraries(loaded.config.model.name, plan.hardware)
    if rank_info is not None:
        check_rank_gpu(plan, rank_info)  # asks the driver, so that nothing is loaded for a GPU that is refused
    with importing():
        from sft_play.training.job import build_run_job
        from sft_play.training.run import run_training

    is_single_process = rank_info is None and plan.choice.layout.ranks == 1
    timeout_s = loaded.config.distributed.timeout_s if is_single_process else rank_timeout_s(loaded.config, os.environ)
    lock_role = WRITER if rank_info is not None and rank_info.run_folder is not None else None
    job = build_run_job(loaded, stage_plans, folder, lock_role=lock_role, timeout_s=timeout_s, **job_fields)
    with signals.StopSignals(signals.raise_interrupt), sidecar, add_oom_advice(loaded.config, plan):
        summary = run_training(job)
    if rank_info is None or rank_info.is_first:
        # the configs have the starter's name, as plans look it up
        record_measurements([(config, plan) for config, (plan, _) in zip(configs, stage_plans, strict=True)], summary)


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


def record_measurements(configs_and_plans: Sequence[tuple[RunConfig, Plan]], summary: dict[str, Any]) -> None:
    """Record memory and speed for later plans; of stages only on GPUs: a CPU's peak is of the whole process."""
    stage_summaries = summary.get("stages")
    if stage_summaries is None:
        _record_stage(*configs_and_plans[0], summary)
        return
    for (config, plan), stage_summary in zip(configs_and_plans, stage_summaries, strict=False):
        if plan.hardware.gpus:
            _record_stage(config, plan, stage_summary)


def _record_stage(config: RunConfig, plan: Plan, summary: dict[str, Any]) -> None:
    if summary.get("backend") == "unsloth":
        return  # plans predict the other backend
    is_compiled = summary.get("compile") is not None
    if is_compiled != config.train.compile:
        return  # the plan's speed is that of compiled blocks, and the plain code ran
    # The highest peak, predicted and measured, over the phases whose batch the plan chooses: a plan compares this one.
    # The peaks of loading and saving say nothing about a batch.
    phases = [name for name in summary["peak_bytes_by_moment"] if name in ("training", "evaluation")]
    predicted_peaks = [plan.memory.by_moment[name] for name in phases if name in plan.memory.by_moment]
    measured_peaks = [summary["peak_bytes_by_moment"][name] for name in phases]
    peak_key = "measured_reserved" if plan.hardware.gpus else "measured_rss"
    reserved_bytes = max((peak[peak_key] or 0 for peak in measured_peaks), default=0)
    if not reserved_bytes or not predicted_peaks or not summary["tokens_per_s"] or summary.get("ran_out"):
        return  # it stopped before a step was measured, or its steps were smaller than planned
    # What was predicted for other kernels is no prediction of this run: 0 leaves it out of the calibration.
    used_kernels: KernelsName = "liger" if (summary.get("kernels") or {}).get("used") else "plain"
    counted_kernels = plan.kernels or CountedKernels()
    figures = {
        "predicted_allocated": max(allocated for allocated, _ in predicted_peaks),
        "predicted_reserved": max(bytes_reserved for _, bytes_reserved in predicted_peaks),
        "measured_allocated": max(peak["measured_allocated"] or 0 for peak in measured_peaks),
        "measured_reserved": reserved_bytes,
        "predicted_tokens_per_s": plan.choice.uncorrected.tokens_per_s
        if counted_kernels.speed == used_kernels
        else 0.0,
        "measured_tokens_per_s": summary["tokens_per_s"],
        "compiled": is_compiled,
        "kernels": used_kernels,
    }
    if counted_kernels.memory != used_kernels:
        figures |= {"predicted_allocated": 0, "predicted_reserved": 0}
    calibration.add_measured_run(measured_run(config, plan, **figures))
