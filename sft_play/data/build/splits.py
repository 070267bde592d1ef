"""Splits of token rows with a report of everything that was left out, cut, packed or mixed.

sft: chats with their loss masks. cpt: documents joined by the end-of-text token and cut into full
blocks, every token trained. cpt_mixed: both, in a given ratio. The rows themselves are in the
token cache (`build.py`).
"""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from fractions import Fraction
from typing import Any

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.build.build import (
    HELD_OUT_SIDE,
    KEPT_SIDE,
    BuildRecipe,
    BuiltRows,
    build_rows,
    chat_from_json,
)
from sft_play.data.build.packing import RowIndices
from sft_play.data.build.stats import RowStats, count_shared_rows
from sft_play.data.checks import judge_split
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.files import AnySource, DataPaths, data_part_split
from sft_play.data.sources.formats import Chat, Text, require_known_columns
from sft_play.data.sources.images import Picture
from sft_play.errors import DataError

# Which rows of several sources an epoch has: exact shares, every row of a source as often as the
# others of it.
#
# All of it is arithmetic on counts and a seed: the rows of an epoch follow from its number alone,
# so that a resumed run has those of an unbroken one, whatever the ranks.

# A mix that needs more passes over the same rows in one epoch is refused as a mistake.
MAX_SOURCE_PASSES = 1_000


def share_counts(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` divided by the weights, by largest remainder: the counts add up to it, and each is
    less than one away from its exact share; of equal remainders the first gets the row."""
    # Fractions, since rounding of floats would hand the last row to another source on another
    # machine.
    exact_weights = [Fraction(weight) for weight in weights]
    shares = [total * weight / sum(exact_weights) for weight in exact_weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(
        range(len(shares)), key=lambda index: (counts[index] - shares[index], index)
    )
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def draw_rows(count: int, max_rows: int | None, *, seed: int) -> RowIndices | None:
    """The rows of a source that `max_rows` keeps, in their order; None where it keeps all."""
    if max_rows is None or max_rows >= count:
        return None
    # in the file's order, so that memory-mapped rows are read forwards
    return np.sort(np.random.default_rng([seed, count, max_rows]).permutation(count)[:max_rows])


@dataclass(frozen=True)
class SourceMix:
    """The sources of a run: rows that each has, and rows of each in an epoch. Rows are numbered
    through all sources, one source after the other. Each source goes through its rows in passes,
    each pass in an order of its own, and an epoch continues where the one before it ended: no row
    comes a second time in an epoch before all have come once, nor an (n + 1)th time before all have
    come n times."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows_per_epoch: tuple[int, ...]
    seed: int
    _orders: dict[tuple[int, int], RowIndices] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def total(self) -> int:
        """Rows of an epoch."""
        return sum(self.rows_per_epoch)

    def epoch_rows(self, epoch: int) -> RowIndices:
        """The rows of an epoch, one source after the other."""
        rows = [np.zeros(0, dtype=np.int64)]
        starts = np.cumsum([0, *self.sizes[:-1]]).tolist()
        for index, (start, size, count) in enumerate(
            zip(starts, self.sizes, self.rows_per_epoch, strict=True)
        ):
            first, end = epoch * count, (epoch + 1) * count  # places in the endless row of passes
            if count:
                passes = [
                    self._pass_order(index, number)
                    for number in range(first // size, -(-end // size))
                ]
                skipped = first % size
                rows.append(start + np.concatenate(passes)[skipped : skipped + count])
        return np.concatenate(rows)

    # The order of a source's rows in one pass over them: random, but rows that the epoch already
    # had come last. An epoch that begins in the middle of a pass takes the rest of it, and of the
    # next pass first what it lacks.
    def _pass_order(self, source_index: int, pass_index: int) -> RowIndices:
        size, count = self.sizes[source_index], self.rows_per_epoch[source_index]
        # each depends on one before it: a loop, since recursion would be deep
        for current in range(pass_index + 1):
            if (source_index, current) in self._orders:
                continue
            order = np.random.default_rng([self.seed, source_index, current]).permutation(size)
            # This pass begins in epoch (current * size) // count. That epoch's first row is
            # `skipped` rows into pass `earlier_pass`: its rows after those are what the epoch
            # already had.
            earlier_pass, skipped = divmod(current * size // count * count, size)
            if skipped and earlier_pass != current:
                is_repeated = np.isin(order, self._orders[source_index, earlier_pass][skipped:])
                order = np.concatenate([order[~is_repeated], order[is_repeated]])
            self._orders[source_index, current] = order
        return self._orders[source_index, pass_index]


@dataclass(frozen=True)
class MixedSources:
    """The sources of a run in their order: names, weights (None: each row once an epoch), and rows
    as they are kept."""

    names: tuple[str, ...]
    weights: tuple[float | None, ...]
    sizes: tuple[int, ...]

    def mix(self, *, seed: int, sizes: Sequence[int] | None = None) -> SourceMix:
        """Divide an epoch, as many rows as all sources have together (`sizes`: packed rows), among
        them by weight. Raises DataError if a weight leaves a source no row, or asks for more than
        `MAX_SOURCE_PASSES` over it."""
        sizes = tuple(self.sizes if sizes is None else sizes)
        weights = [
            size if weight is None else weight
            for size, weight in zip(sizes, self.weights, strict=True)
        ]
        per_epoch = share_counts(weights, sum(sizes))
        for name, weight, size, count in zip(self.names, weights, sizes, per_epoch, strict=True):
            share = weight / sum(weights)
            message_start = f"data.sources: the weight {weight:g} of {name}, {share:.3g} of all,"
            if not count:
                raise DataError(
                    f"{message_start} gives it no row of an epoch of {sum(sizes):,}; raise it, or "
                    f"leave {name} out"
                )
            if count > MAX_SOURCE_PASSES * size:
                raise DataError(
                    f"{message_start} asks for {count:,} rows an epoch, and it has {size:,}: more "
                    f"than {MAX_SOURCE_PASSES:,} passes over them; lower it, or limit the other "
                    "sources with max_rows"
                )
        return SourceMix(self.names, sizes, per_epoch, seed)


def format_mix_table(mix: SourceMix) -> list[str]:
    """Format a table of the sources: rows, rows in an epoch, share of the epoch, passes over the
    source."""
    width = max(len("source"), *map(len, mix.names))
    return [
        f"{'source':<{width}}  {'rows':>10}  {'an epoch':>10}  {'share':>7}  {'passes':>7}",
        *(
            f"{name:<{width}}  {size:>10,}  {count:>10,}  {count / mix.total:>7.2%}  "
            f"{count / size:>7.3g}"
            for name, size, count in zip(mix.names, mix.sizes, mix.rows_per_epoch, strict=True)
        ),
    ]


# With fewer documents the validation share is the end of each: chosen by hash, it might be all of
# them or none.
MIN_HASHED_DOCUMENTS = 20
# Share of the text of cpt_mixed that is held out where the chats have validation rows and
# val_fraction is 0.
HELD_OUT_TEXT_FRACTION = 0.05


class SplitChats:
    """The conversations of a split's rows, read one at a time from `dataset`: mapped, with the
    column `chat` alone, with a row for each of the split's, null where it is none."""

    def __init__(self, dataset: Any = None) -> None:
        self.dataset = dataset
        tables = () if dataset is None else dataset.with_format("arrow").iter(batch_size=10_000)
        is_chat = itertools.chain.from_iterable(
            table["chat"].is_valid().to_pylist() for table in tables
        )
        # The number of each conversation's row in its split.
        self.row_indices = [index for index, is_valid in enumerate(is_chat) if is_valid]

    def __len__(self) -> int:
        return len(self.row_indices)

    def __getitem__(self, index: int) -> Chat:
        return chat_from_json(self.dataset[self.row_indices[index]]["chat"])


@dataclass(frozen=True)
class DataSplit:
    """Token rows, the counts of what they were made from, and the chats for generated answers.
    `rows` is a mapped `datasets.Dataset` with the columns input_ids, labels and source (0: chat, 1:
    text); None where none is left."""

    rows: Any
    stats: RowStats
    chats: SplitChats = field(default_factory=SplitChats)
    # The option that names the source, where it is not the split's.
    option_key: str = ""

    def first_row(self) -> TokenRow:
        """The first row."""
        row = self.rows[0]
        images = tuple(Picture(**picture) for picture in row.get("images") or ())
        return TokenRow(
            self.stats.source, list(row["input_ids"]), list(row["labels"]), images=images
        )


@dataclass(frozen=True)
class DataSplits:
    """What a run trains on and is evaluated on; `notes` are choices for the log."""

    train: DataSplit
    val: DataSplit | None
    test: DataSplit | None
    notes: tuple[str, ...] = ()
    # Where several sources are mixed: the column `source` is their number, -1 in rows of none of
    # them.
    sources: MixedSources | None = None

    @property
    def named(self) -> dict[str, DataSplit]:
        """The splits that there are, by their names."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: split for name, split in splits.items() if split is not None}

    @property
    def has_images(self) -> bool:
        """Whether rows of any split have images."""
        return any("images" in split.rows.column_names for split in self.named.values())


def build_splits(
    config: RunConfig,
    paths: DataPaths,
    tokenizer: Any,
    *,
    max_seq_len: int,
    max_positions: int | None = None,
    today: date | None = None,
) -> DataSplits:
    """Build every split of a run as token rows. `max_positions`: the most that the model has, if
    any; no longer max_seq_len is proposed. `today`: the date that templates are given. Raises
    DataError where `judge_split` fails."""
    require_known_columns(config.data)
    return _SplitBuilder(
        config,
        TokenizerParts.from_tokenizer(tokenizer),
        max_seq_len,
        max_positions,
        today or date.today(),
    ).build(paths)


def count_source_rows(
    config: RunConfig,
    source: AnySource,
    data_part: str,
    tokenizer: Any,
    *,
    max_seq_len: int,
    has_val: bool,
) -> RowStats:
    """Count the rows that a run makes of one part of `DataPaths.named_paths`, from the cache or
    built now; `has_val`: the chats have validation rows. Raises DataError as `build_splits`
    does."""
    require_known_columns(config.data)
    builder = _SplitBuilder(
        config, TokenizerParts.from_tokenizer(tokenizer), max_seq_len, None, date.today()
    )
    split, share, is_text = data_part_split(data_part), 0.0, data_part == "text"
    if is_text:
        split, share = "train", config.data.val_fraction or HELD_OUT_TEXT_FRACTION * has_val
    elif split == "train" and not has_val:
        share = config.data.val_fraction
    built_rows = builder.build_rows(
        source, split, is_document=is_text or config.task_mode == "cpt", held_out_share=share
    )
    stats = built_rows.stats[KEPT_SIDE]
    stats.add_held_out(built_rows.stats[HELD_OUT_SIDE])
    stats.source, stats.split = str(source), data_part_split(data_part)
    return stats


class _SplitBuilder:
    def __init__(
        self,
        config: RunConfig,
        tokenizer: TokenizerParts,
        max_seq_len: int,
        max_positions: int | None,
        today: date,
    ) -> None:
        self._config, self._tokenizer, self._max_positions = config, tokenizer, max_positions
        self._max_seq_len, self._today = max_seq_len, today
        self._trains_text = config.task_mode == "cpt"
        self._notes: list[str] = []

    def build(self, paths: DataPaths) -> DataSplits:
        if paths.sources:
            return self._build_from_sources(paths)
        val = self._build_held_out(paths.val, "val")
        share = self._config.data.val_fraction
        # with cpt_mixed the share still holds for the text, which has no validation file
        if val is not None and share and self._config.task_mode != "cpt_mixed":
            self._notes.append(
                f"data.val_fraction={share:g} is not used: data.val_path={paths.val} has "
                "validation rows"
            )
        share = share if val is None else 0.0  # rows of val_path are enough
        train, split_off = self._build_source(
            paths.train, "train", is_document=self._trains_text, held_out_share=share
        )
        test = self._build_held_out(paths.test, "test")
        self._check_split(train, "train")
        if val is None and split_off is not None:
            self._check_split(split_off, "val")
            val = split_off
        if share and val is None:
            self._notes.append(
                f"data.val_fraction={share} of {train.stats.kept_rows} rows leaves no validation "
                "rows"
            )
        count_shared_rows([split.stats for split in (train, val, test) if split is not None])
        train, val = self._finish_split(train), self._finish_split(val) if val else None
        if self._config.task_mode == "cpt_mixed":
            assert paths.text is not None
            train, val = self._mix_text_in(train, val, paths.text)
        return DataSplits(
            train, val, self._finish_split(test) if test else None, (*paths.notes, *self._notes)
        )

    def build_rows(
        self,
        source: AnySource,
        split: str,
        *,
        is_document: bool,
        text_span: tuple[float, float] = (0.0, 1.0),
        held_out_share: float = 0.0,
    ) -> BuiltRows:
        recipe = BuildRecipe(
            self._tokenizer,
            self._config.data,
            self._max_seq_len,
            self._today,
            is_document=is_document,
            text_span=text_span,
            held_out_share=held_out_share,
            keeps_chats=split != "train"
            or held_out_share > 0,  # needed where answers are generated
            task_mode=self._config.task_mode,
            images=ImageProcessorSource.from_config(self._config),
        )
        return build_rows(source, recipe, split=split, workers=self._config.data.workers)

    def _build_source(
        self, source: AnySource, split: str, *, is_document: bool, held_out_share: float = 0.0
    ) -> tuple[DataSplit, DataSplit | None]:
        if is_document and held_out_share:
            reader = ExampleReader(source, self._config.data, split=split, wants_text=True)
            examples = [
                example
                for _, example in itertools.islice(reader.numbered_examples(), MIN_HASHED_DOCUMENTS)
            ]
            # bad rows and chats are judged later
            are_documents = all(isinstance(example, Text) for example in examples)
            if 0 < len(examples) < MIN_HASHED_DOCUMENTS and are_documents:
                kept_rows = self.build_rows(
                    source, split, is_document=True, text_span=(0.0, 1 - held_out_share)
                )
                end_rows = self.build_rows(
                    source, split, is_document=True, text_span=(1 - held_out_share, 1.0)
                )
                end_source = f"the last {held_out_share:g} of each document of {source}"
                held_out = _split_from_cache(end_rows, KEPT_SIDE, end_source)
                held_out.stats.rows = held_out.stats.kept_rows  # without blank ends
                kept_split = _split_from_cache(kept_rows, KEPT_SIDE, str(source))
                return kept_split, held_out if held_out.rows is not None else None
        built_rows = self.build_rows(
            source, split, is_document=is_document, held_out_share=held_out_share
        )
        kept_split = _split_from_cache(built_rows, KEPT_SIDE, str(source))
        if not kept_split.stats.rows:
            raise DataError(f"{source} has no rows")
        if not held_out_share:
            return kept_split, None
        held_out = _split_from_cache(
            built_rows, HELD_OUT_SIDE, f"{held_out_share:g} of {source} by content hash"
        )
        # the build counts every row it reads on both sides; those that cannot be read are on the
        # kept one
        held_out.stats.rows = (
            held_out.stats.kept_rows
            + held_out.stats.too_long_rows
            + held_out.stats.unmasked_rows.total()
        )
        kept_split.stats.rows -= held_out.stats.rows
        return kept_split, held_out if held_out.rows is not None else None

    # Several sources.

    def _build_from_sources(self, paths: DataPaths) -> DataSplits:
        common_val, test = (
            self._build_held_out(paths.val, "val"),
            self._build_held_out(paths.test, "test"),
        )
        # Each source has validation rows of its own, or some are split off it; with a common file
        # for all of them none are.
        train: list[DataSplit] = []
        held_out_by_source: dict[int, DataSplit] = {}
        for index, source in enumerate(paths.sources):
            key = f"data.sources[{index}]"
            val = self._build_held_out(source.val, "val", key=f"{key}.val_path")
            share = self._config.data.val_fraction if val is None and common_val is None else 0.0
            kept_split, split_off = self._build_source(
                source.train, "train", is_document=self._trains_text, held_out_share=share
            )
            train.append(replace(kept_split, option_key=f"{key}.path"))
            self._check_split(train[-1], "train")
            if val is None and split_off is not None:
                val = replace(split_off, option_key=f"{key}.path")
                self._check_split(val, "val")
            if val is not None:
                held_out_by_source[index] = val
        vals = list(held_out_by_source.values()) if common_val is None else [common_val]
        count_shared_rows([split.stats for split in (*train, *vals, test) if split is not None])
        # Rows are judged and counted before max_rows leaves some out; an epoch mixes the rest.
        names = tuple(source.name for source in paths.sources)
        used_splits = [
            self._limit_rows(
                _add_source_column(self._finish_split(split), index), index, names[index]
            )
            for index, split in enumerate(train)
        ]
        sources = MixedSources(
            names,
            tuple(source.weight for source in self._config.data.sources),
            tuple(len(split.rows) for split in used_splits),
        )
        mix = sources.mix(seed=self._config.train.seed)
        # packed rows are mixed by packs, whose table the trainer logs once they are made
        if self._config.data.packing == "none" or self._trains_text:
            self._notes += [f"Data train: {line}" for line in format_mix_table(mix)]
        # -1: of no source
        numbered_vals = held_out_by_source.items() if common_val is None else [(-1, common_val)]
        marked_vals = [
            _add_source_column(self._finish_split(split), index) for index, split in numbered_vals
        ]
        return DataSplits(
            _concatenate_splits(used_splits),
            _concatenate_splits(marked_vals) if marked_vals else None,
            _add_source_column(self._finish_split(test), -1) if test else None,
            (*paths.notes, *self._notes),
            sources,
        )

    def _limit_rows(self, split: DataSplit, source_index: int, name: str) -> DataSplit:
        max_rows = self._config.data.sources[source_index].max_rows
        indices = draw_rows(len(split.rows), max_rows, seed=self._config.train.seed)
        if indices is None:
            return split
        self._notes.append(
            f"Data train: {max_rows:,} of {len(split.rows):,} rows of {name} are used (max_rows)"
        )
        return replace(split, rows=split.rows.select(indices))

    def _build_held_out(
        self, source: AnySource | None, split: str, *, key: str = ""
    ) -> DataSplit | None:
        if source is None:
            return None
        data_split, _ = self._build_source(source, split, is_document=self._trains_text)
        data_split = replace(data_split, option_key=key)
        self._check_split(data_split, split)
        return data_split

    # Judging.

    def _check_split(self, data_split: DataSplit, split: str) -> None:
        stats, data, key = (
            data_split.stats,
            self._config.data,
            data_split.option_key or f"data.{split}_path",
        )
        stats.split = split
        if self._trains_text and stats.chats:
            raise DataError(
                f"{key}={stats.source}: task_mode is cpt, which trains plain text, and"
                f" {stats.chats:,} rows are chats ({stats.format}); use task_mode=sft, rows with a"
                f" text column, or {key}=null"
            )
        for finding in judge_split(
            stats, data, max_seq_len=self._max_seq_len, max_positions=self._max_positions
        ):
            if finding.verdict == "FAIL":
                raise DataError(f"{key}: {finding.found}\n{finding.remedy}")
        if stats.kept_rows == 0:
            unused_reasons = stats.bad_rows + stats.unmasked_rows + stats.left_out_rows
            reasons = "; ".join(
                f"{count} x {reason}" for reason, count in unused_reasons.most_common(6)
            )
            raise DataError(
                f"{key}: no row is left of {stats.rows:,} of {stats.source} ({reasons})"
            )

    # Splits.

    def _finish_split(self, split: DataSplit) -> DataSplit:
        if self._trains_text:
            return self._pack_text(split)
        stats = split.stats
        if stats.texts:
            self._notes.append(
                f"{stats.source}: {stats.texts:,} rows of plain text have no turns: every token is "
                "trained"
            )
        return split

    def _pack_text(self, split: DataSplit) -> DataSplit:
        block_size, stats = self._max_seq_len, split.stats
        if split.rows is None:
            raise DataError(
                f"{stats.source}: {stats.kept_rows} documents are {stats.tokens:,} tokens, less "
                f"than one block of max_seq_len {block_size}; lower model.max_seq_len or give more"
                " text"
            )
        count = len(split.rows)
        # a single block may be shorter: a held-out text of less than one (`build.write_blocks`)
        tokens = (
            count * block_size
            if count > 1 or len(split.rows[0]["input_ids"]) == block_size
            else stats.tokens
        )
        self._notes.append(
            f"{stats.source}: packed into {count:,} blocks of {block_size} tokens; the last "
            f"{stats.tokens - tokens:,} tokens fill none"
        )
        return replace(split, stats=replace(stats, tokens=tokens, trained_tokens=tokens))

    def _mix_text_in(
        self, chats: DataSplit, val: DataSplit | None, source: AnySource
    ) -> tuple[DataSplit, DataSplit | None]:
        share = self._config.data.val_fraction or HELD_OUT_TEXT_FRACTION * (val is not None)
        kept_split, held_out = self._build_source(
            source, "train", is_document=True, held_out_share=share
        )
        if kept_split.stats.chats:
            raise DataError(
                f"data.text_path={source} holds {kept_split.stats.format} rows; it takes plain text"
            )
        self._check_split(kept_split, "text")
        text, text_fraction = self._pack_text(kept_split), self._config.data.text_fraction
        count, blocks = len(chats.rows), len(text.rows)
        needed_blocks = max(1, round(count * text_fraction / (1 - text_fraction)))
        if needed_blocks > MAX_SOURCE_PASSES * blocks:
            raise DataError(
                f"data.text_fraction={text_fraction:g} of {count} chats asks for {needed_blocks:,} "
                f"text blocks, and {text.stats.source} has {blocks}: more than {MAX_SOURCE_PASSES} "
                "passes over it; lower it"
            )
        # rows are numbered with the chats first; text is taken in passes over all its blocks
        order = [*range(count), *(count + index % blocks for index in range(needed_blocks))]
        random.Random(self._config.train.seed).shuffle(order)
        rows = _concatenate_datasets([chats.rows, text.rows]).select(order)
        self._notes.append(
            f"Data train: {count:,} chats and {needed_blocks:,} text blocks ({text_fraction:g} of "
            f"the sequences; {needed_blocks / blocks:.2g} passes over the text)"
        )
        text_tokens = needed_blocks * self._max_seq_len
        report = replace(text.stats, tokens=text_tokens, trained_tokens=text_tokens)
        train = DataSplit(rows, chats.stats.merge_source(report), chats.chats)
        if val is not None and held_out is not None:
            text = self._pack_text(held_out)
            self._notes.append(
                f"Data val: {len(text.rows):,} blocks of held-out text ({text.stats.source}) "
                "beside the chats"
            )
            rows = _concatenate_datasets([val.rows, text.rows])
            val = DataSplit(rows, val.stats.merge_source(text.stats), val.chats)
        return train, val


def _split_from_cache(built_rows: BuiltRows, name: str, source: str) -> DataSplit:
    rows, stats = built_rows.dataset(name), built_rows.stats[name]
    stats.source = source
    if rows is None or "chat" not in rows.column_names:
        return DataSplit(rows, stats)
    return DataSplit(rows.remove_columns("chat"), stats, SplitChats(rows.select_columns("chat")))


def _add_source_column(split: DataSplit, source_index: int) -> DataSplit:
    from datasets import Value

    columns = [name for name in split.rows.column_names if name != "source"]
    rows = split.rows.select_columns(columns).add_column(
        "source", np.full(len(split.rows), source_index, np.int8), feature=Value("int8")
    )
    return replace(split, rows=rows)


def _concatenate_splits(splits: Sequence[DataSplit]) -> DataSplit:
    report = functools.reduce(RowStats.merge_source, [split.stats for split in splits])
    columns = [split.chats.dataset for split in splits]
    chats = (
        SplitChats()
        if any(column is None for column in columns)
        else SplitChats(_concatenate_datasets(columns))
    )
    return DataSplit(_concatenate_datasets([split.rows for split in splits]), report, chats)


def _concatenate_datasets(datasets: Sequence[Any]) -> Any:
    from datasets import concatenate_datasets

    return concatenate_datasets(
        [dataset.select_columns(sorted(dataset.column_names)) for dataset in datasets]
    )
