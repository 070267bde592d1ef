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
Kind = Literal["content", "reasoning", "name", "argument", "arguments"]

# Sentinels are ASCII letters and digits: nothing that a template strips, splits at or escapes.
SALT = "zQ9x"
_SENTINEL = re.compile(SALT + r"(\d{5})([be])")
OTHER_SALT = "Kw7V"
_OTHER_SENTINEL = re.compile(OTHER_SALT + r"([ghjkmnprst]{5})([du])")
# letter for letter, so that the sentinels of both copies are equally long
_TO_OTHER, _FROM_OTHER = str.maketrans("0123456789be", "ghjkmnprstdu"), str.maketrans("ghjkmnprstdu", "0123456789be")
SENTINEL_CHARS = len(SALT) + 6
# Marks that close think text.
_CLOSES = re.compile(r"/|end|suffix|close|stop|^<\w+\|>$", re.IGNORECASE)
# Matches nothing.
NOWHERE = re.compile("(?!)")


@dataclass(frozen=True)
class MarkedPiece:
    """A piece of a message's text, without white space at its ends."""

    message: int
    kind: Kind
    text: str
    is_think: bool = False
    """It is think text, which a template may leave out."""


@dataclass(frozen=True)
class Place:
    """A position in a rendered text: characters from the beginning of a gap between pieces."""

    gap: int
    offset: int


@dataclass(frozen=True)
class Turn:
    """One assistant turn: its span where it is exact, else why it is not and what would be trained instead."""

    message: int
    start: Place | None = None
    end: Place | None = None
    by_prefix: bool = False
    """Its end is that of the rendered conversation up to it."""
    by_next: bool = False
    """It is ended by the token that opens the next turn."""
    added: str = ""
    """What the template does not write after the last turn: the token that would open the next one."""
    header: str = ""
    """What the template writes before the turn that its prompt does not have, such as before a first message."""
    rest: str | None = None
    """What its prompt has behind the header, and the turn has not; None where the text begins with the prompt."""
    unasked: bool = False
    """It follows neither a question nor a tool's result, and the text does not begin with its prompt."""
    reason: str = ""
    detail: str = ""
    nearest: tuple[Place, Place] | None = None
    """The best guess at an inexact turn's span."""

    @property
    def is_exact(self) -> bool:
        """Whether its span was found and verified."""
        return self.start is not None and self.end is not None


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the pieces of rows of one shape, and where their turns are. `gaps` has one text
    more than `order`, which holds for each written piece its number and the form it is written in. `stripped` are
    numbers of think pieces that are not written."""

    gaps: tuple[str, ...]
    order: tuple[tuple[int, str], ...]
    turns: tuple[Turn, ...]
    stripped: tuple[int, ...] = ()

    @property
    def added(self) -> str:
        """The end that is added after a last turn which the template does not end."""
        return self.turns[-1].added if self.turns else ""

    def fill(self, pieces: Sequence[str]) -> tuple[str, list[int]]:
        """The text that a row with these pieces must have, and where each gap begins in it."""
        parts = [self.gaps[0]]
        position = len(self.gaps[0])
        begins = [0]
        for (number, form), gap in zip(self.order, self.gaps[1:], strict=True):
            text = _FORMS[form](pieces[number])
            position += len(text)
            begins.append(position)
            position += len(gap)
            parts += (text, gap)
        return "".join(parts), begins


# How a template may write a text: as it is, or inside a string of JSON or Python.
_FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ascii json": lambda text: json.dumps(text)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)[1:-1],
    "repr": lambda text: repr(text)[1:-1],
}


def with_other_sentinels(text: str, *_: object) -> str:
    """A marked text with the second copy's sentinels, which have no letter of the first's."""
    return _SENTINEL.sub(lambda match: OTHER_SALT + (match[1] + match[2]).translate(_TO_OTHER), text)


def with_first_sentinels(text: str) -> str:
    """The second copy's text with the sentinels of the first."""
    return _OTHER_SENTINEL.sub(lambda match: SALT + (match[1] + match[2]).translate(_FROM_OTHER), text)


def splitter(tested: frozenset[str]) -> re.Pattern[str]:
    """A pattern of what the template looks for in texts, the longest first."""
    longest_first = sorted(tested, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if tested else NOWHERE


def pieces_of_text(text: str, split: re.Pattern[str]) -> Iterator[tuple[int, int, bool]]:
    """The text between what the template looks for, without white space at the ends, and whether it is think text."""
    marks = [(match.start(), match.end(), match.group()) for match in split.finditer(text)]
    at, before = 0, ""
    for begin, end, after in (*marks, (len(text), -1, "")):
        inner = text[at:begin]
        body = inner.strip()
        if body:
            first = at + inner.find(body)
            yield first, first + len(body), _is_think(body, before, after)
        at, before = end, after


def _is_think(text: str, before: str, after: str) -> bool:
    """Whether a text between two marks, such as `<think>` and `</think>`, is think text: it begins the message or
    stands after an opening mark, and a closing one follows. A text between two closing ones is part of the answer."""
    if not _CLOSES.search(after) or _CLOSES.search(before):
        return False
    # `</think>` → `<think>`, `[END_THINK]` → `[START_THINK]`; a closing mark without such a twin always closes
    opening = after.replace("/", "", 1).replace("END", "START").replace("end", "start")
    return opening == after or opening not in text[1:]


def take_apart(text: str, pieces: Sequence[MarkedPiece]) -> tuple[list[str], list[tuple[int, str]], set[int]]:
    """A rendered copy as the gaps between pieces, the written pieces (number, form), and the changed ones' numbers."""
    gaps: list[str] = []
    order: list[tuple[int, str]] = []
    broken: set[int] = set()
    at = 0
    open_number, open_end = -1, 0
    for match in _SENTINEL.finditer(text):
        number, side = int(match.group(1)), match.group(2)
        if number >= len(pieces):  # not a sentinel of ours
            continue
        if side == "b":
            if open_number >= 0:  # its end was cut off, or another piece was moved into it
                broken.add(open_number)
            gaps.append(text[at : match.start()])
            open_number, open_end = number, match.end()
            continue
        if number != open_number:
            broken.add(number)
            continue
        inner = text[open_end : match.start()]
        forms = _FORMS if pieces[number].kind != "arguments" else {"plain": _FORMS["plain"]}  # encoded once, not twice
        form = next((name for name, form in forms.items() if form(pieces[number].text) == inner), None)
        if form is None:
            broken.add(number)
        order.append((number, form or "plain"))  # a template may write a piece several times
        at, open_number = match.end(), -1
    if open_number >= 0:
        broken.add(open_number)
    gaps.append(text[at:])
    return gaps, order, broken


class MarkedText:
    """Positions in a rendered copy, sentinels and all, and what stands where."""

    def __init__(
        self, text: str, gaps: Sequence[str], order: Sequence[tuple[int, str]], pieces: Sequence[MarkedPiece]
    ) -> None:
        self.text = text
        self._bounds: list[Span] = []
        """Where each gap stands in the copy."""
        self._parts: list[tuple[int, int, int]] = []
        """Number, begin and end of each written piece, sentinels included."""
        self._pieces = pieces
        at, sentinel = 0, SENTINEL_CHARS
        for position, gap in enumerate(gaps):
            self._bounds.append((at, at + len(gap)))
            at += len(gap)
            if position < len(order):
                number, form = order[position]
                size = len(_FORMS[form](pieces[number].text)) + 2 * sentinel
                self._parts.append((number, at, at + size))
                at += size

    def place(self, position: int) -> Place | None:
        """The gap that holds the position; None inside a piece."""
        # the last gap that begins at or before the position; an empty gap counts, so the second number is above any end
        gap = bisect.bisect_right(self._bounds, (position, len(self.text) + 1)) - 1
        begin, end = self._bounds[gap]
        return Place(gap, position - begin) if begin <= position <= end else None

    def position(self, place: Place) -> int:
        """Where a place is in the copy."""
        return self._bounds[place.gap][0] + place.offset

    def extent(self, message: int, start: int) -> tuple[int | None, int | None, Kind | None]:
        """Where the message's pieces begin and end from `start` on, and the kind of the last one; repetitions of a
        piece do not count. Nones where none is written."""
        first: int | None = None
        last: tuple[int | None, Kind | None] = (None, None)
        seen: set[int] = set()
        for number, begin, end in self._parts:
            piece = self._pieces[number]
            if piece.message != message or begin < start or number in seen:
                continue
            seen.add(number)
            first = begin if first is None else first
            last = (end, piece.kind)
        return first, *last

    def tells_end(self, message: int, count: int) -> bool:
        """Whether the turn and the message after it are written with texts of their own, so that what stands between
        them is the turn's end or the other's beginning."""
        written = {self._pieces[number].message for number, _, _ in self._parts}
        return message in written and (message + 1 in written or message + 1 == count)

    def next_piece(self, position: int) -> int:
        """Where the next piece begins at or after the position; the text's end where there is none."""
        return next((begin for _, begin, _ in self._parts if begin >= position), len(self.text))

    def piece_before(self, position: int, message: int) -> tuple[int, int]:
        """Where the last piece that ends at or before the position ends, and whose it is; 0 and -1 where there is none,
        or where a message after this one is written there too."""
        ends = [(end, self._pieces[number].message) for number, _, end in self._parts if end <= position]
        return max(ends) if ends and max(whose for _, whose in ends) <= message else (0, -1)

    def problem(self, message: int, start: int, end: int) -> str:
        """Why [start, end) is not exactly the message's turn; empty where it is."""
        inside = {number for number, begin, stop in self._parts if start <= begin and stop <= end}
        for number, begin, stop in self._parts:
            piece = self._pieces[number]
            if piece.message == message:
                # the name of a function that was called may be written once more with its result
                repeats_a_name = piece.kind == "name" and number in inside
                if not (start <= begin and stop <= end) and not repeats_a_name:
                    return "the chat template writes a part of a turn outside of it"
            elif begin < end and stop > start:
                return "the chat template writes another turn's text inside a turn"
        return ""


def text_after(other: str, text: str, after: int) -> str | None:
    """What `other` has after the piece that ends at `after` in `text`; None where it does not write that piece."""
    # from the beginning of the piece's last sentinel, whose number makes it unique
    last = text.rfind(SALT, 0, after)
    if last < 0 or text[last:after] not in other:
        return None
    return other[other.rfind(text[last:after]) + after - last :]
