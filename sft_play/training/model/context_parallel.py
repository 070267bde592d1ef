"""Context parallelism: the ranks of a group share the tokens of each row, and each computes attention for some heads.

For attention they exchange heads for tokens, and back (Ulysses, https://arxiv.org/abs/2309.14509): causal over whole
rows, padding at their end, no mask. To FSDP2 they are data-parallel ranks with shorter rows.

Shape letters: B rows, H heads, S tokens of a row, P parts of it, D width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AttentionInterface

from sft_play.planner.layout import Layout
from sft_play.training.model import sdpa, varlen

# The attention's name in transformers, which makes no mask for names that it does not know.
ULYSSES_ATTENTION = "ulysses_sdpa"
# Dimensions of queries, keys and values.
_HEAD_AXIS, _TOKEN_AXIS = 1, 2
# The group that this process is in, under ULYSSES_ATTENTION: an attention function is called by its name alone.
_groups: dict[str, DeviceMesh] = {}


def join_context_parallel_group(layout: Layout, device: torch.device) -> None:
    """Create the context-parallel groups of a layout that has some; all ranks call it, once there is a group."""
    context_parallel = layout.context_parallel
    if context_parallel == 1:
        return
    mesh = init_device_mesh(
        device.type, (layout.ranks // context_parallel, context_parallel), mesh_dim_names=("rows", "cp")
    )
    _groups[ULYSSES_ATTENTION] = mesh["cp"]


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over whole rows: query [B, H, S/P, D] of this rank's tokens, key and value with as many heads as
    they have; returns [B, S/P, H, D]."""
    mesh = _groups[ULYSSES_ATTENTION]
    key_repeats = -(-mesh.size() // key.shape[_HEAD_AXIS])
    if key_repeats > 1:  # fewer key heads than ranks: each goes to the ranks whose queries read it
        key, value = (heads.repeat_interleave(key_repeats, dim=_HEAD_AXIS) for heads in (key, value))
    query, key, value = (_exchange(heads, mesh, _TOKEN_AXIS, _HEAD_AXIS) for heads in (query, key, value))
    if sdpa.repeats_kv():
        repeats = query.shape[_HEAD_AXIS] // key.shape[_HEAD_AXIS]
        key, value = (heads.repeat_interleave(repeats, dim=_HEAD_AXIS) for heads in (key, value))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout if module.training else 0.0, is_causal=True, scale=scaling,
        enable_gqa=query.shape[_HEAD_AXIS] != key.shape[_HEAD_AXIS],
    )  # fmt: skip
    return _exchange(output, mesh, _HEAD_AXIS, _TOKEN_AXIS).transpose(_HEAD_AXIS, _TOKEN_AXIS).contiguous(), None


def _exchange(heads: torch.Tensor, mesh: DeviceMesh, from_axis: int, to_axis: int) -> torch.Tensor:
    # from one Shard to another is one all-to-all, and autograd knows its backward
    tensor = DTensor.from_local(heads.contiguous(), mesh, [Shard(from_axis)], run_check=False)
    return tensor.redistribute(placements=[Shard(to_axis)]).to_local()


@contextlib.contextmanager
def full_rows_attention(model: Any) -> Iterator[None]:
    """While open, the model has the usual attention: in generation every rank has whole rows, padded on the left."""
    attention = model.config.get_text_config()._attn_implementation
    if attention not in (ULYSSES_ATTENTION, varlen.VARLEN_ATTENTION):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)


AttentionInterface.register(ULYSSES_ATTENTION, ulysses_attention)
