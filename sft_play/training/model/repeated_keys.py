"""Grouped-query attention on GPUs whose flash kernel does not run: keys and values are repeated to all heads first.

transformers leaves grouped heads to PyTorch (`enable_gqa`) where there is no mask, and checks only the head's width,
not the GPU (integrations/sdpa_attention.py, `use_gqa_in_sdpa`). Only flash attention supports grouped heads. Where it
does not run (before Ampere, or in fp32) PyTorch falls back to the math kernel, which holds all S x S scores in fp32.
With keys and values repeated, as transformers does where there is a mask, the memory-efficient kernel runs.

The function takes over sdpa's own name, so that masks, the classes' checks for "sdpa" and saved configs stay sdpa's.

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

_NAME = "sdpa"


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa's attention, without grouped heads wherever transformers would leave them to PyTorch.

    Args:
        query: [B, H, S, D]; `key` and `value` [B, G, S, D] with H a multiple of G.

    Returns:
        [B, S, H, D].
    """
    times = getattr(module, "num_key_value_groups", 1)
    # a paged cache stores keys before they are repeated (transformers 5.23)
    if times > 1 and "cache" not in options and use_gqa_in_sdpa(attention_mask, key, value):
        key, value = repeat_kv(key, times), repeat_kv(value, times)
        # without `num_key_value_groups`, by which sdpa's function would repeat them once more
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output


def use(*, repeated: bool) -> None:
    """From here on sdpa repeats keys and values in this process, or is transformers' own again."""
    AttentionInterface.register(_NAME, attend if repeated else sdpa_attention_forward)


def in_use() -> bool:
    """Whether sdpa repeats keys and values in this process."""
    return AttentionInterface._global_mapping[_NAME] is attend


@contextlib.contextmanager
def using(*, repeated: bool) -> Iterator[None]:
    """`use` while the context is open."""
    before = in_use()
    use(repeated=repeated)
    try:
        yield
    finally:
        use(repeated=before)
