"""`make process`: raw files → checked conversations in one form, split, with a report.

Each file is read with its own format. A row's split depends on its content alone, so that adding rows moves none of
the others, and rows with the same content land on the same side; raw files that bring their own splits keep them.
Nothing is written when a row cannot be used, unless such rows are to be skipped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import ProcessConfig, RunConfig
from sft_play.data.files import (
    BadRow,
    Part,
    RawRow,
    data_files,
    find_source,
    is_saved,
    read_part,
    split_names,
    walk,
)
from sft_play.data.formats import (
    Example,
    Format,
    Text,
    check_columns,
    first_format,
    formats_of,
    is_processed,
    rename_columns,
    to_example,
    unused_columns,
)
from sft_play.data.messages import TEXT_KEYS, as_given, roles_said, without_given
from sft_play.data.raw import MAX_ROW_BYTES, piece_end, too_large
from sft_play.data.size import CHARACTERS_PER_TOKEN
from sft_play.data.tables import split_of_name
from sft_play.data.written import CannotWrite, OutputFolder
from sft_play.errors import DataError
from sft_play.log import one_line

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
SHOWN = 20
"""Rows that are named of each problem; the rest is counted."""
_SHOWN_FILES = 50
COUNTED_ROWS = 20_000
"""Rows whose tokens are all counted; of those behind them every tenth, chosen by content, stands for ten."""
_ONE_IN = 10
_BATCH = 500
_BATCH_CHARS = 256 << 10
"""Texts whose tokens are counted together: so many, or of so many characters; a longer one is counted in pieces."""
LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))
_LINE = json.JSONEncoder(ensure_ascii=False)

TokenCounter = Callable[[list[str]], list[int]]
"""Texts → the number of tokens of each."""


@dataclass
class Places:
    """A count, and where the first of what was counted stand."""

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

    def as_json(self) -> dict[str, Any]:
        """Count and places."""
        return {"count": self.count, "first": list(self.first)}


@dataclass
class FileReport:
    """One raw file: its format, the split it names, its rows, and columns that nothing was made of."""

    name: str
    format: str = ""
    split: str | None = None
    rows: int = 0
    also: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {**dataclasses.asdict(self), "also": list(self.also), "unused": list(self.unused)}


@dataclass
class SplitReport:
    """One written split: rows, turns by role, trained turns, and lengths in tokens."""

    rows: int = 0
    texts: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    trained_turns: int = 0
    tokens: float = 0.0
    lengths: list[float] = field(default_factory=lambda: [0.0] * (len(LENGTH_EDGES) + 1))
    counted: float = 0.0
    over: float = 0.0
    longest: int = 0

    @property
    def turns(self) -> int:
        """Messages of all roles."""
        return sum(self.roles.values())

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        labels = [*(f"<= {edge}" for edge in LENGTH_EDGES), f"> {LENGTH_EDGES[-1]}"]
        return {
            "rows": self.rows,
            "text_rows": self.texts,
            "turns": self.turns,
            "roles": dict(sorted(self.roles.items())),
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
            "dropped": {reason: places.as_json() for reason, places in self.dropped.items()},
            "notes": {note: places.as_json() for note, places in self.notes.items()},
            "duplicates": {**self.duplicates.as_json(), "dropped": self.duplicates_dropped},
            "leaks": {**self.leaks.as_json(), "dropped": self.leaks_dropped},
            "own_splits": self.own_splits,
            "splits": {name: split.as_json() for name, split in self.splits.items()},
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
            f"Processed {rows_said(self.rows_in)} of {len(self.files)} file{'s' * (len(self.files) != 1)}: "
            f"{self.rows_kept:,} kept ({kept}) in {self.out_dir}"
        ]
        lines += [_file_line(file) for file in self.files[:SHOWN]]
        if len(self.files) > SHOWN:
            lines.append(f"  … and {len(self.files) - SHOWN} more files")
        lines += [f"Left out: {_counted(reason, places)}" for reason, places in _by_count(self.dropped)]
        lines += [f"Note: {_counted(note, places)}" for note, places in _by_count(self.notes)]
        lines += self._double_lines()
        lines += self.remarks
        if self.skipped_files:
            shown = ", ".join(self.skipped_files[:SHOWN])
            lines.append(f"Files left alone, whose names are not those of data ({len(self.skipped_files)}): {shown}")
        lines += [line for name, split in self.splits.items() for line in self._split_lines(name, split)]
        return lines

    def _double_lines(self) -> list[str]:
        lines = []
        for name, places, dropped, option in (
            ("Duplicates", self.duplicates, self.duplicates_dropped, "drop_duplicates"),
            ("Leaks (rows that stand in another split too)", self.leaks, self.leaks_dropped, "drop_leaks"),
        ):
            done = "left out" if dropped else f"kept; data.process.{option}=true leaves them out"
            lines.append(f"{name}: {places.count:,}" + (f", {done}: {places.words()}" if places.count else ""))
        return lines

    def _split_lines(self, name: str, split: SplitReport) -> list[str]:
        roles = ", ".join(f"{role} {count:,}" for role, count in split.roles.most_common())
        said = (
            f"{split.turns:,} turns ({roles}), {split.trained_turns:,} of them trained" if split.turns else "no turns"
        )
        texts = f", {split.texts:,} of them plain text" if split.texts else ""
        share = split.over / split.counted if split.counted else 0.0
        bars = _histogram(split)
        return [
            f"{name}: {rows_said(split.rows)}{texts}; {said}",
            f"{name}: about {round(split.tokens):,} tokens an epoch, longest row {split.longest:,}; {share:.1%} of the "
            f"rows are over model.max_seq_len {self.max_seq_len:,} ({self.lengths_by})",
            f"{name}: rows by tokens: {bars}",
        ]


def rows_said(count: int) -> str:
    """A number of rows in words."""
    return f"{count:,} row{'s' * (count != 1)}"


def _counted(what: str, places: Places) -> str:
    return f"{rows_said(places.count)}: {what}: {places.words()}"


def _by_count(found: dict[str, Places]) -> list[tuple[str, Places]]:
    return sorted(found.items(), key=lambda item: (-item[1].count, item[0]))


def _file_line(file: FileReport) -> str:
    split = f", split {file.split}" if file.split else ""
    also = f"; its columns also fit {', '.join(file.also)} (data.columns chooses)" if file.also else ""
    unused = f"; columns not used: {', '.join(one_line(key, limit=40) for key in file.unused)}" if file.unused else ""
    return f"  {file.name}: {file.rows:,} rows, {file.format or 'no format'}{split}{also}{unused}"


def _histogram(split: SplitReport) -> str:
    edges = ["0", *map(str, LENGTH_EDGES)]
    parts = []
    for index, count in enumerate(split.lengths):
        if round(count):
            name = f"{edges[index]}-{edges[index + 1]}" if index < len(LENGTH_EDGES) else f"over {LENGTH_EDGES[-1]}"
            parts.append(f"{name}: {round(count):,} ({count / split.counted:.0%})")
    return ", ".join(parts) or "none"


def content_digest(example: Example) -> bytes:
    """32 bytes of the example's content alone: the same row has the same wherever it stands."""
    content: Any = example.text if isinstance(example, Text) else [without_given(example.messages), example.tools]
    return hashlib.sha256(_CANONICAL.encode(content).encode("utf-8", "replace")).digest()


def split_of(digest: bytes, *, val_fraction: float, test_fraction: float) -> str:
    """The split of a row by its digest."""
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < val_fraction:
        return "val"
    return "test" if share < val_fraction + test_fraction else "train"


def process(config: RunConfig, *, force: bool = False, token_counter: TokenCounter | None = None) -> ProcessReport:
    """Read `data.process.raw_path`, write train, val and test rows and report.json to `data.process.out_dir`.

    `force` writes over files that were edited; `token_counter` counts tokens in place of the model's tokenizer.

    Raises:
        DataError: raw files that are missing or cannot be read, rows that cannot be used (unless `data.on_bad_row`
            is skip), files that were edited, nothing left to train on. Nothing is written then.
    """
    check_columns(config.data)
    return _Process(config, token_counter).run(force=force)


class _Process:
    """One pass over the raw files; state that grows is digests (16 bytes a row) and counts."""

    def __init__(self, config: RunConfig, counter: TokenCounter | None) -> None:
        self._config = config
        self._options: ProcessConfig = config.data.process
        self._counter = counter
        self._report = ProcessReport(
            self._options.out_dir,
            config.model.max_seq_len,
            duplicates_dropped=self._options.drop_duplicates,
            leaks_dropped=self._options.drop_leaks,
        )
        self._faults: list[str] = []
        self._has_bad_rows = False
        self._seen: dict[str, set[bytes]] = {name: set() for name in SPLITS}
        self._kinds: dict[str, str] = {}
        self._files: dict[str, TextIO] = {}
        self._lengths: _Lengths | None = None

    def run(self, *, force: bool) -> ProcessReport:
        """Read, check, write."""
        report = self._report
        parts = self._parts()
        out = OutputFolder(
            Path(self._options.out_dir).expanduser(),
            (*(f"{name}.jsonl" for name in SPLITS), "report.json"),
            force=force,
            command="process",
        )
        counter, report.lengths_by = (
            (self._counter, "counted without the template's own tokens")
            if self._counter is not None
            else token_counter(self._config)
        )
        self._lengths = _Lengths(counter, self._config.model.max_seq_len)
        with out:
            for part, split in parts:
                self._read(part, split, out)
            self._judge()
            self._lengths.flush()
            report.splits = {name: report.splits[name] for name in SPLITS if name in report.splits}
            out.write_json("report.json", report.as_json())
        return report

    def _parts(self) -> list[tuple[Part, str | None]]:
        """The raw files with the splits that they name; the held-out ones first, so that leaks are seen."""
        given = self._options.raw_path
        found: list[tuple[Part, str | None]] = []
        for value in (given,) if isinstance(given, str) else given:
            found += self._parts_of(value)
        found = list(dict(found).items())
        held_out = sum(split in ("val", "test") for _, split in found)
        self._report.own_splits = 0 < held_out < len(found)
        if not self._report.own_splits:
            return [(part, None) for part, _ in found]
        there = [name for name in SPLITS if any((split or "train") == name for _, split in found)]
        self._report.remarks.append(
            f"The raw files bring their own splits ({', '.join(there)}); they are kept, and none is split off"
        )
        order = {"val": 0, "test": 1, "train": 2}
        return sorted(((part, split or "train") for part, split in found), key=lambda item: order[item[1] or "train"])

    def _parts_of(self, value: str) -> list[tuple[Part, str | None]]:
        try:
            source = find_source(value)
            parts = data_files(source, text_wanted=self._config.task_mode == "cpt")
        except DataError as error:
            raise DataError(f"data.process.raw_path: {error}") from None
        root = source if isinstance(source, Path) and source.is_dir() else None
        parts = self._without_written(parts, value)
        if root is not None and not is_saved(root):
            taken = {part.name for part in parts}
            self._report.skipped_files += [one_line(str(item)) for item in walk(root) if str(item) not in taken]
        found: list[tuple[Part, str | None]] = []
        for part in parts:
            names = split_names(part)
            if names:
                found += self._splits_of_set(part, names)
            else:
                found.append((part, _named_split(part, root)))
        return found

    def _without_written(self, parts: list[Part], value: str) -> list[Part]:
        """The raw files without those that this project wrote into a folder below them."""
        data = self._config.data
        written = [Path(folder).expanduser().resolve() for folder in (data.process.out_dir, data.style.out_dir)]
        kept = [part for part in parts if not any(part.path.resolve().is_relative_to(folder) for folder in written)]
        if not kept:
            raise DataError(
                f"data.process.raw_path={one_line(value)} lies in the folder that is written to "
                f"({data.process.out_dir}); give data.process.out_dir another one"
            )
        return kept

    def _splits_of_set(self, part: Part, names: list[str]) -> list[tuple[Part, str | None]]:
        """Each split of a saved data set or one of the hub; one that is none of the three is left alone."""
        found: list[tuple[Part, str | None]] = []
        for name in names:
            split = split_of_name(name) or split_of_name(name.replace("_", "-").split("-")[0])
            if split is None and len(names) > 1:
                said = f"{one_line(part.name)}: its split {one_line(name)} is none of {', '.join(SPLITS)}: not read"
                self._report.remarks.append(said)
            else:
                found.append((dataclasses.replace(part, split=name), split or "train"))
        return found

    def _read(self, part: Part, split: str | None, out: OutputFolder) -> None:
        """One raw file: its rows checked and written; its faults kept for the one report of all."""
        name = part.name if part.kind not in ("saved", "hub") else f"{part.name} ({part.split})"
        file = FileReport(one_line(name, limit=4_000), split=split)
        self._report.files.append(file)
        bad = Places()
        reasons: Counter[str] = Counter()
        roles: Counter[str] = Counter()
        try:
            for example in self._examples(part, file):
                file.rows += 1
                if not isinstance(example, BadRow):
                    roles.update(message["role"] for message in getattr(example, "messages", ()))
                problem = example if isinstance(example, BadRow) else self._take(example, split, file, out)
                if problem is None:
                    continue
                self._report.dropped.setdefault(problem.reason, Places()).add(problem.where)
                if not problem.is_asked:
                    self._has_bad_rows = True
                    bad.add(str(problem))
                    reasons[problem.reason] += 1
        except CannotWrite:
            raise
        except DataError as error:
            self._faults.append(_file_fault(file, bad, reasons, roles, str(error)))
            return
        if bad.count and self._config.data.on_bad_row == "fail":
            self._faults.append(_file_fault(file, bad, reasons, roles))

    def _examples(self, part: Part, file: FileReport) -> Iterator[Example | BadRow]:
        rows = read_part(part)
        data = self._config.data
        first, shape = first_format(rows, data)
        if shape is not None:
            self._describe(first[-1], shape, file)
        for raw in (row for source in (first, rows) for row in source):
            if isinstance(raw, BadRow) or shape is None:
                yield raw if isinstance(raw, BadRow) else BadRow(raw.where, "no known format")
                continue
            row = rename_columns(raw, data.columns)
            example = to_example(row, shape, data)
            if is_processed(row.data) and not isinstance(example, BadRow):
                example = _from_processed(example, row)
            yield example

    def _describe(self, raw: RawRow | BadRow, shape: Format, file: FileReport) -> None:
        """What is said of a file's format, from the first row that has it."""
        assert isinstance(raw, RawRow)
        row = rename_columns(raw, self._config.data.columns)
        file.format = shape.name
        others = [found for found in formats_of(row.data) if not set(found.needs) <= set(shape.needs)]
        file.also = tuple(found.name for found in others if not _is_part_of(found, shape))[:4]
        file.unused = tuple(unused_columns(row.data, shape))[:SHOWN]

    def _take(self, example: Example, split: str | None, file: FileReport, out: OutputFolder) -> BadRow | None:
        """Count, place and write one example; a bad row where it would be larger than what can be read again."""
        report = self._report
        digest = content_digest(example)
        line = _LINE.encode(as_row(example, digest))
        if len(line) > MAX_ROW_BYTES // 4 and (size := len(line.encode("utf-8", "replace"))) > MAX_ROW_BYTES:
            return too_large(example.where, size)
        options = self._options
        place = split or split_of(digest, val_fraction=options.val_fraction, test_fraction=options.test_fraction)
        for note in example.notes:
            report.notes.setdefault(note, Places()).add(example.where)
        if self._is_double(digest[:16], place, example.where):
            return None
        self._kinds.setdefault("text" if isinstance(example, Text) else "chats", file.name)
        if self._faults:
            return None  # nothing will be written; the rest is read for its faults
        if place not in self._files:
            self._files[place] = out.open(f"{place}.jsonl")
        self._files[place].write(line + "\n")
        counts = report.splits.setdefault(place, SplitReport())
        _count(example, counts)
        assert self._lengths is not None
        self._lengths.add(example, digest, counts)
        return None

    def _is_double(self, key: bytes, place: str, where: str) -> bool:
        """Whether a row is to be left out because its content stands somewhere else; counts it either way."""
        report, seen = self._report, self._seen[place]
        dropped = False
        if key in seen:
            report.duplicates.add(where)
            dropped = self._options.drop_duplicates
            if dropped:
                report.dropped.setdefault("a duplicate of an earlier row", Places()).add(where)
        seen.add(key)
        others = [name for name in SPLITS[SPLITS.index(place) + 1 :] if key in self._seen[name]]
        if others or (place == "test" and key in self._seen["val"]):
            report.leaks.add(f"{where} ({' and '.join(others) or 'val'})")
            if self._options.drop_leaks and place == "train" and not dropped:
                report.dropped.setdefault("stands in val or test too", Places()).add(where)
                dropped = True
        return dropped

    def _judge(self) -> None:
        """Raises DataError for faults, files that do not belong together, and nothing left."""
        report = self._report
        if self._faults:
            shown = self._faults[:_SHOWN_FILES]
            more = len(self._faults) - len(shown)
            end = [f"… and {more} more files"] if more else []
            skips = self._has_bad_rows and self._config.data.on_bad_row == "fail"
            way = ", or leave rows out, counted, with data.on_bad_row=skip" if skips else ""
            advice = f"mend {'them' if skips or len(self._faults) > 1 else 'it'}{way}; nothing was written"
            raise DataError("\n".join([*shown, *end, advice]))
        if len(self._kinds) > 1:
            raise DataError(
                f"the raw files mix chats ({self._kinds['chats']}) and plain text ({self._kinds['text']}), which are "
                "trained in different ways; process them one after the other, with a data.process.raw_path and "
                "out_dir of their own each"
            )
        if not report.rows_kept:
            reasons = "; ".join(f"{places.count:,} x {reason}" for reason, places in _by_count(report.dropped))
            raise DataError(f"no row is left of {report.rows_in:,} ({reasons or 'the files have none'})")
        if "train" not in report.splits:
            raise DataError(
                f"all {report.rows_kept:,} rows fall into {' and '.join(report.splits)}, none into train; set "
                "data.process.val_fraction=0 and test_fraction=0, or give more rows"
            )
        for name, share in (("val", self._options.val_fraction), ("test", self._options.test_fraction)):
            if name not in report.splits and share and not report.own_splits:
                report.remarks.append(
                    f"No row falls into {name} ({name}_fraction {share:g} of {rows_said(report.rows_kept)}): "
                    f"{name}.jsonl is not written"
                )
            elif name not in report.splits and report.own_splits:
                report.remarks.append(f"The raw files have no {name} rows: {name}.jsonl is not written")


def _is_part_of(found: Format, shape: Format) -> bool:
    """Whether the other format would need only columns that this one reads anyway, such as alpaca's input."""
    return set(found.needs) <= {*shape.needs, *shape.may_have}


def _named_split(part: Part, root: Path | None) -> str | None:
    """The split that a file's name or one of its folders below the raw folder says."""
    path = Path(part.name)
    name = path.name.lower().removesuffix(".gz")
    stem = name.removesuffix(Path(name).suffix)
    folders = path.relative_to(root).parts[:-1] if root is not None and path.is_relative_to(root) else ()
    return next((split for word in (stem, *reversed(folders)) if (split := split_of_name(word))), None)


def _from_processed(example: Example, row: RawRow) -> Example:
    """A row that was processed before keeps the source that it names."""
    source = row.data.get("source")
    return dataclasses.replace(example, where=source) if isinstance(source, str) and source else example


def _file_fault(file: FileReport, bad: Places, reasons: Counter[str], roles: Counter[str], error: str = "") -> str:
    """All that is wrong with one file; with unknown roles, the known ones of its other rows."""
    parts = []
    if bad.count:
        counts = "; ".join(f"{count:,} x {reason}" for reason, count in reasons.most_common(8))
        parts.append(f"{file.name}: {bad.count:,} of {file.rows:,} rows cannot be used ({counts}):")
        parts += [f"  {line}" for line in bad.first]
        if bad.count > len(bad.first):
            parts.append(f"  … and {bad.count - len(bad.first):,} more")
        parts += [f"  {line}" for line in roles_said(reasons, roles)]
    return "\n".join([*parts, *([error] if error else [])])


def as_row(example: Example, digest: bytes) -> dict[str, Any]:
    """The canonical form of an example, as processed files hold it."""
    if isinstance(example, Text):
        content: dict[str, Any] = {"text": example.text}
    else:
        content = {"messages": [as_given(message) for message in example.messages]}
        if example.tools:
            content["tools"] = list(example.tools)
    return {**content, "source": example.where, "id": digest.hex()[:32]}


def _count(example: Example, counts: SplitReport) -> None:
    counts.rows += 1
    if isinstance(example, Text):
        counts.texts += 1
        return
    for message in example.messages:
        counts.roles[message["role"]] += 1
        counts.trained_turns += message["role"] == "assistant" and message.get("train", True)


def _texts_of(example: Example) -> str:
    """Everything of an example that becomes tokens, the template's own left out."""
    if isinstance(example, Text):
        return example.text
    parts = [json.dumps(example.tools, ensure_ascii=False)] if example.tools else []
    for message in example.messages:
        parts += [str(message[key]) for key in TEXT_KEYS if message.get(key)]
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(parts)


class _Lengths:
    """Tokens of rows, counted in batches; beyond many rows a tenth of them, chosen by content, stands for all."""

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
            if digest[8] % _ONE_IN:
                return
            weight = 256 / len(range(0, 256, _ONE_IN))
        text = _texts_of(example)
        self._waiting.append((text, weight, counts))
        self._chars += len(text)
        if len(self._waiting) >= _BATCH or self._chars >= _BATCH_CHARS:
            self.flush()

    def flush(self) -> None:
        """Count what waits."""
        found = self._counts([text for text, _, _ in self._waiting])
        for tokens, (_, weight, counts) in zip(found, self._waiting, strict=True):
            index = next((at for at, edge in enumerate(LENGTH_EDGES) if tokens <= edge), len(LENGTH_EDGES))
            counts.lengths[index] += weight
            counts.counted += weight
            counts.tokens += weight * tokens
            counts.over += weight * (tokens > self._max_seq_len)
            counts.longest = max(counts.longest, tokens)
        self._waiting, self._chars = [], 0

    def _counts(self, texts: list[str]) -> list[int]:
        """The tokens of each text; those of a long one added up over its pieces, each counted by itself."""
        found: list[int] = []
        short: list[str] = []
        for text in texts:
            if len(text) <= 2 * _BATCH_CHARS:
                short.append(text)
                continue
            found += self._counter(short) if short else []
            short = []
            tokens = 0
            while len(text) > 2 * _BATCH_CHARS:
                cut = piece_end(text, _BATCH_CHARS)
                tokens += self._counter([text[:cut]])[0]
                text = text[cut:]
            found.append(tokens + self._counter([text])[0])
        return found + (self._counter(short) if short else [])


def token_counter(config: RunConfig) -> tuple[TokenCounter, str]:
    """What counts tokens, and its name: the model's tokenizer where it lies on this disk, else an estimate."""
    tokenizer = _local_tokenizer(config)
    if tokenizer is None:
        return _estimated, f"lengths are estimated at {CHARACTERS_PER_TOKEN:g} characters per token"

    def count(texts: list[str]) -> list[int]:
        found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [len(ids) for ids in found]

    return count, "counted by the model's tokenizer, without the template's own tokens"


def _estimated(texts: list[str]) -> list[int]:
    return [round(len(text) / CHARACTERS_PER_TOKEN) for text in texts]


def _local_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer from its folder or the hub's cache; None where it is not there or cannot be loaded."""
    name = config.model.name
    if not _has_tokenizer(name, config.model.revision):
        return None
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name,
            revision=config.model.revision,
            local_files_only=True,
            trust_remote_code=False,  # said, for it would be asked on the terminal
        )
    except Exception as error:  # a damaged file fails in as many ways as there are tokenizers
        logger.info("The tokenizer of %s cannot be loaded for lengths: %s", name, one_line(str(error)))
        return None


def _has_tokenizer(name: str, revision: str | None) -> bool:
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return any((folder / file).is_file() for file in files)
    from huggingface_hub import try_to_load_from_cache

    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    except ValueError:  # a name that is no hub id
        return False


def read_processed(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that `make process` wrote, as they stand there.

    Raises:
        DataError: the file is missing or holds something else.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there; make process writes it")
    for row in read_part(Part(str(path), "lines")):
        if isinstance(row, BadRow):
            raise DataError(f"{row}; make process writes it anew")
        if "messages" not in row.data and "text" not in row.data:
            raise DataError(f"{row.where}: neither messages nor text; make process writes rows of that form")
        yield row.data
