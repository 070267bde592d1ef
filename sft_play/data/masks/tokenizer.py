"""Tokenise texts with their trained spans into ids and labels; keep special tokens in the data
plain text."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.data.masks.token_row import IGNORED, InexactMaskError, Span
from sft_play.data.sources.messages import Message, iter_texts, map_texts
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# Special tokens in the texts of the data: found, hidden from the chat template, and tokenised as
# plain text.

# First of the private-use characters that stand for special tokens of the data's texts while a
# template runs.
_HIDDEN_BASE = 0xF0000


class SpecialTokenGuard:
    """Special tokens inside texts of the data, tokenised as plain text. While the template runs,
    each is a private-use character. Then the tokens that the template wrote get names that no text
    has, in a copy of the tokenizer that knows them so; what the data wrote is put back, and is no
    special token there."""

    def __init__(self, parts: TokenizerParts, end_tokens: Collection[str]) -> None:
        self._parts = parts
        self._ids = {text: token_id for token_id, text, _ in parts.added_tokens}
        candidates = {
            text for _, text, is_special in parts.added_tokens if is_special or text in end_tokens
        }
        self.tokens = sorted(
            (token for token in candidates if token.strip()), key=lambda token: (-len(token), token)
        )
        self._pattern = re.compile("|".join(map(re.escape, self.tokens)) or r"(?!)")
        self._indices = {token: number for number, token in enumerate(self.tokens)}
        self._hidden_pattern = (
            f"[{chr(_HIDDEN_BASE)}-{chr(_HIDDEN_BASE + max(0, len(self.tokens) - 1))}]"
        )

    def find(self, *texts: str) -> list[str]:
        """Special tokens in texts, in order."""
        return [token for text in texts for token in self._pattern.findall(text)]

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """Replace special tokens in messages by private-use characters, so that the template does
        not see them."""
        text = json.dumps(messages, ensure_ascii=False)
        if any(_HIDDEN_BASE <= ord(char) < _HIDDEN_BASE + len(self.tokens) for char in text):
            raise InexactMaskError(
                "a text holds special tokens and private-use characters; take one of them out"
            )

        def replace_tokens(text: str) -> str:
            return self._pattern.sub(
                lambda match: chr(_HIDDEN_BASE + self._indices[match.group()]), text
            )

        return list(
            map_texts(
                list(messages), replace_tokens, skipped_keys=("role", "id", "tool_call_id", "type")
            )
        )

    def reveal(self, text: str) -> str:
        """Undo `hide` in a rendered text: put the special tokens back as their text."""
        return re.sub(
            self._hidden_pattern, lambda match: self.tokens[ord(match.group()) - _HIDDEN_BASE], text
        )

    def encode(
        self, text: str, spans: Sequence[Span]
    ) -> tuple[Any, tuple[Span, ...], str, str, tuple[Span, ...]]:
        """Encode a rendered text with hidden tokens. Returns the encoding, the spans in the encoded
        text, that text, and the text and spans as a person reads them."""
        encoder_replacements: list[Replacement] = []
        reader_replacements: list[Replacement] = []
        # A token found by its name was written by the template; one found by its private-use
        # character, by the data.
        for match in re.finditer(f"{self._pattern.pattern}|{self._hidden_pattern}", text):
            token, is_from_template = match.group(), match.group() in self._indices
            token_text = token if is_from_template else self.tokens[ord(token) - _HIDDEN_BASE]
            encoder_replacements.append(
                (*match.span(), self._hidden_name(token) if is_from_template else token_text)
            )
            reader_replacements.append((*match.span(), token_text))
        (encoder_text, encoder_spans), (reader_text, reader_spans) = (
            splice(text, encoder_replacements, spans),
            splice(text, reader_replacements, spans),
        )
        return (
            self.plain_tokenizer.encode(encoder_text, add_special_tokens=False),
            encoder_spans,
            encoder_text,
            reader_text,
            reader_spans,
        )

    def _hidden_name(self, token: str) -> str:
        return f"\U0010e000{self._indices[token]}\U0010e001"

    @functools.cached_property
    def plain_tokenizer(self) -> Any:
        """The tokenizer with its special tokens under names that no text has; raises TokenizerError
        where ids do not stay."""
        # Renamed wherever tokenizer.json spells them, so that the ids stay and no text has a
        # special token's name.
        state = json.loads(self._parts.backend_json)
        names = {token: self._hidden_name(token) for token in self.tokens}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {
                names.get(token, token): token_id for token, token_id in vocabulary.items()
            }
        elif isinstance(vocabulary, list):  # Unigram: token and score
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if isinstance(model.get("merges"), list):
            # An ordinary merge may spell a special token (`<s` and `>`). As plain text it is its
            # parts: with the merge it would be the token itself again.
            model["merges"] = [
                merge for merge in model["merges"] if names.keys().isdisjoint(_merge_texts(merge))
            ]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        state["post_processor"] = _rename_strings(state.get("post_processor"), names)
        copy = load_backend(json.dumps(state))
        changed_tokens = [
            token for token, name in names.items() if copy.token_to_id(name) != self._ids[token]
        ]
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


def splice(
    text: str, replacements: Sequence[Replacement], spans: Sequence[Span]
) -> tuple[str, tuple[Span, ...]]:
    """Replace parts of a text and shift the spans to fit; no span may begin or end inside a
    replaced part."""
    pieces: list[str] = []
    ends, shifts, offset = [], [0], 0
    for start, end, replacement in replacements:
        pieces += (text[offset:start], replacement)
        ends.append(end)
        shifts.append(shifts[-1] + len(replacement) - (end - start))
        offset = end
    shifted_spans = (
        (edge + shifts[bisect.bisect_right(ends, edge)] for edge in span) for span in spans
    )
    return "".join([*pieces, text[offset:]]), tuple((start, end) for start, end in shifted_spans)


def _rename_strings(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {names.get(key, key): _rename_strings(item, names) for key, item in value.items()}
    return [_rename_strings(item, names) for item in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------------
# What masks need of a tokenizer, and texts with spans to ids with labels: by the tokenizer's
# encoding, or split at the spans' edges.
#
# Shape letters: T tokens of one row.

# Tokens that end a document; chat models often have another one, their end of turn, as `eos_token`.
END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True)
class TokenizerParts:
    """What rendering needs of a tokenizer: small enough to be sent to another process, where
    transformers stays out."""

    # The backend as `tokenizers` writes it.
    backend_json: str
    # Chat templates by name; one tokenizer may have a `default` and a `tool_use` one.
    templates: tuple[tuple[str, str], ...]
    special_tokens_map: tuple[tuple[str, str], ...]
    special_tokens: tuple[str, ...]
    # Added tokens: id, text, and whether they are special.
    added_tokens: tuple[tuple[int, str, bool], ...]
    bos_id: int | None
    eos_token: str | None
    end_of_text_id: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenizerParts:
        """The parts of a transformers tokenizer; raises TokenizerError where it has no offsets."""
        if isinstance(tokenizer, cls):
            return tokenizer
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"the tokenizer is {type(tokenizer).__name__}, which cannot say which characters a"
                " token stands for; a loss mask needs a fast one (a tokenizer.json in the model's"
                " folder)"
            )
        # transformers: one template as a text, or several as {name: text}
        templates = tokenizer.chat_template or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        added = tokenizer.added_tokens_decoder.items()
        return cls(
            tokenizer.backend_tokenizer.to_str(),
            tuple(templates.items()),
            tuple(
                (key, value)
                for key, value in tokenizer.special_tokens_map.items()
                if isinstance(value, str)
            ),
            tuple(tokenizer.all_special_tokens),
            tuple((token_id, str(token.content), bool(token.special)) for token_id, token in added),
            tokenizer.bos_token_id,
            tokenizer.eos_token,
            end_of_text_id(tokenizer),
        )

    def template(self, *, with_tools: bool) -> str:
        """The template of rows with tools or without, as transformers chooses it; raises
        TokenizerError without one."""
        named = dict(self.templates)
        source = named.get("tool_use") if with_tools else None
        source = source or named.get("default")
        if source is None and named:
            raise TokenizerError(
                f"the tokenizer has no chat template for rows {'with' if with_tools else 'without'}"
                f" tools, only {', '.join(sorted(named))}; set data.chat_template"
            )
        if source is None:
            raise TokenizerError("the tokenizer has no chat template; set data.chat_template")
        return source

    @property
    def writes_date(self) -> bool:
        """True if a chat template writes the day."""
        return any("strftime_now" in source for _, source in self.templates)

    def replace_template(self, source: str) -> TokenizerParts:
        """The same tokenizer with another template."""
        return replace(self, templates=(("default", source),))


def end_of_text_id(tokenizer: Any) -> int | None:
    """The token between documents: an end-of-text token of the vocabulary, else the tokenizer's
    eos."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return next(
        (vocabulary[token] for token in END_OF_TEXT_TOKENS if token in vocabulary),
        tokenizer.eos_token_id,
    )


@functools.lru_cache(maxsize=4)  # reading a large vocabulary takes half a second
def load_backend(backend_json: str) -> Any:
    """A tokenizer's backend that neither pads nor truncates."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(backend_json)
    backend.no_padding()
    backend.no_truncation()
    return backend


@dataclass(frozen=True)
class MaskedTokens:
    """Ids and labels of shape [T], and how many edges of spans stand inside a token, the last at
    `crossed_index`."""

    ids: list[int]
    labels: list[int]
    crossed_edges: int
    crossed_index: int = 0


def mask_encoding(
    encoding: Any, text: str, spans: Sequence[Span], added_ids: frozenset[int]
) -> MaskedTokens:
    """Label an encoding: a token is trained if all of its characters are inside one span. An added
    token may also take the white space after it (Phi-3's end of turn does); it is trained all the
    same."""
    ids = list(encoding.ids)
    labels = [IGNORED] * len(ids)
    crossed_edges = crossed_index = 0
    for start, end in spans:
        # a tokenizer may leave characters out, at the edges too
        tokens = (
            map(encoding.char_to_token, offsets)
            for offsets in (range(start, end), range(end - 1, start - 1, -1))
        )
        first, last = (next((token for token in one if token is not None), None) for one in tokens)
        if first is None or last is None:  # of an empty span too
            continue
        # A token that crosses an edge is counted and not trained; the caller splits it there if the
        # tokenizer can.
        if encoding.token_to_chars(first)[0] < start:
            crossed_edges, crossed_index, first = crossed_edges + 1, first, first + 1
        overhang = text[end : encoding.token_to_chars(last)[1]]
        if overhang and (overhang.strip() or ids[last] not in added_ids):
            crossed_edges, crossed_index, last = crossed_edges + 1, last, last - 1
        else:  # a character may take several tokens
            token_chars = encoding.token_to_chars(last)
            while last + 1 < len(ids) and encoding.token_to_chars(last + 1) == token_chars:
                last += 1
        labels[first : last + 1] = ids[first : last + 1]
    return MaskedTokens(ids, labels, crossed_edges, crossed_index)


# A private-use character: as an added token it cuts the text, and no text has it.
_EDGE = "\U0010e002"


@functools.lru_cache(maxsize=4)
def _add_edge_token(backend: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer

    copy = Tokenizer.from_str(backend.to_str())
    copy.add_special_tokens([AddedToken(_EDGE, normalized=False, special=True)])
    return copy


def encode_with_mask(backend: Any, text: str, spans: Sequence[Span]) -> MaskedTokens | None:
    """Tokenise a text anew from every edge of a span, as generation does after its prompt: `
    answer` after `Assistant: ` may be one token, which a model that is prompted never sees. None
    where the tokenizer writes other tokens after a split."""
    copy = _add_edge_token(backend)
    edge_id = copy.token_to_id(_EDGE)
    edges = [0, *itertools.chain.from_iterable(spans), len(text)]
    parts = [text[begin:end] for begin, end in itertools.pairwise(edges)]
    encoding = copy.encode(_EDGE.join(parts), add_special_tokens=False)
    ids: list[int] = []
    labels: list[int] = []
    part_index = 0
    for token in encoding.ids:
        if token == edge_id:
            part_index += 1
            continue
        ids.append(token)
        labels.append(token if part_index % 2 else IGNORED)  # edges alternate: odd parts are spans
    unsplit_ids = backend.encode(text, add_special_tokens=False).ids
    # A tokenizer that marks the beginning of a text (SentencePiece's ▁) may write it again after a
    # split: then the tokens spell another text.
    is_same_text = backend.decode(ids, skip_special_tokens=False) == backend.decode(
        unsplit_ids, skip_special_tokens=False
    )
    return MaskedTokens(ids, labels, 0) if is_same_text and part_index == 2 * len(spans) else None
