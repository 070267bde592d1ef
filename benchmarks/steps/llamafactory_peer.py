"""LLaMA-Factory on the rows of our run (PEER=llamafactory), by the function behind `llamafactory-cli train`.

    PEER_PYTHON=/path/to/llamafactory/bin/python, which runs this file

`tokenized_path` names rows that are tokenised already. Not measured by this project: it needs a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.steps.order import Order


def main(path: Path) -> None:
    """Train until the recorder has seen enough."""
    from benchmarks.steps.recording import Measured, Recorder, record_next

    order = Order.read(path)
    facts = order.known()
    used = {"micro_batch": facts["micro_batch"], "grad_accum": facts["grad_accum"], "packing": facts["packing"]}
    recorder = Recorder(
        Path(order.result), warmup=order.warmup, steps=order.steps, pad_id=facts["pad_id"],
        facts={"side": order.side, "settings": used},
    )  # fmt: skip
    record_next(recorder)
    with contextlib.suppress(Measured):
        importlib.import_module("llamafactory.train.tuner").run_exp(args=settings(order, facts))


def settings(order: Order, facts: dict[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's arguments for the facts of our run; rows are not packed again, which it does while tokenising."""
    lora = facts["lora"]
    made = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": facts["model"],
        "trust_remote_code": facts["trust_remote_code"],
        "template": "default",
        "tokenized_path": str(Path(order.facts) / "rows"),
        "cutoff_len": facts["seq_len"],
        "finetuning_type": "full" if lora is None else "lora",
        "output_dir": f"{order.folder}/llamafactory",
        "per_device_train_batch_size": facts["micro_batch"],
        "gradient_accumulation_steps": facts["grad_accum"],
        "max_steps": order.total,
        "learning_rate": facts["learning_rate"],
        "lr_scheduler_type": facts["scheduler"],
        "warmup_steps": facts["warmup_steps"],
        "weight_decay": facts["weight_decay"],
        "adam_beta2": facts["adam_beta2"],
        "max_grad_norm": facts["max_grad_norm"],
        "optim": facts["optim"],
        "seed": facts["seed"],
        "bf16": facts["compute_dtype"] == "bfloat16",
        "fp16": facts["compute_dtype"] == "float16",
        "disable_gradient_checkpointing": not facts["gradient_checkpointing"],
        "logging_steps": facts["logging_steps"],
        "save_strategy": "no",
        "report_to": "none",
    }
    if lora is not None:
        made |= {
            "lora_rank": lora["r"], "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"],
            "lora_target": ",".join(lora["targets"]), "use_rslora": lora["rslora"], "use_dora": lora["dora"],
        }  # fmt: skip
    if facts["mode"] == "qlora":
        made |= {"quantization_bit": 4, "quantization_method": "bnb"}
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
