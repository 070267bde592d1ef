"""axolotl on the rows of our run (PEER=axolotl), by the run YAML of its documentation and `axolotl train`'s function.

    PEER_PYTHON=/path/to/axolotl/bin/python, which runs this file

Its docs call such rows a pre-tokenized dataset: the columns input_ids, attention_mask and labels, and no `type`. Not
measured by this project: it needs a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.steps.order import Order


def main(path: Path) -> None:
    """Train until the recorder has seen enough."""
    from datasets import load_from_disk

    from benchmarks.steps.recording import Measured, Recorder, record_next

    order = Order.read(path)
    facts = order.known()
    folder = Path(order.folder)
    rows = folder / "axolotl.jsonl"
    load_from_disk(str(Path(order.facts) / "rows")).to_json(str(rows))
    config = folder / "axolotl.yaml"
    config.write_text(json.dumps(settings(order, facts, rows)), encoding="utf-8")  # JSON is YAML
    used = {"micro_batch": facts["micro_batch"], "grad_accum": facts["grad_accum"], "packing": facts["packing"]}
    recorder = Recorder(
        Path(order.result), warmup=order.warmup, steps=order.steps, pad_id=facts["pad_id"],
        facts={"side": order.side, "settings": used},
    )  # fmt: skip
    record_next(recorder)
    with contextlib.suppress(Measured):
        importlib.import_module("axolotl.cli.train").do_cli(config=str(config))


def settings(order: Order, facts: dict[str, Any], rows: Path) -> dict[str, Any]:
    """axolotl's run YAML for the facts of our run."""
    lora = facts["lora"]
    made = {
        "base_model": facts["model"],
        "tokenizer_config": str(Path(order.facts) / "tokenizer"),
        "datasets": [{"path": str(rows), "ds_type": "json", "type": None}],
        "dataset_prepared_path": f"{order.folder}/axolotl-prepared",
        "output_dir": f"{order.folder}/axolotl",
        "sequence_len": facts["seq_len"],
        "sample_packing": facts["packing"],
        "micro_batch_size": facts["micro_batch"],
        "gradient_accumulation_steps": facts["grad_accum"],
        "max_steps": order.total,
        "num_epochs": 1,
        "optimizer": facts["optim"],
        "learning_rate": facts["learning_rate"],
        "lr_scheduler": facts["scheduler"],
        "warmup_steps": int(facts["warmup_steps"]),
        "weight_decay": facts["weight_decay"],
        "adam_beta2": facts["adam_beta2"],
        "max_grad_norm": facts["max_grad_norm"],
        "seed": facts["seed"],
        "bf16": facts["compute_dtype"] == "bfloat16",
        "fp16": facts["compute_dtype"] == "float16",
        "attn_implementation": facts["attention"],
        "gradient_checkpointing": facts["gradient_checkpointing"],
        "logging_steps": facts["logging_steps"],
        "save_strategy": "no",
        "val_set_size": 0,
    }
    if lora is not None:
        made |= {
            "adapter": facts["mode"], "load_in_4bit": facts["mode"] == "qlora", "lora_r": lora["r"],
            "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"], "lora_target_modules": lora["targets"],
            "peft_use_rslora": lora["rslora"], "peft_use_dora": lora["dora"],
        }  # fmt: skip
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
