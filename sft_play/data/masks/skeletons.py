"""The skeleton of a row: what a template writes around its texts, and where its assistant turns are, measured on a
marked copy.

`turns.py` says why the copy is marked so; `marked_copy.py` has the sentinels and what is read from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.masks.fitted_template import ANSWER, NEXT_QUESTION, FittedTemplate, mapped
from sft_play.data.masks.marked_copy import (
    NOWHERE,
    OTHER_SALT,
    SALT,
    SENTINEL_CHARS,
    Kind,
    MarkedPiece,
    MarkedText,
    Place,
    Skeleton,
    Turn,
    pieces_of_text,
    splitter,
    take_apart,
    text_after,
    with_first_sentinels,
    with_other_sentinels,
)
from sft_play.data.masks.template import RenderError
from sft_play.data.masks.token_row import NO_END, OTHER_PROMPT, Inexact
from sft_play.data.masks.turn_ends import TurnEnds, control_tokens, first_difference, shared_beginning
from sft_play.data.sources.messages import Message
from sft_play.log import one_line

# A sentinel numbers its piece with five digits.
_MAX_PIECES = 90_000
_WHOSE = {
    **dict.fromkeys(("system", "developer"), "a system prompt's"),
    "user": "a user turn's",
    "assistant": "an assistant's",
    "tool": "a tool's",
}
_DROPPED_SYSTEM = (
    "the chat template drops the system prompt (data.system_into_user=true puts it before the first user turn)"
)
_ENTITIES = "the chat template writes HTML entities in an assistant's turn"


class Skeletons:
    """Makes marked copies and measures turns on them, for one template."""

    def __init__(self, template: FittedTemplate, ends: TurnEnds) -> None:
        self._template, self._ends = template, ends
        self._split = splitter(template.jinja.tested)

    def of(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Skeleton, list[MarkedPiece]]:
        """What the template writes around this row's pieces, and the pieces; raises Inexact where it refuses a marked
        copy, or drops, rewrites or takes apart a text."""
        copy, pieces = self.marked_copy(messages)
        try:
            text = self._template.rendered(copy, tools)
        except RenderError as error:
            raise Inexact("the chat template refuses a copy of the row with marks in it", str(error)) from error
        # A template that takes letters out of a text (`content[0]`) takes them out of its sentinel. The second copy has
        # other letters there, so that the two renderings differ.
        other = [mapped(message, index, with_other_sentinels) for index, message in enumerate(copy)]
        again = with_first_sentinels(self._template.rendered_or_nothing(other, tools))
        if again != text:
            raise Inexact("the chat template rewrites a text or takes it apart", first_difference(text, again))
        gaps, order, broken = take_apart(text, pieces)
        written = {number for number, _ in order}
        stripped = self._judge_pieces(messages, pieces, written, broken, text)
        row = _MarkedRow(self._template, self._ends, MarkedText(text, gaps, order, pieces), copy, tools)
        turns = tuple(row.turn(index) for index, message in enumerate(messages) if message["role"] == "assistant")
        return Skeleton(tuple(gaps), tuple(order), turns, stripped), pieces

    def marked_copy(self, messages: Sequence[Message]) -> tuple[list[Message], list[MarkedPiece]]:
        """The row with sentinels around its pieces, and the pieces by number."""
        pieces: list[MarkedPiece] = []

        def mark(text: str, index: int, kind: Kind) -> str:
            for salt in (SALT, OTHER_SALT):
                if salt in text:
                    raise Inexact("a text holds the mark that is used to find turns", f"messages[{index}]: {salt}")
            marked: list[str] = []
            at = 0
            for begin, end, is_think in pieces_of_text(
                text, self._split if kind in ("content", "reasoning") else NOWHERE
            ):
                number = len(pieces)
                pieces.append(MarkedPiece(index, kind, text[begin:end], is_think or kind == "reasoning"))
                self._check_between(text[at:begin], index)
                marked += (text[at:begin], f"{SALT}{number:05d}b", text[begin:end], f"{SALT}{number:05d}e")
                at = end
            self._check_between(text[at:], index)
            return "".join((*marked, text[at:]))

        copy = [mapped(message, index, mark) for index, message in enumerate(messages)]
        if len(pieces) > _MAX_PIECES:
            raise Inexact("a row has too many texts", f"{len(pieces):,}")
        return copy, pieces

    def _check_between(self, text: str, index: int) -> None:
        ends = sorted(self._ends.tokens | {*self._ends.markers})
        marker = next((marker for marker in ends if marker in text), None)
        if marker is not None:
            raise Inexact(
                "a text holds the end of turn, which the chat template looks for in texts",
                f"messages[{index}]: {one_line(marker)}",
            )

    def _judge_pieces(
        self, messages: Sequence[Message], pieces: Sequence[MarkedPiece], written: set[int], broken: set[int], text: str
    ) -> tuple[int, ...]:
        """Numbers of think pieces that are not written; raises Inexact where anything else is missing or rewritten."""
        last = {piece.message: number for number, piece in enumerate(pieces) if piece.kind == "content"}
        stripped = []
        for number, piece in enumerate(pieces):
            role = messages[piece.message]["role"]
            where = f"messages[{piece.message}]"
            if number in broken and piece.kind == "arguments":
                raise Inexact("the chat template encodes the JSON text of a tool call's arguments a second time", where)
            if number in broken:
                raise Inexact(f"the chat template rewrites {_WHOSE[role]} text", where)
            if number in written:
                continue
            if piece.kind == "name":  # Kimi writes the id, `functions.get_weather:0`, and no name beside it
                calls = messages[piece.message]["tool_calls"]
                ids = [str(call.get("id") or "") for call in calls if call["function"]["name"] == piece.text]
                if all(piece.text in ident and ident in text for ident in ids):
                    continue
            if piece.kind in ("name", "argument", "arguments"):
                raise Inexact("the chat template drops a tool call", f"{where}: {one_line(piece.text, limit=60)}")
            if role in ("system", "developer"):
                raise Inexact(_DROPPED_SYSTEM, where)
            if role != "assistant" or not piece.is_think or number == last.get(piece.message):
                raise Inexact(f"the chat template drops {_WHOSE[role]} text", where)
            stripped.append(number)
        return tuple(stripped)


@dataclass(frozen=True)
class _EndPlace:
    """Where a turn ends; `added` is the end of it that the template does not write."""

    place: Place | None = None
    by_prefix: bool = False
    by_next: bool = False
    added: str = ""


@dataclass(frozen=True)
class _MarkedRow:
    template: FittedTemplate
    ends: TurnEnds
    places: MarkedText
    copy: Sequence[Message]
    tools: Sequence[Any]

    def _rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self.template.rendered(messages, self.tools, prompt=prompt)

    def turn(self, index: int) -> Turn:
        """The assistant's turn that is this message."""
        places, copy = self.places, self.copy
        try:
            prompt = self._rendered(copy[:index], prompt=True)
        except RenderError as error:
            if index:
                return Turn(index, reason="the chat template cannot render the prompt of a turn", detail=str(error))
            prompt = ""  # many templates read the first message, which an empty prompt does not have
        # Generation writes what follows the prompt, so the trained span begins where the prompt ends.
        common = len(shared_beginning(prompt, places.text, self.ends.special))
        is_prefix = common == len(prompt)
        first, last, kind = places.extent(index, common)
        begin, rest, unasked = None, None, False
        # Without a question or a result before the turn, some templates write no prompt but do write the turn's header.
        if not (index and copy[index - 1]["role"] in ("user", "tool")):
            begin = self._unasked_start(index, after=common if is_prefix else 0, first=first)
            unasked = not is_prefix
        elif is_prefix:
            begin = common
        elif first is not None:
            before, whose = places.piece_before(first, index)
            tail = text_after(prompt, places.text, before) or ""
            size = self._header_size(prompt, copy[:index], tail, places.text[before:first])
            # what is asked must stand before the turn, not another turn
            is_asked = whose >= 0 and all(message["role"] in ("user", "tool") for message in copy[whose:index])
            if is_asked and size is not None and not self._lacks_header(tail, size):
                begin, rest = before + size, tail[size:]
        given = common if is_prefix else begin
        if begin is not None and not rest and not unasked:
            begin += len(self._header_at(index, begin))
        start = None if begin is None else places.place(begin)
        after = common if last is None else last
        # Arguments that are escaped as HTML (`{&#34;x&#34;: …}`) may have changed quotes only, which are in no piece.
        if entity := self.template.entity(places.text[begin or common : places.next_piece(after)], copy):
            raise Inexact(_ENTITIES, f"messages[{index}]: {entity}")
        end = self._end(index, after=after, is_text=kind == "content")
        detail = f"messages[{index}]"
        if begin is None or start is None or end.place is None:
            if not is_prefix:
                detail = f"{detail}: the prompt continues with {one_line(repr(prompt[common:][:40]))}"
            # The best guess, for data.on_inexact_mask=train, begins where prompt and text part.
            guess = places.place(common) if not is_prefix and (first is None or common <= first) else None
            nearest = (guess, end.place) if guess is not None and end.place is not None else None
            why = NO_END if end.place is None else OTHER_PROMPT
            return Turn(index, reason=why, detail=detail, nearest=nearest, added=end.added)
        problem = places.problem(index, begin, places.position(end.place))
        if problem:
            return Turn(index, reason=problem, detail=detail)
        header = places.text[given:begin]
        return Turn(index, start, end.place, end.by_prefix, end.by_next, end.added, header, rest, unasked)

    def _lacks_header(self, tail: str, size: int) -> bool:
        """Whether a turn's text has nothing of the header with which its prompt ends; both have `size` of `tail`."""
        header = self.template.habits.header
        begin = len(tail) - len(header)
        return bool(header.strip()) and tail.endswith(header) and not tail[begin:size].strip()

    def _header_at(self, index: int, at: int) -> str:
        """The header of an assistant's turn where the text has it behind the prompt, which has none (after a tool's
        result, in some templates): what is a generation prompt after a question is given; else empty."""
        if not index or self.copy[index - 1]["role"] != "tool":
            return ""
        asked = [*self.copy[:index], NEXT_QUESTION]
        try:
            prompt, without = self._rendered(asked, prompt=True), self._rendered(asked)
        except RenderError:
            return ""
        header = prompt.removeprefix(without) if prompt.startswith(without) else ""
        return header if header.strip() and self.places.text.startswith(header, at) else ""

    def _unasked_start(self, index: int, *, after: int, first: int | None) -> int | None:
        """Where a turn begins that follows neither a question nor a tool's result: as far before its first piece as its
        header is long, which is measured after a question; None where that is not certain."""
        if first is None:
            return None
        asked = [*self.copy[:index], NEXT_QUESTION]
        try:
            prompt = self._rendered(asked, prompt=True)
            whole = self._rendered([*asked, *self.copy[index:]])
        except RenderError:
            return None
        tail = prompt.rpartition(NEXT_QUESTION["content"])[2]
        text = self.places.text
        at = whole.find(text[first : first + SENTINEL_CHARS])
        asked_at = len(prompt) - len(tail)
        gap = whole[asked_at:at]
        size = self._header_size(prompt, asked, tail, gap)
        if size is None or at < 0 or SALT in gap or not whole.startswith(prompt[: asked_at + size]):
            return None
        begin = first - len(gap) + size
        return begin if begin >= after and text[begin:first] == gap[size:] else None

    def _header_size(self, prompt: str, asked: Sequence[Message], tail: str, gap: str) -> int | None:
        """How much of `gap`, what stands before a turn's first piece, is the header that its prompt gives; None where
        that is not certain. `tail` is the end of the prompt, behind the piece that `gap` is behind too. A prompt may
        open think text that the turn has not, or has closed. What both have is given, but no more than a plain answer
        has, which has no other turn's words; and where they part there are only marks of think text."""
        if SALT in tail or not tail.strip():
            return None
        size = len(shared_beginning(tail, gap, self.ends.special))
        if size == len(tail):
            return size
        answered = self.template.rendered_or_nothing([*asked, ANSWER], self.tools)
        before = prompt[: len(prompt) - len(tail)]
        plain, is_there, _ = answered.removeprefix(before).partition(ANSWER["content"])
        if not is_there or not answered.startswith(before):
            return None
        usual = len(shared_beginning(tail, plain, self.ends.special))
        is_think = self.template.is_think(plain[usual:]) and self.template.is_think(plain[size:usual])
        return min(size, usual) if is_think else None

    def _end(self, index: int, *, after: int, is_text: bool) -> _EndPlace:
        """Where a turn ends whose last piece ends at `after`, and whether its own rendering ends there too."""
        places, ends = self.places, self.ends
        limit = places.next_piece(after)
        own = self.template.rendered_or_nothing(self.copy[: index + 1], self.tools)
        # Where the conversation up to the turn is a beginning of the whole text, and ends before the next piece.
        until = len(own) if own and places.text.startswith(own) and after <= len(own) <= limit else None
        is_last = index + 1 == len(self.copy)
        written = places.text[after:limit]
        own_tail = own[after:] if until is not None else text_after(own, places.text, after)
        following = self._continued(after) if is_last else written
        end = ends.end_of(own_tail, following, is_last=is_last, is_text=is_text)
        # In the middle of a row any token that opens a turn follows; only one seen on the probes ends an answer.
        if end is not None and end.by_next and not is_last:
            opener = next(reversed(control_tokens(end.text, ends.special)), "")
            end = end if opener in ends.next_openers else None
        if end is not None:
            # An end that the turn alone does not show is its own only where this turn's and the next one's texts stand.
            is_own = own_tail is not None and own_tail.startswith(end.text)
            if not (is_own or end.by_next or places.tells_end(index, len(self.copy))):
                return _EndPlace()
            # The last turn may be written without its end, which a next turn would bring: it is added to the text.
            added = end.text[len(written) :] if is_last else ""
            if added and not (end.text.startswith(written) and limit == len(places.text)):
                return _EndPlace()
            place = places.place(after + len(end.text) - len(added))
            if place is not None and added:
                place = Place(place.gap, place.offset + len(added))
            return _EndPlace(place, until is not None, end.by_next, added)
        if ends.markers:
            return _EndPlace()  # this template ends turns, and this one has no end
        if until is not None:
            return _EndPlace(places.place(until), True)
        return _EndPlace(places.place(after)) if is_text else _EndPlace()

    def _continued(self, after: int) -> str | None:
        """What stands after the last piece of the last turn when the conversation goes on; None where it cannot."""
        calls = self.copy[-1].get("tool_calls") or []
        # After calls a tool's result goes first: some templates refuse a question there, others open another turn.
        result = {"role": "tool", "content": NEXT_QUESTION["content"]}
        if calls:
            result |= {"name": calls[-1]["function"]["name"], "tool_call_id": str(calls[-1].get("id") or "")}
        for following in (result, NEXT_QUESTION) if calls else (NEXT_QUESTION,):
            whole = self.template.rendered_or_nothing([*self.copy, following], self.tools)
            tail = text_after(whole, self.places.text, after) if whole else None
            if tail is not None and following["content"] in tail:
                return tail.partition(following["content"])[0]
        return None
