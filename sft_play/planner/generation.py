"""How many tokens of answers are generated at once: no more than fit into a training step's memory."""

from __future__ import annotations

from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.candidates import Candidate
from sft_play.planner.precision import BYTES


def cache_bytes(shape: ModelShape, width: int) -> int:
    """Bytes of one token's keys and values in all attention layers; latent attention's are cached decompressed."""
    heads, size = shape.num_kv_heads, 2 * shape.head_dim
    if shape.mla is not None:
        heads, size = shape.num_heads, shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.value_dim
    return width * heads * size * sum(kind.count for kind in shape.layers if kind.attention != "none")


def answer_tokens(shape: ModelShape, chosen: Candidate) -> int:
    """Tokens, rows x (prompt + answer), whose caches and forward pass hold no more than a step holds and frees.

    A token's share of a forward pass is taken from the evaluation's moment, or from the step's where none is planned.
    """
    memory, step = chosen.memory, chosen.step
    moment, rows = ("evaluation", step.eval_batch) if "evaluation" in memory.moments else ("forward", step.micro_batch)
    # what a moment holds beyond what stays between steps, for each of its tokens
    passing = max(0, memory.moments.get(moment, 0) - memory.stays) // max(1, rows * step.length)
    return max(1, (memory.allocated - memory.stays) // (cache_bytes(shape, BYTES[chosen.precision.compute]) + passing))
