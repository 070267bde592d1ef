"""What CUDA does differently from a CPU: which attention kernel runs, and what kernels allocate
inside.

Sources are files of PyTorch 2.13 (github.com/pytorch/pytorch) unless another is named.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sft_play.planner.kernels import SdpaCall, SdpaKernel, sdpa_kernel
from sft_play.planner.memory.tape import round_up
from sft_play.trace.settings import TraceUnavailable

aten = torch.ops.aten


# --- buffers inside kernels -----------------------------------------------------------------------
def workspace_sizes(
    func: Any, args: Any, kwargs: Any, out: Any, *, on_gpu: bool = True
) -> tuple[int, ...]:
    """Bytes of each buffer that this operator's CUDA kernel takes from the allocator and frees
    before it returns; a CPU's, of the one that is known."""
    return (
        _WORKSPACE_SIZES[func](args)
        if func in _WORKSPACE_SIZES and (on_gpu or func is aten._log_softmax.default)
        else ()
    )


def _flash_backward(args: Any) -> tuple[int, ...]:
    """softmax_d and dq_accum in fp32, dk and dv for all heads
    (native/transformers/cuda/flash_attn/flash_api.cpp)."""
    query, key = args[1], args[2]
    batch, heads, tokens, size = query.shape
    rows, width = round_up(tokens, 128), round_up(size, 32)
    sizes = [4 * batch * heads * rows, 4 * batch * heads * rows * width]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * round_up(size, 8) * key.element_size()] * 2
    return tuple(sizes)


def _flash_varlen_backward(args: Any) -> tuple[int, ...]:
    """`_flash_backward` with 128 more positions a row (mha_varlen_bwd); the seventh argument holds
    the rows' borders."""
    query, key = args[1], args[2]
    tokens, heads, size = query.shape
    padded_tokens = tokens + 128 * (args[6].shape[0] - 1)
    sizes = [4 * heads * padded_tokens, 4 * heads * padded_tokens * round_up(size, 32)]
    if key.shape[1] != heads:
        sizes += [key.shape[0] * heads * round_up(size, 8) * key.element_size()] * 2
    return tuple(sizes)


def _cudnn_backward(args: Any) -> tuple[int, ...]:
    """Sums of dO * O and dq in fp32, dk and dv (cudnn-frontend,
    node/scaled_dot_product_flash_attention.h)."""
    query, key, value = args[1:4]
    batch, heads, tokens, size = query.shape
    total = 4 * batch * heads * tokens * (1 + size)
    if key.shape[1] != heads:
        total += batch * heads * key.shape[2] * (size + value.shape[3]) * key.element_size()
    return (total,)


def _efficient_backward(args: Any) -> tuple[int, ...]:
    """delta, and fp32 sums of dk and dv for half inputs wider than 64
    (transformers/cuda/attention_backward.cu)."""
    query, key = args[1], args[2]
    batch, heads, tokens, size = query.shape
    sizes = [4 * batch * heads * tokens]
    if query.element_size() == 2 and size > 64:
        sizes.append(2 * 4 * batch * heads * key.shape[2] * round_up(size, 32))
    return tuple(sizes)


_WORKSPACE_SIZES: dict[Any, Callable[[Any], tuple[int, ...]]] = {
    # `grad * output`, made first (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out)
    aten._softmax_backward_data.default: lambda args: (args[0].nbytes,),
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._flash_attention_backward.default: _flash_varlen_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    # a contiguous copy of the input (SoftMax.cu, host_softmax; a CPU's log_softmax_cpu_out copies
    # too)
    aten._log_softmax.default: lambda args: (
        () if args[0].is_contiguous() else (args[0].numel() * args[0].itemsize,)
    ),
    # sorted indices and their segments, int64 each (native/cuda/Embedding.cu,
    # EmbeddingBackwardKernel.cu)
    aten.embedding_dense_backward.default: lambda args: (8 * args[1].numel(),) * 4,
    # accumulating: linear, sorted and original positions, int64 each (native/cuda/Indexing.cu)
    aten._index_put_impl_.default: lambda args: (
        (8 * args[2].shape[0],) * 4 if len(args) > 3 and args[3] and args[2].dim() else ()
    ),
}


# --- scaled_dot_product_attention by CUDA's choice ------------------------------------------------
class CudaAttention:
    """`F.scaled_dot_product_attention` as CUDA dispatches it (`planner.kernels`): [batch, heads,
    tokens, size], and the output has the value's head size."""

    def __init__(self, capability: tuple[int, int], is_cudnn_enabled: Callable[[], bool]) -> None:
        # whether cuDNN's kernel is switched on at the moment
        self._capability, self._is_cudnn_enabled = capability, is_cudnn_enabled

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            autocast_dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (one.to(autocast_dtype) for one in (query, key, value))
        kernel = self.choose_kernel(query, key, value, attn_mask, enable_gqa)
        if kernel == "flash":
            return traced_flash_attention(query, key, value, dropout_p, is_causal, scale)
        if kernel == "math":
            raise TraceUnavailable(
                "PyTorch would run its math kernel, which no run of this toolkit meets"
            )
        mask, needs_gradient = attn_mask, _needs_gradient(query, key, value)
        if mask is not None and mask.dtype == torch.bool:  # what is added to scores (attention.cpp)
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs_gradient, dropout_p, is_causal, False, scale=scale
            )[0]
        # the memory-efficient kernel, whose mask is additive with rows of a multiple of 8
        if mask is not None:
            columns = mask.shape[-1]
            if columns % 8:
                mask = F.pad(mask, (0, 8 - columns % 8))[..., :columns]
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]

    def choose_kernel(
        self, query: Any, key: Any, value: Any, mask: Any, enable_gqa: bool
    ) -> SdpaKernel:
        """CUDA's choice for these tensors."""
        call = SdpaCall(
            query.shape[-1],
            value.shape[-1],
            masked=mask is not None,
            needs_gradient=_needs_gradient(query, key, value),
            has_grouped_heads=enable_gqa and key.shape[1] != query.shape[1],
            half_precision=query.dtype in (torch.float16, torch.bfloat16),
        )
        return sdpa_kernel(call, self._capability, uses_cudnn=self._is_cudnn_enabled())


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _pad_head_size(*tensors: Any) -> Any:
    padding = -tensors[0].shape[-1] % 8
    return [F.pad(tensor, (0, padding)) for tensor in tensors] if padding else tensors


def traced_flash_attention(
    query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """The flash kernel; head sizes are padded to a multiple of 8 first."""
    size, (query, key, value) = query.shape[-1], _pad_head_size(query, key, value)
    return aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, scale=scale
    )[0][..., :size]


# --- the package flash-attn, under transformers' own interface ------------------------------------
# The name under which transformers' own flash attention is registered, with the functions below as
# its package, which `flash_attention_2` requires; model classes check for "flash".
FLASH_NAME = "sft_play_flash_attention_2"


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> Any:
    """flash-attn 2's function for rows of one length. Shapes: batch, tokens, heads, head size."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return traced_flash_attention(query, key, value, dropout_p, causal, softmax_scale).transpose(
        1, 2
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> Any:
    """flash-attn 2's function for rows of many lengths, one after the other: [all tokens, heads,
    head size]. PyTorch's operator is built from the same kernel, and holds what flash-attn holds.
    """
    size, (q, k, v) = q.shape[-1], _pad_head_size(q, k, v)
    return aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        causal,
        False,
        scale=softmax_scale,
    )[0][..., :size]


def traced_varlen_attention(
    query: Any, key: Any, value: Any, ends: Any, longest: int, *, scale: float, **_: Any
) -> Any:
    """`attention_functions.packed_attention` on CUDA: [all tokens, heads, head size]; a window
    changes no size."""
    return flash_attn_varlen_func(
        query, key, value, ends, ends, longest, longest, softmax_scale=scale, causal=True
    )


# --------------------------------------------------------------------------------------------------
# flash-linear-attention's gated delta rule as a trace runs it: what fla-core 0.6.0 holds and
# allocates.
#
# It follows fla/ops/gated_delta_rule/chunk.py allocation by allocation; nothing of the package is
# imported. Shapes: B rows, T tokens, H key heads, V value heads, K and D widths of a key and of a
# value head, N chunks of 64 tokens.

# Tokens that are computed at once.
CHUNK = 64
# Columns of a key that a program of the backward pass works on, at least: each has its own gradient
# of the decay.
_TILE = 64


# ChunkGatedDeltaRuleFunction of the package.
class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Any,
        k_BTHK: Any,
        v_BTVD: Any,
        g_BTV: Any,
        beta_BTV: Any,
        is_normalised: bool,
        rows: int,
    ) -> Any:
        """The output, B x T x V x D; `rows`: sequences in a row of the batch."""
        # they live until the end
        inputs = [one.contiguous() for one in (q_BTHK, k_BTHK, v_BTVD, beta_BTV)]
        q, k, v, beta = inputs
        norms = (None, None)
        if is_normalised:
            (q, k), norms = (
                (torch.empty_like(q), torch.empty_like(k)),
                (_norm_statistics(q), _norm_statistics(k)),
            )
        decay = torch.empty_like(g_BTV, dtype=torch.float32)
        inverse = k.new_zeros(*beta.shape, CHUNK)
        states = _forward_states(k, v, rows)
        out = torch.empty_like(v)
        del states
        ctx.save_for_backward(q, norms[0], k, norms[1], v, decay, beta, inverse)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, q_norm, k, _, v, decay, beta, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        # `chunk_gated_delta_rule_bwd`: the states are computed again; all of it lives until its end
        states = _forward_states(k, v, ctx.rows)
        dv = torch.empty_like(grad)
        state_gradients = _empty_chunk_states(q, v, ctx.rows)
        dv = torch.empty_like(dv)
        dq, dk = _empty_by_value_head(q, v), _empty_by_value_head(k, v)
        dg = decay.new_empty(-(-k.shape[3] // _TILE), *decay.shape)
        dw = torch.empty_like(states[0])
        dq = _sum_over_groups(dq, q)
        dk = _sum_over_groups(dk, k)
        dg = dg.sum(0)
        second_dk, value_gradients = _empty_by_value_head(k, v), torch.empty_like(v)
        second_dg, db = torch.empty_like(decay), torch.empty_like(beta)
        second_dk = _sum_over_groups(second_dk, k)
        dv = value_gradients
        dk.add_(second_dk)
        dg.add_(second_dg)
        dg = torch.empty_like(dg)
        del states, state_gradients, dw, second_dk, second_dg
        if q_norm is not None:
            dq, dk = torch.empty_like(dq), torch.empty_like(dk)
        return dq, dk, dv, dg, db, None, None


def chunk_gated_delta_rule(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    **_: Any,
) -> tuple[Any, Any]:
    """Takes the place of the function of that name in transformers' classes, with its arguments and
    results."""
    rows = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    out = _DeltaRule.apply(query, key, value, g, beta, use_qk_l2norm_in_kernel, rows)
    if not output_final_state:
        return out, None
    return out, value.new_zeros(
        value.shape[0] * rows, value.shape[2], key.shape[3], value.shape[3], dtype=torch.float32
    )


def _norm_statistics(x: Any) -> Any:
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _empty_by_value_head(k: Any, v: Any) -> Any:
    return k.new_empty(*v.shape[:3], k.shape[3])


def _empty_chunk_states(k: Any, v: Any, rows: int) -> Any:
    """B x N x V x K x D; each of a row's sequences has its own last chunk."""
    chunks = -(-v.shape[1] // CHUNK) + rows - 1
    return k.new_empty(v.shape[0], chunks, v.shape[2], k.shape[3], v.shape[3])


def _forward_states(k: Any, v: Any, rows: int) -> tuple[Any, Any, Any, Any]:
    """w and u of the WY representation, the state before each chunk, and the values that are
    written to it."""
    return (
        _empty_by_value_head(k, v),
        torch.empty_like(v),
        _empty_chunk_states(k, v, rows),
        torch.empty_like(v),
    )


def _sum_over_groups(gradient: Any, key: Any) -> Any:
    heads = key.shape[2]
    if gradient.shape[2] == heads:
        return gradient
    return gradient.view(*gradient.shape[:2], heads, -1, gradient.shape[3]).sum(3)
