"""The rows that `make preview` shows, with their tokens and masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sft_play.data.build.stats import rows_text
from sft_play.data.build.survey import RowMaker, RowOutcome
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.preview import Shown, raw_text, spread_out
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.data.token_pieces import TokenBytes, kept_tokens, pieces_of
from sft_play.errors import DataError
from sft_play.log import one_line

Raw = tuple[RawRow | BadRow, Any]
"""A row as it is in its file, and the format of the file."""


def row_numbered(reader: ExampleReader, wanted: int) -> list[tuple[int, Raw]]:
    """The row of this number, from 1."""
    rows = [raw for number, raw in enumerate(reader.raw(), start=1) if number == wanted]
    if not rows:
        raise DataError(f"ROW={wanted}: {reader.path} has {rows_text(reader.rows)}; rows are counted from 1")
    return [(wanted, rows[0])]


def rows_spread(reader: ExampleReader, count: int) -> list[tuple[int, Raw]]:
    """Rows spread evenly over a file of unknown length, its longest among them; the file is read once.

    Rows whose number is a multiple of a stride are kept; the stride doubles when they are four times as many as wanted.
    """
    kept: dict[int, Raw] = {}
    stride = 1
    longest: tuple[int, int, Raw] | None = None
    last: tuple[int, Raw] | None = None
    for number, raw in enumerate(reader.raw()):
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
    example = reader.example(raw, shape)
    as_read = raw_text(raw.data) if isinstance(raw, RawRow) else ""
    if isinstance(example, BadRow):
        return [Shown(number, example.where, reason=_why(example), raw=as_read)]
    return [_shown_outcome(outcome, names, maker.max_seq_len, as_read) for outcome in maker.of([(number, example)])]


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
        reason, cut, left, lost = "", row.cut, tuple(row.input_ids), row.lost
    kept = kept_tokens(ids, left)
    notes = (
        *outcome.example.notes,
        *whole.notes,
        *_row_notes(whole),
        *(() if kept else ("the cut row is rendered again; the whole one is shown",)),
    )
    pieces = pieces_of(ids, labels, names, kept=kept or [True] * len(ids))
    return Shown(
        outcome.number, whole.where, ids, labels, tuple(pieces), whole.method, notes, cut=cut, lost=lost, reason=reason
    )


def _row_notes(whole: TokenRow) -> Iterator[str]:
    """What is special about a row, in words."""
    if whole.untrained_turns:
        yield f"{whole.untrained_turns} assistant turns have no exact mask and are not trained"
    if whole.stripped_think:
        yield f"{whole.stripped_think} pieces of think text are not written by the template"
    if whole.special_in_text:
        yield f"{whole.special_in_text} special tokens are spelled in its texts"
    if whole.added_end:
        end = one_line(whole.added_end.strip())
        yield f"{end} is added after the last turn, which the chat template does not end"
    if whole.merged:
        yield f"{whole.merged} answers end inside a token, which is split there"


def _why(row: BadRow) -> str:
    return f"{row.reason}{f' ({row.detail})' if row.detail else ''}"
