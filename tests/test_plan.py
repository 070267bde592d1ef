"""Decisions: precision, batch arithmetic, memory, and what does not fit."""

from __future__ import annotations

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import find_largest_fit, largest_fitting_multiple, make_advised_plan, parse_grid
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.explain import batch_lines, hardware_lines, speed_lines
from sft_play.planner.plan import RunLength, TracePrediction, require_fit
from sft_play.planner.precision import choose_precision
from tests.test_plan_truth import measured

GIB = 2**30


def config(text: str = "", name: str = "Qwen/Qwen2.5-3B-Instruct"):
    return config_from_text(f"model: {{name: {name}}}\n{text}", name="run.yaml")


@pytest.mark.parametrize(("gpu", "train", "expected", "reason"), [
    ((8, 0), "", "bfloat16", "the GPU has it"), ((7, 5), "", "float16", "has no bf16 units"),
    ((7, 5), "train: {bf16: true}", "float16", "fp16 instead of bf16"),
    ((9, 0), "train: {bf16: false}", "float32", "train.bf16 is false"),
    ((9, 0), "train: {fp16: true}", "float16", "train.fp16 is true"), (None, "", "float32", "CPU"),
    (None, "train: {bf16: true}", "bfloat16", "on a CPU because"),
    (None, "train: {fp16: true}", "float32", "instead of fp16"),
])  # fmt: skip
def test_precision_is_what_the_device_can_do_and_says_why(gpu, train, expected, reason):
    machine = Hardware((Gpu(0, "GPU", 16 * GIB, None, gpu),) if gpu else (), "CPU", 2, GIB, GIB)
    found = choose_precision(config(train), machine)
    assert (found.compute, reason in found.reason) == (expected, True), found.reason
    if gpu == (7, 5):  # weights of a full fp16 run are loaded in fp32
        assert choose_precision(config(f"tuning: {{mode: full}}\n{train}"), machine).load == "float32"


def plan_of(name="Qwen/Qwen2.5-3B-Instruct", machine="RTX3060", text="", **options):
    run = config(text, name)
    hardware = parse_hardware(machine) if isinstance(machine, str) else machine
    asked = {key: options.pop(key) for key in ("allowed_layouts", "has_eval", "measured_runs") if key in options}
    return make_advised_plan(PlanRequest(run, load_model_shape(name), hardware, **asked), **options)


def gpus(count, gib, **more):
    made = tuple(Gpu(n, "GPU", gib * GIB, None, (9, 0)) for n in range(count))
    return Hardware(made, "CPU", 8, 512 * GIB, 512 * GIB, named=True, **more)


def test_two_h200s_share_gemma_27b_as_users_know_it():
    text = "tuning: {mode: qlora, backend: bnb}\ntrain: {batch_size: auto, grad_accum: auto, bf16: true}"
    run = config(text, name="google/gemma-3-27b-it")
    both = tuple(Gpu(n, "NVIDIA H200", 141 * GIB, None, (9, 0)) for n in range(2))
    machine = Hardware(both, "CPU", 2, 64 * GIB, 64 * GIB)
    plan = plan_of("google/gemma-3-27b-it", machine, text)
    micro, accum = plan.batch.micro_batch, plan.batch.grad_accum
    assert micro * accum * 2 == 32
    assert "\n".join([*hardware_lines(machine), *batch_lines(plan, run)]).startswith(
        "Detected 2 GPUs:\n  GPU 0: NVIDIA H200 (141.0 GiB)\n  GPU 1: NVIDIA H200 (141.0 GiB)\nTotal VRAM: 282.0 GiB\n"
        f"Auto-calculated batch size: {micro} per GPU, gradient accumulation: {accum}\nEffective batch size: 32\n"
    )


def test_the_simplest_layout_that_fits_is_taken_and_the_others_say_why_not():
    plan = plan_of(machine=gpus(8, 80), text="tuning: {mode: lora}")
    assert plan.layout == "ddp"
    reasons = {candidate.layout.name: candidate.rejected_because for candidate in plan.candidates}
    assert "not needed: ddp fits at" in reasons["zero3"]
    assert "GiB less per step" in reasons["zero3"]
    assert {item.name for item in plan.not_possible} >= {"tp"}


def test_a_given_batch_that_does_not_fit_is_judged_not_changed():
    text = "train: {batch_size: 32, gradient_checkpointing: true}"
    machine = Hardware((Gpu(0, "GPU", 6 * GIB, None, (8, 6)),), "CPU", 2, GIB, GIB)
    plan = plan_of(machine=machine, text=text)
    assert (plan.batch.micro_batch, plan.fits) == (32, False)
    require_fit(plan, config(text))
    assert any("predicted to need" in reason for reason in plan.reasons)
    assert any(way.setting == "train.batch_size=1" for way in plan.suggestions)


@pytest.mark.parametrize("share", [0.9, 1.02, 1.1])
def test_a_trace_that_finds_more_counts_and_one_that_finds_other_sizes_is_said(share):
    def traced(candidate):
        return TracePrediction(int(candidate.memory.allocated * share), int(candidate.memory.reserved * share))

    plain, confirmed = plan_of(machine=gpus(1, 80)), plan_of(machine=gpus(1, 80), trace_candidate=traced)
    assert (plain.choice.is_traced, confirmed.choice.is_traced) == (False, True)
    for name in ("allocated", "reserved", "margin"):
        expected = max(1, share) * getattr(plain.memory, name)
        assert getattr(confirmed.memory, name) == pytest.approx(expected, rel=1e-6), name
    assert sum(confirmed.memory.terms.values()) == confirmed.memory.allocated
    assert any("apart: the larger one is used" in reason for reason in confirmed.reasons) == (share != 1.02)


def test_a_choice_that_its_trace_does_not_let_fit_is_given_up_for_the_next():
    plain = plan_of(machine=gpus(1, 16))
    seen = []

    def traced(candidate):
        seen.append(candidate.key)
        more = 10 * GIB if len(seen) == 1 else 0
        return TracePrediction(candidate.memory.allocated + more, candidate.memory.reserved + more)

    confirmed = plan_of(machine=gpus(1, 16), trace_candidate=traced)
    assert seen == [plain.choice.key, confirmed.choice.key]
    assert (confirmed.fits, seen[0] != seen[1]) == (True, True)


def test_a_trace_that_cannot_be_had_is_said_and_changes_nothing():
    plan = plan_of(trace_candidate=lambda candidate: TracePrediction(unavailable_reason="no such class"))
    assert (plan.choice.is_traced, plan.choice) == (False, plan_of().choice)
    assert "not confirmed by a trace: no such class" in plan.reasons


def test_what_one_layout_measured_does_not_make_another_look_faster():
    machine, text = gpus(4, 80), "tuning: {mode: lora}\ntrain: {kernels: none}"
    plain = plan_of(machine=machine, text=text)
    slow = [measured(mode="lora", layout=plain.layout, measured_tokens_per_s=10.0, measured_reserved=100)]
    taught = plan_of(machine=machine, text=text, measured_runs=slow)
    assert taught.layout == plain.layout == "ddp"
    assert taught.speed.tokens_per_s == pytest.approx(0.1 * plain.speed.tokens_per_s)


@pytest.mark.parametrize(("text", "expected"), [
    ("a=1,2", [("a=1",), ("a=2",)]), ("a=1,2 b=x", [("a=1", "b=x"), ("a=2", "b=x")]),
    ("a=[1,2],[3]", [("a=[1,2]",), ("a=[3]",)]),
])  # fmt: skip
def test_a_grid_is_every_combination(text, expected):
    assert parse_grid(text.split()) == expected


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=1,,2", "a=" + ",".join("1" * 300)])
def test_a_grid_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="WHATIF"):
        parse_grid([text])


@pytest.mark.parametrize(("most", "limit"), [(64 * 100, 64 * 37), (1000, 1000), (100, 64), (64, 0)])
def test_the_largest_is_found(most, limit):
    assert largest_fitting_multiple(lambda value: value <= limit, step=64, limit=most) == (limit or None)


@pytest.mark.parametrize("question", ["seq_len", "batch"])
def test_the_largest_that_fits_fits_and_the_next_does_not(question):
    shape, machine = load_model_shape("Qwen/Qwen2.5-3B-Instruct"), gpus(1, 8)
    text = "train: {gradient_checkpointing: true, batch_size: 1, effective_batch_size: 1}"
    found = find_largest_fit(question, PlanRequest(config(text), shape, machine)).value
    assert isinstance(found, int)

    def fits(value):
        words = [f"model.max_seq_len={value}"]
        if question == "batch":
            words = [f"train.batch_size={value}", f"train.effective_batch_size={value}"]
        run = config_from_text(f"model: {{name: Qwen/Qwen2.5-3B-Instruct}}\n{text}", name="x", overrides=words)
        return make_plan(PlanRequest(run, shape, machine)).fits

    assert fits(found)
    assert not fits(found + (64 if question == "seq_len" else 1))


def test_time_energy_and_money_of_the_whole_run():
    machine = parse_hardware("2xH100,price=2.5")
    plan = plan_of(machine=machine, estimate_run_length=lambda effective: RunLength(steps=1000, tokens=10_000_000))
    run = plan.as_json()["run"]
    assert plan.speed_known
    assert run["hours"] == pytest.approx(1000 * plan.speed.step_s / 3600)
    assert run["gpu_hours"] == pytest.approx(2 * run["hours"])
    assert run["cost"] == pytest.approx(2.5 * run["gpu_hours"])
    assert run["energy_kwh"] > 0


def test_a_gpu_without_rates_gets_no_promise_of_speed():
    plan = plan_of(machine="2xMyGPU,mem=24GiB")
    assert plan.as_json()["tokens_per_s"] is None
    assert any("not predicted" in line for line in speed_lines(plan))
    known = plan_of(machine="2xMyGPU,mem=24GiB,bandwidth=1000GBs,bf16=165TFLOPS")
    assert known.as_json()["tokens_per_s"] > 0


def test_the_speed_of_a_mistral_on_an_a100_is_near_what_was_published():
    """fms-acceleration, packed rows of 4,096, checkpointing: 3,567 (full) and 3,947 (LoRA) tokens/s."""
    for mode, published in (("full", 3567), ("lora", 3947)):
        train = "{batch_size: 8, gradient_checkpointing: true, kernels: none}"
        text = f"tuning: {{mode: {mode}}}\ntask_mode: cpt\ntrain: {train}"
        run = config_from_text(f"model: {{name: mistralai/Mistral-7B-v0.1, max_seq_len: 4096}}\n{text}", name="x")
        plan = make_plan(PlanRequest(run, load_model_shape(run.model.name), parse_hardware("A100-80GB")))
        assert plan.speed.tokens_per_s == pytest.approx(published, rel=0.15), mode
