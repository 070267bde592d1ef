"""How fast this machine's host starts kernels and sends bytes to a card, as it was measured: one
entry for each kind of device, in the cache beside the record of runs."""

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sft_play.files import atomic, cache_dir

HOST_SPEED_FILE = "host_speed.json"


@dataclass(frozen=True)
class HostSpeed:
    """Seconds of the host for an operator of a backward pass, with the device that it started
    kernels on, and who measured it on which day; bytes per second from pinned RAM to the device.
    0: not measured."""

    device: str
    operator_s: float
    measured_by: str
    date: str
    bus_bytes_per_s: float = 0.0


_SPEEDS_ADAPTER = TypeAdapter(dict[str, HostSpeed])


def save_host_speed(
    device: str, operator_s: float = 0.0, *, measured_by: str, bus_bytes_per_s: float = 0.0
) -> None:
    """Keep what was measured of the host or of the bus today, beside what is known of the other; a
    cache that cannot be written keeps none."""
    is_host_measured = 0 < operator_s < 1  # not by a clock that stood still
    if not is_host_measured and not bus_bytes_per_s:
        return
    today = datetime.now(UTC).date().isoformat()
    speeds = load_host_speeds()
    known = speeds.get(device, HostSpeed(device, 0.0, measured_by, today))
    if is_host_measured:
        known = replace(known, operator_s=operator_s, measured_by=measured_by, date=today)
    speeds[device] = replace(known, bus_bytes_per_s=bus_bytes_per_s or known.bus_bytes_per_s)
    with contextlib.suppress(OSError):
        text = json.dumps({name: asdict(one) for name, one in speeds.items()}, indent=1)
        atomic.write(cache_dir() / HOST_SPEED_FILE, text + "\n")


def load_host_speeds(folder: Path | None = None) -> dict[str, HostSpeed]:
    """The newest measurements by device, of this machine's cache or of another folder."""
    with contextlib.suppress(OSError, ValidationError):
        speeds = _SPEEDS_ADAPTER.validate_json(
            ((folder or cache_dir()) / HOST_SPEED_FILE).read_bytes()
        )
        return {name: speed for name, speed in speeds.items() if 0 <= speed.operator_s < 1}
    return {}
