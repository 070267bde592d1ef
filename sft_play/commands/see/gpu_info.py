"""`gpu-info`: GPUs, driver, topology, host and disk, or what a plan assumes of a machine."""

from __future__ import annotations

import os

from sft_play.commands.answer import Answer
from sft_play.commands.machine import asked_machine, output_dir_or_default
from sft_play.commands.request import Request
from sft_play.diagnose import gpu_info, gpu_page

HELP = {"gpu-info": "show GPUs, driver, topology, host and disk; with HARDWARE what a plan would assume of a machine"}


def run(request: Request) -> Answer:
    """This machine as detected, or the named one as a plan assumes it."""
    if request.hardware:
        assumed = asked_machine(request)
        data, lines = gpu_page.assumed_json(assumed), gpu_page.assumed_lines(assumed, request.hardware)
    else:
        machine = gpu_info.see_machine(output_dir_or_default(request), os.environ, full=request.full)
        data, lines = machine.as_json(), gpu_page.machine_lines(machine)
    return Answer(data, ["\n".join(lines)])
