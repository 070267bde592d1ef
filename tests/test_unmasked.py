"""Padded rows without an attention mask: where the plan leaves it out, what measures that it may, and what runs."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from sft_play.config.load import config_from_text
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.plan import plan_from_json
from tests.conftest import chat

GIB = 2**30
MODELS = (
    "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/Qwen3-30B-A3B",
    "microsoft/Phi-3.5-mini-instruct",
)  # fmt: skip


def machine(capability: tuple[int, int] | None = (9, 0), *, gib: int = 140) -> Hardware:
    return Hardware((Gpu(0, "GPU", gib * GIB, None, capability),), "CPU", 8, 256 * GIB, 256 * GIB)


def run_of(model: str, *overrides: str) -> Any:
    text = f"model: {{name: {model}, max_seq_len: 1024}}\ntuning: {{mode: lora}}\ntrain: {{effective_batch_size: 16}}\n"
    return config_from_text(text, name="run.yaml", overrides=overrides)


# --- the plan ---------------------------------------------------------------------------------------------------------
def test_plans_leave_the_mask_out_by_the_rule():
    """On random models, GPUs and settings: the choice, its evaluation, its reason and the memory follow the rule."""
    draw = random.Random(7)
    seen = set()
    for _ in range(80):
        model, capability = draw.choice(MODELS), draw.choice([(7, 5), (8, 0), (9, 0), None])
        backend, packing = draw.choice(["bnb", "bnb", "unsloth"]), draw.choice(["none", "none", "best_fit"])
        attention = draw.choice(["auto", "auto", "eager"])
        micro = draw.choice([1, 4])
        mode = "tuning.mode=qlora" if backend == "unsloth" else "tuning.mode=lora"
        config = run_of(
            model, mode, f"tuning.backend={backend}", f"data.packing={packing}", f"train.batch_size={micro}",
            f"model.attn_implementation={attention}",
        )  # fmt: skip
        dropout = draw.choice([0.0, 0.0, 0.1])
        shape = dataclasses.replace(load_model_shape(model), uses_alibi=draw.random() < 0.1, attention_dropout=dropout)
        plan = make_plan(PlanRequest(config, shape, machine(capability)))
        keeps = (
            (attention == "eager" or "gemma-2" in model or "A3B" in model or shape.uses_alibi)
            or capability == (7, 5) or backend == "unsloth"
        )  # fmt: skip
        bounded = (
            packing != "none" and attention == "auto" and not model.startswith("google/gemma-2")
            and not dropout and not shape.uses_alibi and backend != "unsloth"
        )  # fmt: skip
        step = plan.choice.step
        assert step.varlen == bounded
        assert step.one_by_one == (bounded and capability == (7, 5))
        assert step.masks == keeps, (model, capability, backend, attention)
        assert step.padded == (not bounded if packing != "none" else keeps and micro > 1)
        rows = max(step.eval_batch, 1 if packing != "none" else micro)
        assert (plan.masked_bytes is None) == (not bounded and (keeps or rows == 1))
        told = " ".join(plan.reasons)
        if packing == "none" and micro > 1:
            assert ("without a mask" in told) == (not keeps)
            assert ("padded to it and masked (" in told) == keeps
        assert plan_from_json(json.loads(json.dumps(plan.as_json()))) == plan
        seen.add((keeps, packing, micro))
    assert len(seen) == 8


# --- batches and runs -------------------------------------------------------------------------------------------------
@pytest.mark.build
def test_a_batch_without_a_mask_has_positions_and_its_counts():
    from sft_play.training.loop.rows import Collator
    from sft_play.training.measure.monitor import count_tokens

    draw = np.random.default_rng(5)
    for _ in range(20):
        lengths = draw.integers(1, 12, size=int(draw.integers(1, 5)))
        rows = [{"input_ids": draw.integers(5, 90, size=n), "labels": draw.choice([-100, 7], size=n)} for n in lengths]
        plain, masked = (Collator(pad_id=0, adds_masks=masks)(rows) for masks in (False, True))
        assert (plain["input_ids"] == masked["input_ids"]).all()
        assert (plain["labels"] == masked["labels"]).all()
        assert "attention_mask" not in plain
        assert plain["position_ids"].tolist() == [list(range(max(lengths)))]
        assert count_tokens(plain) == count_tokens(masked) == sum(lengths)
        assert plain["sample_count"] == sum(7 in row["labels"] for row in rows)


def run_yaml(folder: Any, model: Any) -> Any:
    draw = np.random.default_rng(3)
    words = ["the", "light", "in", "kitchen", "is", "on", "yes", "no"]
    answers = [" ".join(draw.choice(words, size=int(draw.integers(1, 12)))) for _ in range(12)]
    lines = [json.dumps(chat(f"what is {n}?", answer)) for n, answer in enumerate(answers)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{name: {model}, max_seq_len: 96}}\ntuning: {{mode: full}}\n"
        f"data: {{train_path: {folder}/rows.jsonl, val_path: {folder}/rows.jsonl, test_path: null}}\n"
        "train: {effective_batch_size: 6, batch_size: 3, max_steps: 3, report_to: [], learning_rate: 1e-2,\n"
        "        warmup_steps: 0, lr_scheduler_type: constant, bf16: false, group_by_length: false}\n"
        f"eval: {{steps: 2}}\noutput: {{dir: {folder}/outputs}}\n"
    )
    return path


@pytest.mark.build
def test_a_run_without_masks_learns_what_the_run_with_them_does(tmp_path, tiny_llama, command, monkeypatch):
    from sft_play.training.class_checks import masking
    from sft_play.training.loop import rows
    from sft_play.training.prepare import model_spec

    given: list[set[str]] = []
    real = rows.Collator.__call__

    def watched(self: Any, micro_rows: Any) -> Any:
        batch = real(self, micro_rows)
        given.append({"attention_mask", "position_ids"} & set(batch))
        return batch

    monkeypatch.setattr(rows.Collator, "__call__", watched)
    path, figures = run_yaml(tmp_path, tiny_llama), {}
    for name in ("plain", "masked"):
        given.clear()
        if name == "masked":
            monkeypatch.setattr(
                model_spec, "check_padding", lambda *_, **__: masking.MaskRequirement(True, "a test says so")
            )
        code, said = command("train", "--config", str(path), f"output.name={name}")
        assert code == 0, said
        lines = (tmp_path / "outputs" / name / "metrics.jsonl").read_text().splitlines()
        figures[name] = [json.loads(line) for line in lines]
        # training and evaluation; the measurement's own batches are of both kinds
        assert given[-8:] == [{"attention_mask" if name == "masked" else "position_ids"}] * 8
        assert ("padded rows need no mask" in said) == (name == "plain")
        assert ("the plan left out masks" in said) == (name == "masked")
    for key in ("loss", "grad_norm", "eval_loss", "num_tokens", "samples_seen", "padding_share"):
        plain, masked = ([line[key] for line in figures[name] if key in line] for name in ("plain", "masked"))
        assert plain
        assert plain == pytest.approx(masked, rel=1e-5), key
