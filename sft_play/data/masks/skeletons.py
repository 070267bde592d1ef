"""The template layout of a row: what a template writes around its texts, and where its assistant turns are, measured
on a marked copy.

`turns.py` says why the copy is marked so; `marked_copy.py` has the sentinels and what is read from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.masks.fitted_template import NEXT_QUESTION, PLAIN_ANSWER, FittedTemplate, map_message_texts
from sft_play.data.masks.marked_copy import (
    MATCHES_NOTHING,
    SECOND_SENTINEL_PREFIX,
    SENTINEL_CHARS,
    SENTINEL_PREFIX,
    GapPosition,
    MarkedPiece,
    MarkedText,
    PieceKind,
    TemplateLayout,
    Turn,
    searched_texts_pattern,
    split_marked_text,
    split_text_pieces,
    text_after_piece,
    to_first_sentinels,
    to_second_sentinels,
)
from sft_play.data.masks.template import RenderError
from sft_play.data.masks.token_row import NO_TURN_END, PROMPT_MISMATCH, InexactMaskError
from sft_play.data.masks.turn_ends import TurnEnds, common_prefix, control_tokens, format_first_difference
from sft_play.data.sources.messages import Message
from sft_play.log import one_line

# A sentinel numbers its piece with five digits.
_MAX_PIECES = 90_000
_ROLE_POSSESSIVES = {
    **dict.fromkeys(("system", "developer"), "a system prompt's"),
    "user": "a user turn's",
    "assistant": "an assistant's",
    "tool": "a tool's",
}
_DROPPED_SYSTEM = (
    "the chat template drops the system prompt (data.system_into_user=true puts it before the first user turn)"
)
_WRITES_ENTITIES = "the chat template writes HTML entities in an assistant's turn"


class TemplateLayoutBuilder:
    """Makes marked copies and measures turns on them, for one template."""

    def __init__(self, template: FittedTemplate, ends: TurnEnds) -> None:
        self._template, self._ends = template, ends
        self._searched_pattern = searched_texts_pattern(template.chat_template.searched_texts)

    def measure(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[TemplateLayout, list[MarkedPiece]]:
        """What the template writes around this row's pieces, and the pieces; raises InexactMaskError where it
        refuses a marked copy, or drops, rewrites or takes apart a text."""
        marked_messages, pieces = self.mark_messages(messages)
        try:
            text = self._template.render(marked_messages, tools)
        except RenderError as error:
            raise InexactMaskError(
                "the chat template refuses a copy of the row with marks in it", str(error)
            ) from error
        # A template that takes letters out of a text (`content[0]`) takes them out of its sentinel. The second copy has
        # other letters there, so that the two renderings differ.
        second_copy = [
            map_message_texts(message, index, to_second_sentinels) for index, message in enumerate(marked_messages)
        ]
        second_text = to_first_sentinels(self._template.try_render(second_copy, tools))
        if second_text != text:
            raise InexactMaskError(
                "the chat template rewrites a text or takes it apart", format_first_difference(text, second_text)
            )
        gaps, written_pieces, changed_pieces = split_marked_text(text, pieces)
        written_indices = {piece_index for piece_index, _ in written_pieces}
        stripped_pieces = self._check_pieces(messages, pieces, written_indices, changed_pieces, text)
        marked_row = _MarkedRow(
            self._template, self._ends, MarkedText(text, gaps, written_pieces, pieces), marked_messages, tools
        )
        turns = tuple(
            marked_row.locate_turn(index) for index, message in enumerate(messages) if message["role"] == "assistant"
        )
        return TemplateLayout(tuple(gaps), tuple(written_pieces), turns, stripped_pieces), pieces

    def mark_messages(self, messages: Sequence[Message]) -> tuple[list[Message], list[MarkedPiece]]:
        """The row with sentinels around its pieces, and the pieces by number."""
        pieces: list[MarkedPiece] = []

        def mark(text: str, index: int, kind: PieceKind) -> str:
            for salt in (SENTINEL_PREFIX, SECOND_SENTINEL_PREFIX):
                if salt in text:
                    raise InexactMaskError(
                        "a text holds the mark that is used to find turns", f"messages[{index}]: {salt}"
                    )
            marked: list[str] = []
            offset = 0
            for begin, end, is_think in split_text_pieces(
                text, self._searched_pattern if kind in ("content", "reasoning") else MATCHES_NOTHING
            ):
                piece_index = len(pieces)
                pieces.append(MarkedPiece(index, kind, text[begin:end], is_think or kind == "reasoning"))
                self._check_between(text[offset:begin], index)
                marked += (
                    text[offset:begin],
                    f"{SENTINEL_PREFIX}{piece_index:05d}b",
                    text[begin:end],
                    f"{SENTINEL_PREFIX}{piece_index:05d}e",
                )
                offset = end
            self._check_between(text[offset:], index)
            return "".join((*marked, text[offset:]))

        copy = [map_message_texts(message, index, mark) for index, message in enumerate(messages)]
        if len(pieces) > _MAX_PIECES:
            raise InexactMaskError("a row has too many texts", f"{len(pieces):,}")
        return copy, pieces

    def _check_between(self, text: str, index: int) -> None:
        ends = sorted(self._ends.end_tokens | {*self._ends.end_markers})
        marker = next((marker for marker in ends if marker in text), None)
        if marker is not None:
            raise InexactMaskError(
                "a text holds the end of turn, which the chat template looks for in texts",
                f"messages[{index}]: {one_line(marker)}",
            )

    def _check_pieces(
        self,
        messages: Sequence[Message],
        pieces: Sequence[MarkedPiece],
        written_indices: set[int],
        changed_pieces: set[int],
        text: str,
    ) -> tuple[int, ...]:
        """Numbers of think pieces that are not written; raises InexactMaskError if others are missing or changed."""
        last_content = {
            piece.message_index: piece_index for piece_index, piece in enumerate(pieces) if piece.kind == "content"
        }
        stripped_pieces = []
        for piece_index, piece in enumerate(pieces):
            role = messages[piece.message_index]["role"]
            location = f"messages[{piece.message_index}]"
            if piece_index in changed_pieces and piece.kind == "arguments":
                raise InexactMaskError(
                    "the chat template encodes the JSON text of a tool call's arguments a second time", location
                )
            if piece_index in changed_pieces:
                raise InexactMaskError(f"the chat template rewrites {_ROLE_POSSESSIVES[role]} text", location)
            if piece_index in written_indices:
                continue
            if piece.kind == "name":  # Kimi writes the id, `functions.get_weather:0`, and no name beside it
                calls = messages[piece.message_index]["tool_calls"]
                ids = [str(call.get("id") or "") for call in calls if call["function"]["name"] == piece.text]
                if all(piece.text in call_id and call_id in text for call_id in ids):
                    continue
            if piece.kind in ("name", "argument", "arguments"):
                raise InexactMaskError(
                    "the chat template drops a tool call", f"{location}: {one_line(piece.text, limit=60)}"
                )
            if role in ("system", "developer"):
                raise InexactMaskError(_DROPPED_SYSTEM, location)
            if role != "assistant" or not piece.is_think or piece_index == last_content.get(piece.message_index):
                raise InexactMaskError(f"the chat template drops {_ROLE_POSSESSIVES[role]} text", location)
            stripped_pieces.append(piece_index)
        return tuple(stripped_pieces)


@dataclass(frozen=True)
class _TurnEndPosition:
    """Where a turn ends; `added_end` is the end of it that the template does not write."""

    position: GapPosition | None = None
    ended_by_prefix: bool = False
    ended_by_next_turn: bool = False
    added_end: str = ""


@dataclass(frozen=True)
class _MarkedRow:
    template: FittedTemplate
    ends: TurnEnds
    marked_text: MarkedText
    messages: Sequence[Message]
    tools: Sequence[Any]

    def _render(self, messages: Sequence[Message], *, with_prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, with_prompt=with_prompt)

    def locate_turn(self, index: int) -> Turn:
        """The assistant's turn that is this message."""
        marked_text, messages = self.marked_text, self.messages
        try:
            prompt = self._render(messages[:index], with_prompt=True)
        except RenderError as error:
            if index:
                return Turn(index, reason="the chat template cannot render the prompt of a turn", detail=str(error))
            prompt = ""  # many templates read the first message, which an empty prompt does not have
        # Generation writes what follows the prompt, so the trained span begins where the prompt ends.
        common_size = len(common_prefix(prompt, marked_text.text, self.ends.special_tokens))
        is_prefix = common_size == len(prompt)
        first_piece_start, last_piece_end, kind = marked_text.message_extent(index, common_size)
        begin, prompt_suffix, without_prompt = None, None, False
        # Without a question or a result before the turn, some templates write no prompt but do write the turn's header.
        if not (index and messages[index - 1]["role"] in ("user", "tool")):
            begin = self._start_without_prompt(
                index, earliest=common_size if is_prefix else 0, first_piece_start=first_piece_start
            )
            without_prompt = not is_prefix
        elif is_prefix:
            begin = common_size
        elif first_piece_start is not None:
            previous_end, owner_index = marked_text.previous_piece_end(first_piece_start, index)
            tail = text_after_piece(prompt, marked_text.text, previous_end) or ""
            size = self._header_size(prompt, messages[:index], tail, marked_text.text[previous_end:first_piece_start])
            # what is asked must stand before the turn, not another turn
            is_prompted = owner_index >= 0 and all(
                message["role"] in ("user", "tool") for message in messages[owner_index:index]
            )
            if is_prompted and size is not None and not self._lacks_header(tail, size):
                begin, prompt_suffix = previous_end + size, tail[size:]
        prompt_end = common_size if is_prefix else begin
        if begin is not None and not prompt_suffix and not without_prompt:
            begin += len(self._unprompted_header(index, begin))
        start = None if begin is None else marked_text.to_gap_position(begin)
        last_end = common_size if last_piece_end is None else last_piece_end
        # Arguments that are escaped as HTML (`{&#34;x&#34;: …}`) may have changed quotes only, which are in no piece.
        if entity := self.template.find_added_entity(
            marked_text.text[begin or common_size : marked_text.next_piece_start(last_end)], messages
        ):
            raise InexactMaskError(_WRITES_ENTITIES, f"messages[{index}]: {entity}")
        end = self._locate_end(index, piece_end=last_end, is_answer_text=kind == "content")
        detail = f"messages[{index}]"
        if begin is None or start is None or end.position is None:
            if not is_prefix:
                detail = f"{detail}: the prompt continues with {one_line(repr(prompt[common_size:][:40]))}"
            # The best guess, for data.on_inexact_mask=train, begins where prompt and text part.
            guessed_start = (
                marked_text.to_gap_position(common_size)
                if not is_prefix and (first_piece_start is None or common_size <= first_piece_start)
                else None
            )
            guessed_span = (
                (guessed_start, end.position) if guessed_start is not None and end.position is not None else None
            )
            reason = NO_TURN_END if end.position is None else PROMPT_MISMATCH
            return Turn(index, reason=reason, detail=detail, guessed_span=guessed_span, added_end=end.added_end)
        problem = marked_text.span_problem(index, begin, marked_text.to_offset(end.position))
        if problem:
            return Turn(index, reason=problem, detail=detail)
        unprompted_header = marked_text.text[prompt_end:begin]
        return Turn(
            index,
            start,
            end.position,
            end.ended_by_prefix,
            end.ended_by_next_turn,
            end.added_end,
            unprompted_header,
            prompt_suffix,
            without_prompt,
        )

    def _lacks_header(self, tail: str, size: int) -> bool:
        """Whether a turn's text has nothing of the header with which its prompt ends; both have `size` of `tail`."""
        header = self.template.traits.generation_prompt
        begin = len(tail) - len(header)
        return bool(header.strip()) and tail.endswith(header) and not tail[begin:size].strip()

    def _unprompted_header(self, index: int, offset: int) -> str:
        """The header of an assistant's turn where the text has it behind the prompt, which has none (after a tool's
        result, in some templates): what is a generation prompt after a question is given; else empty."""
        if not index or self.messages[index - 1]["role"] != "tool":
            return ""
        prompted_messages = [*self.messages[:index], NEXT_QUESTION]
        try:
            prompt, question = self._render(prompted_messages, with_prompt=True), self._render(prompted_messages)
        except RenderError:
            return ""
        header = prompt.removeprefix(question) if prompt.startswith(question) else ""
        return header if header.strip() and self.marked_text.text.startswith(header, offset) else ""

    def _start_without_prompt(self, index: int, *, earliest: int, first_piece_start: int | None) -> int | None:
        """Where a turn begins that follows neither a question nor a tool's result: as far before its first piece as its
        header is long, which is measured after a question; None where that is not certain."""
        if first_piece_start is None:
            return None
        prompted_messages = [*self.messages[:index], NEXT_QUESTION]
        try:
            prompt = self._render(prompted_messages, with_prompt=True)
            continued_text = self._render([*prompted_messages, *self.messages[index:]])
        except RenderError:
            return None
        tail = prompt.rpartition(NEXT_QUESTION["content"])[2]
        text = self.marked_text.text
        piece_start = continued_text.find(text[first_piece_start : first_piece_start + SENTINEL_CHARS])
        tail_start = len(prompt) - len(tail)
        gap = continued_text[tail_start:piece_start]
        size = self._header_size(prompt, prompted_messages, tail, gap)
        if (
            size is None
            or piece_start < 0
            or SENTINEL_PREFIX in gap
            or not continued_text.startswith(prompt[: tail_start + size])
        ):
            return None
        begin = first_piece_start - len(gap) + size
        return begin if begin >= earliest and text[begin:first_piece_start] == gap[size:] else None

    def _header_size(self, prompt: str, prompted_messages: Sequence[Message], tail: str, gap: str) -> int | None:
        """How much of `gap`, what stands before a turn's first piece, is the header that its prompt gives; None where
        that is not certain. `tail` is the end of the prompt, behind the piece that `gap` is behind too. A prompt may
        open think text that the turn has not, or has closed. What both have is given, but no more than a plain answer
        has, which has no other turn's words; and where they part there are only marks of think text."""
        if SENTINEL_PREFIX in tail or not tail.strip():
            return None
        size = len(common_prefix(tail, gap, self.ends.special_tokens))
        if size == len(tail):
            return size
        answered_text = self.template.try_render([*prompted_messages, PLAIN_ANSWER], self.tools)
        prompt_start = prompt[: len(prompt) - len(tail)]
        plain_header, is_answer_written, _ = answered_text.removeprefix(prompt_start).partition(PLAIN_ANSWER["content"])
        if not is_answer_written or not answered_text.startswith(prompt_start):
            return None
        plain_size = len(common_prefix(tail, plain_header, self.ends.special_tokens))
        differs_in_think_only = self.template.has_only_think_marks(
            plain_header[plain_size:]
        ) and self.template.has_only_think_marks(plain_header[size:plain_size])
        return min(size, plain_size) if differs_in_think_only else None

    def _locate_end(self, index: int, *, piece_end: int, is_answer_text: bool) -> _TurnEndPosition:
        """Where a turn ends whose last piece ends at `piece_end`, and whether its own rendering ends there too."""
        marked_text, ends = self.marked_text, self.ends
        limit = marked_text.next_piece_start(piece_end)
        turn_text = self.template.try_render(self.messages[: index + 1], self.tools)
        # Where the conversation up to the turn is a beginning of the whole text, and ends before the next piece.
        prefix_end = (
            len(turn_text)
            if turn_text and marked_text.text.startswith(turn_text) and piece_end <= len(turn_text) <= limit
            else None
        )
        is_last = index + 1 == len(self.messages)
        written_tail = marked_text.text[piece_end:limit]
        final_tail = (
            turn_text[piece_end:]
            if prefix_end is not None
            else text_after_piece(turn_text, marked_text.text, piece_end)
        )
        continued_tail = self._continued_tail(piece_end) if is_last else written_tail
        end = ends.find_end(final_tail, continued_tail, is_last=is_last, is_answer_text=is_answer_text)
        # In the middle of a row any token that opens a turn follows; only one seen on the probes ends an answer.
        if end is not None and end.opens_next_turn and not is_last:
            opener = next(reversed(control_tokens(end.text, ends.special_tokens)), "")
            end = end if opener in ends.opener_end_markers else None
        if end is not None:
            # An end that the turn alone does not show is its own only where this turn's and the next one's texts stand.
            is_in_final_tail = final_tail is not None and final_tail.startswith(end.text)
            if not (is_in_final_tail or end.opens_next_turn or marked_text.is_end_certain(index, len(self.messages))):
                return _TurnEndPosition()
            # The last turn may be written without its end, which a next turn would bring: it is added to the text.
            added_end = end.text[len(written_tail) :] if is_last else ""
            if added_end and not (end.text.startswith(written_tail) and limit == len(marked_text.text)):
                return _TurnEndPosition()
            position = marked_text.to_gap_position(piece_end + len(end.text) - len(added_end))
            if position is not None and added_end:
                position = GapPosition(position.gap, position.offset + len(added_end))
            return _TurnEndPosition(position, prefix_end is not None, end.opens_next_turn, added_end)
        if ends.end_markers:
            return _TurnEndPosition()  # this template ends turns, and this one has no end
        if prefix_end is not None:
            return _TurnEndPosition(marked_text.to_gap_position(prefix_end), True)
        return _TurnEndPosition(marked_text.to_gap_position(piece_end)) if is_answer_text else _TurnEndPosition()

    def _continued_tail(self, piece_end: int) -> str | None:
        """What stands after the last piece of the last turn when the conversation goes on; None where it cannot."""
        calls = self.messages[-1].get("tool_calls") or []
        # After calls a tool's result goes first: some templates refuse a question there, others open another turn.
        result = {"role": "tool", "content": NEXT_QUESTION["content"]}
        if calls:
            result |= {"name": calls[-1]["function"]["name"], "tool_call_id": str(calls[-1].get("id") or "")}
        for following in (result, NEXT_QUESTION) if calls else (NEXT_QUESTION,):
            continued_text = self.template.try_render([*self.messages, following], self.tools)
            tail = text_after_piece(continued_text, self.marked_text.text, piece_end) if continued_text else None
            if tail is not None and following["content"] in tail:
                return tail.partition(following["content"])[0]
        return None
