"""PyTorch's sdpa in a run: which kernel runs, and grouped heads where none takes them (`planner.attention` has the
table).

cuDNN's kernel runs only where all batches have one shape; the switch is torch's own, for the whole process. Keys and
values of grouped heads are repeated where flash attention does not run (before Ampere, fp32): transformers leaves them
to PyTorch, which would fall back to the math kernel and its S x S scores. The function takes over sdpa's own name.

Shape letters: B rows, H heads, G heads of keys, S tokens, D width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa


def enable_cudnn(*, enabled: bool) -> None:
    """Allow or forbid sdpa to run cuDNN's kernel in this process from here on."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """While open, sdpa runs no kernel of cuDNN: lengths vary here."""
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    enable_cudnn(enabled=False)
    try:
        yield
    finally:
        enable_cudnn(enabled=was_enabled)


def sdpa_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa's attention, without grouped heads wherever transformers would leave them to PyTorch: query [B, H, S, D];
    key and value [B, G, S, D] with H a multiple of G; returns [B, S, H, D]."""
    repeats = getattr(module, "num_key_value_groups", 1)
    # a paged cache stores keys before they are repeated (transformers 5.23)
    if repeats > 1 and "cache" not in options and use_gqa_in_sdpa(attention_mask, key, value):
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
        # without `num_key_value_groups`, by which sdpa's function would repeat them once more
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output


def set_kv_repetition(*, enabled: bool) -> None:
    """Let sdpa repeat keys and values in this process from here on, or be transformers' own again."""
    AttentionInterface.register("sdpa", sdpa_attention if enabled else sdpa_attention_forward)


def repeats_kv() -> bool:
    """Whether sdpa repeats keys and values in this process."""
    return AttentionInterface._global_mapping["sdpa"] is sdpa_attention


@contextlib.contextmanager
def kv_repetition(*, enabled: bool) -> Iterator[None]:
    """`set_kv_repetition` while the context is open."""
    was_enabled = repeats_kv()
    set_kv_repetition(enabled=enabled)
    try:
        yield
    finally:
        set_kv_repetition(enabled=was_enabled)
