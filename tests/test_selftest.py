"""gpu-selftest: its verdicts on random figures, what it leaves out, what breaks, and a few of its parts on the CPU."""

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_selftest import checks, machine_parts, probes, selftest, trials
from benchmarks.gpu_selftest.checks import Peak
from benchmarks.gpu_selftest.material import CPU_SIZE, GPU_SIZE, LARGE_MODEL, ROW_KINDS, write_trial_rows
from benchmarks.gpu_selftest.record import DEFERRED_REASON, Part, SelftestRecord, open_record
from benchmarks.gpu_selftest.trials import TrialBench
from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import KNOWN_MODELS, load_model_shape
from sft_play.planner import calibration
from sft_play.planner.batching import BatchPlan
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.text import GIB
from tests import warm
from tests.conftest import ROOT
from tests.test_plan_truth import measured

MACHINE: dict[str, Any] = {"gpus": [], "cpu_name": "CPU", "cpu_cores": 2, "ram_bytes": 8 * GIB}
ALONE = Hardware((), "CPU", 2, 8 * GIB, 8 * GIB)


def test_a_peak_fails_exactly_where_it_leaves_the_margin():
    chance = random.Random(1)
    seen = set()
    for _ in range(500):
        allocated, slack, margin = chance.randrange(1, 100), chance.randrange(0, 20), chance.randrange(0, 20)
        held, kept, exact = chance.randrange(1, 120), chance.randrange(1, 140), chance.random() < 0.5
        peak = Peak(allocated, allocated + slack, margin, held, kept, exact=exact)
        over, above = kept > allocated + slack + margin, held > allocated + margin
        below = exact and held < allocated - margin
        seen.add((over, above, below))
        assert len(checks.peak_problems(peak)) == over + above + below
        assert len(checks.peak_problems(replace(peak, measured_allocated=None))) == over
    assert len(seen) == 6  # a peak is not above and below at once
    for held, kept, wrong in ((110, 130, 0), (90, 130, 0), (110, 131, 1), (111, 130, 1), (89, 130, 1)):
        assert len(checks.peak_problems(Peak(100, 120, 10, held, kept, exact=True))) == wrong


def test_speeds_may_be_twice_or_half_and_no_further():
    chance = random.Random(2)
    for _ in range(300):
        predicted, ratio = chance.uniform(1, 1e5), 2 ** chance.uniform(-2, 2)
        assert bool(checks.speed_problems(predicted, predicted * ratio)) == (not 0.5 <= ratio <= 2.0)
    assert checks.speed_problems(100.0, 50.0) == checks.speed_problems(100.0, 200.0) == []
    assert "0.49 of the 100 predicted" in checks.speed_problems(100.0, 49.0)[0]


UPDATES = {"weights": ["nf4", "float32"], "adapters": ["float32"], "masters": [], "optimizer_states": ["float32"],
           "moved_share": 1.0, "rounding": "float32", "lost": False}  # fmt: skip


@pytest.mark.parametrize(("mode", "changes", "said"), [
    ("qlora", {}, None), ("full", {"weights": ["float32"], "adapters": []}, None),
    ("full", {"weights": ["bfloat16"], "adapters": [], "rounding": "stochastic", "moved_share": 0.1}, None),
    ("full", {"weights": ["bfloat16"], "adapters": []}, "weights are bfloat16, and the plan says float32"),
    ("qlora", {"weights": ["bfloat16"]}, "not NF4"),
    ("qlora", {"adapters": ["float32", "bfloat16"]}, "adapters are float32 and bfloat16"),
    ("lora", {"adapters": []}, "adapters are absent"),
    ("lora", {"optimizer_states": ["bfloat16"]}, "optimizer states are bfloat16"),
    ("lora", {"moved_share": 0.2, "lost": True}, "a step moves 20.0% of what trains: updates are lost"),
    ("lora", {"moved_share": None}, "no step was examined"),
])  # fmt: skip
def test_dtypes_and_lost_updates_are_found(mode, changes, said):
    found = checks.update_problems({**UPDATES, **changes}, mode=mode)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


@pytest.mark.parametrize(("names", "kind"), [
    (["aten::_scaled_dot_product_flash_attention", "void pytorch_flash::flash_fwd_kernel<...>"], "flash"),
    (["aten::_scaled_dot_product_efficient_attention", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80"], "efficient"),
    (["aten::_scaled_dot_product_cudnn_attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"], "cudnn"),
    (["aten::_scaled_dot_product_attention_math", "softmax_warp_forward", "ampere_bf16_s16816gemm"], "math"),
    (["aten::mm"], "unknown"),
])  # fmt: skip
def test_kernels_are_told_by_their_names(names, kind):
    assert probes.kind_of(names) == kind


def test_what_the_plan_counts_on_follows_the_gpu_and_another_kernel_is_found():
    new, old = (machine_parts.planned_kernels(parse_hardware(name)) for name in ("1xH100", "1xT4"))
    assert len(new) == len(old) == 24
    assert new["bf16, grouped heads, causal, one shape"] == "cudnn"
    assert new["bf16, grouped heads, causal"] == "flash"
    assert new["bf16, grouped heads, padding mask"] == "efficient"
    assert new["fp32, grouped heads, causal"] == old["fp16, grouped heads, causal"] == "efficient"
    assert old["fp16, equal heads, causal"] == "efficient"
    predicted = {"a": "flash", "b": "efficient", "c": "math"}
    assert checks.attention_problems(predicted, predicted) == []
    assert len(checks.attention_problems(predicted, {**predicted, "b": "cudnn"})) == 1
    assert checks.attention_problems(predicted, {"a": "flash", "b": "efficient"}) != []


def test_free_memory_by_two_counters_and_the_context():
    chance = random.Random(4)
    for _ in range(300):
        by_driver, apart = 10 * GIB, chance.randrange(-GIB, GIB)
        context = chance.randrange(0, 2 * GIB)
        found = {"free_by_driver": by_driver, "free_by_cuda": by_driver + apart, "context": context}
        wrong = (abs(apart) > GIB // 4) + (context > GIB // 2 + GIB // 4)
        assert len(checks.memory_counter_problems(found, context_bytes=GIB // 2)) == wrong


def test_a_round_trip_through_nf4_that_is_none_is_found():
    good = {"relative_error": 0.092, "elements": 128.0, "packed_bytes": 64.0, "layer_error": 1e-6,
            "gradient_error": 1e-6}  # fmt: skip
    assert checks.nf4_problems(good) == []
    for name, value in (("relative_error", 0.0), ("relative_error", 0.2), ("packed_bytes", 128.0),
                        ("layer_error", 0.05), ("gradient_error", 1.0), ("gradient_error", float("nan"))):  # fmt: skip
        assert len(checks.nf4_problems({**good, name: value})) == 1


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.20 GiB is "
    "free. Process 1 has 22.43 GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and "
    "1.90 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting …"
)


def own_message(said: str = TORCH_SAYS) -> str:
    """The message of a run that ran out of memory, by the code that words it."""
    from sft_play.training.prepare.device_checks import out_of_memory_message

    memory, batch = SimpleNamespace(required=30 * GIB), BatchPlan(32, 2, 1)
    plan = SimpleNamespace(memory=memory, budget_bytes=int(23.2 * GIB), batch=batch)
    return out_of_memory_message(plan, RuntimeError(said))  # type: ignore[arg-type]


def out_of_memory_found(said: str, **changes: Any) -> list[str]:
    usual = {"exit_code": 3, "required": 30 * GIB, "budget": int(23.2 * GIB), "micro_batch": 32,
             "free_before": 23 * GIB, "free_after": 23 * GIB}  # fmt: skip
    return checks.out_of_memory_problems(said, **{**usual, **changes})


def test_the_message_of_a_run_out_of_memory_must_be_true():
    assert out_of_memory_found(own_message()) == []
    for changes, words in (
        ({"exit_code": 1}, "the exit code is 1"), ({"micro_batch": 16}, "16 was asked for"),
        ({"required": 40 * GIB}, ""), ({"budget": 10 * GIB}, ""), ({"free_after": 20 * GIB}, "not free again"),
    ):  # fmt: skip
        (line,) = out_of_memory_found(own_message(), **changes)
        assert words in line
    for said, words in (
        (own_message(TORCH_SAYS.replace("1.20 GiB is free", "9.00 GiB is free")), "another fault"),
        (own_message(TORCH_SAYS.replace("3.50 GiB", "900.00 MiB")), ""),
        (own_message("no words"), "does not say what was asked for"),
        ("Killed", "does not say what was predicted"),
    ):
        (line,) = out_of_memory_found(said)
        assert words in line
    fitting = own_message().replace("plan predicted 30.0 of", "plan predicted 20.0 of")
    assert any("would have fitted" in line for line in out_of_memory_found(fitting))


def test_nine_trials_hold_every_pair_of_settings():
    core = trials.all_trials()
    assert len(set(core)) == 9
    for begin in (0, 3, 6):  # what a little time reaches has every mode and every kind of rows
        some = core[begin : begin + 3]
        assert len({trial.mode for trial in some}) == len({trial.rows for trial in some}) == 3
    values = (trials.MODES, (True, False), ROW_KINDS, trials.EVALUATIONS)
    cells = [(trial.mode, trial.checkpointing, trial.rows, trial.judged) for trial in core]
    for one, other in itertools.combinations(range(4), 2):
        held = {(cell[one], cell[other]) for cell in cells}
        assert held == set(itertools.product(values[one], values[other]))


@pytest.fixture
def on_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialBench:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(KNOWN_MODELS[LARGE_MODEL].config))
    write_trial_rows(tmp_path, GPU_SIZE)
    hardware = parse_hardware("1xH100")
    monkeypatch.setattr(trials, "detect_hardware", lambda: hardware)
    return TrialBench(tmp_path, tmp_path, on_gpu=True)


def test_every_trial_fits_a_large_card_and_one_micro_batch_does_not(on_h100):
    plans = [trials.plan_run(on_h100.write_trial_config(trial)) for trial in trials.all_trials()]
    found = {(plan.fits, plan.layout, plan.batch.micro_batch) for plan in plans}
    assert found == {(True, "single", GPU_SIZE.micro_batch)}
    total = parse_hardware("1xH100").gpus[0].total_bytes
    sizes: dict[int, int] = {}

    def required(size: int) -> int:
        sizes[size] = trials.plan_run(trials.oversized_config(on_h100, size)).memory.required
        return sizes[size]

    micro = trials.find_oversized_micro_batch(required, total)
    assert sizes[micro] > 1.25 * total >= sizes[micro // 2]
    assert trials.find_oversized_micro_batch(lambda size: 0, total) is None


def test_a_trial_that_does_not_fit_is_left_out_by_its_plan(on_h100, monkeypatch):
    small = parse_hardware("1xRTX3060")
    monkeypatch.setattr(trials, "detect_hardware", lambda: small)
    monkeypatch.setattr(trials, "run_module", lambda *_, **__: pytest.fail("it was started"))
    part = trials.run_trial(trials.Trial("full", False, "equal", "evaluate"), on_h100)
    said = "the plan says that it does NOT fit, too little GPU memory: needs"
    assert (part.status, said in part.reason) == ("skipped", True)


def test_rows_are_of_their_kinds(tmp_path):
    write_trial_rows(tmp_path, CPU_SIZE, largest_batch=13)

    def words(name: str) -> list[int]:
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        return [len(row["messages"][1]["content"].split()) for row in rows]

    needed = CPU_SIZE.effective_batch * CPU_SIZE.steps
    assert words("equal") == [2 * CPU_SIZE.seq_len] * needed
    unequal = words("unequal")
    assert (len(unequal), len(set(unequal)) > 20) == (needed, True)
    assert max(unequal) == 2 * CPU_SIZE.seq_len  # the longest rows are those that a plan assumes
    assert (max(words("packed")) < CPU_SIZE.seq_len, len(words("out-of-memory")) >= 13) == (True, True)


def numbers(**changes: Any) -> dict[str, Any]:
    moments = {"load": GIB, "save": 2 * GIB, "evaluate": GIB}
    usual = {"allocated": 2 * GIB, "reserved": 3 * GIB, "margin": GIB // 2, "tokens_per_s": 100.0, "moments": moments}
    return {**usual, **changes}


def test_speed_is_judged_of_full_rows_and_each_moment_where_it_was_measured():
    slow, little, much = numbers(tokens_per_s=10.0), numbers(allocated=GIB), numbers(reserved=4 * GIB)
    for figures, rows, wrong in (
        (slow, "equal", 1), (slow, "packed", 1), (slow, "unequal", 0), (little, "equal", 1), (little, "unequal", 0),
        (much, "unequal", 1),
    ):  # fmt: skip
        assert len(trials.find_problems(numbers(), figures, rows=rows)) == wrong
    assert trials.find_problems(numbers(tokens_per_s=None), slow, rows="equal") == []
    for name, share in (("load", trials.LOAD_MARGIN), ("save", 0.0), ("evaluate", 0.0)):
        promised = numbers()["moments"][name]
        edge = promised + trials.MARGIN_BYTES + int(promised * share)
        for held, wrong in ((edge, 0), (edge + 1, 1), (None, 0)):
            figures = numbers(moments={**numbers()["moments"], name: held})
            assert len(trials.find_problems(numbers(), figures, rows="unequal")) == wrong


def test_the_first_steps_do_not_count_for_the_speed(tmp_path):
    lines = [{"step": n, "tokens_per_s": speed} for n, speed in enumerate([1, 2, 3, 100, 90, 110, 1000, 95])]
    lines.insert(4, {"step": 4, "eval_loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert trials.steady_speed(tmp_path) == 100  # the median of 90, 95, 100, 110, 1000


def fake(monkeypatch: pytest.MonkeyPatch, *steps: selftest.Step) -> None:
    monkeypatch.setattr(selftest, "_steps", lambda *_: list(steps))
    monkeypatch.setattr(selftest, "detect_hardware", lambda: ALONE)


def test_a_part_that_breaks_is_a_failure_and_the_others_go_on(tmp_path, monkeypatch):
    def broken() -> Part:
        raise ZeroDivisionError("an unlucky part")

    fake(monkeypatch, selftest.Step("first", broken), selftest.Step("second", lambda: Part("second", "pass", "well")))
    said: list[str] = []
    book = selftest.selftest(tmp_path / "a.json", progress=said.append)
    assert (book.ok, book.parts["second"].status) == (False, "pass")
    assert "ZeroDivisionError: an unlucky part (test_selftest.py, line" in book.parts["first"].reason
    assert any(line.startswith("FAIL  first") for line in said)
    page = (tmp_path / "a.txt").read_text()
    assert [line[:4] for line in page.splitlines() if line[:4] in ("PASS", "FAIL", "SKIP")] == ["FAIL", "PASS"]
    assert "gpu-selftest: first fails on the CPU (no log)" in page


def test_a_model_that_cannot_be_made_is_tried_once_and_said_of_every_trial(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(selftest, "_make_material", lambda bench: asked.append("") or "no model, log x")
    steps = selftest._steps(TrialBench(Path(), Path(), on_gpu=False), ALONE)
    found = [selftest._run(step, ALONE) for step in steps if step.name.startswith("train/")]
    is_told = ["RuntimeError: no model, log x" in part.reason for part in found if part.status == "fail"]
    assert (is_told, len(asked)) == ([True] * 9, 1)


def test_one_that_was_broken_off_goes_on_and_one_that_was_finished_begins_again(tmp_path, monkeypatch):
    now, made = [0.0], []
    monkeypatch.setattr(selftest.time, "monotonic", lambda: now[0])

    def step(name: str) -> selftest.Step:
        def make() -> Part:
            made.append(name)
            now[0] += 100.0
            if len(made) == 2:
                raise KeyboardInterrupt
            return Part(name, "pass", "")

        return selftest.Step(name, make)

    out = tmp_path / "a.json"
    fake(monkeypatch, step("one"), step("two"), step("three"))
    with pytest.raises(KeyboardInterrupt):
        selftest.selftest(out)
    assert [part["name"] for part in json.loads(out.read_text())["parts"]] == ["one"]
    record = selftest.selftest(out, minutes=1)
    assert made == ["one", "two", "two"]
    assert record.parts["three"] == Part("three", "skipped", DEFERRED_REASON)
    assert "continues with what there was no time for" in (tmp_path / "a.txt").read_text()
    assert not json.loads(out.read_text())["finished"]
    selftest.selftest(out)
    assert (made[3:], json.loads(out.read_text())["finished"]) == (["three"], True)
    selftest.selftest(out)
    assert made[4:] == ["one", "two", "three"]


def test_the_answer_of_another_machine_or_of_other_versions_is_not_gone_on_with(tmp_path):
    path = tmp_path / "a.json"

    def begun(machine: dict[str, Any]) -> SelftestRecord:
        book = open_record(path, machine)
        book.add(Part("one", "pass", ""))
        return book

    begun(MACHINE)
    assert "one" in open_record(path, {**MACHINE, "ram_free_bytes": 7}).parts
    begun(MACHINE)
    assert open_record(path, {**MACHINE, "cpu_name": "another"}).parts == {}
    begun(MACHINE)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "versions": {"torch": "0"}}))
    assert open_record(path, MACHINE).parts == {}


@pytest.mark.parametrize("text", ["", "[]", '{"parts": [{}]}', '{"rows": []}', "not JSON"])
def test_the_file_of_another_command_is_not_written_over(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="exists and is not a result of gpu-selftest"):
        open_record(path, MACHINE)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("out", "said"),
    [("/proc/nowhere/a.json", "cannot be written"), ("{}", "is not a file"), ("/dev/null", "is not a file")],
)
def test_an_answer_that_cannot_be_written_is_one_message_before_any_work(refuse, tmp_path, monkeypatch, out, said):
    monkeypatch.setattr(selftest, "_steps", lambda *_: pytest.fail("work was begun"))
    monkeypatch.setenv("OUT", out.format(tmp_path))
    assert said in refuse("gpu-selftest")


def test_minutes_are_given_to_the_command(command, refuse, tmp_path, monkeypatch):
    fake(monkeypatch, selftest.Step("one", lambda: pytest.fail("it was begun")))
    now = itertools.count()
    monkeypatch.setattr(selftest.time, "monotonic", lambda: next(now))
    code, printed = command("gpu-selftest", "--out", str(tmp_path / "a.json"), "--minutes", "0.01")
    assert (code, f"SKIP  {'one':<34} {DEFERRED_REASON}" in printed) == (2, True), printed
    assert "MINUTES=few is not a number of minutes" in refuse("gpu-selftest", "--minutes", "few")


def test_the_exit_code_is_2_where_a_part_fails_and_0_where_none_does(command, tmp_path, monkeypatch):
    for status, wanted in (("pass", 0), ("fail", 2), ("skipped", 2)):
        fake(monkeypatch, selftest.Step("one", lambda: Part("one", status, "")))  # noqa: B023
        code, printed = command("gpu-selftest", "--out", str(tmp_path / f"{status}.json"), "--json")
        assert code == wanted, printed
        assert ("FAIL  one" in printed, "SKIP  one" in printed) == (status == "fail", status == "skipped")
    answer = json.loads((tmp_path / "fail.json").read_text())
    assert {"machine", "versions", "date", "parts", "ok", "finished"} <= set(answer)
    assert set(answer["parts"][0]) == {"name", "status", "reason", "predicted", "measured", "seconds", "log"}


def left_out(hardware: Hardware) -> dict[str, str | None]:
    bench = TrialBench(Path(), Path(), on_gpu=bool(hardware.gpus))
    return {step.name: selftest._skip_reason(step, hardware) for step in selftest._steps(bench, hardware)}


def test_what_a_machine_or_its_packages_lack_is_left_out_by_name(monkeypatch):
    real = selftest.importlib.util.find_spec
    monkeypatch.setattr(selftest.importlib.util, "find_spec", lambda name: object())
    on_cpu, one, two = left_out(ALONE), left_out(parse_hardware("1xH100")), left_out(parse_hardware("2xH100"))
    left = {name: why for name, why in on_cpu.items() if why}
    assert left.keys() == {"environment/host", "environment/nvml", "out-of-memory", "several/verify-layouts"}
    assert all("GPU" in why for why in left.values())
    assert {name for name, why in one.items() if why} == {name for name in one if name.startswith("several/")}
    assert not any(two.values())
    monkeypatch.setattr(selftest.importlib.util, "find_spec", lambda name: None if name == "trl" else real(name))
    found = left_out(ALONE)
    assert found["train/qlora/checkpointed/packed/evaluate"].endswith("not installed (make setup): trl")
    assert found["environment/nf4"] is found["several/all-reduce"] is None


measured_run = functools.partial(
    measured, model=calibration.SELFTEST_MODEL, measured_reserved=1500, measured_tokens_per_s=70.0
)


def test_plans_learn_speeds_of_the_self_test_until_a_run_says_more():
    def learned(*runs: calibration.MeasuredRun) -> calibration.Correction:
        return calibration.compute_correction(runs, device="GPU", mode="lora", layout="single", model="m")

    tested = learned(measured_run())
    assert (tested.speed_factor, tested.memory_factor, tested.run_count) == (0.7, 1.0, 0)
    both = learned(measured_run(), measured_run(model="mine", measured_tokens_per_s=50.0, measured_reserved=1100))
    assert (both.speed_factor, both.memory_factor, both.run_count) == (0.5, 1.1, 1)
    assert "selftest" not in (both.reason or "")
    assert learned(measured_run(mode="full")).reason is None


def test_the_plan_says_what_it_learned_from_the_self_test():
    config = config_from_text("model: {name: Qwen/Qwen2.5-3B-Instruct}\ntuning: {mode: lora}", name="x")
    machine, shape = parse_hardware("1xH100"), load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    earlier = [measured_run(device=machine.gpus[0].name, kernels="liger")]  # as its trials run by default
    plain = make_plan(PlanRequest(config, shape, machine))
    taught = make_plan(PlanRequest(config, shape, machine, measured_runs=earlier))
    assert (taught.speed.tokens_per_s, taught.memory) == (pytest.approx(0.7 * plain.speed.tokens_per_s), plain.memory)
    assert sum("make gpu-selftest measured 0.70" in reason for reason in taught.reasons) == 1


def test_a_trial_of_full_rows_on_a_gpu_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "user"))
    bench = TrialBench(tmp_path, tmp_path, on_gpu=True)
    bench.cache.mkdir()
    bench.record.write_text(json.dumps({**vars(measured_run(model="/tmp/model", measured_tokens_per_s=9.0))}) + "\n")
    part = Part("train", "fail", "", {}, {"tokens_per_s": 80.0})

    def run(result: Part, rows: str, *, on_gpu: bool = True) -> None:
        monkeypatch.setattr(trials, "run_trial", lambda *_: result)
        selftest._run_trial(trials.Trial("lora", False, rows, "evaluate"), replace(bench, on_gpu=on_gpu))

    for rows in ("unequal", "equal"):
        run(part, rows)
    run(replace(part, measured=None), "equal")
    run(part, "equal", on_gpu=False)
    found = calibration.load_measured_runs()
    assert [(run.model, run.measured_tokens_per_s) for run in found] == [(calibration.SELFTEST_MODEL, 80.0)]


@pytest.mark.build
def test_a_few_parts_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm.python())
    trial = "train/full/checkpointed/equal/evaluate"
    book = selftest.selftest(tmp_path / "a.json", only=lambda name: name.startswith("environment/") or name == trial)
    assert book.ok, book.result_lines()
    assert {name: part.status for name, part in book.parts.items()} == {
        "environment/device": "skipped", "environment/nf4": "pass", "environment/attention": "pass",
        "environment/nvml": "skipped", trial: "pass",
    }  # fmt: skip
    part: Any = book.parts[trial]
    assert part.measured["evaluations"] == 2
    assert min(part.predicted["reserved"], part.measured["reserved"], part.measured["tokens_per_s"]) > 0
    assert "step 20/20" in Path(part.log).read_text()
    assert len(book.parts["environment/attention"].measured["kernels"]) == 24
    assert json.loads((tmp_path / "a.json").read_text())["finished"]


@pytest.mark.build
def test_a_trial_that_fails_says_the_last_line_and_its_log_and_a_process_that_hangs_or_raises_is_worded(tmp_path):
    bench = TrialBench(tmp_path, tmp_path, on_gpu=False)
    write_trial_rows(tmp_path, CPU_SIZE)
    part = trials.run_trial(trials.Trial("lora", True, "equal", "evaluate"), bench)  # without a model
    assert (part.status, "(exit code 2)" in part.reason) == ("fail", True)
    assert Path(str(part.log)).is_file()
    hung = trials.run_module(["benchmarks.gpu_selftest.probes", "nf4", "a"], tmp_path / "a.log", bench, limit_s=0.2)
    assert (hung.code, "not done after" in hung.message) == (None, True)
    raised = trials.run_module(["benchmarks.gpu_selftest.probes", "nothing", "a"], tmp_path / "b.log", bench)
    assert (raised.code, raised.message) == (1, "KeyError: 'nothing' (exit code 1)")


@pytest.mark.slow
def test_all_of_it_on_the_cpu(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path / "a.json")}
    words = [sys.executable, str(ROOT / "scripts" / "gpu_selftest.py")]
    answer = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    status = {part["name"]: part["status"] for part in json.loads((tmp_path / "a.json").read_text())["parts"]}
    assert "fail" not in status.values()
    assert {status[trial.name] for trial in trials.all_trials()} == {"pass"}
    assert (status["several/all-reduce"], status["several/fsdp-qlora"]) == ("pass", "pass")
