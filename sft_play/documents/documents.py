"""`make dapt-docx`: documents become clean text, one row of JSON for each document or part of one.

Each document is read by a process with limits (`reader.py`), its repeated paragraphs are left out, and it is cut
between paragraphs into rows `{"text": …, "source": name, "part": n}`. No row holds text of two documents. A document's
split depends on its own text alone.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import json
import os
import queue
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import DocumentsConfig, RunConfig
from sft_play.data.build.workers import usable_cores
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.sources.files import find_source, walk_data_files
from sft_play.data.sources.formats import digest_share
from sft_play.documents.reader import (
    DOCUMENT_KINDS,
    FENCE,
    HEADING,
    ReaderProcess,
    UnreadableDocumentError,
    join_paragraphs,
    split_chunks,
    split_paragraphs,
)
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait

TRAIN_FILE, VAL_FILE, REPORT_JSON_FILE = "train.jsonl", "val.jsonl", "report.json"
# The packages of the documents extra, and the module of each.
DOCUMENT_PACKAGES = {
    "beautifulsoup4": "bs4",
    "lxml_html_clean": "lxml_html_clean",
    "markitdown": "markitdown",
    "trafilatura": "trafilatura",
}
# Shorter paragraphs (in UTF-8) are never counted as repeats: "Yes.", a speaker's name, the points of a list.
MIN_REPEATED_BYTES = 40
_MAX_LISTED_ITEMS = 20
_MAX_PROCESSES = 8
# A process takes two seconds to start: it is worth it for this many documents.
_DOCUMENTS_PER_PROCESS = 4


@dataclass
class DocumentsReport:
    """What was found, read, left out and written; `repeated_paragraphs`: seen earlier in this document or another."""

    config: DocumentsConfig
    documents: dict[str, Path] = field(default_factory=dict)
    """By their names in rows and reports, in order."""
    other_files: Counter[str] = field(default_factory=Counter)
    """Files that are no documents, by ending."""
    unreadable: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    repeated_paragraphs: int = 0
    paragraphs: int = 0
    splits: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter(documents=0, rows=0, characters=0) for name in (TRAIN_FILE, VAL_FILE)}
    )
    """Documents, rows and characters of each file."""
    is_all_trained: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """What data.documents.path names."""
        document_path = self.config.path
        return (document_path,) if isinstance(document_path, str) else document_path

    @property
    def ok(self) -> bool:
        """Whether there is text to train on."""
        return self.splits[TRAIN_FILE]["rows"] > 0

    def as_json(self) -> dict[str, Any]:
        """The content of report.json; counts in documents, rows, paragraphs and characters."""
        return {
            "path": list(self.paths),
            "out_dir": self.config.out_dir,
            "found": len(self.documents),
            "read": len(self.documents) - len(self.unreadable),
            "unreadable": self.unreadable,
            "other_files": dict(self.other_files.most_common()),
            "copies": self.copies,
            "repeated_paragraphs": self.repeated_paragraphs,
            "paragraphs": self.paragraphs,
            "chunk_chars": self.config.chunk_chars,
            "splits": {name.removesuffix(".jsonl"): dict(split) for name, split in self.splits.items()},
            "val_note": self._val_note(),
        }

    def lines(self) -> list[str]:
        """The report for people."""
        document_count, rows = len(self.documents), sum(split["rows"] for split in self.splits.values())
        outcome = "left out" if self.config.drop_repeated else "kept (data.documents.drop_repeated=false)"
        folder, note = Path(self.config.out_dir), self._val_note()
        file_lines = [
            f"{folder / name}: {_format_count(split['documents'], 'document')}, {_format_count(split['rows'], 'row')}, "
            f"{split['characters']:,} characters"
            for name, split in self.splits.items()
            if split["rows"]
        ]
        return [
            f"{_format_count(document_count, 'document')} found, {document_count - len(self.unreadable)} read, "
            f"{len(self.unreadable)} not",
            *_format_list("not read", [f"{name}: {reason}" for name, reason in self.unreadable.items()]),
            *_format_list(
                "other files, not read", [f"{count:,} {suffix}" for suffix, count in self.other_files.most_common()]
            ),
            *_format_list("copies", [f"{name} is the same text as {first}" for name, first in self.copies.items()]),
            *(
                [f"{_format_count(self.repeated_paragraphs, 'paragraph')} repeated, {outcome}"]
                if self.repeated_paragraphs
                else []
            ),
            f"{_format_count(self.paragraphs, 'paragraph')} in {_format_count(rows, 'row')} of at most "
            f"{self.config.chunk_chars:,} "
            "characters",
            *(f"  {line}" for line in [*file_lines, note] if line),
        ]

    def _val_note(self) -> str:
        if self.is_all_trained:
            return f"no {VAL_FILE}: by their hashes all documents would be in it, which leaves none to train on"
        if self.splits[VAL_FILE]["rows"] or not self.config.val_fraction:
            return ""
        return (
            f"no {VAL_FILE}: no document has a hash in the share "
            f"data.documents.val_fraction={self.config.val_fraction:g}"
        )


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _format_list(title: str, items: list[str]) -> list[str]:
    ending = (
        [f"  … and {len(items) - _MAX_LISTED_ITEMS:,} more in {REPORT_JSON_FILE}"]
        if len(items) > _MAX_LISTED_ITEMS
        else []
    )
    return (
        [f"{title}:", *(f"  {one_line(item, limit=400)}" for item in items[:_MAX_LISTED_ITEMS]), *ending]
        if items
        else []
    )


def convert_documents(config: RunConfig, *, force: bool = False) -> DocumentsReport:
    """Read `data.documents.path`, write train.jsonl, val.jsonl and report.json to `data.documents.out_dir`. `force`
    overwrites files that were edited. Raises DataError where no document can be read, or packages are missing."""
    # before any document is read, so that a folder of text does not fail at its first web page
    missing = [package for package, module in DOCUMENT_PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        message = f"make dapt-docx needs packages that are not installed in {sys.prefix}: {', '.join(missing)}"
        raise DataError(f"{message}; install them there: pip install 'sft-play[documents]'")
    options = config.data.documents
    folder = Path(options.out_dir)
    output_paths = [folder / name for name in (TRAIN_FILE, VAL_FILE, REPORT_JSON_FILE)]
    report = DocumentsReport(options)
    find_documents(report, output_paths=output_paths)
    with OutputFolder(folder, (TRAIN_FILE, VAL_FILE, REPORT_JSON_FILE), force=force, command="dapt-docx") as output:
        repeat_filter, train_file = _RepeatFilter(report), output.open(TRAIN_FILE)
        val_documents: list[tuple[str, list[str]]] = []  # for validation, if there will be something to train on
        with contextlib.closing(read_documents(report.documents, options)) as texts:
            for name, text in texts:
                if isinstance(text, UnreadableDocumentError):
                    report.unreadable[name] = str(text)
                    continue
                # the share is that of all the text, so that other documents do not move this one to another split
                paragraphs = split_paragraphs(text)
                share = digest_share(_text_digest(join_paragraphs(paragraphs)))
                paragraphs = repeat_filter.filter_repeats(name, paragraphs)
                if paragraphs and share < options.val_fraction:
                    val_documents.append((name, paragraphs))
                elif paragraphs:
                    _write_rows(train_file, TRAIN_FILE, name, paragraphs, report)
        report.is_all_trained = bool(val_documents) and not report.ok
        split, file = (
            (TRAIN_FILE, train_file)
            if report.is_all_trained or not val_documents
            else (VAL_FILE, output.open(VAL_FILE))
        )
        for name, paragraphs in val_documents:
            _write_rows(file, split, name, paragraphs, report)
        if not report.ok:
            title = f"none of the {_format_count(len(report.documents), 'document')} could be read; nothing was written"
            reasons = [f"{name}: {reason}" for name, reason in report.unreadable.items()]
            raise DataError("\n".join(_format_list(title, reasons)))
        output.write_json(REPORT_JSON_FILE, report.as_json())
    return report


def find_documents(report: DocumentsReport, *, output_paths: Iterable[Path]) -> None:
    """Put the documents of `data.documents.path` into the report, except hidden files and `output_paths`, which it
    writes. Raises DataError where there is none: where it looked, and what is there."""
    paths_by_name: dict[str, Path] = {}
    known_paths = {os.path.realpath(path) for path in output_paths}  # a document is read once, whatever leads to it
    for root, path in (root_and_path for document_path in report.paths for root_and_path in _find_files(document_path)):
        real_path, suffix = os.path.realpath(path), path.suffix.lower()
        if real_path in known_paths or path.name.startswith((".", "~$")):  # Word keeps ~$… beside an open document
            continue
        known_paths.add(real_path)
        name = _display_path(path.relative_to(root))
        if suffix in DOCUMENT_KINDS:
            # in two folders the same name: the second document is named by its whole path
            paths_by_name[_display_path(path.absolute()) if name in paths_by_name else name] = path
        else:
            report.other_files[suffix or "no ending"] += 1
    report.documents = dict(sorted(paths_by_name.items()))
    if not paths_by_name:
        others = ", ".join(f"{count} {suffix}" for suffix, count in report.other_files.most_common(12))
        raise DataError(
            f"data.documents.path={one_line(', '.join(report.paths))}: no documents there (looked from {Path.cwd()} "
            f"for {', '.join(DOCUMENT_KINDS)}); there are {others or 'no files'}"
        )


def _display_path(path: Path) -> str:
    # a name that is not UTF-8 holds surrogates in Python, which JSON and terminals cannot take
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


def _find_files(document_path: str) -> Iterator[tuple[Path, Path]]:
    path = find_source(document_path)
    if isinstance(path, Path):
        yield from ((path, file) for file in walk_data_files(path)) if path.is_dir() else [(path.parent, path)]
        return
    parts = Path(document_path).expanduser().parts
    root = Path(*parts[: next((index for index, part in enumerate(parts) if glob.has_magic(part)), 0)])
    for match in sorted(root.glob("/".join(parts[len(root.parts) :]))):
        yield from ((root, file) for file in (walk_data_files(match) if match.is_dir() else [match]))


def read_documents(
    paths_by_name: dict[str, Path], options: DocumentsConfig
) -> Generator[tuple[str, str | UnreadableDocumentError], None, None]:
    """Each document's name and text, in the order given; several processes read at a time."""
    count = max(1, min(usable_cores(), _MAX_PROCESSES, len(paths_by_name) // _DOCUMENTS_PER_PROCESS))
    idle_readers: queue.SimpleQueue[ReaderProcess] = queue.SimpleQueue()

    def read(path: Path) -> str | UnreadableDocumentError:
        reader = idle_readers.get()
        try:
            return reader.read(path)
        except UnreadableDocumentError as error:
            return error
        finally:
            idle_readers.put(reader)

    # threads wait for processes here; at the end no new work comes first, then the processes' end, then the threads'
    with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
        progress = stack.enter_context(
            report_wait("Reading documents", unit="documents", count_total=lambda: len(paths_by_name))
        )
        for _ in range(count):
            idle_readers.put(stack.enter_context(contextlib.closing(ReaderProcess(options))))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for name, text in zip(paths_by_name, pool.map(read, paths_by_name.values()), strict=True):
            yield name, text
            progress.add()


def _text_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


class _RepeatFilter:
    """Remembers documents and paragraphs, and leaves out those that repeat; they are counted either way."""

    def __init__(self, report: DocumentsReport) -> None:
        self._report, self._drops_repeats = report, report.config.drop_repeated
        self._names_by_digest: dict[bytes, str] = {}
        self._paragraph_digests: set[bytes] = set()

    def filter_repeats(self, name: str, paragraphs: list[str]) -> list[str]:
        """The paragraphs to write."""
        # a copy is left out whole, headings and code too, which as single paragraphs never are
        first_name = self._names_by_digest.setdefault(_text_digest(join_paragraphs(paragraphs)), name)
        if first_name != name:
            self._report.copies[name] = first_name
            return [] if self._drops_repeats else paragraphs
        repeat_flags = [self._is_repeated(part) for part in paragraphs]
        self._report.repeated_paragraphs += sum(repeat_flags)
        return [
            part
            for part, is_repeat in zip(paragraphs, repeat_flags, strict=True)
            if not (is_repeat and self._drops_repeats)
        ]

    def _is_repeated(self, paragraph: str) -> bool:
        """Whether it stood earlier; never headings and code, which the text around them needs."""
        words = " ".join(paragraph.split())  # the same paragraph may be wrapped otherwise
        if len(words.encode("utf-8")) < MIN_REPEATED_BYTES or HEADING.fullmatch(paragraph) or FENCE.match(paragraph):
            return False
        digest = _text_digest(words)[:16]
        is_known = digest in self._paragraph_digests
        self._paragraph_digests.add(digest)
        return is_known


def _write_rows(file: TextIO, split: str, name: str, paragraphs: list[str], report: DocumentsReport) -> None:
    texts = split_chunks(paragraphs, limit=report.config.chunk_chars)
    for part, text in enumerate(texts, start=1):
        file.write(json.dumps({"text": text, "source": name, "part": part}, ensure_ascii=False) + "\n")
    report.paragraphs += len(paragraphs)
    report.splits[split].update(documents=1, rows=len(texts), characters=sum(map(len, texts)))
