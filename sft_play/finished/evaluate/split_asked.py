"""Which held-out rows can be asked for: known before any library is imported."""

from __future__ import annotations

from sft_play.errors import ConfigError
from sft_play.log import one_line


def require_split(split: str | None, data: str | None) -> None:
    """Raises ConfigError where SPLIT names no held-out rows, or is given together with DATA."""
    if split is not None and data is not None:
        raise ConfigError(f"SPLIT={one_line(split)} is a split of the run's own data; leave it out with DATA=")
    if split not in (None, "val", "test"):
        hint = "; training rows are not evaluated (DATA=FILE evaluates any file)" if split == "train" else ""
        raise ConfigError(f"SPLIT={one_line(str(split))} is neither val nor test{hint}")
