"""The moments of one training step on one rank, from the first block to the last and back, each with its bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.attention import AttentionName
from sft_play.planner.gradients import gradients_of
from sft_play.planner.kernels import GROUPED_SINCE, planned_experts, planned_kernels
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.block import (
    BlockBytes,
    LayerBytes,
    LossName,
    Vocabulary,
    block_bytes,
    forward_peak,
    head_bytes,
)
from sft_play.planner.memory.gather import Gathering, gathering, zero_buckets
from sft_play.planner.memory.model_states import optimizer_transient, part_of_trained, resident, trained
from sft_play.planner.memory.structure import (
    BlockSpec,
    Numbers,
    block_spec,
    kernel_of,
    numbers,
    on_tensor_parallel,
    sees_mask,
)
from sft_play.planner.precision import BYTES, Precision
from sft_play.units import MIB

Moment = Literal["forward", "head", "backward", "optimizer", "evaluation", "saving"]
Terms = dict[str, int]

# Threads that multiply: the forward's and the autograd engine's.
WORKSPACE_THREADS = 2
# A token's id, its label and its entry in the mask.
TOKEN_BYTES = 3 * 8
# Terms that a moment has even where they are 0.
_ALWAYS_NAMED = ("weights", "gradients", "optimizer", "activations", "loss_head")


@dataclass(frozen=True)
class Step:
    """One training step of one rank, as the estimate assumes it: a full-length batch with every token scored."""

    micro_batch: int
    grad_accum: int
    seq_len: int
    layout: Layout = SINGLE
    checkpointed_layers: int | None = None
    """Blocks, counted from the first, whose activations are recomputed; None: all of them."""
    loss: LossName = "chunked"
    attention: AttentionName = "sdpa"
    padded: bool = False
    """Rows come with a mask of S x S per sequence: they are packed, or padded where `masks` says so."""
    masks: bool = True
    """Whether rows that are padded come with a mask, in training and evaluation (`planner.attention`)."""
    varlen: bool = False
    """Packs, or rows of a micro-batch, lie one behind the other and have boundaries (`training.model.varlen`), not a
    mask."""
    one_by_one: bool = False
    """With `varlen`: no kernel takes the boundaries, and each chat is attended to by a call of its own."""
    eval_batch: int = 0
    """Rows of an evaluation batch, which are not packed; 0: no evaluation."""
    cudnn: bool = False
    """sdpa runs cuDNN's kernel (`planner.attention`): all training batches have one shape, and evaluation's do where
    its rows are blocks of text too."""
    casts_inputs: bool = False
    """LoRA layers cast their inputs to the adapters' dtype under autocast too, as PEFT's do and training's do not."""
    offloads: bool = False
    """What checkpointed blocks need for recomputation is kept in RAM."""
    saves: bool = True
    """Whether checkpoints are written."""
    on_gpu: bool = True
    capability: tuple[int, int] | None = (9, 0)
    """The GPU's compute capability; None where it is unknown, which counts as a current one."""
    fla: bool = False
    """flash-linear-attention is installed, whose kernels the class's gated delta rules run."""
    pages: bool = False
    """The driver pages GPU memory out instead of failing, beside a desktop (WSL)."""

    def recomputed(self, layers: int) -> int:
        """How many of a model's `layers` are computed a second time, in the backward pass."""
        return layers if self.checkpointed_layers is None else self.checkpointed_layers

    @property
    def length(self) -> int:
        """Tokens of a row on this rank: all of them, or its part under context parallelism."""
        return -(-self.seq_len // self.layout.context_parallel)

    @property
    def tokens(self) -> int:
        """T = B * S of this rank."""
        return self.micro_batch * self.length


def cublas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes of a thread's cuBLAS workspace, from the caching allocator: 32 MiB on compute capability 9, 10 and 12, else
    `:4096:2:16:8` in KiB (aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`)."""
    return 32 * MIB if capability and capability[0] in (9, 10, 12) else (4096 * 2 + 16 * 8) * 1024


def is_padded(config: RunConfig, layout: Layout, *, rows: int, masks: bool = True) -> bool:
    """Whether rows of a batch, not packed, are padded to the longest with a mask; full blocks of text never are."""
    return masks and config.task_mode != "cpt" and rows > 1 and layout.context_parallel == 1


class Walk:
    """A step's way through the model. `moments` yields every moment that can be the peak."""

    def __init__(self, config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> None:
        layout = step.layout
        self.config, self.shape, self.step, self.precision = config, shape, step, precision
        self.full, self.nf4 = config.tuning.mode == "full", config.tuning.mode == "qlora"
        loaded = numbers(config, precision, layout)
        self.trained = trained(config, shape, loaded)
        self.part = part_of_trained(config, shape, self.trained, layout.tensor_parallel)
        self.resident = resident(config, shape, loaded, layout)
        self.synced = gradients_of(config, precision, layout.name)
        self.loaded = self.numbers = loaded
        if layout.is_fsdp and loaded.autocast is not None:  # modules see what is gathered, adapters included
            gathered = BYTES[self.synced.gathered]
            self.numbers = Numbers(gathered, loaded.autocast, gathered)
        self.width = self.numbers.weights if layout.is_fsdp else BYTES[precision.load]
        self.recomputed = step.recomputed(shape.num_layers)
        self.adds_up = step.grad_accum > 1
        # set_requires_gradient_sync(False): FSDP2 then keeps whole gradients, and not a shard of each
        waits = layout.is_fsdp and self.synced.every != "micro_batch" and self.adds_up
        self.whole_gradients = self.part.params * BYTES[self.synced.reduced] if waits else 0
        """Bytes of full gradients that every rank keeps between micro-batches though it holds a shard of the weights:
        FSDP2 then reduces them only at the end of the step, in the dtype in which they are sent."""
        self._known_specs: dict[tuple[bool, bool], tuple[BlockSpec, ...]] = {}
        self.specs = self._specs(padded=step.padded, packed=config.data.packing != "none")
        self.gathering = self._gathering() if layout.shards_params else None
        self.blocks, self.widths = self._blocks()
        self.layers = self._layers()

    # --- what the step is made of -------------------------------------------------------------------------------------
    def _specs(self, *, padded: bool, packed: bool = False) -> tuple[BlockSpec, ...]:
        if (padded, packed) in self._known_specs:
            return self._known_specs[padded, packed]
        step, tuning = self.step, self.config.tuning
        lora, experts = tuning.lora, planned_experts(self.config, self.shape, self.precision)
        in_turn = experts is not None and experts.name == "eager" and not self.shape.uses_custom_experts
        alike: dict[str, Any] = {
            "lora_dropout": lora.dropout, "dora": lora.use_dora, "casts_inputs": step.casts_inputs,
            "one_by_one": step.one_by_one, "experts_in_turn": in_turn, "numbers": self.numbers,
            "experts_by_loop": step.on_gpu and (step.capability or GROUPED_SINCE) < GROUPED_SINCE and not in_turn,
            "liger": planned_kernels(self.config, self.shape, step.layout, on_gpu=step.on_gpu).memory,
        }  # fmt: skip
        specs = []
        for kind in self.shape.layers:
            # one by one each chat has a mask for its window
            masked = (not step.varlen or step.one_by_one) and sees_mask(
                kind, self.shape, length=step.seq_len, padded=padded and not step.varlen
            )
            kernel = kernel_of(
                self.shape,
                attention=step.attention,
                masked=masked,
                half=self.numbers.autocast is not None or self.width == 2,
                capability=step.capability,
                on_gpu=step.on_gpu,
                gathers=padded and not packed,
                cudnn=step.cudnn and (packed or self.config.task_mode == "cpt"),
            )
            spec = block_spec(kind, self.shape, mode=tuning.mode, lora=lora)
            spec = replace(spec, kernel=kernel, masked=masked, **alike)
            specs.append(on_tensor_parallel(spec, step.layout.tensor_parallel))
        self._known_specs[padded, packed] = tuple(specs)
        return tuple(specs)

    def _gathering(self) -> Gathering:
        lora = self.config.tuning.lora
        return gathering(
            self.shape,
            width=self.numbers.weights,
            nf4=self.nf4,
            lora=None if self.full else lora,
            parts=self.step.layout.tensor_parallel,
            # with adapters a unit's gradients are about as small a part of it as the adapters are of the model
            trained_share=1.0 if self.full else min(1.0, self.trained.params / max(1, self.shape.params)),
            ranks=self.step.layout.shard,
            wider=BYTES[self.synced.reduced] / BYTES[self.synced.computed],
        )

    def _blocks(self) -> tuple[list[BlockBytes], list[int]]:
        blocks: list[BlockBytes] = []
        copied = self.trained.embedding and not self.full  # modules_to_save: PEFT's copy has the adapters' dtype
        widths = [self.numbers.adapters if copied else self.width]
        for layer, place in enumerate(self.shape.layer_order):
            # the first block's input has a gradient if the embedding trains, or checkpointing asks for one (PEFT)
            block = block_bytes(
                self.specs[place],
                batch=self.step.micro_batch,
                length=self.step.length,
                width=widths[-1],
                input_has_grad=layer > 0 or self.trained.embedding or self._rows("inputs") or self.recomputed > 0,
                accumulating=self._accumulating(),
            )
            blocks.append(block)
            widths.append(block.width)
        return blocks, widths

    def _layers(self) -> list[LayerBytes]:
        batch, offloads = self.step.micro_batch, self.step.offloads
        layers = []
        for layer, block in enumerate(self.blocks):
            own = block.layer
            if layer >= self.recomputed:
                layers.append(replace(own, cast=0) if own.cast else own)
                continue
            # within a checkpoint nothing that operations save is held: torch.utils.checkpoint drops it; the block runs
            # forward again first, and its input stays until its backward pass has ended
            alone = self._forward_alone(layer, batch, self.specs, training=True)
            hidden, peak = self._hidden(batch, layer), max(own.backward + own.input, block.recompute)
            way = replace(own, forward=alone, kept=hidden, backward=peak)
            layers.append(way.offloaded if offloads else way)
        return layers

    def _forward_alone(self, layer: int, batch: int, specs: Sequence[BlockSpec], *, training: bool) -> int:
        spec, width = specs[self.shape.layer_order[layer]], self.widths[layer]
        return forward_peak(spec, batch=batch, length=self.step.length, width=width, training=training)

    def _evaluated(self, layer: int, rows: int, specs: Sequence[BlockSpec]) -> LayerBytes:
        """A block where nothing is held for a backward pass; autocast keeps copies of its fp32 parameters there too."""
        forward = self._forward_alone(layer, rows, specs, training=False)
        return LayerBytes(forward, cast=self.blocks[layer].layer.cast)

    def _rows(self, end: Literal["inputs", "head"]) -> bool:
        return self.trained.rows > 0 and not (self.trained.embedding if end == "inputs" else self.trained.head)

    def _table(self) -> int:
        """Bytes of the copy of a whole table that its rows are put into, of which only some train; else 0."""
        return self.shape.embedding_table_params * self.width if self._rows("inputs") else 0

    def _head(self, batch: int, *, grad: bool) -> LayerBytes:
        copied = self.trained.head and not self.full  # modules_to_save: PEFT's copy has the adapters' dtype
        return head_bytes(
            self.specs[self.shape.layer_order[-1]],
            Vocabulary(
                self.shape.vocab_size,
                self.trained.head,
                self.numbers.adapters if copied else self.width,
                self._rows("head"),
                self.shape.caps_logits,
            ),
            batch=batch,
            length=self.step.length,
            width=self.widths[-1],
            loss=self.step.loss,
            accumulating=self._accumulating(),
            grad=grad,
            on_gpu=self.step.on_gpu,
        )

    def _accumulating(self) -> bool:
        """Whether a gradient is added to an older one of full size; a rank that keeps shards divides each new one."""
        whole = not self.step.layout.shards_grads or self.whole_gradients > 0
        return whole and self.adds_up

    def _kept_of(self, gradients: int) -> int:
        if not self.step.layout.shards_grads:
            return gradients
        whole = self.part.params * (self.numbers.weights if self.full else self.numbers.adapters)
        return self.resident.gradients * gradients // max(1, whole)

    def _batch(self, batch: int, specs: Sequence[BlockSpec], *, trains: bool) -> int:
        """Token ids, labels and mask of a batch, and the masks that all blocks share."""
        return TOKEN_BYTES * batch * self.step.length + self._masks(batch, specs)

    def _masks(self, batch: int, specs: Sequence[BlockSpec]) -> int:
        """The S x S masks that all blocks share: one for each kind of attention, booleans for sdpa, numbers for eager.
        They end with the forward pass of the blocks, before the head."""
        step, squares = self.step, batch * self.step.length**2
        if step.attention == "flash_attention_2":  # it takes the mask of B x S as it is
            return 0
        pairs = zip(self.shape.layers, specs, strict=True)
        shared = (kind for kind, spec in pairs if step.attention == "eager" or (spec.masked and not spec.one_by_one))
        kinds = {kind.attention for kind in shared}
        return len(kinds) * squares * (self.width if step.attention == "eager" else 1)

    # --- moments -----------------------------------------------------------------------------------------------------
    def _at(self, name: Moment, gradients: int, activations: int, **more: int) -> tuple[Moment, Terms]:
        terms = self._lasting | {"gradients": gradients, "activations": activations} | more
        return name, {term: size for term, size in terms.items() if size or term in _ALWAYS_NAMED}

    @cached_property
    def _lasting(self) -> Terms:
        parts = self.resident
        workspaces = WORKSPACE_THREADS * cublas_workspace(self.step.capability) if self.step.on_gpu else 0
        return {
            "weights": parts.weights, "adapters": parts.adapters, "master_weights": parts.master, "gradients": 0,
            "optimizer": parts.optimizer, "gradient_buckets": self._buckets(), "workspaces": workspaces,
            "activations": 0, "loss_head": 0,
        }  # fmt: skip

    def _buckets(self) -> int:
        layout = self.step.layout
        if layout.is_zero:
            packed = self.shape.packable_params if self.nf4 else 0
            return zero_buckets(
                layout, self.trained.params, self.shape.params, self.shape.hidden_size, packed=packed,
                wider=BYTES[self.synced.reduced] > BYTES[self.synced.computed],
            )  # fmt: skip
        return self.resident.buckets

    def offloaded(self) -> int:
        """Bytes of RAM that checkpointed blocks' inputs take (`save_on_cpu`, page-locked)."""
        layers = range(self.recomputed) if self.step.offloads else ()
        return sum(self._checkpoint(layer) for layer in layers)

    def _checkpoint(self, layer: int) -> int:
        return self._hidden(self.step.micro_batch, layer)

    def moments(self) -> Iterator[tuple[Moment, Terms]]:
        """Every moment that can be the peak, with its terms: of each part of the step the highest, then the others."""
        yield from self.training.items()
        if self.step.eval_batch:
            yield from self.evaluation(self.step.eval_batch)
        if self.step.saves:
            # a sharded tensor is gathered one at a time, and copied once more on its way to the host
            # the token embedding is the largest: fp32 where it trains under FSDP2
            gathered = 2 * self.shape.embedding_table_params * (4 if self.full else self.numbers.weights) if self.gathering else 0
            yield self._at("saving", self._between(), 0, gather_buffers=gathered)

    @cached_property
    def training(self) -> Mapping[Moment, Terms]:
        """The step itself: of each moment's visits the one with the most bytes."""
        held = [self._batch(self.step.micro_batch, self.specs, trains=True)]
        passing = optimizer_transient(self.config.train.optim, self.shape, self.part)
        if self.step.layout.shards_states:
            passing //= self.step.layout.shard
        update = self._at("optimizer", self.resident.gradients, 0, optimizer_step=passing)
        # in this order: the forward pass fills `held`, which the backward pass reads
        return largest(itertools.chain(self._forward(held), self._backward(held), [update]))

    def _hidden(self, batch: int, layer: int) -> int:
        return batch * self.step.length * self.shape.hidden_size * self.widths[layer]

    def _embedded(self, batch: int) -> int:
        return self._hidden(batch, 0)

    def _between(self) -> int:
        """Gradients between steps: ZeRO-3 keeps their buffer (bytes counted on real ranks), all others free them."""
        layout = self.step.layout
        return self.resident.gradients if layout.is_zero and layout.shards_params else 0

    def _older_gradients(self) -> int:
        return max(self.resident.gradients, self.whole_gradients) if self.adds_up else 0

    def _forward(self, held: list[int]) -> Iterator[tuple[Moment, Terms]]:
        """Through the blocks to the loss; `held` collects what is held before each block, and at the head: inputs of
        checkpointed blocks, autocast's copies of fp32 adapters, the embedding's output until the model's forward
        returns."""
        gathering, batch = self.gathering, self.step.micro_batch
        older, cast = self._older_gradients(), 0
        if self._table():
            yield self._at("forward", older, held[-1] + self._table() + self._hidden(batch, 0))
        for layer, block in enumerate(self.layers):
            cast += block.cast
            # where blocks are checkpointed, the first one's checkpoint is the same tensor
            embedded = self._embedded(batch) if layer and not self.recomputed else 0
            live = held[-1] + cast + embedded + block.forward
            yield self._at("forward", older, live, gather_buffers=gathering.forward(layer) if gathering else 0)
            held.append(held[-1] + block.kept)
        size = self._hidden(batch, -1)
        if gathering:
            yield self._at("forward", older, held[-1] + cast + 2 * size, gather_buffers=gathering.before_tail)
        head = self._head(self.step.micro_batch, grad=True)
        gathered = gathering.tail if gathering else 0
        beyond = max(0, head.forward - size)  # of the head's own peak; its input is counted beside it
        yield self._at("head", older, held[-1] + cast + size, loss_head=beyond, gather_buffers=gathered)

    def _backward(self, held: list[int]) -> Iterator[tuple[Moment, Terms]]:
        gathering = self.gathering
        head = self._head(self.step.micro_batch, grad=True)
        gathered = gathering.head if gathering else 0
        yield self._at("head", self._older_gradients(), held[-1], loss_head=head.backward, gather_buffers=gathered)
        # tied: one gradient with the embedding's, which it waits for: it is one sharded unit, or not yet added up
        new = 0 if self.adds_up else self._kept_of(head.gradients)
        if self.shape.tied and gathering:
            new = head.gradients
        elif self.shape.tied and self.full and self.adds_up:
            new = self.shape.embedding_table_params * self.numbers.weights
        done = self._older_gradients() + new
        for layer, block in reversed(list(enumerate(self.layers))):
            yield self._at(
                "backward",
                done,
                held[layer] + block.backward - block.rebuilt,
                dequantised=block.rebuilt,
                gather_buffers=gathering.backward(layer) if gathering else 0,
            )
            if gathering:
                yield self._at("backward", done, held[layer] + block.input, gather_buffers=gathering.reduction(layer))
            done += 0 if self.adds_up else self._kept_of(block.gradients)
        yield from self._end(held[0] + self._hidden(self.step.micro_batch, 0))

    def _end(self, live: int) -> Iterator[tuple[Moment, Terms]]:
        """The embedding's gradient is dense (V*h); where it is also the head's, or an older one exists, or it is
        sharded only then, it is live in addition."""
        width = self.numbers.weights if self.full else self.numbers.adapters
        dense = self.shape.embedding_table_params * width if self.trained.embedding else self._table()
        done = max(self.resident.gradients, self.whole_gradients)
        if self.gathering:
            before = done - (0 if self.adds_up else self._kept_of(dense))
            for gathered in self.gathering.end(dense):
                yield self._at("backward", before, live, gather_buffers=gathered)
            return
        # `done` counts the embedding's gradient once, or its shard: `dense` is beside it, and so is the head's that
        # waits for it to be added to an older one; copies of tied modules (PEFT's modules_to_save) are not tied
        tied = self.shape.tied and self.full
        beside = self._table() or tied or self._accumulating() or self.step.layout.shards_grads
        twice = tied and self.adds_up
        yield self._at("backward", done, live + dense * ((2 if twice else 1) if beside else 0))

    def evaluation(self, rows: int) -> Iterator[tuple[Moment, Terms]]:
        """A batch of the evaluation: the last block of each kind, then the head. Nothing is held for a backward pass
        but the embedding's output and autocast's copies; rows are not packed, so their mask is not the training's."""
        specs = self._specs(padded=is_padded(self.config, self.step.layout, rows=rows, masks=self.step.masks))
        batch, gathering, there = self._batch(rows, specs, trains=False), self.gathering, self._between()
        # blocks of one kind need the same, and the last of them comes with the most casts held
        last, cast = {place: layer for layer, place in enumerate(self.shape.layer_order)}, 0
        for layer, place in enumerate(self.shape.layer_order):
            block = self._evaluated(layer, rows, specs)
            if last[place] == layer:
                embedded = self._hidden(rows, 0) if layer else 0
                live = batch + cast + embedded + block.forward
                yield self._at("evaluation", there, live, gather_buffers=gathering.forward(layer) if gathering else 0)
            cast += block.cast
        head = self._head(rows, grad=False)
        live = batch + cast + self._hidden(rows, 0) + 2 * self._hidden(rows, -1)
        before = gathering.before_tail if gathering else 0
        yield self._at("evaluation", there, live, gather_buffers=before)
        gathered = gathering.tail if gathering else 0
        batch -= self._masks(rows, specs)
        yield self._at("evaluation", there, batch + cast, loss_head=head.forward, gather_buffers=gathered)


def largest(moments: Iterable[tuple[Moment, Terms]]) -> Mapping[Moment, Terms]:
    """Of each moment's visits the one with the most bytes."""
    best: dict[Moment, tuple[int, Terms]] = {}
    for name, terms in moments:
        size = sum(terms.values())
        if name not in best or size > best[name][0]:
            best[name] = (size, terms)
    return {name: terms for name, (_, terms) in best.items()}
