"""A run as later plans on this machine remember it: what was planned, beside what came of it. Imports no torch."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.planner.calibration import MeasuredRun
from sft_play.planner.kernels import CountedKernels
from sft_play.planner.plan import Plan
from sft_play.runs.manifest import installed_versions


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
