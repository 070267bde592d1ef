"""A linear layer on sizes: plain, in NF4, and with the adapter of LoRA or DoRA."""

from __future__ import annotations

import math

from sft_play.planner.memory.model_states import NF4_BLOCK
from sft_play.planner.memory.operations import Pass, liger_norm
from sft_play.planner.memory.structure import LinearSpec
from sft_play.planner.memory.tape import Grads, Ref, Tape, one_gradient, shared


def norm(run: Pass, x: Ref, *, of_heads: bool = False) -> Ref:
    """A norm over hidden states or heads; it is computed in fp32."""
    liger = run.spec.liger
    if liger is not None and (liger.head_norms or not of_heads):
        rows = x.elements // run.spec.head_dim if of_heads else run.tokens
        return liger_norm(run.tape, x, rows, in_place=liger.in_place, trains=run.spec.full)
    wide = run.to(x, 4)
    out = _normalised(run, wide)
    del wide
    if run.spec.norm == "gemma":  # in fp32, then the input's dtype
        return run.to(_by_weight(run, out), x.width)
    return _by_weight(run, run.to(out, x.width))


def _normalised(run: Pass, wide: Ref) -> Ref:
    """wide * rsqrt(mean(wide ** 2)): holds `wide`; the square's gradient takes four more of its size."""
    size = wide.elements
    backward = one_gradient(size, 4, during=12 * size)  # with `grad`, which the mean's gradient replaces
    return run.tape.op((wide,), size, 4, saved=(wide,), backward=backward)


def _by_weight(run: Pass, x: Ref) -> Ref:
    # type promotion: fp32 weights under autocast make the product fp32; Gemma's weight is cast up to x's fp32
    width = x.width if run.spec.norm == "gemma" else max(x.width, run.spec.numbers.weights)
    size, e, full, wanted = x.elements, x.width, run.spec.full, x.node is not None

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = tape.new(size, width) if wanted else None
        if full:
            tape.meter.touch(size * width)
        return (out if out is None or width == e else tape.new(size, e),)

    held = (x,) if full else ()
    return run.tape.op((x,), size, width, saved=held, backward=backward, holds_weight=True, trains=full)


def linear(run: Pass, x: Ref, role: str) -> Ref:
    """A linear layer with its adapter."""
    spec = run.linears[role]
    if not spec.rank:
        return _base(run, x, role, spec)
    return _with_adapter_on_nf4(run, x, role, spec) if run.spec.nf4 else _with_adapter(run, x, role, spec)


def _base(run: Pass, x: Ref, role: str, spec: LinearSpec) -> Ref:
    if run.spec.nf4:
        return _nf4(run, x, spec)
    return run.dense(x, role, spec.inputs, spec.outputs, run.spec.numbers.weights, trained=run.spec.full)


def _nf4(run: Pass, x: Ref, spec: LinearSpec) -> Ref:
    """bitsandbytes' 4-bit product: the weight is dequantised for each pass, with its fp32 absmax."""
    x, before = run.low(x), x.width
    rebuilt = spec.elements * x.width
    absmax = 4 * math.ceil(spec.elements / NF4_BLOCK)
    out_elements = x.elements // spec.inputs * spec.outputs

    def backward(
        tape: Tape, grad: Ref, size: int = x.elements, e: int = x.width, wanted: bool = x.node is not None
    ) -> Grads:
        if not wanted:
            return (None,)
        # saved packed and dequantised again: the backward pass holds no weight of its own
        tape.meter.touch(rebuilt + absmax, rebuilt=rebuilt)
        tape.meter.touch(rebuilt + size * e, rebuilt=rebuilt)
        return (tape.new(size, e),)

    # double quantisation: absmax is dequantised first, to fp32 (functional.py, dequantize_4bit), and is gone when the
    # product runs
    run.tape.meter.touch(rebuilt + 2 * absmax)
    run.tape.meter.touch(rebuilt + out_elements * x.width)
    out = run.tape.op((x,), out_elements, x.width, backward=backward, holds_weight=True)
    return run.to(out, before)  # Linear4bit.forward returns its input's dtype


def _with_adapter(run: Pass, x: Ref, role: str, spec: LinearSpec) -> Ref:
    """peft/tuners/lora/layer.py, Linear.forward: the input is cast to the adapter's dtype, once for each target;
    under autocast only where training/model/adapter_inputs.py leaves it."""
    result = _base(run, x, role, spec)
    width = result.width
    if run.spec.numbers.autocast is None or run.spec.casts_inputs or run.spec.dora or run.spec.lora_dropout:
        x = run.to(x, run.spec.numbers.adapters)
    # result + lora_B(lora_A(dropout(x))) * scaling: fp32 where adapters are and autocast is not, then back
    result = run.add(result, _adapter(run, x, role, spec, result))
    return run.to(result, width)


def _with_adapter_on_nf4(run: Pass, x: Ref, role: str, spec: LinearSpec) -> Ref:
    """peft/tuners/lora/bnb.py, Linear4bit.forward: the base's result is cloned; no cast under autocast."""
    result = _base(run, x, role, spec)
    result = run.tape.op((result,), result.elements, result.width, backward=shared(1))  # result.clone()
    width = result.width
    if run.spec.numbers.autocast is None:
        x = run.to(x, run.spec.numbers.adapters)
    output = _adapter(run, x, role, spec, result)
    if run.spec.numbers.autocast is None:
        output = run.to(output, width)
    return run.add(result, output)


def _adapter(run: Pass, x: Ref, role: str, spec: LinearSpec, result: Ref) -> Ref:
    if run.spec.dora:
        return _dora(run, x, role, spec, result)
    return run.scaled(_lora(run, run.drop(x, run.spec.lora_dropout), role, spec))


def _lora(run: Pass, x: Ref, role: str, spec: LinearSpec) -> Ref:
    """B(A(x)): T x r, then T x outputs. Both factors train, so both of their inputs are held."""
    width = run.spec.numbers.adapters
    low = run.dense(x, f"{role}.A", spec.inputs, spec.rank, width, trained=True)
    return run.dense(low, f"{role}.B", spec.rank, spec.outputs, width, trained=True)


def _dora(run: Pass, x: Ref, role: str, spec: LinearSpec, result: Ref) -> Ref:
    """peft/tuners/lora/dora.py: BA, taken as B(A(identity)), and the plain weight live until the end. With dropout the
    base runs again on what that left. The magnitude is fp32, and so is what it multiplies."""
    base = None if run.spec.lora_dropout else result
    x = run.drop(x, run.spec.lora_dropout)
    whole = _dora_weights(run, x, spec)
    lora = _lora(run, x, role, spec)
    if base is None:
        low = run.low(x)
        plain = run.spec.nf4 or run.spec.numbers.weights != low.width
        held = [run.tape.new(spec.elements, low.width)] if plain else []
        outputs = low.elements // spec.inputs * spec.outputs
        base = run.tape.op((low,), outputs, low.width, saved=held, holds_weight=True)
        del low, held  # F.linear's own: only its node keeps them
    less = _by_magnitude(run, base)
    more = run.scaled(_by_magnitude(run, lora))
    out = run.add(less, more)
    del whole  # locals of PEFT's forward, which live until it returns
    return out


def _dora_weights(run: Pass, x: Ref, spec: LinearSpec) -> list[Ref]:
    """The identity (i*i, held by A's product), BA and the plain weight (i*o each, as x); their sum's norm: two more."""
    numbers, e = run.spec.numbers, x.width
    low = numbers.autocast or e
    identity = run.tape.new(spec.inputs * spec.inputs, numbers.adapters)
    held = [identity if low == numbers.adapters else run.tape.new(spec.inputs * spec.inputs, low)]
    del identity
    delta = run.tape.new(spec.elements, low)
    held.append(delta if low == e else run.tape.new(spec.elements, e))
    del delta
    if run.spec.nf4 or numbers.weights != e:
        held.append(run.tape.new(spec.elements, e))
    run.tape.meter.touch(2 * spec.elements * e)
    return held


def _by_magnitude(run: Pass, x: Ref) -> Ref:
    """x times the magnitude's row, in fp32: x is held for the magnitude's gradient."""
    size, e, wanted = x.elements, x.width, x.node is not None

    def backward(tape: Tape, grad: Ref) -> Grads:
        tape.meter.touch(4 * size)
        if not wanted:
            return (None,)
        out = tape.new(size, 4)
        return (out if e == 4 else tape.new(size, e),)

    return run.tape.op((x,), size, 4, saved=(x,), backward=backward, trains=True)
