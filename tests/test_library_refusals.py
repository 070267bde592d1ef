"""What libraries refuse by GPUs and driver: their own checks, on pretended machines, for one rank and for two."""

import contextlib
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sft_play.config.schema import RunConfig
from sft_play.diagnose.doctor import SystemFacts, check_run_starts, find_known_bad
from sft_play.errors import HardwareError
from sft_play.launch import planning
from sft_play.launch import run_hardware as launched
from sft_play.machine import compiler
from sft_play.machine.gpu import Gpu, GpuSnapshot, GpuStatus
from sft_play.machine.hardware import Hardware
from sft_play.text import GIB
from sft_play.training.prepare import device_checks

ADA, AMPERE, PASCAL = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090", "Tesla P100-PCIE-16GB"
OLD, NEW = "535.183.01", "550.40.07"


def gpus(*names: str, capability: tuple[int, int] = (8, 9)) -> Hardware:
    found = tuple(Gpu(index, name, 24 * GIB, 24 * GIB, capability) for index, name in enumerate(names))
    return Hardware(found, "CPU", 8, 64 * GIB, 64 * GIB)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A function that makes accelerate's state as on a GPU, as its constructor does with a device that is given."""
    from accelerate.state import PartialState

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    before = dict(PartialState._shared_state)

    def make() -> None:
        PartialState._shared_state.clear()
        PartialState()

    yield make
    PartialState._shared_state.clear()
    PartialState._shared_state.update(before)


@pytest.mark.build
@pytest.mark.parametrize("visible", [1, 2])
@pytest.mark.parametrize("names", [[ADA, ADA], [AMPERE, ADA], [AMPERE, AMPERE], [ADA]])
@pytest.mark.parametrize("driver", [OLD, NEW, "550.40.06", "570.1"])
def test_accelerate_starts_on_every_pair_of_cards(monkeypatch, tmp_path, on_a_gpu, names, driver, visible):
    """The cards are there for NVML, and for nvidia-smi, which accelerate asks."""
    from accelerate.utils.environment import check_cuda_p2p_ib_support

    for name in launched.P2P_OFF_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    seen = GpuSnapshot(tuple(GpuStatus(index, name, "NVIDIA") for index, name in enumerate(names)), "NVML", driver)
    monkeypatch.setattr(launched.nvml, "gpu_snapshot", lambda **_: seen)
    rows = {"--query-gpu=count,name": "".join(f"{len(names)}, {name}\n" for name in names)}
    rows["--query-gpu=driver_version"] = f"{driver}\n" * len(names)
    cases = "\n".join(f'"{words}") printf "{text}" ;;' for words, text in rows.items())
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hardware = gpus(*names[:visible])
    assert launched.has_broken_p2p(names, driver) is not check_cuda_p2p_ib_support()
    if not check_cuda_p2p_ib_support():  # without the variables it is the traceback
        with pytest.raises(NotImplementedError, match="P2P or IB"):
            on_a_gpu()
    given = os.environ.copy()
    try:
        launched.disable_broken_p2p(hardware, os.environ)
        on_a_gpu()
        assert (set(launched.P2P_OFF_VARIABLES) <= os.environ.keys()) is launched.has_broken_p2p(names, driver)
    finally:
        os.environ.clear()
        os.environ.update(given)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_doctor_says_what_a_run_does(ranks):
    around = SystemFacts(hardware=gpus(ADA, ADA), driver=OLD)
    assert [item.verdict for item in find_known_bad(around, rank_count=ranks)] == (["WARN"] if ranks > 1 else ["PASS"])


@pytest.mark.build
@pytest.mark.parametrize(("major", "starts"), [(5, False), (6, True), (7, True), (9, True)])
def test_deepspeed_takes_fp16_on_pascal(monkeypatch, major, starts):
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.delenv("DS_ALLOW_DEPRECATED_FP16", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    given: dict[str, str] = {}
    launched.allow_fp16(gpus(PASCAL, capability=(major, 0)), given)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert CUDA_Accelerator.is_fp16_supported(object()) is starts  # type: ignore[arg-type]
    assert (given != {}) is (major == 6)


def run_with(**sections: dict[str, object]) -> RunConfig:
    model = {"name": "x", **sections.pop("model", {})}
    return RunConfig.model_validate({"model": model, "data": {"train_path": "y.jsonl"}, **sections})


@pytest.mark.parametrize(("machine", "refused"), [
    (gpus("Tesla T4", capability=(7, 5)), "flash_attention_2 needs GPUs from Ampere on"),
    (gpus(*["Tesla T4"] * 2, capability=(7, 5)), "Tesla T4 has 7.5; use auto"),
    (gpus(*["H100"] * 2, capability=(9, 0)), None),
    (dataclasses.replace(gpus(), cpu_ranks=2), "this run uses the CPU; use auto"),
])  # fmt: skip
def test_flash_attention_without_kernels_is_refused_before_anything_loads(monkeypatch, machine, refused):
    monkeypatch.setattr(planning, "require_compiler", lambda *_: None)
    config = run_with(model={"attn_implementation": "flash_attention_2"})
    with pytest.raises(HardwareError, match=refused) if refused else contextlib.nullcontext():
        planning.require_usable_hardware(config, machine, {}, count_params=lambda: 0)
    assert check_run_starts(config, machine, {}, params=0).verdict == ("FAIL" if refused else "PASS")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("capability", "refused"), [((6, 1), True), ((7, 0), False), ((9, 0), False)])
def test_compiled_blocks_need_volta(monkeypatch, ranks, capability, refused):
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: compiler.Toolchain(True, "gcc", Path("/include")))
    said = compiler.inductor_obstacle(gpus(*["GPU"] * ranks, capability=capability), {})
    assert (said is not None) is refused
    assert not refused or "GPU has 6.1" in said[0]  # type: ignore[index]


@pytest.fixture
def started(monkeypatch):
    """A function that begins a run on a pretended GPU, whose first kernel and whose bitsandbytes are given."""
    from bitsandbytes import cextension

    def start(mode: str, *, kernel: Exception | None = None, library: object = None) -> None:
        def zeros(*_: object, **__: object) -> torch.Tensor:
            if kernel is not None:
                raise kernel
            return made

        made = torch.ones(1)
        monkeypatch.setattr(device_checks.torch, "zeros", zeros)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GIB, 80 * GIB))
        monkeypatch.setattr(cextension, "lib", library)
        config = run_with(tuning={"mode": mode})
        memory = SimpleNamespace(reserved=GIB, margin=0)
        plan = SimpleNamespace(hardware=gpus(PASCAL, capability=(6, 0)), memory=memory, budget_bytes=80 * GIB)
        device_checks.check_gpu(plan, config)  # type: ignore[arg-type]

    return start


@pytest.mark.build
@pytest.mark.parametrize("mode", ["qlora", "lora"])
def test_a_torch_without_kernels_for_the_gpu_is_refused_before_the_weights(started, mode):
    started(mode)
    said = "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaErrorNoKernel"
    with pytest.raises(HardwareError, match=f"cannot compute on {PASCAL}: CUDA error: no kernel image"):
        started(mode, kernel=torch.AcceleratorError(said))
    started(mode, kernel=torch.OutOfMemoryError("CUDA out of memory"))  # its memory is compared instead


@pytest.mark.build
def test_a_bitsandbytes_without_its_library_is_refused_where_the_run_needs_it(started):
    from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary

    lost = ErrorHandlerMockBNBNativeLibrary("libbitsandbytes_cuda130.so: cannot open shared object file")
    started("lora", library=lost)
    with pytest.raises(HardwareError, match="bitsandbytes has no library that works with torch for CUDA"):
        started("qlora", library=lost)
