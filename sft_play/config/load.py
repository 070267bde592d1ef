"""A run YAML and its overrides → `RunConfig`, or every problem at once.

Overrides apply to the plain data before validation, so they go through the same reader as the file.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_play.config.leaves import leaves, sections
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import Document, Path_, Plain, Problem, dotted, parse, parse_value, read_text, show, walk
from sft_play.errors import ConfigError

_SURROGATE = re.compile("[\ud800-\udfff]")
OVERRIDE = "SET"
"""What an override is called where a message says where a value stands."""

RENAMED = {
    "batch_size": "train.batch_size",
    "config": "model.name",
    "cutoff_len": "model.max_seq_len",
    "dataset": "data.train_path",
    "deepspeed": "DEEPSPEED_CONFIG= of `make train-deepspeed`",
    "eval_dataset": "data.val_path",
    "eval_steps": "eval.steps",
    "eval_strategy": "eval.steps (null: each epoch, 0: never)",
    "evaluation_strategy": "eval.steps (null: each epoch, 0: never)",
    "gradient_accumulation_steps": "train.grad_accum",
    "load_in_4bit": "tuning.mode: qlora",
    "lora_alpha": "tuning.lora.alpha",
    "lora_dropout": "tuning.lora.dropout",
    "lora_r": "tuning.lora.r",
    "lora_rank": "tuning.lora.r",
    "lora_target": "tuning.lora.target_modules",
    "lr": "train.learning_rate",
    "max_length": "model.max_seq_len",
    "max_seq_length": "model.max_seq_len",
    "micro_batch_size": "train.batch_size",
    "model_name_or_path": "model.name",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "output_dir": "output.dir",
    "per_device_eval_batch_size": "eval.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "quantization": "tuning.mode: qlora",
    "run_name": "output.name",
    "sequence_len": "model.max_seq_len",
    "train_dataset": "data.train_path",
    "warmup_ratio": "train.warmup_steps (below 1 it is a share)",
}
"""What people know an option as from other tools, and what it is here."""


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config with the text it came from: `text` as given, `overrides` as `key=value` words."""

    config: RunConfig
    path: Path
    text: str
    overrides: tuple[str, ...]


def load_config(path: Path | str, *, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The run that a YAML file and `key=value` overrides ask for.

    Raises:
        ConfigError: with every problem, each with its place, path, value, and what to do.
    """
    path = Path(path)
    text = read_text(path)
    config = config_from_text(text, name=str(path), overrides=overrides)
    return LoadedConfig(config=config, path=path, text=text, overrides=tuple(overrides))


def config_from_text(text: str, *, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML text and overrides ask for; raises like `load_config`."""
    document = parse(text, name=name)
    problems = [*document.problems, *apply_overrides(document, overrides)]
    config, found = _validate(document)
    problems += found
    if config is not None and not problems:
        problems += cross_problems(config, document)
    if problems or config is None:
        raise ConfigError(_report(sorted(problems, key=_line_of)))
    return config


def _line_of(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 1_000_000


def _report(problems: list[Problem]) -> str:
    lines = list(dict.fromkeys(map(str, problems)))
    return lines[0] if len(lines) == 1 else f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)


def split_overrides(text: str) -> list[str]:
    """`SET` split as a shell would split words, without running anything.

    A bracket that a word opens holds the following words too, so that a list whose quotes were eaten
    (`model.mesh_shape=[[4, 1], [fsdp, tp]]`) reads as meant.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{OVERRIDE}={show(text)}: {str(error).lower()}; close the quote") from None
    joined: list[str] = []
    for word in words:
        if joined and _open_brackets(joined[-1]) > 0:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _open_brackets(word: str) -> int:
    value = word.partition("=")[2]
    if not value.startswith(("[", "{")):
        return 0
    return sum(value.count(mark) for mark in "[{") - sum(value.count(mark) for mark in "]}")


def apply_overrides(document: Document, overrides: Iterable[str]) -> list[Problem]:
    """Put each `a.b=value` into the document's data; what cannot be put is returned as problems."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            found = show(override)
            problems.append(Problem("", OVERRIDE, f"{found} is not key=value, such as train.epochs=1"))
            continue
        try:
            value = parse_value(text, name=f"{OVERRIDE} {key}")
        except ConfigError as error:
            problems.append(Problem("", "", f"{error}; put the value in quotes to mean it as text"))
            continue
        problems += _put(document, tuple(key.split(".")), value, text)
    return problems


def _put(document: Document, path: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    where: dict[str, Plain] = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = where.setdefault(part, {})
        if inner is None:
            inner = where[part] = {}
        if not isinstance(inner, dict):
            holder = ".".join(path[:depth])
            return [Problem(".".join(path), OVERRIDE, f"{holder} is {show(inner)}, not a section")]
        where = inner
    where[path[-1]] = value
    for old in [known for known in document.lines if known[: len(path)] == path]:
        del document.lines[old]
    for old in [known for known in document.raw if known[: len(path)] == path]:
        del document.raw[old]
    document.raw[path] = text
    document.overridden.add(path)
    return []


def _validate(document: Document) -> tuple[RunConfig | None, list[Problem]]:
    unknown = list(_unknown_keys(document))
    blocked = {path for path, _ in unknown} | set(_misplaced(document))
    problems = [problem for _, problem in unknown] + list(_misplaced(document).values())
    broken = [path for path, value in walk(document.data) if isinstance(value, str) and _SURROGATE.search(value)]
    problems += [
        Problem(dotted(path), place(document, path), "half of a surrogate pair in the text") for path in broken
    ]
    if broken:
        return None, problems
    pruned = _without(document.data, blocked)
    assert isinstance(pruned, dict)
    try:
        return RunConfig.model_validate_json(json.dumps(pruned)), problems
    except ValidationError as error:
        return None, problems + list(_leaf_problems(error, document, blocked))


def _without(data: Plain, blocked: set[Path_], path: Path_ = ()) -> Plain:
    """The data without what was already reported, and without sections left empty by `key:`."""
    if not isinstance(data, dict):
        return data
    result = {}
    for key, value in data.items():
        inner = (*path, key)
        if inner in blocked or (value is None and dotted(inner) in sections()):
            continue
        result[key] = _without(value, blocked, inner)
    return result


def _misplaced(document: Document) -> dict[Path_, Problem]:
    """Sections that hold a value instead of keys."""
    found = {}
    for name, section in sections().items():
        if not name:
            continue
        path: Path_ = tuple(name.split("."))
        value = _at(document.data, path)
        if value is None or isinstance(value, dict):
            continue
        first = next(iter(section.model_fields))
        shown = show(value, raw=document.raw.get(path))
        found[path] = Problem(
            name,
            place(document, path),
            f"expected a section, found {shown}; write {name}: {{{first}: {shown if first == 'name' else '…'}}} "
            f"(its keys: {', '.join(section.model_fields)})",
        )
    return found


def _at(data: Plain, path: Path_) -> Plain:
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return None
        data = data[str(part)]
    return data


def place(document: Document, path: Path_) -> str:
    """Where a value stands: `SET` for an override, else `file:line`."""
    for set_path in document.overridden:
        if path[: len(set_path)] == set_path or (set_path[: len(path)] == path and path not in document.lines):
            return OVERRIDE
    return document.where(path)


def _unknown_keys(document: Document) -> Iterator[tuple[Path_, Problem]]:
    for name, section in sections().items():
        holder = _at(document.data, tuple(name.split(".")) if name else ())
        if not isinstance(holder, dict):
            continue
        for key in holder:
            if key not in section.model_fields:
                path: Path_ = (*(name.split(".") if name else ()), key)
                shown = show(holder[key], raw=document.raw.get(path))
                message = f"unknown key (value {shown}){_suggestion(name, key)}"
                yield path, Problem(dotted(path), place(document, path), message)


def _suggestion(section: str, key: str) -> str:
    """The nearest known key, here or elsewhere; the section's keys where nothing is near."""
    if key in RENAMED:
        return f"; here it is {RENAMED[key]}"
    known = list(leaves()) + [name for name in sections() if name]
    for path in known:
        if path.rpartition(".")[2] == key:
            return f"; it belongs at {path}"
    here = list(sections()[section].model_fields)
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.7)
    if near:
        return f"; did you mean {f'{section}.' if section else ''}{near[0]}?"
    by_name = {path.rpartition(".")[2]: path for path in known}
    near = difflib.get_close_matches(key, [*by_name, *RENAMED], n=1, cutoff=0.7)
    if near:
        return f"; did you mean {by_name.get(near[0], RENAMED.get(near[0], near[0]))}?"
    return f"; {section or 'the root'} takes {', '.join(here)}"


def _leaf_problems(error: ValidationError, document: Document, blocked: set[Path_]) -> Iterator[Problem]:
    seen = set()
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        name = _leaf_of(location)
        path: Path_ = tuple(name.split("."))
        if name in seen or any(path[: len(stop)] == stop for stop in blocked):
            continue
        seen.add(name)
        yield Problem(name, place(document, path), _leaf_message(name, document, path, item["type"] == "missing"))


def _leaf_of(location: list[str]) -> str:
    """The longest part of pydantic's location that is a leaf (it goes on with the names of union members)."""
    for length in range(len(location), 0, -1):
        name = ".".join(location[:length])
        if name in leaves() or name in sections():
            return name
    return ".".join(location)


def _leaf_message(name: str, document: Document, path: Path_, missing: bool) -> str:
    if name not in leaves():
        return f"missing; a run YAML needs {name}.name" if name == "model" else "missing"
    leaf = leaves()[name]
    if missing:
        return f"missing; {leaf.doc}"
    value = _at(document.data, path)
    raw = document.raw.get(path)
    hint = _hint(value, raw, leaf.expects)
    return f"expected {leaf.expects}, found {show(value, raw=raw if not isinstance(value, str) else None)}{hint}"


def _hint(value: Plain, raw: str | None, expected: str) -> str:
    if isinstance(value, str):
        word = value.lower()
        if "true or false" in expected and word in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if word in ('yes', 'on', 'y') else 'false'}"
        if expected.startswith("a list of") and value in expected:
            return f"; write [{value}]"
        if "number" in expected and value.lstrip("+-").isdigit() and value.lstrip("+-").startswith("0"):
            return "; a number has no leading zero"
        if "number" in expected and value.replace("_", "").replace(",", "").isdigit():
            return "; write the number without separators"
        near = difflib.get_close_matches(value, expected.replace(",", " ").split(), n=1, cutoff=0.6)
        return f"; did you mean {near[0]}?" if near else ""
    if isinstance(value, (bool, int, float)) and "text" in expected and "list" not in expected:
        return f'; put it in quotes: "{raw if raw is not None else value}"'
    if value is None and "null" not in expected:
        return "; give a value or remove the key"
    return ""


def cross_problems(config: RunConfig, document: Document) -> list[Problem]:
    """What is right key by key but not together; each names the keys that disagree."""
    train, found = config.train, []

    def add(name: str, message: str) -> None:
        path: Path_ = tuple(name.split("."))
        found.append(Problem(name, place(document, path), message))

    if train.fp16 and train.bf16 is True:
        add("train.fp16", "true, and train.bf16 is true as well; choose one")
    if config.task_mode == "cpt_mixed" and config.data.text_path is None:
        add("task_mode", "cpt_mixed needs data.text_path (plain text) beside data.train_path (chats)")
    if config.task_mode != "cpt_mixed" and config.data.text_path is not None:
        add("data.text_path", f"is read by task_mode: cpt_mixed only, and task_mode is {config.task_mode}")
    if train.load_best_model_at_end and config.eval.steps == 0:
        add("train.load_best_model_at_end", "true, but eval.steps=0 never evaluates; set eval.steps")
    if train.early_stopping_patience is not None and not train.load_best_model_at_end:
        add("train.early_stopping_patience", "needs train.load_best_model_at_end: true")
    if train.metric_for_best_model == "exact_match" and config.eval.generate_rows == 0:
        add("train.metric_for_best_model", "exact_match needs eval.generate_rows above 0")
    if train.optim == "adafactor" and train.adam_beta2 != type(train).model_fields["adam_beta2"].default:
        add("train.adam_beta2", f"{train.adam_beta2:g} is AdamW's, and train.optim is adafactor; remove one of them")
    if config.tuning.backend_fallback == config.tuning.backend:
        add("tuning.backend_fallback", f"is the backend itself ({config.tuning.backend}); remove it")
    return found


def resolved(config: RunConfig, *, effective_batch: int | None = None) -> dict[str, Any]:
    """The config as plain data, defaults included: what `resolved.json` holds.

    Args:
        effective_batch: what the plan made of the batch. Where the config leaves it to the ranks it stands in place of
            a default that nobody asked for, so that the file trains the same over any number of ranks, or is refused.
    """
    data = config.model_dump(mode="json")
    if config.train.effective_follows:
        data["train"]["effective_batch_size"] = effective_batch
    return data


def differing_keys(one: dict[str, Any], other: dict[str, Any], *, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves at which two resolved configs differ: {path: (one's value, other's value)}."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*one, *(key for key in other if key not in one)]:
        left, right = one.get(key), other.get(key)
        path = f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict) and path in sections():
            found |= differing_keys(left, right, prefix=f"{path}.")
        elif left != right:
            found[path] = (left, right)
    return found
