"""flash-linear-attention's gated delta rule as a trace runs it: what fla-core 0.6.0 holds and allocates.

It follows fla/ops/gated_delta_rule/chunk.py allocation by allocation; nothing of the package is imported. Shapes: B
rows, T tokens, H key heads, V value heads, K and D widths of a key and of a value head, N chunks of 64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch

# Tokens that are computed at once.
CHUNK = 64
# Columns of a key that a program of the backward pass works on, at least: each has its own gradient of the decay.
_TILE = 64


class _DeltaRule(torch.autograd.Function):
    """ChunkGatedDeltaRuleFunction."""

    @staticmethod
    def forward(
        ctx: Any, q_BTHK: Any, k_BTHK: Any, v_BTVD: Any, g_BTV: Any, beta_BTV: Any, is_normalised: bool, rows: int
    ) -> Any:
        """The output, B x T x V x D; `rows`: sequences in a row of the batch."""
        inputs = [one.contiguous() for one in (q_BTHK, k_BTHK, v_BTVD, beta_BTV)]  # they live until the end
        q, k, v, beta = inputs
        norms = (None, None)
        if is_normalised:
            (q, k), norms = (torch.empty_like(q), torch.empty_like(k)), (_norm_statistics(q), _norm_statistics(k))
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
        dq, dk, dv, dg, db = _backward_gradients(q, k, v, decay, beta, grad, ctx.rows)
        if q_norm is not None:
            dq, dk = torch.empty_like(dq), torch.empty_like(dk)
        return dq, dk, dv, dg, db, None, None


def chunk_gated_delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, *, initial_state: Any = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, **_: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """What takes the place of the function of that name of transformers' classes, with its arguments and results."""
    rows = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    out = _DeltaRule.apply(query, key, value, g, beta, use_qk_l2norm_in_kernel, rows)
    if not output_final_state:
        return out, None
    shape = (value.shape[0] * rows, value.shape[2], key.shape[3], value.shape[3])
    return out, value.new_zeros(shape, dtype=torch.float32)


def _norm_statistics(x: Any) -> Any:
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _empty_by_value_head(k: Any, v: Any) -> Any:
    return k.new_empty(*v.shape[:3], k.shape[3])


def _empty_chunk_states(k: Any, v: Any, rows: int) -> Any:
    """B x N x V x K x D; each of a row's sequences has its own last chunk."""
    chunks = -(-v.shape[1] // CHUNK) + rows - 1
    return k.new_empty(v.shape[0], chunks, v.shape[2], k.shape[3], v.shape[3])


def _forward_states(k: Any, v: Any, rows: int) -> tuple[Any, Any, Any, Any]:
    """w and u of the WY representation, the state before each chunk, and the values that are written to it."""
    return _empty_by_value_head(k, v), torch.empty_like(v), _empty_chunk_states(k, v, rows), torch.empty_like(v)


def _backward_gradients(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, grad: Any, rows: int
) -> tuple[Any, Any, Any, Any, Any]:
    """`chunk_gated_delta_rule_bwd`: the states are computed again; all of it lives until its end."""
    states = _forward_states(k, v, rows)
    dv = torch.empty_like(grad)
    state_gradients = _empty_chunk_states(q, v, rows)
    dv = torch.empty_like(dv)
    dq, dk = _empty_by_value_head(q, v), _empty_by_value_head(k, v)
    tiles = -(-k.shape[3] // _TILE)
    dg = decay.new_empty(tiles, *decay.shape)
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
    del states, state_gradients, dw
    return dq, dk, dv, dg, db


def _sum_over_groups(gradient: Any, key: Any) -> Any:
    heads = key.shape[2]
    if gradient.shape[2] == heads:
        return gradient
    return gradient.view(*gradient.shape[:2], heads, -1, gradient.shape[3]).sum(3)
