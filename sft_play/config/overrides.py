"""`SET=`: settings that replace those of the file, put into its plain data before validation."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from sft_play.config.yaml_io import Path_, Plain, Problem, YamlDocument, parse_value, show
from sft_play.errors import ConfigError

OVERRIDE = "SET"
"""The place of an override in messages, where a value of the file has its line."""


def split_overrides(text: str) -> list[str]:
    """`SET` split as a shell splits words, without running anything.

    A word with an open bracket takes in the following words, so that a list whose quotes were eaten
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
        try:
            value = parse_value(text, name=f"{OVERRIDE} {key}")
        except ConfigError as error:
            problems.append(Problem("", "", f"{error}; put the value in quotes to mean it as text"))
            continue
        problems += _put(document, tuple(key.split(".")), value, text)
    return problems


def _put(document: YamlDocument, path: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    if len(path) > 2 and path[0] == "curriculum" and path[1].isdigit():
        return _put_in_stage(document, path, value, text)
    section: dict[str, Plain] = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            holder = ".".join(path[:depth])
            return [Problem(".".join(path), OVERRIDE, f"{holder} is {show(inner)}, not a section")]
        section = inner
    section[path[-1]] = value
    # a section that is replaced as a whole leaves no lines of its old keys behind
    for places in (document.lines, document.raw):
        for old in [place for place in places if place[: len(path)] == path]:
            del places[old]
    document.raw[path] = text
    document.overridden.add(path)
    return []


def _put_in_stage(document: YamlDocument, path: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    """Put `curriculum.0.train.epochs=1`, a key of a stage; stages are counted from 0."""
    stages, at, keys = document.data.get("curriculum"), int(path[1]), path[2:]
    if not isinstance(stages, list) or at >= len(stages) or not isinstance(stages[at], dict) or len(keys) > 2:
        count = len(stages) if isinstance(stages, list) else 0
        why = "names a key inside a key" if len(keys) > 2 else f"there are {count} stages, counted from 0"
        return [Problem(".".join(path), OVERRIDE, f"{why}: curriculum.0.train.epochs=1 sets a key of the first")]
    stage = stages[at]
    assert isinstance(stage, dict)
    if len(keys) == 2:
        inner = stage.get(keys[0])
        stage[keys[0]] = {**(inner if isinstance(inner, dict) else {}), keys[1]: value}
    else:
        stage[keys[0]] = value
    full: Path_ = ("curriculum", at, *keys)
    document.lines.pop(full, None)
    document.raw[full] = text
    document.overridden.add(full)
    return []


def place(document: YamlDocument, path: Path_) -> str:
    """Where a value stands: `SET` for an override, else `file:line`."""
    for set_path in document.overridden:
        if path[: len(set_path)] == set_path or (set_path[: len(path)] == path and path not in document.lines):
            return OVERRIDE
    return document.where(path)
