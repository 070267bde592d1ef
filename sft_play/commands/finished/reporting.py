"""`report` and `compare`: a page about a run, or about several beside each other, with the curves in the terminal."""

from __future__ import annotations

import sys

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.machine import output_dir_or_default
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.finished.report.charts import screen_of
from sft_play.finished.report.compare import PAGE, Comparison, compare
from sft_play.finished.report.record import read_record
from sft_play.finished.report.report import RunReport, report
from sft_play.finished.run import find_any

HELP = {
    "report": "write one page about RUN: curves, predicted against measured, answers, data, how to reproduce it",
    "compare": "write one page about RUNS beside each other: what differs, results, curves",
}


def run(request: Request) -> Answer:
    """Write the page; curves are drawn for the terminal that reads the answer."""
    output, screen = output_dir_or_default(request), screen_of(sys.stdout)
    if request.command == "report":
        record = read_record(find_any(output, request.run))
        return _answer(report(record, path=request.out, screen=screen), request)
    if not request.runs:
        raise ConfigError('RUNS= names no runs: make compare RUNS="first second" (make runs lists them)')
    folders = [find_any(output, name) for name in request.runs]
    return _answer(compare(folders, path=request.out or folders[0].path / PAGE, screen=screen), request)


def _answer(written: RunReport | Comparison, request: Request) -> Answer:
    """The answer, after the curves: those go to the terminal itself, since what is logged keeps no colours."""
    if written.plot and not request.json:
        sys.stdout.write("\n".join(written.plot) + "\n")
        sys.stdout.flush()
    return answer_of(written, to_out=False)
