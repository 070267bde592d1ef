"""One document → clean blocks, in a process of its own with limits on time and memory.

The first bytes of a file tell its kind, and its name which kind of plain text it is. Libraries that parse files of any
origin can hang, use up memory or crash the interpreter: here that costs one document, not the command.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from sft_play import checkout
from sft_play.documents.text import Block, Extract, ReadOptions, Unreadable, clean, clean_blocks, paragraphs
from sft_play.endings import ends_with_me, leave_with_starter
from sft_play.log import one_line
from sft_play.units import MIB

MAX_FILE_BYTES = 256 * MIB
MAX_SECONDS = 120.0
"""Longest time for one document, plus 2 s for each MiB of it; pypdf reads about 20 to 50 pages a second."""
MAX_MEMORY_BYTES = 4096 * MIB
"""Most address space of the process that reads; a novel takes about 200 MiB."""
_MAX_DEPTH = 20_000

KINDS = {
    ".docx": "docx",
    ".docm": "docx",
    ".dotx": "docx",
    ".doc": "docx",
    ".pdf": "pdf",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".md": "md",
    ".markdown": "md",
    ".rst": "rst",
    ".rest": "rst",
    ".txt": "txt",
    ".text": "txt",
}
"""Kinds by the endings of names; `.doc` is opened to say what it is."""

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_BINARY = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"Rar!": "a RAR archive; unpack it first",
    b"BZh": "a bzip2 archive; unpack it first",
    b"\xfd7zXZ": "an xz archive; unpack it first",
    b"\x7fELF": "a program",
    b"PAR1": "Parquet",
    b"%!PS": "PostScript; convert it: ps2pdf",
    b"{\\rtf": "RTF; save it as .docx",
}


def read_document(path: Path, options: ReadOptions) -> Extract:
    """The clean blocks of one document.

    Raises:
        Unreadable: it cannot be read, or holds no text; says why, and what to do.
    """
    data = _bytes(path)
    if not data.strip(b"\x00 \t\r\n"):
        raise Unreadable("the file is empty" if not data else "the file is blank")
    expected = KINDS[path.suffix.lower()]
    kind = _kind(data, expected)
    try:
        extract = _extract(kind, data, options)
    except MemoryError:
        raise Unreadable(f"needs more than {MAX_MEMORY_BYTES // MIB:,} MiB of memory to be read") from None
    except RecursionError:
        raise Unreadable("nested too deeply to be read") from None
    extract.blocks = clean_blocks(extract.blocks, extract.left_out)
    if kind != expected and path.suffix.lower() != ".doc":
        extract.notes.append(f"named {path.suffix.lower()}, read as what it is: .{kind}")
    if not extract.blocks:
        raise Unreadable("holds no text" + (f" ({extract.notes[0]})" if extract.notes else ""))
    return extract


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise Unreadable(
                f"{size / MIB:,.0f} MiB, more than the {MAX_FILE_BYTES // MIB} MiB that are read; split it"
            )
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be opened: {error.strerror or one_line(str(error))}") from None


def _kind(data: bytes, expected: str) -> str:
    """The kind of a document by its content.

    Raises:
        Unreadable: it is of no kind that is read here.
    """
    if data.startswith(_OLE):
        if "EncryptedPackage".encode("utf-16-le") in data:
            raise Unreadable("locked with a password; save it without one")
        raise Unreadable(
            "an old Office file (.doc before Word 2007); save it as .docx: soffice --headless --convert-to docx FILE"
        )
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):  # any zip archive; an empty one begins with the second
        return "docx"
    # Acrobat takes a header anywhere in the first 1,024 bytes (PDF Reference 1.7, appendix H)
    if b"%PDF-" in data[:1024] and (expected == "pdf" or data.startswith(b"%PDF-")):
        return "pdf"
    for start, description in _BINARY.items():
        if data.startswith(start):
            raise Unreadable(f"is {description}")
    if expected in ("docx", "pdf"):
        head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if head.startswith((b"<!doctype html", b"<html")):
            return "html"
        article = "PDF" if expected == "pdf" else "Word file"
        raise Unreadable(f"not a {article}: it begins with {one_line(repr(data[:12])[1:], limit=60)}")
    return expected


def decode(data: bytes) -> str:
    """Plain text: UTF-8, or UTF-16 with a byte order mark.

    Raises:
        Unreadable: it is neither; says where, and what to do.
    """
    if data.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        raise Unreadable("is UTF-32; convert it: iconv -f utf-32 -t utf-8")
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        byte, line = data[error.start], data.count(b"\n", 0, error.start) + 1
        if encoding == "utf-16":
            raise Unreadable("begins like UTF-16 but is not: is it cut off?") from None
        if b"\x00" in data:
            raise Unreadable(f"is binary, not text (byte 0x{byte:02X} in line {line})") from None
        raise Unreadable(
            f"line {line}: byte 0x{byte:02X} is not UTF-8; find its encoding (latin1, gbk, …) and convert it: iconv -f "
            "latin1 -t utf-8"
        ) from None
    if "\x00" in text:
        line = text.count("\n", 0, text.index("\x00")) + 1
        raise Unreadable(f"is binary, not text (a NUL character in line {line})")
    return text


def _extract(kind: str, data: bytes, options: ReadOptions) -> Extract:
    """The blocks of a document of this kind; its reader is imported by the first document that needs it."""
    if kind == "html":
        from sft_play.documents.html_text import read_html

        return read_html(data, options)
    if kind == "pdf":
        from sft_play.documents.pdf_text import read_pdf

        return read_pdf(data, options)
    if kind == "docx":
        from sft_play.documents.docx_text import read_docx

        return read_docx(data, options)
    text = decode(data)
    if kind == "txt":
        extract = Extract()
        extract.blocks = [Block(piece) for piece in paragraphs(clean(text, extract.left_out))]
        return extract
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if kind == "md":
        from sft_play.documents.markdown_text import read_markdown

        return read_markdown(text, options)
    from sft_play.documents.rst_text import read_rst

    assert kind == "rst", kind
    return read_rst(text, options)


# The process that reads


def serve() -> None:
    """Read the documents that standard input names, a line of JSON each, and answer on standard output."""
    leave_with_starter()
    # answers go to a copy of standard output, whose number then means standard error
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not be read as an answer
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(_MAX_DEPTH)
    with contextlib.suppress(ImportError):  # on Windows there are no limits
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    for line in sys.stdin:
        asked = json.loads(line)
        _end_after(asked["seconds"] + 30)  # later than the parent would, which says why
        answers.write(json.dumps(_answer(asked)) + "\n")
        answers.flush()
        _end_after(0)


def _end_after(seconds: float) -> None:
    """Let this process end by itself after that time, should its parent be gone; 0 cancels it."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    options = ReadOptions(headers=asked["headers"], drop_boilerplate=asked["drop_boilerplate"])
    try:
        return read_document(Path(os.fsdecode(bytes.fromhex(asked["path"]))), options).as_json()
    except Unreadable as error:
        return {"unreadable": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"unreadable": f"too large or nested too deeply to be read ({type(error).__name__})"}
    except Exception as error:  # a fault of a library or of ours with this file; the others are read all the same
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return {"unreadable": f"the reader failed: {type(error).__name__}: {one_line(str(error))} ({place})"}


_START = "import sys; sys.path.insert(0, {root!r}); from sft_play.documents.reader import serve; serve()"


class ReaderProcess:
    """A process that reads one document after the other; restarted after a document that it did not survive."""

    def __init__(self, options: ReadOptions, *, seconds: float = MAX_SECONDS) -> None:
        self._options, self._seconds = options, seconds
        self._process: subprocess.Popen[str] | None = None

    def read(self, path: Path) -> Extract:
        """The clean blocks of a document; raises Unreadable as `read_document` does, or when a limit is reached."""
        process = self._process or self._start()
        try:
            seconds = self._seconds + 2 * path.stat().st_size / MIB
        except OSError:
            seconds = self._seconds
        asked = {
            "path": os.fsencode(path.absolute()).hex(),
            "headers": self._options.headers,
            "drop_boilerplate": self._options.drop_boilerplate,
            "seconds": seconds,
        }
        line, is_late = _ask(process, json.dumps(asked) + "\n", seconds)
        if not line:
            self.close()
        if is_late:
            raise Unreadable(f"took longer than {seconds:,.0f} s to read")
        if not line:
            raise Unreadable(f"crashed the process that read it (exit code {process.returncode}); is it damaged?")
        answer = json.loads(line)
        if "unreadable" in answer:
            raise Unreadable(answer["unreadable"])
        return Extract.from_json(answer)

    def _start(self) -> subprocess.Popen[str]:
        root = str(checkout.ROOT)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(root=root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={
                **ends_with_me(os.environ),
                "PYTHONIOENCODING": "utf-8",
                "PYTHONHASHSEED": "0",  # the order of sets, and so the text, must not differ from process to process
                "OMP_NUM_THREADS": "1",
            },
        )
        return self._process

    def close(self) -> None:
        """End the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what is left in it has no reader any more
                if pipe is not None:
                    pipe.close()


def _ask(process: subprocess.Popen[str], line: str, seconds: float) -> tuple[str, bool]:
    """A process's answer, and whether it was killed for taking too long; an empty answer if it died."""
    assert process.stdin is not None
    assert process.stdout is not None
    started = time.monotonic()
    # readline() has no timeout: the process is killed, which ends the line
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        answer = ""
    finally:
        timer.cancel()
    if answer.endswith("\n"):
        return answer, False
    return "", time.monotonic() - started >= seconds
