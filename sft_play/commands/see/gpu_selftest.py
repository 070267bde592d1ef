"""`gpu-selftest`: measures this machine's GPUs, and compares with what a plan predicts."""

from __future__ import annotations

from sft_play.commands.answer import Answer
from sft_play.commands.machine import refuse_hardware
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.files.checkout import tool

HELP = {"gpu-selftest": "measure kernels, peaks, speeds and layouts on this machine's GPUs, and compare with the plan"}


def run(request: Request) -> Answer:
    """Every part of the selftest; OUT is written after each."""
    refuse_hardware(request)
    book = tool("gpu_selftest.selftest", command=request.command).selftest(request.out)
    lines = tool("gpu_selftest.report", command=request.command).result_lines(book)
    code = 0 if book.ok else ConfigError.exit_code
    return Answer(book.as_json(), ["\n".join(lines)], code, to_out=False)
