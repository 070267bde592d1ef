"""Splits of token rows with a report of everything that was left out, cut, packed or mixed.

sft: chats with their loss masks. cpt: documents joined by the end-of-text token and cut into full blocks, every
token trained. cpt_mixed: both, in a given ratio. The rows themselves are in the token cache (`build.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.build.arrow_rows import chat_of
from sft_play.data.build.build import HELD, KEPT, Built, Recipe, build
from sft_play.data.build.mixing import MAX_PASSES, Sources, drawn, mix_table
from sft_play.data.build.stats import RowStats, note_shared
from sft_play.data.checks import judge_split
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.files import AnySource, DataPaths, part_split
from sft_play.data.sources.formats import Chat, Text, require_known_columns
from sft_play.errors import DataError

SplitName = Literal["train", "val", "test"]
# With fewer documents the validation share is the end of each: chosen by hash, it might be all of them or none.
FEW_DOCUMENTS = 20
# Share of the text of cpt_mixed that is held out where the chats have validation rows and val_fraction is 0.
HELD_TEXT_FRACTION = 0.05


class Chats:
    """The conversations of a split's rows, read one at a time from `column`: a mapped data set of the column `chat`
    alone, with a row for each of the split's, null where it is none."""

    def __init__(self, column: Any = None) -> None:
        self.column = column
        tables = () if column is None else column.with_format("arrow").iter(batch_size=10_000)
        is_chat = itertools.chain.from_iterable(table["chat"].is_valid().to_pylist() for table in tables)
        # The number of each conversation's row in its split.
        self.rows = [place for place, valid in enumerate(is_chat) if valid]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Chat:
        return chat_of(self.column[self.rows[index]]["chat"])


@dataclass(frozen=True)
class Split:
    """Token rows, the counts of what they were made from, and the chats for generated answers. `rows` is a mapped
    `datasets.Dataset` with the columns input_ids, labels and source (0: chat, 1: text); None where none is left."""

    rows: Any
    report: RowStats
    chats: Chats = field(default_factory=Chats)
    # The option that names the source, where it is not the split's.
    key: str = ""

    def first(self) -> TokenRow:
        """The first row."""
        row = self.rows[0]
        return TokenRow(self.report.source, list(row["input_ids"]), list(row["labels"]))


@dataclass(frozen=True)
class Splits:
    """What a run trains on and is evaluated on; `notes` are choices for the log."""

    train: Split
    val: Split | None
    test: Split | None
    notes: tuple[str, ...] = ()
    # Where several sources are mixed: the column `source` is their number, -1 in rows of none of them.
    sources: Sources | None = None


def build_splits(
    config: RunConfig,
    paths: DataPaths,
    tokenizer: Any,
    *,
    max_seq_len: int,
    positions: int | None = None,
    today: date | None = None,
) -> Splits:
    """Every split of a run as token rows. `positions`: how many the model has, if it has a limit; no longer max_seq_len
    is proposed. `today`: the date that templates are given. Raises DataError where `judge_split` fails."""
    require_known_columns(config.data)
    parts = TokenizerParts.from_tokenizer(tokenizer)
    return _Builder(config, parts, max_seq_len, positions, today or date.today()).build(paths)


def survey_source(
    config: RunConfig, source: AnySource, part: str, tokenizer: Any, *, max_seq_len: int, has_val: bool
) -> RowStats:
    """The counts of every row of a part of `DataPaths.named_paths` that a run with this config trains on, from the cache or
    built now. Raises DataError as `build` does."""
    require_known_columns(config.data)
    builder = _Builder(config, TokenizerParts.from_tokenizer(tokenizer), max_seq_len, None, date.today())
    return builder.survey(source, part, has_val=has_val)


class _Builder:
    def __init__(
        self, config: RunConfig, tokenizer: TokenizerParts, max_seq_len: int, positions: int | None, today: date
    ) -> None:
        self._config, self._tokenizer, self._positions = config, tokenizer, positions
        self._max_seq_len, self._today = max_seq_len, today
        self._is_text = config.task_mode == "cpt"
        self._notes: list[str] = []

    def build(self, paths: DataPaths) -> Splits:
        """Train, validation and test; without a validation file, rows are split off the training rows."""
        if paths.sources:
            return self._of_sources(paths)
        val = self._held_out(paths.val, "val")
        share = self._config.data.val_fraction
        # with cpt_mixed the share still holds for the text, of which no validation file is given
        if val is not None and share and self._config.task_mode != "cpt_mixed":
            has = f"data.val_path={paths.val} has validation rows"
            self._notes.append(f"data.val_fraction={share:g} is not used: {has}")
        share = share if val is None else 0.0  # rows of val_path are enough
        train, split_off = self._source(paths.train, "train", documents=self._is_text, held_share=share)
        test = self._held_out(paths.test, "test")
        self._judge(train, "train")
        if val is None and split_off is not None:
            self._judge(split_off, "val")
            val = split_off
        if share and val is None:
            self._notes.append(f"data.val_fraction={share} of {train.report.kept} rows leaves no validation rows")
        note_shared([split.report for split in (train, val, test) if split is not None])
        train, val = self._finished(train), self._finished(val) if val else None
        if self._config.task_mode == "cpt_mixed":
            assert paths.text is not None
            train, val = self._mixed(train, val, paths.text)
        return Splits(train, val, self._finished(test) if test else None, (*paths.notes, *self._notes))

    def survey(self, source: AnySource, part: str, *, has_val: bool) -> RowStats:
        """The counts of a part of `DataPaths.named_paths`; `has_val` says that validation rows are given for it."""
        share = 0.0
        if part == "text":
            share = self._config.data.val_fraction or (HELD_TEXT_FRACTION if has_val else 0.0)
        elif part_split(part) == "train" and not has_val:
            share = self._config.data.val_fraction
        split = "train" if part == "text" else part_split(part)
        built = self._built(source, split, documents=self._is_text or part == "text", held_share=share)
        survey = built.stats[KEPT].with_held(built.stats[HELD])
        survey.source, survey.split = str(source), part_split(part)
        return survey

    def _built(self, source: AnySource, split: str, *, documents: bool, held_share: float) -> Built:
        recipe = Recipe(
            self._tokenizer,
            self._config.data,
            self._max_seq_len,
            self._today,
            documents=documents,
            held_share=held_share,
            keeps_chats=split != "train" or held_share > 0,  # needed where answers are generated
            task_mode=self._config.task_mode,
        )
        return build(source, recipe, split=split, workers=self._config.data.workers)

    def _source(
        self, source: AnySource, split: str, *, documents: bool, held_share: float = 0.0
    ) -> tuple[Split, Split | None]:
        if documents and held_share and (few := self._few_documents(source, split)) is not None:
            return self._ends_split_off(few, source, held_share)
        built = self._built(source, split, documents=documents, held_share=held_share)
        kept = _of_cache(built, KEPT, str(source))
        if not kept.report.rows:
            raise DataError(f"{source} has no rows")
        if not held_share:
            return kept, None
        held = _of_cache(built, HELD, f"{held_share:g} of {source} by content hash")
        # the build counts every row it reads on both sides; those that cannot be read are on the kept one
        held.report.rows = held.report.kept + held.report.too_long + held.report.unmasked.total()
        kept.report.rows -= held.report.rows
        return kept, held if held.rows is not None else None

    # Several sources.

    def _of_sources(self, paths: DataPaths) -> Splits:
        common, test = self._held_out(paths.val, "val"), self._held_out(paths.test, "test")
        train: list[Split] = []
        held: dict[int, Split] = {}
        for at, source in enumerate(paths.sources):
            key = f"data.sources[{at}]"
            val = self._held_out(source.val, "val", key=f"{key}.val_path")
            share = self._config.data.val_fraction if val is None and common is None else 0.0
            kept, split_off = self._source(source.train, "train", documents=self._is_text, held_share=share)
            train.append(dataclasses.replace(kept, key=f"{key}.path"))
            self._judge(train[-1], "train")
            if val is None and split_off is not None:
                val = dataclasses.replace(split_off, key=f"{key}.path")
                self._judge(val, "val")
            if val is not None:
                held[at] = val
        vals = list(held.values()) if common is None else [common]
        note_shared([split.report for split in (*train, *vals, test) if split is not None])
        names = tuple(source.name for source in paths.sources)
        used = [self._limited(_marked(self._finished(split), at), at, names[at]) for at, split in enumerate(train)]
        weights = tuple(source.weight for source in self._config.data.sources)
        sources = Sources(names, weights, tuple(len(split.rows) for split in used))
        mix = sources.mix(seed=self._config.train.seed)
        # packed rows are mixed by packs, whose table the trainer logs once they are made
        if self._config.data.packing == "none" or self._is_text:
            self._notes += [f"Data train: {line}" for line in mix_table(mix)]
        numbered = held.items() if common is None else [(-1, common)]  # -1: of no source
        held_out = [_marked(self._finished(split), at) for at, split in numbered]
        tested = _marked(self._finished(test), -1) if test else None
        notes = (*paths.notes, *self._notes)
        return Splits(_together(used), _together(held_out) if held_out else None, tested, notes, sources)

    def _limited(self, split: Split, at: int, name: str) -> Split:
        most = self._config.data.sources[at].max_rows
        places = drawn(len(split.rows), most, seed=self._config.train.seed)
        if places is None:
            return split
        self._notes.append(f"Data train: {most:,} of {len(split.rows):,} rows of {name} are used (max_rows)")
        return dataclasses.replace(split, rows=split.rows.select(places))

    def _held_out(self, source: AnySource | None, split: SplitName, *, key: str = "") -> Split | None:
        if source is None:
            return None
        rows, _ = self._source(source, split, documents=self._is_text)
        rows = dataclasses.replace(rows, key=key)
        self._judge(rows, split)
        return rows

    # Judging.

    def _judge(self, rows: Split, split: str) -> None:
        stats, data, key = rows.report, self._config.data, rows.key or f"data.{split}_path"
        stats.split = split
        if self._is_text and stats.chats:
            raise DataError(
                f"{key}={stats.source}: task_mode is cpt, which trains plain text, and {stats.chats:,} "
                f"rows are chats ({stats.format}); use task_mode=sft, rows with a text column, or {key}=null"
            )
        for finding in judge_split(stats, data, max_seq_len=self._max_seq_len, positions=self._positions):
            if finding.verdict == "FAIL":
                raise DataError(f"{key}: {finding.found}\n{finding.remedy}")
        if stats.kept == 0:
            every = stats.unusable + stats.left_out
            reasons = "; ".join(f"{count} x {reason}" for reason, count in every.most_common(6))
            raise DataError(f"{key}: no row is left of {stats.rows:,} of {stats.source} ({reasons})")

    # Splits.

    def _finished(self, split: Split) -> Split:
        if self._is_text:
            return self._packed(split)
        stats = split.report
        if stats.texts:
            self._notes.append(
                f"{stats.source}: {stats.texts:,} rows of plain text have no turns: every token is trained"
            )
        return split

    def _packed(self, split: Split) -> Split:
        block, stats = self._max_seq_len, split.report
        if split.rows is None:
            raise DataError(
                f"{stats.source}: {stats.kept} documents are {stats.tokens:,} tokens, less than one block "
                f"of max_seq_len {block}; lower model.max_seq_len or give more text"
            )
        count = len(split.rows)
        # a single block may be shorter: a held-out text of less than one (`arrow_rows.write_blocks`)
        tokens = count * block if count > 1 or len(split.rows[0]["input_ids"]) == block else stats.tokens
        left = stats.tokens - tokens
        self._notes.append(
            f"{stats.source}: packed into {count:,} blocks of {block} tokens; the last {left:,} tokens fill none"
        )
        return dataclasses.replace(split, report=dataclasses.replace(stats, tokens=tokens, trained=tokens))

    def _mixed(self, chats: Split, val: Split | None, source: AnySource) -> tuple[Split, Split | None]:
        share = self._config.data.val_fraction or (HELD_TEXT_FRACTION if val is not None else 0.0)
        kept, held = self._source(source, "train", documents=True, held_share=share)
        if kept.report.chats:
            raise DataError(f"data.text_path={source} holds {kept.report.format} rows; it takes plain text")
        self._judge(kept, "text")
        train = self._mix(chats, self._packed(kept))
        if val is None or held is None:
            return train, val
        text = self._packed(held)
        self._notes.append(
            f"Data val: {len(text.rows):,} blocks of held-out text ({text.report.source}) beside the chats"
        )
        return train, Split(_joined([val.rows, text.rows]), val.report.beside(text.report), val.chats)

    def _mix(self, chats: Split, text: Split) -> Split:
        share = self._config.data.text_fraction
        count, blocks = len(chats.rows), len(text.rows)
        wanted = max(1, round(count * share / (1 - share)))
        if wanted > MAX_PASSES * blocks:
            raise DataError(
                f"data.text_fraction={share:g} of {count} chats asks for {wanted:,} text blocks, and "
                f"{text.report.source} has {blocks}: more than {MAX_PASSES} passes over it; lower it"
            )
        # rows are numbered with the chats first; text is taken in passes over all its blocks
        order = [*range(count), *(count + index % blocks for index in range(wanted))]
        random.Random(self._config.train.seed).shuffle(order)
        rows = _joined([chats.rows, text.rows]).select(order)
        self._notes.append(
            f"Data train: {count:,} chats and {wanted:,} text blocks ({share:g} of the sequences; "
            f"{wanted / blocks:.2g} passes over the text)"
        )
        added = wanted * self._max_seq_len
        report = dataclasses.replace(text.report, tokens=added, trained=added)
        return Split(rows, chats.report.beside(report), chats.chats)

    # A few long documents.

    def _few_documents(self, source: AnySource, split: str) -> list[Text] | None:
        """The documents of a source that has only a few; None where it has more, or bad ones (judged later)."""
        documents: list[Text] = []
        for _, example in ExampleReader(source, self._config.data, split=split, wants_text=True).numbered_examples():
            if not isinstance(example, Text) or len(documents) + 1 >= FEW_DOCUMENTS:
                return None
            documents.append(example)
        return documents

    def _ends_split_off(self, texts: Sequence[Text], source: AnySource, share: float) -> tuple[Split, Split | None]:
        renderer = Renderer(self._tokenizer, self._config.data, max_seq_len=self._max_seq_len, today=self._today)
        cuts = [int(len(text.text) * (1 - share)) for text in texts]
        pieces = {
            KEPT: [text.text[:cut] for text, cut in zip(texts, cuts, strict=True)],
            HELD: [text.text[cut:] for text, cut in zip(texts, cuts, strict=True)],
        }
        kept, held = (self._in_memory(renderer, pieces[name], is_held=name == HELD) for name in (KEPT, HELD))
        kept.report.rows, kept.report.source = len(texts), str(source)
        held.report.source = f"the last {share:g} of each document of {source}"
        return kept, held if held.rows is not None else None

    def _in_memory(self, renderer: Renderer, texts: Sequence[str], *, is_held: bool) -> Split:
        from datasets import Dataset, Features, List, Value

        whole = [text for text in texts if text.strip()]
        stream = [number for text in whole for number in renderer.tokenise_documents([text])[0]]  # one by one, for the memory
        size = self._max_seq_len
        blocks = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
        if not blocks and is_held and stream:
            blocks = [stream]
        stats = RowStats(rows=len(whole), kept=len(whole), texts=len(whole), tokens=len(stream))
        stats.format = "text" if whole else stats.format
        features = Features(
            {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "source": Value("int8")}
        )
        # every token is trained, and 1 is the number of text
        columns = {"input_ids": blocks, "labels": blocks, "source": [1] * len(blocks)}
        return Split(Dataset.from_dict(columns, features=features) if blocks else None, stats)


def _of_cache(built: Built, name: str, source: str) -> Split:
    rows, stats = built.dataset(name), built.stats[name]
    stats.source = source
    if rows is None or "chat" not in rows.column_names:
        return Split(rows, stats)
    return Split(rows.remove_columns("chat"), stats, Chats(rows.select_columns("chat")))


def _marked(split: Split, source: int) -> Split:
    from datasets import Value

    rows = split.rows.select_columns(["input_ids", "labels"])
    rows = rows.add_column("source", np.full(len(rows), source, np.int8), feature=Value("int8"))
    return dataclasses.replace(split, rows=rows)


def _together(splits: Sequence[Split]) -> Split:
    report = functools.reduce(RowStats.beside, [split.report for split in splits])
    columns = [split.chats.column for split in splits]
    chats = Chats() if any(column is None for column in columns) else Chats(_joined(columns))
    return Split(_joined([split.rows for split in splits]), report, chats)


def _joined(datasets: Sequence[Any]) -> Any:
    from datasets import concatenate_datasets

    return concatenate_datasets([one.select_columns(sorted(one.column_names)) for one in datasets])
