"""Tokens of words that were seen before, so that a byte-level tokenizer's work is done once for each word.

A byte-level BPE tokenizer cuts a text at its added tokens, then into words by a pattern; the tokens of a word depend
on that word alone. So a dictionary of words gives the same ids, several times as fast. That holds here for texts of
ASCII, the letters of Western Europe and common marks (dashes, quotes): there the pattern means the same in Python as in
the tokenizer, once its classes of characters are spelt out. Every other text and every other kind of tokenizer goes
through the tokenizer itself.

Nothing is taken on trust: a tokenizer's words are compared with its own ids on probes before they are used, and on
rows while they are.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sft_play.data.masks.token_row import Span

# Words that are remembered, some 60 MB; at the limit all are forgotten.
MAX_WORDS = 200_000
# Longer words are rarely seen again.
MAX_WORD_CHARS = 40
PROBES = 300
_ASCII = range(128)
# Characters whose class has not changed since Unicode 4, which no tokenizer takes for white space, and which NFC
# leaves as they are.
_KNOWN = (*_ASCII, *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x2010, 0x2028))
# Normalisers that leave `_KNOWN`, or ASCII, unchanged.
_KEEP_KNOWN, _KEEP_ASCII = frozenset({"NFC"}), frozenset({"NFC", "NFD", "NFKC", "NFKD"})
# What ByteLevel cuts by where it has no pattern of its own (tokenizers' ByteLevel, after GPT-2).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UNSEEN = [*range(33), *range(127, 161), 173]
# The letters in which byte-level vocabularies write bytes (GPT-2's `bytes_to_unicode`): visible characters of
# Latin-1 as they are, the others as characters from U+0100.
BYTE_LETTERS = {byte: chr(byte) for byte in range(256)} | {byte: chr(256 + at) for at, byte in enumerate(_UNSEEN)}
# A character that no known text holds, for classes without any character.
_NOWHERE = r"\ue000"


class Words:
    """The tokens of texts by their words; made by `words_of`."""

    def __init__(self, backend: Any, pattern: re.Pattern[str], added: dict[str, int], *, only_ascii: bool) -> None:
        self._unknown = re.compile(f"[^{_ranges(_ASCII if only_ascii else _KNOWN)}]").search
        self._pattern = pattern
        self._added = added
        longest_first = sorted(added, key=lambda token: (-len(token), token))
        self._cut: Callable[[str], list[str]] = re.compile(
            f"({'|'.join(map(re.escape, longest_first))})" if added else r"((?!))"
        ).split
        self._ids = _Remembered(backend.model)

    def ids(self, text: str) -> list[int] | None:
        """The text's ids; None where the tokenizer has to be asked."""
        masked = self.masked(text, ())
        return masked and masked[0]

    def masked(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]] | None:
        """The text's ids, and which of them [first, last) stand for each span of characters. None where the tokenizer
        has to be asked: for other characters, or where an edge stands inside a word."""
        if not text.isascii() and self._unknown(text):  # isascii() is a flag of the text, read at once
            return None
        edges = [edge for span in spans for edge in span]
        ids: list[int] = []
        token_edges: list[int] = []
        position = 0
        for number, piece in enumerate(self._cut(text)):
            before, end = len(ids), position + len(piece)
            if number % 2:  # re.split puts the added tokens at odd places
                ids.append(self._added[piece])
            elif (words := self._words(piece)) is not None:
                ids += itertools.chain.from_iterable(map(self._ids.__getitem__, words))
            else:
                return None
            while len(token_edges) < len(edges) and edges[len(token_edges)] < end:
                at = self._tokens_before(edges[len(token_edges)] - position, piece)
                if at is None:
                    return None
                token_edges.append(before + at)
            position = end
        token_edges += [len(ids)] * (len(edges) - len(token_edges))
        return ids, list(zip(token_edges[::2], token_edges[1::2], strict=True))

    def _tokens_before(self, edge: int, piece: str) -> int | None:
        """How many tokens of a piece stand before an edge between words; None where the edge is inside a word."""
        # one by one: an edge often stands near the beginning
        words = [piece] if piece in self._added else (match.group() for match in self._pattern.finditer(piece))
        at = count = 0
        for word in words:
            if at >= edge:
                break
            at, count = at + len(word), count + len(self._ids[word])
        return count if at == edge else None

    def _words(self, piece: str) -> list[str] | None:
        """The words of a text without added tokens; None where the pattern leaves characters out."""
        words = self._pattern.findall(piece)
        return words if "".join(words) == piece else None


class _Remembered(dict[str, tuple[int, ...]]):
    def __init__(self, model: Any) -> None:
        self._model = model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize("".join(map(BYTE_LETTERS.__getitem__, word.encode()))))
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


def words_of(backend: Any) -> Words | None:
    """The words of a tokenizer's backend; None where it is of another kind, or its words do not give its own ids."""
    added = backend.get_added_tokens_decoder()
    pattern = _word_pattern(_state(backend.pre_tokenizer))
    normalizer = _state(backend.normalizer)
    is_plain_bpe = type(backend.model).__name__ == "BPE" and not backend.model.dropout
    # dropout makes the tokens of a word random; other models (Unigram, WordPiece) are not asked word by word
    if pattern is None or not _keeps(_KEEP_ASCII, normalizer) or not is_plain_bpe:
        return None
    # such a token takes white space along, or stands only between words: a plain search for its text is not enough
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    if len({token.normalized for token in added.values()}) > 1:  # the tokenizer cuts at one kind, then at the other
        return None
    only_ascii = not (_keeps(_KEEP_KNOWN, normalizer) and _means_the_same(pattern))
    by_text = {token.content: number for number, token in added.items() if token.content}
    words = Words(backend, pattern, by_text, only_ascii=only_ascii)
    probes = list(_probes(list(by_text), _ASCII if only_ascii else _KNOWN))
    expected = [encoding.ids for encoding in backend.encode_batch(probes, add_special_tokens=False)]
    return words if [words.ids(probe) for probe in probes] == expected else None


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state


def _keeps(allowed: frozenset[str], normalizer: dict[str, Any]) -> bool:
    kind = normalizer.get("type")
    if kind == "Sequence":
        return all(_keeps(allowed, one) for one in normalizer["normalizers"])
    return kind is None or kind in allowed


def _word_pattern(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The one pattern that texts are cut by; None where Python has no such pattern, or there are several."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    patterns = [_pattern_of(step) for step in before] + ([_GPT2] if last.get("use_regex", True) else [])
    if len(patterns) != 1 or patterns[0] is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pattern = re.compile(ascii_pattern(patterns[0]), re.ASCII)
    except (ValueError, re.error, Warning):
        return None
    return None if pattern.groups else pattern


def _pattern_of(step: dict[str, Any]) -> str | None:
    ways = (("Isolated", False), ("Removed", True))
    if step.get("type") != "Split" or (step.get("behavior"), step.get("invert")) not in ways:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


_PROPERTY = re.compile(r"\\([pP])\{(\^?)(\w+)\}")
# What means something else, or nothing, in Python.
_FOREIGN = re.compile(r"\\[zZGRXKbBhHA]|&&|\[:|\{[\d,]+\}\+|\(\?[^:!=<>i]|\(\?i[^:]|\(\?<[^=!]")


def ascii_pattern(pattern: str) -> str:
    """A tokenizer's pattern as one of Python's (with re.ASCII) that has the same matches in texts of known characters;
    raises ValueError where it has something that means another thing in Python."""
    if _FOREIGN.search(pattern):
        raise ValueError(pattern)
    parts: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        match = _PROPERTY.match(pattern, at)
        char = pattern[at]
        if match:
            name, is_not = match[3], (match[1] == "P") != bool(match[2])  # \P{^L} is \p{L}
            members = _ranges([code for code in _KNOWN if unicodedata.category(chr(code)).startswith(name) != is_not])
            parts.append(members if in_class else f"[{members}]")
            at = match.end()
            continue
        if char == "\\":
            parts.append(pattern[at : at + 2])
            at += 2
            continue
        # `$`, `.` and `^` may differ over line ends, and Python has no nested classes
        if (char == "[" and in_class) or (char in "$.^" and not in_class):
            raise ValueError(pattern)
        parts.append(char)
        at += 1
        if char == "[":
            in_class = True
            if pattern[at : at + 1] == "^":
                parts.append("^")
                at += 1
        elif char == "]":
            in_class = False
    return "".join(parts)


def _means_the_same(stage: re.Pattern[str]) -> bool:
    """Whether a pattern means the same beyond ASCII too: with re.ASCII, word characters and both cases are ASCII's."""
    return not re.search(r"\\[wW]", stage.pattern) and ("(?i" not in stage.pattern or stage.pattern.isascii())


def _ranges(codes: Sequence[int]) -> str:
    """Characters as the inside of a class: ranges, which are found quicker than one by one."""
    members = set(codes)
    starts, ends = ([code for code in codes if code + step not in members] for step in (-1, 1))
    return "".join(f"\\u{start:04x}-\\u{end:04x}" for start, end in zip(starts, ends, strict=True)) or _NOWHERE


def _probes(added: Sequence[str], known: Sequence[int]) -> Iterator[str]:
    chance = random.Random(0)
    characters = frozenset(map(chr, known))
    pieces = [*map(chr, range(128)), *"eariotnslc" * 4, *" \n" * 20, *"0123456789" * 2]
    pieces += ["'s", "'LL", "'Re", "don't", " the", "Hello", "  ", "\r\n", " \n\n ", "\t\t", " 12345"]
    pieces += ["3.14", "://", "))"]
    pieces += ["caf\u00e9", " \u201cso\u201d", "it\u2019s", "\u2014", "na\u00efve", "\u00df\u00b2", "\u00ab \u00bb"]
    pieces += [token for token in added if characters.issuperset(token)][:20]
    pieces = [piece for piece in pieces if characters.issuperset(piece)]
    for _ in range(PROBES):
        yield "".join(chance.choices(pieces, k=chance.randint(1, 60)))
