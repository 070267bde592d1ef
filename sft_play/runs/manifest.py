"""What makes a run reproducible, for its manifest: versions, the git state, the program's own code."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play._version import __version__
from sft_play.config.load import LoadedConfig
from sft_play.facts.installed import version_of
from sft_play.files import ROOT
from sft_play.runs.folder import FORMAT

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "bitsandbytes",
    "accelerate",
    "deepspeed",
    "datasets",
    "tokenizers",
    "safetensors",
    "tensorboard",
    "numpy",
    "pydantic",
    "PyYAML",
)
"""Packages whose versions can change what a run computes."""


def new_manifest(loaded: LoadedConfig, *, hardware: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """What makes a run reproducible: versions, git state, hardware, data hashes, seeds, command."""
    return {
        "format": FORMAT,
        "status": "running",
        "config_path": str(loaded.path.absolute()),
        "overrides": list(loaded.overrides),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": loaded.config.train.seed,
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "code": own_code(),
        "cwd": str(Path.cwd()),
        "hardware": hardware,
        "data": data,
        "choices": [],
    }


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and what can change a run's numbers; None where not installed."""
    own = {"sft_play": __version__, "python": platform.python_version()}
    packages = {package: version_of(package) for package in PACKAGES}
    return own | packages | {"platform": f"{platform.system()} {platform.machine()}"}


PACKAGE = ROOT / "sft_play"


@functools.cache  # what this process has imported: a file that changes later is not what runs
def own_code() -> dict[str, Any]:
    """`code_facts` of this program, as it was when a run first asked."""
    return code_facts(PACKAGE)


def code_facts(package: Path) -> dict[str, Any]:
    """What identifies the program's own code: a digest of its files, and the git state of its checkout.

    `git` is None where the package is installed, or lies in a repository that does not track it.
    """
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".yaml") and file.is_file():
            # with ends marked, so that no byte can move between a name and a content unseen
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    # A package in site-packages may lie inside a repository of the user's, which says nothing about its code.
    is_tracked = git_answer(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    return {"sha256": digest.hexdigest(), "git": git_state(package) if is_tracked else None}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether the working tree differs; None outside a repository. Remotes are not read."""
    commit = git_answer(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = git_answer(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": git_answer(folder, "rev-parse", "--abbrev-ref", "HEAD"), "dirty": bool(changed)}


def git_answer(folder: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, or it refuses."""
    try:
        answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
