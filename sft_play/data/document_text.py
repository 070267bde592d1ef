"""What a document comes to: blocks of clean text, and an account of what was left out of it.

The same for every format. Text is brought to Unicode's composed form (NFC), line ends to `\\n`; control characters,
soft hyphens and byte order marks go (counted), spaces that do not break become plain ones, spaces at line ends go.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

Kind = Literal["text", "heading", "list", "table", "code"]

_ESCAPE_SEQUENCE = "\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\n]*(?:\x07|\x1b\\\\)?|[@-Z\\\\^_])"
_CONTROL = re.compile(f"(?:{_ESCAPE_SEQUENCE}|[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff])+")
_SOFT = re.compile("[\u00ad\ufeff]+")
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x85\u2028]")
_PARAGRAPH_ENDS = re.compile("[\x0c\u2029]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")

CONTROL_CHARACTERS = "control characters"
SOFT_HYPHENS = "soft hyphens and byte order marks"


class Unreadable(Exception):
    """A document that cannot be read; the text says why and what to do, and the other documents go on."""


@dataclass(frozen=True)
class Block:
    """A paragraph, heading, list item, table or piece of code."""

    text: str
    kind: Kind = "text"


@dataclass
class Tally:
    """How many pieces, and how many characters of them, by reason."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str, characters: int, pieces: int = 1) -> None:
        """Count `pieces` that hold `characters`."""
        found = self.counts.setdefault(reason, [0, 0])
        found[0] += pieces
        found[1] += characters

    def add_all(self, counts: dict[str, list[int]]) -> None:
        """Count what another tally holds."""
        for reason, (pieces, characters) in counts.items():
            self.add(reason, characters, pieces)

    def as_json(self) -> dict[str, dict[str, int]]:
        """`{reason: {pieces, characters}}`, in the order of the reasons' names."""
        return {reason: {"pieces": n, "characters": c} for reason, (n, c) in sorted(self.counts.items())}


@dataclass(frozen=True)
class ReadOptions:
    """What a reader is told: take page headers of .docx, leave out boilerplate."""

    headers: bool = False
    drop_boilerplate: bool = True


@dataclass
class Extract:
    """The blocks of one document in reading order.

    `left_out` counts what the text does not hold; `kept` counts boilerplate that was found and kept, because it was
    not to be left out; `notes` are said in the report.
    """

    blocks: list[Block] = field(default_factory=list)
    left_out: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)

    def boilerplate(self, reason: str, characters: int, pieces: int, options: ReadOptions) -> None:
        """Count boilerplate as left out or, where it is not to be left out, as kept."""
        (self.left_out if options.drop_boilerplate else self.kept).add(reason, characters, pieces)

    def as_json(self) -> dict[str, Any]:
        """Plain lists and dicts, for another process."""
        blocks = [[block.kind, block.text] for block in self.blocks]
        return {
            "blocks": blocks,
            "left_out": self.left_out.counts,
            "kept": self.kept.counts,
            "notes": self.notes,
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> Extract:
        """The extract that `as_json` wrote."""
        blocks = [Block(text, kind) for kind, text in found["blocks"]]
        return Extract(blocks, Tally(found["left_out"]), Tally(found["kept"]), found["notes"])


def clean(text: str, left_out: Tally) -> str:
    """Text in its clean form (see the module), line breaks and indents kept."""
    text = _counted(_SOFT, _counted(_CONTROL, text, CONTROL_CHARACTERS, left_out), SOFT_HYPHENS, left_out)
    text = _SPACES.sub(" ", _PARAGRAPH_ENDS.sub("\n\n", _LINE_ENDS.sub("\n", text)))
    return unicodedata.normalize("NFC", "\n".join(line.rstrip(" \t") for line in text.split("\n")))


def _counted(pattern: re.Pattern[str], text: str, reason: str, left_out: Tally) -> str:
    found = pattern.findall(text)
    if not found:
        return text
    left_out.add(reason, sum(map(len, found)), len(found))
    return pattern.sub("", text)


def clean_blocks(blocks: Iterable[Block], left_out: Tally) -> list[Block]:
    """Clean blocks; those without any visible character go, blank lines stay inside code alone."""
    found = []
    for block in blocks:
        text = clean(block.text, left_out).strip("\n")
        if block.kind != "code":
            text = _BLANK_LINES.sub("\n", text)
        if block.kind in ("text", "heading"):
            text = text.rstrip()
        if text.strip():
            found.append(Block(text, block.kind))
    return found


def paragraphs(text: str) -> list[str]:
    """Plain text cut at blank lines."""
    return [piece for piece in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if piece.strip()]


def glue(before: Block, after: Block) -> str:
    """What stands between two blocks of one document: list items follow each other closely."""
    return "\n" if before.kind == after.kind == "list" else "\n\n"


def join(blocks: list[Block]) -> str:
    """The text of a document, or of a part of it."""
    pieces: list[str] = []
    for before, block in zip([None, *blocks], blocks, strict=False):
        pieces += [glue(before, block) if before else "", block.text]
    return "".join(pieces)


_SENTENCE_END = re.compile(r"(?:[.!?…][\"'”’»)\]]*\s|[。！？][”’」』）]*)")
_WORD_END = re.compile(r"\s")


def chunks(blocks: list[Block], *, limit: int) -> list[str]:
    """Texts of at most `limit` characters, cut between blocks; a longer block is cut inside.

    A heading goes with what follows it. Nothing is lost but the white space at the cuts.
    """
    found: list[str] = []
    current: list[Block] = []
    size = 0
    for block in chain.from_iterable(_pieces(block, limit) for block in blocks):
        more = len(block.text) + (len(glue(current[-1], block)) if current else 0)
        if size + more > limit:
            moved = _headings_at_end(current)
            if len(join([*moved, block])) > limit:
                moved = []
            found.append(join(current[: len(current) - len(moved)]))
            current = [*moved, block]
            size = len(join(current))
        else:
            current.append(block)
            size += more
    return [*found, join(current)] if current else found


def _headings_at_end(blocks: list[Block]) -> list[Block]:
    """Headings that end a chunk whose text is not all headings."""
    start = len(blocks)
    while start and blocks[start - 1].kind == "heading":
        start -= 1
    return blocks[start:] if start else []


def _pieces(block: Block, limit: int) -> list[Block]:
    if len(block.text) <= limit:
        return [block]
    enders = (
        [_line_end, _word_end] if block.kind in ("code", "table", "list") else [_sentence_end, _line_end, _word_end]
    )
    found, start, text = [], 0, block.text
    while len(text) - start > limit:
        end = _cut(text, start, start + limit, enders)
        found.append(text[start:end].rstrip())
        between = "\n" if block.kind == "code" and text[end] == "\n" else " \t\n"  # the indent of code stays
        while end < len(text) and text[end] in between:
            end += 1
        start = end
    found.append(text[start:])
    return [Block(piece, block.kind) for piece in found if piece.strip()]


def _cut(text: str, start: int, end: int, enders: Sequence[Callable[[str, int, int], int]]) -> int:
    """Where to cut at `end` or before it: at the last good place of the second half, else at any, else right there."""
    for floor in (start + (end - start) // 2, start):
        for ender in enders:
            found = ender(text, floor, end)
            if found > start:
                return found
    while end > start + 1 and unicodedata.combining(text[end]):
        end -= 1
    return end


def _sentence_end(text: str, start: int, end: int) -> int:
    """Behind the last sentence that ends in time; the white space after it may lie beyond."""
    last = end + 1 if text[end].isspace() else end
    return max((match.end() for match in _SENTENCE_END.finditer(text, start, last)), default=-1)


def _line_end(text: str, start: int, end: int) -> int:
    return text.rfind("\n", start, end + 1)


def _word_end(text: str, start: int, end: int) -> int:
    return max((match.start() for match in _WORD_END.finditer(text, start, end + 1)), default=-1)
