"""Chats → tokens with a loss mask, through the tokenizer's own chat template.

`turns.py` finds and verifies where the turns stand in the rendered text; here the trained ones become labels. What
cannot be found exactly is a bad row with its reason, never a guess, unless the run YAML says so.

Shape letters: T tokens of one row.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.masks.rendered_chats import RenderedChats
from sft_play.data.masks.special_tokens import Specials, spliced, texts_of
from sft_play.data.masks.template import (
    PLAIN,
    THINK_END,
    ChatTemplate,
    RenderError,
    is_by_kind,
    kind_of,
    settings_of,
)
from sft_play.data.masks.token_row import (
    CHAT,
    IGNORED,
    OTHER_PROMPT,
    REFUSED,
    TEXT,
    Inexact,
    Span,
    TokenRow,
    trained_tokens,
)
from sft_play.data.masks.tokenizer import Encoder, Masked, TokenizerParts, masked_of
from sft_play.data.masks.turns import LocatedTurns, Turns
from sft_play.data.sources.columns import find_rendered_mark
from sft_play.data.sources.formats import Chat, Example, Text
from sft_play.data.sources.messages import AUTHOR_MESSAGE, Message, merge_turns
from sft_play.data.sources.raw import BadRow
from sft_play.errors import TokenizerError
from sft_play.log import one_line

LOST_TO_LENGTH = "every trained token lies beyond max_seq_len"
NO_END_TOKEN = "no token ends an answer, so the model would not learn to stop"
WAYS_TO_AN_END = (
    "give data.chat_template a template whose answers end with a token of this tokenizer, or train without one with "
    "data.on_missing_end=train"
)
NOTE_RENDERED_CHAT = "a text that is a chat, rendered by this chat template, is read as the chat that it is"
NOTE_LOOKS_RENDERED = (
    "special_tokens_in_text: the text looks like a rendered chat ({mark}) of another template, and all of it is "
    "trained, the user's turns too; give its turns as messages (make preview shows what is trained)"
)
NOTE_PARTED = (
    "an answer's generation prompt goes on otherwise than the answer, with think text that is opened or closed; the "
    "answer is trained behind what both have in common"
)
NOTE_NO_PROMPT = (
    "the chat template writes no generation prompt, so every answer is trained to begin with {header}; give "
    "data.chat_template a copy of it that ends with {{% if add_generation_prompt %}}{{{{ {header} }}}}{{% endif %}}"
)
NOTE_NO_HEADER = (
    "behind a tool's result the generation prompt has no {header}, which the text has; it is not trained, so a model "
    "served with this template may leave it out"
)
MERGE = "data.merge_consecutive=true joins them"
MOVE_SYSTEM = "data.system_into_user=true puts the system prompt before the first user turn"
DROP_TEXT = (
    "data.drop_text_beside_calls=true leaves out the text of turns that call tools, where the template writes it "
    "behind the tool's result"
)
NAMED_IDS = (
    "ids of calls in the form functions.NAME:NUMBER, numbered from 0 over the row and the same in the results, make it "
    "exact: the template writes ids in place of names"
)
NEVER_CLOSED = (
    "data.loss_on_empty_think=false leaves the end of an empty think block untrained that the generation prompt opens, "
    "so the model would not learn to close it"
)
# different chat_template_kwargs of rows: the template is probed for each, which takes a second and some memory
MOST_ROW_KWARGS = 64
TOO_LONG = "longer than max_seq_len (data.truncate=drop)"


class Renderer:
    """Renders examples with one tokenizer and a run's data section. `today` is the day for templates that write the
    date; `encoder` one that there is already. Raises TokenizerError where a token's characters cannot be known."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig | None = None,
        *,
        max_seq_len: int,
        today: date | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.parts = TokenizerParts.of(tokenizer)
        self.data = data or DataConfig()
        self.max_seq_len = max_seq_len
        self.today = date.fromisoformat(self.data.template_date) if self.data.template_date else today or date.today()
        self.encoder = encoder or Encoder(self.parts)
        self._backend = self.encoder.backend
        self._added = frozenset(number for number, _, _ in self.parts.added)
        self._bos = self.parts.bos_id
        self._turns: dict[tuple[bool, str], Turns | TokenizerError] = {}
        self._stops: dict[bool, tuple[str, ...]] = {}
        self._by_kind = any(map(is_by_kind, self.data.chat_template_kwargs.values()))
        # for rows with chat_template_kwargs of their own, by these
        self._of_rows: dict[str, Renderer] = {}

    # What the template does.

    def turns(self, *, with_tools: bool | None = None, kind: str = PLAIN) -> Turns:
        """The turns of the template for rows with tools or without; where `with_tools` is None, of the one that most
        rows use. `kind` matters where data.chat_template_kwargs go by it. Raises TokenizerError."""
        if with_tools is None:
            # transformers takes `tool_use` for rows with tools where there is one, and `default` for all others
            names = {name for name, _ in self.parts.templates}
            with_tools = "tool_use" in names and "default" not in names
        key = (with_tools, kind if self._by_kind else PLAIN)
        if key not in self._turns:
            try:
                source = self.parts.template(with_tools=with_tools)
                other = self._turns.get((not with_tools, key[1]))
                if isinstance(other, Turns) and other.template.jinja.source == source:
                    self._turns[key] = other
                else:
                    has_several = len(self.parts.templates) > 1
                    self._turns[key] = self._turns_of(source, with_tools=with_tools and has_several, kind=key[1])
            except TokenizerError as error:  # kept: every row would probe the broken template again
                self._turns[key] = error
        turns = self._turns[key]
        if isinstance(turns, TokenizerError):
            raise turns
        return turns

    def _turns_for(self, messages: Sequence[Message], tools: Sequence[Any]) -> Turns:
        try:
            return self.turns(with_tools=bool(tools), kind=kind_of(messages) if self._by_kind else PLAIN)
        except TokenizerError as error:
            raise Inexact(f"no chat template for rows {'with' if tools else 'without'} tools", str(error)) from error

    def _turns_of(self, source: str, *, with_tools: bool, kind: str) -> Turns:
        variables = {**dict(self.parts.special_map), **settings_of(self.data.chat_template_kwargs, kind)}
        template = ChatTemplate(source, variables=variables, today=self.today)
        marked = (text for _, text, is_special in self.parts.added if is_special)
        special = dict.fromkeys((*self.parts.special, *marked))
        return Turns(template, special_tokens=[*special], eos_token=self.parts.eos, with_tools=with_tools)

    @functools.cached_property
    def specials(self) -> Specials:
        """The special tokens that texts of the data may hold."""
        ends: list[str] = []
        for with_tools in (False, True) if self.parts.templates else ():
            with contextlib.suppress(TokenizerError):
                ends += self.turns(with_tools=with_tools).ends.tokens
        return Specials(self.parts, ends)

    # Rows.

    def as_chat(self, example: Example) -> Example:
        """A text that is a chat, rendered by this template, as that chat; any other example as it is."""
        if not isinstance(example, Text):
            return example
        try:
            messages = self._rendered_chats.read(example.text) if self._rendered_chats is not None else None
        except Inexact:
            messages = None
        if messages is not None:
            return Chat(example.where, messages, (), (*example.notes, NOTE_RENDERED_CHAT), unused=example.unused)
        mark = find_rendered_mark(example.text)
        note = NOTE_LOOKS_RENDERED.format(mark=mark)
        return example if mark is None or note in example.notes else replace(example, notes=(*example.notes, note))

    @functools.cached_property
    def _rendered_chats(self) -> RenderedChats | None:
        if not self.parts.templates:
            return None
        try:
            turns = self.turns()
        except TokenizerError:
            return None
        return RenderedChats(turns.template, special=[text for _, text, is_special in self.parts.added if is_special])

    def expand(self, example: Example) -> list[Example]:
        """The example itself, or with data.multi_turn=split one for each assistant turn that is trained."""
        if self.data.multi_turn == "whole" or isinstance(example, Text):
            return [example]
        turns = [index for index, message in enumerate(example.messages) if is_trained_turn(message)]
        if len(turns) < 2:
            return [example]
        # Each row ends with the turn that it trains: templates write the last turn as it is generated (think text).
        history = [{**message, "train": False} if message["role"] == "assistant" else message
                   for message in example.messages]  # fmt: skip
        return [
            replace(
                example, where=f"{example.where} turn {number}", messages=(*history[:index], example.messages[index])
            )
            for number, index in enumerate(turns, start=1)
        ]

    def __call__(self, example: Example) -> TokenRow | BadRow:
        """The example's tokens and labels, cut to the limit; a bad row where the mask cannot be exact."""
        whole = self.render(example)
        return whole if isinstance(whole, BadRow) else self.cut(whole)

    def render(self, example: Example) -> TokenRow | BadRow:
        """The whole example as tokens, before any limit."""
        return self.render_all([example])[0]

    def render_all(self, examples: Sequence[Example]) -> list[TokenRow | BadRow]:
        """Many examples at once: the tokenizer takes them as one batch."""
        drafts = [self._draft(example) for example in examples]
        return [
            draft if isinstance(draft, BadRow) else self._tokenised(draft, encoding)
            for draft, encoding in zip(drafts, self._encodings(drafts), strict=True)
        ]

    def _encodings(self, drafts: Sequence[TokenRow | BadRow]) -> list[Any]:
        """For each draft an `Encoding`, or `Masked` where every word of the text is known; None for bad rows and for
        texts with hidden special tokens, which need another copy of the tokenizer (`_tokenised`)."""
        made: list[Any] = [None] * len(drafts)
        for source, has_marks in ((CHAT, False), (TEXT, True)):
            asked: dict[int, str] = {}
            for at, draft in enumerate(drafts):
                if isinstance(draft, TokenRow) and draft.source == source and not self._hides(draft.special_in_text):
                    made[at] = self.encoder.masked(draft.text, draft.spans) if source == CHAT else None
                    if made[at] is None:
                        asked[at] = draft.text
            encodings = self._backend.encode_batch(list(asked.values()), add_special_tokens=has_marks)
            for at, encoding in zip(asked, encodings, strict=True):
                made[at] = encoding
        return made

    def _hides(self, special: int) -> bool:
        """Whether so many special tokens in texts are hidden while the template runs, and tokenised as plain text."""
        return special > 0 and self.data.special_tokens_in_text == "plain"

    def _draft(self, example: Example) -> TokenRow | BadRow:
        """An example as text with the places that are trained, a row without tokens."""
        if isinstance(example, Text):
            text = example.text
            return TokenRow(
                example.where, [], [], source=TEXT, method="document", text=text, spans=((0, len(text)),),
                special_in_text=self.specials.count(text),
            )  # fmt: skip
        if example.template_kwargs:
            renderer = self._renderer_with(example.template_kwargs)
            if renderer is None:
                many = f"the rows have more than {MOST_ROW_KWARGS} different chat_template_kwargs"
                return BadRow(example.where, many, "the template is probed with each of them")
            return renderer._draft(replace(example, template_kwargs={}))
        messages: Sequence[Message] = example.messages
        try:
            messages = self._adapted(messages, example.tools)
            turns = self._turns_for(messages, example.tools)
            fitted = turns.template.fitted(messages, example.tools)
            messages = fitted.messages
            special = sum(map(self.specials.count, texts_of(messages)))
            if special and self.data.special_tokens_in_text == "fail":
                raise Inexact("a text holds a special token of the tokenizer", self.specials.first(messages))
            hide = self._hides(special)
            shown = self.specials.hidden(messages) if hide else messages
            located = turns.locate(shown, example.tools)
            if hide:
                # without the end that was added, which the template's own rendering does not have
                self._check_hidden(located.text.removesuffix(located.added), messages, example.tools)
            spans, untrained, method = self._trained_spans(located, messages)
            rests = {start: located.rests[start] for start, _ in spans if start in located.rests}
            notes = (*fitted.notes, *self._notes(turns, located, messages, example.tools, rests))
            if not self.data.loss_on_empty_think and self.data.loss_on != "all":
                spans = [self._without_empty_think(turns, located, span) for span in spans]
            # with loss_on=all the one span is the whole text, whose end says nothing of the answers'
            answers = [*located.spans.values()] if self.data.loss_on == "all" else spans
            self._check_ends(located.text, answers, example.tools)
            added = rests.items() if self.data.add_empty_think else ()
            blocks = [(start, start, rest) for start, rest in added if THINK_END.search(rest)]
            text, trained = spliced(located.text, blocks, spans)
        except Inexact as error:
            details = [error.detail]
            # the form of the row is at fault there, not one of its texts or an option
            if error.reason.startswith(("the chat template", "the generation prompt")) and "data." not in error.reason:
                details.append(self._ways_out(messages, example.tools, inexact=len(messages)))
            if error.reason == OTHER_PROMPT:
                details.append(self._settings(self._turns_for(messages, example.tools)))
            return BadRow(example.where, error.reason, "; ".join(filter(None, details)))
        return TokenRow(
            example.where, [], [], method=method, untrained_turns=untrained, stripped_think=located.stripped,
            special_in_text=special, text=text, spans=trained, notes=notes, added_end=located.added,
        )  # fmt: skip

    def _without_empty_think(self, turns: Turns, located: LocatedTurns, span: Span) -> Span:
        """A trained span without the empty think block that it begins with. Raises Inexact where the prompt opens that
        block, so that its end is the model's to write."""
        start, end = span
        size = turns.template.empty_think(located.text[start:end])
        prompt = located.text[:start] + located.rests.get(start, "")
        if size and prompt.rstrip().endswith(turns.template.habits.think[0]):
            raise Inexact(NEVER_CLOSED)
        return start + size, end

    def _notes(
        self,
        turns: Turns,
        located: LocatedTurns,
        messages: Sequence[Message],
        tools: Sequence[Any],
        rests: Mapping[int, str],
    ) -> Iterator[str]:
        """What is odd about the prompts and turns of a row; `rests` are those of the turns that are trained."""
        open_rests = [rest for rest in rests.values() if not (self.data.add_empty_think and THINK_END.search(rest))]
        if open_rests:
            ways = [self._settings(turns)]
            if any(map(THINK_END.search, open_rests)):
                ways.append("data.add_empty_think=true writes the prompt's empty think block before it")
            ways = [*filter(None, ways)]
            yield f"{NOTE_PARTED} ({'; '.join(ways)})" if ways else NOTE_PARTED
        way = self._ways_out(messages, tools, inexact=len(located.inexact)) if located.inexact else ""
        if way:
            yield f"a turn has no exact mask and is not trained: {way}"
        if turns.template.habits.unprompted:
            yield NOTE_NO_PROMPT.format(header=repr(turns.template.habits.unprompted))
        behind_results = [text for at, text in located.headers.items() if at and messages[at - 1]["role"] == "tool"]
        if behind_results:
            yield NOTE_NO_HEADER.format(header=one_line(behind_results[0].strip()))

    def _check_ends(self, text: str, spans: Sequence[Span], tools: Sequence[Any]) -> None:
        if self.data.on_missing_end == "train":
            return
        with_tools = bool(tools)
        if with_tools not in self._stops:  # special tokens, and the template's own ends that are one token
            ends = self.turns(with_tools=with_tools).ends.tokens
            added = (token for _, token, is_special in self.parts.added if is_special or token in ends)
            self._stops[with_tools] = tuple(token for token in (*added, self.parts.eos) if token)
        for start, end in spans:
            trained = text[start:end].rstrip()  # a line break after the end token may be trained with it
            if not trained.endswith(self._stops[with_tools]):
                shown = one_line(repr(trained[-40:]), limit=60)
                raise Inexact(NO_END_TOKEN, f"{shown}: {WAYS_TO_AN_END}")

    def _check_hidden(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Raise Inexact where the template does not treat a special token in a text as plain text."""
        try:
            real = self._turns_for(messages, tools).template.rendered(messages, tools)
        except RenderError as error:
            raise Inexact(REFUSED, str(error)) from error
        if self.specials.revealed(text) != real:
            raise Inexact(
                "the chat template looks for a special token that stands in a text "
                "(data.special_tokens_in_text=control takes it as the template does)"
            )

    def _ways_out(self, messages: Sequence[Message], tools: Sequence[Any], *, inexact: int) -> str:
        """The option, or the change of the row, that leaves fewer turns inexact, tried on it; empty where none does."""
        at = next((at for at in range(1, len(messages)) if messages[at]["role"] == messages[at - 1]["role"]), 1)
        twins = f"messages[{at - 1}] and messages[{at}] are both {messages[at - 1]['role']} turns: {MERGE}"
        ways: tuple[tuple[str, Callable[[Sequence[Message]], Sequence[Message]]], ...] = (
            (twins, merge_turns),
            (MOVE_SYSTEM, lambda rows: self._system_into_user(rows, tools)),
            (f"{twins} and {MOVE_SYSTEM}", lambda rows: self._system_into_user(merge_turns(rows), tools)),
            (DROP_TEXT, without_text_beside_calls),
            (NAMED_IDS, with_named_ids),
        )
        for way, changed in ways:
            with contextlib.suppress(Inexact):
                tried = changed(messages)
                if tried == messages:
                    continue
                turns = self._turns_for(tried, tools)
                located = turns.locate(turns.template.fitted(tried, tools).messages, tools)
                if located.spans and len(located.inexact) < inexact:
                    return way
        return ""

    def _settings(self, turns: Turns) -> str:
        names = turns.template.jinja.settings
        return f"the template reads {', '.join(names)}, which data.chat_template_kwargs sets" if names else ""

    def _adapted(self, messages: Sequence[Message], tools: Sequence[Any]) -> Sequence[Message]:
        """The messages as the run YAML has them changed for the template's sake."""
        if self.data.drop_text_beside_calls:
            messages = without_text_beside_calls(messages)
        return self._system_into_user(messages, tools) if self.data.system_into_user else messages

    def _system_into_user(self, messages: Sequence[Message], tools: Sequence[Any]) -> Sequence[Message]:
        """The messages with the system prompt before the first user turn, where the template has no place for it."""
        if messages[0]["role"] != "system" or self._turns_for(messages, tools).template.habits.system == "written":
            return messages
        system, rest = messages[0]["content"], [dict(message) for message in messages[1:]]
        first = next((message for message in rest if message["role"] == "user"), None)
        if first is None:
            raise Inexact("there is no user turn to put the system prompt before")
        first["content"] = f"{system}\n\n{first['content']}"
        first.pop(AUTHOR_MESSAGE, None)  # its author's own message no longer says the same
        return rest

    def _trained_spans(self, located: LocatedTurns, messages: Sequence[Message]) -> tuple[list[Span], int, str]:
        """The spans to train, how many turns are left out, and the method. Raises Inexact where there is no span."""
        if self.data.loss_on == "all":
            return [(0, len(located.text))], 0, "all"
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = turns[-1:] if self.data.loss_on == "completion" else turns
        wanted = [index for index in wanted if messages[index].get("train") is not False]
        if not wanted:
            raise Inexact("no turn is to be trained (train: false)")
        exact = [located.spans[index] for index in wanted if index in located.spans]
        if exact:
            untrained = len(wanted) - len(exact)
            method = "last_turn" if untrained else located.method
            return exact, untrained, "marker" if method == "inexact" else method
        turn = located.inexact[wanted[-1]]
        nearest = [located.nearest[index] for index in wanted if index in located.nearest]
        if nearest and self.data.on_inexact_mask == "train":
            return nearest, len(wanted) - len(nearest), "inexact"
        details = [turn.detail] if turn.detail else []
        for start, end in nearest[-1:]:
            shown = one_line(repr(located.text[start:end]), limit=60)
            details.append(f"data.on_inexact_mask=train would train {shown}")
        raise Inexact(turn.reason, "; ".join(details))

    def _tokenised(self, draft: TokenRow, encoding: Any) -> TokenRow | BadRow:
        if draft.source == TEXT:
            ids = list((self.specials.plain.encode(draft.text) if encoding is None else encoding).ids)
            end = self.parts.end_of_text
            # some tokenizers put it there themselves, by their post-processor
            draft.input_ids = ids if end is None or (ids and ids[-1] == end) else [*ids, end]
            draft.labels = list(draft.input_ids)
            return draft
        is_plain, encoded, spans = encoding is not None, draft.text, draft.spans
        if not is_plain:
            encoding, spans, encoded, draft.text, draft.spans = self.specials.encode(encoded, spans)
        masked = encoding if isinstance(encoding, Masked) else masked_of(encoding, encoded, spans, self._added)
        draft.merged = masked.inside
        if masked.inside:
            split = (self.encoder if is_plain else self.specials).splitting.masked(encoded, spans)
            if split is None and self.data.on_inexact_mask == "fail":
                return BadRow(draft.where, "a token crosses the edge of an answer", encoding.tokens[masked.at])
            masked = split or masked  # on_inexact_mask=train: the token that crosses the edge stays untrained
        draft.input_ids, draft.labels = masked.ids, masked.labels
        # The text is encoded without special tokens of the tokenizer's own, so a second BOS stands in the text itself.
        if self._bos is not None and masked.ids[:2] == [self._bos, self._bos]:
            return BadRow(draft.where, "two BOS tokens", "the row's text begins with the template's own BOS")
        return draft if draft.trained else BadRow(draft.where, "no trained token")

    def cut(self, row: TokenRow) -> TokenRow | BadRow:
        """The row within max_seq_len, cut as data.truncate says."""
        ids, labels, limit = row.input_ids, row.labels, self.max_seq_len
        over = len(ids) - limit
        if over <= 0:
            return row  # the same object: most rows fit
        if self.data.truncate == "drop":
            return BadRow(row.where, TOO_LONG, f"{len(ids)} tokens")
        if self.data.truncate == "end":
            ids, labels = ids[:limit], labels[:limit]
        else:  # truncate=prompt: the last tokens, a BOS at the beginning kept
            kept = 1 if self._bos is not None and ids[0] == self._bos else 0
            ids, labels = [*ids[:kept], *ids[kept + over :]], [*labels[:kept], *labels[kept + over :]]
        left = trained_tokens(labels)
        if left == 0:
            first = next(index for index, label in enumerate(row.labels) if label != IGNORED)
            return BadRow(row.where, LOST_TO_LENGTH, f"{len(row.input_ids)} tokens, the first trained one at {first}")
        return replace(row, input_ids=ids, labels=labels, cut=over, lost=row.trained - left)

    # Documents and prompts.

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of documents with what the tokenizer puts around a text, each ended by the end-of-text token."""
        rows = self.render_all([Text("", text) for text in texts])
        return [row.input_ids for row in rows if isinstance(row, TokenRow)]  # all of them: a text is never refused

    def prompt_ids(self, chat: Chat) -> list[int] | None:
        """Tokens of everything before the last turn with the generation prompt. None where the last turn is not the
        assistant's, or its prompt cannot be rendered."""
        if chat.template_kwargs:
            renderer = self._renderer_with(chat.template_kwargs)
            return renderer.prompt_ids(replace(chat, template_kwargs={})) if renderer is not None else None
        if chat.messages[-1]["role"] != "assistant":
            return None
        try:
            messages = self._adapted(chat.messages, chat.tools)
            turns = self._turns_for(chat.messages, chat.tools)
            asked = turns.template.fitted(messages, chat.tools).messages[:-1]
            hide = self.hides(asked)
            text = turns.template.rendered(self.specials.hidden(asked) if hide else asked, chat.tools, prompt=True)
        except (RenderError, Inexact):
            return None
        encoding = self.specials.encode(text, [])[0] if hide else self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids)

    def question_ids(self, chat: Chat) -> tuple[list[int], list[int]] | None:
        """Tokens of the last turn's prompt, and those that training teaches to write behind it, the end of the turn
        included. None where there is no such prompt, or the turn is not trained."""
        if chat.template_kwargs:
            renderer = self._renderer_with(chat.template_kwargs)
            return renderer.question_ids(replace(chat, template_kwargs={})) if renderer is not None else None
        prompt = self.prompt_ids(chat)
        last_turn = copy.copy(self)  # shares the probed template
        last_turn.data = self.data.model_copy(update={"loss_on": "completion"})
        row = last_turn.render(chat)  # before any limit: an answer that is cut is not the right one
        if prompt is None or isinstance(row, BadRow):
            return None
        answer = [label for label in row.labels if label != IGNORED]
        before = row.input_ids[: row.labels.index(answer[0])]
        if before[: len(prompt)] == prompt:  # what stands untrained between them is given too: a block, a header
            return before, answer
        # the prompt may have closed the think text that the turn closes: it is not asked for a second time
        overlap = next((size for size in range(len(answer), 0, -1) if prompt[-size:] == answer[:size]), 0)
        return prompt, answer[overlap:]

    def _renderer_with(self, template_kwargs: Mapping[str, Any]) -> Renderer | None:
        """A renderer of rows that have these chat_template_kwargs; None where there are too many others."""
        key = json.dumps(template_kwargs, sort_keys=True, default=str)
        if key not in self._of_rows and len(self._of_rows) < MOST_ROW_KWARGS:
            both = {**self.data.chat_template_kwargs, **template_kwargs}
            data = self.data.model_copy(update={"chat_template_kwargs": both})
            self._of_rows[key] = Renderer(
                self.parts, data, max_seq_len=self.max_seq_len, today=self.today, encoder=self.encoder
            )
        return self._of_rows.get(key)

    def hides(self, messages: Sequence[Message]) -> bool:
        """Whether special tokens that the messages' texts spell are tokenised as plain text, as in training."""
        return self._hides(sum(map(self.specials.count, texts_of(messages))))


def without_text_beside_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with only the think text of turns that call tools, beside their calls."""
    copies = [dict(message) for message in messages]
    for message in copies:
        if message.get("tool_calls") and message.get("content"):
            ends = [match.end() for match in THINK_END.finditer(message["content"])]
            message["content"] = message["content"][: max(ends, default=0)]
            message.pop(AUTHOR_MESSAGE, None)  # its author's own message no longer says the same
    return copies


def with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of calls that hold the call's name, as Kimi's models write them."""
    count = itertools.count()
    return [
        {**message, "tool_calls": [{**call, "id": _named_id(call, next(count))} for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _named_id(call: Mapping[str, Any], number: int) -> str:
    return f"functions.{call['function']['name']}:{number}"


def is_trained_turn(message: Message) -> bool:
    """Whether it is an assistant turn without `train: false`."""
    return message["role"] == "assistant" and message.get("train") is not False
