"""The machine: GPUs found through NVML or nvidia-smi, or named (`2xH200`); no torch is imported.

`CUDA_VISIBLE_DEVICES` is honoured: what a process would not see is not counted.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError
from sft_play.facts.gpu_catalog import CATALOG, MIB, nearest
from sft_play.log import one_line

GIB = 2**30
BF16_CAPABILITY = (8, 0)
"""CUDA compute capability from which bfloat16 matrix units exist (CUDA C++ Programming Guide, table of
arithmetic by compute capability)."""
_PROBE_TIMEOUT_S = 20


@dataclass(frozen=True)
class Gpu:
    """One GPU: `index` as `CUDA_VISIBLE_DEVICES` counts it, memory in bytes; `free_bytes` is None when named."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int] | None

    @property
    def has_bf16(self) -> bool:
        """Whether its matrix units compute in bfloat16; unknown counts as yes."""
        return self.capability is None or self.capability >= BF16_CAPABILITY


@dataclass(frozen=True)
class Hardware:
    """What a plan may use. Without GPUs the host's memory is what counts. `named`: not this machine."""

    gpus: tuple[Gpu, ...]
    cpu_name: str
    cpu_cores: int
    ram_bytes: int
    ram_free_bytes: int
    named: bool = False

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.gpus else "cpu"

    def first(self, count: int) -> Hardware:
        """The same machine with its first `count` GPUs only."""
        return Hardware(
            self.gpus[:count], self.cpu_name, self.cpu_cores, self.ram_bytes, self.ram_free_bytes, self.named
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data for `plan.json` and the manifest."""
        return asdict(self)


def detect(environment: Mapping[str, str] | None = None) -> Hardware:
    """This machine, as a process started with `environment` would see it."""
    environment = os.environ if environment is None else environment
    gpus = _visible(_probe_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
    ram_total, ram_free = _memory()
    return Hardware(gpus, _cpu_name(), _cpu_cores(), ram_total, ram_free)


def named(text: str) -> Hardware:
    """A machine that is only named: `2xH200`, `1xRTX4090`, or `2xMyGPU,mem=24GiB`.

    Raises:
        HardwareError: the text is not COUNTxGPU, the count is 0, or the GPU is unknown and `mem=` is missing.
    """
    spec, *options = [part.strip() for part in text.split(",")]
    match = re.fullmatch(r"(?:(\d{1,9})\s*[xX*]\s*)?([A-Za-z][\w. +-]*)", spec)
    if match is None:
        raise HardwareError(f"HARDWARE={one_line(text)} is not COUNTxGPU, such as 2xH200 or 2xMyGPU,mem=24GiB")
    count = int(match[1] or 1)
    if not 1 <= count <= 1024:
        raise HardwareError(f"HARDWARE={one_line(text)} names {count} GPUs; name 1 to 1024")
    memory, capability = _named_gpu(match[2], _options(options, text), text)
    gpus = tuple(Gpu(index, f"NVIDIA {match[2]}", memory, None, capability) for index in range(count))
    ram_total, _ = _memory()
    return Hardware(gpus, _cpu_name(), _cpu_cores(), ram_total, ram_total, named=True)


def _options(options: list[str], text: str) -> dict[str, int]:
    found = {}
    for option in options:
        match = re.fullmatch(r"mem=(\d+(?:\.\d+)?)\s*(GiB|GB|MiB)", option)
        if match is None:
            raise HardwareError(f"HARDWARE={one_line(text)}: {one_line(option)!r} is not mem=24GiB")
        found["mem"] = int(float(match[1]) * {"GiB": GIB, "GB": 10**9, "MiB": MIB}[match[2]])
    return found


def _named_gpu(name: str, options: dict[str, int], text: str) -> tuple[int, tuple[int, int] | None]:
    entry = CATALOG.get(_key(name))
    if entry is None and "mem" not in options:
        raise HardwareError(
            f"HARDWARE={one_line(text)}: the GPU {name} is not in the catalogue; nearest: "
            f"{', '.join(nearest(name))}; or give its memory: HARDWARE=1x{name},mem=24GiB"
        )
    memory = options.get("mem") or (entry.memory_bytes if entry else 0)
    return memory, entry.capability if entry else None


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("geforce", ""))


def _probe_gpus() -> tuple[tuple[str, Gpu], ...]:
    """Every GPU with its UUID: NVML first, nvidia-smi where its Python package cannot."""
    try:
        return _probe_nvml()
    except Exception:  # NVML raises its own tree, and not on every platform the same
        return _probe_nvidia_smi()


def _probe_nvml() -> tuple[tuple[str, Gpu], ...]:
    import pynvml

    pynvml.nvmlInit()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            found.append((_text(uuid), Gpu(index, _text(name), int(memory.total), int(memory.free), capability)))
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _probe_nvidia_smi() -> tuple[tuple[str, Gpu], ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    fields = "index,uuid,name,memory.total,memory.free,compute_cap"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(gpu for line in answer.stdout.splitlines() if (gpu := _parse_nvidia_smi(line)) is not None)


def _parse_nvidia_smi(line: str) -> tuple[str, Gpu] | None:
    parts = [part.strip() for part in line.split(",")]
    try:
        major, _, minor = parts[5].partition(".")
        total, free = int(float(parts[3]) * MIB), int(float(parts[4]) * MIB)
        return parts[1], Gpu(int(parts[0]), parts[2], total, free, (int(major), int(minor or 0)))
    except (IndexError, ValueError):
        return None


def _visible(found: tuple[tuple[str, Gpu], ...], variable: str | None) -> tuple[Gpu, ...]:
    """What `CUDA_VISIBLE_DEVICES` leaves, in its order: numbers or UUIDs; the first unknown entry ends the list."""
    if variable is None:
        return tuple(gpu for _, gpu in found)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in variable.split(",")):
        match = [gpu for uuid, gpu in found if entry and (entry == str(gpu.index) or uuid.startswith(entry))]
        if not match or match[0] in chosen:
            break
        chosen.append(match[0])
    return tuple(chosen)


def _memory() -> tuple[int, int]:
    """Total and available RAM in bytes, no more than the control group allows."""
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_limit()
    if limit is None or limit >= memory.total:
        return int(memory.total), int(memory.available)
    return limit, min(int(memory.available), limit)


def _cgroup_limit() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
