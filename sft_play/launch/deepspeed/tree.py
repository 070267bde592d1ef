"""Dotted paths into a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sft_play.config import yaml_io
from sft_play.log import one_line

Config = dict[str, Any]
"""DeepSpeed's configuration as plain data: keys and values are DeepSpeed's."""

AUTO = "auto"
"""Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in few places
(`keys.AUTO_IS_A_VALUE`)."""


def join_path(path: str, key: str) -> str:
    """The dotted path of a key in the section at `path`, fit for a message."""
    return one_line(f"{path}.{key}" if path else str(key))


def sections_of(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every mapping with its dotted path, the outer ones first."""
    yield path, config
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from sections_of(value, f"{path}.{key}" if path else str(key))


def leaves_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, with its dotted path."""
    for path, section in sections_of(config):
        for key, value in list(section.items()):
            if not isinstance(value, dict):
                yield f"{path}.{key}" if path else str(key), value


def holder_of(config: Config, path: str) -> tuple[Config | None, str]:
    """The mapping that would hold the last key of a path, None where it does not exist, and that key."""
    *outer, key = path.split(".")
    holder: Any = config
    for part in outer:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def value_at(config: Config, path: str) -> Any:
    """The value at a path; None where there is none."""
    holder, key = holder_of(config, path)
    return None if holder is None else holder.get(key)


def put_at(config: Config, path: str, value: Any) -> None:
    """Set the value at a path; sections that are missing are added."""
    *outer, key = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[key] = value


def shown_value(value: Any) -> str:
    """A value as a message shows it: as YAML would have it."""
    return yaml_io.show(list(value) if isinstance(value, tuple) else value)
