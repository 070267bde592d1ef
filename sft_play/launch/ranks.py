"""The ranks of a run, as the process that launches them sees them: their command, the run folder with their plan, their
end.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
from logging.handlers import MemoryHandler
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.errors import Interrupted, RunFolderError
from sft_play.launch.rank import LAUNCH_FILE, LaunchPlan
from sft_play.launch.request import LaunchOptions, LaunchRequest, meet_run_nodes
from sft_play.launch.torchrun import RESUMED_VARIABLE, LaunchCommand, rank_timeout_s, torchrun_command
from sft_play.log import start_log_file
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import require_free_port
from sft_play.planner.plan import Plan
from sft_play.process import failures, signals
from sft_play.process.environment import THREADS_VARIABLE
from sft_play.process.failures import RUN_VARIABLE
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import CRASH_ENTRY, DEEPSPEED_FILE, OOM_NOTE_FILE, RunFolder, first_start_date, new_manifest
from sft_play.runs.lookup import LAUNCHER, create_run, discard_run

logger = logging.getLogger(__name__)


def launch_ranks(
    request: LaunchRequest,
    launch_plan: LaunchPlan,
    *,
    sidecar: contextlib.AbstractContextManager[object],
    log_buffer: MemoryHandler | None = None,
) -> tuple[int, LaunchCommand]:
    """Start the ranks of a planned run and wait for them; returns the exit code and the command, which may only be
    shown. Makes the run folder, but on several nodes, where rank 0 makes it.

    Args:
        sidecar: what runs beside the ranks.
        log_buffer: what was logged until now, for the run's log, which rank 0 continues.
    """
    loaded, options, plan, folder = request.loaded, request.options, launch_plan.plan, launch_plan.folder
    resumed_run = str(folder.path) if request.should_resume and folder is not None else None
    launch = _torchrun_command(loaded, options, plan, resumed_run=resumed_run)
    logger.log(logging.INFO if options.dry_run else logging.DEBUG, "Launch: %s", launch.shell_line)
    if options.dry_run:
        return 0, launch
    _require_fitting_adapter(loaded, plan)
    if folder is None or options.nodes.count > 1:
        return _run_on_all_nodes(loaded, plan.hardware, options, launch), launch
    # Not in the command that is shown and logged: typed by itself it starts a run of its own, whose rank 0 plans.
    environment = {**launch.environment, RUN_VARIABLE: str(folder.path.absolute())}
    if request.is_supervised:  # what the agent says is said by the command that was typed
        environment[failures.COMMAND_VARIABLE] = "train"
    with sidecar, _write_launch_files(folder, loaded, launch_plan):
        log_file = start_log_file(folder.log_path, buffer=log_buffer)
        logging.getLogger().removeHandler(log_file)  # closed before the ranks write to it, or it is removed
        log_file.close()
        try:
            exit_code = run_ranks(dataclasses.replace(launch, environment=environment), folder)
        except KeyboardInterrupt:  # before the ranks were started, or after they ended
            record_run_end(folder, Interrupted.exit_code)
            raise
        record_run_end(folder, exit_code)
    return exit_code, launch


def _write_launch_files(
    folder: RunFolder, loaded: LoadedConfig, launch_plan: LaunchPlan
) -> contextlib.AbstractContextManager[object]:
    """Create the run folder, or update that of a resumed run, with what its ranks read; returns the run's lock."""
    run_lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    plan, deepspeed_config = launch_plan.stage_plans[0]
    if not launch_plan.is_resumed:
        manifest = new_manifest(loaded, hardware=plan.hardware.as_json(), data={})
        run_lock = create_run(folder, loaded, manifest=manifest, plan=plan.as_json(), lock_role=LAUNCHER)
    else:  # over other ranks the split of the batch is another; the manifest is updated by rank 0
        folder.write_json("plan.json", plan.as_json())
    launch_plan = dataclasses.replace(
        launch_plan, folder_exists=not launch_plan.is_resumed, today=first_start_date(folder)
    )
    write_text(folder.path / LAUNCH_FILE, launch_plan.to_json())
    if deepspeed_config is not None:
        write_json(folder.path / DEEPSPEED_FILE, deepspeed_config)
    return run_lock


def _torchrun_command(
    loaded: LoadedConfig, options: LaunchOptions, plan: Plan, *, resumed_run: str | None
) -> LaunchCommand:
    hardware, processes = plan.hardware, plan.hardware.ranks_per_node
    # of the cores, for each CPU rank; a run that is repeated has its own
    cores_per_rank = max(1, hardware.cpu_cores // processes)
    launch = torchrun_command(
        rank_arguments(loaded, options, plan),
        processes_per_node=processes,
        nodes=options.nodes,
        threads_per_rank=None if hardware.gpus else int(os.environ.get(THREADS_VARIABLE) or cores_per_rank),
        visible_gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        nccl_timeout_s=rank_timeout_s(loaded.config, os.environ) if hardware.gpus else None,
        present_environment=os.environ,
    )
    if resumed_run is None:
        return launch
    return dataclasses.replace(launch, environment={**launch.environment, RESUMED_VARIABLE: resumed_run})


def _require_fitting_adapter(loaded: LoadedConfig, plan: Plan) -> None:
    """Raises ModelError where the adapter that the run continues does not fit, before ranks are started."""
    if loaded.config.model.adapter is None:
        return
    from sft_play.training.model.adapters import read_base_adapter
    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.tokenizer import load_tokenizer

    config, loaded_tokenizer = loaded.config, load_tokenizer(loaded.config)
    tokenizer_size = len(loaded_tokenizer.tokenizer)
    read_base_adapter(
        config,
        build_model_spec(config, plan.precision, tokenizer_size=tokenizer_size, new_rows=loaded_tokenizer.new_rows),
    )


def _run_on_all_nodes(loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, launch: LaunchCommand) -> int:
    """Start this node's ranks once all nodes have met; the exit code. Rank 0 plans again and makes the run folder."""
    # Not in the command that is shown and kept: this node's interface is of no use to who types it elsewhere.
    meeting_environment = meet_run_nodes(options, loaded.config, hardware).gloo_variables(os.environ)
    exit_code = run_ranks(dataclasses.replace(launch, environment={**launch.environment, **meeting_environment}), None)
    if exit_code not in (0, Interrupted.exit_code) and options.nodes.exported_note:  # the agent has told why
        logger.warning("Nodes: %s", options.nodes.exported_note)
    return exit_code


def rank_arguments(loaded: LoadedConfig, options: LaunchOptions, plan: Plan) -> list[str]:
    """The words of `sft-play` that start each rank, complete for ranks that no parent hands a plan."""
    arguments = ["rank", "--config", str(loaded.path), *loaded.overrides]
    adapter = loaded.config.model.adapter
    if adapter is not None:  # every rank would look for `last` again
        arguments = [word for word in arguments if not word.startswith("model.adapter=")]
        arguments.append(f"model.adapter={json.dumps(adapter)}")
    arguments += ["--strategy", plan.layout]
    # rank 0 starts it: only rank 0 knows the run's folder
    arguments += ["--tensorboard"] if options.uses_tensorboard else []
    if options.deepspeed is not None:
        arguments.append("--deepspeed")
        arguments += ["--deepspeed_config", str(options.deepspeed.file)] if options.deepspeed.file else []
    return arguments


def run_ranks(launch: LaunchCommand, folder: RunFolder | None) -> int:
    """Start the ranks under the agent, leave no process behind; returns sft-play's exit code. The first signal is
    passed on to the agent, which waits until the ranks have saved; a second one ends everything at once."""
    require_free_port(launch.port)
    agent = signals.start_child(launch.agent_argv, environment=launch.merged_environment(os.environ))

    def log_stop(signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        logger.warning("%s: the ranks save at the end of this step, then stop (before the first step, at once); a "
                       "second ends them at once", name)  # fmt: skip

    def kill_ranks(agent: subprocess.Popen[Any]) -> None:
        failures.kill_process_tree(agent.pid)

    with signals.supervise([agent], on_stop=log_stop, kill=kill_ranks) as received_signals:
        agent_code = agent.wait()
        if agent_code < 0:  # the agent is gone, on which its ranks save and stop by themselves
            failures.kill_leftovers(agent.pid, grace_s=0 if len(received_signals) > 1 else failures.ORPHAN_GRACE_S)
    return _command_exit_code(agent_code, folder, was_stopped=bool(received_signals))


def _command_exit_code(agent_code: int, folder: RunFolder | None, *, was_stopped: bool) -> int:
    """sft-play's exit code for that of the agent. A request to stop that ends the agent itself has met it before it
    listened, and so before the ranks were started."""
    if agent_code < 0 and was_stopped:
        message = "stopped before the ranks were started" if agent_code == -signal.SIGTERM else "ended at once"
        logger.warning("%s; what was saved until then is kept", message)
        return Interrupted.exit_code
    if agent_code < 0:
        signal_name = (
            signal.Signals(-agent_code).name if -agent_code in list(signal.Signals) else f"signal {-agent_code}"
        )
        logger.error("the ranks' agent was killed by %s; what the ranks saved until then is kept", signal_name)
        with contextlib.suppress(RunFolderError, OSError):
            if folder is not None:
                folder.update_manifest(**{CRASH_ENTRY: f"the ranks' agent was killed by {signal_name}"})
        return 1
    # 2 and 3: the user can fix it. A folder that this start made, and in which no step was taken, is only in the way.
    if folder is not None and agent_code in (2, 3):
        launch_file = folder.path / LAUNCH_FILE
        restarts_after_oom = (folder.path / OOM_NOTE_FILE).exists()
        is_unused = not folder.metrics_path.exists() and launch_file.exists() and not restarts_after_oom
        if is_unused and json.loads(launch_file.read_text(encoding="utf-8"))["made"]:  # by this start, not resumed
            discard_run(folder)
            logger.info("The run folder %s is removed again: nothing was trained", folder.path)
    return agent_code


def record_run_end(folder: RunFolder, exit_code: int) -> None:
    """Write how a run ended, where its ranks ended before they could write it."""
    with contextlib.suppress(RunFolderError):  # an unused folder is removed again
        if exit_code and folder.read_manifest().get("status") == "running":
            folder.update_manifest(status="stopped" if exit_code == Interrupted.exit_code else "failed")
