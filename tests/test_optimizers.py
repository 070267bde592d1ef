"""8-bit AdamW, Lion and Muon: planned with their bytes, stepped as they are defined, resumed bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError
from sft_play.training.loop.optimizers import MuonWithAdamW, muon_matrices, stochastic_rounding_class
from tests.test_add_tokens import check_trace
from tests.test_distributed import succeed
from tests.test_train import assert_resumes, assert_same_bits, losses, run_yaml, train, trained  # noqa: F401

pytestmark = pytest.mark.build

NEW = ("adamw_8bit", "lion_32bit", "lion_8bit", "muon")
RUNS = [(optim, mode) for optim in NEW for mode in ("full", "lora") if (optim, mode) != ("muon", "lora")]


@pytest.mark.parametrize("bf16", ["true", "false"])
@pytest.mark.parametrize(("optim", "mode"), RUNS)
def test_a_run_learns_and_resumes_to_the_same_bits(trained, optim, mode, bf16):  # noqa: F811
    given = (f"train.optim={optim}", f"tuning.mode={mode}", f"train.bf16={bf16}", "train.max_steps=4",
             "train.save_steps=2", "train.learning_rate=3e-3")  # fmt: skip
    if (mode, bf16) == ("full", "true"):
        given = (*given, "train.weight_updates=stochastic")
    whole, _ = assert_resumes(trained, *given)
    assert losses(whole)[-1] < losses(whole)[0]


def as_published(weight, gradients, *, lr, decay):
    """Muon in fp64, from its paper: momentum 0.95 with Nesterov, five Newton-Schulz steps, 0.2 sqrt(longest side)."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        x = 0.05 * gradient.double() + 0.95 * momentum
        flip = x.shape[0] > x.shape[1]
        x = x.T if flip else x
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        x = x.T if flip else x
        weight = weight * (1 - lr * decay) - lr * 0.2 * max(weight.shape) ** 0.5 * x
    return weight


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wide, self.tall = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self):
        return self.head


def stepped(dtype, kind=MuonWithAdamW, steps=3, **options):
    torch.manual_seed(0)
    model = Tiny().to(dtype)
    names = {one: name for name, one in model.named_parameters()}
    matrices = muon_matrices(model)
    before = {name: one.detach().clone() for one, name in names.items()}
    optimizer = kind(
        [{"params": list(names)[:3], "weight_decay": 0.1}, {"params": list(names)[3:], "weight_decay": 0.1}],
        matrices=matrices, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, **options,
    )  # fmt: skip
    gradients = {name: [torch.randn(one.shape).to(dtype) for _ in range(steps)] for one, name in names.items()}
    for step in range(steps):
        for one, name in names.items():
            one.grad = gradients[name][step].clone()
        optimizer.step()
    return before, gradients, {name: one.detach() for one, name in names.items()}, {names[one] for one in matrices}


def test_muon_steps_matrices_as_published_and_adamw_the_rest():
    before, gradients, after, matrices = stepped(torch.float32)
    assert matrices == {"wide.weight", "tall.weight"}
    rest = {name: nn.Parameter(before[name].clone()) for name in before if name not in matrices}
    plain = torch.optim.AdamW(rest.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(3):
        for name, one in rest.items():
            one.grad = gradients[name][step]
        plain.step()
    assert_same_bits({name: one.detach() for name, one in rest.items()}, {name: after[name] for name in rest})
    for name in matrices:
        wanted = as_published(before[name], gradients[name], lr=1e-2, decay=0.1)
        change = (wanted - before[name].double()).norm()
        assert (after[name].double() - wanted).norm() < 0.03 * change, name  # it orthogonalises in bf16


def test_muon_in_bf16_is_rounded_around_its_fp32_steps():
    torch.manual_seed(1)
    *_, whole, _ = stepped(torch.float32)
    *_, rounded, _ = stepped(torch.bfloat16, kind=stochastic_rounding_class(MuonWithAdamW), rounding_seed=3)
    for name, exact in whole.items():
        torch.testing.assert_close(rounded[name].float(), exact, rtol=0.05, atol=0.02)


def test_muon_without_full_training_is_refused():
    with pytest.raises(ConfigError, match=r"muon steps whole weight matrices, and tuning\.mode is qlora"):
        config_from_text("model: {name: x}\ntrain: {optim: muon}", name="run")


@pytest.mark.parametrize("optim", NEW)
def test_layouts_that_divide_weights_are_refused_by_name(command, run_yaml, monkeypatch, optim):  # noqa: F811
    for layout, mesh in (("fsdp", "[[2],[fsdp]]"), ("zero1", ""), ("zero3", ""), ("tp", "[[2],[tp]]")):
        for verb in ("plan", "check") if mesh else ("plan",):
            monkeypatch.setenv("STRATEGY", layout if verb == "plan" else "")
            given = ["tuning.mode=full", f"train.optim={optim}", *([f"model.mesh_shape={mesh}"] * (verb == "check"))]
            code, printed = command(verb, "--config", str(run_yaml), "--hardware", "2xH100", *given)
            assert (code, f"train.optim={optim}" in printed) == (2, True), printed


@pytest.mark.parametrize("optim", ["muon", "lion_8bit"])
def test_two_ranks_of_ddp_lose_what_one_process_does(tmp_path, tiny_llama, optim):
    from tests.models import uneven_run

    uneven_run(tmp_path, tiny_llama)
    words = ("tuning.mode=full", f"train.optim={optim}", "train.learning_rate=1e-3")
    for verb, name, more in (("train", "one", {}), ("train-distributed", "ddp", {"STRATEGY": "ddp", "NPROC": "2"})):
        succeed(tmp_path, verb, *words, f"output.name={name}", **more)
    one, ddp = (losses(tmp_path / "outputs" / name) for name in ("one", "ddp"))
    assert len(one) == 5
    assert ddp == pytest.approx(one, rel=2e-4)  # sums in another order move signs, and what is rounded to bf16


@pytest.mark.parametrize(("optim", "mode"), RUNS)
@pytest.mark.parametrize("wide", [True, False])
def test_the_plan_agrees_with_a_trace(optim, mode, wide):
    more = f"train: {{optim: {optim}}}"
    check_trace("Llama-3.2-1B", 1, 500, 1, None, mode=mode, more=more, within=0.01, wide=wide)
    if mode == "full" and not wide:
        check_trace("Llama-3.1-8B", 1, 300, 1, None, mode=mode, more=more, within=0.01)
