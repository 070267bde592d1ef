"""The text of a web page: its main part as trafilatura finds it, or what is visible where it finds too little.

Scripts, styles, comments and what is hidden are never text. Navigation, footers, forms and the like are boilerplate.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from sft_play.documents.text import MAX_CELL_CHARS, Block, Extract, Kind, ReadOptions, Unreadable
from sft_play.log import one_line

PAGE_PARTS = "parts of web pages around the main text (.html)"
_LEAST_SHARE = 0.2
"""A main part with less than this share of the visible text outside links, menus and footers is not trusted."""

_NEVER = {"script", "style", "template", "noscript", "head", "iframe", "object", "embed", "svg", "canvas"}
_NEVER |= {"audio", "video", "select", "datalist", "meta", "link", "title"}
_AROUND = {"nav", "footer", "aside", "form", "dialog", "menu", "button"}
_AROUND_ROLES = {"navigation", "banner", "contentinfo", "search", "complementary", "dialog", "alertdialog"}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_BLOCKS = _HEADINGS | _AROUND | {"p", "div", "section", "article", "main", "header", "blockquote", "li", "ul", "ol"}
_BLOCKS |= {"dl", "dt", "dd", "address", "figure", "figcaption", "hr", "details", "summary", "body", "html"}
_BLOCKS |= {"fieldset", "caption", "legend", "center", "hgroup"}


def decode_html(data: bytes) -> str:
    """A page's text by its byte order mark, by the encoding that it declares, else as UTF-8.

    Raises:
        Unreadable: the bytes are not in that encoding, or Python does not know it.
    """
    from bs4.dammit import EncodingDetector

    for mark, encoding in ((codecs.BOM_UTF8, "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            return _decode(data[len(mark) :], encoding, "its byte order mark")
    declared = EncodingDetector.find_declared_encoding(data, is_html=True, search_entire_document=False)
    if declared is None or declared.lower().startswith(("utf-16", "utf-32")):  # its declaration could not be read then
        return _decode(data, "utf-8", "no declared encoding")
    try:
        encoding = codecs.lookup(declared).name
    except LookupError:
        raise Unreadable(
            f"declares an unknown encoding ({one_line(declared, limit=40)}); convert it to UTF-8"
        ) from None
    if encoding in ("iso8859-1", "ascii"):  # browsers read both as Windows' encoding, a superset
        try:
            return data.decode("cp1252")
        except UnicodeDecodeError:  # cp1252 leaves five bytes without a character
            return data.decode("latin-1")
    return _decode(data, encoding, "the encoding that it declares")


def _decode(data: bytes, encoding: str, source: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(
            f"line {line}: byte 0x{data[error.start]:02X} is not {encoding.upper()} ({source}); convert it: iconv -f "
            "ENCODING -t utf-8"
        ) from None
    except (LookupError, ValueError) as error:  # Python's codecs that do not give text, such as base64
        raise Unreadable(f"declares {one_line(encoding)}, which makes no text ({one_line(str(error))})") from None


def read_html(data: bytes, options: ReadOptions) -> Extract:
    """The blocks of a web page.

    Raises:
        Unreadable: its bytes are not in the encoding that it declares.
    """
    return html_blocks(decode_html(data), options)


def html_blocks(text: str, options: ReadOptions) -> Extract:
    """The blocks of a web page's source."""
    extract = Extract()
    soup = _soup(text)
    # Three readings, from all to least: everything, without menus and footers, and trafilatura's main part.
    everything = list(_visible(soup, around=True))
    inner = list(_visible(soup, around=False)) or everything
    chosen = inner
    main, problem = _main_part(str(soup))
    if problem:
        extract.notes.append(problem)
    # trafilatura may take a page's teaser for its text: then the visible text is the better one
    elif _size(main) and _size(main) >= _LEAST_SHARE * _size(list(_visible(soup, around=False, links=False))):
        chosen = _with_title(main, inner)
    lost = _size(everything) - _size(chosen)
    if lost > 0:
        extract.boilerplate(PAGE_PARTS, lost, 1, options)
    extract.blocks = chosen if options.drop_boilerplate else everything
    return extract


def visible_text(fragment: str) -> str:
    """The words of a piece of HTML, such as one inside Markdown."""
    return "\n\n".join(block.text for block in _visible(_soup(fragment), around=True))


def _size(blocks: list[Block]) -> int:
    return sum(len("".join(block.text.split())) for block in blocks)


def _soup(text: str) -> Any:
    """The page's tree without what is never seen."""
    from bs4 import BeautifulSoup

    def is_never_seen(item: Any) -> bool:
        style = str(item.get("style") or "").replace(" ", "").lower()
        return item.name in _NEVER or item.has_attr("hidden") or "display:none" in style or "visibility:hidden" in style

    soup = BeautifulSoup(text, "lxml")
    for item in soup.find_all(is_never_seen):
        if not item.decomposed:  # not gone already, with an element around it
            item.decompose()
    return soup


# What is visible


def _visible(soup: Any, *, around: bool, links: bool = True) -> Iterator[Block]:
    """The visible text as blocks; without menus, footers and the like unless `around`, without links unless `links`."""
    walker = _Walker(around=around, links=links)
    walker.walk(soup)
    walker.end_block()
    yield from walker.blocks


class _Walker:
    def __init__(self, *, around: bool, links: bool) -> None:
        self.blocks: list[Block] = []
        self._around, self._links = around, links
        self._pieces: list[str] = []
        self._kind: Kind = "text"
        self._label = ""

    def end_block(self) -> None:
        """Make a block of the pieces so far."""
        text = "\n".join(" ".join(line.split()) for line in "".join(self._pieces).split("\n")).strip()
        if text:
            self.blocks.append(Block(self._label + text, self._kind))
            self._label = ""
        self._pieces, self._kind = [], "text"

    def walk(self, node: Any) -> None:
        """Collect the text below a node."""
        for item in node.children:
            kind = getattr(item, "name", None)
            if kind is None:
                if type(item).__name__ in ("NavigableString", "CData"):  # not its subclasses, such as comments
                    self._pieces.append(str(item).replace("\n", " "))
                continue
            is_around = kind in _AROUND or str(item.get("role") or "").lower() in _AROUND_ROLES
            if (self._around or not is_around) and (self._links or kind != "a"):
                self._element(item, kind)

    def _element(self, item: Any, kind: str) -> None:
        if kind == "br":
            self._pieces.append("\n")
        elif kind == "img":
            self._pieces.append(f" {item.get('alt') or ''} ")
        elif kind == "pre" or kind == "textarea":
            self.end_block()
            self._whole(item.get_text(), "code")
        elif kind == "table" and _is_data(item):
            self.end_block()
            self._whole("\n".join(_rows(item)), "table")
        elif kind in _BLOCKS or kind in ("table", "tr", "td", "th", "tbody", "thead", "tfoot"):
            self._block(item, kind)
        elif kind == "q":
            self._pieces.append("“")
            self.walk(item)
            self._pieces.append("”")
        else:
            self.walk(item)

    def _whole(self, text: str, kind: Kind) -> None:
        if text.strip():
            self.blocks.append(Block(text.strip("\n"), kind))

    def _block(self, item: Any, kind: str) -> None:
        self.end_block()
        outer = self._label
        if kind == "li":
            self._label = _item_label(item)
        self._kind = "heading" if kind in _HEADINGS else "list" if kind in ("li", "dt", "dd") else "text"
        self.walk(item)
        # the label waits for the first text, which may stand in a paragraph inside the item
        if self._label and self._kind == "text" and "".join(self._pieces).strip():
            self._kind = "list"
        self.end_block()
        self._label = outer if outer and kind != "li" and self._label else ""


def _item_label(item: Any) -> str:
    parents = [parent.name for parent in item.parents]
    depth = sum(name in ("ul", "ol") for name in parents) - 1  # the item's own list is level 0
    indent = "  " * max(depth, 0)
    if item.parent is not None and item.parent.name == "ol":
        place = sum(1 for other in item.find_previous_siblings("li")) + 1
        return f"{indent}{place}. "
    return f"{indent}- "


def _is_data(table: Any) -> bool:
    """Whether a table has short cells, and is not the layout of a page."""
    if table.find(["table", "p", "div", "ul", "ol", "pre", "h1", "h2", "h3"]):
        return False
    return all(len(cell.get_text()) <= MAX_CELL_CHARS for cell in table.find_all(["td", "th"]))


def _rows(table: Any) -> Iterator[str]:
    caption = table.find("caption")
    if caption is not None:
        yield " ".join(caption.get_text().split())
    for row in table.find_all("tr"):
        cells = [" ".join(cell.get_text(" ").split()) for cell in row.find_all(["td", "th"])]
        if any(cells):
            yield " | ".join(cells)


# The main part


def _main_part(text: str) -> tuple[list[Block], str]:
    """The main part by trafilatura, and a note where that is not installed or fails."""
    try:
        import trafilatura
    except ImportError as error:
        why = one_line(str(error).split("\n")[0], limit=80)
        return [], f"trafilatura cannot be imported ({why}): all that is no menu or footer was taken; run make setup"
    try:
        page = trafilatura.bare_extraction(
            text,
            include_comments=False,
            include_tables=True,
            include_formatting=True,
            favor_recall=True,  # rather a sentence too many than a paragraph lost
            with_metadata=False,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the visible text is read instead
        return [], f"trafilatura broke on it ({type(error).__name__}): all that is no menu or footer was taken"
    body = getattr(page, "body", None)
    return (list(_from_body(body, 0)) if body is not None else []), ""


def _from_body(parent: Any, depth: int) -> Iterator[Block]:
    """The blocks of trafilatura's tree: p, head, list/item, table/row/cell, quote, code."""
    loose = parent.text or ""
    for item in parent:
        if item.tag in ("p", "head", "list", "table", "quote", "code", "div") and not _is_inline(item, loose):
            yield from _loose(loose)
            yield from _from_element(item, depth)
            loose = item.tail or ""
        else:
            loose += _flat(item) + (item.tail or "")
    yield from _loose(loose)


def _is_inline(item: Any, before: str) -> bool:
    return item.tag == "code" and "\n" not in "".join(item.itertext()) and bool((before + (item.tail or "")).strip())


def _loose(text: str) -> Iterator[Block]:
    if text.strip():
        yield Block(_tidy(text))


def _flat(item: Any) -> str:
    if item.tag == "lb":
        return "\n"
    return "".join([item.text or "", *(_flat(part) + (part.tail or "") for part in item)])


def _tidy(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.split("\n")).strip()


def _one_line(item: Any) -> str:
    return " ".join(_flat(item).split())


def _from_element(item: Any, depth: int) -> Iterator[Block]:
    if item.tag == "code":
        yield Block("".join(item.itertext()).strip("\n"), "code")
    elif item.tag == "head":
        yield Block(_one_line(item), "heading")
    elif item.tag == "table":
        rows = [" | ".join(_one_line(cell) for cell in row.iter("cell")) for row in item.iter("row")]
        yield Block("\n".join(row for row in rows if row.strip(" |")), "table")
    elif item.tag == "list":
        yield from _from_list(item, depth)
    elif item.tag == "p" and not any(part.tag in ("list", "table", "quote", "p") for part in item):
        yield Block(_tidy(_flat_wrapped(item)))
    else:
        yield from _from_body(item, depth)


def _flat_wrapped(item: Any) -> str:
    """A paragraph's text: line breaks of the source are spaces, `lb` is a line break."""
    lines: list[list[str]] = [[]]

    def walk(node: Any) -> None:
        if node.tag == "lb":
            lines.append([])
        lines[-1].append(node.text or "")
        for part in node:
            walk(part)
            lines[-1].append(part.tail or "")

    walk(item)
    return "\n".join(" ".join("".join(line).split()) for line in lines).strip()


def _from_list(item: Any, depth: int) -> Iterator[Block]:
    is_ordered = item.get("rend") == "ol"
    for place, part in enumerate((part for part in item if part.tag == "item"), start=1):
        label = "  " * depth + (f"{place}. " if is_ordered else "- ")
        for number, block in enumerate(_from_body(part, depth + 1)):
            is_first = number == 0 and block.kind in ("text", "heading")
            yield Block(label + " ".join(block.text.split()), "list") if is_first else block


def _with_title(main: list[Block], visible: list[Block]) -> list[Block]:
    """The main part with the heading right before it on the page, which trafilatura may have left out."""
    texts = [" ".join(block.text.split()) for block in visible]
    first = " ".join(main[0].text.split())
    place = texts.index(first) if first in texts else 0
    before = visible[place - 1] if place else None
    return [before, *main] if before is not None and before.kind == "heading" else main
