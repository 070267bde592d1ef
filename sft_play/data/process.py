"""`make process`: raw files → checked conversations in one form, split, with a report.

Each file is read with its own format. A row's split depends on its content alone, so that adding rows moves none of
the others, and rows with the same content are in the same split; raw files that have splits of their own keep them.
Nothing is written where a row cannot be used, unless data.on_bad_row=skip.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import ProcessConfig, RunConfig
from sft_play.data.masks.render import is_trained_turn
from sft_play.data.size import CHARACTERS_PER_TOKEN
from sft_play.data.sources.files import (
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
from sft_play.data.sources.formats import (
    Example,
    Text,
    check_columns,
    content_digest,
    digest_share,
    first_format,
    formats_of,
    is_processed,
    rename_columns,
    to_example,
    unused_columns,
)
from sft_play.data.sources.messages import TEXT_KEYS, as_given, roles_said
from sft_play.data.sources.raw import MAX_ROW_BYTES, piece_end, too_large
from sft_play.data.sources.tables import split_of_name
from sft_play.data.stats import RowStats, bad_row_lines, rows_text
from sft_play.data.written import CannotWrite, OutputFolder
from sft_play.errors import DataError
from sft_play.log import one_line

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
SHOWN = 20
"""Rows that are named of each problem; the rest is counted."""
_SHOWN_FILES = 50
COUNTED_ROWS = 20_000
"""The first rows, whose tokens are all counted; of the others every tenth, chosen by content, stands for ten."""
_ONE_IN = 10
_BATCH = 500
_BATCH_CHARS = 256 << 10
"""Texts whose tokens are counted together: this many, or this many characters; a longer text is counted in pieces."""
LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_LINE = json.JSONEncoder(ensure_ascii=False)

TokenCounter = Callable[[list[str]], list[int]]
"""Texts → the number of tokens of each."""


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
    lengths: list[float] = field(default_factory=lambda: [0.0] * (len(LENGTH_EDGES) + 1))
    counted: float = 0.0
    over: float = 0.0
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
        lines += [f"Left out: {_counted(reason, places)}" for reason, places in _by_count(self.dropped)]
        lines += [f"Note: {_counted(note, places)}" for note, places in _by_count(self.notes)]
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


def _by_count(counts: dict[str, Places]) -> list[tuple[str, Places]]:
    return sorted(counts.items(), key=lambda item: (-item[1].count, item[0]))


def _file_line(file: FileReport) -> str:
    split = f", split {file.split}" if file.split else ""
    also = f"; its columns also fit {', '.join(file.also)} (data.columns chooses)" if file.also else ""
    unused = f"; columns not used: {', '.join(one_line(key, limit=40) for key in file.unused)}" if file.unused else ""
    return f"  {file.name}: {file.rows:,} rows, {file.format or 'no format'}{split}{also}{unused}"


def split_of(digest: bytes, *, val_fraction: float, test_fraction: float) -> str:
    """The split of a row by its digest."""
    share = digest_share(digest)
    if share < val_fraction:
        return "val"
    return "test" if share < val_fraction + test_fraction else "train"


def process(config: RunConfig, *, force: bool = False, token_counter: TokenCounter | None = None) -> ProcessReport:
    """Read `data.process.raw_path`, write train, val and test rows and report.json to `data.process.out_dir`.

    `force` overwrites files that were edited; `token_counter` counts tokens in place of the model's tokenizer.

    Raises:
        DataError: raw files that are missing or cannot be read, rows that cannot be used (unless `data.on_bad_row`
            is skip), files that were edited, nothing left to train on. Nothing is written then.
    """
    check_columns(config.data)
    return _Process(config, token_counter).run(force=force)


class _Process:
    """One pass over the raw files; what grows with them is digests (16 bytes a row) and counts."""

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
        paths = (given,) if isinstance(given, str) else given
        named = dict(item for path in paths for item in self._parts_of(path))  # a file that two paths name is read once
        held_out = sum(split in ("val", "test") for split in named.values())
        self._report.own_splits = 0 < held_out < len(named)
        if not self._report.own_splits:
            return [(part, None) for part in named]
        present = [name for name in SPLITS if name in {split or "train" for split in named.values()}]
        self._report.remarks.append(
            f"The raw files have their own splits ({', '.join(present)}); they are kept, and none is split off"
        )
        order = ("val", "test", "train")
        return [(part, name) for name in order for part, split in named.items() if (split or "train") == name]

    def _parts_of(self, value: str) -> list[tuple[Part, str | None]]:
        try:
            source = find_source(value)
            parts = data_files(source, text_wanted=self._config.task_mode == "cpt")
        except DataError as error:
            raise DataError(f"data.process.raw_path: {error}") from None
        root = source if isinstance(source, Path) and source.is_dir() else None
        data = self._config.data
        # Our own output may be in a folder below the raw files: it is not read again.
        written = [Path(folder).expanduser().resolve() for folder in (data.process.out_dir, data.style.out_dir)]
        parts = [part for part in parts if not any(part.path.resolve().is_relative_to(folder) for folder in written)]
        if not parts:
            raise DataError(
                f"data.process.raw_path={one_line(value)} is in the folder that is written to "
                f"({data.process.out_dir}); give data.process.out_dir another one"
            )
        if root is not None and not is_saved(root):
            taken = {part.name for part in parts}
            self._report.skipped_files += [one_line(str(item)) for item in walk(root) if str(item) not in taken]
        named: list[tuple[Part, str | None]] = []
        for part in parts:
            names = split_names(part)
            named += self._splits_of_set(part, names) if names else [(part, _named_split(part, root))]
        return named

    def _splits_of_set(self, part: Part, names: list[str]) -> list[tuple[Part, str | None]]:
        """Each split of a saved data set or one of the hub; one that is none of the three is not read."""
        splits: list[tuple[Part, str | None]] = []
        for name in names:
            split = split_of_name(name) or split_of_name(name.replace("_", "-").split("-")[0])
            if split is None and len(names) > 1:
                remark = f"{one_line(part.name)}: its split {one_line(name)} is none of {', '.join(SPLITS)}: not read"
                self._report.remarks.append(remark)
            else:
                splits.append((dataclasses.replace(part, split=name), split or "train"))
        return splits

    def _read(self, part: Part, split: str | None, out: OutputFolder) -> None:
        """Check and write the rows of one raw file; its faults are kept for one message about all files."""
        name = part.name if part.kind not in ("saved", "hub") else f"{part.name} ({part.split})"
        file = FileReport(one_line(name, limit=4_000), split=split)
        self._report.files.append(file)
        stats = RowStats()
        try:
            for example in self._examples(part, file):
                file.rows += 1
                if not isinstance(example, BadRow):
                    stats.count_example(example)
                problem = example if isinstance(example, BadRow) else self._take(example, split, file, out)
                if problem is not None:
                    self._report.dropped.setdefault(problem.reason, Places()).add(problem.where)
                    stats.count_bad(problem)
        except CannotWrite:
            raise
        except DataError as error:
            self._faults.append(_file_fault(file, stats, str(error)))
            return
        finally:
            self._has_bad_rows = self._has_bad_rows or bool(stats.bad)
        if stats.bad and self._config.data.on_bad_row == "fail":
            self._faults.append(_file_fault(file, stats))

    def _examples(self, part: Part, file: FileReport) -> Iterator[Example | BadRow]:
        """The rows of one raw file; its format goes into `file`."""
        rows = read_part(part)
        data = self._config.data
        first, shape = first_format(rows, data)
        if shape is not None:
            assert isinstance(first[-1], RawRow)
            row = rename_columns(first[-1], data.columns)
            file.format = shape.name
            read = {*shape.needs, *shape.may_have}
            # A format whose columns are all read anyway, such as alpaca's input, is not worth a remark.
            file.also = tuple(other.name for other in formats_of(row.data) if not set(other.needs) <= read)[:4]
            file.unused = tuple(unused_columns(row.data, shape))[:SHOWN]
        for raw in (row for source in (first, rows) for row in source):
            if isinstance(raw, BadRow) or shape is None:
                yield raw if isinstance(raw, BadRow) else BadRow(raw.where, "no known format")
                continue
            row = rename_columns(raw, data.columns)
            example = to_example(row, shape, data)
            source = row.data.get("source")
            if isinstance(source, str) and source and is_processed(row.data) and not isinstance(example, BadRow):
                example = dataclasses.replace(example, where=source)  # as it was processed before
            yield example

    def _take(self, example: Example, split: str | None, file: FileReport, out: OutputFolder) -> BadRow | None:
        """Count one example, choose its split and write it; a bad row where it is too large to be read again."""
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
            return None  # nothing will be written; the rest is read to list all faults
        if place not in self._files:
            self._files[place] = out.open(f"{place}.jsonl")
        self._files[place].write(line + "\n")
        counts = report.splits.setdefault(place, SplitReport())
        counts.stats.count_example(example)
        counts.trained_turns += sum(map(is_trained_turn, getattr(example, "messages", ())))
        assert self._lengths is not None
        self._lengths.add(example, digest, counts)
        return None

    def _is_double(self, key: bytes, place: str, where: str) -> bool:
        """Whether a row is left out because its content is somewhere else too; counts it either way."""
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
            advice = f"fix {'them' if skips or len(self._faults) > 1 else 'it'}{way}; nothing was written"
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
                    f"No row falls into {name} ({name}_fraction {share:g} of {rows_text(report.rows_kept)}): "
                    f"{name}.jsonl is not written"
                )
            elif name not in report.splits and report.own_splits:
                report.remarks.append(f"The raw files have no {name} rows: {name}.jsonl is not written")


def _named_split(part: Part, root: Path | None) -> str | None:
    """The split that is in a file's name or that of one of its folders below the raw folder."""
    path = Path(part.name)
    name = path.name.lower().removesuffix(".gz")
    stem = name.removesuffix(Path(name).suffix)
    folders = path.relative_to(root).parts[:-1] if root is not None and path.is_relative_to(root) else ()
    return next((split for word in (stem, *reversed(folders)) if (split := split_of_name(word))), None)


def _file_fault(file: FileReport, stats: RowStats, error: str = "") -> str:
    """All that is wrong with one file; with unknown roles, the known ones of its other rows."""
    lines = []
    if stats.bad:
        head, *rows = bad_row_lines(f"{file.rows:,} rows", stats.bad, stats.first_bad)
        lines = [f"{file.name}: {head}", *rows, *(f"  {line}" for line in roles_said(stats.bad, stats.turns))]
    return "\n".join([*lines, *([error] if error else [])])


def as_row(example: Example, digest: bytes) -> dict[str, Any]:
    """The canonical form of an example, as processed files hold it."""
    if isinstance(example, Text):
        content: dict[str, Any] = {"text": example.text}
    else:
        content = {"messages": [as_given(message) for message in example.messages]}
        if example.tools:
            content["tools"] = list(example.tools)
    return {**content, "source": example.where, "id": digest.hex()[:32]}


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
            if digest[8] % _ONE_IN:
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

    def _counts(self, texts: list[str]) -> list[int]:
        """The tokens of each text; a long one is counted in pieces."""
        counts: list[int] = []
        short: list[str] = []
        for text in texts:
            if len(text) <= 2 * _BATCH_CHARS:
                short.append(text)
                continue
            counts += self._counter(short) if short else []
            short = []
            tokens = 0
            while len(text) > 2 * _BATCH_CHARS:
                cut = piece_end(text, _BATCH_CHARS)
                tokens += self._counter([text[:cut]])[0]
                text = text[cut:]
            counts.append(tokens + self._counter([text])[0])
        return counts + (self._counter(short) if short else [])


def token_counter(config: RunConfig) -> tuple[TokenCounter, str]:
    """What counts tokens, and its name: the model's tokenizer where it is on this disk, else an estimate."""
    tokenizer = _local_tokenizer(config)

    def count(texts: list[str]) -> list[int]:
        if tokenizer is None:
            return [round(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    if tokenizer is None:
        return count, f"lengths are estimated at {CHARACTERS_PER_TOKEN:g} characters per token"
    return count, "counted by the model's tokenizer, without the template's own tokens"


def _local_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer from its folder or the hub's cache; None where there is none or it cannot be loaded."""
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


def read_processed(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that `make process` wrote, as they are.

    Raises:
        DataError: the file is missing or holds something else.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing; make process writes it")
    for row in read_part(Part(str(path), "lines")):
        if isinstance(row, BadRow):
            raise DataError(f"{row}; make process writes it again")
        if "messages" not in row.data and "text" not in row.data:
            raise DataError(f"{row.where}: neither messages nor text; make process writes rows of that form")
        yield row.data
