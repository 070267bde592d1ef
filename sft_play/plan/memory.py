"""Bytes of a training step's peak, term by term: the closed form of one rank.

A step is a row of moments (forward, head, backward, optimizer, evaluation, saving); each has its live bytes, and the
largest is the peak. What stays between steps comes from `plan.states`, what a block and the head hold and touch from
`plan.block` and `plan.head`, which follow the libraries' own forward on sizes, and what a cut model gathers from
`plan.gather`; `plan.moments` walks through them. No tensor is made: a candidate takes milliseconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from sft_play.config.schema import RunConfig
from sft_play.facts.model_shape import ModelShape
from sft_play.plan.layout import Layout
from sft_play.plan.margins import (
    DESKTOP_BYTES,
    GIB,
    MARGIN_BYTES,
    MARGINS,
    margin_of,
    reserved_bytes,
    reserved_over,
    stays,
)
from sft_play.plan.moments import Step, Walk, largest
from sft_play.plan.precision import Precision
from sft_play.plan.saving import Form, Saving, saving_of
from sft_play.plan.states import adapter_params, nf4_bytes, paged_bytes

__all__ = ["GIB", "MemoryEstimate", "Step", "adapter_params", "estimate", "nf4_bytes"]

CUDA_CONTEXT_BYTES = GIB // 2
"""CUDA context and kernels, outside the allocator: 141 MiB seen on a T4, 0.4 to 0.6 GiB said of H100s."""
NCCL_BYTES = 688 * 2**20
"""NCCL's buffers per communicator, the upper end of what was reported (544 to 688 MiB)."""
LOAD_MARGIN = MARGINS["quantised"].share
"""Share of the bytes of loading that is kept free beside them. Not measured on a GPU yet; a step's margin is for what
activations may do, and there are none."""

MOST_EVALUATION_ROWS = 64
"""Rows of an evaluation batch that a plan takes at most: a device that computes so many at once has no more to gain,
and each rank's last batch is filled up."""

CPU_ACTIVATION_SLACK = 3.0
"""What a CPU process keeps of freed activations, times their size. With it and CPU_LATE_BYTES the prediction is 0.95
to 1.8 times the resident memory of six runs of a 2M model (2026-11-21, two cores)."""
CPU_LATE_BYTES = GIB // 4
"""Libraries and threads that a CPU run brings in after the imports, from the same runs."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted peak of one rank in bytes: `terms` add up to `allocated`; `required` is what must be free."""

    terms: dict[str, int] = field(default_factory=dict)
    """What the bytes are for at the peak: weights, adapters, master_weights, gradients, optimizer, gradient_buckets,
    workspaces, activations, loss_head, dequantised, gather_buffers, optimizer_step; those of no bytes may be absent."""
    reserved: int = 0
    margin: int = 0
    outside_allocator: int = 0
    """CUDA context, NCCL, and the managed memory of paged optimizer states."""
    moment: str = ""
    """The moment of the step that is the peak: forward, head, backward, optimizer, evaluation, saving."""
    moments: dict[str, int] = field(default_factory=dict)
    """Allocated bytes at each moment of a step."""
    load_bytes: int = 0
    """Allocated bytes while the model is loaded, before the first step: more than a step's where a rank makes all NF4
    weights of which it keeps a part."""
    host_bytes: int = 0
    """RAM that this rank needs for what is offloaded and for writing a checkpoint."""
    host_save_bytes: int = 0
    """Of those, what the first rank alone takes to write a checkpoint or the final weights."""
    host_save_each_bytes: int = 0
    """Of those, what each rank takes to write its part of a checkpoint."""
    host_gather_bytes: int = 0
    """RAM that the first rank would take for a checkpoint that it writes whole."""
    checkpoint: Form = "whole"
    """How a checkpoint is written: whole by the first rank, sharded by all, or by DeepSpeed."""
    checkpoint_bytes: int = 0
    """Weights and optimizer states of one checkpoint."""
    host_load_bytes: int = 0
    """RAM for loading the weights, of a rank that reads them (under FSDP2 the first alone), pages of the files left
    out: those can be dropped."""
    margin_reason: str = ""
    kept_free: int = MARGIN_BYTES
    """Of the margin: what is kept free whatever the run's size."""

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold at the peak."""
        return sum(self.terms.values())

    @property
    def stays(self) -> int:
        """Of those: bytes that stay between steps."""
        return stays(self.terms)

    @property
    def required_to_load(self) -> int:
        """Bytes that must be free for loading: tensors whose sizes are known, with a margin for what quantising them
        one by one leaves in the allocator."""
        return int(self.load_bytes * (1 + LOAD_MARGIN)) + self.kept_free + self.outside_allocator

    @property
    def loading_decides(self) -> bool:
        """Whether loading needs more than any step does."""
        return self.required_to_load > self.reserved + self.margin + self.outside_allocator

    @property
    def required(self) -> int:
        """Bytes that must be free on the device before the run starts: for the steps, or for loading where it needs
        more."""
        return max(self.reserved + self.margin + self.outside_allocator, self.required_to_load)


def estimate(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> MemoryEstimate:
    """The predicted peak of a step on one rank: the largest of its moments, and what must be free for it."""
    return estimate_of(Walk(config, shape, precision, step), precision)


def estimate_of(walk: Walk, precision: Precision) -> MemoryEstimate:
    """The same of a step whose way is known."""
    config, shape, step = walk.config, walk.shape, walk.step
    found = largest(walk.moments())
    sums = {str(name): sum(terms.values()) for name, terms in found.items()}
    peak = max(found, key=lambda name: sums[name])
    terms, mode, layout = found[peak], config.tuning.mode, step.layout
    reserved = max(_held(name, one, step) for name, one in found.items() if step.on_gpu or name == peak)
    if step.on_gpu:  # an evaluation begins with an empty cache
        steps = [one for name, one in found.items() if name != "evaluation"]
        reserved = max(reserved, reserved_over(steps, attention=step.attention, layout=layout))
    margin = margin_of(
        mode=mode,
        padded=step.padded,
        attention=step.attention,
        optim=config.train.optim,
        layout=layout,
        experts=shape.num_experts > 0,
        approximate=bool(shape.note),
        autocast=precision.load != precision.compute,
    )
    free = MARGIN_BYTES + (DESKTOP_BYTES if step.pages else 0)
    desktop = f"; {DESKTOP_BYTES / GIB:.1f} GiB of it for the desktop beside WSL" if step.pages else ""
    paged = paged_bytes(config.train.optim, walk.trained)
    saving = saving_of(walk) if step.saves else Saving("whole", 0, 0, 0, 0)
    return MemoryEstimate(
        terms=terms,
        reserved=reserved,
        margin=int(reserved * margin.share) + free,
        outside_allocator=paged + _outside(layout, on_gpu=step.on_gpu),
        moment=peak,
        moments=sums,
        load_bytes=sum(walk.loading().values()),
        host_bytes=walk.resident.host + walk.offloaded() + saving.first + saving.each,
        host_save_bytes=saving.first,
        host_save_each_bytes=saving.each,
        host_gather_bytes=saving.gathered,
        checkpoint=saving.form,
        checkpoint_bytes=saving.total,
        host_load_bytes=walk.read_in_ram() if step.on_gpu else 0,
        margin_reason=f"{margin.share:.0%} + {free / GIB:.1f} GiB: {margin.reason}{desktop}",
        kept_free=free,
    )


def evaluation_rows(walk: Walk) -> int:
    """Rows of the largest evaluation batch of one rank that is never the run's peak: what is reserved for it is at most
    what the training step's own tensors take. One row at least, MOST_EVALUATION_ROWS at most."""
    step, training = walk.step, walk.training
    if step.on_gpu:
        room = max(sum(terms.values()) for terms in training.values())
    else:
        room = max(_held(name, terms, step) for name, terms in training.items())

    def is_beyond(rows: int) -> bool:
        return any(_held(name, terms, step) > room for name, terms in walk.evaluation(rows))

    if not is_beyond(MOST_EVALUATION_ROWS):
        return MOST_EVALUATION_ROWS
    return max(1, bisect.bisect_left(range(1, MOST_EVALUATION_ROWS), True, key=is_beyond))


def _held(moment: str, terms: Mapping[str, int], step: Step) -> int:
    """Bytes reserved, or resident on a CPU, when a moment's terms are alive."""
    if not step.on_gpu:
        return _resident_on_cpu(terms)
    evaluates = moment == "evaluation"
    return reserved_bytes(terms, attention=step.attention, layout=step.layout, evaluates=evaluates)


def _outside(layout: Layout, *, on_gpu: bool) -> int:
    if not on_gpu:
        return 0
    communicators = 0 if layout.ranks == 1 else 2 if layout.name in ("fsdp_hybrid", "fsdp_tp") else 1
    return CUDA_CONTEXT_BYTES + NCCL_BYTES * communicators


def _resident_on_cpu(terms: Mapping[str, int]) -> int:
    """Resident memory of a CPU process above the level after its imports: tensors, and what malloc does not return."""
    passing = terms["activations"] + terms["loss_head"]
    return sum(terms.values()) + int(CPU_ACTIVATION_SLACK * passing) + CPU_LATE_BYTES
