"""The feed-forward part of a block on sizes: a dense MLP, or a mixture of experts."""

from __future__ import annotations

import math

from sft_play.planner.memory.linear import linear
from sft_play.planner.memory.model_states import NF4_BLOCK
from sft_play.planner.memory.operations import ForwardPass, liger_gate
from sft_play.planner.memory.tape import Grads, Tape, TensorRef, shared_gradient, single_gradient


def mlp(block: ForwardPass, x: TensorRef) -> TensorRef:
    """The feed-forward part: the dense MLP, or experts beside a shared one."""
    if block.spec.num_experts:
        routed = _routed_experts(block, x)
        return block.add(routed, _dense_mlp(block, x)) if "down" in block.linears else routed
    return _dense_mlp(block, x)


def _routed_experts(block: ForwardPass, x: TensorRef) -> TensorRef:
    """Routed experts, line by line as `grouped_mm_experts_forward` (transformers, integrations/moe.py). Which expert
    gets a token does not change these bytes; one expert after another holds no more, except for gradients of the
    weights."""
    spec, rows = block.spec, block.tokens * block.spec.experts_per_token
    inner_elements = rows * spec.expert_width
    routing = _routing_weights(block, x, rows)  # (T * k,)
    indices = block.tape.new(rows, 8)
    gathered = block.tape.op(
        (x,), rows * spec.hidden, x.itemsize, saved=(indices,), backward=block.index_backward(x, rows)
    )
    # what the block reads dequantised or with an adapter, once, until its experts have run
    weights_in_use: list[TensorRef] = []
    gate_up = _grouped_linear(block, gathered, 0, spec.hidden, 2 * spec.expert_width, weights_in_use)
    # biases are gathered row by row before the product, and the name lives until the next ones replace it
    bias = block.tape.new(gate_up.elements, gate_up.itemsize) if spec.has_expert_bias else None
    halves = block.split(gate_up, inner_elements, inner_elements)
    inner = _clamped_gate(block, halves) if spec.clamps_gate else _gate(block, halves)
    del gate_up  # the caller of the gate keeps its input
    out = _grouped_linear(block, inner, -1, spec.expert_width, spec.hidden, weights_in_use)
    del inner
    if bias is not None:
        bias = block.tape.new(out.elements, out.itemsize)
    weighted = _weight_rows(block, out, routing)
    del out, routing
    ordered = block.tape.op(
        (weighted,),
        weighted.elements,
        weighted.itemsize,
        saved=(indices,),
        backward=block.index_backward(weighted, rows),
    )
    del weighted
    # .view(T, k, h).sum(dim=1); the gradient of a sum is expanded, and copied to be seen as rows
    backward = single_gradient(ordered.elements, ordered.itemsize)
    combined = block.tape.op((ordered,), x.elements, ordered.itemsize, backward=backward)
    del ordered, bias, gathered
    combined = block.to(combined, x.itemsize)
    weights_in_use.clear()
    return combined


def _routing_weights(block: ForwardPass, x: TensorRef, rows: int) -> TensorRef:
    spec = block.spec
    probabilities = block.tape.op((x,), block.tokens * spec.num_experts, 4, holds_output=True)
    return block.tape.op((probabilities,), rows, 4 if spec.routes_in_fp32 else x.itemsize)


def _grouped_linear(
    block: ForwardPass, x: TensorRef, tensor_index: int, inputs: int, outputs: int, weights_in_use: list[TensorRef]
) -> TensorRef:
    """Rows times the matrices of their experts; a trained weight holds its input. fp32 weights are cast to
    autocast's dtype by training/prepare/experts.py, and the copy is held for x's gradient, as is a weight that was
    dequantised (training/model/nf4_experts.py) or to which an adapter was added (PEFT's ParamWrapper)."""
    spec, autocast_itemsize = block.spec, block.spec.element_bytes.autocast
    elements, weight_itemsize = spec.num_experts * inputs * outputs, spec.element_bytes.weights
    # experts of a block that a tensor-parallel rank shares have fewer elements than the whole tensor
    tensor_elements, adapter_params = spec.expert_tensors[tensor_index] if spec.expert_tensors else (elements, 0)
    adapter_params = adapter_params * elements // max(1, tensor_elements)
    x = block.to_autocast(x)
    trains_weight = spec.trains_weights or adapter_params > 0
    saved = [x] if trains_weight or spec.uses_grouped_mm_fallback else []
    weight = None
    if spec.has_nf4_experts and spec.expert_tensors:
        weight = block.tape.new(elements, weight_itemsize)
        # its absmax in fp32 while it is dequantised
        block.tape.meter.add_transient(2 * 4 * math.ceil(elements / NF4_BLOCK))
    if adapter_params:
        # both factors in the weight's dtype, held by their product, which is added to the weight
        factors = (
            [] if weight_itemsize == spec.element_bytes.adapters else [block.tape.new(adapter_params, weight_itemsize)]
        )
        weight = block.tape.new(elements, weight_itemsize)
        saved += factors
        del factors
    if autocast_itemsize is not None and autocast_itemsize != weight_itemsize:
        saved.append(block.tape.new(elements, autocast_itemsize))
    elif weight is not None:
        saved.append(weight)
    if weight is not None:
        weights_in_use.append(weight)
    del weight
    size, e, needs_gradient = x.elements, x.itemsize, x.node is not None

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = tape.new(size, e) if needs_gradient else None
        # select_backward: zeros of the whole tensor, beside the others' sum
        if trains_weight and spec.uses_eager_experts:
            tape.meter.add_transient(2 * elements * weight_itemsize)
        if spec.trains_weights:
            block.create_weight_gradient(elements, weight_itemsize)
        elif adapter_params:
            # the sum's gradient, of which the factors' are products
            sum_gradient = tape.new(elements, autocast_itemsize or weight_itemsize)
            if sum_gradient.itemsize != weight_itemsize:
                sum_gradient = tape.new(elements, weight_itemsize)
            block.create_weight_gradient(adapter_params, spec.element_bytes.adapters)
            del sum_gradient
        elif spec.uses_grouped_mm_fallback:
            tape.meter.add_transient(elements * e)
        return (out,)

    return block.tape.op(
        (x,),
        x.elements // inputs * outputs,
        e,
        saved=saved,
        backward=backward,
        holds_weight=True,
        trains_weight=trains_weight,
    )


def _gate(block: ForwardPass, halves: list[TensorRef]) -> TensorRef:
    gate, up = halves
    halves.clear()  # the caller's list would keep both alive through the product
    return block.multiply(_activate(block, gate), up)


def _clamped_gate(block: ForwardPass, halves: list[TensorRef]) -> TensorRef:
    """gpt-oss: (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)) (modeling_gpt_oss.py, `_apply_gate`)."""
    gate, up = (block.tape.op((half,), half.elements, half.itemsize, saved=(half,)) for half in halves)
    halves.clear()
    activated = block.scale(gate)
    activated = block.tape.op((activated,), activated.elements, activated.itemsize, holds_output=True)
    activated = block.multiply(gate, activated)
    shifted_up = block.tape.op((up,), up.elements, up.itemsize, backward=shared_gradient(1))
    return block.multiply(shifted_up, activated)


def _weight_rows(block: ForwardPass, out: TensorRef, routing: TensorRef) -> TensorRef:
    """Rows times their weights, in the wider dtype; the weights' gradient is the sum of a product of its size."""
    itemsize = max(out.itemsize, routing.itemsize)
    size, e, rows, routing_itemsize = out.elements, out.itemsize, routing.elements, routing.itemsize

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        gradient = tape.new(size, itemsize)
        gradient = gradient if e == itemsize else tape.new(size, e)
        tape.meter.add_transient(size * itemsize)
        return (gradient, tape.new(rows, routing_itemsize))

    return block.tape.op((out, routing), size, itemsize, saved=(out, routing), backward=backward)


def _dense_mlp(block: ForwardPass, x: TensorRef) -> TensorRef:
    uses_liger_gate = block.spec.liger is not None and block.spec.liger.replaces_gate
    if "gate_up" in block.linears:
        gate_up = linear(block, x, "gate_up")
        gate, up = block.split(gate_up, gate_up.elements // 2, gate_up.elements // 2)
        inner = (
            liger_gate(block.tape, gate, up, copies_inputs=True)
            if uses_liger_gate
            else block.multiply(up, _activate(block, gate))
        )
        return linear(block, inner, "down")
    if uses_liger_gate:
        inner = liger_gate(block.tape, linear(block, x, "gate"), linear(block, x, "up"), copies_inputs=False)
    else:
        inner = block.multiply(_activate(block, linear(block, x, "gate")), linear(block, x, "up"))
    return linear(block, inner, "down")


def _activate(block: ForwardPass, x: TensorRef) -> TensorRef:
    return block.tape.op((x,), x.elements, x.itemsize, saved=(x,))
