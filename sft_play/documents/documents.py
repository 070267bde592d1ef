"""`make dapt-docx`: documents become clean text, one row of JSON for each document or part of one.

Each document is read by a process with limits (`reader.py`), its repeated paragraphs are left out, and it is cut
between paragraphs into rows `{"text": …, "source": name, "part": n}`. No row holds text of two documents. A document's
split depends on its own text alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import DocumentsConfig, RunConfig
from sft_play.data.build.workers import cores
from sft_play.data.sources.formats import digest_share
from sft_play.data.written import OutputFolder
from sft_play.documents.files import Document, DocumentFiles, find_documents
from sft_play.documents.reader import KINDS, ReaderProcess
from sft_play.documents.text import Block, Extract, ReadOptions, Tally, Unreadable, chunks, join
from sft_play.errors import DataError
from sft_play.log import one_line

logger = logging.getLogger(__name__)

TRAIN, VAL, REPORT = "train.jsonl", "val.jsonl", "report.json"
IN_EARLIER = "paragraphs that stand in an earlier document"
IN_SAME = "paragraphs that stand twice in one document"
COPIES = "documents that are copies of earlier ones"

PACKAGES = {
    "beautifulsoup4": "bs4",
    "docutils": "docutils",
    "lxml": "lxml",
    "lxml_html_clean": "lxml_html_clean",
    "markdown-it-py": "markdown_it",
    "pypdf": "pypdf",
    "trafilatura": "trafilatura",
}
"""The packages of the documents extra, and the module of each."""
REPEATED_BYTES = {"text": 40, "table": 40, "list": 200}
"""Shorter paragraphs (in UTF-8) are never taken for repeated: "Yes.", a speaker's name, the points of a list. Other
kinds never are: without its heading a text would stand alone, and code would lose a line."""
FEW_DOCUMENTS = 20
"""With fewer documents a share of 5% is less than one of them."""
_SHOWN = 20
_MAX_PROCESSES = 8
_DOCUMENTS_PER_PROCESS = 4
"""A process takes a second to start: it is worth it for this many documents."""


@dataclass
class Split:
    """What one file of rows holds."""

    documents: int = 0
    rows: int = 0
    characters: int = 0


@dataclass
class DocumentsReport:
    """What was found, read, left out and written."""

    config: DocumentsConfig
    files: DocumentFiles
    unreadable: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    emptied: list[str] = field(default_factory=list)
    left_out: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    paragraphs: int = 0
    splits: dict[str, Split] = field(default_factory=lambda: {TRAIN: Split(), VAL: Split()})
    all_to_train: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is text to train on."""
        return self.splits[TRAIN].rows > 0

    def as_json(self) -> dict[str, Any]:
        """The content of report.json; counts in documents, rows, paragraphs and characters."""
        paths = self.config.path if isinstance(self.config.path, tuple) else (self.config.path,)
        return {
            "path": list(paths),
            "out_dir": self.config.out_dir,
            "found": len(self.files.documents),
            "read": len(self.files.documents) - len(self.unreadable),
            "unreadable": self.unreadable,
            "other_files": {suffix: len(names) for suffix, names in sorted(self.files.others.items())},
            "other_files_shown": {suffix: names[:_SHOWN] for suffix, names in sorted(self.files.others.items())},
            "hidden_files": self.files.hidden,
            "reached_twice": self.files.twice,
            "copies": self.copies,
            "nothing_of_their_own": self.emptied,
            "notes": self.notes,
            "left_out": self.left_out.as_json(),
            "repeated_but_kept": self.kept.as_json(),
            "paragraphs": self.paragraphs,
            "chunk_chars": self.config.chunk_chars,
            "splits": {name.removesuffix(".jsonl"): dataclasses.asdict(split) for name, split in self.splits.items()},
            "val_note": self._val_note(),
        }

    def lines(self) -> list[str]:
        """The report for people."""
        read = len(self.files.documents) - len(self.unreadable)
        return [
            f"{_many(len(self.files.documents), 'document')} found, {read} read, {len(self.unreadable)} not",
            *_listed("not read", self.reasons()),
            *self._others(),
            *_listed("notes", self._notes()),
            *_listed("copies", [f"{name} is the same text as {first}" for name, first in self.copies.items()]),
            *_listed("nothing left to write", [f"{name}: all of it is in earlier documents" for name in self.emptied]),
            *_tally("left out", self.left_out),
            *_tally("repeated or boilerplate, kept (data.documents.drop_repeated=false)", self.kept),
            *self._written(),
        ]

    def reasons(self) -> list[str]:
        """Each document that was not read, with the reason."""
        return [f"{name}: {reason}" for name, reason in self.unreadable.items()]

    def _notes(self) -> list[str]:
        """Each note once, with the first documents that it is about."""
        about: dict[str, list[str]] = {}
        for name, notes in self.notes.items():
            for note in notes:
                about.setdefault(note, []).append(one_line(name, limit=60))
        return [
            f"{', '.join(names[:3])}{f' and {len(names) - 3:,} more' if len(names) > 3 else ''}: {note}"
            for note, names in about.items()
        ]

    def _others(self) -> list[str]:
        items = []
        for suffix, names in sorted(self.files.others.items()):
            shown = ", ".join(one_line(name, limit=60) for name in names[:3])
            items.append(f"{len(names)} {suffix}: {shown}{', …' if len(names) > 3 else ''}")
        if self.files.hidden:
            items.append(f"{self.files.hidden} hidden files and folders, or locks of Word")
        if self.files.twice:
            items.append(f"{_many(self.files.twice, 'file')} reached twice, over links or two paths, and read once")
        return _listed("other files, not read", items)

    def _written(self) -> list[str]:
        rows = sum(split.rows for split in self.splits.values())
        folder = Path(self.config.out_dir)
        lines = [
            f"{_many(self.paragraphs, 'paragraph')} in {_many(rows, 'row')} of at most {self.config.chunk_chars:,} "
            "characters"
        ]
        for name, split in self.splits.items():
            if split.rows:
                lines.append(
                    f"  {folder / name}: {_many(split.documents, 'document')}, {_many(split.rows, 'row')}, "
                    f"{split.characters:,} characters"
                )
        note = self._val_note()
        val = folder / VAL if self.splits[VAL].rows else "null"
        asked = f"task_mode=cpt data.train_path={folder / TRAIN} data.val_path={val} data.test_path=null"
        use = f'to train on it: make train CONFIG=run.yaml SET="{asked}"'
        return [*lines, *([f"  {note}"] if note else []), use]

    def _val_note(self) -> str:
        if self.all_to_train:
            return f"no {VAL}: by their hashes all documents would be in it, which leaves none to train on"
        if self.splits[VAL].rows or not self.config.val_fraction:
            return ""
        count = self.splits[TRAIN].documents
        few = f"; of fewer than {FEW_DOCUMENTS} there may be none" if count < FEW_DOCUMENTS else ""
        return (
            f"no {VAL}: of {_many(count, 'document')} none has a hash in the share data.documents.val_fraction="
            f"{self.config.val_fraction:g}{few}"
        )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(title: str, items: list[str]) -> list[str]:
    """The first items under a title; names and reasons come from files and are escaped."""
    if not items:
        return []
    more = [f"  … and {len(items) - _SHOWN:,} more in {REPORT}"] if len(items) > _SHOWN else []
    return [f"{title}:", *(f"  {one_line(item, limit=400)}" for item in items[:_SHOWN]), *more]


def _tally(title: str, tally: Tally) -> list[str]:
    rows = [
        f"{one_line(reason)}: {count['pieces']:,} ({count['characters']:,} characters)"
        for reason, count in tally.as_json().items()
    ]
    return _listed(title, rows)


def documents(config: RunConfig, *, force: bool = False) -> DocumentsReport:
    """Read `data.documents.path`, write train.jsonl, val.jsonl and report.json to `data.documents.out_dir`.

    `force` overwrites files that were edited. Documents that cannot be read are named in the report.

    Raises:
        DataError: the packages of the documents extra are not installed; there are no documents, none can be read, or
            the folder holds files that were edited.
    """
    # before any document is read, so that a folder of .docx does not fail at its first web page
    missing = [package for package, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DataError(
            f"make dapt-docx needs packages that are not installed in {sys.prefix}: {', '.join(missing)}; install "
            "them there: pip install 'sft-play[documents]'"
        )
    asked = config.data.documents
    folder = Path(asked.out_dir)
    paths = asked.path if isinstance(asked.path, tuple) else (asked.path,)
    own = [folder / name for name in (TRAIN, VAL, REPORT)]
    report = DocumentsReport(asked, find_documents(paths, suffixes=KINDS, written=own))
    options = ReadOptions(headers=asked.headers, drop_boilerplate=asked.drop_repeated)
    with OutputFolder(folder, (TRAIN, VAL, REPORT), force=force, command="dapt-docx") as output:
        writer = _Writer(output, report)
        repeats = _Repeats(report, drop=asked.drop_repeated)
        for document, answer in read_all(report.files.documents, options):
            if isinstance(answer, Unreadable):
                report.unreadable[document.name] = str(answer)
            else:
                _take(document, answer, report, repeats, writer)
        writer.finish()
        if not report.ok:
            title = f"none of the {_many(len(report.files.documents), 'document')} could be read; nothing was written"
            raise DataError("\n".join(_listed(title, report.reasons())))
        output.write_json(REPORT, report.as_json())
    return report


def _take(document: Document, extract: Extract, report: DocumentsReport, repeats: _Repeats, writer: _Writer) -> None:
    """Count a document that was read, and write what is its own."""
    report.left_out.add_all(extract.left_out.counts)
    report.kept.add_all(extract.kept.counts)
    if extract.notes:
        report.notes[document.name] = extract.notes
    # The share is that of the text with its repeats, so that other documents do not move this one to another split.
    share = digest_share(_digest(join(extract.blocks)))
    blocks = repeats.take(document.name, extract.blocks)
    if blocks:
        writer.write(document.name, blocks, is_val=share < report.config.val_fraction)
    elif document.name not in report.copies:
        report.emptied.append(document.name)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


class _Repeats:
    """Remembers documents and paragraphs, and leaves out those that repeat."""

    def __init__(self, report: DocumentsReport, *, drop: bool) -> None:
        self._report, self._drop = report, drop
        self._documents: dict[bytes, str] = {}
        self._paragraphs: set[bytes] = set()

    def take(self, name: str, blocks: list[Block]) -> list[Block]:
        """The blocks to write; repeats are counted, and left out where `drop` is set."""
        text = join(blocks)
        # a copy is left out whole, headings and code too, which as single paragraphs never are
        first = self._documents.setdefault(_digest(text), name)
        if first != name:
            self._report.copies[name] = first
            self._count(COPIES, len(text))
            return [] if self._drop else blocks
        kept: list[Block] = []
        here: set[bytes] = set()
        for block in blocks:
            reason = self._repeated(block, here)
            if reason:
                self._count(reason, len(block.text))
            if not reason or not self._drop:
                kept.append(block)
        self._paragraphs |= here  # only now: within one document a repeat has a reason of its own
        return kept

    def _repeated(self, block: Block, here: set[bytes]) -> str:
        """Why a block counts as repeated; empty where it does not."""
        words = " ".join(block.text.split())  # the same paragraph may be wrapped otherwise
        if block.kind not in REPEATED_BYTES or len(words.encode("utf-8")) < REPEATED_BYTES[block.kind]:
            return ""
        digest = _digest(words)[:16]
        if digest in self._paragraphs:
            return IN_EARLIER
        if digest in here:
            return IN_SAME
        here.add(digest)
        return ""

    def _count(self, reason: str, characters: int) -> None:
        (self._report.left_out if self._drop else self._report.kept).add(reason, characters)


class _Writer:
    """Writes rows to their splits; those for validation wait until there is a document to train on."""

    def __init__(self, output: OutputFolder, report: DocumentsReport) -> None:
        self._output, self._report = output, report
        self._files: dict[str, TextIO] = {}
        self._waiting: list[tuple[str, list[Block]]] = []

    def write(self, name: str, blocks: list[Block], *, is_val: bool) -> None:
        """A document's rows."""
        if not is_val:
            self._rows(TRAIN, name, blocks)
            self._release(VAL)
        elif TRAIN in self._files:
            self._rows(VAL, name, blocks)
        else:
            self._waiting.append((name, blocks))  # until a document goes to training: then they may be validation

    def finish(self) -> None:
        """Where every document's hash is in the validation share, all of them go to training."""
        self._report.all_to_train = bool(self._waiting)
        self._release(TRAIN)

    def _release(self, split: str) -> None:
        waiting, self._waiting = self._waiting, []
        for name, blocks in waiting:
            self._rows(split, name, blocks)

    def _rows(self, split: str, name: str, blocks: list[Block]) -> None:
        if split not in self._files:
            self._files[split] = self._output.open(split)
        counts = self._report.splits[split]
        counts.documents += 1
        self._report.paragraphs += len(blocks)
        for part, text in enumerate(chunks(blocks, limit=self._report.config.chunk_chars), start=1):
            row = {"text": text, "source": name, "part": part}
            self._files[split].write(json.dumps(row, ensure_ascii=False) + "\n")
            counts.rows += 1
            counts.characters += len(text)


# Reading, several at a time


def read_all(wanted: list[Document], options: ReadOptions) -> Iterator[tuple[Document, Extract | Unreadable]]:
    """Each document with its text, in the order given; read by several processes, few in memory at a time."""
    # threads wait for processes here, so one for each process is enough
    count = max(1, min(cores(), _MAX_PROCESSES, len(wanted) // _DOCUMENTS_PER_PROCESS))
    started, logged = time.monotonic(), time.monotonic()
    with _Readers(options, count) as readers:
        for done, (document, answer) in enumerate(readers.map(wanted), start=1):
            yield document, answer
            if time.monotonic() - logged > 30:
                logged = time.monotonic()
                logger.info("%s of %s documents read in %.0f s", f"{done:,}", f"{len(wanted):,}", logged - started)


class _Readers:
    """Threads with a reading process each; all processes are ended when the context is left."""

    def __init__(self, options: ReadOptions, count: int) -> None:
        self._options, self._count = options, count
        self._mine = threading.local()  # a thread keeps its process from document to document
        self._all: list[ReaderProcess] = []

    def __enter__(self) -> _Readers:
        self._pool = ThreadPoolExecutor(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        # first no new work, then the processes, which the threads wait for, then the threads
        self._pool.shutdown(wait=False, cancel_futures=True)
        for reader in self._all:
            reader.close()
        self._pool.shutdown(wait=True)

    def map(self, wanted: Iterable[Document]) -> Iterator[tuple[Document, Extract | Unreadable]]:
        """Each document with its answer, in order."""
        running: deque[tuple[Document, Future[Extract | Unreadable]]] = deque()
        for document in wanted:
            running.append((document, self._pool.submit(self._read, document)))
            if len(running) > 2 * self._count:  # texts wait in memory only while the next in order is not done
                first, future = running.popleft()
                yield first, future.result()
        for first, future in running:
            yield first, future.result()

    def _read(self, document: Document) -> Extract | Unreadable:
        if not hasattr(self._mine, "reader"):
            self._mine.reader = ReaderProcess(self._options)
            self._all.append(self._mine.reader)
        try:
            extract: Extract = self._mine.reader.read(document.path)
        except Unreadable as error:
            return error
        return extract
