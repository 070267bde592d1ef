"""What ranks send each other in a window of steps: counts, bytes and time by kind of collective, and who waits.

Counts and bytes are those of the operators (`c10d::…`) that all collectives go through, of DDP's reducer, FSDP2 and
DeepSpeed, with any backend: torch's profiler records them with their tensor arguments. Times are those of the backend's
own work: NCCL's kernels, gloo's calls.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sft_play.planner.layout import Layout
from sft_play.planner.speed.traffic import sent_bytes

OPERATORS: Mapping[str, tuple[str, int, bool]] = {
    "c10d::allreduce_": ("all_reduce", 0, True),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, True),
    "c10d::reduce_": ("reduce", 0, True),
    "c10d::broadcast_": ("broadcast", 0, True),
    "c10d::_allgather_base_": ("all_gather", 0, True),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, True),
    "c10d::allgather_": ("all_gather", 1, False),
    "c10d::allgather_coalesced_": ("all_gather", 1, False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, True),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, True),
    "c10d::reduce_scatter_": ("reduce_scatter", 0, False),
    "c10d::alltoall_base_": ("all_to_all", 1, True),
    "c10d::alltoall_": ("all_to_all", 1, True),
    "c10d::gather_": ("gather", 1, False),
    "c10d::scatter_": ("scatter", 0, False),
    "c10d::send": ("send", 0, True),
    "c10d::recv_": ("recv", 0, True),
    "c10d::barrier": ("barrier", -1, True),
}
"""Operator: kind, the index of the argument with the tensors that have the size (-1: none), and whether they are the
whole message, else one rank's part of it. The whole message is what all ranks have together, before or after."""
TOLERANCE = 0.05
"""How far counted and predicted bytes may be apart: FSDP2 pads tensors, ZeRO-3 keeps small ones whole, and logged
numbers are reduced too. Measured with a model of 94,000 weights on two CPU ranks: 2% at most (docs/launch.md)."""
_NCCL = re.compile(r"nccl\w*Kernel_(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)")
_KINDS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "Broadcast": "broadcast",
    "Reduce": "reduce", "SendRecv": "send", "alltoall": "all_to_all", "all_to_all": "all_to_all",
}  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """What one rank recorded in a window: each collective in order, and the times of the backend's work for them."""

    rank: int
    host: str
    window_s: float
    busy_s: float
    """Seconds of communication."""
    exposed_s: float
    """The part of them in which nothing is computed."""
    collectives: tuple[tuple[str, int, bool], ...] = ()
    """Kind, bytes, and whether they are the whole message."""
    timed: tuple[tuple[str, float], ...] = ()
    """Kind and seconds."""


@dataclass(frozen=True)
class Kind:
    """The collectives of one kind in a step: `bytes` of whole messages, `sent_bytes` by one rank, `seconds` on the mean
    rank."""

    count: float
    bytes: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class RankStep:
    """One rank's step. `waiting_s` is how much longer its collectives take than those of the rank that is last to enter
    each; None where ranks did not run the same ones."""

    rank: int
    host: str
    step_s: float
    communication_s: float
    exposed_s: float
    waiting_s: float | None


@dataclass(frozen=True)
class CommunicationReport:
    """A window's communication per optimizer step, beside the prediction of the plan's estimate."""

    layout: str
    steps: int
    kinds: Mapping[str, Kind]
    ranks: tuple[RankStep, ...]
    planned_bytes: Mapping[str, int]
    """Whole messages by kind, as predicted."""
    planned_sent_bytes: int
    sent_bytes: int
    """What one rank sent, as counted."""
    notes: tuple[str, ...] = field(default=())

    @property
    def step_s(self) -> float:
        """Seconds of a step on the mean rank."""
        return sum(rank.step_s for rank in self.ranks) / len(self.ranks)

    @property
    def communication_s(self) -> float:
        """Seconds of communication in a step on the mean rank."""
        return sum(rank.communication_s for rank in self.ranks) / len(self.ranks)

    @property
    def difference(self) -> float | None:
        """Counted over predicted bytes, minus 1; None where nothing is predicted."""
        return self.sent_bytes / self.planned_sent_bytes - 1 if self.planned_sent_bytes else None

    @property
    def agrees(self) -> bool:
        """Whether counted and predicted bytes agree within `TOLERANCE`."""
        return self.difference is not None and abs(self.difference) <= TOLERANCE

    def as_json(self) -> dict[str, Any]:
        """`profile/communication.json`."""
        return {
            **asdict(self),
            "step_s": self.step_s,
            "communication_s": self.communication_s,
            "share": self.communication_s / self.step_s if self.step_s else None,
            "difference": self.difference,
            "tolerance": TOLERANCE,
            "agrees": self.agrees,
        }

    def lines(self) -> list[str]:
        """The report in words."""
        kinds = ", ".join(
            f"{name} {kind.count:g} x of {kind.bytes:,} bytes in {kind.seconds:.4f} s"
            for name, kind in sorted(self.kinds.items(), key=lambda item: -item[1].bytes)
        )
        exposed = sum(rank.exposed_s for rank in self.ranks) / len(self.ranks)
        share = self.communication_s / self.step_s if self.step_s else 0.0
        lines = [
            f"Communication of {self.steps} steps, each: {kinds}; {self.communication_s:.4f} of {self.step_s:.4f} s "
            f"({share:.0%}), {exposed:.4f} s not hidden"
        ]
        waits = [rank.waiting_s for rank in self.ranks if rank.waiting_s is not None]
        if len(waits) == len(self.ranks):
            most, least = max(waits), min(waits)
            slowest = self.ranks[waits.index(least)]
            lines.append(
                f"Communication: ranks wait {least:.4f} to {most:.4f} s a step for others; rank {slowest.rank} on "
                f"{slowest.host} the least: the others wait for it"
            )
        if self.difference is not None:
            verdict = "agree" if self.agrees else f"are more than {TOLERANCE:.0%} apart"
            lines.append(
                f"Communication: a rank sends {self.sent_bytes:,} bytes a step, {self.planned_sent_bytes:,} predicted "
                f"({self.difference:+.1%}): they {verdict}"
            )
        return [*lines, *(f"Communication: {note}" for note in self.notes)]


def communication_report(
    counted: Sequence[Counted], layout: Layout, *, steps: int, planned: Mapping[str, int], moved: int
) -> CommunicationReport:
    """The counts of all ranks in a window of `steps`, combined; `planned` and `moved` are the plan's bytes of a step by
    kind, and what one rank sends in it."""
    notes = []
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for kind, part, is_whole in counted[0].collectives:  # all ranks run the same ones
        count[kind] += 1
        size[kind] += part * (1 if is_whole else group_of(kind, layout))
    seconds = {kind: sum(time for one in counted for name, time in one.timed if name == kind) for kind in count}
    kinds = {
        kind: Kind(
            count[kind] / steps,
            size[kind] // steps,
            int(sent_bytes(kind, size[kind] / steps, group_of(kind, layout))),
            seconds[kind] / len(counted) / steps,
        )
        for kind in count
    }
    waits = waiting([one.timed for one in counted])
    if waits is None:
        notes.append("ranks timed different collectives: who waits for whom is not known")
    ranks = tuple(
        RankStep(one.rank, one.host, one.window_s / steps, one.busy_s / steps, one.exposed_s / steps,
             None if waits is None else waits[place] / steps)
        for place, one in enumerate(counted)
    )  # fmt: skip
    sent = sum(kind.sent_bytes for kind in kinds.values())
    return CommunicationReport(layout.name, steps, kinds, ranks, planned, moved, sent, tuple(notes))


def group_of(kind: str, layout: Layout) -> int:
    """Ranks of the group that collectives of a kind run over."""
    if layout.tensor_parallel > 1 and kind in ("all_gather", "reduce_scatter"):
        return layout.shard  # FSDP2's, among the ranks that hold the same part of each layer
    if layout.tensor_parallel > 1 and kind == "all_reduce":
        return layout.tensor_parallel  # two in every block; those of gradients are few beside them
    if not layout.shards_params or layout.gradient_ranks == layout.shard:
        return layout.ranks
    # hybrid sharding: gradients are all-reduced across the replicas, the rest stays within a shard group
    return layout.gradient_ranks // layout.shard if kind == "all_reduce" else layout.shard


def waiting(timed: Sequence[Sequence[tuple[str, float]]]) -> list[float] | None:
    """Seconds that each rank waits: a collective ends on all ranks together, so it is shortest on the rank that enters
    it last; what it takes longer on the others is waiting. None where ranks did not run the same ones."""
    if len({tuple(kind for kind, _ in one) for one in timed}) != 1:
        return None
    waits = [0.0] * len(timed)
    for together in zip(*timed, strict=True):
        least = min(seconds for _, seconds in together)
        for rank, (_, seconds) in enumerate(together):
            waits[rank] += seconds - least
    return waits


def collectives_of(tree: Iterable[Any]) -> list[tuple[str, int, bool]]:
    """Kind, bytes and whether they are the whole message, of each collective in the profiler's tree of events, in
    order."""
    left, nodes = list(tree), []
    while left:
        node = left.pop()
        left.extend(node.children)
        if node.name in OPERATORS:
            nodes.append(node)
    collectives = []
    for node in sorted(nodes, key=lambda node: node.start_time_ns):
        kind, place, is_whole = OPERATORS[node.name]
        inputs = node.extra_fields.inputs
        tensors = inputs[place] if 0 <= place < len(inputs) else ()
        collectives.append((kind, _bytes_of(tensors), is_whole))
    return collectives


def _bytes_of(tensors: Any) -> int:
    if isinstance(tensors, list | tuple):
        return sum(_bytes_of(one) for one in tensors)
    if not hasattr(tensors, "sizes"):
        return 0
    return int(math.prod(tensors.sizes)) * int(tensors.dtype.itemsize)


def kind_of(name: str) -> str | None:
    """The kind of a backend's work by its name: NCCL's kernels, gloo's calls; None for anything else."""
    if name.startswith("gloo:"):
        call = name.removeprefix("gloo:")
        return _KINDS.get(call, call)
    kernel = _NCCL.match(name)
    return _KINDS[kernel[1]] if kernel else None


def timed_of(
    work: Sequence[tuple[str, float, float]], collectives: Sequence[tuple[str, int, bool]]
) -> list[tuple[str, float]]:
    """Kind and seconds of the backend's work (name, start and end in microseconds), in order.

    gloo implements reduce-scatter by an all-reduce: where there is one piece of work for each collective, it gets the
    collective's kind.
    """
    pieces = sorted((start, end, kind) for name, start, end in work if (kind := kind_of(name)) is not None)
    kinds = [kind for _, _, kind in pieces]
    if len(pieces) == len(collectives):
        kinds = [kind for kind, _, _ in collectives]
    return [(kind, (end - start) / 1e6) for kind, (start, end, _) in zip(kinds, pieces, strict=True)]
