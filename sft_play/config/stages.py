"""The stages of a `curriculum`: the settings of the run that each overrides, and their lines in the file.

A stage is a complete run YAML: the run's, with the stage's keys in place of the run's. It is validated like any other,
so its errors look the same, with the stage's line numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from sft_play.config.leaves import leaves
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import Path_, Plain, Problem, YamlDocument, dotted

_V = TypeVar("_V")

SHORT = {
    "epochs": ("train", "epochs"),
    "max_steps": ("train", "max_steps"),
    "learning_rate": ("train", "learning_rate"),
    "max_seq_len": ("model", "max_seq_len"),
    "trainable": ("tuning", "trainable"),
}
"""Keys that a stage may give without naming their section."""
SECTIONS = ("model", "tuning", "data", "train", "eval")
"""Sections that a stage may override in part."""
_FOR_ALL_STAGES = {
    "data": {"chat_template", "workers", "process", "style", "documents"},
    "train": {"bf16", "fp16", "report_to", "stop_after_steps", "max_hours", "profile_steps", "dataloader_num_workers",
              "dataloader_pin_memory"},
    "eval": set(),
}  # fmt: skip
"""Keys that apply to the job as a whole; of `model` and `tuning`, all keys but those in `SHORT` do."""
_LEARNS_NOTHING = {
    *("train.logging_steps", "train.save_steps", "train.save_total_limit", "train.load_best_model_at_end"),
    *(
        "train.async_save",
        "train.metric_for_best_model",
        "train.early_stopping_patience",
        "data.val_path",
        "data.test_path",
    ),
    *("data.max_lost_fraction",),
}
"""Keys that change how a stage is monitored, but not what it learns."""


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


def overlays(document: YamlDocument) -> Iterator[Overlay]:
    """Each stage of a document whose own keys are valid."""
    stages = document.data.get("curriculum")
    for at, stage in enumerate(stages if isinstance(stages, list) else []):
        assert isinstance(stage, dict)
        yield _overlay(document, at, stage)


def _overlay(document: YamlDocument, at: int, stage: dict[str, Plain]) -> Overlay:
    data = copy.deepcopy({key: value for key, value in document.data.items() if key != "curriculum"})  # the run's
    own: dict[Path_, Path_] = {}
    problems: list[Problem] = []
    for path, given, value in _given(stage, ("curriculum", at)):
        if path in own:
            message = f"set twice: here and as {dotted(own[path])}; remove one of them"
            problems.append(document.problem(given, message))
            continue
        if _is_for_all_stages(path):
            message = f"applies to all stages; set {dotted(path)} of the run"
            problems.append(document.problem(given, message))
            continue
        own[path] = given
        _put(data, path, value)
    _drop_what_is_replaced(data, own)
    staged = YamlDocument(document.name, data, dict(document.lines), dict(document.raw), [], set(document.overridden))
    for path, given in own.items():
        _place(staged, document, path, given)
    return Overlay(at + 1, str(stage["name"]), staged, own, tuple(problems))


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
    """Whether a key applies to the job as a whole."""
    if len(path) < 2 or path in SHORT.values():
        return False
    section, key = str(path[0]), str(path[1])
    if section in _FOR_ALL_STAGES:
        return key in _FOR_ALL_STAGES[section]
    return any(name == f"{section}.{key}" or name.startswith(f"{section}.{key}.") for name in leaves())


def _put(data: dict[str, Plain], path: Path_, value: Plain) -> None:
    if len(path) == 1:
        data[str(path[0])] = copy.deepcopy(value)
        return
    section = data.get(str(path[0]))
    if not isinstance(section, dict):
        section = data[str(path[0])] = {}
    section[str(path[1])] = copy.deepcopy(value)


def _drop_what_is_replaced(data: dict[str, Plain], own: dict[Path_, Path_]) -> None:
    """Remove the run's settings that a stage gives in another form: files for sources, epochs for steps."""
    instead = {("data", "sources"): ("data", "train_path"), ("data", "train_path"): ("data", "sources"),
               ("train", "epochs"): ("train", "max_steps")}  # fmt: skip
    for mine, theirs in instead.items():
        section = data.get(theirs[0])
        if mine in own and theirs not in own and isinstance(section, dict):
            section.pop(theirs[1], None)


def _place(staged: YamlDocument, document: YamlDocument, path: Path_, given: Path_) -> None:
    """Give a key of the stage the line and text that it has in the file."""
    staged.overridden = {old for old in staged.overridden if old[: len(path)] != path}
    _move(staged.lines, document.lines, path, given)
    _move(staged.raw, document.raw, path, given)
    # an override of a stage's key has no line: that of the stage stands for it
    staged.lines.setdefault(path, document.lines.get(given, document.lines.get(given[:2], 1)))


def _move(mine: dict[Path_, _V], theirs: dict[Path_, _V], path: Path_, given: Path_) -> None:
    """Copy the entries at and below `given` in one mapping to `path` in the other, replacing those there."""
    for old in [place for place in mine if place[: len(path)] == path]:
        del mine[old]
    mine |= {(*path, *place[len(given) :]): value for place, value in theirs.items() if place[: len(given)] == given}


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
