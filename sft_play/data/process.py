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
from sft_play.data.build.stats import RowStats, format_row_count
from sft_play.data.checks import judge_columns
from sft_play.data.managed_outputs import OutputFolder, OutputWriteError
from sft_play.data.near_duplicates import (
    SimilarityIndex,
    SketchMaker,
    TextSketch,
    compared_text,
    long_questions,
    read_compared_texts,
)
from sft_play.data.process_report import MAX_LISTED, FileReport, Occurrences, ProcessReport, SplitReport, sort_by_count
from sft_play.data.sources.examples import count_part_rows, read_example
from sft_play.data.sources.files import FilePart, find_source, is_saved_dataset, list_parts, read_part, walk_data_files
from sft_play.data.sources.formats import (
    TEMPLATE_KWARGS,
    Example,
    Text,
    content_digest,
    detect_format,
    digest_share,
    is_processed_row,
    require_known_columns,
)
from sft_play.data.sources.messages import author_form, known_role_lines
from sft_play.data.sources.raw import MAX_ROW_BYTES, BadRow, RawRow, bad_row_lines, too_large_row
from sft_play.data.sources.tables import list_split_names, split_from_name
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.process.waiting import WaitProgress, report_wait
from sft_play.text import GIB

SPLIT_NAMES = ("train", "val", "test")
# Of memory that counting near-duplicates takes; leaving them out takes what it needs.
MAX_INDEX_BYTES = 2 * GIB
_MAX_LISTED_FILES = 50

_JSON_LINE_ENCODER = json.JSONEncoder(ensure_ascii=False)


def split_by_digest(digest: bytes, *, val_fraction: float, test_fraction: float) -> str:
    """The split of a row by its digest."""
    share = digest_share(digest)
    if share < val_fraction:
        return "val"
    return "test" if share < val_fraction + test_fraction else "train"


def process_files(config: RunConfig, *, force: bool = False) -> ProcessReport:
    """Read `data.process.raw_path`, write the splits and report.json to `data.process.out_dir`. `force` overwrites
    files that were edited. Raises DataError, with nothing written, where raw files or rows cannot be used."""
    require_known_columns(config.data)
    return _Processor(config).run(force=force)


class _Processor:
    """One pass over the raw files; what grows with them is digests (16 bytes a row), what near-duplicates are found by
    (`SimilarityIndex`) and counts."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._options: ProcessConfig = config.data.process
        self._report = ProcessReport(self._options, config.model.max_seq_len)
        self._faults: list[str] = []
        self._has_bad_rows = False
        # Digests of the rows of each split.
        self._digests_by_split: dict[str, set[bytes]] = {name: set() for name in SPLIT_NAMES}
        # The first file with chats, and the first with plain text: they are not processed together.
        self._first_file_by_kind: dict[str, str] = {}
        self._output_files: dict[str, TextIO] = {}
        self._similarity_index = (
            None if self._options.near_duplicates == "ignore" else SimilarityIndex(self._sketch_maker)
        )
        # The rows of each file that training rows are compared with.
        self._indexes_by_file: dict[str, SimilarityIndex] = {}
        self._progress: WaitProgress

    @functools.cached_property
    def _sketch_maker(self) -> SketchMaker:
        return SketchMaker(self._options.similarity)

    def run(self, *, force: bool) -> ProcessReport:
        """Read, check, write."""
        report = self._report
        parts = self._find_parts()
        self._index_other_rows(parts)
        names = (*(f"{name}.jsonl" for name in SPLIT_NAMES), "report.json")
        out = OutputFolder(Path(self._options.out_dir).expanduser(), names, force=force, command="process")
        total = functools.partial(count_part_rows, [part for part, _ in parts])
        with out, report_wait("Processing raw rows", unit="rows", count_total=total) as self._progress:
            for part, split in parts:
                self._process_part(part, split, out)
            self._check_results()
            if self._similarity_index is not None and self._is_index_full:
                report.remarks.append(
                    f"Near-duplicates: rows were compared with the first {len(self._similarity_index):,} that have "
                    f"none "
                    f"({MAX_INDEX_BYTES / GIB:g} GiB of memory); data.process.near_duplicates=drop compares with all"
                )
            report.splits = {name: report.splits[name] for name in SPLIT_NAMES if name in report.splits}
            out.write_json("report.json", report.as_json())
        return report

    def _output_folders(self) -> list[Path]:
        data = self._config.data
        return [Path(folder).expanduser().resolve() for folder in (data.process.out_dir, data.style.out_dir)]

    def _index_other_rows(self, parts: list[tuple[FilePart, str | None]]) -> None:
        """Index held-out rows, to find training rows near them; of data.val_path and data.test_path only files that are
        neither trained on nor written."""
        data, compare_paths = self._config.data, self._options.compare_with
        known_paths = {Path(value).expanduser().resolve() for value in compare_paths}
        known_paths |= {part.path.resolve() for part, split in parts if split not in ("val", "test")}
        for value in compare_paths:
            self._index_rows_of_file(value)
        for held_out_path in (data.val_path, data.test_path) if self._similarity_index is not None else ():
            path = Path(held_out_path or "").expanduser().resolve()
            if (
                held_out_path
                and path.exists()
                and path not in known_paths
                and not any(map(path.is_relative_to, self._output_folders()))
            ):
                known_paths.add(path)
                try:
                    self._index_rows_of_file(held_out_path)
                except DataError as error:
                    remark = f"Training rows were not compared with {one_line(held_out_path)}: {error}"
                    self._report.remarks.append(remark)

    def _index_rows_of_file(self, path_or_hub_id: str) -> None:
        index, name = SimilarityIndex(self._sketch_maker), one_line(path_or_hub_id)
        with report_wait(f"Reading the rows of {name}", unit="rows") as progress:
            for text, location in read_compared_texts(path_or_hub_id, self._config.data):
                index.add(self._sketch_maker.sketch(text), location)
                progress.add()
        self._indexes_by_file[name] = index
        self._report.overlaps[name] = Occurrences()

    def _find_parts(self) -> list[tuple[FilePart, str | None]]:
        """The raw files with the splits that they name; the held-out ones first, so that leaks are seen."""
        raw_path = self._options.raw_path
        paths = (raw_path,) if isinstance(raw_path, str) else raw_path
        # a file that two paths name is read once
        splits_by_part = dict(item for path in paths for item in self._find_parts_in(path))
        held_out_count = sum(split in ("val", "test") for split in splits_by_part.values())
        # One held-out file beside others makes it so; files that are all held out are split like any others.
        self._report.has_own_splits = 0 < held_out_count < len(splits_by_part)
        if not self._report.has_own_splits:
            return [(part, None) for part in splits_by_part]
        present_splits = [
            name for name in SPLIT_NAMES if name in {split or "train" for split in splits_by_part.values()}
        ]
        self._report.remarks.append(
            f"The raw files have their own splits ({', '.join(present_splits)}); they are kept, and none is split off"
        )
        order = ("val", "test", "train")
        return [(part, name) for name in order for part, split in splits_by_part.items() if (split or "train") == name]

    def _find_parts_in(self, path_or_hub_id: str) -> list[tuple[FilePart, str | None]]:
        try:
            source = find_source(path_or_hub_id, encoding=self._config.data.encoding)
            parts = list_parts(source, wants_text=self._config.task_mode == "cpt")
        except DataError as error:
            raise DataError(f"data.process.raw_path: {error}") from None
        root = source if isinstance(source, Path) and source.is_dir() else None
        # Our own output may be in a folder below the raw files: it is not read again.
        output_folders = self._output_folders()
        parts = [part for part in parts if not any(map(part.path.resolve().is_relative_to, output_folders))]
        if not parts:
            raise DataError(
                f"data.process.raw_path={one_line(path_or_hub_id)} is in the folder that is written to "
                f"({self._options.out_dir}); give data.process.out_dir another one"
            )
        if root is not None and not is_saved_dataset(root):
            part_names = {part.name for part in parts}
            self._report.skipped_files += [
                one_line(str(item)) for item in walk_data_files(root) if str(item) not in part_names
            ]
        parts_with_splits: list[tuple[FilePart, str | None]] = []
        for part in parts:
            names = list_split_names(part.name, is_on_hub=part.kind == "hub") if part.kind in ("saved", "hub") else []
            parts_with_splits += self._split_data_set(part, names) if names else [(part, _find_named_split(part, root))]
        return parts_with_splits

    def _split_data_set(self, part: FilePart, names: list[str]) -> list[tuple[FilePart, str | None]]:
        parts_with_splits: list[tuple[FilePart, str | None]] = []
        for name in names:
            # `train_sft`, `test_gen`: the split may be the first word
            split = split_from_name(name) or split_from_name(name.replace("_", "-").split("-")[0])
            if split is None and len(names) > 1:
                remark = (
                    f"{one_line(part.name)}: its split {one_line(name)} is none of {', '.join(SPLIT_NAMES)}: not read"
                )
                self._report.remarks.append(remark)
            else:
                parts_with_splits.append((dataclasses.replace(part, split=name), split or "train"))
        return parts_with_splits

    def _process_part(self, part: FilePart, split: str | None, out: OutputFolder) -> None:
        """Check and write the rows of one raw file; its faults are kept for one message about all files."""
        name = part.name if part.kind not in ("saved", "hub") else f"{part.name} ({part.split})"
        file_report = FileReport(one_line(name, limit=4_000), split=split)
        self._report.files.append(file_report)
        stats = RowStats()
        try:
            for example in self._read_examples(part, file_report):
                file_report.rows += 1
                self._progress.add()
                if not isinstance(example, BadRow):
                    stats.count_example(example)
                problem = (
                    example if isinstance(example, BadRow) else self._process_example(example, split, file_report, out)
                )
                if problem is not None:
                    self._report.count_dropped(problem.reason, problem.where)
                    stats.count_bad(problem)
        except OutputWriteError:  # a full disk is no fault of the raw file
            raise
        except DataError as error:
            self._faults.append(_format_file_fault(file_report, stats, str(error)))
            return
        finally:
            self._has_bad_rows = self._has_bad_rows or bool(stats.bad_rows)
            file_report.unused = list(dict.fromkeys(name for name, _, _ in stats.unused_columns))[:MAX_LISTED]
            for finding in judge_columns(stats, self._config.data):
                self._report.remarks += (
                    [f"{file_report.name}: columns {finding.found}"] if finding.verdict == "WARN" else []
                )
        if stats.bad_rows and self._config.data.on_bad_row == "fail":
            self._faults.append(_format_file_fault(file_report, stats))

    def _read_examples(self, part: FilePart, file_report: FileReport) -> Iterator[Example | BadRow]:
        # rows are written without data.style, which make style or a run adds
        rows, data = read_part(part), self._config.data.model_copy(update={"style": StyleConfig()})
        probed_rows, row_format = detect_format(rows, data)
        if row_format is not None:
            file_report.format = row_format.name
        for raw in itertools.chain(probed_rows, rows):
            example = read_example(raw, row_format, data)
            if isinstance(raw, RawRow) and not isinstance(example, BadRow) and is_processed_row(raw.data):
                source = raw.data["source"]  # as it was processed before
                example = dataclasses.replace(example, where=source) if isinstance(source, str) and source else example
            yield example

    def _process_example(
        self, example: Example, split: str | None, file_report: FileReport, out: OutputFolder
    ) -> BadRow | None:
        """Count one example, choose its split and write it; a bad row where it is too large to be read again."""
        report = self._report
        digest = content_digest(example)
        line = _JSON_LINE_ENCODER.encode(processed_row(example, digest))
        # a character takes at most 4 bytes, so only long lines have to be encoded to know their size
        if len(line) > MAX_ROW_BYTES // 4 and (size := len(line.encode("utf-8", "replace"))) > MAX_ROW_BYTES:
            return too_large_row(example.where, size)
        options = self._options
        target_split = split or split_by_digest(
            digest, val_fraction=options.val_fraction, test_fraction=options.test_fraction
        )
        for note in example.notes:
            report.notes.setdefault(note, Occurrences()).add(example.where)
        is_new = not any(digest[:16] in digests for digests in self._digests_by_split.values())
        if self._check_duplicate(digest[:16], target_split, example.where) or self._check_similar(
            example, target_split, is_new=is_new
        ):
            return None
        self._first_file_by_kind.setdefault("text" if isinstance(example, Text) else "chats", file_report.name)
        if self._faults:
            return None  # nothing will be written; the rest is read to list all faults
        if target_split not in self._output_files:  # a split without rows gets no file
            self._output_files[target_split] = out.open(f"{target_split}.jsonl")
        self._output_files[target_split].write(line + "\n")
        report.splits.setdefault(target_split, SplitReport()).count(example, max_seq_len=report.max_seq_len)
        return None

    def _check_duplicate(self, key: bytes, target_split: str, location: str) -> bool:
        report, split_digests = self._report, self._digests_by_split[target_split]
        is_dropped = False
        if key in split_digests:
            report.duplicates.add(location)
            is_dropped = self._options.drop_duplicates
            if is_dropped:
                report.count_dropped("a duplicate of an earlier row", location)
        split_digests.add(key)
        # The held-out splits come first where raw files have their own, so a row of train knows whether they hold it.
        other_splits = [
            name for name in SPLIT_NAMES[SPLIT_NAMES.index(target_split) + 1 :] if key in self._digests_by_split[name]
        ]
        if other_splits or (target_split == "test" and key in self._digests_by_split["val"]):
            report.leaks.add(f"{location} ({' and '.join(other_splits) or 'val'})")
            # from train alone: the held-out rows stay the same whatever is trained on
            if self._options.drop_leaks and target_split == "train" and not is_dropped:
                report.count_dropped("stands in val or test too", location)
                is_dropped = True
        return is_dropped

    def _check_similar(self, example: Example, target_split: str, *, is_new: bool) -> bool:
        """Whether a row is left out as nearly a held-out or an earlier one; counts it either way. What is nearly an
        earlier row is not compared with later ones."""
        report, is_dropped = self._report, False
        if self._similarity_index is None and not self._indexes_by_file:
            return False
        if not is_new and (target_split != "train" or not self._indexes_by_file):
            return False
        sketch = self._sketch_maker.sketch(compared_text(example))
        if target_split == "train" and self._indexes_by_file:
            is_dropped = self._check_held_out(
                example, [sketch, *map(self._sketch_maker.sketch, long_questions(example))]
            )
        if self._similarity_index is None or is_dropped or not is_new:
            return is_dropped
        match = self._similarity_index.nearest(sketch)
        if match is not None:
            report.near_duplicates.add(f"{example.where} (like {match[1]}, {match[0]:.2f})")
            if self._options.near_duplicates == "drop":
                report.count_dropped("nearly an earlier row", example.where)
                return True
        elif not self._is_index_full:
            self._similarity_index.add(sketch, example.where)
        return False

    @property
    def _is_index_full(self) -> bool:
        is_counting_only = self._options.near_duplicates == "count"
        return (
            is_counting_only
            and self._similarity_index is not None
            and self._similarity_index.memory_bytes >= MAX_INDEX_BYTES
        )

    def _check_held_out(self, example: Example, sketches: list[TextSketch]) -> bool:
        report, is_dropped = self._report, False
        for name, index in self._indexes_by_file.items():
            match = max((candidate for sketch in sketches if (candidate := index.nearest(sketch))), default=None)
            if match is not None:
                report.overlaps[name].add(f"{example.where} (like {match[1]}, {match[0]:.2f})")
                if self._options.drop_overlaps and not is_dropped:
                    report.count_dropped("nearly a row of a held-out file", example.where)
                    is_dropped = True
        return is_dropped

    def _check_results(self) -> None:
        report = self._report
        if self._faults:
            listed_faults = self._faults[:_MAX_LISTED_FILES]
            unlisted = len(self._faults) - len(listed_faults)
            ending = [f"… and {unlisted} more files"] if unlisted else []
            can_skip = self._has_bad_rows and self._config.data.on_bad_row == "fail"
            skip_hint = ", or leave rows out, counted, with data.on_bad_row=skip" if can_skip else ""
            advice = f"fix {'them' if can_skip or len(self._faults) > 1 else 'it'}{skip_hint}; nothing was written"
            raise DataError("\n".join([*listed_faults, *ending, advice]))
        if len(self._first_file_by_kind) > 1:
            raise DataError(
                f"the raw files mix chats ({self._first_file_by_kind['chats']}) and plain text "
                f"({self._first_file_by_kind['text']}), which are "
                "trained in different ways; process them separately, each with its own data.process.raw_path "
                "and out_dir"
            )
        if not report.rows_kept:
            reasons = "; ".join(f"{places.count:,} x {reason}" for reason, places in sort_by_count(report.dropped))
            raise DataError(f"no row is left of {report.rows_in:,} ({reasons or 'the files have none'})")
        if "train" not in report.splits:
            raise DataError(
                f"all {report.rows_kept:,} rows fall into {' and '.join(report.splits)}, none into train; set "
                "data.process.val_fraction=0 and test_fraction=0, or give more rows"
            )
        for name, share in (("val", self._options.val_fraction), ("test", self._options.test_fraction)):
            if name not in report.splits and share and not report.has_own_splits:
                report.remarks.append(
                    f"No row falls into {name} ({name}_fraction {share:g} of {format_row_count(report.rows_kept)}): "
                    f"{name}.jsonl is not written"
                )
            elif name not in report.splits and report.has_own_splits:
                report.remarks.append(f"The raw files have no {name} rows: {name}.jsonl is not written")


def _find_named_split(part: FilePart, root: Path | None) -> str | None:
    path = Path(part.name)
    name = path.name.lower().removesuffix(".gz")
    stem = name.removesuffix(Path(name).suffix)
    folders = path.relative_to(root).parts[:-1] if root is not None and path.is_relative_to(root) else ()
    return next((split for word in (stem, *reversed(folders)) if (split := split_from_name(word))), None)


def _format_file_fault(file_report: FileReport, stats: RowStats, error: str = "") -> str:
    lines = []
    if stats.bad_rows:
        head, *rows = bad_row_lines(f"{file_report.rows:,} rows", stats.bad_rows, stats.first_bad_rows)
        lines = [
            f"{file_report.name}: {head}",
            *rows,
            *(f"  {line}" for line in known_role_lines(stats.bad_rows, stats.turns)),
        ]
    return "\n".join([*lines, *([error] if error else [])])


def processed_row(example: Example, digest: bytes) -> dict[str, Any]:
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
