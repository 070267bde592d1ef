"""The report of `make process`: files, rows, splits and lengths, as JSON and in words; and how long rows are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.data.build.size import CHARACTERS_PER_TOKEN
from sft_play.data.build.stats import RowStats, rows_text
from sft_play.data.sources.formats import Example, Text
from sft_play.data.sources.messages import TEXT_KEYS, Message
from sft_play.data.sources.raw import piece_end
from sft_play.log import one_line

logger = logging.getLogger(__name__)

SHOWN = 20
"""Rows that are named of each problem; the rest is counted."""
LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper edges in tokens, inclusive, of the ranges that rows are counted in; one more range is above the last."""
COUNTED_ROWS = 20_000
"""The first rows, whose tokens are all counted; of the others every tenth, chosen by content, stands for ten."""
_ONE_IN = 10
_BATCH = 500
_BATCH_CHARS = 256 << 10
"""Texts whose tokens are counted together: this many, or this many characters; a longer text is counted in pieces."""


@dataclass
class Places:
    """A count, and where the first of what was counted are."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(where)

    def words(self) -> str:
        """The places, and how many more there are."""
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f", … and {more:,} more" if more else "")


@dataclass
class FileReport:
    """One raw file: its format, the split it names, its rows, and columns that are not used."""

    name: str
    format: str = ""
    split: str | None = None
    rows: int = 0
    also: tuple[str, ...] = ()
    """Other formats that its columns fit."""
    unused: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {**dataclasses.asdict(self), "also": list(self.also), "unused": list(self.unused)}


@dataclass
class SplitReport:
    """One written split: rows, turns by role, trained turns, and lengths in tokens."""

    stats: RowStats = field(default_factory=RowStats)
    trained_turns: int = 0
    tokens: float = 0.0
    """Floats, as these four: of a large file a counted row stands for about ten (`RowLengths`)."""
    lengths: list[float] = field(default_factory=lambda: [0.0] * (len(LENGTH_EDGES) + 1))
    """Rows by range of length."""
    counted: float = 0.0
    """Rows that the lengths stand for."""
    over: float = 0.0
    """Rows of them that are longer than max_seq_len."""
    longest: int = 0

    @property
    def rows(self) -> int:
        """Rows that were written."""
        return self.stats.chats + self.stats.texts

    @property
    def turns(self) -> int:
        """Messages of all roles."""
        return self.stats.turns.total()

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        labels = [*(f"<= {edge}" for edge in LENGTH_EDGES), f"> {LENGTH_EDGES[-1]}"]
        return {
            "rows": self.rows,
            "text_rows": self.stats.texts,
            "turns": self.turns,
            "roles": dict(sorted(self.stats.turns.items())),
            "trained_turns": self.trained_turns,
            "tokens_estimated": round(self.tokens),
            "token_lengths": {label: round(count) for label, count in zip(labels, self.lengths, strict=True)},
            "longest": self.longest,
            "share_over_max_seq_len": round(self.over / self.counted, 6) if self.counted else 0.0,
        }


@dataclass
class ProcessReport:
    """What `make process` did: files, rows in, kept and dropped, duplicates, leaks, lengths."""

    out_dir: str
    max_seq_len: int
    files: list[FileReport] = field(default_factory=list)
    splits: dict[str, SplitReport] = field(default_factory=dict)
    dropped: dict[str, Places] = field(default_factory=dict)
    notes: dict[str, Places] = field(default_factory=dict)
    duplicates: Places = field(default_factory=Places)
    leaks: Places = field(default_factory=Places)
    duplicates_dropped: bool = False
    leaks_dropped: bool = False
    near: Places = field(default_factory=Places)
    """Rows that are nearly an earlier one, each with that and their similarity."""
    near_dropped: bool | None = None
    """None where none were looked for."""
    overlaps: dict[str, Places] = field(default_factory=dict)
    """By each file of compare_with: the training rows that are nearly one of its rows."""
    overlaps_dropped: bool = False
    own_splits: bool = False
    skipped_files: list[str] = field(default_factory=list)
    lengths_by: str = ""
    remarks: list[str] = field(default_factory=list)
    ok: bool = True

    @property
    def rows_in(self) -> int:
        """Rows of all files, those that cannot be used among them."""
        return sum(file.rows for file in self.files)

    @property
    def rows_kept(self) -> int:
        """Rows that were written."""
        return sum(split.rows for split in self.splits.values())

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which report.json holds."""
        return {
            "ok": self.ok,
            "out_dir": self.out_dir,
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "rows_dropped": sum(places.count for places in self.dropped.values()),
            "dropped": {reason: dataclasses.asdict(places) for reason, places in self.dropped.items()},
            "notes": {note: dataclasses.asdict(places) for note, places in self.notes.items()},
            "duplicates": {**dataclasses.asdict(self.duplicates), "dropped": self.duplicates_dropped},
            "leaks": {**dataclasses.asdict(self.leaks), "dropped": self.leaks_dropped},
            "near_duplicates": {**dataclasses.asdict(self.near), "dropped": self.near_dropped},
            "overlaps": {
                name: {**dataclasses.asdict(places), "dropped": self.overlaps_dropped}
                for name, places in self.overlaps.items()
            },
            "own_splits": self.own_splits,
            "splits": {name: split.as_json() for name, split in self.splits.items()},
            # one pass over train; the chat template's own tokens come on top
            "tokens_per_epoch_estimated": round(self.splits["train"].tokens) if "train" in self.splits else 0,
            "max_seq_len": self.max_seq_len,
            "lengths_by": self.lengths_by,
            "files": [file.as_json() for file in self.files],
            "files_left_alone": self.skipped_files,
            "remarks": self.remarks,
        }

    def lines(self) -> list[str]:
        """The report in words, one thing a line."""
        kept = ", ".join(f"{name} {split.rows:,}" for name, split in self.splits.items())
        lines = [
            f"Processed {rows_text(self.rows_in)} of {len(self.files)} file{'s' * (len(self.files) != 1)}: "
            f"{self.rows_kept:,} kept ({kept}) in {self.out_dir}"
        ]
        lines += [_file_line(file) for file in self.files[:SHOWN]]
        if len(self.files) > SHOWN:
            lines.append(f"  … and {len(self.files) - SHOWN} more files")
        lines += [f"Left out: {_counted(reason, places)}" for reason, places in by_count(self.dropped)]
        lines += [f"Note: {_counted(note, places)}" for note, places in by_count(self.notes)]
        looked_for = [
            ("Duplicates", self.duplicates, self.duplicates_dropped, "drop_duplicates=true"),
            ("Leaks (rows that are in another split too)", self.leaks, self.leaks_dropped, "drop_leaks=true"),
        ]
        if self.near_dropped is not None:
            looked_for.append(("Near-duplicates", self.near, self.near_dropped, "near_duplicates=drop"))
        for file, places in self.overlaps.items():
            looked_for.append((f"Training rows nearly in {file}", places, self.overlaps_dropped, "drop_overlaps=true"))
        for name, places, dropped, option in looked_for:
            done = "left out" if dropped else f"kept; data.process.{option} leaves them out"
            lines.append(f"{name}: {places.count:,}" + (f", {done}: {places.words()}" if places.count else ""))
        lines += self.remarks
        if self.skipped_files:
            shown = ", ".join(self.skipped_files[:SHOWN])
            lines.append(f"Files not read, whose names are not those of data ({len(self.skipped_files)}): {shown}")
        lines += [line for name, split in self.splits.items() for line in self._split_lines(name, split)]
        return lines

    def _split_lines(self, name: str, split: SplitReport) -> list[str]:
        roles = ", ".join(f"{role} {count:,}" for role, count in split.stats.turns.most_common())
        turns = (
            f"{split.turns:,} turns ({roles}), {split.trained_turns:,} of them trained" if split.turns else "no turns"
        )
        texts = f", {split.stats.texts:,} of them plain text" if split.stats.texts else ""
        share = split.over / split.counted if split.counted else 0.0
        edges = itertools.pairwise(["0", *map(str, LENGTH_EDGES)])
        ranges = [*(f"{low}-{high}" for low, high in edges), f"over {LENGTH_EDGES[-1]}"]
        bars = [
            f"{tokens}: {round(count):,} ({count / split.counted:.0%})"
            for tokens, count in zip(ranges, split.lengths, strict=True)
            if round(count)
        ]
        return [
            f"{name}: {rows_text(split.rows)}{texts}; {turns}",
            f"{name}: about {round(split.tokens):,} tokens an epoch, longest row {split.longest:,}; {share:.1%} of the "
            f"rows are over model.max_seq_len {self.max_seq_len:,} ({self.lengths_by})",
            f"{name}: rows by tokens: {', '.join(bars) or 'none'}",
        ]


def _counted(reason: str, places: Places) -> str:
    return f"{rows_text(places.count)}: {reason}: {places.words()}"


def by_count(counts: dict[str, Places]) -> list[tuple[str, Places]]:
    """What was counted, the most frequent first."""
    return sorted(counts.items(), key=lambda item: (-item[1].count, item[0]))


def _file_line(file: FileReport) -> str:
    split = f", split {file.split}" if file.split else ""
    also = f"; its columns also fit {', '.join(file.also)} (data.columns chooses)" if file.also else ""
    unused = f"; columns not used: {', '.join(one_line(key, limit=40) for key in file.unused)}" if file.unused else ""
    return f"  {file.name}: {file.rows:,} rows, {file.format or 'no format'}{split}{also}{unused}"


# How many tokens rows have, by the model's tokenizer where it is on this disk. The chat template's own tokens are not
# counted: processing needs no model, and its rows may be trained with any.


TokenCounter = Callable[[list[str]], list[int]]
"""Texts → the number of tokens of each."""


def _texts_of(example: Example) -> str:
    if isinstance(example, Text):
        return example.text
    tools = [json.dumps(example.tools, ensure_ascii=False)] if example.tools else []
    return "\n".join([*tools, text_of(example.messages)])


def text_of(messages: Iterable[Message]) -> str:
    """All that messages say, calls of tools among it."""
    parts: list[str] = []
    for message in messages:
        parts += [str(message[key]) for key in TEXT_KEYS if message.get(key)]
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(parts)


class RowLengths:
    """Tokens of rows, counted in batches; after `COUNTED_ROWS` only those of a tenth, chosen by content."""

    def __init__(self, counter: TokenCounter, max_seq_len: int) -> None:
        self._counter, self._max_seq_len = counter, max_seq_len
        self._rows = 0
        self._waiting: list[tuple[str, float, SplitReport]] = []
        self._chars = 0

    def add(self, example: Example, digest: bytes, counts: SplitReport) -> None:
        """Note a row's length."""
        self._rows += 1
        weight = 1.0
        if self._rows > COUNTED_ROWS:
            if digest[8] % _ONE_IN:  # the bytes before it decide the split
                return
            weight = 256 / len(range(0, 256, _ONE_IN))  # 26 of 256 bytes pass: not quite one in ten
        text = _texts_of(example)
        self._waiting.append((text, weight, counts))
        self._chars += len(text)
        if len(self._waiting) >= _BATCH or self._chars >= _BATCH_CHARS:
            self.flush()

    def flush(self) -> None:
        """Count the texts that wait."""
        sizes = self._counts([text for text, _, _ in self._waiting])
        for tokens, (_, weight, counts) in zip(sizes, self._waiting, strict=True):
            index = next((at for at, edge in enumerate(LENGTH_EDGES) if tokens <= edge), len(LENGTH_EDGES))
            counts.lengths[index] += weight
            counts.counted += weight
            counts.tokens += weight * tokens
            counts.over += weight * (tokens > self._max_seq_len)
            counts.longest = max(counts.longest, tokens)
        self._waiting, self._chars = [], 0

    def _counts(self, texts: list[str]) -> Iterator[int]:
        """The tokens of each text; a long one is counted in pieces."""
        short = [text for text in texts if len(text) <= 2 * _BATCH_CHARS]
        sizes = iter(self._counter(short) if short else ())
        for text in texts:
            tokens, rest = 0, text
            while len(rest) > 2 * _BATCH_CHARS:
                cut = piece_end(rest, _BATCH_CHARS)
                tokens += self._counter([rest[:cut]])[0]
                rest = rest[cut:]
            yield next(sizes) if rest is text else tokens + self._counter([rest])[0]


def token_counter(config: RunConfig) -> tuple[TokenCounter, str]:
    """What counts tokens, and its name: the model's tokenizer where it is on this disk, else an estimate."""
    tokenizer = _local_tokenizer(config)

    def count(texts: list[str]) -> list[int]:
        if tokenizer is None:
            return [round(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
        # verbose=False: transformers would warn of texts that are longer than the model's positions
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    if tokenizer is None:
        return count, f"lengths are estimated at {CHARACTERS_PER_TOKEN:g} characters per token"
    return count, "counted by the model's tokenizer, without the template's own tokens"


def _local_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer from its folder or the hub's cache; None where there is none or it cannot be loaded."""
    # Looked for before AutoTokenizer is imported, which takes seconds, and never fetched: processing works offline.
    name, files = config.model.name, ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    folder = Path(name).expanduser()
    if folder.is_dir():
        is_local = any((folder / file).is_file() for file in files)
    else:
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = [try_to_load_from_cache(name, file, revision=config.model.revision) for file in files]
        except ValueError:  # a name that is no hub id
            return None
        is_local = any(isinstance(path, str) for path in cached)
    if not is_local:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name,
            revision=config.model.revision,
            local_files_only=True,
            trust_remote_code=False,  # by default transformers asks on the terminal
        )
    except Exception as error:  # each kind of tokenizer fails in its own way on a damaged file
        logger.info("The tokenizer of %s cannot be loaded for lengths: %s", name, one_line(str(error)))
        return None
