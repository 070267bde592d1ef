"""The scripts behind published runs, each described once: what goes over what a row's columns say.

The casts, the mask, the loss, the optimizer and the counters of a source were read in its script, which
`published_sources.json` names. No figure is fitted to a row.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
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

SOURCES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By repository: `fixed` goes over what the columns say; `refused` says why no row of it can be traced."""

PEFT_LONGEST_ROW = 680
"""Tokens of the longest padded batch of the 5,000 in huggingface/peft method_comparison/MetaMathQA.

The cap is 768 and texts end at 1,300 characters, so the batch is a fact of the data (MetaMathQA, seed and order the
same in every row), which is not here. One figure for the whole source, from a study of its LoRA r=32 row; a run with
a smaller cap is bounded by it.
"""
ORCA_MEAN_ROW = 289
ORCA_LONGEST_ROW = 2450
"""Tokens of a row of microsoft/orca-math-word-problems-200k, train[:8000], with Mistral's tokenizer.

The mean is the source's own: refs_orca/a100_80gb_pf.csv, train_tokens_per_second x train_runtime / 8000 rows, one GPU
without padding. The longest row is not published; one figure for all rows of the source.
"""
_OWN_CLASSES = {"afmoe", "glm4_moe", "llama", "qwen3_moe"}
"""Model types that prime-rl replaces by classes of its own (prime_rl/trainer/models/__init__.py)."""


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


RowSettings = Callable[[CsvRow, dict[str, Any], Config | None], dict[str, Any]]
OWN_SETTINGS: Mapping[str, RowSettings] = {
    "Anassbzdd/fitcheck": lambda row, settings, _: {"expand_kv": settings["attention"] == "sdpa"},
    "huggingface/peft": _peft_metamath,
    "foundation-model-stack/fms-acceleration": _fms,
}
"""What only this source's rows carry; raises NotExpressible for a row that cannot be traced."""
OWN_LENGTHS: Mapping[str, Callable[[CsvRow], dict[str, Any]]] = {
    "huggingface/peft": _peft_lengths,
    "foundation-model-stack/fms-acceleration": _fms_lengths,
}


def step_settings(row: CsvRow, *, config_of: ConfigOf = known_config, run_info: Config | None = None) -> ScriptSettings:
    """The settings of the step that a row measured; raises NotExpressible with the reason where there are none."""
    if row["class"].upper() == "D":
        raise NotExpressible("class D: an estimate of the source, nothing was measured")
    if row["mode"] not in {"full", "lora", "qlora", "dora", "other-peft"}:
        raise NotExpressible("the mode is not full, lora, dora, qlora or another adapter")
    repository = row["source"].split(" ")[0].split("@")[0]
    source = SOURCES.get(repository, {})
    if "refused" in source:
        raise NotExpressible(source["refused"])
    if repository == "PrimeIntellect-ai/prime-rl" and "type=sft" not in row.get("notes", ""):
        raise NotExpressible("a step of reinforcement learning (prime-rl)")
    if repository == "deepspeedai/DeepSpeedExamples" and "bf16 master" in row.get("optimizer", ""):
        raise NotExpressible("ZeRO with master weights and states in half precision")
    # columns first, what the script fixes over them, then what only this source's rows say, and the lengths last
    settings = {**columns_settings(row, config_of, run_info), **source.get("fixed", {})}
    if repository == "PrimeIntellect-ai/prime-rl" and settings["model"].get("model_type") in _OWN_CLASSES:
        raise NotExpressible("a model class of its own (prime-rl)")
    if repository in OWN_SETTINGS:
        settings |= OWN_SETTINGS[repository](row, settings, run_info)
    lengths = OWN_LENGTHS.get(repository, row_lengths)
    return ScriptSettings(**{**settings, **lengths(row)})
