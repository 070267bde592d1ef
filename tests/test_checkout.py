"""Developers' commands: their tools stand in benchmarks/, which a checkout has and an installed package has not."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from sft_play.commands import developing
from sft_play.errors import ConfigError
from tests.conftest import ROOT, clean_environment

COMMANDS = {"gpu-selftest": [], "mask-score": ["--templates", ".", "--tokenizer", "."]}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package alone, as an installation has it."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "sft_play", place / "sft_play", ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.mark.parametrize("command", ["mask-score", "gpu-selftest"])
def test_without_a_checkout_a_developers_command_says_so_in_one_line(installed, tmp_path, command):
    answer = subprocess.run(
        [sys.executable, "-m", "sft_play", command, *COMMANDS[command]],
        cwd=tmp_path, env=clean_environment(PYTHONPATH=str(installed)), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 2, answer.stderr
    (line,) = answer.stderr.strip().splitlines()
    assert line == (
        f"[{command}] error: {command} is a developer's command of a checkout, and {installed / 'sft_play'} is "
        f"installed without one: run make {command} in a clone of the repository"
    )


def test_the_tool_of_this_checkout_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".", str(ROOT))])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(developing.benchmark_module("mask_score.score", command="mask-score").score)
    assert sys.path[0] == str(ROOT)
    with pytest.raises(ConfigError, match="make nothing in a clone"):
        developing.benchmark_module("nothing", command="nothing")
