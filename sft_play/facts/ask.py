"""Programs that tell about the machine, asked with a time limit; and their numbers, which may be `[N/A]`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 10.0
"""A driver that was just loaded answers nvidia-smi after 2 to 5 s; one that hangs never does."""
MIB = 2**20
_UNITS = {"b": 1, "kb": 10**3, "kib": 2**10, "mb": MIB, "mib": MIB, "gb": 2**30, "gib": 2**30}
"""AMD's and NVIDIA's tools write MB where they mean 2**20 bytes."""


def answer_of(program: str, *words: str, timeout_s: float = TIMEOUT_S) -> str:
    """What a program prints; nothing where there is no such program, it fails or does not answer in time."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        answer = subprocess.run(
            [path, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def answers_of(program: str, *questions: tuple[str, ...]) -> list[str]:
    """The answers of a program to several questions, asked at once: each costs its start anew."""
    if shutil.which(program) is None:
        return [""] * len(questions)
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(lambda words: answer_of(program, *words), questions))


def number(text: Any) -> float | None:
    """The number at the start of a text such as `250.00 W`, or of `{"value": 250, "unit": "W"}`; None for `N/A`."""
    if isinstance(text, Mapping):
        text = text.get("value")
    if isinstance(text, bool) or text is None:
        return None
    match = re.match(r"\s*(-?[0-9]{1,18}(?:\.[0-9]{1,9})?)", str(text))
    return float(match[1]) if match else None


def whole(text: Any) -> int | None:
    """The same as a whole number."""
    found = number(text)
    return None if found is None else round(found)


def size(text: Any, *, unit: str = "mib") -> int | None:
    """Bytes of a text such as `81920 MiB` or of `{"value": 196592, "unit": "MB"}`; `unit` where none is said."""
    found = number(text)
    if found is None:
        return None
    said = str(text.get("unit", "")) if isinstance(text, Mapping) else str(text).strip().lstrip("-0123456789. ")
    return int(found * _UNITS.get(said.strip().lower(), _UNITS[unit]))
