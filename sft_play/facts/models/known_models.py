"""Shapes of the models in the shipped configs and of the most used others: they can be planned without a network.

A line of `known_models.json` holds the hub ids of models of one shape (base, instruct, successors), where it was read,
the published number of parameters where that was read too, and the part of the published config.json that determines
sizes, with how the weights are stored. The order of the starter base's fields is part of the key under which a made
base is kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class KnownModel:
    """A published config (the fields that determine sizes), its source, and the published parameters if known."""

    config: Config
    source: str
    params: int | None = None


def _read(path: Path) -> dict[str, KnownModel]:
    known: dict[str, KnownModel] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        known |= dict.fromkeys(row["names"], KnownModel(row["config"], row["source"], row["params"]))
    return known


KNOWN_MODELS: dict[str, KnownModel] = _read(Path(__file__).with_suffix(".json"))
"""Hub id: config."""
