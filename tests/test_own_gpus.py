"""Which GPUs ranks take: one each where their launcher shows no more, never the same, and of one kind in a machine."""

from __future__ import annotations

import os
import random
import re
import threading
import warnings
from types import SimpleNamespace

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError, HardwareError
from sft_play.launch import request, run_hardware
from sft_play.launch.request import parse_launch_options
from sft_play.launch.torchrun import RankInfo, read_rank_info, refuse_repeated_starts
from sft_play.machine import visible_gpus
from sft_play.machine.gpu import Gpu, GpuSnapshot, GpuStatus
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.text import GIB

H100 = "NVIDIA H100 80GB HBM3"
A100, OTHER, SMALL = "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"
KINDS = {A100: 80, OTHER: 24, "NVIDIA L4": 23, SMALL: 12}
QWEN = "Qwen/Qwen2.5-0.5B"


def node(*indices: int) -> Hardware:
    gpus = tuple(Gpu(index, H100, 80 * GIB, 79 * GIB, (9, 0)) for index in indices)
    return Hardware(gpus, "CPU", 64, 512 * GIB, 512 * GIB)


def machine(*names: str) -> Hardware:
    gpus = tuple(Gpu(n, name, KINDS[name] * GIB, KINDS[name] * GIB, (8, 9)) for n, name in enumerate(names))
    return Hardware(gpus, "CPU", 8, 64 * GIB, 64 * GIB)


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


def machine_here(values: dict[str, str]) -> Hardware:
    return parse_launch_options(values).select_hardware(run_hardware.detect_hardware())


def test_the_remedy_names_alike_gpus_the_largest_group_first_and_works(monkeypatch):
    monkeypatch.setattr(os, "environ", {})  # a machine of several kinds sets the order of GPUs for its ranks
    draw, kinds = random.Random(3), set()
    for _ in range(200):
        names = [draw.choice(list(KINDS)) for _ in range(draw.randint(1, 8))]
        monkeypatch.setattr(run_hardware, "detect_hardware", lambda names=names: machine(*names))
        asked = {}
        if draw.random() < 0.5:
            asked["NPROC"] = str(draw.randint(1, len(names)))
        if draw.random() < 0.4:
            some = draw.sample(range(len(names)), draw.randint(int(asked.get("NPROC", 1)), len(names)))
            asked["GPUS"] = ",".join(map(str, some))
        numbers = [int(n) for n in asked["GPUS"].split(",")] if "GPUS" in asked else list(range(len(names)))
        used = {names[n] for n in numbers[: int(asked.get("NPROC", len(names)))]}
        if len(used) == 1:
            assert {gpu.name for gpu in machine_here(asked).gpus} == used
            kinds.add("one kind")
            continue
        with pytest.raises(HardwareError, match="the GPUs differ") as refused:
            machine_here(asked)
        groups = str(refused.value).partition("are alike: ")[2].split(" or ")
        sizes = []
        for group in groups:
            found = re.fullmatch(r"(?:NPROC=(\d+) )?GPUS=([\d,]+) \((\d+) x (.+)\)", group)
            assert found, group
            processes, gpus, count, name = found.groups()
            given = {**asked, "GPUS": gpus, **({"NPROC": processes} if processes else {})}
            made = machine_here(given)
            assert [gpu.name for gpu in made.gpus] == [name] * int(count)
            assert {names[int(n)] for n in gpus.split(",")} == {name}
            sizes.append((names.count(name), KINDS[name]))
        assert sizes == sorted(sizes, reverse=True)
        assert len(groups) == len(set(names))
        kinds.add("refused")
    assert kinds == {"one kind", "refused"}


def test_ranks_of_a_mixed_machine_number_its_gpus_as_the_plan_does(monkeypatch):
    """CUDA's own order puts the fastest first: two ranks would take the A100 and an L4."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(run_hardware, "detect_hardware", lambda: machine("NVIDIA L4", "NVIDIA L4", A100))
    machine_here({"NPROC": "2"})
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_rank_with_another_gpu_than_the_plans_is_refused(monkeypatch):
    config = config_from_text(f"model: {{name: {QWEN}}}\n", name="run.yaml")
    plan = make_plan(PlanRequest(config, load_model_shape(QWEN), machine(A100, A100)))
    rank = RankInfo(1, 1, 2, 2)
    monkeypatch.setattr(run_hardware, "detect_hardware", lambda: machine(A100, OTHER, A100))
    with pytest.raises(HardwareError, match=f"rank 1 has a {OTHER}, and the plan is for {A100}: use GPUs of one kind"):
        run_hardware.check_rank_gpu(plan, rank)
    monkeypatch.setattr(run_hardware, "detect_hardware", lambda: machine(OTHER, A100))
    run_hardware.check_rank_gpu(plan, rank)


def test_a_plan_of_a_mixed_machine_says_that_it_goes_by_the_smallest(monkeypatch):
    found = tuple(visible_gpus.ListedGpu(f"GPU-{n}", gpu) for n, gpu in enumerate(machine(SMALL, A100, A100).gpus))
    monkeypatch.setattr(visible_gpus, "_list_gpus", lambda: found)
    hardware = detect_hardware({})
    assert any("goes by the smallest memory" in note and "GPUS=1,2 (2 x" in note for note in hardware.notes)
    config = config_from_text(f"model: {{name: {QWEN}}}\ntrain: {{effective_batch_size: 30}}\n", name="run.yaml")
    assert make_plan(PlanRequest(config, load_model_shape(QWEN), hardware)).budget_bytes == 12 * GIB
    monkeypatch.setattr(visible_gpus, "_list_gpus", lambda: found[1:])
    assert detect_hardware({}).notes == ()
