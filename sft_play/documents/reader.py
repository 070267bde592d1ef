"""One document → clean text, in a process of its own with limits on time and memory; its text cut into rows.

MarkItDown reads Word, PDF, PowerPoint, Excel and EPUB as Markdown, trafilatura finds the main part of web pages; other
text is taken as it is. Libraries that parse files of any origin can hang, use up memory or crash the interpreter: here
that costs one document, not the command.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import re
import signal
import unicodedata
import zipfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from xml.etree import ElementTree

from sft_play.config.schema import DocumentsConfig
from sft_play.data.build.workers import hide_main_module
from sft_play.data.sources.raw import find_piece_end, read_head, read_text_pieces, wide_encoding_error
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.process.signals import die_with_parent
from sft_play.units import MIB

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
    """A document that cannot be read; the text says why and what to do. The other documents are read all the same."""


def read_document(path: Path, options: DocumentsConfig) -> str:
    """Read a document as clean text, Markdown if it has more. Raises UnreadableDocumentError: why, and what to do."""
    kind = DOCUMENT_KINDS[path.suffix.lower()]
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise UnreadableDocumentError(f"larger than the {MAX_DOCUMENT_BYTES // MIB} MiB that are read; split it")
        text = clean_text(
            read_plain_text(path)
            if kind == "text"
            else _convert_document(kind, _check_archive(path.read_bytes()), options)
        )
    except (UnreadableDocumentError, DataError) as error:
        raise UnreadableDocumentError(str(error)) from None
    except OSError as error:
        raise UnreadableDocumentError(f"cannot be opened: {error.strerror or one_line(str(error))}") from None
    except (MemoryError, RecursionError) as error:
        raise UnreadableDocumentError(f"too large or nested too deeply to be read ({type(error).__name__})") from None
    except Exception as error:  # libraries raise anything at a file that is damaged; the others are read all the same
        detail = one_line(f"{type(error).__name__}: {error}", limit=200)
        reason = "locked with a password" if "Password" in detail else "damaged, or something else than its name says"
        raise UnreadableDocumentError(f"cannot be read as {kind}: {reason}? ({detail})") from None
    if not re.search(r"\w", text):  # an empty table is not text
        raise UnreadableDocumentError(
            "holds no text" + (" (scanned pages?); run it through OCR first" if kind == "pdf" else "")
        )
    return text.strip("\n")


def read_plain_text(path: Path) -> str:
    """A file of text; raises DataError, as for rows of text, where it is not UTF-8."""
    if encoding_error := wide_encoding_error(path, read_head(path)):
        raise encoding_error
    return "".join(piece for _, piece in read_text_pieces(path))


def _check_archive(data: bytes) -> bytes:
    if data.startswith(_OLE_MAGIC):
        raise UnreadableDocumentError(
            "an Office file from before 2007, or locked with a password; save it as .docx without one"
        )
    if data.startswith(_ZIP_MAGIC):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_DOCUMENT_UNPACKED_BYTES:
                raise UnreadableDocumentError(
                    f"unpacks to more than the {MAX_DOCUMENT_UNPACKED_BYTES // MIB:,} MiB that are opened"
                )
    return data


def _convert_document(kind: str, data: bytes, options: DocumentsConfig) -> str:
    """The text of a document of this kind; a library is imported by the first document that needs it."""
    from markitdown import StreamInfo, converters

    if kind == "html":
        import trafilatura
        from bs4 import UnicodeDammit

        page = UnicodeDammit(data, is_html=True).unicode_markup or ""  # decoded as it declares, as browsers do
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
    return "\n\n".join([*_read_page_headers(data), text]) if kind == "docx" and options.headers else str(text)


def _read_page_headers(data: bytes) -> list[str]:
    """The paragraphs of a Word file's page headers and footers, each once: MarkItDown reads none."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in sorted(archive.namelist()) if re.fullmatch(r"word/(header|footer)\d*\.xml", name)]
        paragraphs = (
            paragraph for name in names for paragraph in ElementTree.fromstring(archive.read(name)).findall(".//{*}p")
        )
        texts = ["".join(run.text or "" for run in paragraph.findall(".//{*}t")) for paragraph in paragraphs]
    return [text for text in dict.fromkeys(texts) if text.strip()]


# The process that reads


class ReaderProcess:
    """A process that reads one document after the other; started anew after a document that it did not survive."""

    def __init__(self, options: DocumentsConfig, *, timeout_s: float = MAX_READ_SECONDS) -> None:
        self._options, self._timeout_s = options, timeout_s
        self._process: SpawnProcess | None = None

    def read(self, path: Path) -> str:
        """Read a document as clean text; raises UnreadableDocumentError as `read_document` does, or at a limit."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, child_connection = context.Pipe()
            self._process = context.Process(
                target=_serve_documents, args=(child_connection, self._options, os.getpid()), daemon=True
            )
            with hide_main_module():
                self._process.start()
            child_connection.close()  # so that its end is seen here
        timeout_s = self._timeout_s
        with contextlib.suppress(OSError):
            timeout_s += 2 * path.stat().st_size / MIB
        try:
            self._connection.send(path)
            reply = (
                self._connection.recv() if self._connection.poll(timeout_s) else f"took longer than {timeout_s:,.0f} s"
            )
        except (EOFError, OSError):
            reply = "crashed the process that read it; is it damaged?"
        if isinstance(reply, list):
            return str(reply[0])
        if isinstance(reply, str):
            self.close()
        raise UnreadableDocumentError(str(reply))

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
    with contextlib.suppress(ImportError):  # on Windows there are no limits
        import resource

        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        limit = MAX_MEMORY_BYTES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MAX_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    while True:
        try:
            connection.send([read_document(connection.recv(), options)])
        except UnreadableDocumentError as error:
            connection.send(error)
        except EOFError:
            return


# Text: in Unicode's composed form (NFC) with `\n` as line ends. Control characters, soft hyphens and byte order marks
# are removed; non-breaking spaces become plain ones, spaces at line ends are removed. Of Markdown no more is known than
# headings and blocks of code.

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
    text = _PARAGRAPH_ENDS.sub(_PARAGRAPH_SEPARATOR, _LINE_ENDS.sub("\n", _REMOVED_CHARACTERS.sub("", text)))
    # composed last: what was removed may have stood between a letter and its accent
    return unicodedata.normalize("NFC", "\n".join(line.rstrip(" \t") for line in _SPACES.sub(" ", text).split("\n")))


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
    """Texts of at most `limit` characters, cut between paragraphs; a longer paragraph is cut inside. A heading goes
    with what follows it. Nothing is lost but the white space at the cuts."""
    texts: list[str] = []
    current: list[str] = []
    size = 0
    for piece in (piece for paragraph in paragraphs for piece in _split_long_paragraph(paragraph, limit)):
        if current and size + len(_PARAGRAPH_SEPARATOR) + len(piece) > limit:
            start = len(current)
            while start and HEADING.fullmatch(current[start - 1]):
                start -= 1
            # the headings at the end go to the next text, if there is text before them and room there
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
