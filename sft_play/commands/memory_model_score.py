"""`memory-model-score`: the memory model beside peaks that others measured and published."""

from __future__ import annotations

import logging

from sft_play.commands.answer import Answer
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.files.checkout import tool

logger = logging.getLogger(__name__)

HELP = {"memory-model-score": "score the memory model on measured peaks that others published"}


def run(request: Request) -> Answer:
    """The errors of every measured peak; OUT is written as they come."""
    if request.peaks is None:
        raise ConfigError("PEAKS= names no file; give the CSV of measured peaks: make memory-model-score PEAKS=FILE")
    score = tool("memory_model.score", command=request.command).score
    report = score(request.peaks, out=request.out, progress=logger.info)
    return Answer(report.as_json(), report.table_lines(), to_out=False)
