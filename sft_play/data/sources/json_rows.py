"""JSON → rows: one object a line, or a list; read piece by piece.

Memory stays flat: a list of gigabytes is never held whole. A row that parses but would lose
something (a key twice, NaN, half a surrogate pair) is a bad row.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_play.data.sources.raw import (
    MAX_ROW_BYTES,
    BadRow,
    RawRow,
    not_utf8_error,
    read_line_blocks,
    read_text_blocks,
    too_large_row,
)
from sft_play.errors import DataError
from sft_play.log import one_line

# Objects and lists inside each other; what walks a row later needs a few calls per level.
MAX_DEPTH = 200
# Who speaks, in a message.
ROLE_KEYS = ("role", "from", "speaker", "author")
OBJECT_CONTINUES = "the object goes on in the next line"
_QUOTED_CHARS = 60
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Characters that must follow a number at a window's end: it may go on in the next one (`1` of
# `1.5e+3`).
_NUMBER_MARGIN = 16


class LossyJsonError(ValueError):
    """JSON that parses but would lose something, or that Python cannot hold."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise LossyJsonError(f'the key "{one_line(key)}" occurs twice in one object')
    return value


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise LossyJsonError("a number is too large")
    return value


def _refuse_constant(name: str) -> None:
    raise LossyJsonError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_constant=_refuse_constant, parse_float=_parse_float
)
# It tells where a value ends that the other refuses.
_LOSSY_DECODER = json.JSONDecoder()


def parse_strict_json(text: str) -> Any:
    """Parse JSON text inside a row, such as a tool call's arguments; raises ValueError if the value
    would lose something of the text."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise LossyJsonError("nested too deeply") from None
    except (json.JSONDecodeError, LossyJsonError):
        raise
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise LossyJsonError("a number has too many digits") from None
    problem = _find_loss(value, text)
    if problem:
        raise LossyJsonError(problem)
    return value


def _find_loss(value: Any, text: str) -> str:
    if text.count("[") + text.count("{") > MAX_DEPTH and _nesting_depth(value) > MAX_DEPTH:
        return "nested too deeply"
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "half of a surrogate pair (a broken emoji) in the text"
    return ""


def _nesting_depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        lists = [[*item.values()] if isinstance(item, dict) else item for item in level]
        level = [inner for items in lists if isinstance(items, list) for inner in items]
        depth += 1
    return depth


def read_lines(
    path: Path, name: str, *, start: int = 0, end: int | None = None, first_line: int = 1
) -> Iterator[RawRow | BadRow]:
    """The rows of lines that are JSON objects; `start` is a line's beginning and `first_line` its
    number. Raises DataError at the first byte that is not UTF-8, after the rows before it."""
    line_number = first_line - 1
    for offset, block in read_line_blocks(path, start=start, end=end):
        if isinstance(block, int):
            line_number += 1
            yield too_large_row(f"{name}:{line_number}", block)
            continue
        bad_byte: int | None = None
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:  # the lines before it are read first
            bad_byte = error.start
            text = block[: block.rfind(b"\n", 0, bad_byte) + 1].decode("utf-8")
        # the empty text behind the last line end is no line
        for line in text.removesuffix("\n").split("\n"):
            line_number += 1
            if line and not line.isspace():
                yield parse_line(line, f"{name}:{line_number}")
        if bad_byte is not None:
            raise not_utf8_error(path, offset + bad_byte)


def parse_line(line: str, location: str) -> RawRow | BadRow:
    """The row of one line that is not blank, or what is wrong with it."""
    # files that were joined have byte order marks inside
    line = line.strip().removeprefix("\ufeff")
    if not line.strip("\0"):
        return BadRow(
            location, "NUL bytes in place of a row, as at the end of a file that was cut off"
        )
    try:
        return _to_raw_row(parse_strict_json(line), location)
    except json.JSONDecodeError as error:
        return BadRow(
            location,
            "not valid JSON",
            f"{_explain_json_error(error)}. Line: {one_line(line, limit=_QUOTED_CHARS)}",
        )
    except LossyJsonError as error:
        return BadRow(location, str(error))


def _to_raw_row(value: Any, location: str) -> RawRow | BadRow:
    if is_turn_list(value):  # xtuner's layout: a line is the list of a chat's messages
        return RawRow(location, {"messages": value})
    if not isinstance(value, dict):
        return BadRow(
            location,
            "a row is not an object",
            one_line(json.dumps(value, ensure_ascii=False), limit=60),
        )
    return RawRow(location, value)


def is_turn_list(value: Any) -> bool:
    """True if it is a list of messages: objects that name a speaker."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(turn, dict) and any(isinstance(turn.get(key), str) for key in ROLE_KEYS)
            for turn in value
        )
    )


def _explain_json_error(error: json.JSONDecodeError) -> str:
    text, column = error.doc, error.colno
    if "Unterminated string" in error.msg:
        return f"the string that starts at column {column} is not closed"
    remainder = text[error.pos : error.pos + 40].strip()
    if not remainder and text.rstrip().endswith(("{", "[", ",")):
        return (
            f"{OBJECT_CONTINUES}; a row is one line, or an item of a list (jq -c . FILE >"
            " rows.jsonl; of an object around them: jq -c '.KEY[]')"
        )
    if error.msg == "Extra data" and remainder == ",":
        return f"remove the comma at the end (column {column})"
    if error.msg == "Extra data" and remainder.startswith("{"):
        return (
            f"a second object on the same line at column {column}; each row needs a line of its own"
        )
    if "Invalid control character" in error.msg:
        return (
            f"a raw control character inside a string at column {column} (a line break or tab is"
            " written \\n, \\t)"
        )
    if remainder.startswith("'"):
        return f"' at column {column}: keys and strings need double quotes"
    return f"{error.msg} at column {column}"


class JsonWindow:
    """A piece of a file's text that moves along it and knows the place of its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces = read_text_blocks(path)
        self.text = ""
        self.position = 0
        self.is_last = False
        # Where the row before began.
        self.last_row_line = 0
        self._line, self._column, self._scanned = 1, 1, 0

    def read_more(self, min_chars: int = 1) -> bool:
        """Drop what the position has passed and read `min_chars` characters or more; False at the
        end of the file."""
        self.line_and_column()  # counts the line ends that are dropped
        self.text, self.position, self._scanned = self.text[self.position :], 0, 0
        pieces, count = [self.text], 0
        while count < min_chars and not self.is_last:
            piece = next(self._pieces, None)
            self.is_last = piece is None
            pieces.append(piece or "")
            count += len(pieces[-1])
        self.text = "".join(pieces)
        return count > 0

    def line_and_column(self) -> tuple[int, int]:
        """Line and column of the position, from 1."""
        breaks = self.text.count("\n", self._scanned, self.position)
        line_start = (
            self.text.rfind("\n", 0, self.position) if breaks else self._scanned - self._column
        )
        self._line, self._column, self._scanned = (
            self._line + breaks,
            self.position - line_start,
            self.position,
        )
        return self._line, self._column

    def peek_char(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.read_more():
                return ""

    def read_value(self) -> tuple[Any, str, str]:
        """The JSON value at the position, its text, and what it would lose ("" for nothing); the
        position moves past it. Raises DataError where it is no JSON."""
        while True:
            loss = ""
            try:
                try:
                    value, end = _DECODER.raw_decode(self.text, self.position)
                except LossyJsonError as error:
                    loss = str(error)
                    value, end = _LOSSY_DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                # reading on may resolve an open string, or an error near the end: 64 characters are
                # more than a literal, an escape or a number that the window's end may have cut
                is_near_end = "Unterminated string" in error.msg or error.pos >= len(self.text) - 64
                if self.is_last or not is_near_end:
                    line_start = max(self.text.rfind("\n", 0, error.pos) + 1, self.position)
                    line = one_line(
                        self.text[line_start : line_start + 200].split("\n")[0], limit=_QUOTED_CHARS
                    )
                    self.position = error.pos
                    # the file's, where the decoder knows the window's
                    _, error.colno = self.line_and_column()
                    raise self._error_here(
                        f"not valid JSON: {_explain_json_error(error)}. Line: {line}"
                    ) from None
            except RecursionError:
                raise self._error_here("nested too deeply") from None
            except ValueError:  # Python reads no whole number of more than 4,300 digits
                raise self._error_here("a number has too many digits") from None
            else:
                # objects, lists and strings end with their own mark; a number or a literal may go
                # on
                may_continue = (
                    self.text[end - 1] not in '}]"' and end > len(self.text) - _NUMBER_MARGIN
                )
                if self.is_last or not may_continue:
                    text, self.position = self.text[self.position : end], end
                    return value, text, loss
            buffered = len(self.text) - self.position
            if buffered > MAX_ROW_BYTES:
                raise self._error_here(
                    f"a row that begins here is larger than {MAX_ROW_BYTES >> 20} MiB, the most"
                    " that is read; split it, or take the rows out of an object around them: jq -c"
                    " '.KEY[]' FILE > rows.jsonl"
                )
            # twice as much: a long row is not parsed again for every block
            self.read_more(max(1, buffered))

    def _error_here(self, reason: str) -> DataError:
        return DataError(f"{self._path}:{self.line_and_column()[0]}: {reason}")


def read_objects(path: Path, name: str) -> Iterator[RawRow | BadRow]:
    """The rows of objects one behind the other, each over as many lines as it has."""
    window = JsonWindow(path)
    while window.peek_char():
        yield _read_row(window, name)


def read_array(path: Path, name: str) -> Iterator[RawRow | BadRow]:
    """Rows of a JSON list; each knows the line on which it begins (and the column, if it is not the
    first on it)."""
    window = JsonWindow(path)
    window.peek_char()
    window.position += 1  # past the bracket
    if window.peek_char() == "]":
        raise DataError(f"{path} has no rows: the list is empty")
    while True:
        if window.peek_char() == "]":
            raise DataError(f"{path}:{window.line_and_column()[0]}: remove the comma before `]`")
        yield _read_row(window, name)
        char = window.peek_char()
        if char == ",":
            window.position += 1
        elif char == "]":
            break
        else:
            found_text = f"`{one_line(char)}`" if char else "the end of the file"
            raise DataError(
                f"{path}:{window.line_and_column()[0]}: expected `,` or `]` after a row, found"
                f" {found_text}"
            )
    window.position += 1
    if window.peek_char():
        raise DataError(f"{path}:{window.line_and_column()[0]}: text after the end of the list")


def _read_row(window: JsonWindow, name: str) -> RawRow | BadRow:
    line, column = window.line_and_column()
    location = f"{name}:{line}:{column}" if line == window.last_row_line else f"{name}:{line}"
    window.last_row_line = line
    value, text, loss = window.read_value()
    if len(text) > MAX_ROW_BYTES:
        return too_large_row(location, len(text.encode()))
    loss = loss or _find_loss(value, text)
    return BadRow(location, loss) if loss else _to_raw_row(value, location)
