"""The starter task: a small generated language, so that training works with nothing to download; and its names."""

from __future__ import annotations

from pathlib import Path

BASE_NAME = "sft-play/starter-base"
"""The model name of the base that this toolkit trains itself and keeps in its cache."""

CONFIG = "configs/run_starter.yaml"
"""The run YAML of a command without CONFIG."""


def shown_name(name: str) -> str:
    """A model's name for people: the starter's, for the folder of the cache that a run has in its place."""
    parts = Path(name).parts[-3:]
    is_starter = len(parts) == 3 and (parts[0], parts[1][:5], parts[2]) == ("starter", "base-", "model")
    return BASE_NAME if is_starter else name
