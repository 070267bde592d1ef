"""This machine for training: GPUs, driver, host, packages, disk; and what is known to break a run on
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.launch.machine import P2P_OFF_VARIABLES, has_broken_p2p
from sft_play.launch.request import LaunchOptions
from sft_play.log import one_line
from sft_play.machine import nvml
from sft_play.machine.gpu import GpuSnapshot
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.host import DiskSpace, disk_space, nearest_disk_space
from sft_play.machine.software import (
    COMPUTE_PACKAGES,
    LINEAR_ATTENTION_PACKAGE,
    installed_version,
    kernel_package_problem,
    nccl_package,
    torch_cuda_version,
    torch_hip_version,
)
from sft_play.machine.visible_gpus import find_unusable_accelerator
from sft_play.models.config_json import find_model_folder
from sft_play.models.shape import ModelShape
from sft_play.planner.disk import MORE_SPACE_REMEDY, DiskUsage, planned_disk_usage
from sft_play.planner.plan import Plan
from sft_play.runs.lookup import output_dir
from sft_play.text import GIB, MIB, format_size

# This machine for training: GPUs, driver, host, disk; in under a second and without importing
# torch.

# An import of torch from a cold network disk takes a minute and more.
TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class HostInfo:
    """The machine around the GPUs: cores, RAM as far as this process may use it, and the disk of the run folders."""

    cpu: str
    physical_cores: int | None
    logical_cores: int | None
    usable_cores: int
    ram_bytes: int
    ram_free_bytes: int
    outputs: str
    disk_folder: str
    """The nearest folder above the outputs that exists."""
    disk_bytes: int | None
    disk_free_bytes: int | None


@dataclass(frozen=True)
class SoftwareVersions:
    """Versions of what computes on GPUs, read without importing it; None: not installed."""

    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    nccl: str | None
    nccl_package: str | None


@dataclass(frozen=True)
class MachineInfo:
    """One look at this machine. `visible_gpus` are the indices of the GPUs that a run here would see, in its
    order; `torch_report` is torch's own, None where it was not asked."""

    gpu_snapshot: GpuSnapshot
    visible_gpus: tuple[int, ...]
    visible_setting: str | None
    hardware: Hardware
    host: HostInfo
    software: SoftwareVersions
    torch_report: list[str] | None = None
    unused_accelerator: str | None = None
    """An accelerator of this machine that a run would not see."""

    @property
    def gpu_count(self) -> int:
        """GPUs, or instances of split ones, that a run here would see."""
        return len(self.hardware.gpus)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: bytes, watts and degrees Celsius as numbers, null where the driver does not say."""
        snapshot = asdict(self.gpu_snapshot)
        return {
            "number_of_gpus": self.gpu_count,
            "assumed": False,
            "source": snapshot["source"],
            "visible_setting": self.visible_setting,
            "visible_gpus": list(self.visible_gpus),
            "usable_by_a_plan": self.gpu_count > 0,
            "notes": list(self.hardware.notes),
            "gpus": snapshot["gpus"],
            "topology": snapshot["topology"],
            "driver": {"version": snapshot["driver"], "newest_cuda": snapshot["driver_cuda"]},
            "host": asdict(self.host),
            "software": asdict(self.software),
            "torch": self.torch_report,
            "unused_accelerator": self.unused_accelerator,
            "without_a_gpu": cpu_capabilities() if not self.gpu_count else [],
        }


def read_machine_info(outputs: Path, environment: Mapping[str, str], *, includes_torch: bool = False) -> MachineInfo:
    """This machine, as a run with `environment` would see it, with the disk of the run folders (`outputs`);
    `includes_torch`: torch is asked too, in a process of its own."""
    hardware = detect_hardware(environment)
    gpu_snapshot = read_all_gpus()
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    nccl_name, nccl_version = nccl_package() or (None, None)
    disk_folder, disk = nearest_disk_space(outputs)
    return MachineInfo(
        gpu_snapshot=gpu_snapshot,
        visible_gpus=tuple(dict.fromkeys(gpu.index for gpu in hardware.gpus)),
        visible_setting=None if visible_devices is None else f"CUDA_VISIBLE_DEVICES={visible_devices}",
        hardware=hardware,
        host=HostInfo(
            cpu=hardware.cpu_name,
            physical_cores=psutil.cpu_count(logical=False),
            logical_cores=psutil.cpu_count(),
            usable_cores=hardware.cpu_cores,
            ram_bytes=hardware.ram_bytes,
            ram_free_bytes=hardware.ram_free_bytes,
            outputs=str(outputs),
            disk_folder=str(disk_folder),
            disk_bytes=disk.total if disk else None,
            disk_free_bytes=disk.free if disk else None,
        ),
        software=SoftwareVersions(
            installed_version("torch"), torch_cuda_version(), torch_hip_version(), nccl_version, nccl_name
        ),
        torch_report=read_torch_report(environment) if includes_torch else None,
        unused_accelerator=None if hardware.gpus else find_unusable_accelerator(environment),
    )


def read_all_gpus(*, includes_topology: bool = True) -> GpuSnapshot:
    """Every GPU of this machine, visible to this process or not."""
    return nvml.gpu_snapshot(topology=includes_topology) or GpuSnapshot()


def read_torch_report(environment: Mapping[str, str], *, timeout_s: float = TORCH_TIMEOUT_S) -> list[str]:
    """Torch's own report of its build and of the GPUs that it sees, line by line (`torch.utils.collect_env`)."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.utils.collect_env"]
    try:
        result = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"it did not answer: {one_line(str(error))}"]
    if result.returncode:
        last_line = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return [f"it ended with exit code {result.returncode}: {one_line(last_line)}"]
    report = result.stdout.partition("\nCPU:")[0]  # the rest is of the machine, and known
    return [one_line(line) for line in report.splitlines()[1:] if line.strip()]


def cpu_capabilities() -> list[str]:
    """What works on a machine without a GPU that can be used."""
    return [
        "make plan HARDWARE=2xH200 plans for any GPU in the catalogue, or for one that you describe",
        "make train trains on the CPU: the starter, and models of a few million parameters",
        "make train-distributed runs every layout over CPU ranks (ddp, fsdp, ZeRO-1 to 3, with and without offload)",
        "make verify-layouts and make doctor work as they do with GPUs",
    ]


# --------------------------------------------------------------------------------------------------
# This machine as a run would find it: packages, driver, shared memory.
#
# `read_system_facts` is the only reader; the checks get what was read as arguments.

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


# --------------------------------------------------------------------------------------------------
# Packages and shared memory. The checks read nothing themselves.

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


# --------------------------------------------------------------------------------------------------
# Combinations of versions, drivers and machines that are known to hang, crash or train wrongly:
# `known_bad.json`.
#
# Each entry rests on a public thread: what happens, and from which version to which. An entry that
# the pinned versions no longer meet stays as long as a user's own environment (`VENV=`) can.
# `errors` are texts of ranks that failed, the first that fits counts.

Condition = Mapping[str, Any]
# None: not known, which meets no condition.
Facts = Mapping[str, Any]


def matches_conditions(conditions: Condition | Sequence[Condition], facts: Facts) -> bool:
    """True if the facts meet a condition, or one of several."""
    alternatives = [conditions] if isinstance(conditions, Mapping) else conditions
    return any(
        all(_meets_requirement(facts[name], required) for name, required in condition.items())
        for condition in alternatives
    )


def _meets_requirement(fact: Any, required: Any) -> bool:
    if fact is None:
        return False
    if isinstance(required, bool):
        return fact is required
    if isinstance(required, list):
        return fact in required
    # the leading numbers alone: 2.13.0+cu128, 6.8.0-45-generic and 570.86.15 have to compare
    match = re.match(r"\d+(?:\.\d+)*", str(fact))
    return match is not None and match[0] in SpecifierSet(required)


KNOWN_BAD_NAME = "known bad pairs"
_COMPARED_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "peft")

KNOWN_BAD_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("known_bad.json").read_text(encoding="utf-8"))

_DEFAULT_ERROR_REMEDY = ("NCCL_DEBUG=INFO make doctor shows more; docs/diagnose.md says what each check needs",)


def find_known_bad(
    system_facts: SystemFacts,
    *,
    rank_count: int = 1,
    node_count: int = 1,
    layout: str = "single",
    packages: Collection[str] = (),
) -> list[Finding]:
    """Find the entries that apply, else a PASS. `rank_count`: of all nodes. `packages`: whose kernels the model's
    class runs where they are installed."""
    facts = _combination_facts(system_facts, packages, rank_count=rank_count, node_count=node_count, layout=layout)
    shown_facts = {name: "?" if value is None else value for name, value in facts.items()}
    findings = [
        Finding(
            KNOWN_BAD_NAME,
            entry["verdict"],
            entry["what"].format(**shown_facts),
            entry["remedy"],
            tuple(entry["sources"]),
        )
        for entry in KNOWN_BAD_TABLE["pairs"]
        if matches_conditions(entry["when"], facts)
    ]
    return findings or [pass_finding(KNOWN_BAD_NAME, f"none of {len(KNOWN_BAD_TABLE['pairs'])} applies")]


def error_remedies(error: str) -> tuple[str, ...]:
    """The remedy for the error of a rank, and the threads on it."""
    for entry in KNOWN_BAD_TABLE["errors"]:
        if re.search(entry["pattern"], error, re.IGNORECASE):
            return entry["remedy"], *entry["sources"]
    return _DEFAULT_ERROR_REMEDY


def _combination_facts(
    system_facts: SystemFacts, packages: Collection[str], *, rank_count: int, node_count: int, layout: str
) -> Facts:
    gpus = system_facts.hardware.gpus
    capabilities = [gpu.capability for gpu in gpus if gpu.capability]
    torch_cuda, driver_cuda = _version_numbers(system_facts.torch_cuda), system_facts.driver_cuda
    unsound_reason = next(
        filter(None, (kernel_package_problem(name, capability) for name in packages for capability in capabilities)), ""
    )
    uses_nccl = rank_count > 1 and bool(gpus)
    is_p2p_off = P2P_OFF_VARIABLES.keys() <= system_facts.environment.keys()
    return {
        **{name: system_facts.versions.get(name) for name in (*_COMPARED_PACKAGES, LINEAR_ATTENTION_PACKAGE)},
        "driver": system_facts.driver,
        "driver_cuda": ".".join(map(str, driver_cuda)) if driver_cuda else None,
        "driver_runs_torchs_cuda": driver_cuda[0] >= torch_cuda[0] if gpus and driver_cuda and torch_cuda else None,
        "torch_cuda": system_facts.torch_cuda,
        "nccl": system_facts.nccl,
        "kernel": system_facts.kernel if system_facts.os_name == "Linux" else None,
        "machine": system_facts.cpu_architecture,
        "oldest_gpu": ".".join(map(str, min(capabilities))) if capabilities else None,
        "desktop_blackwell": any(capability[0] == 12 for capability in capabilities),
        "has_hopper": any(capability[0] == 9 for capability in capabilities),
        "runs_delta_rules": LINEAR_ATTENTION_PACKAGE in packages,
        "unsound": unsound_reason != "",
        "why_not": unsound_reason,
        "ranks": rank_count,
        "nodes": node_count,
        "over_nccl": uses_nccl,
        "layout": layout,
        "accelerate_refuses_p2p": uses_nccl
        and not is_p2p_off
        and has_broken_p2p([gpu.name for gpu in gpus], system_facts.driver),
    }


def _version_numbers(version: str | None) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cu130; empty where there is none."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(map(int, match[0].split("."))) if match else ()


# --------------------------------------------------------------------------------------------------
# Disk: the checkpoints that a planned run writes, the final weights, and the model if it must be
# downloaded.

# Bytes per parameter of models on the hub.
HUB_BYTES_PER_PARAM = 2


def disk_findings(config: RunConfig, shape: ModelShape, plan: Plan, options: LaunchOptions) -> list[Finding]:
    """Whether the weights to download and the checkpoints fit on their disks."""
    disk_folder, space = nearest_disk_space(hub_cache_folder())
    download = check_download(shape, is_cached=has_local_weights(config), disk_folder=disk_folder, space=space)
    if options.nodes.rank > 0 and not plan.choice.layout.is_zero:
        return [skip_finding("disk", "node 0 writes checkpoints and the final weights"), download]
    try:
        folder = output_dir(config.output)
    except SftPlayError as error:
        return [fail_finding("disk", one_line(str(error), limit=300), "set output.dir to a folder"), download]
    disk_folder, space = nearest_disk_space(folder)
    disk_usage, is_writable = planned_disk_usage(config, shape, plan), os.access(disk_folder, os.W_OK | os.X_OK)
    return [
        check_disk(disk_usage, folder=folder, disk_folder=disk_folder, space=space, is_writable=is_writable),
        download,
    ]


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
    disk_usage: DiskUsage, *, folder: Path, disk_folder: Path, space: DiskSpace | None, is_writable: bool
) -> Finding:
    """Whether the run's folder is writable and has room for the checkpoints that exist at once."""
    if not is_writable:
        return fail_finding("disk", f"output.dir {folder}: {disk_folder} is not writable for this user",
                      "set output.dir to a folder that you can write, or give this user the folder")  # fmt: skip
    if space is None:
        return skip_finding("disk", f"the free space at {disk_folder} cannot be read")
    checkpoint_text, free_text = (
        f"checkpoint of {format_size(disk_usage.checkpoint_bytes)}",
        f"{format_size(space.free)} are free at {disk_folder}",
    )
    if disk_usage.max_checkpoints is None:
        verdict = fail_finding if space.free < disk_usage.total_bytes else warn_finding
        return verdict("disk", f"every {checkpoint_text} is kept, and {free_text}", "set train.save_total_limit=2")
    checkpoint_size = format_size(disk_usage.checkpoint_bytes)
    several_text = (
        f"{disk_usage.max_checkpoints} checkpoints of {checkpoint_size} at once (the oldest is deleted after a new one)"
    )
    written_text = f"a {checkpoint_text}" if disk_usage.max_checkpoints == 1 else several_text
    sizes = f"{format_size(disk_usage.weights_bytes)} at the end: {format_size(disk_usage.total_bytes)}"
    needed = f"{written_text} and {sizes}; {free_text}"
    if space.free < disk_usage.total_bytes:
        return fail_finding("disk", needed, MORE_SPACE_REMEDY)
    return pass_finding("disk", needed)


def check_download(shape: ModelShape, *, is_cached: bool, disk_folder: Path, space: DiskSpace | None) -> Finding:
    """Whether the hub's cache has room for the weights that the run would download."""
    download_bytes = HUB_BYTES_PER_PARAM * shape.params
    if is_cached:
        return skip_finding("disk for the model", "the weights are already here")
    if space is None:
        return skip_finding("disk for the model", f"the free space at {disk_folder} cannot be read")
    message = (
        f"about {format_size(download_bytes)} will be downloaded from the hub; {format_size(space.free)} are free at "
        f"{disk_folder}"
    )
    if space.free < download_bytes:
        return fail_finding("disk for the model", message, "free space, or export HF_HOME=/a/larger/disk")
    return pass_finding("disk for the model", message)
