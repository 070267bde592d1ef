"""A plan's figures with Liger's kernels: their bytes by rules written again and against traces, their speed, and what
is counted where the run may fall back."""

import inspect
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import LIGER_PACKAGE
from sft_play.models.config_json import load_model_shape, parse_model_shape
from sft_play.planner import calibration
from sft_play.planner.advice import find_suggestions
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidates import build_candidate
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.kernels import LIGER_REPLACEMENTS, LIGER_VERSION, CountedKernels, PlannedKernels, plan_kernels
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import OWN_SEGMENT_BYTES
from sft_play.planner.memory.tape import Tape, liger_norm
from sft_play.planner.pass_work import DirectionWork, PassWork, apply_liger
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision
from sft_play.text import GIB
from sft_play.trace import build
from sft_play.trace.confirm import trace_candidate
from sft_play.trace.settings import StepSettings
from sft_play.trace.step import trace_step
from sft_play.training.class_checks import replaced_code
from sft_play.training.job import record_measurements
from tests.conftest import ROOT
from tests.test_plan_truth import measured

MIB = 2**20
SIZES = {
    "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma": {}, "mistral": {"sliding_window": None},
    "phi3": {"pad_token_id": 0, "num_key_value_heads": 8},
    "gemma3_text": {"sliding_window": 4096, "layer_types": 2 * ["sliding_attention"] + ["full_attention"]},
}  # fmt: skip
LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
BF16, FP32 = Precision("bfloat16", "bfloat16", ""), Precision("float32", "float32", "")


def config(kernels: str, mode: str = "lora", **changes: Any) -> RunConfig:
    words = [f"train.kernels={kernels}", f"tuning.mode={mode}", *(f"{key}={value}" for key, value in changes.items())]
    return config_from_text("model: {name: meta-llama/Llama-3.1-8B}\n", name="run.yaml", overrides=words)


def plan_of(kernels: str, *, without: frozenset[str] = frozenset(), hardware: str = "H100", **options: Any) -> Any:
    run = config(kernels, **options)
    shape = load_model_shape(run.model.name)
    return make_plan(PlanRequest(run, shape, parse_hardware(f"1x{hardware}"), missing_packages=without))


# --- bytes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(8))
def test_a_norm_holds_its_input_and_a_number_a_row_and_its_gradient_takes_the_place_of_the_outputs(seed: int) -> None:
    draw = random.Random(seed)
    rows, width, e = draw.randint(1, 400), draw.randint(1, 2000), draw.choice((2, 4))
    in_place, trains = draw.random() < 0.5, draw.random() < 0.5
    size = rows * width * e
    assert size < OWN_SEGMENT_BYTES  # no rest of a segment
    tape = Tape()
    x = tape.leaf(rows * width, e)
    out = liger_norm(tape, x, rows, in_place=in_place, trains_weight=trains)
    assert tape.meter.peak == tape.meter.live == 2 * size + 4 * rows
    node = out.node
    del x, out
    assert tape.meter.live == size + 4 * rows
    grad = tape.new(rows * width, e)
    tape.meter.reset_peak()
    assert node is not None
    tape.backward(node, grad)
    sums = 188 * 4 * width if trains else 0
    assert tape.meter.peak == size + 4 * rows + size + (0 if in_place else size) + sums
    del grad, node
    assert tape.meter.live == 0


def _both(kind: str, mode: str, *, checkpointing: bool, precision: Precision, kernels: str) -> tuple[int, int]:
    from benchmarks.memory_model import liger  # noqa: F401  (which lets the tracer run them)

    model = {"model_type": kind, **SIZES, **MODELS[kind]}
    run = config("liger" if kernels == "liger" else "none", mode)
    step = Step(4, 1, 2048, checkpointed_layers=None if checkpointing else 0)
    closed = estimate_memory(run, parse_model_shape(dict(model), name="m"), precision, step)
    half = precision.compute != "float32"
    adapters = None if mode == "full" else "bfloat16" if mode == "qlora" else "float32"
    peft = None if mode == "full" else LORA
    words: dict[str, Any] = {"mode": mode, "kernels": kernels, "adapters": adapters, "peft": peft}
    words |= {"weights": precision.load, "autocast": "bfloat16" if half else None, "repeats_kv": not half}
    settings = StepSettings(model=model, micro_batch=4, seq_len=2048, checkpointing=checkpointing, **words)
    return closed.allocated, trace_step(settings).allocated


@pytest.mark.build
@pytest.mark.parametrize(("kind", "mode", "checkpointing"), [
    ("llama", "lora", False), ("llama", "qlora", True), ("qwen3", "full", False), ("qwen3", "lora", True),
    ("phi3", "lora", True), ("gemma3_text", "lora", False), ("mistral", "full", True), ("qwen2", "qlora", False),
    ("gemma", "full", False),
])  # fmt: skip
def test_the_closed_form_is_what_a_trace_with_the_kernels_measures(kind: str, mode: str, checkpointing: bool) -> None:
    closed, traced = _both(kind, mode, checkpointing=checkpointing, precision=BF16, kernels="liger")
    plain_closed, plain_traced = _both(kind, mode, checkpointing=checkpointing, precision=BF16, kernels="plain")
    assert closed == pytest.approx(traced, rel=0.01)
    assert closed < plain_closed
    assert plain_closed - closed == pytest.approx(plain_traced - traced, rel=0.1, abs=2 * MIB)


EVERY = list(itertools.product(MODELS, ("full", "lora", "qlora"), (False, True), (BF16,)))


@pytest.mark.build
@pytest.mark.parametrize(
    ("kind", "mode", "checkpointing", "precision"),
    [*(("llama", mode, False, FP32) for mode in ("full", "lora")),
     *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY)],
)  # fmt: skip
def test_every_family_mode_and_precision_is_traced_as_the_closed_form_says(kind, mode, checkpointing, precision):
    closed, traced = _both(kind, mode, checkpointing=checkpointing, precision=precision, kernels="liger")
    assert closed == pytest.approx(traced, rel=0.01)


@pytest.mark.build
def test_a_plan_with_the_kernels_says_that_no_trace_runs_them(monkeypatch: Any) -> None:
    monkeypatch.delitem(build.KERNEL_CONTEXTS, "liger", raising=False)
    model, run = {"model_type": "llama", **SIZES}, config("liger")
    shape = parse_model_shape(dict(model), name="m")
    inputs = build_plan_inputs(PlanRequest(run, shape, parse_hardware("1xH100")))
    candidate = build_candidate(inputs, SINGLE, BatchPlan(1, 1, 1), 0)
    assert "run on a GPU alone" in trace_candidate(run, model, shape, BF16, candidate).unavailable_reason


@pytest.mark.build
def test_the_table_is_the_packages_own() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for kind, replaced in LIGER_REPLACEMENTS.items():
        options = inspect.signature(patches.MODEL_TYPE_TO_APPLY_LIGER_FN[kind]).parameters
        assert options["rms_norm"].default is True
        assert options["rope"].default is replaced.replaces_rotation, kind
        gate = options.get("swiglu", options.get("geglu"))
        assert gate is not None
        assert gate.default or not replaced.replaces_gate, kind


def test_the_pin_of_the_lock_is_the_version_that_was_counted() -> None:
    assert f"{LIGER_PACKAGE}=={LIGER_VERSION}\n" in (ROOT / "requirements.lock").read_text(encoding="utf-8")


# --- decisions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(30))
def test_what_is_counted_follows_the_wish_the_machine_and_the_class(seed: int) -> None:
    draw = random.Random(seed)
    wish = draw.choice(("none", "auto", "liger"))
    on_gpu, installed, backend = draw.random() < 0.7, draw.random() < 0.6, draw.choice(("bnb", "bnb", "unsloth"))
    models = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-4B", "allenai/OLMo-2-1124-7B", "mistralai/Mixtral-8x7B-v0.1")
    model = draw.choice(models)
    layout = draw.choice((SINGLE, SINGLE, Layout("ddp", 2), Layout("tp", 2, tensor_parallel=2)))
    run, shape = config(wish, **{"tuning.backend": backend}), load_model_shape(model)
    without = frozenset() if installed else frozenset({LIGER_PACKAGE})
    found = plan_kernels(run, shape, layout, on_gpu=on_gpu, missing_packages=without)
    can = on_gpu and backend == "bnb" and layout.tensor_parallel == 1 and "OLMo" not in model
    if wish == "none" or (wish == "auto" and not on_gpu):  # on a CPU nobody expects them: no word
        assert found == PlannedKernels()
        return
    speed = can and (wish == "liger" or installed)
    memory = can and wish == "liger"
    assert (found.memory is not None, found.speed is not None) == (memory, speed)
    assert ("the plain ones, because" in found.reason) == (not speed)
    if found.speed is not None:
        assert found.speed.replaces_gate == (shape.num_experts == 0)
        assert found.speed.replaces_head_norms == ("Qwen3" in model)
    assert found.counted_kernels == CountedKernels("liger" if memory else "plain", "liger" if speed else "plain")


def test_auto_keeps_the_plain_bytes_and_liger_counts_its_own() -> None:
    batch = {"train.batch_size": 4, "train.grad_accum": 1, "model.max_seq_len": 1024,
             "train.gradient_checkpointing": "false"}  # fmt: skip
    none, auto, liger = (plan_of(kernels, **batch) for kernels in ("none", "auto", "liger"))
    missing = plan_of("auto", without=frozenset({LIGER_PACKAGE}), **batch)
    assert "kernels" not in none.as_json()
    assert auto.memory == missing.memory
    assert missing.memory.allocated == pytest.approx(none.memory.allocated, rel=0.003)
    assert auto.speed == liger.speed
    # adapters in groups need no package
    assert none.speed.step_s > missing.speed.step_s > liger.speed.step_s > 0.8 * missing.speed.step_s
    # of 4 x 1024 tokens a block holds neither x in fp32 for its two norms (4 h bytes a token each) nor the activated
    # gate (2 f): at least 4 GiB over 32 layers
    assert missing.memory.allocated - liger.memory.allocated > 4 * GIB
    assert none.memory.required > liger.memory.required
    assert any("train.kernels=liger" in reason for reason in liger.reasons)
    assert any("liger-kernel is not installed here" in reason for reason in missing.reasons)
    assert liger.as_json()["kernels"] == {"memory": "liger", "speed": "liger"}
    assert plan_from_json(json.loads(json.dumps(liger.as_json()))).kernels == liger.kernels


# --- speed ------------------------------------------------------------------------------------------------------------
def test_saved_bytes_are_those_counted_by_hand() -> None:
    # Llama: 2 norms of h = 4, q + k = 4 + 2 rotated, gate of f = 3, one layer, e = 2
    model = {"model_type": "llama", "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8}  # fmt: skip
    shape = parse_model_shape(model, name="m")
    # a norm moves 36 bytes an element and then 84, Liger's 4 and 6; a rotation 20 and 32, Liger's 4 and 4; a gate 10
    # and 18, Liger's 6 and 10
    plain = PassWork(DirectionWork(1e4, 7, 100), DirectionWork(2e4, 8, 200))
    fused = apply_liger(plain, shape, LIGER_REPLACEMENTS["llama"], half=True)
    assert plain.forward.token_bytes - fused.forward.token_bytes == 2 * 4 * 32 + 6 * 16 + 3 * 4
    assert plain.backward.token_bytes - fused.backward.token_bytes == 2 * 4 * 78 + 6 * 28 + 3 * 8
    assert (fused.forward.fixed_bytes, fused.backward.fixed_bytes) == (7, 8)
    # in fp32 nothing is cast: 28 and 76 against 8 and 12; 48 and 68 against 8 and 8; 20 and 36 against 12 and 20
    fused = apply_liger(plain, shape, LIGER_REPLACEMENTS["llama"], half=False)
    spared = plain.plus(fused, times=-1)
    both = spared.forward.plus(spared.backward)
    assert (both.token_bytes, both.operators) == (2 * 4 * (20 + 64) + 6 * (40 + 60) + 3 * (8 + 16), 2 * 2 + 5 + 6)


# --- what later plans learn, and falling back -----------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(30))
def test_runs_correct_only_plans_of_their_own_kernels(seed: int) -> None:
    draw = random.Random(seed)
    runs = [
        measured(device="H100", kernels=draw.choice(("plain", "liger")), measured_reserved=draw.randint(90, 200),
             measured_tokens_per_s=float(draw.randint(20, 200)), predicted_reserved=draw.choice((0, 100)))
        for _ in range(draw.randint(0, 8))
    ]  # fmt: skip
    for names in (("plain", "plain"), ("plain", "liger"), ("liger", "liger")):
        place = {"device": "H100", "mode": "lora", "layout": "single", "model": "m"}
        found = calibration.compute_correction(runs, **place, kernels=CountedKernels(*names))
        of_memory = [run.measured_reserved / 100 for run in runs if run.kernels == names[0] and run.predicted_reserved]
        of_speed = sorted(run.measured_tokens_per_s / 100 for run in runs if run.kernels == names[1])
        assert (found.memory_factor, found.run_count) == (max([1.0, *of_memory]), len(of_memory))
        middle = len(of_speed) // 2
        expected = (of_speed[middle] + of_speed[-middle - 1]) / 2 if of_speed else 1.0
        assert found.speed_factor == pytest.approx(expected)


@pytest.mark.parametrize(("wish", "used", "memory", "speed"), [
    ("none", [], True, True),
    ("auto", ["rms_norm"], True, True),  # the memory of the plain ones was predicted, which is a bound of Liger's
    ("auto", [], True, False), ("liger", ["rms_norm"], True, True), ("liger", [], False, False),
])  # fmt: skip
def test_a_prediction_of_other_kernels_is_not_learned_from(
    monkeypatch: Any, wish: str, used: list[str], memory: bool, speed: bool
) -> None:
    kept: list[calibration.MeasuredRun] = []
    monkeypatch.setattr(calibration, "add_measured_run", kept.append)
    plan = plan_of(wish)
    summary = {
        "peak_bytes_by_moment": {"training": {"measured_reserved": 5, "measured_allocated": 4}}, "tokens_per_s": 3.0,
        **({"kernels": {"used": used}} if wish != "none" else {}),
    }  # fmt: skip
    record_measurements([(config(wish), plan)], summary)
    (run,) = kept
    assert (run.kernels, bool(run.predicted_reserved)) == ("liger" if used else "plain", memory)
    assert run.memory_kernels in (None, "liger" if wish == "liger" else "plain")
    place = {"device": run.device, "mode": run.mode, "layout": run.layout, "model": run.model}
    found = calibration.compute_correction([run], **place, kernels=plan.kernels or CountedKernels())
    assert (found.run_count, found.has_measured_speed) == (memory, speed)
    assert bool(run.predicted_tokens_per_s) == speed


@pytest.mark.build
def test_experts_keep_their_gates(monkeypatch: Any) -> None:
    asked: list[dict[str, bool]] = []

    def swap(model: Any, rms_norm: bool = True, swiglu: bool = True, rope: bool = True, loss: bool = True) -> None:
        asked.append({"rms_norm": rms_norm, "swiglu": swiglu, "rope": rope, "loss": loss})

    monkeypatch.setattr(replaced_code, "_liger_functions", lambda: {"kind": swap})
    for name in ("experts", "expertise"):
        model: Any = nn.ModuleDict({"mlp": nn.ModuleDict({name: nn.Identity()})})
        model.config = SimpleNamespace(model_type="kind")
        has_experts = name == "experts"
        replaced = ("rms_norm", "rope") if has_experts else ("rms_norm", "swiglu", "rope")
        assert replaced_code._apply_liger(model) == replaced
        assert asked[-1] == {"rms_norm": True, "swiglu": not has_experts, "rope": True, "loss": False}


@pytest.mark.parametrize("wish", ["none", "auto"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_plan_that_does_not_fit_names_the_kernels_where_they_are_installed_and_wanted(wish: str, installed: bool):
    run = config(wish, **{"train.gradient_checkpointing": "false", "train.batch_size": 4, "train.grad_accum": 1})
    shape, hardware = load_model_shape(run.model.name), parse_hardware("1xRTX4090")
    without = frozenset() if installed else frozenset({LIGER_PACKAGE})
    found = list(find_suggestions(PlanRequest(run, shape, hardware, missing_packages=without)))
    named_ways = [way for way in found if way.setting and "train.kernels=liger" in way.setting]
    assert bool(named_ways) == (wish == "auto" and installed)
    assert found
