"""A rank of a run, whichever launcher started it: its place, the machine of all ranks, and what rank 0 hands over."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from datetime import date
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.facts.hardware import Hardware, detect
from sft_play.launch.exported import Ranks, meeting_variables, rank_variables
from sft_play.launch.machine import (
    choose_interface,
    machine_for,
    name_of_gpu,
    require_own_gpus,
    spread_over,
    with_own_gpu,
)
from sft_play.planner.plan import Planned, plan_from_json
from sft_play.process.heap import importing
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)


LAUNCH_FILE = "launch.json"
"""In a run folder that a parent created: what it hands to its ranks."""


@dataclasses.dataclass(frozen=True)
class Handed:
    """What a rank is handed by its parent or by rank 0: the run's folder, its plan, how it was meant to start."""

    folder: str
    parts: list[dict[str, Any]]
    """Plan and DeepSpeed's config of the run, or of each of its stages; empty where nothing is left to do."""
    resume: bool
    made: bool
    """Whether the parent has created the run folder, so that rank 0 must not."""
    today: str
    """The date for chat templates that write one (YYYY-MM-DD): the day of the run's first start."""

    @staticmethod
    def of(folder: RunFolder, planned: Sequence[Planned], *, resume: bool, made: bool, today: date) -> Handed:
        """From the plans of a run: one, or one for each stage."""
        parts = [{"plan": plan.as_json(), "deepspeed": deepspeed} for plan, deepspeed in planned]
        return Handed(str(folder.path.absolute()), parts, resume, made=made, today=str(today))

    def planned(self) -> list[Planned]:
        """The plans, read back."""
        return [(plan_from_json(part["plan"]), part["deepspeed"]) for part in self.parts]

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))


def placed(config: RunConfig, ranks: Ranks) -> Ranks:
    """This rank's place, with the variables by which torch and gloo find the others, whichever launcher set them."""
    os.environ.update(rank_variables(os.environ))  # other launchers' names as torchrun's, which torch reads
    os.environ.update(meeting_variables(os.environ, nodes=ranks.nodes))
    if ranks.folder is None:  # another launcher may show each rank its own GPU alone
        ranks = with_own_gpu(ranks, machine_for(config, detect()), os.environ)
    choose_interface(ranks, os.environ)
    return ranks


def received(config: RunConfig, ranks: Ranks) -> Handed | None:
    """What this rank's parent has written, or rank 0 hands over, for which the others wait; None for rank 0, which
    decides where no parent has."""
    if ranks.folder is not None:  # `make train-distributed` on one node: the parent planned, every rank reads
        return Handed(**json.loads((ranks.folder / LAUNCH_FILE).read_text(encoding="utf-8")))
    with importing():
        from sft_play.training.ranks.distributed import handed_over, say_gpu

    say_gpu(name_of_gpu(ranks, machine_for(config, detect())), ranks.rank)
    return None if ranks.is_first else Handed(**json.loads(handed_over(None)))


def machine_of_ranks(here: Hardware, ranks: Ranks) -> Hardware:
    """The machine as all ranks use it, for rank 0 to plan with; `here` is what this process sees of it.

    Raises:
        HardwareError: two ranks have the same GPU, or there are more ranks than GPUs.
    """
    from sft_play.training.ranks.distributed import gpus_of_all

    sees_one = len(here.gpus) == 1 and ranks.local_world_size > 1
    gpus = gpus_of_all(ranks.world_size) if sees_one else []
    require_own_gpus(gpus)
    # without a UUID of each, ranks that share one GPU by mistake look the same
    hardware = spread_over(here, ranks.world_size, ranks.nodes, is_own=sees_one and all(gpus))
    if hardware.gpus and ranks.local_world_size < len(here.gpus):
        logger.warning("%d of this node's %d GPUs are idle: start %d processes on it (--nproc-per-node) to use all",
                       len(here.gpus) - ranks.local_world_size, len(here.gpus), len(here.gpus))  # fmt: skip
    return hardware


def hand_over(folder: RunFolder, planned: Sequence[Planned], *, resume: bool, today: date) -> None:
    """Hand rank 0's decisions to the other ranks; without a plan there is nothing left to do."""
    from sft_play.training.ranks.distributed import handed_over

    handed_over(Handed.of(folder, planned, resume=resume, made=False, today=today).text())
