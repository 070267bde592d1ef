"""Texts with spans to ids with labels: by words seen before, by the tokenizer's encoding, or split at the spans' edges.

Shape letters: T tokens of one row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.masks.token_row import IGNORED, Span
from sft_play.data.masks.tokenizer_parts import TokenizerParts
from sft_play.data.masks.words import Words, words_of
from sft_play.log import one_line

ALL_COMPARED, ONE_COMPARED_OF = 64, 256
"""Texts whose tokens were put together from words that are compared with the tokenizer's own ids."""


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

    def masked(self, text: str, spans: Sequence[Span]) -> Masked | None:
        """Ids and labels of a text whose words are known; None where the tokenizer has to be asked."""
        by_words = self.words.masked(text, spans) if self.words is not None else None
        if by_words is None:
            return None
        ids, trained = by_words
        self._texts += 1
        # our words against the tokenizer's own ids: a difference would train other tokens than are generated
        if self._texts <= ALL_COMPARED or self._texts % ONE_COMPARED_OF == 0:
            expected = self.backend.encode(text, add_special_tokens=False).ids
            assert ids == expected, f"the words of {one_line(text)!r} have other tokens than the text"
        labels = [IGNORED] * len(ids)
        for first, last in trained:
            labels[first:last] = ids[first:last]
        return Masked(ids, labels, 0)

    @functools.cached_property
    def splitting(self) -> Splitting:
        """The one that splits at edges of answers."""
        return Splitting(self.backend)


@dataclass(frozen=True)
class Masked:
    """Ids and labels of shape [T], and how many edges of spans stand inside a token, the last of them at `at`."""

    ids: list[int]
    labels: list[int]
    inside: int
    at: int = 0


def masked_of(encoding: Any, text: str, spans: Sequence[Span], added: frozenset[int]) -> Masked:
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
            return Masked(ids, label_spans(ids, offsets, spans), edges_inside)
        # A token that crosses an edge is counted and not trained; the caller splits it there if the tokenizer can.
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
    return Masked(ids, labels, inside, at)


class Splitting:
    """A tokenizer that starts again at every edge of a span, as generation does after its prompt.

    Tokens may reach over the end of a prompt: ` answer` after `Assistant: ` is one token. A model that is prompted
    never sees that token; it sees the tokens of the prompt and adds its own.
    """

    _EDGE = "\U0010e002"  # a private-use character: as an added token it cuts the text, and no text has it

    def __init__(self, backend: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._backend = backend
        self._copy = Tokenizer.from_str(backend.to_str())
        self._copy.add_special_tokens([AddedToken(self._EDGE, normalized=False, special=True)])
        self._edge = self._copy.token_to_id(self._EDGE)

    def masked(self, text: str, spans: Sequence[Span]) -> Masked | None:
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
            labels.append(token if part % 2 else IGNORED)  # edges alternate: odd parts are spans
        whole = self._backend.encode(text, add_special_tokens=False).ids
        # A tokenizer that marks the beginning of a text (SentencePiece's ▁) may write it again after a split: then the
        # tokens spell another text.
        same = self._backend.decode(ids, skip_special_tokens=False) == self._backend.decode(
            whole, skip_special_tokens=False
        )
        return Masked(ids, labels, 0) if same and part == 2 * len(spans) else None


def label_spans(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Labels of shape [T]: a token's id where all its characters lie in one span, else `IGNORED`."""
    labels, at = [IGNORED] * len(ids), 0
    for position, (start, end) in enumerate(offsets):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at < len(spans) and end > start >= spans[at][0] and end <= spans[at][1]:
            labels[position] = ids[position]
    return labels
