"""A document of any format as blocks of clean text, with counts of what was left out.

Text is in Unicode's composed form (NFC) with `\\n` as line ends. Control characters, soft hyphens and byte order marks
are removed and counted; non-breaking spaces become plain ones, spaces at line ends are removed.
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

MAX_CELL_CHARS = 400
"""A table with longer cells is the layout of a page: its cells are paragraphs, not columns of a line."""

CONTROL_CHARACTERS = "control characters"
SOFT_HYPHENS = "soft hyphens and byte order marks"


class Unreadable(Exception):
    """A document that cannot be read; the text says why and what to do. The other documents are read all the same."""


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
        count = self.counts.setdefault(reason, [0, 0])
        count[0] += pieces
        count[1] += characters

    def add_all(self, counts: dict[str, list[int]]) -> None:
        """Add the counts of another tally."""
        for reason, (pieces, characters) in counts.items():
            self.add(reason, characters, pieces)

    def as_json(self) -> dict[str, dict[str, int]]:
        """`{reason: {pieces, characters}}`, in the order of the reasons' names."""
        return {reason: {"pieces": n, "characters": c} for reason, (n, c) in sorted(self.counts.items())}


@dataclass(frozen=True)
class ReadOptions:
    """Options of the readers: whether to read page headers of .docx and to leave out boilerplate."""

    headers: bool = False
    drop_boilerplate: bool = True


@dataclass
class Extract:
    """The blocks of one document in reading order.

    `left_out` counts what is not in the text; `kept` counts boilerplate that is in it, because the options say so;
    `notes` are for the report.
    """

    blocks: list[Block] = field(default_factory=list)
    left_out: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)

    def boilerplate(self, reason: str, characters: int, pieces: int, options: ReadOptions) -> None:
        """Count boilerplate as left out or, by the options, as kept."""
        (self.left_out if options.drop_boilerplate else self.kept).add(reason, characters, pieces)

    def as_json(self) -> dict[str, Any]:
        """Plain lists and dicts, for another process."""
        blocks = [[block.kind, block.text] for block in self.blocks]
        counts = {"left_out": self.left_out.counts, "kept": self.kept.counts}
        return {"blocks": blocks, **counts, "notes": self.notes}

    @staticmethod
    def from_json(answer: dict[str, Any]) -> Extract:
        """The extract that `as_json` wrote."""
        blocks = [Block(text, kind) for kind, text in answer["blocks"]]
        return Extract(blocks, Tally(answer["left_out"]), Tally(answer["kept"]), answer["notes"])


def clean(text: str, left_out: Tally) -> str:
    """Text in its clean form (see the module), line breaks and indents kept."""
    text = _counted(_SOFT, _counted(_CONTROL, text, CONTROL_CHARACTERS, left_out), SOFT_HYPHENS, left_out)
    # form feeds and paragraph separators end paragraphs; other line ends become plain ones
    text = _SPACES.sub(" ", _PARAGRAPH_ENDS.sub("\n\n", _LINE_ENDS.sub("\n", text)))
    # last: what was removed may have stood between a letter and its accent
    return unicodedata.normalize("NFC", "\n".join(line.rstrip(" \t") for line in text.split("\n")))


def _counted(pattern: re.Pattern[str], text: str, reason: str, left_out: Tally) -> str:
    matches = pattern.findall(text)
    if not matches:
        return text
    left_out.add(reason, sum(map(len, matches)), len(matches))
    return pattern.sub("", text)


def clean_blocks(blocks: Iterable[Block], left_out: Tally) -> list[Block]:
    """Clean blocks; those without a visible character are dropped, and blank lines in all but code."""
    cleaned = []
    for block in blocks:
        text = clean(block.text, left_out).strip("\n")
        if block.kind != "code":
            text = _BLANK_LINES.sub("\n", text)
        if block.kind in ("text", "heading"):
            text = text.rstrip()
        if text.strip():
            cleaned.append(Block(text, block.kind))
    return cleaned


def paragraphs(text: str) -> list[str]:
    """Plain text cut at blank lines."""
    return [piece for piece in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if piece.strip()]


def glue(before: Block, after: Block) -> str:
    """The line breaks between two blocks of one document: one between list items, else two."""
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
    texts: list[str] = []
    current: list[Block] = []
    size = 0
    for block in chain.from_iterable(_pieces(block, limit) for block in blocks):
        more = len(block.text) + (len(glue(current[-1], block)) if current else 0)
        if size + more > limit:
            start = len(current)
            while start and current[start - 1].kind == "heading":
                start -= 1
            # the headings at the end go to the next chunk, if there is text before them and room there
            if start == 0 or len(join([*current[start:], block])) > limit:  # a chunk of headings alone is not moved
                start = len(current)
            texts.append(join(current[:start]))
            current = [*current[start:], block]
            size = len(join(current))
        else:
            current.append(block)
            size += more
    return [*texts, join(current)] if current else texts


def _pieces(block: Block, limit: int) -> list[Block]:
    if len(block.text) <= limit:
        return [block]
    enders = (
        [_line_end, _word_end] if block.kind in ("code", "table", "list") else [_sentence_end, _line_end, _word_end]
    )
    pieces, start, text = [], 0, block.text
    while len(text) - start > limit:
        end = _cut(text, start, start + limit, enders)
        pieces.append(text[start:end].rstrip())
        between = "\n" if block.kind == "code" and text[end] == "\n" else " \t\n"  # the indent of code stays
        while end < len(text) and text[end] in between:
            end += 1
        start = end
    pieces.append(text[start:])
    return [Block(piece, block.kind) for piece in pieces if piece.strip()]


def _cut(text: str, start: int, end: int, enders: Sequence[Callable[[str, int, int], int]]) -> int:
    """Where to cut at `end` or before it: at the last good place of the second half, else at any, else right there."""
    # the best kind of place first (sentence, line, word), but rather a word in the second half than a tiny piece
    for floor in (start + (end - start) // 2, start):
        for ender in enders:
            place = ender(text, floor, end)
            if place > start:
                return place
    while end > start + 1 and unicodedata.combining(text[end]):  # an accent stays with its letter
        end -= 1
    return end


def _sentence_end(text: str, start: int, end: int) -> int:
    """The end of the last sentence before `end`; the white space after it may be beyond."""
    last = end + 1 if text[end].isspace() else end
    return max((match.end() for match in _SENTENCE_END.finditer(text, start, last)), default=-1)


def _line_end(text: str, start: int, end: int) -> int:
    return text.rfind("\n", start, end + 1)


def _word_end(text: str, start: int, end: int) -> int:
    return max((match.start() for match in _WORD_END.finditer(text, start, end + 1)), default=-1)
