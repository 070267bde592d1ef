"""The text of a .docx in reading order: paragraphs, lists, tables, text boxes, notes and formulas.

The text is what a reader sees once all changes are accepted: tracked insertions are in, deletions and hidden text are
left out and counted. Unknown elements are walked through, so that text inside them is not lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sft_play.documents.docx_formula import linear
from sft_play.documents.docx_numbering import BULLET, Numbering, roman
from sft_play.documents.docx_package import Package, attribute, child, children, is_on, name
from sft_play.documents.text import MAX_CELL_CHARS, Block, Extract, Kind, ReadOptions, Unreadable

DELETIONS = "tracked deletions (.docx)"
HIDDEN = "hidden text (.docx)"
HEADERS = "page headers and footers (.docx)"
PICTURE_SIGNS = "signs of picture fonts (.docx)"
EMBEDDED = "embedded files (.docx)"

_NO_TEXT = frozenset({"w:instrText", "w:delText", "w:delInstrText", "w:fldChar", "w:softHyphen", "w:binData"})
_PROPERTIES = frozenset(
    f"w:{item}" for item in ("pPr", "rPr", "tblPr", "tblGrid", "tblPrEx", "trPr", "tcPr", "sectPr", "sdtPr", "sdtEndPr")
) | {"w:numberingChange", "w:customXmlPr", "w:smartTagPr", "w:rubyPr"}
_DELETED = frozenset({"w:del", "w:moveFrom", "w:customXmlDelRangeStart"})
_BLOCK_PARENTS = frozenset({"w:sdt", "w:sdtContent", "w:customXml", "w:smartTag", "w:ins", "w:moveTo"})


@dataclass(frozen=True)
class _Style:
    parent: str | None = None
    hidden: bool | None = None
    outline: int | None = None
    number: str | None = None
    level: int | None = None
    is_code: bool | None = None


_CODE_STYLES = ("source code", "code", "code block", "html preformatted", "preformatted text", "plain text code")


def _outline(properties: Any) -> int | None:
    value = attribute(child(properties, "w:outlineLvl"), "w:val")
    return int(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 4 else None


def _numbered(properties: Any) -> tuple[str | None, int | None]:
    numbering = child(properties, "w:numPr")
    level = attribute(child(numbering, "w:ilvl"), "w:val")
    return attribute(child(numbering, "w:numId"), "w:val"), int(level) if level in list("012345678") else None


class _Styles:
    """What paragraph and character styles say about hidden text, headings and lists, with what they inherit."""

    def __init__(self, root: Any) -> None:
        self._styles: dict[str, _Style] = {}
        self.default = ""
        for item in children(root) if root is not None else ():
            if name(item) == "w:style":
                key = attribute(item, "w:styleId") or ""
                self._styles[key] = self._read(item)
                if attribute(item, "w:type") == "paragraph" and attribute(item, "w:default") in ("1", "true", "on"):
                    self.default = key

    @staticmethod
    def _read(item: Any) -> _Style:
        paragraph = child(item, "w:pPr")
        number, level = _numbered(paragraph)
        outline = _outline(paragraph)
        label = (attribute(child(item, "w:name"), "w:val") or "").lower()
        # by the style's built-in name, which is English in every language of Word
        if outline is None and (label.startswith("heading ") or label == "title"):
            outline = 0
        return _Style(
            parent=attribute(child(item, "w:basedOn"), "w:val"),
            hidden=is_on(child(child(item, "w:rPr"), "w:vanish")),
            outline=outline,
            number=number,
            level=level,
            is_code=True if label in _CODE_STYLES else None,
        )

    def find(self, key: str | None, label: str) -> Any:
        """The first value of a field along the chain of styles."""
        seen: set[str] = set()  # a broken file's styles may be based on each other in a circle
        while key is not None and key in self._styles and key not in seen:
            value = getattr(self._styles[key], label)
            if value is not None:
                return value
            seen.add(key)
            key = self._styles[key].parent
        return None


@dataclass
class _Paragraph:
    """The pieces of a paragraph, and the blocks of text boxes inside it, which follow it."""

    pieces: list[str] = field(default_factory=list)
    boxes: list[Block] = field(default_factory=list)


class _Reader:
    """Walks through the parts of one document."""

    def __init__(self, package: Package, extract: Extract) -> None:
        self._package = package
        self._extract = extract
        main = package.main_part()
        self._relations = package.relations(main)
        self._styles = _Styles(self._linked("styles"))
        self._numbering = Numbering(self._linked("numbering"))
        self._marks: dict[tuple[str, str], str] = {}
        self.root = package.read(main)

    def _linked(self, kind: str) -> Any:
        target = next((relation.target for relation in self._relations.values() if relation.kind == kind), None)
        return None if target is None else self._package.read(target)

    # Blocks

    def blocks(self, parent: Any) -> list[Block]:
        """The blocks inside an element that holds paragraphs and tables."""
        blocks: list[Block] = []
        pending: _Paragraph | None = None  # a paragraph whose end mark was deleted continues in the next one
        for item in self._flat(parent):
            kind = name(item)
            if kind == "w:p":
                pending = self._paragraph(item, pending, blocks)
            elif kind == "w:tbl":
                blocks += self._table(item)
            elif kind == "w:altChunk":
                self._extract.left_out.add(EMBEDDED, 0)
            else:
                loose = _Paragraph()
                self._inline(item, loose)
                blocks += self._finished(loose, "text")
        return blocks + (self._finished(pending, "text") if pending is not None else [])

    def _flat(self, parent: Any) -> Iterable[Any]:
        """The paragraphs, tables and loose text inside an element, without the elements that only wrap them."""
        for item in children(parent):
            kind = name(item)
            if kind in _PROPERTIES:
                continue
            if kind == "mc:AlternateContent":
                yield from self._flat(_alternative(item))
            elif kind in _DELETED:
                self._count(item, DELETIONS)
            elif kind in _BLOCK_PARENTS or (kind.startswith("?:") and child(item, "w:p") is not None):
                yield from self._flat(item)
            else:
                yield item

    def _paragraph(self, item: Any, pending: _Paragraph | None, blocks: list[Block]) -> _Paragraph | None:
        """Read a paragraph into `blocks`; one that is returned continues in the next one."""
        properties = child(item, "w:pPr")
        style = attribute(child(properties, "w:pStyle"), "w:val") or self._styles.default
        paragraph = pending or _Paragraph()
        self._hidden_by_style = bool(self._styles.find(style, "hidden"))
        self._inline_all(item, paragraph)
        # `w:rPr` here belongs to the paragraph's mark: where that was deleted, the next paragraph continues this one
        mark = child(properties, "w:rPr")
        if child(mark, "w:del") is not None or child(mark, "w:moveFrom") is not None:
            return paragraph
        label, kind, indent = self._form(properties, style, is_empty=not "".join(paragraph.pieces).strip())
        if label:
            paragraph.pieces.insert(0, f"{indent}{label} ")
        if kind == "text" and self._styles.find(style, "is_code"):
            kind = "code"
        blocks += self._finished(paragraph, kind)
        return None

    def _finished(self, paragraph: _Paragraph, kind: Kind) -> list[Block]:
        return [Block("".join(paragraph.pieces), kind), *paragraph.boxes]

    def _form(self, properties: Any, style: str, *, is_empty: bool) -> tuple[str, Kind, str]:
        """Label, kind and indent of a paragraph; an empty one is not counted, since Word shows no number for it."""
        outline = _outline(properties)
        outline = self._styles.find(style, "outline") if outline is None else outline
        is_heading = outline is not None and outline < 9  # level 9 is body text
        number, level = _numbered(properties)
        if number is None:
            number = self._styles.find(style, "number")
            level = self._styles.find(style, "level") if level is None else level
            if level is None and number is not None:
                level = self._numbering.level_of_style(number, style)
        if number is None or number == "0" or is_empty:  # 0 takes a paragraph out of its style's list
            return "", "heading" if is_heading else "text", ""
        label = self._numbering.label(number, level or 0)
        if is_heading:
            return "" if label in (None, BULLET) else label or "", "heading", ""  # a heading keeps its number only
        return label or "", "text" if label is None else "list", "  " * (level or 0)

    # Inside a paragraph

    def _inline_all(self, parent: Any, paragraph: _Paragraph) -> None:
        for item in children(parent):
            self._inline(item, paragraph)

    def _inline(self, item: Any, paragraph: _Paragraph) -> None:
        kind = name(item)
        if kind in _PROPERTIES or kind in _NO_TEXT:
            return
        if kind == "w:t" or kind == "a:t":
            paragraph.pieces.append(item.text or "")
        elif kind in _SIGNS:
            paragraph.pieces.append(_SIGNS[kind])
        elif kind == "w:r":
            properties = child(item, "w:rPr")
            # the run's own setting goes before its character style, and that before the paragraph's style
            is_hidden = is_on(child(properties, "w:vanish"))
            if is_hidden is None:
                is_hidden = self._styles.find(attribute(child(properties, "w:rStyle"), "w:val"), "hidden")
            if is_hidden is None:
                is_hidden = self._hidden_by_style
            if is_hidden:
                self._count(item, HIDDEN)
            else:
                self._inline_all(item, paragraph)
        elif kind in _DELETED:
            self._count(item, DELETIONS)
        elif kind in ("w:footnoteReference", "w:endnoteReference"):
            paragraph.pieces.append(self._mark(kind, attribute(item, "w:id") or ""))
        elif kind == "w:sym":
            paragraph.pieces.append(self._symbol(item))
        elif kind == "w:ruby":
            base = child(item, "w:rubyBase")
            self._inline_all([] if base is None else base, paragraph)
            reading = "".join(self._text_of(part, paragraph) for part in children(item) if name(part) == "w:rt")
            paragraph.pieces.append(f"({reading})" if reading.strip() else "")
        elif kind in ("m:oMath", "m:oMathPara"):
            paragraph.pieces.append(linear(item, lambda node: self._text_of(node, paragraph)))
        elif kind == "mc:AlternateContent":
            self._inline_all(_alternative(item), paragraph)
        elif kind == "w:txbxContent":
            paragraph.boxes += self._inside(item)
        elif kind in ("w:p", "w:tbl"):  # not allowed here by the standard, but some programs write it
            paragraph.boxes += self._inside([item])
        elif kind == "a:p":
            self._inline_all(item, paragraph)
            paragraph.pieces.append("\n")
        else:
            self._inline_all(item, paragraph)

    def _inside(self, item: Any) -> list[Block]:
        """Blocks of something inside a paragraph; the paragraph's own style does not apply to them."""
        before = self._hidden_by_style
        blocks = self.blocks(item)
        self._hidden_by_style = before
        return blocks

    def _text_of(self, item: Any, paragraph: _Paragraph) -> str:
        inner = _Paragraph()
        self._inline(item, inner)
        paragraph.boxes += inner.boxes
        return "".join(inner.pieces)

    _hidden_by_style = False

    def _mark(self, kind: str, number: str) -> str:
        key = (kind, number)
        if key not in self._marks:  # numbered as Word shows them: in the order of the references, not of the ids
            count = sum(earlier == kind for earlier, _ in self._marks) + 1
            self._marks[key] = f"[{count if kind == 'w:footnoteReference' else roman(count)}]"
        return self._marks[key]

    def _symbol(self, item: Any) -> str:
        try:
            code = int(attribute(item, "w:char") or "", 16)
        except ValueError:
            code = 0xF000
        # Wingdings and Symbol live in the private-use area U+F000 to U+F0FF
        if 0xE000 <= code < 0xF900 or not 0x20 <= code < 0x110000:  # an index into the font, not a character
            self._extract.left_out.add(PICTURE_SIGNS, 1)
            return ""
        return chr(code)

    def _count(self, item: Any, reason: str) -> None:
        """Count the text inside something that is left out."""
        text = "".join(node.text or "" for node in item.iter() if name(node) in ("w:t", "w:delText", "m:t"))
        if text:
            self._extract.left_out.add(reason, len(text))

    # Tables

    def _table(self, table: Any) -> list[Block]:
        """Lines `cell | cell | cell`; rows with long or nested cells as the blocks of their cells."""
        blocks: list[Block] = []
        lines: list[str] = []
        for row in self._flat(table):
            if name(row) == "w:tr" and child(child(row, "w:trPr"), "w:del") is not None:
                self._count(row, DELETIONS)
                continue
            cells = [self.blocks(cell) for cell in self._cells(row)]  # a cell holds paragraphs and tables
            line = _line(cells)
            if line is not None:
                lines.append(line)
                continue
            blocks += _as_block(lines)
            lines = []
            blocks += [block for cell in cells for block in cell]
        return blocks + _as_block(lines)

    def _cells(self, row: Any) -> Iterable[Any]:
        if name(row) != "w:tr":  # a paragraph right inside a table: no row by the standard, but text
            yield [row]
            return
        for item in self._flat(row):
            if name(item) == "w:tc" and child(child(item, "w:tcPr"), "w:cellDel") is not None:
                self._count(item, DELETIONS)
            else:
                yield item if name(item) == "w:tc" else [item]

    # Notes, headers

    def notes(self) -> list[Block]:
        """Footnotes and endnotes that the text refers to, each with its mark, in the order of the marks."""
        blocks: list[Block] = []
        for label, part in (("w:footnoteReference", "footnotes"), ("w:endnoteReference", "endnotes")):
            root = self._linked(part)
            # separators and notes that nothing refers to are in the part too, and in no mark
            texts = {attribute(item, "w:id"): item for item in children(root)} if root is not None else {}
            for (kind, number), mark in list(self._marks.items()):
                if kind == label and number in texts:
                    blocks += _marked(mark, self.blocks(texts[number]))
        return blocks

    def headers(self, wanted: str) -> list[Any]:
        """The roots of the page headers (`w:headerReference`) or footers of all sections, each part once."""
        ids = [attribute(item, "r:id") for item in self.root.iter() if name(item) == wanted]
        targets = dict.fromkeys(
            self._relations[key].target for key in ids if key is not None and key in self._relations
        )
        roots = [self._package.read(target) for target in targets]
        return [root for root in roots if root is not None]

    def count_headers(self) -> None:
        """Count the text of headers and footers that are left out; a broken one does no harm here."""
        with contextlib.suppress(Unreadable):
            for root in [*self.headers("w:headerReference"), *self.headers("w:footerReference")]:
                self._count(root, HEADERS)


_SIGNS = {
    "w:tab": "\t",
    "w:ptab": "\t",
    "w:br": "\n",
    "w:cr": "\n",
    "a:br": "\n",
    "w:noBreakHyphen": "-",
}


def _alternative(item: Any) -> Any:
    """The form of a drawing to read: the first choice, or the fallback where only that has text."""
    choices = [part for part in children(item) if name(part) == "mc:Choice"]
    fallback = child(item, "mc:Fallback")
    with_text = [
        part
        for part in [*choices, fallback]
        if part is not None
        and any(name(node) in ("w:t", "m:t", "a:t") and (node.text or "").strip() for node in part.iter())
    ]
    return with_text[0] if with_text else choices[0] if choices else fallback if fallback is not None else []


def _line(cells: list[list[Block]]) -> str | None:
    """A row as one line; None for a row of a page's layout: a single cell, a table inside, long cells."""
    if len(cells) < 2 or any(block.kind == "table" for cell in cells for block in cell):
        return None
    texts = [" ".join(" ".join(block.text.split()) for block in cell if block.text.strip()) for cell in cells]
    if any(len(text) > MAX_CELL_CHARS for text in texts):
        return None
    while texts and not texts[-1]:
        texts.pop()
    return " | ".join(texts)


def _as_block(lines: list[str]) -> list[Block]:
    return [Block("\n".join(line for line in lines if line), "table")] if any(lines) else []


def _marked(mark: str, blocks: list[Block]) -> list[Block]:
    """A note's blocks, its mark before the first that has text."""
    for index, block in enumerate(blocks):
        if block.text.strip():
            return [*blocks[:index], Block(f"{mark} {block.text.strip()}", block.kind), *blocks[index + 1 :]]
    return []


def _code_joined(blocks: list[Block]) -> list[Block]:
    """Word writes each line of code as a paragraph: consecutive ones become one block."""
    joined: list[Block] = []
    for block in blocks:
        if joined and block.kind == joined[-1].kind == "code":
            joined[-1] = Block(f"{joined[-1].text}\n{block.text}", "code")
        else:
            joined.append(block)
    return joined


def read_docx(data: bytes, options: ReadOptions) -> Extract:
    """The blocks of a .docx.

    Raises:
        Unreadable: it cannot be opened safely, or is no Word document.
    """
    extract = Extract()
    reader = _Reader(Package(data), extract)
    if reader.root is None:
        raise Unreadable("the archive lacks the part that holds the document")
    body = child(reader.root, "w:body")
    extract.blocks = reader.blocks(reader.root if body is None else body)
    extract.blocks += reader.notes()  # after the text, whose references number them
    if options.headers:
        above = [block for root in reader.headers("w:headerReference") for block in reader.blocks(root)]
        below = [block for root in reader.headers("w:footerReference") for block in reader.blocks(root)]
        extract.blocks = [*above, *extract.blocks, *below]
    else:
        reader.count_headers()
    extract.blocks = _code_joined(extract.blocks)
    if EMBEDDED in extract.left_out.counts:
        extract.notes.append("holds embedded files (altChunk), which are not read")
    return extract
