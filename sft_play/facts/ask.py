"""Programs and files that report on the machine; and their numbers, which may be `[N/A]`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sft_play.units import MIB

TIMEOUT_S = 10.0
"""After the driver is loaded, nvidia-smi answers in 2 to 5 s; a hanging one never does."""
_UNITS = {"b": 1, "kb": 10**3, "kib": 2**10, "mb": MIB, "mib": MIB, "gb": 2**30, "gib": 2**30}
"""AMD's and NVIDIA's tools write MB for 2**20 bytes."""


def text_of(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def answer_of(program: str, *words: str, timeout_s: float = TIMEOUT_S) -> str:
    """What a program prints; empty where it does not exist, fails, or does not answer in time."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        answer = subprocess.run(
            [path, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,  # a tool that asks something must not wait for the terminal
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def answers_of(program: str, *questions: tuple[str, ...]) -> list[str]:
    """A program's answers to several questions, asked in parallel: each pays for its own start."""
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
    value = number(text)
    return None if value is None else round(value)


def size(text: Any, *, unit: str = "mib") -> int | None:
    """Bytes of a text such as `81920 MiB` or of `{"value": 196592, "unit": "MB"}`; `unit` is used where none is
    given."""
    value = number(text)
    if value is None:
        return None
    # what is left of the text without its number
    given_unit = str(text.get("unit", "")) if isinstance(text, Mapping) else str(text).strip().lstrip("-0123456789. ")
    return int(value * _UNITS.get(given_unit.strip().lower(), _UNITS[unit]))
