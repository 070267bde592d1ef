"""A run over ranks. As the process that launches them: their command, the run folder with their plan, their end. As one
of them, whichever launcher started it: its place, the machine of all ranks, and what rank 0 hands over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from datetime import date
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, RunFolderError, SftPlayError, error_prefix
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.network import SETTLE_SHARE, NodeSetup, require_free_port
from sft_play.launch.command import LaunchCommand, rank_timeout_s, torchrun_command
from sft_play.launch.exported import RESUMED_VARIABLE, RankInfo, rank_variables, rendezvous_variables
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import (
    adjust_local_rank,
    choose_interface,
    rank_gpu_id,
    require_distinct_gpus,
    restrict_to_device,
    select_hardware,
    spread_hardware,
)
from sft_play.log import start_log_file
from sft_play.planner.plan import Plan, PlanWithDeepSpeed, plan_from_json
from sft_play.process import failures, signals
from sft_play.process.environment import THREADS_VARIABLE
from sft_play.process.failures import RUN_VARIABLE
from sft_play.process.imports import importing
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import CRASH_ENTRY, DEEPSPEED_FILE, RunFolder
from sft_play.runs.locking import LAUNCHER, RunLock
from sft_play.runs.lookup import create_run, discard_run
from sft_play.runs.manifest import first_start_date, new_manifest
from sft_play.runs.oom import OOM_NOTE_FILE

if TYPE_CHECKING:  # it imports torch
    from sft_play.training.ranks.node_meeting import NodeMeeting

logger = logging.getLogger(__name__)


def launch_ranks(
    loaded: LoadedConfig,
    options: LaunchOptions,
    stage_plans: Sequence[PlanWithDeepSpeed],
    folder: RunFolder | None,
    *,
    is_resumed: bool,
    resumed_run: str | None,
    sidecar: contextlib.AbstractContextManager[object],
    log_buffer: MemoryHandler | None = None,
) -> tuple[int, LaunchCommand]:
    """Start the ranks of a planned run and wait for them; the exit code and the command, which may only be shown.

    Args:
        folder: the run's, which is made here; None on several nodes, where rank 0 makes it.
        resumed_run: the name of the run that `make resume` resumes.
        sidecar: what runs beside the ranks.
        log_buffer: what was logged until now, for the run's log, which rank 0 continues.
    """
    plan = stage_plans[0][0]
    launch = _torchrun_command(loaded, options, plan, resumed_run=resumed_run)
    logger.log(logging.INFO if options.dry_run else logging.DEBUG, "Launch: %s", launch.shell_line)
    if options.dry_run:
        return 0, launch
    _require_fitting_adapter(loaded, plan)
    if folder is None or options.nodes.count > 1:
        return _run_on_all_nodes(loaded, plan.hardware, options, launch), launch
    # Not in the command that is shown and logged: typed by itself it starts a run of its own, whose rank 0 plans.
    environment = {**launch.environment, RUN_VARIABLE: str(folder.path.absolute())}
    with sidecar, _write_launch_files(folder, loaded, stage_plans, is_resumed=is_resumed):
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
    folder: RunFolder, loaded: LoadedConfig, stage_plans: Sequence[PlanWithDeepSpeed], *, is_resumed: bool
) -> contextlib.AbstractContextManager[object]:
    run_lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    plan, deepspeed_config = stage_plans[0]
    if not is_resumed:
        manifest = new_manifest(loaded, hardware=plan.hardware.as_json(), data={})
        run_lock = create_run(folder, loaded, manifest=manifest, plan=plan.as_json(), lock_role=LAUNCHER)
    else:  # over other ranks the split of the batch is another; the manifest is updated by rank 0
        folder.write_json("plan.json", plan.as_json())
    launch_plan = LaunchPlan(folder, is_resumed, stage_plans, today=first_start_date(folder))
    write_text(folder.path / LAUNCH_FILE, launch_plan.to_json(has_folder=not is_resumed))
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
    from sft_play.training.prepare.base_adapter import read_base_adapter
    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.tokenizer import load_tokenizer

    config, loaded_tokenizer = loaded.config, load_tokenizer(loaded.config)
    tokenizer_size = len(loaded_tokenizer.tokenizer)
    read_base_adapter(
        config,
        build_model_spec(config, plan.precision, tokenizer_size=tokenizer_size, new_rows=loaded_tokenizer.new_rows),
    )


def resolve_exported_nodes(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """Resolve what exported RANK and WORLD_SIZE count: nodes, or ranks (RANK is then this node's first). Where both
    are possible, wait for the nodes: how many come decides. Returns the options with those nodes."""
    nodes, node_hardware = (
        options.nodes,
        select_hardware(dataclasses.replace(options, nodes=NodeSetup()), restrict_to_device(config, detect_hardware())),
    )
    if node_hardware.ranks == 1 or nodes.count % node_hardware.ranks:
        return options
    rank_explanation = (
        f"RANK and WORLD_SIZE in the environment count ranks, {nodes.count} in all and {node_hardware.ranks} on each "
        "node"
    )
    if options.dry_run:  # asks nobody
        logger.info("Nodes: or %s: NNODES=%d says so", rank_explanation, nodes.count // node_hardware.ranks)
        return options
    logger.info("Nodes: or %s: those that come tell, and those of ranks are all if no other comes for %.0f s",
                rank_explanation, rank_timeout_s(config, os.environ) * SETTLE_SHARE)  # fmt: skip
    with error_prefix(f"{nodes.exported_note}, or {rank_explanation}"):
        count = len(_meet_nodes(options, config, node_hardware, may_count_ranks=True).cards)
    if count < nodes.count:
        logger.info("Nodes: %s", rank_explanation)
        nodes = dataclasses.replace(
            nodes, count=count, rank=nodes.rank // node_hardware.ranks, exported_note=rank_explanation
        )
    return dataclasses.replace(options, nodes=nodes)


def _meet_nodes(
    options: LaunchOptions, config: RunConfig, node_hardware: Hardware, *, may_count_ranks: bool = False
) -> NodeMeeting:
    with importing():
        from sft_play.training.ranks.node_meeting import meet_nodes, node_card

    card = node_card(config, node_hardware, strategy=options.strategy, uses_deepspeed=options.deepspeed is not None)
    return meet_nodes(
        options.nodes, card, timeout_s=rank_timeout_s(config, os.environ), may_count_ranks=may_count_ranks
    )


def _run_on_all_nodes(loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, launch: LaunchCommand) -> int:
    """Start this node's ranks once all nodes have met; the exit code. Rank 0 plans again and makes the run folder."""
    # Not in the command that is shown and kept: this node's interface is of no use to who types it elsewhere.
    meeting_environment = _meet_nodes(options, loaded.config, hardware).gloo_variables(os.environ)
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
    received_signals: list[int] = []
    environment = signals.child_environment(launch.merged_environment(os.environ), signal_number=signal.SIGTERM)
    # In a session of its own, so that a terminal's Ctrl-C reaches this process only, and the ranks hear of it once.
    process = subprocess.Popen(launch.agent_argv, env=environment, start_new_session=True)

    def forward_signal(signal_number: int) -> None:
        received_signals.append(signal_number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        name = signal.Signals(signal_number).name
        logger.warning("%s: the ranks save at the end of this step, then stop (before the first step, at once); a "
                       "second ends them at once", name)  # fmt: skip

    def kill_ranks(signal_number: int) -> None:
        received_signals.append(signal_number)
        failures.kill_process_tree(process.pid)

    with signals.StopSignals(forward_signal, kill_ranks):
        agent_code = process.wait()
        if agent_code < 0:  # the agent is gone, on which its ranks save and stop by themselves
            failures.kill_leftovers(process.pid, grace_s=0 if len(received_signals) > 1 else failures.ORPHAN_GRACE_S)
    return _command_exit_code(agent_code, folder, was_stopped=bool(received_signals))


def _command_exit_code(agent_code: int, folder: RunFolder | None, *, was_stopped: bool) -> int:
    if agent_code < 0 and was_stopped:
        logger.warning("ended at once; what was saved until then is kept")
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


# --- as one of the ranks ----------------------------------------------------------------------------------------------


# In a run folder that a parent created: what it hands to its ranks.
LAUNCH_FILE = "launch.json"


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """A launch as planned, before anything is made. `folder` is None on several nodes, where rank 0 names it."""

    folder: RunFolder | None
    is_resumed: bool
    stage_plans: Sequence[PlanWithDeepSpeed] = ()
    trains_in_process: bool = True
    """Whether this process trains, or starts Unsloth's processes, which do."""
    has_folder: bool = False
    """Whether the parent that launched this rank has created the folder, so that rank 0 must not."""
    lock: RunLock | None = None
    """The folder's lock, where this process has that of the whole run."""
    today: date = dataclasses.field(default_factory=date.today)
    """The day of the run's first start, for chat templates that write one."""

    def to_json(self, *, has_folder: bool) -> str:
        """As JSON, for the ranks; `has_folder`: whether their parent creates the folder."""
        assert self.folder is not None, "rank 0 names it"
        stage_fields = [
            {"plan": plan.as_json(), "deepspeed": deepspeed_config} for plan, deepspeed_config in self.stage_plans
        ]
        folder, today = str(self.folder.path.absolute()), str(self.today)
        return json.dumps(
            {"folder": folder, "parts": stage_fields, "resume": self.is_resumed, "made": has_folder, "today": today}
        )

    @staticmethod
    def from_json(text: str) -> LaunchPlan:
        """Read what a parent, or rank 0, has written; raises the error with which rank 0 has refused the run."""
        fields = json.loads(text)
        if "refused" in fields:
            raise (DoesNotFit if fields["exit_code"] == DoesNotFit.exit_code else ConfigError)(fields["refused"])
        stage_plans = [(plan_from_json(part["plan"]), part["deepspeed"]) for part in fields["parts"]]
        folder, today = RunFolder(Path(fields["folder"])), date.fromisoformat(fields["today"])
        return LaunchPlan(folder, fields["resume"], stage_plans, has_folder=fields["made"], today=today)


def refusal_to_json(error: SftPlayError) -> str:
    """Format rank 0's refusal as JSON for the other ranks, which raise it too (`LaunchPlan.from_json`)."""
    return json.dumps({"refused": str(error), "exit_code": error.exit_code})


def setup_rank_environment(config: RunConfig, rank_info: RankInfo) -> RankInfo:
    """Set the variables by which torch and gloo find the other ranks, whichever launcher set them; returns this
    rank."""
    os.environ.update(rank_variables(os.environ))  # other launchers' names as torchrun's, which torch reads
    os.environ.update(rendezvous_variables(os.environ, node_count=rank_info.node_count))
    if rank_info.run_folder is None:  # another launcher may show each rank its own GPU alone
        rank_info = adjust_local_rank(rank_info, restrict_to_device(config, detect_hardware()), os.environ)
    choose_interface(rank_info, os.environ)
    return rank_info


def receive_launch_plan(config: RunConfig, rank_info: RankInfo) -> LaunchPlan | None:
    """Read the plan that this rank's parent has written, or wait for the one that rank 0 broadcasts. None for rank 0
    without a parent: it makes the plan."""
    if rank_info.run_folder is not None:  # `make train-distributed` on one node: the parent planned, every rank reads
        return LaunchPlan.from_json((rank_info.run_folder / LAUNCH_FILE).read_text(encoding="utf-8"))
    with importing():
        from sft_play.training.ranks.distributed import broadcast_text, publish_gpu

    # torch's wait hears no Ctrl-C, and there is nothing to undo
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    publish_gpu(rank_gpu_id(rank_info, restrict_to_device(config, detect_hardware())), rank_info.rank)
    signal.signal(signal.SIGINT, previous_handler)
    return None if rank_info.is_first else LaunchPlan.from_json(broadcast_text(None))


def gather_rank_hardware(local_hardware: Hardware, rank_info: RankInfo) -> Hardware:
    """The machine as all ranks use it, for rank 0 to plan with; `local_hardware` is what this process sees of it.
    Raises HardwareError where two ranks have the same GPU, or there are more ranks than GPUs."""
    from sft_play.training.ranks.distributed import gather_gpus

    sees_one_gpu = len(local_hardware.gpus) == 1 and rank_info.local_world_size > 1
    gpus = gather_gpus(rank_info.world_size) if sees_one_gpu else []
    require_distinct_gpus(gpus)
    # without a UUID of each, ranks that share one GPU by mistake look the same
    hardware = spread_hardware(
        local_hardware, rank_info.world_size, rank_info.node_count, sees_own_gpu_only=sees_one_gpu and all(gpus)
    )
    if hardware.gpus and rank_info.local_world_size < len(local_hardware.gpus):
        logger.warning("%d of this node's %d GPUs are idle: start %d processes on it (--nproc-per-node) to use all",
                       len(local_hardware.gpus) - rank_info.local_world_size, len(local_hardware.gpus),
                       len(local_hardware.gpus))  # fmt: skip
    return hardware
