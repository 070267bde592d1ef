"""The page of `make check`: every finding with its state, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.findings import Finding
from sft_play.log import escape_control

STATES = {"PASS": "ok", "WARN": "warning", "FAIL": "problem", "SKIP": "skipped"}
"""What the page calls each verdict; skipped: not looked at, and `what` says why."""
_NAME_WIDTH = 18


@dataclass(frozen=True)
class Report:
    """Everything that was checked, in the order of the page."""

    config: Path
    checks: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings do not count."""
        return not any(check.verdict == "FAIL" for check in self.checks)

    def lines(self) -> list[str]:
        """The page and its verdict."""
        page = [line for check in self.checks for line in finding_lines(check)]
        problems, warnings, well = (
            sum(check.verdict == one for check in self.checks) for one in ("FAIL", "WARN", "PASS")
        )
        counts = [f"{problems} problem{'s' if problems != 1 else ''}"] if problems else []
        counts += [f"{warnings} warning{'s' if warnings != 1 else ''}"] if warnings else []
        is_tried = any((check.name, check.verdict) == ("memory plan", "WARN") for check in self.checks)
        verdict = "Not ready" if not self.ok else "Predicted not to fit" if is_tried else "Ready to train"
        counts.append(f"{well} ok")
        return [f"Check of {self.config}:", *page, f"{verdict}: {', '.join(counts)} ({self.elapsed_s:.0f} s)"]

    def as_json(self) -> dict[str, Any]:
        """`ok`, `elapsed_s` and the checks."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "checks": [_as_json(check) for check in self.checks]}


def finding_lines(finding: Finding) -> list[str]:
    """A finding on the page: its line, and below it what else was found and what to do."""
    # A problem is in capitals on the page, to be seen among the other lines; JSON has the word of STATES.
    state = "PROBLEM" if finding.verdict == "FAIL" else STATES[finding.verdict]
    first, *more = escape_control(finding.found).split("\n")
    margin = " " * (9 + _NAME_WIDTH)
    lines = [f"{state:<8} {finding.name:<{_NAME_WIDTH}} {first}", *(f"{margin} {line}" for line in more)]
    if finding.remedy:
        lines.append(f"{margin} do: {escape_control(finding.remedy)}")
    return [*lines, *(f"{margin} see {source}" for source in finding.sources)]


def _as_json(finding: Finding) -> dict[str, Any]:
    data = {"name": finding.name, "state": STATES[finding.verdict], "what": finding.found, "do": finding.remedy}
    return data | ({"see": list(finding.sources)} if finding.sources else {})
