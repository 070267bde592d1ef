"""`process`, `style` and `dapt-docx`: files to conversations, conversations with a system prompt, documents to text;
and `full-pipeline`: these, render and check, each on what the one before wrote."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.diagnosing import check, on_screen
from sft_play.commands.request import Request, asked_machine, make_words
from sft_play.commands.rows import render
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding, passed, warned
from sft_play.log import escape_control, one_line


def run(request: Request) -> Answer:
    """Write the files, and answer with the counts of what was kept and left out; of a pipeline up to the first step
    that fails."""
    loaded = load_config(request.config, overrides=request.overrides)
    config = loaded.config
    if request.command == "full-pipeline":
        machine = asked_machine(request)
        return full_pipeline(loaded, machine, style=request.style, force=request.force, why=request.why)
    if request.command == "process":
        from sft_play.data.process import process

        return _and_next(answer_of(process(config, force=request.force)), request, config)
    if request.command == "style":
        from sft_play.data.style import style

        return _and_next(answer_of(style(config, request.style, force=request.force)), request, config)
    from sft_play.documents.documents import documents

    return _and_next(answer_of(documents(config, force=request.force)), request, config)


def _and_next(answer: Answer, request: Request, config: RunConfig) -> Answer:
    """The answer with the next command, which reads what was just written, whatever the config trains on."""
    data = config.data
    written = {"process": data.process.out_dir, "style": data.style.out_dir, "dapt-docx": data.documents.out_dir}
    folder = Path(written[request.command])
    reads = _which_files(data, folder)
    lines, settings = [], [*request.overrides]
    if request.command == "dapt-docx" and config.task_mode == "cpt_mixed":
        settings.append(f"data.text_path={_plain(folder / 'train.jsonl')}")
    elif reads.verdict != "PASS":
        lines = [f"Not read yet: {reads.found.partition('; ')[0]}, not {folder / 'train.jsonl'}"]
        settings += ["task_mode=cpt"] if request.command == "dapt-docx" else []
        settings += _reading(folder, data)
    following = shlex.join(make_words(request, "check", settings))
    return dataclasses.replace(answer, lines=[*answer.lines, *lines, f"Next: {following}"])


def _reading(folder: Path, data: DataConfig) -> list[str]:
    settings = ["data.sources=[]"] if data.sources else []
    settings.append(f"data.train_path={_plain(folder / 'train.jsonl')}")
    for split in ("val", "test"):
        path = folder.expanduser() / f"{split}.jsonl"
        has_rows = path.is_file() and path.stat().st_size > 0
        settings.append(f"data.{split}_path={_plain(folder / path.name) if has_rows else 'null'}")
    return settings


def _plain(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./~-]+", str(path)) else json.dumps(str(path))


def full_pipeline(
    loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool, why: bool = False
) -> Answer:
    """process, style where it is asked for, render and check, each on what the one before wrote, up to the first that
    fails; `why`: the whole page of the check."""
    steps, lines = [], []
    stopped, name = None, "process"
    try:
        for name, make in _steps(loaded, hardware, style=style, force=force, why=why):
            answer = make()
            steps.append({"name": name, "ok": answer.exit_code == 0, "answer": answer.data})
            lines += [f"== {name} ==", *answer.lines]
            if answer.exit_code:
                break
    except SftPlayError as error:
        stopped = {"name": name, "why": str(error)}
        lines += [f"== {name} ==", escape_control(str(error)), f"Stopped at {name}; what was written before it is kept"]
    ok = stopped is None and all(step["ok"] for step in steps)
    data = {"ok": ok, "steps": steps, "stopped": stopped}
    return Answer(data, ["\n".join(lines)], 0 if ok else ConfigError.exit_code)


def _steps(
    loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool, why: bool
) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """The steps in order, each a function without arguments; one is built when those before it are done."""
    from sft_play.data.process import process

    config = loaded.config
    yield "process", lambda: answer_of(process(config, force=force))
    folder = Path(config.data.process.out_dir)
    wanted = config.data.style
    if style is not None or wanted.system is not None or wanted.per_source:
        from sft_play.data.style import style as restyle

        yield "style", lambda: answer_of(restyle(config, style, force=force))
        folder = Path(wanted.out_dir)
    overrides = [*loaded.overrides, *_reading(folder, config.data)]  # what was just written
    yield "render", lambda: render(load_config(loaded.path, overrides=overrides), out=None, force=force)
    also = [_which_files(config.data, folder)]
    yield "check", lambda: on_screen(check(loaded.path, overrides, hardware, also=also), why=why)


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
