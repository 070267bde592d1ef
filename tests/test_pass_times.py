"""Two numbers a record: seconds of a pass at no tokens and of each token, fitted to measured passes, and what plans for
rows of other lengths make of them."""

import dataclasses
import random
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.host_speed import HostSpeed
from sft_play.models.config_json import load_model_shape
from sft_play.planner import calibration
from sft_play.planner.batching import AverageMicroSteps, summarize_row_tokens
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.pass_work import PassTimes
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision
from sft_play.planner.speed import find_rates, predict_speed
from sft_play.training.job import record_measurements
from sft_play.training.measure.summary import MIN_FITTED_PASSES, pass_times
from tests.test_plan_truth import learned, measured
from tests.test_speed_error import H100_BLOCKS, H100_CHATS

BF16 = Precision("bfloat16", "bfloat16", "")


def predicted_times(model: str, *, row_length: int = 2048, tokens: int = 8192) -> PassTimes:
    config = config_from_text(f"model: {{name: {model}}}\ntuning: {{mode: lora}}\ntrain: {{kernels: none}}", name="x")
    rates, step = find_rates(parse_hardware("1xH100"), BF16), Step(4, 4, 2048, checkpointed_layers=0)
    rows = AverageMicroSteps(4, tokens, row_length, 4 * tokens, 4)
    found = predict_speed(config, load_model_shape(model), BF16, step, rates, micro_steps=rows).pass_times
    assert found is not None
    return found


def corrected_by(passes: list[tuple[float, float]], predicted: PassTimes, host_s: float) -> PassTimes:
    """The times of later plans, by the record of a run with these passes."""
    token_s = calibration.fit_token_seconds(passes, predicted, host_s=host_s)
    run = measured(
        predicted_pass_s=predicted.host_s, measured_pass_s=host_s,
        predicted_token_s=predicted.token_s, measured_token_s=token_s,
    )  # fmt: skip
    found = learned([run])
    assert found.speed_factor == 1.0
    return predicted.corrected(host_factor=found.host_factor, card_factor=found.card_factor)


@pytest.mark.parametrize("seed", range(40))
def test_a_run_on_full_rows_predicts_mixed_ones_and_the_other_way_round(seed):
    """On passes of a known law: a host and a card that are both other than predicted, and other work beside them."""
    draw = random.Random(seed)
    predicted = predicted_times(draw.choice(("Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B")))
    law = predicted.corrected(host_factor=draw.uniform(0.5, 4), card_factor=draw.uniform(0.7, 1.7))
    full, mixed = [8192] * 20, [draw.randint(300, 8000) for _ in range(60)]

    def passes(tokens: list[int]) -> list[tuple[float, float]]:
        return [(one, law.seconds(one) * draw.uniform(0.98, 1.05)) for one in tokens]

    floor_s = law.seconds(8)
    for taught, asked in ((full, mixed), (mixed, full)):
        if all(law.seconds(one) <= 1.02 * law.host_s for one in taught):
            continue  # passes that are all the host's say nothing of the card
        times = corrected_by(passes(taught), predicted, floor_s)
        assert sum(map(times.seconds, asked)) == pytest.approx(sum(map(law.seconds, asked)), rel=0.15)


def test_the_recorded_passes_of_an_h100_predict_each_other():
    """A step is its passes and what the host does between them. Of the mixed steps, a run's first seven without two, a
    record has the last: it leaves out five, in which checks of the first steps ran."""
    predicted, between_s, floor_s = predicted_times("Qwen/Qwen3-4B"), 0.025, 36 * 8.6e-3
    chats = predicted_times("Qwen/Qwen3-4B", row_length=447, tokens=4000)
    full_passes = [(8192, (H100_BLOCKS[1] - between_s) / 4)] * 20
    tokens, seconds = H100_CHATS[-1]
    of_full = corrected_by(full_passes, predicted, floor_s)
    of_mixed = corrected_by([(tokens, seconds - between_s)], chats, floor_s)
    recorded_s = sum(seconds for _, seconds in H100_CHATS)
    assert sum(of_full.seconds(tokens) + between_s for tokens, _ in H100_CHATS) == pytest.approx(recorded_s, rel=0.15)
    factors = {"host_factor": of_mixed.host_s / chats.host_s, "card_factor": of_mixed.token_s / chats.token_s}
    as_blocks = predicted.corrected(**factors)
    assert 4 * as_blocks.seconds(8192) + between_s == pytest.approx(H100_BLOCKS[1], rel=0.15)


def test_one_number_is_used_where_passes_are_not_known_and_two_before_it():
    old = measured(measured_tokens_per_s=40.0)
    new = measured(predicted_pass_s=0.2, measured_pass_s=0.6, predicted_token_s=1e-4, measured_token_s=1.5e-4)
    found = learned([old])
    assert (found.speed_factor, found.card_factor, found.host_factor) == (0.4, 1.0, None)
    found = learned([old, new])
    assert (found.speed_factor, found.card_factor, found.host_factor) == (1.0, pytest.approx(1.5), pytest.approx(3.0))
    assert "1.50 of the roofline's seconds of a token and 3.00 of the host's" in found.reason
    # passes that were all the host's
    found = learned([dataclasses.replace(new, measured_token_s=0.0)])
    assert (found.speed_factor, found.card_factor, found.host_factor) == (1.0, 1.0, pytest.approx(3.0))


def run_config(name: str = "Qwen/Qwen2.5-3B-Instruct", **train: Any) -> Any:
    words = "".join(f", {name}: {value}" for name, value in train.items())
    text = f"model: {{name: {name}, max_seq_len: 2048}}\ntuning: {{mode: lora}}\n"
    return config_from_text(f"{text}train: {{kernels: none, effective_batch_size: 32{words}}}", name="x")


def test_candidates_are_ranked_with_both_numbers(tmp_path, monkeypatch):
    """A slow host makes larger micro-batches better; one factor moves no choice."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    config = run_config("meta-llama/Llama-3.1-8B", gradient_checkpointing="false")
    machine = parse_hardware("1xH200")
    machine = dataclasses.replace(machine, named=False)
    rows = summarize_row_tokens({1900: 300, 2000: 300}, limit=2048)
    request = PlanRequest(config, load_model_shape(config.model.name), machine, row_tokens=rows, has_eval=False)
    raw = make_plan(request)
    times = raw.choice.uncorrected.pass_times

    def plan_with(host: float, card: float) -> Any:
        run = measured(
            device=machine.gpus[0].name, predicted_pass_s=times.host_s, measured_pass_s=host * times.host_s,
            predicted_token_s=times.token_s, measured_token_s=card * times.token_s,
        )  # fmt: skip
        return make_plan(dataclasses.replace(request, measured_runs=[run]))

    slow_host, quick_host = plan_with(8, 1), plan_with(0.1, 1)
    assert slow_host.batch.micro_batch > quick_host.batch.micro_batch
    (half_speed,) = [make_plan(dataclasses.replace(request, measured_runs=[measured(device=machine.gpus[0].name)]))]
    assert half_speed.batch == raw.batch
    assert slow_host.choice.uncorrected.pass_times.host_s < slow_host.speed.pass_times.host_s / 7
    # the record is of the model, the measured host of the machine: the record counts
    inputs = build_plan_inputs(
        dataclasses.replace(request, host_speed=HostSpeed(machine.gpus[0].name, 5e-5, "a run", "2026-12-01"))
    )
    assert inputs.layout_rates(raw.choice.layout).operator_s == 5e-5


def test_a_run_of_one_rank_records_its_passes_and_a_plan_reads_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    config, machine = run_config(), dataclasses.replace(parse_hardware("1xH100"), named=False)
    request = PlanRequest(config, load_model_shape(config.model.name), machine, has_eval=False)
    plan = make_plan(request)
    plan = plan_from_json(plan.as_json())
    times = plan.choice.uncorrected.pass_times
    passes = [(8192, 1.5 * times.seconds(8192))] * 9
    found = pass_times(plan, passes, floor_s=2 * times.host_s)
    assert (found["passes"], found["pass_s"]) == (9, 2 * times.host_s)
    assert pass_times(plan, passes[: MIN_FITTED_PASSES - 1], floor_s=2 * times.host_s) is None
    assert pass_times(plan, passes, floor_s=None) is None  # one number, as of several ranks
    peak = {"measured_allocated": plan.memory.allocated, "measured_reserved": plan.memory.reserved}
    summary = {"peak_bytes_by_moment": {"training": peak}, "tokens_per_s": 1.0, "pass_times": found}
    record_measurements([(config, plan)], summary)
    (run,) = calibration.load_measured_runs()
    assert run.measured_pass_s == pytest.approx(2 * run.predicted_pass_s)
    assert run.measured_token_s == pytest.approx(1.5 * run.predicted_token_s)
    again = make_plan(dataclasses.replace(request, measured_runs=[run]))
    assert again.speed.pass_times.seconds(8192) == pytest.approx(1.5 * times.seconds(8192), rel=0.01)
