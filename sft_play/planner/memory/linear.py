"""A linear layer on sizes: plain, in NF4, and with the adapter of LoRA or DoRA."""

from __future__ import annotations

import math

from sft_play.planner.memory.model_states import NF4_BLOCK
from sft_play.planner.memory.operations import ForwardPass, liger_norm
from sft_play.planner.memory.structure import LinearSpec
from sft_play.planner.memory.tape import Grads, Tape, TensorRef, shared_gradient, single_gradient


def norm(block: ForwardPass, x: TensorRef, *, is_head_norm: bool = False) -> TensorRef:
    """A norm over hidden states or heads; it is computed in fp32."""
    liger = block.spec.liger
    if liger is not None and (liger.replaces_head_norms or not is_head_norm):
        rows = x.elements // block.spec.head_dim if is_head_norm else block.tokens
        return liger_norm(block.tape, x, rows, in_place=liger.writes_in_place, trains_weight=block.spec.trains_weights)
    wide = block.to(x, 4)
    out = _normalise(block, wide)
    del wide
    if block.spec.norm == "gemma":  # in fp32, then the input's dtype
        return block.to(_scale_by_weight(block, out), x.itemsize)
    return _scale_by_weight(block, block.to(out, x.itemsize))


def _normalise(block: ForwardPass, wide: TensorRef) -> TensorRef:
    """wide * rsqrt(mean(wide ** 2)): holds `wide`; the square's gradient takes four more of its size."""
    size = wide.elements
    backward = single_gradient(size, 4, transient=12 * size)  # with `grad`, which the mean's gradient replaces
    return block.tape.op((wide,), size, 4, saved=(wide,), backward=backward)


def _scale_by_weight(block: ForwardPass, x: TensorRef) -> TensorRef:
    # type promotion: fp32 weights under autocast make the product fp32; Gemma's weight is cast up to x's fp32
    itemsize = x.itemsize if block.spec.norm == "gemma" else max(x.itemsize, block.spec.element_bytes.weights)
    size, e, trains_weight, needs_gradient = x.elements, x.itemsize, block.spec.trains_weights, x.node is not None

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = tape.new(size, itemsize) if needs_gradient else None
        if trains_weight:
            tape.meter.add_transient(size * itemsize)
        return (out if out is None or itemsize == e else tape.new(size, e),)

    saved = (x,) if trains_weight else ()
    return block.tape.op(
        (x,), size, itemsize, saved=saved, backward=backward, holds_weight=True, trains_weight=trains_weight
    )


def linear(block: ForwardPass, x: TensorRef, role: str) -> TensorRef:
    """A linear layer with its adapter."""
    spec = block.linears[role]
    if not spec.rank:
        return _base_linear(block, x, role, spec)
    return _adapted_nf4_linear(block, x, role, spec) if block.spec.is_nf4 else _adapted_linear(block, x, role, spec)


def _base_linear(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    if block.spec.is_nf4:
        return _nf4_linear(block, x, spec)
    return block.dense(
        x, role, spec.inputs, spec.outputs, block.spec.element_bytes.weights, trainable=block.spec.trains_weights
    )


def _nf4_linear(block: ForwardPass, x: TensorRef, spec: LinearSpec) -> TensorRef:
    """bitsandbytes' 4-bit product: the weight is dequantised for each pass, with its fp32 absmax."""
    x, input_itemsize = block.to_autocast(x), x.itemsize
    dequantised = spec.elements * x.itemsize
    absmax = 4 * math.ceil(spec.elements / NF4_BLOCK)
    out_elements = x.elements // spec.inputs * spec.outputs

    def backward(
        tape: Tape,
        grad: TensorRef,
        size: int = x.elements,
        e: int = x.itemsize,
        needs_gradient: bool = x.node is not None,
    ) -> Grads:
        if not needs_gradient:
            return (None,)
        # saved packed and dequantised again: the backward pass holds no weight of its own
        tape.meter.add_transient(dequantised + absmax, dequantised=dequantised)
        tape.meter.add_transient(dequantised + size * e, dequantised=dequantised)
        return (tape.new(size, e),)

    # double quantisation: absmax is dequantised first, to fp32 (functional.py, dequantize_4bit), and is gone when the
    # product runs
    block.tape.meter.add_transient(dequantised + 2 * absmax)
    block.tape.meter.add_transient(dequantised + out_elements * x.itemsize)
    out = block.tape.op((x,), out_elements, x.itemsize, backward=backward, holds_weight=True)
    return block.to(out, input_itemsize)  # Linear4bit.forward returns its input's dtype


def _adapted_linear(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    """peft/tuners/lora/layer.py, Linear.forward: the input is cast to the adapter's dtype, once for each target;
    under autocast only where training/model/adapter_inputs.py leaves it."""
    result = _base_linear(block, x, role, spec)
    itemsize = result.itemsize
    if (
        block.spec.element_bytes.autocast is None
        or block.spec.casts_inputs
        or block.spec.uses_dora
        or block.spec.lora_dropout
    ):
        x = block.to(x, block.spec.element_bytes.adapters)
    # result + lora_B(lora_A(dropout(x))) * scaling: fp32 where adapters are and autocast is not, then back
    result = block.add(result, _adapter_output(block, x, role, spec, result))
    return block.to(result, itemsize)


def _adapted_nf4_linear(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    """peft/tuners/lora/bnb.py, Linear4bit.forward: the base's result is cloned; no cast under autocast."""
    result = _base_linear(block, x, role, spec)
    result = block.tape.op((result,), result.elements, result.itemsize, backward=shared_gradient(1))  # result.clone()
    itemsize = result.itemsize
    if block.spec.element_bytes.autocast is None:
        x = block.to(x, block.spec.element_bytes.adapters)
    output = _adapter_output(block, x, role, spec, result)
    if block.spec.element_bytes.autocast is None:
        output = block.to(output, itemsize)
    return block.add(result, output)


def _adapter_output(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec, result: TensorRef) -> TensorRef:
    if block.spec.uses_dora:
        return _dora_output(block, x, role, spec, result)
    return block.scale(_lora_output(block, block.dropout(x, block.spec.lora_dropout), role, spec))


def _lora_output(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    """B(A(x)): T x r, then T x outputs. Both factors train, so both of their inputs are held."""
    itemsize = block.spec.element_bytes.adapters
    low_rank = block.dense(x, f"{role}.A", spec.inputs, spec.rank, itemsize, trainable=True)
    return block.dense(low_rank, f"{role}.B", spec.rank, spec.outputs, itemsize, trainable=True)


def _dora_output(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec, result: TensorRef) -> TensorRef:
    """peft/tuners/lora/dora.py: BA, taken as B(A(identity)), and the plain weight live until the end. With dropout the
    base runs again on what that left. The magnitude is fp32, and so is what it multiplies."""
    base = None if block.spec.lora_dropout else result
    x = block.dropout(x, block.spec.lora_dropout)
    weights = _dora_weights(block, x, spec)
    lora = _lora_output(block, x, role, spec)
    if base is None:
        cast_input = block.to_autocast(x)
        copies_weight = block.spec.is_nf4 or block.spec.element_bytes.weights != cast_input.itemsize
        saved = [block.tape.new(spec.elements, cast_input.itemsize)] if copies_weight else []
        outputs = cast_input.elements // spec.inputs * spec.outputs
        base = block.tape.op((cast_input,), outputs, cast_input.itemsize, saved=saved, holds_weight=True)
        del cast_input, saved  # F.linear's own: only its node keeps them
    scaled_base = _scale_by_magnitude(block, base)
    scaled_lora = block.scale(_scale_by_magnitude(block, lora))
    out = block.add(scaled_base, scaled_lora)
    del weights  # locals of PEFT's forward, which live until it returns
    return out


def _dora_weights(block: ForwardPass, x: TensorRef, spec: LinearSpec) -> list[TensorRef]:
    """The identity (i*i, held by A's product), BA and the plain weight (i*o each, as x); their sum's norm: two more."""
    element_bytes, e = block.spec.element_bytes, x.itemsize
    compute_itemsize = element_bytes.autocast or e
    identity = block.tape.new(spec.inputs * spec.inputs, element_bytes.adapters)
    weights = [
        identity
        if compute_itemsize == element_bytes.adapters
        else block.tape.new(spec.inputs * spec.inputs, compute_itemsize)
    ]
    del identity
    delta = block.tape.new(spec.elements, compute_itemsize)
    weights.append(delta if compute_itemsize == e else block.tape.new(spec.elements, e))
    del delta
    if block.spec.is_nf4 or element_bytes.weights != e:
        weights.append(block.tape.new(spec.elements, e))
    block.tape.meter.add_transient(2 * spec.elements * e)
    return weights


def _scale_by_magnitude(block: ForwardPass, x: TensorRef) -> TensorRef:
    """x times the magnitude's row, in fp32: x is held for the magnitude's gradient."""
    size, e, needs_gradient = x.elements, x.itemsize, x.node is not None

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        tape.meter.add_transient(4 * size)
        if not needs_gradient:
            return (None,)
        out = tape.new(size, 4)
        return (out if e == 4 else tape.new(size, e),)

    return block.tape.op((x,), size, 4, saved=(x,), backward=backward, trains_weight=True)
