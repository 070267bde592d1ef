"""One decoder block as transformers, PEFT and bitsandbytes run it, and the tail of the step (last norm, output head,
loss), on sizes: what each keeps, and its peaks.

The parts follow the forward of transformers' decoder blocks (models/*/modeling_*.py), of PEFT's LoRA layers
(peft/tuners/lora/{layer,bnb,dora,variants}.py) and of bitsandbytes' 4-bit product, line by line where lines differ in
bytes: `self_attention`, `mlp` and `linear`, of the `operations` that a `tape` records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from sft_play.planner.memory.linear import norm
from sft_play.planner.memory.mlp import mlp
from sft_play.planner.memory.operations import ForwardPass
from sft_play.planner.memory.self_attention import attention
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.memory.tape import Grads, Node, Tape, TensorRef, shared_gradient, single_gradient

# What computes the loss: TRL's chunked head; this toolkit over whole logits, for classes whose logits TRL's head does
# not compute; the class's own loss, as other scripts take it (benchmarks).
LossName = Literal["chunked", "logits", "model"]
# Of trl/kernels/chunked_logprob.py at TRL 1.16.0, whose lines are given.
TOKEN_TILE = 4_096
# Tokens and words whose logits TRL's chunked head holds at once (line 32; trainer/utils.py:1507). The tile is a full
# one however small the vocabulary is (line 313).
VOCAB_TILE = 32_768
# fp32 numbers per token into which it reduces tiles (lines 306 to 312).
STATISTICS_PER_TOKEN = 7
# Bytes per element of a tile beside it where no Triton kernel reads it (line 66): the logits in fp32, which words come
# before the label (a byte), and at most two more of fp32, such as `e` and `e * z` (`_forward_tile`, lines 231 to 247).
CPU_FORWARD_BYTES = 13
# The same backward: `y`, `z`, `log_p`, `p`, `grad`, `is_target` (a byte) and two more of fp32 (`_backward_tile`, lines
# 259 to 281); `t` where logits are capped.
CPU_BACKWARD_BYTES, CPU_CAP_BYTES = 29, 4


@dataclass(frozen=True)
class LayerBytes:
    """One block, or the tail, in a step, above what is held before it. The peaks include its input and, in the backward
    pass, its output's gradient."""

    forward: int
    saved: int = 0
    """Held from its forward to its backward pass; without its own input, unless an operation holds it."""
    backward: int = 0
    gradients: int = 0
    """Gradients of its parameters that stay, where there were none before; `backward` includes them."""
    cast: int = 0
    """Half-precision copies of fp32 parameters that autocast keeps until the forward pass ends, where the block is
    computed again."""
    rebuilt: int = 0
    """Of the backward peak: the NF4 weight that is dequantised at that moment."""
    input: int = 0
    """Its input, where only a checkpoint keeps it."""

    @property
    def offloaded(self) -> LayerBytes:
        """The same where what it keeps is in RAM, and comes back for its backward pass."""
        return replace(self, saved=0, backward=self.backward + self.saved)


@dataclass(frozen=True)
class BlockBytes:
    """A block's bytes for one batch, with its copies of fp32 parameters however it is computed."""

    layer: LayerBytes
    output_itemsize: int
    """Bytes of an element of its output."""
    recompute_peak: int = 0
    """The peak of recomputing the forward: it starts when the backward pass first needs what was held, and ends at the
    last tensor that is held."""


def _run_block(block: ForwardPass, x: TensorRef) -> TensorRef:
    spec = block.spec
    for sublayer in (attention, mlp):
        residual = x
        x = sublayer(block, norm(block, x))
        if spec.has_post_norms:
            x = norm(block, x)
        x = block.add(residual, x)
    return x


@lru_cache(maxsize=8192)
def block_bytes(
    spec: BlockSpec,
    *,
    batch: int,
    length: int,
    itemsize: int,
    input_has_grad: bool = True,
    is_accumulating: bool = False,
) -> BlockBytes:
    """What one block takes for `batch` sequences of `length` tokens; its input's elements have `width` bytes."""
    tape = Tape()
    block = ForwardPass(tape, spec, batch, length, is_accumulating=is_accumulating)
    size = batch * length * spec.hidden
    x = tape.leaf(size, itemsize) if input_has_grad else tape.new(size, itemsize)
    out = _run_block(block, x)
    forward_bytes, recompute_end = tape.meter.peak, tape.peak_at_last_save
    node, grad_size = out.node, (out.elements, out.itemsize)
    storage = x.storage
    # from here only nodes hold anything, as when the model's own forward has returned
    del x, out
    # an operation may hold the input; if none does, only a checkpoint keeps it
    unheld_input = 0 if storage.handles else size * itemsize
    cast_bytes = sum(ref.nbytes for ref in block.cast_weights.values())
    block.cast_weights.clear()
    if node is None:  # nothing trains up to this block
        return BlockBytes(LayerBytes(forward_bytes, cast=cast_bytes), grad_size[1])
    kept_bytes = tape.meter.live  # with the input, if an operation holds it
    backward_bytes = _backward_peak(tape, node, grad_size)
    # gradients that are there when the forward runs again, and its peak until the last tensor is held
    recompute_peak = recompute_end + tape.live_at_first_use - kept_bytes
    gradient_bytes = sum(ref.nbytes for ref in block.gradients)
    layer = LayerBytes(
        forward_bytes, kept_bytes, backward_bytes, gradient_bytes, cast_bytes, tape.meter.dequantised, unheld_input
    )
    return BlockBytes(layer, grad_size[1], recompute_peak)


def _backward_peak(tape: Tape, node: Node, size: tuple[int, int]) -> int:
    grad = tape.new(*size)
    tape.meter.reset_peak()
    tape.backward(node, grad)
    return tape.meter.peak


@lru_cache(maxsize=8192)
def forward_peak(spec: BlockSpec, *, batch: int, length: int, itemsize: int, training: bool) -> int:
    """The block's peak where nothing is held, including its input: in evaluation, or before a checkpoint."""
    tape = Tape(grad_enabled=False)
    block = ForwardPass(tape, spec, batch, length, is_accumulating=False, training=training)
    x = tape.new(batch * length * spec.hidden, itemsize)
    _run_block(block, x)
    return tape.meter.peak


# --- the tail ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OutputHead:
    """The output head: words, whether its weight trains, bytes of its weight, whether only rows of it train, in a copy
    of the table that autograd holds and whose gradient is gone at once, and whether its logits are capped."""

    vocab_size: int
    trainable: bool
    weight_itemsize: int
    trains_rows: bool = False
    caps_logits: bool = False


def head_bytes(
    spec: BlockSpec,
    head: OutputHead,
    *,
    batch: int,
    length: int,
    itemsize: int,
    loss: LossName,
    is_accumulating: bool,
    needs_gradient: bool = True,
    on_gpu: bool = True,
) -> LayerBytes:
    """Bytes of the tail for `batch` full rows of `length` tokens, all scored but the first token."""
    tape = Tape(grad_enabled=needs_gradient)
    tail = ForwardPass(tape, spec, batch, length, is_accumulating=is_accumulating)
    # the model's own forward keeps no other name for it
    x = norm(tail, tape.leaf(batch * length * spec.hidden, itemsize))
    out = _chunked_loss(tail, x, head, on_gpu=on_gpu) if loss == "chunked" else LOSS_FUNCTIONS[loss](tail, x, head)
    forward_bytes = tape.meter.peak
    del x
    node = out.node
    if not needs_gradient or node is None:
        return LayerBytes(forward_bytes)
    elements = out.elements
    del out
    kept_bytes = tape.meter.live
    backward_bytes = _backward_peak(tape, node, (elements, 4))  # the loss is fp32, whatever the logits are
    return LayerBytes(forward_bytes, kept_bytes, backward_bytes, sum(ref.nbytes for ref in tail.gradients))


def _chunked_loss(tail: ForwardPass, x: TensorRef, head: OutputHead, *, on_gpu: bool) -> TensorRef:
    """TRL's chunked head on the N scored tokens: a tile of logits and seven numbers per token. Forward: the rows N*h*e,
    28N, the tile. Backward: fp32 gradients of the rows (4*N*h) and, where the head trains, of the whole weight (4*V*h),
    each cast at the end (N*h*e, V*h*w) unless that is fp32. Rows and weights of another width are cast by tile. Where
    there is no Triton, as on a CPU, torch's operators read each tile, and hold several more of its size."""
    tape, hidden = tail.tape, tail.spec.hidden
    scored_tokens = max(1, tail.batch * (tail.length - 1))
    compute_itemsize = tail.spec.element_bytes.autocast or x.itemsize
    makes_weight_gradient = head.trainable or head.trains_rows
    saved_table = (tape.new(head.vocab_size * hidden, head.weight_itemsize),) if head.trains_rows else ()
    tokens, vocab_columns = min(scored_tokens, TOKEN_TILE), min(VOCAB_TILE, head.vocab_size)
    # of a tile that is wider than the vocabulary a CPU process has the pages that it touches
    tile_bytes = tokens * (VOCAB_TILE if on_gpu else vocab_columns) * compute_itemsize
    # beside a tile, which its gradient overwrites in the backward pass: its rows and weights in the tile's dtype
    cast_bytes = vocab_columns * hidden * compute_itemsize if head.weight_itemsize != compute_itemsize else 0
    forward_bytes = backward_bytes = cast_bytes
    if not on_gpu:
        forward_bytes = max(cast_bytes, CPU_FORWARD_BYTES * tokens * vocab_columns)
        # gradients in fp32 are products of fp32 copies (`_addmm_fp32`, lines 78 and 79)
        larger_side = max(vocab_columns, tokens) if makes_weight_gradient else vocab_columns
        copied_elements = tokens * vocab_columns + hidden * larger_side if compute_itemsize != 4 else 0
        backward_bytes += max(
            (CPU_BACKWARD_BYTES + CPU_CAP_BYTES * head.caps_logits) * tokens * vocab_columns, 4 * copied_elements
        )
    if cast_bytes:  # in the backward pass the next tile's weights are cast while this one's are still held (line 423)
        next_columns = min(head.vocab_size - vocab_columns, VOCAB_TILE) or vocab_columns * (scored_tokens > TOKEN_TILE)
        backward_bytes = max(backward_bytes, cast_bytes + next_columns * hidden * compute_itemsize)
    tile_bytes += tokens * hidden * compute_itemsize if x.itemsize != compute_itemsize else 0
    e = x.itemsize
    # a GPU indexes out the rows that are scored, so padding and prompts cost no logits; a CPU scores all tokens, of
    # several rows in a copy (trainer/utils.py:1642 to 1645)
    index_backward = single_gradient(x.elements, e, transient=x.nbytes if on_gpu else 0)
    scored_rows = (
        tape.op((x,), scored_tokens * hidden, e, backward=index_backward)
        if on_gpu or tail.batch > 1
        else tape.view(x, scored_tokens * hidden)
    )

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        rows_gradient = tape.new(scored_tokens * hidden, 4)
        weight_gradient = tape.new(head.vocab_size * hidden, 4) if makes_weight_gradient else None
        tape.meter.add_transient(tile_bytes + backward_bytes)
        buffer = tape.new(tile_bytes, 1)
        out = tape.new(scored_tokens * hidden, e)
        if weight_gradient is not None:
            gradient = (
                weight_gradient
                if head.weight_itemsize == 4
                else tape.new(head.vocab_size * hidden, head.weight_itemsize)
            )
            if head.trainable:
                tail.keep_gradient(gradient)
            del gradient
        del rows_gradient, weight_gradient, buffer
        return (out,)

    tape.meter.add_transient(4 * STATISTICS_PER_TOKEN * scored_tokens + tile_bytes + forward_bytes)
    statistics = tape.new(3 * scored_tokens, 4)
    return tape.op(
        (scored_rows,),
        scored_tokens,
        4,
        saved=(scored_rows, statistics, *saved_table),
        backward=backward,
        trains_weight=makes_weight_gradient,
    )


def _logits_loss(tail: ForwardPass, x: TensorRef, head: OutputHead) -> TensorRef:
    """Whole logits as `training.model.fused_head.whole_head` reads them: log-probabilities in fp32 of all but the last
    token, then the entropy, row by row. Backward 12*T*V, then T*V*e."""
    tape, logits_elements = tail.tape, tail.batch * tail.length * head.vocab_size
    scored_tokens = max(1, tail.batch * (tail.length - 1))
    scored_elements = scored_tokens * head.vocab_size
    logits = tail.dense(x, "head", tail.spec.hidden, head.vocab_size, head.weight_itemsize, trainable=head.trainable)
    if logits.itemsize != 4 or tail.batch > 1:  # an fp32 copy; of a part of fp32 logits, log_softmax makes one itself
        tape.meter.add_transient(2 * 4 * scored_elements)
    # the zeros of `gather` and the gradient of log_softmax are gone where that of the logits has its width
    backward = single_gradient(
        logits_elements, logits.itemsize, transient=2 * 4 * scored_elements - logits_elements * logits.itemsize
    )
    log_probabilities = tape.op((logits,), scored_elements, 4, backward=backward, holds_output=True)
    tape.meter.add_transient(2 * 4 * scored_elements // tail.batch)
    return tape.op((log_probabilities,), scored_tokens, 4, backward=shared_gradient(1))


# What takes the loss of whole logits; benchmarks add that of other scripts.
LOSS_FUNCTIONS: dict[str, Callable[[ForwardPass, TensorRef, OutputHead], TensorRef]] = {"logits": _logits_loss}
