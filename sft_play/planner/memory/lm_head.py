"""The tail of the step on sizes: last norm, output head and loss, forward, backward and without gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sft_play.planner.memory.block_spec import BlockSpec
from sft_play.planner.memory.norms import norm
from sft_play.planner.memory.operations import Pass
from sft_play.planner.memory.tape import Grads, Ref, Tape

TOKEN_TILE = 4_096
WORD_TILE = 32_768
"""Tokens and words whose logits TRL's chunked head holds at once (trl/kernels/chunked_logprob.py; the tile is a full
one however small the vocabulary is)."""
STATISTICS = 7
"""fp32 numbers per token into which it reduces tiles."""


@dataclass(frozen=True)
class HeadBytes:
    """The tail's bytes: peaks include its input; `kept` does not, unless an operation holds it."""

    kept: int
    forward: int
    backward: int
    gradients: int


@dataclass(frozen=True)
class Vocabulary:
    """The output head: words, whether its weight trains, bytes of its weight, words of a tile that are touched."""

    words: int
    trains: bool
    width: int
    tile: int = WORD_TILE


def head_bytes(
    spec: BlockSpec,
    words: Vocabulary,
    *,
    batch: int,
    length: int,
    width: int,
    loss: Literal["chunked", "logits"],
    accumulating: bool,
    grad: bool = True,
) -> HeadBytes:
    """The tail for `batch` full rows of `length` tokens, all scored but the first token."""
    tape = Tape(grad=grad)
    run = Pass(tape, spec, batch, length, accumulating=accumulating)
    x = tape.leaf(batch * length * spec.hidden, width)
    normed = norm(run, x)
    scored = max(1, batch * (length - 1))
    out = _chunked(run, normed, words, scored) if loss == "chunked" else _whole(run, normed, words)
    forward = tape.meter.peak
    del x, normed
    node = out.node
    if not grad or node is None:
        return HeadBytes(0, forward, 0, 0)
    # the loss is fp32, whatever the logits are
    arrived = tape.new(out.elements, 4)
    del out
    kept = tape.meter.live
    tape.meter.restart()
    tape.backward(node, arrived)
    del arrived
    return HeadBytes(kept, forward, tape.meter.peak, sum(ref.nbytes for ref in run.gradients))


def _chunked(run: Pass, x: Ref, words: Vocabulary, scored: int) -> Ref:
    """TRL's chunked head on the N scored tokens: a tile of logits and seven numbers per token.

    Forward: the gathered rows N*h*e, 28N, the tile. Backward: fp32 gradients of the rows (4*N*h) and, where the head
    trains, of the whole weight (4*V*h), each cast at the end (N*h*e, V*h*w)
    unless that is fp32. Rows of fp32 weights are cast by tile.
    """
    tape, hidden = run.tape, run.spec.hidden
    low = run.spec.numbers.autocast or x.width
    # in the backward pass a tile's gradient overwrites its logits, so one tile is enough both ways
    tile = min(scored, TOKEN_TILE) * words.tile * low
    # weights and rows in fp32 are cast tile by tile, with .to(compute_dtype)
    casts = min(WORD_TILE, words.words) * hidden * low if words.width != low else 0
    casts += min(scored, TOKEN_TILE) * hidden * low if x.width != low else 0
    whole, e = x.elements, x.width

    def ungathered(tape: Tape, grad: Ref) -> Grads:
        out = tape.new(whole, e)
        tape.meter.touch(whole * e)
        return (out,)

    # rows that are scored are indexed out, so padding and prompts cost no logits
    rows = tape.op((x,), scored * hidden, e, backward=ungathered)

    def backward(tape: Tape, grad: Ref) -> Grads:
        wide = tape.new(scored * hidden, 4)
        weight = tape.new(words.words * hidden, 4) if words.trains else None
        tape.meter.touch(tile + casts)
        buffer = tape.new(tile, 1)
        out = tape.new(scored * hidden, e)
        if weight is not None:
            run.keep_gradient(weight if words.width == 4 else tape.new(words.words * hidden, words.width))
        del wide, weight, buffer
        return (out,)

    tape.meter.touch(4 * STATISTICS * scored + tile + casts)
    statistics = tape.new(3 * scored, 4)
    return tape.op((rows,), scored, 4, saved=(rows, statistics), backward=backward, trains=words.trains)


def _whole(run: Pass, x: Ref, words: Vocabulary) -> Ref:
    """Full logits and cross entropy in fp32: T*V*(e + 4 + 4) forward; 12*T*V, then T*V*e, backward."""
    tape, size = run.tape, x.elements // run.spec.hidden * words.words
    logits = run.dense(x, "head", run.spec.hidden, words.words, words.width, trained=words.trains)
    wide = run.to(logits, 4)

    def backward(tape: Tape, grad: Ref) -> Grads:
        return (tape.new(size, 4),)

    return tape.op((wide,), size, 4, backward=backward, holds_output=True)
