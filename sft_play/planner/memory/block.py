"""One decoder block as transformers, PEFT and bitsandbytes run it, and the tail of the step (last
norm, output head, loss), on sizes: what each keeps, and its peaks.

The parts follow the forward of transformers' decoder blocks (models/*/modeling_*.py), of PEFT's
LoRA layers (peft/tuners/lora/{layer,bnb,dora,variants}.py) and of bitsandbytes' 4-bit product,
line by line where lines differ in bytes: here the feed-forward part, self-attention, the block and
the head; linear layers and other operations are those of a `tape`, which records them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from sft_play.planner.memory.structure import NF4_BLOCK, BlockSpec, segment_remainder
from sft_play.planner.memory.tape import (
    ForwardPass,
    Grads,
    Node,
    Tape,
    TensorRef,
    liger_gate,
    liger_rotation,
    linear,
    norm,
    round_up,
    separate_gradients,
    shared_gradient,
    single_gradient,
)

# The feed-forward part of a block on sizes: a dense MLP, or a mixture of experts.


def mlp(block: ForwardPass, x: TensorRef) -> TensorRef:
    """The feed-forward part: the dense MLP, or experts beside a shared one."""
    if block.spec.num_experts:
        routed = _routed_experts(block, x)
        return block.add(routed, _dense_mlp(block, x)) if "down" in block.linears else routed
    return _dense_mlp(block, x)


def _routed_experts(block: ForwardPass, x: TensorRef) -> TensorRef:
    """Routed experts, line by line as `grouped_mm_experts_forward` (transformers,
    integrations/moe.py). Which expert gets a token does not change these bytes; one expert after
    another holds no more, except for gradients of the weights."""
    spec, rows = block.spec, block.tokens * block.spec.experts_per_token
    inner_elements = rows * spec.expert_width
    probabilities = block.tape.op((x,), block.tokens * spec.num_experts, 4, holds_output=True)
    # routing has T * k elements
    routing = block.tape.op((probabilities,), rows, 4 if spec.routes_in_fp32 else x.itemsize)
    del probabilities
    indices = block.tape.new(rows, 8)
    gathered = block.tape.op(
        (x,),
        rows * spec.hidden,
        x.itemsize,
        saved=(indices,),
        backward=block.index_backward(x, rows),
    )
    # what the block reads dequantised or with an adapter, once, until its experts have run
    weights_in_use: list[TensorRef] = []
    gate_up = _grouped_linear(
        block, gathered, 0, spec.hidden, 2 * spec.expert_width, weights_in_use
    )
    # biases are gathered row by row before the product, and the name lives until the next ones
    # replace it
    bias = block.tape.new(gate_up.elements, gate_up.itemsize) if spec.has_expert_bias else None
    halves = block.split(gate_up, inner_elements, inner_elements)
    inner = _clamped_gate(block, halves) if spec.clamps_gate else _gate(block, halves)
    del gate_up  # the caller of the gate keeps its input
    out = _grouped_linear(block, inner, -1, spec.expert_width, spec.hidden, weights_in_use)
    del inner
    if bias is not None:
        bias = block.tape.new(out.elements, out.itemsize)
    # rows times their weights, in the wider dtype; the weights' gradient is the sum of a product of
    # its size
    itemsize = max(out.itemsize, routing.itemsize)
    size, e, routing_itemsize = out.elements, out.itemsize, routing.itemsize

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        gradient = tape.cast(tape.new(size, itemsize), e)
        tape.meter.add_transient(size * itemsize)
        return (gradient, tape.new(rows, routing_itemsize))

    weighted = block.tape.op(
        (out, routing), size, itemsize, saved=(out, routing), backward=backward
    )
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
    combined = block.tape.op(
        (ordered,),
        x.elements,
        ordered.itemsize,
        backward=single_gradient(ordered.elements, ordered.itemsize),
    )
    del ordered, bias, gathered
    combined = block.to(combined, x.itemsize)
    weights_in_use.clear()
    return combined


def _grouped_linear(
    block: ForwardPass,
    x: TensorRef,
    tensor_index: int,
    inputs: int,
    outputs: int,
    weights_in_use: list[TensorRef],
) -> TensorRef:
    """Rows times the matrices of their experts; a trained weight holds its input. fp32 weights are
    cast to autocast's dtype by training/prepare/experts.py, and the copy is held for x's gradient,
    as is a weight that was dequantised (training/model/nf4_experts.py) or to which an adapter was
    added (PEFT's ParamWrapper).
    """
    spec, autocast_itemsize = block.spec, block.spec.element_bytes.autocast
    elements, weight_itemsize = spec.num_experts * inputs * outputs, spec.element_bytes.weights
    # experts of a block that a tensor-parallel rank shares have fewer elements than the whole
    # tensor
    tensor_elements, adapter_params = (
        spec.expert_tensors[tensor_index] if spec.expert_tensors else (elements, 0)
    )
    adapter_params = adapter_params * elements // max(1, tensor_elements)
    x = block.to_autocast(x)
    trains_weight = spec.trains_weights or adapter_params > 0
    saved = [x] * (trains_weight or spec.uses_grouped_mm_fallback)
    weight = None
    if spec.has_nf4_experts and spec.expert_tensors:
        weight = block.tape.new(elements, weight_itemsize)
        # its absmax in fp32 while it is dequantised
        block.tape.meter.add_transient(2 * 4 * math.ceil(elements / NF4_BLOCK))
    if adapter_params:
        # both factors in the weight's dtype, held by their product, which is added to the weight
        factors = (
            []
            if weight_itemsize == spec.element_bytes.adapters
            else [block.tape.new(adapter_params, weight_itemsize)]
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
            # the sum's gradient, from which products make the factors'
            sum_gradient = tape.cast(
                tape.new(elements, autocast_itemsize or weight_itemsize), weight_itemsize
            )
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
    """gpt-oss: (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)) (modeling_gpt_oss.py,
    `_apply_gate`)."""
    gate, up = (
        block.tape.op((half,), half.elements, half.itemsize, saved=(half,)) for half in halves
    )
    halves.clear()
    activated = block.scale(gate)
    activated = block.tape.op(
        (activated,), activated.elements, activated.itemsize, holds_output=True
    )
    activated = block.multiply(gate, activated)
    shifted_up = block.tape.op((up,), up.elements, up.itemsize, backward=shared_gradient(1))
    return block.multiply(shifted_up, activated)


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
        inner = liger_gate(
            block.tape, linear(block, x, "gate"), linear(block, x, "up"), copies_inputs=False
        )
    else:
        inner = block.multiply(_activate(block, linear(block, x, "gate")), linear(block, x, "up"))
    return linear(block, inner, "down")


def _activate(block: ForwardPass, x: TensorRef) -> TensorRef:
    return block.tape.op((x,), x.elements, x.itemsize, saved=(x,))


# --------------------------------------------------------------------------------------------------
# Self-attention on sizes: projections, rotation, and the kernel that runs.
#
# Shapes: q (B, a, S, head_dim), k and v (B, kv heads, S, head_dim), scores (B, a, S, S).


def attention(block: ForwardPass, x: TensorRef) -> TensorRef:
    """Self-attention with its projections."""
    q, k, v = _query_key_value(block, x)
    q, k = _rotate_query_key(block, q, k)
    out = _attend(block, q, k, v)
    is_head_major = block.spec.concatenates_rotary and not _rotates_in_place(block)
    if is_head_major and block.spec.kernel in ("flash", "cudnn") and not block.spec.one_by_one:
        # torch.cat left q contiguous head by head; both kernels lay their output out as q, and
        # reshaping it copies
        out = block.tape.op((out,), out.elements, out.itemsize)
    return linear(block, out, "o")


def _query_key_value(block: ForwardPass, x: TensorRef) -> tuple[TensorRef, TensorRef, TensorRef]:
    spec = block.spec
    q_size = spec.heads * spec.head_dim * block.tokens
    kv_size = spec.kv_heads * spec.head_dim * block.tokens
    if "qkv" in block.linears:
        qkv = linear(block, x, "qkv")
        q, k, v = block.split(qkv, q_size, kv_size, qkv.elements - q_size - kv_size)
    else:
        q, k, v = linear(block, x, "q"), linear(block, x, "k"), linear(block, x, "v")
    if spec.qk_norm:
        q = norm(block, q, is_head_norm=True)
        k = norm(block, k, is_head_norm=True)
    return q, k, v


def _rotates_in_place(block: ForwardPass) -> bool:
    return block.spec.liger is not None and block.spec.liger.replaces_rotation


def _rotate_query_key(
    block: ForwardPass, q: TensorRef, k: TensorRef
) -> tuple[TensorRef, TensorRef]:
    spec = block.spec
    if not spec.partial_rotary_factor:
        return q, k
    if _rotates_in_place(block):
        copies_input, copies_gradient = "qkv" in block.linears, spec.kernel == "eager"
        sums_groups = spec.heads != spec.kv_heads and (
            spec.kernel == "efficient" or _is_masked_cudnn(spec)
        )
        q = liger_rotation(
            block.tape, q, copies_input=copies_input, copies_gradient=copies_gradient
        )
        return q, liger_rotation(
            block.tape, k, copies_input=copies_input, copies_gradient=copies_gradient or sums_groups
        )
    rotated_q = _rotate(block, q)
    k = _rotate(block, k)
    return rotated_q, k  # the plain q lives until k is turned too, as in apply_rotary_pos_emb


def _is_masked_cudnn(spec: BlockSpec) -> bool:
    """True for cuDNN's kernel behind a mask: transformers repeats keys and values for it."""
    return spec.kernel == "cudnn" and spec.masked


def _rotate(block: ForwardPass, x: TensorRef) -> TensorRef:
    """x * cos + rotate_half(x) * sin: two more tensors of its size while it runs, forwards and
    backwards."""
    block.tape.meter.add_transient(3 * x.nbytes)
    return block.tape.op(
        (x,),
        x.elements,
        x.itemsize,
        backward=single_gradient(x.elements, x.itemsize, transient=2 * x.nbytes),
        holds_weight=True,
    )


def _attend(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    kernel = block.spec.kernel
    q, k, v = (block.to_autocast(ref) for ref in (q, k, v))
    if block.spec.one_by_one:
        return _attend_one_by_one(block, q, k, v)
    if kernel == "flash":
        return _flash_attention(block, q, k, v)
    if kernel == "varlen":
        return _varlen_attention(block, q, k, v)
    groups = block.spec.heads // block.spec.kv_heads
    if groups > 1 and (kernel != "cudnn" or _is_masked_cudnn(block.spec)):
        k, v = _repeat_heads(block, k, groups), _repeat_heads(block, v, groups)
    if kernel == "cudnn":
        return _cudnn_attention(block, q, k, v)
    return (
        _eager_attention(block, q, k, v)
        if kernel == "eager"
        else _efficient_attention(block, q, k, v)
    )


def _repeat_heads(block: ForwardPass, x: TensorRef, groups: int) -> TensorRef:
    """K or V for all query heads: a copy whose gradient is summed back; of a single head a view is
    enough."""
    if block.spec.kv_heads == 1 and block.spec.kernel in ("efficient", "cudnn"):
        return _view_with_separate_gradient(block, x)
    return block.tape.op((x,), x.elements * groups, x.itemsize)


def _view_with_separate_gradient(block: ForwardPass, x: TensorRef) -> TensorRef:
    out = block.tape.view(x)
    if out.node is not None:
        out.node.backward = separate_gradients(x)
    return out


def _attend_one_by_one(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Call attention once for each chat (training/model/attention_functions.py): keys and values of
    all heads.

    The calls' outputs are held and joined, and so are the gradients of what was divided."""
    groups = block.spec.heads // block.spec.kv_heads
    if groups > 1:
        k, v = (block.tape.op((x,), x.elements * groups, x.itemsize) for x in (k, v))
    views = [_view_with_separate_gradient(block, tensor) for tensor in (q, k, v)]
    del q, k, v
    is_flash = block.spec.kernel == "flash" and not block.spec.masked
    out = _flash_attention(block, *views) if is_flash else _efficient_attention(block, *views)
    views.clear()
    return block.tape.op((out,), out.elements, out.itemsize, backward=shared_gradient(1))


def _tokens_per_call(block: ForwardPass) -> int:
    return block.length if block.spec.one_by_one else block.tokens


def _flash_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Flash attention (transformers/cuda/flash_attn): holds q, k, v, its output and a logsumexp in
    fp32."""
    spec, itemsize, tokens = block.spec, q.itemsize, _tokens_per_call(block)
    rows = tokens // block.length * spec.heads * round_up(block.length, 128)
    # backward: softmax_d and dq_accum in fp32 (flash_api.cpp, mha_bwd; trace/kernels.py counts the
    # same)
    backward_bytes = 4 * rows + 4 * rows * round_up(spec.head_dim, 32)
    if spec.heads != spec.kv_heads and not spec.one_by_one:
        # dk and dv of all query heads, before they are summed to the grouped ones
        backward_bytes += 2 * tokens * spec.heads * round_up(spec.head_dim, 8) * itemsize
    return _fused_attention(block, q, k, v, backward_bytes)


def _varlen_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Flash attention on padded rows (transformers, `_upad_input`, `_pad_input`): it holds copies
    of q, k, v without padding and their indices; its output is scattered into a tensor of the
    rows."""
    indices = block.tape.new(block.tokens, 8)
    k, v = _gather(block, k, indices), _gather(block, v, indices)
    q = _gather(block, q, indices)
    out = _flash_attention(block, q, k, v)
    return block.tape.op((out,), out.elements, out.itemsize, saved=(indices,))


def _gather(block: ForwardPass, x: TensorRef, indices: TensorRef) -> TensorRef:
    return block.tape.op(
        (x,),
        x.elements,
        x.itemsize,
        saved=(indices,),
        backward=block.index_backward(x, block.tokens),
    )


def _efficient_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Memory-efficient attention: like flash, and also holds the mask as a bias in the compute
    dtype."""
    spec, call_tokens = block.spec, _tokens_per_call(block)
    bias = None
    if spec.masked:
        mask_elements = block.batch * block.length * round_up(block.length, 8)
        # rows of the mask are padded to a multiple of 8 (attention.cpp, preprocess_mask)
        block.tape.meter.add_transient(mask_elements * (1 + q.itemsize))
        bias = block.tape.new(mask_elements, q.itemsize)
    backward_bytes = 4 * call_tokens * spec.heads  # backward: delta in fp32 (attention_backward.cu)
    if q.itemsize == 2 and spec.head_dim > 64:  # and fp32 sums of dk and dv
        backward_bytes += 8 * call_tokens * spec.heads * round_up(spec.head_dim, 32)
    return _fused_attention(block, q, k, v, backward_bytes, bias)


def _cudnn_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """cuDNN's attention (native/cudnn/MHA.cpp): holds what flash attention does, and a mask as a
    bias, neither padded nor expanded."""
    spec, bias = block.spec, None
    if spec.masked:
        mask_elements = block.batch * block.length**2
        block.tape.meter.add_transient(mask_elements * (1 + q.itemsize))
        bias = block.tape.new(mask_elements, q.itemsize)
    # backward: sums of dO * O and dq in fp32 (cudnn-frontend, scaled_dot_product_flash_attention.h)
    backward_bytes = 4 * block.tokens * spec.heads * (1 + spec.head_dim)
    # dk and dv of all query heads, before they are summed
    if spec.heads != spec.kv_heads and not spec.masked:
        backward_bytes += 2 * block.tokens * spec.heads * spec.head_dim * q.itemsize
    return _fused_attention(block, q, k, v, backward_bytes, bias)


def _fused_attention(
    block: ForwardPass,
    q: TensorRef,
    k: TensorRef,
    v: TensorRef,
    backward_bytes: int,
    bias: TensorRef | None = None,
) -> TensorRef:
    """One kernel for scores, softmax and their product with V; `backward_bytes`: within its
    backward kernel."""
    spec = block.spec
    statistics = block.tape.new(block.tokens * spec.heads, 4)
    make_gradients = separate_gradients(q, k, v)

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = make_gradients(tape, grad)
        tape.meter.add_transient(backward_bytes)
        return out

    saved = [one for one in (q, k, v, statistics, bias) if one is not None]
    return block.tape.op(
        (q, k, v),
        block.tokens * spec.heads * spec.head_dim,
        q.itemsize,
        saved=saved,
        backward=backward,
        holds_output=True,
    )


def _score_elements(block: ForwardPass) -> int:
    return block.batch * block.spec.heads * block.length * block.length


def _softmax(block: ForwardPass, scores: TensorRef) -> TensorRef:
    """Softmax: holds its output; the backward kernel computes grad * output first (SoftMax.cu)."""
    size, itemsize = scores.elements, scores.itemsize

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        tape.meter.add_transient(2 * size * itemsize)
        return (tape.new(size, itemsize),)

    return block.tape.op((scores,), size, itemsize, backward=backward, holds_output=True)


def _sink_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Attention of gpt-oss (modeling_gpt_oss.py, eager_attention_forward): a column joins the
    scores, their maximum is taken off, and the softmax stays in the compute dtype."""
    itemsize = q.itemsize
    scores = block.scale(block.tape.op((q, k), _score_elements(block), itemsize, saved=(q, k)))
    scores = block.tape.op((scores,), scores.elements, itemsize, backward=shared_gradient(1))
    size = scores.elements + scores.elements // block.length
    sink_scores = block.tape.op((scores,), size, itemsize, backward=shared_gradient(1))

    # -grad is summed for the maximum, whose own gradient is scattered into zeros and added
    maximum_backward = single_gradient(
        size, itemsize, transient=size * itemsize + segment_remainder(size * itemsize)
    )
    sink_scores = block.tape.op((sink_scores,), size, itemsize, backward=maximum_backward)

    probabilities = _softmax(block, sink_scores)
    del scores, sink_scores
    token_probabilities = block.tape.view(
        probabilities, probabilities.elements * block.length // (block.length + 1)
    )
    if token_probabilities.node is not None:
        # zeros of the whole, into which it is copied
        token_probabilities.node.backward = single_gradient(size, itemsize)
    return _weight_values(block, token_probabilities, v)


def _weight_values(block: ForwardPass, scores: TensorRef, v: TensorRef) -> TensorRef:
    return block.tape.op(
        (scores, v),
        block.tokens * block.spec.heads * block.spec.head_dim,
        v.itemsize,
        saved=(scores, v),
    )


def _eager_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """eager_attention_forward: S x S scores per head in the compute dtype, probabilities in fp32
    and cast."""
    itemsize = q.itemsize
    if block.spec.has_sinks:
        return _sink_attention(block, q, k, v)
    scores = block.scale(block.tape.op((q, k), _score_elements(block), itemsize, saved=(q, k)))
    if block.spec.has_softcap:
        scores = block.scale(scores)
        scores = block.tape.op((scores,), scores.elements, itemsize, holds_output=True)
        scores = block.scale(scores)
    scores = block.tape.op((scores,), scores.elements, itemsize, backward=shared_gradient(1))
    if itemsize != 4:
        wide = block.to(scores, 4)
        out = _softmax(block, wide)
        del wide
        scores = block.to(out, itemsize)
        del out
    else:
        scores = _softmax(block, scores)
    return _weight_values(block, block.dropout(scores, block.spec.attention_dropout), v)


# --------------------------------------------------------------------------------------------------
# One block, forwards and backwards: what it keeps, and its peaks.


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one block, or of the tail, in a step, above what is held before it. The peaks
    include its input and, in the backward pass, the gradient of its output."""

    forward: int
    # Held from its forward to its backward pass; without its own input, unless an operation holds
    # it.
    saved: int = 0
    backward: int = 0
    # Gradients of its parameters that stay, where there were none before; `backward` includes them.
    gradients: int = 0
    # Half-precision copies of fp32 parameters that autocast keeps until the forward pass ends,
    # where the block is computed again.
    cast: int = 0
    # Of the backward peak: the NF4 weight that is dequantised at that moment.
    rebuilt: int = 0
    # Its input, where only a checkpoint keeps it.
    input: int = 0

    @property
    def offloaded(self) -> LayerBytes:
        """The same block where its kept bytes are in RAM, and come back for its backward pass."""
        return replace(self, saved=0, backward=self.backward + self.saved)


@dataclass(frozen=True)
class BlockBytes:
    """A block's bytes for one batch, with its copies of fp32 parameters however it is computed."""

    layer: LayerBytes
    # Bytes of an element of its output.
    output_itemsize: int
    # The peak of recomputing the forward: it starts when the backward pass first needs what was
    # held, and ends at the last tensor that is held.
    recompute_peak: int = 0


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
    """Bytes that one block takes for `batch` sequences of `length` tokens; its input's elements
    have `itemsize` bytes."""
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
    unheld_input = size * itemsize * (not storage.handles)
    cast_bytes = sum(ref.nbytes for ref in block.cast_weights.values())
    block.cast_weights.clear()
    if node is None:  # nothing trains up to this block
        return BlockBytes(LayerBytes(forward_bytes, cast=cast_bytes), grad_size[1])
    kept_bytes = tape.meter.live  # with the input, if an operation holds it
    backward_bytes = _backward_peak(tape, node, grad_size)
    # gradients that are there when the forward runs again, and its peak until the last tensor is
    # held
    recompute_peak = recompute_end + tape.live_at_first_use - kept_bytes
    gradient_bytes = sum(ref.nbytes for ref in block.gradients)
    return BlockBytes(
        LayerBytes(
            forward_bytes,
            kept_bytes,
            backward_bytes,
            gradient_bytes,
            cast_bytes,
            tape.meter.dequantised,
            unheld_input,
        ),
        grad_size[1],
        recompute_peak,
    )


def _backward_peak(tape: Tape, node: Node, size: tuple[int, int]) -> int:
    grad = tape.new(*size)
    tape.meter.reset_peak()
    tape.backward(node, grad)
    return tape.meter.peak


@lru_cache(maxsize=8192)
def lone_forward(
    spec: BlockSpec, *, batch: int, length: int, itemsize: int, training: bool
) -> LayerBytes:
    """The block's forward pass where nothing is held, in evaluation or before a checkpoint: its
    peak, including its input, and autocast's copies of fp32 weights, which stay."""
    tape = Tape(grad_enabled=False)
    block = ForwardPass(tape, spec, batch, length, is_accumulating=False, training=training)
    x = tape.new(batch * length * spec.hidden, itemsize)
    _run_block(block, x)
    cast_bytes = sum(ref.nbytes for ref in block.cast_weights.values())
    return LayerBytes(tape.meter.peak, cast=cast_bytes)


# --------------------------------------------------------------------------------------------------
# The tail of a step: the last norm, the output head and the loss.

# What computes the loss: TRL's chunked head; this toolkit over whole logits, for classes whose
# logits TRL's head does not compute; the class's own loss, as other scripts take it (benchmarks).
LossName = Literal["chunked", "logits", "model"]
# Of trl/kernels/chunked_logprob.py at TRL 1.16.0, whose lines are given.
TOKEN_TILE = 4_096
# Tokens and words whose logits TRL's chunked head holds at once (line 32; trainer/utils.py:1507).
# The tile is a full one however small the vocabulary is (line 313).
VOCAB_TILE = 32_768
# fp32 numbers per token into which it reduces tiles (lines 306 to 312).
STATISTICS_PER_TOKEN = 7
# Bytes per element of a tile beside it where no Triton kernel reads it (line 66): the logits in
# fp32, which words come before the label (a byte), and at most two more of fp32, such as `e` and `e
# * z` (`_forward_tile`, lines 231 to 247).
CPU_FORWARD_BYTES = 13
# The same backward: `y`, `z`, `log_p`, `p`, `grad`, `is_target` (a byte) and two more of fp32
# (`_backward_tile`, lines 259 to 281); `t` where logits are capped.
CPU_BACKWARD_BYTES, CPU_CAP_BYTES = 29, 4


@dataclass(frozen=True)
class OutputHead:
    """The output head: words, whether its weight trains, bytes of an element of the weight, whether
    only rows of it train, and whether its logits are capped. Rows train in a copy of the table that
    autograd holds; the copy's gradient is freed at once."""

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
    """Bytes of the tail for `batch` full rows of `length` tokens, all scored but the first
    token."""
    tape = Tape(grad_enabled=needs_gradient)
    tail = ForwardPass(tape, spec, batch, length, is_accumulating=is_accumulating)
    # the model's own forward keeps no other name for it
    x = norm(tail, tape.leaf(batch * length * spec.hidden, itemsize))
    out = (
        _chunked_loss(tail, x, head, on_gpu=on_gpu)
        if loss == "chunked"
        else LOSS_FUNCTIONS[loss](tail, x, head)
    )
    forward_bytes = tape.meter.peak
    del x
    node = out.node
    if not needs_gradient or node is None:
        return LayerBytes(forward_bytes)
    elements = out.elements
    del out
    kept_bytes = tape.meter.live
    # the loss is fp32, whatever the logits are
    backward_bytes = _backward_peak(tape, node, (elements, 4))
    return LayerBytes(
        forward_bytes, kept_bytes, backward_bytes, sum(ref.nbytes for ref in tail.gradients)
    )


def _chunked_loss(tail: ForwardPass, x: TensorRef, head: OutputHead, *, on_gpu: bool) -> TensorRef:
    """TRL's chunked head on the N scored tokens: a tile of logits and seven numbers per token.
    Forward: the rows N*h*e, 28N, the tile. Backward: fp32 gradients of the rows (4*N*h) and, where
    the head trains, of the whole weight (4*V*h), each cast at the end (N*h*e, V*h*w) unless that is
    fp32. Rows and weights of another width are cast by tile. Where there is no Triton, as on a CPU,
    torch's operators read each tile, and hold several more of its size.
    """
    tape, hidden = tail.tape, tail.spec.hidden
    scored_tokens = max(1, tail.batch * (tail.length - 1))
    compute_itemsize = tail.spec.element_bytes.autocast or x.itemsize
    makes_weight_gradient = head.trainable or head.trains_rows
    saved_table = (
        (tape.new(head.vocab_size * hidden, head.weight_itemsize),) if head.trains_rows else ()
    )
    tokens, vocab_columns = min(scored_tokens, TOKEN_TILE), min(VOCAB_TILE, head.vocab_size)
    # of a tile that is wider than the vocabulary a CPU process has the pages that it touches
    tile_bytes = tokens * (VOCAB_TILE if on_gpu else vocab_columns) * compute_itemsize
    # beside a tile, which its gradient overwrites in the backward pass: its rows and weights in the
    # tile's dtype
    cast_bytes = (
        vocab_columns * hidden * compute_itemsize * (head.weight_itemsize != compute_itemsize)
    )
    forward_bytes = backward_bytes = cast_bytes
    if not on_gpu:
        forward_bytes = max(cast_bytes, CPU_FORWARD_BYTES * tokens * vocab_columns)
        # gradients in fp32 are products of fp32 copies (`_addmm_fp32`, lines 78 and 79)
        larger_side = max(vocab_columns, tokens) if makes_weight_gradient else vocab_columns
        copied_elements = (tokens * vocab_columns + hidden * larger_side) * (compute_itemsize != 4)
        backward_bytes += max(
            (CPU_BACKWARD_BYTES + CPU_CAP_BYTES * head.caps_logits) * tokens * vocab_columns,
            4 * copied_elements,
        )
    # in the backward pass the next tile's weights are cast while this one's are still held (line
    # 423)
    if cast_bytes:
        next_columns = min(head.vocab_size - vocab_columns, VOCAB_TILE) or vocab_columns * (
            scored_tokens > TOKEN_TILE
        )
        backward_bytes = max(backward_bytes, cast_bytes + next_columns * hidden * compute_itemsize)
    tile_bytes += tokens * hidden * compute_itemsize * (x.itemsize != compute_itemsize)
    e = x.itemsize
    # a GPU indexes out the rows that are scored, so padding and prompts cost no logits; a CPU
    # scores all tokens, of several rows in a copy (trainer/utils.py:1642 to 1645)
    index_backward = single_gradient(x.elements, e, transient=x.nbytes * on_gpu)
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
            gradient = tape.cast(weight_gradient, head.weight_itemsize)
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
    """Whole logits, as the loss over a class's own logits reads them (`training.model.fused_head`).

    Log-probabilities in fp32 of all but the last token, then the entropy, row by row. Backward
    12*T*V, then T*V*e.
    """
    tape, logits_elements = tail.tape, tail.batch * tail.length * head.vocab_size
    scored_tokens = max(1, tail.batch * (tail.length - 1))
    scored_elements = scored_tokens * head.vocab_size
    logits = tail.dense(
        x, "head", tail.spec.hidden, head.vocab_size, head.weight_itemsize, trainable=head.trainable
    )
    # an fp32 copy; of a part of fp32 logits, log_softmax makes one itself
    if logits.itemsize != 4 or tail.batch > 1:
        tape.meter.add_transient(2 * 4 * scored_elements)
    # the zeros of `gather` and the gradient of log_softmax are gone where that of the logits has
    # its width
    backward = single_gradient(
        logits_elements,
        logits.itemsize,
        transient=2 * 4 * scored_elements - logits_elements * logits.itemsize,
    )
    log_probabilities = tape.op((logits,), scored_elements, 4, backward=backward, holds_output=True)
    tape.meter.add_transient(2 * 4 * scored_elements // tail.batch)
    return tape.op((log_probabilities,), scored_tokens, 4, backward=shared_gradient(1))


# What takes the loss of whole logits; benchmarks add that of other scripts.
LOSS_FUNCTIONS: dict[str, Callable[[ForwardPass, TensorRef, OutputHead], TensorRef]] = {
    "logits": _logits_loss
}
