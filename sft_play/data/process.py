"""`make process`: raw files → checked conversations in one form, split, with a report.

Each file is read with its own format. A row's split depends on its content alone, so that adding rows moves none of
the others, and rows with the same content are in the same split; raw files that have splits of their own keep them.
Nothing is written where a row cannot be used, unless data.on_bad_row=skip.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import ProcessConfig, RunConfig, StyleConfig
from sft_play.data.build.stats import RowStats, rows_text
from sft_play.data.checks import judge_columns
from sft_play.data.managed_outputs import CannotWrite, OutputFolder
from sft_play.data.near_duplicates import Similar, Sketch, Sketches, long_questions, texts_to_compare_with, whole_text
from sft_play.data.process_report import SHOWN, FileReport, Places, ProcessReport, SplitReport, by_count
from sft_play.data.sources.examples import read_example, count_part_rows
from sft_play.data.sources.files import FilePart, list_parts, find_source, is_saved_dataset, read_part, walk_data_files
from sft_play.data.sources.formats import (
    TEMPLATE_KWARGS,
    Example,
    Text,
    require_known_columns,
    content_digest,
    digest_share,
    detect_format,
    is_processed_row,
)
from sft_play.data.sources.messages import author_form, known_role_lines
from sft_play.data.sources.raw import MAX_ROW_BYTES, BadRow, RawRow, bad_row_lines, too_large_row
from sft_play.data.sources.tables import split_names, split_from_name
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.process.waiting import WaitProgress, report_wait
from sft_play.units import GIB

SPLITS = ("train", "val", "test")
# Of memory that counting near-duplicates takes; leaving them out takes what it needs.
MOST_INDEX_BYTES = 2 * GIB
_SHOWN_FILES = 50

_LINE = json.JSONEncoder(ensure_ascii=False)


def split_by_digest(digest: bytes, *, val_fraction: float, test_fraction: float) -> str:
    """The split of a row by its digest."""
    share = digest_share(digest)
    if share < val_fraction:
        return "val"
    return "test" if share < val_fraction + test_fraction else "train"


def process(config: RunConfig, *, force: bool = False) -> ProcessReport:
    """Read `data.process.raw_path`, write the splits and report.json to `data.process.out_dir`. `force` overwrites
    files that were edited. Raises DataError, with nothing written, where raw files or rows cannot be used."""
    require_known_columns(config.data)
    return _Process(config).run(force=force)


class _Process:
    """One pass over the raw files; what grows with them is digests (16 bytes a row), what near-duplicates are found by
    (`near.Similar`) and counts."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._options: ProcessConfig = config.data.process
        self._report = ProcessReport(self._options, config.model.max_seq_len)
        self._faults: list[str] = []
        self._has_bad_rows = False
        # Digests of the rows of each split.
        self._seen: dict[str, set[bytes]] = {name: set() for name in SPLITS}
        # The first file with chats, and the first with plain text: they are not processed together.
        self._kinds: dict[str, str] = {}
        self._files: dict[str, TextIO] = {}
        self._near = None if self._options.near_duplicates == "ignore" else Similar(self._sketches)
        # The rows of each file that training rows are compared with.
        self._others: dict[str, Similar] = {}
        self._news: WaitProgress

    @functools.cached_property
    def _sketches(self) -> Sketches:
        return Sketches(self._options.similarity)

    def run(self, *, force: bool) -> ProcessReport:
        """Read, check, write."""
        report = self._report
        parts = self._parts()
        self._compare_with_others(parts)
        names = (*(f"{name}.jsonl" for name in SPLITS), "report.json")
        out = OutputFolder(Path(self._options.out_dir).expanduser(), names, force=force, command="process")
        total = functools.partial(count_part_rows, [part for part, _ in parts])
        with out, report_wait("Processing raw rows", unit="rows", count_total=total) as self._news:
            for part, split in parts:
                self._read(part, split, out)
            self._judge()
            if self._near is not None and self._is_full:
                report.remarks.append(
                    f"Near-duplicates: rows were compared with the first {len(self._near):,} that have none "
                    f"({MOST_INDEX_BYTES / GIB:g} GiB of memory); data.process.near_duplicates=drop compares with all"
                )
            report.splits = {name: report.splits[name] for name in SPLITS if name in report.splits}
            out.write_json("report.json", report.as_json())
        return report

    def _written(self) -> list[Path]:
        data = self._config.data
        return [Path(folder).expanduser().resolve() for folder in (data.process.out_dir, data.style.out_dir)]

    def _compare_with_others(self, parts: list[tuple[FilePart, str | None]]) -> None:
        """Read the rows in which training rows are looked for; of data.val_path and data.test_path only files that are
        neither trained on nor written."""
        data, asked = self._config.data, self._options.compare_with
        known = {Path(value).expanduser().resolve() for value in asked}
        known |= {part.path.resolve() for part, split in parts if split not in ("val", "test")}
        for value in asked:
            self._compare_with(value)
        for held in (data.val_path, data.test_path) if self._near is not None else ():
            path = Path(held or "").expanduser().resolve()
            if held and path.exists() and path not in known and not any(map(path.is_relative_to, self._written())):
                known.add(path)
                try:
                    self._compare_with(held)
                except DataError as error:
                    why = f"Training rows were not compared with {one_line(held)}: {error}"
                    self._report.remarks.append(why)

    def _compare_with(self, value: str) -> None:
        other, name = Similar(self._sketches), one_line(value)
        with report_wait(f"Reading the rows of {name}", unit="rows") as news:
            for text, where in texts_to_compare_with(value, self._config.data):
                other.add(self._sketches.of(text), where)
                news.add()
        self._others[name] = other
        self._report.overlaps[name] = Places()

    def _parts(self) -> list[tuple[FilePart, str | None]]:
        """The raw files with the splits that they name; the held-out ones first, so that leaks are seen."""
        given = self._options.raw_path
        paths = (given,) if isinstance(given, str) else given
        named = dict(item for path in paths for item in self._parts_of(path))  # a file that two paths name is read once
        held_out = sum(split in ("val", "test") for split in named.values())
        # One held-out file beside others makes it so; files that are all held out are split like any others.
        self._report.own_splits = 0 < held_out < len(named)
        if not self._report.own_splits:
            return [(part, None) for part in named]
        present = [name for name in SPLITS if name in {split or "train" for split in named.values()}]
        self._report.remarks.append(
            f"The raw files have their own splits ({', '.join(present)}); they are kept, and none is split off"
        )
        order = ("val", "test", "train")
        return [(part, name) for name in order for part, split in named.items() if (split or "train") == name]

    def _parts_of(self, value: str) -> list[tuple[FilePart, str | None]]:
        try:
            source = find_source(value, encoding=self._config.data.encoding)
            parts = list_parts(source, wants_text=self._config.task_mode == "cpt")
        except DataError as error:
            raise DataError(f"data.process.raw_path: {error}") from None
        root = source if isinstance(source, Path) and source.is_dir() else None
        # Our own output may be in a folder below the raw files: it is not read again.
        written = self._written()
        parts = [part for part in parts if not any(map(part.path.resolve().is_relative_to, written))]
        if not parts:
            raise DataError(
                f"data.process.raw_path={one_line(value)} is in the folder that is written to "
                f"({self._options.out_dir}); give data.process.out_dir another one"
            )
        if root is not None and not is_saved_dataset(root):
            taken = {part.name for part in parts}
            self._report.skipped_files += [one_line(str(item)) for item in walk_data_files(root) if str(item) not in taken]
        named: list[tuple[FilePart, str | None]] = []
        for part in parts:
            names = split_names(part.name, is_on_hub=part.kind == "hub") if part.kind in ("saved", "hub") else []
            named += self._splits_of_set(part, names) if names else [(part, _named_split(part, root))]
        return named

    def _splits_of_set(self, part: FilePart, names: list[str]) -> list[tuple[FilePart, str | None]]:
        splits: list[tuple[FilePart, str | None]] = []
        for name in names:
            # `train_sft`, `test_gen`: the split may be the first word
            split = split_from_name(name) or split_from_name(name.replace("_", "-").split("-")[0])
            if split is None and len(names) > 1:
                remark = f"{one_line(part.name)}: its split {one_line(name)} is none of {', '.join(SPLITS)}: not read"
                self._report.remarks.append(remark)
            else:
                splits.append((dataclasses.replace(part, split=name), split or "train"))
        return splits

    def _read(self, part: FilePart, split: str | None, out: OutputFolder) -> None:
        """Check and write the rows of one raw file; its faults are kept for one message about all files."""
        name = part.name if part.kind not in ("saved", "hub") else f"{part.name} ({part.split})"
        file = FileReport(one_line(name, limit=4_000), split=split)
        self._report.files.append(file)
        stats = RowStats()
        try:
            for example in self._examples(part, file):
                file.rows += 1
                self._news.add()
                if not isinstance(example, BadRow):
                    stats.count_example(example)
                problem = example if isinstance(example, BadRow) else self._take(example, split, file, out)
                if problem is not None:
                    self._report.drop(problem.reason, problem.where)
                    stats.count_bad(problem)
        except CannotWrite:  # a full disk is no fault of the raw file
            raise
        except DataError as error:
            self._faults.append(_file_fault(file, stats, str(error)))
            return
        finally:
            self._has_bad_rows = self._has_bad_rows or bool(stats.bad)
            file.unused = list(dict.fromkeys(name for name, _, _ in stats.unused))[:SHOWN]
            for finding in judge_columns(stats, self._config.data):
                self._report.remarks += [f"{file.name}: columns {finding.found}"] if finding.verdict == "WARN" else []
        if stats.bad and self._config.data.on_bad_row == "fail":
            self._faults.append(_file_fault(file, stats))

    def _examples(self, part: FilePart, file: FileReport) -> Iterator[Example | BadRow]:
        # rows are written without data.style, which make style or a run adds
        rows, data = read_part(part), self._config.data.model_copy(update={"style": StyleConfig()})
        first, shape = detect_format(rows, data)
        if shape is not None:
            file.format = shape.name
        for raw in itertools.chain(first, rows):
            example = read_example(raw, shape, data)
            if isinstance(raw, RawRow) and not isinstance(example, BadRow) and is_processed_row(raw.data):
                source = raw.data["source"]  # as it was processed before
                example = dataclasses.replace(example, where=source) if isinstance(source, str) and source else example
            yield example

    def _take(self, example: Example, split: str | None, file: FileReport, out: OutputFolder) -> BadRow | None:
        """Count one example, choose its split and write it; a bad row where it is too large to be read again."""
        report = self._report
        digest = content_digest(example)
        line = _LINE.encode(as_row(example, digest))
        # a character takes at most 4 bytes, so only long lines have to be encoded to know their size
        if len(line) > MAX_ROW_BYTES // 4 and (size := len(line.encode("utf-8", "replace"))) > MAX_ROW_BYTES:
            return too_large_row(example.where, size)
        options = self._options
        place = split or split_by_digest(digest, val_fraction=options.val_fraction, test_fraction=options.test_fraction)
        for note in example.notes:
            report.notes.setdefault(note, Places()).add(example.where)
        is_new = not any(digest[:16] in seen for seen in self._seen.values())
        if self._is_double(digest[:16], place, example.where) or self._is_similar(example, place, is_new=is_new):
            return None
        self._kinds.setdefault("text" if isinstance(example, Text) else "chats", file.name)
        if self._faults:
            return None  # nothing will be written; the rest is read to list all faults
        if place not in self._files:  # a split without rows gets no file
            self._files[place] = out.open(f"{place}.jsonl")
        self._files[place].write(line + "\n")
        report.splits.setdefault(place, SplitReport()).count(example, max_seq_len=report.max_seq_len)
        return None

    def _is_double(self, key: bytes, place: str, where: str) -> bool:
        report, seen = self._report, self._seen[place]
        dropped = False
        if key in seen:
            report.duplicates.add(where)
            dropped = self._options.drop_duplicates
            if dropped:
                report.drop("a duplicate of an earlier row", where)
        seen.add(key)
        # The held-out splits come first where raw files have their own, so a row of train knows whether they hold it.
        others = [name for name in SPLITS[SPLITS.index(place) + 1 :] if key in self._seen[name]]
        if others or (place == "test" and key in self._seen["val"]):
            report.leaks.add(f"{where} ({' and '.join(others) or 'val'})")
            # from train alone: the held-out rows stay the same whatever is trained on
            if self._options.drop_leaks and place == "train" and not dropped:
                report.drop("stands in val or test too", where)
                dropped = True
        return dropped

    def _is_similar(self, example: Example, place: str, *, is_new: bool) -> bool:
        """Whether a row is left out as nearly a held-out or an earlier one; counts it either way. What is nearly an
        earlier row is not compared with later ones."""
        report, dropped = self._report, False
        if self._near is None and not self._others:
            return False
        if not is_new and (place != "train" or not self._others):
            return False
        sketch = self._sketches.of(whole_text(example))
        if place == "train" and self._others:
            dropped = self._is_held_out(example, [sketch, *map(self._sketches.of, long_questions(example))])
        if self._near is None or dropped or not is_new:
            return dropped
        found = self._near.nearest(sketch)
        if found is not None:
            report.near.add(f"{example.where} (like {found[1]}, {found[0]:.2f})")
            if self._options.near_duplicates == "drop":
                report.drop("nearly an earlier row", example.where)
                return True
        elif not self._is_full:
            self._near.add(sketch, example.where)
        return False

    @property
    def _is_full(self) -> bool:
        counts = self._options.near_duplicates == "count"
        return counts and self._near is not None and self._near.bytes >= MOST_INDEX_BYTES

    def _is_held_out(self, example: Example, sketches: list[Sketch]) -> bool:
        report, dropped = self._report, False
        for name, other in self._others.items():
            found = max((one for sketch in sketches if (one := other.nearest(sketch))), default=None)
            if found is not None:
                report.overlaps[name].add(f"{example.where} (like {found[1]}, {found[0]:.2f})")
                if self._options.drop_overlaps and not dropped:
                    report.drop("nearly a row of a held-out file", example.where)
                    dropped = True
        return dropped

    def _judge(self) -> None:
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
                "trained in different ways; process them separately, each with its own data.process.raw_path "
                "and out_dir"
            )
        if not report.rows_kept:
            reasons = "; ".join(f"{places.count:,} x {reason}" for reason, places in by_count(report.dropped))
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


def _named_split(part: FilePart, root: Path | None) -> str | None:
    path = Path(part.name)
    name = path.name.lower().removesuffix(".gz")
    stem = name.removesuffix(Path(name).suffix)
    folders = path.relative_to(root).parts[:-1] if root is not None and path.is_relative_to(root) else ()
    return next((split for word in (stem, *reversed(folders)) if (split := split_from_name(word))), None)


def _file_fault(file: FileReport, stats: RowStats, error: str = "") -> str:
    lines = []
    if stats.bad:
        head, *rows = bad_row_lines(f"{file.rows:,} rows", stats.bad, stats.first_bad)
        lines = [f"{file.name}: {head}", *rows, *(f"  {line}" for line in known_role_lines(stats.bad, stats.turns))]
    return "\n".join([*lines, *([error] if error else [])])


def as_row(example: Example, digest: bytes) -> dict[str, Any]:
    """The canonical form of an example, as processed files hold it."""
    if isinstance(example, Text):
        content: dict[str, Any] = {"text": example.text}
    else:
        content = {"messages": [author_form(message) for message in example.messages]}
        if example.tools:
            content["tools"] = list(example.tools)
        if example.template_kwargs:
            content[TEMPLATE_KWARGS] = example.template_kwargs
    return {**content, "source": example.where, "id": digest.hex()[:32]}


def read_processed(path: Path) -> Iterator[RawRow]:
    """The rows of a file that `make process` wrote, as they are; raises DataError where it holds something else."""
    if not path.is_file():
        raise DataError(f"{path} is missing; make process writes it")
    for row in read_part(FilePart(str(path), "lines")):
        if isinstance(row, BadRow):
            raise DataError(f"{row}; make process writes it again")
        if "messages" not in row.data and "text" not in row.data:
            raise DataError(f"{row.where}: neither messages nor text; make process writes rows of that form")
        yield row
