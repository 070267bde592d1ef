"""`train.learning_rate: auto` follows its rule, and an explicit value is never changed."""

import math
import random

import pytest

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan


def run(mode="lora", rows=32, r=16, alpha=32, rslora=False, more=""):
    lora = f"{{r: {r}, alpha: {alpha}, use_rslora: {str(rslora).lower()}}}"
    return config_from_text(
        f"model: {{name: Qwen/Qwen2.5-0.5B}}\ntuning: {{mode: {mode}, lora: {lora}}}\n"
        f"train: {{effective_batch_size: {rows}{more}}}\n", name="run",
    )  # fmt: skip


def by_hand(mode, rows, r, alpha, rslora):
    """The rule once more: in halves of the square root's exponent, from the rate at 32 rows."""
    scale = alpha / math.sqrt(r) if rslora else alpha / r
    at_32 = 1e-5 if mode == "full" else 2e-4 / max(1.0, scale * r / 32)
    return at_32 * 2 ** (0.5 * math.log2(sorted((16, rows, 128))[1] / 32))


def test_auto_is_the_rule_on_random_runs():
    draw = random.Random(7)
    for _ in range(300):
        drawn = (
            draw.choice(["qlora", "lora", "full"]), draw.choice([1, 7, 16, 17, 32, 64, 128, 500]),
            draw.choice([1, 4, 16, 64, 256]), draw.choice([1, 8, 32, 33, 64, 512]), draw.random() < 0.3,
        )  # fmt: skip
        assert run(*drawn).learning_rate == pytest.approx(by_hand(*drawn), rel=0.006), drawn  # three digits


def test_the_defaults_are_what_they_were_and_rank_alone_changes_nothing():
    assert (run().learning_rate, run("full").learning_rate) == (2e-4, 1e-5)
    assert {run(r=r).learning_rate for r in (1, 16, 256)} == {2e-4}
    # the incident: r 256 with alpha 512, its scale as usual, diverges at 2e-4
    assert run(r=256, alpha=512).learning_rate == 1.25e-5


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_plan_says_the_rate_and_why(mode):
    def reasons(config):
        return make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), parse_hardware("H100"))).reasons

    (said,) = [line for line in reasons(run(mode, alpha=64)) if line.startswith("learning rate")]
    expected = "1e-05 (auto): 2e-05 at 128" if mode == "full" else "0.0001 (auto)"
    assert said.startswith(f"learning rate {expected}")
    assert ("x 32/64, since" in said) == (mode == "lora")
    given = run(mode, alpha=512, more=", learning_rate: 0.5")
    assert given.learning_rate == 0.5
    assert not [line for line in reasons(given) if line.startswith("learning rate")]
