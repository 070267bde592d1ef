"""Starts the ranks of a run under torch's launcher and waits for them; the exit code is sft-play's."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess

from sft_play.config.load import LoadedConfig
from sft_play.errors import Interrupted, RunFolderError
from sft_play.facts.network import require_free_port
from sft_play.launch.command import Launch
from sft_play.launch.handed import LAUNCH_FILE
from sft_play.launch.launch_options import LaunchOptions
from sft_play.planner.plan import Plan
from sft_play.process import endings, failures
from sft_play.runs.creation import discard_run
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)


def rank_words(loaded: LoadedConfig, options: LaunchOptions, plan: Plan) -> list[str]:
    """The words of `sft-play` that start each rank; with the layout on several nodes, where no parent hands over a
    plan."""
    words = ["rank", "--config", str(loaded.path), *loaded.overrides]
    adapter = loaded.config.model.adapter
    if adapter is not None:  # every rank would look for `last` again
        words = [word for word in words if not word.startswith("model.adapter=")]
        words.append(f"model.adapter={json.dumps(adapter)}")
    if options.nodes.count == 1:
        return words
    words += ["--strategy", plan.layout]
    words += ["--tensorboard"] if options.board else []  # rank 0 starts it: only rank 0 knows the run's folder
    if options.deepspeed is not None:
        words.append("--deepspeed")
        words += ["--deepspeed_config", str(options.deepspeed.file)] if options.deepspeed.file else []
    return words


def run_ranks(launch: Launch, folder: RunFolder | None) -> int:
    """Start the ranks under the agent, pass signals on, leave no process behind; returns sft-play's exit code.

    The first signal goes to the agent, which passes it on to the ranks and waits until they have saved. A second one
    ends everything at once.
    """
    require_free_port(launch.port)
    signals: list[int] = []
    environment = endings.ends_with_me(launch.environment_in(os.environ), number=signal.SIGTERM)
    # In a session of its own, so that a terminal's Ctrl-C reaches this process only, and the ranks hear of it once.
    process = subprocess.Popen(launch.watched, env=environment, start_new_session=True)

    def pass_on(number: int) -> None:
        signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        name = signal.Signals(number).name
        logger.warning("%s: the ranks save at the end of this step, then stop; a second ends them at once", name)

    def end(number: int) -> None:
        signals.append(number)
        failures.end_at_once(process.pid)

    with endings.StopSignals(pass_on, end):
        code = process.wait()
        if code < 0:  # the agent is gone, on which its ranks save and stop by themselves
            failures.end_leftovers(process.pid, patience_s=0 if len(signals) > 1 else failures.ORPHAN_S)
    return _exit_code(code, folder, stopped=bool(signals))


def _exit_code(code: int, folder: RunFolder | None, *, stopped: bool) -> int:
    """The agent's exit code, which is sft-play's; where a signal ended the agent 1, or 130 if the user stopped it."""
    if code < 0 and stopped:
        logger.warning("ended at once; what was saved until then is kept")
        return Interrupted.exit_code
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        logger.error("the ranks' agent was killed by %s; what the ranks saved until then is kept", name)
        return 1
    # 2 and 3: the user can fix it. A folder that this start made, and in which no step was taken, is only in the way.
    if folder is not None and code in (2, 3):
        launched = folder.path / LAUNCH_FILE
        is_unused = not folder.metrics_path.exists() and launched.exists()
        if is_unused and json.loads(launched.read_text(encoding="utf-8"))["made"]:  # by this start, not resumed
            discard_run(folder)
            logger.info("The run folder %s is removed again: nothing was trained", folder.path)
    return code


def note_end(folder: RunFolder, code: int) -> None:
    """Write how a run ended, where its ranks ended before they could write it."""
    with contextlib.suppress(RunFolderError):  # an unused folder is removed again
        if code and folder.manifest().get("status") == "running":
            folder.update_manifest(status="stopped" if code == Interrupted.exit_code else "failed")
