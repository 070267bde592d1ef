"""Documents to clean text: an optional part (`sft-play[documents]`), and the command `make
dapt-docx`.
"""

import contextlib
import glob
import hashlib
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import queue
import re
import resource
import signal
import sys
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from sft_play.answers import Answer
from sft_play.config.schema import DocumentsConfig, RunConfig
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.sources.files import find_source, walk_data_files
from sft_play.data.sources.formats import digest_share
from sft_play.data.sources.raw import (
    find_piece_end,
    read_head,
    read_text_pieces,
    wide_encoding_error,
)
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.machine.host import cpu_cores
from sft_play.machine.software import install_command
from sft_play.process.signals import die_with_parent
from sft_play.process.waiting import report_wait
from sft_play.text import MIB, plural

# One document → clean text, in a process of its own with limits on time and memory; its text cut
# into rows.
#
# MarkItDown reads Word, PDF, PowerPoint, Excel and EPUB as Markdown, trafilatura finds the main
# part of web pages; other text is taken as it is. Libraries that parse files of any origin can
# hang, use up memory or crash the interpreter: here that costs one document, not the command.

MAX_DOCUMENT_BYTES = 256 * MIB
MAX_DOCUMENT_UNPACKED_BYTES = 1024 * MIB
# Longest time for one document, plus 2 s for each MiB of it.
MAX_READ_SECONDS = 120.0
# Most address space of the process that reads.
MAX_MEMORY_BYTES = 4096 * MIB

# Kinds by the endings of names; `.doc` is opened to say what it is.
DOCUMENT_KINDS = {
    **dict.fromkeys((".docx", ".docm", ".dotx", ".doc"), "docx"),
    **{f".{kind}": kind for kind in ("pdf", "pptx", "xlsx", "epub")},
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".md", ".markdown", ".rst", ".rest", ".txt", ".text"), "text"),
}

_OLE_MAGIC, _ZIP_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"PK\x03\x04"
_PICTURE_LINK = re.compile(r"!\[([^\]]*)\]\([^)\s]*\)")


class UnreadableDocumentError(Exception):
    """A document that cannot be read; the text says why and what to do. The other documents are
    read all the same."""


def read_document(path: Path, options: DocumentsConfig) -> str:
    """Read a document as clean text, Markdown if it has more. Raises UnreadableDocumentError: why,
    and what to do."""
    kind = DOCUMENT_KINDS[path.suffix.lower()]
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise UnreadableDocumentError(
                f"larger than the {MAX_DOCUMENT_BYTES // MIB} MiB that are read; split it"
            )
        if kind != "text":
            text = _convert_document(kind, path.read_bytes(), options)
        else:
            if encoding_error := wide_encoding_error(path, read_head(path)):
                raise encoding_error
            text = "".join(piece for _, piece in read_text_pieces(path))
        text = clean_text(text)
    except (UnreadableDocumentError, DataError) as error:
        raise UnreadableDocumentError(str(error)) from None
    except OSError as error:
        raise UnreadableDocumentError(
            f"cannot be opened: {error.strerror or one_line(str(error))}"
        ) from None
    except (MemoryError, RecursionError) as error:
        raise UnreadableDocumentError(
            f"too large or nested too deeply to be read ({type(error).__name__})"
        ) from None
    except Exception as error:
        # libraries raise anything at a file that is damaged; the others are read all the same
        detail = one_line(f"{type(error).__name__}: {error}", limit=200)
        reason = (
            "locked with a password"
            if "Password" in detail
            else "damaged, or something else than its name says"
        )
        raise UnreadableDocumentError(f"cannot be read as {kind}: {reason}? ({detail})") from None
    if not re.search(r"\w", text):  # an empty table is not text
        hint = " (scanned pages?); run it through OCR first" if kind == "pdf" else ""
        raise UnreadableDocumentError(f"holds no text{hint}")
    return text.strip("\n")


# Libraries are imported here, by the first document that needs them.
def _convert_document(kind: str, data: bytes, options: DocumentsConfig) -> str:
    from markitdown import StreamInfo, converters

    if data.startswith(_OLE_MAGIC):
        raise UnreadableDocumentError(
            "an Office file from before 2007, or locked with a password; save it as .docx"
            " without one"
        )
    if data.startswith(_ZIP_MAGIC):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_DOCUMENT_UNPACKED_BYTES:
                raise UnreadableDocumentError(
                    f"unpacks to more than the {MAX_DOCUMENT_UNPACKED_BYTES // MIB:,} MiB that are"
                    " opened"
                )
    if kind == "html":
        import trafilatura
        from bs4 import UnicodeDammit

        # decoded as it declares, as browsers do
        page = UnicodeDammit(data, is_html=True).unicode_markup or ""
        main_text = options.drop_repeated and trafilatura.extract(
            page, output_format="markdown", include_comments=False
        )
        return str(main_text or converters.HtmlConverter().convert_string(page).markdown)
    readers = {
        "docx": converters.DocxConverter,
        "pdf": converters.PdfConverter,
        "pptx": converters.PptxConverter,
        "xlsx": converters.XlsxConverter,
        "epub": converters.EpubConverter,
    }
    text = readers[kind]().convert(io.BytesIO(data), StreamInfo(extension=f".{kind}")).markdown
    text = _PICTURE_LINK.sub(r"\1", text)  # what a picture shows, where its author says it
    if kind == "docx" and options.headers:
        # the paragraphs of page headers and footers, each once: MarkItDown reads none
        headers: dict[str, None] = {}
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in sorted(archive.namelist()):
                if re.fullmatch(r"word/(header|footer)\d*\.xml", name):
                    for paragraph in ElementTree.fromstring(archive.read(name)).findall(".//{*}p"):
                        runs = paragraph.findall(".//{*}t")
                        headers["".join(run.text or "" for run in runs)] = None
        text = "\n\n".join([*filter(str.strip, headers), text])
    return str(text)


# The process that reads
class ReaderProcess:
    """A process that reads one document after the other; started anew after a document that it did
    not survive."""

    def __init__(self, options: DocumentsConfig, *, timeout_s: float = MAX_READ_SECONDS) -> None:
        self._options, self._timeout_s = options, timeout_s
        self._process: SpawnProcess | None = None

    def read(self, path: Path) -> str:
        """Read a document as clean text; raises UnreadableDocumentError as `read_document` does, or
        at a limit."""
        if self._process is None:
            # imported here: it comes with libraries that the reading process does not need
            from sft_play.data.build.build import hide_main_module

            context = multiprocessing.get_context("spawn")
            self._connection, child_connection = context.Pipe()
            self._process = context.Process(
                target=_serve_documents,
                args=(child_connection, self._options, os.getpid()),
                daemon=True,
            )
            with hide_main_module():
                self._process.start()
            child_connection.close()  # so that its end is seen here
        timeout_s = self._timeout_s
        with contextlib.suppress(OSError):
            timeout_s += 2 * path.stat().st_size / MIB
        problem = f"took longer than {timeout_s:,.0f} s"
        try:
            self._connection.send(path)
            if self._connection.poll(timeout_s):
                reply = self._connection.recv()
                if isinstance(reply, UnreadableDocumentError):
                    raise reply
                return str(reply)
        except (EOFError, OSError):
            problem = "crashed the process that read it; is it damaged?"
        self.close()
        raise UnreadableDocumentError(problem)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def _serve_documents(connection: Connection, options: DocumentsConfig, parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    die_with_parent(parent_pid, signal.SIGKILL)
    logging.disable(logging.CRITICAL)
    null_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_file, 1)  # libraries print
    os.dup2(null_file, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (hard_limit, MAX_MEMORY_BYTES) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard_limit))
    while True:
        try:
            connection.send(read_document(connection.recv(), options))
        except UnreadableDocumentError as error:
            connection.send(error)
        except EOFError:
            return


# Text: in Unicode's composed form (NFC) with `\n` as line ends. Control characters, soft hyphens
# and byte order marks are removed; non-breaking spaces become plain ones, spaces at line ends are
# removed. Of Markdown no more is known than headings and blocks of code.
_ESCAPE_SEQUENCE = "\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\n]*(?:\x07|\x1b\\\\)?|[@-Z\\\\^_])"
_REMOVED_CHARACTERS = re.compile(
    f"{_ESCAPE_SEQUENCE}|[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\ufeff\ud800-\udfff\ufffe\uffff]"
)
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x85\u2028]")
_PARAGRAPH_ENDS = re.compile("[\x0c\u2029]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]")
HEADING = re.compile(r"#{1,6} \S.*")
FENCE = re.compile(r" {0,3}(```|~~~)")
_PARAGRAPH_SEPARATOR = "\n\n"


def clean_text(text: str) -> str:
    """Text in its clean form (see above), line breaks and indents kept."""
    # form feeds and paragraph separators end paragraphs; other line ends become plain ones
    text = _PARAGRAPH_ENDS.sub(
        _PARAGRAPH_SEPARATOR, _LINE_ENDS.sub("\n", _REMOVED_CHARACTERS.sub("", text))
    )
    # composed last: what was removed may have stood between a letter and its accent
    return unicodedata.normalize(
        "NFC", "\n".join(line.rstrip(" \t") for line in _SPACES.sub(" ", text).split("\n"))
    )


def split_paragraphs(text: str) -> list[str]:
    """Clean text cut at its blank lines; a fenced block of code is one paragraph."""
    line_groups: list[list[str]] = [[]]
    fence = ""
    for line in text.split("\n"):
        if not line and not fence:
            line_groups.append([])
            continue
        mark = FENCE.match(line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        line_groups[-1].append(line)
    return ["\n".join(lines) for lines in line_groups if lines]


def join_paragraphs(paragraphs: list[str]) -> str:
    """The text of a document, or of a part of it."""
    return _PARAGRAPH_SEPARATOR.join(paragraphs)


def split_chunks(paragraphs: list[str], *, limit: int) -> list[str]:
    """Texts of at most `limit` characters, cut between paragraphs; a longer paragraph is cut
    inside. A heading goes with what follows it. Nothing is lost but the white space at the cuts."""
    texts: list[str] = []
    current: list[str] = []
    size = 0
    for piece in (
        piece for paragraph in paragraphs for piece in _split_long_paragraph(paragraph, limit)
    ):
        if current and size + len(_PARAGRAPH_SEPARATOR) + len(piece) > limit:
            start = len(current)
            while start and HEADING.fullmatch(current[start - 1]):
                start -= 1
            # the headings at the end go to the next text, if there is text before them and room
            # there
            if start == 0 or len(join_paragraphs([*current[start:], piece])) > limit:
                start = len(current)
            texts.append(join_paragraphs(current[:start]))
            current = current[start:]
            size = len(join_paragraphs(current))
        size += len(piece) + (len(_PARAGRAPH_SEPARATOR) if current else 0)
        current.append(piece)
    return [*texts, join_paragraphs(current)] if current else texts


def _split_long_paragraph(paragraph: str, limit: int) -> Iterator[str]:
    while len(paragraph) > limit:
        end = find_piece_end(paragraph, limit)
        yield paragraph[:end].rstrip()
        paragraph = paragraph[end:].lstrip()
    if paragraph:
        yield paragraph


# --------------------------------------------------------------------------------------------------
# `make dapt-docx`: documents become clean text, one row of JSON for each document or part of one.
#
# Each document is read by a process with limits (`ReaderProcess`, above), its repeated paragraphs
# are left out, and it is cut between paragraphs into rows `{"text": …, "source": name, "part": n}`.
# No row holds text of two documents. A document's split depends on its own text alone.

TRAIN_FILE, VAL_FILE, REPORT_JSON_FILE = "train.jsonl", "val.jsonl", "report.json"
# The packages of the documents extra, and the module of each.
DOCUMENT_PACKAGES = {
    "beautifulsoup4": "bs4",
    "lxml_html_clean": "lxml_html_clean",
    "markitdown": "markitdown",
    "trafilatura": "trafilatura",
}
# Shorter paragraphs (in UTF-8) are never counted as repeats: "Yes.", a speaker's name, the points
# of a list.
MIN_REPEATED_BYTES = 40
_MAX_LISTED_ITEMS = 20
_MAX_PROCESSES = 8
# A process takes two seconds to start: it is worth it for this many documents.
_DOCUMENTS_PER_PROCESS = 4


@dataclass
class DocumentsReport(Answer):
    """What was found, read, left out and written; `repeated_paragraphs`: seen earlier in this
    document or another."""

    config: DocumentsConfig
    # By their names in rows and reports, in order.
    documents: dict[str, Path] = field(default_factory=dict)
    # Files that are no documents, by ending.
    other_files: Counter[str] = field(default_factory=Counter)
    unreadable: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    repeated_paragraphs: int = 0
    paragraphs: int = 0
    # Documents, rows and characters of each file.
    splits: dict[str, Counter[str]] = field(
        default_factory=lambda: {
            name: Counter(documents=0, rows=0, characters=0) for name in (TRAIN_FILE, VAL_FILE)
        }
    )
    # Why there is no val.jsonl where one was asked for.
    val_note: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """What data.documents.path names."""
        return (self.config.path,) if isinstance(self.config.path, str) else self.config.path

    @property
    def ok(self) -> bool:
        """True if there is text to train on."""
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
            "splits": {
                name.removesuffix(".jsonl"): dict(split) for name, split in self.splits.items()
            },
            "val_note": self.val_note,
        }

    def lines(self) -> list[str]:
        """The report for people."""
        rows = sum(split["rows"] for split in self.splits.values())
        lines = [
            f"{plural(len(self.documents), 'document')} found,"
            f" {len(self.documents) - len(self.unreadable)} read, {len(self.unreadable)} not"
        ]
        lists = {
            "not read": [f"{name}: {reason}" for name, reason in self.unreadable.items()],
            "other files, not read": [
                f"{count:,} {suffix}" for suffix, count in self.other_files.most_common()
            ],
            "copies": [
                f"{name} is the same text as {first}" for name, first in self.copies.items()
            ],
        }
        for title, items in lists.items():
            lines += _format_list(title, items)
        if self.repeated_paragraphs:
            outcome = (
                "left out"
                if self.config.drop_repeated
                else "kept (data.documents.drop_repeated=false)"
            )
            lines.append(f"{plural(self.repeated_paragraphs, 'paragraph')} repeated, {outcome}")
        lines.append(
            f"{plural(self.paragraphs, 'paragraph')} in {plural(rows, 'row')} of at most"
            f" {self.config.chunk_chars:,} characters"
        )
        for name, split in self.splits.items():
            if split["rows"]:
                counts = f"{plural(split['documents'], 'document')}, {plural(split['rows'], 'row')}"
                lines.append(
                    f"  {Path(self.config.out_dir) / name}: {counts}, {split['characters']:,}"
                    " characters"
                )
        if self.val_note:
            lines.append(f"  {self.val_note}")
        return lines


def _format_list(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    lines = [f"{title}:", *(f"  {one_line(item, limit=400)}" for item in items[:_MAX_LISTED_ITEMS])]
    if len(items) > _MAX_LISTED_ITEMS:
        lines.append(f"  … and {len(items) - _MAX_LISTED_ITEMS:,} more in {REPORT_JSON_FILE}")
    return lines


def _require_packages() -> None:
    """Raise DataError with the command that installs the packages of `DOCUMENT_PACKAGES` where one
    is missing."""
    missing = [
        package
        for package, module in DOCUMENT_PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise DataError(
            f"make dapt-docx needs packages that are not installed in {sys.prefix}:"
            f" {', '.join(missing)}; install them there:"
            f" {install_command('sft-play[documents]')}"
        )


def convert_documents(config: RunConfig, *, force: bool = False) -> DocumentsReport:
    """Read `data.documents.path`, write train.jsonl, val.jsonl and report.json to
    `data.documents.out_dir`. `force` overwrites files that were edited. Raises DataError where no
    document can be read, or packages are missing.
    """
    # before any document is read, so that a folder of text does not fail at its first web page
    _require_packages()
    options, output_names = config.data.documents, (TRAIN_FILE, VAL_FILE, REPORT_JSON_FILE)
    folder, report = Path(options.out_dir), DocumentsReport(options)
    find_documents(report, output_paths=[folder / name for name in output_names])
    with OutputFolder(folder, output_names, force=force, command="dapt-docx") as output:
        train_file = output.open(TRAIN_FILE)
        names_by_digest: dict[bytes, str] = {}
        known_paragraphs: set[bytes] = set()
        # for validation, if there will be something to train on
        val_documents: list[tuple[str, list[str]]] = []
        with contextlib.closing(read_documents(report.documents, options)) as texts:
            for name, text in texts:
                if isinstance(text, UnreadableDocumentError):
                    report.unreadable[name] = str(text)
                    continue
                # the share is that of all the text, so that other documents do not move this one to
                # another split
                paragraphs = split_paragraphs(text)
                text_digest = hashlib.sha256(join_paragraphs(paragraphs).encode()).digest()
                share = digest_share(text_digest)
                first_name = names_by_digest.setdefault(text_digest, name)
                new_paragraphs = []
                if first_name != name:  # a copy is left out whole
                    report.copies[name] = first_name
                else:
                    for paragraph in paragraphs:
                        # the same paragraph may be wrapped otherwise
                        words = " ".join(paragraph.split()).encode()
                        digest = hashlib.sha256(words).digest()[:16]
                        # headings and code never count as repeats: the text around them needs them
                        may_repeat = len(words) >= MIN_REPEATED_BYTES and not (
                            HEADING.fullmatch(paragraph) or FENCE.match(paragraph)
                        )
                        if not (may_repeat and digest in known_paragraphs):
                            new_paragraphs.append(paragraph)
                        if may_repeat:
                            known_paragraphs.add(digest)
                    report.repeated_paragraphs += len(paragraphs) - len(new_paragraphs)
                if options.drop_repeated:
                    paragraphs = new_paragraphs
                if paragraphs and share < options.val_fraction:
                    val_documents.append((name, paragraphs))
                elif paragraphs:
                    _write_rows(train_file, TRAIN_FILE, name, paragraphs, report)
        split, file = TRAIN_FILE, train_file
        if val_documents and report.ok:
            split, file = VAL_FILE, output.open(VAL_FILE)
        elif val_documents:
            report.val_note = (
                f"no {VAL_FILE}: by their hashes all documents would be in it, which leaves none"
                " to train on"
            )
        elif options.val_fraction:
            report.val_note = (
                f"no {VAL_FILE}: no document has a hash in the share "
                f"data.documents.val_fraction={options.val_fraction:g}"
            )
        for name, paragraphs in val_documents:
            _write_rows(file, split, name, paragraphs, report)
        if not report.ok:
            title = (
                f"none of the {plural(len(report.documents), 'document')} could be read; nothing"
                " was written"
            )
            reasons = [f"{name}: {reason}" for name, reason in report.unreadable.items()]
            raise DataError("\n".join(_format_list(title, reasons)))
        output.write_json(REPORT_JSON_FILE, report.as_json())
    return report


def find_documents(report: DocumentsReport, *, output_paths: Iterable[Path]) -> None:
    """Put the documents of `data.documents.path` into the report, except hidden files and
    `output_paths`, which it writes. Raises DataError where there is none: where it looked, and what
    is there."""
    paths_by_name: dict[str, Path] = {}
    # a document is read once, whatever leads to it
    known_paths = {os.path.realpath(path) for path in output_paths}
    for root, path in (
        root_and_path for value in report.paths for root_and_path in _find_files(value)
    ):
        real_path, suffix = os.path.realpath(path), path.suffix.lower()
        # Word keeps ~$… beside an open document
        if real_path in known_paths or path.name.startswith((".", "~$")):
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
        others = ", ".join(
            f"{count} {suffix}" for suffix, count in report.other_files.most_common(12)
        )
        raise DataError(
            f"data.documents.path={one_line(', '.join(report.paths))}: no documents there (looked"
            f" from {Path.cwd()} for {', '.join(DOCUMENT_KINDS)}); there are {others or 'no files'}"
        )


def _display_path(path: Path) -> str:
    # a name that is not UTF-8 holds surrogates in Python, which JSON and terminals cannot take
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


def _find_files(document_path: str) -> Iterator[tuple[Path, Path]]:
    path = find_source(document_path)
    if isinstance(path, Path):
        yield from (
            ((path, file) for file in walk_data_files(path))
            if path.is_dir()
            else [(path.parent, path)]
        )
        return
    parts = Path(document_path).expanduser().parts
    root = Path(
        *parts[: next((index for index, part in enumerate(parts) if glob.has_magic(part)), 0)]
    )
    for match in sorted(root.glob("/".join(parts[len(root.parts) :]))):
        yield from (
            (root, file) for file in (walk_data_files(match) if match.is_dir() else [match])
        )


def read_documents(
    paths_by_name: dict[str, Path], options: DocumentsConfig
) -> Generator[tuple[str, str | UnreadableDocumentError], None, None]:
    """Each document's name and text, in the order given; several processes read at a time."""
    count = max(1, min(cpu_cores(), _MAX_PROCESSES, len(paths_by_name) // _DOCUMENTS_PER_PROCESS))
    idle_readers: queue.SimpleQueue[ReaderProcess] = queue.SimpleQueue()

    def read(path: Path) -> str | UnreadableDocumentError:
        reader = idle_readers.get()
        try:
            return reader.read(path)
        except UnreadableDocumentError as error:
            return error
        finally:
            idle_readers.put(reader)

    # threads wait for processes here; at the end no new work comes first, then the processes' end,
    # then the threads'
    with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
        progress = stack.enter_context(
            report_wait(
                "Reading documents", unit="documents", count_total=lambda: len(paths_by_name)
            )
        )
        for _ in range(count):
            idle_readers.put(stack.enter_context(contextlib.closing(ReaderProcess(options))))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for name, text in zip(paths_by_name, pool.map(read, paths_by_name.values()), strict=True):
            yield name, text
            progress.add()


def _write_rows(
    file: TextIO, split: str, name: str, paragraphs: list[str], report: DocumentsReport
) -> None:
    texts = split_chunks(paragraphs, limit=report.config.chunk_chars)
    for part, text in enumerate(texts, start=1):
        file.write(
            json.dumps({"text": text, "source": name, "part": part}, ensure_ascii=False) + "\n"
        )
    report.paragraphs += len(paragraphs)
    report.splits[split].update(documents=1, rows=len(texts), characters=sum(map(len, texts)))
