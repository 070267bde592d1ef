"""PyTorch's sdpa in a run: which kernel runs, and grouped heads where none takes them.

cuDNN's kernel runs where all batches have one shape, and is switched off where lengths vary: `planner.attention` has
the table of kernels, and the reason. The switch is torch's own and holds for the whole process.
`torch.nn.attention.varlen` of the pinned torch runs flash attention alone. Later versions prefer cuDNN there, which has
been reported to be five times slower on GH200 (https://github.com/pytorch/pytorch/issues/187770), and obey the switch.

Keys and values of grouped heads are repeated to all heads on GPUs whose flash kernel does not run (before Ampere, or in
fp32): no other kernel supports grouped heads. transformers leaves them to PyTorch (`enable_gqa`) where there is no
mask, and checks only the head's width, not the GPU (integrations/sdpa_attention.py, `use_gqa_in_sdpa`); PyTorch then
falls back to the math kernel, which holds all S x S scores in fp32. With keys and values repeated, as transformers does
where there is a mask, the memory-efficient kernel runs. The function takes over sdpa's own name, so that masks, the
classes' checks for "sdpa" and saved configs stay sdpa's.

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


def switch(*, cudnn: bool) -> None:
    """From here on sdpa may run cuDNN's kernel in this process, or not."""
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """While open, sdpa runs no kernel of cuDNN: lengths vary here."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    switch(cudnn=False)
    try:
        yield
    finally:
        switch(cudnn=before)


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


def repeat_keys(*, repeated: bool) -> None:
    """From here on sdpa repeats keys and values in this process, or is transformers' own again."""
    AttentionInterface.register("sdpa", attend if repeated else sdpa_attention_forward)


def repeats_keys() -> bool:
    """Whether sdpa repeats keys and values in this process."""
    return AttentionInterface._global_mapping["sdpa"] is attend


@contextlib.contextmanager
def repeating_keys(*, repeated: bool) -> Iterator[None]:
    """`repeat_keys` while the context is open."""
    before = repeats_keys()
    repeat_keys(repeated=repeated)
    try:
        yield
    finally:
        repeat_keys(repeated=before)
