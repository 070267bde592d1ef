"""A marked copy of a row: what a template writes around the row's texts, read from the sentinels in them.

`turns.py` says what the copy is for.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sft_play.data.masks.token_row import Span

# `argument` is a text inside the arguments of a call, `arguments` all of them as one JSON text.
PieceKind = Literal["content", "reasoning", "name", "argument", "arguments"]

# Sentinels are ASCII letters and digits: nothing that a template strips, splits at or escapes.
SENTINEL_PREFIX = "zQ9x"
_SENTINEL = re.compile(SENTINEL_PREFIX + r"(\d{5})([be])")
SECOND_SENTINEL_PREFIX = "Kw7V"
_SECOND_SENTINEL = re.compile(SECOND_SENTINEL_PREFIX + r"([ghjkmnprst]{5})([du])")
# letter for letter, so that the sentinels of both copies are equally long
_TO_SECOND, _FROM_SECOND = str.maketrans("0123456789be", "ghjkmnprstdu"), str.maketrans("ghjkmnprstdu", "0123456789be")
SENTINEL_CHARS = len(SENTINEL_PREFIX) + 6
# Marks that close think text.
_CLOSING_MARK = re.compile(r"/|end|suffix|close|stop|^<\w+\|>$", re.IGNORECASE)
# Matches nothing.
MATCHES_NOTHING = re.compile("(?!)")


@dataclass(frozen=True)
class MarkedPiece:
    """A piece of a message's text, without white space at its ends."""

    message_index: int
    kind: PieceKind
    text: str
    is_think: bool = False
    """It is think text, which a template may leave out."""


@dataclass(frozen=True)
class GapPosition:
    """A position in a rendered text: characters from the beginning of a gap between pieces."""

    gap: int
    offset: int


@dataclass(frozen=True)
class Turn:
    """One assistant turn: its span where it is exact, else why it is not and what would be trained instead."""

    message_index: int
    start: GapPosition | None = None
    end: GapPosition | None = None
    ended_by_prefix: bool = False
    """Its end is that of the rendered conversation up to it."""
    ended_by_next_turn: bool = False
    """It is ended by the token that opens the next turn."""
    added_end: str = ""
    """What the template does not write after the last turn: the token that would open the next one."""
    unprompted_header: str = ""
    """What the template writes before the turn that its prompt does not have, such as before a first message."""
    prompt_suffix: str | None = None
    """What its prompt has behind the header, and the turn has not; None where the text begins with the prompt."""
    without_prompt: bool = False
    """It follows neither a question nor a tool's result, and the text does not begin with its prompt."""
    reason: str = ""
    detail: str = ""
    guessed_span: tuple[GapPosition, GapPosition] | None = None
    """The best guess at an inexact turn's span."""

    @property
    def is_exact(self) -> bool:
        """Whether its span was found and verified."""
        return self.start is not None and self.end is not None


@dataclass(frozen=True)
class TemplateLayout:
    """What a template writes around the pieces of rows of one shape, and where their turns are. `gaps` has one text
    more than `written_pieces`, which has each piece's number and the form it is written in. `stripped_pieces` are
    numbers of think pieces that are not written."""

    gaps: tuple[str, ...]
    written_pieces: tuple[tuple[int, str], ...]
    turns: tuple[Turn, ...]
    stripped_pieces: tuple[int, ...] = ()

    @property
    def added_end(self) -> str:
        """The end that is added after a last turn which the template does not end."""
        return self.turns[-1].added_end if self.turns else ""

    def fill(self, pieces: Sequence[str]) -> tuple[str, list[int]]:
        """Fill in the pieces of a row: the text that the row must have, and where each gap begins in it."""
        parts = [self.gaps[0]]
        offset = len(self.gaps[0])
        gap_starts = [0]
        for (index, form), gap in zip(self.written_pieces, self.gaps[1:], strict=True):
            text = _WRITTEN_FORMS[form](pieces[index])
            offset += len(text)
            gap_starts.append(offset)
            offset += len(gap)
            parts += (text, gap)
        return "".join(parts), gap_starts


# How a template may write a text: as it is, or inside a string of JSON or Python.
_WRITTEN_FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ascii json": lambda text: json.dumps(text)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)[1:-1],
    "repr": lambda text: repr(text)[1:-1],
}


def to_second_sentinels(text: str, *_: object) -> str:
    """A marked text with the second copy's sentinels, which have no letter of the first's."""
    return _SENTINEL.sub(lambda match: SECOND_SENTINEL_PREFIX + (match[1] + match[2]).translate(_TO_SECOND), text)


def to_first_sentinels(text: str) -> str:
    """The second copy's text with the sentinels of the first."""
    return _SECOND_SENTINEL.sub(lambda match: SENTINEL_PREFIX + (match[1] + match[2]).translate(_FROM_SECOND), text)


def searched_texts_pattern(searched_texts: frozenset[str]) -> re.Pattern[str]:
    """A pattern of what the template looks for in texts, the longest first."""
    longest_first = sorted(searched_texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if searched_texts else MATCHES_NOTHING


def split_text_pieces(text: str, searched_pattern: re.Pattern[str]) -> Iterator[tuple[int, int, bool]]:
    """The text between what the template looks for, without white space at the ends, and whether it is think text."""
    marks = [(match.start(), match.end(), match.group()) for match in searched_pattern.finditer(text)]
    start, previous_mark = 0, ""
    for begin, end, next_mark in (*marks, (len(text), -1, "")):
        inner = text[start:begin]
        body = inner.strip()
        if body:
            body_start = start + inner.find(body)
            yield body_start, body_start + len(body), _is_think(body, previous_mark, next_mark)
        start, previous_mark = end, next_mark


def _is_think(text: str, previous_mark: str, next_mark: str) -> bool:
    """Whether a text between two marks, such as `<think>` and `</think>`, is think text: it begins the message or
    stands after an opening mark, and a closing one follows. A text between two closing ones is part of the answer."""
    if not _CLOSING_MARK.search(next_mark) or _CLOSING_MARK.search(previous_mark):
        return False
    # `</think>` → `<think>`, `[END_THINK]` → `[START_THINK]`; a closing mark without such a twin always closes
    opening = next_mark.replace("/", "", 1).replace("END", "START").replace("end", "start")
    return opening == next_mark or opening not in text[1:]


def split_marked_text(text: str, pieces: Sequence[MarkedPiece]) -> tuple[list[str], list[tuple[int, str]], set[int]]:
    """A rendered copy as the gaps between pieces, the written pieces (number, form), and the changed ones' numbers."""
    gaps: list[str] = []
    written_pieces: list[tuple[int, str]] = []
    changed_pieces: set[int] = set()
    gap_start = 0
    open_index, open_start = -1, 0
    for match in _SENTINEL.finditer(text):
        index, side = int(match.group(1)), match.group(2)
        if index >= len(pieces):  # not a sentinel of ours
            continue
        if side == "b":
            if open_index >= 0:  # its end was cut off, or another piece was moved into it
                changed_pieces.add(open_index)
            gaps.append(text[gap_start : match.start()])
            open_index, open_start = index, match.end()
            continue
        if index != open_index:
            changed_pieces.add(index)
            continue
        inner = text[open_start : match.start()]
        # encoded once, not twice
        forms = _WRITTEN_FORMS if pieces[index].kind != "arguments" else {"plain": _WRITTEN_FORMS["plain"]}
        form = next((name for name, form in forms.items() if form(pieces[index].text) == inner), None)
        if form is None:
            changed_pieces.add(index)
        written_pieces.append((index, form or "plain"))  # a template may write a piece several times
        gap_start, open_index = match.end(), -1
    if open_index >= 0:
        changed_pieces.add(open_index)
    gaps.append(text[gap_start:])
    return gaps, written_pieces, changed_pieces


class MarkedText:
    """Positions in a rendered copy, sentinels and all, and what stands where."""

    def __init__(
        self, text: str, gaps: Sequence[str], written_pieces: Sequence[tuple[int, str]], pieces: Sequence[MarkedPiece]
    ) -> None:
        self.text = text
        self._gap_spans: list[Span] = []
        """Where each gap stands in the copy."""
        self._written_spans: list[tuple[int, int, int]] = []
        """Number, begin and end of each written piece, sentinels included."""
        self._pieces = pieces
        offset, sentinel_chars = 0, SENTINEL_CHARS
        for gap_index, gap in enumerate(gaps):
            self._gap_spans.append((offset, offset + len(gap)))
            offset += len(gap)
            if gap_index < len(written_pieces):
                piece_index, form = written_pieces[gap_index]
                size = len(_WRITTEN_FORMS[form](pieces[piece_index].text)) + 2 * sentinel_chars
                self._written_spans.append((piece_index, offset, offset + size))
                offset += size

    def to_gap_position(self, offset: int) -> GapPosition | None:
        """Convert an offset in the copy to a gap position; None inside a piece."""
        # the last gap that begins at or before the position; an empty gap counts, so the second number is above any end
        gap = bisect.bisect_right(self._gap_spans, (offset, len(self.text) + 1)) - 1
        begin, end = self._gap_spans[gap]
        return GapPosition(gap, offset - begin) if begin <= offset <= end else None

    def to_offset(self, gap_position: GapPosition) -> int:
        """Convert a gap position to an offset in the copy."""
        return self._gap_spans[gap_position.gap][0] + gap_position.offset

    def message_extent(self, message_index: int, start: int) -> tuple[int | None, int | None, PieceKind | None]:
        """Where the message's pieces begin and end from `start` on, and the kind of the last one; repetitions of a
        piece do not count. Nones where none is written."""
        first: int | None = None
        last: tuple[int | None, PieceKind | None] = (None, None)
        counted_pieces: set[int] = set()
        for index, begin, end in self._written_spans:
            piece = self._pieces[index]
            if piece.message_index != message_index or begin < start or index in counted_pieces:
                continue
            counted_pieces.add(index)
            first = begin if first is None else first
            last = (end, piece.kind)
        return first, *last

    def is_end_certain(self, message_index: int, message_count: int) -> bool:
        """Whether the turn and the message after it are written with texts of their own, so that what stands between
        them is the turn's end or the other's beginning."""
        written_messages = {self._pieces[index].message_index for index, _, _ in self._written_spans}
        return message_index in written_messages and (
            message_index + 1 in written_messages or message_index + 1 == message_count
        )

    def next_piece_start(self, offset: int) -> int:
        """Where the next piece begins at or after the position; the text's end where there is none."""
        return next((begin for _, begin, _ in self._written_spans if begin >= offset), len(self.text))

    def previous_piece_end(self, offset: int, message_index: int) -> tuple[int, int]:
        """Where the last piece that ends at or before the position ends, and whose it is; 0 and -1 where there is none,
        or where a message after this one is written there too."""
        ends = [(end, self._pieces[index].message_index) for index, _, end in self._written_spans if end <= offset]
        return max(ends) if ends and max(owner for _, owner in ends) <= message_index else (0, -1)

    def span_problem(self, message_index: int, start: int, end: int) -> str:
        """Why [start, end) is not exactly the message's turn; empty where it is."""
        pieces_inside = {index for index, begin, stop in self._written_spans if start <= begin and stop <= end}
        for index, begin, stop in self._written_spans:
            piece = self._pieces[index]
            if piece.message_index == message_index:
                # the name of a function that was called may be written once more with its result
                repeats_a_name = piece.kind == "name" and index in pieces_inside
                if not (start <= begin and stop <= end) and not repeats_a_name:
                    return "the chat template writes a part of a turn outside of it"
            elif begin < end and stop > start:
                return "the chat template writes another turn's text inside a turn"
        return ""


def text_after_piece(rendering: str, text: str, piece_end: int) -> str | None:
    """What `rendering` has after the piece that ends at `piece_end` in `text`; None where it lacks that piece."""
    # from the beginning of the piece's last sentinel, whose number makes it unique
    sentinel_start = text.rfind(SENTINEL_PREFIX, 0, piece_end)
    if sentinel_start < 0 or text[sentinel_start:piece_end] not in rendering:
        return None
    return rendering[rendering.rfind(text[sentinel_start:piece_end]) + piece_end - sentinel_start :]
