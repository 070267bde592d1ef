"""A run that was stopped goes on under its own ranks, under others, and under one process, as if it had not been; one
that was killed before its first step starts from the beginning."""

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sft_play.errors import ModelError
from sft_play.training.checkpoints.model_saving import check_saved_weights
from tests.conftest import ROOT
from tests.models import uneven_run
from tests.test_distributed import losses, start

pytestmark = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")


def done(world: Path, *words: str, **given: str) -> str:
    """What a command prints that ends well."""
    answer = start(world, *words, **given)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def killed(world: Path, *words: str, **given: str) -> None:
    """Starts a command, which ends by the signal that kills it."""
    answer = start(world, *words, **given)
    assert answer.returncode not in (0, 2), answer.stdout + answer.stderr


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
        done(world, "train", "--config", f"{world}/run.yaml", f"tuning.mode={mode}", f"output.name=unbroken-{mode}")
        return losses(world / "outputs" / f"unbroken-{mode}")

    return run


KILL = """
import importlib, os, signal, sys
module, _, name = os.environ.get("KILL_AT", "").partition(":")
if module and os.environ.get("RANK", "0") == "0" and not sys.flags.safe_path:  # the process of templates has -P
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


DDP, FSDP, ZERO2 = ({"NPROC": "2", "STRATEGY": name} for name in ("ddp", "fsdp", "zero2"))


@pytest.mark.parametrize(("command", "moment", "files", "given"), [
    ("train", "run:train_stage", {"manifest.json"}, {}),  # the data is recorded, and nothing is loaded
    ("train-distributed", "run:prepare_stages", {"launch.json"}, FSDP),  # no data recorded
    # everything is loaded
    pytest.param("train", "run:_run_training_loop", {"manifest.json"}, {}, marks=pytest.mark.slow),
    pytest.param("train-distributed", "run:_run_training_loop", {"launch.json"}, DDP, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_that_is_killed_while_it_starts_is_started_again(world, unbroken, killing, command, moment, files, given):
    name = f"killed-{command}-{moment.partition(':')[2]}"
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora"]
    at = f"sft_play.training.{moment}"
    killed(world, command, *words, f"output.name={name}", PYTHONPATH=killing, KILL_AT=at, **given)
    run = world / "outputs" / name
    assert {path.name for path in run.iterdir()} >= files
    # as a batch system starts a job again that was preempted: the same words, and the folder is to be resumed
    same = [*words, f"output.name={name}", "output.if_exists=resume"]
    killed(world, command, *same, PYTHONPATH=killing, KILL_AT=at, **given)
    assert "no step was trained, so the run starts from the beginning" in done(world, "resume", *words, RUN=name)
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
    killed(world, command, *words, PYTHONPATH=killing, KILL_AT=at, **given)
    run = world / "outputs" / name
    before = losses(run)
    done(world, command, *words, "output.if_exists=resume", **given)
    assert losses(run) == before
    assert len(before) == json.loads((run / "summary.json").read_text())["steps"] == steps
    last = load_file(run / "checkpoints" / f"checkpoint-{steps}" / "adapter_model.safetensors")
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(bool((saved[key] == value).all()) for key, value in last.items())


def test_what_has_not_trained_starts_with_the_settings_of_now(world, killing):
    words = ["--config", f"{world}/run.yaml", "output.name=changed"]
    killed(world, "train", *words, PYTHONPATH=killing, KILL_AT="sft_play.training.run:train_stage")
    other = ["tuning.mode=lora", "train.seed=7", "train.effective_batch_size=6", "train.max_steps=1"]
    done(world, "train-distributed", *words, *other, "output.if_exists=resume", NPROC="3", STRATEGY="ddp")
    run = world / "outputs" / "changed"
    assert json.loads((run / "resolved.json").read_text())["train"]["seed"] == 7
    batch = json.loads((run / "manifest.json").read_text())["batch"]
    assert (batch["micro_batch"] * batch["grad_accum"], batch["ranks"]) == (2, 3)
    # what has trained keeps its settings
    refused = start(world, "resume", "--config", f"{world}/run.yaml", "tuning.mode=lora", RUN="changed")
    assert "is finished" in refused.stderr


def logits(run: Path, mode: str, base: Path):
    """What the saved model says to the same tokens, loaded as anybody would load it."""
    model = AutoModelForCausalLM.from_pretrained(run / "model" if mode == "full" else base)
    model = model if mode == "full" else PeftModel.from_pretrained(model, run / "adapter")
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40).unsqueeze(0)).logits


@pytest.mark.parametrize(("mode", "first", "then"), [
    ("full", ("fsdp", 2), ("", 1)), pytest.param("lora", ("", 1), ("fsdp", 2), marks=pytest.mark.slow),
    pytest.param("lora", ("ddp", 2), ("fsdp", 4), marks=pytest.mark.slow),
    pytest.param("full", ("ddp", 2), ("", 1), marks=pytest.mark.slow),
    pytest.param("full", ("fsdp", 4), ("ddp", 2), marks=pytest.mark.slow),
    pytest.param("lora", ("zero2", 2), ("zero2", 2), marks=[needs_deepspeed, pytest.mark.slow]),
    pytest.param("full", ("zero3", 2), ("zero3", 2), marks=[needs_deepspeed, pytest.mark.slow]),
])  # fmt: skip
def test_losses_go_on_as_if_it_had_not_stopped(world, unbroken, tiny_llama, mode, first, then):
    """Two steps are in the middle of the first epoch; the third ends it with its uneven rest."""
    name = f"{mode}-{'-'.join(map(str, (*first, *then)))}"
    words = ["--config", f"{world}/run.yaml", f"tuning.mode={mode}"]
    command = "train" if first[1] == 1 else "train-distributed"
    given = {"STRATEGY": first[0], "NPROC": str(first[1])} if first[1] > 1 else {}
    done(world, command, *words, f"output.name={name}", "train.stop_after_steps=2", **given)
    given = {"NPROC": str(then[1])} | ({"STRATEGY": then[0]} if then[0] else {})
    run, said = world / "outputs" / name, done(world, "resume", *words, RUN=name, **given)
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
@pytest.mark.parametrize(("strategy", "own_file", "by_tokens"), [
    ("zero2", None, True),
    pytest.param("zero3", None, True, marks=pytest.mark.slow),
    pytest.param("zero2", OWN_FILE, False, marks=pytest.mark.slow),  # its micro-batch is the user's, in rows
])  # fmt: skip
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
        done(world, "train-distributed", *words, f"output.name={runs[name].name}", *more, **given)
    (tmp_path / "mine.json").unlink(missing_ok=True)
    engine = (runs["whole"] / "deepspeed.json").read_text()
    assert "contradicts" not in done(world, "resume", *words, RUN=runs["parts"].name)
    assert (runs["parts"] / "deepspeed.json").read_text() == engine
    cuts = [json.loads((run / "plan.json").read_text())["micro_batches"] for run in runs.values()]
    assert cuts[0] == cuts[1]
    assert (cuts[0]["tokens"] is not None) == by_tokens
    assert losses(runs["parts"]) == losses(runs["whole"])
    first, other = (tensors(run / "adapter") for run in runs.values())
    assert all(first[key].equal(other[key]) for key in first)
    if strategy == "zero2":  # bit for bit, or exit code 2
        done(world, "reproduce", RUN=str(runs["whole"]))
        assert (runs["whole"].with_name(f"{runs['whole'].name}-reproduced") / "deepspeed.json").read_text() == engine


@needs_deepspeed
@pytest.mark.slow
def test_zero_that_cannot_go_on_says_so_before_loading_and_is_consolidated(world):
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora"]
    done(world, "train-distributed", *words, "output.name=zero", "train.stop_after_steps=2", **ZERO2)
    for given in ({"STRATEGY": "single", "NPROC": "1"}, {"STRATEGY": "zero3"}, {"NPROC": "2", "STRATEGY": "ddp"}):
        answer = start(world, "resume", *words, RUN="zero", **given)
        assert answer.returncode == 2, answer.stdout + answer.stderr
        assert "DeepSpeed's checkpoints (zero2) are resumed only in their own layout" in answer.stderr
        assert "resume with STRATEGY=zero2" in answer.stderr
    run = world / "outputs" / "zero"
    done(world, "consolidate", RUN=str(run))
    saved, made = (tensors(folder) for folder in (run / "checkpoints" / "checkpoint-2", run / "consolidated-2"))
    assert set(saved) == set(made)
    assert all((saved[key] - made[key]).abs().max() == 0 for key in saved)
    again = start(world, "consolidate", RUN=str(run))
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def tensors(folder: Path):
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow
def test_dropout_differs_between_ranks_and_weights_begin_alike(world):
    """Random states of a checkpoint with dropout differ by rank; DDP's ranks would diverge if the weights did."""
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora", "tuning.lora.dropout=0.3", "output.name=dropout"]
    done(world, "train-distributed", *words, "train.stop_after_steps=1", STRATEGY="ddp", NPROC="2")
    checkpoint = world / "outputs" / "dropout" / "checkpoints" / "checkpoint-1"
    states = [(checkpoint / f"rng_state_{rank}.pth").read_bytes() for rank in range(2)]
    assert states[0] != states[1]


def test_saved_weights_that_are_not_the_models_are_found(tmp_path):
    def check(tensors, expected, **options):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        return check_saved_weights(tmp_path, expected_shapes=expected, **options)

    a, b = "x.lora_A.weight", "x.lora_B.weight"
    shapes = {a: (4, 8), b: (8, 4)}
    good = {a: torch.ones(4, 8), b: torch.ones(8, 4)}
    assert check(good, shapes, must_have_learned=True) == 256
    for spoiled, said in (
        ({a: torch.ones(0)}, r"x.lora_A.weight has the shape \(0,\) and not \(4, 8\)"),  # of ZeRO-3, not gathered
        ({a: torch.ones(2, 8)}, "has the shape"),  # a rank's part
        ({b: torch.zeros(8, 4)}, "every lora_B of the adapter is zero"),
        ({b: torch.full((8, 4), float("nan"))}, "not finite"),
    ):
        with pytest.raises(ModelError, match=said):
            check({**good, **spoiled}, shapes, must_have_learned=True)
    with pytest.raises(ModelError, match="it holds 32 of 64 values"):
        check({a: torch.ones(4, 8)}, shapes)
    # the hub's names, experts apart: as many numbers under other names are the model
    check({"y": torch.ones(8, 8)}, shapes)
