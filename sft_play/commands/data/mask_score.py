"""`mask-score`: the loss masks of chat templates, each beside the exact one."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.files.checkout import tool

HELP = {"mask-score": "score the loss masks of chat templates (TEMPLATES=, TOKENIZER=)"}


def run(request: Request) -> Answer:
    """The verdict on each template."""
    if request.templates is None or request.tokenizer is None:
        raise ConfigError(
            "mask-score needs both: make mask-score TEMPLATES=FOLDER TOKENIZER=FOLDER OUT=score.json (a folder of "
            ".jinja files, and the folder or hub id of a tokenizer)"
        )
    score = tool("mask_score.score", command=request.command).score
    return answer_of(score(request.templates, request.tokenizer))
