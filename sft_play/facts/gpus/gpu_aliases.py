"""Machines as people say them: `A100x4`, `2 4090`, `p4d`, in the grammar of `machine_spec`; and what is refused with a
word of its own, because the nearest name of the catalogue would be another machine."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.facts.gpus.gpu_catalog import ENTRIES, find
from sft_play.log import one_line

_COUNTS = r"((?:[0-9]+\s*[xX*×]\s*){0,2})"
_BEHIND = re.compile(r"(.+?)\s*[xX*×:]\s*([0-9]{1,5})")
_BEFORE = re.compile(r"(?:[xX*×]\s*)?([0-9]{1,4})\s*[xX*×]?\s+(.+)")
_SIZE = re.compile(r"([0-9]{1,4})\s*(?:GB|GiB|G)\s*(?:of\s+)?(?:v?ram|gpu|card|memory|laptop)?", re.IGNORECASE)
_APPLE = re.compile(r"(apple\b.*|mac(book)?\b.*|m[1-9]( ?(pro|max|ultra))?( .*)?)", re.IGNORECASE)
_OTHERS = re.compile(
    r".*\b(tpu|gaudi|trainium|inferentia|ascend|npu|arc|iris|igpu|jetson|strix halo|ryzen ai)\b.*", re.IGNORECASE
)


def grammatical(text: str) -> tuple[str, str]:
    """The text in the grammar of `machine_spec`, and a note where it was read as another. Raises HardwareError for a
    size of memory, or a device that no run uses."""
    head, comma, options = text.partition(",")
    match = re.fullmatch(_COUNTS + r"(.+)", head.strip())
    is_name = match is not None and not re.search(r"[*×:]", match[2]) and (find(match[2].strip()) or find(head))
    if match is None or is_name or "mem" in options:
        return text, ""
    counts, name = match[1], match[2].strip()
    read = _machine(name)
    if read is None and not counts:
        read = _counted(name)
    if read is not None:
        return f"{counts}{read}{comma}{options}", f"{one_line(name)} is read as {read}"
    _refuse(name, text)
    return text, ""


def _counted(name: str) -> str | None:
    """A count behind the name, or before it without a sign, where the rest is a GPU: `GTX 1080` has none."""
    behind, before = _BEHIND.fullmatch(name), _BEFORE.fullmatch(name)
    if behind and find(behind[1]):
        return f"{behind[2]}x{behind[1]}"
    return f"{before[1]}x{before[2]}" if before and find(before[2]) else None


@functools.cache
def _machines() -> list[tuple[str, str]]:
    path = Path(__file__).with_name("cloud_machines.json")
    return [(pattern, machine) for pattern, machine in json.loads(path.read_text(encoding="utf-8"))["machines"]]


def _machine(name: str) -> str | None:
    said = re.sub(r"^(ml\.|standard_|(google |free )(?=colab))", "", name.lower().strip())
    for pattern, machine in _machines():
        if match := re.fullmatch(pattern, said):
            return machine.replace("{1}", ((match[1] or "") if match.groups() else "").upper())
    return None


def _refuse(name: str, text: str) -> None:
    where = f"HARDWARE={one_line(text)}"
    on_cpu = "HARDWARE=cpu,ram=32GiB,cores=8 plans a run on the CPU"
    if size := _SIZE.fullmatch(name):
        cards = [entry.name for entry in ENTRIES if entry.box_gb == int(size[1])]
        known = f": {', '.join(cards[:8])}" if cards else ""
        raise HardwareError(
            f"{where} is a size, and speed differs by card; name the card{known}, or any other with mem="
        )
    if _APPLE.fullmatch(name):
        raise HardwareError(f"{where}: no run uses Apple's GPUs; {on_cpu}")
    if _OTHERS.fullmatch(name):
        raise HardwareError(f"{where}: no run uses this device, only GPUs of NVIDIA, and CPUs; {on_cpu}")
