"""This process as one of a run's ranks, whichever launcher started it: its place and its GPU, the machine of all ranks,
and the plan that its parent or rank 0 hands over.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
from collections.abc import MutableMapping, Sequence
from datetime import date
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, HardwareError, SftPlayError
from sft_play.launch.run_hardware import restrict_to_device, spread_hardware
from sft_play.launch.torchrun import RankInfo, rank_variables, rendezvous_variables
from sft_play.log import one_line
from sft_play.machine import nvml
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import GLOO_VARIABLE, find_interface, route_address
from sft_play.planner.plan import Plan, PlanWithDeepSpeed, plan_from_json
from sft_play.process.waiting import importing
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import RunLock

logger = logging.getLogger(__name__)

# In a run folder that a parent created: what it hands to its ranks.
LAUNCH_FILE = "launch.json"


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """A launch as planned, before anything is made."""

    # The run's; None on several nodes, where rank 0 names it.
    folder: RunFolder | None
    is_resumed: bool
    # The plan of the run, or of each stage; none where the run to resume is finished.
    stage_plans: Sequence[PlanWithDeepSpeed] = ()
    # Whether this process trains, or starts Unsloth's processes, which do.
    trains_in_process: bool = True
    # Whether the parent that launched this rank has created the folder, so that rank 0 must not.
    folder_exists: bool = False
    # The folder's lock, where this process has that of the whole run.
    lock: RunLock | None = None
    # The day of the run's first start, for chat templates that write one.
    today: date = dataclasses.field(default_factory=date.today)

    @property
    def plan(self) -> Plan:
        """The plan of the run, or of its first stage."""
        return self.stage_plans[0][0]

    def to_json(self) -> str:
        """As JSON, for the ranks. Needs a folder."""
        assert self.folder is not None, "rank 0 names it"
        stage_fields = [
            {"plan": plan.as_json(), "deepspeed": deepspeed_config} for plan, deepspeed_config in self.stage_plans
        ]
        folder, today = str(self.folder.path.absolute()), str(self.today)
        return json.dumps(
            {
                "folder": folder,
                "parts": stage_fields,
                "resume": self.is_resumed,
                "made": self.folder_exists,
                "today": today,
            }
        )

    @staticmethod
    def from_json(text: str) -> LaunchPlan:
        """Read what a parent, or rank 0, has written; raises the error with which rank 0 has refused the run."""
        fields = json.loads(text)
        if "refused" in fields:
            raise (DoesNotFit if fields["exit_code"] == DoesNotFit.exit_code else ConfigError)(fields["refused"])
        stage_plans = [(plan_from_json(part["plan"]), part["deepspeed"]) for part in fields["parts"]]
        folder, today = RunFolder(Path(fields["folder"])), date.fromisoformat(fields["today"])
        return LaunchPlan(folder, fields["resume"], stage_plans, folder_exists=fields["made"], today=today)


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


def adjust_local_rank(rank_info: RankInfo, hardware: Hardware, environment: MutableMapping[str, str]) -> RankInfo:
    """This rank's place, where its launcher shows it one GPU alone (Slurm's `--gpus-per-task=1`): device 0, whatever
    its number on the node, which torch and accelerate read from `LOCAL_RANK`."""
    if len(hardware.gpus) != 1 or rank_info.local_world_size < 2:
        return rank_info
    environment["LOCAL_RANK"] = "0"
    return dataclasses.replace(rank_info, local_rank=0)


def choose_interface(rank_info: RankInfo, environment: MutableMapping[str, str]) -> None:
    """Set `GLOO_SOCKET_IFNAME` of a rank among several nodes to the interface that leads to `MASTER_ADDR`, where nobody
    has. gloo would take the address of this host's own name, which may be the loopback (Debian's /etc/hosts), and on
    the other nodes means themselves; NCCL finds interfaces by itself. Raises ConfigError where MASTER_ADDR does not
    resolve here."""
    host = environment.get("MASTER_ADDR")
    if rank_info.world_size <= rank_info.local_world_size or not host:
        return
    port = environment.get("MASTER_PORT", "")
    try:
        address = route_address(host, int(port) if port.isdigit() else 0)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; where torchrun runs with --rdzv-backend c10d it takes the name of node 0's host: give "
            "--local-addr with this node's own address on every node"
        ) from None
    interface = find_interface(address) if address else None
    if environment.get(GLOO_VARIABLE) or interface is None:
        return
    environment[GLOO_VARIABLE] = interface
    logger.info("Network: gloo uses %s (%s), which leads to MASTER_ADDR=%s; %s= names another",
                interface, address, one_line(host), GLOO_VARIABLE)  # fmt: skip


def receive_launch_plan(config: RunConfig, rank_info: RankInfo) -> LaunchPlan | None:
    """Read the plan that this rank's parent has written, or wait for the one that rank 0 broadcasts. None for rank 0
    without a parent: it makes the plan."""
    if rank_info.run_folder is not None:  # `make train-distributed` on one node: the parent planned, every rank reads
        return LaunchPlan.from_json((rank_info.run_folder / LAUNCH_FILE).read_text(encoding="utf-8"))
    with importing():
        from sft_play.training.distributed import broadcast_text, publish_gpu

    # torch's wait hears no Ctrl-C, and there is nothing to undo
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    publish_gpu(rank_gpu_id(rank_info, restrict_to_device(config, detect_hardware())), rank_info.rank)
    signal.signal(signal.SIGINT, previous_handler)
    return None if rank_info.is_first else LaunchPlan.from_json(broadcast_text(None))


def gather_rank_hardware(local_hardware: Hardware, rank_info: RankInfo) -> Hardware:
    """The machine as all ranks use it, for rank 0 to plan with; `local_hardware` is what this process sees of it.
    Raises HardwareError where two ranks have the same GPU, or there are more ranks than GPUs."""
    from sft_play.training.distributed import gather_gpus

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


def rank_gpu_id(rank_info: RankInfo, hardware: Hardware) -> str:
    """Return an id of this rank's GPU that no other GPU has: host and UUID; empty where there is no GPU, or the
    driver does not tell its UUID."""
    index = hardware.gpus[rank_info.local_rank].index if rank_info.local_rank < len(hardware.gpus) else None
    snapshot = nvml.gpu_snapshot(details=False, topology=False) if index is not None else None
    uuid = next((gpu.uuid or gpu.bus_id for gpu in snapshot.gpus if gpu.index == index), None) if snapshot else None
    return f"{socket.gethostname()} {uuid}" if uuid else ""


def require_distinct_gpus(gpu_ids: Sequence[str]) -> None:
    """Raises HardwareError where two ranks have the same GPU, which NCCL refuses; `gpu_ids`: `rank_gpu_id` of each."""
    first_rank_by_gpu: dict[str, int] = {}
    for rank, gpu_id in enumerate(gpu_ids):
        first_rank = first_rank_by_gpu.setdefault(gpu_id, rank) if gpu_id else rank
        if first_rank != rank:
            raise HardwareError(
                f"ranks {first_rank} and {rank} have the same GPU ({one_line(gpu_id)}): start one rank per GPU, and "
                f"give "
                "each its own (srun --gpus-per-task=1, or all GPUs of the node to every rank)"
            )


def check_rank_gpu(plan: Plan, rank_info: RankInfo) -> None:
    """Raises HardwareError where this rank's GPU is not the one that was planned for."""
    if not plan.hardware.gpus:
        return
    visible_gpus, planned_gpu = detect_hardware().gpus, plan.hardware.gpus[0]
    if rank_info.local_rank >= len(visible_gpus):
        raise HardwareError(
            f"rank {rank_info.rank} needs GPU {rank_info.local_rank}, and {len(visible_gpus)} can be seen"
        )
    if visible_gpus[rank_info.local_rank].name != planned_gpu.name:
        raise HardwareError(
            f"rank {rank_info.rank} has a {visible_gpus[rank_info.local_rank].name}, and the plan is for "
            f"{planned_gpu.name}: use GPUs of one kind (CUDA_VISIBLE_DEVICES=, with CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            "names those of this machine)"
        )
