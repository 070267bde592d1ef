"""What every report of a benchmark begins with."""

from datetime import UTC, datetime
from typing import Any

from sft_play.machine.hardware import detect_hardware
from sft_play.runs.folder import installed_versions


def report_header() -> dict[str, Any]:
    """When and where something was measured: date, machine, versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": detect_hardware().as_json(),
        "versions": installed_versions(),
    }
