"""Bytes of data files: plain or gzipped, in blocks, checked; rows as readers make them, and what is
said of bad ones.

A file that is not UTF-8 is read in the encoding that was said, or is an error that names the one it
looks like. A gzipped file that unpacks to far more than text would is refused.
"""

import codecs
import errno
import functools
import gzip
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sft_play.config.schema import Encoding
from sft_play.errors import DataError
from sft_play.log import one_line

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
# The beginning of a file that decides what it is.
HEAD_BYTES = 1 << 16
MAX_UNPACKED_BYTES = 1 << 30
# A gzipped file that unpacks to more than both is refused: gzip packs text 3 to 20 times, zeros
# 1,000 times.
MAX_UNPACKED_RATIO = 200
# A larger row is a bad row and never held: 16 MiB are four million tokens of English, and
# tokenising takes some 140 bytes of memory per byte. What is larger is nearly always a file without
# line ends, or one object around all rows.
MAX_ROW_BYTES = 16 << 20
# Plain text of more than twice this many characters is read in pieces of at most this many.
TEXT_CHARS = 1 << 20

NOTE_PIECE = "a piece of a longer text, cut after a paragraph: a document of its own"
NOTE_NULLS = "nulls in tool calls or tools, which tables put where a row lacks a key, are left out"

GZIP_MARK = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One object of a data file with the place it came from; `notes`: what was done to read it;
    `missing`: columns whose cell in a CSV is a word for no value; `folder`: where its relative
    paths start, "" for a row of no folder."""

    where: str
    data: dict[str, Any]
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    folder: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not used, where it stands, and why; `reason` is what rows are counted by.
    `is_asked`: an option asks for rows like it to be left out, so it is counted and never an
    error."""

    where: str
    reason: str
    detail: str = ""
    is_asked: bool = False

    @property
    def explanation(self) -> str:
        """The reason, with the detail."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason

    def __str__(self) -> str:
        return f"{self.where}: {self.explanation}"


def too_large_row(location: str, row_bytes: int) -> BadRow:
    """The bad row that is larger than MAX_ROW_BYTES, of `row_bytes` bytes."""
    return BadRow(
        location,
        f"the row is larger than {MAX_ROW_BYTES >> 20} MiB",
        f"{row_bytes:,} bytes, and at most {MAX_ROW_BYTES:,} are read; write its rows on lines of"
        " their own (an object around them: jq -c '.KEY[]' FILE > rows.jsonl), or long text as a"
        " .txt file, which is read in pieces",
    )


def is_gzipped(path: Path) -> bool:
    """True if the file's content, not its name, says gzip."""
    try:
        require_file(path)
        with path.open("rb") as file:
            return file.read(2) == GZIP_MARK
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def require_file(path: Path) -> None:
    """Raises DataError for anything but a regular file: a pipe would wait for ever, a device may
    never end."""
    # is_file() follows links: one to a regular file is one
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file (a pipe or a device?); data is read more than once"
        )
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read: {os.strerror(errno.EACCES)}")


class EncodedPath(type(Path())):  # type: ignore[misc]
    """A path whose files are read as `encoding` (data.encoding) where they are not UTF-8."""

    encoding = "utf-8"


def mark_encoding(path: Path, encoding: str) -> Path:
    """Attach an encoding to a path: files under it that are not UTF-8 are read in it."""
    if encoding == "utf-8":
        return path
    encoded_path = EncodedPath(path)
    encoded_path.encoding = encoding
    return encoded_path


def path_encoding(path: Path) -> str:
    """The encoding attached by `mark_encoding`, else utf-8."""
    return path.encoding if isinstance(path, EncodedPath) else "utf-8"


def read_blocks(
    path: Path, *, start: int = 0, end: int | None = None, size: int = BLOCK_BYTES
) -> Iterator[bytes]:
    """The bytes [start, end) of a file in blocks; of a gzipped file all of them, unpacked; of one
    in another encoding as UTF-8. Raises DataError where it cannot be read so, or unpacks to more
    than the limits."""
    encoding = path_encoding(path)
    if encoding == "utf-8" or _is_utf8(path, path.stat().st_mtime_ns):
        yield from _read_byte_blocks(path, start=start, end=end, size=size)
        return
    decoder, offset = codecs.getincrementaldecoder(encoding)(), 0
    try:
        for block in _read_byte_blocks(path, size=size):
            yield decoder.decode(block).encode()
            offset += len(block)
        yield decoder.decode(b"", final=True).encode()
    except UnicodeError as error:
        location = f"{path}, byte {offset + getattr(error, 'start', 0):,}"
        raise DataError(
            f"{location}: neither UTF-8 nor {encoding}, which data.encoding says it is"
        ) from None


@functools.lru_cache(maxsize=1000)
def _is_utf8(path: Path, _mtime_ns: int) -> bool:
    try:
        for _ in codecs.iterdecode(_read_byte_blocks(path), "utf-8"):
            pass
        return True
    except UnicodeDecodeError:
        logger.info(
            "%s is not UTF-8: read as %s (data.encoding)", one_line(str(path)), path_encoding(path)
        )
        return False


def _read_byte_blocks(
    path: Path, *, start: int = 0, end: int | None = None, size: int = BLOCK_BYTES
) -> Iterator[bytes]:
    is_packed = is_gzipped(path)
    offset = start
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * path.stat().st_size)
            file.seek(start)
            while block := file.read(size if end is None else min(size, end - offset)):
                # the size in gzip's footer is of the last member alone, and modulo 2**32
                offset += len(block)
                if is_packed and offset > limit:
                    raise DataError(
                        f"{path} unpacks to more than {limit:,} bytes, over {MAX_UNPACKED_RATIO}"
                        " times its size: text does not compress like that; unpack it yourself if"
                        " this is intended (gunzip)"
                    )
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def read_head(path: Path) -> bytes:
    """The first bytes of a file, unpacked where it is gzipped."""
    return next(read_blocks(path, size=HEAD_BYTES), b"")[:HEAD_BYTES]


def read_line_blocks(
    path: Path, *, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes | int]]:
    """Blocks that end with a line's end, each with its offset; the mark at the file's beginning is
    left out. In the place of a line of more than MAX_ROW_BYTES there is its size: its bytes are
    counted, never held.
    """
    pending: list[bytes] = []
    pending_bytes = 0
    offset = start
    for index, block in enumerate(read_blocks(path, start=start, end=end)):
        if start == 0 and index == 0 and block.startswith(BOM):
            block, offset = block[len(BOM) :], len(BOM)
        # The line that was open before this block ends in it. If it was too long, its rest is
        # skipped.
        line_end = block.find(b"\n") + 1
        if line_end and pending_bytes + line_end - 1 > MAX_ROW_BYTES:
            yield offset, pending_bytes + line_end - 1
            offset += pending_bytes + line_end
            block, pending, pending_bytes = block[line_end:], [], 0
        cut = block.rfind(b"\n") + 1
        if cut:
            piece = b"".join((*pending, block[:cut]))
            yield offset, piece
            offset += len(piece)
            pending, pending_bytes = [], 0
        pending.append(block[cut:])
        pending_bytes += len(block) - cut
        if pending_bytes > MAX_ROW_BYTES:
            pending = []  # only its size is needed from here on
    if pending_bytes > MAX_ROW_BYTES:
        yield offset, pending_bytes
    elif pending_bytes:
        yield offset, b"".join(pending)


def read_text_blocks(path: Path) -> Iterator[str]:
    """The file's text in pieces; raises DataError at the first byte that is not UTF-8."""
    # keeps the bytes of a character that a block's end cut
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    end = 0
    for block in read_blocks(path):
        end += len(block)
        try:
            yield decoder.decode(block)
        except UnicodeDecodeError as error:
            # what it was given ends with the block, and may begin before it
            raise not_utf8_error(path, end - len(error.object) + error.start) from None
    if undecoded := decoder.getstate()[0]:
        raise not_utf8_error(path, end - len(undecoded))


def read_text_pieces(path: Path) -> Iterator[tuple[int, str]]:
    """The text of a file that is one document: (1, all of it), or pieces of at most TEXT_CHARS
    characters, each with the line on which it begins. Joined they are the text; pieces of nothing
    but white space are left out. Raises DataError where it is not UTF-8 text."""
    line, buffer, is_whole = 1, "", True
    for block in read_text_blocks(path):
        # a few stray ones are noted as control characters
        if block.count("\0") > len(block) // 100:
            raise DataError(f"{path} is not text (it holds NUL bytes)")
        buffer += block
        while len(buffer) > 2 * TEXT_CHARS:
            cut = find_piece_end(buffer, TEXT_CHARS)
            piece, buffer = buffer[:cut], buffer[cut:]
            is_whole = False
            if piece.strip():
                yield line, piece
            line += piece.count("\n")
    if is_whole or buffer.strip():
        yield line, buffer


# the end of a paragraph, of a line, of a word
_PIECE_ENDS = (
    re.compile(r"\n[ \t\r]*\n\s*(?=\S)"),
    re.compile(r"\n\s*(?=\S)"),
    re.compile(r"(?<=\S)(?=\s)"),
)


def find_piece_end(text: str, limit: int) -> int:
    """Find where to cut a text of more than `limit` characters: in the second half of these behind
    the last paragraph, else the last line, else the last word; else at `limit`."""
    for pattern in _PIECE_ENDS:
        # + 1 for what a lookahead has to see
        ends = [match.end() for match in pattern.finditer(text, limit // 2, limit + 1)]
        if ends:
            return ends[-1]
    return limit


class NotUtf8Error(DataError):
    """A file is not UTF-8; `encoding` is the value of data.encoding that it looks like, None where
    it has none."""

    # pickled by its message
    def __init__(self, message: str, encoding: Encoding | None = None) -> None:
        super().__init__(message)
        self.encoding = encoding


def not_utf8_error(path: Path, offset: int) -> NotUtf8Error:
    """The error for the byte at `offset`: its line and column, and what the file looks like."""
    # The file is read again from its beginning: readers count lines only where they need them.
    line, line_start, block_end, sample = 1, 0, 0, b""
    for block in read_blocks(path):
        preceding = block[: max(0, offset - block_end)]
        line += preceding.count(b"\n")
        line_start = (
            max(line_start, block_end + preceding.rfind(b"\n") + 1)
            if b"\n" in preceding
            else line_start
        )
        sample = sample[-HEAD_BYTES:] + block
        block_end += len(block)
        if block_end > offset:
            break
    sample_offset = len(sample) - (block_end - offset)
    excerpt = sample[max(0, sample_offset - HEAD_BYTES) : sample_offset + HEAD_BYTES]
    # whole lines, since a character that is cut in two is none of its encoding
    if len(excerpt) < len(sample):
        excerpt = excerpt[excerpt.find(b"\n") + 1 : excerpt.rfind(b"\n")] or excerpt
    encoding = guess_encoding(excerpt)
    location = (
        f"{path}:{line}: byte 0x{sample[sample_offset]:02X} at column {offset - line_start + 1} is"
        " not UTF-8"
    )
    if encoding is None:
        return NotUtf8Error(
            f"{location} (the file looks like UTF-8 that is damaged here): take it out"
        )
    return NotUtf8Error(
        f"{location} (looks like {encoding}): {_ENCODING_REMEDY.format(encoding)}", encoding
    )


_ENCODING_REMEDY = "data.encoding={} in a run reads it so; or convert it to UTF-8"


def wide_encoding_error(path: Path, beginning: bytes) -> DataError | None:
    """The error for UTF-16 and UTF-32, told by the mark that such a file begins with; None for
    anything else."""
    if beginning[:4] in (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"):
        return DataError(f"{path} is UTF-32: convert it to UTF-8")
    if beginning[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return NotUtf8Error(
            f"{path} is UTF-16, not UTF-8: {_ENCODING_REMEDY.format('utf-16')}", "utf-16"
        )
    return None


# Encodings of scripts other than Latin. Of equally likely ones the first counts: Chinese text may
# be Korean too.
_OTHER_SCRIPTS = ("cp1251", "koi8_r", "cp932", "euc_jp", "gb18030", "euc_kr", "big5")
# Bytes that are the same everywhere, and those that no text has beside them alone.
_ASCII_BYTES, _IMPOSSIBLE_BYTES = re.compile(rb"[\x00-\x7f]+"), re.compile(rb"[\xfe\xff]+")


def guess_encoding(sample: bytes) -> Encoding | None:
    """Guess the encoding of bytes that are not UTF-8; None if they are damaged UTF-8."""
    # sequences of several bytes that are UTF-8 are no accident: where most are, the others are
    # damage
    valid = sample.decode("utf-8", "ignore").encode()
    if sum(byte > 0x7F for byte in valid) > 4 * (
        len(sample) - len(valid)
    ) or _IMPOSSIBLE_BYTES.fullmatch(_ASCII_BYTES.sub(b"", sample)):
        return None
    runs = list(map(len, re.findall(rb"[\x80-\xff]+", sample)))
    # in Latin script they stand alone
    if sum(size for size in runs if size > 1) >= 0.7 * sum(runs):
        from charset_normalizer import from_bytes

        chaos = {
            match.encoding: match.chaos
            for match in from_bytes(sample, cp_isolation=[*_OTHER_SCRIPTS])
        }
        if chaos:
            encoding = min(
                (name for name in _OTHER_SCRIPTS if name in chaos), key=chaos.__getitem__
            )
            return cast(Encoding, encoding.replace("_", "-"))
    return "cp1252" if any(0x80 <= byte <= 0x9F for byte in sample) else "latin1"


# Bad rows of a source that are listed; the others are counted.
LISTED_BAD_ROWS = 20
FIX_OR_SKIP = "fix them, or leave them out, counted, with data.on_bad_row=skip"
FIX_ALL = "fix them: none of these rows can be used"


def bad_row_lines(rows_text: str, counts: Counter[str], examples: Sequence[BadRow]) -> list[str]:
    """The rows that cannot be used, in words: counts by reason; then, indented, the first ones and
    how many more."""
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in counts.most_common(6))
    lines = [f"{counts.total():,} of {rows_text} cannot be used: {reasons}"]
    lines += [f"  {one_line(str(row), limit=600)}" for row in examples]
    if counts.total() > len(examples):
        lines.append(f"  … and {counts.total() - len(examples):,} more")
    return lines


def no_usable_rows_error(rows_text: str, rows: Sequence[BadRow]) -> DataError:
    """The error where none of a file's first rows can be used."""
    counts = Counter(row.reason for row in rows)
    return DataError("\n".join([*bad_row_lines(rows_text, counts, rows[:3]), FIX_ALL]))
