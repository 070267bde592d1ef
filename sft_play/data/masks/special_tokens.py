"""Special tokens that stand in texts of the data: found, hidden from the chat template, and tokenised as plain text."""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sft_play.data.masks.token_row import Inexact, Span
from sft_play.data.masks.tokenizer import Splitting, TokenizerParts
from sft_play.data.sources.messages import Message, iter_texts, map_texts
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# First of the private-use characters that stand for special tokens of the data's texts while a template runs.
_HIDDEN_BASE = 0xF0000


class Specials:
    """Special tokens inside texts of the data, tokenised as plain text. While the template runs, each is a private-use
    character. Then the tokens that the template wrote get names that no text has, in a copy of the tokenizer that knows
    them so; what the data wrote is put back, and is no special token there."""

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
        """The first one in the texts of messages, for a message."""
        found = (match.group() for text in texts_of(messages) if (match := self._pattern.search(text)))
        return one_line(next(found, ""))

    def hidden(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with special tokens as private-use characters."""
        text = json.dumps(messages, ensure_ascii=False)
        if any(_HIDDEN_BASE <= ord(char) < _HIDDEN_BASE + len(self.tokens) for char in text):
            raise Inexact("a text holds special tokens and private-use characters; take one of them out")

        def hide(text: str) -> str:
            return self._pattern.sub(lambda match: chr(_HIDDEN_BASE + self._number[match.group()]), text)

        hidden: list[Message] = map_texts(list(messages), hide, skipped_keys=("role", "id", "tool_call_id", "type"))
        return hidden

    def revealed(self, text: str) -> str:
        """A rendered text with hidden tokens as it reads."""
        return re.sub(self._hidden, lambda match: self.tokens[ord(match.group()) - _HIDDEN_BASE], text)

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[Any, tuple[Span, ...], str, str, tuple[Span, ...]]:
        """A rendered text with hidden tokens: its encoding, the spans in the text that was encoded, that text, and the
        text and spans as a person reads them."""
        named: list[Replaced] = []
        plain: list[Replaced] = []
        # A token found by its name was written by the template; one found by its private-use character, by the data.
        for match in re.finditer(f"{self._pattern.pattern}|{self._hidden}", text):
            token, is_templates = match.group(), match.group() in self._number
            written = token if is_templates else self.tokens[ord(token) - _HIDDEN_BASE]
            named.append((*match.span(), self._name(token) if is_templates else written))
            plain.append((*match.span(), written))
        (encoded, encoded_spans), (shown, shown_spans) = spliced(text, named, spans), spliced(text, plain, spans)
        encoding = self.plain.encode(encoded, add_special_tokens=False)
        return encoding, encoded_spans, encoded, shown, shown_spans

    @functools.cached_property
    def splitting(self) -> Splitting:
        """The copy that splits at edges of answers."""
        return Splitting(self.plain)

    def _name(self, token: str) -> str:
        return f"\U0010e000{self._number[token]}\U0010e001"

    @functools.cached_property
    def plain(self) -> Any:
        """The tokenizer with its special tokens under names that no text has; raises TokenizerError where ids do not
        stay."""
        from tokenizers import Tokenizer

        # Renamed wherever tokenizer.json spells them, so that the ids stay and no text has a special token's name.
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
        if isinstance(model.get("merges"), list):
            # An ordinary merge may spell a special token (`<s` and `>`). As plain text it is its parts: with the merge
            # it would be the token itself again.
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_spelled_by(merge))]
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


def _spelled_by(merge: Any) -> tuple[str, ...]:
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return left, right, left + right


def texts_of(messages: Sequence[Message]) -> Iterable[str]:
    """Every text of a conversation that a template may write."""
    for message in messages:
        for key, value in message.items():
            if key not in _NO_TEXT_KEYS:
                yield from iter_texts(value)
        for call in message.get("tool_calls") or ():
            yield call["function"]["name"]
            yield from iter_texts(call["function"]["arguments"])


_NO_TEXT_KEYS = {"role", "id", "tool_call_id", "type", "tool_calls", "train"}


# Characters [start, end) of a text, and what is put in their place.
Replaced = tuple[int, int, str]


def spliced(text: str, parts: Sequence[Replaced], spans: Sequence[Span]) -> tuple[str, tuple[Span, ...]]:
    """The text with these parts replaced, and the spans in it; none of their ends stands inside a replaced part."""
    pieces: list[str] = []
    ends, shifts, at = [], [0], 0
    for start, end, instead in parts:
        pieces += (text[at:start], instead)
        ends.append(end)
        shifts.append(shifts[-1] + len(instead) - (end - start))
        at = end
    moved = ((edge + shifts[bisect.bisect_right(ends, edge)] for edge in span) for span in spans)
    return "".join([*pieces, text[at:]]), tuple((start, end) for start, end in moved)


def _rename_strings(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {names.get(key, key): _rename_strings(item, names) for key, item in value.items()}
    return [_rename_strings(item, names) for item in value] if isinstance(value, list) else value
