"""Which attention code runs: one rule for the plan, which knows the shape, and the run, which knows the class."""

from __future__ import annotations

from typing import Literal, cast

AttentionName = Literal["sdpa", "eager", "flash_attention_2"]
"""Names of transformers' implementations."""


def attention_of(wanted: str, *, has_sdpa: bool) -> AttentionName:
    """What `model.attn_implementation` means for a model; auto is sdpa where the model has it, else eager. Kernels of
    the hub are flash attention 2, to the byte: transformers calls them in its way."""
    if is_hub_kernel(wanted):
        return "flash_attention_2"
    if wanted == "auto":
        return "sdpa" if has_sdpa else "eager"
    return cast(AttentionName, wanted)


def is_hub_kernel(wanted: str) -> bool:
    """Whether it is a kernel of the hub, `owner/name@commit`."""
    return "/" in wanted
