"""What the program tells OpenMP before torch is loaded: threads that wait do not take cores from those that work."""

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


def test_the_openmp_that_torch_loads_sleeps_while_it_waits_on_a_busy_machine(monkeypatch):
    """By what GNU's OpenMP says of itself (OMP_DISPLAY_ENV) when torch is loaded behind a command of ours."""
    code = (
        "import psutil; psutil.cpu_percent = lambda *_: 200 / psutil.cpu_count(); "
        "from sft_play.cli import main; main(['no-such-command']); import torch"
    )
    for name in ABOUT_WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "GOMP_SPINCOUNT" not in answer.stderr:
        pytest.skip("torch is linked with another OpenMP than GNU's")
    assert "GOMP_SPINCOUNT = '0'" in answer.stderr


def test_one_busy_core_of_many_is_a_busy_machine_and_any_word_of_the_user_about_waiting_counts():
    """Torch has a thread a core: each piece of work waits for the one thread that shares its core."""
    assert openmp_wait_variables({"OMP_NUM_THREADS": "4"}, measure_busy_cores=lambda: 1.0) == NO_SPIN
    assert openmp_wait_variables({}, measure_busy_cores=lambda: 0.2) == SHORT_SPIN
    for name in ABOUT_WAITING:
        assert openmp_wait_variables({name: ""}, measure_busy_cores=lambda: 2.0) == {}


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


GROWS = {"PYTORCH_ALLOC_CONF": EXPANDABLE_SEGMENTS}
USERS = ("", "expandable_segments:False", "max_split_size_mb:128")


@pytest.mark.parametrize(
    ("system", "devices", "given", "added"),
    [
        ("linux", ("nvidia0",), {}, GROWS),
        ("linux", ("nvidiactl",), {}, GROWS),
        *(("linux", devices, {}, {}) for devices in [(), ("dxg",), ("dxg", "nvidiactl"), ("kfd",)]),  # WSL, AMD
        *((system, ("nvidia0",), {}, {}) for system in ("win32", "darwin")),
        *(
            ("linux", ("nvidia0",), {name: value}, {})
            for name in (ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES)
            for value in USERS
        ),
    ],
)
def test_segments_grow_on_linux_with_a_card_of_nvidia_unless_the_user_says_something(
    tmp_path, monkeypatch, system, devices, given, added
):
    monkeypatch.setattr(sys, "platform", system)
    assert allocator_variables(given, root=machine(tmp_path, *devices)) == added


def test_the_allocators_setting_is_said_and_what_no_simulation_covers():
    assert "segments of fixed size" in format_allocator_setting({})
    assert format_allocator_setting(GROWS).endswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    others = {ALLOCATOR_VARIABLE: "max_split_size_mb:64,backend:native", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE_SEGMENTS}
    said = format_allocator_setting(others)
    assert said.startswith("Allocator: PYTORCH_ALLOC_CONF=max")  # which torch reads first
    assert "covers expandable_segments alone" in said


def test_a_command_sets_it_before_torch_is_loaded(tmp_path, monkeypatch):
    """On a machine with a card: the test's own has none, so its /dev is another."""
    root = machine(tmp_path, "nvidia0")
    code = (
        "import functools, os, sys, pathlib, sft_play.cli as cli; "
        f"cli.allocator_variables = functools.partial(cli.allocator_variables, root=pathlib.Path({str(root)!r})); "
        "cli.main(['no-such-command']); print('torch' in sys.modules, os.environ.get('PYTORCH_ALLOC_CONF'))"
    )
    for name in (ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.stdout.split() == ["False", EXPANDABLE_SEGMENTS if sys.platform == "linux" else "None"]
