"""Variables of the environment: those that a process started for another purpose must not inherit, OpenMP's, and the
setting of PyTorch's CUDA allocator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from sft_play.log import one_line
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


ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Where PyTorch's caching allocator reads its setting, before the older names that still count."""
OLDER_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments:True"
"""Segments that grow by pages in place of ones of fixed size: steps whose lengths change leave fewer holes."""
_SIMULATED = ("expandable_segments",)
"""Options of the allocator that a plan's bound covers, whatever they are."""


def allocator_setting(environment: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """Variables to set before torch starts CUDA: expandable segments, on Linux with NVIDIA's driver.

    Empty where the environment says anything about the allocator, and where PyTorch has no such segments or they fail:
    on Windows and macOS, under WSL (the first allocation ends in `CUDA driver error`, pytorch/pytorch#192330) and on
    AMD cards. `root`: the machine's files.
    """
    if any(name in environment for name in (ALLOCATOR, *OLDER_ALLOCATOR)):
        return {}
    dev = root / "dev"
    has_nvidia = (dev / "nvidiactl").exists() or any(dev.glob("nvidia[0-9]*"))
    if sys.platform != "linux" or (dev / "dxg").exists() or not has_nvidia:
        return {}
    return {ALLOCATOR: GROWING}


def allocator_words(environment: Mapping[str, str]) -> str:
    """What the allocator of this process is told, and whether the plan's bound covers it."""
    name = next((one for one in (ALLOCATOR, *OLDER_ALLOCATOR) if environment.get(one, "").strip()), None)
    if name is None:
        return "Allocator: PyTorch's default, segments of fixed size"
    said = environment[name].strip()
    others = [one for one in _options(said) if one not in _SIMULATED]
    text = f"Allocator: {name}={one_line(said)}"
    if others:
        verb = "is" if len(others) == 1 else "are"
        text += f"; {', '.join(map(one_line, others))} {verb} not simulated: the plan's bound is not theirs"
    return text


def _options(said: str) -> list[str]:
    """Names in `a:1,b:[256:1,512:2],c:True`; what stands in brackets is a value."""
    depth, outside = 0, ""
    for letter in said:
        depth += (letter == "[") - (letter == "]")
        outside += letter if depth == 0 else ""
    return [name for name in (part.partition(":")[0].strip() for part in outside.split(",")) if name]
