"""Which build of torch this machine can run, where to get it, and its size on the network and on
the disk.

The package index has one build of torch for Linux, pytorch.org has all of them. The driver decides:
a build for CUDA 13 does not run on a driver before 580, and one for CUDA 12.6 has no kernels for
GPUs newer than Hopper. Standard library only, and nothing newer than Python 3.6, like setup_env.py,
which asks here before it installs.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

VERSION = "2.13.0"
"""The version of torch that the tables below are for; a test fails when requirements.lock pins
another."""
WHEELS = "https://download.pytorch.org/whl/"
OF_INDEX = "index"
"""The build that the user's package index has, whichever it is."""
FAMILY = ("torch", "torchvision")
"""Packages that must be of the same build."""
MIB = 2**20

Capability = Tuple[int, int]


class Build(NamedTuple):
    """A build of torch for Linux: what runs it, and the MiB of the whole environment with it (None:
    not known)."""

    label: str
    driver: Tuple[int, ...]  # the oldest of NVIDIA's that runs it; empty: needs none
    oldest: Capability  # GPUs that it has kernels for
    newest: Capability
    download: Optional[int]
    disk: Optional[int]


# Drivers: NVIDIA's CUDA release notes, table of minor version compatibility (CUDA 12: 525.60.13,
# CUDA 13: 580). Builds and GPUs of torch 2.13: github.com/pytorch/pytorch/pull/187075, issues
# 172663 and 178665; from 12.0 on PTX. MiB, Linux x86_64, 2026-11-22. CPU: measured. CUDA 13.0:
# sizes of the wheels, and what they unpack to. CUDA 12.6: sizes of the wheels (torch's: 830 MB, as
# 2.11 had), unpacked at the ratios of those for CUDA 13.0.
BUILDS: Dict[str, Build] = {
    "cu130": Build("CUDA 13.0", (580,), (7, 5), (99, 0), 2850, 5800),
    "cu126": Build("CUDA 12.6", (525, 60, 13), (5, 0), (9, 0), 3650, 7000),
    "rocm7.2": Build("ROCm 7.2", (), (0, 0), (0, 0), None, None),
    "cpu": Build("the CPU", (), (0, 0), (0, 0), 430, 1870),
}


class BuildError(Exception):
    """No build can be chosen; the text is the whole message."""


class Machine(NamedTuple):
    """The facts that decide which build runs here."""

    system: str  # as sys.platform says
    arch: str
    driver: str = ""  # version of NVIDIA's; empty without one
    gpus: Tuple[
        Tuple[str, Capability], ...
    ] = ()  # NVIDIA's: name, compute capability; empty where unknown


class Choice(NamedTuple):
    """The chosen build, the index that has it (None: the user's own), and why."""

    name: str
    source: Optional[str]
    why: str
    # whether kernels for CUDA are of use beside it
    has_cuda: bool = False


# What is there


def this_machine() -> Machine:
    """This machine, from NVIDIA's own tool or the kernel's files; nothing of torch is needed."""
    system = "linux" if sys.platform.startswith("linux") else sys.platform
    asked = ["--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    for tool in ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"):
        driver, gpus = read_smi(output([tool, *asked]))
        if driver:
            return Machine(system, platform.machine(), driver, gpus)
    return Machine(system, platform.machine(), read_kernel(text_of("/proc/driver/nvidia/version")))


def output(command: Sequence[str]) -> str:
    """What a program prints; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return os.fsdecode(done.stdout)


def text_of(path: str) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_smi(text: str) -> Tuple[str, Tuple[Tuple[str, Capability], ...]]:
    """Driver and GPUs of nvidia-smi's lines, such as `580.65.06, 8.9, NVIDIA L4`."""
    rows = re.findall(r"^(\d+(?:\.\d+)+), (\d+)\.(\d+), (.+?)\s*$", text, re.MULTILINE)
    gpus = tuple((name, (int(major), int(minor))) for _, major, minor, name in rows)
    return (rows[0][0] if rows else ""), gpus


def read_kernel(text: str) -> str:
    """The driver's version as its kernel module reports it; empty where no module is loaded."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else ""


# Which build


def asked_build(environ: Mapping[str, str]) -> str:
    """What TORCH= asks for: a build's name, `auto`, or empty; raises for anything else."""
    asked = environ.get("TORCH", "")
    if re.fullmatch(r"|auto|cpu|cu\d{3}|rocm\d+\.\d+|" + OF_INDEX, asked):
        return asked
    version = re.fullmatch(r"\d+(\.\d+)+", asked)
    raise BuildError(
        f"TORCH={asked} was asked for, which is"
        f" {'a version' if version else 'not a build of torch'}.\n  make setup takes"
        f" {', '.join(BUILDS)}, {OF_INDEX} (what your package index has) or auto (what the driver"
        " runs); make -C benchmarks lock TORCH=X.Y.Z changes the version"
    )


def choose(machine: Machine, asked: str = "", configured: str = "") -> Choice:
    """The build to install: the one asked for, that of a configured index, else what this machine
    runs."""
    if asked not in ("", "auto"):
        name, why = asked, f"as TORCH={asked} asks"
    elif configured:
        name, why = OF_INDEX, f"{configured}, and no other build was asked for"
    else:
        name, why = fitting(machine)
    of_index = name == OF_INDEX or (not configured and name == on_package_index(machine))
    # what an index of the user's has is not known: the driver says what the machine is for
    has_cuda = name.startswith("cu") or (name == OF_INDEX and bool(machine.driver))
    return Choice(name, None if of_index else WHEELS + name, why, has_cuda)


def fitting(machine: Machine) -> Tuple[str, str]:
    """Name of the build that runs here, and why; raises where a driver runs none."""
    if machine.system != "linux" or machine.arch not in ("x86_64", "aarch64"):
        return OF_INDEX, f"the one build for {machine.system} on {machine.arch}"
    if machine.driver:
        for name in BUILDS:
            if BUILDS[name].driver and not obstacles(machine, BUILDS[name]):
                return name, f"NVIDIA's driver {machine.driver} runs it"
        raise BuildError(refusal(machine))
    return (
        "cpu",
        "no driver of NVIDIA's was found; make setup TORCH=cu130 builds for machines with one",
    )


def on_package_index(machine: Machine) -> str:
    """The build that the public package index has for a machine
    (github.com/pytorch/pytorch/issues/168065)."""
    if machine.system != "linux":
        return OF_INDEX
    return {"x86_64": "cu130", "aarch64": "cpu"}.get(machine.arch, OF_INDEX)


def obstacles(machine: Machine, build: Build) -> List[str]:
    """Why a build for CUDA does not run here."""
    reasons = []
    if version_of(machine.driver) < build.driver:
        reasons.append(f"needs driver {'.'.join(map(str, build.driver))} or newer")
    for name, capability in dict.fromkeys(machine.gpus):
        if not build.oldest <= capability <= build.newest:
            reasons.append(
                f"has no kernels for {name} (capability {capability[0]}.{capability[1]})"
            )
    return reasons


def version_of(text: str) -> Tuple[int, ...]:
    """550.54.15 as (550, 54, 15)."""
    return tuple(int(part) for part in text.split("."))


def refusal(machine: Machine) -> str:
    """The message where the driver runs no build."""
    cuda = {name: obstacles(machine, build) for name, build in BUILDS.items() if build.driver}
    reasons = "\n".join(
        f"    {BUILDS[name].label} ({name}): {'; '.join(texts)}" for name, texts in cuda.items()
    )
    with_kernels = [
        name for name, texts in cuda.items() if not any("no kernels" in text for text in texts)
    ]
    newest = max((BUILDS[name].driver for name in with_kernels), default=())
    update = f"update NVIDIA's driver to {newest[0]} or newer, or " if newest else ""
    return (
        f"torch has no build that runs with NVIDIA's driver {machine.driver} here:\n{reasons}\n"
        f"  To continue, {update}train on the CPU: make setup TORCH=cpu"
    )


# What it takes


def sizes(choice: Choice) -> Tuple[int, int, str]:
    """Bytes to download and on the disk (a lower bound where that is not known), and a text about
    both."""
    least = BUILDS["cpu"]
    build = BUILDS.get(choice.name, least)
    download, disk = (build.download or least.download or 0), (build.disk or least.disk or 0)
    text = f"about {download / 1024:.1f} GiB to download, {disk / 1024:.1f} GiB on the disk"
    if choice.name == OF_INDEX:
        cuda = BUILDS["cu130"]
        more = f"{(cuda.download or 0) / 1024:.1f} and {(cuda.disk or 0) / 1024:.1f} GiB"
        text += f" if that is a build for the CPU, {more} if it is for CUDA"
    elif choice.name not in BUILDS or build.disk is None:
        text = (
            f"more than {download / 1024:.1f} GiB to download,"
            f" {disk / 1024:.1f} GiB on the disk (not measured)"
        )
    return download * MIB, disk * MIB, text


def label(choice: Choice) -> str:
    """The build in words."""
    if choice.name == OF_INDEX:
        return "torch of your package index"
    return f"torch for {BUILDS[choice.name].label if choice.name in BUILDS else choice.name}"
