"""The tokens of examples, made visible: what is trained, what is cut, and characters that are not seen.

A token is shown as the bytes that it stands for, never as the text that it was made from. Tokens that are no whole
character are shown together. What would not be seen (spaces, line breaks, controls, marks of writing direction) is
shown by a sign or by its number, so that no text of the data can change how the page or the terminal reads.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import html
import io
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.masks.token_row import IGNORED, METHODS
from sft_play.log import one_line

PAGE_PIECES = 20_000
"""Tokens of one example on the page; of longer ones the middles of stretches are left out, with a count."""
TERMINAL_PIECES = 1_500
RAW_CHARACTERS = 1_500
"""Characters that are shown of a row that cannot be used, as it is in the file."""


# --- what a token is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One token, or several that only together are whole characters.

    `text` holds a byte that is no part of a character as U+DC80 to U+DCFF (Python's surrogateescape). `kept` is false
    for what max_seq_len cuts away.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool = False
    special: bool = False
    kept: bool = True


class TokenBytes:
    """What each token of a tokenizer stands for: bytes, or the name of a special token."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokenizer = tokenizer
        self._added = {number: str(token) for number, token in added.items()}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        for number, token in added.items():
            name = str(token)
            # Templates add marks such as <tool_call> as plain tokens; runs of spaces are added tokens too, and no mark.
            is_mark = len(name) > 2 and (name[0], name[-1]) in {("<", ">"), ("[", "]")} and " " not in name
            if is_mark or getattr(token, "special", False):
                self._special.add(number)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = str(decoder.__getstate__(), "utf-8") if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in state
        self._is_word_piece = '"WordPiece"' in state
        self._is_sentence_piece = "\u2581" in state or '"ByteFallback"' in state

    def is_special(self, number: int) -> bool:
        """Whether a token is one of the tokenizer's marks, which no plain text becomes."""
        return number in self._special

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; a special token's are those of its name."""
        words = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [
            (self._added.get(number) or str(word)).encode("utf-8", "replace")
            if number in self._added or number in self._special
            else self._decoded(str(word))
            for number, word in zip(ids, words, strict=True)
        ]

    def _decoded(self, word: str) -> bytes:
        """The bytes of a token by its name, as the tokenizer's own decoder reads it."""
        if self._is_byte_level:
            return b"".join(bytes([_LETTERS[c]]) if c in _LETTERS else c.encode("utf-8", "replace") for c in word)
        if self._is_word_piece:
            word = word[2:] if word.startswith("##") else f" {word}"
        elif self._is_sentence_piece:
            if byte := _BYTE_NAME.fullmatch(word):
                return bytes([int(byte[1], 16)])
            word = word.replace("\u2581", " ")
        return word.encode("utf-8", "replace")


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}
"""The letters in which byte-level vocabularies write bytes: printable ones as they are, the others from U+0100."""
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def pieces_of(ids: Sequence[int], labels: Sequence[int], names: TokenBytes, *, kept: Sequence[bool]) -> list[Piece]:
    """The tokens of a row as pieces: each by itself, or with those that complete its last character."""
    pieces: list[Piece] = []
    waiting: list[int] = []
    state: tuple[bool, bool] | None = None
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = ""

    def end() -> None:
        nonlocal text
        if waiting:
            assert state is not None
            pieces.append(Piece(text + decoder.decode(b"", True), tuple(waiting), trained=state[0], kept=state[1]))
            decoder.reset()
            waiting.clear()
            text = ""

    for number, label, is_kept, raw in zip(ids, labels, kept, names.of(ids), strict=True):
        here = (label != IGNORED, is_kept)
        if names.is_special(number):
            end()
            pieces.append(Piece(raw.decode("utf-8", "replace"), (number,), here[0], special=True, kept=here[1]))
            continue
        if here != state:
            end()
        state = here
        waiting.append(number)
        text += decoder.decode(raw)
        if not decoder.getstate()[0]:
            end()
    end()
    return pieces


def kept_tokens(whole: Sequence[int], cut: Sequence[int]) -> list[bool] | None:
    """Which tokens of a whole row are in the cut one: its beginning, its end, or a beginning and an end.

    None where the cut row is no such part of the whole one.
    """
    size, left = len(whole), len(cut)
    if left > size:
        return None
    if list(whole[:left]) == list(cut):
        return [n < left for n in range(size)]
    if list(whole[size - left :]) == list(cut):
        return [n >= size - left for n in range(size)]
    head = next((n for n in range(left) if whole[n] != cut[n]), left)
    tail = left - head
    if list(whole[size - tail :]) != list(cut[head:]):
        return None
    return [n < head or n >= size - tail for n in range(size)]


# --- an example to look at --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """One row of the file, tokenised and marked; `reason` says why a row cannot be used, `raw` how it begins."""

    number: int
    where: str
    ids: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    method: str = ""
    notes: tuple[str, ...] = ()
    cut: int = 0
    lost: int = 0
    reason: str = ""
    raw: str = ""

    @property
    def trained(self) -> int:
        """Tokens of the whole row whose label counts; the first token is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])

    @property
    def cut_text(self) -> str:
        """How much max_seq_len cuts, in words."""
        return f"max_seq_len cuts {self.cut:,} tokens, {self.lost:,} of them trained"

    def as_json(self) -> dict[str, Any]:
        """The row in plain data."""
        return {
            "row": self.number,
            "where": self.where,
            "reason": self.reason or None,
            "tokens": len(self.ids),
            "trained": self.trained,
            "cut": self.cut,
            "lost": self.lost,
            "method": self.method or None,
            "notes": list(self.notes),
            "input_ids": list(self.ids),
            "labels": list(self.labels),
        }

    def facts(self) -> list[str]:
        """The row's length, its mask, what is cut, and its notes."""
        if not self.ids:
            return []
        share = self.trained / len(self.ids)
        facts = [f"{len(self.ids):,} tokens", f"{self.trained:,} trained ({share:.0%})"]
        if self.method:
            facts.append(f"mask: {METHODS.get(self.method, self.method)}")
        if self.cut:
            facts.append(self.cut_text)
        return [*facts, *(one_line(note, limit=300) for note in self.notes)]


def spread_out(rows: int, count: int, *, longest: int) -> list[int]:
    """`count` row numbers from 0, evenly over the file: the first, the last, the longest, and some between."""
    if count >= rows:
        return list(range(rows))
    if count == 1:
        return [0]
    even = [round(n * (rows - 1) / (count - 1)) for n in range(count)]
    if count > 2 and longest not in even:
        nearest = min(even[1:-1], key=lambda n: abs(n - longest))
        even[even.index(nearest)] = longest
    return sorted(even)


# --- signs for what is not seen ---------------------------------------------------------------------------------------

Kind = Literal["text", "space", "newline", "mark"]
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
"""Letters and marks without a shape."""
MOST_ACCENTS = 4
"""Combining marks on one letter; the languages that people write need no more."""
NEWLINE, TAB, SPACE = "⏎", "⇥", "·"


def signs(text: str) -> Iterator[tuple[Kind, str]]:
    """The text in runs of one kind: as it is, or as signs for what would not be seen.

    A line break is one `newline`, a space one `·`, everything else a mark such as ⟨U+202E⟩; accents without a letter
    before them, or too many of them, are marks too.
    """
    plain: list[str] = []
    accents = 0
    for number, character in enumerate(text):
        kind, sign = _sign(character)
        accents = accents + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if accents > MOST_ACCENTS or (accents and number == 0):  # towers of them cover the lines above
            kind, sign = "mark", f"⟨U+{ord(character):04X}⟩"
        if kind == "text":
            plain.append(character)
            continue
        if plain:
            yield "text", "".join(plain)
            plain.clear()
        yield kind, sign
    if plain:
        yield "text", "".join(plain)


def _sign(character: str) -> tuple[Kind, str]:
    if character == " ":
        return "space", SPACE
    if character == "\n":
        return "newline", NEWLINE
    if character == "\t":
        return "mark", TAB
    if "\udc80" <= character <= "\udcff":
        return "mark", f"⟨0x{ord(character) - 0xDC00:02X}⟩"
    if unicodedata.category(character) in _HIDDEN or character in _BLANK:
        return "mark", f"⟨U+{ord(character):04X}⟩"
    return "text", character


def visible(text: str) -> str:
    """Text that is safe to show, on one line: spaces as they are, everything else that is not seen by its sign."""
    return "".join(" " if kind == "space" else sign for kind, sign in signs(text))


@dataclass(frozen=True)
class Gap:
    """Tokens that are not shown, and how many of them are trained."""

    tokens: int
    trained: int

    def __str__(self) -> str:
        trained = f", {self.trained:,} of them trained" if self.trained else ""
        return f"… {self.tokens:,} tokens not shown{trained} …"


def shortened(pieces: Sequence[Piece], most: int) -> list[Piece | Gap]:
    """The pieces, the middles of their longest stretches left out so that about `most` remain.

    A stretch is a run that is trained, or not, or cut as a whole: each keeps its beginning and its end.
    """
    if len(pieces) <= most:
        return list(pieces)
    runs = [list(run) for _, run in itertools.groupby(pieces, key=lambda piece: (piece.trained, piece.kept))]
    room = max(10, _room(sorted(map(len, runs)), most))
    shown: list[Piece | Gap] = []
    for run in runs:
        if len(run) <= room + 1:  # a gap in the place of one piece would save nothing
            shown += run
            continue
        half = room // 2
        middle = run[half : len(run) - half]
        tokens = sum(len(piece.ids) for piece in middle)
        shown += [*run[:half], Gap(tokens, tokens if run[0].trained else 0), *run[len(run) - half :]]
    return shown


def _room(sizes: Sequence[int], most: int) -> int:
    """The largest length to which runs can be shortened so that they fit together (sizes ascending)."""
    left = most
    for done, size in enumerate(sizes):
        share = left // (len(sizes) - done)
        if size > share:
            return share
        left -= size
    return sizes[-1] if sizes else most


# --- in the terminal --------------------------------------------------------------------------------------------------


def heading(shown: Shown) -> str:
    """The line above an example: its number, its place, its facts."""
    facts = "; ".join(shown.facts())
    return f"Row {shown.number:,} ({one_line(shown.where, limit=300)}){': ' + facts if facts else ''}"


def plain_lines(shown: Shown, *, most: int = TERMINAL_PIECES, between: str = "¦") -> list[str]:
    """The example as plain text: ¦ between tokens, trained parts in [[ ]], what is cut in ~~ ~~."""
    out: list[str] = []
    before: tuple[bool, bool] | None = None
    for item in shortened(shown.pieces, most):
        if isinstance(item, Gap):
            out.append(f" {item} ")
            continue
        state = (item.trained, item.kept)
        if state != before:
            out.append(_close(before) + _open(before, item, shown))
        elif out and between:
            out.append(between)
        text = _plain(item)
        if not between and out and out[-1][-1:] == text[:1] and text[:1] in {"[", "]", "~"}:
            out.append("\\")  # two pieces of the text must not look like one of our marks together
        out.append(text)
        before = state
    out.append(_close(before) + ("~~" if before is not None and not before[1] else ""))
    lines = [heading(shown), *(f"  {line}" for line in "".join(out).split("\n") if line)]
    return [*lines, *_trouble(shown)]


def _open(before: tuple[bool, bool] | None, piece: Piece, shown: Shown) -> str:
    """The marks before a piece that is trained, or kept, where the one before it is not, or the reverse."""
    was_kept = True if before is None else before[1]
    marks = ""
    if was_kept and not piece.kept:
        marks = f"\n--- {shown.cut_text} ---\n~~"
    elif piece.kept and not was_kept:
        marks = "~~\n--- kept from here ---\n"
    return marks + ("[[" if piece.trained else "")


def _close(state: tuple[bool, bool] | None) -> str:
    return "]]" if state is not None and state[0] else ""


def _plain(piece: Piece) -> str:
    """A piece without anything that could be taken for our marks."""
    text = "".join(sign + "\n" if kind == "newline" else sign for kind, sign in signs(piece.text))
    return text.replace("[[", "[\\[").replace("]]", "]\\]").replace("~~", "~\\~")


def _trouble(shown: Shown) -> list[str]:
    """Why a row cannot be used, and how it begins in the file."""
    if not shown.reason:
        return []
    reason = f"  CANNOT BE USED: {one_line(shown.reason, limit=600)}"
    return [reason, f"  {visible(shown.raw)}"] if shown.raw else [reason]


def example_line(shown: Shown, *, most: int = 150) -> str:
    """The example on one line, trained parts in [[ ]]; of each part the beginning and the end where it is long."""
    return " ".join(line.strip() for line in plain_lines(shown, most=most, between="")[1:])


TRAINED_STYLES = ("grey100 on dark_green", "grey100 on green4")
OTHER_STYLES = ("grey93 on grey23", "grey93 on grey35")
CUT_TRAINED_STYLE, CUT_STYLE = "pale_green3 on grey11 strike", "grey58 on grey11 strike"
"""Foreground and background both, so that tokens can be read on dark and on light terminals."""


def terminal_text(shown: Shown, *, most: int = TERMINAL_PIECES) -> Any:
    """The example as `rich.text.Text`: tokens on changing grounds, trained ones green, cut ones struck through."""
    from rich.text import Text

    body = Text()
    body.append(heading(shown) + "\n", style="bold")
    kept = True
    for number, item in enumerate(shortened(shown.pieces, most)):
        if isinstance(item, Gap):
            body.append(f" {item} ", style="italic")
            continue
        if kept and not item.kept:
            body.append(f"\n--- {shown.cut_text} ---\n", "red")
        elif item.kept and not kept:
            body.append("\n--- kept from here ---\n", "red")
        kept = item.kept
        style = (TRAINED_STYLES if item.trained else OTHER_STYLES)[number % 2]
        if not item.kept:
            style = CUT_TRAINED_STYLE if item.trained else CUT_STYLE
        style += " bold underline" if item.special else ""
        for kind, sign in signs(item.text):
            body.append(sign, style=f"{style} italic" if kind == "mark" else style)
            if kind == "newline":
                body.append("\n")
    body.append("\n")
    for line in _trouble(shown):
        body.append(line + "\n", style="bold red")
    return body


# --- the page ---------------------------------------------------------------------------------------------------------

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


def page(examples: Sequence[Shown], *, title: str, about: Iterable[str], most: int = PAGE_PIECES) -> str:
    """One HTML page without network, script or anything outside itself; `about` are lines below the title."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    out = io.StringIO()
    out.write('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n')
    out.write(f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n')
    out.write('<meta name="viewport" content="width=device-width, initial-scale=1">\n')
    out.write('<meta name="referrer" content="no-referrer">\n')
    out.write(f"<title>{_escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n")
    out.write(f"<h1>{_escaped(title)}</h1>\n")
    for line in about:
        out.write(f'<p class="soft">{_escaped(line)}</p>\n')
    out.write(_legend(examples))
    for shown in examples:
        out.write(_section(shown, most))
    out.write("</main>\n</body>\n</html>\n")
    return out.getvalue()


def _escaped(text: str) -> str:
    return html.escape(visible(text), quote=True)


def _legend(examples: Sequence[Shown]) -> str:
    every = [piece for shown in examples for piece in shown.pieces]

    def tokens(want: Callable[[Piece], bool]) -> str:
        return f"{sum(len(piece.ids) for piece in every if want(piece)):,}"

    items = [
        ('<span class="t">not</span><span class="t b"> trained</span>', tokens(lambda p: not p.trained)),
        ('<span class="t y">tra</span><span class="t y b">ined</span>', tokens(lambda p: p.trained)),
        ('<span class="t s">special token</span>', tokens(lambda p: p.special)),
        ('<span class="t x">cut by max_seq_len</span>', tokens(lambda p: not p.kept)),
    ]
    shown = "".join(f"<li>{sample} {count}</li>" for sample, count in items)
    hint = (
        f'<li class="soft">{SPACE} space, {NEWLINE} line break, {TAB} tab, ⟨U+200B⟩ a character that is not seen, '
        "⟨0xF0⟩ a byte that is no character; point at a token for its id</li>"
    )
    return f'<ul class="legend">{shown}{hint}</ul>\n'


def _section(shown: Shown, most: int) -> str:
    head = f"<h2>Row {shown.number:,}</h2>\n"
    out = [f'<section>\n{head}<p class="soft">{_escaped(shown.where)}</p>\n']
    if shown.reason:
        out.append(f'<p class="bad">Cannot be used: {_escaped(shown.reason)}</p>\n')
    facts = "".join(f"<li>{_escaped(fact)}</li>" for fact in shown.facts())
    if facts:
        out.append(f'<ul class="facts">{facts}</ul>\n')
    if shown.pieces:
        out.append(f'<div class="tokens" dir="ltr">{"".join(_spans(shown, most))}</div>\n')
    if shown.raw:
        out.append(f"<pre>{_escaped(shown.raw)}</pre>\n")
    return "".join([*out, "</section>\n"])


def _spans(shown: Shown, most: int) -> Iterator[str]:
    position, kept = 0, True
    for number, item in enumerate(shortened(shown.pieces, most)):
        if isinstance(item, Gap):
            position += item.tokens
            yield f'<span class="gap">{html.escape(str(item))}</span>'
            continue
        if kept and not item.kept:
            yield f'<span class="cut">{shown.cut_text}</span>'
        elif item.kept and not kept:
            yield '<span class="cut">kept from here</span>'
        kept = item.kept
        yield _span(item, position, odd=bool(number % 2))
        position += len(item.ids)


def _span(piece: Piece, position: int, *, odd: bool) -> str:
    marks = [("t", True), ("b", odd), ("y", piece.trained), ("s", piece.special), ("x", not piece.kept)]
    classes = " ".join(name for name, wanted in marks if wanted)
    word = "id" if len(piece.ids) == 1 else "ids"
    title = f"{word} {', '.join(map(str, piece.ids))} at {position}{', trained' if piece.trained else ''}"
    return f'<span class="{classes}" title="{title}">{"".join(map(_html_sign, signs(piece.text)))}</span>'


def _html_sign(run: tuple[Kind, str]) -> str:
    kind, sign = run
    if kind == "text":
        return html.escape(sign, quote=True)
    if kind == "mark":
        return f'<i class="m">{html.escape(sign, quote=True)}</i>'
    return f"<i>{sign}</i>\n" if kind == "newline" else f"<i>{sign}</i><wbr>"


def raw_text(data: Any) -> str:
    """How a row that cannot be tokenised begins in its file."""
    text = json.dumps(data, ensure_ascii=False, default=str)
    return text if len(text) <= RAW_CHARACTERS else f"{text[:RAW_CHARACTERS]}…"
