"""TRL's training variants of chat templates."""

from __future__ import annotations

from typing import Any


def training_template(tokenizer: Any) -> str | None:
    """TRL's training variant of the tokenizer's chat template, which writes every turn as it is generated; the
    template itself where it needs none, None where TRL knows no variant of it."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        template = get_training_chat_template(tokenizer)
    except ValueError:
        return None
    return tokenizer.chat_template if template is None else str(template)
