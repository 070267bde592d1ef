"""`eval` and `ship`: a finished run beside its base on rows that it was not trained on, in figures or as a verdict."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request

HELP = {
    "eval": "figures of RUN and of its base on held-out rows (or DATA), with the interval of each difference",
    "ship": "judge RUN: better at its task, nothing else lost, the merge equal to the adapter; exit code 0 or 2",
}


def run(request: Request) -> Answer:
    """Measure base and trained model, or judge again what a file holds (REPLAY=); exit code 2 is: do not ship."""
    if request.command == "ship" and request.replay is not None:
        from sft_play.finished.evaluate.ship_replay import replay

        return answer_of(replay(request.replay))
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
        if request.command == "ship":
            from sft_play.finished.evaluate.ship import ROWS, ship

            return answer_of(ship(finished, rows=request.limit or ROWS, tolerance=request.tolerance))
        from sft_play.finished.evaluate.evaluation import evaluate_run

        evaluation = evaluate_run(
            finished,
            split=request.split,
            data=request.data,
            limit=request.limit,
            metrics=request.metrics,
            tasks=request.tasks,
            out=request.out,
            max_new_tokens=request.max_new_tokens,
        )
        return answer_of(evaluation, to_out=False)
