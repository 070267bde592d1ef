"""GPUs of several kinds in one machine: what is refused names what trains together, and following it works."""

from __future__ import annotations

import os
import random
import re

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import HardwareError
from sft_play.launch import run_hardware
from sft_play.launch.request import parse_launch_options
from sft_play.launch.torchrun import RankInfo
from sft_play.machine import visible_gpus
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan

GIB = 2**30
KINDS = {"NVIDIA A100 80GB PCIe": 80, "NVIDIA GeForce RTX 4090": 24, "NVIDIA L4": 23, "NVIDIA GeForce RTX 3060": 12}


def machine(*names: str) -> Hardware:
    gpus = tuple(Gpu(n, name, KINDS[name] * GIB, KINDS[name] * GIB, (8, 9)) for n, name in enumerate(names))
    return Hardware(gpus, "CPU", 8, 64 * GIB, 64 * GIB)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")


def machine_here(values: dict[str, str]) -> Hardware:
    return parse_launch_options(values).select_hardware(run_hardware.detect_hardware())


def test_the_remedy_names_alike_gpus_the_largest_group_first_and_works(monkeypatch):
    draw = random.Random(3)
    kinds = set()
    for _ in range(200):
        names = [draw.choice(list(KINDS)) for _ in range(draw.randint(1, 8))]
        whole = machine(*names)
        monkeypatch.setattr(run_hardware, "detect_hardware", lambda whole=whole: whole)
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
    monkeypatch.setattr(
        run_hardware, "detect_hardware", lambda: machine("NVIDIA L4", "NVIDIA L4", "NVIDIA A100 80GB PCIe")
    )
    machine_here({"NPROC": "2"})
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_rank_with_another_gpu_than_the_plans_is_refused(monkeypatch):
    a100, other = "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 4090"
    config = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}\n", name="run.yaml")
    plan = make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), machine(a100, a100)))
    rank = RankInfo(1, 1, 2, 2)
    monkeypatch.setattr(run_hardware, "detect_hardware", lambda: machine(a100, other, a100))
    with pytest.raises(HardwareError, match=f"rank 1 has a {other}, and the plan is for {a100}: use GPUs of one kind"):
        run_hardware.check_rank_gpu(plan, rank)
    monkeypatch.setattr(run_hardware, "detect_hardware", lambda: machine(other, a100))
    run_hardware.check_rank_gpu(plan, rank)


def test_a_plan_of_a_mixed_machine_says_that_it_goes_by_the_smallest(monkeypatch):
    names = ["NVIDIA GeForce RTX 3060", "NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe"]
    found = tuple(visible_gpus.ListedGpu(f"GPU-{n}", gpu) for n, gpu in enumerate(machine(*names).gpus))
    monkeypatch.setattr(visible_gpus, "_list_gpus", lambda: found)
    hardware = detect_hardware({})
    assert any("goes by the smallest memory" in note and "GPUS=1,2 (2 x" in note for note in hardware.notes)
    text = "model: {name: Qwen/Qwen2.5-0.5B}\ntrain: {effective_batch_size: 30}\n"
    config = config_from_text(text, name="run.yaml")
    assert make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), hardware)).budget_bytes == 12 * GIB
    monkeypatch.setattr(visible_gpus, "_list_gpus", lambda: found[1:])
    assert detect_hardware({}).notes == ()
