"""The host of the GPUs: RAM within this process's control groups, CPU, disks, WSL."""

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

# The kernel's release; WSL's own kernel has Microsoft's name in it.
OSRELEASE = Path("/proc/sys/kernel/osrelease")
_CGROUP = Path("/sys/fs/cgroup")
_PROCESS_CGROUP = Path("/proc/self/cgroup")


def read_text_or_empty(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_wsl(osrelease: Path | None = None) -> bool:
    """True if this Linux runs in Windows (WSL), by the kernel's release."""
    return "microsoft" in read_text_or_empty(osrelease or OSRELEASE).lower()


def total_and_free_ram() -> tuple[int, int]:
    """Total and available RAM in bytes, no more than the control groups of this process allow."""
    host = psutil.virtual_memory()
    # available: free, and cache that the kernel would drop
    total, free = int(host.total), int(host.available)
    # the kernel kills a process at its group's limit, however much RAM the host has left
    for folder, limit_file, use_file in _cgroup_folders():
        limit = _read_number(folder / limit_file)
        if limit is not None and limit < host.total:
            # file cache that can be dropped does not count as used
            statistics = dict.fromkeys(("inactive_file", "total_inactive_file"), "0")
            statistics |= re.findall(
                r"^(\w+) (\d+)$", read_text_or_empty(folder / "memory.stat"), re.MULTILINE
            )
            cache = int(statistics["total_inactive_file"]) or int(statistics["inactive_file"])
            used = max(0, (_read_number(folder / use_file) or 0) - cache)
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    """Folders of the memory controller from this process's group up to the root, version 2 then
    version 1."""
    paths = {"": "/", "memory": "/"}
    # hierarchy:controllers:path; version 2 has one line without controllers
    for line in read_text_or_empty(_PROCESS_CGROUP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for name in controllers.split(","):
            if name in paths:
                paths[name] = path
    folders = []
    for root, path, names in (
        (_CGROUP, paths[""], ("memory.max", "memory.current")),
        (_CGROUP / "memory", paths["memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        # a limit of any group above applies too; in a container the path may be the host's, and
        # folders are missing
        group_folder = root / path.strip("/")
        folders += [
            (folder, *names)
            for folder in (group_folder, *group_folder.parents)
            if folder.is_relative_to(root)
        ]
    return folders


def _read_number(path: Path) -> int | None:
    text = read_text_or_empty(path).strip()
    return int(text) if text.isdigit() else None


def cpu_cores() -> int:
    """Cores that this process may run on, as `taskset` or a scheduler leaves them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The CPU's name as its maker gives it."""
    for line in read_text_or_empty(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


@dataclass(frozen=True)
class DiskSpace:
    """A file system's size and what is free, in bytes."""

    total: int
    free: int


def disk_space(path: Path) -> DiskSpace | None:
    """The file system that holds `path`; None where it cannot be read."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return DiskSpace(usage.total, usage.free)


def nearest_disk_space(path: Path) -> tuple[Path, DiskSpace | None]:
    """The nearest folder above `path` that exists, and the space of its file system."""
    path = path.expanduser().absolute()
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    return nearest, disk_space(nearest)
