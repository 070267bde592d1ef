"""The feed-forward part of a block on sizes: a dense MLP, or a mixture of experts."""

from __future__ import annotations

import math

from sft_play.planner.memory.linear import linear
from sft_play.planner.memory.model_states import NF4_BLOCK
from sft_play.planner.memory.operations import Pass, liger_gate
from sft_play.planner.memory.tape import Grads, Ref, Tape, one_gradient, shared


def mlp(run: Pass, x: Ref) -> Ref:
    """The feed-forward part: the dense MLP, or experts beside a shared one."""
    if run.spec.experts:
        routed = _experts(run, x)
        return run.add(routed, _dense_mlp(run, x)) if "down" in run.linears else routed
    return _dense_mlp(run, x)


def _experts(run: Pass, x: Ref) -> Ref:
    """Routed experts, line by line as `grouped_mm_experts_forward` (transformers, integrations/moe.py). Which expert
    gets a token does not change these bytes; one expert after another holds no more, except for gradients of the
    weights."""
    spec, rows = run.spec, run.tokens * run.spec.experts_per_token
    wide = rows * spec.expert_width
    routing = _routing(run, x, rows)  # (T * k,)
    places = run.tape.new(rows, 8)
    gathered = run.tape.op((x,), rows * spec.hidden, x.width, saved=(places,), backward=run.put_back(x, rows))
    read: list[Ref] = []  # what the block reads dequantised or with an adapter, once, until its experts have run
    both = _grouped(run, gathered, 0, spec.hidden, 2 * spec.expert_width, read)
    # biases are gathered row by row before the product, and the name lives until the next ones replace it
    bias = run.tape.new(both.elements, both.width) if spec.expert_bias else None
    parts = run.parts(both, wide, wide)
    inner = _clamped_gate(run, parts) if spec.clamped_gate else _plain_gate(run, parts)
    del both  # the caller of the gate keeps its input
    out = _grouped(run, inner, -1, spec.expert_width, spec.hidden, read)
    del inner
    if bias is not None:
        bias = run.tape.new(out.elements, out.width)
    weighted = _weighted_rows(run, out, routing)
    del out, routing
    ordered = run.tape.op(
        (weighted,), weighted.elements, weighted.width, saved=(places,), backward=run.put_back(weighted, rows)
    )
    del weighted
    # .view(T, k, h).sum(dim=1); the gradient of a sum is expanded, and copied to be seen as rows
    backward = one_gradient(ordered.elements, ordered.width)
    mixed = run.tape.op((ordered,), x.elements, ordered.width, backward=backward)
    del ordered, bias, gathered
    mixed = run.to(mixed, x.width)
    read.clear()
    return mixed


def _routing(run: Pass, x: Ref, rows: int) -> Ref:
    spec = run.spec
    chances = run.tape.op((x,), run.tokens * spec.experts, 4, holds_output=True)
    return run.tape.op((chances,), rows, 4 if spec.routes_in_fp32 else x.width)


def _grouped(run: Pass, x: Ref, place: int, inputs: int, outputs: int, read: list[Ref]) -> Ref:
    """Rows times the matrices of their experts; a trained weight holds its input. fp32 weights are cast to
    autocast's dtype by training/prepare/experts.py, and the copy is held for x's gradient, as is a weight that was
    dequantised (training/model/nf4_experts.py) or to which an adapter was added (PEFT's ParamWrapper)."""
    spec, low = run.spec, run.spec.numbers.autocast
    elements, width = spec.experts * inputs * outputs, spec.numbers.weights
    # experts of a block that a tensor-parallel rank shares have fewer elements than the whole tensor
    whole, adapter = spec.expert_weights[place] if spec.expert_weights else (elements, 0)
    adapter = adapter * elements // max(1, whole)
    x = run.low(x)
    trains = spec.full or adapter > 0
    held = [x] if trains or spec.experts_by_loop else []
    weight = None
    if spec.nf4_experts and spec.expert_weights:
        weight = run.tape.new(elements, width)
        run.tape.meter.touch(2 * 4 * math.ceil(elements / NF4_BLOCK))  # its absmax in fp32 while it is dequantised
    if adapter:
        # both factors in the weight's dtype, held by their product, which is added to the weight
        factors = [] if width == spec.numbers.adapters else [run.tape.new(adapter, width)]
        weight = run.tape.new(elements, width)
        held += factors
        del factors
    if low is not None and low != width:
        held.append(run.tape.new(elements, low))
    elif weight is not None:
        held.append(weight)
    if weight is not None:
        read.append(weight)
    del weight
    size, e, wanted = x.elements, x.width, x.node is not None

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = tape.new(size, e) if wanted else None
        if trains and spec.experts_in_turn:  # select_backward: zeros of the whole tensor, beside the others' sum
            tape.meter.touch(2 * elements * width)
        if spec.full:
            run.weight_gradient(elements, width)
        elif adapter:
            summed = tape.new(elements, low or width)  # the sum's gradient, of which the factors' are products
            if summed.width != width:
                summed = tape.new(elements, width)
            run.weight_gradient(adapter, spec.numbers.adapters)
            del summed
        elif spec.experts_by_loop:
            tape.meter.touch(elements * e)
        return (out,)

    return run.tape.op(
        (x,), x.elements // inputs * outputs, e, saved=held, backward=backward, holds_weight=True, trains=trains
    )


def _plain_gate(run: Pass, parts: list[Ref]) -> Ref:
    gate, up = parts
    parts.clear()  # the caller's list would keep both alive through the product
    return run.product(_activated(run, gate), up)


def _clamped_gate(run: Pass, parts: list[Ref]) -> Ref:
    """gpt-oss: (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)) (modeling_gpt_oss.py, `_apply_gate`)."""
    gate, up = (run.tape.op((part,), part.elements, part.width, saved=(part,)) for part in parts)
    parts.clear()
    share = run.scaled(gate)
    share = run.tape.op((share,), share.elements, share.width, holds_output=True)
    share = run.product(gate, share)
    more = run.tape.op((up,), up.elements, up.width, backward=shared(1))
    return run.product(more, share)


def _weighted_rows(run: Pass, out: Ref, routing: Ref) -> Ref:
    """Rows times their weights, in the wider dtype; the weights' gradient is the sum of a product of its size."""
    width = max(out.width, routing.width)
    size, e, rows, of_routing = out.elements, out.width, routing.elements, routing.width

    def backward(tape: Tape, grad: Ref) -> Grads:
        gradient = tape.new(size, width)
        gradient = gradient if e == width else tape.new(size, e)
        tape.meter.touch(size * width)
        return (gradient, tape.new(rows, of_routing))

    return run.tape.op((out, routing), size, width, saved=(out, routing), backward=backward)


def _dense_mlp(run: Pass, x: Ref) -> Ref:
    liger = run.spec.liger is not None and run.spec.liger.gate
    if "gate_up" in run.linears:
        both = linear(run, x, "gate_up")
        gate, up = run.parts(both, both.elements // 2, both.elements // 2)
        inner = liger_gate(run.tape, gate, up, copies=True) if liger else run.product(up, _activated(run, gate))
        return linear(run, inner, "down")
    if liger:
        inner = liger_gate(run.tape, linear(run, x, "gate"), linear(run, x, "up"), copies=False)
    else:
        inner = run.product(_activated(run, linear(run, x, "gate")), linear(run, x, "up"))
    return linear(run, inner, "down")


def _activated(run: Pass, x: Ref) -> Ref:
    return run.tape.op((x,), x.elements, x.width, saved=(x,))
