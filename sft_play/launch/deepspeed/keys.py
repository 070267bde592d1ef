"""The keys that DeepSpeed's configuration knows, those it has renamed, and those it has removed: `keys.json`.

DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on every rank; in all
others, the top level first, an unknown key is ignored without a word. So the keys are listed, from DeepSpeed's source.
Fields that an installed DeepSpeed has beyond them are known too: its source is read, never imported. Paths into a
configuration are dotted.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from sft_play.config import yaml_io
from sft_play.log import one_line

Config = dict[str, Any]
"""DeepSpeed's configuration as plain data: keys and values are DeepSpeed's."""

AUTO = "auto"
"""Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in few places
(`AUTO_IS_A_VALUE`)."""

Sections = dict[str, frozenset[str]]
"""Section's dotted path ("" is the top level): the keys that it knows."""

_TABLE: dict[str, Any] = json.loads(resources.files(__package__).joinpath("keys.json").read_text(encoding="utf-8"))


def _keys_of(section: dict[str, str]) -> frozenset[str]:
    """A section's keys. Some of ZeRO's may be written with the prefix `stage3_` (pydantic's `populate_by_name`)."""
    both = section.get("with_and_without_stage3_", "").split()
    return frozenset([*section["keys"].split(), *both, *(f"stage3_{key}" for key in both)])


SHIPPED: Sections = {path: _keys_of(section) for path, section in _TABLE["sections"].items()}
"""`optimizer.params`, `scheduler.params`, `data_efficiency`, `autotuning`, `pipeline`, `expert_parallel`,
`weight_quantization`, `datastates_ckpt` and `inference` are open: what they may contain depends on their values.
`sequence_parallel_size` and `inference` are read by transformers and by DeepSpeed's ZeRO-3 loading."""

MODELS: dict[str, tuple[str, str]] = {
    path: (section["file"], section["class"]) for path, section in _TABLE["sections"].items() if "file" in section
}
"""Sections that DeepSpeed reads with pydantic: file and class, under the package's folder."""

RENAMED: dict[str, str] = _TABLE["renamed"]
"""Old keys that guides teach, and their current names."""

REMOVED: dict[str, str] = _TABLE["removed"]
"""Keys that DeepSpeed once knew, and why they went: today's classes refuse them."""

LOSS_SCALING = SHIPPED["fp16"] - {"enabled", "fp16_master_weights_and_grads"}
"""Keys of fp16 that old guides put into bf16 too, where they never had an effect and are rejected today."""

AUTO_IS_A_VALUE: tuple[str, ...] = tuple(_TABLE["auto_is_a_value"])
"""Paths where DeepSpeed itself understands "auto"."""


@functools.cache
def known() -> Sections:
    """The shipped table, and what an installed DeepSpeed's sections have beyond it."""
    folder = installed_folder()
    if folder is None:
        return SHIPPED
    return {section: keys | fields_of(section, folder) for section, keys in SHIPPED.items()}


def installed_folder() -> Path | None:
    """The folder of the installed DeepSpeed, found without importing it; None where there is none."""
    try:
        spec = importlib.util.find_spec("deepspeed")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def fields_of(section: str, folder: Path) -> frozenset[str]:
    """Field names and aliases of the pydantic class that reads a section, from its source; empty if there is none.

    Fields that the class marks as deprecated are left out: `RENAMED` has them.
    """
    if section not in MODELS:
        return frozenset()
    file, name = MODELS[section]
    try:
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            names |= {key for field in node.body if isinstance(field, ast.AnnAssign) for key in _names(field)}
    return frozenset(names)


def _names(field: ast.AnnAssign) -> set[str]:
    if not isinstance(field.target, ast.Name):
        return set()
    keywords = {item.arg: item.value for item in field.value.keywords} if isinstance(field.value, ast.Call) else {}
    extra = keywords.get("json_schema_extra")  # where DeepSpeed's models mark a field as deprecated
    if extra is not None and "'deprecated'" in ast.dump(extra):
        return set()
    alias = keywords.get("alias")
    return {field.target.id} | ({str(alias.value)} if isinstance(alias, ast.Constant) else set())


# --- dotted paths -----------------------------------------------------------------------------------------------------


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
