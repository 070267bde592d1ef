"""The text that the model will see, one JSON row per example, with its mask as spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats
from sft_play.data.build.survey import RowMaker, row_outcomes
from sft_play.data.sources.bad_rows import FIX_OR_SKIP, bad_row_lines
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.files import AnySource
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError
from sft_play.log import one_line


@dataclass(frozen=True)
class RenderedFile:
    """What was written of one split; the whole rows, before max_seq_len cuts them."""

    split: str
    path: Path
    stats: RowStats

    @property
    def _tokens(self) -> tuple[int, int]:
        """Tokens of the rows as they were written, and trained ones among them."""
        return self.stats.tokens + self.stats.tokens_cut, self.stats.trained + self.stats.lost_by_cut

    def bad_lines(self) -> list[str]:
        """The bad rows in words: counts by reason, the first of them, and how many more."""
        return bad_row_lines(f"{self.stats.rows:,} rows of {self.stats.source}", self.stats.bad, self.stats.first_bad)

    def lines(self) -> list[str]:
        """What was written, in words."""
        stats, (tokens, trained) = self.stats, self._tokens
        lines = [
            f"{self.path}: {stats.kept:,} of {stats.rows:,} rows of {stats.source}; {tokens:,} tokens, "
            f"{trained:,} of them trained ({trained / max(1, tokens):.0%})"
        ]
        if stats.tokens_cut:
            lines.append(f"max_seq_len cuts {stats.tokens_cut:,} tokens, {stats.lost_by_cut:,} of them trained")
        if stats.too_long:
            lines.append(f"{stats.too_long:,} rows left out: too long for max_seq_len")
        if stats.left_out:
            lines.append(f"{stats.left_out.total():,} rows left out as asked (data.drop_empty)")
        return lines + (self.bad_lines() if stats.bad else [])

    def as_json(self) -> dict[str, Any]:
        """Rows and tokens as counts, and the bad rows by reason."""
        stats, (tokens, trained) = self.stats, self._tokens
        return {
            "split": self.split,
            "source": stats.source,
            "path": str(self.path),
            "rows_in": stats.rows,
            "rows": stats.kept,
            "tokens": tokens,
            "trained": trained,
            "cut": stats.tokens_cut,
            "lost": stats.lost_by_cut,
            "out_of_reach": stats.too_long,
            "left_out": stats.left_out.total(),
            "bad": stats.bad.total(),
            "reasons": dict(stats.bad),
            "first_bad": [one_line(str(row), limit=300) for row in stats.first_bad],
        }


def render_file(
    source: AnySource, split: str, target: TextIO, path: Path, data: DataConfig, maker: RowMaker
) -> RenderedFile:
    """Every row of a file, rendered and written."""
    stats = RowStats(str(source))
    text_wanted = maker.task_mode == "cpt" or split == "text"
    reader = ExampleReader(source, data, split="train" if split == "text" else split, text_wanted=text_wanted)
    for outcome in row_outcomes(reader.numbered(), maker, document=split == "text"):
        if isinstance(outcome, BadRow):
            stats.count_bad(outcome)
        elif outcome.whole is None:
            assert isinstance(outcome.row, BadRow)
            stats.count_bad(outcome.row)
        elif isinstance(outcome.row, BadRow):
            stats.count_too_long(outcome.whole, outcome.row)
        else:
            stats.count_kept(outcome.row)
            line = {
                "where": outcome.whole.where,
                "text": outcome.whole.text,
                "spans": [list(span) for span in outcome.whole.spans],
                "tokens": len(outcome.whole.input_ids),
                "trained": outcome.whole.trained,
                "cut": outcome.row.cut,
                "lost": outcome.row.lost,
                "method": outcome.whole.method,
            }
            target.write(json.dumps(line, ensure_ascii=False) + "\n")
    stats.rows = reader.rows
    return RenderedFile(split, path, stats)


def refuse_bad(files: Sequence[RenderedFile], data: DataConfig) -> None:
    """Raises DataError where rows cannot be used and are not to be skipped, or none is left."""
    bad = [file for file in files if file.stats.bad]
    if bad and data.on_bad_row == "fail":
        lines = [line for file in bad for line in file.bad_lines()]
        raise DataError("\n".join([*lines, FIX_OR_SKIP]))
    for file in files:
        if not file.stats.kept:
            lines = file.lines()[1:] or [f"{file.stats.source} has no rows"]
            raise DataError("\n".join([f"no row of {file.stats.source} is left:", *lines]))
