"""A run YAML and its overrides → `RunConfig`, or every problem at once.

Overrides apply to the plain data before validation, so they go through the same reader as the file.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.adapter import put_adapter
from sft_play.config.overrides import apply_overrides, place
from sft_play.config.schema import RunConfig
from sft_play.config.stages import Stage, overlays, set_in_vain, what_trains
from sft_play.config.validation import cross_problems, validate
from sft_play.config.yaml_io import Path_, Problem, YamlDocument, dotted, parse, read_text
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
    """The run that a YAML file and `key=value` overrides describe.

    Args:
        with_adapter: look for the adapter of `model.adapter` and take its settings; False where only other settings
            are asked for, since the adapter may be gone.

    Raises:
        ConfigError: with every problem, each with its place, path, value, and what to do.
    """
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
    """The run and the stages of its curriculum."""
    document = parse(text, name=name)
    problems = [*document.problems, *apply_overrides(document, overrides)]
    if with_adapter:
        problems += put_adapter(document, lambda key: place(document, tuple(key.split("."))))
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
    """The stages of a curriculum, each validated as a run of its own, and their problems."""
    stages: list[Stage] = []
    laid_over = list(overlays(document))
    problems = [*(problem for stage in laid_over for problem in stage.problems), *set_in_vain(document, laid_over)]
    names = Counter(stage.name.lower() for stage in laid_over)

    def add(path: Path_, message: str) -> None:
        problems.append(Problem(dotted(path), place(document, path), message))

    for overlay in laid_over:
        at: Path_ = ("curriculum", overlay.number - 1)
        own, wrong = validate(overlay.document)
        wrong += cross_problems(own, overlay.document) if own is not None and not wrong else []
        problems += map(overlay.at, wrong)
        if names[overlay.name.lower()] > 1:
            add((*at, "name"), f"{overlay.name} is the name of {names[overlay.name.lower()]} stages")
        if own is None:
            continue
        # the stage just before, unless that one has problems of its own
        before = stages[-1] if stages and stages[-1].number == overlay.number - 1 else None
        if before is not None and what_trains(own) == what_trains(before.config):
            add(at, f"changes nothing: stage {overlay.name} has the data and settings of {before.name} before it; "
                    "give it something of its own, or give that stage more epochs")  # fmt: skip
        stages.append(Stage(overlay.name, overlay.number, own))
    return tuple(stages), problems


def _line_of(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 1_000_000
