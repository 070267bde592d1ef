"""Splits of token rows with a report of everything that was left out, cut, packed or mixed.

sft: chats with their loss masks. cpt: documents joined by the end-of-text token and cut into full blocks, every
token trained. cpt_mixed: both, in a given ratio.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.data.files import BadRow, DataPaths, RawRow, read_rows
from sft_play.data.formats import (
    Chat,
    Example,
    Format,
    Text,
    check_columns,
    check_mapping,
    recognise,
    rename_columns,
    to_example,
    unknown_format,
)
from sft_play.data.render import LOST_TO_LENGTH, Renderer, TokenRow
from sft_play.errors import DataError

SplitName = Literal["train", "val", "test"]
_SHOWN_BAD_ROWS = 8
MAX_TEXT_PASSES = 1_000
"""Passes over the same text in one epoch beyond which a mix cannot be meant."""


@dataclass(frozen=True)
class Report:
    """What became of a split's rows: counts by reason, and tokens after cutting and packing."""

    source: str
    format: str
    rows_in: int = 0
    rows_kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rows_cut: int = 0
    tokens: int = 0
    tokens_trained: int = 0
    tokens_cut: int = 0
    trained_tokens_lost: int = 0
    answers_merged: int = 0

    def lines(self, split: str) -> list[str]:
        """The report in words, one thing a line."""
        lines = [
            f"Data {split}: {self.rows_kept:,} of {self.rows_in:,} rows of {self.source} ({self.format}); "
            f"{self.tokens:,} tokens, {self.tokens_trained:,} of them trained"
        ]
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            lines.append(f"Data {split}: {count:,} rows left out: {reason}")
        if self.rows_cut:
            lines.append(
                f"Data {split}: {self.rows_cut:,} rows cut at max_seq_len: {self.tokens_cut:,} tokens, "
                f"{self.trained_tokens_lost:,} of them trained ones, are lost"
            )
        if self.answers_merged:
            lines.append(
                f"Data {split}: {self.answers_merged:,} answers begin inside the last token of their prompt (white "
                "space before the answer?); that token is not trained"
            )
        return lines


@dataclass(frozen=True)
class Split:
    """Token rows in their order, the report of how they came about, and the chats for generated answers."""

    rows: tuple[TokenRow, ...]
    report: Report
    chats: tuple[Chat, ...] = ()


@dataclass(frozen=True)
class Splits:
    """What a run trains and is judged on; `notes` are choices to say aloud."""

    train: Split
    val: Split | None
    test: Split | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Read:
    """Examples of one source with what could not be used."""

    examples: list[Example]
    bad: list[BadRow]
    format: str
    source: str


def build_splits(config: RunConfig, paths: DataPaths, tokenizer: Any, *, max_seq_len: int) -> Splits:
    """Every split of a run as token rows.

    Raises:
        DataError: rows that cannot be used (unless they are to be skipped), or nothing to learn.
    """
    check_columns(config.data)
    builder = _Builder(config, Renderer(tokenizer, loss_on=config.data.loss_on, max_seq_len=max_seq_len), max_seq_len)
    return builder.build(paths)


class _Builder:
    def __init__(self, config: RunConfig, renderer: Renderer, max_seq_len: int) -> None:
        self._config = config
        self._renderer = renderer
        self._max_seq_len = max_seq_len
        self._notes: list[str] = []

    def build(self, paths: DataPaths) -> Splits:
        """Train, validation and test, the validation split off the training rows where there is no file."""
        text_wanted = self._config.task_mode == "cpt"
        train = self._read(paths.train, "train", text_wanted=text_wanted)
        val = self._held_out(paths.val, "val")
        test = self._held_out(paths.test, "test")
        if val is None and self._config.data.val_fraction > 0:
            train, val = self._split_off(train)
        splits = Splits(
            train=self._train(train, paths),
            val=None if val is None else self._split(val, "val"),
            test=None if test is None else self._split(test, "test"),
        )
        return Splits(splits.train, splits.val, splits.test, (*paths.notes, *self._notes))

    def _held_out(self, path: Path | None, split: SplitName) -> _Read | None:
        """A held-out file's examples; None, said aloud, where plain text is trained and the file holds chats."""
        if path is None:
            return None
        read = self._read(path, split, text_wanted=self._config.task_mode == "cpt")
        if self._config.task_mode == "cpt" and any(isinstance(example, Chat) for example in read.examples):
            self._notes.append(
                f"data.{split}_path={path} holds chats ({read.format}) and task_mode is cpt: it is not used"
                + self._instead(split)
            )
            return None
        return read

    def _instead(self, split: SplitName) -> str:
        share = self._config.data.val_fraction
        if split != "val":
            return ""
        return f"; {share:g} of the training text is" if share else "; data.val_fraction would split off training text"

    def _read(self, path: Path, split: SplitName, *, text_wanted: bool) -> _Read:
        examples: list[Example] = []
        bad: list[BadRow] = []
        shape: Format | None = None
        columns = self._config.data.columns
        for raw in read_rows(path, split=split, text_wanted=text_wanted):
            if isinstance(raw, RawRow) and shape is None and split == "train":
                check_mapping(raw, columns)
            row = rename_columns(raw, columns) if isinstance(raw, RawRow) else raw
            if isinstance(row, RawRow) and shape is None:
                shape = recognise(row.data)
                if shape is None:
                    raise unknown_format(row)
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            assert shape is not None
            item = to_example(row, shape)
            if isinstance(item, BadRow):
                bad.append(item)
            else:
                examples.append(item)
        if not examples and not bad:
            raise DataError(f"{path} has no rows")
        return _Read(examples, bad, shape.name if shape else "unknown", str(path))

    def _split_off(self, train: _Read) -> tuple[_Read, _Read | None]:
        """Validation examples by content hash: adding rows moves none of the others."""
        if self._config.task_mode == "cpt" and len(train.examples) < 20:
            return self._split_text(train)
        share = self._config.data.val_fraction
        kept: list[Example] = []
        held: list[Example] = []
        for example in train.examples:
            (held if content_share(example) < share else kept).append(example)
        if not held or not kept:
            self._notes.append(f"data.val_fraction={share} of {len(train.examples)} rows leaves no validation rows")
            return train, None
        source = f"{share:g} of {train.source} by content hash"
        return _Read(kept, train.bad, train.format, train.source), _Read(held, [], train.format, source)

    def _split_text(self, train: _Read) -> tuple[_Read, _Read | None]:
        """The end of each of a few long documents: a hash of whole documents would take all or nothing."""
        share = self._config.data.val_fraction
        kept: list[Example] = []
        held: list[Example] = []
        for example in train.examples:
            text = example.text if isinstance(example, Text) else ""
            cut = int(len(text) * (1 - share))
            kept.append(Text(example.where, text[:cut]))
            held.append(Text(example.where, text[cut:]))
        held = [example for example in held if isinstance(example, Text) and example.text.strip()]
        source = f"the last {share:g} of each document of {train.source}"
        return _Read(kept, train.bad, train.format, train.source), _Read(held, [], "text", source) if held else None

    def _train(self, read: _Read, paths: DataPaths) -> Split:
        split = self._split(read, "train")
        if self._config.task_mode != "cpt_mixed":
            return split
        assert paths.text is not None
        texts = self._read(paths.text, "train", text_wanted=True)
        if not all(isinstance(example, Text) for example in texts.examples):
            raise DataError(f"data.text_path={paths.text} holds {texts.format} rows; it takes plain text")
        return self._mix(split, self._packed(texts, "text"))

    def _split(self, read: _Read, split: str) -> Split:
        if self._config.task_mode == "cpt":
            chats = next((example for example in read.examples if isinstance(example, Chat)), None)
            if chats is not None:
                raise DataError(
                    f"{chats.where}: task_mode is cpt, which trains plain text, and the rows are chats "
                    f"({read.format}); use task_mode=sft, or rows with a text column"
                )
            return self._packed(read, split)
        return self._chats(read, split)

    def _chats(self, read: _Read, split: str) -> Split:
        if any(isinstance(example, Text) for example in read.examples):
            self._notes.append(f"Data {split}: rows of plain text have no turns: every token of them is trained")
        rows: list[TokenRow] = []
        chats: list[Chat] = []
        bad = list(read.bad)
        for example in read.examples:
            row = self._renderer(example)
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            rows.append(row)
            if isinstance(example, Chat):
                chats.append(example)
        self._judge(bad, read, split, kept=len(rows))
        return Split(tuple(rows), _report(read, rows, bad), tuple(chats))

    def _judge(self, bad: Sequence[BadRow], read: _Read, split: str, *, kept: int) -> None:
        """Raises DataError for bad rows that may not be skipped; rows lost to length are always counted only."""
        broken = [row for row in bad if row.reason != LOST_TO_LENGTH]
        if broken and self._config.data.on_bad_row == "fail":
            raise DataError(_bad_rows_message(broken, read, split))
        if kept == 0:
            raise DataError(_nothing_left_message(bad, read, split, self._max_seq_len))

    def _packed(self, read: _Read, split: str) -> Split:
        """Documents joined by the end-of-text token, cut into blocks of exactly max_seq_len tokens.

        The rest that fills no block is dropped and counted; a text shorter than one block is an error.
        """
        self._judge(read.bad, read, split, kept=len(read.examples))
        stream: list[int] = []
        for example in read.examples:
            if isinstance(example, Text):
                stream += self._renderer.document_ids(example)
        block = self._max_seq_len
        blocks = [stream[start : start + block] for start in range(0, len(stream) - block + 1, block)]
        if not blocks and split in ("val", "test") and stream:
            blocks = [stream]
        if not blocks:
            raise DataError(
                f"{read.source}: {len(read.examples)} documents are {len(stream):,} tokens, less than one block of "
                f"max_seq_len {block}; lower model.max_seq_len or give more text"
            )
        rows = [TokenRow(f"{read.source}:block {n + 1}", ids, list(ids)) for n, ids in enumerate(blocks)]
        report = _report(read, rows, read.bad, kept=len(read.examples))
        left = len(stream) - sum(map(len, blocks))
        note = f"Data {split}: packed into {len(rows):,} blocks of {block} tokens; the last {left:,} tokens fill none"
        self._notes.append(note)
        return Split(tuple(rows), report)

    def _mix(self, chats: Split, text: Split) -> Split:
        """All chats once, with as many text blocks between them as the ratio asks for, in a seeded order."""
        share = self._config.data.text_fraction
        wanted = max(1, round(len(chats.rows) * share / (1 - share)))
        if wanted > MAX_TEXT_PASSES * len(text.rows):
            raise DataError(
                f"data.text_fraction={share:g} of {len(chats.rows)} chats asks for {wanted:,} text blocks, and "
                f"{text.report.source} has {len(text.rows)}: more than {MAX_TEXT_PASSES} passes over it; lower it"
            )
        order = random.Random(self._config.train.seed)
        blocks = [text.rows[index % len(text.rows)] for index in range(wanted)]
        rows = [*chats.rows, *blocks]
        order.shuffle(rows)
        passes = wanted / len(text.rows)
        self._notes.append(
            f"Data train: {len(chats.rows):,} chats and {wanted:,} text blocks ({share:g} of the sequences; "
            f"{passes:.2g} passes over the text)"
        )
        report = chats.report
        mixed = Report(
            source=f"{report.source} + {text.report.source}",
            format=f"{report.format} + text blocks",
            rows_in=report.rows_in + text.report.rows_in,
            rows_kept=report.rows_kept + text.report.rows_kept,
            dropped=dict(Counter(report.dropped) + Counter(text.report.dropped)),
            rows_cut=report.rows_cut,
            tokens=sum(len(row.input_ids) for row in rows),
            tokens_trained=sum(row.trained for row in rows),
            tokens_cut=report.tokens_cut,
            trained_tokens_lost=report.trained_tokens_lost,
        )
        return Split(tuple(rows), mixed, chats.chats)


def _report(read: _Read, rows: Sequence[TokenRow], bad: Sequence[BadRow], *, kept: int | None = None) -> Report:
    cut = [row for row in rows if row.cut]
    return Report(
        source=read.source,
        format=read.format,
        rows_in=len(read.examples) + len(read.bad),
        rows_kept=len(rows) if kept is None else kept,
        dropped=dict(Counter(row.reason for row in bad)),
        rows_cut=len(cut),
        tokens=sum(len(row.input_ids) for row in rows),
        tokens_trained=sum(row.trained for row in rows),
        tokens_cut=sum(row.cut for row in cut),
        trained_tokens_lost=sum(row.lost for row in cut),
        answers_merged=sum(row.merged for row in rows),
    )


def _bad_rows_message(bad: Sequence[BadRow], read: _Read, split: str) -> str:
    total = len(read.examples) + len(read.bad)
    counts = Counter(row.reason for row in bad)
    reasons = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(6))
    shown = "\n".join(f"  {row}" for row in bad[:_SHOWN_BAD_ROWS])
    more = f"\n  … and {len(bad) - _SHOWN_BAD_ROWS} more" if len(bad) > _SHOWN_BAD_ROWS else ""
    return (
        f"{len(bad)} of {total} rows of data.{split}_path={read.source} cannot be used ({reasons}):\n{shown}{more}\n"
        "mend them, or leave them out, counted, with data.on_bad_row=skip"
    )


def _nothing_left_message(bad: Sequence[BadRow], read: _Read, split: str, max_seq_len: int) -> str:
    if bad and all(row.reason == LOST_TO_LENGTH for row in bad):
        return (
            f"data.{split}_path={read.source}: all {len(bad)} rows lose their answer at max_seq_len {max_seq_len} "
            f"(the first: {bad[0].detail}); raise model.max_seq_len"
        )
    reasons = "; ".join(f"{count} x {reason}" for reason, count in Counter(row.reason for row in bad).most_common(6))
    return f"data.{split}_path={read.source}: no row is left of {len(bad)} ({reasons})"


def content_share(example: Example) -> float:
    """A number in [0, 1) from the example's content alone: the same row always falls on the same side."""
    content: Any = example.text if isinstance(example, Text) else [example.messages, example.tools]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace"))
    return int.from_bytes(digest.digest()[:8], "big") / 2**64
