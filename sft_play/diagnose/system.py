"""Packages and shared memory. The checks read nothing themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sft_play.facts.host import DiskSpace
from sft_play.facts.installed import COMPUTE_PACKAGES
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.units import GIB, MIB, format_size

# Docker's default, with which NCCL has run out of space (https://github.com/NVIDIA/nccl/issues/342).
DOCKER_SHM_BYTES = 64 * MIB
# NVIDIA's own advice for containers: `--shm-size=1g` (NCCL user guide, troubleshooting, shared memory).
NCCL_ADVISED_SHM_BYTES = GIB

_SHM_SOURCES = ("https://github.com/NVIDIA/nccl/issues/342", "https://github.com/NVIDIA/nccl/issues/290")


def check_packages(versions: Mapping[str, str], requirements: Sequence[str]) -> Finding:
    """Check that every package is installed in a version that the project accepts (`requirements`)."""
    problems = [problem for text in requirements if (problem := _requirement_problem(Requirement(text), versions))]
    if problems:
        return fail_finding(
            "packages", "; ".join(problems), "make setup (with VENV=: install them into that environment)"
        )
    versions_text = ", ".join(f"{name} {versions[name]}" for name in COMPUTE_PACKAGES if name in versions)
    return (
        pass_finding("packages", versions_text)
        if requirements
        else skip_finding("packages", f"{versions_text}: no ranges")
    )


def _requirement_problem(requirement: Requirement, versions: Mapping[str, str]) -> str | None:
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):  # no extra: `; extra == "dev"` is out
        return None
    installed = versions.get(canonicalize_name(requirement.name))
    if installed is None:
        return f"{requirement.name}{requirement.specifier} is missing"
    with contextlib.suppress(InvalidVersion):  # a version of somebody's own build cannot be compared
        if not requirement.specifier.contains(installed, prereleases=True):  # nightlies of torch are pre-releases
            return f"{requirement.name} is {installed}, needed {requirement.specifier}"
    return None


def check_shared_memory(space: DiskSpace | None, *, gpus_per_node: int) -> Finding:
    """Whether /dev/shm has room for what NCCL puts there."""
    if space is None:
        return skip_finding("shared memory", "/dev/shm is not a separate file system here")
    free_text = f"{format_size(space.free)} free of {format_size(space.total)} at /dev/shm"
    if gpus_per_node < 2:
        return pass_finding("shared memory", free_text)
    remedy = (
        "in a container: docker run --shm-size=8g (or --ipc=host; Kubernetes: an emptyDir with medium Memory at "
        "/dev/shm); else mount -o remount,size=8G /dev/shm"
    )
    if space.free <= DOCKER_SHM_BYTES:
        return fail_finding("shared memory", f"{free_text}: too little for NCCL", remedy, *_SHM_SOURCES)
    if space.free < NCCL_ADVISED_SHM_BYTES:
        return warn_finding("shared memory", f"{free_text}; NVIDIA advises 1 GiB for NCCL", remedy, *_SHM_SOURCES)
    return pass_finding("shared memory", free_text)
