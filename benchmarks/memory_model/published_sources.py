"""The scripts behind published runs, each described once: what goes over what a row's columns say.

The casts, the mask, the loss, the optimizer and the counters of a source were read in its script. No figure is fitted
to a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.memory_model.published_columns import (
    CsvRow,
    NotExpressible,
    columns_settings,
    count_in,
    require_value,
    row_lengths,
    version_in,
)
from benchmarks.memory_model.published_models import Config, ConfigOf, known_config
from benchmarks.memory_model.script_settings import ScriptSettings


@dataclass(frozen=True)
class Source:
    """One source's script. `fixed` goes over what the columns say; `also` reads what only this source's rows carry."""

    repository: str
    why: str
    """What the script does that no column says, and where that was read."""
    fixed: Mapping[str, Any]
    also: Callable[[CsvRow, dict[str, Any], Config | None], dict[str, Any]] | None = None
    lengths: Callable[[CsvRow], dict[str, Any]] = row_lengths
    refused: str = ""
    """Why no row of this source can be traced; empty where rows can."""
    refuses: Callable[[CsvRow], str] = lambda row: ""
    """The same of one row, by what only this source's rows say."""


def _fitcheck(row: CsvRow, settings: dict[str, Any], _: Config | None) -> dict[str, Any]:
    return {"expand_kv": settings["attention"] == "sdpa"}


PEFT_LONGEST_ROW = 680
"""Tokens of the longest padded batch of the 5,000 in huggingface/peft method_comparison/MetaMathQA.

The cap is 768 and texts end at 1,300 characters, so the batch is a fact of the data (MetaMathQA, seed and order the
same in every row), which is not here. One figure for the whole source, from a study of its LoRA r=32 row; a run with
a smaller cap is bounded by it.
"""


def _peft_lengths(row: CsvRow) -> dict[str, Any]:
    cap = require_value(count_in(row, "seq_len"), "the length of a row")
    return {**row_lengths(row), "seq_len": min(cap, PEFT_LONGEST_ROW)}


def _peft_metamath(row: CsvRow, settings: dict[str, Any], run_info: Config | None) -> dict[str, Any]:
    train = (run_info or {}).get("train_config", {})
    changed: dict[str, Any] = {"clip": train.get("grad_norm_clip", 1.0) > 0}
    if settings["optimizer"] == "lora_fa" and version_in(row, "peft") >= (0, 19, 2):
        # disable_adapter() around the loss on Wikipedia, new in that run, switches every adapter's gradients on again.
        changed["optimizer"] = "adamw_foreach"
    return changed


ORCA_MEAN_ROW = 289
ORCA_LONGEST_ROW = 2450
"""Tokens of a row of microsoft/orca-math-word-problems-200k, train[:8000], with Mistral's tokenizer.

The mean is the source's own: refs_orca/a100_80gb_pf.csv, train_tokens_per_second x train_runtime / 8000 rows, one GPU
without padding. The longest row is not published; one figure for all rows of the source.
"""


def _fms_lengths(row: CsvRow) -> dict[str, Any]:
    if row.get("seq_len") or row.get("tokens_per_microbatch"):
        return row_lengths(row)
    if "orca-math" not in row.get("notes", ""):
        raise NotExpressible("the length of a row is not known")
    batch = require_value(count_in(row, "micro_batch"), "the micro-batch")
    if row.get("padding", "") == "padded to longest":
        return {"micro_batch": batch, "seq_len": ORCA_LONGEST_ROW}
    return {"micro_batch": 1, "seq_len": ORCA_LONGEST_ROW + (batch - 1) * ORCA_MEAN_ROW}


def _fms(row: CsvRow, settings: dict[str, Any], _: Config | None) -> dict[str, Any]:
    framework = re.search(r"framework_config=([\w-]*)", row.get("notes", ""))
    name = framework[1] if framework else "none"
    if "foak" in name or "liger" in name:
        raise NotExpressible("kernels of its own (fms-acceleration foak)")
    if "scattermoe" in name or "moe" in name:
        raise NotExpressible("kernels of its own (fms-acceleration MoE)")
    changed: dict[str, Any] = {}
    if settings["peft"]:
        changed["peft"] = {**settings["peft"], "lora_alpha": 16, "lora_dropout": 0.1}
    if settings["mode"] == "qlora":
        # scenarios*.yaml give these runs bf16 (orca: fp16); accelerate then wraps the forward in autocast.
        changed |= {"autocast": settings["weights"], "double_quant": True}
        changed["fp32_norms"] = "baseline" in name and settings["strategy"] == "single"
        if settings["strategy"] != "single":
            changed["quant_storage"] = settings["weights"]
    return changed


def _torchtitan(row: CsvRow, settings: dict[str, Any], _: Config | None) -> dict[str, Any]:
    return {"mixed_precision": "bfloat16", "reentrant": False, "expandable_segments": True}


_OWN_CLASSES = {"afmoe", "glm4_moe", "llama", "qwen3_moe"}
"""Model types that prime-rl replaces by classes of its own (prime_rl/trainer/models/__init__.py)."""


def _is_prime_rl_sft(row: CsvRow) -> str:
    return "" if "type=sft" in row.get("notes", "") else "a step of reinforcement learning (prime-rl)"


def _prime_rl(row: CsvRow, settings: dict[str, Any], _: Config | None) -> dict[str, Any]:
    if settings["model"].get("model_type") in _OWN_CLASSES:
        raise NotExpressible("a model class of its own (prime-rl)")
    return {"expandable_segments": True}


def _has_wide_masters(row: CsvRow) -> str:
    is_half = "bf16 master" in row.get("optimizer", "")
    return "ZeRO with master weights and states in half precision" if is_half else ""


SOURCES: tuple[Source, ...] = (
    Source(
        "Anassbzdd/fitcheck",
        "scripts/measure.py: a plain loop without autocast or clipping; the same random ids as labels, no mask; SDPA "
        "pinned to the memory-efficient kernel with K and V repeated by hand; one warm-up step, counters reset, one "
        "measured step; nf4 rows through prepare_model_for_kbit_training, one quantisation level.",
        {
            "autocast": None,
            "mask": "none",
            "loss": "model",
            "reentrant": False,
            "clip": False,
            "holds_outputs": True,
            "peak_from": "second_step",
        },
        _fitcheck,
    ),
    Source(
        "DaoyuanLi2816/can-i-finetune-this",
        "src/canifinetune/bench/runner.py: a plain loop, mask of ones, no clipping, outputs held until the next step's "
        "are there; counters reset before loading, three steps; prepare_model_for_kbit_training for QLoRA.",
        {
            "mask": "ones",
            "loss": "model",
            "clip": False,
            "optimizer_steps": 3,
            "holds_outputs": True,
            "holds_until_next": True,
            "reentrant": False,
        },
    ),
    Source(
        "huggingface/peft",
        "method_comparison/MetaMathQA/run.py: bf16 weights, fp32 adapters, no autocast, outputs held until the next "
        "step's are there, real padding, clipping at 1; counters over the whole run.",
        {
            "autocast": None,
            "mask": "padded",
            "loss": "model",
            "reentrant": False,
            "holds_outputs": True,
            "holds_until_next": True,
            "zero_grad_late": True,
            "empty_cache_every_step": True,
        },
        _peft_metamath,
        _peft_lengths,
    ),
    Source(
        "foundation-model-stack/fms-acceleration",
        "scripts/benchmarks (scenarios*.yaml, defaults.yaml, accelerate.yaml) with fms-hf-tuning's sft_trainer: the "
        "Trainer's memory tracker starts when train() does; LoRA dropout 0.1; TRL puts the embedding and the head of "
        "a quantised base back to half precision after prepare_model_for_kbit_training (baseline-peft-bnb), the "
        "accelerated plugin makes no upcast; FSDP without mixed precision.",
        {"mask": "none", "peak_from": "loaded", "empty_cache_after_load": False, "mixed_precision": None},
        _fms,
        _fms_lengths,
    ),
    Source(
        "pytorch/torchtitan",
        "torchtitan/parallelisms: fully_shard per block with fp32 shards, bf16 gathers, fp32 reduction, fused AdamW; "
        "counters over the whole run; run_llama_train.sh sets expandable segments.",
        {"mask": "none", "weights": "float32", "loss": "model", "optimizer": "adamw_fused"},
        _torchtitan,
    ),
    Source(
        "PrimeIntellect-ai/prime-rl",
        "src/prime_rl/trainer (sft/train.py, model.py, optim.py, January 2026): transformers' class for dense Qwen3, "
        "fully_shard per block with fp32 shards, bf16 gathers and fp32 reduction after every micro-batch, AdamW one "
        "list at a time, fp32 logits in place of the half ones and held until the next ones are there, clipping; "
        "counters reset each step; the workflow sets expandable segments. Blocks are compiled, which no trace does.",
        {
            "mask": "none",
            "weights": "float32",
            "autocast": None,
            "mixed_precision": "bfloat16",
            "reduces_in": "float32",
            "sync_each_batch": True,
            "loss": "logits_float",
            "holds_outputs": True,
            "holds_until_next": True,
            "reentrant": False,
            "peak_from": "second_step",
        },
        _prime_rl,
        refuses=_is_prime_rl_sft,
    ),
    Source(
        "whitecircle/halo",
        "tests/gpu/profiling/benchmark_trl_baseline.py: TRL's SFTTrainer on a bf16 model, FSDP2 by fsdp_config, rows "
        "of one length with a mask of ones, nothing saved or evaluated; counters reset each step, so without loading. "
        "Liger's fused cross-entropy is counted as TRL's chunked head, Liger's norms and activations for the plain "
        "ones.",
        {"mask": "ones", "autocast": "bfloat16", "reentrant": False, "peak_from": "second_step"},
    ),
    Source(
        "deepspeedai/DeepSpeedExamples",
        "training/bf16_master_weight/train.py: a plain transformer with nn.MultiheadAttention, which keeps its "
        "weights, and whole logits; DeepSpeed's bf16 with fp32 masters; counters over the whole run.",
        {"mask": "none", "autocast": None, "mixed_precision": "bfloat16", "loss": "model", "optimizer": "adamw_fused"},
        refuses=_has_wide_masters,
    ),
    Source("MooreThreads/SimuMax", "Megatron", {}, refused="tensor, pipeline or expert parallel (Megatron)"),
    Source("Lightning-AI/litgpt", "litgpt/model.py", {}, refused="a model class of its own (litgpt)"),
    Source("pytorch/torchtune", "torchtune/modules", {}, refused="a model class of its own (torchtune)"),
    Source("pytorch/ao", "torchtune's and torchtitan's classes", {}, refused="a model class of its own (torchao)"),
)

_PLAIN = Source("", "any other source: what the columns say, as transformers' Trainer would run it", {})


def find_source(row: CsvRow) -> Source:
    """The description of the row's source; the plain one where there is none."""
    repository = row["source"].split(" ")[0].split("@")[0]
    return next((source for source in SOURCES if source.repository == repository), _PLAIN)


def step_settings(row: CsvRow, *, config_of: ConfigOf = known_config, run_info: Config | None = None) -> ScriptSettings:
    """The settings of the step that a row measured; raises NotExpressible with the reason where there are none."""
    if row["class"].upper() == "D":
        raise NotExpressible("class D: an estimate of the source, nothing was measured")
    if row["mode"] not in {"full", "lora", "qlora", "dora", "other-peft"}:
        raise NotExpressible("the mode is not full, lora, dora, qlora or another adapter")
    source = find_source(row)
    if source.refused or source.refuses(row):
        raise NotExpressible(source.refused or source.refuses(row))
    # columns first, what the script fixes over them, then what only this source's rows say, and the lengths last
    settings = {**columns_settings(row, config_of, run_info), **source.fixed}
    if source.also is not None:
        settings |= source.also(row, settings, run_info)
    return ScriptSettings(**{**settings, **source.lengths(row)})
