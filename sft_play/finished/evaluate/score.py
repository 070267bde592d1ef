"""The loss of a model on token rows: each row's own, in the arithmetic of the trainer's evaluation.

TRL's fused head gives the log-probability of each trained token without whole logits: only tiles of at most 4,096
tokens by 32,768 words of the vocabulary exist at a time. The trainer evaluates through the same head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset

from sft_play.finished.run import FinishedRun
from sft_play.training.class_checks.adapter_trial import has_custom_logits
from sft_play.training.loop.collate import Collator
from sft_play.training.loop.rows import row_lengths
from sft_play.training.model.fused_head import fused_head
from sft_play.training.model.model_loading import TORCH_DTYPES
from sft_play.training.prepare.device_checks import free_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowScore:
    """How well a model predicts the trained tokens of one row."""

    nll: float
    """Negative log-likelihood, summed over the trained tokens, in nats."""
    tokens: int
    """Trained tokens; the first of a row is never predicted."""
    correct: int
    """Trained tokens that the model thinks likeliest."""


@torch.no_grad()
def score_rows(
    model: Any, rows: Sequence[Any], *, max_batch_tokens: int, autocast_dtype: torch.dtype | None = None
) -> list[RowScore]:
    """The score of each row, in the rows' order.

    Args:
        model: a causal language model, with an adapter or without; it is left as it was.
        rows: with `input_ids` and `labels` (-100: not trained); a Dataset is read batch by batch.
        max_batch_tokens: tokens of a batch, with padding; halved where memory runs out.
        autocast_dtype: the dtype of matrix products; None for that of the weights. A run's is `compute_dtype(run)`.

    Raises:
        RuntimeError: a single row does not fit into memory (torch's own error).
    """
    lengths = row_lengths(rows).tolist() if isinstance(rows, Dataset) else [len(row["input_ids"]) for row in rows]
    # longest first: where memory is too small that shows at the first batch, not after most of the work
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    scores: dict[int, RowScore] = {}
    was_training, start = model.training, 0
    model.eval()
    try:
        with fused_head(model, from_class_logits=has_custom_logits(model.config)):
            while start < len(order):
                longest = max(1, lengths[order[start]])
                batch = order[start : start + max(1, max_batch_tokens // longest)]
                batch_rows = [{name: rows[index][name] for name in ("input_ids", "labels")} for index in batch]
                try:
                    scores |= dict(zip(batch, _score_batch(model, batch_rows, autocast_dtype), strict=True))
                    start += len(batch)
                    continue
                except RuntimeError as error:
                    if len(batch) == 1 or not should_reduce_batch_size(error):
                        raise
                # only here: while the exception lives, so does what its frames hold
                max_batch_tokens = longest * len(batch) // 2
                logger.warning("Out of memory: continuing with at most %s tokens a batch", f"{max_batch_tokens:,}")
                free_memory()
    finally:
        model.train(was_training)
    return [scores[index] for index in range(len(lengths))]


def compute_dtype(run: FinishedRun) -> torch.dtype:
    """The dtype that the run's own evaluations computed in."""
    return TORCH_DTYPES[run.plan().precision.compute]


def eval_batch_tokens(run: FinishedRun) -> int:
    """Tokens, with padding, of the largest batch that the run's plan evaluates at a time."""
    plan = run.plan()
    return plan.eval_batch * plan.choice.step.seq_len  # of the longest row, which may be shorter than max_seq_len


def _score_batch(
    model: Any, batch_rows: Sequence[dict[str, Any]], autocast_dtype: torch.dtype | None
) -> list[RowScore]:
    batch = Collator(pad_id=0)(batch_rows)  # padding is masked: which token it is does not matter
    dtype = autocast_dtype or next(model.parameters()).dtype
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        output = model(
            **{name: tensor.to(model.device) for name, tensor in batch.items()},
            use_cache=False, fused_lm_head=True,
        )  # fmt: skip
    nll_B = -output.log_probs.double().sum(1).cpu()
    tokens_B, correct_B = output.label_mask.sum(1).cpu(), output.is_top1.sum(1).cpu()
    return [
        RowScore(nll, tokens, round(correct))
        for nll, tokens, correct in zip(nll_B.tolist(), tokens_B.tolist(), correct_B.tolist(), strict=True)
    ]
