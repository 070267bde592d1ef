"""Rows to look at, chosen from a file: their tokens, what is trained, what is cut; as text and for the terminal.

`preview_page.py` makes the page of them.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.build.stats import rows_text
from sft_play.data.build.survey import RowMaker, RowOutcome
from sft_play.data.masks.token_row import IGNORED, MASK_METHODS, TokenRow
from sft_play.data.masks.words import BYTE_LETTERS
from sft_play.data.sources.examples import ExampleReader, read_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import one_line

TERMINAL_PIECES = 1_500
# Characters that are shown of a row that cannot be used, as it is in the file.
RAW_CHARACTERS = 1_500


@dataclass(frozen=True)
class Shown:
    """One row of the file, tokenised and marked; `reason` says why a row cannot be used, `raw` how it begins."""

    number: int
    where: str
    ids: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    pieces: tuple[TokenPiece, ...] = ()
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
            facts.append(f"mask: {MASK_METHODS.get(self.method, self.method)}")
        if self.cut:
            facts.append(self.cut_text)
        return [*facts, *(one_line(note, limit=300) for note in self.notes)]

    def items(self, most: int) -> Iterator[tuple[int, TokenPiece | Gap | str]]:
        """About `most` pieces of it, numbered; between them where max_seq_len begins to cut, and to keep again."""
        kept = True
        for number, item in enumerate(shortened(self.pieces, most)):
            if isinstance(item, TokenPiece) and item.kept != kept:
                kept = item.kept
                yield number, "kept from here" if kept else self.cut_text
            yield number, item


def spread_out(rows: int, count: int, *, longest: int) -> list[int]:
    """`count` row numbers from 0, evenly over the file: the first, the last, the longest, and some between."""
    if count >= rows:
        return list(range(rows))
    if count == 1:
        return [0]
    even = [round(n * (rows - 1) / (count - 1)) for n in range(count)]
    if count > 2 and longest not in even:  # in the place of the nearest; the first and the last stay
        nearest = min(even[1:-1], key=lambda n: abs(n - longest))
        even[even.index(nearest)] = longest
    return sorted(even)


@dataclass(frozen=True)
class Gap:
    """Tokens that are not shown, and how many of them are trained."""

    tokens: int
    trained: int

    def __str__(self) -> str:
        trained = f", {self.trained:,} of them trained" if self.trained else ""
        return f"… {self.tokens:,} tokens not shown{trained} …"


def shortened(pieces: Sequence[TokenPiece], most: int) -> list[TokenPiece | Gap]:
    """The pieces, the middles of their longest stretches left out so that about `most` remain. A stretch is a run that
    is trained, or not, or cut as a whole: each keeps its beginning and its end."""
    if len(pieces) <= most:
        return list(pieces)
    runs = [list(run) for _, run in itertools.groupby(pieces, key=lambda piece: (piece.trained, piece.kept))]
    room = max(10, most // len(runs))
    shown: list[TokenPiece | Gap] = []
    for run in runs:
        if len(run) <= room + 1:  # a gap in the place of one piece would save nothing
            shown += run
            continue
        half = room // 2
        middle = run[half : len(run) - half]
        tokens = sum(len(piece.ids) for piece in middle)
        shown += [*run[:half], Gap(tokens, tokens if run[0].trained else 0), *run[len(run) - half :]]
    return shown


def heading(shown: Shown) -> str:
    """The line above an example: its number, its place, its facts."""
    facts = "; ".join(shown.facts())
    return f"Row {shown.number:,} ({one_line(shown.where, limit=300)}){': ' + facts if facts else ''}"


TRAINED_STYLES = ("grey100 on dark_green", "grey100 on green4")
OTHER_STYLES = ("grey93 on grey23", "grey93 on grey35")
# Foreground and background both, so that tokens can be read on dark and on light terminals.
CUT_TRAINED_STYLE, CUT_STYLE = "pale_green3 on grey11 strike", "grey58 on grey11 strike"


def plain_lines(shown: Shown, *, most: int = TERMINAL_PIECES) -> list[str]:
    """The example as plain text."""
    body = "".join(text for text, _ in _marked(shown, most))
    return [heading(shown), *(f"  {line}" for line in body.split("\n") if line), *_trouble(shown)]


def terminal_text(shown: Shown, *, most: int = TERMINAL_PIECES) -> Any:
    """The example as `rich.text.Text`: tokens on changing grounds, trained ones green, cut ones struck through."""
    from rich.text import Text

    trouble = [(f"{line}\n", "bold red") for line in _trouble(shown)]
    return Text.assemble((f"{heading(shown)}\n", "bold"), *_marked(shown, most), "\n", *trouble)


def _marked(shown: Shown, most: int) -> Iterator[tuple[str, str]]:
    """The example's tokens with their styles: ¦ between tokens, trained parts in [[ ]], what is cut in ~~ ~~."""
    trained, kept, is_first = False, True, True
    for number, item in shown.items(most):
        if isinstance(item, Gap):
            yield f" {item} ", "italic"
        elif isinstance(item, str):
            yield f"{']]' * trained}{'~~' * (not kept)}\n--- {item} ---\n{'~~' * kept}", "red"
            trained, kept, is_first = False, not kept, True
        else:
            if item.trained != trained or not is_first:
                yield ("¦" if item.trained == trained else "[[" if item.trained else "]]"), ""
            trained, is_first = item.trained, False
            style = (TRAINED_STYLES if trained else OTHER_STYLES)[number % 2]
            if not item.kept:
                style = CUT_TRAINED_STYLE if trained else CUT_STYLE
            yield _plain(item), f"{style} bold underline" if item.special else style
    yield "]]" * trained + "~~" * (not kept), ""


def _plain(piece: TokenPiece) -> str:
    """A piece without anything that could be taken for our marks."""
    text = "".join(sign + "\n" if kind == "newline" else sign for kind, sign in signs(piece.text))
    return text.replace("[[", "[\\[").replace("]]", "]\\]").replace("~~", "~\\~")


def _trouble(shown: Shown) -> list[str]:
    if not shown.reason:
        return []
    reason = f"  CANNOT BE USED: {one_line(shown.reason, limit=600)}"
    return [reason, f"  {visible(shown.raw)}"] if shown.raw else [reason]


# A row as it is in its file, and the format of the file.
Raw = tuple[RawRow | BadRow, Any]


def row_numbered(reader: ExampleReader, wanted: int) -> list[tuple[int, Raw]]:
    """The row of this number, from 1."""
    rows = [raw for number, raw in enumerate(reader.raw_rows(), start=1) if number == wanted]
    if not rows:
        raise DataError(f"ROW={wanted}: {reader.path} has {rows_text(reader.rows)}; rows are counted from 1")
    return [(wanted, rows[0])]


def rows_spread(reader: ExampleReader, count: int) -> list[tuple[int, Raw]]:
    """Rows spread evenly over a file of unknown length, its longest among them, in one reading: those at multiples of a
    stride are kept, which doubles when they are four times as many as wanted."""
    kept: dict[int, Raw] = {}
    stride = 1
    longest: tuple[int, int, Raw] | None = None
    last: tuple[int, Raw] | None = None
    for number, raw in enumerate(reader.raw_rows()):
        # before any tokenizer is asked: the longest by characters is near enough to show
        size = len(str(raw[0].data)) if isinstance(raw[0], RawRow) else 0
        if longest is None or size > longest[0]:
            longest = (size, number, raw)
        last = (number, raw)
        if number % stride == 0:
            kept[number] = raw
            if len(kept) > 4 * count + 4:
                stride *= 2
                kept = {n: item for n, item in kept.items() if n % stride == 0}
    if last is None or longest is None:
        raise DataError(f"{reader.path} has no rows")
    kept |= {last[0]: last[1], longest[1]: longest[2]}  # the stride may have dropped them
    wanted = spread_out(last[0] + 1, count, longest=longest[1])
    nearest = sorted({min(sorted(kept), key=lambda number: abs(number - one)) for one in wanted})
    return [(number + 1, kept[number]) for number in nearest]


def shown_rows(number: int, raw_row: Raw, reader: ExampleReader, maker: RowMaker, names: TokenBytes) -> list[Shown]:
    """One row with its tokens, or why it has none; with data.multi_turn=split one for each row that it becomes."""
    raw, shape = raw_row
    example = read_example(raw, shape, reader.data)
    text = json.dumps(raw.data, ensure_ascii=False, default=str) if isinstance(raw, RawRow) else ""
    as_read = text if len(text) <= RAW_CHARACTERS else f"{text[:RAW_CHARACTERS]}…"
    if isinstance(example, BadRow):
        return [Shown(number, example.where, reason=_why(example), raw=as_read)]
    outcomes = maker.outcomes([(number, example)])
    return [_shown_outcome(one, names, maker.max_seq_len, as_read) for one in outcomes if isinstance(one, RowOutcome)]


def _shown_outcome(outcome: RowOutcome, names: TokenBytes, limit: int, as_read: str) -> Shown:
    whole, row = outcome.whole, outcome.row
    if whole is None:
        assert isinstance(row, BadRow)
        return Shown(outcome.number, row.where, reason=_why(row), raw=as_read)
    ids, labels = tuple(whole.input_ids), tuple(whole.labels)
    if isinstance(row, BadRow):
        reason, cut, left = _why(row), max(0, len(ids) - limit), ids[:limit]
        lost = sum(label != IGNORED for label in labels[limit:])
    else:
        reason, cut, left, lost = "", row.cut_tokens, tuple(row.input_ids), row.lost_trained_tokens
    notes = (*outcome.example.notes, *whole.notes, *_row_notes(whole))
    pieces = token_pieces(ids, labels, names, kept=kept_tokens(ids, left))
    return Shown(
        outcome.number, whole.where, ids, labels, tuple(pieces), whole.method, notes, cut=cut, lost=lost, reason=reason
    )


def _row_notes(whole: TokenRow) -> Iterator[str]:
    counted = (
        (whole.untrained_turns, "assistant turns have no exact mask and are not trained"),
        (whole.stripped_think, "pieces of think text are not written by the template"),
        (whole.special_in_text, "special tokens are spelled in its texts"),
        (whole.merged_edges, "answers end inside a token, which is split there"),
    )
    yield from (f"{count} {words}" for count, words in counted if count)
    if whole.added_end:
        end = one_line(whole.added_end.strip())
        yield f"{end} is added after the last turn, which the chat template does not end"


def _why(row: BadRow) -> str:
    return f"{row.reason}{f' ({row.detail})' if row.detail else ''}"


# Tokens as the bytes that they stand for, in pieces of whole characters. A token is never shown as the text that it was
# made from: what the model learns is what its tokens spell. Characters that are not seen are shown by signs, so that no
# text of the data can change how a page or a terminal reads.


@dataclass(frozen=True)
class TokenPiece:
    """One token, or several that only together are whole characters. `text` holds a byte that is no part of a character
    as U+DC80 to U+DCFF (Python's surrogateescape). `kept` is false for what max_seq_len cuts away."""

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
        # How the names of tokens spell bytes: as letters (ByteLevel), or with ▁ and <0x0A>.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = str(decoder.__getstate__(), "utf-8") if decoder is not None else ""
        self._is_byte_level = '"ByteLevel"' in state
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
        if self._is_byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode("utf-8", "replace") for c in word)
        if self._is_sentence_piece:
            if byte := _BYTE_NAME.fullmatch(word):
                return bytes([int(byte[1], 16)])
            word = word.replace("\u2581", " ")
        return word.encode("utf-8", "replace")


_BYTE_OF = {letter: byte for byte, letter in BYTE_LETTERS.items()}
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_pieces(
    ids: Sequence[int], labels: Sequence[int], names: TokenBytes, *, kept: Sequence[bool]
) -> list[TokenPiece]:
    """The tokens of a row as pieces: each by itself, or with those that complete its last character."""
    pieces: list[TokenPiece] = []
    waiting: list[int] = []
    state: tuple[bool, bool] | None = None
    # incremental: it holds back the bytes of a character that is not complete, and tells so in its state
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = ""

    def end() -> None:
        nonlocal text
        if waiting:
            assert state is not None
            pieces.append(TokenPiece(text + decoder.decode(b"", True), tuple(waiting), trained=state[0], kept=state[1]))
            decoder.reset()
            waiting.clear()
            text = ""

    for number, label, is_kept, raw in zip(ids, labels, kept, names.of(ids), strict=True):
        here = (label != IGNORED, is_kept)
        if names.is_special(number):
            end()
            pieces.append(TokenPiece(raw.decode("utf-8", "replace"), (number,), here[0], special=True, kept=here[1]))
            continue
        if here != state:  # a piece is trained or not, kept or not, as a whole
            end()
        state = here
        waiting.append(number)
        text += decoder.decode(raw)
        if not decoder.getstate()[0]:
            end()
    end()
    return pieces


def kept_tokens(whole: Sequence[int], cut: Sequence[int]) -> list[bool]:
    """Which tokens of a whole row are in the cut one: its beginning, its end, or a beginning and an end."""
    size, left = len(whole), len(cut)
    is_end = list(whole[size - left :]) == list(cut) != list(whole[:left])
    head = 0 if is_end else next((n for n in range(left) if whole[n] != cut[n]), left)
    return [n < head or n >= size - (left - head) for n in range(size)]


Kind = Literal["text", "space", "newline", "mark"]
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
# Letters and marks without a shape.
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
NEWLINE, TAB, SPACE = "⏎", "⇥", "·"


def signs(text: str) -> Iterator[tuple[Kind, str]]:
    """The text in runs of one kind: as it is, or as signs for what would not be seen. A line break is one `newline`, a
    space one `·`, everything else a mark such as ⟨U+202E⟩."""
    for kind, run in itertools.groupby(map(_sign, text), key=lambda one: one[0]):
        if kind == "text":
            yield kind, "".join(sign for _, sign in run)
        else:
            yield from run


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
