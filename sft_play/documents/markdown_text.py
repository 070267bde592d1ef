"""The text of Markdown (CommonMark with tables and strikethrough): words, lists and code without markup."""

from __future__ import annotations

import re
from typing import Any

from sft_play.documents.text import Block, Extract, Kind, ReadOptions, Unreadable

FRONT_MATTER = "front matter (.md)"
COMMENTS = "comments and scripts in HTML (.md)"

# YAML between lines of ---, TOML between lines of +++, at the very beginning
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
    if any(token.level >= _MAX_NESTING - 1 for token in tokens):  # deeper text is dropped by the parser
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
        self._blocks: list[Block] = []
        self._lists: list[int | None] = []
        """The next number of each list that is open; None where it has bullets."""
        self._label = ""
        self._kind: Kind = "text"
        self._row: list[str] = []
        self._rows: list[str] | None = None

    def blocks(self, tokens: list[Any]) -> list[Block]:
        """The blocks that the tokens come to."""
        for token in tokens:
            match token.type:
                case "bullet_list_open":
                    self._lists.append(None)
                case "ordered_list_open":
                    self._lists.append(int(token.attrs.get("start", 1)))
                case "bullet_list_close" | "ordered_list_close":
                    self._lists.pop()
                case "list_item_open":
                    indent, number = "  " * (len(self._lists) - 1), self._lists[-1]
                    self._label = f"{indent}- " if number is None else f"{indent}{number}. "
                    if number is not None:
                        self._lists[-1] = number + 1
                case "list_item_close":
                    self._label = ""
                case "heading_open":
                    self._kind = "heading"
                case "heading_close":
                    self._kind = "text"
                case "fence" | "code_block":
                    self._add(token.content.rstrip("\n"), "code")
                case "html_block":
                    self._add(self._tags_off(token.content), "text")
                case "inline":
                    self._inline(token)
                case "table_open":
                    self._rows, self._row = [], []
                case "table_close":
                    rows, self._rows = self._rows or [], None
                    self._add("\n".join(rows), "table")
                case "tr_close":
                    if self._rows is not None and any(self._row):
                        self._rows.append(" | ".join(self._row))
                    self._row = []
        return self._blocks

    def _add(self, text: str, kind: Kind) -> None:
        if not text.strip():
            return
        if self._label and kind in ("text", "heading"):
            text, kind = self._label + text, "list"
            self._label = ""
        self._blocks.append(Block(text, kind))

    def _tags_off(self, source: str) -> str:
        from sft_play.documents.html_text import visible_text

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
