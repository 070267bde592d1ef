"""The output head and its loss take what is planned: measured in a process, counted on real tensors, and traced."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.registry import wide_config
from sft_play.models.config_json import parse_model_shape
from sft_play.planner.memory import estimate
from sft_play.planner.memory.block import VOCAB_TILE
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import LossName, Step, StepMemorySimulation
from sft_play.planner.precision import Precision
from sft_play.text import MIB
from sft_play.trace.confirm import load_planned_shape, step_settings
from sft_play.trace.step import record_step, trace_step
from tests.conftest import chat, clean_environment, write_rows, write_run
from tests.models import make_llama
from tests.test_estimate_and_trace import PRECISIONS, apart, run_of

pytestmark = pytest.mark.build
TOLERANCE = 0.025
"""The small tensors of a step, which are not counted one by one, and rests of a GPU's segments, which are."""


def config_json(draw: random.Random, *, words: tuple[int, int], tied: bool) -> dict[str, Any]:
    """A model whose vocabulary outweighs its width, or not."""
    kind, hidden = draw.choice(("llama", "gemma2")) if tied else "llama", 32 * draw.randint(1, 20)
    return {
        "model_type": kind, "architectures": [""], "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "head_dim": 32, "num_hidden_layers": 1, "num_attention_heads": hidden // 32, "num_key_value_heads": 1,
        "vocab_size": draw.randint(*words), "max_position_embeddings": 8192,
        "tie_word_embeddings": tied and draw.random() < 0.5, "sliding_window": 8192,
        **({"final_logit_softcapping": 30.0} if kind == "gemma2" else {}),
    }  # fmt: skip


def test_a_class_with_logits_of_its_own_is_measured_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModernBERT's decoder has a layer between its last block and its head: no formula knows what it holds."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    model = wide_config("modernbert-decoder") | {"vocab_size": 20_000}
    assert load_planned_shape(model, name="m").has_custom_logits
    for rows, evaluated in ((3, 0), (1, 5)):
        step = Step(
            rows, 1, 64, attention="eager", masks=True, saves=False, on_gpu=rows == 3, loss="logits",
            eval_batch=evaluated, checkpointed_layers=0,
        )  # fmt: skip
        assert abs(apart(model, "{mode: lora}", "adamw_torch_fused", PRECISIONS[0], step)) < TOLERANCE


@pytest.mark.parametrize(
    ("seed", "evaluates", "loss"),
    [(0, True, "chunked"), (1, False, "chunked"), (2, True, "logits"), (1, False, "logits")],
)
def test_a_cpu_holds_in_the_head_what_is_planned(seed: int, evaluates: bool, loss: LossName) -> None:
    """TRL's own code on real tensors, on tensors without bytes, and the estimate."""
    draw = random.Random(seed)
    # of a tile that is wider than the vocabulary a process has only the pages that it touches
    words = (VOCAB_TILE, 90_000) if loss == "chunked" else (3_000, 20_000)
    model = config_json(draw, words=words, tied=loss == "chunked")
    mode, precision = draw.choice(("lora", "full")), PRECISIONS[1 - seed % 2]
    rows, length = draw.choice((1, 2, 4)), draw.randint(50, 90)
    step = Step(
        1 if evaluates else rows, 1, length, attention="eager", masks=False, saves=False, on_gpu=False, loss=loss,
        eval_batch=2 * rows if evaluates else 0, checkpointed_layers=0,
    )  # fmt: skip
    config, shape = run_of(f"{{mode: {mode}}}"), parse_model_shape(model, name="m")
    predicted = estimate_memory(config, shape, precision, step)
    settings = step_settings(config, model, shape, precision, step)
    real, traced = (record_step(settings, uses_real_tensors=is_real).peak for is_real in (True, False))
    assert traced == pytest.approx(real, rel=1e-3)
    assert predicted.allocated == pytest.approx(real, rel=TOLERANCE), predicted.moments


@pytest.mark.parametrize(
    ("seed", "on_gpu", "copied"),
    [(0, True, True), (1, True, False), (2, False, True), (5, True, True), (3, False, False)],
)
def test_a_head_that_is_cast_is_cast_tile_by_tile_and_two_tiles_meet(seed: int, on_gpu: bool, copied: bool) -> None:
    """In the backward pass the next tile's weights are cast while the last one's are still held."""
    draw, precision = random.Random(seed), PRECISIONS[0] if copied else Precision("bfloat16", "float32", "")
    words = ((2_000, VOCAB_TILE), (VOCAB_TILE + 1, 2 * VOCAB_TILE), (2 * VOCAB_TILE, 120_000))[seed % 3]
    words = words if on_gpu else (VOCAB_TILE, 120_000)
    model = config_json(draw, words=words, tied=False) | {"hidden_size": 512, "num_attention_heads": 16}
    more = ", lora: {modules_to_save: [lm_head]}" if copied else ""
    config, shape = run_of(f"{{mode: lora{more}}}"), parse_model_shape(model, name="m")
    length = draw.randint(4_200, 6_000) if seed % 2 and on_gpu else draw.randint(50, 90)
    step = Step(1, 1, length, attention="sdpa", masks=False, saves=False, on_gpu=on_gpu, checkpointed_layers=0)
    predicted = estimate_memory(config, shape, precision, step)
    settings = step_settings(config, model, shape, precision, step)
    traced = trace_step(settings).allocated if on_gpu else record_step(settings).peak
    assert predicted.allocated == pytest.approx(traced, rel=0.013), predicted.moments


ALONE = """
import json, sys
import psutil, torch
from transformers import AutoConfig, AutoModelForCausalLM
from sft_play.training.model.fused_head import fused_head

fields, rows, length, dtype = json.loads(sys.argv[1])
level = psutil.Process().memory_info().rss
kind = fields.pop("model_type")
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=getattr(torch, dtype)).eval()
ids = torch.randint(0, fields["vocab_size"], (rows, length))
with torch.no_grad(), fused_head(model):
    model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False)
mark = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(int(mark.split()[1]) * 1024 - level)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the mark of resident memory is Linux's")
@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3))])
def test_a_process_has_resident_what_an_evaluation_is_planned_to_take(seed: int) -> None:
    """Few words touch few pages of a tile. Beside its tensors a process loads libraries and keeps freed blocks."""
    draw = random.Random(seed)
    model = config_json(draw, words=((30_000, 90_000), (1_000, 5_000))[seed % 2], tied=True)
    rows, length, precision = draw.randint(4, 8), draw.randint(50, 90), PRECISIONS[1 - seed // 2]
    step = Step(1, 1, length, attention="sdpa", masks=False, saves=False, on_gpu=False, eval_batch=rows)
    planned = estimate_memory(run_of("{mode: lora}"), parse_model_shape(model, name="m"), precision, step)
    told = json.dumps([model, rows, length, precision.load])
    words = [sys.executable, "-c", ALONE, told]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300, env=clean_environment())
    resident = int(done.stdout.splitlines()[-1])
    allocated, reserved = planned.phase_bytes("evaluation")
    assert 0.95 * allocated < resident < reserved + 32 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_the_evaluations_own_batch_needs_no_more_than_a_training_step(seed: int) -> None:
    draw = random.Random(seed)
    model = config_json(draw, words=(500, 150_000), tied=True)
    shape, precision = parse_model_shape(model, name="m"), PRECISIONS[1 - seed % 2]
    config = run_of(f"{{mode: {draw.choice(('lora', 'full'))}}}")
    step = Step(draw.choice((1, 4)), 2, draw.randint(32, 512), masks=False, on_gpu=False, checkpointed_layers=0)
    walk = StepMemorySimulation(config, shape, precision, step)
    rows = estimate.max_evaluation_rows(walk)

    def taken(batch: int) -> tuple[int, int]:
        found = estimate_memory(config, shape, precision, replace(step, eval_batch=batch))
        return tuple(found.phase_bytes(name)[0] or 0 for name in ("evaluation", "training"))  # type: ignore[return-value]

    evaluation, training = taken(rows)
    assert evaluation <= training or rows == 1
    if rows < estimate.MAX_EVALUATION_ROWS:
        evaluation, training = taken(rows + 1)
        assert evaluation > training


@pytest.mark.parametrize("seed", range(5))
def test_answers_of_many_short_rows_need_no_more_than_a_training_step(seed: int) -> None:
    """`generate` has the logits of one token of each row, in the model's dtype and twice in fp32."""
    draw = random.Random(seed)
    model = config_json(draw, words=(500, 150_000), tied=True)
    shape, precision, new = parse_model_shape(model, name="m"), PRECISIONS[1 - seed % 2], draw.choice((1, 8, 64))
    config = run_of("{mode: lora}", f"eval: {{max_new_tokens: {new}}}\n")
    step = Step(draw.choice((1, 4)), 2, draw.randint(32, 512), masks=False, on_gpu=False, checkpointed_layers=0)
    walk = StepMemorySimulation(config, shape, precision, step)
    walk.step = replace(step, eval_batch=estimate.max_evaluation_rows(walk))
    memory = estimate.estimate_from_simulation(walk)
    tokens = estimate.generation_token_budget(walk, memory)
    width = 4 if precision.compute == "float32" else 2
    rows = tokens // (new + 1)  # at the fewest tokens a row: one of its prompt
    taken = rows * ((width + 8) * shape.vocab_size + (new + 1) * 2 * width * shape.kv_width)
    assert taken <= memory.allocated - memory.resident


@pytest.mark.slow
def test_a_run_on_a_cpu_stays_within_its_plan_in_every_moment(tmp_path: Path) -> None:
    """40,000 words for a width of 64: the head is nearly all that a step and an evaluation take."""
    model = make_llama(tmp_path / "wide", vocab_size=40_000)
    rows = (chat(f"what is {n}? " * 12, f"it is {n} " * 12) for n in range(40))
    sizes = {"model": {"max_seq_len": 256}, "data": {"val_fraction": 0.4}, "train": {"effective_batch_size": 4}}
    asked = {"eval": {"generate_rows": 2, "max_new_tokens": 4}, "output": {"name": "one"}}
    config = write_run(tmp_path, model, write_rows(tmp_path / "rows.jsonl", rows), **sizes, **asked)
    environment = clean_environment(SFT_PLAY_CACHE=str(tmp_path / "cache"))
    words = [sys.executable, "-m", "sft_play", "train", "--config", str(config)]
    subprocess.run(words, check=True, timeout=600, env=environment, capture_output=True)
    summary = json.loads((tmp_path / "outputs" / "one" / "summary.json").read_text())
    found = summary["peak_bytes_by_moment"]
    for moment, peak in found.items():
        assert peak["measured_rss"] <= 1.05 * peak["predicted_reserved"], moment
    assert found["evaluation"]["measured_rss"] <= 1.05 * found["training"]["measured_rss"] + 64 * MIB
    highest = max(found, key=lambda name: found[name]["measured_rss"])
    assert summary["peak_bytes"] == {"moment": highest, **found[highest]}
