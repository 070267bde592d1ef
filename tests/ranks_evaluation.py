"""Evaluations of one model in batches of several sizes, in this process or as one of two ranks: writes the figures.

torchrun --standalone --nproc-per-node 2 --module tests.ranks_evaluation MODEL OUT
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.config.load import config_from_text
from sft_play.data.build.splits import DataSplit
from sft_play.data.build.stats import RowStats
from sft_play.data.masks.token_row import IGNORED
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.batching import MicroBatches
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.runs.folder import RunFolder
from sft_play.training.loop.trainer import build_trainer
from tests.ranks import write_found

SIZES = (1, 3, 5, 11, 64)
"""Rows of an evaluation batch; there are 11 rows."""
LENGTHS = (9, 30, 2, 20, 12, 5, 40, 17, 3, 31, 8)


def rows_of(count: int = len(LENGTHS)) -> Dataset:
    """Rows of very different lengths, of which a random share is trained on; one has no trained token."""
    draw = np.random.default_rng(1)
    ids = [draw.integers(3, 300, size=length).tolist() for length in LENGTHS[:count]]
    labels = [[token if draw.random() < 0.6 else IGNORED for token in row] for row in ids]
    labels[1] = [IGNORED] * len(labels[1])
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "source": [0] * len(ids)})


TRAIN = "train: {effective_batch_size: 4, batch_size: 2, max_steps: 2, report_to: [], save_steps: 9, warmup_steps: 0}"


def trainer_of(
    model: Path, folder: Path, *overrides: str, ranks: int = 1, rows: Dataset | None = None, text: str = TRAIN,
    cut: MicroBatches | None = None, **loaded: Any,
) -> Any:  # fmt: skip
    """A trainer of full weights on a CPU, for rows of our own, which it also evaluates. `cut`: other micro-batches than
    those of the plan; `loaded`: how the model is."""
    head = f"model: {{name: {model}, max_seq_len: 48}}\ntuning: {{mode: full}}\n"
    config = config_from_text(head + text, name="run.yaml", overrides=list(overrides))
    machine = Hardware((), "CPU", 2, 2**34, 2**34, cpu_ranks=ranks)
    plan = make_plan(PlanRequest(config, load_model_shape(str(model)), machine))
    assert plan.batch.ranks == ranks
    if cut is not None:
        plan = dataclasses.replace(plan, micro_batches=cut)
    split = DataSplit(rows_of() if rows is None else rows, RowStats("rows", "rows"))
    loaded.setdefault("dtype", getattr(torch, plan.precision.load))
    torch.manual_seed(1)
    return build_trainer(
        config, plan, RunFolder(folder), peft_config=None,
        model=AutoModelForCausalLM.from_pretrained(model, **loaded),
        tokenizer=AutoTokenizer.from_pretrained(model), train_split=split, eval_split=split,
    )  # fmt: skip


def figures(model: Path, folder: Path, *, ranks: int) -> dict[str, dict[str, dict[str, float]]]:
    """Of each precision and size: loss, and TRL's own accuracy and entropy over trained tokens."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for precision in ("fp32", "bf16"):
        trainer = trainer_of(model, folder, f"train.bf16={str(precision == 'bf16').lower()}", ranks=ranks)
        assert trainer.args.bf16 == (precision == "bf16")
        for size in SIZES:
            trainer.args.per_device_eval_batch_size = size
            metrics = trainer.evaluate()
            logged = trainer.state.log_history[-1]
            own = {"accuracy": logged["eval_mean_token_accuracy"], "entropy": logged["eval_entropy"]}
            found.setdefault(precision, {})[str(size)] = {"loss": metrics["eval_loss"], **own}
            assert trainer.args.per_device_eval_batch_size == size
    return found


def main(model: Path, out: Path) -> None:
    """Evaluate on all ranks, written by the first."""
    found = figures(model, out.parent, ranks=int(os.environ["WORLD_SIZE"]))
    write_found(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
