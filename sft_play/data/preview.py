"""Rows to look at, chosen from a file: their tokens, what is trained, what is cut; as text and for
the terminal.

`render_html_page` makes the page of them.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import html
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.build.stats import format_row_count
from sft_play.data.build.survey import RowOutcome, RowRenderer
from sft_play.data.masks.token_row import IGNORED, MASK_METHODS, TokenRow
from sft_play.data.sources.examples import ExampleReader, read_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import one_line

MAX_TERMINAL_PIECES = 1_500
# Characters that are shown of a row that cannot be used, as it is in the file.
MAX_RAW_CHARACTERS = 1_500


@dataclass(frozen=True)
class PreviewRow:
    """One row of the file, tokenised and marked; `reason`: why it cannot be used; `raw_text`: how it begins then."""

    row_number: int
    location: str
    ids: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    pieces: tuple[TokenPiece, ...] = ()
    method: str = ""
    notes: tuple[str, ...] = ()
    cut_tokens: int = 0
    lost_trained_tokens: int = 0
    reason: str = ""
    raw_text: str = ""

    @property
    def trained_tokens(self) -> int:
        """Tokens of the whole row whose label counts; the first token is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])

    @property
    def cut_summary(self) -> str:
        """How much max_seq_len cuts, in words."""
        return f"max_seq_len cuts {self.cut_tokens:,} tokens, {self.lost_trained_tokens:,} of them trained"

    def as_json(self) -> dict[str, Any]:
        """The row in plain data."""
        return {
            "row": self.row_number,
            "where": self.location,
            "reason": self.reason or None,
            "tokens": len(self.ids),
            "trained": self.trained_tokens,
            "cut": self.cut_tokens,
            "lost": self.lost_trained_tokens,
            "method": self.method or None,
            "notes": list(self.notes),
            "input_ids": list(self.ids),
            "labels": list(self.labels),
        }

    def summary_lines(self) -> list[str]:
        """The row's length, its mask, what is cut, and its notes."""
        if not self.ids:
            return []
        share = self.trained_tokens / len(self.ids)
        lines = [f"{len(self.ids):,} tokens", f"{self.trained_tokens:,} trained ({share:.0%})"]
        if self.method:
            lines.append(f"mask: {MASK_METHODS.get(self.method, self.method)}")
        if self.cut_tokens:
            lines.append(self.cut_summary)
        return [*lines, *(one_line(note, limit=300) for note in self.notes)]

    def shortened_items(self, max_pieces: int) -> Iterator[tuple[int, TokenPiece | HiddenTokens | str]]:
        """About `max_pieces` pieces of it, numbered; between, where max_seq_len begins to cut, and to keep again."""
        is_kept = True
        for index, item in enumerate(shorten_pieces(self.pieces, max_pieces)):
            if isinstance(item, TokenPiece) and item.is_kept != is_kept:
                is_kept = item.is_kept
                yield index, "kept from here" if is_kept else self.cut_summary
            yield index, item


def choose_row_indices(rows: int, count: int, *, longest_index: int) -> list[int]:
    """`count` row numbers from 0, evenly over the file: the first, the last, the longest, and some between."""
    if count >= rows:
        return list(range(rows))
    if count == 1:
        return [0]
    row_indices = [round(n * (rows - 1) / (count - 1)) for n in range(count)]
    if count > 2 and longest_index not in row_indices:  # in the place of the nearest; the first and the last stay
        nearest = min(row_indices[1:-1], key=lambda n: abs(n - longest_index))
        row_indices[row_indices.index(nearest)] = longest_index
    return sorted(row_indices)


@dataclass(frozen=True)
class HiddenTokens:
    """Tokens that are not shown, and how many of them are trained."""

    tokens: int
    trained_tokens: int

    def __str__(self) -> str:
        trained_note = f", {self.trained_tokens:,} of them trained" if self.trained_tokens else ""
        return f"… {self.tokens:,} tokens not shown{trained_note} …"


def shorten_pieces(pieces: Sequence[TokenPiece], max_pieces: int) -> list[TokenPiece | HiddenTokens]:
    """The pieces, the middles of their longest stretches left out so that some `max_pieces` remain. A stretch is a run
    that is trained, or not, or cut as a whole: each keeps its beginning and its end."""
    if len(pieces) <= max_pieces:
        return list(pieces)
    runs = [list(run) for _, run in itertools.groupby(pieces, key=lambda piece: (piece.is_trained, piece.is_kept))]
    pieces_per_run = max(10, max_pieces // len(runs))
    items: list[TokenPiece | HiddenTokens] = []
    for run in runs:
        if len(run) <= pieces_per_run + 1:  # a gap in the place of one piece would save nothing
            items += run
            continue
        half = pieces_per_run // 2
        middle = run[half : len(run) - half]
        tokens = sum(len(piece.ids) for piece in middle)
        items += [*run[:half], HiddenTokens(tokens, tokens if run[0].is_trained else 0), *run[len(run) - half :]]
    return items


def format_heading(row: PreviewRow) -> str:
    """The line above an example: its number, its place, its facts."""
    facts = "; ".join(row.summary_lines())
    return f"Row {row.row_number:,} ({one_line(row.location, limit=300)}){': ' + facts if facts else ''}"


TRAINED_STYLES = ("grey100 on dark_green", "grey100 on green4")
UNTRAINED_STYLES = ("grey93 on grey23", "grey93 on grey35")
# Foreground and background both, so that tokens can be read on dark and on light terminals.
CUT_TRAINED_STYLE, CUT_STYLE = "pale_green3 on grey11 strike", "grey58 on grey11 strike"


def format_plain_lines(row: PreviewRow, *, max_pieces: int = MAX_TERMINAL_PIECES) -> list[str]:
    """The example as plain text."""
    body = "".join(text for text, _ in _styled_tokens(row, max_pieces))
    return [format_heading(row), *(f"  {line}" for line in body.split("\n") if line), *_problem_lines(row)]


def format_terminal_text(row: PreviewRow, *, max_pieces: int = MAX_TERMINAL_PIECES) -> Any:
    """The example as `rich.text.Text`: tokens on changing grounds, trained ones green, cut ones struck through."""
    from rich.text import Text

    problem_lines = [(f"{line}\n", "bold red") for line in _problem_lines(row)]
    return Text.assemble((f"{format_heading(row)}\n", "bold"), *_styled_tokens(row, max_pieces), "\n", *problem_lines)


def _styled_tokens(row: PreviewRow, max_pieces: int) -> Iterator[tuple[str, str]]:
    """The example's tokens with their styles: ¦ between tokens, trained parts in [[ ]], what is cut in ~~ ~~."""
    is_trained, is_kept, is_first = False, True, True
    for index, item in row.shortened_items(max_pieces):
        if isinstance(item, HiddenTokens):
            yield f" {item} ", "italic"
        elif isinstance(item, str):
            yield f"{']]' * is_trained}{'~~' * (not is_kept)}\n--- {item} ---\n{'~~' * is_kept}", "red"
            is_trained, is_kept, is_first = False, not is_kept, True
        else:
            if item.is_trained != is_trained or not is_first:
                yield ("¦" if item.is_trained == is_trained else "[[" if item.is_trained else "]]"), ""
            is_trained, is_first = item.is_trained, False
            style = (TRAINED_STYLES if is_trained else UNTRAINED_STYLES)[index % 2]
            if not item.is_kept:
                style = CUT_TRAINED_STYLE if is_trained else CUT_STYLE
            yield _escape_marks(item), f"{style} bold underline" if item.is_special else style
    yield "]]" * is_trained + "~~" * (not is_kept), ""


def _escape_marks(piece: TokenPiece) -> str:
    """A piece without anything that could be taken for our marks."""
    text = "".join(sign + "\n" if kind == "newline" else sign for kind, sign in split_signs(piece.text))
    return text.replace("[[", "[\\[").replace("]]", "]\\]").replace("~~", "~\\~")


def _problem_lines(row: PreviewRow) -> list[str]:
    if not row.reason:
        return []
    reason = f"  CANNOT BE USED: {one_line(row.reason, limit=600)}"
    return [reason, f"  {make_visible(row.raw_text)}"] if row.raw_text else [reason]


# A row as it is in its file, and the format of the file.
RowWithFormat = tuple[RawRow | BadRow, Any]


def select_row(reader: ExampleReader, requested_number: int) -> list[tuple[int, RowWithFormat]]:
    """The row of this number, from 1."""
    rows = [raw for row_number, raw in enumerate(reader.raw_rows(), start=1) if row_number == requested_number]
    if not rows:
        raise DataError(
            f"ROW={requested_number}: {reader.source} has {format_row_count(reader.rows)}; rows are counted from 1"
        )
    return [(requested_number, rows[0])]


def select_spread_rows(reader: ExampleReader, count: int) -> list[tuple[int, RowWithFormat]]:
    """Rows spread evenly over a file of unknown length, its longest among them, in one reading: those at multiples of a
    stride are kept, which doubles when they are four times as many as wanted."""
    kept_rows: dict[int, RowWithFormat] = {}
    stride = 1
    longest: tuple[int, int, RowWithFormat] | None = None
    last: tuple[int, RowWithFormat] | None = None
    for index, row_with_format in enumerate(reader.raw_rows()):
        # before any tokenizer is asked: the longest by characters is near enough to show
        size = len(str(row_with_format[0].data)) if isinstance(row_with_format[0], RawRow) else 0
        if longest is None or size > longest[0]:
            longest = (size, index, row_with_format)
        last = (index, row_with_format)
        if index % stride == 0:
            kept_rows[index] = row_with_format
            if len(kept_rows) > 4 * count + 4:
                stride *= 2
                kept_rows = {index: item for index, item in kept_rows.items() if index % stride == 0}
    if last is None or longest is None:
        raise DataError(f"{reader.source} has no rows")
    kept_rows |= {last[0]: last[1], longest[1]: longest[2]}  # the stride may have dropped them
    requested_indices = choose_row_indices(last[0] + 1, count, longest_index=longest[1])
    nearest = sorted(
        {
            min(sorted(kept_rows), key=lambda index: abs(index - requested_index))
            for requested_index in requested_indices
        }
    )
    return [(index + 1, kept_rows[index]) for index in nearest]


def preview_rows(
    row_number: int,
    row_with_format: RowWithFormat,
    reader: ExampleReader,
    row_renderer: RowRenderer,
    token_bytes: TokenBytes,
) -> list[PreviewRow]:
    """One row with its tokens, or why it has none; with data.multi_turn=split one for each row that it becomes."""
    raw, row_format = row_with_format
    example = read_example(raw, row_format, reader.data)
    text = json.dumps(raw.data, ensure_ascii=False, default=str) if isinstance(raw, RawRow) else ""
    raw_text = text if len(text) <= MAX_RAW_CHARACTERS else f"{text[:MAX_RAW_CHARACTERS]}…"
    if isinstance(example, BadRow):
        return [PreviewRow(row_number, example.where, reason=_bad_row_reason(example), raw_text=raw_text)]
    outcomes = row_renderer.render_rows([(row_number, example)])
    return [
        _preview_outcome(outcome, token_bytes, row_renderer.max_seq_len, raw_text)
        for outcome in outcomes
        if isinstance(outcome, RowOutcome)
    ]


def _preview_outcome(outcome: RowOutcome, token_bytes: TokenBytes, limit: int, raw_text: str) -> PreviewRow:
    whole_row, row = outcome.whole_row, outcome.row
    if whole_row is None:
        assert isinstance(row, BadRow)
        return PreviewRow(outcome.row_number, row.where, reason=_bad_row_reason(row), raw_text=raw_text)
    ids, labels = tuple(whole_row.input_ids), tuple(whole_row.labels)
    if isinstance(row, BadRow):
        reason, cut_tokens, remaining_ids = _bad_row_reason(row), max(0, len(ids) - limit), ids[:limit]
        lost_trained_tokens = sum(label != IGNORED for label in labels[limit:])
    else:
        reason, cut_tokens, remaining_ids, lost_trained_tokens = (
            "",
            row.cut_tokens,
            tuple(row.input_ids),
            row.lost_trained_tokens,
        )
    notes = (*outcome.example.notes, *whole_row.notes, *_row_notes(whole_row))
    pieces = split_token_pieces(ids, labels, token_bytes, kept_flags=kept_token_flags(ids, remaining_ids))
    return PreviewRow(
        outcome.row_number,
        whole_row.location,
        ids,
        labels,
        tuple(pieces),
        whole_row.method,
        notes,
        cut_tokens=cut_tokens,
        lost_trained_tokens=lost_trained_tokens,
        reason=reason,
    )


def _row_notes(row: TokenRow) -> Iterator[str]:
    counts = (
        (row.untrained_turns, "assistant turns have no exact mask and are not trained"),
        (row.stripped_think_pieces, "pieces of think text are not written by the template"),
        (row.special_token_count, "special tokens are spelled in its texts"),
        (row.merged_edges, "answers end inside a token, which is split there"),
    )
    yield from (f"{count} {note}" for count, note in counts if count)
    if row.added_end:
        end = one_line(row.added_end.strip())
        yield f"{end} is added after the last turn, which the chat template does not end"


def _bad_row_reason(row: BadRow) -> str:
    return f"{row.reason}{f' ({row.detail})' if row.detail else ''}"


# Tokens as the bytes that they stand for, in pieces of whole characters. A token is never shown as the text that it was
# made from: what the model learns is what its tokens spell. Characters that are not seen are shown by signs, so that no
# text of the data can change how a page or a terminal reads.
@dataclass(frozen=True)
class TokenPiece:
    """One token, or several that only together are whole characters. `text` holds a byte that is no part of a character
    as U+DC80 to U+DCFF (Python's surrogateescape). `is_kept` is false for what max_seq_len cuts away."""

    text: str
    ids: tuple[int, ...]
    is_trained: bool = False
    is_special: bool = False
    is_kept: bool = True


class TokenBytes:
    """What each token of a tokenizer stands for: bytes, or the name of a special token."""

    def __init__(self, tokenizer: Any) -> None:
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokenizer = tokenizer
        self._added_tokens = {token_id: str(token) for token_id, token in added_tokens.items()}
        self._special_ids = set(getattr(tokenizer, "all_special_ids", ()))
        for token_id, token in added_tokens.items():
            name = str(token)
            # Templates add marks such as <tool_call> as plain tokens; runs of spaces are added tokens too, and no mark.
            is_mark = len(name) > 2 and (name[0], name[-1]) in {("<", ">"), ("[", "]")} and " " not in name
            if is_mark or getattr(token, "special", False):
                self._special_ids.add(token_id)
        # How the names of tokens spell bytes: as letters (ByteLevel), or with ▁ and <0x0A>.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        decoder_json = str(decoder.__getstate__(), "utf-8") if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in decoder_json
        self._is_sentence_piece = "\u2581" in decoder_json or '"ByteFallback"' in decoder_json

    def is_special(self, token_id: int) -> bool:
        """Whether a token is one of the tokenizer's marks, which no plain text becomes."""
        return token_id in self._special_ids

    def decode(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; a special token's are those of its name."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [
            (self._added_tokens.get(token_id) or str(token)).encode("utf-8", "replace")
            if token_id in self._added_tokens or token_id in self._special_ids
            else self._decode_token(str(token))
            for token_id, token in zip(ids, tokens, strict=True)
        ]

    def _decode_token(self, token: str) -> bytes:
        if self._is_byte_level:
            return b"".join(
                bytes([_BYTE_BY_LETTER[c]]) if c in _BYTE_BY_LETTER else c.encode("utf-8", "replace") for c in token
            )
        if self._is_sentence_piece:
            if byte := _BYTE_NAME.fullmatch(token):
                return bytes([int(byte[1], 16)])
            token = token.replace("\u2581", " ")
        return token.encode("utf-8", "replace")


_INVISIBLE_BYTES = [*range(33), *range(127, 161), 173]
# The letters in which byte-level vocabularies write bytes (GPT-2's `bytes_to_unicode`): visible characters of
# Latin-1 as they are, the others as characters from U+0100.
BYTE_LETTERS = {byte: chr(byte) for byte in range(256)} | {
    byte: chr(256 + at) for at, byte in enumerate(_INVISIBLE_BYTES)
}
_BYTE_BY_LETTER = {letter: byte for byte, letter in BYTE_LETTERS.items()}
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def split_token_pieces(
    ids: Sequence[int], labels: Sequence[int], token_bytes: TokenBytes, *, kept_flags: Sequence[bool]
) -> list[TokenPiece]:
    """The tokens of a row as pieces: each by itself, or with those that complete its last character."""
    pieces: list[TokenPiece] = []
    pending_ids: list[int] = []
    piece_state: tuple[bool, bool] | None = None
    # incremental: it holds back the bytes of a character that is not complete, and tells so in its state
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    piece_text = ""

    def close_piece() -> None:
        nonlocal piece_text
        if pending_ids:
            assert piece_state is not None
            pieces.append(
                TokenPiece(
                    piece_text + decoder.decode(b"", True),
                    tuple(pending_ids),
                    is_trained=piece_state[0],
                    is_kept=piece_state[1],
                )
            )
            decoder.reset()
            pending_ids.clear()
            piece_text = ""

    for token_id, label, is_kept, raw_bytes in zip(ids, labels, kept_flags, token_bytes.decode(ids), strict=True):
        token_state = (label != IGNORED, is_kept)
        if token_bytes.is_special(token_id):
            close_piece()
            pieces.append(
                TokenPiece(
                    raw_bytes.decode("utf-8", "replace"),
                    (token_id,),
                    token_state[0],
                    is_special=True,
                    is_kept=token_state[1],
                )
            )
            continue
        if token_state != piece_state:  # a piece is trained or not, kept or not, as a whole
            close_piece()
        piece_state = token_state
        pending_ids.append(token_id)
        piece_text += decoder.decode(raw_bytes)
        if not decoder.getstate()[0]:
            close_piece()
    close_piece()
    return pieces


def kept_token_flags(ids: Sequence[int], kept_ids: Sequence[int]) -> list[bool]:
    """Which tokens of a whole row are in the cut one: its beginning, its end, or a beginning and an end."""
    size, kept_size = len(ids), len(kept_ids)
    is_end = list(ids[size - kept_size :]) == list(kept_ids) != list(ids[:kept_size])
    beginning = 0 if is_end else next((index for index in range(kept_size) if ids[index] != kept_ids[index]), kept_size)
    return [index < beginning or index >= size - (kept_size - beginning) for index in range(size)]


SignKind = Literal["text", "space", "newline", "mark"]
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Letters and marks without a shape.
_BLANK_CHARACTERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
NEWLINE_SIGN, TAB_SIGN, SPACE_SIGN = "⏎", "⇥", "·"


def split_signs(text: str) -> Iterator[tuple[SignKind, str]]:
    """The text in runs of one kind: as it is, or as signs for what would not be seen. A line break is one `newline`, a
    space one `·`, everything else a mark such as ⟨U+202E⟩."""
    for kind, run in itertools.groupby(map(_character_sign, text), key=lambda one: one[0]):
        if kind == "text":
            yield kind, "".join(sign for _, sign in run)
        else:
            yield from run


def _character_sign(character: str) -> tuple[SignKind, str]:
    if character == " ":
        return "space", SPACE_SIGN
    if character == "\n":
        return "newline", NEWLINE_SIGN
    if character == "\t":
        return "mark", TAB_SIGN
    if "\udc80" <= character <= "\udcff":
        return "mark", f"⟨0x{ord(character) - 0xDC00:02X}⟩"
    if unicodedata.category(character) in _HIDDEN_CATEGORIES or character in _BLANK_CHARACTERS:
        return "mark", f"⟨U+{ord(character):04X}⟩"
    return "text", character


def make_visible(text: str) -> str:
    """Text that is safe to show, on one line: spaces as they are, everything else that is not seen by its sign."""
    return "".join(" " if kind == "space" else sign for kind, sign in split_signs(text))


# --------------------------------------------------------------------------------------------------
# The preview as an HTML page without network, script or anything outside itself.

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
