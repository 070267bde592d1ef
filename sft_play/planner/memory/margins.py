"""How much more than the prediction must be free, by what is known about a setting's class, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sft_play.planner.layout import Layout
from sft_play.units import GIB

STAYS = ("weights", "adapters", "master_weights", "optimizer", "gradient_buckets", "workspaces")
"""Terms that are allocated once: the allocator packs them, and loses only rounding."""
PASSING_SLACK = {"fused": 0.25, "eager": 0.50, "several_gpus": 0.50}
"""What the allocator keeps beyond a step's temporary tensors, as a fraction of their bytes: remainders of blocks that
were split for one size and requested for another (forward, backward, evaluation, the next batch's length). More for
attention's S x S matrices and gathered units, the largest of all. From replays, not from measured rows:
benchmarks/reserved.json (rows of one length and of changing ones) and closed_form.json; docs/memory-model.md scores it
on measured ones."""
EVALUATION_SLACK = 0.6
"""The same for an evaluation's batch, whose tensors are few and large: each splits another block. In replays of 9
settings on a GPU without limit 0.28 to 0.55 (docs/memory-model.md)."""
GRADIENT_SLACK = 0.125
"""The same for gradients: they have the weights' own sizes in every step."""
MARGIN_BYTES = int(0.3 * GIB)
"""Kept free in every class, in addition to the fraction."""

DESKTOP_BYTES = GIB
"""Kept free in addition under WSL: the desktop takes and returns GPU memory during a run, and what is missing is then
moved to the host's memory. Not measured: what a browser and a few more windows may take."""

MarginClass = Literal[
    "measured", "quantised", "autocast", "padded", "eager", "several_gpus", "shared_rows", "foreach", "unseen",
    "measured_blocks", "own_kernels",
]  # fmt: skip


@dataclass(frozen=True)
class Margin:
    """A fraction of the predicted reserved bytes that is kept free, and the evidence for its size."""

    share: float
    reason: str


MARGINS: dict[MarginClass, Margin] = {
    "measured": Margin(0.03, "LoRA and full on one GPU with flash or efficient attention: measured within 1%"),
    "quantised": Margin(0.06, "QLoRA: 2 of 48 measured rows reserved more than 6% above their trace"),
    "autocast": Margin(
        0.06, "fp32 weights that train under autocast: their casts come and go; simulated up to 5% above"
    ),
    "padded": Margin(0.06, "rows of different lengths share batches: sizes change from batch to batch"),
    "eager": Margin(0.10, "eager attention: reserved memory of measured rows was up to 9% above the prediction"),
    "foreach": Margin(0.10, "AdamW one list at a time: reserved memory jumps with the row length (simulated)"),
    "several_gpus": Margin(0.10, "DDP and FSDP2: buckets and gathered weights are computed, not yet measured"),
    "shared_rows": Margin(0.10, "context parallelism: FSDP2 with a part of each row; a published run is within 1%"),
    "measured_blocks": Margin(0.06, "blocks that were measured: 1% below their trace at most, small models 4%"),
    "own_kernels": Margin(
        0.15, "a class with kernels of its own: its reference code was measured, and packages may need other buffers"
    ),
    "unseen": Margin(0.15, "ZeRO, tensor parallel, offload, experts by code of their class: not measured"),
}
"""One row per class; a setting in several classes takes the largest fraction."""


def stays(terms: Mapping[str, int]) -> int:
    """Bytes of a moment's terms that stay between steps."""
    return sum(terms.get(name, 0) for name in STAYS)


def reserved_bytes(terms: Mapping[str, int], *, attention: str, layout: Layout, evaluates: bool = False) -> int:
    """Bytes that the allocator has reserved when a moment's terms are live: a bound, where no trace says more;
    `evaluates`: the moment is an evaluation's."""
    gradients = terms.get("gradients", 0)
    # what comes and goes within a step: activations, the head, gathered units
    passing = sum(terms.values()) - stays(terms) - gradients
    is_spread = layout.ranks > 1 and layout.context_parallel == 1  # beside shared rows, units are small
    slack = PASSING_SLACK["several_gpus" if is_spread else "eager" if attention == "eager" else "fused"]
    slack = max(slack, EVALUATION_SLACK) if evaluates else slack
    return int(sum(terms.values()) + slack * passing + GRADIENT_SLACK * gradients)


ON_OTHER_STREAMS = ("gradients", "gather_buffers")
"""Terms that FSDP allocates on its own streams: reduced gradients and gathered units."""


def reserved_over(moments: Iterable[Mapping[str, int]], *, attention: str, layout: Layout) -> int:
    """Bytes that the allocator has reserved after a step with these moments' terms: the largest of their bounds.

    Under FSDP what is freed on one stream is not given to another, so that each stream keeps its own highest bytes,
    whenever they were: the sum of those counts where it is more. A stream's units are whole and of few sizes, and
    leave no holes in its own pools (replays in benchmarks/closed_form.json).
    """
    steps = list(moments)  # read several times
    bound = max(reserved_bytes(one, attention=attention, layout=layout) for one in steps)
    if not layout.is_fsdp:
        return bound
    # a freed block is only reused on the stream that it was allocated on (CUDACachingAllocator)
    own = [{name: size for name, size in one.items() if name not in ON_OTHER_STREAMS} for one in steps]
    apart = max(reserved_bytes(one, attention=attention, layout=layout) for one in own)
    # the highest of each stream, although they are not at the same moment
    apart += int((1 + GRADIENT_SLACK) * max(one.get("gradients", 0) for one in steps))
    return max(bound, apart + max(one.get("gather_buffers", 0) for one in steps))


def margin_of(
    *,
    mode: str,
    padded: bool,
    attention: str,
    optim: str,
    layout: Layout,
    own_experts: bool,
    measured: bool = False,
    own_kernels: bool = False,
    autocast: bool = False,
) -> Margin:
    """The largest margin of a setting's classes; `autocast`: trained weights are wider than the compute dtype."""
    applies: dict[MarginClass, bool] = {
        "measured": True,
        "quantised": mode == "qlora",
        "autocast": autocast and mode == "full",
        "padded": padded,
        "eager": attention == "eager",
        "foreach": optim == "adamw_torch" and mode == "full",
        "several_gpus": layout.ranks > 1,
        "measured_blocks": measured,
        "own_kernels": own_kernels,
        "shared_rows": layout.context_parallel > 1,
        "unseen": own_experts or layout.is_zero or layout.offloads_states or layout.tensor_parallel > 1,
    }
    return max((MARGINS[name] for name, it_does in applies.items() if it_does), key=lambda margin: margin.share)
