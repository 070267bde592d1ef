"""The stages of a `curriculum`: what each lays over the run's own settings, and where in the file it stands.

A stage is a whole run YAML: that of the run, with the stage's keys in place of the run's. It is validated as any other,
so that its errors are those of any other, with the lines of the stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from sft_play.config.leaves import leaves
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import Document, Path_, Plain, Problem, dotted

_V = TypeVar("_V")

SHORT = {
    "epochs": ("train", "epochs"),
    "max_steps": ("train", "max_steps"),
    "learning_rate": ("train", "learning_rate"),
    "max_seq_len": ("model", "max_seq_len"),
    "trainable": ("tuning", "trainable"),
}
"""Keys that a stage may give without their section."""
SECTIONS = ("model", "tuning", "data", "train", "eval")
"""Sections of which a stage gives a part."""
_ONE_FOR_ALL = {
    "data": {"chat_template", "workers", "process", "style", "documents"},
    "train": {"bf16", "fp16", "report_to", "stop_after_steps", "profile_steps", "dataloader_num_workers",
              "dataloader_pin_memory"},
    "eval": set(),
}  # fmt: skip
"""Keys of a section that belong to the job as a whole; of `model` and `tuning` all but those in `SHORT` do."""
_LEARNS_NOTHING = {
    *("train.logging_steps", "train.save_steps", "train.save_total_limit", "train.load_best_model_at_end"),
    *("train.metric_for_best_model", "train.early_stopping_patience", "data.val_path", "data.test_path"),
    *("data.max_lost_fraction",),
}
"""Keys that change how a stage is watched, and nothing that it learns."""


@dataclass(frozen=True)
class Overlay:
    """A stage as a document of its own, and where each key that it gives stands: path in it, path in the file."""

    number: int
    name: str
    document: Document
    own: dict[Path_, Path_]
    problems: tuple[Problem, ...]

    def at(self, problem: Problem) -> Problem:
        """A problem of the stage's document as one of the file."""
        for path, given in self.own.items():
            ours = dotted(path)
            if problem.path == ours or problem.path.startswith((f"{ours}.", f"{ours}[")):
                return Problem(dotted(given) + problem.path[len(ours) :], problem.where, problem.message)
        return problem


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its name, its number from 1, and the whole of its settings."""

    name: str
    number: int
    config: RunConfig


def overlays(document: Document) -> Iterator[Overlay]:
    """Each stage of a document whose own keys are valid."""
    stages = document.data.get("curriculum")
    for at, stage in enumerate(stages if isinstance(stages, list) else []):
        assert isinstance(stage, dict)
        yield _overlay(document, at, stage)


def _overlay(document: Document, at: int, stage: dict[str, Plain]) -> Overlay:
    data = copy.deepcopy({key: value for key, value in document.data.items() if key != "curriculum"})
    own: dict[Path_, Path_] = {}
    problems: list[Problem] = []
    for path, given, value in _given(stage, ("curriculum", at)):
        if path in own:
            message = f"given twice: here and as {dotted(own[path])}; remove one of them"
            problems.append(Problem(dotted(given), document.where(given), message))
            continue
        if _is_one_for_all(path):
            message = f"one for all stages; give it as {dotted(path)} of the run"
            problems.append(Problem(dotted(given), document.where(given), message))
            continue
        own[path] = given
        _put(data, path, value)
    _drop_what_is_replaced(data, own)
    made = Document(document.name, data, dict(document.lines), dict(document.raw), [], set(document.overridden))
    for path, given in own.items():
        _place(made, document, path, given)
    return Overlay(at + 1, str(stage["name"]), made, own, tuple(problems))


def _given(stage: dict[str, Plain], at: Path_) -> Iterator[tuple[Path_, Path_, Plain]]:
    """What a stage gives: path in a run YAML, path in the file, value; a section that is empty gives nothing."""
    for key, value in stage.items():
        if key in SHORT and value is not None:
            yield SHORT[key], (*at, key), value
        elif key == "task_mode" and value is not None:
            yield (key,), (*at, key), value
        elif key in SECTIONS and isinstance(value, dict):
            for inner, item in value.items():
                yield (key, inner), (*at, key, inner), item


def _is_one_for_all(path: Path_) -> bool:
    """Whether a key that there is belongs to the job as a whole."""
    if len(path) < 2 or path in SHORT.values():
        return False
    section, key = str(path[0]), str(path[1])
    if section in _ONE_FOR_ALL:
        return key in _ONE_FOR_ALL[section]
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
    """Take out what the run gives and a stage says in another way: files for sources, epochs for steps."""
    instead = {("data", "sources"): ("data", "train_path"), ("data", "train_path"): ("data", "sources"),
               ("train", "epochs"): ("train", "max_steps")}  # fmt: skip
    for mine, theirs in instead.items():
        section = data.get(theirs[0])
        if mine in own and theirs not in own and isinstance(section, dict):
            section.pop(theirs[1], None)


def _place(made: Document, document: Document, path: Path_, given: Path_) -> None:
    """Give a key of the stage the lines and texts that it has in the file."""
    made.overridden = {old for old in made.overridden if old[: len(path)] != path}
    _move(made.lines, document.lines, path, given)
    _move(made.raw, document.raw, path, given)
    made.lines.setdefault(path, document.lines.get(given, document.lines.get(given[:2], 1)))


def _move(mine: dict[Path_, _V], theirs: dict[Path_, _V], path: Path_, given: Path_) -> None:
    """What stands at `given` and below it in one, at `path` in the other, in place of what was there."""
    for old in [known for known in mine if known[: len(path)] == path]:
        del mine[old]
    mine |= {(*path, *known[len(given) :]): value for known, value in theirs.items() if known[: len(given)] == given}


def set_in_vain(document: Document, stages: list[Overlay]) -> Iterator[Problem]:
    """Overrides of the run's own keys that every stage gives for itself: they would change nothing."""
    for path in sorted(document.overridden, key=str):
        if stages and all(path in stage.own for stage in stages):
            at = ".".join(map(str, stages[0].own[path]))
            yield Problem(dotted(path), "SET", f"every stage of the curriculum gives its own; set it there: {at}=…")


def what_trains(config: RunConfig) -> dict[str, Any]:
    """What decides what a stage learns, as plain data, to compare two stages by."""
    data = config.model_dump(mode="json", exclude={"eval", "curriculum", "output", "plan", "distributed"})
    for path in _LEARNS_NOTHING:
        section, key = path.split(".")
        data[section].pop(key, None)
    data["train"]["learning_rate"] = config.learning_rate
    if config.train.max_steps is not None:
        data["train"].pop("epochs")
    return data
