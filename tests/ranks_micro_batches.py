"""The same rows trained in micro-batches that are cut in several ways, in this process or as one of several ranks.

torchrun --standalone --nproc-per-node 2 --module tests.ranks_micro_batches MODEL OUT
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch

from sft_play.planner.batching import MicroBatches
from sft_play.training.model import attention_functions
from tests.ranks import write_found
from tests.ranks_evaluation import trainer_of as own_trainer

CUTS = {
    "one row": MicroBatches(1), "by tokens": MicroBatches(1, tokens=45, overhead=15),
    "a cheap pass": MicroBatches(1, tokens=45, overhead=0), "joined": MicroBatches(1, tokens=48, padded=False),
    "all at once": MicroBatches(4, tokens=4 * 48, overhead=2, single=True),
}  # fmt: skip
"""11 rows of 2 to 40 tokens in steps of 4: an epoch ends with 3."""
STEPS = 5


def trainer_of(model: Path, folder: Path, cut: MicroBatches, *, ranks: int, bf16: bool) -> Any:
    """A trainer of full weights over `ranks`, at a constant learning rate."""
    text = (
        f"train: {{effective_batch_size: 4, max_steps: {STEPS}, report_to: [], save_steps: 2, logging_steps: 1,\n"
        f"        bf16: {str(bf16).lower()}, save_total_limit: 9, optim: adamw_torch, warmup_steps: 0,\n"
        "        learning_rate: 1e-2, lr_scheduler_type: constant}\neval: {steps: 0}\n"
    )
    attention = "sdpa" if cut.padded else attention_functions.VARLEN_ATTENTION
    loaded = {"dtype": torch.float32, "attn_implementation": attention}
    return own_trainer(model, folder, text=text, cut=cut, ranks=ranks, **loaded)


def trained(model: Path, folder: Path, *, ranks: int, bf16: bool = False) -> dict[str, dict[str, list[float]]]:
    """Of each cut, and of one that is resumed in the middle of an epoch: losses, gradient norms, final weights'
    sums."""
    found = {}
    for name, cut in CUTS.items():
        where = folder / name.replace(" ", "-")
        rows = -(-4 // ranks)
        cut = dataclasses.replace(cut, rows=rows) if cut.single else cut
        trainer = trainer_of(model, where, cut, ranks=ranks, bf16=bf16)
        trainer.train()
        found[name] = figures(trainer)
        assert is_as_planned(trainer, cut)
        if name == "by tokens":
            again = trainer_of(model, where, cut, ranks=ranks, bf16=bf16)
            again.train(resume_from_checkpoint=str(where / "checkpoints" / "checkpoint-2"))
            found["resumed"] = figures(again)
    return found


def is_as_planned(trainer: Any, cut: MicroBatches) -> bool:
    """Whether the batches of an epoch are joined or padded as the cut says, and fewer than rows where a pass costs."""
    batches = [batch for batch in trainer.get_train_dataloader() if batch]
    joined = all("cu_seq_lens_q" in batch and batch["input_ids"].shape[0] == 1 for batch in batches)
    saves = cut.tokens is not None and (cut.overhead > 0 or not cut.padded)
    return joined != cut.padded and (trainer.args.world_size > 1 or saves == (len(batches) < 11))


def figures(trainer: Any) -> dict[str, list[float]]:
    """Losses and gradient norms of the steps, and the sum of each weight's elements."""
    lines = [line for line in trainer.state.log_history if "loss" in line]
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {
        "loss": [line["loss"] for line in lines], "grad_norm": [line["grad_norm"] for line in lines],
        "weights": [float(weight.double().abs().sum()) for weight in weights.values()],
        "tokens": [float(trainer.tokens_seen)],
    }  # fmt: skip


def main(model: Path, out: Path) -> None:
    """Train on all ranks; the first writes."""
    ranks = int(os.environ["WORLD_SIZE"])
    found = {name: trained(model, out.parent / name, ranks=ranks, bf16=name == "bf16") for name in ("fp32", "bf16")}
    write_found(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
