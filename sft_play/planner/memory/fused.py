"""Liger's kernels on sizes: what each keeps for its backward pass, and what it writes over.

After liger-kernel 0.8.5, liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py: autograd functions of their own, which need
contiguous inputs and copy others.
"""

from __future__ import annotations

from sft_play.facts.liger import MULTIPROCESSORS
from sft_play.planner.memory.tape import Backward, Grads, Ref, Tape, fresh


def norm(tape: Tape, x: Ref, rows: int, *, in_place: bool, trains: bool) -> Ref:
    """A norm over each of `rows`: holds its input and one fp32 number a row, and gives its input's dtype.

    Backward the gradient of the input replaces that of the output where `in_place`; a trained weight's is summed from
    an fp32 row of each multiprocessor.
    """
    size, e, wanted = x.elements, x.width, x.node is not None
    statistics = tape.new(rows, 4)

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = (grad if in_place else tape.new(size, e)) if wanted or not in_place else None
        if trains:
            tape.meter.touch(4 * MULTIPROCESSORS * (size // rows))
        return (out if wanted else None,)

    return tape.op((x,), size, e, saved=(x, statistics), backward=backward, holds_weight=True, trains=trains)


def gated(tape: Tape, gate: Ref, up: Ref, *, copies: bool) -> Ref:
    """activation(gate) * up: holds both, or contiguous `copies` of them, over which their gradients are written."""
    held = [tape.new(ref.elements, ref.width) if copies else ref.bare() for ref in (gate, up)]
    size, e = gate.elements, gate.width

    def backward(tape: Tape, grad: Ref) -> Grads:
        gradients = tuple(held)
        held.clear()
        return gradients

    return tape.op((gate, up), size, e, backward=backward, holds_weight=True)


def rotated(tape: Tape, x: Ref, *, copies: bool, copies_gradient: bool) -> Ref:
    """x rotated where it lies, or in a contiguous copy; its gradient likewise. Sines and cosines are shared."""
    out = tape.new(x.elements, x.width) if copies else Ref(x.storage, x.elements, x.width)
    backward: Backward = fresh(x) if copies_gradient else lambda tape, grad: (grad,)
    if tape.grad and x.node is not None:
        out.node = tape.node((x,), (), backward, holds_weight=True)
    return out
