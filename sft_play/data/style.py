"""`make style`: the system prompt of processed conversations set, prepended or replaced, by the file they came from."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.config.schema import RunConfig, StyleConfig
from sft_play.data.build.stats import format_row_count
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.process import SPLIT_NAMES, read_processed
from sft_play.data.sources.examples import count_part_rows, find_system_prompt, set_system_prompt
from sft_play.data.sources.files import FilePart
from sft_play.data.sources.formats import STYLED_KEY, Text, recognise_format, to_example
from sft_play.data.sources.messages import author_form
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import ConfigError, DataError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait

_OUTCOMES = ("set", "prepended", "replaced", "left", "text")


@dataclass
class StyleReport(Answer):
    """What became of the system prompts: counts by split of set, prepended, replaced, left, and rows of text."""

    out_dir: str
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    unused_globs: tuple[str, ...] = ()

    @property
    def total(self) -> Counter[str]:
        """The counts of all splits."""
        return sum(self.splits.values(), Counter())

    def lines(self) -> list[str]:
        """The report in words."""
        lines = [f"Styled {format_row_count(self.total.total())} into {self.out_dir}: {_format_outcomes(self.total)}"]
        lines += [
            f"  {name}: {format_row_count(counts.total())}, {_format_outcomes(counts)}"
            for name, counts in self.splits.items()
        ]
        return [*lines, *(f"data.style.per_source: no row's source matches {one_line(g)}" for g in self.unused_globs)]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which report.json holds."""
        splits = {name: {outcome: counts[outcome] for outcome in _OUTCOMES} for name, counts in self.splits.items()}
        total = {outcome: self.total[outcome] for outcome in _OUTCOMES}
        return {"ok": self.ok, "out_dir": self.out_dir, **total, "splits": splits, "unused_globs": [*self.unused_globs]}


def _format_outcomes(counts: Counter[str]) -> str:
    parts = [f"{counts[outcome]:,} {outcome}" for outcome in _OUTCOMES[:-1] if counts[outcome]]
    parts += [f"{counts['text']:,} rows of plain text untouched"] if counts["text"] else []
    return ", ".join(parts) or "none"


def style_rows(config: RunConfig, text: str | None, *, force: bool = False) -> StyleReport:
    """Write the splits of `data.process.out_dir` to `data.style.out_dir` with their system prompts: that of the first
    glob of `data.style.per_source` that matches, else `text` (STYLE=), else `data.style.system`. Raises ConfigError
    without a prompt, DataError without processed rows or where edited files would be written over."""
    options = config.data.style if text is None else config.data.style.model_copy(update={"system": text})
    if not (options.system or "").strip() and not options.per_source:
        raise ConfigError(
            "no system prompt is given: make style STYLE='You are terse.', or data.style.system, or "
            "data.style.per_source={'*faq*': 'You answer briefly.'}"
        )
    source, target = (Path(path).expanduser() for path in (config.data.process.out_dir, options.out_dir))
    if source.resolve() == target.resolve():
        raise ConfigError(f"data.style.out_dir={options.out_dir} is data.process.out_dir; give it another folder")
    files = [name for name in SPLIT_NAMES if (source / f"{name}.jsonl").is_file()]
    if "train" not in files:
        raise DataError(f"{source / 'train.jsonl'} is missing; make process writes it")
    report, unused_globs = StyleReport(str(target)), dict.fromkeys(options.per_source)
    names = (*(f"{name}.jsonl" for name in SPLIT_NAMES), "report.json")
    with OutputFolder(target, names, force=force, command="style") as output:
        for name in files:
            counts = report.splits.setdefault(name, Counter())
            file = output.open(f"{name}.jsonl")
            total = functools.partial(count_part_rows, [FilePart(str(source / f"{name}.jsonl"), "lines")])
            with report_wait(f"Styling {name} rows", unit="rows", count_total=total) as progress:
                for row in read_processed(source / f"{name}.jsonl"):
                    prompt, glob = find_system_prompt(str(row.data.get("source")), options)
                    unused_globs.pop(glob, None)
                    styled_row, outcome = _style_row(row, options, prompt)
                    counts[outcome] += 1
                    file.write(json.dumps(styled_row, ensure_ascii=False) + "\n")
                    progress.add()
        report.unused_globs = tuple(unused_globs)
        output.write_json("report.json", report.as_json())
    return report


def _style_row(row: RawRow, options: StyleConfig, prompt: str) -> tuple[dict[str, Any], str]:
    """Set the row's system prompt; return the new row and one of `_OUTCOMES`."""
    row_format = recognise_format(row.data)
    example = to_example(row, row_format) if row_format is not None else BadRow(row.where, "no known format")
    if isinstance(example, BadRow):
        raise DataError(f"{example}; make process writes it again")
    styled, outcome = set_system_prompt(example, options, prompt)
    if isinstance(styled, Text):
        return row.data, outcome
    return {**row.data, "messages": [author_form(message) for message in styled.messages], STYLED_KEY: True}, outcome
