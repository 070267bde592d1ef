"""Bytes of a training step's peak, term by term: the closed form of one rank.

A step is a row of moments (forward, head, backward, optimizer, evaluation, saving); each has its live bytes, and the
largest is the peak. What stays between steps comes from plan.states; what a block, the head and the loss hold and
touch from plan.block and plan.head, which follow the libraries' own forward on sizes; the walk over the blocks is
here. Symbols: B sequences per pass, S tokens per sequence, T = B*S, N scored tokens, h hidden width, f MLP width, q
and kv widths of all query and key heads, L blocks, V vocabulary, W ranks, e bytes of an activation, w of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.architecture import ModelShape
from sft_play.plan.block import BlockBytes, BlockSpec, Numbers, block_bytes, forward_peak
from sft_play.plan.head import WORD_TILE, HeadBytes, Vocabulary, head_bytes
from sft_play.plan.layout import SINGLE, Layout
from sft_play.plan.margins import ALLOCATOR_SLACK, GIB, MARGIN_BYTES, margin_of
from sft_play.plan.precision import BYTES, Precision
from sft_play.plan.states import (
    adapter_params,
    nf4_bytes,
    optimizer_transient,
    paged_bytes,
    resident,
    trained,
)
from sft_play.plan.structure import block_spec, kernel_of, numbers, on_tensor_parallel, sees_mask

__all__ = ["GIB", "MemoryEstimate", "Step", "adapter_params", "estimate", "nf4_bytes"]

Moment = Literal["forward", "head", "backward", "optimizer", "evaluation", "saving"]

MIB = 2**20
CUBLAS_WORKSPACE_BYTES = {9: 32 * MIB, 10: 32 * MIB, 12: 32 * MIB}
"""One thread's cuBLAS workspace by the major compute capability (CublasHandlePool.cpp)."""
OLDER_CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""The same on other GPUs: the setting :4096:2:16:8."""
WORKSPACE_THREADS = 2
"""Threads that multiply: the forward's and the autograd engine's."""
CUDA_CONTEXT_BYTES = GIB // 2
"""CUDA context and kernels, outside the allocator: 141 MiB seen on a T4, 0.4 to 0.6 GiB said of H100s."""
NCCL_BYTES = 688 * MIB
"""NCCL's buffers per communicator, the upper end of what was reported (544 to 688 MiB)."""
ID_BYTES = 8
"""A token's number, label or mask entry in a batch."""
SAVE_SHARD_BYTES = 50 * 10**9
"""Largest file that transformers writes at once (`max_shard_size`), held whole in the host's memory."""

CPU_ACTIVATION_SLACK = 2.0
"""What a CPU process keeps of freed activations, times their size. With it and CPU_LATE_BYTES the prediction was 0.9
to 2.3 times the resident memory of six runs of a 2M model (benchmarks/predicted_peak_cpu.json, 2026-11-21)."""
CPU_LATE_BYTES = GIB // 4
"""Libraries and threads that a CPU run brings in after the imports, from the same runs."""


@dataclass(frozen=True)
class Step:
    """One training step of one rank: what the estimate assumes. The batch is full-length and every token scored."""

    micro_batch: int
    grad_accum: int
    seq_len: int
    layout: Layout = SINGLE
    checkpointed_layers: int | None = None
    """Blocks whose activations are computed again; None: all of them."""
    loss: Literal["chunked", "logits"] = "chunked"
    """TRL's chunked head, or whole logits."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    padded: bool = False
    """Rows are padded, so that attention is given a mask of S x S a sequence."""
    eval_batch: int = 0
    """Rows of an evaluation batch; 0: no evaluation."""
    saves: bool = True
    on_gpu: bool = True
    capability: tuple[int, int] | None = (9, 0)

    @property
    def tokens(self) -> int:
        """T = B * S."""
        return self.micro_batch * self.seq_len


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted peak of one rank in bytes: `terms` add up to `allocated`; `required` is what must be free."""

    terms: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    margin: int = 0
    outside_allocator: int = 0
    moment: str = ""
    """The moment of the step that is the peak."""
    moments: dict[str, int] = field(default_factory=dict)
    """Allocated bytes at each moment."""
    host_bytes: int = 0
    """RAM that this rank needs for offloaded states and for writing checkpoints."""
    margin_reason: str = ""

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold at the peak."""
        return sum(self.terms.values())

    @property
    def required(self) -> int:
        """Bytes that must be free on the device before the run starts."""
        return self.reserved + self.margin + self.outside_allocator


def estimate(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> MemoryEstimate:
    """The predicted peak of a step: the largest of its moments, and what must be free for it."""
    walk = _Walk(config, shape, precision, step)
    found: dict[str, dict[str, int]] = {}
    for name, terms in walk.moments():
        if name not in found or sum(terms.values()) > sum(found[name].values()):
            found[name] = terms
    sums = {name: sum(terms.values()) for name, terms in found.items()}
    peak = max(sums, key=lambda name: sums[name])
    return _with_margin(config, shape, step, walk, peak, found[peak], sums)


def _with_margin(
    config: RunConfig,
    shape: ModelShape,
    step: Step,
    walk: _Walk,
    peak: str,
    terms: dict[str, int],
    sums: dict[str, int],
) -> MemoryEstimate:
    mode, layout = config.tuning.mode, step.layout
    reserved = int(sums[peak] * ALLOCATOR_SLACK[mode]) if step.on_gpu else _resident_on_cpu(terms)
    margin = margin_of(
        mode=mode,
        padded=step.padded,
        attention=step.attention,
        optim=config.train.optim,
        layout=layout,
        experts=shape.num_experts > 0,
    )
    outside = paged_bytes(config.train.optim, walk.trained)
    if step.on_gpu:
        outside += CUDA_CONTEXT_BYTES + (NCCL_BYTES * _communicators(layout) if layout.ranks > 1 else 0)
    return MemoryEstimate(
        terms=terms,
        reserved=reserved,
        margin=int(reserved * margin.share) + MARGIN_BYTES,
        outside_allocator=outside,
        moment=peak,
        moments=sums,
        host_bytes=walk.host_bytes(),
        margin_reason=f"{margin.share:.0%} + {MARGIN_BYTES / GIB:.1f} GiB: {margin.reason}",
    )


def _communicators(layout: Layout) -> int:
    return 2 if layout.name in ("fsdp_hybrid", "fsdp_tp") else 1


def _resident_on_cpu(terms: dict[str, int]) -> int:
    """Resident memory of a CPU process above the level after its imports: tensors, and what malloc does not return."""
    passing = terms["activations"] + terms["loss_head"]
    return sum(terms.values()) + int(CPU_ACTIVATION_SLACK * passing) + CPU_LATE_BYTES


class _Walk:
    """The moments of one step, from the first block to the last and back."""

    def __init__(self, config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> None:
        self.config, self.shape, self.step = config, shape, step
        self.full = config.tuning.mode == "full"
        self.widths = _widths(config, precision, step.layout)
        self.trained = trained(config, shape, self.widths)
        self.resident = resident(config, shape, self.widths, step.layout)
        self.width = BYTES[precision.load]
        self.accumulating = step.grad_accum > 1 or step.layout.name == "ddp"
        self.checkpointed = shape.num_layers if step.checkpointed_layers is None else step.checkpointed_layers
        self.specs = [self._spec(place, step.seq_len) for place in range(len(shape.layers))]

    def _spec(self, place: int, length: int) -> BlockSpec:
        kind, step, tuning = self.shape.layers[place], self.step, self.config.tuning
        masked = sees_mask(kind, self.shape, length=length, padded=step.padded)
        spec = block_spec(
            kind,
            self.shape,
            widths=self.widths,
            mode=tuning.mode,
            rank=tuning.lora.r,
            targets=tuning.lora.target_modules,
            lora_dropout=tuning.lora.dropout,
            dora=tuning.lora.use_dora,
            kernel=kernel_of(
                kind,
                self.shape,
                attention=step.attention,
                masked=masked,
                half=self.widths.autocast is not None or self.width == 2,
                capability=step.capability if step.on_gpu else None,
            ),
            masked=masked,
        )
        return on_tensor_parallel(spec, step.layout.tensor_parallel)

    # --- parts -------------------------------------------------------------------------------------------------------
    def _fixed(self, *, gradients: int) -> dict[str, int]:
        """What lives at every moment, with this much of gradients."""
        parts = self.resident
        terms = {"weights": parts.weights}
        if not self.full:
            terms["adapters"] = parts.adapters
        if parts.master:
            terms["master_weights"] = parts.master
        terms |= {"gradients": gradients, "optimizer": parts.optimizer}
        if parts.buckets:
            terms["gradient_buckets"] = parts.buckets
        if self.step.on_gpu:
            terms["workspaces"] = WORKSPACE_THREADS * _workspace(self.step.capability)
        return terms

    def _batch(self, batch: int) -> int:
        """Token numbers, labels and mask of a batch, and the masks of S x S that all blocks share."""
        tokens, length = batch * self.step.seq_len, self.step.seq_len
        own = 3 * ID_BYTES * tokens
        kinds = {kind.attention for kind, spec in zip(self.shape.layers, self.specs, strict=True) if spec.masked}
        if self.step.attention == "eager":
            kinds = {kind.attention for kind in self.shape.layers}
            return own + len(kinds) * batch * length * length * self.width
        if self.step.attention == "flash_attention_2":
            return own
        return own + len(kinds) * batch * length * length

    def _block(self, layer: int) -> BlockBytes:
        first = layer == 0 and not self._input_has_grad()
        return block_bytes(
            self.specs[self.shape.layer_order[layer]],
            batch=self.step.micro_batch,
            length=self.step.seq_len,
            width=self.width,
            input_has_grad=not first,
            accumulating=self.accumulating,
        )

    def _without_holding(self, layer: int) -> int:
        spec = self.specs[self.shape.layer_order[layer]]
        return forward_peak(
            spec, batch=self.step.micro_batch, length=self.step.seq_len, width=self.width, training=True
        )

    def _input_has_grad(self) -> bool:
        return self.trained.embedding or self.checkpointed > 0

    def _head(self, batch: int, *, grad: bool) -> HeadBytes:
        return head_bytes(
            self.specs[self.shape.layer_order[-1]],
            self._vocabulary(),
            batch=batch,
            length=self.step.seq_len,
            width=self.width,
            loss=self.step.loss,
            accumulating=self.accumulating,
            grad=grad,
        )

    def _vocabulary(self) -> Vocabulary:
        words = self.shape.vocab_size
        tile = WORD_TILE if self.step.on_gpu else min(WORD_TILE, words)  # a CPU process has the pages it touches
        width = self.trained.width if self.trained.head else self.width
        return Vocabulary(words, self.trained.head, width, tile)

    # --- moments -----------------------------------------------------------------------------------------------------
    def moments(self) -> Iterator[tuple[Moment, dict[str, int]]]:
        """Every moment that can be the peak, with its terms."""
        yield from self._training()
        whole = self.resident.gradients
        transient = optimizer_transient(self.config.train.optim, self.shape, self.trained, full=self.full)
        yield (
            "optimizer",
            self._fixed(gradients=whole) | {"activations": 0, "loss_head": 0, "optimizer_step": transient},
        )
        if self.step.eval_batch:
            yield from self._evaluation()

    def _training(self) -> Iterator[tuple[Moment, dict[str, int]]]:
        step, order = self.step, self.shape.layer_order
        there = self.resident.gradients if self.accumulating else 0
        batch = self._batch(step.micro_batch)
        size = step.tokens * self.shape.hidden_size * self.width
        held, cast = [batch], 0
        for layer in range(len(order)):
            block = self._block(layer)
            checkpointed = layer < self.checkpointed
            cast += block.cast_weights if checkpointed else 0
            peak = self._without_holding(layer) if checkpointed else block.forward
            embedded = size if layer and not self.checkpointed else 0
            yield (
                "forward",
                self._fixed(gradients=there) | {"activations": held[-1] + cast + embedded + peak, "loss_head": 0},
            )
            held.append(held[-1] + (size if checkpointed else block.kept))
        head = self._head(step.micro_batch, grad=True)
        at_head = self._fixed(gradients=there)
        yield "head", at_head | {"activations": held[-1] + cast + size, "loss_head": max(0, head.forward - size)}
        yield "head", at_head | {"activations": held[-1], "loss_head": head.backward}
        done = there + head.gradients
        for layer in range(len(order) - 1, -1, -1):
            block = self._block(layer)
            peak = (
                max(block.backward + self._input_held(block, size), block.recompute)
                if layer < self.checkpointed
                else block.backward
            )
            yield (
                "backward",
                self._fixed(gradients=done)
                | {
                    "activations": held[layer] + peak - block.rebuilt,
                    "loss_head": 0,
                    "dequantised": block.rebuilt,
                },
            )
            done += block.gradients
        table = self.shape.vocab_size * (self.shape.embedding_width or self.shape.hidden_size) * self.trained.width
        extra = table if self.trained.embedding and (self.shape.tied or self.accumulating) else 0
        yield (
            "backward",
            self._fixed(gradients=self.resident.gradients) | {"activations": batch + size + extra, "loss_head": 0},
        )

    def _input_held(self, block: BlockBytes, size: int) -> int:
        """A checkpoint holds the block's input while its backward runs."""
        return size

    def _evaluation(self) -> Iterator[tuple[Moment, dict[str, int]]]:
        step = self.step
        batch = self._batch(step.eval_batch)
        fixed = self._fixed(gradients=0)
        for spec in set(self.specs):
            peak = forward_peak(spec, batch=step.eval_batch, length=step.seq_len, width=self.width, training=False)
            yield "evaluation", fixed | {"activations": batch + peak, "loss_head": 0}
        head = self._head(step.eval_batch, grad=False)
        yield "evaluation", fixed | {"activations": batch, "loss_head": head.forward}

    def host_bytes(self) -> int:
        """RAM for offloaded states, and for writing: a checkpoint's largest file is held whole before it is written."""
        params = self.trained.params * (4 if self.step.layout.is_fsdp else self.trained.width)
        return self.resident.host + (min(params, SAVE_SHARD_BYTES) if self.step.saves else 0)


def _widths(config: RunConfig, precision: Precision, layout: Layout) -> Numbers:
    found = numbers(config, precision)
    if layout.is_zero and layout.shards_params and config.tuning.mode == "lora":
        return Numbers(found.weights, found.autocast, found.weights)  # TRL leaves the adapters in the base's dtype
    return found


def _workspace(capability: tuple[int, int] | None) -> int:
    return CUBLAS_WORKSPACE_BYTES.get((capability or (0, 0))[0], OLDER_CUBLAS_WORKSPACE_BYTES)
