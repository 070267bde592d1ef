"""The rows that `make eval` reads: the run's held-out ones, or a file's, each with its question where it has one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sft_play.data.build.splits import DataSplit
from sft_play.data.sources.files import find_data_paths, find_source
from sft_play.data.sources.messages import Message
from sft_play.errors import DataError
from sft_play.finished.load import build_run_renderer, build_run_splits, evenly_spaced_indices
from sft_play.finished.run import FinishedRun, require_split
from sft_play.log import one_line
from sft_play.training.measure.exact_match import Question, build_questions
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionRow:
    """A question: the index of its row, and the messages before the answer."""

    row_index: int
    question: Question
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class EvalRows:
    """Token rows to score, their indices in the split, and the questions among them."""

    name: str
    """`val`, `test`, or the file that DATA= named."""
    is_run_split: bool
    rows: Any
    row_indices: list[int]
    split_size: int
    """Rows of the split, of which LIMIT= takes some."""
    questions: list[QuestionRow]
    rows_trained_on: int | None
    """Rows of the split whose tokens the run was trained on; None where that is not known."""


def load_eval_rows(
    run: FinishedRun, *, split: str | None, data: str | None, limit: int | None, needs_questions: bool
) -> EvalRows:
    """The rows of a split (None: test where there is one, else val), or of a file, evenly spaced where limited; with
    `needs_questions` their questions too. Raises ConfigError where the split has another name, or is given beside a
    file; DataError where the run has no such rows, or they cannot be read."""
    require_split(split, data)
    tokenizer = load_tokenizer(run.config).tokenizer
    if data is not None:
        name, split_rows, trained_on = data, *_load_file_split(run, tokenizer, data)
    else:
        name, split_rows = _load_run_split(run, tokenizer, split)
        trained_on = split_rows.stats.shared_rows.get("train", 0)
    split_size = len(split_rows.rows)
    row_indices = evenly_spaced_indices(split_size, limit or split_size)
    questions = _select_questions(run, tokenizer, split_rows, set(row_indices)) if needs_questions else []
    return EvalRows(
        name, data is None, split_rows.rows.select(row_indices), row_indices, split_size, questions, trained_on
    )


def _load_run_split(run: FinishedRun, tokenizer: Any, split: str | None) -> tuple[str, DataSplit]:
    splits = build_run_splits(run, run.config, tokenizer)
    available = {name: rows for name, rows in (("test", splits.test), ("val", splits.val)) if rows is not None}
    if not available:
        reason = f"{run.folder.path} was trained without validation or test rows"
        raise DataError(f"{reason}: name a file that it has not seen with DATA=FILE")
    for name, rows in available.items():
        if split in (None, name):
            return name, rows
    alternatives = f"only {', '.join(available)}; leave SPLIT= out, or name a DATA=FILE"
    raise DataError(f"{run.folder.path} has no {split} rows, {alternatives}")


def _load_file_split(run: FinishedRun, tokenizer: Any, data: str) -> tuple[DataSplit, int | None]:
    """The rows of a file, read as the run's test rows would be, and how many of them were trained on (the run's own
    rows are read for that alone)."""
    try:
        find_source(data)
    except DataError as error:
        raise DataError(f"DATA={error}") from None
    try:
        run_paths = find_data_paths(run.config.data)
    except DataError as error:
        reason = "whether rows of DATA= were trained on is not known"
        logger.warning("The data that the run was trained on is gone (%s): %s", one_line(str(error)), reason)
        run_paths = None
    data_settings: dict[str, Any] = {"test_path": data}  # shared rows are counted
    if run_paths is None:
        data_settings |= {"train_path": data, "val_path": None, "text_path": None, "sources": (), "val_fraction": 0.0}
    config = run.config.model_copy(update={"data": run.config.data.model_copy(update=data_settings)})
    if run_paths is None and config.task_mode == "cpt_mixed":
        config = config.model_copy(update={"task_mode": "sft"})
    try:
        splits = build_run_splits(run, config, tokenizer)
    except DataError as error:
        raise DataError(str(error).replace("data.test_path" if run_paths else "data.train_path", "DATA")) from error
    if splits.test is None:
        raise DataError(f"DATA={one_line(data)} holds no rows for this run: {'; '.join(splits.notes)}")
    return splits.test, None if run_paths is None else splits.test.stats.shared_rows.get("train", 0)


def _select_questions(run: FinishedRun, tokenizer: Any, split: DataSplit, row_indices: set[int]) -> list[QuestionRow]:
    """The questions among the chosen rows, by the rule of the run's own exact match."""
    chats = {
        row_index: split.chats[chat_index]
        for chat_index, row_index in enumerate(split.chats.row_indices)
        if row_index in row_indices
    }
    questions = build_questions([*chats.values()], build_run_renderer(run, tokenizer), tokenizer)
    return [
        QuestionRow(row_index, question, tuple(chat.messages[:-1]))
        for (row_index, chat), question in zip(chats.items(), questions, strict=True)
        if question is not None
    ]
