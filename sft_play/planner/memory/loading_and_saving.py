"""What loading the weights takes of a rank's device and of RAM; how checkpoints are written, and the RAM for that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sft_play.facts.models.model_shape import StackedExpertWeight
from sft_play.planner.memory.model_states import (
    block_adapter_params,
    large_tensors,
    largest_tensor_elements,
    loads_by_unit,
    nf4_bytes,
    paged_bytes,
    resident_bytes,
    weight_bytes,
)
from sft_play.planner.memory.step_memory import MemoryTerms, StepMemorySimulation
from sft_play.planner.memory.structure import is_target
from sft_play.units import MIB


def loading_terms(simulation: StepMemorySimulation) -> MemoryTerms:
    """The most that a rank holds on its device until the model is there and wrapped, by what it is for. Under FSDP2 a
    rank has its shards, one full unit, and the tensor that arrived last (training/model/fsdp_loading.py). Under ZeRO-3
    each rank creates all NF4 weights (core_model_loading.py), PEFT adds adapters in fp32, and only then does DeepSpeed
    partition; plain weights are partitioned as they arrive."""
    resident, layout = simulation.resident, simulation.step.layout
    if loads_by_unit(simulation.config, layout):
        # on a CPU the copies that the first rank reads are in the same memory
        host_copies = {} if simulation.step.on_gpu else {"host_copies": host_copy_bytes(simulation)}
        temporary_bytes = _largest_unit_bytes(
            simulation
        ) + simulation.loaded_element_bytes.weights * largest_tensor_elements(simulation.shape)
        return {
            "weights": resident.weights,
            "adapters": resident.adapters,
            "gather_buffers": temporary_bytes,
            **host_copies,
        }
    if layout.tensor_parallel > 1:  # divided on the way to the device, where FSDP2 shards what is already there
        unsharded = resident_bytes(
            simulation.config, simulation.shape, simulation.loaded_element_bytes, replace(layout, shard=1)
        )
        shard_total = resident.weights + resident.adapters
        return {"weights": unsharded.weights, "adapters": unsharded.adapters, "gather_buffers": shard_total}
    # embeddings that grow are copied
    grown_table = (
        simulation.loaded_element_bytes.weights * simulation.shape.embedding_table_params
        if simulation.config.model.add_tokens
        else 0
    )
    if not simulation.is_nf4:
        temporary_bytes = (
            simulation.loaded_element_bytes.weights * largest_tensor_elements(simulation.shape)
            if layout.shards_params
            else 0
        )
        if not layout.shards_params:  # parts of a stack, beside all that is loaded
            temporary_bytes = (
                (STACKING_COPIES - 1)
                * simulation.loaded_element_bytes.weights
                * max((stacked.weights for stacked in _stacked_tensors(simulation)), default=0)
            )
            temporary_bytes = max(temporary_bytes, grown_table - resident.adapters)  # which are not there yet
        return {
            "weights": resident.weights,
            "adapters": resident.adapters,
            "gather_buffers": max(temporary_bytes, _adapter_start_bytes(simulation)),
        }
    sizes = [linear.weights for linear, _ in simulation.shape.linears]
    sizes += [STACKING_COPIES * stacked.weights for stacked in _stacked_tensors(simulation)]
    adapter_bytes = 4 * simulation.trained_parameters.params  # not there yet while the last matrices are quantised
    # DoRA: accelerate keeps all until FSDP has cut
    shard_total = resident.weights + resident.adapters if layout.is_fsdp else 0
    weight_total = weight_bytes(simulation.shape, itemsize=simulation.loaded_element_bytes.weights, is_nf4=True)
    temporary = max(
        shard_total,
        grown_table - adapter_bytes,
        simulation.loaded_element_bytes.weights * max(sizes, default=0) - adapter_bytes,
        _adapter_start_bytes(simulation),
    )
    return {"weights": weight_total, "adapters": adapter_bytes, "gather_buffers": temporary}


def _adapter_start_bytes(simulation: StepMemorySimulation) -> int:
    """What it takes to start the largest adapter at its layer's singular directions: the weight in fp32, and as NF4
    has it and as it was (training/model/adapter_start.py)."""
    lora = simulation.config.tuning.lora
    if simulation.is_full or lora.init == "default":
        return 0
    adapted_weights = (
        linear.weights for linear, _ in simulation.shape.linears if is_target(linear, lora.target_modules)
    )
    return (4 + (2 * simulation.loaded_element_bytes.weights if simulation.is_nf4 else 0)) * max(
        adapted_weights, default=0
    )


def _stacked_tensors(simulation: StepMemorySimulation) -> list[StackedExpertWeight]:
    return [
        stacked
        for kind in simulation.shape.layers
        for stacked in kind.expert_weights
        if stacked.is_packable or not simulation.is_nf4
    ]


def _largest_unit_bytes(simulation: StepMemorySimulation) -> int:
    """Bytes of the largest unit of FSDP2 while it is sharded: what trains in full in its own dtype, fp32 under
    mixed precision, packed matrices with their constants."""
    itemsize = (
        4
        if simulation.is_full and simulation.loaded_element_bytes.autocast is not None
        else simulation.loaded_element_bytes.weights
    )
    adapter_itemsize = (
        4
        if simulation.loaded_element_bytes.autocast is not None and not simulation.is_nf4
        else simulation.loaded_element_bytes.adapters
    )
    lora = simulation.config.tuning.lora
    units_bytes = [itemsize * simulation.shape.embedding_table_params]
    for kind in simulation.shape.layers:
        packed_bytes = sum(nf4_bytes(elements) for elements in kind.packable_sizes) if simulation.is_nf4 else 0
        plain_bytes = itemsize * (kind.params - (sum(kind.packable_sizes) if simulation.is_nf4 else 0))
        adapter_params = 0 if simulation.is_full else block_adapter_params(kind, lora)
        units_bytes.append(packed_bytes + plain_bytes + adapter_itemsize * adapter_params)
    return max(units_bytes)


def host_read_bytes(simulation: StepMemorySimulation) -> int:
    """Bytes of RAM that a rank needs to load the weights, without pages of their files."""
    layout = simulation.step.layout
    if layout.is_fsdp or (layout.is_zero and layout.shards_params and not simulation.is_nf4):
        return simulation.loaded_element_bytes.weights * largest_tensor_elements(simulation.shape) + host_copy_bytes(
            simulation
        )
    sizes = sorted((size for size, count, _ in large_tensors(simulation.shape) for _ in range(count)), reverse=True)
    # one after the other where each is packed as it comes; what is cast is cast in RAM, by several threads
    reader_count = (
        1 if simulation.is_nf4 or simulation.shape.stored_dtype == simulation.precision.load else READER_THREADS
    )
    # the base's own
    copy_bytes = (
        host_copy_bytes(simulation) if simulation.is_nf4 and simulation.config.tuning.lora.init == "loftq" else 0
    )
    return simulation.loaded_element_bytes.weights * sum(sizes[:reader_count]) + copy_bytes


def host_copy_bytes(simulation: StepMemorySimulation) -> int:
    """Bytes of RAM that a rank keeps of weights that it reads into RAM: transformers maps files into memory, and
    copies what is cast from another dtype (DeepSpeed: each tensor in transit) or stacked (experts)."""
    has_stored_dtype = simulation.shape.stored_dtype == simulation.precision.load or simulation.step.layout.is_zero
    return simulation.loaded_element_bytes.weights * (
        simulation.shape.expert_params if has_stored_dtype else simulation.shape.params
    )


# Of a stacked tensor of experts while it is loaded: itself, and the parts that it is put together from
# (transformers' core_model_loading.py, MergeModulelist and Concatenate).
STACKING_COPIES = 2

# Threads in which transformers reads tensors (core_model_loading.py, GLOBAL_WORKERS).
READER_THREADS = 4

# Whole: one process writes everything, gathered if it is sharded. Sharded: each rank writes its shard, in torch's
# distributed format. DeepSpeed writes each rank's shard in its own format.
CheckpointFormat = Literal["whole", "sharded", "deepspeed"]

# Assumed write rate of one process: the baseline of a general-purpose volume in the cloud (AWS gp3: 125 MiB/s;
# Google's and Azure's are about as fast). Not measured; a local NVMe disk is ten times as fast.
DISK_BYTES_PER_S = 125 * MIB
# How long all other ranks may wait while the first one writes.
MAX_WHOLE_SAVE_S = 120
# The largest checkpoint of full states that is gathered on the first rank, 14.6 GiB: above it, writing by one process
# costs minutes of all GPUs, and the gathered copy (two thirds of it) more host RAM than a run has to spare. Up to 1.3
# billion parameters with AdamW in fp32 (12 bytes each) stay whole.
MAX_WHOLE_BYTES = DISK_BYTES_PER_S * MAX_WHOLE_SAVE_S
# Largest file of final weights that are gathered tensor by tensor, complete in the first rank's RAM before it is
# written.
MAX_WEIGHTS_FILE_BYTES = 5 * 10**9
# Largest file that transformers writes at once (`max_shard_size` of `save_pretrained`), complete in the host's RAM.
SAVE_SHARD_BYTES = 50 * 10**9
# For a tensor of a sharded checkpoint: the copy from the GPU, and its serialised bytes.
SHARDED_SAVE_COPIES = 2


@dataclass(frozen=True)
class CheckpointSaving:
    """How a training checkpoint is written. Bytes of RAM are those in use at once, `total_bytes` is on disk."""

    format: CheckpointFormat
    total_bytes: int
    """Bytes of weights and optimizer states."""
    first_rank_ram: int
    """RAM that the first rank needs beyond what every rank needs, for a checkpoint or the final weights."""
    each_rank_ram: int
    gathered_ram: int
    staged_ram: int = 0
    """Of `each_rank_ram`: the copy that a rank holds while its part is written beside the training."""


def plan_checkpoint_saving(simulation: StepMemorySimulation) -> CheckpointSaving:
    """How checkpoints are written: sharded where FSDP divides full states that are too large for one process."""
    layout, parameters = simulation.step.layout, simulation.trained_parameters
    untrained_params = simulation.shape.untrained_params if simulation.is_full else 0  # saved with the rest
    final_weights_ram = min((parameters.params + untrained_params) * parameters.itemsize, SAVE_SHARD_BYTES)
    paged_state_bytes = paged_bytes(simulation.config.train.optim, simulation.shape, parameters)
    if layout.is_zero:
        return CheckpointSaving(
            "deepspeed",
            4 * parameters.params + (paged_state_bytes or 8 * parameters.params),
            final_weights_ram,
            0,
            final_weights_ram,
        )
    shard_count = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
    # a gradient is as large as its parameter
    weight_and_gradient_bytes = (
        simulation.resident.gradients * shard_count + simulation.loaded_element_bytes.weights * untrained_params
    )
    state_bytes = simulation.resident.optimizer * shard_count + paged_state_bytes
    total_bytes = weight_and_gradient_bytes + state_bytes
    if not (layout.is_fsdp and simulation.is_full):
        return CheckpointSaving("whole", total_bytes, final_weights_ram, 0, final_weights_ram)
    # the one is written, and freed, before the other is gathered
    gathered_ram = max(weight_and_gradient_bytes, state_bytes)
    largest_elements = largest_tensor_elements(simulation.shape)
    # the first rank holds a file of the final weights in 16 bits, and one tensor in fp32; all of them where there are
    # experts, which are saved under other names than they have in memory
    gathered_weights_ram = 2 * (parameters.params + untrained_params)
    if simulation.shape.num_experts == 0:
        gathered_weights_ram = min(gathered_weights_ram, MAX_WEIGHTS_FILE_BYTES) + 4 * largest_elements
    is_async = simulation.config.train.async_save
    if total_bytes <= MAX_WHOLE_BYTES and not is_async:
        return CheckpointSaving("whole", total_bytes, max(gathered_ram, gathered_weights_ram), 0, gathered_ram)
    staged_ram = -(-total_bytes // shard_count) if is_async else 0
    return CheckpointSaving(
        "sharded",
        total_bytes,
        gathered_weights_ram,
        SHARDED_SAVE_COPIES * 4 * -(-largest_elements // shard_count) + staged_ram,
        gathered_ram,
        staged_ram,
    )
