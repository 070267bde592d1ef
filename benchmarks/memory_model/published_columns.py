"""What a row's columns say of any run, as settings of the tracer."""

import math
import re
from collections.abc import Mapping
from typing import Any

from benchmarks.memory_model.published_models import Config, ConfigOf
from sft_play.config.schema import DTYPE_ALIASES
from sft_play.errors import ModelError
from sft_play.machine.gpu_catalog import find_catalog_entries
from sft_play.text import GIB, MIB

CsvRow = Mapping[str, str]
"""A line of the CSV by column, texts stripped; an empty text: not known."""
RUN_STATE = {"auto_mapping", "revision", "base_model_name_or_path", "inference_mode", "peft_version"}
"""Fields of a saved adapter_config.json that say where it came from, not what it is."""
_WITHOUT_TARGETS = {"PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "ADAPTION_PROMPT", "TRAINABLE_TOKENS"}
_OPTIMIZERS: tuple[tuple[str, str], ...] = (
    (r"galore|muon|in backward|4bit|torch_8bit|bf16 master", ""), (r"fusedadam", "adamw_fused"),
    (r"lora-fa", "lora_fa"), (r"paged_adamw_8bit|paged.*8bit", "paged_adamw_8bit"), (r"paged", ""),
    (r"(adamw|bnb).*8bit", "adamw_8bit"), (r"adamw_torch_fused|fused", "adamw_fused"), (r"adafactor", "adafactor"),
    (r"adamw", "adamw_foreach"), (r"sgd", "sgd"),
)  # fmt: skip
"""Part of the column's text: the tracer's optimizer; an empty one is not traced. torch.optim.AdamW is foreach."""
_NEVER_UPCAST = {"gpt_bigcode", "gpt2", "gpt_neox", "opt", "bloom"}
"""Classes whose loss, before they took the common loss function, ran in the logits' own dtype."""
_LOOPED_EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe"}


class NotExpressible(Exception):
    """A row that the tracer cannot stand for; the text is the reason, the same for rows of the same kind."""


def _model(row: CsvRow, config_of: ConfigOf) -> Config:
    name = row["model"]
    if not name:
        raise NotExpressible("no model is named")
    try:
        # the base, whose shape a ready-quantised bitsandbytes repository has
        config = config_of(re.sub(r"(-unsloth)?-bnb-4bit$", "", name))
    except ModelError:
        raise NotExpressible("no config.json of its model is known") from None
    if "auto_map" in config:  # code of a repository's own is never run for a score
        raise NotExpressible("the model needs code of its own")
    return config


def _number(row: CsvRow, column: str) -> float | None:
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


def count_in(row: CsvRow, column: str, *, most: int = 2**24) -> int | None:
    """A whole number; None where the column is empty. Raises NotExpressible where it is something else."""
    value = _number(row, column)
    if value is None:
        return None
    if value != int(value) or value > most:
        raise NotExpressible(f"{column} is not a count that a run can have")
    return int(value)


def gib_in(row: CsvRow, column: str) -> int | None:
    value = _number(row, column)
    return None if value is None else round(value * GIB)


def require_value(value: int | None, what: str) -> int:
    """The value; raises NotExpressible, which names `what`, where it is not known."""
    if value is None:
        raise NotExpressible(f"{what} is not known")
    return value


def _dtype(text: str) -> str | None:
    """The first of torch's names in `nf4 (rest fp32)`, `4bit (+bf16)`, `bf16 (autocast)`, ...; None: none of them."""
    found = re.search(r"bf16|fp16|fp32", text)
    return DTYPE_ALIASES[found[0]] if found else None


def version_in(row: CsvRow, column: str) -> tuple[int, ...]:
    """`2.10.0+cu128` as (2, 10, 0); an unknown or nightly version is newer than any."""
    # newer than any: what a row does not say is taken as today's libraries do it
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", row.get(column, ""))
    return tuple(int(part or 0) for part in found.groups()) if found else (999,)


def _card(row: CsvRow) -> dict[str, Any]:
    context = re.search(r"cuda_context_mib=(\d+(?:\.\d+)?)", row.get("notes", ""))
    total = _number(row, "gpu_total_gib")
    # the context is outside of what the allocator can have
    capacity = int(total * GIB - float(context[1]) * MIB) if total and context else None
    return {"capability": _capability(row.get("gpu", "")), "capacity": capacity}


def _capability(name: str) -> tuple[int, int]:
    """The catalogue's compute capability of a card, by as many words of its name as the catalogue knows."""
    words = re.split(r"[\s-]+", name)
    for count in range(len(words), 0, -1):
        entries = find_catalog_entries(" ".join(words[:count]))
        if entries:
            return entries[0].capability
    return (8, 0)  # of an unknown card: flash attention and the small cuBLAS workspace


def _targets(row: CsvRow) -> str | list[str]:
    """The adapter's target modules as PEFT takes them; raises NotExpressible where the column does not name them."""
    text = row.get("lora_targets", "")
    if text in {"all-linear", "all linear"}:
        return "all-linear"
    inner = re.fullmatch(r"attention \(([qkvo ]+)\)", text)
    words = (inner[1] if inner else text).split()
    if words and all(word in ("q", "k", "v", "o", "gate", "up", "down") for word in words):
        return [f"{word}_proj" for word in words]
    if not words or any(re.search(r"[^\w.]", word) for word in words):
        raise NotExpressible("the adapter's target modules are not named")
    return words


def _adapter(row: CsvRow, run_info: Config | None) -> dict[str, Any] | None:
    """PEFT's config as plain data, from the whole config where there is one, else from the columns."""
    if row["mode"] == "full":
        return None
    if run_info is not None and run_info.get("peft_config"):
        saved = run_info["peft_config"].items()
        adapter = {name: value for name, value in saved if name not in RUN_STATE and value is not None}
        return adapter | {"task_type": "CAUSAL_LM"}
    kind = re.search(r"peft_type=(\w+)", row.get("notes", ""))
    peft_type = kind[1] if kind and kind[1] != "none" else "LORA"
    adapter = {"peft_type": peft_type, "task_type": "CAUSAL_LM"}
    if peft_type not in _WITHOUT_TARGETS:
        adapter["target_modules"] = _targets(row)
    rank = count_in(row, "lora_r")
    if peft_type == "LORA":
        variants = re.search(r"lora variants: ([^;]*)", row.get("notes", ""))
        used = variants[1].replace(",", " ").split() if variants else []
        # alpha changes no size; of dropout a source's description says where there was any
        adapter |= {"r": require_value(rank, "the adapter's rank"), "lora_alpha": 2 * (rank or 1), "lora_dropout": 0.0}
        adapter |= dict.fromkeys(used, True)
        adapter["use_dora"] = row["mode"] == "dora" or "use_dora" in used
    elif rank is not None:
        adapter["r"] = rank
    return adapter


def _optimizer(row: CsvRow) -> str:
    text = row.get("optimizer", "").lower()
    if not text:
        raise NotExpressible("the optimizer is not known")
    if "trainer default" in text and version_in(row, "transformers") >= (5,):  # adamw_torch before
        return "adamw_fused"
    found = next((name for part, name in _OPTIMIZERS if re.search(part, text)), "")
    if not found:
        raise NotExpressible(f"the optimizer {row['optimizer'].split(' (')[0]} is not traced")
    return found


def _attention(row: CsvRow) -> str:
    text = row.get("attention", "")
    if text in ("flash2", "flash3", "flash4"):  # all hold the same for backward
        return "flash_attention_2"
    if text not in ("sdpa", "eager", "unknown", ""):
        raise NotExpressible(f"attention {text} is not traced")
    return "eager" if text == "eager" else "sdpa"  # transformers' own choice since 4.36


def _checkpointing(row: CsvRow) -> dict[str, Any]:
    text = row.get("gradient_checkpointing", "")
    if text == "offload":
        raise NotExpressible("activations are offloaded to host memory")
    if text == "selective":
        raise NotExpressible("selective checkpointing: which operations keep their results is not said")
    if text not in {"full", "no"}:
        raise NotExpressible("whether activations are checkpointed is not known")
    return {"checkpointing": text != "no", "reentrant": version_in(row, "transformers") < (5,)}


def _loss(row: CsvRow, model: Config) -> str:
    """How the loss of the row's transformers version treats the logits (models/*/modeling_*.py, loss/loss_utils.py)."""
    head = row.get("loss_head", "")
    if head == "liger":
        raise NotExpressible("kernels of its own (Liger)")
    if head == "chunked":
        return "chunked"
    version = version_in(row, "transformers")
    if version >= (4, 50):
        return "model"
    if model.get("model_type") in _NEVER_UPCAST:
        return "logits_shifted_half"
    return "logits_shifted" if version >= (4, 46) else "logits_shifted_float"


def _ranks(row: CsvRow) -> dict[str, Any]:
    """Strategy and number of ranks; several words for the same thing are one, what is not traced is refused."""
    text = row["strategy"].lower()
    count = count_in(row, "n_gpus", most=2**16)
    if text == "single":
        return {"strategy": "single", "world": 1}
    refused = {
        "offload": "parameters or states are offloaded to host memory",
        "device_map": "layers spread over the cards (device_map)", "tp": "tensor or pipeline parallel",
        "pp": "tensor or pipeline parallel", "ep": "expert parallel", "megatron": "Megatron",
        "no_shard": "FSDP without sharding", "shard_grad_op": "FSDP that keeps weights gathered (SHARD_GRAD_OP)",
    }  # fmt: skip
    for word, reason in refused.items():
        if re.search(rf"(?<![a-z]){word}", text):
            raise NotExpressible(reason)
    settings: dict[str, Any] = {"strategy": text}
    if re.match(r"fsdp\b", text):
        # Layers checkpoint themselves, inside the wrapper, since transformers 4.52 (GradientCheckpointingLayer).
        settings = {"strategy": "fsdp1", "checkpoints_wrappers": version_in(row, "transformers") < (4, 52)}
    elif re.match(r"fsdp2\b", text) or re.fullmatch(r"cp \d+", text):
        settings = {"strategy": "fsdp2"}
    elif text not in ("ddp", "zero1", "zero2", "zero3"):
        raise NotExpressible("how the ranks share the work is not known")
    return {**settings, "world": require_value(count, "the number of GPUs")}


def row_lengths(row: CsvRow) -> dict[str, Any]:
    """Rows and tokens of a micro-batch as it runs: packed and padding-free rows are one row of all tokens."""
    batch = require_value(count_in(row, "micro_batch"), "the micro-batch")
    length = count_in(row, "seq_len")
    if length is None:
        tokens = _number(row, "tokens_per_microbatch")
        if tokens is None:
            raise NotExpressible("the length of a row is not known")
        length = max(1, round(tokens / batch))
    context = re.search(r"cp (\d+)", row["strategy"])
    if context:  # context parallel: each rank holds its part of every sequence
        length = math.ceil(length / int(context[1]))
    return {"micro_batch": batch, "seq_len": length}


def columns_settings(row: CsvRow, config_of: ConfigOf, run_info: Config | None) -> dict[str, Any]:
    """What the columns say of any run; a source's description goes over it."""
    quantised = row["mode"] == "qlora"
    if quantised and re.search(r"gptq|awq|aqlm|int8|fp8|^nf4$", row.get("quant", "")):
        raise NotExpressible(f"weights quantised as {row['quant']}")
    model = _model(row, config_of)
    compute = _dtype(row.get("compute_dtype", "")) or "bfloat16"
    loaded = _dtype(row.get("weights_dtype", "")) or compute
    loops = version_in(row, "transformers") < (5,) and model.get("model_type") in _LOOPED_EXPERTS
    return {
        "model": model, "mode": row["mode"] if row["mode"] in ("full", "qlora") else "lora",
        "peft": _adapter(row, run_info), "weights": compute if quantised else loaded,
        "autocast": compute if "autocast" in row.get("compute_dtype", "") else None,
        "adapters": _dtype(row.get("lora_dtype", "")) or "float32", "casts_inputs": True,
        "fp32_rest": quantised and "rest fp32" in row.get("weights_dtype", ""),
        "double_quant": not quantised or row.get("quant", "") != "bnb-nf4", "quant_compute": compute,
        "grad_accum": count_in(row, "grad_accum") or 1, "loss": _loss(row, model), "attention": _attention(row),
        "mask": "padded" if row.get("padding", "") == "padded to longest" else "ones", "optimizer": _optimizer(row),
        "clip": True, "empty_cache_after_load": False, "peak_from": "start", **_card(row),
        "experts": "loop" if loops else "stacked", **_checkpointing(row), **_ranks(row),
    }  # fmt: skip
