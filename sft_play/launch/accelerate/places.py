"""Where accelerate's configuration is read from and written to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PROJECT_FILE = Path("configs/accelerate/default_config.yaml")
"""Where the configuration is written unless `ACCELERATE_CONFIG` names another place: inside the project. accelerate's
own place is shared by all of a user's projects: it is read where this file is missing, and never written."""
NO_FILE = "none"
"""`ACCELERATE_CONFIG=none`: no configuration is read."""


def accelerate_path(environment: Mapping[str, str]) -> Path:
    """Where the configuration is, or would be written: `ACCELERATE_CONFIG`, else `PROJECT_FILE`."""
    given = environment.get("ACCELERATE_CONFIG", "").strip()
    return Path(given).expanduser() if given and given != NO_FILE else PROJECT_FILE


def accelerate_place(environment: Mapping[str, str] | None = None) -> Path:
    """Where `accelerate config` writes its answers by default (`accelerate/commands/config`)."""
    environment = os.environ if environment is None else environment
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "accelerate" / "default_config.yaml"


def find_accelerate_file(environment: Mapping[str, str]) -> Path | None:
    """The configuration that a launch reads: the named one, else the project's, else accelerate's own."""
    given = environment.get("ACCELERATE_CONFIG", "").strip()
    if given:
        return None if given == NO_FILE else accelerate_path(environment)
    return next((path for path in (PROJECT_FILE, accelerate_place(environment)) if path.is_file()), None)
