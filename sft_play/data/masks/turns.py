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

from sft_play.data.masks.marked_copy import (
    SECOND_SENTINEL_PREFIX,
    SENTINEL_PREFIX,
    TemplateLayout,
    Turn,
    searched_texts_pattern,
)
from sft_play.data.masks.probes import probe_template
from sft_play.data.masks.skeletons import TemplateLayoutBuilder
from sft_play.data.masks.template import ChatTemplate, RenderError
from sft_play.data.masks.token_row import NO_TURN_END, PROMPT_MISMATCH, TEMPLATE_REFUSES_ROW, InexactMaskError, Span
from sft_play.data.masks.turn_ends import format_first_difference
from sft_play.data.sources.messages import Message

# Shapes of rows that are remembered; then all are forgotten.
_MAX_SHAPES = 20_000


@dataclass(frozen=True)
class LocatedTurns:
    """A conversation as text with the exact spans of its assistant turns, by message index."""

    text: str
    spans: dict[int, Span]
    inexact_turns: dict[int, Turn]
    guessed_spans: dict[int, Span]
    method: str
    """How they were found: a key of `MASK_METHODS`."""
    stripped_think_pieces: int = 0
    """Pieces of think text that the template does not write."""
    added_end: str = ""
    """The end of `text` that the template does not write: what ends its last turn."""
    prompt_suffixes: dict[int, str] = field(default_factory=dict)
    """How the prompt of an exact turn goes on where the turn does not, by where the turn begins in the text."""
    unprompted_headers: dict[int, str] = field(default_factory=dict)
    """What stands before exact turns that their prompts do not have, by message index."""


class TurnLocator:
    """Finds the turns of conversations rendered by one template; `with_tools`: one for rows with tools alone. Raises
    TokenizerError where it cannot render a question and an answer."""

    def __init__(
        self, chat_template: ChatTemplate, *, special_tokens: Sequence[str], eos_token: str | None, with_tools: bool
    ) -> None:
        self.template, self.ends = probe_template(
            chat_template, special_tokens=special_tokens, eos_token=eos_token, with_tools=with_tools
        )
        self._layout_builder = TemplateLayoutBuilder(self.template, self.ends)
        self._special_text_pattern = searched_texts_pattern(
            chat_template.searched_texts | {SENTINEL_PREFIX, SECOND_SENTINEL_PREFIX}
        )
        self._layouts_by_shape: dict[Any, TemplateLayout | None] = {}

    def locate(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> LocatedTurns:
        """The text of a conversation, a fitted one, and the exact spans of its assistant turns; raises InexactMaskError
        where the template refuses the row, drops or rewrites a part of it, or cannot be verified on it."""
        try:
            text = self.template.render(messages, tools)
        except RenderError as error:
            raise InexactMaskError(TEMPLATE_REFUSES_ROW, str(error)) from error
        # Most rows are plain: one rendering and one comparison with what their shape says. All others get a copy each.
        shape = None if tools else self._row_shape(messages)
        if shape is None:
            return self._locate_by_marked_copy(text, messages, tools)
        if shape not in self._layouts_by_shape:
            if len(self._layouts_by_shape) >= _MAX_SHAPES:
                self._layouts_by_shape.clear()
            self._layouts_by_shape[shape] = None  # rows of this shape have none, or may differ from one another
            with contextlib.suppress(InexactMaskError):
                self._layouts_by_shape[shape] = self._layout_builder.measure(messages, ())[0]
        template_layout = self._layouts_by_shape[shape]
        if template_layout is None:
            return self._locate_by_marked_copy(text, messages, tools)
        # a plain message has one piece: its text without the white space at its ends, which the shape has
        pieces = [stripped for message in messages if (stripped := message["content"].strip())]
        expected_text, gap_starts = template_layout.fill(pieces)
        if expected_text == text:
            located = self._fill_layout(template_layout, text, gap_starts)
            with contextlib.suppress(InexactMaskError):  # a copy of this row's own says more
                self._verify(template_layout, located, messages, tools, gap_starts=gap_starts, is_shared=True)
                return located
        return self._locate_by_marked_copy(text, messages, tools)

    def _row_shape(self, messages: Sequence[Message]) -> Any:
        """What decides how the template treats a plain row: roles, and the white space around the texts; None where the
        row has calls, think text, or a text that holds a mark or something the template looks for."""
        shape: list[tuple[Any, ...]] = []
        for message in messages:
            content = message.get("content")
            # more keys than role and content: a name, calls, or think text, which templates branch on
            if not isinstance(content, str) or len(message) != 2 or self._special_text_pattern.search(content):
                return None
            body = content.strip()
            if body == content:
                shape.append((message["role"], not body))
            else:
                begin = content.find(body) if body else len(content)
                shape.append((message["role"], not body, content[:begin], content[begin + len(body) :]))
        return tuple(shape)

    def _locate_by_marked_copy(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> LocatedTurns:
        """The turns by a marked copy of this very row, confirmed by its own prompts. Raises InexactMaskError."""
        template_layout, pieces = self._layout_builder.measure(messages, tools)
        expected_text, gap_starts = template_layout.fill([piece.text for piece in pieces])
        if expected_text != text:
            raise InexactMaskError(
                "the chat template renders the row differently from its marked copy, so its turns cannot be located",
                format_first_difference(expected_text, text),
            )
        located = self._fill_layout(template_layout, text, gap_starts)
        self._verify(template_layout, located, messages, tools, gap_starts=gap_starts)
        return located

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
        """Raise InexactMaskError where a turn does not begin where the row's own prompt ends, or end where its does.
        `is_shared`: the layout is that of another row, whose turns may be inexact where this row's are not."""
        for turn in template_layout.turns:
            if not (turn.is_exact or is_shared):
                continue
            location = f"messages[{turn.message_index}]"
            try:
                prompt = self.template.render(messages[: turn.message_index], tools, with_prompt=True)
            except RenderError as error:
                if turn.message_index:
                    raise InexactMaskError(PROMPT_MISMATCH, location) from error
                prompt = ""  # many templates read the first message, which an empty prompt does not have
            if not turn.is_exact:
                if located.text.startswith(prompt):
                    raise InexactMaskError(turn.reason, location)
                continue
            start, end = located.spans[turn.message_index]
            if turn.prompt_suffix is None and not turn.without_prompt:
                starts_at_prompt_end = prompt + turn.unprompted_header == located.text[:start]
            elif turn.start is None or turn.without_prompt:
                starts_at_prompt_end = not is_shared
            else:  # the header behind the piece before the turn, whatever the template made of earlier turns
                header_start = gap_starts[turn.start.gap]
                header = located.text[header_start : header_start + turn.start.offset - len(turn.unprompted_header)]
                starts_at_prompt_end = prompt.endswith(header + (turn.prompt_suffix or ""))
            if not starts_at_prompt_end:
                raise InexactMaskError(PROMPT_MISMATCH, location)
            # Without markers the end is only where the turn's own rendering ends: that must hold for this row too.
            if turn.ended_by_prefix and not self.ends.end_markers:
                prefix_text = self.template.try_render(messages[: turn.message_index + 1], tools)
                if prefix_text != located.text[:end]:
                    raise InexactMaskError(NO_TURN_END, location)

    def _fill_layout(self, template_layout: TemplateLayout, text: str, gap_starts: Sequence[int]) -> LocatedTurns:
        spans: dict[int, Span] = {}
        guessed_spans: dict[int, Span] = {}
        prompt_suffixes: dict[int, str] = {}
        headers: dict[int, str] = {}
        for turn in template_layout.turns:
            if turn.start is not None and turn.end is not None:
                start = gap_starts[turn.start.gap] + turn.start.offset
                # the answer's own text may begin as the prompt goes on
                text_suffix = (
                    turn.prompt_suffix if turn.prompt_suffix and text.startswith(turn.prompt_suffix, start) else ""
                )
                start += len(text_suffix)
                if turn.prompt_suffix and not text_suffix:
                    prompt_suffixes[start] = turn.prompt_suffix
                if turn.unprompted_header:
                    headers[turn.message_index] = turn.unprompted_header
                spans[turn.message_index] = (start, gap_starts[turn.end.gap] + turn.end.offset)
            elif turn.guessed_span is not None:
                first, last = turn.guessed_span
                guessed_spans[turn.message_index] = (
                    gap_starts[first.gap] + first.offset,
                    gap_starts[last.gap] + last.offset,
                )
        inexact_turns = {turn.message_index: turn for turn in template_layout.turns if not turn.is_exact}
        if inexact_turns:
            method = "last_turn" if spans else "inexact"
        elif any(turn.ended_by_next_turn for turn in template_layout.turns):
            method = "next_turn"
        elif any(turn.prompt_suffix is not None or turn.without_prompt for turn in template_layout.turns):
            method = "header"
        else:
            method = "prefix" if all(turn.ended_by_prefix for turn in template_layout.turns) else "marker"
        stripped_think, added_end = len(template_layout.stripped_pieces), template_layout.added_end
        return LocatedTurns(
            text + added_end,
            spans,
            inexact_turns,
            guessed_spans,
            method,
            stripped_think,
            added_end,
            prompt_suffixes,
            headers,
        )
