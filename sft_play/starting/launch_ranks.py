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
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, RunFolderError, SftPlayError, about
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.network import SETTLE_SHARE, NodeSetup, require_free_port
from sft_play.launch.command import Launch, timeout_of, torchrun
from sft_play.launch.exported import RESUMED_VARIABLE, Ranks, meeting_variables, rank_variables
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import (
    choose_interface,
    machine_for,
    machine_of,
    name_of_gpu,
    require_own_gpus,
    spread_over,
    with_own_gpu,
)
from sft_play.log import write_log_to
from sft_play.planner.plan import Plan, PlanWithDeepSpeed, plan_from_json
from sft_play.process import failures, signals
from sft_play.process.environment import THREADS_VARIABLE
from sft_play.process.failures import RUN_VARIABLE
from sft_play.process.imports import importing
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import DEEPSPEED_FILE, DIED, RunFolder
from sft_play.runs.locking import LAUNCHER, Lock
from sft_play.runs.lookup import create_run, discard_run
from sft_play.runs.manifest import first_day, new_manifest
from sft_play.runs.oom import NOTE

if TYPE_CHECKING:  # it imports torch
    from sft_play.training.ranks.node_meeting import NodeMeeting

logger = logging.getLogger(__name__)


def launch_ranks(
    loaded: LoadedConfig,
    options: LaunchOptions,
    planned: Sequence[PlanWithDeepSpeed],
    folder: RunFolder | None,
    *,
    is_resumed: bool,
    run: str | None,
    beside: contextlib.AbstractContextManager[object],
    log_buffer: MemoryHandler | None = None,
) -> tuple[int, Launch]:
    """Start the ranks of a planned run and wait for them; the exit code and the command, which may only be shown.

    Args:
        folder: the run's, which is made here; None on several nodes, where rank 0 makes it.
        run: the name of the run that `make resume` resumes.
        beside: what runs beside the ranks.
        log_buffer: what was logged until now, for the run's log, which rank 0 continues.
    """
    plan = planned[0][0]
    launch = _command(loaded, options, plan, run=run)
    logger.log(logging.INFO if options.show_only else logging.DEBUG, "Launch: %s", launch.line)
    if options.show_only:
        return 0, launch
    _require_adapter(loaded, plan)
    if folder is None or options.nodes.count > 1:
        return _run_with_nodes(loaded, plan.hardware, options, launch), launch
    # Not in the command that is shown and logged: typed by itself it starts a run of its own, whose rank 0 plans.
    environment = {**launch.environment, RUN_VARIABLE: str(folder.path.absolute())}
    with beside, _write_launch(folder, loaded, planned, resume=is_resumed):
        log_file = write_log_to(folder.log_path, buffer=log_buffer)
        logging.getLogger().removeHandler(log_file)  # closed before the ranks write to it, or it is removed
        log_file.close()
        try:
            code = run_ranks(dataclasses.replace(launch, environment=environment), folder)
        except KeyboardInterrupt:  # before the ranks were started, or after they ended
            note_end(folder, Interrupted.exit_code)
            raise
        note_end(folder, code)
    return code, launch


def _write_launch(
    folder: RunFolder, loaded: LoadedConfig, planned: Sequence[PlanWithDeepSpeed], *, resume: bool
) -> contextlib.AbstractContextManager[object]:
    mark: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    plan, resolved = planned[0]
    if not resume:
        manifest = new_manifest(loaded, hardware=plan.hardware.as_json(), data={})
        mark = create_run(folder, loaded, manifest=manifest, plan=plan.as_json(), by=LAUNCHER)
    else:  # over other ranks the split of the batch is another; the manifest is updated by rank 0
        folder.write_json("plan.json", plan.as_json())
    decided = Decided(folder, resume, planned, today=first_day(folder))
    write_text(folder.path / LAUNCH_FILE, decided.text(made=not resume))
    if resolved is not None:
        write_json(folder.path / DEEPSPEED_FILE, resolved)
    return mark


def _command(loaded: LoadedConfig, options: LaunchOptions, plan: Plan, *, run: str | None) -> Launch:
    hardware, processes = plan.hardware, plan.hardware.gpus_per_node
    # of the cores, for each CPU rank; a run that is repeated has its own
    share = max(1, hardware.cpu_cores // processes)
    launch = torchrun(
        rank_words(loaded, options, plan),
        processes=processes,
        nodes=options.nodes,
        threads=None if hardware.gpus else int(os.environ.get(THREADS_VARIABLE) or share),
        gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        nccl_timeout_s=timeout_of(loaded.config, os.environ) if hardware.gpus else None,
        given=os.environ,
    )
    if run is None:
        return launch
    return dataclasses.replace(launch, environment={**launch.environment, RESUMED_VARIABLE: run})


def _require_adapter(loaded: LoadedConfig, plan: Plan) -> None:
    """Raises ModelError where the adapter that the run continues does not fit, before ranks are started."""
    if loaded.config.model.adapter is None:
        return
    from sft_play.training.prepare.base_adapter import read_base_adapter
    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.tokenizer import load_tokenizer

    config, found = loaded.config, load_tokenizer(loaded.config)
    size = len(found.tokenizer)
    read_base_adapter(config, build_model_spec(config, plan.precision, tokenizer_size=size, new_rows=found.new_rows))


def count_nodes(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """The options with the nodes that exported RANK and WORLD_SIZE mean: they number nodes, or WORLD_SIZE counts ranks,
    of which RANK is this node's first. Where both can be meant, the nodes that come tell."""
    nodes, here = options.nodes, machine_of(dataclasses.replace(options, nodes=NodeSetup()), machine_for(config, detect_hardware()))
    if here.ranks == 1 or nodes.count % here.ranks:
        return options
    ranks = f"RANK and WORLD_SIZE in the environment count ranks, {nodes.count} in all and {here.ranks} on each node"
    if options.show_only:  # asks nobody
        logger.info("Nodes: or %s: NNODES=%d says so", ranks, nodes.count // here.ranks)
        return options
    logger.info("Nodes: or %s: those that come tell, and those of ranks are all if no other comes for %.0f s",
                ranks, timeout_of(config, os.environ) * SETTLE_SHARE)  # fmt: skip
    with about(f"{nodes.exported_rank}, or {ranks}"):
        count = len(_meet(options, config, here, may_count_ranks=True).cards)
    if count < nodes.count:
        logger.info("Nodes: %s", ranks)
        nodes = dataclasses.replace(nodes, count=count, rank=nodes.rank // here.ranks, exported_rank=ranks)
    return dataclasses.replace(options, nodes=nodes)


def _meet(options: LaunchOptions, config: RunConfig, here: Hardware, *, may_count_ranks: bool = False) -> NodeMeeting:
    with importing():
        from sft_play.training.ranks.node_meeting import meet_nodes, node_card

    card = node_card(config, here, strategy=options.strategy, deepspeed=options.deepspeed is not None)
    return meet_nodes(options.nodes, card, limit_s=timeout_of(config, os.environ), may_count_ranks=may_count_ranks)


def _run_with_nodes(loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, launch: Launch) -> int:
    """Start this node's ranks once all nodes have met; the exit code. Rank 0 plans again and makes the run folder."""
    # Not in the command that is shown and kept: this node's interface is of no use to who types it elsewhere.
    of_meeting = _meet(options, loaded.config, hardware).gloo_variables(os.environ)
    code = run_ranks(dataclasses.replace(launch, environment={**launch.environment, **of_meeting}), None)
    if code not in (0, Interrupted.exit_code) and options.nodes.exported_rank:  # the agent has told why
        logger.warning("Nodes: %s", options.nodes.exported_rank)
    return code


def rank_words(loaded: LoadedConfig, options: LaunchOptions, plan: Plan) -> list[str]:
    """The words of `sft-play` that start each rank, complete for ranks that no parent hands a plan."""
    words = ["rank", "--config", str(loaded.path), *loaded.overrides]
    adapter = loaded.config.model.adapter
    if adapter is not None:  # every rank would look for `last` again
        words = [word for word in words if not word.startswith("model.adapter=")]
        words.append(f"model.adapter={json.dumps(adapter)}")
    words += ["--strategy", plan.layout]
    words += ["--tensorboard"] if options.board else []  # rank 0 starts it: only rank 0 knows the run's folder
    if options.deepspeed is not None:
        words.append("--deepspeed")
        words += ["--deepspeed_config", str(options.deepspeed.file)] if options.deepspeed.file else []
    return words


def run_ranks(launch: Launch, folder: RunFolder | None) -> int:
    """Start the ranks under the agent, leave no process behind; returns sft-play's exit code. The first signal is
    passed on to the agent, which waits until the ranks have saved; a second one ends everything at once."""
    require_free_port(launch.port)
    received_signals: list[int] = []
    environment = signals.ends_with_me(launch.environment_in(os.environ), number=signal.SIGTERM)
    # In a session of its own, so that a terminal's Ctrl-C reaches this process only, and the ranks hear of it once.
    process = subprocess.Popen(launch.watched, env=environment, start_new_session=True)

    def pass_on(number: int) -> None:
        received_signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        name = signal.Signals(number).name
        logger.warning("%s: the ranks save at the end of this step, then stop (before the first step, at once); a "
                       "second ends them at once", name)  # fmt: skip

    def end(number: int) -> None:
        received_signals.append(number)
        failures.end_at_once(process.pid)

    with signals.StopSignals(pass_on, end):
        code = process.wait()
        if code < 0:  # the agent is gone, on which its ranks save and stop by themselves
            failures.end_leftovers(process.pid, patience_s=0 if len(received_signals) > 1 else failures.ORPHAN_S)
    return _exit_code(code, folder, stopped=bool(received_signals))


def _exit_code(code: int, folder: RunFolder | None, *, stopped: bool) -> int:
    if code < 0 and stopped:
        logger.warning("ended at once; what was saved until then is kept")
        return Interrupted.exit_code
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        logger.error("the ranks' agent was killed by %s; what the ranks saved until then is kept", name)
        with contextlib.suppress(RunFolderError, OSError):
            if folder is not None:
                folder.update_manifest(**{DIED: f"the ranks' agent was killed by {name}"})
        return 1
    # 2 and 3: the user can fix it. A folder that this start made, and in which no step was taken, is only in the way.
    if folder is not None and code in (2, 3):
        launched = folder.path / LAUNCH_FILE
        goes_on = (folder.path / NOTE).exists()
        is_unused = not folder.metrics_path.exists() and launched.exists() and not goes_on
        if is_unused and json.loads(launched.read_text(encoding="utf-8"))["made"]:  # by this start, not resumed
            discard_run(folder)
            logger.info("The run folder %s is removed again: nothing was trained", folder.path)
    return code


def note_end(folder: RunFolder, code: int) -> None:
    """Write how a run ended, where its ranks ended before they could write it."""
    with contextlib.suppress(RunFolderError):  # an unused folder is removed again
        if code and folder.manifest().get("status") == "running":
            folder.update_manifest(status="stopped" if code == Interrupted.exit_code else "failed")


# --- as one of the ranks ----------------------------------------------------------------------------------------------


# In a run folder that a parent created: what it hands to its ranks.
LAUNCH_FILE = "launch.json"


@dataclasses.dataclass(frozen=True)
class Decided:
    """What is decided before anything is made. `folder` is None on several nodes, where rank 0 names it."""

    folder: RunFolder | None
    is_resumed: bool
    planned: Sequence[PlanWithDeepSpeed] = ()
    trains_here: bool = True
    """Whether this process trains, or starts Unsloth's processes, which do."""
    has_folder: bool = False
    """Whether the parent that launched this rank has created the folder, so that rank 0 must not."""
    mark: Lock | None = None
    """The folder's lock, where this process has that of the whole run."""
    today: date = dataclasses.field(default_factory=date.today)
    """The day of the run's first start, for chat templates that write one."""

    def text(self, *, made: bool) -> str:
        """As JSON, for the ranks; `made`: whether their parent creates the folder."""
        assert self.folder is not None, "rank 0 names it"
        parts = [{"plan": plan.as_json(), "deepspeed": deepspeed} for plan, deepspeed in self.planned]
        folder, today = str(self.folder.path.absolute()), str(self.today)
        return json.dumps({"folder": folder, "parts": parts, "resume": self.is_resumed, "made": made, "today": today})

    @staticmethod
    def read(text: str) -> Decided:
        """What a parent, or rank 0, has handed over; raises the error with which rank 0 has refused the run."""
        handed = json.loads(text)
        if "refused" in handed:
            raise (DoesNotFit if handed["exit_code"] == DoesNotFit.exit_code else ConfigError)(handed["refused"])
        planned = [(plan_from_json(part["plan"]), part["deepspeed"]) for part in handed["parts"]]
        folder, today = RunFolder(Path(handed["folder"])), date.fromisoformat(handed["today"])
        return Decided(folder, handed["resume"], planned, has_folder=handed["made"], today=today)


def refused(error: SftPlayError) -> str:
    """As JSON, for the ranks: what rank 0 has refused the run for, which each of them raises (`Decided.read`)."""
    return json.dumps({"refused": str(error), "exit_code": error.exit_code})


def placed(config: RunConfig, ranks: Ranks) -> Ranks:
    """This rank's place, with the variables by which torch and gloo find the others, whichever launcher set them."""
    os.environ.update(rank_variables(os.environ))  # other launchers' names as torchrun's, which torch reads
    os.environ.update(meeting_variables(os.environ, nodes=ranks.nodes))
    if ranks.folder is None:  # another launcher may show each rank its own GPU alone
        ranks = with_own_gpu(ranks, machine_for(config, detect_hardware()), os.environ)
    choose_interface(ranks, os.environ)
    return ranks


def received(config: RunConfig, ranks: Ranks) -> Decided | None:
    """What this rank's parent has written, or rank 0 hands over, for which the others wait; None for rank 0, which
    decides where no parent has."""
    if ranks.folder is not None:  # `make train-distributed` on one node: the parent planned, every rank reads
        return Decided.read((ranks.folder / LAUNCH_FILE).read_text(encoding="utf-8"))
    with importing():
        from sft_play.training.ranks.distributed import broadcast_text, publish_gpu

    heard = signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch's wait hears no Ctrl-C, and there is nothing to undo
    publish_gpu(name_of_gpu(ranks, machine_for(config, detect_hardware())), ranks.rank)
    signal.signal(signal.SIGINT, heard)
    return None if ranks.is_first else Decided.read(broadcast_text(None))


def machine_of_ranks(here: Hardware, ranks: Ranks) -> Hardware:
    """The machine as all ranks use it, for rank 0 to plan with; `here` is what this process sees of it. Raises
    HardwareError where two ranks have the same GPU, or there are more ranks than GPUs."""
    from sft_play.training.ranks.distributed import gather_gpus

    sees_one = len(here.gpus) == 1 and ranks.local_world_size > 1
    gpus = gather_gpus(ranks.world_size) if sees_one else []
    require_own_gpus(gpus)
    # without a UUID of each, ranks that share one GPU by mistake look the same
    hardware = spread_over(here, ranks.world_size, ranks.nodes, is_own=sees_one and all(gpus))
    if hardware.gpus and ranks.local_world_size < len(here.gpus):
        logger.warning("%d of this node's %d GPUs are idle: start %d processes on it (--nproc-per-node) to use all",
                       len(here.gpus) - ranks.local_world_size, len(here.gpus), len(here.gpus))  # fmt: skip
    return hardware
