"""`eval`, `ship`, `report`, `compare`, `reproduce`, `runs` and `prune`: runs that have ended measured, judged, shown,
trained again, listed and removed."""

from __future__ import annotations

import sys

from sft_play.commands.answer import Answer, agreed, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run, output_dir_of, require_source
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.finished.listing import What, list_runs, prune, to_prune
from sft_play.finished.report.charts import screen_of
from sft_play.finished.report.compare import PAGE, Comparison, compare
from sft_play.finished.report.record import read_record
from sft_play.finished.report.report import RunReport, report
from sft_play.finished.run import find_any, require_split
from sft_play.units import gib

HELP = {
    "eval": "figures of RUN and of its base on held-out rows (or DATA), with the interval of each difference",
    "ship": "judge RUN: better at its task, nothing else lost, the merge equal to the adapter; exit code 0 or 2",
    "report": "write one page about RUN: curves, predicted against measured, answers, data, how to reproduce it",
    "compare": "write one page about RUNS beside each other: what differs, results, curves",
    "reproduce": "train RUN again from what its folder records, and compare the weights bit for bit",
    "runs": "list all runs: status, last step, best held-out figure, size, age",
    "prune": "remove the runs that RUNS names, or only their checkpoints (CHECKPOINTS=1), after asking",
}


def run(request: Request) -> Answer:
    """Exit code 2 is: do not ship (ship), or a tensor differs (reproduce)."""
    if request.command == "runs":
        return answer_of(list_runs(output_dir_of(request)))
    if request.command == "prune":
        return _prune(request)
    if request.command in ("report", "compare"):
        return _show(request)
    if request.command == "ship" and request.replay is not None:
        from sft_play.finished.evaluate.ship_replay import replay

        return answer_of(replay(request.replay))
    with stdout_to_stderr(wanted=request.json):
        return _run_models(request)


def _run_models(request: Request) -> Answer:
    if request.data is not None:
        require_source(request.data, "DATA")
    finished = finished_run(request)
    if request.command == "reproduce":
        from sft_play.finished.reproduce import reproduce

        return answer_of(reproduce(finished, by_this_code=request.force))
    if request.command == "ship":
        from sft_play.finished.evaluate.ship import ROWS, ship

        return answer_of(ship(finished, rows=request.limit or ROWS, tolerance=request.tolerance))
    require_split(request.split, request.data)
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


def _show(request: Request) -> Answer:
    """The page is written; the curves are not logged, which would keep no colours."""
    output, screen = output_dir_of(request), screen_of(sys.stdout)
    written: RunReport | Comparison
    if request.command == "report":
        written = report(read_record(find_any(output, request.run)), path=request.out, screen=screen)
    elif not request.runs:
        raise ConfigError('RUNS= names no runs: make compare RUNS="first second" (make runs lists them)')
    else:
        folders = [find_any(output, name) for name in request.runs]
        written = compare(folders, path=request.out or folders[0].path / PAGE, screen=screen)
    draw(request, written)
    return answer_of(written, to_out=False)


def draw(request: Request, written: RunReport | Comparison) -> None:
    """The curves of a page on the terminal itself."""
    if written.plot and not request.json:
        sys.stdout.write("\n".join(written.plot) + "\n")
        sys.stdout.flush()


def _prune(request: Request) -> Answer:
    """Remove after asking (YES=1 where there is no terminal to ask on)."""
    output = output_dir_of(request)
    if not request.runs:
        raise ConfigError("RUNS= names no run; make runs lists them: make prune RUNS='first second'")
    what: What = "checkpoints" if request.checkpoints else "run"
    chosen = to_prune(output, request.runs, what)
    nothing = {"ok": True, "removed": [], "freed_bytes": 0}
    if not chosen:
        return Answer(nothing, ["There are no checkpoints to remove"])
    listed = "\n".join(f"  {path} ({gib(size, digits=2)} GiB)" for path, size in chosen.items())
    refusal = f"this would remove\n{listed}\nand there is no terminal to ask on: YES=1 removes them"
    if not agreed(request, f"Remove\n{listed}\n?", refusal=refusal):
        return Answer(nothing, ["Nothing was removed"])
    return answer_of(prune(output, chosen))
