"""Locate the turns of a conversation in its rendered text: measured on a marked copy, verified on
every row.

A template is probed, never recognised by its name; docs/masks.md has the steps. A turn's trained
span begins where the prompt that generation is given ends. A marked copy of the row, with a
sentinel before and after every piece of text, shows what the template writes between the pieces and
what it strips, drops, escapes or moves; a second copy with other sentinels must be the same in
everything else, so that nothing taken out of a text passes for the template's own words. Without
its sentinels the copy must be the row's own text, character by character; else nothing is trained.

Between the pieces a template writes the same for all rows of one shape (roles, white space at the
ends), as long as no text holds anything that it looks for. So plain rows are checked against the
copy of their shape: the text must be what the copy says, and each turn begin where the row's own
prompt ends. Where either does not hold, and for all other rows, there is a copy of the row's own.
Begin at `TurnLocator.locate`, at the end of this file.
"""

import bisect
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sft_play.data.masks.fitted_template import (
    NEXT_QUESTION,
    PLAIN_ANSWER,
    SENTINEL_PREFIX,
    FittedTemplate,
    PieceKind,
    TurnEnds,
    common_prefix,
    control_tokens,
    format_first_difference,
    map_message_texts,
    probe_template,
)
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.template import ChatTemplate
from sft_play.data.masks.token_row import (
    NO_TURN_END,
    PROMPT_MISMATCH,
    TEMPLATE_REFUSES_ROW,
    InexactMaskError,
    Span,
)
from sft_play.data.sources.messages import Message
from sft_play.log import one_line

# A marked copy of a row: what a template writes around the row's texts, read from the sentinels in
# them.

_SENTINEL = re.compile(SENTINEL_PREFIX + r"(\d{5})([be])")
SECOND_SENTINEL_PREFIX = "Kw7V"
_SECOND_SENTINEL = re.compile(SECOND_SENTINEL_PREFIX + r"([ghjkmnprst]{5})([du])")
# letter for letter, so that the sentinels of both copies are equally long
_TO_SECOND, _FROM_SECOND = (
    str.maketrans("0123456789be", "ghjkmnprstdu"),
    str.maketrans("ghjkmnprstdu", "0123456789be"),
)
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
    # It is think text, which a template may leave out.
    is_think: bool = False


@dataclass(frozen=True)
class GapPosition:
    """A position in a rendered text: characters from the beginning of a gap between pieces."""

    gap: int
    offset: int


@dataclass(frozen=True)
class Turn:
    """One assistant turn: where it begins and ends; of one that is not exact the reason, and the
    best guess."""

    message_index: int
    start: GapPosition | None = None
    end: GapPosition | None = None
    # It ends where the rendered conversation up to it ends.
    ended_by_prefix: bool = False
    # It is ended by the token that opens the next turn.
    ended_by_next_turn: bool = False
    # What the template does not write after the last turn: the token that would open the next one.
    added_end: str = ""
    # What the template writes before the turn that its prompt does not have, such as before a first
    # message.
    unprompted_header: str = ""
    # What its prompt has behind the header, and the turn has not; None where the text begins with
    # the prompt.
    prompt_suffix: str | None = None
    # It follows neither a question nor a tool's result, and the text does not begin with its
    # prompt.
    without_prompt: bool = False
    # Why it is not exact.
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class TemplateLayout:
    """What a template writes around the pieces of rows of one shape, and where their turns are.
    `gaps` has one text more than `written_pieces`, which has each piece's number and the form it is
    written in. `stripped_pieces` are numbers of think pieces that are not written."""

    gaps: tuple[str, ...]
    written_pieces: tuple[tuple[int, str], ...]
    turns: tuple[Turn, ...]
    stripped_pieces: tuple[int, ...] = ()

    def fill(self, pieces: Sequence[str]) -> tuple[str, list[int]]:
        """Fill in the pieces of a row: the text that the row must have, and where each gap begins
        in it."""
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
    "json in json": lambda text: json.dumps(
        json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False
    )[1:-1],
    "repr": lambda text: repr(text)[1:-1],
}


def to_second_sentinels(text: str, *_: object) -> str:
    """A marked text with the second copy's sentinels, which have no letter of the first's."""
    return _SENTINEL.sub(
        lambda match: SECOND_SENTINEL_PREFIX + (match[1] + match[2]).translate(_TO_SECOND), text
    )


def searched_texts_pattern(searched_texts: frozenset[str]) -> re.Pattern[str]:
    """A pattern of what the template looks for in texts, the longest first."""
    longest_first = sorted(searched_texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or MATCHES_NOTHING.pattern)


def split_text_pieces(
    text: str, searched_pattern: re.Pattern[str]
) -> Iterator[tuple[int, int, bool]]:
    """The text between what the template looks for, without white space at the ends, and whether it
    is think text."""
    marks = [
        (match.start(), match.end(), match.group()) for match in searched_pattern.finditer(text)
    ]
    start, previous_mark = 0, ""
    for begin, end, next_mark in (*marks, (len(text), -1, "")):
        inner = text[start:begin]
        body = inner.strip()
        if body:
            body_start = start + inner.find(body)
            yield body_start, body_start + len(body), _is_think(body, previous_mark, next_mark)
        start, previous_mark = end, next_mark


def _is_think(text: str, previous_mark: str, next_mark: str) -> bool:
    """True if a text between two marks, such as `<think>` and `</think>`, is think text: it begins
    the message or stands after an opening mark, and a closing one follows. A text between two
    closing ones is part of the answer.
    """
    if not _CLOSING_MARK.search(next_mark) or _CLOSING_MARK.search(previous_mark):
        return False
    # `</think>` → `<think>`, `[END_THINK]` → `[START_THINK]`; a closing mark without such a twin
    # always closes
    opening = next_mark.replace("/", "", 1).replace("END", "START").replace("end", "start")
    return opening == next_mark or opening not in text[1:]


class MarkedText:
    """A rendered copy, sentinels and all, taken apart at them: what stands where."""

    def __init__(self, text: str, pieces: Sequence[MarkedPiece]) -> None:
        self.text, self._pieces = text, pieces
        # Where the gaps between pieces stand in the copy.
        self.gap_spans: list[Span] = []
        # Number and form of each piece that is written; a template may write a piece several times.
        self.written_pieces: list[tuple[int, str]] = []
        # Number, begin and end of each of them, sentinels included.
        self._written_spans: list[tuple[int, int, int]] = []
        self.changed_pieces: set[int] = set()
        gap_start, open_index, open_start = 0, -1, 0
        for match in _SENTINEL.finditer(text):
            index = int(match[1])
            if index >= len(pieces):  # not a sentinel of ours
                continue
            if match[2] == "b":
                if open_index >= 0:  # its end was cut off, or another piece was moved into it
                    self.changed_pieces.add(open_index)
                self.gap_spans.append((gap_start, match.start()))
                open_index, open_start = index, match.end()
            elif index != open_index:
                self.changed_pieces.add(index)
            else:
                piece, written_text = pieces[index], text[open_start : match.start()]
                form = next(
                    (
                        name
                        for name, write in _WRITTEN_FORMS.items()
                        if write(piece.text) == written_text
                    ),
                    None,
                )
                # the arguments of a call, which are JSON, are encoded once, not twice
                if form is None or (piece.kind == "arguments" and form != "plain"):
                    self.changed_pieces.add(index)
                self.written_pieces.append((index, form or "plain"))
                self._written_spans.append((index, open_start - SENTINEL_CHARS, match.end()))
                gap_start, open_index = match.end(), -1
        if open_index >= 0:
            self.changed_pieces.add(open_index)
        self.gap_spans.append((gap_start, len(text)))

    def to_gap_position(self, offset: int) -> GapPosition | None:
        """Convert an offset in the copy to a gap position; None inside a piece."""
        # the last gap that begins at or before the position; an empty gap counts, so the second
        # number is above any end
        gap = bisect.bisect_right(self.gap_spans, (offset, len(self.text) + 1)) - 1
        begin, end = self.gap_spans[gap]
        return GapPosition(gap, offset - begin) if begin <= offset <= end else None

    def message_extent(
        self, message_index: int, start: int
    ) -> tuple[int | None, int, PieceKind | None]:
        """Where the message's pieces begin and end from `start` on, and the kind of the last one;
        repetitions of a piece do not count. Where none is written: None, `start`, None."""
        extents: dict[int, tuple[int, int, PieceKind]] = {}
        for index, begin, end in self._written_spans:
            piece = self._pieces[index]
            if piece.message_index == message_index and begin >= start:
                extents.setdefault(index, (begin, end, piece.kind))
        if not extents:
            return None, start, None
        pieces = list(extents.values())
        _, end, kind = pieces[-1]
        return pieces[0][0], end, kind

    def is_end_certain(self, message_index: int, message_count: int) -> bool:
        """True if the turn and the message after it are written with texts of their own, so that
        what stands between them is the turn's end or the other's beginning."""
        written_messages = {
            self._pieces[index].message_index for index, _, _ in self._written_spans
        }
        return message_index in written_messages and (
            message_index + 1 in written_messages or message_index + 1 == message_count
        )

    def next_piece_start(self, offset: int) -> int:
        """Where the next piece begins at or after the position; the text's end where there is
        none."""
        return next(
            (begin for _, begin, _ in self._written_spans if begin >= offset), len(self.text)
        )

    def previous_piece_end(self, offset: int, message_index: int) -> tuple[int, int]:
        """Find the last piece that ends at or before the position: its end, and the message that it
        belongs to. 0 and -1 where there is none, or where a message after this one is written there
        too."""
        ends = [
            (end, self._pieces[index].message_index)
            for index, _, end in self._written_spans
            if end <= offset
        ]
        return max(ends) if ends and max(owner for _, owner in ends) <= message_index else (0, -1)

    def span_problem(self, message_index: int, start: int, end: int) -> str:
        """Why [start, end) is not exactly the message's turn; empty where it is."""
        pieces_inside = {
            index for index, begin, stop in self._written_spans if start <= begin and stop <= end
        }
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
    """What `rendering` has after the piece that ends at `piece_end` in `text`; None where it lacks
    that piece."""
    # from the beginning of the piece's last sentinel, whose number makes it unique
    sentinel_start = text.rfind(SENTINEL_PREFIX, 0, piece_end)
    if sentinel_start < 0 or text[sentinel_start:piece_end] not in rendering:
        return None
    return rendering[rendering.rfind(text[sentinel_start:piece_end]) + piece_end - sentinel_start :]


# --------------------------------------------------------------------------------------------------
# The template layout of a row: what a template writes around its texts, and where its assistant
# turns are, measured on a marked copy.

# A sentinel numbers its piece with five digits.
_MAX_PIECES = 90_000
_ROLE_POSSESSIVES = {
    "system": "a system prompt's",
    "developer": "a system prompt's",
    "user": "a user turn's",
    "assistant": "an assistant's",
    "tool": "a tool's",
}


# --------------------------------------------------------------------------------------------------
# One marked row: where its assistant turns begin and end.


@dataclass(frozen=True)
class _MarkedRow:
    template: FittedTemplate
    ends: TurnEnds
    marked_text: MarkedText
    messages: Sequence[Message]
    tools: Sequence[Any]

    def locate_turn(self, index: int) -> Turn:
        """The assistant's turn that is this message."""
        marked_text, messages = self.marked_text, self.messages
        prompt = ""  # many templates read the first message, which an empty prompt does not have
        try:
            prompt = self.template.render(messages[:index], self.tools, with_prompt=True)
        except RenderError as error:
            if index:
                return Turn(
                    index,
                    reason="the chat template cannot render the prompt of a turn",
                    detail=str(error),
                )
        # Generation writes what follows the prompt, so the trained span begins where the prompt
        # ends.
        common_size = len(common_prefix(prompt, marked_text.text, self.ends.special_tokens))
        is_prefix = common_size == len(prompt)
        first_piece_start, last_end, kind = marked_text.message_extent(index, common_size)
        # Where it begins: behind its prompt, or behind the header that both have.
        begin, prompt_suffix, start = None, None, None
        # Without a question or a result before the turn, some templates write no prompt but do
        # write the turn's header.
        is_asked = index > 0 and messages[index - 1]["role"] in ("user", "tool")
        if not is_asked:
            earliest = common_size if is_prefix else 0
            begin = self._start_without_prompt(index, earliest, first_piece_start)
        elif is_prefix:
            begin = common_size
        elif first_piece_start is not None:
            begin, prompt_suffix = self._start_behind_header(index, prompt, first_piece_start)
        prompt_end = common_size if is_prefix else begin
        if begin is not None:
            if not prompt_suffix and (is_asked or is_prefix):
                begin += len(self._unprompted_header(index, begin))
            start = marked_text.to_gap_position(begin)
        # Where it ends, and what would be trained where either place is not certain. Arguments that
        # are escaped as HTML (`{&#34;x&#34;: …}`) may have changed quotes only, which are in no
        # piece.
        text = marked_text.text[begin or common_size : marked_text.next_piece_start(last_end)]
        if entity := self.template.find_added_entity(text, messages):
            raise InexactMaskError(
                "the chat template writes HTML entities in an assistant's turn",
                f"messages[{index}]: {entity}",
            )
        turn = self._locate_end(index, piece_end=last_end, is_answer_text=kind == "content")
        detail = f"messages[{index}]"
        if begin is None or start is None or turn.end is None:
            start = None
            if not is_prefix:
                detail = (
                    f"{detail}: the prompt continues with"
                    f" {one_line(repr(prompt[common_size:][:40]))}"
                )
                # The best guess, for data.on_inexact_mask=train, begins where prompt and text part.
                if first_piece_start is None or common_size <= first_piece_start:
                    start = marked_text.to_gap_position(common_size)
            reason = PROMPT_MISMATCH if turn.end else NO_TURN_END
            return replace(turn, start=start, reason=reason, detail=detail)
        end_offset = marked_text.gap_spans[turn.end.gap][0] + turn.end.offset
        problem = marked_text.span_problem(index, begin, end_offset)
        if problem:
            return Turn(index, reason=problem, detail=detail)
        return replace(
            turn,
            start=start,
            unprompted_header=marked_text.text[prompt_end:begin],
            prompt_suffix=prompt_suffix,
            without_prompt=not is_asked and not is_prefix,
        )

    def _start_behind_header(
        self, index: int, prompt: str, first_piece_start: int
    ) -> tuple[int, str] | tuple[None, None]:
        """Find the beginning of a turn that goes on otherwise than its prompt: behind the header
        that both have. Returns it with what the prompt has behind that header; Nones where it is
        not certain."""
        marked_text = self.marked_text
        previous_end, owner_index = marked_text.previous_piece_end(first_piece_start, index)
        tail = text_after_piece(prompt, marked_text.text, previous_end) or ""
        gap = marked_text.text[previous_end:first_piece_start]
        size = self._header_size(prompt, self.messages[:index], tail, gap)
        # what is asked must stand before the turn, not another turn
        if (
            size is None
            or owner_index < 0
            or any(
                message["role"] not in ("user", "tool")
                for message in self.messages[owner_index:index]
            )
        ):
            return None, None
        # the text must have something of the header with which its prompt ends
        header = self.template.traits.generation_prompt
        if (
            header.strip()
            and tail.endswith(header)
            and not tail[len(tail) - len(header) : size].strip()
        ):
            return None, None
        return previous_end + size, tail[size:]

    def _unprompted_header(self, index: int, offset: int) -> str:
        """Return the header that the text has behind the prompt of a turn after a tool's result:
        some templates write no generation prompt there. The header is the generation prompt that
        follows a question; "" where the text has none.
        """
        if not index or self.messages[index - 1]["role"] != "tool":
            return ""
        prompted_messages = [*self.messages[:index], NEXT_QUESTION]
        question, prompt = (
            self.template.try_render(prompted_messages, self.tools, with_prompt=with_prompt)
            for with_prompt in (False, True)
        )
        header = prompt.removeprefix(question) if prompt.startswith(question) else ""
        return header if header.strip() and self.marked_text.text.startswith(header, offset) else ""

    def _start_without_prompt(
        self, index: int, earliest: int, first_piece_start: int | None
    ) -> int | None:
        """Find the beginning of a turn that follows neither a question nor a tool's result: its
        header is measured behind a question, and counted back from its first piece. None where that
        is not certain."""
        if first_piece_start is None:
            return None
        prompted_messages = [*self.messages[:index], NEXT_QUESTION]
        prompt = self.template.try_render(prompted_messages, self.tools, with_prompt=True)
        continued_text = self.template.try_render(
            [*prompted_messages, *self.messages[index:]], self.tools
        )
        tail = prompt.rpartition(NEXT_QUESTION["content"])[2]
        text = self.marked_text.text
        piece_start = continued_text.find(
            text[first_piece_start : first_piece_start + SENTINEL_CHARS]
        )
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

    def _header_size(
        self, prompt: str, prompted_messages: Sequence[Message], tail: str, gap: str
    ) -> int | None:
        """Count the characters of `gap` that are the turn's header as its prompt gives it; None
        where that is not certain. `gap` stands before the turn's first piece, `tail` ends the
        prompt: both follow the same piece. The prompt may open think text that the turn does not
        have, or has closed. Then the header is what both have, but no more than a plain answer has,
        which holds no other turn's words; and only marks of think text may follow it.
        """
        if SENTINEL_PREFIX in tail or not tail.strip():
            return None
        size = len(common_prefix(tail, gap, self.ends.special_tokens))
        if size == len(tail):
            return size
        answered_text = self.template.try_render([*prompted_messages, PLAIN_ANSWER], self.tools)
        prompt_start = prompt[: len(prompt) - len(tail)]
        plain_header, is_answer_written, _ = answered_text.removeprefix(prompt_start).partition(
            PLAIN_ANSWER["content"]
        )
        if not is_answer_written or not answered_text.startswith(prompt_start):
            return None
        plain_size = len(common_prefix(tail, plain_header, self.ends.special_tokens))
        differs_in_think_only = self.template.has_only_think_marks(
            plain_header[plain_size:]
        ) and self.template.has_only_think_marks(plain_header[size:plain_size])
        return min(size, plain_size) if differs_in_think_only else None

    def _locate_end(self, index: int, *, piece_end: int, is_answer_text: bool) -> Turn:
        """A turn with its end alone, whose last piece ends at `piece_end`; without one where that
        is not certain."""
        marked_text, ends = self.marked_text, self.ends
        limit = marked_text.next_piece_start(piece_end)
        turn_text = self.template.try_render(self.messages[: index + 1], self.tools)
        # Whether the conversation up to the turn is a beginning of the whole text, and ends before
        # the next piece.
        is_prefix = (
            bool(turn_text)
            and marked_text.text.startswith(turn_text)
            and piece_end <= len(turn_text) <= limit
        )
        is_last = index + 1 == len(self.messages)
        written_tail = marked_text.text[piece_end:limit]
        continued_tail = self._continued_tail(piece_end) if is_last else written_tail
        final_tail = (
            turn_text[piece_end:]
            if is_prefix
            else text_after_piece(turn_text, marked_text.text, piece_end)
        )
        end = ends.find_end(
            final_tail, continued_tail, is_last=is_last, is_answer_text=is_answer_text
        )
        # In the middle of a row any token that opens a turn follows; only one seen on the probes
        # ends an answer.
        if end is not None and end.opens_next_turn and not is_last:
            tokens = control_tokens(end.text, ends.special_tokens)
            if not tokens or tokens[-1] not in ends.opener_end_markers:
                end = None
        if end is None:
            # a template that ends turns ends this one too
            if ends.end_markers or not (is_prefix or is_answer_text):
                return Turn(index)
            offset = len(turn_text) if is_prefix else piece_end
            return Turn(index, end=marked_text.to_gap_position(offset), ended_by_prefix=is_prefix)
        # An end that the turn alone does not show is its own only where this turn's and the next
        # one's texts stand.
        is_in_final_tail = final_tail is not None and final_tail.startswith(end.text)
        if not (
            is_in_final_tail
            or end.opens_next_turn
            or marked_text.is_end_certain(index, len(self.messages))
        ):
            return Turn(index)
        # The last turn may be written without its end, which a next turn would bring: it is added
        # to the text.
        added_end = end.text[len(written_tail) :] if is_last else ""
        if added_end and not (end.text.startswith(written_tail) and limit == len(marked_text.text)):
            return Turn(index)
        position = marked_text.to_gap_position(piece_end + len(end.text) - len(added_end))
        if position is not None:
            position = GapPosition(position.gap, position.offset + len(added_end))
        return Turn(
            index,
            end=position,
            ended_by_prefix=is_prefix,
            ended_by_next_turn=end.opens_next_turn,
            added_end=added_end,
        )

    def _continued_tail(self, piece_end: int) -> str | None:
        """What stands after the last piece of the last turn when the conversation goes on; None
        where it cannot."""
        calls = self.messages[-1].get("tool_calls") or []
        following_turns = [NEXT_QUESTION]
        # After calls a tool's result goes first: some templates refuse a question there, others
        # open another turn.
        if calls:
            call_id, name = str(calls[-1].get("id") or ""), calls[-1]["function"]["name"]
            following_turns.insert(
                0, {**NEXT_QUESTION, "role": "tool", "name": name, "tool_call_id": call_id}
            )
        for following in following_turns:
            continued_text = self.template.try_render([*self.messages, following], self.tools)
            tail = text_after_piece(continued_text, self.marked_text.text, piece_end)
            if tail is not None and following["content"] in tail:
                return tail.partition(following["content"])[0]
        return None


# --------------------------------------------------------------------------------------------------
# The turns of a row, by the copy of its shape or by one of its own: `TurnLocator.locate`.

# Shapes of rows that are remembered; then all are forgotten.
_MAX_SHAPES = 20_000


@dataclass(frozen=True)
class LocatedTurns:
    """A conversation as text with the exact spans of its assistant turns, by message index."""

    text: str
    spans: dict[int, Span]
    inexact_turns: dict[int, Turn]
    guessed_spans: dict[int, Span]
    # How they were found: a key of `MASK_METHODS`.
    method: str
    # Pieces of think text that the template does not write.
    stripped_think_pieces: int = 0
    # The end of `text` that the template does not write: what ends its last turn.
    added_end: str = ""
    # How the prompt of an exact turn goes on where the turn does not, by where the turn begins in
    # the text.
    prompt_suffixes: dict[int, str] = field(default_factory=dict)
    # What stands before exact turns that their prompts do not have, by message index.
    unprompted_headers: dict[int, str] = field(default_factory=dict)


class TurnLocator:
    """Finds the turns of conversations rendered by one template; `with_tools`: one for rows with
    tools alone. Raises TokenizerError where it cannot render a question and an answer."""

    def __init__(
        self,
        chat_template: ChatTemplate,
        *,
        special_tokens: Sequence[str],
        eos_token: str | None,
        with_tools: bool,
    ) -> None:
        self.template, self.ends = probe_template(
            chat_template, special_tokens=special_tokens, eos_token=eos_token, with_tools=with_tools
        )
        self._searched_pattern = searched_texts_pattern(chat_template.searched_texts)
        self._special_text_pattern = searched_texts_pattern(
            chat_template.searched_texts | {SENTINEL_PREFIX, SECOND_SENTINEL_PREFIX}
        )
        self._layouts_by_shape: dict[Any, TemplateLayout | None] = {}

    def locate(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> LocatedTurns:
        """The text of a conversation, a fitted one, and the exact spans of its assistant turns;
        raises InexactMaskError where the template refuses the row, drops or rewrites a part of it,
        or cannot be verified on it.
        """
        try:
            text = self.template.render(messages, tools)
        except RenderError as error:
            raise InexactMaskError(TEMPLATE_REFUSES_ROW, str(error)) from error
        # Most rows are plain: one rendering and one comparison with what their shape says. All
        # others get a copy each.
        shape = None if tools else self._row_shape(messages)
        if shape is not None and shape not in self._layouts_by_shape:
            if len(self._layouts_by_shape) >= _MAX_SHAPES:
                self._layouts_by_shape.clear()
            # rows of this shape have none, or may differ from one another
            self._layouts_by_shape[shape] = None
            with contextlib.suppress(InexactMaskError):
                self._layouts_by_shape[shape] = self._measure(messages, ())[0]
        template_layout = self._layouts_by_shape.get(shape)
        if template_layout is not None:
            # a plain message has one piece: its text without the white space at its ends, which the
            # shape has
            texts = [stripped for message in messages if (stripped := message["content"].strip())]
            with contextlib.suppress(InexactMaskError):  # a copy of this row's own says more
                return self._apply_layout(
                    template_layout, texts, text, messages, tools, is_shared=True
                )
        # The turns by a marked copy of this very row, confirmed by its own prompts.
        template_layout, pieces = self._measure(messages, tools)
        texts = [piece.text for piece in pieces]
        return self._apply_layout(template_layout, texts, text, messages, tools)

    def _apply_layout(
        self,
        template_layout: TemplateLayout,
        pieces: Sequence[str],
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        is_shared: bool = False,
    ) -> LocatedTurns:
        """The turns of a row by a layout, which must make the row's text of its pieces; verified.
        Raises InexactMaskError where it does not, or a turn is not where the layout has it."""
        expected_text, gap_starts = template_layout.fill(pieces)
        if expected_text != text:
            raise InexactMaskError(
                "the chat template renders the row differently from its marked copy, so its turns"
                " cannot be located",
                format_first_difference(expected_text, text),
            )
        located = self._fill_layout(template_layout, text, gap_starts)
        self._verify(
            template_layout, located, messages, tools, gap_starts=gap_starts, is_shared=is_shared
        )
        return located

    def _row_shape(self, messages: Sequence[Message]) -> Any:
        """What decides how the template treats a plain row: roles, and the white space around the
        texts; None where the row has calls, think text, or a text that holds a mark or something
        the template looks for.
        """
        shape: list[tuple[Any, ...]] = []
        for message in messages:
            content = message.get("content")
            # more keys than role and content: a name, calls, or think text, which templates branch
            # on
            if (
                not isinstance(content, str)
                or len(message) != 2
                or self._special_text_pattern.search(content)
            ):
                return None
            body = content.strip()
            begin = len(content) - len(content.lstrip())
            shape.append((message["role"], not body, content[:begin], content[begin + len(body) :]))
        return tuple(shape)

    def _verify(
        self,
        template_layout: TemplateLayout,
        located: LocatedTurns,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        gap_starts: Sequence[int],
        is_shared: bool = False,
    ) -> None:
        """Raise InexactMaskError where a turn does not begin where the row's own prompt ends, or
        end where its rendering ends. `is_shared`: the layout was measured on another row, whose
        turns may be inexact where this row's are not.
        """
        for turn in template_layout.turns:
            if turn.reason and not is_shared:
                continue
            location = f"messages[{turn.message_index}]"
            # many templates read the first message, which an empty prompt does not have
            prompt = ""
            try:
                prompt = self.template.render(
                    messages[: turn.message_index], tools, with_prompt=True
                )
            except RenderError as error:
                if turn.message_index:
                    raise InexactMaskError(PROMPT_MISMATCH, location) from error
            if turn.reason:
                if located.text.startswith(prompt):
                    raise InexactMaskError(turn.reason, location)
                continue
            start, end = located.spans[turn.message_index]
            if turn.prompt_suffix is None and not turn.without_prompt:
                starts_at_prompt_end = prompt + turn.unprompted_header == located.text[:start]
            elif turn.start is None or turn.without_prompt:
                starts_at_prompt_end = not is_shared
            else:
                # the header behind the piece before the turn, whatever the template made of earlier
                # turns
                header_start = gap_starts[turn.start.gap]
                header = located.text[
                    header_start : header_start + turn.start.offset - len(turn.unprompted_header)
                ]
                starts_at_prompt_end = prompt.endswith(header + (turn.prompt_suffix or ""))
            if not starts_at_prompt_end:
                raise InexactMaskError(PROMPT_MISMATCH, location)
            # Without markers the end is only where the turn's own rendering ends: that must hold
            # for this row too.
            if (
                turn.ended_by_prefix
                and not self.ends.end_markers
                and self.template.try_render(messages[: turn.message_index + 1], tools)
                != located.text[:end]
            ):
                raise InexactMaskError(NO_TURN_END, location)

    def _fill_layout(
        self, template_layout: TemplateLayout, text: str, gap_starts: Sequence[int]
    ) -> LocatedTurns:
        # places in gaps become characters of this row's text
        spans: dict[int, Span] = {}
        guessed_spans: dict[int, Span] = {}
        prompt_suffixes: dict[int, str] = {}
        headers: dict[int, str] = {}
        for turn in template_layout.turns:
            if turn.start is None or turn.end is None:
                continue
            start = gap_starts[turn.start.gap] + turn.start.offset
            end = gap_starts[turn.end.gap] + turn.end.offset
            if turn.reason:
                guessed_spans[turn.message_index] = (start, end)
                continue
            suffix = turn.prompt_suffix or ""
            # the answer's own text may begin as the prompt goes on
            if text.startswith(suffix, start):
                start += len(suffix)
            else:
                prompt_suffixes[start] = suffix
            if turn.unprompted_header:
                headers[turn.message_index] = turn.unprompted_header
            spans[turn.message_index] = (start, end)
        turns = template_layout.turns
        inexact_turns = {turn.message_index: turn for turn in turns if turn.reason}
        # the weakest way in which one of the turns was found names the row's method
        methods = {
            "inexact": bool(inexact_turns) and not spans,
            "last_turn": bool(inexact_turns),
            "next_turn": any(turn.ended_by_next_turn for turn in turns),
            "header": any(turn.prompt_suffix is not None or turn.without_prompt for turn in turns),
            "prefix": all(turn.ended_by_prefix for turn in turns),
            "marker": True,
        }
        method = next(name for name, applies in methods.items() if applies)
        # the last turn alone may have one
        added_end = "".join(turn.added_end for turn in turns)
        return LocatedTurns(
            text + added_end,
            spans,
            inexact_turns,
            guessed_spans,
            method,
            len(template_layout.stripped_pieces),
            added_end,
            prompt_suffixes,
            headers,
        )

    def _measure(
        self, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[TemplateLayout, list[MarkedPiece]]:
        """What the template writes around this row's pieces, and the pieces; raises
        InexactMaskError where it refuses a marked copy, or drops, rewrites or takes apart a
        text."""
        marked_messages, pieces = self._mark_messages(messages)
        try:
            text = self.template.render(marked_messages, tools)
        except RenderError as error:
            raise InexactMaskError(
                "the chat template refuses a copy of the row with marks in it", str(error)
            ) from error
        # A template that takes letters out of a text (`content[0]`) takes them out of its sentinel.
        # The second copy has other letters there, so that the two renderings differ.
        second_copy = [
            map_message_texts(message, index, to_second_sentinels)
            for index, message in enumerate(marked_messages)
        ]
        second_text = _SECOND_SENTINEL.sub(
            lambda match: SENTINEL_PREFIX + (match[1] + match[2]).translate(_FROM_SECOND),
            self.template.try_render(second_copy, tools),
        )
        if second_text != text:
            raise InexactMaskError(
                "the chat template rewrites a text or takes it apart",
                format_first_difference(text, second_text),
            )
        marked_text = MarkedText(text, pieces)
        stripped_pieces = self._check_pieces(messages, pieces, marked_text)
        marked_row = _MarkedRow(self.template, self.ends, marked_text, marked_messages, tools)
        turns = tuple(
            marked_row.locate_turn(index)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        gaps = tuple(text[begin:end] for begin, end in marked_text.gap_spans)
        return (
            TemplateLayout(gaps, tuple(marked_text.written_pieces), turns, stripped_pieces),
            pieces,
        )

    def _check_pieces(
        self, messages: Sequence[Message], pieces: Sequence[MarkedPiece], marked_text: MarkedText
    ) -> tuple[int, ...]:
        """Return the numbers of think pieces that the template leaves out. Raises InexactMaskError
        where any other piece is missing or changed."""
        written_indices = {piece_index for piece_index, _ in marked_text.written_pieces}
        last_content = {
            piece.message_index: piece_index
            for piece_index, piece in enumerate(pieces)
            if piece.kind == "content"
        }
        stripped_pieces = []
        # The first fault is raised. A piece that is not written may still be there under another
        # name, or be think text of the history, which templates leave out.
        for piece_index, piece in enumerate(pieces):
            role = messages[piece.message_index]["role"]
            location = f"messages[{piece.message_index}]"
            if piece_index in marked_text.changed_pieces:
                reason = f"the chat template rewrites {_ROLE_POSSESSIVES[role]} text"
                if piece.kind == "arguments":
                    reason = (
                        "the chat template encodes the JSON text of a tool call's arguments a"
                        " second time"
                    )
                raise InexactMaskError(reason, location)
            if piece_index in written_indices:
                continue
            # Kimi writes the id, `functions.get_weather:0`, and no name beside it
            if piece.kind == "name":
                ids = [
                    str(call.get("id") or "")
                    for call in messages[piece.message_index]["tool_calls"]
                    if call["function"]["name"] == piece.text
                ]
                are_written = all(call_id and call_id in marked_text.text for call_id in ids)
                if are_written and all(piece.text in call_id for call_id in ids):
                    continue
                if are_written:
                    location += (
                        ": ids of calls in the form functions.NAME:NUMBER, numbered from 0 over the"
                        " row and the same in the results, make it exact: the template writes ids"
                        " in place of names"
                    )
            if piece.kind in ("name", "argument", "arguments"):
                raise InexactMaskError(
                    "the chat template drops a tool call",
                    f"{location}: {one_line(piece.text, limit=60)}",
                )
            if role in ("system", "developer"):
                raise InexactMaskError(
                    "the chat template drops the system prompt (data.system_into_user=true puts it"
                    " before the first user turn)",
                    location,
                )
            if (
                role != "assistant"
                or not piece.is_think
                or piece_index == last_content.get(piece.message_index)
            ):
                raise InexactMaskError(
                    f"the chat template drops {_ROLE_POSSESSIVES[role]} text", location
                )
            stripped_pieces.append(piece_index)
        return tuple(stripped_pieces)

    def _mark_messages(
        self, messages: Sequence[Message]
    ) -> tuple[list[Message], list[MarkedPiece]]:
        """The row with sentinels around its pieces, and the pieces by number."""
        pieces: list[MarkedPiece] = []

        def mark(text: str, index: int, kind: PieceKind) -> str:
            for salt in (SENTINEL_PREFIX, SECOND_SENTINEL_PREFIX):
                if salt in text:
                    raise InexactMaskError(
                        "a text holds the mark that is used to find turns",
                        f"messages[{index}]: {salt}",
                    )
            marked: list[str] = []
            offset = 0
            for begin, end, is_think in split_text_pieces(
                text,
                self._searched_pattern if kind in ("content", "reasoning") else MATCHES_NOTHING,
            ):
                piece_index = len(pieces)
                pieces.append(
                    MarkedPiece(index, kind, text[begin:end], is_think or kind == "reasoning")
                )
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
        for marker in sorted(self.ends.end_tokens | {*self.ends.end_markers}):
            if marker in text:
                raise InexactMaskError(
                    "a text holds the end of turn, which the chat template looks for in texts",
                    f"messages[{index}]: {one_line(marker)}",
                )
