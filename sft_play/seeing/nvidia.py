"""NVIDIA's GPUs in detail: through NVML, and through nvidia-smi where NVML's Python package does not answer."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import psutil

from sft_play.facts.ask import answer_of, answers_of, number, size, whole
from sft_play.facts.hardware import Gpu
from sft_play.facts.seen import GpuProcess, Instance, Pcie, Seen, SeenGpu, Topology, abilities, process_name

VENDOR = "NVIDIA"
_LEVELS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""`nvmlGpuTopologyLevel_t` in the words of `nvidia-smi topo -m`; two GPUs of one board (0) are `PSB` there."""
_SAME_BOARD = "PSB"
_SENSOR_GPU = 0
_P2P_READ = 0
_P2P_OK = 0
_LINK_TO_SWITCH = 2

# --- NVML -------------------------------------------------------------------------------------------------------------


def through_nvml(*, topology: bool = True) -> Seen | None:
    """What NVML tells of every GPU; None where its package or the driver is not there.

    A field that a driver or a GPU does not give is None; a GPU that does not answer at all says so in `trouble`.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML raises its own tree, and not on every platform the same
        return None
    try:
        return _read_nvml(pynvml, topology=topology)
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def _read_nvml(nvml: Any, *, topology: bool) -> Seen:
    handles: dict[int, Any] = {}
    gpus: list[SeenGpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:  # lost, or not for this user
            gpus.append(SeenGpu(index, None, VENDOR, trouble=_words(error)))
            continue
        gpus.append(_nvml_gpu(nvml, index, handles[index]))
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return Seen(
        gpus=tuple(gpus),
        source="NVML",
        driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
        driver_cuda=f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda else None,
        topology=_nvml_topology(nvml, handles) if topology and len(handles) > 1 else None,
    )


def _ask(nvml: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """The answer to one question; None where this driver, this GPU or this user gets none."""
    try:
        return getattr(nvml, name)(*arguments, **named)
    except Exception:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _nvml_gpu(nvml: Any, index: int, handle: Any) -> SeenGpu:
    def ask(name: str, *arguments: Any) -> Any:
        return _ask(nvml, name, handle, *arguments)

    trouble = None
    try:
        name = _text(nvml.nvmlDeviceGetName(handle))
    except Exception as error:
        name, trouble = None, _words(error)
    mode = ask("nvmlDeviceGetMigMode")
    power = [ask(question) for question in ("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerUsage")]
    instances = _nvml_instances(nvml, handle) if mode and mode[0] else ()
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    return SeenGpu(
        index=index,
        name=name,
        vendor=VENDOR,
        uuid=_text(ask("nvmlDeviceGetUUID")),
        bus_id=_text(getattr(ask("nvmlDeviceGetPciInfo"), "busId", None)),
        power_cap_watts=None if power[0] is None else power[0] / 1000,
        power_watts=None if power[1] is None else power[1] / 1000,
        temperature_celsius=_nvml_temperature(nvml, handle),
        pcie=Pcie(
            ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            ask("nvmlDeviceGetCurrPcieLinkWidth"),
            ask("nvmlDeviceGetMaxPcieLinkWidth"),
        ),
        mig_enabled=bool(mode[0]) if mode else None,
        mig_pending=bool(mode[1]) if mode else None,
        instances=instances,
        processes=_nvml_processes(nvml, handle),
        trouble=trouble,
        **_nvml_memory(nvml, handle, alone=trouble is None),
        **abilities((int(capability[0]), int(capability[1])) if capability else None),
    )


def _nvml_memory(nvml: Any, handle: Any, *, alone: bool) -> dict[str, Any]:
    """Memory as fields of `SeenGpu`: the second version of the question tells the driver's own share apart."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=version) if version else None
    memory = memory or _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return _hosts_memory() if alone and _is_unified(nvml, handle) else {}
    total, free = int(memory.total), int(memory.free)
    reserved = getattr(memory, "reserved", None)
    used = getattr(memory, "used", total - free - (reserved or 0))
    return {"total_bytes": total, "used_bytes": int(used), "free_bytes": free, "reserved_bytes": reserved}


def _is_unified(nvml: Any, handle: Any) -> bool:
    """Whether the GPU has no memory of its own: the question is not supported, while the GPU itself answers."""
    try:
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except getattr(nvml, "NVMLError_NotSupported", ()):
        return True
    except Exception:
        return False
    return False


def _hosts_memory() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    used = int(memory.total - memory.available)
    return {"total_bytes": int(memory.total), "used_bytes": used, "free_bytes": int(memory.available), "unified": True}


def _nvml_temperature(nvml: Any, handle: Any) -> int | None:
    """Degrees Celsius; newer packages have a new question and will drop the old one with CUDA 14."""
    for question in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"):
        degrees = _ask(nvml, question, handle, _SENSOR_GPU)
        if degrees is not None:
            return int(degrees)
    return None


def _nvml_processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    """Processes with compute or graphics on it, each once; None where the driver lists none to this user."""
    lists = [_ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
    if all(found is None for found in lists):
        return None
    used: dict[int, int | None] = {}
    for item in (item for found in lists for item in found or ()):
        before, now = used.get(int(item.pid)), item.usedGpuMemory
        used[int(item.pid)] = max(before or 0, int(now)) if now is not None else before
    return tuple(
        GpuProcess(pid, process_name(pid, _text(_ask(nvml, "nvmlSystemGetProcessName", pid))), held,
                   _accounted(nvml, handle, pid))
        for pid, held in sorted(used.items())
    )  # fmt: skip


def _accounted(nvml: Any, handle: Any, pid: int) -> int | None:
    """The most that a process held, where an administrator switched the driver's accounting on."""
    if not _ask(nvml, "nvmlDeviceGetAccountingMode", handle):
        return None
    stats = _ask(nvml, "nvmlDeviceGetAccountingStats", handle, pid)
    return int(stats.maxMemoryUsage) or None if stats is not None else None


def _nvml_instances(nvml: Any, handle: Any) -> tuple[Instance, ...]:
    found = []
    for place in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if instance is None:  # no instance at that place
            continue
        name = _text(_ask(nvml, "nvmlDeviceGetName", instance)) or ""
        memory = _nvml_memory(nvml, instance, alone=False)
        found.append(
            Instance(
                uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", instance)) or "",
                profile=name.partition(" MIG ")[2],
                total_bytes=memory.get("total_bytes"),
                used_bytes=memory.get("used_bytes"),
                free_bytes=memory.get("free_bytes"),
                processes=_nvml_processes(nvml, instance),
            )
        )
    return tuple(found)


def _nvml_topology(nvml: Any, handles: dict[int, Any]) -> Topology:
    indices = tuple(handles)
    joined = {index: _nvlinks(nvml, handles[index]) for index in indices}
    buses = {index: _bus(_ask(nvml, "nvmlDeviceGetPciInfo", handles[index])) for index in indices}

    def link(one: int, other: int) -> str:
        if one == other:
            return "X"
        direct = joined[one][buses[other]] if buses[other] else 0
        lanes = direct or min(joined[one][_SWITCH], joined[other][_SWITCH])
        if lanes:
            return f"NV{lanes}"
        level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
        return _SAME_BOARD if level == 0 else _LEVELS.get(level, "n/a")

    def peer(one: int, other: int) -> bool | None:
        if one == other:
            return None
        status = _ask(nvml, "nvmlDeviceGetP2PStatus", handles[one], handles[other], _P2P_READ)
        return None if status is None else status == _P2P_OK

    return _matrix(indices, link, peer)


_SWITCH = "switch"


def _nvlinks(nvml: Any, handle: Any) -> Counter[str]:
    """Active NVLinks of a GPU by the bus of what they lead to; those to a switch together."""
    found: Counter[str] = Counter()
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:  # beyond the last link, or a GPU without any
            break
        if not state:
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = _bus(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        found[_SWITCH if kind == _LINK_TO_SWITCH else remote] += 1
    return found


def _bus(info: Any) -> str:
    """Bus, device and function in one spelling: some drivers write eight digits of the domain, some four."""
    text = (_text(getattr(info, "busId", None)) or "").lower()
    return text[-12:]


def _matrix(
    indices: tuple[int, ...], link: Callable[[int, int], str], peer: Callable[[int, int], bool | None]
) -> Topology:
    return Topology(
        indices,
        tuple(tuple(link(one, other) for other in indices) for one in indices),
        tuple(tuple(peer(one, other) for other in indices) for one in indices),
    )


# --- nvidia-smi -------------------------------------------------------------------------------------------------------

_FIELDS = (
    "index,uuid,name,pci.bus_id,memory.total,memory.used,memory.free,power.limit,power.draw,temperature.gpu,"
    "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,mig.mode.current,"
    "mig.mode.pending,driver_version"
)


def through_smi(known: Sequence[Gpu], *, topology: bool = True) -> Seen | None:
    """What nvidia-smi tells; None where it shows no GPU.

    Args:
        known: the GPUs that detection found, whose compute capability the detailed answers leave out, and which stand
            in where no detailed answer can be read.
    """
    questions = [("-q", "-x"), *([("topo", "-m"), ("topo", "-p2p", "r")] if topology else [])]
    detailed, *joined = answers_of("nvidia-smi", *questions)
    seen = _smi_xml(detailed, known) or _smi_fields(known) or _smi_known(known)
    if seen is None or len(joined) < 2 or len(seen.gpus) < 2:
        return seen
    matrix = _smi_topology(joined[0], joined[1], tuple(gpu.index for gpu in seen.gpus))
    return Seen(seen.gpus, seen.source, seen.driver, seen.driver_cuda, matrix)


def _capability(known: Sequence[Gpu], index: int) -> tuple[int, int] | None:
    return next((gpu.capability for gpu in known if gpu.index == index), None)


def _smi_xml(text: str, known: Sequence[Gpu]) -> Seen | None:
    start = text.find("<nvidia_smi_log")
    try:
        root = ElementTree.fromstring(text[start:]) if start >= 0 else None
    except ElementTree.ParseError:
        return None
    nodes = root.findall("gpu") if root is not None else []
    if root is None or not nodes:
        return None
    gpus = tuple(_smi_gpu(node, index, _capability(known, index)) for index, node in enumerate(nodes))
    return Seen(gpus, "nvidia-smi", _said(root, "driver_version"), _said(root, "cuda_version"))


def _said(node: ElementTree.Element, *paths: str) -> str | None:
    """The first of several elements that says something: their places changed with drivers."""
    for path in paths:
        text = (node.findtext(path) or "").strip()
        if text and not re.fullmatch(r"\[?(N/A|Unknown Error|Not Supported|Requested functionality.*)\]?", text):
            return text
    return None


def _smi_gpu(node: ElementTree.Element, index: int, capability: tuple[int, int] | None) -> SeenGpu:
    memory = {name: size(_said(node, f"fb_memory_usage/{name}")) for name in ("total", "used", "free", "reserved")}
    readings = ("gpu_power_readings", "power_readings")
    limits = [f"{place}/{name}" for name in ("current_power_limit", "power_limit", "enforced_power_limit")
              for place in readings]  # fmt: skip
    draws = [f"{place}/{name}" for name in ("instant_power_draw", "average_power_draw", "power_draw")
             for place in readings]  # fmt: skip
    link = "pci/pci_gpu_link_info"
    mode, pending = _said(node, "mig_mode/current_mig"), _said(node, "mig_mode/pending_mig")
    return SeenGpu(
        index=index,
        name=_said(node, "product_name"),
        vendor=VENDOR,
        uuid=_said(node, "uuid"),
        bus_id=_said(node, "pci/pci_bus_id") or node.get("id"),
        total_bytes=memory["total"],
        used_bytes=memory["used"],
        free_bytes=memory["free"],
        reserved_bytes=memory["reserved"],
        power_cap_watts=number(_said(node, *limits)),
        power_watts=number(_said(node, *draws)),
        temperature_celsius=whole(_said(node, "temperature/gpu_temp")),
        pcie=Pcie(
            whole(_said(node, f"{link}/pcie_gen/current_link_gen")),
            whole(_said(node, f"{link}/pcie_gen/max_link_gen")),
            whole(_said(node, f"{link}/link_widths/current_link_width")),
            whole(_said(node, f"{link}/link_widths/max_link_width")),
        ),
        mig_enabled=mode == "Enabled" if mode else None,
        mig_pending=pending == "Enabled" if pending else None,
        instances=tuple(_smi_instance(item) for item in node.findall("mig_devices/mig_device")),
        processes=_smi_processes(node),
        **abilities(capability),
    )


def _smi_instance(node: ElementTree.Element) -> Instance:
    total, used, free = (size(_said(node, f"fb_memory_usage/{name}")) for name in ("total", "used", "free"))
    place = "/".join(_said(node, name) or "?" for name in ("gpu_instance_id", "compute_instance_id"))
    return Instance(_said(node, "uuid") or "", f"instance {place}", total, used, free)


def _smi_processes(node: ElementTree.Element) -> tuple[GpuProcess, ...] | None:
    place = node.find("processes")
    if place is None or (place.text or "").strip() == "N/A":
        return None
    found = []
    for item in place.findall("process_info"):
        pid = whole(_said(item, "pid"))
        if pid is not None:
            name = process_name(pid, _said(item, "process_name"))
            found.append(GpuProcess(pid, name, size(_said(item, "used_memory"))))
    return tuple(found)


def _smi_fields(known: Sequence[Gpu]) -> Seen | None:
    """From `--query-gpu`, where the XML cannot be read."""
    listed = answer_of("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in listed.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS.split(",")) and row[0].isdigit()]
    if not rows:
        return None
    return Seen(tuple(_row_gpu(row, known) for row in rows), "nvidia-smi", rows[0][-1] or None)


def _row_gpu(row: Sequence[str], known: Sequence[Gpu]) -> SeenGpu:
    def mode(text: str) -> bool | None:
        return text == "Enabled" if text in ("Enabled", "Disabled") else None

    index = int(row[0])
    return SeenGpu(
        index=index,
        name=row[2],
        vendor=VENDOR,
        uuid=row[1],
        bus_id=row[3],
        total_bytes=size(row[4]),
        used_bytes=size(row[5]),
        free_bytes=size(row[6]),
        power_cap_watts=number(row[7]),
        power_watts=number(row[8]),
        temperature_celsius=whole(row[9]),
        pcie=Pcie(*(whole(text) for text in row[10:14])),
        mig_enabled=mode(row[14]),
        mig_pending=mode(row[15]),
        **abilities(_capability(known, index)),
    )


def _smi_known(known: Sequence[Gpu]) -> Seen | None:
    """What detection itself found, which asks nvidia-smi less than this module does."""
    gpus = tuple(
        SeenGpu(
            gpu.index,
            gpu.name,
            VENDOR,
            total_bytes=gpu.total_bytes,
            used_bytes=None if gpu.free_bytes is None else gpu.total_bytes - gpu.free_bytes,
            free_bytes=gpu.free_bytes,
            **abilities(gpu.capability),
        )
        for gpu in known
    )
    return Seen(gpus, "nvidia-smi") if gpus else None


def _smi_topology(matrix: str, peers: str, indices: tuple[int, ...]) -> Topology | None:
    links, readable = _smi_matrix(matrix), _smi_matrix(peers)
    if not links:
        return None

    def peer(one: int, other: int) -> bool | None:
        said = readable.get((one, other))
        return None if said is None or one == other else said == "OK"

    return _matrix(indices, lambda one, other: "X" if one == other else links.get((one, other), "n/a"), peer)


def _smi_matrix(text: str) -> dict[tuple[int, int], str]:
    """Cells between GPUs of a matrix that `nvidia-smi topo` prints; its header is underlined on purpose."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for words in (line.split() for line in lines):
        numbers = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d{1,4}", word)]
        if not columns and len(numbers) > 1:
            columns = numbers
        elif columns and len(numbers) == 1 and words[0] == f"GPU{numbers[0]}":
            found |= {(numbers[0], column): cell for column, cell in zip(columns, words[1:], strict=False)}
    return found
