"""`verify-layouts`: the same run under every layout, beside one process."""

from __future__ import annotations

import logging

from sft_play.commands.answer import Answer
from sft_play.commands.machine import refuse_hardware
from sft_play.commands.request import Request
from sft_play.files.checkout import tool

logger = logging.getLogger(__name__)

HELP = {"verify-layouts": "train the same run under every layout over CPU ranks or GPUs, and compare with one process"}


def run(request: Request) -> Answer:
    """Each layout's losses and weights beside those of one process; exit code 1 where one differs."""
    refuse_hardware(request)
    layouts = tool("verify.layouts", command=request.command)
    table = layouts.verify(
        request.config if request.config_given else None,
        request.overrides,
        layouts=request.layouts,
        modes=request.modes,
        steps=request.steps or layouts.STEPS,
        progress=logger.info,
    )
    return Answer(table.as_json(), table.lines(), 0 if table.ok else 1)
