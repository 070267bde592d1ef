"""`make style`: the system prompt of processed conversations set, prepended or replaced, by the file they came from."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig, StyleConfig
from sft_play.data.build.stats import rows_text
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.process import SPLITS, read_processed
from sft_play.data.sources.examples import find_system_prompt, count_part_rows, set_system_prompt
from sft_play.data.sources.files import FilePart
from sft_play.data.sources.formats import STYLED_KEY, Text, recognise_format, to_example
from sft_play.data.sources.messages import author_form
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import ConfigError, DataError
from sft_play.log import one_line
from sft_play.process.waiting import report_wait

_DONE = ("set", "prepended", "replaced", "left", "text")


@dataclass
class StyleReport:
    """What became of the system prompts: counts by split of set, prepended, replaced, left, and rows of text."""

    out_dir: str
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    unused_globs: tuple[str, ...] = ()
    ok: bool = True

    @property
    def total(self) -> Counter[str]:
        """The counts of all splits."""
        return sum(self.splits.values(), Counter())

    def lines(self) -> list[str]:
        """The report in words."""
        lines = [f"Styled {rows_text(self.total.total())} into {self.out_dir}: {_words(self.total)}"]
        lines += [f"  {name}: {rows_text(counts.total())}, {_words(counts)}" for name, counts in self.splits.items()]
        return [*lines, *(f"data.style.per_source: no row's source matches {one_line(g)}" for g in self.unused_globs)]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which report.json holds."""
        splits = {name: {done: counts[done] for done in _DONE} for name, counts in self.splits.items()}
        total = {done: self.total[done] for done in _DONE}
        return {"ok": self.ok, "out_dir": self.out_dir, **total, "splits": splits, "unused_globs": [*self.unused_globs]}


def _words(counts: Counter[str]) -> str:
    parts = [f"{counts[done]:,} {done}" for done in _DONE[:-1] if counts[done]]
    parts += [f"{counts['text']:,} rows of plain text untouched"] if counts["text"] else []
    return ", ".join(parts) or "none"


def style(config: RunConfig, text: str | None, *, force: bool = False) -> StyleReport:
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
    files = [name for name in SPLITS if (source / f"{name}.jsonl").is_file()]
    if "train" not in files:
        raise DataError(f"{source / 'train.jsonl'} is missing; make process writes it")
    report, unused = StyleReport(str(target)), dict.fromkeys(options.per_source)
    names = (*(f"{name}.jsonl" for name in SPLITS), "report.json")
    with OutputFolder(target, names, force=force, command="style") as out:
        for name in files:
            counts = report.splits.setdefault(name, Counter())
            file = out.open(f"{name}.jsonl")
            total = functools.partial(count_part_rows, [FilePart(str(source / f"{name}.jsonl"), "lines")])
            with report_wait(f"Styling {name} rows", unit="rows", count_total=total) as news:
                for row in read_processed(source / f"{name}.jsonl"):
                    prompt, glob = find_system_prompt(str(row.data.get("source")), options)
                    unused.pop(glob, None)
                    styled, done = _styled(row, options, prompt)
                    counts[done] += 1
                    file.write(json.dumps(styled, ensure_ascii=False) + "\n")
                    news.add()
        report.unused_globs = tuple(unused)
        out.write_json("report.json", report.as_json())
    return report


def _styled(row: RawRow, options: StyleConfig, prompt: str) -> tuple[dict[str, Any], str]:
    """The row as it is to be, and what was done: one of `_DONE`."""
    shape = recognise_format(row.data)
    example = to_example(row, shape) if shape is not None else BadRow(row.where, "no known format")
    if isinstance(example, BadRow):
        raise DataError(f"{example}; make process writes it again")
    styled, done = set_system_prompt(example, options, prompt)
    if isinstance(styled, Text):
        return row.data, done
    return {**row.data, "messages": [author_form(message) for message in styled.messages], STYLED_KEY: True}, done
