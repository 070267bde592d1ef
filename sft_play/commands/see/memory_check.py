"""`memory-check`: the memory of a run's ranks, beside the prediction."""

from __future__ import annotations

import logging
import os
import sys

from sft_play.commands.answer import Answer, write_json_line, write_out
from sft_play.commands.machine import output_dir_or_default, refuse_hardware
from sft_play.commands.request import Request
from sft_play.diagnose import memory_check, memory_page
from sft_play.log import output_is_lost

logger = logging.getLogger(__name__)

HELP = {"memory-check": "show what the ranks of a run hold of each GPU (or of the RAM) beside what was predicted"}


def run(request: Request) -> Answer | int:
    """One look at the memory, or with WATCH one after the other; the last one is written to OUT."""
    refuse_hardware(request)
    output, peaks = output_dir_or_default(request), memory_check.HighestSeen()  # kept from look to look

    def take() -> memory_check.MemorySeen:
        return memory_check.see_memory(output, os.environ, named=request.run, peaks=peaks)

    def show(check: memory_check.MemorySeen) -> None:
        if request.json:
            write_json_line(check.as_json())
        else:
            logger.info("%s", "\n".join(memory_page.memory_lines(check)))
        if output_is_lost():
            raise KeyboardInterrupt  # the output has lost its reader: end as with Ctrl-C

    if not request.watch:
        check = take()
        return Answer(check.as_json(), ["\n".join(memory_page.memory_lines(check))])
    last = memory_page.watch(take, write=show, console=None if request.json else memory_page.terminal(sys.stdout))
    if request.out is not None and last is not None:
        write_out(request.out, last.as_json())
    return 0
