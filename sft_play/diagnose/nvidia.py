"""NVIDIA's GPUs in detail through nvidia-smi, where NVML's Python package does not answer (`facts.gpus.nvml`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from sft_play.facts.ask import answer_of, answers_of, number, size, whole
from sft_play.facts.gpus.gpu import Gpu
from sft_play.facts.gpus.nvml import VENDOR
from sft_play.facts.gpus.seen import (
    GpuProcess,
    Instance,
    Pcie,
    Seen,
    SeenGpu,
    Topology,
    abilities,
    matrix,
    process_name,
)

_FIELDS = (
    "index,uuid,name,pci.bus_id,memory.total,memory.used,memory.free,power.limit,power.draw,temperature.gpu,"
    "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,mig.mode.current,"
    "mig.mode.pending,driver_version"
)


def through_smi(known: Sequence[Gpu], *, topology: bool = True) -> Seen | None:
    """The GPUs as nvidia-smi reports them; None where it shows none.

    Args:
        known: the detected GPUs. Their compute capability is not in the detailed answers, and they are used alone
            where no detailed answer can be read.
    """
    questions = [("-q", "-x"), *([("topo", "-m"), ("topo", "-p2p", "r")] if topology else [])]
    detailed, *joined = answers_of("nvidia-smi", *questions)
    seen = _smi_xml(detailed, known) or _smi_fields(known) or _detected(known)
    if seen is None or len(joined) < 2 or len(seen.gpus) < 2:
        return seen
    links = _smi_topology(joined[0], joined[1], tuple(gpu.index for gpu in seen.gpus))
    return Seen(seen.gpus, seen.source, seen.driver, seen.driver_cuda, links)


def _capability(known: Sequence[Gpu], index: int) -> tuple[int, int] | None:
    return next((gpu.capability for gpu in known if gpu.index == index), None)


def _smi_xml(text: str, known: Sequence[Gpu]) -> Seen | None:
    start = text.find("<nvidia_smi_log")  # warnings of the driver may stand before the XML
    try:
        root = ElementTree.fromstring(text[start:]) if start >= 0 else None
    except ElementTree.ParseError:
        return None
    nodes = root.findall("gpu") if root is not None else []
    if root is None or not nodes:
        return None
    gpus = tuple(_smi_gpu(node, index, _capability(known, index)) for index, node in enumerate(nodes))
    return Seen(gpus, "nvidia-smi", _text(root, "driver_version"), _text(root, "cuda_version"))


def _text(node: ElementTree.Element, *paths: str) -> str | None:
    """The text of the first of several elements that has one: their names changed with drivers."""
    for path in paths:
        text = (node.findtext(path) or "").strip()
        if text and not re.fullmatch(r"\[?(N/A|Unknown Error|Not Supported|Requested functionality.*)\]?", text):
            return text
    return None


def _smi_gpu(node: ElementTree.Element, index: int, capability: tuple[int, int] | None) -> SeenGpu:
    memory = {name: size(_text(node, f"fb_memory_usage/{name}")) for name in ("total", "used", "free", "reserved")}
    readings = ("gpu_power_readings", "power_readings")
    limits = [f"{place}/{name}" for name in ("current_power_limit", "power_limit", "enforced_power_limit")
              for place in readings]  # fmt: skip
    draws = [f"{place}/{name}" for name in ("instant_power_draw", "average_power_draw", "power_draw")
             for place in readings]  # fmt: skip
    link = "pci/pci_gpu_link_info"
    mode, pending = _text(node, "mig_mode/current_mig"), _text(node, "mig_mode/pending_mig")
    return SeenGpu(
        index=index,
        name=_text(node, "product_name"),
        vendor=VENDOR,
        uuid=_text(node, "uuid"),
        bus_id=_text(node, "pci/pci_bus_id") or node.get("id"),
        total_bytes=memory["total"],
        used_bytes=memory["used"],
        free_bytes=memory["free"],
        reserved_bytes=memory["reserved"],
        power_cap_watts=number(_text(node, *limits)),
        power_watts=number(_text(node, *draws)),
        temperature_celsius=whole(_text(node, "temperature/gpu_temp")),
        pcie=Pcie(
            whole(_text(node, f"{link}/pcie_gen/current_link_gen")),
            whole(_text(node, f"{link}/pcie_gen/max_link_gen")),
            whole(_text(node, f"{link}/link_widths/current_link_width")),
            whole(_text(node, f"{link}/link_widths/max_link_width")),
        ),
        mig_enabled=mode == "Enabled" if mode else None,
        mig_pending=pending == "Enabled" if pending else None,
        instances=tuple(_smi_instance(item) for item in node.findall("mig_devices/mig_device")),
        processes=_smi_processes(node),
        **abilities(capability),
    )


def _smi_instance(node: ElementTree.Element) -> Instance:
    total, used, free = (size(_text(node, f"fb_memory_usage/{name}")) for name in ("total", "used", "free"))
    ids = "/".join(_text(node, name) or "?" for name in ("gpu_instance_id", "compute_instance_id"))
    return Instance(_text(node, "uuid") or "", f"instance {ids}", total, used, free)


def _smi_processes(node: ElementTree.Element) -> tuple[GpuProcess, ...] | None:
    listed = node.find("processes")
    if listed is None or (listed.text or "").strip() == "N/A":
        return None
    processes = []
    for item in listed.findall("process_info"):
        pid = whole(_text(item, "pid"))
        if pid is not None:
            name = process_name(pid, _text(item, "process_name"))
            processes.append(GpuProcess(pid, name, size(_text(item, "used_memory"))))
    return tuple(processes)


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


def _detected(known: Sequence[Gpu]) -> Seen | None:
    """The detected GPUs alone: detection asks nvidia-smi for less than this module does."""
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


def _smi_topology(joined: str, peers: str, indices: tuple[int, ...]) -> Topology | None:
    links, readable = _smi_matrix(joined), _smi_matrix(peers)
    if not links:
        return None

    def peer(one: int, other: int) -> bool | None:
        state = readable.get((one, other))
        return None if state is None or one == other else state == "OK"

    return matrix(indices, lambda one, other: "X" if one == other else links.get((one, other), "n/a"), peer)


def _smi_matrix(text: str) -> dict[tuple[int, int], str]:
    """Cells between GPUs of a matrix that `nvidia-smi topo` prints, without the codes that underline its header."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    columns: list[int] = []
    cells: dict[tuple[int, int], str] = {}
    for words in (line.split() for line in lines):
        numbers = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d{1,4}", word)]
        if not columns and len(numbers) > 1:
            columns = numbers
        elif columns and len(numbers) == 1 and words[0] == f"GPU{numbers[0]}":
            cells |= {(numbers[0], column): cell for column, cell in zip(columns, words[1:], strict=False)}
    return cells
