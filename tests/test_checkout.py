"""Developers' commands: their tools stand in benchmarks/, which a checkout has and an installed package has not."""

import sys

import pytest

from sft_play.commands import developing
from sft_play.errors import ConfigError
from tests.conftest import ROOT


def test_the_tool_of_this_checkout_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".", str(ROOT))])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(developing.benchmark_module("mask_score.score", command="mask-score").score)
    assert sys.path[0] == str(ROOT)
    with pytest.raises(ConfigError, match="make nothing in a clone"):
        developing.benchmark_module("nothing", command="nothing")
