"""The plan of a run: layout, precision, batch, predicted peak and speed, and the reasons, before anything loads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from pydantic import TypeAdapter

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit
from sft_play.facts.hardware import Hardware
from sft_play.facts.installed import PINNED_CUDA_LIBRARIES, CudaLibraries
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner import calibration
from sft_play.planner.attention import attention_of
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidate_json import candidate_fields, candidate_json
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
from sft_play.planner.kernels import CountedKernels, planned_experts, planned_kernels
from sft_play.planner.layout import LAYOUT_NAMES, Layout, LayoutName, NotPossible, layouts_for, with_context_parallel
from sft_play.planner.memory.estimate import RUN_PHASES, MemoryEstimate, generation_token_budget
from sft_play.planner.memory.measured_walk import create_step_simulation
from sft_play.planner.memory.step_memory import is_padded
from sft_play.planner.memory.structure import check_targets, repeats_kv
from sft_play.planner.micro_batches import MicroBatches, RowTokens
from sft_play.planner.parameters import Parameters, parameters_of
from sft_play.planner.precision import Precision, Updates, choose_precision
from sft_play.planner.reasons import reasons_of, shown
from sft_play.planner.speed.compile_and_liger import compile_s, refuse_beside_compiling
from sft_play.planner.speed.throughput import Speed, SpeedError, rates_of, speed_error, utilisation
from sft_play.units import GIB

# Tokens of a row that a plan counts at least, as the shortest model.max_seq_len.
SHORTEST = 8
# Difference between estimate and trace from which the plan reports it.
TRACE_TOLERANCE = 0.03


@dataclass(frozen=True)
class Traced:
    """What a trace of the chosen step measured: bytes of one rank. `unavailable` says why there is none."""

    allocated: int = 0
    reserved: int = 0
    unavailable: str | None = None


ActivationsFrom = Literal["blocks", "measured", "trace"]
# Traces a candidate's step.
Confirm = Callable[[Candidate], Traced]


@dataclass(frozen=True)
class Suggestion:
    """A change that would need less memory, or provide more. Bytes are those of one rank. `setting` is what to add to
    SET, `hardware` what to name instead of the present machine; one of them is None. `needs` are those bytes in words,
    with the RAM of a layout that offloads."""

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
    """What a run will do. Bytes are per rank; `max_seq_len` is limited to the model's positions. Where nothing fits,
    the choice is the closest to fitting, `suggestions` say what would fit, and `not_enough` what was tried and would
    not."""

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
        """Hours of the whole run with its compiling, of full rows where lengths are not known; None where work or speed
        is unknown."""
        if self.work is None or not self.speed_known:
            return None
        return (self.work.steps * self.speed.step_s + self.compile_s) / 3600

    def as_json(self) -> dict[str, Any]:
        """The one JSON object of `plan --json` and `plan.json`: bytes as integers, rates per second."""
        own = {one.name: _plain(getattr(self, one.name)) for one in fields(self) if one.name not in _TOLD_OTHERWISE}
        # plans without these had the JSON before them: a recorded plan stays byte for byte
        for name in ("kernels", "compile_s", "deepspeed", "parameters"):
            if not own[name]:
                del own[name]
        return {
            **candidate_json(self.choice, speed_known=self.speed_known),
            **own,
            "run": self._run_json(),
            "hardware": self.hardware.as_json(),
            "candidates": [candidate_json(candidate, speed_known=self.speed_known) for candidate in self.candidates],
            "ways_out": _plain(self.suggestions),  # the key that scripts know
        }

    def _run_json(self) -> dict[str, Any] | None:
        if self.work is None:
            return None
        gpus, hours, price = self.hardware.gpus, self.hours, self.hardware.price_per_gpu_hour
        gpu_hours = hours * len(gpus) if hours is not None and gpus else None
        # power limits are an upper bound of what the cards draw; hosts are not counted
        watts = sum(gpu.tdp_watts or 0 for gpu in gpus) if all(gpu.tdp_watts for gpu in gpus) else 0
        return {
            "steps": self.work.steps,
            "tokens": self.work.tokens,
            "hours": hours,
            "gpu_hours": gpu_hours,
            "energy_kwh": hours * watts / 1000 if hours is not None and watts else None,
            "cost": gpu_hours * price if gpu_hours is not None and price is not None else None,
        }


# Fields of a plan that its JSON has in another form, or under another name.
_TOLD_OTHERWISE = ("choice", "budget_bytes", "work", "hardware", "candidates", "suggestions")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


# A plan, and DeepSpeed's config where DeepSpeed runs it.
Planned = tuple[Plan, dict[str, Any] | None]


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned: a config, the shapes of its model, and a machine, all of whose GPUs are used (or its RAM).
    `earlier` are runs measured on this machine."""

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
    """Packages with kernels that are not installed (`facts.installed.missing_kernel_packages`)."""
    libraries: CudaLibraries = PINNED_CUDA_LIBRARIES
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
        confirm: traces the choice; the larger of prediction and trace counts, and what then does not fit is given up.
        work: the optimizer steps and tokens of the run, given the effective batch.
        keeps_params: whether `zero3_offload` leaves the weights on the GPUs, as a DeepSpeed file may say.
        fixed: the batch that a resumed run keeps, whatever the config says.
        updates: how updates reached the weights of a resumed run, which `weight_updates: auto` takes.

    Raises ConfigError for batch sizes that do not divide, and for what this machine, job or model does not allow.
    """
    config, shape, hardware = request.config, request.shape, request.hardware
    _refuse_settings(request)  # first, so that the message names the setting and not a layout
    job = dataclasses.replace(job_of(request), fixed=fixed, updates=updates)
    job, candidates, refused = _weighed(request, job, keeps_params=keeps_params)
    chosen, candidates, notes = _confirmed(job, candidates, confirm)
    speed_known = job.rates.known or job.learned(chosen.layout).speed_measured
    step, half = chosen.step, chosen.precision.compute != "float32"
    repeated = step.on_gpu and repeats_kv(shape, attention=step.attention, half_precision=half, capability=step.capability)
    kernels = planned_kernels(config, shape, step.layout, on_gpu=step.on_gpu, without=job.rates.without)
    walk = create_step_simulation(config, shape, chosen.precision, step)
    return Plan(
        choice=chosen,
        precision=chosen.precision,
        max_seq_len=request.max_seq_len,
        repeats_kv=repeated,
        eval_batch=step.eval_batch or eval_batch(walk),
        masked_bytes=_masked_bytes(job, chosen),
        answer_tokens=generation_token_budget(walk, chosen.memory),
        budget_bytes=job.budget,
        model_params=shape.params,
        hardware=hardware,
        reasons=reasons_of(
            job, candidates, chosen, limit=request.max_seq_len, repeats_kv=repeated, kernels=kernels, notes=notes
        ),
        candidates=tuple(shown(job, candidates, chosen)),
        not_possible=refused,
        speed_known=speed_known,
        speed_error=speed_error(shape, chosen.precision, hardware, step) if speed_known else None,
        mfu=utilisation(chosen.speed, job.rates),
        work=work(chosen.batch.effective_batch) if work else None,
        micro_batches=micro_batches(job, chosen.precision, step),
        row_tokens=job.rows,
        kernels=None if config.train.kernels == "none" else kernels.counted,
        compile_s=compile_s(config, shape),
        activations_from="trace" if chosen.traced else "blocks" if shape.block_meter is None else "measured",
        parameters=parameters_of(config, shape, chosen.precision, chosen.layout),
    )


def refuse(request: PlanRequest) -> None:
    """Raises ConfigError for what `make_plan` refuses however long the rows are; a few candidates are weighed."""
    _refuse_settings(request)
    thriftiest(job_of(request), _layouts(request, keeps_params=False)[0])


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
    hardware = request.hardware
    possible, refused = layouts_for(request.config, request.shape, hardware, named=request.named)
    layouts = [layout for layout in possible if layout.name in request.only] or list(possible[:1])
    if not layouts:
        listed = "; ".join(f"{item.name}: {item.because}" for item in refused)
        raise ConfigError(f"no layout over {hardware.ranks} ranks can run this job: {listed}")
    if keeps_params:
        layouts = [dataclasses.replace(layout, keeps_params=layout.offloads_params) for layout in layouts]
    return layouts, refused


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that `as_json` wrote, for a rank that receives it: equal in every field, nothing is decided again."""
    other_names = {
        "choice": candidate_fields(data),
        "budget_bytes": data["peak_bytes"]["budget"],
        "candidates": [candidate_fields(candidate) for candidate in data["candidates"]],
        "suggestions": data["ways_out"],
        "work": data["run"],
    }
    return _reader().validate_python({**data, **other_names})


@functools.cache
def _reader() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def job_of(request: PlanRequest, *, masters: bool = True) -> Job:
    """What the candidates of a plan share; `masters` False asks what fits without fp32 weights where bf16 will do."""
    config, shape, hardware = request.config, request.shape, request.hardware
    precision = choose_precision(config, hardware, shape)
    device = hardware.gpus[0].name if hardware.gpus else "cpu"  # runs are recorded by this name
    limit = request.max_seq_len
    rows = request.rows.within(limit) if request.rows is not None else None

    @functools.cache
    def learned(layout: Layout) -> calibration.Correction:
        planned = planned_kernels(config, shape, layout, on_gpu=bool(hardware.gpus), without=request.without)
        return calibration.correction(
            request.earlier, device=device, mode=config.tuning.mode, layout=layout.name, model=config.model.name,
            kernels=planned.counted, compiled=config.train.compile, room=budget_bytes(hardware),
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
    """The larger of the two predictions, corrected by earlier runs like any; the difference becomes a separate term."""
    memory = candidate.memory
    more = max(0, traced.allocated - memory.allocated)
    # later plans learn from raw predictions, so the trace raises the raw one and the correction is applied again
    raw = dataclasses.replace(candidate.raw, reserved=max(candidate.raw.reserved, traced.reserved))
    reserved = job.learned(candidate.layout).reserved(raw.reserved, job.budget)
    highest = RUN_PHASES.get(memory.moment, "training")
    memory = dataclasses.replace(
        memory,
        terms=memory.terms | ({"trace_says_more": more} if more else {}),
        reserved=reserved,
        by_moment=memory.by_moment
        | {highest: (memory.allocated + more, max(memory.by_moment[highest][1], traced.reserved))},
        margin=int(memory.margin * reserved / max(1, memory.reserved)),  # it keeps its share of what is reserved
    )
    return dataclasses.replace(candidate, memory=memory, raw=raw, traced=True)


def _trace_words(candidate: Candidate, traced: Traced) -> str:
    closed = candidate.memory.allocated
    text = (
        f"traced: {traced.allocated / GIB:.2f} GiB allocated and {traced.reserved / GIB:.2f} reserved; the estimate "
        f"says {closed / GIB:.2f} and {candidate.memory.reserved / GIB:.2f}"
    )
    apart = traced.allocated / max(1, closed) - 1
    return text + (f", {apart:+.1%} apart: the larger one is used" if abs(apart) > TRACE_TOLERANCE else "")


def _masked_bytes(job: Job, chosen: Candidate) -> int | None:
    step = chosen.step
    # by tokens, several short rows share a micro-batch of one full row; a packed row is not padded to others
    rows = max(2 if job.by_tokens else 1 if job.packed else step.micro_batch, step.eval_batch)
    if not step.varlen and (step.masks or not is_padded(job.config, chosen.layout, rows=rows)):
        return None
    other = candidate_of(job, chosen.layout, chosen.batch, chosen.checkpointed, loss=step.loss,
                         eval_rows=step.eval_batch, masks=True)  # fmt: skip
    return max(other.memory.required, chosen.memory.required)  # a trace may have raised it above its own estimate


def require_fit(plan: Plan, config: RunConfig, *, is_fixed: bool = False) -> None:
    """Raises DoesNotFit where nothing fits; a batch that was given, or that a resumed run keeps (`is_fixed`), is
    tried."""
    train = config.train
    if plan.fits or is_fixed or train.batch_size != "auto" or train.grad_accum != "auto":
        return
    raise DoesNotFit(f"{misfit_words(plan, config)}, or set train.batch_size=1 to start anyway", plan=plan.as_json())


def misfit_words(plan: Plan, config: RunConfig) -> str:
    """What does not fit, with what it needs, and the changes that would make it fit."""
    micro, needs = plan.batch.micro_batch, needs_words(plan.choice, terms=3)
    rows = f"{micro} sequence{'s' if micro > 1 else ''} of {plan.choice.step.seq_len} tokens"
    where = plan.hardware.gpus[0].name if plan.hardware.gpus else "the CPU"
    ways = plan.suggestions[:5] or plan.not_enough[:3]
    listed = ", ".join(f"{way.change} ({way.needs})" for way in ways)
    advice = f"try {listed}" if plan.suggestions else f"not even {listed} would be enough"
    return (
        f"{config.model.name} with tuning.mode={config.tuning.mode} does not fit on {where}: {rows} at a time in "
        f"layout {plan.layout} need{'' if micro > 1 else 's'} {needs}; {advice if ways else 'try a smaller model'}"
    )


def budget_bytes(hardware: Hardware) -> int:
    """Free bytes of the smallest GPU (all of it if only named), or a CPU rank's share of the free RAM."""
    if not hardware.gpus:
        return hardware.ram_free_bytes // hardware.gpus_per_node  # without GPUs: the CPU processes of a node
    # all ranks run the same plan, so the GPU with the least room decides
    return min(gpu.total_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in hardware.gpus)
