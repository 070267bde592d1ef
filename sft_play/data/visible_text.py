"""Signs for characters that are not seen: spaces, line breaks, controls, marks of writing direction.

So no text of the data can change how a page or a terminal reads.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Literal

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
