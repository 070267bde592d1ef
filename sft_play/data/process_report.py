"""The report of `make process`: files, rows, splits and lengths, as JSON and in words."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

from sft_play.data.build.stats import RowStats, rows_text
from sft_play.log import one_line

SHOWN = 20
"""Rows that are named of each problem; the rest is counted."""
LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper edges in tokens, inclusive, of the ranges that rows are counted in; one more range is above the last."""


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
    """Floats, as these four: of a large file a counted row stands for about ten (`row_lengths.py`)."""
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
        for name, places, dropped, option in (
            ("Duplicates", self.duplicates, self.duplicates_dropped, "drop_duplicates"),
            ("Leaks (rows that are in another split too)", self.leaks, self.leaks_dropped, "drop_leaks"),
        ):
            done = "left out" if dropped else f"kept; data.process.{option}=true leaves them out"
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
