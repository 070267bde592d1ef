"""The machine as the processes of a run use it: the GPUs that were named, one of them, or ranks that share a CPU."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from sft_play.errors import ConfigError, HardwareError
from sft_play.facts.gpus import nvml
from sft_play.facts.hardware import Hardware, detect
from sft_play.facts.network import GLOO_VARIABLE, address_towards, interface_of
from sft_play.launch.command import visible_only
from sft_play.launch.exported import Ranks
from sft_play.launch.launch_options import LaunchOptions
from sft_play.log import one_line
from sft_play.planner import show
from sft_play.planner.plan import Plan

logger = logging.getLogger(__name__)


def machine_of(options: LaunchOptions) -> Hardware:
    """The machine as the ranks will use it: named GPUs of it, several nodes like it, or processes on its CPU."""
    hardware = detect()
    for line in show.detected_lines(hardware):
        logger.info("%s", line)
    if not hardware.gpus:
        if options.gpus:
            raise HardwareError("GPUS= names GPUs, and this machine has none")
        count = options.processes or 2  # the fewest that are several
        return dataclasses.replace(hardware, cpu_ranks=count * options.nodes.count, nodes=options.nodes.count)
    by_index = {gpu.index: gpu for gpu in hardware.gpus}
    missing = [index for index in options.gpus if index not in by_index]
    if missing:
        raise HardwareError(f"GPUS= names {missing[0]}, and there are {', '.join(map(str, by_index))}")
    chosen = [by_index[index] for index in options.gpus] or list(hardware.gpus)
    if options.processes is not None and options.processes > len(chosen):
        raise HardwareError(f"NPROC={options.processes} and {len(chosen)} GPUs: one process uses one GPU")
    chosen = chosen[: options.processes]
    # Every rank waits for the slowest, and one plan cannot hold for two sizes of memory.
    if len({gpu.name for gpu in chosen}) > 1:
        asked = f"GPUS={','.join(map(str, options.gpus))} are" if options.gpus else "there are"
        kinds = ", ".join(f"GPU {gpu.index} a {gpu.name}" for gpu in chosen)
        raise HardwareError(
            f"the GPUs differ, and a run takes GPUs of one kind ({asked}: {kinds}); name GPUs that are alike: "
            f"{hardware.alike_words(processes=options.processes)}"
        )
    if len(hardware.alike) > 1:  # CUDA's default order is fastest first, which are not the GPUs of the plan
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    machine = dataclasses.replace(hardware, gpus=tuple(chosen))
    return spread_over(machine, len(chosen) * options.nodes.count, options.nodes.count)


def with_own_gpu(ranks: Ranks, hardware: Hardware, environment: MutableMapping[str, str]) -> Ranks:
    """This rank's place, where its launcher shows it one GPU alone (Slurm's `--gpus-per-task=1`): device 0, whatever
    its number on the node, which torch and accelerate read from `LOCAL_RANK`."""
    if len(hardware.gpus) != 1 or ranks.local_world_size < 2:
        return ranks
    environment["LOCAL_RANK"] = "0"
    return dataclasses.replace(ranks, local_rank=0)


def choose_interface(ranks: Ranks, environment: MutableMapping[str, str]) -> None:
    """Set `GLOO_SOCKET_IFNAME` of a rank among several nodes to the interface that leads to `MASTER_ADDR`.

    gloo would take the address of this host's own name. That is the loopback where the name does not resolve, or
    resolves to 127.0.1.1 (as in Debian's /etc/hosts), and on the other nodes it means themselves. A launch that met the
    other nodes, or the user, has set the variable already. NCCL finds interfaces by itself (`NCCL_SOCKET_IFNAME`), and
    may use several at once.

    Raises:
        ConfigError: MASTER_ADDR does not resolve here, so this rank would not find the others.
    """
    host = environment.get("MASTER_ADDR")
    if ranks.world_size <= ranks.local_world_size or not host:
        return
    port = environment.get("MASTER_PORT", "")
    try:
        address = address_towards(host, int(port) if port.isdigit() else 0)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; where torchrun runs with --rdzv-backend c10d it takes the name of node 0's host: give "
            "--local-addr with this node's own address on every node"
        ) from None
    interface = interface_of(address) if address else None
    if environment.get(GLOO_VARIABLE) or interface is None:
        return
    environment[GLOO_VARIABLE] = interface
    logger.info("Network: gloo uses %s (%s), which leads to MASTER_ADDR=%s; %s= names another",
                interface, address, one_line(host), GLOO_VARIABLE)  # fmt: skip


def name_of_gpu(ranks: Ranks, hardware: Hardware) -> str:
    """This rank's GPU in one word that no other GPU has: host and UUID; empty where the driver does not tell it, or
    there is none."""
    index = hardware.gpus[ranks.local_rank].index if ranks.local_rank < len(hardware.gpus) else None
    seen = nvml.see(details=False, topology=False) if index is not None else None
    uuid = next((gpu.uuid or gpu.bus_id for gpu in seen.gpus if gpu.index == index), None) if seen else None
    return f"{socket.gethostname()} {uuid}" if uuid else ""


def require_own_gpus(names: Sequence[str]) -> None:
    """Raises HardwareError where two ranks have the same GPU, which NCCL refuses; `names`: `name_of_gpu` of each."""
    first: dict[str, int] = {}
    for rank, name in enumerate(names):
        other = first.setdefault(name, rank) if name else rank
        if other != rank:
            raise HardwareError(
                f"ranks {other} and {rank} have the same GPU ({one_line(name)}): start one rank per GPU, and give "
                "each its own (srun --gpus-per-task=1, or all GPUs of the node to every rank)"
            )


def spread_over(hardware: Hardware, world: int, nodes: int, *, is_own: bool = False) -> Hardware:
    """The machine as `world` ranks on `nodes` nodes like this one use it; `is_own`: each rank sees only its own GPU,
    and those of the others are like it."""
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=world, nodes=nodes)
    here = world // nodes
    if is_own and len(hardware.gpus) == 1:
        hardware = dataclasses.replace(hardware, gpus=hardware.gpus * here)
    if here > len(hardware.gpus):
        raise HardwareError(f"{here} ranks on this node and {len(hardware.gpus)} GPUs: start at most one rank per GPU")
    # the GPUs of other nodes are not seen from here: they are taken to be like this node's
    gpus = tuple(dataclasses.replace(hardware.gpus[n % here], index=n) for n in range(world))
    return dataclasses.replace(hardware, gpus=gpus, nodes=nodes)


def one_gpu(hardware: Hardware) -> Hardware:
    """The machine as one process uses it: one GPU; the log says that the others stay idle.

    Several visible GPUs would make transformers wrap the model in DataParallel and multiply the batch.
    """
    for line in show.detected_lines(hardware):
        logger.info("%s", line)
    if len(hardware.gpus) < 2:
        return hardware
    first = hardware.gpus[0]
    idle = len(hardware.gpus) - 1
    logger.info("Using GPU %d; %d other GPU%s idle (make train-distributed uses them all)",
                first.index, idle, "s stay" if idle > 1 else " stays")  # fmt: skip
    os.environ.update(visible_only(str(first.index)))
    return hardware.first(1)


def check_gpu(plan: Plan, ranks: Ranks) -> None:
    """Raises HardwareError where this rank's GPU is not the one that was planned for."""
    if not plan.hardware.gpus:
        return
    machine, planned = detect(), plan.hardware.gpus[0]
    here = machine.gpus
    if ranks.local_rank >= len(here):
        raise HardwareError(f"rank {ranks.rank} needs GPU {ranks.local_rank}, and {len(here)} can be seen")
    if here[ranks.local_rank].name != planned.name:
        remedy = "use nodes with GPUs of one kind"
        if len(machine.alike) > 1:
            named = machine.alike_words(variable="CUDA_VISIBLE_DEVICES")
            remedy = f"use GPUs of one kind, with CUDA_DEVICE_ORDER=PCI_BUS_ID and as many ranks: {named}"
        raise HardwareError(
            f"rank {ranks.rank} has a {here[ranks.local_rank].name}, and the plan is for {planned.name}: {remedy}"
        )


def log_idle(hardware: Hardware, options: LaunchOptions, file: Path | None) -> None:
    """Warn where a number of processes leaves GPUs of this node idle, with what would use them all."""
    total, used = len(detect().gpus), hardware.gpus_per_node
    if not hardware.gpus or options.gpus or used >= total:
        return
    in_file = f", or num_processes: {total * options.nodes.count} in {one_line(str(file))}," if file else ""
    logger.warning("%d of this node's %d GPUs %s idle: NPROC=%d%s uses them all",
                   total - used, total, "stay" if total - used > 1 else "stays", total, in_file)  # fmt: skip
