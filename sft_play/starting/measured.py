"""What a run measured, kept beside what was predicted, for later plans on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.planner import calibration
from sft_play.planner.kernels import CountedKernels, KernelsName
from sft_play.planner.plan import Plan
from sft_play.runs.manifest import versions


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
    """Keep what the run measured beside what was predicted without help from earlier runs."""
    if summary.get("backend") == "unsloth":
        return  # plans predict the other backend
    compiled = summary.get("compile") is not None
    if compiled != config.train.compile:
        return  # the plan's speed is that of compiled blocks, and the plain code ran
    peak, gpus = summary["peak_bytes"], plan.hardware.gpus
    reserved = peak["measured_reserved"] if gpus else peak["measured_rss"]
    if not reserved or not summary["tokens_per_s"]:
        return  # it stopped before a step was measured
    # What was predicted for other kernels is no prediction of this run: 0 leaves it out of the calibration.
    used: KernelsName = "liger" if (summary.get("kernels") or {}).get("used") else "plain"
    counted = plan.kernels or CountedKernels()
    is_memory, is_speed = counted.memory == used, counted.speed == used
    calibration.add(
        calibration.Measured(
            device=gpus[0].name if gpus else "cpu",
            mode=config.tuning.mode,
            layout=plan.layout,
            model=config.model.name,
            micro_batch=plan.batch.micro_batch,
            seq_len=plan.max_seq_len,
            predicted_allocated=plan.memory.allocated if is_memory else 0,
            measured_allocated=peak["measured_allocated"] or 0,
            predicted_reserved=plan.choice.raw.reserved if is_memory else 0,
            measured_reserved=reserved,
            predicted_tokens_per_s=plan.choice.raw.tokens_per_s if is_speed else 0.0,
            measured_tokens_per_s=summary["tokens_per_s"],
            versions=" ".join(f"{name} {version}" for name, version in sorted(versions().items())),
            compiled=compiled,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            kernels=used,
        )
    )
