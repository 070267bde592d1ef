"""A run as later plans on this machine remember it: what was planned, beside what came of it. Imports no torch."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.planner import calibration
from sft_play.planner.calibration import MeasuredRun
from sft_play.planner.kernels import CountedKernels, KernelsName
from sft_play.planner.plan import Plan
from sft_play.runs.folder import installed_versions


def measured_run(config: RunConfig, plan: Plan, **measurements: Any) -> MeasuredRun:
    """Build the record of a run, or of a step that ran out of memory; `measurements`: other fields of `MeasuredRun`."""
    gpus = plan.hardware.gpus
    fields: dict[str, Any] = {
        "predicted_allocated": plan.memory.allocated,
        "measured_allocated": 0,
        "predicted_reserved": plan.choice.uncorrected.reserved,
        "measured_reserved": 0,
        "predicted_tokens_per_s": 0.0,
        "measured_tokens_per_s": 0.0,
        "kernels": (plan.kernels or CountedKernels()).memory,
        "compiled": config.train.compile,
    }
    return MeasuredRun(
        device=gpus[0].name if gpus else "cpu",
        mode=config.tuning.mode,
        layout=plan.layout,
        model=config.model.name,
        micro_batch=plan.batch.micro_batch,
        seq_len=plan.max_seq_len,
        versions=" ".join(f"{name} {version}" for name, version in sorted(installed_versions().items())),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        **fields | measurements,
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
