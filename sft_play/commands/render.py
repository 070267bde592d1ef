"""`render`: the text that the model will see, one row per example, with its mask as spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.request import Request
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats
from sft_play.data.build.survey import RowMaker
from sft_play.data.sources.examples import ExampleReader, look_at
from sft_play.data.sources.files import AnySource, data_paths, split_of
from sft_play.data.sources.raw import FIX_OR_SKIP, BadRow, bad_row_lines
from sft_play.data.written import OutputFolder
from sft_play.diagnose.row_tools import SPLITS, first_stage, prepare_hub, refuse_source, tools_of
from sft_play.errors import DataError
from sft_play.log import one_line

HELP = {"render": "write the text that the model will see, one row per example, with its mask as spans"}
DEFAULT_RENDERED = Path("data/rendered")


def run(request: Request) -> Answer:
    """Write the rows, and answer with their counts."""
    loaded = load_config(request.config, overrides=request.overrides)
    return answer_of(render(loaded, out=request.out, force=request.force), to_out=False)


@dataclass(frozen=True)
class Renderings:
    """What `make render` wrote."""

    files: tuple[RenderedFile, ...]
    notes: tuple[str, ...]
    ok: bool = True

    def lines(self) -> list[str]:
        """Each file's lines."""
        return [*self.notes, *(line for file in self.files for line in file.lines())]

    def as_json(self) -> dict[str, Any]:
        """`ok`, and each file with its counts."""
        return {"ok": self.ok, "files": [file.as_json() for file in self.files], "notes": list(self.notes)}


def render(loaded: LoadedConfig, *, out: Path | None, force: bool) -> Renderings:
    """The text that the model will see with its mask as spans, one JSON row per example; `out`: a file for the training
    rows alone, or a folder for all.

    Raises:
        DataError: rows that cannot be used (unless data.on_bad_row=skip), or a file that was edited since; nothing is
            written then.
        TokenizerError: the tokenizer or its template cannot be used.
    """
    loaded, of_stage = first_stage(loaded)
    config = loaded.config
    paths = data_paths(config.data)
    look_at(config.data, paths, task_mode=config.task_mode)
    prepare_hub(config)
    tools = tools_of(config)
    out = out or DEFAULT_RENDERED
    if out == DEFAULT_RENDERED or out.is_dir():
        folder, names = out, {}
        for part, _ in paths.files():
            source = part.removeprefix("source ").removesuffix(" (val)")
            names[part] = f"{split_of(part)}-{source}.jsonl" if source != part else f"{split_of(part)}.jsonl"
        # of splits that this run lacks too: a file of an earlier run under such a name must not pass for this one's
        announced = tuple(dict.fromkeys([*(f"{split}.jsonl" for split in (*SPLITS, "text")), *names.values()]))
    elif len(paths.sources) > 1:
        raise DataError(f"OUT={out} is one file, and data.sources names {len(paths.sources)}; name an existing folder")
    else:
        folder, names, announced = out.parent, {"train": out.name}, (out.name,)
    files = [(part, path) for part, path in paths.files() if part in names] or [("train", paths.train)]
    for name in names.values():
        refuse_source(folder / name, files)
    with OutputFolder(folder, announced, force=force, command="render") as written:
        rendered = [
            render_file(path, split_of(part), written.open(names[part]), folder / names[part], config.data, tools.maker)
            for part, path in files
        ]
        refuse_bad(rendered, config.data)
    return Renderings(tuple(rendered), (*of_stage, *paths.notes, *tools.notes))


@dataclass(frozen=True)
class RenderedFile:
    """What was written of one split; the whole rows, before max_seq_len cuts them."""

    split: str
    path: Path
    stats: RowStats

    @property
    def _tokens(self) -> tuple[int, int]:
        return self.stats.tokens + self.stats.tokens_cut, self.stats.trained + self.stats.lost_by_cut

    def bad_lines(self) -> list[str]:
        """The bad rows in words: counts by reason, the first of them, and how many more."""
        return bad_row_lines(f"{self.stats.rows:,} rows of {self.stats.source}", self.stats.bad, self.stats.first_bad)

    def lines(self) -> list[str]:
        """What was written, in words."""
        stats, (tokens, trained) = self.stats, self._tokens
        count = f"{tokens:,} tokens, {trained:,} of them trained ({trained / max(1, tokens):.0%})"
        lines = [f"{self.path}: {stats.kept:,} of {stats.rows:,} rows of {stats.source}; {count}"]
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
    for outcome in maker.outcomes(reader.numbered(), document=split == "text"):
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
