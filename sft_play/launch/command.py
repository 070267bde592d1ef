"""The command that starts a run's ranks, with the variables that it sets: what is shown is what runs.

One word differs: where `torch.distributed.run` is shown, `sft_play.training.ranks.elastic_agent` runs. It passes the
same words to the same launcher, and reports in its place how a rank failed. Typed by hand, the shown command starts the
same ranks.
"""

from __future__ import annotations

import logging
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.network import NodeSetup
from sft_play.log import one_line

logger = logging.getLogger(__name__)

TORCHRUN_MODULE = "torch.distributed.run"
AGENT_MODULE = "sft_play.training.ranks.elastic_agent"


@dataclass(frozen=True)
class LaunchCommand:
    """A command, and the variables that it adds to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    """The port that this node listens on, where other nodes have to know it."""

    @property
    def processes_per_node(self) -> int:
        """How many ranks it starts on this node."""
        return int(self.argv[self.argv.index("--nproc-per-node") + 1])

    @property
    def agent_argv(self) -> tuple[str, ...]:
        """The words with our agent in the launcher's place: what is run."""
        return tuple(AGENT_MODULE if word == TORCHRUN_MODULE else word for word in self.argv)

    def merged_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment that the command runs in: the given one with its variables, without `PET_NNODES` and the
        like, which torchrun takes as defaults of its flags (`exported.node_variables` has read them)."""
        return {**{name: text for name, text in base.items() if not name.startswith("PET_")}, **self.environment}

    @property
    def shell_line(self) -> str:
        """As a person would type it."""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"{variables} {shlex.join(self.argv)}".strip()


def visible_gpu_variables(visible_gpus: str) -> dict[str, str]:
    """Variables that leave these GPUs visible, numbered by slot."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible_gpus}


def torchrun_command(
    program_arguments: Sequence[str],
    *,
    processes_per_node: int,
    nodes: NodeSetup,
    threads_per_rank: int | None = None,
    visible_gpus: str | None = None,
    python: str | None = None,
    nccl_timeout_s: float | None = None,
    present_environment: Mapping[str, str] | None = None,
) -> LaunchCommand:
    """`torchrun` with as many processes as this node has ranks, running `sft-play` with `program_arguments`.

    Args:
        threads: OMP_NUM_THREADS of CPU ranks, which would otherwise spin on the cores that they share.
        gpus: CUDA_VISIBLE_DEVICES, where some of the GPUs were named.
        nccl_timeout_s: how long GPU ranks wait for each other.
        present_environment: whose own NCCL settings win.
    """
    argv = [python or sys.executable, "-m", TORCHRUN_MODULE]
    if nodes.count == 1:
        argv.append("--standalone")  # the ranks meet at a free port: two runs on one machine do not disturb each other
    else:
        argv += ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
        argv += ["--master-addr", str(nodes.address), "--master-port", str(nodes.port)]
    argv += ["--nproc-per-node", str(processes_per_node), "--module", "sft_play", *program_arguments]
    environment: dict[str, str] = {}
    if threads_per_rank is not None:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
    if visible_gpus is not None:
        environment |= visible_gpu_variables(visible_gpus)
    if nccl_timeout_s is not None:
        nccl_defaults = nccl_variables(nccl_timeout_s)
        environment |= {name: value for name, value in nccl_defaults.items() if name not in (present_environment or {})}
    # only node 0 listens at MASTER_PORT; the others connect to it
    return LaunchCommand(tuple(argv), environment, nodes.port if nodes.count > 1 and nodes.rank == 0 else None)


def nccl_variables(timeout_s: float) -> dict[str, str]:
    """Variables of GPU ranks beside the timeout of their process group, so that waiting ends when that says.

    The names are those of torch's `ProcessGroupNCCL.hpp` (2.13). A collective that times out ends its process (1 also
    aborts the communicator; torchrun sets the same). The watchdog that does this may itself hang in a CUDA call, which
    a second thread notices after 480 s by default, whatever the timeout of the collectives.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, math.ceil(timeout_s))),
    }


def rank_timeout_s(config: RunConfig, environment: Mapping[str, str]) -> float:
    """Seconds that ranks wait for each other: `distributed.timeout_s`, or NCCL_TIMEOUT where that is set; raises
    ConfigError where NCCL_TIMEOUT is not a number of seconds."""
    text = environment.get("NCCL_TIMEOUT", "").strip()
    if not text:
        return config.distributed.timeout_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"NCCL_TIMEOUT={one_line(text)} is not a number of seconds from 1 to 86400")
    if seconds != config.distributed.timeout_s:
        logger.info("NCCL_TIMEOUT=%s in the environment: ranks wait %g s for each other instead of %g", one_line(text),
                    seconds, config.distributed.timeout_s)  # fmt: skip
    return seconds
