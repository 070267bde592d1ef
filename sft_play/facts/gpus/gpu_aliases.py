"""Machines as people say them: `A100x4`, `2 4090`, `p4d`, in the grammar of `machine_spec`; and what is refused with a
word of its own, because the nearest name of the catalogue would be another machine."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.facts.gpus.gpu_catalog import CATALOG_ENTRIES, find_catalog_entries
from sft_play.log import one_line

_COUNT_PREFIX = r"((?:[0-9]+\s*[xX*×]\s*){0,2})"
_COUNT_SUFFIX = re.compile(r"(.+?)\s*[xX*×:]\s*([0-9]{1,5})")
_SPACED_COUNT = re.compile(r"(?:[xX*×]\s*)?([0-9]{1,4})\s*[xX*×]?\s+(.+)")
_MEMORY_SIZE = re.compile(r"([0-9]{1,4})\s*(?:GB|GiB|G)\s*(?:of\s+)?(?:v?ram|gpu|card|memory|laptop)?", re.IGNORECASE)
_APPLE_DEVICES = re.compile(r"(apple\b.*|mac(book)?\b.*|m[1-9]( ?(pro|max|ultra))?( .*)?)", re.IGNORECASE)
_UNSUPPORTED_DEVICES = re.compile(
    r".*\b(tpu|gaudi|trainium|inferentia|ascend|npu|arc|iris|igpu|jetson|strix halo|ryzen ai)\b.*", re.IGNORECASE
)


def normalize_machine_text(text: str) -> tuple[str, str]:
    """The text in the grammar of `machine_spec`, and a note where it was read as another. Raises HardwareError for a
    size of memory, or a device that no run uses."""
    head, comma, options = text.partition(",")
    match = re.fullmatch(_COUNT_PREFIX + r"(.+)", head.strip())
    is_gpu_name = (
        match is not None
        and not re.search(r"[*×:]", match[2])
        and (find_catalog_entries(match[2].strip()) or find_catalog_entries(head))
    )
    if match is None or is_gpu_name or "mem" in options:
        return text, ""
    counts, name = match[1], match[2].strip()
    alias = _find_cloud_machine(name)
    if alias is None and not counts:
        alias = _move_count_first(name)
    if alias is not None:
        return f"{counts}{alias}{comma}{options}", f"{one_line(name)} is read as {alias}"
    _refuse_unsupported(name, text)
    return text, ""


def _move_count_first(name: str) -> str | None:
    """A count behind the name, or before it without a sign, where the rest is a GPU: `GTX 1080` has none."""
    suffix_match, spaced_match = _COUNT_SUFFIX.fullmatch(name), _SPACED_COUNT.fullmatch(name)
    if suffix_match and find_catalog_entries(suffix_match[1]):
        return f"{suffix_match[2]}x{suffix_match[1]}"
    return f"{spaced_match[1]}x{spaced_match[2]}" if spaced_match and find_catalog_entries(spaced_match[2]) else None


@functools.cache
def _cloud_machines() -> list[tuple[str, str]]:
    path = Path(__file__).with_name("cloud_machines.json")
    return [(pattern, machine) for pattern, machine in json.loads(path.read_text(encoding="utf-8"))["machines"]]


def _find_cloud_machine(name: str) -> str | None:
    normalized = re.sub(r"^(ml\.|standard_|(google |free )(?=colab))", "", name.lower().strip())
    for pattern, machine in _cloud_machines():
        if match := re.fullmatch(pattern, normalized):
            return machine.replace("{1}", ((match[1] or "") if match.groups() else "").upper())
    return None


def _refuse_unsupported(name: str, text: str) -> None:
    prefix = f"HARDWARE={one_line(text)}"
    cpu_hint = "HARDWARE=cpu,ram=32GiB,cores=8 plans a run on the CPU"
    if size := _MEMORY_SIZE.fullmatch(name):
        cards = [entry.name for entry in CATALOG_ENTRIES if entry.box_gb == int(size[1])]
        examples = f": {', '.join(cards[:8])}" if cards else ""
        raise HardwareError(
            f"{prefix} is a size, and speed differs by card; name the card{examples}, or any other with mem="
        )
    if _APPLE_DEVICES.fullmatch(name):
        raise HardwareError(f"{prefix}: no run uses Apple's GPUs; {cpu_hint}")
    if _UNSUPPORTED_DEVICES.fullmatch(name):
        raise HardwareError(f"{prefix}: no run uses this device, only GPUs of NVIDIA, and CPUs; {cpu_hint}")
