"""The plan of a run: layout, precision, batch, predicted peak and speed, and the reasons, before anything loads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit
from sft_play.facts.hardware import Hardware
from sft_play.facts.installed import PINNED, CudaLibraries
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner import calibration
from sft_play.planner.attention import attention_of
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidate_json import candidate_from_json, candidate_json
from sft_play.planner.candidates import (
    Candidate,
    Job,
    candidate_of,
    choose,
    eval_batch,
    least,
    micro_batches,
    needs_words,
    thriftiest,
    weigh,
    weigh_updates,
)
from sft_play.planner.kernels import CountedKernels, counted_kernels, planned_experts
from sft_play.planner.layout import LAYOUT_NAMES, Layout, LayoutName, NotPossible, layouts_for, with_context_parallel
from sft_play.planner.memory.estimate import MemoryEstimate, answer_tokens
from sft_play.planner.memory.measured_walk import walk_of
from sft_play.planner.memory.step_memory import is_padded
from sft_play.planner.memory.structure import check_targets, repeats_kv
from sft_play.planner.micro_batches import MicroBatches, RowTokens
from sft_play.planner.parameters import Parameters, parameters_of
from sft_play.planner.precision import Precision, Updates, choose_precision
from sft_play.planner.reasons import reasons_of, shown
from sft_play.planner.speed.other_code import compile_s, refuse_beside_compiling
from sft_play.planner.speed.speed_error import SpeedError, speed_error
from sft_play.planner.speed.throughput import Speed, rates_of, utilisation
from sft_play.units import GIB

SHORTEST = 8
"""Tokens of a row that a plan counts at least, as the shortest model.max_seq_len."""
TRACE_TOLERANCE = 0.03
"""Difference between estimate and trace from which the plan reports it."""


@dataclass(frozen=True)
class Traced:
    """What a trace of the chosen step measured: bytes of one rank. `unavailable` says why there is none."""

    allocated: int = 0
    reserved: int = 0
    unavailable: str | None = None


ActivationsFrom = Literal["blocks", "measured", "trace"]
Confirm = Callable[[Candidate], Traced]
"""Traces a candidate's step."""


@dataclass(frozen=True)
class Suggestion:
    """A change that would need less memory, or provide more. Bytes are those of one rank.

    `setting` is what to add to SET, `hardware` what to name instead of the present machine; one of them is None.
    `needs` are those bytes in words, with the RAM of a layout that offloads.
    """

    change: str
    allocated: int
    required: int
    fits: bool
    needs: str
    setting: str | None = None
    hardware: str | None = None


@dataclass(frozen=True)
class Work:
    """The amount of training: optimizer steps, and tokens without padding as estimated from the file's size."""

    steps: int
    tokens: int | None


@dataclass(frozen=True)
class Plan:
    """What a run will do. Bytes are per rank; `max_seq_len` is limited to the model's positions.

    Where nothing fits, the choice is the closest to fitting, `suggestions` say what would fit, and `not_enough` what
    was tried and would not.
    """

    choice: Candidate
    precision: Precision
    max_seq_len: int
    repeats_kv: bool
    """Whether sdpa repeats keys and values for all heads, because grouped ones would use PyTorch's math kernel."""
    eval_batch: int
    """Rows that a rank evaluates at once."""
    masked_bytes: int | None
    """What the choice would require of a device if its padded rows and packs came with a mask; None where they do, or
    need none anyway."""
    answer_tokens: int
    """Tokens of prompts and answers that are generated at once."""
    budget_bytes: int
    model_params: int
    hardware: Hardware
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    not_possible: tuple[NotPossible, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    not_enough: tuple[Suggestion, ...] = ()
    speed_known: bool = False
    speed_error: SpeedError | None = None
    """How far the speed may be off; None where it is not known."""
    mfu: float | None = None
    work: Work | None = None
    micro_batches: MicroBatches = field(default_factory=lambda: MicroBatches(1))
    """How the rows of a step become micro-batches."""
    row_tokens: RowTokens | None = None
    """The lengths of the run's rows; None where they are not known."""
    kernels: CountedKernels | None = None
    """The kernels that memory and speed count; None where the config leaves the model's own."""
    compile_s: float = 0.0
    """Seconds of compiling blocks at the start of the run."""
    activations_from: ActivationsFrom = "blocks"
    """What the choice's activations are from: the estimate of the class's blocks, its blocks as they were measured,
    or a trace of the whole step."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's config as it was given or shipped, with its "auto": what a resumed run, or a repetition, starts with.
    None where another engine runs."""
    parameters: Parameters | None = None
    """What is quantised, adapted and trained; None in a plan of an earlier version."""

    @property
    def layout(self) -> LayoutName:
        """The name of the layout."""
        return self.choice.layout.name

    @property
    def batch(self) -> BatchPlan:
        """Micro-batch, accumulation and data-parallel ranks."""
        return self.choice.batch

    @property
    def counted_batch(self) -> BatchPlan:
        """The batch as trainers count it, who know a fixed number of passes a step: the most that one can take."""
        rows = self.batch.effective_batch // self.batch.ranks
        passes = self.micro_batches.most_passes(rows)
        return BatchPlan(rows // passes, passes, self.batch.ranks)

    @property
    def memory(self) -> MemoryEstimate:
        """The predicted peak of one rank."""
        return self.choice.memory

    @property
    def speed(self) -> Speed:
        """The predicted step."""
        return self.choice.speed

    @property
    def fits(self) -> bool:
        """Whether the choice fits with its margin."""
        return self.choice.fits

    @property
    def hours(self) -> float | None:
        """Hours of the whole run with its compiling, and every row at full length where the rows' lengths are not
        known; None where the work or the speed is unknown."""
        if self.work is None or not self.speed_known:
            return None
        return (self.work.steps * self.speed.step_s + self.compile_s) / 3600

    def as_json(self) -> dict[str, Any]:
        """The one JSON object of `plan --json` and `plan.json`: bytes as integers, rates per second."""
        return {
            **candidate_json(self.choice, speed_known=self.speed_known),
            "speed_known": self.speed_known,
            "speed_error": asdict(self.speed_error) if self.speed_error else None,
            "activations_from": self.activations_from,
            "repeats_kv": self.repeats_kv,
            "eval_batch": self.eval_batch,
            "masked_bytes": self.masked_bytes,
            "answer_tokens": self.answer_tokens,
            "micro_batches": asdict(self.micro_batches),
            "row_tokens": self.row_tokens.as_json() if self.row_tokens else None,
            # plans without these had the JSON before them: a recorded plan stays byte for byte
            **({"kernels": asdict(self.kernels)} if self.kernels else {}),
            **({"compile_s": self.compile_s} if self.compile_s else {}),
            **({"deepspeed": self.deepspeed} if self.deepspeed is not None else {}),
            "max_seq_len": self.max_seq_len,
            "precision": asdict(self.precision),
            "mfu": self.mfu,
            "run": self._run_json(),
            "model_params": self.model_params,
            **({"parameters": asdict(self.parameters)} if self.parameters else {}),
            "hardware": self.hardware.as_json(),
            "reasons": list(self.reasons),
            "candidates": [candidate_json(candidate, speed_known=self.speed_known) for candidate in self.candidates],
            "not_possible": [asdict(item) for item in self.not_possible],
            "ways_out": [asdict(way) for way in self.suggestions],  # the key that scripts know
            "not_enough": [asdict(way) for way in self.not_enough],
        }

    def _run_json(self) -> dict[str, Any] | None:
        """Time, energy and money of the whole run; None where the work is unknown."""
        if self.work is None:
            return None
        gpus = len(self.hardware.gpus)
        hours = self.hours
        gpu_hours = None if hours is None or not gpus else hours * gpus
        # power limits are an upper bound of what the cards draw; hosts are not counted
        limits = [gpu.tdp_watts for gpu in self.hardware.gpus]
        watts = sum(limit for limit in limits if limit) if limits and all(limits) else None
        price = self.hardware.price_per_gpu_hour
        return {
            "steps": self.work.steps,
            "tokens": self.work.tokens,
            "hours": hours,
            "gpu_hours": gpu_hours,
            "energy_kwh": None if hours is None or watts is None else hours * watts / 1000,
            "cost": None if gpu_hours is None or price is None else gpu_hours * price,
        }


Planned = tuple[Plan, dict[str, Any] | None]
"""A plan, and DeepSpeed's config where DeepSpeed runs it."""


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a config, the shapes of its model, and a machine, all of whose GPUs are used (or its RAM).

    `earlier` are runs measured on this machine.
    """

    config: RunConfig
    shape: ModelShape
    hardware: Hardware
    only: Sequence[LayoutName] = LAYOUT_NAMES
    """Layouts that may be taken; every one is weighed where none is left out."""
    has_eval: bool = True
    """Whether evaluation batches run beside the training."""
    earlier: Sequence[calibration.Measured] = ()
    rows: RowTokens | None = None
    """The lengths of the rows, where they are known."""
    without: frozenset[str] = frozenset()
    """Packages with kernels that are not installed (`facts.installed.missing_kernels`)."""
    libraries: CudaLibraries = PINNED
    """Those by which PyTorch chooses kernels (`facts.installed.cuda_libraries`)."""

    @property
    def named(self) -> LayoutName | None:
        """The layout that the user named, if it is only one."""
        return self.only[0] if len(self.only) == 1 else None

    @property
    def max_seq_len(self) -> int:
        """Tokens of a row at most: model.max_seq_len, or the model's positions where those are fewer."""
        wish = self.config.model.max_seq_len
        return min(wish, self.shape.max_positions or wish)


def make_plan(
    request: PlanRequest,
    *,
    confirm: Confirm | None = None,
    work: Callable[[int], Work | None] | None = None,
    keeps_params: bool = False,
    fixed: BatchPlan | None = None,
    updates: Updates | None = None,
) -> Plan:
    """The plan of a run. Where nothing fits it suggests no changes; `advice.suggestions.make_advised_plan` does.

    Args:
        confirm: traces the choice; the larger of prediction and trace counts, and a choice that then does not fit is
            given up for the next best.
        work: the number of optimizer steps and tokens of the run, given the effective batch.
        keeps_params: whether `zero3_offload` leaves the weights on the GPUs, as a DeepSpeed file may say.
        fixed: the batch that a resumed run keeps, whatever the config says; nothing is suggested in its place.
        updates: how updates have reached the weights of a run that is resumed, which `weight_updates: auto` takes.

    Raises:
        ConfigError: batch sizes that do not divide, a mesh that this machine or job does not allow, adapters on layers
            that the model does not have.
    """
    config, shape, hardware = request.config, request.shape, request.hardware
    _refuse_settings(request)  # first, so that the message names the setting and not a layout
    job = dataclasses.replace(job_of(request), fixed=fixed, updates=updates)
    job, candidates, refused = _weighed(request, job, keeps_params=keeps_params)
    chosen, candidates, notes = _confirmed(job, candidates, confirm)
    speed_known = job.rates.known or job.learned(chosen.layout).speed_measured
    step, half = chosen.step, chosen.precision.compute != "float32"
    repeated = step.repeats_kv and step.on_gpu
    repeated &= repeats_kv(shape, attention=step.attention, half=half, capability=step.capability)
    kernels = _counted_kernels(job, chosen)
    return Plan(
        choice=chosen,
        precision=chosen.precision,
        max_seq_len=request.max_seq_len,
        repeats_kv=repeated,
        eval_batch=chosen.step.eval_batch or eval_batch(walk_of(config, shape, chosen.precision, chosen.step)),
        masked_bytes=_masked_bytes(job, chosen),
        answer_tokens=answer_tokens(shape, chosen.precision, chosen.step, chosen.memory),
        budget_bytes=job.budget,
        model_params=shape.params,
        hardware=hardware,
        reasons=reasons_of(
            job, candidates, chosen, limit=request.max_seq_len, repeats_kv=repeated, kernels=kernels, notes=notes
        ),
        candidates=tuple(shown(job, candidates, chosen)),
        not_possible=refused,
        speed_known=speed_known,
        speed_error=speed_error(shape, chosen.precision, hardware, chosen.step) if speed_known else None,
        mfu=utilisation(chosen.speed, job.rates),
        work=work(chosen.batch.effective_batch) if work else None,
        micro_batches=micro_batches(job, chosen.precision, chosen.step),
        row_tokens=job.rows,
        kernels=kernels,
        compile_s=compile_s(config, shape),
        activations_from="trace" if chosen.traced else "blocks" if shape.meter is None else "measured",
        parameters=parameters_of(config, shape, chosen.precision, chosen.layout),
    )


def refuse(request: PlanRequest) -> None:
    """Raises ConfigError for what `make_plan` refuses however long the rows are; a few candidates are weighed."""
    _refuse_settings(request)
    layouts, _ = _layouts(request, keeps_params=False)
    thriftiest(job_of(request), layouts)


def _refuse_settings(request: PlanRequest) -> None:
    check_targets(request.config, request.shape)
    refuse_beside_compiling(request.config)
    planned_experts(request.config, request.shape, choose_precision(request.config, request.hardware, request.shape))


def _weighed(
    request: PlanRequest, job: Job, *, keeps_params: bool
) -> tuple[Job, list[Candidate], tuple[NotPossible, ...]]:
    layouts, refused = _layouts(request, keeps_params=keeps_params)
    job, candidates = weigh_updates(job, layouts)
    # context parallelism is slower wherever a whole row fits a GPU: weighed only where nothing else fits
    can_share_rows = "fsdp_cp" in request.only and request.config.model.mesh_shape is None
    if can_share_rows and not any(candidate.fits for candidate in candidates):
        candidates += weigh(job, with_context_parallel(request.config, request.shape, request.hardware))
    return job, candidates, refused


def _layouts(request: PlanRequest, *, keeps_params: bool) -> tuple[list[Layout], tuple[NotPossible, ...]]:
    """The layouts to weigh, and those that are not possible; the simplest one where none of `only` is possible."""
    hardware = request.hardware
    possible, refused = layouts_for(request.config, request.shape, hardware, named=request.named)
    layouts = [layout for layout in possible if layout.name in request.only] or list(possible[:1])
    if not layouts:
        listed = "; ".join(f"{item.name}: {item.because}" for item in refused)
        raise ConfigError(f"no layout over {hardware.ranks} ranks can run this job: {listed}")
    if keeps_params:
        layouts = [dataclasses.replace(layout, keeps_params=layout.offloads_params) for layout in layouts]
    return layouts, refused


def _counted_kernels(job: Job, chosen: Candidate) -> CountedKernels | None:
    """`Plan.kernels`."""
    if job.config.train.kernels == "none":
        return None
    step = chosen.step
    counted = counted_kernels(job.config, job.shape, step.layout, on_gpu=step.on_gpu, without=job.rates.without)
    if counted.memory == "plain":
        return counted
    # Liger's kernels are proven before the first step; a run whose proof fails needs the plain code's bytes
    train = job.config.train.model_copy(update={"kernels": "none"})
    plain_job = dataclasses.replace(job, config=job.config.model_copy(update={"train": train}))
    plain = candidate_of(plain_job, chosen.layout, chosen.batch, chosen.checkpointed, loss=step.loss,
                         eval_rows=step.eval_batch)  # fmt: skip
    # a trace may have raised the choice above its own estimate
    return dataclasses.replace(counted, plain_bytes=max(plain.memory.required, chosen.memory.required))


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that `as_json` wrote, for a rank that receives it: equal in every field, nothing is decided again."""
    run, choice = data["run"], candidate_from_json(data)
    as_written = ("max_seq_len", "repeats_kv", "eval_batch", "answer_tokens", "model_params", "speed_known", "mfu")
    later = {"masked_bytes": None, "compile_s": 0.0, "activations_from": "blocks", "deepspeed": None}
    return Plan(
        **{name: data[name] for name in as_written},
        **{name: data.get(name, before) for name, before in later.items()},
        choice=choice,
        precision=Precision(**data["precision"]),
        budget_bytes=choice.room.device,
        hardware=Hardware.from_json(data["hardware"]),
        reasons=tuple(data["reasons"]),
        candidates=tuple(candidate_from_json(candidate) for candidate in data["candidates"]),
        not_possible=tuple(NotPossible(**item) for item in data["not_possible"]),
        suggestions=tuple(Suggestion(**way) for way in data["ways_out"]),
        not_enough=tuple(Suggestion(**way) for way in data["not_enough"]),
        speed_error=SpeedError(**data["speed_error"]) if data.get("speed_error") else None,
        work=None if run is None else Work(run["steps"], run["tokens"]),
        micro_batches=MicroBatches(**data["micro_batches"]),
        row_tokens=RowTokens.from_json(data["row_tokens"]),
        kernels=CountedKernels(**data["kernels"]) if data.get("kernels") else None,
        parameters=Parameters.from_json(data.get("parameters")),
    )


def job_of(request: PlanRequest, *, masters: bool = True) -> Job:
    """What the candidates of a plan share; `masters` False asks what fits without fp32 weights where bf16 will do."""
    config, shape, hardware = request.config, request.shape, request.hardware
    precision = choose_precision(config, hardware, shape)
    device = hardware.gpus[0].name if hardware.gpus else "cpu"  # runs are recorded by this name
    limit = request.max_seq_len
    rows = request.rows.within(limit) if request.rows is not None else None

    @functools.cache
    def learned(layout: Layout) -> calibration.Correction:
        counted = counted_kernels(config, shape, layout, on_gpu=bool(hardware.gpus), without=request.without)
        return calibration.correction(
            request.earlier, device=device, mode=config.tuning.mode, layout=layout.name, model=config.model.name,
            kernels=counted, compiled=config.train.compile,
        )  # fmt: skip

    return Job(
        config=config,
        shape=shape,
        precision=precision,
        hardware=hardware,
        rates=dataclasses.replace(rates_of(hardware, precision), without=request.without),
        seq_len=limit if rows is None else max(SHORTEST, rows.longest_of_all),
        attention=attention_of(config.model.attn_implementation, has_sdpa=shape.has_sdpa),
        has_eval=request.has_eval,
        budget=budget_bytes(hardware),
        # a named machine's RAM is only this machine's, which says nothing of it
        host_budget=hardware.ram_free_bytes if hardware.ram_given else None,
        learned=learned,
        masters=masters,
        rows=rows,
        libraries=request.libraries,
    )


def _confirmed(
    job: Job, candidates: list[Candidate], confirm: Confirm | None
) -> tuple[Candidate, list[Candidate], list[str]]:
    """The choice, traced if asked; one that does not fit by its trace is replaced by the next best."""
    notes: list[str] = []
    while True:
        chosen = choose(candidates)
        if chosen is None:
            return least(candidates), candidates, notes
        if confirm is None or chosen.traced:
            return chosen, candidates, notes
        traced = confirm(chosen)
        if traced.unavailable is not None:
            return chosen, candidates, [*notes, f"not confirmed by a trace: {traced.unavailable}"]
        notes.append(_trace_words(chosen, traced))
        # If the traced choice no longer fits, the next round takes, and traces, the next best. This ends: a candidate
        # is traced once, and one that fits by its trace is returned.
        updated = _with_trace(job, chosen, traced)
        candidates = [updated if candidate.key == chosen.key else candidate for candidate in candidates]


def _with_trace(job: Job, candidate: Candidate, traced: Traced) -> Candidate:
    """The candidate with the larger of the two predictions, which earlier runs correct like any; the difference becomes
    a separate term."""
    memory, raw = candidate.memory, candidate.raw
    more = max(0, traced.allocated - memory.allocated)
    terms = memory.terms | ({"trace_says_more": more} if more else {})
    # later plans learn from raw predictions, so the trace raises the raw one and the correction is applied again
    raw = dataclasses.replace(raw, reserved=max(raw.reserved, traced.reserved))
    reserved = int(raw.reserved * job.learned(candidate.layout).at(raw.reserved).memory)
    # the margin keeps its share of what is reserved
    margin = int(memory.margin * reserved / max(1, memory.reserved))
    memory = dataclasses.replace(memory, terms=terms, reserved=reserved, margin=margin)
    return dataclasses.replace(candidate, memory=memory, raw=raw, traced=True)


def _trace_words(candidate: Candidate, traced: Traced) -> str:
    closed = candidate.memory.allocated
    text = (
        f"traced: {traced.allocated / GIB:.2f} GiB allocated and {traced.reserved / GIB:.2f} reserved; the estimate "
        f"says {closed / GIB:.2f} and {candidate.memory.reserved / GIB:.2f}"
    )
    if abs(traced.allocated / max(1, closed) - 1) > TRACE_TOLERANCE:
        text += f", {traced.allocated / max(1, closed) - 1:+.1%} apart: the larger one is used"
    return text


def _masked_bytes(job: Job, chosen: Candidate) -> int | None:
    """`Plan.masked_bytes`."""
    step = chosen.step
    # by tokens, several short rows share a micro-batch of one full row; a packed row is not padded to others
    rows = max(2 if job.by_tokens else 1 if job.packed else step.micro_batch, step.eval_batch)
    if not step.varlen and (step.masks or not is_padded(job.config, chosen.layout, rows=rows)):
        return None
    masked = candidate_of(
        job, chosen.layout, chosen.batch, chosen.checkpointed, eval_rows=step.eval_batch, masks=True
    )  # fmt: skip
    return max(masked.memory.required, chosen.memory.required)


def require_fit(plan: Plan, config: RunConfig, *, is_fixed: bool = False) -> None:
    """Raises DoesNotFit when the batch was left to the plan and nothing fits; one that was given, or that a resumed run
    keeps (`is_fixed`), is tried."""
    train = config.train
    if plan.fits or is_fixed or train.batch_size != "auto" or train.grad_accum != "auto":
        return
    micro, needs = plan.batch.micro_batch, needs_words(plan.choice, terms=3)
    rows = f"{micro} sequence{'s' if micro > 1 else ''} of {plan.choice.step.seq_len} tokens"
    where = plan.hardware.gpus[0].name if plan.hardware.gpus else "the CPU"
    ways = plan.suggestions[:5] or plan.not_enough[:3]
    listed = ", ".join(f"{way.change} ({way.needs})" for way in ways)
    if plan.suggestions:
        advice = f"try {listed}"
    else:
        advice = f"not even {listed} would be enough" if ways else "try a smaller model"
    raise DoesNotFit(
        f"{config.model.name} with tuning.mode={config.tuning.mode} does not fit on {where}: {rows} at a time in "
        f"layout {plan.layout} need{'' if micro > 1 else 's'} {needs}; {advice}, or set train.batch_size=1 "
        "to start anyway",
        plan=plan.as_json(),
    )


def budget_bytes(hardware: Hardware) -> int:
    """Free bytes of the smallest GPU (all of it if only named), or a CPU rank's share of the free RAM."""
    if not hardware.gpus:
        return hardware.ram_free_bytes // hardware.gpus_per_node  # without GPUs: the CPU processes of a node
    # all ranks run the same plan, so the GPU with the least room decides
    return min(gpu.total_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in hardware.gpus)
