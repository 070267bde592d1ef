"""TRL's own SFTTrainer on the rows of our run: PEER=trl, and with rows sorted by length PEER=trl-grouped.

    python -m benchmarks.steps.trl_peer ORDER.json

The rows arrive as tokens and labels, so that both sides train the same ones; TRL pads them, or packs them with its own
`bfd`. Side `trl-tries` trains the measured steps with each micro-batch: a few other rows would choose another, since
how much a micro-batch pads depends on its rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.steps.order import ProcessOrder, trainer_arguments

_TRIED = ("seconds", "cpu_s", "rows_per_s", "tokens", "rows_digest")
"""What is kept of a try."""


def main(path: Path) -> None:
    order = ProcessOrder.read(path)
    facts = order.known()
    if order.side == "trl-tries":
        micros = order.settings["micro_batches"]
        tried = [{"micro_batch": micro, **tried_run(order, facts, micro)} for micro in micros]
        Path(order.result).write_text(json.dumps({"tried": tried}), encoding="utf-8")
        return
    train(order, facts, micro=order.settings["micro_batch"])


def train(order: ProcessOrder, facts: dict[str, Any], *, micro: int) -> None:
    trainer = make_trainer(order, facts, micro=micro)
    settings = {
        "micro_batch": micro, "grad_accum": trainer.args.gradient_accumulation_steps,
        "gradient_checkpointing": facts["gradient_checkpointing"], "packing": trainer.args.packing,
        "group_by_length": order.side == "trl-grouped",
    }  # fmt: skip
    about = {"side": order.side, "settings": settings}
    train_until_recorded(trainer, order, Path(order.result), about, facts["pad_id"])


def train_until_recorded(trainer: Any, order: ProcessOrder, result: Path, more: dict[str, Any], pad_id: int) -> None:
    """Train the steps of an order, and write what was measured with `more`."""
    from benchmarks.steps.recording import MeasurementDone, Recorder, record_trainer

    recorder = Recorder(result, warmup=order.warmup, steps=order.steps, pad_id=pad_id, facts=more)
    record_trainer(trainer, recorder)
    with contextlib.suppress(MeasurementDone):
        trainer.train()


def tried_run(order: ProcessOrder, facts: dict[str, Any], micro: int) -> dict[str, Any]:
    """The steps that are measured, with this micro-batch; None for each figure where they do not fit on the GPU."""
    import torch

    result = Path(order.result).with_suffix(".try.json")
    try:
        trainer = make_trainer(order, facts, micro=micro)
        train_until_recorded(trainer, order, result, {}, facts["pad_id"])
        run = json.loads(result.read_text(encoding="utf-8"))
        return {name: run[name] for name in _TRIED}
    except torch.OutOfMemoryError:
        return dict.fromkeys(_TRIED)
    finally:
        trainer = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def make_trainer(order: ProcessOrder, facts: dict[str, Any], *, micro: int) -> Any:
    from datasets import load_from_disk
    from transformers import AutoTokenizer, BitsAndBytesConfig
    from trl import SFTTrainer

    four_bit = None
    if facts["mode"] == "qlora":
        four_bit = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=facts["compute_dtype"],
        )  # fmt: skip
    arguments = sft_arguments(order, facts, micro=micro)
    arguments.model_init_kwargs = {
        "dtype": facts["load_dtype"], "attn_implementation": facts["attention"], "revision": facts["revision"],
    }  # fmt: skip
    return SFTTrainer(
        model=facts["model"], args=arguments,
        train_dataset=load_from_disk(str(Path(order.facts) / "rows")).select_columns(["input_ids", "labels"]),
        processing_class=AutoTokenizer.from_pretrained(str(Path(order.facts) / "tokenizer")),
        peft_config=adapters(facts), quantization_config=four_bit,
    )  # fmt: skip


def adapters(facts: dict[str, Any]) -> Any:
    from peft import LoraConfig

    lora = facts["lora"]
    if lora is None:
        return None
    return LoraConfig(
        r=lora["r"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], use_rslora=lora["rslora"],
        use_dora=lora["dora"], target_modules=lora["targets"], modules_to_save=lora["saved"] or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip


def sft_arguments(order: ProcessOrder, facts: dict[str, Any], *, micro: int) -> Any:
    from trl import SFTConfig

    names = {field.name for field in dataclasses.fields(SFTConfig)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    grouped = {"train_sampling_strategy": "group_by_length"} if order.side == "trl-grouped" else {}
    return SFTConfig(
        output_dir=f"{order.folder}/trl-{time.time_ns()}", max_length=facts["seq_len"] if facts["packing"] else None,
        packing=facts["packing"], **trainer_arguments(facts, steps=order.total, micro=micro),
        **{checkpointing: facts["gradient_checkpointing"]}, **grouped,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
