"""The doctor's checks of this machine: packages, driver, shared memory, disk, and what is known to
break a run.

`read_system_facts` is the only reader; the checks get what was read as arguments.
"""

import contextlib
import json
import os
import platform
import re
import socket
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sft_play.answers import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.files import ROOT
from sft_play.launch.request import LaunchOptions
from sft_play.launch.run_hardware import has_broken_p2p
from sft_play.log import one_line
from sft_play.machine import nvml
from sft_play.machine.hardware import Hardware
from sft_play.machine.host import DiskSpace, disk_space, nearest_disk_space
from sft_play.machine.software import (
    COMPUTE_PACKAGES,
    LINEAR_ATTENTION_PACKAGE,
    kernel_package_problem,
    nccl_package,
    torch_cuda_version,
)
from sft_play.models.config_json import find_model_folder
from sft_play.models.shape import ModelShape
from sft_play.planner.plan import MORE_SPACE_REMEDY, DiskUsage, Plan, planned_disk_usage
from sft_play.runs.lookup import output_dir
from sft_play.text import GIB, MIB, format_size, plural

SHM_PATH = Path("/dev/shm")
_PYPROJECT = ROOT / "pyproject.toml"


@dataclass(frozen=True)
class SystemFacts:
    """What was read of this machine. Sizes are in bytes; `versions` has the installed packages
    alone."""

    hardware: Hardware
    cpu_architecture: str = "x86_64"
    # Linux's release; None on other systems.
    kernel: str | None = None
    hostname: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    torch_cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    # None where /dev/shm is not a separate file system.
    shared_memory: DiskSpace | None = None


def read_system_facts(hardware: Hardware) -> SystemFacts:
    """Read everything about this machine that a check needs; what cannot be read stays unknown."""
    versions: dict[str, str] = {}
    for item in metadata.distributions():
        with contextlib.suppress(Exception):  # a damaged distribution has no name
            # the first on the path is imported
            versions.setdefault(canonicalize_name(item.name), item.version)
    requirements: tuple[str, ...] = ()
    if _PYPROJECT.is_file():  # the checkout's; pip has checked those of an installed package
        requirements = tuple(
            tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
        )
    driver, driver_cuda = None, None
    if hardware.gpus:
        # its own exceptions differ by platform
        with contextlib.suppress(Exception), nvml.open_nvml() as library:
            driver, driver_cuda = nvml.driver_versions(library)
    return SystemFacts(
        hardware=hardware,
        cpu_architecture=platform.machine(),
        kernel=platform.release() if platform.system() == "Linux" else None,
        hostname=socket.gethostname(),
        versions=versions,
        requirements=requirements,
        torch_cuda=torch_cuda_version(),
        nccl=(nccl_package() or (None, None))[1],
        driver=driver,
        driver_cuda=driver_cuda,
        shared_memory=disk_space(SHM_PATH) if SHM_PATH.is_mount() else None,
    )


# --- packages, driver and shared memory -----------------------------------------------------------


_SHM_SOURCES = (
    "https://github.com/NVIDIA/nccl/issues/342",
    "https://github.com/NVIDIA/nccl/issues/290",
)


def check_packages(versions: Mapping[str, str], requirements: Sequence[str]) -> Finding:
    """Check that every package of `requirements` is installed, in a version that they accept."""
    problems = [
        problem
        for text in requirements
        if (problem := _requirement_problem(Requirement(text), versions))
    ]
    if problems:
        return fail_finding(
            "packages",
            "; ".join(problems),
            "make setup (with VENV=: install them into that environment)",
        )
    return pass_finding(
        "packages",
        ", ".join(f"{name} {versions[name]}" for name in COMPUTE_PACKAGES if name in versions),
    )


def _requirement_problem(requirement: Requirement, versions: Mapping[str, str]) -> str | None:
    # no extra: `; extra == "dev"` is out
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return None
    installed = versions.get(canonicalize_name(requirement.name))
    if installed is None:
        return f"{requirement.name}{requirement.specifier} is missing"
    # a version of somebody's own build cannot be compared
    with contextlib.suppress(InvalidVersion):
        # nightlies of torch are pre-releases
        if not requirement.specifier.contains(installed, prereleases=True):
            return f"{requirement.name} is {installed}, needed {requirement.specifier}"
    return None


def check_torch_build(system_facts: SystemFacts) -> list[Finding]:
    """Compare the CUDA that torch is built for with the newest that the driver runs; without GPUs
    there is nothing to check."""
    torch_version = system_facts.versions.get("torch")
    if torch_version is None or not system_facts.hardware.gpus:
        return []
    if system_facts.torch_cuda is None:
        return [
            fail_finding(
                "driver",
                f"torch {torch_version} is a build without CUDA, but there are GPUs",
                "install torch's CUDA build: make setup (with VENV=: torch from PyPI)",
            )
        ]
    build_text = f"torch {torch_version} is built for CUDA {system_facts.torch_cuda}"
    if system_facts.driver is None or system_facts.driver_cuda is None:
        return [skip_finding("driver", f"NVML does not answer; {build_text}")]
    newest_cuda = ".".join(map(str, system_facts.driver_cuda))
    return [
        pass_finding(
            "driver", f"{system_facts.driver} (CUDA {newest_cuda} and older); {build_text}"
        )
    ]


def check_shared_memory(space: DiskSpace | None, *, gpus_per_node: int) -> Finding:
    """Check that /dev/shm has room for what NCCL puts there."""
    if space is None:
        return skip_finding("shared memory", "/dev/shm is not a separate file system here")
    free_text = f"{format_size(space.free)} free of {format_size(space.total)} at /dev/shm"
    if gpus_per_node < 2:
        return pass_finding("shared memory", free_text)
    remedy = "in a container: docker run --shm-size=8g; else mount -o remount,size=8G /dev/shm"
    # Docker's default, with which NCCL has run out of space
    # (https://github.com/NVIDIA/nccl/issues/342).
    if space.free <= 64 * MIB:
        return fail_finding(
            "shared memory", f"{free_text}: too little for NCCL", remedy, *_SHM_SOURCES
        )
    # NVIDIA's own advice for containers: `--shm-size=1g` (NCCL user guide, troubleshooting, shared
    # memory)
    if space.free < GIB:
        return warn_finding(
            "shared memory", f"{free_text}; NVIDIA advises 1 GiB for NCCL", remedy, *_SHM_SOURCES
        )
    return pass_finding("shared memory", free_text)


# --------------------------------------------------------------------------------------------------
# Combinations of versions, drivers and machines that are known to hang, crash or train wrongly:
# `known_bad.json`.
#
# Each entry rests on a public thread: what happens, and from which version to which. An entry that
# the pinned versions no longer meet stays as long as a user's own environment (`VENV=`) can.

KNOWN_BAD_NAME = "known bad pairs"
KNOWN_BAD_PAIRS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("known_bad.json").read_text(encoding="utf-8")
)["pairs"]


def find_known_bad(
    system_facts: SystemFacts,
    *,
    rank_count: int = 1,
    node_count: int = 1,
    layout: str = "single",
    packages: Collection[str] = (),
) -> list[Finding]:
    """Find the entries of `known_bad.json` that apply; one PASS where none does.

    Args:
        rank_count: the ranks of all nodes.
        layout: of the run, by its name.
        packages: the model's class runs their kernels where they are installed.
    """
    gpus, driver_cuda = system_facts.hardware.gpus, system_facts.driver_cuda
    capabilities = [gpu.capability for gpu in gpus if gpu.capability]
    torch_cuda = _version_text(system_facts.torch_cuda)
    package_problems = [
        kernel_package_problem(name, capability) for name in packages for capability in capabilities
    ]
    uses_nccl = rank_count > 1 and bool(gpus)
    # None is not known: no condition holds for it
    driver_runs_torchs_cuda = None
    if gpus and driver_cuda and torch_cuda:
        driver_runs_torchs_cuda = driver_cuda[0] >= int(torch_cuda.partition(".")[0])
    facts = {
        **{
            name: system_facts.versions.get(name)
            for name in (
                "torch",
                "triton",
                "deepspeed",
                "transformers",
                "peft",
                LINEAR_ATTENTION_PACKAGE,
            )
        },
        "driver": system_facts.driver,
        "driver_cuda": ".".join(map(str, driver_cuda)) if driver_cuda else None,
        "driver_runs_torchs_cuda": driver_runs_torchs_cuda,
        "torch_cuda": system_facts.torch_cuda,
        "nccl": system_facts.nccl,
        "kernel": system_facts.kernel,
        "machine": system_facts.cpu_architecture,
        "oldest_gpu": ".".join(map(str, min(capabilities))) if capabilities else None,
        "desktop_blackwell": any(capability[0] == 12 for capability in capabilities),
        "has_hopper": any(capability[0] == 9 for capability in capabilities),
        "runs_delta_rules": LINEAR_ATTENTION_PACKAGE in packages,
        "unsound": any(package_problems),
        "why_not": next(filter(None, package_problems), ""),
        "ranks": rank_count,
        "nodes": node_count,
        "over_nccl": uses_nccl,
        "layout": layout,
        "accelerate_refuses_p2p": (
            uses_nccl and has_broken_p2p([gpu.name for gpu in gpus], system_facts.driver)
        ),
    }
    findings = [
        Finding(
            KNOWN_BAD_NAME,
            entry["verdict"],
            entry["what"].format(**facts),
            entry["remedy"],
            tuple(entry["sources"]),
        )
        for entry in KNOWN_BAD_PAIRS
        if matches_conditions(entry["when"], facts)
    ]
    return findings or [pass_finding(KNOWN_BAD_NAME, f"none of {len(KNOWN_BAD_PAIRS)} applies")]


def matches_conditions(
    conditions: Mapping[str, Any] | Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> bool:
    """True if the facts meet all requirements of one of the conditions; a fact that is None is not
    known, and meets none."""
    alternatives = [conditions] if isinstance(conditions, Mapping) else conditions
    return any(
        all(_meets_requirement(facts[name], required) for name, required in condition.items())
        for condition in alternatives
    )


def _meets_requirement(fact: Any, required: Any) -> bool:
    if isinstance(required, bool):
        return fact is required
    if isinstance(required, list):
        return fact in required
    version = _version_text(fact)
    return version is not None and version in SpecifierSet(required)


def _version_text(fact: Any) -> str | None:
    """Take the leading numbers: 2.13.0+cu128, 6.8.0-45-generic and 570.86.15 have to compare."""
    match = re.match(r"\d+(?:\.\d+)*", str(fact))
    return match[0] if match else None


# --------------------------------------------------------------------------------------------------
# Disk: the checkpoints that a planned run writes, the final weights, and the model if it must be
# downloaded.


def disk_findings(
    config: RunConfig, shape: ModelShape, plan: Plan, options: LaunchOptions
) -> list[Finding]:
    """Check that the checkpoints and the weights to download fit on their disks."""
    disk_folder, space = nearest_disk_space(hub_cache_folder())
    download = check_download(
        shape, is_cached=has_local_weights(config), disk_folder=disk_folder, space=space
    )
    if options.nodes.rank > 0 and not plan.choice.layout.is_zero:
        return [skip_finding("disk", "node 0 writes checkpoints and the final weights"), download]
    try:
        folder = output_dir(config.output)
    except SftPlayError as error:
        return [
            fail_finding("disk", one_line(str(error), limit=300), "set output.dir to a folder"),
            download,
        ]
    disk_folder, space = nearest_disk_space(folder)
    run_finding = check_disk(
        planned_disk_usage(config, shape, plan),
        folder=folder,
        disk_folder=disk_folder,
        space=space,
        is_writable=os.access(disk_folder, os.W_OK | os.X_OK),
    )
    return [run_finding, download]


def has_local_weights(config: RunConfig) -> bool:
    """True if the model's weights are on this machine already."""
    name = config.model.name
    snapshots = hub_cache_folder() / f"models--{name.replace('/', '--')}" / "snapshots"
    return find_model_folder(name) is not None or any(snapshots.glob("*/*.safetensors"))


def hub_cache_folder() -> Path:
    """Where weights from the hub are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def check_disk(
    disk_usage: DiskUsage,
    *,
    folder: Path,
    disk_folder: Path,
    space: DiskSpace | None,
    is_writable: bool,
) -> Finding:
    """Check that the run's folder is writable and has room for the checkpoints that exist at
    once."""
    if not is_writable:
        return fail_finding(
            "disk",
            f"output.dir {folder}: {disk_folder} is not writable for this user",
            "set output.dir to a folder that you can write, or give this user the folder",
        )
    if space is None:
        return skip_finding("disk", f"the free space at {disk_folder} cannot be read")
    checkpoints = "every checkpoint"
    if disk_usage.max_checkpoints is not None:
        checkpoints = plural(disk_usage.max_checkpoints, "checkpoint")
    needed = (
        f"{checkpoints} of {format_size(disk_usage.checkpoint_bytes)} at once and"
        f" {format_size(disk_usage.weights_bytes)} at the end:"
        f" {format_size(disk_usage.total_bytes)};"
        f" {format_size(space.free)} are free at {disk_folder}"
    )
    if space.free < disk_usage.total_bytes:
        return fail_finding("disk", needed, MORE_SPACE_REMEDY)
    if disk_usage.max_checkpoints is None:
        return warn_finding("disk", needed, "set train.save_total_limit=2")
    return pass_finding("disk", needed)


def check_download(
    shape: ModelShape, *, is_cached: bool, disk_folder: Path, space: DiskSpace | None
) -> Finding:
    """Check that the hub's cache has room for the weights that the run would download."""
    download_bytes = 2 * shape.params  # as models on the hub are, in 16 bits
    if is_cached:
        return skip_finding("disk for the model", "the weights are already here")
    if space is None:
        return skip_finding("disk for the model", f"the free space at {disk_folder} cannot be read")
    message = (
        f"about {format_size(download_bytes)} will be downloaded from the hub;"
        f" {format_size(space.free)} are free at {disk_folder}"
    )
    if space.free < download_bytes:
        return fail_finding(
            "disk for the model", message, "free space, or export HF_HOME=/a/larger/disk"
        )
    return pass_finding("disk for the model", message)
