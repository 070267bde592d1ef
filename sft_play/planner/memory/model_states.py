"""What stays between steps: weights, adapters, gradients and optimizer states, in full and as one rank's shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sft_play.config.schema import BITSANDBYTES, LoraConfig, RunConfig
from sft_play.facts.models.model_shape import LayerKind, LinearShape, ModelShape, StackedExpertWeight
from sft_play.planner.layout import Layout
from sft_play.planner.memory.structure import ROW_ROLES, Numbers, is_target, part_of_linear, roles, stacked_adapter
from sft_play.planner.memory.tape import rest_of_segment

# Weights that share one absmax in bitsandbytes' NF4: its default, and transformers sets no other.
NF4_BLOCK = 64
# Absmax values that share one of their own under double quantisation (bitsandbytes functional.py, quantize_4bit).
ABSMAX_BLOCK = 256
# Elements that share one absmax in bitsandbytes' 8-bit optimizers.
STATE_BLOCK = 256
# Elements of a tensor from which on its states are paged (bitsandbytes optimizer.py, `get_state_buffer`).
PAGED_FROM = 100_000


def loads_by_unit(config: RunConfig, layout: Layout) -> bool:
    """Whether ranks get the weights from the first one, a unit at a time, and keep their shards. DoRA's magnitudes are
    computed from full weights; tensor parallelism divides differently."""
    dora = config.tuning.mode != "full" and config.tuning.lora.use_dora
    return layout.is_fsdp and layout.tensor_parallel == 1 and not dora


def nf4_bytes(elements: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation: packed weights, 8-bit absmax, their own absmax, codes. n/2 +
    n/64 + 4 * n/64/256, a table of 256 and one of 16 in fp32, an offset (bitsandbytes, functional.py)."""
    blocks = math.ceil(elements / NF4_BLOCK)
    return math.ceil(elements / 2) + blocks + 4 * math.ceil(blocks / ABSMAX_BLOCK) + 1024 + 4 + 64


def packed_bytes(elements: int) -> int:
    """Of those: the packed weights, which FSDP can shard with a float storage dtype (`bnb_4bit_quant_storage`)."""
    return math.ceil(elements / 2)


def large_tensors(shape: ModelShape) -> Iterator[tuple[int, int, bool]]:
    """Elements, count and whether qlora packs it, of the tensors that can be large: matrices, embedding, head."""
    for elements, count in shape.packable_sizes:
        yield elements, count, True
    for linear, count in shape.linears:
        if not linear.is_packable:
            yield linear.weights, count, False
    yield shape.embedding_table_params, 1 if shape.tied else 2, False


def largest_tensor(shape: ModelShape) -> int:
    """Elements of the largest tensor of the weights."""
    return max(elements for elements, _, _ in large_tensors(shape))


def weight_bytes(shape: ModelShape, *, width: int, nf4: bool) -> int:
    """The weights as loaded, `width` bytes each; in NF4 the linear layers and experts."""
    packed = sum(count * nf4_bytes(elements) for elements, count in shape.packable_sizes)
    rests = sum(
        count * rest_of_segment(elements // 2 if nf4 and packs else width * elements)
        for elements, count, packs in large_tensors(shape)
    )
    return (packed if nf4 else width * shape.packable_params) + width * (shape.params - shape.packable_params) + rests


def adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """LoRA parameters: r * (inputs + outputs) on each target, an expert too; DoRA adds one number per output of a
    layer."""
    return sum(rows * columns * count for rows, columns, count in _factors(shape, lora))


def adapters_of(kind: LayerKind, lora: LoraConfig) -> int:
    """The same for one block."""
    return sum(rows * columns for rows, columns in _factors_on(kind.linears, kind.expert_weights, lora))


def _factors(shape: ModelShape, lora: LoraConfig) -> Iterator[tuple[int, int, int]]:
    for linears, stacks, count in (
        (shape.outer_linears, (), 1),
        *((k.linears, k.expert_weights, k.count) for k in shape.layers),
    ):
        yield from ((*sides, count) for sides in _factors_on(linears, stacks, lora))


def _factors_on(linears: Sequence[LinearShape], stacks: Sequence[StackedExpertWeight], lora: LoraConfig) -> Iterator[tuple[int, int]]:
    for linear in linears:
        if is_target(linear, lora.target_modules):
            yield from ((lora.rank, linear.inputs), (linear.outputs, lora.rank))
            yield from ((1, linear.outputs),) * lora.use_dora
    for one in stacks:
        if stacked_adapter(one, lora):
            yield from ((lora.rank * one.experts, one.inputs), (one.outputs, lora.rank * one.experts))


EMBEDDING_NAMES = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"})
HEAD_NAMES = frozenset({"lm_head", "embed_out", "output"})


@dataclass(frozen=True)
class Trained:
    """What trains: parameters, bytes of one, whether embedding and head are among them, and bytes of a state's element.
    States wider than the parameters are those of stochastic rounding, which steps one tensor at a time in fp32."""

    params: int
    width: int
    embedding: bool
    head: bool
    states: int
    rows: int = 0
    """Of the parameters: rows of embeddings that new tokens have, and that PEFT puts into a copy of the whole table."""
    small: int = 0
    """Of the parameters: those in tensors below `PAGED_FROM`."""
    largest: int = 0
    sides: int = 0
    """Rows and columns of all tensors; for a vector its elements."""

    @property
    def rounded(self) -> bool:
        """Whether each tensor is stepped in fp32 and rounded back."""
        return self.states > self.width


def trained(config: RunConfig, shape: ModelShape, widths: Numbers) -> Trained:
    """The trained parameters: all of them, or adapters and modules_to_save (PEFT copies those)."""
    table = shape.vocab_size + shape.hidden_size
    if config.tuning.mode == "full":
        sides = sum(count * (linear.inputs + linear.outputs) for linear, count in shape.linears)
        return Trained(
            shape.params - shape.untrained_params, widths.weights,
            embedding=True, head=True, states=widths.states or widths.weights,
            small=shape.other_params, largest=largest_tensor(shape),
            sides=sides + (1 if shape.tied else 2) * table + shape.other_params,
        )  # fmt: skip
    lora = config.tuning.lora
    names = {name.rpartition(".")[2] for name in lora.modules_to_save}
    embedding, head = bool(names & EMBEDDING_NAMES), bool(names & HEAD_NAMES)
    whole = adapter_params(shape, lora) + shape.embedding_table_params * (embedding + head)
    tables = 1 if shape.tied and not (embedding or head) else 2 - embedding - head
    rows = len(config.model.add_tokens) * tables * (shape.embedding_table_params // shape.vocab_size)
    factors = list(_factors(shape, lora))
    sizes = [(one * other, count) for one, other, count in factors]
    return Trained(
        whole + rows, widths.adapters, embedding, head, widths.adapters, rows,
        small=sum(size * count for size, count in sizes if size < PAGED_FROM),
        largest=max([size for size, _ in sizes] + [shape.embedding_table_params] * (embedding or head), default=0),
        sides=sum((one + other) * count for one, other, count in factors) + table * (embedding + head),
    )  # fmt: skip


def optimizer_bytes(optim: str, shape: ModelShape, parameters: Trained, *, full: bool) -> int:
    """Optimizer states in the allocator. AdamW: two of the parameter's dtype (torch keeps states in it), Muon one;
    bitsandbytes' own: `bitsandbytes_states`, without those that are paged; Adafactor: a row and a column of fp32 for
    each matrix."""
    if optim in BITSANDBYTES:
        return bitsandbytes_states(optim, shape, parameters) - paged_bytes(optim, shape, parameters)
    if optim == "adafactor":
        return 4 * parameters.sides
    rests = _rests(shape, parameters.states) if full and parameters.params == shape.params - shape.untrained_params else 0
    second = sum(count * linear.weights for linear, count in shape.linears) if optim == "muon" else 0
    return 2 * (parameters.states * parameters.params + rests) - parameters.states * second


def bitsandbytes_states(optim: str, shape: ModelShape, parameters: Trained) -> int:
    """States of bitsandbytes' optimizers, two of AdamW and one of Lion: fp32, or a byte and a 256th of an fp32 absmax.
    Those of whole embeddings are fp32 always (transformers' `create_optimizer`)."""
    wide = _wide(optim, shape, parameters)
    return int(_states_of(optim) * (4 * wide + (parameters.params - wide) * (1 + 4 / STATE_BLOCK)))


def paged_bytes(optim: str, shape: ModelShape, parameters: Trained) -> int:
    """Of those: states that are managed memory, outside the allocator; scales and small tensors' never are."""
    if not optim.startswith("paged"):
        return 0
    wide = _wide(optim, shape, parameters)
    return _states_of(optim) * (4 * wide + parameters.params - wide - parameters.small)


def _wide(optim: str, shape: ModelShape, parameters: Trained) -> int:
    return parameters.params if "32bit" in optim else shape.embedding_params if parameters.embedding else 0


def _states_of(optim: str) -> int:
    return 1 if "lion" in optim else 2


def optimizer_transient(optim: str, shape: ModelShape, parameters: Trained) -> int:
    """Temporary bytes of the optimizer's step. Fused AdamW: none; foreach AdamW (`adamw_torch`): the list of square
    roots, as large as the parameters; Adafactor: two fp32 copies of the largest tensor, and where it has 16 bits it and
    its gradient in fp32; Muon: a matrix's update, two iterates of it in bf16 and two products of its shorter sides
    (torch/optim/_muon.py). Stochastic rounding steps an fp32 copy of one tensor and of its gradient."""
    largest = parameters.largest
    copies = 8 * largest if parameters.rounded else 0
    if optim == "adamw_torch":
        return copies + (4 * largest if parameters.rounded else parameters.width * parameters.params)
    if optim == "muon":
        sides = [(linear.weights, min(linear.inputs, linear.outputs)) for linear, _ in shape.linears]
        return copies + max((parameters.states + 4) * size + 4 * short**2 for size, short in sides)
    own = 8 if parameters.states == 4 else 16
    return copies + (own * largest if optim == "adafactor" else 0)


@dataclass(frozen=True)
class Resident:
    """One rank's bytes between steps; `gradients` once all exist, `host` in the host's RAM."""

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    master: int = 0
    buckets: int = 0
    host: int = 0


def resident(config: RunConfig, shape: ModelShape, widths: Numbers, layout: Layout) -> Resident:
    """Weights with the class's buffers, adapters, gradients and states of one rank under its layout."""
    without = _resident(config, shape, widths, layout)
    buffers = shape.buffer_bytes + widths.weights * shape.buffer_elements
    return replace(without, weights=without.weights + buffers)


def _resident(config: RunConfig, shape: ModelShape, widths: Numbers, layout: Layout) -> Resident:
    mode, optim = config.tuning.mode, config.train.optim
    full, nf4 = mode == "full", mode == "qlora"
    own = trained(config, shape, widths)
    frozen = widths.weights * shape.untrained_params if full else weight_bytes(shape, width=widths.weights, nf4=nf4)
    if layout.is_zero:
        # ZeRO-3 keeps whole on every rank, offloaded or not: NF4's constants, and norms and biases, which are below
        # `stage3_param_persistence_threshold` (10 times the hidden size)
        whole = _nf4_constants(shape) + widths.weights * shape.other_params
        return _zero(own, frozen, whole if nf4 and layout.shards_params else 0, layout, optim, full=full)
    if layout.tensor_parallel > 1:
        own = part_of_trained(config, shape, own, layout.tensor_parallel)
        elsewhere = widths.weights * _divided(shape) * (layout.tensor_parallel - 1) // layout.tensor_parallel
        frozen -= 0 if full else elsewhere  # in full training `own` has them
    if layout.is_fsdp:
        return _sharded(own, frozen, shape, layout, optim, upcast=widths.autocast is not None, mode=mode)
    rests = _rests(shape, own.width) if full and layout.tensor_parallel == 1 else 0
    held = own.params * own.width + rests
    return Resident(
        weights=frozen + (held if full else 0),
        adapters=0 if full else held + own.rows * widths.weights,  # PEFT keeps the rows that were there, too
        gradients=held,
        optimizer=optimizer_bytes(optim, shape, own, full=full),
        # DDP reduces copies in flat buckets (gradient_as_bucket_view is False by default), which stay allocated
        buckets=own.params * own.width if layout.name == "ddp" else 0,
    )


def _rests(shape: ModelShape, width: int) -> int:
    return sum(count * rest_of_segment(width * elements) for elements, count, _ in large_tensors(shape))


def _sharded(
    whole: Trained, frozen: int, shape: ModelShape, layout: Layout, optim: str, *, upcast: bool, mode: str
) -> Resident:
    """FSDP2: everything divided by W. Under mixed precision what trains is made fp32 (accelerate, utils/fsdp_utils.py),
    except adapters beside NF4 weights, which have the run's dtype: 4P/W, 4P/W of gradients and 8P/W of states. NF4's
    packed weights are sharded too, their absmax is not (it is not a parameter)."""
    full, nf4 = mode == "full", mode == "qlora"
    width = 4 if upcast and not nf4 else whole.width
    # rounded up: fully_shard pads every parameter to equal parts
    own = replace(whole, params=-(-whole.params // layout.shard), width=width, states=width)
    constants = _nf4_constants(shape) if nf4 else 0
    part = constants + (frozen - constants) // layout.shard
    states = 2 * width * own.params if optim.startswith("adamw") else optimizer_bytes(optim, shape, own, full=False)
    held = own.params * width
    return Resident(
        weights=part + (held if full else 0),
        adapters=0 if full else held,
        gradients=held,
        optimizer=states,
    )


def part_of_trained(config: RunConfig, shape: ModelShape, whole: Trained, ranks: int) -> Trained:
    """What one rank of a tensor-parallel group trains: its part of the blocks' linear layers, or of their adapters'
    factors on the divided side; embedding, head and norms are whole on each."""
    if ranks == 1:
        return whole
    full = config.tuning.mode == "full"
    elsewhere = _divided(shape) * (ranks - 1) // ranks if full else adapters_elsewhere(config, shape, ranks)
    return replace(whole, params=whole.params - elsewhere)


def _divided(shape: ModelShape) -> int:
    return sum(kind.count * kind.linear_weights for kind in shape.layers)


def adapters_elsewhere(config: RunConfig, shape: ModelShape, ranks: int) -> int:
    """LoRA parameters that belong to other ranks of a tensor-parallel group: lora_B of layers divided by their outputs,
    lora_A of those divided by their inputs."""
    lora, total = config.tuning.lora, 0
    for kind in shape.layers:
        for role, linear in roles(kind, shape).items():
            if is_target(linear, lora.target_modules):
                own = part_of_linear(linear, ranks, by_row=role in ROW_ROLES)
                total += kind.count * lora.rank * (linear.inputs - own.inputs + linear.outputs - own.outputs)
    return total


def _nf4_constants(shape: ModelShape) -> int:
    """What NF4 holds beside its packed weights: absmax and codes, which are not parameters and so are never sharded."""
    return sum(count * (nf4_bytes(elements) - packed_bytes(elements)) for elements, count in shape.packable_sizes)


def _zero(whole: Trained, frozen: int, kept: int, layout: Layout, optim: str, *, full: bool) -> Resident:
    """ZeRO in half precision (deepspeed/runtime/zero; bytes counted on real ranks): weights 2P, fp32 masters 4P/W,
    states 8P/W, gradients 2P in stage 1 and 2P/W from stage 2 on, weights 2P/W in stage 3. Frozen weights are cut in
    stage 3 too, NF4's packed bytes like others, but for the `kept` bytes. Offload: masters, states and fp32 gradients
    are page-locked in the host's RAM, in stage 3 the weights too; a gradient leaves the GPU with its bucket (stage3.py
    `grad_partitions_flat_buffer`, stage_1_and_2.py)."""
    own = -(-whole.params // layout.shard)
    half = 2 * (own if layout.shards_params else whole.params)
    gradients = 0 if layout.offloads_states else 2 * (own if layout.shards_grads else whole.params)
    # two of fp32 for AdamW; paged states are managed memory, outside the allocator, but for their scales
    states = {"paged_adamw_8bit": 8 * own // STATE_BLOCK, "adafactor": own // 12}.get(optim, 8 * own)
    frozen = (frozen - kept) // layout.shard if layout.shards_params else frozen
    on_gpu = not layout.offloads_params
    host = 16 * own if layout.offloads_states else 0  # fp32 masters, two states and gradients
    host += 0 if on_gpu else half + frozen
    return Resident(
        weights=kept + (frozen + (half if full else 0)) * on_gpu,
        adapters=0 if full else half * on_gpu,
        master=0 if layout.offloads_states else 4 * own,
        gradients=gradients,
        optimizer=0 if layout.offloads_states else states,
        host=host,
    )
