"""Answers are generated in batches that hold no more than a training step does."""

import json
import random

import pytest

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import kv_cache_bytes_per_token
from sft_play.training.measure import exact_match
from sft_play.training.measure.exact_match import batch_by_tokens


@pytest.mark.parametrize("seed", range(10))
def test_batches_hold_as_many_rows_as_their_tokens_allow(seed):
    draw = random.Random(seed)
    tokens = [draw.randint(1, 400) for _ in range(draw.randint(0, 80))]
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    most = draw.choice([1, 350, 1000, 5000])
    found = list(batch_by_tokens(order, tokens, most))
    assert [index for batch in found for index in batch] == order
    for place, batch in enumerate(found):
        assert len(batch) == 1 or len(batch) * tokens[batch[-1]] <= most
        if place + 1 < len(found):
            assert (len(batch) + 1) * tokens[found[place + 1][0]] > most


@pytest.mark.parametrize(
    ("model", "nbytes"), [("meta-llama/Llama-3.1-8B", 32 * 2 * 8 * 128 * 2), ("Qwen/Qwen2.5-0.5B", 24 * 2 * 2 * 64 * 2)]
)
def test_a_tokens_keys_and_values_are_counted(model, nbytes):
    assert kv_cache_bytes_per_token(load_model_shape(model), 2) == nbytes


@pytest.mark.parametrize(
    ("machine", "model", "has_eval"),
    [
        ("1xRTX3060", "Qwen/Qwen2.5-0.5B", True),
        ("1xH100", "Qwen/Qwen2.5-7B", False),
        ("4xRTX4090", "meta-llama/Llama-3.1-8B", True),
    ],
)
def test_the_caches_of_a_batch_fit_where_a_step_fits(machine, model, has_eval):
    config = config_from_text(f"model: {{name: {model}}}", name="x")
    shape = load_model_shape(model)
    plan = make_plan(PlanRequest(config, shape, parse_hardware(machine), has_eval=has_eval))
    gives_back = plan.memory.allocated - plan.memory.resident
    assert plan.answer_tokens >= 1
    if plan.answer_tokens > 1:
        assert plan.answer_tokens * kv_cache_bytes_per_token(shape, 2) < gives_back
    assert plan.answer_tokens >= gives_back // (20 * kv_cache_bytes_per_token(shape, 2) + gives_back // 512)


@pytest.mark.build
def test_a_run_asks_in_batches_of_its_plan(tmp_path, tiny_llama, sums, command, monkeypatch):
    seen: list[tuple[int, int]] = []
    real = exact_match._generate

    def generate(model, tokenizer, prompts, stop, new):
        seen.append((len(prompts), max(map(len, prompts)) + new))
        return real(model, tokenizer, prompts, stop, new)

    monkeypatch.setattr(exact_match, "_generate", generate)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\n"
        f"data: {{train_path: {sums}, val_path: null, test_path: null, val_fraction: 0.4}}\n"
        "train: {effective_batch_size: 4, batch_size: 1, max_steps: 1, report_to: []}\n"
        "eval: {generate_rows: 12, max_new_tokens: 8, before_training: true, steps: 0}\n"
        f"output: {{dir: {tmp_path}/outputs, name: one}}\n"
    )
    code, printed = command("train", "--config", str(path))
    assert code == 0, printed
    most = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())["answer_tokens"]
    assert seen
    assert all(rows == 1 or rows * tokens <= most for rows, tokens in seen)
