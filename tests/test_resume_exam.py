"""The resume exam itself: this toolkit passes it, and every kind of fault fails it."""

from __future__ import annotations

import copy
import random

import pytest

from tests.resume_exam import exam, kills
from tests.resume_exam.exam import EPOCHS, ROWS, STEPS_AN_EPOCH, Step, compared

pytestmark = pytest.mark.build
STATES = ("parameters", "optimizer's tensors", "optimizer's groups", "scheduler", "torch's random state")


def steps_of_a_run() -> dict[int, Step]:
    draw, found = random.Random(5), {}
    for epoch in range(EPOCHS):
        order = draw.sample(range(ROWS), ROWS)
        for step in range(STEPS_AN_EPOCH):
            number, size = epoch * STEPS_AN_EPOCH + step, ROWS // STEPS_AN_EPOCH
            rows = [str(row) for row in order[step * size : (step + 1) * size]]
            found[number] = Step({name: f"{name} {number}" for name in STATES}, ["".join(rows)], rows, [draw.random()])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_every_fault_of_a_resume_is_named(seed):
    draw = random.Random(seed)
    unbroken = steps_of_a_run()
    after = draw.randrange(1, len(unbroken))
    resumed = {number: copy.deepcopy(step) for number, step in unbroken.items() if number >= after}
    assert compared("", after, unbroken, resumed).passed
    fault = draw.choice(["state", "loss", "tiny loss", "order", "skipped", "repeated", "nothing"])
    if fault == "state":
        wanted = {draw.choice(STATES)}
        resumed[after].state["".join(wanted)] += "!"
    elif fault in ("loss", "tiny loss"):
        resumed[after].losses[0] += exam.FIRST_LOSS * (2 if fault == "loss" else 0.5)
        wanted = {"first loss"} if fault == "loss" else set()
    elif fault == "order":
        resumed[draw.randrange(after, len(unbroken))].batches = ["other"]
        wanted = {"batches"}
    elif fault == "skipped":
        del resumed[len(unbroken) - 1]
        wanted = {"batches", "rows of an epoch"} if resumed else {"no step was trained"}
    elif fault == "repeated":
        resumed[after].rows = unbroken[after - 1].rows
        wanted = {"rows of an epoch"}
    else:
        resumed, wanted = {}, {"no step was trained"}
    assert set(compared("", after, unbroken, resumed).differs) == wanted


@pytest.mark.parametrize(
    "moment",
    [name if "second epoch (" in name else pytest.param(name, marks=pytest.mark.slow) for name in exam.MOMENTS],
)
def test_this_toolkit_passes(tmp_path, monkeypatch, moment):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    (answer,) = exam.examined(exam.ours, tmp_path / "exam", {moment: exam.MOMENTS[moment]})
    assert answer.passed, answer


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(kills.LAYOUTS))
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path, monkeypatch, layout):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    for found in kills.main([layout], 2, 0, tmp_path):
        assert not found.differs, found
