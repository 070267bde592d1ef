"""What the program tells OpenMP before torch is loaded: threads that wait do not take cores from those that work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sft_play.environment import HOW_THREADS_WAIT, for_another_run, waiting_threads
from tests.conftest import ROOT


def openmp_says(*words: str, **given: str) -> str:
    """What GNU's OpenMP says of itself (OMP_DISPLAY_ENV) when torch is loaded behind a command of ours."""
    code = f"from sft_play.cli import main; main({list(words)!r}); import torch"
    kept = {name: value for name, value in os.environ.items() if name not in (*HOW_THREADS_WAIT, "KMP_BLOCKTIME")}
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **given},
    )  # fmt: skip
    if "libgomp" not in answer.stderr and "GOMP_SPINCOUNT" not in answer.stderr:
        pytest.skip("torch is linked with another OpenMP than GNU's")
    return answer.stderr


def test_the_openmp_that_torch_loads_sleeps_while_it_waits():
    said = openmp_says("no-such-command")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said
    assert "GOMP_SPINCOUNT = '1000'" in said


def test_what_the_user_exported_about_waiting_stands():
    said = openmp_says("no-such-command", OMP_WAIT_POLICY="ACTIVE")
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in said
    assert "GOMP_SPINCOUNT = '1000'" not in said


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_any_word_of_the_user_about_waiting_leaves_all_to_the_user(name):
    assert waiting_threads({name: ""}) == {}
    assert waiting_threads({"OMP_NUM_THREADS": "4"}) == HOW_THREADS_WAIT


def test_no_command_loads_torch_before_it_has_said_how_threads_wait():
    code = "import sys, sft_play.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_the_users_number_of_threads_reaches_other_runs_and_a_launchers_does_not():
    assert for_another_run({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in for_another_run({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"})
