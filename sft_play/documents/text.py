"""Clean text, its paragraphs, and how they are cut into rows.

Text is in Unicode's composed form (NFC) with `\\n` as line ends. Control characters, soft hyphens and byte order marks
are removed; non-breaking spaces become plain ones, spaces at line ends are removed. Of Markdown no more is known than
headings and blocks of code.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from sft_play.data.sources.raw import piece_end

_ESCAPE_SEQUENCE = "\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\n]*(?:\x07|\x1b\\\\)?|[@-Z\\\\^_])"
_REMOVED = re.compile(f"{_ESCAPE_SEQUENCE}|[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\ufeff\ud800-\udfff\ufffe\uffff]")
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x85\u2028]")
_PARAGRAPH_ENDS = re.compile("[\x0c\u2029]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]")
HEADING = re.compile(r"#{1,6} \S.*")
FENCE = re.compile(r" {0,3}(```|~~~)")
_BETWEEN = "\n\n"


def clean(text: str) -> str:
    """Text in its clean form (see the module), line breaks and indents kept."""
    # form feeds and paragraph separators end paragraphs; other line ends become plain ones
    text = _PARAGRAPH_ENDS.sub(_BETWEEN, _LINE_ENDS.sub("\n", _REMOVED.sub("", text)))
    # composed last: what was removed may have stood between a letter and its accent
    return unicodedata.normalize("NFC", "\n".join(line.rstrip(" \t") for line in _SPACES.sub(" ", text).split("\n")))


def paragraphs(text: str) -> list[str]:
    """Clean text cut at its blank lines; a fenced block of code is one paragraph."""
    found: list[list[str]] = [[]]
    fence = ""
    for line in text.split("\n"):
        if not line and not fence:
            found.append([])
            continue
        mark = FENCE.match(line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        found[-1].append(line)
    return ["\n".join(lines) for lines in found if lines]


def join(parts: list[str]) -> str:
    """The text of a document, or of a part of it."""
    return _BETWEEN.join(parts)


def chunks(parts: list[str], *, limit: int) -> list[str]:
    """Texts of at most `limit` characters, cut between paragraphs; a longer paragraph is cut inside.

    A heading goes with what follows it. Nothing is lost but the white space at the cuts.
    """
    texts: list[str] = []
    current: list[str] = []
    size = 0
    for piece in (piece for paragraph in parts for piece in _pieces(paragraph, limit)):
        if current and size + len(_BETWEEN) + len(piece) > limit:
            start = len(current)
            while start and HEADING.fullmatch(current[start - 1]):
                start -= 1
            # the headings at the end go to the next text, if there is text before them and room there
            if start == 0 or len(join([*current[start:], piece])) > limit:
                start = len(current)
            texts.append(join(current[:start]))
            current = current[start:]
            size = len(join(current))
        size += len(piece) + (len(_BETWEEN) if current else 0)
        current.append(piece)
    return [*texts, join(current)] if current else texts


def _pieces(paragraph: str, limit: int) -> Iterator[str]:
    """A paragraph in pieces of at most `limit` characters, cut after lines, else between words."""
    while len(paragraph) > limit:
        end = piece_end(paragraph, limit)
        yield paragraph[:end].rstrip()
        paragraph = paragraph[end:].lstrip()
    if paragraph:
        yield paragraph
