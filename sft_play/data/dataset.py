"""Splits of token rows with a report of everything that was left out, cut, packed or mixed.

sft: chats with their loss masks. cpt: documents joined by the end-of-text token and cut into full blocks, every
token trained. cpt_mixed: both, in a given ratio. The rows themselves lie in the token cache (`build.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal, overload

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.build import HELD, KEPT, Built, Counts, Recipe, build, chat_of
from sft_play.data.files import AnySource, BadRow, DataPaths, data_files, read_part
from sft_play.data.formats import Chat, Example, Text, check_columns, first_format, rename_columns, to_example
from sft_play.data.messages import roles_said
from sft_play.data.mixing import MAX_PASSES, Sources, drawn, mix_table
from sft_play.data.process import rows_said
from sft_play.data.render import Renderer, TokenizerParts, TokenRow
from sft_play.data.survey import SHOWN_BAD_ROWS
from sft_play.errors import DataError
from sft_play.log import one_line

SplitName = Literal["train", "val", "test"]
FEW_DOCUMENTS = 20
"""Below so many documents a validation share is taken from the end of each: a hash would take all or nothing."""
HELD_TEXT_FRACTION = 0.05
"""Share of the text of cpt_mixed that is held out where the chats have validation rows and val_fraction is 0."""


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
    lost_fraction: float = 0.0
    answers_merged: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    untrained_turns: int = 0
    stripped_think: int = 0
    special_rows: int = 0
    repeated: int = 0
    """Rows with the tokens of an earlier one."""
    shared: dict[str, int] = field(default_factory=dict)
    """Contents that stand in another split too, by its name."""
    noted: dict[str, int] = field(default_factory=dict)

    def lines(self, split: str) -> list[str]:
        """The report in words, one thing a line."""
        share = f" ({self.tokens_trained / self.tokens:.0%})" if self.tokens else ""
        lines = [
            f"Data {split}: {self.rows_kept:,} of {self.rows_in:,} rows of {self.source} ({self.format}); "
            f"{self.tokens:,} tokens, {self.tokens_trained:,} of them trained{share}"
        ]
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            lines.append(f"Data {split}: {rows_said(count)} left out: {reason}")
        for note, count in sorted(self.noted.items(), key=lambda item: -item[1]):
            lines.append(f"Data {split}: {rows_said(count)}: {note}")
        return [*lines, *self._repeat_lines(split), *self._length_lines(split), *self._mask_lines(split)]

    def _repeat_lines(self, split: str) -> list[str]:
        lines = []
        if self.repeated:
            lines.append(
                f"Data {split}: {rows_said(self.repeated)} with the tokens of an earlier one (make check names them; "
                "make process SET=data.process.drop_duplicates=true keeps one of each)"
            )
        for other, count in self.shared.items():
            lines.append(
                f"Data {split}: {rows_said(count)} with the same tokens as in {other}: figures on {split} flatter the "
                "model (make check names them; make process SET=data.process.drop_leaks=true leaves them out)"
            )
        return lines

    def _length_lines(self, split: str) -> list[str]:
        if not self.trained_tokens_lost and not self.rows_cut:
            return []
        return [
            f"Data {split}: {self.rows_cut:,} rows cut at max_seq_len: {self.tokens_cut:,} tokens; with the rows left "
            f"out for their length {self.trained_tokens_lost:,} trained tokens ({self.lost_fraction:.1%}) are lost"
        ]

    def _mask_lines(self, split: str) -> list[str]:
        lines = []
        masks = {method: count for method, count in self.methods.items() if method != "document"}
        if masks:
            said = ", ".join(f"{count:,} by {method}" for method, count in sorted(masks.items(), key=lambda i: -i[1]))
            lines.append(f"Data {split}: masks verified on every row: {said} (docs/masks.md)")
        if self.untrained_turns:
            lines.append(
                f"Data {split}: {self.untrained_turns:,} assistant turns are not trained, since the template writes "
                "them otherwise than they are generated; data.multi_turn=split trains each as a last turn"
            )
        if self.stripped_think:
            lines.append(
                f"Data {split}: the template leaves out {self.stripped_think:,} pieces of think text; "
                "data.multi_turn=split keeps them where only the last turn's is written"
            )
        if self.special_rows:
            lines.append(
                f"Data {split}: special tokens are spelled in the texts of {rows_said(self.special_rows)} "
                "(data.special_tokens_in_text says what becomes of them)"
            )
        if self.answers_merged:
            lines.append(
                f"Data {split}: {self.answers_merged:,} ends of answers stand inside a token, which is split there as "
                "generation would"
            )
        return lines


class Chats(Sequence[Chat]):
    """The conversations of a split's rows, read from the cache one at a time."""

    def __init__(self, column: Any = (), places: Sequence[int] = ()) -> None:
        self._column, self._places = column, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Chat: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chat]: ...
    def __getitem__(self, index: int | slice) -> Chat | list[Chat]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return chat_of(self._column[int(self._places[index])])


class _Chain(Sequence[Chat]):
    """The conversations of several splits, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Chat]]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Chat: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chat]: ...
    def __getitem__(self, index: int | slice) -> Chat | list[Chat]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        part = bisect.bisect_right(self._ends, at)
        return self._parts[part][at - self._ends[part]]


@dataclass(frozen=True)
class Split:
    """Token rows in their order, the report of how they came about, and the chats for generated answers.

    `rows` is a mapped `datasets.Dataset` with the columns input_ids, labels and source (0: chat, 1: text).
    """

    rows: Any
    report: Report
    chats: Sequence[Chat] = ()

    def first(self) -> TokenRow:
        """The first row."""
        row = self.rows[0]
        return TokenRow(self.report.source, list(row["input_ids"]), list(row["labels"]))


@dataclass(frozen=True)
class Splits:
    """What a run trains and is judged on; `notes` are choices to be told."""

    train: Split
    val: Split | None
    test: Split | None
    notes: tuple[str, ...] = ()
    sources: Sources | None = None
    """Where several sources are mixed: the column `source` counts them, and is -1 in rows that are of none."""


def build_splits(
    config: RunConfig,
    paths: DataPaths,
    tokenizer: Any,
    *,
    max_seq_len: int,
    positions: int | None = None,
    today: date | None = None,
) -> Splits:
    """Every split of a run as token rows.

    `positions` are the most that the model has, if it has a limit: no longer max_seq_len is proposed. `today` is the
    day that a template is told.

    Raises:
        DataError: rows that cannot be used (unless they are to be skipped), too much lost to max_seq_len, or nothing
            to learn.
    """
    check_columns(config.data)
    parts = TokenizerParts.of(tokenizer)
    return _Builder(config, parts, max_seq_len, positions, today or date.today()).build(paths)


@dataclass(frozen=True)
class _Made:
    """The rows of one source as they were kept, with what became of the others."""

    rows: Any
    counts: Counts
    source: str
    chats: Sequence[Chat] = ()
    digests: Any = ()
    """Those of its rows' tokens, or its documents', sorted: uint64 of shape [rows]."""
    shared: dict[str, int] = field(default_factory=dict)
    key: str = ""
    """The option that names the source, where it is not the split's."""

    def named(self, split: str) -> str:
        """The source as the run YAML names it."""
        return f"{self.key or f'data.{split}_path'}={self.source}"

    @property
    def format(self) -> str:
        return ", ".join(name for name, _ in self.counts.formats.most_common()) or "unknown"


class _Builder:
    def __init__(
        self, config: RunConfig, tokenizer: TokenizerParts, max_seq_len: int, positions: int | None, today: date
    ) -> None:
        self._config, self._tokenizer, self._positions = config, tokenizer, positions
        self._max_seq_len, self._today = max_seq_len, today
        self._is_text = config.task_mode == "cpt"
        self._notes: list[str] = []

    def build(self, paths: DataPaths) -> Splits:
        """Train, validation and test, the validation split off the training rows where there is no file."""
        if paths.sources:
            return self._of_sources(paths)
        val = self._held_out(paths.val, "val")
        share = self._config.data.val_fraction
        if val is not None and share and self._config.task_mode != "cpt_mixed":
            self._notes.append(
                f"data.val_fraction={share:g} is not used: data.val_path={paths.val} has validation rows"
            )
        share = share if val is None else 0.0
        train, split_off = self._source(paths.train, "train", documents=self._is_text, held_share=share)
        test = self._held_out(paths.test, "test")
        self._judge(train, "train")
        if val is None and split_off is not None:
            self._judge(split_off, "val")
            val = split_off
        if share and val is None:
            self._notes.append(f"data.val_fraction={share} of {train.counts.kept} rows leaves no validation rows")
        _note_shared({"train": train, "val": val, "test": test})
        made_train = self._split(train)
        made_val = self._split(val) if val else None
        if self._config.task_mode == "cpt_mixed":
            assert paths.text is not None
            made_train, made_val = self._mixed(made_train, made_val, paths.text)
        return Splits(made_train, made_val, self._split(test) if test else None, (*paths.notes, *self._notes))

    def _recipe(self, *, documents: bool, held_share: float, keeps_chats: bool) -> Recipe:
        return Recipe(
            self._tokenizer,
            self._config.data,
            self._max_seq_len,
            self._today,
            documents=documents,
            held_share=held_share,
            keeps_chats=keeps_chats,
        )

    def _source(
        self, source: AnySource, split: str, *, documents: bool, held_share: float = 0.0
    ) -> tuple[_Made, _Made | None]:
        """The rows of a source, and those split off it."""
        if documents and held_share:
            few = self._few_documents(source, split)
            if few is not None:
                return self._ends_split_off(few, source, held_share)
        keeps = split != "train" or held_share > 0
        recipe = self._recipe(documents=documents, held_share=held_share, keeps_chats=keeps)
        built = build(source, recipe, split=split, workers=self._config.data.workers)
        kept = self._made(built, KEPT, str(source))
        if not kept.counts.rows:
            raise DataError(f"{source} has no rows")
        held = self._made(built, HELD, f"{held_share:g} of {source} by content hash") if held_share else None
        if held is not None:
            kept.counts.rows -= held.counts.rows
        return kept, held if held is not None and held.rows is not None else None

    def _made(self, built: Built, name: str, source: str) -> _Made:
        rows, counts = built.dataset(name), built.counts[name]
        if name == HELD:
            counts = dataclasses.replace(
                counts, formats=built.counts[KEPT].formats, rows=counts.kept + counts.too_long + counts.bad.total()
            )
        if rows is None or "chat" not in rows.column_names:
            return _Made(rows, counts, source, digests=built.digests(name))
        column = rows.with_format("arrow")
        places = [index for index, valid in enumerate(_is_valid(column)) if valid]
        chats = Chats(rows.select_columns("chat")["chat"], places)
        return _Made(rows.remove_columns("chat"), counts, source, chats, built.digests(name))

    # Several sources.

    def _of_sources(self, paths: DataPaths) -> Splits:
        """The rows of all sources, one after the other, with those held out of each; a file of val_path is of none."""
        common, test = self._held_out(paths.val, "val"), self._held_out(paths.test, "test")
        train: list[_Made] = []
        held: dict[int, _Made] = {}
        for at, source in enumerate(paths.sources):
            key = f"data.sources[{at}]"
            val = self._held_out(source.val, "val", key=f"{key}.val_path")
            share = self._config.data.val_fraction if val is None and common is None else 0.0
            made, split_off = self._source(source.train, "train", documents=self._is_text, held_share=share)
            train.append(dataclasses.replace(made, key=f"{key}.path"))
            self._judge(train[-1], "train")
            if val is None and split_off is not None:
                val = dataclasses.replace(split_off, key=f"{key}.path")
                self._judge(val, "val")
            if val is not None:
                held[at] = val
        vals = list(held.values()) if common is None else [common]
        _note_shared({"train": _as_one(train), "val": _as_one(vals), "test": test})
        names = tuple(source.name for source in paths.sources)
        kept = [self._no_more(_marked(self._split(made), at), at, names[at]) for at, made in enumerate(train)]
        options = self._config.data.sources
        sources = Sources(names, tuple(source.weight for source in options), tuple(len(split.rows) for split in kept))
        mix = sources.mix(seed=self._config.train.seed)
        if self._config.data.packing == "none" or self._is_text:
            self._notes += [f"Data train: {line}" for line in mix_table(mix)]
        of_val = list(held.items()) if common is None else [(-1, common)]
        held_out = [_marked(self._split(made), at) for at, made in of_val]
        judged = _marked(self._split(test), -1) if test else None
        notes = (*paths.notes, *self._notes)
        return Splits(_together(kept), _together(held_out) if held_out else None, judged, notes, sources)

    def _no_more(self, split: Split, at: int, name: str) -> Split:
        """The rows of a source that its max_rows leaves."""
        most = self._config.data.sources[at].max_rows
        places = drawn(len(split.rows), most, seed=self._config.train.seed)
        if places is None:
            return split
        self._notes.append(f"Data train: {most:,} of {len(split.rows):,} rows of {name} are used (max_rows)")
        return dataclasses.replace(split, rows=split.rows.select(places))

    def _held_out(self, source: AnySource | None, split: SplitName, *, key: str = "") -> _Made | None:
        """A held-out file's rows; None, which is logged, where plain text is trained and the file holds chats."""
        if source is None:
            return None
        if self._is_text and self._holds_chats(source, split):
            share = self._config.data.val_fraction
            instead = f"; {share:g} of the training text is" if share else "; data.val_fraction would split some off"
            self._notes.append(
                f"{key or f'data.{split}_path'}={source} holds chats and task_mode is cpt: it is not used"
                + (instead if split == "val" else "")
            )
            return None
        made, _ = self._source(source, split, documents=self._is_text)
        made = dataclasses.replace(made, key=key)
        self._judge(made, split)
        return made

    def _holds_chats(self, source: AnySource, split: str) -> bool:
        for part in data_files(source, split=split, text_wanted=True):
            rows, shape = first_format(read_part(part), self._config.data)
            if shape is not None:
                example = to_example(rename_columns(_last_row(rows), self._config.data.columns), shape)
                return isinstance(example, Chat) or (isinstance(example, BadRow) and shape.name != "text")
        return False

    # Judging.

    def _judge(self, made: _Made, split: str) -> None:
        """Raises DataError for bad rows that may not be skipped, rows of the wrong kind, and too much that is lost."""
        counts, data = made.counts, self._config.data
        if self._is_text and counts.chats:
            raise DataError(
                f"{made.named(split)}: task_mode is cpt, which trains plain text, and {counts.chats:,} "
                f"rows are chats ({made.format}); use task_mode=sft, or rows with a text column"
            )
        if counts.bad and data.on_bad_row == "fail":
            raise DataError(_bad_rows_message(made, split))
        if counts.kept == 0:
            raise DataError(_nothing_left_message(made, split, self._max_seq_len, self._positions))
        if split == "train" and _lost_fraction(counts) > data.max_lost_fraction:
            raise DataError(
                _lost_message(made, split, self._max_seq_len, self._positions, allowed=data.max_lost_fraction)
            )

    # Splits.

    def _split(self, made: _Made) -> Split:
        if self._is_text:
            return self._packed(made)
        if made.counts.texts:
            self._notes.append(
                f"{made.source}: {made.counts.texts:,} rows of plain text have no turns: every token is trained"
            )
        return Split(made.rows, _report(made), made.chats)

    def _packed(self, made: _Made) -> Split:
        """Documents as blocks of exactly max_seq_len tokens; a text shorter than one block is an error."""
        block = self._max_seq_len
        if made.rows is None:
            raise DataError(
                f"{made.source}: {made.counts.kept} documents are {made.counts.tokens:,} tokens, less than one block "
                f"of max_seq_len {block}; lower model.max_seq_len or give more text"
            )
        count = len(made.rows)
        tokens = count * block if count > 1 or len(made.rows[0]["input_ids"]) == block else made.counts.tokens
        left = made.counts.tokens - tokens
        self._notes.append(
            f"{made.source}: packed into {count:,} blocks of {block} tokens; the last {left:,} tokens fill none"
        )
        report = dataclasses.replace(_report(made), tokens=tokens, tokens_trained=tokens)
        return Split(made.rows, report)

    def _mixed(self, chats: Split, val: Split | None, source: AnySource) -> tuple[Split, Split | None]:
        """Chats and text in one split each; held-out text is judged beside held-out chats."""
        share = self._config.data.val_fraction or (HELD_TEXT_FRACTION if val is not None else 0.0)
        kept, held = self._source(source, "train", documents=True, held_share=share)
        if kept.counts.chats:
            raise DataError(f"data.text_path={source} holds {kept.format} rows; it takes plain text")
        if kept.counts.bad and self._config.data.on_bad_row == "fail":
            raise DataError(_bad_rows_message(kept, "text"))
        train = self._mix(chats, self._packed(kept))
        if val is None or held is None:
            return train, val
        text = self._packed(held)
        self._notes.append(
            f"Data val: {len(text.rows):,} blocks of held-out text ({text.report.source}) beside the chats"
        )
        return train, Split(_joined([val.rows, text.rows]), _sum(val.report, text.report), val.chats)

    def _mix(self, chats: Split, text: Split) -> Split:
        """All chats once, with as many text blocks between them as the ratio asks for, in a seeded order."""
        share = self._config.data.text_fraction
        count, blocks = len(chats.rows), len(text.rows)
        wanted = max(1, round(count * share / (1 - share)))
        if wanted > MAX_PASSES * blocks:
            raise DataError(
                f"data.text_fraction={share:g} of {count} chats asks for {wanted:,} text blocks, and "
                f"{text.report.source} has {blocks}: more than {MAX_PASSES} passes over it; lower it"
            )
        order = [*range(count), *(count + index % blocks for index in range(wanted))]
        random.Random(self._config.train.seed).shuffle(order)
        rows = _joined([chats.rows, text.rows]).select(order)
        self._notes.append(
            f"Data train: {count:,} chats and {wanted:,} text blocks ({share:g} of the sequences; "
            f"{wanted / blocks:.2g} passes over the text)"
        )
        added = wanted * self._max_seq_len
        report = dataclasses.replace(text.report, tokens=added, tokens_trained=added)
        return Split(rows, _sum(chats.report, report), chats.chats)

    # A few long documents.

    def _few_documents(self, source: AnySource, split: str) -> list[Text] | None:
        """The documents of a source that has only a few; None where it has more, or bad ones (which are judged)."""
        found: list[Text] = []
        for part in data_files(source, split=split, text_wanted=True):
            rows = read_part(part)
            first, shape = first_format(rows, self._config.data)
            for raw in itertools.chain(first, rows):
                example: Example | BadRow | None = None
                if not isinstance(raw, BadRow) and shape is not None:
                    example = to_example(rename_columns(raw, self._config.data.columns), shape, self._config.data)
                if not isinstance(example, Text) or len(found) + 1 >= FEW_DOCUMENTS:
                    return None
                found.append(example)
        return found

    def _ends_split_off(self, texts: Sequence[Text], source: AnySource, share: float) -> tuple[_Made, _Made | None]:
        """The end of each of a few long documents for validation."""
        recipe = self._recipe(documents=True, held_share=0.0, keeps_chats=False)
        renderer = Renderer(recipe.tokenizer, recipe.data, max_seq_len=self._max_seq_len, today=self._today)
        cuts = [int(len(text.text) * (1 - share)) for text in texts]
        pieces = {
            KEPT: [text.text[:cut] for text, cut in zip(texts, cuts, strict=True)],
            HELD: [text.text[cut:] for text, cut in zip(texts, cuts, strict=True)],
        }
        kept, held = (self._in_memory(renderer, pieces[name], is_held=name == HELD) for name in (KEPT, HELD))
        kept[1].rows = len(texts)
        made = _Made(kept[0], kept[1], str(source))
        if held[0] is None:
            return made, None
        return made, _Made(held[0], held[1], f"the last {share:g} of each document of {source}")

    def _in_memory(self, renderer: Renderer, texts: Sequence[str], *, is_held: bool) -> tuple[Any, Counts]:
        from datasets import Dataset, Features, List, Value

        whole = [text for text in texts if text.strip()]
        stream = [number for text in whole for number in renderer.documents([text])[0]]  # one text at a time in memory
        size = self._max_seq_len
        blocks = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
        if not blocks and is_held and stream:
            blocks = [stream]
        counts = Counts(rows=len(whole), kept=len(whole), texts=len(whole), tokens=len(stream))
        counts.formats["text"] = len(whole)
        features = Features(
            {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "source": Value("int8")}
        )
        columns = {"input_ids": blocks, "labels": blocks, "source": [1] * len(blocks)}
        return Dataset.from_dict(columns, features=features) if blocks else None, counts


def _note_shared(splits: Mapping[str, _Made | None]) -> None:
    """Note for each split how much of it stands in an earlier one too."""
    there = [(name, made) for name, made in splits.items() if made is not None]
    for (name, earlier), (_, later) in itertools.combinations(there, 2):
        count = len(np.intersect1d(earlier.digests, later.digests, assume_unique=True))
        if count:
            later.shared[name] = count


def _as_one(sources: Sequence[_Made]) -> _Made | None:
    """What several sources share with others: the first of them, with the digests of all; None where there is none."""
    if not sources:
        return None
    digests = np.unique(np.concatenate([made.digests for made in sources]))
    return dataclasses.replace(sources[0], digests=digests)


def _marked(split: Split, source: int) -> Split:
    """A split whose rows say of which source they are."""
    from datasets import Value

    rows = split.rows.select_columns(["input_ids", "labels"])
    rows = rows.add_column("source", np.full(len(rows), source, np.int8), feature=Value("int8"))
    return dataclasses.replace(split, rows=rows)


def _together(splits: Sequence[Split]) -> Split:
    """Splits one after the other."""
    report = functools.reduce(_sum, [split.report for split in splits])
    lost, whole = report.trained_tokens_lost, report.trained_tokens_lost + report.tokens_trained
    report = dataclasses.replace(report, lost_fraction=lost / whole if whole else 0.0)
    chats = [split.chats for split in splits if split.chats]
    rows = _joined([split.rows for split in splits])
    return Split(rows, report, chats[0] if len(chats) == 1 else _Chain(chats))


def _last_row(rows: Sequence[Any]) -> Any:
    return next(row for row in reversed(rows) if not isinstance(row, BadRow))


def _is_valid(dataset: Any) -> Any:
    """Whether each row has a conversation beside it."""
    for table in dataset.select_columns("chat").iter(batch_size=10_000):
        yield from table["chat"].is_valid().to_pylist()


def _joined(datasets: Sequence[Any]) -> Any:
    from datasets import concatenate_datasets

    return concatenate_datasets([dataset.select_columns(["input_ids", "labels", "source"]) for dataset in datasets])


def _report(made: _Made) -> Report:
    counts = made.counts
    dropped = Counter(counts.bad) + Counter(counts.left_out)
    if counts.too_long:
        dropped["nothing trained is left within max_seq_len, or too long"] += counts.too_long
    return Report(
        source=made.source,
        format=made.format,
        rows_in=counts.rows,
        rows_kept=counts.kept,
        dropped=dict(dropped),
        rows_cut=counts.cut_rows,
        tokens=counts.tokens,
        tokens_trained=counts.trained,
        tokens_cut=counts.tokens_cut,
        trained_tokens_lost=counts.lost,
        lost_fraction=_lost_fraction(counts),
        answers_merged=counts.merged,
        methods=dict(counts.methods),
        untrained_turns=counts.untrained_turns,
        stripped_think=counts.stripped_think,
        special_rows=counts.special_rows,
        repeated=counts.repeated,
        shared=made.shared,
        noted={f"{note} (first: {one_line(counts.first_noted[note])})": many for note, many in counts.notes.items()},
    )


def _sum(one: Report, other: Report) -> Report:
    """Both reports as one."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(Report):
        mine, theirs = getattr(one, item.name), getattr(other, item.name)
        if isinstance(mine, dict):
            values[item.name] = dict(Counter(mine) + Counter(theirs))
        elif isinstance(mine, str):
            values[item.name] = f"{mine} + {theirs}"
        else:
            values[item.name] = mine + theirs
    return Report(**{**values, "lost_fraction": one.lost_fraction})


def _lost_fraction(counts: Counts) -> float:
    return counts.lost / counts.whole_trained if counts.whole_trained else 0.0


def _bad_rows_message(made: _Made, split: str) -> str:
    counts = made.counts
    total = counts.bad.total()
    reasons = "; ".join(f"{count} x {reason}" for reason, count in counts.bad.most_common(6))
    shown = "\n".join(f"  {row}" for row in counts.first_bad[:SHOWN_BAD_ROWS])
    more = f"\n  … and {total - SHOWN_BAD_ROWS:,} more" if total > SHOWN_BAD_ROWS else ""
    more += "".join(f"\n  {line}" for line in roles_said(counts.bad, counts.roles))
    return (
        f"{total:,} of {counts.rows:,} rows of {made.named(split)} cannot be used ({reasons}):\n"
        f"{shown}{more}\nmend them, or leave them out, counted, with data.on_bad_row=skip"
    )


def _nothing_left_message(made: _Made, split: str, max_seq_len: int, positions: int | None) -> str:
    counts = made.counts
    if counts.too_long and not counts.bad:
        more = positions is None or positions > max_seq_len
        way = "raise model.max_seq_len, or keep" if more else f"the model has {positions:,} positions; shorten, or keep"
        return (
            f"{made.named(split)}: all {counts.too_long:,} rows lose their answer at max_seq_len "
            f"{max_seq_len} (shortest prompt: {counts.shortest_prompt:,} tokens; the first row is "
            f"{counts.first_too_long}); {way} the answers with data.truncate=prompt"
        )
    every = counts.bad + counts.left_out
    reasons = "; ".join(f"{count} x {reason}" for reason, count in every.most_common(6))
    return f"{made.named(split)}: no row is left of {counts.rows:,} ({reasons or 'nothing was in it'})"


def _lost_message(made: _Made, split: str, max_seq_len: int, positions: int | None, *, allowed: float) -> str:
    counts = made.counts
    return (
        f"{made.named(split)}: {counts.lost:,} of {counts.whole_trained:,} trained tokens "
        f"({_lost_fraction(counts):.1%}) are lost to max_seq_len {max_seq_len}, more than "
        f"data.max_lost_fraction={allowed:g}: {counts.cut_rows:,} rows are cut and {counts.too_long:,} lose all. "
        f"{_longer_limits(counts, max_seq_len, positions)}, or keep the ends of rows with data.truncate=prompt, or "
        "accept the loss with data.max_lost_fraction"
    )


def _longer_limits(counts: Counts, max_seq_len: int, positions: int | None) -> str:
    """Which longer limits would keep how much, as far as the model has positions."""
    most = -(-counts.cost.longest // 64) * 64
    if positions is not None:
        if positions <= max_seq_len:
            return f"The model has {positions:,} positions: split or shorten the rows"
        most = min(most, positions)
    said: list[str] = []
    limit = max_seq_len
    best = 1 - _lost_fraction(counts)
    while limit < most and best < 1:
        limit = min(limit * 2, most)
        short = counts.whole_trained - counts.cost.trained
        kept = (short + counts.cost.kept_share(limit) * counts.cost.trained) / counts.whole_trained
        if kept > best + 1e-9:  # a length that keeps no more is no way out
            said.append(f"{limit} keeps {'all' if kept == 1 else f'{kept:.2%}'}")
            best = kept
    if said:
        return f"model.max_seq_len={', '.join(said)}"
    if most == positions:
        return f"The model's {positions:,} positions keep no more: split or shorten the rows"
    return "Raise model.max_seq_len"
