"""MAX_RESTARTS=: a run of which a process died goes on from its last checkpoint, so often and no more."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import load_config
from sft_play.launch import ranks, request, start
from sft_play.launch.agent import RankExit, describe_crash
from sft_play.launch.request import LaunchOptions, RestartBudget
from sft_play.process import signals
from sft_play.process.failures import Failure, FailureKind
from sft_play.runs.folder import CRASH_ENTRY, MANIFEST_FORMAT, RESTARTS_ENTRY, OomEvent, RunFolder, write_oom_note
from sft_play.training.checkpoints import checkpoints
from tests import test_distributed as distributed
from tests.conftest import write_run
from tests.test_train import assert_same_bits, losses, weights

pytestmark = pytest.mark.build


@pytest.mark.parametrize("seed", range(60))
def test_what_died_is_told_from_what_would_fail_again(seed):
    draw = random.Random(seed)
    kinds: list[FailureKind | None] = ["user", "stopped", "fault", "peer", "hung", None]
    kind, code = draw.choice(kinds), draw.choice([-9, -11, -6, -15, 7])
    name = draw.choice(["ValueError", "AcceleratorError", "DistBackendError", "TrainingError"])
    own = Failure(kind, 2, name, "words", "", 100.5, 1, "a", 11) if kind is not None else None
    asked = draw.random() < 0.3
    root = RankExit(1, 11, code, 100.0, own, "4 (training)")
    followed = RankExit(0, 10, 1, 101.0, Failure("peer", 1, "RuntimeError", "gloo: closed", "", 101.5, 0, "a", 10))
    others = [followed] if kind in ("user", "fault", None) and code != -15 and draw.random() < 0.5 else []
    found = describe_crash([root, *others], 2, was_requested=asked)
    helps = kind in ("peer", "hung") or (kind == "fault" and name in ("AcceleratorError", "DistBackendError"))
    helps = helps or (kind is None and code != -15)  # somebody ended it by a signal that asks
    assert (found is not None) is (helps and not asked)
    assert found is None or "words" in found or found.startswith("rank 1 of 2 (pid 11)")


@pytest.fixture
def config(tmp_path) -> Path:
    output = {"dir": str(tmp_path), "name": "one"}
    return write_run(tmp_path, Path("gpt2"), Path("rows.jsonl"), train={"effective_batch_size": 2}, output=output)


def failed(folder: RunFolder, died: str | None, **more: Any) -> None:
    crash = {CRASH_ENTRY: died} if died else {}
    folder.write_json("manifest.json", {"format": MANIFEST_FORMAT, "status": "failed", **crash, **more})


def checkpoint(folder: RunFolder, step: int) -> None:
    written = checkpoints.checkpoint_path(checkpoints.create_staging(folder.checkpoints_path), step)
    written.mkdir()
    (written / "model.safetensors").write_bytes(b"weights")
    checkpoints.commit_checkpoint(written, folder.checkpoints_path, required_files=())


@pytest.mark.parametrize("seed", range(12))
def test_a_command_starts_again_as_often_as_it_may(tmp_path, config, monkeypatch, seed):
    draw = random.Random(seed)
    most, fails = draw.randint(0, 4), draw.randint(0, 6)
    folder, began = RunFolder(tmp_path / "one"), []
    folder.path.mkdir()

    def begin(asked: request.LaunchRequest) -> start.LaunchResult:
        began.append((asked.should_resume, asked.launches_ranks, os.environ[signals.START_TIME_VARIABLE]))
        dies = len(began) <= fails
        failed(folder, f"death {len(began)}" if dies else None, restarts=folder_restarts(folder))
        return start.LaunchResult(1 if dies else 0, folder)

    monkeypatch.setattr(start, "_start_once", begin)
    monkeypatch.setenv(signals.START_TIME_VARIABLE, "0.0")
    asked = request.LaunchRequest(load_config(config), LaunchOptions(max_restarts=most))
    assert start.start_run(asked).exit_code == (1 if fails > most else 0)
    assert len(began) == 1 + min(most, fails)
    assert [resume for resume, _, _ in began] == [False] + [True] * min(most, fails)
    assert {spread for _, spread, _ in began} == {most > 0}  # this process would not outlive the run's
    assert len({at for *_, at in began}) == 1  # one limit of hours for all
    assert [entry["after"] for entry in folder_restarts(folder)] == [f"death {n + 1}" for n in range(min(most, fails))]


def folder_restarts(folder: RunFolder) -> list[dict[str, Any]]:
    return folder.read_manifest().get(RESTARTS_ENTRY, []) if folder.manifest_path.exists() else []


def test_one_line_says_how_it_died_and_from_where_it_goes_on(tmp_path, config, caplog):
    folder, restarts = RunFolder(tmp_path / "one"), RestartBudget(2)
    folder.path.mkdir()
    loaded = load_config(config)
    failed(folder, "rank 1 died")
    assert restarts.should_restart(folder, loaded)
    checkpoint(folder, 4)
    checkpoint(folder, 6)
    (checkpoints.checkpoint_path(folder.checkpoints_path, 6) / checkpoints.COMPLETE_FILE).unlink()  # not whole
    folder.update_manifest(died="rank 0 died")
    assert restarts.should_restart(folder, loaded)
    folder.update_manifest(died="again")
    assert not restarts.should_restart(folder, loaded)
    wanted = [
        "Restart 1 of 2: rank 1 died; the run goes on from the beginning: there is no checkpoint",
        "Restart 2 of 2: rank 0 died; the run goes on from the checkpoint of step 4",
        "MAX_RESTARTS=2 is used up: the run ends",
    ]
    assert caplog.messages == wanted
    log = folder.log_path.read_text()
    assert all(line in log for line in wanted)
    assert [entry["from_step"] for entry in folder.read_manifest()[RESTARTS_ENTRY]] == [0, 4]
    assert CRASH_ENTRY not in folder.read_manifest()


def test_memory_that_ran_out_and_other_failures_count_for_nothing(tmp_path, config):
    folder, restarts = RunFolder(tmp_path / "one"), RestartBudget(1)
    folder.path.mkdir()
    failed(folder, None)
    assert not restarts.should_restart(folder, load_config(config))
    write_oom_note(folder, OomEvent(3, "training", 1, 4, 2, "run", "CUDA out of memory"))
    assert restarts.should_restart(folder, load_config(config))
    assert restarts.used == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_an_agent_that_is_killed_is_a_death_unless_a_stop_was_asked_for(tmp_path, stopped):
    folder = RunFolder(tmp_path / "one")
    failed(folder, None)
    assert ranks._command_exit_code(-signal.SIGKILL, folder, was_stopped=stopped) == (130 if stopped else 1)
    assert folder.read_manifest().get(CRASH_ENTRY) == (None if stopped else "the ranks' agent was killed by SIGKILL")
    assert ranks._command_exit_code(-signal.SIGKILL, None, was_stopped=stopped) == (130 if stopped else 1)
    assert ranks._command_exit_code(-50, folder, was_stopped=stopped) == (130 if stopped else 1)
    assert folder.read_manifest().get(CRASH_ENTRY) == (None if stopped else "the ranks' agent was killed by signal 50")


@pytest.mark.parametrize(("environ", "words", "said"), [
    ({"MAX_RESTARTS": "-1"}, (), "is not a whole number from 0"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, (), "has started on one machine"),
    ({}, ("tuning.backend=unsloth",), "does not watch Unsloth's processes"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (), "started on one machine"),
])  # fmt: skip
def test_where_nothing_could_be_started_again_it_is_refused(command, config, monkeypatch, environ, words, said):
    for name, text in {"MAX_RESTARTS": "2", **environ}.items():
        monkeypatch.setenv(name, text)
    if words:  # as where there is an environment with Unsloth
        monkeypatch.setattr("sft_play.launch.planning.refusals", lambda *_, **__: ())
        monkeypatch.setattr("sft_play.launch.planning.find_unsloth_layout", lambda *_: "single")
    code, printed = command("train", "--config", str(config), *words)
    assert (code, said in printed) == (2, True), printed
    assert not (config.parent / "one").exists()


RANKS = """
import os


def dying(step, times, number):
    import pathlib
    from sft_play.training.loop.trainer import PlannedTrainer

    real, marks = PlannedTrainer.compute_loss, pathlib.Path(os.environ["MARKS"])

    def compute_loss(self, *args, **options):
        deaths = len(list(marks.iterdir()))
        if self.state.global_step + 1 == step and self._slot_batches and deaths < times:
            (marks / str(deaths)).touch()
            os.kill(os.getpid(), number)
        return real(self, *args, **options)

    PlannedTrainer.compute_loss = compute_loss


if "RANK" in os.environ and os.environ["RANK"] == os.environ.get("DYING"):
    dying(*(int(os.environ[name]) for name in ("AT_STEP", "TIMES", "SIGNAL")))
"""
"""sitecustomize.py: a rank that gets a signal in a step, so many times."""


def begun(world: Path, command: str, name: str, *words: str, **environ: str) -> tuple[int, str]:
    marks = world / f"marks-{name}"
    marks.mkdir()
    given = ["--config", f"{world}/run.yaml", f"output.name={name}", "tuning.lora.dropout=0.1", "train.save_steps=1"]
    ended = distributed.start(world, command, *given, *words, limit_s=550, MARKS=str(marks), **environ)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "words"), [
    ("ddp", ["tuning.mode=lora"]), ("fsdp", ["tuning.mode=full", "train.bf16=true"]),
], ids=["ddp-lora-fp32", "fsdp-full-bf16"])  # fmt: skip
def test_a_run_whose_rank_is_killed_twice_ends_as_the_unbroken_one(world, strategy, words):
    of_ranks = {"STRATEGY": strategy, "NPROC": "2"}
    code, printed = begun(world, "train-distributed", f"{strategy}-whole", *words, **of_ranks)
    assert code == 0, printed
    code, printed = begun(world, "train-distributed", f"{strategy}-broken", *words, DYING="1", AT_STEP="4", TIMES="2",
                   SIGNAL=str(int(signal.SIGKILL)), MAX_RESTARTS="2", **of_ranks)  # fmt: skip
    assert code == 0, printed
    for k in (1, 2):
        line = next(line for line in printed.splitlines() if f"Restart {k} of 2: " in line)
        assert "rank 1 of 2 (pid " in line
        assert "was killed by SIGKILL at step 4 (training)" in line
        assert line.endswith("; the run goes on from the checkpoint of step 3")
    folders = [world / "outputs" / f"{strategy}-{name}" for name in ("whole", "broken")]
    assert_same_bits(*map(weights, folders))
    assert losses(folders[0]) == losses(folders[1])
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    assert (manifest["status"], len(manifest[RESTARTS_ENTRY]), len(manifest["resumed"])) == ("finished", 2, 2)


@pytest.mark.slow
def test_one_process_that_crashes_each_time_ends_after_its_restarts(world):
    crash = {"DYING": "0", "AT_STEP": "2", "TIMES": "9", "SIGNAL": str(int(signal.SIGSEGV)), "MAX_RESTARTS": "1"}
    code, printed = begun(world, "train", "crash", "tuning.mode=lora", **crash)
    assert code == 1, printed
    assert len(list((world / "marks-crash").iterdir())) == 2
    assert "killed by SIGSEGV; the run goes on from the checkpoint of step 1" in printed
    manifest = json.loads((world / "outputs" / "crash" / "manifest.json").read_text())
    assert (manifest["status"], "killed by SIGSEGV" in manifest["error"]) == ("failed", True)


@pytest.mark.slow
def test_one_process_that_is_launched_to_be_watched_trains_as_one_that_is_not(world):
    """And what a restart cannot help, an exception, is not started again."""
    for name, more in (("plain", {}), ("watched", {"MAX_RESTARTS": "3"})):
        code, printed = begun(world, "train", name, "tuning.mode=lora", **more)
        assert code == 0, printed
    folders = [world / "outputs" / name for name in ("plain", "watched")]
    assert_same_bits(*map(weights, folders))
    assert json.loads((folders[1] / "manifest.json").read_text())["layout"] == "single"
    words = ("tuning.mode=lora", "train.learning_rate=1e38", "train.max_grad_norm=0")
    code, printed = begun(world, "train", "nan", *words, MAX_RESTARTS="3")
    assert (code, "Restart" in printed) == (2, False), printed
