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
PROBE_COUNT = 300
_ASCII_CODES = range(128)
# Characters whose class has not changed since Unicode 4, which no tokenizer takes for white space, and which NFC
# leaves as they are.
_KNOWN_CODES = (*_ASCII_CODES, *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x2010, 0x2028))
# Normalisers that leave `_KNOWN_CODES`, or ASCII, unchanged.
_KNOWN_SAFE_NORMALIZERS, _ASCII_SAFE_NORMALIZERS = frozenset({"NFC"}), frozenset({"NFC", "NFD", "NFKC", "NFKD"})
# What ByteLevel cuts by where it has no pattern of its own (tokenizers' ByteLevel, after GPT-2).
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_INVISIBLE_BYTES = [*range(33), *range(127, 161), 173]
# The letters in which byte-level vocabularies write bytes (GPT-2's `bytes_to_unicode`): visible characters of
# Latin-1 as they are, the others as characters from U+0100.
BYTE_LETTERS = {byte: chr(byte) for byte in range(256)} | {
    byte: chr(256 + at) for at, byte in enumerate(_INVISIBLE_BYTES)
}
# A character that no known text holds, for classes without any character.
_UNUSED_CHARACTER = r"\ue000"


class WordTokenizer:
    """The tokens of texts by their words; made by `build_word_tokenizer`."""

    def __init__(
        self, backend: Any, pattern: re.Pattern[str], added_ids: dict[str, int], *, is_ascii_only: bool
    ) -> None:
        self._find_unknown = re.compile(
            f"[^{_character_ranges(_ASCII_CODES if is_ascii_only else _KNOWN_CODES)}]"
        ).search
        self._pattern = pattern
        self._added_ids = added_ids
        longest_first = sorted(added_ids, key=lambda token: (-len(token), token))
        self._split_added: Callable[[str], list[str]] = re.compile(
            f"({'|'.join(map(re.escape, longest_first))})" if added_ids else r"((?!))"
        ).split
        self._word_ids = _WordIds(backend.model)

    def encode(self, text: str) -> list[int] | None:
        """The text's ids; None where the tokenizer has to be asked."""
        encoded = self.encode_with_spans(text, ())
        return encoded and encoded[0]

    def encode_with_spans(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]] | None:
        """The text's ids, and which of them [first, last) stand for each span of characters. None where the tokenizer
        has to be asked: for other characters, or where an edge stands inside a word."""
        if not text.isascii() and self._find_unknown(text):  # isascii() is a flag of the text, read at once
            return None
        edges = [edge for span in spans for edge in span]
        ids: list[int] = []
        token_edges: list[int] = []
        position = 0
        for index, piece in enumerate(self._split_added(text)):
            piece_start, end = len(ids), position + len(piece)
            if index % 2:  # re.split puts the added tokens at odd places
                ids.append(self._added_ids[piece])
            elif (words := self._split_words(piece)) is not None:
                ids += itertools.chain.from_iterable(map(self._word_ids.__getitem__, words))
            else:
                return None
            while len(token_edges) < len(edges) and edges[len(token_edges)] < end:
                token_count = self._tokens_before(edges[len(token_edges)] - position, piece)
                if token_count is None:
                    return None
                token_edges.append(piece_start + token_count)
            position = end
        token_edges += [len(ids)] * (len(edges) - len(token_edges))
        return ids, list(zip(token_edges[::2], token_edges[1::2], strict=True))

    def _tokens_before(self, edge: int, piece: str) -> int | None:
        """How many tokens of a piece stand before an edge between words; None where the edge is inside a word."""
        # one by one: an edge often stands near the beginning
        words = [piece] if piece in self._added_ids else (match.group() for match in self._pattern.finditer(piece))
        offset = count = 0
        for word in words:
            if offset >= edge:
                break
            offset, count = offset + len(word), count + len(self._word_ids[word])
        return count if offset == edge else None

    def _split_words(self, piece: str) -> list[str] | None:
        """The words of a text without added tokens; None where the pattern leaves characters out."""
        words = self._pattern.findall(piece)
        return words if "".join(words) == piece else None


class _WordIds(dict[str, tuple[int, ...]]):
    def __init__(self, model: Any) -> None:
        self._model = model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize("".join(map(BYTE_LETTERS.__getitem__, word.encode()))))
        if len(word) <= MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


def build_word_tokenizer(backend: Any) -> WordTokenizer | None:
    """The words of a tokenizer's backend; None where it is of another kind, or its words do not give its own ids."""
    added_tokens = backend.get_added_tokens_decoder()
    pattern = _compile_word_pattern(_component_state(backend.pre_tokenizer))
    normalizer = _component_state(backend.normalizer)
    is_deterministic_bpe = type(backend.model).__name__ == "BPE" and not backend.model.dropout
    # dropout makes the tokens of a word random; other models (Unigram, WordPiece) are not asked word by word
    if pattern is None or not _is_safe_normalizer(_ASCII_SAFE_NORMALIZERS, normalizer) or not is_deterministic_bpe:
        return None
    # such a token takes white space along, or stands only between words: a plain search for its text is not enough
    if any(token.lstrip or token.rstrip or token.single_word for token in added_tokens.values()):
        return None
    # the tokenizer cuts at one kind, then at the other
    if len({token.normalized for token in added_tokens.values()}) > 1:
        return None
    is_ascii_only = not (_is_safe_normalizer(_KNOWN_SAFE_NORMALIZERS, normalizer) and _is_same_beyond_ascii(pattern))
    ids_by_text = {token.content: token_id for token_id, token in added_tokens.items() if token.content}
    word_tokenizer = WordTokenizer(backend, pattern, ids_by_text, is_ascii_only=is_ascii_only)
    probes = list(_probe_texts(list(ids_by_text), _ASCII_CODES if is_ascii_only else _KNOWN_CODES))
    expected = [encoding.ids for encoding in backend.encode_batch(probes, add_special_tokens=False)]
    return word_tokenizer if [word_tokenizer.encode(probe) for probe in probes] == expected else None


def _component_state(component: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(component.__getstate__()) if component is not None else {}
    return state


def _is_safe_normalizer(allowed: frozenset[str], normalizer: dict[str, Any]) -> bool:
    kind = normalizer.get("type")
    if kind == "Sequence":
        return all(_is_safe_normalizer(allowed, step) for step in normalizer["normalizers"])
    return kind is None or kind in allowed


def _compile_word_pattern(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The one pattern that texts are cut by; None where Python has no such pattern, or there are several."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *earlier_steps, last_step = steps or [{}]
    if last_step.get("type") != "ByteLevel" or last_step.get("add_prefix_space"):
        return None
    patterns = [_split_pattern(step) for step in earlier_steps] + (
        [_GPT2_PATTERN] if last_step.get("use_regex", True) else []
    )
    if len(patterns) != 1 or patterns[0] is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pattern = re.compile(to_python_pattern(patterns[0]), re.ASCII)
    except (ValueError, re.error, Warning):
        return None
    return None if pattern.groups else pattern


def _split_pattern(step: dict[str, Any]) -> str | None:
    supported_behaviors = (("Isolated", False), ("Removed", True))
    if step.get("type") != "Split" or (step.get("behavior"), step.get("invert")) not in supported_behaviors:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


_PROPERTY = re.compile(r"\\([pP])\{(\^?)(\w+)\}")
# What means something else, or nothing, in Python.
_UNSUPPORTED_SYNTAX = re.compile(r"\\[zZGRXKbBhHA]|&&|\[:|\{[\d,]+\}\+|\(\?[^:!=<>i]|\(\?i[^:]|\(\?<[^=!]")


def to_python_pattern(pattern: str) -> str:
    """A tokenizer's pattern as one of Python's (with re.ASCII) that has the same matches in texts of known characters;
    raises ValueError where it has something that means another thing in Python."""
    if _UNSUPPORTED_SYNTAX.search(pattern):
        raise ValueError(pattern)
    parts: list[str] = []
    offset, in_class = 0, False
    while offset < len(pattern):
        match = _PROPERTY.match(pattern, offset)
        char = pattern[offset]
        if match:
            name, is_negated = match[3], (match[1] == "P") != bool(match[2])  # \P{^L} is \p{L}
            members = _character_ranges(
                [code for code in _KNOWN_CODES if unicodedata.category(chr(code)).startswith(name) != is_negated]
            )
            parts.append(members if in_class else f"[{members}]")
            offset = match.end()
            continue
        if char == "\\":
            parts.append(pattern[offset : offset + 2])
            offset += 2
            continue
        # `$`, `.` and `^` may differ over line ends, and Python has no nested classes
        if (char == "[" and in_class) or (char in "$.^" and not in_class):
            raise ValueError(pattern)
        parts.append(char)
        offset += 1
        if char == "[":
            in_class = True
            if pattern[offset : offset + 1] == "^":
                parts.append("^")
                offset += 1
        elif char == "]":
            in_class = False
    return "".join(parts)


def _is_same_beyond_ascii(pattern: re.Pattern[str]) -> bool:
    """Whether a pattern means the same beyond ASCII too: with re.ASCII, word characters and both cases are ASCII's."""
    return not re.search(r"\\[wW]", pattern.pattern) and ("(?i" not in pattern.pattern or pattern.pattern.isascii())


def _character_ranges(codes: Sequence[int]) -> str:
    """Characters as the inside of a class: ranges, which are found quicker than one by one."""
    members = set(codes)
    starts, ends = ([code for code in codes if code + step not in members] for step in (-1, 1))
    return "".join(f"\\u{start:04x}-\\u{end:04x}" for start, end in zip(starts, ends, strict=True)) or _UNUSED_CHARACTER


def _probe_texts(added: Sequence[str], codes: Sequence[int]) -> Iterator[str]:
    generator = random.Random(0)
    characters = frozenset(map(chr, codes))
    pieces = [*map(chr, range(128)), *"eariotnslc" * 4, *" \n" * 20, *"0123456789" * 2]
    pieces += ["'s", "'LL", "'Re", "don't", " the", "Hello", "  ", "\r\n", " \n\n ", "\t\t", " 12345"]
    pieces += ["3.14", "://", "))"]
    pieces += ["caf\u00e9", " \u201cso\u201d", "it\u2019s", "\u2014", "na\u00efve", "\u00df\u00b2", "\u00ab \u00bb"]
    pieces += [token for token in added if characters.issuperset(token)][:20]
    pieces = [piece for piece in pieces if characters.issuperset(piece)]
    for _ in range(PROBE_COUNT):
        yield "".join(generator.choices(pieces, k=generator.randint(1, 60)))
