"""What train.compile changes in a plan: less time a step, compiling once, no more bytes, and what it refuses."""

import functools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError, HardwareError
from sft_play.launch import planning
from sft_play.launch.planning import require_usable_hardware
from sft_play.machine import compiler
from sft_play.machine.compiler import require_inductor
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import LIGER_PACKAGE
from sft_play.models.config_json import load_model_shape
from sft_play.planner import calibration, explain
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.layout import DEEPSPEED_LAYOUTS, find_layouts
from sft_play.planner.pass_work import estimate_pass_work
from sft_play.planner.plan import RunLength, plan_from_json
from sft_play.planner.speed import BANDWIDTH_SHARE, find_rates, predict_speed
from tests.test_device import CPU, THERE
from tests.test_plan_truth import measured

MODELS = ("Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/Qwen3-4B")
MACHINES = ("A100-80GB", "RTX4090", "H100", "2xH100", "4xL40S", "cpu")


def config(*overrides: str, compile: bool | str = True) -> Any:
    text = "model: {name: x, max_seq_len: 2048}\ntrain: {effective_batch_size: 16}\n"
    words = [f"train.compile={str(compile).lower()}", *overrides]
    return config_from_text(text, name="run.yaml", overrides=words)


def planned(
    machine: str, model: str, *overrides: str, compile: bool | str = True, steps: int | None = 1000, **options: Any
) -> Any:
    hardware = replace(parse_hardware(machine), cpu_name="CPU", cpu_cores=16)
    request = PlanRequest(config(*overrides, compile=compile), load_model_shape(model), hardware, **options)
    return make_plan(request, estimate_run_length=lambda _: steps and RunLength(steps, None))


def test_compiled_steps_are_faster_in_what_is_not_a_product_and_take_no_more_memory():
    """On random jobs; by the rule written again: what is spared is the difference of what both move, recomputed too."""
    draw = random.Random(5)
    for _ in range(25):
        model, machine, mode = draw.choice(MODELS), draw.choice(MACHINES[:5]), draw.choice(["lora", "qlora", "full"])
        checkpointing = draw.choice(["true", "false"])
        words = (f"tuning.mode={mode}", f"train.gradient_checkpointing={checkpointing}", "train.batch_size=2",
                 f"train.grad_accum={16 // 2 // len(parse_hardware(machine).gpus)}", "train.kernels=none")  # fmt: skip
        layouts = ("single", "ddp", "fsdp")
        plain, fast = (planned(machine, model, *words, compile=on, allowed_layouts=layouts) for on in (False, True))
        assert fast.memory.allocated == plain.memory.allocated
        if fast.layout != plain.layout:
            continue
        one, other = plain.speed.parts, fast.speed.parts
        for name in ("matrix", "dequantise", "optimizer", "host"):
            assert other[name] == pytest.approx(one[name])
        precision, step, shape = plain.precision, plain.choice.step, load_model_shape(model)
        rates = find_rates(plain.hardware, precision)
        layers, checkpointed = plain.choice.layers, step.checkpointed_layers
        again = (layers if checkpointed is None else checkpointed) / layers
        work = estimate_pass_work(config(*words), shape, precision, step)
        difference = work.plain.plus(work.compiled, times=-1)
        spared = difference.backward.token_bytes + (1 + again) * difference.forward.token_bytes
        spared_s = spared * layers * step.tokens * step.grad_accum / (rates.memory_bytes_per_s * BANDWIDTH_SHARE)
        fixed = (work.plain.forward.fixed_bytes, work.compiled.forward.fixed_bytes)
        assert fixed[0] == fixed[1]
        assert one["memory"] - other["memory"] == pytest.approx(spared_s)
        assert other["kernels"] < one["kernels"]
        assert fast.speed.step_s < plain.speed.step_s
        again = predict_speed(config(*words), shape, precision, step, rates)
        assert again.step_s == pytest.approx(fast.speed.step_s)


def test_hours_have_the_time_of_compiling_and_the_plan_says_so():
    plain, fast = (planned("H100", MODELS[1], "tuning.mode=lora", compile=on) for on in (False, True))
    assert (plain.compile_s, fast.compile_s) == (0.0, 103.0)  # 83 s for a kind of block, 20 s of measuring
    assert planned("H100", "google/gemma-2-9b", "tuning.mode=lora").compile_s == 186.0  # two kinds of blocks
    assert fast.hours * 3600 == pytest.approx(1000 * fast.speed.step_s + 103)
    assert plain.hours * 3600 == pytest.approx(1000 * plain.speed.step_s)
    assert plan_from_json(fast.as_json()).compile_s == 103.0
    (line,) = [line for line in explain.speed_lines(fast) if line.startswith("Run: ")]
    assert " with 103 s of compiling" in line
    assert any("train.compile: operators between products move" in reason for reason in fast.reasons)
    assert not any("compil" in text for text in (*plain.reasons, *explain.speed_lines(plain)))


def test_auto_compiles_what_saves_more_than_twice_what_compiling_costs_and_keeps_the_memory():
    """On random jobs, against the plans that `false` and `true` make."""
    draw, decided = random.Random(11), set()
    for _ in range(12):
        model, machine, mode = draw.choice(MODELS), draw.choice(MACHINES[:5]), draw.choice(["lora", "qlora", "full"])
        words = (f"tuning.mode={mode}", f"train.kernels={draw.choice(['none', 'auto'])}")
        asked = functools.partial(planned, machine, model, *words, steps=int(10 ** draw.uniform(1, 4.5)))
        auto, plain, fast = (asked(compile=how) for how in ("auto", False, True))
        same = (plain.choice.step, plain.layout) == (fast.choice.step, fast.layout)
        assert auto.memory == plain.memory
        assert (auto.layout, auto.batch, auto.choice.step) == (plain.layout, plain.batch, plain.choice.step)
        assert auto.choice == auto.candidates[0]
        assert plan_from_json(json.loads(json.dumps(auto.as_json()))) == auto
        if not auto.compiled:
            assert (auto.speed, auto.kernels, auto.compile_s) == (plain.speed, plain.kernels, 0)
        if same:
            saved = plain.run_length.steps * (plain.speed.step_s - fast.speed.step_s)
            assert auto.compiled == (saved > 2 * fast.compile_s)
            decided.add(auto.compiled)
        if same and auto.compiled:
            assert (auto.speed, auto.compile_s, auto.kernels) == (fast.speed, fast.compile_s, None)
        (reason,) = [line for line in auto.reasons if line.startswith("compile: train.compile=auto")]
        assert ("blocks are compiled: " in reason) == auto.compiled
        assert " steps save " in reason or not same
    assert decided == {True, False}


NOT_COMPILED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"steps": None}, "the number of steps is not known"), ("train.kernels=liger", {}, "train.kernels=liger"),
    ("train.gradient_checkpointing=offload", {}, "gradient_checkpointing=offload"),
    ("tuning.backend=unsloth", {}, "tuning.backend=unsloth has its own"),
    ("", {"resumed_compiled": False}, "those of the run that is resumed were not"),
    ("", {"inductor_obstacle": "inductor cannot compile here: no C compiler"}, "no C compiler"),
    ("", {"allowed_layouts": ("zero2",), "machine": "2xH100"}, "ZeRO's hooks"),
    ("", {"machine": "1xMyGPU,mem=80GiB"}, "the speed of this GPU is not known"),
    ("", {"machine": "1xT4", "model": "Qwen/Qwen2.5-0.5B"}, "rows would lie otherwise"),  # no kernel for boundaries
]  # fmt: skip


@pytest.mark.parametrize(("setting", "changes", "words"), NOT_COMPILED)
def test_auto_stays_plain_with_its_reason_and_on_a_cpu_without_a_word(setting, changes, words):
    given = {"machine": "H100", "model": MODELS[1], "steps": 100_000, "compile": "auto"} | changes
    machine, model = given.pop("machine"), given.pop("model")
    plan = planned(machine, model, "tuning.mode=lora", *([setting] if setting else []), **given)
    assert (plan.compiled, "compiled" in plan.as_json(), plan.compile_s) == (False, False, 0)
    (reason,) = [line for line in plan.reasons if line.startswith("compile: ")]
    assert words in reason
    on_cpu = planned("cpu", MODELS[0], "tuning.mode=lora", compile="auto", steps=100_000)
    assert not any("compil" in line or "kernels" in line for line in on_cpu.reasons)
    assert (on_cpu.compiled, on_cpu.kernels) == (False, None)


def test_what_inductor_lacks_here_matters_to_auto_on_this_machines_gpu(monkeypatch):
    monkeypatch.setattr(planning, "inductor_obstacle", lambda *_: ("no C compiler", "install one"))
    named = parse_hardware("H100")
    asked = [("auto", replace(named, named=False)), ("auto", named), ("auto", CPU), (True, replace(named, named=False))]
    found = [planning._inductor_obstacle(config(compile=how), hardware) for how, hardware in asked]
    assert found == ["inductor cannot compile here: no C compiler", None, None, None]  # true is refused, not planned


def test_a_resumed_run_is_compiled_as_it_was():
    wanted = functools.partial(planned, "H100", MODELS[1], "tuning.mode=lora", compile="auto")
    assert [wanted(steps=10, resumed_compiled=was).compiled for was in (None, True, False)] == [False, True, False]
    assert not wanted(steps=100_000, resumed_compiled=False).compiled


def test_a_named_card_is_planned_with_its_own_environment_and_this_machine_with_what_it_has(monkeypatch):
    """Liger's kernels come with an environment for CUDA, not with one for ROCm."""
    monkeypatch.setattr(planning, "missing_kernel_packages", lambda: frozenset({LIGER_PACKAGE, "causal-conv1d"}))
    named, amd = parse_hardware("H100"), parse_hardware("MI300X")
    for hardware, missing in ((named, False), (amd, True), (replace(named, named=False), True)):
        assert (LIGER_PACKAGE in planning._missing_packages(hardware)) == missing
        assert "causal-conv1d" in planning._missing_packages(hardware)


def test_settings_that_do_not_go_together_are_refused_by_the_plan():
    for setting, words in (
        ("train.kernels=liger", "train.compile: true does not go together with train.kernels=liger"),
        ("train.gradient_checkpointing=offload", "a compiled block moves nothing to RAM"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned("H100", MODELS[0], setting)
        planned("H100", MODELS[0], setting, compile=False)


def test_layouts_that_exchange_inside_blocks_are_not_possible():
    shape, hardware = load_model_shape(MODELS[1]), parse_hardware("4xH100")
    possible, refused = find_layouts(config("tuning.mode=lora"), shape, hardware)
    assert {layout.name for layout in possible} == {"ddp", "fsdp"}
    because = {item.name: item.because for item in refused}
    assert set(because) >= {*DEEPSPEED_LAYOUTS, "tp", "fsdp_tp"}
    assert all("train.compile: " in because[name] for name in (*DEEPSPEED_LAYOUTS, "tp", "fsdp_tp"))
    with pytest.raises(ConfigError, match=r"train\.compile: ranks of fsdp_cp exchange"):
        find_layouts(config("model.mesh_shape=[[2,2],[fsdp,cp]]"), shape, hardware)
    assert {layout.name for layout in find_layouts(config(compile=False), shape, hardware)[0]} > {"zero2", "zero3"}


def test_compiled_runs_and_plain_ones_do_not_correct_each_other():
    run = functools.partial(measured, measured_reserved=2000)
    runs = [run(), run(compiled=True, measured_reserved=1500, measured_tokens_per_s=80.0)]
    asked = {"device": "GPU", "mode": "lora", "layout": "single", "model": "m"}
    plain, fast = (calibration.compute_correction(runs, **asked, is_compiled=on) for on in (False, True))
    assert (plain.run_count, plain.memory_factor, plain.speed_factor) == (1, 2.0, 0.5)
    assert (fast.run_count, fast.memory_factor, fast.speed_factor) == (1, 1.5, 0.8)
    assert calibration.compute_correction(runs[:1], **asked, is_compiled=True) == calibration.Correction()
    earlier = [run(device=parse_hardware("H100").gpus[0].name, model="x")]
    for on in (True, False):
        wanted = functools.partial(planned, "H100", MODELS[0], "tuning.mode=lora", "train.kernels=none", compile=on)
        untouched, corrected = (wanted(measured_runs=known).speed.tokens_per_s for known in ([], earlier))
        assert (corrected == untouched, corrected < untouched) == (on, not on)


@pytest.mark.parametrize(("missing", "words"), [("compiler", "no C compiler"), ("has_triton", "pip install triton")])
def test_a_gpu_needs_triton_and_its_c_compiler_for_every_kernel(monkeypatch, missing, words):
    """What an earlier run has built is not enough: each new kernel is built again."""
    hardware, there = parse_hardware("H100"), replace(THERE, has_built_module=True)
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: there)
    require_inductor(hardware, {})
    monkeypatch.setattr(compiler, "find_toolchain", lambda _: replace(there, **{missing: None}))
    with pytest.raises(HardwareError, match=f"inductor cannot compile here: .*{words}.*compile=false"):
        require_inductor(hardware, {})


def test_a_cpu_needs_a_cpp_compiler_before_anything_loads(monkeypatch, tmp_path):
    environment = {"CXX": str(tmp_path / "none")}
    with pytest.raises(HardwareError, match=r"no C\+\+ compiler"):
        require_usable_hardware(config("train.device=cpu"), CPU, environment, count_params=lambda: 1)
    require_usable_hardware(config("train.device=cpu", compile=False), CPU, environment, count_params=lambda: 1)
    (tmp_path / "none").write_text("#!/bin/sh\necho 'error: no licence' >&2\nexit 1\n")
    (tmp_path / "none").chmod(0o755)
    with pytest.raises(HardwareError, match="fails: error: no licence"):
        require_inductor(CPU, environment)
    monkeypatch.setattr(compiler, "_compile_trial", lambda *_: None)
    require_inductor(CPU, environment)


def test_a_run_that_stayed_plain_teaches_nothing_of_compiled_ones(tmp_path, monkeypatch):
    from sft_play.training.job import record_measurements

    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    plan = planned("cpu", MODELS[0], "tuning.mode=lora")
    peaks = {"training": {"measured_rss": 5, "measured_allocated": None}}
    summary = {"peak_bytes_by_moment": peaks, "tokens_per_s": 3.0, "compile": None}
    record_measurements([(config(), plan)], summary)
    assert calibration.load_measured_runs() == []
    record_measurements([(config(), plan)], summary | {"compile": {"graphs": 1}})
    assert [one.compiled for one in calibration.load_measured_runs()] == [True]
    record_measurements([(config(), planned("cpu", MODELS[0], "tuning.mode=lora", compile=False))], summary)
    assert [one.compiled for one in calibration.load_measured_runs()] == [True, False]
