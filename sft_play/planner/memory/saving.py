"""How the checkpoints of a run are written, and the host RAM that writing takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sft_play.planner.memory.model_states import largest_tensor, paged_bytes
from sft_play.planner.memory.step_memory import Walk
from sft_play.units import MIB

Form = Literal["whole", "sharded", "deepspeed"]
"""Whole: one process writes everything, gathered if it is sharded. Sharded: each rank writes its shard, in torch's
distributed format. DeepSpeed writes each rank's shard in its own format."""

DISK_BYTES_PER_S = 125 * MIB
"""Assumed write rate of one process: the baseline of a general-purpose volume in the cloud (AWS gp3: 125 MiB/s;
Google's and Azure's are about as fast). Not measured; a local NVMe disk is ten times as fast."""
WHOLE_SAVE_S = 120
"""How long all other ranks may wait while the first one writes."""
WHOLE_BYTES = DISK_BYTES_PER_S * WHOLE_SAVE_S
"""The largest checkpoint of full states that is gathered on the first rank, 14.6 GiB: above it, writing by one process
costs minutes of all GPUs, and the gathered copy (two thirds of it) more host RAM than a run has to spare. Up to 1.3
billion parameters with AdamW in fp32 (12 bytes each) stay whole."""
FILE_BYTES = 5 * 10**9
"""Largest file of final weights that are gathered tensor by tensor, complete in the first rank's RAM before it is
written."""
SAVE_SHARD_BYTES = 50 * 10**9
"""Largest file that transformers writes at once (`max_shard_size` of `save_pretrained`), complete in the host's RAM."""
COPIES = 2
"""For a tensor of a sharded checkpoint: the copy from the GPU, and its serialised bytes."""


@dataclass(frozen=True)
class Saving:
    """How a training checkpoint is written. Bytes of RAM are those in use at once; `total` is the size on disk."""

    form: Form
    total: int
    """Bytes of weights and optimizer states."""
    first: int
    """RAM that the first rank needs beyond what every rank needs, for a checkpoint or the final weights."""
    each: int
    """RAM that each rank needs to write its shard."""
    gathered: int
    """RAM that the first rank would need to write it whole."""


def saving_of(walk: Walk) -> Saving:
    """How a run's checkpoints are written: sharded where FSDP divides full states that are too large for one
    process."""
    layout, parameters = walk.step.layout, walk.trained
    alone = min(parameters.params * parameters.width, SAVE_SHARD_BYTES)
    paged = paged_bytes(walk.config.train.optim, parameters)
    if layout.is_zero:
        return Saving("deepspeed", 4 * parameters.params + (paged or 8 * parameters.params), alone, 0, alone)
    parts = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
    weights = walk.resident.gradients * parts  # a gradient is as large as its parameter
    states = walk.resident.optimizer * parts + paged
    total = weights + states
    if not (layout.is_fsdp and walk.full):
        return Saving("whole", total, alone, 0, alone)
    gathered = max(weights, states)  # the one is written, and freed, before the other is gathered
    largest = largest_tensor(walk.shape)
    # the first rank holds a file of the final weights in 16 bits, and one tensor in fp32; all of them where there are
    # experts, which are saved under other names than they have in memory
    final = 2 * parameters.params
    if walk.shape.num_experts == 0:
        final = min(final, FILE_BYTES) + 4 * largest
    if total <= WHOLE_BYTES:
        return Saving("whole", total, max(gathered, final), 0, gathered)
    return Saving("sharded", total, final, COPIES * 4 * -(-largest // parts), gathered)
