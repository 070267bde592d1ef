"""Unsloth's own environment: where it is, what it says of itself, and how its Python is started.

Unsloth's pins exclude this project's (trl<=1.15, datasets<5), and importing it rewrites transformers, PEFT and TRL in
the process that does. So it is never imported here: what needs it runs `unsloth_worker.py` with the other Python.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sft_play
from sft_play.cache import cache_dir
from sft_play.environment import for_another_run
from sft_play.errors import BackendError
from sft_play.log import escape_control, one_line

VARIABLE = "UNSLOTH_VENV"
"""Names the environment; without it `.venv-unsloth` is looked for here and in the checkout."""
FOLDER = ".venv-unsloth"
"""What `make setup-unsloth` builds."""
WORKER = Path(__file__).resolve().parent / "unsloth_worker.py"
ANSWER = "sft-play answers: "
"""Begins the line in which the worker answers `--probe`; Unsloth prints lines of its own before it."""
PROBE_S = 300.0
"""Seconds for importing Unsloth; 12 s were measured on two cores of an EPYC (2026-11-22, Unsloth 2026.10.9)."""


@dataclass(frozen=True)
class Answer:
    """What Unsloth's environment says of itself: the device that Unsloth chose (cuda, hip, xpu, cpu), and versions."""

    device: str
    versions: Mapping[str, str | None]

    @property
    def words(self) -> str:
        """The packages that compute, with their versions."""
        names = ("unsloth", "unsloth_zoo", "torch", "transformers", "peft", "bitsandbytes")
        return ", ".join(f"{name} {self.versions.get(name)}" for name in names if self.versions.get(name))


def find_python(environment: Mapping[str, str]) -> Path | None:
    """The Python of Unsloth's environment; None where there is none.

    Raises:
        BackendError: UNSLOTH_VENV names a folder without one.
    """
    given = environment.get(VARIABLE, "").strip()
    if given:
        python = Path(given) / "bin" / "python"
        if not os.access(python, os.X_OK):
            raise BackendError(
                f"{VARIABLE}={one_line(given)} was asked for, but there is no program {python.absolute()}; name the "
                "folder of an environment that has bin/python and Unsloth"
            )
        return python.absolute()
    checkout = Path(sft_play.__file__).resolve().parents[1]
    for folder in (Path.cwd() / FOLDER, checkout / FOLDER):
        python = folder / "bin" / "python"
        if os.access(python, os.X_OK):
            return python.absolute()
    return None


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process of Unsloth's Python: nothing of this Python's packages or of a launcher's ranks.

    Unsloth asks the hub for a file that counts its users, and writes generated code into the working folder: the one is
    turned off, the other goes into the cache.
    """
    kept = for_another_run(environment)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ACCELERATE_CONFIG"):
        kept.pop(name, None)
    kept["PYTHONSAFEPATH"] = "1"  # else the worker's own folder would hide modules of the standard library
    kept.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    kept.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_dir() / "unsloth"))
    kept.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return kept


def ask(python: Path) -> Answer:
    """What the environment of this Python says once it has imported Unsloth; asked once in a process.

    Raises:
        BackendError: Unsloth cannot be imported there, or lacks what the worker calls; with its own reason.
    """
    # what decides which GPU it sees is part of the question
    return _ask(python, os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _ask(python: Path, _: str | None) -> Answer:
    with tempfile.TemporaryDirectory() as aside:
        try:
            done = subprocess.run(
                [str(python), str(WORKER), "--probe"],
                cwd=aside,
                env=worker_environment(os.environ),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BackendError(f"{python} did not import Unsloth within {PROBE_S:.0f} s") from None
        except OSError as error:
            raise BackendError(f"{python} cannot be started: {error.strerror}") from None
    answer = answer_in(done.stdout)
    if answer is None:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise BackendError(f"{python} cannot import Unsloth: {one_line(escape_control(last), limit=400)}")
    if "error" in answer:
        raise BackendError(f"{python} cannot run Unsloth: {one_line(str(answer['error']), limit=400)}")
    return Answer(str(answer["device"]), dict(answer["versions"]))


def answer_in(printed: str) -> dict[str, Any] | None:
    """The worker's answer among the lines that were printed."""
    for line in reversed(printed.splitlines()):
        if line.startswith(ANSWER):
            found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return found
    return None
