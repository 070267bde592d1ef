"""Tokens as the bytes that they stand for, in pieces of whole characters.

A token is never shown as the text that it was made from: what the model learns is what its tokens spell. Characters
that are not seen are shown by signs, so that no text of the data can change how a page or a terminal reads.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.masks.token_row import IGNORED
from sft_play.data.masks.words import BYTE_LETTERS


@dataclass(frozen=True)
class TokenPiece:
    """One token, or several that only together are whole characters.

    `text` holds a byte that is no part of a character as U+DC80 to U+DCFF (Python's surrogateescape). `kept` is false
    for what max_seq_len cuts away.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool = False
    special: bool = False
    kept: bool = True


class TokenBytes:
    """What each token of a tokenizer stands for: bytes, or the name of a special token."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokenizer = tokenizer
        self._added = {number: str(token) for number, token in added.items()}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        for number, token in added.items():
            name = str(token)
            # Templates add marks such as <tool_call> as plain tokens; runs of spaces are added tokens too, and no mark.
            is_mark = len(name) > 2 and (name[0], name[-1]) in {("<", ">"), ("[", "]")} and " " not in name
            if is_mark or getattr(token, "special", False):
                self._special.add(number)
        # How the names of tokens spell bytes: as letters (ByteLevel), with ## (WordPiece), or with ▁ and <0x0A>.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = str(decoder.__getstate__(), "utf-8") if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in state
        self._is_word_piece = '"WordPiece"' in state
        self._is_sentence_piece = "\u2581" in state or '"ByteFallback"' in state

    def is_special(self, number: int) -> bool:
        """Whether a token is one of the tokenizer's marks, which no plain text becomes."""
        return number in self._special

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; a special token's are those of its name."""
        words = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [
            (self._added.get(number) or str(word)).encode("utf-8", "replace")
            if number in self._added or number in self._special
            else self._decoded(str(word))
            for number, word in zip(ids, words, strict=True)
        ]

    def _decoded(self, word: str) -> bytes:
        """The bytes of a token by its name, as the tokenizer's own decoder reads it."""
        if self._is_byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode("utf-8", "replace") for c in word)
        if self._is_word_piece:
            word = word[2:] if word.startswith("##") else f" {word}"
        elif self._is_sentence_piece:
            if byte := _BYTE_NAME.fullmatch(word):
                return bytes([int(byte[1], 16)])
            word = word.replace("\u2581", " ")
        return word.encode("utf-8", "replace")


_BYTE_OF = {letter: byte for byte, letter in BYTE_LETTERS.items()}
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_pieces(
    ids: Sequence[int], labels: Sequence[int], names: TokenBytes, *, kept: Sequence[bool]
) -> list[TokenPiece]:
    """The tokens of a row as pieces: each by itself, or with those that complete its last character."""
    pieces: list[TokenPiece] = []
    waiting: list[int] = []
    state: tuple[bool, bool] | None = None
    # incremental: it holds back the bytes of a character that is not complete, and tells so in its state
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = ""

    def end() -> None:
        nonlocal text
        if waiting:
            assert state is not None
            pieces.append(TokenPiece(text + decoder.decode(b"", True), tuple(waiting), trained=state[0], kept=state[1]))
            decoder.reset()
            waiting.clear()
            text = ""

    for number, label, is_kept, raw in zip(ids, labels, kept, names.of(ids), strict=True):
        here = (label != IGNORED, is_kept)
        if names.is_special(number):
            end()
            pieces.append(TokenPiece(raw.decode("utf-8", "replace"), (number,), here[0], special=True, kept=here[1]))
            continue
        if here != state:  # a piece is trained or not, kept or not, as a whole
            end()
        state = here
        waiting.append(number)
        text += decoder.decode(raw)
        if not decoder.getstate()[0]:
            end()
    end()
    return pieces


def kept_tokens(whole: Sequence[int], cut: Sequence[int]) -> list[bool]:
    """Which tokens of a whole row are in the cut one: its beginning, its end, or a beginning and an end."""
    size, left = len(whole), len(cut)
    is_end = list(whole[size - left :]) == list(cut) != list(whole[:left])
    head = 0 if is_end else next((n for n in range(left) if whole[n] != cut[n]), left)
    return [n < head or n >= size - (left - head) for n in range(size)]


Kind = Literal["text", "space", "newline", "mark"]
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
"""Letters and marks without a shape."""
MOST_ACCENTS = 4
"""Combining marks on one letter; the languages that people write need no more."""
NEWLINE, TAB, SPACE = "⏎", "⇥", "·"


def signs(text: str) -> Iterator[tuple[Kind, str]]:
    """The text in runs of one kind: as it is, or as signs for what would not be seen.

    A line break is one `newline`, a space one `·`, everything else a mark such as ⟨U+202E⟩; accents without a letter
    before them, or too many of them, are marks too.
    """
    plain: list[str] = []
    accents = 0
    for number, character in enumerate(text):
        kind, sign = _sign(character)
        accents = accents + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if accents > MOST_ACCENTS or (accents and number == 0):  # towers of them cover the lines above
            kind, sign = "mark", f"⟨U+{ord(character):04X}⟩"
        if kind == "text":
            plain.append(character)
            continue
        if plain:
            yield "text", "".join(plain)
            plain.clear()
        yield kind, sign
    if plain:
        yield "text", "".join(plain)


def _sign(character: str) -> tuple[Kind, str]:
    if character == " ":
        return "space", SPACE
    if character == "\n":
        return "newline", NEWLINE
    if character == "\t":
        return "mark", TAB
    if "\udc80" <= character <= "\udcff":
        return "mark", f"⟨0x{ord(character) - 0xDC00:02X}⟩"
    if unicodedata.category(character) in _HIDDEN or character in _BLANK:
        return "mark", f"⟨U+{ord(character):04X}⟩"
    return "text", character


def visible(text: str) -> str:
    """Text that is safe to show, on one line: spaces as they are, everything else that is not seen by its sign."""
    return "".join(" " if kind == "space" else sign for kind, sign in signs(text))
