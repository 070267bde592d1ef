"""The variables that belong to one command: what a process that it starts for another purpose must not inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sft_play.variables import VARIABLES

OF_MAKE = tuple(name for name in VARIABLES if name not in ("PYTHON", "VENV"))
"""What make passes to a command."""
OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SFT_PLAY_RUN", "SFT_PLAY_AGENT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What a launcher tells its ranks."""


def for_another_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run that this one starts beside itself: this package first, this run's place left out."""
    kept = {name: value for name, value in environment.items() if name not in {*OF_MAKE, *OF_LAUNCHERS}}
    package = str(Path(__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [kept.get("PYTHONPATH")])])
    return kept
