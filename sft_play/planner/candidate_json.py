"""A candidate as plain data for `plan --json` and `plan.json`, and back.

Every figure of a candidate is written, so that a rank that receives a plan has what its parent has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from sft_play.planner.candidates import Candidate
from sft_play.planner.memory.estimate import MemoryEstimate

# Fields of the memory estimate with other names in the JSON.
_MEMORY_NAMES = {"host_bytes": "host", "load_bytes": "load"}
# The JSON's name of each field of the layout.
_LAYOUT_NAMES = {
    "name": "layout", "data_parallel": "data_parallel_ranks", "shard": "shard_ranks",
    "tensor_parallel": "tensor_parallel_ranks", "context_parallel": "context_parallel_ranks",
    "keeps_params": "keeps_params",
}  # fmt: skip


def candidate_json(candidate: Candidate, *, speed_known: bool) -> dict[str, Any]:
    """The fields that scripts read, and everything else that a plan holds of a candidate."""
    memory, batch, speed = candidate.memory, candidate.batch, candidate.speed
    # as every run does; plans keep the JSON that they had, and without cuDNN's kernel
    step = asdict(candidate.step) | {"repeats_kv": True}
    del step["layout"]
    if not step["cudnn"]:
        del step["cudnn"]
    offloaded_bytes = memory.host_bytes - memory.host_save_bytes - memory.host_save_each_bytes
    return {
        "fits": candidate.fits,
        "verdict": candidate.verdict,
        "short_of": list(candidate.insufficient_memory),
        **{key: getattr(candidate.layout, name) for name, key in _LAYOUT_NAMES.items()},
        "ranks": candidate.layout.ranks,
        "micro_batch": batch.micro_batch,
        "grad_accum": batch.grad_accum,
        "effective_batch": batch.effective_batch,
        "gradient_checkpointing": candidate.checkpointing,
        "checkpointed_layers": candidate.checkpointed_layers,
        "loss": candidate.step.loss,
        "peak_bytes": {
            **{_MEMORY_NAMES.get(name, name): value for name, value in asdict(memory).items()},
            "allocated": memory.allocated,
            "step": memory.by_moment.get("training", (memory.allocated,))[0],
            "evaluate": memory.moments.get("evaluation"),
            "generate": memory.allocated,  # answers are generated in batches that take no more than the peak
            "save": memory.moments.get("saving"),
            "required": memory.required,
            "budget": candidate.budget.device,
            "host_required": candidate.host_required,
            "host_budget": candidate.budget.host,
        },
        "host": {  # of the first rank, which writes
            "load": memory.host_load_bytes,
            **dict.fromkeys(("step", "evaluate", "generate"), offloaded_bytes),
            "save": memory.host_bytes,
        },
        "tokens_per_s": speed.tokens_per_s if speed_known else None,
        "step_s": speed.step_s if speed_known else None,
        "moved_bytes_per_step": speed.moved_bytes,
        "confirmed_by_trace": candidate.is_traced,
        "rejected_because": candidate.rejected_because,
        "precision": asdict(candidate.precision),
        "step": step,
        "layers": candidate.layers,
        "roofline": asdict(speed),
        "uncorrected": asdict(candidate.uncorrected),
    }


def candidate_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `candidate_json` wrote, by the fields of a candidate."""
    peak = data["peak_bytes"]
    names = {field.name: _MEMORY_NAMES.get(field.name, field.name) for field in fields(MemoryEstimate)}
    layout = {name: data.get(key, 1) for name, key in _LAYOUT_NAMES.items()}
    return {
        **{name: data[name] for name in ("precision", "layers", "rejected_because")},
        "layout": layout,
        "batch": {**data, "ranks": data["data_parallel_ranks"]},
        "step": {**data["step"], "layout": layout},
        # a plan of an earlier version has fewer
        "memory": {name: peak[key] for name, key in names.items() if key in peak},
        "speed": data["roofline"],
        "budget": {"device": peak["budget"], "host": peak["host_budget"]},
        "host_required": peak["host_required"],
        "uncorrected": data["uncorrected"],
        "is_traced": data["confirmed_by_trace"],
    }
