"""Unsloth on the rows of our run (PEER=unsloth), through the API of its documentation: FastLanguageModel and TRL.

The Python of `make setup-unsloth`, or of PEER_PYTHON=, runs this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import unsloth  # noqa: F401  (it has to come before transformers and TRL, which it changes)

from benchmarks.steps.order import ProcessOrder
from benchmarks.steps.peer import make_recorder, train_until_recorded


def main(path: Path) -> None:
    """Train until the recorder has seen enough."""
    import torch
    from datasets import load_from_disk
    from trl import SFTTrainer
    from unsloth import FastLanguageModel

    from benchmarks.steps.trl_peer import sft_arguments

    order = ProcessOrder.read(path)
    facts = order.known()
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=facts["model"],
        max_seq_length=facts["seq_len"],
        dtype=getattr(torch, facts["compute_dtype"]),
        load_in_4bit=facts["mode"] == "qlora",
        full_finetuning=facts["mode"] == "full",
    )
    lora = facts["lora"]
    if lora is not None:
        model = FastLanguageModel.get_peft_model(
            model, r=lora["r"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], use_rslora=lora["rslora"],
            target_modules=lora["targets"], bias="none", random_state=facts["trainer"]["seed"],
            use_gradient_checkpointing="unsloth" if facts["gradient_checkpointing"] else False,
        )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=sft_arguments(order, facts, micro=facts["micro_batch"]),
        train_dataset=load_from_disk(str(Path(order.facts) / "rows")).select_columns(["input_ids", "labels"]),
    )
    train_until_recorded(trainer, make_recorder(order, facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
