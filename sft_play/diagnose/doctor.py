"""`make doctor`: all checks in order: the machine (packages, driver, shared memory, disk, and what
is known to break a run), the plan of the config, the other nodes, and the all-reduce of all ranks;
and findings as lines.

Of the machine `read_system_facts` is the only reader; the checks get what was read as arguments.
"""

import contextlib
import json
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion
from rich.table import Table

from sft_play.answers import Answer, Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.files import ROOT
from sft_play.launch.planning import require_usable_hardware
from sft_play.launch.request import LaunchOptions
from sft_play.launch.run_hardware import disable_broken_p2p, has_broken_p2p
from sft_play.launch.torchrun import TORCHRUN_MODULE, torchrun_command
from sft_play.log import escape_control, one_line, redact
from sft_play.machine import nvml
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.host import DiskSpace, disk_space, nearest_disk_space
from sft_play.machine.network import NodeSetup
from sft_play.machine.software import (
    COMPUTE_PACKAGES,
    LINEAR_ATTENTION_PACKAGE,
    kernel_package_problem,
    nccl_package,
    torch_build_version,
)
from sft_play.models.config_json import find_model_folder
from sft_play.models.shape import ModelShape
from sft_play.planner.plan import MORE_SPACE_REMEDY, DiskUsage, Plan, planned_disk_usage
from sft_play.process.environment import LAUNCHER_VARIABLES
from sft_play.process.failures import format_ranks, kill_process_tree
from sft_play.process.signals import raise_interrupt, start_child, supervise
from sft_play.process.waiting import report_wait
from sft_play.runs.folder import read_json
from sft_play.runs.lookup import output_dir
from sft_play.text import GIB, MIB, format_size, plural, render_lines

# --- the checks of this machine -------------------------------------------------------------------
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
        torch_cuda=torch_build_version("cuda"),
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


def check_pinned_memory(pinned_bytes: int, limit: int, *, is_wsl: bool) -> Finding:
    """Check that the system lets a streamed base be pinned; `limit`: bytes that a process may lock,
    negative without one."""
    name, size_text = (
        "pinned memory",
        f"{pinned_bytes / GIB:.1f} GiB of the base stay in pinned RAM",
    )
    if is_wsl:
        return Finding(
            name,
            "WARN",
            f"{size_text}, and WSL has been seen to give 0.5 to 1 GiB: the rest is copied unpinned",
            "start Linux itself for this run, or expect a slower bus",
        )
    if 0 <= limit < pinned_bytes:
        return Finding(
            name,
            "WARN",
            f"{size_text}, and a process may lock {limit / GIB:.1f}: most drivers pin beyond that",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    return pass_finding(name, f"{size_text}, within what a process may lock")


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


# --- the doctor -----------------------------------------------------------------------------------
# --- findings as lines ----------------------------------------------------------------------------


def format_findings(findings: Sequence[Finding], labels: Mapping[str, str]) -> list[str]:
    """Format findings as a table: the verdict (or its label), the name, and the text; below the
    text what to do, and the threads that it rests on."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for min_width in (0, 18, 0):
        rows.add_column(no_wrap=True, overflow="ignore", min_width=min_width)
    for finding in findings:
        lines = [finding.found, *(f"see {source}" for source in finding.sources)]
        if finding.remedy:
            lines.insert(1, f"do: {finding.remedy}")
        label, text = labels.get(finding.verdict, finding.verdict), escape_control("\n".join(lines))
        rows.add_row(label, escape_control(finding.name), text)
    return render_lines(rows, width=None)


@dataclass(frozen=True)
class DoctorReport(Answer):
    """What the doctor found on this machine, in the order of the page, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing FAILs; warnings do not count."""
        return not self.names_by_verdict("FAIL")

    def names_by_verdict(self, verdict: str) -> list[str]:
        """The names of the findings of one verdict."""
        return [finding.name for finding in self.findings if finding.verdict == verdict]

    def lines(self) -> list[str]:
        header = "Nothing FAILs: "
        if failed_names := self.names_by_verdict("FAIL"):
            header = f"{len(failed_names)} FAIL: {', '.join(dict.fromkeys(failed_names))}; "
        counts = ", ".join(
            f"{len(self.names_by_verdict(verdict))} {verdict}"
            for verdict in ("PASS", "WARN", "SKIP")
        )
        return [*format_findings(self.findings, {}), f"{header}{counts} ({self.elapsed_s:.0f} s)"]


# --- the checks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """The run that the doctor checks: its config, the model's shapes, and its plan on this
    machine."""

    config: RunConfig
    shape: ModelShape
    plan: Plan


def run_doctor(
    planner: Callable[[Hardware], PlannedRun],
    options: LaunchOptions,
    *,
    environment: Mapping[str, str] = os.environ,
    uses_cpu: bool = False,
    meeting_s: float = 30.0,
) -> DoctorReport:
    """Check everything that can stop or spoil a run on this machine; nothing is written, and a
    check that cannot be made is a finding.

    Args:
        planner: plans the run for some hardware; raises SftPlayError where that fails.
        options: how the run is launched.
        uses_cpu: True if the run asks for the CPU.
        meeting_s: seconds that the nodes wait for each other: time to start the command by hand on
            the next one.
    """
    start_time_s = time.monotonic()
    machine = detect_hardware(environment)
    if uses_cpu:  # the run must not fail a check for the state of GPUs that it leaves alone
        machine = machine.without_gpus()
    local_machine, all_nodes, gpu_finding = _select_gpus(machine, options)
    planned_run, plan_finding = _plan_run(planner, all_nodes, gpu_finding)
    facts = read_system_facts(local_machine)
    findings = [
        check_packages(facts.versions, facts.requirements),
        gpu_finding,
        *check_torch_build(facts),
        *find_known_bad(
            facts,
            rank_count=local_machine.ranks * options.nodes.count,
            node_count=options.nodes.count,
            layout=planned_run.plan.layout if planned_run else str(options.strategy or ""),
            packages=planned_run.shape.kernel_packages if planned_run else (),
        ),
        check_shared_memory(facts.shared_memory, gpus_per_node=len(local_machine.gpus)),
        plan_finding,
    ]
    if planned_run is not None:
        config, shape = planned_run.config, planned_run.shape
        findings.append(check_run_starts(config, machine, environment, params=shape.params))
        findings += disk_findings(config, shape, planned_run.plan, options)
        if planned_run.plan.choice.layout.is_streamed:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            pinned_bytes = planned_run.plan.choice.host_required
            findings.append(check_pinned_memory(pinned_bytes, limit, is_wsl=machine.pages))
    findings += _multi_rank_findings(facts, options, gpu_finding, environment, meeting_s=meeting_s)
    return DoctorReport(tuple(findings), time.monotonic() - start_time_s)


def _select_gpus(machine: Hardware, options: LaunchOptions) -> tuple[Hardware, Hardware, Finding]:
    """Select the hardware that this node's ranks use; returns it, the same of all nodes, and the
    finding on its GPUs."""
    try:
        local_machine = options.select_hardware(machine, is_one_node=True)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return (
            machine,
            machine,
            fail_finding("GPUs", message, remedy or "GPUS= and NPROC= name GPUs that there are"),
        )
    finding = skip_finding("GPUs", f"none found; {local_machine.ranks} CPU ranks are used instead")
    if local_machine.gpus:
        finding = pass_finding("GPUs", f"{len(local_machine.gpus)} x {local_machine.gpus[0].name}")
    return local_machine, options.select_hardware(machine), finding


def _plan_run(
    planner: Callable[[Hardware], PlannedRun], machine: Hardware, gpu_finding: Finding
) -> tuple[PlannedRun | None, Finding]:
    if gpu_finding.verdict == "FAIL":
        return None, skip_finding("plan", "planning needs identical GPUs that exist; see above")
    try:
        planned_run = planner(machine)
    except SftPlayError as error:
        return None, fail_finding(
            "plan", one_line(str(error), limit=600), "fix it; make plan says more"
        )
    plan = planned_run.plan
    choice = (
        f"{plan.layout} on {machine.ranks} rank{'s' * (machine.ranks > 1)}: {plan.choice.verdict}"
    )
    if plan.fits:
        return planned_run, pass_finding("plan", choice)
    return planned_run, fail_finding(
        "plan", f"nothing fits; the closest: {choice}", "make plan lists suggestions"
    )


def check_run_starts(
    config: RunConfig, machine: Hardware, environment: Mapping[str, str], *, params: int
) -> Finding:
    """Check whether a run would be refused before anything loads: for an accelerator that it would
    not use, a model too large for a CPU, a missing compiler for its kernels."""
    try:
        require_usable_hardware(config, machine, environment, count_params=lambda: params)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return fail_finding("machine", message, remedy or "see docs/setup.md")
    return pass_finding("machine", "a run would start: its device, compiler and kernels are here")


def _multi_rank_findings(
    system_facts: SystemFacts,
    options: LaunchOptions,
    gpu_finding: Finding,
    environment: Mapping[str, str],
    *,
    meeting_s: float,
) -> list[Finding]:
    if "torch" not in system_facts.versions:
        return [skip_finding(ALL_REDUCE_NAME, "torch is not installed")]
    findings, rank_environment = list[Finding](), dict(environment)
    if options.nodes.count > 1:
        variables, finding = check_node_meeting(
            system_facts, options.nodes, environment, limit_s=meeting_s
        )
        findings.append(finding)
        if variables is None:  # ranks would wait for the missing node until their own limit
            return [*findings, skip_finding(ALL_REDUCE_NAME, "the nodes did not meet")]
        rank_environment |= variables
    if gpu_finding.verdict == "FAIL":
        return [
            *findings,
            skip_finding(ALL_REDUCE_NAME, "not over other GPUs than were asked for; see above"),
        ]
    disable_broken_p2p(system_facts.hardware, rank_environment)  # as a run's ranks communicate
    # importing torch from a cold disk takes most of the limit, NCCL's startup up to 10 s on many
    # nodes
    with report_wait("Letting all ranks add up a tensor, for at most 40 s"):
        outcome = run_all_reduce(
            system_facts.hardware, options, limit_s=40.0, environment=rank_environment
        )
    return [*findings, judge_all_reduce(outcome, system_facts, options.nodes)]


def check_node_meeting(
    system_facts: SystemFacts, nodes: NodeSetup, environment: Mapping[str, str], *, limit_s: float
) -> tuple[Mapping[str, str] | None, Finding]:
    """Let all nodes meet before a rank is started; returns the variables by which the ranks find
    each other (None if the nodes did not meet), and the finding, which names missing nodes and what
    differs."""
    from sft_play.launch.nodes import meet_nodes

    versions = {
        f"version of {name}": version
        for name, version in sorted(system_facts.versions.items())
        if name in COMPUTE_PACKAGES or name.startswith("nvidia-nccl")
    }
    card = {
        "host": system_facts.hostname,
        "alike": {
            "command": "doctor",
            "version of Python": platform.python_version(),
            **versions,
            "CUDA of torch": system_facts.torch_cuda or "none",
            "driver": system_facts.driver or "none",
            "GPUs": ", ".join(gpu.name for gpu in system_facts.hardware.gpus) or "none",
            "number of ranks": system_facts.hardware.ranks,
        },
    }
    try:
        variables = meet_nodes(nodes, card, timeout_s=limit_s, environment=environment)
    except SftPlayError as error:
        # The doctor's time limit is fixed: distributed.timeout_s does not change it.
        message = (
            str(error)
            .replace(" (distributed.timeout_s)", "")
            .replace("distributed.timeout_s; ", "")
        )
        return None, fail_finding(
            "nodes",
            one_line(message, limit=800),
            "fix it there, then start make doctor on all nodes within half a minute",
        )
    text = f"{nodes.count} met, with the same packages, driver, GPUs and number of ranks"
    return variables, pass_finding("nodes", text)


# --- an all-reduce over all ranks: started like a run's ranks, ended at a time limit, and judged --

ALL_REDUCE_NAME = "all-reduce"
_ERROR_REMEDY = (
    "fix what the error names; NCCL_DEBUG=INFO make doctor shows more,"
    " docs/diagnose.md what each check needs"
)


@dataclass(frozen=True)
class AllReduceOutcome:
    """What the ranks reported. `reports_by_rank` has this node's ranks, empty where one wrote none;
    `result` is written by rank 0, so only its node has it. `exit_code` is None where the limit
    ended them."""

    world_size: int
    reports_by_rank: Mapping[int, Mapping[str, Any]]
    result: Mapping[str, Any] | None = None
    exit_code: int | None = 0
    output_tail: str = ""
    limit_s: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate over each rank's link: size / time x 2(n-1)/n (nccl-tests,
        doc/PERFORMANCE.md)."""
        if self.result is None or self.world_size == 1:
            return None
        size, seconds = int(self.result["bytes"]), float(self.result["seconds"])
        return size / seconds * 2 * (self.world_size - 1) / self.world_size


def run_all_reduce(
    machine: Hardware, options: LaunchOptions, *, limit_s: float, environment: Mapping[str, str]
) -> AllReduceOutcome:
    """Start this node's ranks, wait at most `limit_s`, and read their reports; no rank survives."""
    local_ranks = len(machine.gpus) or machine.cpu_ranks
    expected_ranks = tuple(
        range(options.nodes.rank * local_ranks, (options.nodes.rank + 1) * local_ranks)
    )
    with tempfile.TemporaryDirectory(prefix="sft-play-doctor-") as folder_name:
        folder = Path(folder_name)
        # the ranks' own limit is shorter, so that they can report what they were waiting for
        timeout_s, device = max(1.0, limit_s - 5.0), "cuda" if machine.gpus else "cpu"
        launch = torchrun_command(
            ["--out", str(folder), "--device", device, "--timeout", str(timeout_s)],
            processes_per_node=local_ranks,
            nodes=options.nodes,
            threads_per_rank=None if machine.gpus else max(1, machine.cpu_cores // local_ranks),
            visible_gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        )
        argv = list(launch.argv)
        # a run's launch with another program: what the check finds out holds for the run
        argv[argv.index("--module") + 1] = "sft_play.diagnose.collective_check"
        # so that it ends with the doctor
        argv.insert(argv.index(TORCHRUN_MODULE), "sft_play.process.signals")
        # torchrun gives ranks their places by these; a launcher above this process may have set
        # its own
        launch_environment = {
            name: value for name, value in environment.items() if name not in LAUNCHER_VARIABLES
        }
        with (folder / "output").open("wb") as output_file:
            process = start_child(
                argv,
                environment={**launch_environment, **launch.environment},
                death_signal=signal.SIGKILL,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=subprocess.STDOUT,
            )
            # Ctrl-C ends the doctor at once, and the ranks with it: they have nothing to save
            with supervise(
                [process],
                on_stop=raise_interrupt,
                kill=lambda launcher: kill_process_tree(launcher.pid),
            ):
                try:
                    exit_code = process.wait(timeout=limit_s)
                except subprocess.TimeoutExpired:
                    exit_code = None
        # The last lines with words: the launcher frames its report with lines of dashes.
        lines = (folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        last_lines = [line.strip() for line in lines if re.search(r"[A-Za-z]{3}", line)][-3:]
        return AllReduceOutcome(
            local_ranks * options.nodes.count,
            reports_by_rank={
                rank: read_json(folder / f"rank-{rank}.json") for rank in expected_ranks
            },
            result=read_json(folder / "result.json") or None,
            exit_code=exit_code,
            output_tail=" | ".join(redact(one_line(line, limit=160)) for line in last_lines),
            limit_s=limit_s,
        )


def judge_all_reduce(
    outcome: AllReduceOutcome, system_facts: SystemFacts, nodes: NodeSetup
) -> Finding:
    """Judge the all-reduce: whether the sum is right, which ranks did not arrive, how fast it
    was."""
    reports, has_gpus = outcome.reports_by_rank, bool(system_facts.hardware.gpus)
    wrong_counts = {
        rank: report["wrong"] for rank, report in reports.items() if report.get("wrong")
    }
    if wrong_counts:
        counts = ", ".join(
            f"rank {rank} has {count} wrong elements" for rank, count in wrong_counts.items()
        )
        remedy = "test the machine's memory: gloo on the CPU returned wrong numbers"
        if has_gpus:
            remedy = (
                "export NCCL_P2P_DISABLE=1 and run make doctor again;"
                " if that fixes it, P2P is broken here"
            )
        return fail_finding(ALL_REDUCE_NAME, f"the sum is wrong: {counts}", remedy)
    is_done = all(report.get("stage") == "done" for report in reports.values())
    if not is_done or (outcome.result is None and nodes.rank == 0):
        return _failure_finding(outcome, system_facts)
    if outcome.result is None:
        text = f"right for this node's part of {outcome.world_size} ranks; node 0 reports on all"
        return pass_finding(ALL_REDUCE_NAME, text)
    text = f"right over {'NCCL' if has_gpus else 'gloo'} on {outcome.world_size} ranks"
    rate, link = outcome.bytes_per_s, system_facts.hardware.link_bytes_per_s
    if rate is not None:
        text += f"; {rate / 1e9:.2f} GB/s a rank"
        if link is not None and nodes.count == 1:
            text += f", {rate / link:.0%} of the {link / 1e9:.0f} GB/s of the link between the GPUs"
            # nccl-tests reach 0.75 to 0.95 of an NVLink's rate; over PCIe data may pass through the
            # host's memory or between sockets, but below 0.15 something is wrong
            if rate < link * 0.15:
                return warn_finding(
                    ALL_REDUCE_NAME,
                    text,
                    "nvidia-smi topo -m and nvlink -s show the links and which are down; unset"
                    " NCCL_P2P_DISABLE",
                )
    return pass_finding(ALL_REDUCE_NAME, text)


# by the last report that a rank of `diagnose.collective_check` wrote
_CHECK_STAGE_TEXTS = {
    "absent": "never started",
    "started": "has not reached its device",
    "device": "is waiting to join the others",
    "joined": "is waiting in the first all-reduce",
    "reduced": "is waiting in a later all-reduce",
    "done": "is done",
    "failed": "gave up",
}


# errors of ranks that only lost another one, or waited for it: it failed first
_SECONDARY_ERRORS = re.compile(
    r"closed by peer|reset by peer|[Tt]imed? ?out|remote process exited|Broken pipe|store",
    re.IGNORECASE,
)


def _failure_finding(outcome: AllReduceOutcome, system_facts: SystemFacts) -> Finding:
    errors = {
        rank: str(report["error"])
        for rank, report in outcome.reports_by_rank.items()
        if "error" in report
    }
    first_error = next(
        (error for error in errors.values() if not _SECONDARY_ERRORS.search(error)), None
    )
    if first_error is not None:
        failed_ranks = format_ranks(
            [rank for rank, error in errors.items() if error == first_error]
        )
        return fail_finding(
            ALL_REDUCE_NAME,
            f"{failed_ranks}: {redact(one_line(first_error, limit=300))}",
            _ERROR_REMEDY,
        )
    ranks_by_stage: dict[str, list[int]] = {}
    for rank, report in outcome.reports_by_rank.items():
        ranks_by_stage.setdefault(str(report.get("stage", "absent")), []).append(rank)
    text = "; ".join(
        f"{format_ranks(ranks)} {_CHECK_STAGE_TEXTS[stage]}"
        for stage, ranks in ranks_by_stage.items()
    )
    if outcome.exit_code is not None and not errors:
        text += f", exit code {outcome.exit_code}: {outcome.output_tail or 'no output'}"
        return fail_finding(ALL_REDUCE_NAME, text, _ERROR_REMEDY)
    if errors:
        text += f" ({one_line(next(iter(errors.values())), limit=200)})"
    text = f"not done after {outcome.limit_s:.0f} s: {text}"
    remedy = (
        "stop other work on this machine and run it again;"
        " each rank needs a core, and all need 1 GiB"
    )
    if outcome.world_size > len(outcome.reports_by_rank):
        remedy = "let the firewall pass all ports between the nodes: ranks choose their own"
    elif system_facts.hardware.gpus:
        remedy = (
            "export NCCL_P2P_DISABLE=1: where that passes, boot with iommu=pt and switch ACS off in"
            " the BIOS (https://github.com/NVIDIA/nccl/issues/2079)"
        )
    return fail_finding(ALL_REDUCE_NAME, text, remedy)
