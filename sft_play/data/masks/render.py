"""Chats → tokens with a loss mask, through the tokenizer's own chat template.

`turns.py` finds and verifies where the turns stand in the rendered text; here the trained ones become labels. What
cannot be found exactly is a bad row with its reason, never a guess, unless the run YAML says so.

Shape letters: T tokens of one row.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.masks.template import ChatTemplate, Message, RenderError
from sft_play.data.masks.template_limits import Span
from sft_play.data.masks.turns import OTHER_PROMPT, REFUSED, Inexact, LocatedTurns, Turns
from sft_play.data.masks.words import Words, words_of
from sft_play.data.sources.files import BadRow
from sft_play.data.sources.formats import Chat, Example, Text
from sft_play.data.sources.messages import GIVEN, TEXT_KEYS, merge_turns
from sft_play.errors import TokenizerError
from sft_play.log import one_line

IGNORED = -100
"""The label of a token that is not trained (torch's and transformers' convention)."""

END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a document; chat models often have another one, their end of turn, as `eos_token`."""

LOST_TO_LENGTH = "every trained token lies beyond max_seq_len"
NO_END_TOKEN = "no token ends an answer, so the model would not learn to stop"
WAYS_TO_AN_END = (
    "give data.chat_template a template whose answers end with a token of this tokenizer, or train without one with "
    "data.on_missing_end=train"
)
TOO_LONG = "longer than max_seq_len (data.truncate=drop)"
ROWS_HELPED = 20
"""Rows without an exact mask for which settings that help are looked for: messages show no more of them."""
ALL_COMPARED, ONE_COMPARED_OF = 64, 256
"""Texts whose tokens were put together from words that are compared with the tokenizer's own ids."""
METHODS = {
    "generation": "the template's own generation marks",
    "prefix": "rendered prefixes",
    "marker": "prefix and end-of-turn marker",
    "next_turn": "prefix and the token that opens the next turn",
    "last_turn": "the turns that are exact",
    "all": "every token",
    "document": "every token of a document",
    "inexact": "a guess (data.on_inexact_mask=train)",
}
"""How trained spans are found, as a person reads it."""
CHAT, TEXT = "chat", "text"
"""Where a row's tokens come from; the two sources of task_mode cpt_mixed."""


@dataclass(frozen=True)
class TokenRow:
    """A row as tokens: ids and labels of shape [T]; a label of `IGNORED` is not trained.

    `text` is what the whole row's tokens spell, with special tokens of the data's own texts as they stand there, and
    `spans` are the characters of it that are trained. `method` says how they were found.
    """

    where: str
    input_ids: list[int]
    labels: list[int]
    cut: int = 0
    """Tokens that fell to the length limit, and trained ones among them."""
    lost: int = 0
    merged: int = 0
    """Edges of answers inside a token, which is split there as generation would."""
    source: str = CHAT
    method: str = ""
    untrained_turns: int = 0
    """Assistant turns without an exact mask."""
    stripped_think: int = 0
    """Pieces of think text that the template does not write."""
    special_in_text: int = 0
    """Special tokens in the data's own texts."""
    text: str = ""
    spans: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()
    """What was changed of the row for the template's sake."""
    added_end: str = ""
    """The end of `text` that the chat template does not write: what ends its last turn."""

    @property
    def trained(self) -> int:
        """Tokens whose label counts; the first token of a row is never predicted."""
        return trained_tokens(self.labels)


def trained_tokens(labels: list[int]) -> int:
    """Labels of shape [T] that count: the first token of a row is never predicted."""
    counted = len(labels) - labels.count(IGNORED)
    return counted - (1 if labels and labels[0] != IGNORED else 0)


@dataclass(frozen=True)
class TokenizerParts:
    """What rendering needs of a tokenizer: small enough to be sent to another process, where transformers stays out."""

    state: str
    """The backend as `tokenizers` writes it."""
    templates: tuple[tuple[str, str], ...]
    """Chat templates by name; one tokenizer may have a `default` and a `tool_use` one."""
    special_map: tuple[tuple[str, str], ...]
    special: tuple[str, ...]
    added: tuple[tuple[int, str, bool], ...]
    """Added tokens: id, text, and whether they are special."""
    bos_id: int | None
    eos: str | None
    end_of_text: int | None
    live: Any = field(default=None, repr=False, compare=False)
    """The backend itself, where it is in this process: parsing `state` again takes time and memory."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "live": None}

    @classmethod
    def of(cls, tokenizer: Any) -> TokenizerParts:
        """Those of a transformers tokenizer.

        Raises:
            TokenizerError: it cannot say which characters a token stands for.
        """
        if isinstance(tokenizer, cls):
            return tokenizer
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"the tokenizer is {type(tokenizer).__name__}, which cannot say which characters a token stands for; "
                "a loss mask needs a fast one (a tokenizer.json in the model's folder)"
            )
        given = tokenizer.chat_template
        templates = given if isinstance(given, dict) else {"default": given} if given else {}
        special_map = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        added = tokenizer.added_tokens_decoder.items()
        return cls(
            tokenizer.backend_tokenizer.to_str(),
            tuple(templates.items()),
            tuple(special_map.items()),
            tuple(tokenizer.all_special_tokens),
            tuple((number, str(token.content), bool(token.special)) for number, token in added),
            tokenizer.bos_token_id,
            tokenizer.eos_token,
            end_of_text_id(tokenizer),
            _with_shared_vocabulary(tokenizer.backend_tokenizer),
        )

    def template(self, *, with_tools: bool) -> str:
        """The template of rows with tools or without, as transformers chooses it; raises TokenizerError where there
        is none."""
        named = dict(self.templates)
        source = named.get("tool_use") if with_tools else None
        source = source or named.get("default")
        if source is None and named:
            raise TokenizerError(
                f"the tokenizer has no chat template for rows {'with' if with_tools else 'without'} tools, only "
                f"{', '.join(sorted(named))}; set data.chat_template"
            )
        if source is None:
            raise TokenizerError("the tokenizer has no chat template; set data.chat_template")
        return source

    def with_template(self, source: str) -> TokenizerParts:
        """The same tokenizer with another template."""
        return replace(self, templates=(("default", source),))


class Renderer:
    """Renders examples with one tokenizer and the data section of a run.

    `today` is the day for templates that write the date; data.template_date overrides it. `encoder` is an existing one
    of this tokenizer.

    Raises:
        TokenizerError: the tokenizer cannot say which characters a token stands for, or its chat template cannot
            render a question and an answer.
    """

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
        self._encoder = encoder or Encoder(self.parts)
        self._backend = self._encoder.backend
        self._added = frozenset(number for number, _, _ in self.parts.added)
        self._bos = self.parts.bos_id
        self._turns: dict[bool, Turns | TokenizerError] = {}
        self._switched: dict[tuple[str, str, bool], Turns] = {}
        self._stops: dict[bool, tuple[str, ...]] = {}
        self._helped = 0

    # What the template does.

    def turns(self, *, with_tools: bool | None = None) -> Turns:
        """The turns of the tokenizer's template, which may have another one for rows with tools; without
        `with_tools` those of the template that most rows have.

        Raises:
            TokenizerError: there is no such template, or it cannot render a question and an answer.
        """
        if with_tools is None:
            names = {name for name, _ in self.parts.templates}
            with_tools = "tool_use" in names and "default" not in names
        if with_tools not in self._turns:
            try:
                source = self.parts.template(with_tools=with_tools)
                other = self._turns.get(not with_tools)
                if isinstance(other, Turns) and other.template.source == source:
                    self._turns[with_tools] = other
                else:
                    has_several = len(self.parts.templates) > 1
                    self._turns[with_tools] = self._turns_of(source, with_tools=with_tools and has_several)
            except TokenizerError as error:  # kept: every row would probe the broken template again
                self._turns[with_tools] = error
        turns = self._turns[with_tools]
        if isinstance(turns, TokenizerError):
            raise turns
        return turns

    def _turns_for(self, tools: Sequence[Any]) -> Turns:
        """The turns of rows with these tools; raises Inexact where their template cannot be used."""
        try:
            return self.turns(with_tools=bool(tools))
        except TokenizerError as error:
            raise Inexact(f"no chat template for rows {'with' if tools else 'without'} tools", str(error)) from error

    def _turns_of(self, source: str, *, with_tools: bool = False, **more: Any) -> Turns:
        variables = {**dict(self.parts.special_map), **self.data.chat_template_kwargs, **more}
        template = ChatTemplate(source, variables=variables, today=self.today)
        marked = (text for _, text, is_special in self.parts.added if is_special)
        special = dict.fromkeys((*self.parts.special, *marked))
        return Turns(template, special_tokens=[*special], eos_token=self.parts.eos, with_tools=with_tools)

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template writes nothing."""
        return self.turns().end_of_turn

    @property
    def writes_date(self) -> bool:
        """Whether the chat template writes the day."""
        return any("strftime_now" in source for _, source in self.parts.templates)

    @functools.cached_property
    def specials(self) -> _Specials:
        """The special tokens that texts of the data may hold."""
        ends: list[str] = []
        for with_tools in (False, True) if self.parts.templates else ():
            with contextlib.suppress(TokenizerError):
                ends += self.turns(with_tools=with_tools).end_tokens
        return _Specials(self.parts, ends)

    # Rows.

    def expand(self, example: Example) -> list[Example]:
        """The example itself, or with data.multi_turn=split one for each assistant turn that is trained."""
        if self.data.multi_turn == "whole" or isinstance(example, Text):
            return [example]
        turns = [index for index, message in enumerate(example.messages) if is_trained_turn(message)]
        if len(turns) < 2:
            return [example]
        history = [{**message, "train": False} if message["role"] == "assistant" else message
                   for message in example.messages]  # fmt: skip
        return [
            Chat(f"{example.where} turn {number}", (*history[:index], example.messages[index]), example.tools)
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
        drafts = self.drafts(examples)
        return self.tokenised(drafts, self.encodings(drafts))

    def drafts(self, examples: Sequence[Example]) -> list[Draft | BadRow]:
        """Examples as text with the places that are trained: the first of three steps of `render_all`."""
        return [self._draft(example) for example in examples]

    def encodings(self, drafts: Sequence[Draft | BadRow]) -> list[Any]:
        """The second step, the tokenizer's alone: it can run in a thread beside the other two.

        Each is an `Encoding`, or `_Masked` where every word of the text is known.
        """
        plain = [draft for draft in drafts if isinstance(draft, Draft) and draft.is_plain]
        by_words = [self._encoder.masked(draft.text, draft.spans) for draft in plain]
        others = [draft.text for draft, masked in zip(plain, by_words, strict=True) if masked is None]
        encodings = iter(self._backend.encode_batch(others, add_special_tokens=False))
        return [next(encodings) if masked is None else masked for masked in by_words]

    def tokenised(self, drafts: Sequence[Draft | BadRow], encodings: Sequence[Any]) -> list[TokenRow | BadRow]:
        """The third step: drafts with their encodings as tokens and labels."""
        waiting = iter(encodings)
        return [draft if isinstance(draft, BadRow) else self._tokenised(draft, waiting) for draft in drafts]

    def batch(self, examples: Iterable[Example]) -> list[TokenRow | BadRow]:
        """Many examples as rows, cut to the limit."""
        return [item if isinstance(item, BadRow) else self.cut(item) for item in self.render_all(list(examples))]

    def _draft(self, example: Example) -> Draft | BadRow:
        if isinstance(example, Text):
            return Draft(example.where, example.text, [(0, len(example.text))], "document", TEXT)
        messages: Sequence[Message] = example.messages
        try:
            if self.data.system_into_user:
                messages = self._system_into_user(messages, example.tools)
            turns = self._turns_for(example.tools)
            fitted = turns.fitted(messages, example.tools)
            messages = fitted.messages
            special = sum(map(self.specials.count, _texts(messages)))
            if special and self.data.special_tokens_in_text == "fail":
                raise Inexact("a text holds a special token of the tokenizer", self.specials.first(messages))
            hide = special > 0 and self.data.special_tokens_in_text == "plain"
            shown = self.specials.hidden(messages) if hide else messages
            located = turns.locate(shown, example.tools)
            if hide:
                self._check_hidden(located.text.removesuffix(located.added), messages, example.tools)
            spans, untrained, method = self._trained_spans(located, messages)
            answers = [*located.spans.values()] if self.data.loss_on == "all" else spans
            self._check_ends(located.text, answers, example.tools)
        except Inexact as error:
            details = [error.detail]
            if error.reason == REFUSED:
                details.append(self._ways_out(messages, example.tools))
            elif error.reason == OTHER_PROMPT:
                details.insert(0, self._settings_that_help(messages, example.tools))
            return BadRow(example.where, error.reason, "; ".join(filter(None, details)))
        return Draft(
            example.where, located.text, spans, method, CHAT, hide, special, untrained, located.stripped, fitted.notes,
            located.added,
        )  # fmt: skip

    def _check_ends(self, text: str, spans: Sequence[Span], tools: Sequence[Any]) -> None:
        """Raise Inexact where an answer is to be trained that ends with no token at which generation could stop."""
        if self.data.on_missing_end == "train":
            return
        with_tools = bool(tools)
        if with_tools not in self._stops:  # special tokens, and the template's own ends that are one token
            ends = self.turns(with_tools=with_tools).end_tokens
            added = (token for _, token, is_special in self.parts.added if is_special or token in ends)
            self._stops[with_tools] = tuple(token for token in (*added, self.parts.eos) if token)
        for start, end in spans:
            trained = text[start:end].rstrip()
            if not trained.endswith(self._stops[with_tools]):
                shown = one_line(repr(trained[-40:]), limit=60)
                raise Inexact(NO_END_TOKEN, f"{shown}: {WAYS_TO_AN_END}")

    def _check_hidden(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Raise Inexact where the template does not treat a special token in a text as plain text: it may split there,
        escape it, or refuse it."""
        try:
            real = self._turns_for(tools).rendered(messages, tools)
        except RenderError as error:
            raise Inexact(REFUSED, str(error)) from error
        if self.specials.revealed(text) != real:
            raise Inexact(
                "the chat template looks for a special token that stands in a text "
                "(data.special_tokens_in_text=control takes it as the template does)"
            )

    def _ways_out(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The options with which the template takes a row that it refuses, tried on it; empty where none helps."""
        twins = [at for at in range(1, len(messages)) if messages[at]["role"] == messages[at - 1]["role"]]
        merge = system = ""
        if twins and not self.data.merge_consecutive:
            at = twins[0]
            merge = (
                f"messages[{at - 1}] and messages[{at}] are both {messages[at]['role']} turns: "
                "data.merge_consecutive=true joins them"
            )
        if messages[0]["role"] == "system" and not self.data.system_into_user:
            system = "data.system_into_user=true puts the system prompt before the first user turn"
        for tried in ((merge,), (system,), (merge, system)):
            if all(tried) and self._takes(messages, tools, merged=merge in tried, moved=system in tried):
                return " and ".join(tried)
        return ""

    def _settings_that_help(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The setting of the template's, about thinking, with which a row's mask is exact, tried on it; else empty."""
        if self._helped >= ROWS_HELPED:
            return ""
        self._helped += 1
        usual = self._turns_for(tools)
        template = usual.template
        for name in sorted(name for name in template.asks if "think" in name):
            for value in (False, True):
                if self.data.chat_template_kwargs.get(name) is value:
                    continue
                key = (template.source, name, value)
                with contextlib.suppress(Inexact, TokenizerError):
                    if key not in self._switched:
                        self._switched[key] = self._turns_of(
                            template.source, with_tools=usual.with_tools, **{name: value}
                        )
                    turns = self._switched[key]
                    located = turns.locate(turns.fitted(messages, tools).messages, tools)
                    _, untrained, _ = self._trained_spans(located, messages)
                    if not untrained:
                        return f"data.chat_template_kwargs={{{name}: {str(value).lower()}}} makes it exact"
        return ""

    def _takes(self, messages: Sequence[Message], tools: Sequence[Any], *, merged: bool, moved: bool) -> bool:
        """Whether the template renders these messages, merged or with the system prompt moved as options would."""
        with contextlib.suppress(RenderError, Inexact):
            tried = merge_turns(messages) if merged else messages
            turns = self._turns_for(tools)
            tried = self._system_into_user(tried, tools) if moved else tried
            turns.rendered(turns.fitted(tried, tools).messages, tools)
            return True
        return False

    def _system_into_user(self, messages: Sequence[Message], tools: Sequence[Any]) -> Sequence[Message]:
        """The messages with the system prompt before the first user turn, where the template has no place for it."""
        if messages[0]["role"] != "system" or self._turns_for(tools).habits.system == "written":
            return messages
        system, rest = messages[0]["content"], [dict(message) for message in messages[1:]]
        first = next((message for message in rest if message["role"] == "user"), None)
        if first is None:
            raise Inexact("there is no user turn to put the system prompt before")
        first["content"] = f"{system}\n\n{first['content']}"
        first.pop(GIVEN, None)
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

    def _tokenised(self, draft: Draft, encodings: Iterator[Any]) -> TokenRow | BadRow:
        if draft.source == TEXT:
            ids = self.document_ids(Text(draft.where, draft.text))
            return TokenRow(
                draft.where, ids, list(ids), source=TEXT, method="document", text=draft.text, spans=tuple(draft.spans)
            )
        if draft.special:
            encoding, spans, encoded, text, shown = self.specials.encode(draft.text, draft.spans)
        else:
            encoding, spans, encoded, text, shown = next(encodings), draft.spans, draft.text, draft.text, draft.spans
        masked = encoding if isinstance(encoding, _Masked) else _masked(encoding, encoded, spans, self._added)
        merged = masked.inside
        if merged:
            splitting = self.specials.splitting if draft.special else self._encoder.splitting
            split = splitting.masked(encoded, spans)
            if split is None and self.data.on_inexact_mask == "fail":
                return BadRow(draft.where, "a token crosses the edge of an answer", encoding.tokens[masked.at])
            masked = split or masked
        ids, labels = masked.ids, masked.labels
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            return BadRow(draft.where, "two BOS tokens", "the row's text begins with the template's own BOS")
        if trained_tokens(labels) == 0:
            return BadRow(draft.where, "no trained token")
        return TokenRow(
            draft.where, ids, labels, merged=merged, method=draft.method, untrained_turns=draft.untrained,
            stripped_think=draft.stripped, special_in_text=draft.special_count, text=text, spans=tuple(shown),
            notes=draft.notes, added_end=draft.added_end,
        )  # fmt: skip

    def cut(self, row: TokenRow) -> TokenRow | BadRow:
        """The row within max_seq_len, cut as data.truncate says."""
        ids, labels, limit = row.input_ids, row.labels, self.max_seq_len
        over = len(ids) - limit
        if over <= 0:
            return row
        if self.data.truncate == "drop":
            return BadRow(row.where, TOO_LONG, f"{len(ids)} tokens")
        if self.data.truncate == "end":
            ids, labels = ids[:limit], labels[:limit]
        else:  # the last tokens, a BOS at the beginning kept
            kept = 1 if self._bos is not None and ids[0] == self._bos else 0
            ids, labels = [*ids[:kept], *ids[kept + over :]], [*labels[:kept], *labels[kept + over :]]
        left = trained_tokens(labels)
        if left == 0:
            first = next(index for index, label in enumerate(row.labels) if label != IGNORED)
            return BadRow(row.where, LOST_TO_LENGTH, f"{len(row.input_ids)} tokens, the first trained one at {first}")
        return replace(row, input_ids=ids, labels=labels, cut=over, lost=row.trained - left)

    # Documents and prompts.

    def document_ids(self, example: Text) -> list[int]:
        """A document's tokens with what the tokenizer puts around a text, ended by the end-of-text token."""
        return self._document(self._encode_document(example.text))

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of many documents."""
        if self.data.special_tokens_in_text == "plain" and any(map(self.specials.count, texts)):
            return [self._document(self._encode_document(text)) for text in texts]
        return [self._document(encoding) for encoding in self._backend.encode_batch(list(texts))]

    def _encode_document(self, text: str) -> Any:
        if self.data.special_tokens_in_text == "plain" and self.specials.count(text):
            return self.specials.plain.encode(text)
        return self._backend.encode(text)

    def _document(self, encoding: Any) -> list[int]:
        ids = list(encoding.ids)
        end = self.parts.end_of_text
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def encoded(self, text: str) -> Any:
        """The tokenizer's own encoding of a rendered text, with offsets."""
        return self._backend.encode(text, add_special_tokens=False)

    def rendered(self, chat: Chat) -> str:
        """The whole conversation as the model will see it.

        Raises:
            RenderError: the template refuses it.
        """
        turns = self.turns(with_tools=bool(chat.tools))
        try:
            return turns.rendered(turns.fitted(chat.messages, chat.tools).messages, chat.tools)
        except Inexact as error:
            raise RenderError(error.detail) from error

    def prompt_ids(self, chat: Chat) -> tuple[list[int], str] | None:
        """Tokens of everything before the last assistant turn with the generation prompt, and that turn's text.

        None where the chat does not end with an assistant's text, or its prompt cannot be rendered.
        """
        last = chat.messages[-1]
        if last["role"] != "assistant" or not last.get("content"):
            return None
        try:
            messages: Sequence[Message] = chat.messages
            if self.data.system_into_user:
                messages = self._system_into_user(messages, chat.tools)
            turns = self._turns_for(chat.tools)
            fitted = turns.fitted(messages, chat.tools).messages
            text = turns.rendered(fitted[:-1], chat.tools, prompt=True)
        except (RenderError, Inexact):
            return None
        return list(self._backend.encode(text, add_special_tokens=False).ids), str(last["content"])


@dataclass
class Draft:
    """A rendered example that waits for its tokens; `special` says that special tokens of its texts are hidden."""

    where: str
    text: str
    spans: list[Span]
    method: str
    source: str
    special: bool = False
    special_count: int = 0
    untrained: int = 0
    stripped: int = 0
    notes: tuple[str, ...] = ()
    added_end: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer takes its text as it is, in one batch with others."""
        return not self.special and self.source == CHAT


def is_trained_turn(message: Message) -> bool:
    """Whether it is an assistant turn without `train: false`."""
    return message["role"] == "assistant" and message.get("train") is not False


def _texts(messages: Sequence[Message]) -> Iterable[str]:
    """Every text of a conversation that a template may write."""
    for message in messages:
        for key in TEXT_KEYS:
            if isinstance(message.get(key), str):
                yield message[key]
        if len(message) > 2 or not isinstance(message.get("content"), str):
            for key, value in message.items():
                if key not in _NO_TEXT_KEYS and not (key in TEXT_KEYS and isinstance(value, str)):
                    yield from _strings(value)
        for call in message.get("tool_calls") or ():
            yield call["function"]["name"]
            yield from _strings(call["function"]["arguments"])


_NO_TEXT_KEYS = {"role", "id", "tool_call_id", "type", "tool_calls", "train"}


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_strings, value))


class Encoder:
    """A tokenizer's backend that neither pads nor truncates, and a copy of it that splits at edges of answers."""

    def __init__(self, parts: TokenizerParts) -> None:
        from tokenizers import Tokenizer

        self._texts = 0
        self.backend = parts.live or Tokenizer.from_str(parts.state)
        self.backend.no_padding()
        self.backend.no_truncation()

    @functools.cached_property
    def words(self) -> Words | None:
        """The tokens of words seen before; None where this tokenizer has no such words."""
        return words_of(self.backend)

    def masked(self, text: str, spans: Sequence[Span]) -> _Masked | None:
        """Ids and labels of a text whose words are known; None where the tokenizer has to be asked."""
        by_words = self.words.masked(text, spans) if self.words is not None else None
        if by_words is None:
            return None
        ids, trained = by_words
        self._texts += 1
        if self._texts <= ALL_COMPARED or self._texts % ONE_COMPARED_OF == 0:
            expected = self.backend.encode(text, add_special_tokens=False).ids
            assert ids == expected, f"the words of {one_line(text)!r} have other tokens than the text"
        labels = [IGNORED] * len(ids)
        for first, last in trained:
            labels[first:last] = ids[first:last]
        return _Masked(ids, labels, 0)

    @functools.cached_property
    def splitting(self) -> _Splitting:
        """The one that splits at edges of answers."""
        return _Splitting(self.backend)


def _with_shared_vocabulary(backend: Any) -> Any:
    """A second tokenizer of the same parts, whose padding and truncation are its own; None where it would differ."""
    from tokenizers import Tokenizer

    # the vocabulary is shared: parsing it again from JSON would cost time and memory
    copy = Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(copy, name, part)
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([token for _, token in sorted(added.items())])
    copy.encode_special_tokens = backend.encode_special_tokens
    is_same = copy.get_added_tokens_decoder() == added and copy.get_vocab_size() == backend.get_vocab_size()
    return copy if is_same else None


def end_of_text_id(tokenizer: Any) -> int | None:
    """The token between documents: an end-of-text token of the vocabulary, else the tokenizer's eos."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    eos: int | None = tokenizer.eos_token_id
    return next((vocabulary[token] for token in END_OF_TEXT_TOKENS if token in vocabulary), eos)


@dataclass(frozen=True)
class _Masked:
    """Ids and labels of shape [T], and how many edges of spans stand inside a token, the last of them at `at`."""

    ids: list[int]
    labels: list[int]
    inside: int
    at: int = 0


def _masked(encoding: Any, text: str, spans: Sequence[Span], added: frozenset[int]) -> _Masked:
    """Labels of an encoding: a token counts whose characters all lie in one span.

    An added token may take white space along that follows it (Phi-3's end of turn does); it counts all the same.
    """
    ids = list(encoding.ids)
    labels = [IGNORED] * len(ids)
    inside = at = 0
    for start, end in spans:
        if end <= start:
            continue
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None:  # a tokenizer that leaves characters out
            offsets = encoding.offsets
            edges_inside = sum(begin < edge < stop for begin, stop in offsets for span in spans for edge in span)
            return _Masked(ids, label_spans(ids, offsets, spans), edges_inside)
        if encoding.token_to_chars(first)[0] < start:
            inside, at, first = inside + 1, first, first + 1
        beyond = text[end : encoding.token_to_chars(last)[1]]
        if beyond and (beyond.strip() or ids[last] not in added):
            inside, at, last = inside + 1, last, last - 1
        else:  # a character may take several tokens
            place = encoding.token_to_chars(last)
            while last + 1 < len(ids) and encoding.token_to_chars(last + 1) == place:
                last += 1
        labels[first : last + 1] = ids[first : last + 1]
    return _Masked(ids, labels, inside, at)


class _Splitting:
    """A tokenizer that starts again at every edge of a span, as generation does after its prompt.

    Tokens may reach over the end of a prompt: ` answer` after `Assistant: ` is one token. A model that is prompted
    never sees that token; it sees the tokens of the prompt and adds its own.
    """

    _EDGE = "\U0010e002"

    def __init__(self, backend: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._backend = backend
        self._copy = Tokenizer.from_str(backend.to_str())
        self._copy.add_special_tokens([AddedToken(self._EDGE, normalized=False, special=True)])
        self._edge = self._copy.token_to_id(self._EDGE)

    def masked(self, text: str, spans: Sequence[Span]) -> _Masked | None:
        """The text's tokens, split at the spans; None where the tokenizer writes other tokens after a split."""
        edges = [0, *itertools.chain.from_iterable(spans), len(text)]
        parts = [text[begin:end] for begin, end in itertools.pairwise(edges)]
        encoding = self._copy.encode(self._EDGE.join(parts), add_special_tokens=False)
        ids: list[int] = []
        labels: list[int] = []
        part = 0
        for token in encoding.ids:
            if token == self._edge:
                part += 1
                continue
            ids.append(token)
            labels.append(token if part % 2 else IGNORED)
        whole = self._backend.encode(text, add_special_tokens=False).ids
        same = self._backend.decode(ids, skip_special_tokens=False) == self._backend.decode(
            whole, skip_special_tokens=False
        )
        return _Masked(ids, labels, 0) if same and part == 2 * len(spans) else None


def label_spans(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Labels of shape [T]: a token's id where all its characters lie in one span, else `IGNORED`."""
    labels, at = [IGNORED] * len(ids), 0
    for position, (start, end) in enumerate(offsets):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at < len(spans) and end > start >= spans[at][0] and end <= spans[at][1]:
            labels[position] = ids[position]
    return labels


_HIDDEN_BASE = 0xF0000
"""First of the private-use characters that stand for special tokens of the data's texts while a template runs."""


class _Specials:
    """Special tokens inside texts of the data, and a way to tokenise them as the plain text that they are.

    While the template runs, each one is a private-use character. Then the tokens that the template wrote get names
    that no text has, in a copy of the tokenizer that knows them by these names; what the data wrote is put back, and
    is no special token there.
    """

    def __init__(self, parts: TokenizerParts, ends: Collection[str]) -> None:
        self._parts = parts
        self._ids = {text: number for number, text, _ in parts.added}
        named = {text for _, text, is_special in parts.added if is_special or text in ends}
        self.tokens = sorted((token for token in named if token.strip()), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")
        self._number = {token: number for number, token in enumerate(self.tokens)}
        self._hidden = f"[{chr(_HIDDEN_BASE)}-{chr(_HIDDEN_BASE + max(0, len(self.tokens) - 1))}]"

    def count(self, text: str) -> int:
        """Special tokens in a text."""
        return len(self._pattern.findall(text)) if self._pattern.search(text) else 0

    def first(self, messages: Sequence[Message]) -> str:
        """Where the first one stands, for a message."""
        for index, message in enumerate(messages):
            for text in _texts([message]):
                match = self._pattern.search(text)
                if match:
                    return f"messages[{index}]: {one_line(match.group())}"
        return ""

    def hidden(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with special tokens as private-use characters."""
        text = json.dumps(messages, ensure_ascii=False)
        if any(_HIDDEN_BASE <= ord(char) < _HIDDEN_BASE + len(self.tokens) for char in text):
            raise Inexact("a text holds special tokens and private-use characters; take one of them out")

        def hide(text: str) -> str:
            return self._pattern.sub(lambda match: chr(_HIDDEN_BASE + self._number[match.group()]), text)

        hidden: list[Message] = _map_texts(list(messages), hide)
        return hidden

    def revealed(self, text: str) -> str:
        """A rendered text with hidden tokens as it reads."""
        return re.sub(self._hidden, lambda match: self.tokens[ord(match.group()) - _HIDDEN_BASE], text)

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[Any, list[Span], str, str, list[Span]]:
        """A rendered text with hidden tokens: its encoding, the spans in the text that was encoded, that text, and the
        text and spans as a person reads them."""
        encoded, shown = _Spliced(), _Spliced()
        at = 0
        for match in re.finditer(f"{self._pattern.pattern}|{self._hidden}", text):
            between, token = text[at : match.start()], match.group()
            written = token if token in self._number else self.tokens[ord(token) - _HIDDEN_BASE]
            encoded.add(between, self._name(token) if token in self._number else written, len(token))
            shown.add(between, written, len(token))
            at = match.end()
        for spliced in (encoded, shown):
            spliced.add(text[at:], "", 0)
        encoding = self.plain.encode(encoded.text, add_special_tokens=False)
        shown_spans = [shown.moved(span) for span in spans]
        return encoding, [encoded.moved(span) for span in spans], encoded.text, shown.text, shown_spans

    @functools.cached_property
    def splitting(self) -> _Splitting:
        """The copy that splits at edges of answers."""
        return _Splitting(self.plain)

    def _name(self, token: str) -> str:
        return f"\U0010e000{self._number[token]}\U0010e001"

    @functools.cached_property
    def plain(self) -> Any:
        """The tokenizer with its special tokens under names that no text has; ids stay.

        Raises:
            TokenizerError: renamed, a token has another id.
        """
        from tokenizers import Tokenizer

        state = json.loads(self._parts.state)
        names = {token: self._name(token) for token in self.tokens}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
        elif isinstance(vocabulary, list):  # Unigram: token and score
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        renamed = _rename_strings(state.get("post_processor"), names)
        state["post_processor"], state["padding"], state["truncation"] = renamed, None, None
        copy = Tokenizer.from_str(json.dumps(state))
        wrong = [token for token, name in names.items() if copy.token_to_id(name) != self._ids[token]]
        if wrong:
            raise TokenizerError(
                f"this tokenizer cannot take {one_line(wrong[0])} as plain text; set "
                "data.special_tokens_in_text=control or fail"
            )
        return copy


class _Spliced:
    """A text put together from parts of another one, and where its characters went."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._moves: list[tuple[int, int]] = [(0, 0)]
        """Characters of the old text, and by how much what follows them moved."""
        self._old = self._shift = 0

    def add(self, between: str, instead: str, old_length: int) -> None:
        """A part that stays, and one that takes the place of `old_length` characters."""
        self._parts += (between, instead)
        self._old += len(between) + old_length
        self._shift += len(instead) - old_length
        self._moves.append((self._old, self._shift))

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self._parts)

    def moved(self, span: Span) -> Span:
        """The span in the new text; its ends must not stand inside a replaced part."""
        return self._move(span[0]), self._move(span[1])

    def _move(self, position: int) -> int:
        shift = 0
        for old, moved in self._moves:
            if old > position:
                break
            shift = moved
        return position + shift


def _rename_strings(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {names.get(key, key): _rename_strings(item, names) for key, item in value.items()}
    return [_rename_strings(item, names) for item in value] if isinstance(value, list) else value


def _map_texts(value: Any, change: Any) -> Any:
    """A copy with every text changed; keys, roles and ids stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        fixed = ("role", "id", "tool_call_id", "type")
        return {key: item if key in fixed else _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value


def show_row(row: TokenRow, tokenizer: Any, *, limit: int = 1_200) -> str:
    """One row as text with its trained parts in `[[…]]`, special tokens visible, cut in the middle when long."""
    pieces: list[str] = []
    start = 0
    for end in range(1, len(row.labels) + 1):
        if end < len(row.labels) and (row.labels[end] == IGNORED) == (row.labels[start] == IGNORED):
            continue
        text = str(tokenizer.decode(row.input_ids[start:end], skip_special_tokens=False))
        pieces.append(text if row.labels[start] == IGNORED else f"[[{text}]]")
        start = end
    shown = "".join(pieces)
    return shown if len(shown) <= limit else f"{shown[: limit // 2]} … {shown[-limit // 2 :]}"
