"""The GPU of a Mac with Apple's own chip: it has no memory of its own and shares the machine's."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from typing import Any

import psutil

from sft_play.facts.ask import answer_of
from sft_play.facts.seen import Seen, SeenGpu

VENDOR = "Apple"
_PROFILER_S = 3.0
"""system_profiler takes half a second as a rule, and much longer where many displays are asked."""


def chip() -> str | None:
    """`Apple M3 Max`; None on another machine than a Mac with Apple's own chip."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return None
    return answer_of("sysctl", "-n", "machdep.cpu.brand_string", timeout_s=_PROFILER_S).strip() or "Apple GPU"


def through_system() -> Seen | None:
    """The GPU of this Mac by sysctl and system_profiler; None on another machine."""
    name = chip()
    if name is None:
        return None
    listed = answer_of("system_profiler", "SPDisplaysDataType", "-json", timeout_s=_PROFILER_S)
    return seen_of(name, listed, psutil.virtual_memory())


def seen_of(chip: str, listed: str, memory: Any) -> Seen:
    """What the two programs said, with the host's memory as the GPU's."""
    cores = ""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        display = json.loads(listed)["SPDisplaysDataType"][0]
        chip = chip or str(display["sppci_model"])
        cores = f", {display['sppci_cores']} GPU cores"
    total, free = int(memory.total), int(memory.available)
    gpu = SeenGpu(
        0,
        f"{chip or 'Apple GPU'}{cores}",
        VENDOR,
        total_bytes=total,
        used_bytes=total - free,
        free_bytes=free,
        unified=True,
    )
    return Seen((gpu,), "system_profiler")
