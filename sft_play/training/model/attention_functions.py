"""The attention functions of a run: PyTorch's sdpa, chats that lie one behind the other, and
context parallelism.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import varlen as torch_varlen
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import (
    repeat_kv,
    sdpa_attention_forward,
    use_gqa_in_sdpa,
)

from sft_play.planner.layout import Layout

# PyTorch's sdpa in a run: which kernel runs, and grouped heads where none takes them
# (`planner.kernels` has the table).
#
# cuDNN's kernel runs only where all batches have one shape; the switch is torch's own, for the
# whole process. Keys and values of grouped heads are repeated where flash attention does not run
# (before Ampere, fp32): transformers leaves them to PyTorch, which would fall back to the math
# kernel and its S x S scores. The function takes over sdpa's own name.
#
# Shape letters: B rows, H heads, G heads of keys, S tokens, D width of a head.


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
) -> Any:
    """sdpa's attention, without grouped heads wherever transformers would leave them to PyTorch:
    query [B, H, S, D]; key and value [B, G, S, D] with H a multiple of G; returns [B, S, H, D]."""
    repeats = getattr(module, "num_key_value_groups", 1)
    # a paged cache stores keys before they are repeated (transformers 5.23)
    if repeats > 1 and "cache" not in options and use_gqa_in_sdpa(attention_mask, key, value):
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
        # without `num_key_value_groups`, by which sdpa's function would repeat them once more
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def set_kv_repetition(*, enabled: bool) -> None:
    """Let sdpa repeat keys and values in this process from here on, or be transformers' own
    again."""
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


# --------------------------------------------------------------------------------------------------
# Attention over chats that lie one behind the other, told apart by their boundaries: no mask, no
# other package.
#
# Where `class_checks.replaced_code` has shown it on the run's GPU, PyTorch's varlen kernel runs;
# else each chat is a call of sdpa, which needs the chats' lengths on the host
# (`rows.CHAT_LENGTHS`). Rows that are not packed have boundaries only where a window needs them.
# Generation, padded on the left, has the usual attention (`full_rows_attention`).
#
# Shape letters: B rows, H heads, G heads of keys, S tokens of a row, T tokens of all rows, D width
# of a head.

# The attention's name in transformers.
VARLEN_ATTENTION = "varlen_sdpa"
# The flash kernel takes heads whose width is a multiple of this (flash_attn/flash_api.cpp).
_HEAD_WIDTH_MULTIPLE = 8

# Whether the kernel wants to be told of grouped heads; torch 2.11's has no such argument. Found
# once, since compiled blocks cannot ask.
_HAS_GQA_ARGUMENT = "enable_gqa" in inspect.signature(torch_varlen.varlen_attn).parameters
_uses_flash = False


def enable_flash(*, enabled: bool) -> None:
    """Run PyTorch's varlen kernel on this process's GPU from here on, or one call of sdpa for each
    chat."""
    global _uses_flash
    _uses_flash = enabled


def needs_chat_lengths(attention: str) -> bool:
    """Whether a model with this attention needs the chats' lengths on the host; the kernel reads
    boundaries itself."""
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
) -> Any:
    """Causal attention inside each chat, as [B, S, H, D]: query [B, H, S, D]; key and value [B, G,
    S, D] with H a multiple of G. `sliding_window`: tokens that a query sees, itself included;
    `cu_seq_lens_q`: where chats begin among the T tokens of the only row, and the end (None: each
    row is one chat); `chat_lengths`: on the host, else read from it. Raises ValueError: what no
    fused kernel does was asked for: capped scores, sinks, dropout, bidirectional.
    """
    is_causal = getattr(module, "is_causal", True) and options.get("is_causal") is not False
    is_needed = {
        "softcap": options.get("softcap") is not None,
        "s_aux": options.get("s_aux") is not None,
        "dropout": dropout and module.training,
        "is_causal=False": not is_causal,
    }
    unsupported = [name for name, needed in is_needed.items() if needed]
    if unsupported:
        raise ValueError(f"varlen attention has no {', '.join(unsupported)}")
    rows, _, length, _ = query.shape
    uses_window = sliding_window is not None and sliding_window < length and length == key.shape[2]
    if cu_seq_lens_q is None and not (uses_window and attention_mask is None):
        return AttentionInterface._global_mapping["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if cu_seq_lens_q is None:
        max_length_q, chat_lengths = length, (length,) * rows
        cu_seq_lens_q = torch.arange(
            0, (rows + 1) * length, length, dtype=torch.int32, device=query.device
        )
    # it casts sdpa, and not operators that it does not know
    if torch.is_autocast_enabled(query.device.type):
        autocast_dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (heads.to(autocast_dtype) for heads in (query, key, value))
    query, key, value = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    output_THD = packed_attention(
        query,
        key,
        value,
        cu_seq_lens_q,
        int(max_length_q or length),
        lengths=chat_lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window if uses_window else None,
    )
    return output_THD.unflatten(0, (rows, length)), None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    *,
    lengths: Sequence[int] | None = None,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of [T, H, D] over keys and values [T, G, D] between the `boundaries`, as [T, H, D];
    `lengths`: what lies between these, on the host, else read from them."""
    if _uses_flash and query.is_cuda:  # small models of the class are measured on the CPU
        return flash_attention(
            query, key, value, boundaries, max_length, scale=scale, window=window
        )
    if lengths is None:  # a class of code of its own may not pass them on
        lengths = [end - begin for begin, end in itertools.pairwise(boundaries.tolist())]
    return attention_per_chat(query, key, value, lengths, scale=scale, window=window)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """`packed_attention` by PyTorch's flash kernel, in one call."""
    width = query.shape[-1]
    if width % _HEAD_WIDTH_MULTIPLE:
        query, key, value = (
            F.pad(heads, (0, -width % _HEAD_WIDTH_MULTIPLE)) for heads in (query, key, value)
        )
    output: torch.Tensor = torch_varlen.varlen_attn(
        query,
        key,
        value,
        boundaries,
        boundaries,
        max_length,
        max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": query.shape[1] != key.shape[1]} if _HAS_GQA_ARGUMENT else {}),
    )
    return output[..., :width]


def attention_per_chat(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
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
            mask = (
                torch.ones(length, length, dtype=torch.bool, device=q.device)
                .tril_()
                .triu_(1 - window)
            )
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        parts.append(output.squeeze(0).transpose(0, 1))  # an index's gradient would be a copy
    return torch.cat(parts)


AttentionInterface.register(VARLEN_ATTENTION, varlen_attention)


# --------------------------------------------------------------------------------------------------
# Context parallelism: the ranks of a group share the tokens of each row, and each computes
# attention for some heads.
#
# For attention they exchange heads for tokens, and back (Ulysses,
# https://arxiv.org/abs/2309.14509): causal over whole rows, padding at their end, no mask. To FSDP2
# they are data-parallel ranks with shorter rows.
#
# Shape letters: B rows, H heads, S tokens of a row, P parts of it, D width of a head.

# The attention's name in transformers, which makes no mask for names that it does not know.
ULYSSES_ATTENTION = "ulysses_sdpa"
# Dimensions of queries, keys and values.
_HEAD_AXIS, _TOKEN_AXIS = 1, 2
# The group that this process is in, under ULYSSES_ATTENTION: an attention function is called by its
# name alone.
_groups: dict[str, DeviceMesh] = {}


def join_context_parallel_group(layout: Layout, device: torch.device) -> None:
    """Create the context-parallel groups of a layout that has some; all ranks call it, once there
    is a group."""
    if layout.context_parallel > 1:
        _groups[ULYSSES_ATTENTION] = init_device_mesh(
            device.type,
            (layout.ranks // layout.context_parallel, layout.context_parallel),
            mesh_dim_names=("rows", "cp"),
        )["cp"]


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
    """Causal attention over whole rows: query [B, H, S/P, D] of this rank's tokens, key and value
    with as many heads as they have; returns [B, S/P, H, D]."""
    mesh = _groups[ULYSSES_ATTENTION]
    key_repeats = -(-mesh.size() // key.shape[_HEAD_AXIS])
    if key_repeats > 1:  # fewer key heads than ranks: each goes to the ranks whose queries read it
        key, value = (
            heads.repeat_interleave(key_repeats, dim=_HEAD_AXIS) for heads in (key, value)
        )
    query, key, value = (
        _exchange(heads, mesh, _TOKEN_AXIS, _HEAD_AXIS) for heads in (query, key, value)
    )
    if repeats_kv():
        repeats = query.shape[_HEAD_AXIS] // key.shape[_HEAD_AXIS]
        key, value = (heads.repeat_interleave(repeats, dim=_HEAD_AXIS) for heads in (key, value))
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout if module.training else 0.0,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[_HEAD_AXIS] != key.shape[_HEAD_AXIS],
    )
    return (
        _exchange(output, mesh, _HEAD_AXIS, _TOKEN_AXIS)
        .transpose(_HEAD_AXIS, _TOKEN_AXIS)
        .contiguous(),
        None,
    )


def _exchange(heads: torch.Tensor, mesh: DeviceMesh, from_axis: int, to_axis: int) -> torch.Tensor:
    # from one Shard to another is one all-to-all, and autograd knows its backward
    tensor = DTensor.from_local(heads.contiguous(), mesh, [Shard(from_axis)], run_check=False)
    return tensor.redistribute(placements=[Shard(to_axis)]).to_local()


AttentionInterface.register(ULYSSES_ATTENTION, ulysses_attention)


# --------------------------------------------------------------------------------------------------
# In generation every rank has whole rows, padded on the left, and the usual attention.


@contextlib.contextmanager
def full_rows_attention(model: Any) -> Iterator[None]:
    """While open, the model has the usual attention: in generation every rank has whole rows,
    padded on the left."""
    attention = model.config.get_text_config()._attn_implementation
    if attention not in (ULYSSES_ATTENTION, VARLEN_ATTENTION):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
