"""The ways a job could run on a machine, each with its predicted memory and speed, and which of them is taken.

Candidates are layouts x micro-batches x checkpointed layers. Among those that fit with their margin, speed within 3%
of the best counts as equal, and then the simplest layout and the smallest micro-batch win: memory that is left over
protects against what no prediction sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.architecture import ModelShape
from sft_play.facts.hardware import Hardware
from sft_play.plan.batching import BatchPlan, splits
from sft_play.plan.layout import SIMPLICITY, Layout
from sft_play.plan.memory import GIB, MemoryEstimate, Step, estimate_of, evaluation_rows
from sft_play.plan.moments import Walk, is_padded
from sft_play.plan.precision import Precision, with_updates
from sft_play.plan.record import Correction, Raw
from sft_play.plan.states import loads_by_unit
from sft_play.plan.throughput import Rates, Speed, predict_speed

AttentionName = Literal["sdpa", "eager", "flash_attention_2"]
AS_FAST = 0.97
"""Share of the best predicted speed from which a candidate counts as equally fast: the roofline is no finer."""
_FAILURES_IN_A_ROW = 2
"""Larger micro-batches are not looked at after so many that do not fit; one alone can be followed by one that does,
since a single pass keeps no gradients between passes."""


@dataclass(frozen=True)
class Room:
    """What a job may take: bytes of a rank's device, and of a node's RAM, which is None where nobody said it."""

    device: int
    host: int | None


@dataclass(frozen=True)
class Candidate:
    """One way to run the job; `rejected_because` is None for the chosen one.

    `memory` and `speed` are corrected by earlier runs, `raw` is what was predicted without them. `host_required` are
    bytes of RAM that the ranks of one node need together.
    """

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
        """Whether the device and the host have room for it; RAM that nobody said is left to the reader."""
        return not self.short_of

    @property
    def short_of(self) -> tuple[Literal["GPU memory", "RAM"], ...]:
        """What there is too little of."""
        device: Literal["GPU memory", "RAM"] = "GPU memory" if self.step.on_gpu else "RAM"
        found = [device] if self.memory.required > self.room.device else []
        if self.room.host is not None and self.host_required > self.room.host:
            found.append("RAM")
        return tuple(found)

    @property
    def hangs_on_ram(self) -> bool:
        """Whether it fits only if the host has RAM that nobody said it has."""
        return self.offloads and self.room.host is None

    @property
    def offloads(self) -> bool:
        """Whether anything of a step is kept in RAM."""
        return self.layout.offloads_states or self.step.offloads

    @property
    def overload(self) -> float:
        """The largest share of what there is that it needs: above 1 it does not fit."""
        host = self.host_required / max(1, self.room.host) if self.room.host is not None else 0.0
        return max(self.memory.required / max(1, self.room.device), host)

    @property
    def verdict(self) -> str:
        """Whether it fits, by which numbers, and of what there is too little."""
        device = f"{_of(self.memory.required, self.room.device)} per {'GPU' if self.step.on_gpu else 'process'}"
        host = "" if self.room.host is None else f"{_of(self.host_required, self.room.host)} on each node"
        if self.fits:
            return f"fits, {device}{self.ram_words}"
        said = {"GPU memory": device, "RAM": host if self.step.on_gpu else device}
        text = " and ".join(f"too little {what}: needs {said[what]}" for what in self.short_of)
        return f"does NOT fit, {text}{'' if device in text else f' ({device} would be enough)'}"

    @property
    def ram_words(self) -> str:
        """The RAM that a step with offload needs, as the end of a sentence; empty for the others."""
        if not self.offloads:
            return ""
        if self.room.host is None:
            return f", if each node has {_gib(self.host_required)} GiB of RAM (not given; ram=512GiB says it)"
        return f", and {_of(self.host_required, self.room.host)} of RAM on each node"

    @property
    def checkpointed(self) -> int:
        """Layers whose activations are computed again."""
        return self.layers if self.step.checkpointed_layers is None else self.step.checkpointed_layers

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
        """What tells candidates apart."""
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
    """RAM of one node that is free; None where the machine is only named and its RAM was not."""
    learned: Callable[[Layout], Correction]
    """What earlier runs on this machine say of a layout."""
    masters: bool = True
    """Whether weights that train in full may be held in fp32 where no engine keeps fp32 copies of them."""

    def precision_of(self, layout: Layout) -> Precision:
        """The precision of a layout."""
        return with_updates(self.precision, self.config, layout.name, masters=self.masters)

    @property
    def packed(self) -> bool:
        """Whether rows hold several chats, which a mask keeps apart as one keeps padding away."""
        return self.config.data.packing != "none" and self.config.task_mode != "cpt"


def weigh(job: Job, layouts: Sequence[Layout]) -> list[Candidate]:
    """Every candidate of the layouts, with its memory and speed; larger micro-batches end where they do not fit.

    Layouts whose data-parallel ranks do not divide the batch are left out.

    Raises:
        ConfigError: the batch that was given does not divide over the ranks of any.
    """
    return _of_those_that_divide(layouts, lambda layout: list(_of_layout(job, layout)))


def weigh_updates(job: Job, layouts: Sequence[Layout]) -> tuple[Job, list[Candidate]]:
    """The candidates, with weights in fp32 where they train in full; in bf16 where nothing fits so without offload.

    Raises:
        ConfigError: as `weigh`.
    """
    found = weigh(job, layouts)
    rounding = dataclasses.replace(job, masters=False)
    changed = [one for one in layouts if rounding.precision_of(one) != job.precision_of(one)]
    if not changed or any(one.fits and not one.layout.offloads_states for one in found):
        return job, found
    smaller = weigh(rounding, changed)
    if not any(one.fits for one in smaller) and any(one.fits for one in found):
        return job, found
    return rounding, [one for one in found if one.layout not in changed] + smaller


def _of_those_that_divide(layouts: Sequence[Layout], look: Callable[[Layout], Sequence[Candidate]]) -> list[Candidate]:
    found: list[Candidate] = []
    refusals: list[ConfigError] = []
    for layout in layouts:
        try:
            found += look(layout)
        except ConfigError as error:
            refusals.append(error)
    if not found and refusals:
        raise refusals[0]
    return found


def _of_layout(job: Job, layout: Layout) -> Iterator[Candidate]:
    failures = 0
    for batch in splits(job.config.train, ranks=layout.data_parallel):
        found = list(_of_batch(job, layout, batch))
        yield from found
        failures = 0 if any(candidate.fits for candidate in found) else failures + 1
        if failures >= _FAILURES_IN_A_ROW:
            return


def thriftiest(job: Job, layouts: Sequence[Layout]) -> list[Candidate]:
    """The candidate of each layout that needs the least: the smallest micro-batch with as much checkpointing as the
    config allows, and the next one where it is a single pass, which keeps no gradients between passes.

    Raises:
        ConfigError: the batch that was given does not divide over the ranks of any layout.
    """
    layers = job.shape.num_layers
    given = wished_layers(job.config, layers)
    count = layers if given is None else given

    def look(layout: Layout) -> list[Candidate]:
        batches = splits(job.config.train, ranks=layout.data_parallel)
        single_pass = [batch for batch in batches[1:2] if batch.grad_accum == 1]
        return [candidate_of(job, layout, batch, count) for batch in (*batches[:1], *single_pass)]

    return _of_those_that_divide(layouts, look)


def _of_batch(job: Job, layout: Layout, batch: BatchPlan) -> Iterator[Candidate]:
    """Checkpointing on and off, or as given; some layers only where all of them would not be needed."""
    layers = job.shape.num_layers
    given = wished_layers(job.config, layers)
    if given is not None:
        yield candidate_of(job, layout, batch, given)
        return
    off, on = candidate_of(job, layout, batch, 0), candidate_of(job, layout, batch, layers)
    yield off
    yield on
    if on.fits and not off.fits:
        for quarter in (1, 2, 3):
            if 0 < layers * quarter // 4 < layers:
                yield candidate_of(job, layout, batch, layers * quarter // 4)


def wished_layers(config: RunConfig, layers: int) -> int | None:
    """How many of a model's layers are to be recomputed; None where that is left to the plan."""
    wish = config.train.gradient_checkpointing
    if wish == "auto":
        return None
    if isinstance(wish, bool):
        return layers if wish else 0
    return layers if wish == "offload" else min(wish, layers)


def candidate_of(job: Job, layout: Layout, batch: BatchPlan, checkpointed: int, *, loss: Any = "chunked") -> Candidate:
    """One candidate with its predictions."""
    padded = is_padded(job.config, layout, rows=2 if job.packed else batch.micro_batch)
    step = Step(
        micro_batch=batch.micro_batch,
        grad_accum=batch.grad_accum,
        seq_len=job.seq_len,
        layout=layout,
        checkpointed_layers=checkpointed,
        offloads=job.config.train.gradient_checkpointing == "offload" and bool(job.hardware.gpus),
        loss=loss,
        attention=job.attention,
        padded=padded,
        saves=True,
        on_gpu=bool(job.hardware.gpus),
        capability=_capability(job.hardware),
        pages=job.hardware.pages and bool(job.hardware.gpus),
    )
    learned, precision = job.learned(layout), job.precision_of(layout)
    walk = Walk(job.config, job.shape, precision, step)
    if job.has_eval:
        walk.evaluates(eval_batch(walk))
    step, memory = walk.step, estimate_of(walk, precision)
    speed = predict_speed(job.config, job.shape, precision, step, job.rates)
    raw = Raw(memory.reserved, speed.tokens_per_s)
    return Candidate(
        layout=layout,
        batch=batch,
        step=step,
        precision=precision,
        memory=dataclasses.replace(memory, reserved=int(raw.reserved * learned.memory)),
        speed=speed.scaled(1 / learned.speed),
        room=Room(job.budget, job.host_budget),
        host_required=_host_required(job, layout, memory),
        raw=raw,
        layers=job.shape.num_layers,
    )


def eval_batch(walk: Walk) -> int:
    """Rows of an evaluation batch of one rank: as given, or as many as need no more memory than the step itself."""
    given = walk.config.eval.batch_size
    return evaluation_rows(walk) if given == "auto" else given


def _capability(hardware: Hardware) -> tuple[int, int] | None:
    found = [gpu.capability for gpu in hardware.gpus if gpu.capability is not None]
    return min(found) if found else None


def _host_required(job: Job, layout: Layout, memory: MemoryEstimate) -> int:
    """Bytes of RAM that the ranks of the first node need together: each for what it offloads, one to write; or to load
    the weights, where that is more."""
    if not job.hardware.gpus:
        return 0
    ranks = min(layout.ranks, job.hardware.gpus_per_node)
    offloaded = memory.host_bytes - memory.host_save_bytes
    readers = 1 if loads_by_unit(job.config, layout) else ranks
    return max(offloaded * ranks + memory.host_save_bytes, memory.host_load_bytes * readers)


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate to take among those that fit, or None.

    Offload is taken only where nothing else fits: its speed hangs on the host, of which little is known here.
    """
    candidates = [one for one in candidates if one.fits and not one.layout.offloads_states] or candidates
    enough = AS_FAST * fastest(candidates)
    equal = [candidate for candidate in candidates if candidate.fits and candidate.speed.tokens_per_s >= enough]
    return min(equal, key=_preference, default=None)


def fastest(candidates: Sequence[Candidate]) -> float:
    """Tokens per second of the fastest candidate that fits; 0 where none does."""
    return max((one.speed.tokens_per_s for one in candidates if one.fits), default=0.0)


def _preference(candidate: Candidate) -> tuple[int, bool, int, int]:
    simplicity = SIMPLICITY.index(candidate.layout.name)
    is_selective = candidate.checkpointing == "selective"
    return (simplicity, is_selective, candidate.batch.micro_batch, candidate.memory.required)


def least(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that is nearest to fitting, for a plan in which nothing fits."""
    return min(candidates, key=lambda candidate: (candidate.overload, candidate.memory.required))


def shown(job: Job, candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """The candidates that a person wants to see, each with why it was not taken: every micro-batch of the chosen
    layout and checkpointing, every checkpointing with the chosen micro-batch, and the best of each other layout."""
    kept: dict[Any, Candidate] = {chosen.key: chosen}
    for candidate in candidates:
        same_layout = candidate.layout == chosen.layout
        same_batch = candidate.batch.micro_batch == chosen.batch.micro_batch
        if same_layout and (same_batch or candidate.checkpointed == chosen.checkpointed):
            kept.setdefault(candidate.key, candidate)
    for layout in {candidate.layout: None for candidate in candidates}:
        mine = [candidate for candidate in candidates if candidate.layout == layout]
        best = choose(mine) or least(mine)
        kept.setdefault(best.key, best)
    whole = candidate_of(job, chosen.layout, chosen.batch, chosen.checkpointed, loss="logits")
    if chosen.fits or not whole.fits:  # training always cuts the loss into chunks
        kept.setdefault(whole.key, whole)
    speed = fastest(candidates)
    return [
        candidate
        if candidate.key == chosen.key
        else dataclasses.replace(candidate, rejected_because=because(job, candidate, chosen, best=speed))
        for candidate in kept.values()
    ]


def because(job: Job, candidate: Candidate, chosen: Candidate, *, best: float) -> str:
    """Why a candidate was not taken, with numbers; `best`: tokens per second of the fastest that fits."""
    if not candidate.fits:
        return f"needs {needs_words(candidate, terms=1)}"
    if candidate.step.loss != chosen.step.loss:
        more = candidate.memory.allocated - chosen.memory.allocated
        if more < GIB // 20:
            mine, others = _gib(candidate.memory.allocated), _gib(chosen.memory.allocated)
            return f"whole logits: {mine} GiB allocated; the chunked loss, which training takes, {others}"
        return f"whole logits: {_gib(more)} GiB more for the same loss"
    ratio = candidate.speed.tokens_per_s / chosen.speed.tokens_per_s
    if candidate.layout != chosen.layout:
        return _layout_reason(job, candidate, chosen, ratio)
    if candidate.speed.tokens_per_s < AS_FAST * best:
        word = "predicted" if job.rates.known else "with usual rates"
        return f"{word} {1 - candidate.speed.tokens_per_s / best:.1%} slower than the fastest that fits"
    more = candidate.memory.required - chosen.memory.required
    faster = f"only {ratio - 1:.1%} faster" if ratio >= 1.001 else "no faster"
    return f"{faster}, {_gib(more)} GiB more" if more > 0 else f"{faster}, {_gib(candidate.memory.required)} GiB too"


def _layout_reason(job: Job, candidate: Candidate, chosen: Candidate, ratio: float) -> str:
    if candidate.layout.offloads_states and not chosen.layout.offloads_states:
        needed = f"; it needs {_gib(candidate.host_required)} GiB of RAM on each node"
        return f"offload is not needed: {_fits_at(job, chosen)}{needed}"
    is_less_simple = SIMPLICITY.index(candidate.layout.name) > SIMPLICITY.index(chosen.layout.name)
    text = f"{'not needed' if is_less_simple else 'another is preferred'}: {_fits_at(job, chosen)}"
    moved = candidate.speed.moved_bytes - chosen.speed.moved_bytes
    if abs(moved) >= GIB // 10:
        text += f" and moves {abs(moved) / GIB:.1f} GiB {'less' if moved > 0 else 'more'} per step"
    if ratio < AS_FAST or not is_less_simple:
        text += f"; this is predicted {speed_words(ratio)}"
    return text


def speed_words(ratio: float) -> str:
    """A speed over another in words: `3% slower`, `12% faster`, `as fast`."""
    percent = f"{abs(ratio - 1):.0%}"
    if percent == "0%":
        return "as fast"
    return f"{percent} {'faster' if ratio > 1 else 'slower'}"


def needs_words(candidate: Candidate, *, terms: int) -> str:
    """What a candidate that does not fit needs and what there is, with the largest terms of the device's memory."""
    said = []
    if candidate.memory.required > candidate.room.device:
        what = "GiB" if candidate.step.on_gpu else "GiB of RAM"
        largest = largest_terms(candidate.memory, terms)
        said.append(f"{_of(candidate.memory.required, candidate.room.device, what)} ({largest})")
    if candidate.room.host is not None and candidate.host_required > candidate.room.host:
        said.append(f"{_of(candidate.host_required, candidate.room.host, 'GiB of RAM')} on each node")
    return " and ".join(said)


def largest_terms(memory: MemoryEstimate, count: int) -> str:
    """The largest terms of a peak, in GiB."""
    if memory.loading_decides:
        return f"while loading {_gib(memory.load_bytes)}, of which a step keeps {_gib(memory.stays)}"
    largest = sorted(memory.terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in largest)


def _fits_at(job: Job, chosen: Candidate) -> str:
    return f"{chosen.layout.name} fits at {_gib(chosen.memory.required)} of {_gib(job.budget)} GiB"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _of(need: int, there: int, unit: str = "GiB") -> str:
    """`12.6 of 139.8 GiB`, with as many digits as tell a need from less than it."""
    digits = next((n for n in range(1, 9) if need <= there or round(need / GIB, n) > round(there / GIB, n)), 9)
    return f"{need / GIB:.{digits}f} of {there / GIB:.{digits}f} {unit}"
