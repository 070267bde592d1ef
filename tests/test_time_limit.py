"""`train.max_hours`: a run stops in time for its longest step, evaluation and checkpoint, whatever the clock says."""

import json
import os
import random
import time
from types import SimpleNamespace

import pytest

from sft_play.process import signals
from tests.conftest import chat, write_rows, write_run

pytestmark = pytest.mark.build
STEPS = 1000


class Simulated:
    """A run of steps, evaluations and checkpoints of random lengths, as the Trainer calls its callbacks."""

    def __init__(self, draw: random.Random, hours: float | None) -> None:
        from sft_play.training.loop.callbacks import StopController

        self.now = draw.uniform(0, 30)
        self.longest = {"step": 0.0, "eval": 0.0, "checkpoint": 0.0}
        self.took_s: dict[str, list[float]] = {"step": [], "eval": [], "checkpoint": []}
        self.stop = StopController(None, hours=hours, pause_seconds=self.took_s, elapsed_s=lambda: self.now)
        self.draw, self.step, self.ended_at = draw, 0, 0.0
        self.every = {"eval": draw.randint(2, 9), "checkpoint": draw.randint(2, 9)}

    def take(self, name: str) -> None:
        seconds = self.draw.uniform(1, 3) * {"step": 1, "eval": 4, "checkpoint": 2}[name]
        self.took_s[name].append(seconds)
        self.now += seconds
        self.longest[name] = max(self.longest[name], seconds)

    def run(self) -> None:
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        while self.step < STEPS and not control.should_training_stop:
            self.step += 1
            self.stop.on_step_begin()
            self.take("step")
            self.stop.on_step_end(None, SimpleNamespace(global_step=self.step, max_steps=STEPS), control)
            self.ended_at = self.now
            if self.step % self.every["eval"] == 0:
                self.take("eval")
            if control.should_save or self.step % self.every["checkpoint"] == 0:
                self.take("checkpoint")


@pytest.mark.parametrize("seed", range(60))
def test_the_run_ends_within_its_limit_and_no_sooner_than_it_must(seed):
    draw = random.Random(seed)
    limit_s = draw.uniform(150, 1000)
    run = Simulated(draw, limit_s / 3600)
    run.run()
    assert run.stop.has_stopped_early
    assert run.now <= limit_s
    # one more step, with the longest of each, and 5% of the limit for a checkpoint, would not have been sure to fit
    kept = run.longest["step"] + run.longest["eval"] + max(run.longest["checkpoint"], 0.05 * limit_s)
    assert run.ended_at + kept > limit_s


def test_the_limit_counts_from_the_start_and_a_clock_that_is_set_moves_nothing(monkeypatch):
    monkeypatch.delenv(signals.START_TIME_VARIABLE, raising=False)
    assert signals.elapsed_s() == 0.0
    monkeypatch.setenv(signals.START_TIME_VARIABLE, str(time.monotonic() - 100))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 100 <= signals.elapsed_s() < 160
    signals.record_start_time(anew=False)  # a rank keeps what its parent has noted
    assert 100 <= signals.elapsed_s() < 160
    signals.record_start_time(anew=True)
    assert signals.elapsed_s() < 60
    assert signals.START_TIME_VARIABLE in os.environ


def test_a_run_that_stops_for_its_limit_ends_with_a_checkpoint_and_is_resumed_without_it(
    tmp_path, tiny_llama, command, succeed
):
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"{n}.") for n in range(8)))
    write_run(tmp_path, tiny_llama, rows, train={"effective_batch_size": 2, "max_steps": 4}, output={"name": "one"})
    code, said = command("train", "--config", str(tmp_path / "run.yaml"), "train.max_hours=0.000001")
    folder = tmp_path / "outputs" / "one"
    assert (code, "train.max_hours=1e-06: saving at the end of step 1, then stopping" in said) == (0, True), said
    assert "make resume" in said
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert (folder / "checkpoints" / "checkpoint-1" / "complete.json").is_file()
    succeed("resume", "--config", str(tmp_path / "run.yaml"), "--run", "one", "train.max_hours=1")
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
