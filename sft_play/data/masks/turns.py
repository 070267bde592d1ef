"""Where the turns of a conversation stand in its rendered text, measured on the template and verified on every row.

A template is probed, never recognised by its name; docs/masks.md has the steps. A turn's trained span begins where the
prompt that generation is given ends. A marked copy of the row, with a sentinel before and after every piece of text,
shows what the template writes between the pieces and what it strips, drops, escapes or moves; a second copy with other
sentinels must be the same in everything else, so that nothing taken out of a text passes for the template's own words.
Without its sentinels the copy must be the row's own text, character by character; else nothing is trained.

Between the pieces a template writes the same for all rows of one shape (roles, white space at the ends), as long as no
text holds anything that it looks for. So plain rows are checked against the copy of their shape: the text must be what
the copy says, and each turn begin where the row's own prompt ends. Where either does not hold, and for all other rows,
there is a copy of the row's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.data.masks.marked_copy import OTHER_SALT, SALT, Skeleton, Turn, splitter
from sft_play.data.masks.probes import probed
from sft_play.data.masks.skeletons import Skeletons
from sft_play.data.masks.template import ChatTemplate, RenderError
from sft_play.data.masks.token_row import NO_END, OTHER_PROMPT, REFUSED, Inexact, Span
from sft_play.data.masks.turn_ends import first_difference
from sft_play.data.sources.messages import Message

# Shapes of rows that are remembered; then all are forgotten.
_MAX_SHAPES = 20_000


@dataclass(frozen=True)
class LocatedTurns:
    """A conversation as text with the exact spans of its assistant turns, by message index."""

    text: str
    spans: dict[int, Span]
    inexact: dict[int, Turn]
    nearest: dict[int, Span]
    method: str
    """How they were found: a key of `METHODS`."""
    stripped: int = 0
    """Pieces of think text that the template does not write."""
    added: str = ""
    """The end of `text` that the template does not write: what ends its last turn."""
    rests: dict[int, str] = field(default_factory=dict)
    """How the prompt of an exact turn goes on where the turn does not, by where the turn begins in the text."""
    headers: dict[int, str] = field(default_factory=dict)
    """What stands before exact turns that their prompts do not have, by message index."""


class Turns:
    """Finds the turns of conversations rendered by one template; `with_tools`: one for rows with tools alone. Raises
    TokenizerError where it cannot render a question and an answer."""

    def __init__(
        self, jinja: ChatTemplate, *, special_tokens: Sequence[str], eos_token: str | None, with_tools: bool
    ) -> None:
        self.template, self.ends = probed(
            jinja, special_tokens=special_tokens, eos_token=eos_token, with_tools=with_tools
        )
        self._skeletons = Skeletons(self.template, self.ends)
        self._asked = splitter(jinja.tested | {SALT, OTHER_SALT})
        self._shapes: dict[Any, Skeleton | None] = {}

    def locate(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> LocatedTurns:
        """The text of a conversation, a fitted one, and the exact spans of its assistant turns; raises Inexact where
        the template refuses the row, drops or rewrites a part of it, or cannot be verified on it."""
        try:
            text = self.template.rendered(messages, tools)
        except RenderError as error:
            raise Inexact(REFUSED, str(error)) from error
        # Most rows are plain: one rendering and one comparison with what their shape says. All others get a copy each.
        shape = None if tools else self._shape_of(messages)
        if shape is None:
            return self._verified(text, messages, tools)
        if shape not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = None  # rows of this shape have none, or may differ from one another
            with contextlib.suppress(Inexact):
                self._shapes[shape] = self._skeletons.of(messages, ())[0]
        skeleton = self._shapes[shape]
        if skeleton is None:
            return self._verified(text, messages, tools)
        # a plain message has one piece: its text without the white space at its ends, which the shape has
        pieces = [stripped for message in messages if (stripped := message["content"].strip())]
        expected, begins = skeleton.fill(pieces)
        if expected == text:
            located = self._located(skeleton, text, begins)
            with contextlib.suppress(Inexact):  # a copy of this row's own says more
                self._confirm(skeleton, located, messages, tools, begins=begins, of_shape=True)
                return located
        return self._verified(text, messages, tools)

    def _shape_of(self, messages: Sequence[Message]) -> Any:
        """What decides how the template treats a plain row: roles, and the white space around the texts; None where the
        row has calls, think text, or a text that holds a mark or something the template looks for."""
        shape: list[tuple[Any, ...]] = []
        for message in messages:
            content = message.get("content")
            # more keys than role and content: a name, calls, or think text, which templates branch on
            if not isinstance(content, str) or len(message) != 2 or self._asked.search(content):
                return None
            body = content.strip()
            if body == content:
                shape.append((message["role"], not body))
            else:
                begin = content.find(body) if body else len(content)
                shape.append((message["role"], not body, content[:begin], content[begin + len(body) :]))
        return tuple(shape)

    def _verified(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> LocatedTurns:
        """The turns by a marked copy of this very row, confirmed by its own prompts. Raises Inexact."""
        skeleton, pieces = self._skeletons.of(messages, tools)
        expected, begins = skeleton.fill([piece.text for piece in pieces])
        if expected != text:
            raise Inexact(
                "the chat template renders the row differently from its marked copy, so its turns cannot be located",
                first_difference(expected, text),
            )
        located = self._located(skeleton, text, begins)
        self._confirm(skeleton, located, messages, tools, begins=begins)
        return located

    def _confirm(
        self,
        skeleton: Skeleton,
        located: LocatedTurns,
        messages: Sequence[Message],
        tools: Sequence[Any],
        *,
        begins: Sequence[int],
        of_shape: bool = False,
    ) -> None:
        """Raise Inexact where a turn does not begin where the row's own prompt ends, or not end where its own does;
        `of_shape`: the skeleton is that of another row, whose turns may be inexact where this row's are not."""
        for turn in skeleton.turns:
            if not (turn.is_exact or of_shape):
                continue
            where = f"messages[{turn.message}]"
            try:
                prompt = self.template.rendered(messages[: turn.message], tools, prompt=True)
            except RenderError as error:
                if turn.message:
                    raise Inexact(OTHER_PROMPT, where) from error
                prompt = ""  # many templates read the first message, which an empty prompt does not have
            if not turn.is_exact:
                if located.text.startswith(prompt):
                    raise Inexact(turn.reason, where)
                continue
            start, end = located.spans[turn.message]
            if turn.rest is None and not turn.unasked:
                fits = prompt + turn.header == located.text[:start]
            elif turn.start is None or turn.unasked:
                fits = not of_shape
            else:  # the header behind the piece before the turn, whatever the template made of earlier turns
                before = begins[turn.start.gap]
                header = located.text[before : before + turn.start.offset - len(turn.header)]
                fits = prompt.endswith(header + (turn.rest or ""))
            if not fits:
                raise Inexact(OTHER_PROMPT, where)
            # Without markers the end is only where the turn's own rendering ends: that must hold for this row too.
            if turn.by_prefix and not self.ends.markers:
                own = self.template.rendered_or_nothing(messages[: turn.message + 1], tools)
                if own != located.text[:end]:
                    raise Inexact(NO_END, where)

    def _located(self, skeleton: Skeleton, text: str, begins: Sequence[int]) -> LocatedTurns:
        spans: dict[int, Span] = {}
        nearest: dict[int, Span] = {}
        rests: dict[int, str] = {}
        headers: dict[int, str] = {}
        for turn in skeleton.turns:
            if turn.start is not None and turn.end is not None:
                start = begins[turn.start.gap] + turn.start.offset
                # the answer's own text may begin as the prompt goes on
                own = turn.rest if turn.rest and text.startswith(turn.rest, start) else ""
                start += len(own)
                if turn.rest and not own:
                    rests[start] = turn.rest
                if turn.header:
                    headers[turn.message] = turn.header
                spans[turn.message] = (start, begins[turn.end.gap] + turn.end.offset)
            elif turn.nearest is not None:
                first, last = turn.nearest
                nearest[turn.message] = (begins[first.gap] + first.offset, begins[last.gap] + last.offset)
        inexact = {turn.message: turn for turn in skeleton.turns if not turn.is_exact}
        if inexact:
            method = "last_turn" if spans else "inexact"
        elif any(turn.by_next for turn in skeleton.turns):
            method = "next_turn"
        elif any(turn.rest is not None or turn.unasked for turn in skeleton.turns):
            method = "header"
        else:
            method = "prefix" if all(turn.by_prefix for turn in skeleton.turns) else "marker"
        stripped, added = len(skeleton.stripped), skeleton.added
        return LocatedTurns(text + added, spans, inexact, nearest, method, stripped, added, rests, headers)
