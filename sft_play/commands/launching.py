"""`train`, `resume`, `train-distributed`, `train-deepspeed` and `launch-command`: a run in this
process, as one of a launcher's ranks, or over ranks that are launched here; `rank` is one of
these, which help does not name."""

from sft_play.commands.launch_requests import launch_request_from
from sft_play.commands.request import (
    CommandResult,
    Request,
    redirect_stdout_to_stderr,
    refuse_hardware,
)
from sft_play.finished.listing import find_best_checkpoint
from sft_play.launch.start import start_run
from sft_play.runs.folder import read_summary


def run_launching(request: Request) -> CommandResult | int:
    """Train, or show how; the answer is the run's summary, whose lines are already in the log."""
    refuse_hardware(request)
    with redirect_stdout_to_stderr(enabled=request.json):
        launch_request = launch_request_from(request)
        launch_result = start_run(launch_request)
        if launch_request.options.dry_run:
            launch, plan = launch_result.launch, launch_result.plan
            fields = launch and {
                "line": launch.shell_line,
                "words": list(launch.argv),
                "environment": launch.environment,
            }
            return CommandResult({"launch": fields, "plan": plan and plan.as_json()})
        if request.command == "rank" or (
            launch_request.rank_info is not None and not launch_request.rank_info.is_first
        ):
            return 0  # the parent answers, or rank 0
        # the run's name alone where summary.json is gone; no run on several nodes, where rank 0 has
        # the folder
        folder, exit_code = launch_result.folder, launch_result.exit_code
        if folder is None or not folder.path.is_dir():  # a run that is refused leaves nothing
            return CommandResult(
                {"run": None} if exit_code else {"run": None, "exit": 0}, exit_code=exit_code
            )
        data: dict[str, object] = {"run": str(folder.path)}
        if exit_code == 0:
            return CommandResult(
                {**data, **read_summary(folder.path), **find_best_checkpoint(folder)}
            )
        # of ranks that failed, whose agent has reported it
        if error := folder.read_manifest().get("error"):
            data["error"] = str(error)
        return CommandResult(data, exit_code=exit_code)
