"""What loading the weights takes of a rank's device and of RAM; how checkpoints are written, and the RAM for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sft_play.facts.models.model_shape import StackedExpertWeight
from sft_play.planner.memory.model_states import (
    adapters_of,
    large_tensors,
    largest_tensor,
    loads_by_unit,
    nf4_bytes,
    paged_bytes,
    resident,
    weight_bytes,
)
from sft_play.planner.memory.step_memory import Terms, Walk
from sft_play.planner.memory.structure import is_target
from sft_play.units import MIB


def loading_terms(walk: Walk) -> Terms:
    """The most that a rank holds on its device until the model is there and wrapped, by what it is for. Under FSDP2 a
    rank has its shards, one full unit, and the tensor that arrived last (training/model/fsdp_loading.py). Under ZeRO-3
    each rank creates all NF4 weights (core_model_loading.py), PEFT adds adapters in fp32, and only then does DeepSpeed
    partition; plain weights are partitioned as they arrive."""
    parts, layout = walk.resident, walk.step.layout
    if loads_by_unit(walk.config, layout):
        # on a CPU the copies that the first rank reads are in the same memory
        own = {} if walk.step.on_gpu else {"host_copies": copied_in_ram(walk)}
        passing = _largest_unit(walk) + walk.loaded.weights * largest_tensor(walk.shape)
        return {"weights": parts.weights, "adapters": parts.adapters, "gather_buffers": passing, **own}
    if layout.tensor_parallel > 1:  # divided on the way to the device, where FSDP2 shards what is already there
        whole = resident(walk.config, walk.shape, walk.loaded, replace(layout, shard=1))
        cut = parts.weights + parts.adapters
        return {"weights": whole.weights, "adapters": whole.adapters, "gather_buffers": cut}
    # embeddings that grow are copied
    grown = walk.loaded.weights * walk.shape.embedding_table_params if walk.config.model.add_tokens else 0
    if not walk.nf4:
        passing = walk.loaded.weights * largest_tensor(walk.shape) if layout.shards_params else 0
        if not layout.shards_params:  # parts of a stack, beside all that is loaded
            passing = (STACKING - 1) * walk.loaded.weights * max((one.weights for one in _stacked(walk)), default=0)
            passing = max(passing, grown - parts.adapters)  # which are not there yet
        return {"weights": parts.weights, "adapters": parts.adapters, "gather_buffers": max(passing, _started(walk))}
    sizes = [linear.weights for linear, _ in walk.shape.linears]
    sizes += [STACKING * one.weights for one in _stacked(walk)]
    adapters = 4 * walk.trained.params  # not there yet while the last matrices are quantised
    cut = parts.weights + parts.adapters if layout.is_fsdp else 0  # DoRA: accelerate keeps all until FSDP has cut
    weights = weight_bytes(walk.shape, width=walk.loaded.weights, nf4=True)
    beside = max(cut, grown - adapters, walk.loaded.weights * max(sizes, default=0) - adapters, _started(walk))
    return {"weights": weights, "adapters": adapters, "gather_buffers": beside}


def _started(walk: Walk) -> int:
    """What it takes to start the largest adapter at its layer's singular directions: the weight in fp32, and as NF4
    has it and as it was (training/model/adapter_start.py)."""
    lora = walk.config.tuning.lora
    if walk.full or lora.init == "default":
        return 0
    adapted = (linear.weights for linear, _ in walk.shape.linears if is_target(linear, lora.target_modules))
    return (4 + (2 * walk.loaded.weights if walk.nf4 else 0)) * max(adapted, default=0)


def _stacked(walk: Walk) -> list[StackedExpertWeight]:
    return [one for kind in walk.shape.layers for one in kind.expert_weights if one.is_packable or not walk.nf4]


def _largest_unit(walk: Walk) -> int:
    """Bytes of the largest unit of FSDP2 while it is sharded: what trains in full in its own dtype, fp32 under
    mixed precision, packed matrices with their constants."""
    width = 4 if walk.full and walk.loaded.autocast is not None else walk.loaded.weights
    adapters = 4 if walk.loaded.autocast is not None and not walk.nf4 else walk.loaded.adapters
    lora = walk.config.tuning.lora
    units_bytes = [width * walk.shape.embedding_table_params]
    for kind in walk.shape.layers:
        packed = sum(nf4_bytes(elements) for elements in kind.packable_sizes) if walk.nf4 else 0
        plain = width * (kind.params - (sum(kind.packable_sizes) if walk.nf4 else 0))
        beside = 0 if walk.full else adapters_of(kind, lora)
        units_bytes.append(packed + plain + adapters * beside)
    return max(units_bytes)


def read_in_ram(walk: Walk) -> int:
    """Bytes of RAM that a rank needs to load the weights, without pages of their files."""
    layout = walk.step.layout
    if layout.is_fsdp or (layout.is_zero and layout.shards_params and not walk.nf4):
        return walk.loaded.weights * largest_tensor(walk.shape) + copied_in_ram(walk)
    sizes = sorted((size for size, count, _ in large_tensors(walk.shape) for _ in range(count)), reverse=True)
    # one after the other where each is packed as it comes; what is cast is cast in RAM, by several threads
    at_once = 1 if walk.nf4 or walk.shape.stored_dtype == walk.precision.load else READERS
    beside = copied_in_ram(walk) if walk.nf4 and walk.config.tuning.lora.init == "loftq" else 0  # the base's own
    return walk.loaded.weights * sum(sizes[:at_once]) + beside


def copied_in_ram(walk: Walk) -> int:
    """Bytes of RAM that a rank keeps of weights that it reads into RAM: transformers maps files into memory, and
    copies what is cast from another dtype (DeepSpeed: each tensor in transit) or stacked (experts)."""
    as_stored = walk.shape.stored_dtype == walk.precision.load or walk.step.layout.is_zero
    return walk.loaded.weights * (walk.shape.expert_params if as_stored else walk.shape.params)


# Of a stacked tensor of experts while it is loaded: itself, and the parts that it is put together from
# (transformers' core_model_loading.py, MergeModulelist and Concatenate).
STACKING = 2

# Threads in which transformers reads tensors (core_model_loading.py, GLOBAL_WORKERS).
READERS = 4

# Whole: one process writes everything, gathered if it is sharded. Sharded: each rank writes its shard, in torch's
# distributed format. DeepSpeed writes each rank's shard in its own format.
Form = Literal["whole", "sharded", "deepspeed"]

# Assumed write rate of one process: the baseline of a general-purpose volume in the cloud (AWS gp3: 125 MiB/s;
# Google's and Azure's are about as fast). Not measured; a local NVMe disk is ten times as fast.
DISK_BYTES_PER_S = 125 * MIB
# How long all other ranks may wait while the first one writes.
WHOLE_SAVE_S = 120
# The largest checkpoint of full states that is gathered on the first rank, 14.6 GiB: above it, writing by one process
# costs minutes of all GPUs, and the gathered copy (two thirds of it) more host RAM than a run has to spare. Up to 1.3
# billion parameters with AdamW in fp32 (12 bytes each) stay whole.
WHOLE_BYTES = DISK_BYTES_PER_S * WHOLE_SAVE_S
# Largest file of final weights that are gathered tensor by tensor, complete in the first rank's RAM before it is
# written.
FILE_BYTES = 5 * 10**9
# Largest file that transformers writes at once (`max_shard_size` of `save_pretrained`), complete in the host's RAM.
SAVE_SHARD_BYTES = 50 * 10**9
# For a tensor of a sharded checkpoint: the copy from the GPU, and its serialised bytes.
COPIES = 2


@dataclass(frozen=True)
class Saving:
    """How a training checkpoint is written. Bytes of RAM are those in use at once; `total` is the size on disk."""

    form: Form
    total: int
    """Bytes of weights and optimizer states."""
    first: int
    """RAM that the first rank needs beyond what every rank needs, for a checkpoint or the final weights."""
    each: int
    gathered: int
    staged: int = 0
    """Of `each`: the copy that a rank holds while its part is written beside the training."""


def saving_of(walk: Walk) -> Saving:
    """How checkpoints are written: sharded where FSDP divides full states that are too large for one process."""
    layout, parameters = walk.step.layout, walk.trained
    untrained = walk.shape.untrained_params if walk.full else 0  # saved with the rest
    alone = min((parameters.params + untrained) * parameters.width, SAVE_SHARD_BYTES)
    paged = paged_bytes(walk.config.train.optim, walk.shape, parameters)
    if layout.is_zero:
        return Saving("deepspeed", 4 * parameters.params + (paged or 8 * parameters.params), alone, 0, alone)
    parts = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
    # a gradient is as large as its parameter
    weights = walk.resident.gradients * parts + walk.loaded.weights * untrained
    states = walk.resident.optimizer * parts + paged
    total = weights + states
    if not (layout.is_fsdp and walk.full):
        return Saving("whole", total, alone, 0, alone)
    gathered = max(weights, states)  # the one is written, and freed, before the other is gathered
    largest = largest_tensor(walk.shape)
    # the first rank holds a file of the final weights in 16 bits, and one tensor in fp32; all of them where there are
    # experts, which are saved under other names than they have in memory
    final = 2 * (parameters.params + untrained)
    if walk.shape.num_experts == 0:
        final = min(final, FILE_BYTES) + 4 * largest
    beside = walk.config.train.async_save
    if total <= WHOLE_BYTES and not beside:
        return Saving("whole", total, max(gathered, final), 0, gathered)
    staged = -(-total // parts) if beside else 0
    return Saving("sharded", total, final, COPIES * 4 * -(-largest // parts) + staged, gathered, staged)
