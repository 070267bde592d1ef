"""The report of `make process`: files, rows, splits and estimated lengths, as JSON and in words."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sft_play.answers import Answer
from sft_play.config.schema import ProcessConfig
from sft_play.data.build.stats import RowStats, format_row_count
from sft_play.data.build.survey import CHARACTERS_PER_TOKEN
from sft_play.data.masks.render import is_trained_turn
from sft_play.data.sources.formats import Example, Text
from sft_play.data.sources.messages import TEXT_KEYS, Message
from sft_play.log import one_line

# Rows that are named of each problem; the rest is counted.
MAX_LISTED = 20
# Upper edges in tokens, inclusive, of the ranges that rows are counted in; one more range is above the last.
LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Without the chat template's own tokens: processing needs no model, and its rows may be trained with any.
_LENGTH_NOTE = f"lengths are estimated at {CHARACTERS_PER_TOKEN:g} characters per token"


@dataclass
class Occurrences:
    """A count, and where the first of what was counted are."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, location: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < MAX_LISTED:
            self.first.append(location)

    def format_locations(self) -> str:
        """The places, and how many more there are."""
        unlisted = self.count - len(self.first)
        return ", ".join(self.first) + (f", … and {unlisted:,} more" if unlisted else "")


@dataclass
class FileReport:
    """One raw file: its format, the split it names, its rows, and columns that are not used."""

    name: str
    format: str = ""
    split: str | None = None
    rows: int = 0
    unused: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The report in words."""
        split = f", split {self.split}" if self.split else ""
        names = ", ".join(one_line(key, limit=40) for key in self.unused)
        unused = f"; columns not used: {names}" if names else ""
        return f"  {self.name}: {self.rows:,} rows, {self.format or 'no format'}{split}{unused}"


@dataclass
class SplitReport:
    """One written split: rows, turns by role, trained turns, and lengths in estimated tokens."""

    stats: RowStats = field(default_factory=RowStats)
    trained_turns: int = 0
    tokens: int = 0
    # Rows by range of length.
    lengths: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_EDGES) + 1))
    # Rows that are longer than max_seq_len.
    rows_over_limit: int = 0
    longest: int = 0

    def count(self, example: Example, *, max_seq_len: int) -> None:
        """Count a row."""
        self.stats.count_example(example)
        self.trained_turns += sum(map(is_trained_turn, getattr(example, "messages", ())))
        tokens = round(len(example_text(example)) / CHARACTERS_PER_TOKEN)
        self.tokens += tokens
        self.lengths[bisect.bisect_left(LENGTH_EDGES, tokens)] += 1
        self.rows_over_limit += tokens > max_seq_len
        self.longest = max(self.longest, tokens)

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
            "tokens_estimated": self.tokens,
            "token_lengths": dict(zip(labels, self.lengths, strict=True)),
            "longest": self.longest,
            "share_over_max_seq_len": round(self.rows_over_limit / max(1, self.rows), 6),
        }


@dataclass
class ProcessReport(Answer):
    """What `make process` did: files, rows in, kept and dropped, duplicates, leaks, lengths."""

    options: ProcessConfig
    max_seq_len: int
    files: list[FileReport] = field(default_factory=list)
    splits: dict[str, SplitReport] = field(default_factory=dict)
    dropped: dict[str, Occurrences] = field(default_factory=dict)
    notes: dict[str, Occurrences] = field(default_factory=dict)
    duplicates: Occurrences = field(default_factory=Occurrences)
    leaks: Occurrences = field(default_factory=Occurrences)
    # Rows that are nearly an earlier one, each with that and their similarity.
    near_duplicates: Occurrences = field(default_factory=Occurrences)
    # By each file of compare_with: the training rows that are nearly one of its rows.
    overlaps: dict[str, Occurrences] = field(default_factory=dict)
    has_own_splits: bool = False
    skipped_files: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def rows_in(self) -> int:
        """Rows of all files, those that cannot be used among them."""
        return sum(file.rows for file in self.files)

    @property
    def rows_kept(self) -> int:
        """Rows that were written."""
        return sum(split.rows for split in self.splits.values())

    def count_dropped(self, reason: str, location: str) -> None:
        """Count a row that is left out."""
        self.dropped.setdefault(reason, Occurrences()).add(location)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which report.json holds."""
        options, to_dict = self.options, dataclasses.asdict
        are_near_duplicates_dropped = None if options.near_duplicates == "ignore" else options.near_duplicates == "drop"
        return {
            "ok": self.ok,
            "out_dir": options.out_dir,
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "rows_dropped": sum(places.count for places in self.dropped.values()),
            "dropped": {reason: to_dict(places) for reason, places in self.dropped.items()},
            "notes": {note: to_dict(places) for note, places in self.notes.items()},
            "duplicates": {**to_dict(self.duplicates), "dropped": options.drop_duplicates},
            "leaks": {**to_dict(self.leaks), "dropped": options.drop_leaks},
            "near_duplicates": {**to_dict(self.near_duplicates), "dropped": are_near_duplicates_dropped},
            "overlaps": {
                name: {**to_dict(places), "dropped": options.drop_overlaps} for name, places in self.overlaps.items()
            },
            "own_splits": self.has_own_splits,
            "splits": {name: split.as_json() for name, split in self.splits.items()},
            # one pass over train; the chat template's own tokens come on top
            "tokens_per_epoch_estimated": self.splits["train"].tokens if "train" in self.splits else 0,
            "max_seq_len": self.max_seq_len,
            "lengths_by": _LENGTH_NOTE,
            "files": [to_dict(file) for file in self.files],
            "files_left_alone": self.skipped_files,
            "remarks": self.remarks,
        }

    def lines(self) -> list[str]:
        """The report in words, one thing a line."""
        options = self.options
        split_counts = ", ".join(f"{name} {split.rows:,}" for name, split in self.splits.items())
        lines = [
            f"Processed {format_row_count(self.rows_in)} of {len(self.files)} file{'s' * (len(self.files) != 1)}: "
            f"{self.rows_kept:,} kept ({split_counts}) in {options.out_dir}"
        ]
        lines += [file.line() for file in self.files[:MAX_LISTED]]
        if len(self.files) > MAX_LISTED:
            lines.append(f"  … and {len(self.files) - MAX_LISTED} more files")
        lines += [f"Left out: {_format_occurrences(reason, places)}" for reason, places in sort_by_count(self.dropped)]
        lines += [f"Note: {_format_occurrences(note, places)}" for note, places in sort_by_count(self.notes)]
        checks = [
            ("Duplicates", self.duplicates, options.drop_duplicates, "drop_duplicates=true"),
            ("Leaks (rows that are in another split too)", self.leaks, options.drop_leaks, "drop_leaks=true"),
        ]
        if options.near_duplicates != "ignore":
            is_dropped = options.near_duplicates == "drop"
            checks.append(("Near-duplicates", self.near_duplicates, is_dropped, "near_duplicates=drop"))
        for file, places in self.overlaps.items():
            checks.append((f"Training rows nearly in {file}", places, options.drop_overlaps, "drop_overlaps=true"))
        for name, places, are_left_out, option in checks:
            outcome = "left out" if are_left_out else f"kept; data.process.{option} leaves them out"
            lines.append(
                f"{name}: {places.count:,}" + (f", {outcome}: {places.format_locations()}" if places.count else "")
            )
        lines += self.remarks
        if self.skipped_files:
            listed_files = ", ".join(self.skipped_files[:MAX_LISTED])
            lines.append(
                f"Files not read, whose names are not those of data ({len(self.skipped_files)}): {listed_files}"
            )
        lines += [line for name, split in self.splits.items() for line in self._split_lines(name, split)]
        return lines

    def _split_lines(self, name: str, split: SplitReport) -> list[str]:
        roles = ", ".join(f"{role} {count:,}" for role, count in split.stats.turns.most_common())
        turns = (
            f"{split.turns:,} turns ({roles}), {split.trained_turns:,} of them trained" if split.turns else "no turns"
        )
        texts = f", {split.stats.texts:,} of them plain text" if split.stats.texts else ""
        count = max(1, split.rows)
        edges = itertools.pairwise(["0", *map(str, LENGTH_EDGES)])
        ranges = [*(f"{low}-{high}" for low, high in edges), f"over {LENGTH_EDGES[-1]}"]
        bars = [
            f"{tokens}: {rows:,} ({rows / count:.0%})"
            for tokens, rows in zip(ranges, split.lengths, strict=True)
            if rows
        ]
        return [
            f"{name}: {format_row_count(split.rows)}{texts}; {turns}",
            f"{name}: about {split.tokens:,} tokens an epoch, longest row {split.longest:,}; "
            f"{split.rows_over_limit / count:.1%} "
            f"of the rows are over model.max_seq_len {self.max_seq_len:,} ({_LENGTH_NOTE})",
            f"{name}: rows by tokens: {', '.join(bars) or 'none'}",
        ]


def _format_occurrences(reason: str, occurrences: Occurrences) -> str:
    return f"{format_row_count(occurrences.count)}: {reason}: {occurrences.format_locations()}"


def sort_by_count(counts: dict[str, Occurrences]) -> list[tuple[str, Occurrences]]:
    """What was counted, the most frequent first."""
    return sorted(counts.items(), key=lambda item: (-item[1].count, item[0]))


def example_text(example: Example) -> str:
    """All that a row says, tools and calls of tools among it."""
    if isinstance(example, Text):
        return example.text
    tools = [json.dumps(example.tools, ensure_ascii=False)] if example.tools else []
    return "\n".join([*tools, messages_text(example.messages)])


def messages_text(messages: Iterable[Message]) -> str:
    """All that messages say, calls of tools among it."""
    parts: list[str] = []
    for message in messages:
        parts += [str(message[key]) for key in TEXT_KEYS if message.get(key)]
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(parts)
