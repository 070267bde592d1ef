"""GPUs by name: the memory that the driver reports, and the compute capability.

Memory is what `nvidia-smi` prints as total, not the figure on the box; each entry says where that was read.
Capabilities are those of NVIDIA's list (https://developer.nvidia.com/cuda-gpus).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class CatalogEntry:
    """A GPU: its usual name, total memory in bytes, compute capability, and where the memory figure was read."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    source: str


_MODAL = "nvidia-smi totals listed in github.com/modal-labs/modal-client/pull/2797"

_ENTRIES = (
    CatalogEntry("T4", 15_360 * MIB, (7, 5), _MODAL),
    CatalogEntry("L4", 23_034 * MIB, (8, 9), _MODAL),
    CatalogEntry("A10", 23_028 * MIB, (8, 6), _MODAL),
    CatalogEntry("L40S", 46_068 * MIB, (8, 9), _MODAL),
    CatalogEntry("A100-40GB", 40_960 * MIB, (8, 0), _MODAL),
    CatalogEntry("A100-80GB", 81_920 * MIB, (8, 0), _MODAL),
    CatalogEntry("H100", 81_559 * MIB, (9, 0), _MODAL),
    CatalogEntry("H200", 143_771 * MIB, (9, 0), "nvidia-smi of an H200, driver 580.159.03, 2026-10-27"),
    CatalogEntry(
        "RTX3060", 12_288 * MIB, (8, 6), "nvidia-smi in github.com/geerlingguy/raspberry-pi-pcie-devices/issues/790"
    ),
    CatalogEntry("RTX3090", 24_576 * MIB, (8, 6), "nvidia-smi in github.com/noonghunna/club-3090/issues/1128"),
    CatalogEntry("RTX4090", 24_564 * MIB, (8, 9), "nvidia-smi in github.com/RLinf/RLinf/issues/255"),
    CatalogEntry("RTX5090", 32_607 * MIB, (12, 0), "nvidia-smi in github.com/noonghunna/club-3090/issues/1261"),
)

CATALOG: dict[str, CatalogEntry] = {entry.name.lower().replace("-", ""): entry for entry in _ENTRIES}
"""By name in lower case without separators: `a10080gb`, `rtx4090`."""


def nearest(name: str) -> list[str]:
    """Names of the catalogue that look like `name`, all of them where none does."""
    names = [entry.name for entry in _ENTRIES]
    return difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
