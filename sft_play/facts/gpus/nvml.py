"""NVIDIA's management library (NVML): the only module that imports pynvml; all others ask it.

Reference: NVML API Reference Guide; the names are those of the package nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import psutil

from sft_play.facts import host
from sft_play.facts.gpus.gpu import GpuProcess, Instance, Pcie, Seen, SeenGpu, Topology
from sft_play.facts.gpus.gpu_catalog import BF16_CAPABILITY, find
from sft_play.log import one_line

VENDOR = "NVIDIA"
# CUDA compute capability from which 8-bit floating-point matrix units exist (Ada; CUDA C++ Programming Guide).
FP8_CAPABILITY = (8, 9)
# `nvmlGpuTopologyLevel_t` in the words of `nvidia-smi topo -m`; two GPUs of one board (0) are `PSB` there.
_LEVELS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_SAME_BOARD = "PSB"
_SENSOR_GPU = 0
_P2P_READ = 0
_P2P_OK = 0
_LINK_TO_SWITCH = 2
_SWITCH = "switch"
# Handles that are tried where the driver does not say how many GPUs there are.
_MOST_GPUS = 64
# Of one GPU (NVIDIA Multi-Instance GPU user guide, "Supported Profiles").
_MOST_INSTANCES = 7
# Errors that mean that a GPU has no such thing; others mean that the answer is withheld.
_NOTHING_THERE = ("NotSupported", "NotFound", "InvalidArgument")


class NvmlUnavailable(Exception):
    """NVML's package or the driver is missing, or it shows no GPU at all; the text is NVML's own message."""


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """pynvml, initialised, and shut down at the end. Raises NvmlUnavailable where it does not start."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML raises its own tree, and not on every platform the same
        raise NvmlUnavailable(one_line(str(error)) or type(error).__name__) from error
    try:
        yield pynvml
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def ask(nvml: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """The answer to one question; None where this driver, this GPU or this user gets none."""
    return _tried(nvml, name, *arguments, **named)[0]


def _tried(nvml: Any, name: str, *arguments: Any, **named: Any) -> tuple[Any, Exception | None]:
    try:
        return getattr(nvml, name)(*arguments, **named), None
    # each driver and GPU lacks other functions, and pynvml raises for each in its own way
    except Exception as error:
        return None, error


def _is(nvml: Any, error: Exception | None, *kinds: str) -> bool:
    classes = tuple(getattr(nvml, f"NVMLError_{kind}", ()) for kind in kinds)
    return isinstance(error, classes) or type(error).__name__.removeprefix("NVMLError_") in kinds


def _is_gone(nvml: Any, error: Exception) -> bool:
    return _is(nvml, error, "GpuIsLost", "ResetRequired") or "lost" in str(error)


def driver(nvml: Any) -> tuple[str | None, tuple[int, int] | None]:
    """The driver's version and the newest CUDA that it runs; None where it does not say."""
    newest = int(ask(nvml, "nvmlSystemGetCudaDriverVersion_v2") or 0)
    version = ask(nvml, "nvmlSystemGetDriverVersion")
    return version, (newest // 1000, newest % 1000 // 10) if newest else None  # 13020 is CUDA 13.2


def see(*, details: bool = True, topology: bool = True) -> Seen | None:
    """Every GPU of the machine; None where NVML is missing. A field that a driver or a GPU does not report is None.
    `details`: power, temperature, PCIe and processes; `topology`: how the GPUs are connected."""
    try:
        with opened() as nvml:
            return see_through(nvml, details=details, topology=topology)
    except Exception:  # also from an old library, which lacks a function that every GPU is asked by
        return None


def see_through(nvml: Any, *, details: bool, topology: bool) -> Seen:
    """The same through an opened library. Raises NvmlUnavailable where it shows no GPU, and does not say that there is
    none."""
    handles: dict[int, Any] = {}
    gpus: list[SeenGpu] = []
    links: dict[int, Counter[str]] = {}
    count, withheld = _tried(nvml, "nvmlDeviceGetCount")
    for index in range(_MOST_GPUS if count is None else count):
        handle, error = _tried(nvml, "nvmlDeviceGetHandleByIndex", index)
        if handle is None and count is None:
            break
        if handle is None:  # lost, or not for this user
            gpus.append(SeenGpu(index, None, VENDOR, trouble=_words(error)))
            continue
        joined = _nvlinks(nvml, handle)
        handles[index], links[index] = handle, joined or Counter()
        gpus.append(_gpu(nvml, index, handle, joined, details=details))
    if count is None and not gpus:
        raise NvmlUnavailable(_words(withheld))
    version, cuda = driver(nvml)
    return Seen(
        gpus=tuple(gpus),
        source="NVML",
        driver=version,
        driver_cuda=f"{cuda[0]}.{cuda[1]}" if cuda else None,
        topology=_topology(nvml, handles, links) if topology and len(handles) > 1 else None,
    )


def _words(error: Exception | None) -> str:
    return "no answer" if error is None else one_line(str(error)) or type(error).__name__


def _gpu(nvml: Any, index: int, handle: Any, links: Counter[str] | None, *, details: bool) -> SeenGpu:
    names = {"name": "nvmlDeviceGetName", "UUID": "nvmlDeviceGetUUID", "memory": "nvmlDeviceGetMemoryInfo",
             "compute capability": "nvmlDeviceGetCudaComputeCapability"}  # fmt: skip
    answers = {what: _tried(nvml, name, handle) for what, name in names.items()}
    errors = {what: error for what, (answer, error) in answers.items() if answer is None}
    name, uuid = answers["name"][0], answers["UUID"][0]
    memory = _memory(nvml, handle)
    no_memory = _is(nvml, errors.get("memory"), "NotSupported") and len(errors) < len(names)
    # a GPU that the catalogue has with a memory of its own does not share the host's, whatever its driver says
    if not memory and no_memory and all(entry.unified for entry in find(name or "")):
        total, free = host.memory()
        memory = {"total_bytes": total, "used_bytes": total - free, "free_bytes": free, "unified": True}
    if memory:
        errors.pop("memory", None)
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)  # not supported: most GPUs, and old drivers
    instances, withheld = ((), None) if mode and not mode[0] else _instances(nvml, handle)
    if mode and mode[0] and not instances and withheld is not None:
        errors["MIG instances"] = withheld
    gone = [error for error in errors.values() if error is not None and _is_gone(nvml, error)]
    if not gone and not instances and errors.keys() >= names.keys():
        gone = [error for error in errors.values() if error is not None] or [NvmlUnavailable("no answer")]
    known = answers["compute capability"][0]
    capability = (int(known[0]), int(known[1])) if known else None
    return SeenGpu(
        index=index,
        name=name,
        vendor=VENDOR,
        uuid=uuid,
        bus_id=getattr(ask(nvml, "nvmlDeviceGetPciInfo", handle), "busId", None),
        nvlinks=links.total() if links is not None else None,
        mig_enabled=bool(mode[0]) if mode else True if instances else None,
        instances=instances,
        trouble=_words(gone[0]) if gone else None,
        withheld={what: _words(error) for what, error in errors.items()},
        **memory,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        bf16=capability >= BF16_CAPABILITY if capability else None,
        fp8=capability >= FP8_CAPABILITY if capability else None,
        **(_details(nvml, handle) if details else {}),
    )


def _details(nvml: Any, handle: Any) -> dict[str, Any]:
    cap = ask(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    link = [ask(nvml, f"nvmlDeviceGet{which}PcieLink{what}", handle)
            for what in ("Generation", "Width") for which in ("Curr", "Max")]  # fmt: skip
    degrees = ask(nvml, "nvmlDeviceGetTemperature", handle, _SENSOR_GPU)
    return {
        "power_cap_watts": None if cap is None else cap / 1000,  # NVML has milliwatts
        "temperature_celsius": None if degrees is None else int(degrees),
        "pcie": Pcie(*link),
        "processes": _processes(nvml, handle),
    }


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """Memory as fields of `SeenGpu`: the second version of NVML's function reports the driver's own share apart."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=version) if version else None
    memory = memory or ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return {}
    total, free = int(memory.total), int(memory.free)
    reserved = getattr(memory, "reserved", None)
    used = getattr(memory, "used", total - free - (reserved or 0))
    return {"total_bytes": total, "used_bytes": int(used), "free_bytes": free, "reserved_bytes": reserved}


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    lists = [ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
    if all(listed is None for listed in lists):
        return None
    used: dict[int, int | None] = {}
    for item in (item for listed in lists for item in listed or ()):
        before, now = used.get(int(item.pid)), item.usedGpuMemory
        # one process can be in both lists, with the same memory
        used[int(item.pid)] = max(before or 0, int(now)) if now is not None else before
    names = {pid: _process_name(pid, ask(nvml, "nvmlSystemGetProcessName", pid)) for pid in used}
    return tuple(GpuProcess(pid, names[pid], held) for pid, held in sorted(used.items()))


def _process_name(pid: int, by_driver: str | None) -> str | None:
    # in a container the driver lists pids of the host, which this process table does not have
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError, OverflowError):
        named = PurePath(by_driver.split(" ")[0]).name if by_driver else ""
        return named if named and not named.startswith("[") else None  # `[Not Found]`


def _instances(nvml: Any, handle: Any) -> tuple[tuple[Instance, ...], Exception | None]:
    instances = []
    count, withheld = _tried(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle)
    for place in range(_MOST_INSTANCES if count is None else count):
        instance, error = _tried(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if instance is not None:
            instances.append(_instance(nvml, instance))
        elif error is not None and not _is(nvml, error, *_NOTHING_THERE):
            withheld = error
    return tuple(instances), withheld


def _instance(nvml: Any, instance: Any) -> Instance:
    card, _, profile = (ask(nvml, "nvmlDeviceGetName", instance) or "").partition(" MIG ")
    memory = _memory(nvml, instance)
    return Instance(
        uuid=ask(nvml, "nvmlDeviceGetUUID", instance) or "",
        profile=profile,
        total_bytes=memory.get("total_bytes"),
        used_bytes=memory.get("used_bytes"),
        free_bytes=memory.get("free_bytes"),
        processes=_processes(nvml, instance),
        card=card or None,
    )


def _topology(nvml: Any, handles: dict[int, Any], joined: dict[int, Counter[str]]) -> Topology:
    indices = tuple(handles)
    buses = {index: _bus(ask(nvml, "nvmlDeviceGetPciInfo", handles[index])) for index in indices}

    def link(one: int, other: int) -> str:
        if one == other:
            return "X"
        direct = joined[one][buses[other]] if buses[other] else 0
        # through a switch every GPU reaches every other with all its links
        lanes = direct or min(joined[one][_SWITCH], joined[other][_SWITCH])
        if lanes:
            return f"NV{lanes}"
        level = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
        return _SAME_BOARD if level == 0 else _LEVELS.get(level, "n/a")

    def peer(one: int, other: int) -> bool | None:
        if one == other:
            return None
        status = ask(nvml, "nvmlDeviceGetP2PStatus", handles[one], handles[other], _P2P_READ)
        return None if status is None else status == _P2P_OK

    return Topology(
        indices,
        tuple(tuple(link(one, other) for other in indices) for one in indices),
        tuple(tuple(peer(one, other) for other in indices) for one in indices),
    )


def _nvlinks(nvml: Any, handle: Any) -> Counter[str] | None:
    """Active NVLinks of a GPU by the bus of what they lead to, those to a switch together; None: not told."""
    links: Counter[str] = Counter()
    if not hasattr(nvml, "NVML_NVLINK_MAX_LINKS"):
        return None
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state, error = _tried(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None and link == 0 and not _is(nvml, error, *_NOTHING_THERE):
            return None
        if state is None:  # beyond the last link, or a GPU without any
            break
        if not state:
            continue
        kind = ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = _bus(ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        links[_SWITCH if kind == _LINK_TO_SWITCH else remote] += 1
    return links


def _bus(info: Any) -> str:
    """Bus, device and function in one spelling: some drivers write eight digits of the domain, some four."""
    return (getattr(info, "busId", None) or "").lower()[-12:]
