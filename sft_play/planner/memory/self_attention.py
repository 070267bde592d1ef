"""Self-attention on sizes: projections, rotation, and the kernel that runs.

Shapes: q (B, a, S, head_dim), k and v (B, kv heads, S, head_dim), scores (B, a, S, S).
"""

from __future__ import annotations

from sft_play.planner.memory.linear import linear, norm
from sft_play.planner.memory.operations import ForwardPass, liger_rotation, round_up
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.memory.tape import Grads, Tape, TensorRef, separate_gradients, shared_gradient, single_gradient


def attention(block: ForwardPass, x: TensorRef) -> TensorRef:
    """Self-attention with its projections."""
    q, k, v = _query_key_value(block, x)
    q, k = _rotate_query_key(block, q, k)
    out = _attend(block, q, k, v)
    is_head_major = block.spec.concatenates_rotary and not _rotates_in_place(block)
    if is_head_major and block.spec.kernel in ("flash", "cudnn") and not block.spec.one_by_one:
        # torch.cat left q contiguous head by head; both kernels lay their output out as q, and reshaping it copies
        out = block.tape.op((out,), out.elements, out.itemsize)
    return linear(block, out, "o")


def _query_key_value(block: ForwardPass, x: TensorRef) -> tuple[TensorRef, TensorRef, TensorRef]:
    spec = block.spec
    q_size, kv_size = spec.heads * spec.head_dim * block.tokens, spec.kv_heads * spec.head_dim * block.tokens
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


def _rotate_query_key(block: ForwardPass, q: TensorRef, k: TensorRef) -> tuple[TensorRef, TensorRef]:
    spec = block.spec
    if not spec.partial_rotary_factor:
        return q, k
    if _rotates_in_place(block):
        copies_input, copies_gradient = "qkv" in block.linears, spec.kernel == "eager"
        sums_groups = spec.heads != spec.kv_heads and (spec.kernel == "efficient" or _is_masked_cudnn(spec))
        q = liger_rotation(block.tape, q, copies_input=copies_input, copies_gradient=copies_gradient)
        return q, liger_rotation(
            block.tape, k, copies_input=copies_input, copies_gradient=copies_gradient or sums_groups
        )
    rotated_q = _rotate(block, q)
    k = _rotate(block, k)
    return rotated_q, k  # the plain q lives until k is turned too, as in apply_rotary_pos_emb


def _is_masked_cudnn(spec: BlockSpec) -> bool:
    """cuDNN's kernel behind a mask, for which transformers repeats keys and values."""
    return spec.kernel == "cudnn" and spec.masked


def _rotate(block: ForwardPass, x: TensorRef) -> TensorRef:
    """x * cos + rotate_half(x) * sin: two more tensors of its size while it runs, forwards and backwards."""
    block.tape.meter.add_transient(3 * x.nbytes)
    backward = single_gradient(x.elements, x.itemsize, transient=2 * x.nbytes)
    return block.tape.op((x,), x.elements, x.itemsize, backward=backward, holds_weight=True)


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
    return _eager_attention(block, q, k, v) if kernel == "eager" else _efficient_attention(block, q, k, v)


def _repeat_heads(block: ForwardPass, x: TensorRef, groups: int) -> TensorRef:
    """K or V for all query heads: a copy whose gradient is summed back; of a single head a view is enough."""
    if block.spec.kv_heads == 1 and block.spec.kernel in ("efficient", "cudnn"):
        return _view_with_separate_gradient(block, x)
    return block.tape.op((x,), x.elements * groups, x.itemsize)


def _view_with_separate_gradient(block: ForwardPass, x: TensorRef) -> TensorRef:
    out = block.tape.view(x)
    if out.node is not None:
        out.node.backward = separate_gradients(x)
    return out


def _attend_one_by_one(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """A call for each chat (training/model/varlen.py): keys and values of all heads; the calls' outputs are held and
    joined, and so are the gradients of what was divided."""
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
    """Flash attention (transformers/cuda/flash_attn): holds q, k, v, its output and a logsumexp in fp32."""
    spec, itemsize, tokens = block.spec, q.itemsize, _tokens_per_call(block)
    rows = tokens // block.length * spec.heads * round_up(block.length, 128)
    # backward: softmax_d and dq_accum in fp32 (flash_api.cpp, mha_bwd; trace/kernels.py counts the same)
    backward_bytes = 4 * rows + 4 * rows * round_up(spec.head_dim, 32)
    if spec.heads != spec.kv_heads and not spec.one_by_one:
        # dk and dv of all query heads, before they are summed to the grouped ones
        backward_bytes += 2 * tokens * spec.heads * round_up(spec.head_dim, 8) * itemsize
    return _fused_attention(block, q, k, v, backward_bytes)


def _varlen_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Flash attention on padded rows (transformers, `_upad_input`, `_pad_input`): it holds copies of q, k, v
    without padding and their indices; its output is scattered into a tensor of the rows."""
    indices = block.tape.new(block.tokens, 8)
    k, v = _gather(block, k, indices), _gather(block, v, indices)
    q = _gather(block, q, indices)
    out = _flash_attention(block, q, k, v)
    return block.tape.op((out,), out.elements, out.itemsize, saved=(indices,))


def _gather(block: ForwardPass, x: TensorRef, indices: TensorRef) -> TensorRef:
    return block.tape.op((x,), x.elements, x.itemsize, saved=(indices,), backward=block.index_backward(x, block.tokens))


def _efficient_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """Memory-efficient attention: like flash, and also holds the mask as a bias in the compute dtype."""
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
    """cuDNN's attention (native/cudnn/MHA.cpp): holds what flash attention does, and a mask as a bias, neither padded
    nor expanded."""
    spec, bias = block.spec, None
    if spec.masked:
        mask_elements = block.batch * block.length**2
        block.tape.meter.add_transient(mask_elements * (1 + q.itemsize))
        bias = block.tape.new(mask_elements, q.itemsize)
    # backward: sums of dO * O and dq in fp32 (cudnn-frontend, scaled_dot_product_flash_attention.h)
    backward_bytes = 4 * block.tokens * spec.heads * (1 + spec.head_dim)
    if spec.heads != spec.kv_heads and not spec.masked:  # dk and dv of all query heads, before they are summed
        backward_bytes += 2 * block.tokens * spec.heads * spec.head_dim * q.itemsize
    return _fused_attention(block, q, k, v, backward_bytes, bias)


def _fused_attention(
    block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef, backward_bytes: int, bias: TensorRef | None = None
) -> TensorRef:
    """One kernel for scores, softmax and their product with V; `backward_bytes`: within its backward kernel."""
    spec = block.spec
    statistics = block.tape.new(block.tokens * spec.heads, 4)
    make_gradients = separate_gradients(q, k, v)

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = make_gradients(tape, grad)
        tape.meter.add_transient(backward_bytes)
        return out

    saved = [q, k, v, statistics] + ([bias] if bias is not None else [])
    elements = block.tokens * spec.heads * spec.head_dim
    return block.tape.op((q, k, v), elements, q.itemsize, saved=saved, backward=backward, holds_output=True)


def _score_elements(block: ForwardPass) -> int:
    return block.batch * block.spec.heads * block.length * block.length


def _softmax(block: ForwardPass, scores: TensorRef) -> TensorRef:
    """Holds its output; the backward kernel takes grad * output first (SoftMax.cu)."""
    size = scores.elements

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        tape.meter.add_transient(2 * size * 4)
        return (tape.new(size, 4),)

    return block.tape.op((scores,), size, 4, backward=backward, holds_output=True)


def _sink_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """gpt-oss (modeling_gpt_oss.py, eager_attention_forward): a column joins the scores, their maximum is taken off,
    and the softmax stays in the compute dtype."""
    itemsize = q.itemsize
    scores = block.scale(block.tape.op((q, k), _score_elements(block), itemsize, saved=(q, k)))
    scores = block.tape.op((scores,), scores.elements, itemsize, backward=shared_gradient(1))
    size = scores.elements + scores.elements // block.length
    sink_scores = block.tape.op((scores,), size, itemsize, backward=shared_gradient(1))

    def maximum_backward(tape: Tape, grad: TensorRef) -> Grads:
        # -grad is summed for the maximum, whose own gradient is scattered into zeros and added
        tape.meter.add_transient(size * itemsize)
        scattered = tape.new(size, itemsize)
        out = tape.new(size, itemsize)
        del scattered
        return (out,)

    sink_scores = block.tape.op((sink_scores,), size, itemsize, backward=maximum_backward)

    def softmax_backward(tape: Tape, grad: TensorRef) -> Grads:
        tape.meter.add_transient(2 * size * itemsize)
        return (tape.new(size, itemsize),)

    probabilities = block.tape.op((sink_scores,), size, itemsize, backward=softmax_backward, holds_output=True)
    del scores, sink_scores
    token_probabilities = block.tape.view(probabilities, probabilities.elements * block.length // (block.length + 1))
    if token_probabilities.node is not None:
        # zeros of the whole, into which it is copied
        token_probabilities.node.backward = single_gradient(size, itemsize)
    return _weight_values(block, token_probabilities, v)


def _weight_values(block: ForwardPass, scores: TensorRef, v: TensorRef) -> TensorRef:
    elements = block.tokens * block.spec.heads * block.spec.head_dim
    return block.tape.op((scores, v), elements, v.itemsize, saved=(scores, v))


def _eager_attention(block: ForwardPass, q: TensorRef, k: TensorRef, v: TensorRef) -> TensorRef:
    """eager_attention_forward: S x S scores per head in the compute dtype, probabilities in fp32 and cast."""
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
