"""What stays between steps, in full and as one rank's shard: weights, adapters, gradients and
optimizer states; and what a rank with a shard gathers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.schema import BITSANDBYTES_OPTIMIZERS, LoraConfig, RunConfig
from sft_play.models.shape import LayerKind, LinearShape, ModelShape, StackedExpertWeight
from sft_play.planner.layout import Layout
from sft_play.planner.memory.structure import (
    NF4_BLOCK,
    ROW_PARALLEL_ROLES,
    ElementBytes,
    is_target,
    linears_by_role,
    segment_remainder,
    stacked_adapter_params,
    tensor_parallel_linear,
)

# What stays between steps: weights, adapters, gradients and optimizer states, in full and as one
# rank's shard.

# Absmax values that share one of their own under double quantisation (bitsandbytes functional.py,
# quantize_4bit).
ABSMAX_BLOCK = 256
# Elements that share one absmax in bitsandbytes' 8-bit optimizers.
STATE_BLOCK = 256
# Elements of a tensor from which on its states are paged (bitsandbytes optimizer.py,
# `get_state_buffer`).
PAGED_MIN_ELEMENTS = 100_000


def loads_by_unit(config: RunConfig, layout: Layout) -> bool:
    """True if ranks get the weights from the first one, a unit at a time, and keep their shards.
    DoRA's magnitudes are computed from full weights; tensor parallelism divides differently."""
    uses_dora = config.tuning.mode != "full" and config.tuning.lora.use_dora
    return layout.is_fsdp and layout.tensor_parallel == 1 and not uses_dora


def nf4_bytes(elements: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation: packed weights, 8-bit absmax, their own
    absmax, codes. n/2 + n/64 + 4 * n/64/256, a table of 256 and one of 16 in fp32, an offset
    (bitsandbytes, functional.py).
    """
    blocks = math.ceil(elements / NF4_BLOCK)
    return math.ceil(elements / 2) + blocks + 4 * math.ceil(blocks / ABSMAX_BLOCK) + 1024 + 4 + 64


def large_tensors(shape: ModelShape) -> Iterator[tuple[int, int, bool]]:
    """Yield elements, count and whether qlora packs it, for each kind of tensor that can be large:
    matrices, embedding, head."""
    for elements, count in shape.packable_sizes:
        yield elements, count, True
    for linear, count in shape.linears:
        if not linear.is_packable:
            yield linear.weights, count, False
    yield shape.embedding_table_params, 2 - shape.tied, False


def largest_tensor_elements(shape: ModelShape) -> int:
    """Elements of the largest tensor of the weights."""
    return max(elements for elements, _, _ in large_tensors(shape))


def weight_bytes(shape: ModelShape, *, itemsize: int, is_nf4: bool) -> int:
    """The weights as loaded, `itemsize` bytes each; in NF4 the linear layers and experts."""
    nf4_total = sum(count * nf4_bytes(elements) for elements, count in shape.packable_sizes)
    remainders = sum(
        count * segment_remainder(elements // 2 if is_nf4 and packs else itemsize * elements)
        for elements, count, packs in large_tensors(shape)
    )
    if is_nf4:
        return nf4_total + itemsize * (shape.params - shape.packable_params) + remainders
    return itemsize * shape.params + remainders


def adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """LoRA parameters: r * (inputs + outputs) on each target, an expert too; DoRA adds one number
    per output of a layer."""
    return sum(rows * columns * count for rows, columns, count in _lora_factors(shape, lora))


def block_adapter_params(kind: LayerKind, lora: LoraConfig) -> int:
    """LoRA parameters of one block."""
    return sum(
        rows * columns
        for rows, columns in _linear_lora_factors(kind.linears, kind.expert_weights, lora)
    )


def _lora_factors(shape: ModelShape, lora: LoraConfig) -> Iterator[tuple[int, int, int]]:
    projector = (
        shape.vision.weights.projector if shape.vision is not None and lora.projector else ()
    )
    for one in projector:
        yield from ((lora.stored_rank, one.inputs, 1), (one.outputs, lora.stored_rank, 1))
    for linears, stacks, count in (
        (shape.outer_linears, (), 1),
        *((k.linears, k.expert_weights, k.count) for k in shape.layers),
    ):
        yield from ((*sides, count) for sides in _linear_lora_factors(linears, stacks, lora))


def _linear_lora_factors(
    linears: Sequence[LinearShape], stacks: Sequence[StackedExpertWeight], lora: LoraConfig
) -> Iterator[tuple[int, int]]:
    for linear in linears:
        if is_target(linear, lora.target_modules):
            yield from ((lora.stored_rank, linear.inputs), (linear.outputs, lora.stored_rank))
            yield from ((1, linear.outputs),) * lora.use_dora
    for stacked in stacks:
        if stacked_adapter_params(stacked, lora):
            yield from (
                (lora.stored_rank * stacked.experts, stacked.inputs),
                (stacked.outputs, lora.stored_rank * stacked.experts),
            )


EMBEDDING_NAMES = frozenset(
    {"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"}
)
HEAD_NAMES = frozenset({"lm_head", "embed_out", "output"})


@dataclass(frozen=True)
class TrainedParameters:
    """What trains: parameters, bytes of one, whether embedding and head are among them, and bytes
    of a state's element. States wider than their parameters belong to stochastic rounding, which
    steps one tensor at a time in fp32."""

    params: int
    itemsize: int
    trains_embedding: bool
    trains_head: bool
    state_itemsize: int
    # Of the parameters: rows of embeddings that new tokens have, and that PEFT puts into a copy of
    # the whole table.
    new_token_params: int = 0
    # Of the parameters: those in tensors below `PAGED_MIN_ELEMENTS`.
    small_tensor_params: int = 0
    largest_elements: int = 0
    # Rows and columns of all tensors; for a vector its elements.
    matrix_sides: int = 0


def trains_vision(config: RunConfig, shape: ModelShape) -> bool:
    """True if the vision tower of a run with pictures trains too."""
    return shape.vision is not None and config.tuning.train_vision


def trained_vision_params(config: RunConfig, shape: ModelShape) -> int:
    """Parameters of the vision tower and projector where they train in full; else 0."""
    if shape.vision is None or not trains_vision(config, shape):
        return 0
    return shape.vision.weights.params


def trained_parameters(
    config: RunConfig, shape: ModelShape, element_bytes: ElementBytes
) -> TrainedParameters:
    """The parameters that train: all of them, or adapters and PEFT's copies of modules_to_save."""
    table_sides = shape.vocab_size + shape.hidden_size
    if config.tuning.mode == "full":
        linear_sides = sum(
            count * (linear.inputs + linear.outputs) for linear, count in shape.linears
        )
        return TrainedParameters(
            shape.params - shape.untrained_params + trained_vision_params(config, shape),
            element_bytes.weights,
            trains_embedding=True,
            trains_head=True,
            state_itemsize=element_bytes.states or element_bytes.weights,
            small_tensor_params=shape.other_params,
            largest_elements=largest_tensor_elements(shape),
            matrix_sides=linear_sides + (2 - shape.tied) * table_sides + shape.other_params,
        )
    lora = config.tuning.lora
    copied_modules = {name.rpartition(".")[2] for name in lora.modules_to_save}
    trains_embedding = bool(copied_modules & EMBEDDING_NAMES)
    trains_head = bool(copied_modules & HEAD_NAMES)
    adapter_and_copy_params = adapter_params(shape, lora) + shape.embedding_table_params * (
        trains_embedding + trains_head
    )
    # new tokens' rows train in each table that is not copied as a whole; tied tables are one
    tables = (
        1
        if shape.tied and not (trains_embedding or trains_head)
        else 2 - trains_embedding - trains_head
    )
    new_token_params = (
        len(config.model.add_tokens) * tables * (shape.embedding_table_params // shape.vocab_size)
    )
    factors = list(_lora_factors(shape, lora))
    sizes = [(rows * columns, count) for rows, columns, count in factors]
    return TrainedParameters(
        adapter_and_copy_params + new_token_params,
        element_bytes.adapters,
        trains_embedding,
        trains_head,
        element_bytes.adapters,
        new_token_params,
        small_tensor_params=sum(size * count for size, count in sizes if size < PAGED_MIN_ELEMENTS),
        largest_elements=max(
            [size for size, _ in sizes]
            + [shape.embedding_table_params] * (trains_embedding or trains_head),
            default=0,
        ),
        matrix_sides=sum((rows + columns) * count for rows, columns, count in factors)
        + table_sides * (trains_embedding + trains_head),
    )


def optimizer_bytes(
    optim: str, shape: ModelShape, parameters: TrainedParameters, *, is_full: bool
) -> int:
    """Bytes of optimizer states in the allocator.

    AdamW has two states in the parameter's dtype (torch keeps them in it), Muon one, Adafactor a
    row and a column of fp32 for each matrix. bitsandbytes' AdamW has two and its Lion one, in fp32,
    or in a byte and a 256th of an fp32 absmax; paged states do not count, and whole embeddings
    always have fp32 (transformers' `create_optimizer`).
    """
    if optim in BITSANDBYTES_OPTIMIZERS:
        states, fp32_params = _state_counts(optim, shape, parameters)
        state_bytes = states * (
            4 * fp32_params + (parameters.params - fp32_params) * (1 + 4 / STATE_BLOCK)
        )
        return int(state_bytes) - paged_bytes(optim, shape, parameters)
    if optim == "adafactor":
        return 4 * parameters.matrix_sides
    state_bytes = 2 * parameters.state_itemsize * parameters.params
    if is_full and parameters.params >= shape.params - shape.untrained_params:
        state_bytes += 2 * _segment_remainders(shape, parameters.state_itemsize)
    if optim == "muon":  # a single state of each matrix
        state_bytes -= parameters.state_itemsize * sum(
            count * linear.weights for linear, count in shape.linears
        )
    return state_bytes


def paged_bytes(optim: str, shape: ModelShape, parameters: TrainedParameters) -> int:
    """Bytes of states in managed memory, outside the allocator; the scales and small tensors'
    states never are."""
    if not optim.startswith("paged"):
        return 0
    states, fp32_params = _state_counts(optim, shape, parameters)
    return states * (
        4 * fp32_params + parameters.params - fp32_params - parameters.small_tensor_params
    )


def _state_counts(optim: str, shape: ModelShape, parameters: TrainedParameters) -> tuple[int, int]:
    # of a parameter; parameters whose states are fp32
    states = 2 - ("lion" in optim)
    if "32bit" in optim:
        return states, parameters.params
    return states, shape.embedding_params * parameters.trains_embedding


def optimizer_temporary_bytes(optim: str, shape: ModelShape, parameters: TrainedParameters) -> int:
    """Temporary bytes of the optimizer's step. Fused AdamW: none; foreach AdamW (`adamw_torch`):
    the list of square roots, as large as the parameters; Adafactor: two fp32 copies of the largest
    tensor, and where it has 16 bits it and its gradient in fp32; Muon: a matrix's update, two
    iterates of it in bf16 and two products of its shorter sides (torch/optim/_muon.py). Stochastic
    rounding steps an fp32 copy of one tensor and of its gradient.
    """
    largest_elements = parameters.largest_elements
    # each tensor is stepped in fp32 and rounded back
    rounds = parameters.state_itemsize > parameters.itemsize
    copies = 8 * largest_elements * rounds
    if optim == "adamw_torch":
        return copies + (
            4 * largest_elements if rounds else parameters.itemsize * parameters.params
        )
    if optim == "muon":
        matrices = [
            (linear.weights, min(linear.inputs, linear.outputs)) for linear, _ in shape.linears
        ]
        return copies + max(
            (parameters.state_itemsize + 4) * size + 4 * shorter_side**2
            for size, shorter_side in matrices
        )
    if optim == "adafactor":
        copies += (8 if parameters.state_itemsize == 4 else 16) * largest_elements
    return copies


@dataclass(frozen=True)
class ResidentBytes:
    """One rank's bytes between steps; `gradients` once all exist, `host` in the host's RAM."""

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    master_weights: int = 0
    gradient_buckets: int = 0
    host: int = 0


def resident_bytes(
    config: RunConfig,
    shape: ModelShape,
    element_bytes: ElementBytes,
    layout: Layout,
    *,
    groups_adapters: bool = False,
) -> ResidentBytes:
    """Weights with the class's buffers, adapters, gradients and states of one rank under its
    layout; `groups_adapters`: with the copies that groups of adapters compute with."""
    mode, optim, itemsize = config.tuning.mode, config.train.optim, element_bytes.weights
    is_full, is_nf4 = mode == "full", mode == "qlora"
    parameters = trained_parameters(config, shape, element_bytes)
    buffer_bytes = shape.buffer_bytes + itemsize * shape.buffer_elements
    frozen_bytes = itemsize * shape.untrained_params
    if not is_full:
        frozen_bytes = weight_bytes(shape, itemsize=itemsize, is_nf4=is_nf4)
    if layout.is_zero:
        # ZeRO-3 keeps whole on every rank, offloaded or not: NF4's constants, and norms and biases,
        # which are below `stage3_param_persistence_threshold` (10 times the hidden size)
        unsharded_bytes = _nf4_constant_bytes(shape) + itemsize * shape.other_params
        unsharded_bytes *= is_nf4 and layout.shards_params
        resident = _zero_resident_bytes(
            parameters, frozen_bytes, unsharded_bytes, layout, optim, is_full=is_full
        )
        return replace(resident, weights=resident.weights + buffer_bytes)
    if layout.tensor_parallel > 1:
        parameters = tensor_parallel_parameters(config, shape, parameters, layout.tensor_parallel)
        if not is_full:  # in full training `parameters` has them
            frozen_bytes -= itemsize * _other_ranks_params(shape, layout.tensor_parallel)
    if layout.is_fsdp:
        resident = _fsdp_resident_bytes(
            parameters,
            frozen_bytes,
            shape,
            layout,
            optim,
            upcasts_trained=element_bytes.autocast is not None,
            mode=mode,
        )
        return replace(resident, weights=resident.weights + buffer_bytes)
    host_bytes = 0
    if layout.is_streamed:
        host_bytes = streamed_bytes(config, shape, itemsize)
        largest = max(
            stored_block_bytes(kind, itemsize=itemsize, is_nf4=is_nf4) for kind in shape.layers
        )
        frozen_bytes += PLACES * largest - host_bytes
    held_bytes = trained_bytes = parameters.params * parameters.itemsize
    if is_full and layout.tensor_parallel == 1:
        held_bytes += _segment_remainders(shape, parameters.itemsize)
    # PEFT keeps the rows that were there, too
    adapter_bytes = held_bytes + parameters.new_token_params * itemsize
    if groups_adapters:
        # of linear layers, without those of stacked experts
        copied_params = sum(
            kind.count * rows * columns
            for kind in shape.layers
            for rows, columns in _linear_lora_factors(kind.linears, (), config.tuning.lora)
        )
        adapter_bytes += copied_params * (element_bytes.autocast or itemsize)
    return ResidentBytes(
        weights=frozen_bytes + buffer_bytes + held_bytes * is_full,
        adapters=adapter_bytes * (not is_full),
        gradients=held_bytes,
        optimizer=optimizer_bytes(optim, shape, parameters, is_full=is_full),
        # DDP reduces copies in flat buckets (gradient_as_bucket_view is False by default), which
        # stay allocated
        gradient_buckets=trained_bytes
        * (layout.name == "ddp" or (layout.is_streamed and layout.ranks > 1)),
        host=host_bytes,
    )


def vision_resident_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> int:
    """Bytes of a vision tower beside what `resident_bytes` counts: whole on every rank where it is
    frozen, in a dtype of `itemsize`; where it trains, its buffers alone."""
    if shape.vision is None:
        return 0
    total = shape.vision.weights.resident_bytes(itemsize)
    return total - itemsize * trained_vision_params(config, shape)


# Blocks of a streamed base that are on the device at once: the one that computes, and the next.
PLACES = 2


def stored_block_bytes(
    kind: LayerKind, *, itemsize: int, is_nf4: bool, packed_bytes: Callable[[int], int] = nf4_bytes
) -> int:
    """Bytes of a block's weights as they are stored. In NF4 `packed_bytes` says what each packed
    matrix takes: with its constants, unless they are kept elsewhere."""
    packed_sizes = kind.packable_sizes if is_nf4 else ()
    return sum(map(packed_bytes, packed_sizes)) + itemsize * (kind.params - sum(packed_sizes))


def streamed_bytes(config: RunConfig, shape: ModelShape, itemsize: int) -> int:
    """Bytes of the blocks that a streamed base sends over the bus, forwards or backwards."""
    is_nf4 = config.tuning.mode == "qlora"
    return sum(
        kind.count * stored_block_bytes(kind, itemsize=itemsize, is_nf4=is_nf4)
        for kind in shape.layers
    )


def _segment_remainders(shape: ModelShape, itemsize: int) -> int:
    return sum(
        count * segment_remainder(itemsize * elements)
        for elements, count, _ in large_tensors(shape)
    )


def _fsdp_resident_bytes(
    parameters: TrainedParameters,
    frozen_bytes: int,
    shape: ModelShape,
    layout: Layout,
    optim: str,
    *,
    upcasts_trained: bool,
    mode: str,
) -> ResidentBytes:
    """FSDP2: everything divided by W. Under mixed precision what trains is made fp32 (accelerate,
    utils/fsdp_utils.py), except adapters beside NF4 weights, which have the run's dtype: 4P/W, 4P/W
    of gradients and 8P/W of states. NF4's packed weights are sharded too, their absmax is not (it
    is not a parameter)."""
    is_full, is_nf4 = mode == "full", mode == "qlora"
    itemsize = 4 if upcasts_trained and not is_nf4 else parameters.itemsize
    # rounded up: fully_shard pads every parameter to equal parts
    shard_params = -(-parameters.params // layout.shard)
    shard = replace(parameters, params=shard_params, itemsize=itemsize, state_itemsize=itemsize)
    constant_bytes = _nf4_constant_bytes(shape) * is_nf4
    frozen_shard = constant_bytes + (frozen_bytes - constant_bytes) // layout.shard
    state_bytes = 2 * itemsize * shard_params
    if not optim.startswith("adamw"):
        state_bytes = optimizer_bytes(optim, shape, shard, is_full=False)
    held_bytes = shard_params * itemsize
    return ResidentBytes(
        weights=frozen_shard + held_bytes * is_full,
        adapters=held_bytes * (not is_full),
        gradients=held_bytes,
        optimizer=state_bytes,
    )


def tensor_parallel_parameters(
    config: RunConfig, shape: ModelShape, parameters: TrainedParameters, ranks: int
) -> TrainedParameters:
    """What one rank of a tensor-parallel group trains: its part of the blocks' linear layers, or of
    their adapters' factors on the divided side; embedding, head and norms are whole on each."""
    if ranks == 1:
        return parameters
    if config.tuning.mode == "full":
        return replace(parameters, params=parameters.params - _other_ranks_params(shape, ranks))
    # other ranks have a part of lora_B in layers divided by their outputs, of lora_A in those
    # divided by their inputs
    lora, sides = config.tuning.lora, 0
    for kind in shape.layers:
        for role, linear in linears_by_role(kind, shape).items():
            if is_target(linear, lora.target_modules):
                rank_linear = tensor_parallel_linear(
                    linear, ranks, is_row_parallel=role in ROW_PARALLEL_ROLES
                )
                sides += kind.count * (
                    linear.inputs - rank_linear.inputs + linear.outputs - rank_linear.outputs
                )
    return replace(parameters, params=parameters.params - lora.stored_rank * sides)


def _other_ranks_params(shape: ModelShape, ranks: int) -> int:
    return sum(kind.count * kind.linear_weights for kind in shape.layers) * (ranks - 1) // ranks


def _nf4_constant_bytes(shape: ModelShape) -> int:
    """What NF4 holds beside its packed weights: absmax and codes, which are not parameters and so
    are never sharded."""
    return sum(
        count * (nf4_bytes(elements) - -(-elements // 2))
        for elements, count in shape.packable_sizes
    )


def _zero_resident_bytes(
    parameters: TrainedParameters,
    frozen_bytes: int,
    unsharded_bytes: int,
    layout: Layout,
    optim: str,
    *,
    is_full: bool,
) -> ResidentBytes:
    """ZeRO in half precision (deepspeed/runtime/zero; bytes counted on real ranks): weights 2P,
    fp32 masters 4P/W, states 8P/W, gradients 2P in stage 1 and 2P/W from stage 2 on, weights 2P/W
    in stage 3. Frozen weights are cut in stage 3 too, NF4's packed bytes like others, but for
    `unsharded_bytes`. Offload: masters, states and fp32 gradients are page-locked in the host's
    RAM, in stage 3 the weights too; a gradient leaves the GPU with its bucket (stage3.py
    `grad_partitions_flat_buffer`, stage_1_and_2.py)."""
    shard_params, keeps_states = -(-parameters.params // layout.shard), not layout.offloads_states
    weight_shard_bytes = 2 * (shard_params if layout.shards_params else parameters.params)
    gradient_bytes = 2 * (shard_params if layout.shards_gradients else parameters.params)
    # two of fp32 for AdamW; paged states are managed memory, outside the allocator, but for their
    # scales
    state_bytes = {
        "paged_adamw_8bit": 8 * shard_params // STATE_BLOCK,
        "adafactor": shard_params // 12,
    }.get(optim, 8 * shard_params)
    if layout.shards_params:
        frozen_bytes = (frozen_bytes - unsharded_bytes) // layout.shard
    on_gpu = not layout.offloads_params
    # fp32 masters, two states and gradients
    host_bytes = 16 * shard_params * layout.offloads_states
    host_bytes += (weight_shard_bytes + frozen_bytes) * layout.offloads_params
    return ResidentBytes(
        weights=unsharded_bytes + (frozen_bytes + weight_shard_bytes * is_full) * on_gpu,
        adapters=weight_shard_bytes * on_gpu * (not is_full),
        master_weights=4 * shard_params * keeps_states,
        gradients=gradient_bytes * keeps_states,
        optimizer=state_bytes * keeps_states,
        host=host_bytes,
    )


# --------------------------------------------------------------------------------------------------
# What a rank with a shard of the weights gathers: buffers of FSDP2 and ZeRO-3, phase by phase.
#
# FSDP2 (torch/distributed/fsdp/_fully_shard): a unit is gathered into one flat buffer and copied
# out into its parameters; the buffer of the last unit stays until the next one is waited for. In
# the backward pass the next unit's buffer is filled while this one computes, and the flat input of
# the last reduction stays until the next. accelerate's units are the blocks, the embedding, and
# [last norm, head], with the embedding where it is tied; the last unit stays gathered from the
# forward to the backward pass.

# DeepSpeed's `reduce_bucket_size`, `allgather_bucket_size` and, doubled, the most parameters it
# keeps gathered (`stage3_max_live_parameters`) by its own defaults
# (deepspeed/runtime/zero/config.py).
ZERO_BUCKET_PARAMS = 500_000_000


@dataclass(frozen=True)
class GatherBuffers:
    """What is gathered, in bytes of the compute dtype, and the buffers for it in each phase."""

    # The unit of each block, from the first to the last.
    blocks: tuple[int, ...]
    # 0 where it belongs to the tail.
    embedding: int
    # The last unit; while the head computes: its parameters.
    tail: int
    # Fraction of a unit's parameters that train: what is reduced of it.
    trained_share: float
    ranks: int
    # Bytes of a gradient as sent over its bytes as computed.
    reduce_ratio: float = 1.0

    @property
    def _tied_embedding(self) -> int:
        return self.tail * (not self.embedding)

    def forward_bytes(self, layer: int) -> int:
        """While block `layer` computes: its parameters and its flat buffer; a tied embedding stays
        too."""
        return 2 * self.blocks[layer] + self._tied_embedding

    @property
    def tail_gather_bytes(self) -> int:
        """When the tail is gathered: the last block's buffer, the tail's, and its parameters."""
        return self.blocks[-1] + 2 * self.tail

    def _prefetched_unit(self, layer: int) -> int:
        """The unit that is gathered while block `layer` runs backward: the one before it in the
        forward pass."""
        return (self.embedding, *self.blocks)[layer]

    def backward_bytes(self, layer: int) -> int:
        """While block `layer` runs backward: its parameters, the next one's buffer, the last
        reduction's input."""
        reduced_bytes = int(
            (*self.blocks, self.tail)[layer + 1] * self.trained_share * self.reduce_ratio
        )
        return (
            self.blocks[layer] + self._prefetched_unit(layer) + reduced_bytes + self._tied_embedding
        )

    def _sharding_bytes(self, gradients: int) -> int:
        """Gradients while they are sharded: themselves, the flat input, this rank's shard, and that
        in fp32."""
        return int(gradients * (1 + self.reduce_ratio + (2 + self.reduce_ratio) / self.ranks))

    def reduction_bytes(self, layer: int) -> int:
        """When the gradients of block `layer` are sharded, beside the next unit's buffer."""
        return (
            self._prefetched_unit(layer)
            + self._sharding_bytes(int(self.blocks[layer] * self.trained_share))
            + self._tied_embedding
        )

    def embedding_backward_bytes(self, embedding_gradient: int) -> tuple[int, ...]:
        """When the embedding runs backward: gathered; with its gradient; when that is sharded."""
        last_reduction = int(self.blocks[0] * self.trained_share)
        # tied: the head's gradient of the same table is there too
        gradients = embedding_gradient * (1 + bool(self._tied_embedding))
        return (
            2 * self.embedding,
            (self.embedding or self.tail) + last_reduction + gradients,
            self._sharding_bytes(embedding_gradient),
        )


def build_gather_buffers(
    shape: ModelShape,
    *,
    itemsize: int,
    is_nf4: bool,
    lora: LoraConfig | None,
    tensor_parallel_ranks: int,
    **fields: Any,
) -> GatherBuffers:
    """The units of a model, `itemsize` bytes for what is gathered unpacked, with the adapters of
    `lora`, and the other fields. Of blocks that tensor-parallel ranks share, the gathered part is
    one rank's."""
    # constants of packed weights are whole on every rank already; FSDP shards what is packed
    # (`bnb_4bit_quant_storage`)
    unit_bytes = [
        stored_block_bytes(
            kind, itemsize=itemsize, is_nf4=is_nf4, packed_bytes=lambda size: -(-size // 2)
        )
        for kind in shape.layers
    ]
    if lora is not None:
        unit_bytes = [
            size + itemsize * block_adapter_params(kind, lora)
            for size, kind in zip(unit_bytes, shape.layers, strict=True)
        ]
    table_bytes = itemsize * shape.embedding_table_params
    blocks = tuple(unit_bytes[index] // tensor_parallel_ranks for index in shape.layer_order)
    return GatherBuffers(blocks, table_bytes * (not shape.tied), table_bytes, **fields)


def zero_bucket_bytes(
    layout: Layout,
    trained_params: int,
    params: int,
    hidden: int,
    *,
    packed_params: int = 0,
    reduces_in_fp32: bool = False,
) -> int:
    """Bytes of DeepSpeed's flat buffers in half precision: two of gradients being sent in stages 1
    and 2, and in stage 3 one beside the parameters that it keeps gathered.

    A bucket has the hidden size squared elements, as transformers fills `reduce_bucket_size: auto`
    (integrations/deepspeed.py). `packed_params`: parameters in NF4; DeepSpeed sees two as one
    element of one byte. `reduces_in_fp32`: gradients made in half precision travel in fp32.
    """
    # two bytes an element, and a copy in fp32 being sent
    bucket = (6 if reduces_in_fp32 else 2) * min(hidden * hidden, trained_params)
    if layout.shards_params:
        plain_params = min(2 * ZERO_BUCKET_PARAMS, params - packed_params)
        return (
            bucket
            + 2 * plain_params
            + min(2 * ZERO_BUCKET_PARAMS - plain_params, packed_params // 2)
        )
    return 2 * bucket
