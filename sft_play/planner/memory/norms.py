"""RMSNorm, Gemma's norm and LayerNorm on sizes."""

from __future__ import annotations

from sft_play.planner.memory import fused
from sft_play.planner.memory.operations import Pass
from sft_play.planner.memory.tape import Grads, Ref, Tape


def norm(run: Pass, x: Ref, kind: str = "", *, of_heads: bool = False) -> Ref:
    """A norm over hidden states or heads; RMSNorms compute in fp32, LayerNorm is one kernel."""
    kind, liger = kind or run.spec.norm, run.spec.liger
    if liger is not None and (liger.head_norms or not of_heads):
        rows = x.elements // run.spec.head_dim if of_heads else run.tokens
        return fused.norm(run.tape, x, rows, in_place=liger.in_place, trains=run.spec.full)
    if kind == "layer":
        if run.spec.numbers.autocast is not None:  # in autocast's fp32 list on CUDA
            x = run.to(x, 4)
        return run.tape.op((x,), x.elements, x.width, saved=(x,), trains=run.spec.full)
    wide = run.to(x, 4)
    out = _normalised(run, wide)
    del wide
    if kind == "gemma":  # (1 + weight) in fp32, then the input's dtype
        return run.to(_by_weight(run, out), x.width)
    return _by_weight(run, run.to(out, x.width))


def _normalised(run: Pass, wide: Ref) -> Ref:
    """wide * rsqrt(mean(wide ** 2)): holds `wide`; the square's gradient takes four more of its size."""
    size = wide.elements

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = tape.new(size, 4)
        tape.meter.touch(12 * size)  # with `grad`, which the mean's gradient replaces
        return (out,)

    return run.tape.op((wide,), size, 4, saved=(wide,), backward=backward)


def _by_weight(run: Pass, x: Ref) -> Ref:
    """weight * x: x is held where the weight trains."""
    # type promotion: fp32 weights under autocast make the product fp32; Gemma's weight is cast up to x's fp32
    width = max(x.width, run.spec.numbers.weights) if run.spec.norm != "gemma" else x.width
    size, e, full, wanted = x.elements, x.width, run.spec.full, x.node is not None

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = tape.new(size, width) if wanted else None
        if full:
            tape.meter.touch(size * width)
        return (out if out is None or width == e else tape.new(size, e),)

    held = (x,) if full else ()
    return run.tape.op((x,), size, width, saved=held, backward=backward, holds_weight=True, trains=full)
