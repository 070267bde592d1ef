"""ZeRO's checkpoints resumed over another number of ranks: the same states, and the losses of the unbroken run."""

import functools
import json
import os
import subprocess
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_play.errors import RunFolderError
from sft_play.training.checkpoints import checkpoints, last_checkpoint
from sft_play.training.checkpoints.last_checkpoint import forbid_pickled_code
from sft_play.training.heartbeat import Heartbeat
from tests import warm
from tests.conftest import ROOT, clean_environment
from tests.models import uneven_run
from tests.test_train import assert_same_bits, logged, losses

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here"),
]


def written(folder: Path, ranks: int) -> Path:
    """A checkpoint with the names that DeepSpeed's has."""
    checkpoint = folder / "checkpoint-3"
    (checkpoint / "global_step3").mkdir(parents=True)
    for rank in range(ranks):
        (checkpoint / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x" * 1000)
    (checkpoint / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"x" * 300)
    (checkpoint / "latest").write_text("global_step3")
    return checkpoint


def trainer(*, is_deepspeed: bool = True) -> Any:
    plugin, heartbeat = SimpleNamespace(deepspeed_config={}), Heartbeat(60.0)
    heartbeat._thread = threading.current_thread()  # as of a run of several ranks
    return SimpleNamespace(
        is_deepspeed_enabled=is_deepspeed, heartbeat=heartbeat, model_wrapped=None, wait_for_disk=lambda: None,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
    )  # fmt: skip


def test_what_as_many_ranks_wrote_is_read_as_it_is(tmp_path):
    checkpoint = written(tmp_path, 1)
    for one in (trainer(), trainer(is_deepspeed=False)):
        with last_checkpoint.readable_checkpoint(one, checkpoint) as path:
            assert path == checkpoint
    with last_checkpoint.readable_checkpoint(trainer(is_deepspeed=False), written(tmp_path / "two", 2)) as path:
        assert path.parent == tmp_path / "two"


@pytest.mark.parametrize(("free", "fits"), [(2 * 2000 + 1000 + 300, True), (2 * 2000 + 1000 + 299, False)])
def test_a_conversion_that_finds_no_room_says_what_it_takes_and_leaves_nothing(tmp_path, monkeypatch, free, fits):
    checkpoint, made = written(tmp_path, 2), []
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    monkeypatch.setattr(last_checkpoint, "free_disk_bytes", lambda _: free)
    monkeypatch.setattr(last_checkpoint, "_convert_to_universal", lambda _, path, __: made.append(path) or path.mkdir())
    if fits:
        one = trainer()
        with last_checkpoint.readable_checkpoint(one, checkpoint) as path:
            assert path == made[0] == checkpoints.checkpoint_path(tmp_path / checkpoints.STAGING_NAME, 3)
            assert one.heartbeat.last_note == (3, "converting the checkpoint")
            assert one.heartbeat._last_progress is None  # it may take longer than distributed.timeout_s
    else:
        with pytest.raises(RunFolderError, match=r"checkpoint-3 for another number of ranks .* about 5,300 bytes"):
            last_checkpoint.readable_checkpoint(trainer(), checkpoint).__enter__()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3"}
    assert before == {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}


RANKS = """
import os


def keep():
    from sft_play.training.checkpoints import last_checkpoint

    read = last_checkpoint.finish_loading

    def loaded(trainer, path):
        is_copy = (path / "latest_universal").is_file()
        read(trainer, path)
        if is_copy:
            trainer.model_wrapped.save_checkpoint(os.environ["KEPT"], exclude_frozen_parameters=True)

    last_checkpoint.finish_loading = loaded


def die():
    import signal
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal._save_optimizer_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


if "RANK" in os.environ and os.environ.get("KEPT"):
    keep()
if os.environ.get("RANK") == "0" and os.environ.get("DIES"):
    die()
"""
"""sitecustomize.py: ranks that write what they have loaded at once, or that are killed while they convert."""


def states(checkpoint: Path, aside: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], set[float]]:
    """Of a checkpoint of DeepSpeed: each whole weight and moment, the optimizer's groups, its counts of steps."""
    (parts,) = checkpoint.glob("global_step*")
    with forbid_pickled_code(checkpoint):
        last_checkpoint._convert_to_universal(checkpoint, aside, parts)
    (zero,) = aside.glob("*/zero")
    tensors, steps = {}, set()
    for path in zero.glob("*/*.pt"):
        value = torch.load(path, weights_only=False)
        value = value["param"] if isinstance(value, dict) else value
        if path.stem == "step":
            steps.add(float(value))
        else:
            tensors[f"{path.parent.name} {path.stem}"] = value.flatten()
    whole = torch.load(zero / "optimizer_state.pt", weights_only=False)
    steps |= {float(one["step"]) for one in whole.get("optimizer_state_dict", {}).get("state", {}).values()}
    groups = [{key: one[key] for key in ("lr", "weight_decay", "betas", "eps")} for one in whole["param_groups"]]
    return tensors, groups, steps


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    uneven_run(folder, tiny_llama)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(RANKS)
    return folder


def run(world: Path, command: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = [warm.python(), "-m", "sft_play", command, "--config", f"{world}/run.yaml", *words]
    kept = clean_environment(PYTHONPATH=f"{ROOT}{os.pathsep}{world}/site", **environ)
    return subprocess.run(given, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=400)


def done(world: Path, command: str, *words: str, **environ: str) -> str:
    answer = run(world, command, *words, **environ)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def unbroken(world) -> Callable[..., list[float]]:
    """Losses of the run over two ranks that nobody stopped."""

    @functools.cache
    def losses_of(strategy: str, *words: str) -> list[float]:
        name = f"unbroken-{strategy}-{abs(hash(words))}"
        done(world, "train-distributed", *words, f"output.name={name}", STRATEGY=strategy, NPROC="2")
        return losses(world / "outputs" / name)

    return losses_of


DECAY = "train.weight_decay=0.1"
"""With it the optimizer has two groups, and two counts of steps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "words", "first", "then"),
    [
        ("zero2", ["tuning.mode=full", DECAY], 2, 1),
        ("zero3", ["tuning.mode=full", DECAY], 2, 1),
        ("zero3", ["tuning.mode=full", DECAY, "train.bf16=true"], 1, 2),
        ("zero2", ["tuning.mode=lora", "train.bf16=true"], 1, 2),
        ("zero1", ["tuning.mode=full", DECAY, "train.bf16=true"], 2, 4),
        ("zero3", ["tuning.mode=qlora"], 2, 4),
    ],
    ids=lambda one: "-".join(word.partition("=")[2] for word in one) if isinstance(one, list) else str(one),
)
def test_states_are_those_that_were_saved_and_losses_go_on(world, unbroken, strategy, words, first, then):
    name = f"{strategy}-{first}-{then}-{abs(hash(tuple(words)))}"
    kept, folder = world / name, world / "outputs" / name
    stop = [f"output.name={name}", "train.stop_after_steps=2"]
    done(world, "train-distributed", *words, *stop, STRATEGY=strategy, NPROC=str(first))
    ended = done(world, "resume", *words, RUN=name, NPROC=str(then), KEPT=str(kept))
    assert f"Converting the optimizer states of {first} ranks for {then}" in ended
    saved, groups, steps = states(folder / "checkpoints" / "checkpoint-2", world / f"{name}-saved")
    loaded, groups_then, steps_then = states(kept, world / f"{name}-loaded")
    assert len([key for key in saved if key.endswith("exp_avg_sq") and saved[key].abs().max() > 0]) > 8
    assert_same_bits(saved, loaded)
    assert (groups, steps) == (groups_then, steps_then)
    assert (len(groups), steps) == (2 if DECAY in words else 1, {2.0})
    assert states(folder / "checkpoints" / "checkpoint-5", world / f"{name}-end")[2] == {5.0}
    tolerance = 4e-3 if "train.bf16=true" in words else 1e-5
    assert losses(folder) == pytest.approx(unbroken(strategy, *words), rel=tolerance)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-5"}
    batch = json.loads((folder / "manifest.json").read_text())["batch"]
    assert (batch["micro_batch"] * batch["grad_accum"] * then, batch["ranks"]) == (8, then)


@pytest.mark.slow
def test_a_kill_while_it_is_converted_leaves_the_checkpoint_and_the_next_resume_goes_on(world, unbroken):
    words, folder = ["tuning.mode=lora"], world / "outputs" / "killed"
    stop = ["output.name=killed", "train.stop_after_steps=2"]
    done(world, "train-distributed", *words, *stop, STRATEGY="zero2", NPROC="2")
    broken = run(world, "resume", *words, RUN="killed", NPROC="1", DIES="1")
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert checkpoints.find_damage(folder / "checkpoints" / "checkpoint-2") is None
    done(world, "resume", *words, RUN="killed", NPROC="1")
    assert losses(folder) == pytest.approx(unbroken("zero2", *words), rel=1e-5)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-5"}


@pytest.mark.slow
def test_the_best_checkpoint_may_be_of_another_number_of_ranks(world):
    words = ["tuning.mode=full", "train.learning_rate=1.0", "eval.steps=1", "train.save_steps=1", DECAY]
    words += ["train.load_best_model_at_end=true", "train.warmup_steps=0"]
    stop = ["output.name=best", "train.stop_after_steps=2"]
    done(world, "train-distributed", *words, *stop, STRATEGY="zero3", NPROC="2")
    done(world, "resume", *words, RUN="best", NPROC="1")
    found = logged(world / "outputs" / "best", "eval_loss")[1:]
    assert found[5] == pytest.approx(found[0], rel=1e-5)
    assert min(found[:5]) == found[0]
