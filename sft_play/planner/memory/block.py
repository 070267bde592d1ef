"""One decoder block as transformers, PEFT and bitsandbytes run it, on sizes: what it keeps, and its peaks.

The parts follow the forward of transformers' decoder blocks (models/*/modeling_*.py), of PEFT's LoRA layers
(peft/tuners/lora/{layer,bnb,dora,variants}.py) and of bitsandbytes' 4-bit product, line by line where lines differ in
bytes: `self_attention`, `mlp`, `linear` and `norms`, of the `operations` that a `tape` records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sft_play.planner.memory.block_spec import BlockSpec
from sft_play.planner.memory.mlp import mlp
from sft_play.planner.memory.norms import norm
from sft_play.planner.memory.operations import Pass
from sft_play.planner.memory.self_attention import attention
from sft_play.planner.memory.tape import Ref, Tape


@dataclass(frozen=True)
class BlockBytes:
    """A block's bytes for one batch. The peaks include its input and, in the backward pass, its output's gradient."""

    kept: int
    """Held from the forward to the backward pass, without the block's own input unless an operation holds it."""
    forward: int
    backward: int
    recompute: int
    """The peak of recomputing the forward: it starts when the backward pass first needs what was held, and ends at the
    last tensor that is held."""
    input: int
    """The input's bytes, unless an operation holds it: a checkpoint does."""
    gradients: int
    """Gradients of the block's parameters that stay, where there were none before."""
    rebuilt: int
    """Of the backward peak: the NF4 weight that is dequantised at that moment."""
    width: int
    """Bytes of an element of its output."""
    cast_weights: int
    """Half-precision copies of fp32 parameters that autocast keeps until the forward pass ends."""


def _block(run: Pass, x: Ref) -> Ref:
    """The whole block: pre-norm, or attention and MLP in parallel (GPT-J, GPT-NeoX, Falcon, Phi, Cohere)."""
    spec = run.spec
    if spec.parallel:
        normed = norm(run, x)
        attended = attention(run, normed)
        if spec.parallel_norms:
            normed = norm(run, x)
        return run.add(run.add(attended, mlp(run, normed)), x)
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
        return BlockBytes(0, forward, 0, 0, 0, 0, 0, grad_size[1], cast)
    kept = tape.meter.live  # with the input, if an operation holds it
    grad = tape.new(*grad_size)
    tape.meter.restart()
    tape.backward(node, grad)
    del grad
    # gradients that are there when the forward runs again, and its peak until the last tensor is held
    recompute = stopped + tape.first_use - kept
    gradients = sum(ref.nbytes for ref in run.gradients)
    return BlockBytes(
        kept, forward, tape.meter.peak, recompute, alone, gradients, tape.meter.rebuilt, grad_size[1], cast
    )


@lru_cache(maxsize=8192)
def forward_peak(spec: BlockSpec, *, batch: int, length: int, width: int, training: bool) -> int:
    """The block's peak where nothing is held, including its input: in evaluation, or before a checkpoint."""
    tape = Tape(grad=False)
    run = Pass(tape, spec, batch, length, accumulating=False, training=training)
    x = tape.new(batch * length * spec.hidden, width)
    _block(run, x)
    return tape.meter.peak
