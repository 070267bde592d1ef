"""`bench`: real steps of a run, measured, and another trainer's on the same rows in turns with them."""

from __future__ import annotations

import logging

from sft_play.commands.answer import Answer
from sft_play.commands.machine import refuse_hardware
from sft_play.commands.request import Request
from sft_play.files.checkout import tool

logger = logging.getLogger(__name__)

HELP = {"bench": "measure real steps of a run: speed, parts, memory; with PEER= in turns with another trainer"}


def run(request: Request) -> Answer:
    """Figures of every round, medians and ratios."""
    refuse_hardware(request)
    bench = tool("steps.bench", command=request.command)
    compared = bench.compare(
        request.config,
        request.overrides,
        peer=request.peer,
        python=str(request.peer_python) if request.peer_python else None,
        steps=request.steps or bench.STEPS,
        warmup=request.warmup or bench.WARMUP,
        rounds=request.rounds or bench.ROUNDS,
        progress=logger.info,
    )
    return Answer(compared.as_json(), compared.lines())
