"""Experts in 4 bits: packed as they are read, trained beside adapters, resumed, merged; adapters of their own."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError
from sft_play.finished.export.merge import merge_run
from sft_play.finished.run import find_finished_run
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import find_largest_fit
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import STACKING_COPIES, estimate_memory, loading_terms
from sft_play.planner.memory.model_states import adapter_params, nf4_bytes, weight_bytes
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import load_planned_shape, load_run_model_shape, step_settings
from sft_play.trace.step import record_step
from sft_play.training.model import nf4_experts
from sft_play.training.model.model_loading import _build_empty_model, load_model
from sft_play.training.prepare.experts import PACKED_ATTRIBUTE, stacked_experts
from sft_play.training.prepare.model_spec import build_model_spec
from tests.conftest import chat, write_rows, write_run
from tests.models import make_tokenizer
from tests.test_distributed import losses, start
from tests.test_experts import ONE_BLOCK, sizes
from tests.test_train import assert_same_bits, weights

FP32, BF16 = Precision("float32", "float32", ""), Precision("bfloat16", "bfloat16", "")
QWEN = "Qwen/Qwen3-30B-A3B"
OWN = {
    "granitemoe": {"num_local_experts": 4, "intermediate_size": 32},
    "llama4_text": {
        "num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 32, "head_dim": 16,
        "interleave_moe_layer_step": 1, "num_key_value_heads": 2,
    },
}  # fmt: skip


def small(kind: str, seed: int = 0) -> dict:
    """Sizes of a random model of a type, with a vocabulary that holds the tokenizer's."""
    fields = {**sizes(kind if kind not in OWN else "mixtral", seed), **OWN.get(kind, {})}
    return {**fields, "model_type": kind, "vocab_size": 400, "max_position_embeddings": 256, "pad_token_id": None}


def saved(folder: Path, kind: str, seed: int = 0, **changes) -> Path:
    fields = {**small(kind, seed), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    with torch.no_grad():  # what begins at zero would pass no gradient on, and every expert would be a tie
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def run(folder: Path | str, max_seq_len: int = 64, **tuning) -> object:
    text = {"model": {"name": str(folder), "max_seq_len": max_seq_len}, "tuning": tuning}
    return config_from_text(json.dumps(text), name="run")


def loaded(config: object, precision: Precision = FP32):
    spec = build_model_spec(config, precision, tokenizer_size=400)
    return load_model(config, precision, spec, device="cpu"), spec


def trained(world: Path, *words: str, command: str = "train", **variables: str) -> Path:
    answer = start(world, command, "--config", f"{world}/run.yaml", *words, **variables)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    name = variables.get("RUN") or next(word for word in words if word.startswith("output.name=")).partition("=")[2]
    return world / "outputs" / name


@pytest.mark.build
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "granitemoe", "llama4_text"])
def test_every_stacked_weight_is_packed_and_computes_what_its_rounded_values_do(tmp_path, kind, precision):
    """Bytes are the plan's; the logits are those of a plain model whose experts were rounded to NF4 and back."""
    folder = saved(tmp_path / "base", kind, **ONE_BLOCK if kind == "qwen3_moe" else {})
    model, spec = loaded(run(folder), precision)
    dtype = getattr(torch, precision.load)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=spec.attention.name)
    plain.config._experts_implementation = model.config._experts_implementation
    found = 0
    for (path, module, name), (_, other, _) in zip(stacked_experts(model), stacked_experts(plain), strict=True):
        packed, reads = module._parameters[name], vars(module)[PACKED_ATTRIBUTE][name]
        assert packed.dtype is torch.uint8, path
        rounded = reads.dequantise(packed)
        error = (rounded.float() - getattr(other, name).float()).norm() / getattr(other, name).float().norm()
        assert 0.02 < error < 0.15  # NF4 rounds normal numbers by 9%
        getattr(other, name).data = rounded
        found += packed.numel()
    for name, module in plain.named_modules():
        four_bit = dict(model.named_modules())[name]
        if type(four_bit).__name__ == "Linear4bit":
            module.weight.data = nf4_experts.functional.dequantize_4bit(four_bit.weight, four_bit.weight.quant_state)
    layers = load_run_model_shape(run(folder)).layers
    assert found == sum(kind.count * (one.weights // 2) for kind in layers for one in kind.expert_weights)
    ids = torch.randint(0, 400, (2, 12))
    with torch.no_grad():
        ours, theirs = (one(input_ids=ids).logits.float() for one in (model, plain))
    assert (ours - theirs).norm() <= (1e-6 if precision is FP32 else 2e-2) * theirs.norm()


def whole_stacks() -> set[int]:
    """Where the floats of every three-dimensional tensor of this process stand."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]  # no fake ones
    floats = [one for one in tensors if one.dim() == 3 and one.is_floating_point() and not one.is_meta]
    return {one.untyped_storage().data_ptr() for one in floats}


@pytest.mark.build
def test_no_two_stacks_are_whole_at_once_while_loading(tmp_path, monkeypatch):
    folder = saved(tmp_path / "base", "qwen3_moe", num_hidden_layers=4)
    counts, plain, before = [], nf4_experts.pack_nf4, whole_stacks()  # of other tests of this process

    def watched(weight, storage):
        counts.append(len(whole_stacks() - before))
        return plain(weight, storage)

    monkeypatch.setattr(nf4_experts, "pack_nf4", watched)
    model, _ = loaded(run(folder))
    assert len(counts) == sum(1 for _ in stacked_experts(model)) > 4
    assert max(counts) <= 2  # itself, and its contiguous copy


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(6))
def test_a_stack_too_large_for_the_kernels_is_packed_in_parts(seed, storage, monkeypatch):
    draw = random.Random(seed)
    experts, rows, columns = draw.randint(1, 9), 64, 64 * draw.randint(1, 2)
    weight = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    whole, one = nf4_experts.pack_nf4(weight, storage)
    most = draw.randint(1, experts)
    monkeypatch.setattr(nf4_experts, "MAX_PACKED_ELEMENTS", most * rows * columns + draw.randint(0, rows * columns - 1))
    packed, packing = nf4_experts.pack_nf4(weight, storage)
    assert packed.nbytes == whole.nbytes
    assert len(packing.states) == -(-experts // most)
    found = nf4_experts.unpack_nf4(packed, packing)
    assert (found.shape, found.dtype) == (weight.shape, weight.dtype)
    monkeypatch.setattr(nf4_experts, "MAX_PACKED_ELEMENTS", 2**31 - 1)
    for part, alone in zip(found.split(most), weight.split(most), strict=True):
        assert torch.equal(part, nf4_experts.unpack_nf4(*nf4_experts.pack_nf4(alone, storage)))
    assert (found - nf4_experts.unpack_nf4(whole, one)).float().norm() < 0.02 * weight.float().norm()


def test_qwen3_30b_fits_24_gib_and_its_adapters_are_counted():
    shape, config = load_model_shape(QWEN), run(QWEN)
    plan = make_plan(PlanRequest(config, shape, parse_hardware("1xRTX4090")))
    assert plan.fits
    assert weight_bytes(shape, itemsize=2, is_nf4=True) < 16 * 2**30
    assert plan.memory.allocated < 20 * 2**30
    walk = StepMemorySimulation(config, shape, BF16, Step(1, 1, 1024))
    stacks = [one.weights for kind in shape.layers for one in kind.expert_weights]
    beside = STACKING_COPIES * 2 * max(stacks)
    assert sum(loading_terms(walk).values()) == walk.resident.weights + max(beside, 4 * walk.trained_parameters.params)
    with_experts = run(QWEN, lora={"target_parameters": "auto"}).tuning.lora
    more = adapter_params(shape, with_experts) - adapter_params(shape, config.tuning.lora)
    pairs = [(kind.count, one) for kind in shape.layers for one in kind.expert_weights]
    assert more == sum(count * 16 * one.experts * (one.inputs + one.outputs) for count, one in pairs)


@pytest.mark.parametrize("seed", range(20))
def test_packed_bytes_are_those_of_every_matrix(seed):
    draw = random.Random(seed)
    shape = load_model_shape(draw.choice([QWEN, "openai/gpt-oss-20b", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-8B"]))
    width = draw.choice([2, 4])
    matrices = [(linear.weights, count) for linear, count in shape.linears]
    matrices += [(one.weights, kind.count) for kind in shape.layers for one in kind.expert_weights]
    packed = sum(count * nf4_bytes(elements) for elements, count in matrices)
    rest = shape.params - sum(count * elements for elements, count in matrices)
    found = weight_bytes(shape, itemsize=width, is_nf4=True)
    assert packed + width * rest <= found <= 1.002 * (packed + width * rest) + 2**22
    assert weight_bytes(shape, itemsize=width, is_nf4=False) >= width * shape.params


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    saved(folder / "base", "qwen3_moe", num_experts=4, moe_intermediate_size=32, mlp_only_layers=[])
    rows = write_rows(folder / "rows.jsonl", (chat(f"q {i}", " ".join(["word"] * (5 + i % 7))) for i in range(16)))
    tuning = {"mode": "qlora", "lora": {"target_parameters": "auto"}}
    train = {"effective_batch_size": 4, "max_steps": 6, "save_steps": 2, "learning_rate": 1e-2}
    write_run(folder, folder / "base", rows, model={"max_seq_len": 128}, tuning=tuning, train=train)
    return folder


@pytest.fixture(scope="module")
def alone(world) -> Path:
    folder = trained(world, "output.name=alone")
    assert "Adapters: one on down_proj and gate_up_proj of every expert" in (folder / "train.log").read_text()
    assert "nf4" in json.loads((folder / "summary.json").read_text())["updates"]["weights"]
    return folder


@pytest.mark.build
def test_a_broken_run_is_resumed_bit_by_bit(world, alone):
    trained(world, "output.name=broken", "train.stop_after_steps=3")
    broken = trained(world, command="resume", RUN="broken")
    assert_same_bits(weights(alone), weights(broken))


@pytest.mark.build
def test_plain_peft_takes_the_adapter_and_the_merge_equals_it(world, alone):
    run_ = find_finished_run(world / "outputs", str(alone))
    merged = merge_run(run_, dtype="fp32", base="original")
    ids = torch.randint(0, 400, (2, 24))
    base = AutoModelForCausalLM.from_pretrained(world / "base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, alone / "adapter").eval()
    whole = AutoModelForCausalLM.from_pretrained(merged.path, dtype=torch.float32).eval()
    with torch.no_grad():
        ours, theirs = whole(input_ids=ids).logits, adapted(input_ids=ids).logits
        with adapted.disable_adapter():
            without = adapted(input_ids=ids).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert (without - theirs).abs().max() > 1e-3 * theirs.abs().max()


@pytest.mark.build
def test_every_expert_that_saw_a_token_has_a_gradient(world):
    """The adapter's factors of an expert: B's has one where a token came by, A's as soon as B is not zero."""
    model, _ = loaded(run(world / "base"))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_parameters=["gate_up_proj", "down_proj"], target_modules=[])
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    seen = []
    for _, module, _ in stacked_experts(model):
        # nothing is predicted from the last token
        module.register_forward_hook(lambda module, inputs, output: seen.append((id(module), inputs[1][:-1].unique())))
    ids = torch.randint(0, 400, (1, 4))
    model(input_ids=ids, labels=ids).loss.backward()
    by_module = dict(seen)
    wrappers = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    assert len(wrappers) == 4
    for wrapper in wrappers:
        routed = set(by_module[id(wrapper.get_base_layer())].tolist())
        factors = wrapper.lora_A["default"].weight.grad.reshape(wrapper.num_experts, -1)
        found = {expert for expert in range(wrapper.num_experts) if factors[expert].abs().sum() > 0}
        assert found == routed != set()


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_two_ranks_lose_what_one_process_does(world, alone, strategy):
    words = (f"output.name={strategy}", "output.if_exists=replace")
    spread = trained(world, *words, command="train-distributed", STRATEGY=strategy, NPROC="2")
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.build
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_experts_stay_as_they_are_where_the_run_leaves_them(tmp_path, precision):
    """`tuning.quantize_experts: false`: weights of the base bit for bit beside 4-bit layers, and the plan's bytes."""
    folder = saved(tmp_path / "base", "qwen3_moe", **ONE_BLOCK)
    config = run(folder, quantize_experts=False)
    model, spec = loaded(config, precision)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision.load))
    for (path, module, name), (_, other, _) in zip(stacked_experts(model), stacked_experts(plain), strict=True):
        assert torch.equal(getattr(module, name), getattr(other, name)), path
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    shape, packed = load_run_model_shape(config), load_model_shape(str(folder))
    stacks = sum(one.weights * kind.count for kind in packed.layers for one in kind.expert_weights)
    width = 4 if precision is FP32 else 2
    assert packed.packable_params - shape.packable_params == stacks > 0
    in_nf4 = sum(nf4_bytes(one.weights) * kind.count for kind in packed.layers for one in kind.expert_weights)
    difference = weight_bytes(shape, itemsize=width, is_nf4=True) - weight_bytes(packed, itemsize=width, is_nf4=True)
    assert difference == width * stacks - in_nf4
    sharded = _build_empty_model(config, precision, spec, None)
    assert not any(vars(module).get(PACKED_ATTRIBUTE) for module in sharded.modules())  # what FSDP2 fills unit by unit


@pytest.mark.build
@pytest.mark.slow
def test_a_merge_leaves_experts_that_stayed_as_they_were(world):
    """Trained, stopped, resumed, merged: experts are the base's bit for bit, linear layers what NF4 stands for."""
    words = ("tuning.lora.target_parameters=[]", "tuning.quantize_experts=false")
    trained(world, *words, "output.name=plain", "train.stop_after_steps=3")
    plain = trained(world, *words, command="resume", RUN="plain")
    run_ = find_finished_run(world / "outputs", str(plain))
    merged = merge_run(run_, dtype="fp32", base="dequantized")
    places = (world / "base", merged.path)
    base, whole = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in places)
    assert not any("experts" in name for name in load_file(plain / "adapter" / "adapter_model.safetensors"))
    theirs = dict(base.named_parameters())
    for name, weight in whole.named_parameters():
        if ".experts." in name:
            assert torch.equal(weight, theirs[name]), name
        elif name.endswith("_proj.weight"):
            assert not torch.equal(weight, theirs[name]), name


@pytest.mark.build
@pytest.mark.parametrize("quantize", ["auto", False])
@pytest.mark.parametrize("checkpointed", [0, None])
def test_the_plan_of_either_is_its_traces(quantize, checkpointed):
    fields = {**small("qwen3_moe"), "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16,
              "head_dim": 64, "num_hidden_layers": 2}  # fmt: skip
    config = run("m", 128, quantize_experts=quantize)
    shape = load_planned_shape(fields, name="m")
    shape = shape if quantize == "auto" else shape.without_packed_experts()
    step = Step(4, 1, 128, masks=False, saves=False, checkpointed_layers=checkpointed)
    traced = record_step(step_settings(config, fields, shape, BF16, step)).peak
    # the experts' weights are 8% more of the peak in 16 bits
    assert estimate_memory(config, shape, BF16, step).allocated == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize(("tuning", "key"), [
    ({"mode": "lora", "quantize_experts": True}, "tuning.quantize_experts"),
    ({"lora": {"experts": True, "target_parameters": ["down_proj"]}}, "tuning.lora.experts"),
    ({"lora": {"experts": True, "dropout": 0.1}}, "tuning.lora.dropout"),
    ({"lora": {"target_parameters": "auto", "use_dora": True}}, "adapters on experts have none"),
    ({"lora": {"experts": True, "init": "pissa"}}, "tuning.lora.init"),
])  # fmt: skip
def test_what_says_two_things_of_experts_is_refused(tuning, key):
    with pytest.raises(ConfigError, match=key):
        run("m", **tuning)


@pytest.mark.parametrize(("model", "tuning", "words"), [
    ("Qwen/Qwen3-8B", {"quantize_experts": True}, r"quantize_experts=true: Qwen/Qwen3-8B has no experts"),
    ("Qwen/Qwen3-8B", {"lora": {"experts": True}}, r"lora\.experts: Qwen/Qwen3-8B has no experts"),
    ("Qwen/Qwen3-8B", {"lora": {"target_parameters": "auto"}}, r"target_parameters: Qwen/Qwen3-8B has no experts"),
    (QWEN, {"lora": {"target_parameters": ["gate_up"]}}, r"gate_up matches nothing.*down_proj, gate_up_proj"),
    (QWEN, {"quantize_experts": True, "lora": {"experts": True}}, None),
    (QWEN, {"lora": {"target_parameters": ["down_proj"]}}, None),
    ("Qwen/Qwen3-8B", {"mode": "full", "lora": {"experts": True}}, None),
])  # fmt: skip
def test_a_plan_refuses_what_is_asked_of_experts_that_are_not_there(model, tuning, words):
    request = PlanRequest(run(model, **tuning), load_model_shape(model), parse_hardware("8xH100"))
    if words is None:
        assert make_plan(request).candidates
    else:
        with pytest.raises(ConfigError, match=words):
            make_plan(request)


def test_the_largest_model_is_asked_with_the_experts_that_the_run_has():
    packed, whole = (
        PlanRequest(run(QWEN, 1024, quantize_experts=how), load_model_shape(QWEN), parse_hardware("1xRTX5090"))
        for how in ("auto", False)
    )
    found, other = (load_model_shape(str(find_largest_fit("model", one).value)) for one in (packed, whole))
    assert found.num_experts
    assert found.params > other.params
