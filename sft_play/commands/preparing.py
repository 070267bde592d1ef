"""`process`, `style` and `dapt-docx`: files to conversations, conversations with a system prompt, documents to text;
and `full-pipeline`: these, render and check, each on what the one before wrote."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.commands.answer import Answer, Result, answer_of
from sft_play.commands.diagnosing import check
from sft_play.commands.machine import asked_machine
from sft_play.commands.render import render
from sft_play.commands.request import Request
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import DataConfig
from sft_play.diagnose.pages import CheckReport
from sft_play.errors import SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding, passed, warned
from sft_play.log import escape_control, one_line

HELP = {
    "process": "raw files to checked conversations in train, val and test, with a report of every row left out",
    "style": "give processed conversations a system prompt (STYLE=), into data/processed_with_style",
    "dapt-docx": "documents (.docx, .pdf, .pptx, .xlsx, .epub, .html, .md, .txt) to clean text for task_mode cpt",
    "full-pipeline": "process, style where asked, render and check",
}


def run(request: Request) -> Answer:
    """Write the files, and answer with the counts of what was kept and left out; of a pipeline up to the first step
    that fails."""
    if request.command == "full-pipeline":
        hardware = asked_machine(request)
        done = full_pipeline(request.config, request.overrides, hardware, style=request.style, force=request.force)
        answer = answer_of(done)
        return answer if request.why else dataclasses.replace(answer, lines=["\n".join(done.screen())])
    config = load_config(request.config, overrides=request.overrides).config
    if request.command == "process":
        from sft_play.data.process import process

        return _and_next(answer_of(process(config, force=request.force)), request, config.data)
    if request.command == "style":
        from sft_play.data.style import style

        return _and_next(answer_of(style(config, request.style, force=request.force)), request, config.data)
    from sft_play.documents.documents import documents

    return answer_of(documents(config, force=request.force))


def _and_next(answer: Answer, request: Request, data: DataConfig) -> Answer:
    """The answer with the next command, which reads what was just written, whatever the config trains on."""
    folder = Path(data.process.out_dir if request.command == "process" else data.style.out_dir)
    reads = _which_files(data, folder)
    lines, settings = [], [*request.overrides]
    if reads.verdict != "PASS":
        lines = [f"Not read yet: {reads.found.partition('; ')[0]}, not {folder / 'train.jsonl'}"]
        settings += _reading(folder, data)
    config = [f"CONFIG={request.config}"] if request.config_given else []
    following = shlex.join(["make", "check", *config, *([f"SET={shlex.join(settings)}"] if settings else [])])
    return dataclasses.replace(answer, lines=[*answer.lines, *lines, f"Next: {following}"])


def _reading(folder: Path, data: DataConfig) -> list[str]:
    """The settings with which a run reads the splits in a folder."""
    settings = ["data.sources=[]"] if data.sources else []
    settings.append(f"data.train_path={_plain(folder / 'train.jsonl')}")
    for split in ("val", "test"):
        path = folder.expanduser() / f"{split}.jsonl"
        has_rows = path.is_file() and path.stat().st_size > 0
        settings.append(f"data.{split}_path={_plain(folder / path.name) if has_rows else 'null'}")
    return settings


def _plain(path: Path) -> str:
    """A path as a value of YAML, in quotes where it needs them."""
    return str(path) if re.fullmatch(r"[\w./~-]+", str(path)) else json.dumps(str(path))


@dataclass(frozen=True)
class Pipeline:
    """The steps of `make full-pipeline` that have run, with their answers; `stopped` is the step that failed, and
    why."""

    steps: tuple[tuple[str, Result], ...]
    stopped: tuple[str, str] | None = None

    @property
    def ok(self) -> bool:
        """Whether every step succeeded."""
        return self.stopped is None and all(answer.ok for _, answer in self.steps)

    def lines(self) -> list[str]:
        """The steps one after the other."""
        return self._pages([answer.lines() for _, answer in self.steps])

    def screen(self) -> list[str]:
        """The same, of a check only what a person has to read."""
        return self._pages(
            [answer.screen() if isinstance(answer, CheckReport) else answer.lines() for _, answer in self.steps]
        )

    def _pages(self, pages: Sequence[Sequence[str]]) -> list[str]:
        lines = []
        for (name, _), page in zip(self.steps, pages, strict=True):
            lines += [f"== {name} ==", *page]
        if self.stopped is not None:
            name, why = self.stopped
            lines += [f"== {name} ==", escape_control(why), f"Stopped at {name}; what was written before it is kept"]
        return lines

    def as_json(self) -> dict[str, Any]:
        """`ok`, the steps, and the one that failed."""
        steps = [{"name": name, "ok": answer.ok, "answer": answer.as_json()} for name, answer in self.steps]
        stopped = None if self.stopped is None else {"name": self.stopped[0], "why": self.stopped[1]}
        return {"ok": self.ok, "steps": steps, "stopped": stopped}


def full_pipeline(
    config_path: Path, overrides: Sequence[str], hardware: Hardware, *, style: str | None, force: bool
) -> Pipeline:
    """process, style where it is asked for, render and check, each on what the one before wrote.

    Raises:
        ConfigError: the run YAML cannot be read; no step has run.
    """
    loaded = load_config(config_path, overrides=overrides)
    steps: list[tuple[str, Result]] = []
    name = "process"
    try:
        for name, make in _steps(loaded, hardware, style=style, force=force):
            answer = make()
            steps.append((name, answer))
            if not answer.ok:
                break
    except SftPlayError as error:
        return Pipeline(tuple(steps), (name, str(error)))
    return Pipeline(tuple(steps))


def _steps(
    loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool
) -> Iterator[tuple[str, Callable[[], Result]]]:
    """The steps in order, each a function without arguments; one is built when those before it are done."""
    from sft_play.data.process import process

    config = loaded.config
    yield "process", lambda: process(config, force=force)
    folder = Path(config.data.process.out_dir)
    wanted = config.data.style
    if style is not None or wanted.system is not None or wanted.per_source:
        from sft_play.data.style import style as restyle

        yield "style", lambda: restyle(config, style, force=force)
        folder = Path(wanted.out_dir)
    overrides = [*loaded.overrides, *_reading(folder, config.data)]  # what was just written
    yield "render", lambda: render(load_config(loaded.path, overrides=overrides), out=None, force=force)
    yield "check", lambda: check(loaded.path, overrides, hardware, also=[_which_files(config.data, folder)])


def _which_files(data: DataConfig, folder: Path) -> Finding:
    written, trained = folder / "train.jsonl", data.train_path
    if trained is not None and Path(trained).expanduser().absolute() == written.expanduser().absolute():
        return passed("training files", f"data.train_path={written}, which was written just now")
    sources = f"data.sources: {', '.join(data.source_names)}"
    return warned(
        "training files",
        f"make train with this config reads {sources if trained is None else f'data.train_path={one_line(trained)}'}; "
        f"checked below is {written}, which was written just now",
        f"to train on it: data.train_path={written}, with val_path and test_path beside it",
    )
