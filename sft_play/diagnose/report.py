"""The pages of `make check` and `make doctor`: every finding, what to do about it, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sft_play.diagnose.text import each_once, lines_of
from sft_play.findings import Finding
from sft_play.log import escape_control

STATES = {"PASS": "ok", "WARN": "warning", "FAIL": "problem", "SKIP": "skipped"}
"""What `make check` calls each verdict; skipped: not looked at, and the finding says why."""
_SHOWN = {**STATES, "FAIL": "PROBLEM"}
"""The same on its page: a problem is in capitals, to be seen among the other lines."""


def finding_lines(findings: Sequence[Finding], words: Mapping[str, str] = _SHOWN) -> list[str]:
    """Each finding's verdict, name and text; below the text what to do, and the threads that it rests on."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for column in range(3):
        rows.add_column(no_wrap=True, overflow="ignore", min_width=(0, 18, 0)[column])
    for finding in findings:
        remedy = [f"do: {finding.remedy}"] if finding.remedy else []
        text = "\n".join([finding.found, *remedy, *(f"see {source}" for source in finding.sources)])
        rows.add_row(words.get(finding.verdict, finding.verdict), escape_control(finding.name), escape_control(text))
    return lines_of(rows, width=None)


@dataclass(frozen=True)
class DoctorReport:
    """All findings of one look at this machine, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that FAIL."""
        return _of(self.findings, "FAIL")

    @property
    def ok(self) -> bool:
        """Whether nothing FAILs."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """One JSON object: `ok`, `elapsed_s` and the findings."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "findings": [asdict(item) for item in self.findings]}

    def lines(self) -> list[str]:
        """The table, and the verdict."""
        counts = {verdict: len(_of(self.findings, verdict)) for verdict in ("PASS", "WARN", "SKIP")}
        named = f"{len(self.failures)} FAIL: {each_once(item.name for item in self.failures)}; "
        rest = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        verdict = f"{'Nothing FAILs: ' if self.ok else named}{rest}".removesuffix("; ")
        return [*finding_lines(self.findings, {}), f"{verdict} ({self.elapsed_s:.0f} s)"]


@dataclass(frozen=True)
class CheckReport:
    """Everything that was checked of a config, in the order of the page."""

    config: Path
    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings do not count."""
        return not _of(self.findings, "FAIL")

    def lines(self) -> list[str]:
        """The page and its verdict."""
        problems, warnings, well = (len(_of(self.findings, verdict)) for verdict in ("FAIL", "WARN", "PASS"))
        counts = [f"{problems} problem{'s' if problems != 1 else ''}"] if problems else []
        counts += [f"{warnings} warning{'s' if warnings != 1 else ''}"] if warnings else []
        is_tried = any(item.name == "memory plan" for item in _of(self.findings, "WARN"))
        verdict = "Not ready" if not self.ok else "Predicted not to fit" if is_tried else "Ready to train"
        counts.append(f"{well} ok")
        last = f"{verdict}: {', '.join(counts)} ({self.elapsed_s:.0f} s)"
        return [f"Check of {self.config}:", *finding_lines(self.findings), last]

    def as_json(self) -> dict[str, Any]:
        """`ok`, `elapsed_s` and the checks."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "checks": [_as_json(item) for item in self.findings]}


def _of(findings: Sequence[Finding], verdict: str) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.verdict == verdict)


def _as_json(finding: Finding) -> dict[str, Any]:
    data = {"name": finding.name, "state": STATES[finding.verdict], "what": finding.found, "do": finding.remedy}
    return data | ({"see": list(finding.sources)} if finding.sources else {})
