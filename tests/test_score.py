"""The score of published peaks: rows as settings, the table, the JSON, and files that are none."""

import csv
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory_model import old_scripts, published, published_sources  # noqa: F401  (the tracer runs them)
from benchmarks.memory_model.published import read_runs
from benchmarks.memory_model.published_columns import NotExpressible
from benchmarks.memory_model.published_sources import step_settings
from benchmarks.memory_model.score import plain_strategy, score, spread
from benchmarks.memory_model.script_settings import ScriptSettings
from sft_play.errors import ConfigError, ModelError
from sft_play.models.config_json import parse_model_shape
from sft_play.trace import build
from sft_play.trace.settings import TracedPeak, TraceUnavailable
from sft_play.trace.step import record_step, trace_step
from sft_play.trace.storages import EMPTY_CACHE
from tests.conftest import ROOT, shared

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False}
ROW = {
    "id": "someone/run-1", "class": "A", "source": "someone/else benchmarks.md",
    "model": "someone/tiny", "gpu": "NVIDIA A100-SXM4-80GB", "n_gpus": "1", "mode": "lora",
    "lora_r": "8", "lora_targets": "q_proj v_proj", "lora_dtype": "fp32", "weights_dtype": "bf16",
    "compute_dtype": "bf16", "quant": "none", "optimizer": "AdamW", "micro_batch": "2",
    "seq_len": "64", "padding": "all rows full", "grad_accum": "1",
    "gradient_checkpointing": "full", "attention": "sdpa", "loss_head": "full_fp32",
    "strategy": "single", "torch": "2.10.0+cu128", "transformers": "5.3.0", "peft": "0.19.1",
    "peak_allocated_gib": "1.0", "peak_reserved_gib": "2.0", "notes": "",
}  # fmt: skip


def config_of(name: str) -> Mapping[str, Any]:
    if name != "someone/tiny":
        raise ModelError(f"{name}: not here")
    return LLAMA


def settings_of(**changed: str) -> ScriptSettings:
    return step_settings({**ROW, **changed}, config_of=config_of)


def write(path: Path, rows: list[dict[str, str]], *, columns: list[str] | None = None, encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, columns or list(ROW), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def fixed(settings: ScriptSettings) -> TracedPeak:
    return TracedPeak(2**30, 2**31, {}, 0)


def test_columns_become_settings() -> None:
    made = settings_of()
    assert (made.mode, made.micro_batch, made.seq_len, made.world, made.capability) == ("lora", 2, 64, 1, (8, 0))
    assert (made.peft["r"], made.peft["target_modules"]) == (8, ["q_proj", "v_proj"])
    assert (made.weights, made.adapters, made.optimizer) == ("bfloat16", "float32", "adamw_foreach")


@pytest.mark.parametrize(("changed", "field", "value"), [
    ({"gpu": "Tesla T4"}, "capability", (7, 5)), ({"gpu": "NVIDIA L40S"}, "capability", (8, 9)),
    ({"gpu": "NVIDIA A10G"}, "capability", (8, 6)), ({"transformers": "4.49.0"}, "loss", "logits_shifted"),
    ({"transformers": "4.45.2"}, "loss", "logits_shifted_float"), ({"transformers": "4.50.1"}, "loss", "model"),
    ({"loss_head": "chunked"}, "loss", "chunked"),
    ({"optimizer": "AdamW (HF Trainer default)"}, "optimizer", "adamw_fused"),
    ({"optimizer": "AdamW (HF Trainer default)", "transformers": "4.48.1"}, "optimizer", "adamw_foreach"),
    ({"optimizer": "paged_adamw_8bit"}, "optimizer", "paged_adamw_8bit"),
    ({"optimizer": "adamw_bnb_8bit"}, "optimizer", "adamw_8bit"),
    ({"gradient_checkpointing": "no"}, "checkpointing", False), ({"transformers": "4.48.1"}, "reentrant", True),
    ({"padding": "padded to longest"}, "mask", "padded"), ({"attention": "flash2"}, "attention", "flash_attention_2"),
    ({"compute_dtype": "bf16 (autocast)"}, "autocast", "bfloat16"), ({"strategy": "ddp", "n_gpus": "4"}, "world", 4),
    ({"strategy": "fsdp", "n_gpus": "8"}, "strategy", "fsdp1"), ({"strategy": "cp 8", "n_gpus": "8"}, "seq_len", 8),
    ({"seq_len": "", "tokens_per_microbatch": "256"}, "seq_len", 128),
    ({"mode": "qlora", "quant": "bnb-nf4"}, "double_quant", False),
    ({"mode": "qlora", "quant": "bnb-nf4-dq"}, "double_quant", True),
    ({"mode": "qlora", "quant": "bnb-nf4", "weights_dtype": "nf4 (rest fp32)"}, "fp32_rest", True),
    ({"lora_targets": "attention (q k v o)"}, "peft.target_modules", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ({"lora_targets": "all-linear"}, "peft.target_modules", "all-linear"), ({"mode": "dora"}, "peft.use_dora", True),
])  # fmt: skip
def test_a_column_changes_its_setting(changed: dict[str, str], field: str, value: object) -> None:
    found: Any = settings_of(**changed)
    assert found != settings_of()
    for part in field.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value


@pytest.mark.parametrize(("changed", "part"), [
    ({"model": "someone/unseen"}, "no config.json of its model"), ({"class": "D"}, "estimate"),
    ({"mode": "pretraining"}, "the mode is not"), ({"micro_batch": ""}, "micro-batch is not known"),
    ({"micro_batch": "-1"}, "micro_batch is not a positive number"),
    ({"micro_batch": "1.5"}, "micro_batch is not a count"), ({"seq_len": "nan"}, "seq_len is not a positive number"),
    ({"seq_len": ""}, "length of a row is not known"), ({"optimizer": ""}, "optimizer is not known"),
    ({"optimizer": "galore (galore_rank=32)"}, "the optimizer galore is not traced"),
    ({"attention": "flex"}, "attention flex"), ({"gradient_checkpointing": "offload"}, "offloaded"),
    ({"strategy": "fsdp+offload"}, "host memory"), ({"strategy": "fsdp 8 x tp 8"}, "tensor or pipeline"),
    ({"strategy": "fsdp2", "n_gpus": ""}, "number of GPUs"), ({"mode": "qlora", "quant": "gptq-int4"}, "gptq-int4"),
    ({"loss_head": "liger"}, "Liger"), ({"lora_targets": ""}, "target modules"),
    ({"source": "Lightning-AI/litgpt x"}, "model class of its own"),
])  # fmt: skip
def test_a_row_that_cannot_be_expressed_says_why(changed: dict[str, str], part: str) -> None:
    with pytest.raises(NotExpressible, match=re.escape(part)):
        settings_of(**changed)


def test_fms_baseline_keeps_norms_in_fp32_under_autocast() -> None:
    row = {"source": "foundation-model-stack/fms-acceleration refs", "mode": "qlora", "quant": "bnb-nf4"}
    row |= {"weights_dtype": "4bit (+bf16)", "transformers": "4.48.1", "attention": "flash2"}
    notes = (f"framework_config={kind}-peft-bnb; x" for kind in ("baseline", "accelerated"))
    baseline, accelerated = (settings_of(**row, notes=one) for one in notes)
    assert (baseline.fp32_norms, accelerated.fp32_norms) == (True, False)
    assert baseline.autocast == accelerated.autocast == "bfloat16"
    assert baseline.peft["lora_dropout"] == 0.1


def test_fitcheck_counts_the_second_step_and_repeats_keys() -> None:
    made = settings_of(source="Anassbzdd/fitcheck x", notes="cuda_context_mib=141.0", gpu_total_gib="14.5625")
    assert (made.peak_from, made.expand_kv, made.mask, made.clip) == ("second_step", True, "none", False)
    assert made.capacity == int(14.5625 * 2**30 - 141 * 2**20)


def test_peft_rows_are_one_length_and_take_the_whole_config(tmp_path: Path) -> None:
    rows = [{**ROW, "id": name, "source": "huggingface/peft x", "seq_len": "768"} for name in ("one", "two")]
    path = write(tmp_path / "peaks.csv", rows)
    saved = {"peft_type": "LORA", "r": 32, "target_modules": ["v_proj"], "base_model_name_or_path": "x"}
    entry = {"id": "one", "run_info": {"peft_config": saved, "train_config": {"grad_norm_clip": 1.0}}}
    (tmp_path / "peaks_peft_configs.jsonl").write_text(json.dumps(entry) + "\n")
    first, second = (run.settings for run in read_runs(path, config_of=config_of))
    assert first.seq_len == second.seq_len == published_sources.PEFT_LONGEST_ROW
    assert first.peft == {"peft_type": "LORA", "r": 32, "target_modules": ["v_proj"], "task_type": "CAUSAL_LM"}
    assert second.peft["r"] == 8


def test_a_spread_names_the_worst_on_either_side_and_strategies_are_grouped_by_their_first_word() -> None:
    assert spread([0.02, None, -0.05, 0.01]) == {
        "n": 3, "median_abs_error": 0.02, "p95_abs_error": 0.047, "worst_over": 0.02, "worst_under": -0.05,
    }  # fmt: skip
    assert spread([0.1])["worst_under"] == 0.0
    assert spread([]) is None
    assert [plain_strategy(text) for text in ("fsdp2 (8)", "cp 8", "single")] == ["fsdp2", "fsdp2", "single"]


def test_rows_groups_and_reasons(tmp_path: Path) -> None:
    rows = [
        ROW, {**ROW, "id": "b", "class": "B", "peak_reserved_gib": ""},
        {**ROW, "id": "c", "peak_allocated_gib": "0.5"}, {**ROW, "id": "d", "class": "D"},
        {**ROW, "id": "e", "mode": "qlora", "quant": "gptq-int4"},
    ]  # fmt: skip
    asked: list[ScriptSettings] = []

    def trace(settings: ScriptSettings) -> TracedPeak:
        asked.append(settings)
        return fixed(settings)

    answer = score(write(tmp_path / "peaks.csv", rows), trace=trace, config_of=config_of).as_json()
    assert len(asked) == 1  # three rows of equal settings
    assert [row["id"] for row in answer["rows"]] == ["someone/run-1", "c", "b"]
    first, third = answer["rows"][0], answer["rows"][2]
    assert first["predicted_allocated_bytes"] == first["measured_allocated_bytes"] == 2**30
    assert (third["class"], third["measured_reserved_bytes"]) == ("B", None)
    assert sum(answer["not_expressible"].values()) == 2
    # 1 GiB predicted: measured 1 and 0.5, so errors 0 and 1, median 0.5.
    of_a = answer["summary"]["class A"]
    assert (of_a["n"], of_a["allocated"]["median_abs_error"], of_a["allocated"]["worst_over"]) == (2, 0.5, 1.0)
    assert answer["summary"]["class B"]["reserved"] is None
    path = write(tmp_path / "table.csv", [ROW, {**ROW, "id": "x", "strategy": "tp"}])
    text = "\n".join(score(path, trace=fixed, config_of=config_of).table_lines())
    assert "A lora single: someone/run-1" in text
    assert all(group in text for group in ("mode lora", "strategy single", "source someone/else"))
    assert "1  tensor or pipeline parallel (1 A)" in text
    assert "1 of 2 rows expressed" in text


def test_a_tracer_that_fails_is_counted_and_a_card_that_is_too_small_is_tried_without_its_bound(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "id": "x", "seq_len": "32"}, {**ROW, "id": "y", "seq_len": "16"}]
    simulated = {"source": "Anassbzdd/fitcheck x", "notes": "cuda_context_mib=141.0", "gpu_total_gib": "1"}
    rows.append({**ROW, **simulated, "id": "small"})

    def trace(settings: ScriptSettings) -> TracedPeak:
        if settings.seq_len == 32:
            raise TraceUnavailable("no such kernel")
        if settings.seq_len == 16:
            raise RuntimeError("boom")
        if settings.capacity is not None:
            raise MemoryError
        return fixed(settings)

    report = score(write(tmp_path / "peaks.csv", rows), trace=trace, config_of=config_of)
    assert {row.run.id for row in report.rows} == {"someone/run-1", "small"}
    why = ("no such kernel", "RuntimeError: boom")
    assert set(report.not_expressible) == {f"lora cannot be traced: {words}" for words in why}


def test_byte_order_marks_empty_lines_no_rows_and_missing_columns_are_fine(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        path = write(tmp_path / "peaks.csv", [ROW], encoding=encoding)
        path.write_bytes(path.read_bytes() + b"\r\n,,,\r\n")
        assert len(read_runs(path, config_of=config_of)) == 1
    report = score(write(tmp_path / "peaks.csv", []), trace=fixed, config_of=config_of)
    assert (report.as_json()["rows"], report.as_json()["summary"]) == ([], {})
    assert any("0 of 0 rows" in line for line in report.table_lines())
    path = write(tmp_path / "peaks.csv", [ROW], columns=list(published.COLUMNS))
    (run,) = read_runs(path, config_of=config_of)
    assert (run.settings, bool(run.reason)) == (None, True)


@pytest.mark.parametrize(("content", "part"), [
    (b"id,model\nx,y\n", "no column class, source, mode"), (b"\xff\xfe\x00\x01", "UTF-8"),
    (b'{"rows": []}\n', "no column id"), (None, "does not exist"),
])  # fmt: skip
def test_a_file_that_is_no_table_of_peaks_is_one_message(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "peaks.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        score(path, trace=fixed, config_of=config_of)
    with pytest.raises(ConfigError, match="cannot be read"):
        score(tmp_path, trace=fixed, config_of=config_of)


@pytest.mark.slow
def test_zero_is_scored_by_the_closed_form_alone(tmp_path: Path) -> None:
    def trace(settings: ScriptSettings) -> TracedPeak:
        raise TraceUnavailable("no trace runs it")

    zero = {**ROW, "strategy": "zero3", "n_gpus": "4", "mode": "full", "peak_allocated_gib": "1.5", "lora_r": ""}
    report = score(write(tmp_path / "peaks.csv", [zero]), trace=trace, config_of=config_of)
    (row,) = report.as_json()["rows"]
    assert row["predicted_allocated_bytes"] is row["allocated_error"] is row["predicted_reserved_bytes"] is None
    assert row["closed_allocated_error"] == pytest.approx(row["closed_allocated_bytes"] / (1.5 * 2**30) - 1, abs=1e-6)
    assert report.groups["zero"]["n"] == 1
    assert any(line.lstrip().startswith("-") and line.endswith(zero["id"]) for line in report.table_lines())


def test_published_rows_nearest_to_this_toolkit_are_described() -> None:
    """Each row of the table in benchmarks/ has settings, or a reason that says what of it cannot be expressed."""
    runs = read_runs(ROOT / "benchmarks" / "published_nearest.csv")
    expressed = {run.id for run in runs if run.settings is not None}
    assert len(runs) == len({run.id for run in runs}) == 113
    assert [sum(one.startswith(kind) for one in expressed) for kind in ("halo-trl/", "prime-rl/")] == [15, 7]
    assert "deepspeed-bf16-master/fp32-master" in expressed
    reasons = {"a step of reinforcement learning (prime-rl)", "a model class of its own (prime-rl)",
               "tensor, pipeline or expert parallel (Megatron)",
               "ZeRO with master weights and states in half precision"}  # fmt: skip
    assert {run.reason for run in runs if run.settings is None} == reasons
    growing = {run.source for run in runs if run.settings and run.settings.expandable_segments}
    assert growing == {"PrimeIntellect-ai/prime-rl"}


@pytest.mark.slow  # two processes that import everything; what one traces is tested below
def test_several_rows_are_traced_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    path = write(tmp_path / "peaks.csv", [ROW, {**ROW, "id": "long", "seq_len": "256"}])
    heard: list[str] = []
    report = score(path, progress=heard.append, config_of=config_of)
    short, long = report.rows
    assert long.predicted_allocated > short.predicted_allocated > 0
    assert [line.split()[0] for line in heard] == ["1/2", "2/2"]
    assert len(list((tmp_path / "traces").glob("*.json"))) == 2


TINY = ScriptSettings(
    model=LLAMA, mode="full", micro_batch=2, seq_len=64, autocast=None, loss="model", optimizer="adamw_foreach"
)
LOGITS = 2 * 2 * 64 * 512
"""bf16 logits of TINY: two rows of 64 tokens, 512 entries of two bytes."""


def traced(**changed: Any) -> TracedPeak:
    return trace_step(replace(TINY, **changed))


def test_fp32_norms_cost_two_bytes_more_a_weight() -> None:
    model = build.load_skeleton(build.build_skeleton(TINY), replace(TINY, fp32_norms=True))
    kinds = {("norm" in name, one.dtype) for name, one in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_when_scripts_drop_outputs_gradients_and_the_cache_counts() -> None:
    plain = traced()
    held = traced(holds_outputs=True, holds_until_next=True)  # they live through the next forward
    assert held.phases["forward"][0] == plain.phases["forward"][0] + LOGITS
    late = traced(zero_grad_late=True)  # which leaves the next step as it was
    assert late.phases["end"][0] >= plain.phases["end"][0] + 2 * parse_model_shape(LLAMA, name="m").params
    assert late.allocated == plain.allocated

    def times(settings: ScriptSettings) -> int:
        return sum(event[0] == EMPTY_CACHE for event in record_step(settings).events)

    assert times(replace(TINY, empty_cache_every_step=True)) == times(TINY) + TINY.optimizer_steps


def test_older_losses_copy_the_logits_once_more() -> None:
    losses = ("model", "logits_shifted", "logits_shifted_float", "logits_shifted_half")
    allocated = {loss: traced(loss=loss, checkpointing=False).phases["forward"][0] for loss in losses}
    shifted = 2 * 63 * 512  # elements of the shifted logits
    assert allocated["logits_shifted"] - allocated["model"] == pytest.approx(4 * shifted, rel=0.05)
    assert allocated["logits_shifted"] - allocated["logits_shifted_float"] == pytest.approx(LOGITS, rel=0.05)
    assert allocated["logits_shifted_half"] < allocated["logits_shifted_float"]


def test_lora_fa_trains_no_a() -> None:
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
    common = {"mode": "lora", "peft": adapter, "checkpointing": False}
    assert traced(**common, optimizer="lora_fa").allocated < traced(**common).allocated


MIXTRAL = LLAMA | {"model_type": "mixtral", "hidden_size": 256, "intermediate_size": 640}
MIXTRAL |= {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_experts_in_a_loop_are_quantised_one_by_one() -> None:
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    common = {"model": MIXTRAL, "mode": "qlora", "peft": adapter}
    stacked, loop = traced(**common), traced(**common, experts="loop")
    weights = 2 * 4 * 3 * 256 * 640  # layers, experts, matrices, sizes
    # bf16 takes 2 bytes a weight, NF4 a half and its scales: about 1.48 saved.
    assert stacked.resident - loop.resident == pytest.approx(1.48 * weights, rel=0.03)


def test_sharded_accumulation_keeps_whole_gradients() -> None:
    common = {"strategy": "fsdp1", "world": 4, "mixed_precision": None, "optimizer": "sgd"}
    one, two = traced(**common), traced(**common, grad_accum=2)
    matrices = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160)  # of two layers: q, k, v, o and the MLP
    assert two.allocated - one.allocated > 0.5 * 2 * matrices


def test_shared_rows_of_class_a_are_expressible() -> None:
    """litgpt has a model class of its own; a row without a length or a published config has nothing to trace, and
    selective checkpointing does not say what it keeps."""
    runs = [run for run in read_runs(shared("published_peaks.csv")) if run.grade == "A"]
    asked = [run for run in runs if run.mode in {"full", "lora", "qlora", "dora"} and "litgpt" not in run.source]
    refused = {run.id: run.reason for run in asked if run.settings is None}
    measured = {run.id for run in asked if run.measured_allocated or run.measured_reserved}
    assert len(asked) > 140
    left = {name: reason for name, reason in refused.items() if name in measured}
    assert not {name: reason for name, reason in left.items() if not str(reason).startswith("selective")}


@pytest.mark.slow
def test_a_shared_row_is_met_by_the_tracer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest T4 row, 135M parameters: measured 1.0032 GiB allocated and 1.0781 reserved."""
    wanted = "eager-none-fp16-adamw-r32-ckpt-HuggingFaceTB_SmolLM2-135M-bs2-seq512"
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    rows = [row for row in published.read_rows(shared("published_peaks.csv")) if wanted in row["id"]]
    report = score(write(tmp_path / "peaks.csv", [dict(row) for row in rows], columns=list(rows[0])))
    assert len(report.rows) == len(rows) > 0
    assert report.groups["class A"]["allocated"]["median_abs_error"] < 0.003


@pytest.mark.parametrize(("value", "is_on"), [("", False), ("0", False), ("1", True)])
def test_a_benchmark_is_small_where_its_switch_is_on(value, is_on, monkeypatch, tmp_path):
    asked = []
    benchmark = importlib.import_module("benchmarks.predicted_peak")
    monkeypatch.setattr(benchmark, "grid", lambda small: asked.append(small) or [])
    monkeypatch.setattr("sys.argv", ["benchmark", "--out", str(tmp_path / "out.json")])
    monkeypatch.setenv("SMALL", value)
    benchmark.main()
    assert asked == [is_on]
