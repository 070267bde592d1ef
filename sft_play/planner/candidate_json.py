"""A candidate as plain data for `plan --json` and `plan.json`, and back.

Every figure of a candidate is written, so that a rank that receives a plan has what its parent has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sft_play.planner.batching import BatchPlan
from sft_play.planner.calibration import Raw
from sft_play.planner.candidates import Candidate, Room
from sft_play.planner.layout import Layout
from sft_play.planner.memory.estimate import MemoryEstimate
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.planner.speed.throughput import Speed

_NAMES = {"host_bytes": "host", "load_bytes": "load"}
"""Fields of the memory estimate with other names in the JSON."""


def candidate_json(candidate: Candidate, *, speed_known: bool) -> dict[str, Any]:
    """The fields that scripts read, and everything else that a plan holds of a candidate."""
    memory, batch, speed = candidate.memory, candidate.batch, candidate.speed
    step = asdict(candidate.step)
    del step["layout"]
    if not step["cudnn"]:  # plans without it keep the JSON that they had
        del step["cudnn"]
    training = [size for name, size in memory.moments.items() if name not in ("evaluation", "saving")]
    offloaded = memory.host_bytes - memory.host_save_bytes - memory.host_save_each_bytes
    return {
        "fits": candidate.fits,
        "verdict": candidate.verdict,
        "short_of": list(candidate.short_of),
        "layout": candidate.layout.name,
        "ranks": candidate.layout.ranks,
        "data_parallel_ranks": candidate.layout.data_parallel,
        "shard_ranks": candidate.layout.shard,
        "tensor_parallel_ranks": candidate.layout.tensor_parallel,
        "context_parallel_ranks": candidate.layout.context_parallel,
        "keeps_params": candidate.layout.keeps_params,
        "micro_batch": batch.micro_batch,
        "grad_accum": batch.grad_accum,
        "effective_batch": batch.effective_batch,
        "gradient_checkpointing": candidate.checkpointing,
        "checkpointed_layers": candidate.checkpointed,
        "loss": candidate.step.loss,
        "peak_bytes": {
            **{_NAMES.get(name, name): value for name, value in asdict(memory).items()},
            "allocated": memory.allocated,
            "step": max(training, default=memory.allocated),
            "evaluate": memory.moments.get("evaluation"),
            "generate": memory.allocated,  # answers are generated in batches that take no more than the peak
            "save": memory.moments.get("saving"),
            "required": memory.required,
            "budget": candidate.room.device,
            "host_required": candidate.host_required,
            "host_budget": candidate.room.host,
        },
        "host": {  # of the first rank, which writes
            "load": memory.host_load_bytes,
            **dict.fromkeys(("step", "evaluate", "generate"), offloaded),
            "save": memory.host_bytes,
        },
        "tokens_per_s": speed.tokens_per_s if speed_known else None,
        "step_s": speed.step_s if speed_known else None,
        "moved_bytes_per_step": speed.moved_bytes,
        "confirmed_by_trace": candidate.traced,
        "rejected_because": candidate.rejected_because,
        "precision": asdict(candidate.precision),
        "step": step,
        "layers": candidate.layers,
        "roofline": asdict(speed),
        "uncorrected": asdict(candidate.raw),
    }


def candidate_from_json(data: Mapping[str, Any]) -> Candidate:
    """The candidate that `candidate_json` wrote."""
    layout = Layout(
        data["layout"],
        data["data_parallel_ranks"],
        data["shard_ranks"],
        data["tensor_parallel_ranks"],
        data.get("context_parallel_ranks", 1),
        data["keeps_params"],
    )
    peak, step = data["peak_bytes"], dict(data["step"])
    step["capability"] = tuple(step["capability"]) if step["capability"] else None
    return Candidate(
        layout=layout,
        batch=BatchPlan(data["micro_batch"], data["grad_accum"], data["data_parallel_ranks"]),
        step=Step(**step, layout=layout),
        precision=Precision(**data["precision"]),
        memory=MemoryEstimate(
            **{field.name: peak[_NAMES.get(field.name, field.name)] for field in fields(MemoryEstimate)}
        ),
        speed=Speed(**data["roofline"]),
        room=Room(peak["budget"], peak["host_budget"]),
        host_required=peak["host_required"],
        raw=Raw(**data["uncorrected"]),
        layers=data["layers"],
        rejected_because=data["rejected_because"],
        traced=data["confirmed_by_trace"],
    )
