"""Updates requirements.lock to the newest versions that fit pyproject.toml, and prints what
changed.

pip resolves in a dry run inside a throw-away environment: nothing is installed, .venv is neither
needed nor touched. torch keeps its present pin unless TORCH names another one, because the other
wheels are built against it. Runs on the oldest supported Python of the machine: what fits it fits
the newer ones as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from installer import clean_environ
from setup_env import NEWEST, ROOT, Python, SetupError, named_python, search_python, show

LOCK = ROOT / "requirements.lock"
# torch's CUDA builds pin these exactly themselves; our pins would only break a CPU build.
TORCH_OWN = re.compile(r"nvidia-|cuda-|triton$")

HEADER = """\
# The versions that `make setup` installs: one tested set within the ranges of pyproject.toml.
# Written by `make -C benchmarks lock` (scripts/lock.py) on Python {python}. It constrains pip only.
# torch has no local suffix here, so that PyPI's CUDA build fits as well as a CPU build; the nvidia-*,
# cuda-* and triton packages that torch itself pins are left out.
"""  # noqa: E501  (the lock's own header)


def say(text: str) -> None:
    """One progress line, visible at once."""
    print(f"[lock] {text}", flush=True)


def canonical(name: str) -> str:
    """A package name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """Name and version of each line of a lock file."""
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    return dict(line.split("==", 1) for line in lines)


def requirements(pyproject: dict[str, Any]) -> list[str]:
    """Everything that the project can need: the build tool, the dependencies and every extra."""
    project = pyproject["project"]
    extras = [
        requirement for extra in project["optional-dependencies"].values() for requirement in extra
    ]
    return [*pyproject["build-system"]["requires"], *project["dependencies"], *extras]


def requirement_name(requirement: str) -> str:
    """The package that a requirement names."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return canonical(match.group() if match else requirement)


def report_pins(report: dict[str, Any], direct: set[str]) -> dict[str, str]:
    """Name and version of what pip would install, without local suffixes and what torch pins
    itself."""
    versions = {
        canonical(item["metadata"]["name"]): item["metadata"]["version"]
        for item in report["install"]
    }
    return {
        name: version.split("+")[0]
        for name, version in sorted(versions.items())
        if name in direct or not TORCH_OWN.match(name)  # nvidia-ml-py is ours, not torch's
    }


def torch_pin(environ: dict[str, str], old: dict[str, str]) -> str:
    """The version that torch is held at: TORCH, else the present pin."""
    version = environ.get("TORCH") or old.get("torch", "")
    if re.fullmatch(r"\d+(\.\d+)+", version):
        return version
    raise SetupError(
        f"torch should be pinned at {version!r}, which is not a version (TORCH, else the pin in"
        f" {LOCK.name}).\n  Name one: make -C benchmarks lock TORCH=2.13.0"
    )


def changes(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """One line for each pin that was added, removed or changed."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name} {old.get(name, '(none)')} -> {new.get(name, '(none)')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def call(*command: str | Path) -> None:
    """Runs a command with its output visible; raises when it fails."""
    text = [str(part) for part in command]
    code = subprocess.run(text, env=clean_environ(os.environ), check=False).returncode
    if code != 0:
        raise SetupError(
            f"`{' '.join(text[:5])} …` ended with exit code {code}; the lines above say why.\n"
            f"  {LOCK.name} is unchanged. Fix what they name (the network, a range) and repeat"
        )


def resolve(wanted: list[str], torch: str, python: Python) -> dict[str, Any]:
    """pip's report of what it would install for these requirements, newest versions first."""
    with tempfile.TemporaryDirectory(prefix="sft-play-lock-") as name:
        folder = Path(name)
        inside = folder / "venv" / "bin" / "python"
        constraint, report = folder / "torch.txt", folder / "report.json"
        constraint.write_text(f"torch=={torch}\n", encoding="utf-8")
        call(python.path, "-I", "-m", "venv", folder / "venv")
        # from 25.3 on a dry run does not download whole wheels (torch: gigabytes; pypa/pip#13482)
        call(inside, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.3", "setuptools")
        # No isolation: deepspeed comes as source, and its metadata needs nothing but setuptools.
        options = [
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-build-isolation",
            "--use-feature=fast-deps",
        ]
        call(
            inside, "-m", "pip", "install", *options, "--report", report, "-c", constraint, *wanted
        )
        return json.loads(report.read_text(encoding="utf-8"))


def write_lock(pins: dict[str, str], python: Python) -> None:
    """The lock file in one step: written aside, then renamed."""
    aside = LOCK.with_name(LOCK.name + ".new")
    lines = [f"{name}=={version}\n" for name, version in pins.items()]
    aside.write_text(HEADER.format(python=show(python.version)) + "".join(lines), encoding="utf-8")
    aside.replace(LOCK)


def renew(python: Python) -> None:
    """Update requirements.lock, and print what changed."""
    import tomllib  # not at the top: an older Python still has to get as far as choosing this one

    wanted = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    old = read_pins(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    torch = torch_pin(dict(os.environ), old)
    say(
        f"resolving {len(wanted)} requirements on Python {show(python.version)},"
        f" torch held at {torch}"
    )
    new = report_pins(resolve(wanted, torch, python), {requirement_name(item) for item in wanted})
    write_lock(new, python)
    for line in changes(old, new) or ["nothing changed"]:
        say(line)


def choose() -> Python:
    """The Python that PYTHON names, else the oldest supported one on PATH."""
    if os.environ.get("PYTHON"):
        return named_python(os.environ["PYTHON"])
    minors = range(11, NEWEST[1] + 1)
    return search_python([*(f"python3.{minor}" for minor in minors), "python3"])


def main() -> int:
    """The exit code: 0 after an update, 2 after a message that says what to do."""
    try:
        python = choose()
        if sys.version_info[:2] != python.version:
            os.execv(python.path, [python.path, "-EsSB", __file__])
        renew(python)
    except SetupError as error:
        print(f"[lock] {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
