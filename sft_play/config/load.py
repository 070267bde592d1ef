"""A run YAML and its overrides → `RunConfig`, or every problem at once.

Overrides apply to the plain data before validation, so they go through the same reader as the file. A stage of a
`curriculum` is a complete run YAML, the run's with the stage's keys in place of the run's, and is validated like any
other: its errors look the same, with the stage's line numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.adapter import put_adapter
from sft_play.config.options import leaves, sections
from sft_play.config.schema import RunConfig, Section
from sft_play.config.validation import cross_problems, validate
from sft_play.config.yaml_io import (
    OVERRIDE,
    TYPOGRAPHIC,
    Path_,
    Plain,
    Problem,
    YamlDocument,
    dotted,
    parse,
    parse_value,
    read_text,
    show,
    value_at,
)
from sft_play.errors import ConfigError


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config with the text it came from: `text` as given, `overrides` as `key=value` words."""

    config: RunConfig
    path: Path
    text: str
    overrides: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    """The stages of its curriculum; empty without one."""
    stage: str | None = None
    """The name of the stage, where this is the run of one stage."""

    @property
    def longest(self) -> RunConfig:
        """The settings of the stage with the longest rows, or of the run where it has no stages."""
        configs = [stage.config for stage in self.stages] or [self.config]
        return max(configs, key=lambda config: config.model.max_seq_len)

    @property
    def parts(self) -> list[LoadedConfig]:
        """What is trained, in order: the run of each stage, or the run itself."""
        return [self.of(stage) for stage in self.stages] or [self]

    def of(self, stage: Stage) -> LoadedConfig:
        """The run of a single stage."""
        return dataclasses.replace(self, config=stage.config, stages=(), stage=stage.name)


def load_config(path: Path | str, *, overrides: Sequence[str] = (), with_adapter: bool = True) -> LoadedConfig:
    """The run that a YAML file and `key=value` overrides describe. `with_adapter`: take the settings of
    `model.adapter`, which may be gone. Raises ConfigError with every problem and what to do."""
    path = Path(path)
    text = read_text(path)
    config, stages = _from_text(text, name=str(path), overrides=overrides, with_adapter=with_adapter)
    return LoadedConfig(config=config, path=path, text=text, overrides=tuple(overrides), stages=stages)


def config_from_text(text: str, *, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML text and overrides describe; raises like `load_config`. `model.adapter` is not looked for."""
    return _from_text(text, name=name, overrides=overrides, with_adapter=False)[0]


def _from_text(
    text: str, *, name: str, overrides: Sequence[str], with_adapter: bool
) -> tuple[RunConfig, tuple[Stage, ...]]:
    document = parse(text, name=name)
    problems = [*document.problems, *apply_overrides(document, overrides)]
    if with_adapter:
        problems += put_adapter(document)
    config, more = validate(document)
    problems += more
    # What contradicts something else is looked for only where every value by itself is right. With stages each stage is
    # a run of its own, so that what is wrong with the run's own settings may be put right by all of them.
    stages: tuple[Stage, ...] = ()
    if config is not None and not problems and config.curriculum:
        stages, more = _stages(document)
        problems += more
    elif config is not None and not problems:
        problems += cross_problems(config, document)
    if problems or config is None:
        # in the order of the file, overrides last; a problem of the run is found in each of its stages, and shown once
        lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=_line_of)))
        listed_lines = f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)
        raise ConfigError(lines[0] if len(lines) == 1 else listed_lines)
    return config, stages


def _stages(document: YamlDocument) -> tuple[tuple[Stage, ...], list[Problem]]:
    stages: list[Stage] = []
    curriculum = document.data["curriculum"]
    assert isinstance(curriculum, list), "validated"
    laid_over = [_overlay(document, at, stage) for at, stage in enumerate(curriculum) if isinstance(stage, dict)]
    problems = [*(problem for stage in laid_over for problem in stage.problems), *set_in_vain(document, laid_over)]
    names = Counter(stage.name.lower() for stage in laid_over)

    for overlay in laid_over:
        at: Path_ = ("curriculum", overlay.number - 1)
        own, wrong = validate(overlay.document)
        wrong += cross_problems(own, overlay.document) if own is not None and not wrong else []
        problems += map(overlay.at, wrong)
        if names[overlay.name.lower()] > 1:
            problems.append(
                document.problem((*at, "name"), f"{overlay.name} is the name of {names[overlay.name.lower()]} stages")
            )
        if own is None:
            continue
        # the stage just before, unless that one has problems of its own
        before = stages[-1] if stages and stages[-1].number == overlay.number - 1 else None
        if before is not None and what_trains(own) == what_trains(before.config):
            why = f"changes nothing: stage {overlay.name} has the data and settings of {before.name} before it"
            way = "give it something of its own, or give that stage more epochs"
            problems.append(document.problem(at, f"{why}; {way}"))
        stages.append(Stage(overlay.name, overlay.number, own))
    return tuple(stages), problems


def _line_of(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 1_000_000


def refuse_typographic(text: str, name: str) -> None:
    """Raises ConfigError for a text that begins with a quote which only people read."""
    if text and text[0] in TYPOGRAPHIC:
        raise ConfigError(f"{name}={show(text)}: {text[0]} is a typographic quote, which nothing reads; write ' or \"")


def split_overrides(text: str) -> list[str]:
    """`SET` split as a shell splits words, without running anything; raises ConfigError where a quote is not closed. A
    word with an open bracket takes in the following ones: the quotes of a list (`[[4, 1], [fsdp, tp]]`) were eaten."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{OVERRIDE}={show(text)}: {str(error).lower()}; close the quote") from None
    joined: list[str] = []
    for word in words:
        refuse_typographic(word, OVERRIDE)
        refuse_typographic(word.partition("=")[2], OVERRIDE)
        value = joined[-1].partition("=")[2] if joined else ""  # that of the word before
        is_open = sum(map(value.count, "[{")) > sum(map(value.count, "]}"))
        if value.startswith(("[", "{")) and is_open:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def apply_overrides(document: YamlDocument, overrides: Iterable[str]) -> list[Problem]:
    """Put each `a.b=value` into the document's data; returns a problem for each that cannot be."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            shown = show(override)
            problems.append(Problem("", OVERRIDE, f"{shown} is not key=value, such as train.epochs=1"))
            continue
        more = re.search(r",\s*([a-z_.]+)=", text)
        if more and more[1] in leaves():
            apart = f"{key}={text[: more.start()]} {text[more.start() + 1 :].strip()}"
            problems.append(Problem(key, OVERRIDE, f"settings stand apart by spaces, not commas: SET='{apart}'"))
            continue
        try:
            value = parse_value(text, name=f"{OVERRIDE} {key}")
        except ConfigError as error:
            problems.append(Problem("", "", f"{error}; put the value in quotes to mean it as text"))
            continue
        problems += _put(document, tuple(key.split(".")), value, text)
    return problems


def _put(document: YamlDocument, words: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    """Put `train.epochs=1`, or `curriculum.0.train.epochs=1`, a key of a stage; stages are counted from 0."""
    path: Path_ = words
    if len(words) > 2 and words[0] == "curriculum" and words[1].isdigit():
        path = (words[0], int(words[1]), *words[2:])
        stages = document.data.get("curriculum")
        count = len(stages) if isinstance(stages, list) else 0
        if int(words[1]) >= count or len(words) > 4:
            why = "names a key inside a key" if len(words) > 4 else f"there are {count} stages, counted from 0"
            return [Problem(".".join(words), OVERRIDE, f"{why}: curriculum.0.train.epochs=1 sets a key of the first")]
    section = document.section(path[:-1])
    if section is None:
        holder = next(path[:end] for end in range(1, len(path)) if document.section(path[:end]) is None)
        found = show(value_at(document.data, holder))
        return [Problem(".".join(words), OVERRIDE, f"{'.'.join(map(str, holder))} is {found}, not a section")]
    section[words[-1]] = value
    # a section that is replaced as a whole leaves no lines of its old keys behind
    for places in (document.lines, document.raw):
        for old in [place for place in places if place[: len(path)] == path]:
            del places[old]
    document.raw[path] = text
    document.overridden.add(path)
    return []


def resolved(config: RunConfig, *, effective_batch: int | None = None) -> dict[str, Any]:
    """The config as plain data, defaults included: what `resolved.json` holds. `effective_batch`: the plan's, where the
    config derives it from the ranks, so that it trains the same over any number of them, or is refused."""
    data = config.model_dump(mode="json")
    if config.train.effective_follows:
        data["train"]["effective_batch_size"] = effective_batch
    if config.curriculum:  # read again, they would count as given for stages that have files of their own
        data["data"] = {key: value for key, value in data["data"].items() if not follows(config, f"data.{key}")}
    return data


def follows(config: RunConfig, path: str) -> bool:
    """Whether a key was not given, and its default follows from other keys of its section."""
    section, _, key = path.partition(".")
    holder = getattr(config, section, None)
    if not isinstance(holder, Section) or key in holder.model_fields_set:
        return False
    field = type(holder).model_fields.get(key)
    return field is not None and bool(field.default_factory_takes_validated_data)


def resolved_without_paths(config: RunConfig) -> dict[str, Any]:
    """`resolved` without paths: nodes may keep the same files in different folders."""
    settings = resolved(config)
    kept = {key: value for key, value in settings.items() if key != "output"}
    kept["model"] = {key: value for key, value in kept["model"].items() if key not in ("name", "adapter")}
    kept["data"] = _data_without_paths(kept["data"])
    kept["curriculum"] = [{**stage, "data": _data_without_paths(stage["data"])} for stage in kept["curriculum"]]
    return kept


def _data_without_paths(data: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if not key.endswith("_path")}
    sources = [
        {key: value for key, value in one.items() if not key.endswith("path")} for one in data.get("sources", ())
    ]
    return {**kept, "sources": sources}


def differing_keys(one: dict[str, Any], other: dict[str, Any], *, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves that differ between two resolved configs: {path: (one's value, other's value)}."""
    differing: dict[str, tuple[Any, Any]] = {}
    for key in [*one, *(key for key in other if key not in one)]:
        left, right = one.get(key), other.get(key)
        path = f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict) and path in sections():
            differing |= differing_keys(left, right, prefix=f"{path}.")
        elif left != right:
            differing[path] = (left, right)
    return differing


# --- stages -----------------------------------------------------------------------------------------------------------


# Keys that a stage may give without naming their section.
SHORT = {
    "epochs": ("train", "epochs"),
    "max_steps": ("train", "max_steps"),
    "learning_rate": ("train", "learning_rate"),
    "max_seq_len": ("model", "max_seq_len"),
    "trainable": ("tuning", "trainable"),
}
# Sections that a stage may override in part.
SECTIONS = ("model", "tuning", "data", "train", "eval")
# Keys of `data` and `train` that apply to the job as a whole, as all of `model` and `tuning` do but for `SHORT`.
_FOR_ALL_STAGES = frozenset({
    "data.chat_template", "data.workers", "data.process", "data.style", "data.documents", "train.bf16",
    "train.fp16", "train.report_to", "train.stop_after_steps", "train.max_hours", "train.profile_steps",
    "train.dataloader_num_workers", "train.dataloader_pin_memory",
})  # fmt: skip
# Keys that change how a stage is monitored, but not what it learns.
_LEARNS_NOTHING = (
    "train.logging_steps", "train.save_steps", "train.save_total_limit", "train.load_best_model_at_end",
    "train.async_save", "train.metric_for_best_model", "train.early_stopping_patience", "data.val_path",
    "data.test_path", "data.max_lost_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Overlay:
    """A stage as a document; `own` maps the path of each key that the stage sets to the key's path in the file."""

    number: int
    name: str
    document: YamlDocument
    own: dict[Path_, Path_]
    problems: tuple[Problem, ...]

    def at(self, problem: Problem) -> Problem:
        """A problem of the stage's document, as a problem of the file."""
        for path, given in self.own.items():
            ours = dotted(path)
            if problem.path == ours or problem.path.startswith((f"{ours}.", f"{ours}[")):
                return Problem(dotted(given) + problem.path[len(ours) :], problem.where, problem.message)
        return problem


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its name, its number from 1, and its complete settings."""

    name: str
    number: int
    config: RunConfig


def _overlay(document: YamlDocument, at: int, stage: dict[str, Plain]) -> Overlay:
    data = copy.deepcopy({key: value for key, value in document.data.items() if key != "curriculum"})  # the run's
    staged = YamlDocument(document.name, data, dict(document.lines), {}, [], set(document.overridden))
    own: dict[Path_, Path_] = {}
    problems: list[Problem] = []
    for path, given, value in _given(stage, ("curriculum", at)):
        if path in own or _is_for_all_stages(path):
            again = f"set twice: here and as {dotted(own[path])}; remove one of them" if path in own else ""
            why = again or f"applies to all stages; set {dotted(path)} of the run"
            problems.append(document.problem(given, why))
            continue
        own[path] = given
        section = staged.section(path[:-1])
        assert section is not None, "validated"
        section[str(path[-1])] = copy.deepcopy(value)
        staged.overridden = {old for old in staged.overridden if old[: len(path)] != path}
        staged.lines = {old: line for old, line in staged.lines.items() if old[: len(path)] != path}
        # an override of a stage's key has no line: that of the stage stands for it
        staged.lines[path] = document.lines.get(given, document.lines.get(given[:2], 1))
    for mine, theirs in _INSTEAD.items():
        section = staged.section(theirs[:1])
        if mine in own and theirs not in own and section is not None:
            section.pop(theirs[1], None)
    return Overlay(at + 1, str(stage["name"]), staged, own, tuple(problems))


# Settings that a stage gives in another form than the run: files for sources, epochs for steps.
_INSTEAD = {
    ("data", "sources"): ("data", "train_path"),
    ("data", "train_path"): ("data", "sources"),
    ("train", "epochs"): ("train", "max_steps"),
}


def _given(stage: dict[str, Plain], at: Path_) -> Iterator[tuple[Path_, Path_, Plain]]:
    """The settings of a stage: path in a run YAML, path in the file, value; an empty section sets nothing."""
    for key, value in stage.items():
        if key in SHORT and value is not None:
            yield SHORT[key], (*at, key), value
        elif key == "task_mode" and value is not None:
            yield (key,), (*at, key), value
        elif key in SECTIONS and isinstance(value, dict):
            for inner, item in value.items():
                yield (key, inner), (*at, key, inner), item


def _is_for_all_stages(path: Path_) -> bool:
    key = dotted(path)
    if path in SHORT.values() or path[0] not in ("model", "tuning"):
        return key in _FOR_ALL_STAGES
    return any(name == key or name.startswith(f"{key}.") for name in leaves())


def set_in_vain(document: YamlDocument, stages: list[Overlay]) -> Iterator[Problem]:
    """Overrides of the run's keys that every stage sets for itself: they would change nothing."""
    for path in sorted(document.overridden, key=str):
        if stages and all(path in stage.own for stage in stages):
            at = ".".join(map(str, stages[0].own[path]))
            yield Problem(dotted(path), "SET", f"every stage of the curriculum sets its own; set it there: {at}=…")


def what_trains(config: RunConfig) -> dict[str, Any]:
    """The settings that decide what a stage learns, as plain data, to compare two stages."""
    data = config.model_dump(mode="json", exclude={"eval", "curriculum", "output", "plan", "distributed"})
    for path in _LEARNS_NOTHING:
        section, key = path.split(".")
        data[section].pop(key, None)
    data["train"]["learning_rate"] = config.learning_rate
    if config.train.max_steps is not None:  # which takes precedence over epochs
        data["train"].pop("epochs")
    return data
