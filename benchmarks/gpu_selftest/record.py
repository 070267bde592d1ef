"""The record of a self-test: its parts as they come, in one JSON file, and the page that a person can send."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sft_play.errors import ConfigError
from sft_play.log import escape_control, one_line
from sft_play.machine.software import COMPUTE_PACKAGES
from sft_play.runs.folder import installed_versions, write_json, write_text
from sft_play.text import GIB

PartStatus = Literal["pass", "fail", "skipped"]
# The reason of a part that the next start with the same OUT runs.
DEFERRED_REASON = "out of time; make gpu-selftest with the same OUT continues it"
STATUS_WORDS = {"pass": "PASS", "fail": "FAIL", "skipped": "SKIP"}


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
    def line(self) -> str:
        return f"{STATUS_WORDS[self.status]}  {self.name:<34} {one_line(self.reason, limit=400)}"


def judged_part(name: str, problems: list[str], reason: str, **figures: Any) -> Part:
    """Build a part that fails with its problems, or passes with the reason."""
    return Part(name, "fail" if problems else "pass", "; ".join(problems) or reason, **figures)


@dataclass
class SelftestRecord:
    """All parts of a self-test by name, in the file that they are written to after each."""

    path: Path
    machine: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=installed_versions)
    is_done: bool = False

    @property
    def logs(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-logs")

    @property
    def page(self) -> Path:
        return self.path.with_name(f"{self.path.stem}.txt")

    @property
    def ok(self) -> bool:
        statuses = {part.status for part in self.parts.values()}
        return "fail" not in statuses and "pass" in statuses

    def add(self, part: Part) -> None:
        self.parts[part.name] = part
        self.write()

    def as_json(self) -> dict[str, Any]:
        is_deferred = any(part.reason == DEFERRED_REASON for part in self.parts.values())
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "ok": self.ok,
            "finished": self.is_done and not is_deferred, "machine": self.machine, "versions": self.versions,
            "parts": [asdict(part) for part in self.parts.values()],
        }  # fmt: skip

    def write(self) -> None:
        """Write the file atomically. Raises ConfigError if it cannot be written."""
        try:
            write_json(self.path.resolve(), self.as_json())
        except OSError as error:
            raise ConfigError(f"OUT={one_line(str(self.path))} cannot be written: {error.strerror}") from None

    def result_lines(self) -> list[str]:
        count = {status: sum(part.status == status for part in self.parts.values()) for status in STATUS_WORDS}
        lines = [f"{count['pass']} parts pass, {count['fail']} fail, {count['skipped']} are left out; {self.path}"]
        if any(part.reason == DEFERRED_REASON for part in self.parts.values()):
            lines.append(f"The same command with OUT={self.path} continues with what there was no time for")
        failed = [part for part in self.parts.values() if part.status == "fail"]
        if failed:
            files = f"{self.path.name}, {self.page.name} and its log"
            lines.append(f"Report each part that fails in the project's issue tracker, with {files}:")
        device = self.machine["gpus"][0]["name"] if self.machine["gpus"] else "the CPU"
        return lines + [f"  gpu-selftest: {part.name} fails on {device} ({part.log or 'no log'})" for part in failed]

    def write_page(self) -> None:
        """Write the text report: the machine, a line for every part, the summary."""
        gpus = [gpu["name"] for gpu in self.machine["gpus"]]
        machine = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
        cores, ram = self.machine["cpu_cores"], self.machine["ram_bytes"] / GIB
        versions = ", ".join(f"{name} {self.versions[name]}" for name in COMPUTE_PACKAGES if self.versions.get(name))
        lines = [
            f"gpu-selftest of {self.as_json()['date']}",
            f"{machine}; {self.machine['cpu_name']}, {cores} cores, {ram:.0f} GiB",
            f"sft_play {self.versions['sft_play']}, Python {self.versions['python']}, {versions}", "",
            *(part.line for part in self.parts.values()), "", *self.result_lines(),
        ]  # fmt: skip
        write_text(self.page, "\n".join(lines) + "\n")


def open_record(path: Path, machine: Mapping[str, Any]) -> SelftestRecord:
    """Open the record at `path`, and write it.

    The parts of an earlier start that was interrupted on the same machine with the same versions are kept. Raises
    ConfigError if the file is another command's, or cannot be written.
    """
    record = SelftestRecord(path, dict(machine))
    if path.exists() and not path.is_file():
        raise ConfigError(f"OUT={one_line(str(path))} is not a file; name one, such as OUT=selftest.json")
    if path.exists():
        earlier = _read_earlier_record(path)
        is_same = _identity(earlier["machine"]) == _identity(record.machine)
        if is_same and earlier["versions"] == record.versions and not earlier.get("finished"):
            parts = [Part(**part) for part in earlier["parts"]]
            record.parts = {part.name: part for part in parts if part.status != "skipped"}
    record.write()
    try:
        record.logs.mkdir(exist_ok=True)
    except OSError as error:
        logs = one_line(str(record.logs))
        raise ConfigError(f"{logs}, for the logs beside OUT=, cannot be created: {error.strerror}") from None
    return record


def _read_earlier_record(path: Path) -> dict[str, Any]:
    """Read what an earlier self-test has written; raises ConfigError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if all({"name", "status", "reason"} <= set(part) for part in data["parts"]) and data["machine"]:
            return {"versions": None, **data}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"OUT={escape_control(str(path))} exists and is not a result of gpu-selftest: name another file, or remove it"
    )


def _identity(machine: Mapping[str, Any]) -> list[Any]:
    """What identifies a machine: names, not the memory that is free now."""
    return [[gpu["name"] for gpu in machine["gpus"]], machine["cpu_name"], machine["cpu_cores"]]
