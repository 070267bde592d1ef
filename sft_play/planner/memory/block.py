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
from sft_play.planner.memory.operations import Pass
from sft_play.planner.memory.self_attention import attention
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.memory.tape import Grads, Node, Ref, Tape, one_gradient, shared

# What computes the loss: TRL's chunked head; this toolkit over whole logits, for classes whose logits TRL's head does
# not compute; the class's own loss, as other scripts take it (benchmarks).
LossName = Literal["chunked", "logits", "model"]
# Of trl/kernels/chunked_logprob.py at TRL 1.16.0, whose lines are given.
TOKEN_TILE = 4_096
# Tokens and words whose logits TRL's chunked head holds at once (line 32; trainer/utils.py:1507). The tile is a full
# one however small the vocabulary is (line 313).
WORD_TILE = 32_768
# fp32 numbers per token into which it reduces tiles (lines 306 to 312).
STATISTICS = 7
# Bytes per element of a tile beside it where no Triton kernel reads it (line 66): the logits in fp32, which words come
# before the label (a byte), and at most two more of fp32, such as `e` and `e * z` (`_forward_tile`, lines 231 to 247).
CPU_FORWARD = 13
# The same backward: `y`, `z`, `log_p`, `p`, `grad`, `is_target` (a byte) and two more of fp32 (`_backward_tile`, lines
# 259 to 281); `t` where logits are capped.
CPU_BACKWARD, CPU_CAP = 29, 4


@dataclass(frozen=True)
class LayerBytes:
    """One block, or the tail, in a step, above what is held before it. The peaks include its input and, in the backward
    pass, its output's gradient."""

    forward: int
    kept: int = 0
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
        return replace(self, kept=0, backward=self.backward + self.kept)


@dataclass(frozen=True)
class BlockBytes:
    """A block's bytes for one batch, with its copies of fp32 parameters however it is computed."""

    layer: LayerBytes
    width: int
    """Bytes of an element of its output."""
    recompute: int = 0
    """The peak of recomputing the forward: it starts when the backward pass first needs what was held, and ends at the
    last tensor that is held."""


def _block(run: Pass, x: Ref) -> Ref:
    spec = run.spec
    for part in (attention, mlp):
        residual = x
        x = part(run, norm(run, x))
        if spec.norm_after:
            x = norm(run, x)
        x = run.add(residual, x)
    return x


@lru_cache(maxsize=8192)
def block_bytes(
    spec: BlockSpec, *, batch: int, length: int, width: int, input_has_grad: bool = True, accumulating: bool = False
) -> BlockBytes:
    """What one block takes for `batch` sequences of `length` tokens; its input's elements have `width` bytes."""
    tape = Tape()
    run = Pass(tape, spec, batch, length, accumulating=accumulating)
    size = batch * length * spec.hidden
    x = tape.leaf(size, width) if input_has_grad else tape.new(size, width)
    out = _block(run, x)
    forward, stopped = tape.meter.peak, tape.stopped_at
    node, grad_size = out.node, (out.elements, out.width)
    storage = x.storage
    # from here only nodes hold anything, as when the model's own forward has returned
    del x, out
    # an operation may hold the input; if none does, only a checkpoint keeps it
    alone = 0 if storage.handles else size * width
    cast = sum(ref.nbytes for ref in run.cast.values())
    run.cast.clear()
    if node is None:  # nothing trains up to this block
        return BlockBytes(LayerBytes(forward, cast=cast), grad_size[1])
    kept = tape.meter.live  # with the input, if an operation holds it
    backward = _backward_peak(tape, node, grad_size)
    # gradients that are there when the forward runs again, and its peak until the last tensor is held
    recompute = stopped + tape.first_use - kept
    gradients = sum(ref.nbytes for ref in run.gradients)
    layer = LayerBytes(forward, kept, backward, gradients, cast, tape.meter.rebuilt, alone)
    return BlockBytes(layer, grad_size[1], recompute)


def _backward_peak(tape: Tape, node: Node, size: tuple[int, int]) -> int:
    grad = tape.new(*size)
    tape.meter.restart()
    tape.backward(node, grad)
    return tape.meter.peak


@lru_cache(maxsize=8192)
def forward_peak(spec: BlockSpec, *, batch: int, length: int, width: int, training: bool) -> int:
    """The block's peak where nothing is held, including its input: in evaluation, or before a checkpoint."""
    tape = Tape(grad=False)
    run = Pass(tape, spec, batch, length, accumulating=False, training=training)
    x = tape.new(batch * length * spec.hidden, width)
    _block(run, x)
    return tape.meter.peak


# --- the tail ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Vocabulary:
    """The output head: words, whether its weight trains, bytes of its weight, whether only rows of it train, in a copy
    of the table that autograd holds and whose gradient is gone at once, and whether its logits are capped."""

    words: int
    trains: bool
    width: int
    rows: bool = False
    capped: bool = False


def head_bytes(
    spec: BlockSpec,
    words: Vocabulary,
    *,
    batch: int,
    length: int,
    width: int,
    loss: LossName,
    accumulating: bool,
    grad: bool = True,
    on_gpu: bool = True,
) -> LayerBytes:
    """The tail for `batch` full rows of `length` tokens, all scored but the first token."""
    tape = Tape(grad=grad)
    run = Pass(tape, spec, batch, length, accumulating=accumulating)
    x = norm(run, tape.leaf(batch * length * spec.hidden, width))  # the model's own forward keeps no other name for it
    out = _chunked(run, x, words, on_gpu=on_gpu) if loss == "chunked" else LOSSES[loss](run, x, words)
    forward = tape.meter.peak
    del x
    node = out.node
    if not grad or node is None:
        return LayerBytes(forward)
    elements = out.elements
    del out
    kept = tape.meter.live
    backward = _backward_peak(tape, node, (elements, 4))  # the loss is fp32, whatever the logits are
    return LayerBytes(forward, kept, backward, sum(ref.nbytes for ref in run.gradients))


def _chunked(run: Pass, x: Ref, words: Vocabulary, *, on_gpu: bool) -> Ref:
    """TRL's chunked head on the N scored tokens: a tile of logits and seven numbers per token. Forward: the rows N*h*e,
    28N, the tile. Backward: fp32 gradients of the rows (4*N*h) and, where the head trains, of the whole weight (4*V*h),
    each cast at the end (N*h*e, V*h*w) unless that is fp32. Rows and weights of another width are cast by tile. Where
    there is no Triton, as on a CPU, torch's operators read each tile, and hold several more of its size."""
    tape, hidden = run.tape, run.spec.hidden
    scored = max(1, run.batch * (run.length - 1))
    low = run.spec.numbers.autocast or x.width
    trains = words.trains or words.rows
    table = (tape.new(words.words * hidden, words.width),) if words.rows else ()
    tokens, columns = min(scored, TOKEN_TILE), min(WORD_TILE, words.words)
    # of a tile that is wider than the vocabulary a CPU process has the pages that it touches
    tile = tokens * (WORD_TILE if on_gpu else columns) * low
    # beside a tile, which its gradient overwrites in the backward pass: its rows and weights in the tile's dtype
    cast = columns * hidden * low if words.width != low else 0
    forward = backward_peak = cast
    if not on_gpu:
        forward = max(cast, CPU_FORWARD * tokens * columns)
        # gradients in fp32 are products of fp32 copies (`_addmm_fp32`, lines 78 and 79)
        height = max(columns, tokens) if trains else columns
        copied = tokens * columns + hidden * height if low != 4 else 0
        backward_peak += max((CPU_BACKWARD + CPU_CAP * words.capped) * tokens * columns, 4 * copied)
    if cast:  # in the backward pass the next tile's weights are cast while this one's are still held (line 423)
        next_columns = min(words.words - columns, WORD_TILE) or columns * (scored > TOKEN_TILE)
        backward_peak = max(backward_peak, cast + next_columns * hidden * low)
    tile += tokens * hidden * low if x.width != low else 0
    e = x.width
    # a GPU indexes out the rows that are scored, so padding and prompts cost no logits; a CPU scores all tokens, of
    # several rows in a copy (trainer/utils.py:1642 to 1645)
    back = one_gradient(x.elements, e, during=x.nbytes if on_gpu else 0)
    rows = (
        tape.op((x,), scored * hidden, e, backward=back) if on_gpu or run.batch > 1 else tape.view(x, scored * hidden)
    )

    def backward(tape: Tape, grad: Ref) -> Grads:
        wide = tape.new(scored * hidden, 4)
        weight = tape.new(words.words * hidden, 4) if trains else None
        tape.meter.touch(tile + backward_peak)
        buffer = tape.new(tile, 1)
        out = tape.new(scored * hidden, e)
        if weight is not None:
            gradient = weight if words.width == 4 else tape.new(words.words * hidden, words.width)
            if words.trains:
                run.keep_gradient(gradient)
            del gradient
        del wide, weight, buffer
        return (out,)

    tape.meter.touch(4 * STATISTICS * scored + tile + forward)
    statistics = tape.new(3 * scored, 4)
    return tape.op((rows,), scored, 4, saved=(rows, statistics, *table), backward=backward, trains=trains)


def _logits(run: Pass, x: Ref, words: Vocabulary) -> Ref:
    """Whole logits as `training.model.fused_head.whole_head` reads them: log-probabilities in fp32 of all but the last
    token, then the entropy, row by row. Backward 12*T*V, then T*V*e."""
    tape, places = run.tape, run.batch * run.length * words.words
    scored = max(1, run.batch * (run.length - 1))
    size = scored * words.words
    logits = run.dense(x, "head", run.spec.hidden, words.words, words.width, trained=words.trains)
    if logits.width != 4 or run.batch > 1:  # an fp32 copy; of a part of fp32 logits, log_softmax makes one itself
        tape.meter.touch(2 * 4 * size)
    # the zeros of `gather` and the gradient of log_softmax are gone where that of the logits has its width
    backward = one_gradient(places, logits.width, during=2 * 4 * size - places * logits.width)
    chances = tape.op((logits,), size, 4, backward=backward, holds_output=True)
    tape.meter.touch(2 * 4 * size // run.batch)
    return tape.op((chances,), scored, 4, backward=shared(1))


# What takes the loss of whole logits; benchmarks add that of other scripts.
LOSSES: dict[str, Callable[[Pass, Ref, Vocabulary], Ref]] = {"logits": _logits}
