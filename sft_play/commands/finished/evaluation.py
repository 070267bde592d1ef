"""`eval`: loss, accuracy and answers of a finished run beside its base's, on rows that it was not trained on."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request

HELP = {
    "eval": "figures of RUN and of its base on held-out rows (or DATA), with the interval of each difference",
}


def run(request: Request) -> Answer:
    """Evaluate base and trained model."""
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
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
