"""`push`: the weights of a finished run on the Hugging Face hub, after asking."""

from __future__ import annotations

from sft_play.commands.answer import Answer, agreed, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request
from sft_play.finished.export.push import push, upload_of

HELP = {
    "push": "upload RUN's adapter or model, or the merged one (MERGED=1), to REPO on the hub, after asking",
}


def run(request: Request) -> Answer:
    """Upload what is listed; without a terminal to ask on, YES=1 is needed."""
    finished = finished_run(request)
    with stdout_to_stderr(wanted=request.json):
        upload = upload_of(finished, request.repo, is_merged=request.merged, is_public=request.public, yes=request.yes)
        listed = "\n".join(upload.lines())  # shown before it is agreed to: an upload cannot be taken back
        refusal = f"{listed}\nand there is no terminal to ask on: YES=1 uploads them"
        if not agreed(request, f"{listed}\nUpload?", refusal=refusal):
            return Answer({"ok": True, "pushed": False, "repo": upload.repo}, ["Nothing was uploaded"])
        return answer_of(push(upload))
