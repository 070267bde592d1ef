"""The rows that `make eval` reads, each with its question where it has one; and the loss of a model
on them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset

from sft_play.data.build.splits import DataSplit
from sft_play.data.sources.files import find_data_paths, find_source
from sft_play.data.sources.messages import Message
from sft_play.errors import DataError
from sft_play.finished.load import build_run_renderer, build_run_splits, evenly_spaced_indices
from sft_play.finished.run import FinishedRun, require_split
from sft_play.log import one_line
from sft_play.training.class_checks.adapter_trial import has_custom_logits
from sft_play.training.loop.rows import Collator, row_lengths
from sft_play.training.measure.exact_match import Question, build_questions
from sft_play.training.model.fused_head import fused_head
from sft_play.training.model.model_loading import TORCH_DTYPES
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


# --- the loss of a model on token rows: each row's own, in the arithmetic of the trainer's evaluation -----------------
#
# TRL's fused head gives the log-probability of each trained token without whole logits: only tiles
# of at most 4,096 tokens by 32,768 words of the vocabulary exist at a time. The trainer evaluates
# through the same head.
class RowScore(NamedTuple):
    """How well a model predicts the trained tokens of one row."""

    nll: float  # negative log-likelihood, summed over the trained tokens, in nats
    tokens: int  # trained ones; the first of a row is never predicted
    correct: int  # trained tokens that the model thinks likeliest


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
    sums = (-output.log_probs.double().sum(1), output.label_mask.sum(1), output.is_top1.sum(1).round().long())
    return [RowScore(*row) for row in zip(*(values_B.tolist() for values_B in sums), strict=True)]


# --- the rows that `make eval` reads ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class QuestionRow:
    """A question, with the messages before the answer."""

    question: Question
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class EvalRows:
    """Token rows to score: the run's held-out ones, or a file's."""

    name: str  # `val`, `test`, or the file that DATA= named
    is_run_split: bool
    rows: Any
    row_indices: list[int]  # of the rows in their split
    split_size: int  # rows of the split, of which LIMIT= takes some
    questions: dict[int, QuestionRow]  # by the position among the rows
    rows_trained_on: int | None  # of the split, token for token; None where that is not known


def load_eval_rows(
    run: FinishedRun, *, split: str | None, data: str | None, limit: int | None, needs_questions: bool
) -> EvalRows:
    """The rows of a split (None: test where there is one, else val), or of a file, evenly spaced where limited; with
    `needs_questions` their questions too. Raises ConfigError where the split has another name, or is given beside a
    file; DataError where the run has no such rows, or they cannot be read."""
    require_split(split, data)
    tokenizer = load_tokenizer(run.config).tokenizer
    if data is not None:
        name, split_rows, rows_trained_on = data, *_load_file_split(run, tokenizer, data)
    else:
        name, split_rows = _load_run_split(run, tokenizer, split)
        rows_trained_on = split_rows.stats.shared_rows.get("train", 0)
    split_size = len(split_rows.rows)
    row_indices = evenly_spaced_indices(split_size, limit or split_size)
    questions = _select_questions(run, tokenizer, split_rows, row_indices) if needs_questions else {}
    rows = split_rows.rows.select(row_indices)
    return EvalRows(name, data is None, rows, row_indices, split_size, questions, rows_trained_on)


def _load_run_split(run: FinishedRun, tokenizer: Any, split: str | None) -> tuple[str, DataSplit]:
    splits = build_run_splits(run, run.config, tokenizer)
    available = {name: rows for name, rows in (("test", splits.test), ("val", splits.val)) if rows is not None}
    if not available:
        reason = f"{run.folder.path} was trained without validation or test rows"
        raise DataError(f"{reason}: name a file that it has not seen with DATA=FILE")
    name = split or next(iter(available))
    if name not in available:
        alternatives = f"only {', '.join(available)}; leave SPLIT= out, or name a DATA=FILE"
        raise DataError(f"{run.folder.path} has no {name} rows, {alternatives}")
    return name, available[name]


def _load_file_split(run: FinishedRun, tokenizer: Any, data: str) -> tuple[DataSplit, int | None]:
    """The rows of a file, read as the run's test rows would be, and how many of them were trained on (the run's own
    rows are read for that alone)."""
    try:
        find_source(data)
    except DataError as error:
        raise DataError(f"DATA={error}") from None
    config, settings, label = run.config, {"test_path": data}, "data.test_path"  # shared rows are counted
    try:
        find_data_paths(config.data)
        is_own_data_present = True
    except DataError as error:
        reason = "whether rows of DATA= were trained on is not known"
        logger.warning("The data that the run was trained on is gone (%s): %s", one_line(str(error)), reason)
        is_own_data_present, label = False, "data.train_path"
        settings |= {"train_path": data, "val_path": None, "text_path": None, "sources": (), "val_fraction": 0.0}
        if config.task_mode == "cpt_mixed":
            config = config.model_copy(update={"task_mode": "sft"})
    config = config.model_copy(update={"data": config.data.model_copy(update=settings)})
    try:
        splits = build_run_splits(run, config, tokenizer)
    except DataError as error:
        raise DataError(str(error).replace(label, "DATA")) from error
    if splits.test is None:
        raise DataError(f"DATA={one_line(data)} holds no rows for this run: {'; '.join(splits.notes)}")
    return splits.test, splits.test.stats.shared_rows.get("train", 0) if is_own_data_present else None


def _select_questions(
    run: FinishedRun, tokenizer: Any, split: DataSplit, row_indices: Sequence[int]
) -> dict[int, QuestionRow]:
    """The questions among the chosen rows, by the rule of the run's own exact match."""
    positions = {row_index: position for position, row_index in enumerate(row_indices)}
    chats = {
        positions[row_index]: split.chats[chat_index]
        for chat_index, row_index in enumerate(split.chats.row_indices)
        if row_index in positions
    }
    questions = build_questions([*chats.values()], build_run_renderer(run, tokenizer), tokenizer)
    return {
        position: QuestionRow(question, tuple(chat.messages[:-1]))
        for (position, chat), question in zip(chats.items(), questions, strict=True)
        if question is not None
    }
