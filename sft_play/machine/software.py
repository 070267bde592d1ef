"""The software of this machine: versions of installed packages, and Unsloth's environment.

Versions are read from the packages' files without importing them.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from sft_play.errors import BackendError
from sft_play.files import ROOT, atomic, cache_dir, relative_to_cwd
from sft_play.log import escape_control, one_line
from sft_play.process.environment import independent_environment

# Versions of installed packages, read from their files without importing them, and what was
# measured with them.

# Packages that compute on every rank: with two versions of one, two models would be trained.
COMPUTE_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
)
# The package with kernels for gated delta rules (Qwen3-Next, Qwen3.5); transformers looks for its
# module `fla`.
LINEAR_ATTENTION_PACKAGE = "flash-linear-attention"
LIGER_PACKAGE = "liger-kernel"
# Packages whose kernels run where they are installed, and slower code where not: in transformers'
# classes, and Liger's where `train.kernels` asks for them.
KERNEL_PACKAGES = (LINEAR_ATTENTION_PACKAGE, "causal-conv1d", "mamba-ssm", LIGER_PACKAGE)
_CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


@functools.cache  # importlib parses a package's whole METADATA for it, 2 ms a package
def install_command(requirement: str) -> str:
    """The command that installs a package into the environment of this process, to be typed."""
    pip = Path(sys.executable).with_name("pip")
    words = [str(relative_to_cwd(pip))] if pip.exists() else [sys.executable, "-m", "pip"]
    return shlex.join([*words, "install", requirement])


def installed_version(package: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_kernel_packages() -> frozenset[str]:
    """The packages of `KERNEL_PACKAGES` that are not installed."""
    return frozenset(name for name in KERNEL_PACKAGES if installed_version(name) is None)


def kernel_package_problem(package: str, capability: tuple[int, int] | None) -> str:
    """Why not to install a package for such a GPU; empty: nothing is known against its kernels.
    fla-org/flash-linear-attention, issues 913 (misaligned addresses with 0.5.0, NaN until 0.5.1),
    999 (a backward pass that hangs), 945 and 1228 (a race, until 0.5.2); the settings of kernels
    that 0.6.0 leaves out are in its code.
    """
    if package != LINEAR_ATTENTION_PACKAGE or capability is None or capability[0] not in (10, 12):
        return ""
    return (
        "on Blackwell its releases before 0.6.0 stop with a misaligned address, hang, or compute"
        " NaN or something else each time; 0.6.0 leaves out the settings that did, and no training"
        " with it there is known"
    )


@dataclass(frozen=True)
class CudaLibraries:
    """The CUDA that torch is built for, and cuDNN's version as torch numbers it: 9.20.0 is 92000;
    0: none is known. The defaults belong to the pinned torch from PyPI (2.13.0: CUDA 13.0,
    nvidia-cudnn-cu13 9.20.0.48). Its build for CUDA 12.6 has cuDNN 9.10.2."""

    cuda: tuple[int, ...] = (13, 0)
    cudnn: int = 92000


PINNED_CUDA_LIBRARIES = CudaLibraries()


def cuda_libraries() -> CudaLibraries:
    """CUDA and cuDNN of the installed torch; of the pinned torch where it is a build without CUDA:
    the plan is for another machine."""
    cuda_version = torch_build_version("cuda")
    if cuda_version is None:
        return PINNED_CUDA_LIBRARIES
    cudnn_version = next(
        (version for name in _CUDNN_PACKAGES if (version := installed_version(name)) is not None),
        "0",
    )
    major, minor, patch = (*map(int, re.findall(r"\d+", cudnn_version)[:3]), 0, 0)[:3]
    return CudaLibraries(
        tuple(map(int, re.findall(r"\d+", cuda_version)[:2])), 10_000 * major + 100 * minor + patch
    )


def torch_build_version(name: Literal["cuda", "hip"]) -> str | None:
    """The version of CUDA, or of ROCm (HIP), that the installed torch was built with, without
    importing it; None for any other build."""
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
            # `cuda: Optional[str] = '13.0'`, or None
            match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([0-9][^'\"]*)['\"]", text, re.MULTILINE)
            return match[1] if match else None
    return None


def nccl_package() -> tuple[str, str] | None:
    """Name and version of the package that provides NCCL; None where torch has none beside it."""
    versions = ((name, installed_version(name)) for name in _NCCL_PACKAGES)
    return next(((name, version) for name, version in versions if version is not None), None)


logger = logging.getLogger(__name__)

MEASURED_LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate")
MeasuredT = TypeVar("MeasuredT")


def load_or_measure(
    cache_name: str,
    key: Mapping[str, Any],
    adapter: TypeAdapter[MeasuredT],
    measure: Callable[[], MeasuredT],
    *,
    cacheable: bool = True,
) -> MeasuredT:
    """Read what was measured before with the libraries' versions and this key from the cache; else
    measure it now. `key`: all that the answer depends on; `cacheable`: whether it may be kept."""
    if not cacheable:
        return measure()
    versions = {name: installed_version(name) or "none" for name in MEASURED_LIBRARIES} | {
        "python": platform.python_version()
    }
    key_text = json.dumps({**key, "versions": versions}, sort_keys=True)
    path = cache_dir() / cache_name / f"{hashlib.sha256(key_text.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValidationError):  # absent, or broken
        return adapter.validate_json(path.read_bytes())
    measured = measure()
    try:
        atomic.write(path, adapter.dump_json(measured).decode())
    except OSError as error:  # a full disk costs the next start its time
        logger.debug("%s cannot be kept: %s", path, error)
    return measured


# --------------------------------------------------------------------------------------------------
# Unsloth's own environment: where it is, what it can do, and how its Python is started. Its pins
# exclude this project's, and importing it patches transformers, PEFT and TRL: it is never imported
# here.

# Names the environment; without it `.venv-unsloth` is used, of the working folder or the checkout.
UNSLOTH_VARIABLE = "UNSLOTH_VENV"
# What `make setup-unsloth` builds.
UNSLOTH_FOLDER = ".venv-unsloth"
WORKER_SCRIPT = Path(__file__).resolve().parents[1] / "training" / "unsloth_worker.py"
# Begins the line in which the worker answers `--probe`; the same as there, where nothing of this
# package is imported before Unsloth.
WORKER_ANSWER_PREFIX = "sft-play answers: "
# Seconds for importing Unsloth; 12 s were measured on two cores of an EPYC (2026-11-22, Unsloth
# 2026.10.9).
PROBE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class UnslothInfo:
    """What Unsloth's environment reports: the device that Unsloth chose (cuda, hip, xpu, cpu), and
    versions."""

    device: str
    versions: Mapping[str, str | None]

    @property
    def versions_text(self) -> str:
        """The packages that compute, with their versions."""
        names = ("unsloth", "unsloth_zoo", "torch", "transformers", "peft", "bitsandbytes")
        return ", ".join(
            f"{name} {self.versions.get(name)}" for name in names if self.versions.get(name)
        )


def find_unsloth_python(environment: Mapping[str, str]) -> Path | None:
    """The Python of Unsloth's environment, if there is one; raises BackendError where UNSLOTH_VENV
    names none."""
    setting = environment.get(UNSLOTH_VARIABLE, "").strip()
    folders = [Path(setting)] if setting else [Path.cwd() / UNSLOTH_FOLDER, ROOT / UNSLOTH_FOLDER]
    pythons = [(folder / "bin" / "python").absolute() for folder in folders]
    python = next((path for path in pythons if os.access(path, os.X_OK)), None)
    if setting and python is None:
        raise BackendError(
            f"{UNSLOTH_VARIABLE}={one_line(setting)} names no environment: there is no program"
            f" {pythons[0]}"
        )
    return python


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for Unsloth's Python, without the paths of this one's packages and without a
    launcher's ranks; Unsloth's count of users is turned off, and its generated code goes into the
    cache."""
    defaults = {
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(cache_dir() / "unsloth"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    variables = {**defaults, **independent_environment(environment)}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ACCELERATE_CONFIG"):
        variables.pop(name, None)
    # else modules beside the worker, such as profile.py, hide the standard library's
    return {**variables, "PYTHONSAFEPATH": "1"}


@functools.cache
def probe_unsloth(python: Path) -> UnslothInfo:
    """What the environment reports after importing Unsloth, asked once; raises BackendError with
    its reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                [str(python), str(WORKER_SCRIPT), "--probe"],
                cwd=folder,
                env=worker_environment(os.environ),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BackendError(
                f"{python} did not import Unsloth within {PROBE_TIMEOUT_S:.0f} s"
            ) from None
        except OSError as error:
            raise BackendError(f"{python} cannot be started: {error.strerror}") from None
    reports = [
        line.removeprefix(WORKER_ANSWER_PREFIX)
        for line in process.stdout.splitlines()
        if line.startswith(WORKER_ANSWER_PREFIX)
    ]
    if not reports:
        lines = [line for line in process.stderr.splitlines() if line.strip()] or [
            f"exit {process.returncode}"
        ]
        raise BackendError(
            f"{python} cannot import Unsloth: {one_line(escape_control(lines[-1]), limit=400)}"
        )
    report: dict[str, Any] = json.loads(reports[-1])
    if "error" in report:
        raise BackendError(
            f"{python} cannot run Unsloth: {one_line(str(report['error']), limit=400)}"
        )
    return UnslothInfo(str(report["device"]), dict(report["versions"]))
