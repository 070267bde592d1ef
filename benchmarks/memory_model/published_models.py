"""Shapes of the models that published runs trained, by name."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.models.config_json import KNOWN_MODELS, is_hub_reachable, load_config_json

Config = Mapping[str, Any]
ConfigOf = Callable[[str], Config]
"""A model's config.json by its name; raises ModelError."""

# Shapes that only published runs need, each with its source; the table of known models comes first.
_ENTRIES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MORE_MODELS: dict[str, Config] = {name: entry["config"] for name, entry in _ENTRIES.items()}


def known_config(name: str) -> Config:
    """A model's config.json: the tables first, then a mirror's original, then the hub and its cache; or ModelError."""
    if name in MORE_MODELS:
        return MORE_MODELS[name]
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name].config
    original = _originals().get(_last_part(name))
    if original is not None:
        return original
    if not _hub_once():
        raise ModelError(f"model {name} is in no table, and the hub cannot be reached")
    return load_config_json(name)


_hub_once = cache(is_hub_reachable)


@cache
def _originals() -> dict[str, Config]:
    """Configs by a repository's name without its owner, where all owners that the table has agree."""
    found: dict[str, Config] = {}
    differing = set()
    # mirrors (unsloth/, NousResearch/) keep the name after the owner; one that two owners fill differently is nobody's
    for name, known in KNOWN_MODELS.items():
        part = _last_part(name)
        if found.setdefault(part, known.config) != known.config:
            differing.add(part)
    return {part: config for part, config in found.items() if part not in differing}


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


def cache_configs(config_of: ConfigOf) -> ConfigOf:
    @cache  # an error as a text, since a cache keeps no exceptions: the hub is asked once for a model that it lacks
    def ask(name: str) -> Config | str:
        try:
            return config_of(name)
        except ModelError as error:
            return str(error)

    def answer(name: str) -> Config:
        found = ask(name)
        if isinstance(found, str):
            raise ModelError(found)
        return found

    return answer
