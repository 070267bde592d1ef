"""torchrun's command for a run's ranks, and the variables in which launchers tell a process its
rank or its node.

The command that is shown is the one that runs, but for one word: where `torch.distributed.run` is
shown, `sft_play.launch.agent` runs. It passes the same words to the same launcher, and reports in
its place how a rank failed. Typed by hand, the shown command starts the same ranks.

The variables are those of torchrun (`PET_` before its flags' names,
https://docs.pytorch.org/docs/stable/elastic/run.html), of DeepSpeed's launcher, of Slurm, and of
Kubernetes' PyTorchJob, which exports `RANK` and `WORLD_SIZE` once per pod
(https://github.com/kubeflow/training-operator).
"""

import contextlib
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.machine.network import (
    DEFAULT_PORT,
    NodeSetup,
    can_bind,
    is_host_address,
    resolve_addresses,
)
from sft_play.process.failures import RUN_VARIABLE

logger = logging.getLogger(__name__)

TORCHRUN_MODULE = "torch.distributed.run"
AGENT_MODULE = "sft_play.launch.agent"
# The name of the run that our ranks resume. A flag `--run` would not do: torchrun's argparse also
# reads the flags of the ranks, and takes it for its own `--run-path`.
RESUMED_VARIABLE = "SFT_PLAY_RESUMED"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# What torch and accelerate read to find the other ranks.
RENDEZVOUS_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
NODE_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchCommand:
    """A command, and the variables that it adds to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # The port that this node listens on, where other nodes have to know it.
    port: int | None = None

    @property
    def shell_line(self) -> str:
        """As a person would type it."""
        variables = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in self.environment.items()
        )
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
    present_environment: Mapping[str, str] = os.environ,
) -> LaunchCommand:
    """Build the `torchrun` command for the ranks of this node, each a process that runs `sft-play`
    with `program_arguments`.

    Args:
        threads_per_rank: OMP_NUM_THREADS of CPU ranks, which would otherwise spin on the cores that
            they share.
        visible_gpus: CUDA_VISIBLE_DEVICES, where some of the GPUs were named.
        nccl_timeout_s: how long GPU ranks wait for each other.
        present_environment: whose own NCCL settings win.
    """
    argv = [python or sys.executable, "-m", TORCHRUN_MODULE]
    if nodes.count == 1:
        # the ranks meet at a free port: two runs on one machine do not disturb each other
        argv.append("--standalone")
    else:
        argv += ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
        argv += ["--master-addr", str(nodes.address), "--master-port", str(nodes.port)]
    argv += [
        "--nproc-per-node",
        str(processes_per_node),
        "--module",
        "sft_play",
        *program_arguments,
    ]
    environment: dict[str, str] = {}
    if threads_per_rank is not None:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
    if visible_gpus is not None:
        environment |= visible_gpu_variables(visible_gpus)
    if nccl_timeout_s is not None:
        # GPU ranks' variables beside the timeout of their process group, so that waiting ends when
        # that says. The names are those of torch's `ProcessGroupNCCL.hpp` (2.13). A collective that
        # times out ends its process (1 also aborts the communicator; torchrun sets the same). The
        # watchdog that does this may itself hang in a CUDA call, which a second thread notices
        # after 480 s by default, whatever the timeout of the collectives.
        nccl_variables = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, math.ceil(nccl_timeout_s))),
        }
        environment |= {
            name: value for name, value in nccl_variables.items() if name not in present_environment
        }
    # only node 0 listens at MASTER_PORT; the others connect to it
    is_listening = nodes.count > 1 and nodes.rank == 0
    return LaunchCommand(tuple(argv), environment, nodes.port if is_listening else None)


def rank_timeout_s(config: RunConfig, environment: Mapping[str, str]) -> float:
    """Seconds that ranks wait for each other: `distributed.timeout_s`, or NCCL_TIMEOUT where that
    is set; raises ConfigError where NCCL_TIMEOUT is not a number of seconds."""
    text = environment.get("NCCL_TIMEOUT", "").strip()
    if not text:
        return config.distributed.timeout_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError(
            f"NCCL_TIMEOUT={one_line(text)} is not a number of seconds from 1 to 86400"
        )
    if seconds != config.distributed.timeout_s:
        logger.info(
            "NCCL_TIMEOUT=%s in the environment: ranks wait %g s for each other instead of %g",
            one_line(text),
            seconds,
            config.distributed.timeout_s,
        )
    return seconds


# --- this process as a rank -----------------------------------------------------------------------


@dataclass(frozen=True)
class RankInfo:
    """This process's place: `rank` of `world_size`, `local_rank` of `local_world_size` on its
    node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_folder: Path | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which plans, logs and writes."""
        return self.rank == 0

    @property
    def node_count(self) -> int:
        """Machines, assuming the same number of ranks on each."""
        return max(1, self.world_size // max(1, self.local_world_size))


def read_rank_info(environment: Mapping[str, str]) -> RankInfo | None:
    """Read this process's rank from the launcher's variables; None if no launcher started it.
    Raises ConfigError where the variables contradict each other or are not numbers."""
    environment = {**environment, **rank_variables(environment)}
    rank, world_size, local_rank, local_world_size, node_count = (
        read_whole_number(environment, name, minimum=0)
        for name in (*RANK_VARIABLES, "GROUP_WORLD_SIZE")
    )
    variables_text = ", ".join(
        f"{name}={one_line(environment[name])}"
        for name in RANK_VARIABLES[:3]
        if environment.get(name)
    )
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"the environment sets {variables_text}, and not both RANK and WORLD_SIZE; a launcher"
            " sets all"
        )
    if rank is None or world_size is None or local_rank is None:
        return None
    # a launcher that does not say how many ranks are here has started all of them here
    if local_world_size is None:
        local_world_size = world_size
    if rank >= world_size or local_rank >= max(1, local_world_size):
        raise ConfigError(f"the environment says {variables_text}: a rank is 0 to WORLD_SIZE - 1")
    # torchrun's number of nodes. The plan, and shards of a node (fsdp_hybrid), need as many ranks
    # on each.
    if node_count is not None and node_count * local_world_size != world_size:
        raise ConfigError(
            f"this node has {local_world_size} of {world_size} ranks on {node_count} nodes: start"
            " the same number on each (--nproc-per-node)"
        )
    run_folder = environment.get(RUN_VARIABLE)
    return RankInfo(
        rank, local_rank, world_size, local_world_size, Path(run_folder) if run_folder else None
    )


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` of a process that a launcher started
    as a rank; else empty: without a local rank they name a node (`node_variables`)."""
    variables = {
        name: environment[name] for name in RANK_VARIABLES if environment.get(name, "").strip()
    }
    if (
        "LOCAL_WORLD_SIZE" not in variables
        and "LOCAL_SIZE" in environment
        and "CROSS_SIZE" in environment
    ):
        variables["LOCAL_WORLD_SIZE"] = environment["LOCAL_SIZE"]  # deepspeed's launcher
    if "LOCAL_RANK" in variables:
        return variables
    has_own_gpus = any(
        environment.get(name) for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
    )
    if "RANK" in environment or not has_own_gpus:
        return {}
    # a task to which srun gave GPUs of its own; `4(x2)`: four on each of two nodes; `4,3`: not as
    # many on each
    tasks_per_node = re.fullmatch(
        r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    )
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    values = [environment.get(name, "") for name in names]
    if (
        tasks_per_node is None
        or int(tasks_per_node[1]) < 2
        or not all(text.isdigit() for text in values)
    ):
        return {}
    return dict(zip(RANK_VARIABLES, [*values, tasks_per_node[1]], strict=True))


def rendezvous_variables(environment: Mapping[str, str], *, node_count: int) -> dict[str, str]:
    """`MASTER_ADDR` and `MASTER_PORT` for ranks that have none: srun exports neither; raises
    ConfigError where the ranks are on several nodes, so the address has to be given."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing and node_count > 1:
        raise ConfigError(
            f"{' and '.join(missing)} not in the environment: ranks on {node_count} nodes cannot"
            " find each other; give all of them the machine of rank 0 and a free port"
        )
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(DEFAULT_PORT)}
    return {name: defaults[name] for name in missing}


# --- this process as a node -----------------------------------------------------------------------


def read_nodes(
    values: Mapping[str, str], names: tuple[str, str, str, str] = NODE_VARIABLES
) -> NodeSetup:
    """Read the nodes of a run from four variables: how many, which this is, and the address and
    port of the first; raises ConfigError where one is not a number or out of range, or is missing
    where there are several machines.
    """
    count_name, rank_name, address_name, port_name = names
    count = read_whole_number(values, count_name, minimum=1) or 1
    rank = read_whole_number(values, rank_name, minimum=0)
    address = values.get(address_name, "").strip() or None
    port = read_whole_number(values, port_name, minimum=1)
    if port is not None and port > 65_535:
        raise ConfigError(f"{port_name}={port} is not a port; ports go from 1 to 65535")
    if (rank or 0) >= count:
        raise ConfigError(
            f"{rank_name}={rank} is not one of {count_name}={count} (1 by default): ranks go from 0"
            f" to {count - 1}"
        )
    if count == 1:  # whatever the address is that a scheduler has exported
        return NodeSetup(1, 0, address, port)
    if rank is None or address is None:
        raise ConfigError(
            f"{count_name}={count} needs {rank_name}=0 to {count - 1} and {address_name}=, an"
            f" address at which the others reach node 0 (and {port_name}=, default {DEFAULT_PORT})"
        )
    if not is_host_address(address):
        raise ConfigError(
            f"{address_name}={one_line(address)} is not a host name or an IP address; the port goes"
            f" into {port_name}="
        )
    return NodeSetup(count, rank, address, port or DEFAULT_PORT, values.get("EXPORTED", ""))


def node_variables(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """`NNODES`, `NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `NPROC` where the environment names them
    differently, and log lines about them; as `EXPORTED` the one on RANK and WORLD_SIZE, which may
    count ranks. Raises ConfigError where the number of nodes is a range."""
    # this process is a rank, for which a number of nodes means nothing
    if rank_variables(environment):
        return {}, ()
    exported = {name: text for name in environment if (text := environment[name].strip())}
    is_named = "NNODES" in exported or "NODE_RANK" in exported
    renamed = {
        name: exported[f"PET_{name}"]
        for name in NODE_VARIABLES
        if f"PET_{name}" in exported
        and name not in exported
        and (name.startswith("MASTER") or not is_named)
    }
    lines: list[str] = []
    if ":" in renamed.get("NNODES", ""):
        raise ConfigError(
            f"PET_NNODES={one_line(renamed['NNODES'])} is a range, but a run has a fixed number of"
            " nodes: give NNODES="
        )
    if renamed.get("NNODES", "1") != "1":
        lines.append(
            f"PET_NNODES={one_line(renamed['NNODES'])} in the environment: one run over that many"
            " nodes"
        )
    if not is_named and "NNODES" not in renamed and {"RANK", "WORLD_SIZE"} <= exported.keys():
        rank, world_size = exported["RANK"], exported["WORLD_SIZE"]
        line = (
            f"RANK={one_line(rank)} and WORLD_SIZE={one_line(world_size)} in the environment,"
            f" without LOCAL_RANK: this is node {one_line(rank)} of {one_line(world_size)} nodes"
            " (NNODES= and NODE_RANK= say otherwise)"
        )
        renamed |= {"NODE_RANK": rank, "NNODES": world_size, "EXPORTED": line}
        if world_size != "1":
            lines.append(line)
    for name in ("NPROC_PER_NODE", "PET_NPROC_PER_NODE"):
        text = exported.get(name, "gpu")
        # Values of torchrun's `--nproc-per-node` that mean one rank per GPU.
        if text not in ("gpu", "auto", "cuda") and "NPROC" not in {**exported, **renamed}:
            renamed["NPROC"] = text
            lines.append(f"{name}={one_line(text)} in the environment is NPROC={one_line(text)}")
    return renamed, tuple(lines)


def refuse_repeated_starts(environment: Mapping[str, str], *, node_count: int) -> None:
    """Raises ConfigError where srun or mpirun started this command several times: each start would
    be a separate run."""
    if node_count > 1 or rank_variables(environment):
        return
    # How often srun, or an mpirun, has started this command.
    for name in (
        "SLURM_STEP_NUM_TASKS",
        "OMPI_COMM_WORLD_SIZE",
        "MPI_LOCALNRANKS",
        "MV2_COMM_WORLD_SIZE",
    ):
        text = environment.get(name, "")
        # a job's own variable is there in its batch script too, which runs once
        is_task = not name.startswith("SLURM") or "SLURM_PROCID" in environment
        if is_task and text.isdigit() and int(text) > 1:
            raise ConfigError(
                f"this command was started {text} times ({name}={text}), and each would be a"
                " separate run: take sbatch scripts/train_slurm.sbatch my.yaml, or one task per"
                " node with NNODES=, NODE_RANK=, MASTER_ADDR= (make train-distributed), or"
                " torchrun in place of mpirun"
            )


def refuse_lone_node(nodes: NodeSetup) -> None:
    """Raises ConfigError where MASTER_ADDR is another machine, and nothing says how many nodes meet
    there; on the machine that has the address it may have been exported for a single node."""
    if nodes.count > 1 or nodes.address is None:
        return
    with contextlib.suppress(ConfigError, OSError):
        if any(map(can_bind, resolve_addresses(nodes.address, 0))):
            logger.info(
                "MASTER_ADDR=%s is this machine: the run is on it alone", one_line(nodes.address)
            )
            return
    raise ConfigError(
        f"MASTER_ADDR={one_line(nodes.address)} is another machine, and neither NNODES= nor"
        " WORLD_SIZE= says how many nodes meet there: give NNODES=2 NODE_RANK=1 (on the machine at"
        " that address NODE_RANK=0), or NNODES=1 for this machine alone"
    )


def read_whole_number(values: Mapping[str, str], name: str, *, minimum: int) -> int | None:
    """A variable as a whole number from `minimum`; None where it is not set, ConfigError where it
    is not one."""
    text = values.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise ConfigError(f"{name}={one_line(text)} is not a whole number from {minimum}")
    return int(text)
