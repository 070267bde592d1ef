"""The text of a .pdf: the lines of its pages, joined to paragraphs.

A PDF holds positions of letters, not paragraphs: they are guessed from the lengths of lines, and no letter is lost if
the guess is wrong. Lines that run at the top or bottom of many pages (headers, footers, page numbers) are found by
comparing pages, never by how one line looks.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from sft_play.documents.text import Block, Extract, ReadOptions, Unreadable, clean
from sft_play.log import one_line

RUNNING_LINES = "lines that run over pages (.pdf)"
MAX_PAGES = 20_000
_EDGE_LINES = 3
"""Lines at the top and at the bottom of a page that may be running ones."""
_LEAST_PAGES = 3
_LEAST_SHARE = 1 / 3
"""A running line is on at least this share of the pages: left or right ones, or a long chapter."""
_FULL_LINE = 0.7
_FULL_LINE_WITH_END = 0.9
"""Text was wrapped after a line of at least this share of a full line; after the end of a sentence it takes more."""

_GAP = 1.4
"""A paragraph ends where the next line is this many times further below than usual: than the page's lower quartile."""

_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})
_SENTENCE_ENDS = (".", "!", "?", ":", "。", "！", "？")
_NUMBER = re.compile(r"\d+")
_ITEM = re.compile(r"\s*(?:[•●▪◦‣∙–—*-]|\(?\d{1,3}[.)]|\(?[a-zA-Z][.)])\s")


def read_pdf(data: bytes, options: ReadOptions) -> Extract:
    """The blocks of a PDF that holds text.

    Raises:
        Unreadable: it is broken, locked, or has pages but no text.
    """
    extract = Extract()
    pages = [clean(text, extract.left_out).split("\n") for text in _pages(data)]
    if not any(line.strip() for page in pages for line in page):
        raise Unreadable(f"holds no text on its {len(pages)} pages (scanned pictures?); run it through OCR first")
    running = _running(pages)
    body = [[line for n, line in enumerate(page) if (index, n) not in running] for index, page in enumerate(pages)]
    if running and any(line.strip() for page in body for line in page):  # pages that are all alike lose nothing
        extract.boilerplate(
            RUNNING_LINES, sum(len(pages[page][line].strip()) for page, line in running), len(running), options
        )
        pages = body if options.drop_boilerplate else pages
    extract.blocks = [Block(text) for text in _paragraphs(pages)]
    return extract


def _pages(data: bytes) -> list[str]:
    import pypdf
    from pypdf.errors import DependencyError

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        # many PDFs are encrypted with an empty password, only to forbid printing or copying
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("locked with a password; save it without one")
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise Unreadable(f"has {count:,} pages, more than the {MAX_PAGES:,} that are read; split it")
        return [_page(page).translate(_LIGATURES) for page in reader.pages]
    except DependencyError as error:
        raise Unreadable(
            f"encrypted, which needs another package ({one_line(str(error))}): pip install cryptography, or save "
            "it without encryption"
        ) from None
    except (Unreadable, MemoryError, RecursionError):
        raise
    except Exception as error:  # pypdf raises many kinds for damaged files
        raise Unreadable(f"pypdf cannot read it ({type(error).__name__}: {one_line(str(error))})") from None


def _page(page: Any) -> str:
    """A page's text, with a blank line where the next line is further below than lines of a paragraph are."""
    pieces: list[tuple[str, float]] = []

    # pypdf gives the current and the text matrix: the height on the page is the y of the text's origin in both
    def visit(text: str, around: list[float], matrix: list[float], font: object, size: float) -> None:
        pieces.append((text, matrix[4] * around[1] + matrix[5] * around[3] + around[5]))

    text: str = page.extract_text(visitor_text=visit) or ""
    lines = _lines(pieces)
    if "".join("".join(line for line, _ in lines).split()) != "".join(text.split()):
        return text  # the pieces are not the whole text: better no gaps than lost words
    heights = [height for line, height in lines if line.strip()]
    steps = sorted(above - below for above, below in pairwise(heights) if above > below)
    # the lower quartile: lines of one paragraph are nearer than lines of two
    usual = steps[(len(steps) - 1) // 4] if steps else 0.0
    spaced: list[str] = []
    before: float | None = None
    for line, height in lines:
        if line.strip():
            if before is not None and before - height > _GAP * usual > 0:
                spaced.append("")
            before = height
        spaced.append(line)
    return "\n".join(spaced)


def _lines(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Lines with the height of the first letter of each."""
    lines: list[tuple[str, float]] = []
    current, height = "", 0.0
    for text, place in pieces:
        for number, part in enumerate(text.split("\n")):
            if number:
                lines.append((current, height))
                current = ""
            if not current.strip():
                height = place
            current += part
    return [*lines, (current, height)]


# Lines that run over pages


def _running(pages: list[list[str]]) -> set[tuple[int, int]]:
    """Page and line of running lines: the same text at the same edge of many pages, but for the page's number."""
    running: set[tuple[int, int]] = set()
    # from the edge inwards: a line is looked at only where all lines outside of it run over pages
    for from_top in (True, False):
        for _ in range(_EDGE_LINES):
            outer = {
                index: line for index, page in enumerate(pages) if (line := _edge(page, index, running, from_top)) >= 0
            }
            same = _same(pages, outer)
            if not same:
                break
            running |= same
    return running


def _edge(page: list[str], index: int, running: set[tuple[int, int]], from_top: bool) -> int:
    """The outermost line of a page with text that is not a running one; -1 where the page has none left."""
    order = range(len(page)) if from_top else range(len(page) - 1, -1, -1)
    return next((line for line in order if page[line].strip() and (index, line) not in running), -1)


def _same(pages: list[list[str]], outer: dict[int, int]) -> set[tuple[int, int]]:
    needed = max(_LEAST_PAGES, len(pages) * _LEAST_SHARE)
    exact: dict[str, list[int]] = {}
    numbered: dict[tuple[object, ...], list[int]] = {}
    for page, line in outer.items():
        text = " ".join(pages[page][line].split())
        exact.setdefault(text, []).append(page)
        # a page's number is what grows with the page: the difference is the same on all of them
        numbers = [int(number) for number in _NUMBER.findall(text) if len(number) < 10]
        form = _NUMBER.sub("#", text)
        for place, number in enumerate(numbers):
            others = (*numbers[:place], *numbers[place + 1 :])
            numbered.setdefault((form, place, number - page, others), []).append(page)
    groups = [*exact.values(), *numbered.values()]
    return {(page, outer[page]) for group in groups if len(group) >= needed for page in group}


# Paragraphs


def _paragraphs(pages: list[list[str]]) -> Iterator[str]:
    """Lines joined where text was wrapped, over page ends too."""
    words = Counter(word for page in pages for line in page for word in re.findall(r"[\w'’-]+", line.lower()))
    current: list[str] = []
    width_before = 0
    for page in pages:
        width = _width(page)
        for place, line in enumerate(line.strip() for line in _trimmed(page)):
            # over the end of a page only where no sentence ends: the next page may begin with a paragraph of its own
            may_continue = place > 0 or not (current and current[-1].endswith(_SENTENCE_ENDS))
            if current and line and may_continue and _is_wrapped(current[-1], line, max(width, width_before)):
                current += _glue(current.pop(), line, words)
            else:
                if current:
                    yield "".join(current)
                current = [line] if line else []
            width_before = width
    if current:
        yield "".join(current)


def _trimmed(page: list[str]) -> list[str]:
    """A page's lines without blank ones at its ends: a paragraph may continue on the next page."""
    with_text = [index for index, line in enumerate(page) if line.strip()]
    return page[with_text[0] : with_text[-1] + 1] if with_text else []


def _width(page: list[str]) -> int:
    """The length of a full line: nine of ten lines are no longer, and a stray long one does not matter."""
    lengths = sorted(len(line.strip()) for line in page if line.strip())
    return lengths[(len(lengths) - 1) * 9 // 10] if lengths else 0


def _is_wrapped(line: str, after: str, width: int) -> bool:
    if _ITEM.match(after):
        return False
    if line.endswith("-") and line[-2:-1].isalpha() and after[0].islower():  # a word divided at the line's end
        return True
    is_end = line.endswith(_SENTENCE_ENDS) and not after[0].islower()
    return len(line) >= (_FULL_LINE_WITH_END if is_end else _FULL_LINE) * width


def _glue(before: str, line: str, words: Counter[str]) -> list[str]:
    """Two lines of a paragraph and what is between them; a hyphen at a line's end goes unless the document writes the
    word with it more often."""
    end = re.search(r"([^\W\d_]+)-$", before)
    start = re.match(r"[^\W\d_]+", line)
    if end and start and start.group()[0].islower():
        whole, hyphened = f"{end.group(1)}{start.group()}".lower(), f"{end.group(1)}-{start.group()}".lower()
        return [before if words[hyphened] > words[whole] else before[:-1], line]
    if (before.endswith("-") and before[-2:-1].isalnum()) or (_is_cjk(before[-1]) and _is_cjk(line[0])):
        return [before, line]
    return [before, " ", line]


def _is_cjk(letter: str) -> bool:
    """Whether it is written without spaces between words."""
    return "\u3000" <= letter <= "\u9fff" or "\uf900" <= letter <= "\ufaff" or "\uff00" <= letter <= "\uffef"
