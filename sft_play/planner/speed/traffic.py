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
from sft_play.planner.gradients import gradient_sync
from sft_play.planner.memory.model_states import trained_parameters
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import ElementBytes
from sft_play.planner.precision import DTYPE_BYTES, Precision
from sft_play.units import MIB

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
# How often a rank sends its (W-1)/W of a whole message (ring algorithms, https://arxiv.org/abs/1910.02054 section 7):
# an all-reduce is a reduce-scatter and an all-gather.
SENT_SHARES: dict[str, float] = {
    "all_reduce": 2.0,
    "reduce": 1.0,
    "broadcast": 1.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
}
# DDP's buckets (`bucket_cap_mb`), each an all-reduce of its own.
DDP_BUCKET_BYTES = 25 * MIB
# ZeRO-3 keeps a parameter that is used again within this many (`stage3_max_reuse_distance`).
ZERO_REUSE_PARAMS = 1_000_000_000


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind over one group of `ranks`: `message_bytes` of full messages (what all ranks have
    together before, or after), in `calls` calls."""

    kind: CollectiveKind
    message_bytes: float
    ranks: int
    calls: float
    spanned_ranks: int = 0
    """Ranks that the group's links span, where they are not neighbours: copies are on other nodes."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends to others."""
        return sent_bytes(self.kind, self.message_bytes, self.ranks)


def sent_bytes(kind: str, message_bytes: float, ranks: int) -> float:
    """Bytes that one of the ranks sends for messages of that size; 0 for kinds that send none."""
    return SENT_SHARES.get(kind, 0.0) * message_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """The collectives of a step: in each micro-batch, additionally where gradients are reduced (`reductions_per_step`
    of so many micro-batches), and after the optimizer's update."""

    per_micro_batch: tuple[Collective, ...] = ()
    per_reduction: tuple[Collective, ...] = ()
    after_update: tuple[Collective, ...] = ()
    reductions_per_step: Callable[[int], int] = int

    def step_collectives(self, grad_accum: int) -> Iterator[tuple[Collective, int]]:
        """Each collective with how often it runs in a step."""
        yield from ((collective, grad_accum) for collective in self.per_micro_batch)
        yield from ((collective, self.reductions_per_step(grad_accum)) for collective in self.per_reduction)
        yield from ((collective, 1) for collective in self.after_update)

    def sent_bytes(self, grad_accum: int) -> float:
        """Bytes that one rank sends in a step."""
        return sum(collective.sent_bytes * times for collective, times in self.step_collectives(grad_accum))

    def bytes_by_kind(self, grad_accum: int) -> dict[str, int]:
        """Bytes of the full messages of a step, by kind."""
        totals: dict[str, float] = {}
        for collective, times in self.step_collectives(grad_accum):
            totals[collective.kind] = totals.get(collective.kind, 0.0) + collective.message_bytes * times
        return {kind: int(size) for kind, size in totals.items() if size}


def step_traffic(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> Traffic:
    """The communication of data-parallel ranks, and among those that share rows. DDP and ZeRO-1 reduce gradients once
    per step, unless the run says otherwise, and ZeRO-2 in each micro-batch: both stages with all-reduces of full
    buckets (`use_multi_rank_bucket_allreduce`), of which a rank keeps its shard, and an all-gather of the updated
    weights. FSDP2 gathers every unit for the forward and for the backward pass, the last one once; ZeRO-3 keeps what it
    needs again soon."""
    layout, sync = step.layout, gradient_sync(config, precision, step.layout.name)
    # neighbours are of one tensor-parallel group
    ranks, neighbour_ranks = layout.gradient_ranks, layout.tensor_parallel
    if ranks == 1:
        return Traffic()
    trained_params = trained_parameters(config, shape, ElementBytes()).params / layout.tensor_parallel
    gradient_bytes = trained_params * DTYPE_BYTES[sync.reduced_dtype]
    if not layout.shards_params:
        reductions = (Collective("all_reduce", gradient_bytes, ranks, _bucket_count(gradient_bytes)),)
        updated_bytes = trained_params * DTYPE_BYTES[precision.compute]
        gathers = (
            (Collective("all_gather", updated_bytes, ranks, _bucket_count(updated_bytes)),) if layout.is_zero else ()
        )
        return Traffic(per_reduction=reductions, after_update=gathers, reductions_per_step=sync.reductions_per_step)
    calls = shape.num_layers + 1  # a unit per block, and the tail
    if layout.is_fsdp:
        # all units twice: the first block's backward pass prefetches the embedding, trained or not. Only the tail (last
        # norm and head, with the embedding where it is tied) stays gathered from the forward to the backward pass
        gathered_itemsize = DTYPE_BYTES[sync.gathered_dtype]
        gathered_bytes = (
            2 * _weight_bytes(config, shape, gathered_itemsize) - gathered_itemsize * shape.embedding_table_params
        )
    else:
        gathered_bytes = _zero3_gathered_bytes(config, shape, precision, step)
    weights = Collective(
        "all_gather",
        gathered_bytes / layout.tensor_parallel,
        layout.shard,
        2 * calls,
        spanned_ranks=layout.shard * neighbour_ranks,
    )
    gradient_collectives = [
        Collective("reduce_scatter", gradient_bytes, layout.shard, calls, spanned_ranks=layout.shard * neighbour_ranks)
    ]
    if ranks > layout.shard:  # HSDP: each part is reduced once more, over the groups that hold a copy of it
        gradient_collectives.append(
            Collective(
                "all_reduce",
                gradient_bytes / layout.shard,
                ranks // layout.shard,
                calls,
                spanned_ranks=ranks * neighbour_ranks,
            )
        )
    return Traffic(
        per_micro_batch=(weights,),
        per_reduction=tuple(gradient_collectives),
        reductions_per_step=sync.reductions_per_step,
    )


def _bucket_count(size: float) -> int:
    return math.ceil(size / DDP_BUCKET_BYTES)


def base_weight_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> float:
    """Bytes of all weights but adapters as they are sent: 4-bit ones packed."""
    if config.tuning.mode != "qlora":
        return float(shape.params * itemsize)
    return 0.5 * shape.linear_params + itemsize * (shape.params - shape.linear_params)


def _weight_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> float:
    adapter_bytes = (
        0 if config.tuning.mode == "full" else itemsize * trained_parameters(config, shape, ElementBytes()).params
    )
    return base_weight_bytes(config, shape, itemsize) + adapter_bytes


def _zero3_gathered_bytes(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> float:
    """Bytes that ZeRO-3 gathers in a micro-batch: all weights, and again for the backward pass those behind which more
    than `ZERO_REUSE_PARAMS` lie until then; a checkpointed block larger than half of that releases its first layers
    before its backward pass. For packed weights DeepSpeed counts bytes."""
    weight_bytes, layers = _weight_bytes(config, shape, DTYPE_BYTES[precision.compute]), shape.num_layers
    recomputed_share = step.recomputed_layers(layers) / layers
    counted_params = shape.params - (0.5 * shape.linear_params if config.tuning.mode == "qlora" else 0.0)
    kept_share = min(1.0, ZERO_REUSE_PARAMS / (2 + recomputed_share) / counted_params)
    block_params = counted_params - (1 if shape.tied else 2) * shape.embedding_table_params
    regathered_share = max(0.0, block_params - layers * ZERO_REUSE_PARAMS / 2) / counted_params
    return weight_bytes * (2 - kept_share + recomputed_share * regathered_share)
