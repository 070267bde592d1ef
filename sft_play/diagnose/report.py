"""The page of the doctor: every finding on a line, what to do about it, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sft_play.findings import Finding

_NAME_WIDTH = 22


@dataclass(frozen=True)
class Report:
    """All findings of one look at this machine, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that FAIL."""
        return tuple(finding for finding in self.findings if finding.verdict == "FAIL")

    @property
    def ok(self) -> bool:
        """Whether nothing FAILs."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """One JSON object: `ok`, `elapsed_s` and the findings."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "findings": [asdict(item) for item in self.findings]}

    def lines(self) -> list[str]:
        """The table, and the verdict."""
        table = [line for finding in self.findings for line in _lines(finding)]
        return [*table, f"{self._sum()} ({self.elapsed_s:.0f} s)"]

    def _sum(self) -> str:
        counts = {
            verdict: sum(item.verdict == verdict for item in self.findings) for verdict in ("PASS", "WARN", "SKIP")
        }
        rest = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        if self.ok:
            return f"Nothing FAILs: {rest}"
        failures = f"{len(self.failures)} FAIL: {listed(item.name for item in self.failures)}"
        return f"{failures}; {rest}" if rest else failures


def _lines(finding: Finding) -> list[str]:
    """The row of the table; below it the remedy and the sources of a problem."""
    lines = [f"{finding.verdict}  {finding.name:<{_NAME_WIDTH}} {finding.found}"]
    if finding.remedy:
        lines.append(f"      {'':<{_NAME_WIDTH}} remedy: {finding.remedy}")
    return [*lines, *(f"      {'':<{_NAME_WIDTH}} see {source}" for source in finding.sources)]


def listed(words: Any) -> str:
    """Each word once, with commas."""
    return ", ".join(dict.fromkeys(str(word) for word in words))


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"
