"""A run over ranks, as the process that launches them: their command, the run folder with their plan, their end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence

from sft_play.config.load import LoadedConfig
from sft_play.errors import Interrupted
from sft_play.facts.hardware import Hardware
from sft_play.launch.command import Launch, timeout_of, torchrun
from sft_play.launch.exported import RESUMED_VARIABLE
from sft_play.launch.handed import write_launch
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.start_ranks import note_end, rank_words, run_ranks
from sft_play.planner.plan import Plan, Planned
from sft_play.process.environment import THREADS_VARIABLE
from sft_play.process.heap import importing
from sft_play.runs.folder import RunFolder
from sft_play.training.prepare.starter_base import with_base

logger = logging.getLogger(__name__)


def launch_ranks(
    loaded: LoadedConfig,
    options: LaunchOptions,
    planned: Sequence[Planned],
    folder: RunFolder | None,
    *,
    is_resumed: bool,
    run: str | None,
    beside: contextlib.AbstractContextManager[object],
) -> tuple[int, Launch]:
    """Start the ranks of a planned run and wait for them; the exit code and the command, which may only be shown.

    Args:
        folder: the run's, which is made here; None on several nodes, where rank 0 makes it.
        run: the name of the run that `make resume` resumes.
        beside: what runs beside the ranks.
    """
    plan, is_alone = planned[0][0], options.nodes.count == 1
    launch = _command(loaded, options, plan, folder if is_alone else None, run=run)
    logger.info("Launch: %s", launch.line)
    if options.show_only:
        return 0, launch
    loaded = with_base(loaded)
    _require_adapter(loaded, plan)
    if folder is None or not is_alone:
        return _run_with_nodes(loaded, plan.hardware, options, launch), launch
    with beside, write_launch(folder, loaded, planned, resume=is_resumed):
        try:
            code = run_ranks(launch, folder)
        except KeyboardInterrupt:  # before the ranks were started, or after they ended
            note_end(folder, Interrupted.exit_code)
            raise
        note_end(folder, code)
    return code, launch


def _command(
    loaded: LoadedConfig, options: LaunchOptions, plan: Plan, folder: RunFolder | None, *, run: str | None
) -> Launch:
    """The command of the ranks; `folder`: the run's, where this process names it."""
    hardware = plan.hardware
    launch = torchrun(
        rank_words(loaded, options, plan),
        processes=hardware.gpus_per_node,
        nodes=options.nodes,
        threads=None if hardware.gpus else _threads(hardware),
        gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        folder=folder.path.absolute() if folder is not None else None,
        nccl_timeout_s=timeout_of(loaded.config, os.environ) if hardware.gpus else None,
        given=os.environ,
    )
    if run is None:
        return launch
    return dataclasses.replace(launch, environment={**launch.environment, RESUMED_VARIABLE: run})


def _threads(hardware: Hardware) -> int:
    """Threads of each CPU rank: its share of the cores, or as many as the run had that is repeated."""
    return int(os.environ.get(THREADS_VARIABLE) or max(1, hardware.cpu_cores // hardware.gpus_per_node))


def _require_adapter(loaded: LoadedConfig, plan: Plan) -> None:
    """Raises ModelError where the adapter that the run continues does not fit, before ranks are started."""
    if loaded.config.model.adapter is None:
        return
    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.origin import origin_of
    from sft_play.training.prepare.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(loaded.config).tokenizer
    origin_of(loaded.config, build_model_spec(loaded.config, plan.precision, tokenizer_size=len(tokenizer)))


def _run_with_nodes(loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, launch: Launch) -> int:
    """Start this node's ranks once all nodes have met; the exit code. Rank 0 plans again and makes the run folder."""
    with importing():
        from sft_play.training.ranks.node_meeting import card_of, meet

    card = card_of(loaded.config, hardware, strategy=options.strategy, deepspeed=options.deepspeed is not None)
    met = meet(options.nodes, card, limit_s=timeout_of(loaded.config, os.environ))
    # Not in the command that is shown and kept: this node's interface is of no use to who types it elsewhere.
    joined = dataclasses.replace(launch, environment={**launch.environment, **met.variables(os.environ)})
    return run_ranks(joined, None)
