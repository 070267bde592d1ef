"""Machines that tell little: a driver that withholds answers, where every call of NVML is refused in turn and the rest
describes the machine; and WSL, where Windows' driver pages GPU memory out instead of running out of it, beside a
desktop. Kernels and GPUs are made up."""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest
from pydantic import TypeAdapter

from sft_play.config.load import config_from_text
from sft_play.diagnose import machine_pages
from sft_play.diagnose.doctor import read_system_facts
from sft_play.errors import DoesNotFit
from sft_play.machine import host, visible_gpus
from sft_play.machine.hardware import Hardware, detect_hardware, parse_hardware
from sft_play.machine.host import is_wsl
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import DESKTOP_BYTES
from sft_play.planner.plan import plan_from_json
from sft_play.runs.folder import RunFolder
from sft_play.text import GIB, MIB
from sft_play.training.loop.trainer import training_arguments
from sft_play.training.prepare import device_checks
from tests.fake_nvml import A100, CALLS, FakeGpu, FakeNvml

INSTANCES = [("MIG-one", "3g.40gb", 40_192), ("MIG-two", "1g.10gb", 9_728)]
REFUSALS: dict[str, Any] = {
    "no permission": pynvml.NVMLError_NoPermission, "not supported": pynvml.NVMLError_NotSupported,
    "unknown": pynvml.NVMLError_Unknown, "uninitialized": pynvml.NVMLError_Uninitialized,
    "a function that the library lacks": AttributeError, "no answer": None,
}  # fmt: skip
WITHHELD = [
    pytest.param(call, how, marks=[] if (one + other) % 6 == 0 else [pytest.mark.slow])
    for one, call in enumerate(CALLS)
    for other, how in enumerate(REFUSALS)
]
"""Each call, refused in one way; in the other five too by `-m slow`."""


def two_gpus(*, split: bool = False, parent: bool = True) -> list[FakeGpu]:
    """Two A100s; of split ones a container sees two instances, both of the first, and not at the first place."""
    processes: list[tuple[int, int | None]] = [(2**22 + 1, 300 * MIB)]
    gpus = [FakeGpu(f"GPU-{n}", links=12, bridged=9, first_place=2, processes=processes) for n in range(2)]
    for gpu, instances in zip(gpus, (INSTANCES, []), strict=True):
        gpu.instances, gpu.is_memory_refused = (instances if split else None), not parent
    return gpus


def printed_pages() -> str:
    """What the commands that look at a machine print of it; nothing in them may raise."""
    data, lines = machine_pages.read_machine_info(Path("outputs"), {})
    memory = machine_pages.read_memory_snapshot(Path("outputs"), {})
    json.dumps([data, dataclasses.asdict(memory)])
    read_system_facts(detect_hardware({}))
    return "\n".join([*lines, *machine_pages.format_memory_snapshot(memory)])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that puts a machine in place of this one, where nvidia-smi does not exist."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(refused: str = "", how: str = "no answer", **facts: bool) -> FakeNvml:
        fake = FakeNvml(*two_gpus(**facts), refused=refused, refusal=REFUSALS[how])
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_every_call_that_is_asked_is_one_that_is_refused(machine):
    asked = set()
    for split in (False, True):
        fake = machine(split=split)
        assert printed_pages()
        asked |= fake.asked
    assert asked == set(CALLS)


@pytest.mark.parametrize(("refused", "how"), WITHHELD)
def test_whole_gpus_are_planned_by_what_the_driver_still_tells(machine, refused, how):
    machine(refused, how)
    found, text = detect_hardware({}), printed_pages()
    if refused in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetCount") or (refused == "nvmlInit" and REFUSALS[how]):
        assert not found.gpus  # nothing can be asked
        return
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    is_untold = refused == "nvmlDeviceGetMemoryInfo"
    name = visible_gpus.UNNAMED_GPU if refused == "nvmlDeviceGetName" else A100
    free = None if is_untold else 81_420 * MIB
    for gpu in found.gpus:  # with the memory of the catalogue, where the driver does not tell it
        told = (gpu.name, gpu.total_bytes, gpu.capability, gpu.free_bytes, gpu.mig)
        assert told == (name, 80 * GIB, (8, 0), free, None)
    assert not any("MIG" in note for note in found.notes)
    assert ("planned with the catalogue's 80.0 GiB" in "".join(found.notes)) == is_untold
    assert "Number of GPUs: 2" in text
    # links: a driver that does not tell them is not one that has none
    if refused == "nvmlDeviceGetNvLinkState" and how != "not supported":
        assert found.link_bytes_per_s == 300e9
    assert [gpu.index for gpu in detect_hardware({"CUDA_VISIBLE_DEVICES": "1"}).gpus] == [1]


@pytest.mark.parametrize("parent", [True, False], ids=["parent's memory told", "parent's memory refused"])
@pytest.mark.parametrize(("refused", "how"), WITHHELD)
def test_instances_are_planned_by_what_the_driver_still_tells(machine, refused, how, parent):
    machine(refused, how, split=True, parent=parent)
    found = detect_hardware({})
    assert printed_pages()
    if refused in ("nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo") or (refused == "nvmlInit" and REFUSALS[how]):
        assert not found.gpus
        return
    if refused in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMigDeviceHandleByIndex"):
        words = visible_gpus.find_unusable_accelerator({"CUDA_VISIBLE_DEVICES": "MIG-one"})
        assert (found.gpus, "names none of them" in words) == ((), False)
        if REFUSALS[how] in (pynvml.NVMLError_NoPermission, pynvml.NVMLError_Unknown):
            assert (str(REFUSALS[how]()) in words, "has no instance" in words) == (True, False)
        return
    (gpu,) = found.gpus  # CUDA sees one
    assert gpu.mig == ("39gb" if refused == "nvmlDeviceGetName" else "3g.40gb")
    assert (gpu.total_bytes, gpu.free_bytes) == (40_192 * MIB, 40_179 * MIB)
    # what CUDA_VISIBLE_DEVICES names by number is the whole split GPU, whether or not its UUID is told
    assert detect_hardware({"CUDA_VISIBLE_DEVICES": "0"}).gpus == found.gpus
    if refused != "nvmlDeviceGetUUID":
        (second,) = detect_hardware({"CUDA_VISIBLE_DEVICES": "MIG-two"}).gpus
        assert second.mig == ("10gb" if refused == "nvmlDeviceGetName" else "1g.10gb")


def test_a_container_trains_on_the_instance_that_it_was_given(machine, tmp_path):
    """nvidia-container-toolkit#842: the memory of the GPU is refused, that of its instances is not."""
    machine(split=True, parent=False)
    found = detect_hardware({"NVIDIA_VISIBLE_DEVICES": "MIG-two", "CUDA_VISIBLE_DEVICES": "MIG-two"})
    assert (found.device, found.gpus[0].mig, found.gpus[0].name) == ("cuda", "1g.10gb", f"{A100} MIG 1g.10gb")
    assert found.notes[0].startswith("GPU 1 is in MIG mode and has no instance")
    assert found.gpus[0].bf16_flops == pytest.approx(312e12 / 7)
    assert "GPU 0: NVML does not tell its memory (Insufficient Permissions)" in printed_pages()


MODEL = "meta-llama/Llama-3.1-8B"
WSL = "6.6.87.2-microsoft-standard-WSL2\n"


def plan_on(machine: Hardware, *words: str) -> Any:
    config = config_from_text(f"model: {{name: {MODEL}}}", name="x", overrides=["tuning.mode=qlora", *words])
    return config, make_plan(PlanRequest(config, load_model_shape(MODEL), machine))


def paging(text: str) -> Hardware:
    return dataclasses.replace(parse_hardware(text), pages=True)


def test_wsl_is_known_by_its_kernel(tmp_path):
    (path := tmp_path / "osrelease").write_text(WSL)
    assert (is_wsl(path), is_wsl(tmp_path / "absent")) == (True, False)
    path.write_text("4.4.0-19041-Microsoft\n")
    assert is_wsl(path)
    path.write_text("6.8.0-45-generic\n")
    assert not is_wsl(path)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_machine_under_wsl_says_that_a_desktop_shares_its_gpu(tmp_path, monkeypatch, gpus):
    (tmp_path / "osrelease").write_text(WSL)
    monkeypatch.setattr(host, "OSRELEASE", tmp_path / "osrelease")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*[FakeGpu()] * gpus))
    found = detect_hardware({})
    assert found.pages == any("Windows' desktop shares the GPU" in note for note in found.notes) == bool(gpus)
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


TOTAL = int(23.99 * GIB)


@pytest.fixture
def card(monkeypatch):
    """A function that puts a GPU with so much free memory in place of torch's; the fractions that are set."""
    made, fractions, cuda = device_checks.torch.ones(1), [], device_checks.torch.cuda
    monkeypatch.setattr(device_checks.torch, "zeros", lambda *_, **__: made)
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", fractions.append)

    def install(free: float) -> list[float]:
        monkeypatch.setattr(cuda, "mem_get_info", lambda: (int(free * GIB), TOTAL))
        return fractions

    return install


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
