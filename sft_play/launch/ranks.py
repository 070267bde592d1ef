"""Which rank of how many this process is, by the variables of torchrun, accelerate, deepspeed and MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ConfigError
from sft_play.failures import RUN_VARIABLE
from sft_play.launch.exported import rank_variables
from sft_play.log import one_line

RESUMED_VARIABLE = "SFT_PLAY_RESUMED"
"""The name of the run that our ranks resume. A flag `--run` would not do: torchrun's argparse also reads the flags of
the ranks, and takes it for its own `--run-path`."""
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Ranks:
    """This process's place: `rank` of `world_size`, `local_rank` of `local_world_size` on its node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    folder: Path | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which plans, logs and writes."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Machines, assuming the same number of ranks on each."""
        return max(1, self.world_size // max(1, self.local_world_size))


def ranks_of(environment: Mapping[str, str]) -> Ranks | None:
    """The place that a launcher gave this process; None where nothing launched it.

    `RANK` and `WORLD_SIZE` without `LOCAL_RANK` say which node this is, not which rank (`exported.node_variables`).

    Raises:
        ConfigError: the variables contradict each other or are not numbers.
    """
    given = rank_variables(environment)
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in {**environment, **given}]
    if len(missing) == 1:
        raise ConfigError(f"the environment sets {_shown(environment)} but not {missing[0]}; a launcher sets all")
    if missing or not given:
        return None
    environment = {**environment, **given}
    rank = _number(environment, "RANK")
    world = _number(environment, "WORLD_SIZE")
    local = _number(environment, "LOCAL_RANK")
    # a launcher that does not say how many ranks are here has started all of them here
    on_node = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world
    if world < 1 or not 0 <= rank < world or not 0 <= local < max(1, on_node):
        raise ConfigError(f"the environment says {_shown(environment)}: a rank is 0 to WORLD_SIZE - 1")
    # torchrun's number of nodes. The plan, and shards of a node (fsdp_hybrid), need as many ranks on each.
    nodes = _number(environment, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environment else None
    if nodes is not None and nodes * on_node != world:
        raise ConfigError(
            f"this node has {on_node} of {world} ranks on {nodes} nodes: start the same number on each "
            "(--nproc-per-node)"
        )
    folder = environment.get(RUN_VARIABLE)
    return Ranks(rank, local, world, on_node, Path(folder) if folder else None)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.strip().isdigit():
        raise ConfigError(
            f"{name}={one_line(text)} in the environment is not a number; a launcher sets it, else unset it"
        )
    return int(text)


def _shown(environment: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={one_line(environment[name])}" for name in _NUMBERS if name in environment)
