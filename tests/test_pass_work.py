"""What a pass moves and starts, counted on the class's own blocks: figures worked out by hand, the same by widths, and
what is remembered; and a host that is measured."""

import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.launch.planning import build_plan_request, plan_request
from sft_play.machine import host_speed
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.host_speed import HostSpeed, load_host_speeds, save_host_speed
from sft_play.models.config_json import load_config_json, load_model_shape
from sft_play.planner.batching import MicroBatches
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.pass_work import CountedWork, DirectionWork, PassWork, estimate_pass_work, find_pass_work
from sft_play.planner.precision import Precision
from sft_play.planner.speed import OPERATOR_RANGE_S, OPERATOR_S
from sft_play.trace import confirm
from sft_play.trace.confirm import BlockPassMeter

HALF, WIDE = Precision("bfloat16", "bfloat16", ""), Precision("bfloat16", "float32", "")
QWEN = "Qwen/Qwen3-4B"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    monkeypatch.setattr(confirm, "_measured_by_key", {})
    return tmp_path


@functools.cache
def both_works(name: str, mode: str, precision: Precision, train: str = "{}") -> tuple[CountedWork, CountedWork]:
    """Counted, and by widths."""
    config = config_from_text(f"model: {{name: {name}}}\ntuning: {{mode: {mode}}}\ntrain: {train}", name="x")
    shape = load_model_shape(name)
    step = Step(4, 1, 2048, checkpointed_layers=0, attention="sdpa" if shape.has_sdpa else "eager")
    counted = BlockPassMeter(json.dumps(load_config_json(name)))(config, shape, precision, step)
    assert counted is not None
    return counted, estimate_pass_work(config, shape, precision, step)


def total(work: PassWork) -> DirectionWork:
    return work.forward.plus(work.backward)


@pytest.mark.build
@pytest.mark.parametrize(("mode", "precision", "train", "forward", "backward", "kilobytes"), [
    ("lora", HALF, "{kernels: none}", 96, 144, 2812), ("qlora", HALF, "{kernels: none}", 117, 151, 2935),
    ("lora", HALF, "{}", 65, 111, 2230), ("qlora", HALF, "{}", 79, 118, 2230),
    ("full", HALF, "{}", 54, 103, 1959), ("full", WIDE, "{}", 64, 117, 2600),
])  # fmt: skip
def test_a_block_of_qwen3_is_counted(mode, precision, train, forward, backward, kilobytes):
    """Operators as `benchmarks/host_pass.json` counts them in runs (176, 197, 181; PEFT's 240, 268); bytes without
    products' own."""
    counted, _ = both_works(QWEN, mode, precision, train)
    assert (counted.plain.forward.operators, counted.plain.backward.operators) == (forward, backward)
    plain, compiled = total(counted.plain), total(counted.compiled)
    assert plain.token_bytes / 1000 == pytest.approx(kilobytes, rel=0.01)
    assert compiled.token_bytes < 0.5 * plain.token_bytes
    assert compiled.operators < 0.5 * plain.operators


FAMILIES = (
    QWEN, "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "HuggingFaceTB/SmolLM3-3B", "allenai/OLMo-2-1124-7B",
    "microsoft/Phi-3.5-mini-instruct", "google/gemma-3-1b-it", "google/gemma-2-9b", "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-v0.1", "zai-org/GLM-4.5-Air", "openai/gpt-oss-20b",
)  # fmt: skip
QUICK = ((QWEN, "lora"), (QWEN, "full"), ("meta-llama/Llama-3.1-8B", "full"), ("google/gemma-3-1b-it", "lora"),
         ("mistralai/Mixtral-8x7B-v0.1", "lora"))  # fmt: skip


@pytest.mark.build
@pytest.mark.parametrize(("name", "mode"), [
    pytest.param(name, mode, marks=[] if (name, mode) in QUICK else pytest.mark.slow)
    for name, mode in itertools.product(FAMILIES, ("lora", "full"))
])  # fmt: skip
def test_widths_come_near_what_is_counted(name, mode):
    counted, estimated = (total(work.compiled) for work in both_works(name, mode, HALF, "{compile: true}"))
    assert estimated.token_bytes == pytest.approx(counted.token_bytes, rel=0.35)
    counted, estimated = (total(work.plain) for work in both_works(name, mode, HALF))
    assert estimated.token_bytes == pytest.approx(counted.token_bytes, rel=0.2)
    assert estimated.operators == pytest.approx(counted.operators, rel=0.3)


@pytest.mark.build
def test_what_was_counted_is_remembered_and_a_class_that_does_not_run_goes_by_widths(cache, monkeypatch):
    config, shape = config_from_text(f"model: {{name: {QWEN}}}", name="x"), load_model_shape(QWEN)
    meter, step = BlockPassMeter(json.dumps(load_config_json(QWEN))), Step(1, 1, 64, checkpointed_layers=0)
    counted = meter(config, shape, HALF, step)
    monkeypatch.setattr(confirm, "_measured_by_key", {})
    monkeypatch.setattr(confirm, "_import_module", lambda name: pytest.fail("counted again"))
    # no rows, no batch and no checkpointing changes it
    other = Step(8, 4, 2048, checkpointed_layers=None)
    assert meter(config, shape, HALF, other) == meter(config, shape, HALF, step) == counted

    def refuse(*_: Any, **__: Any) -> None:
        raise confirm.TraceUnavailable("no such class")

    monkeypatch.setattr(confirm, "_import_module", lambda name: SimpleNamespace(count_blocks=refuse))
    lora = config_from_text(f"model: {{name: {QWEN}}}\ntuning: {{mode: lora}}", name="x")
    assert meter(lora, shape, HALF, step) is None
    asked = find_pass_work(lora, dataclasses.replace(shape, pass_meter=meter), HALF, step)
    assert asked == find_pass_work(lora, shape, HALF, step) == estimate_pass_work(lora, shape, HALF, step).plain


@pytest.mark.build
def test_a_traced_plan_counts_and_others_go_by_widths(cache, monkeypatch):
    """Neither one by one machine nor another: what is remembered changes no plan that counts nothing."""
    config = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}\ntuning: {mode: lora}", name="x")
    machine = dataclasses.replace(parse_hardware("1xH100"), named=False)
    counted = []
    real = BlockPassMeter.__call__
    monkeypatch.setattr(
        BlockPassMeter, "__call__", lambda self, *words: counted.append(real(self, *words)) or counted[-1]
    )
    request = build_plan_request(config, machine, ("single",))
    widths = plan_request(request)
    assert not counted
    traced = plan_request(request, trace=True)
    assert len(set(counted)) <= 2  # rows joined, and one alone
    assert counted[0] is not None
    assert traced.speed.step_s == pytest.approx(widths.speed.step_s, rel=0.05)
    assert plan_request(request).speed == widths.speed


# --- the host ---------------------------------------------------------------------------------------------------------
def test_a_measured_host_is_kept_by_device_and_no_odd_figure_is(cache):
    kept = (("H100", 2e-5, "a run"), ("A100", 1e-5, "make gpu-info"))
    for device, operator_s, measured_by in (*kept, ("H100", 0.0, "x"), ("H100", float("nan"), "x")):
        save_host_speed(device, operator_s, measured_by=measured_by)
    found = load_host_speeds()
    assert [(one.device, one.operator_s, one.measured_by) for one in found.values()] == [*kept]
    (cache / host_speed.HOST_SPEED_FILE).write_text("[]")
    assert load_host_speeds() == {}


def short_rows_plan(**changes: Any) -> Any:
    config = config_from_text(
        "model: {name: Qwen/Qwen2.5-0.5B, max_seq_len: 64}\ntuning: {mode: lora}\n"
        "train: {batch_size: 1, effective_batch_size: 4}", name="x",
    )  # fmt: skip
    return make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), parse_hardware("1xH100"), **changes))


def test_a_plan_says_what_its_host_is_from_and_shows_the_range_where_it_matters():
    unknown, known = short_rows_plan(), short_rows_plan(host_speed=HostSpeed("H100", 3e-5, "a run", "2026-12-01"))
    (said,) = [reason for reason in unknown.reasons if reason.startswith("host: not measured on this machine")]
    low, high = (short_rows_plan(host_speed=HostSpeed("", one, "", "")).speed.tokens_per_s for one in OPERATOR_RANGE_S)
    assert f"come to {low:,.0f} to {high:,.0f} tokens/s" in said
    assert high < unknown.speed.tokens_per_s < low
    assert "host: 30 us an operator, measured by a run (2026-12-01)" in known.reasons
    # all of a pass of 64 tokens is the host's
    assert known.speed.step_s / unknown.speed.step_s == pytest.approx(3e-5 / OPERATOR_S, rel=0.01)
    assert known.choice.uncorrected == unknown.choice.uncorrected


@pytest.mark.build
def test_the_host_of_this_machine_takes_microseconds_for_an_operator():
    import torch

    from sft_play.trace import host_probe

    assert 1e-7 < host_probe.measure_operator_s(torch.device("cpu")) < 1e-2
    forward = host_probe.build_probe(torch.device("cpu"))
    with host_probe.KernelLog() as log:
        forward().backward()
    assert len(log.kernels) > 240 * host_probe.LAYERS  # those of Qwen3 with adapters


@pytest.mark.build
def test_a_run_measures_its_host_before_the_first_step_and_trains_as_if_it_had_not(tmp_path, tiny_llama, monkeypatch):
    from sft_play.training.loop import out_of_memory
    from sft_play.training.measure.monitor import time_short_pass
    from tests.ranks_micro_batches import trainer_of

    floors, losses = [], []
    for measures in (False, True):
        trainer = trainer_of(tiny_llama, tmp_path, MicroBatches(2), ranks=1, bf16=False)
        if measures:  # as on a GPU
            monkeypatch.setattr(out_of_memory, "measure_pass_floor", time_short_pass)
            monkeypatch.setattr(out_of_memory, "record_host_speed", lambda plan, floor_s: floors.append(floor_s))
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        assert trainer.step_memory.pass_floor_s == (floors[0] if measures else None)
    assert losses[0] == losses[1]
    assert 0 < floors[0] < 10
    # what a run's first five steps take is left out of its passes
    passes, steps = trainer._monitor.timed_passes(), trainer.state.global_step
    assert len(passes) == max(0, steps - 5) * trainer._micro_steps
    assert all(tokens > 0 and seconds > 0 for tokens, seconds in passes)


def test_the_hosts_figure_is_the_floor_by_the_plans_operators(cache):
    from sft_play.training.measure.monitor import record_host_speed

    plan = short_rows_plan()
    record_host_speed(plan, 3 * plan.choice.uncorrected.pass_times.host_s)
    found = load_host_speeds()[plan.hardware.gpus[0].name]
    assert (found.operator_s, found.measured_by) == (pytest.approx(3 * OPERATOR_S), "a run")
