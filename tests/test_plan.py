"""Decisions: precision, batch arithmetic, memory, and what does not fit."""

from __future__ import annotations

import json

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError, DoesNotFit
from sft_play.facts.architecture import parse_config, shape_of
from sft_play.facts.hardware import Gpu, Hardware, named
from sft_play.plan.batching import divisors, plan_batch
from sft_play.plan.memory import Step, adapter_params, estimate, nf4_bytes
from sft_play.plan.plan import batch_lines, check_mesh, detected_lines, make_plan, require_fit
from sft_play.plan.precision import Precision, choose_precision
from tests.conftest import shared

GIB = 2**30


def config(text: str = "", name: str = "Qwen/Qwen2.5-3B-Instruct"):
    return config_from_text(f"model: {{name: {name}}}\n{text}", name="run.yaml")


def cpu(ram: int = 24 * GIB) -> Hardware:
    return Hardware((), "CPU", 2, ram, ram)


def batch(ranks=1, limit=64, fits=lambda micro, accum: True, **train):
    return plan_batch(TrainConfig(**train), ranks=ranks, micro_limit=limit, fits=fits)


def test_micro_batch_is_the_largest_divisor_that_fits():
    # 16 sequences per rank; 3 would fit, 2 is the largest divisor of 16 that does
    plan = batch(ranks=2, fits=lambda micro, accum: micro <= 3)
    assert (plan.micro_batch, plan.grad_accum, plan.effective_batch) == (2, 8, 32)
    assert "2 divides 16: micro 2 x accum 8 x 2 ranks = 32" in plan.reason


def test_no_larger_micro_batch_than_keeps_the_device_busy():
    assert batch(limit=4).micro_batch == 4
    assert batch(limit=5).micro_batch == 4


def test_given_numbers_are_kept():
    assert batch(batch_size=4).grad_accum == 8
    assert batch(grad_accum=4).micro_batch == 8
    plan = batch(batch_size=4, grad_accum=2, effective_batch_size=8)
    assert (plan.micro_batch, plan.grad_accum) == (4, 2)


@pytest.mark.parametrize(
    ("ranks", "train", "message"),
    [
        (8, {"effective_batch_size": 30}, "train.effective_batch_size=30 does not split over 8 ranks; use 24 or 32"),
        (1, {"batch_size": 5}, "does not split over train.batch_size=5 x 1 rank; use 30 or 35"),
        (4, {"grad_accum": 3}, "train.grad_accum=3 x 4 ranks; use 24 or 36"),
        (8, {"effective_batch_size": 4}, "use 8 or 16"),
        (1, {"batch_size": 4, "grad_accum": 4}, "= 16; use train.effective_batch_size=16 or train.grad_accum=8"),
    ],
)
def test_what_does_not_divide_names_the_two_nearest_values(ranks, train, message):
    with pytest.raises(ConfigError) as error:
        batch(ranks=ranks, **train)
    assert message in str(error.value)


def test_a_large_effective_batch_is_split_at_once():
    assert divisors(1_000_000) == sorted(n for n in range(1, 1_000_001) if 1_000_000 % n == 0)
    assert divisors(999_983) == [1, 999_983]  # a prime


def test_nothing_fits_is_no_plan():
    assert batch(fits=lambda micro, accum: False) is None


@pytest.mark.parametrize(
    ("gpu", "train", "expected", "reason"),
    [
        ((8, 0), "", "bfloat16", "the GPU has it"),
        ((7, 5), "", "float16", "has no bf16 units"),
        ((7, 5), "train: {bf16: true}", "float16", "fp16 instead of bf16"),
        ((9, 0), "train: {bf16: false}", "float32", "train.bf16 is false"),
        ((9, 0), "train: {fp16: true}", "float16", "train.fp16 is true"),
        (None, "", "float32", "CPU"),
        (None, "train: {bf16: true}", "bfloat16", "on a CPU because"),
        (None, "train: {fp16: true}", "float32", "instead of fp16"),
    ],
)
def test_precision_is_what_the_device_can_do_and_says_why(gpu, train, expected, reason):
    machine = Hardware((Gpu(0, "GPU", 16 * GIB, None, gpu),), "CPU", 2, GIB, GIB) if gpu else cpu()
    found = choose_precision(config(train), machine)
    assert found.compute == expected
    assert reason in found.reason


def test_weights_of_a_full_fp16_run_are_loaded_in_fp32():
    machine = Hardware((Gpu(0, "T4", 16 * GIB, None, (7, 5)),), "CPU", 2, GIB, GIB)
    assert choose_precision(config("tuning: {mode: full}"), machine).load == "float32"


def test_nf4_takes_half_a_byte_a_weight_and_its_constants():
    # 4096 x 4096: 8,388,608 packed + 262,144 absmax + 4 * 1,024 their absmax + 1,024 + 4 + 64
    assert nf4_bytes(4096 * 4096) == 8_388_608 + 262_144 + 4_096 + 1_024 + 4 + 64


def test_adapters_are_counted_on_every_linear_layer():
    # Llama-3.1-8B, r 16: per layer 16 * ((4096+4096) + 2*(4096+1024) + (4096+4096) + 3*(4096+14336)) = 1,310,720
    shape = parse_config(json.loads(shared("model_configs/Llama-3.1-8B/config.json").read_text()), name="8B")
    assert adapter_params(shape, 16) == 32 * 1_310_720


@pytest.mark.parametrize(
    ("model", "mode", "traced_gib"),
    [
        ("Llama-3.1-8B", "lora", 16.649),
        ("Llama-3.1-8B", "qlora", 6.642),
        ("Qwen3-8B", "lora", 17.014),
        ("Llama-3.1-70B", "qlora", 41.801),
        ("gemma-3-1b-it", "lora", 2.494),
    ],
)
def test_the_first_estimate_is_within_five_percent_above_traced_peaks(model, mode, traced_gib):
    """Traced peaks of one sequence of 2,048 tokens with checkpointing, bf16 (shared/MEMORY.md, section 3)."""
    shape = parse_config(json.loads(shared(f"model_configs/{model}/config.json").read_text()), name=model)
    bf16 = Precision("bfloat16", "bfloat16", "")
    found = estimate(config(f"tuning: {{mode: {mode}}}"), shape, bf16, Step(1, 1, 2048)).allocated / GIB
    assert traced_gib <= found <= 1.05 * traced_gib


def test_two_h200s_share_gemma_27b_as_users_know_it():
    text = "tuning: {mode: qlora, backend: bnb}\ntrain: {batch_size: auto, grad_accum: auto, bf16: true}"
    run = config(text, name="google/gemma-3-27b-it")
    machine = Hardware(
        tuple(Gpu(n, "NVIDIA H200", 141 * GIB, None, (9, 0)) for n in range(2)), "CPU", 2, GIB, GIB, named=True
    )
    plan = make_plan(run, shape_of("google/gemma-3-27b-it"), machine, ranks=2)
    printed = "\n".join([*detected_lines(machine), *batch_lines(plan, run)])
    assert printed.startswith(
        "Detected 2 GPUs:\n  GPU 0: NVIDIA H200 (141.0 GB)\n  GPU 1: NVIDIA H200 (141.0 GB)\nTotal VRAM: 282.0 GB\n"
        "Auto-calculated batch size: 4 per GPU, gradient accumulation: 4\nEffective batch size: 32\n"
    )


def test_what_does_not_fit_says_how_much_and_the_ways_out():
    run = config("tuning: {mode: lora}", "google/gemma-3-27b-it")
    plan = make_plan(run, shape_of("google/gemma-3-27b-it"), named("A100-40GB"))
    assert not plan.fits
    assert [way.change for way in plan.ways_out] == ["model.max_seq_len=1024", "tuning.mode=qlora"]
    assert all(way.required < plan.memory.required for way in plan.ways_out)
    with pytest.raises(DoesNotFit) as error:
        require_fit(plan, run)
    assert error.value.exit_code == 3
    for part in ("does not fit", "GiB", "tuning.mode=qlora (", "model.max_seq_len=1024 ("):
        assert part in str(error.value)


def test_every_candidate_says_why_it_was_not_taken():
    plan = make_plan(config(), shape_of("Qwen/Qwen2.5-3B-Instruct"), named("RTX3060"))
    assert [candidate.batch.micro_batch for candidate in plan.candidates] == [1, 2, 4, 8, 16, 32]
    chosen = [candidate for candidate in plan.candidates if candidate.rejected_because is None]
    assert [candidate.batch.micro_batch for candidate in chosen] == [plan.batch.micro_batch]
    for candidate in plan.candidates:
        assert candidate.fits == (candidate.memory.required <= plan.budget_bytes)
        assert candidate.fits or "GiB" in str(candidate.rejected_because)


def test_a_given_batch_that_does_not_fit_is_judged_not_changed():
    run = config("train: {batch_size: 32}")
    machine = Hardware((Gpu(0, "GPU", 6 * GIB, None, (8, 6)),), "CPU", 2, GIB, GIB)
    plan = make_plan(run, shape_of(run.model.name), machine)
    assert (plan.batch.micro_batch, plan.fits) == (32, False)
    require_fit(plan, run)
    assert any("predicted to need" in reason for reason in plan.reasons)


def test_rows_longer_than_the_models_positions_are_planned_at_its_positions():
    run = config_from_text("model: {name: Qwen/Qwen2.5-3B-Instruct, max_seq_len: 65536}", name="x")
    plan = make_plan(run, shape_of(run.model.name), named("H200"))
    assert plan.max_seq_len == 32_768
    assert any("the model has 32768 positions" in reason for reason in plan.reasons)


@pytest.mark.parametrize("mesh", ["1", "[1, 1]", "[[1, 1], [fsdp, tp]]", "null"])
def test_a_mesh_of_one_process_is_one_process(mesh):
    check_mesh(config_from_text(f"model: {{name: x, mesh_shape: {mesh}}}", name="x"))


@pytest.mark.parametrize("mesh", ["4", "[2, 4]", "[[4, 1], [fsdp, tp]]", "0"])
def test_other_meshes_are_refused_naming_the_layouts_there_are(mesh):
    with pytest.raises(ConfigError, match="the layouts there are: one process"):
        check_mesh(config_from_text(f"model: {{name: x, mesh_shape: {mesh}}}", name="x"))


def test_the_plans_json_has_the_fields_that_scripts_read(command, monkeypatch, tmp_path):
    out = tmp_path / "plan.json"
    monkeypatch.setenv("JSON", "1")
    code, printed = command("plan", "--config", "configs/run_bnb.yaml", "--hardware", "1xRTX3060", "--out", str(out))
    assert code == 0
    plan = json.loads(printed)
    assert plan == json.loads(out.read_text())
    wanted = {
        "fits", "layout", "ranks", "data_parallel_ranks", "micro_batch", "grad_accum", "effective_batch",
        "gradient_checkpointing", "peak_bytes", "tokens_per_s", "confirmed_by_trace", "reasons", "candidates",
        "ways_out",
    }  # fmt: skip
    assert wanted <= set(plan)
    assert {"allocated", "reserved", "budget", "margin", "terms"} <= set(plan["peak_bytes"])
    assert all(isinstance(value, int) for value in plan["peak_bytes"]["terms"].values())
    assert sum(plan["peak_bytes"]["terms"].values()) == plan["peak_bytes"]["allocated"]


def test_planning_needs_no_data(command, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: Qwen/Qwen2.5-3B-Instruct}\ndata: {train_path: /nowhere.jsonl}\n")
    assert command("plan", "--config", str(path), "--hardware", "H100")[0] == 0
