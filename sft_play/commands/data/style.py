"""`style`: a system prompt for processed conversations."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request
from sft_play.config.load import load_config

HELP = {"style": "give processed conversations a system prompt (STYLE=), into data/processed_with_style"}


def run(request: Request) -> Answer:
    """Write the conversations with the system prompt."""
    from sft_play.data.style import style

    config = load_config(request.config, overrides=request.overrides).config
    return answer_of(style(config, request.style, force=request.force))
