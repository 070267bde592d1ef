"""What Liger's kernels save in a pass: bytes that plain elementwise code moves and they do not, and kernel starts.

Counted operator by operator, e bytes of a computed element, from transformers' forward (models/llama), PyTorch's
derivatives.yaml and liger-kernel's own kernels. Half precision is cast to fp32 in a norm, and back. Against published
pairs of runs with and without fused kernels: benchmarks/LOG.md.
"""

from __future__ import annotations

from sft_play.facts.liger import Replaced
from sft_play.facts.models.model_shape import ModelShape

NORM_START_S, ROTATION_START_S = 32e-6, 242e-6
"""Seconds, forward and backward together, that a norm and a rotation of both queries and keys take less to start: the
package's own benchmark (A100, 0.2.1) where rows are so short that starting is all of it: a norm of width 1,024 0.286
against 0.318 ms, a rotation of width 512 0.274 against 0.516 ms (Liger-Kernel ead96b618e5c,
benchmark/data/all_benchmark_data.csv). A gated activation is only given with its matrix products; nothing is taken."""


STILL_MOVED = 0.5
"""Share of the counted traffic of norms, activations and rotations that remains at least: what the fused kernels and
the sums of residuals move, 0.53 of Llama-3.1-8B's. Plain code moves more than `throughput._traffic` counts; the rest is
in the share of the peak that matrix products reach, which was fitted to whole steps, and it stays there."""


def saved_bytes(shape: ModelShape, replaced: Replaced, *, e: int, again: float) -> float:
    """Bytes of a token's forward and backward pass through all blocks, `again`: the share that is computed twice."""
    once, back = 0.0, 0.0
    casts = 0 if e == 4 else 2 * (e + 4)
    norm_forward = casts + 20  # square, mean, product; that with the weight moves 2 e, as Liger's kernel does
    norm_backward = casts + 68 - e  # of the product, the square, the mean, their sum; 2 e of the weight's against 3 e
    for kind in shape.layers:
        attends = kind.attention != "none"
        heads = shape.q_width + shape.kv_width if attends else 0
        normed = shape.norms_per_layer * shape.hidden_size
        # norms of heads are replaced only where the package's function for the class does so
        normed += heads if shape.qk_norm and replaced.head_norms else 0
        rotated = heads * shape.rotary_dim // max(1, shape.head_dim) if replaced.rotation else 0
        gated = kind.mlp_width if replaced.gate else 0
        # rotation: times cos, half negated, put together, times sin, added: 10 e, and 15 e back, against 2 e
        once += kind.count * (normed * norm_forward + rotated * 8 * e + gated * 2 * e)
        back += kind.count * (normed * norm_backward + rotated * 13 * e + gated * 4 * e)
    return once * (1 + again) + back


def saved_starts_s(shape: ModelShape, replaced: Replaced, *, again: float) -> float:
    """Seconds of kernel starts that a pass forward and back takes less; a second forward pass counts as half of one."""
    total = 0.0
    for kind in shape.layers:
        attends = kind.attention != "none"
        norms = shape.norms_per_layer + (2 if attends and shape.qk_norm and replaced.head_norms else 0)
        total += kind.count * (norms * NORM_START_S + (ROTATION_START_S if attends and replaced.rotation else 0.0))
    return total * (1 + again / 2)
