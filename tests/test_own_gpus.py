"""Ranks to which their launcher shows one GPU each: which device they take, and that no two have the same."""

from __future__ import annotations

import os
import random
import threading
import warnings
from types import SimpleNamespace

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError, HardwareError
from sft_play.launch import request, run_hardware
from sft_play.launch.torchrun import RankInfo, read_rank_info, refuse_repeated_starts
from sft_play.machine.gpu import Gpu, GpuSnapshot, GpuStatus
from sft_play.machine.hardware import Hardware
from sft_play.text import GIB

H100 = "NVIDIA H100 80GB HBM3"


def node(*indices: int) -> Hardware:
    gpus = tuple(Gpu(index, H100, 80 * GIB, 79 * GIB, (9, 0)) for index in indices)
    return Hardware(gpus, "CPU", 64, 512 * GIB, 512 * GIB)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_rank_that_sees_one_gpu_takes_it_whatever_its_number(world, monkeypatch):
    config = config_from_text("model: {name: x}\n", name="run.yaml")
    for rank in range(world):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        ranks = read_rank_info(given)
        assert ranks is not None
        for seen in (node(0), node(*range(world)), node()):  # its own GPU, those of the node, the CPU
            monkeypatch.setattr(os, "environ", dict(given))
            monkeypatch.setattr(request, "detect_hardware", lambda seen=seen: seen)
            found = request.setup_rank_environment(config, ranks)
            local_rank = 0 if len(seen.gpus) == 1 else rank
            assert (found.rank, found.local_rank, found.local_world_size) == (rank, local_rank, world)
            assert os.environ["LOCAL_RANK"] == str(local_rank)
        monkeypatch.undo()
    planned = run_hardware.spread_hardware(node(0), 2 * world, 2, sees_own_gpu_only=True)
    assert (planned.ranks, planned.ranks_per_node, planned.nodes) == (2 * world, world, 2)
    with pytest.raises(HardwareError, match=f"{world} ranks on this node and 1 GPUs"):
        run_hardware.spread_hardware(node(0), world, 1)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 3), (2, 4), (3, 5)])
def test_tasks_that_srun_gives_gpus_are_ranks(nodes, per_node):
    layout = f"{per_node}(x{nodes})" if nodes > 1 else str(per_node)
    for task in range(nodes * per_node):
        given = {
            "SLURM_GPUS_PER_TASK": "1", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % per_node),
            "SLURM_STEP_NUM_TASKS": str(nodes * per_node), "SLURM_STEP_TASKS_PER_NODE": layout,
        }  # fmt: skip
        assert read_rank_info(given) == RankInfo(task, task % per_node, nodes * per_node, per_node)
        refuse_repeated_starts(given, node_count=1)
        of_a_node = given | {"SLURM_GPUS_PER_TASK": ""}  # whole nodes, for which each task would be a run
        assert read_rank_info(of_a_node) is None
        with pytest.raises(ConfigError, match="this command was started"):
            refuse_repeated_starts(of_a_node, node_count=1)
        assert read_rank_info(given | {"SLURM_STEP_TASKS_PER_NODE": f"{per_node},1"}) is None
        assert read_rank_info(given | {"RANK": "0", "WORLD_SIZE": "2"}) is None  # a node's number


def test_a_gpu_is_named_by_host_and_uuid_and_by_its_slot_without_one(monkeypatch):
    gpus = (GpuStatus(n, H100, "NVIDIA", uuid=f"GPU-{n}" if n else None, bus_id="00:17") for n in range(3))
    seen = GpuSnapshot(tuple(gpus))
    monkeypatch.setattr(run_hardware.nvml, "gpu_snapshot", lambda **_: seen)
    place = RankInfo(5, 0, 8, 4)
    # hidden by CUDA_VISIBLE_DEVICES=2, the driver still lists them all
    assert run_hardware.rank_gpu_id(place, node(2)).endswith(" GPU-2")
    assert run_hardware.rank_gpu_id(place, node(0)).endswith(" 00:17")
    assert run_hardware.rank_gpu_id(place, node()) == ""
    monkeypatch.setattr(run_hardware.nvml, "gpu_snapshot", lambda **_: None)
    assert run_hardware.rank_gpu_id(place, node(2)) == ""


def test_two_ranks_with_one_gpu_are_refused_and_others_are_not():
    chance = random.Random(0)
    for _ in range(300):
        names = [f"node{chance.randrange(2)} GPU-{chance.randrange(6)}" for _ in range(chance.randint(1, 7))]
        names = [name if chance.random() < 0.9 else "" for name in names]
        told = [name for name in names if name]
        if len(set(told)) == len(told):
            run_hardware.require_distinct_gpus(names)
        else:
            with pytest.raises(HardwareError, match="have the same GPU"):
                run_hardware.require_distinct_gpus(names)


@pytest.mark.build
@pytest.mark.parametrize("world", [2, 3, 7])
def test_rank_0_hears_of_every_rank_in_their_order(monkeypatch, world):
    import torch.distributed as dist

    from sft_play.training import distributed

    store = dist.HashStore()
    monkeypatch.setattr(distributed, "open_store", lambda name: dist.PrefixStore(name, store))
    told = [threading.Thread(target=distributed.publish_gpu, args=(f"host GPU-{rank}", rank)) for rank in range(world)]
    for one in reversed(told):
        one.start()
    assert distributed.gather_gpus(world) == [f"host GPU-{rank}" for rank in range(world)]
    for one in told:
        one.join()


@pytest.mark.build
def test_the_random_state_of_this_ranks_gpu_alone_is_kept(monkeypatch):
    """`fork_rng()` without devices keeps those of all GPUs of the node, and warns of it on every rank."""
    import torch

    from sft_play.training.distributed import rng_devices

    assert rng_devices() is None
    kept: list[int] = []
    fake = SimpleNamespace(
        device_count=lambda: 8, get_rng_state=lambda at: kept.append(at) or 0, set_rng_state=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda *_: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.random.fork_rng(rng_devices()):
            pass
    assert kept == [3]
