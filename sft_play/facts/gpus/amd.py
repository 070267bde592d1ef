"""AMD's GPUs, as the program amd-smi of ROCm 6 and 7 prints them in JSON.

No AMD GPU has run this. Names of the keys: the AMD SMI command line reference; those that differ between releases are
looked for under several.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from sft_play.facts.ask import answers_of, number, size, whole
from sft_play.facts.gpus.gpu_catalog import AMD_BF16
from sft_play.facts.gpus.seen import Pcie, Seen, SeenGpu

VENDOR = "AMD"
_FP8 = re.compile(r"gfx(94[0-2]|95\d|12\d\d)")
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by GT/s."""
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The first chooses among all GPUs; the second, or without it the third, among those that it leaves (ROCm
documentation, "GPU isolation techniques"; HIP's environment variables)."""


def visible(listed: tuple[int, ...], environment: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    """The GPUs that a ROCm process sees, in its order: each with its number among those that `HIP_VISIBLE_DEVICES` and
    `CUDA_VISIBLE_DEVICES` count, and its number in `listed`."""
    first, second, third = VISIBLE
    left = numbered(environment[first], listed) if first in environment else listed
    places = tuple(range(len(left)))
    chosen = environment.get(second, environment.get(third))
    return tuple((place, left[place]) for place in (places if chosen is None else numbered(chosen, places)))


def numbered(variable: str, listed: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs that a list of numbers names; as in CUDA, it is read up to the first entry that names no GPU."""
    chosen: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        if not re.fullmatch(r"[0-9]{1,9}", entry) or int(entry) not in listed or int(entry) in chosen:
            break
        chosen.append(int(entry))
    return tuple(chosen)


def see() -> Seen | None:
    """What amd-smi reports; None where it shows no GPU."""
    static, metric = map(_gpu_list, answers_of("amd-smi", ("static", "--json"), ("metric", "--json")))
    if not static:
        return None
    # two commands list the same GPUs, and are matched by number and not by place
    by_number = {whole(_field(item, "gpu")): item for item in metric}
    gpus = tuple(_gpu(index, item, by_number.get(whole(_field(item, "gpu")), {})) for index, item in enumerate(static))
    driver = _field(_field(static[0], "driver"), "version", "driver_version")
    return Seen(gpus, "amd-smi", str(driver) if driver else None)


def _gpu_list(text: str) -> list[Mapping[str, Any]]:
    """One mapping a GPU; warnings may stand before the JSON, and newer releases wrap the list in `gpu_data`."""
    start = min((place for place in (text.find("{"), text.find("[")) if place >= 0), default=-1)
    answer = None
    with contextlib.suppress(ValueError):
        answer = json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    listed = answer.get("gpu_data") if isinstance(answer, Mapping) else answer
    return [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []


def _field(answer: Any, *names: str) -> Any:
    """The first of several keys of an answer that says something."""
    for name in names:
        value = answer.get(name) if isinstance(answer, Mapping) else None
        if value not in (None, "", "N/A"):
            return value
    return None


def _gpu(index: int, static: Mapping[str, Any], metric: Mapping[str, Any]) -> SeenGpu:
    asic, bus, limit = (_field(static, name) for name in ("asic", "bus", "limit"))
    memory, heat, link = (_field(metric, name) for name in ("mem_usage", "temperature", "pcie"))
    total = size(_field(memory, "total_vram") or _field(_field(static, "vram"), "size"))
    used = size(_field(memory, "used_vram"))
    name = _field(asic, "market_name")
    version = str(_field(asic, "target_graphics_version") or "").lower()
    version = f"gfx{version}" if re.fullmatch(r"[0-9a-f]{3,4}", version) else version  # some releases leave gfx out
    architecture = version if version.startswith("gfx") else None
    return SeenGpu(
        index=index,
        name=str(name) if name else None,
        vendor=VENDOR,
        bus_id=_field(bus, "bdf"),
        total_bytes=total,
        used_bytes=used,
        free_bytes=None if total is None or used is None else total - used,
        compute_capability=architecture,
        bf16=AMD_BF16.match(architecture) is not None if architecture else None,
        fp8=_FP8.match(architecture) is not None if architecture else None,
        power_cap_watts=number(_field(limit, "socket_power", "socket_power_limit", "max_power")),
        power_watts=number(_field(_field(metric, "power"), "socket_power")),
        temperature_celsius=whole(_field(heat, "edge") or _field(heat, "hotspot")),
        pcie=Pcie(
            _GENERATIONS.get(number(_field(link, "speed")) or 0),
            _GENERATIONS.get(number(_field(bus, "max_pcie_speed")) or 0),
            whole(_field(link, "width")),
            whole(_field(bus, "max_pcie_width")),
        ),
    )
