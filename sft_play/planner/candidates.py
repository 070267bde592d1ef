"""The ways a job could run on a machine, each with its predicted memory and speed, and the choice among them.

Candidates are layouts x micro-batches x checkpointed layers. Among those that fit with their margin, speeds within 3%
of the best count as equal, and the simplest layout with the smallest micro-batch wins: unused memory protects against
what no prediction sees.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware
from sft_play.facts.installed import LINEAR_ATTENTION_PACKAGE, PINNED_CUDA_LIBRARIES, CudaLibraries
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.attention import Attended, AttentionName, prefers_cudnn, sdpa_kernel
from sft_play.planner.batching import BatchPlan, splits
from sft_play.planner.calibration import Correction, Raw
from sft_play.planner.layout import SIMPLICITY, Layout
from sft_play.planner.memory.estimate import MemoryEstimate, estimate_from_simulation, max_evaluation_rows
from sft_play.planner.memory.measured_walk import create_step_simulation
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation, is_padded
from sft_play.planner.memory.structure import sdpa_call
from sft_play.planner.micro_batches import MicroBatches, RowTokens, average_passes
from sft_play.planner.precision import Precision, Updates, with_updates
from sft_play.planner.speed.throughput import Rates, Speed, pass_overhead, predict_speed
from sft_play.units import GIB, gib

# Fraction of the best predicted speed from which a candidate counts as equally fast: the roofline is no more
# precise.
AS_FAST = 0.97
# Larger micro-batches are not tried after this many that do not fit. A single one can be followed by one that fits,
# because a single pass keeps no gradients between passes.
_FAILURES_IN_A_ROW = 2


@dataclass(frozen=True)
class Room:
    """What a job may use: bytes of a rank's device, and of a node's RAM, which is None if unknown."""

    device: int
    host: int | None


@dataclass(frozen=True)
class Candidate:
    """One way to run the job; `rejected_because` is None for the chosen one. `memory` and `speed` are corrected by
    earlier runs, `raw` is the prediction without them. `host_required` is the RAM in bytes that the ranks of one node
    need together."""

    layout: Layout
    batch: BatchPlan
    step: Step
    precision: Precision
    memory: MemoryEstimate
    speed: Speed
    room: Room
    host_required: int
    raw: Raw
    layers: int
    rejected_because: str | None = None
    traced: bool = False

    @property
    def fits(self) -> bool:
        """Whether the device and the host have room for it; unknown RAM is left to the reader."""
        return not self.short_of

    @property
    def short_of(self) -> tuple[Literal["GPU memory", "RAM"], ...]:
        """Which memory is too small."""
        device: Literal["GPU memory", "RAM"] = "GPU memory" if self.step.on_gpu else "RAM"
        lacking = [device] if self.memory.required > self.room.device else []
        if self.room.host is not None and self.host_required > self.room.host:
            lacking.append("RAM")
        return tuple(lacking)

    @property
    def needs_unknown_ram(self) -> bool:
        """Whether it fits only if the host has RAM that is not known."""
        return self.offloads and self.room.host is None

    @property
    def offloads(self) -> bool:
        """Whether a step keeps anything in RAM."""
        return self.layout.offloads_states or self.step.offloads

    @property
    def overload(self) -> float:
        """The largest ratio of need to budget: above 1 it does not fit."""
        host = self.host_required / max(1, self.room.host) if self.room.host is not None else 0.0
        return max(self.memory.required / max(1, self.room.device), host)

    @property
    def verdict(self) -> str:
        """Whether it fits, with the numbers, and which memory is too small."""
        device = f"{_of(self.memory.required, self.room.device)} per {'GPU' if self.step.on_gpu else 'process'}"
        host = "" if self.room.host is None else f"{_of(self.host_required, self.room.host)} on each node"
        if self.fits:
            return f"fits, {device}{self.ram_words}"
        needs = {"GPU memory": device, "RAM": host if self.step.on_gpu else device}
        text = " and ".join(f"too little {what}: needs {needs[what]}" for what in self.short_of)
        return f"does NOT fit, {text}{'' if device in text else f' ({device} would be enough)'}"

    @property
    def ram_words(self) -> str:
        """The RAM that a step with offload needs, as the end of a sentence; empty for the others."""
        if not self.offloads:
            return ""
        if self.room.host is None:
            return f", if each node has {gib(self.host_required)} GiB of RAM (not given; set it with ram=512GiB)"
        return f", and {_of(self.host_required, self.room.host)} of RAM on each node"

    @property
    def checkpointed(self) -> int:
        """Layers whose activations are recomputed."""
        return self.step.recomputed_layers(self.layers)

    @property
    def checkpointing(self) -> bool | str:
        """True for all layers, False for none, else `selective`."""
        return self.checkpointed == self.layers if self.checkpointed in (0, self.layers) else "selective"

    @property
    def checkpointing_words(self) -> str:
        """`checkpointing on`, `off`, or how many layers."""
        if self.checkpointing == "selective":
            return f"checkpointing in {self.checkpointed} of {self.layers} layers"
        if self.step.offloads:
            return "checkpointing with offload"
        return f"checkpointing {'on' if self.checkpointing else 'off'}"

    @property
    def key(self) -> tuple[Layout, int, int, str]:
        """Identifies a candidate."""
        return (self.layout, self.batch.micro_batch, self.checkpointed, self.step.loss)


@dataclass(frozen=True)
class Job:
    """What every candidate of a plan shares. Sizes in bytes and tokens."""

    config: RunConfig
    shape: ModelShape
    precision: Precision
    hardware: Hardware
    rates: Rates
    seq_len: int
    attention: AttentionName
    has_eval: bool
    budget: int
    host_budget: int | None
    """Free RAM of one node; None where the machine is only named and its RAM was not given."""
    learned: Callable[[Layout], Correction]
    """The correction from earlier runs on this machine, by layout."""
    masters: bool = True
    """Whether weights that train in full may be held in fp32 where no engine keeps fp32 copies of them."""
    fixed: BatchPlan | None = None
    """The batch that a resumed run keeps; None leaves it to the config and the plan."""
    updates: Updates | None = None
    """How updates have reached the weights of a run that is resumed."""
    rows: RowTokens | None = None
    """The lengths of the run's rows; None where they are not known, and all are taken to have full length."""
    libraries: CudaLibraries = PINNED_CUDA_LIBRARIES

    def precision_of(self, layout: Layout) -> Precision:
        """The precision of a layout."""
        return with_updates(self.precision, self.config, layout.name, masters=self.masters, kept=self.updates)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest compute capability of the GPUs; None where none is known."""
        return min((gpu.capability for gpu in self.hardware.gpus if gpu.capability is not None), default=None)

    @property
    def attended(self) -> Attended:
        """How its rows are attended to."""
        device = "rocm" if any(gpu.is_amd for gpu in self.hardware.gpus) else self.hardware.device
        return Attended(self.config, self.shape, self.attention, self.capability, device)

    def takes_cudnn(self, precision: Precision, layout: Layout) -> bool:
        """Whether sdpa runs cuDNN's kernel for rows of one length, which packs and blocks of text have."""
        is_full = self.packed or self.config.task_mode == "cpt"
        if not is_full or layout.context_parallel > 1 or self.attention != "sdpa" or self.shape.attention_dropout:
            return False
        is_amd = self.attended.device == "rocm"
        if self.config.tuning.backend != "bnb" or not prefers_cudnn(self.capability, self.libraries, is_amd=is_amd):
            return False
        call = sdpa_call(self.shape, masked=False, half_precision=precision.compute != "float32")
        return sdpa_kernel(call, self.capability, cudnn=True) == "cudnn"

    @property
    def by_tokens(self) -> bool:
        """Whether micro-batches are cut by tokens: the config leaves it open or asks for it, and rows differ in
        length."""
        train, is_full = self.config.train, self.packed or self.config.task_mode == "cpt"
        is_open = train.batch_size == "auto" and train.grad_accum == "auto"
        by_rows = train.batch_by == "rows" or (train.batch_by == "auto" and not is_open)
        return not is_full and not by_rows and train.group_by_length

    @property
    def packed(self) -> bool:
        """Whether rows hold several chats, which a mask separates as one separates padding."""
        return self.config.data.packing != "none" and self.config.task_mode != "cpt"


def weigh(job: Job, layouts: Sequence[Layout]) -> list[Candidate]:
    """Every candidate of the layouts, up to the largest micro-batch that fits; layouts whose data-parallel ranks do not
    divide the batch are left out. Raises ConfigError where none does."""

    def every(layout: Layout) -> list[Candidate]:
        candidates: list[Candidate] = []
        failures = 0
        for batch in splits(job.config.train, ranks=layout.data_parallel, fixed=job.fixed):
            of_batch = list(_of_batch(job, layout, batch))
            candidates += of_batch
            failures = 0 if any(candidate.fits for candidate in of_batch) else failures + 1
            # splits come with small micro-batches first, and a larger one needs more
            if failures >= _FAILURES_IN_A_ROW:
                break
        return candidates

    return _of_those_that_divide(layouts, every)


def weigh_updates(job: Job, layouts: Sequence[Layout]) -> tuple[Job, list[Candidate]]:
    """The candidates, with trained weights in fp32 in full mode; in bf16 where nothing fits otherwise without offload.
    Raises ConfigError as `weigh`."""
    candidates = weigh(job, layouts)
    rounding = dataclasses.replace(job, masters=False)
    changed = [one for one in layouts if rounding.precision_of(one) != job.precision_of(one)]
    if not changed or any(one.fits and not one.layout.offloads_states for one in candidates):
        return job, candidates
    # rounding loses precision, offload loses more speed: bf16 is weighed where fp32 does not fit, or only offloaded
    smaller = weigh(rounding, changed)
    if not any(one.fits for one in smaller) and any(one.fits for one in candidates):
        return job, candidates
    return rounding, [one for one in candidates if one.layout not in changed] + smaller


def _of_those_that_divide(layouts: Sequence[Layout], look: Callable[[Layout], Sequence[Candidate]]) -> list[Candidate]:
    candidates: list[Candidate] = []
    refusals: list[ConfigError] = []
    for layout in layouts:
        try:
            candidates += look(layout)
        except ConfigError as error:  # such as a batch that this layout's data-parallel ranks do not divide
            refusals.append(error)
    if not candidates and refusals:
        raise refusals[0]
    return candidates


def thriftiest(job: Job, layouts: Sequence[Layout]) -> list[Candidate]:
    """The thriftiest candidate of each layout: the smallest micro-batch with as much checkpointing as the config
    allows, and the next one where it is a single pass, which keeps no gradients. Raises ConfigError as `weigh`."""
    layers = job.shape.num_layers
    given = wished_layers(job.config, job.shape)
    count = layers if given is None else given

    def look(layout: Layout) -> list[Candidate]:
        batches = splits(job.config.train, ranks=layout.data_parallel, fixed=job.fixed)
        single_pass = [batch for batch in batches[1:2] if batch.grad_accum == 1]
        return [candidate_of(job, layout, batch, count, eval_rows=1) for batch in (*batches[:1], *single_pass)]

    return _of_those_that_divide(layouts, look)


def _of_batch(job: Job, layout: Layout, batch: BatchPlan) -> Iterator[Candidate]:
    layers = job.shape.num_layers
    given = wished_layers(job.config, job.shape)
    if given is not None:
        yield candidate_of(job, layout, batch, given)
        return
    off, on = candidate_of(job, layout, batch, 0), candidate_of(job, layout, batch, layers)
    yield off
    yield on
    if on.fits and not off.fits:
        # a few in between are enough: speeds within 3% count as equal
        for quarter in (1, 2, 3):
            if 0 < layers * quarter // 4 < layers:
                yield candidate_of(job, layout, batch, layers * quarter // 4)


def wished_layers(config: RunConfig, shape: ModelShape) -> int | None:
    """How many of a model's layers are to be recomputed; None where the plan decides. Raises ConfigError where that is
    asked for, and the class cannot."""
    wish, layers = config.train.gradient_checkpointing, shape.num_layers
    if not shape.can_checkpoint:
        if wish not in ("auto", False, 0):
            raise ConfigError(
                f"train.gradient_checkpointing={json.dumps(wish)}: transformers' class for model type "
                f"{shape.model_type} has no activation checkpointing that frees memory; set it to false or auto"
            )
        return 0
    if wish == "auto":
        return None
    if isinstance(wish, bool):
        return layers if wish else 0
    return layers if wish == "offload" else min(wish, layers)


def candidate_of(
    job: Job,
    layout: Layout,
    batch: BatchPlan,
    checkpointed: int,
    *,
    loss: Any = None,
    eval_rows: int | None = None,
    masks: bool = False,
) -> Candidate:
    """One candidate with its predictions; `masks`: padded rows and packs come with a mask even where they need none;
    `eval_rows`: of an evaluation batch where the config leaves them open (None: the most that need no more memory than
    the step; where only fitting is asked, 1 has the same peak); `loss`: of which logits, where not the run's."""
    precision = job.precision_of(layout)
    loss = loss or ("logits" if job.shape.has_custom_logits else "chunked")
    step = _step_of(job, layout, batch, checkpointed, loss=loss, masks=masks)
    if step.one_by_one and job.by_tokens and job.rows is not None:
        # every call costs its start, and padding is computed like text: only the rows' own lengths say which is faster
        padded = _step_of(job, layout, batch, checkpointed, loss=loss, pads=True)
        step = max(step, padded, key=lambda one: _speed_of(job, precision, one).tokens_per_s)
    walk = create_step_simulation(job.config, job.shape, precision, step)
    if job.has_eval:
        # the evaluation's size follows from the training step's bytes, so the walk comes first
        walk.step = dataclasses.replace(step, eval_batch=eval_batch(walk, otherwise=eval_rows))
    step, memory = walk.step, estimate_from_simulation(walk)
    learned = job.learned(layout)
    speed = _speed_of(job, precision, step)
    raw = Raw(memory.reserved, speed.tokens_per_s)  # recorded beside the measurement when the run ends
    return Candidate(
        layout=layout,
        batch=batch,
        step=step,
        precision=precision,
        memory=dataclasses.replace(memory, reserved=learned.reserved(raw.reserved, job.budget)),
        speed=speed.scaled(1 / learned.speed),  # a duration: slower by the factor that tokens/s are lower
        room=Room(job.budget, job.host_budget),
        host_required=_host_required(job, layout, memory),
        raw=raw,
        layers=job.shape.num_layers,
    )


def _speed_of(job: Job, precision: Precision, step: Step) -> Speed:
    passes = None
    if job.rows is not None:
        layout = step.layout
        effective, cut = step.micro_batch * step.grad_accum * layout.data_parallel, micro_batches(job, precision, step)
        passes = average_passes(job.rows, cut, effective_batch=effective, ranks=layout.data_parallel)
        passes = dataclasses.replace(passes, places=passes.places / layout.context_parallel)
    return predict_speed(job.config, job.shape, precision, step, job.rates, passes=passes)


def _step_of(
    job: Job, layout: Layout, batch: BatchPlan, checkpointed: int, *, loss: Any, masks: bool = False, pads: bool = False
) -> Step:
    """Without an evaluation; `masks` and `pads`: rows have a mask, or are padded, even where they need not."""
    # ranks that share a row each have a part of it, and no boundaries
    joins = job.packed or (job.by_tokens and layout.context_parallel == 1)
    varlen = joins and not masks and not pads and job.attended.unbounded_because(job.precision_of(layout)) is None
    masks = masks or job.attended.masked_because is not None
    # a packed row needs a mask even alone; by tokens short rows share a micro-batch of one full row
    shares = job.packed or (job.by_tokens and batch.micro_batch * batch.grad_accum > 1)
    padded = not varlen and is_padded(
        job.config, layout, rows=2 if shares else batch.micro_batch, uses_masks=job.packed or masks
    )
    return Step(
        micro_batch=batch.micro_batch,
        grad_accum=batch.grad_accum,
        seq_len=job.seq_len,
        layout=layout,
        checkpointed_layers=checkpointed,
        offloads=job.config.train.gradient_checkpointing == "offload" and bool(job.hardware.gpus),
        loss=loss,
        attention=job.attention,
        padded=padded,
        masks=masks,
        varlen=varlen,
        one_by_one=varlen and job.attended.one_by_one_because(job.precision_of(layout)) is not None,
        cudnn=not varlen and job.takes_cudnn(job.precision_of(layout), layout),
        saves=True,
        on_gpu=bool(job.hardware.gpus),
        capability=job.capability,
        fla=bool(job.hardware.gpus)
        and LINEAR_ATTENTION_PACKAGE in job.shape.kernel_packages
        and LINEAR_ATTENTION_PACKAGE not in job.rates.without,
        pages=job.hardware.pages and bool(job.hardware.gpus),
    )


def micro_batches(job: Job, precision: Precision, step: Step) -> MicroBatches:
    """How the rows of a step are divided: padded to the longest, or joined where the attention takes boundaries."""
    if not job.by_tokens:
        return MicroBatches(step.micro_batch)
    overhead = pass_overhead(job.config, job.shape, precision, step, job.rates)
    return MicroBatches(
        step.micro_batch,
        tokens=step.micro_batch * step.seq_len,
        overhead=round(overhead, 2 - len(str(overhead))),  # to two digits: candidates that hardly differ share work
        padded=not step.varlen,
        single=step.grad_accum == 1,
    )


def eval_batch(walk: StepMemorySimulation, *, otherwise: int | None = None) -> int:
    """Rows of one rank's evaluation batch: as given, else `otherwise`, else what needs no more memory than the step."""
    given = walk.config.eval.batch_size
    if given != "auto":
        return given
    return max_evaluation_rows(walk) if otherwise is None else otherwise


def _host_required(job: Job, layout: Layout, memory: MemoryEstimate) -> int:
    """Bytes of RAM that the ranks of the first node need together: for offload and one that writes, or to load."""
    if not job.hardware.gpus:
        return 0
    ranks = min(layout.ranks, job.hardware.gpus_per_node)
    offloaded = memory.host_bytes - memory.host_save_bytes
    readers = 1 if loads_by_unit(job.config, layout) else ranks
    # loading is over when the first checkpoint is written, so the two do not add up
    return max(offloaded * ranks + memory.host_save_bytes, memory.host_load_bytes * readers)


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate to take among those that fit, or None. Offload only if nothing else fits: its speed is hardly
    known."""
    candidates = [one for one in candidates if one.fits and not one.layout.offloads_states] or candidates
    enough = AS_FAST * fastest(candidates)
    # equally fast: the simplest layout, then all layers or none, then the smallest, which leaves most memory free
    equal = [candidate for candidate in candidates if candidate.fits and candidate.speed.tokens_per_s >= enough]
    return min(
        equal,
        key=lambda one: (
            SIMPLICITY.index(one.layout.name),
            one.checkpointing == "selective",
            one.batch.micro_batch,
            one.memory.required,
        ),
        default=None,
    )


def fastest(candidates: Sequence[Candidate]) -> float:
    """Tokens per second of the fastest candidate that fits; 0 where none does."""
    return max((one.speed.tokens_per_s for one in candidates if one.fits), default=0.0)


def least(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate closest to fitting, for a plan in which nothing fits."""
    return min(candidates, key=lambda candidate: (candidate.overload, candidate.memory.required))


def first_that_fits(candidates: Iterable[Candidate]) -> Candidate:
    """The first candidate that fits, without evaluating those after it; if none does, the closest to fitting."""
    too_large = []
    for candidate in candidates:
        if candidate.fits:
            return candidate
        too_large.append(candidate)
    return least(too_large)


def needs_words(candidate: Candidate, *, terms: int) -> str:
    """What a candidate that does not fit needs and what there is, with the largest terms of the device's memory."""
    needs = []
    if candidate.memory.required > candidate.room.device:
        unit = "GiB" if candidate.step.on_gpu else "GiB of RAM"
        largest = largest_terms(candidate.memory, terms)
        needs.append(f"{_of(candidate.memory.required, candidate.room.device, unit)} ({largest})")
    if candidate.room.host is not None and candidate.host_required > candidate.room.host:
        needs.append(f"{_of(candidate.host_required, candidate.room.host, 'GiB of RAM')} on each node")
    return " and ".join(needs)


def largest_terms(memory: MemoryEstimate, count: int) -> str:
    """The largest terms of a peak, in GiB."""
    if memory.is_limited_by_loading:
        return f"while loading {gib(memory.load_bytes)}, of which a step keeps {gib(memory.resident)}"
    largest = sorted(memory.terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in largest)


def _of(need: int, there: int, unit: str = "GiB") -> str:
    """`12.6 of 139.8 GiB`, with as many digits as it takes to show that the need is larger."""
    digits = next((n for n in range(1, 9) if need <= there or round(need / GIB, n) > round(there / GIB, n)), 9)
    return f"{need / GIB:.{digits}f} of {there / GIB:.{digits}f} {unit}"
