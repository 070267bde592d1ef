"""A part of the self-test and the record of all parts: the results, kept in one file as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sft_play.errors import ConfigError
from sft_play.log import escape_control, one_line
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import installed_versions

PartStatus = Literal["pass", "fail", "skipped"]
DEFERRED_REASON = "out of time; make gpu-selftest with the same OUT continues it"
"""The reason of a part that a later start of the same self-test runs."""


@dataclass(frozen=True)
class Part:
    """One part: its status, the reason, the figures of both sides (bytes, tokens per second, names), seconds, its
    log."""

    name: str
    status: PartStatus
    reason: str
    predicted: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    seconds: float = 0.0
    log: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether a later start of the same self-test runs it."""
        return self.status == "skipped" and self.reason == DEFERRED_REASON


@dataclass
class SelftestRecord:
    """All parts of a self-test by name, in the file that they are written to after each."""

    path: Path
    machine: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=installed_versions)
    is_done: bool = False
    seconds: float = 0.0

    @property
    def logs(self) -> Path:
        """The folder of the parts' logs."""
        return self.path.with_name(f"{self.path.stem}-logs")

    @property
    def page(self) -> Path:
        """The file of the text report."""
        return self.path.with_name(f"{self.path.stem}.txt")

    @property
    def failed_parts(self) -> list[Part]:
        """The parts that failed."""
        return [part for part in self.parts.values() if part.status == "fail"]

    @property
    def ok(self) -> bool:
        """Whether parts were run, and none failed."""
        return not self.failed_parts and any(part.status == "pass" for part in self.parts.values())

    def add(self, part: Part) -> None:
        """Keep a part and write the file."""
        self.parts[part.name] = part
        self.write()

    def as_json(self) -> dict[str, Any]:
        """`machine`, `versions`, `date`, `ok`, `finished` and the parts."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "ok": self.ok,
            "finished": self.is_done and not any(part.is_open for part in self.parts.values()),
            "machine": self.machine,
            "versions": self.versions,
            "parts": [asdict(part) for part in self.parts.values()],
        }

    def write(self) -> None:
        """Write the file atomically; raises ConfigError where it cannot be written."""
        try:
            write_json(self.path.resolve(), self.as_json())
        except OSError as error:
            raise ConfigError(f"OUT={one_line(str(self.path))} cannot be written: {error.strerror}") from None

    def write_page(self, lines: list[str]) -> None:
        """Write the text report."""
        write_text(self.page, "\n".join(lines) + "\n")


def open_record(path: Path, machine: Mapping[str, Any]) -> SelftestRecord:
    """The record at `path`: that of an earlier start on this machine that was interrupted, else a new one, written.

    Raises:
        ConfigError: the file is another's, or cannot be written.
    """
    record = SelftestRecord(path, dict(machine))
    if path.exists() and not path.is_file():
        path_kind = "a folder" if path.is_dir() else "not a regular file"
        raise ConfigError(f"OUT={one_line(str(path))} is {path_kind}; name a file, such as OUT=selftest.json")
    if path.exists():
        earlier = _read_earlier_record(path)
        is_same_machine = (
            _machine_identity(earlier["machine"]) == _machine_identity(record.machine)
            and earlier["versions"] == record.versions
        )
        if is_same_machine and not earlier.get("finished"):
            parts = [Part(**part) for part in earlier["parts"]]
            record.parts = {part.name: part for part in parts if part.status != "skipped"}  # those are tried again
    record.write()
    try:
        record.logs.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{one_line(str(record.logs))}, for the logs beside OUT=, cannot be created: "
                          f"{error.strerror}") \
            from None  # fmt: skip
    return record


def _read_earlier_record(path: Path) -> dict[str, Any]:
    """What an earlier self-test has written; raises ConfigError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if all({"name", "status", "reason"} <= set(part) for part in data["parts"]) and data["machine"]:
            return {"versions": None, **data}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"OUT={escape_control(str(path))} exists and is not a result of gpu-selftest: name another file, or remove it"
    )


def _machine_identity(machine: Mapping[str, Any]) -> list[Any]:
    """What identifies a machine: names, not the memory that is free now."""
    return [[gpu["name"] for gpu in machine["gpus"]], machine["cpu_name"], machine["cpu_cores"]]
