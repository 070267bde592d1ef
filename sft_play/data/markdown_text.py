"""The text of Markdown (CommonMark with tables and strikethrough): words, lists and code without their marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sft_play.data.document_text import Block, Extract, Kind, ReadOptions, Unreadable

FRONT_MATTER = "front matter (.md)"
COMMENTS = "comments and scripts in HTML (.md)"

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(?:.*\n)*?\1[ \t]*(?:\n|\Z)")
_FRONT_LINE = re.compile(r"\s*$|\s*#|\s*-(\s|$)|\s*[\w.\"'-]+\s*[:=]|\s+\S")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_BREAK_TAG = re.compile(r"<br\s*/?>", re.IGNORECASE)
_MAX_NESTING = 100


def read_markdown(text: str, options: ReadOptions) -> Extract:
    """The blocks of a Markdown document.

    Raises:
        Unreadable: lists or quotes are nested more than 100 deep.
    """
    from markdown_it import MarkdownIt

    extract = Extract()
    text = _without_front_matter(text, extract)
    parser = MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING}).enable(["table", "strikethrough"])
    tokens = parser.parse(text)
    if any(token.level >= _MAX_NESTING - 1 for token in tokens):  # below this the parser drops what it finds
        raise Unreadable(f"lists or quotes are nested more than {_MAX_NESTING - 1} deep")
    extract.blocks = _Walker(extract).blocks(tokens)
    return extract


def _without_front_matter(text: str, extract: Extract) -> str:
    match = _FRONT_MATTER.match(text)
    inner = match.group().split("\n")[1:-2] if match else []
    if match is None or not all(_FRONT_LINE.match(line) for line in inner) or not any(line.strip() for line in inner):
        return text
    extract.left_out.add(FRONT_MATTER, len(match.group()))
    return text[match.end() :]


class _Walker:
    """From the parser's flat list of tokens to blocks."""

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        self._found: list[Block] = []
        self._lists: list[int | None] = []
        """The next number of each list that is open; None where it has bullets."""
        self._label = ""
        self._kind: Kind = "text"
        self._row: list[str] = []
        self._rows: list[str] | None = None

    def blocks(self, tokens: list[Any]) -> list[Block]:
        """The blocks that the tokens come to."""
        steps: dict[str, Callable[[Any], None]] = {
            "bullet_list_open": lambda token: self._lists.append(None),
            "ordered_list_open": lambda token: self._lists.append(int(token.attrs.get("start", 1))),
            "bullet_list_close": lambda token: self._close_list(),
            "ordered_list_close": lambda token: self._close_list(),
            "list_item_open": self._open_item,
            "list_item_close": lambda token: self._close_item(),
            "heading_open": lambda token: self._set_kind("heading"),
            "heading_close": lambda token: self._set_kind("text"),
            "fence": lambda token: self._add(token.content.rstrip("\n"), "code"),
            "code_block": lambda token: self._add(token.content.rstrip("\n"), "code"),
            "html_block": self._html,
            "inline": self._inline,
            "table_open": lambda token: self._open_table(),
            "table_close": lambda token: self._close_table(),
            "tr_close": lambda token: self._close_row(),
        }
        for token in tokens:
            step = steps.get(token.type)
            if step is not None:
                step(token)
        return self._found

    def _set_kind(self, kind: Kind) -> None:
        self._kind = kind

    def _close_list(self) -> None:
        self._lists.pop()

    def _open_item(self, token: Any) -> None:
        indent = "  " * (len(self._lists) - 1)
        number = self._lists[-1]
        if number is None:
            self._label = f"{indent}- "
        else:
            self._label = f"{indent}{number}. "
            self._lists[-1] = number + 1

    def _close_item(self) -> None:
        self._label = ""

    def _open_table(self) -> None:
        self._rows, self._row = [], []

    def _close_row(self) -> None:
        if self._rows is not None and any(self._row):
            self._rows.append(" | ".join(self._row))
        self._row = []

    def _close_table(self) -> None:
        rows, self._rows = self._rows or [], None
        self._add("\n".join(rows), "table")

    def _add(self, text: str, kind: Kind) -> None:
        if not text.strip():
            return
        if self._label and kind in ("text", "heading"):
            text, kind = self._label + text, "list"
            self._label = ""
        self._found.append(Block(text, kind))

    def _html(self, token: Any) -> None:
        self._add(self._tags_off(token.content), "text")

    def _tags_off(self, source: str) -> str:
        from sft_play.data.html_text import visible_text

        text = visible_text(source)
        hidden = sum(len(comment) for comment in _COMMENT.findall(source))
        if hidden or "<script" in source.lower() or "<style" in source.lower():
            self._extract.left_out.add(COMMENTS, len(source) - len(text))
        return text

    def _inline(self, token: Any) -> None:
        text = "".join(map(self._words, token.children or ()))
        if self._rows is not None:
            self._row.append(" ".join(text.split()))
        else:
            self._add("\n".join(line.strip() for line in text.split("\n")).strip(), self._kind)

    def _words(self, token: Any) -> str:
        if token.type in ("text", "code_inline", "text_special"):
            return str(token.content)
        if token.type == "softbreak":
            return " "
        if token.type == "hardbreak" or (token.type == "html_inline" and _BREAK_TAG.match(token.content)):
            return "\n"
        if token.type == "image":
            return "".join(map(self._words, token.children or ()))
        if token.type == "html_inline" and _COMMENT.match(token.content):
            self._extract.left_out.add(COMMENTS, len(token.content))
        return ""
