"""The ways a job could run on a machine, each with its predicted memory and speed, and the choice
among them.

Candidates are layouts x micro-batches x checkpointed layers. Among those that fit with their
margin, speeds within 3% of the best count as equal, and the simplest layout with the smallest
micro-batch wins: unused memory protects against what no prediction sees.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.hardware import Hardware
from sft_play.machine.host_speed import HostSpeed
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE, PINNED_CUDA_LIBRARIES, CudaLibraries
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import (
    AverageMicroSteps,
    BatchPlan,
    MicroBatches,
    RowTokens,
    average_micro_steps,
    batch_splits,
)
from sft_play.planner.calibration import Correction, UncorrectedPrediction
from sft_play.planner.kernels import AttentionName, RowAttention, prefers_cudnn, sdpa_kernel
from sft_play.planner.layout import LAYOUT_PREFERENCE, Layout
from sft_play.planner.memory.estimate import (
    MemoryEstimate,
    estimate_from_simulation,
    max_evaluation_rows,
)
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.memory.step_memory import (
    Step,
    StepMemorySimulation,
    create_step_simulation,
    is_padded,
)
from sft_play.planner.memory.structure import sdpa_call
from sft_play.planner.precision import Precision, WeightUpdates, apply_weight_updates
from sft_play.planner.speed import Rates, Speed, micro_step_overhead_tokens, predict_speed
from sft_play.text import GIB, format_gib

# Fraction of the best predicted speed from which a candidate counts as equally fast: the roofline
# is no more precise.
EQUAL_SPEED_SHARE = 0.97
# Larger micro-batches are not tried after this many that do not fit. A single one can be followed
# by one that fits, because a single micro step keeps no gradients.
_MAX_CONSECUTIVE_FAILURES = 2


@dataclass(frozen=True)
class MemoryBudget:
    """What a job may use: bytes of a rank's device, and of a node's RAM, which is None if
    unknown."""

    device: int
    host: int | None


@dataclass(frozen=True)
class Candidate:
    """One way to run the job; `rejected_because` is None for the chosen one. `memory` and `speed`
    are corrected by earlier runs, `uncorrected` is the prediction without them. `host_required` is
    the RAM in bytes that the ranks of one node need together."""

    layout: Layout
    batch: BatchPlan
    step: Step
    precision: Precision
    memory: MemoryEstimate
    speed: Speed
    budget: MemoryBudget
    host_required: int
    uncorrected: UncorrectedPrediction
    layers: int
    rejected_because: str | None = None
    is_traced: bool = False

    @property
    def fits(self) -> bool:
        """True if the device and the host have room for it; unknown RAM is left to the reader."""
        return not self.insufficient_memory

    @property
    def insufficient_memory(self) -> tuple[Literal["GPU memory", "RAM"], ...]:
        """Which memory is too small."""
        lacking: list[Literal["GPU memory", "RAM"]] = []
        if self.memory.required > self.budget.device:
            lacking.append("GPU memory" if self.step.on_gpu else "RAM")
        if self.budget.host is not None and self.host_required > self.budget.host:
            lacking.append("RAM")
        return tuple(lacking)

    @property
    def device_word(self) -> str:
        """What a rank is, in texts: a GPU, or a process on a CPU."""
        return "GPU" if self.step.on_gpu else "process"

    @property
    def needs_unknown_ram(self) -> bool:
        """True if it fits only if the host has RAM that is not known."""
        return self.offloads and self.budget.host is None

    @property
    def offloads(self) -> bool:
        """True if a step keeps anything in RAM."""
        return self.layout.offloads_states or self.layout.is_streamed or self.step.offloads

    @property
    def budget_ratio(self) -> float:
        """The largest ratio of need to budget: above 1 it does not fit."""
        ratio = self.memory.required / max(1, self.budget.device)
        if self.budget.host is None:
            return ratio
        return max(ratio, self.host_required / max(1, self.budget.host))

    @property
    def verdict(self) -> str:
        """Whether it fits, with the numbers, and which memory is too small."""
        device = f"{_format_need(self.memory.required, self.budget.device)} per {self.device_word}"
        if self.fits:
            return f"fits, {device}{self.ram_text}"
        needs = {"GPU memory": device, "RAM": device}
        if self.step.on_gpu and self.budget.host is not None:
            needs["RAM"] = f"{_format_need(self.host_required, self.budget.host)} on each node"
        lacking_text = " and ".join(
            f"too little {kind}: needs {needs[kind]}" for kind in self.insufficient_memory
        )
        return f"does NOT fit, {lacking_text}" + f" ({device} would be enough)" * (
            device not in lacking_text
        )

    @property
    def ram_text(self) -> str:
        """The RAM that a step with offload needs, as the end of a sentence; empty without
        offload."""
        if not self.offloads:
            return ""
        if self.budget.host is None:
            return (
                f", if each node has {format_gib(self.host_required)} GiB of RAM (not given; set it"
                " with ram=512GiB)"
            )
        return f", and {_format_need(self.host_required, self.budget.host)} of RAM on each node"

    @property
    def checkpointed_layers(self) -> int:
        """Layers whose activations are recomputed."""
        return self.step.recomputed_layers(self.layers)

    @property
    def checkpointing(self) -> bool | str:
        """True for all layers, False for none, else `selective`."""
        if 0 < self.checkpointed_layers < self.layers:
            return "selective"
        return self.checkpointed_layers == self.layers

    @property
    def checkpointing_text(self) -> str:
        """`checkpointing on`, `off`, or how many layers."""
        if self.checkpointing == "selective":
            return f"checkpointing in {self.checkpointed_layers} of {self.layers} layers"
        if self.step.offloads:
            return "checkpointing with offload"
        if self.checkpointing:
            return "checkpointing on"
        return "checkpointing off"

    @property
    def key(self) -> tuple[Layout, int, int, str]:
        """What tells it from other candidates: layout, micro-batch, checkpointed layers, loss."""
        return (self.layout, self.batch.micro_batch, self.checkpointed_layers, self.step.loss)


@dataclass(frozen=True)
class PlanInputs:
    """What every candidate of a plan shares. Sizes in bytes and tokens."""

    config: RunConfig
    shape: ModelShape
    precision: Precision
    hardware: Hardware
    rates: Rates
    seq_len: int
    attention: AttentionName
    has_eval: bool
    device_budget: int
    # Free RAM of one node; None where the machine is only named and its RAM was not given.
    host_budget: int | None
    # The correction from earlier runs on this machine, by layout.
    find_correction: Callable[[Layout], Correction]
    # Whether weights that train in full may be held in fp32 where no engine keeps fp32 copies of
    # them.
    fp32_master_weights: bool = True
    # The batch that a resumed run keeps; None leaves it to the config and the plan.
    resumed_batch: BatchPlan | None = None
    # How updates have reached the weights of a run that is resumed.
    resumed_updates: WeightUpdates | None = None
    # The lengths of the run's rows; None where they are not known, and all are taken to have full
    # length.
    row_tokens: RowTokens | None = None
    libraries: CudaLibraries = PINNED_CUDA_LIBRARIES
    # How fast this machine's host was measured to start kernels; None where it was not.
    host_speed: HostSpeed | None = None

    def layout_rates(self, layout: Layout) -> Rates:
        """The rates as earlier runs and the measured host correct them. A run of which only the
        mean speed is known corrects the speed by rates without a measured host."""
        correction, rates = self.find_correction(layout), self.rates
        if self.host_speed is not None and self.host_speed.bus_bytes_per_s:
            rates = dataclasses.replace(rates, bus_bytes_per_s=self.host_speed.bus_bytes_per_s)
        if correction.host_factor is not None:
            return dataclasses.replace(
                rates, host_factor=correction.host_factor, card_factor=correction.card_factor
            )
        if correction.has_measured_speed or self.host_speed is None:
            return rates
        if not self.host_speed.operator_s:  # the bus alone was measured
            return rates
        return dataclasses.replace(rates, operator_s=self.host_speed.operator_s)

    def layout_precision(self, layout: Layout) -> Precision:
        """The precision of a layout."""
        return apply_weight_updates(
            self.precision,
            self.config,
            layout.name,
            fp32_master_weights=self.fp32_master_weights,
            resumed_updates=self.resumed_updates,
        )

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest compute capability of the GPUs; None where none is known."""
        return min(
            (gpu.capability for gpu in self.hardware.gpus if gpu.capability is not None),
            default=None,
        )

    @property
    def row_attention(self) -> RowAttention:
        """How its rows are attended to."""
        device = "rocm" if any(gpu.is_amd for gpu in self.hardware.gpus) else self.hardware.device
        return RowAttention(self.config, self.shape, self.attention, self.capability, device)

    def uses_cudnn(self, precision: Precision, layout: Layout) -> bool:
        """True if sdpa runs cuDNN's kernel for rows of one length, which packs and blocks of text
        have."""
        has_full_rows = self.packed or self.config.task_mode == "cpt"
        if (
            not has_full_rows
            or layout.context_parallel > 1
            or self.attention != "sdpa"
            or self.shape.attention_dropout
        ):
            return False
        is_amd = self.row_attention.device == "rocm"
        if self.config.tuning.backend != "bnb" or not prefers_cudnn(
            self.capability, self.libraries, is_amd=is_amd
        ):
            return False
        call = sdpa_call(self.shape, masked=False, half_precision=precision.compute != "float32")
        return sdpa_kernel(call, self.capability, uses_cudnn=True) == "cudnn"

    @property
    def cuts_by_tokens(self) -> bool:
        """True if micro-batches are cut by tokens: rows differ in length, and the config asks for
        it or leaves it open."""
        train, has_full_rows = self.config.train, self.packed or self.config.task_mode == "cpt"
        is_batch_open = train.batch_size == "auto" and train.grad_accum == "auto"
        cuts_by_rows = train.batch_by == "rows" or (train.batch_by == "auto" and not is_batch_open)
        return not has_full_rows and not cuts_by_rows and train.group_by_length

    @property
    def packed(self) -> bool:
        """True if rows hold several chats, which a mask keeps apart, as it does padding."""
        return self.config.data.packing != "none" and self.config.task_mode != "cpt"


def evaluate_candidates(inputs: PlanInputs, layouts: Sequence[Layout]) -> list[Candidate]:
    """Evaluate every candidate of the layouts, up to the largest micro-batch that fits. Layouts
    whose data-parallel ranks do not divide the batch are left out. Raises ConfigError where that
    leaves none."""

    def layout_candidates(layout: Layout) -> list[Candidate]:
        candidates: list[Candidate] = []
        failures = 0
        for batch in batch_splits(
            inputs.config.train, ranks=layout.data_parallel, resumed_batch=inputs.resumed_batch
        ):
            batch_candidates = list(_batch_candidates(inputs, layout, batch))
            candidates += batch_candidates
            failures += 1
            if any(candidate.fits for candidate in batch_candidates):
                failures = 0
            # splits come with small micro-batches first, and a larger one needs more
            if failures >= _MAX_CONSECUTIVE_FAILURES:
                break
        return candidates

    return _collect_candidates(layouts, layout_candidates)


def evaluate_weight_updates(
    inputs: PlanInputs, layouts: Sequence[Layout]
) -> tuple[PlanInputs, list[Candidate]]:
    """Evaluate the candidates with fp32 weights in full mode, with bf16 ones where nothing fits
    otherwise but offload. Raises ConfigError as `evaluate_candidates`."""
    candidates = evaluate_candidates(inputs, layouts)
    rounding_inputs = dataclasses.replace(inputs, fp32_master_weights=False)
    rounded_layouts = [
        one
        for one in layouts
        if rounding_inputs.layout_precision(one) != inputs.layout_precision(one)
    ]
    if not rounded_layouts or any(
        one.fits and not one.layout.offloads_states for one in candidates
    ):
        return inputs, candidates
    # rounding loses precision, offload loses more speed: bf16 is evaluated where fp32 does not fit,
    # or only offloaded
    rounded_candidates = evaluate_candidates(rounding_inputs, rounded_layouts)
    if not any(one.fits for one in rounded_candidates) and any(one.fits for one in candidates):
        return inputs, candidates
    return (
        rounding_inputs,
        [one for one in candidates if one.layout not in rounded_layouts] + rounded_candidates,
    )


def _collect_candidates(
    layouts: Sequence[Layout], evaluate_layout: Callable[[Layout], Sequence[Candidate]]
) -> list[Candidate]:
    # one layout that cannot take the batch refuses nothing as long as another can
    candidates: list[Candidate] = []
    errors: list[ConfigError] = []
    for layout in layouts:
        try:
            candidates += evaluate_layout(layout)
        except ConfigError as error:
            # such as a batch that this layout's data-parallel ranks do not divide
            errors.append(error)
    if not candidates and errors:
        raise errors[0]
    return candidates


def lowest_memory_candidates(inputs: PlanInputs, layouts: Sequence[Layout]) -> list[Candidate]:
    """Build the candidate of each layout with the least memory: the smallest micro-batch with as
    much checkpointing as the config allows, and the next one where it is a single micro step, which
    keeps no gradients. Raises ConfigError as `evaluate_candidates`."""
    checkpointed_layers = most_checkpointed_layers(inputs)

    def layout_candidates(layout: Layout) -> list[Candidate]:
        batches = batch_splits(
            inputs.config.train, ranks=layout.data_parallel, resumed_batch=inputs.resumed_batch
        )
        single_micro_step = [batch for batch in batches[1:2] if batch.grad_accum == 1]
        return [
            build_candidate(inputs, layout, batch, checkpointed_layers, eval_rows=1)
            for batch in (*batches[:1], *single_micro_step)
        ]

    return _collect_candidates(layouts, layout_candidates)


def _batch_candidates(inputs: PlanInputs, layout: Layout, batch: BatchPlan) -> Iterator[Candidate]:
    num_layers = inputs.shape.num_layers
    requested_layers = requested_checkpoint_layers(inputs.config, inputs.shape)
    if requested_layers is not None:
        yield build_candidate(inputs, layout, batch, requested_layers)
        return
    uncheckpointed, checkpointed = (
        build_candidate(inputs, layout, batch, layers) for layers in (0, num_layers)
    )
    yield from (uncheckpointed, checkpointed)
    if checkpointed.fits and not uncheckpointed.fits:
        # a few in between are enough: speeds within 3% count as equal
        quarters = (num_layers * quarter // 4 for quarter in (1, 2, 3))
        yield from (build_candidate(inputs, layout, batch, layers) for layers in quarters if layers)


def requested_checkpoint_layers(config: RunConfig, shape: ModelShape) -> int | None:
    """The number of layers that the config asks to recompute; None where the plan decides. Raises
    ConfigError where it asks for some and the class cannot checkpoint."""
    option, num_layers = config.train.gradient_checkpointing, shape.num_layers
    if not shape.can_checkpoint:
        if option not in ("auto", False, 0):
            raise ConfigError(
                f"train.gradient_checkpointing={json.dumps(option)}: transformers' class for model"
                f" type {shape.model_type} has no activation checkpointing that frees memory; set"
                " it to false or auto"
            )
        return 0
    if option == "auto":
        return None
    if option is True or option == "offload":
        return num_layers
    return min(int(option), num_layers)


def most_checkpointed_layers(inputs: PlanInputs) -> int:
    """As many layers as the config allows to recompute, which takes the least memory."""
    requested_layers = requested_checkpoint_layers(inputs.config, inputs.shape)
    return inputs.shape.num_layers if requested_layers is None else requested_layers


def build_candidate(
    inputs: PlanInputs,
    layout: Layout,
    batch: BatchPlan,
    checkpointed_layers: int,
    *,
    loss: Any = None,
    eval_rows: int | None = None,
    keeps_masks: bool = False,
) -> Candidate:
    """Build one candidate with its predictions. `keeps_masks`: padded rows and packs have a mask
    even where they need none. `eval_rows`: rows of an evaluation batch where the config leaves them
    open; None: the most that need no more memory than the step (1 has the same peak, where only
    fitting is asked). `loss`: another loss than the run's.
    """
    # the layout decides the weights' dtype, and all sizes below follow from it
    precision = inputs.layout_precision(layout)
    if loss is None:
        loss = inputs.shape.loss_name
    step = _build_step(
        inputs, layout, batch, checkpointed_layers, loss=loss, uses_masks=keeps_masks
    )
    if step.one_by_one and inputs.cuts_by_tokens and inputs.row_tokens is not None:
        # every call costs its start, and padding is computed like text: only the rows' own lengths
        # say which is faster
        step = max(
            step,
            _build_step(inputs, layout, batch, checkpointed_layers, loss=loss, keeps_padding=True),
            key=lambda one: (
                predict_step_speed(inputs, precision, one, inputs.layout_rates(layout)).tokens_per_s
            ),
        )
    simulation = create_step_simulation(inputs.config, inputs.shape, precision, step)
    if inputs.has_eval:
        # the evaluation's size follows from the training step's bytes, so the simulation comes
        # first
        simulation.step = dataclasses.replace(
            step, eval_batch=choose_eval_batch(simulation, default_rows=eval_rows)
        )
    step, memory = simulation.step, estimate_from_simulation(simulation)
    # of the step with its evaluation, because both are one run's
    correction = inputs.find_correction(layout)
    speed = predict_step_speed(inputs, precision, step, inputs.layout_rates(layout))
    uncorrected_speed = speed
    if inputs.layout_rates(layout) != inputs.rates:
        uncorrected_speed = predict_step_speed(inputs, precision, step, inputs.rates)
    # recorded beside the measurement when the run ends
    uncorrected = UncorrectedPrediction(
        memory.reserved, uncorrected_speed.tokens_per_s, uncorrected_speed.pass_times
    )
    return Candidate(
        layout=layout,
        batch=batch,
        step=step,
        precision=precision,
        memory=dataclasses.replace(
            memory,
            reserved=correction.corrected_reserved(uncorrected.reserved, inputs.device_budget),
        ),
        # a duration: slower by the factor that tokens/s are lower
        speed=speed.scaled(1 / correction.speed_factor),
        budget=MemoryBudget(inputs.device_budget, inputs.host_budget),
        host_required=_required_host_bytes(inputs, layout, memory),
        uncorrected=uncorrected,
        layers=inputs.shape.num_layers,
    )


def _required_host_bytes(inputs: PlanInputs, layout: Layout, memory: MemoryEstimate) -> int:
    """Bytes of RAM that the ranks of the first node need together: to offload and to write, or to
    load; 0 on a CPU."""
    if not inputs.hardware.gpus:
        return 0
    ranks = min(layout.ranks, inputs.hardware.ranks_per_node)
    reader_count = 1 if loads_by_unit(inputs.config, layout) else ranks
    load_bytes = memory.host_load_bytes * reader_count
    offloaded_bytes = (memory.host_bytes - memory.host_save_bytes) * ranks
    if layout.is_streamed:  # what was read stays there
        return offloaded_bytes + max(memory.host_save_bytes, load_bytes)
    # loading is over when the first checkpoint is written, so the two do not add up
    return max(offloaded_bytes + memory.host_save_bytes, load_bytes)


def predict_step_speed(inputs: PlanInputs, precision: Precision, step: Step, rates: Rates) -> Speed:
    """The predicted speed of a step at these rates, of the run's own rows where their lengths are
    known."""
    micro_steps = estimate_micro_steps(inputs, precision, step)
    return predict_speed(
        inputs.config, inputs.shape, precision, step, rates, micro_steps=micro_steps
    )


def estimate_micro_steps(
    inputs: PlanInputs, precision: Precision, step: Step
) -> AverageMicroSteps | None:
    """The micro steps of an average step of the run's own rows; None where their lengths are not
    known."""
    if inputs.row_tokens is None:
        return None
    layout = step.layout
    micro_steps = average_micro_steps(
        inputs.row_tokens,
        plan_micro_batches(inputs, precision, step),
        effective_batch=step.micro_batch * step.grad_accum * layout.data_parallel,
        ranks=layout.data_parallel,
    )
    return dataclasses.replace(
        micro_steps, padded_tokens=micro_steps.padded_tokens / layout.context_parallel
    )


def _build_step(
    inputs: PlanInputs,
    layout: Layout,
    batch: BatchPlan,
    checkpointed_layers: int,
    *,
    loss: Any,
    uses_masks: bool = False,
    keeps_padding: bool = False,
) -> Step:
    """Build the step, without an evaluation. `uses_masks`, `keeps_padding`: rows have a mask, or
    padding, even where they need none."""
    # first how rows lie: joined with boundaries, which saves padding and a mask, wherever the
    # attention takes them; ranks that share a row each have a part of it, and no boundaries
    joins_rows = inputs.packed or (inputs.cuts_by_tokens and layout.context_parallel == 1)
    varlen = (
        joins_rows
        and not uses_masks
        and not keeps_padding
        and inputs.row_attention.pack_mask_reason(inputs.layout_precision(layout)) is None
    )
    # then whether what is padded keeps its mask: most attention is causal and does not need it
    uses_masks = uses_masks or inputs.row_attention.mask_reason is not None
    # a packed row needs a mask even alone; by tokens short rows share a micro-batch of one full row
    shares_micro_batches = inputs.packed or (
        inputs.cuts_by_tokens and batch.micro_batch * batch.grad_accum > 1
    )
    has_padding = not varlen and is_padded(
        inputs.config,
        layout,
        rows=max(batch.micro_batch, 1 + shares_micro_batches),
        uses_masks=inputs.packed or uses_masks,
    )
    vision, pictures = inputs.shape.vision, 0
    if vision is not None:
        has_padding = has_padding or vision.weights.has_picture_mask
        pictures = vision.max_pictures(
            rows=None if inputs.cuts_by_tokens else batch.micro_batch,
            tokens=batch.micro_batch * inputs.seq_len,
        )
    return Step(
        micro_batch=batch.micro_batch,
        grad_accum=batch.grad_accum,
        seq_len=inputs.seq_len,
        layout=layout,
        checkpointed_layers=checkpointed_layers,
        offloads=inputs.config.train.gradient_checkpointing == "offload"
        and bool(inputs.hardware.gpus),
        loss=loss,
        attention=inputs.attention,
        padded=has_padding,
        masks=uses_masks,
        varlen=varlen,
        one_by_one=varlen
        and inputs.row_attention.one_by_one_reason(inputs.layout_precision(layout)) is not None,
        cudnn=not varlen and inputs.uses_cudnn(inputs.layout_precision(layout), layout),
        saves=True,
        on_gpu=bool(inputs.hardware.gpus),
        capability=inputs.capability,
        fla=bool(inputs.hardware.gpus)
        and LINEAR_ATTENTION_PACKAGE in inputs.shape.kernel_packages
        and LINEAR_ATTENTION_PACKAGE not in inputs.rates.missing_packages,
        pages=inputs.hardware.pages and bool(inputs.hardware.gpus),
        pictures=pictures,
    )


def plan_micro_batches(inputs: PlanInputs, precision: Precision, step: Step) -> MicroBatches:
    """How the rows of a step are divided: padded to the longest, or joined where the attention
    takes boundaries."""
    if not inputs.cuts_by_tokens:
        return MicroBatches(step.micro_batch)
    overhead_tokens = micro_step_overhead_tokens(
        inputs.config, inputs.shape, precision, step, inputs.layout_rates(step.layout)
    )
    # to two digits: candidates that hardly differ share work
    return MicroBatches(
        step.micro_batch,
        tokens=step.micro_batch * step.seq_len,
        overhead=round(overhead_tokens, 2 - len(str(overhead_tokens))),
        padded=not step.varlen,
        single=step.grad_accum == 1,
    )


def choose_eval_batch(simulation: StepMemorySimulation, *, default_rows: int | None = None) -> int:
    """Rows of one rank's evaluation batch: the config's number, else `default_rows`, else as many
    as need no more memory than the step."""
    option = simulation.config.eval.batch_size
    if option != "auto":
        return option
    if default_rows is not None:
        return default_rows
    return max_evaluation_rows(simulation)


# How much faster than what fits as a whole a streamed base must be predicted: its speed was
# measured on no card yet.
STREAMED_LEAD = 1.25


def choose_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """Choose among the candidates that fit; None where none does. Offload only if nothing else
    fits: its speed is hardly known. A streamed base where nothing else fits but offload, or where
    it is clearly faster."""
    candidates = [
        one for one in candidates if one.fits and not one.layout.offloads_states
    ] or candidates
    resident = [one for one in candidates if not one.layout.is_streamed]
    if fastest_speed(candidates) < STREAMED_LEAD * fastest_speed(resident):
        candidates = resident
    min_speed = EQUAL_SPEED_SHARE * fastest_speed(candidates)
    # equally fast: the simplest layout, then all layers or none, then the smallest, which leaves
    # most memory free
    return min(
        (one for one in candidates if one.fits and one.speed.tokens_per_s >= min_speed),
        key=lambda one: (
            LAYOUT_PREFERENCE.index(one.layout.name),
            one.checkpointing == "selective",
            one.batch.micro_batch,
            one.memory.required,
        ),
        default=None,
    )


def fastest_speed(candidates: Sequence[Candidate]) -> float:
    """Tokens per second of the fastest candidate that fits; 0 where none does."""
    return max(
        (candidate.speed.tokens_per_s for candidate in candidates if candidate.fits), default=0.0
    )


def closest_to_fitting(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate closest to fitting, for a plan in which nothing fits."""
    return min(
        candidates, key=lambda candidate: (candidate.budget_ratio, candidate.memory.required)
    )


def first_fitting(candidates: Iterable[Candidate]) -> Candidate:
    """The first candidate that fits, without evaluating those after it; if none does, the closest
    to fitting."""
    too_large = []
    for candidate in candidates:
        if candidate.fits:
            return candidate
        too_large.append(candidate)
    return closest_to_fitting(too_large)


def format_needs(candidate: Candidate, *, term_count: int) -> str:
    """What a candidate that does not fit needs and what there is, with the largest terms of the
    device's memory."""
    needs = []
    if candidate.memory.required > candidate.budget.device:
        unit, memory = "GiB" + " of RAM" * (not candidate.step.on_gpu), candidate.memory
        terms_text = (
            f"while loading {format_gib(memory.load_bytes)}, of which a step keeps"
            f" {format_gib(memory.resident)}"
        )
        if not memory.is_limited_by_loading:
            largest_items = sorted(memory.terms.items(), key=lambda item: -item[1])[:term_count]
            terms_text = ", ".join(
                f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in largest_items
            )
        needs.append(
            f"{_format_need(candidate.memory.required, candidate.budget.device, unit)}"
            f" ({terms_text})"
        )
    if candidate.budget.host is not None and candidate.host_required > candidate.budget.host:
        needs.append(
            f"{_format_need(candidate.host_required, candidate.budget.host, 'GiB of RAM')} on each"
            " node"
        )
    return " and ".join(needs)


def _format_need(needed_bytes: int, budget_bytes: int, unit: str = "GiB") -> str:
    """`12.6 of 139.8 GiB`, with as many digits as it takes to show that the need is larger."""
    digits = 1
    # of sizes that differ by less than a byte in nine digits none shows it
    while (
        digits < 9
        and needed_bytes - budget_bytes > 0
        and (round(needed_bytes / GIB, digits) <= round(budget_bytes / GIB, digits))
    ):
        digits += 1
    return f"{needed_bytes / GIB:.{digits}f} of {budget_bytes / GIB:.{digits}f} {unit}"


# --------------------------------------------------------------------------------------------------
# A candidate as plain data for `plan --json` and `plan.json`, and back.
#
# Every figure of a candidate is written, so that a rank that receives a plan has what its parent
# has.

# Fields of the memory estimate with other names in the JSON.
_MEMORY_NAMES = {"host_bytes": "host", "load_bytes": "load"}
# The JSON's name of each field of the layout.
_LAYOUT_NAMES = {
    "name": "layout",
    "data_parallel": "data_parallel_ranks",
    "shard": "shard_ranks",
    "tensor_parallel": "tensor_parallel_ranks",
    "context_parallel": "context_parallel_ranks",
    "keeps_params": "keeps_params",
}


def candidate_json(candidate: Candidate, *, speed_known: bool) -> dict[str, Any]:
    """The fields that scripts read, and everything else that a plan holds of a candidate."""
    memory, batch, speed = candidate.memory, candidate.batch, candidate.speed
    # as every run does; plans keep the JSON that they had, and without cuDNN's kernel
    step = asdict(candidate.step) | {"repeats_kv": True}
    del step["layout"]
    for name in ("cudnn", "pictures"):
        if not step[name]:
            del step[name]
    offloaded_bytes = memory.host_bytes - memory.host_save_bytes - memory.host_save_each_bytes
    known_speed: dict[str, float | None] = {"tokens_per_s": None, "step_s": None}
    if speed_known:
        known_speed = {"tokens_per_s": speed.tokens_per_s, "step_s": speed.step_s}
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
            # answers are generated in batches that take no more than the peak
            "generate": memory.allocated,
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
        **known_speed,
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
    names = {
        field.name: _MEMORY_NAMES.get(field.name, field.name) for field in fields(MemoryEstimate)
    }
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
