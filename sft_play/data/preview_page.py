"""The preview as an HTML page without network, script or anything outside itself."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence

from sft_play.data.preview import (
    NEWLINE_SIGN,
    SPACE_SIGN,
    TAB_SIGN,
    HiddenTokens,
    PreviewRow,
    SignKind,
    TokenPiece,
    make_visible,
    split_signs,
)

# Tokens of one example on the page; of longer ones the middles of stretches are left out, with a count.
MAX_PAGE_PIECES = 20_000

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --page: #fbfbfa; --line: #d9dce1; --a: #eceef1;
  --b: #dde1e7; --ta: #c2ecc4; --tb: #9fdda4; --special: #2557a7; --bad: #a3262a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --soft: #9aa4b2; --page: #15181d; --line: #363c46;
  --a: #262b33; --b: #343b46; --ta: #1c5130; --tb: #28713f; --special: #8fb8f6; --bad: #ff8f8f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.75rem, 3vw, 2.5rem) 4rem; max-width: 78rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.bad { color: var(--bad); font-weight: 600; }
section { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
ul.facts, ul.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: .25rem 0 .75rem;
  padding: 0; }
ul.facts { color: var(--soft); }
.tokens { font: 14px/1.75 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.t { background: var(--a); border-radius: 3px; padding: .08em 0; unicode-bidi: isolate; }
.t.b { background: var(--b); }
.t.y { background: var(--ta); }
.t.y.b { background: var(--tb); }
.t.s { color: var(--special); font-weight: 600; box-shadow: inset 0 0 0 1px currentColor; padding: .08em .2em; }
.t.x { text-decoration: line-through; opacity: .6; }
.t i { font-style: normal; color: var(--soft); }
.t i.m { font-size: .85em; color: var(--bad); }
.cut { display: block; margin: .4rem 0; padding: .1rem .5rem; border-left: 4px solid var(--bad); color: var(--bad);
  font: 600 14px/1.5 system-ui, sans-serif; }
.gap { color: var(--soft); font-style: italic; }
pre { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 4px; padding: .5rem; font-size: 13px; }
""".strip()


def render_html_page(
    rows: Sequence[PreviewRow], *, title: str, intro_lines: Iterable[str], max_pieces: int = MAX_PAGE_PIECES
) -> str:
    """One HTML page without network, script or anything outside itself; `intro_lines` stand below the title."""
    # the page may be opened anywhere: it allows itself this one style sheet, by its digest, and nothing else
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    lines = "".join(f'<p class="soft">{_escape(line)}</p>\n' for line in intro_lines)
    sections = "".join(_render_section(row, max_pieces) for row in rows)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{_escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_escape(title)}</h1>\n{lines}{_LEGEND}{sections}</main>\n</body>\n</html>\n"
    )


def _escape(text: str) -> str:
    return html.escape(make_visible(text), quote=True)


_LEGEND = f"""<ul class="legend"><li><span class="t">not</span><span class="t b"> trained</span></li>
<li><span class="t y">tra</span><span class="t y b">ined</span></li><li><span class="t s">special token</span></li>
<li><span class="t x">cut by max_seq_len</span></li>
<li class="soft">{SPACE_SIGN} space, {NEWLINE_SIGN} line break, {TAB_SIGN} tab, ⟨U+200B⟩ a character that is not seen,
⟨0xF0⟩ a byte that is no character; point at a token for its id</li></ul>
"""


def _render_section(row: PreviewRow, max_pieces: int) -> str:
    facts = "".join(f"<li>{_escape(fact)}</li>" for fact in row.summary_lines())
    parts = [
        (row.reason, f'<p class="bad">Cannot be used: {_escape(row.reason)}</p>\n'),
        (facts, f'<ul class="facts">{facts}</ul>\n'),
        (row.pieces, f'<div class="tokens" dir="ltr">{"".join(_render_spans(row, max_pieces))}</div>\n'),
        (row.raw_text, f"<pre>{_escape(row.raw_text)}</pre>\n"),
    ]
    body = "".join(part for is_present, part in parts if is_present)
    return (
        f'<section>\n<h2>Row {row.row_number:,}</h2>\n<p class="soft">{_escape(row.location)}</p>\n{body}</section>\n'
    )


def _render_spans(row: PreviewRow, max_pieces: int) -> Iterator[str]:
    position = 0
    for index, item in row.shortened_items(max_pieces):
        if isinstance(item, HiddenTokens):
            position += item.tokens
            yield f'<span class="gap">{html.escape(str(item))}</span>'
        elif isinstance(item, str):
            yield f'<span class="cut">{item}</span>'
        else:
            yield _render_span(item, position, is_odd=bool(index % 2))
            position += len(item.ids)


def _render_span(piece: TokenPiece, position: int, *, is_odd: bool) -> str:
    marks = [("t", True), ("b", is_odd), ("y", piece.is_trained), ("s", piece.is_special), ("x", not piece.is_kept)]
    classes = " ".join(name for name, is_set in marks if is_set)
    word = "id" if len(piece.ids) == 1 else "ids"
    title = f"{word} {', '.join(map(str, piece.ids))} at {position}{', trained' if piece.is_trained else ''}"
    return f'<span class="{classes}" title="{title}">{"".join(map(_render_sign, split_signs(piece.text)))}</span>'


def _render_sign(run: tuple[SignKind, str]) -> str:
    kind, sign = run
    if kind == "text":
        return html.escape(sign, quote=True)
    if kind == "mark":
        return f'<i class="m">{html.escape(sign, quote=True)}</i>'
    return f"<i>{sign}</i>\n" if kind == "newline" else f"<i>{sign}</i><wbr>"
