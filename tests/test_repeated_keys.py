"""Grouped-query attention without flash attention: keys and values repeated, in the run, the plan and the trace."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.integrations import sdpa_attention

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape, parse_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.kernels import sdpa_kernel
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import needs_repeated_kv, sdpa_call, select_attention_kernel
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision
from sft_play.trace.settings import StepSettings
from sft_play.trace.step import trace_step
from sft_play.training.model import attention_functions
from sft_play.training.model.model_loading import load_model
from sft_play.training.prepare.model_spec import build_model_spec
from tests.test_decisions import QUICK

pytestmark = pytest.mark.build
GROUPED, PLAIN = "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-2-7b-hf"
FP16, FP32 = Precision("float16", "float16", ""), Precision("float32", "float32", "")


@pytest.fixture(autouse=True)
def _own_sdpa():
    with attention_functions.kv_repetition(enabled=False):
        yield


def heads(seed: int, *, groups: int, dtype: torch.dtype, length: int = 13) -> list[torch.Tensor]:
    """Query [2, 8, S, 16], key and value [2, G, S, 16]."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, count, length, 16, generator=draw).to(dtype) for count in (8, groups, groups)]
    return [one.requires_grad_() for one in made]


def answer(function: Any, tensors: list[torch.Tensor], mask: Any, **options: Any) -> list[torch.Tensor]:
    fresh = [one.detach().clone().requires_grad_() for one in tensors]
    module = SimpleNamespace(num_key_value_groups=8 // tensors[1].shape[1], is_causal=True)
    out, none = function(module, *fresh, mask, **options)
    assert none is None
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).reshape(out.shape)
    (out.float() * weight).sum().backward()
    return [out.detach(), *(one.grad for one in fresh)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_repeated_keys_give_what_grouped_ones_give_forwards_and_backwards(groups, dtype, masked):
    """Both run the same products; sums of a group's gradients are rounded once or more often: eps of the dtype."""
    eps = torch.finfo(dtype).eps
    for seed in range(3):
        tensors = heads(seed, groups=groups, dtype=dtype)
        mask = None
        if masked:
            mask = torch.ones(13, 13, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
            mask[1, :, :, :4] = False
            mask[1, :, range(13), range(13)] = True
        stock = answer(sdpa_attention.sdpa_attention_forward, tensors, mask, scaling=0.3)
        mine = answer(attention_functions.sdpa_attention, tensors, mask, scaling=0.3)
        for one, other in zip(stock, mine, strict=True):
            largest = one.float().abs().max().item()
            assert (one.float() - other.float()).abs().max().item() <= 4 * eps * max(1.0, largest)
            assert not masked or torch.equal(one, other)


def model_of(path: Any, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("rows", ["plain", "padded", "packed"])
def test_a_model_has_the_loss_and_gradients_of_the_stock_one(tiny_llama, rows, dtype, tolerance):
    config = model_of(tiny_llama, dtype).config
    assert config.num_key_value_heads < config.num_attention_heads
    ids = torch.arange(40).reshape(2, 20) % 50 + 3
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if rows == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 15:] = 0
    if rows == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(8), torch.arange(12)]).repeat(2, 1)
    found = []
    for repeated in (False, True):
        with attention_functions.kv_repetition(enabled=repeated):
            model = model_of(tiny_llama, dtype)
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
            found.append((loss.item(), {name: one.grad.float() for name, one in model.named_parameters()}))
    (loss, stock), (other, mine) = found
    assert other == pytest.approx(loss, rel=tolerance)
    for name, grad in stock.items():
        assert (grad - mine[name]).norm() <= tolerance * max(grad.norm().item(), 1e-3), name


@QUICK
@given(
    name=st.sampled_from([GROUPED, PLAIN, "meta-llama/Llama-3.1-8B"]),
    attention=st.sampled_from(["sdpa", "eager", "flash_attention_2"]),
    masked=st.booleans(),
    half=st.booleans(),
    capability=st.sampled_from([None, (6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)]),
)
def test_no_run_of_this_toolkit_meets_the_math_kernel(name, attention, masked, half, capability):
    shape = load_model_shape(name)
    asked: dict[str, Any] = {"attention": attention, "half_precision": half, "capability": capability}
    mine = select_attention_kernel(shape, masked=masked, on_gpu=True, **asked)
    stock = sdpa_kernel(sdpa_call(shape, masked=masked, half_precision=half), capability, uses_cudnn=False)
    repeats = needs_repeated_kv(shape, **asked)
    if attention != "sdpa":
        assert mine == ("eager" if attention == "eager" else "flash")
    else:
        assert mine == ("efficient" if stock == "math" else stock)
        assert repeats or stock != "math"
    flash = half and (capability is None or capability[0] >= 8)
    grouped = name in (GROUPED, "meta-llama/Llama-3.1-8B")
    assert repeats == (attention == "sdpa" and grouped and not flash)


@pytest.mark.parametrize(("model", "machine", "words", "repeats"), [
    (GROUPED, "T4", [], True), (GROUPED, "V100-32GB", ["train.batch_size=1"], True), (GROUPED, "A100-80GB", [], False),
    (GROUPED, "A100-80GB", ["train.bf16=false", "train.fp16=false"], True),
    (GROUPED, "T4", ["model.attn_implementation=eager"], False), (PLAIN, "T4", [], False), (GROUPED, "cpu", [], False),
])  # fmt: skip
def test_the_gpu_and_the_precision_decide_and_the_plan_says_so(model, machine, words, repeats):
    config = config_from_text(f"model: {{name: {model}}}", name="x", overrides=["tuning.mode=lora", *words])
    plan = make_plan(PlanRequest(config, load_model_shape(model), parse_hardware(machine)))
    assert plan.repeats_kv == repeats == plan.as_json()["repeats_kv"]
    assert any("keys and values are repeated" in reason for reason in plan.reasons) == repeats
    assert plan_from_json(json.loads(json.dumps(plan.as_json()))).repeats_kv == repeats


def test_the_model_spec_says_why_and_loading_puts_it_to_use(tiny_llama):
    config = config_from_text(f"model: {{name: {tiny_llama}}}\ntuning: {{mode: full}}", name="x")
    for repeats in (True, False):
        drawn = build_model_spec(config, FP32, tokenizer_size=100, repeats_kv=repeats)
        (said,) = [note for note in drawn.notes if note.startswith("Attention: sdpa")]
        assert ("keys and values are repeated to all heads" in said) == repeats
        model = load_model(config, FP32, drawn, device="cpu", quant_storage=None)
        assert attention_functions.repeats_kv() == repeats
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(("precision", "capability"), [(FP16, (7, 5)), (FP32, (8, 0))])
def test_plan_and_trace_count_repeated_keys_alike(precision, capability, checkpointing):
    """Four layers of a grouped model, 2,048 tokens without padding: 6% at most apart, and no S x S scores in either."""
    from benchmarks.memory_model import old_scripts  # noqa: F401  (which lets the tracer run them)
    from benchmarks.memory_model.script_settings import to_script_settings

    model = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    base = StepSettings(
        model=model, mode="full", peft=None, micro_batch=1, seq_len=2048, weights=precision.load, autocast=None,
        checkpointing=checkpointing, loss="logits", attention="sdpa", mask="ones", capability=capability, clip=False,
    )  # fmt: skip
    traced = {on: trace_step(to_script_settings(base, repeats_kv=on)).allocated for on in (True, False)}
    config = config_from_text("model: {name: m}\ntuning: {mode: full}", name="x")
    layers = None if checkpointing else 0
    step = Step(1, 1, 2048, checkpointed_layers=layers, loss="logits", capability=capability, saves=False)
    planned = estimate_memory(config, parse_model_shape(model, name="m"), precision, step).allocated
    scores = 16 * 2048**2 * 4
    assert traced[False] - traced[True] >= scores * (1 if checkpointing else 4)
    if precision is FP32:  # fp16 without autocast is no run of this toolkit: its norms and head differ a little
        assert planned == pytest.approx(traced[True], rel=0.06)
