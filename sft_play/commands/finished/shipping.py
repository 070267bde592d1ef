"""`ship`: one verdict about a finished run, with evidence that replays."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request

HELP = {"ship": "judge RUN: better at its task, nothing else lost, the merge equal to the adapter; exit code 0 or 2"}


def run(request: Request) -> Answer:
    """Measure and judge, or judge again what a file holds."""
    if request.replay is not None:
        from sft_play.finished.evaluate.ship_replay import replay

        return answer_of(replay(request.replay))
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
        from sft_play.finished.evaluate.ship import ROWS, ship

        return answer_of(ship(finished, rows=request.limit or ROWS, tolerance=request.tolerance))
