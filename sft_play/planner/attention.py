"""Which attention code runs: one rule for the plan, which knows the shape, and the run, which knows the class."""

from __future__ import annotations

from typing import Literal

AttentionName = Literal["sdpa", "eager", "flash_attention_2"]
"""Names of transformers' implementations."""


def attention_of(wanted: Literal["auto"] | AttentionName, *, has_sdpa: bool) -> AttentionName:
    """What `model.attn_implementation` means for a model; auto is sdpa where the model has it, else eager."""
    if wanted != "auto":
        return wanted
    return "sdpa" if has_sdpa else "eager"
