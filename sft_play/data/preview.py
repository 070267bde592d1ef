"""Rows to look at, chosen from a file: their tokens, what is trained, what is cut.

`shown_segments` is what there is to see of a row. Three small writers make plain text of it, text
in colour for the terminal, and an HTML page.
"""

import base64
import codecs
import hashlib
import html
import itertools
import json
import re
import types
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.build.survey import RowRenderer
from sft_play.data.masks.image_processor import ImageProcessor
from sft_play.data.masks.token_row import IGNORED, MASK_METHODS, TokenRow
from sft_play.data.sources.examples import ExampleReader, read_example
from sft_play.data.sources.image_files import ImageError
from sft_play.data.sources.images import Picture
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.text import plural

# Tokens of one example that are shown; of longer ones the middles of stretches are left out, with a
# count.
MAX_TERMINAL_PIECES, MAX_PAGE_PIECES = 1_500, 20_000
# Characters that are shown of a row that cannot be used, as it is in the file.
MAX_RAW_CHARACTERS = 1_500
# The longer side of a picture on the page, in pixels.
MAX_THUMBNAIL_SIDE = 160

# --- which rows -----------------------------------------------------------------------------------

# A row as it is in its file, and the format of the file.
RowWithFormat = tuple[RawRow | BadRow, Any]


def choose_rows(
    reader: ExampleReader, *, count: int, row_number: int | None
) -> list[tuple[int, RowWithFormat]]:
    """Rows with their numbers from 1: one, or `count` evenly over the file. Reads the file twice.
    Raises DataError where the file has no rows, or none of this number."""
    # before any tokenizer is asked: the longest by characters is near enough to show
    sizes = array("q", (len(str(getattr(raw, "data", ""))) for raw, _ in reader.raw_rows()))
    if not sizes:
        raise DataError(f"{reader.source} has no rows")
    if row_number is None:
        indices = choose_row_indices(len(sizes), count, longest_index=sizes.index(max(sizes)))
    elif 1 <= row_number <= len(sizes):
        indices = [row_number - 1]
    else:
        raise DataError(
            f"ROW={row_number}: {reader.source} has {plural(len(sizes), 'row')}; rows are"
            " counted from 1"
        )
    return [(index + 1, row) for index, row in enumerate(reader.raw_rows()) if index in indices]


def choose_row_indices(rows: int, count: int, *, longest_index: int) -> list[int]:
    """`count` row numbers from 0, evenly over the file: the first, the last, the longest, and some
    between."""
    if count >= rows:
        return list(range(rows))
    if count == 1:
        return [0]
    row_indices = [round(n * (rows - 1) / (count - 1)) for n in range(count)]
    # in the place of the nearest; the first and the last stay
    if count > 2 and longest_index not in row_indices:
        nearest = min(row_indices[1:-1], key=lambda n: abs(n - longest_index))
        row_indices[row_indices.index(nearest)] = longest_index
    return sorted(row_indices)


# --- tokens as the bytes that they stand for, in pieces of whole characters -----------------------


@dataclass(frozen=True)
class TokenPiece:
    """One token, or several that only together are whole characters, or a run of an image's token.
    `text` holds a byte that is no part of a character as U+DC80 to U+DCFF (Python's
    surrogateescape). `is_kept` is false for what max_seq_len cuts away.
    """

    text: str
    ids: tuple[int, ...]
    is_trained: bool = False
    is_special: bool = False
    is_kept: bool = True


# Templates add marks such as <tool_call> as plain tokens; runs of spaces are added tokens too, and
# no mark.
_MARK = re.compile(r"<[^ ]+>|\[[^ ]+\]")


class TokenBytes:
    """What each token of a tokenizer stands for: bytes, or the name of a special token. Never the
    text that the token was made from: what the model learns is what its tokens spell."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # the letters in which byte-level vocabularies write bytes
        self._byte_by_letter = {
            letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()
        }
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokenizer = tokenizer
        self._added_tokens = {token_id: str(token) for token_id, token in added_tokens.items()}
        self.special_ids = set(getattr(tokenizer, "all_special_ids", ()))
        self.special_ids |= {
            token_id
            for token_id, token in added_tokens.items()
            if getattr(token, "special", False) or _MARK.fullmatch(str(token))
        }
        # How the names of tokens spell bytes: as letters (ByteLevel), or with ▁ and <0x0A>.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        decoder_json = str(decoder.__getstate__(), "utf-8") if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in decoder_json
        self._is_sentence_piece = "\u2581" in decoder_json or '"ByteFallback"' in decoder_json

    def decode(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; a special token's are those of its name."""
        tokens = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [
            self._decode_token(token_id, str(token))
            for token_id, token in zip(ids, tokens, strict=True)
        ]

    def _decode_token(self, token_id: int, token: str) -> bytes:
        if token_id in self._added_tokens or token_id in self.special_ids:
            token = self._added_tokens.get(token_id) or token
        elif self._is_byte_level:
            return b"".join(
                self._byte_by_letter.get(letter) or letter.encode("utf-8", "replace")
                for letter in token
            )
        elif self._is_sentence_piece:
            if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
                return bytes.fromhex(byte[1])
            token = token.replace("\u2581", " ")
        return token.encode("utf-8", "replace")


def split_token_pieces(
    ids: Sequence[int],
    labels: Sequence[int],
    token_bytes: TokenBytes,
    *,
    kept_flags: Sequence[bool],
    image_runs: Mapping[int, int] = types.MappingProxyType({}),
) -> list[TokenPiece]:
    """The tokens of a row as pieces: each by itself, or with those that complete its last
    character. `image_runs`: where a run of an image's token starts, which is one piece, and its
    length."""
    decoded, tokens, start = token_bytes.decode(ids), list[_MarkedTokens](), 0
    while start < len(ids):
        end = start + image_runs.get(start, 1)
        tokens.append((tuple(ids[start:end]), decoded[start], labels[start], kept_flags[end - 1]))
        start = end
    # a piece is trained, special and kept, or not, as a whole
    runs = itertools.groupby(
        tokens,
        key=lambda token: (token[2] != IGNORED, token[0][0] in token_bytes.special_ids, token[3]),
    )
    return [
        TokenPiece(text, piece_ids, *state)
        for state, run in runs
        for text, piece_ids in _join_characters(run)
    ]


# Ids of a token, or of a run of one; its bytes, its label, and whether it is kept.
_MarkedTokens = tuple[tuple[int, ...], bytes, int, bool]


def _join_characters(tokens: Iterable[_MarkedTokens]) -> Iterator[tuple[str, tuple[int, ...]]]:
    # incremental: it holds back the bytes of a character that is not complete, and tells so in its
    # state
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = ""
    ids: tuple[int, ...] = ()
    for token_ids, token, *_ in tokens:
        text, ids = text + decoder.decode(token), (*ids, *token_ids)
        if not decoder.getstate()[0]:
            yield text, ids
            text, ids = "", ()
    if ids:
        yield text + decoder.decode(b"", True), ids


def kept_token_flags(ids: Sequence[int], kept_ids: Sequence[int]) -> list[bool]:
    """Which tokens of a whole row are in the cut one: its beginning, its end, or a beginning and an
    end."""
    size, kept_size = len(ids), len(kept_ids)
    is_end = list(ids[size - kept_size :]) == list(kept_ids) != list(ids[:kept_size])
    beginning = 0
    if not is_end:
        beginning = next(
            (index for index in range(kept_size) if ids[index] != kept_ids[index]), kept_size
        )
    return [index < beginning or index >= size - (kept_size - beginning) for index in range(size)]


# Characters that are not seen are shown by signs: no text of the data can change how a page or a
# terminal reads.
_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Letters and marks without a shape.
_BLANK_CHARACTERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")


def character_sign(character: str) -> str:
    """A character that is seen, or the sign of one that is not: `·` for a space, ⟨U+202E⟩ and the
    like."""
    if character in _SIGNS:
        return _SIGNS[character]
    if "\udc80" <= character <= "\udcff":
        return f"⟨0x{ord(character) - 0xDC00:02X}⟩"
    if unicodedata.category(character) in _HIDDEN_CATEGORIES or character in _BLANK_CHARACTERS:
        return f"⟨U+{ord(character):04X}⟩"
    return character


def make_visible(text: str) -> str:
    """Text that is safe to show, on one line: spaces as they are, everything else that is not seen
    by its sign."""
    return " ".join("".join(map(character_sign, word)) for word in text.split(" "))


# --- what there is to see of a row ----------------------------------------------------------------


@dataclass(frozen=True)
class PreviewImage:
    """A picture of a row: the image tokens that it takes, and where the first of them stands."""

    picture: Picture
    tokens: int
    start: int

    def line(self, number: int) -> str:
        """The picture in a line: `image 1: photos/a.png, 640 x 480, 1,024 tokens`."""
        size = f"{self.picture.width:,} x {self.picture.height:,}"
        return f"image {number}: {self.picture.name}, {size}, {plural(self.tokens, 'token')}"


def locate_images(
    row: TokenRow, processor: ImageProcessor
) -> tuple[list[PreviewImage], dict[int, int]]:
    """The pictures of a whole row with their places, and the runs of image tokens in it: where each
    starts, and its length."""
    runs: dict[int, int] = {}
    ids, position = row.input_ids, 0
    for length in row.image_runs:
        position = next(n for n in range(position, len(ids)) if ids[n] in processor.token_ids)
        runs[position] = length
        position += length
    images, starts = [], iter(runs)
    for picture in row.images:
        expansion = processor.expand(picture.width, picture.height, is_alone=len(row.images) == 1)
        start, *_ = itertools.islice(starts, len(expansion.run_lengths))
        images.append(PreviewImage(picture, expansion.tokens, start))
    return images, runs


@dataclass(frozen=True)
class PreviewRow:
    """One row of the file, tokenised and marked; `reason`: why it cannot be used; `raw_text`: how
    it begins then."""

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
    images: tuple[PreviewImage, ...] = ()

    @property
    def trained_tokens(self) -> int:
        """Tokens of the whole row whose label counts; the first token is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])

    @property
    def cut_summary(self) -> str:
        """How much max_seq_len cuts, in words."""
        return (
            f"max_seq_len cuts {self.cut_tokens:,} tokens, {self.lost_trained_tokens:,} of them"
            " trained"
        )

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
            **({"images": self.image_lines()} if self.images else {}),
        }

    def image_lines(self) -> list[str]:
        """A line for each picture."""
        return [image.line(number) for number, image in enumerate(self.images, start=1)]

    def summary(self) -> str:
        """The row's place, its length, its mask, what is cut, and its notes."""
        facts = []
        if self.ids:
            share = self.trained_tokens / len(self.ids)
            facts = [f"{len(self.ids):,} tokens", f"{self.trained_tokens:,} trained ({share:.0%})"]
        if self.method:
            facts.append(f"mask: {MASK_METHODS.get(self.method, self.method)}")
        if self.cut_tokens:
            facts.append(self.cut_summary)
        facts += [one_line(note, limit=300) for note in self.notes]
        return ": ".join(
            filter(None, [f"({one_line(self.location, limit=300)})", "; ".join(facts)])
        )

    def problem_lines(self) -> list[str]:
        """Why the row cannot be used, and how it begins; nothing where it can."""
        reason = self.reason and f"CANNOT BE USED: {one_line(self.reason, limit=600)}"
        return list(filter(None, [reason, make_visible(self.raw_text)]))


def preview_rows(
    row_number: int,
    row_with_format: RowWithFormat,
    reader: ExampleReader,
    row_renderer: RowRenderer,
    token_bytes: TokenBytes,
) -> Iterator[PreviewRow]:
    """One row with its tokens, or why it has none; with data.multi_turn=split one for each row that
    it becomes."""
    raw, row_format = row_with_format
    example = read_example(raw, row_format, reader.data)
    raw_text = ""
    if isinstance(raw, RawRow):
        raw_text = json.dumps(raw.data, ensure_ascii=False, default=str)
    if len(raw_text) > MAX_RAW_CHARACTERS:
        raw_text = f"{raw_text[:MAX_RAW_CHARACTERS]}…"
    for outcome in row_renderer.render_rows([(row_number, example)]):
        if isinstance(outcome, BadRow) or outcome.whole_row is None:
            bad_row = outcome if isinstance(outcome, BadRow) else outcome.row
            assert isinstance(bad_row, BadRow)
            yield PreviewRow(
                row_number, bad_row.where, reason=bad_row.explanation, raw_text=raw_text
            )
            continue
        whole_row, row = outcome.whole_row, outcome.row
        ids, labels = tuple(whole_row.input_ids), tuple(whole_row.labels)
        if isinstance(row, BadRow):  # too long: its answer is behind the limit
            kept_ids, reason = ids[: row_renderer.max_seq_len], row.explanation
            cut_tokens = len(ids) - len(kept_ids)
            lost_tokens = sum(label != IGNORED for label in labels[len(kept_ids) :])
        else:
            kept_ids, reason = tuple(row.input_ids), ""
            cut_tokens, lost_tokens = row.cut_tokens, row.lost_trained_tokens
        counts = (
            (whole_row.untrained_turns, "assistant turns have no exact mask and are not trained"),
            (
                whole_row.stripped_think_pieces,
                "pieces of think text are not written by the template",
            ),
            (whole_row.special_token_count, "special tokens are spelled in its texts"),
            (whole_row.merged_edges, "answers end inside a token, which is split there"),
        )
        notes = [
            *outcome.example.notes,
            *whole_row.notes,
            *(f"{count} {note}" for count, note in counts if count),
        ]
        images, image_runs = list[PreviewImage](), dict[int, int]()
        if whole_row.images:
            images, image_runs = locate_images(whole_row, row_renderer.renderer.image_processor)
        if whole_row.added_end:
            notes.append(
                f"{one_line(whole_row.added_end.strip())} is added after the last turn, which the"
                " chat template does not end"
            )
        yield PreviewRow(
            row_number,
            whole_row.location,
            ids,
            labels,
            tuple(
                split_token_pieces(
                    ids,
                    labels,
                    token_bytes,
                    kept_flags=kept_token_flags(ids, kept_ids),
                    image_runs=image_runs,
                )
            ),
            whole_row.method,
            tuple(notes),
            cut_tokens=cut_tokens,
            lost_trained_tokens=lost_tokens,
            reason=reason,
            images=tuple(images),
        )


# Each part of a row as it is shown: its text; its styles, which the page and the terminal each have
# (t a token, b every second one, y trained, o every second trained, s special, x cut); and its
# piece, None for a remark between pieces.
def shown_segments(
    row: PreviewRow, max_pieces: int
) -> Iterator[tuple[str, str, TokenPiece | None]]:
    """About `max_pieces` pieces of a row, with remarks on what is left out between, and where
    max_seq_len begins to cut, and to keep again."""
    is_kept = True
    for index, item in enumerate(shorten_pieces(row.pieces, max_pieces)):
        if isinstance(item, str):
            yield f" {item} ", "gap", None
            continue
        if item.is_kept != is_kept:
            is_kept = item.is_kept
            remark = "kept from here" if is_kept else row.cut_summary
            yield f"\n--- {remark} ---\n", "cut", None
        is_odd = bool(index % 2)
        flags = {
            "t": True,
            "b": is_odd and not item.is_trained,
            "y": item.is_trained,
            "o": is_odd and item.is_trained,
            "s": item.is_special,
            "x": not item.is_kept,
        }
        text = "".join(
            "⏎\n" if character == "\n" else character_sign(character) for character in item.text
        )
        # one token several times, as images have them; no character is made so
        if len(item.ids) > 1 and len({*item.ids}) == 1:
            text += f" x {len(item.ids):,}"
        yield text, " ".join(name for name, is_set in flags.items() if is_set), item


def shorten_pieces(pieces: Sequence[TokenPiece], max_pieces: int) -> list[TokenPiece | str]:
    """The pieces, the middles of their longest stretches left out so that some `max_pieces` remain,
    with their number in their place. A stretch is a run that is trained, or not, or cut as a whole:
    each keeps its beginning and end.
    """
    if len(pieces) <= max_pieces:
        return list(pieces)
    runs = [
        list(run)
        for _, run in itertools.groupby(pieces, key=lambda piece: (piece.is_trained, piece.is_kept))
    ]
    pieces_per_run = max(10, max_pieces // len(runs))
    items: list[TokenPiece | str] = []
    for run in runs:
        if len(run) <= pieces_per_run + 1:  # a gap in the place of one piece would save nothing
            items += run
            continue
        half = pieces_per_run // 2
        tokens = sum(len(piece.ids) for piece in run[half:-half])
        trained_note = f", {tokens:,} of them trained" * run[0].is_trained
        items += [*run[:half], f"… {tokens:,} tokens not shown{trained_note} …", *run[-half:]]
    return items


# --- plain text, and the terminal -----------------------------------------------------------------

# Foreground and background both, so that tokens can be read on dark and on light terminals.
_TERMINAL_STYLES = {
    "t": "grey93 on grey23",
    "b": "on grey35",
    "y": "pale_green1 on dark_green",
    "o": "on green4",
    "s": "bold underline",
    "x": "on grey11 strike",
    "gap": "italic",
    "cut": "red",
}


def format_plain_lines(row: PreviewRow, *, max_pieces: int = MAX_TERMINAL_PIECES) -> list[str]:
    """The example as plain text."""
    heading, *lines = format_terminal_text(row, max_pieces=max_pieces).plain.split("\n")
    return [heading, *(f"  {line}" for line in filter(None, lines))]


def format_terminal_text(row: PreviewRow, *, max_pieces: int = MAX_TERMINAL_PIECES) -> Any:
    """The example as `rich.text.Text`: tokens on changing grounds, trained ones green, cut ones
    struck through."""
    from rich.text import Text

    problem_lines = [(f"{line}\n", "bold red") for line in row.problem_lines()]
    heading = (f"Row {row.row_number:,} {row.summary()}\n", "bold")
    image_lines = [f"{make_visible(line)}\n" for line in row.image_lines()]
    return Text.assemble(
        heading, *image_lines, *_mark_segments(row, max_pieces), "\n", *problem_lines
    )


# ¦ between tokens, trained parts in [[ ]], what is cut in ~~ ~~.
def _mark_segments(row: PreviewRow, max_pieces: int) -> Iterator[tuple[str, str]]:
    is_trained, is_kept, is_first = False, True, True
    for text, classes, piece in shown_segments(row, max_pieces):
        style = " ".join(_TERMINAL_STYLES[name] for name in classes.split())
        if classes == "cut":
            yield f"{']]' * is_trained}{'~~' * (not is_kept)}{text}{'~~' * is_kept}", style
            is_trained, is_kept, is_first = False, not is_kept, True
        elif piece is None:
            yield text, style
        else:
            if piece.is_trained != is_trained:
                yield ("]]", "[[")[piece.is_trained], ""
            elif not is_first:
                yield "¦", ""
            is_trained, is_first = piece.is_trained, False
            # nothing of a text may be taken for our marks
            yield text.replace("[[", "[\\[").replace("]]", "]\\]").replace("~~", "~\\~"), style
    yield "]]" * is_trained + "~~" * (not is_kept), ""


# --- the page -------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --a: #eceef1; --b: #dde1e7; --ta: #c2ecc4; --tb: #9fdda4; --bad: #a3262a; }
@media (prefers-color-scheme: dark) { :root { --a: #262b33; --b: #343b46; --ta: #1c5130; --tb: #28713f;
  --bad: #ff8f8f; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; font: 15px/1.5 system-ui, sans-serif; }
body, pre { overflow-wrap: anywhere; }
section { margin-top: 2rem; border-top: 1px solid gray; }
pre { font: 14px/1.75 ui-monospace, monospace; white-space: pre-wrap; }
.t { background: var(--a); unicode-bidi: isolate; }
.b { background: var(--b); }
.y { background: var(--ta); }
.o { background: var(--tb); }
.s { font-weight: 600; box-shadow: inset 0 0 0 1px currentColor; padding: .08em .2em; }
.x { text-decoration: line-through; opacity: .6; }
.cut, .bad { color: var(--bad); font-weight: 600; }
.gap { font-style: italic; }
""".strip()  # noqa: E501  (as pages that people compare have it)
_LEGEND = """<p><span class="t">not</span><span class="t b"> trained</span> · <span class="t y">tra</span><span
class="t y o">ined</span> · <span class="t s">special token</span> · <span class="t x">cut by max_seq_len</span> ·
⟨U+200B⟩ a character that is not seen, ⟨0xF0⟩ a byte that is no character</p>
"""  # noqa: E501  (the same)


def render_html_page(
    rows: Sequence[PreviewRow],
    *,
    title: str,
    intro_lines: Iterable[str],
    max_pieces: int = MAX_PAGE_PIECES,
) -> str:
    """One HTML page without network, script or anything outside itself; `intro_lines` stand below
    the title."""
    # the page may be opened anywhere: it allows itself this one style sheet, by its digest, and
    # nothing else
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    if any(row.images for row in rows):
        policy += "; img-src data:"
    lines = "".join(f"<p>{_escape(line)}</p>\n" for line in intro_lines)
    sections = ""
    for row in rows:
        problems = "".join(f'<p class="bad">{_escape(line)}</p>\n' for line in row.problem_lines())
        image_lines = "".join(f"<p>{_escape(line)}</p>\n" for line in row.image_lines())
        sections += (
            f"<section>\n<h2>Row {row.row_number:,}</h2>\n<p>{_escape(row.summary())}</p>\n"
            f'{image_lines}<pre dir="ltr">{_page_spans(row, max_pieces)}</pre>\n'
            f"{problems}</section>\n"
        )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{_escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_escape(title)}</h1>\n{lines}{_LEGEND}{sections}</main>\n</body>\n</html>\n"
    )


# The tokens, each picture before the first of its own.
def _page_spans(row: PreviewRow, max_pieces: int) -> str:
    thumbnails = _thumbnails(row)
    spans = ""
    for text, classes, piece in shown_segments(row, max_pieces):
        spans += thumbnails.get(id(piece), "")
        spans += f'<span class="{classes}">{html.escape(text)}</span>'
    return spans


def _thumbnails(row: PreviewRow) -> dict[int, str]:
    starts = itertools.accumulate((len(piece.ids) for piece in row.pieces), initial=0)
    piece_at = dict(zip(starts, row.pieces, strict=False))
    thumbnails = dict[int, str]()
    for number, image in enumerate(row.images, start=1):
        try:
            uri = image.picture.thumbnail_uri(MAX_THUMBNAIL_SIDE)
            mark = f'<img src="{uri}" alt="image {number}">'
        except ImageError as error:
            mark = f'<span class="bad">image {number}: {_escape(str(error))}</span>'
        thumbnails[id(piece_at[image.start])] = mark
    return thumbnails


def _escape(text: str) -> str:
    return html.escape(make_visible(text))
