"""Settings as the text of a run YAML, as a person would write it: a short section on one line."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sft_play.config.leaves import leaves, sections
from sft_play.config.unknown_keys import written
from sft_play.config.yaml_io import Plain

_WIDTH = 112


def run_yaml(settings: Mapping[str, Plain]) -> str:
    """The text for settings by their dotted paths, in the order of the schema."""
    tree: dict[str, Plain] = {}
    for path in (one for one in leaves() if one in settings):
        *holders, name = path.split(".")
        section = tree
        for holder in holders:
            inner = section.setdefault(holder, {})
            assert isinstance(inner, dict)
            section = inner
        section[name] = settings[path]
    return "\n".join(_lines(tree, ()))


def _lines(section: Mapping[str, Plain], path: tuple[str, ...]) -> list[str]:
    indent, lines = "  " * len(path), []
    for name, value in section.items():
        line = f"{indent}{name}: {_flow(value, (*path, name))}"
        if isinstance(value, dict) and _is_section((*path, name)) and len(line) > _WIDTH:
            lines += [f"{indent}{name}:", *_lines(value, (*path, name))]
        else:
            lines.append(line)
    return lines


def _flow(value: Plain, path: tuple[str, ...]) -> str:
    if isinstance(value, dict) and _is_section(path):
        return "{" + ", ".join(f"{name}: {_flow(inner, (*path, name))}" for name, inner in value.items()) + "}"
    if isinstance(value, str):
        return written(value, None) if ":" not in value else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _is_section(path: tuple[str, ...]) -> bool:
    return ".".join(path) in sections()
