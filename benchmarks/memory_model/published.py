"""Published training runs, rows of a CSV file, as settings of the tracer.

A source is described once: the casts, the mask, the loss, the optimizer and the counters of the script that ran, read
in that script. What differs between its rows is read from the row's columns. No figure is fitted to a row.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError, ModelError
from sft_play.facts.architecture import config_json, hub_answers
from sft_play.facts.known_models import KNOWN_MODELS
from sft_play.planner.precision import DtypeName
from sft_play.trace.settings import Device, StepSettings
from sft_play.units import GIB, MIB

Row = Mapping[str, str]
Config = Mapping[str, Any]
ConfigOf = Callable[[str], Config]

COLUMNS = (
    "id",
    "class",
    "source",
    "model",
    "mode",
    "strategy",
    "micro_batch",
    "seq_len",
    "peak_allocated_gib",
    "peak_reserved_gib",
)
"""Columns that a table of peaks must have; the other columns may be missing or empty."""

CLASSES = ("A", "B", "C", "D")


class NotExpressible(Exception):
    """A row that the tracer cannot stand for; the text is the reason, the same for rows of the same kind."""


@dataclass(frozen=True)
class PublishedRun:
    """One row. Measured peaks in bytes, None where the source gives none of that kind."""

    id: str
    grade: str
    """The CSV's class: A scored, B and C settings partly known, D an estimate of the source."""
    source: str
    """Repository of the source, owner/name."""
    mode: str
    strategy: str
    measured_allocated: int | None
    measured_reserved: int | None
    settings: StepSettings | None
    reason: str | None = None
    """Why there are no settings; None where there are."""
    attention: str = ""


# --- the file -------------------------------------------------------------------------------------------------------


def read_runs(path: Path, *, config_of: ConfigOf | None = None) -> list[PublishedRun]:
    """The rows of a CSV file as runs, in its order; whole adapter configs are taken from a JSONL beside it.

    `config_of` answers a model's config.json by its name, or raises ModelError. Raises ConfigError where the file
    cannot be read, is no CSV, or lacks one of COLUMNS.
    """
    rows = read_rows(path)
    configs = _cached(config_of or known_config)
    adapters = read_adapter_configs(path)
    return [_run(row, configs, adapters.get(row.get("id", ""))) for row in rows]


def read_rows(path: Path) -> list[Row]:
    """The CSV's rows by column, texts stripped (a byte-order mark and any line ends are fine); errors as read_runs."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"PEAKS={path} does not exist; name a CSV file of measured peaks") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"PEAKS={path}: cannot be read as UTF-8 text ({error}); name a CSV file of peaks") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="")
    try:
        names = [str(name).strip() for name in reader.fieldnames or ()]
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            found = ", ".join(names[:8]) or "none"
            raise ConfigError(
                f"PEAKS={path}: no column {', '.join(missing)} (found: {found}); see docs/memory-model.md"
            )
        reader.fieldnames = names
        return [_stripped(row) for row in reader if any(_text(value) for value in row.values())]
    except csv.Error as error:
        raise ConfigError(f"PEAKS={path}, line {reader.line_num}: not a CSV row ({error})") from None


def _stripped(row: Mapping[str, Any]) -> Row:
    return {name: _text(value) for name, value in row.items() if name}


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def read_adapter_configs(path: Path) -> dict[str, Config]:
    """`*peft_configs.jsonl` beside the CSV: the run's training and adapter configs by row id; none: an empty table."""
    found: dict[str, Config] = {}
    for beside in sorted(path.parent.glob("*peft_configs.jsonl")):
        for number, line in enumerate(beside.read_text(encoding="utf-8-sig").splitlines(), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                found[str(entry["id"])] = entry["run_info"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{beside}, line {number}: not a run's config ({error!r})") from None
    return found


def _run(row: Row, config_of: ConfigOf, run_info: Config | None) -> PublishedRun:
    base = PublishedRun(
        id=row["id"],
        grade=row["class"].upper(),
        source=row["source"].split(" ")[0],
        mode=row["mode"],
        strategy=row["strategy"],
        measured_allocated=None,
        measured_reserved=None,
        settings=None,
        attention=row.get("attention", ""),
    )
    try:
        base = replace(
            base,
            measured_allocated=_gib(row, "peak_allocated_gib"),
            measured_reserved=_gib(row, "peak_reserved_gib"),
        )
        settings = step_settings(row, config_of=config_of, run_info=run_info)
        if base.measured_allocated is None and base.measured_reserved is None:
            raise NotExpressible("no peak of PyTorch's allocator was measured")
        return replace(base, settings=settings)
    except NotExpressible as why:
        return replace(base, reason=str(why))


# --- models ---------------------------------------------------------------------------------------------------------

_LLAMA_2_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

MORE_MODELS: dict[str, dict[str, Any]] = {
    # The Power Scheduler paper (arXiv 2408.13359), table 4; vocabulary of the Granite code tokenizer, tied.
    "ibm/PowerLM-3b": {
        "model_type": "granite",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "vocab_size": 49_152,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # Same paper, PowerMoE-3B, whose shape granite-3.0-3b-a800m has.
    "ibm-granite/granite-3.0-3b-a800m-instruct": {
        "model_type": "granitemoe",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
        "vocab_size": 49_155,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # foundation-model-stack/fms-extras, models/paged_gpt_bigcode.py names the same published config; SantaCoder paper
    # (arXiv 2301.03988), section 5: 24 layers, 16 heads, hidden 2048, multi-query attention.
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode",
        "n_embd": 2048,
        "n_inner": 8192,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 2048,
        "vocab_size": 49_280,
        "multi_query": True,
        "activation_function": "gelu_pytorch_tanh",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    # Printed modules of LlamaForCausalLM: 32256 x 2048, 24 layers, 5504 wide; 1,346,471,936 parameters
    # (Xpehutta/llm4sql data-model-generator/lora_sql_model/README.md, less its adapter).
    "deepseek-ai/deepseek-coder-1.3b-instruct": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32_256,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    },
    # deepspeedai/DeepSpeedExamples training/bf16_master_weight/train.py with its README's sizes: GPT-2's blocks with
    # norms after them, learned positions, an untied head; 6.86 billion parameters.
    "deepspeedai/bf16_master_weight-6.9b": {
        "model_type": "gpt2",
        "n_embd": 4096,
        "n_inner": 16_384,
        "n_layer": 32,
        "n_head": 32,
        "n_positions": 512,
        "vocab_size": 50_257,
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
    # Llama 2 paper (arXiv 2307.09288), appendix; meta-llama/Llama-2-70b-hf config.json.
    "NousResearch/Llama-2-70b-hf": _LLAMA_2_70B,
    "meta-llama/Llama-2-70b-hf": _LLAMA_2_70B,
}
"""Shapes that only published runs need; the table of known models comes first."""


def known_config(name: str) -> Config:
    """A model's config.json: the tables first, then a mirror's original, then the hub and its cache; or ModelError."""
    if name in MORE_MODELS:
        return MORE_MODELS[name]
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name].config
    original = _originals().get(_last_part(name))
    if original is not None:
        return original
    if not _hub_once():
        raise ModelError(f"model {name} is in no table, and the hub cannot be reached")
    return config_json(name)


@cache
def _hub_once() -> bool:
    return hub_answers()


@cache
def _originals() -> dict[str, Config]:
    """Configs by a repository's name without its owner, where all owners that the table has agree."""
    found: dict[str, Config] = {}
    differing = set()
    for name, known in KNOWN_MODELS.items():
        part = _last_part(name)
        if found.setdefault(part, known.config) != known.config:
            differing.add(part)
    return {part: config for part, config in found.items() if part not in differing}


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _cached(config_of: ConfigOf) -> ConfigOf:
    @cache
    def ask(name: str) -> Config | str:
        try:
            return config_of(name)
        except ModelError as error:
            return str(error)

    def answer(name: str) -> Config:
        found = ask(name)
        if isinstance(found, str):
            raise ModelError(found)
        return found

    return answer


def _model(row: Row, config_of: ConfigOf) -> Config:
    name = row["model"]
    if not name:
        raise NotExpressible("no model is named")
    try:
        config = config_of(_unquantised(name))
    except ModelError:
        raise NotExpressible("no config.json of its model is known") from None
    if "auto_map" in config:
        raise NotExpressible("the model needs code of its own")
    return config


def _unquantised(name: str) -> str:
    """The base whose shape a ready-quantised bitsandbytes repository has."""
    return re.sub(r"(-unsloth)?-bnb-4bit$", "", name)


# --- columns --------------------------------------------------------------------------------------------------------


def _number(row: Row, column: str) -> float | None:
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise NotExpressible(f"{column} is not a positive number")
    return value


def _count(row: Row, column: str, *, most: int = 2**24) -> int | None:
    value = _number(row, column)
    if value is None:
        return None
    if value != int(value) or value > most:
        raise NotExpressible(f"{column} is not a count that a run can have")
    return int(value)


def _gib(row: Row, column: str) -> int | None:
    value = _number(row, column)
    return None if value is None else round(value * GIB)


def _needed(value: int | None, what: str) -> int:
    if value is None:
        raise NotExpressible(f"{what} is not known")
    return value


_DTYPES: Mapping[str, DtypeName] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _dtype(text: str) -> DtypeName | None:
    """The first of torch's names in `nf4 (rest fp32)`, `4bit (+bf16)`, `bf16 (autocast)`, ...; None: none of them."""
    found = re.search(r"bf16|fp16|fp32", text)
    return _DTYPES[found[0]] if found else None


def _version(row: Row, column: str) -> tuple[int, ...]:
    """`2.10.0+cu128` as (2, 10, 0); an unknown or nightly version is newer than any."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", row.get(column, ""))
    return tuple(int(part or 0) for part in found.groups()) if found else (999,)


_CAPABILITIES: tuple[tuple[str, tuple[int, int]], ...] = (
    ("B200", (10, 0)),
    ("B300", (10, 3)),
    ("RTX PRO", (12, 0)),
    ("RTX 50", (12, 0)),
    ("H100", (9, 0)),
    ("H200", (9, 0)),
    ("H800", (9, 0)),
    ("GH200", (9, 0)),
    ("L40", (8, 9)),
    ("L4", (8, 9)),
    ("ADA", (8, 9)),
    ("RTX 40", (8, 9)),
    ("A100", (8, 0)),
    ("A800", (8, 0)),
    ("A30", (8, 0)),
    ("A10", (8, 6)),
    ("A40", (8, 6)),
    ("A6000", (8, 6)),
    ("RTX 30", (8, 6)),
    ("T4", (7, 5)),
    ("RTX 20", (7, 5)),
    ("V100", (7, 0)),
    ("P100", (6, 0)),
)
"""Compute capability by a part of the card's name (developer.nvidia.com/cuda-gpus); the first that fits counts."""

_CAPABILITY_UNKNOWN = (8, 0)
"""A card that the row does not name: one with flash attention and the small cuBLAS workspace."""


def _device(row: Row) -> Device:
    name = row.get("gpu", "").upper().replace("-", " ")
    known = (capability for part, capability in _CAPABILITIES if re.search(rf"(?<![A-Z0-9]){part}", name))
    context = re.search(r"cuda_context_mib=(\d+(?:\.\d+)?)", row.get("notes", ""))
    total = _number(row, "gpu_total_gib")
    capacity = int(total * GIB - float(context[1]) * MIB) if total and context else None
    return Device(capability=next(known, _CAPABILITY_UNKNOWN), capacity=capacity)


def _targets(row: Row) -> str | list[str]:
    """The adapter's target modules as PEFT takes them; raises NotExpressible where the column does not name them."""
    text = row.get("lora_targets", "")
    if text in {"all-linear", "all linear"}:
        return "all-linear"
    short = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    short |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    inner = re.fullmatch(r"attention \(([qkvo ]+)\)", text)
    words = (inner[1] if inner else text).split()
    if words and all(word in short for word in words):
        return [short[word] for word in words]
    if not words or any(re.search(r"[^\w.]", word) for word in words):
        raise NotExpressible("the adapter's target modules are not named")
    return words


_NOT_NF4 = re.compile(r"gptq|awq|aqlm|int8|fp8|^nf4$")
_PEFT_TYPE = re.compile(r"peft_type=(\w+)")


def _adapter(row: Row, run_info: Config | None) -> dict[str, Any] | None:
    """PEFT's config as plain data, from the whole config where there is one, else from the columns."""
    if row["mode"] == "full":
        return None
    if run_info is not None and run_info.get("peft_config"):
        return _plain_adapter(run_info["peft_config"])
    kind = _PEFT_TYPE.search(row.get("notes", ""))
    peft_type = kind[1] if kind and kind[1] != "none" else "LORA"
    adapter: dict[str, Any] = {"peft_type": peft_type, "task_type": "CAUSAL_LM"}
    if peft_type not in _WITHOUT_TARGETS:
        adapter["target_modules"] = _targets(row)
    rank = _count(row, "lora_r")
    if peft_type == "LORA":
        variants = re.search(r"lora variants: ([^;]*)", row.get("notes", ""))
        used = variants[1].replace(",", " ").split() if variants else []
        adapter |= {"r": _needed(rank, "the adapter's rank"), "lora_alpha": 2 * (rank or 1), "lora_dropout": 0.0}
        adapter |= dict.fromkeys(used, True)
        adapter["use_dora"] = row["mode"] == "dora" or "use_dora" in used
    elif rank is not None:
        adapter["r"] = rank
    return adapter


_WITHOUT_TARGETS = {"PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "ADAPTION_PROMPT", "TRAINABLE_TOKENS"}

_RUN_STATE = {"auto_mapping", "revision", "base_model_name_or_path", "inference_mode", "peft_version"}
"""Fields of a saved adapter_config.json that say where it came from, not what it is."""


def _plain_adapter(saved: Config) -> dict[str, Any]:
    adapter = {name: value for name, value in saved.items() if name not in _RUN_STATE and value is not None}
    adapter["task_type"] = "CAUSAL_LM"
    if adapter.get("layers_to_transform") == []:
        del adapter["layers_to_transform"]
    if adapter.get("peft_type") == "ADALORA":
        adapter.pop("rank_pattern", None)  # what training left: the ranks that survived
        adapter.setdefault("total_step", 5000)
    return adapter


_OPTIMIZERS: tuple[tuple[str, str], ...] = (
    (r"galore|muon|in backward|4bit|torch_8bit|bf16 master", ""),
    (r"fusedadam", "adamw_fused"),
    (r"lora-fa", "lora_fa"),
    (r"paged_adamw_8bit|paged.*8bit", "paged_adamw_8bit"),
    (r"paged", ""),
    (r"(adamw|bnb).*8bit", "adamw_8bit"),
    (r"adamw_torch_fused|fused", "adamw_fused"),
    (r"adafactor", "adafactor"),
    (r"adamw", "adamw_foreach"),
    (r"sgd", "sgd"),
)
"""Part of the column's text: the tracer's optimizer; an empty one is not traced. torch.optim.AdamW is foreach."""


def _optimizer(row: Row) -> str:
    text = row.get("optimizer", "").lower()
    if not text:
        raise NotExpressible("the optimizer is not known")
    if "trainer default" in text and _version(row, "transformers") >= (5,):
        return "adamw_fused"
    found = next((name for part, name in _OPTIMIZERS if re.search(part, text)), "")
    if not found:
        raise NotExpressible(f"the optimizer {row['optimizer'].split(' (')[0]} is not traced")
    return found


_ATTENTION = {"sdpa": "sdpa", "eager": "eager"} | dict.fromkeys(("flash2", "flash3", "flash4"), "flash_attention_2")
"""Flash attention's versions hold the same for backward."""


def _attention(row: Row) -> str:
    text = row.get("attention", "")
    if text and text != "unknown" and text not in _ATTENTION:
        raise NotExpressible(f"attention {text} is not traced")
    return _ATTENTION.get(text, "sdpa")  # transformers' own choice since 4.36


def _checkpointing(row: Row) -> dict[str, Any]:
    text = row.get("gradient_checkpointing", "")
    if text == "offload":
        raise NotExpressible("activations are offloaded to host memory")
    if text == "selective":
        raise NotExpressible("selective checkpointing: which operations keep their results is not said")
    if text not in {"full", "no"}:
        raise NotExpressible("whether activations are checkpointed is not known")
    return {"checkpointing": text != "no", "reentrant": _version(row, "transformers") < (5,)}


def _loss(row: Row, model: Config) -> str:
    """How the loss of the row's transformers version treats the logits (models/*/modeling_*.py, loss/loss_utils.py)."""
    head = row.get("loss_head", "")
    if head == "liger":
        raise NotExpressible("kernels of its own (Liger)")
    if head == "chunked":
        return "chunked"
    version = _version(row, "transformers")
    if version >= (4, 50):
        return "logits"
    if model.get("model_type") in _NEVER_UPCAST:
        return "logits_shifted_half"
    return "logits_shifted" if version >= (4, 46) else "logits_shifted_float"


_NEVER_UPCAST = {"gpt_bigcode", "gpt2", "gpt_neox", "opt", "bloom"}
"""Classes whose loss, before they took the common loss function, ran in the logits' own dtype."""


_LOOPED_EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe"}


def _experts(row: Row, model: Config) -> str:
    is_older = _version(row, "transformers") < (5,)
    return "loop" if is_older and model.get("model_type") in _LOOPED_EXPERTS else "stacked"


def _ranks(row: Row) -> dict[str, Any]:
    """Strategy and number of ranks; several words for the same thing are one, what is not traced is refused."""
    text = row["strategy"].lower()
    count = _count(row, "n_gpus", most=2**16)
    if text == "single":
        return {"strategy": "single", "world": 1}
    refused = {
        "offload": "parameters or states are offloaded to host memory",
        "device_map": "layers spread over the cards (device_map)",
        "tp": "tensor or pipeline parallel",
        "pp": "tensor or pipeline parallel",
        "ep": "expert parallel",
        "megatron": "Megatron",
        "no_shard": "FSDP without sharding",
        "shard_grad_op": "FSDP that keeps weights gathered (SHARD_GRAD_OP)",
    }
    for word, reason in refused.items():
        if re.search(rf"(?<![a-z]){word}", text):
            raise NotExpressible(reason)
    zero = re.fullmatch(r"zero([123])", text)
    if zero:
        return {"strategy": f"zero{zero[1]}", "world": _needed(count, "the number of GPUs")}
    if text == "ddp":
        return {"strategy": "ddp", "world": _needed(count, "the number of GPUs")}
    if re.match(r"fsdp\b", text):
        # Layers checkpoint themselves, inside the wrapper, since transformers 4.52 (GradientCheckpointingLayer).
        outside = _version(row, "transformers") < (4, 52)
        ranks = _needed(count, "the number of GPUs")
        return {"strategy": "fsdp1", "world": ranks, "checkpoints_wrappers": outside}
    if re.match(r"fsdp2\b", text) or re.fullmatch(r"cp \d+", text):
        return {"strategy": "fsdp2", "world": _needed(count, "the number of GPUs")}
    raise NotExpressible("how the ranks share the work is not known")


def _lengths(row: Row) -> dict[str, Any]:
    """Rows and tokens of a micro-batch as it runs: packed and padding-free rows are one row of all tokens."""
    batch = _needed(_count(row, "micro_batch"), "the micro-batch")
    length = _count(row, "seq_len")
    if length is None:
        tokens = _number(row, "tokens_per_microbatch")
        if tokens is None:
            raise NotExpressible("the length of a row is not known")
        length = max(1, round(tokens / batch))
    context = re.search(r"cp (\d+)", row["strategy"])
    if context:  # context parallel: each rank holds its part of every sequence
        length = math.ceil(length / int(context[1]))
    return {"micro_batch": batch, "seq_len": length}


def _from_columns(row: Row, config_of: ConfigOf, run_info: Config | None) -> dict[str, Any]:
    """What the columns say of any run; a source's description goes over it."""
    quantised = row["mode"] == "qlora"
    if quantised and _NOT_NF4.search(row.get("quant", "")):
        raise NotExpressible(f"weights quantised as {row['quant']}")
    model = _model(row, config_of)
    compute = _dtype(row.get("compute_dtype", "")) or "bfloat16"
    loaded = _dtype(row.get("weights_dtype", "")) or compute
    return {
        "model": model,
        "mode": "qlora" if quantised else "full" if row["mode"] == "full" else "lora",
        "peft": _adapter(row, run_info),
        "weights": compute if quantised else loaded,
        "autocast": compute if "autocast" in row.get("compute_dtype", "") else None,
        "adapters": _dtype(row.get("lora_dtype", "")) or "float32",
        "casts_inputs": True,
        "fp32_rest": quantised and "rest fp32" in row.get("weights_dtype", ""),
        "double_quant": not quantised or row.get("quant", "") != "bnb-nf4",
        "quant_compute": compute,
        "grad_accum": _count(row, "grad_accum") or 1,
        "loss": _loss(row, model),
        "attention": _attention(row),
        "mask": "padded" if row.get("padding", "") == "padded to longest" else "ones",
        "optimizer": _optimizer(row),
        "clip": True,
        "empty_cache_after_load": False,
        "peak_from": "start",
        "device": _device(row),
        "experts": _experts(row, model),
        **_checkpointing(row),
        **_ranks(row),
    }


# --- sources --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One source's script. `fixed` goes over what the columns say; `also` reads what only this source's rows carry."""

    repository: str
    why: str
    """What the script does that no column says, and where that was read."""
    fixed: Mapping[str, Any]
    also: Callable[[Row, dict[str, Any], Config | None], dict[str, Any]] | None = None
    lengths: Callable[[Row], dict[str, Any]] = _lengths
    refused: str = ""
    """Why no row of this source can be traced; empty where rows can."""
    refuses: Callable[[Row], str] = lambda row: ""
    """The same of one row, by what only this source's rows say."""


def _fitcheck(row: Row, said: dict[str, Any], _: Config | None) -> dict[str, Any]:
    return {"expand_kv": said["attention"] == "sdpa"}


PEFT_LONGEST_ROW = 680
"""Tokens of the longest padded batch of the 5,000 in huggingface/peft method_comparison/MetaMathQA.

The cap is 768 and texts end at 1,300 characters, so the batch is a fact of the data (MetaMathQA, seed and order the
same in every row), which is not here. One figure for the whole source, from a study of its LoRA r=32 row; a run with
a smaller cap is bounded by it.
"""


def _peft_lengths(row: Row) -> dict[str, Any]:
    cap = _needed(_count(row, "seq_len"), "the length of a row")
    return {**_lengths(row), "seq_len": min(cap, PEFT_LONGEST_ROW)}


def _peft_metamath(row: Row, said: dict[str, Any], run_info: Config | None) -> dict[str, Any]:
    train = (run_info or {}).get("train_config", {})
    changed: dict[str, Any] = {"clip": train.get("grad_norm_clip", 1.0) > 0}
    if said["optimizer"] == "lora_fa" and _version(row, "peft") >= (0, 19, 2):
        # disable_adapter() around the loss on Wikipedia, new in that run, switches every adapter's gradients on again.
        changed["optimizer"] = "adamw_foreach"
    return changed


ORCA_MEAN_ROW = 289
ORCA_LONGEST_ROW = 2450
"""Tokens of a row of microsoft/orca-math-word-problems-200k, train[:8000], with Mistral's tokenizer.

The mean is the source's own: refs_orca/a100_80gb_pf.csv, train_tokens_per_second x train_runtime / 8000 rows, one GPU
without padding. The longest row is not published; one figure for all rows of the source.
"""


def _fms_lengths(row: Row) -> dict[str, Any]:
    if row.get("seq_len") or row.get("tokens_per_microbatch"):
        return _lengths(row)
    if "orca-math" not in row.get("notes", ""):
        raise NotExpressible("the length of a row is not known")
    batch = _needed(_count(row, "micro_batch"), "the micro-batch")
    if row.get("padding", "") == "padded to longest":
        return {"micro_batch": batch, "seq_len": ORCA_LONGEST_ROW}
    return {"micro_batch": 1, "seq_len": ORCA_LONGEST_ROW + (batch - 1) * ORCA_MEAN_ROW}


def _fms(row: Row, said: dict[str, Any], _: Config | None) -> dict[str, Any]:
    framework = re.search(r"framework_config=([\w-]*)", row.get("notes", ""))
    name = framework[1] if framework else "none"
    if "foak" in name or "liger" in name:
        raise NotExpressible("kernels of its own (fms-acceleration foak)")
    if "scattermoe" in name or "moe" in name:
        raise NotExpressible("kernels of its own (fms-acceleration MoE)")
    changed: dict[str, Any] = {}
    if said["peft"]:
        changed["peft"] = {**said["peft"], "lora_alpha": 16, "lora_dropout": 0.1}
    if said["mode"] == "qlora":
        # scenarios*.yaml give these runs bf16 (orca: fp16); accelerate then wraps the forward in autocast.
        changed |= {"autocast": said["weights"], "double_quant": True}
        changed["fp32_norms"] = "baseline" in name and said["strategy"] == "single"
        if said["strategy"] != "single":
            changed["quant_storage"] = said["weights"]
    return changed


def _canifinetune(row: Row, said: dict[str, Any], _: Config | None) -> dict[str, Any]:
    return {"holds_outputs": True, "holds_until_next": True, "reentrant": False}


def _torchtitan(row: Row, said: dict[str, Any], _: Config | None) -> dict[str, Any]:
    return {"mixed_precision": "bfloat16", "reentrant": False, "device": _growing(said)}


def _growing(said: Mapping[str, Any]) -> Device:
    """The row's card, whose run was started with expandable segments."""
    device: Device = said["device"]
    return replace(device, expandable_segments=True)


_OWN_CLASSES = {"afmoe", "glm4_moe", "llama", "qwen3_moe"}
"""Model types that prime-rl replaces by classes of its own (prime_rl/trainer/models/__init__.py)."""


def _is_prime_rl_sft(row: Row) -> str:
    return "" if "type=sft" in row.get("notes", "") else "a step of reinforcement learning (prime-rl)"


def _prime_rl(row: Row, said: dict[str, Any], _: Config | None) -> dict[str, Any]:
    if said["model"].get("model_type") in _OWN_CLASSES:
        raise NotExpressible("a model class of its own (prime-rl)")
    return {"device": _growing(said)}


def _has_wide_masters(row: Row) -> str:
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
            "loss": "logits",
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
        {"mask": "ones", "loss": "logits", "clip": False, "optimizer_steps": 3},
        _canifinetune,
    ),
    Source(
        "huggingface/peft",
        "method_comparison/MetaMathQA/run.py: bf16 weights, fp32 adapters, no autocast, outputs held until the next "
        "step's are there, real padding, clipping at 1; counters over the whole run.",
        {
            "autocast": None,
            "mask": "padded",
            "loss": "logits",
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
        {"mask": "none", "weights": "float32", "loss": "logits", "optimizer": "adamw_fused"},
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
        "Liger's fused cross-entropy is taken for TRL's chunked head, Liger's norms and activations for the plain "
        "ones.",
        {"mask": "ones", "autocast": "bfloat16", "reentrant": False, "peak_from": "second_step"},
    ),
    Source(
        "deepspeedai/DeepSpeedExamples",
        "training/bf16_master_weight/train.py: a plain transformer with nn.MultiheadAttention, which keeps its "
        "weights, and whole logits; DeepSpeed's bf16 with fp32 masters; counters over the whole run.",
        {"mask": "none", "autocast": None, "mixed_precision": "bfloat16", "loss": "logits", "optimizer": "adamw_fused"},
        refuses=_has_wide_masters,
    ),
    Source("MooreThreads/SimuMax", "Megatron", {}, refused="tensor, pipeline or expert parallel (Megatron)"),
    Source("Lightning-AI/litgpt", "litgpt/model.py", {}, refused="a model class of its own (litgpt)"),
    Source("pytorch/torchtune", "torchtune/modules", {}, refused="a model class of its own (torchtune)"),
    Source("pytorch/ao", "torchtune's and torchtitan's classes", {}, refused="a model class of its own (torchao)"),
)

_PLAIN = Source("", "any other source: what the columns say, as transformers' Trainer would run it", {})


def source_of(row: Row) -> Source:
    """The description of the row's source; the plain one where there is none."""
    repository = row["source"].split(" ")[0].split("@")[0]
    return next((source for source in SOURCES if source.repository == repository), _PLAIN)


def step_settings(row: Row, *, config_of: ConfigOf = known_config, run_info: Config | None = None) -> StepSettings:
    """The settings of the step that a row measured; raises NotExpressible with the reason where there are none."""
    if row["class"].upper() == "D":
        raise NotExpressible("class D: an estimate of the source, nothing was measured")
    if row["mode"] not in {"full", "lora", "qlora", "dora", "other-peft"}:
        raise NotExpressible("the mode is not full, lora, dora, qlora or another adapter")
    source = source_of(row)
    if source.refused or source.refuses(row):
        raise NotExpressible(source.refused or source.refuses(row))
    said = {**_from_columns(row, config_of, run_info), **source.fixed}
    if source.also is not None:
        said |= source.also(row, said, run_info)
    return StepSettings(**{**said, **source.lengths(row)})


def sources(runs: Iterable[PublishedRun]) -> list[str]:
    """Repositories of the runs, in order of appearance."""
    return list(dict.fromkeys(run.source for run in runs))
