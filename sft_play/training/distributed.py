"""The ranks of a run: their process group, and what they tell each other about files, settings and
figures.

Beside the group they share the launcher's store, by torch's rendezvous (`MASTER_ADDR`,
`MASTER_PORT`): rank 0 hands the run over, all publish how far they are, and no shared disk is
needed.
"""

import contextlib
import datetime
import importlib
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

from sft_play.errors import ConfigError, HardwareError, RunFolderError
from sft_play.log import one_line
from sft_play.machine.network import RENDEZVOUS_TIMEOUT_S
from sft_play.planner.plan import Plan
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.process.waiting import report_wait
from sft_play.text import GIB

logger = logging.getLogger(__name__)
_HOST = socket.gethostname()
# Between two looks whether rank 0 has planned, which may take as long as to count the tokens of
# every row.
_POLL_S = 0.2
# Rank 0 may be the one that serves the store: it must not be garbage-collected while others use it.
_stores: list[Any] = []


def world_size() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rng_devices() -> list[int] | None:
    """The GPU of this rank, for `fork_rng`, which else keeps the states of all GPUs of the node and
    warns of it."""
    return [torch.cuda.current_device()] if torch.cuda.is_available() else None


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return rank() == 0


def is_first_of_node() -> bool:
    """Whether this is the first rank of its node, or the only process."""
    return is_first() or os.environ.get("LOCAL_RANK") == "0"


def barrier(group: Any = None) -> None:
    """Wait for all ranks; does nothing for one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group)


_long_timeout_groups: dict[Any, Any] = {}


def long_timeout_group(*, purpose: str = "the run") -> Any:
    """A CPU process group of all ranks that waits as long as a disk takes, where the run's own
    would give up; None for one process. All ranks call it. `purpose`: whose it is: a thread that
    works beside the training needs one of its own."""
    if world_size() == 1:
        return None
    key = dist.group.WORLD, purpose  # another run's group is of another world
    if key not in _long_timeout_groups:
        # the heartbeat ends the wait earlier
        _long_timeout_groups[key] = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(days=7)
        )
    return _long_timeout_groups[key]


@contextlib.contextmanager
def process_group(plan: Plan, *, timeout_s: float, uses_deepspeed: bool = False) -> Any:
    """The process group of all ranks, with our timeout, destroyed at the end of the run; DeepSpeed
    gets it at once, since ZeRO-3 divides weights while they are read."""
    announce_compile_waits()
    if plan.choice.layout.ranks == 1 and "RANK" not in os.environ:
        yield
        return
    if not dist.is_initialized():
        # gloo beside NCCL: torch sends objects, and tensors of the host, by the CPU's backend
        backend = "gloo" if plan.hardware.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    if uses_deepspeed:
        init_deepspeed(on_cpu=plan.hardware.device == "cpu")
    # now, and not with the first save: the launcher, whose store it takes to make a group, may be
    # gone by then
    long_timeout_group()
    try:
        yield
    finally:
        # the group ends with the default one; the next run needs a new one
        _long_timeout_groups.clear()
        dist.destroy_process_group()


def sum_over_ranks(value: int) -> int:
    """The sum of a number over all ranks."""
    return sum_each_over_ranks([value])[0]


def sum_each_over_ranks(values: Sequence[int]) -> list[int]:
    """The sum of each of the numbers over all ranks, which have equally many."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(value: int) -> int:
    """The highest of a number that every rank has."""
    return _all_reduce([value], dist.ReduceOp.MAX)[0]


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank."""
    return bool(max_over_ranks(int(flag)))


def any_rank_for_each(flags: Sequence[bool]) -> list[bool]:
    """Whether each of the flags is true on any rank; ranks have equally many."""
    return [bool(flag) for flag in _all_reduce([*map(int, flags)], dist.ReduceOp.MAX)]


def _all_reduce(values: Sequence[int], operation: Any) -> list[int]:
    if world_size() == 1:
        return [*values]
    tensor = torch.tensor(values, dtype=torch.int64)
    # a group that was there before, and has no backend for the host
    if dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor, op=operation)
    numbers: list[int] = tensor.tolist()
    return numbers


def broadcast_value(value: Any) -> Any:
    """Rank 0's value (plain data), on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_values(value: Any) -> list[Any]:
    """The value (plain data) of every rank, on all ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def require_all(is_satisfied: bool, message: str) -> None:
    """Raises RunFolderError(message) on every rank unless `is_satisfied` on all; it names the ranks
    that are not."""
    failing = [
        f"rank {rank} on {host}"
        for rank, (host, is_fine) in enumerate(gather_values((_HOST, is_satisfied)))
        if not is_fine
    ]
    if failing:
        raise RunFolderError(f"{', '.join(failing)}: {message}")


def require_same_inputs(facts: Mapping[str, str]) -> None:
    """Raises ConfigError on every rank where what each rank read for itself differs from what rank
    0 read."""
    (first_host, first_facts), *others = gather_values((_HOST, dict(facts)))
    for rank, (host, rank_facts) in enumerate(others, start=1):
        differing = [
            name
            for name in {**first_facts, **rank_facts}
            if first_facts.get(name) != rank_facts.get(name)
        ]
        if differing:
            listed = "; ".join(
                f"{name} ({first_facts.get(name)} there, {rank_facts.get(name)} here)"
                for name in differing
            )
            raise ConfigError(
                f"rank {rank} on {host} does not train what rank 0 on {first_host} trains: they"
                f" differ in {listed}; give all nodes the same files, settings and packages"
            )


def check_shared_disk(path: Path, plan: Plan) -> bool:
    """Whether all ranks see what rank 0 has written; raises RunFolderError where not, under
    DeepSpeed."""
    if plan.hardware.nodes == 1:
        return True
    content = path.read_bytes() if path.is_file() else b""
    is_shared = content == broadcast_value(content)
    if plan.choice.layout.is_zero:
        require_all(
            is_shared,
            f"{path.parent} is not on a disk that all nodes share, and under"
            f" {plan.layout} every rank writes a part of each checkpoint there:"
            " set output.dir to a shared disk, or use STRATEGY=ddp or fsdp",
        )
    if all(gather_values(is_shared)):
        return True
    logger.info(
        "The nodes have disks of their own: rank 0 gathers checkpoints (%.1f GiB, using %.1f GiB of"
        " its RAM); to resume from one, copy %s to every node first",
        plan.memory.checkpoint_bytes / GIB,
        plan.memory.host_gather_bytes / GIB,
        path.parent,
    )
    return False


def init_deepspeed(*, on_cpu: bool) -> None:
    """Join DeepSpeed's ranks, by gloo on CPUs, else by NCCL. On CPUs its shared-memory collectives
    stay out, which it compiles for more than a minute (0.19), and which only its inference
    calls."""
    if not on_cpu:
        from deepspeed import comm

        comm.init_distributed("nccl", auto_mpi_discovery=False)
        return
    set_deepspeed_to_cpu()
    from deepspeed import comm

    # the attribute of this name is torch itself
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        comm.init_distributed("gloo", auto_mpi_discovery=False)
    finally:
        backend.build_shm_op = build


# --- what torch compiles for a run, such as DeepSpeed's CPU Adam ----------------------------------
_wait_for_compile = FileBaton.wait


def announce_compile_waits() -> None:
    """Say what this process waits for where another compiles: torch makes a file, removes it once
    it has compiled, and others wait until it is gone (`torch/utils/file_baton.py`), for ever after
    a kill."""
    FileBaton.wait = _announce_wait


def _announce_wait(baton: FileBaton) -> None:
    lock = Path(baton.lock_file_path).resolve()
    with report_wait(
        f"Waiting for the process that compiles in {lock.parent} (if there is none: rm {lock})"
    ):
        _wait_for_compile(baton)


# --- the store beside the process group -----------------------------------------------------------
def open_store(name: str) -> Any:
    """A namespace of the launcher's store over a connection of its own: one that waits does not
    block another."""
    store, _, _ = next(
        dist.rendezvous("env://", timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    )
    _stores.append(store)
    return dist.PrefixStore(name, store)


def publish_gpu(name: str, rank: int) -> None:
    """Tell rank 0 which GPU this rank has: the first that ranks do together. Raises HardwareError
    where others do not come."""
    try:
        open_store("sft_play_gpus").set(str(rank), name)
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise HardwareError(
            f"rank {rank} waited {RENDEZVOUS_TIMEOUT_S:.0f} s at {one_line(address)} for the other"
            f" ranks ({one_line(str(error))}): start all of them, or leave RANK, WORLD_SIZE and"
            " LOCAL_RANK out of the environment"
        ) from None


def gather_gpus(rank_count: int) -> list[str]:
    """What every rank says of its GPU, in their order: waits until all have."""
    store, names = open_store("sft_play_gpus"), [str(rank) for rank in range(rank_count)]
    store.wait(names, datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    return [str(store.get(name), "utf-8") for name in names]


def broadcast_text(text: str | None) -> str:
    """Rank 0's text, on every rank: rank 0 passes it, and returns when the others have it, since it
    may end then, and the store with it; the others pass None. Raises HardwareError where rank 0
    ends without a text.
    """
    store, reader_count = open_store("sft_play"), int(os.environ["WORLD_SIZE"]) - 1
    if text is None:
        try:
            # a wait of the store itself would hear no request to stop
            while not store.check(["handed"]):
                time.sleep(_POLL_S)
            text = str(store.get("handed"), "utf-8")
            store.add("read", 1)
        except dist.DistError:
            raise HardwareError(
                "rank 0 ended before it had planned the run: its own lines say why"
            ) from None
        return text
    store.set("handed", text)
    deadline = time.monotonic() + 10.0  # for those that have not read it
    while store.add("read", 0) < reader_count and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return text
