"""The plan of a run: precision, batch, predicted peak, and the reasons, before anything loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit
from sft_play.facts.architecture import ModelShape
from sft_play.facts.hardware import Hardware
from sft_play.plan.batching import BatchPlan, divisors, plan_batch
from sft_play.plan.memory import GIB, MemoryEstimate, Step, estimate
from sft_play.plan.precision import SHORT, Precision, choose_precision

BUSY_TOKENS = ((20_000_000_000, 8_192), (3_000_000_000, 16_384), (0, 32_768))
"""Tokens per pass that keep a GPU busy, by the model's least parameters: published speeds at 7-8B reach 96 to 99%
of their plateau with 16k tokens (fms-acceleration, one A100); larger models need fewer."""


@dataclass(frozen=True)
class Candidate:
    """A micro-batch and accumulation that was weighed; `rejected_because` is None for the chosen one."""

    layout: str
    batch: BatchPlan
    memory: MemoryEstimate
    fits: bool
    rejected_because: str | None

    def as_json(self, budget: int) -> dict[str, Any]:
        """The plan's fields for this candidate."""
        return {
            "fits": self.fits,
            "layout": self.layout,
            "rejected_because": self.rejected_because,
            **_batch_json(self.batch),
            "peak_bytes": _peak_json(self.memory, budget),
        }


@dataclass(frozen=True)
class WayOut:
    """A change of the run YAML that would need less memory: bytes that must be free, of one rank."""

    change: str
    required: int


@dataclass(frozen=True)
class Plan:
    """What a run will do. Bytes are per rank; `max_seq_len` is what the model's positions leave of the wish.

    Where nothing fits, `batch` is the smallest there is and `ways_out` says what would need less.
    """

    layout: str
    precision: Precision
    batch: BatchPlan
    max_seq_len: int
    eval_batch: int
    gradient_checkpointing: bool
    memory: MemoryEstimate
    budget_bytes: int
    fits: bool
    model_params: int
    hardware: Hardware
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    ways_out: tuple[WayOut, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The one JSON object of `plan --json` and `plan.json`: bytes as integers."""
        return {
            "fits": self.fits,
            "layout": self.layout,
            **_batch_json(self.batch),
            "eval_batch": self.eval_batch,
            "max_seq_len": self.max_seq_len,
            "precision": asdict(self.precision),
            "gradient_checkpointing": self.gradient_checkpointing,
            "peak_bytes": _peak_json(self.memory, self.budget_bytes),
            "tokens_per_s": None,
            "confirmed_by_trace": False,
            "model_params": self.model_params,
            "hardware": self.hardware.as_json(),
            "reasons": list(self.reasons),
            "candidates": [candidate.as_json(self.budget_bytes) for candidate in self.candidates],
            "ways_out": [asdict(way) for way in self.ways_out],
        }


def _batch_json(batch: BatchPlan) -> dict[str, int]:
    return {
        "ranks": batch.ranks,
        "data_parallel_ranks": batch.ranks,
        "micro_batch": batch.micro_batch,
        "grad_accum": batch.grad_accum,
        "effective_batch": batch.effective_batch,
    }


def _peak_json(memory: MemoryEstimate, budget: int) -> dict[str, Any]:
    return {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "budget": budget,
        "margin": memory.margin,
        "outside_allocator": memory.outside_allocator,
        "terms": memory.terms,
    }


def make_plan(config: RunConfig, shape: ModelShape, hardware: Hardware, *, ranks: int = 1) -> Plan:
    """The plan of a run on `ranks` GPUs of `hardware` (or in its RAM), each holding the whole model.

    Raises:
        ConfigError: batch sizes that do not divide, a mesh of several processes.
    """
    check_mesh(config)
    precision = choose_precision(config, hardware)
    seq_len, seq_reason = _seq_len(config, shape)
    budget = budget_bytes(hardware)
    busy = max(1, _busy_tokens(shape) // seq_len)

    def peak(micro: int, accum: int, changed: RunConfig = config) -> MemoryEstimate:
        length = min(seq_len, changed.model.max_seq_len)
        return estimate(changed, shape, precision, Step(micro, accum, length, ranks, bool(hardware.gpus)))

    batch = plan_batch(
        config.train, ranks=ranks, micro_limit=busy, fits=lambda micro, accum: peak(micro, accum).required <= budget
    )
    if batch is None:
        per_rank = config.train.effective_batch_size // ranks
        batch = BatchPlan(1, per_rank, ranks, "nothing fits, not even one sequence a pass")
    memory = peak(batch.micro_batch, batch.grad_accum)
    fits = memory.required <= budget
    reasons = [precision.reason, *seq_reason, batch.reason, *_advice(config, precision, fits, memory, budget)]
    return Plan(
        layout=_layout(ranks),
        precision=precision,
        batch=batch,
        max_seq_len=seq_len,
        eval_batch=batch.micro_batch if config.eval.batch_size == "auto" else config.eval.batch_size,
        gradient_checkpointing=config.train.gradient_checkpointing,
        memory=memory,
        budget_bytes=budget,
        fits=fits,
        model_params=shape.params,
        hardware=hardware,
        reasons=tuple(reasons),
        candidates=tuple(_candidates(batch, peak, budget)),
        ways_out=()
        if fits
        else tuple(WayOut(change, peak(1, 1, other).required) for change, other in _smaller(config, seq_len)),
    )


def _layout(ranks: int) -> str:
    return "ddp" if ranks > 1 else "single"


def _candidates(chosen: BatchPlan, peak: Callable[[int, int], MemoryEstimate], budget: int) -> Iterator[Candidate]:
    """Every split of the effective batch over passes, with its peak and why it was not taken."""
    per_rank = chosen.micro_batch * chosen.grad_accum
    for micro in divisors(per_rank):
        memory = peak(micro, per_rank // micro)
        fits = memory.required <= budget
        because: str | None = None
        if micro != chosen.micro_batch:
            because = f"needs {memory.required / GIB:.1f} of {budget / GIB:.1f} GiB"
            if fits:
                larger = micro > chosen.micro_batch
                because = "more tokens a pass than keep the device busy" if larger else "smaller passes than fit"
        batch = BatchPlan(micro, per_rank // micro, chosen.ranks, "")
        yield Candidate(_layout(chosen.ranks), batch, memory, fits, because)


def require_fit(plan: Plan, config: RunConfig) -> None:
    """Raises DoesNotFit when the batch was left to the plan and nothing fits; a batch that was given is tried."""
    train = config.train
    if plan.fits or train.batch_size != "auto" or train.grad_accum != "auto":
        return
    where = plan.hardware.gpus[0].name if plan.hardware.gpus else "this machine's free memory"
    largest = sorted(plan.memory.terms.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    ways = ", ".join(f"{way.change} ({way.required / GIB:.1f} GiB)" for way in plan.ways_out)
    raise DoesNotFit(
        f"{config.model.name} with tuning.mode={config.tuning.mode} does not fit: one sequence of {plan.max_seq_len} "
        f"tokens needs {plan.memory.required / GIB:.1f} GiB ({parts}), and {where} has "
        f"{plan.budget_bytes / GIB:.1f} GiB; try {ways or 'a smaller model'}, or set train.batch_size=1 to start all "
        "the same"
    )


def _smaller(config: RunConfig, seq_len: int) -> Iterator[tuple[str, RunConfig]]:
    """Changes that need less memory, the least harmful first, each with the config that it makes."""
    if not config.train.gradient_checkpointing:
        train = config.train.model_copy(update={"gradient_checkpointing": True})
        yield "train.gradient_checkpointing=true", config.model_copy(update={"train": train})
    if seq_len > 512:
        half = seq_len // 2
        model = config.model.model_copy(update={"max_seq_len": half})
        yield f"model.max_seq_len={half}", config.model_copy(update={"model": model})
    if config.tuning.mode != "full" and config.tuning.lora.r > 16:
        lora = config.tuning.lora.model_copy(update={"r": 16})
        yield "tuning.lora.r=16", config.model_copy(update={"tuning": config.tuning.model_copy(update={"lora": lora})})
    if config.tuning.mode != "qlora":
        tuning = config.tuning.model_copy(update={"mode": "qlora"})
        yield "tuning.mode=qlora", config.model_copy(update={"tuning": tuning})


def check_mesh(config: RunConfig) -> None:
    """Raises ConfigError for a device mesh of more than one process: those layouts are not built."""
    mesh = config.model.mesh_shape
    if mesh is None:
        return
    sizes = (mesh,) if isinstance(mesh, int) else mesh[0] if mesh and isinstance(mesh[0], tuple) else mesh
    numbers = [size for size in sizes if isinstance(size, int)]
    count = math.prod(numbers)
    if count != 1:
        raise ConfigError(
            f"model.mesh_shape={_shown(mesh)} is a mesh of {count} processes; the layouts there are: one process "
            "(`make train`, model.mesh_shape=null or 1)"
        )


def _shown(mesh: object) -> str:
    return str(mesh).replace("(", "[").replace(",)", "]").replace(")", "]")


def budget_bytes(hardware: Hardware) -> int:
    """Bytes that the smallest GPU has free (all of it when only named), or the host's free RAM."""
    if not hardware.gpus:
        return hardware.ram_free_bytes
    return min(gpu.total_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in hardware.gpus)


def _busy_tokens(shape: ModelShape) -> int:
    return next(tokens for least, tokens in BUSY_TOKENS if shape.params >= least)


def _seq_len(config: RunConfig, shape: ModelShape) -> tuple[int, list[str]]:
    wish, positions = config.model.max_seq_len, shape.max_positions
    if positions is None or wish <= positions:
        return wish, []
    return positions, [f"max_seq_len {positions} instead of {wish}: the model has {positions} positions"]


def _advice(config: RunConfig, precision: Precision, fits: bool, memory: MemoryEstimate, budget: int) -> list[str]:
    reasons = []
    if config.tuning.mode == "full" and precision.load != "float32":
        reasons.append("full in half precision keeps AdamW's states in it too; model.dtype=float32 for fp32 states")
    if not fits:
        reasons.append(
            f"the batch that was given is predicted to need {memory.required / GIB:.1f} GiB of {budget / GIB:.1f} GiB"
        )
    return reasons


def detected_lines(hardware: Hardware) -> list[str]:
    """The lines that say what machine was found: one per GPU with its memory, and their sum.

    Memory is printed in units of 2**30 bytes under the name people know it by, GB.
    """
    if not hardware.gpus:
        ram = hardware.ram_bytes / GIB
        return [f"Detected no GPU: running on the CPU ({hardware.cpu_name}, {hardware.cpu_cores} cores, {ram:.1f} GB)"]
    count = len(hardware.gpus)
    lines = [f"Detected {count} GPU{'s' if count > 1 else ''}:"]
    lines += [f"  GPU {gpu.index}: {gpu.name} ({gpu.total_bytes / GIB:.1f} GB)" for gpu in hardware.gpus]
    return [lines[0] + "".join(f"\n{line}" for line in lines[1:]), _total_line(hardware)]


def _total_line(hardware: Hardware) -> str:
    return f"Total VRAM: {sum(gpu.total_bytes for gpu in hardware.gpus) / GIB:.1f} GB"


def batch_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The lines that say the batch, word for word as users know them, then why, and the predicted peak."""
    auto = config.train.batch_size == "auto" or config.train.grad_accum == "auto"
    each = "per GPU" if plan.hardware.gpus else "per process"
    word = "Auto-calculated batch size" if auto else "Batch size"
    return [
        f"{word}: {plan.batch.micro_batch} {each}, gradient accumulation: {plan.batch.grad_accum}",
        f"Effective batch size: {plan.batch.effective_batch}",
        *(f"Because: {reason}" for reason in plan.reasons),
        memory_line(plan),
    ]


def memory_line(plan: Plan) -> str:
    """The predicted peak of one rank and what it is made of, in GiB."""
    terms = ", ".join(
        f"{name.replace('_', ' ')} {size / GIB:.2f}"
        for name, size in plan.memory.terms.items()
        if size >= 0.005 * plan.memory.allocated
    )
    return (
        f"Predicted peak: {plan.memory.allocated / GIB:.2f} GiB ({terms}); with allocator slack, margin and context "
        f"{plan.memory.required / GIB:.2f} of {plan.budget_bytes / GIB:.1f} GiB"
    )


def precision_name(plan: Plan) -> str:
    """The short name of the compute precision: bf16, fp16, fp32."""
    return SHORT[plan.precision.compute]
