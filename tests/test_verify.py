"""verify-layouts: how runs are compared, and, in the slow tier, the whole table."""

import json
import math

import pytest
import torch

from benchmarks.verify import layouts
from benchmarks.verify.layouts import TOLERANCES, LayoutCase, LayoutTable, _largest_difference, _LayoutBench
from benchmarks.verify.weights import compare_tensors

pytestmark = pytest.mark.build


def test_the_change_of_weights_is_compared_by_its_own_size_and_losses_at_every_step():
    start = {"a": torch.zeros(4), "b": torch.zeros(2)}
    one = {"a": torch.tensor([3.0, 0.0, 0.0, 4.0]), "b": torch.zeros(2)}
    # |dw1| = 5; the other is 0.5 away in one place: 0.1
    other = {"a": torch.tensor([3.0, 0.5, 0.0, 4.0]), "b": torch.zeros(2)}
    found = compare_tensors(start, one, other)
    assert (found.tensor, found.largest) == ("a", pytest.approx(0.1))
    assert compare_tensors(start, one, one).largest == 0.0
    for far in ({**one, "b": torch.ones(2)}, {"a": one["a"]}, {**one, "a": torch.full((4,), float("nan"))}):
        assert compare_tensors(start, one, far).largest == math.inf
    assert _largest_difference([2.0, 4.0], [2.0, 4.2]) == pytest.approx(0.05)
    assert _largest_difference([2.0, 4.0], [2.0]) == math.inf
    assert not LayoutTable().ok


@pytest.mark.parametrize(("variables", "message"), [
    ({"LAYOUTS": "ddp,nothing"}, "LAYOUTS=nothing is not one of: ddp, fsdp, fsdp_cp"),
    ({"MODES": "dora"}, "MODES=dora is not one of: full, lora, qlora"),
    ({"STEPS": "none"}, "STEPS=none is not a number"), ({"CONFIG": "/nowhere.yaml"}, "/nowhere.yaml"),
    ({"HARDWARE": "2xH200"}, "HARDWARE=2xH200"),
])  # fmt: skip
def test_what_cannot_be_compared_is_one_message(refuse, monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in refuse("verify-layouts")


@pytest.mark.slow
def test_a_run_that_trains_another_model_is_found(monkeypatch, tmp_path, command):
    honest = _LayoutBench.settings

    def cheating(self, case, *, start):
        return [*honest(self, case, start=start), *["train.learning_rate=3e-3"] * (case.ranks == 2 and not start)]

    cases = [LayoutCase("ddp", 2, "lora", 1)]
    monkeypatch.setattr(_LayoutBench, "settings", cheating)
    monkeypatch.setattr(layouts, "_cases", lambda hardware, mode, bf16: cases)
    monkeypatch.setattr(_LayoutBench, "may_add_bf16", False)
    words = ["verify-layouts", "--modes", "lora", "--layouts", "ddp", "--steps", "2", "--out", f"{tmp_path}/v.json"]
    code, printed = command(*words)
    assert code == 1, printed
    (row,) = json.loads((tmp_path / "v.json").read_text())
    assert (row["layout"], row["ranks"], row["ok"], "DIFFERS" in printed) == ("ddp", 2, False, True)
    assert row["max_rel_loss_diff"] > 1e-5
    assert row["engine_proof"]["wrapped_class"] == "DistributedDataParallel"


@pytest.mark.slow
def test_every_layout_trains_the_same_model(succeed, tmp_path):
    succeed("verify-layouts", "--out", f"{tmp_path}/v.json")
    rows = json.loads((tmp_path / "v.json").read_text())
    assert all(row["max_rel_loss_diff"] <= 1e-5 for row in rows if row["dtype"] in ("fp32", "nf4"))
    layouts_of = {"single", "ddp", "fsdp", "fsdp_hybrid", "zero2", "zero3", "zero3_offload"}
    assert {row["layout"] for row in rows} == layouts_of
    assert {row["mode"] for row in rows} == {"full", "lora", "qlora"}
    for row in rows:
        assert row["engine_proof"]["layout"] == row["layout"]
        assert len(row["engine_proof"]["bytes_by_rank"]) == row["ranks"]
    assert TOLERANCES["fp32"].loss == 1e-5
