"""Variables of the environment: those that a process started for another purpose must not inherit, and OpenMP's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sft_play.variables import VARIABLES

OF_MAKE = tuple(name for name in VARIABLES if name not in ("PYTHON", "VENV"))
"""What make passes to a command."""
OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SFT_PLAY_RUN", "SFT_PLAY_AGENT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What a launcher tells its ranks; and OMP_NUM_THREADS, which without a launcher is the user's own word."""


def for_another_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run that this one starts beside itself: this package first, this run's place left out."""
    left_out = {*OF_MAKE, *OF_LAUNCHERS, *(["OMP_NUM_THREADS"] if "WORLD_SIZE" in environment else [])}
    kept = {name: value for name, value in environment.items() if name not in left_out}
    package = str(Path(__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [kept.get("PYTHONPATH")])])
    return kept


HOW_THREADS_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""OpenMP's threads sleep while they wait, GNU's (in torch's wheels) after 1,000 turns of a loop, some 20 microseconds.

By default they spin for milliseconds, which takes the cores from the very thread that they wait for as soon as anything
else runs: `make benchmark-threads` measures it, benchmarks/README.md has the figures. Fewer threads would round
otherwise; how they wait changes no number.
"""
_SAYS_HOW_THREADS_WAIT = {*HOW_THREADS_WAIT, "KMP_BLOCKTIME"}


def waiting_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before torch is loaded: how OpenMP's threads wait. Empty where the environment says it."""
    return {} if _SAYS_HOW_THREADS_WAIT & set(environment) else dict(HOW_THREADS_WAIT)
