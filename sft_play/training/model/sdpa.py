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
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa

from sft_play.facts.installed import CudaLibraries
from sft_play.planner.attention import SdpaCall, SdpaKernel, prefers_cudnn, sdpa_kernel
from sft_play.planner.plan import Plan

logger = logging.getLogger(__name__)

_NAMES: dict[int, SdpaKernel] = {
    int(SDPBackend.MATH): "math", int(SDPBackend.FLASH_ATTENTION): "flash",
    int(SDPBackend.EFFICIENT_ATTENTION): "efficient", int(SDPBackend.CUDNN_ATTENTION): "cudnn",
}  # fmt: skip
_TOKENS = 64
"""Tokens of the calls that PyTorch is asked about."""


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


def begin(hf_config: Any, plan: Plan, *, attention: str, device: torch.device) -> None:
    """Switch cuDNN's kernel as the plan says, and log which kernel runs and why."""
    step = plan.choice.step
    switch(cudnn=step.cudnn)
    call = _call_of(hf_config, masked=step.padded, half=plan.precision.compute != "float32")
    if device.type != "cuda" or torch.version.hip is not None or attention != "sdpa" or call is None:
        return
    capability = torch.cuda.get_device_capability(device)
    planned = sdpa_kernel(call, capability, cudnn=step.cudnn)
    try:
        runs = chosen(call, dtype=getattr(torch, plan.precision.compute), device=device)
    except Exception as error:  # a private function of torch's: without it only this line is missing
        logger.debug("Attention kernel: %s is planned; PyTorch does not say which it takes (%s)", planned, error)
        return
    logger.debug("Attention kernel: %s", _words(runs, capability, cudnn=step.cudnn))
    if runs != planned:
        logger.warning(
            "Attention kernel: PyTorch %s with cuDNN %s takes %s here, and the plan counts on %s: memory and speed may "
            "differ from the plan", torch.__version__, torch.backends.cudnn.version(), runs, planned,
        )  # fmt: skip


def _words(kernel: SdpaKernel, capability: tuple[int, int], *, cudnn: bool) -> str:
    if cudnn:
        return f"{kernel}; cuDNN's is on because all batches have one shape, and off wherever lengths vary"
    if prefers_cudnn(capability, libraries()):
        return f"{kernel}; cuDNN's, which PyTorch prefers on this GPU, is off: it builds a graph for every new length"
    return f"{kernel}, PyTorch's choice"


def libraries() -> CudaLibraries:
    """What this process has loaded, by which PyTorch chooses."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    return CudaLibraries(cuda, torch.backends.cudnn.version() or 0)


def _call_of(hf_config: Any, *, masked: bool, half: bool) -> SdpaCall | None:
    """What a model's attention asks of sdpa; None where its config does not say."""
    text = hf_config.get_text_config()
    try:
        heads = getattr(text, "num_attention_heads", None)
        if not isinstance(heads, int) or not heads:
            return None
        width = value = getattr(text, "head_dim", None) or text.hidden_size // heads
        if getattr(text, "kv_lora_rank", None):  # latent attention
            width, value = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
        grouped = (getattr(text, "num_key_value_heads", None) or heads) != heads
    except RuntimeError:  # transformers' own, for sizes that differ by layer (Gemma 4): its layers ask for several
        return None
    # transformers repeats grouped heads wherever there is a mask, and this toolkit where no kernel takes them
    grouped = grouped and not masked and width == value and not repeats_keys()
    return SdpaCall(width, value, grouped=grouped, masked=masked, half=half)


def chosen(call: SdpaCall, *, dtype: torch.dtype, device: torch.device) -> SdpaKernel:
    """The kernel that PyTorch itself takes for such a call on this device, as its switches are now."""

    def heads(count: int, width: int) -> torch.Tensor:
        return torch.zeros(1, count, _TOKENS, width, dtype=dtype, device=device, requires_grad=call.trains)

    keys = 1 if call.grouped else 2
    mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device=device).tril_() if call.masked else None
    backend = torch._fused_sdp_choice(
        heads(2, call.width), heads(keys, call.width), heads(keys, call.value_width), mask, 0.0, not call.masked,
        enable_gqa=call.grouped,
    )  # fmt: skip
    return _NAMES[int(backend)]


# --- grouped heads ----------------------------------------------------------------------------------------------------


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
