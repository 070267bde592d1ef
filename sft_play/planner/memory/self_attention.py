"""Self-attention on sizes: projections, rotation, and the kernel that runs.

Shapes: q (B, a, S, head_dim), k and v (B, kv heads, S, head_dim), scores (B, a, S, S).
"""

from __future__ import annotations

from sft_play.planner.memory.linear import linear, norm
from sft_play.planner.memory.operations import Pass, liger_rotation, round_up
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.memory.tape import Grads, Ref, Tape, fresh, one_gradient, shared


def attention(run: Pass, x: Ref) -> Ref:
    """Self-attention with its projections."""
    q, k, v = _query_key_value(run, x)
    q, k = _turned(run, q, k)
    out = _attend(run, q, k, v)
    by_cat = run.spec.rotary_by_cat and not _turns_in_place(run)
    if by_cat and run.spec.kernel in ("flash", "cudnn") and not run.spec.one_by_one:
        # torch.cat left q contiguous head by head; both kernels lay their output out as q, and reshaping it copies
        out = run.tape.op((out,), out.elements, out.width)
    return linear(run, out, "o")


def _query_key_value(run: Pass, x: Ref) -> tuple[Ref, Ref, Ref]:
    spec = run.spec
    q_size, kv_size = spec.heads * spec.head_dim * run.tokens, spec.kv_heads * spec.head_dim * run.tokens
    if "qkv" in run.linears:
        joined = linear(run, x, "qkv")
        q, k, v = run.parts(joined, q_size, kv_size, joined.elements - q_size - kv_size)
    else:
        q, k, v = linear(run, x, "q"), linear(run, x, "k"), linear(run, x, "v")
    if spec.qk_norm:
        q = norm(run, q, of_heads=True)
        k = norm(run, k, of_heads=True)
    return q, k, v


def _turns_in_place(run: Pass) -> bool:
    return run.spec.liger is not None and run.spec.liger.rotation


def _turned(run: Pass, q: Ref, k: Ref) -> tuple[Ref, Ref]:
    spec = run.spec
    if not spec.rotary:
        return q, k
    if _turns_in_place(run):
        copies, by_head = "qkv" in run.linears, spec.kernel == "eager"
        sums = spec.heads != spec.kv_heads and (spec.kernel == "efficient" or _masked_cudnn(spec))
        q = liger_rotation(run.tape, q, copies=copies, copies_gradient=by_head)
        return q, liger_rotation(run.tape, k, copies=copies, copies_gradient=by_head or sums)
    q_turned = _rotated(run, q)
    k = _rotated(run, k)
    return q_turned, k  # the plain q lives until k is turned too, as in apply_rotary_pos_emb


def _masked_cudnn(spec: BlockSpec) -> bool:
    """cuDNN's kernel behind a mask, for which transformers repeats keys and values."""
    return spec.kernel == "cudnn" and spec.masked


def _rotated(run: Pass, x: Ref) -> Ref:
    """x * cos + rotate_half(x) * sin: two more tensors of its size while it runs, forwards and backwards."""
    run.tape.meter.touch(3 * x.nbytes)
    backward = one_gradient(x.elements, x.width, during=2 * x.nbytes)
    return run.tape.op((x,), x.elements, x.width, backward=backward, holds_weight=True)


def _attend(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    kernel = run.spec.kernel
    q, k, v = (run.low(ref) for ref in (q, k, v))
    if run.spec.one_by_one:
        return _one_by_one(run, q, k, v)
    if kernel == "flash":
        return _flash(run, q, k, v)
    if kernel == "varlen":
        return _varlen(run, q, k, v)
    groups = run.spec.heads // run.spec.kv_heads
    if groups > 1 and (kernel != "cudnn" or _masked_cudnn(run.spec)):
        k, v = _repeated(run, k, groups), _repeated(run, v, groups)
    if kernel == "cudnn":
        return _cudnn(run, q, k, v)
    return _eager(run, q, k, v) if kernel == "eager" else _efficient(run, q, k, v)


def _repeated(run: Pass, x: Ref, groups: int) -> Ref:
    """K or V for all query heads: a copy whose gradient is summed back; of a single head a view is enough."""
    if run.spec.kv_heads == 1 and run.spec.kernel in ("efficient", "cudnn"):
        return _view_with_own_gradient(run, x)
    return run.tape.op((x,), x.elements * groups, x.width)


def _view_with_own_gradient(run: Pass, x: Ref) -> Ref:
    out = run.tape.view(x)
    if out.node is not None:
        out.node.backward = fresh(x)
    return out


def _one_by_one(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """A call for each chat (training/model/varlen.py): keys and values of all heads; the calls' outputs are held and
    joined, and so are the gradients of what was divided."""
    groups = run.spec.heads // run.spec.kv_heads
    if groups > 1:
        k, v = (run.tape.op((x,), x.elements * groups, x.width) for x in (k, v))
    parts = [_view_with_own_gradient(run, whole) for whole in (q, k, v)]
    del q, k, v
    is_flash = run.spec.kernel == "flash" and not run.spec.masked
    out = _flash(run, *parts) if is_flash else _efficient(run, *parts)
    parts.clear()
    return run.tape.op((out,), out.elements, out.width, backward=shared(1))


def _at_once(run: Pass) -> int:
    return run.length if run.spec.one_by_one else run.tokens


def _flash(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """Flash attention (transformers/cuda/flash_attn): holds q, k, v, its output and a logsumexp in fp32."""
    spec, width, tokens = run.spec, q.width, _at_once(run)
    rows = tokens // run.length * spec.heads * round_up(run.length, 128)
    # backward: softmax_d and dq_accum in fp32 (flash_api.cpp, mha_bwd; trace/kernels.py counts the same)
    during = 4 * rows + 4 * rows * round_up(spec.head_dim, 32)
    if spec.heads != spec.kv_heads and not spec.one_by_one:
        # dk and dv of all query heads, before they are summed to the grouped ones
        during += 2 * tokens * spec.heads * round_up(spec.head_dim, 8) * width
    return _fused(run, q, k, v, during)


def _varlen(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """Flash attention on padded rows (transformers, `_upad_input`, `_pad_input`): it holds copies of q, k, v
    without padding and their indices; its output is scattered into a tensor of the rows."""
    places = run.tape.new(run.tokens, 8)
    k, v = _gathered(run, k, places), _gathered(run, v, places)
    q = _gathered(run, q, places)
    out = _flash(run, q, k, v)
    return run.tape.op((out,), out.elements, out.width, saved=(places,))


def _gathered(run: Pass, x: Ref, places: Ref) -> Ref:
    return run.tape.op((x,), x.elements, x.width, saved=(places,), backward=run.put_back(x, run.tokens))


def _efficient(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """Memory-efficient attention: like flash, and also holds the mask as a bias in the compute dtype."""
    spec, at_once = run.spec, _at_once(run)
    bias = None
    if spec.masked:
        positions = run.batch * run.length * round_up(run.length, 8)
        # rows of the mask are padded to a multiple of 8 (attention.cpp, preprocess_mask)
        run.tape.meter.touch(positions * (1 + q.width))
        bias = run.tape.new(positions, q.width)
    during = 4 * at_once * spec.heads  # backward: delta in fp32 (attention_backward.cu)
    if q.width == 2 and spec.head_dim > 64:  # and fp32 sums of dk and dv
        during += 8 * at_once * spec.heads * round_up(spec.head_dim, 32)
    return _fused(run, q, k, v, during, bias)


def _cudnn(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """cuDNN's attention (native/cudnn/MHA.cpp): holds what flash attention does, and a mask as a bias, neither padded
    nor expanded."""
    spec, bias = run.spec, None
    if spec.masked:
        positions = run.batch * run.length**2
        run.tape.meter.touch(positions * (1 + q.width))
        bias = run.tape.new(positions, q.width)
    # backward: sums of dO * O and dq in fp32 (cudnn-frontend, scaled_dot_product_flash_attention.h)
    during = 4 * run.tokens * spec.heads * (1 + spec.head_dim)
    if spec.heads != spec.kv_heads and not spec.masked:  # dk and dv of all query heads, before they are summed
        during += 2 * run.tokens * spec.heads * spec.head_dim * q.width
    return _fused(run, q, k, v, during, bias)


def _fused(run: Pass, q: Ref, k: Ref, v: Ref, during: int, bias: Ref | None = None) -> Ref:
    """One kernel for scores, softmax and their product with V; `during`: bytes within its backward kernel."""
    spec = run.spec
    statistics = run.tape.new(run.tokens * spec.heads, 4)
    gradient_of = fresh(q, k, v)

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = gradient_of(tape, grad)
        tape.meter.touch(during)
        return out

    held = [q, k, v, statistics] + ([bias] if bias is not None else [])
    elements = run.tokens * spec.heads * spec.head_dim
    return run.tape.op((q, k, v), elements, q.width, saved=held, backward=backward, holds_output=True)


def _scores(run: Pass) -> int:
    return run.batch * run.spec.heads * run.length * run.length


def _softmax(run: Pass, scores: Ref) -> Ref:
    """Holds its output; the backward kernel takes grad * output first (SoftMax.cu)."""
    size = scores.elements

    def backward(tape: Tape, grad: Ref) -> Grads:
        tape.meter.touch(2 * size * 4)
        return (tape.new(size, 4),)

    return run.tape.op((scores,), size, 4, backward=backward, holds_output=True)


def _with_sinks(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """gpt-oss (modeling_gpt_oss.py, eager_attention_forward): a column joins the scores, their maximum is taken off,
    and the softmax stays in the compute dtype."""
    width = q.width
    scores = run.scaled(run.tape.op((q, k), _scores(run), width, saved=(q, k)))
    scores = run.tape.op((scores,), scores.elements, width, backward=shared(1))
    size = scores.elements + scores.elements // run.length
    joined = run.tape.op((scores,), size, width, backward=shared(1))

    def of_maximum(tape: Tape, grad: Ref) -> Grads:
        # -grad is summed for the maximum, whose own gradient is scattered into zeros and added
        tape.meter.touch(size * width)
        spread = tape.new(size, width)
        out = tape.new(size, width)
        del spread
        return (out,)

    joined = run.tape.op((joined,), size, width, backward=of_maximum)

    def of_softmax(tape: Tape, grad: Ref) -> Grads:
        tape.meter.touch(2 * size * width)
        return (tape.new(size, width),)

    shares = run.tape.op((joined,), size, width, backward=of_softmax, holds_output=True)
    del scores, joined
    part = run.tape.view(shares, shares.elements * run.length // (run.length + 1))
    if part.node is not None:
        part.node.backward = one_gradient(size, width)  # zeros of the whole, into which it is copied
    return _weighted(run, part, v)


def _weighted(run: Pass, scores: Ref, v: Ref) -> Ref:
    elements = run.tokens * run.spec.heads * run.spec.head_dim
    return run.tape.op((scores, v), elements, v.width, saved=(scores, v))


def _eager(run: Pass, q: Ref, k: Ref, v: Ref) -> Ref:
    """eager_attention_forward: S x S scores per head in the compute dtype, probabilities in fp32 and cast."""
    width = q.width
    if run.spec.sinks:
        return _with_sinks(run, q, k, v)
    scores = run.scaled(run.tape.op((q, k), _scores(run), width, saved=(q, k)))
    if run.spec.softcap:
        scores = run.scaled(scores)
        scores = run.tape.op((scores,), scores.elements, width, holds_output=True)
        scores = run.scaled(scores)
    scores = run.tape.op((scores,), scores.elements, width, backward=shared(1))
    if width != 4:
        wide = run.to(scores, 4)
        out = _softmax(run, wide)
        del wide
        scores = run.to(out, width)
        del out
    else:
        scores = _softmax(run, scores)
    return _weighted(run, run.drop(scores, run.spec.attention_dropout), v)
