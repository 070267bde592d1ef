"""Tools that only a checkout has: `benchmarks/` is beside the package and is not installed with it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from sft_play.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout's folder, or site-packages."""


def tool(name: str, *, command: str) -> ModuleType:
    """The module `benchmarks.NAME` of the checkout.

    Raises:
        ConfigError: the package is installed without its checkout.
    """
    if not (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file():
        raise ConfigError(
            f"{command} is a developer's command of a checkout, and {Path(__file__).parents[1]} is "
            f"installed without one: run make {command} in a clone of the repository"
        )
    if str(ROOT) not in sys.path:  # a console script has its own folder there; processes that it spawns inherit it
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benchmarks.{name}")
