"""fp16 ends at 65,504: families that leave it are not planned in it, and a run that leaves it says so."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, TrainingError
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import find_largest_fit
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.precision import FP16_OVERFLOWS, choose_precision, find_fp16_overflow, format_fp16_overflow
from sft_play.trace.confirm import load_planned_shape
from sft_play.training.loop.callbacks import GradientCheck, MetricsFile, NonFiniteStepGuard
from sft_play.training.model.model_loading import quantization_config
from tests.bundled import ORIGINS, model_configs
from tests.conftest import ROOT

SHAPE = load_model_shape("Qwen/Qwen2.5-3B-Instruct")
OLD, NEW = ("1xT4", "1xV100", "1xRTX2080Ti"), ("1xA100", "1xRTX3060")
IN_FORWARD = sorted(kind for kind, seen in FP16_OVERFLOWS.items() if not (seen.only_with or seen.in_backward))
IN_BACKWARD = sorted(kind for kind, seen in FP16_OVERFLOWS.items() if seen.in_backward)
WITH_EAGER = sorted(kind for kind, seen in FP16_OVERFLOWS.items() if seen.only_with == "eager")


def config(text: str = "", name: str = "no/model") -> RunConfig:
    return config_from_text(f"model: {{name: {name}}}\n{text}", name="run.yaml")


def of(kind: str, **changes: Any) -> Any:
    return replace(SHAPE, model_type=kind, **changes)


def compute_of(gpu: str, kind: str, text: str = "", **changes: Any) -> str:
    """What a run computes in on a machine, with a model of a type."""
    return choose_precision(config(text), parse_hardware(gpu), of(kind, **changes)).compute


def test_every_family_is_a_model_type_with_a_source():
    # its code is not transformers'
    assert [kind for kind in FP16_OVERFLOWS if kind not in CONFIG_MAPPING] == ["plamo2"]
    assert all(seen.source.startswith("https://") and seen.what for seen in FP16_OVERFLOWS.values())
    section = (ROOT / "docs" / "gpus.md").read_text().split("## GPUs without bf16")[1].split("\n## ")[0]
    families = {kind.removesuffix("_text") for kind in FP16_OVERFLOWS}
    assert sorted(kind for kind in families if f"`{kind}`" not in section) == []


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_a_family_that_overflows_is_computed_in_fp32_where_a_gpu_has_no_bf16(kind):
    for gpu in OLD:
        for train in ("", "train: {bf16: auto}", "train: {bf16: true}"):
            found = choose_precision(config(train), parse_hardware(gpu), of(kind))
            assert (found.compute, found.load) == ("float32", "float32")
            for words in ("has no bf16 units", "65,504", f"in {kind} models", FP16_OVERFLOWS[kind].source):
                assert words in found.reason
    for gpu in NEW:
        assert compute_of(gpu, kind) == "bfloat16"
        assert compute_of(gpu, kind, "train: {bf16: false}") == "float32"
    for gpu in (*OLD, *NEW):
        with pytest.raises(ConfigError) as refused:
            compute_of(gpu, kind, "train: {fp16: true}")
        said = str(refused.value)
        assert FP16_OVERFLOWS[kind].source in said
        assert said.index("train.fp16=false train.bf16=true") < said.index("train.fp16=false train.bf16=false")
        assert "attn_implementation" not in said


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "mistral", "phi3", "granite"])
def test_other_families_stay_in_fp16_there(kind):
    for found in (choose_precision(config(), parse_hardware(gpu), of(kind)) for gpu in OLD):
        assert (found.compute, "65,504" in found.reason) == ("float16", False)


def test_one_old_gpu_among_new_ones_decides_and_a_cpu_or_an_unknown_model_is_as_before():
    mixed = Hardware((*parse_hardware("1xA100").gpus, *parse_hardware("1xT4").gpus), "CPU", 2, 2**34, 2**34)
    assert choose_precision(config(), mixed, of("gemma3_text")).compute == "float32"
    assert compute_of("cpu", "gemma3_text", "train: {fp16: true}") == "float32"
    assert compute_of("cpu", "gemma3_text", "train: {bf16: true}") == "bfloat16"
    assert choose_precision(config("train: {fp16: true}"), parse_hardware("1xT4")).compute == "float16"


@pytest.mark.parametrize("kind", IN_BACKWARD)
def test_gradients_alone_are_left_to_loss_scaling_which_the_plan_says(kind):
    for train in ("", "train: {fp16: true}"):
        found = choose_precision(config(train), parse_hardware("1xV100"), of(kind))
        assert found.compute == "float16"
        assert "steps are skipped until loss scaling" in found.reason
        assert FP16_OVERFLOWS[kind].source in found.reason


@pytest.mark.parametrize("kind", WITH_EAGER)
def test_attention_logits_count_with_eager_attention_alone(kind):
    eager = config_from_text("model: {name: no/model, attn_implementation: eager}", name="run.yaml")
    found = [choose_precision(eager, parse_hardware("1xT4"), of(one)).compute for one in (kind, "llama")]
    assert found == ["float32", "float16"]
    asked = eager.model_copy(update={"train": eager.train.model_copy(update={"fp16": True})})
    with pytest.raises(ConfigError, match=r"model\.attn_implementation=sdpa"):
        choose_precision(asked, parse_hardware("1xT4"), of(kind))


def test_granite_leaves_it_with_attention_dropout_as_3_0_to_3_2_have_it():
    assert compute_of("1xT4", "granite", attention_dropout=0.1) == "float32"
    assert compute_of("1xT4", "granite", attention_dropout=0.0) == "float16"
    assert compute_of("1xT4", "llama", attention_dropout=0.1) == "float16"
    published = load_model_shape("ibm-granite/granite-3.1-2b-instruct")
    assert choose_precision(config(), parse_hardware("1xT4"), published).compute == "float32"


def test_weights_in_fp16_are_refused_where_nothing_casts_what_layers_hand_on():
    half = config_from_text("model: {name: no/model, dtype: float16}", name="run.yaml")
    for gpu in ("1xT4", "cpu"):
        with pytest.raises(ConfigError, match=r"model\.dtype: float16.*use model\.dtype=auto"):
            choose_precision(half, parse_hardware(gpu), of("gemma3_text"))
    for gpu, kind in (("1xA100", "gemma3_text"), ("cpu", "qwen3_moe"), ("1xT4", "llama")):  # the first by autocast
        assert choose_precision(half, parse_hardware(gpu), of(kind)).load == "float16"


@pytest.mark.parametrize("mode", ["qlora", "lora", "full"])
def test_the_plan_counts_fp32_and_says_why(mode):
    name = "google/gemma-3-1b-it"
    run = config(f"tuning: {{mode: {mode}}}", name)
    plan = make_plan(PlanRequest(run, load_model_shape(name), parse_hardware("1xT4")))
    assert plan.precision.compute == "float32"
    assert quantization_config(plan.precision).bnb_4bit_compute_dtype == torch.float32
    assert any("gemma3_text models activations reach 800,000" in reason for reason in plan.reasons)
    twin = make_plan(PlanRequest(run, replace(load_model_shape(name), model_type="llama"), parse_hardware("1xT4")))
    assert twin.precision.compute == "float16"
    assert plan.speed.tokens_per_s < twin.speed.tokens_per_s
    if mode == "lora":  # QLoRA has its weights in NF4, and full in fp16 keeps fp32 ones
        assert plan.memory.terms["weights"] > 1.9 * twin.memory.terms["weights"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_model_configs_that_others_publish(origin):
    found = {}
    for path in sorted(model_configs(origin).glob("*/config.json")):
        fields = json.loads(path.read_text())
        if "auto_map" not in fields:
            shape = load_planned_shape(fields, name="m")
            found[path.parent.name] = choose_precision(config(), parse_hardware("1xT4"), shape).compute
    in_fp32 = {name for name, compute in found.items() if compute == "float32"}
    assert in_fp32 == {name for name in found if name.startswith(("gemma-2", "gemma-3", "gpt-oss"))}
    assert len(in_fp32) >= 4
    assert len(found) >= 15


def test_the_largest_model_in_fp16_is_one_that_can_run_in_it():
    run = config("train: {fp16: true}\ntuning: {mode: qlora}", "Qwen/Qwen2.5-3B-Instruct")
    found = find_largest_fit("model", PlanRequest(run, SHAPE, parse_hardware("1xT4"))).value
    assert find_fp16_overflow(load_model_shape(found).model_type) is None


def test_a_fault_says_whether_the_family_is_known_and_the_ways_out():
    known, unknown = (format_fp16_overflow(kind, find_fp16_overflow(kind)) for kind in ("gemma3_text", "llama"))
    assert "known: in gemma3_text models activations reach 800,000 (https://" in known
    assert "llama is not among the families known for it" in unknown
    assert all("65,504" in said and "train.fp16=false train.bf16=true" in said for said in (known, unknown))


class Scaled:
    """A model of one weight, trained as accelerate trains in fp16: on a CPU, with its own optimizer and scaler."""

    def __init__(self, hf_config: Any = None, *, max_grad_norm: float = 1.0, max_steps: int = 100) -> None:
        Accelerator(cpu=True)
        self.model = nn.ModuleDict({"one": nn.Linear(2, 1), "two": nn.Linear(2, 1)})
        self.model.config = hf_config or LlamaConfig()
        self.scaler = torch.amp.GradScaler("cpu")
        self.optimizer = AcceleratedOptimizer(torch.optim.SGD(self.model.parameters(), lr=1e-3), scaler=self.scaler)
        self.args = SimpleNamespace(fp16=True, deepspeed=None)
        self.state = SimpleNamespace(global_step=0, max_steps=max_steps, is_world_process_zero=True, epoch=0.0)
        self.max_grad_norm, self.gradients = max_grad_norm, GradientCheck()
        told = {"args": self.args, "state": self.state, "model": self.model, "optimizer": self.optimizer}
        trainer = SimpleNamespace(**told, is_deepspeed_enabled=False, _tr_loss=torch.zeros(()))
        self.non_finite_guard = NonFiniteStepGuard(trainer, "stop")

    def step(self, factor: float) -> None:
        """One step with gradients of `factor`, which are infinite where factor x scale leaves fp16's range."""
        self.optimizer.zero_grad()
        hidden = self.model["one"](torch.ones(1, 2)) + 1e-3 * self.model["two"](torch.ones(1, 2))
        hidden.register_hook(lambda grad: (grad.half() * factor).float())
        self.scaler.scale(hidden.sum()).backward()
        self.scaler.unscale_(self.optimizer.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or float("inf"))
        self.non_finite_guard.check_step(norm)
        self.gradients.on_pre_optimizer_step(self.args, self.state, None, model=self.model, optimizer=self.optimizer)
        self.optimizer.step()
        self.non_finite_guard.on_optimizer_step()
        self.state.global_step += 1


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_steps_that_loss_scaling_skips_are_no_fault(max_grad_norm, caplog):
    run = Scaled(max_grad_norm=max_grad_norm)
    with caplog.at_level(logging.DEBUG):
        run.step(8.0)  # 65,536 x 8: infinite until the scale is 4,096
        while not run.gradients.is_done:
            run.step(8.0)
    skipped = caplog.text.count("skipped: gradients not finite, which is how fp16 finds its loss scale")
    assert (run.scaler.get_scale(), skipped, "Step 1 skipped" in caplog.text) == (4096, 4, True)


def test_a_tensor_without_gradient_is_still_found_in_fp16_once_a_step_is_taken():
    run = Scaled()
    run.model["unused"] = nn.Linear(2, 2)
    for _ in range(4):
        run.step(8.0)
    with pytest.raises(TrainingError, match=r"unused\.weight, unused\.bias"):
        run.step(8.0)


def test_skipping_on_and_on_stops_the_run_and_says_what_it_is():
    run = Scaled(Gemma3TextConfig())
    for _ in range(12):
        run.step(float("nan"))
    run.step(1e-6)  # taken: the count begins anew
    run.scaler.update(65_536.0)
    for _ in range(16):
        run.step(float("inf"))
    said = "(?s)step 30: this step and the 16 before it were skipped.*known: in gemma3_text models"
    with pytest.raises(TrainingError, match=said):
        run.step(float("nan"))
    assert run.scaler.get_scale() == 1.0  # of the step before


def test_a_run_that_ends_without_one_step_taken_is_no_success_but_one_that_is_stopped_is_no_failure():
    run = Scaled(max_steps=2)
    run.step(float("nan"))
    run.non_finite_guard.on_train_end(run.args, run.state, None)
    run.step(float("nan"))
    with pytest.raises(TrainingError, match=r"all 2 steps had values.*nothing was learned"):
        run.non_finite_guard.on_train_end(run.args, run.state, None)


@pytest.mark.parametrize(("fp16", "step", "logs", "words"), [
    (True, 3, {"loss": float("nan")}, "step 3: the loss is nan; activations or gradients left fp16's range"),
    *((True, 0, {key: float("nan")}, "step 0: the loss is nan; activations") for key in ("test_loss", "eval_loss")),
    (True, 3, {"eval_loss": float("nan")}, None),  # what was trained is kept
    (False, 0, {"eval_loss": float("nan")}, None),  # in other dtypes the step itself is looked at
    (True, 3, {"loss": 2.0, "grad_norm": float("inf")}, None),
])  # fmt: skip
def test_a_loss_that_is_not_a_number_says_what_it_is(fp16, step, logs, words, tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", start_time=0.0)
    args, model = SimpleNamespace(fp16=fp16), SimpleNamespace(config=Gemma3TextConfig())
    state = SimpleNamespace(global_step=step, is_world_process_zero=True, epoch=0.0)
    if words is None:
        file.on_log(args, state, None, logs=logs, model=model)
    else:
        with pytest.raises(TrainingError) as stopped:
            file.on_log(args, state, None, logs=logs, model=model)
        assert words in str(stopped.value)
        assert ("known: in gemma3_text models" in str(stopped.value)) is fp16
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
