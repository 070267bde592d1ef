"""Where caches live: what can be made again, and is worth keeping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environment: Mapping[str, str] | None = None) -> Path:
    """`SFT_PLAY_CACHE`, or `~/.cache/sft-play`."""
    environment = os.environ if environment is None else environment
    given = environment.get("SFT_PLAY_CACHE")
    return Path(given).expanduser() if given else Path("~/.cache/sft-play").expanduser()
