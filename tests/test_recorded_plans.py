"""The numbers of plans on random machines and configs are those that were recorded.

A change that is not meant to move numbers leaves them; one that is records them anew and shows in its diff which plans
moved: `python -m tests.test_recorded_plans`. Whether they are right is what the traces and the measured peaks of
`benchmarks/` say; here nothing may change unnoticed.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import SftPlayError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import make_advised_plan
from sft_play.planner.candidates import evaluate_candidates
from sft_play.planner.decide import PlanRequest, build_plan_inputs
from sft_play.planner.explain import bar_lines, candidate_table_lines, plan_lines, suggestion_lines
from sft_play.planner.layout import find_layouts
from tests.conftest import digest

RECORD = Path(__file__).with_name("recorded_plans.json")
COUNT = 100

MODELS = (
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.3",
    "google/gemma-3-27b-it", "google/gemma-2-9b", "microsoft/Phi-3.5-mini-instruct", "Qwen/Qwen3-4B", "google/gemma-2b",
    "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b", "HuggingFaceTB/SmolLM3-3B",
    "zai-org/GLM-4.5-Air", "ibm-granite/granite-3.1-2b-instruct", "google/gemma-3-1b-it", "allenai/OLMo-2-1124-7B",
    "mistralai/Ministral-3-3B-Base-2512", "sft-play/starter-base",
)  # fmt: skip
MACHINES = (
    "cpu", "RTX3060", "RTX4090", "T4", "V100-32GB", "A100-40GB", "2xA100-80GB", "4xRTX4090", "H100", "2xH200", "8xH100",
    "2x8xH100", "2xL40S,ram=64GiB", "4xA100-80GB,ram=1TiB",
    "1xMyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS,ram=200GiB",
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "tuning.mode": ("qlora", "lora", "full"), "model.max_seq_len": (256, 1000, 2048, 4096, 16384),
    "model.dtype": ("auto", "auto", "float32"),
    "model.attn_implementation": ("auto", "auto", "auto", "sdpa", "eager", "flash_attention_2"),
    "task_mode": ("sft", "sft", "cpt"), "data.packing": ("none", "none", "best_fit"), "tuning.lora.r": (4, 16, 64),
    "tuning.lora.dropout": (0.0, 0.0, 0.05), "tuning.lora.use_dora": (False, False, False, True),
    "tuning.lora.target_modules": ("auto", "auto", "[q_proj, v_proj]", "[down_proj]"),
    "train.effective_batch_size": (8, 32, 32, 48),
    "train.optim": ("adamw_torch_fused", "adamw_torch_fused", "adamw_torch", "paged_adamw_8bit", "adafactor"),
    "train.gradient_checkpointing": ("auto", "auto", True, False, 5), "train.bf16": ("auto", "auto", "auto", False),
    "eval.batch_size": ("auto", 1, 16),
}  # fmt: skip


def settings() -> dict[str, tuple[str, str, list[str], bool]]:
    """(model, machine, overrides, whether it evaluates) of each random setting, by a name that says all of it."""
    draw = random.Random(20261122)
    found: dict[str, tuple[str, str, list[str], bool]] = {}
    while len(found) < COUNT:
        chosen = {key: draw.choice(values) for key, values in OPTIONS.items()}
        words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in chosen.items()]
        model, machine, has_eval = draw.choice(MODELS), draw.choice(MACHINES), draw.random() < 0.5
        first = {key: values[0] for key, values in OPTIONS.items()}
        changed = [word for word, key in zip(words, chosen, strict=True) if chosen[key] != first[key]]
        name = " ".join([model, machine, *changed, *(["evaluates"] if has_eval else [])])
        found[name] = (model, machine, words, has_eval)
    return found


def numbers(model: str, machine: str, words: list[str], has_eval: bool) -> dict[str, Any]:
    """The choice of a plan, and a digest of the numbers of all its candidates; or the class of its refusal."""
    steps = ["train.max_steps=1000"] if len(words) % 2 else []  # hours and cost are predicted for a known number
    try:
        run = config_from_text(f"model: {{name: {model}}}\n", name="run.yaml", overrides=[*words, *steps])
        shape, hardware = load_model_shape(model), replace(parse_hardware(machine), cpu_name="CPU", cpu_cores=16)
        if "ram=" not in machine:  # not that of the machine that the test runs on
            hardware = replace(hardware, ram_bytes=64 << 30, ram_free_bytes=60 << 30)
        plan = make_advised_plan(PlanRequest(run, shape, hardware, has_eval=has_eval))
        job = build_plan_inputs(PlanRequest(run, shape, hardware, has_eval=has_eval))
        candidates = evaluate_candidates(job, find_layouts(run, shape, hardware)[0])
    except SftPlayError as error:
        return {"refused": type(error).__name__}
    lines = [
        f"{c.layout} {c.batch} {c.checkpointed_layers} {c.fits} {c.memory.terms} {c.memory.reserved} "
        f"{c.memory.required} {c.memory.host_bytes} {c.memory.moment} {c.speed.step_s:.6g} "
        f"{c.speed.tokens} {c.speed.moved_bytes}"
        for c in candidates
    ]
    told = [*plan_lines(plan, run, command="make train"), *bar_lines(plan)]
    told += [*candidate_table_lines(plan), *suggestion_lines(plan)]
    lines += [f"{way.change} {way.allocated} {way.required} {way.fits}" for way in plan.suggestions]
    return {
        "layout": plan.layout, "micro_batch": plan.batch.micro_batch, "grad_accum": plan.batch.grad_accum,
        "checkpointed_layers": plan.choice.checkpointed_layers, "fits": plan.fits,
        "allocated": plan.memory.allocated, "required": plan.memory.required,
        "tokens_per_s": float(f"{plan.speed.tokens_per_s:.6g}"), "candidates": len(candidates),
        "digest": digest(lines), "told": digest(told), "json": digest(plan.as_json()),
    }  # fmt: skip


@pytest.mark.parametrize("part", range(8))
def test_the_numbers_of_plans_are_those_recorded(part):
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(recorded) == set(settings()), "record them anew: python -m tests.test_recorded_plans"
    some = dict(list(settings().items())[part::8])
    assert {name: numbers(*setting) for name, setting in some.items()} == {name: recorded[name] for name in some}


def test_the_recorded_plans_cover_every_layout_and_few_refusals():
    recorded = list(json.loads(RECORD.read_text(encoding="utf-8")).values())
    assert sum("refused" in item for item in recorded) < COUNT // 4 <= len(recorded) // 4
    assert {"single", "ddp", "fsdp"} <= {item.get("layout") for item in recorded}
    assert {True, False} <= {item.get("fits") for item in recorded}


if __name__ == "__main__":
    answers = {name: numbers(*setting) for name, setting in settings().items()}
    RECORD.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
