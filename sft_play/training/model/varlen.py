"""Attention over chats that lie one behind the other, told apart by their boundaries: no mask, no other package.

Where `class_checks.proof` has shown it on the run's GPU, PyTorch's varlen kernel runs; else each chat is a call of
sdpa, which needs the chats' lengths on the host (`collate.CHAT_LENGTHS`). Rows that are not packed have boundaries only
where a window needs them. Generation, padded on the left, has the usual attention
(`context_parallel.full_rows_attention`).

Shape letters: B rows, H heads, G heads of keys, S tokens of a row, T tokens of all rows, D width of a head.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import varlen as torch_varlen
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sft_play.training.model import sdpa

# The attention's name in transformers.
VARLEN_ATTENTION = "varlen_sdpa"
# The flash kernel takes heads whose width is a multiple of this (flash_attn/flash_api.cpp).
_HEAD_WIDTH_MULTIPLE = 8


# Whether the kernel wants to be told of grouped heads; torch 2.11's has no such argument. Found once, since compiled
# blocks cannot ask.
_HAS_GQA_ARGUMENT = "enable_gqa" in inspect.signature(torch_varlen.varlen_attn).parameters
_uses_flash = False


def enable_flash(*, enabled: bool) -> None:
    """Run PyTorch's varlen kernel on this process's GPU from here on, or one call of sdpa for each chat."""
    global _uses_flash
    _uses_flash = enabled


def needs_chat_lengths(attention: str) -> bool:
    """Whether a model with this attention needs the chats' lengths on the host; the kernel reads boundaries itself."""
    return attention == VARLEN_ATTENTION and not _uses_flash


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    chat_lengths: Sequence[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each chat, as [B, S, H, D]: query [B, H, S, D]; key and value [B, G, S, D] with H a
    multiple of G. `sliding_window`: tokens that a query sees, itself included; `cu_seq_lens_q`: where chats begin among
    the T tokens of the only row, and the end (None: each row is one chat); `chat_lengths`: on the host, else read from
    it. Raises ValueError: what no fused kernel does was asked for: capped scores, sinks, dropout, bidirectional."""
    _refuse_unsupported(module, dropout, options)
    rows, _, length, _ = query.shape
    uses_window = sliding_window is not None and sliding_window < length and length == key.shape[2]
    if cu_seq_lens_q is None and not (uses_window and attention_mask is None):
        attention_function = sdpa.sdpa_attention if sdpa.repeats_kv() else sdpa_attention_forward
        output: tuple[torch.Tensor, None] = attention_function(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output
    if cu_seq_lens_q is None:
        max_length_q, chat_lengths = length, (length,) * rows
        cu_seq_lens_q = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    if torch.is_autocast_enabled(query.device.type):  # it casts sdpa, and not operators that it does not know
        autocast_dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (heads.to(autocast_dtype) for heads in (query, key, value))
    query, key, value = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    output_THD = packed_attention(
        query, key, value, cu_seq_lens_q, int(max_length_q or length), lengths=chat_lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window if uses_window else None,
    )  # fmt: skip
    return output_THD.unflatten(0, (rows, length)), None


def _refuse_unsupported(module: nn.Module, dropout: float, options: Mapping[str, Any]) -> None:
    unsupported = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    unsupported += ["dropout"] if dropout and module.training else []
    unsupported += (
        [] if getattr(module, "is_causal", True) and options.get("is_causal") is not False else ["is_causal=False"]
    )
    if unsupported:
        raise ValueError(f"varlen attention has no {', '.join(unsupported)}")


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, max_length: int,
    *, lengths: Sequence[int] | None = None, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of [T, H, D] over keys and values [T, G, D] between the `boundaries`, as [T, H, D]; `lengths`:
    what lies between these, on the host, else read from them."""
    if _uses_flash and query.is_cuda:  # small models of the class are measured on the CPU
        return flash_attention(query, key, value, boundaries, max_length, scale=scale, window=window)
    if lengths is None:  # a class of code of its own may not pass them on
        lengths = [end - begin for begin, end in itertools.pairwise(boundaries.tolist())]
    return attention_per_chat(query, key, value, lengths, scale=scale, window=window)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, max_length: int,
    *, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """`packed_attention` by PyTorch's flash kernel, in one call."""
    width = query.shape[-1]
    if width % _HEAD_WIDTH_MULTIPLE:
        query, key, value = (F.pad(heads, (0, -width % _HEAD_WIDTH_MULTIPLE)) for heads in (query, key, value))
    output: torch.Tensor = torch_varlen.varlen_attn(
        query, key, value, boundaries, boundaries, max_length, max_length, scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": query.shape[1] != key.shape[1]} if _HAS_GQA_ARGUMENT else {}),
    )  # fmt: skip
    return output[..., :width]


def attention_per_chat(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int],
    *, scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """The same by one call of sdpa per chat; a window is a mask as long as the chat is."""
    lengths = list(lengths)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # only flash attention on a GPU has grouped heads
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    parts = []
    for chat in zip(*(heads.split(lengths) for heads in (query, key, value)), strict=True):
        q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in chat)
        length = q.shape[2]
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_().triu_(1 - window)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        parts.append(output.squeeze(0).transpose(0, 1))  # an index's gradient would be a copy
    return torch.cat(parts)


AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)
