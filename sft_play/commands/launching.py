"""`train`, `resume`, `train-distributed`, `train-deepspeed` and `launch-command`: a run in this
process, as one of a launcher's ranks, or over ranks that are launched here; `rank` is one of
these, which help does not name."""

from __future__ import annotations

import dataclasses
import functools
import os

from sft_play.commands.answer import CommandResult, redirect_stdout_to_stderr
from sft_play.commands.launchers import LAUNCHING_COMMANDS, launcher_rank_info, needs_ranks, require_rank_info
from sft_play.commands.lookups import refuse_hardware, trusts_code
from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.finished.listing import find_best_checkpoint
from sft_play.launch.request import LaunchRequest
from sft_play.launch.resume import resume_request
from sft_play.launch.start import LaunchResult, start_run
from sft_play.launch.torchrun import RESUMED_VARIABLE, read_rank_info
from sft_play.log import escape_control
from sft_play.runs.files import read_summary
from sft_play.runs.folder import check_remote_code


def run_launching(request: Request) -> CommandResult | int:
    """Train, or show how; the answer is the run's summary, whose lines are already in the log."""
    refuse_hardware(request)
    with redirect_stdout_to_stderr(enabled=request.json):
        launch_request = launch_request_from(request)
        launch_result = start_run(launch_request)
        if launch_request.options.dry_run:
            return _launch_command_result(launch_result)
        if request.command == "rank" or (
            launch_request.rank_info is not None and not launch_request.rank_info.is_first
        ):
            return 0  # the parent answers, or rank 0
        return _training_result(launch_result)


def launch_request_from(request: Request) -> LaunchRequest:
    """Build the LaunchRequest of a command: the run, and whether this process trains it, alone or as a rank, or
    launches ranks. Raises ConfigError where the config cannot be read, or the words contradict each other."""
    command, options = request.command, request.options
    if command == "train" and request.run:
        raise ConfigError(f"RUN={escape_control(request.run)} names a run for make resume; output.name names a new one")
    rank_info = require_rank_info() if command == "rank" else launcher_rank_info(request)
    loaded = load_config(request.config, overrides=request.overrides)
    if command == "rank":
        resumed_run = os.environ.get(RESUMED_VARIABLE)
        return LaunchRequest(
            loaded, options, rank_info=rank_info, should_resume=bool(resumed_run), run_name=resumed_run
        )
    if command == "launch-command":
        return LaunchRequest(loaded, dataclasses.replace(options, dry_run=True), launches_ranks=True)
    is_trusted = functools.partial(trusts_code, request)
    if rank_info is not None:
        if request.is_config_recorded:
            check_remote_code(request.config, *(part.config.model for part in loaded.runs), is_trusted=is_trusted)
        return LaunchRequest(
            loaded, options, rank_info=rank_info, should_resume=command == "resume", run_name=request.run
        )
    if command == "resume":
        return resume_request(loaded, options, run_name=request.run, is_trusted=is_trusted)
    # the only process that another launcher started launches no others
    return LaunchRequest(
        loaded,
        options,
        launches_ranks=(command in LAUNCHING_COMMANDS and read_rank_info(os.environ) is None)
        or needs_ranks(request, loaded),
    )


def _training_result(launch_result: LaunchResult) -> CommandResult:
    """Return the run's summary as the command's answer: its name alone where summary.json is gone; no run on several
    nodes, where rank 0 has the folder. Of ranks that failed (their agent has reported it) the recorded error."""
    folder = launch_result.folder
    run = None if folder is None else str(folder.path)
    if launch_result.exit_code:
        # a run that is refused leaves nothing
        kept_folder = folder if folder is not None and folder.path.is_dir() else None
        error = kept_folder.read_manifest().get("error") if kept_folder else None
        data = {"run": run if kept_folder else None} | ({"error": str(error)} if error else {})
        return CommandResult(data, exit_code=launch_result.exit_code)
    summary = {**read_summary(folder.path), **find_best_checkpoint(folder)} if folder else {"exit": 0}
    return CommandResult({"run": run, **summary})


def _launch_command_result(launch_result: LaunchResult) -> CommandResult:
    launch = launch_result.launch
    launch_fields = launch and {
        "line": launch.shell_line,
        "words": list(launch.argv),
        "environment": launch.environment,
    }
    return CommandResult(
        {"launch": launch_fields, "plan": launch_result.plan.as_json() if launch_result.plan else None}
    )
