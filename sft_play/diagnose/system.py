"""Python, packages, and limits of the operating system: shared memory, locked memory, open files.

The checks read nothing themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sft_play.facts.host import Space
from sft_play.facts.installed import COMPUTING, unsound
from sft_play.findings import Finding, failed, passed, skipped, warned
from sft_play.units import GIB, MIB, size_of

NCCL_SEGMENT_BYTES = 9_637_888
"""One NCCL connection over shared memory, as NCCL's error messages give it (https://github.com/NVIDIA/nccl/issues/342)."""
NCCL_CHANNELS = 2
"""The fewest channels that NCCL opens between neighbours of a ring; each is a connection."""
NCCL_WANTS_BYTES = GIB
"""NVIDIA's own advice for containers: `--shm-size=1g` (NCCL user guide, troubleshooting, shared memory)."""
DOCKER_SHM_BYTES = 64 * MIB
"""Docker's default."""
PREFETCHED = 2
"""Batches that a worker of torch's data loader keeps ready (`prefetch_factor`)."""
BATCH_TENSORS_BYTES = 4 * 8
"""Token numbers, labels, mask and positions of a token, as 64-bit integers."""
LOCKED_LEAST_BYTES = 64 * MIB
"""Systems give 64 KiB or 8 MiB by default; 8 MiB failed in the thread that the check cites."""
FILES_LEAST = 1024
FILES_OF_WORKERS = 4096
"""torch's workers send a file descriptor with each tensor; the threads ran out with a limit of 1024."""

_SHM_SOURCES = ("https://github.com/NVIDIA/nccl/issues/342", "https://github.com/NVIDIA/nccl/issues/290")
_WORKER_SOURCE = "https://github.com/pytorch/pytorch/issues/5040"


def check_python(python: str, wanted: str) -> Finding:
    """The running Python compared with the project's `requires-python`."""
    if not wanted:
        return skipped("Python", f"{python}; the project's supported range was not found")
    if _is_in(python, wanted):
        return passed("Python", f"{python} ({wanted})")
    return failed("Python", f"{python}, and the project needs {wanted}",
                  "make setup PYTHON=/path/to/a/python of that range")  # fmt: skip


def check_packages(
    versions: Mapping[str, str], requirements: Mapping[str, Sequence[str]], *, own: str, optional: frozenset[str]
) -> list[Finding]:
    """Whether every package is installed in a version that the project accepts, and whether packages contradict each
    other.

    Args:
        requirements: by name of an installed package, what it asks for; `own` is this project's name among them.
        optional: packages that this run does not use; a missing one is only a warning.
    """
    needed: list[str] = []
    unused: list[str] = []
    for text in requirements.get(own, ()):
        problem = _problem(text, versions)
        if problem is not None:
            (unused if canonicalize_name(Requirement(text).name) in optional else needed).append(problem)
    findings = []
    if needed:
        remedy = "make setup (with VENV=: install them into that environment)"
        findings.append(failed("packages", "; ".join(needed), remedy))
    if unused:
        words = f"{'; '.join(unused)} (this run does not use it)"
        findings.append(warned("packages", words, "make setup, before a run that does"))
    if not findings:
        shown = ", ".join(f"{name} {versions[name]}" for name in COMPUTING if name in versions)
        has_ranges = bool(requirements.get(own))
        findings.append(passed("packages", shown) if has_ranges else skipped("packages", f"{shown}: no ranges"))
    others = sorted((name, texts) for name, texts in requirements.items() if name != own)
    problems = [
        f"{name} {versions.get(name, '?')}: {problem}"
        for name, texts in others
        for text in texts
        if (problem := _problem(text, versions))
    ]
    if problems:
        return [*findings, warned("packages together", "; ".join(problems),
                                  "make setup installs a set of versions that was tested together")]  # fmt: skip
    return [*findings, passed("packages together", f"{len(others)} packages meet each other's requirements")]


def check_kernels(slow: Mapping[str, str], capability: tuple[int, int] | None) -> list[Finding]:
    """A warning for each package whose kernels the model would run if it were installed (`slow_code.missing_words`);
    none where they fail on such a GPU."""
    return [
        passed(f"kernels of {name}", words) if unsound(name, capability) else
        warned(f"kernels of {name}", words, f"pip install {name}, into the environment that trains; it needs CUDA")
        for name, words in slow.items()
    ]  # fmt: skip


def _problem(text: str, versions: Mapping[str, str]) -> str | None:
    """What is wrong with a requirement, in words; None if it is met, or is for another platform or an extra."""
    try:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):  # no extra: `; extra == "dev"` is out
            return None
    except (InvalidRequirement, UndefinedEnvironmentName):
        return None
    installed = versions.get(canonicalize_name(wanted.name))
    if installed is None:
        return f"{wanted.name}{wanted.specifier} is missing"
    is_met = _is_in(installed, str(wanted.specifier))
    return None if is_met else f"{wanted.name} is {installed}, needed {wanted.specifier}"


def _is_in(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)  # nightlies of torch are pre-releases
    except (InvalidSpecifier, InvalidVersion):
        return True  # a version of somebody's own build cannot be compared


def check_shared_memory(
    space: Space | None, *, gpus_per_node: int, ranks_per_node: int, workers: int, batch_tokens: int
) -> Finding:
    """Whether /dev/shm has room for what NCCL and the data loader's workers put there."""
    if space is None:
        return skipped("shared memory", "/dev/shm is not a separate file system here")
    nccl = NCCL_SEGMENT_BYTES * NCCL_CHANNELS * gpus_per_node if gpus_per_node > 1 else 0
    # workers hand batches over through shared memory, each up to `PREFETCHED` ahead
    loader = ranks_per_node * workers * PREFETCHED * batch_tokens * BATCH_TENSORS_BYTES
    least, free_words = nccl + loader, f"{size_of(space.free)} free of {size_of(space.total)} at /dev/shm"
    who = " and ".join([*(["NCCL"] if nccl else []), *(["the data loader's workers"] if loader else [])])
    remedy = (
        "in a container: docker run --shm-size=8g (or --ipc=host; Kubernetes: an emptyDir with medium Memory at "
        "/dev/shm); else mount -o remount,size=8G /dev/shm"
    )
    sources = (*(_SHM_SOURCES if nccl else ()), *((_WORKER_SOURCE,) if loader else ()))
    if nccl and space.total <= DOCKER_SHM_BYTES:
        found = f"{free_words}: Docker's default, with which NCCL has run out of space"
        return failed("shared memory", found, remedy, *sources)
    if space.free < least:
        need = "need" if loader else "needs"
        return failed("shared memory", f"{free_words}; {who} {need} at least {size_of(least)}", remedy, *sources)
    if nccl and space.free < max(NCCL_WANTS_BYTES, least):
        return warned("shared memory", f"{free_words}; NVIDIA advises 1 GiB for NCCL", remedy, *sources)
    return passed("shared memory", free_words if who else f"{free_words}; this run puts nothing there")


def check_locked_memory(limit: int | None, *, infiniband: bool, nodes: int) -> Finding:
    """Whether the network card may lock the memory that it reads directly."""
    shown = "unlimited" if limit is None else size_of(limit)
    if not infiniband or nodes == 1:
        why = "one node" if nodes == 1 else "no active InfiniBand or RoCE port"
        return skipped("locked memory", f"{shown}; not needed: {why}")
    remedy = (
        "ulimit -l unlimited (for good: `* - memlock unlimited` in /etc/security/limits.conf and a new login; Slurm: "
        "LimitMEMLOCK=infinity of slurmd; docker run --ulimit memlock=-1)"
    )
    source = "https://github.com/NVIDIA/nccl-tests/issues/206"
    if limit is not None and limit < LOCKED_LEAST_BYTES:
        found = f"{shown}: NCCL cannot register its buffers with the network card"
        return failed("locked memory", found, remedy, source)
    if limit is not None:
        return warned("locked memory", f"{shown}: may be too little for NCCL's buffers", remedy, source)
    return passed("locked memory", shown)


def check_open_files(limit: int | None, *, workers: int) -> Finding:
    """Whether a process may open as many files as its connections and workers need."""
    needed = FILES_OF_WORKERS if workers else FILES_LEAST
    if limit is None or limit >= needed:
        return passed("open files", "unlimited" if limit is None else f"{limit} per process")
    why, sources = "libraries and connections need some", tuple[str, ...]()
    if workers:
        why = "torch's workers send a file descriptor with each tensor"
        sources = ("https://github.com/pytorch/pytorch/issues/973", "https://github.com/pytorch/pytorch/issues/11201")
    found = f"{limit} per process, {needed} needed: {why}"
    return warned("open files", found, f"ulimit -n {max(needed, 65_536)}", *sources)
