"""WSL: Windows' driver pages GPU memory out instead of running out of it, beside a desktop; made-up kernels, GPUs."""

import dataclasses
import json
import logging
import sys
from typing import Any

import pytest
from pydantic import TypeAdapter

from sft_play.config.load import config_from_text
from sft_play.errors import DoesNotFit
from sft_play.machine import host
from sft_play.machine.hardware import Hardware, detect_hardware, parse_hardware
from sft_play.machine.host import is_wsl
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import DESKTOP_BYTES
from sft_play.planner.plan import plan_from_json
from sft_play.runs.folder import RunFolder
from sft_play.text import GIB
from sft_play.training.loop.trainer import training_arguments
from sft_play.training.prepare import device_checks
from tests.fake_nvml import FakeGpu, FakeNvml

pytestmark = pytest.mark.build
MODEL = "meta-llama/Llama-3.1-8B"
WSL = "6.6.87.2-microsoft-standard-WSL2\n"


def plan_on(machine: Hardware, *words: str) -> Any:
    config = config_from_text(f"model: {{name: {MODEL}}}", name="x", overrides=["tuning.mode=qlora", *words])
    return config, make_plan(PlanRequest(config, load_model_shape(MODEL), machine))


def paging(text: str) -> Hardware:
    return dataclasses.replace(parse_hardware(text), pages=True)


@pytest.mark.parametrize(
    ("release", "found"), [(WSL, True), ("4.4.0-19041-Microsoft\n", True), ("6.8.0-45-generic\n", False)]
)
def test_wsl_is_known_by_its_kernel(tmp_path, release, found):
    path = tmp_path / "osrelease"
    path.write_text(release)
    assert is_wsl(path) == found
    assert not is_wsl(tmp_path / "absent")


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_machine_under_wsl_says_that_a_desktop_shares_its_gpu(tmp_path, monkeypatch, gpus):
    (tmp_path / "osrelease").write_text(WSL)
    monkeypatch.setattr(host, "OSRELEASE", tmp_path / "osrelease")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*[FakeGpu()] * gpus))
    found = detect_hardware({})
    assert found.pages == bool(gpus)
    assert any("Windows' desktop shares the GPU" in note for note in found.notes) == bool(gpus)
    assert TypeAdapter(Hardware).validate_json(json.dumps(found.as_json())) == found


def test_a_plan_under_wsl_leaves_a_gib_more_and_says_for_what():
    _, plain = plan_on(parse_hardware("RTX4090"), "train.batch_size=1")
    _, shared = plan_on(paging("RTX4090"), "train.batch_size=1")
    for name in ("margin", "required", "required_to_load"):
        assert getattr(shared.memory, name) - getattr(plain.memory, name) == DESKTOP_BYTES == GIB
    assert shared.memory.allocated == plain.memory.allocated
    assert "1.0 GiB of it for the desktop beside WSL" in shared.memory.margin_reason
    assert plan_from_json(json.loads(json.dumps(shared.as_json()))) == shared
    for machine, is_said in ((paging("RTX4090"), True), (parse_hardware("RTX4090"), False)):
        _, offloaded = plan_on(machine, "train.gradient_checkpointing=offload")
        assert any("WSL has been seen to give only" in reason for reason in offloaded.reasons) == is_said
    on_cpu = dataclasses.replace(parse_hardware("cpu"), pages=True)
    assert not plan_on(on_cpu, "tuning.mode=lora")[1].choice.step.pages


@pytest.fixture
def card(monkeypatch):
    """A function that puts a GPU with so much free memory in place of torch's; the fractions that are set."""
    made, fractions = device_checks.torch.ones(1), []
    monkeypatch.setattr(device_checks.torch, "zeros", lambda *_, **__: made)
    cuda = device_checks.torch.cuda
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", fractions.append)

    def install(free: float) -> list[float]:
        monkeypatch.setattr(cuda, "mem_get_info", lambda: (int(free * GIB), TOTAL))
        return fractions

    return install


TOTAL = int(23.99 * GIB)


@pytest.mark.parametrize("free", [23.0, 20.0, 30.0])
def test_paging_becomes_an_out_of_memory_error_below_what_the_desktop_is_left(card, caplog, free):
    config, plan = plan_on(paging("RTX4090"), "train.batch_size=1")
    fractions = card(free)
    with caplog.at_level(logging.DEBUG):
        device_checks.check_gpu(plan, config)
    (fraction,) = fractions
    limit = fraction * TOTAL
    assert limit == pytest.approx(min(int(free * GIB), plan.budget_bytes) - DESKTOP_BYTES, abs=2)
    planned = plan.memory.reserved + plan.memory.margin
    assert free < 23 or limit >= planned - DESKTOP_BYTES  # what is planned may be taken, where it is there at all
    assert f"WSL: this process may use {limit / GIB:.1f} GiB of the GPU" in caplog.text


def test_elsewhere_nothing_is_limited_and_too_little_is_refused_under_wsl_too(card):
    config, plan = plan_on(parse_hardware("RTX4090"))
    fractions = card(23.0)
    device_checks.check_gpu(plan, config)
    assert fractions == []
    config, plan = plan_on(paging("RTX4090"))
    card(4.0)
    with pytest.raises(DoesNotFit, match=r"GiB are planned, but only 4\.0 are free"):
        device_checks.check_gpu(plan, config)


def test_memory_is_page_locked_but_under_wsl(tmp_path):
    for machine, pinned in ((parse_hardware("RTX4090"), True), (paging("RTX4090"), False)):
        config, plan = plan_on(machine)
        made = training_arguments(config, plan, RunFolder(tmp_path), has_eval=False, arguments_class=dict)
        assert made["dataloader_pin_memory"] is pinned
