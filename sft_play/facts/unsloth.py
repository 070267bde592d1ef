"""Unsloth's own environment: where it is, what it can do, and how its Python is started. Its pins exclude this
project's, and importing it patches transformers, PEFT and TRL: it is never imported here."""

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

from sft_play.errors import BackendError
from sft_play.files import ROOT, cache_dir
from sft_play.log import escape_control, one_line
from sft_play.process.environment import independent_environment

# Names the environment; without it `.venv-unsloth` is used, of the working folder or the checkout.
UNSLOTH_VARIABLE = "UNSLOTH_VENV"
# What `make setup-unsloth` builds.
UNSLOTH_FOLDER = ".venv-unsloth"
WORKER_SCRIPT = Path(__file__).resolve().parents[1] / "training" / "unsloth" / "unsloth_worker.py"
# Begins the line in which the worker answers `--probe`; the same as there, where nothing of this package is imported
# before Unsloth.
WORKER_ANSWER_PREFIX = "sft-play answers: "
# Seconds for importing Unsloth; 12 s were measured on two cores of an EPYC (2026-11-22, Unsloth 2026.10.9).
PROBE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class UnslothInfo:
    """What Unsloth's environment reports: the device that Unsloth chose (cuda, hip, xpu, cpu), and versions."""

    device: str
    versions: Mapping[str, str | None]

    @property
    def versions_text(self) -> str:
        """The packages that compute, with their versions."""
        names = ("unsloth", "unsloth_zoo", "torch", "transformers", "peft", "bitsandbytes")
        return ", ".join(f"{name} {self.versions.get(name)}" for name in names if self.versions.get(name))


def find_unsloth_python(environment: Mapping[str, str]) -> Path | None:
    """The Python of Unsloth's environment, if there is one; raises BackendError where UNSLOTH_VENV names none."""
    setting = environment.get(UNSLOTH_VARIABLE, "").strip()
    if setting:
        python = Path(setting) / "bin" / "python"
        if not os.access(python, os.X_OK):
            raise BackendError(f"{UNSLOTH_VARIABLE}={one_line(setting)} names no environment: there is no program "
                               f"{python.absolute()}")  # fmt: skip
        return python.absolute()
    for folder in (Path.cwd() / UNSLOTH_FOLDER, ROOT / UNSLOTH_FOLDER):
        python = folder / "bin" / "python"
        if os.access(python, os.X_OK):
            return python.absolute()
    return None


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for Unsloth's Python, without those of this one's packages or a launcher's ranks; its count of
    users is turned off, and its generated code goes into the cache."""
    variables = independent_environment(environment)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ACCELERATE_CONFIG"):
        variables.pop(name, None)
    variables["PYTHONSAFEPATH"] = "1"  # else modules beside the worker, such as profile.py, hide the standard library's
    variables.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    variables.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_dir() / "unsloth"))
    variables.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return variables


@functools.cache
def probe_unsloth(python: Path) -> UnslothInfo:
    """What the environment reports after importing Unsloth, asked once; raises BackendError with its reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                [str(python), str(WORKER_SCRIPT), "--probe"], cwd=folder, env=worker_environment(os.environ),
                capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BackendError(f"{python} did not import Unsloth within {PROBE_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise BackendError(f"{python} cannot be started: {error.strerror}") from None
    reports = [
        line.removeprefix(WORKER_ANSWER_PREFIX)
        for line in process.stdout.splitlines()
        if line.startswith(WORKER_ANSWER_PREFIX)
    ]
    if not reports:
        lines = [line for line in process.stderr.splitlines() if line.strip()] or [f"exit {process.returncode}"]
        raise BackendError(f"{python} cannot import Unsloth: {one_line(escape_control(lines[-1]), limit=400)}")
    report: dict[str, Any] = json.loads(reports[-1])
    if "error" in report:
        raise BackendError(f"{python} cannot run Unsloth: {one_line(str(report['error']), limit=400)}")
    return UnslothInfo(str(report["device"]), dict(report["versions"]))
