"""The communication of an optimizer step, predicted: collectives by kind, with their bytes.

Checked on CPU ranks with torch's profiler (`distributed.profile_communication`), engine by engine; a run's own count
stands beside it in its folder. Tensor-parallel communication is not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.gradients import gradients_of
from sft_play.planner.memory.model_states import trained_parameters
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import ElementBytes
from sft_play.planner.precision import BYTES, Precision
from sft_play.units import MIB

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
# How often a rank sends its (W-1)/W of a whole message (ring algorithms, https://arxiv.org/abs/1910.02054 section 7):
# an all-reduce is a reduce-scatter and an all-gather.
SENT: dict[str, float] = {"all_reduce": 2.0, "reduce": 1.0, "broadcast": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0}
# DDP's buckets (`bucket_cap_mb`), each an all-reduce of its own.
BUCKET_BYTES = 25 * MIB
# ZeRO-3 keeps a parameter that is used again within this many (`stage3_max_reuse_distance`).
ZERO_REUSE_PARAMS = 1_000_000_000


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind over one group of `ranks`: `bytes` of their full messages (what all ranks have
    together before, or after), in `times` calls."""

    kind: Kind
    bytes: float
    ranks: int
    times: float
    span: int = 0
    """Ranks that the group's links span, where they are not neighbours: copies are on other nodes."""

    @property
    def sent(self) -> float:
        """Bytes that one rank sends to others."""
        return sent_bytes(self.kind, self.bytes, self.ranks)


def sent_bytes(kind: str, whole: float, ranks: int) -> float:
    """Bytes that one of the ranks sends for messages of `whole` bytes; 0 for kinds that send none."""
    return SENT.get(kind, 0.0) * whole * (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """The collectives of a step: in each micro-batch, additionally where gradients are reduced (`times` in a step of
    so many micro-batches), and after the optimizer's update."""

    each: tuple[Collective, ...] = ()
    reduced: tuple[Collective, ...] = ()
    after: tuple[Collective, ...] = ()
    times: Callable[[int], int] = int

    def in_step(self, grad_accum: int) -> Iterator[tuple[Collective, int]]:
        """Each collective with its number of occurrences in a step."""
        yield from ((one, grad_accum) for one in self.each)
        yield from ((one, self.times(grad_accum)) for one in self.reduced)
        yield from ((one, 1) for one in self.after)

    def sent(self, grad_accum: int) -> float:
        """Bytes that one rank sends in a step."""
        return sum(one.sent * times for one, times in self.in_step(grad_accum))

    def by_kind(self, grad_accum: int) -> dict[str, int]:
        """Bytes of the full messages of a step, by kind."""
        by_kind: dict[str, float] = {}
        for one, times in self.in_step(grad_accum):
            by_kind[one.kind] = by_kind.get(one.kind, 0.0) + one.bytes * times
        return {kind: int(size) for kind, size in by_kind.items() if size}


def traffic_of(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> Traffic:
    """The communication of data-parallel ranks, and among those that share rows. DDP and ZeRO-1 reduce gradients once
    per step, unless the run says otherwise, and ZeRO-2 in each micro-batch: both stages with all-reduces of full
    buckets (`use_multi_rank_bucket_allreduce`), of which a rank keeps its shard, and an all-gather of the updated
    weights. FSDP2 gathers every unit for the forward and for the backward pass, the last one once; ZeRO-3 keeps what it
    needs again soon."""
    layout, chosen = step.layout, gradients_of(config, precision, step.layout.name)
    ranks, reach = layout.gradient_ranks, layout.tensor_parallel  # neighbours are of one tensor-parallel group
    if ranks == 1:
        return Traffic()
    params = trained_parameters(config, shape, ElementBytes()).params / layout.tensor_parallel
    gradients = params * BYTES[chosen.reduced]
    if not layout.shards_params:
        reduced = (Collective("all_reduce", gradients, ranks, _buckets(gradients)),)
        updated = params * BYTES[precision.compute]
        after = (Collective("all_gather", updated, ranks, _buckets(updated)),) if layout.is_zero else ()
        return Traffic(reduced=reduced, after=after, times=chosen.times)
    calls = shape.num_layers + 1  # a unit per block, and the tail
    if layout.is_fsdp:
        # all units twice: the first block's backward pass prefetches the embedding, trained or not. Only the tail (last
        # norm and head, with the embedding where it is tied) stays gathered from the forward to the backward pass
        width = BYTES[chosen.gathered]
        gathered = 2 * _weights(config, shape, width) - width * shape.embedding_table_params
    else:
        gathered = _zero3_gathered(config, shape, precision, step)
    weights = Collective(
        "all_gather", gathered / layout.tensor_parallel, layout.shard, 2 * calls, span=layout.shard * reach
    )
    back = [Collective("reduce_scatter", gradients, layout.shard, calls, span=layout.shard * reach)]
    if ranks > layout.shard:  # HSDP: each part is reduced once more, over the groups that hold a copy of it
        back.append(
            Collective("all_reduce", gradients / layout.shard, ranks // layout.shard, calls, span=ranks * reach)
        )
    return Traffic(each=(weights,), reduced=tuple(back), times=chosen.times)


def _buckets(size: float) -> int:
    return math.ceil(size / BUCKET_BYTES)


def base_weights(config: RunConfig, shape: ModelShape, width: int) -> float:
    """Bytes of all weights but adapters as they are sent: 4-bit ones packed."""
    if config.tuning.mode != "qlora":
        return float(shape.params * width)
    return 0.5 * shape.linear_params + width * (shape.params - shape.linear_params)


def _weights(config: RunConfig, shape: ModelShape, width: int) -> float:
    adapters = 0 if config.tuning.mode == "full" else width * trained_parameters(config, shape, ElementBytes()).params
    return base_weights(config, shape, width) + adapters


def _zero3_gathered(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> float:
    """Bytes that ZeRO-3 gathers in a micro-batch: all weights, and again for the backward pass those behind which more
    than `ZERO_REUSE_PARAMS` lie until then; a checkpointed block larger than half of that releases its first layers
    before its backward pass. For packed weights DeepSpeed counts bytes."""
    whole, layers = _weights(config, shape, BYTES[precision.compute]), shape.num_layers
    again = step.recomputed_layers(layers) / layers
    counted = shape.params - (0.5 * shape.linear_params if config.tuning.mode == "qlora" else 0.0)
    kept = min(1.0, ZERO_REUSE_PARAMS / (2 + again) / counted)
    blocks = counted - (1 if shape.tied else 2) * shape.embedding_table_params
    thrice = max(0.0, blocks - layers * ZERO_REUSE_PARAMS / 2) / counted
    return whole * (2 - kept + again * thrice)
