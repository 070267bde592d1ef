"""AMD's GPUs: through the Python package amdsmi, else what rocm-smi or amd-smi print as JSON.

Names of the package's functions and keys: the AMD SMI Python API reference (ROCm 6 and 7). Names of rocm-smi's keys:
`rocm_smi.py` of github.com/ROCm/rocm_smi_lib; they differ between releases, so that each is looked for under several.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.facts.ask import answer_of, answers_of, number, size, whole
from sft_play.facts.gpu_catalog import AMD_BF16
from sft_play.facts.seen import GpuProcess, Pcie, Seen, SeenGpu, Topology, process_name

VENDOR = "AMD"
_FP8 = re.compile(r"gfx(94[0-2]|95\d|12\d\d)")
_MICRO = 10_000
"""A power cap above this is microwatts: releases of the package differ."""
_MILLI = 1_000
"""A temperature above this is thousandths of a degree."""
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by GT/s."""


VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The first chooses among all GPUs; the second, or without it the third, among those that it leaves (ROCm
documentation, "GPU isolation techniques"; HIP's environment variables)."""


def through_any() -> Seen | None:
    """What the first of amdsmi, rocm-smi and amd-smi tells; None where none shows a GPU."""
    return through_package() or through_rocm_smi() or through_amd_smi()


def visible(there: tuple[int, ...], environment: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    """The GPUs that a ROCm process sees, in its order: each with its number among those that `HIP_VISIBLE_DEVICES` and
    `CUDA_VISIBLE_DEVICES` count, and its number in `there`."""
    first, second, third = VISIBLE
    left = numbered(environment[first], there) if first in environment else there
    places = tuple(range(len(left)))
    chosen = environment.get(second, environment.get(third))
    return tuple((place, left[place]) for place in (places if chosen is None else numbered(chosen, places)))


def numbered(variable: str, there: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs that a list of numbers names; as in CUDA, it is read up to the first entry that names no GPU."""
    chosen: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        if not re.fullmatch(r"[0-9]{1,9}", entry) or int(entry) not in there or int(entry) in chosen:
            break
        chosen.append(int(entry))
    return tuple(chosen)


def _abilities(architecture: str | None) -> dict[str, Any]:
    if architecture is None:
        return {}
    return {
        "compute_capability": architecture,
        "bf16": AMD_BF16.match(architecture) is not None,
        "fp8": _FP8.match(architecture) is not None,
    }


# --- the package ------------------------------------------------------------------------------------------------------


def through_package() -> Seen | None:
    """What the package tells; None where it or the driver is not there."""
    try:
        amdsmi: Any = importlib.import_module("amdsmi")  # comes with ROCm, and is none of our requirements
        amdsmi.amdsmi_init()
    except Exception:  # the package raises its own tree, and KeyError where the library is missing
        return None
    try:
        handles = list(amdsmi.amdsmi_get_processor_handles())
        gpus = tuple(_package_gpu(amdsmi, index, handle) for index, handle in enumerate(handles))
        driver = _field(_ask(amdsmi, "amdsmi_get_gpu_driver_info", handles[0]), "driver_version") if handles else None
        return Seen(gpus, "amdsmi", driver) if gpus else None
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            amdsmi.amdsmi_shut_down()


def _ask(smi: Any, name: str, *arguments: Any) -> Any:
    try:
        return getattr(smi, name)(*arguments)
    except Exception:  # not supported by this GPU, or not by this release
        return None


def _field(answer: Any, *names: str) -> Any:
    """The first of several keys of an answer that says something."""
    for name in names:
        value = answer.get(name) if isinstance(answer, Mapping) else None
        if value not in (None, "", "N/A"):
            return value
    return None


def _package_gpu(smi: Any, index: int, handle: Any) -> SeenGpu:
    asic = _ask(smi, "amdsmi_get_gpu_asic_info", handle)
    memory = _ask(smi, "amdsmi_get_gpu_vram_usage", handle)  # in units of 2**20 bytes
    total, used = size(_field(memory, "vram_total")), size(_field(memory, "vram_used"))
    link = _ask(smi, "amdsmi_get_pcie_info", handle)
    static, metric = _field(link, "pcie_static"), _field(link, "pcie_metric")
    power = _ask(smi, "amdsmi_get_power_info", handle)
    name = _field(asic, "market_name")
    return SeenGpu(
        index=index,
        name=str(name) if name else None,
        vendor=VENDOR,
        uuid=_ask(smi, "amdsmi_get_gpu_device_uuid", handle),
        bus_id=_ask(smi, "amdsmi_get_gpu_device_bdf", handle),
        total_bytes=total,
        used_bytes=used,
        free_bytes=None if total is None or used is None else total - used,
        power_cap_watts=_watts(_field(_ask(smi, "amdsmi_get_power_cap_info", handle), "power_cap")),
        power_watts=number(_field(power, "current_socket_power", "average_socket_power", "socket_power")),
        temperature_celsius=_package_temperature(smi, handle),
        pcie=Pcie(
            _generation(_field(metric, "pcie_speed")),
            whole(_field(static, "pcie_interface_version")) or _generation(_field(static, "max_pcie_speed")),
            whole(_field(metric, "pcie_width")),
            whole(_field(static, "max_pcie_width")),
        ),
        processes=_package_processes(_ask(smi, "amdsmi_get_gpu_process_list", handle)),
        **_abilities(_architecture(_field(asic, "target_graphics_version"))),
    )


def _architecture(version: Any) -> str | None:
    """`gfx942` of `gfx942` or of the number 0x942 in decimal digits."""
    if version is None:
        return None
    text = str(version).lower()
    return text if text.startswith("gfx") else f"gfx{text}" if re.fullmatch(r"[0-9a-f]{3,4}", text) else None


def _watts(value: Any) -> float | None:
    found = number(value)
    return found / 1e6 if found is not None and found > _MICRO else found


def _generation(speed: Any) -> int | None:
    """The PCIe generation of GT/s, or of MT/s."""
    found = number(speed)
    if found is None:
        return None
    return _GENERATIONS.get(found / 1000 if found > 100 else found)


def _package_temperature(smi: Any, handle: Any) -> int | None:
    """Of the edge, or of the hot spot where the edge has no sensor (MI300)."""
    kinds, metrics = getattr(smi, "AmdSmiTemperatureType", None), getattr(smi, "AmdSmiTemperatureMetric", None)
    for kind in ("EDGE", "HOTSPOT", "JUNCTION"):
        sensor, current = getattr(kinds, kind, None), getattr(metrics, "CURRENT", None)
        found = number(_ask(smi, "amdsmi_get_temp_metric", handle, sensor, current)) if sensor is not None else None
        if found:
            return round(found / 1000 if found > _MILLI else found)
    return None


def _package_processes(listed: Any) -> tuple[GpuProcess, ...] | None:
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return None
    found = []
    for item in listed:
        pid = whole(_field(item, "pid"))
        if pid is not None:
            held = _field(_field(item, "memory_usage"), "vram_mem")
            used = whole(held if held is not None else _field(item, "mem"))
            found.append(GpuProcess(pid, process_name(pid, str(_field(item, "name") or "")), used))
    return tuple(found)


# --- rocm-smi ---------------------------------------------------------------------------------------------------------

_ROCM_QUESTIONS = (
    ("--showproductname", "--json"),
    ("--showmeminfo", "vram", "--json"),
    ("--showtemp", "--showmaxpower", "--showpower", "--showbus", "--showuniqueid", "--showdriverversion", "--json"),
    ("--showpids", "--json"),
    ("--showtopotype", "--json"),
)


def through_rocm_smi() -> Seen | None:
    """What rocm-smi tells; None where it shows no GPU."""
    answers = [_json_of(text) for text in answers_of("rocm-smi", *_ROCM_QUESTIONS)]
    cards: dict[int, dict[str, Any]] = {}
    for answer in answers[:3]:
        for name, fields in answer.items() if isinstance(answer, Mapping) else ():
            match = re.fullmatch(r"card(\d{1,4})", str(name))
            if match and isinstance(fields, Mapping):
                cards.setdefault(int(match[1]), {}).update({str(key).lower(): value for key, value in fields.items()})
    if not cards:
        return None
    system = _system(answers)
    # its list is of all GPUs together, and does not say which of them a process uses
    processes = _rocm_processes(system) if len(cards) == 1 else None
    gpus = tuple(_rocm_gpu(index, cards[index], processes) for index in sorted(cards))
    driver = _field(system, "Driver version")
    topology = _rocm_topology(system, tuple(sorted(cards))) if len(cards) > 1 else None
    return Seen(gpus, "rocm-smi", str(driver) if driver else None, topology=topology)


def _json_of(text: str) -> Any:
    """The JSON of an answer; warnings may stand before it."""
    start = min((place for place in (text.find("{"), text.find("[")) if place >= 0), default=-1)
    with contextlib.suppress(ValueError):
        return json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    return None


def _system(answers: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for answer in answers:
        part = answer.get("system") if isinstance(answer, Mapping) else None
        found |= dict(part) if isinstance(part, Mapping) else {}
    return found


def _rocm_gpu(index: int, card: Mapping[str, Any], processes: tuple[GpuProcess, ...] | None) -> SeenGpu:
    total = size(_field(card, "vram total memory (b)"), unit="b")
    used = size(_field(card, "vram total used memory (b)"), unit="b")
    temperatures = [f"temperature (sensor {sensor}) (c)" for sensor in ("edge", "junction", "hotspot", "memory")]
    powers = [f"{kind} graphics package power (w)" for kind in ("current socket", "average")]
    name = _field(card, "card series", "card model", "device name")
    return SeenGpu(
        index=index,
        name=str(name) if name else None,
        vendor=VENDOR,
        uuid=_field(card, "unique id"),
        bus_id=_field(card, "pci bus"),
        total_bytes=total,
        used_bytes=used,
        free_bytes=None if total is None or used is None else total - used,
        power_cap_watts=number(_field(card, "max graphics package power (w)")),
        power_watts=number(_field(card, *powers)),
        temperature_celsius=whole(_field(card, *temperatures)),
        processes=processes,
        **_abilities(_architecture(_field(card, "gfx version"))),
    )


def _rocm_processes(system: Mapping[str, Any]) -> tuple[GpuProcess, ...] | None:
    """Processes with memory of any GPU: `PID1234: "name, GPUs, VRAM bytes, …"`."""
    found = []
    for key, value in system.items():
        match = re.fullmatch(r"PID(\d{1,9})", str(key))
        if match:
            name, _, rest = str(value).partition(",")
            parts = [part.strip() for part in rest.split(",")]
            found.append(
                GpuProcess(
                    int(match[1]),
                    process_name(int(match[1]), name.strip()),
                    size(parts[1], unit="b") if len(parts) > 1 else None,
                )
            )
    return tuple(found) or None


def _rocm_topology(system: Mapping[str, Any], indices: tuple[int, ...]) -> Topology | None:
    """`Link type between DRM devices 0 and 1`: XGMI or PCIE."""
    cells: dict[tuple[int, int], str] = {}
    for key, value in system.items():
        match = re.search(r"Link type between DRM devices (\d{1,4}) and (\d{1,4})", str(key))
        if match:
            one, other = int(match[1]), int(match[2])
            cells[one, other] = cells[other, one] = str(value)
    if not cells:
        return None
    return Topology(
        indices,
        tuple(tuple("X" if one == other else cells.get((one, other), "n/a") for other in indices) for one in indices),
        tuple(tuple(None for _ in indices) for _ in indices),
    )


# --- amd-smi ----------------------------------------------------------------------------------------------------------


def through_amd_smi() -> Seen | None:
    """What the program amd-smi tells; None where it shows no GPU."""
    static = _gpu_list(_json_of(answer_of("amd-smi", "static", "--json")))
    if not static:
        return None
    metric = {
        whole(_field(item, "gpu")): item for item in _gpu_list(_json_of(answer_of("amd-smi", "metric", "--json")))
    }
    gpus = tuple(
        _program_gpu(index, item, metric.get(whole(_field(item, "gpu")), {})) for index, item in enumerate(static)
    )
    driver = _field(_field(static[0], "driver"), "version", "driver_version")
    return Seen(gpus, "amd-smi", str(driver) if driver else None)


def _gpu_list(answer: Any) -> list[Mapping[str, Any]]:
    """One mapping a GPU; newer releases wrap the list in `gpu_data`."""
    listed = answer.get("gpu_data") if isinstance(answer, Mapping) else answer
    return [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []


def _program_gpu(index: int, static: Mapping[str, Any], metric: Mapping[str, Any]) -> SeenGpu:
    asic, bus, limit = (_field(static, name) for name in ("asic", "bus", "limit"))
    memory, heat = _field(metric, "mem_usage"), _field(metric, "temperature")
    total = size(_field(memory, "total_vram") or _field(_field(static, "vram"), "size"))
    used = size(_field(memory, "used_vram"))
    power, link = _field(metric, "power"), _field(metric, "pcie")
    name = _field(asic, "market_name")
    return SeenGpu(
        index=index,
        name=str(name) if name else None,
        vendor=VENDOR,
        bus_id=_field(bus, "bdf"),
        total_bytes=total,
        used_bytes=used,
        free_bytes=None if total is None or used is None else total - used,
        power_cap_watts=_watts(_field(limit, "socket_power", "socket_power_limit", "max_power")),
        power_watts=number(_field(power, "socket_power")),
        temperature_celsius=whole(_field(heat, "edge") or _field(heat, "hotspot")),
        pcie=Pcie(
            _generation(_field(link, "speed")),
            _generation(_field(bus, "max_pcie_speed")),
            whole(_field(link, "width")),
            whole(_field(bus, "max_pcie_width")),
        ),
        **_abilities(_architecture(_field(asic, "target_graphics_version"))),
    )
