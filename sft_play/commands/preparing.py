"""`process`, `style` and `dapt-docx`: files to conversations, conversations with a system prompt, documents to text;
and `full-pipeline`: these, render and check, each on what the one before wrote."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from sft_play.commands.answer import CommandResult, command_result
from sft_play.commands.diagnosing import check_result, check_run
from sft_play.commands.lookups import requested_hardware
from sft_play.commands.request import Request, make_argv
from sft_play.commands.rows import render
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.findings import Finding, pass_finding, warn_finding
from sft_play.log import escape_control, one_line
from sft_play.machine.hardware import Hardware


def run_preparing(request: Request) -> CommandResult:
    """Write the files, and answer with the counts of what was kept and left out; of a pipeline up to the first step
    that fails."""
    loaded = load_config(request.config, overrides=request.overrides)
    config = loaded.config
    if request.command == "full-pipeline":
        machine = requested_hardware(request)
        return full_pipeline(loaded, machine, style=request.style, force=request.force, is_full=request.why)
    if request.command == "process":
        from sft_play.data.process import process_files

        return _add_next_command(command_result(process_files(config, force=request.force)), request, config)
    if request.command == "style":
        from sft_play.data.process import style_rows

        return _add_next_command(
            command_result(style_rows(config, request.style, force=request.force)), request, config
        )
    from sft_play.documents import convert_documents

    return _add_next_command(command_result(convert_documents(config, force=request.force)), request, config)


def _add_next_command(result: CommandResult, request: Request, config: RunConfig) -> CommandResult:
    """The answer with the next command, which reads what was just written, whatever the config trains on."""
    data = config.data
    out_dirs = {"process": data.process.out_dir, "style": data.style.out_dir, "dapt-docx": data.documents.out_dir}
    folder = Path(out_dirs[request.command])
    finding = _training_files_finding(data, folder)
    lines, settings = [], [*request.overrides]
    if request.command == "dapt-docx" and config.task_mode == "cpt_mixed":
        settings.append(f"data.text_path={_quote_path(folder / 'train.jsonl')}")
    elif finding.verdict != "PASS":
        lines = [f"Not read yet: {finding.found.partition('; ')[0]}, not {folder / 'train.jsonl'}"]
        settings += ["task_mode=cpt"] if request.command == "dapt-docx" else []
        settings += _file_settings(folder, data)
    next_command = shlex.join(make_argv(request, "check", settings))
    return dataclasses.replace(result, lines=[*result.lines, *lines, f"Next: {next_command}"])


def _file_settings(folder: Path, data: DataConfig) -> list[str]:
    settings = ["data.sources=[]"] if data.sources else []
    settings.append(f"data.train_path={_quote_path(folder / 'train.jsonl')}")
    for split in ("val", "test"):
        path = folder.expanduser() / f"{split}.jsonl"
        has_rows = path.is_file() and path.stat().st_size > 0
        settings.append(f"data.{split}_path={_quote_path(folder / path.name) if has_rows else 'null'}")
    return settings


def _quote_path(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./~-]+", str(path)) else json.dumps(str(path))


def full_pipeline(
    loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool, is_full: bool = False
) -> CommandResult:
    """process, style where it is asked for, render and check, each on what the one before wrote, up to the first that
    fails; `is_full`: the whole page of the check."""
    steps, lines = [], []
    stop_details, name = None, "process"
    try:
        for name, run_step in _pipeline_steps(loaded, hardware, style=style, force=force, is_full=is_full):
            result = run_step()
            steps.append({"name": name, "ok": result.exit_code == 0, "answer": result.data})
            lines += [f"== {name} ==", *result.lines]
            if result.exit_code:
                break
    except SftPlayError as error:
        stop_details = {"name": name, "why": str(error)}
        lines += [f"== {name} ==", escape_control(str(error)), f"Stopped at {name}; what was written before it is kept"]
    ok = stop_details is None and all(step["ok"] for step in steps)
    data = {"ok": ok, "steps": steps, "stopped": stop_details}
    return CommandResult(data, ["\n".join(lines)], 0 if ok else ConfigError.exit_code)


def _pipeline_steps(
    loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool, is_full: bool
) -> Iterator[tuple[str, Callable[[], CommandResult]]]:
    """The steps in order, each a function without arguments; one is built when those before it are done."""
    from sft_play.data.process import process_files

    config = loaded.config
    yield "process", lambda: command_result(process_files(config, force=force))
    folder = Path(config.data.process.out_dir)
    style_config = config.data.style
    if style is not None or style_config.system is not None or style_config.per_source:
        from sft_play.data.process import style_rows

        yield "style", lambda: command_result(style_rows(config, style, force=force))
        folder = Path(style_config.out_dir)
    overrides = [*loaded.overrides, *_file_settings(folder, config.data)]  # what was just written
    yield "render", lambda: render(load_config(loaded.path, overrides=overrides), out=None, force=force)
    earlier_findings = [_training_files_finding(config.data, folder)]
    yield (
        "check",
        lambda: check_result(
            check_run(loaded.path, overrides, hardware, earlier_findings=earlier_findings), is_full=is_full
        ),
    )


def _training_files_finding(data: DataConfig, folder: Path) -> Finding:
    written_file, configured_path = folder / "train.jsonl", data.train_path
    if (
        configured_path is not None
        and Path(configured_path).expanduser().absolute() == written_file.expanduser().absolute()
    ):
        return pass_finding("training files", f"data.train_path={written_file}, which was written just now")
    sources = f"data.sources: {', '.join(data.source_names)}"
    return warn_finding(
        "training files",
        f"make train with this config reads "
        f"{sources if configured_path is None else f'data.train_path={one_line(configured_path)}'}; "
        f"checked below is {written_file}, which was written just now",
        f"to train on it: data.train_path={written_file}, with val_path and test_path beside it",
    )
