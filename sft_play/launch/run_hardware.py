"""The machine as a run uses it: one GPU of it, those of its ranks, or ranks that share a CPU; or
the CPU where it is asked for; and as the ranks that a launcher started see it. Beside it what
libraries read of the machine when they are imported."""

import dataclasses
import logging
import os
import re
import socket
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import HardwareError
from sft_play.launch.torchrun import RankInfo, visible_gpu_variables
from sft_play.log import one_line
from sft_play.machine import nvml
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.visible_gpus import VISIBILITY_VARIABLES
from sft_play.models.config_json import find_model_folder, is_hub_reachable
from sft_play.planner.layout import parse_mesh
from sft_play.planner.plan import Plan
from sft_play.process.environment import set_deepspeed_to_cpu

logger = logging.getLogger(__name__)

# What accelerate asks for on several RTX 40 with a driver older than 550.40.07 (`has_broken_p2p`).
P2P_OFF_VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def restrict_to_device(config: RunConfig, hardware: Hardware) -> Hardware:
    """This machine as `train.device` restricts it."""
    return hardware.without_gpus() if config.train.device == "cpu" else hardware


def mesh_hardware(config: RunConfig, hardware: Hardware) -> Hardware:
    """Limit the machine to what the mesh of the run YAML takes: as many CPU processes, or as many
    of its GPUs. GPUs that are only named are all kept, and too few stay too few: the plan then says
    what the mesh would take."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None:
        return hardware
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=mesh.ranks)
    return (
        hardware
        if hardware.named or mesh.ranks >= hardware.ranks
        else hardware.limit_gpus(mesh.ranks)
    )


def spread_hardware(
    hardware: Hardware, world_size: int, node_count: int, *, sees_own_gpu_only: bool = False
) -> Hardware:
    """Return the machine as `world_size` ranks on `node_count` nodes like this one use it.
    `sees_own_gpu_only`: each rank sees its own GPU alone, and the others' are taken to be like
    it."""
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=world_size, nodes=node_count)
    ranks_per_node = world_size // node_count
    if sees_own_gpu_only and len(hardware.gpus) == 1:
        hardware = dataclasses.replace(hardware, gpus=hardware.gpus * ranks_per_node)
    if ranks_per_node > len(hardware.gpus):
        raise HardwareError(
            f"{ranks_per_node} ranks on this node and {len(hardware.gpus)} GPUs: start at most one"
            " rank per GPU"
        )
    # the GPUs of other nodes are not seen from here: they are taken to be like this node's
    gpus = tuple(
        dataclasses.replace(hardware.gpus[n % ranks_per_node], index=n) for n in range(world_size)
    )
    return dataclasses.replace(hardware, gpus=gpus, nodes=node_count)


def use_one_gpu(hardware: Hardware) -> Hardware:
    """The machine as one process uses it: one GPU; the log says that the others stay idle. Several
    visible ones would make transformers wrap the model in DataParallel and multiply the batch."""
    if len(hardware.gpus) < 2:
        return hardware
    first_gpu = hardware.gpus[0]
    idle_count = len(hardware.gpus) - 1
    logger.info(
        "Using GPU %d; %d other GPU%s idle (make train-distributed uses them all)",
        first_gpu.index,
        idle_count,
        "s stay" if idle_count > 1 else " stays",
    )
    os.environ.update(visible_gpu_variables(str(first_gpu.index)))
    return hardware.limit_gpus(1)


def warn_idle_gpus(
    hardware: Hardware, named_gpus: Sequence[int], accelerate_file: Path | None
) -> None:
    """Warn where a number of processes leaves GPUs of this node idle, with what would use them
    all."""
    total, used = len(detect_hardware().gpus), hardware.ranks_per_node
    if not hardware.gpus or named_gpus or used >= total:
        return
    file_hint = ""
    if accelerate_file is not None:
        file_hint = (
            f", or num_processes: {total * hardware.nodes} in {one_line(str(accelerate_file))},"
        )
    logger.warning(
        "%d of this node's %d GPUs stay idle: NPROC=%d%s uses them all",
        total - used,
        total,
        total,
        file_hint,
    )


# --- the ranks that a launcher started ------------------------------------------------------------


def gather_rank_hardware(local_hardware: Hardware, rank_info: RankInfo) -> Hardware:
    """The machine as all ranks use it, for rank 0 to plan with; `local_hardware` is what this
    process sees of it. Raises HardwareError where two ranks have the same GPU, or there are more
    ranks than GPUs."""
    from sft_play.training.distributed import gather_gpus

    sees_one_gpu = len(local_hardware.gpus) == 1 and rank_info.local_world_size > 1
    gpus = gather_gpus(rank_info.world_size) if sees_one_gpu else []
    require_distinct_gpus(gpus)
    # without a UUID of each, ranks that share one GPU by mistake look the same
    hardware = spread_hardware(
        local_hardware,
        rank_info.world_size,
        rank_info.node_count,
        sees_own_gpu_only=sees_one_gpu and all(gpus),
    )
    if hardware.gpus and rank_info.local_world_size < len(local_hardware.gpus):
        logger.warning(
            "%d of this node's %d GPUs are idle: start %d processes on it (--nproc-per-node) to"
            " use all",
            len(local_hardware.gpus) - rank_info.local_world_size,
            len(local_hardware.gpus),
            len(local_hardware.gpus),
        )
    return hardware


def rank_gpu_id(rank_info: RankInfo, hardware: Hardware) -> str:
    """Return an id of this rank's GPU that no other GPU has: host and UUID; empty where there is no
    GPU, or the driver does not tell its UUID."""
    snapshot = nvml.gpu_snapshot(details=False, topology=False)
    if snapshot is None or rank_info.local_rank >= len(hardware.gpus):
        return ""
    uuids = {gpu.index: gpu.uuid or gpu.bus_id for gpu in snapshot.gpus}
    uuid = uuids.get(hardware.gpus[rank_info.local_rank].index)
    return f"{socket.gethostname()} {uuid}" if uuid else ""


def require_distinct_gpus(gpu_ids: Sequence[str]) -> None:
    """Raises HardwareError where two ranks have the same GPU, which NCCL refuses; `gpu_ids`:
    `rank_gpu_id` of each."""
    first_rank_by_gpu: dict[str, int] = {}
    for rank, gpu_id in enumerate(gpu_ids):
        if gpu_id and first_rank_by_gpu.setdefault(gpu_id, rank) != rank:
            raise HardwareError(
                f"ranks {first_rank_by_gpu[gpu_id]} and {rank} have the same GPU"
                f" ({one_line(gpu_id)}): start one rank per GPU, and give each its own (srun"
                " --gpus-per-task=1, or all GPUs of the node to every rank)"
            )


def check_rank_gpu(plan: Plan, rank_info: RankInfo) -> None:
    """Raises HardwareError where this rank's GPU is not the one that was planned for."""
    if not plan.hardware.gpus:
        return
    visible_gpus, planned_name = detect_hardware().gpus, plan.hardware.gpus[0].name
    if rank_info.local_rank >= len(visible_gpus):
        raise HardwareError(
            f"rank {rank_info.rank} needs GPU {rank_info.local_rank}, and {len(visible_gpus)} can"
            " be seen"
        )
    name = visible_gpus[rank_info.local_rank].name
    if name != planned_name:
        raise HardwareError(
            f"rank {rank_info.rank} has a {name}, and the plan is for {planned_name}: use GPUs of"
            " one kind (CUDA_VISIBLE_DEVICES=, with CUDA_DEVICE_ORDER=PCI_BUS_ID, names those of"
            " this machine)"
        )


# --- what libraries read when they are imported ---------------------------------------------------
def prepare_libraries(model: str, hardware: Hardware) -> None:
    """Set the environment variables that the libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # the profiler's library writes `USDT:` lines to standard error whatever it is told, but from
    # above its last level
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if not hardware.gpus:
        set_deepspeed_to_cpu()
    allow_fp16(hardware, os.environ)
    disable_broken_p2p(hardware, os.environ)
    go_offline_without_hub(model)


def hide_gpus(config: RunConfig, environment: MutableMapping[str, str]) -> None:
    """Hide all GPUs from libraries imported later and from ranks, where the CPU is asked for: with
    -1, because AMD's HIP reads an empty list as unset."""
    if config.train.device == "cpu":
        # for a rank, the parent has logged it already
        if environment.get(VISIBILITY_VARIABLES[0]) != "-1":
            logger.info("train.device=cpu: no GPU is used or looked for")
        environment.update(dict.fromkeys(VISIBILITY_VARIABLES, "-1"))


def allow_fp16(hardware: Hardware, environment: MutableMapping[str, str]) -> None:
    """Let DeepSpeed train in fp16 on Pascal, the only 16 bits that it has: without the variable its
    engine refuses to start on compute capability 6.x (accelerator/cuda_accelerator.py,
    `is_fp16_supported`)."""
    if any(gpu.capability and gpu.capability[0] == 6 for gpu in hardware.gpus):
        environment.setdefault("DS_ALLOW_DEPRECATED_FP16", "1")


def disable_broken_p2p(hardware: Hardware, environment: MutableMapping[str, str]) -> None:
    """Switch NCCL's P2P and InfiniBand off where accelerate would refuse to start: call it before
    accelerate's state is made, for one process as well."""
    if not hardware.gpus or P2P_OFF_VARIABLES.keys() <= environment.keys():
        return
    snapshot = nvml.gpu_snapshot(details=False, topology=False)
    if snapshot is not None and has_broken_p2p(
        [gpu.name or "" for gpu in snapshot.gpus], snapshot.driver
    ):
        for name, text in P2P_OFF_VARIABLES.items():
            environment.setdefault(name, text)
        logger.warning(
            "%s are set: driver %s of several RTX 40 offers a P2P that hangs; driver 550.40.07 or"
            " newer does not",
            " and ".join(P2P_OFF_VARIABLES),
            snapshot.driver,
        )


def has_broken_p2p(names: Sequence[str], driver: str | None) -> bool:
    """accelerate's own rule (utils/environment.py, `check_cuda_p2p_ib_support`): the machine has
    several GPUs, visible or not, one of them an RTX 40, and an older driver; however many processes
    there are."""
    version = [int(part) for part in re.findall(r"\d+", driver or "")]
    return (
        len(names) > 1
        and any("RTX 40" in name for name in names)
        and bool(version)
        and version < [550, 40, 7]
    )


def go_offline_without_hub(name: str) -> None:
    """Before the libraries are imported, keep them from waiting for a hub that does not answer."""
    if find_model_folder(name) is None and not is_hub_reachable():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"
