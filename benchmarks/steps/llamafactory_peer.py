"""LLaMA-Factory on the rows of our run (PEER=llamafactory), by the function behind `llamafactory-cli train`.

    PEER_PYTHON=/path/to/llamafactory/bin/python, which runs this file

`tokenized_path` names rows that are tokenised already; it packs rows only while it tokenises them itself.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.steps.order import ProcessOrder, trainer_arguments

ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}
"""transformers' names of attention implementations in its own words."""


def main(path: Path) -> None:
    """Train until the recorder has seen enough."""
    from benchmarks.steps.peer import make_recorder, record_next_in_context

    order = ProcessOrder.read(path)
    facts = order.known()
    with record_next_in_context(make_recorder(order, facts)):
        importlib.import_module("llamafactory.train.tuner").run_exp(args=settings(order, facts))


def settings(order: ProcessOrder, facts: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's arguments for the facts of our run."""
    lora = facts["lora"]
    peer_settings = trainer_arguments(facts, steps=order.total, micro=facts["micro_batch"]) | {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": facts["model"],
        "trust_remote_code": facts["trust_remote_code"],
        "flash_attn": ATTENTION.get(facts["attention"], "auto"),
        "template": "empty",
        "dataset": "rows",  # asked for, and not read beside tokenized_path
        "tokenized_path": str(Path(order.facts) / "rows"),
        "cutoff_len": facts["seq_len"],
        "finetuning_type": "full" if lora is None else "lora",
        "output_dir": f"{order.folder}/llamafactory",
        "disable_gradient_checkpointing": not facts["gradient_checkpointing"],
    }
    if facts["revision"] is not None:
        peer_settings["model_revision"] = facts["revision"]
    if lora is not None:
        peer_settings |= {
            "lora_rank": lora["r"], "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"],
            "lora_target": ",".join(lora["targets"]), "use_rslora": lora["rslora"], "use_dora": lora["dora"],
            "additional_target": ",".join(lora["saved"]) or None,
        }  # fmt: skip
    if facts["mode"] == "qlora":
        peer_settings |= {"quantization_bit": 4, "quantization_method": "bnb"}
    return peer_settings


if __name__ == "__main__":
    main(Path(sys.argv[1]))
