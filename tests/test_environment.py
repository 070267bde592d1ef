"""What the program tells OpenMP before torch is loaded: threads that wait do not take cores from those that work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sft_play.environment import SLEEPING, SPINNING, for_another_run, waiting_threads
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


def test_it_spins_for_a_bounded_time_on_a_quiet_machine():
    assert "GOMP_SPINCOUNT = '10000'" in openmp_says(0.1)


def test_what_the_user_exported_about_waiting_stands():
    assert "GOMP_SPINCOUNT = '77'" in openmp_says(2.0, GOMP_SPINCOUNT="77")


@pytest.mark.parametrize("name", ABOUT_WAITING)
def test_any_word_of_the_user_about_waiting_leaves_all_to_the_user(name):
    assert waiting_threads({name: ""}, measured=lambda: 2.0) == {}


def test_one_busy_core_of_many_is_a_busy_machine():
    """Torch has a thread a core: each piece of work waits for the one thread that shares its core."""
    assert waiting_threads({"OMP_NUM_THREADS": "4"}, measured=lambda: 1.0) == SLEEPING
    assert waiting_threads({}, measured=lambda: 0.2) == SPINNING


def test_no_command_loads_torch_before_it_has_said_how_threads_wait():
    code = "import sys, sft_play.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_the_users_number_of_threads_reaches_other_runs_and_a_launchers_does_not():
    assert for_another_run({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in for_another_run({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"})
