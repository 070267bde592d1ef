"""Plans learn from raw predictions, survive their own JSON whole, and say of every machine what is true of it."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import statistics
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, SftPlayError
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner import calibration
from sft_play.planner.advice import QUESTIONS, find_largest_fit, make_advised_plan
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.explain import choice_line, grid_lines, plan_lines
from sft_play.planner.layout import LAYOUT_NAMES
from sft_play.planner.plan import Plan, RunLength, TracePrediction, plan_from_json, require_fit
from sft_play.training.job import record_measurements
from tests.conftest import Command

GIB = 2**30
MODELS = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1")


def run_of(chance: random.Random, name: str) -> RunConfig:
    mode = chance.choice(["full", "lora", "qlora"])
    train = chance.choice(["", "batch_size: 2,", "gradient_checkpointing: true,", "gradient_checkpointing: 3,"])
    length = chance.choice([256, 2048, 8192])
    text = f"model: {{name: {name}, max_seq_len: {length}}}\ntuning: {{mode: {mode}}}\n"
    return config_from_text(f"{text}train: {{{train} effective_batch_size: 32}}\n", name="run.yaml")


def machine_of(chance: random.Random) -> Hardware:
    """Tiny to large, little or much RAM, named or found, on one or two nodes, with and without known rates."""
    count, gib = chance.choice([0, 1, 1, 2, 4, 8]), chance.choice([2, 8, 24, 80, 180])
    ram = int(chance.choice([4, 16, 66, 512, 4096]) * GIB * chance.uniform(0.9, 1.1))
    is_named = chance.random() < 0.5
    known = {"bandwidth": 2e12, "bf16_flops": 5e14, "fp16_flops": 5e14, "tdp_watts": 400}
    rates = known if chance.random() < 0.7 else {}
    free = None if is_named else int(gib * GIB * chance.uniform(0.4, 1))
    gpus = tuple(Gpu(n, f"GPU of {gib}", gib * GIB, free, (9, 0), **rates) for n in range(count))  # type: ignore[arg-type]
    return Hardware(
        gpus, "a CPU", 8, ram, ram, named=is_named, nodes=2 if count == 8 and chance.random() < 0.3 else 1,
        link_bytes_per_s=4e11 if rates else None, price_per_gpu_hour=chance.choice([None, 2.5]),
        notes=("a note",) if chance.random() < 0.5 else (), ram_given=not is_named or chance.random() < 0.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def random_plans() -> list[tuple[RunConfig, Plan]]:
    chance = random.Random(13)
    runs = [run for gib in (8, 24, 80) for mode in ("lora", "qlora")
            for run in of_all_sizes(1.1, device=f"GPU of {gib}", mode=mode, measured_tokens_per_s=37.0)]  # fmt: skip
    found = []
    full = config_from_text(f"model: {{name: {MODELS[2]}}}\ntuning: {{mode: full}}", name="x")
    jobs = [(run_of(chance, chance.choice(MODELS)), machine_of(chance)) for _ in range(25)]
    for config, machine in [(full, parse_hardware("1xH200,ram=8GiB")), *jobs]:
        only = (chance.choice(LAYOUT_NAMES),) if config is not full and chance.random() < 0.3 else LAYOUT_NAMES
        work = (lambda effective: RunLength(100, 1_000_000)) if chance.random() < 0.5 else None
        shape = load_model_shape(config.model.name)
        request = PlanRequest(config, shape, machine, allowed_layouts=only, measured_runs=runs)
        found.append((config, make_advised_plan(request, estimate_run_length=work, trace_candidate=traced)))
    return found


def traced(candidate: Any) -> TracePrediction:
    if candidate.layout.ranks > 2:
        return TracePrediction(unavailable_reason="too many ranks")
    return TracePrediction(candidate.memory.allocated + GIB // 7, candidate.memory.reserved + GIB // 5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    return tmp_path


def found_machine(count: int = 1) -> Hardware:
    return dataclasses.replace(parse_hardware(f"{count}xRTX4090,ram=128GiB"), named=False)


def live(config: RunConfig, machine: Hardware, *, speed: float, memory: float) -> Plan:
    """Plan a run with what is recorded, and record what a machine measures that does constant shares of what is
    predicted without a record. The plan is handed over as JSON, as ranks are."""
    shape = load_model_shape(config.model.name)
    request = PlanRequest(config, shape, machine, allowed_layouts=("single",))
    plan = make_plan(dataclasses.replace(request, measured_runs=calibration.load_measured_runs()))
    free = make_plan(request)
    raw = next(one for one in (free.choice, *free.candidates) if one.key == plan.choice.key)
    peak = {"measured_allocated": raw.memory.allocated, "measured_reserved": round(memory * raw.memory.reserved)}
    handed = plan_from_json(json.loads(json.dumps(plan.as_json())))
    told = {"peak_bytes_by_moment": {"training": peak}, "tokens_per_s": speed * raw.speed.tokens_per_s}
    told["kernels"] = {"used": ["rms_norm"]}  # as planned, with the memory of the plain ones
    record_measurements([(config, handed)], told)
    return plan


def usual() -> RunConfig:
    return config_from_text(
        "model: {name: Qwen/Qwen2.5-0.5B, max_seq_len: 512}\ntuning: {mode: lora}\ntrain: {batch_size: 1}", name="x"
    )


@pytest.mark.parametrize("share", [0.03, 0.5, 0.97, 1.0, 1.7])
def test_a_machine_that_does_a_constant_share_is_predicted_from_its_second_run_on(share, cache):
    config, machine = usual(), found_machine()
    first, *others = [live(config, machine, speed=share, memory=1.2) for _ in range(13)]
    for plan in others:
        assert plan.speed.tokens_per_s == pytest.approx(share * first.speed.tokens_per_s, rel=1e-6)
        assert plan.memory.reserved == pytest.approx(1.2 * first.memory.reserved, rel=1e-6)
        assert plan.memory.allocated == first.memory.allocated
    assert all(plan.choice.uncorrected == first.choice.uncorrected for plan in others)
    recorded = [(run.speed_ratio, run.memory_ratio) for run in calibration.load_measured_runs()]
    assert recorded == [pytest.approx((share, 1.2))] * 13


def test_a_stage_whose_summary_is_damaged_is_no_record(cache):
    """Its figures are those that a curriculum puts in their place."""
    config = usual()
    plan = make_plan(PlanRequest(config, load_model_shape(config.model.name), found_machine()))
    record_measurements([(config, plan)], {"stages": [{"name": "a", "peak_bytes": {}, "tokens_per_s": 0.0}]})
    assert not calibration.load_measured_runs()


def measured(**changes: Any) -> calibration.MeasuredRun:
    usual = {
        "device": "GPU", "mode": "lora", "layout": "single", "model": "m", "micro_batch": 1, "seq_len": 8,
        "predicted_allocated": 100, "measured_allocated": 100, "predicted_reserved": 1000, "measured_reserved": 1000,
        "predicted_tokens_per_s": 100.0, "measured_tokens_per_s": 50.0, "versions": "", "finished": "",
    }  # fmt: skip
    return calibration.MeasuredRun(**{**usual, **changes})


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_ran_out_counts_until_a_later_one_as_large_fits(seed):
    """The smallest one, of budgets that are not much smaller than this one."""
    draw = random.Random(seed)
    for _ in range(40):
        runs = [
            measured(predicted_reserved=draw.randint(1, 6), ran_out_of=draw.choice([0, 0, 5, 10]))
            for _ in range(draw.randint(0, 6))
        ]
        budget = draw.choice([4, 9, 10, 20])
        standing = [
            run.predicted_reserved for place, run in enumerate(runs)
            if run.ran_out_of and budget <= calibration.RETRY_MEMORY_FACTOR * run.ran_out_of
            and all(later.ran_out_of or later.predicted_reserved < run.predicted_reserved for later in runs[place:])
        ]  # fmt: skip
        oom_run = calibration._find_oom_run(runs, budget)
        assert (oom_run and oom_run.predicted_reserved) == min(standing, default=None)


def of_all_sizes(ratio: float, **kind: Any) -> list[calibration.MeasuredRun]:
    """Runs from 128 MiB to 128 GiB that all needed as much more than predicted."""
    sizes = [2**power for power in range(27, 38)]
    return [measured(predicted_reserved=size, measured_reserved=int(ratio * size), **kind) for size in sizes]


def learned(runs: list[calibration.MeasuredRun], **kind: Any) -> calibration.Correction:
    return calibration.compute_correction(runs, **{"device": "GPU", "mode": "lora", "layout": "single", **kind})


def test_more_evidence_never_lowers_the_memory_and_one_odd_run_does_not_move_the_speed():
    chance = random.Random(4)
    for _ in range(50):
        runs: list[calibration.MeasuredRun] = []
        factor = 1.0
        for _ in range(40):
            ratio, speed = chance.uniform(0.5, 1.5), chance.uniform(10, 90)
            runs.append(measured(measured_reserved=int(1000 * ratio), measured_tokens_per_s=speed))
            found, latest = learned(runs), runs[-calibration.MAX_SPEED_RUNS :]
            assert found.memory_factor == max(factor, int(1000 * ratio) / 1000)
            assert found.speed_factor == pytest.approx(statistics.median(run.speed_ratio for run in latest))
            factor = found.memory_factor
    assert learned([*[measured()] * 5, measured(measured_tokens_per_s=1e9)]).speed_factor == 0.5
    assert learned([measured(measured_reserved=1200), *[measured()] * 30]).memory_factor == 1.2


def test_the_nearest_runs_count_and_no_figure_is_beyond_belief():
    runs = [measured(model="small", measured_reserved=2000), measured(model="large", measured_reserved=1100)]
    assert [learned(runs, model=name).memory_factor for name in ("small", "large", "new", None)] == [2.0, 1.1, 2.0, 2.0]
    other = [measured(layout="ddp", measured_reserved=1500), *runs[1:]]
    assert [learned(other, layout=name).memory_factor for name in ("ddp", "single", "fsdp")] == [1.5, 1.1, 1.5]
    assert learned([measured(measured_reserved=10**9)]).memory_factor == calibration.MAX_MEMORY_FACTOR
    assert learned([measured(measured_tokens_per_s=1e30)]).speed_factor == calibration.SPEED_RANGE[1]
    nothing = learned([measured(measured_tokens_per_s=0.0)])
    assert (nothing.speed_factor, nothing.has_measured_speed, "roofline" in str(nothing.reason)) == (1.0, False, False)


def test_the_newest_runs_are_kept(cache, monkeypatch):
    monkeypatch.setattr(calibration, "MAX_RECORDED_RUNS", 12)
    for number in range(17):
        calibration.add_measured_run(measured(finished=str(number), measured_reserved=1300 if number == 5 else 1000))
    found = calibration.load_measured_runs()
    assert [run.finished for run in found] == [str(number) for number in range(5, 17)]
    assert learned(found).memory_factor == 1.3


def test_lines_of_a_version_that_recorded_corrected_predictions_teach_nothing(cache):
    old = {name: value for name, value in dataclasses.asdict(measured()).items() if name != "version"}
    broken = [{**old, "version": 3, "predicted_reserved": value} for value in ("5", None, float("nan"), -1, [])]
    lines = [json.dumps(line) for line in (old, {**old, "version": 1}, *broken)]
    calibration.measured_runs_path().write_text("\n".join([*lines, "[" * 5000]) + "\n")
    assert calibration.load_measured_runs() == []
    calibration.add_measured_run(measured())
    assert calibration.load_measured_runs() == [measured()]
    assert calibration.measured_runs_path().read_text().count("\n") == 1


def test_a_line_of_the_earlier_roofline_teaches_memory_alone(cache):
    line = {**dataclasses.asdict(measured()), "version": 2}
    calibration.measured_runs_path().write_text(json.dumps(line) + "\n")
    (run,) = calibration.load_measured_runs()
    assert (run.speed_ratio, run.memory_ratio) == (0.0, measured().memory_ratio)


def test_a_trace_is_corrected_like_any_prediction():
    """Traced 10% above the estimate, measured 20% above the trace: 1.32 times the estimate are needed."""
    config, machine = usual(), found_machine()

    def traced(candidate: Any) -> TracePrediction:
        return TracePrediction(int(1.1 * candidate.memory.allocated), int(1.1 * candidate.uncorrected.reserved))

    shape, name = load_model_shape(config.model.name), machine.gpus[0].name
    plain = make_advised_plan(PlanRequest(config, shape, machine))
    size = int(1.1 * plain.memory.reserved)
    earlier = [measured(device=name, predicted_reserved=size, measured_reserved=round(1.2 * size))]
    plan = make_advised_plan(PlanRequest(config, shape, machine, measured_runs=earlier), trace_candidate=traced)
    assert plan.choice.uncorrected.reserved == pytest.approx(1.1 * plain.memory.reserved, rel=1e-6)
    assert plan.memory.reserved == pytest.approx(1.32 * plain.memory.reserved, rel=1e-6)


def test_ways_out_and_max_know_what_earlier_runs_taught():
    name = "Qwen/Qwen2.5-3B-Instruct"
    config = config_from_text(f"model: {{name: {name}}}\ntuning: {{mode: lora}}", name="x")
    machine = found_machine()
    earlier = [run for mode in ("lora", "qlora", "full")
               for run in of_all_sizes(3.6, device=machine.gpus[0].name, mode=mode)]  # fmt: skip
    plain = PlanRequest(config, load_model_shape(name), machine)
    taught = dataclasses.replace(plain, measured_runs=earlier)
    assert find_largest_fit("seq_len", taught).value < find_largest_fit("seq_len", plain).value
    request = dataclasses.replace(taught, allowed_layouts=("single",))
    plan = make_advised_plan(request)
    ways = [way for way in plan.suggestions if way.setting]
    assert (plan.fits, bool(ways)) == (False, True)
    for way in ways:
        words = way.setting.split()
        run = config_from_text(f"model: {{name: {name}}}\ntuning: {{mode: lora}}", name="x", overrides=words)
        again = make_advised_plan(dataclasses.replace(request, config=run, shape=load_model_shape(run.model.name)))
        assert (again.fits, again.memory.required) == (True, way.required), way


def needs(predicted: int, peaks: list[tuple[int, int]]) -> float:
    """What a prediction comes to, written a second time: by each run alone, then the most of them."""
    by_run = [predicted]
    for foreseen, found in peaks:
        if predicted < foreseen / calibration.SIMILAR_SIZE_FACTOR:
            continue  # of another size: much smaller
        scaled = predicted * min(calibration.MAX_MEMORY_FACTOR, found / foreseen)
        # no run speaks for more than twice what it measured
        by_run.append(min(scaled, calibration.SIMILAR_SIZE_FACTOR * found))
    return max(by_run)


def test_a_correction_holds_for_like_sizes_and_never_turns_two_predictions_round():
    chance = random.Random(11)
    for _ in range(300):
        peaks = [(chance.randint(1, 10**5), chance.randint(1, 3 * 10**5)) for _ in range(chance.randint(1, 6))]
        found = learned([measured(predicted_reserved=one, measured_reserved=other) for one, other in peaks])
        before = 0.0
        for predicted in sorted(chance.randint(1, 10**6) for _ in range(40)):
            corrected = predicted * found.narrow_to_size(predicted).memory_factor
            assert corrected == pytest.approx(needs(predicted, peaks))
            assert corrected >= before * (1 - 1e-9)
            before = corrected


def test_the_starters_memory_does_not_move_a_4b(cache):
    """382 MB predicted and 1,039 measured moved a 4B's plan on the same CPU by 2 GiB."""
    machine = dataclasses.replace(parse_hardware("cpu,ram=64GiB,cores=8"), named=False)
    starter = measured(device="cpu", mode="qlora", model="sft-play/starter-base", predicted_reserved=382_000_000,
                       measured_reserved=1_039_000_000)  # fmt: skip
    for dtype in ("bf16: true", "bf16: false"):
        config = config_from_text(f"model: {{name: Qwen/Qwen3-4B}}\ntrain: {{{dtype}}}", name="x")
        request = PlanRequest(config, load_model_shape("Qwen/Qwen3-4B"), machine)
        taught = make_plan(dataclasses.replace(request, measured_runs=[starter]))
        assert taught.memory == make_plan(request).memory
        assert taught.memory.required > 4 * GIB
        (said,) = [reason for reason in taught.reasons if "earlier run" in reason]
        assert "of other sizes, and do not correct this one's memory" in said
    like = learned([starter], device="cpu", mode="qlora").narrow_to_size(400_000_000)
    assert like.memory_factor == pytest.approx(1039 / 382)
    assert "(0.97 GiB, 0.36 predicted)" in (like.reason or "")


def test_a_plan_is_equal_to_what_its_json_says(random_plans):
    for _, plan in random_plans:
        text = json.dumps(plan.as_json(), allow_nan=False)
        again = plan_from_json(json.loads(text))
        assert again == plan
        assert json.dumps(again.as_json()) == text
    made = [plan for _, plan in random_plans]
    assert len({(plan.fits, plan.choice.is_traced, plan.speed_known, plan.hardware.named) for plan in made}) >= 7
    assert any(plan.choice.uncorrected.tokens_per_s != plan.speed.tokens_per_s for plan in made)
    assert any(plan.not_enough for plan in made)


def test_every_moment_of_a_run_has_its_bytes(random_plans):
    """The largest of a step's, an evaluation's and a save's tensors is the peak; answers are kept within it."""
    for _, plan in random_plans:
        answer = plan.as_json()
        peak, host, memory = answer["peak_bytes"], answer["host"], plan.memory
        moments = [peak[name] for name in ("step", "evaluate", "save")]
        assert max(size for size in moments if size is not None) <= peak["generate"] == peak["allocated"]
        steps = {name: size for name, size in peak["moments"].items() if name not in ("evaluation", "saving")}
        # a trace that says more raises the moment of the peak
        assert peak["step"] == peak["by_moment"]["training"][0] >= max(steps.values())
        assert (peak["evaluate"], peak["save"]) == tuple(peak["moments"].get(name) for name in ("evaluation", "saving"))
        assert peak["load"] == memory.load_bytes
        assert host["save"] - host["step"] == memory.host_save_bytes + memory.host_save_each_bytes
        assert host["load"] == memory.host_load_bytes
        assert host["step"] == host["evaluate"] == host["generate"]


def test_a_verdict_names_what_is_short_with_its_own_numbers(random_plans):
    seen = set()
    for _, plan in random_plans:
        choice, line = plan.choice, choice_line(plan)
        per = "GPU" if plan.hardware.gpus else "process"
        device = re.search(rf"([\d.]+) of ([\d.]+) GiB per {per}", line)
        host = re.search(r"([\d.]+) of ([\d.]+) GiB(?: of RAM)? on each node", line)
        assert device
        gpu_short, ram_short = choice.memory.required > plan.budget_bytes, False
        assert (float(device[1]) > float(device[2])) == gpu_short, line
        if choice.budget.host is not None and plan.hardware.gpus:
            ram_short = choice.host_required > choice.budget.host
        if host:
            assert (float(host[1]) > float(host[2])) == ram_short, line
            assert float(host[1]) == pytest.approx(choice.host_required / GIB, abs=0.06)
        assert plan.fits == (not gpu_short and not ram_short)
        assert (": fits, " in line) == ("does NOT fit, too little " not in line) == plan.fits
        assert ("too little GPU memory: " in line) == (gpu_short and bool(plan.hardware.gpus)), line
        assert ("too little RAM: " in line) == (ram_short or (gpu_short and not plan.hardware.gpus)), line
        assert not ram_short or host
        if choice.layout.offloads_states and plan.fits:
            assert " of RAM" in line
        seen.add((gpu_short, ram_short, bool(plan.hardware.gpus)))
    assert {(False, False, True), (True, False, True), (False, True, True), (True, False, False)} <= seen


def test_a_plan_that_does_not_fit_offers_no_launch_no_speed_and_only_ways_that_fit(random_plans):
    counts = [0, 0]
    for config, plan in random_plans:
        lines = [*plan_lines(plan, config, command="make train"), *grid_lines([(("a=b",), plan)])]
        try:
            require_fit(plan, config)
        except DoesNotFit as error:
            lines.append(str(error))
        text = "\n".join(lines)
        counts[plan.fits] += 1
        assert ("Launch: " in text) == plan.fits
        assert plan.fits or not re.search("^Speed: |^Run: ", text, re.MULTILINE)
        assert "still too much" not in text
        assert not re.search(r"\bready\b", text, re.IGNORECASE)
        assert all(way.fits for way in plan.suggestions)
        assert not any(way.fits for way in plan.not_enough)
        assert not plan.fits or not (plan.suggestions or plan.not_enough)
        assert all(way["fits"] for way in plan.as_json()["ways_out"])
    assert min(counts) >= 6


def test_a_layout_that_offloads_into_ram_that_nobody_said_names_what_it_needs():
    config = config_from_text("model: {name: meta-llama/Llama-3.1-8B}\ntuning: {mode: full}", name="x")

    def planned(machine: str) -> Plan:
        return make_advised_plan(PlanRequest(config, load_model_shape(config.model.name), parse_hardware(machine)))

    plan, poor, rich = map(planned, ("1xRTX4090", "1xRTX4090,ram=66GiB", "1xRTX4090,ram=512GiB"))
    assert (plan.choice.needs_unknown_ram, poor.fits, rich.fits) == (True, False, True)
    assert f"if each node has {plan.choice.host_required / GIB:.1f} GiB of RAM (not given" in choice_line(plan)
    assert plan.choice.host_required > 8e9 * 16
    assert "of 66.0 GiB" in choice_line(poor)
    way = next(way for way in poor.suggestions if way.change.endswith("GiB of RAM on each node (zero2_offload)"))
    assert planned(str(way.hardware)).fits
    assert "of 512.0 GiB of RAM on each node" in choice_line(rich)


def test_max_takes_no_ram_that_is_too_little_or_that_nobody_said():
    chance, answered = random.Random("max"), 0
    for question in (*QUESTIONS, *QUESTIONS[:2], *QUESTIONS[:2]):
        config, machine = run_of(chance, chance.choice(MODELS[:4])), machine_of(chance)
        config = config.model_copy(update={"train": config.train.model_copy(update={"effective_batch_size": 8})})
        try:
            found = find_largest_fit(question, PlanRequest(config, load_model_shape(config.model.name), machine))
        except SftPlayError:
            continue
        line = str(found)
        if not machine.ram_given:
            assert "_offload" not in line, line
        assert ("none fits" in line) == (found.value is None) == ("does NOT fit" in line), line
        answered += 1
    assert answered >= 5
    config = config_from_text("model: {name: Qwen/Qwen2.5-7B-Instruct}\ntuning: {mode: lora}", name="x")
    for ram, offloads in (("", False), (",ram=66GiB", False), (",ram=1TiB", True)):
        machine = parse_hardware(f"1xH100{ram}")
        found = find_largest_fit("model", PlanRequest(config, load_model_shape(config.model.name), machine))
        assert ("GiB of RAM" in found.limited_by) == offloads, found


@pytest.mark.parametrize(
    ("only", "overrides"), [(("zero3_offload",), []), (LAYOUT_NAMES, ["train.gradient_checkpointing=offload"])]
)
def test_max_asks_for_the_ram_where_every_layout_needs_it(only, overrides):
    config = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}", name="x", overrides=["tuning.mode=full", *overrides])
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware("2xH100"), allowed_layouts=only)
    for question in ("batch", "seq_len"):
        with pytest.raises(ConfigError, match=r"none of the layouts .*; .* the RAM was not given \(ram=512GiB\)"):
            find_largest_fit(question, request)
    assert "the RAM was not given" in find_largest_fit("model", request).limited_by
    given = dataclasses.replace(request, hardware=parse_hardware("2xH100,ram=512GiB"))
    assert find_largest_fit("batch", given).value


def test_the_command_says_host_memory_where_that_is_short(command: Command, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: meta-llama/Llama-3.1-8B}\ntuning: {mode: full}\n")
    code, printed = command("plan", "--config", str(path), "--hardware", "1xH200,ram=8GiB", "--json")
    answer = json.loads(printed)
    assert (code, answer["fits"], answer["short_of"]) == (3, False, ["RAM"])
    assert answer["peak_bytes"]["required"] <= answer["peak_bytes"]["budget"]
    assert answer["peak_bytes"]["host_required"] > answer["peak_bytes"]["host_budget"] == 8 * GIB
