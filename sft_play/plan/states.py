"""What stays between steps: weights, adapters, gradients and optimizer states, whole and as one rank's part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.model_shape import ModelShape
from sft_play.plan.block import Numbers
from sft_play.plan.layout import Layout
from sft_play.plan.structure import is_target

MIB = 2**20
NF4_BLOCK = 64
"""Weights that share one absmax in bitsandbytes' NF4."""
STATE_BLOCK = 256
"""Elements that share one absmax in bitsandbytes' 8-bit optimizers."""
OWN_SEGMENT = 10 * MIB
"""From this size a tensor gets a segment of its own, of whole 2 MiB (kMinLargeAlloc, CUDACachingAllocator.cpp)."""

Targets = tuple[str, ...] | Literal["auto"]


def nf4_bytes(elements: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation: packed weights, 8-bit absmax, their own absmax, codes.

    n/2 + n/64 + 4 * n/64/256, a table of 256 and one of 16 in fp32, an offset (bitsandbytes, functional.py).
    """
    blocks = math.ceil(elements / NF4_BLOCK)
    return math.ceil(elements / 2) + blocks + 4 * math.ceil(blocks / 256) + 1024 + 4 + 64


def rest_of_segment(nbytes: int) -> int:
    """Bytes that a large tensor's block has beyond its own: a segment's rest of at most 1 MiB is not split off."""
    if nbytes < OWN_SEGMENT:
        return 0
    rest = -nbytes % (2 * MIB)
    return rest if rest <= MIB else 0


def large_tensors(shape: ModelShape) -> Iterator[tuple[int, int, bool]]:
    """Elements, count and whether a linear layer, of the tensors that can be large: matrices, embedding, head."""
    for linear, count in shape.linears:
        yield linear.weights, count, True
    yield shape.vocab_size * (shape.embedding_width or shape.hidden_size), 1 if shape.tied else 2, False
    for kind in shape.layers:
        if kind.expert_params:
            yield kind.expert_params * 2 // 3, kind.count, False
            yield kind.expert_params // 3, kind.count, False


def weight_bytes(shape: ModelShape, *, width: int, nf4: bool) -> int:
    """The weights as loaded: `width` bytes each; in NF4 the linear layers, never embedding, head, norms, biases or
    experts (transformers keeps those as one tensor, which bitsandbytes leaves alone)."""
    linears = sum(count * linear.weights for linear, count in shape.linears)
    packed = sum(count * nf4_bytes(linear.weights) for linear, count in shape.linears)
    rests = sum(
        count * rest_of_segment(elements // 2 if nf4 and linear else width * elements)
        for elements, count, linear in large_tensors(shape)
    )
    return (packed if nf4 else width * linears) + width * (shape.params - linears) + rests


def adapter_params(shape: ModelShape, rank: int, *, targets: Targets = "auto", dora: bool = False) -> int:
    """LoRA parameters: r * (inputs + outputs) on each targeted linear layer; DoRA adds one number per output."""
    chosen = [(linear, count) for linear, count in shape.linears if is_target(linear, targets)]
    return sum(count * (rank * (x.inputs + x.outputs) + (x.outputs if dora else 0)) for x, count in chosen)


EMBEDDING_NAMES = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"})
HEAD_NAMES = frozenset({"lm_head", "embed_out", "output"})


@dataclass(frozen=True)
class Trained:
    """What trains: parameters, bytes of one, and whether embedding and head are among them."""

    params: int
    width: int
    embedding: bool
    head: bool


def trained(config: RunConfig, shape: ModelShape, widths: Numbers) -> Trained:
    """The parameters that train: all of them, or adapters and whole modules beside them (PEFT copies those)."""
    if config.tuning.mode == "full":
        return Trained(shape.params, widths.weights, embedding=True, head=True)
    lora = config.tuning.lora
    names = {name.rpartition(".")[2] for name in lora.modules_to_save}
    vocabulary = shape.vocab_size * (shape.embedding_width or shape.hidden_size)
    embedding, head = bool(names & EMBEDDING_NAMES), bool(names & HEAD_NAMES)
    params = adapter_params(shape, lora.r, targets=lora.target_modules, dora=lora.use_dora)
    return Trained(params + vocabulary * (embedding + head), widths.adapters, embedding, head)


def optimizer_bytes(optim: str, shape: ModelShape, what: Trained, *, full: bool) -> int:
    """Optimizer states in the allocator. AdamW: two of the parameter's dtype (torch keeps states in it);
    8-bit paged AdamW: none, its states are managed memory (`paged_bytes`); Adafactor: a row and a column of fp32 for
    each matrix."""
    if optim == "paged_adamw_8bit":
        return 0
    if optim == "adafactor":
        return 4 * _rows_and_columns(shape) if full else int(0.02 * what.params * 4)
    rests = sum(count * rest_of_segment(what.width * n) for n, count, _ in large_tensors(shape)) if full else 0
    return 2 * (what.width * what.params + rests)


def paged_bytes(optim: str, what: Trained) -> int:
    """States of paged 8-bit AdamW: two bytes and two fp32 absmax per 256 for each parameter (optim/adamw.py)."""
    return int(what.params * (2 + 8 / STATE_BLOCK)) if optim == "paged_adamw_8bit" else 0


def _rows_and_columns(shape: ModelShape) -> int:
    linears = sum(count * (linear.inputs + linear.outputs) for linear, count in shape.linears)
    tables = (1 if shape.tied else 2) * (shape.vocab_size + shape.hidden_size)
    return linears + tables + shape.other_params


def optimizer_transient(optim: str, shape: ModelShape, what: Trained, *, full: bool) -> int:
    """Bytes that the optimizer's step takes and gives back. Fused AdamW: none; foreach AdamW (`adamw_torch`): the
    list of square roots, as large as the parameters; Adafactor: two fp32 copies of the largest tensor."""
    if optim == "adamw_torch":
        return what.width * what.params
    if optim == "adafactor":
        largest = max(elements for elements, _, _ in large_tensors(shape)) if full else what.params
        return 8 * largest
    return 0


@dataclass(frozen=True)
class Resident:
    """One rank's bytes between steps; `gradients` once they all exist, `host` in the host's RAM."""

    weights: int
    adapters: int
    master: int
    gradients: int
    optimizer: int
    buckets: int
    host: int


def resident(config: RunConfig, shape: ModelShape, widths: Numbers, layout: Layout) -> Resident:
    """Weights, adapters, gradients and states of one rank.

    DDP: whole, and gradients once more in buckets (accelerate leaves `gradient_as_bucket_view` off). FSDP2 with mixed
    precision: trained weights are kept in fp32 (accelerate, utils/fsdp_utils.py), all divided by W; NF4 weights are
    not divided (their packed bytes are no float parameters). ZeRO in bf16: half-precision weights, fp32 masters and
    states of 12 bytes by W; gradients whole in stage 1, by W in 2 and 3; weights by W in 3 (deepspeed,
    runtime/zero; bytes counted on real ranks).
    """
    mode, optim = config.tuning.mode, config.train.optim
    full, nf4 = mode == "full", mode == "qlora"
    what = trained(config, shape, widths)
    tp = layout.tensor_parallel
    frozen = 0 if full else weight_bytes(shape, width=widths.weights, nf4=nf4)
    frozen = _by_tensor_parallel(frozen, shape, widths, nf4=nf4, ranks=tp)
    params = (
        _by_tensor_parallel(what.params, shape, Numbers(1, None, 1), nf4=False, ranks=tp) if full else what.params // tp
    )
    whole = Trained(params, what.width, what.embedding, what.head)
    states = optimizer_bytes(optim, shape, whole, full=full) // (tp if full and tp > 1 else 1)
    if layout.is_zero:
        return _zero(whole, frozen, layout, optim, full=full)
    shard = layout.shard if layout.is_fsdp else 1
    if layout.is_fsdp:
        width = 4 if widths.autocast is not None else what.width
        frozen_part = frozen if nf4 else frozen // shard
        part = -(-whole.params // shard)
        states = states * width // what.width // shard
        return Resident(
            weights=frozen_part + (part * width if full else 0),
            adapters=0 if full else part * width,
            master=0,
            gradients=part * width,
            optimizer=states,
            buckets=0,
            host=0,
        )
    rests = (
        sum(count * rest_of_segment(what.width * n) for n, count, _ in large_tensors(shape)) if full and tp == 1 else 0
    )
    held = whole.params * what.width + rests
    return Resident(
        weights=held if full else frozen,
        adapters=0 if full else held,
        master=0,
        gradients=held,
        optimizer=states,
        buckets=whole.params * what.width if layout.name == "ddp" else 0,
        host=0,
    )


def _by_tensor_parallel(nbytes: int, shape: ModelShape, widths: Numbers, *, nf4: bool, ranks: int) -> int:
    if ranks == 1:
        return nbytes
    rest = widths.weights * (shape.params - sum(count * linear.weights for linear, count in shape.linears))
    return rest + (nbytes - rest) // ranks


def _zero(what: Trained, frozen: int, layout: Layout, optim: str, *, full: bool) -> Resident:
    shard = layout.shard
    own = -(-what.params // shard)
    half = 2 * what.params
    weights = half // shard if layout.shards_params else half
    gradients = 2 * own if layout.shards_grads else half
    states = 0 if optim == "paged_adamw_8bit" else int(0.02 * 4 * own) if optim == "adafactor" else 8 * own
    masters = 4 * own
    frozen = frozen // shard if layout.shards_params else frozen
    host = 0
    if layout.offloads_states:
        host = masters + states + 4 * own  # fp32 masters, states, fp32 gradients, all page-locked
        masters = states = 0
    if layout.offloads_params:
        host += weights + frozen
        weights = frozen = 0
    return Resident(
        weights=frozen + (weights if full else 0),
        adapters=0 if full else weights,
        master=masters,
        gradients=gradients,
        optimizer=states,
        buckets=0,
        host=host,
    )
