"""This machine as a run would find it: packages, driver, state of the GPUs, shared memory.

The only module of the doctor that reads them; the checks get what was read as arguments.
"""

from __future__ import annotations

import contextlib
import os
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
from sft_play.facts.gpus.gpu import Gpu
from sft_play.facts.hardware import Hardware
from sft_play.facts.host import Space, space_of
from sft_play.facts.installed import nccl_package, torch_cuda

DISTRIBUTION = "sft-play"
SHM = Path("/dev/shm")
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@dataclass(frozen=True)
class GpuState:
    """One GPU's health as the driver reports it; None: not reported.

    `others` are the other processes on it: pid and bytes.
    """

    index: int
    compute_mode: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    uncorrected_errors: int | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None

    @property
    def is_told(self) -> bool:
        """Whether the driver reports anything of its health to this user."""
        told = (self.compute_mode, self.uncorrected_errors, self.remap_failed)
        return bool(self.others) or any(value is not None for value in told)


@dataclass(frozen=True)
class Surroundings:
    """What was read. Sizes are in bytes; packages that are not installed are absent."""

    hardware: Hardware
    python: str = ""
    system: str = "Linux"
    machine: str = "x86_64"
    kernel: str = ""
    host: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    """What the project requires of other packages."""
    python_wanted: str = ""
    torch_cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[GpuState, ...] = ()
    shm: Space | None = None
    """None where /dev/shm is not a separate file system."""
    environment: Mapping[str, str] = field(default_factory=dict)


def read_surroundings(hardware: Hardware, environment: Mapping[str, str]) -> Surroundings:
    """Read everything about this machine that a check needs; what cannot be read stays unknown."""
    installed: dict[str, str] = {}
    for item in metadata.distributions():
        with contextlib.suppress(Exception):  # a damaged distribution has no name
            installed.setdefault(canonicalize_name(item.name), item.version)  # the first on the path is imported
    driver, driver_cuda, states = _driver(hardware.gpus)
    project = _project()
    return Surroundings(
        hardware=hardware,
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        kernel=platform.release(),
        host=socket.gethostname(),
        versions=installed,
        requirements=tuple(project.get("dependencies", ())),
        python_wanted=project.get("requires-python", ""),
        torch_cuda=torch_cuda(),
        nccl=(nccl_package() or (None, None))[1],
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=states,
        shm=space_of(SHM) if SHM.is_mount() else None,
        environment={name: value for name, value in environment.items() if name.startswith("NCCL_")},
    )


def _project() -> dict[str, Any]:
    """The project's metadata: from `pyproject.toml` beside the package, or from the installed distribution."""
    if _PYPROJECT.is_file():
        project: dict[str, Any] = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            return project
    try:
        installed = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return {}
    return {
        "dependencies": metadata.requires(DISTRIBUTION) or [],
        "requires-python": (installed.get_all("Requires-Python") or [""])[0],
    }


def _driver(gpus: tuple[Gpu, ...]) -> tuple[str | None, tuple[int, int] | None, tuple[GpuState, ...]]:
    """The driver's version, the newest CUDA it can run, and the states of those GPUs that it tells anything of; None
    without NVML."""
    if not gpus:
        return None, None, ()
    try:
        with nvml.opened() as library:
            states = (_state(library, gpu) for gpu in gpus)
            return *nvml.driver(library), tuple(state for state in states if state.is_told)
    except Exception:  # NVML raises its own exceptions, which differ between platforms
        return None, None, ()


def _state(library: Any, gpu: Gpu) -> GpuState:
    handle = nvml.ask(library, "nvmlDeviceGetHandleByIndex", gpu.index)

    def ask(name: str, *arguments: Any) -> Any:
        return nvml.ask(library, name, handle, *arguments)

    remapped = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    busy = ask("nvmlDeviceGetComputeRunningProcesses") or []
    return GpuState(
        index=gpu.index,
        compute_mode=ask("nvmlDeviceGetComputeMode"),
        others=tuple((int(item.pid), int(item.usedGpuMemory or 0)) for item in busy if item.pid != os.getpid()),
        # volatile: since the driver was loaded; the aggregate count remembers errors of years ago
        uncorrected_errors=ask(
            "nvmlDeviceGetTotalEccErrors", library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
        ),
        remap_failed=bool(remapped[3]) if remapped else None,
        remap_pending=bool(remapped[2]) if remapped else None,
    )
