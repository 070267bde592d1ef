"""`process`: raw files to checked conversations, split, with a report."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request
from sft_play.config.load import load_config

HELP = {"process": "raw files to checked conversations in train, val and test, with a report of every row left out"}


def run(request: Request) -> Answer:
    """Write the splits, and answer with the counts of rows kept and left out."""
    from sft_play.data.process import process

    config = load_config(request.config, overrides=request.overrides).config
    return answer_of(process(config, force=request.force))
