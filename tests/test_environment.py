"""What the program tells OpenMP before torch is loaded: threads that wait do not take cores from those that work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.process.environment import (
    ALLOCATOR_VARIABLE,
    EXPANDABLE_SEGMENTS,
    NO_SPIN,
    OLDER_ALLOCATOR_VARIABLES,
    SHORT_SPIN,
    allocator_variables,
    format_allocator_setting,
    independent_environment,
    openmp_wait_variables,
)
from tests.conftest import ROOT

ABOUT_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def openmp_says(busy_cores: float, **given: str) -> str:
    """What GNU's OpenMP says of itself (OMP_DISPLAY_ENV) when torch is loaded behind a command of ours."""
    code = (
        f"import psutil; psutil.cpu_percent = lambda *_: 100 * {busy_cores} / psutil.cpu_count(); "
        "from sft_play.cli import main; main(['no-such-command']); import torch"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ABOUT_WAITING}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **given},
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in answer.stderr:
        pytest.skip("torch is linked with another OpenMP than GNU's")
    return answer.stderr


def test_the_openmp_that_torch_loads_sleeps_while_it_waits_on_a_busy_machine():
    assert "GOMP_SPINCOUNT = '0'" in openmp_says(2.0)


@pytest.mark.parametrize("name", ABOUT_WAITING)
def test_any_word_of_the_user_about_waiting_leaves_all_to_the_user(name):
    assert openmp_wait_variables({name: ""}, measure_busy_cores=lambda: 2.0) == {}


def test_one_busy_core_of_many_is_a_busy_machine():
    """Torch has a thread a core: each piece of work waits for the one thread that shares its core."""
    assert openmp_wait_variables({"OMP_NUM_THREADS": "4"}, measure_busy_cores=lambda: 1.0) == NO_SPIN
    assert openmp_wait_variables({}, measure_busy_cores=lambda: 0.2) == SHORT_SPIN


def test_no_command_loads_torch_before_it_has_said_how_threads_wait():
    code = "import sys, sft_play.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_the_users_number_of_threads_reaches_other_runs_and_a_launchers_does_not():
    assert independent_environment({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in independent_environment({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"})


# --- the allocator ----------------------------------------------------------------------------------------------------
def machine(folder: Path, *devices: str) -> Path:
    """A machine's files with these in /dev."""
    (folder / "dev").mkdir()
    for name in devices:
        (folder / "dev" / name).touch()
    return folder


@pytest.mark.parametrize("device", ["nvidia0", "nvidiactl"])
def test_segments_grow_on_linux_with_a_card_of_nvidia(tmp_path, monkeypatch, device):
    monkeypatch.setattr(sys, "platform", "linux")
    assert allocator_variables({}, root=machine(tmp_path, device)) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("devices", [(), ("dxg",), ("dxg", "nvidiactl"), ("kfd",)])
def test_without_one_under_wsl_and_on_amd_nothing_is_set(tmp_path, monkeypatch, devices):
    monkeypatch.setattr(sys, "platform", "linux")
    assert allocator_variables({}, root=machine(tmp_path, *devices)) == {}


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems_have_no_such_segments(tmp_path, monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    assert allocator_variables({}, root=machine(tmp_path, "nvidia0")) == {}


@pytest.mark.parametrize("name", [ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES])
@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:128"])
def test_what_the_user_said_of_the_allocator_stands(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(sys, "platform", "linux")
    assert allocator_variables({name: value}, root=machine(tmp_path, "nvidia0")) == {}


def test_the_allocators_setting_is_said_and_what_no_simulation_covers():
    assert format_allocator_setting({}) == "Allocator: PyTorch's default, segments of fixed size"
    assert (
        format_allocator_setting({ALLOCATOR_VARIABLE: EXPANDABLE_SEGMENTS})
        == "Allocator: PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    others = {ALLOCATOR_VARIABLE: "max_split_size_mb:64,backend:native", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE_SEGMENTS}
    said = format_allocator_setting(others)
    assert said.startswith("Allocator: PYTORCH_ALLOC_CONF=max")  # which torch reads first
    assert said.endswith("the plan's bound covers expandable_segments alone")


def test_a_command_sets_it_before_torch_is_loaded(tmp_path):
    """On a machine with a card: the test's own has none, so its /dev is another."""
    root = machine(tmp_path, "nvidia0")
    code = (
        "import functools, os, sys, pathlib, sft_play.cli as cli; "
        f"cli.allocator_variables = functools.partial(cli.allocator_variables, root=pathlib.Path({str(root)!r})); "
        "cli.main(['no-such-command']); print('torch' in sys.modules, os.environ.get('PYTORCH_ALLOC_CONF'))"
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES)
    }
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, env=kept
    )
    assert answer.stdout.split() == ["False", EXPANDABLE_SEGMENTS if sys.platform == "linux" else "None"]
