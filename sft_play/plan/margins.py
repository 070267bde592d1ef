"""How much more than the prediction must be free, by what is known of a setting's class, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sft_play.plan.layout import Layout

GIB = 2**30

STAYS = ("weights", "adapters", "master_weights", "optimizer", "gradient_buckets", "workspaces")
"""Terms that are made once: the allocator packs them, and nothing beside them is lost but rounding."""
PASSING_SLACK = {"fused": 0.25, "eager": 0.50, "several_gpus": 0.50}
"""What the allocator keeps beyond a step's passing tensors, over their bytes: rests of blocks that were cut for one
size and asked for another (forward, backward, evaluation, the next batch's length). By attention's S x S matrices and
by gathered units, the largest of all, more. From replays, not from measured rows: benchmarks/reserved.json (rows of one
length and of changing ones) and closed_form.json; docs/memory-model.md scores it on measured ones."""
EVALUATION_SLACK = 0.6
"""The same for an evaluation's batch, whose tensors are few and large: each that comes is another cut. In replays of 9
settings on a card without end 0.28 to 0.55 (docs/memory-model.md)."""
GRADIENT_SLACK = 0.125
"""The same for gradients: their sizes are the weights' own in every step."""
MARGIN_BYTES = int(0.3 * GIB)
"""Kept free in every class, beside the share."""

DESKTOP_BYTES = GIB
"""Kept free beside them under WSL: the desktop takes and gives back GPU memory while a run goes on, and what is missing
is then moved to the host's memory. Not measured: what a browser and a few windows more may take."""

MarginClass = Literal[
    "measured", "quantised", "autocast", "padded", "eager", "several_gpus", "shared_rows", "foreach", "unseen",
    "measured_shape",
]  # fmt: skip


@dataclass(frozen=True)
class Margin:
    """A share of the predicted reserved bytes that is kept free, and the evidence for its size."""

    share: float
    reason: str


MARGINS: dict[MarginClass, Margin] = {
    "measured": Margin(0.03, "LoRA and full on one GPU with flash or efficient attention: measured within 1%"),
    "quantised": Margin(0.06, "QLoRA: 2 of 48 measured rows reserved more than 6% above their trace"),
    "autocast": Margin(
        0.06, "fp32 weights that train under autocast: their casts come and go; simulated up to 5% above"
    ),
    "padded": Margin(0.06, "padded rows give attention a mask: sizes change from batch to batch"),
    "eager": Margin(0.10, "eager attention: reserved memory of measured rows was up to 9% above the prediction"),
    "foreach": Margin(0.10, "AdamW one list at a time: reserved memory jumps with the row length (simulated)"),
    "several_gpus": Margin(0.10, "DDP and FSDP2: buckets and gathered weights are computed, not yet measured"),
    "shared_rows": Margin(0.10, "context parallelism: FSDP2 with a part of each row; a published run is within 1%"),
    "measured_shape": Margin(0.15, "a model class that the tables do not know: its activations are only estimated"),
    "unseen": Margin(0.15, "ZeRO, tensor parallel, offload, experts: neither traced nor measured"),
}
"""One row for each class; a setting in several classes takes the largest share."""


def stays(terms: Mapping[str, int]) -> int:
    """Bytes of a moment's terms that stay between steps."""
    return sum(terms.get(name, 0) for name in STAYS)


def reserved_bytes(terms: Mapping[str, int], *, attention: str, layout: Layout, evaluates: bool = False) -> int:
    """Bytes that the allocator has reserved when a moment's terms are alive: a bound, where no trace says more;
    `evaluates`: the moment is an evaluation's."""
    gradients = terms.get("gradients", 0)
    passing = sum(terms.values()) - stays(terms) - gradients
    is_spread = layout.ranks > 1 and layout.context_parallel == 1  # beside rows that are shared, units are small
    slack = PASSING_SLACK["several_gpus" if is_spread else "eager" if attention == "eager" else "fused"]
    slack = max(slack, EVALUATION_SLACK) if evaluates else slack
    return int(sum(terms.values()) + slack * passing + GRADIENT_SLACK * gradients)


ON_OTHER_STREAMS = ("gradients", "gather_buffers")
"""Terms that FSDP makes on streams of its own: reduced gradients and gathered units."""


def reserved_over(moments: Iterable[Mapping[str, int]], *, attention: str, layout: Layout) -> int:
    """Bytes that the allocator has reserved after a step with these moments' terms: the largest of their bounds.

    Under FSDP what is freed on one stream is not given to another, so that each stream keeps its own highest bytes,
    whenever they were: the sum of those counts where it is more. A stream's units are whole and of few sizes, and
    leave no holes in its own pools (replays in benchmarks/closed_form.json).
    """
    found = list(moments)
    bound = max(reserved_bytes(one, attention=attention, layout=layout) for one in found)
    if not layout.is_fsdp:
        return bound
    own = [{name: size for name, size in one.items() if name not in ON_OTHER_STREAMS} for one in found]
    apart = max(reserved_bytes(one, attention=attention, layout=layout) for one in own)
    apart += int((1 + GRADIENT_SLACK) * max(one.get("gradients", 0) for one in found))
    return max(bound, apart + max(one.get("gather_buffers", 0) for one in found))


def margin_of(
    *,
    mode: str,
    padded: bool,
    attention: str,
    optim: str,
    layout: Layout,
    experts: bool,
    approximate: bool = False,
    autocast: bool = False,
) -> Margin:
    """The margin of a setting: the largest of its classes. `autocast`: weights that train are wider than the compute
    dtype."""
    classes: list[MarginClass] = ["measured"]
    classes += ["quantised"] if mode == "qlora" else []
    classes += ["autocast"] if autocast and mode == "full" else []
    classes += ["padded"] if padded else []
    classes += ["eager"] if attention == "eager" else []
    classes += ["foreach"] if optim == "adamw_torch" and mode == "full" else []
    classes += ["several_gpus"] if layout.ranks > 1 else []
    classes += ["measured_shape"] if approximate else []
    classes += ["shared_rows"] if layout.context_parallel > 1 else []
    classes += ["unseen"] if experts or layout.is_zero or layout.offloads_states or layout.tensor_parallel > 1 else []
    return max((MARGINS[name] for name in classes), key=lambda margin: margin.share)
