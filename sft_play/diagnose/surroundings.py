"""This machine as a run would find it: packages, driver, shared memory.

The only module of the doctor that reads them; the checks get what was read as arguments.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sft_play.facts.gpus import nvml
from sft_play.facts.hardware import Hardware
from sft_play.facts.host import DiskSpace, disk_space
from sft_play.facts.installed import nccl_package, torch_cuda_version

DISTRIBUTION = "sft-play"
SHM_PATH = Path("/dev/shm")
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@dataclass(frozen=True)
class SystemFacts:
    """What was read. Sizes are in bytes; packages that are not installed are absent."""

    hardware: Hardware
    python: str = ""
    os_name: str = "Linux"
    cpu_architecture: str = "x86_64"
    kernel: str = ""
    hostname: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    torch_cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    shared_memory: DiskSpace | None = None
    """None where /dev/shm is not a separate file system."""
    environment: Mapping[str, str] = field(default_factory=dict)


def read_system_facts(hardware: Hardware, environment: Mapping[str, str]) -> SystemFacts:
    """Read everything about this machine that a check needs; what cannot be read stays unknown."""
    versions: dict[str, str] = {}
    for item in metadata.distributions():
        with contextlib.suppress(Exception):  # a damaged distribution has no name
            versions.setdefault(canonicalize_name(item.name), item.version)  # the first on the path is imported
    driver, driver_cuda = _read_driver() if hardware.gpus else (None, None)
    return SystemFacts(
        hardware=hardware,
        python=platform.python_version(),
        os_name=platform.system(),
        cpu_architecture=platform.machine(),
        kernel=platform.release(),
        hostname=socket.gethostname(),
        versions=versions,
        requirements=_read_requirements(),
        torch_cuda=torch_cuda_version(),
        nccl=(nccl_package() or (None, None))[1],
        driver=driver,
        driver_cuda=driver_cuda,
        shared_memory=disk_space(SHM_PATH) if SHM_PATH.is_mount() else None,
        environment={name: value for name, value in environment.items() if name.startswith("NCCL_")},
    )


def _read_requirements() -> tuple[str, ...]:
    if _PYPROJECT.is_file():
        project: dict[str, Any] = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            return tuple(project.get("dependencies", ()))
    with contextlib.suppress(metadata.PackageNotFoundError):
        return tuple(metadata.requires(DISTRIBUTION) or ())
    return ()


def _read_driver() -> tuple[str | None, tuple[int, int] | None]:
    with contextlib.suppress(Exception), nvml.open_nvml() as library:  # its own exceptions differ between platforms
        return nvml.driver_versions(library)
    return None, None
