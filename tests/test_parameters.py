"""What plan and run say of the parameters: counts that add up, those of models in memory, and one line of words."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.explain import plan_lines
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.plan import ParameterCounts, count_parameters, format_parameters, plan_from_json
from sft_play.planner.precision import Precision

FP32, BF16 = Precision("float32", "float32", ""), Precision("bfloat16", "bfloat16", "")
MASTERS = Precision("bfloat16", "float32", "")
MODELS = (
    "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "mistralai/Mixtral-8x7B-v0.1",
    "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "zai-org/GLM-4.5-Air", "Qwen/Qwen2.5-0.5B",
)  # fmt: skip


def run(name: str, mode: str, *, trainable: Any = "all", **lora: Any) -> RunConfig:
    text = {"model": {"name": name}, "tuning": {"mode": mode, "lora": lora, "trainable": trainable}}
    return config_from_text(json.dumps(text), name="run")


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_add_up(seed):
    draw = random.Random(seed)
    name, mode = draw.choice(MODELS), draw.choice(["qlora", "lora", "full"])
    saves = draw.choice([[], [], ["lm_head"], ["embed_tokens", "lm_head"]]) if mode != "full" else []
    lora = {"r": draw.choice([4, 16]), "target_parameters": draw.choice(["auto", [], ["down_proj"]])}
    shape, config = load_model_shape(name), run(name, mode, modules_to_save=saves, **lora if mode != "full" else {})
    found = count_parameters(config, shape, draw.choice([FP32, BF16, MASTERS]), SINGLE)
    matrices = sum(linear.weights * count for linear, count in shape.linears)
    stacks = [(one.weights, kind.count) for kind in shape.layers for one in kind.expert_weights]
    packed = sum(weights * count for weights, count in stacks)
    assert found.total == shape.params
    assert found.trained + found.frozen == found.total + found.adapters + len(saves) * shape.embedding_table_params
    if mode == "full":
        assert (found.trained, found.adapters, found.frozen, found.adapter_dtype) == (found.total, 0, 0, None)
    in_nf4 = (matrices + packed, "nf4") if mode == "qlora" else (0, None)
    assert (found.quantised, found.quantised_dtype) == in_nf4
    assert (found.experts is None) == (not stacks)
    if stacks:
        assert found.experts.total == packed
        none = count_parameters(run(name, mode, **{**lora, "target_parameters": []}), shape, BF16, SINGLE)
        assert found.experts.adapters == found.adapters - none.adapters
        assert (found.experts.adapters > 0) == (mode != "full" and bool(lora["target_parameters"]))
    assert TypeAdapter(ParameterCounts).validate_json(json.dumps(asdict(found))) == found


@pytest.mark.parametrize(("mode", "precision", "layout", "dtype"), [
    ("lora", BF16, "single", "float32"), ("qlora", BF16, "fsdp", "float32"), ("full", BF16, "single", "bfloat16"),
    ("lora", BF16, "zero2", "bfloat16"),  # beside fp32 copies of DeepSpeed's own
    ("full", BF16, "fsdp", "float32"), ("full", MASTERS, "single", "float32"),
    ("full", MASTERS, "zero3", "bfloat16"), ("full", FP32, "zero3", "float32"),
])  # fmt: skip
def test_what_trains_is_held_as_the_layout_does(mode, precision, layout, dtype):
    layout = SINGLE if layout == "single" else Layout(layout, 2, 2)
    found = count_parameters(run("Qwen/Qwen3-4B", mode), load_model_shape("Qwen/Qwen3-4B"), precision, layout)
    assert (found.adapter_dtype or found.rest_dtype) == dtype


@pytest.mark.parametrize(
    ("name", "mode", "options", "line"),
    [
        # adapters: 48 blocks of 16 * (2 * (2048 + 4096) + 2 * (2048 + 512)): q, o, k, v
        ("Qwen/Qwen3-30B-A3B", "qlora", {},
         "Parameters: 30.53 billion: 97.9% in NF4, the rest bfloat16, all frozen; adapters: 13.4 million float32 "
         "(0.04%), none on experts (tuning.lora.target_parameters=auto)"),
        ("Qwen/Qwen3-8B", "lora", {"modules_to_save": ["lm_head"], "trainable": ["lora"]},
         "Parameters: 8.19 billion: all bfloat16, frozen; adapters: 43.6 million float32 (0.53%); copies of lm_head "
         "that train: 622.3 million (tuning.lora.modules_to_save); tuning.trainable chooses of what is trained"),
        ("Qwen/Qwen3-4B", "full", {"trainable": ["norm"]},
         "Parameters: all of 4.02 billion are trained in bfloat16; tuning.trainable chooses of what is trained"),
    ],
)  # fmt: skip
def test_one_line_says_it(name, mode, options, line):
    config = run(name, mode, **options)
    assert format_parameters(count_parameters(config, load_model_shape(name), BF16, SINGLE), config) == line


def test_plan_and_json_have_it_and_earlier_plans_have_none():
    config = run("Qwen/Qwen3-30B-A3B", "qlora")
    plan = make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen3-30B-A3B"), parse_hardware("1xH100")))
    written = json.loads(json.dumps(plan.as_json()))
    keys = "total quantised quantised_dtype adapters adapter_dtype trained frozen rest_dtype experts"
    assert set(written["parameters"]) == set(keys.split())
    assert plan_from_json(written) == plan
    del written["parameters"]
    earlier = plan_from_json(written)
    assert earlier.parameters is None
    for one, count in ((plan, 1), (earlier, 0)):
        assert "\n".join(plan_lines(one, config, command="make train")).count("\nParameters: 30.53 billion") == count


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "mixtral", "llama"])
def folder(request, tmp_path_factory, tiny_llama) -> Path:
    from tests.test_nf4_experts import saved

    is_llama = request.param == "llama"
    return tiny_llama if is_llama else saved(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.mark.build
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["qlora", "lora", "full", "qlora with experts"])
def test_a_model_in_memory_has_those_parameters(folder, mode, precision):
    from peft import get_peft_model

    from sft_play.training.loop.trainer import set_adapter_dtype
    from sft_play.training.model.model_loading import load_model
    from sft_play.training.prepare.model_spec import build_model_spec

    mode, _, adapted = mode.partition(" with ")
    shape = load_model_shape(str(folder))
    mixes = any(kind.num_experts for kind in shape.layers)
    if adapted and not mixes:
        pytest.skip("a dense model")
    config = run(str(folder), mode, **{"target_parameters": "auto"} if adapted else {})
    spec = build_model_spec(config, precision, tokenizer_size=300)
    model = load_model(config, precision, spec, device="cpu")
    if spec.peft_config is not None:
        model = get_peft_model(model, spec.peft_config)
        plan = make_plan(PlanRequest(config, shape, parse_hardware("cpu")))
        set_adapter_dtype(model, config, replace(plan, precision=precision))
    expected = count_parameters(config, shape, precision, SINGLE)
    found = _in_memory(model)
    for name in ("total", "quantised", "adapters", "trained", "frozen"):
        assert found[name] == getattr(expected, name), name
    assert found["rest_dtype"] == {f"torch.{expected.rest_dtype}"}
    assert found["adapter_dtype"] == ({f"torch.{expected.adapter_dtype}"} if expected.adapter_dtype else set())
    assert (expected.experts is not None) == mixes


def _in_memory(model: Any) -> dict[str, Any]:
    from sft_play.training.prepare.experts import PACKED_ATTRIBUTE

    found: dict[str, Any] = dict.fromkeys(("total", "quantised", "adapters", "trained", "frozen"), 0)
    found |= {"rest_dtype": set(), "adapter_dtype": set()}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, one in module._parameters.items():
            if one is None or id(one) in seen:  # none, or tied
                continue
            seen.add(id(one))
            packs = vars(module).get(PACKED_ATTRIBUTE, {})
            state = packs[name].nf4_state if name in packs else getattr(one, "quant_state", None)
            size = one.numel() if state is None else prod(state.shape)
            found["trained" if one.requires_grad else "frozen"] += size
            if "lora_" in path:
                found["adapters"] += size
                found["adapter_dtype"].add(str(one.dtype))
                continue
            found["total"] += size
            if state is None:
                found["rest_dtype"].add(str(one.dtype))
            else:
                found["quantised"] += size
    return found
