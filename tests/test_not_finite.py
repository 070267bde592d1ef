"""A step that is not finite changes nothing, and no checkpoint holds a value that is not: nothing good is lost."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft_play.training.checkpoints import checkpoints
from sft_play.training.loop import callbacks as finite
from sft_play.training.loop.loop import PlannedLoop
from tests import warm
from tests.test_distributed import start
from tests.test_train import assert_same_bits, losses, metrics, run_yaml, train, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
PRECISION = {"fp32": "train.bf16=false", "bf16": "train.bf16=true"}


def spoil(monkeypatch, steps: dict[int, float], *, loss: bool = False) -> None:
    """Puts a value into one gradient, or into the loss, of some steps, counted from 1."""
    real = PlannedLoop.training_step

    def spoiled(self, model, inputs, *args, **options):
        value = steps.get(self.state.global_step + 1)
        result = real(self, model, inputs, *args, **options)
        if value is None or not inputs:
            return result
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        trained[len(trained) // 2].grad.view(-1)[0] = value
        return result * value if loss else result

    monkeypatch.setattr(PlannedLoop, "training_step", spoiled)


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"checkpoint-{step}" / "adapter_model.safetensors")


def complete(folder: Path) -> list[str]:
    return [path.name for path in checkpoints.complete_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_step_that_is_not_finite_stops_the_run_with_the_last_good_checkpoint(train, monkeypatch, clipping):  # noqa: F811
    same = ["tuning.mode=lora", "train.max_steps=8", "train.logging_steps=20", "train.save_steps=2"]
    same += [f"train.bf16={str(clipping == 1).lower()}", f"train.max_grad_norm={clipping}"]
    with monkeypatch.context() as patch:
        spoil(patch, {5: math.nan})
        code, printed, folder = train("one", *same)
    assert code == 2, printed
    assert re.search(r"step 5: the gradient norm is nan.*train\.on_nan=skip.*checkpoint is that of step 4", printed)
    assert complete(folder) == ["checkpoint-2", "checkpoint-4"]
    code, printed, _ = train("one", *same, "train.on_nan=skip", verb="resume")  # what the message advises
    assert (code, "Resuming bnb run from step 4" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("precision", "value", "optim"), [("fp32", math.inf, "adafactor"), ("bf16", math.nan, "adamw_torch_fused")]
)
def test_a_skipped_step_changes_nothing(train, monkeypatch, precision, value, optim):  # noqa: F811
    same = ["train.max_steps=4", "train.save_steps=1", "train.save_total_limit=null", "train.on_nan=skip"]
    same += ["tuning.mode=lora", "train.weight_decay=0.1", PRECISION[precision], f"train.optim={optim}"]
    spoil(monkeypatch, {3: value})
    code, printed, folder = train("one", *same)
    assert code == 0, printed
    assert f"Step 3 skipped: the gradient norm is {value}" in printed or "the gradient norm is nan" in printed
    before, after, end = (saved(folder, step) for step in (2, 3, 4))
    assert_same_bits(before, after)
    assert any(not torch.equal(end[name], after[name]) for name in end)
    optimizers, schedulers = (
        [torch.load(folder / "checkpoints" / f"checkpoint-{step}" / name, weights_only=True) for step in (2, 3)]
        for name in ("optimizer.pt", "scheduler.pt")
    )
    torch.testing.assert_close(*(one["state"] for one in optimizers), rtol=0, atol=0)
    assert [one["last_epoch"] for one in schedulers] == [2, 2]
    assert len(losses(folder)) == 4  # its loss was finite
    assert all(torch.isfinite(tensor).all() for tensor in weights(folder).values())
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == 1


def test_the_loss_of_a_skipped_step_is_not_in_the_mean(train, monkeypatch):  # noqa: F811
    same = ["tuning.mode=lora", "train.max_steps=4", "train.lr_scheduler_type=constant", "train.on_nan=skip"]
    spoil(monkeypatch, {2: math.nan}, loss=True)
    each = losses(train("each", *same)[2])
    _, printed, folder = train("mean", *same, "train.logging_steps=2")
    assert "Step 2 skipped: the loss is nan" in printed
    assert train("mean-of-four", *same, "train.logging_steps=4")[0] == 0
    assert len(each) == 3  # the second step has none
    for name in ("mean", "mean-of-four"):  # the first step is logged by itself
        assert losses(folder.with_name(name)) == pytest.approx([each[0], (each[1] + each[2]) / 2])


def test_steps_that_are_all_bad_end_the_run(train, monkeypatch):  # noqa: F811
    spoil(monkeypatch, dict.fromkeys(range(3, 99), math.nan))
    same = ["tuning.mode=lora", "train.on_nan=skip", "train.save_steps=1"]
    code, printed, folder = train("one", *same, "train.max_steps=20")
    assert code == 2
    most = finite.MAX_SKIPPED_STEPS
    assert f"step {2 + most}: the gradient norm is nan, and the {most - 1} steps before it were skipped" in printed
    assert printed.count(" skipped: the gradient norm is nan; ") == most - 1
    assert all(torch.isfinite(t).all() for t in saved(folder, 2 + most - 1).values())
    spoil(monkeypatch, {1: math.nan, 2: math.nan})
    code, printed, _ = train("short", *same, "train.max_steps=2")
    assert (code, "all 2 steps had values that are not finite: nothing was learned" in printed) == (2, True)


@pytest.mark.parametrize(("precision", "what"), [("bf16", "weight"), ("fp32", "state")])
def test_values_that_are_not_finite_reach_no_checkpoint(train, monkeypatch, precision, what):  # noqa: F811
    """However they came: here after the step, where no gradient shows them."""
    real = PlannedLoop._save_checkpoint

    def spoiled(self, *args, **options):
        if self.state.global_step == 3:
            parameter = next(one for one in self.model.parameters() if one.requires_grad)
            tensor = parameter if what == "weight" else self.optimizer.state[parameter]["exp_avg"]
            tensor.data.view(-1)[-1] = math.inf
        return real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PlannedLoop, "_save_checkpoint", spoiled)
        same = ["tuning.mode=lora", "train.max_steps=6", "train.save_steps=1", "train.save_total_limit=1"]
        code, printed, folder = train("one", *same, PRECISION[precision])
    named = "lora_A" if what == "weight" else "the optimizer's exp_avg"
    assert (code, named in printed, "so no checkpoint is written" in printed) == (2, True, True), printed
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert train("one", *same, PRECISION[precision], verb="resume")[0] == 0


RANKS = """
import math, os


def spoil(spoiled):
    from sft_play.training.loop import loop

    real = loop.PlannedLoop.training_step

    def instead(self, model, inputs, *args, **options):
        if self.state.global_step + 1 not in spoiled:
            return real(self, model, inputs, *args, **options)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        if hasattr(trained[-1], "to_local"):  # FSDP2 sets gradients without a hook's being called
            loss = real(self, model, inputs, *args, **options)
            for one in trained:
                if one.grad is not None:
                    one.grad.to_local().view(-1)[:1] = math.nan
            return loss
        hook = trained[-1].register_hook(lambda gradient: gradient * math.nan)
        try:
            return real(self, model, inputs, *args, **options)
        finally:
            hook.remove()

    loop.PlannedLoop.training_step = instead


if os.environ.get("RANK") == "1":
    spoil({int(step) for step in os.environ["SPOILED"].split()})
"""
"""sitecustomize.py: the second rank's gradient of one tensor is NaN in some steps."""


@pytest.mark.parametrize(("strategy", "precision"), [
    ("ddp", "fp32"), pytest.param("fsdp", "bf16", marks=pytest.mark.slow),
    pytest.param("zero2", "bf16", marks=needs_deepspeed),
    pytest.param("zero3", "bf16", marks=[needs_deepspeed, pytest.mark.slow]),
])  # fmt: skip
def test_all_ranks_leave_a_step_out_where_one_of_them_is_not_finite(world, strategy, precision):
    name = f"{strategy}-{precision}"
    words = ["--config", f"{world}/run.yaml", "tuning.mode=lora", PRECISION[precision], "train.save_steps=1"]
    words += ["train.save_total_limit=null", f"output.name={name}"]

    def begun(python: str, command: str, *more: str, spoiled: str = "", **environ: str) -> tuple[int, str]:
        kept = {"STRATEGY": strategy, "NPROC": "2", "SPOILED": spoiled, **environ}
        answer = start(world, command, *words, *more, limit_s=550, python=python, **kept)
        return answer.returncode, answer.stdout + answer.stderr

    code, printed = begun(sys.executable, "train-distributed", spoiled="3")  # ranks that fail: not by forks
    assert code == 2, printed
    assert "step 3: the gradient norm is" in printed
    assert "the last checkpoint is that of step 2" in printed
    folder = world / "outputs" / name
    assert complete(folder) == ["checkpoint-1", "checkpoint-2"]
    code, printed = begun(warm.python(), "resume", "train.on_nan=skip", RUN=name, spoiled="3")
    assert (code, "from step 2" in printed) == (0, True), printed
    assert printed.count("Step 3 skipped: the gradient norm is") == 1
    assert_same_bits(saved(folder, 2), saved(folder, 3))
    assert all(torch.isfinite(tensor).all() for tensor in weights(folder).values())
    rates = {line["step"]: line["learning_rate"] for line in metrics(folder) if "learning_rate" in line}
    assert rates[4] == rates[3] > rates[5]  # a skipped step moves no schedule
    assert {line["step"] for line in metrics(folder) if "loss" in line} == {1, 2, 3, 4, 5}
