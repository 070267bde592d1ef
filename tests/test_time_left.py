"""Time: what a run says is left has what follows its steps too, what takes long says how far it is, and
`train.max_hours` stops a run in time for its longest step, evaluation and checkpoint, whatever the clock says."""

import json
import logging
import os
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl, TrainerState

from sft_play.data.sources.examples import count_part_rows
from sft_play.data.sources.files import find_source, list_parts
from sft_play.process import signals, waiting
from sft_play.process.waiting import WaitProgress, report_wait
from sft_play.training.loop.callbacks import Progress, StopController
from sft_play.training.loop.trainer import PlannedTrainer
from sft_play.training.measure import exact_match, profile
from sft_play.training.measure.summary import EvalSet, estimate_remaining, remaining_events
from tests.conftest import chat, write_rows, write_run
from tests.processes import wait_for
from tests.test_train import metrics

pytestmark = pytest.mark.build


def visits(strategy: str, every: int, *, steps: int, per_epoch: int) -> list[int]:
    """Steps at which the Trainer evaluates, by its own callback."""
    flow, found = DefaultFlowCallback(), []
    arguments: Any = SimpleNamespace(
        logging_first_step=False, logging_strategy="no", eval_strategy=strategy, eval_delay=0, save_strategy="no",
        save_steps=1,
    )  # fmt: skip
    state = TrainerState(max_steps=steps, eval_steps=every, logging_steps=1, save_steps=1)
    for step in range(1, steps + 1):
        state.global_step, state.epoch = step, step / per_epoch
        control = flow.on_step_end(arguments, state, TrainerControl())
        if step % per_epoch == 0 or step == steps:
            control = flow.on_epoch_end(arguments, state, control)
        if control.should_evaluate:
            found.append(step)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_what_is_still_to_come_is_what_the_trainer_does_from_there_on(seed: int) -> None:
    draw = random.Random(seed)
    strategy, per_epoch = ("steps", "epoch", "no")[seed % 3], draw.randint(1, 12)
    steps, every = draw.randint(1, 5 * per_epoch), draw.randint(1, 15)
    passes = 4 * per_epoch - draw.randint(0, 3)  # of an epoch: its last step may have fewer than four
    all_visits = visits(strategy, every, steps=steps, per_epoch=per_epoch)
    for step in range(1, steps + 1):
        whole, rest = divmod(step, per_epoch)
        state = TrainerState(max_steps=steps, global_step=step, epoch=whole + 4 * rest / passes)
        left = remaining_events(strategy, every if strategy == "steps" else None, state)
        assert left == sum(at >= step for at in all_visits), (strategy, every, per_epoch, step)


def left(took_s: dict[str, list[float]], name: str = "val", *, step: int = 10, rows: Any = (), **changes: Any) -> Any:
    """What is left of a run of 10 steps that evaluates after 4 and 8 and at the end, and saves after each 5."""
    usual = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 5}
    arguments = SimpleNamespace(**{**usual, "load_best_model_at_end": False, **changes})
    state = TrainerState(max_steps=10, global_step=step)
    trainer: Any = SimpleNamespace(args=arguments, pause_seconds=took_s, state=state)
    return estimate_remaining(trainer, EvalSet(rows, name, [], []))


def test_what_was_measured_last_is_what_the_rest_takes_and_what_is_unknown_is_named() -> None:
    took_s = {"eval": [9.0, 7.0], "checkpoint": [2.0], "test": [60.0], "profile": [35.0]}
    # three evaluations (after 4, 8 and 10), two checkpoints and the weights; the last evaluation is that of the run
    assert left(took_s, step=1) == (3 * 7 + 3 * 2, "")
    assert left(took_s) == (1 * 7 + 2 * 2, "")
    assert left(took_s, "test") == (7 + 4 + 60, "")  # test rows are evaluated after training besides
    assert left(took_s, load_best_model_at_end=True) == (2 * 7 + 4, "")
    assert left(took_s, eval_strategy="no") == (7 + 4, "")
    assert left(took_s, eval_strategy="no", rows=None) == (4, "")  # there are no rows to evaluate
    # validation in training comes after the test rows were measured first, or the other way round
    assert left({"test": [60.0]}, "test") == (60 + 60, "")
    assert left({"eval": [7.0]}, "test") == (7 + 7, "")
    # of a resumed run, and without eval.before_training, nothing is known: `1 second left` would be all but minutes
    unknown = ", evaluations not counted"
    assert left({"checkpoint": [2.0]}, "test") == (4, unknown)
    assert left({}, eval_strategy="no") == (0, unknown)
    assert left({}, eval_strategy="no", rows=None) == (0, "")


def test_a_line_has_what_follows_and_not_what_came_between_steps() -> None:
    clock, logs = iter([1.0, 2.0, 6.0, 41.0, 45.0]), {"loss": 1.0, "tokens_per_s": 1.0}
    progress = Progress(estimate_remaining=lambda: (70.0, ""), clock=lambda: next(clock))
    state: Any = TrainerState(max_steps=3)
    progress.on_train_begin(None, state, None)  # type: ignore[arg-type]
    progress.on_step_begin(None, state, None)  # type: ignore[arg-type]
    progress.on_step_end(None, state, None)  # type: ignore[arg-type] # at 6 s: then a profile is written for 35 s
    assert progress.training_s == 4
    assert progress.format_line(1, 3, logs) == "loss 1.0000  1 tokens/s  78 seconds left"  # 2 steps of 4 s, and 70 s
    progress.on_step_begin(None, state, None)  # type: ignore[arg-type]
    progress.on_step_end(None, state, None)  # type: ignore[arg-type]
    assert progress.training_s == 8
    assert progress.format_line(3, 3, logs).endswith("70 seconds left")
    progress._estimate_remaining = lambda: (0.0, ", evaluations not counted")
    assert progress.format_line(3, 3, logs).endswith(" left, evaluations not counted")


@pytest.fixture
def config(tmp_path, tiny_llama, monkeypatch) -> Path:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    rows = [chat(f"what is {n}?", f"it is {n}.") for n in range(24)]
    val = write_rows(tmp_path / "val.jsonl", rows[:6])
    data = write_rows(tmp_path / "rows.jsonl", rows[6:])
    train = {"effective_batch_size": 2, "logging_steps": 1}
    return write_run(tmp_path, tiny_llama, data, data={"val_path": str(val)}, train=train, output={"name": "one"})


def test_a_profiles_export_is_no_steps_time(config: Path, succeed, monkeypatch) -> None:
    real = profile.profile.export_chrome_trace

    def slow(self: Any, path: str) -> None:
        time.sleep(2.0)
        real(self, path)

    monkeypatch.setattr(profile.profile, "export_chrome_trace", slow)
    succeed("train", "--config", str(config), "train.max_steps=5", "train.profile_steps=1", "eval.steps=0")
    folder = config.parent / "outputs" / "one"
    steps = [one for one in metrics(folder) if "step_time_s" in one]
    assert len(steps) == 5
    assert steps[2]["time_profile_s"] > 2.0  # the third step was profiled, and logged after the export
    assert max(one["step_time_s"] for one in steps[2:]) < 2.0
    assert json.loads((folder / "summary.json").read_text())["tokens_per_s"] > steps[2]["num_tokens"] / 30


def test_evaluations_and_answers_say_how_far_they_are(config: Path, succeed, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.1)
    real, real_loss, rows_at_once = exact_match._generate, PlannedTrainer.compute_loss, 2

    def slow(*words: Any) -> Any:
        time.sleep(0.25)
        return real(*words)

    def slow_loss(self: Any, model: Any, *words: Any, **options: Any) -> Any:
        time.sleep(0.0 if model.training else 0.25)
        return real_loss(self, model, *words, **options)

    monkeypatch.setattr(exact_match, "_generate", slow)
    monkeypatch.setattr(PlannedTrainer, "compute_loss", slow_loss)
    monkeypatch.setattr(
        exact_match, "batch_by_tokens",
        lambda order, tokens, most: (list(order[n : n + rows_at_once]) for n in range(0, len(order), rows_at_once)),
    )  # fmt: skip
    words = ("eval.steps=1", "eval.generate_rows=6", "eval.max_new_tokens=2", "eval.batch_size=2")
    said = succeed("train", "--config", str(config), "train.max_steps=1", *words)
    before, after = said.split("step 1/1", 1)
    for part in (before, after):
        for words in ("Evaluating: (\\d) of 6 rows", "Generating answers: (\\d) of 6 answers"):
            shown = re.findall(words + r", \d+ s so far", part)
            assert len({"0", "2", "4"} & set(shown)) >= 2, part  # a busy machine is late for one of them
    # three batches of each, a quarter of a second long, are left behind the last step, and are part of the time left
    (left,) = re.findall(r"step 1/1 .* (\d+) seconds? left", said)
    assert int(left) >= 1


class Simulated:
    """A run of steps, evaluations and checkpoints of random lengths, as the Trainer calls its callbacks."""

    def __init__(self, draw: random.Random, hours: float | None) -> None:
        self.now = draw.uniform(0, 30)
        self.took_s: dict[str, list[float]] = {"step": [], "eval": [], "checkpoint": []}
        self.stop = StopController(None, hours=hours, pause_seconds=self.took_s, elapsed_s=lambda: self.now)
        self.draw, self.step, self.ended_at = draw, 0, 0.0
        self.every = {"eval": draw.randint(2, 9), "checkpoint": draw.randint(2, 9)}

    def take(self, name: str) -> None:
        seconds = self.draw.uniform(1, 3) * {"step": 1, "eval": 4, "checkpoint": 2}[name]
        self.took_s[name].append(seconds)
        self.now += seconds

    def run(self) -> None:
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        while self.step < 1000 and not control.should_training_stop:
            self.step += 1
            self.stop.on_step_begin()
            self.take("step")
            self.stop.on_step_end(None, SimpleNamespace(global_step=self.step, max_steps=1000), control)
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
    assert (run.stop.has_stopped_early, run.now <= limit_s) == (True, True)
    # one more step, with the longest of each, and 5% of the limit for a checkpoint, would not have been sure to fit
    longest = {name: max(seconds, default=0.0) for name, seconds in run.took_s.items()}
    kept = longest["step"] + longest["eval"] + max(longest["checkpoint"], 0.05 * limit_s)
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
    config = ("--config", str(tmp_path / "run.yaml"))
    code, said = command("train", *config, "train.max_hours=0.000001")
    folder = tmp_path / "outputs" / "one"
    assert (code, "train.max_hours=1e-06: saving at the end of step 1, then stopping" in said) == (0, True), said
    assert "make resume" in said
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert (folder / "checkpoints" / "checkpoint-1" / "complete.json").is_file()
    succeed("resume", *config, "--run", "one", "train.max_hours=1")
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def said(caplog) -> list[str]:
    return [re.sub(r"\d+ s so far$", "S", record.getMessage()) for record in caplog.records]


def until(caplog, text: str) -> None:
    wait_for(lambda: any(text in line for line in said(caplog)), within_s=10, said=lambda: str(said(caplog)))


def test_what_is_quick_says_nothing_and_does_not_look_for_a_total(caplog):
    caplog.set_level(logging.INFO)
    with report_wait("Reading", unit="rows", count_total=lambda: pytest.fail("looked up")) as news:
        news.add()
    assert said(caplog) == []
    assert waiting._open_waits == []
    assert not [one for one in threading.enumerate() if one.name == "waiting"]


def test_the_innermost_speaks_and_then_the_one_around_it(caplog, monkeypatch):
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.03)
    caplog.set_level(logging.INFO)
    with report_wait("Checking"):
        with report_wait("Reading", unit="rows", count_total=lambda: 7) as news:
            news.add(3)
            until(caplog, "Reading: 3 of 7 rows, ")
            assert set(said(caplog)) == {"Reading: 3 of 7 rows, S"}
        until(caplog, "Checking: S")
    with pytest.raises(KeyError), report_wait("Reading"):
        raise KeyError
    assert waiting._open_waits == []


def test_lines_become_rare(monkeypatch):
    pauses: list[float] = []

    class Ended:
        def wait(self, pause: float) -> bool:
            pauses.append(pause)
            return len(pauses) == 8

        def set(self) -> None: ...

    monkeypatch.setattr(waiting, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
    with report_wait("Reading"):
        pass
    assert pauses == [3, 6, 12, 24, 48, 60, 60, 60]


def test_a_total_is_said_where_it_can_be_right():
    chance = random.Random(6)
    for _ in range(300):
        total, done = chance.choice([None, chance.randint(0, 10**6)]), chance.randint(0, 10**6)
        asked = []
        one = WaitProgress("Reading", "rows", lambda total=total, asked=asked: asked.append(1) or total)
        one.add(done)
        lines = [re.sub(r"\d+ s so far$", "S", one.line()) for _ in range(2)]
        of = f" of {total:,}" if total is not None and total >= max(done, 1) else ""
        assert lines == [f"Reading: {done:,}{of} rows, S"] * 2
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "left"),
    [(20, 100, 12.0, ", about 48 seconds left"), (20, 100, 2.0, ""), (0, 100, 12.0, ""), (5, None, 12.0, ""),
     (120, 100, 12.0, ""), (50, 100, 600.0, ", about 10 minutes left")],
)  # fmt: skip
def test_the_time_left_is_said_once_it_can_be_told(done, total, elapsed_s, left, monkeypatch):
    one = WaitProgress("Reading", "rows", lambda: total)
    one.add(done)
    monkeypatch.setattr(waiting.time, "monotonic", lambda start=one._started_at: start + elapsed_s)
    assert one.line().endswith(f" {elapsed_s:.0f} s so far{left}")


def test_rows_are_counted_by_lines_and_row_groups_and_by_nothing_that_has_to_be_read(tmp_path: Path):
    chance = random.Random(8)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        counts = [chance.randint(1, 30) for _ in range(chance.randint(1, 3))]
        for at, count in enumerate(counts):
            rows = [{"prompt": f"{n}", "completion": "x"} for n in range(count)]
            if chance.random() < 0.5:
                write_rows(folder / f"{at}.jsonl", rows)
            else:
                pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{at}.parquet")
        assert count_part_rows(list_parts(find_source(str(folder)))) == sum(counts)
        (folder / "z.json").write_text(json.dumps([{"prompt": "a", "completion": "b"}]))
        assert count_part_rows(list_parts(find_source(str(folder)))) is None
