"""What earlier runs measured on this machine, kept beside the predictions, and what later plans learn from it.

One JSON line per finished run in the cache folder. The memory of a plan is only ever corrected upwards; its speed is
multiplied by the median of what was measured over what the roofline said.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sft_play.cache import cache_dir

FILE = "measured.jsonl"
KEPT = 200
"""Lines that the record keeps, the newest."""
LOOKED_AT = 10
"""Runs of a class that a plan learns from, the newest."""


@dataclass(frozen=True)
class Measured:
    """A finished run: bytes of one rank, tokens per second over all; `device` is the GPU's name or `cpu`."""

    device: str
    mode: str
    layout: str
    model: str
    micro_batch: int
    seq_len: int
    predicted_allocated: int
    measured_allocated: int
    predicted_reserved: int
    measured_reserved: int
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    versions: str
    finished: str


@dataclass(frozen=True)
class Correction:
    """What earlier runs on the same device in the same mode say: factors on reserved memory (>= 1) and on speed."""

    runs: int = 0
    memory: float = 1.0
    speed: float = 1.0
    speed_measured: bool = False

    @property
    def reason(self) -> str | None:
        """What a plan says of it; None without a run."""
        if not self.runs:
            return None
        memory = (
            f"used {self.memory - 1:.1%} more memory than predicted, which is added here" if self.memory > 1 else ""
        )
        memory = memory or "stayed within their predicted memory"
        return (
            f"{self.runs} earlier run{'s' if self.runs > 1 else ''} of this kind on this machine {memory}; their "
            + (f"speed was {self.speed:.2f} of the roofline, and so is this one's")
        )


def record_path() -> Path:
    """The file of the record."""
    return cache_dir() / FILE


def add(measured: Measured) -> None:
    """Append a run; a cache that cannot be written is no reason to fail a run that is done."""
    path = record_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [*_lines(path)[-(KEPT - 1) :], json.dumps(asdict(measured))]
        aside = path.with_suffix(".building")
        aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        aside.replace(path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def load() -> list[Measured]:
    """The runs that are recorded, oldest first; lines that are not readable are left out."""
    found = []
    for line in _lines(record_path()):
        with contextlib.suppress(ValueError, TypeError):
            data = json.loads(line)
            if isinstance(data, Mapping):
                found.append(Measured(**data))
    return found


def correction(runs: Iterable[Measured], *, device: str, mode: str, layout: str) -> Correction:
    """What the newest runs of the same kind say: on memory those of this layout, or of any where none ran in it; on
    speed those of all layouts, so that what was measured of one does not make another look faster."""
    alike = [run for run in runs if (run.device, run.mode) == (device, mode)]
    same = ([run for run in alike if run.layout == layout] or alike)[-LOOKED_AT:]
    memory = [run.measured_reserved / run.predicted_reserved for run in same if run.predicted_reserved > 0]
    speed = [
        run.measured_tokens_per_s / run.predicted_tokens_per_s
        for run in alike[-LOOKED_AT:]
        if run.predicted_tokens_per_s > 0 and run.measured_tokens_per_s > 0
    ]
    factor = statistics.median(speed) if speed else 1.0
    return Correction(len(same), max([1.0, *memory]), factor, speed_measured=bool(speed))
