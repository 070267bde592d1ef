"""The text of reStructuredText, as docutils reads it; files that it names are never opened.

Directives and roles that docutils does not know (Sphinx has hundreds) keep their words: the body of such a directive
is read as a document of its own, and of a role the text remains.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from sft_play.documents.text import Block, Extract, ReadOptions, paragraphs

FILES = "directives that name other files, and raw ones (.rst)"
COMMENTS = "comments (.rst)"
CONTENTS = "tables of contents (.rst)"

_SETTINGS = {
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "report_level": 1,  # messages stay in the tree: some hold the text that they are about
    "halt_level": 5,
    "warning_stream": False,
    "traceback": True,
    "_disable_config": True,  # a docutils.conf in the current folder is not meant for these documents
    "line_length_limit": 100_000_000,
    "syntax_highlight": "none",
    "input_encoding": "unicode",
    "smart_quotes": False,
    "doctitle_xform": False,
    "sectsubtitle_xform": False,
    "docinfo_xform": False,
    "language_code": "en",
}
_VERBATIM = {"testcode", "testoutput", "testsetup", "doctest", "prompt", "productionlist", "ipython", "mermaid"}
_VERBATIM |= {"graphviz", "digraph", "graph", "uml", "code-cell", "plot", "tikz", "jinja", "console"}
_FILE_DIRECTIVES = {"include", "raw", "literalinclude", "toctree", "csv-table", "autosummary"}
_DIRECTIVE = re.compile(r"\.\.[ \t]+(?:\|[^|\n]+\|[ \t]+)?([A-Za-z][\w.:+-]*?)[ \t]?::[ \t]*(.*)")
_OPTION = re.compile(r"\s+:[\w-]+:(\s.*)?$")
_ROLE = re.compile(r":[\w.:+-]+:`(.*)`", re.DOTALL)
_ROLE_BEHIND = re.compile(r"`(.*)`:[\w.:+-]+:", re.DOTALL)
_HEADER_LINE = re.compile(r"[A-Z][\w-]*:( .*)?$")
_TOO_SHORT = ("Title underline too short", "Title overline too short")
_MAX_DEPTH = 20


def read_rst(text: str, options: ReadOptions, *, depth: int = 0) -> Extract:
    """The blocks of a reStructuredText document."""
    from docutils.core import publish_doctree  # type: ignore[import-untyped]
    from docutils.parsers.rst import Parser  # type: ignore[import-untyped]

    extract = Extract()
    parser = Parser(rfc2822=_has_mail_headers(text))
    tree = publish_doctree(text, parser=parser, settings_overrides=dict(_SETTINGS))
    extract.blocks = list(_Walker(extract, options, depth).blocks(tree))
    return extract


def _has_mail_headers(text: str) -> bool:
    """Whether it begins with fields as a PEP does: at least two lines `Name: value`."""
    head = text.lstrip("\n").split("\n\n", 1)[0].split("\n")
    fields = [line for line in head if not line.startswith((" ", "\t"))]
    return len(fields) >= 2 and all(_HEADER_LINE.match(line) for line in fields)


class _Walker:
    """From docutils' nodes to blocks; `_depth` counts directives read inside directives."""

    def __init__(self, extract: Extract, options: ReadOptions, depth: int) -> None:
        self._extract, self._options, self._depth = extract, options, depth

    def blocks(self, node: Any, indent: str = "") -> Iterator[Block]:
        """The blocks below a node that holds others."""
        for item in node.children:
            yield from self._block(item, indent)

    def _block(self, item: Any, indent: str) -> Iterator[Block]:
        # docutils' own visitors find their methods by the name of a node's class too
        kind = item.__class__.__name__
        handler = getattr(self, f"_{kind}", None)
        if handler is not None:
            yield from handler(item, indent)
        elif kind in ("title", "subtitle", "rubric"):
            yield Block(self._words(item), "heading")
        elif kind in ("literal_block", "doctest_block", "math_block"):
            yield Block(item.astext(), "code")
        elif kind in ("paragraph", "attribution", "caption", "term", "classifier"):
            yield Block(self._words(item))
        elif kind in ("substitution_definition", "target", "pending", "transition", "colspec", "meta"):
            return
        elif kind in ("Text", "inline", "reference", "raw"):
            yield Block(self._words(item))
        else:
            yield from self.blocks(item, indent)

    def _comment(self, item: Any, indent: str) -> Iterator[Block]:
        self._extract.left_out.add(COMMENTS, len(item.astext()))
        yield from ()  # a generator, as the other handlers

    def _image(self, item: Any, indent: str) -> Iterator[Block]:
        yield Block(item.get("alt", ""))

    def _topic(self, item: Any, indent: str) -> Iterator[Block]:
        if "contents" in item.get("classes", ()):
            self._extract.boilerplate(CONTENTS, len(item.astext()), 1, self._options)
            if self._options.drop_boilerplate:
                return
        yield from self.blocks(item, indent)

    def _line_block(self, item: Any, indent: str) -> Iterator[Block]:
        yield Block("\n".join(self._lines(item, "")))

    def _lines(self, item: Any, indent: str) -> Iterator[str]:
        for part in item.children:
            if part.__class__.__name__ == "line_block":
                yield from self._lines(part, indent + "  ")
            else:
                yield indent + self._words(part)

    def _bullet_list(self, item: Any, indent: str) -> Iterator[Block]:
        for part in item.children:
            yield from self._item(part, f"{indent}- ", indent)

    def _enumerated_list(self, item: Any, indent: str) -> Iterator[Block]:
        from sft_play.documents.docx_numbering import formatted

        forms = {"loweralpha": "lowerLetter", "upperalpha": "upperLetter", "lowerroman": "lowerRoman"}
        form = {**forms, "upperroman": "upperRoman"}.get(item.get("enumtype", ""), "decimal")
        for place, part in enumerate(item.children):
            number = formatted(int(item.get("start", 1)) + place, form)
            yield from self._item(part, f"{indent}{item.get('prefix', '')}{number}{item.get('suffix', '.')} ", indent)

    def _item(self, item: Any, label: str, indent: str) -> Iterator[Block]:
        for place, block in enumerate(self.blocks(item, indent + "  ")):
            is_first = place == 0 and block.kind == "text"
            yield Block(label + block.text, "list") if is_first else block

    def _definition_list_item(self, item: Any, indent: str) -> Iterator[Block]:
        terms = [self._words(part) for part in item.children if part.__class__.__name__ in ("term", "classifier")]
        yield Block(indent + " : ".join(terms), "list")
        for part in item.children:
            if part.__class__.__name__ not in ("term", "classifier"):
                yield from self._item(part, f"{indent}  ", indent + "  ")

    def _field(self, item: Any, indent: str) -> Iterator[Block]:
        name, *body = item.children
        yield from self._labelled(f"{indent}{self._words(name)}:", body)

    def _option_list_item(self, item: Any, indent: str) -> Iterator[Block]:
        group, *body = item.children
        yield from self._labelled(f"{indent}{group.astext()} ", body)

    def _footnote(self, item: Any, indent: str) -> Iterator[Block]:
        labels = [part for part in item.children if part.__class__.__name__ == "label"]
        body = [part for part in item.children if part.__class__.__name__ != "label"]
        yield from self._labelled(f"[{labels[0].astext() if labels else ''}]", body)

    _citation = _footnote

    def _labelled(self, label: str, body: list[Any]) -> Iterator[Block]:
        blocks: list[Block] = []
        for part in body:
            is_holder = part.__class__.__name__ in ("field_body", "description")
            blocks += self.blocks(part) if is_holder else self._block(part, "")
        if blocks and blocks[0].kind in ("text", "list"):
            yield Block(f"{label} {blocks[0].text.strip()}", "list")
            blocks = blocks[1:]
        else:
            yield Block(label, "list")
        yield from blocks

    def _table(self, item: Any, indent: str) -> Iterator[Block]:
        lines = []
        for part in item.findall():
            kind = part.__class__.__name__
            if kind == "title" and part.parent is item:
                lines.append(self._words(part))
            elif kind == "row":
                cells = [list(self.blocks(cell)) for cell in part.children if cell.__class__.__name__ == "entry"]
                lines.append(" | ".join(" ".join(" ".join(b.text.split()) for b in cell) for cell in cells))
        yield Block("\n".join(lines), "table")

    # What docutils does not know, or would not do

    def _system_message(self, item: Any, indent: str) -> Iterator[Block]:
        """The text that a message is about, where it is nowhere else in the tree."""
        message = " ".join(part.astext() for part in item.children if part.__class__.__name__ == "paragraph")
        # unknown directives and roles come as messages, with their source in a literal block
        if message.startswith(_TOO_SHORT):  # the title itself is in the tree
            return
        for part in item.children:
            if part.__class__.__name__ == "literal_block":
                yield from self._source(part.astext())

    def _source(self, text: str) -> Iterator[Block]:
        first, _, rest = text.partition("\n")
        match = _DIRECTIVE.match(first.strip())
        if match is None:
            yield from (Block(piece) for piece in paragraphs(text))
            return
        directive, argument = match.group(1).lower(), match.group(2).strip()
        lines = rest.split("\n")
        options = 0
        while options < len(lines) and _OPTION.match(lines[options]):
            options += 1
        body = textwrap.dedent("\n".join(lines[options:])).strip("\n")
        if directive in _FILE_DIRECTIVES and (directive != "csv-table" or not body):
            self._extract.left_out.add(FILES, len(text))
        elif directive in _VERBATIM:
            yield Block(f"{argument}\n{body}".strip("\n") if argument and directive == "prompt" else body, "code")
        else:
            yield Block(argument)
            yield from self._inner(body)

    def _inner(self, body: str) -> Iterator[Block]:
        """The body of a directive, read as a document; as plain paragraphs where directives are nested too deep."""
        if not body.strip():
            return
        if self._depth >= _MAX_DEPTH:
            yield from (Block(piece) for piece in paragraphs(body))
            return
        inner = read_rst(body, self._options, depth=self._depth + 1)
        self._extract.left_out.add_all(inner.left_out.counts)
        self._extract.kept.add_all(inner.kept.counts)
        yield from inner.blocks

    def _words(self, item: Any) -> str:
        """The text of a paragraph on one line; marks of notes in brackets."""
        return " ".join("".join(self._inline(item)).split())

    def _inline(self, item: Any) -> Iterator[str]:
        kind = item.__class__.__name__
        if kind == "Text":
            yield item.astext()
        elif kind in ("footnote_reference", "citation_reference"):
            yield f"[{item.astext()}]"
        elif kind == "problematic":
            yield role_text(item.astext())
        elif kind == "image":
            yield item.get("alt", "")
        elif kind == "system_message":
            return
        else:
            for part in item.children:
                yield from self._inline(part)


def role_text(source: str) -> str:
    """The words of a role that is not known: of ``:func:`~a.b` `` they are `a.b`, of `title <target>` the title."""
    match = _ROLE.fullmatch(source) or _ROLE_BEHIND.fullmatch(source)
    if match is None:
        return source
    text = match.group(1)
    titled = re.fullmatch(r"(.*\S)\s*<[^<>]*>", text, re.DOTALL)
    return titled.group(1) if titled else text.lstrip("~!")
