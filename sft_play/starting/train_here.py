"""The training of a planned run in this process, alone, as one of several ranks, or by Unsloth's processes; what it
measured is kept beside what was predicted, for later plans on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.launch.command import timeout_of, visible_only
from sft_play.launch.exported import Ranks
from sft_play.launch.machine import check_gpu, prepare_libraries
from sft_play.planner import calibration
from sft_play.planner.kernels import CountedKernels, KernelsName
from sft_play.planner.plan import Plan, PlanWithDeepSpeed
from sft_play.process import signals
from sft_play.process.imports import importing
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import WRITER
from sft_play.starting.plan_run import advised
from sft_play.training.measure.recorded import measured_run


def train_here(
    loaded: LoadedConfig,
    planned: Sequence[PlanWithDeepSpeed],
    folder: RunFolder,
    *,
    ranks: Ranks | None,
    gpus: Sequence[int],
    beside: contextlib.AbstractContextManager[object],
    **start: Any,
) -> None:
    """Import the libraries and run; what was measured is remembered.

    Args:
        ranks: this process's place among ranks; None where it trains alone.
        gpus: the GPUs that were named for Unsloth's processes; empty for all that are visible.
        beside: what runs beside the training.
        start: how the run starts; fields of `training.job.RunJob`.
    """
    plan, configs = planned[0][0], [part.config for part in loaded.parts]
    if gpus and ranks is None:
        os.environ.update(visible_only(",".join(str(gpu) for gpu in gpus)))
    prepare_libraries(loaded.config.model.name, plan.hardware)
    if ranks is not None:
        check_gpu(plan, ranks)  # asks the driver, so that nothing is loaded for a GPU that is refused
    with importing():
        from sft_play.training.job import build_run_job
        from sft_play.training.run import run_training

    is_alone = ranks is None and plan.choice.layout.ranks == 1
    timeout_s = loaded.config.distributed.timeout_s if is_alone else timeout_of(loaded.config, os.environ)
    by = WRITER if ranks is not None and ranks.folder is not None else None
    job = build_run_job(loaded, planned, folder, lock_role=by, timeout_s=timeout_s, **start)
    with signals.StopSignals(signals.interrupt), beside, advised(loaded.config, plan):
        summary = run_training(job)
    if ranks is None or ranks.is_first:
        # the configs have the starter's name, as plans look it up
        remember([(config, plan) for config, (plan, _) in zip(configs, planned, strict=True)], summary)


def remember(planned: Sequence[tuple[RunConfig, Plan]], summary: dict[str, Any]) -> None:
    """Keep what was measured; of stages only those on GPUs, since a CPU's peak is that of the whole process."""
    of_stages = summary.get("stages")
    if of_stages is None:
        _remember_one(*planned[0], summary)
        return
    for (config, plan), one in zip(planned, of_stages, strict=False):
        if plan.hardware.gpus:
            _remember_one(config, plan, one)


def _remember_one(config: RunConfig, plan: Plan, summary: dict[str, Any]) -> None:
    if summary.get("backend") == "unsloth":
        return  # plans predict the other backend
    compiled = summary.get("compile") is not None
    if compiled != config.train.compile:
        return  # the plan's speed is that of compiled blocks, and the plain code ran
    # The run's highest of the moments whose batch the plan chooses, predicted and measured, whichever moments they are:
    # it is what a plan compares. What loading and saving take says nothing of a batch.
    moments = [name for name in summary["peak_bytes_by_moment"] if name in ("training", "evaluation")]
    predicted = [plan.memory.by_moment[name] for name in moments if name in plan.memory.by_moment]
    measured = [summary["peak_bytes_by_moment"][name] for name in moments]
    key = "measured_reserved" if plan.hardware.gpus else "measured_rss"
    reserved = max((peak[key] or 0 for peak in measured), default=0)
    if not reserved or not predicted or not summary["tokens_per_s"] or summary.get("ran_out"):
        return  # it stopped before a step was measured, or its steps were smaller than planned
    # What was predicted for other kernels is no prediction of this run: 0 leaves it out of the calibration.
    used: KernelsName = "liger" if (summary.get("kernels") or {}).get("used") else "plain"
    counted = plan.kernels or CountedKernels()
    found = {
        "predicted_allocated": max(allocated for allocated, _ in predicted),
        "predicted_reserved": max(bytes_reserved for _, bytes_reserved in predicted),
        "measured_allocated": max(peak["measured_allocated"] or 0 for peak in measured),
        "measured_reserved": reserved,
        "predicted_tokens_per_s": plan.choice.uncorrected.tokens_per_s if counted.speed == used else 0.0,
        "measured_tokens_per_s": summary["tokens_per_s"],
        "compiled": compiled,
        "kernels": used,
    }
    if counted.memory != used:
        found |= {"predicted_allocated": 0, "predicted_reserved": 0}
    calibration.add_measured_run(measured_run(config, plan, **found))
