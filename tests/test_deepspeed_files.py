"""DeepSpeed files that people bring: their batch is the user's, their precision the run's, as they were typed."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from sft_play.config.load import config_from_text, load_config
from sft_play.errors import ConfigError
from sft_play.launch import deepspeed
from sft_play.launch.planning import build_stage_request, plan_stage
from sft_play.launch.request import DeepspeedRequest, LaunchOptions
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.batching import BatchPlan, batch_splits
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.layout import LAYOUT_NAMES
from sft_play.planner.plan import plan_from_json
from tests.conftest import ROOT

RUN = config_from_text("model: {name: a}\ntrain: {learning_rate: 2e-4}", name="run.yaml")
OPTIONS = deepspeed.deepspeed_options(RUN)
NUMBERS = deepspeed.PlanValues("zero3", BatchPlan(2, 4, 2), hidden_size=1024, compute_dtype="bfloat16", options=OPTIONS)
KEYS = {"micro": "train_micro_batch_size_per_gpu", "accum": "gradient_accumulation_steps", "batch": "train_batch_size"}
OF_ONE_RANK = {"batch_size": 2, "grad_accum": 4, "effective_batch_size": 8}
FIELDS = {"micro": "batch_size", "accum": "grad_accum", "batch": "effective_batch_size"}


def settings(**train: object):
    """A run YAML that gives these numbers of training."""
    text = "".join(f"  {key}: {value}\n" for key, value in train.items())
    return config_from_text("model: {name: x}\n" + (f"train:\n{text}" if text else ""), name="run.yaml")


def taken(train, config, ranks=2):
    found = deepspeed.apply_deepspeed_batch(train, config, ranks=ranks, name="theirs.json").train
    return found.batch_size, found.grad_accum, found.effective_batch_size


def test_numbers_of_a_file_fill_what_the_run_yaml_leaves_open():
    assert taken(settings(), {"zero_optimization": {"stage": 2}}) == ("auto", "auto", 32)
    assert taken(settings(), dict.fromkeys(KEYS.values(), "auto")) == ("auto", "auto", 32)
    assert taken(settings(), {KEYS["micro"]: 4}) == (4, "auto", 32)  # 4 x accum x 2 = 32
    assert taken(settings(), {KEYS["accum"]: 8}) == ("auto", 8, 32)
    assert taken(settings(), {KEYS["batch"]: 64}) == ("auto", "auto", 64)
    assert taken(settings(batch_size=4, effective_batch_size=32), {KEYS["accum"]: 4}) == (4, 4, 32)
    assert taken(settings(**OF_ONE_RANK), {KEYS["batch"]: 8}) == (2, 4, 8)
    # an effective batch that nobody gave is the product
    assert taken(settings(), {KEYS["micro"]: 3, KEYS["accum"]: 5}, ranks=4) == (3, 5, 60)
    assert taken(settings(batch_size=3), {KEYS["accum"]: 5}) == (3, 5, 30)


@pytest.mark.parametrize(("train", "config", "words"), [
    ({"batch_size": 2}, {KEYS["micro"]: 4}, ["train_micro_batch_size_per_gpu: 4", "train.batch_size=2"]),
    (OF_ONE_RANK, {KEYS["batch"]: 8, KEYS["accum"]: 4}, ["is not train.batch_size=2"]),
    ({"grad_accum": 2}, {KEYS["accum"]: 4}, ["gradient_accumulation_steps: 4", "train.grad_accum=2"]),
    ({"effective_batch_size": 32}, {KEYS["batch"]: 64}, ["train_batch_size: 64", "train.effective_batch_size=32"]),
    ({}, {KEYS["micro"]: 5}, ["train.effective_batch_size=32 (its default)", "train_micro_batch_size_per_gpu: 5"]),
    ({"effective_batch_size": 32}, {KEYS["micro"]: 3}, ["train.effective_batch_size=32", "3", "use 30 or 36"]),
    ({"batch_size": 4}, {KEYS["batch"]: 12}, ["train_batch_size: 12", "train.batch_size=4", "use 8 or 16"]),
    ({}, dict(zip(KEYS.values(), (2, 2, 16), strict=True)), ["train_batch_size: 16", "per_gpu: 2", "2 ranks"]),
    ({"effective_batch_size": 32, "batch_size": 8}, {KEYS["accum"]: 4}, ["steps: 4", "train.batch_size=8", "= 64"]),
])  # fmt: skip
def test_a_contradiction_of_what_the_user_wrote_names_both(train, config, words):
    with pytest.raises(ConfigError) as error:
        deepspeed.apply_deepspeed_batch(settings(**train), config, ranks=2, name="theirs.json")
    assert all(word in str(error.value) for word in ["theirs.json: ", *words]), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_any_numbers_multiply_exactly_or_one_error_names_them(seed):
    draw = random.Random(seed)
    agreed = refused = 0
    for _ in range(500):
        ranks = draw.choice([1, 2, 3, 4, 8])
        micro, accum = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 4, 5])
        true = {"micro": micro, "accum": accum, "batch": micro * accum * ranks}
        config = {KEYS[name]: draw.choice(["auto", true[name], true[name], draw.randint(1, 64)]) for name in KEYS}
        config = {key: value for key, value in config.items() if draw.random() < 0.8}
        text = {FIELDS[name]: draw.choice([true[name], true[name], draw.randint(1, 64)]) for name in KEYS}
        text = {key: value for key, value in text.items() if draw.random() < 0.3}
        train, said = settings(**text), {key: value for key, value in config.items() if value != "auto"}
        before = train.model_copy()
        try:
            found = deepspeed.apply_deepspeed_batch(train, config, ranks=ranks, name="f").train
        except ConfigError as error:
            refused += 1
            for line in str(error).splitlines():
                named = [key for key in said if f"{key}: {said[key]}" in line]
                others = [key for key in text if f"train.{key}={text[key]}" in line] or "its default" in line
                assert len(named) > 1 or (named and others) or " rank" in line, line
            continue
        assert train == before
        for field, value in text.items():
            assert getattr(found, field) == value  # what the user wrote stays
        for key, value in said.items():
            field = next(FIELDS[name] for name in KEYS if KEYS[name] == key)
            assert getattr(found, field) == value
        if said:
            agreed += 1
            splits = batch_splits(found, ranks=ranks)
            assert {split.effective_batch for split in splits} == {found.effective_batch_size}
            if (found.batch_size, found.grad_accum) != ("auto", "auto"):
                deepspeed.fill_auto_values(config, replace(NUMBERS, batch=splits[0]))
    assert agreed > 50
    assert refused > 50


@pytest.mark.parametrize("compute", ["bfloat16", "float16", "float32"])
def test_precision_is_the_runs_whatever_a_file_says(compute):
    numbers, states = replace(NUMBERS, compute_dtype=compute), (None, {}, {"enabled": True}, {"enabled": False})
    for bf16, fp16 in itertools.product(states, states):
        raw = {"bf16": bf16, "fp16": fp16, "zero_optimization": {"stage": 3}}
        raw = {key: dict(value) for key, value in raw.items() if value is not None}
        config = deepspeed.fill_auto_values(raw, numbers)
        assert config.get("bf16", {}).get("enabled", False) is (compute == "bfloat16")
        assert config.get("fp16", {}).get("enabled", False) is (compute == "float16")


TYPED = """{
  // ZeRO-3, the optimizer in RAM
  "zero_optimization": {"stage": 3, "cpu_offload": true},
  # the A100s have it
  "_comment": "from the guide",
  "bf16": {"enabled": true}, "gradient_accumulation_steps": "auto"
}
"""


def test_the_typed_file_is_planned_for_the_starter(command, tmp_path, monkeypatch, tiny_llama):
    path = tmp_path / "that.json"
    path.write_text(TYPED)
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("DEEPSPEED_CONFIG", str(path))
    starter = str(ROOT / "configs/run_starter.yaml")
    words = ["launch-command", "--config", starter, f"model.name={tiny_llama}", f"output.dir={tmp_path}"]
    assert "zero3_offload on the CPU" in command(*words)[1]
    path.write_text(TYPED.replace('"gradient_accumulation_steps": "auto"', '"gradient_accumulation_steps": 4'))
    assert "micro 2 x accum 4 x 2 ranks = 16" in command(*words)[1]  # the starter's effective batch of 16
    code, printed = command(*words, "train.grad_accum=2")
    assert (code, "gradient_accumulation_steps: 4 contradicts train.grad_accum=2" in printed) == (2, True)


@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_weights_that_a_file_leaves_on_the_gpus_are_planned_there(mode):
    """`"stage": 3, "cpu_offload": true`: the states go to RAM and the weights, cut, stay: between zero3 and offload."""
    text = f"model: {{name: Qwen/Qwen2.5-7B}}\ntuning: {{mode: {mode}}}\ntrain: {{effective_batch_size: 8}}"
    config = config_from_text(text, name="x")
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware("4xA100-80GB"))
    offloaded = replace(request, allowed_layouts=("zero3_offload",))
    kept, gone = make_plan(replace(offloaded, keeps_params=True)), make_plan(offloaded)
    whole = make_plan(replace(request, allowed_layouts=("zero3",)))
    assert kept.layout == gone.layout == "zero3_offload"
    assert kept.choice.layout.keeps_params
    assert kept.memory.terms["weights"] >= whole.memory.terms["weights"] > gone.memory.terms["weights"]
    assert kept.memory.terms.get("optimizer", 0) == gone.memory.terms.get("optimizer", 0)
    assert kept.memory.host_bytes < gone.memory.host_bytes
    assert plan_from_json(json.loads(json.dumps(kept.as_json()))) == kept


def test_a_file_means_kept_weights_where_it_offloads_the_states_alone():
    states, weights = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}
    both = {**states, **weights}
    for zero, keeps in (({"stage": 3, **states}, True), ({"stage": 3, **both}, False), ({"stage": 2}, False)):
        config = {"zero_optimization": zero}
        assert deepspeed.keeps_params_on_gpu(config, deepspeed.deepspeed_layout(config)) is keeps


@pytest.mark.parametrize(("params", "contradicts"), [
    ({"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}, ()),
    ({"lr": 2e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}, ()),
    ({"lr": 1e-3}, ("lr: 0.001 contradicts train.learning_rate: 0.0002",)),
    ({"betas": [0.8, 0.999], "weight_decay": 3e-7}, ("betas: [0.8, 0.999] contradicts", "weight_decay: 3e-07")),
])  # fmt: skip
def test_an_optimizer_of_a_file_that_changes_the_training_is_refused_by_a_run(tmp_path, params, contradicts):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": 2}}))
    words = ["train.effective_batch_size=8", "train.learning_rate=2e-4"]
    loaded = load_config(ROOT / "configs" / "run_lora.yaml", overrides=words)
    asked = LaunchOptions(deepspeed=DeepspeedRequest(file))
    request = build_stage_request(loaded, parse_hardware("2xH100"), asked)
    if not contradicts:
        assert "optimizer" not in (plan_stage(request)[1] or {})
        return
    with pytest.raises(ConfigError) as caught:
        plan_stage(request)
    assert all(words in str(caught.value) for words in contradicts), caught.value


@pytest.mark.parametrize("strategy", LAYOUT_NAMES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_strategy_that_contradicts_the_file_is_refused(tmp_path, strategy, stage):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    loaded = load_config(ROOT / "configs" / "run_lora.yaml", overrides=["train.effective_batch_size=8"])
    asked = LaunchOptions(strategy=strategy, deepspeed=DeepspeedRequest(file))
    if strategy == f"zero{stage}":
        assert build_stage_request(loaded, parse_hardware("2xH100"), asked).plan_request.allowed_layouts == (strategy,)
        return
    with pytest.raises(ConfigError, match=f"STRATEGY={strategy} contradicts .*own.json, which asks for zero{stage}"):
        build_stage_request(loaded, parse_hardware("2xH100"), asked)
