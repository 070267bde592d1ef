"""The machine as a run uses it: the GPUs that were named, one of them, or ranks that share a CPU; or the CPU where it
is asked for. What cannot run on it is refused before anything loads, and what libraries read when they are imported is
set.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.facts.compiler import require_compiler, require_inductor
from sft_play.facts.gpus import nvml
from sft_play.facts.gpus.unusable_accelerators import CPU_HINT, VISIBILITY_VARIABLES, find_unusable_accelerator
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.models.architecture import find_model_folder, is_hub_reachable
from sft_play.facts.network import GLOO_VARIABLE, find_interface, route_address
from sft_play.launch.command import visible_gpu_variables
from sft_play.launch.exported import RankInfo
from sft_play.launch.launch_options import LaunchOptions
from sft_play.log import one_line
from sft_play.planner.plan import Plan
from sft_play.process.environment import set_deepspeed_to_cpu

logger = logging.getLogger(__name__)

# What accelerate asks for on several RTX 40 with an older driver than `_WORKING_P2P_DRIVER`.
P2P_OFF_VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
_WORKING_P2P_DRIVER = [550, 40, 7]
# Parameters above which a model is trained on a CPU only if that is asked for: a step takes minutes.
MAX_CPU_PARAMS = 1_000_000_000


def restrict_to_device(config: RunConfig, hardware: Hardware) -> Hardware:
    """This machine as `train.device` restricts it."""
    return hardware.without_gpus() if config.train.device == "cpu" else hardware


def select_hardware(options: LaunchOptions, hardware: Hardware) -> Hardware:
    """This machine as the ranks will use it: named GPUs of it, several nodes like it, or processes on its CPU; raises
    HardwareError where it has not the GPUs that are asked for."""
    if not hardware.gpus:
        if options.gpus:
            raise HardwareError("GPUS= names GPUs, and this machine has none")
        process_count = options.processes_per_node or 2  # the fewest that are several
        return dataclasses.replace(hardware, cpu_ranks=process_count * options.nodes.count, nodes=options.nodes.count)
    by_index = {gpu.index: gpu for gpu in hardware.gpus}
    missing_gpus = [index for index in options.gpus if index not in by_index]
    if missing_gpus:
        raise HardwareError(f"GPUS= names {missing_gpus[0]}, and there are {', '.join(map(str, by_index))}")
    chosen_gpus = [by_index[index] for index in options.gpus] or list(hardware.gpus)
    if options.processes_per_node is not None and options.processes_per_node > len(chosen_gpus):
        raise HardwareError(f"NPROC={options.processes_per_node} and {len(chosen_gpus)} GPUs: one process uses one GPU")
    chosen_gpus = chosen_gpus[: options.processes_per_node]
    # Every rank waits for the slowest, and one plan cannot hold for two sizes of memory.
    if len({gpu.name for gpu in chosen_gpus}) > 1:
        source_text = f"GPUS={','.join(map(str, options.gpus))} are" if options.gpus else "there are"
        kinds = ", ".join(f"GPU {gpu.index} a {gpu.name}" for gpu in chosen_gpus)
        raise HardwareError(
            f"the GPUs differ, and a run takes GPUs of one kind ({source_text}: {kinds}); name GPUs that are alike: "
            f"{hardware.format_gpu_choices(processes=options.processes_per_node)}"
        )
    if len(hardware.gpu_groups) > 1:  # CUDA's default order is fastest first, which are not the GPUs of the plan
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    machine = dataclasses.replace(hardware, gpus=tuple(chosen_gpus))
    return spread_hardware(machine, len(chosen_gpus) * options.nodes.count, options.nodes.count)


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


def rank_gpu_id(rank_info: RankInfo, hardware: Hardware) -> str:
    """Return an id of this rank's GPU that no other GPU has: host and UUID; empty where there is no GPU, or the
    driver does not tell its UUID."""
    index = hardware.gpus[rank_info.local_rank].index if rank_info.local_rank < len(hardware.gpus) else None
    snapshot = nvml.gpu_snapshot(details=False, topology=False) if index is not None else None
    uuid = next((gpu.uuid or gpu.bus_id for gpu in snapshot.gpus if gpu.index == index), None) if snapshot else None
    return f"{socket.gethostname()} {uuid}" if uuid else ""


def require_distinct_gpus(gpu_ids: Sequence[str]) -> None:
    """Raises HardwareError where two ranks have the same GPU, which NCCL refuses; `names`: `rank_gpu_id` of each."""
    first_rank_by_gpu: dict[str, int] = {}
    for rank, gpu_id in enumerate(gpu_ids):
        first_rank = first_rank_by_gpu.setdefault(gpu_id, rank) if gpu_id else rank
        if first_rank != rank:
            raise HardwareError(
                f"ranks {first_rank} and {rank} have the same GPU ({one_line(gpu_id)}): start one rank per GPU, and "
                f"give "
                "each its own (srun --gpus-per-task=1, or all GPUs of the node to every rank)"
            )


def spread_hardware(
    hardware: Hardware, world_size: int, node_count: int, *, sees_own_gpu_only: bool = False
) -> Hardware:
    """Return the machine as `world_size` ranks on `node_count` nodes like this one use it. `sees_own_gpu_only`: each
    rank sees its own GPU alone, and the others' are taken to be like it."""
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=world_size, nodes=node_count)
    ranks_per_node = world_size // node_count
    if sees_own_gpu_only and len(hardware.gpus) == 1:
        hardware = dataclasses.replace(hardware, gpus=hardware.gpus * ranks_per_node)
    if ranks_per_node > len(hardware.gpus):
        raise HardwareError(
            f"{ranks_per_node} ranks on this node and {len(hardware.gpus)} GPUs: start at most one rank per GPU"
        )
    # the GPUs of other nodes are not seen from here: they are taken to be like this node's
    gpus = tuple(dataclasses.replace(hardware.gpus[n % ranks_per_node], index=n) for n in range(world_size))
    return dataclasses.replace(hardware, gpus=gpus, nodes=node_count)


def use_one_gpu(hardware: Hardware) -> Hardware:
    """The machine as one process uses it: one GPU; the log says that the others stay idle. Several visible ones would
    make transformers wrap the model in DataParallel and multiply the batch."""
    if len(hardware.gpus) < 2:
        return hardware
    first_gpu = hardware.gpus[0]
    idle_count = len(hardware.gpus) - 1
    logger.info("Using GPU %d; %d other GPU%s idle (make train-distributed uses them all)",
                first_gpu.index, idle_count, "s stay" if idle_count > 1 else " stays")  # fmt: skip
    os.environ.update(visible_gpu_variables(str(first_gpu.index)))
    return hardware.limit_gpus(1)


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


def warn_idle_gpus(hardware: Hardware, options: LaunchOptions, accelerate_file: Path | None) -> None:
    """Warn where a number of processes leaves GPUs of this node idle, with what would use them all."""
    total, used = len(detect_hardware().gpus), hardware.ranks_per_node
    if not hardware.gpus or options.gpus or used >= total:
        return
    file_hint = (
        f", or num_processes: {total * options.nodes.count} in {one_line(str(accelerate_file))},"
        if accelerate_file
        else ""
    )
    logger.warning("%d of this node's %d GPUs %s idle: NPROC=%d%s uses them all",
                   total - used, total, "stay" if total - used > 1 else "stays", total, file_hint)  # fmt: skip


# --- what it can run --------------------------------------------------------------------------------------------------


def hide_gpus(config: RunConfig, environment: MutableMapping[str, str]) -> None:
    """Hide all GPUs from libraries imported later and from ranks, where the CPU is asked for: with -1, because AMD's
    HIP reads an empty list as unset."""
    if config.train.device == "cpu":
        if environment.get(VISIBILITY_VARIABLES[0]) != "-1":  # for a rank, the parent has logged it already
            logger.info("train.device=cpu: no GPU is used or looked for")
        environment.update(dict.fromkeys(VISIBILITY_VARIABLES, "-1"))


def disable_broken_p2p(hardware: Hardware, environment: MutableMapping[str, str]) -> None:
    """Switch NCCL's P2P and InfiniBand off where accelerate would refuse to start: call it before accelerate's state
    is made, for one process as well."""
    if not hardware.gpus or P2P_OFF_VARIABLES.keys() <= environment.keys():
        return
    names, driver = _installed_gpus()
    if has_broken_p2p(names, driver):
        missing = {name: text for name, text in P2P_OFF_VARIABLES.items() if name not in environment}
        environment.update(missing)
        logger.warning("%s: driver %s of several RTX 40 offers a P2P that hangs; driver 550.40.07 or newer does not",
                       " ".join(f"{name}={text}" for name, text in missing.items()), driver)  # fmt: skip


def has_broken_p2p(names: Sequence[str], driver: str | None) -> bool:
    """accelerate's own rule (utils/environment.py, `check_cuda_p2p_ib_support`): the machine has several GPUs, visible
    or not, one of them an RTX 40, and an older driver; however many processes there are."""
    version = [int(part) for part in re.findall(r"\d+", driver or "")]
    return (
        len(names) > 1 and any("RTX 40" in name for name in names) and bool(version) and version < _WORKING_P2P_DRIVER
    )


def _installed_gpus() -> tuple[list[str], str | None]:
    snapshot = nvml.gpu_snapshot(details=False, topology=False)
    return ([gpu.name or "" for gpu in snapshot.gpus], snapshot.driver) if snapshot else ([], None)


def allow_fp16(hardware: Hardware, environment: MutableMapping[str, str]) -> None:
    """Let DeepSpeed train in fp16 on Pascal, the only 16 bits that it has: without the variable its engine refuses to
    start on compute capability 6.x (accelerator/cuda_accelerator.py, `is_fp16_supported`)."""
    if any(gpu.capability and gpu.capability[0] == 6 for gpu in hardware.gpus):
        environment.setdefault("DS_ALLOW_DEPRECATED_FP16", "1")


def require_usable_hardware(
    config: RunConfig, hardware: Hardware, environment: Mapping[str, str], *, count_params: Callable[[], int]
) -> None:
    """Check, before anything loads, that a run here is what its user expects and can take a step; `count_params`: the
    model's parameters, asked for on a CPU only. Raises HardwareError where an accelerator would not be used, the model
    is too large for a CPU, Triton or inductor cannot build what is needed, or flash-attn 2 has no kernels."""
    if config.train.compile:
        require_inductor(hardware, environment)
    obstacle = flash_obstacle(config, hardware)
    if obstacle is not None:
        raise HardwareError(f"model.attn_implementation: {obstacle[0]}; {obstacle[1]}")
    if hardware.gpus:
        return require_compiler(hardware, environment)
    if config.train.device == "cpu":
        return None
    if accelerator := find_unusable_accelerator(environment):
        raise HardwareError(accelerator)
    param_count = count_params()  # asked last: for a model of the hub it fetches the config
    if param_count > MAX_CPU_PARAMS:
        raise HardwareError(
            f"no GPU was detected here, and {one_line(config.model.name)} has {param_count / 1e9:.1f} billion "
            f"parameters: make gpu-info shows what this machine has; or {CPU_HINT}"
        )
    return None


def flash_obstacle(config: RunConfig, hardware: Hardware) -> tuple[str, str] | None:
    """What keeps flash-attn 2 from this machine, and what to do; None where it runs, or is not asked for."""
    if config.model.attn_implementation != "flash_attention_2":
        return None
    if not hardware.gpus:
        return "flash_attention_2 has kernels for GPUs, and this run uses the CPU", "use auto"
    old_gpus = [gpu for gpu in hardware.gpus if gpu.capability and gpu.capability < (8, 0)]
    if not old_gpus:
        return None
    return (
        f"flash_attention_2 needs GPUs from Ampere on (compute capability 8.0), and {old_gpus[0].name} has "
        f"{'.'.join(map(str, old_gpus[0].capability or ()))}",
        "use auto",
    )


def prepare_libraries(model: str, hardware: Hardware) -> None:
    """Set the environment variables that the libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # the profiler's library writes `USDT:` lines to standard error whatever it is told, but from above its last level
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if not hardware.gpus:
        set_deepspeed_to_cpu()
    allow_fp16(hardware, os.environ)
    disable_broken_p2p(hardware, os.environ)
    go_offline_without_hub(model)


def go_offline_without_hub(name: str) -> None:
    """Before the libraries are imported, keep them from waiting for a hub that does not answer."""
    if find_model_folder(name) is None and not is_hub_reachable():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"
