"""`make style`: the system prompt of processed conversations set, prepended or replaced, by the file they came from."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig, StyleConfig
from sft_play.data.build.stats import rows_text
from sft_play.data.process import SPLITS, read_processed
from sft_play.data.sources.examples import rows_of
from sft_play.data.sources.files import Part
from sft_play.data.written import OutputFolder
from sft_play.errors import ConfigError, DataError
from sft_play.log import one_line
from sft_play.process.waiting import waiting

_DONE = ("set", "prepended", "replaced", "left", "text")
_PLACE = re.compile(r"(?::\d+){1,2}$|:row \d+$")
"""What follows a file's name in a row's source: its line, or row."""


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
    options = config.data.style
    prompt = options.system if text is None else text
    if (prompt is None or not prompt.strip()) and not options.per_source:
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
    styler, report = _Styler(options, prompt), StyleReport(str(target))
    names = (*(f"{name}.jsonl" for name in SPLITS), "report.json")
    with OutputFolder(target, names, force=force, command="style") as out:
        for name in files:
            counts = report.splits.setdefault(name, Counter())
            file = out.open(f"{name}.jsonl")
            total = functools.partial(rows_of, [Part(str(source / f"{name}.jsonl"), "lines")])
            with waiting(f"Styling {name} rows", unit="rows", total=total) as news:
                for row in read_processed(source / f"{name}.jsonl"):
                    styled, done = styler(row)
                    counts[done] += 1
                    file.write(json.dumps(styled, ensure_ascii=False) + "\n")
                    news.add()
        report.unused_globs = tuple(styler.unused)
        out.write_json("report.json", report.as_json())
    return report


class _Styler:
    def __init__(self, options: StyleConfig, prompt: str | None) -> None:
        self._options, self._prompt = options, prompt
        self.unused = dict.fromkeys(options.per_source)

    def __call__(self, row: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The row as it is to be, and what was done: one of `_DONE`."""
        messages = row.get("messages")
        if messages is None:
            return row, "text"
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise DataError(f"a processed row has no list of messages (id {one_line(str(row.get('id')))})")
        prompt, first = self._prompt_of(row), messages[0]
        if prompt is None or not prompt.strip():
            return row, "left"
        if first.get("role") not in ("system", "developer"):  # processed rows keep their authors' names of roles
            return {**row, "messages": [{"role": "system", "content": prompt}, *messages]}, "set"
        present, how = first.get("content"), self._options.how
        # content in parts is its author's own form, which a prompt of ours would not fit into
        if how == "keep" or not isinstance(present, str):
            return row, "left"
        is_before = how == "prepend" and bool(present.strip())
        content = f"{prompt}\n\n{present}" if is_before else prompt
        styled = {**row, "messages": [{**first, "content": content}, *messages[1:]]}
        return styled, "prepended" if is_before else "replaced"

    def _prompt_of(self, row: dict[str, Any]) -> str | None:
        source = row.get("source")
        if isinstance(source, str):
            file = _PLACE.sub("", source)
            for glob, prompt in self._options.per_source.items():
                if any(fnmatchcase(name, glob) for name in (source, file, file.rpartition("/")[2])):
                    self.unused.pop(glob, None)
                    return prompt
        return self._prompt
