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
from sft_play.data.build.workers import cores
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.sources.files import find_source, walk_data_files
from sft_play.data.sources.formats import digest_share
from sft_play.documents.reader import FENCE, HEADING, KINDS, ReaderProcess, Unreadable, chunks, join, paragraphs
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait

TRAIN, VAL, REPORT = "train.jsonl", "val.jsonl", "report.json"
# The packages of the documents extra, and the module of each.
PACKAGES = {
    "beautifulsoup4": "bs4",
    "lxml_html_clean": "lxml_html_clean",
    "markitdown": "markitdown",
    "trafilatura": "trafilatura",
}
# Shorter paragraphs (in UTF-8) are never counted as repeats: "Yes.", a speaker's name, the points of a list.
REPEATED_BYTES = 40
_SHOWN = 20
_MAX_PROCESSES = 8
# A process takes two seconds to start: it is worth it for this many documents.
_DOCUMENTS_PER_PROCESS = 4


@dataclass
class DocumentsReport:
    """What was found, read, left out and written; `repeats` counts paragraphs of earlier documents or the same one."""

    config: DocumentsConfig
    documents: dict[str, Path] = field(default_factory=dict)
    """By their names in rows and reports, in order."""
    others: Counter[str] = field(default_factory=Counter)
    """Files that are no documents, by ending."""
    unreadable: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    repeats: int = 0
    paragraphs: int = 0
    splits: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter(documents=0, rows=0, characters=0) for name in (TRAIN, VAL)}
    )
    """Documents, rows and characters of each file."""
    all_to_train: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """What data.documents.path names."""
        given = self.config.path
        return (given,) if isinstance(given, str) else given

    @property
    def ok(self) -> bool:
        """Whether there is text to train on."""
        return self.splits[TRAIN]["rows"] > 0

    def as_json(self) -> dict[str, Any]:
        """The content of report.json; counts in documents, rows, paragraphs and characters."""
        return {
            "path": list(self.paths),
            "out_dir": self.config.out_dir,
            "found": len(self.documents),
            "read": len(self.documents) - len(self.unreadable),
            "unreadable": self.unreadable,
            "other_files": dict(self.others.most_common()),
            "copies": self.copies,
            "repeated_paragraphs": self.repeats,
            "paragraphs": self.paragraphs,
            "chunk_chars": self.config.chunk_chars,
            "splits": {name.removesuffix(".jsonl"): dict(split) for name, split in self.splits.items()},
            "val_note": self._val_note(),
        }

    def lines(self) -> list[str]:
        """The report for people."""
        found, rows = len(self.documents), sum(split["rows"] for split in self.splits.values())
        kept = "left out" if self.config.drop_repeated else "kept (data.documents.drop_repeated=false)"
        folder, note = Path(self.config.out_dir), self._val_note()
        written = [
            f"{folder / name}: {_many(split['documents'], 'document')}, {_many(split['rows'], 'row')}, "
            f"{split['characters']:,} characters"
            for name, split in self.splits.items()
            if split["rows"]
        ]
        return [
            f"{_many(found, 'document')} found, {found - len(self.unreadable)} read, {len(self.unreadable)} not",
            *_listed("not read", [f"{name}: {reason}" for name, reason in self.unreadable.items()]),
            *_listed("other files, not read", [f"{count:,} {suffix}" for suffix, count in self.others.most_common()]),
            *_listed("copies", [f"{name} is the same text as {first}" for name, first in self.copies.items()]),
            *([f"{_many(self.repeats, 'paragraph')} repeated, {kept}"] if self.repeats else []),
            f"{_many(self.paragraphs, 'paragraph')} in {_many(rows, 'row')} of at most {self.config.chunk_chars:,} "
            "characters",
            *(f"  {line}" for line in [*written, note] if line),
        ]

    def _val_note(self) -> str:
        if self.all_to_train:
            return f"no {VAL}: by their hashes all documents would be in it, which leaves none to train on"
        if self.splits[VAL]["rows"] or not self.config.val_fraction:
            return ""
        return f"no {VAL}: no document has a hash in the share data.documents.val_fraction={self.config.val_fraction:g}"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(title: str, items: list[str]) -> list[str]:
    more = [f"  … and {len(items) - _SHOWN:,} more in {REPORT}"] if len(items) > _SHOWN else []
    return [f"{title}:", *(f"  {one_line(item, limit=400)}" for item in items[:_SHOWN]), *more] if items else []


def documents(config: RunConfig, *, force: bool = False) -> DocumentsReport:
    """Read `data.documents.path`, write train.jsonl, val.jsonl and report.json to `data.documents.out_dir`. `force`
    overwrites files that were edited. Raises DataError where no document can be read, or packages are missing."""
    # before any document is read, so that a folder of text does not fail at its first web page
    missing = [package for package, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        needed = f"make dapt-docx needs packages that are not installed in {sys.prefix}: {', '.join(missing)}"
        raise DataError(f"{needed}; install them there: pip install 'sft-play[documents]'")
    asked = config.data.documents
    folder = Path(asked.out_dir)
    own = [folder / name for name in (TRAIN, VAL, REPORT)]
    report = DocumentsReport(asked)
    find_documents(report, own=own)
    with OutputFolder(folder, (TRAIN, VAL, REPORT), force=force, command="dapt-docx") as output:
        repeats, train = _Repeats(report), output.open(TRAIN)
        held: list[tuple[str, list[str]]] = []  # for validation, if there will be something to train on
        with contextlib.closing(read_all(report.documents, asked)) as answers:
            for name, answer in answers:
                if isinstance(answer, Unreadable):
                    report.unreadable[name] = str(answer)
                    continue
                # the share is that of all the text, so that other documents do not move this one to another split
                parts = paragraphs(answer)
                share = digest_share(_digest(join(parts)))
                parts = repeats.take(name, parts)
                if parts and share < asked.val_fraction:
                    held.append((name, parts))
                elif parts:
                    _write(train, TRAIN, name, parts, report)
        report.all_to_train = bool(held) and not report.ok
        split, file = (TRAIN, train) if report.all_to_train or not held else (VAL, output.open(VAL))
        for name, parts in held:
            _write(file, split, name, parts, report)
        if not report.ok:
            title = f"none of the {_many(len(report.documents), 'document')} could be read; nothing was written"
            reasons = [f"{name}: {reason}" for name, reason in report.unreadable.items()]
            raise DataError("\n".join(_listed(title, reasons)))
        output.write_json(REPORT, report.as_json())
    return report


def find_documents(report: DocumentsReport, *, own: Iterable[Path]) -> None:
    """Put the documents of `data.documents.path` into the report, except hidden files and `own`, those of this command.
    Raises DataError where there is none: where it looked, and what is there."""
    found: dict[str, Path] = {}
    seen = {os.path.realpath(path) for path in own}  # a document is read once, whatever leads to it
    for root, path in (one for asked in report.paths for one in _files(asked)):
        real, suffix = os.path.realpath(path), path.suffix.lower()
        if real in seen or path.name.startswith((".", "~$")):  # Word keeps ~$… beside an open document
            continue
        seen.add(real)
        name = _shown(path.relative_to(root))
        if suffix in KINDS:
            # in two folders the same name: the second document is named by its whole path
            found[_shown(path.absolute()) if name in found else name] = path
        else:
            report.others[suffix or "no ending"] += 1
    report.documents = dict(sorted(found.items()))
    if not found:
        others = ", ".join(f"{count} {suffix}" for suffix, count in report.others.most_common(12))
        raise DataError(
            f"data.documents.path={one_line(', '.join(report.paths))}: no documents there (looked from {Path.cwd()} "
            f"for {', '.join(KINDS)}); there are {others or 'no files'}"
        )


def _shown(path: Path) -> str:
    # a name that is not UTF-8 holds surrogates in Python, which JSON and terminals cannot take
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


def _files(given: str) -> Iterator[tuple[Path, Path]]:
    path = find_source(given)
    if isinstance(path, Path):
        yield from ((path, file) for file in walk_data_files(path)) if path.is_dir() else [(path.parent, path)]
        return
    parts = Path(given).expanduser().parts
    root = Path(*parts[: next((n for n, part in enumerate(parts) if glob.has_magic(part)), 0)])
    for match in sorted(root.glob("/".join(parts[len(root.parts) :]))):
        yield from ((root, file) for file in (walk_data_files(match) if match.is_dir() else [match]))


def read_all(wanted: dict[str, Path], asked: DocumentsConfig) -> Generator[tuple[str, str | Unreadable], None, None]:
    """Each document's name and text, in the order given; several processes read at a time."""
    count = max(1, min(cores(), _MAX_PROCESSES, len(wanted) // _DOCUMENTS_PER_PROCESS))
    free: queue.SimpleQueue[ReaderProcess] = queue.SimpleQueue()

    def read(path: Path) -> str | Unreadable:
        reader = free.get()
        try:
            return reader.read(path)
        except Unreadable as error:
            return error
        finally:
            free.put(reader)

    # threads wait for processes here; at the end no new work comes first, then the processes' end, then the threads'
    with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
        news = stack.enter_context(report_wait("Reading documents", unit="documents", count_total=lambda: len(wanted)))
        for _ in range(count):
            free.put(stack.enter_context(contextlib.closing(ReaderProcess(asked))))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for name, answer in zip(wanted, pool.map(read, wanted.values()), strict=True):
            yield name, answer
            news.add()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


class _Repeats:
    """Remembers documents and paragraphs, and leaves out those that repeat; they are counted either way."""

    def __init__(self, report: DocumentsReport) -> None:
        self._report, self._drop = report, report.config.drop_repeated
        self._documents: dict[bytes, str] = {}
        self._paragraphs: set[bytes] = set()

    def take(self, name: str, parts: list[str]) -> list[str]:
        """The paragraphs to write."""
        # a copy is left out whole, headings and code too, which as single paragraphs never are
        first = self._documents.setdefault(_digest(join(parts)), name)
        if first != name:
            self._report.copies[name] = first
            return [] if self._drop else parts
        repeated = [self._is_repeated(part) for part in parts]
        self._report.repeats += sum(repeated)
        return [part for part, again in zip(parts, repeated, strict=True) if not (again and self._drop)]

    def _is_repeated(self, paragraph: str) -> bool:
        """Whether it stood earlier; never headings and code, which the text around them needs."""
        words = " ".join(paragraph.split())  # the same paragraph may be wrapped otherwise
        if len(words.encode("utf-8")) < REPEATED_BYTES or HEADING.fullmatch(paragraph) or FENCE.match(paragraph):
            return False
        digest = _digest(words)[:16]
        is_known = digest in self._paragraphs
        self._paragraphs.add(digest)
        return is_known


def _write(file: TextIO, split: str, name: str, parts: list[str], report: DocumentsReport) -> None:
    texts = chunks(parts, limit=report.config.chunk_chars)
    for part, text in enumerate(texts, start=1):
        file.write(json.dumps({"text": text, "source": name, "part": part}, ensure_ascii=False) + "\n")
    report.paragraphs += len(parts)
    report.splits[split].update(documents=1, rows=len(texts), characters=sum(map(len, texts)))
