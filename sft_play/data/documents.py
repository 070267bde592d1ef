"""`make dapt-docx`: documents become clean text, one row of JSON for each document or part of one.

Each document is read by a process with limits (document_reader), its repeated paragraphs are left out, and it is cut
between paragraphs into rows `{"text": …, "source": name, "part": n}`. No row holds text of two documents. Which split
a document belongs to, its own text decides.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import DocumentsConfig, RunConfig
from sft_play.data.document_files import Document, Found, find_documents
from sft_play.data.document_reader import KINDS, ReaderProcess
from sft_play.data.document_text import Block, Extract, ReadOptions, Tally, Unreadable, chunks, join
from sft_play.data.written import OutputFolder
from sft_play.errors import DataError
from sft_play.log import one_line

logger = logging.getLogger(__name__)

TRAIN, VAL, REPORT = "train.jsonl", "val.jsonl", "report.json"
IN_EARLIER = "paragraphs that stand in an earlier document"
IN_SAME = "paragraphs that stand twice in one document"
COPIES = "documents that are copies of earlier ones"

REPEATED_BYTES = {"text": 40, "table": 40, "list": 200}
"""Shorter ones (in UTF-8) are never taken for repeated: "Yes.", a speaker's name, the points of a list. Kinds that are
not here never are: what follows a heading would stand alone, and code would lose a line."""
FEW_DOCUMENTS = 20
"""Below this many documents a share of 5% is less than one of them."""
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
    found: Found
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
            "found": len(self.found.documents),
            "read": len(self.found.documents) - len(self.unreadable),
            "unreadable": self.unreadable,
            "other_files": {suffix: len(names) for suffix, names in sorted(self.found.others.items())},
            "other_files_shown": {suffix: names[:_SHOWN] for suffix, names in sorted(self.found.others.items())},
            "hidden_files": self.found.hidden,
            "reached_twice": self.found.twice,
            "copies": self.copies,
            "nothing_of_their_own": self.emptied,
            "notes": self.notes,
            "left_out": self.left_out.as_json(),
            "repeated_but_kept": self.kept.as_json(),
            "paragraphs": self.paragraphs,
            "chunk_chars": self.config.chunk_chars,
            "splits": {
                name.removesuffix(".jsonl"): {
                    "documents": split.documents,
                    "rows": split.rows,
                    "characters": split.characters,
                }
                for name, split in self.splits.items()
            },
            "val_note": self._val_note(),
        }

    def lines(self) -> list[str]:
        """The report for people."""
        read = len(self.found.documents) - len(self.unreadable)
        return [
            f"{_many(len(self.found.documents), 'document')} found, {read} read, {len(self.unreadable)} not",
            *_listed("not read", [f"{name}: {reason}" for name, reason in self.unreadable.items()]),
            *self._others(),
            *_listed("to know", self._notes()),
            *_listed("copies", [f"{name} is the same text as {first}" for name, first in self.copies.items()]),
            *_listed(
                "nothing of their own", [f"{name}: all of it stands in earlier documents" for name in self.emptied]
            ),
            *_tally("left out", self.left_out),
            *_tally("repeated or boilerplate, kept (data.documents.drop_repeated=false)", self.kept),
            *self._written(),
        ]

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
        found = []
        for suffix, names in sorted(self.found.others.items()):
            shown = ", ".join(one_line(name, limit=60) for name in names[:3])
            found.append(f"{len(names)} {suffix}: {shown}{', …' if len(names) > 3 else ''}")
        if self.found.hidden:
            found.append(f"{self.found.hidden} hidden files and folders, or locks of Word")
        if self.found.twice:
            found.append(f"{_many(self.found.twice, 'file')} reached twice, over links or two paths, and read once")
        return _listed("other files, not read", found)

    def _written(self) -> list[str]:
        rows = sum(split.rows for split in self.splits.values())
        folder = Path(self.config.out_dir)
        found = [
            f"{_many(self.paragraphs, 'paragraph')} in {_many(rows, 'row')} of at most {self.config.chunk_chars:,} "
            "characters"
        ]
        for name, split in self.splits.items():
            if split.rows:
                found.append(
                    f"  {folder / name}: {_many(split.documents, 'document')}, {_many(split.rows, 'row')}, "
                    f"{split.characters:,} characters"
                )
        note = self._val_note()
        val = folder / VAL if self.splits[VAL].rows else "null"
        asked = f"task_mode=cpt data.train_path={folder / TRAIN} data.val_path={val} data.test_path=null"
        use = f'to train on it: make train CONFIG=run.yaml SET="{asked}"'
        return [*found, *([f"  {note}"] if note else []), use]

    def _val_note(self) -> str:
        if self.all_to_train:
            return f"no {VAL}: by their hashes all documents would be in it, so that none were left to train on"
        if self.splits[VAL].rows or not self.config.val_fraction:
            return ""
        count = self.splits[TRAIN].documents
        few = f"; of fewer than {FEW_DOCUMENTS} there may be none" if count < FEW_DOCUMENTS else ""
        return (
            f"no {VAL}: of {_many(count, 'document')} none has a hash in the share data.documents.val_fraction="
            f"{self.config.val_fraction:g}{few}"
        )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _listed(title: str, items: list[str]) -> list[str]:
    """Items under a title, the first ones; names and reasons come from files, and are shown safely."""
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

    `force` writes over files that were edited. Documents that cannot be read are named in the report.

    Raises:
        DataError: there are no documents, none can be read, or the folder holds files that somebody edited.
    """
    asked = config.data.documents
    folder = Path(asked.out_dir)
    paths = asked.path if isinstance(asked.path, tuple) else (asked.path,)
    own = [folder / name for name in (TRAIN, VAL, REPORT)]
    report = DocumentsReport(asked, find_documents(paths, suffixes=KINDS, written=own))
    options = ReadOptions(headers=asked.headers, drop_boilerplate=asked.drop_repeated)
    with OutputFolder(folder, (TRAIN, VAL, REPORT), force=force, command="dapt-docx") as output:
        writer = _Writer(output, report)
        repeats = _Repeats(report, drop=asked.drop_repeated)
        for document, answer in read_all(report.found.documents, options):
            if isinstance(answer, Unreadable):
                report.unreadable[document.name] = str(answer)
            else:
                _take(document, answer, report, repeats, writer)
        writer.finish()
        if not report.ok:
            raise DataError(_none_readable(report))
        output.write_json(REPORT, report.as_json())
    return report


def _none_readable(report: DocumentsReport) -> str:
    title = f"none of the {_many(len(report.found.documents), 'document')} could be read; nothing was written"
    return "\n".join(_listed(title, [f"{name}: {reason}" for name, reason in report.unreadable.items()]))


def _take(document: Document, extract: Extract, report: DocumentsReport, repeats: _Repeats, writer: _Writer) -> None:
    """Count a document that was read, and write what is its own."""
    report.left_out.add_all(extract.left_out.counts)
    report.kept.add_all(extract.kept.counts)
    if extract.notes:
        report.notes[document.name] = extract.notes
    share = _share(join(extract.blocks))  # of the text before repeats go: other documents do not move this one
    blocks = repeats.take(document.name, extract.blocks)
    if blocks:
        writer.write(document.name, blocks, is_val=share < report.config.val_fraction)
    elif document.name not in report.copies:
        report.emptied.append(document.name)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def _share(text: str) -> float:
    """A number from 0 to 1 that the text alone decides."""
    return int.from_bytes(_digest(text)[:8], "big") / 2**64


class _Repeats:
    """Knows the documents and paragraphs so far, and leaves out those that come again."""

    def __init__(self, report: DocumentsReport, *, drop: bool) -> None:
        self._report, self._drop = report, drop
        self._documents: dict[bytes, str] = {}
        self._paragraphs: set[bytes] = set()

    def take(self, name: str, blocks: list[Block]) -> list[Block]:
        """The blocks to write; what repeats is counted, and left out if that was asked."""
        text = join(blocks)
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
        self._paragraphs |= here
        return kept

    def _repeated(self, block: Block, here: set[bytes]) -> str:
        """Why a block counts as repeated; nothing where it does not."""
        words = " ".join(block.text.split())
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
    """Writes rows to their splits; those for validation wait until there is something to train on."""

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
            self._waiting.append((name, blocks))

    def finish(self) -> None:
        """Where every document belongs to validation, all of them are for training."""
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


def read_all(found: list[Document], options: ReadOptions) -> Iterator[tuple[Document, Extract | Unreadable]]:
    """Each document with what it came to, in the order given; read by several processes, few held at a time."""
    count = max(1, min(_cores(), _MAX_PROCESSES, len(found) // _DOCUMENTS_PER_PROCESS))
    started, said = time.monotonic(), time.monotonic()
    with _Readers(options, count) as readers:
        for done, (document, answer) in enumerate(readers.map(found), start=1):
            yield document, answer
            if time.monotonic() - said > 30:
                said = time.monotonic()
                logger.info("%s of %s documents read in %.0f s", f"{done:,}", f"{len(found):,}", said - started)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Readers:
    """Threads with a reading process each; all processes are ended when the context is left."""

    def __init__(self, options: ReadOptions, count: int) -> None:
        self._options, self._count = options, count
        self._mine = threading.local()
        self._all: list[ReaderProcess] = []

    def __enter__(self) -> _Readers:
        self._pool = ThreadPoolExecutor(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for reader in self._all:
            reader.close()
        self._pool.shutdown(wait=True)

    def map(self, found: Iterable[Document]) -> Iterator[tuple[Document, Extract | Unreadable]]:
        """Each document with its answer, in order."""
        running: deque[tuple[Document, Future[Extract | Unreadable]]] = deque()
        for document in found:
            running.append((document, self._pool.submit(self._read, document)))
            if len(running) > 2 * self._count:
                first, future = running.popleft()
                yield first, future.result()
        for first, future in running:
            yield first, future.result()

    def _read(self, document: Document) -> Extract | Unreadable:
        if not hasattr(self._mine, "reader"):
            self._mine.reader = ReaderProcess(self._options)
            self._all.append(self._mine.reader)
        try:
            found: Extract = self._mine.reader.read(document.path)
        except Unreadable as error:
            return error
        return found
