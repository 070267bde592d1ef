"""Special tokens that stand in texts of the data: found, hidden from the chat template, and tokenised as plain text."""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sft_play.data.masks.token_row import InexactMaskError, Span
from sft_play.data.masks.tokenizer import SplittingTokenizer, TokenizerParts
from sft_play.data.sources.messages import Message, iter_texts, map_texts
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# First of the private-use characters that stand for special tokens of the data's texts while a template runs.
_HIDDEN_BASE = 0xF0000


class SpecialTokenGuard:
    """Special tokens inside texts of the data, tokenised as plain text. While the template runs, each is a private-use
    character. Then the tokens that the template wrote get names that no text has, in a copy of the tokenizer that knows
    them so; what the data wrote is put back, and is no special token there."""

    def __init__(self, parts: TokenizerParts, end_tokens: Collection[str]) -> None:
        self._parts = parts
        self._ids = {text: token_id for token_id, text, _ in parts.added_tokens}
        candidates = {text for _, text, is_special in parts.added_tokens if is_special or text in end_tokens}
        self.tokens = sorted((token for token in candidates if token.strip()), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")
        self._indices = {token: number for number, token in enumerate(self.tokens)}
        self._hidden_pattern = f"[{chr(_HIDDEN_BASE)}-{chr(_HIDDEN_BASE + max(0, len(self.tokens) - 1))}]"

    def count(self, text: str) -> int:
        """Special tokens in a text."""
        return len(self._pattern.findall(text)) if self._pattern.search(text) else 0

    def first_token(self, messages: Sequence[Message]) -> str:
        """The first one in the texts of messages, for a message."""
        matches = (match.group() for text in conversation_texts(messages) if (match := self._pattern.search(text)))
        return one_line(next(matches, ""))

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """Replace special tokens in messages by private-use characters, so that the template does not see them."""
        text = json.dumps(messages, ensure_ascii=False)
        if any(_HIDDEN_BASE <= ord(char) < _HIDDEN_BASE + len(self.tokens) for char in text):
            raise InexactMaskError("a text holds special tokens and private-use characters; take one of them out")

        def replace_tokens(text: str) -> str:
            return self._pattern.sub(lambda match: chr(_HIDDEN_BASE + self._indices[match.group()]), text)

        hidden_messages: list[Message] = map_texts(
            list(messages), replace_tokens, skipped_keys=("role", "id", "tool_call_id", "type")
        )
        return hidden_messages

    def reveal(self, text: str) -> str:
        """Undo `hide` in a rendered text: put the special tokens back as their text."""
        return re.sub(self._hidden_pattern, lambda match: self.tokens[ord(match.group()) - _HIDDEN_BASE], text)

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[Any, tuple[Span, ...], str, str, tuple[Span, ...]]:
        """Encode a rendered text with hidden tokens. Returns the encoding, the spans in the encoded text, that text,
        and the text and spans as a person reads them."""
        encoder_replacements: list[Replacement] = []
        reader_replacements: list[Replacement] = []
        # A token found by its name was written by the template; one found by its private-use character, by the data.
        for match in re.finditer(f"{self._pattern.pattern}|{self._hidden_pattern}", text):
            token, is_from_template = match.group(), match.group() in self._indices
            token_text = token if is_from_template else self.tokens[ord(token) - _HIDDEN_BASE]
            encoder_replacements.append((*match.span(), self._hidden_name(token) if is_from_template else token_text))
            reader_replacements.append((*match.span(), token_text))
        (encoder_text, encoder_spans), (reader_text, reader_spans) = (
            splice(text, encoder_replacements, spans),
            splice(text, reader_replacements, spans),
        )
        encoding = self.plain_tokenizer.encode(encoder_text, add_special_tokens=False)
        return encoding, encoder_spans, encoder_text, reader_text, reader_spans

    @functools.cached_property
    def splitting_tokenizer(self) -> SplittingTokenizer:
        """The copy that splits at edges of answers."""
        return SplittingTokenizer(self.plain_tokenizer)

    def _hidden_name(self, token: str) -> str:
        return f"\U0010e000{self._indices[token]}\U0010e001"

    @functools.cached_property
    def plain_tokenizer(self) -> Any:
        """The tokenizer with its special tokens under names that no text has; raises TokenizerError where ids do not
        stay."""
        from tokenizers import Tokenizer

        # Renamed wherever tokenizer.json spells them, so that the ids stay and no text has a special token's name.
        state = json.loads(self._parts.backend_json)
        names = {token: self._hidden_name(token) for token in self.tokens}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
        elif isinstance(vocabulary, list):  # Unigram: token and score
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if isinstance(model.get("merges"), list):
            # An ordinary merge may spell a special token (`<s` and `>`). As plain text it is its parts: with the merge
            # it would be the token itself again.
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_merge_texts(merge))]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        post_processor = _rename_strings(state.get("post_processor"), names)
        state["post_processor"], state["padding"], state["truncation"] = post_processor, None, None
        copy = Tokenizer.from_str(json.dumps(state))
        changed_tokens = [token for token, name in names.items() if copy.token_to_id(name) != self._ids[token]]
        if changed_tokens:
            raise TokenizerError(
                f"this tokenizer cannot take {one_line(changed_tokens[0])} as plain text; set "
                "data.special_tokens_in_text=control or fail"
            )
        return copy


def _merge_texts(merge: Any) -> tuple[str, ...]:
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return left, right, left + right


def conversation_texts(messages: Sequence[Message]) -> Iterable[str]:
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
Replacement = tuple[int, int, str]


def splice(text: str, replacements: Sequence[Replacement], spans: Sequence[Span]) -> tuple[str, tuple[Span, ...]]:
    """Replace parts of a text and shift the spans to fit; no span may begin or end inside a replaced part."""
    pieces: list[str] = []
    ends, shifts, offset = [], [0], 0
    for start, end, replacement in replacements:
        pieces += (text[offset:start], replacement)
        ends.append(end)
        shifts.append(shifts[-1] + len(replacement) - (end - start))
        offset = end
    shifted_spans = ((edge + shifts[bisect.bisect_right(ends, edge)] for edge in span) for span in spans)
    return "".join([*pieces, text[offset:]]), tuple((start, end) for start, end in shifted_spans)


def _rename_strings(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {names.get(key, key): _rename_strings(item, names) for key, item in value.items()}
    return [_rename_strings(item, names) for item in value] if isinstance(value, list) else value
