"""Where what was measured with the libraries is kept between starts: in the cache, by all that decides it."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.facts.installed import version_of
from sft_play.files import atomic
from sft_play.files.cache import cache_dir

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate")


def place_of(kind: str, folder: Path | None, decides: Mapping[str, Any]) -> Path:
    """The file of what these values and the libraries' versions decide, in `folder` (None: the cache's own of that
    kind)."""
    versions = {name: version_of(name) or "none" for name in LIBRARIES} | {"python": platform.python_version()}
    text = json.dumps({**decides, "versions": versions}, sort_keys=True)
    return (folder or cache_dir() / kind) / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def keep(path: Path, text: str) -> None:
    """Write what was measured, whole: another process may read it. A full disk costs the next start its time."""
    try:
        atomic.write(path, text)
    except OSError as error:
        logger.debug("%s cannot be kept: %s", path, error)
