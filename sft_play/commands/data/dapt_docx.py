"""`dapt-docx`: documents to clean plain text."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request
from sft_play.config.load import load_config

HELP = {"dapt-docx": "documents (.docx, .pdf, .pptx, .xlsx, .epub, .html, .md, .txt) to clean text for task_mode cpt"}


def run(request: Request) -> Answer:
    """Write the text of every document."""
    from sft_play.documents.documents import documents

    config = load_config(request.config, overrides=request.overrides).config
    return answer_of(documents(config, force=request.force))
