"""The ranks as the process that launches them sees them: their command, the run folder with their
plan, and their end."""

import contextlib
import dataclasses
import json
import logging
import os
import signal
from logging.handlers import MemoryHandler

from sft_play.config.load import LoadedConfig
from sft_play.errors import Interrupted, RunFolderError
from sft_play.launch.nodes import meet_nodes, node_card
from sft_play.launch.request import LAUNCH_FILE, LaunchOptions, LaunchPlan, LaunchRequest
from sft_play.launch.torchrun import (
    AGENT_MODULE,
    RESUMED_VARIABLE,
    TORCHRUN_MODULE,
    LaunchCommand,
    rank_timeout_s,
    torchrun_command,
)
from sft_play.log import start_log_file
from sft_play.machine.network import require_free_port
from sft_play.planner.plan import Plan
from sft_play.process import failures, signals
from sft_play.process.environment import THREADS_VARIABLE
from sft_play.runs.folder import (
    CRASH_ENTRY,
    DEEPSPEED_FILE,
    OOM_NOTE_FILE,
    RunFolder,
    first_start_date,
    new_manifest,
    write_json,
    write_text,
)
from sft_play.runs.lookup import LAUNCHER, create_run, discard_run

logger = logging.getLogger(__name__)


def launch_ranks(
    request: LaunchRequest,
    launch_plan: LaunchPlan,
    *,
    sidecar: contextlib.AbstractContextManager[object],
    log_buffer: MemoryHandler | None = None,
) -> tuple[int, LaunchCommand]:
    """Start the ranks of a planned run and wait for them; returns the exit code and the command,
    which may only be shown. Makes the run folder, but on several nodes, where rank 0 makes it.

    Args:
        sidecar: what runs beside the ranks.
        log_buffer: what was logged until now, for the run's log, which rank 0 continues.
    """
    loaded, options = request.loaded, request.options
    plan, folder = launch_plan.plan, launch_plan.folder
    launch = _ranks_command(loaded, options, plan)
    if request.should_resume and folder is not None:
        launch = dataclasses.replace(
            launch, environment={**launch.environment, RESUMED_VARIABLE: str(folder.path)}
        )
    if options.dry_run:
        logger.info("Launch: %s", launch.shell_line)
        return 0, launch
    logger.debug("Launch: %s", launch.shell_line)
    # refused here where it does not fit, before ranks are started
    if loaded.config.model.adapter is not None:
        from sft_play.training.model.model_loading import read_base_adapter
        from sft_play.training.prepare.model_spec import build_model_spec
        from sft_play.training.prepare.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(loaded.config)
        size, new_rows = len(tokenizer.tokenizer), tokenizer.new_rows
        spec = build_model_spec(
            loaded.config, plan.precision, tokenizer_size=size, new_rows=new_rows
        )
        read_base_adapter(loaded.config, spec)
    # What is added now is not in the command that is shown and logged: typed by itself, or
    # elsewhere, that starts a run of its own, whose rank 0 plans.
    environment = dict(launch.environment)
    if folder is None or options.nodes.count > 1:  # rank 0 plans again and makes the run folder
        card = node_card(
            loaded.config,
            plan.hardware,
            strategy=options.strategy,
            uses_deepspeed=options.deepspeed is not None,
        )
        environment |= meet_nodes(
            options.nodes, card, timeout_s=rank_timeout_s(loaded.config, os.environ)
        )
        exit_code = run_ranks(dataclasses.replace(launch, environment=environment), None)
        # the agent has told why
        if exit_code not in (0, Interrupted.exit_code) and options.nodes.exported_note:
            logger.warning("Nodes: %s", options.nodes.exported_note)
        return exit_code, launch
    environment[failures.RUN_VARIABLE] = str(folder.path.absolute())
    if request.is_supervised:  # what the agent says is said by the command that was typed
        environment[failures.COMMAND_VARIABLE] = "train"
    with sidecar, _write_launch_files(folder, loaded, launch_plan):
        # closed before the ranks write to it, or it is removed
        start_log_file(folder.log_path, buffer=log_buffer).close()
        # by a request to stop before the ranks were started, or after they ended
        exit_code = Interrupted.exit_code
        try:
            exit_code = run_ranks(dataclasses.replace(launch, environment=environment), folder)
        finally:
            with contextlib.suppress(RunFolderError):  # an unused folder is removed again
                # ranks could not write it
                if exit_code and folder.read_manifest().get("status") == "running":
                    status = "stopped" if exit_code == Interrupted.exit_code else "failed"
                    folder.update_manifest(status=status)
    return exit_code, launch


def _write_launch_files(
    folder: RunFolder, loaded: LoadedConfig, launch_plan: LaunchPlan
) -> contextlib.AbstractContextManager[object]:
    """Create the run folder, or update the resumed run's, with what its ranks read; returns the
    run's lock."""
    run_lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    plan, deepspeed_config = launch_plan.stage_plans[0]
    if not launch_plan.is_resumed:
        manifest = new_manifest(loaded, hardware=plan.hardware.as_json(), data={})
        run_lock = create_run(
            folder, loaded, manifest=manifest, plan=plan.as_json(), lock_role=LAUNCHER
        )
    else:  # over other ranks the split of the batch is another; the manifest is updated by rank 0
        folder.write_json("plan.json", plan.as_json())
    launch_plan = dataclasses.replace(
        launch_plan, folder_exists=not launch_plan.is_resumed, today=first_start_date(folder)
    )
    write_text(folder.path / LAUNCH_FILE, launch_plan.to_json())
    if deepspeed_config is not None:
        write_json(folder.path / DEEPSPEED_FILE, deepspeed_config)
    return run_lock


def _ranks_command(loaded: LoadedConfig, options: LaunchOptions, plan: Plan) -> LaunchCommand:
    """Build the command that starts the ranks of this node. Their words need no parent that hands
    them a plan: started by hand, rank 0 makes it."""
    arguments = ["rank", "--config", str(loaded.path), *loaded.overrides]
    adapter = loaded.config.model.adapter
    if adapter is not None:  # every rank would look for `last` again
        arguments = [word for word in arguments if not word.startswith("model.adapter=")]
        arguments.append(f"model.adapter={json.dumps(adapter)}")
    arguments += ["--strategy", plan.layout]
    if options.uses_tensorboard:  # rank 0 starts it: only rank 0 knows the run's folder
        arguments.append("--tensorboard")
    if options.deepspeed is not None:
        arguments.append("--deepspeed")
        if options.deepspeed.file is not None:
            arguments += ["--deepspeed_config", str(options.deepspeed.file)]
    hardware, processes = plan.hardware, plan.hardware.ranks_per_node
    threads = timeout_s = None
    if hardware.gpus:
        timeout_s = rank_timeout_s(loaded.config, os.environ)
    else:  # of the cores, for each CPU rank; a run that is repeated has its own
        threads = int(os.environ.get(THREADS_VARIABLE) or max(1, hardware.cpu_cores // processes))
    return torchrun_command(
        arguments,
        processes_per_node=processes,
        nodes=options.nodes,
        threads_per_rank=threads,
        visible_gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        nccl_timeout_s=timeout_s,
    )


def run_ranks(launch: LaunchCommand, folder: RunFolder | None) -> int:
    """Run the ranks under the agent to their end and leave no process behind; returns sft-play's
    exit code. The first signal is passed on to the agent, which waits until the ranks have saved; a
    second one ends everything at once.
    """
    require_free_port(launch.port)
    # without `PET_NNODES` and the like, which torchrun takes as defaults of its flags
    # (`node_variables` has read them)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}
    # our agent in the launcher's place
    argv = [AGENT_MODULE if word == TORCHRUN_MODULE else word for word in launch.argv]
    agent = signals.start_child(argv, environment={**environment, **launch.environment})

    def log_stop(signal_number: int) -> None:
        logger.warning(
            "%s: the ranks save at the end of this step, then stop (before the first step, at"
            " once); a second ends them at once",
            signal.Signals(signal_number).name,
        )

    with signals.supervise(
        [agent], on_stop=log_stop, kill=lambda process: failures.kill_process_tree(process.pid)
    ) as received_signals:
        agent_code = agent.wait()
        if agent_code < 0:  # the agent is gone, on which its ranks save and stop by themselves
            failures.kill_leftovers(
                agent.pid, grace_s=0 if len(received_signals) > 1 else failures.ORPHAN_GRACE_S
            )
    return _command_exit_code(agent_code, folder, was_stopped=bool(received_signals))


def _command_exit_code(agent_code: int, folder: RunFolder | None, *, was_stopped: bool) -> int:
    if agent_code < 0 and was_stopped:
        # by the request itself, which it met before it listened, or by a second one
        message = (
            "stopped before the ranks were started"
            if agent_code == -signal.SIGTERM
            else "ended at once"
        )
        logger.warning("%s; what was saved until then is kept", message)
        return Interrupted.exit_code
    if agent_code < 0:
        crash = f"the ranks' agent was killed by {signals.signal_name(-agent_code)}"
        logger.error("%s; what the ranks saved until then is kept", crash)
        with contextlib.suppress(RunFolderError, OSError):
            if folder is not None:
                folder.update_manifest(**{CRASH_ENTRY: crash})
        return 1
    # 2 and 3: the user can fix it. A folder that this start made, and in which no step was taken,
    # is only in the way.
    if folder is not None and agent_code in (2, 3):
        launch_file = folder.path / LAUNCH_FILE
        restarts_after_oom = (folder.path / OOM_NOTE_FILE).exists()
        is_unused = (
            not folder.metrics_path.exists() and launch_file.exists() and not restarts_after_oom
        )
        # by this start, not resumed
        if is_unused and json.loads(launch_file.read_text(encoding="utf-8"))["made"]:
            discard_run(folder)
            logger.info("The run folder %s is removed again: nothing was trained", folder.path)
    return agent_code
