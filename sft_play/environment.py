"""Variables of the environment: those that a process started for another purpose must not inherit, and OpenMP's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from sft_play.variables import VARIABLES

OF_MAKE = tuple(name for name in VARIABLES if name not in ("PYTHON", "VENV", "UNSLOTH_VENV"))
"""What make passes to a command."""
OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SFT_PLAY_RUN", "SFT_PLAY_AGENT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_SIZE", "CROSS_SIZE", "NPROC_PER_NODE", "SLURM_PROCID"),
)
"""What a launcher tells its ranks; and OMP_NUM_THREADS, which without a launcher is the user's own word."""
FAMILIES = ("PET_", "OMPI_COMM_", "PMI_", "MPI_LOCAL", "MV2_COMM_")
"""How other launchers' names of the same things begin."""


def for_another_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run that this one starts beside itself: this package first, this run's place left out."""
    left_out = {*OF_MAKE, *OF_LAUNCHERS, *(["OMP_NUM_THREADS"] if "WORLD_SIZE" in environment else [])}
    kept = {
        name: value for name, value in environment.items() if name not in left_out and not name.startswith(FAMILIES)
    }
    kept["ACCELERATE_CONFIG"] = "none"  # accelerate's own file may name several machines
    package = str(Path(__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [kept.get("PYTHONPATH")])])
    return kept


SPINNING = {"GOMP_SPINCOUNT": "10000"}
"""On a quiet machine OpenMP's threads (GNU's, in torch's wheels) spin for a fraction of a millisecond, then sleep.

That is as quick as the milliseconds of the default, and what comes to run beside it later costs less.
"""
SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""On a busy machine they sleep at once: spinning takes the cores from the very threads that are waited for.

Fewer threads would round otherwise; how they wait changes no number. Figures: benchmarks/README.md.
"""
_SAYS_HOW_THREADS_WAIT = {*SPINNING, *SLEEPING, "KMP_BLOCKTIME"}
_BUSY_CORES = 0.5
"""From so many cores taken by others the machine counts as busy: with a thread a core, one busy core holds up all."""


def busy_cores(*, seconds: float = 0.1) -> float:
    """How many cores the machine was busy with for so long, while this process slept."""
    share: float = psutil.cpu_percent(seconds) / 100
    return share * (psutil.cpu_count() or 1)


def waiting_threads(environment: Mapping[str, str], *, measured: Callable[[], float] = busy_cores) -> dict[str, str]:
    """Variables to set before torch is loaded: how OpenMP's threads wait. Empty where the environment says it."""
    if _SAYS_HOW_THREADS_WAIT & set(environment):
        return {}
    return dict(SLEEPING if measured() > _BUSY_CORES else SPINNING)
