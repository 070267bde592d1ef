"""A plan: what is decided of a run, with its reasons, as data and as JSON; and the message where
nothing fits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFit
from sft_play.machine.hardware import Hardware
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import BatchPlan, MicroBatches, RowTokens
from sft_play.planner.candidates import (
    Candidate,
    PlanInputs,
    candidate_fields,
    candidate_json,
    format_needs,
)
from sft_play.planner.kernels import CountedKernels
from sft_play.planner.layout import ImpossibleLayout, Layout, LayoutName
from sft_play.planner.memory.estimate import MemoryEstimate
from sft_play.planner.memory.model_states import (
    adapter_params,
    trained_parameters,
    trained_vision_params,
    trains_vision,
)
from sft_play.planner.memory.step_memory import create_step_simulation, measure_vision
from sft_play.planner.memory.structure import element_bytes, stacked_adapter_params
from sft_play.planner.precision import DTYPE_BYTES, DtypeName, Precision, adapter_dtype
from sft_play.planner.speed import Speed, SpeedError
from sft_play.text import format_count, plural

# How many of a model's parameters are quantised, adapted, trained and frozen, in which dtypes; the
# same in words.


@dataclass(frozen=True)
class ExpertParameters:
    """Numbers of parameters of experts that share one tensor in each block, without biases."""

    total: int
    # Of the adapters, those on them.
    adapters: int


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of the language model and of what is added to it, as one rank without
    shards holds them. `trained` + `frozen` = `total` + adapters + copies of `modules_to_save`."""

    # The model's own.
    total: int
    # Of those: what is kept in `quantised_dtype`; all others are in `rest_dtype`.
    quantised: int
    quantised_dtype: Literal["nf4"] | None
    adapters: int
    # None where there are no adapters.
    adapter_dtype: DtypeName | None
    # What the mode trains; `tuning.trainable` may choose of it.
    trained: int
    frozen: int
    rest_dtype: DtypeName
    # None without experts in one tensor.
    experts: ExpertParameters | None = None

    def shares(self) -> dict[str, dict[str, Any]]:
        """`precision_of` of `plan --json`: numbers of parameters, shares of the model's own, and
        dtypes."""
        frozen_dtype = self.rest_dtype if self.frozen else None
        groups: dict[str, tuple[int, str | None]] = {
            "quantised": (self.quantised, self.quantised_dtype),
            "adapted": (self.adapters, self.adapter_dtype),
            "frozen": (self.frozen, frozen_dtype),
            "trained": (self.trained, self.adapter_dtype or self.rest_dtype),
        }
        return {
            name: {"params": count, "share": count / self.total, "dtype": dtype}
            for name, (count, dtype) in groups.items()
        }


def count_parameters(
    config: RunConfig, shape: ModelShape, precision: Precision, layout: Layout
) -> ParameterCounts:
    """The parameters of a run under its layout."""
    lora, mode = config.tuning.lora, config.tuning.mode
    is_full, is_nf4 = mode == "full", mode == "qlora"
    stacked_tensors = [
        (stacked, kind.count) for kind in shape.layers for stacked in kind.expert_weights
    ]
    experts = None
    if stacked_tensors:
        expert_params = sum(count * stacked.weights for stacked, count in stacked_tensors)
        on_experts = sum(
            count * stacked_adapter_params(stacked, lora) for stacked, count in stacked_tensors
        )
        experts = ExpertParameters(expert_params, on_experts * (not is_full))
    counts = ParameterCounts(
        total=shape.params + trained_vision_params(config, shape),
        quantised=shape.packable_params * is_nf4,
        quantised_dtype="nf4" if is_nf4 else None,
        adapters=0,
        adapter_dtype=None,
        trained=trained_parameters(config, shape, element_bytes(config, precision, layout)).params,
        frozen=shape.untrained_params,
        rest_dtype=_trained_dtype(precision.load, config, precision, layout),
        experts=experts,
    )
    if is_full:
        return counts
    # the base is frozen as it was loaded, and adapters train
    return dataclasses.replace(
        counts,
        adapters=adapter_params(shape, lora),
        adapter_dtype=_trained_dtype(adapter_dtype(config, precision), config, precision, layout),
        frozen=shape.params,
        rest_dtype=precision.load,
    )


def _trained_dtype(
    dtype: DtypeName, config: RunConfig, precision: Precision, layout: Layout
) -> DtypeName:
    """The dtype of what trains under a layout: DeepSpeed casts it to the dtype of the computation,
    and accelerate to fp32 for FSDP's mixed precision, except beside NF4 weights."""
    if precision.compute == "float32":
        return dtype
    if layout.is_zero:
        return precision.compute
    if layout.is_fsdp and config.tuning.mode != "qlora":
        return "float32"
    return dtype


def format_parameters(parameters: ParameterCounts, config: RunConfig) -> str:
    """One line: the shares of the parameters, their dtypes, and the options that would change
    them."""
    counts, lora, experts = parameters, config.tuning.lora, parameters.experts
    selection_note = "; tuning.trainable chooses of what is trained" * (
        config.tuning.trainable != "all"
    )
    if counts.adapter_dtype is None:
        share_text = "all of"
        if counts.frozen:
            share_text = f"{format_count(counts.trained)} of"
        frozen_note = ", the others get no gradient by their class" * bool(counts.frozen)
        return (
            f"Parameters: {share_text} {format_count(counts.total)} are trained in "
            f"{counts.rest_dtype}{frozen_note}{selection_note}"
        )
    base_text = f"all {counts.rest_dtype}, frozen"
    if counts.quantised_dtype is not None:
        base_text = (
            f"{counts.quantised / counts.total:.1%} in NF4, the rest {counts.rest_dtype}, all"
            " frozen"
        )
    text = (
        f"Parameters: {format_count(counts.total)}: {base_text}; adapters:"
        f" {format_count(counts.adapters)} {counts.adapter_dtype}"
        f" ({counts.adapters / counts.total:.2%})"
    )
    if experts is not None and experts.adapters:
        text += (
            f", {format_count(experts.adapters)} of them on experts (tuning.lora.target_parameters)"
        )
    elif experts is not None:
        text += ", none on experts (tuning.lora.target_parameters=auto)"
    if copied_params := counts.trained - counts.adapters:
        parts = {}
        if lora.modules_to_save:
            parts["tuning.lora.modules_to_save"] = f"copies of {', '.join(lora.modules_to_save)}"
        if config.model.add_tokens:
            parts["model.add_tokens"] = "rows of new tokens"
        text += (
            f"; {' and '.join(parts.values())} that train: {format_count(copied_params)}"
            f" ({', '.join(parts)})"
        )
    return text + selection_note


@dataclass(frozen=True)
class TracePrediction:
    """What a trace of the chosen step predicts, in bytes of one rank; `unavailable_reason`: why
    there is no trace."""

    allocated: int = 0
    reserved: int = 0
    unavailable_reason: str | None = None


@dataclass(frozen=True)
class VisionFigures:
    """The vision tower of a run with images: bytes of its weights on a rank, pictures of the
    largest size in a micro-batch at most, and what a pass over them takes at its peak."""

    weight_bytes: int
    is_trained: bool
    pictures: int
    pixel_bytes: int
    pass_bytes: int


def plan_vision(inputs: PlanInputs, choice: Candidate) -> VisionFigures | None:
    """What the vision tower takes in the chosen step; None for rows of text."""
    vision, step = inputs.shape.vision, choice.step
    if vision is None:
        return None
    one = measure_vision(inputs.config, inputs.shape, choice.precision, step)
    total = one.scaled(step.pictures)
    return VisionFigures(
        vision.weights.resident_bytes(DTYPE_BYTES[choice.precision.load]),
        trains_vision(inputs.config, inputs.shape),
        step.pictures,
        total.pixel_bytes,
        total.peak_bytes,
    )


ActivationsFrom = Literal["blocks", "measured", "trace"]
# A function that traces a candidate's step.
TraceCandidate = Callable[[Candidate], TracePrediction]


@dataclass(frozen=True)
class Suggestion:
    """A change that would need less memory, or provide more. Bytes are one rank's. `setting` is
    what to add to SET, `hardware` what to name instead of the present machine; one of them is None.
    `needs` has those bytes in words, with the RAM of a layout that offloads."""

    change: str
    allocated: int
    required: int
    fits: bool
    needs: str
    setting: str | None = None
    hardware: str | None = None


@dataclass(frozen=True)
class RunLength:
    """The amount of training: optimizer steps, and tokens without padding as estimated from the
    file's size."""

    steps: int
    tokens: int | None


@dataclass(frozen=True)
class Plan:
    """What a run will do. Bytes are per rank; `max_seq_len` is limited to the model's positions.
    Where nothing fits, the choice is the closest to fitting, `suggestions` say what would fit, and
    `not_enough` what was tried and would not."""

    choice: Candidate
    precision: Precision
    max_seq_len: int
    # Whether sdpa repeats keys and values for all heads, because grouped ones would use PyTorch's
    # math kernel.
    repeats_kv: bool
    # Rows that a rank evaluates at once.
    eval_batch: int
    # What the choice would require of a device if its padded rows and packs came with a mask; None
    # where they do, or need none anyway.
    masked_bytes: int | None
    # Tokens of prompts and answers that are generated at once.
    answer_tokens: int
    budget_bytes: int
    model_params: int
    hardware: Hardware
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    not_possible: tuple[ImpossibleLayout, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    not_enough: tuple[Suggestion, ...] = ()
    speed_known: bool = False
    # How far the speed may be off; None where it is not known.
    speed_error: SpeedError | None = None
    mfu: float | None = None
    run_length: RunLength | None = None
    # How the rows of a step become micro-batches.
    micro_batches: MicroBatches = field(default_factory=lambda: MicroBatches(1))
    # The lengths of the run's rows; None where they are not known.
    row_tokens: RowTokens | None = None
    # The kernels that memory and speed count; None where the config leaves the model's own.
    kernels: CountedKernels | None = None
    # Whether the run compiles blocks: `train.compile` resolved.
    compiled: bool = False
    # Seconds of compiling blocks at the start of the run.
    compile_s: float = 0.0
    # What the choice's activations are from: the estimate of the class's blocks, its blocks as they
    # were measured, or a trace of the whole step.
    activations_from: ActivationsFrom = "blocks"
    # DeepSpeed's config as it was given or shipped, with its "auto": what a resumed run, or a
    # repetition, starts with. None where another engine runs.
    deepspeed: Mapping[str, Any] | None = None
    # What is quantised, adapted and trained; None in a plan of an earlier version.
    parameters: ParameterCounts | None = None
    # Of a run with images; None for rows of text.
    vision: VisionFigures | None = None

    @property
    def layout(self) -> LayoutName:
        """The name of the layout."""
        return self.choice.layout.name

    @property
    def batch(self) -> BatchPlan:
        """Micro-batch, accumulation and data-parallel ranks."""
        return self.choice.batch

    @property
    def trainer_batch(self) -> BatchPlan:
        """The batch for a trainer that runs a fixed number of micro steps in every step: the most
        that a step can take."""
        rows = self.batch.effective_batch // self.batch.ranks
        micro_steps = self.micro_batches.max_micro_steps(rows)
        return BatchPlan(rows // micro_steps, micro_steps, self.batch.ranks)

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
        """True if the choice fits with its margin."""
        return self.choice.fits

    @property
    def hours(self) -> float | None:
        """Hours of the whole run with its compiling, of full rows where lengths are not known; None
        where work or speed is unknown."""
        if self.run_length is None or not self.speed_known:
            return None
        return (self.run_length.steps * self.speed.step_s + self.compile_s) / 3600

    def as_json(self) -> dict[str, Any]:
        """The one JSON object of `plan --json` and `plan.json`: bytes as integers, rates per
        second."""
        own_fields = {
            plan_field.name: to_jsonable_python(getattr(self, plan_field.name))
            for plan_field in fields(self)
            if plan_field.name not in _OTHER_JSON_FIELDS
        }
        # plans without these had the JSON before them: a recorded plan stays byte for byte
        for name in ("kernels", "compiled", "compile_s", "deepspeed", "parameters", "vision"):
            if not own_fields[name]:
                del own_fields[name]
        if self.row_tokens is not None and self.row_tokens.images is None:
            del own_fields["row_tokens"]["images"]
        return {
            **candidate_json(self.choice, speed_known=self.speed_known),
            **own_fields,
            "run": self.run_figures(),
            "hardware": self.hardware.as_json(),
            "candidates": [
                candidate_json(candidate, speed_known=self.speed_known)
                for candidate in self.candidates
            ],
            "ways_out": to_jsonable_python(self.suggestions),  # the key that scripts know
        }

    def run_figures(self) -> dict[str, Any] | None:
        """`run` of the JSON: steps, tokens, hours, energy and cost; None where the length of the
        run is not known."""
        if self.run_length is None:
            return None
        gpus, hours, price = self.hardware.gpus, self.hours, self.hardware.price_per_gpu_hour
        gpu_hours = energy_kwh = cost = None
        if hours is not None and gpus:
            gpu_hours = hours * len(gpus)
            # power limits are an upper bound of what the cards draw; hosts are not counted
            watts = [gpu.tdp_watts or 0 for gpu in gpus]
            if all(watts):
                energy_kwh = hours * sum(watts) / 1000
            if price is not None:
                cost = gpu_hours * price
        return {
            "steps": self.run_length.steps,
            "tokens": self.run_length.tokens,
            "hours": hours,
            "gpu_hours": gpu_hours,
            "energy_kwh": energy_kwh,
            "cost": cost,
        }


# Fields of a plan that its JSON has in another form, or under another name.
_OTHER_JSON_FIELDS = (
    "choice",
    "budget_bytes",
    "run_length",
    "hardware",
    "candidates",
    "suggestions",
)


# A plan, and DeepSpeed's config where DeepSpeed runs it.
PlanWithDeepSpeed = tuple[Plan, dict[str, Any] | None]


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """Read the plan that `as_json` wrote, for a rank that receives it: equal in every field,
    without deciding again."""
    renamed_fields = {
        "choice": candidate_fields(data),
        "budget_bytes": data["peak_bytes"]["budget"],
        "candidates": [candidate_fields(candidate) for candidate in data["candidates"]],
        "suggestions": data["ways_out"],
        "run_length": data["run"],
    }
    return TypeAdapter(Plan).validate_python({**data, **renamed_fields})


def require_fit(plan: Plan, config: RunConfig, *, is_resumed: bool = False) -> None:
    """Raises DoesNotFit where nothing fits; a batch that was given, or that a resumed run keeps
    (`is_resumed`), is tried."""
    train = config.train
    if plan.fits or is_resumed or train.batch_size != "auto" or train.grad_accum != "auto":
        return
    raise DoesNotFit(
        f"{format_misfit(plan, config)}, or set train.batch_size=1 to start anyway",
        plan=plan.as_json(),
    )


def format_misfit(plan: Plan, config: RunConfig) -> str:
    """What does not fit, with what it needs, and the changes that would make it fit."""
    rows, needs = plan.batch.micro_batch, format_needs(plan.choice, term_count=3)
    device, advice = "the CPU", "try a smaller model"
    if plan.hardware.gpus:
        device = plan.hardware.gpus[0].name
    suggestions = plan.suggestions[:5] or plan.not_enough[:3]
    changes = ", ".join(f"{suggestion.change} ({suggestion.needs})" for suggestion in suggestions)
    if plan.suggestions:
        advice = f"try {changes}"
    elif suggestions:
        advice = f"not even {changes} would be enough"
    return (
        f"{config.model.name} with tuning.mode={config.tuning.mode} does not fit on {device}:"
        f" {plural(rows, 'sequence')} of {plan.choice.step.seq_len} tokens at a time in layout"
        f" {plan.layout} need{'s' * (rows == 1)} {needs}; {advice}"
    )


def device_budget_bytes(hardware: Hardware) -> int:
    """Free bytes of the smallest GPU (all of it if only named), or a CPU rank's share of the free
    RAM."""
    if not hardware.gpus:
        # without GPUs: the CPU processes of a node
        return hardware.ram_free_bytes // hardware.ranks_per_node
    # all ranks run the same plan, so the GPU with the least room decides
    return min(
        gpu.total_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in hardware.gpus
    )


# --------------------------------------------------------------------------------------------------
# Disk that a planned run takes: its checkpoints and its final weights.

# Tokenizer (33 MiB for vocabularies of 256,000), trainer and random states, metrics.
OTHER_BYTES = 64 * 2**20
MORE_SPACE_REMEDY = "free space, set output.dir to a larger disk, or train.save_total_limit=1"


@dataclass(frozen=True)
class DiskUsage:
    """What a run writes: one checkpoint, the final weights, and how many checkpoints exist at once
    at most (None: all are kept, and their number is not known)."""

    checkpoint_bytes: int
    weights_bytes: int
    max_checkpoints: int | None

    @property
    def total_bytes(self) -> int:
        """The most bytes that are on the disk at once."""
        return (self.max_checkpoints or 1) * self.checkpoint_bytes + self.weights_bytes

    def min_bytes(self, existing_checkpoints: int = 0) -> int:
        """Bytes that new checkpoints and the final weights need for certain, beside
        `existing_checkpoints`; the oldest checkpoint goes before the final weights are written."""
        new_checkpoints = max(0, (self.max_checkpoints or 1) - existing_checkpoints)
        checkpoint_bytes = self.checkpoint_bytes - OTHER_BYTES
        return max(
            new_checkpoints * checkpoint_bytes,
            (new_checkpoints - 1) * checkpoint_bytes + self.weights_bytes - OTHER_BYTES,
        )


def planned_disk_usage(config: RunConfig, shape: ModelShape, plan: Plan) -> DiskUsage:
    """What the planned run writes: checkpoints of the planned size, and the final save; 0.2 to 5%
    below the files of a small model's runs, by the small ones that are not counted (2026-11-21)."""
    layout = plan.choice.layout
    trained = create_step_simulation(
        config, shape, plan.precision, plan.choice.step
    ).trained_parameters
    weights_bytes = trained.itemsize * trained.params
    checkpoint_bytes = plan.memory.checkpoint_bytes
    # DeepSpeed's files and the trainer's each hold the weights; ZeRO-3's own only as fp32 masters
    if layout.is_zero:
        checkpoint_bytes += (2 - layout.shards_params) * weights_bytes
    train, checkpoint_counts = config.train, []
    if train.save_total_limit is not None:
        # a new checkpoint is complete before the oldest is deleted, and the best one is kept beside
        # the limit
        checkpoint_counts.append(train.save_total_limit + train.load_best_model_at_end + 1)
    save_interval = config.eval.steps if train.load_best_model_at_end else train.save_steps
    # after each epoch; train.max_steps may be several of them
    if not save_interval and plan.row_tokens is not None:
        save_interval = math.ceil(plan.row_tokens.rows / plan.batch.effective_batch)
    if save_interval and plan.run_length is not None:
        checkpoint_counts.append(math.ceil(plan.run_length.steps / save_interval))
    elif not save_interval and not train.max_steps:
        checkpoint_counts.append(math.ceil(train.epochs))
    # the fewer of the two bounds: a short run writes fewer checkpoints than the limit allows
    return DiskUsage(
        checkpoint_bytes + OTHER_BYTES,
        weights_bytes + OTHER_BYTES,
        min(checkpoint_counts, default=None),
    )
