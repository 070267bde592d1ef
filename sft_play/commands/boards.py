"""`tensorboard`, `tb-open`, `tb-stop` and `tb-clean`: the curves of runs in TensorBoard."""

from __future__ import annotations

import os

from sft_play.commands.answer import Answer, agreed, stdout_to_stderr
from sft_play.commands.machine import output_dir_of
from sft_play.commands.request import Request
from sft_play.launch import board_commands
from sft_play.launch.tensorboard import Sidecar, recorded

HELP = {
    "tensorboard": "show the curves of all runs in output.dir, or of RUN; it stays until tb-stop",
    "tb-open": "open that page in a browser, or say its address",
    "tb-stop": "stop this project's TensorBoards: all, or those of CONFIG's output.dir or of RUN",
    "tb-clean": "remove the event files of finished runs, after asking (YES=1)",
}


def run(request: Request) -> Answer:
    """Start, open or stop the page, or remove the curves; each step is logged."""
    with stdout_to_stderr(wanted=request.json):
        return {"tensorboard": _show, "tb-open": _open, "tb-stop": _stop, "tb-clean": _clean}[request.command](request)


def _show(request: Request) -> Answer:
    return Answer({"ok": True, **_page(board_commands.show(output_dir_of(request), request.run, os.environ))})


def _open(request: Request) -> Answer:
    sidecar, opened = board_commands.open_page(output_dir_of(request), request.run, os.environ)
    return Answer({"ok": True, "opened": opened, **_page(sidecar)})


def _stop(request: Request) -> Answer:
    is_named = request.config_given or request.run or request.overrides
    stopped, left = board_commands.stop(output_dir_of(request) if is_named else None, request.run)
    data = {"ok": not left, "stopped": [_page(one) for one in stopped], "running": [_page(one) for one in recorded()]}
    return Answer(data, exit_code=1 if left else 0)


def _clean(request: Request) -> Answer:
    def agrees(what: str) -> bool:
        refusal = f"tb-clean would remove {what}, and there is no terminal to ask on: YES=1 removes them"
        return agreed(request, f"Remove {what}?", refusal=refusal)

    return Answer({"ok": True, **board_commands.clean(output_dir_of(request), request.run, agrees=agrees)})


def _page(sidecar: Sidecar) -> dict[str, object]:
    return {name: getattr(sidecar, name) for name in ("page", "logdir", "host", "port", "pid")}
