"""`reproduce`: a finished run trained again from its own folder, and compared with it bit for bit."""

from __future__ import annotations

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request

HELP = {"reproduce": "train RUN again from what its folder records, and compare the weights bit for bit"}


def run(request: Request) -> Answer:
    """Train again and compare; exit code 2 where a tensor differs."""
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
        from sft_play.finished.manage.reproduce import reproduce

        return answer_of(reproduce(finished, by_this_code=request.force))
