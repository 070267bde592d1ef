"""The reference of all options and the JSON schema for editors, both generated from the schema's docstrings."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from sft_play.config.leaves import leaves, sections
from sft_play.config.schema import DTYPES, ELSEWHERE, OWNER, RunConfig

REFERENCE = Path("configs/reference.yaml")
SCHEMA = Path("configs/run.schema.json")
EXAMPLE_MODEL = "Qwen/Qwen2.5-3B-Instruct"
"""Stands in for a required value that has no default."""

_HEADER = """\
# Every option of a run YAML, its default, and what it does. Generated from sft_play/config/schema.py by
# `make -C benchmarks generate`; a test keeps it current. Only model.name has no default. It is a valid run YAML itself.
# yaml-language-server: $schema=run.schema.json
"""


def reference_yaml() -> str:
    """The text of configs/reference.yaml."""
    lines = [_HEADER]
    open_sections: list[str] = []
    for leaf in leaves().values():
        *holders, name = leaf.path.split(".")
        lines += _section_heads(holders, open_sections)
        open_sections = holders
        indent, comment = "  " * len(holders), f"{leaf.doc} ({leaf.expects})"
        wrapped = textwrap.wrap(comment, width=112 - len(indent), break_long_words=False, break_on_hyphens=False)
        lines += [f"{indent}# {line}" for line in wrapped]
        lines.append(f"{indent}{name}: {EXAMPLE_MODEL if leaf.required else yaml_value(leaf.default)}")
    return "\n".join(lines) + "\n"


def _section_heads(holders: list[str], open_sections: list[str]) -> list[str]:
    shared = 0
    while shared < min(len(holders), len(open_sections)) and holders[shared] == open_sections[shared]:
        shared += 1
    lines = []
    for depth in range(shared, len(holders)):
        path = ".".join(holders[: depth + 1])
        indent = "  " * depth
        lines += ["", f"{indent}# {(sections()[path].__doc__ or '').strip().splitlines()[0]}"]
        lines.append(f"{indent}{holders[depth]}:")
    if not holders and open_sections:
        lines.append("")
    return lines


def yaml_value(value: Any) -> str:
    """A default as written in YAML: JSON is YAML, but plain words and numbers need no quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:g}"
    return json.dumps(value)


def json_schema() -> str:
    """The text of configs/run.schema.json (JSON Schema, draft 2020-12)."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "sft_play run YAML"
    return json.dumps(_published(schema), indent=2) + "\n"


def _published(value: Any) -> Any:
    """Without owners and other names, and with the short names of dtypes."""
    if isinstance(value, dict):
        shown = {key: _published(item) for key, item in value.items() if key not in (OWNER, ELSEWHERE)}
        if "bfloat16" in (names := shown.get("enum", ())):
            shown["enum"] = [*names, *(short for short, name in DTYPES.items() if name in names)]
        return shown
    return [_published(item) for item in value] if isinstance(value, list) else value


def write_generated(root: Path) -> list[Path]:
    """Write every generated file below `root`; returns their paths."""
    texts = {REFERENCE: reference_yaml(), SCHEMA: json_schema()}
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return list(texts)
