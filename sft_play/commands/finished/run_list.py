"""`runs`, `prune` and `reproduce`: the runs of the output folder listed, removed, or trained again."""

from __future__ import annotations

from sft_play.commands.answer import Answer, agreed, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run, output_dir_or_default
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.finished.manage.listing import What, list_runs, prune, to_prune
from sft_play.units import gib

HELP = {
    "runs": "list all runs: status, last step, best held-out figure, size, age",
    "prune": "remove the runs that RUNS names, or only their checkpoints (CHECKPOINTS=1), after asking",
    "reproduce": "train RUN again from what its folder records, and compare the weights bit for bit",
}


def run(request: Request) -> Answer:
    """List; remove after asking (YES=1 where there is no terminal to ask on); or train again, with exit code 2 where a
    tensor differs."""
    if request.command == "reproduce":
        finished = finished_run(request)
        with stdout_to_stderr(wanted=request.json):
            from sft_play.finished.manage.reproduce import reproduce

            return answer_of(reproduce(finished, by_this_code=request.force))
    output = output_dir_or_default(request)
    if request.command == "runs":
        return answer_of(list_runs(output))
    if not request.runs:
        raise ConfigError("RUNS= names no run; make runs lists them: make prune RUNS='first second'")
    what: What = "checkpoints" if request.checkpoints else "run"
    chosen = to_prune(output, request.runs, what)
    if not chosen:
        return Answer({"ok": True, "removed": [], "freed_bytes": 0}, ["There are no checkpoints to remove"])
    listed = "\n".join(f"  {path} ({gib(size, digits=2)} GiB)" for path, size in chosen.items())
    refusal = f"this would remove\n{listed}\nand there is no terminal to ask on: YES=1 removes them"
    if not agreed(request, f"Remove\n{listed}\n?", refusal=refusal):
        return Answer({"ok": True, "removed": [], "freed_bytes": 0}, ["Nothing was removed"])
    return answer_of(prune(output, chosen))
