"""A run that was stopped goes on under its own ranks, under others, and under one process, as if it had not been; one
that was killed before its first step starts from the beginning."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sft_play.errors import ModelError
from tests.conftest import ROOT
from tests.models import uneven_run
from tests.test_distributed import losses, start

pytestmark = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("going-on")
    uneven_run(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def unbroken(world) -> Callable[[str], list[float]]:
    """Losses of the unbroken run of a mode in one process."""

    @functools.cache
    def run(mode: str) -> list[float]:
        answer = start(
            world, "train", "--config", f"{world}/run.yaml", f"tuning.mode={mode}", f"output.name=unbroken-{mode}"
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return losses(world / "outputs" / f"unbroken-{mode}")

    return run


KILL = """
import importlib, os, signal
module, _, name = os.environ.get("KILL_AT", "").partition(":")
if module and os.environ.get("RANK", "0") == "0":
    def killed(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(importlib.import_module(module), name, killed)
"""
"""What ends a process where it calls a function, as the loss of the machine would."""


@pytest.fixture(scope="module")
def killing(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("killing")
    (folder / "sitecustomize.py").write_text(KILL)
    return f"{folder}:{ROOT}"


@pytest.mark.parametrize(
    ("command", "moment", "files", "given"),
    [
        ("train", "run:train_stage", {"manifest.json"}, {}),  # the data is recorded, and nothing is loaded
        # everything is loaded
        pytest.param("train", "run:_run_training_loop", {"manifest.json"}, {}, marks=pytest.mark.slow),
        (
            "train-distributed",
            "run:prepare_stages",
            {"launch.json"},
            {"NPROC": "2", "STRATEGY": "fsdp"},
        ),  # no data recorded
        pytest.param(
            "train-distributed",
            "run:_run_training_loop",
            {"launch.json"},
            {"NPROC": "2", "STRATEGY": "ddp"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_is_killed_while_it_starts_is_started_again(world, unbroken, killing, command, moment, files, given):
    name = f"killed-{command}-{moment.partition(':')[2]}"
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora"]
    at = f"sft_play.training.{moment}"
    begun = start(world, command, *words, f"output.name={name}", PYTHONPATH=killing, KILL_AT=at, **given)
    run = world / "outputs" / name
    assert begun.returncode not in (0, 2), begun.stdout + begun.stderr
    assert {path.name for path in run.iterdir()} >= files
    # as a batch system starts a job again that was preempted: the same words, and the folder is to be resumed
    again = start(world, command, *words, f"output.name={name}", "output.if_exists=resume", PYTHONPATH=killing,
                  KILL_AT=at, **given)  # fmt: skip
    assert again.returncode not in (0, 2), again.stdout + again.stderr
    ended = start(world, "resume", *words, RUN=name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no step was trained, so the run starts from the beginning" in ended.stdout
    assert losses(run) == pytest.approx(unbroken("lora"), rel=1e-5)
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["status"], manifest["processes"]) == ("finished", int(given.get("NPROC", 1)))
    assert manifest["layout"] == given.get("STRATEGY", "single").lower()
    assert "train" in manifest["data"]


@pytest.mark.parametrize(
    ("steps", "given"),
    [(2, {}), pytest.param(3, {}, marks=pytest.mark.slow),
     pytest.param(2, {"NPROC": "2", "STRATEGY": "fsdp"}, marks=pytest.mark.slow),
     pytest.param(2, {"NPROC": "2", "STRATEGY": "zero2"}, marks=[needs_deepspeed, pytest.mark.slow])],
)  # fmt: skip
def test_a_run_that_is_killed_after_its_last_step_trains_no_further_one(world, killing, steps, given):
    """In the midst of an epoch, and at its end; with a learning rate that has not come to zero."""
    command, name = "train-distributed" if given else "train", f"last-{steps}-{given.get('STRATEGY')}"
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora", f"output.name={name}", f"train.max_steps={steps}",
             "train.save_steps=1", "train.lr_scheduler_type=constant"]  # fmt: skip
    at = "sft_play.training.run:build_summary"
    begun = start(world, command, *words, PYTHONPATH=killing, KILL_AT=at, **given)
    assert begun.returncode not in (0, 2), begun.stdout + begun.stderr
    run = world / "outputs" / name
    before = losses(run)
    ended = start(world, command, *words, "output.if_exists=resume", **given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(run) == before
    assert len(before) == steps
    assert json.loads((run / "summary.json").read_text())["steps"] == steps
    last = load_file(run / "checkpoints" / f"checkpoint-{steps}" / "adapter_model.safetensors")
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(bool((saved[key] == value).all()) for key, value in last.items())


def test_what_has_not_trained_starts_with_the_settings_of_now(world, killing):
    words = ["--config", f"{world}/run.yaml", "output.name=changed"]
    begun = start(world, "train", *words, PYTHONPATH=killing, KILL_AT="sft_play.training.run:train_stage")
    assert begun.returncode not in (0, 2), begun.stdout + begun.stderr
    other = ["tuning.mode=lora", "train.seed=7", "train.effective_batch_size=6", "train.max_steps=1"]
    ended = start(world, "train-distributed", *words, *other, "output.if_exists=resume", NPROC="3", STRATEGY="ddp")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = world / "outputs" / "changed"
    assert json.loads((run / "resolved.json").read_text())["train"]["seed"] == 7
    batch = json.loads((run / "manifest.json").read_text())["batch"]
    assert (batch["micro_batch"] * batch["grad_accum"], batch["ranks"]) == (2, 3)
    # what has trained keeps its settings
    refused = start(world, "resume", "--config", f"{world}/run.yaml", "tuning.mode=lora", RUN="changed")
    assert "is finished" in refused.stderr


def stop_and_go_on(world: Path, mode: str, first: tuple[str, int], then: tuple[str, int]) -> tuple[Path, str]:
    """Run two steps so, the rest otherwise; the run folder and what the second start printed.

    Two steps are in the middle of the first epoch; the third ends it with its uneven rest.
    """
    name = f"{mode}-{'-'.join(map(str, (*first, *then)))}"
    words = ["--config", f"{world}/run.yaml", f"tuning.mode={mode}"]
    command = "train" if first[1] == 1 else "train-distributed"
    given = {"STRATEGY": first[0], "NPROC": str(first[1])} if first[1] > 1 else {}
    begun = start(world, command, *words, f"output.name={name}", "train.stop_after_steps=2", **given)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    given = {"NPROC": str(then[1])} | ({"STRATEGY": then[0]} if then[0] else {})
    ended = start(world, "resume", *words, RUN=name, **given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return world / "outputs" / name, ended.stdout


def logits(run: Path, mode: str, base: Path):
    """What the saved model says to the same tokens, loaded as anybody would load it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "model" if mode == "full" else base)
    model = model if mode == "full" else PeftModel.from_pretrained(model, run / "adapter")
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40).unsqueeze(0)).logits


@pytest.mark.parametrize(
    ("mode", "first", "then"),
    [
        ("full", ("fsdp", 2), ("", 1)),
        pytest.param("lora", ("", 1), ("fsdp", 2), marks=pytest.mark.slow),
        pytest.param("lora", ("ddp", 2), ("fsdp", 4), marks=pytest.mark.slow),
        pytest.param("full", ("ddp", 2), ("", 1), marks=pytest.mark.slow),
        pytest.param("full", ("fsdp", 4), ("ddp", 2), marks=pytest.mark.slow),
        pytest.param("lora", ("zero2", 2), ("zero2", 2), marks=[needs_deepspeed, pytest.mark.slow]),
        pytest.param("full", ("zero3", 2), ("zero3", 2), marks=[needs_deepspeed, pytest.mark.slow]),
    ],
)
def test_losses_go_on_as_if_it_had_not_stopped(world, unbroken, tiny_llama, mode, first, then):
    run, said = stop_and_go_on(world, mode, first, then)
    assert losses(run) == pytest.approx(unbroken(mode), rel=1e-5)
    one = logits(world / "outputs" / f"unbroken-{mode}", mode, tiny_llama)
    assert (logits(run, mode, tiny_llama) - one).abs().max() < 1e-4  # reloaded into one process
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["batch"]["ranks"] == then[1]
    assert manifest["batch"]["micro_batch"] * manifest["batch"]["grad_accum"] * then[1] == 8
    if first[1] != then[1]:
        assert f"x {then[1]} ranks (stopped with {first[1]}): the effective batch of 8 is kept" in said or (
            json.loads((run / "plan.json").read_text())["effective_batch"] == 8
        )


OWN_FILE = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5000}, "train_micro_batch_size_per_gpu": 2}


@needs_deepspeed
@pytest.mark.parametrize(
    ("strategy", "own_file", "by_tokens"),
    [
        ("zero2", None, True),
        pytest.param("zero3", None, True, marks=pytest.mark.slow),
        pytest.param("zero2", OWN_FILE, False, marks=pytest.mark.slow),  # its micro-batch is the user's, in rows
    ],
)
def test_a_run_under_zero_is_resumed_and_repeated_with_the_config_that_it_was_given(
    world, tmp_path, strategy, own_file, by_tokens
):
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora", "train.batch_size=auto"]
    given = {"STRATEGY": strategy, "NPROC": "2"}
    if own_file:
        (tmp_path / "mine.json").write_text(json.dumps(own_file))
        given = {"DEEPSPEED_CONFIG": f"{tmp_path}/mine.json", "NPROC": "2"}
    runs = {name: world / "outputs" / f"{strategy}-{bool(own_file)}-{name}" for name in ("whole", "parts")}
    for name, more in {"whole": [], "parts": ["train.stop_after_steps=2"]}.items():
        answer = start(world, "train-distributed", *words, f"output.name={runs[name].name}", *more, **given)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    (tmp_path / "mine.json").unlink(missing_ok=True)
    engine = (runs["whole"] / "deepspeed.json").read_text()
    ended = start(world, "resume", *words, RUN=runs["parts"].name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "contradicts" not in ended.stdout
    assert (runs["parts"] / "deepspeed.json").read_text() == engine
    cuts = [json.loads((run / "plan.json").read_text())["micro_batches"] for run in runs.values()]
    assert cuts[0] == cuts[1]
    assert (cuts[0]["tokens"] is not None) == by_tokens
    assert losses(runs["parts"]) == losses(runs["whole"])
    first, other = (tensors(run / "adapter") for run in runs.values())
    assert all(first[key].equal(other[key]) for key in first)
    if strategy == "zero2":  # bit for bit, or exit code 2
        again = start(world, "reproduce", RUN=str(runs["whole"]))
        assert again.returncode == 0, again.stdout + again.stderr
        assert (runs["whole"].with_name(f"{runs['whole'].name}-reproduced") / "deepspeed.json").read_text() == engine


@needs_deepspeed
@pytest.mark.slow
def test_zero_that_cannot_go_on_says_so_before_loading_and_is_consolidated(world):
    name = "zero"
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora"]
    begun = start(
        world,
        "train-distributed",
        *words,
        f"output.name={name}",
        "train.stop_after_steps=2",
        STRATEGY="zero2",
        NPROC="2",
    )
    assert begun.returncode == 0, begun.stdout + begun.stderr
    for given in ({"STRATEGY": "single", "NPROC": "1"}, {"STRATEGY": "zero3"}, {"NPROC": "2", "STRATEGY": "ddp"}):
        answer = start(world, "resume", *words, RUN=name, **given)
        assert answer.returncode == 2, answer.stdout + answer.stderr
        assert "DeepSpeed's checkpoints (zero2) are resumed only in their own layout" in answer.stderr
        assert "resume with STRATEGY=zero2" in answer.stderr
    run = world / "outputs" / name
    answer = start(world, "consolidate", RUN=str(run))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    saved, made = (tensors(folder) for folder in (run / "checkpoints" / "checkpoint-2", run / "consolidated-2"))
    assert set(saved) == set(made)
    assert all((saved[key] - made[key]).abs().max() == 0 for key in saved)
    again = start(world, "consolidate", RUN=str(run))
    assert again.returncode == 2
    assert "exists" in again.stderr


def tensors(folder: Path):
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow
def test_dropout_differs_between_ranks_and_weights_begin_alike(world):
    """Random states of a checkpoint with dropout differ by rank; DDP's ranks would diverge if the weights did."""
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora", "tuning.lora.dropout=0.3", "output.name=dropout"]
    answer = start(world, "train-distributed", *words, "train.stop_after_steps=1", STRATEGY="ddp", NPROC="2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    checkpoint = world / "outputs" / "dropout" / "checkpoints" / "checkpoint-1"
    states = [(checkpoint / f"rng_state_{rank}.pth").read_bytes() for rank in range(2)]
    assert states[0] != states[1]


def test_saved_weights_that_are_not_the_models_are_found(tmp_path):
    import torch
    from safetensors.torch import save_file

    from sft_play.training.checkpoints.model_saving import check_saved_weights

    def check(tensors, expected, **options):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        return check_saved_weights(tmp_path, expected_shapes=expected, **options)

    a, b = "x.lora_A.weight", "x.lora_B.weight"
    shapes = {a: (4, 8), b: (8, 4)}
    good = {a: torch.ones(4, 8), b: torch.ones(8, 4)}
    assert check(good, shapes, must_have_learned=True) == 256
    with pytest.raises(ModelError, match=r"x.lora_A.weight has the shape \(0,\) and not \(4, 8\)"):
        check({**good, a: torch.ones(0)}, shapes)  # what ZeRO-3 saves where nothing is gathered
    with pytest.raises(ModelError, match="has the shape"):
        check({**good, a: torch.ones(2, 8)}, shapes)  # a rank's part
    with pytest.raises(ModelError, match="it holds 32 of 64 values"):
        check({a: torch.ones(4, 8)}, shapes)
    with pytest.raises(ModelError, match="every lora_B of the adapter is zero"):
        check({**good, b: torch.zeros(8, 4)}, shapes, must_have_learned=True)
    with pytest.raises(ModelError, match="not finite"):
        check({**good, b: torch.full((8, 4), float("nan"))}, shapes)
    # the hub's names, experts apart: as many numbers under other names are the model
    check({"y": torch.ones(8, 8)}, shapes)
