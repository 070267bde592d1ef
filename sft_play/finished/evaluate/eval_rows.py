"""The rows that `make eval` reads: the run's held-out ones, or a file's, each with its question where it has one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sft_play.data.build.splits import Split
from sft_play.data.sources.files import find_data_paths, find_source
from sft_play.data.sources.messages import Message
from sft_play.errors import DataError
from sft_play.finished.load import evenly_spaced, renderer_of, splits_of
from sft_play.finished.run import FinishedRun, require_split
from sft_play.log import one_line
from sft_play.training.measure.exact_match import Question, build_questions
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AskedRow:
    """A question: the number of its row, and the messages before the answer."""

    row: int
    question: Question
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class EvalRows:
    """Token rows to score, their numbers in the split (from 0), and the questions among them."""

    name: str
    """`val`, `test`, or the file that DATA= named."""
    is_own: bool
    rows: Any
    numbers: list[int]
    whole: int
    """Rows of the split, of which LIMIT= takes some."""
    asked: list[AskedRow]
    seen: int | None
    """Rows of the split whose tokens the run was trained on; None where that is not known."""


def eval_rows(run: FinishedRun, *, split: str | None, data: str | None, limit: int | None, asks: bool) -> EvalRows:
    """The rows of a split (None: test where there is one, else val), or of a file, evenly spaced where limited; `asks`:
    whether answers will be generated. Raises ConfigError where the split has another name, or is given beside a file;
    DataError where the run has no such rows, or they cannot be read."""
    require_split(split, data)
    tokenizer = load_tokenizer(run.config).tokenizer
    if data is not None:
        name, chosen, seen = data, *_of_file(run, tokenizer, data)
    else:
        name, chosen = _of_run(run, tokenizer, split)
        seen = chosen.report.shared.get("train", 0)
    whole = len(chosen.rows)
    numbers = evenly_spaced(whole, limit or whole)
    asked = _asked(run, tokenizer, chosen, set(numbers)) if asks else []
    return EvalRows(name, data is None, chosen.rows.select(numbers), numbers, whole, asked, seen)


def _of_run(run: FinishedRun, tokenizer: Any, split: str | None) -> tuple[str, Split]:
    splits = splits_of(run, run.config, tokenizer)
    there = {name: rows for name, rows in (("test", splits.test), ("val", splits.val)) if rows is not None}
    if not there:
        without = f"{run.folder.path} was trained without validation or test rows"
        raise DataError(f"{without}: name a file that it has not seen with DATA=FILE")
    for name, rows in there.items():
        if split in (None, name):
            return name, rows
    only = f"only {', '.join(there)}; leave SPLIT= out, or name a DATA=FILE"
    raise DataError(f"{run.folder.path} has no {split} rows, {only}")


def _of_file(run: FinishedRun, tokenizer: Any, data: str) -> tuple[Split, int | None]:
    """The rows of a file, read as the run's test rows would be, and how many of them were trained on (the run's own
    rows are read for that alone)."""
    try:
        find_source(data)
    except DataError as error:
        raise DataError(f"DATA={error}") from None
    try:
        own = find_data_paths(run.config.data)
    except DataError as error:
        why = "whether rows of DATA= were trained on is not known"
        logger.warning("The data that the run was trained on is gone (%s): %s", one_line(str(error)), why)
        own = None
    there: dict[str, Any] = {"test_path": data}  # beside the training rows, so that what it shares with them is counted
    if own is None:
        there |= {"train_path": data, "val_path": None, "text_path": None, "sources": (), "val_fraction": 0.0}
    config = run.config.model_copy(update={"data": run.config.data.model_copy(update=there)})
    if own is None and config.task_mode == "cpt_mixed":
        config = config.model_copy(update={"task_mode": "sft"})
    try:
        splits = splits_of(run, config, tokenizer)
    except DataError as error:
        raise DataError(str(error).replace("data.test_path" if own else "data.train_path", "DATA")) from error
    if splits.test is None:
        raise DataError(f"DATA={one_line(data)} holds no rows for this run: {'; '.join(splits.notes)}")
    return splits.test, None if own is None else splits.test.report.shared.get("train", 0)


def _asked(run: FinishedRun, tokenizer: Any, split: Split, chosen: set[int]) -> list[AskedRow]:
    """The questions among the chosen rows, by the rule of the run's own exact match."""
    chats = {row: split.chats[number] for number, row in enumerate(split.chats.rows) if row in chosen}
    questions = build_questions([*chats.values()], renderer_of(run, tokenizer), tokenizer)
    return [
        AskedRow(row, question, tuple(chat.messages[:-1]))
        for (row, chat), question in zip(chats.items(), questions, strict=True)
        if question is not None
    ]
