"""NVIDIA's management library (NVML): the only module that imports pynvml; all others ask it.

Reference: NVML API Reference Guide; the names are those of the package nvidia-ml-py.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil

from sft_play.log import one_line
from sft_play.machine import host
from sft_play.machine.gpu import GpuProcess, GpuSnapshot, GpuStatus, MigInstance, PcieLink
from sft_play.machine.gpu_catalog import BF16_CAPABILITY, find_catalog_entries

VENDOR = "NVIDIA"
# CUDA compute capability from which 8-bit floating-point matrix units exist (Ada; CUDA C++
# Programming Guide).
FP8_CAPABILITY = (8, 9)
# `nvmlGpuTopologyLevel_t` in the words of `nvidia-smi topo -m`; 0: two GPUs of one board.
_TOPOLOGY_LEVELS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_SENSOR_GPU = 0
_P2P_READ = 0
_P2P_OK = 0
_LINK_TO_SWITCH = 2
_NVSWITCH = "switch"
# Of one GPU (NVIDIA Multi-Instance GPU user guide, "Supported Profiles").
_MAX_INSTANCES = 7
# Errors that mean that a GPU has no such thing; others mean that the answer is withheld.
_ABSENT_ERRORS = ("NotSupported", "NotFound", "InvalidArgument")


class NvmlUnavailable(Exception):
    """NVML's package or the driver is missing, or it shows no GPU at all; the text is NVML's own
    message."""


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """pynvml, initialised, and shut down at the end. Raises NvmlUnavailable where it does not
    start."""
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


def query(nvml: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Call an NVML function; None where this driver, this GPU or this user gets no answer."""
    return _try_query(nvml, name, *arguments, **options)[0]


def _try_query(
    nvml: Any, name: str, *arguments: Any, **options: Any
) -> tuple[Any, Exception | None]:
    try:
        return getattr(nvml, name)(*arguments, **options), None
    # each driver and GPU lacks other functions, and pynvml raises for each in its own way
    except Exception as error:
        return None, error


def _is_error_kind(error: Exception | None, *kinds: str) -> bool:
    return type(error).__name__.removeprefix("NVMLError_") in kinds


def driver_versions(nvml: Any) -> tuple[str | None, tuple[int, int] | None]:
    """The driver's version and the newest CUDA that it runs; None where it does not say."""
    newest_cuda = int(query(nvml, "nvmlSystemGetCudaDriverVersion_v2") or 0)
    version = query(nvml, "nvmlSystemGetDriverVersion")
    # 13020 is CUDA 13.2
    return version, ((newest_cuda // 1000, newest_cuda % 1000 // 10) if newest_cuda else None)


def gpu_snapshot(*, details: bool = True, topology: bool = True) -> GpuSnapshot | None:
    """Every GPU of the machine; None where NVML is missing. A field that a driver or a GPU does not
    report is None. `details`: power, temperature, PCIe and processes; `topology`: how the GPUs are
    connected."""
    try:
        with open_nvml() as nvml:
            return read_gpu_snapshot(nvml, details=details, topology=topology)
    except Exception:  # also from an old library, which lacks a function that every GPU is asked by
        return None


def read_gpu_snapshot(nvml: Any, *, details: bool, topology: bool) -> GpuSnapshot:
    """Read all GPUs by an opened library. Raises NvmlUnavailable where it does not say how many
    there are."""
    handles: dict[int, Any] = {}
    gpus: list[GpuStatus] = []
    links_by_gpu: dict[int, Counter[str]] = {}
    count, count_error = _try_query(nvml, "nvmlDeviceGetCount")
    if count is None:
        raise NvmlUnavailable(_error_text(count_error))
    for index in range(count):
        handle, error = _try_query(nvml, "nvmlDeviceGetHandleByIndex", index)
        if handle is None:  # lost, or not for this user
            gpus.append(GpuStatus(index, None, VENDOR, trouble=_error_text(error)))
            continue
        nvlinks = _read_nvlinks(nvml, handle)
        handles[index], links_by_gpu[index] = handle, nvlinks or Counter()
        gpus.append(_read_gpu(nvml, index, handle, nvlinks, details=details))
    version, cuda = driver_versions(nvml)
    return GpuSnapshot(
        gpus=tuple(gpus),
        source="NVML",
        driver=version,
        driver_cuda=cuda and f"{cuda[0]}.{cuda[1]}",
        topology=(
            _read_topology(nvml, handles, links_by_gpu) if topology and len(handles) > 1 else None
        ),
    )


def _error_text(error: Exception | None) -> str:
    return "no answer" if error is None else one_line(str(error)) or type(error).__name__


def _read_gpu(
    nvml: Any, index: int, handle: Any, links: Counter[str] | None, *, details: bool
) -> GpuStatus:
    queries = {
        "name": "nvmlDeviceGetName",
        "UUID": "nvmlDeviceGetUUID",
        "memory": "nvmlDeviceGetMemoryInfo",
        "compute capability": "nvmlDeviceGetCudaComputeCapability",
    }
    answers = {fact: _try_query(nvml, name, handle) for fact, name in queries.items()}
    errors = {fact: error for fact, (answer, error) in answers.items() if answer is None}
    name, uuid = answers["name"][0], answers["UUID"][0]
    memory = _read_memory(nvml, handle)
    is_memory_unsupported = _is_error_kind(errors.get("memory"), "NotSupported") and len(
        errors
    ) < len(queries)
    # a GPU that the catalogue has with a memory of its own does not share the host's, whatever its
    # driver says
    if (
        not memory
        and is_memory_unsupported
        and all(entry.unified for entry in find_catalog_entries(name or ""))
    ):
        total, free = host.total_and_free_ram()
        memory = {
            "total_bytes": total,
            "used_bytes": total - free,
            "free_bytes": free,
            "unified": True,
        }
    if memory:
        errors.pop("memory", None)
    # not supported: most GPUs, and old drivers
    mig_mode = query(nvml, "nvmlDeviceGetMigMode", handle)
    is_mig_enabled = mig_mode and bool(mig_mode[0])
    instances: tuple[MigInstance, ...] = ()
    if is_mig_enabled is not False:
        instances, instances_error = _read_instances(nvml, handle)
        is_mig_enabled = is_mig_enabled or bool(instances) or None
        if is_mig_enabled and not instances and instances_error is not None:
            errors["MIG instances"] = instances_error
    trouble = None
    for error in errors.values():
        is_lost = _is_error_kind(error, "GpuIsLost", "ResetRequired") or "lost" in str(error)
        # a GPU that answers nothing is told by its first error, or by the one that says it is lost
        if is_lost or (errors.keys() >= queries.keys() and not (instances or trouble)):
            trouble = _error_text(error)
    capability = answers["compute capability"][0]
    return GpuStatus(
        index=index,
        name=name,
        vendor=VENDOR,
        uuid=uuid,
        bus_id=getattr(query(nvml, "nvmlDeviceGetPciInfo", handle), "busId", None),
        nvlinks=links.total() if links is not None else None,
        mig_enabled=is_mig_enabled,
        instances=instances,
        trouble=trouble,
        withheld={fact: _error_text(error) for fact, error in errors.items()},
        **memory,
        compute_capability=capability and f"{capability[0]}.{capability[1]}",
        bf16=capability and tuple(capability) >= BF16_CAPABILITY,
        fp8=capability and tuple(capability) >= FP8_CAPABILITY,
        **(_read_details(nvml, handle) if details else {}),
    )


def _read_details(nvml: Any, handle: Any) -> dict[str, Any]:
    power_cap = query(nvml, "nvmlDeviceGetPowerManagementLimit", handle)
    pcie_link = [
        query(nvml, f"nvmlDeviceGet{bound}PcieLink{quantity}", handle)
        for quantity in ("Generation", "Width")
        for bound in ("Curr", "Max")
    ]
    return {
        "power_cap_watts": power_cap and power_cap / 1000,  # NVML has milliwatts
        "temperature_celsius": query(nvml, "nvmlDeviceGetTemperature", handle, _SENSOR_GPU),
        "pcie": PcieLink(*pcie_link),
        "processes": _read_processes(nvml, handle),
    }


def _read_memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """Memory as fields of `GpuStatus`: the second version of NVML's function reports the driver's
    own share apart."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = query(nvml, "nvmlDeviceGetMemoryInfo", handle, version=version) if version else None
    memory = memory or query(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return {}
    total, free = int(memory.total), int(memory.free)
    reserved = getattr(memory, "reserved", None)
    used = getattr(memory, "used", total - free - (reserved or 0))
    return {
        "total_bytes": total,
        "used_bytes": int(used),
        "free_bytes": free,
        "reserved_bytes": reserved,
    }


def _read_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    process_lists = [
        query(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle)
        for kind in ("Compute", "Graphics")
    ]
    if all(listed is None for listed in process_lists):
        return None
    processes: dict[int, GpuProcess] = {}
    for item in (item for listed in process_lists for item in listed or ()):
        name = None
        # in a container the driver lists pids of the host, which this process table does not have
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            name = psutil.Process(item.pid).name()
        # one process can be in both lists, with the same memory
        if item.pid not in processes or processes[item.pid].used_bytes is None:
            processes[item.pid] = GpuProcess(item.pid, name, item.usedGpuMemory)
    return tuple(processes[pid] for pid in sorted(processes))


def _read_instances(nvml: Any, handle: Any) -> tuple[tuple[MigInstance, ...], Exception | None]:
    instances = []
    count, instances_error = _try_query(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle)
    for index in range(_MAX_INSTANCES if count is None else count):
        instance, error = _try_query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if instance is not None:
            card, _, profile = (query(nvml, "nvmlDeviceGetName", instance) or "").partition(" MIG ")
            memory = _read_memory(nvml, instance)
            memory.pop("reserved_bytes", None)
            uuid = query(nvml, "nvmlDeviceGetUUID", instance) or ""
            instances.append(
                MigInstance(
                    uuid,
                    profile,
                    **memory,
                    processes=_read_processes(nvml, instance),
                    card=card or None,
                )
            )
        elif error is not None and not _is_error_kind(error, *_ABSENT_ERRORS):
            instances_error = error
    return tuple(instances), instances_error


def _read_topology(
    nvml: Any, handles: dict[int, Any], links_by_gpu: dict[int, Counter[str]]
) -> dict[str, tuple[Any, ...]]:
    indices = tuple(handles)
    buses = {
        index: _bus_id(query(nvml, "nvmlDeviceGetPciInfo", handles[index])) for index in indices
    }

    def link_name(first: int, second: int) -> str:
        if first == second:
            return "X"
        direct = links_by_gpu[first][buses[second]] if buses[second] else 0
        # through a switch every GPU reaches every other with all its links
        link_count = direct or min(links_by_gpu[first][_NVSWITCH], links_by_gpu[second][_NVSWITCH])
        if link_count:
            return f"NV{link_count}"
        level = query(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
        return _TOPOLOGY_LEVELS.get(level, "n/a")

    def can_read_peer(first: int, second: int) -> bool | None:
        if first == second:
            return None
        status = query(nvml, "nvmlDeviceGetP2PStatus", handles[first], handles[second], _P2P_READ)
        return None if status is None else status == _P2P_OK

    return {
        "indices": indices,
        "links": tuple(tuple(link_name(row, column) for column in indices) for row in indices),
        "peer": tuple(tuple(can_read_peer(one, other) for other in indices) for one in indices),
    }


def _read_nvlinks(nvml: Any, handle: Any) -> Counter[str] | None:
    """Count a GPU's active NVLinks by the bus at their other end, all switches as one; None if the
    driver does not tell."""
    links: Counter[str] = Counter()
    if not hasattr(nvml, "NVML_NVLINK_MAX_LINKS"):
        return None
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state, error = _try_query(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None and link == 0 and not _is_error_kind(error, *_ABSENT_ERRORS):
            return None
        if state is None:  # beyond the last link, or a GPU without any
            break
        if not state:
            continue
        kind = query(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = _bus_id(query(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        links[_NVSWITCH if kind == _LINK_TO_SWITCH else remote] += 1
    return links


def _bus_id(info: Any) -> str:
    """Bus, device and function in one spelling: some drivers write eight digits of the domain, some
    four."""
    return (getattr(info, "busId", None) or "").lower()[-12:]
