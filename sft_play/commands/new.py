"""`new`: the run YAML of a model and data, or of another tool's file."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from sft_play.commands.answer import Answer
from sft_play.commands.request import Request, asked_machine
from sft_play.config.load import config_from_text
from sft_play.config.translated import run_yaml, translate
from sft_play.config.yaml_io import Plain, read_text
from sft_play.data.checks import missed_columns
from sft_play.data.infer_dataset import Count, by_characters, first_look
from sft_play.errors import ConfigError, HardwareError, SftPlayError
from sft_play.facts.models.architecture import find_model_folder
from sft_play.files import atomic
from sft_play.launch.machine import go_offline_without_hub
from sft_play.log import one_line, redact
from sft_play.planner.plan_summary import long_cpu_warnings
from sft_play.starting.plan_run import plan_run, load_model_shape
from sft_play.starting.refusals import require_capable_machine

_MODES = ("lora", "qlora")
_SUFFIXES = (".yaml", ".yml")
_Written = tuple[list[str], Mapping[str, Plain], list[str]]  # lines for the file's head, settings, comments below them


def run(request: Request) -> Answer:
    """Write the run YAML, after it has been loaded once, and show it."""
    if request.from_ is None and (request.model is None or request.data is None):
        raise ConfigError(_missing(request))
    out = _out(request)
    if request.data and request.data.startswith("hub:"):
        go_offline_without_hub(request.data)
    head, settings, comments = _translated(request, request.from_) if request.from_ else _fresh(request)
    text = "\n".join([*(f"# {line}" for line in head), run_yaml(settings), *map(redact, comments)]).rstrip() + "\n"
    config = config_from_text(text, name=str(out))  # what is written loads
    with contextlib.suppress(SftPlayError):  # data that are named by a registry, or are not here
        missed = missed_columns(config.data, task_mode=config.task_mode)
        text = "".join(f"# {line}\n" for line in missed) + text
    try:
        atomic.write(out, text)
    except OSError as error:
        raise ConfigError(f"OUT={one_line(str(out))} cannot be written: {error.strerror}") from None
    machine = [f"HARDWARE={request.hardware}"] if request.hardware else []
    following = shlex.join(["make", "plan", f"CONFIG={out}", *machine])
    lines = [*text.rstrip("\n").splitlines(), "", f"Written to {out}", f"Next: {following}"]
    return Answer({"ok": True, "path": str(out), "settings": settings, "next": following}, lines, to_out=False)


def _missing(request: Request) -> str:
    wanted = {"MODEL=owner/name (or a folder)": request.model, "DATA=my.jsonl": request.data}
    missing = " and ".join(example for example, given in wanted.items() if given is None)
    return f"make new needs {missing}; or FROM=their.yaml, a file of axolotl, LLaMA-Factory, TRL or Unsloth"


def _out(request: Request) -> Path:
    out = request.out or Path(_named_after(request))
    if out.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"OUT={one_line(str(out))}: a run YAML's name ends with .yaml: OUT={one_line(str(out))}.yaml")
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{one_line(str(out))} exists, and is not overwritten; OUT=another.yaml names another file")
    if not out.parent.is_dir():
        raise ConfigError(f"OUT={one_line(str(out))}: the folder {one_line(str(out.parent))} does not exist")
    return out


def _named_after(request: Request) -> str:
    given = request.data if request.from_ is None else f"{request.from_.stem}_sft_play"
    assert given is not None
    # of a glob, the folder before it; of a data set of the hub, its name
    whole = re.split(r"[*?\[]", given.removeprefix("hub:"))[0].rstrip("/")
    name = whole.rpartition("/")[2].partition(":")[0]
    stem = re.sub(r"(\.(jsonl?|ndjson|csv|tsv|parquet|pq|arrow|txt|md|gz))+$", "", name, flags=re.IGNORECASE)
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', stem).strip('._-') or 'run'}.yaml"


def _translated(request: Request, file: Path) -> _Written:
    settings: dict[str, Plain] = {"model.name": request.model} if request.model else {}
    look = first_look(request.data) if request.data else None
    if look is not None:
        of_files = re.compile(r"data\.(\w+_path|columns|encoding)")
        settings |= {path: value for path, value in look.settings.items() if of_files.fullmatch(path)}
    text = read_text(file, variable="FROM", wanted="a file of axolotl, LLaMA-Factory, TRL or Unsloth")
    result = translate(text, name=str(file), beside=settings, rows=look.format if look else "")
    head = f"From {one_line(str(file))}, a file of {result.tool.name}; what is not set has this toolkit's defaults"
    comments = ["# Not taken from the other file, or taken in another way:", *result.comments()]
    return [head], result.settings, comments if comments[1:] else []


def _fresh(request: Request) -> _Written:
    assert request.model is not None
    assert request.data is not None
    folder = find_model_folder(request.model)
    base: dict[str, Plain] = {"model.name": request.model}
    asked = config_from_text(run_yaml({**base, "tuning.mode": _MODES[-1]}), name="the run YAML")
    look = first_look(request.data, count=_counting(folder), positions=load_model_shape(asked).max_positions)
    settings = {**base, **look.settings}
    if look.is_chat and folder is not None and not _has_template(folder):
        settings["data.chat_template"] = "chatml"
    mode, why = _mode(request, settings)
    settings["tuning.mode"] = mode
    return [f"{one_line(request.data)}: {look.words}", f"tuning.mode: {why}"], settings, []


def _mode(request: Request, settings: Mapping[str, Plain]) -> tuple[str, str]:
    hardware = asked_machine(request)
    where = request.hardware or "this machine"
    why = f"nothing fits {where}; make plan shows what would"
    for mode in _MODES:
        config = config_from_text(run_yaml({**settings, "tuning.mode": mode}), name="the run YAML")
        try:
            plan = plan_run(config, hardware, include_suggestions=False)
            if plan.fits:
                beside = long_cpu_warnings(plan)
                try:
                    require_capable_machine(config, hardware)
                except HardwareError as error:
                    beside = [f"but a run here would stop: {error}"]
                return mode, ", ".join([f"{mode} fits {where}", *(one_line(one, limit=400) for one in beside)])
        except SftPlayError as error:
            why = f"no plan was made for {where}: {one_line(str(error))}"
    return _MODES[-1], f"{_MODES[-1]}, but {why}"


def _counting(folder: Path | None) -> Count:
    path = folder / "tokenizer.json" if folder is not None else None
    if path is None or not path.is_file():
        return by_characters
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # tokenizers raises plain Exception; loading it again says what is wrong
        tokenizer = Tokenizer.from_file(str(path))
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    return by_characters


def _has_template(folder: Path) -> bool:
    if any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    with contextlib.suppress(OSError):
        settings = (folder / "tokenizer_config.json").read_text(encoding="utf-8", errors="replace")
        return re.search(r'"chat_template":\s*[^n\s]', settings) is not None
    return False
