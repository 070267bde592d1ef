"""What loading the weights takes, before the first step: on a rank's device, and in the host's RAM."""

from __future__ import annotations

from dataclasses import replace

from sft_play.planner.memory.model_states import (
    kind_adapters,
    largest_tensor,
    loads_by_unit,
    nf4_bytes,
    resident,
    weight_bytes,
)
from sft_play.planner.memory.step_memory import Terms, Walk


def loading_terms(walk: Walk) -> Terms:
    """The most that a rank holds on its device until the model is there and wrapped, by what it is for.

    Under FSDP2 a rank has its shards, one full unit, and the tensor that arrived last (training/model/fsdp_loading.py).
    Under ZeRO-3 NF4 weights are created on each rank's own device, all of them: transformers reads and quantises
    one layer after the other (core_model_loading.py; ZeRO-3's partitioned reading is only for plain weights), PEFT
    adds adapters in fp32, and only then does DeepSpeed partition, tensor by tensor. Plain weights are partitioned
    as they arrive.
    """
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
    if not walk.nf4:
        passing = walk.loaded.weights * largest_tensor(walk.shape) if layout.shards_params else 0
        return {"weights": parts.weights, "adapters": parts.adapters, "gather_buffers": passing}
    sizes = [linear.weights for linear, _ in walk.shape.linears]
    sizes += [kind.expert_params * 2 // 3 for kind in walk.shape.layers]  # stacked from the experts' own tensors
    adapters = 4 * walk.trained.params  # not there yet while the last matrices are quantised
    cut = parts.weights + parts.adapters if layout.is_fsdp else 0  # DoRA: accelerate keeps all until FSDP has cut
    weights = weight_bytes(walk.shape, width=walk.loaded.weights, nf4=True)
    beside = max(cut, walk.loaded.weights * max(sizes, default=0) - adapters)
    return {"weights": weights, "adapters": adapters, "gather_buffers": beside}


def _largest_unit(walk: Walk) -> int:
    """Bytes of the largest unit of FSDP2 while it is sharded: what trains in full in its own dtype, fp32 under
    mixed precision, packed matrices with their constants."""
    width = 4 if walk.full and walk.loaded.autocast is not None else walk.loaded.weights
    adapters = 4 if walk.loaded.autocast is not None and not walk.nf4 else walk.loaded.adapters
    lora = walk.config.tuning.lora
    units_bytes = [width * walk.shape.table_params]
    for kind in walk.shape.layers:
        packed = sum(nf4_bytes(linear.weights) for linear in kind.linears) if walk.nf4 else 0
        plain = width * (kind.params - (kind.linear_weights if walk.nf4 else 0))
        beside = 0 if walk.full else kind_adapters(kind, lora.r, targets=lora.target_modules, dora=False)
        units_bytes.append(packed + plain + adapters * beside)
    return max(units_bytes)


def read_in_ram(walk: Walk) -> int:
    """Bytes of RAM that a rank needs to load the weights, without pages of their files."""
    layout = walk.step.layout
    reads_into_ram = layout.is_fsdp or (layout.is_zero and layout.shards_params and not walk.nf4)
    return walk.loaded.weights * largest_tensor(walk.shape) + (copied_in_ram(walk) if reads_into_ram else 0)


def copied_in_ram(walk: Walk) -> int:
    """Bytes of RAM that a rank keeps of weights that it reads into RAM: transformers maps files into memory, and
    copies what is cast from another dtype (DeepSpeed: each tensor in transit) or stacked (experts)."""
    as_stored = walk.shape.stored_dtype == walk.precision.load or walk.step.layout.is_zero
    return walk.loaded.weights * (walk.shape.expert_params if as_stored else walk.shape.params)
