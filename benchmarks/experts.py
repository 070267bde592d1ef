"""Mixtures of experts on a GPU: predicted and measured peaks of real runs, at published widths, with random weights.

    python -m benchmarks.experts --folder /dev/shm/experts --out experts.json    # ten minutes; 70 GiB in FOLDER

All 48 layers of Qwen3-30B-A3B in QLoRA, with checkpointing and without, and three layers of it and of gpt-oss-20b in
every mode. Nothing is downloaded; layers of one model share their numbers, which memory does not depend on.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.starter_corpus import corpus_documents
from benchmarks.steps import material
from sft_play.machine.hardware import detect_hardware
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions

QWEN, OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"
SHORT = 3
"""Layers of the models that every mode trains."""
CKPT = {"gradient_checkpointing": True}
RUNS: dict[str, tuple[str, int, str, int, int, dict[str, Any], dict[str, Any]]] = {
    "qwen-48-qlora-checkpointed": (QWEN, 48, "qlora", 1024, 1, CKPT, {}),
    "qwen-48-qlora": (QWEN, 48, "qlora", 1024, 1, {"gradient_checkpointing": False}, {}),
    "qwen-3-lora": (QWEN, SHORT, "lora", 2048, 4, {}, {}),
    "qwen-3-qlora-experts": (QWEN, SHORT, "qlora", 2048, 2, {}, {"target_parameters": "auto"}),
    "qwen-3-full": (QWEN, SHORT, "full", 2048, 2, {}, {}),
    "oss-3-lora": (OSS, SHORT, "lora", 2048, 2, {}, {}),
    "oss-3-qlora": (OSS, SHORT, "qlora", 2048, 2, {}, {}),
    "oss-3-full": (OSS, SHORT, "full", 2048, 2, CKPT, {}),
}
"""Name of a run: model, layers, mode, tokens of a row, rows of a pass, settings of `train` and of `tuning.lora`."""


def write_model(folder: Path, name: str, layers: int) -> Path:
    """A folder with so many layers of a model; its files are linked where another folder has them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.starter_base import make_tokenizer

    model_folder, block_folder = (
        folder / f"{name.rpartition('/')[2]}-{layers}",
        folder / f"{name.rpartition('/')[2]}-one",
    )
    tokenizer = make_tokenizer(corpus_documents(400))
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    fields = {key: value for key, value in KNOWN_MODELS[name].config.items() if key != "quantization_config"} | ends
    kinds = fields.get("layer_types")
    for target, number in ((block_folder, 1), (model_folder, layers)):
        cut = {**fields, "num_hidden_layers": number, **({"layer_types": kinds[:number]} if kinds else {})}
        target.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(target)
        (target / "config.json").write_text(json.dumps(cut), encoding="utf-8")
    if not (block_folder / "model.safetensors").is_file():
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(block_folder), dtype=torch.bfloat16)
        model.save_pretrained(block_folder, max_shard_size="99GB")
        (block_folder / "config.json").unlink()
        del model
        torch.cuda.empty_cache()
    _write_layers(block_folder / "model.safetensors", model_folder, layers)
    return model_folder


def _write_layers(file: Path, model_folder: Path, layers: int) -> None:
    """The one layer of a file once for each layer, in files of their own, and what is outside of layers."""
    with file.open("rb") as source:
        head = json.loads(source.read(struct.unpack("<Q", source.read(8))[0]))
        start = source.tell()
        head.pop("__metadata__", None)
        index: dict[str, str] = {}

        def write(name: str, keys: Mapping[str, str]) -> None:
            index.update(dict.fromkeys(keys.values(), name))
            new, at, parts = {}, 0, []
            for old, key in keys.items():
                begin, end = head[old]["data_offsets"]
                new[key] = {**head[old], "data_offsets": [at, at + end - begin]}
                at += end - begin
                source.seek(start + begin)
                parts.append(source.read(end - begin))
            text = json.dumps(new).encode()
            text += b" " * (-len(text) % 8)
            (model_folder / name).write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))

        inner = [key for key in head if ".layers.0." in key]
        for layer in range(layers):
            write(
                f"layer-{layer:02}.safetensors", {key: key.replace(".layers.0.", f".layers.{layer}.") for key in inner}
            )
        write("outer.safetensors", {key: key for key in head if key not in inner})
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (model_folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def measured(name: str, folder: Path, rows: Path) -> dict[str, Any]:
    """A run's predicted and measured bytes; what it printed last where it failed."""
    model, layers, mode, length, micro, train, lora = RUNS[name]
    model_folder = folder / f"{model.rpartition('/')[2]}-{layers}"
    config = material.write_config(
        folder / f"{name}.yaml", model=model_folder if model_folder.is_dir() else write_model(folder, model, layers),
        rows=rows,
        seq_len=length, tuning={"mode": mode, "lora": lora}, plan={"trace": False},
        train={"batch_size": micro, "grad_accum": 2, "max_steps": 6, "kernels": "none", **train},
    )  # fmt: skip
    arguments = [
        "data.max_lost_fraction=1.0",
        f"output.dir={folder}/runs",
        f"output.name={name}",
        "output.if_exists=replace",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "OUT"} | {"WHY": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "sft_play", "train", "--config", str(config), *arguments], capture_output=True,
        text=True,
        env=environment, check=False,
    )  # fmt: skip
    if ended.returncode:
        return {"status": "failed", "reason": (ended.stdout + ended.stderr)[-600:]}
    run = folder / "runs" / name
    plan, summary = (json.loads((run / f"{file}.json").read_text("utf-8")) for file in ("plan", "summary"))
    return {
        "status": "measured",
        "said": [line for line in ended.stdout.splitlines() if "Peak memory" in line],
        "measured": {key: summary[key] for key in ("peak_bytes_by_moment", "tokens_per_s")},
        "predicted": plan["peak_bytes"],
        "tokens_per_s": plan["tokens_per_s"],
    }


def main() -> int:
    """Every run in turn; the file is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("experts.json"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = options.folder / "rows.jsonl"
    material.write_chats(rows, 96, words_of_answer=(3000.0, 0.0))
    book: dict[str, Any] = {"machine": detect_hardware().as_json(), "versions": installed_versions(), "runs": {}}
    for name in RUNS:
        book["runs"][name] = measured(name, options.folder, rows)
        sys.stdout.write(
            "\n".join([f"{name}: {book['runs'][name]['status']}", *book["runs"][name].get("said", [])]) + "\n"
        )
        sys.stdout.flush()
        write_json(options.out, book)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
