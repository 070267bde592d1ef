"""The output head and its loss take what is planned, on a CPU and on a GPU, in training and in evaluation: measured in
a process, counted on real tensors, and traced."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.facts.models.decoder import parse_config
from sft_play.planner.memory.block import WORD_TILE
from sft_play.planner.memory.estimate import estimate
from sft_play.planner.memory.step_memory import LossName, Step
from sft_play.planner.precision import Precision
from tests.conftest import clean_environment

pytestmark = pytest.mark.build
PRECISIONS = (Precision("float32", "float32", ""), Precision("bfloat16", "bfloat16", ""))
TOLERANCE = 0.025
"""The small tensors of a step, which are not counted one by one, and rests of a GPU's segments, which are."""


def config_json(draw: random.Random, *, words: tuple[int, int], tied: bool) -> dict[str, Any]:
    """A model whose vocabulary outweighs its width, or not."""
    kind, hidden = draw.choice(("llama", "gemma2")), 32 * draw.randint(1, 20)
    return {
        "model_type": kind, "architectures": [""], "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "head_dim": 32, "num_hidden_layers": 1, "num_attention_heads": hidden // 32, "num_key_value_heads": 1,
        "vocab_size": draw.randint(*words), "max_position_embeddings": 8192,
        "tie_word_embeddings": tied and draw.random() < 0.5, "sliding_window": 8192,
        **({"final_logit_softcapping": 30.0} if kind == "gemma2" else {}),
    }  # fmt: skip


def drawn(seed: int, *, evaluates: bool, on_gpu: bool, loss: LossName) -> tuple[dict[str, Any], Any, Precision, Step]:
    draw = random.Random(seed)
    # of a tile that is wider than the vocabulary a process has only the pages that it touches
    words = (WORD_TILE if not on_gpu else 2_000, 90_000) if loss == "chunked" else (3_000, 20_000)
    model = config_json(draw, words=words, tied=loss == "chunked")
    mode, precision = draw.choice(("lora", "full")), PRECISIONS[seed % 2]
    rows, length = draw.choice((1, 2, 4)), draw.randint(50, 90)
    step = Step(
        1 if evaluates else rows, 1, length, attention="eager", masks=False, saves=False, on_gpu=on_gpu, loss=loss,
        eval_batch=2 * rows if evaluates else 0, checkpointed_layers=0,
    )  # fmt: skip
    config = config_from_text(f"model: {{name: m}}\ntuning: {{mode: {mode}}}\n", name="x")
    return model, config, precision, step


@pytest.mark.parametrize("loss", ["chunked", "logits"])
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "training"])
@pytest.mark.parametrize("seed", range(4))
def test_a_cpu_holds_in_the_head_what_is_planned(seed: int, evaluates: bool, loss: LossName) -> None:
    """TRL's own code on real tensors, on tensors without bytes, and the estimate."""
    from sft_play.trace.confirm import settings_of
    from sft_play.trace.step import record

    model, config, precision, step = drawn(seed, evaluates=evaluates, on_gpu=False, loss=loss)
    shape = parse_config(model, name="m")
    predicted = estimate(config, shape, precision, step)
    settings = settings_of(config, model, shape, precision, step)
    real, traced = (record(settings, real=is_real).peak for is_real in (True, False))
    assert traced == pytest.approx(real, rel=1e-3)
    assert predicted.allocated == pytest.approx(real, rel=TOLERANCE), predicted.moments


@pytest.mark.parametrize("loss", ["chunked", "logits"])
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "training"])
@pytest.mark.parametrize("seed", range(4))
def test_a_gpu_holds_in_the_head_what_is_planned(seed: int, evaluates: bool, loss: LossName) -> None:
    """Triton's kernels read a tile where it lies: nothing of its size is beside it."""
    from sft_play.trace.confirm import settings_of
    from sft_play.trace.step import trace_step

    model, config, precision, step = drawn(seed, evaluates=evaluates, on_gpu=True, loss=loss)
    shape = parse_config(model, name="m")
    predicted = estimate(config, shape, precision, step)
    traced = trace_step(settings_of(config, model, shape, precision, step)).allocated
    assert predicted.allocated == pytest.approx(traced, rel=TOLERANCE), predicted.moments
