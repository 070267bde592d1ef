"""axolotl on the rows of our run (PEER=axolotl), by the run YAML of its documentation and `axolotl train`'s function.

    PEER_PYTHON=/path/to/axolotl/bin/python, which runs this file

Its docs call such rows a pre-tokenized dataset: the columns input_ids, attention_mask and labels, and no `type`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.steps.order import ProcessOrder, trainer_arguments

UNKNOWN = ("per_device_train_batch_size", "lr_scheduler_type", "report_to", "disable_tqdm")
"""Arguments of transformers' Trainer that its run YAML names otherwise or does not have."""
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def main(path: Path) -> None:
    """Train until the recorder has seen enough."""
    from datasets import load_from_disk

    from benchmarks.steps.peer import make_recorder, record_next_in_context

    order = ProcessOrder.read(path)
    facts = order.known()
    folder = Path(order.folder)
    rows = folder / "axolotl.jsonl"
    load_from_disk(str(Path(order.facts) / "rows")).to_json(str(rows))
    config = folder / "axolotl.yaml"
    config.write_text(json.dumps(settings(order, facts, rows)), encoding="utf-8")  # JSON is YAML
    with record_next_in_context(make_recorder(order, facts)):
        importlib.import_module("axolotl.cli.train").do_cli(config=str(config))


def settings(order: ProcessOrder, facts: dict[str, Any], rows: Path) -> dict[str, Any]:
    """axolotl's run YAML for the facts of our run."""
    lora, warmup = facts["lora"], facts["trainer"]["warmup_steps"]
    of_trainer = trainer_arguments(facts, steps=order.total, micro=facts["micro_batch"])
    peer_settings = {
        name: value for name, value in of_trainer.items() if name not in (*UNKNOWN, "use_cpu", "warmup_steps")
    } | {
        "base_model": facts["model"],
        "revision_of_model": facts["revision"],
        "trust_remote_code": facts["trust_remote_code"],
        "tokenizer_config": str(Path(order.facts) / "tokenizer"),
        "datasets": [{"path": str(rows), "ds_type": "json", "type": None}],
        "dataset_prepared_path": f"{order.folder}/axolotl-prepared",
        "output_dir": f"{order.folder}/axolotl",
        "sequence_len": facts["seq_len"],
        "sample_packing": facts["packing"],
        "micro_batch_size": facts["micro_batch"],
        "num_epochs": 1,
        "lr_scheduler": facts["trainer"]["lr_scheduler_type"],
        "warmup_ratio" if 0 < warmup < 1 else "warmup_steps": warmup if 0 < warmup < 1 else int(warmup),
        "attn_implementation": facts["attention"],
        "gradient_checkpointing": facts["gradient_checkpointing"],
        "val_set_size": 0,
    }
    if lora is not None:
        peer_settings |= {
            "adapter": facts["mode"], "load_in_4bit": facts["mode"] == "qlora", "lora_r": lora["r"],
            "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"], "lora_target_modules": lora["targets"],
            "lora_modules_to_save": lora["saved"] or None, "peft_use_rslora": lora["rslora"],
            "peft_use_dora": lora["dora"],
        }  # fmt: skip
    if facts["on_cpu"]:  # its own kernels for LoRA, on by default, are for CUDA
        peer_settings |= dict.fromkeys(KERNELS, False)
    return peer_settings


if __name__ == "__main__":
    main(Path(sys.argv[1]))
