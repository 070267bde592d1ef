"""`make process`: raw files → checked conversations in one form, split, with a report; and `make
style`, which gives these a system prompt by the file they came from.

Each file is read with its own format. A row's split depends on its content alone, so that adding
rows moves none of the others, and rows with the same content are in the same split; raw files that
have splits of their own keep them. Nothing is written where a row cannot be used, unless
data.on_bad_row=skip.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from sft_play.answers import Answer
from sft_play.config.schema import DataConfig, ProcessConfig, RunConfig, StyleConfig
from sft_play.data.build.stats import RowStats
from sft_play.data.build.survey import CHARACTERS_PER_TOKEN
from sft_play.data.checks import judge_columns
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.masks.render import is_trained_turn
from sft_play.data.near_duplicates import (
    SimilarityIndex,
    SketchMaker,
    TextSketch,
    compared_texts,
    read_compared_texts,
)
from sft_play.data.sources.examples import (
    count_part_rows,
    example_text,
    find_system_prompt,
    read_example,
    set_system_prompt,
)
from sft_play.data.sources.files import (
    FilePart,
    find_source,
    is_saved_dataset,
    list_parts,
    read_part,
    walk_data_files,
)
from sft_play.data.sources.formats import (
    STYLED_KEY,
    TEMPLATE_KWARGS,
    Chat,
    Example,
    Text,
    content_digest,
    detect_format,
    digest_share,
    is_processed_row,
    recognise_format,
    require_known_columns,
    to_example,
)
from sft_play.data.sources.messages import author_form, known_role_lines
from sft_play.data.sources.raw import MAX_ROW_BYTES, BadRow, RawRow, bad_row_lines, too_large_row
from sft_play.data.sources.row_images import split_at_images
from sft_play.data.sources.tables import list_split_names, split_from_name, split_from_set_name
from sft_play.errors import ConfigError, DataError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait
from sft_play.text import GIB, plural

SPLIT_NAMES = ("train", "val", "test")
OUTPUT_NAMES = (*(f"{name}.jsonl" for name in SPLIT_NAMES), "report.json")
# Memory that counting near-duplicates may take; leaving them out takes what it needs.
MAX_INDEX_BYTES = 2 * GIB
# Rows, or files, that are named of each problem; the rest is counted.
MAX_LISTED = 20
# Without the chat template's own tokens: processing needs no model, and its rows may be trained
# with any.
_LENGTH_NOTE = f"lengths are estimated at {CHARACTERS_PER_TOKEN:g} characters per token"

# --- the report -----------------------------------------------------------------------------------


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
        return ", ".join(self.first) + _more(self.count, ", … and {} more")


def _more(count: int, text: str) -> str:
    return text.format(f"{count - MAX_LISTED:,}") if count > MAX_LISTED else ""


@dataclass
class FileReport:
    """One raw file: its format, the split it names, its rows, and columns that are not used."""

    name: str
    format: str = ""
    split: str | None = None
    rows: int = 0
    unused: list[str] = field(default_factory=list)


@dataclass
class SplitReport:
    """One written split: rows, turns by role, trained turns, and lengths in estimated tokens."""

    rows: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    trained_turns: int = 0
    tokens: int = 0
    # Rows that are longer than max_seq_len.
    rows_over_limit: int = 0
    longest: int = 0

    def count(self, example: Example, *, max_seq_len: int) -> None:
        """Count a row."""
        messages = getattr(example, "messages", ())
        self.rows += 1
        self.roles.update(message["role"] for message in messages)
        self.trained_turns += sum(map(is_trained_turn, messages))
        tokens = round(len(example_text(example)) / CHARACTERS_PER_TOKEN)
        self.tokens += tokens
        self.rows_over_limit += tokens > max_seq_len
        self.longest = max(self.longest, tokens)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "rows": self.rows,
            "turns": self.roles.total(),
            "roles": dict(sorted(self.roles.items())),
            "trained_turns": self.trained_turns,
            "tokens_estimated": self.tokens,
            "longest": self.longest,
            "share_over_max_seq_len": round(self.rows_over_limit / self.rows, 6),
        }

    def lines(self, max_seq_len: int) -> list[str]:
        """The report in words."""
        turns = "plain text"  # chats are not mixed with it
        if self.roles:
            roles = ", ".join(f"{role} {count:,}" for role, count in self.roles.most_common())
            turns = (
                f"{self.roles.total():,} turns ({roles}), {self.trained_turns:,} of them trained"
            )
        return [
            f"{plural(self.rows, 'row')}; {turns}",
            (
                f"about {self.tokens:,} tokens an epoch, longest row {self.longest:,};"
                f" {self.rows_over_limit / self.rows:.1%} of the rows are over model.max_seq_len"
                f" {max_seq_len:,} ({_LENGTH_NOTE})"
            ),
        ]


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

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which report.json holds."""
        options = self.options
        return {
            "ok": self.ok,
            "out_dir": options.out_dir,
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "rows_dropped": sum(places.count for places in self.dropped.values()),
            "dropped": {reason: asdict(places) for reason, places in self.dropped.items()},
            "notes": {note: asdict(places) for note, places in self.notes.items()},
            "duplicates": {**asdict(self.duplicates), "dropped": options.drop_duplicates},
            "leaks": {**asdict(self.leaks), "dropped": options.drop_leaks},
            "near_duplicates": {
                **asdict(self.near_duplicates),
                "dropped": {"ignore": None, "count": False, "drop": True}[options.near_duplicates],
            },
            "overlaps": {
                name: {**asdict(places), "dropped": options.drop_overlaps}
                for name, places in self.overlaps.items()
            },
            "own_splits": self.has_own_splits,
            "splits": {name: split.as_json() for name, split in self.splits.items()},
            # one pass over train; the chat template's own tokens come on top
            "tokens_per_epoch_estimated": self.splits["train"].tokens,
            "max_seq_len": self.max_seq_len,
            "lengths_by": _LENGTH_NOTE,
            "files": [asdict(file) for file in self.files],
            "files_left_alone": self.skipped_files,
            "remarks": self.remarks,
        }

    def lines(self) -> list[str]:
        """The report in words, one thing a line."""
        options, file_count = self.options, len(self.files)
        split_counts = ", ".join(f"{name} {split.rows:,}" for name, split in self.splits.items())
        lines = [
            f"Processed {plural(self.rows_in, 'row')} of {file_count}"
            f" file{'s' * (file_count != 1)}: {self.rows_kept:,} kept ({split_counts}) in"
            f" {options.out_dir}"
        ]
        for file in self.files[:MAX_LISTED]:
            line = f"  {file.name}: {file.rows:,} rows, {file.format or 'no format'}"
            if file.split:
                line += f", split {file.split}"
            if file.unused:
                line += (
                    "; columns not used:"
                    f" {', '.join(one_line(key, limit=40) for key in file.unused)}"
                )
            lines.append(line)
        lines += filter(None, [_more(file_count, "  … and {} more files")])
        for title, counts in (("Left out", self.dropped), ("Note", self.notes)):
            for reason, places in _sort_by_count(counts):
                lines.append(
                    f"{title}: {plural(places.count, 'row')}: {reason}: {places.format_locations()}"
                )
        checks = [
            ("Duplicates", self.duplicates, options.drop_duplicates, "drop_duplicates=true"),
            (
                "Leaks (rows that are in another split too)",
                self.leaks,
                options.drop_leaks,
                "drop_leaks=true",
            ),
        ]
        if options.near_duplicates != "ignore":
            is_dropped = options.near_duplicates == "drop"
            checks.append(
                ("Near-duplicates", self.near_duplicates, is_dropped, "near_duplicates=drop")
            )
        checks += [
            (f"Training rows nearly in {name}", places, options.drop_overlaps, "drop_overlaps=true")
            for name, places in self.overlaps.items()
        ]
        for title, places, is_dropped, option in checks:
            line = f"{title}: {places.count:,}"
            if places.count:
                outcome = (
                    "left out" if is_dropped else f"kept; data.process.{option} leaves them out"
                )
                line += f", {outcome}: {places.format_locations()}"
            lines.append(line)
        lines += self.remarks
        if self.skipped_files:
            lines.append(
                f"Files not read, whose names are not those of data ({len(self.skipped_files)}):"
                f" {', '.join(self.skipped_files[:MAX_LISTED])}"
            )
        for name, split in self.splits.items():
            lines += [f"{name}: {line}" for line in split.lines(self.max_seq_len)]
        return lines


def _sort_by_count(counts: dict[str, Occurrences]) -> list[tuple[str, Occurrences]]:
    return sorted(counts.items(), key=lambda item: (-item[1].count, item[0]))


# --- raw files to processed rows ------------------------------------------------------------------


def split_by_digest(digest: bytes, *, val_fraction: float, test_fraction: float) -> str:
    """The split of a row by its digest."""
    share = digest_share(digest)
    if share < val_fraction:
        return "val"
    return "test" if share < val_fraction + test_fraction else "train"


def process_files(config: RunConfig, *, force: bool = False) -> ProcessReport:
    """Read `data.process.raw_path`, write the splits and report.json to `data.process.out_dir`.
    `force` overwrites files that were edited. Raises DataError, with nothing written, where raw
    files or rows cannot be used.
    """
    require_known_columns(config.data)
    return _Processor(config).run(force=force)


class _Processor:
    # Memory grows with the raw files by digests (16 bytes a row), by what near-duplicates are found
    # by, and by counts.
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._options: ProcessConfig = config.data.process
        self._report = ProcessReport(self._options, config.model.max_seq_len)
        self._output_folders = [
            Path(folder).expanduser().resolve()
            for folder in (self._options.out_dir, config.data.style.out_dir)
        ]
        self._faults: list[str] = []
        self._has_bad_rows = False
        # Digests of the rows of each split.
        self._digests_by_split: dict[str, set[bytes]] = {name: set() for name in SPLIT_NAMES}
        # The first file with chats, and the first with plain text: they are not processed together.
        self._first_file_by_kind: dict[str, str] = {}
        self._output_files: dict[str, TextIO] = {}
        self._compares_rows = self._options.near_duplicates != "ignore"
        self._sketch_maker = SketchMaker(self._options.similarity)
        self._similarity_index = SimilarityIndex(self._sketch_maker)
        # The rows of each file that training rows are compared with.
        self._indexes_by_file: dict[str, SimilarityIndex] = {}

    def run(self, *, force: bool) -> ProcessReport:
        report = self._report
        parts = self._find_parts()
        self._index_compared_files(parts)
        out = OutputFolder(
            Path(self._options.out_dir).expanduser(), OUTPUT_NAMES, force=force, command="process"
        )
        waiting = report_wait(
            "Processing raw rows",
            unit="rows",
            count_total=lambda: count_part_rows([part for part, _ in parts]),
        )
        with out, waiting as self._progress:
            for part, split in parts:
                self._process_part(part, split, out)
            if (
                self._options.near_duplicates == "count"
                and self._similarity_index.memory_bytes >= MAX_INDEX_BYTES
            ):
                report.remarks.append(
                    f"Near-duplicates: counting takes {MAX_INDEX_BYTES / GIB:g} GiB of memory at"
                    " most, and was not done for all rows; data.process.near_duplicates=drop"
                    " compares all"
                )
            if self._faults:
                more = filter(None, [_more(len(self._faults), "… and {} more files")])
                advice = "fix it" if len(self._faults) == 1 else "fix them"
                if self._has_bad_rows and self._config.data.on_bad_row == "fail":
                    advice = "fix them, or leave rows out, counted, with data.on_bad_row=skip"
                raise DataError(
                    "\n".join([*self._faults[:MAX_LISTED], *more, f"{advice}; nothing was written"])
                )
            if len(self._first_file_by_kind) > 1:
                raise DataError(
                    f"the raw files mix chats ({self._first_file_by_kind['chats']}) and plain text"
                    f" ({self._first_file_by_kind['text']}), which are trained in different ways;"
                    " process them separately, each with its own data.process.raw_path and out_dir"
                )
            if not report.rows_kept:
                reasons = "; ".join(
                    f"{places.count:,} x {reason}"
                    for reason, places in _sort_by_count(report.dropped)
                )
                raise DataError(
                    f"no row is left of {report.rows_in:,} ({reasons or 'the files have none'})"
                )
            if "train" not in report.splits:
                raise DataError(
                    f"all {report.rows_kept:,} rows fall into {' and '.join(report.splits)}, none"
                    " into train; set data.process.val_fraction=0 and test_fraction=0, or give"
                    " more rows"
                )
            report.splits = {
                name: report.splits[name] for name in SPLIT_NAMES if name in report.splits
            }
            out.write_json("report.json", report.as_json())
        return report

    def _index_compared_files(self, parts: list[tuple[FilePart, str | None]]) -> None:
        """Index the rows that training rows are compared with: those of the files of
        data.process.compare_with; and of data.val_path and data.test_path where these are neither
        trained on nor written here. Raises DataError with the key of a file that cannot be read.
        """
        data = self._config.data
        # by their resolved paths: a file that two keys name is read once
        files = {
            Path(value).expanduser().resolve(): ("data.process.compare_with", value)
            for value in self._options.compare_with
        }
        trained_paths = [
            part.path.resolve() for part, split in parts if split not in ("val", "test")
        ]
        for key, value in (("data.val_path", data.val_path), ("data.test_path", data.test_path)):
            path = Path(value or "").expanduser().resolve()
            is_held_out = path.exists() and path not in trained_paths and not self._is_output(path)
            if value and self._compares_rows and is_held_out:
                files.setdefault(path, (key, value))
        for key, value in files.values():
            index, name = SimilarityIndex(self._sketch_maker), one_line(value)
            try:
                with report_wait(f"Reading the rows of {name}", unit="rows") as progress:
                    for text, location in read_compared_texts(value, data):
                        index.add(self._sketch_maker.sketch(text), location)
                        progress.add()
            except DataError as error:
                raise DataError(f"{key}: {error}") from None
            self._indexes_by_file[name] = index
            self._report.overlaps[name] = Occurrences()

    def _is_output(self, path: Path) -> bool:
        # our own output may be in a folder below the raw files
        return any(map(path.resolve().is_relative_to, self._output_folders))

    # The raw files.

    def _find_parts(self) -> list[tuple[FilePart, str | None]]:
        # the held-out ones first, so that leaks are seen
        raw_path = self._options.raw_path
        paths = (raw_path,) if isinstance(raw_path, str) else raw_path
        # a file that two paths name is read once
        splits_by_part = dict(item for path in paths for item in self._find_parts_in(path))
        held_out_count = sum(split in ("val", "test") for split in splits_by_part.values())
        # One held-out file beside others makes it so; files that are all held out are split like
        # any others.
        self._report.has_own_splits = 0 < held_out_count < len(splits_by_part)
        if not self._report.has_own_splits:
            return [(part, None) for part in splits_by_part]
        parts = [(part, split or "train") for part, split in splits_by_part.items()]
        present_splits = [name for name in SPLIT_NAMES if name in {split for _, split in parts}]
        self._report.remarks.append(
            f"The raw files have their own splits ({', '.join(present_splits)}); they are kept, and"
            " none is split off"
        )
        return sorted(parts, key=lambda item: ("val", "test", "train").index(item[1]))

    def _find_parts_in(self, path_or_hub_id: str) -> Iterator[tuple[FilePart, str | None]]:
        try:
            source = find_source(path_or_hub_id, encoding=self._config.data.encoding)
            parts = list_parts(source, wants_text=self._config.task_mode == "cpt")
        except DataError as error:
            raise DataError(f"data.process.raw_path: {error}") from None
        parts = [part for part in parts if not self._is_output(part.path)]
        if not parts:
            raise DataError(
                f"data.process.raw_path={one_line(path_or_hub_id)} is in the folder that is written"
                f" to ({self._options.out_dir}); give data.process.out_dir another one"
            )
        folder = source if isinstance(source, Path) and source.is_dir() else None
        if folder is not None and not is_saved_dataset(folder):
            part_names = {part.name for part in parts}
            self._report.skipped_files += [
                one_line(str(item))
                for item in walk_data_files(folder)
                if str(item) not in part_names and not self._is_output(item)
            ]
        for part in parts:
            has_splits = part.kind in ("saved", "hub")
            names = list_split_names(part.name, is_on_hub=part.kind == "hub") if has_splits else []
            for name in names:
                split = split_from_set_name(name)
                if split or len(names) == 1:
                    yield replace(part, split=name), split or "train"
                else:
                    self._report.remarks.append(
                        f"{one_line(part.name)}: its split {one_line(name)} is none of"
                        f" {', '.join(SPLIT_NAMES)}: not read"
                    )
            if not names:
                # the split that the file's name says, or that of a folder it is in, the nearest
                # first
                path = Path(part.name)
                path_names = [path.name.lower().removesuffix(".gz").rpartition(".")[0] or path.name]
                if folder is not None:
                    path_names += reversed(path.relative_to(folder).parts[:-1])
                yield part, next(filter(None, map(split_from_name, path_names)), None)

    def _process_part(self, part: FilePart, split: str | None, out: OutputFolder) -> None:
        # faults are kept for one message about all files
        name = f"{part.name} ({part.split})" if part.kind in ("saved", "hub") else part.name
        file_report = FileReport(one_line(name, limit=4_000), split=split)
        stats, error_text = RowStats(), ""
        self._report.files.append(file_report)
        # rows are written without data.style, which make style or a run adds
        data = self._config.data.model_copy(update={"style": StyleConfig()})
        try:
            rows = read_part(part)
            probed_rows, row_format = detect_format(rows, data)
            if row_format is not None:
                file_report.format = row_format.name
            for raw in itertools.chain(probed_rows, rows):
                example = read_example(raw, row_format, data)
                file_report.rows += 1
                self._progress.add()
                if not isinstance(example, BadRow):
                    assert isinstance(raw, RawRow)
                    # a row that was processed before keeps the place that it came from
                    if is_processed_row(raw.data) and isinstance(raw.data["source"], str):
                        example = replace(example, where=raw.data["source"] or example.where)
                    stats.count_example(example)
                    example = self._process_example(example, split, file_report.name, out)
                if isinstance(example, BadRow):
                    self._report.dropped.setdefault(example.reason, Occurrences()).add(
                        example.where
                    )
                    stats.count_bad(example)
        except DataError as error:
            error_text = str(error)
        file_report.unused = list(dict.fromkeys(name for name, _, _ in stats.unused_columns))[
            :MAX_LISTED
        ]
        self._report.remarks += [
            f"{file_report.name}: columns {finding.found}"
            for finding in judge_columns(stats, self._config.data)
            if finding.verdict == "WARN"
        ]
        self._has_bad_rows |= bool(stats.bad_rows)
        if error_text or (stats.bad_rows and self._config.data.on_bad_row == "fail"):
            lines = []
            if stats.bad_rows:
                head, *bad_rows = bad_row_lines(
                    f"{file_report.rows:,} rows", stats.bad_rows, stats.first_bad_rows
                )
                role_lines = [f"  {line}" for line in known_role_lines(stats.bad_rows, stats.turns)]
                lines = [f"{file_report.name}: {head}", *bad_rows, *role_lines]
            self._faults.append("\n".join(filter(None, [*lines, error_text])))

    def _process_example(
        self, example: Example, split: str | None, file_name: str, out: OutputFolder
    ) -> Example | BadRow:
        """Count a row, and write it where nothing says to leave it out. Returns the row, or the bad
        row where it would be too large to be read again."""
        report, options = self._report, self._options
        digest = content_digest(example)
        folder = Path(options.out_dir)
        line = json.dumps(processed_row(example, digest, folder), ensure_ascii=False)
        # a character takes at most 4 bytes: only long lines have to be encoded to know their size
        if (
            len(line) > MAX_ROW_BYTES // 4
            and (size := len(line.encode("utf-8", "replace"))) > MAX_ROW_BYTES
        ):
            return too_large_row(example.where, size)
        if split is None:
            split = split_by_digest(
                digest, val_fraction=options.val_fraction, test_fraction=options.test_fraction
            )
        for note in example.notes:
            report.notes.setdefault(note, Occurrences()).add(example.where)
        # why the row is left out, "" where it is kept: it is there already, or nearly
        splits_with_row = [
            name for name, digests in self._digests_by_split.items() if digest[:16] in digests
        ]
        self._digests_by_split[split].add(digest[:16])
        reason = ""
        if split in splits_with_row:
            report.duplicates.add(example.where)
            reason = "a duplicate of an earlier row" * options.drop_duplicates
        # The held-out splits come first where raw files have their own, so a row of train knows
        # whether they hold it.
        other_splits = [name for name in splits_with_row if name != split]
        if other_splits:
            report.leaks.add(f"{example.where} ({' and '.join(other_splits)})")
            # from train alone: the held-out rows stay the same whatever is trained on
            if options.drop_leaks and split == "train":
                reason = reason or "stands in val or test too"
        # Rows that are nearly the same. A sketch takes longer than all else here: it is made once.
        sketches: list[TextSketch] = []
        if not reason and split == "train" and self._indexes_by_file:
            sketches = [self._sketch_maker.sketch(text) for text in compared_texts(example)]
            for name, other_rows in self._indexes_by_file.items():
                match = max(filter(None, map(other_rows.nearest, sketches)), default=None)
                if match is not None:
                    report.overlaps[name].add(f"{example.where} (like {match[1]}, {match[0]:.2f})")
                    reason = "nearly a row of a held-out file" * options.drop_overlaps
        if not reason and self._compares_rows and not splits_with_row:
            index, is_dropped = self._similarity_index, options.near_duplicates == "drop"
            if not sketches:
                sketches = [self._sketch_maker.sketch(next(compared_texts(example)))]
            match = index.nearest(sketches[0])
            if match is not None:  # later rows are not compared with it then
                report.near_duplicates.add(f"{example.where} (like {match[1]}, {match[0]:.2f})")
                reason = "nearly an earlier row" * is_dropped
            elif is_dropped or index.memory_bytes < MAX_INDEX_BYTES:
                index.add(sketches[0], example.where)
        if reason:
            report.dropped.setdefault(reason, Occurrences()).add(example.where)
            return example
        self._first_file_by_kind.setdefault(
            "text" if isinstance(example, Text) else "chats", file_name
        )
        if not self._faults:  # else nothing will be written; the rest is read to list all faults
            if split not in self._output_files:  # a split without rows gets no file
                self._output_files[split] = out.open(f"{split}.jsonl")
            self._output_files[split].write(line + "\n")
            report.splits.setdefault(split, SplitReport()).count(
                example, max_seq_len=report.max_seq_len
            )
        return example


def processed_row(example: Example, digest: bytes, folder: Path) -> dict[str, Any]:
    """The canonical form of an example, as processed files in this folder hold it."""
    if isinstance(example, Text):
        content: dict[str, Any] = {"text": example.text}
    else:
        content = written_messages(example, folder)
        if example.tools:
            content["tools"] = list(example.tools)
        if example.template_kwargs:
            content[TEMPLATE_KWARGS] = example.template_kwargs
    return {**content, "source": example.where, "id": digest.hex()[:32]}


def written_messages(chat: Chat, folder: Path) -> dict[str, Any]:
    """The columns for a chat's messages and images, as files in this folder hold them: images by
    their path, which is relative where they lie in the folder, or as data URIs."""
    messages = [author_form(message) for message in chat.messages]
    if not chat.images:
        return {"messages": messages}
    root = folder.expanduser().absolute()
    images = []
    for picture in chat.images:
        path = Path(picture.path)
        if not picture.path:
            images.append(picture.data_uri)
        else:
            images.append(str(path.relative_to(root) if path.is_relative_to(root) else path))
    return {"messages": [split_at_images(message) for message in messages], "images": images}


def read_processed(path: Path) -> Iterator[RawRow]:
    """The rows of a file that `make process` wrote, as they are; raises DataError where it holds
    something else."""
    if not path.is_file():
        raise DataError(f"{path} is missing; make process writes it")
    for row in read_part(FilePart(str(path), "lines")):
        if isinstance(row, BadRow):
            raise DataError(f"{row}; make process writes it again")
        if "messages" not in row.data and "text" not in row.data:
            raise DataError(
                f"{row.where}: neither messages nor text; make process writes rows of that form"
            )
        yield row


# --- processed rows to rows with a system prompt --------------------------------------------------

_OUTCOMES = ("set", "prepended", "replaced", "left", "text")


@dataclass
class StyleReport(Answer):
    """How many rows of each split had their system prompt set, prepended, replaced or left, and how
    many are plain text."""

    out_dir: str
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    unused_globs: tuple[str, ...] = ()

    @property
    def total(self) -> Counter[str]:
        """The counts of all splits."""
        return sum(self.splits.values(), Counter())

    def lines(self) -> list[str]:
        """The report in words."""
        lines = [
            f"Styled {plural(self.total.total(), 'row')} into {self.out_dir}:"
            f" {_format_outcomes(self.total)}"
        ]
        for name, counts in self.splits.items():
            lines.append(f"  {name}: {plural(counts.total(), 'row')}, {_format_outcomes(counts)}")
        return [
            *lines,
            *(
                f"data.style.per_source: no row's source matches {one_line(g)}"
                for g in self.unused_globs
            ),
        ]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which report.json holds."""
        splits = {
            name: {outcome: counts[outcome] for outcome in _OUTCOMES}
            for name, counts in self.splits.items()
        }
        return {
            "ok": self.ok,
            "out_dir": self.out_dir,
            **{outcome: self.total[outcome] for outcome in _OUTCOMES},
            "splits": splits,
            "unused_globs": [*self.unused_globs],
        }


def _format_outcomes(counts: Counter[str]) -> str:
    words = {outcome: outcome for outcome in _OUTCOMES} | {"text": "rows of plain text untouched"}
    return (
        ", ".join(
            f"{counts[outcome]:,} {word}" for outcome, word in words.items() if counts[outcome]
        )
        or "none"
    )


def style_rows(config: RunConfig, text: str | None, *, force: bool = False) -> StyleReport:
    """Write the splits of `data.process.out_dir` to `data.style.out_dir` with system prompts: the
    prompt of the first glob of `data.style.per_source` that matches, else `text` (STYLE=), else
    `data.style.system`. Raises ConfigError without a prompt, DataError without processed rows or
    where edited files would be written over.
    """
    options = config.data.style
    if text is not None:
        options = options.model_copy(update={"system": text})
    if not (options.system or "").strip() and not options.per_source:
        raise ConfigError(
            "no system prompt is given: make style STYLE='You are terse.', or data.style.system, or"
            " data.style.per_source={'*faq*': 'You answer briefly.'}"
        )
    source, target = (
        Path(path).expanduser() for path in (config.data.process.out_dir, options.out_dir)
    )
    if source.resolve() == target.resolve():
        raise ConfigError(
            f"data.style.out_dir={options.out_dir} is data.process.out_dir; give it another folder"
        )
    names = [
        name for name in SPLIT_NAMES if name == "train" or (source / f"{name}.jsonl").is_file()
    ]
    report, unused_globs = StyleReport(str(target)), dict.fromkeys(options.per_source)
    # what else data.* says was done when the rows were processed
    image_options = DataConfig(
        fetch_images=config.data.fetch_images, max_image_megapixels=config.data.max_image_megapixels
    )
    with OutputFolder(target, OUTPUT_NAMES, force=force, command="style") as output:
        for name in names:
            path, file = source / f"{name}.jsonl", output.open(f"{name}.jsonl")
            counts = report.splits.setdefault(name, Counter())
            with report_wait(
                f"Styling {name} rows",
                unit="rows",
                count_total=functools.partial(count_part_rows, [FilePart(str(path), "lines")]),
            ) as progress:
                for row in read_processed(path):
                    prompt, glob = find_system_prompt(str(row.data.get("source")), options)
                    unused_globs.pop(glob, None)
                    row_format = recognise_format(row.data)
                    assert row_format is not None  # it has messages, or text
                    example = to_example(row, row_format, image_options)
                    if isinstance(example, BadRow):
                        raise DataError(f"{example}; make process writes it again")
                    styled, outcome = set_system_prompt(example, options, prompt)
                    counts[outcome] += 1
                    styled_row = row.data
                    if isinstance(styled, Chat):
                        styled_row = {
                            **row.data,
                            **written_messages(styled, target),
                            STYLED_KEY: True,
                        }
                    file.write(json.dumps(styled_row, ensure_ascii=False) + "\n")
                    progress.add()
        report.unused_globs = tuple(unused_globs)
        output.write_json("report.json", report.as_json())
    return report
