"""Versions of installed packages, read from their files without importing them, and what was measured with them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sft_play.files import atomic, cache_dir

# Packages that compute on every rank: with two versions of one, two models would be trained.
COMPUTING = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")
# The package with kernels for gated delta rules (Qwen3-Next, Qwen3.5); transformers looks for its module `fla`.
LINEAR_ATTENTION = "flash-linear-attention"
LIGER = "liger-kernel"
# Packages whose kernels run where they are installed, and slower code where not: in transformers' classes, and Liger's
# where `train.kernels` asks for them.
KERNEL_PACKAGES = (LINEAR_ATTENTION, "causal-conv1d", "mamba-ssm", LIGER)
_CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


@functools.cache  # importlib parses a package's whole METADATA for it, 2 ms a package
def version_of(package: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_kernels() -> frozenset[str]:
    """Those of `KERNEL_PACKAGES` that are not installed."""
    return frozenset(name for name in KERNEL_PACKAGES if version_of(name) is None)


def unsound(package: str, capability: tuple[int, int] | None) -> str:
    """Why not to install a package for such a GPU; empty: nothing is known against its kernels.
    fla-org/flash-linear-attention, issues 913 (misaligned addresses with 0.5.0, NaN until 0.5.1), 999 (a backward pass
    that hangs), 945 and 1228 (a race, until 0.5.2); the settings of kernels that 0.6.0 leaves out are in its code."""
    if package != LINEAR_ATTENTION or capability is None or capability[0] not in (10, 12):
        return ""
    return (
        "on Blackwell its releases before 0.6.0 stop with a misaligned address, hang, or compute NaN or something else "
        "each time; 0.6.0 leaves out the settings that did, and no training with it there is known"
    )


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built with, without importing it; None for a CPU build."""
    return _built_with("cuda")


@dataclass(frozen=True)
class CudaLibraries:
    """The CUDA that torch is built for, and cuDNN's version as torch numbers it: 9.20.0 is 92000; 0: none is known. The
    defaults are those of the pinned torch from PyPI (2.13.0: CUDA 13.0, nvidia-cudnn-cu13 9.20.0.48). Its build for
    CUDA 12.6 has cuDNN 9.10.2."""

    cuda: tuple[int, ...] = (13, 0)
    cudnn: int = 92000


PINNED = CudaLibraries()


def cuda_libraries() -> CudaLibraries:
    """Those of the installed torch; the pinned one's where it is a build without CUDA: the plan is for another
    machine."""
    built = torch_cuda()
    if built is None:
        return PINNED
    found = next((version for name in _CUDNN_PACKAGES if (version := version_of(name)) is not None), "0")
    major, minor, patch = (*map(int, re.findall(r"\d+", found)[:3]), 0, 0)[:3]
    return CudaLibraries(tuple(map(int, re.findall(r"\d+", built)[:2])), 10_000 * major + 100 * minor + patch)


def torch_hip() -> str | None:
    """The ROCm (HIP) version that the installed torch was built with; None for any other build."""
    return _built_with("hip")


def _built_with(what: str) -> str | None:
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
            # `cuda: Optional[str] = '13.0'`, or None
            match = re.search(rf"^{what}\b[^=\n]*=\s*['\"]([0-9][^'\"]*)['\"]", text, re.MULTILINE)
            return match[1] if match else None
    return None


def nccl_package() -> tuple[str, str] | None:
    """Name and version of the package that provides NCCL; None where torch has none beside it."""
    for name in _NCCL_PACKAGES:
        if (version := version_of(name)) is not None:
            return name, version
    return None


logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate")
Found = TypeVar("Found")


def remembered(
    kind: str,
    decides: Mapping[str, Any],
    form: TypeAdapter[Found],
    measure: Callable[[], Found],
    *,
    keeps: bool = True,
) -> Found:
    """What was measured with the libraries' versions and these values before, read from the cache; else measured now.
    `decides`: all that the answer depends on; `keeps`: whether it may be kept."""
    if not keeps:
        return measure()
    versions = {name: version_of(name) or "none" for name in LIBRARIES} | {"python": platform.python_version()}
    text = json.dumps({**decides, "versions": versions}, sort_keys=True)
    path = cache_dir() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValidationError):  # absent, or broken
        return form.validate_json(path.read_bytes())
    found = measure()
    try:
        atomic.write(path, form.dump_json(found).decode())
    except OSError as error:  # a full disk costs the next start its time
        logger.debug("%s cannot be kept: %s", path, error)
    return found
