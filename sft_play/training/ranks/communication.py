"""What ranks send each other in a window of steps: counts, bytes and time by kind of collective, and who waits.

Counts and bytes are those of the operators (`c10d::…`) that all collectives go through, as torch's profiler records
them; times those of the backend's own work: NCCL's kernels, gloo's calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Counted(NamedTuple):
    """What one rank recorded: seconds of the window, of communication and of its exposed part; each collective (kind,
    bytes, whether they are the whole message); kind and seconds of the backend's work for them."""

    rank: int
    host: str
    window_s: float
    busy_s: float
    exposed_s: float
    collectives: Sequence[tuple[str, int, bool]] = ()
    timed: Sequence[tuple[str, float]] = ()


def communication_report(
    counted: Sequence[Counted], layout: Layout, *, steps: int, planned: Mapping[str, int], moved: int
) -> dict[str, Any]:
    """`profile/communication.json`: the counts of all ranks in a window of `steps`, per optimizer step, beside the
    plan's bytes by kind, and what one rank sends. Of a kind, `bytes` are of whole messages, `sent_bytes` by one rank,
    `seconds` on the mean rank."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind, part, is_whole in counted[0].collectives:  # all ranks run the same ones
        one = kinds.setdefault(kind, {"count": 0, "bytes": 0})
        one["count"] += 1 / steps
        one["bytes"] += part * (1 if is_whole else group_of(kind, layout)) / steps
    for kind, one in kinds.items():
        one["sent_bytes"] = int(sent_bytes(kind, one["bytes"], group_of(kind, layout)))
        one["bytes"] = int(one["bytes"])
        one["seconds"] = sum(time for rank in counted for name, time in rank.timed if name == kind)
        one["seconds"] /= len(counted) * steps
    waits = waiting([one.timed for one in counted])
    ranks: list[dict[str, Any]] = [
        {
            "rank": one.rank, "host": one.host, "step_s": one.window_s / steps,
            "communication_s": one.busy_s / steps, "exposed_s": one.exposed_s / steps,
            "waiting_s": None if waits is None else waits[place] / steps,
        }
        for place, one in enumerate(counted)
    ]  # fmt: skip
    step_s, communication_s = (sum(one[key] for one in ranks) / len(ranks) for key in ("step_s", "communication_s"))
    sent = sum(one["sent_bytes"] for one in kinds.values())
    difference = sent / moved - 1 if moved else None
    return {
        "layout": layout.name, "steps": steps, "kinds": kinds, "ranks": ranks, "planned_bytes": dict(planned),
        "planned_sent_bytes": moved, "sent_bytes": sent, "step_s": step_s, "communication_s": communication_s,
        "share": communication_s / step_s if step_s else None, "difference": difference, "tolerance": TOLERANCE,
        "agrees": difference is not None and abs(difference) <= TOLERANCE,
    }  # fmt: skip


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
    """Kind, bytes and whether they are the whole message, of each collective in the profiler's tree, in order."""
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
    """Kind and seconds of the backend's work (name, start, end in microseconds). gloo implements reduce-scatter by an
    all-reduce: where there is one piece for each collective, it gets that one's kind."""
    pieces = sorted((start, end, kind) for name, start, end in work if (kind := kind_of(name)) is not None)
    kinds = [kind for _, _, kind in pieces]
    if len(pieces) == len(collectives):
        kinds = [kind for kind, _, _ in collectives]
    return [(kind, (end - start) / 1e6) for kind, (start, end, _) in zip(kinds, pieces, strict=True)]
