"""How the checkpoints of a run are written, and the host's RAM that writing takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sft_play.plan.moments import Walk
from sft_play.plan.states import large_tensors, paged_bytes

Form = Literal["whole", "sharded", "deepspeed"]
"""Whole: one process writes all of it, gathered where it is divided. Sharded: each rank writes its part, in torch's
distributed format. DeepSpeed writes each rank's part in a format of its own."""

DISK_BYTES_PER_S = 125 * 2**20
"""What one process is reckoned to write: the baseline of a general-purpose volume in the cloud (AWS gp3: 125 MiB/s;
Google's and Azure's are about as fast). Not measured; a local NVMe disk is ten times as fast."""
WHOLE_SAVE_S = 120
"""How long all other ranks may stand still while the first one writes."""
WHOLE_BYTES = DISK_BYTES_PER_S * WHOLE_SAVE_S
"""The largest checkpoint of full states that is gathered on the first rank, 14.6 GiB: above it writing by one process
costs minutes of all GPUs, and the gathered copy (two thirds of it) more of one host's RAM than a run has to spare. Up
to 1.3 billion parameters with AdamW in fp32 (12 bytes each) stay whole."""
FILE_BYTES = 5 * 10**9
"""Largest file of final weights that are gathered tensor by tensor, whole in the first rank's RAM before it is
written."""
SAVE_SHARD_BYTES = 50 * 10**9
"""Largest file that transformers writes at once (`max_shard_size` of `save_pretrained`), whole in the host's RAM."""
COPIES = 2
"""Of a tensor that is written in parts: the one on its way from the GPU, and its serialised bytes."""


@dataclass(frozen=True)
class Saving:
    """How a training checkpoint is written. Bytes of RAM are those at once; `total` is what lies on the disk."""

    form: Form
    total: int
    """Bytes of weights and optimizer states."""
    first: int
    """RAM that the first rank needs beyond what each needs, for a checkpoint or the final weights."""
    each: int
    """RAM that each rank needs to write its part."""
    gathered: int
    """RAM that the first rank would need to write it whole."""


def saving_of(walk: Walk) -> Saving:
    """How a run's checkpoints are written: in parts where full states are divided by FSDP and too large for one."""
    layout, what = walk.step.layout, walk.trained
    if layout.is_zero:
        total = 4 * what.params + (paged_bytes(walk.config.train.optim, what) or 8 * what.params)
        alone = min(what.params * what.width, SAVE_SHARD_BYTES)
        return Saving("deepspeed", total, alone, 0, alone)
    parts = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
    weights = walk.resident.gradients * parts  # a gradient is as large as what it belongs to
    states = walk.resident.optimizer * parts + paged_bytes(walk.config.train.optim, what)
    total = weights + states
    if not (layout.is_fsdp and walk.full):
        alone = min(what.params * what.width, SAVE_SHARD_BYTES)
        return Saving("whole", total, alone, 0, alone)
    gathered = max(weights, states)
    final = _final(walk)
    if total <= WHOLE_BYTES:
        return Saving("whole", total, max(gathered, final), 0, gathered)
    largest = max((elements for elements, _, _ in large_tensors(walk.shape)), default=0)
    each = COPIES * 4 * -(-largest // parts)
    return Saving("sharded", total, final, each, gathered)


def _final(walk: Walk) -> int:
    """RAM of the first rank for the final weights: a file of them in 16 bits, with a tensor in fp32 that comes next.
    Those of experts, which are saved under other names than they have in memory, are all there at once."""
    weights = 2 * walk.trained.params
    if walk.shape.num_experts > 0:
        return weights
    largest = max((elements for elements, _, _ in large_tensors(walk.shape)), default=0)
    return min(weights, FILE_BYTES) + 4 * largest
