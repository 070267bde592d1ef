"""Chats → tokens with a loss mask, through the tokenizer's own chat template.

How trained spans are found: an assistant turn starts where the rendered prefix before it, with the generation
prompt, ends; it ends after the turn's end marker, which is learned from the template with a sentinel. Both are
checked on every row: the prefix must really be one, the turn's text must stand inside the span, and at least one
token must be trained. What cannot be found exactly is a bad row with its reason, never a guess.

Shape letters: T tokens of one row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from sft_play.data.files import BadRow
from sft_play.data.formats import Chat, Example, Message, Text
from sft_play.errors import TokenizerError
from sft_play.log import one_line

IGNORED = -100
"""The label of a token that is not trained (torch's and transformers' convention)."""

LossOn = Literal["assistant", "completion", "all"]
Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""

_SENTINEL = "sentinel7q3x"


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer (transformers' fast tokenizers have it)."""

    all_special_ids: Sequence[int]
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    is_fast: bool

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class TokenRow:
    """One row of the data set: ids and labels of shape [T]; `lost` trained tokens fell to the length limit, and
    `merged` answers begin inside a token of their prompt, which is not trained."""

    where: str
    input_ids: list[int]
    labels: list[int]
    cut: int = 0
    lost: int = 0
    merged: int = 0

    @property
    def trained(self) -> int:
        """Tokens whose label counts; the first token of a row is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])


class Renderer:
    """Renders examples with one tokenizer; learns the template's end-of-turn marker once."""

    def __init__(self, tokenizer: Any, *, loss_on: LossOn, max_seq_len: int) -> None:
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"the tokenizer is {type(tokenizer).__name__}, which cannot say which characters a token stands for; "
                "a loss mask needs a fast one (a tokenizer.json in the model's folder)"
            )
        self._tokenizer: Tokenizer = tokenizer
        self._loss_on = loss_on
        self._max_seq_len = max_seq_len
        self._marker: str | None = None
        self._end_of_text = end_of_text_id(tokenizer)

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template writes nothing.

        Raises:
            TokenizerError: the template drops or rewrites an assistant's plain answer.
        """
        if self._marker is None:
            self._marker = self._learn_end_of_turn()
        return self._marker

    def _learn_end_of_turn(self) -> str:
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            text = self._render(turns)
        except Exception as error:  # jinja2 and the templates' own raise_exception()
            raise TokenizerError(
                f"the chat template cannot render a question and an answer: {one_line(str(error))}"
            ) from error
        _, found, tail = text.partition(_SENTINEL)
        if not found:
            raise TokenizerError("the chat template drops an assistant's answer; give data.chat_template another one")
        encoded = self._tokenizer(tail, add_special_tokens=False, return_offsets_mapping=True)
        special = set(self._tokenizer.all_special_ids) | self._added_ids()
        for token, (_, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token in special:
                return tail[:end]
        stripped = tail.rstrip()
        return tail[: len(stripped)]

    def _added_ids(self) -> set[int]:
        return set(getattr(self._tokenizer, "added_tokens_decoder", {}))

    def _render(self, messages: Sequence[Message], *, tools: Sequence[Any] = (), prompt: bool = False) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def rendered(self, chat: Chat) -> str:
        """The whole conversation as the model will see it."""
        return self._render(chat.messages, tools=chat.tools)

    def prompt_ids(self, chat: Chat) -> tuple[list[int], str] | None:
        """Tokens of everything before the last assistant turn with the generation prompt, and that turn's text.

        None where the chat does not end with an assistant's text.
        """
        last = chat.messages[-1]
        if last["role"] != "assistant" or not last.get("content"):
            return None
        text = self._render(chat.messages[:-1], tools=chat.tools, prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]), str(last["content"])

    def __call__(self, example: Example) -> TokenRow | BadRow:
        """The example's tokens and labels, cut to the limit; a bad row where the mask cannot be exact."""
        if isinstance(example, Text):
            return self._plain(example)
        try:
            text, spans = self._spans(example)
        except _Inexact as error:
            return BadRow(example.where, error.reason, error.detail)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoded["input_ids"])
        offsets = encoded["offset_mapping"]
        labels = label_spans(ids, offsets, spans)
        merged = sum(any(start < begin < end for start, end in offsets) for begin, _ in spans)
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            return BadRow(example.where, "two BOS tokens", "the row's text begins with the template's own BOS")
        row = self._cut(example.where, ids, labels)
        return row if isinstance(row, BadRow) else replace(row, merged=merged)

    def document_ids(self, example: Text) -> list[int]:
        """A document's tokens with what the tokenizer puts around a text, ended by the end-of-text token."""
        ids = list(self._tokenizer(example.text, add_special_tokens=True, verbose=False)["input_ids"])
        end = self._end_of_text
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def _plain(self, example: Text) -> TokenRow | BadRow:
        ids = self.document_ids(example)
        return self._cut(example.where, ids, list(ids))

    def _cut(self, where: str, ids: list[int], labels: list[int]) -> TokenRow | BadRow:
        limit = self._max_seq_len
        whole = TokenRow(where, ids, labels)
        if whole.trained == 0:
            return BadRow(where, "no trained token")
        row = TokenRow(where, ids[:limit], labels[:limit], cut=max(0, len(ids) - limit))
        if row.trained == 0:
            return BadRow(where, LOST_TO_LENGTH, f"{len(ids)} tokens, the first trained one beyond {limit}")
        return TokenRow(where, row.input_ids, row.labels, row.cut, whole.trained - row.trained)

    def _spans(self, chat: Chat) -> tuple[str, list[Span]]:
        """The rendered text and its trained spans."""
        try:
            text = self.rendered(chat)
        except Exception as error:  # jinja2 and the templates' own raise_exception()
            raise _Inexact("the chat template refuses the row", one_line(str(error))) from error
        if self._loss_on == "all":
            return text, [(0, len(text))]
        _check_context(chat, text)
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = turns[-1:] if self._loss_on == "completion" else turns
        starts = [self._start(chat, text, index) for index in wanted]
        limits = [*starts[1:], len(text)]
        spans = [
            self._end(chat, index, text, start, limit)
            for index, start, limit in zip(wanted, starts, limits, strict=True)
        ]
        return text, spans

    def _start(self, chat: Chat, text: str, index: int) -> int:
        """Where generation would begin for the turn at `index`."""
        before = chat.messages[:index]
        try:
            prefix = self._render(before, tools=chat.tools, prompt=True)
        except Exception as error:  # templates that need a user turn first
            raise _Inexact("the chat template cannot render the prompt of a turn", one_line(str(error))) from error
        if text.startswith(prefix):
            return len(prefix)
        raise _Inexact(
            "the chat template renders a turn's prompt differently from the conversation",
            f"messages[{index}]; data.loss_on=completion trains the last turn only, all trains every token",
        )

    def _end(self, chat: Chat, index: int, text: str, start: int, limit: int) -> Span:
        """The span of a turn: from `start` through its first end marker after its text."""
        message = chat.messages[index]
        content = str(message.get("content") or "").strip()
        position = start
        if content:
            found = text.find(content, start, limit)
            if found < 0:
                raise _Inexact("the chat template drops or rewrites an assistant's text", f"messages[{index}]")
            position = found + len(content)
        if message.get("tool_calls"):
            position = max(position, _after_calls(message["tool_calls"], text, start, limit, index))
        marker = self.end_of_turn
        if not marker:
            return start, self._end_without_marker(chat, index, text, position)
        end = text.find(marker, position, limit)
        if end < 0:
            raise _Inexact(f"a turn does not end with {one_line(marker)}", f"messages[{index}]")
        end += len(marker)
        self._check_nothing_follows(chat, index, text, end)
        return start, end

    def _check_nothing_follows(self, chat: Chat, index: int, text: str, end: int) -> None:
        """Raises where more of the turn stands behind its first end marker: its text or its calls hold one."""
        if not chat.messages[index].get("tool_calls"):
            return
        try:
            prefix = self._render(chat.messages[: index + 1], tools=chat.tools)
        except Exception:  # a template that cannot render the conversation up to a call says nothing about its end
            return
        if text.startswith(prefix) and text[end : len(prefix)].strip():
            raise _Inexact("a turn holds its own end marker", f"messages[{index}]")

    def _end_without_marker(self, chat: Chat, index: int, text: str, position: int) -> int:
        """Where a turn ends whose template writes nothing behind it: with the conversation up to it, if that is a
        prefix of the whole."""
        prefix = self._render(chat.messages[: index + 1], tools=chat.tools)
        if text.startswith(prefix) and len(prefix) >= position:
            return len(prefix)
        raise _Inexact(
            "the chat template ends turns with nothing, so where one ends cannot be told", f"messages[{index}]"
        )


def _check_context(chat: Chat, text: str) -> None:
    """Raises where the template drops what the model should answer to: a system, user or tool turn's text."""
    for index, message in enumerate(chat.messages):
        content = str(message.get("content") or "").strip()
        if message["role"] == "assistant" or not content:
            continue
        if content not in text and json.dumps(content)[1:-1] not in text and not _stands_as_json(content, text):
            raise _Inexact(f"the chat template drops a {message['role']} turn's text", f"messages[{index}]")


def _stands_as_json(content: str, text: str) -> bool:
    """Whether a tool's JSON answer stands in the text, written with other spaces."""
    try:
        value = json.loads(content)
    except ValueError:
        return False
    plain = "".join(text.split())
    return "".join(content.split()) in plain or "".join(json.dumps(value).split()) in plain


def _after_calls(calls: Sequence[Any], text: str, start: int, limit: int, index: int) -> int:
    """The position after the last function name of a turn's calls; raises where one was not rendered."""
    position = start
    for call in calls:
        name = str(call["function"]["name"])
        found = text.find(name, position, limit)
        if found < 0:
            raise _Inexact("the chat template drops a tool call", f"messages[{index}]: {one_line(name)}")
        position = found + len(name)
    return position


END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a document; chat models often have another one, their end of turn, as `eos_token`."""

LOST_TO_LENGTH = "every trained token lies beyond max_seq_len"


def end_of_text_id(tokenizer: Any) -> int | None:
    """The token between documents: an end-of-text token of the vocabulary, else the tokenizer's eos."""
    known = tokenizer.get_vocab()
    return next((known[token] for token in END_OF_TEXT_TOKENS if token in known), tokenizer.eos_token_id)


class _Inexact(ValueError):
    """A mask that cannot be found exactly: the reason rows are counted by, and the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def label_spans(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Labels of shape [T]: a token's id where all its characters lie in one span, else `IGNORED`."""
    labels, at = [IGNORED] * len(ids), 0
    for position, (start, end) in enumerate(offsets):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at < len(spans) and end > start >= spans[at][0] and end <= spans[at][1]:
            labels[position] = ids[position]
    return labels


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
